"""What a step sends, exactly: by our own count and by what the profiler sees handed to gloo."""

import contextlib

import models
import pytest
import sharded
import torch
import torch.distributed as dist

import zerocore

MOVES = ("all_gather", "reduce_scatter", "all_reduce")


def count(stage, micro_batches=1, sync_all=True, frozen=False, **options):
    """Traffic and launches of the third step."""
    job = "transformer"
    torch.manual_seed(0)
    model = models.build(job)
    if frozen:
        for parameter in model.blocks[1].parameters():
            parameter.requires_grad_(False)
    shapes = {name: p.numel() for name, p in model.named_parameters()}
    zerocore.shard(model, stage, units=models.BLOCKS, **options)
    opt = zerocore.AdamW(model.parameters(), lr=1e-2)

    def run(number):
        for micro in range(micro_batches):
            last = micro == micro_batches - 1
            with contextlib.nullcontext() if sync_all or last else zerocore.no_sync(model):
                part = models.batch(job, dist.get_rank(), number * micro_batches + micro)
                models.loss_of(model, part).backward()
        opt.step()
        opt.zero_grad()

    run(0), run(1)
    zerocore.stats(model).reset()
    with sharded.Sent() as sent:
        run(2)
    stats = zerocore.stats(model)
    launches = [(r.kind, r.unit, r.elements) for r in stats.log if r.event == "launch"]
    traffic = {kind: tuple(moved) for kind, moved in stats.collectives.items()}
    return traffic, launches, dict(stats.units), sent.elements, shapes


def times_gathered(launches, kind):
    """How often each unit appears among the launches of a kind."""
    counts = {}
    for launched, unit, _ in launches:
        if launched.startswith(kind):
            counts[unit] = counts.get(unit, 0) + 1
    return counts


