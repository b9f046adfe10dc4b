// When windows are gathered and given back.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

#include "runtime/order.h"

namespace zerocore {

// What the scheduler drives: one window a unit.
class Windows {
 public:
  virtual ~Windows() = default;
  // Leases memory and launches the gather. False: no room now, nothing was done.
  virtual bool start(int unit) = 0;
  // Returns when the window holds the full parameters.
  virtual void finish(int unit) = 0;
  virtual void release(int unit) = 0;
  // Gathers that are started in between may be launched together, at the end; or not at all, if
  // there was an error.
  virtual void begin_launch() {}
  virtual void end_launch() {}
  virtual void cancel_launch() {}
  // Of the unit's window.
  virtual int64_t bytes(int unit) const = 0;
  // Throws the error for a unit that does not fit although nothing more can be given back.
  [[noreturn]] virtual void no_room(int unit) = 0;
};

// Gathers on demand and `prefetch` units ahead in the order of the last pass. Where a launch costs
// as much as `launch_bytes` of what it moves, smaller units are gathered several at a time: when a
// unit has to be started, so are those after it, up to that many bytes.
//
//   state        meaning                               left by
//   released     no window (or a stale one)            start
//   gathering    memory leased, gather in flight       finish
//   live         the full parameters can be read       release, invalidate
//
// At most prefetch + 1 windows, or those of 2 * launch_bytes, are open beside unit 0's (the root,
// open for a whole pass) when one is opened ahead. With persistent windows (parameters resident in
// full) releasing does nothing, and a window is gathered again only after invalidate().
//
// Thread-safe; the calls of Windows happen under the lock.
class Scheduler {
 public:
  Scheduler(Windows& windows, int units, int prefetch, bool persistent, int64_t launch_bytes = 0);

  // A pass (forward and, with gradients, backward) begins or ends. The two kinds look ahead in
  // orders of their own: a forward without gradients has no backward to prefetch for.
  void begin_pass(bool gradients);
  void end_pass();

  // Returns when the unit's window is live.
  void demand(int unit);
  // Opens every window that is not, as far as there is room.
  void start_all();
  // The unit's forward is over. Its window stays until another one is demanded: the last unit of
  // the forward is the first of the backward, and is not gathered twice.
  void keep(int unit);
  void release(int unit);
  void release_all();
  // The window's content is out of date.
  void invalidate(int unit);

  bool live(int unit) const;
  // The order of the pass so far, and its fingerprint.
  std::vector<int> visited() const;
  uint64_t fingerprint() const;

 private:
  enum class State : uint8_t { released, gathering, live };

  GatherOrder& order() { return orders_[gradients_]; }
  const GatherOrder& order() const { return orders_[gradients_]; }
  int open() const;
  int64_t open_bytes() const;
  std::vector<int> ahead() const;
  void start_or_throw(int unit);
  void close(int unit);
  void prefetch(int wanted = -1);
  template <class Start>
  void together(const Start& start);

  Windows& windows_;
  const int prefetch_;
  const bool persistent_;
  const int64_t launch_bytes_;
  mutable std::mutex mutex_;
  std::vector<State> states_;
  GatherOrder orders_[2];
  bool gradients_ = true;
  bool passing_ = false;
  int kept_ = -1;
};

}  // namespace zerocore
