// Device memory is host memory in its own mappings; copies run as stream tasks.
//
// Fresh device memory holds 0xFF bytes (NaN in every float type), so reading what was never written
// shows. Freed device memory becomes inaccessible and its addresses are not reused for a while, so
// touching it is a crash that the handler below explains, not a silent success.
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>

#include "sim.h"

namespace cuda_sim {
namespace {

constexpr unsigned char kFreshByte = 0xFF;
constexpr size_t kPage = 4096;
constexpr size_t kMaxFreedRanges =
    8192;  // each may cost one kernel mapping; the usual limit is 65530

struct Memory {
  std::mutex mutex;
  std::map<uintptr_t, Allocation> live;
  std::map<uintptr_t, size_t> freed;  // base -> mapped bytes, inaccessible
  std::deque<uintptr_t> freed_order;
};
Memory& memory() {
  static Memory* m = new Memory;
  return *m;
}

size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

bool freed_range_at(uintptr_t address, uintptr_t* base, size_t* bytes) {
  auto it = memory().freed.upper_bound(address);
  if (it == memory().freed.begin()) return false;
  --it;
  *base = it->first;
  *bytes = it->second;
  return address < it->first + it->second;
}

struct sigaction previous_segv;

// Formats into a local buffer and only tries the lock: the crash may come from anywhere.
void explain_segv(int signal_number, siginfo_t* info, void* context) {
  uintptr_t base;
  size_t bytes;
  if (memory().mutex.try_lock()) {
    if (freed_range_at(uintptr_t(info->si_addr), &base, &bytes)) {
      char text[256];
      int n = std::snprintf(text, sizeof text,
                            "cuda_sim: access to %p in freed device memory [%p, +%zu)\n",
                            info->si_addr, reinterpret_cast<void*>(base), bytes);
      if (write(STDERR_FILENO, text, size_t(n)) < 0) _exit(139);
    }
    memory().mutex.unlock();
  }
  if ((previous_segv.sa_flags & SA_SIGINFO) && previous_segv.sa_sigaction) {
    previous_segv.sa_sigaction(signal_number, info, context);
  } else {
    sigaction(SIGSEGV, &previous_segv,
              nullptr);  // returning repeats the access under the old disposition
  }
}

void install_segv_handler() {
  struct sigaction action{};
  action.sa_sigaction = explain_segv;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGSEGV, &action, &previous_segv);
}

cudaError_t allocate(void** p, size_t bytes, Space space) {
  static std::once_flag once;
  std::call_once(once, install_segv_handler);
  *p = nullptr;
  if (bytes == 0) return cudaSuccess;
  int device = current_device();
  if (space == Space::device && allocated_bytes(device) + bytes > config().device_bytes) {
    return report(cudaErrorMemoryAllocation);
  }
  size_t mapped = round_up(bytes, kPage);
  void* base = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED) return report(cudaErrorMemoryAllocation);
  std::memset(base, kFreshByte, mapped);
  {
    std::lock_guard<std::mutex> lock(memory().mutex);
    memory().live[uintptr_t(base)] = {uintptr_t(base), bytes, device, space};
  }
  if (space == Space::device) {
    count(Count::mallocs);
    count_allocation(device, ptrdiff_t(bytes));
  }
  *p = base;
  return cudaSuccess;
}

cudaError_t release(void* p, Space space) {
  if (!p) return cudaSuccess;
  Allocation a;
  {
    std::lock_guard<std::mutex> lock(memory().mutex);
    auto it = memory().live.find(uintptr_t(p));
    if (it == memory().live.end() || it->second.space != space)
      return report(cudaErrorInvalidValue);
    a = it->second;
    memory().live.erase(it);
    size_t mapped = round_up(a.bytes, kPage);
    mprotect(p, mapped, PROT_NONE);
    madvise(p, mapped, MADV_DONTNEED);
    memory().freed[a.base] = mapped;
    memory().freed_order.push_back(a.base);
    if (memory().freed_order.size() > kMaxFreedRanges) {
      auto oldest = memory().freed.find(memory().freed_order.front());
      munmap(reinterpret_cast<void*>(oldest->first), oldest->second);
      memory().freed.erase(oldest);
      memory().freed_order.pop_front();
    }
  }
  if (space == Space::device) {
    count(Count::frees);
    count_allocation(a.device, -ptrdiff_t(a.bytes));
  }
  return cudaSuccess;
}

