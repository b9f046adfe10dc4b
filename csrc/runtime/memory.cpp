#include "runtime/memory.h"

#include <ATen/ops/from_blob.h>

namespace zerocore {

at::Tensor DevicePool::empty(const std::shared_ptr<DevicePool>& self, int64_t numel,
                             c10::ScalarType dtype) {
  const int64_t bytes = numel * static_cast<int64_t>(c10::elementSize(dtype));
  const std::optional<Lease> lease = self->pool_.try_lease(bytes);
  TORCH_CHECK(lease, "zerocore: expected room for a buffer of ", bytes, " bytes, got a pool with ",
              self->pool_.budget() - self->pool_.leased(), " bytes left");
  auto give_back = [self, block = *lease](void*) { self->pool_.release(block); };
  return at::from_blob(lease->data, {numel}, std::move(give_back),
                       at::TensorOptions().dtype(dtype).device(self->device_));
}

}  // namespace zerocore
