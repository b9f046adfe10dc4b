// What both engines share: the state of blocks, warps and threads.
#pragma once
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

namespace cuemu {

// The order in which the threads of a block get their turns. Ignored by the threads engine.
enum Order { FWD, REV, RND };
inline Order order = [] {
  const char* text = std::getenv("CUEMU_ORDER");
  if (!text) return FWD;
  return text[0] == 'r' && text[1] == 'e' ? REV : text[0] == 'r' ? RND : FWD;  // fwd, rev, rnd
}();

constexpr unsigned kWarp = 32;

struct Warp {
  // Values exchanged by a collective; two sets, since lanes may be one collective apart.
  uint64_t slot[2][kWarp] = {};
  uint32_t arrived = 0;     // lanes that have reached the current collective
  uint32_t needed = 0;      // lanes that must reach it
  uint64_t generation = 0;  // collectives completed
  uint32_t alive = 0;       // lanes that have not returned from the kernel
#ifdef CUEMU_THREADS
  std::mutex mutex;
  std::condition_variable changed;
#endif
};

struct Block {
  dim3 index, block_dim, grid_dim;
  std::vector<unsigned char> dynamic_shared;
  std::vector<std::unique_ptr<Warp>> warps;
  const std::function<void()>* kernel = nullptr;
  unsigned arrived = 0;     // threads that have reached the current barrier
  unsigned alive = 0;       // threads that have not returned from the kernel
  uint64_t generation = 0;  // barriers completed
#ifdef CUEMU_THREADS
  std::mutex mutex;
  std::condition_variable changed;
#endif

  Block(dim3 grid, dim3 block, size_t shared_bytes, const std::function<void()>* kernel_)
      : block_dim(block), grid_dim(grid), dynamic_shared(shared_bytes), kernel(kernel_) {
    for (unsigned i = 0; i < (threads() + kWarp - 1) / kWarp; ++i)
      warps.push_back(std::make_unique<Warp>());
  }

  unsigned threads() const { return block_dim.x * block_dim.y * block_dim.z; }

  // Makes this the block at a position in the grid, with fresh shared memory.
  void reset(unsigned long position) {
    unsigned long plane = (unsigned long)grid_dim.x * grid_dim.y;
    index = dim3(unsigned(position % grid_dim.x), unsigned(position / grid_dim.x % grid_dim.y),
                 unsigned(position / plane));
    std::fill(dynamic_shared.begin(), dynamic_shared.end(), (unsigned char)0xFF);
    arrived = 0;
    alive = threads();
    for (unsigned i = 0; i < warps.size(); ++i) {
      unsigned lanes = std::min(kWarp, threads() - i * kWarp);
      warps[i]->arrived = 0;
      warps[i]->alive = lanes == kWarp ? ~0u : (1u << lanes) - 1;
    }
  }
};

struct Thread {
  uint3 index;
  unsigned flat;  // position in the block
  unsigned lane;  // position in the warp
  Warp* warp;

  void place(Block* block, unsigned flat_) {
    const dim3& d = block->block_dim;
    flat = flat_;
    lane = flat % kWarp;
    warp = block->warps[flat / kWarp].get();
    index = {flat % d.x, flat / d.x % d.y, flat / (d.x * d.y)};
  }
};

inline thread_local Block* current_block = nullptr;
inline thread_local Thread* current_thread = nullptr;

[[noreturn]] inline void die(const char* message) {
  dim3 block = current_block ? current_block->index : dim3(0, 0, 0);
  std::fprintf(stderr, "cuemu: %s (block %u,%u,%u, thread %u)\n", message, block.x, block.y,
               block.z, current_thread ? current_thread->flat : 0);
  std::abort();
}

inline unsigned long blocks_of(dim3 grid) { return (unsigned long)grid.x * grid.y * grid.z; }

}  // namespace cuemu
