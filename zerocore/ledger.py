"""Which bytes this rank holds: by category and dtype, predicted and measured."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from zerocore.planner import live
from zerocore.planner.holding import CATEGORIES, Holding, total

if TYPE_CHECKING:
    from zerocore.runtime import Sharded


class Row(NamedTuple):
    """All memory of one category and dtype."""

    category: str
    dtype: torch.dtype | None  # None: of several dtypes
    bytes: int
    bytes_per_parameter: float  # over the parameters of the whole model, not of this rank's part
    predicted: int  # by the shapes, the stage and the number of ranks; between two steps


class Outside(NamedTuple):
    """Memory that is no state of the model."""

    name: str
    bytes: int


@dataclass(frozen=True)
class Ledger:
    """What this rank holds of a sharded model; made by `zerocore.ledger`.

    parameters, master, gradients and moments are what `zerocore.stats(...).resident` counts:
    resident full parameters (stages 0 to 2) or shards that are no master copies; shards in another
    dtype than the one computed in; reduced shards and full local gradients under
    `zerocore.no_sync`; the optimizer's state without step counters. Cleared gradients count on the
    CPU, where their memory is kept for the next ones. buffers: the modules' own, and the values
    kept aside under `MixedPrecision(buffer=...)`. windows: leased now by stage 3, and parameters
    that `zerocore.gathered` shows.

    Attributes:
        stages: of the sharded models, with the ranks, and the reason where it was "auto".
        rows: one for each category and dtype that has bytes or should have, in the order above.
        parameters: elements of the whole model's parameters, without padding.
        windows_peak: most bytes of windows at once since `zerocore.stats(model).reset()`.
        windows_peak_predicted: of a step that calls the units in the order of registration.
        differences: why measured bytes are not the predicted ones, a line for each category.
        outside: what else the process has: memory that zerocore keeps for its next windows and
            messages; on a GPU or NPU what is allocated besides (activations, temporaries, other
            tensors), and what its allocator has reserved and not given out; on the CPU all other
            resident memory.
    """

    stages: tuple[str, ...]
    rows: tuple[Row, ...]
    parameters: int
    windows_peak: int
    windows_peak_predicted: int
    differences: tuple[str, ...]
    outside: tuple[Outside, ...]

    @classmethod
    def of(
        cls,
        model: nn.Module,
        models: Sequence[Sharded],
        optimizer: torch.optim.Optimizer | None = None,
    ) -> Ledger:
        """Counts what the sharded models in `model`, its buffers and the optimizer hold now."""
        require_optimizer("zerocore.ledger", optimizer)
        parameters = sum(sum(sharded.elements) for sharded in models)
        found = [*holdings(models, optimizer), *_buffers(model, models), *_windows(models)]
        measured, expected = total(found), total(live.predicted(models, optimizer))
        keys = sorted({**expected, **measured}, key=lambda key: CATEGORIES.index(key[0]))
        rows = tuple(
            Row(*key, size, size / max(parameters, 1), expected.get(key, 0))
            for key in keys
            for size in (measured.get(key, 0),)
        )
        return cls(
            tuple(map(_stage, models)),
            rows,
            parameters,
            sum(sharded.core.windows()[1] for sharded in models),
            live.windows_peak(models),
            tuple(_differences(rows, optimizer)),
            tuple(_outside(models, sum(row.bytes for row in rows))),
        )

    @property
    def total(self) -> int:
        """Bytes held now, over all categories."""
        return sum(row.bytes for row in self.rows)

    @property
    def predicted(self) -> int:
        """Bytes that should be held between two steps, over all categories."""
        return sum(row.predicted for row in self.rows)

    def bytes_of(self, category: str) -> int:
        """Bytes of one category, over all dtypes.

        Raises:
            ValueError: if there is no such category.
        """
        if category not in CATEGORIES:
            raise ValueError(f"category: expected one of {', '.join(CATEGORIES)}, got {category!r}")
        return sum(row.bytes for row in self.rows if row.category == category)

    def __repr__(self) -> str:
        lines = [("category", "dtype", "predicted", "measured", "bytes per parameter")]
        for category, dtype, size, each, expected in self.rows:
            name = "several" if dtype is None else str(dtype).removeprefix("torch.")
            lines.append((category, name, f"{expected:,}", f"{size:,}", f"{each:.3f}"))
        for what, expected, size in (
            ("total", self.predicted, self.total),
            ("peak of windows", self.windows_peak_predicted, self.windows_peak),
        ):
            each = f"{size / max(self.parameters, 1):.3f}" if what == "total" else ""
            lines.append((what, "", f"{expected:,}", f"{size:,}", each))
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        table = [
            "  ".join(
                f"{cell:<{width}}" if i < 2 else f"{cell:>{width}}"
                for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            )
            for line in lines
        ]
        rule = "-" * len(table[0])
        stages = "; ".join(dict.fromkeys(self.stages))
        first = f"held by this rank, of {self.parameters:,} parameters; {stages}"
        text = [first, table[0], rule, *table[1:-2], rule, *table[-2:]]
        if self.differences:
            text += [
                "",
                "not as between two steps, which is what is predicted:",
                *(f"  {line}" for line in self.differences),
            ]
        text += ["", "in this process besides:"]
        text += [f"  {name}: {size:,} bytes" for name, size in self.outside]
        return "\n".join(text)


def require_optimizer(caller: str, optimizer: object) -> None:
    """Raises ValueError for anything but one optimizer or None."""
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(
            f"{caller}: optimizer: expected one torch.optim.Optimizer or None, got {optimizer!r}"
        )


def _stage(sharded: Sharded) -> str:
    ranks = sharded.groups.ranks
    text = f"stage {sharded.options.stage} on {len(ranks.all)} ranks"
    if 1 < len(ranks.shard) < len(ranks.all):
        text += f", {len(ranks.replicate)} replicas of {len(ranks.shard)}"
    return text + (f" ({sharded.reason})" if sharded.reason else "")


def _differences(rows: Sequence[Row], optimizer: torch.optim.Optimizer | None) -> Iterator[str]:
    for category in CATEGORIES:
        own = [row for row in rows if row.category == category]
        measured, expected = sum(r.bytes for r in own), sum(r.predicted for r in own)
        if measured != expected:
            reason = _reason(category, measured - expected, measured, optimizer)
            yield f"{category} {measured - expected:+,} bytes: {reason}"


def _reason(
    category: str, more: int, measured: int, optimizer: torch.optim.Optimizer | None
) -> str:
    if category == "gradients" and more < 0:
        return "none are there before the first backward, nor after zero_grad() and a forward"
    if category == "gradients":
        return "full local gradients wait for their reduction (zerocore.no_sync)"
    if category == "moments" and not live.knows(optimizer):
        return f"it is not known what {type(optimizer).__name__} keeps for each parameter"
    if category == "moments":
        return "made by the first step" if measured == 0 else "not all parameters were stepped"
    if category == "buffers":
        return "buffers were added, taken away or replaced since zerocore.shard"
    if category == "windows":
        return "a forward or backward is under way, or parameters are gathered"
    return "parameters were added, frozen or replaced since zerocore.shard"


def _outside(models: Sequence[Sharded], held: int) -> Iterator[Outside]:
    kept = sum(size for sharded in models for size in sharded.core.kept())
    yield Outside("kept by zerocore for the next windows and messages", kept)
    device = models[0].device
    if device.type == "cpu":
        rest = _resident_bytes() - held - kept
        yield Outside(
            "rest of the process (activations, temporaries, interpreter, libraries)", max(0, rest)
        )
        return
    allocated = torch.accelerator.memory_allocated(device)
    reserved = torch.accelerator.memory_reserved(device)
    rest = max(0, allocated - held - kept)
    yield Outside(f"allocated on {device} (activations, temporaries, other tensors)", rest)
    yield Outside(f"reserved by the allocator of {device} and not given out", reserved - allocated)


def _resident_bytes() -> int:
    """Of this process, as Linux counts them."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


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
        yield Holding("windows", dtype, sharded.core.windows()[0] + sharded.core.opened_bytes())
