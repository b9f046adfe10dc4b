// The device's memory behind a pool, and tensors on leased blocks.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "runtime/pool.h"
#include "runtime/streams.h"

namespace zerocore {

// A pool over the device's own allocator, whose blocks are allocated for one stream: used on that
// one alone they are never waited for. Shared by everybody who may return a lease.
class DevicePool {
 public:
  // Gives a 1-D tensor of that many bytes.
  using Allocate = std::function<at::Tensor(int64_t bytes)>;

  // home: the stream that blocks are allocated for; nothing: the one that is current then.
  // allocate: where blocks come from, if not from the device's allocator: that of a device with
  // streams keeps memory itself, and others can use it meanwhile, so the pool keeps none of it.
  DevicePool(Streams& streams, std::optional<c10::Stream> home, int64_t budget,
             Allocate allocate = {})
      : streams_(streams),
        memory_(streams, home, std::move(allocate)),
        pool_(memory_, budget, !streams.asynchronous() || memory_.is_foreign()) {}

  // From now on, until the next call, the calling thread enqueues nothing but for leased blocks:
  // they are all free from one moment on, which is waited for once.
  void begin_moment() { memory_.moment = streams_.here(streams_.current()); }
  void end_moment() { memory_.moment.reset(); }

  Pool& pool() { return pool_; }
  Streams& streams() { return streams_; }

  // Nothing if the budget does not allow it now. What `user` is given next may use the block.
  std::optional<Lease> try_lease(int64_t bytes, const c10::Stream& user);
  // What `user` was given may still use the block.
  void release(Lease lease, const c10::Stream& user);

  // A 1-D uninitialised tensor for one stream, whose block goes back to the pool when the last
  // reference is gone.
  static at::Tensor empty(const std::shared_ptr<DevicePool>& self, int64_t numel,
                          c10::ScalarType dtype, const c10::Stream& user);

 private:
  class AllocatorMemory : public Memory {
   public:
    AllocatorMemory(Streams& streams, std::optional<c10::Stream> home, Allocate allocate)
        : streams_(streams),
          home_(home),
          allocator_(c10::GetAllocator(streams.device().type())),
          allocate_(std::move(allocate)) {}
    Lease allocate(int64_t bytes) override;
    void deallocate(const Lease& block) override;
    bool is_foreign() const { return static_cast<bool>(allocate_); }

    std::optional<Point> moment;

   private:
    Streams& streams_;
    const std::optional<c10::Stream> home_;
    c10::Allocator* const allocator_;
    const Allocate allocate_;
    std::map<void*, at::Tensor> allocated_;
  };

  Streams& streams_;
  AllocatorMemory memory_;
  Pool pool_;
};

// A tensor over memory that `data` owns.
at::Tensor tensor_over(c10::DataPtr data, int64_t numel, c10::ScalarType dtype);

// From now on, reading what is stored there raises a RuntimeError of this text.
void take_memory_away(const c10::Storage& storage, const std::string& message);

// A 1-D tensor that only has a size: reading it raises a RuntimeError of this text.
at::Tensor without_memory(c10::Device device, int64_t numel, c10::ScalarType dtype,
                          const std::string& message);

}  // namespace zerocore
