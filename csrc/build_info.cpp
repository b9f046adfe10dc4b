#include "build_info.h"

#include <string>

#ifdef ZEROCORE_WITH_CUDA
#include <cuda_runtime_api.h>
#endif

namespace zerocore {

pybind11::dict build_info() {
  pybind11::dict info;
  info["version"] = ZEROCORE_VERSION;
  info["torch"] = ZEROCORE_TORCH_VERSION;
  info["cuda_archs"] = ZEROCORE_CUDA_ARCHS;
#ifdef ZEROCORE_WITH_CUDA
  const int minor = CUDART_VERSION % 1000 / 10;
  info["cuda"] = std::to_string(CUDART_VERSION / 1000) + "." + std::to_string(minor);
#else
  info["cuda"] = pybind11::none();
#endif
  return info;
}

}  // namespace zerocore
