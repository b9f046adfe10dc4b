// Runs torch's own operators on fake-CUDA tensors with torch's CPU kernels.
//
// Loading this library overrides the CUDA kernel of every "aten" operator that has one, with a
// boxed function that calls the operator's CPU kernel on CPU tensors over the same memory. The
// overrides sit in the dispatcher, below autograd, so they serve every thread (autograd's device
// threads, DDP's reducer) and C++ callers alike.
//
// An operator is enqueued on the current stream like a kernel, so it takes part in the lazy
// schedule: it reads what its inputs hold when the stream gets there. What it returns is found out
// with its meta kernel beforehand. Operators whose result has an unknown shape or is a number
// (nonzero, item), that draw random numbers, or that have no meta kernel, synchronise the current
// stream and run at once; they are counted as "aten::... (synchronous)".
#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/copy_native.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <torch/library.h>

#include <cstdio>
#include <cstdlib>
#include <set>

#include "cuda_sim_api.h"
#include "tensors.h"

namespace cuda_sim_ops {
namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using Stack = torch::jit::Stack;

const std::set<std::string>& left_alone() {
  // Allocation and metadata: these touch no elements, or do so with plain memcpy.
  static const std::set<std::string> names = {"aten::empty",
                                              "aten::empty_strided",
                                              "aten::new_empty",
                                              "aten::resize_",
                                              "aten::set_",
                                              "aten::view",
                                              "aten::as_strided",
                                              "aten::unfold",
                                              "aten::_reshape_alias",
                                              "aten::record_stream",
                                              "aten::is_pinned",
                                              "aten::_pin_memory",
                                              "aten::is_set_to",
                                              "aten::copy_",
                                              "aten::_efficientzerotensor",
                                              "aten::alias",
                                              "aten::_nested_tensor_from_mask"};
  return names;
}

// Operators that accept CPU tensors with dimensions next to CUDA tensors.
bool may_mix_devices(const std::string& name) {
  return name.find("index") != std::string::npos || name == "aten::_foreach_copy_" ||
         name == "aten::copy_";
}

// The dispatch state in which CUDA kernels run: no autograd, no autocast, no Python modes. A
// deferred operator may run on a thread whose own state is something else.
struct KernelState {
  c10::impl::ForceDispatchKeyGuard guard{[] {
    c10::impl::LocalDispatchKeySet keys(c10::impl::PODLocalDispatchKeySet{});
    keys.included_ = DispatchKeySet(DispatchKey::BackendSelect);
    keys.excluded_ = c10::autograd_dispatch_keyset_with_ADInplaceOrView |
                     c10::autocast_dispatch_keyset | c10::python_ks | c10::functorch_transforms_ks;
    return keys;
  }()};
};

void check_cuda(cudaError_t error) {
  TORCH_CHECK(error == cudaSuccess, "cuda_sim: ", cudaGetErrorString(error));
}

c10::Device device_of_call(const Stack& arguments) {
  std::optional<c10::Device> device;
  for (const IValue& v : arguments) {
    for_each_tensor(v, [&](const at::Tensor& t) {
      if (!device && t.is_cuda()) device = t.device();
    });
  }
  for (const IValue& v : arguments) {
    if (!device && v.isDevice() && v.toDevice().is_cuda()) device = v.toDevice();
  }
  c10::Device d = device.value_or(c10::Device(c10::kCUDA));
  return d.has_index() ? d : c10::Device(c10::kCUDA, c10::cuda::current_device());
}

// A real kernel cannot reach another device's or the CPU's tensors, so a call that mixes them must
// fail here too.
void check_devices(const std::string& name, const Stack& arguments, c10::Device device) {
  if (may_mix_devices(name)) return;
  for (const IValue& v : arguments) {
    for_each_tensor(v, [&](const at::Tensor& t) {
      bool allowed = t.device() == device || (t.is_cpu() && t.dim() == 0) ||
                     name.find("_foreach") != std::string::npos;
      TORCH_CHECK(allowed, "Expected all tensors to be on the same device, but ", name, " got ",
                  device, " and ", t.device());
    });
  }
}

IValue on_device(const IValue& v, c10::DeviceType type) {
  if (v.isDevice() && v.toDevice().is_cuda()) return c10::Device(type);
  if (v.isGenerator()) return IValue();  // the CPU kernel draws from the default CPU generator
  return v;
}

Stack replaced(const Stack& arguments, Replacement& replacement, c10::DeviceType type) {
  Stack result;
  for (const IValue& v : arguments) {
    result.push_back(
        on_device(map_tensors(v, [&](const at::Tensor& t) { return replacement(t); }), type));
  }
  return result;
}

struct Shape {
  bool draws_random = false;       // has a generator argument
  bool has_out_arguments = false;  // may resize them
  bool all_results_are_arguments = true;
  bool only_tensors_returned = true;
  bool writes_cpu = false;
};

Shape inspect(const c10::FunctionSchema& schema, const Stack& arguments) {
  Shape shape;
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const c10::Argument& a = schema.arguments()[i];
    if (a.type()->str().find("Generator") != std::string::npos) shape.draws_random = true;
    if (a.is_out()) shape.has_out_arguments = true;
    if (!a.alias_info() || !a.alias_info()->isWrite()) continue;
    for_each_tensor(arguments[i], [&](const at::Tensor& t) { shape.writes_cpu |= !t.is_cuda(); });
  }
  // Dropout has no generator argument but draws as well.
  if (schema.name().find("dropout") != std::string::npos) shape.draws_random = true;
  for (const c10::Argument& r : schema.returns()) {
    if (!r.alias_info()) shape.all_results_are_arguments = false;
    std::string type = r.type()->str();
    if (type != "Tensor" && type != "Tensor[]") shape.only_tensors_returned = false;
  }
  return shape;
}

