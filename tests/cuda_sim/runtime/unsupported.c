/* CUDA calls that libtorch refers to and this runtime does not implement. They must exist for
   libtorch to load; each names itself and returns an error. This file includes no CUDA header, so
   that one macro fits every signature. */
#include <stdio.h>

#define CUDA_ERROR_NOT_SUPPORTED 801

#define UNSUPPORTED(name)                                        \
  __attribute__((visibility("default"))) int name(void) {        \
    fprintf(stderr, "cuda_sim: " #name " is not implemented\n"); \
    return CUDA_ERROR_NOT_SUPPORTED;                             \
  }

/* graphs */
UNSUPPORTED(cudaGraphAddNode)
UNSUPPORTED(cudaGraphConditionalHandleCreate)
UNSUPPORTED(cudaGraphDestroy)
UNSUPPORTED(cudaGraphExecDestroy)
UNSUPPORTED(cudaGraphGetNodes)
UNSUPPORTED(cudaGraphInstantiateWithFlags)
UNSUPPORTED(cudaGraphLaunch)
UNSUPPORTED(cudaGraphNodeGetDependencies)
UNSUPPORTED(cudaGraphRetainUserObject)
UNSUPPORTED(cudaStreamBeginCapture)
UNSUPPORTED(cudaStreamBeginCaptureToGraph)
UNSUPPORTED(cudaStreamEndCapture)
UNSUPPORTED(cudaStreamUpdateCaptureDependencies)
UNSUPPORTED(cudaUserObjectCreate)
UNSUPPORTED(cudaUserObjectRelease)

/* sharing between processes */
UNSUPPORTED(cudaIpcCloseMemHandle)
UNSUPPORTED(cudaIpcGetEventHandle)
UNSUPPORTED(cudaIpcGetMemHandle)
UNSUPPORTED(cudaIpcOpenEventHandle)
UNSUPPORTED(cudaIpcOpenMemHandle)

/* device symbols and modules */
UNSUPPORTED(cudaGetSymbolAddress)
UNSUPPORTED(cudaMemcpyToSymbol)
UNSUPPORTED(cudaKernelSetAttributeForDevice)
UNSUPPORTED(cudaLaunchCooperativeKernel)
UNSUPPORTED(cudaLibraryGetKernel)
UNSUPPORTED(cudaLibraryLoadData)
UNSUPPORTED(cudaLibraryUnload)

/* memory pools (cudaMallocAsync and cudaFreeAsync themselves are implemented) */
UNSUPPORTED(cudaDeviceGetDefaultMemPool)
UNSUPPORTED(cudaDeviceGetGraphMemAttribute)
UNSUPPORTED(cudaDeviceSetGraphMemAttribute)
UNSUPPORTED(cudaMemPoolGetAttribute)
UNSUPPORTED(cudaMemPoolSetAccess)
UNSUPPORTED(cudaMemPoolSetAttribute)
UNSUPPORTED(cudaMemPoolTrimTo)
