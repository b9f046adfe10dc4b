"""Averages of sharded parameters; copies of sharded models."""

import contextlib
import copy

import models
import pytest
import sharded
import torch
import torch.distributed as dist
from reference import assert_same, clones
from torch import nn
from torch.optim.swa_utils import AveragedModel

import zerocore

STAGES = [0, 1, 2, 3]


def averages(job, stages, **options):
    """By stage: the parameters after each step, and what EMA makes of them, at two rates."""
    results = {}
    for stage in stages:
        model = sharded.shard(job, stage, **options)
        opt = zerocore.AdamW(model.parameters(), lr=1e-1)
        ema = zerocore.EMA(model, decay=0.75)
        steps = [clones(zerocore.full_state_dict(model))]
        for number in range(4):
            sharded.step(model, opt, job, number)
            ema.update(*([0.5] if number == 2 else []))
            steps.append(clones(zerocore.full_state_dict(model)))
        results[stage] = steps, clones(ema.state_dict())
    return results


def expected_of(steps, names):
    """The average by its definition, in fp64."""
    mean = {name: steps[0][name].double() for name in names}
    for number, state in enumerate(steps[1:]):
        decay = 0.5 if number == 2 else 0.75
        mean = {n: decay * mean[n] + (1 - decay) * state[n].double() for n in names}
    return mean


@pytest.mark.parametrize("job", ["transformer", "cnn", "odd", "mixed16"])
def test_average_is_that_of_the_steps(ranks, job):
    plain = models.build(job)
    names = [n for n, p in plain.named_parameters(remove_duplicate=False) if p.requires_grad]
    for results in ranks(2, averages, job, STAGES if job == "odd" else [3]):
        for stage, (steps, found) in results.items():
            assert found.keys() == set(names)
            moved = False
            for name, value in expected_of(steps, names).items():
                narrow = steps[0][name].dtype == torch.bfloat16
                assert found[name].dtype == (torch.float32 if narrow else steps[0][name].dtype)
                torch.testing.assert_close(found[name].double(), value, rtol=1e-5, atol=1e-6)
                moved |= not torch.equal(found[name], steps[-1][name].to(found[name].dtype))
            assert moved, stage
            for name, value in found.items():
                assert_same({name: value}, {name: results[3][1][name]})


def outputs(model, job):
    """Of this rank's evaluation."""
    with torch.no_grad():
        return model(models.batch(job, dist.get_rank(), 9)[0]).clone()


def applied(job, stage, **options):
    """Outputs and states before, in and after applied(), and that training goes on with."""
    model = sharded.shard(job, stage, **options)
    opt = zerocore.AdamW(model.parameters(), lr=1e-1)
    ema = zerocore.EMA(model, decay=0.5)
    for number in range(3):
        sharded.step(model, opt, job, number)
        ema.update()
    seen = {"before": (outputs(model, job), clones(model.state_dict()))}
    average = clones(ema.state_dict())
    with ema.applied():
        seen["in"] = outputs(model, job), clones(model.state_dict())
    seen["after"] = outputs(model, job), clones(model.state_dict())
    for _ in range(2):
        with contextlib.suppress(KeyError), ema.applied():
            outputs(model, job)
            raise KeyError("in the evaluation")
    seen["raised"] = outputs(model, job), clones(model.state_dict())
    assert_same(clones(ema.state_dict()), average)
    opt.zero_grad()
    loss = models.loss_of(model, models.batch(job, dist.get_rank(), 0))
    with ema.applied():
        outputs(model, job)
    with pytest.raises(RuntimeError, match="modified by an inplace"):  # not nonsense
        loss.backward()
    sharded.step(model, opt, job, 3)
    seen["trained"] = outputs(model, job), clones(model.state_dict())
    return seen, average


def not_applied(job, stage):
    """The same training without any average."""
    model = sharded.shard(job, stage)
    opt = zerocore.AdamW(model.parameters(), lr=1e-1)
    for number in range(4):
        sharded.step(model, opt, job, number)
    return outputs(model, job), clones(model.state_dict())


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("job", ["transformer", "mixed16"])
def test_applied_shows_the_average_and_restores(ranks, job, stage):
    results = ranks(2, applied, job, stage)
    for rank, trained in enumerate(ranks(2, not_applied, job, stage)):
        seen, average = results[rank]
        state = seen["in"][1]
        for name, value in average.items():
            assert torch.equal(state[name], value.to(state[name].dtype)), name
        with torch.no_grad():
            plain = models.build(job)
            plain.load_state_dict(state)
            torch.testing.assert_close(
                seen["in"][0], plain(models.batch(job, rank, 9)[0]), rtol=1e-5, atol=1e-5
            )
        assert not torch.allclose(seen["in"][0], seen["before"][0], rtol=1e-3)
        for moment in ("after", "raised"):
            assert torch.equal(seen[moment][0], seen["before"][0]), moment
            assert_same(seen[moment][1], seen["before"][1])
        assert torch.equal(seen["trained"][0], trained[0])
        assert_same(seen["trained"][1], trained[1])


def applied_in_bf16(stage):
    """Under mixed precision the average is that of the masters, and computes in bf16."""
    model = sharded.shard("transformer", stage, mixed_precision=zerocore.MixedPrecision())
    ema = zerocore.EMA(model, decay=0.5)
    sharded.step(model, zerocore.AdamW(model.parameters(), lr=1e-1), "transformer", 0)
    ema.update()
    average, before = clones(ema.state_dict()), outputs(model, "transformer")
    with ema.applied():
        shown, found = clones(model.state_dict()), outputs(model, "transformer")
    return average, shown, before, found, outputs(model, "transformer")


