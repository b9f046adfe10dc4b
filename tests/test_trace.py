"""Traces of training: what is recorded, and the spans that are made of it."""

import contextlib
import json
import time
from collections import Counter

import models
import pytest
import scenarios
import sharded
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import zerocore
from zerocore.tracing import breakdown, chrome
from zerocore.tracing.reader import Model, Moment, Reader
from zerocore.tracing.report import report
from zerocore.tracing.spans import KINDS, Span, steps_of

DEPTH = 3
BLOCKS = [f"blocks.{i}" for i in range(DEPTH)]
MILLION = 1_000_000  # nanoseconds in a millisecond


def transformer(stage, **options):
    torch.manual_seed(0)
    model = zerocore.shard(models.Transformer(depth=DEPTH), stage, units=BLOCKS, **options)
    return model, zerocore.AdamW(model.parameters())


def kept(file):
    """The document in a file that a rank wrote, checked in what holds of all of them."""
    document = json.loads(file.read_text())
    assert document["displayTimeUnit"] == "ms"
    (trace,) = chrome.traces_of(document)
    lanes = {}
    for event in document["traceEvents"]:
        assert event["pid"] == trace.about["rank"]
        if event["ph"] == "X":
            assert event["cat"] in KINDS and event["dur"] >= 0
            lanes.setdefault(event["tid"], []).append(event)
    named = {e["tid"] for e in document["traceEvents"] if e["name"] == "thread_name"}
    assert named == set(lanes)
    for events in lanes.values():
        assert_nest([(e["ts"], e["ts"] + e["dur"]) for e in events])
    assert list(file.parent.glob("*.tmp*")) == []  # ranks have returned
    return document


def assert_nest(intervals):
    """No two overlap without one being inside of the other."""
    open_ends = []
    for begin, end in sorted(intervals, key=lambda i: (i[0], -i[1])):
        while open_ends and open_ends[-1] <= begin + 1e-6:
            open_ends.pop()
        assert not open_ends or end <= open_ends[-1] + 1e-6
        open_ends.append(end)


def spans_of(document, *wanted):
    (trace,) = chrome.traces_of(document)
    return [span for span in trace.spans if span.kind in wanted]


# ---- what is recorded --------------------------------------------------------------------------


def train(folder, stage, steps=3, micro=1, **options):
    """The file of this rank, and what stats say of the same steps."""
    model, opt = transformer(stage, **options)
    sharded.step(model, opt, "transformer", 0)
    stats = zerocore.stats(model)
    stats.reset()
    with zerocore.trace(folder / "out.json", model, tokens=9) as file:
        for number in range(steps):
            opt.zero_grad()
            for part in range(micro):
                sharded.step(model, None, "transformer", micro * number + part)
            opt.step()
    assert file == folder / f"out.rank{dist.get_rank()}.json"
    return file, dict(stats.collectives), stats.windows.peak


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_has_each_unit_once_and_the_collectives_that_stats_count(ranks, tmp_path, stage):
    steps = 3
    for file, collectives, peak in ranks(2, train, tmp_path, stage, steps):
        document = kept(file)
        units = ["root", *BLOCKS]
        once = {unit: steps for unit in units}
        assert Counter(s.name for s in spans_of(document, "forward")) == once
        assert Counter(s.name for s in spans_of(document, "backward")) == once
        assert not spans_of(document, "recompute", "checkpoint")
        gathers, reductions = spans_of(document, "gather"), spans_of(document, "reduction")
        assert len(gathers) == (collectives["all_gather"].calls if stage else 0)
        assert Counter(s.name for s in reductions) == once
        assert len(reductions) == collectives["reduce_scatter" if stage else "all_reduce"].calls
        assert [s.args["number"] for s in spans_of(document, "step")] == [1, 2, 3]
        assert len(spans_of(document, "data")) == len(spans_of(document, "optimizer")) == steps
        assert len(spans_of(document, "agreement")) == steps
        (trace,) = chrome.traces_of(document)
        levels = [level for _, level in trace.windows]
        assert (max(levels, default=0), *levels[-1:]) == ((peak, 0) if levels else (0,))
        assert bool(levels) == (stage == 3)
        assert trace.about["lost_records"] == 0 and trace.about["error"] is None
        assert trace.about["tokens"] == 9 and trace.about["parameters"] > 0
        for step in breakdown.steps_of(trace, 0).steps:
            assert sum(step.parts.values()) == step.total > 0
            assert 0 <= step.exposed <= step.communication <= step.total
            for part in ("data", "forward", "backward", "optimizer"):
                assert step.parts[part] > 0, part


