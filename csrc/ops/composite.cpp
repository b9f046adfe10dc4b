// Plain ATen implementations: no host synchronisation, any device.

#include "ops/composite.h"

#include <ATen/ops/add.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/lerp.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/where.h>
#include <torch/library.h>

#include "ops/checks.h"

namespace zerocore::ops::composite {
namespace {

// The dtype in which values of `dtype` are summed and multiplied: fp32 for narrower floats.
at::ScalarType wide(at::ScalarType dtype) {
  return at::isReducedFloatingType(dtype) ? at::kFloat : dtype;
}

bool is_given(const std::optional<at::Tensor>& tensor) {
  return tensor.has_value() && tensor->defined();
}

// Stores `value` in `to` unless `keep` (a 0-d or 1-element bool tensor) is given and true.
void store(const at::Tensor& to, const at::Tensor& value, const std::optional<at::Tensor>& keep) {
  const at::Tensor cast = value.to(to.scalar_type());
  to.copy_(keep.has_value() ? at::where(*keep, to, cast) : cast);
}

// 1 - beta^step of a float64 tensor.
at::Tensor bias_correction(double beta, const at::Tensor& step) {
  return at::pow(beta, step).neg_().add_(1.0);
}

// One segment: tensors are slices of it, `step` its number in float64, counted from 1. See
// kernels/adamw_math.h for the arithmetic.
void step_segment(const at::Tensor& param, at::Tensor grad, const at::Tensor& exp_avg,
                  const at::Tensor& exp_avg_sq, const std::optional<at::Tensor>& low_precision,
                  const kernels::AdamWHyper& h, const at::Tensor& step,
                  const std::optional<at::Tensor>& keep) {
  const at::ScalarType dtype = grad.scalar_type();
  at::Tensor p = param.to(dtype, /*non_blocking=*/false, /*copy=*/true);
  if (h.weight_decay != 0.0 && h.decoupled) {
    p.mul_(1.0 - h.lr * h.weight_decay);
  } else if (h.weight_decay != 0.0) {
    grad = at::add(grad, p, h.weight_decay);
  }
  const at::Tensor m = at::lerp(exp_avg.to(dtype), grad, 1.0 - h.beta1);
  const at::Tensor v = at::mul(exp_avg_sq.to(dtype), h.beta2).addcmul_(grad, grad, 1.0 - h.beta2);
  const at::Tensor root_correction2 = bias_correction(h.beta2, step).sqrt_().to(dtype);
  const at::Tensor negative_step = bias_correction(h.beta1, step).reciprocal_().mul_(-h.lr);
  const at::Tensor denominator = v.sqrt().div_(root_correction2).add_(h.eps);
  p.add_(at::mul(m, negative_step.to(dtype)).div_(denominator));
  p = p.to(param.scalar_type());  // what is stored; the copy is made of that
  store(param, p, keep);
  store(exp_avg, m, keep);
  store(exp_avg_sq, v, keep);
  if (is_given(low_precision)) {
    store(*low_precision, p, keep);
  }
}

// The L2 norm in float32, for a device that has no norm of doubles (Ascend). Norms of blocks first:
// the error does not grow with the size, and a block's sum is not spread over cores, whose order
// may vary.
at::Tensor norm_of_blocks(const at::Tensor& x) {
  constexpr int64_t kBlock = 4096;
  const at::Tensor real = at::isComplexType(x.scalar_type()) ? at::view_as_real(x) : x;
  const at::Tensor flat =
      (at::isReducedFloatingType(x.scalar_type()) ? real : real.to(at::kFloat)).reshape(-1);
  const int64_t whole = flat.numel() / kBlock * kBlock;
  const auto norms = [](const at::Tensor& rows) {
    return at::linalg_vector_norm(rows, 2, at::IntArrayRef{1}, false, at::kFloat);
  };
  const at::Tensor blocks = norms(flat.narrow(0, 0, whole).view({-1, kBlock}));
  const at::Tensor rest = norms(flat.narrow(0, whole, flat.numel() - whole).view({1, -1}));
  return norms(at::cat({blocks, rest}).view({1, -1})).squeeze(0);
}

}  // namespace

void pack_(const at::Tensor& out, const OptionalTensors& inputs, at::IntArrayRef offsets,
           double scale) {
  check_pack(out, inputs, offsets, scale);
  out.zero_();
  for (size_t i = 0; i < inputs.size(); ++i) {
    const std::optional<at::Tensor> input = inputs.get(i);
    if (!is_given(input)) {
      continue;
    }
    const at::Tensor place = out.narrow(0, offsets[i], input->numel()).view(input->sizes());
    if (scale == 1.0) {
      place.copy_(*input);
      continue;
    }
    // The product is made in the wider of fp32 and both dtypes, and rounded once.
    const at::ScalarType wider =
        at::promoteTypes(wide(input->scalar_type()), wide(out.scalar_type()));
    place.copy_(at::mul(input->to(wider), scale));
  }
}

void fused_adamw_(const at::Tensor& param, const at::Tensor& grad, const at::Tensor& exp_avg,
                  const at::Tensor& exp_avg_sq, const std::optional<at::Tensor>& low_precision,
                  const at::Tensor& ranges, const at::Tensor& hyper, at::TensorList steps,
                  const std::optional<at::Tensor>& grad_scale,
                  const std::optional<at::Tensor>& found_inf) {
  const std::vector<kernels::AdamWSegment> segments = check_fused_adamw(
      param, grad, exp_avg, exp_avg_sq, low_precision, ranges, hyper, steps, grad_scale, found_inf);
  std::optional<at::Tensor> keep;
  if (is_given(found_inf)) {
    keep = found_inf->reshape({1}).ne(0);
  }
  // All counts are read before one is written: segments may share them.
  std::vector<at::Tensor> taken;
  for (const at::Tensor& step : steps) {
    taken.push_back(at::add(step.view({1}), 1));
  }
  for (size_t i = 0; i < segments.size(); ++i) {
    const kernels::AdamWSegment& segment = segments[i];
    store(steps[i].view({1}), taken[i], keep);
    const auto part = [&](const at::Tensor& tensor) {
      return tensor.narrow(0, segment.start, segment.stop - segment.start);
    };
    at::Tensor g = part(grad).to(wide(param.scalar_type()));
    if (is_given(grad_scale)) {
      g = at::mul(g, grad_scale->reshape({1}));
    }
    step_segment(
        part(param), g, part(exp_avg), part(exp_avg_sq),
        is_given(low_precision) ? std::optional<at::Tensor>(part(*low_precision)) : std::nullopt,
        segment.hyper, taken[i].to(at::kDouble), keep);
  }
}

at::Tensor sumsq(const at::Tensor& x) {
  check_sumsq(x);
  const at::Tensor non_finite = at::isfinite(x).all().logical_not();
  at::Tensor norm;
  if (x.device().type() == at::kPrivateUse1) {
    norm = norm_of_blocks(x).to(at::kDouble);
  } else {
    const at::ScalarType dtype =
        at::isComplexType(x.scalar_type()) ? at::kComplexDouble : at::kDouble;
    const at::Tensor values =
        at::isFloatingType(x.scalar_type()) || at::isComplexType(x.scalar_type()) ? x : x.to(dtype);
    norm = at::linalg_vector_norm(values, 2, std::nullopt, false, dtype);
  }
  return at::stack({norm.square(), non_finite.to(at::kDouble)});
}

void sum_shards_(const at::Tensor& out, at::TensorList shards, bool accumulate) {
  check_sum_shards(out, shards);
  const at::ScalarType dtype = shards[0].scalar_type();
  at::Tensor sum = shards[0].to(wide(dtype), /*non_blocking=*/false, /*copy=*/true).view(-1);
  for (const at::Tensor& shard : shards.slice(1)) {
    sum.add_(shard.view(-1));
  }
  sum = sum.to(dtype);
  const at::Tensor flat = out.view(-1);
  if (accumulate) {
    flat.add_(sum);
  } else {
    flat.copy_(sum);
  }
}

TORCH_LIBRARY_IMPL(zerocore, CompositeExplicitAutograd, m) {
  m.impl("pack_", pack_);
  m.impl("fused_adamw_", fused_adamw_);
  m.impl("sumsq", sumsq);
  m.impl("sum_shards_", sum_shards_);
}

}  // namespace zerocore::ops::composite
