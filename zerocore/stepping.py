"""What happens around every optimizer step, zerocore's and torch's alike."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from zerocore import registry
from zerocore.runtime import Sharded

# Their update of an element depends on other elements of the parameter, or of other parameters.
_NOT_ELEMENTWISE = ("Adafactor", "LBFGS", "Muon", "SparseAdam", "Lamb", "LARS", "Shampoo", "SOAP")
_ELEMENTWISE = tuple(
    getattr(torch.optim, name)
    for name in ("SGD Adam AdamW NAdam RAdam Adamax Adagrad Adadelta RMSprop Rprop ASGD".split())
)

# State of torch.optim that is one number a parameter: a 0-dim one, like that of a 0-dim parameter.
_ONE_NUMBER = frozenset(("step", "eta", "mu", "mu_product"))

_Places = dict[Sharded, set[tuple[int, int]]]
_warned: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_marking: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_installed = False


@dataclass
class _Plan:
    """What is known of an optimizer as long as its fingerprint stays the same.

    Attributes:
        flats: the (unit, flat buffer) pairs whose parameters it steps.
        checked: whether it may step them.
    """

    fingerprint: tuple[int, ...]
    flats: dict[weakref.ref[Sharded], set[tuple[int, int]]]
    checked: bool = False

    def places(self) -> _Places:
        """`flats` of the models that are still alive."""
        return {
            sharded: flats for ref, flats in self.flats.items() if (sharded := ref()) is not None
        }


_plans: weakref.WeakKeyDictionary[Optimizer, _Plan] = weakref.WeakKeyDictionary()


def install() -> None:
    """Registers the hooks, once a process."""
    global _installed
    if not _installed:
        register_optimizer_step_pre_hook(_before)
        register_optimizer_step_post_hook(_after)
        _installed = True


def _before(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Checks what the step will work on; torch steps with the arguments that are returned."""
    plan = _plan_of(optimizer)
    places = plan.places()
    _check_marks(optimizer, places)
    if not places:
        return None
    if not plan.checked:
        for sharded in places:
            _check(optimizer, sharded)
        plan.checked = True
        mark_state_dicts(optimizer)
    if callable(kwargs.get("closure")):
        return args, kwargs | {"closure": _checked_closure(kwargs["closure"], optimizer, places)}
    if len(args) > 1 and callable(args[1]):
        return (args[0], _checked_closure(args[1], optimizer, places), *args[2:]), kwargs
    _prepare(optimizer, places)
    return None


def _checked_closure(
    closure: Callable[[], Any], optimizer: Optimizer, places: _Places
) -> Callable[[], Any]:
    """The closure makes the gradients that are stepped: they are prepared when it is done."""

    def checked() -> Any:
        loss = closure()
        _prepare(optimizer, places)
        return loss

    return checked


def _prepare(optimizer: Optimizer, places: _Places) -> None:
    """Makes sure that all gradients are reduced, and in the dtype that the optimizer expects."""
    for sharded in places:
        sharded.core.begin_span("optimizer")
        if sharded.shows_average:
            raise RuntimeError(
                "zerocore: expected optimizer.step() outside of zerocore.EMA.applied(), where the "
                "model has its own parameters, got it inside"
            )
        if sharded.unloaded is not None and (error := sharded.unloaded.error()) is not None:
            raise error
        sharded.core.before_step()
    # zerocore's own optimizer reads main gradients of any dtype.
    own = type(optimizer).__module__.startswith("zerocore.")
    if own or not any(sharded.options.mixed_precision for sharded in places):
        return
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None and param.grad.dtype != param.dtype:
                param.grad = param.grad.to(param.dtype)


def _after(optimizer: Optimizer, args: object, kwargs: object) -> None:
    for sharded, flats in _plan_of(optimizer).places().items():
        for unit, flat in flats:
            sharded.core.after_step(unit, flat)
        sharded.core.end_span("optimizer")


def models_of(optimizer: Optimizer) -> list[Sharded]:
    """The sharded models whose parameters the optimizer steps, in the order of the parameters."""
    return list(_plan_of(optimizer).places())


def _plan_of(optimizer: Optimizer) -> _Plan:
    fingerprint = registry.fingerprint(optimizer)
    plan = _plans.get(optimizer)
    if plan is None or plan.fingerprint != fingerprint:
        flats: dict[weakref.ref[Sharded], set[tuple[int, int]]] = {}
        for group in optimizer.param_groups:
            for param in group["params"]:
                entry = registry.entry_of(param)
                if entry is None:
                    _check_replaced(optimizer, param)
                elif entry.sharded() is not None:  # else the model is gone, not its parameters
                    flats.setdefault(entry.sharded, set()).add((entry.unit, entry.flat))
        plan = _plans[optimizer] = _Plan(fingerprint, flats)
    return plan


