// The dimensions of a source of pack, reduced to what matters.
#pragma once

#include <cstdint>
#include <vector>

#include "pack.h"

namespace zerocore::kernels {

struct Dim {
  int64_t size;
  int64_t stride;  // in elements
};

// No dimension of size 1, neighbours merged where one stride describes both. Contiguous: no
// dimension at all.
inline std::vector<Dim> merged_dims(const PackSource& source) {
  std::vector<Dim> dims;
  for (int64_t d = 0; d < source.ndim; ++d) {
    const Dim dim{source.sizes[d], source.strides[d]};
    if (dim.size == 1) {
      continue;
    }
    if (!dims.empty() && dims.back().stride == dim.size * dim.stride) {
      dims.back() = Dim{dims.back().size * dim.size, dim.stride};
    } else {
      dims.push_back(dim);
    }
  }
  if (dims.size() == 1 && dims[0].stride == 1) {
    dims.clear();
  }
  return dims;
}

}  // namespace zerocore::kernels
