"""Every way of running a model gives what plain PyTorch gives on the same global batch."""

import contextlib
import warnings

import pytest
import scenarios
import sharded
import torch
import torch.distributed as dist
from reference import assembled, assert_same, clones, named_gradients
from scenarios import SCENARIOS, Net, data, loss_of
from torch import nn

import zerocore

STEPS = 3
# Where parameters rest, come and go: what an optimizer sees of it.
OURS = [name for name in SCENARIOS if "unused" in name] + [
    "lora",
    "unfreezing",
    "tied",
    "eval between",
]


def run_plain(name, size):
    """Parameters after the steps, gradients of the last, in one process."""
    model = scenarios.build(name)
    opt = scenarios.optimizer_of(model)
    for step in range(STEPS):
        opt.zero_grad()
        for rank in range(size):
            SCENARIOS[name].run(model, rank, step, 1 / size)
        gradients = named_gradients(model)
        opt.step()
    return clones(model.state_dict()), gradients


def run_sharded(name, kind=torch.optim.AdamW, stages=(0, 1, 2, 3), **options):
    """The same on a rank, at every stage."""
    results = []
    for stage in stages:
        model = zerocore.shard(scenarios.build(name), stage, units=SCENARIOS[name].units, **options)
        opt = scenarios.optimizer_of(model, kind)
        for step in range(STEPS):
            opt.zero_grad()
            SCENARIOS[name].run(model, dist.get_rank(), step, 1.0)
            gradients = sharded.pieces(model)
            opt.step()
        assert zerocore.stats(model).windows.bytes == 0
        results.append((clones(zerocore.full_state_dict(model)), gradients))
    return results


def assert_near(found, expected, rtol=1e-9, atol=1e-11):
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        if tensor is None:
            assert found[name] is None, f"{name} must have no gradient"
        else:
            assert found[name] is not None, f"{name} must have a gradient"
            torch.testing.assert_close(
                found[name], tensor, rtol=rtol, atol=atol, msg=lambda text, n=name: f"{n}: {text}"
            )


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(ranks, name, size):
    stages = (0, 1, 2, 3) if size == 2 else (0, 3)
    check(name, size, ranks(size, run_sharded, name, stages=stages))


@pytest.mark.parametrize("name", OURS)
def test_scenario_with_our_optimizer(ranks, name):
    check(name, 2, ranks(2, run_sharded, name, zerocore.AdamW))


OPTIONS = [{"reshard_after_forward": False}, {"prefetch": 0}, {"prefetch": 3}]


def run_options(name):
    """A scenario at stage 3 with every one of OPTIONS, and with room for two units and the root."""
    sizes = zerocore.stats(
        zerocore.shard(scenarios.build(name), 3, units=SCENARIOS[name].units)
    ).units
    root, *others = (8 * size.padded for size in sizes.values())
    budget = {"max_window_bytes": root + sum(sorted(others)[-2:])}
    return [run_sharded(name, stages=(3,), **options)[0] for options in [*OPTIONS, budget]]


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario_with_options(ranks, name):
    check(name, 2, ranks(2, run_options, name))


def run_narrow(name):
    """Windows narrower than the parameters: float32 beside float64."""
    policy = zerocore.MixedPrecision(torch.float32, accumulate=torch.float64)
    return run_sharded(name, stages=(1, 3), mixed_precision=policy)


@pytest.mark.parametrize("name", [n for n in SCENARIOS if n != "exceptions"])
def test_scenario_with_narrow_windows(ranks, name):
    check(name, 2, ranks(2, run_narrow, name), rtol=2e-2, atol=1e-5)


def check(name, size, by_rank, **tolerances):
    """Compares the reports of all ranks with plain PyTorch, and the stages with each other."""
    state, gradients = run_plain(name, size)
    first = None
    for reports in zip(*by_rank, strict=True):  # by stage
        full = assembled([pieces for _, pieces in reports])
        assert_near(full, gradients, **tolerances)
        for found, _ in reports:
            assert_near(found, state, **tolerances)
            first = first or (found, full)
            assert_same(found, first[0])
            assert_same(full, first[1])


def test_resting_parameters_really_rest():
    """The scenarios' reference moves what is used, and does not move what is not."""
    before = clones(scenarios.build("unused on all ranks").state_dict())
    after, gradients = run_plain("unused on all ranks", 2)
    assert gradients["layers.1.gain"] is None
    assert torch.equal(after["layers.1.gain"], before["layers.1.gain"])
    assert not torch.equal(after["layers.0.gain"], before["layers.0.gain"])


def gathers(reentrant):
    """Gathers by (unit, phase) of a step with activation checkpointing; None: without."""
    net = Net().double()
    net.reentrant = reentrant
    model = zerocore.shard(net, 3, units=SCENARIOS["checkpoint"].units)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        zerocore.stats(model).reset()
        loss_of(model, data(dist.get_rank(), step)).backward()
        opt.step()
        opt.zero_grad()
    counts = {}
    for record in zerocore.stats(model).log:
        if (record.event, record.kind) == ("launch", "all_gather"):
            counts[record.unit] = counts.get(record.unit, 0) + 1
    return counts


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_recompute_and_backward_share_one_gather(ranks, reentrant):
    expected = {"": 1, "layers.0": 2, "layers.1": 2, "layers.2": 1}
    assert ranks(2, gathers, reentrant) == [expected] * 2


