"""A picture of one step: the memory of windows, and what each rank did."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from zerocore.tracing import chrome
from zerocore.tracing.breakdown import Step, percentile, steps_of
from zerocore.tracing.spans import Span, Trace

MOST_RANKS = 8  # that are drawn
MOST_LANES = 4  # of what overlaps in a row; more cover each other

# Okabe and Ito's colours, which are told apart with any colour vision ("Color Universal Design").
_COLORS = {
    "forward": "#56B4E9",
    "backward": "#0072B2",
    "recompute": "#CC79A7",
    "optimizer": "#009E73",
    "data": "#BBBBBB",
    "checkpoint": "#000000",
    "wait or agreement": "#D55E00",
    "gather": "#F0E442",
    "reduction": "#E69F00",
}
_RANKS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
_LINES = ("-", "--", ":", "-.")
# Rows of a rank, from the top, with the kinds in them; what is drawn later covers the rest.
_ROWS = (
    ("compute", ("data", "forward", "backward", "recompute", "optimizer", "checkpoint")),
    ("waits", ("gather wait", "reduce wait", "agreement")),
    ("gathers", ("gather",)),
    ("reductions", ("reduction",)),
)
_WAITS = _ROWS[1][1]


class _Row(NamedTuple):
    """A row of a rank: spans, and the lane of each in it."""

    name: str
    spans: list[tuple[Span, int]]
    lanes: int


def draw(traces: Sequence[Trace], skip: int, out: Path) -> None:
    """Draws the step of the lowest rank whose time is the median.

    Args:
        skip: steps left out at the beginning.

    Raises:
        ImportError: without matplotlib.
        ValueError: if a rank has not got the step, or nothing can be drawn to such a file.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            f"--png: expected matplotlib, got: {error}; pip install 'zerocore[plot]', or matplotlib"
        ) from None
    traces = list(traces)[:MOST_RANKS]
    steps = _chosen(traces, skip)
    start = min(step.begin for step in steps)
    stop = max(step.end for step in steps)
    rows = [_rows_of(trace, start, stop) for trace in traces]
    height = len(_ROWS) * len(traces)
    leased = any(trace.windows for trace in traces)
    heights = [2.2, 0.28 * height + 0.8] if leased else [0.28 * height + 0.8]
    figure = Figure(figsize=(12, sum(heights) + 1.7), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(
        len(heights), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights}
    )[:, 0]
    world, number = traces[0].about["world"], steps[0].number
    stage = traces[0].about["models"][0]["stage"]
    which = f"{len(traces)} of {world} ranks" if len(traces) < world else f"{world} ranks"
    figure.suptitle(f"Step {number} at stage {stage}, {which if world > 1 else '1 rank'}")
    if leased:
        _draw_windows(axes[0], traces, start, stop)
    _draw_rows(axes[-1], traces, rows, start)
    axes[-1].set_xlim(0, (stop - start) / 1e6)
    axes[-1].set_xlabel("time in the step [ms]")
    _add_legend(figure, rows)
    figure.savefig(out, dpi=130, format="png")


def _chosen(traces: Sequence[Trace], skip: int) -> list[Step]:
    """The step to be drawn, of each rank."""
    found = [{step.number: step for step in steps_of(trace, skip).steps} for trace in traces]
    common = [step for number, step in found[0].items() if all(number in own for own in found)]
    if not common:
        raise ValueError("FILES: expected a step that is whole on every rank, got none")
    median = percentile([step.total for step in common], 50)
    number = min(common, key=lambda step: abs(step.total - median)).number
    return [own[number] for own in found]


def _rows_of(trace: Trace, start: int, stop: int) -> list[_Row]:
    """What is drawn of a rank."""
    device = trace.about["on_device"]
    spans = [
        span._replace(begin=max(span.begin, start), end=min(span.end, stop))
        for span in trace.spans
        if span.device == device and span.begin < stop and span.end > start
    ]
    rows = []
    for name, kinds in _ROWS:
        placed = chrome.nested(span for span in spans if span.kind in kinds)
        lanes = max((lane for _, lane in placed), default=0) + 1
        rows.append(_Row(name, placed, min(lanes, MOST_LANES)))
    return rows


def _draw_windows(axis: Any, traces: Sequence[Trace], start: int, stop: int) -> None:
    for place, trace in enumerate(traces):
        times = [time for time, _ in trace.windows]
        first, last = bisect.bisect_right(times, start), bisect.bisect_left(times, stop)
        before = trace.windows[first - 1][1] if first else 0
        points = [(start, before), *trace.windows[first:last]]
        points.append((stop, points[-1][1]))
        axis.step(
            [(time - start) / 1e6 for time, _ in points],
            [level / 2**20 for _, level in points],
            where="post",
            color=_RANKS[place % 4],
            linestyle=_LINES[place % 4],
            linewidth=1.4,
            label=f"rank {trace.about['rank']}",
        )
    axis.set_ylabel("windows [MiB]")
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    axis.legend(loc="upper left", bbox_to_anchor=(1.005, 1), borderaxespad=0, frameon=False)


def _draw_rows(
    axis: Any, traces: Sequence[Trace], rows: Sequence[Sequence[_Row]], start: int
) -> None:
    ticks, labels, place = [], [], 0
    for trace, own in zip(traces, rows, strict=True):
        if place:
            axis.axhline(place - 0.5, color="#888888", linewidth=0.8)
        for row in own:
            height = 0.8 / row.lanes
            for span, lane in row.spans:
                bottom = place - 0.4 + height * (lane % row.lanes)
                bar = ((span.begin - start) / 1e6, (span.end - span.begin) / 1e6)
                # Compute has no borders: the root's span goes around those of the units.
                width = 0 if span.name == "root" and span.kind in _ROWS[0][1] else 0.5
                axis.broken_barh(
                    [bar],
                    (bottom, height),
                    facecolor=_COLORS[_colored(span)],
                    edgecolor="white",
                    linewidth=width,
                )
            ticks.append(place)
            labels.append(f"rank {trace.about['rank']} {row.name}")
            place += 1
    axis.set_yticks(ticks, labels)
    axis.set_ylim(place - 0.5, -0.5)
    axis.grid(axis="x", alpha=0.3)
    axis.set_axisbelow(True)


def _colored(span: Span) -> str:
    return "wait or agreement" if span.kind in _WAITS else span.kind


def _add_legend(figure: Any, rows: Sequence[Sequence[_Row]]) -> None:
    from matplotlib.patches import Patch

    shown = {_colored(span) for own in rows for row in own for span, _ in row.spans}
    patches = [Patch(color=_COLORS[name], label=name) for name in _COLORS if name in shown]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False)
