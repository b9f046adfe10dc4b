// The inner loops of the kernels: one table per instruction set.
#pragma once

#include <cstdint>

#include "dtype.h"

namespace zerocore::kernels {

template <class Value>
struct AdamWCoefficients;

struct AdamWArrays {
  float* param;
  const void* grad;
  float* exp_avg;
  float* exp_avg_sq;
  void* low_precision;
  float grad_scale;
  bool stream_low;  // write low_precision past the caches; false without one
};

// Tables are indexed by DType.
struct Loops {
  // [source][out]: out[i] = cast(in[i] * scale) for i in [0, n).
  using Convert = void (*)(void* out, const void* in, int64_t n, double scale);
  Convert convert[kDTypeCount][kDTypeCount];

  // [grad][low_precision] over elements [begin, end); low_precision f32 stands for none.
  using AdamW = void (*)(const AdamWArrays& arrays, const AdamWCoefficients<float>& coefficients,
                         int64_t begin, int64_t end);
  AdamW adamw[3][3];

  // [source] over one block of n elements; returns the sum and sets *non_finite if it finds one.
  using SumSq = double (*)(const void* in, int64_t n, bool* non_finite);
  SumSq sumsq[kDTypeCount];

  // [shards][out] over elements [begin, end).
  using SumShards = void (*)(void* out, const void* const* shards, int64_t count, int64_t begin,
                             int64_t end, bool accumulate);
  SumShards sum_shards[kDTypeCount][kDTypeCount];
};

// The table of the active instruction set.
const Loops& loops();

namespace portable {
extern const Loops kLoops;
}
#if defined(__x86_64__)
namespace avx2 {
extern const Loops kLoops;
}
namespace avx512 {
extern const Loops kLoops;
}
#endif

}  // namespace zerocore::kernels
