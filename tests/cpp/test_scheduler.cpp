// The scheduler over windows that only count.

#include <algorithm>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include "check.h"
#include "runtime/scheduler.h"

namespace zerocore::test {
namespace {

// Windows with room for `capacity` of them. Not thread-safe: the scheduler calls it under its lock.
class FakeWindows : public Windows {
 public:
  enum State { closed, started, open };

  FakeWindows(int units, int capacity, bool persistent = false)
      : states_(static_cast<size_t>(units), closed),
        out_(static_cast<size_t>(units), false),
        capacity_(capacity),
        persistent_(persistent) {}

  bool start(int unit) override {
    State& state = states_.at(static_cast<size_t>(unit));
    CHECK(state == closed || (persistent_ && state == open));
    if (state == closed && count() == capacity_) return false;
    state = started;
    out_.at(static_cast<size_t>(unit)) = launching == 0;
    log += "s" + std::to_string(unit) + " ";
    ++starts;
    int opened = 0;
    for (size_t other = 1; other < states_.size(); ++other) opened += states_[other] != closed;
    most_beside_root = std::max(most_beside_root, opened);
    return true;
  }
  void begin_launch() override { ++launching; }
  void end_launch() override {
    CHECK(launching > 0);
    if (--launching > 0) return;
    std::fill(out_.begin(), out_.end(), true);
    if (starts > launched) {
      launched = starts;
      log += "| ";
      ++launches;
    }
  }
  void cancel_launch() override { launching = 0; }
  void finish(int unit) override {
    State& state = states_.at(static_cast<size_t>(unit));
    CHECK(state == started);
    CHECK(out_.at(static_cast<size_t>(unit)));
    state = open;
    log += "f" + std::to_string(unit) + " ";
  }
  void release(int unit) override {
    State& state = states_.at(static_cast<size_t>(unit));
    CHECK(state == open);
    CHECK(!persistent_);
    state = closed;
    log += "r" + std::to_string(unit) + " ";
  }
  int64_t bytes(int unit) const override { return unit == large ? 100 : 1; }
  void no_room(int unit) override {
    throw std::runtime_error("no room for " + std::to_string(unit));
  }

  State state(int unit) const { return states_.at(static_cast<size_t>(unit)); }
  int count() const {
    return static_cast<int>(states_.size()) -
           static_cast<int>(std::count(states_.begin(), states_.end(), closed));
  }
  // Without the ends of launches, unless asked for.
  std::string take_log(bool with_launches = false) {
    std::string all = std::exchange(log, "");
    for (size_t at; !with_launches && (at = all.find("| ")) != std::string::npos;) all.erase(at, 2);
    return all;
  }

  std::string log;
  int large = -1;  // a unit of 100 bytes; others have 1
  int launching = 0;
  int launched = 0;
  int launches = 0;
  int starts = 0;
  int most_beside_root = 0;

