"""zerocore's operators on NPU tensors: the composite implementation, without waits of the host."""

import functools

import pytest
import torch
from op_cases import FLOATS, State, assert_same_bits, composite, hyper, name_of, randn, tables

from zerocore import ops


def on_npu(value):
    """The same argument on the device; tables of fused_adamw_ stay on the host."""
    if isinstance(value, torch.Tensor):
        # as_strided of a copy of all the memory: strides and gaps are kept.
        storage = torch.empty(0, dtype=value.dtype).set_(value.untyped_storage())
        return storage.npu().as_strided(value.shape, value.stride(), value.storage_offset())
    return [None if v is None else on_npu(v) for v in value] if isinstance(value, list) else value


def call(function, *args, **kwargs):
    """Its result; the host may not wait for the device meanwhile."""
    import torch_npu

    torch_npu._C.take_waits()
    result = function(*args, **kwargs)
    waits = torch_npu._C.take_waits()
    assert not waits, f"the host waits in {waits}"
    return result


def pack():
    shapes = [(3, 5), (7,), (2, 3, 4), (), (0, 4)]
    for dtype in FLOATS:
        inputs = [randn(*shape, dtype=dtype, seed=i) for i, shape in enumerate(shapes)]
        inputs[2] = inputs[2].transpose(0, 2)
        inputs.append(randn(8, 6, dtype=dtype)[1:7:2, ::3])
        inputs.append(None)
        offsets = [1, 20, 30, 60, 61, 64, 80]
        for to in FLOATS:
            for scale in (1.0, 1 / 3):
                expected = torch.full((100,), 7, dtype=to)
                out = expected.npu()
                composite("pack_", expected, inputs, offsets, scale)
                call(ops.pack_, out, on_npu(inputs), offsets, scale)
                assert_same_bits(out.cpu(), expected)


def test_pack(npus):
    npus(1, pack)


def adamw():
    numel = 1001
    parts = [(3, 400), (400, 400), (400, 997)]
    kinds = [dict(), dict(decoupled=False), dict(weight_decay=0.0, betas=(0.3, 0.9))]
    for row, grad, low, given in zip(
        kinds * 2,
        (torch.float32, torch.bfloat16, torch.float32, torch.float16, torch.float32, torch.float32),
        (None, torch.bfloat16, None, torch.float16, torch.bfloat16, None),
        (None, 0.0, None, 0.0, 1.0, 0.0),
        strict=True,
    ):
        state = State(numel, grad=grad, low=low)
        segments = [(*part, hyper(3 + i, **row)) for i, part in enumerate(parts)]
        extra = [None, None] if given is None else [torch.tensor(0.5), torch.tensor(given)]
        ranges, rows, steps = tables(segments)
        expected, expected_steps = state.clone(), [s.clone() for s in steps]
        composite("fused_adamw_", *expected, ranges, rows, expected_steps, *extra)
        found, found_steps = on_npu(state.clone()), on_npu(steps)
        extra = on_npu(extra)
        call(ops.fused_adamw_, *found, ranges, rows, found_steps, *extra)
        for a, b in zip([*found, *found_steps], [*expected, *expected_steps], strict=True):
            assert a is b is None or assert_same_bits(a.cpu(), b) is None
        assert torch.equal(expected[0], state.param) == (given == 1.0)


def test_adamw(npus):
    npus(1, adamw)


def adamw_as_exact_as_torch():
    """Parameters of 20 steps on the device, in torch, and in torch with float64."""
    peers, grads = [], [randn(3001, seed=100 + t) * 0.1 for t in range(20)]
    for dtype in (torch.float32, torch.float64):
        p = randn(3001, seed=5).to(dtype).requires_grad_()
        opt = torch.optim.AdamW([p], lr=1e-2, eps=1e-8, weight_decay=0.1, foreach=False)
        for grad in grads:
            p.grad = grad.to(dtype)
            opt.step()
        peers.append(p.detach())
    ours = [randn(3001, seed=5).npu(), None, *(torch.zeros(3001, device="npu") for _ in range(2))]
    ranges, rows, steps = tables([(0, 3001, hyper(1))])
    steps = on_npu(steps)
    for grad in grads:
        ours[1] = grad.npu()
        call(ops.fused_adamw_, *ours, None, ranges, rows, steps)
    assert steps[0].item() == 20
    return ours[0].cpu(), *peers


def test_adamw_is_as_exact_as_torch(npus):
    ((ours, torchs, exact),) = npus(1, adamw_as_exact_as_torch)
    error, allowed = (ours - exact).abs(), (torchs - exact).abs()
    assert error.max() <= 2 * allowed.max()


def sumsq(dtype):
    results = []
    for numel in (0, 1, 17, 4095, 4096, 4097, 50_001):
        for bad in (None, float("inf"), float("nan")):
            x = randn(numel, dtype=dtype)
            if bad is not None:
                if numel == 0:
                    continue
                x[numel // 2] = bad
            expected = torch.tensor([x.double().square().sum(), float(bad is not None)])
            found = call(ops.sumsq, x.npu())
            assert found.dtype == torch.float64 and found.is_npu
            results.append((found.cpu(), expected, numel))
    strided = randn(160, 170, dtype=dtype).t()[3:, ::2]
    expected = torch.tensor([strided.double().square().sum(), 0.0])
    results.append((call(ops.sumsq, on_npu(strided)).cpu(), expected, strided.numel()))
    return results


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_sumsq(npus, dtype):
    (results,) = npus(1, sumsq, dtype)
    for found, expected, numel in results:
        # Blocks are summed in float32 on the device (doubles are slow there), all else in float64.
        torch.testing.assert_close(
            found.float(), expected.float(), rtol=1e-6, atol=0, equal_nan=True, msg=f"{numel}"
        )


def sum_shards():
    for dtype in FLOATS:
        for to in FLOATS:
            for numel, count in [(0, 2), (1, 1), (17, 3), (4099, 5)]:
                shards = [randn(numel, dtype=dtype, seed=i) for i in range(count)]
                for accumulate in (False, True):
                    expected = randn(numel, dtype=to, seed=99)
                    out = expected.npu()
                    composite("sum_shards_", expected, shards, accumulate)
                    call(ops.sum_shards_, out, on_npu(shards), accumulate)
                    assert_same_bits(out.cpu(), expected)
    one_of_them = on_npu([randn(5003, seed=i) for i in range(3)])
    expected = functools.reduce(torch.add, [s.cpu() for s in one_of_them])
    call(ops.sum_shards_, one_of_them[1], one_of_them)
    assert_same_bits(one_of_them[1].cpu(), expected)


def test_sum_shards(npus):
    npus(1, sum_shards)


def refusals():
    x = torch.ones(9, device="npu")
    with pytest.raises(ValueError, match=r"expected inputs\[0\] .*"):
        ops.pack_(x, [torch.ones(3)], [0])
    with pytest.raises(ValueError, match=r"sum_shards_: expected shards\[0\] .*"):
        ops.sum_shards_(x, [torch.ones(9)])
    state = State(9).tensors()
    with pytest.raises(ValueError, match=r"fused_adamw_: expected .*"):
        ops.fused_adamw_(x, *state[1:], *tables([(0, 9, hyper(3))]))


def test_tensors_of_two_devices_are_refused(npus):
    npus(1, refusals)
