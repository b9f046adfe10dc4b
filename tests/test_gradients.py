"""Honest gradients: what p.grad, hooks and zero_grad mean in plain PyTorch, they mean on shards."""

import warnings

import models
import pytest
import reference
import sharded
import torch
import torch.distributed as dist
from reference import assembled, assert_same, memory_order
from torch import nn

import zerocore

JOB = "transformer"


def backward(model, number, sync=True):
    """One backward of this rank; without reduction if asked."""
    if not sync:
        with zerocore.no_sync(model):
            return backward(model, number)
    models.loss_of(model, models.batch(JOB, dist.get_rank(), number)).backward()


def local(number, size, rank):
    """Gradients of a rank's own part, in memory order, of a plain model."""
    model = models.build(JOB)
    models.loss_of(model, models.batch(JOB, rank, number)).backward()
    return reference.named_gradients(model)


def zero_after_no_sync(stage, by_optimizer, set_to_none):
    """Gradients after a no-sync backward, zero_grad and a backward; and of that backward alone."""
    found = []
    for dirty in (True, False):
        model = sharded.shard(JOB, stage)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        if dirty:
            backward(model, 0, sync=False)
            (opt if by_optimizer else model).zero_grad(set_to_none=set_to_none)
            zeros = [0 if p.grad is None else p.grad.abs().sum().item() for p in model.parameters()]
            assert not any(zeros), zeros
        backward(model, 1)
        found.append(sharded.pieces(model))
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("by_optimizer", [True, False])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_zero_grad_clears_unreduced_gradients(ranks, stage, by_optimizer, set_to_none):
    reports = ranks(2, zero_after_no_sync, stage, by_optimizer, set_to_none)
    dirty, clean = (assembled(list(r)) for r in zip(*reports, strict=True))
    assert_same(dirty, clean)


def unreduced(stage):
    """Pieces after one and after two backwards under no_sync."""
    model = sharded.shard(JOB, stage)
    backward(model, 0, sync=False)
    first = sharded.pieces(model)
    backward(model, 1, sync=False)
    return first, sharded.pieces(model)


@pytest.mark.parametrize("stage", [0, 1])
def test_no_sync_shows_this_ranks_part_of_its_local_gradient(ranks, stage):
    for rank, (first, second) in enumerate(ranks(2, unreduced, stage)):
        grads = local(0, 2, rank), local(1, 2, rank)
        held = 0
        for name, (start, stop, gradient) in first.items():
            scale = gradient / grads[0][name][start:stop]  # a stage may fold 1/N in now or later
            assert torch.equal(gradient, grads[0][name][start:stop]), f"{name}: {scale}"
            both = (grads[0][name] + grads[1][name])[start:stop]
            torch.testing.assert_close(second[name].gradient, both, rtol=1e-5, atol=1e-7)
            held += stop - start
        assert held > 0


def accumulate(stage, how, micro=3):
    """Trains with k micro-batches a step: every one reduced, or only the last."""
    model = sharded.shard(JOB, stage)
    opt = sharded.optimizer_of("adamw", model.parameters())
    for step in range(3):
        opt.zero_grad()
        for i in range(micro):
            backward(model, step * micro + i, sync=how == "sync" or i == micro - 1)
        gradients = sharded.pieces(model)
        opt.step()
    return gradients, reference.clones(zerocore.full_state_dict(model))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", ["sync", "no_sync"])
def test_accumulation(ranks, how):
    model = models.build(JOB).double()
    opt = reference.OPTIMIZERS["adamw"](model.parameters())
    for step in range(3):
        opt.zero_grad()
        for number in range(3 * step, 3 * step + 3):
            for rank in range(2):
                part = models.batch(JOB, rank, number, torch.float64)
                (models.loss_of(model, part) / 2).backward()
        gradients = reference.named_gradients(model)
        opt.step()
    for stage in range(4):
        reports = ranks(2, accumulate, stage, how)
        full = assembled([pieces for pieces, _ in reports])
        for name, gradient in gradients.items():
            torch.testing.assert_close(full[name].double(), gradient, rtol=1e-3, atol=1e-5)
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(reports[0][1][name].double(), tensor, rtol=1e-4, atol=1e-5)


