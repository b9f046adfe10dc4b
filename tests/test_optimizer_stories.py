"""Stories: trainings that mistreat their optimizer in some way, or change it on the way.

A story gets a Run and returns a model, which must be the same bit for bit as without sharding.
"""

import functools

import pytest
import torch
import torch.distributed as dist
from reference import assert_same
from runs import KINDS, STAGES, Run
from torch import optim

import zerocore


def groups_with_empty_ones(run):
    """Made before shard(), and one to one the same groups after it."""
    model = run.build()
    named = dict(model.named_parameters())
    groups = [
        {"params": []},
        {"params": [p for p in named.values() if p.dim() > 1], "weight_decay": 0.0},
        {"params": [], "lr": 1.0},
        {"params": [p for p in named.values() if p.dim() < 2], "lr": 0.03},
    ]
    before = [list(group["params"]) for group in groups]
    opt = run.optimizer(groups)
    run.shard(model)
    for number in range(2):
        opt.zero_grad()
        run.backward(model, number)
        opt.step()
    assert [group["weight_decay"] for group in opt.param_groups] == [0.1, 0.0, 0.1, 0.1]
    for group, params in zip(opt.param_groups, before, strict=True):
        assert [id(p) for p in group["params"]] == [id(p) for p in params]
    assert {id(p) for p in model.parameters()} == {id(p) for params in before for p in params}
    return model


def late_group(run):
    """Until they get an optimizer, nobody clears the gradients of the layers."""
    model = run.shard(run.build())
    late = list(model.layers.parameters())
    opt = run.optimizer([p for p in model.parameters() if all(p is not q for q in late)])
    for number in range(4):
        if number == 2:
            opt.add_param_group({"params": late, "lr": 5e-3})
        opt.zero_grad() if number != 2 else None
        run.backward(model, number)
        opt.step()
    return model


def zeroed_in_place(run):
    """Gradients of zeros are gradients: what nobody uses moves by momentum and decay."""
    model = run.shard(run.build())
    opt = run.optimizer(model.parameters())
    for number in range(3):
        opt.zero_grad(set_to_none=False)
        run.backward(model, number, gain=lambda rank, n=number: n == 0)
        before = run.state(model)["gain"]
        opt.step()
        run.facts.append(torch.equal(before, run.state(model)["gain"]))
    assert run.facts == [False] * 3
    return model


def closures(run):
    """A step calls its closure once and returns what it returned."""
    model = run.shard(run.build())
    opt = run.optimizer(model.parameters())
    calls = []

    def closure():
        opt.zero_grad()
        run.backward(model, len(calls))
        calls.append(torch.tensor(len(calls)))
        return calls[-1]

    assert opt.step(closure) is calls[0]
    assert opt.step(closure=closure) is calls[1]
    assert len(calls) == 2
    return model


def freezing(run, set_to_none):
    """A bias trains every other step; with gradients of zeros it moves all the same."""
    model = run.shard(run.build())
    opt = run.optimizer(model.parameters())
    for number in range(4):
        model.layers[0].bias.requires_grad_(number % 2 == 0)
        opt.zero_grad(set_to_none)
        run.backward(model, number)
        before = run.state(model)["layers.0.bias"]
        opt.step()
        run.facts.append(torch.equal(before, run.state(model)["layers.0.bias"]))
    assert run.facts == [False, set_to_none] * 2
    return model


def groups_of_one_rank(run):
    """One group's parameters live on rank 0, another's on rank 1; a third ends in an empty shard,
    on rank 1 it begins with one."""
    model = run.shard(run.build())
    named = dict(model.named_parameters())
    groups = [
        {"params": [named.pop("gain")], "lr": 5e-3},
        {"params": [named.pop("outlet.weight"), named.pop("outlet.bias")], "weight_decay": 0.3},
        {"params": [named.pop("inlet.weight"), named.pop("inlet.bias")], "lr": 4e-3},
        {"params": list(named.values())},
    ]
    if run.stage:
        counts = [[p.numel() for p in group["params"]] for group in groups[:3]]
        assert counts == ([[9], [0, 0], [54, 0]], [[0], [27, 3], [0, 9]])[dist.get_rank()]
    opt = run.optimizer(groups)
    for number in range(3):
        opt.zero_grad()
        run.backward(model, number)
        opt.step()
    return model


def some_micro_batches(run):
    """The gain is used in one micro-batch of three, by one rank; in the second step by nobody."""
    model = run.shard(run.build())
    opt = run.optimizer(model.parameters())
    for step in range(3):
        for micro in range(3):
            used = step != 1 and micro == step
            run.backward(model, 3 * step + micro, gain=lambda rank, u=used: u and rank == 1)
        before = run.state(model)["gain"]
        opt.step()
        run.facts.append(torch.equal(before, run.state(model)["gain"]))
        opt.zero_grad()
    assert run.facts == [False, True, False]
    return model


def cleared_between_micro_batches(run):
    """By the optimizer, the model, or in place: what comes before it is gone."""
    model = run.shard(run.build())
    opt = run.optimizer(model.parameters())
    for step in range(3):
        run.backward(model, 2 * step + 50)
        if step == 0:
            opt.zero_grad()
        elif step == 1:
            model.zero_grad()
        else:
            opt.zero_grad(set_to_none=False)
        run.backward(model, 2 * step)
        run.backward(model, 2 * step + 1)
        opt.step()
        opt.zero_grad()
    return model


