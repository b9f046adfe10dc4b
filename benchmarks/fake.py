"""One process that is rank 0 of any number of ranks, with no others: for host time and memory.

Collectives and messages of parameters and gradients go to torch's fake process group, which returns
at once and moves nothing: what would come from other ranks is whatever is in memory. What ranks
tell each other while they shard is answered as if all of them had said the same, so that the work
and the memory of comparing it are there. The agreement at the end of each backward, log2(N) small
messages, is left out: neither would a fake group answer it, nor is it a matter of units.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # noqa: F401  registers the backend
from torch._C._distributed_c10d import FakeWork, _register_process_group
from torch.distributed import distributed_c10d as c10d

import zerocore
from zerocore import _C, groups


class Echo(dist.ProcessGroup):
    """Ranks of which each sends what this one does."""

    def __init__(self, size: int, name: str) -> None:
        super().__init__(0, size)
        self._name = name
        self._places: list[torch.Tensor] = []

    def getGroupName(self) -> str:  # noqa: N802
        """Its name, which torch asks for under this one."""
        return self._name

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> dist.Work:
        """Filled by the next message: each rank sends and receives in turn."""
        self._places += tensors
        return FakeWork()

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> dist.Work:
        """What is sent is what arrives."""
        for tensor in tensors:
            self._places.pop(0).copy_(tensor)
        return FakeWork()

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> dist.Work:
        """Nothing arrives: the values are those of this rank, the first."""
        return FakeWork()


def start(size: int) -> None:
    """Makes this process rank 0 of `size` ranks. Subnormal numbers in garbage would cost time."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=size)


def shard(model: torch.nn.Module, stage: int, **options: Any) -> torch.nn.Module:
    """zerocore.shard over the fake ranks."""
    with _fake_groups():
        return zerocore.shard(model, stage, **options)


@contextmanager
def _fake_groups() -> Iterator[None]:
    real = _C.Runtime

    def runtime(control: _C.Control, **options: Any) -> _C.Runtime:
        return real(control=_C.Control("", 0), **options)  # of one rank: it agrees with itself

    with (
        mock.patch.object(groups, "_new_group", _new_group),
        mock.patch.object(_C, "Runtime", runtime),
    ):
        yield


def _new_group(
    purpose: str, backend: str, ranks: tuple[int, ...], count: int, timeout: timedelta
) -> dist.ProcessGroup:
    name = f"fake {purpose} {len(ranks)} {count}"
    if purpose == "control":
        group = Echo(len(ranks), name)
        _register_process_group(name, group)
        c10d._world.pg_map[group] = ("echo", c10d._get_default_store())
    else:
        group, _ = c10d._new_process_group_helper(
            len(ranks),
            0,
            list(ranks),
            c10d.Backend("fake"),
            c10d._get_default_store(),
            group_name=name,
            timeout=timeout,
        )
    c10d._world.pg_group_ranks[group] = {rank: i for i, rank in enumerate(ranks)}
    return group
