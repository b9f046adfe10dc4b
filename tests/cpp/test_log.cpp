// The log: order, the ring, and several threads.

#include <thread>

#include "check.h"
#include "runtime/log.h"

namespace zerocore::test {
namespace {

void test_the_ring_holds_the_newest() {
  Log log(10);
  CHECK(log.records().empty());
  for (int i = 0; i < 37; ++i) {
    log.add({"launch", "all_gather", "forward", i, 100 + i, i});
    const std::vector<Record> records = log.records();
    CHECK_EQ(records.size(), static_cast<size_t>(i < 10 ? i + 1 : 10));
    CHECK_EQ(records.back().sequence, i);
    for (size_t k = 0; k < records.size(); ++k) {
      CHECK_EQ(records[k].sequence, records[0].sequence + static_cast<int64_t>(k));
      CHECK_EQ(records[k].unit, records[k].sequence);
      CHECK_EQ(records[k].elements, 100 + records[k].sequence);
      CHECK(k == 0 || records[k].time >= records[k - 1].time);
    }
  }
  log.reset();
  CHECK(log.records().empty());
  log.add({"done", "reduce", "backward", 3, 5, -1});
  CHECK_EQ(log.records().size(), 1u);
  CHECK_EQ(log.records().at(0).sequence, 37);
  CHECK_EQ(std::string(log.records().at(0).kind), "reduce");
}

void test_positions_count_what_ranks_share() {
  Log log(4);
  log.begin_forward();
  log.add({"need", "window", "forward", 0, 8});
  log.add({"launch", "all_gather", "forward", 0, 8});
  log.add({"enter", "agreement", "backward", -1, 0});
  std::vector<Record> records = log.records();
  CHECK_EQ(records[0].position, 0);
  CHECK_EQ(records[1].position, -1);
  CHECK_EQ(records[2].position, 1);
  log.recover();
  log.begin_forward();
  log.add({"need", "window", "forward", 0, 8});
  records = log.records(3);
  CHECK_EQ(records.size(), 1u);
  CHECK_EQ(records[0].position, 0);
  CHECK_EQ(records[0].recoveries, 1);
  CHECK_EQ(records[0].forward, 2);
  CHECK_EQ(log.next(), 4);
}

void test_traffic_is_added_up() {
  Log log;
  log.count("all_gather", 10, 40);
  log.count("all_gather", 5, 10);
  log.count("control", 1, 8);
  const std::map<std::string, Traffic> traffic = log.traffic();
  CHECK_EQ(traffic.size(), 2u);
  CHECK_EQ(traffic.at("all_gather").calls, 2);
  CHECK_EQ(traffic.at("all_gather").elements, 15);
  CHECK_EQ(traffic.at("all_gather").bytes, 50);
  CHECK_EQ(traffic.at("control").bytes, 8);
  log.reset();
  CHECK(log.traffic().empty());
}

void test_threads() {
  constexpr int kThreads = 4, kEvents = 3000;
  Log log(kThreads * kEvents);
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&log, t] {
      for (int i = 0; i < kEvents; ++i) {
        log.add({"begin", "compute", "forward", t, i, -1});
        log.count(t % 2 == 0 ? "reduce" : "all_gather", 2, 8);
        if (i % 500 == 0) CHECK(!log.records().empty() && !log.traffic().empty());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  const std::vector<Record> records = log.records();
  CHECK_EQ(records.size(), static_cast<size_t>(kThreads * kEvents));
  int64_t next[kThreads] = {};  // each thread's events are there once and in its order
  for (size_t k = 0; k < records.size(); ++k) {
    CHECK_EQ(records[k].sequence, static_cast<int64_t>(k));
    CHECK(k == 0 || records[k].time >= records[k - 1].time);
    CHECK_EQ(records[k].elements, next[records[k].unit]);
    ++next[records[k].unit];
  }
  CHECK_EQ(log.traffic().at("reduce").calls, 2 * kEvents);
  CHECK_EQ(log.traffic().at("all_gather").bytes, 2 * kEvents * 8);
}

}  // namespace
}  // namespace zerocore::test

int main() {
  zerocore::test::test_the_ring_holds_the_newest();
  zerocore::test::test_positions_count_what_ranks_share();
  zerocore::test::test_traffic_is_added_up();
  zerocore::test::test_threads();
}
