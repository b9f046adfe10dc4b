"""Which bytes this rank holds: by category and dtype, measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

if TYPE_CHECKING:
    from zerocore.runtime import Sharded

CATEGORIES = ("parameters", "master", "gradients", "moments", "buffers", "windows")


class Holding(NamedTuple):
    """Memory of one category and dtype."""

    category: str
    dtype: torch.dtype | None  # None: of several dtypes
    bytes: int


class Row(NamedTuple):
    """All memory of one category and dtype."""

    category: str
    dtype: torch.dtype | None  # None: of several dtypes
    bytes: int
    bytes_per_parameter: float  # over the parameters of the whole model, not of this rank's part


@dataclass(frozen=True)
class Ledger:
    """What this rank holds of a sharded model; made by `zerocore.ledger`.

    parameters, master, gradients and moments are what `zerocore.stats(...).resident` counts:
    resident full parameters (stages 0 to 2) or shards that are no master copies; shards in another
    dtype than the one computed in; reduced shards and full local gradients under
    `zerocore.no_sync`; the optimizer's state without step counters. buffers: the modules' own, and
    the values kept aside under `MixedPrecision(buffer=...)`. windows: leased now, by stage 3.

    Attributes:
        rows: one for each category and dtype that has bytes, in the order above.
        parameters: elements of the whole model's parameters, without padding.
        windows_peak: most bytes of windows at once since `zerocore.stats(model).reset()`.
    """

    rows: tuple[Row, ...]
    parameters: int
    windows_peak: int

    @classmethod
    def of(
        cls,
        model: nn.Module,
        models: Sequence[Sharded],
        optimizer: torch.optim.Optimizer | None = None,
    ) -> Ledger:
        """Counts what the sharded models in `model`, its buffers and the optimizer hold now."""
        parameters = sum(sum(sharded.elements) for sharded in models)
        found = [*holdings(models, optimizer), *_buffers(model, models), *_windows(models)]
        total: dict[tuple[str, torch.dtype | None], int] = {}
        for category, dtype, size in sorted(found, key=lambda h: CATEGORIES.index(h.category)):
            if size > 0:
                total[category, dtype] = total.get((category, dtype), 0) + size
        rows = (Row(*key, size, size / max(parameters, 1)) for key, size in total.items())
        peak = sum(sharded.core.windows()[1] for sharded in models)
        return cls(tuple(rows), parameters, peak)

    @property
    def total(self) -> int:
        """Bytes held now, over all categories."""
        return sum(row.bytes for row in self.rows)

    def bytes_of(self, category: str) -> int:
        """Bytes of one category, over all dtypes.

        Raises:
            ValueError: if there is no such category.
        """
        if category not in CATEGORIES:
            raise ValueError(f"category: expected one of {', '.join(CATEGORIES)}, got {category!r}")
        return sum(row.bytes for row in self.rows if row.category == category)

    def __repr__(self) -> str:
        lines = [("category", "dtype", "bytes", "bytes per parameter")]
        for category, dtype, size, each in self.rows:
            name = "several" if dtype is None else str(dtype).removeprefix("torch.")
            lines.append((category, name, f"{size:,}", f"{each:.3f}"))
        for what, size in (("total", self.total), ("peak of windows", self.windows_peak)):
            lines.append((what, "", f"{size:,}", f"{size / max(self.parameters, 1):.3f}"))
        left, dtype, size, each = (max(map(len, column)) for column in zip(*lines, strict=True))
        table = [f"{a:<{left}}  {b:<{dtype}}  {c:>{size}}  {d:>{each}}" for a, b, c, d in lines]
        rule = "-" * len(table[0])
        first = f"held by this rank, of {self.parameters:,} parameters"
        return "\n".join([first, table[0], rule, *table[1:-2], rule, *table[-2:]])


def holdings(
    models: Iterable[Sharded], optimizer: torch.optim.Optimizer | None = None
) -> Iterator[Holding]:
    """Memory of parameters, master copies, gradients and moments; changes nothing."""
    for sharded in models:
        for unit, flats in enumerate(sharded.flats):
            for flat in range(len(flats)):
                yield from _flat_holdings(sharded, unit, flat)
    if optimizer is not None:
        yield from _moments(optimizer)


def _flat_holdings(sharded: Sharded, unit: int, flat: int) -> Iterator[Holding]:
    core = sharded.core
    shard = core.shard(unit, flat)
    compute = core.compute_dtype(unit, flat)
    if sharded.options.lifetimes.full_parameters_stay:
        yield Holding("parameters", compute, core.window_bytes(unit, flat))
    if not core.shard_is_slot(unit, flat):
        category = "parameters" if compute == shard.dtype else "master"
        yield Holding(category, shard.dtype, shard.nbytes)
    gradients = core.gradient_bytes(unit, flat)
    yield Holding("gradients", core.gradient_dtype(unit, flat), gradients)


def _moments(optimizer: torch.optim.Optimizer) -> Iterator[Holding]:
    """Tensors of the optimizer's state without step counters (0-dim); views of one storage once."""
    tensors = (
        value
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.dim() > 0
    )
    return _storages("moments", tensors)


def _buffers(model: nn.Module, models: Iterable[Sharded]) -> Iterator[Holding]:
    kept = [tensor for sharded in models for tensor in sharded.buffers.held()]
    return _storages("buffers", [*model.buffers(), *kept])


def _storages(category: str, tensors: Iterable[torch.Tensor]) -> Iterator[Holding]:
    """The distinct storages behind tensors."""
    found = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = Holding(category, tensor.dtype, storage.nbytes())
    return iter(found.values())


def _windows(models: Iterable[Sharded]) -> Iterator[Holding]:
    """Leases now. Only their sum is known, so their dtype only if all flat buffers have it."""
    for sharded in models:
        dtypes = {
            sharded.core.compute_dtype(unit, flat)
            for unit, flats in enumerate(sharded.flats)
            for flat in range(len(flats))
        }
        dtype = dtypes.pop() if len(dtypes) == 1 else None
        yield Holding("windows", dtype, sharded.core.windows()[0])
