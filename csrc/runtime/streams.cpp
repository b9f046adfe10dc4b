#include "runtime/streams.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <map>
#include <utility>

namespace zerocore {
namespace {

constexpr std::array<const char*, static_cast<size_t>(Wait::count)> kNames = {
    "shards_written",   "window_ready",      "window_free", "gradients_ready",
    "gradients_packed", "gradients_reduced", "shards_read", "memory_free"};

std::atomic<uint32_t> left_out{0};

bool is_left_out(Wait why) { return (left_out.load() >> static_cast<int>(why)) & 1u; }

c10::Stream own_stream(c10::Device device) {
  const c10::impl::VirtualGuardImpl guard(device.type());
  return device.is_cpu() ? guard.getStream(device)
                         : guard.getStreamFromGlobalPool(device, /*isHighPriority=*/true);
}

}  // namespace

const char* wait_name(Wait wait) { return kNames.at(static_cast<size_t>(wait)); }

Streams& Streams::of(c10::Device device) {
  static std::mutex mutex;
  // Never destroyed: at the end of the process the device's runtime may be gone before.
  static auto& all = *new std::map<std::pair<c10::DeviceType, c10::DeviceIndex>, Streams*>();
  std::lock_guard<std::mutex> lock(mutex);
  Streams*& streams = all[{device.type(), device.index()}];
  if (streams == nullptr) streams = new Streams(device);
  return *streams;
}

Streams::Streams(c10::Device device)
    : device_(device), gather_(own_stream(device)), reduce_(own_stream(device)) {}

c10::Stream Streams::current() const {
  return c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
}

int Streams::index(const c10::Stream& stream) {
  const auto at = std::find(known_.begin(), known_.end(), stream) - known_.begin();
  if (at == static_cast<std::ptrdiff_t>(known_.size())) known_.push_back(stream);
  return static_cast<int>(at);
}

// An event returns to the spare ones with its last mark: what waits for it has been enqueued.
std::shared_ptr<c10::Event> Streams::event() {
  auto taken = [&] {
    if (spare_.empty()) return new c10::Event(device_.type());
    auto* event = new c10::Event(std::move(spare_.back()));
    spare_.pop_back();
    return event;
  };
  return {taken(), [this](c10::Event* event) {
            recycle(std::move(*event));
            delete event;
          }};
}

void Streams::recycle(c10::Event event) {
  std::lock_guard<std::mutex> lock(mutex_);
  spare_.push_back(std::move(event));
}

Point Streams::here(const c10::Stream& stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  return clock_.now(index(stream));
}

Mark Streams::mark(const c10::Stream& stream) {
  Mark mark;
  if (!asynchronous()) return mark;
  std::lock_guard<std::mutex> lock(mutex_);
  const int at = index(stream);
  mark.event_ = event();
  mark.event_->record(stream);
  mark.point_ = clock_.now(at);
  mark.seen_ = clock_.row(at);
  return mark;
}

void Streams::wait(const c10::Stream& waiter, const Point& point, Wait why) {
  wait(here(waiter).stream, point, why);
}

void Streams::wait(int waiter, const Point& point, Wait why) {
  std::shared_ptr<c10::Event> event;  // outlives the lock: its end takes it
  std::lock_guard<std::mutex> lock(mutex_);
  if (clock_.knows(waiter, point) || is_left_out(why)) return;
  event = this->event();
  event->record(known_.at(point.stream));
  event->block(known_.at(waiter));
  clock_.now(point.stream);
  clock_.learn(waiter, Clock::Row(clock_.row(point.stream)));
}

void Streams::wait(const c10::Stream& waiter, const Mark& mark, Wait why) {
  std::lock_guard<std::mutex> lock(mutex_);
  const int at = index(waiter);
  if (clock_.knows(at, mark.point_) || is_left_out(why)) return;
  mark.event_->block(waiter);
  clock_.learn(at, mark.seen_);
}

bool Streams::reached(const Mark& mark) { return !mark.event_ || mark.event_->query(); }

void Streams::leave_out(Wait why, bool out) {
  const uint32_t bit = 1u << static_cast<int>(why);
  out ? left_out.fetch_or(bit) : left_out.fetch_and(~bit);
}

}  // namespace zerocore
