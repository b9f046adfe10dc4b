"""sumsq and sum_shards_ against torch, and what holds for every operator."""

import functools
import math
import os
import subprocess
import sys

import pytest
import torch
from op_cases import (
    FLOATS,
    State,
    assert_same_bits,
    composite,
    hyper,
    name_of,
    randn,
    step,
    tables,
)
from torch.library import opcheck

from zerocore import _C, ops


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("numel", [0, 1, 15, 16, 17, 31, 32, 33, 8191, 8192, 8193, 50_001])
def test_sumsq(isa, dtype, numel):
    x = randn(numel, dtype=dtype)
    expected = x.double().square().sum()
    for result in (ops.sumsq(x), composite("sumsq", x)):
        assert result.dtype == torch.float64 and result.shape == (2,)
        torch.testing.assert_close(result[0], expected, rtol=1e-13, atol=0)
        assert result[1] == 0


def test_sumsq_of_large_and_small_values_does_not_overflow(isa):
    for value in (1e30, 1e-30):
        result = ops.sumsq(torch.full((1000,), value))
        torch.testing.assert_close(result[0].item(), 1000 * value**2, rtol=1e-6, atol=0)
        assert result[1] == 0
    huge = ops.sumsq(torch.full((100,), 1e200, dtype=torch.float64))
    assert huge.tolist() == [math.inf, 0.0]  # the sum overflows, but every element is finite


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_sumsq_finds_one_non_finite_element_anywhere(isa, dtype):
    for bad in (math.inf, -math.inf, math.nan):
        for index in (0, 16, 33, 8191, 8192, 9000):
            x = randn(9001, dtype=dtype)
            x[index] = bad
            assert ops.sumsq(x)[1] == 1 and composite("sumsq", x)[1] == 1


def test_sumsq_bits_do_not_depend_on_threads(threads):
    x = randn(300_001)
    results = []
    for count in (1, 2, 3, 7):
        threads(count)
        results.append(ops.sumsq(x).tolist())
    assert all(r == results[0] for r in results)


def test_sumsq_of_strided_and_other_dtypes():
    x = randn(60, 70)
    assert_same_bits(ops.sumsq(x.t()), ops.sumsq(x.t().contiguous()))
    assert ops.sumsq(torch.tensor([3, 4])).tolist() == [25.0, 0.0]
    torch.testing.assert_close(ops.sumsq(torch.tensor([3 + 4j]))[0].item(), 25.0)
    with pytest.raises(ValueError, match="sumsq: expected x to be a strided tensor, got layout"):
        ops.sumsq(x.to_sparse())


def sum_reference(out, shards, accumulate):
    wide = torch.float64 if shards[0].dtype == torch.float64 else torch.float32
    total = functools.reduce(lambda a, b: a + b.to(wide), shards[1:], shards[0].to(wide))
    total = total.to(shards[0].dtype)
    both = torch.promote_types(torch.promote_types(out.dtype, total.dtype), torch.float32)
    return (out.to(both) + total.to(both) if accumulate else total).to(out.dtype)


@pytest.mark.parametrize("to", FLOATS, ids=name_of)
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_sum_shards(isa, dtype, to):
    for numel, count in [(0, 2), (1, 1), (16, 2), (17, 3), (1000, 2), (4099, 5)]:
        shards = [randn(numel, dtype=dtype, seed=i) for i in range(count)]
        for accumulate in (False, True):
            for call in (ops.sum_shards_, functools.partial(composite, "sum_shards_")):
                out = randn(numel, dtype=to, seed=99)
                expected = sum_reference(out, shards, accumulate)
                call(out, shards, accumulate)
                assert_same_bits(out, expected)


def test_sum_shards_sums_in_list_order(isa):
    shards = [torch.full((20,), value) for value in (1e8, -1e8, 1.0)]
    out = torch.empty(20)
    ops.sum_shards_(out, shards)
    assert (out == 1).all()
    ops.sum_shards_(out, [shards[2], shards[0], shards[1]])
    assert (out == 0).all()


def test_sum_shards_into_one_of_them(isa):
    for accumulate in (False, True):
        shards = [randn(5003, seed=i) for i in range(3)]
        expected = sum_reference(shards[1], shards, accumulate)
        ops.sum_shards_(shards[1], shards, accumulate)
        assert_same_bits(shards[1], expected)


def test_sum_shards_bits_do_not_depend_on_position_or_threads(isa, threads):
    shards = [randn(70_001, dtype=torch.bfloat16, seed=i) for i in range(3)]
    out = randn(70_001, seed=9)
    expected = sum_reference(out, shards, True)
    for start, stop in [(0, 70_001), (1, 60_000), (13, 14), (4095, 4113)]:
        for count in (1, 3):
            threads(count)
            part = out[start:stop].clone()
            ops.sum_shards_(part, [s[start:stop] for s in shards], True)
            assert_same_bits(part, expected[start:stop])


def test_sum_shards_of_other_dtypes_and_shapes():
    out = torch.zeros(2, 3, dtype=torch.int64)
    ops.sum_shards_(out, [torch.ones(6, dtype=torch.int64), torch.arange(6)])
    assert out.tolist() == [[1, 2, 3], [4, 5, 6]]