def step_unreduced(stage, optimizer):
    """The error of a step with gradients that were never reduced."""
    model = sharded.shard(JOB, stage)
    opt = sharded.optimizer_of(optimizer, model.parameters())
    before = reference.clones(zerocore.full_state_dict(model))
    backward(model, 0, sync=False)
    try:
        opt.step()
    except RuntimeError as error:
        assert_same(zerocore.full_state_dict(model), before)
        return str(error)
    return None


@pytest.mark.parametrize("optimizer", ["adamw", "zerocore"])
@pytest.mark.parametrize("stage", [0, 1])
def test_step_with_unreduced_gradients_is_an_error(ranks, stage, optimizer):
    for message in ranks(2, step_unreduced, stage, optimizer):
        assert message is not None, "expected a RuntimeError"
        assert "no_sync" in message or "reduce" in message, message


def no_sync_warnings(stage):
    """How often no_sync warns."""
    model = sharded.shard(JOB, stage)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(3):
            backward(model, number, sync=False)
            backward(model, number)
            model.zero_grad()
    return [str(w.message) for w in caught if "no_sync" in str(w.message)]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_no_sync_warns_once_where_it_costs_memory(ranks, stage):
    messages = sum(ranks(2, no_sync_warnings, stage), [])
    if stage < 2:
        assert messages == []
    else:
        assert 1 <= len(messages) <= 2, messages  # rank 0, or each rank


def hook_calls(stage, before_shard, sync):
    """What tensor hooks saw in two backwards, and gradients that a hook changed."""
    model = models.build(JOB)
    seen = {}

    def register():
        for name, parameter in model.named_parameters():
            parameter.register_hook(lambda g, n=name: seen.setdefault(n, []).append(g.clone()))

    if before_shard:
        register()
    zerocore.shard(model, stage, units=models.BLOCKS)
    if not before_shard:
        register()
    model.position.register_hook(lambda g: 3 * g)
    for number in range(2):
        backward(model, number, sync)
    orders = {n: p for n, p in models.build(JOB).named_parameters()}
    flat = {n: [memory_order(g, orders[n]) for g in grads] for n, grads in seen.items()}
    shapes = {n: g[0].shape == orders[n].shape for n, g in seen.items()}
    return flat, shapes, sharded.pieces(model)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("before_shard", [True, False])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_tensor_hooks_fire_once_and_see_the_full_local_gradient(ranks, stage, before_shard):
    reports = ranks(2, hook_calls, stage, before_shard, True)
    for rank, (seen, shapes, _) in enumerate(reports):
        assert all(shapes.values()) and len(shapes) == len(seen)
        for number in range(2):
            expected = local(number, 2, rank)
            assert set(seen) == set(expected)
            for name in expected:
                assert len(seen[name]) == 2, f"hook of {name} fired {len(seen[name])} times in 2"
                assert torch.equal(seen[name][number], expected[name]), name
    full = assembled([pieces for *_, pieces in reports])
    changed = 3 * sum(local(n, 2, rank)["position"] for n in (0, 1) for rank in (0, 1)) / 2
    torch.testing.assert_close(full["position"], changed, rtol=1e-4, atol=1e-6)


