"""Host time of zerocore and of FSDP2 for each unit, on ranks that are not there.

    OMP_NUM_THREADS=1 python benchmarks/bench_host.py [--quick] [--json PATH]

Units of a few Linear(8, 8), so that nearly all time is the host's, in one process that is rank 0
of a fake process group (see fake.py): collectives return at once. What a system adds is the time of
its forward and backward less that of the same modules as they are, all in turns. For the growth
with the number of ranks, the units are such that no padding grows with it.
"""

from __future__ import annotations

import argparse
import copy
import gc
import statistics
import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection

import fake
import table
import torch
from host_case import (
    PARAMS,
    UNITS,
    WIDTH,
    Model,
    added,
    check,
    in_turns,
    ms,
    of_fsdp2,
    of_zerocore,
    pairs,
    quiet,
    step_of,
)
from table import Row
from torch.distributed.device_mesh import DeviceMesh

import zerocore

RANKS = 8
SIZES = (2, 8, 64, 1024)  # of process groups


def systems(repeats: int) -> list[Row]:
    """What each system adds to the plain model."""
    plain = Model()
    alone = DeviceMesh("cpu", [0])
    timed = {"plain": step_of(plain)}
    for stage in (3, 2, 1, 0):
        timed[f"stage {stage}"] = step_of(of_zerocore(copy.deepcopy(plain), stage))
    timed["stage 3, alone"] = step_of(of_zerocore(copy.deepcopy(plain), 3, alone))
    timed["FSDP2"] = step_of(of_fsdp2(copy.deepcopy(plain)))
    seconds = in_turns(timed, repeats)
    extra = {name: added(seconds, name, "plain", UNITS) for name in timed}
    what = f"forward + backward, {UNITS} units x {PARAMS} parameters"
    rows = []
    for name in timed:
        if name == "plain":
            continue
        label = f"{what}, {name}" + (
            ": FSDP2 over the plain model, per unit"
            if name == "FSDP2"
            else f"{'' if 'alone' in name else f', group of {RANKS}'}: zerocore over the plain "
            "model, per unit"
        )
        detail = f"{ms(seconds[name])} whole, plain {ms(seconds['plain'])}"
        wanted = 100 if name == "stage 3" else None
        rows.append(Row(label, statistics.median(extra[name]), "us", wanted, detail=detail))
    ratio = pairs(extra["stage 3"], extra["FSDP2"], lambda a, b: a / b)
    rows.append(Row(f"{what}, stage 3, group of {RANKS}: zerocore / FSDP2", ratio, "x", 0.2))
    return rows


def growth_with_units(counts: list[int], repeats: int) -> list[Row]:
    """Twice the units take twice the time."""
    timed = {}
    for units in counts:
        plain = Model(units)
        timed[f"{units} plain"] = step_of(plain)
        timed[f"{units}"] = step_of(of_zerocore(copy.deepcopy(plain)))
    seconds = in_turns(timed, repeats)
    extra = {n: added(seconds, f"{n}", f"{n} plain", n) for n in counts}
    rows = [
        Row(
            f"stage 3, {n} units x {PARAMS} parameters: zerocore over the plain model, per unit",
            statistics.median(extra[n]),
            "us",
            detail=f"{ms(seconds[f'{n}'])} whole, plain {ms(seconds[f'{n} plain'])}",
        )
        for n in counts
    ]
    for few, many in zip(counts, counts[1:], strict=False):
        # 48 and 96 are those with a limit.
        wanted = 1.1 if few == UNITS else None
        each = pairs(extra[many], extra[few], lambda a, b: a / b)
        whole = pairs(seconds[f"{many}"], seconds[f"{few}"], lambda a, b: a / b) * few / many
        rows.append(Row(f"stage 3, added per unit: {many} units / {few} units", each, "x", wanted))
        text = f"stage 3, forward + backward: {many} units / {many // few} times {few} units"
        rows.append(Row(text, whole, "x", wanted))
    return rows


def growth_with_parameters(counts: list[int], repeats: int) -> list[Row]:
    """What a parameter costs, and what a unit costs without."""
    timed = {}
    for params in counts:
        plain = Model(params=params)
        timed[f"{params} plain"] = step_of(plain)
        timed[f"{params}"] = step_of(of_zerocore(copy.deepcopy(plain)))
    seconds = in_turns(timed, repeats)
    extra = {n: added(seconds, f"{n}", f"{n} plain", UNITS) for n in counts}
    rows = []
    for n in counts:
        each = statistics.median(extra[n])
        text = f"stage 3, {UNITS} units x {n} parameters: zerocore over the plain model, per unit"
        rows.append(Row(text, each, "us", detail=f"{each / n:.1f} us for each parameter"))
    few, many = counts[0], counts[-1]
    slope = pairs(extra[many], extra[few], lambda a, b: (a - b) / (many - few))
    text = f"stage 3, for each further parameter of a unit, {few} to {many}"
    rows.append(Row(text, slope, "us"))
    return rows


