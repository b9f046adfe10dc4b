"""What a rank does in many cases: shard a job's model, train it, report its part."""

from __future__ import annotations

import math
from typing import Any

import models
import torch
import torch.distributed as dist
from reference import EPS, OPTIMIZERS, Piece, Trained, clones, memory_order
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile

import zerocore


def shard(job: str, stage: int, seed: int = 0, mesh: tuple[int, int] | None = None, **options: Any):
    """The job's model, sharded; `mesh`: (replicas, shards) of a hybrid mesh."""
    options.setdefault("units", models.JOBS[job].units)
    if mesh is not None:
        names = ("replicate", "shard")
        options["mesh"] = init_device_mesh("cpu", mesh, mesh_dim_names=names)
    return zerocore.shard(models.build(job, seed), stage, **options)


def optimizer_of(name: str, parameters: Any) -> torch.optim.Optimizer:
    """An optimizer of the reference, or zerocore.AdamW with the values of its "adamw"."""
    if name == "zerocore":
        return zerocore.AdamW(parameters, lr=1e-2, eps=EPS, weight_decay=0.1)
    return OPTIMIZERS[name](parameters)


def pieces(model: nn.Module, prefix: str = "") -> dict[str, Piece]:
    """This rank's part of every gradient."""
    parts = {}
    for name, parameter in model.named_parameters():
        info = zerocore.info(parameter)
        gradient = parameter.grad
        if gradient is not None:
            whole = gradient.shape == info.shape and info.stop - info.start == gradient.numel()
            gradient = memory_order(gradient, parameter) if whole else gradient.reshape(-1)
            gradient = gradient.clone()
        parts[prefix + name] = Piece(info.start, info.stop, gradient)
    return parts


def train(
    job: str, optimizer: str, stage: int, steps: int = 5, **options: Any
) -> tuple[Trained, dict[str, Tensor]]:
    """Like reference.plain on this rank's parts, gradients as Pieces; and the state dict."""
    model = shard(job, stage, **options)
    opt = optimizer_of(optimizer, model.parameters())
    gradients = {}
    for step in range(steps):
        opt.zero_grad()
        models.loss_of(model, models.batch(job, dist.get_rank(), step)).backward()
        gradients |= pieces(model, f"{step} ")
        opt.step()
    with zerocore.gathered(model):
        parameters = clones(dict(model.named_parameters(remove_duplicate=False)))
    return Trained(parameters, gradients), clones(zerocore.full_state_dict(model))


def step(
    model: nn.Module, opt: torch.optim.Optimizer | None, job: str, number: int, **_: Any
) -> float:
    """One training step of this rank; the loss."""
    if opt is not None:
        opt.zero_grad()
    loss = models.loss_of(model, models.batch(job, dist.get_rank(), number))
    loss.backward()
    if opt is not None:
        opt.step()
    return loss.item()


class Collectives:
    """What this rank asks of gloo inside a with block, on all threads: names of the calls."""

    def __enter__(self) -> Collectives:
        every_thread = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        self.profile = profile(
            activities=[ProfilerActivity.CPU], record_shapes=True, experimental_config=every_thread
        )
        self.profile.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.profile.__exit__(*error)
        self.events = [e for e in self.profile.events() if e.name.startswith("gloo:")]
        self.names = [event.name for event in self.events]


class Sent(Collectives):
    """Counts what it hands to gloo's send."""

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        events = [e for e in self.events if e.name == "gloo:send"]
        self.calls = len(events)
        self.elements = sum(math.prod(e.input_shapes[0]) for e in events)


def padded(numels: list[int], shards: int, replicas: int = 1) -> tuple[int, int]:
    """Elements of a flat buffer, parameters at multiples of 16, and of one shard of it."""
    end = 0
    for numel in numels:
        end = -(-end // 16) * 16 + numel
    quantum = 16 * replicas
    size = -(-end // (shards * quantum)) * quantum
    return size * shards, size
