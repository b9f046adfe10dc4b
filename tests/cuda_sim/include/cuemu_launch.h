// Launches, and the registration of kernels as twins of nvcc-built ones.
#pragma once
#include <dlfcn.h>

#include <cstdio>
#include <tuple>
#include <type_traits>
#include <utility>

#include "cuda_sim_api.h"
#include "cuemu_engine.h"

// Absent when a program uses kernels without the fake runtime.
extern "C" void cuda_sim_register_kernel(const cuda_sim_kernel* kernel) __attribute__((weak));

namespace cuemu {

template <auto Kernel>
struct Twin;

template <class... Parameters, void (*Kernel)(Parameters...)>
struct Twin<Kernel> {
  static void run(const unsigned grid[3], const unsigned block[3], size_t shared_bytes,
                  void** args) {
    call(grid, block, shared_bytes, args, std::index_sequence_for<Parameters...>{});
  }

  template <size_t... I>
  static void call(const unsigned g[3], const unsigned b[3], size_t shared_bytes, void** args,
                   std::index_sequence<I...>) {
    run_grid(dim3(g[0], g[1], g[2]), dim3(b[0], b[1], b[2]), shared_bytes,
             [&] { Kernel(*static_cast<std::remove_reference_t<Parameters>*>(args[I])...); });
  }

  Twin() {
    if (!cuda_sim_register_kernel) return;
    // The kernel's own symbol is its mangled name, which nvcc forms by the same rules.
    Dl_info info;
    bool found = dladdr(reinterpret_cast<void*>(Kernel), &info) && info.dli_sname &&
                 info.dli_saddr == reinterpret_cast<void*>(Kernel);
    if (!found) {
      std::fprintf(stderr,
                   "cuemu: a kernel has no exported symbol (is it static, or in an unnamed "
                   "namespace?): %s\n",
                   __PRETTY_FUNCTION__);
      return;
    }
    static const size_t bytes[] = {sizeof(Parameters)..., 0};
    static const unsigned char is_pointer[] = {std::is_pointer_v<Parameters>..., 0};
    const cuda_sim_kernel kernel{info.dli_sname, int(sizeof...(Parameters)), bytes, is_pointer,
                                 &run};
    cuda_sim_register_kernel(&kernel);
  }

  static inline Twin registration;

  // A direct launch: runs the grid now, on the caller's thread and the engine's workers.
  static void launch(dim3 grid, dim3 block, size_t shared_bytes, Parameters... parameters) {
    static_cast<void>(
        &registration);  // using it here is what makes every launched kernel register itself
    run_grid(grid, block, shared_bytes, [&] { Kernel(parameters...); });
  }
};

template <auto Kernel, class... Arguments>
void launch_kernel(dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t,
                   Arguments&&... arguments) {
  Twin<Kernel>::launch(grid, block, shared_bytes, std::forward<Arguments>(arguments)...);
}

}  // namespace cuemu
