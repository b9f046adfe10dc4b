"""Global gradient norms, and clipping by them: zerocore's function and torch's."""

import math

import models
import pytest
import sharded
import torch
import torch.distributed as dist
from reference import assembled
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zerocore

JOB = "transformer"
INF = math.inf


def backward(model, number=0):
    """Backward of this rank's part of a batch."""
    models.loss_of(model, models.batch(JOB, dist.get_rank(), number)).backward()


def clip(by, norm_type, max_norm, stage, mesh=None):
    """Norm returned, and gradients before and after clipping."""
    model = sharded.shard(JOB, stage, mesh=mesh)
    backward(model)
    before = sharded.pieces(model)
    if by == "zerocore":
        norm = zerocore.clip_grad_norm_(model, max_norm, norm_type)
    elif by == "torch":
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)
    else:
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads, norm_type)
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, norm)
    return norm, before, sharded.pieces(model)


@pytest.mark.parametrize("by", ["zerocore", "torch", "torch in two parts"])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, INF])
def test_clipping_is_by_the_global_norm(ranks, norm_type, by):
    where = [(3, None, stage) for stage in (0, 1, 2, 3)] + [(4, (2, 2), 2), (4, (2, 2), 3)]
    for size, mesh, stage in where:
        for max_norm in (0.01, 1e6):
            reports = ranks(size, clip, by, norm_type, max_norm, stage, mesh)
            before = assembled([r[1] for r in reports])
            after = assembled([r[2] for r in reports])
            norms = [g.double().norm(norm_type) for g in before.values()]
            exact = torch.stack(norms).norm(norm_type)
            for norm, *_ in reports:
                assert type(norm) is torch.Tensor and norm.dim() == 0
                assert norm.dtype == torch.float32
                assert torch.equal(norm, reports[0][0]), "the same on every rank"
                torch.testing.assert_close(norm.double(), exact, rtol=1e-6, atol=0)
            factor = min(1.0, max_norm / (exact.item() + 1e-6))
            for name in before:
                expected = before[name].double() * factor
                torch.testing.assert_close(after[name].double(), expected, rtol=1e-5, atol=1e-12)


def test_the_norm_is_that_of_one_process(ranks):
    model = models.build(JOB)
    for rank in range(3):
        (models.loss_of(model, models.batch(JOB, rank, 0)) / 3).backward()
    for norm_type in (1.0, 2.0, INF):
        exact = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9, norm_type)
        for stage in (0, 3):
            for norm, *_ in ranks(3, clip, "zerocore", norm_type, 1e9, stage):
                torch.testing.assert_close(norm, exact, rtol=1e-6, atol=0)


def part_of_the_parameters(stage):
    """Torch's function on some parameters: all of a block, then one that one rank holds alone."""
    model = sharded.shard(JOB, stage)
    backward(model)
    pieces = sharded.pieces(model)
    block = torch.nn.utils.clip_grad_norm_(model.blocks[1].parameters(), INF)
    bias = torch.nn.utils.clip_grad_norm_(model.blocks[0].fc1.bias, INF)
    return block, bias, pieces


def test_the_norm_of_some_parameters(ranks):
    for stage in (0, 3):
        reports = ranks(3, part_of_the_parameters, stage)
        gradients = assembled([r[2] for r in reports])
        block = [g.double() for name, g in gradients.items() if name.startswith("blocks.1.")]
        for norm, bias, _ in reports:
            exact = torch.cat(block).norm()
            torch.testing.assert_close(norm.double(), exact, rtol=1e-6, atol=0)
            exact = gradients["blocks.0.fc1.bias"].double().norm()
            torch.testing.assert_close(bias.double(), exact, rtol=1e-6, atol=0)