def given_gradients(run):
    """Steps with gradients of the user's making, alone and under a backward's."""
    model = run.shard(run.build())
    opt = run.optimizer(model.parameters())
    for number in range(3):
        for p in model.parameters():
            p.grad = p.detach() * 0.5
        if number != 0:
            run.backward(model, number)
        for p in model.parameters():
            p.grad.mul_(0.25)
        opt.step()
    return model


def tensor_as_rate(run):
    """A tensor as lr, which is changed in place."""
    model = run.shard(run.build())
    rate = torch.tensor(0.02)
    opt = run.optimizer(model.parameters(), lr=rate)
    for number in range(3):
        opt.zero_grad()
        run.backward(model, number)
        opt.step()
        rate.mul_(0.5)
    return model


def schedulers(run):
    """One after the other, two or three steps each."""
    model = run.shard(run.build())
    opt = run.optimizer(
        [{"params": model.layers.parameters()}, {"params": model.outlet.parameters(), "lr": 5e-3}]
    )
    cycles = run.kind != "adagrad"  # which has no momentum
    for make in (
        lambda: optim.lr_scheduler.LambdaLR(opt, [lambda n: 1 / (n + 1), lambda n: 0.5**n]),
        lambda: optim.lr_scheduler.CosineAnnealingLR(opt, 4),
        lambda: optim.lr_scheduler.OneCycleLR(opt, 0.02, total_steps=5, cycle_momentum=cycles),
        lambda: optim.lr_scheduler.ReduceLROnPlateau(opt, patience=0, factor=0.3),
    ):
        schedule = make()
        for number in range(3):
            opt.zero_grad()
            run.backward(model, number)
            opt.step()
            plateau = isinstance(schedule, optim.lr_scheduler.ReduceLROnPlateau)
            schedule.step(*([1.0 + number] if plateau else []))
            run.facts.append([group["lr"] for group in opt.param_groups])
    assert len({tuple(rates) for rates in run.facts}) > 9
    return model


def two_kinds(run):
    """Optimizers of two kinds share the flat buffers of a model, and do not step equally often."""
    model = run.shard(run.build())
    other = "sgd" if run.kind == "zerocore" else "zerocore"
    parameters = list(model.parameters())
    opts = [run.optimizer(parameters[::2]), KINDS[other](parameters[1::2], lr=5e-3)]
    for number in range(3):
        run.backward(model, number)
        for opt in opts if number != 1 else opts[1:]:
            opt.step()
            opt.zero_grad()
    return model


def second_model_later(run):
    """An optimizer has stepped one model when another one, whose parameters it has, is sharded."""
    first, second = run.shard(run.build()), run.build(4)
    opt = run.optimizer([*first.parameters(), *second.parameters()])
    for number in range(3):
        opt.zero_grad()
        if number == 1:
            run.shard(second)
        run.backward(first, number)
        if number >= 1:
            run.backward(second, number)
        opt.step()
    run.facts.append(run.state(first))
    return second


STORIES = {
    story.__name__: story
    for story in (
        groups_with_empty_ones,
        late_group,
        zeroed_in_place,
        closures,
        groups_of_one_rank,
        some_micro_batches,
        cleared_between_micro_batches,
        given_gradients,
        tensor_as_rate,
        schedulers,
        two_kinds,
        second_model_later,
    )
} | {
    "freezing": functools.partial(freezing, set_to_none=True),
    "freezing with zeros": functools.partial(freezing, set_to_none=False),
}


def tell(name, stage, size):
    """Full parameters and facts by kind."""
    results = {}
    for kind in KINDS:
        run = Run(stage, size, kind)
        model = STORIES[name](run)
        results[kind] = run.state(model), run.facts
    return results


def tell_at(name, stages):
    """The story on this rank."""
    return [tell(name, stage, dist.get_world_size()) for stage in stages]


def same_facts(a, b):
    if isinstance(a, dict):
        assert_same(a, b)
    else:
        assert a == b


@pytest.mark.parametrize("name", STORIES)
def test_stories_end_as_without_sharding(ranks, name):
    want = tell(name, None, 2)
    for by_stage in ranks(2, tell_at, name, STAGES):
        for stage, results in zip(STAGES, by_stage, strict=True):
            for kind, (state, facts) in results.items():
                try:
                    assert_same(state, want[kind][0])
                    for ours, theirs in zip(facts, want[kind][1], strict=True):
                        same_facts(ours, theirs)
                except AssertionError as error:
                    raise AssertionError(f"{kind} at stage {stage}: {error}") from None
    # The reference of zerocore.AdamW above was zerocore.AdamW, on whole parameters.
    if name != "two_kinds":
        for parameter, value in want["adamw"][0].items():
            torch.testing.assert_close(want["zerocore"][0][parameter], value, rtol=1e-4, atol=1e-5)


def unreduced_closure(stage, kind):
    """The error of a step whose closure leaves gradients that were not reduced."""
    run = Run(stage, 2, kind)
    model = run.shard(run.build())
    opt = run.optimizer(model.parameters())
    start = run.state(model)

    def closure():
        with zerocore.no_sync(model):
            run.backward(model, 0)

    with pytest.raises(RuntimeError) as error:
        opt.step(closure)
    assert_same(run.state(model), start)
    return str(error.value)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["sgd", "zerocore"])
def test_closures_that_do_not_reduce_are_refused(ranks, kind):
    for stage in STAGES:
        for message in ranks(2, unreduced_closure, stage, kind):
            assert "outside of zerocore.no_sync" in message
