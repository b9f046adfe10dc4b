// What the scheduler would do with windows of given sizes, without memory and without ranks.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "runtime/scheduler.h"

namespace zerocore {

// Windows that only have a size. The scheduler over them decides as that of a model would, so that
// a plan can ask it what is gathered when, and how much is held, before there is a model.
class Rehearsal : public Windows {
 public:
  struct Step {
    // launch: what is gathered up to the next `launched` goes out together; gather, wait, release:
    // of a unit's window.
    const char* event;
    int unit;  // -1: none
  };

  // bytes: of each unit's window; unit 0 is the root. The others as in RuntimeOptions.
  Rehearsal(std::vector<int64_t> bytes, int prefetch, bool persistent, int64_t launch_bytes,
            int64_t budget);

  Scheduler& scheduler() { return scheduler_; }
  // What happened since the last call, in order.
  std::vector<Step> take() { return std::exchange(steps_, {}); }
  // Most bytes of windows at once so far.
  int64_t peak() const { return peak_; }

  bool start(int unit) override;
  void finish(int unit) override { steps_.push_back({"wait", unit}); }
  void release(int unit) override;
  void begin_launch() override { steps_.push_back({"launch", -1}); }
  void end_launch() override { steps_.push_back({"launched", -1}); }
  int64_t bytes(int unit) const override { return bytes_.at(unit); }
  [[noreturn]] void no_room(int unit) override;

 private:
  const std::vector<int64_t> bytes_;
  const int64_t budget_;
  Scheduler scheduler_;
  std::vector<Step> steps_;
  std::vector<bool> open_;  // persistent windows are gathered again while they are
  int64_t leased_ = 0;
  int64_t peak_ = 0;
};

}  // namespace zerocore
