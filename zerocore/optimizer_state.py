"""Optimizer state as full tensors by parameter name, and back."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from zerocore import groups as process_groups
from zerocore import registry
from zerocore.optim import AdamW, check_options
from zerocore.runtime import Sharded
from zerocore.stepping import SHARD_MARK, mark_state_dicts

# State of torch.optim with one number a parameter. Only asked about where the shapes do not tell,
# in a state that holds nothing but 0-dim parameters.
_SCALARS = ("step", "eta", "mu", "mu_product")


_NO_OPTIONS = ("params", "param_names", SHARD_MARK)  # of a param group


class _Place(NamedTuple):
    """A parameter of the optimizer, and where it lives."""

    name: str
    param: torch.Tensor
    sharded: Sharded | None  # None: an ordinary parameter of the model
    entry: registry.Entry | None

    @property
    def shape(self) -> torch.Size:
        """Of the full parameter."""
        return self.param.shape if self.entry is None else self.entry.shape

    @property
    def whole(self) -> bool:
        """Whether every rank holds the full parameter's state."""
        return self.sharded is None or len(self.sharded.groups.ranks.shard) == 1

    def shard_shape(self) -> torch.Size:
        """Of this rank's shard; the parameter may show something else now."""
        if self.whole or self.entry is None:
            return self.shape
        entry = self.entry
        start, stop = self.sharded.core.within_shard(entry.unit, entry.flat, entry.index)
        if entry.shape:
            return torch.Size([stop - start] + [1] * (len(entry.shape) - 1))
        return torch.Size([] if stop > start else [0])


class _Fact(NamedTuple):
    """What ranks tell each other about one value of the state; the first three must be equal."""

    name: str
    key: str
    what: str  # dtype, or the type of what is no tensor
    shape: tuple[int, ...] | None
    fits: bool  # it has the shape of the rank's shard


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
    places: list[list[_Place]] = []
    error = None
    try:
        places = _places(model, optimizer, caller)
    except Exception as caught:  # whatever it is, the other ranks must hear of it
        error = caught
    members = list(itertools.chain.from_iterable(places))
    held = {place.name: dict(optimizer.state.get(place.param, {})) for place in members}
    facts = [_facts(members, held, sharded) for sharded in models]
    answers = process_groups.exchange(caller, [s.groups for s in models], error, facts)
    keep = not rank0_only or models[0].groups.first
    by_name = {place.name: place for place in members}
    full: dict[tuple[str, str], torch.Tensor] = {}
    for sharded, everyone in zip(models, answers, strict=True):
        names = _elementwise(caller, everyone)
        full |= _gather(sharded, [(by_name[n], k) for n, k in names], held, keep)
    if not keep:
        return {}
    state = {
        name: {
            key: full[name, str(key)] if (name, str(key)) in full else _copied(value)
            for key, value in values.items()
        }
        for name, values in held.items()
        if values
    }
    options = [
        {k: _copied(v) for k, v in group.items() if k not in _NO_OPTIONS}
        for group in optimizer.param_groups
    ]
    if isinstance(optimizer, AdamW):  # torch's loading accepts no option that its AdamW lacks
        for group in options:
            group["decoupled_weight_decay"] = group.pop("decoupled")
    named = [{"params": [p.name for p in group]} for group in places]
    return {"state": state, "param_groups": [o | n for o, n in zip(options, named, strict=True)]}


def _places(model: nn.Module, optimizer: torch.optim.Optimizer, caller: str) -> list[list[_Place]]:
    """The optimizer's parameters, group by group."""
    names = {id(param): name for name, param in model.named_parameters()}
    places = []
    for index, group in enumerate(optimizer.param_groups):
        places.append([])
        for param in group["params"]:
            if id(param) not in names:
                raise ValueError(
                    f"{caller}: expected an optimizer of the model's parameters, got one of shape "
                    f"{tuple(param.shape)} in param group {index} that is not in the model"
                )
            entry = registry.entry_of(param)
            sharded = entry.sharded() if entry is not None else None
            places[-1].append(_Place(names[id(param)], param, sharded, entry))
    return places


