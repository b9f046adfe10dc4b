// What this extension was built from and for; setup.py passes it in.
#pragma once

#include <pybind11/pybind11.h>

namespace zerocore {

// Keys: "version" of zerocore, "torch" it was compiled against, "cuda" (toolkit as "13.0", or None)
// and "cuda_archs" (as in TORCH_CUDA_ARCH_LIST, "" without CUDA).
pybind11::dict build_info();

}  // namespace zerocore
