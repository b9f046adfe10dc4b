// Streams and events. A stream is a queue of tasks; whoever needs a result runs the queue up to the
// point it needs.
//
// One mutex guards all queues; tasks run with it released. A stream is run by one thread at a time,
// and a thread that meets a wait on another stream's mark runs that stream too, or waits for the
// thread that is running it. Events can only refer to work enqueued earlier, so these waits form no
// cycle.
#include <atomic>
#include <condition_variable>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>

#include "sim.h"

namespace cuda_sim {

struct Named {
  const char* name;
  Task run;
};

struct Stream {
  int device = 0;
  int priority = 0;
  bool blocking = false;  // implicitly ordered with the null stream
  std::deque<Named> queue;
  std::thread::id runner;  // the thread inside one of this stream's tasks
  const char* running = nullptr;
  int polls = 0;
  bool background = false;  // a helper thread is already running it because of polling
};

struct Mark {
  Stream* stream = nullptr;
  bool done = false;
  int polls = 0;
  std::chrono::steady_clock::time_point time;
};

struct Event {
  std::shared_ptr<Mark> mark;
};

namespace {

// Never destroyed: other libraries' exit handlers and detached threads still use it.
struct State {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<Stream*> streams;  // never shrinks, so a mark may keep a plain pointer to its stream
  std::map<int, Stream*> null_streams;
  std::atomic<unsigned long> activity{0};
};
State& state() {
  static State* s = new State;
  return *s;
}
using Lock = std::unique_lock<std::mutex>;

Stream* new_stream(int device, int priority, bool blocking) {
  auto* stream = new Stream;
  stream->device = device;
  stream->priority = priority;
  stream->blocking = blocking;
  state().streams.push_back(stream);
  return stream;
}

void run_front(Stream* stream, Lock& lock) {
  Named task = std::move(stream->queue.front());
  stream->queue.pop_front();
  stream->runner = std::this_thread::get_id();
  stream->running = task.name;
  lock.unlock();
  int device_before = current_device();
  cudaSetDevice(stream->device);
  task.run();
  task.run = nullptr;  // its captures must die outside the lock
  cudaSetDevice(device_before);
  lock.lock();
  stream->runner = {};
  stream->running = nullptr;
  state().changed.notify_all();
}

// Runs the stream until finished() holds. finished() is called with the lock held.
template <class Finished>
void run_until(Stream* stream, Lock& lock, Finished finished) {
  while (!finished()) {
    if (stream->runner == std::this_thread::get_id()) {
      die("task '%s' waits for its own stream", stream->running);
    } else if (stream->runner != std::thread::id()) {
      state().changed.wait(lock);
    } else if (!stream->queue.empty()) {
      run_front(stream, lock);
    } else {
      die("a wait can never finish: the stream is empty and the mark was not reached");
    }
  }
}

bool is_idle(const Stream* stream) {
  return stream->queue.empty() && stream->runner == std::thread::id();
}

void wait_for(const std::shared_ptr<Mark>& mark, Lock& lock) {
  run_until(mark->stream, lock, [&] { return mark->done; });
}

// A polling thread must not run the work itself: it may block in a collective whose peer waits for
// something this thread does between two polls. A helper thread has no such duty.
void run_in_background(Stream* stream, std::shared_ptr<Mark> mark) {
  if (stream->background) return;
  stream->background = true;
  std::thread([stream, mark] {
    Lock lock(state().mutex);
    run_until(stream, lock, [&] { return mark ? mark->done : is_idle(stream); });
    stream->background = false;
  }).detach();
}

std::shared_ptr<Mark> add_mark_locked(Stream* stream) {
  auto mark = std::make_shared<Mark>();
  mark->stream = stream;
  stream->queue.push_back({"event record", [mark] {
                             Lock lock(state().mutex);
                             mark->done = true;
                             mark->time = std::chrono::steady_clock::now();
                           }});
  return mark;
}

void add_wait_locked(Stream* stream, std::shared_ptr<Mark> mark) {
  if (mark->done || mark->stream == stream) return;
  stream->queue.push_back({"event wait", [mark] {
                             Lock lock(state().mutex);
                             wait_for(mark, lock);
                           }});
}

// The null stream waits for all streams that were not created as non-blocking, and they wait for
// it.
void add_null_stream_order(Stream* stream) {
  Stream* null_stream = nullptr;
  if (auto it = state().null_streams.find(stream->device); it != state().null_streams.end())
    null_stream = it->second;
  if (stream == null_stream) {
    for (Stream* other : state().streams) {
      if (other->blocking && other->device == stream->device && !is_idle(other)) {
        add_wait_locked(stream, add_mark_locked(other));
      }
    }
  } else if (stream->blocking && null_stream && !is_idle(null_stream)) {
    add_wait_locked(stream, add_mark_locked(null_stream));
  }
}

void run_if_eager(Stream* stream, Lock& lock) {
  if (config().schedule != Schedule::eager) return;
  if (stream->runner == std::this_thread::get_id())
    die("task '%s' enqueues on its own stream", stream->running);
  run_until(stream, lock, [&] { return is_idle(stream); });
}

}  // namespace

void die(const char* format, ...) {
  char text[2048];  // one write, so that messages of several ranks do not mix
  va_list args;
  va_start(args, format);
  std::vsnprintf(text, sizeof text, format, args);
  va_end(args);
  std::fprintf(stderr, "cuda_sim: %s\n", text);
  std::abort();
}

const Config& config() {
  static const Config c = [] {
    auto number = [](const char* name, long fallback) {
      const char* text = std::getenv(name);
      return text && *text ? std::atol(text) : fallback;
    };
    Config r;
    const char* schedule = std::getenv("CUDA_SIM_SCHEDULE");
    if (!schedule || !*schedule || !std::strcmp(schedule, "eager")) {
      r.schedule = Schedule::eager;
    } else if (!std::strcmp(schedule, "lazy")) {
      r.schedule = Schedule::lazy;
    } else {
      die("CUDA_SIM_SCHEDULE must be eager or lazy, not '%s'", schedule);
    }
    r.devices = int(number("CUDA_SIM_DEVICES", 1));
    r.device_bytes = size_t(number("CUDA_SIM_DEVICE_MIB", 8192)) << 20;
    r.check_pointers = number("CUDA_SIM_CHECK", 1) != 0;
    r.polls_per_demand = int(number("CUDA_SIM_POLLS", 1000));
    return r;
  }();
  return c;
}

Stream* resolve(cudaStream_t handle) {
  // 0 is the default stream; cudaStreamLegacy and cudaStreamPerThread (1 and 2) are taken to mean
  // the same one.
  if (uintptr_t(handle) > 2) return reinterpret_cast<Stream*>(handle);
  Lock lock(state().mutex);
  Stream*& stream = state().null_streams[current_device()];
  if (!stream) stream = new_stream(current_device(), 0, false);
  return stream;
}

int device_of(const Stream* stream) { return stream->device; }

void enqueue(Stream* stream, const char* name, Task task) {
  Lock lock(state().mutex);
  add_null_stream_order(stream);
  ++state().activity;
  stream->queue.push_back({name, std::move(task)});
  run_if_eager(stream, lock);
}

// Waits for what is enqueued now, not for what other threads add meanwhile.
void drain(Stream* stream) {
  Lock lock(state().mutex);
  add_null_stream_order(stream);
  if (!is_idle(stream)) wait_for(add_mark_locked(stream), lock);
}

void drain_device(int device) {
  Lock lock(state().mutex);
  for (size_t i = 0; i < state().streams.size(); ++i) {  // a task may create a stream meanwhile
    Stream* stream = state().streams[i];
    if (stream->device == device && !is_idle(stream)) wait_for(add_mark_locked(stream), lock);
  }
}

void add_wait(Stream* stream, std::shared_ptr<Mark> mark) {
  Lock lock(state().mutex);
  add_wait_locked(stream, std::move(mark));
  run_if_eager(stream, lock);
}

std::shared_ptr<Mark> add_mark(Stream* stream) {
  Lock lock(state().mutex);
  add_null_stream_order(stream);
  auto mark = add_mark_locked(stream);
  run_if_eager(stream, lock);
  return mark;
}

namespace {

cudaError_t query(Stream* stream, const std::shared_ptr<Mark>& mark) {
  Lock lock(state().mutex);
  if (mark ? mark->done : is_idle(stream)) return cudaSuccess;
  int& polls = mark ? mark->polls : stream->polls;
  if (++polls >= config().polls_per_demand) {
    polls = 0;
    run_in_background(stream, mark);
  }
  return cudaErrorNotReady;
}

std::shared_ptr<Mark> mark_of(cudaEvent_t event) {
  Lock lock(state().mutex);
  return reinterpret_cast<Event*>(event)->mark;
}

}  // namespace
}  // namespace cuda_sim

