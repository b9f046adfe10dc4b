"""Checkpoints of models of other kinds: nested, tensor-parallel, with states of their own."""

import warnings

import pytest
import torch
import torch.distributed as dist
from checkpoints import assert_same_state, assert_same_tensors, state_of
from reference import clones
from test_optimizer_state import ALL, Net, groups_of, sharded, train
from test_tensor_parallel import build as build_parallel
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import zerocore
from zerocore import registry

KINDS = ("amsgrad", "momentum", "sgd", "adagrad", "rprop", "asgd", "nadam", "zerocore")


def save_each(path, stage, **options):
    """A checkpoint for each optimizer; the states."""
    states = {}
    for kind in KINDS:
        model = sharded(stage, **options)
        opt = ALL[kind](groups_of(model))
        train(model, opt, range(2))
        zerocore.save(path / kind, model, opt)
        states[kind] = state_of(model, opt)
        train(model, opt, range(2, 4))
        states[kind, "later"] = state_of(model, opt)
    return states


def load_each(path, stage, **options):
    states = {}
    for kind in KINDS:
        model = sharded(stage, **options)
        with zerocore.gathered(model, write=True), torch.no_grad():
            for param in model.parameters():
                param.zero_()
        opt = ALL[kind](groups_of(model))
        zerocore.load(path / kind, model, opt)
        states[kind] = state_of(model, opt)
        train(model, opt, range(2, 4))
        states[kind, "later"] = state_of(model, opt)
    return states


@pytest.mark.parametrize("options", [{"stage": 1}, {"stage": 3, "nested": True}], ids=str)
@pytest.mark.filterwarnings("ignore:zerocore.load")
def test_every_optimizer_on_nested_models_and_odd_shapes(ranks, tmp_path, options):
    saved = ranks(2, save_each, tmp_path, 3, nested=not options.get("nested"))[0]
    for states in ranks(2, load_each, tmp_path, **options):
        for name, state in saved.items():
            assert_same_state(states[name], state)


