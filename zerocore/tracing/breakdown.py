"""What the time of steps went to. Pure; all times are whole nanoseconds."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from zerocore.tracing.spans import Trace

# Of each moment the first one that it is in counts: a wait inside of a forward is not forward.
PARTS = {
    "gather wait": ("gather wait",),
    "reduce wait": ("reduce wait", "agreement"),
    "checkpoint": ("checkpoint",),
    "optimizer": ("optimizer",),
    "recompute": ("recompute",),
    "backward": ("backward",),
    "forward": ("forward",),
    "data": ("data",),
    "other": (),
}
# In the order of a step.
SHOWN = (
    "data forward recompute backward".split()
    + ["gather wait", "reduce wait"]
    + "optimizer checkpoint other".split()
)
WAITS = ("gather wait", "reduce wait")

_PART_OF = {kind: part for part, kinds in PARTS.items() for kind in kinds}
_COLLECTIVES = ("gather", "reduction")
STRAGGLER_SHARE = 0.05  # of a step: ranks whose waits differ by less are alike


class Step(NamedTuple):
    """One step of one rank, with the time for data before it.

    Attributes:
        total: its time.
        parts: of PARTS; they add up to `total`.
        communication: time in which a collective was under way.
        exposed: of that, the time in which the rank waited for one.
    """

    number: int
    begin: int
    end: int
    parts: dict[str, int]
    communication: int
    exposed: int

    @property
    def total(self) -> int:
        """From the end of the step before."""
        return self.end - self.begin


@dataclass(frozen=True)
class RankSteps:
    """The steps of a rank that count.

    Attributes:
        skipped: how many were left out at the beginning.
        incomplete: how many were, because records of them are missing.
    """

    rank: int
    steps: list[Step]
    skipped: int
    incomplete: int

    def mean(self, part: str) -> float:
        """Of a part, in nanoseconds a step."""
        return statistics.fmean(step.parts[part] for step in self.steps)

    @property
    def total(self) -> float:
        """Mean time of a step."""
        return statistics.fmean(step.total for step in self.steps)

    @property
    def waits(self) -> float:
        """Mean time of a step in which the rank waited for others."""
        return sum(self.mean(part) for part in WAITS)


def steps_of(trace: Trace, skip: int) -> RankSteps:
    """The steps of a rank, on its device where that is traced, without the first `skip`."""
    device = trace.about["on_device"]
    spans = [span for span in trace.spans if span.device == device]
    data = {span.args["number"]: span for span in spans if span.kind == "data"}
    periods, incomplete = [], 0
    for span in spans:
        if span.kind != "step" or span.args["number"] <= skip:
            continue
        if span.args.get("lost"):
            incomplete += 1
        else:
            number = span.args["number"]
            periods.append((number, data[number].begin, span.end))
    changes = []
    for span in spans:
        if span.kind in _PART_OF or span.kind in _COLLECTIVES:
            changes += [(span.begin, span.kind, 1), (span.end, span.kind, -1)]
    total = len(data)
    return RankSteps(trace.about["rank"], _measured(periods, changes), min(skip, total), incomplete)


def _measured(
    periods: list[tuple[int, int, int]], changes: list[tuple[int, str, int]]
) -> list[Step]:
    """Goes through time once.

    Args:
        periods: (number, begin, end), which do not overlap, in order.
        changes: (time, kind, 1 or -1) where spans begin and end.
    """
    changes.sort(key=lambda change: change[0])
    under_way: Counter[str] = Counter()
    steps, at = [], 0

    def part() -> str:
        return next(
            (part for part, kinds in PARTS.items() if any(under_way[kind] for kind in kinds)),
            "other",
        )

    for number, begin, end in periods:
        parts, communication, exposed, now = dict.fromkeys(PARTS, 0), 0, 0, begin
        while now < end:
            while at < len(changes) and changes[at][0] <= now:
                under_way[changes[at][1]] += changes[at][2]
                at += 1
            until = min(end, changes[at][0]) if at < len(changes) else end
            parts[part()] += until - now
            if any(under_way[kind] for kind in _COLLECTIVES):
                communication += until - now
                exposed += (until - now) * any(under_way[kind] for kind in WAITS)
            now = until
        steps.append(Step(number, begin, end, parts, communication, exposed))
    return steps


class Straggler(NamedTuple):
    """The rank that others wait for.

    Attributes:
        waits: how long it waits in a step.
        others: how long the others do, their median.
        part: of what it takes most more than the others' median.
        more: how much more.
    """

    rank: int
    waits: float
    others: float
    part: str
    more: float


def straggler_of(ranks: Sequence[RankSteps]) -> Straggler | None:
    """The rank that makes others wait: in synchronous training the one that waits least.

    Who comes last to a collective does not wait in it, and all the others do. None if the median
    wait of the others is longer by less than STRAGGLER_SHARE of a step.
    """
    if len(ranks) < 2:
        return None
    least = min(ranks, key=lambda rank: rank.waits)
    others = [rank for rank in ranks if rank is not least]
    wait = statistics.median(rank.waits for rank in others)
    if wait - least.waits < STRAGGLER_SHARE * least.total:
        return None
    more = {
        part: least.mean(part) - statistics.median(rank.mean(part) for rank in others)
        for part in PARTS
        if part not in WAITS
    }
    most = max(more, key=more.__getitem__)
    return Straggler(least.rank, least.waits, wait, most, more[most])


def overlap_of(ranks: Iterable[RankSteps]) -> float | None:
    """1 - exposed communication / communication, of all steps; None if there is none."""
    steps = [step for rank in ranks for step in rank.steps]
    communication = sum(step.communication for step in steps)
    return 1 - sum(step.exposed for step in steps) / communication if communication else None


def percentile(values: Iterable[float], percent: float) -> float:
    """Between the two nearest values, linearly."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low, high = ordered[math.floor(place)], ordered[math.ceil(place)]
    return low + (high - low) * (place - math.floor(place))
