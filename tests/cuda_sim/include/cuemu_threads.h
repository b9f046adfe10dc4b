// The threads engine: one operating system thread per CUDA thread, blocks one after the other.
// Slow; made for ThreadSanitizer, which then sees exactly the synchronisation that the kernel's own
// barriers provide.
#pragma once
#include <thread>

#include "cuemu_engine.h"

namespace cuemu {

inline void leave_block(Block* block) {
  std::lock_guard<std::mutex> lock(block->mutex);
  --block->alive;
  if (block->alive && block->arrived == block->alive) {
    block->arrived = 0;
    ++block->generation;
    block->changed.notify_all();
  }
}

inline void run_grid(dim3 grid, dim3 block, size_t shared_bytes,
                     const std::function<void()>& kernel) {
  for (unsigned long i = 0; i < blocks_of(grid); ++i) {
    Block b(grid, block, shared_bytes, &kernel);
    b.reset(i);
    std::vector<std::thread> threads;
    for (unsigned t = 0; t < b.threads(); ++t) {
      threads.emplace_back([&b, t] {
        Thread thread;
        thread.place(&b, t);
        current_block = &b;
        current_thread = &thread;
        (*b.kernel)();
        leave_block(&b);
      });
    }
    for (std::thread& t : threads) t.join();
  }
}

inline void sync_threads() {
  Block* block = current_block;
  std::unique_lock<std::mutex> lock(block->mutex);
  uint64_t generation = block->generation;
  if (++block->arrived == block->alive) {
    block->arrived = 0;
    ++block->generation;
    block->changed.notify_all();
  } else {
    block->changed.wait(lock, [&] { return block->generation != generation; });
  }
}

template <class Read>
uint64_t warp_exchange(uint32_t mask, uint64_t value, Read&& read) {
  Warp* warp = current_thread->warp;
  std::unique_lock<std::mutex> lock(warp->mutex);
  uint64_t generation = warp->generation;
  uint64_t* slots = warp->slot[generation & 1];
  slots[current_thread->lane] = value;
  warp->arrived |= 1u << current_thread->lane;
  if (warp->arrived == mask) {
    warp->arrived = 0;
    ++warp->generation;
    warp->changed.notify_all();
  } else {
    warp->changed.wait(lock, [&] { return warp->generation != generation; });
  }
  return read(slots);
}

}  // namespace cuemu
