// Kernel launches. nvcc-built code registers each kernel's host stub with its mangled name and
// launches the stub; here the launch runs the CPU twin registered under that name (see cuemu.h for
// how twins register themselves).
#include <cxxabi.h>
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <regex>
#include <sstream>
#include <unordered_map>

#include "sim.h"

namespace cuda_sim {
namespace {

struct LaunchConfiguration {
  dim3 grid, block;
  size_t shared_bytes;
  cudaStream_t stream;
};

struct Kernels {
  std::mutex mutex;
  std::unordered_map<const void*, std::string> name_of_stub;
  std::unordered_map<std::string, cuda_sim_kernel> twins;
};
Kernels& kernels() {
  static Kernels* k = new Kernels;
  return *k;
}

std::string demangled(const std::string& name) {
  int status = 0;
  char* text = abi::__cxa_demangle(name.c_str(), nullptr, nullptr, &status);
  std::string r = status == 0 ? text : name;
  std::free(text);
  return r;
}

// nvcc mangles an unnamed namespace as <length>_GLOBAL__N__<8 hex>_<length>_<file>_<8 hex>. twin.py
// gives the namespace of the twin a name that follows from the file's name; this maps the former to
// the latter.
std::string with_named_namespaces(std::string name) {
  static const std::regex unnamed("([0-9]+)_GLOBAL__N__[0-9a-f]{8}_([0-9]+)_");
  std::smatch match;
  while (std::regex_search(name, match, unnamed)) {
    size_t component = std::stoul(match[1]), file = std::stoul(match[2]);
    size_t component_start = size_t(match.position(1)) + size_t(match.length(1));
    std::string named = "cuemu_anonymous_" + match.suffix().str().substr(0, file);
    name.replace(size_t(match.position(0)), component_start + component - size_t(match.position(0)),
                 std::to_string(named.size()) + named);
  }
  return name;
}

// CUDA_SIM_TWINS names shared objects (separated by ':') with twins. Lazy binding, because a twin
// library also holds the host code of its sources, which is never called and may refer to libraries
// that are not there.
void load_twins() {
  const char* list = std::getenv("CUDA_SIM_TWINS");
  std::istringstream paths(list ? list : "");
  for (std::string path; std::getline(paths, path, ':');) {
    if (!path.empty() && !dlopen(path.c_str(), RTLD_LAZY | RTLD_LOCAL))
      die("cannot load twins: %s", dlerror());
  }
}

cudaError_t launch(const void* stub, dim3 grid, dim3 block, void** args, size_t shared_bytes,
                   cudaStream_t handle) {
  static std::once_flag once;
  std::call_once(once, load_twins);
  cuda_sim_kernel twin;
  std::string name;
  {
    std::lock_guard<std::mutex> lock(kernels().mutex);
    auto mangled = kernels().name_of_stub.find(stub);
    if (mangled == kernels().name_of_stub.end()) return report(cudaErrorInvalidDeviceFunction);
    name = demangled(mangled->second);
    auto found = kernels().twins.find(with_named_namespaces(mangled->second));
    if (found == kernels().twins.end()) {
      std::fprintf(stderr, "cuda_sim: no CPU twin of kernel %s\n", name.c_str());
      return report(cudaErrorNoKernelImageForDevice);
    }
    twin = found->second;
  }
  if (grid.x == 0 || grid.y == 0 || grid.z == 0 || block.x == 0 || block.y == 0 || block.z == 0 ||
      block.x * block.y * block.z > 1024) {
    return report(cudaErrorInvalidConfiguration);
  }
  count_launch(name);

  // The arguments live on the caller's stack: copy them now, as a real launch does.
  auto values = std::make_shared<std::vector<std::vector<char>>>();
  for (int i = 0; i < twin.parameter_count; ++i) {
    auto* from = static_cast<const char*>(args[i]);
    values->emplace_back(from, from + twin.parameter_bytes[i]);
  }
  enqueue(resolve(handle), twin.mangled_name, [=] {
    std::vector<void*> pointers;
    for (int i = 0; i < twin.parameter_count; ++i) {
      void* value = (*values)[size_t(i)].data();
      pointers.push_back(value);
      if (!twin.is_pointer[i]) continue;
      void* pointer;
      std::memcpy(&pointer, value, sizeof pointer);
      // A pointer just past its allocation's end is fine when nothing is read through it, so only
      // freed memory and foreign addresses are errors: one byte stands for the unknown extent.
      check_range(pointer, 1, "kernel " + name + ", parameter " + std::to_string(i));
    }
    const unsigned g[3] = {grid.x, grid.y, grid.z}, b[3] = {block.x, block.y, block.z};
    twin.run(g, b, shared_bytes, pointers.data());
  });
  return cudaSuccess;
}

thread_local std::vector<LaunchConfiguration> pushed;

}  // namespace
}  // namespace cuda_sim

