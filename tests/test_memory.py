"""Resident bytes equal the formulas, padding included; windows stay within their limits."""

import models
import pytest
import reference
import scenarios
import sharded
import torch
import torch.distributed as dist

import zerocore


def storages(tensors):
    """Bytes of the distinct storages behind the tensors."""
    return sum({s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in tensors)}.values())


def measured(model, opt):
    """Bytes by category from the tensors that Python can see."""
    parameters = list(model.parameters())
    moments = [t for s in opt.state.values() for t in s.values() if torch.is_tensor(t)]
    return {
        "parameters": storages(parameters),
        "gradients": storages([p.grad for p in parameters if p.grad is not None]),
        "moments": storages([t for t in moments if t.dim() > 0 or t.numel() != 1]),
    }


def resident(stage, precision=None):
    """Resident bytes after backward, step and zero_grad, by stats and by the tensors' storages."""
    policy = None if precision is None else zerocore.MixedPrecision(param=precision)
    model = sharded.shard("transformer", stage, mixed_precision=policy)
    opt = zerocore.AdamW(model.parameters(), lr=1e-2)
    job, found, seen = "transformer", {}, {}
    for number in range(2):
        opt.zero_grad()
        x, target = models.batch(job, dist.get_rank(), number)
        out = model(x)
        found["forward"] = dict(zerocore.stats(model, opt).resident)
        models.loss_of(lambda _, out=out: out.float(), (x, target)).backward()
        found["backward"] = dict(zerocore.stats(model, opt).resident)
        opt.step()
    found["step"], seen["step"] = dict(zerocore.stats(model, opt).resident), measured(model, opt)
    with zerocore.no_sync(model):
        opt.zero_grad()
        found["zero_grad"] = dict(zerocore.stats(model, opt).resident)
        if stage < 2:
            models.loss_of(model, models.batch(job, 0, 9)).backward()
            found["no_sync"] = dict(zerocore.stats(model, opt).resident)
    model(models.batch(job, 0, 9)[0])  # refreshes windows
    return found, seen, dict(zerocore.stats(model).units), zerocore.stats(model).windows.bytes


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_fp32_bytes_equal_the_formulas(ranks, stage, size):
    for found, seen, units, _ in ranks(size, resident, stage):
        whole = 4 * sum(unit.padded for unit in units.values())
        shard = 4 * sum(unit.shard for unit in units.values())
        assert shard == (whole if stage == 0 else whole // size)
        parameters = shard if stage == 3 else whole
        expected = {
            "parameters": parameters,
            "gradients": shard,
            "master": 0,
            "moments": 2 * shard,
        }
        # 16 B/param; 4 + 12/N at stages 1 and 2 once reduced; 16/N
        assert found["step"] == found["backward"] == expected
        # Cleared gradients are free once the model is used again.
        assert found["zero_grad"] == expected
        assert found["forward"] == expected | {"gradients": 0}
        if stage < 2:  # 8 + 8/N at stage 1: the full local gradient, and nothing besides
            assert found["no_sync"] == expected | {"gradients": whole}
        for category, size_seen in seen["step"].items():
            assert size_seen == expected[category], f"{category}: storages have {size_seen} bytes"


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bf16_bytes_equal_the_formulas(ranks, stage, size):
    for found, _, units, _ in ranks(size, resident, stage, torch.bfloat16):
        whole = sum(unit.padded for unit in units.values())
        shard = sum(unit.shard for unit in units.values())
        expected = {
            "parameters": 0 if stage == 3 else 2 * whole,
            "gradients": 4 * shard,  # float32, the default
            "master": 4 * shard,
            "moments": 8 * shard,
        }
        assert found["step"] == found["backward"] == found["zero_grad"] == expected


def resident_with_frozen():
    """Bytes by category when blocks 0 and 1 are frozen."""
    model = models.build("transformer")
    model.blocks[:2].requires_grad_(False)
    zerocore.shard(model, 3, units=models.BLOCKS)
    opt = zerocore.AdamW([p for p in model.parameters() if p.requires_grad])
    sharded.step(model, opt, "transformer", 0)
    stats = zerocore.stats(model, opt)
    return dict(stats.resident), dict(stats.units), measured(model, opt)


def test_frozen_parameters_have_no_gradient_memory(ranks):
    for found, units, seen in ranks(2, resident_with_frozen):
        shard = 4 * sum(unit.shard for unit in units.values())
        trained = 4 * (units[""].shard + units["blocks.2"].shard)
        assert found == {
            "parameters": shard,
            "gradients": trained,
            "master": 0,
            "moments": 2 * trained,
        }
        assert seen == {key: found[key] for key in seen}


def deep():
    torch.manual_seed(0)
    return models.Transformer(depth=6)


DEEP_UNITS = [f"blocks.{i}" for i in range(6)]


def windows(steps=3, **options):
    """Window statistics of a deep model, sampled all along, and its parameters."""
    model = zerocore.shard(deep(), 3, units=DEEP_UNITS, **options)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    samples = []

    def sample(*_):
        samples.append(zerocore.stats(model).windows.bytes)

    for module in model.modules():
        module.register_forward_hook(sample)
    between = []
    for number in range(steps):
        sharded.step(model, opt, "transformer", number)
        between.append(zerocore.stats(model).windows.bytes)
    with torch.no_grad():
        model(models.batch("transformer", 0, 5)[0])
    between.append(zerocore.stats(model).windows.bytes)
    peak = zerocore.stats(model).windows.peak
    zerocore.stats(model).reset()
    cleared = zerocore.stats(model).windows.peak
    state = reference.clones(zerocore.full_state_dict(model))
    return dict(zerocore.stats(model).units), peak, max(samples), between, cleared, state


@pytest.mark.parametrize("precision", [None, torch.bfloat16])
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_window_peak(ranks, prefetch, precision):
    policy = None if precision is None else zerocore.MixedPrecision(precision, output=torch.float32)
    reports = ranks(2, windows, prefetch=prefetch, mixed_precision=policy)
    for units, peak, sampled, between, cleared, _ in reports:
        width = 4 if precision is None else 2
        root = width * units[""].padded
        largest = width * max(units[name].padded for name in DEEP_UNITS)
        assert peak <= (prefetch + 1) * largest + root
        assert peak >= sampled >= root + largest, "the root and one unit are live inside a block"
        assert between == [0] * 4, "no window outlives its step"
        assert cleared == 0


def test_no_reshard_keeps_all_windows_until_backward(ranks):
    for units, peak, *_ in ranks(2, windows, reshard_after_forward=False):
        assert peak == 4 * sum(unit.padded for unit in units.values())


def test_budget_is_never_passed(ranks):
    free = ranks(2, windows, prefetch=3)
    units = free[0][0]
    root, largest = 4 * units[""].padded, 4 * units["blocks.0"].padded
    for budget in (root + largest, root + 2 * largest):
        assert free[0][1] > budget, "without the budget more is used"
        bounded = ranks(2, windows, prefetch=3, max_window_bytes=budget)
        for (_, peak, sampled, _, _, state), (*_, expected) in zip(bounded, free, strict=True):
            assert sampled <= peak <= budget
            reference.assert_same(state, expected)


def refused(budget):
    """The error of a budget that no window of some unit fits in."""
    try:
        zerocore.shard(deep(), 3, units=DEEP_UNITS, max_window_bytes=budget)
    except ValueError as error:
        return str(error)
    return None


def test_budget_smaller_than_a_unit_is_refused(ranks):
    units = ranks(2, windows, steps=1)[0][0]
    needed = 4 * max(unit.padded for unit in units.values())
    for message in ranks(2, refused, needed - 64):
        assert message is not None, "expected a ValueError"
        assert str(needed - 64) in message and str(needed) in message, message


def persistent_windows(stage):
    """Window bytes in forward at a stage whose parameters are resident."""
    model = sharded.shard("transformer", stage)
    model(models.batch("transformer", 0, 0)[0]).sum().backward()
    return tuple(zerocore.stats(model).windows)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_resident_parameters_are_no_windows(ranks, stage):
    assert ranks(2, persistent_windows, stage) == [(0, 0)] * 2


def allocated(stage):
    """All bytes of a larger model, with the peak of its windows."""
    model = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(8)))
    zerocore.shard(model, stage, units=[torch.nn.Linear])
    opt = zerocore.AdamW(model.parameters())
    model(torch.ones(2, 128)).sum().backward()
    opt.step()
    return sum(zerocore.stats(model, opt).resident.values()) + zerocore.stats(model).windows.peak


def test_higher_stages_hold_less(ranks):
    by_stage = [ranks(2, allocated, stage)[0] for stage in (0, 1, 2, 3)]
    assert by_stage[0] > by_stage[1] >= by_stage[2] > by_stage[3]


def peak_with_unused():
    """Window peak of a model in which the gain of layer 1 is not used, without prefetch."""
    units = scenarios.SCENARIOS["unused on all ranks"].units
    model = zerocore.shard(scenarios.build("unused on all ranks"), 3, units=units, prefetch=0)
    for number in range(2):
        scenarios.unused_on_all(model, dist.get_rank(), number, 1.0)
    stats = zerocore.stats(model)
    return stats.windows.peak, {name: 8 * unit.padded for name, unit in stats.units.items()}


def test_unused_parameters_do_not_keep_windows(ranks):
    for peak, sizes in ranks(2, peak_with_unused):
        assert peak == sizes[""] + sizes["layers.0"]
