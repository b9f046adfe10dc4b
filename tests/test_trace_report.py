"""What is made of traces: ranks on one clock, and reports of where the time went."""

import builtins
import copy
import json
import shutil
import time

import pytest
import sharded
import torch.distributed as dist
from test_trace import MILLION, transformer

import zerocore
from zerocore import __main__ as commands
from zerocore.tracing import breakdown, chrome
from zerocore.tracing.files import ranks_beside
from zerocore.tracing.merging import aligned, merge, read
from zerocore.tracing.report import report
from zerocore.tracing.spans import Span, Trace

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
    assert "overlap: at most 63.3 % of the 30.000 ms" in text and "in 11.000 ms the rank" in text
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


DAMAGES = {
    "no world": lambda rank, events: rank.pop("world"),
    "not on_device": lambda rank, events: rank.pop("on_device"),
    "no models": lambda rank, events: rank["models"].clear(),
    "words": lambda rank, events: rank.update(tokens="many"),
    "no numbers": lambda rank, events: [e.get("args", {}).pop("number", None) for e in events],
    "no data": lambda rank, events: events.__setitem__(
        slice(None), [e for e in events if e.get("cat") != "data"]
    ),
    "no places": lambda rank, events: [e.get("args", {}).pop("place", None) for e in events],
    "no number": lambda rank, events: events[-1].update(ts=float("nan")),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_traces_are_told(folder, capsys, tmp_path, damage):
    bad = tmp_path / "bad.json"
    document = json.loads((folder / "out.rank1.json").read_text())
    DAMAGES[damage](document["zerocore"]["ranks"][0], document["traceEvents"])
    bad.write_text(json.dumps(document))
    code, printed, text = run(capsys, "report", folder / "out.rank0.json", bad)
    assert code == 2 and not printed and text.startswith("zerocore trace report: "), text
