"""What a directory of torch.distributed.checkpoint holds, tensor by tensor."""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from zerocore.convert.archive import Archive
from zerocore.convert.entry import Entry, read_runs
from zerocore.convert.errors import summary

METADATA = ".metadata"


class _MetadataUnpickler(pickle.Unpickler):
    """Makes the values that metadata consists of, and nothing else: pickles can run any code."""

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name) if "." not in name else None
        own_class = isinstance(found, type) and found.__module__ == module
        if own_class and module.startswith(("torch.distributed.checkpoint.", "pathlib")):
            return found
        if module == "torch" and (found is torch.Size or isinstance(found, torch.dtype)):
            return found
        if (module, name) in (
            ("torch.serialization", "_get_layout"),
            ("collections", "OrderedDict"),
        ):
            return found
        raise pickle.UnpicklingError(f"{module}.{name}, which no such metadata has")


class Checkpoint:
    """A checkpoint directory.

    Attributes:
        paths: of each key, the names in the nested dicts that were saved. They are in the metadata;
            where they are not, a key is one name.

    Raises:
        ValueError: if the directory has no metadata.
        RuntimeError: for metadata that cannot be read.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        path = directory / METADATA
        if not path.is_file():
            raise ValueError(
                f"{directory}: expected a directory that torch.distributed.checkpoint wrote, got "
                f"{'one' if directory.is_dir() else 'no directory'} without the file {METADATA}"
            )
        try:
            with open(path, "rb") as file:
                self._metadata: Metadata = _MetadataUnpickler(file).load()
            items = self._metadata.state_dict_metadata
            self._storage = self._metadata.storage_data
            nested = self._metadata.planner_data or {}
            self.paths: dict[str, tuple[str | int, ...]] = {
                key: tuple(nested.get(key, (key,))) for key in items
            }
        except Exception as error:  # a damaged pickle can make it fail in any way
            raise RuntimeError(
                f"{path}: expected the metadata of a checkpoint, got {summary(error)}; "
                "the file is damaged, or of other software"
            ) from error

    def is_tensor(self, key: str) -> bool:
        """Whether a tensor lies under this key; else a pickled value."""
        return isinstance(self._metadata.state_dict_metadata[key], TensorStorageMetadata)

    def value(self, key: str) -> Any:
        """The value under a key that holds no tensor.

        Raises:
            RuntimeError: if it cannot be read without running code that the pickle names.
        """
        item = self._metadata.state_dict_metadata[key]
        if not isinstance(item, BytesStorageMetadata):
            raise RuntimeError(f"{key}: expected a tensor or a value, got {type(item).__name__}")
        return self._archive(MetadataIndex(key)).value

    def entry(self, key: str, name: str) -> Entry:
        """The tensor under a key, by another name.

        Raises:
            RuntimeError: if the metadata does not tell where all of it is.
        """
        item = self._metadata.state_dict_metadata[key]
        shape, dtype = tuple(item.size), item.properties.dtype
        boxes = [_Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in item.chunks]
        boxes = [box for box in dict.fromkeys(boxes) if box.numel]
        inside = all(box.fits(shape) for box in boxes)
        if not inside or sum(box.numel for box in boxes) != math.prod(shape):
            raise RuntimeError(
                f"{self._directory}: expected chunks that make up {key} of shape {list(shape)}, "
                f"got {[(list(box.offsets), list(box.sizes)) for box in boxes]}"
            )
        boxes.sort()
        return Entry(name, shape, dtype, partial(self._parts, key, boxes, shape, dtype))

    def _archive(self, index: MetadataIndex) -> Archive:
        info = self._storage.get(index)
        if info is None:
            raise RuntimeError(f"{self._directory}: expected {index} in its metadata, got nothing")
        if getattr(info, "transform_descriptors", None):
            raise RuntimeError(
                f"{self._directory}: expected plain files, got {index.fqn} transformed by "
                f"{list(info.transform_descriptors)}; save the checkpoint again without extensions"
            )
        path = self._directory / info.relative_path
        if not path.is_file():
            raise RuntimeError(f"{path}: expected a file that holds {index.fqn}, got none")
        return Archive(path, info.offset, info.length)

    def _chunk(self, key: str, box: _Box, dtype: torch.dtype) -> _Chunk:
        archive = self._archive(MetadataIndex(key, box.offsets))
        saved = archive.value
        if not isinstance(saved, torch.Tensor):
            raise RuntimeError(f"{key}: expected a tensor in its file, got {type(saved).__name__}")
        if (saved.dtype, tuple(saved.shape)) != (dtype, box.sizes):
            raise RuntimeError(
                f"{self._directory}: expected {key} at {list(box.offsets)} with {list(box.sizes)} "
                f"elements of {dtype}, got {list(saved.shape)} of {saved.dtype}"
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

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether it lies in a tensor of this shape."""
        return len(shape) == len(self.offsets) == len(self.sizes) and all(
            0 <= s.start <= s.stop <= n for s, n in zip(self.slices, shape, strict=True)
        )

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
