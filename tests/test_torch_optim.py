"""On shards, torch.optim's optimizers take the very steps that they take on whole parameters."""

import functools
import inspect

import pytest
import torch
import torch.distributed as dist
from reference import assert_same
from runs import ADAM, STAGES, Run
from torch import optim

VARIANTS = {
    "sgd": (optim.SGD, {"lr": 0.05}),
    "sgd momentum": (optim.SGD, {"lr": 0.02, "momentum": 0.9, "dampening": 0.1}),
    "sgd nesterov": (
        optim.SGD,
        {"lr": 0.02, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    ),
    "sgd maximize": (optim.SGD, {"lr": 1e-3, "maximize": True}),
    "adam": (optim.Adam, ADAM),
    "adam amsgrad": (optim.Adam, ADAM | {"amsgrad": True}),
    "adamw": (optim.AdamW, ADAM),
    "adamw amsgrad": (optim.AdamW, ADAM | {"amsgrad": True}),
    "adamw maximize": (optim.AdamW, ADAM | {"maximize": True}),
    "nadam": (optim.NAdam, ADAM),
    "nadam decoupled": (optim.NAdam, ADAM | {"decoupled_weight_decay": True}),
    "radam": (optim.RAdam, ADAM),
    "radam rectified": (optim.RAdam, ADAM | {"betas": (0.5, 0.6), "decoupled_weight_decay": True}),
    "adamax": (optim.Adamax, ADAM),
    "adagrad": (
        optim.Adagrad,
        {"lr": 0.05, "lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.1},
    ),
    "adadelta": (optim.Adadelta, {"weight_decay": 0.1}),
    "rmsprop": (optim.RMSprop, ADAM),
    "rmsprop centered": (optim.RMSprop, ADAM | {"centered": True, "momentum": 0.9}),
    "rprop": (optim.Rprop, {"lr": 1e-2}),
    "asgd": (optim.ASGD, {"lr": 0.02, "lambd": 0.01, "t0": 1, "weight_decay": 0.1}),
}
IMPLEMENTATIONS = {
    "single": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
CASES = [
    (variant, implementation)
    for variant, (kind, _) in VARIANTS.items()
    for implementation in IMPLEMENTATIONS
    if implementation != "fused" or "fused" in inspect.signature(kind).parameters
]


def train(run, variant, implementation, early, steps=3):
    """Full parameters after some steps with an optimizer made before (`early`) or after shard()."""
    kind, options = VARIANTS[variant]
    options = options | IMPLEMENTATIONS[implementation]
    model = run.build()
    if early:
        opt = kind(model.parameters(), **options)
    run.shard(model)
    if not early:
        opt = kind(model.parameters(), **options)
    for number in range(steps):
        opt.zero_grad()
        run.backward(model, number)
        opt.step()
    return run.state(model)


def train_all(stage, job, early):
    """Every optimizer at a stage; every other one is made early, the first one if `early`."""
    run = Run(stage, dist.get_world_size(), job=job)
    return [train(run, *case, (early + i) % 2 == 1) for i, case in enumerate(CASES)]


@functools.cache
def expected(size, job):
    """The same without sharding."""
    return [train(Run(None, size, job=job), *case, False) for case in CASES]


@pytest.mark.parametrize(
    ("size", "job", "stage", "early"),
    [(2, "small", stage, stage % 2) for stage in STAGES] + [(3, "odd", 1, 1), (3, "odd", 3, 0)],
)
def test_every_elementwise_optimizer_equals_its_unsharded_self(ranks, size, job, stage, early):
    start = Run(None, size, job=job).build().state_dict()
    for results in ranks(size, train_all, stage, job, early):
        for case, found, want in zip(CASES, results, expected(size, job), strict=True):
            try:
                assert_same(found, want)
            except AssertionError as error:
                raise AssertionError(f"{case}: {error}") from None
            moved = [n for n in want if want[n].numel() and not torch.equal(want[n], start[n])]
            assert len(moved) >= len(want) - 2, (case, moved)  # "odd": but an empty and a frozen


def early_state(stage, fused):
    """Adagrad's state, made before shard() and set by the user, is cut where the parameter is."""
    run = Run(stage, 2)
    model = run.build()
    opt = optim.Adagrad(model.parameters(), lr=0.05, fused=fused)
    for p in model.parameters():
        opt.state[p]["sum"].copy_(torch.rand(p.shape))
    run.shard(model)
    run.backward(model, 0)
    opt.step()
    for p in model.parameters():
        assert opt.state[p]["sum"].shape == p.shape
        if stage:  # of its own memory, not a view of the whole
            assert opt.state[p]["sum"].untyped_storage().nbytes() == p.numel() * 4
    return run.state(model)


def refused_state(stage):
    """The error of a step with state of real steps, which stays as it is; and what cures it."""
    run = Run(stage, 2)
    model = run.build()
    opt = optim.Adagrad(model.parameters(), lr=0.05)
    last = opt.state[model.outlet.weight]
    last["step"] += 1
    run.shard(model)
    run.backward(model, 0)
    start = run.state(model)
    for _ in range(2):
        with pytest.raises(RuntimeError) as error:
            opt.step()
    assert opt.state[model.gain]["sum"].shape == (9,)
    assert last["sum"].shape == (3, 9)
    assert_same(run.state(model), start)
    opt.state.clear()
    opt.step()
    assert not torch.equal(run.state(model)["gain"], start["gain"])
    return str(error.value)


def test_state_from_before_shard(ranks):
    for fused in (False, True):
        want = early_state(None, fused)
        for stage in STAGES:
            for got in ranks(2, early_state, stage, fused):
                assert_same(got, want)
    for stage in STAGES[1:]:
        for message in ranks(2, refused_state, stage):
            assert "'sum' of 'outlet.weight' with the full shape (3, 9)" in message


WHOLE = {
    "LBFGS": functools.partial(optim.LBFGS, lr=0.1, max_iter=3, tolerance_change=0.0),
    "Adafactor": functools.partial(optim.Adafactor, lr=0.05),
    "Muon": functools.partial(optim.Muon, lr=0.05),
}


def whole_parameters(stage, name):
    """Full parameters after steps of an optimizer that needs whole ones."""
    run = Run(stage, 2)
    model = run.shard(run.build())
    parameters = [p for p in model.parameters() if p.dim() == 2]
    opt = WHOLE[name](parameters)
    for number in range(2):

        def closure(number=number):
            opt.zero_grad()
            run.backward(model, number)
            return torch.tensor(1.0)

        opt.step(closure)
    return run.state(model)


@pytest.mark.parametrize("name", WHOLE)
def test_stage_0_has_whole_parameters(ranks, name):
    want = whole_parameters(None, name)
    assert not torch.equal(want["inlet.weight"], Run(None, 2).build().inlet.weight)
    for got in ranks(2, whole_parameters, 0, name):
        assert_same(got, want)


def outcomes(stage):
    """What comes of options that ask for more than a CPU step: errors of torch's, or steps."""
    found = {}
    for kind in dict.fromkeys(kind for kind, _ in VARIANTS.values()):
        for option in ("differentiable", "capturable"):
            if option not in inspect.signature(kind).parameters:
                continue
            for foreach in (False, True):
                run = Run(stage, 2)
                model = run.shard(run.build())
                run.backward(model, 0)
                opt = kind(model.parameters(), **{option: True, "foreach": foreach})
                try:
                    opt.step()
                    result = run.state(model)["inlet.weight"]
                except Exception as error:
                    result = f"{type(error).__name__}: {error}"
                found[kind.__name__, option, foreach] = result
    return found


def test_options_fail_as_in_torch(ranks):
    want = outcomes(None)
    assert any("leaf Variable" in str(result) for result in want.values())
    assert any("capturable" in str(result) for result in want.values())
    for stage in (0, 3):
        for got in ranks(2, outcomes, stage):
            for case, result in want.items():
                same = torch.equal if isinstance(result, torch.Tensor) else str.__eq__
                assert type(got[case]) is type(result), (case, got[case], result)
                assert same(got[case], result), (case, got[case], result)
