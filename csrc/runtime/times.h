// When something began and ended on a device, taken by events.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

namespace zerocore {

// The moment that times are counted from: those of one start are of one clock.
class TimesStart {
 public:
  explicit TimesStart(const c10::Stream& stream) : event_(stream.device_type(), kFlag) {
    event_.record(stream);
  }
  double seconds(const c10::Event& event) const { return event_.elapsedTime(event) / 1e3; }

  static constexpr c10::EventFlag kFlag = c10::EventFlag::BACKEND_DEFAULT;  // with timing

 private:
  c10::Event event_;
};

// The newest intervals, by their numbers, which are counted up. Any thread may ask.
class Times {
 public:
  // From now on there are times, since then; nothing: there are none any more.
  void start(std::shared_ptr<const TimesStart> start) {
    std::lock_guard<std::mutex> lock(mutex_);
    start_ = std::move(start);
    ring_.clear();
    if (start_) ring_.resize(kRing);
    on_ = start_ != nullptr;
  }
  bool on() const { return on_; }

  // Nothing happens while it is off.
  void begin(int64_t number, const c10::Stream& stream) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!start_) return;
    Interval& interval = ring_[number % kRing];
    interval.number = number;
    interval.begin.emplace(stream.device_type(), TimesStart::kFlag);
    interval.end.emplace(stream.device_type(), TimesStart::kFlag);
    interval.begin->record(stream);
  }
  void end(int64_t number, const c10::Stream& stream) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (start_ && ring_[number % kRing].number == number) ring_[number % kRing].end->record(stream);
  }
  // In seconds; nothing if it was not timed, is not over, or is too old.
  std::optional<std::pair<double, double>> of(int64_t number) const {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!start_ || number < 0) return std::nullopt;
    const Interval& interval = ring_[number % kRing];
    if (interval.number != number || !interval.end->was_marked_for_recording()) return std::nullopt;
    if (!interval.end->query()) return std::nullopt;
    return std::pair(start_->seconds(*interval.begin), start_->seconds(*interval.end));
  }

 private:
  static constexpr int64_t kRing = 4096;
  struct Interval {
    int64_t number = -1;
    std::optional<c10::Event> begin;
    std::optional<c10::Event> end;
  };

  std::atomic<bool> on_ = false;
  mutable std::mutex mutex_;
  std::shared_ptr<const TimesStart> start_;
  std::vector<Interval> ring_;
};

}  // namespace zerocore
