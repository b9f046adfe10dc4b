"""Exports a checkpoint directory to a safetensors or a torch.save file, or a folder of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict

from zerocore.convert import archive, hub, safetensors
from zerocore.convert.dcp_reader import Checkpoint
from zerocore.convert.entry import Entry
from zerocore.convert.files import NewFiles, require_space
from zerocore.convert.progress import Count, Note, Progress, silent

MODEL, OPTIMIZER = "model", "optim"  # what torch's recipes call the parts of a checkpoint
TORCH_SUFFIXES = (".pt", ".pth", ".bin")


def export_checkpoint(
    directory: Path,
    out: Path,
    *,
    shard_bytes: int | None = None,
    dtype: torch.dtype | None = None,
    optimizer: bool = False,
    force: bool = False,
    note: Note = silent,
    progress: Progress = silent,
) -> None:
    """Writes the model of a checkpoint directory to a file, in the memory of about a tensor.

    Args:
        directory: written by torch.distributed.checkpoint: {"model": ..., "optim": ...}, perhaps in
            a dict of one key, or a model's state dict itself. The metadata tells which.
        out: FILE.safetensors, or FILE.pt (.pth, .bin) for `torch.load(weights_only=True)`.
        shard_bytes: makes `out` a folder for Hugging Face's from_pretrained instead, with at most
            so many bytes of tensors in a file, unless one tensor has more.
        dtype: of the model's tensors of floating point; None: their own.
        optimizer: FILE.pt holds {"model": ..., "optim": ...} instead of the model's state dict.
        force: replaces `out` if it exists.
        note: called with what the user should know.
        progress: called with the bytes done and the bytes in all.

    Raises:
        ValueError: for what cannot be exported, or not like this.
        FileExistsError: if `out` exists, without `force`.
        RuntimeError: for a damaged checkpoint.
        OSError: for a full disk and the like. Whatever fails, nothing is left of `out`.
    """
    existing = _check_out(out, shard_bytes, optimizer)
    if existing and not force:
        raise FileExistsError(f"out: expected a new name, got {existing[0]}, which exists")
    to_torch = shard_bytes is None and out.suffix in TORCH_SUFFIXES
    checkpoint = Checkpoint(directory)
    model_paths, optimizer_paths = _parts(checkpoint)
    model = _model(checkpoint, model_paths, dtype, to_torch, note)
    moments = _optimizer(checkpoint, optimizer_paths) if optimizer else {}
    entries = list(_entries([model, moments]))
    if not to_torch:
        safetensors.check_entries(entries)
    total = sum(entry.nbytes for entry in entries)
    require_space(out if shard_bytes is not None else out.parent, total)
    count = Count(total, progress)
    model = _counted(model, count)
    if to_torch:
        value = unflatten_state_dict(model, model_paths)
        if optimizer:
            value = {MODEL: value, OPTIMIZER: _counted(moments, count)}
        with NewFiles(out.parent) as files:
            archive.write(files.open(out.name), value)
    elif shard_bytes is None:
        with NewFiles(out.parent) as files:
            safetensors.write(files.open(out.name), list(model.values()))
    else:
        _write_folder(out, list(model.values()), shard_bytes, [path.name for path in existing])


def _check_out(out: Path, shard_bytes: int | None, optimizer: bool) -> list[Path]:
    """The files that an export to `out` would replace."""
    if shard_bytes is None and out.suffix not in (".safetensors", *TORCH_SUFFIXES):
        raise ValueError(
            f"out: expected FILE.safetensors, FILE.pt, or a folder with a slash at its end, got "
            f"{out}"
        )
    if optimizer and (shard_bytes is not None or out.suffix not in TORCH_SUFFIXES):
        raise ValueError(f"optimizer: expected to write it to FILE.pt, got {out}")
    if shard_bytes is None:
        if out.is_dir():
            raise ValueError(f"out: expected a file, got the folder {out}")
        return [out] if out.exists() else []
    if shard_bytes < 1:
        raise ValueError(f"shard_bytes: expected at least 1, got {shard_bytes}")
    if out.exists() and not out.is_dir():
        raise ValueError(f"out: expected a folder for files of shard_bytes, got the file {out}")
    if not out.exists() and out.suffix in (".safetensors", *TORCH_SUFFIXES):
        raise ValueError(f"out: expected a folder for files of shard_bytes, got the name {out}")
    return hub.weight_files(out)


Paths = dict[str, tuple[str | int, ...]]  # names in nested dicts by key of the checkpoint


def _model(
    checkpoint: Checkpoint, paths: Paths, dtype: torch.dtype | None, values: bool, note: Note
) -> dict[str, Any]:
    """The items of the model by key.

    Args:
        values: whether to have those that are no tensors.
    """
    if not paths:
        raise ValueError(
            f"directory: expected a model's state dict, alone or as {MODEL!r}, got "
            f"{sorted({str(path[0]) for path in checkpoint.paths.values()})}"
        )
    result, left_out = {}, []
    for key, path in paths.items():
        name = ".".join(map(str, path))
        if checkpoint.is_tensor(key):
            result[key] = checkpoint.entry(key, name).cast(dtype)
        elif values:
            result[key] = checkpoint.value(key)
        else:
            left_out.append(name)
    if left_out:
        note(f"left out, since they are no tensors: {', '.join(left_out)}")
    return result


def _optimizer(checkpoint: Checkpoint, paths: Paths) -> dict[str, Any]:
    """The optimizer's state, nested as it was saved."""
    if not paths:
        raise ValueError(f"optimizer: expected a checkpoint with {OPTIMIZER!r}, got none in it")
    items = {
        key: checkpoint.entry(key, key) if checkpoint.is_tensor(key) else checkpoint.value(key)
        for key in paths
    }
    return unflatten_state_dict(items, paths)


