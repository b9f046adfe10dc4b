// The last, incomplete sixteen elements of a range. Compiled per instruction set (see
// lanes_portable.h).
#pragma once

#include <cstdint>

namespace zerocore::kernels::ZEROCORE_LANES {

inline int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }

// A copy padded with zeros to the size of the lanes: tails run the code of whole lanes, so the bits
// of an element do not depend on where a range ends.
template <class T>
struct Padded {
  T values[16];

  Padded() = default;
  Padded(const T* from, int64_t n) {
    for (int64_t i = 0; i < 16; ++i) values[i] = i < n ? from[i] : T{};
  }
  void copy_to(T* to, int64_t n) const {
    for (int64_t i = 0; i < n; ++i) to[i] = values[i];
  }
};

}  // namespace zerocore::kernels::ZEROCORE_LANES
