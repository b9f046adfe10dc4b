// Memory for windows and reduction buffers, leased and returned many times a step.
#pragma once

#include <cstdint>
#include <list>
#include <mutex>
#include <optional>

#include "runtime/clock.h"

namespace zerocore {

// A block in use. Whoever holds it returns it once, to the pool it came from.
struct Lease {
  void* data = nullptr;
  int64_t bytes = 0;
  Point used;     // the last use of the memory: what is enqueued for it next starts after it
  int home = -1;  // the stream that it was allocated for
};

// Where a pool takes its blocks from.
class Memory {
 public:
  virtual ~Memory() = default;
  virtual Lease allocate(int64_t bytes) = 0;
  virtual void deallocate(const Lease& block) = 0;
};

// Blocks are kept for the next lease of the same size: windows of equal units repeat, and fresh
// memory costs more (page faults) than the copy into it. What is leased and what is kept together
// never exceed the budget, nor the highest amount that was ever leased at once. Where memory is
// out, the kept blocks make room.
//
// Thread-safe.
class Pool {
 public:
  // budget: bytes; 0 means no limit. keep: blocks are kept; else they go back at once.
  Pool(Memory& memory, int64_t budget, bool keep = true)
      : memory_(memory), budget_(budget), keep_(keep) {}
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // Nothing if the budget does not allow it now.
  std::optional<Lease> try_lease(int64_t bytes);
  void release(const Lease& lease);
  // Returns the kept blocks to the memory they came from.
  void trim();

  int64_t budget() const { return budget_; }
  int64_t leased() const;
  int64_t peak() const;
  int64_t kept() const;
  // The peak starts again from what is leased now.
  void reset_peak();

 private:
  Lease allocate(int64_t bytes);
  void drop_oldest();

  Memory& memory_;
  const int64_t budget_;
  const bool keep_;
  mutable std::mutex mutex_;
  std::list<Lease> free_;  // oldest first
  int64_t leased_ = 0;
  int64_t kept_ = 0;
  int64_t peak_ = 0;
  int64_t high_water_ = 0;  // as peak_, but never reset: bounds what is kept
};

}  // namespace zerocore
