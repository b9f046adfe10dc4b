// How a grid divides its work: tiles, and the block that finishes last.
#pragma once

#include <algorithm>
#include <cstdint>

#include "access.cuh"
#include "kernels/cuda/launch.h"

namespace zerocore::kernels::cuda {

constexpr int64_t kTableBytes = 4096;  // of kernel arguments, on every device

// Blocks that one multiprocessor holds at most: 2,048 threads.
constexpr int64_t kBlocksPerMultiprocessor = 8;

inline unsigned blocks_for(int64_t tiles, const Queue& queue) {
  const int64_t most = queue.multiprocessors * kBlocksPerMultiprocessor;
  return static_cast<unsigned>(std::max<int64_t>(1, std::min(tiles, most)));
}

// [Note: tiles] The tiles of a flat array are the same for all of its ranges, and begin where its
// addresses are multiples of 16 bytes. So every tile but the first and last of a range is whole
// and takes 16-byte accesses; two ranges that meet inside a tile each take their part of it.
template <int kTile>
struct Tiles {
  int64_t origin;  // of tile 0: at most 0

  template <class T>
  static Tiles of(const T* array) {
    const int64_t first = unaligned(array);
    return Tiles{first == 0 ? 0 : first - kTile};
  }

  ZEROCORE_HOST_DEVICE int64_t holding(int64_t element) const { return (element - origin) / kTile; }
  ZEROCORE_HOST_DEVICE int64_t begin(int64_t tile) const { return origin + tile * kTile; }
  // How many hold elements of [start, stop).
  ZEROCORE_HOST_DEVICE int64_t count(int64_t start, int64_t stop) const {
    return start < stop ? holding(stop - 1) - holding(start) + 1 : 0;
  }
};

// The part of a tile that belongs to [start, stop).
struct Part {
  int64_t begin, end;
};

// Tile number `index` of the range [start, stop).
template <int kTile>
__device__ inline Part part_of(const Tiles<kTile>& tiles, int64_t index, int64_t start,
                               int64_t stop) {
  const int64_t begin = tiles.begin(tiles.holding(start) + index);
  const int64_t end = begin + kTile;
  return Part{begin > start ? begin : start, end < stop ? end : stop};
}

// True in all threads of the block that is the last to come here; what the others wrote before is
// visible to it ([Note: ticket]).
__device__ inline bool last_block(unsigned* ticket) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicInc(ticket, gridDim.x - 1) == gridDim.x - 1;  // the last one resets it
    __threadfence();
  }
  __syncthreads();
  return last;
}

}  // namespace zerocore::kernels::cuda
