"""What a sharded model holds and sends, measured."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from zerocore import registry
from zerocore.ledger import holdings, require_optimizer
from zerocore.planner.communication import Collectives


class Unit(NamedTuple):
    """Size of a unit."""

    parameters: int  # elements, without padding
    padded: int  # elements of its flat buffers
    shard: int  # elements of them that this rank holds


class Windows(NamedTuple):
    """Memory leased for windows of resharded units (stage 3), in bytes."""

    bytes: int
    peak: int


class Record(NamedTuple):
    """Something that happened."""

    sequence: int  # goes on after a reset
    # launch, wait (the host needs the result), done, finish (of a reduction on the CPU, whether or
    # not the host has asked for it; one for each flat buffer); begin, end; need, release (of a
    # window); enter, leave (of what the host takes part in); raise (an exception that passed
    # through the model)
    event: str
    # all_gather, reduce, drain, packing; window; compute, recompute (a forward inside a backward),
    # optimizer, checkpoint; what was entered
    kind: str
    unit: str
    elements: int  # of the unit's flat buffers
    phase: str  # forward, backward, idle
    time: float  # seconds on the host, from an arbitrary start
    # Of launch, begin and wait: when the collective, the computation, or the wait of the computing
    # stream began and ended on the device, in seconds since `time_launches`; None without it,
    # before the end, and on the CPU.
    device_times: tuple[float, float] | None
    dtype: str  # of the elements; empty: of none, or of several
    forward: int  # number of the newest forward, from 1


class Stats:
    """Measured facts about the sharded models in a model; made by `zerocore.stats`."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        self._sharded = registry.require_sharded(model, "zerocore.stats")
        require_optimizer("zerocore.stats", optimizer)
        self._optimizer = optimizer

    def __repr__(self) -> str:
        facts = ("resident", "windows", "collectives", "units")
        lines = (f"  {name}: {getattr(self, name)}" for name in facts)
        return "\n".join(["zerocore.Stats, of this rank:", *lines])

    @property
    def collectives(self) -> dict[str, Collectives]:
        """Per kind, what this rank handed to process groups since `reset()`.

        Kinds: all_gather and reduce_scatter (in the shard group), all_reduce (in the replicate
        group), broadcast, control (agreements on the host). Over n ranks a rank sends (n-1)/n of
        the elements for a gather or a reduce-scatter, and twice that for an all-reduce.
        """
        total: dict[str, Collectives] = {}
        for sharded in self._sharded:
            for kind, counts in sharded.core.traffic().items():
                before = total.get(kind, Collectives(0, 0, 0))
                total[kind] = Collectives(*(a + b for a, b in zip(before, counts, strict=True)))
        return total

    @property
    def units(self) -> dict[str, Unit]:
        """Sizes by name of unit; '' is the root's."""
        sizes = {}
        for sharded in self._sharded:
            for unit, name in enumerate(sharded.units):
                padded = [sharded.core.padded(unit, f) for f in range(len(sharded.flats[unit]))]
                sizes[name] = Unit(
                    sharded.elements[unit], sum(p for p, _ in padded), sum(s for _, s in padded)
                )
        return sizes

    @property
    def resident(self) -> dict[str, int]:
        """Bytes held now, by category.

        parameters: resident full parameters (stages 0 to 2), or shards that are no master copies.
        gradients: reduced shards, and full local gradients under `zerocore.no_sync`.
        master: shards in another dtype than the one computed in.
        moments: tensors of the optimizer's state, if one was given, without step counters.
        """
        held = {"parameters": 0, "gradients": 0, "master": 0}
        if self._optimizer is not None:
            held["moments"] = 0
        for holding in holdings(self._sharded, self._optimizer):
            held[holding.category] += holding.bytes
        return held

    @property
    def windows(self) -> Windows:
        """Leases of windows now, and the most at once since `reset()`."""
        pairs = [sharded.core.windows() for sharded in self._sharded]
        return Windows(sum(now for now, _ in pairs), sum(peak for _, peak in pairs))

    @property
    def log(self) -> list[Record]:
        """The newest events, oldest first."""
        return [Record(*record) for sharded in self._sharded for record in sharded.core.records()]

    def time_launches(self, on: bool = True) -> None:
        """From now on the log has times on the device, taken by events.

        Collectives that are launched together have the same times.
        """
        for sharded in self._sharded:
            sharded.core.time_device(on)

    def reset(self) -> None:
        """Forgets collectives, the log, and the peak of the windows."""
        for sharded in self._sharded:
            sharded.core.reset_stats()
