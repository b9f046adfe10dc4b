"""Which ranks share what: the process groups of models, and the watch over them."""

from __future__ import annotations

import hashlib
import os
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

from zerocore import _C
from zerocore.agreement import gather_objects
from zerocore.journal import Journal, grace_of
from zerocore.logfile import LogFile
from zerocore.watch import Watch
from zerocore.world import FAKE, default_store, default_timeout, is_fake, store_host


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
        control: gloo (or fake), for agreements on the host.
        host: the agreements.
        journal: what this rank did with the model.
        backend: the communication backend of all but `control`.
        claim: on the two groups for gradients.
    """

    ranks: Ranks
    shard: dist.ProcessGroup | None
    replicate: dist.ProcessGroup | None
    reduce_shard: dist.ProcessGroup | None
    reduce_replicate: dist.ProcessGroup | None
    control: dist.ProcessGroup | None
    host: _C.Control
    journal: Journal
    backend: str
    claim: Claim | None

    @property
    def first(self) -> bool:
        """Whether this rank speaks for all, in warnings for example."""
        return dist.get_rank() == min(self.ranks.all)

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
        ValueError: if the mesh does not contain this rank, or its replicas differ in the order of
            their ranks: a process group numbers its members in ascending order, and the numbers in
            the rows say which shard a rank has.
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
    if not (order := grid.argsort(dim=1)).eq(order[0]).all():
        raise ValueError(
            "mesh: expected the ranks of all replicas in the same order, such as ascending, got "
            f"{grid.tolist()}"
        )
    return Ranks(everyone, tuple(grid[row].tolist()), tuple(grid[:, column].tolist()))


class _Made:
    """The groups made in this process, for as long as its default group lives.

    A gloo group has threads and sockets of its own, so models share them: each gets numbers for its
    messages that no other model in the group has. Counts are the same on all members of a group,
    since all of them take part whenever it is used.
    """

    def __init__(self) -> None:
        self.world: object = None
        self.watch: Watch | None = None
        self.groups: dict[tuple[Any, ...], dist.ProcessGroup] = {}
        self.counts: Counter[tuple[str, str, tuple[int, ...]]] = Counter()
        self.channels: Counter[tuple[int, ...]] = Counter()
        self.claims: dict[tuple[int, ...], weakref.WeakValueDictionary[int, Claim]] = {}

    def renew(self) -> None:
        """Forgets what belongs to a default group that is gone."""
        if self.world is dist.group.WORLD:
            return
        if self.watch is not None:
            self.watch.stop("left")
        self.__init__()
        self.world = dist.group.WORLD

    def open_journal(self, ranks: tuple[int, ...], timeout: float) -> Journal:
        """That of the next model over these ranks."""
        self.renew()
        if self.watch is None:
            self.watch = _new_watch(self.world)
        return self.watch.circle(tuple(sorted(ranks)), timeout).open_journal()

    def group(
        self, purpose: str, ranks: tuple[int, ...], timeout: timedelta, backend: str | None = None
    ) -> dist.ProcessGroup | None:
        """The group of these ranks; None stands for a group of one.

        Args:
            backend: None: that of agreements on the host.
        """
        backend = backend or (FAKE if is_fake() else "gloo")
        if len(ranks) == 1:
            return None
        key = (purpose, backend, tuple(sorted(ranks)))
        group = self.groups.get((*key, timeout))
        if group is None or group not in c10d._world.pg_map:  # perhaps destroyed by the user
            self.counts[key] += 1
            group = _new_group(*key, self.counts[key], timeout)
            self.groups[(*key, timeout)] = group
        return group

    def discard(self, group: dist.ProcessGroup | None) -> None:
        """Ends a group, which is not given out again."""
        for key, made in list(self.groups.items()):
            if made is group:
                del self.groups[key]
        if group is not None and group in c10d._world.pg_map:
            dist.destroy_process_group(group)

    def claim(
        self, ranks: tuple[int, ...], host: _C.Control, journal: Journal
    ) -> tuple[int, Claim]:
        """The lowest number that no model over these ranks has, on none of them; a collective."""
        claims = self.claims.setdefault(tuple(sorted(ranks)), weakref.WeakValueDictionary())
        taken = gather_objects("zerocore.shard", host, journal, sorted(claims))
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


def _new_watch(world: object) -> Watch:
    """The watch over the default group."""
    store, rank = default_store(), dist.get_rank()
    # Worlds may follow each other on one store; torchrun may keep one over restarts, whatever
    # state the ranks were in.
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    number = store.add(f"zerocore/{start}/worlds/{rank}", 1)
    prefix = f"zerocore/{start}/{number}"
    connections = [dist.PrefixStore(prefix, store.clone()) for _ in range(2)]
    folder = os.environ.get("ZEROCORE_LOG_DIR")
    log_file = LogFile(folder, rank, dist.get_world_size()) if folder else None
    return Watch(*connections, rank, lambda: dist.group.WORLD is world, store_host(), log_file)


def _new_group(
    purpose: str, backend: str, ranks: tuple[int, ...], count: int, timeout: timedelta
) -> dist.ProcessGroup:
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
        timeout=timeout,
        group_desc=f"zerocore {purpose}",
    )
    c10d._world.pg_group_ranks[group] = {rank: i for i, rank in enumerate(ranks)}
    return group


def open_journal(ranks: Ranks, timeout: float) -> Journal:
    """The journal of a model over these ranks. Not a collective.

    Args:
        timeout: seconds; the default group's counts if that is shorter.
    """
    return _made.open_journal(ranks.all, min(timeout, default_timeout().total_seconds()))


def _wait_timeout(journal: Journal) -> timedelta:
    """Of waits on the host: the rest of the model's is for finding out why they failed."""
    timeout = journal.circle.timeout
    return timedelta(seconds=timeout - grace_of(timeout))


