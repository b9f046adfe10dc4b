"""The order in which a tensor's elements lie in memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def memory_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides of a tensor that is dense (channels_last, say), else those of a row-major one.

    What zerocore.shard makes of a parameter's.
    """
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return row_major(tensor.shape)
        expected *= max(size, 1)
    return tuple(tensor.stride())


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    strides = [1] * len(shape)
    for d in range(len(shape) - 2, -1, -1):
        strides[d] = strides[d + 1] * max(shape[d + 1], 1)
    return tuple(strides)


def copy_into(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """As `tensor.copy_(values)`, also for an expanded tensor, whose elements share memory."""
    for dim, (stride, size) in enumerate(zip(tensor.stride(), tensor.shape, strict=True)):
        if stride == 0 and size > 1:
            tensor, values = tensor.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    tensor.copy_(values)
