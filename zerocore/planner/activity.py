"""What a model computes and holds in a step, found by running it on tensors without memory."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from zerocore.planner.schedule import ROOT, Call
from zerocore.policy import MixedPrecision
from zerocore.runtime import map_tensors, tensors_in
from zerocore.units import UnitPlan

aten = torch.ops.aten


@dataclass
class Cost:
    """What a part of a step takes.

    Attributes:
        flops: of matrix products and attention: two for a multiplication with an addition.
        traffic: bytes that all other operations read and write.
        operations: how many there are, views not counted.
    """

    flops: float = 0.0
    traffic: float = 0.0
    operations: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.flops + other.flops,
            self.traffic + other.traffic,
            self.operations + other.operations,
        )


@dataclass(frozen=True)
class Activity:
    """A micro-batch, in the order in which it computes.

    Attributes:
        calls: its parts.
        costs: of each.
        peaks: of each, most bytes at once of activations, temporaries, and gradients of activations
            and of the unit's parameters.
        saved: bytes of activations when the forward is over.
    """

    calls: tuple[Call, ...]
    costs: tuple[Cost, ...]
    peaks: tuple[int, ...]
    saved: int


@torch.no_grad()
def fake_copies(model: nn.Module, mode: FakeTensorMode, mixed: MixedPrecision | None) -> Any:
    """Fake parameters and buffers on the CPU, by (module, name), in dtypes of computation."""
    made: dict[int, torch.Tensor] = {}
    found = []
    for module in model.modules():
        dtypes = mixed and (mixed.param, mixed.buffer, None)
        tables = (module._parameters, module._buffers, vars(module))
        for table, narrow in zip(tables, dtypes or (None, None, None), strict=True):
            for name, tensor in table.items():
                if not isinstance(tensor, torch.Tensor):
                    continue
                if id(tensor) not in made:
                    floating = tensor.is_floating_point() and narrow
                    dtype = narrow if floating else tensor.dtype
                    with mode:
                        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype)
                        if isinstance(tensor, nn.Parameter):
                            fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
                    made[id(tensor)] = fake
                found.append((table, name, tensor, made[id(tensor)]))
    return found


@contextlib.contextmanager
def _restored(model: nn.Module) -> Iterator[None]:
    """Afterwards modules, and the tables in them, have again what they had."""
    tables: list[Any] = []
    for module in model.modules():
        inside = [value for value in vars(module).values() if isinstance(value, dict | set)]
        tables += [vars(module), *inside]
    before = [table.copy() for table in tables]
    try:
        yield
    finally:
        for table, contents in zip(tables, before, strict=True):
            table.clear()
            table.update(contents)


@contextlib.contextmanager
def _shown(found: Sequence[tuple[dict, str, torch.Tensor, torch.Tensor]]) -> Iterator[None]:
    """The model has the fake tensors in their places."""
    for table, name, _, fake in found:
        table[name] = fake
    yield


def trace_step(
    model: nn.Module,
    plans: Sequence[UnitPlan],
    inputs: Callable[[], tuple[tuple, dict]],
    mixed_precision: MixedPrecision | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
) -> Activity:
    """Runs a forward and a backward without memory and without computing anything.

    Args:
        model: on any device, the meta device for example; it is as before afterwards, what it
            changes elsewhere is not.
        plans: its units.
        inputs: gives the forward's positional and keyword arguments; tensors that are made in it
            have no memory.
        loss: of what the model returns; None: its `loss`, else the mean of its floating tensors.

    Raises:
        ValueError: if the model cannot be run so, because it looks at values (`item()`), for one.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    found = fake_copies(model, mode, mixed_precision)
    watch = _Watch(plans, {id(t): fake for _, _, t, fake in found})
    try:
        with _restored(model), _shown(found), mode, watch.hooked(), watch:
            args, kwargs = inputs()
            watch.forget(args, kwargs)
            if mixed_precision is not None:
                args, kwargs = (_cast(value, mixed_precision.param) for value in (args, kwargs))
            with torch.enable_grad():
                output = model(*args, **kwargs)
                if mixed_precision is not None and mixed_precision.output is not None:
                    output = _cast(output, mixed_precision.output)
                value = (loss or _loss)(output)
            del output
            watch.begin_backward()
            value.backward()
    except Exception as error:
        raise ValueError(
            "activations: expected a model that runs on tensors without values, got "
            f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}; "
            "leave activations out, or keep its forward from looking at values, as item() does"
        ) from error
    return watch.activity()


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return map_tensors(value, lambda t: t.to(dtype) if t.is_floating_point() else t)