def sleep_in_backward(folder, seconds):
    """Between the backwards of the second block and the first."""
    model, opt = transformer(3)

    def slow(_, args, output):
        output.register_hook(lambda _: time.sleep(seconds))

    model.blocks[0].register_forward_hook(slow)
    with zerocore.trace(folder / "out.json", model) as file:
        sharded.step(model, opt, "transformer", 0)
    return file


def test_a_reduction_ends_before_the_host_has_asked_for_it(ranks, tmp_path):
    for document in map(kept, ranks(2, sleep_in_backward, tmp_path, 0.3)):
        (reduction,) = (s for s in spans_of(document, "reduction") if s.name == BLOCKS[-1])
        (wait,) = (s for s in spans_of(document, "reduce wait") if s.name == BLOCKS[-1])
        assert reduction.begin < reduction.end < wait.begin - 100 * MILLION


def test_micro_batches_are_one_step(ranks, tmp_path):
    for file, *_ in ranks(2, train, tmp_path, 2, 2, micro=3):
        document = kept(file)
        assert len(spans_of(document, "step")) == 2
        forwards = [s for s in spans_of(document, "forward") if s.name == "root"]
        assert len(forwards) == 6
        for step in spans_of(document, "step"):
            assert sum(step.begin <= s.begin < s.end <= step.end for s in forwards) == 3


def test_one_rank_writes_to_the_given_name(ranks, tmp_path):
    (document,) = map(kept, ranks(1, train_alone, tmp_path))
    assert not spans_of(document, "gather", "reduction")
    (trace,) = chrome.traces_of(document)
    assert breakdown.overlap_of([breakdown.steps_of(trace, 1)]) is None
    assert "overlap: none" in report([trace], 1, None)


def train_alone(folder):
    model, opt = transformer(3)
    with zerocore.trace(str(folder / "out.json"), model) as file:
        for number in range(2):
            sharded.step(model, opt, "transformer", number)
    assert file == folder / "out.json"
    return file


def recompute(folder, reentrant):
    net = scenarios.Net()
    net.reentrant = reentrant
    model = zerocore.shard(net, 3, units=scenarios.SCENARIOS["checkpoint"].units)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with zerocore.trace(folder / "out.json", model) as file:
        for step in range(2):
            x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
            model(x).square().sum().backward()
            opt.step()
            opt.zero_grad()
    return file


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_block_is_recomputed(ranks, tmp_path, reentrant):
    for document in map(kept, ranks(2, recompute, tmp_path, reentrant)):
        layers = {f"layers.{i}": 2 for i in range(3)}
        assert Counter(s.name for s in spans_of(document, "recompute")) == layers
        assert Counter(s.name for s in spans_of(document, "forward")) == layers | {"root": 2}
        backwards = spans_of(document, "backward")
        assert Counter(s.name for s in backwards) == layers | {"root": 2}
        roots = [s for s in backwards if s.name == "root"]
        for span in spans_of(document, "recompute"):
            assert reentrant or any(s.begin <= span.begin < span.end <= s.end for s in roots)
        (trace,) = chrome.traces_of(document)
        for step in breakdown.steps_of(trace, 0).steps:
            assert step.parts["recompute"] > 0


class Inside(torch.nn.Module):
    """Checkpoints what it computes in its own forward."""

    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)

    def forward(self, x):
        return checkpoint(lambda x: self.down(self.up(x).relu()), x, use_reentrant=False)


