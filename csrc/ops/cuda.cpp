// The operators on CUDA, over csrc/kernels/cuda, on the current stream. Nothing waits for the
// device. Compiled only where CUDA is built.

#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <map>
#include <mutex>
#include <utility>

#include "kernels/cuda/launch.h"
#include "ops/arguments.h"
#include "ops/checks.h"
#include "ops/composite.h"
#include "ops/ops.h"

namespace zerocore::ops {
namespace {

namespace cuda = kernels::cuda;
using kernels::DType;

// A counter of zero in device memory, for launches on `stream` (kernels/cuda/launch.h, [Note:
// ticket]). Streams keep theirs. What a CUDA graph records gets one of its own, zeroed in the
// graph: the graph may be replayed on another stream, while this one works.
at::Tensor ticket_of(const c10::cuda::CUDAStream& stream) {
  const auto fresh = [&] {
    return at::zeros({1}, at::TensorOptions().dtype(at::kInt).device(stream.device()));
  };
  if (c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None) {
    return fresh();
  }
  using Key = std::pair<c10::DeviceIndex, c10::StreamId>;
  static std::mutex mutex;
  // Never destroyed: at exit, the allocator may be gone before.
  static auto& tickets = *new std::map<Key, at::Tensor>();
  const std::lock_guard<std::mutex> lock(mutex);
  at::Tensor& ticket = tickets[Key(stream.device_index(), stream.id())];
  if (!ticket.defined()) {
    ticket = fresh();
  }
  return ticket;
}

// The current stream of a tensor's device, which is the current device meanwhile.
class Queue {
 public:
  explicit Queue(const at::Tensor& tensor, bool ticket = false)
      : guard_(tensor.device()), stream_(c10::cuda::getCurrentCUDAStream()) {
    if (ticket) {
      ticket_ = ticket_of(stream_);
    }
  }

  operator cuda::Queue() const {
    return cuda::Queue{
        stream_.stream(), at::cuda::getCurrentDeviceProperties()->multiProcessorCount,
        ticket_.defined() ? reinterpret_cast<unsigned*>(ticket_.data_ptr<int>()) : nullptr};
  }

 private:
  c10::cuda::CUDAGuard guard_;
  c10::cuda::CUDAStream stream_;
  at::Tensor ticket_;
};

void pack_cuda(const at::Tensor& out, const OptionalTensors& inputs, at::IntArrayRef offsets,
               double scale) {
  const PackArguments args = pack_arguments(out, inputs, offsets, scale);
  const Queue queue(out);
  switch (args.way) {
    case PackArguments::Way::bytes:
      cuda::pack_bytes(out.mutable_data_ptr(), static_cast<int64_t>(out.element_size()),
                       out.numel(), args.sources.data(), args.count(), queue);
      break;
    case PackArguments::Way::cast:
      cuda::pack(out.mutable_data_ptr(), args.out_dtype, out.numel(), args.sources.data(),
                 args.count(), scale, queue);
      break;
    case PackArguments::Way::composite:
      return composite::pack_(out, inputs, offsets, scale);
  }
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

void fused_adamw_cuda(const at::Tensor& param, const at::Tensor& grad, const at::Tensor& exp_avg,
                      const at::Tensor& exp_avg_sq, const std::optional<at::Tensor>& low_precision,
                      const at::Tensor& ranges, const at::Tensor& hyper, at::TensorList steps,
                      const std::optional<at::Tensor>& grad_scale,
                      const std::optional<at::Tensor>& found_inf) {
  const std::optional<AdamWArguments> args = adamw_arguments(
      param, grad, exp_avg, exp_avg_sq, low_precision, ranges, hyper, steps, grad_scale, found_inf);
  const Queue queue(param, /*ticket=*/args.has_value());
  if (!args.has_value()) {
    composite::fused_adamw_(param, grad, exp_avg, exp_avg_sq, low_precision, ranges, hyper, steps,
                            grad_scale, found_inf);
    return;
  }
  cuda::fused_adamw(args->tensors, args->segments.data(), args->count(), queue);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

at::Tensor sumsq_cuda(const at::Tensor& x) {
  check_sumsq(x);
  const std::optional<DType> dtype = kernel_dtype(x.scalar_type());
  const Queue queue(x, /*ticket=*/dtype.has_value());
  if (!dtype.has_value()) {
    return composite::sumsq(x);
  }
  const at::Tensor flat = x.contiguous();
  const at::Tensor out = at::empty({2}, x.options().dtype(at::kDouble));
  const at::Tensor partials = at::empty({cuda::kSumSqPartials}, out.options());
  cuda::sumsq(out.mutable_data_ptr<double>(), flat.const_data_ptr(), *dtype, flat.numel(),
              partials.mutable_data_ptr<double>(), queue);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return out;
}

void sum_shards_cuda(const at::Tensor& out, at::TensorList shards, bool accumulate) {
  const std::optional<SumArguments> args = sum_shards_arguments(out, shards);
  const Queue queue(out);
  if (!args.has_value() || args->count() > cuda::kMaxShards) {
    composite::sum_shards_(out, shards, accumulate);
    return;
  }
  cuda::sum_shards(out.mutable_data_ptr(), args->out_dtype, args->shards.data(), args->count(),
                   args->shard_dtype, out.numel(), accumulate, queue);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

TORCH_LIBRARY_IMPL(zerocore, CUDA, m) {
  m.impl("pack_", pack_cuda);
  m.impl("fused_adamw_", fused_adamw_cuda);
  m.impl("sumsq", sumsq_cuda);
  m.impl("sum_shards_", sum_shards_cuda);
}

}  // namespace
}  // namespace zerocore::ops
