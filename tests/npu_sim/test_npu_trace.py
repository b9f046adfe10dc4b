"""Traces on fake NPUs: the device's own times."""

import json
from collections import Counter

import models
import pytest
import torch
from device_training import OPTIMIZERS, batch, build, device_of_ranks, loss_of

import zerocore
from zerocore.tracing import breakdown, chrome
from zerocore.tracing.report import report

STEPS = 4
UNITS = ["root", *models.BLOCKS]


def train(folder, stage):
    """This rank's file, and what the host waited for in the steps."""
    import torch_npu

    model = build("transformer", stage)
    opt = OPTIMIZERS["zerocore"](model.parameters())
    stats = zerocore.stats(model)
    parts = [batch("transformer", step) for step in range(STEPS)]
    with zerocore.trace(folder / "out.json", model) as file:
        for step, part in enumerate(parts):
            if step == 1:  # the first one makes the optimizer's state
                torch_npu._C.take_waits()
                stats.reset()
            opt.zero_grad()
            loss_of(model, part).backward()
            opt.step()
        waits = torch_npu._C.take_waits()
        launched = Counter(r.kind for r in stats.log if r.event == "launch")
    assert device_of_ranks().type == "npu"
    torch.accelerator.synchronize()
    assert all(record.device_times is None for record in stats.log)
    return file, waits, launched


def traced(file):
    document = json.loads(file.read_text())
    lanes = {e["args"]["name"] for e in document["traceEvents"] if e["name"] == "thread_name"}
    (trace,) = chrome.traces_of(document)
    return trace, lanes


@pytest.mark.parametrize("stage", [2, 3])
def test_the_device_has_lanes_of_its_own(npus, tmp_path, stage):
    for file, waits, launched in npus(2, train, tmp_path, stage):
        assert not waits, "tracing makes the host wait"
        trace, lanes = traced(file)
        assert trace.about["untimed_records"] == 0
        for name in ("compute", "waits", "gathers", "reductions", "steps"):
            assert f"{name} (device)" in lanes
        assert not lanes & {"gathers", "reductions"}, "what the host sees is not their time"
        spans = [span for span in trace.spans if span.device]
        once = dict.fromkeys(UNITS, STEPS)
        for kind in ("forward", "backward"):
            assert Counter(s.name for s in spans if s.kind == kind) == once, kind
        for kind, of in ("gather", "all_gather"), ("reduction", "reduce"):
            # Collectives of one launch are one span, which names them all.
            names = [name for s in spans if s.kind == kind for name in s.name.split(", ")]
            assert launched[of] <= len(names), kind
            assert set(names) == set(UNITS)
        steps = [s for s in spans if s.kind == "step"]
        assert [s.args["number"] for s in steps] == [1, 2, 3, 4]
        host = [s for s in trace.spans if s.kind == "step" and not s.device]
        # A step ends on the device after the host has begun to enqueue it.
        assert all(d.end >= h.begin - 1_000_000 for d, h in zip(steps, host, strict=True))


@pytest.mark.parametrize("stage", [2, 3])
def test_the_report_is_of_the_device(npus, tmp_path, stage):
    results = npus(2, train, tmp_path, stage)
    traces = [traced(file)[0] for file, *_ in results]
    for trace in traces:
        for step in breakdown.steps_of(trace, 1).steps:
            assert sum(step.parts.values()) == step.total > 0
            assert step.parts["forward"] > 0 and step.parts["backward"] > 0
            assert step.parts["optimizer"] > 0
            assert 0 <= step.exposed <= step.communication
            assert step.communication > 0
    assert "times on the device" in report(traces, 1, None)


def test_a_wait_ends_with_the_gather_that_it_is_for(npus, tmp_path):
    slack = 50_000  # nanoseconds
    for file, *_ in npus(2, train, tmp_path, 3):
        trace, _ = traced(file)
        spans = [span for span in trace.spans if span.device]
        gathers = [s for s in spans if s.kind == "gather"]
        waits = [s for s in spans if s.kind == "gather wait" and s.end - s.begin > slack]
        for wait in waits:
            ends = [s.end for s in gathers if wait.name in s.name.split(", ")]
            assert any(end <= wait.end + slack for end in ends)
        # What is computed comes after the gather of its window, which the root's forward contains.
        for span in spans:
            if span.kind in ("forward", "backward") and span.name != "root":
                names = [s for s in gathers if span.name in s.name.split(", ")]
                assert any(s.end <= span.begin + slack for s in names), span