def _facts(
    members: list[_Place],
    held: Mapping[str, Mapping[Any, Any]],
    sharded: Sharded,
    numbers: bool = False,
) -> list[_Fact]:
    """What this rank holds of the parameters of one sharded model, in an order all ranks share.

    Args:
        numbers: with the values of single numbers; of full state, which all ranks have.
    """
    facts = []
    for place in members:
        if place.sharded is not sharded:
            continue
        for key, value in sorted(held[place.name].items(), key=lambda item: str(item[0])):
            if isinstance(value, torch.Tensor):
                fits = value.shape == place.shard_shape()
                what = str(value.item()) if numbers and value.dim() == 0 else ""
                what = f"{value.dtype} {what}".strip()
                fact = _Fact(place.name, str(key), what, tuple(value.shape), fits)
            else:
                what = repr(value) if numbers else type(value).__name__
                fact = _Fact(place.name, str(key), what, None, False)
            facts.append(fact)
    return facts


def _elementwise(caller: str, everyone: list[tuple[int, list[_Fact]]]) -> list[tuple[str, str]]:
    """(name, key) of the values that are split as the parameters are.

    A single rank cannot tell: its shard of a 0-dim parameter has the shape of a step count. Every
    rank comes to the same result, or error.
    """
    _check_same(caller, everyone)
    found = []
    for column in zip(*(facts for _, facts in everyone), strict=True):
        fact = column[0]
        if all(f.fits for f in column):
            found.append((fact.name, fact.key))
        elif any(f.shape for f in column):
            shapes = {rank: f.shape for (rank, _), f in zip(everyone, column, strict=True)}
            raise ValueError(
                f"{caller}: expected {fact.key!r} of {fact.name!r} with the shape of each rank's "
                f"shard, or one number, got the shapes {shapes} by rank; state that an optimizer "
                "made before zerocore.shard, or that is not elementwise, does not fit shards"
            )
    return found


def _check_same(caller: str, everyone: list[tuple[int, list[_Fact]]]) -> None:
    first, reference = everyone[0]
    for rank, facts in everyone[1:]:
        for expected, got in itertools.zip_longest(reference, facts):
            if expected is None or got is None or expected[:3] != got[:3]:
                raise ValueError(
                    f"{caller}: expected the same optimizer state on every rank, got a "
                    f"difference: rank {first} has {_described(expected)}, rank {rank} has "
                    f"{_described(got)}"
                )


def _described(fact: _Fact | None) -> str:
    return f"{fact.key!r} of {fact.name!r} ({fact.what})" if fact is not None else "nothing more"


def _gather(
    sharded: Sharded,
    wanted: list[tuple[_Place, str]],
    held: Mapping[str, Mapping[Any, Any]],
    keep: bool,
) -> dict[tuple[str, str], torch.Tensor]:
    """Full tensors by (name, key); nothing unless `keep`."""
    buffers: dict[tuple[int, int, str, torch.dtype], list[tuple[_Place, torch.Tensor]]] = {}
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


def _copied(value: Any) -> Any:
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
    places: list[list[_Place]] = []
    options: list[Mapping[str, Any]] = []
    state: dict[str, Mapping[Any, Any]] = {}
    error = None
    try:
        places = _places(model, optimizer, caller)
        _check_format(caller, state_dict)
        options = _matched_groups(caller, places, state_dict["param_groups"])
        state = _checked_state(caller, places, state_dict["state"])
        if isinstance(optimizer, AdamW):
            _check_adamw(caller, places, options, state)
    except Exception as caught:  # whatever it is, the other ranks must hear of it
        error = caught
    members = [place for group in places for place in group if place.name in state]
    chosen = [
        _Fact(f"param group {i}", str(key), repr(value), None, False)
        for i, group in enumerate(options)
        for key, value in sorted(group.items(), key=lambda item: str(item[0]))
        if key not in _NO_OPTIONS
    ]
    facts = [chosen + _facts(members, state, sharded, numbers=True) for sharded in models]
    for everyone in process_groups.exchange(caller, [s.groups for s in models], error, facts):
        _check_same(caller, everyone)
    for sharded in models:
        sharded.core.settle()  # parameters show their shards, in the dtype that state is cast to
    _replace(optimizer, places, options, state)
    mark_state_dicts(optimizer)


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


def _check_adamw(
    caller: str,
    places: list[list[_Place]],
    options: list[Mapping[str, Any]],
    state: Mapping[str, Mapping[Any, Any]],
) -> None:
    """Asks for what zerocore.AdamW finds out at its next step only."""
    check_options(options)
    for name, values in state.items():
        missing = {"step", "exp_avg", "exp_avg_sq"} - values.keys()
        if missing:
            raise ValueError(
                f"{caller}: expected the state of Adam or AdamW, got that of {name!r} without "
                f"{', '.join(sorted(missing))}"
            )
    for place in itertools.chain.from_iterable(places):
        for key in ("exp_avg", "exp_avg_sq") if place.name in state else ():
            if state[place.name][key].shape != place.shape:
                raise ValueError(
                    f"{caller}: expected {key!r} of {place.name!r} with the full shape "
                    f"{tuple(place.shape)}, got {tuple(state[place.name][key].shape)}"
                )


