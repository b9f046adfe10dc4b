// The Python bindings. Operators on tensors are in torch.ops.zerocore; here is the runtime.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <string>
#include <utility>

#include "build_info.h"
#include "failure_bindings.h"
#include "ops/bindings.h"
#include "runtime/rehearsal.h"
#include "runtime/runtime.h"

namespace py = pybind11;

namespace zerocore {
namespace {

// Every call may wait for other ranks, and the backward of one model may need the GIL of another
// thread: none of them holds it. Errors become the Python exceptions that torch raises for them.
template <class Result, class... Args>
auto no_gil(Result (Runtime::*method)(Args...)) {
  return torch::wrap_pybind_function_no_gil(
      [method](Runtime& self, Args... args) -> Result { return (self.*method)(args...); });
}

using Dtype = std::optional<at::ScalarType>;

std::shared_ptr<Runtime> make_runtime(
    const std::string& shard_group, const std::string& replicate_group,
    const std::string& reduce_shard_group, const std::string& reduce_replicate_group,
    std::shared_ptr<Control> control, std::shared_ptr<Log> log, std::shared_ptr<Fault> fault,
    int shard_channel, int replicate_channel, at::Device device, bool pairwise, bool persistent,
    bool reshard_after_forward, int prefetch, int64_t max_window_bytes, bool register_windows,
    int64_t launch_bytes, Dtype compute_dtype, Dtype reduce_dtype, Dtype accumulate_dtype,
    Dtype master_dtype) {
  RuntimeOptions options;
  options.groups = {shard_group,   replicate_group,  reduce_shard_group, reduce_replicate_group,
                    shard_channel, replicate_channel};
  options.control = std::move(control);
  options.log = std::move(log);
  options.fault = std::move(fault);
  options.device = device;
  options.pairwise = pairwise;
  options.persistent = persistent;
  options.reshard_after_forward = reshard_after_forward;
  options.prefetch = prefetch;
  options.max_window_bytes = max_window_bytes;
  options.register_windows = register_windows;
  options.launch_bytes = launch_bytes;
  options.compute_dtype = compute_dtype;
  options.reduce_dtype = reduce_dtype;
  options.accumulate_dtype = accumulate_dtype;
  options.master_dtype = master_dtype;
  return std::make_shared<Runtime>(std::move(options));
}

int add_unit(Runtime& self, const std::string& name,
             const std::vector<std::vector<std::string>>& names,
             const std::vector<std::vector<at::Tensor>>& params, std::vector<Flat::Values> values) {
  std::vector<FlatParams> flats;
  for (size_t i = 0; i < names.size(); ++i) {
    flats.push_back({names[i], params.at(i), std::move(values.at(i))});
  }
  return self.add_unit(name, std::move(flats));
}

py::dict traffic(Runtime& self) {
  py::dict result;
  for (const auto& [kind, sent] : self.log().traffic()) {
    result[py::str(kind)] = py::make_tuple(sent.calls, sent.elements, sent.bytes);
  }
  return result;
}

py::list records(Runtime& self) {
  py::list result;
  for (const Record& record : self.log().records()) {
    const std::string unit = record.unit < 0 ? "" : self.unit_name(record.unit);
    result.append(py::make_tuple(
        record.sequence, record.event, record.kind, unit, record.elements, record.phase,
        record.time, self.device_times(record.event, record.launch), record.dtype, record.forward));
  }
  return result;
}

void bind_runtime(py::module_& m) {
  py::enum_<Sync>(m, "Sync")
      .value("all", Sync::all)
      .value("shard", Sync::shard)
      .value("none", Sync::none);
  py::class_<Runtime, std::shared_ptr<Runtime>>(m, "Runtime")
      .def(py::init(&make_runtime), py::kw_only(), py::arg("shard_group"),
           py::arg("replicate_group"), py::arg("reduce_shard_group"),
           py::arg("reduce_replicate_group"), py::arg("control").none(false),
           py::arg("log").none(false), py::arg("fault").none(false), py::arg("shard_channel"),
           py::arg("replicate_channel"), py::arg("device"), py::arg("pairwise"),
           py::arg("persistent"), py::arg("reshard_after_forward"), py::arg("prefetch"),
           py::arg("max_window_bytes"), py::arg("register_windows"), py::arg("launch_bytes"),
           py::arg("compute_dtype"), py::arg("reduce_dtype"), py::arg("accumulate_dtype"),
           py::arg("master_dtype"), py::call_guard<py::gil_scoped_release>())
      .def("add_unit", torch::wrap_pybind_function_no_gil(&add_unit))
      .def("seal", no_gil(&Runtime::seal))
      .def("add_nested", no_gil(&Runtime::add_nested))
      .def("begin_forward", no_gil(&Runtime::begin_forward))
      .def("end_forward", no_gil(&Runtime::end_forward))
      .def("pre_forward", no_gil(&Runtime::pre_forward))
      .def("post_forward", no_gil(&Runtime::post_forward))
      .def("open", no_gil(&Runtime::open))
      .def("close", no_gil(&Runtime::close))
      .def("full_tensors", no_gil(&Runtime::full_tensors))
      .def("gather_tensors", no_gil(&Runtime::gather_tensors))
      .def("settle", no_gil(&Runtime::settle))
      .def("before_write", no_gil(&Runtime::before_write))
      .def("before_step", no_gil(&Runtime::before_step))
      .def("after_step", no_gil(&Runtime::after_step))
      .def_property("sync", &Runtime::sync, &Runtime::set_sync)
      // Facts about flat buffer `flat` of unit `unit`.
      .def("owned",
           [](Runtime& self, int unit, int flat, int64_t param) {
             const Flat& source = self.flat(unit, flat);
             const Range range = source.layout().owned(param, source.transport().shard_rank());
             return std::make_pair(range.begin, range.end);
           })
      .def("within_shard",
           [](Runtime& self, int unit, int flat, int64_t param) {
             const Flat& source = self.flat(unit, flat);
             const Range range =
                 source.layout().within_shard(param, source.transport().shard_rank());
             return std::make_pair(range.begin, range.end);
           })
      .def("padded",
           [](Runtime& self, int unit, int flat) {
             const Layout& layout = self.flat(unit, flat).layout();
             return std::make_pair(layout.total(), layout.shard_numel());
           })
      .def("shard", [](Runtime& self, int unit, int flat) { return self.flat(unit, flat).shard(); })
      .def("slice",
           [](Runtime& self, int unit, int flat, int64_t param, const at::Tensor& full) {
             const Flat& source = self.flat(unit, flat);
             return source.slice(source.in_memory_order(full, param), param);
           })
      .def("shard_is_slot",
           [](Runtime& self, int unit, int flat) { return self.flat(unit, flat).shard_is_slot(); })
      .def("compute_dtype",
           [](Runtime& self, int unit, int flat) { return self.flat(unit, flat).compute_dtype(); })
      .def("is_open", &Runtime::is_open)
      .def("window_bytes",
           [](Runtime& self, int unit, int flat) { return self.flat(unit, flat).window_bytes(); })
      .def("gradient_dtype",
           [](Runtime& self, int unit, int flat) { return self.gradients(unit, flat).dtype(); })
      .def("gradient_bytes",
           [](Runtime& self, int unit, int flat) { return self.gradients(unit, flat).bytes(); })
      .def("main_gradient",
           [](Runtime& self, int unit, int flat) { return self.gradients(unit, flat).main(); })
      .def("settle_gradients",
           [](Runtime& self, int unit, int flat, const std::string& own) {
             py::gil_scoped_release no_gil;
             std::string found = self.settle_gradients(unit, flat, own);
             py::gil_scoped_acquire gil;
             return py::bytes(found);
           })
      .def("adamw", no_gil(&Runtime::adamw))
      .def("traffic", &traffic)
      .def("records", &records)
      .def("under_way", torch::wrap_pybind_function_no_gil(
                            [](Runtime& self) { return self.transport().under_way(); }))
      .def("begin_span", no_gil(&Runtime::begin_span), py::arg("kind"), py::arg("unit") = -1)
      .def("end_span", no_gil(&Runtime::end_span), py::arg("kind"), py::arg("unit") = -1)
      .def("time_device", no_gil(&Runtime::time_device))
      .def("device_times", &Runtime::device_times)
      // (id, device index, device type) of the streams of gathers and of reductions.
      .def("streams",
           [](const Runtime& self) {
             std::vector<std::tuple<int64_t, int64_t, int64_t>> streams;
             for (const c10::Stream& s : {self.streams().gather(), self.streams().reduce()}) {
               streams.emplace_back(s.id(), s.device_index(),
                                    static_cast<int64_t>(s.device_type()));
             }
             return streams;
           })
      .def("windows",
           [](Runtime& self) {
             return std::make_pair(self.windows().leased(), self.windows().peak());
           })
      // Bytes that the pools of windows and of messages have and nobody uses.
      .def("kept",
           [](Runtime& self) {
             return std::make_pair(self.windows().kept(), self.messages().kept());
           })
      // Bytes of full parameters that are open outside of a pass.
      .def("opened_bytes", no_gil(&Runtime::opened_bytes))
      .def("reset_stats", [](Runtime& self) {
        self.log().reset();
        self.windows().reset_peak();
      });
}

// A hash of which objects are in a sequence, and in what order. (A copy of the addresses would be
// exact, but large: its allocation makes malloc tidy up all that a backward has freed.)
uint64_t identity(const py::handle& objects) {
  const auto sequence = py::reinterpret_steal<py::object>(
      PySequence_Fast(objects.ptr(), "expected parameters in a sequence"));
  if (!sequence) throw py::error_already_set();
  const Py_ssize_t count = PySequence_Fast_GET_SIZE(sequence.ptr());
  PyObject* const* items = PySequence_Fast_ITEMS(sequence.ptr());
  auto hash = static_cast<uint64_t>(count);
  for (Py_ssize_t i = 0; i < count; ++i) {
    // The finaliser of splitmix64 (Steele, Lea and Flood, OOPSLA 2014).
    hash += reinterpret_cast<uintptr_t>(items[i]) + 0x9e3779b97f4a7c15;
    hash = (hash ^ (hash >> 30)) * 0xbf58476d1ce4e5b9;
    hash = (hash ^ (hash >> 27)) * 0x94d049bb133111eb;
    hash ^= hash >> 31;
  }
  return hash;
}

// A CPU tensor of a meta tensor's geometry and dtype whose storage only has a size.
at::Tensor blank_like(const at::Tensor& like, const std::string& message) {
  const int64_t bytes = static_cast<int64_t>(like.storage().nbytes());
  const at::Tensor held = without_memory(c10::kCPU, bytes, c10::kByte, message);
  auto impl = c10::make_intrusive<c10::TensorImpl>(c10::Storage(held.storage()), held.key_set(),
                                                   like.dtype());
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return at::Tensor(std::move(impl));
}

// For tensors whose values are made when zerocore.shard needs them. `show` also works where torch's
// `data` and `set_` do not: across devices, and without memory.
void bind_memory(py::module_& m) {
  m.def("blank_like", &blank_like, py::arg("like"), py::arg("message"),
        "A CPU tensor of a meta tensor's geometry: reading it is a RuntimeError of this text.");
  m.def(
      "show",
      [](const at::Tensor& tensor, const at::Tensor& source) {
        tensor.unsafeGetTensorImpl()->shallow_copy_from(source.getIntrusivePtr());
      },
      py::arg("tensor"), py::arg("source"),
      "Makes a tensor show what another one shows, memory and geometry; it stays the same object.");
}

// The scheduler without a model, for plans.
void bind_rehearsal(py::module_& m) {
  py::class_<Rehearsal>(m, "Rehearsal")
      .def(py::init<std::vector<int64_t>, int, bool, int64_t, int64_t>(), py::kw_only(),
           py::arg("bytes"), py::arg("prefetch"), py::arg("persistent"), py::arg("launch_bytes"),
           py::arg("budget"))
      .def("begin_pass", [](Rehearsal& self) { self.scheduler().begin_pass(/*gradients=*/true); })
      .def("end_pass",
           [](Rehearsal& self) {
             self.scheduler().end_pass();
             self.scheduler().release_all();
           })
      .def("invalidate", [](Rehearsal& self, int unit) { self.scheduler().invalidate(unit); })
      .def("start_all", [](Rehearsal& self) { self.scheduler().start_all(); })
      .def("demand", [](Rehearsal& self, int unit) { self.scheduler().demand(unit); })
      .def("keep", [](Rehearsal& self, int unit) { self.scheduler().keep(unit); })
      .def("release", [](Rehearsal& self, int unit) { self.scheduler().release(unit); })
      // (event, unit) pairs; see Rehearsal::Step.
      .def("take",
           [](Rehearsal& self) {
             std::vector<std::pair<std::string, int>> steps;
             for (const auto& [event, unit] : self.take()) steps.emplace_back(event, unit);
             return steps;
           })
      .def_property_readonly("peak", &Rehearsal::peak);
}

// The transport of CPU ranks without a model, for the calibration of plans.
void bind_transport(py::module_& m) {
  const auto make = [](const std::string& group) {
    Streams& streams = Streams::of(c10::Device(c10::kCPU));
    GroupNames names;
    names.shard = group;
    auto buffers = std::make_shared<DevicePool>(streams, std::nullopt, /*budget=*/0);
    return std::shared_ptr<Transport>(
        make_pairwise_transport(names, std::move(buffers), std::make_shared<Log>()));
  };
  py::class_<Transport, std::shared_ptr<Transport>>(m, "PairwiseTransport")
      .def(py::init(make), py::arg("group"), py::call_guard<py::gil_scoped_release>())
      .def("all_gather",
           torch::wrap_pybind_function_no_gil([](Transport& self, const at::Tensor& window) {
             self.all_gather(window, /*channel=*/0)->drain();
           }));
}

// For the tests that show each wait between streams to be needed.
void bind_waits(py::module_& m) {
  py::dict waits;
  for (int i = 0; i < static_cast<int>(Wait::count); ++i) {
    waits[wait_name(static_cast<Wait>(i))] = i;
  }
  m.attr("WAITS") = waits;
  m.def("leave_out_wait", [](int wait, bool out) {
    TORCH_CHECK_VALUE(wait >= 0 && wait < static_cast<int>(Wait::count), "wait: expected one of ",
                      "zerocore._C.WAITS, got ", wait);
    Streams::leave_out(static_cast<Wait>(wait), out);
  });
}

}  // namespace
}  // namespace zerocore

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.doc() = "The compiled core of zerocore.";
  m.attr("ALIGNMENT") = zerocore::kAlignment;
  m.attr("BUILD") = zerocore::build_info();
  m.def(
      "padded_elements",
      [](std::vector<int64_t> numels, int64_t shards, int64_t replicas) {
        const zerocore::Layout layout(std::move(numels), shards, replicas);
        return std::make_pair(layout.total(), layout.shard_numel());
      },
      py::arg("numels"), py::arg("shards"), py::arg("replicas"),
      "Elements of the flat buffer of parameters with these sizes, and of each rank's shard.");
  m.def("identity", &zerocore::identity, py::arg("objects"),
        "A number that tells which objects are in a sequence, and in what order.");
  zerocore::ops::bind_kernels(m);
  zerocore::bind_failures(m);
  zerocore::bind_runtime(m);
  zerocore::bind_memory(m);
  zerocore::bind_rehearsal(m);
  zerocore::bind_transport(m);
  zerocore::bind_waits(m);
}