def parallel(seed):
    """A tensor-parallel model over 2 x 2 ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = build_parallel(seed)
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], plan)
    return model, mesh


def whole(state):
    return {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in state.items()}


def everything(model, opt):
    """Plain full tensors of a tensor-parallel model and its optimizer."""
    state = zerocore.optimizer_state_dict(model, opt)["state"]
    return clones(whole(zerocore.full_state_dict(model))), {n: whole(v) for n, v in state.items()}


def parallel_steps(model, opt, numbers):
    for number in numbers:
        words = torch.randint(37, (2, 6), generator=torch.Generator().manual_seed(number))
        opt.zero_grad()
        model(words).square().mean().backward()
        opt.step()


def save_parallel(path, stage):
    model, mesh = parallel(0)
    model = zerocore.shard(model, stage, mesh=mesh["dp"])
    opt = zerocore.AdamW(model.parameters(), lr=0.01)
    parallel_steps(model, opt, range(2))
    zerocore.save(path, model, opt, rank=dist.get_rank())
    return everything(model, opt)


def load_parallel(path, stage):
    model, mesh = parallel(3)
    model = zerocore.shard(model, stage, mesh=mesh["dp"])
    opt = zerocore.AdamW(model.parameters(), lr=0.01)
    extra = zerocore.load(path, model, opt)
    found = everything(model, opt)
    parallel_steps(model, opt, range(2, 3))
    return *found, extra


def load_serial(path, stage):
    """The same model, without tensor parallelism."""
    model = zerocore.shard(build_parallel(5), stage)
    opt = zerocore.AdamW(model.parameters(), lr=0.01)
    zerocore.load(path, model, opt)
    return everything(model, opt)


@pytest.mark.filterwarnings("ignore:zerocore.load")
def test_tensor_parallel_parameters(ranks, tmp_path):
    saved = ranks(4, save_parallel, tmp_path / "parallel", 3)[0]
    for rank, (model, state, extra) in enumerate(ranks(4, load_parallel, tmp_path / "parallel", 1)):
        assert_same_tensors(model, saved[0])
        for name, values in saved[1].items():
            assert_same_tensors(state[name], values)
        assert extra == {"rank": rank}
    for model, state in ranks(3, load_serial, tmp_path / "parallel", 3):
        assert_same_tensors(model, saved[0])
        for name, values in saved[1].items():
            assert_same_tensors(state[name], values)


class Counting(nn.Module):
    """A module with a state that is no tensor, a buffer that is not kept, and a shared one."""

    def __init__(self, start):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.calls = start
        self.register_buffer("mean", torch.full((3,), float(start)))
        self.register_buffer("same", self.mean)
        self.register_buffer("temporary", torch.full((2,), float(start)), persistent=False)

    def get_extra_state(self):
        return {"calls": self.calls}

    def set_extra_state(self, state):
        self.calls = state["calls"]

    def forward(self, x):
        self.calls += 1
        return self.layer(x) + self.mean


def other_state(path, buffer):
    """Extra state, buffers of each rank, and a module that was added after shard()."""
    rank = dist.get_rank()
    results = []
    policy = zerocore.MixedPrecision(torch.bfloat16, buffer=buffer, output=torch.float32)
    for start in (1, 50):
        torch.manual_seed(start)
        model = zerocore.shard(Counting(start), 3, mixed_precision=policy)
        model.late = nn.Linear(4, 2)
        model.late.weight = nn.Parameter(torch.randn(2, 8)[:, ::2])  # with gaps
        if start == 1:
            model(torch.ones(1, 3))
            with torch.no_grad():
                model.mean.mul_(1 + rank)
            opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            sum(p.sum() for p in model.late.parameters()).backward()
            opt.step()
            zerocore.save(path, model, opt)
        else:
            opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            zerocore.load(path, model, opt)
        momentum = opt.state[model.late.weight]["momentum_buffer"]
        results.append(clones({k: v for k, v in model.state_dict().items() if "extra" not in k}))
        results[-1] |= {"momentum": momentum.clone(), "calls": torch.tensor(model.calls)}
        results[-1]["temporary"] = model.temporary.clone()
        assert model.same is model.mean
    return results


def buffers_elsewhere(path):
    """A buffer that was another one on each rank, and the warning."""
    model = zerocore.shard(Counting(7), 3)
    model.late = nn.Linear(4, 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        zerocore.load(path, model)
    return model.mean, str(caught[-1].message) if caught else None


@pytest.mark.parametrize("buffer", [None, torch.bfloat16])
def test_states_of_other_kinds(ranks, tmp_path, buffer):
    found = ranks(2, other_state, tmp_path / "checkpoint", buffer)
    first = found[0][0]
    for before, after in found:
        assert before.pop("temporary").tolist() == [1.0] * 2  # neither saved
        assert after.pop("temporary").tolist() == [50.0] * 2  # nor loaded
        own = {name: before[name] for name in ("mean", "same")}
        assert_same_tensors(after, {k: v for k, v in first.items() if k != "temporary"} | own)
    assert first["mean"].tolist() == [1.0] * 3 and found[1][0]["mean"].tolist() == [2.0] * 3
    # On another number of ranks nobody knows whose they were.
    for mean, warning in ranks(3, buffers_elsewhere, tmp_path / "checkpoint"):
        assert mean.tolist() == [1.0] * 3
        assert warning is None or "left out, since they differed between ranks: mean" in warning


def strides_known():
    """The registry's strides are those of the core, which decide where elements lie."""
    for build in (Net, lambda: nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)):
        model = zerocore.shard(build(), 3)
        for param in model.parameters():
            entry = registry.entry_of(param)
            full = entry.sharded().core.full_tensors(entry.unit, entry.flat)[entry.index]
            assert full.numel() == 0 or full.stride() == entry.strides, entry.name
    return True


def test_strides(ranks):
    assert all(ranks(2, strides_known))


def split_ranks(path):
    """Experts that each rank has for itself have no common checkpoint."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("expert", "dp"))
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    zerocore.shard(model[1], 3, mesh=mesh["dp"])
    zerocore.shard(model, 3)
    try:
        zerocore.save(path / "experts", model)
    except ValueError as error:
        return str(error)
    return f"rank {rank} saved"


def test_submodules_on_other_ranks_are_refused(ranks, tmp_path):
    for message in ranks(2, split_ranks, tmp_path):
        assert "same ranks" in message
    assert not (tmp_path / "experts").exists()