// The saved statistics of these norms are float on CUDA (and meta), but have the parameters' type
// on the CPU.
bool has_cpu_statistics_type(const std::string& name, size_t result) {
  static const std::set<std::string> norms = {"aten::native_layer_norm", "aten::native_group_norm",
                                              "aten::native_batch_norm",
                                              "aten::_native_batch_norm_legit"};
  return result > 0 && norms.count(name);
}

at::ScalarType cpu_statistics_type(const Stack& arguments) {
  for (const IValue& v : arguments) {  // the weight or bias, if there is one, follows the input
    if (!v.isTensor() || !v.toTensor().defined() || v.toTensor().is_same(arguments[0].toTensor()))
      continue;
    return v.toTensor().scalar_type();
  }
  return arguments[0].toTensor().scalar_type();
}

at::Tensor new_cuda_tensor(const at::Tensor& like, c10::Device device) {
  return at::empty_strided(like.sizes(), like.strides(), like.options().device(device));
}

// ---- the two ways to run ----

struct Deferred {
  c10::OperatorHandle op;
  Stack arguments;              // CPU aliases
  std::vector<IValue> results;  // CPU aliases of new results, None where a result is an argument
};

void copy_result(const IValue& computed, const IValue& destination) {
  std::vector<at::Tensor> from, to;
  for_each_tensor(computed, [&](const at::Tensor& t) { from.push_back(t); });
  for_each_tensor(destination, [&](const at::Tensor& t) { to.push_back(t); });
  TORCH_CHECK(from.size() == to.size(),
              "the CPU and the meta kernel return different numbers of tensors");
  for (size_t i = 0; i < from.size(); ++i) {
    TORCH_CHECK(from[i].sizes() == to[i].sizes(), "the CPU kernel returns ", from[i].sizes(),
                ", the meta kernel ", to[i].sizes());
    to[i].copy_(from[i]);
  }
}

void run_deferred(void* data) {
  std::unique_ptr<Deferred> task(static_cast<Deferred*>(data));
  try {
    KernelState state;
    task->op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), &task->arguments);
    for (size_t i = 0; i < task->results.size(); ++i) {
      if (!task->results[i].isNone()) copy_result(task->arguments[i], task->results[i]);
    }
  } catch (const std::exception& e) {
    auto* error = dynamic_cast<const c10::Error*>(&e);
    std::fprintf(stderr, "cuda_sim: %s failed on the stream: %s\n",
                 toString(task->op.operator_name()).c_str(),
                 error ? error->what_without_backtrace() : e.what());
    std::abort();
  }
}

