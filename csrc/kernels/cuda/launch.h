// The kernels on a CUDA device: the same meaning and, where not said otherwise, the same bits as on
// the CPU (../adamw.h, ../pack.h, ../norm.h, ../reduce.h). All pointers are to memory of the
// device.
//
// Nothing here waits for the device. A call is one launch, unless its table of segments or sources
// is too long for the 4 KB of kernel arguments: then it is as many as the table fills. The caller
// checks for errors of the launch (cudaGetLastError).
#pragma once

#include <cstdint>

#include "kernels/adamw.h"
#include "kernels/dtype.h"
#include "kernels/pack.h"

struct CUstream_st;

namespace zerocore::kernels::cuda {

// [Note: ticket] The last block of a grid to finish does what needs all others to be done: it knows
// itself by the number it draws from a counter in device memory. The counter is zero before a
// launch and again after it, so one serves all launches of a stream; launches that may run at the
// same time need one each.
struct Queue {
  CUstream_st* stream;  // a cudaStream_t
  int multiprocessors;  // of the device: a grid is no larger than keeps them busy
  unsigned* ticket;     // used by fused_adamw and sumsq
};

// `tensors.steps` itself is in host memory.
void fused_adamw(const AdamWTensors& tensors, const AdamWSegment* segments, int64_t count,
                 const Queue& queue);

// `sources`, their sizes and their strides are in host memory. A NaN that is scaled or changes its
// width stays a NaN; which one is up to the device.
void pack(void* out, DType out_dtype, int64_t out_numel, const PackSource* sources, int64_t count,
          double scale, const Queue& queue);
void pack_bytes(void* out, int64_t element_size, int64_t out_numel, const PackSource* sources,
                int64_t count, const Queue& queue);

// Sets out[0] to the sum of squares and out[1] to 1 if an element is not finite, else to 0. The
// order of summation depends on numel and dtype only, and is another than the CPU's. `partials` is
// scratch memory of kSumSqPartials elements.
constexpr int64_t kSumSqPartials = 2048;
void sumsq(double* out, const void* data, DType dtype, int64_t numel, double* partials,
           const Queue& queue);

// `shards` is in host memory; count is at most kMaxShards.
constexpr int64_t kMaxShards = 480;
void sum_shards(void* out, DType out_dtype, const void* const* shards, int64_t count,
                DType shard_dtype, int64_t numel, bool accumulate, const Queue& queue);

}  // namespace zerocore::kernels::cuda
