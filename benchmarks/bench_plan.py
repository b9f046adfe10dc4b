"""Predicted against measured time of a training step, of the example's model on CPU ranks.

    python benchmarks/bench_plan.py                  # stages 0 to 3 on 2 and on 4 ranks
    python benchmarks/bench_plan.py --ranks 2 --stages 3 --steps 40

The model is run once on tensors without memory. Then, `--rounds` times and all in turns, the
machine is measured (matrix products, two layers of another shape, memory, messages between ranks),
each run's step is simulated from both, and the run is made at once: a shared machine is another one
some minutes later. What is reported is the median of the rounds' errors, and each of them. Every
rank is a process of one thread on this machine.
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
from zerocore.planner.machine import Machine
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


class Model:
    """What is known of the example's model, without a machine."""

    def __init__(self) -> None:
        with torch.device("meta"):
            model = GPT(LAYERS, DIM, HEADS, SEQ)
        self._sizes = ModelSizes.of(model, [Block], 0)
        batch = torch.randint(VOCABULARY, (BATCH, SEQ))
        self._activity = trace_step(
            model,
            plan_units(model, [Block], 0),
            lambda: ((batch,), {}),
            loss=lambda logits: loss_of(logits, batch),
        )

    def predict(self, ranks: int, stage: int, machine: Machine) -> float:
        """Seconds of a step."""
        setting = Setting.of(stage, ranks)
        schedule = rehearse(self._sizes, setting, self._activity.calls)
        local = machine.with_ranks(ranks)
        return simulate(self._sizes, setting, schedule, local, self._activity.costs).seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    print(f"{datetime.date.today()}  torch {torch.__version__}  {platform.machine()}")
    print(f"python {' '.join(sys.argv)}")
    runs = [(ranks, stage) for ranks in options.ranks for stage in options.stages]
    model = Model()
    times: dict[tuple[int, int], list[tuple[float, float]]] = {run: [] for run in runs}
    for _ in range(options.rounds):
        for run in runs:
            predicted = model.predict(*run, measure_machine().machine)
            times[run].append((predicted, measure(*run, options.steps)))
    print(f"{'ranks':>5} {'stage':>5} {'predicted ms':>13} {'measured ms':>12} {'error':>7}")
    medians = []
    for run, pairs in times.items():
        predicted, measured = (
            1e3 * statistics.median(column) for column in zip(*pairs, strict=True)
        )
        errors = [a / b - 1 for a, b in pairs]
        medians.append(statistics.median(errors))
        print(
            f"{run[0]:>5} {run[1]:>5} {predicted:>13.1f} {measured:>12.1f} {medians[-1]:>+7.1%}   "
            f"rounds {', '.join(f'{error:+.0%}' for error in errors)}"
        )
    print(f"largest median error {max(map(abs, medians)):.1%}")


if __name__ == "__main__":
    main()
