"""CPU speed of a whole optimizer step on one flat buffer, against torch's chain of passes.

    python benchmarks/bench_optimizer.py [--quick] [--json PATH]

The step takes scaled gradients, unscales and clips them, updates an fp32 master with AdamW unless a
gradient is not finite, and leaves a bf16 copy. Bandwidths are by formula, in bytes a parameter that
the algorithm must read and write; what a cache reads before it writes a line is not in them.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import table
import torch
import torch.distributed as dist
from table import Row
from torch import Tensor, nn

import zerocore
from zerocore import ops

LR, BETAS, EPS, WEIGHT_DECAY, MAX_NORM, SCALE = 1e-3, (0.9, 0.95), 1e-8, 0.1, 1.0, 1024.0
CHECKED = 1_000_003  # elements of the comparison of (a) and (b)
PIECE = 1 << 20  # elements that are filled at a time

Seconds = dict[str, list[float]]

# Bytes a parameter: fp32 param, exp_avg, exp_avg_sq read and written (24), the gradient read (4 or
# 2) by each pass, and the bf16 copy written (2).
UNSCALE, NORM, CLIP, STEP, CAST = 4 + 4, 4, 4 + 4, 24 + 4, 4 + 2
SUMSQ, FUSED = 4, 24 + 4 + 2


@dataclass
class Variant:
    """What is timed: `run` moves `size` bytes a parameter; `prepare` is not timed."""

    text: str
    size: int
    run: Callable[[], None]
    prepare: Callable[[], None]


class Buffers:
    """Flat parameters, moments and scaled gradients of one size, all of it touched."""

    def __init__(self, numel: int) -> None:
        self.param = torch.nn.Parameter(filled(numel, 1.0))
        self.source = filled(numel, SCALE, torch.bfloat16)  # (a) changes its gradient: restored
        self.param.grad = self.source.float()
        self.exp_avg = filled(numel, 0.01)
        self.exp_avg_sq = filled(numel, 0.01).square_()
        self.low = torch.zeros(numel, dtype=torch.bfloat16)
        self.sum = torch.zeros(numel)

    def restore_grad(self) -> None:
        """Undoes what (a) does to the gradient."""
        self.param.grad.copy_(self.source)


def filled(numel: int, scale: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers, the same in every piece: drawing them all takes longer than the benchmark."""
    out = torch.empty(numel, dtype=dtype)
    piece = torch.randn(PIECE, generator=torch.Generator().manual_seed(0)).mul_(scale)
    for part in out.split(PIECE):
        part.copy_(piece[: part.numel()])
    return out


def torch_step(b: Buffers) -> Callable[[], None]:
    """(a): GradScaler's unscale_, clip_grad_norm_, AdamW(fused=True) and the cast."""
    options = dict(lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY)
    optimizer = torch.optim.AdamW([b.param], fused=True, **options)
    optimizer.state[b.param] = {
        "step": torch.tensor(0.0),
        "exp_avg": b.exp_avg,
        "exp_avg_sq": b.exp_avg_sq,
    }
    inv_scale = torch.tensor(1 / SCALE)

    def run() -> None:
        found_inf = torch.zeros(1)
        torch._amp_foreach_non_finite_check_and_unscale_([b.param.grad], found_inf, inv_scale)
        torch.nn.utils.clip_grad_norm_([b.param], MAX_NORM)
        if not found_inf.item():  # what GradScaler.step does
            optimizer.step()
        b.low.copy_(b.param.detach())

    return run


def adamw(b: Buffers, grad: Tensor) -> Callable[[Tensor, Tensor], None]:
    """(c): fused_adamw_ on all elements; takes grad_scale and found_inf."""
    ranges = torch.tensor([[0, grad.numel()]])
    hyper = torch.tensor([[LR, *BETAS, EPS, WEIGHT_DECAY, 1.0]], dtype=torch.float64)
    steps = [torch.tensor(0.0)]
    state = (b.param.detach(), grad, b.exp_avg, b.exp_avg_sq, b.low)
    return lambda scale, found_inf: ops.fused_adamw_(*state, ranges, hyper, steps, scale, found_inf)


def our_step(b: Buffers, grad: Tensor) -> Callable[[], None]:
    """(b): sumsq, the factor of unscaling and clipping, fused_adamw_."""
    update = adamw(b, grad)

    def run() -> None:
        squares, non_finite = ops.sumsq(grad).unbind()
        norm = squares.sqrt() / SCALE
        factor = (MAX_NORM / (norm + 1e-6)).clamp(max=1.0) / SCALE
        update(factor.float(), non_finite.float())

    return run


