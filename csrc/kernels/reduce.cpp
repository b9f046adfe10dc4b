#include "reduce.h"

#include <algorithm>

#include "loops.h"

namespace zerocore::kernels {
namespace {

constexpr int64_t kBlock = 4096;  // elements
constexpr int64_t kGrain = 8;     // blocks

}  // namespace

void sum_shards(void* out, DType out_dtype, const void* const* shards, int64_t count,
                DType shard_dtype, int64_t numel, bool accumulate, const Parallel& parallel) {
  const Loops::SumShards sum =
      loops().sum_shards[static_cast<int>(shard_dtype)][static_cast<int>(out_dtype)];
  parallel((numel + kBlock - 1) / kBlock, kGrain, [&](int64_t begin, int64_t end) {
    sum(out, shards, count, begin * kBlock, std::min(end * kBlock, numel), accumulate);
  });
}

}  // namespace zerocore::kernels
