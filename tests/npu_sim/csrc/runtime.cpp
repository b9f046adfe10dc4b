// Streams, events, memory and the device guard of the fake NPU.
//
// A stream is a queue of tasks. Nothing runs until somebody needs it: a host synchronisation, or a
// demanded stream that waits for an event, runs the queue up to the point it needs and no further.
// So work that nothing orders after its producer reads what was there before, every time. One mutex
// guards all queues; tasks run with it released.
//
// What a stream waits for runs when the stream gets there (NPU_SIM_SCHEDULE=late, the default), or
// before anything of the stream itself (early). Both are orders a device may choose. Late finds
// work on the waiting stream that overwrites what the other still reads, early finds work of the
// other that reads what the waiting stream has yet to write.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <thread>

#include "npu_sim.h"

namespace npu_sim {
namespace {

struct Entry {
  std::string name;
  Task task;
  MarkPtr records, waits_for;  // of event records and event waits
};

struct Queue {
  std::deque<Entry> tasks;
  std::thread::id runner;  // the thread inside one of this stream's tasks
  std::string running;
};

struct Device {
  std::map<c10::StreamId, Queue>
      queues;  // a map keeps its elements' addresses; streams are never destroyed
  std::multimap<std::pair<c10::StreamId, size_t>, void*>
      cache;  // freed memory by stream and size; never given back
  size_t allocated = 0, peak = 0, reserved = 0;
};

struct Block {
  size_t bytes;
  c10::Stream
      stream;  // where it was allocated: its memory is free once that stream passes the free ...
  std::vector<c10::Stream> used_on;  // ... and once these streams do
};

struct State {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<Device> devices;
  std::map<const void*, Block> blocks;
  std::map<const char*, size_t> pinned;
  c10::StreamId next_stream = 1;  // 0 is every device's default stream
  std::atomic<uint64_t> activity{0};
  std::vector<std::string> waits;
};
State& state() {  // never destroyed: autograd's threads and exit handlers still use it
  static State* s = [] {
    auto* made = new State;
    const char* count = std::getenv("NPU_SIM_DEVICES");
    made->devices.resize(count ? std::atoi(count) : 2);
    return made;
  }();
  return *s;
}
using Lock = std::unique_lock<std::mutex>;

thread_local c10::DeviceIndex this_device = 0;
thread_local std::map<c10::DeviceIndex, c10::StreamId> this_stream;

Queue& queue_of(const c10::Stream& stream) {
  return state().devices.at(stream.device_index()).queues[stream.id()];
}

}  // namespace

struct Mark {
  Queue* queue;
  bool done = false;
  int polls = 0;
  std::chrono::steady_clock::time_point time{};
};

void die(const std::string& message) {
  std::fprintf(stderr, "npu_sim: %s\n", message.c_str());
  std::abort();
}

namespace {

void run_front(Queue& queue, Lock& lock) {
  auto [name, task, records, waits_for] = std::move(queue.tasks.front());
  queue.tasks.pop_front();
  queue.runner = std::this_thread::get_id();
  queue.running = name;
  lock.unlock();
  try {
    KernelState state;
    task();
    task = nullptr;  // its captures must die outside the lock
  } catch (const std::exception&
               e) {  // as on a device: an asynchronous failure has no caller to report to
    die(name + " failed on the stream: " + e.what());
  }
  lock.lock();
  queue.runner = {};
  state().changed.notify_all();
}

void demand_locked(const MarkPtr& mark, Lock& lock) {
  static const bool early =
      std::getenv("NPU_SIM_SCHEDULE") && std::getenv("NPU_SIM_SCHEDULE") == std::string("early");
  if (mark->done) return;
  Queue& queue = *mark->queue;
  std::vector<MarkPtr> others;
  auto end = std::find_if(queue.tasks.begin(), queue.tasks.end(),
                          [&](const Entry& e) { return e.records == mark; });
  if (early && end != queue.tasks.end()) {  // else another thread is just recording it
    for (auto it = queue.tasks.begin(); it != end; ++it) {
      if (it->waits_for) others.push_back(it->waits_for);
    }
  }
  for (const MarkPtr& other : others) demand_locked(other, lock);
  while (!mark->done) {
    if (queue.runner == std::this_thread::get_id())
      die("task " + queue.running + " waits for its own stream");
    if (queue.runner != std::thread::id()) {
      state().changed.wait(lock);
    } else {
      run_front(queue, lock);  // not empty: the mark itself is still in it
    }
  }
}

MarkPtr add_mark_locked(Queue& queue) {
  auto mark = std::make_shared<Mark>(Mark{&queue});
  auto task = [mark] {
    Lock lock(state().mutex);
    mark->done = true;
    mark->time = std::chrono::steady_clock::now();
  };
  queue.tasks.push_back({"event record", task, mark, nullptr});
  return mark;
}

}  // namespace

c10::Device current_device() { return {kNpu, this_device}; }
uint64_t activity() { return state().activity; }

c10::Stream current_stream(c10::Device device) {
  c10::DeviceIndex index = device.has_index() ? device.index() : this_device;
  auto it = this_stream.find(index);
  return c10::Stream(c10::Stream::UNSAFE, {kNpu, index}, it == this_stream.end() ? 0 : it->second);
}

c10::Stream new_stream(c10::Device device) {
  Lock lock(state().mutex);
  return c10::Stream(c10::Stream::UNSAFE, {kNpu, device.has_index() ? device.index() : this_device},
                     state().next_stream++);
}

void enqueue(const c10::Stream& stream, std::string name, Task task) {
  Lock lock(state().mutex);
  ++state().activity;
  queue_of(stream).tasks.push_back({std::move(name), std::move(task), nullptr, nullptr});
}

MarkPtr add_mark(const c10::Stream& stream) {
  Lock lock(state().mutex);
  return add_mark_locked(queue_of(stream));
}

void add_wait(const c10::Stream& stream, const MarkPtr& mark) {
  Lock lock(state().mutex);
  Queue& queue = queue_of(stream);
  if (!mark || mark->done || mark->queue == &queue) return;
  queue.tasks.push_back({"event wait", [mark] { demand(mark); }, nullptr, mark});
}

void demand(const MarkPtr& mark) {
  Lock lock(state().mutex);
  if (mark) demand_locked(mark, lock);
}

// A program that polls would never finish if polling ran nothing. A helper runs the work, because
// it may block in a collective whose peer waits for what this thread does between two polls.
bool poll(const MarkPtr& mark) {
  Lock lock(state().mutex);
  if (!mark || mark->done) return true;
  if (++mark->polls == 100) std::thread([mark] { demand(mark); }).detach();
  return false;
}

void drain(const c10::Stream& stream) { demand(add_mark(stream)); }

void note_wait(const std::string& what) {
  Lock lock(state().mutex);
  state().waits.push_back(what);
}

std::vector<std::string> take_waits() {
  Lock lock(state().mutex);
  return std::exchange(state().waits, {});
}

// ---- memory ----

namespace {

constexpr int kPoison = 0xFF;  // NaN in every float type, -1 in every signed integer type

void free_memory(void* data);

struct NpuAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    c10::Stream stream = current_stream(current_device());
    if (bytes == 0) return {nullptr, nullptr, &free_memory, stream.device()};
    size_t rounded = (bytes + 511) / 512 * 512;
    Lock lock(state().mutex);
    Device& device = state().devices.at(stream.device_index());
    void* data;
    const auto key = std::make_pair(stream.id(), rounded);
    if (auto it = device.cache.find(key); it != device.cache.end()) {
      data = it->second;
      device.cache.erase(it);
    } else {
      data = std::aligned_alloc(512, rounded);
      TORCH_CHECK_WITH(OutOfMemoryError, data, "npu_sim: out of host memory");
      std::memset(data, kPoison, rounded);
      device.reserved += rounded;
    }
    device.allocated += rounded;
    device.peak = std::max(device.peak, device.allocated);
    state().blocks.emplace(data, Block{rounded, stream, {}});
    return {data, data, &free_memory, stream.device()};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_memory; }
  void copy_data(void* to, const void* from, size_t n) const override {
    enqueue(current_stream(current_device()), "copy_data", [=] { std::memcpy(to, from, n); });
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& p, c10::Stream stream) override {
    record_stream(p.get(), stream);
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    Lock lock(state().mutex);
    const Device& device = state().devices.at(index);
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0].current = int64_t(device.allocated);
    stats.allocated_bytes[0].peak = int64_t(device.peak);
    stats.reserved_bytes[0].current = stats.reserved_bytes[0].peak = int64_t(device.reserved);
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex index) override {
    Lock lock(state().mutex);
    state().devices.at(index).peak = state().devices.at(index).allocated;
  }
};
NpuAllocator npu_allocator;
REGISTER_ALLOCATOR(kNpu, &npu_allocator)

