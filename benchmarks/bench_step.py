"""The whole training step of zerocore's stages beside DDP, FSDP2 and DeepSpeed, on 2 CPU ranks.

    python benchmarks/bench_step.py --quick
    python benchmarks/bench_step.py --stages 3 --dtypes bf16 --dims 768 --batches 16

A small GPT over gloo, one thread a rank, 64 tokens a sequence. The limits are for one sequence a
rank, where communication and the optimizer weigh most. The systems of a stage are alive together
and step in turns; a ratio is formed in each round, from medians of a few steps, and its median is
reported (the milliseconds beside it are medians of their own: their quotient is another number).
Before that their first losses are compared. Memory is what the peak of training steps adds to a
process that has imported everything, by the system's count (resident) and by the C library's
(allocated). Exposed communication is what a step at stage 3 takes longer than its computation
alone, in the time that bare collectives of gloo take for the same messages; zerocore's own ranks
read each other's memory, which is faster.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable

import table
from peer_model import HEADS
from systems import DTYPES, HAS_DEEPSPEED, TITLES, System
from table import Row
from team import Team

# Of the time of a peer's step, how much ours may take, with one sequence a rank.
LIMITS = {
    0: {"ddp": 0.95},
    1: {"ddp+zero": 0.85, "deepspeed1": 0.45},
    2: {"fsdp2-keep": 0.65, "deepspeed2": 0.45, "ddp": 1.0},
    3: {"fsdp2": 0.5, "deepspeed3": 0.4, "ddp": 1.1},
}
# Beside them in a full run, without a limit.
MORE = {stage: [f"deepspeed{stage}-buckets"] if stage else [] for stage in LIMITS}
EXPOSED = 1.1
COMPARED = 3  # steps whose losses must agree
COUNTED = 3  # steps whose allocations are counted
MANY = 16  # sequences a rank that a full run also has, at the smaller width in fp32
WITHIN = {"fp32": 1e-4, "bf16": 2e-2}  # how far, relative
DEEPSPEED_WITHIN = {"fp32": 5e-4, "bf16": 2e-2}  # it parts by about 1e-4 after two steps

Rounds = dict[str, list[float]]  # seconds by what was timed, one figure a round


class Group:
    """The teams of one stage, dtype, width and number of sequences."""

    def __init__(self, stage: int, dtype: str, dim: int, batch: int, more: bool) -> None:
        self.stage, self.ours = stage, f"zerocore{stage}"
        self.case = f"stage {stage}, {dtype}, dim {dim}" + f", batch {batch}" * (batch > 1)
        self._dtype = dtype
        names = [*LIMITS[stage], *(MORE[stage] if more else [])]
        names = [name for name in names if HAS_DEEPSPEED or "deepspeed" not in name]
        self.limited = batch == 1
        self.limits = {name: LIMITS[stage].get(name) if self.limited else None for name in names}
        alone = ["alone"] if stage == 3 else []
        self.teams: dict[str, Team] = {}
        try:
            for name in [self.ours, *names, *alone]:
                self.teams[name] = Team(System(name, dim, dtype, batch))
            for team in self.teams.values():
                team.wait_built()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends all processes."""
        for team in self.teams.values():
            team.close()

    def compare_losses(self) -> None:
        """Trains a few steps.

        Raises:
            SystemExit: if the systems do not compute the same.
        """
        losses = {}
        for name, team in self.teams.items():
            of_ranks = team.ask("losses", COMPARED)
            losses[name] = [statistics.mean(pair) for pair in zip(*of_ranks, strict=True)]
        if "alone" in losses:  # its parameters stay as they are
            losses["alone"][1:] = losses[self.ours][1:]
        expected = losses[self.ours]
        for name, found in losses.items():
            limits = DEEPSPEED_WITHIN if name.startswith("deepspeed") else WITHIN
            for a, b in zip(expected, found, strict=True):
                if not abs(a - b) <= limits[self._dtype] * abs(a):
                    raise SystemExit(
                        f"{self.case}: expected losses of {name} near {self.ours}'s {expected}, "
                        f"got {found}"
                    )

    def time(self, rounds: int, steps: int) -> Rounds:
        """Median seconds of a step in each round; at stage 3 also those of its parts."""
        seconds: Rounds = {}
        messages = self.teams[self.ours].ask("messages")[0] if self.stage == 3 else []
        for team in self.teams.values():
            team.ask("forget_peak")
        for turn in range(rounds):
            names = list(self.teams)
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                team = self.teams[name]
                took = team.ask("seconds", steps + 1)[0][1:]  # the first one only warms up
                seconds.setdefault(name, []).append(statistics.median(took))
                if name == "alone":
                    took = team.ask("seconds_of_one", steps + 1, ranks=range(1))[0][1:]
                    seconds.setdefault("one", []).append(statistics.median(took))
                    took = [team.ask("seconds_of", messages)[0] for _ in range(steps + 1)][1:]
                    seconds.setdefault("collectives", []).append(statistics.median(took))
        return seconds

    def step_rows(self, seconds: Rounds) -> list[Row]:
        """Our step's time over each peer's."""
        rows = []
        for name, limit in self.limits.items():
            pairs = list(zip(seconds[self.ours], seconds[name], strict=True))
            ratios = [a / b for a, b in pairs]
            what = f"step, {self.case}: zerocore / {TITLES[name]}"
            ours, theirs = (1e3 * statistics.median(column) for column in zip(*pairs, strict=True))
            detail = f"{ours:.1f} / {theirs:.1f} ms, {spread(ratios)}"
            rows.append(Row(what, statistics.median(ratios), "x", limit, detail=detail))
        return rows

    def exposed_rows(self, seconds: Rounds) -> list[Row]:
        """Communication that a step waits for, over what bare collectives take."""
        if self.stage != 3:
            return []
        parts = [seconds[name] for name in (self.ours, "alone", "collectives")]
        ratios = [(a - b) / c for a, b, c in zip(*parts, strict=True)]
        step, alone, bare = (1e3 * statistics.median(part) for part in parts)
        detail = (
            f"step {step:.1f} ms, computation {alone:.1f} ms "
            f"(of one rank alone {1e3 * statistics.median(seconds['one']):.1f}), "
            f"collectives {bare:.1f} ms, {spread(ratios)}"
        )
        what = f"exposed communication, {self.case}: zerocore / bare collectives"
        limit = EXPOSED if self.limited else None
        return [Row(what, statistics.median(ratios), "x", limit, detail=detail)]

    def memory_rows(self) -> list[Row]:
        """Our peaks of memory over each sharded peer's, the larger of the ranks."""
        rows = []
        names = [name for name in self.teams if not name.startswith(("ddp", "alone"))]
        # The count of allocations has a thread: what is resident was measured before it.
        resident = {n: [*map(max, zip(*self.teams[n].ask("memory"), strict=True))] for n in names}
        allocated = {name: max(self.teams[name].ask("allocated", COUNTED)) for name in names}
        ours, our_building = resident[self.ours]
        limit = 1.0 if self.limited else None
        for name in names:
            if name == self.ours:
                continue
            peak, building = resident[name]
            what = f"{self.case}: zerocore / {TITLES[name]}"
            detail = f"{ours:.0f} / {peak:.0f} MB; building {our_building:.0f} / {building:.0f} MB"
            rows.append(Row(f"peak RSS, {what}", ours / peak, "x", limit, detail=detail))
            ratio = allocated[self.ours] / allocated[name]
            detail = f"{allocated[self.ours]:.1f} / {allocated[name]:.1f} MB"
            rows.append(Row(f"peak allocated, {what}", ratio, "x", limit, detail=detail))
        return rows


