#include "runtime/log.h"

namespace zerocore {

void Log::add(const Event& event) {
  std::lock_guard<std::mutex> lock(mutex_);
  const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start_;
  Record record{event, next_, time.count()};
  if (ring_.size() < capacity_) {
    ring_.push_back(record);
  } else {
    ring_[next_ % static_cast<int64_t>(capacity_)] = record;
  }
  ++next_;
}

void Log::count(const char* kind, int64_t elements, int64_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  Traffic& traffic = traffic_[kind];
  traffic.calls += 1;
  traffic.elements += elements;
  traffic.bytes += bytes;
}

std::vector<Record> Log::records() const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<Record> ordered;
  ordered.reserve(ring_.size());
  const size_t oldest = ring_.size() < capacity_ ? 0 : static_cast<size_t>(next_) % capacity_;
  for (size_t i = 0; i < ring_.size(); ++i) {
    ordered.push_back(ring_[(oldest + i) % ring_.size()]);
  }
  return ordered;
}

std::map<std::string, Traffic> Log::traffic() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return traffic_;
}

void Log::reset() {
  std::lock_guard<std::mutex> lock(mutex_);
  ring_.clear();
  next_ = 0;
  traffic_.clear();
}

}  // namespace zerocore
