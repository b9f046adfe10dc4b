"""AdamW with one fused pass over each flat shard."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from zerocore import norm, ops, registry
from zerocore.runtime import Sharded


@dataclass
class _Buffer:
    """Parameters that are stepped together: those of a flat shard, or one that is not sharded.

    Attributes:
        sharded, unit, flat: the flat shard; None for a parameter of its own.
        members: (parameter, start, stop) with the range of its elements in `values`.
        exp_avg, exp_avg_sq: moments, 1-D like `values`; None before the first step.
    """

    sharded: Sharded | None
    unit: int = 0
    flat: int = 0
    members: list[tuple[torch.Tensor, int, int]] = field(default_factory=list)
    exp_avg: torch.Tensor | None = None
    exp_avg_sq: torch.Tensor | None = None

    def values(self) -> torch.Tensor:
        """The parameters, 1-D."""
        if self.sharded is not None:
            return self.sharded.core.shard(self.unit, self.flat)
        return self.members[0][0].detach().view(-1)

    def grads(self) -> torch.Tensor:
        """The gradients, 1-D, anything where there is none."""
        if self.sharded is not None:
            return self.sharded.core.main_gradient(self.unit, self.flat)
        return self.members[0][0].grad.detach().reshape(-1)


class AdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101, algorithm 2), or Adam with L2 decay.

    The same update as torch.optim.AdamW, computed in one pass over each flat shard: gradient
    scaling (clipping) and the moments' and parameters' update. Works on parameters of sharded
    models and on any others together. Parameters without a gradient are left alone and their step
    count does not advance.

    Args:
        params: parameters, or dicts of param groups.
        lr: learning rate.
        betas: decay rates of the first and second moment, each in [0, 1).
        eps: added to the root of the second moment.
        weight_decay: decay rate.
        decoupled: True for AdamW; False adds the decay to the gradient (Adam).
        max_grad_norm: clips the gradients' global L2 norm before the update; `inf` measures only.
            With either, a step whose norm is not finite changes nothing, on any rank.

    Attributes:
        grad_norm: 0-dim fp32 tensor with the last global norm; None without `max_grad_norm`.

    Raises:
        ValueError: if an option is out of its range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        decoupled: bool = True,
        max_grad_norm: float | None = None,
    ) -> None:
        for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
            if not value >= 0.0:
                raise ValueError(f"{name}: expected a number of at least 0, got {value}")
        if len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
            raise ValueError(f"betas: expected two numbers in [0, 1), got {betas}")
        if max_grad_norm is not None and not max_grad_norm > 0.0:
            raise ValueError(f"max_grad_norm: expected a positive number, got {max_grad_norm}")
        defaults = {
            "lr": lr,
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "decoupled": decoupled,
        }
        self._buffers: list[_Buffer] | None = None
        self._planned: tuple[int, ...] = ()
        super().__init__(params, defaults)
        self.max_grad_norm = max_grad_norm
        self.grad_norm: torch.Tensor | None = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch.optim.Optimizer.add_param_group."""
        super().add_param_group(param_group)
        self._buffers = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Accepts the param groups of torch.optim.Adam and AdamW as well.

        Raises:
            ValueError: if they ask for what this optimizer does not do.
        """
        super().__setstate__(state)
        self._buffers = None
        for group in self.param_groups:
            group.setdefault("decoupled", group.get("decoupled_weight_decay", True))
            for option in ("amsgrad", "maximize"):
                if group.get(option):
                    raise ValueError(f"zerocore.AdamW: expected {option}=False, got True")

    @torch.no_grad()
    def step(self, closure: Callable[[], torch.Tensor] | None = None) -> torch.Tensor | None:
        """One update. A collective over the shard group if gradients are clipped.

        Args:
            closure: called first, with gradients enabled; its result is returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        fingerprint = registry.fingerprint(self)
        if self._buffers is None or fingerprint != self._planned:
            self._buffers = self._plan()
            self._planned = fingerprint
        scale = None
        if self.max_grad_norm is not None:
            scale = self._clip()
            if not torch.isfinite(self.grad_norm):
                return loss
        groups = {id(p): group for group in self.param_groups for p in group["params"]}
        for buffer in self._buffers:
            self._step_buffer(buffer, groups, scale)
        return loss

    def _plan(self) -> list[_Buffer]:
        buffers: dict[tuple[int, int, int], _Buffer] = {}
        for group in self.param_groups:
            for param in group["params"]:
                entry = registry.entry_of(param)
                sharded = entry.sharded() if entry is not None else None
                if sharded is None:
                    buffer = buffers[id(param), -1, -1] = _Buffer(None)
                    buffer.members.append((param, 0, param.numel()))
                    continue
                key = (id(sharded), entry.unit, entry.flat)
                buffer = buffers.setdefault(key, _Buffer(sharded, entry.unit, entry.flat))
                place = sharded.core.within_shard(entry.unit, entry.flat, entry.index)
                buffer.members.append((param, *place))
        for buffer in buffers.values():
            buffer.members.sort(key=lambda member: member[1:])
            self._adopt_state(buffer)
        return list(buffers.values())

    def _adopt_state(self, buffer: _Buffer) -> None:
        """Moves moments that were loaded, or made before a change of groups, into flat buffers."""
        for param, start, stop in buffer.members:
            state = self.state.get(param)
            if not state:
                continue
            self._make_moments(buffer)
            for key in ("exp_avg", "exp_avg_sq"):
                old = state[key]
                if old.shape != param.shape:
                    raise ValueError(
                        f"zerocore.AdamW: expected {key} with this rank's shape "
                        f"{tuple(param.shape)}, got {tuple(old.shape)}; state of whole parameters "
                        "does not fit shards"
                    )
                state[key] = getattr(buffer, key)[start:stop].view(param.shape).copy_(old)
            if not isinstance(state["step"], torch.Tensor):
                state["step"] = torch.tensor(float(state["step"]))

    @staticmethod
    def _make_moments(buffer: _Buffer) -> None:
        if buffer.exp_avg is None:
            values = buffer.values()
            buffer.exp_avg = torch.zeros_like(values)
            buffer.exp_avg_sq = torch.zeros_like(values)

    def _clip(self) -> torch.Tensor | None:
        """Measures the global norm; returns the factor on all gradients, None for 1."""
        self.grad_norm = norm.grad_norm(
            (buffer.sharded, param) for buffer in self._buffers for param, _, _ in buffer.members
        )
        if math.isinf(self.max_grad_norm):
            return None
        return norm.clip_coefficient(self.grad_norm, self.max_grad_norm).reshape(1)

    def _step_buffer(
        self, buffer: _Buffer, groups: dict[int, dict[str, Any]], scale: torch.Tensor | None
    ) -> None:
        ranges: list[tuple[int, int]] = []
        hyper: list[tuple[float, ...]] = []
        steps: list[torch.Tensor] = []
        stepped: list[torch.Tensor] = []
        for param, start, stop in buffer.members:
            if param.grad is None:
                continue
            stepped.append(param)
            group = groups[id(param)]
            beta1, beta2 = group["betas"]
            row = (float(group["lr"]), beta1, beta2, group["eps"], group["weight_decay"])
            ranges.append((start, stop))
            hyper.append((*row, float(group["decoupled"])))
            steps.append(self._step_count(buffer, param, start, stop))
        if ranges:
            ops.fused_adamw_(
                buffer.values(),
                buffer.grads(),
                buffer.exp_avg,
                buffer.exp_avg_sq,
                None,
                torch.tensor(ranges, dtype=torch.int64),
                torch.tensor(hyper, dtype=torch.float64),
                steps,
                scale,
            )
        # The kernel wrote to the flat shard: tell autograd, for graphs that need the old values.
        torch.autograd.graph.increment_version(stepped)

    def _step_count(
        self, buffer: _Buffer, param: torch.Tensor, start: int, stop: int
    ) -> torch.Tensor:
        """The steps that `param` has taken; its state is made on the first one."""
        state = self.state[param]
        if not state:
            self._make_moments(buffer)
            state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
            state["exp_avg"] = buffer.exp_avg[start:stop].view(param.shape)
            state["exp_avg_sq"] = buffer.exp_avg_sq[start:stop].view(param.shape)
        return state["step"]
