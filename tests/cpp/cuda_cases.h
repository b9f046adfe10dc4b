// What the tests of the CUDA kernels share: they run on the CPU ([Note: emulation]), on a device of
// few multiprocessors, so that blocks have several tiles.
#pragma once

#include <iterator>
#include <vector>

#include "cuemu.h"
#include "kernel_cases.h"
#include "kernels/cuda/launch.h"

namespace zerocore::test {

// Element accesses of the kernels since the last call.
struct Bytes {
  int64_t loaded, stored;
};
Bytes take_bytes();

#ifdef CUEMU_THREADS
constexpr bool kThreadsEngine = true;  // slow: every thread of a block is one of the system
#else
constexpr bool kThreadsEngine = false;
#endif

// A queue whose ticket must be back at zero when it is gone.
class TestQueue {
 public:
  explicit TestQueue(int multiprocessors = kThreadsEngine ? 1 : 2)
      : queue_{nullptr, multiprocessors, &ticket_} {}
  ~TestQueue() { CHECK_EQ(ticket_, 0u); }
  TestQueue(const TestQueue&) = delete;
  TestQueue& operator=(const TestQueue&) = delete;

  operator const kernels::cuda::Queue&() const { return queue_; }

 private:
  unsigned ticket_ = 0;
  kernels::cuda::Queue queue_;
};

// Runs `function` with the threads of a block in three orders.
template <class Function>
void in_every_order(const Function& function) {
  for (const cuemu::Order order : {cuemu::FWD, cuemu::REV, cuemu::RND}) {
    cuemu::order = order;
    function();
    if (kThreadsEngine) {
      return;  // the system chooses
    }
  }
}

// Sizes around accesses, threads and tiles. `large`: more tiles than blocks.
inline std::vector<int64_t> cuda_sizes(bool large = true) {
  if (kThreadsEngine) {
    return {4100};
  }
  std::vector<int64_t> out = {0,  1,   2,   3,   4,    5,    7,    8,    9,    15,   16,   17,  31,
                              33, 255, 256, 257, 1023, 1025, 2047, 2048, 2049, 4095, 4097, 6151};
  if (large) {
    out.push_back(70001);
  }
  return out;
}

// The dtypes that a test combines: one pair is enough to look for races.
inline std::vector<DType> cuda_dtypes() {
  return kThreadsEngine ? std::vector<DType>{DType::f32, DType::bf16}
                        : std::vector<DType>{DType::f32, DType::bf16, DType::f16, DType::f64};
}

}  // namespace zerocore::test