def _parts(checkpoint: Checkpoint) -> tuple[Paths, Paths]:
    """Paths within the model's state and within the optimizer's."""
    paths = checkpoint.paths
    roots = {path[:1] for path in paths.values() if path[1:2] == (MODEL,)}
    if len(roots) == 1 and not any(path[0] == MODEL for path in paths.values()):
        (root,) = roots  # {"app": {"model": ..., "optim": ...}}
        paths = {key: path[1:] for key, path in paths.items() if path[:1] == root}
    if all(len(path) == 1 for path in paths.values()):
        # Nothing is nested, or nobody wrote down how.
        tensors = [key for key in paths if checkpoint.is_tensor(key)]
        if not all(key.startswith((f"{MODEL}.", f"{OPTIMIZER}.")) for key in tensors):
            return paths, {}
        prefix = f"{MODEL}."
        return {key: (key[len(prefix) :],) for key in paths if key.startswith(prefix)}, {}
    model, optimizer = (
        {key: path[1:] for key, path in paths.items() if path[0] == part and len(path) > 1}
        for part in (MODEL, OPTIMIZER)
    )
    return model, optimizer


def _entries(item: Any) -> Iterator[Entry]:
    if isinstance(item, Entry):
        yield item
    elif isinstance(item, dict | list):
        for inner in item.values() if isinstance(item, dict) else item:
            yield from _entries(inner)


def _counted(item: Any, count: Count) -> Any:
    if isinstance(item, Entry):
        return item.counted(count)
    if isinstance(item, dict):
        return {key: _counted(inner, count) for key, inner in item.items()}
    return [_counted(inner, count) for inner in item] if isinstance(item, list) else item


def _write_folder(
    folder: Path, entries: list[Entry], shard_bytes: int, replaced: list[str]
) -> None:
    files = hub.shards(entries, shard_bytes)
    with NewFiles(folder, replaced) as new:
        for name, group in files.items():
            safetensors.write(new.open(name), group)
            new.close(name)
        if len(files) > 1:
            new.open(hub.INDEX).write(hub.index(files))
