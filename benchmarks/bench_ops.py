"""CPU speed of each kernel, against eager PyTorch and against what the machine can stream.

    python benchmarks/bench_ops.py [--quick] [--json PATH]

The measure is torch's own operation with the same mix of reads and writes on buffers of the same
sizes: a copy for pack_, an addition for sum_shards_, a dot product for sumsq; for fused_adamw_,
which reads four arrays and writes three, an addition in place and two multiplications in place.
Those only add and multiply: as long as all fits into a cache, AdamW's square root and division take
longer than its memory. The eager chain does what the kernel does. What a call from Python costs on
buffers of next to nothing is subtracted from all of them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import table
import torch
from table import Row
from torch import Tensor

from zerocore import ops

SIZES = (10**5, 10**6, 10**7, 10**8)  # elements
WANTED = 0.85
PARTS = 10  # tensors that pack_ collects
TINY, CALLS = 10 * PARTS, 50  # elements and calls of which a call's own time is taken
MOVED = 4 * 10**6  # elements of a sample, at least: short calls are repeated


@dataclass
class Case:
    """A kernel and its two measures; each takes the buffers that were made for it."""

    name: str
    bytes: int  # read and written for an element
    ours: Callable[[], object]
    stream: Callable[[], object]
    eager: Callable[[], object]
    results: Callable[[], tuple[Tensor, Tensor]]  # of `ours`, and what it has to be


def pack(numel: int) -> Case:
    source, out, other = torch.randn(numel), torch.zeros(numel), torch.zeros(numel)
    parts = list(source.split(numel // PARTS))
    offsets = [i * (numel // PARTS) for i in range(PARTS)]

    def eager() -> None:
        torch.cat(parts, out=other)
        other.mul_(0.5)

    return Case(
        f"pack_ ({PARTS} tensors)",
        8,
        lambda: ops.pack_(out, parts, offsets, 0.5),
        lambda: out.copy_(source),
        eager,
        lambda: (out, other),
    )


def sum_shards(numel: int) -> Case:
    a, b = torch.randn(numel), torch.randn(numel)
    out, other = torch.zeros(numel), torch.zeros(numel)

    def eager() -> None:
        other.copy_(a)
        other.add_(b)

    return Case(
        "sum_shards_ (2 shards)",
        12,
        lambda: ops.sum_shards_(out, [a, b]),
        lambda: torch.add(a, b, out=out),
        eager,
        lambda: (out, other),
    )


def sumsq(numel: int) -> Case:
    x = torch.randn(numel)

    def eager() -> Tensor:
        return torch.stack([torch.linalg.vector_norm(x).square(), (~x.isfinite()).any()])

    return Case(
        "sumsq",
        4,
        lambda: ops.sumsq(x),
        lambda: torch.dot(x, x),
        eager,
        # Eager PyTorch adds up in fp32, and is off by up to 1e-3 itself.
        lambda: (ops.sumsq(x), torch.stack([x.double().square().sum(), torch.zeros(()).double()])),
    )


def fused_adamw(numel: int) -> Case:
    start, grad = torch.randn(numel), torch.randn(numel)
    param, exp_avg, exp_avg_sq = start.clone(), torch.zeros(numel), torch.zeros(numel)
    ranges, steps = torch.tensor([[0, numel]]), [torch.tensor(0.0)]
    hyper = torch.tensor([[1e-3, 0.9, 0.95, 1e-8, 0.1, 1.0]], dtype=torch.float64)
    other = torch.nn.Parameter(start.clone())
    other.grad = grad
    options = dict(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    optimizer = torch.optim.AdamW([other], foreach=True, **options)

    def stream() -> None:
        param.add_(grad)
        exp_avg.mul_(0.999)
        exp_avg_sq.mul_(0.999)

    return Case(
        "fused_adamw_",
        28,
        lambda: ops.fused_adamw_(param, grad, exp_avg, exp_avg_sq, None, ranges, hyper, steps),
        stream,
        optimizer.step,
        lambda: (param, other.detach()),
    )


def check(case: Case) -> None:
    """One call of each side gives the same.

    Raises:
        SystemExit: if not.
    """
    case.ours()
    case.eager()
    ours, eager = case.results()
    if not torch.allclose(ours, eager, rtol=1e-4, atol=1e-6):
        worst = (ours - eager).abs().max()
        raise SystemExit(f"{case.name}: expected what eager PyTorch gives, got {worst:.1e} off")


def times(case: Case, tiny: Case, numel: int, repeats: int) -> dict[str, list[float]]:
    """Seconds of a call less those of one on next to nothing; one turn before is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in ("ours", "stream", "eager")}
    calls = max(1, MOVED // numel)
    for repeat in range(repeats + 1):
        for name, found in seconds.items():
            whole = seconds_of(getattr(case, name), calls)
            call = seconds_of(getattr(tiny, name), CALLS)
            if repeat > 0:
                found.append(whole - call)
    return seconds


def seconds_of(run: Callable[[], object], calls: int) -> float:
    if calls > 1:
        run()  # what was timed before has other buffers in the caches
    start = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - start) / calls


def row(case: Case, numel: int, threads: int, seconds: dict[str, list[float]]) -> Row:
    def ratio(name: str) -> float:
        pairs = zip(seconds[name], seconds["ours"], strict=True)
        return statistics.median(theirs / ours for theirs, ours in pairs)

    speed = case.bytes * numel / statistics.median(seconds["ours"]) / 1e9
    return Row(
        f"{case.name}, {numel:.0e} elements, {threads} thread{'s' * (threads > 1)}: of streaming",
        ratio("stream"),
        "x",
        WANTED,
        at_most=False,
        detail=f"{speed:.1f} GB/s, {ratio('eager'):.2f}x eager",
    )


def measure(options: argparse.Namespace) -> list[Row]:
    """All kernels, sizes and numbers of threads."""
    rows = []
    for make in (pack, sum_shards, sumsq, fused_adamw):
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for numel in SIZES[::2] if options.quick else SIZES:
                case = make(numel)
                check(case)
                seconds = times(case, make(TINY), numel, repeats=7 if options.quick else 21)
                rows.append(row(case, numel, threads, seconds))
    return rows


if __name__ == "__main__":
    table.main(__doc__, measure)
