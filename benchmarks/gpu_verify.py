"""The kernels on a GPU against the CPU kernels, bit for bit, and against float64.

A check is a function that raises AssertionError for a wrong result and Dropped for what this GPU
cannot do; `checks` lists all. Sizes are odd and views unaligned throughout.
"""

import functools
import math
from collections.abc import Callable, Sequence

import torch
from gpu_report import Dropped
from op_cases import FLOATS, State, assert_same_bits, hyper, name_of, randn, tables
from torch import Tensor

from zerocore import ops

NARROW = FLOATS[1:3]
EPS32 = torch.finfo(torch.float32).eps
BEYOND = 2**31 + 5  # elements: indices of 32 bits are too short

LAYOUTS = {
    "contiguous": lambda dtype: randn(37, 41, dtype=dtype),
    "transposed": lambda dtype: randn(131, 67, dtype=dtype).t(),
    "channels_last": lambda dtype: randn(4, 6, 3, 5, dtype=dtype).to(
        memory_format=torch.channels_last
    ),
    "rows_of_a_wider_matrix": lambda dtype: randn(9, 401, dtype=dtype)[:, 3:300],
    "every_third": lambda dtype: randn(5000, dtype=dtype)[::3],
    "expanded": lambda dtype: randn(1, 7, 1, dtype=dtype).expand(4, 7, 5),
    "unaligned": lambda dtype: randn(8197, dtype=dtype)[1:],
    "scalar": lambda dtype: randn(dtype=dtype),
    "empty": lambda dtype: randn(0, 3, dtype=dtype),
}


def on_gpu(tensor: Tensor) -> Tensor:
    """A copy with the same strides and the same place in its storage, so as unaligned as that."""
    memory = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage()).cuda()
    return memory.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def assert_same(gpu: Sequence[Tensor | None], cpu: Sequence[Tensor | None]) -> None:
    for a, b in zip(gpu, cpu, strict=True):
        if b is not None:
            assert_same_bits(a.cpu(), b)


def assert_within(actual: Tensor, exact: Tensor, allowed: Tensor) -> None:
    """|actual - exact| is at most `allowed`, in float64, plus what rounding to its dtype takes."""
    info = torch.finfo(actual.dtype)
    # The last term is the step of subnormal numbers.
    rounding = exact.abs() * info.eps / 2 * 1.01 + info.smallest_normal * info.eps
    worst = ((actual.cpu().double() - exact).abs() / (allowed + rounding)).max()
    assert worst <= 1, f"expected an error within its bound, got {worst:.2f} times the bound"


def check_pack(dtype: torch.dtype, to: torch.dtype, scale: float) -> None:
    inputs = [make(dtype) for make in LAYOUTS.values()]
    inputs = [*inputs, None, *(randn(1 + i % 7, dtype=dtype, seed=i) for i in range(200))]
    offsets, end = [], 1
    for x in inputs:
        offsets.append(end)
        end += (11 if x is None else x.numel()) + 3
    for start in (0, 1):
        cpu = torch.full((end + 5,), 77).to(to)[start:]
        gpu = on_gpu(cpu)
        ops.pack_(cpu, inputs, offsets, scale)
        ops.pack_(gpu, [None if x is None else on_gpu(x) for x in inputs], offsets, scale)
        assert_same_bits(gpu.cpu(), cpu)
        if to.is_floating_point:
            exact = torch.zeros(cpu.numel(), dtype=torch.float64)
            for x, offset in zip(inputs, offsets, strict=True):
                if x is not None:
                    exact[offset : offset + x.numel()] = x.double().reshape(-1) * scale
            assert_within(gpu, exact, exact.abs() * EPS32)


def check_raw_pack() -> None:
    for dtype in (torch.uint8, torch.int32, torch.int64, torch.bool, torch.complex64):
        check_pack(dtype, dtype, 1.0)


