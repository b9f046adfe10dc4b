"""Loss scaling for fp16: one scale for all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from zerocore import collectives, groups
from zerocore.backend import backend
from zerocore.optim import AdamW
from zerocore.stepping import models_of


class GradScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler for sharded models: if a gradient on any rank is not finite, all skip.

    Used as torch's: `scale(loss).backward()`, perhaps `unscale_(optimizer)`, `step(optimizer)`,
    `update()`. Works with zerocore.AdamW, which unscales, checks, clips and steps in one go (and
    needs no `unscale_` before its own clipping), and with any elementwise torch.optim optimizer.
    Whether to skip is agreed by one collective over the model's ranks a step.

    Args:
        device: type of the device that the loss is on; None: that of `zerocore.backend()`.
        init_scale: the first factor on the loss.
        growth_factor: multiplies the scale after `growth_interval` steps in a row without skip.
        backoff_factor: multiplies the scale after a skipped step.
        growth_interval: steps.
        enabled: False makes every method pass its argument through.
    """

    def __init__(
        self,
        device: str | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        device = device or backend().device.type
        super().__init__(
            device, init_scale, growth_factor, backoff_factor, growth_interval, enabled
        )

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Steps unless a gradient is not finite; see torch.amp.GradScaler.step."""
        state = self._per_optimizer_states[id(optimizer)] if self.is_enabled() else None
        if state is None or not isinstance(optimizer, AdamW) or state["stage"] != OptState.READY:
            return super().step(optimizer, *args, **kwargs)
        if args or kwargs:
            raise RuntimeError(
                "zerocore.GradScaler.step: expected an optimizer alone, got a closure too"
            )
        scale, _ = self._check_scale_growth_tracker("step")
        # The optimizer looks at the gradients itself, in the pass that measures their norm.
        optimizer.grad_scale = scale
        try:
            result = optimizer.step()
        finally:
            del optimizer.grad_scale
        state["found_inf_per_device"] = {scale.device: optimizer.skipped}
        state["stage"] = OptState.STEPPED
        return result

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        models = models_of(optimizer)
        for sharded in models:
            sharded.core.before_step()
        mixed = [sharded.options.mixed_precision for sharded in models]
        if not allow_fp16 and any(m and m.accumulate == torch.float16 for m in mixed):
            raise ValueError(
                "zerocore.GradScaler.unscale_: expected gradients that can be divided in place, "
                "got float16; use MixedPrecision(accumulate=torch.float32), or zerocore.AdamW "
                "without unscale_"
            )
        if any(p.grad is not None and p.grad.is_complex() for m in models for p in m.params()):
            raise ValueError(
                "zerocore.GradScaler.unscale_: expected real gradients, got complex ones, which "
                "torch cannot unscale; use zerocore.AdamW without unscale_"
            )
        found = _torchs_unscale(self, optimizer, inv_scale, found_inf, allow_fp16)
        if not models or not found:
            return found
        anywhere = torch.stack([value.to(found_inf.device) for value in found.values()]).max()
        for sharded in models:
            for ranks in sharded.tensor_parallel_groups:
                anywhere = collectives.reduce_over(anywhere, ranks, maximum=True)
        widest = groups.widest(sharded.groups for sharded in models)
        return {
            found_inf.device: collectives.reduce_over_all(
                "zerocore.GradScaler.unscale_", anywhere, widest, maximum=True
            )
        }


_torchs_unscale = torch.amp.GradScaler._unscale_grads_


def install() -> None:
    """Makes torch.amp.GradScaler refuse shards, of which it would see one rank's only."""
    if torch.amp.GradScaler._unscale_grads_ is _torchs_unscale:
        torch.amp.GradScaler._unscale_grads_ = _refuse_shards


def _refuse_shards(
    self: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, *args: Any
) -> dict[torch.device, torch.Tensor]:
    if any(len(sharded.groups.ranks.shard) > 1 for sharded in models_of(optimizer)):
        raise RuntimeError(
            "torch.amp.GradScaler: expected whole gradients, got shards, about whose overflow the "
            "ranks would disagree; use zerocore.GradScaler"
        )
    return _torchs_unscale(self, optimizer, *args)
