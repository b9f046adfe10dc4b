"""All stages train alike, and as well as plain PyTorch in one process."""

import functools

import models
import pytest
import reference
import sharded
import torch
import torch.distributed as dist
from reference import Trained, assembled, assert_as_exact, assert_same

import zerocore

STAGES = (0, 1, 2, 3)
plain = functools.cache(reference.plain)


def train_stages(job, optimizer, stages=STAGES, **options):
    return [sharded.train(job, optimizer, stage, **options) for stage in stages]


def trained(ranks, size, *args, **kwargs):
    """By stage: (Trained with full gradients, state dict), which all ranks must have alike."""
    by_rank = ranks(size, train_stages, *args, **kwargs)
    results = []
    for reports in zip(*by_rank, strict=True):
        first, state = reports[0]
        for other, other_state in reports[1:]:
            assert_same(other.parameters, first.parameters)
            same = {k: v for k, v in state.items() if "running" not in k}  # of the rank's own data
            assert_same({k: other_state[k] for k in same}, same)
        gradients = assembled([report.gradients for report, _ in reports])
        results.append((Trained(first.parameters, gradients), state))
    return results


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "zerocore"])
@pytest.mark.parametrize("job", models.JOBS)
def test_stages_are_bit_equal_and_exact(ranks, job, optimizer, size):
    results = trained(ranks, size, job, optimizer)
    (first, state), others = results[0], results[1:]
    for other, other_state in others:
        assert_same(other.gradients, first.gradients)
        assert_same(other.parameters, first.parameters)
        assert_same(other_state, state)
    peer = "adamw" if optimizer == "zerocore" else optimizer
    ours, exact = plain(job, peer, size), plain(job, peer, size, dtype=torch.float64)
    assert list(first.parameters) == list(exact.parameters)
    assert_as_exact(first.parameters, ours.parameters, exact.parameters)
    assert_as_exact(first.gradients, ours.gradients, exact.gradients)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("job", models.JOBS)
def test_one_rank_is_bit_equal_to_plain_pytorch(ranks, job, optimizer):
    expected = plain(job, optimizer, 1)
    for found, state in trained(ranks, 1, job, optimizer):
        assert_same(found.gradients, expected.gradients)
        assert_same(found.parameters, expected.parameters)
        assert {k: state[k] for k in expected.parameters}.keys() == expected.parameters.keys()


@pytest.mark.parametrize("job", models.JOBS)
def test_one_rank_with_our_optimizer(ranks, job):
    first, *others = trained(ranks, 1, job, "zerocore")
    for other in others:
        assert_same(other[0].parameters, first[0].parameters)
    ours, exact = plain(job, "adamw", 1), plain(job, "adamw", 1, dtype=torch.float64)
    assert_as_exact(first[0].parameters, ours.parameters, exact.parameters)


def averaged_in_rank_order(job, size, steps):
    """What the transport defines: gradients times 1/N, summed from rank 0 on, in float32."""
    model = models.build(job)
    opt = reference.OPTIMIZERS["sgd"](model.parameters())
    for step in range(steps):
        total = {}
        for rank in range(size):
            opt.zero_grad()
            models.loss_of(model, models.batch(job, rank, step)).backward()
            for name, p in model.named_parameters():
                part = p.grad * torch.tensor(1 / size, dtype=torch.float32)
                total[name] = part if rank == 0 else total[name] + part
        for name, p in model.named_parameters():
            p.grad = total[name]
        opt.step()
    return reference.clones(dict(model.named_parameters(remove_duplicate=False)))


@pytest.mark.parametrize("size", [2, 3])
def test_sums_are_taken_in_rank_order(ranks, size):
    expected = averaged_in_rank_order("transformer", size, 3)
    for found, _ in trained(ranks, size, "transformer", "sgd", (0, 3), steps=3):
        assert_same(found.parameters, expected)


