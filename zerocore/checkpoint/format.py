"""The metadata of torch.distributed.checkpoint: written for what ranks have saved, and read."""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path as FilePath
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

Path = tuple[str | int, ...]  # in nested dicts and lists; joined by dots it is a key

METADATA = ".metadata"  # the name of the file


class Saved(NamedTuple):
    """Something in a file.

    Attributes:
        path: of what it is, or is a part of.
        file, position, length: where its bytes are.
        whole, dtype: of the tensor that it is a part of; None for an object.
        offsets, sizes: of the part.
    """

    path: Path
    file: str
    position: int
    length: int
    whole: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    offsets: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()


def key_of(path: Path) -> str:
    """The flat name."""
    return ".".join(map(str, path))


def make_metadata(saved: Iterable[Saved], aliases: Mapping[Path, Path]) -> bytes:
    """The contents of the file METADATA.

    Args:
        saved: what all ranks have written.
        aliases: further names of tensors: they refer to the same bytes.
    """
    described: dict[str, Any] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    paths: dict[str, Path] = {}
    others: dict[Path, list[Path]] = {}
    for alias, path in aliases.items():
        others.setdefault(path, []).append(alias)
    for part in saved:
        info = _StorageInfo(part.file, part.position, part.length)
        for path in (part.path, *others.get(part.path, ())):
            key = key_of(path)
            paths[key] = path
            if part.whole is None:
                described[key] = BytesStorageMetadata()
                storage[MetadataIndex(key)] = info
                continue
            tensor = described.get(key)
            if tensor is None:
                properties = TensorProperties(dtype=part.dtype)
                tensor = TensorStorageMetadata(properties, torch.Size(part.whole), [])
                described[key] = tensor
            offsets = torch.Size(part.offsets)
            tensor.chunks.append(ChunkStorageMetadata(offsets, torch.Size(part.sizes)))
            storage[MetadataIndex(key, offsets)] = info
    metadata = Metadata(described, paths, storage, StorageMeta(), CURRENT_DCP_VERSION)
    return pickle.dumps(metadata)


class SavedTensor(NamedTuple):
    """A tensor of a checkpoint."""

    size: torch.Size
    dtype: torch.dtype


class Read(NamedTuple):
    """A part of a saved chunk that goes to a part of a local one.

    Attributes:
        file, position, length: of the chunk.
        local: index of the local chunk.
        source, target, sizes: the part, in the saved and in the local chunk.
    """

    file: str
    position: int
    length: int
    local: int
    source: tuple[int, ...]
    target: tuple[int, ...]
    sizes: tuple[int, ...]


class Catalog:
    """What a checkpoint has.

    Args:
        path: the directory.
        contents: of its file METADATA, a pickle: of a checkpoint that is trusted.

    Attributes:
        tensors: by key.

    Raises:
        ValueError: if that is no metadata of torch.distributed.checkpoint.
    """

    def __init__(self, path: FilePath, contents: bytes) -> None:
        self.path = path
        try:
            metadata = pickle.loads(contents)
        except Exception as error:
            raise ValueError(f"expected metadata in {path / METADATA}, got {error!r}") from error
        if not isinstance(metadata, Metadata) or metadata.storage_data is None:
            raise ValueError(f"expected metadata in {path / METADATA}, got {type(metadata)}")
        self._metadata = metadata
        self.tensors = {
            key: SavedTensor(what.size, what.properties.dtype)
            for key, what in metadata.state_dict_metadata.items()
            if isinstance(what, TensorStorageMetadata)
        }

    def keys(self) -> Iterator[str]:
        """Names of all tensors and objects."""
        return iter(self._metadata.state_dict_metadata)

    def __contains__(self, key: str) -> bool:
        return key in self._metadata.state_dict_metadata

    def files(self) -> dict[str, int]:
        """The least number of bytes that each file must have."""
        sizes: dict[str, int] = {}
        for info in self._metadata.storage_data.values():
            end = info.offset + info.length
            sizes[info.relative_path] = max(sizes.get(info.relative_path, 0), end)
        return sizes

    def hole(self, key: str) -> str | None:
        """What is wrong with the chunks of a tensor; None if they are all of it, once."""
        what = self._metadata.state_dict_metadata[key]
        numel = math.prod(what.size)
        held = 0
        for chunk in what.chunks:
            inside = all(
                0 <= o and o + s <= n
                for o, s, n in zip(chunk.offsets, chunk.sizes, what.size, strict=True)
            )
            if not inside or MetadataIndex(key, chunk.offsets) not in self._metadata.storage_data:
                return f"a part {tuple(chunk.sizes)} at {tuple(chunk.offsets)} that is not stored"
            held += math.prod(chunk.sizes)
        return None if held == numel else f"{held} of its {numel} elements"

    def reads(
        self, key: str, local: Iterable[tuple[tuple[int, ...], tuple[int, ...]]]
    ) -> Iterator[Read]:
        """What has to be read for some chunks, (offsets, sizes), of a tensor."""
        wanted = [ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in local]
        what = self._metadata.state_dict_metadata[key]
        index = {chunk.offsets: i for i, chunk in enumerate(wanted)}
        for item in create_read_items_for_chunk_list(key, what, wanted):
            info = self._metadata.storage_data[item.storage_index]
            yield Read(
                info.relative_path,
                info.offset,
                info.length,
                index[item.dest_index.offset],
                tuple(item.storage_offsets),
                tuple(item.dest_offsets),
                tuple(item.lengths),
            )

    def read(self, key: str) -> Any:
        """An object (a pickle), or a whole tensor of one chunk, on the CPU.

        Raises:
            OSError, ValueError: if it cannot be read.
        """
        what = self._metadata.state_dict_metadata[key]
        is_tensor = isinstance(what, TensorStorageMetadata)
        index = MetadataIndex(key, what.chunks[0].offsets if is_tensor else None)
        info = self._metadata.storage_data[index]
        with open(self.path / info.relative_path, "rb") as file:
            file.seek(info.offset)
            contents = io.BytesIO(file.read(info.length))
        return torch.load(contents, map_location="cpu", weights_only=is_tensor)
