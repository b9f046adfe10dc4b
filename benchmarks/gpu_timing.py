"""Device time of each kernel, of what eager PyTorch does instead, and of a copy of equal bytes.

Times are between CUDA events around work that was enqueued while the GPU was busy with something
else: what the host needs to launch is not in them, which favours chains of many operators. Caches
are cold, as they are in a training step: a buffer larger than the L2 cache is written before each
run. Variants take turns within every repeat, so that a clock that changes hits them alike.
"""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from zerocore import ops

LR, BETAS, EPS, WEIGHT_DECAY, MAX_NORM, SCALE = 1e-3, (0.9, 0.95), 1e-8, 0.1, 1.0, 1024.0
LEAST = 7  # repeats, even if they take longer than they should
MOST_FLUSHES = 20
PIECES = 12  # tensors that are packed
SHARDS = 8

Run = Callable[[], object]


@dataclass
class Case:
    """One call of ours, and its peers.

    Attributes:
        size: bytes an element that must be read and written.
        ours: does it; so does each of `peers`, by what they call.
        prepare: comes before every run, not timed.
    """

    size: float
    ours: Run
    peers: dict[str, Run]
    prepare: Run = lambda: None


@dataclass
class Result:
    """Medians of one case at one size.

    Attributes:
        gb_per_s: of the bytes that must be moved.
        of_copy: that, in units of what copy_ of as many bytes reaches.
        speed: how many times faster than each peer; the median over the repeats.
        ms: by variant; "" is ours, "copy_" the copy.
        host_us: what the host needs to launch, by variant.
    """

    kernel: str
    numel: int
    repeats: int
    gb_per_s: float
    of_copy: float
    speed: dict[str, float]
    ms: dict[str, float]
    host_us: dict[str, float]


