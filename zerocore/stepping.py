"""What happens around every optimizer step, zerocore's and torch's alike."""

from __future__ import annotations

import warnings
import weakref
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

_Places = dict[Sharded, set[tuple[int, int]]]
_checked: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_places: weakref.WeakKeyDictionary[Optimizer, tuple[tuple[int, ...], dict]] = (
    weakref.WeakKeyDictionary()
)
_installed = False


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
    if not _places_of(optimizer):
        return None
    for sharded in _places_of(optimizer):
        if optimizer not in _checked:
            _check(optimizer, sharded)
    _prepare(optimizer)
    # args[0] is the optimizer. The gradients of a closure come when the step is under way.
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if not callable(closure):
        return None

    def with_care() -> Any:
        loss = closure()
        _prepare(optimizer)
        return loss

    if len(args) > 1:
        return (args[0], with_care, *args[2:]), kwargs
    return args, {**kwargs, "closure": with_care}


def _prepare(optimizer: Optimizer) -> None:
    """Makes sure that all gradients are reduced, and in the dtype that the optimizer expects."""
    models = _places_of(optimizer)
    for sharded in models:
        if sharded.shows_average:
            raise RuntimeError(
                "zerocore: expected optimizer.step() outside of zerocore.EMA.applied(), where the "
                "model has its own parameters, got it inside"
            )
        sharded.core.before_step()
    mixed = [sharded.options.mixed_precision for sharded in models]
    # zerocore's own optimizer reads main gradients of any dtype.
    own = type(optimizer).__module__.startswith("zerocore.")
    if own or not any(m and m.accumulate != (m.master or m.param) for m in mixed):
        return
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None and param.grad.dtype != param.dtype:
                param.grad = param.grad.to(param.dtype)


def _after(optimizer: Optimizer, args: object, kwargs: object) -> None:
    for sharded, flats in _places_of(optimizer).items():
        for unit, flat in flats:
            sharded.core.after_step(unit, flat)
        _checked.add(optimizer)


def _places_of(optimizer: Optimizer) -> _Places:
    """The flat buffers whose parameters the optimizer steps."""
    fingerprint = registry.fingerprint(optimizer)
    known = _places.get(optimizer)
    if known is None or known[0] != fingerprint:
        found: dict[weakref.ref[Sharded], set[tuple[int, int]]] = {}
        for group in optimizer.param_groups:
            for param in group["params"]:
                entry = registry.entry_of(param)
                if entry is not None:
                    found.setdefault(entry.sharded, set()).add((entry.unit, entry.flat))
        known = _places[optimizer] = (fingerprint, found)
    return {sharded: flats for ref, flats in known[1].items() if (sharded := ref()) is not None}


def _check(optimizer: Optimizer, sharded: Sharded) -> None:
    """Refuses optimizers that cannot work on shards.

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
    if not known and sharded.groups.first:
        warnings.warn(
            f"zerocore: {kind.__name__} steps shards of parameters; the result is right only if "
            "its update of an element depends on nothing but that element and its history",
            stacklevel=4,
        )
    for group in optimizer.param_groups:
        for param in group["params"]:
            _check_state(optimizer, param)


def _check_state(optimizer: Optimizer, param: torch.Tensor) -> None:
    entry = registry.entry_of(param)
    if entry is None:
        return
    for key, value in optimizer.state.get(param, {}).items():
        full = isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == entry.shape
        if full and value.shape != param.shape:
            raise RuntimeError(
                f"zerocore: expected optimizer state of shards, got {key!r} of {entry.name!r} with "
                f"the full shape {tuple(value.shape)}; call zerocore.shard before the optimizer's "
                "first step"
            )
