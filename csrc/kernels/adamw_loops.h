// Inner loop of fused_adamw. Compiled per instruction set (see lanes_portable.h).
#pragma once

#include "adamw_math.h"
#include "tail.h"

namespace zerocore::kernels::ZEROCORE_LANES {

struct None {};  // no low-precision copy: its pointer is null

inline AdamWCoefficients<F32> splat(const AdamWCoefficients<float>& c) {
  return {F32::splat(c.param_factor),
          F32::splat(c.l2),
          F32::splat(c.lerp_weight),
          F32::splat(c.beta2),
          F32::splat(c.one_minus_beta2),
          F32::splat(c.root_correction2),
          F32::splat(c.eps),
          F32::splat(c.negative_step),
          c.has_l2,
          c.lerp_from_grad};
}

// Stream: past the caches, to a multiple of 32 bytes.
template <bool Stream, class Low>
inline void store_low(F32 value, Low* to) {
  if constexpr (Stream) {
    value.stream(to);
  } else {
    value.store(to);
  }
}
template <bool>
inline void store_low(F32, None*) {}

template <class T>
inline T* at(T* data, int64_t i) {
  return data + i;
}
inline None* at(None*, int64_t) { return nullptr; }

template <class T>
inline void copy_low(const Padded<T>& from, T* to, int64_t n) {
  from.copy_to(to, n);
}
inline void copy_low(const Padded<None>&, None*, int64_t) {}

// Elements before the first multiple of 32 bytes.
template <class Low>
inline int64_t unaligned(const Low* low) {
  return static_cast<int64_t>((0 - reinterpret_cast<uintptr_t>(low)) % 32 / sizeof(Low));
}

// One step on sixteen elements.
template <bool Stream, class Grad, class Low>
inline void adamw_lanes(float* param, const Grad* grad, float* exp_avg, float* exp_avg_sq, Low* low,
                        F32 grad_scale, const AdamWCoefficients<F32>& c) {
  F32 p = F32::load(param);
  F32 m = F32::load(exp_avg);
  F32 v = F32::load(exp_avg_sq);
  adamw_element<F32>(p, m, v, F32::mul(F32::load(grad), grad_scale), c);
  p.store(param);
  m.store(exp_avg);
  v.store(exp_avg_sq);
  store_low<Stream>(p, low);
}

// The same on fewer: n elements.
template <class Grad, class Low>
inline void adamw_padded(float* param, const Grad* grad, float* exp_avg, float* exp_avg_sq,
                         Low* low, int64_t n, F32 grad_scale, const AdamWCoefficients<F32>& c) {
  Padded<float> p(param, n), m(exp_avg, n), v(exp_avg_sq, n);
  const Padded<Grad> g(grad, n);
  Padded<Low> l;
  adamw_lanes<false>(p.values, g.values, m.values, v.values, l.values, grad_scale, c);
  p.copy_to(param, n);
  m.copy_to(exp_avg, n);
  v.copy_to(exp_avg_sq, n);
  copy_low(l, low, n);
}

template <bool Stream, class Grad, class Low>
inline void adamw_range(const AdamWArrays& arrays, const AdamWCoefficients<float>& coefficients,
                        int64_t begin, int64_t end) {
  float* const param = arrays.param;
  const Grad* const grad = static_cast<const Grad*>(arrays.grad);
  float* const exp_avg = arrays.exp_avg;
  float* const exp_avg_sq = arrays.exp_avg_sq;
  Low* const low = static_cast<Low*>(arrays.low_precision);
  const F32 grad_scale = F32::splat(arrays.grad_scale);
  const AdamWCoefficients<F32> c = splat(coefficients);
  const auto padded = [&](int64_t i, int64_t n) {
    adamw_padded(param + i, grad + i, exp_avg + i, exp_avg_sq + i, at(low, i), n, grad_scale, c);
  };

  int64_t i = begin;
  if constexpr (Stream) {
    i += min(unaligned(low + begin), end - begin);
    padded(begin, i - begin);
  }
  for (; i + F32::kSize <= end; i += F32::kSize) {
    adamw_lanes<Stream>(param + i, grad + i, exp_avg + i, exp_avg_sq + i, at(low, i), grad_scale,
                        c);
  }
  padded(i, end - i);
  if constexpr (Stream) {
    F32::end_stream();
  }
}

template <class Grad, class Low>
void adamw(const AdamWArrays& arrays, const AdamWCoefficients<float>& coefficients, int64_t begin,
           int64_t end) {
  if constexpr (sizeof(Low) == 2) {
    if (arrays.stream_low) {
      return adamw_range<true, Grad, Low>(arrays, coefficients, begin, end);
    }
  }
  adamw_range<false, Grad, Low>(arrays, coefficients, begin, end);
}

template <class Grad>
constexpr void fill_adamw(Loops::AdamW (&row)[3]) {
  row[0] = adamw<Grad, None>;
  row[1] = adamw<Grad, BFloat16>;
  row[2] = adamw<Grad, Half>;
}

}  // namespace zerocore::kernels::ZEROCORE_LANES
