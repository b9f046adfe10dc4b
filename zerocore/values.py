"""Full values of a model's parameters and buffers, at the moment when `shard` takes them over."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from zerocore import _C, registry
from zerocore.collectives import broadcast_from_first, exchange
from zerocore.deferred import forget, heap, is_blank, tape_of
from zerocore.groups import Groups
from zerocore.initialise import Initialiser
from zerocore.units import UnitPlan


def origin_of(tensor: torch.Tensor) -> str:
    """Where its values come from; the same on all ranks."""
    if tensor.device.type == "meta":
        return "on the meta device"
    return "deferred" if is_blank(tensor) else "in memory"


class Values:
    """Where the values of a model come from: its memory, a deferred construction, or an `init`.

    What is made here can fail on one rank: every rank raises then.

    Args:
        model: checked; all ranks agree on it.
        initialiser: of what is on the meta device.

    Attributes:
        unloaded: what is to be loaded, with `init="empty"`.
    """

    def __init__(self, model: nn.Module, initialiser: Initialiser, groups: Groups) -> None:
        self._model = model
        self._initialiser = initialiser
        self._groups = groups
        tensors = [*model.parameters(), *model.buffers()]
        self.unloaded = initialiser.unloaded()
        self._bytes = 0
        self._made = bool(initialiser) or any(map(is_blank, tensors))

    def of_unit(self, core: _C.Runtime, plan: UnitPlan) -> list[torch.Tensor]:
        """The values of each flat buffer of a unit, 1-D, for `core.add_unit`.

        Raises:
            Exception: this rank's, if they could not be made.
            ValueError: for another rank's.
        """
        params = [param for flat in plan.flats() for _, param in flat]
        fulls: list[torch.Tensor] = []
        error = None
        # The last unit's, and what its values were made from, are free by now.
        heap.freed(self._bytes)
        self._bytes = 2 * plan.bytes
        try:
            views = []
            for flat in plan.flats():
                full, parts = core.blank([param for _, param in flat])
                fulls.append(full)
                views += parts
            self._fill(params, views)
        except Exception as caught:
            error = caught
        self._agree(error)
        forget(params)
        return fulls

    @torch.no_grad()
    def take_buffers(self, device: torch.device) -> None:
        """Gives the model's buffers rank 0's values, on this device."""
        buffers = [b for m in registry.own_modules(self._model) for b in m.buffers(recurse=False)]
        error = None
        try:
            self._initialiser.fill_rest()
            for buffer in buffers:
                tape = tape_of(buffer)
                if tape is not None:
                    buffer.data = tape.resident(buffer)
        except Exception as caught:
            error = caught
        self._agree(error)
        forget(buffers)
        heap.trim()
        modules = registry.own_modules(self._model)
        _move_buffers(modules, device)
        found = [buffer for module in modules for buffer in module.buffers(recurse=False)]
        local = [b.to_local() if isinstance(b, DTensor) else b for b in found]
        broadcast_from_first(local, self._groups)

    @torch.no_grad()
    def _fill(self, params: list[nn.Parameter], views: list[torch.Tensor]) -> None:
        meta = [i for i, param in enumerate(params) if self._initialiser.owns(param)]
        self._initialiser.fill([params[i] for i in meta], [views[i] for i in meta])
        for i in sorted(set(range(len(params))).difference(meta)):
            tape = tape_of(params[i])
            if tape is None:
                views[i].copy_(params[i])
            elif _values_are_taken(self._groups):
                views[i].copy_(tape.value(params[i]))

    def _agree(self, error: Exception | None) -> None:
        if self._made:
            exchange("zerocore.shard", [self._groups], error, [None])
        elif error is not None:
            raise error


def _values_are_taken(groups: Groups) -> bool:
    """Whether this rank's values may reach others; those of the rest need not be made."""
    # A broadcast goes over the replicas first, from the first of each group.
    group = groups.replicate or groups.shard
    return group is None or dist.get_rank(group) == 0


def _move_buffers(modules: list[nn.Module], device: torch.device) -> None:
    moved: dict[torch.Tensor, torch.Tensor] = {}  # shared ones stay shared
    for module in modules:
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device:
                if buffer not in moved:
                    moved[buffer] = buffer.to(device)
                module._buffers[name] = moved[buffer]