def _loss(output: Any) -> torch.Tensor:
    value = getattr(output, "loss", None)
    if value is not None:
        return value
    floating = [t for t in tensors_in(output) if t.is_floating_point() and t.requires_grad]
    if not floating:
        raise TypeError("the model's output has no floating tensor that needs gradients")
    return torch.stack([tensor.float().mean() for tensor in floating]).sum()


@dataclass
class _Part:
    """A call under way."""

    unit: int
    phase: str
    enters: bool
    leaves: bool = False
    reduces: bool = False
    cost: Cost = field(default_factory=Cost)
    peak: int = 0


class _Watch(TorchDispatchMode):
    """Sees every operation, and which unit it is for.

    Storages that operations make are counted until the last reference to them is gone.
    """

    def __init__(self, plans: Sequence[UnitPlan], fakes: dict[int, torch.Tensor]) -> None:
        super().__init__()
        self._plans = plans
        self._params = [[fakes[id(p)] for _, p in plan.params] for plan in plans]
        self._known: dict[int, weakref.ref] = {}
        self._live = 0
        self._saved = 0
        self._backward = False
        self._parts: list[_Part] = []
        self._running = [ROOT]  # units, innermost last
        self._waiting = [sum(p.requires_grad for p in params) for params in self._params]
        self._entered: list[int] = []  # units in backward, newest last
        for fake in fakes.values():
            self._remember(fake, counts=False)

    # ---- which unit -------------------------------------------------------------------------

    @contextlib.contextmanager
    def hooked(self) -> Iterator[None]:
        """The hooks that the runtime has as well: see zerocore.runtime."""
        handles = []
        for unit, plan in enumerate(self._plans):
            for module in plan.modules if unit != ROOT else ():
                handles.append(module.register_forward_pre_hook(self._enter(unit)))
                handles.append(module.register_forward_hook(self._leave(unit)))
            for param in self._params[unit]:
                if param.requires_grad:
                    hook = self._accumulated(unit)
                    handles.append(param.register_post_accumulate_grad_hook(hook))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, unit: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any) -> None:
            self._running.append(unit)
            self._begin(unit, enters=True)

        return hook

    def _leave(self, unit: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            # What is computed again inside a backward stays for its own backward.
            self._part().leaves = not self._backward
            self._running.pop()
            self._begin(self._running[-1])
            for tensor in tensors_in(output):
                if tensor.requires_grad and not tensor.is_leaf:
                    tensor.register_hook(self._backward_begins(unit))

        return hook

    def _backward_begins(self, unit: int) -> Callable[[torch.Tensor], None]:
        def hook(_: torch.Tensor) -> None:
            if unit not in self._entered:
                self._end_entered(keep=unit)
                self._entered.append(unit)
                self._begin(unit, enters=True)

        return hook

    def _end_entered(self, keep: int) -> None:
        """The output of one unit is the input of the next: that one's backward is over."""
        while self._entered and self._entered[-1] != keep:
            self._last_of(self._entered.pop()).leaves = True

    def _accumulated(self, unit: int) -> Callable[[torch.Tensor], None]:
        def hook(_: torch.Tensor) -> None:
            self._waiting[unit] -= 1
            if self._waiting[unit] > 0:
                return
            part = self._part()
            if part.unit != unit:
                self._begin(unit)
                part = self._part()
            part.reduces = True
            for param in self._params[unit]:
                param.grad = None
            if unit in self._entered:
                self._entered.remove(unit)
                part.leaves = True
                self._begin(self._entered[-1] if self._entered else ROOT)

        return hook

    def begin_backward(self) -> None:
        """The forward and the loss are over."""
        self._part().leaves = True
        self._saved = self._live
        self._backward = True
        self._begin(ROOT, enters=True)

    def _begin(self, unit: int, enters: bool = False) -> None:
        phase = "backward" if self._backward else "forward"
        self._parts.append(_Part(unit, phase, enters, peak=self._live))

    def _part(self) -> _Part:
        if not self._parts:
            self._begin(ROOT, enters=True)
        return self._parts[-1]

    def _last_of(self, unit: int) -> _Part:
        return next(part for part in reversed(self._parts) if part.unit == unit)

    # ---- what it costs ----------------------------------------------------------------------

    def forget(self, *values: Any) -> None:
        """Tensors that are not the model's: its inputs."""
        for tensor in tensors_in(list(values)):
            storage = tensor.untyped_storage()
            if storage._cdata in self._known:
                self._live -= storage.nbytes()
                del self._known[storage._cdata]
            self._remember(tensor, counts=False)
        self._parts.clear()

    def _remember(self, tensor: torch.Tensor, counts: bool = True) -> bool:
        """Whether its storage is new."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return False

        def gone(_: Any) -> None:
            if self._known.pop(key, None) is not None and counts:
                self._live -= size

        self._known[key] = weakref.ref(storage, gone)
        if counts:
            self._live += size
            part = self._part()
            part.peak = max(part.peak, self._live)
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        outputs = [t for t in tensors_in(result) if isinstance(t, torch.Tensor)]
        part = self._part()
        new = [self._remember(tensor) for tensor in outputs]
        if any(new) or func._schema.is_mutable:
            self._add(part.cost, func, args, kwargs, result, outputs)
        return result

    @staticmethod
    def _add(
        cost: Cost, func: Any, args: tuple, kwargs: dict, result: Any, outputs: list[torch.Tensor]
    ) -> None:
        cost.operations += 1
        packet = func._overloadpacket
        if packet in flop_registry:
            cost.flops += flop_registry[packet](*args, **kwargs, out_val=result)
        elif packet == aten._scaled_dot_product_flash_attention_for_cpu:
            cost.flops += sdpa_flop_count(*(t.shape for t in args[:3]))
        elif packet == aten._scaled_dot_product_flash_attention_for_cpu_backward:
            cost.flops += sdpa_backward_flop_count(*(t.shape for t in args[:4]))
        elif packet.__name__.startswith("mkldnn_rnn_layer"):
            steps, back = args[0].shape[:-1].numel(), packet.__name__.endswith("backward")
            cost.flops += (4 if back else 2) * steps * (args[1].numel() + args[2].numel())
        else:
            tensors = [*tensors_in(list(args)), *tensors_in(kwargs), *outputs]
            cost.traffic += sum(t.numel() * t.element_size() for t in tensors)

    def activity(self) -> Activity:
        """What was seen, once the backward is over."""
        for unit in [*self._entered, ROOT]:
            self._last_of(unit).leaves = True
        # Units of which a parameter was not used are reduced at the end.
        for unit, params in enumerate(self._params):
            expected = sum(param.requires_grad for param in params)
            if 0 < self._waiting[unit] < expected:
                part = _Part(unit, "backward", enters=False, reduces=True, peak=self._live)
                self._parts.append(part)
        parts = [p for p in self._parts if p.cost.operations or p.enters or p.leaves or p.reduces]
        return Activity(
            tuple(Call(p.unit, p.phase, p.enters, p.leaves, p.reduces) for p in parts),
            tuple(part.cost for part in parts),
            tuple(part.peak for part in parts),
            self._saved,
        )
