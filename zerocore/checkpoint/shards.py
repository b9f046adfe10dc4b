"""What a rank holds of a tensor, as a checkpoint describes it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from zerocore.checkpoint.boxes import boxes_of
from zerocore.strides import memory_strides


class Chunk(NamedTuple):
    """A box of a whole tensor.

    Attributes:
        offsets, sizes: one a dimension.
        values: its elements, a view.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    values: torch.Tensor


@dataclass(frozen=True)
class FlatShard:
    """A range of a tensor's elements, in the order of its memory.

    Attributes:
        values: 1-D, the elements; a view of where they live.
        start: place of the first one.
        sizes, strides: of the tensor, which is dense.
        whole: shape of the tensor that checkpoints have under the name, of which this one is a box
            (all of it, but for tensor parallelism).
        offsets: of the box in it.
    """

    values: torch.Tensor
    start: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    whole: torch.Size
    offsets: tuple[int, ...]

    @staticmethod
    def of(tensor: torch.Tensor) -> FlatShard:
        """All of a tensor; a copy of one that has gaps."""
        tensor = tensor.detach()
        strides = memory_strides(tensor)
        if strides != tuple(tensor.stride()):
            dense = torch.empty_strided(
                tensor.shape, strides, dtype=tensor.dtype, device=tensor.device
            )
            tensor = dense.copy_(tensor)
        flat = tensor.as_strided((tensor.numel(),), (1,))
        sizes = tuple(tensor.shape)
        return FlatShard(flat, 0, sizes, strides, tensor.shape, (0,) * len(sizes))

    def part(self, index: int, count: int) -> FlatShard:
        """One of `count` about equal parts, for ranks that hold the same elements."""
        numel = self.values.numel()
        first, stop = index * numel // count, (index + 1) * numel // count
        return FlatShard(
            self.values[first:stop],
            self.start + first,
            self.sizes,
            self.strides,
            self.whole,
            self.offsets,
        )

    def chunks(self) -> list[Chunk]:
        """The range as boxes of the whole tensor; the one empty box of an empty tensor."""
        if math.prod(self.whole) == 0:
            empty = self.values[:0].view(self.whole)
            return [Chunk((0,) * len(self.whole), tuple(self.whole), empty)]
        order = sorted(range(len(self.sizes)), key=lambda d: -self.strides[d])  # slowest first
        back = sorted(range(len(order)), key=order.__getitem__)
        stop = self.start + self.values.numel()
        found = []
        for box in boxes_of([self.sizes[d] for d in order], self.start, stop):
            first = box.start - self.start
            values = self.values[first : first + math.prod(box.sizes)]
            values = values.view(box.sizes).permute(back)
            offsets = tuple(
                box.offsets[d] + base for d, base in zip(back, self.offsets, strict=True)
            )
            found.append(Chunk(offsets, tuple(values.shape), values))
        return found
