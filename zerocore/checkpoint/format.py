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
OWN_BUFFERS = ("zerocore", "buffers")  # path of ranks' buffers that are not the first rank's


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


class _Unpickler(pickle.Unpickler):
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


Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes


class Place(NamedTuple):
    """Where something is stored: as it is, unless there are `transforms` of it."""

    file: str
    position: int
    length: int
    transforms: tuple[str, ...]


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
        contents: of its file METADATA.

    Attributes:
        tensors: by key.
        paths: of each key, the names in the nested dicts that were saved. They are in the metadata;
            where they are not, a key is one name.

    Raises:
        ValueError: if that is no metadata of torch.distributed.checkpoint.
    """

    def __init__(self, path: FilePath, contents: bytes) -> None:
        self.path = path
        try:
            metadata: Metadata = _Unpickler(io.BytesIO(contents)).load()
            items, nested = metadata.state_dict_metadata, metadata.planner_data or {}
            self._storage: dict[MetadataIndex, _StorageInfo] = dict(metadata.storage_data)
            self.tensors = {
                key: SavedTensor(what.size, what.properties.dtype)
                for key, what in items.items()
                if isinstance(what, TensorStorageMetadata)
            }
            self.paths: dict[str, Path] = {key: tuple(nested.get(key, (key,))) for key in items}
        except Exception as error:  # a damaged pickle can make it fail in any way
            raise ValueError(
                f"{path / METADATA}: expected the metadata of a checkpoint, got "
                f"{type(error).__name__}: {str(error).partition(chr(10))[0]}; the file is damaged, "
                "or of other software"
            ) from error
        self._items = items

    def keys(self) -> Iterator[str]:
        """Names of all tensors and objects."""
        return iter(self._items)

    def __contains__(self, key: str) -> bool:
        return key in self._items

    def files(self) -> dict[str, int]:
        """The least number of bytes that each file must have."""
        sizes: dict[str, int] = {}
        for info in self._storage.values():
            end = info.offset + info.length
            sizes[info.relative_path] = max(sizes.get(info.relative_path, 0), end)
        return sizes

    def boxes(self, key: str) -> list[Box]:
        """The chunks of a tensor as (offsets, sizes)."""
        return [(tuple(c.offsets), tuple(c.sizes)) for c in self._items[key].chunks]

    def place(self, key: str, offsets: tuple[int, ...] | None = None) -> Place | None:
        """Where the chunk of a tensor, or an object, is stored; None if that is not known."""
        info = self._storage.get(
            MetadataIndex(key, None if offsets is None else torch.Size(offsets))
        )
        if info is None:
            return None
        transforms = tuple(getattr(info, "transform_descriptors", None) or ())
        return Place(info.relative_path, info.offset, info.length, transforms)

    def hole(self, key: str) -> str | None:
        """What is wrong with the chunks of a tensor; None if they are all of it, once."""
        size = tuple(self.tensors[key].size)
        held = 0
        for offsets, sizes in self.boxes(key):
            inside = len(offsets) == len(sizes) == len(size) and all(
                0 <= o and o + s <= n for o, s, n in zip(offsets, sizes, size, strict=True)
            )
            if not inside or self.place(key, offsets) is None:
                return f"a part {list(sizes)} at {list(offsets)} that is not stored"
            held += math.prod(sizes)
        return None if held == math.prod(size) else f"{held} of its {math.prod(size)} elements"

    def reads(self, key: str, local: Iterable[Box]) -> Iterator[Read]:
        """What has to be read for some chunks, (offsets, sizes), of a tensor."""
        wanted = [ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in local]
        what = self._items[key]
        index = {chunk.offsets: i for i, chunk in enumerate(wanted)}
        for item in create_read_items_for_chunk_list(key, what, wanted):
            info = self._storage[item.storage_index]
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
        is_tensor = key in self.tensors
        place = self.place(key, self.boxes(key)[0][0] if is_tensor else None)
        if place is None:
            raise ValueError(f"expected {key!r} in {self.path}, got no place where it is stored")
        with open(self.path / place.file, "rb") as file:
            file.seek(place.position)
            contents = io.BytesIO(file.read(place.length))
        return torch.load(contents, map_location="cpu", weights_only=is_tensor)
