"""Tensors that have a size but no memory, and the names of their storages."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch.nn.parameter import UninitializedTensorMixin

from zerocore import _C

_MESSAGE = (
    "zerocore.deferred: expected zerocore.shard(model, ...) before this tensor is read or written, "
    "which gives it memory and values; call that first. Inside of `build`, use torch operators, "
    ".item(), .tolist() or .numpy() on it"
)


def key_of(tensor: torch.Tensor) -> int:
    """The name of a tensor's storage, unique among those that are alive."""
    return tensor.untyped_storage()._cdata


def is_plain(value: object) -> bool:
    """Whether it is a strided tensor on the CPU, the only kind that is ever blank."""
    return (
        isinstance(value, torch.Tensor)
        and type(value).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        and not isinstance(value, UninitializedTensorMixin)
        and value.layout is torch.strided
        and value.device.type == "cpu"
    )


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements fill a range of its storage, in any order."""
    run = 1
    for stride, size in sorted(
        (stride, size)
        for stride, size in zip(tensor.stride(), tensor.size(), strict=True)
        if size != 1
    ):
        if stride != run:
            return False
        run *= size
    return True


def covers_storage(tensor: torch.Tensor) -> bool:
    """Whether writing all of the tensor writes all of its storage."""
    nbytes = tensor.numel() * tensor.element_size()
    return nbytes == tensor.untyped_storage().nbytes() and is_dense(tensor)


@dataclass(frozen=True, slots=True)
class Geometry:
    """Which elements of which storage a tensor shows; offset and strides in elements."""

    key: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @staticmethod
    def of(tensor: torch.Tensor) -> Geometry:
        """That of a tensor."""
        return Geometry(
            key_of(tensor), tensor.size(), tensor.stride(), tensor.storage_offset(), tensor.dtype
        )

    def over(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The tensor, over other memory."""
        empty = torch.empty(0, dtype=self.dtype)
        return empty.set_(storage, self.offset, self.size, self.stride)


def blank(like: torch.Tensor) -> torch.Tensor:
    """A CPU tensor of the size, strides and dtype of a meta tensor: reading it is an error."""
    return _C.blank_like(like, _MESSAGE)


class Heap:
    """Gives freed memory back to the system.

    glibc keeps blocks below its sliding threshold (up to 32 MB) when they are freed, and small live
    ones above them keep the rest: the process would grow to the size of the whole model, although
    one tensor lives at a time.
    """

    _EVERY = 32 * 2**20  # a trim makes pages that are used again fault again: not after each block

    def __init__(self) -> None:
        self._freed = 0
        try:
            self._trim = ctypes.CDLL(None).malloc_trim
        except (AttributeError, OSError):  # another libc
            self._trim = None

    def freed(self, nbytes: int) -> None:
        """To be told of blocks that were freed."""
        self._freed += nbytes
        if self._freed >= self._EVERY:
            self.trim()

    def trim(self) -> None:
        """Returns now what is free."""
        self._freed = 0
        if self._trim is not None:
            self._trim(0)


heap = Heap()