// As in a caching allocator, freed memory belongs to whatever comes next on its own stream, from
// now on. That stream overwrites it when it passes the free, so another one that uses it later, or
// that uses what is allocated of it without waiting for the stream, reads NaN. Where record_stream
// said so, the memory waits for other streams to pass the free, too.
void free_memory(void* data) {
  if (!data) return;
  Lock lock(state().mutex);
  auto node = state().blocks.extract(data);
  Block& block = node.mapped();
  Device& device = state().devices.at(block.stream.device_index());
  device.allocated -= block.bytes;
  const auto key = std::make_pair(block.stream.id(), block.bytes);
  if (block.used_on.empty()) {
    queue_of(block.stream)
        .tasks.push_back({"free",
                          [data, bytes = block.bytes] { std::memset(data, kPoison, bytes); },
                          nullptr, nullptr});
    device.cache.emplace(key, data);
    return;
  }
  auto users = std::make_shared<std::atomic<size_t>>(1 + block.used_on.size());
  Task release = [users, data, key, &device] {
    if (--*users > 0) return;
    std::memset(data, kPoison, key.second);
    Lock inner(state().mutex);
    device.cache.emplace(key, data);
  };
  block.used_on.push_back(block.stream);
  for (const c10::Stream& stream : block.used_on)
    queue_of(stream).tasks.push_back({"free", release, nullptr, nullptr});
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = std::aligned_alloc(64, (bytes + 64) / 64 * 64);
    Lock lock(state().mutex);
    state().pinned[static_cast<char*>(data)] = bytes;
    return {data, data, &release, c10::Device(c10::kCPU)};
  }
  static void release(
      void* data) {  // a pending copy holds the tensor, so nothing on a stream still needs it
    Lock lock(state().mutex);
    state().pinned.erase(static_cast<char*>(data));
    std::free(data);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
};
PinnedAllocator pinned_allocator;

}  // namespace

