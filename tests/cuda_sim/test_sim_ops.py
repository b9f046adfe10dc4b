"""The operators on simulated GPUs: the CPU's results, in one launch, without waiting."""

import math

import cuda_sim
import pytest
import torch
from op_cases import FLOATS, State, assert_same_bits, hyper, randn, tables
from test_ops_pack import RAW, STRIDED

from zerocore import ops


def on_gpu(tensor):
    """A copy with the same strides and the same place in its storage."""
    if tensor is None:
        return None
    memory = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage()).cuda()
    return memory.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def assert_same(gpu, cpu):
    for a, b in zip(gpu, cpu, strict=True):
        if b is not None:
            assert_same_bits(a.cpu(), b)


def launches(call):
    """Launches of zerocore's kernels by `call`, which may not wait for the GPU."""
    torch.cuda.synchronize()
    cuda_sim.reset_counters()
    call()
    counters = cuda_sim.counters()
    waits = [counters[name] for name in ("event_syncs", "stream_syncs", "device_syncs")]
    assert waits == [0, 0, 0]
    torch.cuda.synchronize()
    counts = cuda_sim.counters()["launches"]
    return sum(count for name, count in counts.items() if "zerocore::kernels" in name)


def check_pack(inputs, dtype, scale, expected_launches):
    offsets, end = [], 1
    for x in inputs:
        offsets.append(end)
        end += (11 if x is None else x.numel()) + 3
    out = torch.full((end + 5,), 77).to(dtype)
    out_gpu, inputs_gpu = out.cuda(), [on_gpu(x) for x in inputs]
    count = launches(lambda: ops.pack_(out_gpu, inputs_gpu, offsets, scale))
    assert count == expected_launches
    ops.pack_(out, inputs, offsets, scale)
    assert_same_bits(out_gpu.cpu(), out)


def pack():
    for dtype in FLOATS:
        inputs = [make(dtype) for make in STRIDED.values()]
        for to in FLOATS:
            check_pack([*inputs, None], to, 1.0, 1)
            check_pack(inputs, to, 1 / 3, 1)
    check_pack(
        [randn(40, dtype=dtype, seed=i) for i, dtype in enumerate(FLOATS)], FLOATS[1], 0.5, 1
    )
    for dtype in RAW:
        check_pack([make(dtype) for make in STRIDED.values()], dtype, 1.0, 1)
    check_pack([], torch.float32, 1.0, 1)
    check_pack([randn(9, dtype=torch.int64), randn(9)], torch.float32, 0.5, 0)  # torch's own
    check_pack([randn(1 + i % 7) for i in range(1000)], torch.bfloat16, 0.5, 17)


def check_adamw(state, segments, expected_launches=1, shared=False, **extra):
    ranges, rows, steps = tables(segments)
    if shared:
        steps = steps[:1] * len(steps)
    copies = {id(step): step.cuda() for step in steps}
    steps_gpu = [copies[id(step)] for step in steps]
    cpu, gpu = state.clone(), [on_gpu(t) for t in state.tensors()]
    extra_gpu = {name: value.cuda() for name, value in extra.items()}
    call = lambda: ops.fused_adamw_(*gpu, ranges, rows, steps_gpu, **extra_gpu)  # noqa: E731
    call_count = launches(call)
    assert call_count == expected_launches
    ops.fused_adamw_(*cpu, ranges, rows, steps, **extra)
    assert_same(gpu, cpu)
    assert_same(steps_gpu, steps)


def adamw():
    segments = [
        (3, 50, hyper(1, weight_decay=0.0)),
        (50, 50, hyper(9)),
        (64, 9001, hyper(70_000, lr=0.3, betas=(0.2, 0.7), decoupled=False)),
        (9990, 9999, hyper(2, eps=0.1)),
    ]
    scale = {"grad_scale": torch.tensor([0.3])}
    for grad in FLOATS[:3]:
        for low in (None, *FLOATS[1:3]):
            check_adamw(State(10_000, grad, low), segments, **scale)
    state = State(10_000, torch.float16, torch.bfloat16)
    check_adamw(state, segments, shared=True)
    for flag in (0.0, 1.0, math.nan):
        check_adamw(state, segments, found_inf=torch.tensor(flag))
    many = [(5 * i, 5 * i + 4, hyper(1 + i % 3)) for i in range(500)]
    check_adamw(state, many, 11, **scale)
    check_adamw(state, many, 11, shared=True)
    check_adamw(state, [], 0)


