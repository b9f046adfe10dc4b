// The streams of a device, and the waits between them.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "runtime/clock.h"

namespace zerocore {

// [Note: streams] Three streams share the work of a step. The host never waits for a device; a
// stream waits for another one by an event, and only if nothing it waited for before implies it.
//
//   gather   (high priority)  cast into the own slot, all-gather
//   compute  (the user's)     modules, optimizer
//   reduce   (high priority)  pack, reduce-scatter, all-reduce, sum into the main gradient
//
//   compute  | step |.| unit 1 |.| unit 2 |.. | unit 2 backward |.| unit 1 backward |..|  step
//                   1 ^        ^ 2      |                       4          |     5  |  ^ 6
//   gather    ......V gather 1 | gather 2 | ^3 gather ...       |          |        |  |
//   reduce                                                      V pack, reduce 2 | V pack, reduce 1
//
//   1 shards_written     a gather starts after what was enqueued before the pass: the step
//   2 window_ready       a module starts after the gather of its window
//   3 window_free        a gather starts after the last use of the memory that it writes to
//   4 gradients_ready    a packing starts after the backward that made the gradients
//   5 gradients_packed   the memory of gradients is let go of after they were packed
//   6 gradients_reduced  whatever follows a backward starts after its reductions
//     shards_read        a write to shards starts after the gathers that read them
//     memory_free        memory goes back to the device's allocator after its last use
//
// A CPU has one stream on which everything is complete: nothing ever waits there.
enum class Wait {
  shards_written,
  window_ready,
  window_free,
  gradients_ready,
  gradients_packed,
  gradients_reduced,
  shards_read,
  memory_free,
  count
};

const char* wait_name(Wait wait);

// A moment of a stream with an event recorded at it; empty: nothing to wait for.
class Mark;

class Streams {
 public:
  // One object for each device and process: models share the streams.
  static Streams& of(c10::Device device);

  const c10::Device& device() const { return device_; }
  // Whether work is enqueued rather than done.
  bool asynchronous() const { return !device_.is_cpu(); }
  const c10::Stream& gather() const { return gather_; }
  const c10::Stream& reduce() const { return reduce_; }
  // The calling thread's.
  c10::Stream current() const;

  // All that was enqueued on the stream until now. Costs nothing: an event is recorded when it is
  // waited for, on what was enqueued until then.
  Point here(const c10::Stream& stream);
  // The same with an event: whoever waits for it does not wait for what is enqueued later.
  Mark mark(const c10::Stream& stream);

  // What `waiter` is given next starts after the point. `why` names the wait for tests.
  void wait(const c10::Stream& waiter, const Point& point, Wait why);
  void wait(int waiter, const Point& point, Wait why);  // a Point's stream
  void wait(const c10::Stream& waiter, const Mark& mark, Wait why);
  // Whether the device is past it. Any thread may ask.
  static bool reached(const Mark& mark);

  // For tests: waits of this kind are left out from now on, to show that each is needed.
  static void leave_out(Wait why, bool out);

 private:
  explicit Streams(c10::Device device);
  int index(const c10::Stream& stream);
  std::shared_ptr<c10::Event> event();
  void recycle(c10::Event event);

  friend class Mark;
  const c10::Device device_;
  const c10::Stream gather_;
  const c10::Stream reduce_;
  std::mutex mutex_;
  std::vector<c10::Stream> known_;
  Clock clock_;
  std::vector<c10::Event> spare_;
};

class Mark {
 public:
  Mark() = default;

 private:
  friend class Streams;
  Point point_;
  Clock::Row seen_;
  std::shared_ptr<c10::Event> event_;
};

}  // namespace zerocore
