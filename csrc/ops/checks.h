// The checks of the operators' arguments: the same on every device. All throw ValueError.
#pragma once

#include <vector>

#include "kernels/adamw.h"
#include "ops/ops.h"

namespace zerocore::ops {

void check_pack(const at::Tensor& out, const OptionalTensors& inputs, at::IntArrayRef offsets,
                double scale);

// Returns ranges and hyper as segments.
std::vector<kernels::AdamWSegment> check_fused_adamw(
    const at::Tensor& param, const at::Tensor& grad, const at::Tensor& exp_avg,
    const at::Tensor& exp_avg_sq, const std::optional<at::Tensor>& low_precision,
    const at::Tensor& ranges, const at::Tensor& hyper, at::TensorList steps,
    const std::optional<at::Tensor>& grad_scale, const std::optional<at::Tensor>& found_inf);

void check_sumsq(const at::Tensor& x);

void check_sum_shards(const at::Tensor& out, at::TensorList shards);

}  // namespace zerocore::ops
