#include "runtime/scheduler.h"

#include <algorithm>

namespace zerocore {

namespace {
constexpr int kRoot = 0;
}

Scheduler::Scheduler(Windows& windows, int units, int prefetch, bool persistent,
                     int64_t launch_bytes)
    : windows_(windows),
      prefetch_(prefetch),
      persistent_(persistent),
      launch_bytes_(launch_bytes),
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
  if (states_[unit] == State::released) {
    together([&] {
      start_or_throw(unit);
      if (windows_.bytes(unit) < launch_bytes_) prefetch(/*wanted=*/unit);
    });
  }
  if (states_[unit] == State::gathering) {
    windows_.finish(unit);
    states_[unit] = State::live;
  }
  prefetch();
}

void Scheduler::start_all() {
  std::lock_guard<std::mutex> lock(mutex_);
  size_t unit = 0;
  bool room = true;
  while (room && unit < states_.size()) {
    together([&] {
      int64_t bytes = 0;
      for (; unit < states_.size(); ++unit) {
        if (states_[unit] != State::released) continue;
        if (bytes > 0 && bytes + windows_.bytes(static_cast<int>(unit)) > launch_bytes_) return;
        room = windows_.start(static_cast<int>(unit));
        if (!room) return;
        states_[unit] = State::gathering;
        bytes += std::max<int64_t>(windows_.bytes(static_cast<int>(unit)), 1);
      }
    });
  }
}

template <class Start>
void Scheduler::together(const Start& start) {
  windows_.begin_launch();
  try {
    start();
  } catch (...) {
    windows_.cancel_launch();
    for (size_t unit = 0; unit < states_.size(); ++unit) {
      if (states_[unit] == State::gathering) close(static_cast<int>(unit));
    }
    throw;
  }
  windows_.end_launch();
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

int64_t Scheduler::open_bytes() const {
  int64_t bytes = 0;
  for (size_t unit = 1; unit < states_.size(); ++unit) {
    if (states_[unit] != State::released) bytes += windows_.bytes(static_cast<int>(unit));
  }
  return bytes;
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

// The next units that are not live: `prefetch`, or as many as fit into launch_bytes. The root and
// the units that are open already need no gather.
std::vector<int> Scheduler::ahead() const {
  std::vector<int> units = order().upcoming(launch_bytes_ > 0 ? static_cast<int>(states_.size())
                                                              : prefetch_ + 1 + open());
  int count = 0;
  int64_t bytes = 0;
  for (int unit : units) {
    if (unit == kRoot || states_[unit] == State::live) continue;
    bytes += windows_.bytes(unit);
    if (count >= prefetch_ && bytes > launch_bytes_) break;
    units[count++] = unit;
  }
  units.resize(count);
  return units;
}

void Scheduler::prefetch(int wanted) {
  if (persistent_ || !passing_ || prefetch_ == 0) return;
  const std::vector<int> ahead = this->ahead();
  if (ahead.empty()) return;
  std::vector<char> expected(states_.size());
  for (int unit : ahead) expected[unit] = true;
  for (size_t unit = 1; unit < states_.size(); ++unit) {
    const bool idle = states_[unit] == State::gathering && static_cast<int>(unit) != wanted;
    if (idle && !expected[unit]) close(static_cast<int>(unit));
  }
  // As long as the next ones are there, others are left to be launched with more.
  const size_t near = std::min(ahead.size(), static_cast<size_t>(prefetch_));
  if (std::none_of(ahead.begin(), ahead.begin() + static_cast<int64_t>(near),
                   [&](int unit) { return states_[unit] == State::released; })) {
    return;
  }
  together([&] {
    int open = this->open();
    int64_t bytes = open_bytes();
    for (int unit : ahead) {
      if (states_[unit] != State::released) continue;
      const bool fits = open <= prefetch_ || bytes + windows_.bytes(unit) <= 2 * launch_bytes_;
      if (!fits || !windows_.start(unit)) return;
      states_[unit] = State::gathering;
      ++open;
      bytes += windows_.bytes(unit);
    }
  });
}

}  // namespace zerocore
