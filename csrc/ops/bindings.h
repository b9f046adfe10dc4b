// Python bindings of what is not an operator: the choice of the kernels' instruction set.
#pragma once

#include <pybind11/pybind11.h>

namespace zerocore::ops {

void bind_kernels(pybind11::module_& m);

}  // namespace zerocore::ops
