"""pack_ against torch's own casts and copies."""

import math

import pytest
import torch
from op_cases import FLOATS, assert_same_bits, composite, name_of, randn

from zerocore import ops

RAW = [torch.uint8, torch.int32, torch.int64, torch.bool, torch.complex64, torch.complex128]

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
