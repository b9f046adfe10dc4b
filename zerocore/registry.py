"""Which parameters and modules zerocore has taken over."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from zerocore import _C
from zerocore.tensor_parallel import TensorParallel

if TYPE_CHECKING:
    from zerocore.runtime import Sharded


@dataclass(frozen=True)
class Entry:
    """Where a parameter lives.

    Attributes:
        sharded: the sharded model that owns it (weak: the parameter must not keep it alive).
        name: its name in that model.
        shape: its full shape; of a DTensor's local tensor.
        strides: those of the full parameter, which is dense.
        unit: index of its unit, 0 is the root.
        flat: index of its flat buffer in the unit.
        index: its place in the flat buffer.
        tensor_parallel: where the rest of it is, if it was a DTensor.
    """

    sharded: weakref.ref[Sharded]
    name: str
    shape: torch.Size
    strides: tuple[int, ...]
    unit: int
    flat: int
    index: int
    tensor_parallel: TensorParallel | None = None

    def whole(self, full: torch.Tensor) -> torch.Tensor:
        """What state dicts show for a tensor of the full shape: a DTensor if the parameter was."""
        return self.tensor_parallel.whole(full) if self.tensor_parallel else full

    def local(self, value: torch.Tensor) -> torch.Tensor:
        """The tensor of the full shape in what state dicts show, or in a whole plain tensor.

        Raises:
            ValueError: for another shape, or other placements of a DTensor.
        """
        if self.tensor_parallel:
            return self.tensor_parallel.local(value)
        if value.shape != self.shape:
            raise ValueError(
                f"expected the full shape {tuple(self.shape)}, got {tuple(value.shape)}"
            )
        return value


_entries: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_replaced: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # DTensors and their names
_models: weakref.WeakKeyDictionary[nn.Module, Sharded] = weakref.WeakKeyDictionary()


_added = 0  # parameters taken over so far


def add_param(param: nn.Parameter, entry: Entry) -> None:
    """Remembers a parameter for as long as it lives."""
    global _added
    _entries[param] = entry
    _added += 1


def add_replaced(param: torch.Tensor, name: str) -> None:
    """Remembers a DTensor that is no parameter of the model any more."""
    _replaced[param] = name


def replaced_name(param: torch.Tensor) -> str | None:
    """The name that a DTensor had in the model, or None if `shard` has not replaced it."""
    return _replaced.get(param)


def fingerprint(optimizer: torch.optim.Optimizer) -> tuple[int, ...]:
    """Changes when the optimizer gets other parameters, or when any are taken over by `shard`."""
    return (_added, *[_C.identity(group["params"]) for group in optimizer.param_groups])


def add_model(model: nn.Module, sharded: Sharded) -> None:
    """Remembers the module that `zerocore.shard` was called on."""
    _models[model] = sharded


def entry_of(param: torch.Tensor) -> Entry | None:
    """The parameter's place, or None if it is not sharded by zerocore."""
    return _entries.get(param)


def sharded_models(model: nn.Module) -> list[Sharded]:
    """The sharded models in `model`, itself included, outermost first."""
    return [_models[module] for module in model.modules() if module in _models]


def sharded_as(model: nn.Module) -> Sharded | None:
    """What `zerocore.shard` made of exactly this module, or None."""
    return _models.get(model)


def all_sharded() -> list[Sharded]:
    """Every sharded model that is alive."""
    return list(_models.values())


def own_modules(model: nn.Module) -> list[nn.Module]:
    """The modules of `model` outside of the sharded models in it."""
    taken = {module for root in model.modules() if root in _models for module in root.modules()}
    return [module for module in model.modules() if module not in taken]


def require_sharded(model: nn.Module, caller: str) -> list[Sharded]:
    """As `sharded_models`, but at least one.

    Raises:
        ValueError: if there is none.
    """
    found = sharded_models(model) if isinstance(model, nn.Module) else []
    if not found:
        raise ValueError(
            f"{caller}: expected a model that zerocore.shard was called on, got "
            f"{type(model).__name__}"
        )
    return found