def _matched_groups(
    caller: str, places: list[list[_Place]], saved: list[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """The saved group of the same names for each of the optimizer's; empty ones in their order."""
    if len(saved) != len(places):
        raise ValueError(
            f"{caller}: expected {len(places)} param groups, as the optimizer has, got {len(saved)}"
        )
    wanted = [{place.name for place in group} for group in places]
    got = [set(group["params"]) for group in saved]
    for what, some in (
        ("missing", set().union(*wanted) - set().union(*got)),
        ("unknown", set().union(*got) - set().union(*wanted)),
    ):
        if some:
            raise ValueError(
                f"{caller}: expected the optimizer's parameters in 'param_groups', got {what} "
                f"names: {_some(some)}"
            )
    left = list(range(len(saved)))
    matched = []
    for index, names in enumerate(wanted):
        same = [i for i in left if got[i] == names]
        if not same:
            raise ValueError(
                f"{caller}: expected a param group of the same parameters as the optimizer's group "
                f"{index} ({_some(names)}), got them grouped otherwise"
            )
        left.remove(same[0])
        matched.append(saved[same[0]])
    return matched


def _some(names: set[str]) -> str:
    return ", ".join(sorted(names)[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _checked_state(
    caller: str, places: list[list[_Place]], saved: Mapping[str, Mapping[Any, Any]]
) -> dict[str, Mapping[Any, Any]]:
    """The saved state by name, of which every tensor is full (on this rank) or one number."""
    by_name = {place.name: place for group in places for place in group}
    unknown = set(saved) - set(by_name)
    if unknown:
        raise ValueError(
            f"{caller}: expected state of the optimizer's parameters, got unknown names: "
            f"{_some(unknown)}"
        )
    return {
        name: {key: _local(caller, by_name[name], key, value) for key, value in values.items()}
        for name, values in saved.items()
        if values
    }


def _local(caller: str, place: _Place, key: Any, value: Any) -> Any:
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


def _scalar_keys(members: list[_Place], state: Mapping[str, Mapping[Any, Any]]) -> set[Any]:
    """The keys that hold one number a parameter.

    A 0-dim parameter's own tensors cannot tell: other parameters do.
    """
    scalar = dict.fromkeys(_SCALARS, True)
    for place in members:
        for key, value in state[place.name].items() if place.shape else ():
            if isinstance(value, torch.Tensor):
                scalar[key] = value.dim() == 0
    return {key for key, one_number in scalar.items() if one_number}


def _replace(
    optimizer: torch.optim.Optimizer,
    places: list[list[_Place]],
    options: list[Mapping[str, Any]],
    state: Mapping[str, Mapping[Any, Any]],
) -> None:
    """Gives the optimizer this rank's part of the state."""
    members = list(itertools.chain.from_iterable(places))
    scalar = _scalar_keys([place for place in members if place.name in state], state)
    parts = {
        index: {key: _part(place, v, key in scalar) for key, v in state[place.name].items()}
        for index, place in enumerate(members)
        if place.name in state
    }
    groups = []
    indices = itertools.count()
    for group, saved in zip(places, options, strict=True):
        # Names that the user gave to the optimizer stay with their parameters.
        kept = {k: _copied(v) for k, v in saved.items() if k not in _NO_OPTIONS}
        groups.append(kept | {"params": [next(indices) for _ in group]})
    optimizer.load_state_dict({"state": parts, "param_groups": groups})
    # It casts single numbers too to the parameter's dtype, in which they may lose bits; the step
    # count it leaves alone, or puts where the optimizer needs it.
    for index, values in parts.items():
        numbers = {k: values[k] for k in values.keys() & scalar - {"step"}}
        optimizer.state[members[index].param].update(numbers)


def _part(place: _Place, value: Any, scalar: bool) -> Any:
    """The part of a value of the state that belongs to the rank, as a copy."""
    elementwise = isinstance(value, torch.Tensor) and (value.dim() > 0 or not scalar)
    if place.sharded is None or not elementwise:
        return _copied(value)
    entry = place.entry
    full = value.detach()
    return place.sharded.core.slice(entry.unit, entry.flat, entry.index, full).clone()
