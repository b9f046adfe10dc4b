// Views of fake-CUDA tensors as CPU and as meta tensors, for the operator fallback.
#pragma once
#include <ATen/ATen.h>
#include <ATen/core/stack.h>

#include <unordered_map>

namespace cuda_sim_ops {

// Applies f to every tensor of an argument or result, in lists too. Undefined tensors stay as they
// are.
template <class F>
c10::IValue map_tensors(const c10::IValue& value, F f) {
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

template <class F>
void for_each_tensor(const c10::IValue& value, F f) {
  map_tensors(value, [&](const at::Tensor& t) {
    f(t);
    return t;
  });
}

// Replaces tensors one for one: the same tensor always becomes the same replacement, so that an
// operator sees its arguments alias each other as they really do, and a result that is an argument
// can be recognised.
class Replacement {
 public:
  virtual ~Replacement() = default;
  at::Tensor operator()(const at::Tensor& t);
  // The original of a replacement; undefined for any other tensor.
  at::Tensor original(const at::Tensor& replaced) const;
  const std::vector<std::pair<at::Tensor, at::Tensor>>& pairs() const {
    return pairs_;
  }  // original, replacement

 protected:
  virtual at::Tensor make(const at::Tensor& t) = 0;

 private:
  std::unordered_map<c10::TensorImpl*, at::Tensor> by_original_;
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs_;
};

// CPU tensors over the same bytes as CUDA tensors. They own nothing: like a kernel's pointers, they
// stay valid as long as the memory does. CPU tensors are copied if copy_cpu is set (a deferred
// operator must see their value as it is now) and passed through otherwise.
class CpuAliases : public Replacement {
 public:
  CpuAliases(bool resizable, bool copy_cpu) : resizable_(resizable), copy_cpu_(copy_cpu) {}

 protected:
  at::Tensor make(const at::Tensor& t) override;

 private:
  bool resizable_, copy_cpu_;
  std::unordered_map<c10::StorageImpl*, c10::Storage> storages_;
};

// Tensors of the same geometry without data, to find out what an operator will return.
class MetaTensors : public Replacement {
 protected:
  at::Tensor make(const at::Tensor& t) override;
};

}  // namespace cuda_sim_ops
