"""The operators against one-line torch references, on every instruction set of this machine."""

import functools
import math
import os
import subprocess
import sys

import pytest
import torch
from torch.library import opcheck

from zerocore import _C, ops

FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
RAW = [torch.uint8, torch.int32, torch.int64, torch.bool, torch.complex64, torch.complex128]


def name_of(value):
    return str(value).removeprefix("torch.")


@pytest.fixture(params=_C.isas())
def isa(request):
    before = _C.isa()
    _C.set_isa(request.param)
    yield request.param
    _C.set_isa(before)


@pytest.fixture
def threads():
    """`threads(n)` sets torch's thread count for the rest of the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def randn(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    return values.gt(0) if dtype == torch.bool else (values * 3).to(dtype)


def assert_same_bits(actual, expected):
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
    assert actual.tolist().__repr__() == expected.tolist().__repr__()  # also the sign of zeros


def composite(op, *args):
    """Call the implementation for devices without kernels, on CPU tensors."""
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.XLA)
    return getattr(torch.ops.zerocore, op).default.redispatch(key, *args)


def test_composite_reaches_another_implementation():
    assert not torch._C._dispatch_has_kernel_for_dispatch_key("zerocore::sumsq", "XLA")
    assert torch._C._dispatch_has_kernel_for_dispatch_key(
        "zerocore::sumsq", "CompositeExplicitAutograd"
    )
    # Same values, another order of summation: only the kernel's is independent of the dtype.
    x = randn(10_000)
    close = torch.isclose(composite("sumsq", x)[0], ops.sumsq(x)[0], rtol=1e-12)
    assert close


# pack_ --------------------------------------------------------------------------------------------

STRIDED = {
    "contiguous": lambda dtype: randn(7, 5, dtype=dtype),
    "transposed": lambda dtype: randn(33, 21, dtype=dtype).t(),
    "many_columns": lambda dtype: randn(300, 150, dtype=dtype).t(),
    "batch_transposed": lambda dtype: randn(3, 270, 67, dtype=dtype).transpose(1, 2),
    "channels_last": lambda dtype: randn(4, 6, 3, 5, dtype=dtype).to(
        memory_format=torch.channels_last
    ),
    "reversed_dims": lambda dtype: randn(3, 4, 5, 6, dtype=dtype).permute(3, 2, 1, 0),
    "long_rows": lambda dtype: randn(9, 400, dtype=dtype)[:, 3:300],
    "short_rows": lambda dtype: randn(200, 12, dtype=dtype)[:, 1:6],
    "step": lambda dtype: randn(5000, dtype=dtype)[::3],
    "expanded": lambda dtype: randn(1, 7, 1, dtype=dtype).expand(4, 7, 5),
    "ones": lambda dtype: randn(1, 9, 1, 4, dtype=dtype).transpose(0, 2),
    "scalar": lambda dtype: randn(dtype=dtype),
    "empty": lambda dtype: randn(0, 3, dtype=dtype),
}


def pack_reference(numel, inputs, offsets, scale, dtype):
    """Each input times scale in fp32 or f64, cast, at its offset; zeros elsewhere."""
    out = torch.zeros(numel, dtype=dtype)
    for x, offset in zip(inputs, offsets, strict=True):
        if x is None:
            continue
        if scale != 1:
            x = x.to(torch.float64 if torch.float64 in (x.dtype, dtype) else torch.float32) * scale
        out[offset : offset + x.numel()] = x.to(dtype).reshape(-1)
    return out


def check_pack(inputs, dtype, scale=1.0, gap=3):
    """Pack with gaps between inputs, from an offset of 1 on, into memory full of rubbish."""
    offsets, end = [], 1
    for x in inputs:
        offsets.append(end)
        end += (11 if x is None else x.numel()) + gap
    out = torch.full((end + 5,), 77).to(dtype)
    ops.pack_(out, inputs, offsets, scale)
    assert_same_bits(out, pack_reference(out.numel(), inputs, offsets, scale, dtype))
    out.fill_(77)
    composite("pack_", out, inputs, offsets, scale)
    assert_same_bits(out, pack_reference(out.numel(), inputs, offsets, scale, dtype))


@pytest.mark.parametrize("to", FLOATS, ids=name_of)
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_pack_casts_and_scales_every_layout(isa, dtype, to):
    inputs = [make(dtype) for make in STRIDED.values()]
    for scale in (1.0, 1 / 3):
        check_pack(inputs, to, scale)


@pytest.mark.parametrize("dtype", RAW, ids=name_of)
def test_pack_copies_any_dtype(dtype):
    check_pack([make(dtype) for make in STRIDED.values()], dtype)


def test_pack_leaves_zeros_for_none_and_in_gaps():
    check_pack([None, randn(5), None, None, randn(300, 3).t(), None], torch.float32)
    check_pack([], torch.float32)
    out = torch.ones(7)
    ops.pack_(out, [None], [7])
    assert_same_bits(out, torch.zeros(7))


def test_pack_mixes_dtypes(isa):
    inputs = [randn(50, dtype=dtype, seed=i) for i, dtype in enumerate(FLOATS)]
    for to in FLOATS:
        check_pack(inputs, to, 0.125)
    check_pack([randn(9, dtype=torch.int64), randn(9)], torch.float32, 0.5)
    check_pack([randn(9, dtype=torch.int32)], torch.complex64)


@pytest.mark.parametrize("to", FLOATS, ids=name_of)
def test_pack_rounds_special_values_as_torch_does(isa, to):
    edges = [0.0, -0.0, math.inf, -math.inf, 65504.0, 65519.9, 65520.0, 2.0**-14, 2.0**-24]
    edges += [2.0**-25, 1.5 * 2.0**-24, 2.0**-126, 2.0**-133, 2.0**-149, 3.3961e38, 1e39, 1e-310]
    edges += [1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-11, 1 + 3 * 2.0**-11, -1 - 2.0**-9]
    for dtype in FLOATS:
        check_pack([torch.tensor(edges, dtype=torch.float64).to(dtype)], to)
        check_pack([torch.tensor(edges, dtype=torch.float64).to(dtype)], to, 0.5)
        out = torch.zeros(3, dtype=to)
        ops.pack_(out, [torch.tensor([math.nan, -math.nan], dtype=dtype)], [1], 0.5)
        assert out.isnan().tolist() == [False, True, True]


def test_pack_converts_every_16_bit_value(isa):
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    for dtype in (torch.bfloat16, torch.float16):
        values = bits.view(dtype)
        values = values[~values.isnan()]
        check_pack([values], torch.float32)
        check_pack([values], torch.float64)
        check_pack([values], torch.float16 if dtype == torch.bfloat16 else torch.bfloat16)


def test_pack_rounds_random_bit_patterns_as_torch_does(isa):
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(-(2**31), 2**31, (200_000,), generator=generator).to(torch.int32)
    values = bits.view(torch.float32)
    values = values[~values.isnan()]
    check_pack([values], torch.bfloat16)
    check_pack([values], torch.float16)


def test_pack_is_independent_of_threads_and_position(threads):
    inputs = [randn(n, m, seed=n).t() for n, m in [(300, 401), (1, 70_001), (5000, 13), (3, 5)]]
    offsets = [5, 130_000, 200_017, 270_000]
    results = []
    for count in (1, 2, 3, 5):
        threads(count)
        out = torch.ones(280_001, dtype=torch.bfloat16)
        ops.pack_(out, inputs, offsets, 0.3)
        results.append(out)
    for out in results:
        assert_same_bits(out, pack_reference(280_001, inputs, offsets, 0.3, torch.bfloat16))


PACK_ERRORS = [
    (lambda: (torch.ones(2, 3), [], []), r"expected out to be 1-D, got shape \[2, 3\]"),
    (lambda: (torch.ones(9)[::2], [], []), r"expected out to be a contiguous tensor, got shape"),
    (lambda: (torch.ones(9), [None], []), r"expected one offset per input \(1\), got 0"),
    (
        lambda: (torch.ones(9), [randn(3), randn(3)], [0, 2]),
        r"expected offsets\[1\] to be at least 3 .*, got 2",
    ),
    (lambda: (torch.ones(9), [None, None], [5, 2]), r"expected offsets\[1\] to be at least 5"),
    (lambda: (torch.ones(9), [randn(3)], [-1]), r"expected offsets\[0\] to be at least 0.*got -1"),
    (
        lambda: (torch.ones(9), [randn(3)], [7]),
        r"expected inputs\[0\] to end inside out \(9 elements\), got elements \[7, 10\)",
    ),
    (lambda: (torch.ones(9), [None], [10]), r"expected offsets inside out \(9 elements\), got 10"),
    (
        lambda: (torch.ones(9, dtype=torch.int32), [randn(3)], [0]),
        r"expected inputs\[0\] of a dtype that can be cast to out's \(Int\), got Float",
    ),
    (
        lambda: (torch.ones(9, dtype=torch.int32), [randn(3, dtype=torch.int32)], [0], 0.5),
        r"expected a floating point out for scale 0.5, got Int",
    ),
    (
        lambda: (torch.ones(9), [randn(3).to_sparse()], [0]),
        r"expected inputs\[0\] to be a strided tensor, got layout Sparse",
    ),
]


@pytest.mark.parametrize("case", range(len(PACK_ERRORS)))
def test_pack_refuses_bad_arguments(case):
    make, message = PACK_ERRORS[case]
    with pytest.raises(ValueError, match="pack_: " + message):
        ops.pack_(*make())


def test_pack_refuses_an_input_inside_out():
    out = torch.ones(9)
    with pytest.raises(ValueError, match=r"expected inputs\[0\] in other memory than out"):
        ops.pack_(out, [out[2:5]], [0])


# fused_adamw_ -------------------------------------------------------------------------------------

LR, BETAS, EPS = 1e-2, (0.9, 0.999), 1e-8


def hyper(step, lr=LR, betas=BETAS, eps=EPS, weight_decay=0.1, decoupled=True):
    corrections = [1 - beta**step for beta in betas]
    return [lr, *betas, eps, weight_decay, *corrections, float(decoupled)]


def tables(segments):
    """Tensors `ranges` and `hyper` from a list of (start, stop, row)."""
    ranges = torch.tensor([s[:2] for s in segments], dtype=torch.int64).reshape(-1, 2)
    rows = torch.tensor([s[2] for s in segments], dtype=torch.float64).reshape(-1, 8)
    return ranges, rows


class State:
    """Parameter, moments and gradient of a flat shard, in the middle of a training."""

    def __init__(self, numel, grad=torch.float32, low=None, dtype=torch.float32):
        self.param = randn(numel, seed=1).to(dtype)
        self.exp_avg = randn(numel, seed=2).to(dtype) * 0.1
        self.exp_avg_sq = randn(numel, seed=3).to(dtype).square() * 0.01
        self.grad = randn(numel, seed=4, dtype=grad)
        self.low = None if low is None else torch.full((numel,), 7, dtype=low)

    def tensors(self, start=0, stop=None):
        all_ = (self.param, self.grad, self.exp_avg, self.exp_avg_sq, self.low)
        return [None if t is None else t[start:stop] for t in all_]

    def clone(self, start=0, stop=None):
        return [None if t is None else t.clone() for t in self.tensors(start, stop)]


def step(tensors, segments=None, call=None, **extra):
    if segments is None:
        segments = [(0, tensors[0].numel(), hyper(3))]
    args = (*tensors, *tables(segments), extra.get("grad_scale"), extra.get("found_inf"))
    (call or ops.fused_adamw_)(*args)
    return tensors


def train(numel, steps, weight_decay, decoupled, betas, grad_dtype):
    """Parameters after some steps: ours, torch.optim in fp32, and torch.optim in float64."""
    start = randn(numel, seed=5)
    cls = torch.optim.AdamW if decoupled else torch.optim.Adam
    peers = []
    for dtype in (torch.float32, torch.float64):
        p = start.to(dtype, copy=True).requires_grad_()
        options = dict(lr=LR, betas=betas, eps=EPS, weight_decay=weight_decay, foreach=False)
        peers.append((p, cls([p], **options)))
    ours = [start.clone(), None, torch.zeros(numel), torch.zeros(numel), None]
    for t in range(1, steps + 1):
        grad = (randn(numel, seed=100 + t) * 0.1).to(grad_dtype)
        for p, optimizer in peers:
            p.grad = grad.to(p.dtype)
            optimizer.step()
        ours[1] = grad
        row = hyper(t, weight_decay=weight_decay, decoupled=decoupled, betas=betas)
        step(ours, [(0, numel, row)])
    return ours[0], peers[0][0].detach(), peers[1][0].detach()


@pytest.mark.parametrize("grad", FLOATS[:3], ids=name_of)
@pytest.mark.parametrize(
    ("weight_decay", "decoupled", "betas"),
    [(0.1, True, BETAS), (0.0, True, BETAS), (0.1, False, BETAS), (0.0, False, (0.3, 0.9))],
)
def test_adamw_is_as_exact_as_torch(isa, grad, weight_decay, decoupled, betas):
    ours, torchs, exact = train(3001, 20, weight_decay, decoupled, betas, grad)
    assert (exact - randn(3001, seed=5)).abs().min() > 1e-4  # everything has moved
    error, allowed = (ours - exact).abs(), (torchs - exact).abs()
    assert error.max() <= 2 * allowed.max()
    assert error.square().mean().sqrt() <= 2 * allowed.square().mean().sqrt()


def test_adamw_is_torchs_arithmetic_bit_for_bit_but_for_the_square_root(isa):
    # With v = 0 and no decay of it there is no square root to differ in (torch takes MKL's).
    s = State(1000).tensors()
    s[3].zero_()
    s[1].mul_(0.01)
    row = hyper(3, betas=(0.9, 1.0), eps=0.5)
    row[6] = 0.25
    p, g, m, v, _ = (None if t is None else t.clone() for t in s)
    step(s, [(0, 1000, row)])
    p.mul_(1 - LR * 0.1)
    m.lerp_(g, 1 - 0.9)
    v.mul_(1.0).addcmul_(g, g, value=0.0)
    p.addcdiv_(m, (v.sqrt() / math.sqrt(0.25)).add_(0.5), value=-(LR / row[5]))
    for ours, theirs in zip((s[0], s[2], s[3]), (p, m, v), strict=True):
        assert_same_bits(ours, theirs)


@pytest.mark.parametrize("low", FLOATS[1:3], ids=name_of)
def test_adamw_writes_the_rounded_parameter(isa, low):
    s = State(777, low=low).tensors()
    step(s, [(100, 701, hyper(3))])
    assert_same_bits(s[4][100:701], s[0][100:701].to(low))
    assert (s[4][:100] == 7).all() and (s[4][701:] == 7).all()


@pytest.mark.parametrize("grad", FLOATS[:3], ids=name_of)
def test_adamw_steps_each_segment_with_its_own_hyperparameters(isa, grad):
    state = State(5000, grad=grad, low=torch.bfloat16)
    rows = [
        hyper(1, weight_decay=0.0),
        hyper(9, lr=0.3, betas=(0.2, 0.7), decoupled=False),
        hyper(2, eps=0.1),
    ]
    segments = [(3, 50, rows[0]), (50, 50, rows[1]), (64, 2001, rows[1]), (4990, 4999, rows[2])]
    whole = step(state.clone(), segments)
    before = state.tensors()
    inside = torch.zeros(5000, dtype=torch.bool)
    for start, stop, row in segments:
        inside[start:stop] = True
        part = step(state.clone(start, stop), [(0, stop - start, row)])
        for a, b in zip(whole, part, strict=True):
            assert_same_bits(a[start:stop], b)
    for i in (0, 2, 3, 4):
        assert_same_bits(whole[i][~inside], before[i][~inside])
        assert (whole[i][inside] != before[i][inside]).float().mean() > 0.9


def test_adamw_bits_do_not_depend_on_position(isa):
    state = State(300, grad=torch.bfloat16, low=torch.float16)
    whole = step(state.clone())
    for start in range(0, 40, 3):
        for numel in (1, 2, 15, 16, 17, 31, 100, 260):
            part = step(state.clone(start, start + numel))
            for a, b in zip(whole, part, strict=True):
                assert_same_bits(a[start : start + numel], b)


def test_adamw_bits_do_not_depend_on_threads(threads):
    state = State(100_003, low=torch.bfloat16)
    segments = [(1, 40_000, hyper(3)), (40_000, 99_999, hyper(5, weight_decay=0.0))]
    results = []
    for count in (1, 2, 3, 7):
        threads(count)
        results.append(step(state.clone(), segments))
    for result in results[1:]:
        for a, b in zip(results[0], result, strict=True):
            assert_same_bits(a, b)


def test_adamw_scales_the_gradient(isa):
    state = State(1000, grad=torch.float16)
    scale = torch.tensor([0.3])
    scaled = step(state.clone(), grad_scale=scale)
    plain = state.clone()
    plain[1] = plain[1].float() * 0.3
    for i, reference in enumerate(step(plain)):
        if i in (0, 2, 3):
            assert_same_bits(scaled[i], reference)


@pytest.mark.parametrize("which", ["kernel", "composite"])
def test_adamw_changes_nothing_when_a_gradient_is_not_finite(isa, which):
    call = functools.partial(composite, "fused_adamw_") if which == "composite" else None
    state = State(1000, low=torch.bfloat16)
    state.grad[5] = math.inf
    for flag in (1.0, -2.0, math.inf, math.nan):
        after = step(state.clone(), call=call, found_inf=torch.tensor(flag))
        for a, b in zip(after, state.tensors(), strict=True):
            assert_same_bits(a, b)
    after = step(state.clone(), call=call, found_inf=torch.tensor([0.0]))
    assert (after[0] != state.param).float().mean() > 0.9


@pytest.mark.parametrize("low", [None, torch.bfloat16, torch.float16], ids=name_of)
@pytest.mark.parametrize("grad", FLOATS[:3], ids=name_of)
def test_adamw_composite_equals_the_kernel(grad, low):
    state = State(2000, grad=grad, low=low)
    segments = [
        (0, 900, hyper(3)),
        (1000, 2000, hyper(4, decoupled=False, betas=(0.4, 0.9))),
    ]
    extra = dict(grad_scale=torch.tensor(0.7), found_inf=torch.tensor(0.0))
    kernel = step(state.clone(), segments, **extra)
    call = functools.partial(composite, "fused_adamw_")
    other = step(state.clone(), segments, call, **extra)
    for a, b in zip(kernel[:4], other[:4], strict=True):
        torch.testing.assert_close(a, b, rtol=3e-7, atol=1e-8)  # torch's square root is not exact
    if low is not None:
        torch.testing.assert_close(kernel[4], other[4])


def test_adamw_in_float64_and_in_bfloat16():
    exact = State(500, dtype=torch.float64)
    reference = torch.optim.AdamW([exact.param.clone().requires_grad_()], lr=LR, weight_decay=0.1)
    (p,) = reference.param_groups[0]["params"]
    reference.state[p] = {
        "step": torch.tensor(2.0),
        "exp_avg": exact.exp_avg.clone(),
        "exp_avg_sq": exact.exp_avg_sq.clone(),
    }
    p.grad = exact.grad.double()
    reference.step()
    ours = step(exact.clone())
    torch.testing.assert_close(ours[0], p.detach(), rtol=1e-14, atol=0)
    narrow = step(State(500, dtype=torch.bfloat16, grad=torch.bfloat16).clone())
    torch.testing.assert_close(narrow[0].double(), ours[0], rtol=2**-6, atol=2**-6)


ADAMW_ERRORS = [
    (0, lambda s: s[0].reshape(10, 10), r"expected param to be 1-D, got shape \[10, 10\]"),
    (1, lambda s: s[1][:50], r"expected grad to have the 100 elements of param, got 50"),
    (2, lambda s: torch.ones(200)[::2], r"expected exp_avg to be a contiguous tensor"),
    (3, lambda s: s[3].int(), r"expected exp_avg_sq to be floating point, got Int"),
    (4, lambda s: torch.ones(99).half(), r"expected low_precision to have the 100 elements"),
    (5, lambda s: torch.tensor([[0, 101]]), r"expected ranges to be .* \[0, 100\), got \[0, 101\)"),
    (5, lambda s: torch.tensor([[50, 40]]), r"expected ranges .* got \[50, 40\) in row 0"),
    (5, lambda s: torch.tensor([[0, 9, 9]]), r"expected ranges .* shape \[k, 2\], got shape"),
    (5, lambda s: torch.tensor([[0.0, 9.0]]), r"expected ranges to be a CPU Long tensor .* Float"),
    (6, lambda s: torch.ones(2, 8).double(), r"expected hyper .* \[1, 8\], got shape \[2, 8\]"),
    (6, lambda s: torch.ones(1, 8), r"expected hyper to be a CPU Double tensor .* of Float"),
    (7, lambda s: torch.ones(2), r"expected grad_scale to be one float32 element, got shape \[2\]"),
    (8, lambda s: torch.ones(1).half(), r"expected found_inf to be one float32 element.* of Half"),
]


@pytest.mark.parametrize("case", range(len(ADAMW_ERRORS)))
def test_adamw_refuses_bad_arguments(case):
    index, make, message = ADAMW_ERRORS[case]
    args = [*State(100, low=torch.bfloat16).tensors(), *tables([(0, 100, hyper(3))]), None, None]
    args[index] = make(args)
    with pytest.raises(ValueError, match="fused_adamw_: " + message):
        ops.fused_adamw_(*args)


def test_adamw_refuses_overlapping_segments():
    segments = [(0, 60, hyper(3)), (59, 100, hyper(3))]
    with pytest.raises(ValueError, match=r"disjoint .* got \[59, 100\) in row 1 after 60"):
        step(State(100).tensors(), segments)


# sumsq --------------------------------------------------------------------------------------------


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


# sum_shards_ --------------------------------------------------------------------------------------


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


# All ----------------------------------------------------------------------------------------------


def test_opcheck():
    state = State(40, grad=torch.bfloat16, low=torch.bfloat16)
    extras = (torch.tensor(0.5), torch.tensor(0.0))
    z = torch.ops.zerocore
    inputs = [randn(3, 5).t(), None, randn(4).half()]
    opcheck(z.pack_.default, (torch.ones(40), inputs, [1, 17, 20]))
    opcheck(z.pack_.default, (torch.ones(40), [randn(3, 5)], [1], 0.5))
    segments = tables([(0, 10, hyper(3)), (12, 40, hyper(1))])
    opcheck(z.fused_adamw_.default, (*state.clone(), *segments, *extras))
    opcheck(z.fused_adamw_.default, (*State(40).clone(), *segments))
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
