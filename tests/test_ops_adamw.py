"""fused_adamw_ against torch.optim, and against itself elsewhere."""

import functools
import math

import pytest
import torch
from op_cases import (
    BETAS,
    EPS,
    FLOATS,
    LR,
    State,
    assert_same_bits,
    composite,
    hyper,
    name_of,
    randn,
    step,
    tables,
)
from torch.utils._python_dispatch import TorchDispatchMode

from zerocore import ops


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
    assert (exact - randn(3001, seed=5)).abs().mean() > 1e-2  # it has moved
    error, allowed = (ours - exact).abs(), (torchs - exact).abs()
    assert error.max() <= 2 * allowed.max()
    assert error.square().mean().sqrt() <= 2 * allowed.square().mean().sqrt()


@pytest.mark.parametrize("grad_dtype", FLOATS[:3], ids=name_of)
@pytest.mark.parametrize("count", [1, 3, 1000, 2**24])
def test_adamw_is_torchs_arithmetic_bit_for_bit_but_for_the_square_root(isa, count, grad_dtype):
    # With tiny gradients the second moment becomes exactly 1, whose root torch (which takes MKL's)
    # cannot round differently.
    betas, results = (0.9, 0.5), []
    start = State(1000)
    for t in (start.param, start.exp_avg, start.grad):
        t.mul_(1e-6)
    start.exp_avg_sq.fill_(2.0)
    start.grad = start.grad.to(grad_dtype)
    for decoupled in (True, False):
        ours = step(start.clone(), [(0, 1000, hyper(count, betas=betas, decoupled=decoupled))])
        p = start.param.clone().requires_grad_()
        cls = torch.optim.AdamW if decoupled else torch.optim.Adam
        peer = cls([p], lr=LR, betas=betas, eps=EPS, weight_decay=0.1, foreach=False)
        m, v = start.exp_avg.clone(), start.exp_avg_sq.clone()
        peer.state[p] = {"step": torch.tensor(count - 1.0), "exp_avg": m, "exp_avg_sq": v}
        p.grad = start.grad.float()
        peer.step()
        for mine, theirs in zip((ours[0], ours[2], ours[3]), (p.detach(), m, v), strict=True):
            assert_same_bits(mine, theirs)
        assert (ours[3] == 1).all() and (ours[0] != start.param).all()
        results.append(ours[0])
    assert (results[0] != results[1]).any()


def call_of(which):
    return functools.partial(composite, "fused_adamw_") if which == "composite" else None


@pytest.mark.parametrize("which", ["kernel", "composite"])
def test_adamw_counts_steps(which):
    """Shared counts count once a call, those of empty segments too; the shape of one is free."""
    state = State(3000)
    counts = [torch.tensor(4.0), torch.tensor([[9.0]]), torch.tensor([0.0])]
    steps = [counts[0], counts[1], counts[0], counts[1].view(()), counts[2]]
    bounds = [(0, 1000), (1000, 1400), (1400, 2000), (2000, 2999), (2999, 2999)]
    segments = [(*b, hyper(0)) for b in bounds]
    call = call_of(which)
    ours = step(state.clone(), segments, call, steps=steps)
    numbers = [(*b, hyper(t)) for b, t in zip(bounds, [5, 10, 5, 10, 1], strict=True)]
    for a, b in zip(ours, step(state.clone(), numbers, call), strict=True):
        assert a is b is None or assert_same_bits(a, b) is None
    assert [c.item() for c in counts] == [5.0, 10.0, 1.0]
    step(ours, segments, call, steps=steps, found_inf=torch.tensor(0.0))
    assert [c.item() for c in counts] == [6.0, 11.0, 2.0]
    step(ours, segments, call, steps=steps, found_inf=torch.tensor([1.0]))
    assert [c.item() for c in counts] == [6.0, 11.0, 2.0]