def serve(size: int, pipe: Connection) -> None:
    """A process in a group of `size`: gives the seconds of what it is asked for, until "end"."""
    fake.start(size, silent=True)
    gc.freeze()
    runs = {
        "zerocore": step_of(of_zerocore(Model(even=True))),
        "FSDP2": step_of(of_fsdp2(Model(even=True))),
    }
    pipe.send("ready")
    while (name := pipe.recv()) != "end":
        with quiet():
            pipe.send(runs[name]())


def asked(pipe: Connection, name: str) -> Callable[[], float]:
    def run() -> float:
        pipe.send(name)
        return pipe.recv()

    return run


def growth_with_ranks(sizes: tuple[int, ...], repeats: int) -> list[Row]:
    """The host's time is not to depend on the number of ranks: a process for each number."""
    context = torch.multiprocessing.get_context("spawn")
    processes, pipes = [], []
    for size in sizes:
        here, there = context.Pipe()
        processes.append(context.Process(target=serve, args=(size, there)))
        processes[-1].start()
        pipes.append(here)
        here.recv()
    timed = {}
    for name in ("zerocore", "FSDP2"):
        for size, pipe in zip(sizes, pipes, strict=True):
            timed[f"{name} {size}"] = asked(pipe, name)
    seconds = in_turns(timed, repeats)
    for process, pipe in zip(processes, pipes, strict=True):
        pipe.send("end")
        process.join()
    rows, first = [], sizes[0]
    for name in ("zerocore", "FSDP2"):
        for size in sizes[1:]:
            ratio = pairs(seconds[f"{name} {size}"], seconds[f"{name} {first}"], lambda a, b: a / b)
            detail = f"{ms(seconds[f'{name} {size}'])}, {ms(seconds[f'{name} {first}'])}"
            wanted = 1.05 if (name, size) == ("zerocore", 1024) else None
            text = f"{name}, forward + backward, {UNITS} even units x {PARAMS} parameters: "
            text += f"group of {size} / of {first}"
            rows.append(Row(text, ratio, "x", wanted, detail=detail))
    return rows


def optimizer_of(model: Model, optimizer: torch.optim.Optimizer) -> tuple[Callable, Callable]:
    """Gives the seconds of a step, and of the zero_grad after it."""
    x = torch.ones(1, WIDTH)

    def step() -> float:
        model(x).backward()
        start = time.perf_counter()
        optimizer.step()
        return time.perf_counter() - start

    def zero_grad() -> float:
        start = time.perf_counter()
        optimizer.zero_grad()
        return time.perf_counter() - start

    return step, zero_grad


def optimizers(shapes: list[tuple[int, int]], repeats: int) -> list[Row]:
    """Steps of zerocore.AdamW by (units, parameters of each), and of torch's on FSDP2's."""
    timed = {}

    def add(name: str, model: Model, optimizer: torch.optim.Optimizer) -> None:
        timed[name], timed[f"{name}, zero_grad"] = optimizer_of(model, optimizer)

    for units, params in shapes:
        model = of_zerocore(Model(units, params))
        add(f"zerocore.AdamW, {units} units x {params}", model, zerocore.AdamW(model.parameters()))
    for how in ("foreach", "fused"):
        model = of_fsdp2(Model())
        optimizer = torch.optim.AdamW(model.parameters(), **{how: True})
        add(f"FSDP2, torch.optim.AdamW({how}), {UNITS} units x {PARAMS}", model, optimizer)
    seconds = in_turns(timed, repeats)
    rows = []
    for name, found in seconds.items():
        what = name if name.endswith("zero_grad") else f"{name}, step"
        rows.append(Row(what, 1e6 * statistics.median(found), "us"))

    def ratio(a: tuple[int, int], b: tuple[int, int]) -> float:
        many, few = (seconds[f"zerocore.AdamW, {u} units x {p}"] for u, p in (a, b))
        return pairs(many, few, lambda a, b: a / b)

    wide, narrow = (UNITS, 40), (UNITS, 5)
    text = f"zerocore.AdamW, step, {UNITS} units: 40 parameters a unit / 5"
    rows.append(Row(text, ratio(wide, narrow), "x", 1.2))
    text = f"zerocore.AdamW, step, {PARAMS} parameters a unit: 96 units / 2 times 48"
    rows.append(Row(text, ratio((96, PARAMS), (UNITS, PARAMS)) / 2, "x"))
    return rows


def measure(options: argparse.Namespace) -> list[Row]:
    quick = options.quick
    repeats = 6 if quick else 40
    fake.start(RANKS)
    warnings.filterwarnings("ignore", "Full backward hook is firing")  # FSDP2's own hooks
    check()
    gc.freeze()
    rows = systems(repeats)
    rows += growth_with_units([48, 96] if quick else [24, 48, 96, 192], repeats)
    rows += growth_with_parameters([5, 40] if quick else [5, 10, 20, 40], repeats)
    rows += growth_with_ranks((2, 1024) if quick else SIZES, 3 if quick else 15)
    shapes = [(48, 5), (48, 40), (48, 10), (96, 10)] + [(24, 10)] * (not quick)
    return rows + optimizers(shapes, repeats)


if __name__ == "__main__":
    table.main(__doc__, measure)
