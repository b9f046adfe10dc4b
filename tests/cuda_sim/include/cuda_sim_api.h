// C interface of the fake CUDA runtime, beyond the CUDA runtime API itself.
// Used by the kernel twins (see cuemu.h), the fake NCCL, the operator fallback and, through ctypes,
// by Python.
#pragma once
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

// Runs one whole grid on the CPU. args[i] points at the i-th kernel parameter.
typedef void (*cuda_sim_grid_fn)(const unsigned grid[3], const unsigned block[3],
                                 size_t shared_bytes, void** args);

typedef struct {
  const char* mangled_name;  // the name under which nvcc registers the kernel
  int parameter_count;
  const size_t* parameter_bytes;    // one entry per parameter
  const unsigned char* is_pointer;  // one entry per parameter
  cuda_sim_grid_fn run;
} cuda_sim_kernel;

// Makes a kernel runnable. All pointers must stay valid for the life of the process.
void cuda_sim_register_kernel(const cuda_sim_kernel* kernel);

// Aborts with a message when [p, p + bytes) is not inside one live device or pinned allocation.
// Does nothing for a null pointer, for bytes == 0, or when CUDA_SIM_CHECK=0.
void cuda_sim_check_range(const void* p, size_t bytes, const char* user);

// A label shown in messages of work enqueued next by this thread (cudaLaunchHostFunc has no name of
// its own). Also the name under which that work is counted.
void cuda_sim_name_next_host_func(const char* name);

// Counts one use of `name` among the host functions.
void cuda_sim_count(const char* name);

// 1 under the lazy schedule, 0 under the eager one.
int cuda_sim_is_lazy(void);

// Grows with every enqueued task: unchanged for a while means that the host program waits or does
// something else.
unsigned long cuda_sim_activity(void);

// All counters as one JSON object. The text belongs to the calling thread and lives until its next
// call.
const char* cuda_sim_counters(void);
void cuda_sim_reset_counters(void);

// Number of enqueued tasks that have not run yet, on all streams of all devices.
int cuda_sim_pending(void);

#ifdef __cplusplus
}
#endif