const char* side(Space space) { return space == Space::device ? "d" : "h"; }

// Pageable host memory is unknown here and cannot be checked.
void check_copy_side(const void* p, size_t bytes, const char* user) {
  if (find_allocation(p).space != Space::unknown || was_freed(p)) check_range(p, bytes, user);
}

void copy_bytes(void* to, const void* from, size_t bytes) {
  check_copy_side(to, bytes, "cudaMemcpy (destination)");
  check_copy_side(from, bytes, "cudaMemcpy (source)");
  std::memmove(to, from, bytes);
}

void enqueue_copy(void* to, const void* from, size_t bytes, Stream* stream) {
  Space to_space = find_allocation(to).space, from_space = find_allocation(from).space;
  count_copy((std::string(side(from_space)) + "2" + side(to_space)).c_str(), bytes);
  if (from_space == Space::unknown && !was_freed(from)) {
    // CUDA stages pageable sources before it returns: the caller may change or free them at once.
    auto staged = std::make_shared<std::vector<char>>(static_cast<const char*>(from),
                                                      static_cast<const char*>(from) + bytes);
    enqueue(stream, "memcpy", [=] { copy_bytes(to, staged->data(), bytes); });
  } else {
    enqueue(stream, "memcpy", [=] { copy_bytes(to, from, bytes); });
  }
  // A copy into pageable memory returns when it is complete.
  if (to_space == Space::unknown && !was_freed(to)) drain(stream);
}

}  // namespace

Allocation find_allocation(const void* p) {
  std::lock_guard<std::mutex> lock(memory().mutex);
  auto it = memory().live.upper_bound(uintptr_t(p));
  if (it == memory().live.begin()) return {};
  const Allocation& a = (--it)->second;
  return uintptr_t(p) < a.base + a.bytes ? a : Allocation{};
}

bool was_freed(const void* p) {
  std::lock_guard<std::mutex> lock(memory().mutex);
  uintptr_t base;
  size_t bytes;
  return freed_range_at(uintptr_t(p), &base, &bytes);
}

void check_range(const void* p, size_t bytes, const std::string& user) {
  if (!config().check_pointers || !p || bytes == 0) return;
  Allocation a = find_allocation(p);
  if (a.space == Space::unknown) {
    die("%s uses %p, which is %s", user.c_str(), p,
        was_freed(p) ? "in freed device memory" : "in no live device or pinned allocation");
  }
  if (uintptr_t(p) + bytes > a.base + a.bytes) {
    die("%s uses [%p, +%zu), past the end of the allocation [%p, +%zu)", user.c_str(), p, bytes,
        reinterpret_cast<void*>(a.base), a.bytes);
  }
}

}  // namespace cuda_sim

using namespace cuda_sim;

SIM_EXPORT void cuda_sim_check_range(const void* p, size_t bytes, const char* user) {
  check_range(p, bytes, user);
}

// ---- allocation ----

SIM_EXPORT cudaError_t cudaMalloc(void** p, size_t bytes) {
  return allocate(p, bytes, Space::device);
}

SIM_EXPORT cudaError_t cudaFree(void* p) {
  if (p) drain_device(current_device());  // CUDA finishes all work of the device first
  return release(p, Space::device);
}

SIM_EXPORT cudaError_t cudaMallocAsync(void** p, size_t bytes, cudaStream_t) {
  return allocate(p, bytes, Space::device);
}

