// Inner loop of sumsq. Compiled per instruction set (see lanes_portable.h).
#pragma once

#include "prefetch.h"
#include "tail.h"

namespace zerocore::kernels::ZEROCORE_LANES {

// Two accumulators of sixteen lanes hide the latency of the fma. Squares of fp32 and narrower
// values are exact in f64 and their sum cannot overflow there, so it is finite if and only if all
// elements are.
template <class In>
double sumsq(const void* in_data, int64_t n, bool* non_finite) {
  const In* in = static_cast<const In*>(in_data);
  const F64 zero = F64::splat(0.0);
  F64 even = zero, odd = zero;
  F64 poison = zero;  // NaN once an f64 element is not finite
  const auto add = [&](F64& sum, F64 x) {
    sum = F64::fma(x, x, sum);
    if (IsDouble<In>::value) {
      poison = F64::fma(x, zero, poison);
    }
  };
  int64_t i = 0;
  while (i + 2 * F64::kSize <= n) {
    prefetch_page(in + i);
    const int64_t stop = min(i + kPageElements, n);
    for (; i + 2 * F64::kSize <= stop; i += 2 * F64::kSize) {
      add(even, F64::load(in + i));
      add(odd, F64::load(in + i + F64::kSize));
    }
  }
  for (int64_t k = 0; i < n; i += F64::kSize, ++k) {
    const Padded<In> x(in + i, n - i);
    add(k == 0 ? even : odd, F64::load(x.values));
  }

  double lanes[F64::kSize], marks[F64::kSize];
  F64::add(even, odd).store(lanes);
  poison.store(marks);
  double sum = 0.0;
  double mark = 0.0;
  for (int k = 0; k < F64::kSize; ++k) {
    sum += lanes[k];
    mark += IsDouble<In>::value ? marks[k] : lanes[k] * 0.0;
  }
  if (!(mark == 0.0)) {
    *non_finite = true;
  }
  return sum;
}

}  // namespace zerocore::kernels::ZEROCORE_LANES
