// The operators of namespace zerocore: their schemas, and C++ functions that call them through the
// dispatcher.
//
// Implementations: cpu.cpp and cuda.cpp (over csrc/kernels), composite.cpp (plain ATen, for every
// other device and dtype), zerocore/ops.py (shapes only, for tracing).

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include "ops/ops.h"

TORCH_LIBRARY(zerocore, m) {
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag};
  m.def("pack_(Tensor(a!) out, Tensor?[] inputs, int[] offsets, float scale=1.0) -> ()", tags);
  m.def(
      "fused_adamw_(Tensor(a!) param, Tensor grad, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, "
      "Tensor(d!)? low_precision, Tensor ranges, Tensor hyper, Tensor(e!)[] steps, "
      "Tensor? grad_scale=None, Tensor? found_inf=None) -> ()",
      tags);
  m.def("sumsq(Tensor x) -> Tensor", tags);
  m.def("sum_shards_(Tensor(a!) out, Tensor[] shards, bool accumulate=False) -> ()", tags);
}

namespace zerocore::ops {
namespace {

// Looked up once per operator.
template <class Signature>
c10::TypedOperatorHandle<Signature> find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

}  // namespace

void pack_(const at::Tensor& out, const OptionalTensors& inputs, at::IntArrayRef offsets,
           double scale) {
  static const auto op = find<decltype(pack_)>("zerocore::pack_");
  op.call(out, inputs, offsets, scale);
}

void fused_adamw_(const at::Tensor& param, const at::Tensor& grad, const at::Tensor& exp_avg,
                  const at::Tensor& exp_avg_sq, const std::optional<at::Tensor>& low_precision,
                  const at::Tensor& ranges, const at::Tensor& hyper, at::TensorList steps,
                  const std::optional<at::Tensor>& grad_scale,
                  const std::optional<at::Tensor>& found_inf) {
  static const auto op = find<decltype(fused_adamw_)>("zerocore::fused_adamw_");
  op.call(param, grad, exp_avg, exp_avg_sq, low_precision, ranges, hyper, steps, grad_scale,
          found_inf);
}

at::Tensor sumsq(const at::Tensor& x) {
  static const auto op = find<decltype(sumsq)>("zerocore::sumsq");
  return op.call(x);
}

void sum_shards_(const at::Tensor& out, at::TensorList shards, bool accumulate) {
  static const auto op = find<decltype(sum_shards_)>("zerocore::sum_shards_");
  op.call(out, shards, accumulate);
}

}  // namespace zerocore::ops
