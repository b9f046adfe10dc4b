"""What users do to parameters, gradients and graphs that no rule forbids: right, or an error."""

import gc
import types

import models
import pytest
import sharded
import torch
import torch.distributed as dist
from torch import nn

import zerocore

UNITS = ["layers.0", "layers.1", "layers.2"]
STAGES = [0, 1, 2, 3]


class Layer(nn.Module):
    """`output` says in what the result is returned."""

    def __init__(self, output):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.output = output

    def forward(self, x, box):
        x = x + torch.tanh(self.linear(x))
        if self.output == "object":
            return types.SimpleNamespace(x=x)
        if self.output == "nothing":
            box["x"] = x
            return None
        return x


class Net(nn.Module):
    """Three units and a root with parameters of its own."""

    def __init__(self, output="tensor"):
        super().__init__()
        self.inlet = nn.Linear(4, 8)
        self.layers = nn.ModuleList(Layer(output) for _ in range(3))
        self.outlet = nn.Linear(8, 2)

    def forward(self, x):
        x, box = self.inlet(x), {}
        for layer in self.layers:
            result = layer(x, box)
            x = box["x"] if result is None else getattr(result, "x", result)
        return self.outlet(x)


def build(output="tensor"):
    torch.manual_seed(3)
    return Net(output).double()


def loss_of(model, rank, number):
    generator = torch.Generator().manual_seed(100 * number + rank)
    x = torch.randn(5, 4, generator=generator, dtype=torch.float64)
    return model(x).square().mean()


def sgd_through_data(model):
    for p in model.parameters():
        p.data.add_(p.grad, alpha=-0.1)
        p.grad = None


def assign_data(model):
    for p in model.parameters():
        p.data = (p.data - 0.1 * p.grad).clamp(-0.3, 0.3)
        p.grad = None


def train(model, update, scale=1.0, parts=None):
    """Three steps on `parts` (default: this rank's)."""
    for step in range(3):
        for rank in parts if parts is not None else [dist.get_rank()]:
            (loss_of(model, rank, step) * scale).backward()
        update(model)
    return model


def trained(stage, update, output="tensor"):
    model = zerocore.shard(build(output), stage, units=UNITS)
    return train(model, update).state_dict()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("update", [sgd_through_data, assign_data])
def test_hand_written_updates(ranks, update, stage):
    """Writes through p.data, which no version counter notices, and assignments to it."""
    want = train(build(), update, scale=0.5, parts=[0, 1]).state_dict()
    for got in ranks(2, trained, stage, update):
        for name, value in want.items():
            torch.testing.assert_close(got[name], value, rtol=1e-12, atol=1e-12, msg=name)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("output", ["object", "nothing"])
def test_outputs_of_units_that_are_no_tensors(ranks, output, stage):
    want = train(build(), sgd_through_data, scale=0.5, parts=[0, 1]).state_dict()
    for got in ranks(2, trained, stage, sgd_through_data, output):
        for name, value in want.items():
            torch.testing.assert_close(got[name], value, rtol=1e-12, atol=1e-12, msg=name)


