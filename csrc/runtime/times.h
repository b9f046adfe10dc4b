// When something began and ended on a device, taken by events.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <memory>
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

// The newest intervals, by their numbers, which are counted up.
class Times {
 public:
  explicit Times(std::shared_ptr<const TimesStart> start) : start_(std::move(start)) {}
  void begin(int64_t number, const c10::Stream& stream) {
    Interval& interval = ring_[number % kRing];
    interval.number = number;
    interval.begin.emplace(stream.device_type(), TimesStart::kFlag);
    interval.end.emplace(stream.device_type(), TimesStart::kFlag);
    interval.begin->record(stream);
  }
  void end(int64_t number, const c10::Stream& stream) {
    Interval& interval = ring_[number % kRing];
    if (interval.number == number) interval.end->record(stream);
  }
  // In seconds; nothing if it was not timed, is not over, or is too old.
  std::optional<std::pair<double, double>> of(int64_t number) const {
    if (number < 0) return std::nullopt;
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

  std::shared_ptr<const TimesStart> start_;
  std::vector<Interval> ring_ = std::vector<Interval>(kRing);
};

}  // namespace zerocore
