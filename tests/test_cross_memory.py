"""Ranks of one machine read each other's memory; others, and short messages, use the socket."""

from __future__ import annotations

import ctypes
import multiprocessing
import multiprocessing.connection
import os
import pathlib
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import Pool
from torch import nn

import zerocore
from zerocore import _C, registry

WIDTH, LAYERS, STEPS = 512, 3, 3


def socket_bytes() -> int:
    """Bytes that this process has handed to write calls until now: gloo's to sockets, above all."""
    lines = pathlib.Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["wchar"])


def train(stage: int, replicas: int) -> tuple[dict[str, torch.Tensor], int, int]:
    """Full parameters after some steps, bytes of messages by the log, and bytes in sockets."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    shape = (replicas, dist.get_world_size() // replicas)
    mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    zerocore.shard(model, stage=stage, units=[nn.Linear], mesh=mesh)
    optimizer = zerocore.AdamW(model.parameters(), lr=1e-3)
    stats = zerocore.stats(model)
    stats.reset()
    before = socket_bytes()
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        model(torch.randn(4, WIDTH, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()
    through_sockets = socket_bytes() - before
    sent = sum(counts.bytes for counts in stats.collectives.values())
    return zerocore.full_state_dict(model), sent, through_sockets


def small(width: int) -> int:
    """Bytes in sockets of one step of a model whose messages are short."""
    model = nn.Linear(width, width, bias=False)
    zerocore.shard(model, stage=2)
    before = socket_bytes()
    model(torch.randn(4, width)).square().mean().backward()
    dist.barrier()
    return socket_bytes() - before


def _give_address(pipe: multiprocessing.connection.Connection) -> None:
    value = ctypes.c_int64(42)
    pipe.send(ctypes.addressof(value))
    pipe.recv()


@pytest.fixture(scope="module", autouse=True)
def _allowed() -> None:
    """Skips where a process may not even read what its own child has."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    child = context.Process(target=_give_address, args=(there,))
    child.start()
    found, size = ctypes.c_int64(), ctypes.sizeof(ctypes.c_int64)
    local = (ctypes.c_size_t * 2)(ctypes.addressof(found), size)  # an iovec
    remote = (ctypes.c_size_t * 2)(here.recv(), size)
    read = ctypes.CDLL(None, use_errno=True).process_vm_readv
    done = read(child.pid, local, 1, remote, 1, 0)
    here.send(None)
    child.join()
    if done != size:
        pytest.skip(f"this machine keeps processes apart: {os.strerror(ctypes.get_errno())}")
    assert found.value == 42


@pytest.fixture(scope="module")
def sockets() -> Iterator[dict[int, Pool]]:
    """Ranks that do not read each other's memory, by their number."""
    pools = {size: Pool(size, env={"ZEROCORE_CROSS_MEMORY": "0"}) for size in (2, 4)}
    yield pools
    for pool in pools.values():
        pool.close()


@pytest.mark.parametrize(
    ("size", "stage", "replicas"), [(2, 0, 2), (2, 2, 1), (2, 3, 1), (4, 3, 1), (4, 3, 2)]
)
def test_the_bits_do_not_depend_on_the_way(ranks, sockets, size, stage, replicas):
    read = ranks(size, train, stage, replicas)
    sent = sockets[size].run(train, stage, replicas)
    for (model, logged, written), (other, other_logged, other_written) in zip(
        read, sent, strict=True
    ):
        for name, values in model.items():
            assert torch.equal(values, other[name]), name
        assert logged == other_logged
        # Addresses, answers, agreements, and gloo's headers are left.
        assert written < 0.1 * logged
        assert other_written >= logged


def test_short_messages_use_the_socket(ranks):
    # Half of the gradient is sent: 8 KiB in one message.
    for written in ranks(2, small, 64):
        assert written > 64 * 64 * 4 / 2


def one_alone() -> int:
    """Bytes in sockets of a gather between a rank that can be read from and one that cannot."""
    off = {"ZEROCORE_CROSS_MEMORY": "0"} if dist.get_rank() == 0 else {}
    with mock.patch.dict(os.environ, off):  # the environment of the C library too
        transport = _C.PairwiseTransport(dist.group.WORLD.group_name)
    window = torch.full((2 * 10**6,), float(dist.get_rank()))
    before = socket_bytes()
    transport.all_gather(window)
    written = socket_bytes() - before
    assert torch.equal(window.view(2, -1), torch.tensor([[0.0], [1.0]]).expand(2, 10**6))
    return written


def test_both_ranks_of_a_pair_must_be_able_to(ranks):
    for written in ranks(2, one_alone):
        assert written >= 4 * 10**6


UNITS = 16


def messages_kept() -> tuple[int, int]:
    """Bytes of messages that the pool has after some steps, and those of a whole backward."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(UNITS)))
    zerocore.shard(model, stage=2, units=[nn.Linear], bucket_bytes=0)
    for _ in range(STEPS):
        model(torch.ones(4, WIDTH)).square().mean().backward()
    _, kept = registry.sharded_as(model).core.kept()
    return kept, UNITS * WIDTH * WIDTH * 4 * 3 // 2  # what is packed, and half of it that arrives


def test_messages_that_are_through_are_free(ranks):
    # A rank that is later than another for long has more of them: not every time.
    for _ in range(5):
        (kept, whole), *_ = ranks(2, messages_kept)
        if kept <= whole / 2:
            return
    raise AssertionError(f"expected few messages at a time, got {kept:,} of {whole:,} bytes")


def initial_values(stage: int, replicas: int) -> dict[str, torch.Tensor]:
    """Full parameters, of which each rank has made its own: more than is broadcast in one piece."""
    torch.manual_seed(dist.get_rank())
    model = nn.Linear(3 * WIDTH, 4 * WIDTH)
    shape = (replicas, dist.get_world_size() // replicas)
    mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    zerocore.shard(model, stage=stage, mesh=mesh)
    return zerocore.full_state_dict(model)


@pytest.mark.parametrize(
    ("size", "stage", "replicas"),
    [(2, 3, 1), (3, 3, 1), (4, 3, 2), (4, 3, 4), (2, 1, 1), (2, 0, 2)],
)
def test_values_are_the_first_ranks(ranks, sockets, size, stage, replicas):
    torch.manual_seed(0)
    expected = nn.Linear(3 * WIDTH, 4 * WIDTH).state_dict()
    found = ranks(size, initial_values, stage, replicas)
    if size in sockets:
        found += sockets[size].run(initial_values, stage, replicas)
    for model in found:
        for name, values in expected.items():
            assert torch.equal(model[name], values), name
