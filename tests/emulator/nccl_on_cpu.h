/* NCCL on a CPU, for tests: the calls that hpml_cuda.cuh makes, between threads of one process whose contexts are on
   the emulation's devices. Here are its types and names as nccl.h has them; nccl_on_cpu.cc has the rest. A communicator
   is non-blocking: a call is in progress until all ranks have made it. Sums are taken in the order of the ranks. */
#ifndef NCCL_ON_CPU_H
#define NCCL_ON_CPU_H

#ifdef __cplusplus
#include <climits>

extern "C" {
typedef struct ncclComm *ncclComm_t;
struct ncclUniqueId { char internal[128]; };
enum ncclResult_t { ncclSuccess, ncclUnhandledCudaError, ncclSystemError, ncclInternalError, ncclInvalidArgument,
                    ncclInvalidUsage, ncclRemoteError, ncclInProgress };
enum ncclRedOp_t { ncclSum, ncclProd, ncclMax, ncclMin, ncclAvg };
enum ncclDataType_t { ncclInt8 = 0, ncclUint8 = 1, ncclFloat32 = 7 };
struct ncclConfig_t { size_t size; int blocking; };
#define NCCL_CONFIG_INITIALIZER { sizeof(ncclConfig_t), INT_MIN }

ncclResult_t ncclGetVersion(int *version);
ncclResult_t ncclGetUniqueId(ncclUniqueId *id);
ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int ranks, ncclUniqueId id, int rank, ncclConfig_t *config);
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error);
ncclResult_t ncclCommAbort(ncclComm_t comm);
ncclResult_t ncclCommDestroy(ncclComm_t comm);
ncclResult_t ncclAllReduce(const void *send, void *recv, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclReduce(const void *send, void *recv, size_t count, ncclDataType_t type, ncclRedOp_t op, int root,
                        ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclBroadcast(const void *send, void *recv, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                           cudaStream_t stream);
ncclResult_t ncclSend(const void *data, size_t count, ncclDataType_t type, int peer,
                      ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclRecv(void *data, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclGroupStart(void);
ncclResult_t ncclGroupEnd(void);
const char *ncclGetErrorString(ncclResult_t result);
const char *ncclGetLastError(ncclComm_t comm);
}
#endif

/* ---- what tests ask for ------------------------------------------------------------------------------------------ */
#ifdef __cplusplus
extern "C" {
#endif
/* Everything as at the start, on so many devices; lazy as cuda_on_cpu_lazy. */
void nccl_on_cpu_reset(int devices, unsigned lazy);
void nccl_on_cpu_never_ready(void);           /* communicators stay in the making */
void nccl_on_cpu_stall_after(int calls);      /* a rank's kernels of the calls after so many run until it is aborted */
void nccl_on_cpu_error_after(int calls);      /* from then on every communicator is broken, with ncclRemoteError */
typedef struct nccl_on_cpu_counts {
    int made, live, aborted; /* communicators */
    int groups;              /* that had work in them, of all ranks */
    int misused;             /* destroyed with something under way, ranks that do not agree, host memory */
} nccl_on_cpu_counts;
nccl_on_cpu_counts nccl_on_cpu_count(void);
#ifdef __cplusplus
}
#endif

#endif
