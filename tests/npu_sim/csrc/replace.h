// The tensors of a call replaced by others: without memory, or CPU tensors over the same memory.
#pragma once
#include <ATen/ATen.h>
#include <c10/core/CPUAllocator.h>

#include <unordered_map>

#include "npu_sim.h"

namespace npu_sim {

using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using Stack = torch::jit::Stack;

inline bool is_npu(const at::Tensor& t) { return t.device().type() == kNpu; }

// ---- replacing the tensors of a call ----

// Applies f to every tensor of an argument or result, in lists too. Undefined tensors stay as they
// are.
template <class F>
IValue map_tensors(const IValue& value, F f) {
  auto one = [&](const at::Tensor& t) { return t.defined() ? f(t) : t; };
  if (value.isTensor()) return one(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> mapped;
    for (at::Tensor t : value.toTensorList()) mapped.push_back(one(t));
    return mapped;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> mapped;
    for (std::optional<at::Tensor> t : value.toOptionalTensorList()) {
      mapped.push_back(t ? std::optional<at::Tensor>(one(*t)) : t);
    }
    return mapped;
  }
  return value;
}

inline std::vector<at::Tensor> tensors_of(const IValue& value) {
  std::vector<at::Tensor> found;
  map_tensors(value, [&](const at::Tensor& t) {
    found.push_back(t);
    return t;
  });
  return found;
}

inline at::Tensor alias_over(const at::Tensor& t, c10::Storage storage) {
  auto alias = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), DispatchKeySet(DispatchKey::CPU), t.dtype());
  alias.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  if (t.is_conj()) alias.unsafeGetTensorImpl()->_set_conj(true);
  if (t.is_neg()) alias.unsafeGetTensorImpl()->_set_neg(true);
  return alias;
}

inline c10::Storage storage_alias(const at::Tensor& t, bool resizable) {
  check_storage(t);
  c10::StorageImpl* from = t.storage().unsafeGetStorageImpl();
  return c10::Storage(c10::Storage::use_byte_size_t(), from->nbytes(),
                      c10::DataPtr(from->mutable_data_ptr().get(), c10::Device(c10::kCPU)),
                      c10::GetCPUAllocator(), resizable);
}

// One for one: the same tensor always becomes the same replacement and shared memory stays shared,
// so that an operator sees its arguments alias each other as they do, and a result that is an
// argument can be recognised.
struct Replacements {
  enum Kind { kMeta, kDeferred, kImmediate } kind;
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs{};  // original, replacement
  std::unordered_map<c10::StorageImpl*, c10::Storage> storages{};

  at::Tensor operator()(const at::Tensor& t) {
    for (auto& [from, to] : pairs) {
      if (from.is_same(t)) return to;
    }
    at::Tensor made = make(t);
    // A Python number in an expression takes part in type promotion differently from a tensor.
    if (t.unsafeGetTensorImpl()->is_wrapped_number())
      made.unsafeGetTensorImpl()->set_wrapped_number(true);
    pairs.emplace_back(t, made);
    return made;
  }
  at::Tensor original(const at::Tensor& replaced) const {
    for (auto& [from, to] : pairs) {
      if (to.is_same(replaced)) return from;
    }
    return {};
  }
  Stack operator()(const Stack& arguments) {
    Stack result;
    c10::Device device(kind == kMeta ? c10::kMeta : c10::kCPU);
    for (const IValue& v : arguments) {
      if (v.isDevice() && v.toDevice().type() == kNpu) {
        result.emplace_back(device);
      } else {
        result.push_back(map_tensors(v, [&](const at::Tensor& t) { return (*this)(t); }));
      }
    }
    return result;
  }

 private:
  at::Tensor make(const at::Tensor& t) {
    if (kind == kMeta) {
      if (t.unsafeGetTensorImpl()->is_wrapped_number())
        return t;  // meta kernels written in Python read its value
      return at::empty_strided(t.sizes(), t.strides(),
                               t.options().device(c10::kMeta).pinned_memory(false));
    }
    if (!is_npu(t))
      return kind == kDeferred ? t.clone()
                               : t;  // a deferred operator must see the value as it is now
    auto [it, is_new] = storages.try_emplace(t.storage().unsafeGetStorageImpl());
    if (is_new) it->second = storage_alias(t, kind == kImmediate);
    return alias_over(t, it->second);
  }
};

}  // namespace npu_sim
