// Interface between the parts of the fake NPU: streams of lazily run tasks, and CPU views of its
// tensors.
#pragma once
#include <ATen/ATen.h>
#include <ATen/core/stack.h>
#include <c10/core/Stream.h>

#include <functional>
#include <memory>

namespace npu_sim {

constexpr c10::DeviceType kNpu = c10::DeviceType::PrivateUse1;
using Task = std::function<void()>;

// ---- runtime.cpp ----
struct Mark;  // one point in a stream's queue: what an event refers to after it was recorded
using MarkPtr = std::shared_ptr<Mark>;

c10::Device current_device();
c10::Stream current_stream(c10::Device device);
c10::Stream new_stream(c10::Device device);
void enqueue(const c10::Stream& stream, std::string name, Task task);
MarkPtr add_mark(const c10::Stream& stream);
void add_wait(const c10::Stream& stream,
              const MarkPtr& mark);  // device side: later tasks of the stream come after it
void demand(const MarkPtr& mark);    // host side: runs everything up to the mark
bool poll(const MarkPtr& mark);
void drain(const c10::Stream& stream);
uint64_t activity();  // grows with everything the host enqueues
// The host has waited for the device, in something of this name.
void note_wait(const std::string& what);
std::vector<std::string> take_waits();  // those of all threads since the last call
bool is_pinned(const void* data);
void record_stream(const void* data,
                   const c10::Stream& stream);  // the memory outlives the stream's present work
void resize_bytes(const c10::Storage& storage, size_t bytes);
[[noreturn]] void die(const std::string& message);

// The dispatch state in which kernels run: no autograd, no autocast, no Python modes. A deferred
// operator may run on a thread whose own state is something else.
struct KernelState {
  c10::impl::ForceDispatchKeyGuard guard{[] {
    c10::impl::LocalDispatchKeySet keys(c10::impl::PODLocalDispatchKeySet{});
    keys.included_ = c10::DispatchKeySet(c10::DispatchKey::BackendSelect);
    keys.excluded_ = c10::autograd_dispatch_keyset_with_ADInplaceOrView |
                     c10::autocast_dispatch_keyset | c10::python_ks | c10::functorch_transforms_ks;
    return keys;
  }()};
};

// ---- ops.cpp ----
// As in torch_npu: storage of a class of its own, with a description of the memory that factories
// and set_ fill in. Its operators cast to the class without looking, so other storage is undefined
// behaviour there, and a fault here. c10::make_storage_impl makes the right one.
struct NpuStorageImpl final : c10::StorageImpl {
  using StorageImpl::StorageImpl;
  bool described = false;
};
void check_storage(const at::Tensor& t);

// A CPU tensor over an NPU tensor's bytes. It owns nothing, like the pointers a kernel is given.
at::Tensor cpu_alias(const at::Tensor& t);

}  // namespace npu_sim
