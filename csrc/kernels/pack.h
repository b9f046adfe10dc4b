// Gathers a list of tensors into a flat buffer.
#pragma once

#include <cstdint>

#include "dtype.h"
#include "parallel.h"

namespace zerocore::kernels {

// One tensor to pack. It is read in logical row-major order, whatever its strides.
struct PackSource {
  const void* data;  // nullptr: its place is filled with zeros
  DType dtype;       // ignored by pack_bytes
  int64_t offset;    // its first element in the flat buffer
  int64_t numel;
  int64_t ndim;
  const int64_t* sizes;    // [ndim]
  const int64_t* strides;  // [ndim], in elements
};

// out[offset + i] = cast(source[i] * scale) for every source, and 0 everywhere else in out[0,
// out_numel). The product is rounded in fp32 (f64 when the source or out is f64), the cast rounds
// to nearest even (f64 to a 16-bit type by way of fp32, as torch does it). scale 1 into the same
// dtype copies the bytes. Sources are ascending by offset, do not overlap each other in out, and do
// not share memory with it.
void pack(void* out, DType out_dtype, int64_t out_numel, const PackSource* sources, int64_t count,
          double scale, const Parallel& parallel);

// The same for elements of any type, copied as they are. element_size: 1, 2, 4, 8 or 16.
void pack_bytes(void* out, int64_t element_size, int64_t out_numel, const PackSource* sources,
                int64_t count, const Parallel& parallel);

}  // namespace zerocore::kernels
