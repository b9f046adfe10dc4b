// The Python bindings of the log, of what has failed, and of agreements on the host.
#pragma once

#include <pybind11/pybind11.h>

namespace zerocore {

void bind_failures(pybind11::module_& m);

}  // namespace zerocore
