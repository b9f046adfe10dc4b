"""shard() and the other functions of the public interface."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.batchnorm import _BatchNorm

from zerocore import _C, norm, registry, scaler, stepping, tensor_parallel
from zerocore import groups as process_groups
from zerocore.agreement import agree
from zerocore.auto import AUTO, choose_stage
from zerocore.backend import Backend, choose
from zerocore.deferred import place_of, refuse_inside_build
from zerocore.initialise import Init, Initialiser
from zerocore.ledger import Ledger
from zerocore.planner.sizes import ModelSizes
from zerocore.policy import STAGES, MixedPrecision
from zerocore.runtime import Options, Sharded
from zerocore.state import StateHooks
from zerocore.stats import Stats
from zerocore.units import UnitPlan, Units, plan_units
from zerocore.values import Values, origin_of


def shard(
    model: nn.Module,
    stage: int | Literal["auto"] = 3,
    *,
    mesh: DeviceMesh | None = None,
    units: Units = None,
    mixed_precision: MixedPrecision | None = None,
    reshard_after_forward: bool | None = None,
    prefetch: int = 1,
    bucket_bytes: int = 25 * 2**20,
    max_window_bytes: int | None = None,
    register_windows: bool = False,
    init: Init = None,
    timeout: float = 60.0,
) -> nn.Module:
    """Shards the training state of `model` over ranks, in place, and returns it.

    The parameters stay the same objects under the same names; between steps they are this rank's
    shard, of shape (local elements, 1, ..., 1), which any elementwise torch.optim optimizer or
    `zerocore.AdamW` can step. Rank 0's values of parameters and buffers are taken everywhere;
    buffers stay local afterwards. Gradients are averaged over all ranks. Parameters that an earlier
    call took over (of a submodule, with another mesh or stage) are left alone.

    A parameter that is a DTensor (tensor parallel) is replaced by a plain one, of which each rank
    shards its local tensor; optimizers are to be made afterwards. Inside the forward of the module
    that owns it, and in state dicts, it is a DTensor as before. `mesh` must not contain the ranks
    that share it.

    A model larger than memory comes from `zerocore.deferred`, whose parameters are given values
    here, unit by unit: the process holds its shards, one whole unit and one parameter. Or it is
    made on the meta device and initialised here, unit by unit too, by `init`. That is another
    initialisation than the model's own construction: module by module, drawing from torch's
    generator in another order. Every rank runs it; rank 0's generator decides.

    The model trains on the device of its parameters. Parameters on the CPU, buffers and the inputs
    of its forward are moved, unit by unit, to the accelerator that `zerocore.backend()` chooses, or
    to a mesh's device type.

    A collective over the ranks of `mesh`.

    Args:
        stage: ZeRO stage. 0 replicates everything (DDP), 1 shards optimizer state, 2 gradients too,
            3 parameters too. "auto": the lowest whose state takes at most half of the memory that
            is free on the rank that has least (the other half is for activations, of which nothing
            is known); `print(zerocore.ledger(model))` says which it is, and why.
        mesh: ranks to use; None: all. One dimension shards; with two, the first replicates what the
            second shards (hybrid sharding).
        units: what is gathered and reduced together: module classes, module names, or a predicate
            `(name, module) -> bool`. None: the model's repeated blocks.
        mixed_precision: dtypes of computation and reduction; None: those of the parameters.
        reshard_after_forward: stage 3 only. False keeps the full parameters from forward to
            backward, which saves one of three collectives. None: True at stage 3.
        prefetch: stage 3: units gathered ahead of the one that computes.
        bucket_bytes: automatic units: small neighbours are merged up to this size.
        max_window_bytes: stage 3: hard limit of the bytes of full parameters at any time, without
            those opened by `gathered` or `state_dict` outside of a forward; None: no limit.
        register_windows: stage 3: window memory comes from the process group's allocator, which the
            network may read and write itself (NCCL user-buffer registration). An error in the first
            forward if that group has none.
        init: for a model on the meta device. A function that is called with every module that has
            parameters or buffers of its own there, once they have memory (full, on the CPU), and
            fills these in place: none may keep a NaN. None: `module.reset_parameters()`, and the
            `_init_weights(module)` of the model around it, as far as there are any. "empty":
            nothing; every parameter and buffer is to be loaded, on every rank, before the first
            forward, which is an error else (and a collective).
        timeout: seconds that a rank waits for another one before both end with an error that says
            where they part; the default process group's counts if that is shorter. It has to be
            longer than anything that one rank does alone. The newest of the models over the same
            ranks sets it for all of them.

    Raises:
        torch.distributed.DistBackendError: if another rank does not come within `timeout`.
        RuntimeError: if there is no process group, or the model was sharded before.
        ValueError: for an option out of range, units that match nothing, a model without
            parameters, parameters on several devices or on another than the rank's current one, a
            budget smaller than what the model needs at once, DTensors over ranks of `mesh`, an
            `init` that leaves something without values, or ranks that disagree.
        NotImplementedError: for parameters that are not supported yet (DTensors with other
            placements than Shard and Replicate, or on the meta device).
    """
    error = process_groups.check_mesh(mesh)
    auto = isinstance(stage, str) and stage == AUTO
    sharded_state = auto or (_is_stage(stage) and STAGES[stage].sharded)
    # With an invalid mesh all ranks are told what is wrong.
    ranks = process_groups.resolve_ranks(None if error else mesh, sharded_state)
    journal = process_groups.open_journal(ranks, timeout if _is_timeout(timeout) else 60.0)
    control, host = process_groups.make_control(ranks, journal)
    plans: list[UnitPlan] = []
    parts: list[tensor_parallel.Part] = []
    options = place = initialiser = None
    try:
        refuse_inside_build("zerocore.shard")
        options = _options(
            3 if auto else stage,
            mixed_precision,
            reshard_after_forward,
            prefetch,
            bucket_bytes,
            max_window_bytes,
            register_windows,
            timeout,
        )
        if isinstance(model, nn.Module):
            parts = tensor_parallel.parts_of(model, ranks.all)
            tensor_parallel.replace(parts)
        _check_model(model)
        initialiser = Initialiser(model, init)
        place = _place(model, mesh)
        if options.register_windows and place.name in ("gloo", "fake"):
            raise ValueError(
                "register_windows: expected NCCL or HCCL, whose process groups can have memory of "
                f"their own, got {place.name} (chosen because {place.reason}); leave it out"
            )
        _check_batch_norm(model, mixed_precision)
        plans = plan_units(model, units, bucket_bytes, taken=_is_taken)
        _check_budget(plans, options, ranks)
    except (ValueError, RuntimeError, TypeError) as caught:
        error = error or caught
    facts = _facts(model, place, options, plans, init) + tensor_parallel.facts(parts)
    facts.append(("stage", stage))
    filled = initialiser.filled() if initialiser is not None else []
    facts.append(("parameters that init fills:", filled))
    try:
        agree(host, journal, error, facts)
    except BaseException:
        tensor_parallel.restore(parts)
        raise
    reason = ""
    if auto:
        sizes = ModelSizes.of_plans(model, plans, model.buffers())
        number, reason = choose_stage(model, sizes, options, ranks, place, host, journal)
        options = options.at_stage(number)
        ranks = process_groups.resolve_ranks(mesh, options.lifetimes.sharded)
    groups = process_groups.make_groups(ranks, control, host, journal, place.name)
    tensor_parallel.hook(parts)  # before the hooks of units
    values = Values(model, initialiser, groups)
    how = _forget_originals(parts)
    with torch.no_grad():
        sharded = Sharded(model, plans, groups, place.device, options, how, values)
    sharded.reason = reason
    StateHooks(model, sharded)
    stepping.install()
    norm.install()
    scaler.install()
    return model


def _is_timeout(timeout: object) -> bool:
    number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
    return number and 0 < timeout < math.inf


def _is_stage(stage: object) -> bool:
    return type(stage) is int and stage in STAGES


def _options(
    stage: int,
    mixed_precision: MixedPrecision | None,
    reshard_after_forward: bool | None,
    prefetch: int,
    bucket_bytes: int,
    max_window_bytes: int | None,
    register_windows: bool,
    timeout: float,
) -> Options:
    if not _is_stage(stage):
        raise ValueError(f"stage: expected 0, 1, 2, 3 or 'auto', got {stage!r}")
    if mixed_precision is not None and not isinstance(mixed_precision, MixedPrecision):
        hint = ""
        if isinstance(mixed_precision, torch.dtype):
            hint = f"; write MixedPrecision(param={mixed_precision})"
        raise ValueError(
            "mixed_precision: expected a zerocore.MixedPrecision or None, got "
            f"{mixed_precision!r}{hint}"
        )
    lifetimes = STAGES[stage]
    if lifetimes.full_parameters_stay and reshard_after_forward:
        raise ValueError(
            "reshard_after_forward: expected True at stage 3 only (lower stages keep the full "
            f"parameters), got it at stage {stage}"
        )
    for name, value in (("prefetch", prefetch), ("bucket_bytes", bucket_bytes)):
        if not isinstance(value, int) or value < 0:
            raise ValueError(f"{name}: expected an integer of at least 0, got {value!r}")
    if max_window_bytes is not None and not (
        isinstance(max_window_bytes, int) and max_window_bytes > 0
    ):
        raise ValueError(
            "max_window_bytes: expected a positive number of bytes or None, got "
            f"{max_window_bytes!r}"
        )
    if not isinstance(register_windows, bool):
        raise ValueError(f"register_windows: expected True or False, got {register_windows!r}")
    if register_windows and lifetimes.full_parameters_stay:
        raise ValueError(f"register_windows: expected it at stage 3 only, got it at stage {stage}")
    if not _is_timeout(timeout):
        raise ValueError(f"timeout: expected a positive number of seconds, got {timeout!r}")
    return Options(
        stage=stage,
        lifetimes=lifetimes,
        mixed_precision=mixed_precision,
        reshard_after_forward=reshard_after_forward is not False,
        prefetch=prefetch,
        max_window_bytes=max_window_bytes or 0,
        register_windows=register_windows,
        timeout=float(timeout),
    )


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    before = registry.sharded_as(model)
    if before is not None:
        raise RuntimeError(
            "zerocore.shard: expected a model that is not sharded, got one that is, at stage "
            f"{before.options.stage}; modules that were added since can be sharded by themselves"
        )
    params = dict(model.named_parameters())
    if not params:
        raise ValueError(f"model: expected parameters, got {type(model).__name__} without any")
    if all(map(_is_taken, params.values())):
        raise RuntimeError("zerocore.shard: expected a model that is not sharded, got one that is")
    memory: dict[object, str] = {}
    for name, param in params.items():
        if _is_taken(param):
            continue
        has_memory = param.numel() > 0 and param.device.type != "meta"
        other = memory.setdefault(place_of(param), name) if has_memory else name
        if other != name:
            raise ValueError(
                f"{name}: expected memory of its own, got the memory of {other!r}; tie them by "
                "using one Parameter object in both places"
            )
        if isinstance(param, nn.parameter.UninitializedParameter):
            raise ValueError(f"{name}: expected an initialised parameter; run one forward first")
        if type(param.data) is not torch.Tensor:
            raise NotImplementedError(
                f"{name}: expected a plain tensor, got {type(param.data).__name__}, which is not "
                "supported yet"
            )
        if param.grad is not None:
            raise ValueError(
                f"{name}: expected a parameter without a gradient, got one, of another shape than "
                "the shard; call zero_grad() before zerocore.shard"
            )


def _place(model: nn.Module, mesh: DeviceMesh | None) -> Backend:
    """Where the model will train."""
    params = [param for param in model.parameters() if not _is_taken(param)]
    mesh_type = mesh.device_type if isinstance(mesh, DeviceMesh) else None
    # What has no memory yet gets it on the CPU.
    params = [param for param in params if param.device.type != "meta"]
    place = choose((param.device for param in params), mesh_type)
    example = torch.empty(0, device=place.device)
    if not all(torch._has_compatible_shallow_copy_type(param, example) for param in params):
        raise ValueError(
            f"model: expected parameters on {place.device} (chosen because {place.reason}), got "
            f"them on {params[0].device}, from where torch cannot move them and keep them the same "
            f"objects; call model.to({str(place.device)!r}) first"
        )
    return place


def _check_batch_norm(model: nn.Module, mixed_precision: MixedPrecision | None) -> None:
    """Torch's CPU kernels want weights and running statistics of one dtype."""
    if mixed_precision is None:
        return
    own = set(registry.own_modules(model))
    for name, module in model.named_modules():
        if module not in own:
            continue
        statistics = getattr(module, "running_mean", None)
        if not isinstance(module, _BatchNorm) or module.weight is None or statistics is None:
            continue
        dtype = mixed_precision.buffer or statistics.dtype
        if module.weight.device.type == "cpu" and dtype != mixed_precision.param:
            raise ValueError(
                f"{name} ({type(module).__name__}): expected MixedPrecision(buffer="
                f"{mixed_precision.param}) beside param={mixed_precision.param} (on the CPU its "
                f"weights and running statistics need one dtype), got statistics in {dtype}"
            )


