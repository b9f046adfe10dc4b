"""Models on the meta device: initialised unit by unit, or empty until they are loaded."""

import pytest
import torch
import torch.distributed as dist
from constructions import Gpt, differences, hugging_face, mlp
from reference import clones
from torch import nn
from torch.nn import functional as F

import zerocore


def on_meta(build):
    with torch.device("meta"):
        return build()


class Mlp(nn.Module):
    """Units, a batch norm with buffers, a weight that two units share, and a frozen one."""

    def __init__(self):
        super().__init__()
        self.inlet = nn.Linear(6, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.layers[2].weight = self.layers[0].weight
        self.norm = nn.BatchNorm1d(8)
        self.outlet = nn.Linear(8, 2)
        self.outlet.bias.requires_grad_(False)

    def forward(self, x):
        x = self.inlet(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.outlet(self.norm(x))


UNITS = ["layers.0", "layers.1", "layers.2"]


def initialised(stage, init, log=False):
    """State, buffers, identity of the parameters, and which modules were given to `init`."""
    calls = []

    def constant(module):
        calls.append(type(module).__name__)
        for i, param in enumerate(module.parameters(recurse=False)):
            assert param.device.type == "cpu" and param.shape != torch.Size([1])
            assert param.isnan().all() or (param == i + 0.5).all()  # the shared one comes twice
            param.fill_(i + 0.5)
        if isinstance(module, nn.BatchNorm1d):
            module.reset_running_stats()

    model = on_meta(Mlp)
    before = [(name, id(param)) for name, param in model.named_parameters()]
    torch.manual_seed(100 + dist.get_rank())  # the first rank's generator decides
    zerocore.shard(model, stage, units=UNITS, init=constant if init == "function" else None)
    same = before == [(name, id(param)) for name, param in model.named_parameters()]
    model(torch.ones(3, 6)).sum().backward()
    opt = zerocore.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    opt.step()
    return clones(zerocore.full_state_dict(model)), same, calls


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("size", [1, 2])
def test_function(ranks, size, stage):
    expected = Mlp()
    for state, same, calls in ranks(size, initialised, stage, "function"):
        assert same
        assert sorted(calls) == ["BatchNorm1d"] + ["Linear"] * 5
        for name, tensor in expected.state_dict().items():
            assert state[name].shape == tensor.shape
            if not name.startswith("norm."):
                assert (state[name] == (0.5 if name.endswith("weight") else 1.5)).all()


@pytest.mark.parametrize("stage", [0, 3])
def test_default_is_that_of_the_modules(ranks, stage):
    results = ranks(2, initialised, stage, None)
    for state, same, _ in results:
        assert same
        assert state["norm.weight"].eq(1).all()
        bound = 1 / 8**0.5
        for name in ("layers.0.weight", "layers.1.weight", "layers.1.bias", "outlet.weight"):
            assert 0 < state[name].abs().max() <= bound and state[name].unique().numel() > 1
        assert torch.equal(state["layers.0.weight"], state["layers.2.weight"])
        assert not torch.equal(state["layers.0.weight"], state["layers.1.weight"])
    for name, tensor in results[0][0].items():
        if not name.startswith("norm."):  # batch statistics are each rank's own
            assert torch.equal(tensor, results[1][0][name]), name


def model_initialisation():
    """A model's _init_weights comes after the modules' own."""
    torch.manual_seed(dist.get_rank())
    model = on_meta(Gpt)
    for block in model.blocks:
        block.mask = torch.ones(1, 9, 9)  # in memory: the model has no rule for it
    zerocore.shard(model, 3)
    state = zerocore.full_state_dict(model)
    return state["blocks.1.up.bias"], state["embed.weight"].std(), state["blocks.0.norm.weight"]


def test_models_initialise_after_their_modules(ranks):
    for bias, deviation, norm in ranks(2, model_initialisation):
        assert bias.eq(0).all() and norm.eq(1).all()
        assert 0.01 < deviation < 0.03


def hugging_face_initialisation():
    torch.manual_seed(0)
    model = on_meta(lambda: hugging_face("llama"))
    zerocore.shard(model, 3)
    expected = hugging_face("llama")
    buffers = dict(model.named_buffers())
    for name, buffer in expected.named_buffers():
        assert torch.equal(buffer, buffers[name]), name
    return zerocore.full_state_dict(model)["model.embed_tokens.weight"].std()


def test_hugging_face_default(ranks):
    pytest.importorskip("transformers")
    for deviation in ranks(2, hugging_face_initialisation):
        assert 0.015 < deviation < 0.025


class Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(40))
        self.linear = nn.Linear(4, 4)
        self.register_buffer("table", torch.ones(3), persistent=False)


class Masked(nn.Linear):
    """Its constructor gives a buffer values that reset_parameters() does not."""

    def __init__(self):
        super().__init__(5, 5)
        self.register_buffer("mask", torch.ones(5, 5).tril().bool(), persistent=False)


def forget(module):
    if isinstance(module, nn.Linear):
        module.weight.data.fill_(1)


def replace(module):
    for name, param in module.named_parameters(recurse=False):
        setattr(module, name, nn.Parameter(torch.ones(param.shape)))


REFUSED = [
    (
        None,
        Bare,
        r"init: expected modules on the meta device to have reset_parameters\(\), got the",
    ),
    ("empty", Bare, r"init: expected.*got the model \(Bare, with table\).*not persistent"),
    ("zeros", Bare, "init: expected a function of a module, 'empty' or None, got 'zeros'"),
    (forget, mlp, r"init: expected every element of '.*' to get a value, got NaN"),
    (None, Masked, r"init: expected the buffer 'mask' \(torch.bool\) to get values, got nothing"),
    (
        "empty",
        Masked,
        r"init: expected the buffer 'mask' \(torch.bool\) to get values, got nothing",
    ),
    (replace, mlp, "init: .*: expected it to fill 'weight' in place"),
]


def refused(number):
    init, build, text = REFUSED[number]
    with pytest.raises(ValueError, match=text):
        zerocore.shard(on_meta(build), 3, init=init)


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_refused_on_every_rank(ranks, number):
    ranks(2, refused, number)


def init_without_meta():
    with pytest.raises(ValueError, match="init: expected None for a model without parameters or"):
        zerocore.shard(mlp(), 3, init=lambda module: None)
    with pytest.raises(ValueError, match="init: expected None"):
        zerocore.shard(mlp(), 3, init="empty")


def test_init_is_for_meta_models(ranks):
    ranks(2, init_without_meta)


def fails_on_one_rank():
    """An `init` that raises on one rank is an error on both."""

    def init(module):
        if dist.get_rank() == 1:
            raise KeyError("no such file")
        for param in module.parameters(recurse=False):
            param.fill_(1)

    expected = KeyError if dist.get_rank() == 1 else ValueError
    with pytest.raises(expected, match="no such file"):
        zerocore.shard(on_meta(mlp), 3, init=init)
    model = on_meta(mlp) if dist.get_rank() else mlp()
    with pytest.raises(ValueError, match="meta device"):
        zerocore.shard(model, 3)


def test_a_rank_that_fails_does_not_leave_the_others_waiting(ranks):
    ranks(2, fails_on_one_rank)


def empty(stage):
    """Used too early, loaded by parts and by one rank only, then right."""
    torch.manual_seed(1)
    source = Mlp()
    source.norm.running_mean.fill_(0.25)
    state = source.state_dict()
    model = on_meta(Mlp)
    zerocore.shard(model, stage, units=UNITS, init="empty")
    x = torch.ones(3, 6)
    need = r"expected every parameter of a model sharded with init='empty' to be loaded"
    with pytest.raises(RuntimeError, match=need + r".*'inlet.bias' and 13 more"):
        model(x)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match=need):
        opt.step()
    model.zero_grad()
    # Without norm.* (but torch itself adds num_batches_tracked to a state of no version).
    model.load_state_dict({k: v for k, v in state.items() if "norm" not in k}, strict=False)
    with pytest.raises(RuntimeError, match=need + r".*'norm.bias' and 3 more"):
        model(x)
    norms = {k: v for k, v in state.items() if k not in ("norm.running_mean", "outlet.bias")}
    model.load_state_dict(norms, strict=False)
    with pytest.raises(RuntimeError, match=need + r".*'norm.running_mean';"):
        model(x)
    if dist.get_rank() == 0:
        model.load_state_dict(state)
    if dist.get_world_size() > 1:
        with pytest.raises((RuntimeError, ValueError), match=need + ".*'norm.running_mean'"):
            model(x)
    model.load_state_dict(state)
    found = differences(source, model)
    model.eval()
    same = torch.equal(model(x), source.eval()(x))
    return found, same


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("size", [1, 2])
def test_empty_models_are_loaded_before_use(ranks, size, stage):
    for found, same in ranks(size, empty, stage):
        assert not found and same