OPTIONS = {
    "no reshard": {"reshard_after_forward": False},
    "no prefetch": {"prefetch": 0},
    "deep prefetch": {"prefetch": 3},
    "automatic units": {"units": None},
    "automatic small units": {"units": None, "bucket_bytes": 1},
    "units by class": {"units": [models.Block]},
    "units by name": {"units": ["blocks.1"]},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options_do_not_change_the_bits(ranks, options):
    ((expected, _),) = trained(ranks, 2, "transformer", "adamw", (3,))
    ((found, _),) = trained(ranks, 2, "transformer", "adamw", (3,), **options)
    assert_same(found.gradients, expected.gradients)
    assert_same(found.parameters, expected.parameters)


def is_block(name, module):
    return name.startswith("blocks.") and name.count(".") == 1


def test_units_by_predicate(ranks):
    def units_of(options):
        return ranks(2, unit_names, "transformer", **options)

    expected = units_of({"units": models.BLOCKS})
    assert set(expected[0]) == {"", *models.BLOCKS}
    assert units_of({"units": is_block}) == expected
    assert units_of({"units": [models.Block]}) == expected
    assert units_of({"units": None, "bucket_bytes": 1}) == expected
    merged = units_of({"units": None})[0]
    assert len(merged) < len(expected[0]), "small neighbours are merged up to bucket_bytes"


def unit_names(job, **options):
    return list(zerocore.stats(sharded.shard(job, 3, **options)).units)


def bf16_step_by_step(job, size, steps):
    """Mixed precision by its definition: bf16 copies of fp32 masters, bf16 transport, fp32 sums."""
    master, model = models.build(job), models.build(job).to(torch.bfloat16)
    opt = reference.OPTIMIZERS["adamw"](master.parameters())
    for step in range(steps):
        total = {}
        with torch.no_grad():
            for p, source in zip(model.parameters(), master.parameters(), strict=True):
                p.copy_(source)
        for rank in range(size):
            model.zero_grad()
            models.loss_of(model, models.batch(job, rank, step, torch.bfloat16)).backward()
            for name, p in model.named_parameters():
                part = (p.grad.float() / size).bfloat16().float()
                total[name] = part if rank == 0 else total[name] + part
        for name, p in master.named_parameters():
            p.grad = total[name].bfloat16().float()
        opt.step()
    return reference.clones(dict(master.named_parameters(remove_duplicate=False)))


def train_bf16(job, stage, steps, optimizer):
    precision = zerocore.MixedPrecision(param=torch.bfloat16)
    model = sharded.shard(job, stage, mixed_precision=precision)
    opt = sharded.optimizer_of(optimizer, model.parameters())
    assert {p.dtype for p in model.parameters()} == {torch.float32}, "shards are fp32 masters"
    for step in range(steps):
        opt.zero_grad()
        x, target = models.batch(job, dist.get_rank(), step)
        out = model(x)
        assert out.dtype == torch.bfloat16
        target = target.to(out.dtype) if target.is_floating_point() else target
        models.loss_of(lambda _, out=out: out, (x, target)).backward()
        assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
        opt.step()
    return reference.clones(zerocore.full_state_dict(model))


@pytest.mark.parametrize("job", ["transformer", "attention"])
def test_mixed_precision_is_its_definition(ranks, job):
    expected = bf16_step_by_step(job, 2, 3)
    for stage in STAGES:
        for state in ranks(2, train_bf16, job, stage, 3, "adamw"):
            assert_same(state, expected)
    first = ranks(2, train_bf16, job, 0, 3, "zerocore")[0]
    for stage in STAGES[1:]:
        assert_same(ranks(2, train_bf16, job, stage, 3, "zerocore")[0], first)


def output_dtypes():
    """Dtypes of the outputs under the options of MixedPrecision."""
    dtypes = []
    for output in (None, torch.float32):
        precision = zerocore.MixedPrecision(
            param=torch.bfloat16, reduce=torch.float32, output=output
        )
        model = sharded.shard("lstm", 3, mixed_precision=precision)
        out = model(models.batch("lstm", 0, 0)[0])
        out.sum().backward()
        dtypes.append(out.dtype)
    return dtypes


def test_mixed_precision_casts_outputs(ranks):
    assert ranks(2, output_dtypes) == [[torch.bfloat16, torch.float32]] * 2
