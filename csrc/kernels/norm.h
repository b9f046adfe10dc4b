// Sum of squares and detection of values that are not finite.
#pragma once

#include <cstdint>

#include "dtype.h"
#include "parallel.h"

namespace zerocore::kernels {

struct SumSquares {
  double sum;
  bool non_finite;  // some element is an infinity or a NaN
};

// Squares and sums are f64. The order of summation is fixed (blocks, and lanes within a block), so
// the bits depend neither on the number of threads nor on the instruction set.
SumSquares sumsq(const void* data, DType dtype, int64_t numel, const Parallel& parallel);

}  // namespace zerocore::kernels
