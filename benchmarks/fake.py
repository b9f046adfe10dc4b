"""One process as rank 0 of any number of ranks, with no others: for host time and memory.

Its collectives return at once. torch's own fake process group copies this rank's part into the
place of each other rank's, one by one: its time grows with their number. `Silent` does nothing.
"""

from __future__ import annotations

import importlib
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork


class Silent(dist.ProcessGroup):
    """A fake process group whose time does not depend on its size."""

    def getGroupName(self) -> str:  # noqa: N802
        """Its name, which torch gives and asks for under these names."""
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802, D102
        self._name = name

    def _nothing(self, *args: Any) -> dist.Work:
        return FakeWork()

    # What zerocore and FSDP2 call, and the names that torch gives it in between.
    broadcast = allreduce = allgather = _nothing
    allreduce_coalesced = all_gather_single_coalesced = reduce_scatter_single_coalesced = _nothing
    all_gather_single = reduce_scatter_single = _nothing
    _allgather_base = _reduce_scatter_base = _nothing


def _silent(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Silent:
    return Silent(rank, size)


def start(size: int, silent: bool = False) -> None:
    """Makes this process rank 0 of `size` ranks. Subnormal numbers in garbage would cost time."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    if silent:
        dist.Backend.register_backend("fake", _silent, devices=["cpu"])
    else:
        importlib.import_module("torch.testing._internal.distributed.fake_pg")  # registers it
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=size)
