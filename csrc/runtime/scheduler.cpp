#include "runtime/scheduler.h"

#include <algorithm>

namespace zerocore {

namespace {
constexpr int kRoot = 0;
}

Scheduler::Scheduler(Windows& windows, int units, int prefetch, bool persistent)
    : windows_(windows),
      prefetch_(prefetch),
      persistent_(persistent),
      states_(units, State::released) {}

void Scheduler::begin_pass(bool gradients) {
  std::lock_guard<std::mutex> lock(mutex_);
  gradients_ = gradients;
  passing_ = true;
  order().begin();
}

void Scheduler::end_pass() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (passing_) order().finish();
  passing_ = false;
}

void Scheduler::demand(int unit) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (kept_ == unit) {
    kept_ = -1;  // in use again: what it needs inside may not close it
  } else if (kept_ >= 0 && unit != kRoot) {
    close(kept_);
  }
  order().visit(unit);
  if (states_[unit] == State::released) start_or_throw(unit);
  if (states_[unit] == State::gathering) {
    windows_.finish(unit);
    states_[unit] = State::live;
  }
  prefetch();
}

void Scheduler::start_all() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (size_t unit = 0; unit < states_.size(); ++unit) {
    if (states_[unit] != State::released) continue;
    if (!windows_.start(static_cast<int>(unit))) return;
    states_[unit] = State::gathering;
  }
}

void Scheduler::keep(int unit) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (kept_ >= 0 && kept_ != unit) close(kept_);
  kept_ = unit;
}

void Scheduler::release(int unit) {
  std::lock_guard<std::mutex> lock(mutex_);
  close(unit);
  prefetch();
}

void Scheduler::release_all() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (size_t unit = 0; unit < states_.size(); ++unit) close(static_cast<int>(unit));
}

void Scheduler::invalidate(int unit) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (states_[unit] == State::gathering) windows_.finish(unit);
  if (states_[unit] != State::released && !persistent_) windows_.release(unit);
  states_[unit] = State::released;
  if (kept_ == unit) kept_ = -1;
}

bool Scheduler::live(int unit) const {
  std::lock_guard<std::mutex> lock(mutex_);
  return states_[unit] == State::live;
}

std::vector<int> Scheduler::visited() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return order().visited();
}

uint64_t Scheduler::fingerprint() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return order().fingerprint();
}

int Scheduler::open() const {
  int count = 0;
  for (size_t unit = 1; unit < states_.size(); ++unit) count += states_[unit] != State::released;
  return count;
}

void Scheduler::start_or_throw(int unit) {
  while (!windows_.start(unit)) {
    // What was opened ahead can be gathered again later; every rank makes the same choice here.
    const auto ahead = std::find(states_.begin(), states_.end(), State::gathering);
    if (ahead == states_.end()) windows_.no_room(unit);
    close(static_cast<int>(ahead - states_.begin()));
  }
  states_[unit] = State::gathering;
}

void Scheduler::close(int unit) {
  if (kept_ == unit) kept_ = -1;
  if (persistent_ || states_[unit] == State::released) return;
  // An abandoned gather is waited for: the peers write into its memory.
  if (states_[unit] == State::gathering) windows_.finish(unit);
  states_[unit] = State::released;  // even if what follows throws
  windows_.release(unit);
}

void Scheduler::prefetch() {
  if (persistent_ || !passing_ || prefetch_ == 0) return;
  // The root and the units that are open already need no gather.
  std::vector<int> ahead = order().upcoming(prefetch_ + 1 + open());
  ahead.erase(
      std::remove_if(ahead.begin(), ahead.end(),
                     [&](int unit) { return unit == kRoot || states_[unit] == State::live; }),
      ahead.end());
  if (static_cast<int>(ahead.size()) > prefetch_) ahead.resize(prefetch_);
  if (ahead.empty()) return;
  for (size_t unit = 1; unit < states_.size(); ++unit) {
    const bool expected =
        std::find(ahead.begin(), ahead.end(), static_cast<int>(unit)) != ahead.end();
    if (states_[unit] == State::gathering && !expected) close(static_cast<int>(unit));
  }
  for (int unit : ahead) {
    if (states_[unit] != State::released) continue;
    if (open() > prefetch_ || !windows_.start(unit)) return;
    states_[unit] = State::gathering;
  }
}

}  // namespace zerocore
