"""Rate and memory of saving and loading a checkpoint, against dd on the same disk.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/bench_checkpoint.py DIRECTORY
        [--gigabytes 2] [--rounds 3] [--stage 3] [--json PATH]

A model of equal linear layers, each a unit, with zerocore.AdamW: three fp32 tensors of each shape.
Rates are bytes of all ranks over the time of the slowest; a save ends when everything is durable,
a load starts with nothing in the page cache, and verifies checksums. dd writes as many bytes, with
conv=fsync, before each of the two. Extra memory is the peak of a rank's resident set during the
call, less what it was before. State is compared bit for bit after the last load.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import zerocore

WIDTH = 2048
BYTES = 3 * 4  # of a parameter and its two moments


def build(gigabytes: float, stage: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    layers = max(2, round(gigabytes * 1e9 / (WIDTH * WIDTH * BYTES)))
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    model = zerocore.shard(model, stage, units=[nn.Linear])
    optimizer = zerocore.AdamW(model.parameters(), lr=1e-3)
    model(torch.randn(4, WIDTH)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def status(field: str) -> int:
    """Bytes of a field of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) * 1024


class Measured:
    """Seconds of the slowest rank, and the most extra memory of any, of what is inside."""

    def __enter__(self) -> "Measured":
        dist.barrier()
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again
        self._before = status("VmRSS")
        self._start = time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        own = torch.tensor([time.perf_counter() - self._start, status("VmHWM") - self._before])
        dist.all_reduce(own, op=dist.ReduceOp.MAX)
        self.seconds, self.extra = own[0].item(), int(own[1])


def dd(directory: Path, count: int) -> float:
    """Seconds that dd takes for this many bytes on the first rank, while others wait."""
    seconds = torch.zeros(())
    if dist.get_rank() == 0:
        path = directory / "dd"
        start = time.perf_counter()
        subprocess.run(
            ["dd", "if=/dev/zero", f"of={path}", "bs=8M", f"count={count >> 23}", "conv=fsync"],
            check=True,
            capture_output=True,
        )
        seconds += time.perf_counter() - start
        path.unlink()
    dist.broadcast(seconds, 0)
    return seconds.item()


def forget(path: Path) -> int:
    """Drops a checkpoint from the page cache; its bytes."""
    count = 0
    for file in path.iterdir():
        count += file.stat().st_size
        fd = os.open(file, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    return count


def shards(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    moments = [
        optimizer.state[p][key] for p in model.parameters() for key in ("exp_avg", "exp_avg_sq")
    ]
    return [t.detach() for t in (*model.parameters(), *moments)]


def run_round(
    directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer, gigabytes: float
) -> dict[str, float]:
    path = directory / "checkpoint"
    written = dd(directory, int(gigabytes * 1e9))
    with Measured() as save:
        zerocore.save(path, model, optimizer)
    count = forget(path)
    before_load = dd(directory, int(gigabytes * 1e9))
    with Measured() as load:
        zerocore.load(path, model, optimizer)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(path)
    size = int(gigabytes * 1e9) >> 23 << 23
    return {
        "dd before save": size / written / 1e6,
        "save": count / save.seconds / 1e6,
        "dd before load": size / before_load / 1e6,
        "load": count / load.seconds / 1e6,
        "save extra": save.extra / 1e6,
        "load extra": load.extra / 1e6,
    }


def check(directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    expected = [tensor.clone() for tensor in shards(model, optimizer)]
    zerocore.save(directory / "checked", model, optimizer)
    for tensor in shards(model, optimizer):
        tensor.zero_()
    zerocore.load(directory / "checked", model, optimizer)
    for found, tensor in zip(shards(model, optimizer), expected, strict=True):
        assert torch.equal(found, tensor), "the state that was loaded is not the one that was saved"
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(directory / "checked")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    model, optimizer = build(args.gigabytes, args.stage)
    args.directory.mkdir(parents=True, exist_ok=True)
    check(args.directory, model, optimizer)
    rounds = [
        run_round(args.directory, model, optimizer, args.gigabytes) for _ in range(args.rounds)
    ]
    if dist.get_rank() == 0:
        report(rounds, args)
    dist.destroy_process_group()


def report(rounds: list[dict[str, float]], args: argparse.Namespace) -> None:
    unit = WIDTH * WIDTH * 4 / 1e6
    load = " ".join(f"{value:.1f}" for value in os.getloadavg())
    print(
        f"{args.gigabytes} GB, stage {args.stage}, {dist.get_world_size()} ranks, "
        f"{os.cpu_count()} cores (load {load}), torch {torch.__version__}, {platform.release()}"
    )
    for name in ("dd before save", "save", "dd before load", "load"):
        values = [one[name] for one in rounds]
        print(f"{name:>16} MB/s  {statistics.median(values):7.0f}  of {[round(v) for v in values]}")
    for what in ("save", "load"):
        ratios = [one[what] / one[f"dd before {what}"] for one in rounds]
        extra = max(one[f"{what} extra"] for one in rounds)
        print(
            f"{what}: {statistics.median(ratios):.2f} of dd's rate; at most {extra:.1f} MB more in "
            f"a rank (a unit has {unit:.1f} MB of parameters)"
        )
    if args.json:
        args.json.write_text(json.dumps(rounds, indent=1))


if __name__ == "__main__":
    main()
