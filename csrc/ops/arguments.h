// The operators' arguments in the terms of the kernels: checked, and the same for CPU and CUDA.
#pragma once

#include <optional>
#include <vector>

#include "kernels/adamw.h"
#include "kernels/pack.h"
#include "ops/ops.h"

namespace zerocore::ops {

// The kernels' name of a dtype; std::nullopt: they do not know it.
std::optional<kernels::DType> kernel_dtype(at::ScalarType dtype);

// What pack_ has to do.
struct PackArguments {
  enum class Way {
    bytes,      // copy elements of any type as they are
    cast,       // all dtypes are the kernels'
    composite,  // some are not
  };
  Way way;
  kernels::DType out_dtype;      // of `cast`
  std::vector<at::Tensor> held;  // `sources` point to their sizes and strides
  std::vector<kernels::PackSource> sources;

  int64_t count() const { return static_cast<int64_t>(sources.size()); }
};
PackArguments pack_arguments(const at::Tensor& out, const OptionalTensors& inputs,
                             at::IntArrayRef offsets, double scale);

struct AdamWArguments {
  std::vector<kernels::AdamWSegment> segments;
  std::vector<float*> steps;
  kernels::AdamWTensors tensors;  // its steps are the ones above

  int64_t count() const { return static_cast<int64_t>(segments.size()); }
};
// std::nullopt: the kernels do not know a dtype.
std::optional<AdamWArguments> adamw_arguments(
    const at::Tensor& param, const at::Tensor& grad, const at::Tensor& exp_avg,
    const at::Tensor& exp_avg_sq, const std::optional<at::Tensor>& low_precision,
    const at::Tensor& ranges, const at::Tensor& hyper, at::TensorList steps,
    const std::optional<at::Tensor>& grad_scale, const std::optional<at::Tensor>& found_inf);

struct SumArguments {
  kernels::DType out_dtype;
  kernels::DType shard_dtype;
  std::vector<const void*> shards;

  int64_t count() const { return static_cast<int64_t>(shards.size()); }
};
// std::nullopt: the kernels do not know a dtype.
std::optional<SumArguments> sum_shards_arguments(const at::Tensor& out, at::TensorList shards);

}  // namespace zerocore::ops
