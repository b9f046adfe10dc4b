"""A range of a flat tensor as boxes of the tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class Box(NamedTuple):
    """A rectangular part of a tensor.

    Attributes:
        offsets, sizes: one a dimension.
        start: where its elements, which are neighbours, begin in the flattened tensor.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int


def boxes_of(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """The elements [start, stop) of a row-major tensor as boxes, in their order.

    At most 2 n - 1 boxes for n dimensions: what is left of a row at each end, and the whole rows
    between, dimension by dimension. None for an empty range.

    Raises:
        ValueError: if the range is not within the tensor.
    """
    if not 0 <= start <= stop <= math.prod(shape):
        raise ValueError(f"expected a range within {math.prod(shape)} elements, got {start, stop}")
    return _boxes(tuple(shape), start, stop)


def _boxes(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    if start >= stop:
        return []
    if not shape:
        return [Box((), (), 0)]
    rest = shape[1:]
    row = math.prod(rest)
    first, head = divmod(start, row)
    last, tail = divmod(stop, row)

    def within(index: int, begin: int, end: int) -> list[Box]:
        return [
            Box((index, *box.offsets), (1, *box.sizes), index * row + box.start)
            for box in _boxes(rest, begin, end)
        ]

    if first == last:
        return within(first, head, tail)
    found = []
    if head:
        found += within(first, head, row)
        first += 1
    if first < last:
        found.append(Box((first, *[0] * len(rest)), (last - first, *rest), first * row))
    if tail:
        found += within(last, 0, tail)
    return found
