"""AdamW with one fused pass over each flat shard."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from zerocore import _C, ops, registry
from zerocore.norm import clip_coefficient, grad_norm
from zerocore.runtime import Sharded
from zerocore.tensor_parallel import TensorParallel


def _padded(stop: int) -> int:
    """Where the next parameter of a flat buffer begins."""
    return -(-stop // _C.ALIGNMENT) * _C.ALIGNMENT


def _view(moments: torch.Tensor, param: torch.Tensor, start: int) -> torch.Tensor:
    """The part of 1-D moments that belongs to `param`, element by element, in its memory order."""
    if param.is_complex():
        moments, start = torch.view_as_complex(moments.view(-1, 2)), start // 2
    return moments.as_strided(param.shape, param.stride(), start)


def _flattened(tensor: torch.Tensor) -> torch.Tensor:
    """All elements of a dense tensor as a 1-D view, in the order of its memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _real(flat: torch.Tensor) -> torch.Tensor:
    """A 1-D tensor; of complex numbers, both parts of each in turn, which step by themselves."""
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


class _Member(NamedTuple):
    """A parameter in a buffer.

    Attributes:
        start, stop: the range of its elements in the buffer, of a complex one's real numbers.
        index: its place among the parameters of the flat buffer.
        how: where tensor-parallel ranks have the rest of it.
    """

    param: torch.Tensor
    start: int
    stop: int
    index: int = 0
    how: TensorParallel | None = None


@dataclass
class _Buffer:
    """Parameters that are stepped together: those of a flat shard, or one that is not sharded.

    Attributes:
        sharded, unit, flat: the flat shard; None for a parameter of its own.
        members: in the order of the flat buffer.
        own: one byte for each parameter of the flat shard: whether it is a member.
        exp_avg, exp_avg_sq: moments, 1-D like `values`; None before the first step.
        counters: each member's count of steps, 0-dim; None before its first one. Members that have
            always been stepped together share one: a kernel needs to count once for all of them.
        plan: the last step's, which is the next one's if the same members have gradients.
    """

    sharded: Sharded | None
    unit: int = 0
    flat: int = 0
    members: list[_Member] = field(default_factory=list)
    own: bytes = b""
    exp_avg: torch.Tensor | None = None
    exp_avg_sq: torch.Tensor | None = None
    counters: list[torch.Tensor | None] = field(default_factory=list)
    plan: _Plan | None = None

    def values(self) -> torch.Tensor:
        """The parameters, 1-D."""
        if self.sharded is not None:
            return _real(self.sharded.core.shard(self.unit, self.flat))
        return _real(_flattened(self.members[0].param.detach()))

    def grads(self) -> torch.Tensor:
        """The gradients, 1-D, anything where there is none."""
        if self.sharded is not None:
            return _real(self.sharded.core.main_gradient(self.unit, self.flat))
        param = self.members[0].param
        grad = param.grad.detach()
        if grad.stride() != param.stride():
            grad = torch.empty_strided(param.shape, param.stride(), dtype=grad.dtype).copy_(grad)
        return _real(_flattened(grad))

    def active(self) -> bytes:
        """One byte for each parameter of the flat shard: whether it is to be stepped.

        The gradients of those are in `grads` from then on.
        """
        if self.sharded is not None:
            return self.sharded.core.settle_gradients(self.unit, self.flat, self.own)
        return bytes([self.members[0].param.grad is not None])

    def step(
        self,
        plan: _Plan,
        hyper: torch.Tensor,
        scale: torch.Tensor | None,
        found_inf: torch.Tensor | None,
    ) -> None:
        """Steps the members of `plan`; see ops.fused_adamw_."""
        how = (self.exp_avg, self.exp_avg_sq, plan.ranges, hyper, plan.counters, scale, found_inf)
        if self.sharded is not None:
            self.sharded.core.adamw(self.unit, self.flat, *how, plan.active)
            return
        moments, rest = how[:2], how[2:]
        ops.fused_adamw_(self.values(), self.grads(), *moments, None, *rest)
        # The kernel wrote to its memory: tell autograd, for graphs that need the old values.
        torch.autograd.graph.increment_version(self.members[0].param)


