#include "failure_bindings.h"

#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <string>

#include "runtime/fault.h"
#include "runtime/log.h"
#include "runtime/transport.h"

namespace py = pybind11;

namespace zerocore {
namespace {

// (sequence, event, kind, unit index, elements, dtype, phase, time, forward, recoveries, position,
// launch)
py::list records(const Log& log, int64_t from) {
  py::list result;
  for (const Record& record : log.records(from)) {
    result.append(py::make_tuple(record.sequence, record.event, record.kind, record.unit,
                                 record.elements, record.dtype, record.phase, record.time,
                                 record.forward, record.recoveries, record.position,
                                 record.launch));
  }
  return result;
}

}  // namespace

void bind_failures(py::module_& m) {
  py::class_<Log, std::shared_ptr<Log>>(m, "Log")
      .def(py::init([] { return std::make_shared<Log>(); }))
      .def(
          "add",
          [](Log& self, const std::string& event, const std::string& kind, const std::string& phase,
             int unit) { self.add({interned(event), interned(kind), interned(phase), unit, 0}); },
          py::arg("event"), py::arg("kind"), py::arg("phase"), py::arg("unit") = -1)
      .def("records", &records, py::arg("start") = 0)
      .def_property_readonly("recoveries", &Log::recoveries)
      .def_property_readonly("next", &Log::next)
      .def_property_readonly("now", &Log::now)
      .def_property_readonly("start", &Log::start);
  py::class_<Fault, std::shared_ptr<Fault>>(m, "Fault")
      .def(py::init<Fault::Explain>())
      .def("set", &Fault::set)
      .def("check", torch::wrap_pybind_function_no_gil([](const Fault& self) { self.check(); }))
      .def_property_readonly("broken", &Fault::broken)
      .def_property_readonly("told", &Fault::told)
      .def_property_readonly("text", &Fault::text);
  py::enum_<Topic>(m, "Topic")
      .value("sizes", Topic::sizes)
      .value("values", Topic::values)
      .value("sum", Topic::sum)
      .value("maximum", Topic::maximum);
  py::class_<Control, std::shared_ptr<Control>>(m, "Control")
      .def(py::init<const std::string&, int, bool>(), py::arg("group"), py::arg("number"),
           py::arg("fake"))
      .def("gather", torch::wrap_pybind_function_no_gil(
                         [](Control& self, Topic topic, const at::Tensor& values) {
                           return self.gather(topic, values);
                         }));
}

}  // namespace zerocore
