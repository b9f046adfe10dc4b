// The device's memory behind a pool, and tensors on leased blocks.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include <memory>

#include "runtime/pool.h"

namespace zerocore {

// A pool over the device's own allocator. Shared by everybody who may return a lease.
class DevicePool {
 public:
  DevicePool(c10::Device device, int64_t budget)
      : device_(device), memory_(device.type()), pool_(memory_, budget) {}

  Pool& pool() { return pool_; }
  c10::Device device() const { return device_; }

  // A 1-D uninitialised tensor whose block goes back to the pool when the last reference is gone.
  static at::Tensor empty(const std::shared_ptr<DevicePool>& self, int64_t numel,
                          c10::ScalarType dtype);

 private:
  class AllocatorMemory : public Memory {
   public:
    explicit AllocatorMemory(c10::DeviceType type) : allocator_(c10::GetAllocator(type)) {}
    void* allocate(int64_t bytes) override { return allocator_->raw_allocate(bytes); }
    void deallocate(void* block) override { allocator_->raw_deallocate(block); }

   private:
    c10::Allocator* allocator_;
  };

  c10::Device device_;
  AllocatorMemory memory_;
  Pool pool_;
};

}  // namespace zerocore
