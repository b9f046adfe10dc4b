// The process-group backend of the fake NPU; see hccl.cpp.
#pragma once
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "npu_sim.h"

namespace npu_sim {

// `gloo` moves the bytes.
c10::intrusive_ptr<c10d::Backend> create_hccl(c10::intrusive_ptr<c10d::Backend> gloo,
                                              c10::intrusive_ptr<c10d::Store> store, int rank,
                                              int size);
// Tensors that process groups have allocated, of their own memory, in this process.
int64_t allocated_by_groups();

}  // namespace npu_sim