def recompute_inside(folder, reset):
    model = torch.nn.Sequential(*(Inside() for _ in range(3)))
    zerocore.shard(model, 3, units=[Inside])
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    if reset:
        model[1].register_forward_hook(lambda *_: zerocore.stats(model).reset())
    with zerocore.trace(folder / "out.json", model) as file:
        for _ in range(3):
            model(torch.ones(2, 8)).sum().backward()
            opt.step()
            opt.zero_grad()
    return file


def test_checkpointing_inside_of_a_unit(ranks, tmp_path):
    for document in map(kept, ranks(2, recompute_inside, tmp_path, False)):
        # Each of both layers, in each step; the unit's forward itself is done once.
        expected = {str(i): 3 * 2 for i in range(3)}
        assert Counter(s.name for s in spans_of(document, "recompute")) == expected
        (trace,) = chrome.traces_of(document)
        assert all(step.parts["recompute"] > 0 for step in breakdown.steps_of(trace, 0).steps)


def test_windows_whose_records_are_lost(ranks, tmp_path):
    whole = kept(ranks(2, recompute_inside, tmp_path, False)[0])
    cut = kept(ranks(2, recompute_inside, tmp_path, True)[0])
    (whole,), (cut,) = chrome.traces_of(whole), chrome.traces_of(cut)
    most = max(level for _, level in whole.windows)
    assert cut.about["lost_records"] > 0
    assert max(level for _, level in cut.windows) <= most and cut.windows[-1][1] == 0


def nested(folder):
    model = models.Transformer(depth=2)
    zerocore.shard(model.blocks[1], 3)
    zerocore.shard(model, 3, units=["blocks.0"])
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with zerocore.trace(folder / "out.json", model) as file:
        for number in range(2):
            sharded.step(model, opt, "transformer", number)
    return file


def test_models_in_a_model_are_traced(ranks, tmp_path):
    for document in map(kept, ranks(2, nested, tmp_path)):
        names = Counter(s.name for s in spans_of(document, "forward"))
        assert names == {"root": 2, "blocks.0": 2, "blocks.1": 2}
        assert len(spans_of(document, "optimizer")) == 2  # not one for each model
        outer = [s for s in spans_of(document, "forward") if s.name == "root"]
        for span in (s for s in spans_of(document, "forward") if s.name == "blocks.1"):
            assert any(s.begin <= span.begin and span.end <= s.end for s in outer)


def save_and_load(folder):
    model, opt = transformer(3)
    with zerocore.trace(folder / "out.json", model) as file:
        sharded.step(model, opt, "transformer", 0)
        zerocore.save(folder / "saved", model, opt)
        sharded.step(model, opt, "transformer", 1)
        zerocore.load(folder / "saved", model, opt)
        zerocore.save(folder / "later", model, opt, async_=True).result()
        sharded.step(model, opt, "transformer", 2)
    return file


def test_checkpoints_are_a_part_of_their_own(ranks, tmp_path):
    for document in map(kept, ranks(2, save_and_load, tmp_path)):
        checkpoints = spans_of(document, "checkpoint")
        assert len(checkpoints) == 3
        (trace,) = chrome.traces_of(document)
        first, second, third = breakdown.steps_of(trace, 0).steps
        assert first.parts["checkpoint"] == 0
        assert second.parts["checkpoint"] > 0 and third.parts["checkpoint"] > 0
        assert sum(s.parts["checkpoint"] for s in (second, third)) <= sum(
            span.end - span.begin for span in checkpoints
        )


def raise_in(folder, where):
    net = scenarios.Net()
    model = zerocore.shard(net, 3, units=["layers.0", "layers.1", "layers.2"])
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    kind = {"forward": KeyError, "backward": KeyError, "loop": ZeroDivisionError}[where]
    with pytest.raises(kind), zerocore.trace(folder / "out.json", model):
        for step in range(3):
            net.fail = where if step == 2 else ""
            model(torch.ones(3, 4)).square().sum().backward()
            opt.step()
            opt.zero_grad()
        raise ZeroDivisionError("in the loop")
    net.fail = ""
    with zerocore.trace(folder / "again.json", model) as file:
        model(torch.ones(3, 4)).square().sum().backward()
    return folder / f"out.rank{dist.get_rank()}.json", file, kind.__name__


