// What Python sees.
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/extension.h>

#include "hccl.h"
#include "order.h"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  const py::call_guard<py::gil_scoped_release> no_gil;
  m.def("device_count", [] { return c10::impl::VirtualGuardImpl(npu_sim::kNpu).deviceCount(); });
  m.def("take_waits", &npu_sim::take_waits);
  m.def("create_hccl", &npu_sim::create_hccl, no_gil);
  m.def("allocated_by_groups", &npu_sim::allocated_by_groups);
  m.def("produce_and_consume", &npu_sim::order::produce_and_consume, no_gil);
  m.def("overwrite_while_read", &npu_sim::order::overwrite_while_read, no_gil);
  m.def("tensor_over_raw_memory", &npu_sim::order::tensor_over_raw_memory, no_gil);
  m.def("free_while_in_use", &npu_sim::order::free_while_in_use, no_gil);
  m.def("gather_on_side_stream", &npu_sim::order::gather_on_side_stream, no_gil);
  m.def("event_query_before_after", &npu_sim::order::event_query_before_after, no_gil);
}
