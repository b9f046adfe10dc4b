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
  // launch, wait (the host needs the result now), done, finish (of a reduction on the CPU: it is
  // over, whether or not the host has asked for it; one for each flat buffer); begin, end; need (of
  // a window that is gathered), release (its memory is given back); enter, leave (what the host
  // itself takes part in); raise (an exception).
  const char* event;
  // all_gather, reduce, drain, packing; window; compute, recompute (a unit's forward inside of a
  // backward), optimizer, checkpoint; or what was entered.
  const char* kind;
  const char* phase;  // forward, backward, idle
  int unit;           // index of the unit, -1: the whole model
  int64_t elements;   // elements that the collective works on, padding included
  // Of launch: the number of what went out together; of begin and wait: of the timed interval on
  // the device that begins (Runtime::time_device). -1: none.
  int64_t launch = -1;
  const char* dtype = "";  // of the elements; empty: of no or of several dtypes
};

struct Record : Event {
  int64_t sequence;    // goes on when the log is reset
  double time;         // seconds since the log was made
  int64_t forward;     // number of the newest forward
  int64_t recoveries;  // passes before it that ended in an exception
  // Among the events that are the same on all ranks, in the same order (need and enter), counted
  // from the last recovery; -1: not one of them.
  int64_t position;
};

// The same string for as long as the process lives.
const char* interned(const std::string& text);

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
  // A forward of the whole model begins.
  void begin_forward();
  // A pass has ended in an exception: ranks may have done different parts of it.
  void recover();
  int64_t recoveries() const;
  void count(const char* kind, int64_t elements, int64_t bytes);

  // Oldest first; those from a sequence number on.
  std::vector<Record> records(int64_t from = 0) const;
  // The sequence number of the next record.
  int64_t next() const;
  double now() const;
  // When it was made, in seconds of the steady clock (which is Python's time.monotonic()).
  double start() const;
  std::map<std::string, Traffic> traffic() const;
  void reset();

 private:
  const size_t capacity_;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  mutable std::mutex mutex_;
  std::vector<Record> ring_;  // a record's place is its sequence number modulo the capacity
  int64_t first_ = 0;         // the oldest that was not forgotten
  int64_t next_ = 0;
  int64_t forwards_ = 0;
  int64_t recoveries_ = 0;
  int64_t position_ = 0;
  std::map<std::string, Traffic> traffic_;
};

}  // namespace zerocore