 private:
  std::vector<State> states_;
  std::vector<bool> out_;  // launched
  const int capacity_;
  const bool persistent_;
};

// What hooks do in one training step of a model with a root and units 1 to `units` - 1.
void train_step(Scheduler& scheduler, int units) {
  scheduler.begin_pass(true);
  scheduler.demand(0);
  for (int unit = 1; unit < units; ++unit) {
    scheduler.demand(unit);
    CHECK(scheduler.live(unit));
    if (unit + 1 < units) {
      scheduler.release(unit);
    } else {
      scheduler.keep(unit);
    }
  }
  for (int unit = units - 1; unit > 0; --unit) {
    scheduler.demand(unit);
    CHECK(scheduler.live(unit) && scheduler.live(0));
    scheduler.release(unit);
  }
  scheduler.release_all();
  scheduler.end_pass();
}

void test_one_unit_ahead() {
  FakeWindows windows(4, 100);
  Scheduler scheduler(windows, 4, 1, false);
  train_step(scheduler, 4);
  // Nothing is known at first: every gather is waited for. Unit 3 stays from forward to backward.
  CHECK_EQ(windows.take_log(), "s0 f0 s1 f1 r1 s2 f2 r2 s3 f3 r3 s2 f2 r2 s1 f1 r1 r0 ");
  train_step(scheduler, 4);
  // Now each gather starts while the unit before it computes.
  CHECK_EQ(windows.take_log(), "s0 f0 s1 f1 s2 r1 f2 s3 r2 f3 s2 r3 f2 s1 r2 f1 r1 r0 ");
  CHECK_EQ(windows.most_beside_root, 2);
  CHECK_EQ(windows.count(), 0);
}

void test_prefetch_depth_bounds_what_is_open() {
  for (int units = 1; units <= 9; ++units) {
    for (int prefetch = 0; prefetch <= 4; ++prefetch) {
      FakeWindows windows(units, 100);
      Scheduler scheduler(windows, units, prefetch, false);
      for (int step = 0; step < 4; ++step) {
        const int before = windows.starts;
        train_step(scheduler, units);
        // Forward and backward, but the last unit only once.
        CHECK_EQ(windows.starts - before, units == 1 ? 1 : 2 * (units - 1));
        CHECK_EQ(windows.count(), 0);
        CHECK_EQ(scheduler.visited().size(), static_cast<size_t>(units == 1 ? 1 : 2 * units - 2));
      }
      CHECK(windows.most_beside_root <= prefetch + 1);
    }
  }
}

void test_passes_without_gradients_have_their_own_order() {
  FakeWindows windows(4, 100);
  Scheduler scheduler(windows, 4, 1, false);
  const auto evaluate = [&] {
    scheduler.begin_pass(false);
    for (int unit = 0; unit < 4; ++unit) {
      scheduler.demand(unit);
      if (unit > 0) scheduler.release(unit);
    }
    scheduler.release_all();
    scheduler.end_pass();
  };
  train_step(scheduler, 4);
  evaluate();
  windows.take_log();
  evaluate();  // after unit 3 it expects nothing, though training goes on with 2
  CHECK_EQ(windows.take_log(), "s0 f0 s1 f1 s2 r1 f2 s3 r2 f3 r3 r0 ");
  train_step(scheduler, 4);
  CHECK_EQ(windows.take_log(), "s0 f0 s1 f1 s2 r1 f2 s3 r2 f3 s2 r3 f2 s1 r2 f1 r1 r0 ");
}

void test_little_room() {
  FakeWindows windows(5, 2);  // the root and one more
  Scheduler scheduler(windows, 5, 3, false);
  for (int step = 0; step < 3; ++step) train_step(scheduler, 5);
  CHECK_EQ(windows.count(), 0);
  scheduler.begin_pass(true);
  scheduler.demand(0);
  scheduler.demand(1);
  CHECK_THROWS(std::runtime_error, "no room for 2", scheduler.demand(2));
  CHECK(scheduler.live(1) && !scheduler.live(2));
  scheduler.release(1);
  scheduler.demand(2);
  CHECK(scheduler.live(2));
  scheduler.release_all();
}

void test_what_was_opened_ahead_makes_room() {
  FakeWindows windows(4, 2);
  Scheduler scheduler(windows, 4, 1, false);
  const auto pass = [&](const std::vector<int>& units) {
    scheduler.begin_pass(true);
    for (int unit : units) {
      scheduler.demand(unit);
      CHECK(scheduler.live(unit));
      scheduler.release(unit);
    }
    scheduler.release_all();
    scheduler.end_pass();
  };
  pass({1, 2, 3});
  windows.take_log();
  scheduler.begin_pass(true);
  scheduler.demand(1);
  CHECK(windows.state(2) == FakeWindows::started);  // expected next
  scheduler.demand(3);                              // but another one comes
  CHECK(scheduler.live(3) && scheduler.live(1));
  CHECK(windows.state(2) == FakeWindows::closed);
  CHECK_EQ(windows.take_log(), "s1 f1 s2 f2 r2 s3 f3 ");
  scheduler.release_all();
  CHECK_EQ(windows.count(), 0);
}

void test_kept_window_goes_when_another_is_demanded() {
  FakeWindows windows(4, 100);
  Scheduler scheduler(windows, 4, 0, false);
  scheduler.demand(1);
  scheduler.keep(1);
  scheduler.demand(0);  // the root takes nobody's place
  CHECK(scheduler.live(1));
  scheduler.demand(1);
  scheduler.demand(2);  // in the middle of 1, which is in use again
  CHECK(scheduler.live(1));
  scheduler.release(2);
  scheduler.keep(1);
  scheduler.demand(2);
  CHECK(!scheduler.live(1));
  CHECK(scheduler.live(0));
}

void test_persistent_windows_are_gathered_when_out_of_date() {
  FakeWindows windows(3, 3, true);
  Scheduler scheduler(windows, 3, 1, true);
  for (int step = 0; step < 2; ++step) train_step(scheduler, 3);
  CHECK_EQ(windows.take_log(), "s0 f0 s1 f1 s2 f2 ");
  scheduler.invalidate(1);
  CHECK(!scheduler.live(1) && scheduler.live(2));
  train_step(scheduler, 3);
  CHECK_EQ(windows.take_log(), "s1 f1 ");
  for (int unit = 0; unit < 3; ++unit) scheduler.invalidate(unit);
  scheduler.start_all();
  CHECK_EQ(windows.take_log(), "s0 s1 s2 ");
  scheduler.invalidate(0);  // in flight: waited for
  CHECK_EQ(windows.take_log(), "f0 ");
  train_step(scheduler, 3);
  CHECK_EQ(windows.take_log(), "s0 f0 f1 f2 ");
}

void test_start_all_stops_when_there_is_no_room() {
  FakeWindows windows(5, 3);
  Scheduler scheduler(windows, 5, 1, false);
  scheduler.demand(3);
  scheduler.start_all();
  CHECK_EQ(windows.take_log(), "s3 f3 s0 s1 ");
  scheduler.invalidate(3);
  CHECK_EQ(windows.take_log(), "r3 ");
  scheduler.release_all();
  CHECK_EQ(windows.take_log(), "f0 r0 f1 r1 ");
}

// Any calls in any order: a demanded window is live, and none is lost (FakeWindows checks each
// call).
void test_random_calls() {
  std::mt19937 random(1);
  for (int round = 0; round < 300; ++round) {
    const int units = 1 + static_cast<int>(random() % 8);
    const bool persistent = random() % 4 == 0;
    const int capacity = persistent ? units : 1 + static_cast<int>(random() % 8);
    FakeWindows windows(units, capacity, persistent);
    Scheduler scheduler(windows, units, static_cast<int>(random() % 4), persistent,
                        static_cast<int64_t>(random() % 5));
    for (int call = 0; call < 200; ++call) {
      const int unit = static_cast<int>(random() % static_cast<unsigned>(units));
      switch (random() % 12) {
        case 0:
          scheduler.begin_pass(random() % 3 != 0);
          break;
        case 1:
          scheduler.end_pass();
          break;
        case 2:
          if (scheduler.live(unit)) scheduler.keep(unit);
          break;
        case 3:
          scheduler.invalidate(unit);
          CHECK(!scheduler.live(unit));
          break;
        case 4:
          scheduler.start_all();
          break;
        case 5:
          scheduler.release_all();
          CHECK(persistent || windows.count() == 0);
          break;
        case 6:
        case 7:
          scheduler.release(unit);
          CHECK(persistent || !scheduler.live(unit));
          break;
        default:
          try {
            scheduler.demand(unit);
            CHECK(scheduler.live(unit));
            CHECK(windows.state(unit) == FakeWindows::open);
          } catch (const std::runtime_error&) {
            // Only if really nothing can be given back.
            CHECK_EQ(windows.count(), capacity);
            for (int other = 0; other < units; ++other) {
              CHECK(windows.state(other) != FakeWindows::started);
            }
          }
      }
      CHECK(windows.count() <= capacity);
    }
  }
}

void test_small_units_share_launches() {
  // Four units of a byte and the root, up to three bytes a launch.
  FakeWindows windows(5, 100);
  Scheduler scheduler(windows, 5, 1, false, 3);
  train_step(scheduler, 5);
  windows.take_log();
  train_step(scheduler, 5);
  // The root and the first three together, since the root has to be waited for anyway. Later ones
  // only when the next one is missing, and then as many as fit.
  CHECK_EQ(windows.take_log(true),
           "s0 s1 s2 s3 | f0 f1 r1 f2 r2 f3 s4 s2 s1 | r3 f4 s3 | r4 f3 r3 f2 r2 f1 r1 r0 ");
}

void test_large_units_have_launches_of_their_own() {
  FakeWindows windows(4, 100);
  windows.large = 2;
  Scheduler scheduler(windows, 4, 1, false, 3);
  train_step(scheduler, 4);
  windows.take_log();
  train_step(scheduler, 4);
  // Unit 2 is gathered ahead, though it is larger than a launch, but nothing else beside it.
  CHECK_EQ(windows.take_log(true),
           "s0 s1 | f0 f1 s2 | r1 f2 s3 | r2 f3 s2 | r3 f2 s1 | r2 f1 r1 r0 ");
}

void test_all_start_in_launches_of_a_size() {
  FakeWindows windows(6, 6, /*persistent=*/true);
  windows.large = 2;
  Scheduler scheduler(windows, 6, 1, true, 2);
  scheduler.begin_pass(true);
  scheduler.start_all();
  CHECK_EQ(windows.take_log(true), "s0 s1 | s2 | s3 s4 | s5 | ");
}

// Threads with units of their own: what one demanded stays live until it releases it.
void test_threads() {
  constexpr int kThreads = 4, kUnits = 13;
  FakeWindows windows(kUnits, kUnits);
  Scheduler scheduler(windows, kUnits, 2, false);
  scheduler.begin_pass(true);
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&scheduler, t] {
      std::mt19937 random(static_cast<unsigned>(t));
      for (int i = 0; i < 2000; ++i) {
        const int unit = 1 + t + kThreads * static_cast<int>(random() % 3);
        scheduler.demand(unit);
        CHECK(scheduler.live(unit));
        if (random() % 8 == 0) {
          CHECK(!scheduler.visited().empty());
          scheduler.fingerprint();
        }
        if (random() % 16 == 0) {
          scheduler.invalidate(unit);
        } else {
          scheduler.release(unit);
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  scheduler.release_all();
  scheduler.end_pass();
  CHECK_EQ(windows.count(), 0);
}

}  // namespace
}  // namespace zerocore::test

int main() {
  using namespace zerocore::test;
  test_one_unit_ahead();
  test_prefetch_depth_bounds_what_is_open();
  test_passes_without_gradients_have_their_own_order();
  test_little_room();
  test_what_was_opened_ahead_makes_room();
  test_kept_window_goes_when_another_is_demanded();
  test_persistent_windows_are_gathered_when_out_of_date();
  test_start_all_stops_when_there_is_no_room();
  test_small_units_share_launches();
  test_large_units_have_launches_of_their_own();
  test_all_start_in_launches_of_a_size();
  test_random_calls();
  test_threads();
}