@pytest.mark.parametrize("where", ["forward", "backward", "loop"])
def test_a_block_that_raises_is_written_and_its_error_goes_on(ranks, tmp_path, where):
    for file, later, kind in ranks(2, raise_in, tmp_path, where):
        failed, again = kept(file), kept(later)
        (trace,) = chrome.traces_of(failed)
        assert trace.about["error"].startswith(kind)
        assert len(spans_of(failed, "step")) == (3 if where == "loop" else 2)
        assert len([s for s in spans_of(failed, "forward") if s.name == "root"]) == 3
        assert kind in report([trace], 1, None)
        assert [s.name for s in spans_of(again, "forward")][0] == "root"
        assert not spans_of(again, "step", "optimizer")


def overrun(folder):
    model, opt = transformer(3)
    log = zerocore.registry.require_sharded(model, "test")[0].groups.journal.log
    with zerocore.trace(folder / "out.json", model) as file:
        for number in range(4):
            sharded.step(model, None, "transformer", number)
            for _ in range(20_000 if number == 2 else 0):
                log.add("need", "nothing", "idle")
            opt.step()
            opt.zero_grad()
    return file


def test_lost_records_are_told_and_their_step_left_out(ranks, tmp_path):
    for document in map(kept, ranks(2, overrun, tmp_path)):
        (trace,) = chrome.traces_of(document)
        assert 20_000 - 16_384 <= trace.about["lost_records"] < 4_000
        lost = [s.args["number"] for s in trace.spans if s.kind == "step" and "lost" in s.args]
        assert lost == [3]
        assert [s.number for s in breakdown.steps_of(trace, 0).steps] == [1, 2, 4]
        text = report([trace], 1, None)
        assert f"{trace.about['lost_records']:,} records lost" in text
        assert "1 step left out" in text


def refused(folder):
    model, _ = transformer(3)

    def attempt(path, *args, **kwargs):
        with zerocore.trace(path, *args, **kwargs):
            raise AssertionError("the block runs")

    with pytest.raises(ValueError, match=r"zerocore\.trace: expected a model .* got Linear"):
        attempt(folder / "out.json", nn.Linear(2, 2))
    with pytest.raises(ValueError, match="tokens: expected a positive number, got 0"):
        attempt(folder / "out.json", model, tokens=0)
    with pytest.raises(ValueError, match="flops: expected a positive number, got inf"):
        attempt(folder / "out.json", model, flops=float("inf"))
    with pytest.raises(ValueError, match="flops: expected a positive number, got 'many'"):
        attempt(folder / "out.json", model, flops="many")
    with pytest.raises(FileNotFoundError, match=r"expected a file in a folder that exists, got .*"):
        attempt(folder / "missing" / "out.json", model)
    (folder / f"file{dist.get_rank()}").touch()
    with pytest.raises(FileNotFoundError, match="make .* first"):
        attempt(folder / f"file{dist.get_rank()}" / "out.json", model)
    with pytest.raises(OSError, match="expected a folder that can be written to, got /proc"):
        attempt("/proc/out.json", model)
    (folder / f"out.rank{dist.get_rank()}.json").mkdir()
    with pytest.raises(IsADirectoryError, match="expected a file such as out.json, got the folder"):
        attempt(folder / "out.json", model)
    with zerocore.trace(folder / "first.json", model):
        with pytest.raises(RuntimeError, match="expected one trace at a time, got a second one"):
            attempt(folder / "second.json", model)
    assert not list(folder.glob("second*"))
    with contextlib.suppress(AssertionError):
        attempt(folder / "third.json", model)


def test_what_cannot_be_traced_is_refused_at_once(ranks, tmp_path):
    ranks(2, refused, tmp_path)


# ---- spans, by hand ----------------------------------------------------------------------------


def test_lanes_have_no_spans_that_overlap_without_nesting():
    spans = [Span("gather", str(i), *t) for i, t in enumerate([(0, 5), (1, 3), (2, 6), (5, 9)])]
    assert [lane for _, lane in chrome.nested(spans)] == [0, 0, 1, 0]
    assert [lane for _, lane in chrome.nested([Span("gather", "", 4, 4)] * 2)] == [0, 0]


