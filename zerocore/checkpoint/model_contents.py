"""The tensors of a model that checkpoints have, and what is to be done once they are loaded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from zerocore import registry
from zerocore.checkpoint.placement import (
    Stored,
    copies_of,
    copy_of_plain,
    names_of,
    own_elements,
    plain_tensor,
    shard_of,
)
from zerocore.checkpoint.shards import FlatShard
from zerocore.runtime import Sharded
from zerocore.strides import copy_into

_EXTRA_STATE = "_extra_state"  # as torch.nn.Module.state_dict() calls it


class ModelContents:
    """What checkpoints have of a model: parameters, persistent buffers and extra states.

    Sharded parameters are views of the shards, in the shard's dtype (the fp32 masters under mixed
    precision): what is written there is loaded. Of other tensors the first rank's are saved; of
    buffers, which training may change on each rank by itself, `buffers` are saved besides where
    they differ.

    Args:
        model: with at least one sharded model in it.
        first: the rank that saves what every rank has.

    Attributes:
        tensors: one for each different tensor.
        objects: extra states by name, of modules that have some.
        buffers: this rank's persistent buffers, by name.

    Raises:
        NotImplementedError: for a DTensor that is not sharded by zerocore.
    """

    def __init__(self, model: nn.Module, first: int) -> None:
        self._model = model
        self._models = registry.sharded_models(model)
        self._first = first
        self._copy = copy_of_plain(first)
        self._write_back: list[tuple[torch.Tensor, torch.Tensor]] = []  # from, to
        self._buffers: list[tuple[list[tuple[nn.Module, str]], torch.Tensor]] = []
        self.buffers: dict[str, torch.Tensor] = {}
        self.tensors = [*self._parameters(), *self._persistent_buffers()]
        self.objects: dict[str, Any] = {
            f"{path}.{_EXTRA_STATE}" if path else _EXTRA_STATE: module.get_extra_state()
            for path, module in self._with_extra_state()
        }

    def _parameters(self) -> Iterator[Stored]:
        named = list(self._model.named_parameters(remove_duplicate=False))
        names = names_of(named)
        for name, param in named:
            own = tuple(names[id(param)])
            if own[0] != name:
                continue
            entry = registry.entry_of(param)
            if entry is not None and (sharded := entry.sharded()) is not None:
                flat = sharded.core.shard(entry.unit, entry.flat).detach()
                shard = shard_of(entry, own_elements(entry, flat))
                yield Stored(own, shard, *copies_of(entry, self._first))
            else:
                tensor = plain_tensor(name, param)
                shard = FlatShard.of(tensor)
                if shard.values.data_ptr() != tensor.data_ptr():  # it has gaps: a copy was made
                    self._write_back.append((_shaped(shard), tensor))
                yield Stored(own, shard, self._copy)

    def _persistent_buffers(self) -> Iterator[Stored]:
        found: dict[int, list[tuple[str, nn.Module, str]]] = {}
        for path, module in self._model.named_modules(remove_duplicate=False):
            for name, buffer in module._buffers.items():
                if buffer is not None and name not in module._non_persistent_buffers_set:
                    key = f"{path}.{name}" if path else name
                    found.setdefault(id(buffer), []).append((key, module, name))
        for places in found.values():
            places.sort(key=lambda place: place[0])
            names = tuple(key for key, *_ in places)
            _, module, name = places[0]
            kept = (sharded.buffers.saved(module, name) for sharded in self._models)
            values = next((v for v in kept if v is not None), None)
            if values is None:
                values = plain_tensor(names[0], module._buffers[name]).clone()
            shard = FlatShard.of(values)
            self.buffers[names[0]] = _shaped(shard)
            self._buffers.append(([(m, n) for _, m, n in places], self.buffers[names[0]]))
            yield Stored(names, shard, self._copy)

    def _with_extra_state(self) -> Iterator[tuple[str, nn.Module]]:
        for path, module in self._model.named_modules(remove_duplicate=False):
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                yield path, module

    @torch.no_grad()
    def loaded(self, objects: dict[str, Any], buffers: dict[str, torch.Tensor]) -> None:
        """To be called when `tensors` have been written to: brings the runtime up to date.

        Args:
            objects: the extra states that were saved.
            buffers: this rank's values of buffers that differed between ranks.
        """
        for name, own in buffers.items():
            self.buffers[name].copy_(own)
        for source, target in self._write_back:
            copy_into(target, source)
        for places, values in self._buffers:
            for module, name in places:
                shown, source = module._buffers[name], values
                for sharded in self._models:
                    source = sharded.buffers.load(module, name, source)
                copy_into(shown, source)
        for path, module in self._with_extra_state():
            module.set_extra_state(objects[f"{path}.{_EXTRA_STATE}" if path else _EXTRA_STATE])
        for sharded in self._models:
            shards_loaded(sharded)
            sharded.unloaded = None  # checkpoints without one of its tensors were refused


def bring_to_rest(models: list[Sharded], caller: str) -> None:
    """Ends what goes on in models, so that their shards can be read and written, by any thread.

    Raises:
        RuntimeError: where parameters do not show their shards, inside of `zerocore.gathered()`.
    """
    for sharded in models:
        for unit, name in enumerate(sharded.units):
            if sharded.core.is_open(unit):
                raise RuntimeError(
                    f"{caller}: expected a call outside of zerocore.gathered(), got unit {name!r} "
                    "opened by it"
                )
        sharded.core.before_write()
        if sharded.device.type != "cpu":
            # A thread has a stream of its own.
            torch.get_device_module(sharded.device).synchronize(sharded.device)


def shards_loaded(sharded: Sharded) -> None:
    """Tells windows, graphs and optimizers that all shards of a model have other values."""
    for unit, flats in enumerate(sharded.flats):
        for flat, params in enumerate(flats):
            torch.autograd.graph.increment_version(params)
            sharded.core.after_step(unit, flat)


def _shaped(shard: FlatShard) -> torch.Tensor:
    """All of a tensor, as a view of its elements."""
    return shard.values.as_strided(shard.sizes, shard.strides)
