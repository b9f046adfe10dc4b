"""A sharded model: hooks on its modules that drive the C++ runtime."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from zerocore import _C, policy, registry
from zerocore.buffers import Buffers
from zerocore.collectives import exchange
from zerocore.groups import Groups, reserve_channels
from zerocore.planner.sizes import ModelSizes
from zerocore.policy import Lifetimes, MixedPrecision
from zerocore.strides import memory_strides
from zerocore.tensor_parallel import TensorParallel
from zerocore.units import UnitPlan
from zerocore.values import Values


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in nested tuples, lists, mappings, dataclasses and other plain objects.

    Every call of a unit comes here: tuples of types, since to make a union takes time.
    """
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        children = value
    elif isinstance(value, (dict, Mapping)):  # an abstract class takes longer to ask
        children = value.values()
    elif isinstance(value, (type, nn.Module)) or not hasattr(value, "__dict__"):
        return []
    elif dataclasses.is_dataclass(value):
        children = [getattr(value, field.name) for field in dataclasses.fields(value)]
    else:
        # Not deeper than this: the objects of an object can be anything, and cyclic.
        kinds = (torch.Tensor, list, tuple, dict)
        children = [child for child in vars(value).values() if isinstance(child, kinds)]
    tensors = []
    for child in children:
        tensors += tensors_in(child)
    return tensors


def _failed(output: Any) -> bool:
    """Whether a forward hook is called for an exception: torch gives it None as the output then."""
    return output is None and sys.exc_info()[1] is not None


def map_tensors(value: Any, change: Any) -> Any:
    """`value` with `change` applied to the tensors of nested tuples, lists, dicts, dataclasses."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(child, change) for child in value))
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(child, change) for child in value)
    if isinstance(value, dict):
        copy = value.copy()
        for key, child in value.items():
            copy[key] = map_tensors(child, change)
        return copy
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = {
            field.name: map_tensors(getattr(value, field.name), change)
            for field in dataclasses.fields(value)
            if field.init
        }
        return dataclasses.replace(value, **changed)
    return value


@contextlib.contextmanager
def logged(models: Iterable[Sharded], kind: str) -> Iterator[None]:
    """Logs the beginning and the end of what this rank does with models outside of their passes."""
    for sharded in models:
        sharded.core.begin_span(kind)
    try:
        yield
    finally:
        for sharded in models:
            sharded.core.end_span(kind)


def _require_original(module: nn.Module, original: nn.Module | None, what: str) -> None:
    if module is not original:
        raise RuntimeError(
            f"zerocore: expected {what} that was sharded, got a copy, which has its hooks but not "
            "its shards; build and shard a second model and load the state_dict()"
        )


def _refuse_copies(model: nn.Module) -> None:
    """Makes copy.deepcopy of the modules an error: they would have copies of shards.

    copy.deepcopy looks for `__deepcopy__` on the object itself.
    """
    for module in model.modules():
        module.__deepcopy__ = _refuse_copy


def _refuse_copy(memo: Any) -> None:
    raise RuntimeError(
        "zerocore: expected copy.deepcopy before zerocore.shard, got it for a module of a sharded "
        "model (torch.optim.swa_utils.AveragedModel copies too); use zerocore.EMA(model) for "
        "averaged weights, else build and shard a second model and load the state_dict()"
    )


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of one `zerocore.shard` call, checked."""

    stage: int
    lifetimes: Lifetimes
    mixed_precision: MixedPrecision | None
    reshard_after_forward: bool
    prefetch: int
    max_window_bytes: int
    register_windows: bool
    timeout: float

    def at_stage(self, stage: int) -> Options:
        """The same at another stage."""
        return dataclasses.replace(self, stage=stage, lifetimes=policy.STAGES[stage])


