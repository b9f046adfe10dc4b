// What the runtime did, in order: collectives and the computations they hide behind.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace zerocore {

// Static strings, so that a record costs no allocation.
struct Event {
  const char* event;  // launch, wait (the host needs the result now), done; begin, end
  const char* kind;   // all_gather, reduce, broadcast, control; compute
  const char* phase;  // forward, backward, idle
  int unit;           // index of the unit, -1: the whole model
  int64_t elements;   // elements that the collective works on, padding included
  int64_t launch;     // number of the launch that it is part of; -1: none
};

struct Record : Event {
  int64_t sequence;
  double time;  // seconds since the log was made
};

// What this rank handed to the process group.
struct Traffic {
  int64_t calls = 0;
  int64_t elements = 0;
  int64_t bytes = 0;
};

// A ring of the newest records, and running totals per kind of collective. Thread-safe.
class Log {
 public:
  explicit Log(size_t capacity = 16384) : capacity_(capacity) {}

  void add(const Event& event);
  void count(const char* kind, int64_t elements, int64_t bytes);

  // Oldest first.
  std::vector<Record> records() const;
  std::map<std::string, Traffic> traffic() const;
  void reset();

 private:
  const size_t capacity_;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  mutable std::mutex mutex_;
  std::vector<Record> ring_;
  int64_t next_ = 0;
  std::map<std::string, Traffic> traffic_;
};

}  // namespace zerocore
