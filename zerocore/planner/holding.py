"""Bytes that a rank holds between steps, by formula."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from zerocore.planner.setting import FlatFacts, Setting
from zerocore.planner.sizes import FlatSize, ModelSizes

CATEGORIES = ("parameters", "master", "gradients", "moments", "buffers", "windows")


class Holding(NamedTuple):
    """Memory of one category and dtype."""

    category: str
    dtype: torch.dtype | None  # None: of several dtypes
    bytes: int


def total(holdings: Iterable[Holding]) -> dict[tuple[str, torch.dtype | None], int]:
    """Sums by category and dtype, in the order of the categories; what has no bytes is left out."""
    sums: dict[tuple[str, torch.dtype | None], int] = {}
    for category, dtype, size in sorted(holdings, key=lambda h: CATEGORIES.index(h.category)):
        if size > 0:
            sums[category, dtype] = sums.get((category, dtype), 0) + size
    return sums


def resident(
    sizes: ModelSizes, setting: Setting, moments: int = 2, full_gradients: bool = False
) -> Iterator[Holding]:
    """What a rank holds after a step and before the next: the ledger of a stage.

    Per parameter of a shard group of N, with parameters of p bytes computed with, a master copy of
    m, gradients of g and two moments, padding left aside: stage 0: p + g + 3m; 1 and 2: p + (g +
    3m)/N; 3: (g + 3m)/N. Where p and m are one dtype, the shard is a part of the full parameters:
    m is 2m then, and p not needed at stage 3. (arXiv 1910.02054, section 5, which counts a shard in
    p at stage 3 as well; here it is the master copy.)

    Args:
        moments: values that the optimizer keeps for each parameter: 2 for AdamW.
        full_gradients: a full local gradient waits for its reduction (`zerocore.no_sync`), in the
            place of the shard's.
    """
    for unit in sizes.units:
        for flat in unit.flats:
            yield from _of_flat(flat, FlatFacts.of(flat, setting), setting, moments, full_gradients)
    yield from _buffers(sizes, setting)


def _of_flat(
    flat: FlatSize, facts: FlatFacts, setting: Setting, moments: int, full_gradients: bool
) -> Iterator[Holding]:
    if setting.lifetimes.full_parameters_stay:
        yield Holding("parameters", facts.compute, facts.window_bytes)
    if not facts.shard_is_slot:
        category = "parameters" if facts.compute == facts.kept else "master"
        yield Holding(category, facts.kept, facts.shard * facts.kept.itemsize)
    if flat.trainable:
        gradient = facts.total if full_gradients else facts.shard
        yield Holding("gradients", facts.accumulate, gradient * facts.accumulate.itemsize)
        yield Holding("moments", facts.kept, moments * facts.shard * facts.kept.itemsize)


def _buffers(sizes: ModelSizes, setting: Setting) -> Iterator[Holding]:
    """The modules' own, and beside those in another dtype what is kept in their own."""
    shown = setting.mixed_precision.buffer if setting.mixed_precision else None
    for dtype, size, elements in sizes.buffers:
        yield Holding("buffers", dtype, size)
        if shown is not None and dtype.is_floating_point and dtype != shown:
            yield Holding("buffers", shown, elements * shown.itemsize)
