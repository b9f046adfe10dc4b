"""Which ranks share what, and how they agree. The only file that calls torch.distributed."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Ranks:
    """The global ranks of a model's data parallelism, as this rank sees them.

    Attributes:
        all: every rank, in the order of the mesh.
        shard: the ranks that share one copy, this one among them.
        replicate: the ranks that hold the same shard, this one among them.
    """

    all: tuple[int, ...]
    shard: tuple[int, ...]
    replicate: tuple[int, ...]


@dataclass(frozen=True)
class Groups:
    """Process groups of a model; None stands for a group of one rank."""

    ranks: Ranks
    shard: dist.ProcessGroup | None
    replicate: dist.ProcessGroup | None
    control: dist.ProcessGroup | None

    @property
    def first(self) -> bool:
        """Whether this rank speaks for all, in warnings for example."""
        return dist.get_rank() == self.ranks.all[0]

    @property
    def shard_rank(self) -> int:
        """Which of the shards this rank has."""
        return sorted(self.ranks.shard).index(dist.get_rank())


def check_mesh(mesh: DeviceMesh | None) -> Exception | None:
    """What is wrong with `mesh` in itself, if anything.

    Raises:
        RuntimeError: if the default process group is not initialised.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "zerocore.shard: expected an initialised process group, got none; call "
            "torch.distributed.init_process_group('gloo') first (under torchrun)"
        )
    if mesh is None:
        return None
    if not isinstance(mesh, DeviceMesh):
        return ValueError(f"mesh: expected a DeviceMesh or None, got {type(mesh).__name__}")
    if mesh.ndim not in (1, 2):
        return ValueError(f"mesh: expected 1 dimension, or 2 (replicate, shard), got {mesh.ndim}")
    if mesh.ndim == 2 and tuple(mesh.mesh_dim_names or ()) == ("shard", "replicate"):
        return ValueError("mesh: expected the dimensions ('replicate', 'shard'), got them reversed")
    return None


def resolve_ranks(mesh: DeviceMesh | None, sharded: bool) -> Ranks:
    """The ranks of `mesh` (None: all ranks), which stage 0 (`sharded` False) only replicates.

    Raises:
        ValueError: if the mesh does not contain this rank.
    """
    rank = dist.get_rank()
    if mesh is None:
        grid = torch.arange(dist.get_world_size()).unsqueeze(0)
    else:
        grid = mesh.mesh.reshape(-1, mesh.mesh.shape[-1])
    place = (grid == rank).nonzero()
    if len(place) != 1:
        raise ValueError(
            f"mesh: expected rank {rank}, which calls zerocore.shard, to be in it once, got the "
            f"ranks {grid.flatten().tolist()}"
        )
    row, column = place[0].tolist()
    everyone = tuple(grid.flatten().tolist())
    if not sharded:
        return Ranks(everyone, (rank,), everyone)
    return Ranks(everyone, tuple(grid[row].tolist()), tuple(grid[:, column].tolist()))


def _timeout() -> timedelta:
    """The default group's timeout: new groups do not inherit it by themselves."""
    options = getattr(dist.group.WORLD._get_backend(torch.device("cpu")), "options", None)
    return getattr(options, "_timeout", c10d.default_pg_timeout)