using namespace cuda_sim;

SIM_EXPORT int cuda_sim_is_lazy() { return config().schedule == Schedule::lazy; }

SIM_EXPORT unsigned long cuda_sim_activity() { return state().activity; }

SIM_EXPORT int cuda_sim_pending() {
  Lock lock(state().mutex);
  int pending = 0;
  for (Stream* stream : state().streams) pending += int(stream->queue.size());
  return pending;
}

// ---- streams ----

SIM_EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags,
                                                    int priority) {
  Lock lock(state().mutex);
  bool blocking = !(flags & cudaStreamNonBlocking);
  *stream = reinterpret_cast<cudaStream_t>(new_stream(current_device(), priority, blocking));
  return cudaSuccess;
}

SIM_EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}

SIM_EXPORT cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return cudaStreamCreateWithPriority(stream, 0, 0);
}

// CUDA lets the work of a destroyed stream finish, so the object has to outlive its handle; it is
// simply kept.
SIM_EXPORT cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }

SIM_EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  *priority = resolve(stream)->priority;
  return cudaSuccess;
}

SIM_EXPORT cudaError_t cudaStreamGetFlags(cudaStream_t stream, unsigned* flags) {
  *flags = resolve(stream)->blocking ? cudaStreamDefault : cudaStreamNonBlocking;
  return cudaSuccess;
}

