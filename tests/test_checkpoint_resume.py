"""Training that is interrupted and resumed in other processes goes on with the same bits."""

import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
from checkpoints import POLICIES, assert_same_tensors
from ranks import Pool
from reference import assert_same, clones
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zerocore

HALF, ALL = 10, 20
RUNS = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1, "kind": "torch"},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    "stage 0, bf16": {"stage": 0, "precision": "bf16", "kind": "torch"},
    "stage 1, bf16": {"stage": 1, "precision": "bf16"},
    "stage 2, bf16": {"stage": 2, "precision": "bf16"},
    "stage 3, bf16": {"stage": 3, "precision": "bf16"},
    "stage 0, fp16": {"stage": 0, "precision": "fp16"},
    "stage 1, fp16": {"stage": 1, "precision": "fp16"},
    "stage 2, fp16": {"stage": 2, "precision": "fp16", "kind": "torch"},
    "stage 3, fp16": {"stage": 3, "precision": "fp16", "kind": "torch"},
    "stage 3, replicas": {"stage": 3, "mesh": (2, 1)},
}


class Net(nn.Module):
    """[B, 9] to a number for each row, with dropout and running statistics."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(9, 9) for _ in range(3)))
        self.norm = nn.LayerNorm(9)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        for layer in self.layers:
            x = nn.functional.dropout(torch.tanh(layer(x)), 0.3, self.training)
        self.seen.add_(1)
        return self.norm(x).sum(1)


class Run:
    """A training run with everything that people keep in checkpoints."""

    def __init__(self, stage, seed=0, precision="fp32", kind="zerocore", mesh=None):
        rank = dist.get_rank()
        torch.manual_seed(seed)
        self.net = Net()
        options = {"mixed_precision": POLICIES[precision], "units": ["layers.0", "layers.1"]}
        if mesh is not None:
            names = ("replicate", "shard")
            options["mesh"] = init_device_mesh("cpu", mesh, mesh_dim_names=names)
        self.model = zerocore.shard(self.net, stage, **options)
        params = self.model.parameters()
        if kind == "zerocore":
            self.opt = zerocore.AdamW(params, lr=0.02, max_grad_norm=1.0)
        else:
            self.opt = torch.optim.AdamW(params, lr=0.02, amsgrad=True)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.opt, ALL)
        # A scale that overflows at first, so that steps are skipped, and grows again.
        self.scaler = zerocore.GradScaler(
            "cpu", init_scale=2.0**24, growth_interval=3, enabled=precision == "fp16"
        )
        self.ema = zerocore.EMA(self.model, 0.9)
        self.order = torch.Generator().manual_seed(100 * seed + rank)
        torch.manual_seed(1000 * seed + rank)
        random.seed(seed + rank)
        np.random.seed(seed + rank)

    def step(self):
        """Draws from every generator; the loss, and what was drawn."""
        drawn = (random.random(), np.random.rand(), torch.randperm(7, generator=self.order)[0])
        x = torch.randn(4, 9)
        loss = (self.model(x) - sum(map(float, drawn))).square().mean()
        self.opt.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.opt)
        self.scaler.update()
        self.scheduler.step()
        self.ema.update()
        return loss.item(), *map(float, drawn), self.scaler.get_scale()

    def parts(self):
        extra = {"scheduler": self.scheduler, "scaler": self.scaler, "ema": self.ema}
        return extra | {"order": self.order.get_state()}

    def load(self, path):
        extra = zerocore.load(path, self.model, self.opt)
        self.scheduler.load_state_dict(extra["scheduler"])
        self.scaler.load_state_dict(extra["scaler"])
        self.ema.load_state_dict(extra["ema"])
        self.order.set_state(extra["order"])

    def state(self):
        return (
            clones(zerocore.full_state_dict(self.model)),
            zerocore.optimizer_state_dict(self.model, self.opt)["state"],
            clones(self.ema.state_dict()),
            self.scheduler.state_dict()["_last_lr"],
        )


def straight(folder):
    """All steps of every run in one go; a checkpoint on the way."""
    results = {}
    for name, options in RUNS.items():
        run = Run(**options)
        seen = [run.step() for _ in range(HALF)]
        zerocore.save(folder / name, run.model, run.opt, **run.parts())
        seen += [run.step() for _ in range(ALL - HALF)]
        results[name] = seen, run.state()
    return results


def resumed(folder):
    """The second half of every run, from its checkpoint."""
    results = {}
    for name, options in RUNS.items():
        run = Run(**options, seed=5)
        run.step()  # there is state that has to go
        run.load(folder / name)
        results[name] = [run.step() for _ in range(ALL - HALF)], run.state()
    return results


@pytest.fixture(scope="module")
def both(ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("resume")
    expected = ranks(2, straight, folder)
    pool = Pool(2)
    try:
        return expected, pool.run(resumed, folder)
    finally:
        pool.close()


@pytest.mark.parametrize("name", RUNS)
def test_resumed_is_straight(both, name):
    for expected, found in zip(*both, strict=True):
        seen, state = expected[name]
        assert found[name][0] == seen[HALF:]
        after = found[name][1]
        assert_same(after[0] | {"seen": state[0]["seen"]}, state[0])
        assert after[1].keys() == state[1].keys()
        for parameter, values in state[1].items():
            assert_same_tensors(after[1][parameter], values)
        assert_same(after[2], state[2])
        assert after[3] == state[3]
    if "fp16" in name:
        scales = [one[-1] for one in both[0][0][name][0]]
        assert min(scales) < max(scales) and scales[HALF] != scales[-1], "expected skips"
