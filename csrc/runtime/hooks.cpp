#include "runtime/hooks.h"

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>

#include "runtime/runtime.h"

namespace zerocore {
namespace {

using torch::autograd::variable_list;

// Weak references: the runtime holds the accumulators that hold these hooks.
class BeforeAccumulation : public torch::autograd::FunctionPreHook {
 public:
  explicit BeforeAccumulation(std::weak_ptr<Runtime> runtime) : runtime_(std::move(runtime)) {}
  variable_list operator()(const variable_list& grads) override {
    if (auto runtime = runtime_.lock()) runtime->before_accumulation();
    return grads;
  }

 private:
  std::weak_ptr<Runtime> runtime_;
};

class AfterAccumulation : public torch::autograd::FunctionPostHook {
 public:
  AfterAccumulation(std::weak_ptr<Runtime> runtime, int unit, int flat, int64_t param)
      : runtime_(std::move(runtime)), unit_(unit), flat_(flat), param_(param) {}
  variable_list operator()(const variable_list& outputs, const variable_list&) override {
    if (auto runtime = runtime_.lock()) runtime->gradient_ready(unit_, flat_, param_);
    return outputs;
  }

 private:
  std::weak_ptr<Runtime> runtime_;
  const int unit_;
  const int flat_;
  const int64_t param_;
};

}  // namespace

void hook_accumulator(torch::autograd::Node& accumulator, const std::weak_ptr<Runtime>& runtime,
                      int unit, int flat, int64_t param) {
  accumulator.add_pre_hook(std::make_unique<BeforeAccumulation>(runtime));
  accumulator.add_post_hook(std::make_unique<AfterAccumulation>(runtime, unit, flat, param));
}

GradientEdge gradient_edge(const at::Tensor& tensor) {
  return {tensor.grad_fn().get(), tensor.output_nr()};
}

void hook_output(const at::Tensor& output, std::shared_ptr<Runtime> runtime, Call call) {
  const GradientEdge edge = gradient_edge(output);
  output.register_hook([runtime = std::move(runtime), call, edge](const at::Tensor&) {
    runtime->pre_backward(call, edge);
  });
}

void hook_input(const at::Tensor& input, std::shared_ptr<Runtime> runtime, Call call) {
  input.register_hook(
      [runtime = std::move(runtime), call](const at::Tensor&) { runtime->post_backward(call); });
}

bool inside_backward() { return torch::autograd::get_current_graph_task_id() != -1; }

}  // namespace zerocore
