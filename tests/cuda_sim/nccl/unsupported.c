/* NCCL functions that libtorch refers to and the fake does not implement; each names itself and
 * returns an error. */
#include <stdio.h>

#define NCCL_INVALID_USAGE 5

#define UNSUPPORTED(name)                                             \
  __attribute__((visibility("default"))) int name(void) {             \
    fprintf(stderr, "cuda_sim nccl: " #name " is not implemented\n"); \
    return NCCL_INVALID_USAGE;                                        \
  }

UNSUPPORTED(ncclCommGetUniqueId)
UNSUPPORTED(ncclCommGrow)
UNSUPPORTED(ncclCommInitAll)
UNSUPPORTED(ncclCommMemStats)
UNSUPPORTED(ncclCommResume)
UNSUPPORTED(ncclCommRevoke)
UNSUPPORTED(ncclCommShrink)
UNSUPPORTED(ncclCommSuspend)
UNSUPPORTED(ncclDevCommCreate)
UNSUPPORTED(ncclDevCommDestroy)
UNSUPPORTED(ncclGetLsaMultimemDevicePointer)
UNSUPPORTED(ncclGetPeerDevicePointer)
UNSUPPORTED(ncclGroupSimulateEnd)
UNSUPPORTED(ncclPutSignal)
UNSUPPORTED(ncclSignal)
UNSUPPORTED(ncclWaitSignal)
