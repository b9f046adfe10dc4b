#include "ops/checks.h"

#include <ATen/MemoryOverlap.h>
#include <c10/util/Exception.h>

#include <ostream>
#include <string>

namespace zerocore::ops {
namespace {

// A name for error messages: put together only when there is one.
struct Element {
  const char* list;
  size_t index;
};

std::ostream& operator<<(std::ostream& out, const Element& element) {
  return out << element.list << "[" << element.index << "]";
}

template <class Name>
void check_contiguous(const char* op, const Name& name, const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.layout() == at::kStrided && tensor.is_contiguous(), op, ": expected ",
                    name, " to be a contiguous tensor, got shape ", tensor.sizes(),
                    tensor.layout() == at::kStrided ? c10::str(" with strides ", tensor.strides())
                                                    : c10::str(" with layout ", tensor.layout()));
}

void check_flat(const char* op, const char* name, const at::Tensor& tensor) {
  check_contiguous(op, name, tensor);
  TORCH_CHECK_VALUE(tensor.dim() == 1, op, ": expected ", name, " to be 1-D, got shape ",
                    tensor.sizes());
}

template <class Name>
void check_device(const char* op, const Name& name, const at::Tensor& tensor, const char* like_name,
                  const at::Tensor& like) {
  TORCH_CHECK_VALUE(tensor.device() == like.device(), op, ": expected ", name, " on the device of ",
                    like_name, " (", like.device(), "), got ", tensor.device());
}

template <class Name>
void check_numel(const char* op, const Name& name, const at::Tensor& tensor, const char* like_name,
                 int64_t numel) {
  TORCH_CHECK_VALUE(tensor.numel() == numel, op, ": expected ", name, " to have the ", numel,
                    " elements of ", like_name, ", got ", tensor.numel());
}

// A cast that torch would refuse in place: complex to real, floating to integer.
template <class Name>
void check_cast(const char* op, const Name& name, at::ScalarType from, at::ScalarType to) {
  TORCH_CHECK_VALUE(c10::canCast(from, to), op, ": expected ", name,
                    " of a dtype that can be cast to out's (", to, "), got ", from);
}

constexpr const char* kPack = "pack_";
constexpr const char* kAdamW = "fused_adamw_";
constexpr const char* kSumShards = "sum_shards_";

void check_adamw_array(const char* name, const at::Tensor& tensor, const at::Tensor& param) {
  check_flat(kAdamW, name, tensor);
  check_device(kAdamW, name, tensor, "param", param);
  check_numel(kAdamW, name, tensor, "param", param.numel());
  TORCH_CHECK_VALUE(tensor.is_floating_point(), kAdamW, ": expected ", name,
                    " to be floating point, got ", tensor.scalar_type());
}

template <class Name>
void check_one_float(const Name& name, const at::Tensor& tensor, const at::Tensor& param) {
  check_device(kAdamW, name, tensor, "param", param);
  TORCH_CHECK_VALUE(tensor.numel() == 1 && tensor.scalar_type() == at::kFloat, kAdamW,
                    ": expected ", name, " to be one float32 element, got shape ", tensor.sizes(),
                    " of ", tensor.scalar_type());
}

void check_optional_float(const char* name, const std::optional<at::Tensor>& tensor,
                          const at::Tensor& param) {
  if (tensor.has_value() && tensor->defined()) {
    check_one_float(name, *tensor, param);
  }
}

void check_steps(at::TensorList steps, int64_t rows, const at::Tensor& param) {
  TORCH_CHECK_VALUE(static_cast<int64_t>(steps.size()) == rows, kAdamW,
                    ": expected steps to have one tensor per row of ranges (", rows, "), got ",
                    steps.size());
  for (size_t i = 0; i < steps.size(); ++i) {
    check_one_float(Element{"steps", i}, steps[i], param);
  }
}

void check_table(const char* name, const at::Tensor& tensor, at::ScalarType dtype, int64_t rows,
                 int64_t columns) {
  TORCH_CHECK_VALUE(
      tensor.device().is_cpu() && tensor.scalar_type() == dtype && tensor.dim() == 2 &&
          (rows < 0 || tensor.size(0) == rows) && tensor.size(1) == columns,
      kAdamW, ": expected ", name, " to be a CPU ", dtype, " tensor of shape [",
      rows < 0 ? std::string("k") : std::to_string(rows), ", ", columns, "], got shape ",
      tensor.sizes(), " of ", tensor.scalar_type(), " on ", tensor.device());
}

std::vector<kernels::AdamWSegment> to_segments(const at::Tensor& ranges, const at::Tensor& hyper,
                                               int64_t numel) {
  const at::Tensor range_rows = ranges.contiguous();
  const at::Tensor hyper_rows = hyper.contiguous();
  const int64_t* range = range_rows.const_data_ptr<int64_t>();
  const double* h = hyper_rows.const_data_ptr<double>();
  std::vector<kernels::AdamWSegment> segments;
  segments.reserve(static_cast<size_t>(ranges.size(0)));
  int64_t last = 0;
  for (int64_t i = 0; i < ranges.size(0); ++i, range += 2, h += 6) {
    TORCH_CHECK_VALUE(range[0] >= last && range[1] >= range[0] && range[1] <= numel, kAdamW,
                      ": expected ranges to be ascending, disjoint and inside [0, ", numel,
                      "), got [", range[0], ", ", range[1], ") in row ", i, " after ", last);
    last = range[1];
    segments.push_back(kernels::AdamWSegment{
        range[0], range[1], kernels::AdamWHyper{h[0], h[1], h[2], h[3], h[4], h[5] != 0.0}});
  }
  return segments;
}

}  // namespace

