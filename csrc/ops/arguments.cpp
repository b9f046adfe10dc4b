#include "ops/arguments.h"

#include "ops/checks.h"

namespace zerocore::ops {
namespace {

using kernels::DType;

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

}  // namespace

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

PackArguments pack_arguments(const at::Tensor& out, const OptionalTensors& inputs,
                             at::IntArrayRef offsets, double scale) {
  check_pack(out, inputs, offsets, scale);
  const std::optional<DType> out_dtype = kernel_dtype(out.scalar_type());
  bool bytes = scale == 1.0;           // every input can be copied as it is
  bool known = out_dtype.has_value();  // every dtype is one of the kernels'
  PackArguments args{};
  args.held.reserve(inputs.size());
  args.sources.reserve(inputs.size());
  for (size_t i = 0; i < inputs.size(); ++i) {
    const std::optional<at::Tensor> input = inputs.get(i);
    if (!is_given(input)) {
      continue;
    }
    const std::optional<DType> dtype = kernel_dtype(input->scalar_type());
    bytes = bytes && input->scalar_type() == out.scalar_type();
    known = known && dtype.has_value();
    args.held.push_back(*input);
    args.sources.push_back({input->const_data_ptr(), dtype.value_or(DType::f32), offsets[i],
                            input->numel(), input->dim(), input->sizes().data(),
                            input->strides().data()});
  }
  args.way = bytes   ? PackArguments::Way::bytes
             : known ? PackArguments::Way::cast
                     : PackArguments::Way::composite;
  args.out_dtype = out_dtype.value_or(DType::f32);
  return args;
}

std::optional<AdamWArguments> adamw_arguments(
    const at::Tensor& param, const at::Tensor& grad, const at::Tensor& exp_avg,
    const at::Tensor& exp_avg_sq, const std::optional<at::Tensor>& low_precision,
    const at::Tensor& ranges, const at::Tensor& hyper, at::TensorList steps,
    const std::optional<at::Tensor>& grad_scale, const std::optional<at::Tensor>& found_inf) {
  AdamWArguments args{};
  args.segments = check_fused_adamw(param, grad, exp_avg, exp_avg_sq, low_precision, ranges, hyper,
                                    steps, grad_scale, found_inf);
  const std::optional<DType> grad_dtype = narrow_dtype(grad);
  const std::optional<DType> low_dtype =
      is_given(low_precision) ? narrow_dtype(*low_precision) : DType::bf16;
  const bool known = param.scalar_type() == at::kFloat && exp_avg.scalar_type() == at::kFloat &&
                     exp_avg_sq.scalar_type() == at::kFloat && grad_dtype.has_value() &&
                     low_dtype.has_value() && *low_dtype != DType::f32;
  if (!known) {
    return std::nullopt;
  }
  args.steps.reserve(steps.size());
  for (const at::Tensor& step : steps) {
    args.steps.push_back(step.mutable_data_ptr<float>());
  }
  args.tensors = {param.mutable_data_ptr<float>(),
                  grad.const_data_ptr(),
                  *grad_dtype,
                  exp_avg.mutable_data_ptr<float>(),
                  exp_avg_sq.mutable_data_ptr<float>(),
                  is_given(low_precision) ? low_precision->mutable_data_ptr() : nullptr,
                  *low_dtype,
                  optional_float(grad_scale),
                  optional_float(found_inf),
                  args.steps.data()};
  return args;
}

std::optional<SumArguments> sum_shards_arguments(const at::Tensor& out, at::TensorList shards) {
  check_sum_shards(out, shards);
  const std::optional<DType> out_dtype = kernel_dtype(out.scalar_type());
  const std::optional<DType> shard_dtype = kernel_dtype(shards[0].scalar_type());
  if (!out_dtype.has_value() || !shard_dtype.has_value()) {
    return std::nullopt;
  }
  SumArguments args{*out_dtype, *shard_dtype, {}};
  args.shards.reserve(shards.size());
  for (const at::Tensor& shard : shards) {
    args.shards.push_back(shard.const_data_ptr());
  }
  return args;
}

}  // namespace zerocore::ops
