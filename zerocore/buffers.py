"""Floating buffers in another dtype for computation, over values kept in their own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

_Place = tuple[int, str]  # id of a module's `_buffers`, name in it


@dataclass
class _Kept:
    """Values in a buffer's own dtype; one object for all names of a shared buffer."""

    tensor: torch.Tensor  # N-D; never written to in place


class Buffers:
    """Shows the floating buffers of some modules in `dtype`.

    [Note: kept values] A module holds, under the buffer's name, a tensor in `dtype`; the values in
    the buffer's own dtype are kept here. Nothing is carried over while modules compute: whoever
    needs the values asks for them, and an element that shows the rounding of its kept value has
    that value, any other one was written to and has the value it shows. So a graph, or the
    recomputation of activation checkpointing, finds in a buffer what modules left there, and
    writes are found that no version counter tells of (those of batch norm, for one).

    Alternatives considered: adding differences between what is shown and the rounded kept value to
    the kept one, and rounding again at each forward. It leaves a residue where a buffer is
    overwritten (with zeros, say), and moving averages gain nothing: an update below the rounding
    is lost within the forward. Batch norm's are therefore taken apart, see `_hook_batch_norm`.

    Args:
        modules: whose buffers to show; held weakly, as far as hooks are concerned.
        dtype: a floating dtype; None changes nothing.
    """

    def __init__(self, modules: Iterable[nn.Module], dtype: torch.dtype | None) -> None:
        self._dtype = dtype
        self._modules: list[dict[str, torch.Tensor | None]] = []
        self._kept: dict[_Place, _Kept] = {}
        if dtype is None:
            return
        for module in modules:
            self._modules.append(module._buffers)
            if isinstance(module, _BatchNorm) and type(module).forward is _BatchNorm.forward:
                self._hook_batch_norm(module)
        self.show()

    def show(self) -> None:
        """Casts buffers that are not in `dtype`: at first all, later those that were assigned.

        Inside a backward nothing happens: a recomputation uses what its forward used.
        """
        if self._dtype is None or torch._C._current_graph_task_id() != -1:
            return
        done: dict[int, tuple[torch.Tensor, _Kept, torch.Tensor]] = {}  # shared ones stay shared
        for buffers in self._modules:
            for name, now in buffers.items():
                if now is None or not now.is_floating_point() or now.dtype == self._dtype:
                    continue
                place = id(buffers), name
                if id(now) not in done:
                    # Normal tensors even if this is called in inference mode: training writes them.
                    with torch.inference_mode(False), torch.no_grad():
                        kept = _Kept(self._values(place, now).detach())
                        shown = kept.tensor.to(self._dtype, copy=True)
                    done[id(now)] = (now, kept, shown)
                _, self._kept[place], buffers[name] = done[id(now)]

    def saved(self, module: nn.Module, name: str) -> torch.Tensor | None:
        """A copy of the values of a buffer in its own dtype; None if they are what it shows."""
        place, now = (id(module._buffers), name), module._buffers[name]
        if now is None or place not in self._kept:
            return None
        with torch.no_grad():
            return self._values(place, now).detach().clone()

    def load(self, module: nn.Module, name: str, source: torch.Tensor) -> torch.Tensor:
        """Keeps the values of `source`; returns what is to be copied into the shown buffer."""
        place, now = (id(module._buffers), name), module._buffers[name]
        if now is None or place not in self._kept:
            return source
        if now.dim() == 0 and source.dim() == 1 and source.numel() > 0:
            source = source[0]  # as torch does, for states of old versions
        if source.shape != now.shape:
            return source  # torch refuses it
        kept = self._kept[place]
        kept.tensor = source.detach().to(kept.tensor, copy=True)
        return kept.tensor

    def held(self) -> list[torch.Tensor]:
        """The kept tensors."""
        return [kept.tensor for kept in self._kept.values()]

    def _values(self, place: _Place, now: torch.Tensor) -> torch.Tensor:
        """The values at full precision of a buffer that shows `now`; see [Note: kept values]."""
        kept = self._kept.get(place)
        if kept is None:
            return now
        full = kept.tensor
        cast = now.dtype == self._dtype
        seen = now.to(full.dtype) if cast else now
        if seen.shape != full.shape:
            return seen
        same = seen == full.to(self._dtype).to(seen.dtype)
        if same.all():
            return full
        return torch.where(same, full, seen) if cast else seen

    def _hook_batch_norm(self, module: nn.Module) -> None:
        """Updates the kept running statistics of a batch norm in their own dtype.

        In training they are only written to: new = (1 - momentum) old + momentum * batch's. Where
        that is rounded to a narrow dtype, small updates vanish. The forward is given zeros instead,
        which leave momentum * batch's, rounded relative to itself, to be added to the kept ones.
        """
        aside: dict[str, torch.Tensor] = {}

        def before(module: _BatchNorm, args: Any) -> None:
            if not (module.training and module.track_running_stats):
                return
            for name in ("running_mean", "running_var"):
                place, shown = (id(module._buffers), name), module._buffers.get(name)
                kept = self._kept.get(place)
                if shown is None or kept is None or shown.dtype != self._dtype:
                    continue
                if kept.tensor.dtype.itemsize > shown.dtype.itemsize:
                    aside[name] = shown
                    module._buffers[name] = torch.zeros_like(shown)

        def after(module: _BatchNorm, args: Any, output: Any) -> None:
            failed = output is None  # torch calls it for an exception
            for name, shown in aside.items():
                update = module._buffers[name]
                module._buffers[name] = shown
                if failed:
                    continue
                place = id(module._buffers), name
                with torch.no_grad():
                    old = self._values(place, shown)
                    new = old * (1.0 - _momentum(module)) + update.to(old.dtype)
                    self._kept[place].tensor = new
                    # Through .data, as batch norm itself writes: graphs need not know.
                    shown.data.copy_(new)
            aside.clear()

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after, prepend=True, always_call=True)


def _momentum(module: _BatchNorm) -> float:
    """The weight that the last training forward gave to its batch."""
    if module.momentum is not None:
        return module.momentum
    count = module.num_batches_tracked
    return 1.0 / count.item() if count is not None else 0.0