def train_with(made_before, stage, optimizer):
    """Two steps with an optimizer made before or after shard()."""
    model = models.build(JOB)
    make = lambda: sharded.optimizer_of(optimizer, model.parameters())  # noqa: E731
    opt = make() if made_before else None
    zerocore.shard(model, stage, units=models.BLOCKS)
    opt = opt or make()
    for number in range(2):
        sharded.step(model, opt, JOB, number)
    return reference.clones(zerocore.full_state_dict(model))


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "zerocore"])
@pytest.mark.parametrize("stage", [0, 3])
def test_an_optimizer_made_before_shard_trains(ranks, stage, optimizer):
    before = ranks(2, train_with, True, stage, optimizer)
    after = ranks(2, train_with, False, stage, optimizer)
    assert_same(before[0], after[0])
    start = models.build(JOB).state_dict()
    assert all(not torch.equal(before[0][name], start[name]) for name in start)


def groups(stage):
    """Names with p.dim() >= 2, and names in order, before and after shard()."""
    model = models.build("odd")
    views = []
    for _ in range(2):
        named = list(model.named_parameters())
        views.append([(n, p.dim() >= 2) for n, p in named])
        if len(views) == 1:
            zerocore.shard(model, stage, units=["inner"])
    shapes = {n: (tuple(p.shape), zerocore.info(p)) for n, p in model.named_parameters()}
    return views, shapes


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_dim_grouping_and_shapes(ranks, stage, size):
    reports = ranks(size, groups, stage)
    originals = dict(models.build("odd").named_parameters())
    for name, original in originals.items():
        covered = []
        for (before, after), shapes in reports:
            assert before == after
            shape, info = shapes[name]
            assert (info.name, tuple(info.shape)) == (name, tuple(original.shape))
            assert info.dtype == original.dtype
            assert info.unit == ("inner" if name.startswith("inner") else "")
            count = info.stop - info.start
            covered += range(info.start, info.stop)
            if size == 1 or stage == 0:
                assert shape == tuple(original.shape)
            elif original.dim() == 0:
                assert shape == (() if count else (0,))
            else:
                assert shape == (count, *[1] * (original.dim() - 1))  # with its ndim
        copies = size if stage == 0 else 1
        assert sorted(covered) == sorted([*range(original.numel())] * copies), name


