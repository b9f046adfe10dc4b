// The operators in plain ATen: for devices and dtypes without a kernel.
#pragma once

#include "ops/ops.h"

namespace zerocore::ops::composite {

void pack_(const at::Tensor& out, const OptionalTensors& inputs, at::IntArrayRef offsets,
           double scale);

void fused_adamw_(const at::Tensor& param, const at::Tensor& grad, const at::Tensor& exp_avg,
                  const at::Tensor& exp_avg_sq, const std::optional<at::Tensor>& low_precision,
                  const at::Tensor& ranges, const at::Tensor& hyper, at::TensorList steps,
                  const std::optional<at::Tensor>& grad_scale,
                  const std::optional<at::Tensor>& found_inf);

at::Tensor sumsq(const at::Tensor& x);

void sum_shards_(const at::Tensor& out, at::TensorList shards, bool accumulate);

}  // namespace zerocore::ops::composite
