// sumsq on a CUDA device.
//
// HBM bytes per element: its size. Measured by tests/cpp/test_cuda_norm.cpp.

#include "access.cuh"
#include "grid.cuh"
#include "kernels/cuda/launch.h"

namespace zerocore::kernels::cuda {

// Fixed: the order of summation must not depend on the device. 1,024 blocks fill every one of
// today.
constexpr int64_t kSumSqBlocks = kSumSqPartials / 2;
constexpr int kSumSqVectors = 4;  // loads of a thread that are under way together

// The sum over the block, in thread 0; a fixed tree.
__device__ inline double block_sum(double value) {
  constexpr int kWarp = 32;
  __shared__ double warps[kThreads / kWarp];
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  for (int step = kWarp / 2; step > 0; step /= 2) {
    value += __shfl_down_sync(0xffffffffu, value, step);
  }
  __syncthreads();  // an earlier sum may still be read
  if (lane == 0) {
    warps[threadIdx.x / kWarp] = value;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int k = 1; k < kThreads / kWarp; ++k) {
      value += warps[k];
    }
  }
  return value;
}

// Squares of fp32 and narrower values are exact in f64 and their sum cannot overflow there, so it
// is finite if and only if all elements are. f64 elements need a mark: NaN once one is not finite.
template <class T>
struct SquareSum {
  double sum = 0.0;
  double mark = 0.0;

  __device__ void add(T element) {
    const double x = widened(element);
    sum = ::fma(x, x, sum);
    if (IsDouble<T>::value) {
      mark = ::fma(x, 0.0, mark);
    }
  }
  __device__ void add(const SquareSum& other) {
    sum += other.sum;
    mark += other.mark;
  }
  __device__ double non_finite() const {
    return (IsDouble<T>::value ? mark : sum * 0.0) == 0.0 ? 0.0 : 1.0;
  }
};

template <class T>
__device__ inline SquareSum<T> thread_sum(const T* data, int64_t numel) {
  constexpr int kN = kLanes<T>;
  const int64_t vectors = numel / kN;
  const int64_t threads = static_cast<int64_t>(gridDim.x) * kThreads;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  SquareSum<T> sums[kSumSqVectors];
  int64_t at = thread;
  for (; at + (kSumSqVectors - 1) * threads < vectors; at += kSumSqVectors * threads) {
    Vector<T, kN> x[kSumSqVectors];
#pragma unroll
    for (int k = 0; k < kSumSqVectors; ++k) {
      x[k] = load<kN>(data + (at + k * threads) * kN);
    }
#pragma unroll
    for (int k = 0; k < kSumSqVectors; ++k) {
#pragma unroll
      for (int lane = 0; lane < kN; ++lane) {
        sums[k].add(x[k].at[lane]);
      }
    }
  }
  for (; at < vectors; at += threads) {
    const Vector<T, kN> x = load<kN>(data + at * kN);
#pragma unroll
    for (int lane = 0; lane < kN; ++lane) {
      sums[lane % kSumSqVectors].add(x.at[lane]);
    }
  }
  for (int64_t i = vectors * kN + thread; i < numel; i += threads) {
    sums[0].add(load(data + i));
  }
  for (int k = 1; k < kSumSqVectors; ++k) {
    sums[0].add(sums[k]);
  }
  return sums[0];
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    sumsq_kernel(double* out, const T* data, int64_t numel, double* partials, unsigned* ticket) {
  const SquareSum<T> mine = thread_sum(data, numel);
  const double sum = block_sum(mine.sum);
  const double bad = block_sum(mine.non_finite());
  if (threadIdx.x == 0) {
    partials[2 * blockIdx.x] = sum;
    partials[2 * blockIdx.x + 1] = bad;
  }
  if (!last_block(ticket)) {
    return;
  }
  double total = 0.0;
  double total_bad = 0.0;
  for (unsigned block = threadIdx.x; block < gridDim.x; block += kThreads) {
    total += __ldcg(partials + 2 * block);  // past the L1 cache: other multiprocessors wrote it
    total_bad += __ldcg(partials + 2 * block + 1);
  }
  total = block_sum(total);
  total_bad = block_sum(total_bad);
  if (threadIdx.x == 0) {
    out[0] = total;
    out[1] = total_bad != 0.0 ? 1.0 : 0.0;
  }
}

namespace {

template <class T>
void launch(double* out, const void* data, int64_t numel, double* partials, const Queue& queue) {
  constexpr int64_t kPerBlock = kThreads * kLanes<T> * kSumSqVectors;
  const int64_t wanted = (numel + kPerBlock - 1) / kPerBlock;
  const unsigned blocks =
      static_cast<unsigned>(std::max<int64_t>(1, std::min(wanted, kSumSqBlocks)));
  sumsq_kernel<T><<<blocks, kThreads, 0, queue.stream>>>(out, static_cast<const T*>(data), numel,
                                                         partials, queue.ticket);
}

}  // namespace

void sumsq(double* out, const void* data, DType dtype, int64_t numel, double* partials,
           const Queue& queue) {
  switch (dtype) {
    case DType::f32:
      return launch<float>(out, data, numel, partials, queue);
    case DType::bf16:
      return launch<BFloat16>(out, data, numel, partials, queue);
    case DType::f16:
      return launch<Half>(out, data, numel, partials, queue);
    default:
      return launch<double>(out, data, numel, partials, queue);
  }
}

}  // namespace zerocore::kernels::cuda