void check_pack(const at::Tensor& out, const OptionalTensors& inputs, at::IntArrayRef offsets,
                double scale) {
  check_flat(kPack, "out", out);
  TORCH_CHECK_VALUE(inputs.size() == offsets.size(), kPack, ": expected one offset per input (",
                    inputs.size(), "), got ", offsets.size());
  int64_t end = 0;
  for (size_t i = 0; i < offsets.size(); ++i) {
    TORCH_CHECK_VALUE(offsets[i] >= end, kPack, ": expected offsets[", i, "] to be at least ", end,
                      " (ascending, without overlap), got ", offsets[i]);
    end = offsets[i];
    const std::optional<at::Tensor> input = inputs.get(i);
    if (!input.has_value() || !input->defined()) {
      continue;
    }
    const Element name{"inputs", i};
    TORCH_CHECK_VALUE(input->layout() == at::kStrided, kPack, ": expected ", name,
                      " to be a strided tensor, got layout ", input->layout());
    check_device(kPack, name, *input, "out", out);
    check_cast(kPack, name, input->scalar_type(), out.scalar_type());
    TORCH_CHECK_VALUE(scale == 1.0 || at::isFloatingType(out.scalar_type()) ||
                          at::isComplexType(out.scalar_type()),
                      kPack, ": expected a floating point out for scale ", scale, ", got ",
                      out.scalar_type());
    end += input->numel();
    TORCH_CHECK_VALUE(end <= out.numel(), kPack, ": expected ", name, " to end inside out (",
                      out.numel(), " elements), got elements [", offsets[i], ", ", end, ")");
    const at::MemOverlapStatus overlap = at::get_overlap_status(out, *input);
    TORCH_CHECK_VALUE(
        overlap != at::MemOverlapStatus::Full && overlap != at::MemOverlapStatus::Partial, kPack,
        ": expected ", name, " in other memory than out, got an overlap");
  }
  TORCH_CHECK_VALUE(end <= out.numel(), kPack, ": expected offsets inside out (", out.numel(),
                    " elements), got ", end);
}

std::vector<kernels::AdamWSegment> check_fused_adamw(
    const at::Tensor& param, const at::Tensor& grad, const at::Tensor& exp_avg,
    const at::Tensor& exp_avg_sq, const std::optional<at::Tensor>& low_precision,
    const at::Tensor& ranges, const at::Tensor& hyper, at::TensorList steps,
    const std::optional<at::Tensor>& grad_scale, const std::optional<at::Tensor>& found_inf) {
  check_adamw_array("param", param, param);
  check_adamw_array("grad", grad, param);
  check_adamw_array("exp_avg", exp_avg, param);
  check_adamw_array("exp_avg_sq", exp_avg_sq, param);
  if (low_precision.has_value() && low_precision->defined()) {
    check_adamw_array("low_precision", *low_precision, param);
  }
  check_optional_float("grad_scale", grad_scale, param);
  check_optional_float("found_inf", found_inf, param);
  check_table("ranges", ranges, at::kLong, -1, 2);
  check_table("hyper", hyper, at::kDouble, ranges.size(0), 6);
  check_steps(steps, ranges.size(0), param);
  return to_segments(ranges, hyper, param.numel());
}

void check_sumsq(const at::Tensor& x) {
  TORCH_CHECK_VALUE(x.layout() == at::kStrided,
                    "sumsq: expected x to be a strided tensor, got layout ", x.layout());
}

void check_sum_shards(const at::Tensor& out, at::TensorList shards) {
  check_contiguous(kSumShards, "out", out);
  TORCH_CHECK_VALUE(!shards.empty(), kSumShards, ": expected at least one shard, got none");
  const at::ScalarType dtype = shards[0].scalar_type();
  for (size_t i = 0; i < shards.size(); ++i) {
    const Element name{"shards", i};
    check_contiguous(kSumShards, name, shards[i]);
    check_device(kSumShards, name, shards[i], "out", out);
    check_numel(kSumShards, name, shards[i], "out", out.numel());
    TORCH_CHECK_VALUE(shards[i].scalar_type() == dtype, kSumShards, ": expected ", name,
                      " of the dtype of shards[0] (", dtype, "), got ", shards[i].scalar_type());
    check_cast(kSumShards, name, dtype, out.scalar_type());
    TORCH_CHECK_VALUE(
        at::get_overlap_status(out.view(-1), shards[i].view(-1)) != at::MemOverlapStatus::Partial,
        kSumShards, ": expected ", name,
        " to be out itself or in other memory, got a partial overlap");
  }
}

}  // namespace zerocore::ops
