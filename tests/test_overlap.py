"""Collectives are launched before the computation that hides them ends, by the order of events."""

import models
import pytest
import sharded
import torch

import zerocore

DEPTH = 5
UNITS = [f"blocks.{i}" for i in range(DEPTH)]


def log(stage=3, steps=3, **options):
    """The log of the last step, as tuples (event, kind, unit, phase) in order."""
    torch.manual_seed(0)
    model = zerocore.shard(models.Transformer(depth=DEPTH), stage, units=UNITS, **options)
    opt = zerocore.AdamW(model.parameters())
    for number in range(steps):
        zerocore.stats(model).reset()
        sharded.step(model, opt, "transformer", number)
    records = zerocore.stats(model).log
    assert [r.sequence for r in records] == sorted(r.sequence for r in records)
    assert all(b.time >= a.time for a, b in zip(records, records[1:], strict=False))
    return [(r.event, r.kind, r.unit, r.phase) for r in records]


def place(records, *wanted):
    """Where the only such record stands."""
    places = [i for i, record in enumerate(records) if record == wanted]
    assert len(places) == 1, f"expected one {wanted}, got {len(places)} in {records}"
    return places[0]


def spans(records, phase):
    """(begin, end) of the blocks' computations in this phase, in the order of their beginnings."""
    found = {}
    for i, (event, kind, unit, in_phase) in enumerate(records):
        if kind == "compute" and in_phase == phase and unit:
            found.setdefault(unit, []).append((event, i))
    assert all([e for e, _ in events] == ["begin", "end"] for events in found.values()), found
    return {unit: tuple(i for _, i in events) for unit, events in found.items()}


def gathers(records, unit):
    """Where the unit is gathered: for its forward and, if it is again, for its backward."""
    return [i for i, r in enumerate(records) if r[:3] == ("launch", "all_gather", unit)]


@pytest.mark.parametrize("prefetch", [1, 2])
@pytest.mark.parametrize("size", [2, 3])
def test_gathers_are_launched_ahead(ranks, size, prefetch):
    for records in ranks(size, log, prefetch=prefetch):
        forward = spans(records, "forward")
        assert list(forward) == UNITS
        begin = place(records, "begin", "compute", "", "forward")
        assert gathers(records, "blocks.0")[0] < begin
        for before, unit in zip(UNITS, UNITS[1:], strict=False):
            launched = gathers(records, unit)[0]
            assert launched < forward[before][1], f"{unit} is gathered after {before} ended"
        for demanded, unit in zip(UNITS, UNITS[prefetch:], strict=False):  # not all at once, either
            assert gathers(records, unit)[0] > place(
                records, "wait", "all_gather", demanded, "forward"
            )
        backward = spans(records, "backward")
        assert list(backward) == UNITS[::-1]
        for before, unit in zip(UNITS[:0:-1], UNITS[-2::-1], strict=True):
            _, launched = gathers(records, unit)
            assert launched < backward[before][1], f"{unit} is gathered after {before} ended"


@pytest.mark.parametrize("size", [2, 3])
def test_without_prefetch_nothing_is_ahead(ranks, size):
    for records in ranks(size, log, prefetch=0):
        forward = spans(records, "forward")
        for before, unit in zip(UNITS, UNITS[1:], strict=False):
            assert gathers(records, unit)[0] > forward[before][1]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_reductions_are_launched_in_backward(ranks, stage):
    for records in ranks(2, log, stage):
        backward = spans(records, "backward")
        assert list(backward) == UNITS[::-1]
        for unit, behind in zip(UNITS[:0:-1], UNITS[-2::-1], strict=True):
            launched = place(records, "launch", "reduce", unit, "backward")
            assert launched < backward[behind][1], f"{unit} is reduced after {behind} ended"
            awaited = [i for i, r in enumerate(records) if r[:3] == ("wait", "reduce", unit)]
            assert all(i > backward[behind][1] for i in awaited), "the host waits at once"
        last = place(records, "launch", "reduce", "", "backward")
        assert last > place(records, "launch", "reduce", "blocks.0", "backward")


@pytest.mark.parametrize("stage", [1, 2])
def test_gathers_after_the_step_run_ahead_of_the_next_forward(ranks, stage):
    for records in ranks(2, log, stage):
        forward = spans(records, "forward")
        for unit, before in zip(UNITS[1:], UNITS, strict=False):
            (launched,) = gathers(records, unit)
            assert launched < forward[before][1]


def test_every_collective_is_waited_for_and_done(ranks):
    for records in ranks(2, log):
        for kind in ("all_gather", "reduce"):
            launched = [r[2] for r in records if r[:2] == ("launch", kind)]
            done = [r[2] for r in records if r[:2] == ("done", kind)]
            assert sorted(done) == sorted(launched), kind
            assert launched
