// Devices: their number, their properties and the current one; error state; stream capture, which
// never happens here.
#include <cstdio>
#include <cstring>

#include "sim.h"

namespace cuda_sim {

static thread_local int this_device = 0;
static thread_local cudaError_t last_error = cudaSuccess;

cudaError_t report(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

int current_device() { return this_device; }

// What an H100 reports, except for the few multiprocessors: kernels sized by them stay small.
static int attribute(cudaDeviceAttr which) {
  switch (which) {
    case cudaDevAttrComputeCapabilityMajor:
      return 9;
    case cudaDevAttrComputeCapabilityMinor:
      return 0;
    case cudaDevAttrMultiProcessorCount:
      return 4;
    case cudaDevAttrWarpSize:
      return 32;
    case cudaDevAttrMaxThreadsPerBlock:
      return 1024;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      return 2048;
    case cudaDevAttrMaxBlocksPerMultiprocessor:
      return 32;
    case cudaDevAttrMaxBlockDimX:
      return 1024;
    case cudaDevAttrMaxBlockDimY:
      return 1024;
    case cudaDevAttrMaxBlockDimZ:
      return 64;
    case cudaDevAttrMaxGridDimX:
      return 2147483647;
    case cudaDevAttrMaxGridDimY:
      return 65535;
    case cudaDevAttrMaxGridDimZ:
      return 65535;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      return 49152;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      return 232448;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      return 233472;
    case cudaDevAttrMaxRegistersPerBlock:
      return 65536;
    case cudaDevAttrMaxRegistersPerMultiprocessor:
      return 65536;
    case cudaDevAttrL2CacheSize:
      return 50 << 20;
    case cudaDevAttrUnifiedAddressing:
      return 1;
    case cudaDevAttrMemoryPoolsSupported:
      return 1;
    default:
      return 0;
  }
}

}  // namespace cuda_sim

using namespace cuda_sim;

SIM_EXPORT cudaError_t cudaGetLastError() {
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
SIM_EXPORT cudaError_t cudaPeekAtLastError() { return last_error; }

SIM_EXPORT const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "cudaSuccess";
    case cudaErrorInvalidValue:
      return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation:
      return "cudaErrorMemoryAllocation";
    case cudaErrorInvalidDevice:
      return "cudaErrorInvalidDevice";
    case cudaErrorInvalidDeviceFunction:
      return "cudaErrorInvalidDeviceFunction";
    case cudaErrorNoKernelImageForDevice:
      return "cudaErrorNoKernelImageForDevice";
    case cudaErrorInvalidResourceHandle:
      return "cudaErrorInvalidResourceHandle";
    case cudaErrorHostMemoryNotRegistered:
      return "cudaErrorHostMemoryNotRegistered";
    case cudaErrorNotReady:
      return "cudaErrorNotReady";
    case cudaErrorNotSupported:
      return "cudaErrorNotSupported";
    default:
      return "cudaError (see the number)";
  }
}

SIM_EXPORT const char* cudaGetErrorString(cudaError_t error) {
  if (error == cudaSuccess) return "no error";
  if (error == cudaErrorMemoryAllocation)
    return "out of memory (CUDA_SIM_DEVICE_MIB sets the size of the fake device)";
  if (error == cudaErrorNoKernelImageForDevice)
    return "cuda_sim has no CPU twin of this kernel; its name is on stderr";
  if (error == cudaErrorNotSupported)
    return "cuda_sim does not implement this call; its name is on stderr";
  return cudaGetErrorName(error);
}

SIM_EXPORT cudaError_t cudaGetDeviceCount(int* count) {
  *count = config().devices;
  return cudaSuccess;
}

SIM_EXPORT cudaError_t cudaGetDevice(int* device) {
  *device = this_device;
  return cudaSuccess;
}

SIM_EXPORT cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= config().devices) return report(cudaErrorInvalidDevice);
  this_device = device;
  return cudaSuccess;
}

SIM_EXPORT cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

SIM_EXPORT cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

SIM_EXPORT cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) {
  *value = attribute(which);
  return cudaSuccess;
}

SIM_EXPORT cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int device) {
  if (device < 0 || device >= config().devices) return report(cudaErrorInvalidDevice);
  std::memset(p, 0, sizeof *p);
  std::snprintf(p->name, sizeof p->name, "cuda_sim device %d", device);
  p->uuid.bytes[0] = char(device + 1);
  p->major = attribute(cudaDevAttrComputeCapabilityMajor);
  p->minor = attribute(cudaDevAttrComputeCapabilityMinor);
  p->totalGlobalMem = config().device_bytes;
  p->multiProcessorCount = attribute(cudaDevAttrMultiProcessorCount);
  p->warpSize = attribute(cudaDevAttrWarpSize);
  p->maxThreadsPerBlock = attribute(cudaDevAttrMaxThreadsPerBlock);
  p->maxThreadsPerMultiProcessor = attribute(cudaDevAttrMaxThreadsPerMultiProcessor);
  p->maxBlocksPerMultiProcessor = attribute(cudaDevAttrMaxBlocksPerMultiprocessor);
  p->sharedMemPerBlock = size_t(attribute(cudaDevAttrMaxSharedMemoryPerBlock));
  p->sharedMemPerBlockOptin = size_t(attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin));
  p->sharedMemPerMultiprocessor = size_t(attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor));
  p->regsPerBlock = attribute(cudaDevAttrMaxRegistersPerBlock);
  p->regsPerMultiprocessor = attribute(cudaDevAttrMaxRegistersPerMultiprocessor);
  p->l2CacheSize = attribute(cudaDevAttrL2CacheSize);
  p->unifiedAddressing = 1;
  for (int i = 0; i < 3; ++i) {
    p->maxThreadsDim[i] = attribute(cudaDeviceAttr(cudaDevAttrMaxBlockDimX + i));
    p->maxGridSize[i] = attribute(cudaDeviceAttr(cudaDevAttrMaxGridDimX + i));
  }
  return cudaSuccess;
}

SIM_EXPORT cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int device) {
  std::snprintf(text, size_t(length), "0000:%02x:00.0", device + 1);
  return cudaSuccess;
}

SIM_EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}

SIM_EXPORT cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 1;
  return cudaSuccess;
}
SIM_EXPORT cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }

// Callers treat "not found" as a driver without the feature.
SIM_EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned,
                                                        unsigned long long,
                                                        cudaDriverEntryPointQueryResult* result) {
  *function = nullptr;
  if (result) *result = cudaDriverEntryPointSymbolNotFound;
  return cudaErrorInvalidValue;
}

SIM_EXPORT cudaError_t cudaProfilerStart() { return cudaSuccess; }
SIM_EXPORT cudaError_t cudaProfilerStop() { return cudaSuccess; }

// ---- stream capture ----

SIM_EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

SIM_EXPORT cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status,
                                                unsigned long long* id, cudaGraph_t*,
                                                const cudaGraphNode_t**, const cudaGraphEdgeData**,
                                                size_t* dependencies) {
  *status = cudaStreamCaptureStatusNone;
  if (id) *id = 0;
  if (dependencies) *dependencies = 0;
  return cudaSuccess;
}

SIM_EXPORT cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) {
  return cudaSuccess;
}
