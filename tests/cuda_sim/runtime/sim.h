// Internal interface between the parts of the fake CUDA runtime.
#pragma once
#include <cuda_runtime_api.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "cuda_sim_api.h"

#define SIM_EXPORT extern "C" __attribute__((visibility("default")))

namespace cuda_sim {

// eager: work runs inside the call that enqueues it, as under CUDA_LAUNCH_BLOCKING=1.
// lazy:  work runs only when a synchronisation, an event wait or a peer's collective demands it. A
// consumer that
//        forgot to wait for its producer then reads poison every time, not only when the timing is
//        unlucky.
enum class Schedule { eager, lazy };

struct Config {
  Schedule schedule;
  int devices;
  size_t device_bytes;
  bool check_pointers;
  int polls_per_demand;  // a query counts as a demand after this many "not ready" answers
};
const Config& config();

[[noreturn]] void die(const char* format, ...) __attribute__((format(printf, 1, 2)));

// ---- errors and the current device (device.cpp) ----
cudaError_t report(cudaError_t error);  // remembers it for cudaGetLastError and returns it
int current_device();

// ---- streams and events (scheduler.cpp) ----
struct Stream;
struct Mark;  // one point in a stream's queue: what an event refers to after it was recorded
using Task = std::function<void()>;

Stream* resolve(cudaStream_t handle);
int device_of(const Stream* stream);
void enqueue(Stream* stream, const char* name, Task task);
void drain(Stream* stream);
void drain_device(int device);
void add_wait(Stream* stream, std::shared_ptr<Mark> mark);
std::shared_ptr<Mark> add_mark(Stream* stream);

// ---- memory (memory.cpp) ----
enum class Space { device, pinned, unknown };
struct Allocation {
  uintptr_t base = 0;
  size_t bytes = 0;
  int device = 0;
  Space space = Space::unknown;
};
Allocation find_allocation(const void* p);  // space == unknown when p lies in no live allocation
bool was_freed(const void* p);
void check_range(const void* p, size_t bytes, const std::string& user);

// ---- counters (counters.cpp) ----
enum class Count {
  event_records,
  event_waits,
  event_syncs,
  stream_syncs,
  device_syncs,
  host_funcs,
  mallocs,
  frees,
  last
};
void count(Count what);
void count_launch(const std::string& kernel);
void count_host_func(const std::string& name);
void count_copy(const char* kind, size_t bytes);
void count_allocation(int device, ptrdiff_t delta);  // delta < 0 for a free
size_t allocated_bytes(int device);

}  // namespace cuda_sim
