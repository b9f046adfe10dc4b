// Where autograd calls the runtime.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <memory>
#include <utility>

namespace zerocore {

class Runtime;

// Calls the runtime before and after the node adds to a parameter's gradient.
void hook_accumulator(torch::autograd::Node& accumulator, const std::weak_ptr<Runtime>& runtime,
                      int unit, int flat, int64_t param);
// The gradient of a tensor that is not a leaf: the node that takes it, and which of its inputs it
// is.
using GradientEdge = std::pair<const torch::autograd::Node*, uint32_t>;
GradientEdge gradient_edge(const at::Tensor& tensor);

// One call of a module of a unit.
struct Call {
  int unit = 0;
  int64_t id = 0;  // unique in the runtime
};

// Calls Runtime::pre_backward(call, the edge) when the tensor's gradient is there. The graph keeps
// the runtime alive: a backward is possible after the model is gone.
void hook_output(const at::Tensor& output, std::shared_ptr<Runtime> runtime, Call call);
// Calls Runtime::post_backward(call) when the tensor's gradient is there.
void hook_input(const at::Tensor& input, std::shared_ptr<Runtime> runtime, Call call);

// Whether this thread is inside a backward.
bool inside_backward();

}  // namespace zerocore
