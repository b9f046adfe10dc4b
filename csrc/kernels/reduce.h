// The local half of a reduce-scatter that is done as an exchange: sum the received shards.
#pragma once

#include <cstdint>

#include "dtype.h"
#include "parallel.h"

namespace zerocore::kernels {

// s = shards[0] + shards[1] + ... + shards[count - 1], in this order, in fp32 (f64 for f64 shards),
// rounded once to the shards' dtype; then out = s, or out = out + s with `accumulate` (in fp32, or
// f64 when out is f64). count >= 1. out may be one of the shards (the same address and dtype) but
// may not overlap one partly.
void sum_shards(void* out, DType out_dtype, const void* const* shards, int64_t count,
                DType shard_dtype, int64_t numel, bool accumulate, const Parallel& parallel);

}  // namespace zerocore::kernels
