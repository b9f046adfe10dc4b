"""zerocore.load."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

import torch
from torch import nn

from zerocore import registry
from zerocore.checkpoint import background, values
from zerocore.checkpoint.checks import (
    found_keys,
    prefix_of,
    require_own_values,
    require_whole,
)
from zerocore.checkpoint.directory import (
    MARKER,
    Marker,
    is_temporary,
    open_catalog,
    require_sum,
)
from zerocore.checkpoint.files import Progress, read_shards, sum_file
from zerocore.checkpoint.format import METADATA, OWN_BUFFERS, Catalog, key_of
from zerocore.checkpoint.model_contents import ModelContents, bring_to_rest
from zerocore.checkpoint.optimizer_contents import OptimizerTarget, kind_of
from zerocore.checkpoint.placement import shard_of
from zerocore.checkpoint.shards import FlatShard
from zerocore.checkpoint.together import Together
from zerocore.ema import ShardedAverages
from zerocore.runtime import Sharded, logged


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
) -> dict[str, Any]:
    """Loads what `zerocore.save` wrote, at any stage and on any number of ranks.

    Reads any other directory of torch.distributed.checkpoint as well, of FSDP2 or plain PyTorch:
    `{"model": ..., "optim": ...}`, or the model's state dict alone. Parameters, buffers and
    optimizer state are read into place, chunk by chunk.

    Before anything changes, checksums of all files are compared (each rank reads a part; there are
    none in directories of others), and names, shapes, dtypes and param groups. On the same number
    of ranks random states are restored; on another one they are left alone, with a warning.

    Values that are no tensors are pickles, which can run any code: load what you trust only.

    A collective over the model's ranks.

    Args:
        optimizer: whose state and param groups are replaced, if the checkpoint has some.

    Returns:
        The extra values that were saved, by name: what `state_dict()` gave, or the values, tensors
        on the CPU; for a zerocore.EMA something that its `load_state_dict` takes, this rank's part;
        empty for directories of others. What differed between ranks comes back to the
        same rank; on another number of ranks it is left out, with a warning that names it.

    Raises:
        FileNotFoundError: if there is no directory at `path`.
        ValueError: for a directory that is no checkpoint or is damaged, and for one of another
            model or optimizer: on every rank, before anything changes.
        RuntimeError: inside of `zerocore.gathered()` or `zerocore.EMA.applied()`, or if a rank is
            lost, or a file could not be read any more while it was loaded.
    """
    caller = "zerocore.load"
    models = registry.require_sharded(model, caller)
    with logged(models, "checkpoint"):
        background.wait()  # it uses the same group
        together = Together(caller, models)
        directory = FilePath(os.path.abspath(os.fspath(path)))
        kind = kind_of(optimizer) if optimizer is not None else "none"
        catalog, marker = _opened(together, directory, models, kind)
        if marker is not None:
            _verify(together, directory, marker)

        plan, _ = together.agree(
            lambda: (_planned(together, catalog, marker, model, models, optimizer), None)
        )
        _fill(together, catalog, plan.shards)
        together.agree(lambda: (plan.finish(), None))
    if together.first:
        _warn(marker, together, plan.left_out)
    return plan.extra


@dataclass(frozen=True)
class _Plan:
    """What is to be loaded, checked; nothing has changed yet.

    Attributes:
        contents, objects, buffers: of the model; its extra states; buffers that are this rank's.
        shards: where elements go, by key.
        target: of the optimizer.
        extra: values of the user's, of which averages are in `shards` too.
        left_out: names of those that are for another number of ranks.
        random: state of this rank, for its `device`; None to leave it alone.
    """

    contents: ModelContents
    objects: dict[str, Any]
    buffers: dict[str, torch.Tensor]
    shards: dict[str, FlatShard]
    target: OptimizerTarget | None
    extra: dict[str, Any]
    left_out: list[str]
    random: Any
    device: torch.device

    def finish(self) -> None:
        """To be called when `shards` are read."""
        self.contents.loaded(self.objects, self.buffers)
        if self.target is not None:
            self.target.loaded()
        if self.random is not None:
            values.restore_random_state(self.random, self.device)


def _planned(
    together: Together,
    catalog: Catalog,
    marker: Marker | None,
    model: nn.Module,
    models: list[Sharded],
    optimizer: torch.optim.Optimizer | None,
) -> _Plan:
    contents = ModelContents(model, together.ranks[0])
    prefix = prefix_of(catalog, contents.tensors)
    keys = found_keys(catalog, prefix, contents.tensors, contents.objects)
    shards = dict(zip(keys, (stored.shard for stored in contents.tensors), strict=True))
    objects = {name: catalog.read(prefix + name) for name in contents.objects}
    target = None
    if optimizer is not None:
        target = OptimizerTarget(model, optimizer, catalog, together.caller)
        shards |= target.tensors
    extra, left_out = _extra_of(catalog, marker, together)
    averages, parts = _averages_of(catalog, model)
    shards |= parts
    require_whole(catalog, shards)
    random = _random_of(catalog, marker, together)
    buffers, others = _own_buffers(catalog, contents, marker, together)
    left_out += others
    extra |= averages
    device = models[0].device
    return _Plan(contents, objects, buffers, shards, target, extra, left_out, random, device)


def _opened(
    together: Together, directory: FilePath, models: list[Sharded], kind: str
) -> tuple[Catalog, Marker | None]:
    """What is in a directory, and its marker; None if it is one of others.

    Args:
        kind: of the optimizer.
    """

    def open_() -> tuple[tuple[Catalog, Marker | None], Any]:
        bring_to_rest(models, together.caller)
        require_own_values(models, together.caller)
        if not directory.is_dir():
            raise FileNotFoundError(
                f"{together.caller}: expected a checkpoint, got {directory}, where no directory is"
            )
        found = any((directory / name).is_file() for name in (MARKER, METADATA))
        if is_temporary(directory) or not found:
            raise ValueError(
                f"{together.caller}: expected a checkpoint, got {directory}, which has neither "
                f"{MARKER!r} nor {METADATA!r}, or was never finished"
            )
        catalog, marker = open_catalog(directory)
        told = [("path", str(directory)), ("marker", repr(marker)), ("optimizer", kind)]
        return (catalog, marker), told

    opened, everyone = together.agree(open_)
    together.require_same(everyone)
    return opened


def _verify(together: Together, directory: FilePath, marker: Marker) -> None:
    """Compares all files with their checksums."""

    def verify(progress: Progress) -> None:
        # Largest first, to the rank with the least so far; the same on all ranks.
        load = [0] * len(together.ranks)
        for name, expected in sorted(marker.files.items(), key=lambda f: (-f[1].bytes, f[0])):
            index = load.index(min(load))
            load[index] += expected.bytes
            if index == together.index:
                require_sum(directory / name, sum_file(directory / name, progress), expected)

    together.work(verify)


def _extra_of(
    catalog: Catalog, marker: Marker | None, together: Together
) -> tuple[dict[str, Any], list[str]]:
    """The user's values for this rank; names of those that are for another number of ranks."""
    extra: dict[str, Any] = {}
    left_out: set[str] = set()
    if marker is None:
        return extra, []
    for key in catalog.keys():
        if key.startswith("extra.shared."):
            name = key.removeprefix("extra.shared.")
            extra[name] = values.unpacked(name, catalog.read(key))
        elif key.startswith("extra.ranks."):
            index, _, name = key.removeprefix("extra.ranks.").partition(".")
            if marker.world != len(together.ranks):
                left_out.add(name)
            elif int(index) == together.index:
                extra[name] = values.unpacked(name, catalog.read(key))
    return extra, sorted(left_out)


