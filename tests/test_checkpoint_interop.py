"""Checkpoints from and for others, FSDP2 and plain PyTorch: with optimizer state, bit for bit."""

import copy
import gc
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoints import assert_same_tensors
from reference import clones
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import zerocore


class Net(nn.Module):
    """[B, 3, 7, 7] to a number; a tied, a frozen and a 0-dim parameter, a buffer, channels_last."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.first, self.second = nn.Linear(25, 11), nn.Linear(11, 11, bias=False)
        self.third = nn.Linear(11, 11)
        self.third.weight = self.second.weight
        self.gain = nn.Parameter(torch.randn(1))
        self.frozen = nn.Parameter(torch.randn(3, 2), requires_grad=False)
        self.register_buffer("places", torch.randn(11))

    def forward(self, x):
        x = self.third(self.second(self.first(self.conv(x).flatten(2)))) + self.places
        return (x * self.gain).square().mean() + self.frozen.sum()


def net(seed):
    torch.manual_seed(seed)
    return Net()


def adamw(model):
    """Two groups of different options."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for n, p in named if "weight" in n], "lr": 0.02},
        {"params": [p for n, p in named if "weight" not in n], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.01)


def train(model, opt, numbers):
    """The same batches on every rank, so that all ways of training agree."""
    for number in numbers:
        generator = torch.Generator().manual_seed(number)
        model(torch.randn(4, 3, 7, 7, generator=generator)).backward()
        opt.step()
        opt.zero_grad()


def full_states(model, opt):
    """Of any model: full tensors by name."""
    options = StateDictOptions(full_state_dict=True)
    state = get_optimizer_state_dict(model, opt, options=options)
    return clones(get_model_state_dict(model, options=options)), state


def zero_states(model, opt):
    return clones(zerocore.full_state_dict(model)), zerocore.optimizer_state_dict(model, opt)


def dcp_state(model, opt):
    return {
        "model": get_model_state_dict(model),
        "optim": get_optimizer_state_dict(model, opt),
    }


def fsdp2(seed):
    model = net(seed).to(memory_format=torch.contiguous_format)  # FSDP2 takes no other
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model.conv, mesh=mesh)
    fully_shard(model.first, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, adamw(model)


def zero(seed, stage=3):
    model = zerocore.shard(net(seed), stage, units=["conv", "first"])
    return model, adamw(model)


def plain(seed):
    model = net(seed)
    return model, adamw(model)


def others_save(path, kind):
    """FSDP2, or one process with a plain model, trains and saves; its full states."""
    model, opt = {"fsdp2": fsdp2, "plain": plain}[kind](0)
    train(model, opt, range(3))
    dcp.save(dcp_state(model, opt), checkpoint_id=path)
    states = full_states(model, opt)
    del model, opt
    gc.collect()
    return states


def through_zerocore(path, other):
    """Loads, shows the states, trains on, and saves; the states then, and keys of the metadata."""
    model, opt = zero(1)
    extra = zerocore.load(path, model, opt)
    before = zero_states(model, opt)
    train(model, opt, range(3, 5))
    zerocore.save(other, model, opt, note="extra values disturb nobody")
    return before, zero_states(model, opt), extra


def zerocore_saves(path):
    """A run of zerocore's own; its full states."""
    model, opt = zero(0)
    train(model, opt, range(3))
    zerocore.save(path, model, opt)
    return zero_states(model, opt)


def others_load(path, kind):
    """Into another model; its full states, and those after two more steps."""
    model, opt = {"fsdp2": fsdp2, "plain": plain}[kind](2)
    state = dcp_state(model, opt)
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, opt, state["optim"])
    states = full_states(model, opt)
    lr = [group["lr"] for group in opt.param_groups]
    del model, opt
    gc.collect()
    return *states, lr


def assert_same_states(found, expected):
    assert_same_tensors(found[0], expected[0])
    for name, values in expected[1]["state"].items():
        assert_same_tensors(found[1]["state"][name], values)
    options = {
        name: (group["lr"], group["weight_decay"], tuple(group["betas"]))
        for group in found[1]["param_groups"]
        for name in group["params"]
    }
    for group in expected[1]["param_groups"]:
        for name in group["params"]:
            assert options[name][:2] == (group["lr"], group["weight_decay"])


@pytest.mark.parametrize("kind, size", [("fsdp2", 2), ("fsdp2", 3), ("plain", 1)])
def test_from_others_and_back(ranks, tmp_path, kind, size):
    first, second = tmp_path / "first", tmp_path / "second"
    expected = ranks(size, others_save, first, kind)[0]
    for before, _, extra in ranks(2, through_zerocore, first, second):
        assert_same_states(before, expected)
        assert extra == {}
    found = ranks(size, others_load, second, kind)
    after = ranks(2, through_zerocore, second, tmp_path / "third")[0][0]
    for *states, lr in found:
        assert_same_states(states, after)
        assert lr == [0.02, 0.01]


def bare_state_dict(path, source):
    """A directory of a model's state dict alone."""
    model = zerocore.shard(net(1), 3)
    zerocore.load(path, model)
    assert_same_tensors(clones(zerocore.full_state_dict(model)), source)
    try:
        zerocore.load(path, model, adamw(model))
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind, size", [("fsdp2", 3), ("plain", 1)])
def test_others_read_what_zerocore_made(ranks, tmp_path, kind, size):
    """By torch's own recipe, whose optimizers want every option that they have."""
    expected = ranks(2, zerocore_saves, tmp_path / "saved")[0]
    model, state, *_ = ranks(size, others_load, tmp_path / "saved", kind)[0]
    assert_same_states((model, state), expected)


def test_a_bare_state_dict(ranks, tmp_path):
    path, state = tmp_path / "bare", net(0).state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(copy.deepcopy(state), checkpoint_id=path, no_dist=True)
    for message in ranks(2, bare_state_dict, path, state):
        assert "optimizer state" in message and str(path) in message


def test_as_one_file_of_torch(ranks, tmp_path):
    first = tmp_path / "first"
    states = ranks(1, others_save, first, "plain")[0]
    ranks(2, through_zerocore, first, tmp_path / "second")
    dcp_to_torch_save(tmp_path / "second", tmp_path / "all.pt")
    found = torch.load(tmp_path / "all.pt", weights_only=False)
    model, opt = plain(4)
    model.load_state_dict(found["model"])
    set_optimizer_state_dict(model, opt, found["optim"])
    assert states[0].keys() == found["model"].keys()
    assert found["extra"]["shared"].keys() == {"note"}
    assert opt.state[model.gain]["step"] == 5
