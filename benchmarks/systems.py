"""zerocore's stages and their peers, each as the training step of one model.

All step with AdamW (lr 1e-3, weight decay 0.01, fused) and compute in the dtype that is asked for.
In bf16 all but "alone" keep fp32 parameters to step: FSDP2, DeepSpeed and zerocore compute with
bf16 copies and send bf16 gradients; DDP computes under autocast and sends bf16 by a hook of
torch.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
from peer_model import GPT, Block
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import zerocore

RANKS = 2
OPTIONS = dict(lr=1e-3, weight_decay=0.01)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None
TITLES = {
    "ddp": "DDP",
    "ddp+zero": "DDP + ZeroRedundancyOptimizer",
    "fsdp2": "FSDP2",
    "fsdp2-keep": "FSDP2 (no reshard)",
    "deepspeed1": "DeepSpeed",
    "deepspeed2": "DeepSpeed",
    "deepspeed3": "DeepSpeed",
    "deepspeed1-buckets": "DeepSpeed (25 MiB buckets)",
    "deepspeed2-buckets": "DeepSpeed (25 MiB buckets)",
    "deepspeed3-buckets": "DeepSpeed (25 MiB buckets)",
}
BUCKET = 25 * 2**20  # bytes; DDP's default

Step = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class System:
    """What trains: "ddp", "ddp+zero", "fsdp2", "fsdp2-keep", "deepspeed1" to 3, "zerocore0" to 3.

    DeepSpeed's default buckets are larger than these models, so that nothing overlaps with the
    backward; with "-buckets" they are as large as DDP's. "alone" is the computation of a rank at
    stage 3 without any communication.
    """

    name: str
    dim: int
    dtype: str  # fp32 or bf16
    batch: int = 1  # sequences of a rank in a step

    def __str__(self) -> str:
        return f"{self.name}, {self.dtype}, dim {self.dim}, batch {self.batch}"


def import_peer(system: System) -> None:
    """Imports what only this system needs, so that its memory is not counted as training's."""
    if system.name.startswith("deepspeed"):
        import deepspeed  # noqa: F401


def build(system: System) -> tuple[nn.Module, Step]:
    """The model, as the system has made it, and its training step, which gives the loss."""
    torch.manual_seed(0)
    model = GPT(system.dim)
    bf16 = system.dtype == "bf16"
    if system.name == "alone":
        return _alone(model, DTYPES[system.dtype])
    if system.name.startswith("ddp"):
        return _ddp(model, bf16, zero=system.name == "ddp+zero")
    if system.name.startswith("fsdp2"):
        return _fsdp2(model, bf16, keep=system.name == "fsdp2-keep")
    if system.name.startswith("deepspeed"):
        stage, _, buckets = system.name.removeprefix("deepspeed").partition("-")
        return _deepspeed(model, bf16, int(stage), bool(buckets), system.batch)
    return _zerocore(model, bf16, int(system.name.removeprefix("zerocore")))


def _training_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, autocast: bool = False
) -> Step:
    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def _alone(model: nn.Module, dtype: torch.dtype) -> tuple[nn.Module, Step]:
    """Forward and backward of the whole model, and the optimizer's step on a rank's part of it."""
    numel = sum(p.numel() for p in model.parameters())
    model.to(dtype)
    shard = nn.Parameter(torch.zeros(numel // RANKS))
    shard.grad = torch.full_like(shard, 1e-3)
    optimizer = torch.optim.AdamW([shard], fused=True, **OPTIONS)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        model.zero_grad(set_to_none=True)
        return loss.detach()

    return model, step


def _ddp(model: nn.Module, bf16: bool, zero: bool) -> tuple[nn.Module, Step]:
    model = DistributedDataParallel(model, gradient_as_bucket_view=True)  # the faster setting
    if zero:
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, fused=True, **OPTIONS
        )
    else:
        optimizer = torch.optim.AdamW(model.parameters(), fused=True, **OPTIONS)
    if bf16:
        # DDP knows this hook by its name, and takes it with NCCL only; gloo can do it as well.
        model.register_comm_hook(None, lambda state, bucket: bf16_compress_hook(state, bucket))
    return model, _training_step(model, optimizer, autocast=bf16)


def _fsdp2(model: nn.Module, bf16: bool, keep: bool) -> tuple[nn.Module, Step]:
    options = dict(mesh=init_device_mesh("cpu", (RANKS,)), reshard_after_forward=not keep)
    if bf16:
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **OPTIONS)
    return model, _training_step(model, optimizer)


def _deepspeed(
    model: nn.Module, bf16: bool, stage: int, buckets: bool, batch: int
) -> tuple[nn.Module, Step]:
    import deepspeed

    zero = {"stage": stage, "overlap_comm": True, "contiguous_gradients": True}
    if buckets:
        elements = BUCKET // (2 if bf16 else 4)
        zero.update(reduce_bucket_size=elements, allgather_bucket_size=elements)
    config = {
        "train_micro_batch_size_per_gpu": batch,
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {**OPTIONS, "torch_adam": True, "fused": True}},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": bf16},
        "steps_per_print": 10**9,
    }
    engine, *_ = deepspeed.initialize(model=model, config=config)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return engine, step


def _zerocore(model: nn.Module, bf16: bool, stage: int) -> tuple[nn.Module, Step]:
    policy = zerocore.MixedPrecision(torch.bfloat16, torch.bfloat16) if bf16 else None
    model = zerocore.shard(model, stage, units=[Block], mixed_precision=policy)
    optimizer = zerocore.AdamW(model.parameters(), **OPTIONS)
    return model, _training_step(model, optimizer)
