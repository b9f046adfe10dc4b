#include "runtime/memory.h"

#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/StreamGuard.h>

#include <utility>

namespace zerocore {

Lease DevicePool::AllocatorMemory::allocate(int64_t bytes) {
  const c10::StreamGuard on(home_.value_or(streams_.current()));
  // Whoever is given this stream's memory next uses it after what the stream was given.
  const Point here = moment.value_or(streams_.here(streams_.current()));
  if (!allocate_) return {allocator_->raw_allocate(bytes), bytes, here, here.stream};
  const at::Tensor tensor = allocate_(bytes);
  allocated_[tensor.data_ptr()] = tensor;
  return {tensor.data_ptr(), bytes, here, here.stream};
}

void DevicePool::AllocatorMemory::deallocate(const Lease& block) {
  streams_.wait(block.home, block.used, Wait::memory_free);
  if (allocate_) {
    allocated_.erase(block.data);
  } else {
    allocator_->raw_deallocate(block.data);
  }
}

std::optional<Lease> DevicePool::try_lease(int64_t bytes, const c10::Stream& user) {
  const std::optional<Lease> lease = pool_.try_lease(bytes);
  if (lease) streams_.wait(user, lease->used, Wait::window_free);
  return lease;
}

void DevicePool::release(Lease lease, const c10::Stream& user) {
  lease.used = streams_.here(user);
  pool_.release(lease);
}

at::Tensor DevicePool::empty(const std::shared_ptr<DevicePool>& self, int64_t numel,
                             c10::ScalarType dtype, const c10::Stream& user) {
  const int64_t bytes = numel * static_cast<int64_t>(c10::elementSize(dtype));
  const std::optional<Lease> lease = self->try_lease(bytes, user);
  TORCH_CHECK(lease, "zerocore: expected room for a buffer of ", bytes, " bytes, got a pool with ",
              self->pool_.budget() - self->pool_.leased(), " bytes left");
  struct Held {
    std::shared_ptr<DevicePool> pool;
    Lease lease;
    c10::Stream user;
  };
  const auto give_back = [](void* context) {
    const std::unique_ptr<Held> held(static_cast<Held*>(context));
    held->pool->release(held->lease, held->user);
  };
  return tensor_over({lease->data, new Held{self, *lease, user}, give_back, user.device()}, numel,
                     dtype);
}

at::Tensor tensor_over(c10::DataPtr data, int64_t numel, c10::ScalarType dtype) {
  const c10::InferenceMode normal(false);
  const c10::Device device = data.device();
  // Each device has its own kinds of storage and tensor: it makes both itself.
  const c10::Storage storage(c10::make_storage_impl(
      c10::StorageImpl::use_byte_size_t(), numel * static_cast<int64_t>(c10::elementSize(dtype)),
      std::move(data), /*allocator=*/nullptr, /*resizable=*/false, device));
  return at::empty({0}, at::TensorOptions().dtype(dtype).device(device)).set_(storage, 0, {numel});
}

void take_memory_away(const c10::Storage& storage, const std::string& message) {
  c10::StorageImpl* impl = storage.unsafeGetStorageImpl();
  impl->set_data_ptr_noswap(c10::DataPtr(nullptr, impl->device()));
  impl->release_data_and_set_meta_custom_data_ptr_error_msg_(message);
}

// Storage is made with an address that is not null: a device would allocate memory for it else.
at::Tensor without_memory(c10::Device device, int64_t numel, c10::ScalarType dtype,
                          const std::string& message) {
  static char anywhere;
  const at::Tensor tensor = tensor_over({&anywhere, device}, numel, dtype);
  take_memory_away(tensor.storage(), message);
  return tensor;
}

}  // namespace zerocore
