"""Predicted against measured time of a training step, of the example's model on CPU ranks.

    python benchmarks/bench_plan.py                  # stages 0 to 3 on 2 and on 4 ranks
    python benchmarks/bench_plan.py --ranks 2 --stages 3 --steps 40

The machine is measured once (matrix products, two layers of another shape, memory, messages over
gloo), and the model is run once on tensors without memory: from both, the step of each run is
simulated. Then each run is made, all in turns, `--rounds` times, and its median step compared.
Every rank is a process of one thread on this machine.
"""

from __future__ import annotations

import argparse
import datetime
import pathlib
import platform
import statistics
import sys
import tempfile
import time

import torch
import torch.distributed as dist
from torch.nn import functional as F

import zerocore
from zerocore.planner.activity import trace_step
from zerocore.planner.calibration import measure_machine
from zerocore.planner.schedule import rehearse
from zerocore.planner.setting import Setting
from zerocore.planner.simulate import simulate
from zerocore.planner.sizes import ModelSizes
from zerocore.units import plan_units

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "examples"))
from gpt import GPT, VOCABULARY, Block  # noqa: E402

LAYERS, DIM, HEADS, SEQ, BATCH = 4, 128, 4, 128, 16  # the example's own


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def run_rank(rank: int, ranks: int, stage: int, steps: int, store: str, results: object) -> None:
    """Trains, and gives rank 0's median seconds of a step."""
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=120)
    dist.init_process_group("gloo", f"file://{store}", timeout, ranks, rank)
    torch.manual_seed(0)
    model = GPT(LAYERS, DIM, HEADS, SEQ)
    zerocore.shard(model, stage, units=[Block])
    optimizer = zerocore.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0)
    tokens = torch.randint(VOCABULARY, (BATCH, SEQ + 1))
    times = []
    for _ in range(steps + 3):
        start = time.perf_counter()
        loss = loss_of(model(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        times.append(time.perf_counter() - start)
    if rank == 0:
        results.put(statistics.median(times[3:]))
    dist.destroy_process_group()


def measure(ranks: int, stage: int, steps: int) -> float:
    context = torch.multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (ranks, stage, steps, f"{folder}/store", results)
        processes = [
            context.Process(target=run_rank, args=(rank, *arguments)) for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    if any(process.exitcode for process in processes):
        raise SystemExit(f"expected {ranks} ranks to train at stage {stage}, got one that failed")
    return results.get()


def predictions(runs: list[tuple[int, int]]) -> dict[tuple[int, int], float]:
    machine, spread = measure_machine()
    print(machine)
    print(f"times of one product differ by {spread - 1:.0%} (middle half)")
    with torch.device("meta"):
        model = GPT(LAYERS, DIM, HEADS, SEQ)
    sizes = ModelSizes.of(model, [Block], 0)

    def inputs() -> tuple[tuple, dict]:
        return (torch.randint(VOCABULARY, (BATCH, SEQ)),), {}

    def loss(logits: torch.Tensor) -> torch.Tensor:
        return loss_of(logits, torch.randint(VOCABULARY, (BATCH, SEQ)))

    activity = trace_step(model, plan_units(model, [Block], 0), inputs, loss=loss)
    result = {}
    for ranks, stage in runs:
        setting = Setting.of(stage, ranks)
        schedule = rehearse(sizes, setting, activity.calls)
        local = machine.with_ranks(ranks)
        timeline = simulate(sizes, setting, schedule, local, activity.costs)
        result[ranks, stage] = timeline.seconds
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print(f"{datetime.date.today()}  torch {torch.__version__}  {platform.machine()}")
    print(f"python {' '.join(sys.argv)}")
    runs = [(ranks, stage) for ranks in options.ranks for stage in options.stages]
    predicted = predictions(runs)
    measured: dict[tuple[int, int], list[float]] = {run: [] for run in runs}
    for _ in range(options.rounds):
        for run in runs:
            measured[run].append(measure(*run, options.steps))
    print(f"{'ranks':>5} {'stage':>5} {'predicted ms':>13} {'measured ms':>12} {'error':>7}")
    errors = []
    for run, times in measured.items():
        median = statistics.median(times)
        errors.append(predicted[run] / median - 1)
        print(
            f"{run[0]:>5} {run[1]:>5} {1e3 * predicted[run]:>13.1f} {1e3 * median:>12.1f} "
            f"{errors[-1]:>+7.1%}   rounds {', '.join(f'{1e3 * t:.1f}' for t in times)}"
        )
    print(f"largest error {max(map(abs, errors)):.1%}")


if __name__ == "__main__":
    main()