class Tabled(nn.Linear):
    """Its own initialisation gives a buffer values that no state has, and its parameters too."""

    def __init__(self):
        super().__init__(3, 5)
        self.register_buffer("table", torch.ones(5), persistent=False)

    def reset_parameters(self):
        super().reset_parameters()
        if hasattr(self, "table"):
            self.table.fill_(2)


def left_empty(stage, mixed):
    """What parameters hold that nobody has loaded: beside some that a module had to fill."""

    def build():
        model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(Tabled(), nn.Linear(5, 7)))
        model.count = nn.Parameter(torch.ones(3, dtype=torch.int64), requires_grad=False)
        return model

    precision = zerocore.MixedPrecision(param=torch.bfloat16) if mixed else None
    model = on_meta(build)
    zerocore.shard(model, stage, units=["0", "1"], init="empty", mixed_precision=precision)
    assert model[1][0].table.eq(2).all()
    state = zerocore.full_state_dict(model)
    return {name for name, value in state.items() if value.isnan().all()}, state["count"].sum()


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_empty_parameters_are_nan(ranks, stage, mixed):
    for empties, count in ranks(2, left_empty, stage, mixed):
        assert empties == {"0.weight", "0.bias", "1.1.weight", "1.1.bias"} and count == 0


def replaced_data():
    """An `init` that gives a parameter other data, of which the elements lie in another order."""
    values = torch.arange(12.0).reshape(4, 3)

    def init(module):
        module.weight.data = values.t()

    model = on_meta(lambda: nn.Linear(4, 3, bias=False))
    zerocore.shard(model, 3, init=init)
    state = zerocore.full_state_dict(model)
    return torch.equal(state["weight"], values.t()) and state["weight"].is_contiguous()