def test_applied_under_mixed_precision(ranks):
    results = [ranks(2, applied_in_bf16, stage) for stage in STAGES]
    for result in results:
        for rank, (average, shown, before, found, after) in enumerate(result):
            assert_same(average, shown)
            assert found.dtype == torch.bfloat16 and torch.equal(found, results[0][rank][3])
            assert torch.equal(after, before) and not torch.equal(found, before)


def saved(job):
    model = sharded.shard(job, 3)
    ema = zerocore.EMA(model, decay=0.5)
    sharded.step(model, zerocore.AdamW(model.parameters(), lr=1e-1), job, 0)
    ema.update()
    return clones(ema.state_dict())


def loaded(job, stage, state):
    ema = zerocore.EMA(sharded.shard(job, stage, seed=7))
    ema.load_state_dict(state)
    return clones(ema.state_dict())


@pytest.mark.parametrize("stage", STAGES)
def test_average_moves_to_another_stage(ranks, stage):
    for job in ("odd", "cnn"):
        state = ranks(2, saved, job)[0]
        for found in ranks(3, loaded, job, stage, state):
            assert_same(found, state)


def error_of(call):
    """The type and text of what a call raises."""
    try:
        call()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def misuse():
    """Errors by what was done, and whether the parameters came through it."""
    model = sharded.shard("transformer", 3)
    opt = zerocore.AdamW(model.parameters(), lr=1e-1)
    ema = zerocore.EMA(model, decay=0.5)
    sharded.step(model, opt, "transformer", 0)
    ema.update()
    before = clones(model.state_dict())
    state = ema.state_dict()
    spoiled = {**state, "position": torch.ones(3)} if dist.get_rank() == 1 else state

    def inside(call):
        def run():
            with ema.applied():
                call()

        return run

    def in_gathered():
        with zerocore.gathered(model), ema.applied():
            pass

    mixed = nn.ModuleDict({"ours": model, "plain": nn.Linear(2, 2)})
    errors = {
        "decay 1": error_of(lambda: zerocore.EMA(model, decay=1.0)),
        "decay of a call": error_of(lambda: ema.update(decay=-0.1)),
        "plain": error_of(lambda: zerocore.EMA(nn.Linear(2, 2))),
        "partly plain": error_of(lambda: zerocore.EMA(mixed)),
        "step": error_of(inside(opt.step)),
        "torch step": error_of(inside(torch.optim.SGD(model.parameters(), lr=1.0).step)),
        "update": error_of(inside(ema.update)),
        "nested": error_of(inside(zerocore.EMA(model).applied().__enter__)),
        "state": error_of(inside(ema.state_dict)),
        "load": error_of(inside(lambda: ema.load_state_dict(state))),
        "gathered": error_of(in_gathered),
        "missing": error_of(lambda: ema.load_state_dict({})),
        "unknown": error_of(lambda: ema.load_state_dict({**state, "strange": torch.ones(1)})),
        "shape on rank 1": error_of(lambda: ema.load_state_dict(spoiled)),
        "change": error_of(inside(lambda: model.load_state_dict(before))),
    }
    after = clones(model.state_dict())
    ema.load_state_dict(state)
    sharded.step(model, opt, "transformer", 1)
    ema.update()
    return errors, before, after


def test_misuse_is_an_error_on_every_rank(ranks):
    words = {
        "decay 1": "[0, 1)",
        "decay of a call": "[0, 1)",
        "plain": "zerocore.shard",
        "partly plain": "plain.weight",
        "step": "optimizer.step() outside",
        "torch step": "optimizer.step() outside",
        "update": "update() outside",
        "nested": "applied() outside",
        "state": "state_dict() outside",
        "load": "load_state_dict() outside",
        "gathered": "gathered()",
        "missing": "missing",
        "unknown": "strange",
        "shape on rank 1": "position",
        "change": "a change",
    }
    for errors, before, after in ranks(2, misuse):
        assert errors.keys() == words.keys()
        for case, word in words.items():
            assert errors[case] is not None and word in errors[case], (case, errors[case])
        assert_same(after, before)


def copies(stage):
    """Errors of copies by what is copied, and the loss of a step of the original."""
    outer = nn.Sequential(sharded.shard("transformer", stage))
    model, other = outer[0], zerocore.shard(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), stage)
    shallow = copy.copy(model.blocks[1])
    features = torch.ones(1, 2, 12)
    errors = {
        "model": error_of(lambda: copy.deepcopy(model)),
        "outer": error_of(lambda: copy.deepcopy(outer)),
        "averaged": error_of(lambda: AveragedModel(model)),
        "unit": error_of(lambda: copy.deepcopy(model.blocks[0])),
        "below": error_of(lambda: copy.deepcopy(model.blocks[0].fc1)),
        "of the root": error_of(lambda: copy.deepcopy(model.norm)),
        "no parameters": error_of(lambda: copy.deepcopy(other[1])),
        "shallow": error_of(lambda: shallow(features)),
    }
    return errors, sharded.step(model, None, "transformer", 0)


def test_copies_are_refused(ranks):
    for stage in (0, 3):
        for errors, loss in ranks(2, copies, stage):
            for case, error in errors.items():
                word = "got a copy" if case == "shallow" else "zerocore.EMA(model)"
                assert error is not None and word in error, (case, error)
            assert loss > 0
