"""Time and memory of sharding a model: zerocore.shard beside FSDP2's fully_shard.

    OMP_NUM_THREADS=1 python benchmarks/bench_shard.py [--quick] [--json PATH]

Models of GPT's proportions. Those on the meta device are sharded by one process that is rank 0 of a
fake group (fake.py); those in memory by two ranks over gloo too. Every case has processes of its
own. Memory is that of the process (VmHWM less VmRSS before), with all pages of the model touched.
One pass over a model is the copy of each parameter into fresh memory, by all ranks at once.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import gc
import math
import pathlib
import statistics
import tempfile
import time
from dataclasses import dataclass, replace

import fake
import table
import torch
import torch.distributed as dist
from table import Row
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import zerocore

VOCABULARY = 256


Block = nn.TransformerEncoderLayer  # 12 width^2 parameters, as GPT's


class Model(nn.Module):
    """About `numel` parameters in blocks and around them; it is sharded, not run."""

    def __init__(self, numel: int, layers: int) -> None:
        super().__init__()
        dim = 16 * round(math.sqrt(numel / layers / 12) / 16)
        self.embedding = nn.Embedding(VOCABULARY, dim)
        self.blocks = nn.ModuleList(Block(dim, 16, 4 * dim) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, VOCABULARY, bias=False)


@dataclass(frozen=True)
class Case:
    """One call that is measured.

    Attributes:
        ranks: of gloo, each a process; else of a fake group, of which this is rank 0.
        meta: the model is on the meta device, and sharded with `init`.
        system: "zerocore" or "FSDP2".
    """

    numel: int
    layers: int
    ranks: int
    meta: bool = False
    gloo: bool = False
    stage: int = 3
    system: str = "zerocore"
    init: str | None = None

    def __str__(self) -> str:
        place = f"meta, init={self.init!r}" if self.meta else "in memory"
        system = f"zerocore stage {self.stage}" if self.system == "zerocore" else self.system
        group = "gloo" if self.gloo else "fake"
        return f"{system}, {self.numel:.0e} parameters {place}, {group} group of {self.ranks}"


@dataclass(frozen=True)
class Result:
    """Of one rank.

    Attributes:
        grown: bytes of the peak of shard() over what the process held before.
        unit: bytes of the largest unit.
        one_pass: seconds of one pass over the model; 0 for a model without memory.
        before, after: sums of the parameters that this rank had and has.
    """

    seconds: float
    grown: int
    unit: int
    one_pass: float
    before: float
    after: float


def memory(key: str) -> int:
    """Bytes of this process by /proc: VmRSS is now, VmHWM the peak."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(key))


def start(case: Case, rank: int, store: str) -> None:
    if not case.gloo:
        fake.start(case.ranks)
        return
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=120)
    dist.init_process_group("gloo", f"file://{store}", timeout, case.ranks, rank)


def meet(case: Case) -> None:
    """All ranks go on at once."""
    if case.gloo:
        dist.barrier()


def shard(case: Case, model: Model) -> None:
    if case.system == "FSDP2":
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        return
    zerocore.shard(model, case.stage, units=[Block], init=case.init)


def seconds_of_a_pass(case: Case, model: Model) -> float:
    """Copies each parameter into memory that the process did not have."""
    meet(case)
    start = time.perf_counter()
    copies = [param.detach().clone() for param in model.parameters()]
    seconds = time.perf_counter() - start
    del copies
    ctypes.CDLL(None).malloc_trim(0)  # what stays with the process would hide what shard() takes
    return seconds


def total(model: Model) -> float:
    """The sum of what this rank holds of the parameters; it copies none."""
    tensors = (p.detach() for p in model.parameters())
    tensors = (t.to_local() if isinstance(t, DTensor) else t for t in tensors)
    return sum(t.sum(dtype=torch.float64).item() for t in tensors)


