"""The parameters of an optimizer by name, and what ranks have to agree on about their state."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from zerocore import registry
from zerocore.optim import check_options
from zerocore.runtime import Sharded
from zerocore.stepping import SHARD_MARK

# State of torch.optim with one number a parameter. Only asked about where the shapes do not tell,
# in a state that holds nothing but 0-dim parameters.
_SCALARS = ("step", "eta", "mu", "mu_product")


NO_OPTIONS = ("params", "param_names", SHARD_MARK)  # of a param group


class Place(NamedTuple):
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


class Fact(NamedTuple):
    """What ranks tell each other about one value of the state; the first three must be equal."""

    name: str
    key: str
    what: str  # dtype, or the type of what is no tensor
    shape: tuple[int, ...] | None
    fits: bool  # it has the shape of the rank's shard


def places_of(model: nn.Module, optimizer: torch.optim.Optimizer, caller: str) -> list[list[Place]]:
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
            places[-1].append(Place(names[id(param)], param, sharded, entry))
    return places


def facts_of(
    members: list[Place],
    held: Mapping[str, Mapping[Any, Any]],
    sharded: Sharded,
    numbers: bool = False,
) -> list[Fact]:
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
                fact = Fact(place.name, str(key), what, tuple(value.shape), fits)
            else:
                what = repr(value) if numbers else type(value).__name__
                fact = Fact(place.name, str(key), what, None, False)
            facts.append(fact)
    return facts


def elementwise(caller: str, everyone: list[tuple[int, list[Fact]]]) -> list[tuple[str, str]]:
    """(name, key) of the values that are split as the parameters are.

    A single rank cannot tell: its shard of a 0-dim parameter has the shape of a step count. Every
    rank comes to the same result, or error.
    """
    check_same(caller, everyone)
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


def check_same(caller: str, everyone: list[tuple[int, list[Fact]]]) -> None:
    """Raises ValueError if two ranks have different facts: it names the first difference."""
    first, reference = everyone[0]
    for rank, facts in everyone[1:]:
        for expected, got in itertools.zip_longest(reference, facts):
            if expected is None or got is None or expected[:3] != got[:3]:
                raise ValueError(
                    f"{caller}: expected the same optimizer state on every rank, got a "
                    f"difference: rank {first} has {_described(expected)}, rank {rank} has "
                    f"{_described(got)}"
                )


def _described(fact: Fact | None) -> str:
    return f"{fact.key!r} of {fact.name!r} ({fact.what})" if fact is not None else "nothing more"


def matched_groups(
    caller: str, places: list[list[Place]], saved: list[Mapping[str, Any]]
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
                f"names: {some_of(some)}"
            )
    left = list(range(len(saved)))
    matched = []
    for index, names in enumerate(wanted):
        same = [i for i in left if got[i] == names]
        if not same:
            raise ValueError(
                f"{caller}: expected a param group of the same parameters as the optimizer's group "
                f"{index} ({some_of(names)}), got them grouped otherwise"
            )
        left.remove(same[0])
        matched.append(saved[same[0]])
    return matched


def some_of(names: set[str]) -> str:
    """A few of the names, for an error."""
    return ", ".join(sorted(names)[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def scalar_keys(members: list[Place], state: Mapping[str, Mapping[Any, Any]]) -> set[Any]:
    """The keys that hold one number a parameter.

    A 0-dim parameter's own tensors cannot tell: other parameters do.
    """
    scalar = dict.fromkeys(_SCALARS, True)
    for place in members:
        for key, value in state[place.name].items() if place.shape else ():
            if isinstance(value, torch.Tensor):
                scalar[key] = value.dim() == 0
    return {key for key, one_number in scalar.items() if one_number}


def check_adamw(
    caller: str,
    places: list[list[Place]],
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