def make_control(ranks: Ranks, journal: Journal) -> tuple[dist.ProcessGroup | None, _C.Control]:
    """The group for agreements on the host, and the agreements. A collective over `ranks.all`."""
    with journal.collective("zerocore.shard"):
        control = _made.group("control", ranks.all, _wait_timeout(journal))
    return control, _control(control, journal)


def _control(group: dist.ProcessGroup | None, journal: Journal) -> _C.Control:
    return _C.Control(group.group_name if group else "", journal.number, is_fake())


def make_groups(
    ranks: Ranks,
    control: dist.ProcessGroup | None,
    host: _C.Control,
    journal: Journal,
    backend: str,
) -> Groups:
    """The groups that carry parameters and gradients. A collective over `ranks.all`."""
    native = backend != "gloo"
    # A native backend's timeout counts from the call, when the device may be far behind: the watch
    # looks at the device itself.
    timeout = default_timeout() if native else _wait_timeout(journal)
    number, claim = 0, None
    if native and control is not None:
        number, claim = _made.claim(ranks.all, host, journal)
    with journal.collective("zerocore.shard"):
        shard = _made.group("data", ranks.shard, timeout, backend)
        replicate = _made.group("data", ranks.replicate, timeout, backend)
        reduce_shard, reduce_replicate = shard, replicate
        if claim is not None:
            reduce_shard = _made.group(f"gradients {number}", ranks.shard, timeout, backend)
            reduce_replicate = _made.group(f"gradients {number}", ranks.replicate, timeout, backend)
    data = (shard, replicate, reduce_shard, reduce_replicate)
    if native:
        journal.native_groups = [group for group in dict.fromkeys(data) if group is not None]
    return Groups(ranks, *data, control, host, journal, backend, claim)


def reserve_channels(ranks: Ranks, count: int) -> tuple[int, int]:
    """First numbers for `count` kinds of messages, in the shard and in the replicate group."""
    return _made.reserve(ranks.shard, count), _made.reserve(ranks.replicate, count)


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


def checkpoint_groups(caller: str, models: list[Groups], others: list[int]) -> Groups:
    """A control group of its own for all ranks that have a part of some models; a collective.

    Args:
        caller: what the user called, for errors.
        models: a model and those in it.
        others: ranks that this one shares parameters with by tensor parallelism.

    Raises:
        RuntimeError: in a dry run.
        ValueError: if a model is on some of the ranks only: each may have another copy of it.
    """
    if is_fake():
        raise RuntimeError(
            f"{caller}: expected ranks that are there, got a fake process group, whose other ranks "
            "have no part to save or load"
        )
    outer = widest(models)
    for groups in models:
        if sorted(groups.ranks.all) != sorted(outer.ranks.all):
            raise ValueError(
                "zerocore: expected a model that is on the same ranks as a whole, for its "
                f"checkpoints, got a submodule on the ranks {groups.ranks.all} of "
                f"{outer.ranks.all}; shard it over all of them, or save it by itself"
            )
    everyone = gather_objects(caller, outer.host, outer.journal, others)
    every = tuple(sorted(set(outer.ranks.all).union(*everyone)))
    ranks = Ranks(every, every, ())
    # A journal of its own: what is saved in the background has no place in the model's order.
    journal = open_journal(ranks, outer.journal.circle.timeout)
    with journal.collective(caller):
        control = _made.group("checkpoint", every, _wait_timeout(journal))
    host = _control(control, journal)
    return Groups(ranks, None, None, None, None, control, host, journal, "gloo", None)


def discard(groups: Groups) -> None:
    """Ends a control group in which a collective failed: peers that wait in it get an error.

    The next one over its ranks is another group, on all of them.
    """
    _made.discard(groups.control)
