// What a device-generic C++ library does, right or with one of its waits left out. It knows c10
// only.
#include "order.h"

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace npu_sim::order {

// A producer stream writes 3 over a tensor of zeros, a consumer stream adds 1. Returns the
// consumer's first element.
double produce_and_consume(const std::string& device_name, bool with_wait, bool on_fresh_memory) {
  c10::Device device(device_name);
  c10::impl::VirtualGuardImpl impl(device.type());
  device = impl.getDevice();
  c10::Stream producer = impl.getNewStream(device), consumer = impl.getNewStream(device);
  auto options = at::TensorOptions(device).dtype(at::kFloat);
  at::Tensor x = on_fresh_memory ? at::empty({1000}, options) : at::zeros({1000}, options);
  impl.synchronizeDevice(device.index());
  c10::Event written(device.type());
  {
    c10::StreamGuard on(producer);
    x.fill_(1).mul_(3);
    written.record(producer);
  }
  c10::StreamGuard on(consumer);
  if (with_wait) written.block(consumer);
  at::Tensor y = x + 1;
  at::Tensor result = y.cpu();  // blocks the host on the consumer stream only
  impl.synchronizeDevice(device.index());
  return result[0].item<double>();
}

// A side stream reads x while the current stream overwrites it: right only if the overwrite waits
// for the read.
double overwrite_while_read(const std::string& device_name, bool with_wait) {
  c10::impl::VirtualGuardImpl impl(c10::Device(device_name).type());
  c10::Device device = impl.getDevice();
  c10::Stream side = impl.getNewStream(device), current = impl.getStream(device);
  at::Tensor x = at::full({1000}, 7, at::TensorOptions(device).dtype(at::kFloat)),
             y = at::empty_like(x);
  impl.synchronizeDevice(device.index());
  c10::Event read(device.type());
  {
    c10::StreamGuard on(side);
    y.copy_(x);
    read.record(side);
  }
  if (with_wait) read.block(current);
  x.fill_(0);
  if (!with_wait) read.block(current);  // too late
  return y.cpu()[0].item<double>();
}

// Raw memory from the allocator inside a tensor of a StorageImpl, as a sharding runtime makes its
// flat buffers.
at::Tensor tensor_over_raw_memory(const std::string& device_name, int64_t elements, bool plain) {
  c10::Device device = c10::impl::VirtualGuardImpl(c10::Device(device_name).type()).getDevice();
  size_t bytes = size_t(elements) * sizeof(float);
  c10::Allocator* allocator = c10::GetAllocator(device.type());
  c10::StorageImpl::use_byte_size_t tag;
  // Devices have storage classes of their own, which a library gets from the factory alone.
  auto storage = plain ? c10::make_intrusive<c10::StorageImpl>(
                             tag, int64_t(bytes), allocator->allocate(bytes), nullptr, false)
                       : c10::make_storage_impl(tag, int64_t(bytes), allocator->allocate(bytes),
                                                nullptr, /*resizable=*/false, device);
  at::Tensor t = at::empty({0}, at::TensorOptions(device).dtype(at::kFloat));
  return t.set_(c10::Storage(storage), 0, {elements}, {1});
}

// A tensor freed while another stream still has to read it: right only if record_stream told the
// allocator.
double free_while_in_use(const std::string& device_name, bool with_record_stream) {
  c10::impl::VirtualGuardImpl impl(c10::Device(device_name).type());
  c10::Device device = impl.getDevice();
  c10::Stream side = impl.getNewStream(device), current = impl.getStream(device);
  at::Tensor y = at::empty({1000}, at::TensorOptions(device).dtype(at::kFloat));
  {
    at::Tensor x = at::full({1000}, 7, at::TensorOptions(device).dtype(at::kFloat));
    c10::Event filled(device.type());
    filled.record(current);
    filled.block(side);
    c10::StreamGuard on(side);
    y.copy_(x);
    if (with_record_stream) x.record_stream(side);
  }
  impl.synchronizeStream(
      current);  // the stream x belongs to passes the free; the side stream has not run yet
  impl.synchronizeStream(side);
  return y.cpu()[0].item<double>();
}

// A sharding runtime's all-gather: the shard is made on the current stream, gathered on a side
// stream through c10d::ProcessGroup, and used on the current stream again. Every arrow needs its
// wait.
std::vector<double> gather_on_side_stream(c10::intrusive_ptr<c10d::ProcessGroup> group,
                                          const std::string& device_name, double value,
                                          bool wait_for_shard, bool wait_for_work,
                                          bool wait_for_result) {
  c10::impl::VirtualGuardImpl impl(c10::Device(device_name).type());
  c10::Device device = impl.getDevice();
  c10::Stream side = impl.getNewStream(device), current = impl.getStream(device);
  auto options = at::TensorOptions(device).dtype(at::kFloat);
  at::Tensor shard = at::zeros({2}, options), whole = at::zeros({2 * group->getSize()}, options);
  impl.synchronizeDevice(device.index());
  shard.fill_(value);
  c10::Event made(impl.type()), gathered(impl.type());
  made.record(current);
  if (wait_for_shard) made.block(side);
  {
    c10::StreamGuard on(side);
    auto work = group->_allgather_base(whole, shard);
    if (wait_for_work) work->wait();
    gathered.record(side);
  }
  if (wait_for_result) gathered.block(current);
  at::Tensor used = (whole + 0).cpu();
  impl.synchronizeDevice(device.index());
  return {used.data_ptr<float>(), used.data_ptr<float>() + used.numel()};
}

bool event_query_before_after(const std::string& device_name) {
  c10::impl::VirtualGuardImpl impl(c10::Device(device_name).type());
  c10::Stream stream = impl.getNewStream(impl.getDevice());
  c10::Event event(impl.type(), c10::EventFlag::BACKEND_DEFAULT);
  if (!event.query()) return false;  // never recorded: complete
  event.record(stream);
  if (event.query()) return false;  // recorded, nothing has run
  event.synchronize();
  return event.query() && impl.queryStream(stream);
}

}  // namespace npu_sim::order
