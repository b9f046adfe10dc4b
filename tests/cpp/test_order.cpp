// The orders of gathers and reductions.

#include <algorithm>
#include <random>
#include <stdexcept>

#include "check.h"
#include "runtime/order.h"

namespace zerocore::test {
namespace {

using Units = std::vector<int>;

void check_units(const Units& actual, const Units& expected, int line) {
  if (actual != expected) {
    std::string text = "expected";
    for (int unit : expected) text += " " + std::to_string(unit);
    text += ", got";
    for (int unit : actual) text += " " + std::to_string(unit);
    fail(__FILE__, line, text);
  }
}
#define CHECK_UNITS(actual, ...) check_units(actual, Units __VA_ARGS__, __LINE__)

void run(GatherOrder& order, const Units& units) {
  order.begin();
  for (int unit : units) order.visit(unit);
  order.finish();
}

void test_gather_order_looks_ahead_in_the_last_pass() {
  GatherOrder order;
  order.begin();
  order.visit(0);
  CHECK_UNITS(order.upcoming(3), {});  // nothing is known yet
  run(order, {0, 1, 2, 3, 3, 2, 1});
  CHECK_UNITS(order.visited(), {0, 1, 2, 3, 2, 1});
  order.begin();
  CHECK_UNITS(order.upcoming(2), {});
  order.visit(0);
  CHECK_UNITS(order.upcoming(2), {1, 2});
  order.visit(1);
  order.visit(2);
  CHECK_UNITS(order.upcoming(1), {3});
  order.visit(3);
  CHECK_UNITS(order.upcoming(5), {2, 1});
  order.visit(2);  // backward
  CHECK_UNITS(order.upcoming(5), {1});
  order.visit(1);
  CHECK_UNITS(order.upcoming(5), {});
}

void test_gather_order_finds_its_place_again() {
  GatherOrder order;
  run(order, {0, 1, 2, 3, 4});
  order.begin();
  order.visit(0);
  order.visit(3);  // 1 and 2 are left out
  CHECK_UNITS(order.upcoming(2), {4});
  order.visit(7);  // unknown: the place stays
  order.visit(1);  // back
  CHECK_UNITS(order.upcoming(2), {2, 3});
  order.finish();
  CHECK_UNITS(order.visited(), {0, 3, 7, 1});
  order.begin();
  order.visit(0);
  CHECK_UNITS(order.upcoming(9), {3, 7, 1});  // the newest pass is what is expected
}

void test_gather_order_forgets_an_unfinished_pass() {
  GatherOrder order;
  run(order, {0, 1, 2});
  order.begin();
  order.visit(2);
  order.begin();  // the pass before ended in an exception
  order.visit(0);
  CHECK_UNITS(order.upcoming(5), {1, 2});
  CHECK_UNITS(order.visited(), {0});
}

void test_fingerprint_tells_orders_apart() {
  std::mt19937 random(1);
  for (int round = 0; round < 300; ++round) {
    Units units(2 + random() % 30);
    for (size_t i = 0; i < units.size(); ++i) units[i] = static_cast<int>(i);
    std::shuffle(units.begin(), units.end(), random);
    GatherOrder a, b, c, d;
    run(a, units);
    run(b, units);
    CHECK_EQ(a.fingerprint(), b.fingerprint());
    const size_t i = random() % (units.size() - 1);
    std::swap(units[i], units[i + 1]);
    run(c, units);
    CHECK(a.fingerprint() != c.fingerprint());
    units.pop_back();
    run(d, units);
    CHECK(c.fingerprint() != d.fingerprint());
  }
}

// What a rank issues when its gradients become ready in an order of its own.
Units issue(ReduceOrder& order, const std::vector<bool>& participates, const Units& ready,
            const std::vector<bool>& wanted) {
  order.begin(participates);
  Units issued;
  std::vector<bool> is_ready(participates.size(), false);
  for (int unit : ready) {
    order.ready(unit);
    is_ready[static_cast<size_t>(unit)] = true;
    for (int next : order.take()) {
      CHECK(is_ready[static_cast<size_t>(next)]);
      issued.push_back(next);
    }
  }
  for (int unit : order.flush(wanted)) issued.push_back(unit);
  CHECK(order.take().empty() && order.flush(wanted).empty());
  return issued;
}

void test_reductions_are_issued_in_one_order_on_all_ranks() {
  std::mt19937 random(2);
  for (int round = 0; round < 500; ++round) {
    const int units = 1 + static_cast<int>(random() % 20);
    ReduceOrder order(units);
    Units agreed(static_cast<size_t>(units));
    for (int i = 0; i < units; ++i) agreed[static_cast<size_t>(i)] = units - 1 - i;
    CHECK(order.agreed() == agreed);
    if (round % 2 == 0) {
      std::shuffle(agreed.begin(), agreed.end(), random);
      order.adopt(agreed);
    }
    std::vector<bool> participates(static_cast<size_t>(units));
    for (int i = 0; i < units; ++i) participates[static_cast<size_t>(i)] = random() % 5 != 0;
    Units expected;
    for (int unit : agreed) {
      if (participates[static_cast<size_t>(unit)]) expected.push_back(unit);
    }
    for (int rank = 0; rank < 4; ++rank) {
      // Some units never become ready on this rank, but another rank has used them: all are wanted.
      Units ready = expected;
      std::shuffle(ready.begin(), ready.end(), random);
      ready.resize(ready.size() - (ready.empty() ? 0 : random() % ready.size()));
      CHECK(issue(order, participates, ready, participates) == expected);
      Units observed = order.observed();
      CHECK(std::equal(ready.begin(), ready.end(), observed.begin()));
      std::sort(observed.begin(), observed.end());
      CHECK_EQ(observed.size(), agreed.size());
      CHECK(std::adjacent_find(observed.begin(), observed.end()) == observed.end());
    }
  }
}

void test_reductions_that_nobody_wants_are_left_out() {
  ReduceOrder order(4);
  const std::vector<bool> all(4, true);
  CHECK(issue(order, all, {3, 1}, {true, false, false, false}) == (Units{3, 0}));
  CHECK(issue(order, all, {}, std::vector<bool>(4, false)).empty());
}

void test_an_order_must_name_each_unit_once() {
  ReduceOrder order(3);
  for (const Units& bad : {Units{0, 1}, Units{0, 1, 1}, Units{0, 1, 3}, Units{0, 1, 2, 3}}) {
    CHECK_THROWS(std::invalid_argument, "expected each unit once", order.adopt(bad));
  }
  order.adopt({1, 0, 2});
  CHECK_UNITS(order.agreed(), {1, 0, 2});
}

}  // namespace
}  // namespace zerocore::test

int main() {
  using namespace zerocore::test;
  test_gather_order_looks_ahead_in_the_last_pass();
  test_gather_order_finds_its_place_again();
  test_gather_order_forgets_an_unfinished_pass();
  test_fingerprint_tells_orders_apart();
  test_reductions_are_issued_in_one_order_on_all_ranks();
  test_reductions_that_nobody_wants_are_left_out();
  test_an_order_must_name_each_unit_once();
}