def _make_core(groups: Groups, device: torch.device, options: Options, channels: int) -> _C.Runtime:
    """The C++ runtime. A collective over the ranks of each group."""
    mixed = options.mixed_precision
    shard_channel, replicate_channel = reserve_channels(groups.ranks, channels)
    # gloo's own collectives move more than they need to, see pairwise.cpp.
    pairwise = groups.backend == "gloo"
    return _C.Runtime(
        shard_group=groups.shard.group_name if groups.shard else "",
        replicate_group=groups.replicate.group_name if groups.replicate else "",
        reduce_shard_group=groups.reduce_shard.group_name if groups.reduce_shard else "",
        reduce_replicate_group=(
            groups.reduce_replicate.group_name if groups.reduce_replicate else ""
        ),
        control=groups.host,
        log=groups.journal.log,
        fault=groups.journal.fault,
        shard_channel=shard_channel,
        replicate_channel=replicate_channel,
        device=device,
        pairwise=pairwise,
        persistent=options.lifetimes.full_parameters_stay,
        reshard_after_forward=options.reshard_after_forward,
        prefetch=options.prefetch,
        max_window_bytes=options.max_window_bytes,
        register_windows=options.register_windows,
        launch_bytes=policy.launch_bytes(groups.backend),
        compute_dtype=mixed.param if mixed else None,
        reduce_dtype=(mixed.reduce or mixed.param) if mixed else None,
        accumulate_dtype=mixed.accumulate if mixed else None,
        master_dtype=mixed.master if mixed else None,
    )