def test_adamw_composite_reads_nothing_on_the_host():
    """No operator that hands a value of the device to the host is called."""

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            called.add(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    called = set()
    extra = dict(grad_scale=torch.tensor(0.5), found_inf=torch.tensor(0.0))
    with Record():
        step(State(100).clone(), call=call_of("composite"), **extra)
        torch.tensor(1.0).item()  # seen, if there is one
    assert "lerp" in called and "pow" in called
    assert called & {"_local_scalar_dense", "equal", "nonzero"} == {"_local_scalar_dense"}
    called.clear()
    with Record():
        step(State(100).clone(), call=call_of("composite"), **extra)
    assert "lerp" in called and not called & {"_local_scalar_dense", "equal", "nonzero"}


@pytest.mark.parametrize("low", FLOATS[1:3], ids=name_of)
def test_adamw_writes_the_rounded_parameter(isa, low):
    s = State(777, low=low).tensors()
    step(s, [(100, 701, hyper(3))])
    assert_same_bits(s[4][100:701], s[0][100:701].to(low))
    assert (s[4][:100] == 7).all() and (s[4][701:] == 7).all()


@pytest.mark.parametrize("low", FLOATS[1:3], ids=name_of)
def test_adamw_writes_the_same_copy_past_the_caches(isa, low):
    numel = (1 << 20) + 41  # large calls do so
    state = State(numel, low=low)
    whole = step(state.clone(), [(3, numel - 2, hyper(3))])
    before = state.tensors()
    assert_same_bits(whole[4][3:-2], whole[0][3:-2].to(low))
    for a, b in zip(whole, before, strict=True):
        assert_same_bits(a[:3], b[:3])
        assert_same_bits(a[-2:], b[-2:])
    part = step(state.clone(3, 5003), [(0, 5000, hyper(3))])
    for a, b in zip(whole, part, strict=True):
        assert_same_bits(a[3:5003], b)


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
    call = call_of(which)
    state = State(1000, low=torch.bfloat16)
    state.grad[5] = math.inf
    for flag in (1.0, -2.0, math.inf, math.nan):
        count = torch.tensor(2.0)
        after = step(state.clone(), call=call, found_inf=torch.tensor(flag), steps=[count])
        assert count == 2
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
    other = step(state.clone(), segments, call_of("composite"), **extra)
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
    (6, lambda s: torch.ones(2, 6).double(), r"expected hyper .* \[1, 6\], got shape \[2, 6\]"),
    (6, lambda s: torch.ones(1, 6), r"expected hyper to be a CPU Double tensor .* of Float"),
    (7, lambda s: [], r"expected steps to have one tensor per row of ranges \(1\), got 0"),
    (
        7,
        lambda s: [torch.ones(2)],
        r"expected steps\[0\] to be one float32 .* shape \[2\] of Float",
    ),
    (7, lambda s: [torch.ones(1).int()], r"expected steps\[0\] to be one float32 element.* of Int"),
    (8, lambda s: torch.ones(2), r"expected grad_scale to be one float32 element, got shape \[2\]"),
    (9, lambda s: torch.ones(1).half(), r"expected found_inf to be one float32 element.* of Half"),
]


@pytest.mark.parametrize("case", range(len(ADAMW_ERRORS)))
def test_adamw_refuses_bad_arguments(case):
    index, make, message = ADAMW_ERRORS[case]
    args = [*State(100, low=torch.bfloat16).tensors(), *tables([(0, 100, hyper(3))]), None, None]
    args[index] = make(args)
    with pytest.raises(ValueError, match="fused_adamw_: " + message):
        ops.fused_adamw_(*args)


def test_adamw_refuses_a_step_count_elsewhere():
    with pytest.raises(
        ValueError, match=r"expected steps\[0\] on the device of param \(cpu\), got"
    ):
        step(State(100).tensors(), call=call_of("composite"), steps=[torch.ones(1, device="meta")])


def test_adamw_refuses_overlapping_segments():
    segments = [(0, 60, hyper(3)), (59, 100, hyper(3))]
    with pytest.raises(ValueError, match=r"disjoint .* got \[59, 100\) in row 1 after 60"):
        step(State(100).tensors(), segments)
