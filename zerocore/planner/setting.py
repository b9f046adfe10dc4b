"""How a model would be sharded, and the dtypes and sizes that follow for each flat buffer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from zerocore import _C
from zerocore.planner.sizes import FlatSize
from zerocore.policy import STAGES, Lifetimes, MixedPrecision


@dataclass(frozen=True)
class Setting:
    """The options of `zerocore.shard` that bytes and time depend on.

    Attributes:
        stage: ZeRO stage.
        shards: ranks that share one copy; 1 at stage 0.
        replicas: copies; all ranks at stage 0, 1 without hybrid sharding above it.
        mixed_precision, reshard_after_forward, prefetch, max_window_bytes: as for `zerocore.shard`.
        launch_bytes: collectives share launches up to this size; 0: they do not, as with gloo,
            whose reductions are exchanges of messages.
        keeps: what windows and messages leave free is kept for the next ones (on the CPU).
    """

    stage: int
    shards: int
    replicas: int = 1
    mixed_precision: MixedPrecision | None = None
    reshard_after_forward: bool = True
    prefetch: int = 1
    max_window_bytes: int = 0
    launch_bytes: int = 0
    keeps: bool = True

    def __post_init__(self) -> None:
        if self.stage not in STAGES:
            raise ValueError(f"stage: expected 0, 1, 2 or 3, got {self.stage!r}")
        if self.shards < 1 or self.replicas < 1:
            raise ValueError(
                f"ranks: expected at least 1, got {self.shards} shards and {self.replicas} replicas"
            )
        if not self.lifetimes.sharded and self.shards > 1:
            raise ValueError(f"shards: expected 1 at stage 0, got {self.shards}")

    @classmethod
    def of(cls, stage: int, ranks: int, group: int | None = None, **options: object) -> Setting:
        """That of a number of ranks.

        Args:
            group: ranks that share one copy (hybrid sharding); None: all.
        """
        shards = 1 if stage == 0 else group or ranks
        if ranks % shards:
            raise ValueError(
                f"group: expected a number that divides the {ranks} ranks, got {shards}"
            )
        return cls(stage, shards, ranks // shards, **options)

    @property
    def ranks(self) -> int:
        """All of them."""
        return self.shards * self.replicas

    @property
    def lifetimes(self) -> Lifetimes:
        """What the stage means."""
        return STAGES[self.stage]


@dataclass(frozen=True)
class FlatFacts:
    """A flat buffer under a setting; the same rules as in csrc/runtime/flat.cpp.

    Attributes:
        total, shard: elements of the buffer, and of a rank's part.
        compute, kept: dtypes that modules compute in, and of the shard.
        transport, accumulate: dtypes in which gradients travel and are added up.
        shard_is_slot: the shard is this rank's part of the resident full parameters.
    """

    total: int
    shard: int
    compute: torch.dtype
    kept: torch.dtype
    transport: torch.dtype
    accumulate: torch.dtype
    shard_is_slot: bool

    @classmethod
    def of(cls, flat: FlatSize, setting: Setting) -> FlatFacts:
        """Those of one flat buffer."""
        total, shard = _C.padded_elements(list(flat.numels), setting.shards, setting.replicas)
        mixed, own = setting.mixed_precision, flat.dtype
        if mixed is None or not own.is_floating_point:
            kept = compute = transport = accumulate = own
        else:
            compute = kept = mixed.param
            if not flat.trainable:
                kept = own
            elif mixed.master is not None:
                kept = torch.promote_types(own, mixed.master)
            transport, accumulate = mixed.reduce or mixed.param, mixed.accumulate
        is_slot = setting.lifetimes.full_parameters_stay and compute == kept
        return cls(total, shard, compute, kept, transport, accumulate, is_slot)

    @property
    def window_bytes(self) -> int:
        """Of the full parameters in the dtype of computation."""
        return self.total * self.compute.itemsize
