"""Micro-batches against one large batch, and hybrid sharding's deferred sum over replicas."""

import contextlib

import models
import pytest
import sharded
import torch
import torch.distributed as dist
from reference import assembled

import zerocore

JOB = "transformer"
MICRO = 4


def micro_batch(rank, number):
    """One of MICRO parts of a rank's batch."""
    return models.batch(JOB, rank, 100 + number)


def backward(model, number):
    """Adds a micro-batch's share of the gradient."""
    (models.loss_of(model, micro_batch(dist.get_rank(), number)) / MICRO).backward()


def accumulate(stage, how, mesh=None):
    """Main gradients, traffic and bytes of gradients held between micro-batches."""
    model = sharded.shard(JOB, stage, mesh=mesh)
    for number in range(MICRO):  # the first step gathers more at stages 1 and 2
        backward(model, number)
    model.zero_grad()
    zerocore.stats(model).reset()
    held = []
    for number in range(MICRO):
        wait = number < MICRO - 1 and how != "sync"
        keep = zerocore.no_sync(model, replicas_only=how == "replicas_only")
        with keep if wait else contextlib.nullcontext():
            backward(model, number)
        held.append(zerocore.stats(model).resident["gradients"])
    stats = zerocore.stats(model)
    return sharded.pieces(model), dict(stats.collectives), held, dict(stats.units)


def large_batch(size):
    """Gradients of one large batch in one process, in fp64."""
    model = models.build(JOB).double()
    parts = [micro_batch(rank, number) for rank in range(size) for number in range(MICRO)]
    x, target = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    models.loss_of(model, (x, target)).backward()
    return {name: p.grad.reshape(-1) for name, p in model.named_parameters()}


def assert_close(reports, size):
    """All gradients together are within 1e-6 of those of the large batch."""
    found, exact = assembled([r[0] for r in reports]), large_batch(size)
    error = torch.cat([found[name].double() - value for name, value in exact.items()]).norm()
    assert error <= 1e-6 * torch.cat(list(exact.values())).norm()


@pytest.mark.filterwarnings("ignore:zerocore.no_sync")
@pytest.mark.parametrize("how", ["sync", "no_sync"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_micro_batches_are_one_large_batch(ranks, stage, how):
    reports = ranks(2, accumulate, stage, how)
    assert_close(reports, 2)
    times = MICRO if how == "sync" else 1
    for _, collectives, held, units in reports:
        whole, shard = (sum(getattr(u, k) for u in units.values()) for k in ("padded", "shard"))
        kind, sent = ("all_reduce", whole) if stage == 0 else ("reduce_scatter", whole // 2)
        assert collectives[kind].elements == times * sent
        waiting = shard if how == "sync" else whole
        assert held == [4 * waiting] * (MICRO - 1) + [4 * shard]


@pytest.mark.parametrize("how", ["sync", "replicas_only"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_replicas_can_be_summed_once(ranks, stage, how):
    reports = ranks(4, accumulate, stage, how, mesh=(2, 2))
    assert_close(reports, 4)
    for _, collectives, held, units in reports:
        whole, shard = (sum(getattr(u, k) for u in units.values()) for k in ("padded", "shard"))
        assert collectives["reduce_scatter"].elements == MICRO * whole // 2
        times = MICRO if how == "sync" else 1
        assert collectives["all_reduce"].elements == times * shard
        # The last backward sums what waited into the main gradient's place.
        assert held == [4 * shard] * MICRO


def test_at_stage_0_everything_is_a_replica(ranks):
    reports = ranks(2, accumulate, 0, "replicas_only")
    assert_close(reports, 2)
    for _, collectives, held, units in reports:
        whole = sum(unit.padded for unit in units.values())
        assert collectives["all_reduce"].elements == whole
        assert held == [4 * whole] * MICRO


def without_replicas(stage):
    """Gradients and traffic with `replicas_only` where nothing is replicated."""
    model = sharded.shard(JOB, stage)
    with zerocore.no_sync(model, replicas_only=True):
        backward(model, 0)
    sent = zerocore.stats(model).collectives["reduce_scatter"].calls
    backward(model, 1)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return sent, zerocore.stats(model).collectives["reduce_scatter"].calls


def test_replicas_only_without_replicas_is_nothing_special(ranks):
    for first, both in ranks(2, without_replicas, 2):
        assert both == 2 * first > 0


def careless(stage):
    """Errors, and gradients after clearing or changing what waits for the replicas."""
    model = sharded.shard(JOB, stage, mesh=(2, 2))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    messages = []

    def expect_error(call):
        try:
            call()
            messages.append("")
        except RuntimeError as error:
            messages.append(str(error))

    def wait(number):
        with zerocore.no_sync(model, replicas_only=True):
            backward(model, number)

    wait(0)
    expect_error(opt.step)
    expect_error(lambda: zerocore.clip_grad_norm_(model, 1.0))
    with zerocore.no_sync(model):
        expect_error(lambda: backward(model, 1))
    found = []
    for set_to_none in (True, False):
        model.zero_grad()
        wait(0)
        model.zero_grad(set_to_none=set_to_none)
        wait(1)
        backward(model, 2)
        found.append(sharded.pieces(model))
    model.zero_grad()
    backward(model, 1)  # a main gradient, to be added to
    wait(2)
    backward(model, 0)
    found.append(sharded.pieces(model))
    model.zero_grad()
    wait(1)
    for p in model.parameters():
        p.grad.mul_(2.0)
    backward(model, 2)
    found.append(sharded.pieces(model))
    # A full local gradient, then a deferred sum, then all.
    model.zero_grad()
    with zerocore.no_sync(model):
        backward(model, 0)
    wait(1)
    backward(model, 2)
    found.append(sharded.pieces(model))
    return messages, found


def expected(*weights):
    """Gradients of micro-batches 0, 1, ... of four ranks with these weights."""
    model = models.build(JOB).double()
    for number, weight in enumerate(weights):
        for rank in range(4):
            loss = models.loss_of(model, micro_batch(rank, number))
            (weight * loss / MICRO / 4).backward()
    return {name: p.grad.reshape(-1) for name, p in model.named_parameters()}


@pytest.mark.filterwarnings("ignore:zerocore.no_sync")
@pytest.mark.parametrize("stage", [1, 3])
def test_what_waits_for_the_replicas_can_be_cleared_and_changed(ranks, stage):
    reports = ranks(4, careless, stage)
    for messages, _ in reports:
        assert "never reduced" in messages[0] and "never reduced" in messages[1]
        assert "replicas_only=True" in messages[2]
    for case, weights in enumerate([(0, 1, 1), (0, 1, 1), (1, 1, 1), (0, 2, 1), (1, 1, 1)]):
        found = assembled([r[1][case] for r in reports])
        for name, exact in expected(*weights).items():
            torch.testing.assert_close(
                found[name].double(), exact, rtol=1e-5, atol=1e-7, msg=f"case {case}, {name}"
            )