def _check_replaced(optimizer: Optimizer, param: torch.Tensor) -> None:
    name = registry.replaced_name(param)
    if name is not None:
        raise RuntimeError(
            f"zerocore: {type(optimizer).__name__} was made before zerocore.shard and holds the "
            f"DTensor that {name!r} was; expected one made after it, with the parameters that the "
            "model has now"
        )


# In a param group of optimizer.state_dict(): whose part of the state it is. Nothing in the state of
# one shard says that it is not another one of the same size.
SHARD_MARK = "zerocore_shard"


def _mark(places: _Places) -> str | None:
    for sharded in places:
        shards = len(sharded.groups.ranks.shard)
        if shards > 1:
            return f"{sharded.groups.shard_rank} of {shards}"
    return None


def mark_state_dicts(optimizer: Optimizer) -> None:
    """From now on, optimizer.state_dict() says whose part it is, and loading is noticed."""
    if optimizer in _marking:
        return
    _marking.add(optimizer)

    def mark(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        own = _mark(_plan_of(optimizer).places())
        for group in state_dict["param_groups"] if own else ():
            group[SHARD_MARK] = own

    optimizer.register_state_dict_post_hook(mark)
    optimizer.register_load_state_dict_post_hook(lambda optimizer: _plans.pop(optimizer, None))


def _check_marks(optimizer: Optimizer, places: _Places) -> None:
    """Refuses what optimizer.state_dict() gave on another rank.

    Raises:
        RuntimeError: if that was loaded.
    """
    own = _mark(places)
    for group in optimizer.param_groups:
        if group.get(SHARD_MARK, own) != own:
            raise RuntimeError(
                "zerocore: expected this rank's optimizer.state_dict() to be loaded, or state of "
                f"whole parameters, got that of shard {group[SHARD_MARK]} (this is shard "
                f"{own or '0 of 1'}); save with zerocore.optimizer_state_dict and load with "
                "zerocore.load_optimizer_state_dict, which do for all ranks and stages"
            )
    for group in optimizer.param_groups:
        group.pop(SHARD_MARK, None)


def _check(optimizer: Optimizer, sharded: Sharded) -> None:
    """Refuses optimizers that cannot work on shards; cuts state that was made before `shard`.

    Raises:
        RuntimeError: for an optimizer that needs whole parameters, or state of whole ones.
    """
    if len(sharded.groups.ranks.shard) == 1:
        return
    kind = type(optimizer)
    names = {base.__name__ for base in kind.__mro__}
    refused = names.intersection(_NOT_ELEMENTWISE)
    if refused:
        raise RuntimeError(
            f"zerocore: {kind.__name__} needs whole parameters, but at stage "
            f"{sharded.options.stage} each rank holds a shard; expected an elementwise optimizer "
            "(AdamW, SGD, ...) or stage 0"
        )
    known = isinstance(optimizer, _ELEMENTWISE) or kind.__module__.startswith("zerocore.")
    if not known and sharded.groups.first and optimizer not in _warned:
        _warned.add(optimizer)
        warnings.warn(
            f"zerocore: {kind.__name__} steps shards of parameters; the result is right only if "
            "its update of an element depends on nothing but that element and its history",
            stacklevel=4,
        )
    _cut_state(optimizer, sharded)


def _cut_state(optimizer: Optimizer, sharded: Sharded) -> None:
    """Cuts state of whole parameters that took no step yet (Adagrad's constructor makes it)."""
    cuts: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    for group in optimizer.param_groups:
        for param in group["params"]:
            entry = registry.entry_of(param)
            if entry is None or entry.sharded() is not sharded:
                continue
            state = optimizer.state.get(param, {})
            for key, value in state.items():
                whole = isinstance(value, torch.Tensor) and value.shape == entry.shape
                if not whole or value.shape == param.shape or _is_one_number(optimizer, key, value):
                    continue
                if float(state.get("step", 1)) > 0:
                    raise RuntimeError(
                        f"zerocore: expected optimizer state of shards, got {key!r} of "
                        f"{entry.name!r} with the full shape {tuple(value.shape)}; call "
                        "zerocore.shard before the optimizer's first step, and load state of whole "
                        "parameters with zerocore.load_optimizer_state_dict"
                    )
                own = sharded.core.slice(entry.unit, entry.flat, entry.index, value.detach())
                dtype = param.dtype if own.is_floating_point() else own.dtype
                cuts.append((state, key, own.to(dtype, copy=True)))
    # Not before all of it is found to be initial: an error leaves the state as it was.
    for state, key, own in cuts:
        state[key] = own


def _is_one_number(optimizer: Optimizer, key: str, value: torch.Tensor) -> bool:
    """Whether a 0-dim tensor is no state of elements, as far as the optimizer is known."""
    known = isinstance(optimizer, _ELEMENTWISE)
    return value.dim() == 0 and (key in _ONE_NUMBER or not known)
