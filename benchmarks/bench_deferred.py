"""Memory and time of building and sharding a model that is larger than a rank's share of memory.

    python benchmarks/bench_deferred.py                        # 1.4 GB over 8 ranks, deferred
    python benchmarks/bench_deferred.py --how eager --ranks 2  # the same, constructed as usual

Every rank is a process on this machine (gloo). It imports everything, joins the group, and then
builds and shards a GPT whose weights are initialised twice, as many are: by its layers, and by the
model. Shown are the largest peak of resident memory over what a rank had before it built, beside
the bytes that it has to hold: its shard, the largest unit, and the cache of the construction.

`--check` also compares with the eager construction, by a hash of every parameter and buffer and of
the generator's state; it holds the whole model once, on rank 0, after the peak was taken.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import os
import pathlib
import platform
import subprocess
import sys
import tempfile
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import zerocore

MB = 2**20
CACHE_BYTES = 64 * MB


class Block(nn.Module):
    """A transformer block."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, dim] to the same; heads of 64."""
        batch, time, dim = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, time, 3, dim // 64, 64).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, time, dim))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """Initialised by its layers first, and again by itself."""

    def __init__(self, vocabulary: int, dim: int, depth: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, dim)
        self.position = nn.Embedding(1024, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocabulary, bias=False)
        self.register_buffer("mask", torch.ones(1024, 1024).tril(), persistent=False)
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, 0.0, 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next token at every place of [B, T]."""
        x = self.embed(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def resident(key: str) -> int:
    """Bytes: VmRSS, now, or VmHWM, the peak since `forget_peak`."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"expected {key} in /proc/self/status")


def forget_peak() -> None:
    """The peak starts at what is resident now."""
    pathlib.Path("/proc/self/clear_refs").write_text("5")


def hashed(tensor: Tensor) -> str:
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(flat.numpy().data, digest_size=16).hexdigest()


def build_of(args: argparse.Namespace) -> Gpt:
    return Gpt(args.vocabulary, args.dim, args.depth)


def run_rank(args: argparse.Namespace) -> None:
    """Builds and shards, and prints what rank 0 has gathered from all."""
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "gloo", f"file://{os.environ['STORE']}", datetime.timedelta(minutes=20), size, rank
    )
    dist.barrier()
    before = resident("VmRSS")
    forget_peak()
    started = time.perf_counter()
    if args.how == "deferred":
        model = zerocore.deferred(lambda: build_of(args), 11, cache_bytes=CACHE_BYTES)
    else:
        torch.manual_seed(11)
        model = build_of(args)
    built = time.perf_counter()
    build_peak = resident("VmHWM") - before
    zerocore.shard(model, 3)
    done = time.perf_counter()
    peak, after = resident("VmHWM") - before, resident("VmRSS") - before
    state = torch.get_rng_state()
    figures = (build_peak, peak, after, built - started, done - built)
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, figures)
    if dist.get_rank() == 0:
        report(args, model, everyone)
    if args.check:
        check(args, model, state)
    del model
    dist.destroy_process_group()


def report(args: argparse.Namespace, model: nn.Module, everyone: list) -> None:
    # Parameters are shards by now: their names and sizes are zerocore.info's.
    units: dict[str, int] = {}
    for param in model.parameters():
        info = zerocore.info(param)
        size = info.shape.numel() * info.dtype.itemsize
        units[info.unit] = units.get(info.unit, 0) + size
    total = sum(units.values())
    shard = sum(p.nbytes for p in model.parameters()) + sum(b.nbytes for b in model.buffers())
    build_peak, peak, after, build_seconds, shard_seconds = (
        max(f) for f in zip(*everyone, strict=True)
    )
    print(f"{args.how}, {total / MB:.0f} MB over {args.ranks} ranks, fp32, stage 3")
    print(
        f"  shard and buffers {shard / MB:.0f} MB, largest unit {max(units.values()) / MB:.0f} MB, "
        f"cache {CACHE_BYTES / MB:.0f} MB"
    )
    print(
        f"  peak of a rank: +{build_peak / MB:.0f} MB while building, +{peak / MB:.0f} MB in all; "
        f"+{after / MB:.0f} MB afterwards"
    )
    print(
        f"  build {build_seconds:.1f} s, shard {shard_seconds:.1f} s (the slowest rank)", flush=True
    )


def check(args: argparse.Namespace, model: nn.Module, state: Tensor) -> None:
    full = zerocore.full_state_dict(model, rank0_only=True)
    if dist.get_rank() == 0:
        found = {name: hashed(tensor) for name, tensor in full.items()}
        full.clear()
        torch.manual_seed(11)
        eager = build_of(args)
        wrong = [n for n, tensor in eager.state_dict().items() if found[n] != hashed(tensor)]
        same_state = torch.equal(state, torch.get_rng_state())
        print(
            f"  {len(found) - len(wrong)} of {len(found)} tensors bit-equal to eager construction, "
            f"generator {'the same' if same_state else 'ANOTHER'}; {wrong[:3]}",
            flush=True,
        )
    dist.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--how", choices=["deferred", "eager"], default="deferred")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument("--depth", type=int, default=24)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    if "RANK" in os.environ:
        run_rank(args)
        return
    print(
        f"{datetime.date.today()}, {platform.machine()}, {os.cpu_count()} cores, "
        f"torch {torch.__version__}",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {"WORLD_SIZE": str(args.ranks), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, *sys.argv[1:]]
        store = pathlib.Path(folder) / "store"
        ranks = [
            subprocess.Popen(command, env=env | {"RANK": str(rank), "STORE": str(store)})
            for rank in range(args.ranks)
        ]
        if any([rank.wait() for rank in ranks]):
            sys.exit("a rank failed")


if __name__ == "__main__":
    main()
