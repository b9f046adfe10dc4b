"""Which ranks share what, and how they agree. The only file that calls torch.distributed."""

from __future__ import annotations

import hashlib
import math
import weakref
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


class Claim:
    """Makes the groups of one number a model's own, for as long as it lives."""


@dataclass(frozen=True)
class Groups:
    """Process groups of a model; None stands for a group of one rank.

    Attributes:
        shard, replicate: carry parameters, and numbers about gradients.
        reduce_shard, reduce_replicate: the same ranks; carry gradients. NCCL and HCCL match
            collectives by their order in a group, and that of reductions among gathers, and among
            the reductions of other models, is not the same on all ranks. (gloo matches them by
            numbers: there the groups are the same.)
        control: gloo, for agreements on the host.
        backend: the communication backend of all but `control`.
        claim: on the two groups for gradients.
    """

    ranks: Ranks
    shard: dist.ProcessGroup | None
    replicate: dist.ProcessGroup | None
    reduce_shard: dist.ProcessGroup | None
    reduce_replicate: dist.ProcessGroup | None
    control: dist.ProcessGroup | None
    backend: str
    claim: Claim | None

    @property
    def first(self) -> bool:
        """Whether this rank speaks for all, in warnings for example."""
        return dist.get_rank() == self.ranks.all[0]

    @property
    def shard_rank(self) -> int:
        """Which of the shards this rank has."""
        return sorted(self.ranks.shard).index(dist.get_rank())


