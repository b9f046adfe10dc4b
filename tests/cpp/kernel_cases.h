// What the kernel tests share: buffers of any dtype and alignment, instruction sets, threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "check.h"
#include "kernels/dtype.h"
#include "kernels/isa.h"
#include "kernels/parallel.h"

namespace zerocore::test {

using kernels::DType;
using kernels::Isa;

constexpr DType kDTypes[] = {DType::f32, DType::bf16, DType::f16, DType::f64};

// Runs `function` on every instruction set of this machine, then puts back the one in use.
template <class Function>
void on_every_isa(const Function& function) {
  const Isa before = kernels::active_isa();
  for (const Isa isa : {Isa::portable, Isa::avx2, Isa::avx512}) {
    if (kernels::isa_supported(isa)) {
      kernels::set_isa(isa);
      function();
    }
  }
  kernels::set_isa(before);
}

// Three threads; every piece has exactly `grain` items or is the last one.
inline kernels::Parallel threads() {
  return {[](void*, int64_t items, int64_t grain, kernels::Parallel::Body body, const void* state) {
            constexpr int64_t kThreads = 3;
            std::vector<std::thread> pool;
            for (int64_t t = 0; t < kThreads; ++t) {
              pool.emplace_back([=] {
                for (int64_t at = t * grain; at < items; at += kThreads * grain) {
                  body(state, at, std::min(items, at + grain));
                }
              });
            }
            for (std::thread& thread : pool) {
              thread.join();
            }
          },
          nullptr};
}

// How to run a kernel on n elements. Fewer than a block are one piece anyway: starting threads
// would only cost time.
inline std::vector<kernels::Parallel> ways(int64_t n) {
  std::vector<kernels::Parallel> out = {kernels::serial()};
  if (n >= 4096) {
    out.push_back(threads());
  }
  return out;
}

// n elements that start `shift` elements after the beginning of an allocation and end exactly with
// it, so that a sanitizer sees the first access behind them.
class Buffer {
 public:
  Buffer(DType dtype, int64_t n, int64_t shift = 0)
      : dtype_(dtype),
        n_(n),
        shift_(shift),
        bytes_(new char[static_cast<size_t>((n + shift) * element_size(dtype))]) {
    std::memset(bytes_.get(), 0x5a, static_cast<size_t>((n + shift) * element_size(dtype)));
  }
  Buffer(const Buffer& other) : Buffer(other.dtype_, other.n_, other.shift_) {
    std::memcpy(bytes_.get(), other.bytes_.get(),
                static_cast<size_t>((n_ + shift_) * element_size(dtype_)));
  }

  void* data() { return address(0); }
  const void* data() const { return address(0); }
  template <class T>
  T* as() {
    return static_cast<T*>(data());
  }
  DType dtype() const { return dtype_; }
  int64_t size() const { return n_; }

  double get(int64_t i) const {
    switch (dtype_) {
      case DType::f32:
        return read<float>(i);
      case DType::bf16:
        return kernels::to_float(read<kernels::BFloat16>(i));
      case DType::f16:
        return kernels::to_float(read<kernels::Half>(i));
      default:
        return read<double>(i);
    }
  }
  // Rounds as the kernels do: f64 to a 16-bit type by way of fp32.
  void set(int64_t i, double value) {
    switch (dtype_) {
      case DType::f32:
        return write(i, static_cast<float>(value));
      case DType::bf16:
        return write(i, kernels::to_bfloat16(static_cast<float>(value)));
      case DType::f16:
        return write(i, kernels::to_half(static_cast<float>(value)));
      default:
        return write(i, value);
    }
  }
  void fill(std::mt19937& random, double scale = 1.0) {
    std::normal_distribution<double> normal(0.0, scale);
    for (int64_t i = 0; i < n_; ++i) {
      set(i, normal(random));
    }
  }
  // The bits of element i.
  uint64_t bits(int64_t i) const {
    uint64_t out = 0;
    std::memcpy(&out, address(i), static_cast<size_t>(element_size(dtype_)));
    return out;
  }

 private:
  char* address(int64_t i) const { return bytes_.get() + (shift_ + i) * element_size(dtype_); }
  template <class T>
  T read(int64_t i) const {
    T value;
    std::memcpy(&value, address(i), sizeof(T));
    return value;
  }
  template <class T>
  void write(int64_t i, T value) {
    std::memcpy(address(i), &value, sizeof(T));
  }

  DType dtype_;
  int64_t n_;
  int64_t shift_;
  std::unique_ptr<char[]> bytes_;
};

inline void check_same_bits(const Buffer& actual, const Buffer& expected, const char* what) {
  CHECK_EQ(actual.size(), expected.size());
  for (int64_t i = 0; i < actual.size(); ++i) {
    if (actual.bits(i) != expected.bits(i)) {
      std::cerr << what << " on " << kernels::isa_name(kernels::active_isa()) << ", element " << i
                << " of " << actual.size() << " (" << kernels::dtype_name(actual.dtype()) << ")\n";
      CHECK_EQ(actual.get(i), expected.get(i));
      CHECK_EQ(actual.bits(i), expected.bits(i));
    }
  }
}

// Sizes around the sixteen lanes and the blocks of the kernels.
inline std::vector<int64_t> sizes() {
  std::vector<int64_t> out;
  for (int64_t n = 0; n <= 35; ++n) {
    out.push_back(n);
  }
  for (const int64_t n : {63, 64, 65, 500, 4095, 4096, 4097, 8191, 8192, 8193, 40001}) {
    out.push_back(n);
  }
  return out;
}

}  // namespace zerocore::test
