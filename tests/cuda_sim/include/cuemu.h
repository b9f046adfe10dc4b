// Runs CUDA kernels on the CPU from their unchanged source.
//
// Under nvcc this header only defines two macros. Under g++ it defines enough of the CUDA language
// for kernels to compile as functions, and engines that run a grid of them:
//   fibers (default)  every CUDA thread is a fiber; blocks are spread over the cores; fast, and
//                     deterministic per order
//   -DCUEMU_THREADS   every CUDA thread is an operating system thread, for -fsanitize=thread: finds
//                     missing barriers
//
// Shared memory starts as 0xFF bytes (NaN), divergent barriers and warp collectives abort with a
// message, and the order in which the threads of a block run can be changed (cuemu::order) to
// expose results that depend on it.
//
// A kernel that is launched in a shared object registers itself as the CPU twin of the nvcc-built
// kernel of the same name, for the fake CUDA runtime to find. In code that g++ compiles, launches
// must be written CU_LAUNCH and dynamic shared memory CU_DYN_SHARED; twin.py rewrites ordinary CUDA
// source that way.
//
// Where the CUDA headers are not found, or CUEMU_NO_CUDA_HEADERS is defined, cuemu_types.h stands
// in for the few types that kernels over plain pointers need.
#pragma once
#if __has_include(<cuda_runtime.h>) && !defined(CUEMU_NO_CUDA_HEADERS)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#else
#include "cuemu_types.h"
#endif

#ifdef __CUDACC__

// Template kernels need parentheses: CU_LAUNCH((kernel<float, 4>), grid, block, 0, stream, args...)
#define CU_LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
  kernel<<<(grid), (block), (shared_bytes), (stream)>>>(__VA_ARGS__)
#define CU_DYN_SHARED(T, name)                                   \
  extern __shared__ __align__(16) unsigned char cuemu_dynamic[]; \
  T* name = reinterpret_cast<T*>(cuemu_dynamic)

#else

#include "cuemu_engine.h"
// The order matters: intrinsics are built on an engine, and launches on both.
#ifdef CUEMU_THREADS
#include "cuemu_threads.h"
#else
#include "cuemu_fibers.h"
#endif
#include "cuemu_intrinsics.h"
#include "cuemu_launch.h"

// A block runs on one thread (fibers), or blocks run one after the other (threads), so this is one
// copy per block.
#undef __shared__
#ifdef CUEMU_THREADS
#define __shared__ static
#else
#define __shared__ static thread_local
#endif
#undef __grid_constant__
#define __grid_constant__
#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __forceinline__
#define __forceinline__ inline __attribute__((always_inline))

#define threadIdx (::cuemu::current_thread->index)
#define blockIdx (::cuemu::current_block->index)
#define blockDim (::cuemu::current_block->block_dim)
#define gridDim (::cuemu::current_block->grid_dim)
#define warpSize 32

#define CU_LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
  ::cuemu::launch_kernel<kernel>((grid), (block), (shared_bytes), \
                                 (stream)__VA_OPT__(, ) __VA_ARGS__)
#define CU_DYN_SHARED(T, name) \
  T* name = reinterpret_cast<T*>(::cuemu::current_block->dynamic_shared.data())

#endif
