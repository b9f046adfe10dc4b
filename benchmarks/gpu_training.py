"""Training on one GPU: stages against each other, and a step of a GPT with its profile.

The process group has one rank, so collectives move nothing between GPUs; what is measured is what
sharding costs on the device and on the host.
"""

import gc
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from gpt import GPT, Block
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import zerocore

LEARNING_RATE, CLIP = 1e-3, 1.0
FIRST_SCALE = 2.0**24  # of losses in fp16
LARGE_RATE = 1e-4  # of the model whose steps are timed
DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of the profiler's trace


@contextmanager
def one_rank() -> Iterator[None]:
    """A default process group of this process alone, over NCCL."""
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        gc.collect()  # FSDP2 aborts at exit if its objects outlive the process group
        dist.destroy_process_group()


def make_gpt(layers: int, dim: int, seq: int, head_dim: int = 64) -> GPT:
    """The same weights at every call."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        return GPT(layers, dim, max(1, dim // head_dim), seq)


def make_batch(batch: int, seq: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Bytes of which each is one more than that before it, mostly: something to learn."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randint(256, (batch, 1), generator=generator)
    noise = torch.rand(batch, seq + 1, generator=generator) < 0.1
    tokens = ((start + torch.arange(seq + 1) + 7 * noise) % 256).cuda()
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train_stage(stage: int, dtype: torch.dtype, steps: int) -> tuple[list[float], list[Tensor]]:
    """Losses and final parameters of a small GPT; in fp16 the first step overflows."""
    model = make_gpt(layers=2, dim=96, seq=33, head_dim=24)
    policy = None
    if dtype != torch.float32:
        policy = zerocore.MixedPrecision(dtype, output=torch.float32)
    zerocore.shard(model, stage, units=[Block], mixed_precision=policy)
    optimizer = zerocore.AdamW(model.parameters(), lr=LEARNING_RATE, max_grad_norm=CLIP)
    scaler = zerocore.GradScaler(init_scale=FIRST_SCALE, enabled=dtype == torch.float16)
    losses = []
    for step in range(steps):
        x, y = make_batch(5, 33, seed=step)
        loss = loss_of(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
        skipped = step == 0 and scaler.is_enabled()
        assert not skipped or scaler.get_scale() < FIRST_SCALE, "expected an overflow in fp16"
    return losses, [value.cpu() for value in model.state_dict().values()]


def check_stages(dtype: torch.dtype, steps: int) -> str:
    """Trains at every stage.

    Returns:
        The losses, as text.

    Raises:
        AssertionError: if the stages differ in a bit, or nothing was learnt.
    """
    with sdpa_kernel(SDPBackend.MATH):  # others may add in any order in their backward
        runs = [train_stage(stage, dtype, steps) for stage in range(4)]
    losses, parameters = runs[0]
    for stage, (other_losses, other) in enumerate(runs[1:], 1):
        assert other_losses == losses, f"stage {stage}: losses {other_losses}, stage 0: {losses}"
        for a, b in zip(other, parameters, strict=True):
            same = torch.equal(a.view(torch.uint8), b.view(torch.uint8))
            assert same, f"stage {stage}: parameters differ from stage 0's by {(a - b).abs().max()}"
    assert min(losses[-2:]) < losses[0] - 0.1, f"expected a loss that falls, got {losses}"
    return f"loss {losses[0]:.4f} to {losses[-1]:.4f} in {steps} steps"


def check_against_torch(steps: int) -> str:
    """Stage 0 in fp32 against the plain model, both with the same optimizer of torch."""
    results = []
    for sharded in (False, True):
        model = make_gpt(layers=2, dim=96, seq=33, head_dim=24)
        if sharded:
            zerocore.shard(model, 0, units=[Block])
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, foreach=False)
        for step in range(steps):
            x, y = make_batch(5, 33, seed=step)
            with sdpa_kernel(SDPBackend.MATH):
                loss_of(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(torch.cat([v.flatten() for v in model.state_dict().values()]).cpu())
    plain, ours = results
    # cuBLAS may choose another kernel for a weight at another alignment; mostly it does not.
    worst = (plain - ours).abs().max().item()
    assert worst <= 1e-4, f"expected the plain model's parameters, got a difference of {worst:.1e}"
    return "the same bits" if torch.equal(plain, ours) else f"largest difference {worst:.1e}"


@dataclass(frozen=True)
class Size:
    """Of the GPT whose step is timed."""

    layers: int = 12
    dim: int = 1024
    seq: int = 1024
    batch: int = 8


Step = Callable[[Tensor, Tensor], Tensor]


def zerocore_step(stage: int, size: Size) -> Step:
    """bf16 computation over fp32 master shards."""
    model = make_gpt(size.layers, size.dim, size.seq)
    policy = zerocore.MixedPrecision(torch.bfloat16, output=torch.float32)
    zerocore.shard(model, stage, units=[Block], mixed_precision=policy)
    optimizer = zerocore.AdamW(model.parameters(), lr=LARGE_RATE, max_grad_norm=CLIP)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def torch_step(model: nn.Module, autocast: bool) -> Step:
    """Clipping and fused AdamW on fp32 parameters."""
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=LARGE_RATE, fused=True)

    def step(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            loss = loss_of(model(x).float(), y)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def plain_step(size: Size) -> Step:
    """The plain model under autocast."""
    return torch_step(make_gpt(size.layers, size.dim, size.seq), autocast=True)


def fsdp2_step(size: Size) -> Step:
    """FSDP2 with the dtypes of `zerocore_step`."""
    model = make_gpt(size.layers, size.dim, size.seq)
    mesh, bf16 = init_device_mesh("cuda", (1,)), torch.bfloat16
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=MixedPrecisionPolicy(bf16, bf16))
    policy = MixedPrecisionPolicy(bf16, bf16, output_dtype=torch.float32)
    return torch_step(fully_shard(model, mesh=mesh, mp_policy=policy), autocast=False)


# What trains the GPT, by name. The first is the one that others are compared with.
VARIANTS: dict[str, Callable[[Size], Step]] = {
    "zerocore stage 3": lambda size: zerocore_step(3, size),
    "torch autocast, AdamW(fused)": plain_step,
    "zerocore stage 0": lambda size: zerocore_step(0, size),
    "FSDP2, AdamW(fused)": fsdp2_step,
}


def parameters(size: Size) -> int:
    """How many the GPT has."""
    with torch.device("meta"):
        model = GPT(size.layers, size.dim, 1, size.seq)
    return sum(p.numel() for p in model.parameters())


def set_up(
    make: Callable[[Size], Step], size: Size, batch: tuple[Tensor, Tensor]
) -> tuple[Step, list[float]]:
    """A step that is warm, and the losses of the first ones."""
    step = make(size)
    return step, [step(*batch).item() for _ in range(3)]


def check_losses(losses: dict[str, list[float]]) -> str:
    """All variants compute the same but for where they round.

    Raises:
        AssertionError: if the losses of some are others.
    """
    ours = next(iter(losses.values()))
    for theirs in losses.values():
        for step, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            allowed = 0.01 if step == 0 else 0.05
            assert abs(a - b) <= allowed * b, f"expected about the same losses, got {losses}"
    return ", ".join(f"{loss:.4f}" for loss in ours)


def time_steps(
    steps: dict[str, Step], batch: tuple[Tensor, Tensor], repeats: int, deadline: float
) -> Iterator[str]:
    """Times steps of each variant, in turn; yields lines for the report.

    Args:
        repeats: at most 10 rounds of three steps each are made.
        deadline: on time.perf_counter(), after which no third or later round begins.
    """
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(min(10, repeats)):
        if repeat >= 2 and time.perf_counter() > deadline:
            break
        for name, step in steps.items():
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(3):
                step(*batch)
            torch.cuda.synchronize()
            seconds[name].append((time.perf_counter() - begin) / 3)
    first = next(iter(steps))
    for name, times in seconds.items():
        ratio = statistics.median(a / b for a, b in zip(times, seconds[first], strict=True))
        milliseconds = statistics.median(times) * 1e3
        yield f"{name:30} {milliseconds:8.1f} ms a step, {ratio:.2f}x the time of {first}"


def device_work(step: Callable[[], object], steps: int) -> list[dict]:
    """What the device did in some steps, from the profiler's trace: events with ts and dur in us.

    Empty where the profiler cannot see the device.
    """
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return [event for event in events if event.get("cat") in DEVICE_WORK and "dur" in event]


def profile_lines(events: list[dict], steps: int) -> list[str]:
    """Shares of device time, gaps, and the largest kernels."""
    if not events:
        return ["the profiler saw no work on the device: no shares, no gaps"]
    by_name: dict[str, list[float]] = defaultdict(list)
    for event in events:
        by_name[event["name"]].append(event["dur"])
    total = sum(map(sum, by_name.values()))
    busy, end = 0.0, 0.0
    for event in sorted(events, key=lambda event: event["ts"]):
        start, stop = event["ts"], event["ts"] + event["dur"]
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    span = end - min(event["ts"] for event in events)

    def share(*words: str) -> float:
        found = (sum(v) for name, v in by_name.items() if any(w in name for w in words))
        return sum(found) / total

    lines = [
        f"profile of {steps} steps: {span / steps / 1e3:.2f} ms a step on the device, of which "
        f"{1 - busy / span:.1%} nothing ran (the profiler itself slows the host)",
        f"device time: zerocore's kernels {share('zerocore::'):.1%}, NCCL {share('nccl'):.1%}, "
        f"copies and fills {share('Memcpy', 'Memset'):.1%}",
        f"{'ms a step':>10} {'calls':>6} {'share':>6}  kernel",
    ]
    largest = sorted(by_name.items(), key=lambda item: -sum(item[1]))
    ours = [item for item in largest[12:] if "zerocore::" in item[0]]
    for name, times in [*largest[:12], *ours]:
        milliseconds, calls = sum(times) / steps / 1e3, len(times) / steps
        row = f"{milliseconds:10.3f} {calls:6.1f} {sum(times) / total:6.1%}"
        lines.append(f"{row}  {name[:100]}")
    return lines
