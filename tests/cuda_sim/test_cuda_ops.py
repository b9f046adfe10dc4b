"""The operators on simulated GPUs: the CPU's bits, from the CUDA kernels and not from ATen."""

import cuda_sim
import op_cases
import pytest
import torch

from zerocore import ops

LAYOUTS = {
    "whole": lambda dtype: op_cases.randn(37, 40, dtype=dtype),
    "transposed": lambda dtype: op_cases.randn(31, 50, dtype=dtype).t(),
    "strided": lambda dtype: op_cases.randn(999, dtype=dtype)[::3],
}


def pack(device, dtype, to, scale):
    inputs = [make(dtype).to(device) for make in LAYOUTS.values()]
    offsets = [1, 1700, 3301]  # unaligned, with gaps
    out = torch.full((4001,), 77).to(device, to)
    ops.pack_(out, [*inputs, None], [*offsets, 3900], scale)
    return [out]


def adamw(device, grad, low, skip):
    state = op_cases.State(5003, grad, low)
    ranges, hyper, steps = op_cases.tables(
        [(0, 1001, op_cases.hyper(3)), (1001, 5003, op_cases.hyper(7, weight_decay=0.0))]
    )
    tensors = [None if t is None else t.to(device) for t in state.tensors()]
    steps = [step.to(device) for step in steps]
    scale = torch.tensor(0.5, device=device)
    found_inf = torch.tensor(float(skip), device=device)
    ops.fused_adamw_(*tensors, ranges, hyper, steps, scale, found_inf)
    return [t for t in [*tensors, *steps] if t is not None]


def sum_shards(device, dtype, to, accumulate):
    shards = [op_cases.randn(3001, dtype=dtype, seed=seed).to(device) for seed in range(3)]
    out = op_cases.randn(3001, dtype=to, seed=9).to(device)
    ops.sum_shards_(out, shards, accumulate)
    return [out]


def sumsq(device, dtype, bad):
    x = op_cases.randn(100_003, dtype=dtype)
    if bad:
        x[77_777] = float("nan")
    return [ops.sumsq(x.to(device)), ops.sumsq(x.to(device)[1:])]  # the second is unaligned


def on_both(run, *args):
    """Results on the CPU and on the GPU, and the kernels of zerocore that were launched."""
    expected = run("cpu", *args)
    cuda_sim.reset_counters()
    actual = run("cuda", *args)
    torch.cuda.synchronize()
    return expected, actual, [k for k in cuda_sim.counters()["launches"] if "zerocore::" in k]


FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize("to", FLOATS[:3], ids=op_cases.name_of)
@pytest.mark.parametrize("dtype", FLOATS[:3], ids=op_cases.name_of)
def test_pack(gpus, dtype, to, scale):
    check(gpus, pack, dtype, to, scale)


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("low", [None, *FLOATS[1:3]], ids=op_cases.name_of)
@pytest.mark.parametrize("grad", FLOATS[:3], ids=op_cases.name_of)
def test_adamw(gpus, grad, low, skip):
    check(gpus, adamw, grad, low, skip)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("to", FLOATS[:3], ids=op_cases.name_of)
@pytest.mark.parametrize("dtype", FLOATS[:3], ids=op_cases.name_of)
def test_sum_shards(gpus, dtype, to, accumulate):
    check(gpus, sum_shards, dtype, to, accumulate)


def check(gpus, run, *args):
    expected, actual, launched = gpus(1, on_both, run, *args)[0]
    assert launched
    for a, e in zip(actual, expected, strict=True):
        op_cases.assert_same_bits(a, e)


@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize("dtype", FLOATS, ids=op_cases.name_of)
def test_sumsq(gpus, dtype, bad):
    expected, actual, launched = gpus(1, on_both, sumsq, dtype, bad)[0]
    assert launched
    for a, e in zip(actual, expected, strict=True):  # another order of summation, in float64
        assert a[1] == e[1] == float(bad)
        assert bad or abs(a[0] - e[0]) <= 1e-12 * e[0]