def spread(ratios: list[float]) -> str:
    return f"rounds {min(ratios):.2f}-{max(ratios):.2f}"


def cases(options: argparse.Namespace) -> list[tuple[int, str, int]]:
    """Width, dtype and sequences of what is measured at every stage."""
    dims = options.dims or ([384] if options.quick else [384, 768])
    dtypes = options.dtypes or (["fp32"] if options.quick else list(DTYPES))
    found = [(d, t, b) for d in dims for t in dtypes for b in options.batches or [1]]
    chosen = options.dims or options.dtypes or options.batches or options.quick
    return found if chosen else [*found, (dims[0], dtypes[0], MANY)]


def measure(options: argparse.Namespace) -> list[Row]:
    """All groups, one after the other."""
    rounds, steps = options.rounds or (3 if options.quick else 5), 2 if options.quick else 3
    if not HAS_DEEPSPEED:
        print("DeepSpeed is not installed: no rows of it", file=sys.stderr)
    rows = []
    for dim, dtype, batch in cases(options):
        for stage in options.stages:
            group = Group(stage, dtype, dim, batch, more=not options.quick)
            print(f"  {group.case} ...", file=sys.stderr, flush=True)
            try:
                group.compare_losses()
                seconds = group.time(rounds, steps)
                rows += group.step_rows(seconds)
                rows += group.exposed_rows(seconds) + group.memory_rows()
            finally:
                group.close()
    return rows


def multiple_of(base: int) -> Callable[[str], int]:
    """What reads a positive multiple of `base` from the command line."""

    def read(text: str) -> int:
        value = int(text) if text.isdecimal() else 0
        if value < 1 or value % base:
            raise argparse.ArgumentTypeError(f"expected a positive multiple of {base}, got {text}")
        return value

    return read


def add_options(parser: argparse.ArgumentParser) -> None:
    every = "default: all of a full run, fp32 and 384 with --quick"
    add = parser.add_argument
    add("--stages", type=int, nargs="+", choices=LIMITS, default=list(LIMITS), help="default: all")
    add("--dtypes", nargs="+", choices=DTYPES, help=every)
    widths = f"widths of the model, multiples of {HEADS} (its heads); {every}"
    add("--dims", type=multiple_of(HEADS), nargs="+", metavar="DIM", help=widths)
    batches = f"sequences of 64 tokens a rank (default: 1; a full run has {MANY} too)"
    add("--batches", type=multiple_of(1), nargs="+", metavar="BATCH", help=batches)
    rounds = "turns of all systems, a ratio each (default: 5, 3 with --quick)"
    add("--rounds", type=multiple_of(1), help=rounds)


if __name__ == "__main__":
    table.main(__doc__, measure, add_options)
