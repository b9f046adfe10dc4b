// Runs operators on NPU tensors with torch's CPU kernels, as lazily as a device would.
//
// A boxed fallback for PrivateUse1 serves every operator that has a CPU kernel and no native one
// below: it asks the operator's meta kernel what will be returned, allocates that, and enqueues the
// CPU kernel on the current stream with CPU tensors over the same memory. Operators whose result
// has an unknown shape or is a number (nonzero, item), that draw random numbers, or that have no
// meta kernel drain the current stream and run at once.
#include <ATen/EmptyTensor.h>
#include <ATen/NativeFunctions.h>
#include <ATen/Operators.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/Resize.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <set>

#include "replace.h"

namespace npu_sim {
namespace {

at::Tensor empty_like_on(const at::Tensor& like, c10::Device device) {
  return at::empty_strided(like.sizes(), like.strides(),
                           like.options().device(device).pinned_memory(false));
}

// ---- the fallback ----

c10::Device device_of_call(const Stack& arguments) {
  for (const IValue& v : arguments) {
    for (const at::Tensor& t : tensors_of(v)) {
      if (is_npu(t)) return t.device();
    }
  }
  for (const IValue& v : arguments) {
    if (v.isDevice() && v.toDevice().type() == kNpu && v.toDevice().has_index())
      return v.toDevice();
  }
  return current_device();
}

// A real kernel cannot reach another device's or the CPU's tensors, so a call that mixes them must
// fail here too.
void check_devices(const std::string& name, const Stack& arguments, c10::Device device) {
  if (name.find("index") != std::string::npos || name.find("_foreach") != std::string::npos) return;
  for (const IValue& v : arguments) {
    for (const at::Tensor& t : tensors_of(v)) {
      TORCH_CHECK(t.device() == device || (t.is_cpu() && t.dim() == 0),
                  "Expected all tensors to be on the same device, but ", name, " got ", device,
                  " and ", t.device());
    }
  }
}

// Most operators of an Ascend NPU take doubles (some on its control processors); these do not.
void check_double(const std::string& name, const Stack& arguments) {
  static const std::set<std::string> without = {
      "aten::linalg_vector_norm", "aten::norm", "aten::_foreach_norm", "aten::lerp", "aten::expm1",
      "aten::repeat_interleave"};
  if (!without.count(name)) return;
  for (const IValue& v : arguments) {
    bool is_double =
        v.isInt() && v.toInt() == int64_t(at::kDouble);  // dtype arguments are integers
    for (const at::Tensor& t : tensors_of(v)) is_double |= t.scalar_type() == at::kDouble;
    TORCH_CHECK_NOT_IMPLEMENTED(!is_double, name, " is not implemented for Double on npu");
  }
}

bool can_defer(const c10::FunctionSchema& schema, const Stack& arguments) {
  if (schema.name().find("dropout") != std::string::npos)
    return false;  // draws without a generator argument
  for (size_t i = 0; i < arguments.size(); ++i) {
    const c10::Argument& a = schema.arguments()[i];
    if (a.type()->str().find("Generator") != std::string::npos) return false;
    if (!a.alias_info() || !a.alias_info()->isWrite()) continue;
    for (const at::Tensor& t : tensors_of(arguments[i])) {
      if (!is_npu(t)) return false;
    }
  }
  for (const c10::Argument& r : schema.returns()) {
    if (r.type()->str() != "Tensor" && r.type()->str() != "Tensor[]") return false;
  }
  return true;
}

// The saved statistics of these norms are float on devices (and meta), but have the parameters'
// type on the CPU.
at::ScalarType result_type(const std::string& name, size_t i, const at::Tensor& predicted,
                           const Stack& arguments) {
  static const std::set<std::string> norms = {"aten::native_layer_norm", "aten::native_group_norm",
                                              "aten::native_batch_norm",
                                              "aten::_native_batch_norm_legit"};
  if (i == 0 || !norms.count(name)) return predicted.scalar_type();
  for (size_t k = 1; k < arguments.size();
       ++k) {  // the weight or bias, if there is one, follows the input
    if (arguments[k].isTensor() && arguments[k].toTensor().defined())
      return arguments[k].toTensor().scalar_type();
  }
  return arguments[0].toTensor().scalar_type();
}

// Finds what the operator returns without running it; false when that is impossible. Resizes out=
// arguments.
bool predict(const c10::OperatorHandle& op, const Stack& arguments, c10::Device device,
             Stack* results) {
  const auto& schema = op.schema();
  bool resizes = false, returns_arguments = true;
  for (const c10::Argument& a : schema.arguments()) resizes |= a.is_out();
  for (const c10::Argument& r : schema.returns()) returns_arguments &= r.alias_info() != nullptr;
  if (returns_arguments && !resizes) {
    for (const c10::Argument& r : schema.returns()) {
      for (size_t i = 0; i < arguments.size(); ++i) {
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
  Replacements meta{Replacements::kMeta};
  Stack stack = meta(arguments);
  try {
    op.redispatchBoxed(DispatchKeySet(DispatchKey::Meta), &stack);
  } catch (const std::exception&) {
    return false;  // also for wrong arguments: then the CPU kernel reports them
  }
  for (auto& [original, m] : meta.pairs) {
    if (is_npu(original) && original.sizes() != m.sizes()) original.resize_(m.sizes());
  }
  for (size_t i = 0; i < stack.size(); ++i) {
    results->push_back(map_tensors(stack[i], [&](const at::Tensor& t) {
      at::Tensor argument = meta.original(t);
      return argument.defined()
                 ? argument
                 : empty_like_on(t.to(result_type(schema.name(), i, t, arguments)), device);
    }));
  }
  return true;
}

void defer(const c10::OperatorHandle& op, const Stack& arguments, const Stack& results) {
  Replacements aliases{Replacements::kDeferred};
  Stack inputs = aliases(arguments);
  size_t argument_count = aliases.pairs.size();
  Stack outputs = aliases(results);
  std::set<c10::TensorImpl*> given;  // results that are arguments need no copy
  for (size_t i = 0; i < argument_count; ++i)
    given.insert(aliases.pairs[i].second.unsafeGetTensorImpl());
  enqueue(current_stream(current_device()), toString(op.operator_name()),
          [op, inputs, outputs, given]() mutable {
            op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), &inputs);
            for (size_t i = 0; i < outputs.size(); ++i) {
              auto from = tensors_of(inputs[i]), to = tensors_of(outputs[i]);
              if (from.empty()) continue;  // a gradient that nobody asked for
              TORCH_CHECK(from.size() == to.size(),
                          "the CPU and the meta kernel return different numbers of tensors");
              for (size_t k = 0; k < from.size(); ++k) {
                if (given.count(to[k].unsafeGetTensorImpl())) continue;
                TORCH_CHECK(from[k].sizes() == to[k].sizes(),
                            "the CPU and the meta kernel return different sizes");
                to[k].copy_(from[k]);
              }
            }
          });
}

Stack run_now(const c10::OperatorHandle& op, const Stack& arguments, c10::Device device) {
  note_wait(op.schema().name());
  drain(current_stream(device));
  Replacements aliases{Replacements::kImmediate};
  Stack stack = aliases(arguments);
  op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), &stack);
  for (auto& [original, alias] : aliases.pairs) {
    if (!is_npu(original)) continue;
    if (original.sizes() != alias.sizes()) original.resize_(alias.sizes());
    // A resized alias has moved to memory of its own; a fresh alias of the (resized) tensor takes
    // the data back.
    if (alias.numel() > 0 && alias.storage().data() != original.storage().data())
      cpu_alias(original).copy_(alias);
  }
  Stack results;
  for (const IValue& v : stack) {
    results.push_back(map_tensors(v, [&](const at::Tensor& t) {
      at::Tensor argument = aliases.original(t);
      if (argument.defined()) return argument;
      at::Tensor result = empty_like_on(t, device);
      if (t.numel() > 0) cpu_alias(result).copy_(t);
      return result;
    }));
  }
  return results;
}

bool returns_view(const c10::FunctionSchema& schema) {
  for (const c10::Argument& r : schema.returns()) {
    if (r.alias_info() && !r.alias_info()->isWrite()) return true;
  }
  return false;
}

void fallback(const c10::OperatorHandle& op, DispatchKeySet, Stack* stack) {
  const auto& schema = op.schema();
  TORCH_CHECK_NOT_IMPLEMENTED(op.hasComputedKernelForDispatchKey(DispatchKey::CPU), schema.name(),
                              " has neither an NPU nor a CPU kernel");
  TORCH_CHECK_NOT_IMPLEMENTED(!returns_view(schema), schema.name(),
                              " returns a view and needs a native kernel on npu");
  const size_t n = schema.arguments().size();
  Stack arguments(stack->end() - std::ptrdiff_t(n), stack->end());
  c10::Device device = device_of_call(arguments);
  check_devices(schema.name(), arguments, device);
  check_double(schema.name(), arguments);
  c10::DeviceGuard on(device);
  KernelState state;
  Stack results;
  if (can_defer(schema, arguments) && predict(op, arguments, device, &results)) {
    defer(op, arguments, results);
  } else {
    results = run_now(op, arguments, device);
  }
  torch::jit::drop(*stack, n);
  for (IValue& v : results) stack->push_back(std::move(v));
}

// ---- native operators: factories, copies, views, storage ----

c10::intrusive_ptr<c10::StorageImpl> make_storage(c10::StorageImpl::use_byte_size_t,
                                                  c10::SymInt size, c10::DataPtr data,
                                                  c10::Allocator* allocator, bool resizable) {
  size_t bytes = size_t(size.as_int_unchecked());
  if (!data && allocator) data = allocator->allocate(bytes);
  return c10::make_intrusive<NpuStorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes,
                                             std::move(data), allocator, resizable);
}
[[maybe_unused]] const bool storage_registered =
    (c10::SetStorageImplCreate(kNpu, &make_storage), true);

