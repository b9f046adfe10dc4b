// Programs over streams for the tests of the fake NPU; see order.cpp.
#pragma once
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

namespace npu_sim::order {

double produce_and_consume(const std::string& device_name, bool with_wait, bool on_fresh_memory);
double overwrite_while_read(const std::string& device_name, bool with_wait);
at::Tensor tensor_over_raw_memory(const std::string& device_name, int64_t elements, bool plain);
double free_while_in_use(const std::string& device_name, bool with_record_stream);
std::vector<double> gather_on_side_stream(c10::intrusive_ptr<c10d::ProcessGroup> group,
                                          const std::string& device_name, double value,
                                          bool wait_for_shard, bool wait_for_work,
                                          bool wait_for_result);
bool event_query_before_after(const std::string& device_name);

}  // namespace npu_sim::order
