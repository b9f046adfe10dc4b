"""Dtypes of computation, messages, main gradients and masters; what they cost; what they give."""

import contextlib

import models
import pytest
import reference
import sharded
import torch
import torch.distributed as dist
from reference import assert_same
from torch import nn
from torch.nn import functional as F

import zerocore

STAGES = [0, 1, 2, 3]
JOB = "transformer"


def loss_of(model, number, rank=None):
    """Mean loss in fp32, whatever the model's dtype."""
    x, target = models.batch(JOB, dist.get_rank() if rank is None else rank, number)
    return F.cross_entropy(model(x).float().flatten(0, -2), target.flatten())


# ---- resident bytes --------------------------------------------------------------------------


def resident(stage, accumulate, master):
    """Bytes after a step, while gradients wait at stages 0 and 1, and sizes of the units."""
    policy = zerocore.MixedPrecision(torch.bfloat16, accumulate=accumulate, master=master)
    model = sharded.shard(JOB, stage, mixed_precision=policy)
    opt = zerocore.AdamW(model.parameters(), lr=1e-2)
    for number in range(2):
        opt.zero_grad()
        loss_of(model, number).backward()
        opt.step()
    found = [dict(zerocore.stats(model, opt).resident)]
    if stage < 2:
        opt.zero_grad()
        with zerocore.no_sync(model):
            for number in range(2):
                loss_of(model, number).backward()
                assert {p.grad.dtype for p in model.parameters()} == {accumulate}
        found.append(dict(zerocore.stats(model, opt).resident))
    return found, dict(zerocore.stats(model).units)


