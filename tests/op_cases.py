"""Inputs and comparisons of the operators' tests."""

import torch

from zerocore import ops

FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def name_of(value):
    return str(value).removeprefix("torch.")


def randn(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    return values.gt(0) if dtype == torch.bool else (values * 3).to(dtype)


def assert_same_bits(actual, expected):
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    if not torch.equal(*(t.reshape(-1).view(torch.uint8) for t in (actual, expected))):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
        raise AssertionError("expected the same bits, got other signs of zeros or NaNs")


def composite(op, *args):
    """Call the implementation for devices without kernels, on CPU tensors."""
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.XLA)
    return getattr(torch.ops.zerocore, op).default.redispatch(key, *args)


LR, BETAS, EPS = 1e-2, (0.9, 0.999), 1e-8


def hyper(step, lr=LR, betas=BETAS, eps=EPS, weight_decay=0.1, decoupled=True):
    """For step number `step`, counted from 1: the steps taken before it, and a row of hyper."""
    return step - 1, [lr, *betas, eps, weight_decay, float(decoupled)]


def tables(segments):
    """Tensors `ranges`, `hyper` and `steps` from a list of (start, stop, hyper(...))."""
    ranges = torch.tensor([s[:2] for s in segments], dtype=torch.int64).reshape(-1, 2)
    rows = torch.tensor([s[2][1] for s in segments], dtype=torch.float64).reshape(-1, 6)
    return ranges, rows, [torch.tensor(float(s[2][0])) for s in segments]


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


def step(tensors, segments=None, call=None, steps=None, **extra):
    if segments is None:
        segments = [(0, tensors[0].numel(), hyper(3))]
    ranges, rows, counts = tables(segments)
    optional = (extra.get("grad_scale"), extra.get("found_inf"))
    (call or ops.fused_adamw_)(*tensors, ranges, rows, steps or counts, *optional)
    return tensors
