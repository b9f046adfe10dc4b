// The operators on the CPU, over csrc/kernels and torch's thread pool.

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "kernels/adamw.h"
#include "kernels/norm.h"
#include "kernels/pack.h"
#include "kernels/reduce.h"
#include "ops/checks.h"
#include "ops/composite.h"
#include "ops/ops.h"

namespace zerocore::ops {
namespace {

using kernels::DType;

kernels::Parallel torch_threads() {
  return kernels::Parallel{
      [](void*, int64_t count, int64_t grain, kernels::Parallel::Body body, const void* state) {
        at::parallel_for(0, count, grain,
                         [=](int64_t begin, int64_t end) { body(state, begin, end); });
      },
      nullptr};
}

// The kernels' name of a dtype; std::nullopt: they do not know it.
std::optional<DType> kernel_dtype(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return DType::f32;
    case at::kBFloat16:
      return DType::bf16;
    case at::kHalf:
      return DType::f16;
    case at::kDouble:
      return DType::f64;
    default:
      return std::nullopt;
  }
}

// f32, bf16 or f16: what the AdamW kernel reads as gradient.
std::optional<DType> narrow_dtype(const at::Tensor& tensor) {
  const std::optional<DType> dtype = kernel_dtype(tensor.scalar_type());
  return dtype == DType::f64 ? std::nullopt : dtype;
}

bool is_given(const std::optional<at::Tensor>& tensor) {
  return tensor.has_value() && tensor->defined();
}

const float* optional_float(const std::optional<at::Tensor>& tensor) {
  return is_given(tensor) ? tensor->const_data_ptr<float>() : nullptr;
}

void pack_cpu(const at::Tensor& out, const OptionalTensors& inputs, at::IntArrayRef offsets,
              double scale) {
  check_pack(out, inputs, offsets, scale);
  const std::optional<DType> out_dtype = kernel_dtype(out.scalar_type());
  bool bytes = scale == 1.0;           // every input can be copied as it is
  bool known = out_dtype.has_value();  // every dtype is one of the kernels'
  std::vector<at::Tensor> held;        // sources point to these tensors' sizes and strides
  std::vector<kernels::PackSource> sources;
  held.reserve(inputs.size());
  sources.reserve(inputs.size());
  for (size_t i = 0; i < inputs.size(); ++i) {
    const std::optional<at::Tensor> input = inputs.get(i);
    if (!is_given(input)) {
      continue;
    }
    const std::optional<DType> dtype = kernel_dtype(input->scalar_type());
    bytes = bytes && input->scalar_type() == out.scalar_type();
    known = known && dtype.has_value();
    held.push_back(*input);
    sources.push_back({input->const_data_ptr(), dtype.value_or(DType::f32), offsets[i],
                       input->numel(), input->dim(), input->sizes().data(),
                       input->strides().data()});
  }
  const int64_t count = static_cast<int64_t>(sources.size());
  if (bytes) {
    kernels::pack_bytes(out.mutable_data_ptr(), static_cast<int64_t>(out.element_size()),
                        out.numel(), sources.data(), count, torch_threads());
  } else if (known) {
    kernels::pack(out.mutable_data_ptr(), *out_dtype, out.numel(), sources.data(), count, scale,
                  torch_threads());
  } else {
    composite::pack_(out, inputs, offsets, scale);
  }
}

void fused_adamw_cpu(const at::Tensor& param, const at::Tensor& grad, const at::Tensor& exp_avg,
                     const at::Tensor& exp_avg_sq, const std::optional<at::Tensor>& low_precision,
                     const at::Tensor& ranges, const at::Tensor& hyper, at::TensorList steps,
                     const std::optional<at::Tensor>& grad_scale,
                     const std::optional<at::Tensor>& found_inf) {
  const std::vector<kernels::AdamWSegment> segments = check_fused_adamw(
      param, grad, exp_avg, exp_avg_sq, low_precision, ranges, hyper, steps, grad_scale, found_inf);
  const std::optional<DType> grad_dtype = narrow_dtype(grad);
  const std::optional<DType> low_dtype =
      is_given(low_precision) ? narrow_dtype(*low_precision) : DType::bf16;
  const bool known = param.scalar_type() == at::kFloat && exp_avg.scalar_type() == at::kFloat &&
                     exp_avg_sq.scalar_type() == at::kFloat && grad_dtype.has_value() &&
                     low_dtype.has_value() && *low_dtype != DType::f32;
  if (!known) {
    composite::fused_adamw_(param, grad, exp_avg, exp_avg_sq, low_precision, ranges, hyper, steps,
                            grad_scale, found_inf);
    return;
  }
  std::vector<float*> counts;
  counts.reserve(steps.size());
  for (const at::Tensor& step : steps) {
    counts.push_back(step.mutable_data_ptr<float>());
  }
  const kernels::AdamWTensors tensors{
      param.mutable_data_ptr<float>(),
      grad.const_data_ptr(),
      *grad_dtype,
      exp_avg.mutable_data_ptr<float>(),
      exp_avg_sq.mutable_data_ptr<float>(),
      is_given(low_precision) ? low_precision->mutable_data_ptr() : nullptr,
      *low_dtype,
      optional_float(grad_scale),
      optional_float(found_inf),
      counts.data()};
  kernels::fused_adamw(tensors, segments.data(), static_cast<int64_t>(segments.size()),
                       torch_threads());
}

at::Tensor sumsq_cpu(const at::Tensor& x) {
  check_sumsq(x);
  const std::optional<DType> dtype = kernel_dtype(x.scalar_type());
  if (!dtype.has_value()) {
    return composite::sumsq(x);
  }
  const at::Tensor flat = x.contiguous();
  const kernels::SumSquares result =
      kernels::sumsq(flat.const_data_ptr(), *dtype, flat.numel(), torch_threads());
  at::Tensor out = at::empty({2}, x.options().dtype(at::kDouble));
  double* values = out.mutable_data_ptr<double>();
  values[0] = result.sum;
  values[1] = result.non_finite ? 1.0 : 0.0;
  return out;
}

void sum_shards_cpu(const at::Tensor& out, at::TensorList shards, bool accumulate) {
  check_sum_shards(out, shards);
  const std::optional<DType> out_dtype = kernel_dtype(out.scalar_type());
  const std::optional<DType> shard_dtype = kernel_dtype(shards[0].scalar_type());
  if (!out_dtype.has_value() || !shard_dtype.has_value()) {
    composite::sum_shards_(out, shards, accumulate);
    return;
  }
  std::vector<const void*> data;
  data.reserve(shards.size());
  for (const at::Tensor& shard : shards) {
    data.push_back(shard.const_data_ptr());
  }
  kernels::sum_shards(out.mutable_data_ptr(), *out_dtype, data.data(),
                      static_cast<int64_t>(data.size()), *shard_dtype, out.numel(), accumulate,
                      torch_threads());
}

TORCH_LIBRARY_IMPL(zerocore, CPU, m) {
  m.impl("pack_", pack_cpu);
  m.impl("fused_adamw_", fused_adamw_cpu);
  m.impl("sumsq", sumsq_cpu);
  m.impl("sum_shards_", sum_shards_cpu);
}

}  // namespace
}  // namespace zerocore::ops