@pytest.mark.parametrize("accumulate", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_bytes_equal_the_formulas(ranks, size, accumulate):
    width = accumulate.itemsize
    for stage in STAGES:
        for found, units in ranks(size, resident, stage, accumulate, torch.float32):
            whole = sum(unit.padded for unit in units.values())
            shard = sum(unit.shard for unit in units.values())
            assert shard == (whole if stage == 0 else whole // size)
            # 16 B/param; 2 + 14/N once reduced; 14/N; and 2 more for each fp32 gradient
            expected = {
                "parameters": 0 if stage == 3 else 2 * whole,
                "gradients": width * shard,
                "master": 4 * shard,
                "moments": 8 * shard,
            }
            assert found[0] == expected
            if stage < 2:  # 16, 4 + 12/N while a full gradient waits
                assert found[1] == expected | {"gradients": width * whole}


@pytest.mark.parametrize("stage", STAGES)
def test_bytes_without_a_master(ranks, stage):
    for found, units in ranks(2, resident, stage, torch.bfloat16, None):
        whole = sum(unit.padded for unit in units.values())
        shard = sum(unit.shard for unit in units.values())
        expected = {
            "parameters": 2 * (shard if stage == 3 else whole),
            "gradients": 2 * shard,
            "master": 0,
            "moments": 4 * shard,
        }
        assert found[0] == expected
        if stage < 2:
            assert found[1] == expected | {"gradients": 2 * whole}


# ---- dtypes ----------------------------------------------------------------------------------


class Kinds(nn.Module):
    """Parameters of every kind of dtype, most of them frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.linear = nn.Linear(7, 5)
        self.narrow = nn.Linear(5, 3).to(torch.bfloat16)
        self.base = nn.Parameter(torch.randn(33, dtype=torch.bfloat16), requires_grad=False)
        self.wide = nn.Parameter(torch.randn(17), requires_grad=False)
        for name, values in {
            "long": torch.randint(-(2**60), 2**60, (37,)),
            "byte": torch.randint(0, 255, (19,), dtype=torch.uint8),
            "bool": torch.rand(21) < 0.5,
            "complex": torch.randn(23, dtype=torch.complex64),
            "complex128": torch.randn(5, dtype=torch.complex128),
        }.items():
            self.register_parameter(name, nn.Parameter(values, requires_grad=False))
        self.seen = {}

    def forward(self, x):
        """Notes the dtypes that it computes with."""
        self.seen = {name: p.dtype for name, p in self.named_parameters()}
        self.copies = {
            n: p.detach().clone() for n, p in self.named_parameters() if not p.is_floating_point()
        }
        return self.narrow(self.linear(x)) + self.base[:3] + self.wide[:3]


def kinds(stage, master):
    """Dtypes in and out of the forward, and all values."""
    before = reference.clones(dict(Kinds().named_parameters()))
    policy = zerocore.MixedPrecision(torch.bfloat16, master=master)
    model = zerocore.shard(Kinds(), stage, mixed_precision=policy)
    model(torch.randn(2, 7)).float().sum().backward()
    after = {name: p.dtype for name, p in model.named_parameters()}
    for name, copy in model.copies.items():
        assert copy.dtype == before[name].dtype
        assert torch.equal(copy.view(torch.uint8), before[name].view(torch.uint8)), name
    state = zerocore.full_state_dict(model)
    for name, value in before.items():
        exact = value if after[name] == value.dtype else value.to(after[name])
        assert state[name].dtype == exact.dtype and torch.equal(state[name], exact), name
    return model.seen, after


@pytest.mark.parametrize("master", [torch.float32, None])
def test_dtypes_of_every_kind_of_parameter(ranks, master):
    for stage in STAGES:
        for seen, after in ranks(2, kinds, stage, master):
            kept = {name: p.dtype for name, p in Kinds().named_parameters()}
            trained = [name for name in kept if "." in name]
            floating = [name for name, dtype in kept.items() if dtype.is_floating_point]
            assert seen == kept | dict.fromkeys(floating, torch.bfloat16)
            assert after == kept | dict.fromkeys(trained, master or torch.bfloat16)


def test_bad_dtypes_are_refused():
    for name in ("param", "reduce", "buffer", "output", "accumulate", "master"):
        for bad in (torch.int32, torch.complex64, torch.float8_e4m3fn, "bf16"):
            with pytest.raises(ValueError, match=f"\\({name}=...\\): expected torch.bfloat16"):
                zerocore.MixedPrecision(**{name: bad})
    for name in ("param", "accumulate"):
        with pytest.raises(ValueError, match="got None"):
            zerocore.MixedPrecision(**{name: None})


# ---- values ----------------------------------------------------------------------------------


def train(stage, steps=6, optimizer="zerocore", micro=1, dtype=torch.bfloat16, **policy):
    """Losses and the state after some steps."""
    policy = zerocore.MixedPrecision(dtype, **policy)
    model = sharded.shard(JOB, stage, mixed_precision=policy)
    opt = sharded.optimizer_of(optimizer, model.parameters())
    losses = []
    for number in range(steps):
        opt.zero_grad()
        for part in range(micro):
            loss = loss_of(model, micro * number + part)
            loss.backward()
            losses.append(loss.item())
        opt.step()
    return losses, reference.clones(zerocore.full_state_dict(model))


@pytest.mark.parametrize(
    "policy",
    [
        {"dtype": torch.float16},
        {"reduce": torch.float32},
        {"accumulate": torch.bfloat16, "micro": 3},
        {"micro": 3},
        {"master": None},
        {"accumulate": torch.bfloat16, "optimizer": "adamw"},
        {"accumulate": torch.bfloat16, "master": None, "optimizer": "sgd"},
    ],
    ids=str,
)
def test_stages_are_bit_equal(ranks, policy):
    (losses, expected), _ = ranks(2, train, 0, **policy)
    assert losses[-1] < losses[0]
    for stage in STAGES[1:]:
        found, state = ranks(2, train, stage, **policy)[0]
        assert found == losses
        assert_same(state, expected)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_bf16_model_without_master_is_plain_bf16_training(ranks, optimizer):
    model = models.build(JOB).to(torch.bfloat16)
    opt = reference.OPTIMIZERS[optimizer](model.parameters())
    for number in range(6):
        opt.zero_grad()
        loss_of(model, number, rank=0).backward()
        opt.step()
    policy = {"master": None, "accumulate": torch.bfloat16, "optimizer": optimizer}
    ((_, state),) = ranks(1, train, 0, **policy)
    expected = dict(model.named_parameters(remove_duplicate=False))
    assert_same(state, {name: p.detach() for name, p in expected.items()})


def test_accumulation_in_fp32_loses_no_small_gradient(ranks):
    for small in ranks(2, accumulate_small, torch.float32):
        assert small == 2.0 + 64 * 2.0**-9
    for small in ranks(2, accumulate_small, torch.bfloat16):
        assert small == 2.0, "the example is one in which bf16 loses them"


def accumulate_small(dtype):
    """A gradient of 2, and 64 of 2^-9, added up in both ways."""
    results = set()
    for stage in STAGES:
        for sync in (True, False):
            model = nn.Linear(1, 1, bias=False)
            policy = zerocore.MixedPrecision(torch.bfloat16, accumulate=dtype)
            zerocore.shard(model, stage, mixed_precision=policy)
            for value in (2.0, *[2.0**-9] * 64):
                with contextlib.nullcontext() if sync else zerocore.no_sync(model):
                    model(torch.full((1, 1), value)).sum().backward()
            if not sync:
                model(torch.zeros(1, 1)).sum().backward()
            (p,) = model.parameters()
            held = torch.zeros(dist.get_world_size())
            held[dist.get_rank()] = p.grad.float().sum()  # one rank holds the only element
            dist.all_reduce(held, dist.ReduceOp.MAX)
            results.add(held.max().item())
    assert len(results) == 1, results
    return results.pop()


# ---- the window's own slot -------------------------------------------------------------------


def change_after_step(stage, how):
    """Losses of further steps when parameters are changed behind the optimizer's back."""
    policy = zerocore.MixedPrecision(torch.bfloat16)
    model = sharded.shard(JOB, stage, mixed_precision=policy)
    opt = zerocore.AdamW(model.parameters(), lr=1e-2, max_grad_norm=1.0)
    losses = []
    for number in range(4):
        loss = loss_of(model, number)
        loss.backward()
        opt.step()
        opt.zero_grad()
        with torch.no_grad():
            if how == "in place":
                for p in model.parameters():
                    p.mul_(1.1)
            elif how == "replaced":
                for p in model.parameters():
                    p.data = p.data * 1.1
            elif how == "gathered":
                with zerocore.gathered(model, write=True):
                    for p in model.parameters():
                        p.mul_(1.1)
            elif how == "loaded":
                state = zerocore.full_state_dict(model)
                model.load_state_dict({name: value * 1.1 for name, value in state.items()})
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("how", ["in place", "replaced", "gathered", "loaded"])
def test_changes_between_steps_reach_the_window(ranks, how):
    """Stage 3 keeps nothing in the window between steps: the others must see what it sees."""
    expected = ranks(2, change_after_step, 3, how)
    assert expected != ranks(2, change_after_step, 3, "not at all")
    for stage in (0, 1, 2):
        assert ranks(2, change_after_step, stage, how) == expected
