"""Optimizer state as full tensors by parameter name, and back."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from zerocore import collectives, registry
from zerocore.optim import AdamW
from zerocore.optimizer_places import (
    NO_OPTIONS,
    Fact,
    Place,
    check_adamw,
    check_same,
    elementwise,
    facts_of,
    matched_groups,
    places_of,
    scalar_keys,
    some_of,
)
from zerocore.runtime import Sharded
from zerocore.stepping import mark_state_dicts


def optimizer_state_dict(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, rank0_only: bool = False
) -> dict[str, Any]:
    """The optimizer's state with full tensors under the parameters' names, at any stage.

    The format of torch.distributed.checkpoint.state_dict.get_optimizer_state_dict with
    full_state_dict=True, which its set_optimizer_state_dict reads into the optimizer of a plain
    model: `{"state": {name: {key: value}}, "param_groups": [{"params": [name, ...], ...}]}`. State
    of elements has the parameter's full shape, the parameter's memory order and the state's own
    dtype; values with one number a parameter (step) are as they are. Everything is a copy. A tied
    parameter has the first of its names; a parameter without state has no entry in "state".

    A collective over the model's ranks, which gathers one key of one flat buffer at a time.

    Args:
        optimizer: any elementwise optimizer of parameters of `model`.
        rank0_only: other ranks take part but get an empty dict.

    Raises:
        ValueError: if `model` is not sharded, a parameter of the optimizer is not in it, a value
            is neither one number nor of the parameter's shape, or ranks have different state. All
            on every rank.
    """
    caller = "zerocore.optimizer_state_dict"
    models = registry.require_sharded(model, caller)
    places: list[list[Place]] = []
    error = None
    try:
        places = places_of(model, optimizer, caller)
    except Exception as caught:  # whatever it is, the other ranks must hear of it
        error = caught
    members = list(itertools.chain.from_iterable(places))
    held = {place.name: dict(optimizer.state.get(place.param, {})) for place in members}
    facts = [facts_of(members, held, sharded) for sharded in models]
    answers = collectives.exchange(caller, [s.groups for s in models], error, facts)
    keep = not rank0_only or models[0].groups.first
    by_name = {place.name: place for place in members}
    full: dict[tuple[str, str], torch.Tensor] = {}
    for sharded, everyone in zip(models, answers, strict=True):
        names = elementwise(caller, everyone)
        full |= _gather(sharded, [(by_name[n], k) for n, k in names], held, keep)
    if not keep:
        return {}
    state = {
        name: {
            key: full[name, str(key)] if (name, str(key)) in full else copied(value)
            for key, value in values.items()
        }
        for name, values in held.items()
        if values
    }
    options = group_options(optimizer)
    named = [{"params": [p.name for p in group]} for group in places]
    return {"state": state, "param_groups": [o | n for o, n in zip(options, named, strict=True)]}


def _gather(
    sharded: Sharded,
    wanted: list[tuple[Place, str]],
    held: Mapping[str, Mapping[Any, Any]],
    keep: bool,
) -> dict[tuple[str, str], torch.Tensor]:
    """Full tensors by (name, key); nothing unless `keep`."""
    buffers: dict[tuple[int, int, str, torch.dtype], list[tuple[Place, torch.Tensor]]] = {}
    for place, key in wanted:
        value = next(v for k, v in held[place.name].items() if str(k) == key).detach()
        buffer = (place.entry.unit, place.entry.flat, key, value.dtype)
        buffers.setdefault(buffer, []).append((place, value))
    core = sharded.core
    full = {}
    for (unit, flat, key, dtype), members in buffers.items():
        if members[0][0].whole:
            if keep:
                for place, value in members:
                    full[place.name, key] = place.entry.whole(value.clone())
            continue
        shard = core.shard(unit, flat)
        part = torch.zeros_like(shard, dtype=dtype)
        for place, value in members:
            start, stop = core.within_shard(unit, flat, place.entry.index)
            part[start:stop] = value.reshape(-1)
        tensors = core.gather_tensors(unit, flat, part)
        if keep:
            for place, _ in members:
                full[place.name, key] = place.entry.whole(tensors[place.entry.index])
    return full


def copied(value: Any) -> Any:
    """A copy that shares no memory with `value`, a tensor or anything else."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def load_optimizer_state_dict(
    model: nn.Module, optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]
) -> None:
    """Loads what `optimizer_state_dict` gave, at any stage, on any number of ranks.

    Accepts as well what torch.distributed.checkpoint.state_dict.get_optimizer_state_dict gives for
    a plain model. Parameters are found by name: groups, and names in a group, may come in another
    order. Options of the groups and all state are replaced, by the optimizer's own load_state_dict
    (which casts state of elements to the shard's dtype); nothing keeps memory of `state_dict`.

    A collective over the model's ranks, each with the whole `state_dict`.

    Raises:
        ValueError: if `model` is not sharded, a parameter of the optimizer is not in it, names are
            missing or unknown, the param groups or shapes are others, `state_dict` is keyed by
            number as optimizer.state_dict() is, or ranks have different state. All on every rank,
            before anything changes.
    """
    caller = "zerocore.load_optimizer_state_dict"
    models = registry.require_sharded(model, caller)
    places: list[list[Place]] = []
    options: list[Mapping[str, Any]] = []
    state: dict[str, Mapping[Any, Any]] = {}
    error = None
    try:
        places = places_of(model, optimizer, caller)
        _check_format(caller, state_dict)
        options = matched_groups(caller, places, state_dict["param_groups"])
        state = _checked_state(caller, places, state_dict["state"])
        if isinstance(optimizer, AdamW):
            check_adamw(caller, places, options, state)
    except Exception as caught:  # whatever it is, the other ranks must hear of it
        error = caught
    members = [place for group in places for place in group if place.name in state]
    chosen = [
        Fact(f"param group {i}", str(key), repr(value), None, False)
        for i, group in enumerate(options)
        for key, value in sorted(group.items(), key=lambda item: str(item[0]))
        if key not in NO_OPTIONS
    ]
    facts = [chosen + facts_of(members, state, sharded, numbers=True) for sharded in models]
    for everyone in collectives.exchange(caller, [s.groups for s in models], error, facts):
        check_same(caller, everyone)
    for sharded in models:
        sharded.core.settle()  # parameters show their shards, in the dtype that state is cast to
    members = list(itertools.chain.from_iterable(places))
    scalar = scalar_keys([place for place in members if place.name in state], state)
    parts = {
        place.name: {key: _part(place, v, key in scalar) for key, v in state[place.name].items()}
        for place in members
        if place.name in state
    }
    replace_state(optimizer, places, options, parts, scalar)


