"""Trainings of one model with one optimizer: sharded on ranks, or plain as their reference.

The reference runs in one process: it averages the gradients of all ranks' parts as the ranks do, in
their order, and steps a plain model. Elementwise updates are then equal bit for bit, whatever the
cuts between ranks.
"""

import functools

import models
import torch
import torch.distributed as dist
from reference import clones
from torch import nn, optim

import zerocore

UNITS = ["layers.0", "layers.1"]
STAGES = [0, 1, 2, 3]
ADAM = {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1}
KINDS = {
    "sgd": functools.partial(optim.SGD, lr=0.02, momentum=0.9, weight_decay=0.1, foreach=True),
    "adamw": functools.partial(optim.AdamW, **ADAM, fused=True),
    "adagrad": functools.partial(optim.Adagrad, lr=0.05, weight_decay=0.1, foreach=False),
    "zerocore": functools.partial(zerocore.AdamW, **ADAM),
}


class Small(nn.Module):
    """[B, 6] to [B, 3]. Of two ranks, rank 0 has all of `gain` and of the inlet's weight, rank 1
    the inlet's bias and the outlet; the layers' weights are cut."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.rand(9) + 0.5)
        self.inlet = nn.Linear(6, 9)
        self.layers = nn.ModuleList(nn.Linear(9, 9) for _ in range(2))
        self.outlet = nn.Linear(9, 3)
        self.use_gain = True

    def forward(self, x):
        """`gain` is left out if `use_gain` says so."""
        x = torch.tanh(self.inlet(x))
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.outlet(x * self.gain if self.use_gain else x)


def always(rank):
    return True


class Run:
    """A training of plain models in this process (stage None), or of sharded ones on a rank."""

    def __init__(self, stage, size, kind=None, job="small"):
        self.stage, self.size, self.kind, self.job = stage, size, kind, job
        self.facts = []

    def build(self, seed=3):
        """A model that is not sharded yet."""
        torch.manual_seed(seed)
        model = Small() if self.job == "small" else models.build(self.job)
        if self.job == "odd":
            # torch's fused optimizers take elements in memory order, gaps included.
            model.strided.data = model.strided.data.contiguous()
        return model

    def shard(self, model):
        """Does so on ranks."""
        if self.stage is not None:
            zerocore.shard(model, self.stage, units=UNITS if self.job == "small" else ["inner"])
        return model

    def optimizer(self, groups, **options):
        """Of the run's kind."""
        return KINDS[self.kind](groups, **options)

    def loss(self, model, rank, number):
        """Of the part of batch `number` that belongs to `rank`."""
        if self.job != "small":
            return models.loss_of(model, models.batch(self.job, rank, number))
        generator = torch.Generator().manual_seed(100 * number + rank)
        x = torch.randn(5, 6, generator=generator)
        return (model(x) - torch.randn(5, 3, generator=generator)).square().mean()

    def backward(self, model, number, gain=always):
        """Adds the mean of all ranks' gradients; `gain(rank)`: whether the rank uses the gain."""
        if self.stage is not None:
            model.use_gain = gain(dist.get_rank())
            self.loss(model, dist.get_rank(), number).backward()
            return
        trained = [p for p in model.parameters() if p.requires_grad]
        total = [None] * len(trained)
        for rank in range(self.size):
            model.use_gain = gain(rank)
            grads = torch.autograd.grad(self.loss(model, rank, number), trained, allow_unused=True)
            for i, grad in enumerate(grads):
                if grad is not None:
                    # In the memory order of the parameter, as backward() leaves it.
                    part = torch.empty_like(trained[i]).copy_(grad) * torch.tensor(1 / self.size)
                    total[i] = part if total[i] is None else total[i] + part
        for p, grad in zip(trained, total, strict=True):
            if grad is not None:
                p.grad = grad if p.grad is None else p.grad + grad

    def state(self, model):
        """Full parameters."""
        return clones(model.state_dict() if self.stage is None else zerocore.full_state_dict(model))
