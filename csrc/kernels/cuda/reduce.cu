// sum_shards on a CUDA device.
//
// HBM bytes per element: count * its size in a shard + its size in out (twice that to accumulate).
// Measured by tests/cpp/test_cuda_reduce.cpp.

#include "access.cuh"
#include "grid.cuh"
#include "kernels/cuda/launch.h"

namespace zerocore::kernels::cuda {

struct SumTable {
  void* out;
  int64_t numel;
  int64_t tiles;
  int64_t origin;
  int32_t count;
  bool accumulate;
  const void* shards[kMaxShards];
};
static_assert(sizeof(SumTable) <= kTableBytes, "the table is a kernel argument");

constexpr int kSumBatch = 4;  // shards whose loads are under way together

template <class In, class Out>
constexpr int kSumTile = kThreads * kLanes<In, Out>;

// N neighbouring elements.
template <int N, class In, class Out>
__device__ inline void sum_elements(const SumTable& table, int64_t begin) {
  using Value = Scalar<In, Out>;
  Scalar<In> sum[N] = {};
  for (int32_t first = 0; first < table.count; first += kSumBatch) {
    Vector<In, N> x[kSumBatch];
#pragma unroll
    for (int k = 0; k < kSumBatch; ++k) {
      if (first + k < table.count) {
        x[k] = load<N>(static_cast<const In*>(table.shards[first + k]) + begin);
      }
    }
#pragma unroll
    for (int k = 0; k < kSumBatch; ++k) {
      if (first + k < table.count) {
#pragma unroll
        for (int lane = 0; lane < N; ++lane) {
          const Scalar<In> value = widened(x[k].at[lane]);
          // The first one is not added to zero: that would lose the sign of -0.
          sum[lane] = first + k == 0 ? value : sum[lane] + value;
        }
      }
    }
  }
  Out* out = static_cast<Out*>(table.out) + begin;
  Vector<Out, N> result{};
  if (table.accumulate) {
    result = load<N>(out);
  }
#pragma unroll
  for (int lane = 0; lane < N; ++lane) {
    // To the shards' dtype first: what a reduce-scatter in that dtype delivers.
    const Value value = widened(Round<In>::from(sum[lane]));
    const Value before = widened(result.at[lane]);
    result.at[lane] = Round<Out>::from(table.accumulate ? before + value : value);
  }
  store<N>(out, result);
}

template <class In, class Out>
__global__ void __launch_bounds__(kThreads) sum_kernel(const __grid_constant__ SumTable table) {
  constexpr int kTile = kSumTile<In, Out>;
  constexpr int kN = kLanes<In, Out>;
  for (int64_t tile = blockIdx.x; tile < table.tiles; tile += gridDim.x) {
    const int64_t begin = table.origin + tile * kTile;
    if (begin >= 0 && begin + kTile <= table.numel) {
      sum_elements<kN, In, Out>(table, begin + static_cast<int>(threadIdx.x) * kN);
      continue;
    }
    const int64_t end = begin + kTile < table.numel ? begin + kTile : table.numel;
    for (int64_t i = (begin > 0 ? begin : 0) + threadIdx.x; i < end; i += kThreads) {
      sum_elements<1, In, Out>(table, i);
    }
  }
}

namespace {

template <class In, class Out>
void launch(SumTable& table, const Queue& queue) {
  const auto grid = Tiles<kSumTile<In, Out>>::of(static_cast<const Out*>(table.out));
  table.origin = grid.origin;
  table.tiles = grid.count(0, table.numel);
  const unsigned blocks = blocks_for(table.tiles, queue);
  sum_kernel<In, Out><<<blocks, kThreads, 0, queue.stream>>>(table);
}

template <class In>
void launch(SumTable& table, DType out_dtype, const Queue& queue) {
  switch (out_dtype) {
    case DType::f32:
      return launch<In, float>(table, queue);
    case DType::bf16:
      return launch<In, BFloat16>(table, queue);
    case DType::f16:
      return launch<In, Half>(table, queue);
    default:
      return launch<In, double>(table, queue);
  }
}

}  // namespace

void sum_shards(void* out, DType out_dtype, const void* const* shards, int64_t count,
                DType shard_dtype, int64_t numel, bool accumulate, const Queue& queue) {
  if (numel == 0) {
    return;
  }
  SumTable table{out, numel, 0, 0, static_cast<int32_t>(count), accumulate, {}};
  std::copy(shards, shards + count, table.shards);
  switch (shard_dtype) {
    case DType::f32:
      return launch<float>(table, out_dtype, queue);
    case DType::bf16:
      return launch<BFloat16>(table, out_dtype, queue);
    case DType::f16:
      return launch<Half>(table, out_dtype, queue);
    default:
      return launch<double>(table, out_dtype, queue);
  }
}

}  // namespace zerocore::kernels::cuda