def filled(numel: int, scale: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(numel, dtype=dtype, device="cuda").normal_(0, scale)


def adamw_case(numel: int, scaled: bool) -> Case:
    """A whole optimizer step on one flat fp32 buffer, which leaves a bf16 copy.

    Args:
        scaled: gradients of a scaled loss: the step unscales them and skips if one is not finite.
    """
    factor = SCALE if scaled else 1.0
    param = torch.nn.Parameter(filled(numel, 1.0))
    source = filled(numel, factor, torch.bfloat16)  # the chain changes its gradient: restored
    param.grad = source.float()
    exp_avg, exp_avg_sq = filled(numel, 0.01), filled(numel, 0.01).square_()
    low = torch.zeros(numel, dtype=torch.bfloat16, device="cuda")
    options = dict(lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY)
    optimizer = torch.optim.AdamW([param], fused=True, **options)
    moments = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    optimizer.state[param] = {"step": torch.tensor(0.0, device="cuda"), **moments}
    inv_scale = torch.tensor(1 / factor, device="cuda")
    ranges = torch.tensor([[0, numel]])
    hyper = torch.tensor([[LR, *BETAS, EPS, WEIGHT_DECAY, 1.0]], dtype=torch.float64)
    steps = [torch.tensor(0.0, device="cuda")]

    def chain() -> None:
        if scaled:  # what GradScaler does with a fused optimizer
            found_inf = torch.zeros((), device="cuda")
            torch._amp_foreach_non_finite_check_and_unscale_([param.grad], found_inf, inv_scale)
            optimizer.found_inf = found_inf
        torch.nn.utils.clip_grad_norm_([param], MAX_NORM)
        optimizer.step()
        low.copy_(param.detach())

    def ours() -> None:
        squares, non_finite = ops.sumsq(param.grad).unbind()
        norm = squares.sqrt() / factor
        clip = (MAX_NORM / (norm + 1e-6)).clamp(max=1.0) / factor
        state = (param.detach(), param.grad, exp_avg, exp_avg_sq, low)
        found_inf = non_finite.float() if scaled else None
        ops.fused_adamw_(*state, ranges, hyper, steps, clip.float(), found_inf)

    peer = ("unscale, " if scaled else "") + "clip_grad_norm_, AdamW(fused), cast"
    return Case(4 + 30, ours, {peer: chain}, lambda: param.grad.copy_(source))


def pack_case(numel: int, to: torch.dtype, scale: float) -> Case:
    """bf16 gradients of some parameters into one buffer."""
    pieces = [piece.clone() for piece in filled(numel, 1.0, torch.bfloat16).chunk(PIECES)]
    offsets = [0]
    for piece in pieces[:-1]:
        offsets.append(offsets[-1] + piece.numel())
    out = torch.empty(sum(p.numel() for p in pieces), dtype=to, device="cuda")
    views = [out[o : o + p.numel()] for o, p in zip(offsets, pieces, strict=True)]

    def copy_and_scale() -> None:
        torch._foreach_copy_(views, pieces)
        out.mul_(scale)

    if to == torch.bfloat16 and scale == 1:
        peers = {"torch.cat(out=)": lambda: torch.cat(pieces, out=out)}
    else:
        peers = {"_foreach_copy_, mul_": copy_and_scale}
    size = 2 + out.element_size()
    return Case(size, lambda: ops.pack_(out, pieces, offsets, scale), peers)


def sumsq_case(numel: int, dtype: torch.dtype) -> Case:
    """The norm of a gradient; ours says besides whether all of it is finite."""
    x = filled(numel, 1.0, dtype)
    norm = torch.linalg.vector_norm
    peers = {"vector_norm in fp32": lambda: norm(x, dtype=torch.float32)}
    return Case(x.element_size(), lambda: ops.sumsq(x), peers)


def sum_shards_case(numel: int) -> Case:
    """Received bf16 shards into an fp32 gradient; a size counts the elements of all shards."""
    received = filled(numel // SHARDS * SHARDS, 1.0, torch.bfloat16).view(SHARDS, -1)
    shards = list(received)
    out = torch.empty(received.shape[1], device="cuda")

    def chain() -> None:
        out.copy_(shards[0])
        for shard in shards[1:]:
            out.add_(shard)

    peers = {
        "copy_, 7 add_": chain,
        "sum(0) of one buffer": lambda: torch.sum(received, 0, dtype=torch.float32, out=out),
    }
    return Case(2 + 4 / SHARDS, lambda: ops.sum_shards_(out, shards), peers)


class Entry(NamedTuple):
    """A case of the table."""

    kernel: str
    make: Callable[[int], Case]
    memory: int  # bytes an element that the buffers take, those of the copy included


CASES = [
    Entry("sumsq, fused_adamw_, unscaling", lambda n: adamw_case(n, scaled=True), 64),
    Entry("sumsq, fused_adamw_", lambda n: adamw_case(n, scaled=False), 64),
    Entry("pack_ bf16 to bf16", lambda n: pack_case(n, torch.bfloat16, 1.0), 12),
    Entry("pack_ bf16 to fp32, scaled", lambda n: pack_case(n, torch.float32, 0.125), 16),
    Entry("sumsq of fp32", lambda n: sumsq_case(n, torch.float32), 12),
    Entry("sumsq of bf16", lambda n: sumsq_case(n, torch.bfloat16), 8),
    Entry("sum_shards_, 8 bf16 to fp32", sum_shards_case, 12),
]


class Timer:
    """Times variants with cold caches."""

    def __init__(self, repeats: int) -> None:
        self._repeats = repeats
        cache = torch.cuda.get_device_properties().L2_cache_size
        self._other = torch.empty(max(4 * cache, 2**20), dtype=torch.uint8, device="cuda")

    def _flush(self, times: int) -> None:
        for _ in range(times):
            self._other.zero_()

    def measure(
        self, runs: dict[str, Run], prepare: Run, seconds: float
    ) -> tuple[dict[str, list[float]], dict[str, float]]:
        """Milliseconds on the device of each repeat, and microseconds on the host, by variant."""
        flushes, host = self._warm_up(runs, prepare)
        found: dict[str, list[float]] = {name: [] for name in runs}
        begin = time.perf_counter()
        for repeat in range(self._repeats):
            if repeat >= LEAST and time.perf_counter() - begin > seconds:
                break
            events = {}
            for name, run in runs.items():
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                prepare()
                self._flush(flushes)
                start.record()
                run()
                end.record()
                events[name] = (start, end)
            torch.cuda.synchronize()
            for name, (start, end) in events.items():
                found[name].append(start.elapsed_time(end))
        return found, host

    def _warm_up(self, runs: dict[str, Run], prepare: Run) -> tuple[int, dict[str, float]]:
        """How many flushes keep the GPU busy while the host launches a run, and what that takes."""
        host = {}
        for name, run in runs.items():
            took = []
            for _ in range(3):
                prepare()
                torch.cuda.synchronize()
                begin = time.perf_counter()
                run()
                took.append(time.perf_counter() - begin)
            host[name] = min(took) * 1e6
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flush(1)
        start.record()
        self._flush(1)
        end.record()
        torch.cuda.synchronize()
        flush = max(start.elapsed_time(end), 1e-3) * 1e3
        flushes = math.ceil(2 * max(host.values()) / flush)
        return max(1, min(MOST_FLUSHES, flushes)), host


def time_case(entry: Entry, numel: int, timer: Timer, seconds: float) -> Result:
    """Times one case at one size."""
    case = entry.make(numel)
    size = math.ceil(case.size * numel)
    source, target = (torch.zeros(size // 2, dtype=torch.uint8, device="cuda") for _ in range(2))
    runs = {"": case.ours, "copy_": lambda: target.copy_(source), **case.peers}
    times, host = timer.measure(runs, case.prepare, seconds)
    ms = {name: statistics.median(values) for name, values in times.items()}

    def over_ours(name: str) -> float:
        pairs = zip(times[name], times[""], strict=True)
        return statistics.median(theirs / ours for theirs, ours in pairs)

    return Result(
        entry.kernel,
        numel,
        len(times[""]),
        size / ms[""] / 1e6,
        over_ours("copy_"),
        {name: over_ours(name) for name in case.peers},
        ms,
        host,
    )


def describe(result: Result) -> str:
    """All figures of a result."""
    lines = [
        f"{result.kernel}, {result.numel:,} elements, {result.repeats} repeats: "
        f"{result.gb_per_s:.0f} GB/s, {result.of_copy:.2f} of copy_"
    ]
    for name, ms in result.ms.items():
        speed = f", ours is {result.speed[name]:.2f}x as fast" if name in result.speed else ""
        host = result.host_us[name]
        lines.append(f"    {name or 'ours'}: {ms:.4f} ms, launched in {host:.0f} us{speed}")
    return "\n".join(lines)


def table(results: list[Result]) -> str:
    """One row per kernel and peer, the sizes side by side."""
    sizes = sorted({r.numel for r in results})
    rows = list(dict.fromkeys((r.kernel, peer) for r in results for peer in r.speed))
    cells = {(r.kernel, peer, r.numel): (r, r.speed[peer]) for r in results for peer in r.speed}
    width = max((len(name) for name, _ in rows), default=0)
    peer_width = max((len(peer) for _, peer in rows), default=0)
    head = "".join(f" | {f'{size:.0e}':>4} GB/s  copy  speed" for size in sizes)
    lines = [f"{'':{width}} {'against':{peer_width}}{head}"]
    for kernel, peer in rows:
        text = f"{kernel:{width}} {peer:{peer_width}}"
        for size in sizes:
            if (kernel, peer, size) in cells:
                result, speed = cells[kernel, peer, size]
                text += f" | {result.gb_per_s:9.0f} {result.of_copy:5.2f} {speed:5.2f}x"
            else:
                text += f" | {'-':>9} {'-':>5} {'-':>6}"
        lines.append(text)
    lines.append("copy: GB/s in units of copy_ of as many bytes; speed: over the peer beside it")
    return "\n".join(lines)