def _own_buffers(
    catalog: Catalog, contents: ModelContents, marker: Marker | None, together: Together
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Buffers of this rank that differ from the first rank's; names of those of other ranks."""
    prefix = key_of(OWN_BUFFERS) + "."
    keys = [key for key in catalog.keys() if key.startswith(prefix)] if marker else []
    places = [key.removeprefix(prefix).partition(".") for key in keys]
    if marker is None or marker.world != len(together.ranks):
        return {}, sorted({name for _, _, name in places})
    own: dict[str, torch.Tensor] = {}
    for key, (index, _, name) in zip(keys, places, strict=True):
        if int(index) == together.index and name in contents.buffers:
            own[name] = values.unpacked(name, catalog.read(key))
            _require_like(name, own[name], contents.buffers[name])
    return own, []


def _require_like(name: str, saved: torch.Tensor, own: torch.Tensor) -> None:
    if (saved.shape, saved.dtype) != (own.shape, own.dtype):
        raise ValueError(
            f"expected the buffer {name!r} with the shape {tuple(own.shape)} in {own.dtype}, got "
            f"{tuple(saved.shape)} in {saved.dtype}"
        )


def _averages_of(
    catalog: Catalog, model: nn.Module
) -> tuple[dict[str, ShardedAverages], dict[str, FlatShard]]:
    """Each saved EMA, to be filled: this rank's elements by name, and the same to read into."""
    params = dict(model.named_parameters(remove_duplicate=False))
    found: dict[str, ShardedAverages] = {}
    parts: dict[str, FlatShard] = {}
    for key in catalog.tensors:
        if not key.startswith("extra.averages."):
            continue
        extra, _, name = key.removeprefix("extra.averages.").partition(".")
        entry = registry.entry_of(params[name]) if name in params else None
        if entry is None or entry.sharded() is None:
            raise ValueError(f"expected the average of a sharded parameter, got that of {name!r}")
        start, stop = entry.sharded().core.owned(entry.unit, entry.flat, entry.index)
        saved = catalog.tensors[key]
        values = torch.empty(stop - start, dtype=saved.dtype, device=entry.sharded().device)
        parts[key] = shard_of(entry, values)
        if parts[key].whole != saved.size:
            raise ValueError(
                f"expected the average of {name!r} with the shape {tuple(parts[key].whole)}, got "
                f"{tuple(saved.size)}"
            )
        found.setdefault(extra, ShardedAverages())[name] = values
    return found, parts


def _random_of(catalog: Catalog, marker: Marker | None, together: Together) -> Any:
    """The random state of this rank; None on another number of ranks."""
    if marker is None or marker.world != len(together.ranks):
        return None
    return values.unpacked("random state", catalog.read(f"random.{together.index}"))


def _fill(together: Together, catalog: Catalog, shards: dict[str, FlatShard]) -> None:
    """Reads everything into place."""
    try:
        together.work(lambda progress: read_shards(catalog, shards, progress))
    except Exception as error:
        raise RuntimeError(
            f"{together.caller}: expected to read {catalog.path}, got {error}; model and optimizer "
            "are partly loaded: load again, or start anew"
        ) from error


def _warn(marker: Marker | None, together: Together, left_out: list[str]) -> None:
    if marker is None or marker.world == len(together.ranks):
        return
    text = (
        f"zerocore.load: saved on {marker.world} ranks, loaded on {len(together.ranks)}: random "
        "states are left alone"
    )
    if left_out:
        text += f"; left out, since they differed between ranks: {', '.join(left_out)}"
    warnings.warn(text, stacklevel=3)
