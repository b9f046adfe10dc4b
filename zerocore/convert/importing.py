"""Imports weights of other formats into a checkpoint directory."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from zerocore.checkpoint.format import METADATA
from zerocore.convert import dcp_writer, hub, safetensors
from zerocore.convert.archive import Archive
from zerocore.convert.entry import Entry, split
from zerocore.convert.errors import summary
from zerocore.convert.export import MODEL, OPTIMIZER
from zerocore.convert.files import new_folder, require_space
from zerocore.convert.progress import Count, Note, Progress, silent

TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
WRAPPERS = (MODEL, "state_dict", "model_state_dict")  # keys of a model's state among other things

Items = dict[tuple[str | int, ...], Any]  # entries and plain values, by their place in nested dicts


def import_checkpoint(
    source: Path,
    directory: Path,
    *,
    dtype: torch.dtype | None = None,
    prefix: str = "",
    strip_prefix: str = "",
    note: Note = silent,
    progress: Progress = silent,
) -> None:
    """Writes weights into a directory that torch.distributed.checkpoint loads as {"model": ...}.

    Takes the memory of a part of a tensor, except for files that torch.save wrote before 1.6.

    Args:
        source: FILE.safetensors; FILE.pt (.pth, .bin, .ckpt) with a state dict, alone or as "model"
            or "state_dict"; or a folder with such weights under Hugging Face's names. A dict under
            "optim" beside "model", as `export_checkpoint` writes, is imported too.
        directory: a new one.
        dtype: of the model's tensors of floating point; None: their own.
        strip_prefix: taken off the names that begin with it, before `prefix` is put in front.
        note: called with what the user should know.
        progress: called with the bytes done and the bytes in all.

    Raises:
        ValueError: for what cannot be imported, or not like this.
        FileExistsError: if `directory` exists and is not empty.
        RuntimeError: for a damaged source.
        OSError: for a full disk and the like. Whatever fails, nothing is left of `directory`.
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise FileExistsError(f"directory: expected a new one, got {directory}, which exists")
    items = _renamed(_items(source, note), strip_prefix, prefix)
    entries = [item for item in items.values() if isinstance(item, Entry)]
    if not entries:
        raise ValueError(f"source: expected tensors in {source}, got none")
    items = {
        path: item.cast(dtype) if isinstance(item, Entry) and path[0] == MODEL else item
        for path, item in items.items()
    }
    total = sum(item.nbytes for item in items.values() if isinstance(item, Entry))
    require_space(directory, total)
    count = Count(total, progress)
    with new_folder(directory) as folder:
        counted = {p: i.counted(count) if isinstance(i, Entry) else i for p, i in items.items()}
        dcp_writer.write(folder, counted)


def _items(source: Path, note: Note) -> Items:
    if not source.exists():
        raise ValueError(f"source: expected a file or a folder, got {source}, which is not there")
    if (source / METADATA).exists():
        raise ValueError(f"source: expected other than a checkpoint directory, got {source}")
    if source.is_dir():
        entries = hub.read_folder(source, partial(_model_entries, note=note))
        return {(MODEL, entry.name): entry for entry in entries}
    if source.suffix == ".safetensors":
        return {(MODEL, entry.name): entry for entry in safetensors.read(source)}
    if source.suffix in TORCH_SUFFIXES:
        return _torch_items(source, note)
    raise ValueError(
        f"source: expected FILE.safetensors, FILE{', FILE'.join(TORCH_SUFFIXES)} or a folder, got "
        f"{source}"
    )


def _model_entries(path: Path, note: Note) -> list[Entry]:
    if path.suffix == ".safetensors":
        return safetensors.read(path)
    return [item for item in _torch_items(path, note).values() if isinstance(item, Entry)]


def _torch_items(path: Path, note: Note) -> Items:
    """What a file of torch.save holds of a model, and of its optimizer if that goes by names."""
    with open(path, "rb") as file:
        head = file.read(4)
    if head == zipfile.stringFileHeader:
        archive = Archive(path)
        value, entry = archive.value, archive.entry
    elif not head.startswith(pickle.PROTO):
        raise RuntimeError(f"{path}: expected a file of torch.save, got {head!r} at its beginning")
    else:
        note(f"{path} is of a format of torch.save before 1.6: it is read into memory as a whole")
        value, entry = _load_legacy(path), _loaded
    if not isinstance(value, Mapping):
        raise ValueError(f"source: expected a state dict in {path}, got {type(value).__name__}")
    tree = {MODEL: value}
    wrapper = next((key for key in WRAPPERS if isinstance(value.get(key), Mapping)), None)
    if wrapper is not None:
        tree = {MODEL: value[wrapper]}
        if wrapper == MODEL and isinstance(value.get(OPTIMIZER), Mapping):
            tree[OPTIMIZER] = value[OPTIMIZER]
        left_out = [str(key) for key in value if key not in (wrapper, *tree)]
        if left_out:
            note(f"left out of {path}: {', '.join(left_out)}")
    flat, paths = flatten_state_dict(tree)
    return {
        paths[key]: entry(_name(paths[key]), item) if isinstance(item, torch.Tensor) else item
        for key, item in flat.items()
    }


def _name(path: tuple[str | int, ...]) -> str:
    """Of a tensor: in the model if it is of the model."""
    return ".".join(map(str, path[1:] if path[0] == MODEL else path))


def _load_legacy(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file can make it fail in any way
        raise RuntimeError(
            f"{path}: expected a file that torch.load(weights_only=True) reads, got "
            f"{summary(error)}"
        ) from error


def _loaded(name: str, tensor: torch.Tensor) -> Entry:
    """For a tensor that is in memory."""
    tensor = tensor.detach()
    parts = partial(split, lambda: tensor.resolve_conj().resolve_neg().contiguous())
    return Entry(name, tuple(tensor.shape), tensor.dtype, parts)


def _renamed(items: Items, strip_prefix: str, prefix: str) -> Items:
    """The same with other names of the model's tensors."""
    if not strip_prefix and not prefix:
        return items
    if any(path[0] == OPTIMIZER for path in items):
        raise ValueError("prefix: expected a model alone to rename, got its optimizer's state too")
    if not any(_name(path).startswith(strip_prefix) for path in items):
        raise ValueError(
            f"strip_prefix: expected names that begin with {strip_prefix!r}, got "
            f"{_name(next(iter(items)))!r} and the like"
        )
    result: Items = {}
    for path, item in items.items():
        name = prefix + _name(path).removeprefix(strip_prefix)
        if (MODEL, name) in result:
            raise ValueError(f"strip_prefix: expected different names, got {name!r} twice")
        result[MODEL, name] = item
    return result