def not_finite(value, stage):
    """Norms with one such element on the last rank, by both functions; and the error for it."""
    model = sharded.shard(JOB, stage)
    backward(model)
    if dist.get_rank() == dist.get_world_size() - 1:
        held = [p.grad for p in model.parameters() if p.grad.numel()]
        held[-1].view(-1)[0] = value
    norms = []
    for norm_type in (1.0, 2.0, INF):
        grads = [p.grad.clone() for p in model.parameters()]
        norms.append(zerocore.clip_grad_norm_(model, INF, norm_type).item())
        for p, grad in zip(model.parameters(), grads, strict=True):
            p.grad.copy_(grad)
        norms.append(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()], norm_type))
    with pytest.raises(RuntimeError, match="non-finite|cannot be clipped"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    return [float(norm) for norm in norms]


@pytest.mark.parametrize("value", [INF, -INF, math.nan])
def test_what_is_not_finite_on_one_rank_is_so_on_all(ranks, value):
    for norms in ranks(3, not_finite, value, 3):
        assert not any(math.isfinite(norm) for norm in norms)
        if value != value:
            assert all(math.isnan(norm) for norm in norms)


def unreduced(stage):
    """Errors of both functions while gradients wait."""
    model = sharded.shard(JOB, stage)
    with zerocore.no_sync(model):
        backward(model)
    messages = []
    for call in (
        lambda: zerocore.clip_grad_norm_(model, 1.0),
        lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    ):
        try:
            call()
            messages.append("")
        except RuntimeError as error:
            messages.append(str(error))
    return messages


def test_gradients_that_wait_are_not_clipped(ranks):
    for messages in ranks(2, unreduced, 1):
        assert all("never reduced" in message for message in messages), messages


def others():
    """Torch's functions on tensors that are not sharded, beside a sharded model."""
    model = sharded.shard(JOB, 3)
    backward(model)
    own = nn.Linear(3, 2)
    own(torch.ones(1, 3)).sum().backward()
    alone = torch.nn.utils.clip_grad_norm_(own.parameters(), INF)
    whole = torch.nn.utils.clip_grad_norm_([*own.parameters(), *model.parameters()], INF)
    only = zerocore.clip_grad_norm_(model, INF)
    empty = torch.nn.utils.clip_grad_norm_([], 1.0)
    for norm_type in (0, -1.0, -INF):
        with pytest.raises(ValueError, match="norm_type: expected a positive number"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type)
    return alone, whole, only, empty


def test_other_tensors_are_counted_once(ranks):
    for alone, whole, only, empty in ranks(2, others):
        assert alone.item() == pytest.approx(8**0.5) and empty.item() == 0.0
        assert whole.item() == pytest.approx((8 + only.item() ** 2) ** 0.5, rel=1e-6)


class Experts(nn.Module):
    """A layer that all ranks share and one that only the ranks of a row do."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(0)
        self.shared = nn.Linear(5, 7)
        torch.manual_seed(seed)
        self.expert = nn.Linear(7, 3)

    def forward(self, x):
        """One after the other."""
        return self.expert(torch.tanh(self.shared(x)))


def experts(stage, by, max_norm=INF):
    """Norm with two different experts on two ranks each, and all gradients."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("expert", "data"))
    row = dist.get_rank() // 2
    model = Experts(1 + row)
    zerocore.shard(model.expert, stage, mesh=mesh["data"])
    zerocore.shard(model, stage, units=["shared"])
    opt = zerocore.AdamW(model.parameters(), max_grad_norm=max_norm)
    generator = torch.Generator().manual_seed(dist.get_rank())
    model(torch.randn(4, 5, generator=generator)).square().mean().backward()
    pieces = sharded.pieces(model)
    if by == "zerocore":
        norm = zerocore.clip_grad_norm_(model, INF)
    elif by == "torch":
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), INF)
    else:
        if by == "optimizer, inf" and dist.get_rank() == 3:
            p = max(model.expert.parameters(), key=lambda p: p.numel())
            p.grad.view(-1)[0] = INF
        before = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
        opt.step()
        after = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
        norm = opt.grad_norm
        if by == "optimizer, inf":
            assert torch.equal(before, after), "a step that one expert's ranks skip, all skip"
    return norm, pieces


@pytest.mark.parametrize("by", ["zerocore", "torch", "optimizer", "optimizer, inf"])
@pytest.mark.parametrize("stage", [0, 3])
def test_experts_on_some_ranks_are_counted_once(ranks, stage, by):
    reports = ranks(4, experts, stage, by)
    shared, parts = [r[1] for r in reports], []
    names = [name for name in shared[0] if name.startswith("shared")]
    parts += assembled([{n: r[n] for n in names} for r in shared]).values()
    for row in (shared[:2], shared[2:]):
        parts += assembled(
            [{n: p for n, p in r.items() if n.startswith("expert")} for r in row]
        ).values()
    exact = torch.cat([part.double() for part in parts]).norm()
    for norm, _ in reports:
        if by == "optimizer, inf":
            assert not norm.isfinite()
        else:
            torch.testing.assert_close(norm.double(), exact, rtol=1e-6, atol=0)
