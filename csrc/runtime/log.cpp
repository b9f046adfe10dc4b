#include "runtime/log.h"

#include <algorithm>
#include <set>
#include <string_view>

namespace zerocore {

const char* interned(const std::string& text) {
  static std::mutex mutex;
  static auto* texts = new std::set<std::string>;  // outlives what reads it at exit
  std::lock_guard<std::mutex> lock(mutex);
  return texts->insert(text).first->c_str();
}

void Log::add(const Event& event) {
  const std::string_view name(event.event);
  const bool shared = name == "need" || name == "enter";
  std::lock_guard<std::mutex> lock(mutex_);
  const Record record{event,     next_,       now(),
                      forwards_, recoveries_, shared ? position_++ : int64_t{-1}};
  const size_t place = static_cast<size_t>(next_++) % capacity_;
  if (place >= ring_.size()) ring_.resize(place + 1);
  ring_[place] = record;
}

void Log::begin_forward() {
  std::lock_guard<std::mutex> lock(mutex_);
  ++forwards_;
}

void Log::recover() {
  std::lock_guard<std::mutex> lock(mutex_);
  ++recoveries_;
  position_ = 0;
}

int64_t Log::recoveries() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return recoveries_;
}

int64_t Log::next() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return next_;
}

double Log::now() const {
  const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start_;
  return time.count();
}

double Log::start() const {
  return std::chrono::duration<double>(start_.time_since_epoch()).count();
}

void Log::count(const char* kind, int64_t elements, int64_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  Traffic& traffic = traffic_[kind];
  traffic.calls += 1;
  traffic.elements += elements;
  traffic.bytes += bytes;
}

std::vector<Record> Log::records(int64_t from) const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<Record> ordered;
  int64_t next = std::max({from, first_, next_ - static_cast<int64_t>(capacity_)});
  for (; next < next_; ++next) ordered.push_back(ring_[static_cast<size_t>(next) % capacity_]);
  return ordered;
}

std::map<std::string, Traffic> Log::traffic() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return traffic_;
}

void Log::reset() {
  std::lock_guard<std::mutex> lock(mutex_);
  first_ = next_;
  traffic_.clear();
}

}  // namespace zerocore