class Sharded:
    """The state of one `zerocore.shard` call.

    Attributes:
        core: the C++ runtime.
        groups: the process groups.
        device: that of the parameters.
        options: as given to `zerocore.shard`.
        reason: why this stage was taken, if zerocore took it.
        sizes: shapes and dtypes of parameters and buffers before this.
        units, elements: name and number of elements of each unit; unit 0 is the root.
        modules: whose forward needs each unit, weakly.
        flats: the parameters of each flat buffer of each unit.
        trainable: whether those of each were, when they were sharded.
        buffers: what `MixedPrecision.buffer` does, for the modules that this call owns.
        state_stays: the full tensors of state_dict() are for this rank too.
        shows_average: a `zerocore.EMA` has put averages in the place of the parameters.
        unloaded: what has no values yet of a model with `init="empty"`, until its first forward.
        tensor_parallel_groups: the different `TensorParallel.groups` of the parameters, in the same
            order on all ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        plans: list[UnitPlan],
        groups: Groups,
        device: torch.device,
        options: Options,
        tensor_parallel: Mapping[nn.Parameter, TensorParallel],
        values: Values,
    ) -> None:
        self.groups = groups
        self.device = device
        self.options = options
        buffers = [b for m in registry.own_modules(model) for b in m.buffers(recurse=False)]
        buffers = [b.to_local() if isinstance(b, DTensor) else b for b in buffers]
        self.sizes = ModelSizes.of_plans(model, plans, buffers)
        self.units = [plan.name for plan in plans]
        self.elements = [sum(p.numel() for _, p in plan.params) for plan in plans]
        self.modules = [[weakref.ref(module) for module in plan.modules] for plan in plans]
        self.flats: list[list[list[nn.Parameter]]] = []
        self.trainable: list[list[bool]] = []
        self.reason = ""
        self.shows_average = False
        self.state_stays = True
        self.unloaded = values.unloaded
        self.tensor_parallel_groups = list(
            dict.fromkeys(how.groups for how in tensor_parallel.values())
        )
        self._warned = False
        # Two a flat buffer: windows and reductions, and full parameters in their own dtype.
        channels = 2 * sum(len(plan.flats()) for plan in plans)
        with groups.journal.collective("zerocore.shard"):  # ranks find out how to reach each other
            self.core = _make_core(groups, device, options, channels)
        groups.journal.units = self.units
        groups.journal.core = weakref.ref(self.core)
        for plan in plans:
            self._add_unit(plan, tensor_parallel, values)
        self.core.seal()
        for nested in registry.sharded_models(model):
            self.core.add_nested(nested.core)
        self._hook_root(model)
        for unit, plan in enumerate(plans[1:], start=1):
            for module in plan.modules:
                self._hook_unit(module, unit)
        values.take_buffers(device)
        mixed = options.mixed_precision
        self.buffers = Buffers(registry.own_modules(model), mixed.buffer if mixed else None)
        _refuse_copies(model)
        registry.add_model(model, self)

    def _add_unit(
        self,
        plan: UnitPlan,
        tensor_parallel: Mapping[nn.Parameter, TensorParallel],
        values: Values,
    ) -> None:
        """Hands the unit's parameters to the C++ runtime."""
        unit = len(self.flats)
        flats = plan.flats()
        self.flats.append([[param for _, param in flat] for flat in flats])
        self.trainable.append([flat[0][1].requires_grad for flat in flats])
        for f, flat in enumerate(flats):
            for index, (name, param) in enumerate(flat):
                entry = registry.Entry(
                    weakref.ref(self),
                    name,
                    param.shape,
                    memory_strides(param),
                    unit,
                    f,
                    index,
                    tensor_parallel.get(param),
                )
                registry.add_param(param, entry)
        self.core.add_unit(
            plan.name,
            [[name for name, _ in flat] for flat in flats],
            [[param for _, param in flat] for flat in flats],
            values.of_unit(plan),
        )

    def _hook_root(self, model: nn.Module) -> None:
        core, journal = self.core, self.groups.journal
        mixed = self.options.mixed_precision
        original = weakref.ref(model)  # a hook must not keep its module alive

        def cast(value: Any, dtype: torch.dtype) -> Any:
            return map_tensors(value, lambda t: t.to(dtype) if t.is_floating_point() else t)

        def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
            _require_original(module, original(), "the model")
            self._require_loaded()
            args, kwargs = self._move((args, kwargs))
            self.buffers.show()
            core.begin_forward(torch.is_grad_enabled())
            return (cast(args, mixed.param), cast(kwargs, mixed.param)) if mixed else (args, kwargs)

        def after(_: nn.Module, args: Any, output: Any) -> Any:
            if mixed and mixed.output is not None:
                output = cast(output, mixed.output)
            failed = _failed(output)
            if failed:
                journal.saw(sys.exc_info()[1], 0, "forward")
            core.end_forward(tensors_in(output), failed)
            return output

        model.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        model.register_forward_hook(after, always_call=True)

    def _hook_unit(self, module: nn.Module, unit: int) -> None:
        core, journal = self.core, self.groups.journal
        original, what = weakref.ref(module), f"unit {self.units[unit]!r}"

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            _require_original(module, original(), what)
            core.pre_forward(unit, tensors_in((*args, *kwargs.values())))

        def after(_: nn.Module, args: Any, output: Any) -> None:
            failed = _failed(output)
            if failed:
                journal.saw(sys.exc_info()[1], unit, "forward")
            core.post_forward(unit, tensors_in(output), failed)

        module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        module.register_forward_hook(after, always_call=True)

    def _move(self, inputs: Any) -> Any:
        """The model's inputs on its device: those on the CPU are copied there."""
        device = self.device
        elsewhere = [t for t in tensors_in(inputs) if t.device != device and t.dim() > 0]
        for tensor in elsewhere:
            if tensor.device.type != "cpu":
                raise RuntimeError(
                    f"zerocore: expected the model's inputs on {device}, where its parameters are, "
                    f"got a tensor on {tensor.device}"
                )
        if not elsewhere:
            return inputs
        return map_tensors(inputs, lambda t: t.to(device, non_blocking=True) if t.dim() else t)

    def mark_loaded(self, names: Iterable[str]) -> None:
        """To be told which parameters and buffers, by name in the model, were given values."""
        if self.unloaded is not None:
            self.unloaded.mark(names)

    def _require_loaded(self) -> None:
        """Before the first forward of a model with `init="empty"`: a collective."""
        if self.unloaded is not None:
            exchange("zerocore", [self.groups], self.unloaded.error(), [None])
            self.unloaded = None

    def params(self) -> Iterator[nn.Parameter]:
        """The parameters, in the order of their flat buffers."""
        return (param for unit in self.flats for flat in unit for param in flat)

    def set_sync(self, sync: _C.Sync) -> None:
        """How far backwards reduce; see `zerocore.no_sync`."""
        keeps_full = sync == _C.Sync.none and not self.options.lifetimes.full_gradients_expected
        if keeps_full and not self._warned and self.groups.first:
            warnings.warn(
                f"zerocore.no_sync at stage {self.options.stage} keeps a full local gradient on "
                "every rank; without it each backward reduces into the shard, which takes 1/N of "
                "that memory and gives the same sum",
                stacklevel=4,
            )
            self._warned = True
        self.core.sync = sync