class Stateful(nn.Module):
    """Persistent and non-persistent buffers of several dtypes beside parameters."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 5)
        self.norm = nn.BatchNorm1d(5)
        self.register_buffer("table", torch.randn(7))
        self.register_buffer("hidden", torch.randn(2, 2), persistent=False)
        self.register_buffer("count", torch.randint(100, ()))
        self.register_buffer("mask", torch.rand(9) > 0.5)


def start_values(stage, mesh):
    """Full parameters and buffers before and after shard(), of ranks with seeds of their own."""
    torch.manual_seed(50 + dist.get_rank())
    model = Stateful()
    nn.init.normal_(model.norm.running_mean)
    before = reference.clones(dict(model.named_parameters()) | dict(model.named_buffers()))
    options = {}
    if mesh:
        names = ("replicate", "shard")
        options["mesh"] = dist.device_mesh.init_device_mesh("cpu", mesh, mesh_dim_names=names)
    zerocore.shard(model, stage, **options)
    with zerocore.gathered(model):
        return before, reference.clones(
            dict(model.named_parameters()) | dict(model.named_buffers())
        )


@pytest.mark.parametrize("mesh", [None, (2, 2)])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_ranks_start_from_rank_0(ranks, stage, mesh):
    reports = ranks(4 if mesh else 3, start_values, stage if not mesh else max(stage, 1), mesh)
    expected = reports[0][0]
    assert not torch.equal(expected["hidden"], reports[1][0]["hidden"]), "the ranks' seeds differ"
    for _, after in reports:
        assert_same(after, expected)


def changed_by_hand(stage, optimizer, how):
    """A step after the user changed the gradients."""
    model = sharded.shard(JOB, stage)
    opt = sharded.optimizer_of(optimizer, model.parameters())
    for number in range(2):
        opt.zero_grad()
        backward(model, number)
        for p in model.parameters():
            if how == "in place":
                p.grad.mul_(0.5)
            elif how == "replaced":
                p.grad = p.grad * 0.5
            else:
                p.grad = None if p.dim() < 2 else p.grad * 0.5
        opt.step()
    return reference.clones(zerocore.full_state_dict(model))


@pytest.mark.parametrize("how", ["in place", "replaced", "some set to None"])
@pytest.mark.parametrize("optimizer", ["adamw", "zerocore"])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_gradients_that_the_user_changes(ranks, stage, optimizer, how):
    model = models.build(JOB).double()
    opt = reference.OPTIMIZERS["adamw"](model.parameters())
    start = reference.clones(model.state_dict())
    for number in range(2):
        opt.zero_grad()
        for rank in range(2):
            (models.loss_of(model, models.batch(JOB, rank, number, torch.float64)) / 4).backward()
        for p in model.parameters():
            if how == "some set to None" and p.dim() < 2:
                p.grad = None
        opt.step()
    for state in ranks(2, changed_by_hand, stage, optimizer, how):
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(state[name].double(), tensor, rtol=1e-4, atol=1e-5)
            if how == "some set to None" and tensor.dim() < 2:
                assert torch.equal(state[name].double(), start[name]), name


def held_by_the_user(stage):
    """Gradients that somebody still holds when the next backward comes, and those that it gives."""
    model = sharded.shard(JOB, stage)
    backward(model, 0)
    held = [p.grad for p in model.parameters()]
    before = [g.clone() for g in held]
    model.zero_grad()
    backward(model, 1)
    unchanged = [torch.equal(a, b) for a, b in zip(held, before, strict=True)]
    return unchanged, sharded.pieces(model)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_cleared_gradients_belong_to_whom_holds_them(ranks, stage):
    reports = ranks(2, held_by_the_user, stage)
    for unchanged, _ in reports:
        assert all(unchanged)
    full = assembled([pieces for _, pieces in reports])
    expected = [local(1, 2, rank) for rank in (0, 1)]
    for name, gradient in full.items():
        mean = (expected[0][name] + expected[1][name]) / 2
        torch.testing.assert_close(gradient, mean, rtol=1e-5, atol=1e-7)


def accumulated(stage):
    """Gradients after two reduced backwards without clearing, pieces after each."""
    model = sharded.shard(JOB, stage)
    backward(model, 0)
    backward(model, 1)
    both = sharded.pieces(model)
    model.zero_grad(set_to_none=False)
    backward(model, 1)
    return both, sharded.pieces(model)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_backwards_add_up_until_cleared(ranks, stage):
    reports = ranks(2, accumulated, stage)
    both, one = (assembled(list(pieces)) for pieces in zip(*reports, strict=True))
    means = [{n: (local(k, 2, 0)[n] + local(k, 2, 1)[n]) / 2 for n in both} for k in (0, 1)]
    for name in both:
        expected = means[0][name] + means[1][name]
        torch.testing.assert_close(both[name], expected, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(one[name], means[1][name], rtol=1e-4, atol=1e-6)


def cleared_after_failure(stage, where, set_to_none):
    """Gradients of a backward after: one that worked, one that failed, and zero_grad()."""
    model = sharded.shard(JOB, stage)
    backward(model, 0)
    block = model.blocks[{"early": 2, "late": 0}.get(where, 1)]
    handle = block.register_forward_hook(lambda module, args, out: models.Fails.apply(out))
    if where != "nowhere":
        with pytest.raises(ArithmeticError):
            backward(model, 1)
    handle.remove()
    model.zero_grad(set_to_none=set_to_none)
    backward(model, 2)
    return sharded.pieces(model)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_zero_grad_clears_what_a_failed_backward_left(ranks, stage, set_to_none):
    expected = assembled(ranks(2, cleared_after_failure, stage, "nowhere", set_to_none))
    for where in ("early", "late"):
        found = assembled(ranks(2, cleared_after_failure, stage, where, set_to_none))
        assert_same(found, expected)
