"""Where a parameter's part of this rank lies in what checkpoints have under its name."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from zerocore import registry
from zerocore.checkpoint.shards import FlatShard
from zerocore.tensor_parallel import TensorParallel


@dataclass(frozen=True)
class Stored:
    """A tensor of a checkpoint, as far as this rank holds it.

    Attributes:
        names: of the tensor; several for a tied parameter or a shared buffer.
        shard: this rank's elements.
        copy: which of the ranks that hold the same elements this is; None: another one's are saved.
        copies: how many ranks do.
    """

    names: tuple[str, ...]
    shard: FlatShard
    copy: int | None = 0
    copies: int = 1

    def to_save(self) -> FlatShard | None:
        """What of the shard this rank saves: the ranks with the same elements share the work."""
        return None if self.copy is None else self.shard.part(self.copy, self.copies)


def shard_of(entry: registry.Entry, values: torch.Tensor) -> FlatShard:
    """A shard of this rank's elements of a parameter, or of something with one element for each.

    Args:
        values: 1-D, in the order of the shard.
    """
    start, _ = entry.sharded().core.owned(entry.unit, entry.flat, entry.index)
    whole, offsets = _in_whole(entry)
    return FlatShard(values, start, tuple(entry.shape), entry.strides, whole, offsets)


def own_elements(entry: registry.Entry, flat: torch.Tensor) -> torch.Tensor:
    """The parameter's part of a 1-D tensor that is laid out as the flat shard; a view."""
    start, stop = entry.sharded().core.within_shard(entry.unit, entry.flat, entry.index)
    return flat.narrow(0, start, stop - start)


def copies_of(entry: registry.Entry, first: int) -> tuple[int | None, int]:
    """Which of the ranks that save the same elements this is, None for none; how many do.

    Args:
        first: the first rank of all. Other tensor-parallel ranks have a parameter that is no
            DTensor once more.
    """
    ranks = entry.sharded().groups.ranks
    replicas = sorted(ranks.replicate)
    copy, copies = replicas.index(dist.get_rank()), len(replicas)
    how = entry.tensor_parallel
    if how is not None:
        return _tensor_parallel_copy(how) * copies + copy, how.copies * copies
    return copy if first in ranks.all else None, copies


def _in_whole(entry: registry.Entry) -> tuple[torch.Size, tuple[int, ...]]:
    how = entry.tensor_parallel
    if how is None:
        return entry.shape, (0,) * len(entry.shape)
    _, offsets = compute_local_shape_and_global_offset(how.shape, how.mesh, how.placements)
    return how.shape, tuple(offsets)


def _tensor_parallel_copy(how: TensorParallel) -> int:
    copy = 0
    coordinate = how.mesh.get_coordinate()
    for place, size, placement in zip(coordinate, how.mesh.mesh.shape, how.placements, strict=True):
        if placement.is_replicate():
            copy = copy * size + place
    return copy


def copy_of_plain(first: int) -> int | None:
    """As `copies_of`, of what every rank has as a whole: the first rank's is saved."""
    return 0 if dist.get_rank() == first else None


def names_of(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[int, list[str]]:
    """All names of each tensor, by its id, in the order of the first ones."""
    names: dict[int, list[str]] = {}
    for name, tensor in tensors:
        names.setdefault(id(tensor), []).append(name)
    return names


def plain_tensor(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor outside of zerocore's care, which every rank has as a whole.

    Raises:
        NotImplementedError: for a DTensor, of which each rank has a part.
    """
    if isinstance(tensor, DTensor):
        if not all(placement.is_replicate() for placement in tensor.placements):
            raise NotImplementedError(
                f"{name}: expected a plain tensor, or a DTensor that zerocore.shard took over, "
                f"got a DTensor with {tensor.placements}; call zerocore.shard on its module"
            )
        tensor = tensor.to_local()
    return tensor.detach()