def check_sumsq(dtype: torch.dtype) -> None:
    for numel in (0, 1, 17, 8193, 100_003, 3_000_001):
        for start in (0, 1):
            cpu = randn(numel + 1, dtype=dtype)[start : start + numel]
            gpu = on_gpu(cpu)
            result, exact = ops.sumsq(gpu).cpu(), cpu.double().square().sum()
            assert result[1] == 0
            torch.testing.assert_close(result[0], exact, rtol=1e-12, atol=0)
            torch.testing.assert_close(ops.sumsq(cpu), result, rtol=1e-12, atol=0)
            assert_same_bits(ops.sumsq(gpu).cpu(), result)
            for bad in (math.inf, math.nan) if numel else ():
                gpu[numel // 2] = bad
                assert ops.sumsq(gpu)[1] == 1


def check_sum_shards(dtype: torch.dtype, to: torch.dtype) -> None:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for numel, count in ((1, 1), (4001, 3), (60_013, 8), (1001, 64)):
        for accumulate in (False, True):
            shards = [randn(numel + 3, dtype=dtype, seed=i)[i % 3 :][:numel] for i in range(count)]
            out = randn(numel + 1, dtype=to, seed=99)[1:]
            before, gpu = out.to(torch.float64, copy=True), on_gpu(out)
            ops.sum_shards_(gpu, [on_gpu(shard) for shard in shards], accumulate)
            ops.sum_shards_(out, shards, accumulate)
            assert_same_bits(gpu.cpu(), out)
            stack = torch.stack([shard.double() for shard in shards])
            total, sizes = stack.sum(0), stack.abs().sum(0)
            # Roundings: of each addition, of the sum to the shards' dtype, of adding `out`.
            allowed = sizes * count * torch.finfo(wide).eps + total.abs() * torch.finfo(dtype).eps
            if accumulate:
                total = total + before
                allowed = allowed + (total.abs() + before.abs()) * EPS32
            assert_within(gpu, total, allowed)


SEGMENTS = [
    (3, 50, hyper(1, weight_decay=0.0)),
    (50, 50, hyper(9)),
    (64, 9001, hyper(70_000, lr=0.3, betas=(0.2, 0.7), decoupled=False)),
    (9001, 70_001, hyper(1000)),
    (70_003, 70_010, hyper(2, eps=0.1)),
]
SCALE = 0.3


def exact_adamw(before: list[Tensor], segments: list, scale: float) -> list[tuple[Tensor, Tensor]]:
    """New param, exp_avg and exp_avg_sq in float64, each with the error that fp32 may make."""
    p, g, m, v = (t.double() for t in before)
    steps = 8 * EPS32  # some roundings of everything that goes into a value
    errors = [torch.zeros_like(p) for _ in range(3)]
    for start, stop, (taken, (lr, beta1, beta2, eps, decay, decoupled)) in segments:
        part = slice(start, stop)
        t, old = taken + 1, p[part].clone()
        grad = g[part] * scale
        size = grad.abs() + (0 if decoupled else decay * old.abs())  # before it cancels
        if not decoupled:
            grad = grad + decay * old
        size_m = beta1 * m[part].abs() + (1 - beta1) * size
        size_v = beta2 * v[part] + (1 - beta2) * size.square()
        m[part] = beta1 * m[part] + (1 - beta1) * grad
        v[part] = beta2 * v[part] + (1 - beta2) * grad.square()
        rate = lr / (1 - beta1**t) / ((v[part] / (1 - beta2**t)).sqrt() + eps)
        p[part] = old * (1 - lr * decay * decoupled) - rate * m[part]
        errors[0][part] = steps * (old.abs() + rate * size_m * size_v / v[part])
        errors[1][part], errors[2][part] = steps * size_m, steps * size_v
    return list(zip((p, m, v), errors, strict=True))


def counts_of(segments: list, device: str, distinct: int | None = None) -> list[Tensor]:
    """Counts of steps of the segments, which share `distinct` of them in turn."""
    counts = [count.to(device) for count in tables(segments)[2]]
    return [counts[i % distinct] if distinct else count for i, count in enumerate(counts)]


def run_adamw(tensors: list, segments: list, counts: list[Tensor], **extra: float) -> None:
    """One step, in place."""
    ranges, rows, _ = tables(segments)
    device = tensors[0].device
    on_device = {name: torch.tensor(value, device=device) for name, value in extra.items()}
    ops.fused_adamw_(*tensors, ranges, rows, counts, **on_device)


def check_adamw(grad: torch.dtype, low: torch.dtype | None) -> None:
    state = State(70_020, grad, low)
    for start in (0, 1):
        cpu = [None if t is None else t.clone()[start:] for t in state.tensors()]
        gpu = [None if t is None else on_gpu(t) for t in cpu]
        before = [t.clone() for t in cpu[:4]]
        counts, counts_gpu = (counts_of(SEGMENTS, device) for device in ("cpu", "cuda"))
        run_adamw(cpu, SEGMENTS, counts, grad_scale=SCALE)
        run_adamw(gpu, SEGMENTS, counts_gpu, grad_scale=SCALE)
        assert_same([*gpu, *counts_gpu], [*cpu, *counts])
        exact = exact_adamw(before, SEGMENTS, torch.tensor(SCALE).item())
        for actual, (value, allowed) in zip((gpu[0], *gpu[2:4]), exact, strict=True):
            assert_within(actual, value, allowed)
        assert (gpu[0].cpu() != before[0])[64:70_001].double().mean() > 0.9  # it has moved


def check_adamw_skips() -> None:
    state = State(70_020, torch.float16, torch.bfloat16)
    for flag in (0.0, 1.0, math.inf, math.nan):
        cpu, gpu = state.clone(), [on_gpu(t) for t in state.tensors()]
        counts, counts_gpu = (counts_of(SEGMENTS, device) for device in ("cpu", "cuda"))
        run_adamw(cpu, SEGMENTS, counts, found_inf=flag)
        run_adamw(gpu, SEGMENTS, counts_gpu, found_inf=flag)
        assert_same([*gpu, *counts_gpu], [*cpu, *counts])
        if flag != 0:
            assert_same([*gpu, *counts_gpu], [*state.tensors(), *counts_of(SEGMENTS, "cpu")])


def check_adamw_counts() -> None:
    """500 segments take more than one launch; a count that they share counts once a step."""
    many = [(5 * i, 5 * i + 4, hyper(1 + i % 3)) for i in range(500)]
    state = State(2503, torch.bfloat16, torch.bfloat16)
    for distinct in (None, 2):
        cpu, gpu = state.clone(), [on_gpu(t) for t in state.tensors()]
        counts, counts_gpu = (counts_of(many, device, distinct) for device in ("cpu", "cuda"))
        for _ in range(3):
            run_adamw(cpu, many, counts)
            run_adamw(gpu, many, counts_gpu)
        assert_same([*gpu, *counts_gpu], [*cpu, *counts])
        assert counts_gpu[1].item() == 1 + 3


def drawn(numel: int, scale: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers, drawn on the GPU."""
    return torch.empty(numel, dtype=dtype, device="cuda").normal_(0, scale)


def drawn_state(numel: int) -> list[Tensor]:
    """Parameters, bf16 gradients, moments and a bf16 copy."""
    param, grad, exp_avg = drawn(numel, 3), drawn(numel, 3, torch.bfloat16), drawn(numel, 0.3)
    return [param, grad, exp_avg, drawn(numel, 0.3).square_(), torch.zeros_like(grad)]


def check_large(numel: int) -> None:
    """Sizes at which every block of a grid takes several turns."""
    numel += 13
    gpu = drawn_state(numel)
    cpu = [t.cpu() for t in gpu]
    segments = [(1, numel // 3, hyper(3)), (numel // 3, numel, hyper(7, weight_decay=0.0))]
    for tensors, device in ((cpu, "cpu"), (gpu, "cuda")):
        run_adamw(tensors, segments, counts_of(segments, device), grad_scale=SCALE)
    assert_same(gpu, cpu)
    torch.testing.assert_close(ops.sumsq(gpu[0]).cpu(), ops.sumsq(cpu[0]), rtol=1e-12, atol=0)
    outs = [torch.empty(numel, dtype=torch.bfloat16, device=device) for device in ("cpu", "cuda")]
    for (param, grad, exp_avg, exp_avg_sq, _), out in zip((cpu, gpu), outs, strict=True):
        half, rows = numel // 2, (numel - numel // 2 - 5) // 2
        square = exp_avg[: 2 * rows].view(2, rows).t()
        ops.pack_(out, [param[1:half], square], [3, half + 5], SCALE)
        ops.sum_shards_(exp_avg_sq, [grad, out], accumulate=True)
    assert_same([outs[1], gpu[3]], [outs[0], cpu[3]])


def check_streams(numel: int) -> None:
    """Launches that run at the same time have counters of finished blocks of their own."""
    segments, count, rounds = [(0, numel, hyper(3))], 4, 4
    state = drawn_state(numel)
    inputs = [drawn(numel + i, 1) for i in range(count)]
    alone, counts = [t.clone() for t in state], counts_of(segments, "cuda")
    expected = [ops.sumsq(x) for x in inputs]
    for _ in range(rounds):
        run_adamw(alone, segments, counts)
    copies = [[t.clone() for t in state] for _ in inputs]
    copies_counts = [counts_of(segments, "cuda") for _ in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    sums: list[list[Tensor]] = [[] for _ in inputs]
    torch.cuda.synchronize()
    for _ in range(rounds):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                sums[i] += [ops.sumsq(inputs[i]) for _ in range(4)]
                run_adamw(copies[i], segments, copies_counts[i])
    torch.cuda.synchronize()
    for i, right in enumerate(expected):
        for total in sums[i]:
            assert torch.equal(total, right)
        for a, b in zip([*copies[i], *copies_counts[i]], [*alone, *counts], strict=True):
            assert torch.equal(a, b)


def check_graph() -> None:
    """What a CUDA graph recorded gives the same when it is replayed."""
    x, out = randn(1_000_003).cuda(), torch.empty(1_000_003, device="cuda", dtype=torch.bfloat16)
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            x.add_(1.0)
    except RuntimeError as error:
        torch.cuda.synchronize()
        raise Dropped(f"CUDA graphs do not work here: {str(error).splitlines()[0]}") from error
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        total = ops.sumsq(x)
        ops.pack_(out, [x], [0], 0.5)
    for _ in range(3):
        x.mul_(-0.5)
        graph.replay()
        assert_same_bits(total.cpu(), ops.sumsq(x).cpu())
        assert_same_bits(out, (x * 0.5).bfloat16())


def room_for(bytes_: float) -> None:
    free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
    free -= torch.cuda.memory_allocated()
    if bytes_ * 1.05 > free:
        raise Dropped(f"needs {bytes_ / 2**30:.0f} GiB of GPU memory, {free / 2**30:.0f} are free")


def check_beyond_32_bits() -> None:
    """Elements past index 2^31 are read, summed, packed and written."""
    room_for(BEYOND * 5)
    x = torch.ones(BEYOND, dtype=torch.bfloat16, device="cuda")
    x[-1] = 3
    assert ops.sumsq(x).tolist() == [BEYOND - 1 + 9, 0]
    out = torch.empty_like(x)
    ops.pack_(out, [x[:-7], x[-3:]], [2, BEYOND - 3], 2.0)
    assert out[:3].tolist() == [0, 0, 2] and out[-6:].tolist() == [2, 0, 0, 2, 2, 6]
    assert ops.sumsq(out)[0] == 4 * (BEYOND - 7 + 2 + 9)
    ops.sum_shards_(out, [x, x, x])
    assert out[-2:].tolist() == [3, 9] and ops.sumsq(out)[0] == 9 * (BEYOND - 1 + 9)


def check_adamw_beyond_32_bits() -> None:
    room_for(BEYOND * 19)
    cpu = [torch.full((8,), value) for value in (1.5, 0.25, 0.1, 0.02)]
    cpu.append(torch.zeros(8, dtype=torch.bfloat16))
    gpu = [torch.full((BEYOND,), t[0].item(), dtype=t.dtype, device="cuda") for t in cpu]
    narrow, wide = [(0, 8, hyper(3))], [(0, 1001, hyper(3)), (1001, BEYOND, hyper(3))]
    run_adamw(cpu, narrow, counts_of(narrow, "cpu"))
    run_adamw(gpu, wide, counts_of(wide, "cuda"))
    for many, right in zip(gpu, cpu, strict=True):
        assert_same_bits(many[-8:].cpu(), right)
        for part in many.split(2**28):
            assert (part == right[0].item()).all()


def checks(numel: int) -> list[tuple[str, Callable[[], None]]]:
    """All checks by name; `numel` elements where it should be many."""
    run = functools.partial
    found = []
    for dtype in FLOATS:
        found.append((f"sumsq of {name_of(dtype)}", run(check_sumsq, dtype)))
    for grad in FLOATS[:3]:
        for low in (None, *NARROW):
            name = f"fused_adamw_ of {name_of(grad)} gradients, copy {name_of(low)}"
            found.append((name, run(check_adamw, grad, low)))
    found.append(("fused_adamw_ skips for found_inf", check_adamw_skips))
    found.append(("fused_adamw_ of 500 segments counts steps", check_adamw_counts))
    for dtype in FLOATS:
        for to in FLOATS:
            pair = f"{name_of(dtype)} to {name_of(to)}"
            found.append((f"sum_shards_ {pair}", run(check_sum_shards, dtype, to)))
            for scale in (1.0, 1 / 3):
                name = f"pack_ {pair}, scale {scale:.2g}"
                found.append((name, run(check_pack, dtype, to, scale)))
    found.append(("pack_ of other dtypes", check_raw_pack))
    found.append((f"all kernels on {numel:,} elements", run(check_large, numel)))
    found.append(("several streams at once", run(check_streams, numel)))
    found.append(("CUDA graphs", check_graph))
    found.append(("more than 2^31 elements", check_beyond_32_bits))
    found.append(("fused_adamw_ of more than 2^31 elements", check_adamw_beyond_32_bits))
    return found
