// fused_adamw on a CUDA device.
//
// HBM bytes per parameter: 24 (param, exp_avg, exp_avg_sq, each read and written) + 2 or 4 (grad)
// + 2 with a low-precision copy. Measured by tests/cpp/test_cuda_adamw.cpp.

#include <unordered_set>
#include <vector>

#include "access.cuh"
#include "grid.cuh"
#include "kernels/adamw_math.h"
#include "kernels/cuda/launch.h"

namespace zerocore::kernels::cuda {

enum class Low : int8_t { none, bf16, f16 };

constexpr int kAdamWLanes = kLanes<float>;
constexpr int kAdamWVectors = 2;  // per thread and tile: their loads are under way together
constexpr int kAdamWTile = kThreads * kAdamWLanes * kAdamWVectors;
constexpr int kSegments = 48;  // of one launch

// A segment, and what finds it.
struct AdamWRow {
  AdamWSegment segment;
  float* step;
  int32_t first_tile;  // tiles of the segments before it
  bool advances;       // no later segment of the call has the same step count
};

struct AdamWTable {
  float* param;
  const void* grad;
  float* exp_avg;
  float* exp_avg_sq;
  void* low_precision;
  const float* grad_scale;
  const float* found_inf;
  unsigned* ticket;
  int64_t tiles;
  Tiles<kAdamWTile> grid;
  int32_t count;
  Low low;
  AdamWRow rows[kSegments];
};
static_assert(sizeof(AdamWTable) <= kTableBytes, "the table is a kernel argument");

// Rounds new parameters into the low-precision copy. `low` is the same in all threads.
template <int N>
__device__ inline void store_low(const AdamWTable& table, int64_t i, const float (&param)[N]) {
  if (table.low == Low::bf16) {
    Vector<BFloat16, N> out;
    for (int k = 0; k < N; ++k) out.at[k] = to_bfloat16(param[k]);
    store<N>(static_cast<BFloat16*>(table.low_precision) + i, out);
  } else if (table.low == Low::f16) {
    Vector<Half, N> out;
    for (int k = 0; k < N; ++k) out.at[k] = to_half(param[k]);
    store<N>(static_cast<Half*>(table.low_precision) + i, out);
  }
}

// kCount times N neighbouring elements, kThreads * N elements apart: all loads come first.
template <int kCount, int N, class Grad>
__device__ inline void adamw_step(const AdamWTable& table, int64_t begin, float grad_scale,
                                  const AdamWCoefficients<float>& c) {
  Vector<float, N> param[kCount], exp_avg[kCount], exp_avg_sq[kCount];
  Vector<Grad, N> grad[kCount];
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    const int64_t i = begin + k * kThreads * N;
    param[k] = load<N>(table.param + i);
    exp_avg[k] = load<N>(table.exp_avg + i);
    exp_avg_sq[k] = load<N>(table.exp_avg_sq + i);
    grad[k] = load<N>(static_cast<const Grad*>(table.grad) + i);
  }
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
#pragma unroll
    for (int lane = 0; lane < N; ++lane) {
      const float g = ScalarOps::mul(widened(grad[k].at[lane]), grad_scale);
      adamw_element<ScalarOps>(param[k].at[lane], exp_avg[k].at[lane], exp_avg_sq[k].at[lane], g,
                               c);
    }
    const int64_t i = begin + k * kThreads * N;
    store<N>(table.param + i, param[k]);
    store<N>(table.exp_avg + i, exp_avg[k]);
    store<N>(table.exp_avg_sq + i, exp_avg_sq[k]);
    store_low<N>(table, i, param[k].at);
  }
}

template <class Grad>
__global__ void __launch_bounds__(kThreads) adamw_kernel(const __grid_constant__ AdamWTable table) {
  if (table.found_inf != nullptr && *table.found_inf != 0.0f) {
    return;
  }
  __shared__ AdamWCoefficients<float> coefficients[kSegments];
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < table.count) {
    const AdamWRow& row = table.rows[thread];
    coefficients[thread] = adamw_coefficients(row.segment.hyper, *row.step + 1.0f);
  }
  __syncthreads();
  const float grad_scale = table.grad_scale != nullptr ? *table.grad_scale : 1.0f;
  int at = 0;
  for (int64_t tile = blockIdx.x; tile < table.tiles; tile += gridDim.x) {
    while (at + 1 < table.count && tile >= table.rows[at + 1].first_tile) {
      ++at;
    }
    const AdamWRow& row = table.rows[at];
    const Part part =
        part_of(table.grid, tile - row.first_tile, row.segment.start, row.segment.stop);
    const AdamWCoefficients<float> c = coefficients[at];
    if (part.end - part.begin == kAdamWTile) {
      adamw_step<kAdamWVectors, kAdamWLanes, Grad>(table, part.begin + thread * kAdamWLanes,
                                                   grad_scale, c);
    } else {
      for (int64_t i = part.begin + thread; i < part.end; i += kThreads) {
        adamw_step<1, 1, Grad>(table, i, grad_scale, c);
      }
    }
  }
  // All blocks have read the counts by then.
  if (last_block(table.ticket) && thread < table.count && table.rows[thread].advances) {
    *table.rows[thread].step += 1.0f;
  }
}

namespace {

// Of each segment: whether it is the last one with its step count.
std::vector<bool> last_uses(float* const* steps, int64_t count) {
  std::vector<bool> last(static_cast<size_t>(count));
  std::unordered_set<const float*> seen;
  for (size_t i = last.size(); i-- > 0;) {
    last[i] = seen.insert(steps[i]).second;
  }
  return last;
}

void launch(const AdamWTable& table, DType grad_dtype, const Queue& queue) {
  const unsigned blocks = blocks_for(table.tiles, queue);
  switch (grad_dtype) {
    case DType::bf16:
      adamw_kernel<BFloat16><<<blocks, kThreads, 0, queue.stream>>>(table);
      break;
    case DType::f16:
      adamw_kernel<Half><<<blocks, kThreads, 0, queue.stream>>>(table);
      break;
    default:
      adamw_kernel<float><<<blocks, kThreads, 0, queue.stream>>>(table);
  }
}

}  // namespace

void fused_adamw(const AdamWTensors& tensors, const AdamWSegment* segments, int64_t count,
                 const Queue& queue) {
  const Low low = tensors.low_precision == nullptr             ? Low::none
                  : tensors.low_precision_dtype == DType::bf16 ? Low::bf16
                                                               : Low::f16;
  AdamWTable table{tensors.param,
                   tensors.grad,
                   tensors.exp_avg,
                   tensors.exp_avg_sq,
                   tensors.low_precision,
                   tensors.grad_scale,
                   tensors.found_inf,
                   queue.ticket,
                   0,
                   Tiles<kAdamWTile>::of(tensors.param),
                   0,
                   low,
                   {}};
  const std::vector<bool> last = last_uses(tensors.steps, count);
  for (int64_t i = 0; i < count; ++i) {
    const AdamWSegment& segment = segments[i];
    table.rows[table.count++] = AdamWRow{
        segment, tensors.steps[i], static_cast<int32_t>(table.tiles), last[static_cast<size_t>(i)]};
    table.tiles += table.grid.count(segment.start, segment.stop);
    if (table.count == kSegments || i + 1 == count) {
      launch(table, tensors.grad_dtype, queue);
      table.count = 0;
      table.tiles = 0;
    }
  }
}

}  // namespace zerocore::kernels::cuda