def _is_taken(param: nn.Parameter) -> bool:
    return registry.entry_of(param) is not None


def _check_budget(plans: list[UnitPlan], options: Options, ranks: process_groups.Ranks) -> None:
    """The root's window is open all the time, and every other one must fit beside it."""
    if options.lifetimes.full_parameters_stay or not options.max_window_bytes:
        return
    sizes = {}
    for plan in plans:
        sizes[plan.name] = 0
        for flat in plan.flats():
            numels = [param.numel() for _, param in flat]
            padded, _ = _C.padded_elements(numels, len(ranks.shard), len(ranks.replicate))
            dtype = flat[0][1].dtype
            if options.mixed_precision is not None and dtype.is_floating_point:
                dtype = options.mixed_precision.param
            sizes[plan.name] += padded * dtype.itemsize
    root = sizes.pop("")
    name, largest = max(sizes.items(), key=lambda item: item[1], default=("", 0))
    if root + largest > options.max_window_bytes:
        raise ValueError(
            f"max_window_bytes: expected at least {root + largest} bytes (the root {root}, "
            f"unit {name!r} {largest}), got {options.max_window_bytes}; choose smaller units or a "
            "larger budget"
        )


def _facts(
    model: nn.Module,
    place: Backend | None,
    options: Options | None,
    plans: list[UnitPlan],
    init: Init,
) -> list[tuple[str, object]]:
    """What has to be the same on every rank."""
    kind = (place.device.type, place.name) if place else None
    facts: list[tuple[str, object]] = [("device and backend", kind), ("options", options)]
    facts.append(("init", "a function" if callable(init) else init))
    for plan in plans:
        facts.append((f"unit {plan.name!r} of", [name for name, _ in plan.params]))
        for name, param in plan.params:
            what = (tuple(param.shape), param.dtype, param.stride(), param.requires_grad)
            what += (origin_of(param),)
            facts.append((f"parameter {name!r}:", what))
    if isinstance(model, nn.Module):
        taken = [name for name, p in model.named_parameters() if _is_taken(p)]
        facts.append(("parameters sharded before:", taken))
        for name, buffer in model.named_buffers():
            what = (tuple(buffer.shape), buffer.dtype, origin_of(buffer))
            facts.append((f"buffer {name!r}:", what))
    return facts


