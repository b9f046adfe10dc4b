"""What a trace is made of: spans of time, and steps. Pure; all times are whole nanoseconds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple


class Span(NamedTuple):
    """Something that took a while.

    Attributes:
        kind: one of KINDS.
        name: of the unit, or of what the ranks agree about; "" for the whole model.
        device: whether this is the device's time, not the host's.
        args: what else is known of it.
    """

    kind: str
    name: str
    begin: int
    end: int
    device: bool = False
    args: dict[str, Any] = {}  # noqa: RUF012  (never changed)


# In the order in which they are shown.
KINDS = (
    "step",
    "data",
    "forward",
    "backward",
    "recompute",
    "gather wait",
    "reduce wait",
    "agreement",
    "gather",
    "reduction",
    "optimizer",
    "checkpoint",
)


@dataclass
class Trace:
    """One rank's trace.

    Attributes:
        about: facts about rank, run and models, as JSON.
        spans: by their beginning.
        windows: (time, bytes of windows that are leased from then on).
    """

    about: dict[str, Any]
    spans: list[Span]
    windows: list[tuple[int, int]]


def united(spans: Iterable[Span], kinds: tuple[str, ...]) -> list[Span]:
    """The spans, with those of each of `kinds` that touch made one: they are of several models."""
    kept: list[Span] = []
    newest: dict[tuple[str, bool], int] = {}
    for span in sorted(spans, key=lambda span: (span.begin, -span.end)):
        place = newest.get((span.kind, span.device)) if span.kind in kinds else None
        if place is not None and span.begin <= kept[place].end:
            kept[place] = kept[place]._replace(end=max(kept[place].end, span.end))
            continue
        if span.kind in kinds:
            newest[span.kind, span.device] = len(kept)
        kept.append(span)
    return kept


def steps_of(spans: Iterable[Span], device: bool, gaps: list[tuple[int, int]]) -> list[Span]:
    """A span "step" for each, and a span "data" for the time before it.

    A step is from the beginning of the first forward after an optimizer step to the end of the next
    optimizer step that is followed by a forward, or by nothing. Steps in which records are missing
    (`gaps`) have the argument "lost".
    """
    spans = [span for span in spans if span.device == device]
    events = [(s.begin, "forward") for s in spans if s.kind == "forward"]
    events += [(s.end, "optimizer") for s in spans if s.kind == "optimizer"]
    found: list[Span] = []
    before, begin, end = 0, None, None

    def take() -> None:
        number = len(found) // 2 + 1
        lost = any(first < end and last > before for first, last in gaps)
        args = {"number": number} | ({"lost": True} if lost else {})
        found.append(Span("data", f"before step {number}", before, begin, device, args))
        found.append(Span("step", f"step {number}", begin, end, device, args))

    for time, what in sorted(events):
        if what == "optimizer":
            end = time if begin is not None else None
        elif begin is None:
            begin = time
        elif end is not None:
            take()
            before, begin, end = end, time, None
    if end is not None:
        take()
    return found


def levels(leases: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """(time, bytes leased from then on) of (time, bytes more or less)."""
    level, result = 0, []
    for time, change in sorted(leases, key=lambda lease: lease[0]):
        level += change
        result.append((time, level))
    return result