void describe(const at::Tensor& t) {
  auto* storage = dynamic_cast<NpuStorageImpl*>(t.storage().unsafeGetStorageImpl());
  TORCH_CHECK(storage,
              "npu_sim: expected storage of c10::make_storage_impl, got that of another device");
  storage->described = true;
}

at::Tensor new_tensor(size_t bytes, caffe2::TypeMeta dtype, std::optional<at::Device> device) {
  c10::DeviceGuard on(device.value_or(current_device()));
  c10::Storage storage(c10::make_storage_impl(c10::StorageImpl::use_byte_size_t(), int64_t(bytes),
                                              c10::DataPtr(), c10::GetAllocator(kNpu),
                                              /*resizable=*/true, current_device()));
  auto t = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), DispatchKeySet(DispatchKey::PrivateUse1), dtype);
  describe(t);
  return t;
}

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  auto type = c10::scalarTypeToTypeMeta(c10::dtype_or_default(dtype));
  size_t bytes = at::detail::computeStorageNbytesContiguous(size, type.itemsize());
  at::Tensor t = new_tensor(bytes, type, device);
  t.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  if (format && *format != at::MemoryFormat::Contiguous) {
    t.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  }
  return t;
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device> device, std::optional<bool>) {
  auto type = c10::scalarTypeToTypeMeta(c10::dtype_or_default(dtype));
  size_t bytes = at::detail::computeStorageNbytes(size, stride, type.itemsize());
  at::Tensor t = new_tensor(bytes, type, device);
  t.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
  return t;
}

