"""Measures what a simulation of CPU ranks needs to know of this machine, in some seconds."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn import functional as F

from zerocore.planner.machine import Machine

REPEATS = 7
SMALL, LARGE = 2**10, 2**21  # elements of a message


def seconds_of(work: Callable[[], object], repeats: int = REPEATS, inner: int = 1) -> float:
    """Median seconds of a call, after one that does not count."""
    work()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(inner):
            work()
        times.append((time.perf_counter() - start) / inner)
    return statistics.median(times)


def measure_machine(dtype: torch.dtype = torch.float32) -> Machine:
    """Rates of one thread of this machine, and of messages between two ranks over gloo.

    Takes some seconds; run it while nothing else does. `ranks_per_node` of the result is 2.

    Args:
        dtype: that models compute in.
    """
    # Ranks that share one core would be measured as if each had one.
    cores = len(os.sched_getaffinity(0))
    context = torch.multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        results = context.SimpleQueue()
        arguments = (f"{folder}/store", dtype, results)
        ranks = [context.Process(target=_rank, args=(rank, *arguments)) for rank in range(2)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        if any(rank.exitcode for rank in ranks):
            raise RuntimeError("calibration: expected two ranks to measure, got one that failed")
        machine = results.get()
    return replace(machine, cores=cores)


def _rank(rank: int, store: str, dtype: torch.dtype, results: object) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{store}", timedelta(60), 2, rank)
    # Both compute at the same time, as ranks do.
    rates = _compute_rates(dtype)
    latency, rate = _message_rates(1 - rank)
    if rank == 0:
        flops, memory, special, operation = rates
        results.put(
            Machine(
                flops=flops,
                memory=memory,
                special=special,
                operation=operation,
                network=rate,
                intra=rate,
                latency=latency,
                intra_latency=latency,
                ranks_per_node=2,
                cores=2,
            )
        )
    dist.destroy_process_group()


def _compute_rates(dtype: torch.dtype) -> tuple[float, float, float, float]:
    """Flop/s; bytes/s of plain and of special operations; seconds of an operation by itself."""
    a, b = torch.randn(1024, 256, dtype=dtype), torch.randn(256, 1024, dtype=dtype)
    dist.barrier()
    flops = 2 * a.numel() * b.shape[1] / seconds_of(lambda: a @ b, inner=5)
    # Activations are not in the caches any more when the next operation reads them.
    many = torch.randn(24, 2**20, dtype=dtype)
    seconds = seconds_of(lambda: [many[i] + many[i + 12] for i in range(12)])
    memory = 12 * 3 * many[0].nbytes / seconds
    rows = torch.randn(2048, 512, dtype=dtype)
    works = (
        lambda: F.gelu(rows, approximate="tanh"),
        lambda: F.layer_norm(rows, (512,)),
        lambda: rows.softmax(-1),
    )
    special = 2 * rows.nbytes / statistics.fmean(seconds_of(work, inner=3) for work in works)
    return flops, memory, special, _operation_seconds()


def _operation_seconds() -> float:
    """Of Python, the dispatcher and autograd, for each operation forward and backward."""
    one, count = torch.ones(1, requires_grad=True), 100

    def work() -> None:
        value = one
        for _ in range(count):
            value = value * 1.5
        value.backward()

    return seconds_of(work, inner=3) / (2 * count)


def _message_rates(peer: int) -> tuple[float, float]:
    """Seconds of a small message, and bytes/s of large ones, both ranks sending at once."""

    def exchange(size: int) -> float:
        sent, received = torch.ones(size), torch.ones(size)

        def work() -> None:
            works = [dist.irecv(received, peer), dist.isend(sent, peer)]
            for each in works:
                each.wait()

        dist.barrier()
        return seconds_of(work)

    small, large = exchange(SMALL), exchange(LARGE)
    return small, 4 * (LARGE - SMALL) / max(large - small, 1e-9)