class _Made:
    """The groups made in this process, for as long as its default group lives.

    A gloo group has threads and sockets of its own, so models share them: each gets numbers for its
    messages that no other model in the group has. Counts are the same on all members of a group,
    since all of them take part whenever it is used.
    """

    def __init__(self) -> None:
        self.world: object = None
        self.groups: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup] = {}
        self.counts: Counter[tuple[str, tuple[int, ...]]] = Counter()
        self.channels: Counter[tuple[int, ...]] = Counter()

    def group(self, purpose: str, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """The group of these ranks; None stands for a group of one."""
        if len(ranks) == 1:
            return None
        if self.world is not dist.group.WORLD:
            self.__init__()
            self.world = dist.group.WORLD
        ranks = tuple(sorted(ranks))
        group = self.groups.get((purpose, ranks))
        if group is None or group not in c10d._world.pg_map:  # perhaps destroyed by the user
            self.counts[purpose, ranks] += 1
            group = _new_group(purpose, ranks, self.counts[purpose, ranks])
            self.groups[purpose, ranks] = group
        return group

    def reserve(self, ranks: tuple[int, ...], count: int) -> int:
        """The first of `count` consecutive numbers for messages in the group of these ranks."""
        ranks = tuple(sorted(ranks))
        first = self.channels[ranks]
        self.channels[ranks] += count
        return first


_made = _Made()


def _new_group(purpose: str, ranks: tuple[int, ...], count: int) -> dist.ProcessGroup:
    """A gloo group that only its members make: a model may live on some of the ranks.

    Not by dist.new_group(use_local_synchronization=True): the name that it gives the group depends
    on how many groups this process is a member of, and ranks that differ in that wait for each
    other for ever.
    """
    digest = hashlib.sha256(repr(ranks).encode()).hexdigest()
    group, _ = c10d._new_process_group_helper(
        len(ranks),
        ranks.index(dist.get_rank()),
        list(ranks),
        c10d.Backend.GLOO,
        c10d._get_default_store(),
        group_name=f"zerocore {purpose} {digest} {count}",
        timeout=_timeout(),
        group_desc=f"zerocore {purpose}",
    )
    c10d._world.pg_group_ranks[group] = {rank: i for i, rank in enumerate(ranks)}
    return group


def make_control(ranks: Ranks) -> dist.ProcessGroup | None:
    """The group for agreements on the host. A collective over `ranks.all`."""
    return _made.group("control", ranks.all)


def make_groups(ranks: Ranks, control: dist.ProcessGroup | None) -> Groups:
    """The groups that carry parameters and gradients. A collective over `ranks.all`."""
    shard = _made.group("data", ranks.shard)
    replicate = _made.group("data", ranks.replicate)
    return Groups(ranks, shard, replicate, control)


def reserve_channels(ranks: Ranks, count: int) -> tuple[int, int]:
    """First numbers for `count` kinds of messages, in the shard and in the replicate group."""
    return _made.reserve(ranks.shard, count), _made.reserve(ranks.replicate, count)


def agree(
    control: dist.ProcessGroup | None,
    ranks: Ranks,
    error: Exception | None,
    facts: list[tuple[str, Any]],
) -> None:
    """Raises on every rank if one has an error, or if the facts of two ranks differ.

    Args:
        error: what is wrong on this rank, if anything.
        facts: (what, value) pairs that have to be equal everywhere; values are compared by `repr`.

    Raises:
        Exception: this rank's `error`.
        ValueError: for another rank's error, and for facts that differ: it names the first one.
    """
    if control is None:
        if error is not None:
            raise error
        return
    mine = (repr(error) if error is not None else None, [(k, repr(v)) for k, v in facts])
    everyone: list[Any] = [None] * len(ranks.all)
    dist.all_gather_object(everyone, mine, group=control)
    if error is not None:
        raise error
    order = sorted(ranks.all)  # a group's, whatever the mesh's
    for rank, (theirs, _) in zip(order, everyone, strict=True):
        if theirs is not None:
            raise ValueError(f"zerocore.shard failed on rank {rank}: {theirs}")
    reference = everyone[0][1]
    for rank, (_, values) in zip(order, everyone, strict=True):
        for i in range(max(len(reference), len(values))):
            expected = reference[i] if i < len(reference) else ("nothing", "")
            got = values[i] if i < len(values) else ("nothing", "")
            if expected != got:
                raise ValueError(
                    "zerocore.shard: expected the same call on every rank, got a difference: "
                    f"rank {order[0]} has {expected[0]} {expected[1]}, rank {rank} has "
                    f"{got[0]} {got[1]}"
                )


def exchange(
    caller: str, groups: list[Groups], error: Exception | None, values: list[Any]
) -> list[list[tuple[int, Any]]]:
    """(rank, value) of every rank of each of several models. A collective over all of them.

    Args:
        caller: what the user called, for the error.
        groups: the models', one for each of `values`.
        error: what is wrong on this rank, if anything.

    Raises:
        Exception: this rank's `error`.
        ValueError: for another rank's.
    """
    mine = repr(error) if error is not None else None
    answers = []
    for some, value in zip(groups, values, strict=True):
        everyone: list[Any] = [(mine, value)] * len(some.ranks.all)
        if some.control is not None:
            dist.all_gather_object(everyone, (mine, value), group=some.control)
        answers.append(list(zip(sorted(some.ranks.all), everyone, strict=True)))
    if error is not None:
        raise error
    for everyone in answers:
        for rank, (theirs, _) in everyone:
            if theirs is not None:
                raise ValueError(f"{caller} failed on rank {rank}: {theirs}")
    return [[(rank, value) for rank, (_, value) in everyone] for everyone in answers]


def broadcast_from_first(tensors: list[torch.Tensor], groups: Groups) -> None:
    """Rank 0's values, in place and byte for byte."""
    if groups.control is None:
        return
    for tensor in tensors:
        if tensor.numel() == 0:
            continue
        buffer = tensor.detach().contiguous()
        flat = buffer.reshape(-1).view(torch.uint8)
        dist.broadcast(flat, src=groups.ranks.all[0], group=groups.control)
        if buffer.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(buffer)


def reduce_over_all(value: torch.Tensor, groups: Groups, maximum: bool = False) -> torch.Tensor:
    """As `reduce_over` all ranks of the model."""
    return reduce_over(value, (groups.control,), maximum)


def reduce_over(
    value: torch.Tensor, groups: Iterable[dist.ProcessGroup | None], maximum: bool = False
) -> torch.Tensor:
    """The sum (or maximum) over process groups, one after the other; None is a group of one.

    Args:
        value: a floating tensor of any shape. NaN and inf of any rank reach all.
    """
    for group in groups:
        if group is None:
            continue
        if not maximum:
            value = value.clone()
            dist.all_reduce(value, group=group)
            continue
        # gloo's maximum forgets the NaN of any rank but the first: it travels as a flag.
        pair = torch.stack([value.nan_to_num(0.0, math.inf, -math.inf), value.isnan().to(value)])
        dist.all_reduce(pair, op=dist.ReduceOp.MAX, group=group)
        value = torch.where(pair[1] > 0, math.nan, pair[0])
    return value


def widest(models: Iterable[Groups]) -> Groups:
    """The groups of the model whose ranks contain those of all the others.

    Raises:
        ValueError: if there is none.
    """
    models = list(models)
    result = max(models, key=lambda groups: len(groups.ranks.all))
    for groups in models:
        if not set(groups.ranks.all) <= set(result.ranks.all):
            raise ValueError(
                "zerocore: expected parameters of models over the same ranks, or of a model on "
                f"some of another's, got one on ranks {groups.ranks.all} and one on ranks "
                f"{result.ranks.all}; use an optimizer for each"
            )
    return result