def default_backends() -> dict[str, str] | None:
    """Backend of the default process group by type of device; None if there is no such group."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    pairs = dist.get_backend_config().split(",")  # "cpu:gloo,cuda:nccl"
    return dict(pair.split(":") for pair in pairs)


def default_place() -> tuple[int, int]:
    """(rank, number of ranks) in the default process group; (0, 1) without one."""
    if not dist.is_available() or not dist.is_initialized():
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def available_backends(names: Iterable[str]) -> list[str]:
    """Those communication backends that this build of torch has."""
    return [name for name in names if dist.is_available() and dist.is_backend_available(name)]


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
    world = dist.group.WORLD
    options = getattr(world._get_backend(world._device_types[0]), "options", None)
    return getattr(options, "_timeout", c10d.default_pg_timeout)


class _Made:
    """The groups made in this process, for as long as its default group lives.

    A gloo group has threads and sockets of its own, so models share them: each gets numbers for its
    messages that no other model in the group has. Counts are the same on all members of a group,
    since all of them take part whenever it is used.
    """

    def __init__(self) -> None:
        self.world: object = None
        self.groups: dict[tuple[str, str, tuple[int, ...]], dist.ProcessGroup] = {}
        self.counts: Counter[tuple[str, str, tuple[int, ...]]] = Counter()
        self.channels: Counter[tuple[int, ...]] = Counter()
        self.claims: dict[tuple[int, ...], weakref.WeakValueDictionary[int, Claim]] = {}

    def group(
        self, purpose: str, ranks: tuple[int, ...], backend: str = "gloo"
    ) -> dist.ProcessGroup | None:
        """The group of these ranks; None stands for a group of one."""
        if len(ranks) == 1:
            return None
        if self.world is not dist.group.WORLD:
            self.__init__()
            self.world = dist.group.WORLD
        key = (purpose, backend, tuple(sorted(ranks)))
        group = self.groups.get(key)
        if group is None or group not in c10d._world.pg_map:  # perhaps destroyed by the user
            self.counts[key] += 1
            group = self.groups[key] = _new_group(*key, self.counts[key])
        return group

    def discard(self, group: dist.ProcessGroup | None) -> None:
        """Ends a group, which is not given out again."""
        for key, made in list(self.groups.items()):
            if made is group:
                del self.groups[key]
        if group is not None and group in c10d._world.pg_map:
            dist.destroy_process_group(group)

    def claim(self, ranks: tuple[int, ...], control: dist.ProcessGroup) -> tuple[int, Claim]:
        """The lowest number that no model over these ranks has, on none of them; a collective."""
        claims = self.claims.setdefault(tuple(sorted(ranks)), weakref.WeakValueDictionary())
        taken: list[Any] = [None] * len(ranks)
        dist.all_gather_object(taken, sorted(claims), group=control)
        number = min(set(range(sum(map(len, taken)) + 1)).difference(*taken))
        claim = claims[number] = Claim()
        return number, claim

    def reserve(self, ranks: tuple[int, ...], count: int) -> int:
        """The first of `count` consecutive numbers for messages in the group of these ranks."""
        ranks = tuple(sorted(ranks))
        first = self.channels[ranks]
        self.channels[ranks] += count
        return first


_made = _Made()


def _new_group(purpose: str, backend: str, ranks: tuple[int, ...], count: int) -> dist.ProcessGroup:
    """A group that only its members make: a model may live on some of the ranks.

    Not by dist.new_group(use_local_synchronization=True): the name that it gives the group depends
    on how many groups this process is a member of, and ranks that differ in that wait for each
    other for ever.
    """
    digest = hashlib.sha256(repr(ranks).encode()).hexdigest()
    group, _ = c10d._new_process_group_helper(
        len(ranks),
        ranks.index(dist.get_rank()),
        list(ranks),
        c10d.Backend(backend),
        c10d._get_default_store(),
        group_name=f"zerocore {backend} {purpose} {digest} {count}",
        timeout=_timeout(),
        group_desc=f"zerocore {purpose}",
    )
    c10d._world.pg_group_ranks[group] = {rank: i for i, rank in enumerate(ranks)}
    return group


def make_control(ranks: Ranks) -> dist.ProcessGroup | None:
    """The group for agreements on the host. A collective over `ranks.all`."""
    return _made.group("control", ranks.all)


def make_groups(ranks: Ranks, control: dist.ProcessGroup | None, backend: str) -> Groups:
    """The groups that carry parameters and gradients. A collective over `ranks.all`."""
    shard = _made.group("data", ranks.shard, backend)
    replicate = _made.group("data", ranks.replicate, backend)
    if backend == "gloo" or control is None:
        return Groups(ranks, shard, replicate, shard, replicate, control, backend, None)
    number, claim = _made.claim(ranks.all, control)
    reduce_shard = _made.group(f"gradients {number}", ranks.shard, backend)
    reduce_replicate = _made.group(f"gradients {number}", ranks.replicate, backend)
    return Groups(ranks, shard, replicate, reduce_shard, reduce_replicate, control, backend, claim)


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
        buffer = tensor.detach().cpu().contiguous()
        flat = buffer.reshape(-1).view(torch.uint8)
        dist.broadcast(flat, src=groups.ranks.all[0], group=groups.control)
        if buffer.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(buffer)


def reduce_over_all(value: torch.Tensor, groups: Groups, maximum: bool = False) -> torch.Tensor:
    """As `reduce_over` all ranks of the model."""
    if groups.backend == "gloo":
        return reduce_over(value, (groups.control,), maximum)
    return reduce_over(value, (groups.shard, groups.replicate), maximum)


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
        if maximum:
            # gloo's maximum forgets the NaN of any rank but the first: it travels as a flag.
            finite = value.nan_to_num(0.0, math.inf, -math.inf)
            pair = torch.stack([finite, value.isnan().to(value)])
            pair = _all_reduce(pair, dist.ReduceOp.MAX, group)
            value = torch.where(pair[1] > 0, math.nan, pair[0])
        else:
            value = _all_reduce(value, dist.ReduceOp.SUM, group)
    return value


def _all_reduce(value: torch.Tensor, op: dist.ReduceOp, group: dist.ProcessGroup) -> torch.Tensor:
    """HCCL reduces no fp64: there it travels in fp32, as what fp32 holds and what it leaves."""
    if value.dtype != torch.float64 or value.device.type != "npu":
        value = value.clone()
        dist.all_reduce(value, op=op, group=group)
        return value
    high = value.float()
    rest = (value - high).nan_to_num(0.0, 0.0, 0.0).float()
    parts = torch.stack([high, rest]) if op == dist.ReduceOp.SUM else high.clone()
    dist.all_reduce(parts, op=op, group=group)
    return parts.double().sum(0) if op == dist.ReduceOp.SUM else parts.double()


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


def this_rank() -> int:
    """The number of this process in the default group."""
    return dist.get_rank()


def checkpoint_groups(models: list[Groups], others: list[int]) -> Groups:
    """A control group of its own for all ranks that have a part of some models; a collective.

    Args:
        models: a model and those in it.
        others: ranks that this one shares parameters with by tensor parallelism.

    Raises:
        ValueError: if a model is on some of the ranks only: each may have another copy of it.
    """
    outer = widest(models)
    for groups in models:
        if sorted(groups.ranks.all) != sorted(outer.ranks.all):
            raise ValueError(
                "zerocore: expected a model that is on the same ranks as a whole, for its "
                f"checkpoints, got a submodule on the ranks {groups.ranks.all} of "
                f"{outer.ranks.all}; shard it over all of them, or save it by itself"
            )
    everyone: list[Any] = [others]
    if outer.control is not None:
        everyone = [None] * len(outer.ranks.all)
        dist.all_gather_object(everyone, others, group=outer.control)
    ranks = tuple(sorted(set(outer.ranks.all).union(*everyone)))
    group = _made.group("checkpoint", ranks)
    return Groups(Ranks(ranks, ranks, ()), None, None, None, None, group, "gloo", None)


def gather_to_first(value: Any, groups: Groups) -> list[Any]:
    """The values of all ranks, in their order, on the first one; nothing on others. A collective.

    Over the control group.
    """
    if groups.control is None:
        return [value]
    first = min(groups.ranks.all)
    found = [None] * len(groups.ranks.all) if dist.get_rank() == first else None
    dist.gather_object(value, found, dst=first, group=groups.control)
    return found or []


def discard(groups: Groups) -> None:
    """Ends a control group in which a collective failed: peers that wait in it get an error.

    The next one over its ranks is another group, on all of them.
    """
    _made.discard(groups.control)