class Flat(nn.Module):
    """One parameter, which the forward sums."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(filled(numel, 1.0))

    def forward(self) -> Tensor:
        """The sum: its gradient is all ones."""
        return self.weight.sum()


def training_step(numel: int) -> Callable[[], None]:
    """(e): what a training script calls, on a model of its own that one rank holds."""
    model = Flat(numel)
    policy = zerocore.MixedPrecision(torch.bfloat16, output=torch.float32)
    zerocore.shard(model, stage=0, mixed_precision=policy)
    options = dict(lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY)
    optimizer = zerocore.AdamW(model.parameters(), **options, max_grad_norm=MAX_NORM)
    scaler = zerocore.GradScaler(init_scale=SCALE)
    scaler.scale(model()).backward()

    def run() -> None:
        assert model.weight.grad is not None  # it stays, for every step
        scaler.step(optimizer)
        scaler.update()

    return run


def variants(b: Buffers) -> dict[str, Variant]:
    """All that is timed, by name."""
    one, zero = torch.tensor(1 / SCALE), torch.tensor(0.0)
    only = adamw(b, b.param.grad)

    def nothing() -> None:
        pass

    chain = UNSCALE + NORM + CLIP + STEP + CAST
    return {
        "a": Variant(
            "torch: unscale, clip, AdamW(fused), cast", chain, torch_step(b), b.restore_grad
        ),
        "b": Variant(
            "ours: sumsq, fused_adamw_", SUMSQ + FUSED, our_step(b, b.param.grad), b.restore_grad
        ),
        "b2": Variant(
            "ours with bf16 gradients", SUMSQ + FUSED - 4, our_step(b, b.source), nothing
        ),
        "c": Variant("fused_adamw_ alone", FUSED, lambda: only(one, zero), nothing),
        "e": Variant(
            "ours: GradScaler.step(zerocore.AdamW)",
            SUMSQ + FUSED,
            training_step(b.param.numel()),
            nothing,
        ),
        "d": Variant(
            "torch.add(a, b, out=c), fp32",
            12,
            lambda: torch.add(b.exp_avg, b.exp_avg_sq, out=b.sum),
            nothing,
        ),
    }


def check() -> str:
    """Compares one step of (a) with one of (b).

    Returns:
        What was found, as a line of the report.

    Raises:
        SystemExit: if they differ by more than the roundings of the factors do.
    """
    theirs, ours = Buffers(CHECKED), Buffers(CHECKED)
    torch_step(theirs)()
    our_step(ours, ours.param.grad)()
    worst = 0.0
    for name in ("param", "exp_avg", "exp_avg_sq"):
        a, b = getattr(theirs, name).detach(), getattr(ours, name).detach()
        worst = max(worst, ((a - b).abs().max() / a.abs().max()).item())
    steps = (theirs.low.view(torch.int16).int() - ours.low.view(torch.int16).int()).abs().max()
    # (a) rounds the gradient twice on its way and sums its norm in fp32: about 1e-6.
    if not (worst <= 1e-5 and steps <= 1):
        raise SystemExit(
            f"(a) and (b) differ: {worst:.1e} of the largest value, {steps} bf16 steps"
        )
    moved = (ours.param.detach() - filled(CHECKED, 1.0)).abs().mean()
    if not moved > 1e-4:
        raise SystemExit(f"expected a step of the size of lr ({LR}), got {moved:.1e}")
    return (
        f"one step of (a) and of (b) on {CHECKED:,} parameters: equal to {worst:.1e} of the "
        f"largest value (allowed: 1e-5), bf16 copies to {steps} in the last place (allowed: 1)"
    )


def in_turns(timed: dict[str, Variant], repeats: int) -> Seconds:
    """Seconds of every repeat, variants interleaved; one more repeat before that is not counted."""
    seconds: Seconds = {name: [] for name in timed}
    for repeat in range(repeats + 1):
        for name, variant in timed.items():
            variant.prepare()
            start = time.perf_counter()
            variant.run()
            if repeat > 0:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def rows_of(numel: int, threads: int, timed: dict[str, Variant], seconds: Seconds) -> list[Row]:
    """The times, and the ratios of neighbours in time: other load on the machine hits both."""
    case = f"optimizer step, {numel:.0e} parameters, {threads} thread{'s' * (threads > 1)}"
    rows = []
    for name, variant in timed.items():
        median = statistics.median(seconds[name])
        speed = variant.size * numel / median / 1e9
        detail = f"{variant.size} bytes a parameter, {speed:.1f} GB/s"
        rows.append(Row(f"{case}, {name}: {variant.text}", median * 1e3, "ms", detail=detail))
    share = timed["b"].size / timed["d"].size
    for ours in ("b", "e"):
        pairs = list(zip(seconds["a"], seconds[ours], seconds["d"], strict=True))
        speed = statistics.median(a / b for a, b, _ in pairs)
        bandwidth = statistics.median(share * d / b for _, b, d in pairs)
        rows.append(Row(f"{case}: speed of {ours} over a", speed, "x", 1.6, at_most=False))
        rows.append(Row(f"{case}: bandwidth, {ours} over d", bandwidth, "x", 0.85, at_most=False))
    return rows


def measure(options: argparse.Namespace) -> list[Row]:
    """Checks one step, and times it on each number of threads."""
    numel = 10_000_000 if options.quick else 100_000_000
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    print(check(), flush=True)
    rows = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        timed = variants(Buffers(numel))
        rows += rows_of(numel, threads, timed, in_turns(timed, repeats=15))
    return rows


if __name__ == "__main__":
    table.main(__doc__, measure)