def _forget_originals(
    parts: list[tensor_parallel.Part],
) -> dict[nn.Parameter, tensor_parallel.TensorParallel]:
    """How the parameters in the places of DTensors lie; the memory of those may be freed."""
    how = {part.local: part.how for part in parts}
    while parts:
        part = parts.pop()
        registry.add_replaced(part.original, part.name)
    return how


@contextlib.contextmanager
def no_sync(model: nn.Module, *, replicas_only: bool = False) -> Iterator[None]:
    """Backwards inside the `with` block keep their gradients instead of reducing them.

    For gradient accumulation: the last backward before `optimizer.step()` runs outside of it and
    reduces the sum, once. Per parameter and rank, with N ranks in the shard group, k micro-batches,
    and gradients in the dtype that they are accumulated in:

    - by default a full local gradient is kept: 1 gradient element held, nothing sent meanwhile.
      At stages 0 and 1 this is the normal way to accumulate. At stages 2 and 3 it takes memory
      that these stages are there to save (and says so once): without it each backward reduces into
      the shard, which holds 1/N and sends (N-1)/N for each micro-batch.
    - `replicas_only`, with hybrid sharding: each backward sums over the shard group, into a shard
      (1/N held, (N-1)/N sent), and only the sum over the replicas waits. Without replicas this is
      what happens outside of the block too. (At stage 0 the shard is the whole.)

    Meanwhile `p.grad` shows this rank's part of what waits; clearing it clears all of it.

    Raises:
        ValueError: if `model` is not sharded.
        RuntimeError: by a backward with `replicas_only=False` after one with True whose gradients
            still wait; and by a step or a clipping while any wait.
    """
    models = registry.require_sharded(model, "zerocore.no_sync")
    before = [sharded.core.sync for sharded in models]
    for sharded in models:
        sharded.set_sync(_C.Sync.shard if replicas_only else _C.Sync.none)
    try:
        yield
    finally:
        for sharded, sync in zip(models, before, strict=True):
            sharded.core.sync = sync


