#include "tensors.h"

#include <c10/core/CPUAllocator.h>

namespace cuda_sim_ops {

at::Tensor Replacement::operator()(const at::Tensor& t) {
  auto [it, is_new] = by_original_.try_emplace(t.unsafeGetTensorImpl());
  if (is_new) {
    it->second = make(t);
    // A Python number in an expression takes part in type promotion differently from a tensor.
    if (t.unsafeGetTensorImpl()->is_wrapped_number())
      it->second.unsafeGetTensorImpl()->set_wrapped_number(true);
    pairs_.emplace_back(t, it->second);
  }
  return it->second;
}

at::Tensor Replacement::original(const at::Tensor& replaced) const {
  for (auto& [from, to] : pairs_) {
    if (to.is_same(replaced)) return from;
  }
  return {};
}

at::Tensor CpuAliases::make(const at::Tensor& t) {
  if (!t.is_cuda()) return copy_cpu_ ? t.clone() : t;
  c10::StorageImpl* from = t.storage().unsafeGetStorageImpl();
  auto [it, is_new] = storages_.try_emplace(from);
  if (is_new) {
    c10::DataPtr data(from->mutable_data(), c10::Device(c10::kCPU));
    it->second = c10::Storage(c10::Storage::use_byte_size_t(), from->nbytes(), std::move(data),
                              c10::GetCPUAllocator(), resizable_);
  }
  c10::DispatchKeySet cpu(c10::DispatchKey::CPU);
  at::Tensor alias =
      at::detail::make_tensor<c10::TensorImpl>(c10::Storage(it->second), cpu, t.dtype());
  alias.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  return alias;
}

at::Tensor MetaTensors::make(const at::Tensor& t) {
  if (t.unsafeGetTensorImpl()->is_wrapped_number())
    return t;  // meta kernels written in Python read its value
  return at::empty_strided(t.sizes(), t.strides(),
                           t.options().device(c10::kMeta).pinned_memory(false));
}

}  // namespace cuda_sim_ops
