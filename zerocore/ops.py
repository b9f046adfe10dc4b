"""The operators of namespace `zerocore`, with the fake versions that tracing uses.

They mutate flat buffers in place, are not differentiable, and raise ValueError for arguments that
do not fit. Tensors of float32, bfloat16, float16 and float64 run on kernels, vectorised ones on the
CPU and CUDA's on GPUs (if zerocore was built with CUDA), with the same bits; `sumsq` adds up in an
order that depends on which. Other devices and dtypes run on plain ATen operators.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from zerocore import _C  # noqa: F401  (loading it registers the operators)


def pack_(
    out: Tensor, inputs: Sequence[Tensor | None], offsets: Sequence[int], scale: float = 1.0
) -> None:
    """Gather a list of tensors into one flat buffer, in one pass over it.

    out[offsets[i] : offsets[i] + inputs[i].numel()] becomes inputs[i], read in row-major order,
    times `scale` and rounded to out's dtype. All other elements of `out` become zero.

    Args:
        out: 1-D, contiguous, any dtype.
        inputs: any shapes and strides, on out's device, of dtypes that can be cast to out's. None
            leaves zeros in its place. They may not share memory with `out`.
        offsets: one per input, in elements of `out`, ascending; inputs may not overlap there.
        scale: multiplied in float32, or in float64 if the input or `out` is. 1 into the same dtype
            copies the bytes.
    """
    torch.ops.zerocore.pack_.default(out, inputs, offsets, scale)


def fused_adamw_(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    low_precision: Tensor | None,
    ranges: Tensor,
    hyper: Tensor,
    steps: Sequence[Tensor],
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Do one AdamW or Adam step over segments of flat tensors, in one pass over them.

    The arithmetic is that of torch.optim.AdamW. The bits of an element do not depend on where it
    lies, on the number of threads or on the CPU's instruction set. Nothing on the host depends on
    `grad_scale`, `found_inf` or `steps`: a device is not waited for.

    Args:
        param, exp_avg, exp_avg_sq: 1-D, contiguous, of one size; float32 (others are slower).
        grad: the same size, of any floating dtype.
        low_precision: the same size, bfloat16 or float16; receives the rounded new parameter.
        ranges: int64 [k, 2] on the CPU: [start, stop) of each segment, ascending and disjoint.
            Elements outside them stay as they are.
        hyper: float64 [k, 6] on the CPU: lr, beta1, beta2, eps, weight_decay, decoupled (1: AdamW,
            0: Adam with an L2 term) of each segment.
        steps: k tensors of one float32 element on param's device: how many steps each segment has
            taken. This step is number steps[i] + 1, which is stored there, for an empty segment
            too. One tensor may stand for several segments; it counts once a call.
        grad_scale: one float32 element on param's device, multiplied into the gradient.
        found_inf: one float32 element on param's device; if it is not zero nothing changes,
            step counts included.

    Raises:
        ValueError: if a shape, dtype, device or length is not the one above.
    """
    torch.ops.zerocore.fused_adamw_.default(
        param, grad, exp_avg, exp_avg_sq, low_precision, ranges, hyper, steps, grad_scale, found_inf
    )


def sumsq(x: Tensor) -> Tensor:
    """Sum the squares of all elements, in a fixed order.

    Returns:
        float64 [2] on x's device: the sum, and 1.0 if any element is infinite or NaN, else 0.0.
    """
    return torch.ops.zerocore.sumsq.default(x)


def sum_shards_(out: Tensor, shards: Sequence[Tensor], accumulate: bool = False) -> None:
    """Sum shards in list order: the local half of a reduce-scatter done as an exchange.

    The sum is made in float32 (float64 for float64 shards) and rounded once to the shards' dtype.

    Args:
        out: contiguous; becomes the sum, or out + sum with `accumulate`. It may be one of the
            shards, but may not overlap one partly.
        shards: at least one; contiguous, of out's size, of one dtype that can be cast to out's.
        accumulate: add to `out` instead of replacing it.
    """
    torch.ops.zerocore.sum_shards_.default(out, shards, accumulate)


@torch.library.register_fake("zerocore::pack_")
def _(out, inputs, offsets, scale=1.0):
    return None


@torch.library.register_fake("zerocore::fused_adamw_")
def _(
    param,
    grad,
    exp_avg,
    exp_avg_sq,
    low_precision,
    ranges,
    hyper,
    steps,
    grad_scale=None,
    found_inf=None,
):
    return None


@torch.library.register_fake("zerocore::sumsq")
def _(x):
    return x.new_empty((2,), dtype=torch.float64)


@torch.library.register_fake("zerocore::sum_shards_")
def _(out, shards, accumulate=False):
    return None
