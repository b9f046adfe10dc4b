"""The state of an optimizer as checkpoints have it, in the layout of torch and FSDP2.

`optim.state.<parameter>.<key>` and `optim.param_groups.<i>.<option>`, as
torch.distributed.checkpoint.state_dict gives it to torch.distributed.checkpoint.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from zerocore.checkpoint.format import Catalog, Path, key_of
from zerocore.checkpoint.placement import Stored, copies_of, copy_of_plain, shard_of
from zerocore.checkpoint.shards import FlatShard
from zerocore.optim import AdamW
from zerocore.optimizer_places import (
    NO_OPTIONS,
    Fact,
    Place,
    check_adamw,
    elementwise,
    facts_of,
    matched_groups,
    places_of,
    scalar_keys,
    some_of,
)
from zerocore.optimizer_state import group_options, replace_state
from zerocore.runtime import Sharded
from zerocore.strides import row_major

_STATE, _GROUPS = "optim.state.", "optim.param_groups."
_KIND = ("zerocore", "optimizer")
# Options that older versions of torch.optim did not have, or a scheduler adds.
_LATER_OPTIONS = (
    "initial_lr",
    "amsgrad",
    "capturable",
    "decoupled_weight_decay",
    "differentiable",
    "foreach",
    "fused",
    "maximize",
    "nesterov",
)


class OptimizerContents:
    """What there is to save of an optimizer.

    Args:
        first: the rank that saves what every rank has.

    Attributes:
        facts: what has to be the same on all ranks, for `split`.
        options: of the param groups.

    Raises:
        ValueError: for a parameter of the optimizer that is not in the model.
    """

    def __init__(
        self,
        model: nn.Module,
        models: Iterable[Sharded],
        optimizer: torch.optim.Optimizer,
        first: int,
        caller: str,
    ) -> None:
        self._caller = caller
        self._first = first
        self._copy = copy_of_plain(first)
        self._places = places_of(model, optimizer, caller)
        self._members = list(itertools.chain.from_iterable(self._places))
        self._held = {p.name: dict(optimizer.state.get(p.param, {})) for p in self._members}
        self.options = group_options(optimizer)
        self._kind = kind_of(optimizer)
        self.facts = [
            fact for sharded in models for fact in facts_of(self._members, self._held, sharded)
        ]

    def split(
        self, everyone: list[tuple[int, list[Fact]]]
    ) -> tuple[dict[Path, Stored], dict[Path, Any]]:
        """Tensors, and other values that this rank saves.

        Args:
            everyone: (rank, facts) of all ranks.

        Raises:
            ValueError: if ranks have different state, or state that does not fit shards.
        """
        split = set(elementwise(self._caller, everyone))
        tensors: dict[Path, Stored] = {}
        objects: dict[Path, Any] = {}

        def add(path: Path, value: Any) -> None:
            if isinstance(value, torch.Tensor):
                tensors[path] = Stored((key_of(path),), FlatShard.of(value), self._copy)
            elif self._copy is not None:
                objects[path] = value

        for place in self._members:
            for key, value in self._held[place.name].items():
                path = ("optim", "state", place.name, str(key))
                if (place.name, str(key)) in split:
                    shard = _shard_of_state(place, value.detach())
                    copies = copies_of(place.entry, self._first)
                    tensors[path] = Stored((key_of(path),), shard, *copies)
                else:
                    add(path, value)
        for index, (group, options) in enumerate(zip(self._places, self.options, strict=True)):
            options = options | {"params": [place.name for place in group]}
            for option, value in options.items():
                add(("optim", "param_groups", index, option), value)
        if self._copy is not None:
            objects[_KIND] = self._kind
        return tensors, objects


def kind_of(optimizer: torch.optim.Optimizer) -> str:
    """The same for optimizers that can take over each other's state."""
    name = type(optimizer).__name__
    return "Adam" if name == "AdamW" else name  # ours and torch's


def _shard_of_state(place: Place, value: torch.Tensor) -> FlatShard:
    if not place.whole:
        return shard_of(place.entry, value.reshape(-1))
    own = FlatShard.of(value)  # its memory order need not be the parameter's
    like = shard_of(place.entry, own.values)
    return FlatShard(own.values, 0, own.sizes, own.strides, like.whole, like.offsets)