SIM_EXPORT cudaError_t cudaStreamGetDevice(cudaStream_t stream, int* device) {
  *device = resolve(stream)->device;
  return cudaSuccess;
}

// Not recorded for cudaGetLastError: "not ready" is an answer, not an error.
SIM_EXPORT cudaError_t cudaStreamQuery(cudaStream_t stream) {
  return query(resolve(stream), nullptr);
}

SIM_EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  count(Count::stream_syncs);
  drain(resolve(stream));
  return cudaSuccess;
}

SIM_EXPORT cudaError_t cudaDeviceSynchronize() {
  count(Count::device_syncs);
  drain_device(current_device());
  return cudaSuccess;
}

SIM_EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  count(Count::event_waits);
  if (auto mark = mark_of(event))
    add_wait(resolve(stream), mark);  // waiting for an unrecorded event does nothing
  return cudaSuccess;
}

static thread_local std::string next_host_func_name;

SIM_EXPORT void cuda_sim_name_next_host_func(const char* name) { next_host_func_name = name; }

SIM_EXPORT cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  count_host_func(next_host_func_name.empty() ? "(unnamed)" : next_host_func_name);
  next_host_func_name.clear();
  enqueue(resolve(stream), "host function", [=] { function(data); });
  return cudaSuccess;
}

SIM_EXPORT cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t callback,
                                             void* data, unsigned) {
  enqueue(resolve(stream), "stream callback", [=] { callback(stream, cudaSuccess, data); });
  return cudaSuccess;
}

// ---- events ----

SIM_EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = reinterpret_cast<cudaEvent_t>(new Event);
  return cudaSuccess;
}

SIM_EXPORT cudaError_t cudaEventCreate(cudaEvent_t* event) {
  return cudaEventCreateWithFlags(event, 0);
}

SIM_EXPORT cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete reinterpret_cast<Event*>(event);
  return cudaSuccess;
}

SIM_EXPORT cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  count(Count::event_records);
  auto mark = add_mark(resolve(stream));
  Lock lock(state().mutex);
  reinterpret_cast<Event*>(event)->mark = mark;
  return cudaSuccess;
}

SIM_EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}

SIM_EXPORT cudaError_t cudaEventQuery(cudaEvent_t event) {
  auto mark = mark_of(event);
  return mark ? query(mark->stream, mark) : cudaSuccess;
}

SIM_EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  count(Count::event_syncs);
  auto mark = mark_of(event);
  if (!mark) return cudaSuccess;
  Lock lock(state().mutex);
  wait_for(mark, lock);
  return cudaSuccess;
}

SIM_EXPORT cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start,
                                            cudaEvent_t end) {
  auto a = mark_of(start), b = mark_of(end);
  if (!a || !b) return report(cudaErrorInvalidResourceHandle);
  Lock lock(state().mutex);
  if (!a->done || !b->done) return report(cudaErrorNotReady);
  *milliseconds = std::chrono::duration<float, std::milli>(b->time - a->time).count();
  return cudaSuccess;
}
