"""Measures what a simulation of CPU ranks needs to know of this machine, in some seconds."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from zerocore import _C
from zerocore.planner.activity import trace_step
from zerocore.planner.machine import Machine
from zerocore.units import plan_units

REPEATS, MESSAGES = 15, 101
OPERATIONS = 200
SMALL, LARGE = 2**10, 2**20  # elements of a message
# The layers whose operations are timed: batch, tokens, width.
SHAPE = (8, 96, 192)


class Rates(NamedTuple):
    """What was measured.

    Attributes:
        machine: the rates.
        spread: of the middle half of the times of a product, longest over shortest: more than 1.2
            says that the machine did something else meanwhile.
    """

    machine: Machine
    spread: float


def seconds_of(works: Sequence[Callable[[], object]], repeats: int = REPEATS) -> list[list[float]]:
    """Seconds of each, sorted, taken in turns: machines are slower at times than at others."""
    times: list[list[float]] = [[] for _ in works]
    for turn in range(repeats + 2):
        for work, taken in zip(works, times, strict=True):
            start = time.perf_counter()
            work()
            if turn >= 2:
                taken.append(time.perf_counter() - start)
    return [sorted(taken) for taken in times]


def measure_machine(dtype: torch.dtype = torch.float32) -> Rates:
    """Rates of one thread of this machine, and of messages between two of its ranks.

    Takes some seconds; run it while nothing else does. `ranks_per_node` of the result is 2.

    Args:
        dtype: that models compute in.

    Raises:
        RuntimeError: if one of the two ranks that measure fails.
    """
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
        machine, spread = results.get()
        return Rates(replace(machine, cores=len(os.sched_getaffinity(0))), spread)


def _rank(rank: int, store: str, dtype: torch.dtype, results: object) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{store}", timedelta(60), 2, rank)
    # Both compute at the same time, as ranks do.
    flops, others, memory, operation, spread = _compute_rates(dtype)
    latency, rate = _message_rates()
    if rank == 0:
        machine = Machine(
            flops=flops,
            others=others,
            memory=memory,
            operation=operation,
            network=rate,
            intra=rate,
            latency=latency,
            intra_latency=latency,
            ranks_per_node=2,
        )
        results.put((machine, spread))
    dist.destroy_process_group()


def _compute_rates(dtype: torch.dtype) -> tuple[float, float, float, float, float]:
    """Flop/s of products; bytes/s of other operations, and of a copy; seconds of an operation; and
    the spread of the times of products.

    Other operations: what two layers of a transformer take besides products, over the bytes that
    their norms, gelu and additions read and write; with the memory that they allocate.
    """
    a, b = torch.randn(1024, 256, dtype=dtype), torch.randn(256, 1024, dtype=dtype)
    large, copy = torch.randn(2**24, dtype=dtype), torch.zeros(2**24, dtype=dtype)
    one = torch.ones(1, requires_grad=True)
    layers = _layers(dtype)
    x = torch.randn(SHAPE, dtype=dtype)

    def step() -> None:
        layers(x).float().mean().backward()
        layers.zero_grad()

    def operations() -> None:
        value = one
        for _ in range(OPERATIONS // 2):
            value = value * 1.5
        value.backward()

    works = (lambda: [a @ b for _ in range(5)], lambda: copy.copy_(large), operations, step)
    dist.barrier()
    times = seconds_of(works)
    products, copying, small, whole = map(statistics.median, times)
    spread = times[0][3 * REPEATS // 4] / times[0][REPEATS // 4]
    flops = 5 * 2 * a.numel() * b.shape[1] / products
    operation = small / OPERATIONS
    activity = trace_step(
        layers, plan_units(layers), lambda: ((torch.empty(SHAPE, dtype=dtype),), {})
    )
    cost = sum(activity.costs[1:], activity.costs[0])
    rest = whole - cost.flops / flops - cost.operations * operation
    # Products that were slower by themselves would leave nothing.
    others = cost.traffic / max(rest, 0.1 * whole)
    return flops, others, 2 * large.nbytes / copying, operation, spread


def _layers(dtype: torch.dtype) -> nn.Module:
    width = SHAPE[-1]
    options = {"activation": "gelu", "batch_first": True, "norm_first": True, "dtype": dtype}
    layers = (nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, **options) for _ in range(2))
    return nn.Sequential(*layers)


def _message_rates() -> tuple[float, float]:
    """Seconds of a small message, and bytes/s of large ones, both ranks sending at once."""
    group = dist.group.WORLD
    assert group is not None
    transport = _C.PairwiseTransport(group.group_name)

    def exchange(size: int) -> Callable[[], None]:
        window = torch.ones(2 * size)
        return lambda: transport.all_gather(window)

    dist.barrier()
    times = seconds_of([exchange(SMALL), exchange(LARGE)], MESSAGES)
    small, large = map(statistics.median, times)
    return small, 4 * (LARGE - SMALL) / max(large - small, 1e-9)
