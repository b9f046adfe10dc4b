"""The traces of a run's ranks as one, on one clock. Pure, but for the reading of files."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from zerocore.tracing import chrome
from zerocore.tracing.spans import Trace

# What every rank leaves at the same moment, up to the time of a message.
_COMMON = ("agreement", "order")


def read(paths: Iterable[Path]) -> list[Trace]:
    """The traces in files of single ranks or in merged ones, by rank; each once.

    Raises:
        ValueError: for files that are no traces, or not of one run.
    """
    traces: dict[int, tuple[Path, Trace]] = {}
    for path in paths:
        for trace in _read_file(path):
            rank = trace.about["rank"]
            if rank in traces:
                raise ValueError(
                    f"FILES: expected each rank once, got rank {rank} in {traces[rank][0]} and in "
                    f"{path}"
                )
            traces[rank] = path, trace
    if not traces:
        raise ValueError("FILES: expected at least one trace, got none")
    (first_path, first), *others = traces.values()
    for path, trace in others:
        for what, same in (("run", "run"), ("number of ranks", "world"), ("models", "models")):
            if trace.about[same] != first.about[same]:
                raise ValueError(
                    f"FILES: expected traces of one run, got {path} with another {what} than "
                    f"{first_path}"
                )
    return [traces[rank][1] for rank in sorted(traces)]


def _read_file(path: Path) -> list[Trace]:
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"FILES: expected to read {path}, got: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"FILES: expected JSON in {path}, got: {error}") from None
    try:
        return chrome.traces_of(contents)
    except ValueError as error:
        raise ValueError(f"FILES: {path}: {error}") from None


def merge(traces: list[Trace]) -> dict[str, Any]:
    """One document of traces of one run, on one clock; it says how they were aligned."""
    traces, clocks = aligned(traces)
    return chrome.document(traces, clocks=clocks)


def aligned(traces: list[Trace]) -> tuple[list[Trace], dict[str, dict[str, Any]]]:
    """Traces of one run on the clock of the lowest rank, and by rank what was done for it.

    A rank's clock is shifted by the median difference between the ends of the agreements that it
    and the lowest rank took part in; without any, by the wall clocks of their hosts.
    """
    lowest, *others = sorted(traces, key=lambda trace: trace.about["rank"])
    clocks = {str(lowest.about["rank"]): {"by": "the others follow it", "shift_seconds": 0.0}}
    result = [lowest]
    reference = _ends(lowest)
    for trace in others:
        ends = _ends(trace)
        common = [reference[place] - end for place, end in ends.items() if place in reference]
        if common:
            shift = round(statistics.median(common))
            left = max(abs(difference - shift) for difference in common)
            how = {"by": f"{len(common)} agreements", "largest_deviation_seconds": left / 1e9}
        else:
            wall_clocks = trace.about["wall_clock"] - lowest.about["wall_clock"]
            shift, how = round(wall_clocks * 1e9), {"by": "wall clocks"}
        clocks[str(trace.about["rank"])] = {**how, "shift_seconds": shift / 1e9}
        result.append(_shifted(trace, shift))
    return result, clocks


def _ends(trace: Trace) -> dict[tuple[Any, ...], int]:
    """When this rank left each agreement, by what names it on all ranks."""
    return {
        (span.args["what"], *span.args["place"]): span.end
        for span in trace.spans
        if span.kind == "agreement"
        and span.args["what"] in _COMMON
        and not span.args.get("unfinished")
        and not span.args.get("failed")
    }


def _shifted(trace: Trace, shift: int) -> Trace:
    spans = [s._replace(begin=s.begin + shift, end=s.end + shift) for s in trace.spans]
    windows = [(time + shift, level) for time, level in trace.windows]
    about = trace.about | {"wall_clock": trace.about["wall_clock"] - shift / 1e9}
    return Trace(about, spans, windows)
