"""What a directory of torch.distributed.checkpoint holds, tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from zerocore.checkpoint.directory import open_catalog
from zerocore.checkpoint.format import METADATA
from zerocore.convert.archive import Archive
from zerocore.convert.entry import Entry, read_runs


class Checkpoint:
    """A checkpoint directory.

    Attributes:
        paths: of each key, the names in the nested dicts that were saved.

    Raises:
        ValueError: if the directory has no metadata.
        RuntimeError: for metadata that cannot be read.
    """

    def __init__(self, directory: Path) -> None:
        path = directory / METADATA
        if not path.is_file():
            raise ValueError(
                f"{directory}: expected a directory that torch.distributed.checkpoint wrote, got "
                f"{'one' if directory.is_dir() else 'no directory'} without the file {METADATA}"
            )
        try:
            self._catalog, _ = open_catalog(directory)
        except ValueError as error:
            raise RuntimeError(str(error)) from error
        self.paths = self._catalog.paths

    def is_tensor(self, key: str) -> bool:
        """Whether a tensor lies under this key; else a pickled value."""
        return key in self._catalog.tensors

    def value(self, key: str) -> Any:
        """The value under a key that holds no tensor.

        Raises:
            RuntimeError: if it cannot be read without running code that the pickle names.
        """
        return self._archive(key).value

    def entry(self, key: str, name: str) -> Entry:
        """The tensor under a key, by another name.

        Raises:
            RuntimeError: if the metadata does not tell where all of it is.
        """
        shape, dtype = tuple(self._catalog.tensors[key].size), self._catalog.tensors[key].dtype
        if (hole := self._catalog.hole(key)) is not None:
            raise RuntimeError(
                f"{self._catalog.path}: expected chunks that make up {key} of shape {list(shape)}, "
                f"got {hole}"
            )
        boxes = sorted(box for box in (_Box(*b) for b in self._catalog.boxes(key)) if box.numel)
        return Entry(name, shape, dtype, partial(self._parts, key, boxes, shape, dtype))

    def _archive(self, key: str, offsets: tuple[int, ...] | None = None) -> Archive:
        directory = self._catalog.path
        place = self._catalog.place(key, offsets)
        if place is None:
            raise RuntimeError(f"{directory}: expected {key} in its metadata, got no place")
        if place.transforms:
            raise RuntimeError(
                f"{directory}: expected plain files, got {key} transformed by "
                f"{list(place.transforms)}; save the checkpoint again without extensions"
            )
        path = directory / place.file
        if not path.is_file():
            raise RuntimeError(f"{path}: expected a file that holds {key}, got none")
        return Archive(path, place.position, place.length)

    def _chunk(self, key: str, box: _Box, dtype: torch.dtype) -> _Chunk:
        archive = self._archive(key, box.offsets)
        saved = archive.value
        if not isinstance(saved, torch.Tensor):
            raise RuntimeError(f"{key}: expected a tensor in its file, got {type(saved).__name__}")
        if (saved.dtype, tuple(saved.shape)) != (dtype, box.sizes):
            raise RuntimeError(
                f"{self._catalog.path}: expected {key} at {list(box.offsets)} with "
                f"{list(box.sizes)} elements of {dtype}, got {list(saved.shape)} of {saved.dtype}"
            )
        return _Chunk(archive, saved)

    def _parts(
        self, key: str, boxes: list[_Box], shape: tuple[int, ...], dtype: torch.dtype, step: int
    ) -> Iterator[torch.Tensor]:
        chunks = [self._chunk(key, box, dtype) for box in boxes]
        runs = [chunk.archive.run(key, chunk.saved) for chunk in chunks]
        if None not in runs and _in_order(boxes, shape):
            yield from read_runs(runs, dtype, step)
            return
        # The chunks are scattered over the tensor: it is put together in memory.
        whole = torch.empty(shape, dtype=dtype)
        for box, chunk in zip(boxes, chunks, strict=True):
            whole[box.slices] = chunk.archive.load(key, chunk.saved)
        yield from whole.view(-1).split(step)


class _Chunk(NamedTuple):
    """A saved part of a tensor."""

    archive: Archive
    saved: torch.Tensor  # on the meta device


class _Box(NamedTuple):
    """Where a chunk lies in its tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.sizes)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box as an index."""
        return tuple(slice(o, o + n) for o, n in zip(self.offsets, self.sizes, strict=True))

    def flat_start(self, shape: tuple[int, ...]) -> int | None:
        """Index of its first element in row-major order; None if it has gaps in that order."""
        outermost = next((i for i, n in enumerate(self.sizes) if n > 1), len(shape))
        if self.sizes[outermost + 1 :] != shape[outermost + 1 :]:
            return None
        start = 0
        for offset, length in zip(self.offsets, shape, strict=True):
            start = start * length + offset
        return start


def _in_order(boxes: list[_Box], shape: tuple[int, ...]) -> bool:
    """Whether the boxes, one after the other, are the tensor in row-major order."""
    end = 0
    for box in boxes:
        if box.flat_start(shape) != end:
            return False
        end += box.numel
    return True
