// The counters of kernels/cuda/access.cuh, for kernels that run on the CPU.

#include <atomic>

#include "cuda_cases.h"

namespace zerocore {

static std::atomic<int64_t> loaded{0}, stored{0};

namespace kernels::cuda {
void count_loaded(int64_t bytes) { loaded.fetch_add(bytes, std::memory_order_relaxed); }
void count_stored(int64_t bytes) { stored.fetch_add(bytes, std::memory_order_relaxed); }
}  // namespace kernels::cuda

namespace test {
Bytes take_bytes() { return Bytes{loaded.exchange(0), stored.exchange(0)}; }
}  // namespace test

}  // namespace zerocore