def sums():
    for dtype in FLOATS:
        for numel in (0, 1, 17, 8193, 100_001):
            x = randn(numel, dtype=dtype)
            x_gpu, results = x.cuda(), []
            assert launches(lambda g=x_gpu, r=results: r.append(ops.sumsq(g))) == 1
            expected = ops.sumsq(x)
            torch.testing.assert_close(results[0].cpu(), expected, rtol=1e-15, atol=0)
            if numel:
                x_gpu[numel // 2] = math.inf
                assert ops.sumsq(x_gpu)[1] == 1
    x = randn(60, 70)
    assert_same_bits(ops.sumsq(on_gpu(x.t())).cpu(), ops.sumsq(x.t().contiguous().cuda()).cpu())
    assert ops.sumsq(torch.tensor([3, 4]).cuda()).tolist() == [25.0, 0.0]


def shards():
    for dtype in FLOATS:
        for to in FLOATS:
            for count, accumulate in ((1, False), (2, True), (64, False)):
                cpu = [randn(4099, dtype=dtype, seed=i)[i % 3 :][:4000] for i in range(count)]
                gpu = [on_gpu(shard) for shard in cpu]
                out = randn(4000, dtype=to, seed=99)
                out_gpu = out.cuda()
                call = lambda o=out_gpu, g=gpu, a=accumulate: ops.sum_shards_(o, g, a)  # noqa: E731
                assert launches(call) == 1
                ops.sum_shards_(out, cpu, accumulate)
                assert_same_bits(out_gpu.cpu(), out)
    cpu = [randn(50, dtype=torch.bfloat16, seed=i) for i in range(500)]  # torch's own
    gpu = [shard.cuda() for shard in cpu]
    ops.sum_shards_(gpu[3], gpu)
    ops.sum_shards_(cpu[3], cpu)
    assert_same_bits(gpu[3].cpu(), cpu[3])


def streams():
    """Steps on several streams at once each advance their own counts."""
    state = State(5000, torch.bfloat16, torch.bfloat16)
    expected = state.clone()
    ranges, rows, steps = tables([(0, 5000, hyper(3))])
    ops.fused_adamw_(*expected, ranges, rows, steps)
    runs = []
    for _ in range(4):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            tensors, count = [t.cuda() for t in state.tensors()], [torch.tensor(2.0).cuda()]
            for _ in range(2):  # the stream's counter of blocks is zero again
                total = ops.sumsq(tensors[1])
            ops.fused_adamw_(*tensors, ranges, rows, count)
            runs.append((tensors, count, total))
    torch.cuda.synchronize()
    for tensors, count, total in runs:
        assert_same(tensors, expected)
        assert_same(count, steps)
        torch.testing.assert_close(total.cpu(), ops.sumsq(state.grad), rtol=1e-15, atol=0)


def other_dtypes():
    state = State(500, torch.float64, dtype=torch.float64)
    ranges, rows, steps = tables([(3, 400, hyper(5))])
    cpu, gpu = state.clone(), [on_gpu(t) for t in state.tensors()]
    ops.fused_adamw_(*cpu, ranges, rows, steps)
    count = [torch.tensor(4.0).cuda()]
    ops.fused_adamw_(*gpu, ranges, rows, count)
    assert_same(gpu, cpu)
    assert count[0].item() == 5


def errors():
    with pytest.raises(ValueError, match=r"expected inputs\[0\] on the device of out \(cuda:0\)"):
        ops.pack_(torch.ones(9).cuda(), [torch.ones(3)], [0])
    with pytest.raises(ValueError, match=r"expected shards\[1\] on the device of out"):
        ops.sum_shards_(torch.ones(9).cuda(), [torch.ones(9).cuda(), torch.ones(9)])
    ranges, rows, steps = tables([(0, 100, hyper(3))])
    gpu = [on_gpu(t) for t in State(100).tensors()]
    with pytest.raises(ValueError, match=r"expected steps\[0\] on the device of param \(cuda:0\)"):
        ops.fused_adamw_(*gpu, ranges, rows, steps)


CASES = [pack, adamw, sums, shards, streams, other_dtypes, errors]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_operators(both_gpus, case):
    both_gpus(1, case)
