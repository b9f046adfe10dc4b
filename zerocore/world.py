"""The default process group: what there is, and what it was made with."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

# torch's backend for dry runs: any number of ranks in one process, whose collectives return at once
# without the values of others.
FAKE = "fake"
_fake_store = dist.HashStore() if dist.is_available() else None


def default_backends() -> dict[str, str] | None:
    """Backend of the default process group by type of device; None if there is no such group."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    pairs = dist.get_backend_config().split(",")  # "cpu:gloo,cuda:nccl"
    return dict(pair.split(":") for pair in pairs)


def is_fake() -> bool:
    """Whether this process is alone, as one of as many ranks as the default group pretends."""
    return FAKE in (default_backends() or {}).values()


def default_store() -> dist.Store:
    """The default group's; a store of this process's own if there are no others."""
    return _fake_store if is_fake() else c10d._get_default_store()


def default_place() -> tuple[int, int]:
    """(rank, number of ranks) in the default process group; (0, 1) without one."""
    if not dist.is_available() or not dist.is_initialized():
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def available_backends(names: Iterable[str]) -> list[str]:
    """Those communication backends that this build of torch has."""
    return [name for name in names if dist.is_available() and dist.is_backend_available(name)]


def this_rank() -> int:
    """The number of this process in the default group."""
    return dist.get_rank()


def default_timeout() -> timedelta:
    """The default group's timeout: new groups do not inherit it by themselves."""
    world = dist.group.WORLD
    devices = world._device_types  # none: a process group that is written in Python
    options = getattr(world._get_backend(devices[0]), "options", None) if devices else None
    return getattr(options, "_timeout", c10d.default_pg_timeout)


def run_name() -> str:
    """The same on all ranks, and another one in another run; "" without a default group.

    The first rank that asks makes it and leaves it in the group's store; none waits for another.
    """
    if not dist.is_available() or not dist.is_initialized():
        return ""
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun may keep the store
    store = default_store()
    return store.compare_set(f"zerocore/{start}/run", "", uuid.uuid4().hex).decode()


def store_host() -> str:
    """Who is gone when the store of the default group is."""
    store = default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):
        return f"the store of the process group ({type(store).__name__})"
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return f"the launcher at {store.host}:{store.port}, which hosts the process group's store,"
    return f"rank 0, which hosts the process group's store at {store.host}:{store.port},"