class Fail(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        raise ArithmeticError("a backward that fails")


def backward_after_a_failed_one(stage):
    """The gradients of a backward that follows a failed one, with no forward between."""
    found = []
    for fail in (True, False):
        model = zerocore.shard(build(), stage, units=UNITS)
        bad = Fail.apply(model(torch.ones(2, 4, dtype=torch.float64))).sum()
        good = loss_of(model, dist.get_rank(), 0)
        if fail:
            with pytest.raises(ArithmeticError):
                bad.backward()
            model.zero_grad()
        good.backward()
        found.append(sharded.pieces(model))
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_a_backward_after_a_failed_one_counts(ranks, stage):
    for got, want in ranks(2, backward_after_a_failed_one, stage):
        for name, piece in want.items():
            assert torch.equal(got[name].gradient, piece.gradient), name


def gradient_after_the_model_is_gone(stage):
    x = torch.ones(2, 4, dtype=torch.float64, requires_grad=True)
    model = zerocore.shard(build(), stage, units=UNITS, reshard_after_forward=None)
    loss = model(x).sum()
    del model
    gc.collect()
    loss.backward()
    return x.grad.clone()


@pytest.mark.parametrize("stage", STAGES)
def test_a_graph_outlives_its_model(ranks, stage):
    x = torch.ones(2, 4, dtype=torch.float64, requires_grad=True)
    build()(x).sum().backward()
    for got in ranks(2, gradient_after_the_model_is_gone, stage):
        torch.testing.assert_close(got, x.grad, rtol=1e-12, atol=1e-12)


def step_under_an_old_graph(stage):
    model = zerocore.shard(build(), stage, units=UNITS)
    optimizer = zerocore.AdamW(model.parameters())
    old, new = (loss_of(model, dist.get_rank(), number) for number in (0, 1))
    new.backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        old.backward()


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_makes_older_graphs_invalid(ranks, stage):
    ranks(2, step_under_an_old_graph, stage)


def write_in_forward(stage):
    model = build()
    frozen = model.layers[1].linear.bias.requires_grad_(False)
    zerocore.shard(model, stage, units=UNITS)

    def update(module, args):
        module.linear.bias.mul_(0.5)

    model.layers[1].register_forward_pre_hook(update)
    for number in (0, 1):
        loss_of(model, dist.get_rank(), number).backward()
    return zerocore.full_state_dict(model)["layers.1.linear.bias"], zerocore.info(frozen).stop


def test_writes_in_forward_last_or_are_errors(ranks):
    want = build().state_dict()["layers.1.linear.bias"] * 0.25
    for stage in (0, 1, 2):
        for got, _ in ranks(2, write_in_forward, stage):
            assert torch.equal(got, want)
    with pytest.raises(AssertionError, match="unit 'layers.1' was written to while"):
        ranks(2, write_in_forward, 3)


def step_before_shard(kind, stage):
    """The message of the step after shard() of an optimizer that stepped before it."""
    zerocore.shard(build(), 3)  # so that steps are watched already
    model = build()
    optimizer = kind(model.parameters(), lr=0.1)
    loss_of(model, 0, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    zerocore.shard(model, stage, units=UNITS)
    loss_of(model, dist.get_rank(), 0).backward()
    with pytest.raises(RuntimeError) as error:
        optimizer.step()
    return str(error.value)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, zerocore.AdamW])
def test_state_of_whole_parameters_is_refused(ranks, kind):
    for message in ranks(2, step_before_shard, kind, 2):
        assert "expected optimizer state of shards" in message


def refused():
    """Messages of errors of shard(), and of misuse afterwards."""
    messages = []
    model = build()
    model.outlet.weight.grad = torch.zeros_like(model.outlet.weight)
    with pytest.raises(ValueError) as error:
        zerocore.shard(model, 1)
    messages.append(str(error.value))
    model = build()
    model.layers[1].linear.weight.data = model.layers[0].linear.weight.data
    with pytest.raises(ValueError) as error:
        zerocore.shard(model, 1)
    messages.append(str(error.value))
    model = zerocore.shard(build(), 3, units=UNITS)
    model.float()
    with pytest.raises(ValueError) as error:
        loss_of(model, 0, 0)
    messages.append(str(error.value))
    model = zerocore.shard(build(), 3, units=UNITS)
    model.layers[0].register_forward_hook(lambda *_: model.state_dict() and None)
    with pytest.raises(RuntimeError) as error:
        loss_of(model, 0, 0)
    messages.append(str(error.value))
    return messages


def test_clear_errors(ranks):
    for gradient, tied, dtype, state in ranks(2, refused):
        assert "outlet.weight: expected a parameter without a gradient" in gradient
        assert "layers.1.linear.weight: expected memory of its own" in tied
        assert "was replaced: expected Double" in dtype
        assert "outside of a forward" in state


def outlived(optimizer):
    """Steps of an optimizer whose model is gone, on the shards that it still holds."""
    model = sharded.shard("transformer", 1)
    opt = sharded.optimizer_of(optimizer, model.parameters())
    sharded.step(model, opt, "transformer", 0)
    del model
    gc.collect()
    before = [p.detach().clone() for group in opt.param_groups for p in group["params"]]
    opt.step()  # the gradients are still there
    after = [p.detach() for group in opt.param_groups for p in group["params"]]
    return any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("optimizer", ["adamw", "zerocore"])
def test_an_optimizer_may_outlive_its_model(ranks, optimizer):
    assert all(ranks(2, outlived, optimizer))


