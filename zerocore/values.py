"""Full values of a model's parameters and buffers, at the moment when `shard` takes them over."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from zerocore import registry
from zerocore.collectives import broadcast_from_first, exchange
from zerocore.deferred import forget, heap, is_blank, tape_of
from zerocore.groups import Groups
from zerocore.initialise import Initialiser, unwritten
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

    @torch.no_grad()
    def of_unit(self, plan: UnitPlan) -> list[list[torch.Tensor] | None]:
        """The values of the parameters of each flat buffer of a unit, for `core.add_unit`.

        Those of rank 0 count: there are none on ranks whose values reach nobody. None: no rank has
        any, with `init="empty"`.

        Raises:
            Exception: this rank's, if they could not be made.
            ValueError: for another rank's.
        """
        params = [param for flat in plan.flats() for _, param in flat]
        values: list[list[torch.Tensor] | None] = []
        error = None
        # The last unit's, and what its values were made from, are free by now.
        heap.freed(self._bytes)
        self._bytes = 2 * plan.bytes
        try:
            self._initialiser.fill([p for p in params if self._initialiser.owns(p)])
            values = [self._of_flat([param for _, param in flat]) for flat in plan.flats()]
        except Exception as caught:
            error = caught
        self._agree(error)
        forget(params)
        return values

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

    def _of_flat(self, params: list[nn.Parameter]) -> list[torch.Tensor] | None:
        if all(map(self._initialiser.leaves_empty, params)):
            return None
        if not _values_are_taken(self._groups):
            return []
        return list(map(self._of_param, params))

    def _of_param(self, param: nn.Parameter) -> torch.Tensor:
        if self._initialiser.leaves_empty(param):
            return unwritten(param)
        tape = tape_of(param)
        return param if tape is None else tape.value(param)

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
