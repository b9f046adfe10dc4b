// What the tests of pack on CPU and CUDA share: tensors of any strides, and what packing them
// gives.
#pragma once

#include <algorithm>

#include "kernel_cases.h"
#include "kernels/pack.h"

namespace zerocore::test {

using kernels::PackSource;

// A tensor with its own memory: `reach` elements, of which the strides select some.
struct Tensor {
  Buffer memory;
  std::vector<int64_t> sizes, strides;

  int64_t numel() const {
    int64_t n = 1;
    for (const int64_t size : sizes) n *= size;
    return n;
  }
  // Place in memory of the element with this logical index.
  int64_t place(int64_t index) const {
    int64_t at = 0;
    for (size_t d = sizes.size(); d-- > 0;) {
      at += index % sizes[d] * strides[d];
      index /= sizes[d];
    }
    return at;
  }
  PackSource source(int64_t offset) const {
    return {memory.data(), memory.dtype(), offset, numel(), static_cast<int64_t>(sizes.size()),
            sizes.data(),  strides.data()};
  }
};

inline Tensor make(DType dtype, std::vector<int64_t> sizes, std::vector<int64_t> strides,
                   int64_t shift, std::mt19937& random) {
  int64_t reach = 1;
  for (size_t d = 0; d < sizes.size(); ++d) {
    reach = sizes[d] == 0 ? 0 : reach + (sizes[d] - 1) * strides[d];
    if (reach == 0) break;
  }
  Tensor out{Buffer(dtype, reach, shift), std::move(sizes), std::move(strides)};
  out.memory.fill(random);
  return out;
}

// Dimensions in random order in memory, with gaps, repeats (stride 0) and sizes of one among them.
inline Tensor random_tensor(DType dtype, std::mt19937& random) {
  const auto pick = [&](int64_t n) {
    return static_cast<int64_t>(random() % static_cast<uint64_t>(n));
  };
  const size_t ndim = static_cast<size_t>(pick(5));
  std::vector<int64_t> sizes(ndim), strides(ndim), order(ndim);
  for (size_t d = 0; d < ndim; ++d) {
    sizes[d] = ndim == 1 ? pick(3000) : ndim == 2 ? 1 + pick(90) : 1 + pick(9);
    order[d] = static_cast<int64_t>(d);
  }
  std::shuffle(order.begin(), order.end(), random);
  int64_t stride = pick(4) == 0 ? 2 : 1;
  for (const int64_t d : order) {
    strides[static_cast<size_t>(d)] = pick(8) == 0 ? 0 : stride;
    stride *= std::max<int64_t>(sizes[static_cast<size_t>(d)], 1);
    stride += pick(3) == 0 ? pick(4) : 0;
  }
  return make(dtype, sizes, strides, pick(17), random);
}

// Tensors one after the other with gaps between them; some are nullptr.
struct Packing {
  std::vector<PackSource> sources;
  int64_t numel;

  Packing(const std::vector<Tensor>& tensors, std::mt19937& random)
      : numel(static_cast<int64_t>(random() % 3)) {
    for (const Tensor& tensor : tensors) {
      PackSource source = tensor.source(numel);
      if (random() % 6 == 0) {
        source.data = nullptr;
      }
      sources.push_back(source);
      numel += source.numel + (random() % 3 == 0 ? 0 : static_cast<int64_t>(random() % 40));
    }
  }

  int64_t count() const { return static_cast<int64_t>(sources.size()); }

  // One element at a time.
  Buffer expected(const std::vector<Tensor>& tensors, DType to, double scale, int64_t shift) const {
    Buffer out(to, numel, shift);
    for (int64_t i = 0; i < numel; ++i) {
      out.set(i, 0.0);
    }
    for (size_t k = 0; k < tensors.size(); ++k) {
      const bool wide = to == DType::f64 || tensors[k].memory.dtype() == DType::f64;
      for (int64_t i = 0; i < sources[k].numel && sources[k].data != nullptr; ++i) {
        const double x = tensors[k].memory.get(tensors[k].place(i));
        out.set(sources[k].offset + i,
                wide ? x * scale : static_cast<float>(x) * static_cast<float>(scale));
      }
    }
    return out;
  }
};

}  // namespace zerocore::test
