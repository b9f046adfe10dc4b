// One pass of AdamW or Adam over a flat shard.
#pragma once

#include <cstdint>

#include "adamw_math.h"
#include "dtype.h"
#include "parallel.h"

namespace zerocore::kernels {

// Elements [start, stop) step with the same hyperparameters.
struct AdamWSegment {
  int64_t start;
  int64_t stop;
  AdamWHyper hyper;
};

struct AdamWTensors {
  float* param;
  const void* grad;
  DType grad_dtype;  // f32, bf16 or f16
  float* exp_avg;
  float* exp_avg_sq;
  void* low_precision;        // receives the rounded new parameter; nullptr: none
  DType low_precision_dtype;  // bf16 or f16
  const float* grad_scale;    // the gradient is multiplied by it; nullptr: 1
  const float* found_inf;     // not zero: nothing changes; nullptr: 0
  float* const* steps;        // of each segment: the steps it has taken, advanced by one
};

// Segments are ascending and disjoint; elements outside them stay as they are. Segments may share a
// step count: it advances once. An empty segment only advances its count. An element's bits
// depend on its own inputs only: not on its position, the number of threads or the instruction set.
void fused_adamw(const AdamWTensors& tensors, const AdamWSegment* segments, int64_t count,
                 const Parallel& parallel);

}  // namespace zerocore::kernels
