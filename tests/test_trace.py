"""Traces of training: what is recorded, how ranks are put on one clock, and what a report says."""

import builtins
import contextlib
import copy
import json
import shutil
import time
from collections import Counter

import models
import pytest
import scenarios
import sharded
import torch
import torch.distributed as dist
from torch import nn

import zerocore
from zerocore import __main__ as commands
from zerocore.tracing import breakdown, chrome
from zerocore.tracing.files import ranks_beside
from zerocore.tracing.merging import aligned, merge, read
from zerocore.tracing.reader import Model, Moment, Reader
from zerocore.tracing.report import report
from zerocore.tracing.spans import KINDS, Span, Trace, steps_of

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


# ---- several ranks -----------------------------------------------------------------------------


def sleep_in_forward(folder, seconds):
    model, opt = transformer(3)
    if dist.get_rank() == 1:
        model.blocks[1].register_forward_hook(lambda *_: time.sleep(seconds))
    with zerocore.trace(folder / "out.json", model, tokens=18):
        for number in range(5):
            sharded.step(model, opt, "transformer", number)


@pytest.fixture(scope="session")
def slow(ranks, tmp_path_factory):
    """A folder with the traces of two ranks, of which rank 1 sleeps in each forward."""
    folder = tmp_path_factory.mktemp("slow")
    ranks(2, sleep_in_forward, folder, 0.08)
    return folder


@pytest.fixture
def folder(slow, tmp_path):
    """A copy of it."""
    for file in slow.iterdir():
        shutil.copy(file, tmp_path)
    return tmp_path


def test_the_rank_that_sleeps_is_the_straggler(folder):
    traces = read(ranks_beside(folder / "out.json"))
    steps = [breakdown.steps_of(trace, 1) for trace in traces]
    straggler = breakdown.straggler_of(steps)
    assert straggler.rank == 1 and straggler.part == "forward"
    assert 30 * MILLION < straggler.more and 30 * MILLION < straggler.others - straggler.waits
    text = report(traces, 1, None)
    assert "straggler: rank 1 makes the others wait" in text
    assert breakdown.straggler_of(steps[:1]) is None
    alike = breakdown.RankSteps(0, steps[1].steps, 1, 0)
    assert breakdown.straggler_of([alike, steps[1]]) is None


def shifted(document, seconds):
    document = copy.deepcopy(document)
    for event in document["traceEvents"]:
        event["ts"] += seconds * 1e6
    return document


def documents(folder):
    return [json.loads((folder / f"out.rank{r}.json").read_text()) for r in range(2)]


