"""Folders of weights as Hugging Face's from_pretrained reads them, and save_pretrained writes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from zerocore.convert.entry import Entry

SHARD_BYTES = 5_000_000_000  # of a file, unless the user says otherwise

SAFETENSORS, INDEX = "model.safetensors", "model.safetensors.index.json"
TORCH, TORCH_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"


def weight_files(folder: Path) -> list[Path]:
    """The safetensors weights in a folder: index first, since without it shards are not found."""
    found = [folder / INDEX, folder / SAFETENSORS, *sorted(folder.glob("model-*-of-*.safetensors"))]
    return [path for path in found if path.exists()]


def shards(entries: Sequence[Entry], shard_bytes: int) -> dict[str, list[Entry]]:
    """Which entries go into which file: in order, at most `shard_bytes` unless one is larger."""
    groups: list[list[Entry]] = [[]]
    size = 0
    for entry in entries:
        if groups[-1] and size + entry.nbytes > shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(entry)
        size += entry.nbytes
    if len(groups) == 1:
        return {SAFETENSORS: groups[0]}
    count = len(groups)
    return {
        f"model-{i:05d}-of-{count:05d}.safetensors": group
        for i, group in enumerate(groups, start=1)
    }


def index(files: dict[str, list[Entry]]) -> bytes:
    """The text of the index of several files."""
    weight_map = {entry.name: name for name, entries in files.items() for entry in entries}
    total = sum(entry.nbytes for entries in files.values() for entry in entries)
    content = {"metadata": {"total_size": total}, "weight_map": weight_map}
    return (json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


def read_folder(folder: Path, read: Callable[[Path], list[Entry]]) -> list[Entry]:
    """The entries of a folder of weights.

    Args:
        read: gives the entries of a file.

    Raises:
        ValueError: if there are no weights that have a known name.
        RuntimeError: if the index and the files do not agree.
    """
    for name in (SAFETENSORS, TORCH):
        if (folder / name).is_file():
            return read(folder / name)
    for name in (INDEX, TORCH_INDEX):
        if (folder / name).is_file():
            return _read_index(folder / name, read)
    raise ValueError(
        f"{folder}: expected one of {SAFETENSORS}, {INDEX}, {TORCH} and {TORCH_INDEX} in it, got "
        "none"
    )


def _read_index(path: Path, read: Callable[[Path], list[Entry]]) -> list[Entry]:
    try:
        weight_map = json.loads(path.read_bytes())["weight_map"]
        files: dict[str, set[str]] = {}
        for name, file in weight_map.items():
            if Path(file).name != file:
                raise ValueError(f"the file name {file!r}")
            files.setdefault(file, set()).add(name)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise RuntimeError(
            f"{path}: expected the index of a folder of weights, got {error!r}; it is damaged"
        ) from error
    result = []
    for file, names in files.items():
        if not (path.parent / file).is_file():
            raise RuntimeError(f"{path}: expected the file {file} beside it, got none")
        entries = [entry for entry in read(path.parent / file) if entry.name in names]
        missing = sorted(names - {entry.name for entry in entries})
        if missing:
            raise RuntimeError(
                f"{path}: expected {missing[0]} in {file}, got no tensor of this name"
            )
        result += entries
    return result