def test_init_may_replace_data(ranks):
    assert ranks(2, replaced_data) == [True, True]


def filled_by_hand():
    """Writing through gathered() counts as loading."""
    model = zerocore.shard(on_meta(mlp), 3, init="empty")
    with zerocore.gathered(model, write=True):
        for param in model.parameters():
            nn.init.constant_(param, 0.5)
    x = torch.ones(2, 40)
    plain = mlp()
    for param in plain.parameters():
        nn.init.constant_(param, 0.5)
    return torch.equal(model(x), plain(x))


def test_gathered_writes_count_as_loading(ranks):
    assert ranks(2, filled_by_hand) == [True, True]


def in_parts():
    """A meta part inside a deferred model, at another stage; both kinds in one shard() too."""

    def build():
        model = Mlp()
        with torch.device("meta"):
            model.layers[1] = nn.Linear(8, 8)
            model.outlet = nn.Linear(8, 2)
        return model

    torch.manual_seed(5)
    expected = build()
    model = zerocore.deferred(build, 5, min_bytes=1)
    zerocore.shard(model.layers[1], 1, init=lambda m: [p.fill_(2) for p in m.parameters()])
    zerocore.shard(model, 3, init=lambda m: [p.fill_(3) for p in m.parameters()])
    state = zerocore.full_state_dict(model)
    assert state["layers.1.weight"].eq(2).all() and state["outlet.bias"].eq(3).all()
    for name, param in expected.named_parameters():
        if param.device.type != "meta":
            assert torch.equal(state[name], param), name
    loss = F.mse_loss(model(torch.ones(3, 6)), torch.zeros(3, 2))
    loss.backward()
    return loss.isfinite().item()


def test_meta_parts_of_deferred_models(ranks):
    assert ranks(2, in_parts) == [True, True]