def lora_memory():
    """Gradient bytes and elements of trainable buffers, and which gradients there are."""
    model = zerocore.shard(scenarios.build("lora"), 3, units=SCENARIOS["lora"].units)
    scenarios.simple(model, dist.get_rank(), 0, 1.0)
    gradients = {name: p.grad is not None for name, p in model.named_parameters()}
    return zerocore.stats(model).resident["gradients"], gradients


def test_frozen_parameters_have_no_gradients(ranks):
    # Each of the three layers trains 4 + 4 elements: padded to 16 + 4, shards of 16 float64.
    for held, gradients in ranks(2, lora_memory):
        assert held == 3 * 16 * 8
        assert gradients == {name: "base" not in name for name in gradients}


class Borrower(nn.Module):
    """Computes with the weight of its child, which is a unit, outside of the child's forward."""

    def __init__(self, gather):
        super().__init__()
        self.gather = gather
        self.child = nn.Linear(4, 4)

    def forward(self, x):
        x = self.child(x)
        with zerocore.gathered(self.child) if self.gather else contextlib.nullcontext():
            return x @ self.child.weight


def borrow(gather, stage):
    """Loss, and gradient pieces, of a borrower; the error's text if there is one."""
    torch.manual_seed(1)
    model = zerocore.shard(Borrower(gather).double(), stage, units=["child"])
    try:
        loss = model(data(dist.get_rank(), 0)).square().mean()
        loss.backward()
    except RuntimeError as error:
        return str(error)
    return sharded.pieces(model)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_parameters_of_a_child_through_gathered(ranks, stage):
    torch.manual_seed(1)
    plain = Borrower(False).double()
    for rank in range(2):
        (plain(data(rank, 0)).square().mean() / 2).backward()
    assert_near(assembled(ranks(2, borrow, True, stage)), named_gradients(plain))


def test_parameters_of_a_child_without_gathered(ranks):
    for message in ranks(2, borrow, False, 3):
        assert isinstance(message, str), "expected a RuntimeError"
        assert "child" in message and "weight" in message and "gathered" in message, message


def stale_view():
    """The error of reading a full view after its window was released."""
    model = zerocore.shard(Net().double(), 3, units=SCENARIOS["simple"].units)
    kept = []
    model.layers[0].linear.register_forward_hook(lambda m, *_: kept.append(m.weight.data))
    with torch.no_grad():
        model(data(0, 0))
    try:
        return kept[0].sum().item()
    except RuntimeError as error:
        return str(error)


def test_stale_full_views_raise(ranks):
    for message in ranks(2, stale_view):
        assert isinstance(message, str) and "layers.0" in message and "sharded" in message, message


def same_objects():
    """Parameters stay the same objects, in forward too, and RNN weight lists with them."""
    lstm = nn.LSTM(3, 4)
    before = list(lstm.parameters())
    model = zerocore.shard(lstm, 3)
    after = list(model.parameters())
    seen = []
    model.register_forward_pre_hook(lambda m, _: seen.extend(m.parameters()))
    model(torch.ones(2, 1, 3))[0].sum().backward()
    same = [a is b is c for a, b, c in zip(before, after, seen, strict=True)]
    flat = [a is b for a, b in zip(before, model._flat_weights, strict=True)]
    dims = [p.dim() for p in before]
    return same, flat, dims, [tuple(p.shape[1:]) for p in after]


def test_parameters_stay_the_same_objects(ranks):
    for same, flat, dims, tails in ranks(2, same_objects):
        assert all(same) and all(flat)
        assert dims == [2, 2, 1, 1]
        assert tails == [(1,), (1,), (), ()]


def shard_child_first():
    """A child at its own stage, then the parent: one training step like a plain one."""
    model = scenarios.build("simple")
    zerocore.shard(model.layers[1], 2)
    zerocore.shard(model, 3, units=["layers.0", "layers.2"])
    opt = scenarios.optimizer_of(model)
    for step in range(STEPS):
        opt.zero_grad()
        scenarios.simple(model, dist.get_rank(), step, 1.0)
        opt.step()
    return clones(zerocore.full_state_dict(model))


def test_child_sharded_before_its_parent(ranks):
    state, _ = run_plain("simple", 2)
    for found in ranks(2, shard_child_first):
        assert_near(found, state)


def buffers_between():
    """BatchNorm in eval between training: running statistics are the rank's own, and used."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)).double()
    twin = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)).double()
    twin.load_state_dict(model.state_dict())
    zerocore.shard(model, 3)
    x = data(dist.get_rank(), 0)
    model(x).sum().backward()
    twin(x).sum().backward()
    found = [model.eval()(x), model[1].running_mean]
    return found, [twin.eval()(x), twin[1].running_mean]


def test_buffers_stay_local(ranks):
    reports = ranks(2, buffers_between)
    for found, expected in reports:
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert not torch.equal(reports[0][0][1], reports[1][0][1])


def quiet():
    """Training at every stage warns of nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for stage in range(4):
            model = zerocore.shard(scenarios.build("simple"), stage)
            opt = scenarios.optimizer_of(model)
            scenarios.simple(model, dist.get_rank(), 0, 1.0)
            opt.step()
    return True


def test_ordinary_training_warns_of_nothing(ranks):
    assert ranks(2, quiet) == [True, True]
