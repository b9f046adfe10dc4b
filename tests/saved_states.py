"""Checkpoints of torch.distributed.checkpoint, and what they hold, for tests about them."""

import copy

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import zerocore


def tensors():
    """A state dict of many dtypes, shapes and layouts in memory."""
    generator = torch.Generator().manual_seed(0)

    def rand(*shape):
        return torch.randn(*shape, generator=generator)

    return {
        "a.weight": rand(7, 5),
        "model.bias": rand(3).bfloat16(),
        "half": rand(2, 3, 4).half(),
        "double": rand(6).double(),
        "transposed": rand(4, 6).t(),
        "channels_last": rand(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        "view": rand(40)[10:16].view(2, 3),
        "scalar": torch.tensor(3),
        "empty": torch.empty(0, 4),
        "bool": torch.tensor([True, False, True]),
        "bytes": torch.arange(5, dtype=torch.uint8),
        "uint16": torch.arange(9).to(torch.uint16),
        "float8": rand(5).to(torch.float8_e4m3fn),
        "complex": torch.complex(rand(3), rand(3)).conj(),
    }


def optimizer():
    """The state of an optimizer, as torch's recipes for checkpoints have it."""
    generator = torch.Generator().manual_seed(1)
    moments = {
        "step": torch.tensor(3.0),
        "exp_avg": torch.randn(7, 5, generator=generator),
        "exp_avg_sq": torch.rand(7, 5, generator=generator),
    }
    group = {"lr": 1e-3, "betas": (0.9, 0.95), "amsgrad": False, "params": ["a.weight"]}
    return {"state": {"a.weight": moments}, "param_groups": [group]}


def zeros_like(tree):
    """The same structure with zeros in the tensors, to load into."""
    if isinstance(tree, torch.Tensor):
        return torch.zeros(tree.shape, dtype=tree.dtype)
    if isinstance(tree, dict):
        return {key: zeros_like(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [zeros_like(value) for value in tree]
    return copy.deepcopy(tree)


def bits(tensor):
    """The bytes of a tensor in row-major order."""
    flat = tensor.detach().resolve_conj().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def assert_same(got, expected):
    """Equal structures with tensors of the same dtype, shape and bits."""
    if isinstance(expected, torch.Tensor):
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
        assert bits(got) == bits(expected)
    elif isinstance(expected, dict):
        assert set(got) == set(expected)
        for key, value in expected.items():
            assert_same(got[key], value)
    elif isinstance(expected, list):
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            assert_same(one, other)
    else:
        assert got == expected


def plain_model():
    """Odd shapes, which two or three ranks cannot share evenly."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3, bias=False))


def save_fsdp2(path):
    """A case for ranks: an FSDP2 model after a step, saved as torch's recipes do."""
    model = plain_model()
    fully_shard(model)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(torch.full((2, 5), 0.1 + dist.get_rank())).sum().backward()
    adam.step()
    state, moments = get_state_dict(model, adam)
    dcp.save({"model": state, "optim": moments}, checkpoint_id=path)
    full = {name: value.full_tensor() for name, value in state.items()}
    averages = {name: value["exp_avg"].full_tensor() for name, value in moments["state"].items()}
    del model, adam, state, moments  # FSDP2's objects may not outlive the process group
    return full, averages


def save_dtensors(path):
    """A case for ranks: tensors that are cut along several dimensions."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(5 * 7 * 3, dtype=torch.float32).view(5, 7, 3)
    state = {f"cut{dim}": distribute_tensor(whole + dim, mesh, [Shard(dim)]) for dim in range(3)}
    dcp.save(state, checkpoint_id=path)
    return {f"cut{dim}": whole + dim for dim in range(3)}


def load_fsdp2(path):
    """A case for ranks: full parameters of an FSDP2 model that has loaded a model's state."""
    model = plain_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    fully_shard(model)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=path)
    return {name: value.full_tensor() for name, value in state["model"].items()}


def save_sharded(path, stage):
    """A case for ranks: a sharded model after a step, saved by zerocore."""
    model = zerocore.shard(plain_model(), stage=stage)
    adam = zerocore.AdamW(model.parameters(), lr=1e-2)
    model(torch.full((2, 5), 0.1 + dist.get_rank())).sum().backward()
    adam.step()
    zerocore.save(path, model, adam, epoch=3)
    return zerocore.full_state_dict(model), zerocore.optimizer_state_dict(model, adam)


def load_sharded(path, stage):
    """A case for ranks: full parameters of a sharded model that has loaded a checkpoint."""
    model = plain_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    zerocore.shard(model, stage=stage)
    extra = zerocore.load(path, model)
    return zerocore.full_state_dict(model), extra
