// Threads that run tasks: one in order, or several at once. Anybody may post one.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace zerocore {

// A thread starts with a task that finds no idle one, up to `threads`. Destruction waits for the
// tasks that can still end; one that is stuck in a collective whose peers are gone must not hold up
// the end of the process, so with tasks left the threads are left to themselves (they own all they
// touch).
class Worker {
 public:
  explicit Worker(size_t threads = 1) : most_(threads), queue_(std::make_shared<Queue>()) {}
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  ~Worker() {
    bool busy = false;
    {
      std::lock_guard<std::mutex> lock(queue_->mutex);
      queue_->stopped = true;
      busy = queue_->busy > 0 || !queue_->tasks.empty();
    }
    queue_->changed.notify_all();
    for (std::thread& thread : threads_) {
      if (busy) {
        thread.detach();
      } else {
        thread.join();
      }
    }
  }

  void post(std::function<void()> task) {
    {
      std::lock_guard<std::mutex> lock(queue_->mutex);
      queue_->tasks.push_back(std::move(task));
      const size_t wanted = queue_->busy + queue_->tasks.size();
      if (threads_.size() < std::min(wanted, most_)) {
        threads_.emplace_back([queue = queue_] { queue->run(); });
      }
    }
    queue_->changed.notify_one();
  }

 private:
  struct Queue {
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<std::function<void()>> tasks;
    size_t busy = 0;  // threads with a task
    bool stopped = false;

    void run() {
      std::unique_lock<std::mutex> lock(mutex);
      while (true) {
        changed.wait(lock, [&] { return stopped || !tasks.empty(); });
        if (tasks.empty()) return;
        std::function<void()> task = std::move(tasks.front());
        tasks.pop_front();
        ++busy;
        lock.unlock();
        task();
        task = nullptr;  // what it holds goes before the thread counts as idle
        lock.lock();
        --busy;
      }
    }
  };

  const size_t most_;
  std::shared_ptr<Queue> queue_;
  std::vector<std::thread> threads_;
};

}  // namespace zerocore