def run_rank(case: Case, rank: int, store: str, results: object) -> None:
    """Shards one model, in a process of its own, and sends (rank, Result)."""
    start(case, rank, store)
    # zerocore takes rank 0's values everywhere; FSDP2 sends none, and needs the same on all ranks.
    torch.manual_seed(rank if case.system == "zerocore" else 0)
    with torch.device("meta" if case.meta else "cpu"):
        model = Model(case.numel, case.layers)
    unit = max(sum(p.nbytes for p in block.parameters()) for block in model.blocks)
    one_pass = 0.0 if case.meta else seconds_of_a_pass(case, model)
    sum_before = 0.0 if case.meta else total(model)
    gc.collect()
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # VmHWM is VmRSS from here
    before = memory("VmRSS")
    meet(case)
    began = time.perf_counter()
    shard(case, model)
    seconds = time.perf_counter() - began
    grown = memory("VmHWM") - before
    results.put((rank, Result(seconds, grown, unit, one_pass, sum_before, total(model))))
    meet(case)
    model = None
    gc.collect()
    dist.destroy_process_group()


def run(case: Case) -> list[Result]:
    """What each of its processes measured.

    Raises:
        SystemExit: if one fails, or if the shards are not rank 0's values.
    """
    context = torch.multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=run_rank, args=(case, rank, f"{folder}/store", results))
            for rank in range(case.ranks if case.gloo else 1)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    if any(process.exitcode for process in processes):
        raise SystemExit(f"{case}: expected all ranks to end well, got one that failed")
    found = [result for _, result in sorted(results.get() for _ in processes)]
    if case.gloo:
        after = sum(result.after for result in found) / (case.ranks if case.stage == 0 else 1)
        if not math.isclose(after, found[0].before, rel_tol=1e-6):
            raise SystemExit(f"{case}: expected shards of a sum {found[0].before}, got {after}")
    return found


def in_turns(cases: list[Case], repeats: int) -> dict[Case, list[list[Result]]]:
    found: dict[Case, list[list[Result]]] = {case: [] for case in cases}
    for _ in range(repeats):
        for case in cases:
            found[case].append(run(case))
    return found


def rows_of_meta(case: Case, runs: list[list[Result]], limits: bool) -> list[Row]:
    """Time and memory of a model without memory."""
    seconds = statistics.median(result.seconds for (result,) in runs)
    grown = statistics.median(result.grown for (result,) in runs) / 1e6
    detail = f"a unit has {runs[0][0].unit / 1e6:.0f} MB"
    return [
        Row(f"{case}: time", seconds, "s", 2 if limits else None),
        Row(f"{case}: growth of memory", grown, "MB", 200 if limits else None, detail=detail),
    ]


def rows_of_memory(case: Case, runs: list[list[Result]], limits: bool) -> list[Row]:
    """The same of a model in memory, over one pass and over a unit; the slowest rank counts."""
    slowest = [max(result.seconds for result in run) for run in runs]
    passes = [max(result.one_pass for result in run) for run in runs]
    ratio = statistics.median(a / b for a, b in zip(slowest, passes, strict=True))
    grown = statistics.median(max(result.grown for result in run) for run in runs)
    unit = runs[0][0].unit
    times = f"{statistics.median(slowest):.2f} s, {statistics.median(passes):.2f} s"
    sizes = f"{grown / 1e6:.1f} MB, {unit / 1e6:.1f} MB"
    return [
        Row(f"{case}: time / one pass", ratio, "x", 2 if limits else None, detail=times),
        Row(f"{case}: growth / a unit", grown / unit, "x", 1 if limits else None, detail=sizes),
    ]


def measure(options: argparse.Namespace) -> list[Row]:
    quick = options.quick
    large = Case(10**9, 48, 1024, meta=True, init="empty")
    without = [large]
    if not quick:
        small = replace(large, numel=10**8, layers=12)
        without += [replace(small, ranks=ranks) for ranks in (2, 64, 1024)]
        without += [replace(large, ranks=64), replace(large, init=None)]
        without += [replace(large, numel=10**10, ranks=ranks) for ranks in (64, 1024)]
    rows = []
    for case, runs in in_turns(without, 1).items():
        rows += rows_of_meta(case, runs, limits=case == large)
    real = Case(10**8 if quick else 2 * 10**8, 16, 2, gloo=True)
    within = [real, replace(real, ranks=8, gloo=False)]
    if not quick:
        within += [replace(real, stage=stage) for stage in (2, 1, 0)]
        within.append(replace(real, system="FSDP2"))
    for case, runs in in_turns(within, 1 if quick else 3).items():
        rows += rows_of_memory(case, runs, limits=case.system == "zerocore" and case.stage == 3)
    return rows


if __name__ == "__main__":
    table.main(__doc__, measure)
