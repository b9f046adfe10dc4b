// The operators on the CPU, over csrc/kernels and torch's thread pool.

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "kernels/adamw.h"
#include "kernels/norm.h"
#include "kernels/pack.h"
#include "kernels/reduce.h"
#include "ops/arguments.h"
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

void pack_cpu(const at::Tensor& out, const OptionalTensors& inputs, at::IntArrayRef offsets,
              double scale) {
  const PackArguments args = pack_arguments(out, inputs, offsets, scale);
  switch (args.way) {
    case PackArguments::Way::bytes:
      return kernels::pack_bytes(out.mutable_data_ptr(), static_cast<int64_t>(out.element_size()),
                                 out.numel(), args.sources.data(), args.count(), torch_threads());
    case PackArguments::Way::cast:
      return kernels::pack(out.mutable_data_ptr(), args.out_dtype, out.numel(), args.sources.data(),
                           args.count(), scale, torch_threads());
    case PackArguments::Way::composite:
      return composite::pack_(out, inputs, offsets, scale);
  }
}

void fused_adamw_cpu(const at::Tensor& param, const at::Tensor& grad, const at::Tensor& exp_avg,
                     const at::Tensor& exp_avg_sq, const std::optional<at::Tensor>& low_precision,
                     const at::Tensor& ranges, const at::Tensor& hyper, at::TensorList steps,
                     const std::optional<at::Tensor>& grad_scale,
                     const std::optional<at::Tensor>& found_inf) {
  const std::optional<AdamWArguments> args = adamw_arguments(
      param, grad, exp_avg, exp_avg_sq, low_precision, ranges, hyper, steps, grad_scale, found_inf);
  if (!args.has_value()) {
    composite::fused_adamw_(param, grad, exp_avg, exp_avg_sq, low_precision, ranges, hyper, steps,
                            grad_scale, found_inf);
    return;
  }
  kernels::fused_adamw(args->tensors, args->segments.data(), args->count(), torch_threads());
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
  const std::optional<SumArguments> args = sum_shards_arguments(out, shards);
  if (!args.has_value()) {
    composite::sum_shards_(out, shards, accumulate);
    return;
  }
  kernels::sum_shards(out.mutable_data_ptr(), args->out_dtype, args->shards.data(), args->count(),
                      args->shard_dtype, out.numel(), accumulate, torch_threads());
}

TORCH_LIBRARY_IMPL(zerocore, CPU, m) {
  m.impl("pack_", pack_cpu);
  m.impl("fused_adamw_", fused_adamw_cpu);
  m.impl("sumsq", sumsq_cpu);
  m.impl("sum_shards_", sum_shards_cpu);
}

}  // namespace
}  // namespace zerocore::ops