def test_steps_end_with_the_last_optimizer_before_a_forward():
    times = [
        ("optimizer", 1, 2),  # without a forward before it
        ("forward", 10, 20),
        ("forward", 30, 40),
        ("optimizer", 50, 55),
        ("optimizer", 60, 65),  # another optimizer of the same step
        ("forward", 80, 90),
        ("optimizer", 95, 99),
        ("forward", 110, 120),  # a step that does not end
    ]
    found = steps_of([Span(kind, "", b, e) for kind, b, e in times], False, [(56, 58)])
    assert [(s.kind, s.begin, s.end) for s in found] == [
        ("data", 0, 10),
        ("step", 10, 65),
        ("data", 65, 80),
        ("step", 80, 99),
    ]
    assert [s.args.get("lost", False) for s in found] == [True, True, False, False]


def moments(*records):
    """(sequence, event, kind, unit, phase, time[, recoveries])"""
    return [
        Moment(sequence, event, kind, unit, 8, "Float", phase, time, 1, *(rest or [0]), -1)
        for sequence, event, kind, unit, phase, time, *rest in records
    ]


def test_records_that_are_missing_end_nothing():
    model = Model("", "m", {"a": 10}, gathers=True, reduces=True, on_device=False)
    found = Reader(model, 5).read(
        moments(
            (5, "launch", "all_gather", "a", "forward", 1),
            (6, "begin", "compute", "a", "forward", 2),
            (9, "end", "compute", "a", "forward", 30),
            (10, "done", "all_gather", "a", "forward", 31),
            (11, "begin", "compute", "a", "backward", 40),
            (12, "raise", "compute", "a", "backward", 45),
            (13, "begin", "compute", "a", "forward", 50, 1),
            (14, "release", "window", "a", "forward", 52, 1),
        ),
        60,
    )
    assert found.lost == 2 and found.gaps == [(2, 30)]
    assert [(s.kind, s.begin, s.end) for s in found.spans] == [
        ("backward", 40, 45),
        ("forward", 50, 60),
    ]
    assert found.spans[0].args["failed"] and found.spans[1].args["unfinished"]
    assert found.leases == [(1, 10), (30, -10)]


def test_a_forward_begins_with_the_gather_of_the_root():
    model = Model("", "m", {"": 10}, gathers=True, reduces=True, on_device=False)
    found = Reader(model, 1).read(
        moments(
            (1, "need", "window", "", "forward", 10),
            (2, "launch", "all_gather", "", "forward", 11),
            (3, "wait", "all_gather", "", "forward", 12),
            (4, "done", "all_gather", "", "forward", 20),
            (5, "begin", "compute", "", "forward", 21),
            (6, "begin", "compute", "a", "forward", 22),
            (7, "end", "compute", "a", "forward", 29),
            (8, "end", "compute", "", "forward", 30),
        ),
        40,
    )
    assert [(s.kind, s.name, s.begin, s.end) for s in found.spans] == [
        ("gather wait", "root", 12, 20),
        ("gather", "root", 11, 20),
        ("forward", "a", 22, 29),
        ("forward", "root", 10, 30),
    ]


def test_a_reduction_may_be_over_before_its_launch_is_logged():
    model = Model("", "m", {}, gathers=True, reduces=True, on_device=False)
    found = Reader(model, 1).read(
        moments(
            (1, "finish", "reduce", "a", "backward", 10),
            (2, "launch", "reduce", "a", "backward", 11),
            (3, "launch", "reduce", "b", "backward", 12),
            (4, "finish", "reduce", "b", "backward", 15),
            (5, "wait", "reduce", "a", "backward", 20),
            (6, "done", "reduce", "a", "backward", 21),
            (7, "wait", "reduce", "b", "backward", 22),
            (8, "done", "reduce", "b", "backward", 23),
        ),
        40,
    )
    reductions = [(s.name, s.begin, s.end) for s in found.spans if s.kind == "reduction"]
    assert reductions == [("a", 11, 11), ("b", 12, 15)]