// Finds what the operator returns without running it; false when that is impossible. Resizes out=
// arguments.
bool predict(const c10::OperatorHandle& op, const Shape& shape, const Stack& arguments,
             c10::Device device, Stack* results) {
  const auto& schema = op.schema();
  if (shape.all_results_are_arguments && !shape.has_out_arguments) {
    for (const c10::Argument& r : schema.returns()) {
      for (size_t i = 0; i < schema.arguments().size(); ++i) {
        const auto* alias = schema.arguments()[i].alias_info();
        if (alias && *alias == *r.alias_info()) {
          results->push_back(arguments[i]);
          break;
        }
      }
    }
    return results->size() == schema.returns().size();
  }
  if (!op.hasComputedKernelForDispatchKey(DispatchKey::Meta)) return false;
  MetaTensors meta;
  Stack stack = replaced(arguments, meta, c10::kMeta);
  try {
    op.redispatchBoxed(DispatchKeySet(DispatchKey::Meta), &stack);
  } catch (const std::exception& e) {
    // Also for wrong arguments: then the CPU kernel reports them.
    if (std::getenv("CUDA_SIM_VERBOSE")) {
      std::fprintf(stderr, "cuda_sim: no prediction for %s: %s\n", schema.name().c_str(), e.what());
    }
    return false;
  }
  for (auto& [original, m] : meta.pairs()) {
    if (original.is_cuda() && original.sizes() != m.sizes()) original.resize_(m.sizes());
  }
  for (size_t i = 0; i < stack.size(); ++i) {
    results->push_back(map_tensors(stack[i], [&](const at::Tensor& t) {
      at::Tensor argument = meta.original(t);
      if (argument.defined()) return argument;
      if (has_cpu_statistics_type(schema.name(), i))
        return new_cuda_tensor(t.to(cpu_statistics_type(arguments)), device);
      return new_cuda_tensor(t, device);
    }));
  }
  return true;
}

void enqueue(const c10::OperatorHandle& op, const Stack& arguments, const Stack& results) {
  auto task = std::make_unique<Deferred>(Deferred{op, {}, {}});
  CpuAliases aliases(/*resizable=*/false, /*copy_cpu=*/true);
  task->arguments = replaced(arguments, aliases, c10::kCPU);
  std::set<c10::TensorImpl*> known;
  for (auto& pair : aliases.pairs()) known.insert(pair.first.unsafeGetTensorImpl());
  for (const IValue& v : results) {
    bool is_argument = false;
    for_each_tensor(
        v, [&](const at::Tensor& t) { is_argument |= known.count(t.unsafeGetTensorImpl()) > 0; });
    task->results.push_back(
        is_argument ? IValue() : map_tensors(v, [&](const at::Tensor& t) { return aliases(t); }));
  }
  cuda_sim_name_next_host_func(toString(op.operator_name()).c_str());
  check_cuda(cudaLaunchHostFunc(c10::cuda::getCurrentCUDAStream(), run_deferred, task.release()));
}

Stack run_now(const c10::OperatorHandle& op, const Stack& arguments, c10::Device device) {
  cuda_sim_count((toString(op.operator_name()) + " (synchronous)").c_str());
  check_cuda(cudaStreamSynchronize(c10::cuda::getCurrentCUDAStream()));
  CpuAliases aliases(/*resizable=*/true, /*copy_cpu=*/false);
  Stack stack = replaced(arguments, aliases, c10::kCPU);
  op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), &stack);
  for (auto& [original, alias] : aliases.pairs()) {
    if (!original.is_cuda()) continue;
    if (original.sizes() != alias.sizes()) original.resize_(alias.sizes());
    // A resized alias has moved to memory of its own; a fresh alias of the (resized) tensor takes
    // the data back.
    if (alias.storage().data() != original.storage().data() && alias.numel() > 0) {
      CpuAliases again(false, false);
      again(original).copy_(alias);
    }
  }
  Stack results;
  for (const IValue& v : stack) {
    results.push_back(map_tensors(v, [&](const at::Tensor& t) {
      at::Tensor argument = aliases.original(t);
      if (argument.defined()) return argument;
      at::Tensor result = new_cuda_tensor(t, device);
      if (t.numel() > 0) {
        CpuAliases of_result(false, false);
        of_result(result).copy_(t);
      }
      return result;
    }));
  }
  return results;
}