class Info(NamedTuple):
    """A parameter, and the part of it that this rank holds."""

    name: str
    shape: torch.Size  # of the full parameter; with tensor parallelism, of this rank's part of it
    dtype: torch.dtype
    unit: str  # '' is the root
    start: int  # this rank holds elements [start, stop) of the parameter, flattened in the order of
    stop: int  # memory (row-major for a contiguous one)


def info(param: torch.Tensor) -> Info:
    """Where a parameter of a sharded model lives.

    Raises:
        ValueError: if `param` is not a parameter of a sharded model.
    """
    entry = registry.entry_of(param) if isinstance(param, torch.Tensor) else None
    sharded = entry.sharded() if entry is not None else None
    if sharded is None:
        raise ValueError("zerocore.info: expected a parameter of a sharded model, got another one")
    core = sharded.core
    dtype = core.shard(entry.unit, entry.flat).dtype
    owned = core.owned(entry.unit, entry.flat, entry.index)
    return Info(entry.name, entry.shape, dtype, sharded.units[entry.unit], *owned)


def stats(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Stats:
    """Measured memory, communication and events of a sharded model; see `Stats`.

    Args:
        optimizer: to count the bytes of its state as well.

    Raises:
        ValueError: if `model` is not sharded.
    """
    return Stats(model, optimizer)


def ledger(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Ledger:
    """The bytes that this rank holds now, by category and dtype, measured; see `Ledger`.

    `print(zerocore.ledger(model, optimizer))` shows them as a table. Not a collective.

    Args:
        optimizer: to count the bytes of its state as well.

    Raises:
        ValueError: if `model` is not sharded.
    """
    return Ledger.of(model, registry.require_sharded(model, "zerocore.ledger"), optimizer)
