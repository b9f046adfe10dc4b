// The fiber engine: one operating system thread runs a whole block and switches between its CUDA
// threads at barriers and warp collectives only.
#pragma once
#ifndef __x86_64__
#error "the fiber engine switches stacks in x86-64 assembly; use -DCUEMU_THREADS elsewhere"
#endif
#include <algorithm>
#include <atomic>
#include <random>
#include <thread>

#include "cuemu_engine.h"

namespace cuemu {

inline int workers = 0;  // operating system threads per launch; 0 means one per core

// Saves the callee-saved registers on the current stack, stores the stack pointer in *save, and
// continues at `load`.
extern "C" void cuemu_switch(void** save, void* load);
asm(R"(.text
.weak cuemu_switch
.type cuemu_switch,@function
cuemu_switch:
 pushq %rbp
 pushq %rbx
 pushq %r12
 pushq %r13
 pushq %r14
 pushq %r15
 movq %rsp,(%rdi)
 movq %rsi,%rsp
 popq %r15
 popq %r14
 popq %r13
 popq %r12
 popq %rbx
 popq %rbp
 ret
.size cuemu_switch,.-cuemu_switch
)");

constexpr size_t kStackBytes = 64 << 10;
constexpr size_t kSavedRegisters = 6;

struct Fiber {
  void* stack_pointer = nullptr;
  std::unique_ptr<char[]> stack;
  Thread thread;
  bool finished = false;
  const uint64_t* waits_for = nullptr;  // a generation counter, and the value it must leave
  uint64_t waits_while = 0;
};

struct Scheduler {
  std::vector<std::unique_ptr<Fiber>> fibers;  // kept between blocks
  std::vector<Fiber*> waiting;
  std::vector<unsigned> turns;  // CUDA threads in the order in which they start
  size_t next_turn = 0;
  void* main_stack_pointer = nullptr;
  Fiber* running = nullptr;
  std::minstd_rand random{1};
};
inline thread_local Scheduler* scheduler = nullptr;

inline void complete_barrier_if_all_arrived(Block* block) {
  if (block->alive && block->arrived == block->alive) {
    block->arrived = 0;
    ++block->generation;
  }
}

inline void switch_to_scheduler(Fiber* fiber) {
  cuemu_switch(&fiber->stack_pointer, scheduler->main_stack_pointer);
}

// A fiber runs one CUDA thread after the other as long as none of them has to wait.
inline void fiber_main() {
  Fiber* fiber = scheduler->running;
  while (scheduler->next_turn < scheduler->turns.size()) {
    fiber->thread.place(current_block, scheduler->turns[scheduler->next_turn++]);
    (*current_block->kernel)();
    --current_block->alive;
    fiber->thread.warp->alive &= ~(1u << fiber->thread.lane);
    complete_barrier_if_all_arrived(current_block);
  }
  fiber->finished = true;
  switch_to_scheduler(fiber);
  std::abort();
}

inline void wait_while(const uint64_t& generation, uint64_t value) {
  Fiber* fiber = scheduler->running;
  fiber->waits_for = &generation;
  fiber->waits_while = value;
  if (generation == value) switch_to_scheduler(fiber);
}

inline Fiber* start_fiber(size_t number) {
  Scheduler& s = *scheduler;
  if (number == s.fibers.size()) {
    s.fibers.push_back(std::make_unique<Fiber>());
    s.fibers.back()->stack.reset(new char[kStackBytes]);
  }
  Fiber* fiber = s.fibers[number].get();
  fiber->finished = false;
  fiber->waits_for = nullptr;
  // The first switch pops the saved registers (garbage) and returns into fiber_main, which needs
  // the stack aligned as after a call.
  auto top = (reinterpret_cast<uintptr_t>(fiber->stack.get()) + kStackBytes) & ~uintptr_t(15);
  auto* entry = reinterpret_cast<void**>(top - 16);
  *entry = reinterpret_cast<void*>(&fiber_main);
  fiber->stack_pointer = entry - kSavedRegisters;
  return fiber;
}

inline void resume(Fiber* fiber) {
  scheduler->running = fiber;
  current_thread = &fiber->thread;
  cuemu_switch(&scheduler->main_stack_pointer, fiber->stack_pointer);
}

inline void run_block(Block* block) {
  current_block = block;
  Scheduler& s = *scheduler;
  const unsigned n = block->threads();
  s.turns.resize(n);
  for (unsigned i = 0; i < n; ++i) s.turns[i] = order == REV ? n - 1 - i : i;
  if (order == RND) std::shuffle(s.turns.begin(), s.turns.end(), s.random);
  s.next_turn = 0;
  s.waiting.clear();
  size_t started = 0;
  while (true) {
    bool progress = false;
    for (size_t i = 0; i < s.waiting.size();) {
      Fiber* fiber = s.waiting[i];
      if (*fiber->waits_for != fiber->waits_while) {
        progress = true;
        resume(fiber);
        if (fiber->finished) {
          s.waiting[i] = s.waiting.back();
          s.waiting.pop_back();
          continue;
        }
      }
      ++i;
    }
    if (s.next_turn < n) {
      Fiber* fiber = start_fiber(started++);
      resume(fiber);
      if (!fiber->finished) s.waiting.push_back(fiber);
      continue;
    }
    if (s.waiting.empty()) return;
    if (!progress) die("deadlock: a barrier or warp collective is not reached by all its threads");
  }
}

inline void run_grid(dim3 grid, dim3 block, size_t shared_bytes,
                     const std::function<void()>& kernel) {
  const unsigned long total = blocks_of(grid);
  std::atomic<unsigned long> next{0};
  auto work = [&] {
    static thread_local Scheduler s;
    scheduler = &s;
    Block b(grid, block, shared_bytes, &kernel);
    for (unsigned long i; (i = next.fetch_add(1)) < total;) {
      b.reset(i);
      run_block(&b);
    }
    current_block = nullptr;
    current_thread = nullptr;
  };
  unsigned long count =
      workers > 0 ? (unsigned long)workers : std::max(1u, std::thread::hardware_concurrency());
  std::vector<std::thread> others;
  for (unsigned long i = 1; i < std::min(count, total); ++i) others.emplace_back(work);
  work();
  for (std::thread& t : others) t.join();
}

inline void sync_threads() {
  Block* block = current_block;
  uint64_t generation = block->generation;
  ++block->arrived;
  complete_barrier_if_all_arrived(block);
  wait_while(block->generation, generation);
}

// Every lane in the mask contributes a value; returns what `read` picks out of all of them.
template <class Read>
uint64_t warp_exchange(uint32_t mask, uint64_t value, Read&& read) {
  Warp* warp = current_thread->warp;
  unsigned lane = current_thread->lane;
  if (!(mask >> lane & 1)) die("a lane is not in its own warp mask");
  if (mask & ~warp->alive) die("a warp mask names a lane that has returned");
  uint64_t generation = warp->generation;
  uint64_t* slots = warp->slot[generation & 1];
  slots[lane] = value;
  if (!warp->arrived) warp->needed = mask;
  if (warp->needed != mask) die("divergent masks in one warp collective");
  warp->arrived |= 1u << lane;
  if (warp->arrived == warp->needed) {
    warp->arrived = 0;
    ++warp->generation;
  }
  wait_while(warp->generation, generation);
  return read(slots);
}

}  // namespace cuemu
