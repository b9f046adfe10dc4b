"""Exponential moving averages of sharded parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from zerocore import registry
from zerocore.collectives import exchange
from zerocore.runtime import Sharded


@dataclass
class _Average:
    """The average of one flat shard.

    Attributes:
        sharded, unit, flat: the flat shard.
        values: the average, 1-D, as long as the shard; fp32, or the shard's dtype if it is wider.
        names: names in the model and place in the flat buffer; a tied parameter has several names.
        params: the averaged parameters.
        kept: the parameters' own values while a shard of a narrower dtype shows the average.
    """

    sharded: Sharded
    unit: int
    flat: int
    values: torch.Tensor
    names: list[tuple[str, int]] = field(default_factory=list)
    params: list[nn.Parameter] = field(default_factory=list)
    kept: torch.Tensor | None = None

    def shard(self) -> torch.Tensor:
        """The parameters on this rank, 1-D."""
        return self.sharded.core.shard(self.unit, self.flat)

    def entry(self, index: int) -> registry.Entry:
        """Of a parameter, by its place in the flat buffer."""
        return registry.entry_of(self.sharded.flats[self.unit][self.flat][index])

    def swap(self) -> None:
        """Shows the average in place of the parameters, or the parameters again."""
        shard = self.shard()
        if self.kept is not None:
            shard.copy_(self.kept)
            self.kept = None
        else:
            kept = shard.clone()
            shard.copy_(self.values)
            if shard.dtype == self.values.dtype:
                self.values.copy_(kept)  # they change places: no copy of the whole model is needed
            else:
                self.kept = kept
        # For graphs and windows that hold the old values.
        torch.autograd.graph.increment_version(self.params)
        self.sharded.core.after_step(self.unit, self.flat)


class ShardedAverages(dict[str, torch.Tensor]):
    """What `zerocore.load` gives for a saved `EMA`, for its `load_state_dict` alone.

    The elements of this rank of each average, 1-D in the order of memory, by name.
    """


class EMA:
    """Exponential moving average of the trainable parameters of a sharded model, on the shards.

    Starts with the parameters as they are. Memory: one more shard of the parameters in fp32 (or in
    the parameters' own dtype if it is wider). Buffers, running statistics for example, and
    parameters that were frozen when `zerocore.shard` was called are not averaged.

        ema = zerocore.EMA(model)
        ...
        optimizer.step()
        ema.update()
        ...
        with ema.applied():
            evaluate(model)

    Args:
        model: a model that `zerocore.shard` was called on.
        decay: in [0, 1): an update gives average = decay * average + (1 - decay) * parameter.

    Raises:
        ValueError: if `model` is not sharded, has a trainable parameter that is not, or none; or
            for a decay out of range.
    """

    def __init__(self, model: nn.Module, decay: float = 0.999) -> None:
        self._sharded = registry.require_sharded(model, "zerocore.EMA")
        self.decay = _checked(decay)
        averages: dict[tuple[Sharded, int, int], _Average] = {}
        for name, param in model.named_parameters(remove_duplicate=False):
            entry = registry.entry_of(param)
            sharded = entry.sharded() if entry is not None else None
            if sharded is None:
                if param.requires_grad:
                    raise ValueError(
                        f"zerocore.EMA: expected sharded parameters, got {name!r}, which is not"
                    )
                continue
            key = (sharded, entry.unit, entry.flat)
            if key not in averages:
                if not sharded.trainable[entry.unit][entry.flat]:
                    continue
                shard = sharded.core.shard(entry.unit, entry.flat)
                dtype = torch.promote_types(shard.dtype, torch.float32)
                averages[key] = _Average(*key, shard.detach().to(dtype, copy=True))
            averages[key].names.append((name, entry.index))
            if not any(param is other for other in averages[key].params):
                averages[key].params.append(param)
        if not averages:
            raise ValueError("zerocore.EMA: expected trainable parameters, got none")
        self._averages = list(averages.values())
        averaged = {name for average in self._averages for name, _ in average.names}
        every = model.named_parameters(remove_duplicate=False)
        self._names = [name for name, _ in every if name in averaged]

    @torch.no_grad()
    def update(self, decay: float | None = None) -> None:
        """Takes the parameters into the average; after every optimizer.step().

        Args:
            decay: of this update alone; None: that of the constructor.

        Raises:
            ValueError: for a decay out of range.
            RuntimeError: inside of `applied()`.
        """
        decay = self.decay if decay is None else _checked(decay)
        self._require_parameters("update()")
        for sharded in self._sharded:
            sharded.core.settle()
        for average in self._averages:
            average.values.lerp_(average.shard().to(average.values.dtype), 1.0 - decay)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """The model computes with the average inside of the `with` block, and is saved so.

        Average and parameters change places, buffer by buffer; the end of the block, with an
        exception too, restores them bit for bit. Every rank of the model enters and leaves.

        Raises:
            RuntimeError: inside of `applied()` or `zerocore.gathered()`, and for a change of the
                parameters inside of the block: optimizer.step() raises where it is called, other
                changes at the end.
        """
        self._require_parameters("applied()")
        for sharded in self._sharded:
            for unit, name in enumerate(sharded.units):
                if sharded.core.is_open(unit):
                    raise RuntimeError(
                        "zerocore.EMA: expected applied() outside of zerocore.gathered(), got "
                        f"unit {name!r} opened by it"
                    )
        for sharded in self._sharded:
            sharded.core.before_write()
        self._swap(applied=True)
        before = self._versions()
        try:
            yield
        finally:
            changed = self._versions() != before
            try:
                for sharded in self._sharded:
                    sharded.core.before_write()
            finally:
                self._swap(applied=False)
        if changed:
            raise RuntimeError(
                "zerocore.EMA: expected parameters that stay as they are inside of applied(), got "
                "a change; it went into the average, the parameters are restored"
            )

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Full averages by the parameters' names, in fp32 or wider, as copies.

        A tied parameter is there under each of its names, as in the model's state_dict(). A
        collective over the model's ranks, which gathers buffer by buffer.

        Raises:
            RuntimeError: inside of `applied()`, where model.state_dict() gives the average.
        """
        self._require_parameters("state_dict()")
        state = {}
        for average in self._averages:
            core = average.sharded.core
            tensors = core.gather_tensors(average.unit, average.flat, average.values)
            for name, index in average.names:
                state[name] = average.entry(index).whole(tensors[index])
        return {name: state[name] for name in self._names}

    def own_elements(self) -> Iterator[tuple[list[str], registry.Entry, torch.Tensor]]:
        """Names, place, and the elements of this rank (1-D, a view) of each average.

        Raises:
            RuntimeError: inside of `applied()`.
        """
        self._require_parameters("zerocore.save")
        for average in self._averages:
            core, names = average.sharded.core, {}
            for name, index in average.names:
                names.setdefault(index, []).append(name)
            for index, own in names.items():
                start, stop = core.within_shard(average.unit, average.flat, index)
                yield own, average.entry(index), average.values[start:stop]

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Loads what `state_dict` or `zerocore.load` gave, at any stage, on any number of ranks.

        A collective over the model's ranks, each with the whole `state_dict`.

        Raises:
            ValueError: for missing or unknown names and wrong shapes, on every rank, before
                anything changes.
            RuntimeError: inside of `applied()`.
        """
        self._require_parameters("load_state_dict()")
        caller = "zerocore.EMA.load_state_dict"
        error, full = None, {}
        sharded_ones = isinstance(state_dict, ShardedAverages)
        try:
            self._check_names(caller, state_dict)
            if sharded_ones:
                self._check_sizes(caller, state_dict)
            else:
                full = self._full_tensors(caller, state_dict)
        except Exception as caught:  # whatever it is, the other ranks must hear of it
            error = caught
        groups = [sharded.groups for sharded in self._sharded]
        exchange(caller, groups, error, [None] * len(groups))
        if sharded_ones:
            for names, _, own in self.own_elements():
                own.copy_(state_dict[names[0]])
            return
        for average in self._averages:
            core, values = average.sharded.core, average.values
            for name, index in average.names:
                value = full[name].to(values.dtype)
                part = core.slice(average.unit, average.flat, index, value)
                start, _ = core.within_shard(average.unit, average.flat, index)
                values.as_strided(part.shape, part.stride(), start).copy_(part)

    def _check_names(self, caller: str, state_dict: Mapping[str, torch.Tensor]) -> None:
        own = set(self._names)
        for what, names in (
            ("missing", own - state_dict.keys()),
            ("unknown", state_dict.keys() - own),
        ):
            if names:
                raise ValueError(
                    f"{caller}: expected the {len(own)} names of the averaged parameters, got "
                    f"{what} ones: {', '.join(sorted(names)[:5])}"
                )

    def _check_sizes(self, caller: str, state_dict: Mapping[str, torch.Tensor]) -> None:
        for names, _, own in self.own_elements():
            if state_dict[names[0]].shape != own.shape:
                raise ValueError(
                    f"{caller}: expected {own.numel()} elements of {names[0]!r}, this rank's part, "
                    f"got {tuple(state_dict[names[0]].shape)}, of another model or rank"
                )

    def _full_tensors(
        self, caller: str, state_dict: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        entries = {n: average.entry(i) for average in self._averages for n, i in average.names}
        full = {}
        for name, entry in entries.items():
            value = state_dict[name]
            if not isinstance(value, torch.Tensor):
                raise ValueError(f"{caller}: {name!r}: expected a tensor, got {value!r}")
            try:
                full[name] = entry.local(value.detach())
            except ValueError as error:
                raise ValueError(f"{caller}: {name!r}: {error}") from None
        return full

    def _swap(self, applied: bool) -> None:
        with torch.no_grad():
            for average in self._averages:
                average.swap()
        for sharded in self._sharded:
            sharded.shows_average = applied

    def _versions(self) -> list[int]:
        return [param._version for average in self._averages for param in average.params]

    def _require_parameters(self, call: str) -> None:
        if any(sharded.shows_average for sharded in self._sharded):
            raise RuntimeError(
                f"zerocore.EMA: expected {call} outside of applied(), where the model has its own "
                "parameters, got it inside"
            )


def _checked(decay: float) -> float:
    if not isinstance(decay, int | float) or not 0.0 <= decay < 1.0:
        raise ValueError(f"decay: expected a number in [0, 1), got {decay!r}")
    return float(decay)