def _check_format(caller: str, state_dict: Mapping[str, Any]) -> None:
    expected = f"{caller}: expected what zerocore.optimizer_state_dict gives"
    if not isinstance(state_dict, Mapping):
        raise ValueError(f"{expected}, got {type(state_dict).__name__}")
    parts = [state_dict.get(key) for key in ("state", "param_groups")]
    if not isinstance(parts[0], Mapping) or not isinstance(parts[1], list):
        raise ValueError(
            f"{expected}, a dict with 'state' and 'param_groups', got the keys "
            f"{list(state_dict)[:5]}"
        )
    for group in parts[1]:
        if not isinstance(group, Mapping) or not isinstance(group.get("params"), list):
            raise ValueError(f"{expected}, param groups with a list 'params', got {group!r:.80}")
    for name, values in parts[0].items():
        if not isinstance(values, Mapping):
            raise ValueError(
                f"{expected}, a dict of the state of {name!r}, got {type(values).__name__}"
            )
    keys = itertools.chain(parts[0], *(group["params"] for group in parts[1]))
    for key in keys:
        if not isinstance(key, str):
            raise ValueError(
                f"{caller}: expected parameters by name, got {key!r}, as in "
                "optimizer.state_dict(); save with zerocore.optimizer_state_dict, or from a plain "
                "model with torch.distributed.checkpoint.state_dict.get_optimizer_state_dict"
            )


def _checked_state(
    caller: str, places: list[list[Place]], saved: Mapping[str, Mapping[Any, Any]]
) -> dict[str, Mapping[Any, Any]]:
    """The saved state by name, of which every tensor is full (on this rank) or one number."""
    by_name = {place.name: place for group in places for place in group}
    unknown = set(saved) - set(by_name)
    if unknown:
        raise ValueError(
            f"{caller}: expected state of the optimizer's parameters, got unknown names: "
            f"{some_of(unknown)}"
        )
    return {
        name: {key: _local(caller, by_name[name], key, value) for key, value in values.items()}
        for name, values in saved.items()
        if values
    }


def _local(caller: str, place: Place, key: Any, value: Any) -> Any:
    """A value of the state as this rank's part of a tensor-parallel parameter has it."""
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value
    if value.is_meta:
        raise ValueError(f"{caller}: expected {key!r} of {place.name!r} with data, got a meta one")
    try:
        if place.entry is not None:
            return place.entry.local(value)
        if value.shape != place.shape:
            raise ValueError(f"expected the shape {tuple(place.shape)}, got {tuple(value.shape)}")
    except ValueError as error:
        raise ValueError(f"{caller}: {key!r} of {place.name!r}: {error}, or one number") from None
    return value


def group_options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Copies of the options of each param group, under the names that torch's loading knows."""
    options = [
        {key: copied(value) for key, value in group.items() if key not in NO_OPTIONS}
        for group in optimizer.param_groups
    ]
    if isinstance(optimizer, AdamW):
        # torch's loading accepts no option that its AdamW lacks, and misses any that it has.
        theirs = torch.optim.AdamW([torch.empty(0)]).defaults
        for group in options:
            group["decoupled_weight_decay"] = group.pop("decoupled")
        options = [theirs | group for group in options]
    return options


def replace_state(
    optimizer: torch.optim.Optimizer,
    places: list[list[Place]],
    options: list[Mapping[str, Any]],
    parts: Mapping[str, dict[Any, Any]],
    scalar: set[Any],
) -> None:
    """Gives the optimizer this rank's parts of the state, which it may keep.

    Args:
        places, options: of each param group.
        parts: the state by parameter name and key.
        scalar: keys that hold one number a parameter.
    """
    groups = []
    indices = itertools.count()
    for group, saved in zip(places, options, strict=True):
        # Names that the user gave to the optimizer stay with their parameters.
        kept = {k: copied(v) for k, v in saved.items() if k not in NO_OPTIONS}
        groups.append(kept | {"params": [next(indices) for _ in group]})
    members = list(itertools.chain.from_iterable(places))
    state = {i: parts[place.name] for i, place in enumerate(members) if place.name in parts}
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    # It casts single numbers too to the parameter's dtype, in which they may lose bits; the step
    # count it leaves alone, or puts where the optimizer needs it.
    for index, values in state.items():
        numbers = {k: values[k] for k in values.keys() & scalar - {"step"}}
        optimizer.state[members[index].param].update(numbers)
    mark_state_dicts(optimizer)


def _part(place: Place, value: Any, scalar: bool) -> Any:
    """The part of a value of the state that belongs to the rank, as a copy."""
    elementwise = isinstance(value, torch.Tensor) and (value.dim() > 0 or not scalar)
    if place.sharded is None or not elementwise:
        return copied(value)
    entry = place.entry
    full = value.detach()
    return place.sharded.core.slice(entry.unit, entry.flat, entry.index, full).clone()
