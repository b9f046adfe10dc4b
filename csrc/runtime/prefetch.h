// Tensors of which little is in the caches, as after a backward: asking for all of them before
// looking at the first lets the processor fetch them together, not one after another.
#pragma once

#include <ATen/core/Tensor.h>

namespace zerocore {

inline void prefetch_bytes(const void* object, size_t begin, size_t end) {
  const char* bytes = static_cast<const char*>(object);
  for (size_t at = begin; at < end; at += 64) __builtin_prefetch(bytes + at);
  __builtin_prefetch(bytes + end - 1);
}

// A tensor's storage and geometry.
inline void prefetch_geometry(const at::Tensor& tensor) {
  prefetch_bytes(tensor.unsafeGetTensorImpl(), 0, sizeof(c10::TensorImpl));
}

// A tensor's storage only; it is in the first members.
inline void prefetch_storage(const at::Tensor& tensor) {
  prefetch_bytes(tensor.unsafeGetTensorImpl(), 0, 32);
}

// Where a tensor's gradient is found: in the first members too.
inline void prefetch_grad(const at::Tensor& tensor) {
  const void* meta = tensor.unsafeGetTensorImpl()->autograd_meta();
  if (meta != nullptr) prefetch_bytes(meta, 0, 48);
}

}  // namespace zerocore
