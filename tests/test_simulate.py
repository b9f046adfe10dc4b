"""Simulated steps, against schedules worked out by hand."""

import math

import pytest
import torch

from zerocore.planner.activity import Cost
from zerocore.planner.advice import Workload, candidates, fits, merge, recommend
from zerocore.planner.guess import gpt_of
from zerocore.planner.machine import Machine
from zerocore.planner.schedule import Call, default_calls, rehearse
from zerocore.planner.setting import Setting
from zerocore.planner.simulate import Task, run, simulate
from zerocore.planner.sizes import FlatSize, ModelSizes, UnitSize

ELEMENTS = 1600  # of a unit: no padding for 2 ranks


def equal_units(count, elements=ELEMENTS):
    flat = FlatSize((elements,), torch.float32, trainable=True)
    return ModelSizes(
        (
            UnitSize("", ()),
            *(UnitSize(f"u{i}", (flat,), last=i, first_trained=i) for i in range(count)),
        )
    )


def costs_of(schedule, forward, backward):
    """Every unit alike; the root takes nothing."""
    return [
        Cost(flops=0.0 if call.unit == 0 else forward if call.phase == "forward" else backward)
        for call in schedule.calls
    ]


def simulated(stage, forward, backward, rate, count=3, ranks=2, **options):
    """A step on devices whose collectives send `rate` bytes/s; nothing but products costs time."""
    machine = Machine(1.0, rate, rate, 8, latency=0.0, intra_latency=0.0)
    sizes, setting = equal_units(count), Setting.of(stage, ranks, **options)
    schedule = rehearse(sizes, setting)
    return simulate(sizes, setting, schedule, machine, costs_of(schedule, forward, backward))


UNIT = 4 * ELEMENTS / 2  # bytes that a rank sends for a unit


def test_collectives_hidden_behind_computation():
    # Reductions of 1 s behind backwards of 5 s: only the last one is seen.
    timeline = simulated(0, 2.0, 5.0, rate=2 * UNIT)
    assert timeline.seconds == pytest.approx(3 * 2 + 3 * 5 + 1)
    assert timeline.communication == pytest.approx(3) and timeline.exposed == pytest.approx(1)


def test_a_slow_network_is_what_bounds():
    # Each reduction takes 10 s; they follow each other from the end of the first backward.
    timeline = simulated(0, 2.0, 5.0, rate=UNIT / 5)
    assert timeline.seconds == pytest.approx(3 * 2 + 5 + 3 * 10)


def test_stages_1_and_2_gather_before_the_forward():
    # Three gathers of 1 s: the first is waited for, the rest hides.
    for stage in (1, 2):
        timeline = simulated(stage, 2.0, 5.0, rate=UNIT)
        assert timeline.seconds == pytest.approx(1 + 3 * 2 + 3 * 5 + 1)


def test_stage_3_gathers_one_ahead():
    # Forward: the first gather (1 s) is seen, the next ones hide behind 2 s of computation. The
    # last unit stays; in backward two more gathers hide, and one reduction is seen.
    timeline = simulated(3, 2.0, 5.0, rate=UNIT)
    assert timeline.seconds == pytest.approx(1 + 3 * 2 + 3 * 5 + 1)
    assert timeline.communication == pytest.approx(3 + 2 + 3)
    # Where a gather takes as long as two forwards, each is waited for.
    slow = simulated(3, 2.0, 5.0, rate=UNIT / 4)
    assert slow.seconds > timeline.seconds + 2 * 2


def test_shared_cores():
    # Two ranks on one core: everything takes twice as long, and nothing hides behind anything.
    machine = Machine(1.0, UNIT, UNIT, 2, latency=0.0, intra_latency=0.0, cores=1)
    sizes, setting = equal_units(3), Setting.of(0, 2)
    schedule = rehearse(sizes, setting)
    timeline = simulate(sizes, setting, schedule, machine, costs_of(schedule, 2.0, 5.0))
    assert timeline.seconds == pytest.approx(2 * (3 * 2 + 3 * 5 + 3 * 2))


def test_collectives_share_links():
    machine = Machine(1.0, 1.0, 1.0, ranks_per_node=1)
    first, second = Task("gather", 4.0, link="intra"), Task("reduce", 1.0, link="intra")
    run([first, second], machine)
    assert (second.end, first.end) == (2.0, 5.0)
    second.link = "network"
    run([first, second], machine)
    assert (second.end, first.end) == (1.0, 4.0)


