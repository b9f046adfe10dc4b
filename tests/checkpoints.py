"""What ranks do in cases about checkpoints: train, save, load, and show everything that is kept."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any, NamedTuple

import models
import sharded
import torch
import torch.distributed as dist
from reference import clones

import zerocore

POLICIES = {
    "fp32": None,
    "bf16": zerocore.MixedPrecision(torch.bfloat16, output=torch.float32),
    "fp16": zerocore.MixedPrecision(torch.float16, output=torch.float32),
}


class State(NamedTuple):
    """Everything of a model and its optimizer, as full tensors."""

    model: dict[str, torch.Tensor]
    optimizer: dict[str, Any]


def make(job, stage, kind="zerocore", precision="fp32", seed=0, **options):
    """A sharded model and its optimizer."""
    if POLICIES[precision] is not None:
        options["mixed_precision"] = POLICIES[precision]
    model = sharded.shard(job, stage, seed, **options)
    return model, sharded.optimizer_of(kind, model.parameters())


def state_of(model, opt):
    return State(clones(zerocore.full_state_dict(model)), zerocore.optimizer_state_dict(model, opt))


def steps(model, opt, job, numbers):
    """Losses of training steps."""
    return [sharded.step(model, opt, job, number) for number in numbers]


def trained_and_saved(path, job, stage, kind="zerocore", **options):
    """Saves after some steps; the state, a loss, and the losses of the next steps."""
    model, opt = make(job, stage, kind, **options)
    steps(model, opt, job, range(3))
    assert zerocore.save(path, model, opt, rank=dist.get_rank(), epoch=3) == path
    return state_of(model, opt), shared_loss(model, job), steps(model, opt, job, range(3, 5))


def loaded(path, job, stage, kind="zerocore", **options):
    """As `trained_and_saved`, from the checkpoint; and the extra values."""
    model, opt = make(job, stage, kind, seed=7, **options)
    parameters = list(model.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of another number of ranks
        extra = zerocore.load(path, model, opt)
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    state = state_of(model, opt)
    return state, shared_loss(model, job), steps(model, opt, job, range(3, 5)), extra


def shared_loss(model, job):
    """Of one batch, the same on every rank and for every number of them."""
    with torch.no_grad():
        loss = models.loss_of(model.eval(), models.batch(job, 0, 77)).item()
    model.train()
    return loss


@contextlib.contextmanager
def unchanged(model, opt):
    """Checks that model and optimizer are bit for bit the same after what happens inside."""
    before = state_of(model, opt)
    yield
    assert_same_state(state_of(model, opt), before)


def assert_same_state(found: State, expected: State) -> None:
    """Bits, dtypes and options."""
    assert_same_tensors(found.model, expected.model)
    assert found.optimizer["state"].keys() == expected.optimizer["state"].keys()
    for name, values in expected.optimizer["state"].items():
        assert_same_tensors(found.optimizer["state"][name], values)
    assert found.optimizer["param_groups"] == expected.optimizer["param_groups"]


def assert_same_tensors(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name
