"""A directory as torch.distributed.checkpoint writes it, from entries."""

from __future__ import annotations

import contextlib
import math
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from zerocore.convert.dcp_reader import METADATA
from zerocore.convert.entry import Entry
from zerocore.convert.files import flush

FILE_BYTES = 1 << 30  # a file ends after so many: ranks that load read several at a time
CHUNK_BYTES = 16 << 20  # of a tensor, saved as one: readers read all of it for any part of it


class Writer:
    """Writes a checkpoint into a folder, complete at the end of a `with` block.

    Not by FileSystemWriter: it holds all tensors of a file until the file is written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._items: dict[str, Any] = {}
        self._paths: dict[str, tuple[str | int, ...]] = {}
        self._storage: dict[MetadataIndex, Any] = {}
        self._files = 0
        self._file: BinaryIO | None = None

    def add(self, path: tuple[str | int, ...], item: Any) -> None:
        """Writes one item.

        Args:
            path: the names, in nested dicts, under which it will be loaded.
            item: an entry, or a plain value.
        """
        key = ".".join(map(str, path))
        self._paths[key] = path
        if not isinstance(item, Entry):
            self._items[key] = BytesStorageMetadata()
            self._save(MetadataIndex(key), item)
            return
        chunks = []
        for offset, part in _rows(item):
            offsets = torch.Size((offset, *[0] * (len(item.shape) - 1))[: len(item.shape)])
            chunks.append(ChunkStorageMetadata(offsets, part.shape))
            self._save(MetadataIndex(key, offsets), part)
        self._items[key] = TensorStorageMetadata(
            TensorProperties(dtype=item.dtype), torch.Size(item.shape), chunks
        )

    def _save(self, index: MetadataIndex, value: Any) -> None:
        if self._file is not None and self._file.tell() >= FILE_BYTES:
            self._close()
        if self._file is None:
            name = f"__0_{self._files}{filesystem.DEFAULT_SUFFIX}"
            self._file = open(self._folder / name, "wb")
            self._files += 1
        begin = self._file.tell()
        torch.save(value, self._file)
        name, length = Path(self._file.name).name, self._file.tell() - begin
        self._storage[index] = filesystem._StorageInfo(name, begin, length)

    def _close(self) -> None:
        if self._file is not None:
            flush(self._file)
            self._file.close()
            self._file = None

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self._finish()
        elif self._file is not None:
            with contextlib.suppress(OSError):  # what its buffer holds may not fit on the disk
                self._file.close()

    def _finish(self) -> None:
        """Writes the metadata: only now is the folder a checkpoint."""
        self._close()
        metadata = Metadata(
            self._items,
            planner_data=self._paths,
            storage_data=self._storage,
            storage_meta=StorageMeta(),
            version=filesystem.CURRENT_DCP_VERSION,
        )
        with open(self._folder / METADATA, "wb") as file:
            pickle.dump(metadata, file)
            flush(file)


def _rows(entry: Entry) -> Iterator[tuple[int, torch.Tensor]]:
    """(first row, tensor) of chunks of whole rows that are small enough to be read at once.

    Readers read a whole chunk for each part of it that they want.
    """
    if entry.numel == 0 or not entry.shape:
        whole = torch.empty(entry.shape, dtype=entry.dtype)
        for part in entry.stream():
            whole = part.view(())
        yield 0, whole
        return
    row = math.prod(entry.shape[1:])
    rows = max(1, CHUNK_BYTES // (row * entry.dtype.itemsize))
    for i, part in enumerate(entry.parts(rows * row)):
        if part.untyped_storage().nbytes() != part.nbytes:
            part = part.clone()  # torch.save would write all of the memory that it is a view of
        yield i * rows, part.view(-1, *entry.shape[1:])
