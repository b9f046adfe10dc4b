"""Traces as documents in Chrome's trace format, which Perfetto and chrome://tracing show. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from zerocore.tracing.spans import KINDS, Span, Trace

FORMAT = 1

# (what a lane is called, the kinds in it), in the order in which they are shown.
_HOST = (
    ("steps", ("step",)),
    ("data", ("data",)),
    ("compute", ("forward", "backward", "recompute")),
    ("host waits", ("gather wait", "reduce wait", "agreement")),
    ("gathers", ("gather",)),
    ("reductions", ("reduction",)),
    ("optimizer", ("optimizer",)),
    ("checkpoint", ("checkpoint",)),
)
_DEVICE = (
    ("steps (device)", ("step",)),
    ("data (device)", ("data",)),
    ("compute (device)", ("forward", "backward", "recompute", "optimizer", "checkpoint")),
    ("waits (device)", ("gather wait", "reduce wait")),
    ("gathers (device)", ("gather",)),
    ("reductions (device)", ("reduction",)),
)
_MOST = 1000  # lanes of one kind
_COUNTER = "window bytes"


def document(traces: Iterable[Trace], **about: Any) -> dict[str, Any]:
    """What json.dump takes.

    Args:
        about: of all ranks together.
    """
    traces = sorted(traces, key=lambda trace: trace.about["rank"])
    events = [event for trace in traces for event in _events_of(trace)]
    facts = {"format": FORMAT, **about, "ranks": [trace.about for trace in traces]}
    return {"traceEvents": events, "displayTimeUnit": "ms", "zerocore": facts}


def traces_of(contents: Any) -> list[Trace]:
    """The traces in what json.load gives.

    Raises:
        ValueError: if that is no trace of zerocore's.
    """
    facts = contents.get("zerocore") if isinstance(contents, dict) else None
    if not isinstance(facts, dict) or facts.get("format") != FORMAT:
        raise ValueError(
            f"expected a trace that zerocore.trace wrote (format {FORMAT}), got another document"
        )
    try:
        traces = {about["rank"]: Trace(about, [], []) for about in facts["ranks"]}
        for event in contents["traceEvents"]:
            if event["ph"] == "X" and event["cat"] in KINDS:
                traces[event["pid"]].spans.append(_span_of(event))
            elif event["ph"] == "C" and event["name"] == _COUNTER:
                level = _nanoseconds(event["ts"]), event["args"]["bytes"]
                traces[event["pid"]].windows.append(level)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"expected a whole trace of zerocore's, got a damaged one: {error!r}"
        ) from None
    for trace in traces.values():
        trace.spans.sort(key=lambda span: (span.begin, -span.end))
    return list(traces.values())


def _microseconds(time: int) -> float:
    return time / 1000


def _nanoseconds(time: float) -> int:
    return round(time * 1000)


def _span_of(event: dict[str, Any]) -> Span:
    args = dict(event.get("args", {}))
    device, name = args.pop("device", False), args.pop("name")
    begin = _nanoseconds(event["ts"])
    return Span(event["cat"], name, begin, begin + _nanoseconds(event["dur"]), device, args)


def _events_of(trace: Trace) -> list[dict[str, Any]]:
    """The events of one rank: its number is that of the process."""
    rank = trace.about["rank"]
    title = f"rank {rank} of {trace.about['world']} ({trace.about['host']})"
    events = [
        _about(rank, "process_name", name=title),
        _about(rank, "process_sort_index", sort_index=rank),
    ]
    groups = [(_HOST, False), (_DEVICE, True)]
    for place, (name, kinds, device) in enumerate(
        (name, kinds, device) for lanes, device in groups for name, kinds in lanes
    ):
        spans = [span for span in trace.spans if span.device == device and span.kind in kinds]
        used = set()
        for span, lane in nested(spans):
            thread = (place + 1) * _MOST + lane
            if lane not in used:
                used.add(lane)
                title = f"{name} {lane + 1}" if lane else name
                events.append(_about(rank, "thread_name", thread, name=title))
                events.append(_about(rank, "thread_sort_index", thread, sort_index=thread))
            events.append(_event_of(span, rank, thread))
    for time, level in trace.windows:
        ts = _microseconds(time)
        counter = {"ph": "C", "name": _COUNTER, "pid": rank, "tid": 0, "ts": ts}
        events.append({**counter, "args": {"bytes": level}})
    return events


def _about(rank: int, name: str, thread: int = 0, /, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": rank, "tid": thread, "ts": 0, "args": args}


def _event_of(span: Span, rank: int, thread: int) -> dict[str, Any]:
    title = span.name if span.kind in ("step", "data") else f"{span.kind} {span.name}".strip()
    args = {"name": span.name, **({"device": True} if span.device else {}), **span.args}
    return {
        "ph": "X",
        "name": title,
        "cat": span.kind,
        "pid": rank,
        "tid": thread,
        "ts": _microseconds(span.begin),
        "dur": _microseconds(span.end - span.begin),
        "args": args,
    }


def nested(spans: Iterable[Span]) -> list[tuple[Span, int]]:
    """Each span with the first lane where those that overlap it contain it, or are inside of it.

    Viewers garble others.
    """
    lanes: defaultdict[int, list[int]] = defaultdict(list)  # ends of what is open, outermost first
    result = []
    for span in sorted(spans, key=lambda span: (span.begin, -span.end)):
        for lane in range(_MOST):
            ends = lanes[lane]
            while ends and ends[-1] <= span.begin:
                ends.pop()
            if not ends or span.end <= ends[-1]:
                ends.append(span.end)
                result.append((span, lane))
                break
    return result
