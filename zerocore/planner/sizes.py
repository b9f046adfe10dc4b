"""How large the parts of a model are: shapes and dtypes only, of a model on any device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from zerocore.units import UnitPlan, Units, plan_units


@dataclass(frozen=True)
class FlatSize:
    """Parameters that share a flat buffer: of one dtype, all trainable or all frozen.

    Attributes:
        numels: elements of each parameter, in the order of the buffer.
        dtype: of the parameters, as the model has them.
        trainable: whether they need gradients.
    """

    numels: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool


@dataclass(frozen=True)
class UnitSize:
    """What is gathered and reduced together.

    Attributes:
        name: '' is the root.
        flats: its flat buffers.
        matrix_elements: elements of parameters that each token is multiplied with: those of two
            dimensions and more which are no embedding tables.
        last: place of its last parameter among all, in the order of registration.
        first_trained: of its first one that needs a gradient; None: none does.
    """

    name: str
    flats: tuple[FlatSize, ...]
    matrix_elements: int = 0
    last: int = 0
    first_trained: int | None = None

    @property
    def parameters(self) -> int:
        """Elements, without padding."""
        return sum(sum(flat.numels) for flat in self.flats)

    @property
    def bytes(self) -> int:
        """Of the parameters in their own dtypes, without padding."""
        return sum(sum(flat.numels) * flat.dtype.itemsize for flat in self.flats)


@dataclass(frozen=True)
class ModelSizes:
    """A model as far as memory and communication depend on it.

    Attributes:
        units: the root first, the others in the order of registration.
        buffers: (dtype, bytes, elements) of each of the model's own buffers.
    """

    units: tuple[UnitSize, ...]
    buffers: tuple[tuple[torch.dtype, int, int], ...] = ()

    @property
    def parameters(self) -> int:
        """Elements of all parameters, without padding; tied ones count once."""
        return sum(unit.parameters for unit in self.units)

    @classmethod
    def of(
        cls,
        model: nn.Module,
        units: Units = None,
        bucket_bytes: int = 25 * 2**20,
    ) -> ModelSizes:
        """Sizes of a model that is not sharded, on the meta device for example.

        Args:
            units, bucket_bytes: as for `zerocore.shard`.

        Raises:
            ValueError: if the model has no parameters, or `units` matches nothing.
        """
        plans = plan_units(model, units, bucket_bytes)
        if not any(plan.params for plan in plans):
            raise ValueError(f"model: expected parameters, got {type(model).__name__} without any")
        return cls.of_plans(model, plans, model.buffers())

    @classmethod
    def of_plans(
        cls, model: nn.Module, plans: Iterable[UnitPlan], buffers: Iterable[torch.Tensor]
    ) -> ModelSizes:
        """The same of units that were planned before."""
        used = _matrix_uses(model)
        storages = {buffer.untyped_storage()._cdata: buffer for buffer in buffers}
        found = ((b.dtype, b.untyped_storage().nbytes(), b.numel()) for b in storages.values())
        places = {id(param): place for place, param in enumerate(model.parameters())}
        return cls(tuple(_unit_size(plan, used, places) for plan in plans), tuple(found))


def _unit_size(plan: UnitPlan, used: dict[int, int], places: dict[int, int]) -> UnitSize:
    flats = tuple(
        FlatSize(
            tuple(param.numel() for _, param in flat),
            flat[0][1].dtype,
            flat[0][1].requires_grad,
        )
        for flat in plan.flats()
    )
    params = [param for _, param in plan.params]
    return UnitSize(
        plan.name,
        flats,
        matrix_elements=sum(used.get(id(param), 0) for param in params),
        last=max((places[id(param)] for param in params), default=0),
        first_trained=min((places[id(p)] for p in params if p.requires_grad), default=None),
    )


def _matrix_uses(model: nn.Module) -> dict[int, int]:
    """Elements of each matrix times the modules that multiply with it; tied ones have several."""
    used: dict[int, int] = {}
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            continue
        for param in module.parameters(recurse=False):
            if param.dim() >= 2:
                used[id(param)] = used.get(id(param), 0) + param.numel()
    return used
