"""What the formulas say of models that are sharded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from zerocore import policy, registry
from zerocore.planner.holding import Holding, resident
from zerocore.planner.schedule import rehearse
from zerocore.planner.setting import FlatFacts, Setting

if TYPE_CHECKING:
    from zerocore.groups import Ranks
    from zerocore.runtime import Options, Sharded

# Tensors as large as the parameter that torch.optim's optimizers keep, without their options.
_STATES = {
    "Adam": 2,
    "AdamW": 2,
    "NAdam": 2,
    "RAdam": 2,
    "Adamax": 2,
    "Adadelta": 2,
    "Rprop": 2,
    "Adagrad": 1,
    "RMSprop": 1,
    "ASGD": 1,
    "SGD": 0,
}


def setting_for(options: Options, ranks: Ranks, device: torch.device, backend: str) -> Setting:
    """That of the options of a `zerocore.shard` call, and of where it trains."""
    return Setting(
        stage=options.stage,
        shards=len(ranks.shard),
        replicas=len(ranks.replicate),
        mixed_precision=options.mixed_precision,
        reshard_after_forward=options.reshard_after_forward,
        prefetch=options.prefetch,
        max_window_bytes=options.max_window_bytes,
        launch_bytes=policy.launch_bytes(backend),
        keeps=device.type == "cpu",
    )


def setting_of(sharded: Sharded) -> Setting:
    """That of a model that is sharded."""
    groups = sharded.groups
    return setting_for(sharded.options, groups.ranks, sharded.device, groups.backend)


def predicted(
    models: Iterable[Sharded], optimizer: torch.optim.Optimizer | None = None
) -> Iterator[Holding]:
    """What this rank holds between steps, by the shapes that the parameters had."""
    for sharded in models:
        yield from resident(sharded.sizes, setting_of(sharded), moments=0)
    if optimizer is not None:
        yield from _moments(optimizer)


def windows_peak(models: Iterable[Sharded]) -> int:
    """Most bytes of windows at once, if units are called in the order of registration."""
    return sum(
        rehearse(sharded.sizes, setting_of(sharded)).windows_peak
        for sharded in models
        if not sharded.options.lifetimes.full_parameters_stay
    )


def knows(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is known what the optimizer keeps."""
    return _is_own(optimizer) or type(optimizer) is getattr(
        torch.optim, type(optimizer).__name__, None
    )


def _is_own(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer).__module__.startswith("zerocore.")


def _moments(optimizer: torch.optim.Optimizer) -> Iterator[Holding]:
    """State of the shape of parameters; with zerocore.AdamW, of whole flat shards."""
    flats: set[tuple[int, int, int]] = set()
    for group in optimizer.param_groups:
        for param in group["params"]:
            entry = registry.entry_of(param)
            sharded = entry.sharded() if entry is not None else None
            if not _is_own(optimizer) or sharded is None:
                each = 2 if _is_own(optimizer) else _states(optimizer, group)
                yield _kept(param, entry, sharded, each)
                continue
            key = (id(sharded), entry.unit, entry.flat)
            if key not in flats:
                flats.add(key)
                size = sharded.sizes.units[entry.unit].flats[entry.flat]
                facts = FlatFacts.of(size, setting_of(sharded))
                yield Holding("moments", facts.kept, 2 * facts.shard * facts.kept.itemsize)


def _kept(
    param: torch.Tensor, entry: registry.Entry | None, sharded: Sharded | None, each: int
) -> Holding:
    """State for each element that this rank steps, whatever the parameter shows now.

    That of a 0-dim parameter is not told from step counters.
    """
    dtype, elements, dims = param.dtype, param.numel(), param.dim()
    if sharded is not None:
        dtype = sharded.core.shard(entry.unit, entry.flat).dtype
        start, stop = sharded.core.owned(entry.unit, entry.flat, entry.index)
        elements, dims = stop - start, len(entry.shape)
    counts = dims > 0 and param.requires_grad
    return Holding("moments", dtype, each * elements * dtype.itemsize * counts)


def _states(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> int:
    """Tensors as large as the parameter."""
    count = _STATES.get(type(optimizer).__name__, 0)
    count += bool(group.get("amsgrad")) + bool(group.get("centered"))
    momentum = type(optimizer).__name__ in ("SGD", "RMSprop") and group.get("momentum", 0) > 0
    return count + bool(momentum)