bool is_pinned(const void* data) {
  Lock lock(state().mutex);
  auto it = state().pinned.upper_bound(static_cast<const char*>(data));
  return it != state().pinned.begin() &&
         (--it, static_cast<const char*>(data) < it->first + it->second);
}

void record_stream(const void* data, const c10::Stream& stream) {
  Lock lock(state().mutex);
  auto it = state().blocks.find(data);
  if (it == state().blocks.end() || it->second.stream == stream) return;
  auto& used_on = it->second.used_on;
  if (std::find(used_on.begin(), used_on.end(), stream) == used_on.end()) used_on.push_back(stream);
}

void resize_bytes(const c10::Storage& storage, size_t bytes) {
  c10::DeviceIndex before = std::exchange(this_device, storage.device().index());
  c10::DataPtr fresh = npu_allocator.allocate(bytes);
  this_device = before;
  size_t kept = std::min(bytes, storage.nbytes());
  void *to = fresh.get(), *from = storage.unsafeGetStorageImpl()->mutable_data_ptr().get();
  if (kept)
    enqueue(current_stream(storage.device()), "resize", [=] { std::memcpy(to, from, kept); });
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
  storage.unsafeGetStorageImpl()->set_nbytes(bytes);
}

// ---- what torch calls ----

namespace {

using EventPtr = MarkPtr*;  // the void* inside a c10::Event
const MarkPtr& mark_of(void* event) {
  static const MarkPtr none;
  return event ? *static_cast<EventPtr>(event) : none;
}

struct NpuGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kNpu; }
  c10::Device getDevice() const override { return current_device(); }
  c10::Device exchangeDevice(c10::Device d) const override {
    c10::Device before = current_device();
    setDevice(d);
    return before;
  }
  void setDevice(c10::Device d) const override {
    TORCH_CHECK(d.index() >= 0 && d.index() < deviceCount(), "npu_sim: there is no device ", d);
    this_device = d.index();
  }
  void uncheckedSetDevice(c10::Device d) const noexcept override { this_device = d.index(); }
  c10::DeviceIndex deviceCount() const noexcept override {
    return c10::DeviceIndex(state().devices.size());
  }
  void synchronizeDevice(const c10::DeviceIndex index) const override {
    note_wait("synchronize device");
    Lock lock(state().mutex);
    std::vector<MarkPtr> marks;
    for (auto& [id, queue] : state().devices.at(index).queues)
      marks.push_back(add_mark_locked(queue));
    for (const MarkPtr& mark : marks) demand_locked(mark, lock);
  }

  c10::Stream getStream(c10::Device d) const override { return current_stream(d); }
  c10::Stream getDefaultStream(c10::Device d) const override {
    return c10::Stream(c10::Stream::UNSAFE, {kNpu, d.has_index() ? d.index() : this_device}, 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override { return new_stream(d); }
  c10::Stream getNewStream(c10::Device d, int) const override { return new_stream(d); }
  c10::Stream exchangeStream(c10::Stream s) const override {
    c10::Stream before = current_stream(s.device());
    this_stream[s.device_index()] = s.id();
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream s) const override {
    Lock lock(state().mutex);
    return &queue_of(s);
  }
  bool queryStream(const c10::Stream& s) const override {
    Lock lock(state().mutex);
    Queue& queue = queue_of(s);
    return queue.tasks.empty() && queue.runner == std::thread::id();
  }
  void synchronizeStream(const c10::Stream& s) const override {
    note_wait("synchronize stream");
    drain(s);
  }

  void record(void** event, const c10::Stream& s, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    if (!*event) *event = new MarkPtr;
    *static_cast<EventPtr>(*event) = add_mark(s);
  }
  void block(void* event, const c10::Stream& s) const override { add_wait(s, mark_of(event)); }
  bool queryEvent(void* event) const override { return poll(mark_of(event)); }
  void synchronizeEvent(void* event) const override {
    note_wait("synchronize event");
    demand(mark_of(event));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<EventPtr>(event);
  }
  double elapsedTime(void* a, void* b, const c10::DeviceIndex) const override {
    TORCH_CHECK(mark_of(a)->done && mark_of(b)->done, "npu_sim: both events must be completed");
    return std::chrono::duration<double, std::milli>(mark_of(b)->time - mark_of(a)->time).count();
  }
  void recordDataPtrOnStream(const c10::DataPtr& p, const c10::Stream& s) const override {
    record_stream(p.get(), s);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, NpuGuard)

struct NpuHooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return !state().devices.empty(); }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return NpuGuard().deviceCount(); }
  void setCurrentDevice(c10::DeviceIndex i) const override { NpuGuard().setDevice({kNpu, i}); }
  c10::DeviceIndex getCurrentDevice() const override { return this_device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex i) const override {
    return NpuGuard().exchangeDevice({kNpu, i}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex i) const override {
    return exchangeDevice(i < 0 ? this_device : i);
  }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  // Random numbers come from the CPU generator, so that a run can be compared with one on the CPU.
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::detail::createCPUGenerator();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_bytes(storage, bytes);
  }
};
[[maybe_unused]] const bool hooks_registered =
    (at::RegisterPrivateUse1HooksInterface(new NpuHooks), true);

}  // namespace
}  // namespace npu_sim
