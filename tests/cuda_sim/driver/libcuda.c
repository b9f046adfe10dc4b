/* A libcuda.so.1 for libraries that name the driver library as a dependency (libcaffe2_nvrtc).
   cuInit succeeds so that probing works; everything else reports "not supported". */
#include <stdio.h>

#define CUDA_ERROR_NOT_SUPPORTED 801
#define UNSUPPORTED(name)                                        \
  int name(void) {                                               \
    fprintf(stderr, "cuda_sim: " #name " is not implemented\n"); \
    return CUDA_ERROR_NOT_SUPPORTED;                             \
  }

int cuInit(unsigned flags) {
  (void)flags;
  return 0;
}

int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) {
  (void)device;
  *flags = 0;
  *active = 1;
  return 0;
}

int cuCtxGetCurrent(void** context) {
  *context = (void*)1;
  return 0;
}

UNSUPPORTED(cuCtxSetCurrent)
UNSUPPORTED(cuDeviceGet)
UNSUPPORTED(cuDeviceGetAttribute)
UNSUPPORTED(cuDevicePrimaryCtxRetain)
UNSUPPORTED(cuFuncGetAttribute)
UNSUPPORTED(cuFuncSetAttribute)
UNSUPPORTED(cuFuncSetCacheConfig)
UNSUPPORTED(cuGetErrorString)
UNSUPPORTED(cuLaunchCooperativeKernel)
UNSUPPORTED(cuLaunchKernel)
UNSUPPORTED(cuLinkAddData_v2)
UNSUPPORTED(cuLinkComplete)
UNSUPPORTED(cuLinkCreate_v2)
UNSUPPORTED(cuModuleGetFunction)
UNSUPPORTED(cuModuleLoad)
UNSUPPORTED(cuModuleLoadData)
UNSUPPORTED(cuModuleLoadDataEx)
UNSUPPORTED(cuModuleUnload)
UNSUPPORTED(cuOccupancyMaxActiveBlocksPerMultiprocessor)
UNSUPPORTED(cuPointerGetAttribute)
UNSUPPORTED(cuTensorMapEncodeTiled)