def test_processor_sharing():
    first, second = Task("compute", 4.0), Task("gather", 1.0)
    third = Task("compute", 1.0, [second])
    machine = Machine(1.0, 1.0, 1.0, ranks_per_node=1, cores=1)
    run([first, second, third], machine)
    assert (second.end, first.end, third.end) == (2.0, 5.0, 6.0)


def test_costs_of_levels():
    machine = Machine(1.0, 100.0, 1000.0, ranks_per_node=4, latency=0.1, intra_latency=0.01)
    assert machine.gather_seconds(1000, 1) == 0
    assert machine.gather_seconds(1000, 4) == pytest.approx(0.75 + 3 * 0.01)
    # Two nodes: each receives half of the buffer over the network.
    assert machine.gather_seconds(1000, 8) == pytest.approx(5.0 + 0.1 + 6 * 0.01)
    # Four groups, one rank of each on a node, share the network.
    assert machine.gather_seconds(1000, 2, stride=4) == pytest.approx(20.0 + 0.1)
    assert machine.gather_seconds(1000, 2, stride=2) == pytest.approx(0.5 + 0.01)


def test_the_slower_link_is_avoided():
    """Ranks of a node share a copy where links between nodes are slow and memory allows."""
    machine = Machine(1e13, 1e9, 1e12, ranks_per_node=8)
    sizes = gpt_of(10**9)
    base = Setting.of(3, 64, launch_bytes=2**22)
    work = Workload(sizes, base, machine=machine, tokens=2048, memory=7e9)
    found = candidates(work)
    chosen = recommend(work, found)
    assert (chosen.setting.stage, chosen.setting.shards) == (3, 8)
    assert fits(work, chosen)
    whole = next(c for c in found if c.setting.stage == chosen.setting.stage)
    assert whole.setting.shards == 64 and whole.seconds > 1.02 * chosen.seconds


def test_the_lowest_stage_of_the_fast_ones():
    machine = Machine(1e12, 1e12, 1e12, ranks_per_node=8)
    work = Workload(gpt_of(10**8), Setting.of(3, 8), machine=machine, tokens=4096)
    assert recommend(work, candidates(work)).setting.stage == 0
    little = Workload(work.sizes, work.base, machine=machine, tokens=4096, memory=1.0)
    assert recommend(little, candidates(little)) is None


@pytest.mark.parametrize("parameters", [10**6, 7 * 10**9, 175 * 10**9])
def test_guessed_models_have_all_parameters(parameters):
    sizes = gpt_of(parameters)
    assert sizes.parameters == parameters
    depth = len(sizes.units) - 1
    width = math.sqrt(parameters / depth / 12)
    assert depth == 1 or 100 < width / depth < 160


def test_merged_units_keep_everything():
    sizes, _ = merge(equal_units(5), None, 2)
    assert [unit.parameters for unit in sizes.units] == [0, 3200, 3200, 1600]
    assert sizes.units[1].name == "u0..u1" and sizes.units[3].name == "u4"


def test_no_stage_is_left_out_of_calls():
    calls = default_calls(equal_units(2))
    assert calls[0] == Call(0, "forward", leaves=False)
    assert [call.unit for call in calls] == [0, 1, 2, 0, 0, 2, 1, 0]
    assert [call.unit for call in calls if call.reduces] == [2, 1, 0]


def test_budget_that_nothing_fits_in():
    setting = Setting.of(3, 2, max_window_bytes=100)
    with pytest.raises(ValueError, match="max_window_bytes: expected room for unit 1 of 6400"):
        rehearse(equal_units(2), setting)


def test_settings_that_cannot_be():
    with pytest.raises(ValueError, match="stage: expected 0, 1, 2 or 3, got 4"):
        Setting.of(4, 2)
    with pytest.raises(ValueError, match="group: expected a number that divides the 6 ranks"):
        Setting.of(3, 6, group=4)
    with pytest.raises(ValueError, match="shards: expected 1 at stage 0"):
        Setting(stage=0, shards=2)


@pytest.mark.parametrize("wrong", [0, -1.0, float("nan"), "fast", None])
def test_machines_that_cannot_be(wrong):
    with pytest.raises(ValueError, match="flops: expected a positive number"):
        Machine(wrong, 1.0, 1.0, ranks_per_node=2)
    with pytest.raises(ValueError, match="ranks_per_node: expected a positive number"):
        Machine(1.0, 1.0, 1.0, ranks_per_node=wrong)
