"""What a training step should hold and send, by formula, beside what zerocore measured.

Words: T is the padded size of a unit in elements, N the number of ranks, T/N a rank's shard. An
element that is gathered or reduced costs each rank (N-1)/N elements sent.
"""

from collections.abc import Mapping
from typing import NamedTuple

FP32 = 4  # bytes
NARROW = 2
ROOT = ""  # the unit of what is in no block


class Run(NamedTuple):
    """The choices that the formulas depend on; one unit is gathered ahead."""

    stage: int
    ranks: int
    grad_accum: int
    narrow: (
        bool  # parameters computed and sent in bf16 or fp16, optimizer state and gradients in fp32
    )
    kept: frozenset[str]  # units whose window stays from forward to backward (stage 3)


class Row(NamedTuple):
    """One line of the table, in bytes per rank."""

    name: str
    predicted: int
    measured: int


def held(run: Run, padded: Mapping[str, int]) -> dict[str, int]:
    """Bytes that one rank holds when it is about to step, from each unit's padded size.

    Windows are the most that was leased at once during the step: full parameters of the root, of
    the unit that computes and of the one that is gathered ahead of it.

    stage   parameters   gradients   optimizer state
    0       T            T           T
    1       T            T/N *       T/N
    2       T            T/N         T/N
    3       T/N          T/N         T/N
    * T while micro-batches accumulate under no_sync: only the last one reduces.
    """
    full = sum(padded.values())
    shard = full if run.stage == 0 else full // run.ranks
    size = NARROW if run.narrow else FP32
    units = sorted(count for name, count in padded.items() if name != ROOT)
    return {
        # In a narrow dtype, at stage 3, the only parameters that stay are the master copy.
        "parameters": size * full if run.stage < 3 else 0 if run.narrow else FP32 * shard,
        "gradients": FP32 * shard,
        "master": FP32 * shard if run.narrow else 0,
        "moments": 2 * FP32 * shard,
        "windows": size * (padded[ROOT] + sum(units[-2:])) if run.stage == 3 else 0,
    }


def sent(run: Run, padded: Mapping[str, int]) -> dict[str, int]:
    """Bytes that one rank sends in one step, by kind of collective.

    stage   reductions per step   gathers per step
    0       1 all-reduce, which costs twice a gather
    1       1                     1, after the step
    2       1 per micro-batch     1, after the step
    3       1 per micro-batch     2 per micro-batch, or 1 where the window is kept for backward
    """
    size = NARROW if run.narrow else FP32
    once = {name: size * count * (run.ranks - 1) // run.ranks for name, count in padded.items()}
    total = sum(once.values())
    if run.stage == 0:
        return {"all_reduce": 2 * total}
    if run.stage == 1:
        return {"reduce_scatter": total, "all_gather": total}
    reductions = run.grad_accum * total
    if run.stage == 2:
        return {"reduce_scatter": reductions, "all_gather": total}
    gathers = sum(bytes_ * (1 if name in run.kept else 2) for name, bytes_ in once.items())
    return {"reduce_scatter": reductions, "all_gather": run.grad_accum * gathers}


def rows(predicted: Mapping[str, int], measured: Mapping[str, int]) -> list[Row]:
    """Both sides by name; a name that one side lacks counts as 0 there, and all-zero rows go."""
    names = [*predicted, *(name for name in measured if name not in predicted)]
    table = [Row(name, predicted.get(name, 0), measured.get(name, 0)) for name in names]
    return [row for row in table if row.predicted or row.measured]


def table(title: str, lines: list[Row]) -> str:
    """The rows as text, with their sum, each marked as equal or not."""
    total = Row("together", sum(row.predicted for row in lines), sum(row.measured for row in lines))
    text = [f"{title:<32}{'predicted':>14}{'measured':>14}"]
    for row in [*lines, total]:
        verdict = "equal" if row.predicted == row.measured else "DIFFERENT"
        text.append(f"  {row.name:<30}{row.predicted:>14,}{row.measured:>14,}  {verdict}")
    return "\n".join(text)