// As on real devices: copies from pageable memory are staged, copies with pinned memory and
// non_blocking only enqueue, all others make the host wait, and a copy between devices is ordered
// with the current streams of both.
at::Tensor copy_from(const at::Tensor& self, const at::Tensor& dst, bool non_blocking) {
  KernelState state;
  bool from_host = self.is_cpu(), to_host = dst.is_cpu();
  c10::Stream stream = current_stream(from_host ? dst.device() : self.device());
  bool asynchronous = non_blocking || (!from_host && !to_host);
  if (from_host && !is_pinned(self.data_ptr())) asynchronous = non_blocking;
  if (to_host && !is_pinned(dst.data_ptr())) asynchronous = false;
  at::Tensor from = from_host ? (asynchronous && is_pinned(self.data_ptr()) ? self : self.clone())
                              : cpu_alias(self);
  at::Tensor to = to_host ? dst : cpu_alias(dst);
  bool two_devices = !from_host && !to_host && self.device() != dst.device();
  if (two_devices) add_wait(stream, add_mark(current_stream(dst.device())));
  enqueue(stream, "copy", [from, to]() mutable { to.copy_(from); });
  if (two_devices) add_wait(current_stream(dst.device()), add_mark(stream));
  if (!asynchronous) {
    note_wait(from_host ? "copy from the host" : "copy to the host");
    drain(stream);
  }
  return dst;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& dst) {
  dst.resize_(self.sizes());
  return copy_from(self, dst, false);
}

