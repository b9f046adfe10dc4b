"""What a report says of a run's traces, as text. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from zerocore.tracing.breakdown import (
    SHOWN,
    RankSteps,
    overlap_of,
    percentile,
    steps_of,
    straggler_of,
)
from zerocore.tracing.spans import Trace

MOST_COLUMNS = 8  # ranks that get a column of their own


def report(traces: Sequence[Trace], skip: int, peak_flops: float | None) -> str:
    """The breakdown of steps and what follows from it.

    Args:
        skip: steps left out at the beginning.
        peak_flops: floating-point operations a second that a rank's device can do.

    Raises:
        ValueError: if a rank has no step that counts.
    """
    ranks = [steps_of(trace, skip) for trace in traces]
    for rank in ranks:
        if not rank.steps:
            raise ValueError(
                f"FILES: expected complete steps of every rank (a forward, and an optimizer step "
                f"that ends it), got none of rank {rank.rank} but the first {rank.skipped}, which "
                f"are left out, and {rank.incomplete} of which records are missing; trace more "
                "steps, or see --skip"
            )
    lines = [*_heading(traces, ranks), "", *_table(ranks), "", *_facts(traces, ranks)]
    lines += _speed(traces, ranks, peak_flops)
    lines += _warnings(traces, ranks)
    return "\n".join(lines)


def _heading(traces: Sequence[Trace], ranks: Sequence[RankSteps]) -> list[str]:
    about = traces[0].about
    world = about["world"]
    outer = about["models"][0]
    which = f"{world} ranks" if world > 1 else "1 rank"
    if len(traces) < world:
        which = f"{len(traces)} of {world} ranks ({', '.join(str(r.rank) for r in ranks)})"
    units = sum(len(model["units"]) for model in about["models"])
    dtypes = sorted({dtype for model in about["models"] for dtype in model["dtypes"]})
    steps = ranks[0].steps
    skipped = ranks[0].skipped
    left_out = ""
    if skipped:
        which_steps = "the first step is" if skipped == 1 else f"the first {skipped} steps are"
        left_out = f"; {which_steps} left out, where buffers are made (--skip)"
    where = "on the device" if about["on_device"] else "on the host"
    return [
        f"{which}, stage {outer['stage']}, {units} units, {about['parameters']:,} parameters, "
        f"computed in {', '.join(dtypes)}",
        f"{_count(len(steps), 'step')}, numbers {steps[0].number} to {steps[-1].number}{left_out}",
        f"times {where}, in ms",
    ]


def _table(ranks: Sequence[RankSteps]) -> list[str]:
    columns = ["mean", "share"]
    shown = ranks if 1 < len(ranks) <= MOST_COLUMNS else []
    if len(ranks) > MOST_COLUMNS:
        columns += ["least", "most"]
    columns += [f"rank {rank.rank}" for rank in shown]
    whole = statistics.fmean(rank.total for rank in ranks)

    def row(name: str, values: list[float]) -> str:
        mean = statistics.fmean(values)
        cells = [f"{_ms(mean)}", f"{100 * mean / whole:.1f} %"]
        if len(ranks) > MOST_COLUMNS:
            cells += [_ms(min(values)), _ms(max(values))]
        cells += [_ms(value) for value in values[: len(shown)]]
        return f"{name:<12}" + "".join(f"{cell:>12}" for cell in cells)

    lines = [" " * 12 + "".join(f"{column:>12}" for column in columns)]
    lines += [row(part, [rank.mean(part) for rank in ranks]) for part in SHOWN]
    return [*lines, row("step", [rank.total for rank in ranks])]


def _facts(traces: Sequence[Trace], ranks: Sequence[RankSteps]) -> list[str]:
    totals = [step.total for rank in ranks for step in rank.steps]
    p50, p99 = percentile(totals, 50), percentile(totals, 99)
    lines = [
        f"step time: mean {_ms(statistics.fmean(totals))} ms, p50 {_ms(p50)} ms, p99 {_ms(p99)} ms"
    ]
    overlap = overlap_of(ranks)
    if overlap is None:
        lines.append("overlap: none (no communication)")
    else:
        steps = [step for rank in ranks for step in rank.steps]
        total = statistics.fmean(step.communication for step in steps)
        exposed = statistics.fmean(step.exposed for step in steps)
        # On the CPU a gather counts until the host asks for it.
        most = "" if traces[0].about["on_device"] else "at most "
        lines.append(
            f"overlap: {most}{100 * overlap:.1f} % of the {_ms(total)} ms of a step in which a "
            f"collective is under way are hidden; in {_ms(exposed)} ms the rank waits meanwhile"
        )
    straggler = straggler_of(ranks)
    if straggler is not None:
        longer = f"; its {straggler.part} takes {_ms(straggler.more)} ms longer"
        lines.append(
            f"straggler: rank {straggler.rank} makes the others wait: in a step it waits "
            f"{_ms(straggler.waits)} ms, they {_ms(straggler.others)} ms"
            f"{longer if straggler.more > 0 else ''}"
        )
    elif len(ranks) > 1:
        lines.append("straggler: none (the ranks wait for about as long)")
    elif traces[0].about["world"] > 1:
        lines.append("straggler: not known of one rank's trace")
    return lines


def _speed(
    traces: Sequence[Trace], ranks: Sequence[RankSteps], peak_flops: float | None
) -> list[str]:
    seconds = statistics.fmean(rank.total for rank in ranks) / 1e9
    about, world = traces[0].about, traces[0].about["world"]
    lines = []
    tokens = [trace.about["tokens"] for trace in traces]
    known = all(count is not None for count in tokens)
    if known:
        scale = world / len(traces)
        guess = f", if all {world} ranks have as many as these" if len(traces) < world else ""
        lines.append(f"tokens/s: {sum(tokens) * scale / seconds:,.0f} of all ranks{guess}")
    flops = [trace.about["flops"] for trace in traces]
    if all(count is not None for count in flops):
        work, how = statistics.fmean(flops), "FLOPs as given to zerocore.trace"
    elif known:
        work = 6 * about["parameters"] * statistics.fmean(tokens)
        how = (
            "assuming 6 FLOPs for each parameter and token (PaLM, arXiv 2204.02311, appendix B, "
            "without its term for attention)"
        )
    else:
        return [*lines, "model FLOPs utilisation: not known; give zerocore.trace tokens= or flops="]
    rate = work / seconds
    if peak_flops is None:
        return [*lines, f"model FLOP/s of a rank: {rate:.4g}, {how}; --peak-flops tells what share"]
    share = f"{100 * rate / peak_flops:.2f} % of {peak_flops:.4g} FLOP/s"
    if rate > peak_flops:
        share += " (more than there is: is that --peak-flops of one rank?)"
    return [*lines, f"model FLOPs utilisation: {share}, {how}"]


def _warnings(traces: Sequence[Trace], ranks: Sequence[RankSteps]) -> list[str]:
    lines = []
    for trace, rank in zip(traces, ranks, strict=True):
        if lost := trace.about["lost_records"]:
            left_out = _count(rank.incomplete, "step")
            lines.append(
                f"rank {rank.rank}: {_count(lost, 'record')} lost (the log was full, or was reset);"
                f" {left_out} left out"
            )
        if untimed := trace.about["untimed_records"]:
            lines.append(
                f"rank {rank.rank}: the device's times of {_count(untimed, 'record')} are not "
                "known, and their time is counted as other"
            )
        if error := trace.about["error"]:
            lines.append(f"rank {rank.rank}: the traced block ended with {error}")
    return lines


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _ms(nanoseconds: float) -> str:
    return f"{nanoseconds / 1e6:.3f}"
