"""Random programs over views, copies, ties and branches on values: deferred equals eager."""

import gc
import random
import warnings

import pytest
import torch
from constructions import same, ties
from torch import nn

import zerocore
from zerocore.deferred import forget, is_blank, tape_of

PROGRAMS = 320
GROUP = 40
# Every tensor put off without and with a cache, a cache that overflows, some tensors put off.
SETTINGS = [(1, 0), (1, 2**20), (1, 200), (120, 400)]

MAKERS = [
    lambda r: torch.randn(r.choice([3, 8, 20]), 6),
    lambda r: torch.rand(5, 4),
    lambda r: torch.zeros(r.choice([4, 16]), 6),
    lambda r: torch.empty(8, 6).normal_(),
    lambda r: torch.arange(30.0).view(5, 6),
    lambda r: torch.eye(6),
    lambda r: torch.full((6, 6), 2.0),
    lambda r: torch.randn(6, 6, dtype=torch.float64).to(torch.float32),
    lambda r: torch.randn(4, 6).bfloat16(),
    lambda r: nn.Linear(6, 7).weight.data,
    lambda r: torch.randn(3, 2, 4).permute(2, 0, 1),
    lambda r: torch.randint(-3, 9, (6, 6)).float(),
    lambda r: torch.randperm(24).view(4, 6).float(),
]


def is_matrix(t):
    return t.dim() == 2 and t.dtype == torch.float32 and min(t.shape) > 1


def step(r, tensors):
    """One random statement; t and u may share memory."""
    t, u = r.choice(tensors), r.choice(tensors)
    alike = t.shape == u.shape
    kind = r.randint(0, 25)
    if kind == 0:
        t.normal_(0, 0.5)
    elif kind == 1:
        t.uniform_(-1, 1)
    elif kind == 2:
        t[0].fill_(r.random())
    elif kind == 3:
        t.mul_(1.5).add_(0.1)
    elif kind == 4:
        tensors.append(t.clone())
    elif kind == 5 and t.dim() == 2:
        tensors.append(t.t())
    elif kind == 6 and alike:
        t.copy_(u)
    elif kind == 7 and alike and t.dtype == u.dtype:
        tensors.append(t + u)
    elif kind == 8:
        tensors.append(t[1:3])
    elif kind == 9 and t.float().sum().item() > 0:
        t.neg_()
    elif kind == 10 and (t > 0.5).any():
        tensors.append(torch.where(t > 0.5, torch.randn_like(t), t))
    elif kind == 11:
        tensors.append(torch.randn(t.shape) * t.float().std())
    elif kind == 12:
        tensors.append(t.reshape(-1)[::2])
    elif kind == 13:
        t.data = t.data * 2
    elif kind == 14 and t.dtype == torch.float32:
        nn.init.trunc_normal_(t, std=0.5, a=-0.4, b=0.6)
    elif kind == 15 and is_matrix(t):
        nn.init.orthogonal_(t)
    elif kind == 16:
        tensors.append(torch.cat([t.float().reshape(-1), u.float().reshape(-1)]))
    elif kind == 17:
        t.zero_()
    elif kind == 18:
        tensors.append(t.float().cumsum(0))
    elif kind == 19:
        tensors.append(t.detach())
    elif kind == 20:
        tensors.append(torch.tensor(t.float().reshape(-1)[:3].tolist()))
    elif kind == 21 and t.is_contiguous():
        t.view(-1)[:2].add_(1)
    elif kind == 22:
        tensors.append(torch.normal(t.float(), t.float().abs()))
    elif kind == 23:
        tensors.append(torch.bernoulli(t.float().sigmoid()))
    elif kind == 24:
        torch._foreach_add_([t, torch.ones(2)], 1.0)
    elif kind == 25:
        torch.nn.init.kaiming_uniform_(t) if is_matrix(t) else t.sub_(1)
    if r.random() < 0.1:
        tensors.pop(r.randrange(len(tensors)))


class Program(nn.Module):
    """Registers what a random program leaves as parameters and buffers, one twice."""

    def __init__(self, seed):
        super().__init__()
        r = random.Random(seed)
        tensors = [r.choice(MAKERS)(r) for _ in range(5)]
        for _ in range(r.randint(5, 30)):
            step(r, tensors)
        for i, t in enumerate(tensors):
            if r.random() < 0.7:
                self.register_parameter(f"p{i}", nn.Parameter(t.detach()))
            else:
                self.register_buffer(f"b{i}", t.detach())
        self.register_parameter("tie", r.choice(list(self.parameters()) or [None]))


@pytest.fixture(autouse=True)
def few_objects():
    """The end of a construction looks through all objects: those of the tests need not be seen."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def named(model):
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def storages(tensors):
    """Which of the tensors share memory."""
    groups = {}
    for name, tensor in tensors.items():
        if tensor.numel():
            groups.setdefault(tensor.untyped_storage().data_ptr(), []).append(name)
    return sorted(group for group in groups.values() if len(group) > 1)


@pytest.mark.parametrize("first", range(0, PROGRAMS, GROUP))
def test_random_programs(first):
    warnings.simplefilter("ignore")  # of initialisers, about odd arguments
    ran = put_off = 0
    for seed in range(first, first + GROUP):
        torch.manual_seed(seed)
        try:
            expected = Program(seed)
        except RuntimeError:  # a program that is wrong by itself
            continue
        state = torch.get_rng_state()
        min_bytes, cache_bytes = SETTINGS[seed % len(SETTINGS)]
        model = zerocore.deferred(
            lambda seed=seed: Program(seed), seed, min_bytes=min_bytes, cache_bytes=cache_bytes
        )
        assert torch.equal(state, torch.get_rng_state()), f"program {seed}: generator"
        tensors = [t for t in (*model.parameters(), *model.buffers()) if is_blank(t)]
        for tensor in tensors:
            tensor.data = tape_of(tensor).resident(tensor)
        forget(tensors)
        found, wanted = named(model), named(expected)
        assert list(found) == list(wanted)
        for name, tensor in wanted.items():
            assert same(found[name], tensor), f"program {seed}: {name}"
            assert found[name].stride() == tensor.stride(), f"program {seed}: {name}"
        assert ties(model) == ties(expected), f"program {seed}"
        assert storages(found) == storages(wanted), f"program {seed}"
        ran += 1
        put_off += len(tensors)
    assert ran > GROUP / 2 and put_off > 4 * ran
