// Worker threads: order of tasks, tasks at once, and an end that never waits for a stuck task.

#include <future>
#include <memory>
#include <set>
#include <thread>
#include <vector>

#include "check.h"
#include "runtime/worker.h"

namespace zerocore::test {
namespace {

void test_tasks_run_in_order() {
  Worker worker;
  std::vector<int> done;
  std::promise<void> finished;
  for (int i = 0; i < 1000; ++i) {
    worker.post([&done, i] { done.push_back(i); });
  }
  worker.post([&finished] { finished.set_value(); });
  finished.get_future().wait();
  CHECK_EQ(done.size(), 1000u);
  for (int i = 0; i < 1000; ++i) CHECK_EQ(done[static_cast<size_t>(i)], i);
}

void test_a_worker_without_tasks_ends() { Worker worker; }

void test_a_stuck_task_does_not_hold_up_the_end() {
  auto release = std::make_shared<std::promise<void>>();
  auto started = std::make_shared<std::promise<void>>();
  auto ended = std::make_shared<std::promise<void>>();
  {
    Worker worker;
    worker.post([release, started, ended] {
      started->set_value();
      release->get_future().wait();
      ended->set_value();
    });
    started->get_future().wait();
  }  // returns although the task has not
  release->set_value();
  ended->get_future().wait();
}

void test_a_task_that_waits_holds_up_no_other() {
  Worker worker(/*threads=*/3);
  std::promise<void> go;
  std::shared_future<void> gone = go.get_future().share();
  std::promise<void> first, second, third;
  worker.post([gone, &first] {
    gone.wait();
    first.set_value();
  });
  worker.post([gone, &second] {
    gone.wait();
    second.set_value();
  });
  worker.post([&third, &go] {
    third.set_value();
    go.set_value();
  });
  third.get_future().wait();
  first.get_future().wait();
  second.get_future().wait();
}

// Idle threads are used again: no more of them than tasks at once.
void test_threads_are_made_for_tasks_at_once_only() {
  Worker worker(/*threads=*/8);
  std::set<std::thread::id> threads;
  for (int i = 0; i < 100; ++i) {
    std::promise<void> done;
    worker.post([&] {
      threads.insert(std::this_thread::get_id());
      done.set_value();
    });
    done.get_future().wait();
  }
  // The next task may come before its predecessor's thread counts as idle.
  CHECK(threads.size() <= 2);
}

// A task's captures die before the worker takes the next one: they may hold leases.
void test_what_a_task_holds_goes_with_it() {
  Worker worker;
  auto held = std::make_shared<int>(1);
  std::promise<long> count;
  worker.post([held] {});
  worker.post([&count, &held] { count.set_value(held.use_count()); });
  CHECK_EQ(count.get_future().get(), 1);
}

}  // namespace
}  // namespace zerocore::test

int main() {
  zerocore::test::test_tasks_run_in_order();
  zerocore::test::test_a_worker_without_tasks_ends();
  zerocore::test::test_a_stuck_task_does_not_hold_up_the_end();
  zerocore::test::test_a_task_that_waits_holds_up_no_other();
  zerocore::test::test_threads_are_made_for_tasks_at_once_only();
  zerocore::test::test_what_a_task_holds_goes_with_it();
}