const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef size,
                          std::optional<at::MemoryFormat>) {
  if (self.sizes() == size) return self;
  size_t bytes = at::detail::computeStorageNbytesContiguous(size, self.dtype().itemsize(),
                                                            self.storage_offset());
  if (bytes > self.storage().nbytes()) resize_bytes(self.storage(), bytes);
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size,
                        at::IntArrayRef stride) {
  at::native::set_storage_cpu_(self, std::move(source), offset, size, stride);
  describe(self);
  return self;
}
at::Tensor& set_to_nothing(at::Tensor& self) {
  return set_storage(self, at::empty({0}, self.options()).storage(), 0, {0}, {});
}
at::Tensor& set_from_storage(at::Tensor& self, at::Storage source) {
  return set_storage(self, source, 0, {int64_t(source.nbytes() / self.dtype().itemsize())}, {});
}
void record(at::Tensor& self, at::Stream s) { record_stream(self.storage().data(), s); }
// The other choices are kernels that exist for CUDA or under another name for the CPU.
int64_t sdp_choice(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                   const std::optional<at::Tensor>&, double, bool, std::optional<double>, bool) {
  return 0;  // the composition of matrix products and softmax
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("resize_", resize_);
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("view_as_real", TORCH_FN(at::native::view_as_real));
  m.impl("view_as_complex", TORCH_FN(at::native::view_as_complex));
  m.impl("set_", set_to_nothing);
  m.impl("set_.source_Tensor", TORCH_FN(at::native::set_tensor_));
  m.impl("set_.source_Storage", set_from_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("is_set_to", TORCH_FN(at::native::is_set_to));
  m.impl("record_stream", record);
  m.impl("_fused_sdp_choice", sdp_choice);
}

// The fallback alone would leave operators to composite kernels where the CPU has one of its own
// (native_layer_norm, and every functional form of a structured kernel). With the CPU's kernels a
// run agrees with the CPU bit for bit.
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
    auto op = c10::Dispatcher::singleton().findSchema(name);
    if (!op || name.name.rfind("aten::", 0) != 0 || !op->hasKernelForDispatchKey(DispatchKey::CPU))
      continue;
    if (op->hasKernelForDispatchKey(DispatchKey::PrivateUse1) || returns_view(op->schema()))
      continue;
    m.impl(toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}

// As in torch_npu: model.to("npu") keeps its Parameter objects, and so their ties.
bool has_compatible_shallow_copy_type(const at::Tensor& self, const at::Tensor& from) {
  auto is_dense = [](const at::Tensor& t) {
    return t.key_set().has(DispatchKey::CPU) || t.key_set().has(DispatchKey::PrivateUse1);
  };
  return self.key_set() == from.key_set() || (is_dense(self) && is_dense(from));
}
TORCH_LIBRARY_IMPL(aten, CatchAll, m) {
  m.impl("_has_compatible_shallow_copy_type", has_compatible_shallow_copy_type);
}

TORCH_LIBRARY_IMPL(_, AutogradPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

// The fallbacks for lazy conjugation and negation copy their arguments first, so copies must not go
// through them.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

#define NPU_LOWER_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define NPU_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define NPU_FP32_OPT_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define NPU_PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(NPU_LOWER_PRECISION)
  AT_FORALL_FP32(NPU_FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(NPU_FP32_OPT_DTYPE)
  AT_FORALL_PROMOTE(NPU_PROMOTE)
}

}  // namespace

void check_storage(const at::Tensor& t) {
  auto* storage = dynamic_cast<NpuStorageImpl*>(t.storage().unsafeGetStorageImpl());
  TORCH_CHECK(storage,
              "npu_sim: expected storage of c10::make_storage_impl, got that of another device");
  TORCH_CHECK(storage->described, "npu_sim: expected storage that a factory or set_ has described");
}

at::Tensor cpu_alias(const at::Tensor& t) { return alias_over(t, storage_alias(t, false)); }

}  // namespace npu_sim