using namespace cuda_sim;

SIM_EXPORT void cuda_sim_register_kernel(const cuda_sim_kernel* kernel) {
  std::lock_guard<std::mutex> lock(kernels().mutex);
  kernels().twins[kernel->mangled_name] = *kernel;
}

// ---- what nvcc's generated code calls ----

SIM_EXPORT void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
SIM_EXPORT void __cudaRegisterFatBinaryEnd(void**) {}
SIM_EXPORT void __cudaUnregisterFatBinary(void**) {}
SIM_EXPORT char __cudaInitModule(void**) { return 1; }
SIM_EXPORT void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

SIM_EXPORT void __cudaRegisterFunction(void**, const char* stub, char*, const char* name, int,
                                       uint3*, uint3*, dim3*, dim3*, int*) {
  std::lock_guard<std::mutex> lock(kernels().mutex);
  kernels().name_of_stub[stub] = name;
}

SIM_EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes,
                                                cudaStream_t stream) {
  pushed.push_back({grid, block, shared_bytes, stream});
  return 0;
}

SIM_EXPORT cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_bytes,
                                                  void* stream) {
  const LaunchConfiguration& c = pushed.back();
  *grid = c.grid;
  *block = c.block;
  *shared_bytes = c.shared_bytes;
  *static_cast<cudaStream_t*>(stream) = c.stream;
  pushed.pop_back();
  return cudaSuccess;
}

SIM_EXPORT cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* stub) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(stub));
  return cudaSuccess;
}

// ---- launches ----

SIM_EXPORT cudaError_t cudaLaunchKernel(const void* stub, dim3 grid, dim3 block, void** args,
                                        size_t shared_bytes, cudaStream_t stream) {
  return launch(stub, grid, block, args, shared_bytes, stream);
}

SIM_EXPORT cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** args,
                                          size_t shared_bytes, cudaStream_t stream) {
  return launch(reinterpret_cast<const void*>(kernel), grid, block, args, shared_bytes, stream);
}

// Launch attributes (clusters, programmatic launch) are ignored.
SIM_EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* c, const void* stub,
                                           void** args) {
  return launch(stub, c->gridDim, c->blockDim, args, c->dynamicSmemBytes, c->stream);
}

SIM_EXPORT cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  std::memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->binaryVersion = attributes->ptxVersion = 90;
  return cudaSuccess;
}

SIM_EXPORT cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) {
  return cudaSuccess;
}
SIM_EXPORT cudaError_t cudaFuncSetCacheConfig(const void*, cudaFuncCache) { return cudaSuccess; }

SIM_EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks,
                                                                              const void*,
                                                                              int threads, size_t,
                                                                              unsigned) {
  *blocks = threads > 0 ? 2048 / threads : 1;
  return cudaSuccess;
}

SIM_EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* stub,
                                                                     int threads,
                                                                     size_t shared_bytes) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, stub, threads, shared_bytes,
                                                                0);
}
