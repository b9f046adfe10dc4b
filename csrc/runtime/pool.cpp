#include "runtime/pool.h"

#include <algorithm>
#include <exception>

namespace zerocore {

Pool::~Pool() { trim(); }

std::optional<Lease> Pool::try_lease(int64_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (budget_ > 0 && leased_ + bytes > budget_) return std::nullopt;
  Lease lease;
  const auto match = std::find_if(free_.begin(), free_.end(),
                                  [&](const Lease& block) { return block.bytes == bytes; });
  if (match != free_.end()) {
    lease = *match;
    free_.erase(match);
    kept_ -= bytes;
  } else {
    // Make room before allocating, so the sum of leased and kept blocks stays within its bound.
    const int64_t bound = budget_ > 0 ? budget_ : std::max(high_water_, leased_ + bytes);
    while (!free_.empty() && leased_ + kept_ + bytes > bound) drop_oldest();
    lease = allocate(bytes);
  }
  leased_ += bytes;
  peak_ = std::max(peak_, leased_);
  high_water_ = std::max(high_water_, leased_);
  return lease;
}

Lease Pool::allocate(int64_t bytes) {
  try {
    return memory_.allocate(bytes);
  } catch (const std::exception&) {
    if (free_.empty()) throw;
  }
  while (!free_.empty()) drop_oldest();
  return memory_.allocate(bytes);
}

void Pool::release(const Lease& lease) {
  std::lock_guard<std::mutex> lock(mutex_);
  leased_ -= lease.bytes;
  if (!keep_) {
    memory_.deallocate(lease);
    return;
  }
  free_.push_back(lease);
  kept_ += lease.bytes;
}

void Pool::trim() {
  std::lock_guard<std::mutex> lock(mutex_);
  while (!free_.empty()) drop_oldest();
}

void Pool::drop_oldest() {
  memory_.deallocate(free_.front());
  kept_ -= free_.front().bytes;
  free_.pop_front();
}

int64_t Pool::leased() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return leased_;
}

int64_t Pool::peak() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return peak_;
}

int64_t Pool::kept() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return kept_;
}

void Pool::reset_peak() {
  std::lock_guard<std::mutex> lock(mutex_);
  peak_ = leased_;
}

}  // namespace zerocore