SUM_ERRORS = [
    (lambda: (torch.ones(9), []), r"expected at least one shard, got none"),
    (lambda: (torch.ones(9)[::2], [randn(5)]), r"expected out to be a contiguous tensor"),
    (
        lambda: (torch.ones(9), [randn(9), randn(8)]),
        r"expected shards\[1\] to have the 9 elements of out, got 8",
    ),
    (
        lambda: (torch.ones(9), [randn(9), randn(9).half()]),
        r"expected shards\[1\] of the dtype of shards\[0\] \(Float\), got Half",
    ),
    (
        lambda: (torch.ones(9).long(), [randn(9)]),
        r"expected shards\[0\] of a dtype that can be cast to out's \(Long\), got Float",
    ),
]


@pytest.mark.parametrize("case", range(len(SUM_ERRORS)))
def test_sum_shards_refuses_bad_arguments(case):
    make, message = SUM_ERRORS[case]
    with pytest.raises(ValueError, match="sum_shards_: " + message):
        ops.sum_shards_(*make())


def test_sum_shards_refuses_a_partial_overlap():
    memory = torch.ones(10)
    with pytest.raises(ValueError, match=r"expected shards\[1\] to be out itself or in other"):
        ops.sum_shards_(memory[:9], [randn(9), memory[1:]])


def test_composite_reaches_another_implementation():
    assert not torch._C._dispatch_has_kernel_for_dispatch_key("zerocore::sumsq", "XLA")
    assert torch._C._dispatch_has_kernel_for_dispatch_key(
        "zerocore::sumsq", "CompositeExplicitAutograd"
    )
    # Same values, another order of summation: only the kernel's is independent of the dtype.
    x = randn(10_000)
    close = torch.isclose(composite("sumsq", x)[0], ops.sumsq(x)[0], rtol=1e-12)
    assert close


def test_opcheck():
    state = State(40, grad=torch.bfloat16, low=torch.bfloat16)
    extras = (torch.tensor(0.5), torch.tensor(0.0))
    z = torch.ops.zerocore
    inputs = [randn(3, 5).t(), None, randn(4).half()]
    opcheck(z.pack_.default, (torch.ones(40), inputs, [1, 17, 20]))
    opcheck(z.pack_.default, (torch.ones(40), [randn(3, 5)], [1], 0.5))
    segments = [(0, 10, hyper(3)), (12, 40, hyper(1))]
    opcheck(z.fused_adamw_.default, (*state.clone(), *tables(segments), *extras))
    opcheck(z.fused_adamw_.default, (*State(40).clone(), *tables(segments)))
    opcheck(z.fused_adamw_.default, (*State(40).clone(), *tables([])))
    opcheck(z.sumsq.default, (randn(40),))
    opcheck(z.sumsq.default, (randn(5, 8).t(),))
    opcheck(z.sum_shards_.default, (torch.ones(40), [randn(40), randn(40, seed=1)], True))


def test_operators_run_on_meta_tensors():
    out = torch.empty(40, device="meta")
    assert ops.pack_(out, [None, torch.empty(4, 5, device="meta")], [0, 8]) is None
    assert ops.sumsq(out).shape == (2,) and ops.sumsq(out).device.type == "meta"


def digest():
    """Bits of every operator on one set of inputs, as text."""
    state = State(5003, grad=torch.bfloat16, low=torch.float16).tensors()
    step(state, [(1, 3000, hyper(3)), (3000, 5000, hyper(7, decoupled=False, betas=(0.1, 0.99)))])
    results = [t for t in state if t is not None]
    for dtype in FLOATS:
        x = randn(5003, dtype=dtype)
        results.append(ops.sumsq(x))
        for to in FLOATS:
            out = torch.empty(6000, dtype=to)
            ops.pack_(out, [x], [500], 1 / 3)
            ops.sum_shards_(out[500:5503], [x, x, x], True)
            results.append(out)
    return "".join(t.contiguous().view(torch.uint8).numpy().tobytes().hex() for t in results)


def test_bits_do_not_depend_on_the_instruction_set():
    before = _C.isa()
    try:
        digests = []
        for isa in _C.isas():
            _C.set_isa(isa)
            assert _C.isa() == isa
            digests.append(digest())
    finally:
        _C.set_isa(before)
    assert len(digests[0]) > 100_000 and len(set(digests)) == 1


def run_with_isa(isa):
    code = "import torch; from zerocore import ops, _C; ops.sumsq(torch.ones(3)); print(_C.isa())"
    env = {**os.environ, "ZEROCORE_ISA": isa}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)


def test_the_environment_chooses_the_instruction_set():
    result = run_with_isa("portable")
    assert result.stdout.strip() == "portable", result.stderr
    result = run_with_isa("")
    assert result.stdout.strip() == _C.isas()[-1], result.stderr
    result = run_with_isa("sse9")
    assert result.returncode == 1
    assert "expected portable, avx2 or avx512, got 'sse9'" in result.stderr
    with pytest.raises(ValueError, match="expected portable, avx2 or avx512, got 'x'"):
        _C.set_isa("x")


def test_torch_threads_are_used(threads):
    """The kernels run on as many threads as torch.set_num_threads says."""
    code = """if True:
        import os, torch
        from zerocore import ops
        tasks = lambda: len(os.listdir("/proc/self/task"))
        x = torch.ones(1 << 20)
        torch.set_num_threads(1)
        ops.sumsq(x)
        alone = tasks()
        torch.set_num_threads(3)
        ops.sumsq(x)
        print(tasks() - alone)
    """
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "2", result.stderr
