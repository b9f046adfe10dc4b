// A thread that runs tasks in order. Anybody may post one.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

namespace zerocore {

// The thread starts with the first task. Destruction waits for the tasks that can still end; one
// that is stuck in a collective whose peers are gone must not hold up the end of the process, so
// with tasks left the thread is left to itself (it owns all it touches).
class Worker {
 public:
  Worker() : queue_(std::make_shared<Queue>()) {}
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  ~Worker() {
    bool busy = false;
    {
      std::lock_guard<std::mutex> lock(queue_->mutex);
      queue_->stopped = true;
      busy = queue_->busy || !queue_->tasks.empty();
    }
    queue_->changed.notify_all();
    if (!thread_.joinable()) return;
    if (busy) {
      thread_.detach();
    } else {
      thread_.join();
    }
  }

  void post(std::function<void()> task) {
    {
      std::lock_guard<std::mutex> lock(queue_->mutex);
      queue_->tasks.push_back(std::move(task));
      if (!thread_.joinable()) thread_ = std::thread([queue = queue_] { queue->run(); });
    }
    queue_->changed.notify_one();
  }

 private:
  struct Queue {
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<std::function<void()>> tasks;
    bool busy = false;
    bool stopped = false;

    void run() {
      std::unique_lock<std::mutex> lock(mutex);
      while (true) {
        changed.wait(lock, [&] { return stopped || !tasks.empty(); });
        if (tasks.empty()) return;
        std::function<void()> task = std::move(tasks.front());
        tasks.pop_front();
        busy = true;
        lock.unlock();
        task();
        task = nullptr;  // what it holds goes before the worker counts as idle
        lock.lock();
        busy = false;
      }
    }
  };

  std::shared_ptr<Queue> queue_;
  std::thread thread_;
};

}  // namespace zerocore
