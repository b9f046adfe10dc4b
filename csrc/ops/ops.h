// The operators of namespace zerocore, called through the dispatcher. schema.cpp describes their
// arguments.
#pragma once

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <optional>

namespace zerocore::ops {

using OptionalTensors = c10::List<std::optional<at::Tensor>>;

// Gathers `inputs` (std::nullopt: zeros) into the flat buffer `out` at `offsets`, times `scale`;
// zeros elsewhere.
void pack_(const at::Tensor& out, const OptionalTensors& inputs, at::IntArrayRef offsets,
           double scale = 1.0);

// One AdamW or Adam step over the segments `ranges` (int64 [k, 2], CPU) with `hyper` (float64 [k,
// 6], CPU); advances `steps` (k counts of one fp32 element, on the device).
void fused_adamw_(const at::Tensor& param, const at::Tensor& grad, const at::Tensor& exp_avg,
                  const at::Tensor& exp_avg_sq, const std::optional<at::Tensor>& low_precision,
                  const at::Tensor& ranges, const at::Tensor& hyper, at::TensorList steps,
                  const std::optional<at::Tensor>& grad_scale = std::nullopt,
                  const std::optional<at::Tensor>& found_inf = std::nullopt);

// float64 [2]: the sum of squares, and 1.0 if some element is not finite (else 0.0).
at::Tensor sumsq(const at::Tensor& x);

// out = (or, with `accumulate`, out +=) shards[0] + shards[1] + ..., summed in fp32 and rounded
// once to their dtype.
void sum_shards_(const at::Tensor& out, at::TensorList shards, bool accumulate = false);

}  // namespace zerocore::ops