def written_after_failure(stage, precision):
    """Shapes, and the factor on every parameter, after a failed backward and a doubling."""
    policy = zerocore.MixedPrecision(precision, output=torch.float32) if precision else None
    model = sharded.shard("attention", stage, mixed_precision=policy)
    before = zerocore.full_state_dict(model)
    shapes = [p.shape for p in model.parameters()]
    x = torch.randn(2, 4, 9)
    handle = model.first.register_forward_hook(
        lambda m, a, out: (models.Fails.apply(out[0]), out[1])
    )
    with pytest.raises(ArithmeticError):
        model(x).sum().backward()
    handle.remove()
    assert [p.shape for p in model.parameters()] == shapes
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2.0)
    model(x).sum().backward()
    after = zerocore.full_state_dict(model)
    return all(torch.equal(after[name], 2 * value) for name, value in before.items())


@pytest.mark.parametrize("precision", [None, torch.bfloat16])
@pytest.mark.parametrize("stage", STAGES)
def test_parameters_can_be_written_after_a_failed_backward(ranks, stage, precision):
    assert all(ranks(2, written_after_failure, stage, precision))


class Routed(nn.Module):
    """[B, 6] to [B, 6] through the experts that are named."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inlet = nn.Linear(6, 6)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.outlet = nn.Linear(6, 6)

    def forward(self, x, experts):
        """Those experts only."""
        x = self.inlet(x)
        for i in experts:
            x = torch.tanh(self.experts[i](x))
        return self.outlet(x)


def routed(stage, nested, how):
    """State after steps in which the ranks use an expert of its own shard() call differently."""
    model = Routed()
    if nested:
        zerocore.shard(model.experts[1], stage)
    zerocore.shard(model, stage, units=["experts.0"] if nested else ["experts.0", "experts.1"])
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    first = dist.get_rank() == 0
    for number in range(4):
        x = torch.randn(3, 6, generator=torch.Generator().manual_seed(10 * number + first))
        opt.zero_grad()
        if how == "no rank in the last micro-batch":
            with zerocore.no_sync(model):
                model(x, [0, 1]).square().mean().backward()
            model(x, [0]).square().mean().backward()
        else:
            model(x, [0, 1] if first == (number % 2 == 0) else [0]).square().mean().backward()
        opt.step()
    return zerocore.full_state_dict(model)


@pytest.mark.parametrize("how", ["one rank", "no rank in the last micro-batch"])
def test_ranks_may_use_a_nested_model_differently(ranks, how):
    for stage in (0, 1, 2):
        expected = ranks(2, routed, stage, False, how)[0]
        for state in ranks(2, routed, stage, True, how):
            for name, value in expected.items():
                assert torch.equal(state[name], value), (stage, name)


class Tail(nn.Module):
    """A layer, and on some ranks the encoder that another model has too."""

    def __init__(self, encoder):
        super().__init__()
        self.inlet = nn.Linear(6, 6)
        self.encoder = encoder

    def forward(self, x, encode):
        """The encoder's output is this one's."""
        x = self.inlet(x)
        return self.encoder(x) if encode else x


def shared_encoder(stage):
    """State of two models with one sharded encoder in both, which ranks use differently."""
    torch.manual_seed(0)
    encoder = zerocore.shard(nn.Linear(6, 6), stage)
    models = [zerocore.shard(Tail(encoder), stage) for _ in range(2)]
    opt = torch.optim.SGD([*models[0].parameters(), *models[1].inlet.parameters()], lr=0.1)
    for number in range(4):
        opt.zero_grad()
        x = torch.randn(2, 6, generator=torch.Generator().manual_seed(number))
        encode = dist.get_rank() == number % 2
        models[number // 2](x, encode).square().mean().backward()
        opt.step()
    return [zerocore.full_state_dict(model) for model in models]


def test_one_encoder_in_two_models(ranks):
    expected = ranks(2, shared_encoder, 0)[0]
    for stage in (1, 2):
        for states in ranks(2, shared_encoder, stage):
            for state, other in zip(states, expected, strict=True):
                assert all(torch.equal(state[name], other[name]) for name in other)


def sharded_twice(stage):
    """The error of a second call, and the norm with a module that was added and not sharded."""
    model = zerocore.shard(nn.Sequential(nn.Linear(6, 6)), stage)
    torch.manual_seed(0)
    model.append(nn.Linear(6, 6))
    with pytest.raises(RuntimeError, match=f"got one that is, at stage {stage}"):
        zerocore.shard(model, stage)
    model(torch.ones(2, 6)).square().mean().backward()
    ours = zerocore.clip_grad_norm_(model, float("inf"))
    return ours.item(), torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf")).item()


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_module_added_to_a_sharded_model(ranks, stage):
    for ours, torchs in ranks(2, sharded_twice, stage):
        assert ours == pytest.approx(torchs, rel=1e-6)