def test_merging_puts_ranks_on_one_clock(folder):
    first, second = documents(folder)
    (a,), (b,) = chrome.traces_of(first), chrome.traces_of(second)
    before = merge([a, b])["zerocore"]["clocks"]["1"]
    (moved,) = chrome.traces_of(shifted(second, 3.25))
    merged = merge([moved, a])
    clock = merged["zerocore"]["clocks"]["1"]
    assert clock["by"] == "6 agreements"  # one a step, and one on the order of reductions
    assert clock["shift_seconds"] == pytest.approx(before["shift_seconds"] - 3.25, abs=1e-6)
    ends = [
        [s.end for s in trace.spans if s.kind == "agreement"] for trace in chrome.traces_of(merged)
    ]
    apart = sorted(abs(x - y) for x, y in zip(*ends, strict=True))
    assert len(apart) == 6 and apart[len(apart) // 2] < 20 * MILLION
    # As any rank sees it, nothing has moved.
    for trace, single in zip(chrome.traces_of(merged), (a, b), strict=True):
        assert [s.end - s.begin for s in trace.spans] == [s.end - s.begin for s in single.spans]
        assert {s.kind for s in trace.spans} == {s.kind for s in single.spans}


def test_without_common_agreements_wall_clocks_are_taken(folder):
    (a,), (b,) = map(chrome.traces_of, documents(folder))
    b.spans = [span for span in b.spans if span.kind != "agreement"]
    b.about["wall_clock"] = a.about["wall_clock"] + 2.5
    _, clocks = aligned([a, b])
    assert clocks["1"] == {"by": "wall clocks", "shift_seconds": 2.5}


def test_one_agreement_that_a_rank_leaves_late_does_not_count():
    first, second = synthetic(), synthetic(1)
    for trace, ends in (first, (100, 200, 300)), (second, (160, 261, 900)):
        args = [{"what": "agreement", "place": ["m", 0, at]} for at in range(3)]
        spans = zip(ends, args, strict=True)
        trace.spans = [Span("agreement", "agreement", 0, end, False, a) for end, a in spans]
    _, clocks = aligned([first, second])
    assert clocks["1"]["shift_seconds"] == pytest.approx(-61e-9)
    assert clocks["1"]["largest_deviation_seconds"] == pytest.approx(539e-9)


def run(capsys, *arguments):
    code = commands.main(["trace", *map(str, arguments)])
    return code, *capsys.readouterr()


def test_the_commands_take_one_file_several_or_a_merged_one(folder, capsys):
    out, singles = folder / "out.json", [folder / f"out.rank{rank}.json" for rank in range(2)]
    code, by_name, _ = run(capsys, "report", out)
    assert code == 0 and "2 ranks, stage 3" in by_name
    assert run(capsys, "report", *singles) == (0, by_name, "")
    assert run(capsys, "merge", out)[0] == 0
    assert run(capsys, "report", out) == (0, by_name, "")
    assert run(capsys, "merge", *singles, "-o", folder / "other.json")[0] == 0
    assert (folder / "other.json").read_text() == out.read_text()
    assert run(capsys, "merge", out, "-o", folder / "again.json")[0] == 0
    assert (folder / "again.json").read_text() == out.read_text()
    code, one, _ = run(capsys, "report", singles[1])
    assert code == 0 and "1 of 2 ranks (1)" in one
    assert "if all 2 ranks have as many" in one and "not known of one rank's trace" in one


def test_files_that_do_not_fit_are_refused(folder, capsys):
    first, second = (folder / f"out.rank{rank}.json" for rank in range(2))
    bad = folder / "bad.json"

    def error(*arguments):
        code, printed, text = run(capsys, *arguments)
        assert code == 2 and not printed
        return text

    assert "expected each rank once, got rank 0 in" in error("report", first, first)
    assert "expected to read" in error("report", folder / "nothing.json")
    bad.write_text("{")
    assert "expected JSON in" in error("report", bad)
    bad.write_text('{"traceEvents": []}')
    assert "expected a trace that zerocore.trace wrote" in error("merge", bad, "-o", bad)
    document = json.loads(second.read_text())
    for what, text in ("run", "another run"), ("world", "another number of ranks"):
        changed = copy.deepcopy(document)
        changed["zerocore"]["ranks"][0][what] = "other"
        bad.write_text(json.dumps(changed))
        assert text in error("report", first, bad)
    document["zerocore"]["ranks"][0]["models"][0]["units"] = {"": 1}
    bad.write_text(json.dumps(document))
    assert "another models" in error("merge", first, bad, "-o", bad)
    del document["traceEvents"][-1]["ts"]
    bad.write_text(json.dumps(document))
    assert "got a damaged one" in error("report", bad)
    assert "expected complete steps of every rank" in error("report", first, "--skip", "5")
    assert "-o: expected where to write to" in error("merge", first, second)
    assert run(capsys, "merge", first, second, "-o", folder / "missing" / "out.json")[0] == 1
    assert run(capsys, "merge", first, second, "-o", folder)[0] == 1
    with pytest.raises(SystemExit):
        run(capsys, "report", first, "--peak-flops", "-1")


def test_a_picture_is_drawn(folder, capsys):
    pytest.importorskip("matplotlib")
    png = folder / "out.png"
    assert run(capsys, "report", folder / "out.json", "--png", png)[0] == 0
    assert png.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_without_matplotlib_it_is_said_how_to_get_it(folder, capsys, monkeypatch):
    actual = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError("no module named matplotlib")
        return actual(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    code, _, text = run(capsys, "report", folder / "out.json", "--png", folder / "out.png")
    assert code == 1 and "pip install 'zerocore[plot]'" in text


# ---- numbers, by hand --------------------------------------------------------------------------


def about(rank=0, **facts):
    model = {"name": "", "stage": 3, "units": {"": 100}, "dtypes": ["torch.float32"]}
    return {
        "rank": rank,
        "world": 2,
        "run": "r",
        "wall_clock": 0.0,
        "models": [model],
        "parameters": 1000,
        "on_device": False,
        "tokens": 50,
        "flops": None,
        "lost_records": 0,
        "untimed_records": 0,
        "error": None,
        **facts,
    }


def synthetic(rank=0, slow=0, **facts):
    """One step of 100 ms (`slow`: that much more forward, less waiting), in milliseconds."""
    spans = [
        ("data", 0, 10),
        ("step", 10, 100),
        ("forward", 10, 40 + slow),
        ("forward", 12, 30 + slow),  # a unit inside of the root
        ("gather", 9, 16),
        ("gather", 14, 20),
        ("gather wait", 12, 16),
        ("backward", 45 + slow, 90),
        ("recompute", 50 + slow, 57 + slow),
        ("gather wait", 50 + slow, 52 + slow),  # for the recomputation
        ("gather", 49 + slow, 52 + slow),
        ("reduction", 70, 86),
        ("agreement", 74 + slow, 80),
        ("reduce wait", 81, 86),
        ("optimizer", 90, 97),
        ("checkpoint", 97, 99),
    ]
    args = {"number": 1}
    found = [Span(k, "", b * MILLION, e * MILLION, False, args) for k, b, e in spans]
    return Trace(about(rank, **facts), found, [])


def test_the_breakdown_of_a_step_by_hand():
    (step,) = breakdown.steps_of(synthetic(), 0).steps
    assert {part: time / MILLION for part, time in step.parts.items()} == {
        "data": 10,
        "forward": 30 - 4,
        "gather wait": 4 + 2,
        "recompute": 7 - 2,
        "backward": 45 - 7 - 6 - 5,
        "reduce wait": 6 + 5,
        "optimizer": 7,
        "checkpoint": 2,
        "other": 5 + 1,
    }
    assert sum(step.parts.values()) == step.total == 100 * MILLION
    assert step.communication == (11 + 3 + 16) * MILLION  # gathers that overlap count once
    assert step.exposed == (4 + 2 + 5) * MILLION
    overlap = breakdown.overlap_of([breakdown.steps_of(synthetic(), 0)])
    assert overlap == pytest.approx(1 - 11 / 30)


def test_a_report_by_hand():
    text = report([synthetic(), synthetic(1, slow=6)], 0, 1e7)
    lines = {line.split("  ")[0]: line.split()[-4:] for line in text.splitlines()}
    assert lines["forward"] == ["29.0", "%", "26.000", "32.000"]
    assert lines["reduce wait"] == ["8.0", "%", "11.000", "5.000"]
    assert lines["step"] == ["100.0", "%", "100.000", "100.000"]
    assert "step time: mean 100.000 ms, p50 100.000 ms, p99 100.000 ms" in text
    assert "overlap: at most 63.3 % of 30.000 ms" in text and "11.000 ms are exposed" in text
    assert "rank 1 makes the others wait: in a step it waits 11.000 ms, they 17.000 ms" in text
    assert "its forward takes 6.000 ms longer" in text
    assert "tokens/s: 1,000 of all ranks" in text
    # 6 * 1000 parameters * 50 tokens in 0.1 s, of 1e7 FLOP/s
    assert "utilisation: 30.00 % of 1e+07 FLOP/s, assuming 6 FLOPs" in text
    many = report([synthetic(rank, slow=rank % 2, world=9) for rank in range(9)], 0, None)
    row = next(line.split() for line in many.splitlines() if line.startswith("forward"))
    assert row == ["forward", "26.444", "26.4", "%", "26.000", "27.000"]
    assert "least        most" in many and "straggler: none" in many
    given = report([synthetic(flops=2e5)], 0, 1e7)
    assert "utilisation: 20.00 % of 1e+07 FLOP/s, FLOPs as given" in given
    nothing = report([synthetic(tokens=None)], 0, 1e7)
    assert "utilisation: not known" in nothing and "tokens/s" not in nothing


def test_percentiles():
    values = [4.0, 1.0, 3.0, 2.0]
    assert breakdown.percentile(values, 50) == 2.5
    assert breakdown.percentile(values, 99) == pytest.approx(3.97)
    assert breakdown.percentile([7.0], 99) == 7.0


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
    assert found.leases == [(1, 10), (52, -10)]


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