def check(report, size, gathers, reductions):
    """`gathers` and `reductions`: how often each unit's buffer moves in the step."""
    traffic, launches, units, sent, _ = report
    moved = {name: units[name].padded * (size - 1) // size for name in units}
    assert times_gathered(launches, "all_gather") == {k: v for k, v in gathers.items() if v}
    assert times_gathered(launches, "reduce") == {k: v for k, v in reductions.items() if v}
    gathered = sum(moved[name] * times for name, times in gathers.items())
    reduced = sum(moved[name] * times for name, times in reductions.items())
    elements = {kind: traffic[kind][1] for kind in MOVES if kind in traffic}
    assert elements.get("all_gather", 0) == gathered
    assert elements.get("reduce_scatter", 0) == reduced
    assert elements.get("all_reduce", 0) == 0
    # Each round of the agreements on the host is a message of a byte an element.
    assert sent == gathered + reduced + traffic["control"][1] * (size - 1).bit_length()
    for kind in elements:
        assert traffic[kind][2] == 4 * elements[kind], "bytes of float32"


UNITS = ["", *models.BLOCKS]
ONCE = dict.fromkeys(UNITS, 1)


@pytest.mark.parametrize("size", [2, 3])
def test_padding_is_that_of_the_layout(ranks, size):
    for stage in (1, 3):
        for _, _, units, _, shapes in ranks(size, count, stage):
            assert set(units) == set(UNITS)
            for name in UNITS:
                own = [
                    numel
                    for parameter, numel in shapes.items()
                    if (parameter.startswith(name + ".") if name else "blocks" not in parameter)
                ]
                assert units[name].parameters == sum(own)
                assert (units[name].padded, units[name].shard) == sharded.padded(own, size)


@pytest.mark.parametrize("size", [2, 3])
def test_stage_0_all_reduces_once(ranks, size):
    for traffic, launches, units, sent, _ in ranks(size, count, 0):
        total = sum(unit.padded for unit in units.values())
        assert {k: traffic[k][1] for k in MOVES if k in traffic} == {
            "all_reduce": 2 * total * (size - 1) // size
        }
        agreed = traffic["control"][1] * (size - 1).bit_length()
        assert sent == 2 * total * (size - 1) // size + agreed
        assert times_gathered(launches, "reduce") == ONCE


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("stage", [1, 2])
def test_stages_1_and_2_move_2(ranks, stage, size):
    for report in ranks(size, count, stage):
        check(report, size, ONCE, ONCE)


@pytest.mark.parametrize("size", [2, 3])
def test_stage_3_moves_3_or_2(ranks, size):
    for report in ranks(size, count, 3):
        # Neither the root nor the last unit before backward is resharded in between.
        check(report, size, {"": 1, "blocks.0": 2, "blocks.1": 2, "blocks.2": 1}, ONCE)
    for report in ranks(size, count, 3, reshard_after_forward=False):
        check(report, size, ONCE, ONCE)


@pytest.mark.parametrize("micro", [2, 3])
def test_micro_batches(ranks, micro):
    often = dict.fromkeys(UNITS, micro)
    for report in ranks(2, count, 1, micro, sync_all=False):
        check(report, 2, ONCE, ONCE)  # 2, whatever the number of micro-batches
    for report in ranks(2, count, 2, micro):
        check(report, 2, ONCE, often)  # k + 1
    for report in ranks(2, count, 3, micro):
        gathers = {"": micro, "blocks.0": 2 * micro, "blocks.1": 2 * micro, "blocks.2": micro}
        check(report, 2, gathers, often)  # 3k
    for traffic, _, units, sent, _ in ranks(2, count, 0, micro, sync_all=False):
        assert traffic["all_reduce"][1] == sum(unit.padded for unit in units.values())
        assert sent == traffic["all_reduce"][1] + traffic["control"][1]


def test_frozen_units_are_gathered_and_never_reduced(ranks):
    for report in ranks(2, count, 3, frozen=True):
        gathers = {"": 1, "blocks.0": 2, "blocks.1": 2, "blocks.2": 1}
        check(report, 2, gathers, {"": 1, "blocks.0": 1, "blocks.2": 1})


def count_bf16(stage, reduce):
    """Bytes of a step under mixed precision."""
    precision = zerocore.MixedPrecision(param=torch.bfloat16, reduce=reduce)
    model = sharded.shard("transformer", stage, mixed_precision=precision)
    opt = zerocore.AdamW(model.parameters())
    for number in range(2):
        zerocore.stats(model).reset()
        sharded.step(model, opt, "transformer", number)
    stats = zerocore.stats(model)
    return {k: v for k, v in stats.collectives.items() if k in MOVES}, dict(stats.units)


@pytest.mark.parametrize("reduce", [None, torch.float32])
def test_bf16_halves_the_bytes(ranks, reduce):
    for traffic, units in ranks(2, count_bf16, 2, reduce):
        half = sum(unit.padded for unit in units.values()) // 2
        assert traffic["all_gather"][1:] == (half, 2 * half)
        assert traffic["reduce_scatter"][1:] == (half, (2 if reduce is None else 4) * half)


def count_no_grad():
    """Gathers of a forward without gradients at stages 1 (nothing to refresh) and 3."""
    gathered = {}
    for stage in (1, 3):
        model = sharded.shard("transformer", stage)
        opt = zerocore.AdamW(model.parameters())
        sharded.step(model, opt, "transformer", 0)
        x, _ = models.batch("transformer", dist.get_rank(), 1)
        with torch.no_grad():
            model(x)
            zerocore.stats(model).reset()
            model(x)
        launches = [(r.kind, r.unit, 0) for r in zerocore.stats(model).log if r.event == "launch"]
        gathered[stage] = times_gathered(launches, "all_gather")
    return gathered


def test_forwards_without_gradients(ranks):
    assert ranks(2, count_no_grad) == [{1: {}, 3: ONCE}] * 2


def count_broadcast():
    """Broadcast traffic of shard(), and control traffic of later steps."""
    model = sharded.shard("transformer", 3)
    total = sum(p.numel() for p in models.build("transformer").parameters())
    traffic = zerocore.stats(model).collectives
    return traffic["broadcast"].elements, total


def test_shard_broadcasts_every_parameter_once(ranks):
    for sent, total in ranks(2, count_broadcast):
        assert total <= sent < 2 * total
