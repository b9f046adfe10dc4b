// The clock of streams: what a wait implies, by hand and against a search over the waits.

#include <random>
#include <vector>

#include "check.h"
#include "runtime/clock.h"

namespace zerocore::test {
namespace {

void test_nothing_is_known_before_a_wait() {
  Clock clock;
  const Point nothing;
  const Point at = clock.now(0);
  CHECK(clock.knows(1, nothing));
  CHECK(clock.knows(0, at));  // a stream comes after what it was given
  CHECK(!clock.knows(1, at));
  clock.learn(1, Clock::Row(clock.row(0)));
  CHECK(clock.knows(1, at));
  CHECK(!clock.knows(1, clock.now(0)));
}

void test_waits_are_transitive() {
  Clock clock;
  const Point first = clock.now(0);
  clock.learn(1, Clock::Row(clock.row(0)));
  clock.now(1);
  clock.learn(2, Clock::Row(clock.row(1)));
  CHECK(clock.knows(2, first));
  // But not backwards.
  const Point last = clock.now(2);
  CHECK(!clock.knows(0, last) && !clock.knows(1, last));
}

void test_an_old_row_teaches_what_it_held() {
  Clock clock;
  const Point first = clock.now(0);
  const Clock::Row then = clock.row(0);
  const Point second = clock.now(0);
  clock.learn(1, then);
  CHECK(clock.knows(1, first));
  CHECK(!clock.knows(1, second));
  clock.now(7);  // streams that come later change nothing
  CHECK(clock.knows(1, first) && !clock.knows(1, second));
}

// A wait of `waiter` at its own moment for all of `stream` up to `time`.
struct Edge {
  int waiter;
  int stream;
  int64_t time;
  int64_t made;  // when, in one count over all streams
};

// Whether `waiter` comes after the point by way of edges made before `now`: the definition.
bool reaches(const std::vector<Edge>& edges, const std::vector<std::vector<int64_t>>& made,
             int waiter, int64_t now, const Point& point) {
  if (waiter == point.stream) {
    return made[static_cast<size_t>(waiter)][static_cast<size_t>(point.time) - 1] < now;
  }
  for (const Edge& edge : edges) {
    if (edge.waiter != waiter || edge.made >= now) continue;
    const int64_t then = made[static_cast<size_t>(edge.stream)][static_cast<size_t>(edge.time) - 1];
    if (edge.stream == point.stream && edge.time >= point.time) return true;
    if (reaches(edges, made, edge.stream, then, point)) return true;
  }
  return false;
}

void test_random_waits(unsigned seed) {
  std::mt19937 random(seed);
  const int streams = 4;
  Clock clock;
  std::vector<Edge> edges;
  std::vector<std::vector<int64_t>> made(streams);  // [stream][time - 1]
  std::vector<Point> points;
  int64_t now = 0;
  const auto tick = [&](int stream) {
    made[static_cast<size_t>(stream)].push_back(now++);
    return clock.now(stream);
  };
  for (int i = 0; i < 14; ++i) {
    const int stream = static_cast<int>(random() % streams);
    points.push_back(tick(stream));
    const int waiter = static_cast<int>(random() % streams);
    if (waiter != stream) {
      const Point end = tick(stream);
      edges.push_back({waiter, stream, end.time, now++});
      clock.learn(waiter, Clock::Row(clock.row(stream)));
    }
    for (const Point& point : points) {
      for (int other = 0; other < streams; ++other) {
        CHECK_EQ(clock.knows(other, point), reaches(edges, made, other, now, point));
      }
    }
  }
}

}  // namespace
}  // namespace zerocore::test

int main() {
  zerocore::test::test_nothing_is_known_before_a_wait();
  zerocore::test::test_waits_are_transitive();
  zerocore::test::test_an_old_row_teaches_what_it_held();
  for (unsigned seed = 0; seed < 200; ++seed) zerocore::test::test_random_waits(seed);
}