@dataclass(frozen=True)
class _Plan:
    """What to do with a buffer whose `active` parameters have gradients.

    Attributes:
        active: see _Buffer.active.
        ranges: int64 [k, 2], as ops.fused_adamw_ takes them.
        groups: index of the param group of each range.
        counters: step count of each range.
        spans: (start, stop) of neighbouring gradients, whatever their groups and counts, that
            tensor-parallel ranks have in the same way.
    """

    active: bytes
    ranges: torch.Tensor
    groups: tuple[int, ...]
    counters: list[torch.Tensor]
    spans: list[tuple[int, int, TensorParallel | None]]


def _same_place(a: TensorParallel | None, b: TensorParallel | None) -> bool:
    """Whether sums over both are taken over the same ranks, with the same weight."""
    if a is None or b is None:
        return a is b
    return (a.groups, a.copies) == (b.groups, b.copies)


def _check_dense(param: torch.Tensor) -> None:
    """As torch's is_non_overlapping_and_dense."""
    expected = 1
    for stride, size in sorted(zip(param.stride(), param.shape, strict=True)):
        if size > 1 and stride != expected:
            raise ValueError(
                "zerocore.AdamW: expected a parameter whose elements fill its memory, got the "
                f"shape {tuple(param.shape)} with the strides {param.stride()}; make it contiguous"
            )
        expected *= size if size > 1 else 1


def check_options(groups: Iterable[Mapping[str, Any]]) -> None:
    """Refuses param groups that ask for what AdamW does not do.

    Raises:
        ValueError: for the first option of that kind.
    """
    for group in groups:
        for option in ("amsgrad", "maximize", "max_grad_norm"):
            if group.get(option):
                raise ValueError(
                    f"zerocore.AdamW: expected no {option} in a param group, got {group[option]}"
                )


class AdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101, algorithm 2), or Adam with L2 decay.

    The same update as torch.optim.AdamW, computed in one pass over each flat shard: unscaling and
    clipping of the gradients, the moments' and parameters' update, and with a resident window in a
    narrow dtype (stages 0 to 2) the rounded copy in it. Works on parameters of sharded models and
    on any others together. Parameters without a gradient are left alone and their step count does
    not advance. Understands zerocore.GradScaler and torch.amp.GradScaler. Nothing of it waits for a
    device.

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
        grad_norm: 0-dim fp32 tensor with the last global norm (of unscaled gradients, before
            clipping); None without `max_grad_norm`.
        skipped: 0-dim fp32 tensor: 1.0 if gradients that are not finite made the last step change
            nothing, 0.0 if not; None if nobody asked.

    Raises:
        ValueError: if an option is out of its range.
    """

    # torch.amp.GradScaler leaves grad_scale and found_inf here, instead of unscaling and skipping.
    _step_supports_amp_scaling = True

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
        self.skipped: torch.Tensor | None = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch.optim.Optimizer.add_param_group.

        Raises:
            ValueError: for an option that this optimizer, or a group of it, does not have.
        """
        check_options([param_group])
        super().add_param_group(param_group)
        self._buffers = None

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and copy."""
        return super().__getstate__() | {"max_grad_norm": self.max_grad_norm}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Accepts the param groups of torch.optim.Adam and AdamW as well.

        Raises:
            ValueError: if they ask for what this optimizer does not do.
        """
        check_options(state["param_groups"])
        super().__setstate__(state)
        self._buffers = None
        if "max_grad_norm" in state:  # a copy, not a load_state_dict
            self.grad_norm = self.skipped = None
        for group in self.param_groups:
            group.setdefault("decoupled", group.get("decoupled_weight_decay", True))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch.optim.Optimizer.load_state_dict; see `__setstate__`."""
        check_options(state_dict["param_groups"])  # before anything changes
        super().load_state_dict(state_dict)

    def state_dict(self) -> dict[str, Any]:
        """As torch.optim.Optimizer.state_dict."""
        packed = super().state_dict()
        # Here some parameters share a count; whoever loads it may count for each.
        packed["state"] = {
            key: {k: v.clone() if k == "step" else v for k, v in state.items()}
            for key, state in packed["state"].items()
        }
        return packed

    @torch.no_grad()
    def step(self, closure: Callable[[], torch.Tensor] | None = None) -> torch.Tensor | None:
        """One update. A collective over the models' ranks if gradients are clipped or unscaled.

        Args:
            closure: called first, with gradients enabled; its result is returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        fingerprint = registry.fingerprint(self)
        if self._buffers is None or fingerprint != self._planned:
            self._buffers = self._make_buffers()
            self._planned = fingerprint
        plans = [self._plan(buffer) for buffer in self._buffers]
        scale = self._scale(plans)
        tables: dict[tuple[int, ...], torch.Tensor] = {}  # of hyperparameters, by the groups
        for buffer, plan in zip(self._buffers, plans, strict=True):
            if not plan.counters:
                continue
            if plan.groups not in tables:
                tables[plan.groups] = self._hyper(plan.groups)
            buffer.step(plan, tables[plan.groups], scale, self.skipped)
        return loss

    def _make_buffers(self) -> list[_Buffer]:
        buffers: dict[tuple[int, int, int], _Buffer] = {}
        for group in self.param_groups:
            for param in group["params"]:
                entry = registry.entry_of(param)
                sharded = entry.sharded() if entry is not None else None
                width = 2 if param.is_complex() else 1
                if sharded is None:
                    _check_dense(param)
                    buffer = buffers[id(param), -1, -1] = _Buffer(None, own=b"\1")
                    buffer.members.append(_Member(param, 0, width * param.numel()))
                    continue
                key = (id(sharded), entry.unit, entry.flat)
                buffer = buffers.setdefault(key, _Buffer(sharded, entry.unit, entry.flat))
                place = sharded.core.within_shard(entry.unit, entry.flat, entry.index)
                start, stop = (width * element for element in place)
                member = _Member(param, start, stop, entry.index, entry.tensor_parallel)
                buffer.members.append(member)
        for buffer in buffers.values():
            buffer.members.sort(key=lambda member: member.index)
            if buffer.sharded is not None:
                own = bytearray(len(buffer.sharded.flats[buffer.unit][buffer.flat]))
                for member in buffer.members:
                    own[member.index] = 1
                buffer.own = bytes(own)
            self._adopt_state(buffer)
        return list(buffers.values())

    def _adopt_state(self, buffer: _Buffer) -> None:
        """Moves moments that were loaded, or made before a change of groups, into flat buffers."""
        for param, start, *_ in buffer.members:
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
                state[key] = _view(getattr(buffer, key), param, start).copy_(old)
        self._adopt_counters(buffer)

    def _adopt_counters(self, buffer: _Buffer) -> None:
        """Members that have taken as many steps share a counter from here on."""
        buffer.counters = [None] * len(buffer.members)
        shared: dict[float, torch.Tensor] = {}
        for i, member in enumerate(buffer.members):
            if self.state.get(member.param):
                count = float(self.state[member.param]["step"])
                if count not in shared:
                    shared[count] = torch.full((), count, device=member.param.device)
                self._set_counter(buffer, i, shared[count])

    def _set_counter(self, buffer: _Buffer, member: int, counter: torch.Tensor) -> None:
        buffer.counters[member] = counter
        self.state[buffer.members[member].param]["step"] = counter

    @staticmethod
    def _make_moments(buffer: _Buffer) -> None:
        if buffer.exp_avg is None:
            values = buffer.values()
            buffer.exp_avg = torch.zeros_like(values)
            buffer.exp_avg_sq = torch.zeros_like(values)

    def _scale(self, plans: list[_Plan]) -> torch.Tensor | None:
        """The factor on all gradients, one fp32 element, None for 1; sets grad_norm and skipped."""
        loss_scale: torch.Tensor | None = getattr(self, "grad_scale", None)
        found_inf: torch.Tensor | None = getattr(self, "found_inf", None)
        inverse = None if loss_scale is None else loss_scale.double().reciprocal()
        self.skipped = None if found_inf is None else found_inf.float()
        if self.max_grad_norm is None and (loss_scale is None or found_inf is not None):
            return None if inverse is None else inverse.float().reshape(1)
        models = dict.fromkeys(b.sharded for b in self._buffers if b.sharded is not None)
        parts = [
            (buffer.sharded, how, grads[start:stop])
            for buffer, plan in zip(self._buffers, plans, strict=True)
            if plan.spans
            for grads in (buffer.grads(),)
            for start, stop, how in plan.spans
        ]
        norm = grad_norm("zerocore.AdamW.step", parts, models)
        if self.max_grad_norm is not None:
            norm = self.grad_norm = (norm if inverse is None else norm * inverse).float()
        found = (~norm.isfinite()).float()
        self.skipped = found if found_inf is None else torch.maximum(found, self.skipped)
        if self.max_grad_norm is None:
            return inverse.float().reshape(1)
        factor = clip_coefficient(self.grad_norm, self.max_grad_norm)
        return (factor if inverse is None else factor * inverse.float()).reshape(1)

    def _plan(self, buffer: _Buffer) -> _Plan:
        active = buffer.active()
        if buffer.plan is None or buffer.plan.active != active:
            going = [i for i, member in enumerate(buffer.members) if active[member.index]]
            self._separate_counters(buffer, going)
            buffer.plan = self._make_plan(buffer, active, going)
        return buffer.plan

    def _separate_counters(self, buffer: _Buffer, going: list[int]) -> None:
        """Gives members that are stepped without those they have been stepped with their own."""
        going = set(going)
        sharing: dict[int, list[int]] = {}
        for i, counter in enumerate(buffer.counters):
            sharing.setdefault(id(counter), []).append(i)
        for members in sharing.values():
            leaving = [i for i in members if i in going]
            counter = buffer.counters[members[0]]
            if not leaving or (counter is not None and len(leaving) == len(members)):
                continue
            if counter is None:
                self._make_moments(buffer)
                counter = torch.zeros((), device=buffer.exp_avg.device)
                for i in leaving:
                    param, start, *_ = buffer.members[i]
                    for key in ("exp_avg", "exp_avg_sq"):
                        self.state[param][key] = _view(getattr(buffer, key), param, start)
            own = counter.clone()
            for i in leaving:
                self._set_counter(buffer, i, own)

    def _make_plan(self, buffer: _Buffer, active: bytes, going: list[int]) -> _Plan:
        group_of = {id(p): g for g, group in enumerate(self.param_groups) for p in group["params"]}
        ranges: list[list[int]] = []
        keys: list[tuple[int, int]] = []
        spans: list[list[Any]] = []
        counters: dict[int, torch.Tensor] = {}
        for i in going:
            param, start, stop, _, how = buffer.members[i]
            counter = buffer.counters[i]
            counters[id(counter)] = counter
            if start == stop:
                continue
            # The padding between neighbours is zero and stays so.
            key = (group_of[id(param)], id(counter))
            if keys and keys[-1] == key and start == _padded(ranges[-1][1]):
                ranges[-1][1] = stop
            else:
                ranges.append([start, stop])
                keys.append(key)
            if spans and start == _padded(spans[-1][1]) and _same_place(how, spans[-1][2]):
                spans[-1][1] = stop
            else:
                spans.append([start, stop, how])
        # A step counts on every rank, those without an element of the parameter too.
        end = ranges[-1][1] if ranges else 0
        for uncounted in counters.keys() - {counter for _, counter in keys}:
            ranges.append([end, end])
            keys.append((0, uncounted))
        return _Plan(
            active,
            torch.tensor(ranges, dtype=torch.int64).view(-1, 2),
            tuple(group for group, _ in keys),
            [counters[counter] for _, counter in keys],
            [tuple(span) for span in spans],
        )

    def _hyper(self, groups: tuple[int, ...]) -> torch.Tensor:
        """The rows of these param groups, as ops.fused_adamw_ takes them."""
        row_of = {}
        for g in set(groups):
            group = self.param_groups[g]
            row_of[g] = (
                float(group["lr"]),
                *group["betas"],
                group["eps"],
                group["weight_decay"],
                float(group["decoupled"]),
            )
        return torch.tensor(list(map(row_of.__getitem__, groups)), dtype=torch.float64)
