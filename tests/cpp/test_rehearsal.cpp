// What the scheduler would open and close over windows that only have a size.

#include <stdexcept>
#include <string>
#include <vector>

#include "check.h"
#include "runtime/rehearsal.h"

namespace zerocore::test {
namespace {

std::string taken(Rehearsal& rehearsal) {
  std::string text;
  for (const auto& [event, unit] : rehearsal.take()) {
    const std::string what = event;
    if (what == "launch" || what == "launched") continue;
    text += what[0] + std::to_string(unit) + " ";
  }
  return text;
}

// Forward over units 1 to 3 and back again.
std::string pass(Rehearsal& rehearsal) {
  Scheduler& scheduler = rehearsal.scheduler();
  scheduler.begin_pass(true);
  scheduler.demand(0);
  for (int unit : {1, 2, 3}) {
    scheduler.demand(unit);
    scheduler.keep(unit);
  }
  scheduler.demand(0);
  for (int unit : {3, 2, 1}) {
    scheduler.demand(unit);
    scheduler.release(unit);
  }
  scheduler.end_pass();
  scheduler.release_all();
  return taken(rehearsal);
}

void test_a_pass() {
  Rehearsal rehearsal({5, 10, 10, 10}, /*prefetch=*/1, /*persistent=*/false, 0, 0);
  CHECK_EQ(pass(rehearsal), std::string("g0 w0 g1 w1 r1 g2 w2 r2 g3 w3 r3 g2 w2 r2 g1 w1 r1 r0 "));
  CHECK_EQ(rehearsal.peak(), int64_t{15});
  // The order is known from here on: one unit is gathered ahead.
  CHECK_EQ(pass(rehearsal), std::string("g0 w0 g1 w1 g2 r1 w2 g3 r2 w3 g2 r3 w2 g1 r2 w1 r1 r0 "));
  CHECK_EQ(rehearsal.peak(), int64_t{25});
}

void test_a_budget() {
  Rehearsal rehearsal({5, 10, 10, 20}, 1, false, 0, /*budget=*/24);
  CHECK_THROWS(std::invalid_argument, "expected room for unit 3 of 20 bytes", pass(rehearsal));
}

// Resident windows are gathered again while they are open, and nothing more is held.
void test_persistent() {
  Rehearsal rehearsal({5, 10, 10, 10}, 1, /*persistent=*/true, 0, 0);
  rehearsal.scheduler().start_all();
  rehearsal.scheduler().invalidate(2);
  rehearsal.scheduler().start_all();
  CHECK_EQ(taken(rehearsal), std::string("g0 g1 g2 g3 w2 g2 "));
  CHECK_EQ(rehearsal.peak(), int64_t{35});
}

}  // namespace
}  // namespace zerocore::test

int main() {
  zerocore::test::test_a_pass();
  zerocore::test::test_a_budget();
  zerocore::test::test_persistent();
}