class OptimizerTarget:
    """What a checkpoint is to be loaded into; nothing changes before `loaded`, but for `tensors`.

    State that the optimizer has is written to where it is, if shape and dtype are the same.

    Attributes:
        tensors: where this rank's elements go, by key.

    Raises:
        ValueError: if the checkpoint has no optimizer state, or that of other parameters, groups,
            shapes, or another kind of optimizer.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, catalog: Catalog, caller: str
    ) -> None:
        self._optimizer = optimizer
        self._places = places_of(model, optimizer, caller)
        by_name = {p.name: p for p in itertools.chain.from_iterable(self._places)}
        keys = _keys_by_name(catalog)
        groups = _saved_groups(catalog, caller)
        _require_kind(optimizer, catalog, groups, caller)
        self._options = matched_groups(caller, self._places, groups)
        unknown = set(keys) - set(by_name)
        if unknown:
            raise ValueError(
                f"{caller}: expected state of the optimizer's parameters, got unknown names: "
                f"{some_of(unknown)}"
            )
        like = {name: _like(by_name[name], keys[name], catalog, caller) for name in keys}
        members = [by_name[name] for name in like]
        self._scalar = scalar_keys(members, like)
        if isinstance(optimizer, AdamW):
            check_adamw(caller, self._places, self._options, like)
        self._parts: dict[str, dict[str, Any]] = {}
        self.tensors: dict[str, FlatShard] = {}
        for place in members:
            parts = self._parts[place.name] = {}
            for key, value in like[place.name].items():
                full = f"{_STATE}{place.name}.{key}"
                elements = isinstance(value, torch.Tensor) and key not in self._scalar
                if not elements:
                    parts[key] = catalog.read(full)
                else:
                    parts[key], self.tensors[full] = self._destination(place, key, value.dtype)

    def _destination(
        self, place: Place, key: str, dtype: torch.dtype
    ) -> tuple[torch.Tensor, FlatShard]:
        """A tensor of the optimizer's state, and the same as what is to be loaded."""
        shape = place.shard_shape()
        entry = place.entry if place.sharded is not None else None
        strides = entry.strides if entry and place.whole else row_major(shape)
        held = self._optimizer.state.get(place.param, {}).get(key)
        fits = (
            isinstance(held, torch.Tensor)
            and (held.shape, held.dtype, held.device) == (shape, dtype, place.param.device)
            and held.stride() == strides
        )
        tensor = held.detach() if fits else None
        if tensor is None:
            tensor = torch.empty_strided(shape, strides, dtype=dtype, device=place.param.device)
        if entry is None:
            return tensor, FlatShard.of(tensor)
        flat = tensor.as_strided((tensor.numel(),), (1,))
        return tensor, shard_of(entry, flat)

    def loaded(self) -> None:
        """To be called when `tensors` have been written to: the optimizer takes them over."""
        replace_state(self._optimizer, self._places, self._options, self._parts, self._scalar)


def _require_kind(
    optimizer: torch.optim.Optimizer, catalog: Catalog, groups: list[dict[str, Any]], caller: str
) -> None:
    """Refuses the state of another kind of optimizer, which torch would fail on, or not notice."""
    kind, key = kind_of(optimizer), key_of(_KIND)
    saved = catalog.read(key) if key in catalog else None
    missing: set[str] = set()
    if saved is None and not isinstance(optimizer, AdamW):
        needed = set(optimizer.param_groups[0]) - {*NO_OPTIONS, *_LATER_OPTIONS}
        missing = needed - set(groups[0])
    if saved not in (None, kind) or missing:
        found = saved or f"one without {some_of(missing)}"
        raise ValueError(
            f"{caller}: expected the state of an optimizer like {kind}, got {found} in "
            f"{catalog.path}; load it without an optimizer"
        )


def _keys_by_name(catalog: Catalog) -> dict[str, list[str]]:
    """Keys of the state by name of the parameter; keys have no dots, names may have."""
    keys: dict[str, list[str]] = {}
    for full in catalog.keys():
        if full.startswith(_STATE):
            name, _, key = full.removeprefix(_STATE).rpartition(".")
            keys.setdefault(name, []).append(key)
    return keys


def _saved_groups(catalog: Catalog, caller: str) -> list[dict[str, Any]]:
    groups: dict[int, dict[str, Any]] = {}
    for full in catalog.keys():
        if not full.startswith(_GROUPS):
            continue
        index, _, option = full.removeprefix(_GROUPS).partition(".")
        if not index.isdigit() or not option:
            raise ValueError(
                f"{caller}: expected param groups by number, got {full!r}; save optimizer state "
                "with StateDictOptions(flatten_optimizer_state_dict=False)"
            )
        groups.setdefault(int(index), {})[option] = catalog.read(full)
    if not groups:
        raise ValueError(
            f"{caller}: expected a checkpoint with optimizer state ('optim.param_groups...'), got "
            f"{catalog.path} without; load it without an optimizer"
        )
    found = [groups[index] for index in sorted(groups)]
    for index, group in zip(sorted(groups), found, strict=True):
        if not isinstance(group.get("params"), list):
            raise ValueError(
                f"{caller}: expected the parameters' names in param group {index}, got "
                f"{group.get('params')!r:.80}"
            )
    return found


def _like(
    place: Place, keys: list[str], catalog: Catalog, caller: str
) -> Mapping[str, torch.Tensor | None]:
    """The saved state of one parameter: tensors without memory, as this rank has them, or None."""
    like: dict[str, torch.Tensor | None] = {}
    whole = place.shape
    if place.entry is not None and place.entry.tensor_parallel is not None:
        whole = place.entry.tensor_parallel.shape
    for key in keys:
        saved = catalog.tensors.get(f"{_STATE}{place.name}.{key}")
        if saved is None:
            like[key] = None
            continue
        if saved.size not in (whole, torch.Size([])):
            raise ValueError(
                f"{caller}: expected {key!r} of {place.name!r} with the full shape "
                f"{tuple(whole)}, or one number, got {tuple(saved.size)}"
            )
        shape = place.shape if saved.size == whole else saved.size
        like[key] = torch.empty(shape, dtype=saved.dtype, device="meta")
    return like