void run_operator(const c10::OperatorHandle& op, DispatchKeySet, Stack* stack) {
  const size_t n = op.schema().arguments().size();
  Stack arguments(stack->end() - std::ptrdiff_t(n), stack->end());
  c10::Device device = device_of_call(arguments);
  check_devices(op.schema().name(), arguments, device);
  c10::cuda::CUDAGuard on(device);
  KernelState state;
  Shape shape = inspect(op.schema(), arguments);
  bool deferrable = !shape.draws_random && shape.only_tensors_returned && !shape.writes_cpu;
  Stack results;
  if (deferrable && predict(op, shape, arguments, device, &results)) {
    enqueue(op, arguments, results);
  } else {
    results = run_now(op, arguments, device);
  }
  torch::jit::drop(*stack, n);
  for (IValue& v : results) stack->push_back(std::move(v));
}

// ---- copy_ ----

// torch's own copy_ uses cudaMemcpyAsync where the layouts allow it, and a kernel between CUDA
// tensors otherwise. The former is left to it: that is the code path (pinned memory, non_blocking,
// several devices) worth testing.
at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  KernelState state;
  bool both_cuda = self.is_cuda() && source.is_cuda();
  bool plain = self.dtype() == source.dtype() && self.sizes() == source.sizes() &&
               self.strides() == source.strides() && self.is_non_overlapping_and_dense() &&
               self.is_conj() == source.is_conj() && self.is_neg() == source.is_neg();
  if (!both_cuda || plain || self.numel() == 0)
    return at::native::copy_(self, source, non_blocking);
  if (self.device() != source.device()) {
    at::Tensor moved = at::empty(source.sizes(), source.options().device(self.device()));
    at::native::copy_(moved, source.contiguous(), non_blocking);
    return self.copy_(moved);
  }
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", "");
  c10::cuda::CUDAGuard on(self.device());
  enqueue(op, Stack{self, source, non_blocking}, Stack{self});
  return self;
}

// ---- registration ----

bool should_override(const c10::OperatorHandle& op) {
  const auto& schema = op.schema();
  if (schema.name().rfind("aten::", 0) != 0 || left_alone().count(schema.name())) return false;
  if (!op.hasKernelForDispatchKey(DispatchKey::CUDA) ||
      !op.hasComputedKernelForDispatchKey(DispatchKey::CPU))
    return false;
  for (const c10::Argument& r : schema.returns()) {
    if (r.alias_info() && !r.alias_info()->isWrite()) return false;  // a view
  }
  return true;
}

struct SilentWarnings : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

torch::Library* register_all() {
  SilentWarnings silent;  // every registration here overrides one, on purpose
  c10::WarningUtils::WarningHandlerGuard guard(&silent);
  auto* library =
      new torch::Library(torch::Library::IMPL, "aten", DispatchKey::CUDA, __FILE__, __LINE__);
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
    auto op = c10::Dispatcher::singleton().findSchema(name);
    if (!op || !should_override(*op)) continue;
    std::string full =
        name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
    library->impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_operator>());
  }
  library->impl("copy_", TORCH_FN(copy_));
  // These choose kernels that exist for CUDA only; what remains are operators with CPU kernels.
  at::globalContext().setUserEnabledCuDNN(false);
  at::globalContext().setSDPUseFlash(false);
  at::globalContext().setSDPUseMemEfficient(false);
  at::globalContext().setSDPUseCuDNN(false);
  return library;
}

torch::Library* registered = register_all();

}  // namespace
}  // namespace cuda_sim_ops