// The memory dies when the stream reaches this point; use on another stream that does not wait for
// it then crashes.
SIM_EXPORT cudaError_t cudaFreeAsync(void* p, cudaStream_t stream) {
  enqueue(resolve(stream), "cudaFreeAsync", [p] {
    if (release(p, Space::device) != cudaSuccess)
      die("cudaFreeAsync of %p, which is not allocated", p);
  });
  return cudaSuccess;
}

SIM_EXPORT cudaError_t cudaHostAlloc(void** p, size_t bytes, unsigned) {
  return allocate(p, bytes, Space::pinned);
}
SIM_EXPORT cudaError_t cudaMallocHost(void** p, size_t bytes) {
  return allocate(p, bytes, Space::pinned);
}

SIM_EXPORT cudaError_t cudaFreeHost(void* p) {
  if (p) drain_device(current_device());
  return release(p, Space::pinned);
}

SIM_EXPORT cudaError_t cudaHostGetDevicePointer(void** device_pointer, void* p, unsigned) {
  *device_pointer = p;
  return cudaSuccess;
}

// Registered host memory counts as pinned while it is registered.
SIM_EXPORT cudaError_t cudaHostRegister(void* p, size_t bytes, unsigned) {
  std::lock_guard<std::mutex> lock(memory().mutex);
  memory().live[uintptr_t(p)] = {uintptr_t(p), bytes, current_device(), Space::pinned};
  return cudaSuccess;
}

SIM_EXPORT cudaError_t cudaHostUnregister(void* p) {
  drain_device(current_device());
  std::lock_guard<std::mutex> lock(memory().mutex);
  return memory().live.erase(uintptr_t(p)) ? cudaSuccess : report(cudaErrorHostMemoryNotRegistered);
}

SIM_EXPORT cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total) {
  *total = config().device_bytes;
  *free_bytes = *total - allocated_bytes(current_device());
  return cudaSuccess;
}

SIM_EXPORT cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* p) {
  Allocation a = find_allocation(p);
  std::memset(attributes, 0, sizeof *attributes);
  attributes->device = a.device;
  attributes->type = a.space == Space::device   ? cudaMemoryTypeDevice
                     : a.space == Space::pinned ? cudaMemoryTypeHost
                                                : cudaMemoryTypeUnregistered;
  if (a.space != Space::unknown) attributes->devicePointer = const_cast<void*>(p);
  if (a.space != Space::device) attributes->hostPointer = const_cast<void*>(p);
  return cudaSuccess;
}

// ---- copies ----

SIM_EXPORT cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                                       cudaStream_t stream) {
  if (bytes) enqueue_copy(to, from, bytes, resolve(stream));
  return cudaSuccess;
}

SIM_EXPORT cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  if (bytes) enqueue_copy(to, from, bytes, resolve(nullptr));
  drain(resolve(nullptr));
  return cudaSuccess;
}

SIM_EXPORT cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes,
                                           cudaStream_t stream) {
  return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream);
}

SIM_EXPORT cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from,
                                         size_t from_pitch, size_t width, size_t height,
                                         cudaMemcpyKind, cudaStream_t stream) {
  for (size_t row = 0; row < height; ++row) {
    cudaMemcpyAsync(static_cast<char*>(to) + row * to_pitch,
                    static_cast<const char*>(from) + row * from_pitch, width, cudaMemcpyDefault,
                    stream);
  }
  return cudaSuccess;
}

SIM_EXPORT cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t stream) {
  count_copy("memset", bytes);
  enqueue(resolve(stream), "memset", [=] {
    check_range(p, bytes, "cudaMemset");
    std::memset(p, value, bytes);
  });
  return cudaSuccess;
}

SIM_EXPORT cudaError_t cudaMemset(void* p, int value, size_t bytes) {
  return cudaMemsetAsync(p, value, bytes, nullptr);
}
