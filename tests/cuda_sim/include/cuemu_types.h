// The words of the CUDA language that kernels over plain pointers use, for machines without the
// CUDA headers.
#pragma once

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
struct uint3 {
  unsigned x, y, z;
};

using cudaStream_t = struct CUstream_st*;

#define __host__
#define __device__
#define __global__
