// Ordinary CUDA source: nothing in it knows about the simulator. The kernels cover what needs care
// to match nvcc's names (templates, unnamed namespaces, static kernels) and what the engine must
// emulate (barriers, shuffles, shared memory).
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "kernels_common.cuh"

namespace {

template <typename T>
__global__ void __launch_bounds__(256)
    axpy(const T* __restrict__ x, float* __restrict__ y, float a, int64_t n) {
  const int64_t stride = int64_t(gridDim.x) * blockDim.x;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += stride)
    y[i] += a * to_float(x[i]);
}

}  // namespace

static __global__ void sum_of_squares(const float* x, double* out, int64_t n) {
  __shared__ double partial[8];
  double s = 0;
  for (int64_t i = threadIdx.x; i < n; i += blockDim.x) s += double(x[i]) * x[i];
  for (int offset = 16; offset; offset >>= 1) s += __shfl_down_sync(0xffffffffu, s, offset);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = s;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int i = 1; i < 8; ++i) s += partial[i];
    *out = s;
  }
}

namespace selftest {

__global__ void reverse_scan(const int* x, int* y, int n) {
  extern __shared__ int buffer[];
  const int t = int(threadIdx.x);
  buffer[t] = t < n ? x[t] : 0;
  __syncthreads();
  for (int step = 1; step < int(blockDim.x); step <<= 1) {
    int left = t >= step ? buffer[t - step] : 0;
    __syncthreads();
    buffer[t] += left;
    __syncthreads();
  }
  if (t < n) y[n - 1 - t] = buffer[t];
}

}  // namespace selftest

extern "C" int launch_axpy(const void* x, float* y, float a, int64_t n, int bf16,
                           cudaStream_t stream) {
  const int blocks = int(n / 1024 + 1);
  if (bf16) {
    axpy<__nv_bfloat16><<<blocks, 256, 0, stream>>>(static_cast<const __nv_bfloat16*>(x), y, a, n);
  } else {
    axpy<float><<<blocks, 256, 0, stream>>>(static_cast<const float*>(x), y, a, n);
  }
  return int(cudaGetLastError());
}

extern "C" int launch_sum_of_squares(const float* x, double* out, int64_t n, cudaStream_t stream) {
  sum_of_squares<<<1, 256, 0, stream>>>(x, out, n);
  return int(cudaGetLastError());
}

extern "C" int launch_reverse_scan(const int* x, int* y, int n, cudaStream_t stream) {
  selftest::reverse_scan<<<1, 1024, 1024 * sizeof(int), stream>>>(x, y, n);
  return int(cudaGetLastError());
}
