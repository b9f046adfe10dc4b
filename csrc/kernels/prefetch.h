// Help for the processor's prefetchers, which stop at the end of a page. Compiled per instruction
// set (see lanes_portable.h).
#pragma once

#include <cstdint>

namespace zerocore::kernels::ZEROCORE_LANES {

// Elements between two calls of prefetch_page: a page of fp32 values.
constexpr int64_t kPageElements = 1024;

// Fetches the start of the page that follows the next kPageElements: its address is translated and
// the hardware's stream begins before the loop arrives there. The rest is the hardware's.
inline void prefetch_page(const void* from) {
  constexpr uintptr_t kPage = 4096;
  constexpr uintptr_t kLine = 64;
  const uintptr_t page = (reinterpret_cast<uintptr_t>(from) + 2 * kPage - 1) / kPage * kPage;
  for (uintptr_t line = 0; line < 4; ++line) {
    __builtin_prefetch(reinterpret_cast<const void*>(page + line * kLine));
  }
}

}  // namespace zerocore::kernels::ZEROCORE_LANES
