"""Loss curves in bf16 and fp16: every stage of zerocore, and DDP with torch.autocast.

    torchrun --nproc-per-node 2 benchmarks/curves.py

Trains the example's GPT on the example's text in the same way with each of them, and prints one
table. The stages must give the same bits. Their distance to DDP with the same seed is to be no more
than that between two seeds of DDP: the two round in different places (zerocore computes everything
with narrow weights, as FSDP2 does, and sends narrow gradients; autocast casts at each operation and
leaves the residual stream and the gradients in fp32). FSDP2 with the same dtypes stands beside.
"""

import argparse
import gc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

import zerocore

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import text  # noqa: E402
from gpt import GPT, Block  # noqa: E402

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
SEQ = 64
LEARNING_RATE, CLIP = 3e-3, 1.0


def main() -> None:
    """Runs all curves on every rank; rank 0 prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8, help="sequences of a rank")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    data = text.load(None).train
    if dist.get_rank() == 0:
        print(
            f"GPT of {options.layers} layers, dim {options.dim}, {options.steps} steps of "
            f"{options.batch} x {SEQ} bytes on each of {dist.get_world_size()} ranks, "
            f"torch {torch.__version__}\n"
            "distance: mean absolute difference of losses (nats) over the steps"
        )
    agree = [compare(name, data, options) for name in options.dtypes]
    gc.collect()  # FSDP2 aborts at exit if its objects outlive the process group
    dist.destroy_process_group()
    if not all(agree):
        raise SystemExit(1)


def compare(name: str, data: Tensor, options: argparse.Namespace) -> bool:
    """The curves of one dtype; whether they are as they should be."""
    dtype = DTYPES[name]
    stages = [curve(sharded(stage, dtype), data, options, seed=1) for stage in range(4)]
    peer, other = (curve(replicated(dtype), data, options, seed) for seed in (1, 2))
    fsdp2 = curve(fully_sharded(dtype), data, options, seed=1)
    same = all(torch.equal(stages[0], stage) for stage in stages[1:])
    pairs = ((stages[0], peer), (peer, other), (fsdp2, peer), (stages[0], fsdp2))
    distance, spread, theirs, between = ((a - b).abs().mean().item() for a, b in pairs)
    if dist.get_rank() == 0:
        last = [run[-20:].mean().item() for run in (stages[0], peer, other, fsdp2)]
        print(
            f"{name}: stages 0..3 {'bit-equal' if same else 'DIFFERENT'}\n"
            f"  mean of the last 20 steps: zerocore {last[0]:.4f}, DDP {last[1]:.4f}, DDP with "
            f"another seed {last[2]:.4f}, FSDP2 {last[3]:.4f}\n"
            f"  distances: zerocore to DDP {distance:.4f}, the two seeds {spread:.4f}, "
            f"FSDP2 to DDP {theirs:.4f}, zerocore to FSDP2 {between:.4f}",
            flush=True,
        )
    return same and distance <= spread


Step = Callable[[Tensor, Tensor], Tensor]
Setup = Callable[[nn.Module], tuple[Step, torch.optim.Optimizer, torch.amp.GradScaler]]


def sharded(stage: int, dtype: torch.dtype) -> Setup:
    """A setup with zerocore."""

    def setup(model: nn.Module) -> tuple[Step, torch.optim.Optimizer, torch.amp.GradScaler]:
        policy = zerocore.MixedPrecision(dtype, output=torch.float32)
        zerocore.shard(model, stage, units=[Block], mixed_precision=policy)
        optimizer = zerocore.AdamW(model.parameters(), lr=LEARNING_RATE, max_grad_norm=CLIP)
        scaler = zerocore.GradScaler(enabled=dtype == torch.float16)
        return lambda x, y: loss_of(model(x), y), optimizer, scaler

    return setup


def replicated(dtype: torch.dtype) -> Setup:
    """A setup with DDP and autocast."""

    def setup(model: nn.Module) -> tuple[Step, torch.optim.Optimizer, torch.amp.GradScaler]:
        model = nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        scaler = torch.amp.GradScaler("cpu", enabled=dtype == torch.float16)

        def step(x: Tensor, y: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=dtype):
                return loss_of(model(x).float(), y)

        return step, optimizer, scaler

    return setup


def fully_sharded(dtype: torch.dtype) -> Setup:
    """A setup with FSDP2."""

    def setup(model: nn.Module) -> tuple[Step, torch.optim.Optimizer, torch.amp.GradScaler]:
        policy = MixedPrecisionPolicy(dtype, reduce_dtype=dtype, output_dtype=torch.float32)
        options = dict(mesh=init_device_mesh("cpu", (dist.get_world_size(),)), mp_policy=policy)
        for block in model.blocks:
            fully_shard(block, **options | {"mp_policy": MixedPrecisionPolicy(dtype, dtype)})
        fully_shard(model, **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        scaler = torch.amp.GradScaler("cpu", enabled=dtype == torch.float16)
        return lambda x, y: loss_of(model(x), y), optimizer, scaler

    return setup


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean loss in nats."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def curve(setup: Setup, data: Tensor, options: argparse.Namespace, seed: int) -> Tensor:
    """Trains; the losses, averaged over the ranks: float64 [steps]."""
    torch.manual_seed(seed)
    model = GPT(options.layers, options.dim, heads=4, seq=SEQ)
    step, optimizer, scaler = setup(model)
    losses = []
    for x, y in batches(data, options, seed):
        loss = step(x, y)
        scaler.scale(loss).backward()
        if not isinstance(optimizer, zerocore.AdamW):  # which clips by itself
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], CLIP)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.detach().double())
    result = torch.stack(losses)
    dist.all_reduce(result)
    return result / dist.get_world_size()


def batches(
    data: Tensor, options: argparse.Namespace, seed: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields the parts of a seed's batches that are this rank's."""
    generator = torch.Generator().manual_seed(seed)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for _ in range(options.steps):
        starts = text.random_starts(data, ranks * options.batch, SEQ, generator)
        yield text.sequences(data, starts[rank::ranks], SEQ)


if __name__ == "__main__":
    main()
