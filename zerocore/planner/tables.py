"""Plans as text."""

from __future__ import annotations

from collections.abc import Sequence

from zerocore.planner.advice import Candidate, Workload, fits
from zerocore.planner.communication import sent
from zerocore.planner.holding import CATEGORIES, resident
from zerocore.planner.recipe import recipes_of
from zerocore.planner.schedule import rehearse

SHARDS = ("nothing (DDP)", "optimizer state", "+ gradients", "+ parameters")


def gigabytes(size: float) -> str:
    """Decimal ones, 1e9 bytes, with three digits and more."""
    return f"{size / 1e9:,.2f}" if size >= 1e9 else f"{size / 1e9:.{5 if size < 1e8 else 3}f}"


def table(titles: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Columns under titles; the first `left` are aligned to the left."""
    lines = [tuple(titles), *map(tuple, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = [
        "  ".join(
            f"{cell:<{width}}" if i < left else f"{cell:>{width}}"
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    return "\n".join([text[0], "-" * len(text[0]), *text[1:]])


def recipes(parameters: int, shards: int, dtype: str, moments: int) -> str:
    """The ledger of each stage by formula: bytes per parameter, and GB of a rank.

    Args:
        shards: ranks that share a copy.
        moments: values that the optimizer keeps for each parameter.
    """
    own = recipes_of(dtype, moments)
    titles = ["stage", "shards", *(recipe.name for recipe in own)]
    rows = []
    for stage, what in enumerate(SHARDS):
        cells = []
        for recipe in own:
            each = recipe.per_parameter(stage, shards)
            cells.append(f"{each:.2f} B  {gigabytes(each * parameters)} GB")
        rows.append([str(stage), what, *cells])
    return table(titles, rows, left=2)


def ledgers(work: Workload, found: Sequence[Candidate]) -> str:
    """What a rank holds at each stage, by category, in bytes."""
    titles = ["bytes of a rank", *(str(c) for c in found)]
    columns = []
    for candidate in found:
        held = dict.fromkeys(CATEGORIES, 0)
        for holding in resident(work.sizes, candidate.setting, work.moments):
            held[holding.category] += holding.bytes
        peak = candidate.peak
        # On devices cleared gradients are free until they are made again, which may be later.
        cleared = peak.resident - sum(held.values())
        held["windows"] = peak.windows
        more = [cleared, peak.messages, peak.activations, peak.bytes]
        columns.append([*held.values(), *more])
    temporary = "local gradients" if work.activity is None else "activations, local gradients"
    names = [
        *CATEGORIES[:-1],
        "windows",
        "gradients not there yet",
        "messages under way",
        temporary,
        "peak",
    ]
    rows = [
        [name, *(f"{column[i]:,}" for column in columns)]
        for i, name in enumerate(names)
        if any(column[i] for column in columns)
    ]
    return table(titles, rows)


def calls_of(work: Workload) -> object:
    """Of the activity, if there is one."""
    return None if work.activity is None else work.activity.calls


def communication(work: Workload, found: Sequence[Candidate]) -> str:
    """What a rank sends in a step, by kind, in bytes."""
    titles = ["sent by a rank in a step", *(str(c) for c in found)]
    columns = []
    for candidate in found:
        schedule = rehearse(work.sizes, candidate.setting, calls_of(work))
        columns.append(sent(work.sizes, candidate.setting, schedule))
    kinds = list(dict.fromkeys(kind for column in columns for kind in column))
    names = {"control": "control (agreements on the host)"}
    rows = [
        [names.get(kind, kind), *(f"{c[kind].bytes:,}" if kind in c else "0" for c in columns)]
        for kind in kinds
    ]
    rows.append(["together", *(f"{sum(m.bytes for m in c.values()):,}" for c in columns)])
    return table(titles, rows)


def memory(work: Workload, found: Sequence[Candidate]) -> str:
    """Which of them fit, and by how much."""
    rows = []
    for candidate in found:
        room = work.memory - candidate.bytes
        verdict = "fits" if fits(work, candidate) else "does not fit"
        head = f"{gigabytes(room)} GB left" if room >= 0 else f"{gigabytes(-room)} GB too much"
        share = f"{candidate.bytes / work.memory:.0%} of {gigabytes(work.memory)} GB"
        rows.append([str(candidate), verdict, f"{gigabytes(candidate.bytes)} GB", share, head])
    return table(["", "", "needs", "", "head-room"], rows, left=2)


def times(work: Workload, found: Sequence[Candidate]) -> str:
    """Predicted steps."""
    rows = []
    for candidate in found:
        timeline = candidate.timeline
        rows.append(
            [
                str(candidate),
                f"{1e3 * timeline.seconds:,.1f}",
                f"{1e3 * timeline.compute:,.1f}",
                f"{1e3 * timeline.communication:,.1f}",
                f"{1e3 * timeline.exposed:,.1f}",
                gigabytes(candidate.bytes),
                "" if work.memory is None else "fits" if fits(work, candidate) else "no",
            ]
        )
    titles = ["", "step ms", "computing", "collectives", "exposed", "GB of a rank", ""]
    return table(titles, rows)
