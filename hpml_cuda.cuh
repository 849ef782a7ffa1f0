// hpml_cuda.cuh - v0.1.0 - hpml on NVIDIA GPUs: a backend for hpml.h - MIT licence (end of file)
//
// Do this in exactly one file that nvcc compiles, before you include it:
//     #define HPML_IMPLEMENTATION          (or HPML_CUDA_IMPLEMENTATION, where another file has hpml.h's body)
//     #include "hpml_cuda.cuh"
// Elsewhere, in C files as well, include it without the define. Build: nvcc -O2 program.cu -lcublasLt -lcudnn
//
// QUICK EXAMPLE: any program for hpml.h, with its context on the GPU
//
//     #define HPML_IMPLEMENTATION
//     #include "hpml_cuda.cuh"
//
//     int main(void)
//     {
//         hpml_cuda_desc gpu  = {};
//         hpml_ctx_desc  desc = {};
//         gpu.precision       = HPML_CUDA_BF16;
//         desc.backend        = hpml_backend_cuda();
//         desc.backend_desc   = &gpu;
//         hpml_ctx *ctx       = hpml_ctx_create(&desc);
//         printf("%s\n", hpml_ctx_error(ctx));
//         hpml_ctx_free(ctx);
//         return 0;
//     }
//
// hpml_cuda.cuh DOES NOT
//     - need more than the CUDA runtime: with HPML_CUDA_NO_CUBLAS and HPML_CUDA_NO_CUDNN its own kernels do everything
//     - take GPU memory behind your back: one arena for each graph, taken when the graph takes its memory, and a
//       workspace for the libraries (hpml_cuda_desc.workspace)
//     - use cuDNN's attention: its own runs on tensor cores in halves and adds in a fixed order
//     - spread over several GPUs by itself: a context is one GPU; ranks do the rest (hpml_comm.h)
//
// OPTIONS, defined before the include that has the implementation
//     HPML_CUDA_IMPLEMENTATION     only this header's body: split builds, where another file has hpml.h's
//     HPML_CUDA_NO_CUBLAS          matrix products by this header's kernels
//     HPML_CUDA_NO_CUDNN           convolutions by this header's kernels
//     HPML_USE_NCCL                sums over several GPUs (>>api-nccl); needs nccl.h, and NCCL when it is used
//
// THREADS: as in hpml.h, a context belongs to one thread at a time. All its work runs on one stream, in order.
// SAME BITS: the same program on the same kind of GPU gives the same bits. They are not the CPU's: sums are taken in
// another order.
//
// INDEX (grep '^// >>' hpml_cuda.cuh)
//     api-cuda   devices and the backend
//     api-nccl   ranks on several GPUs
//     gpu-language   what kernels are written in
//     gpu-device   the device: errors, launches, memory
//     gpu-copy   to and from the host, through pinned memory
//     gpu-pass   whole passes, recorded once and replayed
//     gpu-elementwise   add, sub, mul, div with broadcasting; scale; activations
//     gpu-sums   sums, sums of squares
//     gpu-shape   reshape, permute, slice, concat
//     gpu-norm   softmax, layernorm, rmsnorm
//     gpu-batchnorm   batch normalization
//     gpu-pool   max and average pooling
//     gpu-random   Philox, dropout, embedding
//     gpu-operand   operands of products: where their elements lie
//     gpu-tiles   products by tiles: dense halves on tensor cores, and anything
//     gpu-product   matrix products: our kernels, half copies of parameters
//     gpu-cublas   matrix products by cuBLASLt
//     gpu-matmul   matmul and linear layers
//     gpu-conv   convolution: our kernels
//     gpu-cudnn   convolution by cuDNN
//     gpu-attention   multi-head attention, never storing the (T, T) matrix
//     gpu-attention-back   attention's gradient
//     gpu-lstm   long short-term memory
//     gpu-loss   losses
//     gpu-update   optimizers: one launch for all parameters
//     gpu-codec   gradients packed on the device
//     gpu-nccl   NCCL: loading it, meeting, deadlines
//     gpu-link   how arrays of several GPUs are added up and move
//     gpu-backend   opening and closing; the table
#ifndef HPML_CUDA_CUH_INCLUDED
#define HPML_CUDA_CUH_INCLUDED

#include "hpml.h"

#if HPML_VERSION != 100
#error "hpml.h and hpml_cuda.cuh are of different versions"
#endif

#ifdef __cplusplus
extern "C" {
#endif

// ---------------------------------------------------------------------------------------------------------------------
// >>api-cuda   devices and the backend
// ---------------------------------------------------------------------------------------------------------------------

/* What is computed and stored. Parameters, their gradients and the optimizer's state are f32 in any case, and so is
   every sum. */
typedef enum hpml_cuda_precision {
    HPML_CUDA_F32  = 0, /* as on the CPU */
    HPML_CUDA_TF32 = 1, /* matrix products round their operands to 11 bits (Ampere and later) */
    HPML_CUDA_BF16 = 2, /* activations and copies of the weights are bf16, products on tensor cores */
    HPML_CUDA_F16  = 3  /* the same in f16: 8 times finer, but small gradients vanish: hpml_trainer_desc.loss_scale */
} hpml_cuda_precision;

typedef struct hpml_cuda_desc {
    uint32_t            _begin;
    int32_t             device;       /* as CUDA counts them; CUDA_VISIBLE_DEVICES applies */
    hpml_cuda_precision precision;
    bool                no_record;    /* launch every kernel by itself, no CUDA graphs: for debuggers and profilers */
    bool                own_kernels;  /* this header's kernels even where cuBLASLt or cuDNN could do it */
    size_t              workspace;    /* bytes for cuBLASLt and cuDNN; 0: 64 MiB, which grow while a graph first runs,
                                         where cuDNN's best algorithm asks for more, to 1/16 of the card at most */
    uint32_t            _end;
} hpml_cuda_desc;

/* For hpml_ctx_desc.backend; its backend_desc is a hpml_cuda_desc, NULL: all defaults. A context that could not open
   its device holds an error that says why (no driver, no such device, built for another architecture). Tensors' `data`
   and `grad` are then addresses on the device: use hpml_tensor_set and hpml_tensor_get. */
HPML_API const hpml_backend *hpml_backend_cuda(void);

typedef struct hpml_cuda_info {
    char   name[256];
    int    major, minor;       /* compute capability */
    int    multiprocessors;
    size_t memory, memory_free; /* bytes */
} hpml_cuda_info;
HPML_API int         hpml_cuda_device_count(void); /* 0: no device, or no driver */
HPML_API hpml_status hpml_cuda_device_info(int device, hpml_cuda_info *out);

HPML_API void *hpml_cuda_stream(const hpml_ctx *ctx); /* the cudaStream_t that ops run on; NULL: not a CUDA context */

/* One line that says what has run where since the context was made, to judge a speed by:
   - matrix products by cuBLASLt, with the epilogues that they took along (bias, relu, gelu, gelu', bias sums), the
     numbers of the algorithms, and the epilogues that cuBLASLt refused, so that another kernel follows; products by
     this header's own kernels, and how many of these cuBLASLt had refused;
   - the same for convolutions and cuDNN, with the algorithms of each pass;
   - the workspace, and the largest that an algorithm asks for;
   - passes that ran op by op, were recorded, replayed (what they repeat is counted each time), and given up because
     recording failed, so that they run op by op; a pass under a profile or a trace is not counted;
   - how often the host has waited for the device.
   Returns the length of the text as snprintf does; 0 and "" for a context that is not on a GPU. */
HPML_API int hpml_cuda_text(const hpml_ctx *ctx, char *buffer, size_t size);

// ---------------------------------------------------------------------------------------------------------------------
// >>api-nccl   ranks on several GPUs
// ---------------------------------------------------------------------------------------------------------------------

/* Arrays that live on GPUs are added up by NCCL, over NVLink or the network, without passing through host memory. The
   body has this with HPML_USE_NCCL; the library itself is looked for when the first communicator is made, so a program
   starts without it. Every rank has a context on a GPU of its own: hpml_cuda_desc.device is the rank modulo
   hpml_cuda_device_count() (which may be 0); hpml_launch_desc.place sets it. With hpml_comm.h, included before this
   header, one call does it all:

       hpml_nccl_attach(comm, NULL);    then hpml_distribute(trainer, comm, ...) as ever

   No wait lasts longer than the timeout: NCCL is then given up (ncclCommAbort) and the context has an error that names
   rank, operation and what NCCL says. */
typedef struct hpml_nccl hpml_nccl; /* opaque; hangs on a context */

typedef struct hpml_nccl_desc {
    uint32_t    _begin;
    int32_t     rank, ranks; /* hpml_nccl_create: required; attach: the communicator's */
    const char *file;        /* hpml_nccl_create: ranks meet by files named this and .rank; old ones do no harm */
    const char *library;     /* NULL: the NCCL that the program was linked with, else libnccl.so.2 */
    double      timeout;     /* seconds; 0: 60 */
    bool        in_nodes;    /* attach: NCCL inside each node only, as many ranks on each. Between nodes a share of each
                                rank travels by the communicator's messages, packed by the codec if there is one. With
                                two GPUs a node the bits are HPML_HIERARCHICAL's; more are added in NCCL's order */
    /* Private, what attach meets by: gather: all is (ranks, bytes), mine is filled in; closed: it ends. */
    hpml_status (*gather)(void *user, void *all, size_t bytes);
    void (*closed)(void *owner);
    void       *user, *owner;
    int32_t     called; /* this rank in errors */
    uint32_t    _end;
} hpml_nccl_desc;

/* Collective. NULL on failure, the error on the context: no NCCL, two ranks on one GPU, a rank that does not come. */
HPML_API hpml_nccl  *hpml_nccl_create(hpml_ctx *ctx, const hpml_nccl_desc *desc);
HPML_API void        hpml_nccl_free(hpml_nccl *n); /* optional, before the context goes */
/* Sum or mean over all ranks of an array on the device, in place, behind the device's work so far and before what
   follows; the host does not wait. */
HPML_API hpml_status hpml_nccl_allreduce(hpml_nccl *n, float *x, int64_t count, bool mean);

/* The functions of a hpml_device_link (hpml_comm.h), for nccl = what hpml_nccl_create gave. */
#define HPMLG_LINK(X)                                                                                                  \
    X(begin, (void *)) X(allreduce, (void *, float *, int64_t, bool))                                                  \
    X(move, (void *, const void *, const size_t *, bool, void *, const size_t *))                                      \
    X(end, (void *)) X(wait, (void *)) X(check, (void *)) X(scale, (void *, float *, int64_t, float, float))           \
    X(share, (void *, float *, const int64_t *, float *, bool)) X(landed, (void *, float *))
#define HPMLG_X(name, arguments) HPML_API hpml_status hpml_nccl_link_##name arguments;
HPMLG_LINK(HPMLG_X)
#undef HPMLG_X
HPML_API void   hpml_nccl_link_free(void *nccl);
HPML_API float *hpml_nccl_link_stage(void *nccl, int64_t n);

#ifdef HPML_COMM_H_INCLUDED
static inline hpml_status hpml_nccl_meet(void *comm, void *all, size_t bytes)
{
    hpml_comm *c = (hpml_comm *)comm;
    return hpml_allgather(c, all, (int64_t)bytes * hpml_comm_size(c), HPML_ELEMENT_BYTE);
}

static inline void hpml_nccl_closed(void *comm) { hpml_comm_set_link((hpml_comm *)comm, NULL); }

/* Collective: this communicator's ranks have NCCL between their GPUs from now on. desc NULL: all defaults. It goes with
   the communicator. Without it GPUs' gradients pass through host memory. */
static inline hpml_status hpml_nccl_attach(hpml_comm *c, const hpml_nccl_desc *desc)
{
    static hpml_nccl_desc defaults;
    hpml_nccl_desc        d = desc ? *desc : defaults;
    hpml_comm            *in = d.in_nodes ? hpml_comm_split_node(c) : c;
    hpml_device_link link = { NULL, hpml_nccl_link_begin, hpml_nccl_link_allreduce, hpml_nccl_link_move,
                              hpml_nccl_link_end, hpml_nccl_link_wait, hpml_nccl_link_check, hpml_nccl_link_scale,
                              hpml_nccl_link_free, NULL, hpml_nccl_link_stage, hpml_nccl_link_share,
                              hpml_nccl_link_landed };
    d.rank = hpml_comm_rank(in), d.ranks = hpml_comm_size(in);
    if (d.ranks < hpml_comm_size(c)) link.across = hpml_comm_split(c, d.rank, hpml_comm_rank(c));
    if (link.across && d.ranks * hpml_comm_size(link.across) != hpml_comm_size(c))
        hpml_ctx_fail(hpml_comm_ctx(c), HPML_ERR_UNSUPPORTED, "nccl in_nodes: this node has %d of %d ranks, others "
                      "more or fewer; start as many on each", (int)d.ranks, hpml_comm_size(c));
    d.gather = hpml_nccl_meet, d.closed = hpml_nccl_closed, d.user = in, d.owner = c, d.called = hpml_comm_rank(c);
    link.user = hpml_nccl_create(hpml_comm_ctx(c), &d);
    return link.user ? hpml_comm_set_link(c, &link) : hpml_ctx_status(hpml_comm_ctx(c));
}
#endif

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* HPML_CUDA_CUH_INCLUDED: stop here if you only want the API */

#if defined(HPML_CUDA_IMPLEMENTATION) && !defined(__CUDACC__) && !defined(HPML_CUDA_ON_CPU)
#error "hpml_cuda.cuh: its body is for nvcc; define HPML_CUDA_IMPLEMENTATION in one .cu file"
#endif
#if (defined(HPML_IMPLEMENTATION) || defined(HPML_CUDA_IMPLEMENTATION)) && \
    (defined(__CUDACC__) || defined(HPML_CUDA_ON_CPU)) && !defined(HPML_CUDA_BODY)
#define HPML_CUDA_BODY

// ---------------------------------------------------------------------------------------------------------------------
// >>gpu-language   what kernels are written in
// ---------------------------------------------------------------------------------------------------------------------

/* Kernels are plain CUDA C++. What differs between nvcc and the emulation in tests/emulator/cuda_on_cpu.h (which runs
   the same text on a CPU, thread by thread) stands here: how a kernel is launched, its dynamic shared memory, the
   tensor-core instructions and asynchronous copies.

   Arrays may be f32, bf16 or f16; a kernel takes hpmlg_array and reads and writes f32 through hpmlg_get and hpmlg_put.
   The branch on the type is the same for all threads and costs nothing beside the memory access. Fast kernels move 8
   elements at a time, 16 or 32 bytes. Sums are taken in an order that depends on the shape alone: no float atomics. */

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <type_traits>

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#error "hpml_cuda.cuh needs compute capability 8.0 (Ampere) or later: nvcc -arch=native, or -arch=sm_80"
#endif
#ifdef HPML_USE_NCCL
#include <dlfcn.h>
#include <time.h>
#include <unistd.h>
#endif
#ifndef HPML_CUDA_ON_CPU
#include <cuda_runtime.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#ifndef HPML_CUDA_NO_CUBLAS
#include <cublasLt.h>
#endif
#ifndef HPML_CUDA_NO_CUDNN
#include <cudnn.h>
#endif
#ifdef HPML_USE_NCCL
#include <nccl.h>
#endif

#define HPMLG_LAUNCH(kernel, grid, block, shared, stream, ...) kernel<<<grid, block, shared, stream>>>(__VA_ARGS__)
/* Dynamic shared memory of a kernel. */
#define HPMLG_SHARED(type, name)                                                                                       \
    extern __shared__ __align__(16) unsigned char hpmlg_dynamic[];                                                     \
    type *name = (type *)hpmlg_dynamic

/* d (16, 8) += a (16, 16) b (16, 8) by one warp, in the registers as PTX has them: with g = lane / 4, t = lane % 4,
   a[0], a[1], a[2], a[3] hold rows g, g + 8, g, g + 8 at columns 2t, 2t, 2t + 8, 2t + 8 (two halves each), b[0], b[1]
   rows 2t and 2t + 8 (two each, downward) of column g, d rows g, g, g + 8, g + 8 at columns 2t, 2t + 1, 2t, 2t + 1. */
static __device__ __forceinline__ void hpmlg_mma_16816(float d[4], const unsigned a[4], const unsigned b[2], bool f16)
{
#define HPMLG_MMA(type)                                                                                                \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, " \
                 "{%0,%1,%2,%3};" : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                     \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
    if (f16) HPMLG_MMA("f16");
    else HPMLG_MMA("bf16");
}

/* d (16, 8) += a (16, 8) b (8, 8) in tf32: a[0..3] rows g, g + 8, g, g + 8 at columns t, t, t + 4, t + 4; b[0], b[1]
   rows t, t + 4 of column g. The operands are f32 bits; the low 13 do not count. */
static __device__ __forceinline__ void hpmlg_mma_1688_tf32(float d[4], const unsigned a[4], const unsigned b[2])
{
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                 "{%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/* Four 8 x 8 matrices of halves from shared memory; lane l names row l % 8 of matrix l / 8 (16 bytes, aligned). Lane l
   gets of matrix i, in r[i], row l / 4, columns 2 (l % 4) and the next; _trans: of its transpose. */
#define HPMLG_LDMATRIX(name, turned)                                                                                   \
    static __device__ __forceinline__ void name(unsigned r[4], const void *row)                                        \
    {                                                                                                                  \
        asm volatile("ldmatrix.sync.aligned.m8n8.x4" turned ".shared.b16 {%0,%1,%2,%3}, [%4];"                         \
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])                                                  \
                     : "r"((unsigned)__cvta_generic_to_shared(row)) : "memory");                                       \
    }
HPMLG_LDMATRIX(hpmlg_ldmatrix_x4, "")
HPMLG_LDMATRIX(hpmlg_ldmatrix_x4_trans, ".trans")

/* 16 bytes from global to shared memory, beside the computation; not valid: zeros, and `global` is not read. Copies
   are committed in groups; wait(n) returns when all but the last n groups of this thread have arrived. */
static __device__ __forceinline__ void hpmlg_copy_async16(void *shared, const void *global, bool valid)
{
    unsigned at = (unsigned)__cvta_generic_to_shared(shared), bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(global), "r"(bytes) : "memory");
}

static __device__ __forceinline__ void hpmlg_copy_commit(void) { asm volatile("cp.async.commit_group;" ::: "memory"); }
#define hpmlg_copy_wait(n) asm volatile("cp.async.wait_group %0;" ::"n"(n) : "memory")

#define HPMLG_UNROLL _Pragma("unroll")
#define HPMLG_ROLLED _Pragma("unroll 1")
#else
#define HPMLG_UNROLL
#define HPMLG_ROLLED
#endif

#define HPMLG_FN static __attribute__((unused))
#define HPMLG_DEVICE static __device__ __forceinline__
#define HPMLG_WARP 32
#define HPMLG_ALL 0xffffffffu

/* This thread of a launch, and how many there are. n things are dealt out to them one by one, eight by eight, or one to
   a warp. */
HPMLG_DEVICE int64_t hpmlg_me(void) { return (int64_t)blockIdx.x * blockDim.x + threadIdx.x; }
HPMLG_DEVICE int64_t hpmlg_threads(void) { return (int64_t)gridDim.x * blockDim.x; }
#define HPMLG_EACH(i, n)   for (int64_t i##_step = hpmlg_threads(), i = hpmlg_me(); i < (n); i += i##_step)
#define HPMLG_EIGHTS(i, n) for (int64_t i = 8 * hpmlg_me(); i < (n); i += 8 * hpmlg_threads())
#define HPMLG_WARPS(i, n)  for (int64_t i = hpmlg_me() / HPMLG_WARP; i < (n); i += hpmlg_threads() / HPMLG_WARP)

typedef struct hpmlg_array {
    void   *p;
    int64_t type; /* HPML_DTYPE_F32, _BF16 or _F16; as wide as a pointer: no gap */
} hpmlg_array;

HPMLG_DEVICE float hpmlg_get(hpmlg_array a, int64_t i)
{
    if (a.type == HPML_DTYPE_F32) return ((const float *)a.p)[i];
    if (a.type == HPML_DTYPE_BF16) return __bfloat162float(((const __nv_bfloat16 *)a.p)[i]);
    return __half2float(((const __half *)a.p)[i]);
}

HPMLG_DEVICE void hpmlg_put(hpmlg_array a, int64_t i, float v)
{
    if (a.type == HPML_DTYPE_F32) ((float *)a.p)[i] = v;
    else if (a.type == HPML_DTYPE_BF16) ((__nv_bfloat16 *)a.p)[i] = __float2bfloat16_rn(v);
    else ((__half *)a.p)[i] = __float2half_rn(v);
}

/* Two halves of one 32-bit word, the first in the low bits. */
HPMLG_DEVICE float2 hpmlg_widen(unsigned w, int type)
{
    unsigned short low = (unsigned short)w, high = (unsigned short)(w >> 16);
    if (type == HPML_DTYPE_BF16) return make_float2(__uint_as_float(w << 16), __uint_as_float(w & 0xffff0000u));
    return make_float2(__half2float(__ushort_as_half(low)), __half2float(__ushort_as_half(high)));
}

HPMLG_DEVICE unsigned hpmlg_narrow(float a, float b, int type)
{
    __nv_bfloat162 x = __floats2bfloat162_rn(a, b); /* one instruction for both */
    __half2        y = __floats2half2_rn(a, b);
    unsigned       w;
    if (type == HPML_DTYPE_BF16) memcpy(&w, &x, sizeof w);
    else memcpy(&w, &y, sizeof w);
    return w;
}

/* v as the type keeps it. */
HPMLG_DEVICE float hpmlg_rounded(float v, int64_t type)
{
    return type == HPML_DTYPE_F32 ? v : hpmlg_widen(hpmlg_narrow(v, v, (int)type), (int)type).x;
}

typedef struct hpmlg_eight { float v[8]; } hpmlg_eight;

/* Elements 8 i to 8 i + 7; the array begins at a multiple of 16 bytes. */
HPMLG_DEVICE hpmlg_eight hpmlg_get8(hpmlg_array a, int64_t i)
{
    hpmlg_eight e;
    if (a.type == HPML_DTYPE_F32) {
        float4 x = ((const float4 *)a.p)[2 * i], y = ((const float4 *)a.p)[2 * i + 1];
        e.v[0] = x.x, e.v[1] = x.y, e.v[2] = x.z, e.v[3] = x.w;
        e.v[4] = y.x, e.v[5] = y.y, e.v[6] = y.z, e.v[7] = y.w;
    } else {
        uint4    w    = ((const uint4 *)a.p)[i];
        unsigned u[4] = { w.x, w.y, w.z, w.w };
        for (int j = 0; j < 4; j++) {
            float2 f = hpmlg_widen(u[j], a.type);
            e.v[2 * j] = f.x, e.v[2 * j + 1] = f.y;
        }
    }
    return e;
}

HPMLG_DEVICE void hpmlg_put8(hpmlg_array a, int64_t i, hpmlg_eight e)
{
    if (a.type == HPML_DTYPE_F32) {
        ((float4 *)a.p)[2 * i]     = make_float4(e.v[0], e.v[1], e.v[2], e.v[3]);
        ((float4 *)a.p)[2 * i + 1] = make_float4(e.v[4], e.v[5], e.v[6], e.v[7]);
    } else {
        ((uint4 *)a.p)[i] = make_uint4(hpmlg_narrow(e.v[0], e.v[1], a.type), hpmlg_narrow(e.v[2], e.v[3], a.type),
                                       hpmlg_narrow(e.v[4], e.v[5], a.type), hpmlg_narrow(e.v[6], e.v[7], a.type));
    }
}

HPMLG_DEVICE float hpmlg_join(float v, float w, bool maximum) { return !maximum ? v + w : w > v || w != w ? w : v; }

/* Sum, or maximum (a NaN wins), over each group of tx threads side by side, tx a power of two; all get it. Beyond a
   warp all threads of the block take part. space: a float for each warp, shared; not touched within a warp. */
HPMLG_DEVICE float hpmlg_group(float v, float *space, int tx, bool maximum)
{
    int lane = (int)threadIdx.x % HPMLG_WARP, warp = (int)threadIdx.x / HPMLG_WARP, warps = tx / HPMLG_WARP, first;
    for (int o = (tx < HPMLG_WARP ? tx : HPMLG_WARP) / 2; o > 0; o >>= 1)
        v = hpmlg_join(v, __shfl_xor_sync(HPMLG_ALL, v, o), maximum);
    if (warps <= 1) return v;
    __syncthreads(); /* space may still be read from a call before */
    if (lane == 0) space[warp] = v;
    __syncthreads();
    v = space[first = warp / warps * warps];
    for (int i = 1; i < warps; i++) v = hpmlg_join(v, space[first + i], maximum);
    return v;
}

// ---------------------------------------------------------------------------------------------------------------------
// >>gpu-device   the device: errors, launches, memory
// ---------------------------------------------------------------------------------------------------------------------

/* Kernels cannot fail, but data can be wrong: a token or a label out of range, a gradient that is NaN. The first kernel
   that meets one leaves a note in host memory, which is read, and becomes the context's error, when the host waits for
   the device anyway. */
typedef struct hpmlg_note {
    long long        index;
    int              value;
    int              nonfinite; /* 1: hpmlg_device.worst names the step and the parameter; else 0 */
    const hpml_node *node;      /* the op that read `value` at `index`, out of range; NULL: no op did */
} hpmlg_note;

/* Counts. products, convolutions: [0] run by a library, [1] by own kernels; _refused: those of [1] that the library had
   refused. fused: convolutions with bias and activation. epilogues: [0] fused into cuBLASLt's products, [1] refused. */
enum hpmlg_epilogue { HPMLG_BIAS, HPMLG_RELU, HPMLG_GELU, HPMLG_GELU_BACK, HPMLG_SUMS, HPMLG_EPILOGUES };
typedef struct hpmlg_ran {
    long long products[2], convolutions[2], products_refused, convolutions_refused, fused;
    long long epilogues[2][HPMLG_EPILOGUES];
} hpmlg_ran;

/* What changes from step to step while a recorded pass stays the same; kernels read it on the device. */
typedef struct hpmlg_now {
    unsigned long long step, sample, seed;
} hpmlg_now;

#define HPMLG_SLOTS      4
#ifndef HPMLG_SLOT_BYTES
#define HPMLG_SLOT_BYTES ((size_t)4 << 20)
#endif

typedef struct hpmlg_slot { /* pinned host memory of an upload in flight, and its destination on the device */
    unsigned char *host, *device;
    cudaEvent_t    landed, free;
} hpmlg_slot;

#define HPMLG_PASSES  64
#define HPMLG_SCRATCH ((size_t)1 << 20)
#define HPMLG_RESULT  ((size_t)4096)

typedef struct hpmlg_left { /* results of an op that a later op reuses; kept with a recorded pass */
    const void      *y, *labels; /* arguments of the last cross-entropy, whose hits are counted */
    const hpml_node *sloped;     /* the layer whose gradient the next layer has multiplied by act' */
} hpmlg_left;

typedef struct hpmlg_pass {
    hpml_pass       key;
    hpmlg_left      left;
    hpmlg_ran       ran;   /* counts of one replay */
    bool            tried; /* has run op by op without an error, so its ops' memory is allocated */
    bool            given_up; /* recording has failed: the pass always runs op by op */
    cudaGraphExec_t exec;  /* NULL: not recorded yet */
    uint64_t        used;  /* clock of the last use */
} hpmlg_pass;

typedef struct hpmlg_weights { /* the half copy of a parameter */
    const float *w;
    void        *half;
    int64_t      n;
    bool         fresh;
    struct hpmlg_weights *next;
} hpmlg_weights;

typedef struct hpmlg_block { /* memory of tensors; freed with the device at the latest */
    void               *p;
    struct hpmlg_block *next;
} hpmlg_block;

#define HPMLG_LOOKS 1024

typedef struct hpmlg_look { /* a timed span of work: events before and after it, and where its seconds go */
    cudaEvent_t from, to;
    const char *name;
    double     *seconds;
    int         lane;
} hpmlg_look;

typedef struct hpmlg_device {
    hpml_ctx      *ctx;
    hpmlg_block   *blocks;
    hpml_cuda_desc d;
    hpml_dtype     store;
    int            sms;            /* multiprocessors */
    cudaStream_t   stream, copies; /* ops; uploads */
    hpmlg_slot     slots[HPMLG_SLOTS];
    int            slot;           /* the one that is being filled */
    size_t         slot_used;      /* bytes of it */
    unsigned char *pinned;         /* host memory that the device sees: the slots', and: */
    hpmlg_note    *note;
    void          *result;         /* HPMLG_RESULT bytes: small downloads land there */
    int           *note_taken;     /* on the device */
    unsigned long long *worst;     /* on the device: the first non-finite gradient or parameter, see hpmlg_worst_of */
    hpmlg_now     *now, now_host;  /* on the device; what stands there */
    bool           now_known;
    hpmlg_pass     passes[HPMLG_PASSES];
    hpmlg_pass    *trying, *recording;
    bool           passing;        /* a whole forward pass is on its way */
    unsigned long long *counts;    /* on the device: hits and labels of the last cross-entropy */
    hpmlg_left     left;
    hpml_node     *planned;        /* the last node that was planned */
    hpmlg_look     looks[HPMLG_LOOKS];
    int            look_count;
    cudaEvent_t    look_zero;      /* happened at host time look_time */
    double         look_time;
    uint64_t       clock;
    hpmlg_weights *weights;
    void          *workspace;      /* workspace_bytes, d.workspace at least */
    size_t         workspace_bytes, workspace_most; /* bytes; most: the upper limit */
    size_t         workspace_asked;  /* bytes: the largest request of an algorithm in use */
    hpmlg_ran      ran, ran_before;  /* before: at the start of the current recording */
    hpmlg_left     left_before;      /* at the start of the current recording */
    long long      passes_ran[4];    /* passes run op by op, recorded, replayed, given up; see enum hpmlg_way */
    long long      waits;            /* times that the host has waited for the device */
    void          *scratch;        /* HPMLG_SCRATCH bytes for partial sums */
    void          *updates;        /* the table of an optimizer's step */
    size_t         updates_room;   /* its bytes */
    void          *blas, *dnn;     /* cuBLASLt, cuDNN, each with its plans by shape; NULL: not in use */
} hpmlg_device;

/* An error of CUDA or one of its libraries becomes the context's, with what to do where that is known. */
HPMLG_FN hpml_status hpmlg_fail(hpmlg_device *d, bool memory, const char *what, const char *error, const char *more,
                                const char *cure)
{
    return hpml_ctx_fail(d->ctx, memory ? HPML_ERR_MEMORY : HPML_ERR_CUDA, "cuda device %d: %s: %s (%s)%s",
                         (int)d->d.device, what, error, more, cure);
}

HPMLG_FN hpml_status hpmlg_check(hpmlg_device *d, cudaError_t e, const char *what)
{
    const char *cure = "";
    if (e == cudaSuccess) return HPML_OK;
    cudaGetLastError();
    if (e == cudaErrorNoKernelImageForDevice) cure = "; this program holds code for other GPUs: nvcc -arch=native";
    if (e == cudaErrorIllegalAddress) cure = "; the context is lost; compute-sanitizer names the kernel and the line";
    if (e == cudaErrorStreamCaptureUnsupported || e == cudaErrorStreamCaptureInvalidated)
        cure = "; hpml_cuda_desc.no_record does without recording";
    return hpmlg_fail(d, e == cudaErrorMemoryAllocation, what, cudaGetErrorString(e), cudaGetErrorName(e), cure);
}

/* The next of several calls, if all is well so far: success is 0 in every library. */
#define HPMLG_TRY(s, ...)                                                                                              \
    if ((int)(s) == 0) s = __VA_ARGS__

/* The context keeps the first error, and nothing is launched behind it: so ops launch one kernel after the other and
   return nothing, and only who does something else has to ask. */
HPMLG_FN bool hpmlg_well(const hpmlg_device *d) { return hpml_ctx_status(d->ctx) == HPML_OK; }

/* Launches on the device's stream. */
#define HPMLG_RUN(d, kernel, grid, block, shared, ...)                                                                 \
    (!hpmlg_well(d) ? (void)0 : (HPMLG_LAUNCH(kernel, grid, block, shared, (d)->stream, __VA_ARGS__),                  \
                                 (void)hpmlg_check(d, cudaGetLastError(), #kernel)))

/* n things dealt out to blocks of 256 threads, `each` to a block. */
#define HPMLG_DEAL(d, kernel, n, each, ...) HPMLG_RUN(d, kernel, hpmlg_blocks(d, n, each), 256, 0, __VA_ARGS__)

/* One of two forms of a kernel: for <a>, where `test` holds, or for <b>. */
#define HPMLG_RUN_EITHER(d, test, kernel, a, b, ...)                                                                   \
    ((test) ? HPMLG_RUN(d, (kernel<a>), __VA_ARGS__) : HPMLG_RUN(d, (kernel<b>), __VA_ARGS__))

/* Both passes of an op are one function, of node n on device d: this is its head. */
#define HPMLG_OP(name)                                                                                                 \
    HPMLG_FN void hpmlg_op_##name([[maybe_unused]] hpmlg_device *d, [[maybe_unused]] const hpml_run *run,              \
                                  hpml_node *n, bool back)

/* A device, that of a context: current on this thread from now on. An error that somebody else has left on this thread
   is not ours: the launches to come ask for it. */
HPMLG_FN hpmlg_device *hpmlg_current(void *device)
{
    hpmlg_device *d = (hpmlg_device *)device;
    cudaSetDevice(d->d.device);
    cudaGetLastError();
    return d;
}

HPMLG_FN hpmlg_device *hpmlg_enter(const hpml_ctx *ctx) { return hpmlg_current(hpml_ctx_device(ctx)); }

HPMLG_FN hpmlg_array hpmlg_of(void *p, hpml_dtype type)
{
    hpmlg_array a = { p, (int)type };
    return a;
}

HPMLG_FN hpmlg_array hpmlg_none(void) { return hpmlg_of(NULL, HPML_DTYPE_F32); }
HPMLG_FN hpmlg_array hpmlg_value(const hpml_tensor *t) { return hpmlg_of(t->raw, t->dtype); }
HPMLG_FN hpmlg_array hpmlg_grad(const hpml_tensor *t) { return hpmlg_of(t->raw_grad, t->dtype); }
HPMLG_FN hpmlg_array hpmlg_either(const hpml_tensor *t, bool grad) { return grad ? hpmlg_grad(t) : hpmlg_value(t); }

/* What an op of one operand turns into what: x into y, backward dy into dx. */
HPMLG_FN hpmlg_array hpmlg_reads(const hpml_node *n, bool back)
{
    return hpmlg_either(back ? n->out : n->src[0], back);
}

HPMLG_FN hpmlg_array hpmlg_writes(const hpml_node *n, bool back)
{
    return hpmlg_either(back ? n->src[0] : n->out, back);
}

HPMLG_FN bool hpmlg_adds(const hpml_node *n, bool back) { return back && n->accumulate[0]; }

/* Blocks for n things, `each` to a block, when a block may loop: enough to fill the device, not more. */
HPMLG_FN unsigned hpmlg_blocks(const hpmlg_device *d, int64_t n, int64_t each)
{
    int64_t blocks = (n + each - 1) / each, most = (int64_t)d->sms * 16;
    return (unsigned)(blocks < 1 ? 1 : blocks < most ? blocks : most);
}

HPMLG_FN void *hpmlg_alloc(void *device, size_t bytes)
{
    hpmlg_device *d = hpmlg_current(device);
    hpmlg_block  *b = (hpmlg_block *)hpml_ctx_alloc(d->ctx, sizeof *b, NULL);
    if (!b) return NULL;
    cudaError_t e = cudaMalloc(&b->p, bytes);
    if (e != cudaSuccess) {
        cudaGetLastError();
        if (e != cudaErrorMemoryAllocation) hpmlg_check(d, e, "cudaMalloc"); /* the caller tells that, with the size */
        hpml_ctx_release(d->ctx, b);
        return NULL;
    }
    b->next   = d->blocks;
    d->blocks = b;
    cudaMemsetAsync(b->p, 0, bytes, d->stream);
    return b->p;
}

/* The same, for the device's own use. */
HPMLG_FN void *hpmlg_own(hpmlg_device *d, size_t bytes, const char *what)
{
    void *p = hpmlg_alloc(d, bytes);
    if (!p) hpmlg_check(d, cudaErrorMemoryAllocation, what);
    return p;
}

HPMLG_FN void hpmlg_free(void *device, void *p, size_t)
{
    hpmlg_device *d = hpmlg_current(device);
    hpmlg_block **at, *b;
    for (at = &d->blocks; *at && (*at)->p != p; at = &(*at)->next) {}
    b = *at;
    if (!b) return;
    *at = b->next;
    cudaStreamSynchronize(d->stream);
    d->waits++;
    cudaFree(b->p);
    hpml_ctx_release(d->ctx, b);
}

HPMLG_FN hpml_dtype hpmlg_store(void *device) { return ((hpmlg_device *)device)->store; }

HPML_API int hpml_cuda_device_count(void)
{
    int count = 0;
    if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
    cudaGetLastError();
    return 0;
}

HPML_API hpml_status hpml_cuda_device_info(int device, hpml_cuda_info *out)
{
    cudaDeviceProp p;
    int            before = 0;
    if (!out || device < 0 || device >= hpml_cuda_device_count()) return HPML_ERR_ARGUMENT;
    memset(out, 0, sizeof *out);
    if (cudaGetDeviceProperties(&p, device) != cudaSuccess) return HPML_ERR_CUDA;
    snprintf(out->name, sizeof out->name, "%s", p.name);
    out->major = p.major, out->minor = p.minor, out->multiprocessors = p.multiProcessorCount;
    cudaGetDevice(&before);
    cudaSetDevice(device);
    cudaMemGetInfo(&out->memory_free, &out->memory);
    cudaSetDevice(before);
    return HPML_OK;
}

HPML_API void *hpml_cuda_stream(const hpml_ctx *ctx)
{
    if (!ctx || hpml_ctx_backend(ctx) != hpml_backend_cuda() || !hpml_ctx_device(ctx)) return NULL;
    return (void *)((hpmlg_device *)hpml_ctx_device(ctx))->stream;
}

// ---------------------------------------------------------------------------------------------------------------------
// >>gpu-copy   to and from the host, through pinned memory
// ---------------------------------------------------------------------------------------------------------------------

/* Uploads do not wait for the device: the bytes are copied into pinned memory at once, and the caller's array is free
   again. Large ones travel on a stream of their own and so beside the step before; small ones follow the ops. The
   pinned memory is a ring of slots; the host waits only when it is a whole ring ahead. */

#define HPMLG_SMALL ((size_t)64 << 10)

HPMLG_FN hpml_status hpmlg_upload(hpmlg_device *d, void *dst, const void *host, size_t bytes)
{
    cudaError_t e = cudaSuccess;
    if (d->slot_used + bytes > HPMLG_SLOT_BYTES) {
        e       = cudaEventRecord(d->slots[d->slot].free, d->stream);
        d->slot = (d->slot + 1) % HPMLG_SLOTS, d->slot_used = 0;
        HPMLG_TRY(e, cudaEventSynchronize(d->slots[d->slot].free));
        d->waits++;
        if (e != cudaSuccess) return hpmlg_check(d, e, "waiting for uploads");
    }
    hpmlg_slot *s  = &d->slots[d->slot];
    size_t      at = d->slot_used;
    d->slot_used += (bytes + 255) / 256 * 256;
    memcpy(s->host + at, host, bytes);
    if (bytes <= HPMLG_SMALL) {
        e = cudaMemcpyAsync(dst, s->host + at, bytes, cudaMemcpyHostToDevice, d->stream);
    } else {
        e = cudaMemcpyAsync(s->device + at, s->host + at, bytes, cudaMemcpyHostToDevice, d->copies);
        HPMLG_TRY(e, cudaEventRecord(s->landed, d->copies));
        HPMLG_TRY(e, cudaStreamWaitEvent(d->stream, s->landed, 0));
        HPMLG_TRY(e, cudaMemcpyAsync(dst, s->device + at, bytes, cudaMemcpyDeviceToDevice, d->stream));
    }
    return hpmlg_check(d, e, "upload");
}

/* Half copies of parameters that this memory holds are old now. */
HPMLG_FN void hpmlg_weights_touch(hpmlg_device *d, const void *dst, size_t bytes)
{
    const char *from = (const char *)dst, *to = from + bytes;
    for (hpmlg_weights *w = d->weights; w; w = w->next)
        if ((const char *)w->w < to && from < (const char *)(w->w + w->n)) w->fresh = false;
}

HPMLG_FN hpml_status hpmlg_write(void *device, void *dst, const void *host, size_t bytes)
{
    hpmlg_device *d      = hpmlg_current(device);
    hpml_status   status = HPML_OK;
    hpmlg_weights_touch(d, dst, bytes);
    for (size_t i = 0; i < bytes && status == HPML_OK; i += HPMLG_SLOT_BYTES) {
        size_t n = bytes - i < HPMLG_SLOT_BYTES ? bytes - i : HPMLG_SLOT_BYTES;
        status   = hpmlg_upload(d, (char *)dst + i, (const char *)host + i, n);
    }
    return status;
}

HPMLG_FN hpml_status hpmlg_zero(void *device, void *dst, size_t bytes)
{
    hpmlg_device *d = hpmlg_current(device);
    hpmlg_weights_touch(d, dst, bytes);
    return hpmlg_check(d, cudaMemsetAsync(dst, 0, bytes, d->stream), "zeroing");
}

/* Timing what somebody looks at needs no waiting: events go into the stream before and behind it, and tell when the
   host has waited for the stream anyway. The two clocks are compared anew each time, and again where the host was kept
   from its core meanwhile: half of the time between is how far the comparison may be off. */
HPMLG_FN void hpmlg_looks_tell(hpmlg_device *d)
{
    int   waiting = 0;
    float from, to;
    for (int i = 0; i < d->look_count; i++) {
        hpmlg_look  l = d->looks[i];
        cudaError_t e = cudaEventElapsedTime(&from, d->look_zero, l.from);
        if (e == cudaSuccess) e = cudaEventElapsedTime(&to, d->look_zero, l.to);
        if (e == cudaSuccess) {
            hpml_trace_span(d->ctx, l.lane, l.name, d->look_time + 1e-3 * from, d->look_time + 1e-3 * to);
            if (l.seconds) *l.seconds += 1e-3 * (to - from);
        } else d->looks[i] = d->looks[waiting], d->looks[waiting++] = l; /* on another stream, and not over */
    }
    cudaGetLastError();
    if ((d->look_count = waiting)) return;
    if (!d->look_zero) cudaEventCreate(&d->look_zero);
    double before = 0, after = 1;
    for (int tries = 0; tries < 10 && after - before > 100e-6; tries++) {
        before = hpml_now();
        cudaEventRecord(d->look_zero, d->stream);
        cudaEventSynchronize(d->look_zero);
        d->waits++;
        after = hpml_now();
    }
    d->look_time = (before + after) / 2;
}

/* The next look begins here, or ends and has this name. */
HPMLG_FN void hpmlg_look_mark(hpmlg_device *d, cudaStream_t stream, const char *name, double *seconds, int lane)
{
    hpmlg_look *l = &d->looks[d->look_count];
    if (!name) {
        if (d->look_count == HPMLG_LOOKS - 1) cudaStreamSynchronize(d->stream);
        if (d->look_count == HPMLG_LOOKS - 1 || !d->look_zero) hpmlg_looks_tell(d), l = &d->looks[d->look_count];
        if (!l->from) cudaEventCreate(&l->from), cudaEventCreate(&l->to);
        cudaEventRecord(l->from, stream);
    } else if (l->from) {
        cudaEventRecord(l->to, stream);
        l->name = name, l->seconds = seconds, l->lane = lane;
        d->look_count += d->look_count < HPMLG_LOOKS - 1; /* the last one's place is never kept */
    }
}

HPMLG_FN void hpmlg_look_at(void *device, const char *name, double *seconds)
{
    hpmlg_device *d = hpmlg_current(device);
    hpmlg_look_mark(d, d->stream, name, seconds, HPML_LANE_GPU);
}

/* Packs a finding, something that is not finite, into a number, such that the largest of all findings is the one to
   report: of the earliest step, then of the parameter whose gradient backward computed first, then a gradient before a
   step of the optimizer. */
HPMLG_DEVICE unsigned long long hpmlg_worst_of(uint64_t step, int param, bool gradient)
{
    return (unsigned long long)(0xffffffffu - (unsigned)step) << 32 | (unsigned)(2 * (param + 1) + (gradient ? 1 : 0));
}

/* Reports the finding on the device as an error and clears it. */
HPMLG_FN hpml_status hpmlg_nonfinite(hpmlg_device *d)
{
    unsigned long long worst = 0;
    cudaError_t        e = cudaMemcpyAsync(&worst, d->worst, sizeof worst, cudaMemcpyDeviceToHost, d->stream);
    HPMLG_TRY(e, cudaMemsetAsync(d->worst, 0, sizeof *d->worst, d->stream));
    HPMLG_TRY(e, cudaStreamSynchronize(d->stream));
    if (e != cudaSuccess) return hpmlg_check(d, e, "download of non-finite findings");
    const hpml_tensor *p = hpml_param_at(d->ctx, (int)(worst & 0xffffffffu) / 2 - 1);
    return hpml_ctx_fail(d->ctx, HPML_ERR_NONFINITE, "step %llu: the first NaN or infinity is in %s \"%s\"; look at "
                         "the data, lower the learning rate or set clip_norm. The rest of this step is in the "
                         "parameters: go on from a checkpoint", 0xffffffffu - (worst >> 32),
                         worst & 1 ? "the gradient of" : "the step of parameter", p ? p->name : "?");
}

/* All work is done on return; what kernels have noted becomes an error. */
HPMLG_FN hpml_status hpmlg_sync(void *device)
{
    hpmlg_device *d = hpmlg_current(device);
    hpmlg_note    n;
    hpml_status status = hpmlg_check(d, cudaStreamSynchronize(d->stream), "waiting for the device");
    d->waits++;
    if (status == HPML_OK && d->look_count > 0) hpmlg_looks_tell(d);
    if (status != HPML_OK || !(d->note->node || d->note->nonfinite)) return status;
    n = *d->note;
    memset(d->note, 0, sizeof *d->note);
    if (n.nonfinite) status = hpmlg_nonfinite(d);
    if (!n.node) return status;
    cudaMemsetAsync(d->note_taken, 0, sizeof *d->note_taken, d->stream);
    if (n.node->op == HPML_OP_EMBEDDING)
        return hpml_ctx_fail(d->ctx, HPML_ERR_LABEL, "embedding \"%s\": token %lld is %d, expected 0 to %lld",
                             n.node->out->name, n.index, n.value, (long long)n.node->src[1]->shape[0] - 1);
    return hpml_ctx_fail(d->ctx, HPML_ERR_LABEL, "cross_entropy: label %lld of the batch is %d, expected 0 to %lld (or "
                         "%d to be ignored)", n.index, n.value,
                         (long long)n.node->src[0]->shape[n.node->src[0]->ndim - 1] - 1,
                         (int)n.node->attr.cross_entropy.ignore);
}

HPMLG_FN hpml_status hpmlg_read(void *device, void *host, const void *src, size_t bytes)
{
    hpmlg_device *d     = hpmlg_current(device);
    bool          small = bytes <= HPMLG_RESULT;
    cudaError_t e = cudaMemcpyAsync(small ? (void *)d->result : host, src, bytes, cudaMemcpyDeviceToHost, d->stream);
    hpml_status status = hpmlg_check(d, e, "download");
    if (status == HPML_OK) status = hpmlg_sync(d);
    if (status == HPML_OK && small) memcpy(host, d->result, bytes);
    return status;
}

/* Leaves the note, on the device, that `value` at `index` of the labels or tokens that `node` reads is out of range. */
HPMLG_DEVICE void hpmlg_complain(hpmlg_note *note, int *taken, long long index, int value, const hpml_node *node)
{
    if (atomicCAS(taken, 0, 1) != 0) return;
    note->index = index, note->value = value;
    __threadfence_system();
    note->node = node;
}

// ---------------------------------------------------------------------------------------------------------------------
// >>gpu-pass   whole passes, recorded once and replayed
// ---------------------------------------------------------------------------------------------------------------------

/* A step launches hundreds of small kernels, always the same ones on the same memory. The second time a pass comes by
   it is recorded as a CUDA graph, and from then on it is one launch. The first time goes op by op: libraries take their
   memory then. The number of the step, which keys random masks, changes from step to step, so kernels read that number
   from memory. Whatever the reason that a pass cannot be recorded, no op of it has run: its ops are launched one by
   one, then and from then on, and an error that an op caused occurs again. */

HPMLG_FN void hpmlg_now_set(hpmlg_device *d, const hpml_run *run)
{
    hpmlg_now now;
    memset(&now, 0, sizeof now);
    now.step = run->step, now.sample = run->sample, now.seed = hpml_ctx_seed(run->ctx);
    if (d->recording || (d->now_known && memcmp(&now, &d->now_host, sizeof now) == 0)) return;
    d->now_host = now;
    d->now_known = hpmlg_upload(d, d->now, &now, sizeof now) == HPML_OK;
}

/* The entry of a cache that has this key; else the least recently used entry, dropped, cleared and given this key. */
template <class P, class K, int N> HPMLG_FN P *hpmlg_kept(hpmlg_device *d, P (&all)[N], const K &key)
{
    P *oldest = &all[0];
    for (P &p : all) {
        if (p.used && memcmp(&p.key, &key, sizeof key) == 0) return p.used = ++d->clock, &p;
        if (p.used < oldest->used) oldest = &p;
    }
    hpmlg_drop(oldest);
    memset((void *)oldest, 0, sizeof *oldest);
    oldest->key = key, oldest->used = ++d->clock;
    return oldest;
}

HPMLG_FN void hpmlg_drop(hpmlg_pass *p)
{
    if (p->exec) cudaGraphExecDestroy(p->exec);
    p->exec = NULL;
}

HPMLG_FN void hpmlg_weight_refresh(hpmlg_device *d, hpmlg_weights *w);

enum hpmlg_way { HPMLG_OP_BY_OP, HPMLG_RECORDED, HPMLG_REPLAYED, HPMLG_GIVEN_UP };

/* to += from - less, count by count; less NULL: zeros. */
HPMLG_FN void hpmlg_ran_add(hpmlg_ran *to, const hpmlg_ran *from, const hpmlg_ran *less)
{
    long long       *t = (long long *)(void *)to;
    const long long *f = (const long long *)(const void *)from, *l = (const long long *)(const void *)less;
    for (size_t i = 0; i < sizeof *to / sizeof *t; i++) t[i] += f[i] - (l ? l[i] : 0);
}

HPMLG_FN hpml_status hpmlg_replay(hpmlg_device *d, hpmlg_pass *p)
{
    d->left = p->left, d->passing = false;
    d->passes_ran[HPMLG_REPLAYED]++;
    hpmlg_ran_add(&d->ran, &p->ran, NULL);
    return hpmlg_check(d, cudaGraphLaunch(p->exec, d->stream), "launching a recorded pass");
}

HPMLG_FN hpml_status hpmlg_begin(void *, const hpml_run *run, const hpml_pass *key, bool *done)
{
    hpmlg_device *d = hpmlg_enter(run->ctx);
    hpmlg_now_set(d, run);
    for (hpmlg_weights *w = d->weights; w; w = w->next) hpmlg_weight_refresh(d, w);
    d->passing = !key->backward;
    if (!hpmlg_well(d)) return hpml_ctx_status(d->ctx);
    hpmlg_pass *p = d->d.no_record ? NULL : hpmlg_kept(d, d->passes, *key);
    *done = p && p->exec;
    if (*done) return hpmlg_replay(d, p);
    if (p && p->tried && !p->given_up) {
        d->ran_before = d->ran, d->left_before = d->left;
        p->given_up = cudaStreamBeginCapture(d->stream, cudaStreamCaptureModeThreadLocal) != cudaSuccess;
        cudaGetLastError();
        d->passes_ran[HPMLG_GIVEN_UP] += p->given_up;
        if (!p->given_up) return d->recording = p, HPML_OK;
    }
    d->trying = p;
    d->passes_ran[HPMLG_OP_BY_OP]++;
    return HPML_OK;
}

/* Gives up recording a pass, none of whose ops has run: restores the state from before and runs it op by op. */
HPMLG_FN hpml_status hpmlg_give_up(hpmlg_device *d, hpmlg_pass *p)
{
    cudaGetLastError();
    hpml_ctx_clear_error(d->ctx);
    hpmlg_drop(p);
    p->given_up = true;
    d->ran = d->ran_before, d->left = d->left_before;
    d->passes_ran[HPMLG_GIVEN_UP]++;
    for (hpmlg_weights *w = d->weights; w; w = w->next) w->fresh = false;
    return HPML_OK;
}

HPMLG_FN hpml_status hpmlg_end(void *, const hpml_run *run, hpml_status status, bool *again)
{
    hpmlg_device *d = hpmlg_enter(run->ctx);
    hpmlg_pass   *p = d->recording;
    cudaGraph_t   graph = NULL;
    d->passing = false;
    if (d->trying) d->trying->tried = status == HPML_OK, d->trying = NULL;
    if (!p) return status;
    d->recording  = NULL;
    p->left       = d->left;
    cudaError_t e = cudaStreamEndCapture(d->stream, &graph);
    if (status == HPML_OK && e == cudaSuccess) e = cudaGraphInstantiate(&p->exec, graph, 0);
    if (graph) cudaGraphDestroy(graph);
    if (status == HPML_OK && e == cudaSuccess) e = cudaGraphLaunch(p->exec, d->stream);
    *again = status != HPML_OK || e != cudaSuccess;
    if (*again) return hpmlg_give_up(d, p);
    memset(&p->ran, 0, sizeof p->ran);
    hpmlg_ran_add(&p->ran, &d->ran, &d->ran_before);
    d->passes_ran[HPMLG_RECORDED]++;
    return HPML_OK;
}

// ---------------------------------------------------------------------------------------------------------------------
// >>gpu-elementwise   add, sub, mul, div with broadcasting; scale; activations
// ---------------------------------------------------------------------------------------------------------------------

/* A thread takes 8 elements at a time, in one access where they are all wanted and the address allows. Rows of any
   length begin anywhere (50,257 columns of bf16): their ends are handled element by element, the rest is not. */
HPMLG_DEVICE bool hpmlg_wide(hpmlg_array a, int64_t at, int64_t from, int64_t to)
{
    return at >= from && at + 8 <= to && (((uintptr_t)a.p & 15) | (uintptr_t)(at & 7)) == 0;
}

/* Elements at to at + 7; those outside [from, to) are not read but `fill`. */
HPMLG_DEVICE hpmlg_eight hpmlg_get_part(hpmlg_array a, int64_t at, int64_t from, int64_t to, float fill)
{
    hpmlg_eight e;
    if (hpmlg_wide(a, at, from, to)) return hpmlg_get8(a, at >> 3);
    for (int j = 0; j < 8; j++) e.v[j] = at + j >= from && at + j < to ? hpmlg_get(a, at + j) : fill;
    return e;
}

HPMLG_DEVICE void hpmlg_put_part(hpmlg_array a, int64_t at, int64_t from, int64_t to, hpmlg_eight e, bool add)
{
    if (add) {
        hpmlg_eight was = hpmlg_get_part(a, at, from, to, 0);
        for (int j = 0; j < 8; j++) e.v[j] += was.v[j];
    }
    if (hpmlg_wide(a, at, from, to)) hpmlg_put8(a, at >> 3, e);
    else
        for (int j = 0; j < 8; j++)
            if (at + j >= from && at + j < to) hpmlg_put(a, at + j, e.v[j]);
}

HPMLG_DEVICE float hpmlg_act_sigmoid(float x) { return __fdividef(1, 1 + __expf(-x)); }
HPMLG_DEVICE float hpmlg_act_gate(float x)
{
    return hpmlg_act_sigmoid(1.5957691216057308f * (x + 0.044715f * x * x * x));
}

/* The slope of x s(u(x)), s a sigmoid, u' = du. */
HPMLG_DEVICE float hpmlg_act_gated(float x, float s, float du) { return s + x * s * (1 - s) * du; }

/* What an activation's slope is computed from, y = act(x), and dy / dx. */
#define HPMLG_ACTS(X)                                                                                                  \
    X(RELU, y, x > 0 || x != x ? x : 0, y > 0 ? 1 : 0)                                                                 \
    X(LEAKY_RELU, y, x > 0 ? x : slope * x, y > 0 ? 1 : slope)                                                         \
    X(GELU, x, x * hpmlg_act_gate(x),                                                                                  \
      hpmlg_act_gated(x, hpmlg_act_gate(x), 1.5957691216057308f * (1 + 3 * 0.044715f * x * x)))                        \
    X(GELU_ERF, x, 0.5f * x * (1 + erff(x * 0.70710678118654752f)),                                                    \
      0.5f * (1 + erff(x * 0.70710678118654752f)) + x * 0.39894228040143268f * __expf(-0.5f * x * x))                  \
    X(SILU, x, x * hpmlg_act_sigmoid(x), hpmlg_act_gated(x, hpmlg_act_sigmoid(x), 1))                                  \
    X(SIGMOID, y, hpmlg_act_sigmoid(x), y * (1 - y))                                                                   \
    X(TANH, y, tanhf(x), 1 - y * y)                                                                                    \
    X(EXP, y, expf(x), y)                                                                                              \
    X(LOG, x, logf(x), 1 / x)                                                                                          \
    X(SQRT, y, sqrtf(x), 0.5f / y)                                                                                     \
    X(SQUARE, x, x * x, 2 * x)                                                                                         \
    X(NEG, y, -x, -1)                                                                                                  \
    X(ABS, x, fabsf(x), x > 0 ? 1 : x < 0 ? -1 : 0)

HPMLG_DEVICE float hpmlg_act(int act, float slope, float x)
{
#define HPMLG_X(name, v, value, change) if (act == HPML_ACT_##name) return value;
    HPMLG_ACTS(HPMLG_X)
#undef HPMLG_X
    return x;
}

/* v: x or y, see above. */
HPMLG_DEVICE float hpmlg_act_slope(int act, float slope, float v)
{
    const float x = v, y = v;
#define HPMLG_X(name, v, value, change) if (act == HPML_ACT_##name) return change;
    HPMLG_ACTS(HPMLG_X)
#undef HPMLG_X
    return 1;
}

/* Called, not inlined: for kernels that need their registers for something else. */
static __device__ __attribute__((noinline)) float hpmlg_act_far(int act, float slope, float x)
{
    return hpmlg_act(act, slope, x);
}

static __device__ __attribute__((noinline)) float hpmlg_slope_far(int act, float slope, float v)
{
    return hpmlg_act_slope(act, slope, v);
}

HPMLG_FN bool hpmlg_act_reads_x(hpml_act act)
{
#define HPMLG_X(name, v, value, change) if (act == HPML_ACT_##name) return #v[0] == 'x';
    HPMLG_ACTS(HPMLG_X)
#undef HPMLG_X
    return false;
}

/* y = act(x); with dy: y (+)= dy act'. y may be x or dy. */
static __global__ void hpmlg_k_act(hpmlg_array y, hpmlg_array x, hpmlg_array dy, int act, float slope, int64_t n,
                                   bool add)
{
    HPMLG_EIGHTS(at, n) {
        hpmlg_eight e = hpmlg_get_part(x, at, 0, n, 1);
        if (dy.p) {
            hpmlg_eight g = hpmlg_get_part(dy, at, 0, n, 0);
            for (int j = 0; j < 8; j++) e.v[j] = g.v[j] * hpmlg_act_slope(act, slope, e.v[j]);
        } else {
            for (int j = 0; j < 8; j++) e.v[j] = hpmlg_act(act, slope, e.v[j]);
        }
        hpmlg_put_part(y, at, 0, n, e, add);
    }
}

/* y (+)= x, of any types. */
HPMLG_FN void hpmlg_copy_run(hpmlg_device *d, hpmlg_array y, hpmlg_array x, int64_t n, bool add)
{
    HPMLG_DEAL(d, hpmlg_k_act, n, 2048, y, x, hpmlg_none(), (int)HPML_ACT_NONE, 0.0f, n, add);
}

HPMLG_OP(activation)
{
    int64_t       count = hpml_tensor_count(n->out);
    hpml_act      act = n->attr.act.act;
    hpmlg_array   x = hpmlg_value(back && !hpmlg_act_reads_x(act) ? n->out : n->src[0]);
    HPMLG_DEAL(d, hpmlg_k_act, count, 2048, hpmlg_writes(n, back), x, back ? hpmlg_grad(n->out) : hpmlg_none(),
               (int)act, n->attr.act.slope, count, hpmlg_adds(n, back));
}

/* A walk: element i of a shape, in order, is at walk_at(i) of an array with these strides; 0 where it is stretched.
   The innermost dimension comes first. Dimensions that all arrays walk in step are joined: (B, T, C) + (C) is
   (B T, C) + (C). */
typedef struct hpmlg_walk {
    int     ndim = 1;
    int64_t count = 1; /* of elements */
    int64_t shape[HPML_MAX_DIMS] = { 1 }, stride[2][HPML_MAX_DIMS];
} hpmlg_walk;

HPMLG_DEVICE int64_t hpmlg_quotient(int64_t a, int64_t b)
{
    return (((uint64_t)a | (uint64_t)b) >> 32) == 0 ? (int64_t)((uint32_t)a / (uint32_t)b) : a / b;
}

HPMLG_DEVICE int64_t hpmlg_walk_at(const hpmlg_walk &w, int s, int64_t i)
{
    int64_t at = 0;
    for (int k = 0; k < w.ndim - 1; k++) {
        int64_t q = hpmlg_quotient(i, w.shape[k]);
        at += (i - q * w.shape[k]) * w.stride[s][k];
        i = q;
    }
    return at + i * w.stride[s][w.ndim - 1];
}

/* Adds an outer dimension; joins it to the one before where both arrays allow. */
HPMLG_FN void hpmlg_walk_push(hpmlg_walk *w, int64_t size, int64_t stride0, int64_t stride1)
{
    int to = w->count == 1 ? 0 : w->ndim, last = to > 0 ? to - 1 : 0;
    if (size == 1) return;
    w->count *= size;
    if (to > 0 && stride0 == w->stride[0][last] * w->shape[last] && stride1 == w->stride[1][last] * w->shape[last]) {
        w->shape[last] *= size;
        return;
    }
    w->shape[to] = size, w->stride[0][to] = stride0, w->stride[1][to] = stride1, w->ndim = to + 1;
}

/* Elements at to at + 7 of the walk, as far as there are `count`. */
HPMLG_DEVICE hpmlg_eight hpmlg_gather(hpmlg_array a, const hpmlg_walk &w, int s, int64_t at, int64_t count)
{
    hpmlg_eight e;
    int64_t     run = w.shape[0], step = w.stride[s][0];
    int64_t     in = at - hpmlg_quotient(at, run) * run, p = hpmlg_walk_at(w, s, at);
    bool        one_run = in + 8 <= run;
    if (one_run && step == 1) return hpmlg_get_part(a, p, p, p + 8, 0);
    for (int j = 0; j < 8; j++) {
        e.v[j] = j > 0 && one_run && step == 0 ? e.v[0] : at + j < count ? hpmlg_get(a, p) : 1;
        p += step;
        if (++in == run && at + j + 1 < count) in = 0, p = hpmlg_walk_at(w, s, at + j + 1);
    }
    return e;
}

/* y (+)= a x + b, where x is all of y's elements in order, or, not flat, walked. y may be x. */
template <bool flat>
static __global__ void hpmlg_k_affine(hpmlg_array y, hpmlg_array x, const __grid_constant__ hpmlg_walk w, float a,
                                      float b, int64_t n, bool add)
{
    HPMLG_EIGHTS(at, n) {
        hpmlg_eight e = flat ? hpmlg_get_part(x, at, 0, n, 0) : hpmlg_gather(x, w, 0, at, n);
        for (int j = 0; j < 8; j++) e.v[j] = a * e.v[j] + b;
        hpmlg_put_part(y, at, 0, n, e, add);
    }
}

HPMLG_FN void hpmlg_spread_run(hpmlg_device *d, hpmlg_array y, hpmlg_array x, const hpmlg_walk *w, float scale,
                               bool add)
{
    HPMLG_DEAL(d, hpmlg_k_affine<false>, w->count, 2048, y, x, *w, scale, 0.0f, w->count, add);
}

HPMLG_OP(scale)
{
    int64_t    count = hpml_tensor_count(n->out);
    hpmlg_walk none = {};
    HPMLG_DEAL(d, hpmlg_k_affine<true>, count, 2048, hpmlg_writes(n, back), hpmlg_reads(n, back), none,
               n->attr.scale.a, back ? 0 : n->attr.scale.b, count, hpmlg_adds(n, back));
}

typedef struct hpmlg_binary {
    int         op;
    hpmlg_walk  w;            /* over the result; stride[s]: of src[s] */
    bool        whole[2];     /* src[s] has every element of the result, in order */
    hpmlg_array out, src[2];  /* out: the result; backward: its gradient */
    hpmlg_array grad[2];      /* backward: where src[s]'s is written by hpmlg_k_binary_back; p NULL: nowhere */
    bool        add[2];
    int         act;          /* not 0: out is multiplied by act'(src[0]), in place, on its way; op is ADD */
    float       slope;
} hpmlg_binary;

/* flat: nothing is stretched, which needs half the registers, and so more loads are under way. */
template <bool flat> HPMLG_DEVICE hpmlg_eight hpmlg_operand(const hpmlg_binary &b, int s, int64_t at)
{
    if (flat || b.whole[s]) return hpmlg_get_part(b.src[s], at, 0, b.w.count, 1);
    return hpmlg_gather(b.src[s], b.w, s, at, b.w.count);
}

template <bool flat> static __global__ void __launch_bounds__(256, flat ? 6 : 4) hpmlg_k_binary(hpmlg_binary b)
{
    HPMLG_EIGHTS(at, b.w.count) {
        hpmlg_eight x0 = hpmlg_operand<flat>(b, 0, at), x1 = hpmlg_operand<flat>(b, 1, at);
        for (int j = 0; j < 8; j++) {
            float p = x0.v[j], q = x1.v[j];
            x0.v[j] = b.op == HPML_OP_ADD ? p + q : b.op == HPML_OP_SUB ? p - q : b.op == HPML_OP_MUL ? p * q : p / q;
        }
        hpmlg_put_part(b.out, at, 0, b.w.count, x0, false);
    }
}

/* Share of elements at to at + 7 of the result in the gradient of src[side]; 0 outside [from, to). For a / b:
   da = dy / b, db = -dy a / b^2. Outside, an act' is taken at 1: at 0 it may be infinite, and 0 times that NaN. */
template <bool flat, bool plain = false>
HPMLG_DEVICE hpmlg_eight hpmlg_share(const hpmlg_binary &b, int side, int64_t at, int64_t from, int64_t to)
{
    hpmlg_eight d = hpmlg_get_part(b.out, at, from, to, 0), x0 = d, x1 = d;
    if (!flat && !plain && b.act) {
        x0 = hpmlg_get_part(b.src[0], at, from, to, 1);
        HPMLG_UNROLL for (int j = 0; j < 8; j++) d.v[j] *= hpmlg_slope_far(b.act, b.slope, x0.v[j]);
        hpmlg_put_part(b.out, at, from, to, d, false);
    }
    if (plain || b.op == HPML_OP_ADD) return d;
    if (b.op == HPML_OP_DIV || (b.op == HPML_OP_MUL && !side)) x1 = hpmlg_operand<flat>(b, 1, at);
    if (b.op != HPML_OP_SUB && side) x0 = hpmlg_operand<flat>(b, 0, at);
    for (int j = 0; j < 8; j++) {
        float g = d.v[j], p = x0.v[j], q = x1.v[j];
        g = b.op == HPML_OP_SUB ? (side ? -g : g) : b.op == HPML_OP_MUL ? g * (side ? p : q)
          : side ? -g / q * p / q : g / q;
        d.v[j] = at + j >= from && at + j < to ? g : 0;
    }
    return d;
}

/* Gradients of operands that were not stretched. The same tensor may stand on both sides. */
template <bool flat> static __global__ void __launch_bounds__(256, flat ? 5 : 3) hpmlg_k_binary_back(hpmlg_binary b)
{
    const int64_t n = b.w.count;
    HPMLG_EIGHTS(at, n)
        for (int side = 0; side < 2; side++)
            if (b.grad[side].p)
                hpmlg_put_part(b.grad[side], at, 0, n, hpmlg_share<flat>(b, side, at, 0, n), b.add[side]);
}

HPMLG_FN hpmlg_binary hpmlg_binary_make(const hpml_node *n)
{
    hpmlg_binary       b = {};
    const hpml_tensor *y = n->out;
    int64_t            step[2] = { 1, 1 }, stride[2];
    b.op = (int)n->op, b.out = hpmlg_value(y);
    for (int i = y->ndim - 1; i >= 0; i--) {
        for (int s = 0; s < 2; s++) {
            int     k    = i - (y->ndim - n->src[s]->ndim);
            int64_t size = k < 0 ? 1 : n->src[s]->shape[k];
            stride[s] = size == 1 ? 0 : step[s];
            step[s] *= size;
        }
        hpmlg_walk_push(&b.w, y->shape[i], stride[0], stride[1]);
    }
    for (int s = 0; s < 2; s++) b.src[s] = hpmlg_value(n->src[s]), b.whole[s] = step[s] == b.w.count;
    return b;
}

HPMLG_FN void hpmlg_fold_run(hpmlg_device *d, const hpmlg_binary *b, int side, hpmlg_array out, float scale, bool add);

HPMLG_FN void hpmlg_binary_pass(hpmlg_device *d, hpml_node *n, bool back)
{
    hpmlg_binary  b = hpmlg_binary_make(n);
    unsigned      blocks = hpmlg_blocks(d, b.w.count, 2048);
    bool          flat = b.whole[0] && b.whole[1];
    if (!back && n->fused_with && d->passing) return; /* the norm that follows does it */
    if (!back) return HPMLG_RUN_EITHER(d, flat, hpmlg_k_binary, true, false, blocks, 256, 0, b);
    b.out    = hpmlg_grad(n->out);
    b.add[0] = n->accumulate[0], b.add[1] = n->accumulate[1] || n->src[1] == n->src[0];
    for (int s = 0; s < 2; s++)
        if (b.whole[s]) b.grad[s] = hpmlg_grad(n->src[s]);
    if (b.grad[0].p || b.grad[1].p) HPMLG_RUN_EITHER(d, flat, hpmlg_k_binary_back, true, false, blocks, 256, 0, b);
    for (int s = 0; s < 2; s++)
        if (!b.whole[s] && n->src[s]->raw_grad)
            hpmlg_fold_run(d, &b, s, hpmlg_grad(n->src[s]), 1, n->accumulate[s]);
}
HPMLG_OP(add) { return hpmlg_binary_pass(d, n, back); }
HPMLG_OP(sub) { return hpmlg_binary_pass(d, n, back); }
HPMLG_OP(mul) { return hpmlg_binary_pass(d, n, back); }
HPMLG_OP(div) { return hpmlg_binary_pass(d, n, back); }

// ---------------------------------------------------------------------------------------------------------------------
// >>gpu-sums   sums, sums of squares
// ---------------------------------------------------------------------------------------------------------------------

/* The sum op and the gradient of a stretched operand are one thing, a fold: of the dimensions of an array some are kept
   and the others summed away. What is summed is hpmlg_share: for op ADD the array itself. The last dimension, `run`
   elements in a row, is kept (a thread has 8 columns and walks down the rows) or summed (a group of threads has a row).
   Where the kept elements alone do not fill the device the summed ones are cut into splits, whose partial sums are
   folded once more. The order depends on the shape and the kind of GPU alone. */
typedef struct hpmlg_fold {
    hpmlg_binary b;
    int          side;
    hpmlg_walk   kept, summed; /* without the last dimension; stride[0]: within the array */
    int64_t      run;
    hpmlg_array  out;          /* (splits, kept) */
    float        scale;
    bool         add;
    int          tx;           /* threads side by side: a power of two up to 256 */
} hpmlg_fold;

#define HPMLG_FOLD 256 /* threads of a block */

template <bool plain>
static __global__ void __launch_bounds__(HPMLG_FOLD, plain ? 5 : 3) hpmlg_k_fold_columns(hpmlg_fold f)
{
    __shared__ float part[HPMLG_FOLD * 8];
    int          lane = (int)threadIdx.x % f.tx, row = (int)threadIdx.x / f.tx, ty = HPMLG_FOLD / f.tx;
    int64_t      tiles = (f.run + 8 * f.tx - 1) / (8 * f.tx), o = blockIdx.x / tiles;
    int64_t      c = ((blockIdx.x - o * tiles) * f.tx + lane) * 8, end = c + 8 < f.run ? c + 8 : f.run;
    int64_t      base = hpmlg_walk_at(f.kept, 0, o), first = ((int64_t)blockIdx.y * f.kept.count + o) * f.run;
    float       *mine = part + threadIdx.x;
    hpmlg_eight  sum = {};
    for (int64_t r = (int64_t)blockIdx.y * ty + row; r < f.summed.count && c < f.run; r += (int64_t)gridDim.y * ty) {
        int64_t     at = base + hpmlg_walk_at(f.summed, 0, r);
        hpmlg_eight e  = hpmlg_share<false, plain>(f.b, f.side, at + c, at + c, at + end);
        for (int j = 0; j < 8; j++) sum.v[j] += e.v[j];
    }
    for (int j = 0; j < 8; j++) mine[j * HPMLG_FOLD] = sum.v[j];
    for (int h = ty / 2; h > 0; h /= 2) {
        __syncthreads();
        for (int j = 0; j < 8 && row < h; j++) mine[j * HPMLG_FOLD] += mine[j * HPMLG_FOLD + h * f.tx];
    }
    for (int j = 0; j < 8; j++) sum.v[j] = f.scale * mine[j * HPMLG_FOLD];
    if (row == 0 && c < f.run) hpmlg_put_part(f.out, first + c, first + c, first + end, sum, f.add);
}

template <bool plain>
static __global__ void __launch_bounds__(HPMLG_FOLD, plain ? 5 : 3) hpmlg_k_fold_rows(hpmlg_fold f)
{
    __shared__ float space[HPMLG_FOLD / HPMLG_WARP];
    int     lane = (int)threadIdx.x % f.tx, ty = HPMLG_FOLD / f.tx;
    int64_t k = (int64_t)blockIdx.x * ty + threadIdx.x / (unsigned)f.tx, to = (int64_t)blockIdx.y * f.kept.count + k;
    int64_t eights = (f.run + 14) / 8; /* that a run touches, wherever it begins */
    int64_t base = k < f.kept.count ? hpmlg_walk_at(f.kept, 0, k) : 0;
    float   sum = 0;
    for (int64_t q = (int64_t)blockIdx.y * f.tx + lane; q < f.summed.count * eights && k < f.kept.count;
         q += (int64_t)gridDim.y * f.tx) {
        int64_t r = hpmlg_quotient(q, eights), start = base + hpmlg_walk_at(f.summed, 0, r);
        int64_t at = start / 8 * 8 + (q - r * eights) * 8;
        if (at >= start + f.run) continue;
        hpmlg_eight e = hpmlg_share<false, plain>(f.b, f.side, at, start, start + f.run);
        sum += ((e.v[0] + e.v[1]) + (e.v[2] + e.v[3])) + ((e.v[4] + e.v[5]) + (e.v[6] + e.v[7]));
    }
    sum = f.scale * hpmlg_group(sum, space, f.tx, false);
    if (lane == 0 && k < f.kept.count) hpmlg_put(f.out, to, f.add ? hpmlg_get(f.out, to) + sum : sum);
}

/* The smallest power of two of at least n, at most `most`. */
HPMLG_FN int hpmlg_power(int64_t n, int most)
{
    int p = 1;
    while (p < n && p < most) p *= 2;
    return p;
}

/* An array (outer, dim, inner) as what is left without dim is stretched over it. */
HPMLG_FN hpmlg_walk hpmlg_stretched(int64_t outer, int64_t dim, int64_t inner)
{
    hpmlg_walk w = {};
    hpmlg_walk_push(&w, inner, 1, 0);
    hpmlg_walk_push(&w, dim, 0, 0);
    hpmlg_walk_push(&w, outer, inner, 0);
    return w;
}

/* out (+)= scale * the sums of x, walked by w in order, over the dimensions that w stretches. */
HPMLG_FN void hpmlg_sum_run(hpmlg_device *d, hpmlg_array out, hpmlg_array x, hpmlg_walk w, float scale, bool add)
{
    hpmlg_binary b = {};
    b.op = HPML_OP_ADD, b.out = x, b.w = w;
    hpmlg_fold_run(d, &b, 0, out, scale, add);
}

/* out (+)= scale * what operand `side`, which is stretched, has from all of the result. */
HPMLG_FN void hpmlg_fold_run(hpmlg_device *d, const hpmlg_binary *b, int side, hpmlg_array out, float scale, bool add)
{
    hpmlg_fold f = {};
    int64_t    step = b->w.shape[0];
    bool       run_kept = b->w.stride[side][0] != 0;
    f.b = *b, f.side = side, f.out = out, f.scale = scale, f.add = add;
    f.run = b->w.shape[0];
    for (int i = 1; i < b->w.ndim; i++) {
        hpmlg_walk_push(b->w.stride[side][i] ? &f.kept : &f.summed, b->w.shape[i], step, step);
        step *= b->w.shape[i];
    }
    int64_t eights = (f.run + (run_kept ? 7 : 14)) / 8, kept = run_kept ? f.kept.count * f.run : f.kept.count;
    f.tx = hpmlg_power(run_kept ? eights : f.summed.count * eights, run_kept ? 32 : HPMLG_FOLD);
    int     ty     = HPMLG_FOLD / f.tx;
    int64_t blocks = run_kept ? f.kept.count * ((eights + f.tx - 1) / f.tx) : (kept + ty - 1) / ty;
    int64_t work   = run_kept ? f.summed.count / (4 * ty) : f.summed.count * eights / (4 * f.tx);
    int64_t splits = (int64_t)d->sms * 8 / blocks, room = (int64_t)(HPMLG_SCRATCH / sizeof(float)) / kept;
    if (splits > work) splits = work;
    if (splits > room) splits = room;
    if (splits <= 1 || b->out.p == d->scratch) splits = 1; /* the parts of a sum before are summed at once */
    else f.out = hpmlg_of(d->scratch, HPML_DTYPE_F32), f.scale = 1, f.add = false;
    dim3 grid((unsigned)blocks, (unsigned)splits);
    bool plain = b->op == HPML_OP_ADD && !b->act; /* nothing to compute: fewer registers, more loads under way */
    if (run_kept) HPMLG_RUN_EITHER(d, plain, hpmlg_k_fold_columns, true, false, grid, HPMLG_FOLD, 0, f);
    else HPMLG_RUN_EITHER(d, plain, hpmlg_k_fold_rows, true, false, grid, HPMLG_FOLD, 0, f);
    if (splits > 1) hpmlg_sum_run(d, out, f.out, hpmlg_stretched(1, splits, kept), scale, add);
}

/* (outer, dim, inner) of t around one dimension; HPML_ALL_DIMS: (1, all, 1). */
HPMLG_FN void hpmlg_split_dims(const hpml_tensor *t, int dim, int64_t *outer, int64_t *middle, int64_t *inner)
{
    *outer = *inner = 1, *middle = dim == HPML_ALL_DIMS ? hpml_tensor_count(t) : t->shape[dim];
    for (int i = 0; i < dim; i++) *outer *= t->shape[i];
    for (int i = dim + 1; i < t->ndim && dim != HPML_ALL_DIMS; i++) *inner *= t->shape[i];
}

HPMLG_OP(sum)
{
    hpmlg_array   to = hpmlg_writes(n, back), from = hpmlg_reads(n, back);
    int64_t       outer, dim, inner;
    hpmlg_split_dims(n->src[0], n->attr.sum.dim, &outer, &dim, &inner);
    float      scale = n->attr.sum.mean ? 1 / (float)dim : 1;
    hpmlg_walk w = hpmlg_stretched(outer, dim, inner);
    if (back) hpmlg_spread_run(d, to, from, &w, scale, n->accumulate[0]);
    else hpmlg_sum_run(d, to, from, w, scale, false);
}

/* Sums of f(x, t) over whole arrays: squares, and the losses. */
enum hpmlg_term { HPMLG_SQUARE, HPMLG_BCE, HPMLG_HUBER, HPMLG_MSE };

/* bce: max(x, 0) - x t + log(1 + exp(-|x|)), which never overflows. Huber with delta 0 is |x - t|. */
HPMLG_DEVICE float hpmlg_term(int what, float delta, float x, float t)
{
    float d = fabsf(x - t);
    switch (what) {
    case HPMLG_SQUARE: return x * x;
    case HPMLG_BCE: return (x > 0 ? x : 0) - x * t + log1pf(expf(-fabsf(x)));
    case HPMLG_MSE: return d * d;
    default: return delta == 0 ? d : d <= delta ? 0.5f * d * d : delta * (d - 0.5f * delta);
    }
}

static __global__ void hpmlg_k_total(float *part, hpmlg_array x, hpmlg_array t, int what, float delta, int64_t n)
{
    __shared__ float space[256 / HPMLG_WARP];
    float sum = 0;
    HPMLG_EIGHTS(at, n) {
        hpmlg_eight e = hpmlg_get_part(x, at, 0, n, 0), u = e;
        if (t.p) u = hpmlg_get_part(t, at, 0, n, 0);
        for (int j = 0; j < 8; j++) sum += at + j < n ? hpmlg_term(what, delta, e.v[j], u.v[j]) : 0;
    }
    sum = hpmlg_group(sum, space, 256, false);
    if (threadIdx.x == 0) part[blockIdx.x] = sum;
}

/* A number from partial sums, by one block, in doubles. */
typedef struct hpmlg_finish {
    const float *part;    /* (n) */
    int64_t      n;
    const unsigned long long *counted; /* it is divided by this, which a kernel has counted, or, NULL, */
    double       divisor;
    float       *out, *inverse; /* sum / divisor; 1 / divisor; NULL: not wanted */
    double      *wide;          /* the same as out */
} hpmlg_finish;

static __global__ void __launch_bounds__(1024) hpmlg_k_finish(hpmlg_finish f)
{
    __shared__ double sums[1024];
    int    me = (int)threadIdx.x;
    double sum = 0;
    for (int64_t i = me; i < f.n; i += 1024) sum += (double)f.part[i];
    sums[me] = sum;
    for (int h = 512; h > 0; h /= 2) {
        __syncthreads();
        if (me < h) sums[me] += sums[me + h];
    }
    if (me != 0) return;
    double divisor = f.counted ? (double)f.counted[0] : f.divisor;
    if (f.out) f.out[0] = divisor > 0 ? (float)(sums[0] / divisor) : 0;
    if (f.wide) f.wide[0] = sums[0] / divisor;
    if (f.inverse) f.inverse[0] = divisor > 0 ? (float)(1 / divisor) : 0;
}

/* f(x, t) summed over n elements and divided; the rest of `f` says where it goes. */
HPMLG_FN void hpmlg_total_run(hpmlg_device *d, hpmlg_finish f, hpmlg_array x, hpmlg_array t, enum hpmlg_term what,
                              float delta, int64_t n)
{
    float   *part = (float *)d->scratch + 64; /* the first 256 bytes are for results */
    unsigned blocks = hpmlg_blocks(d, n, 2048);
    f.part = part, f.n = blocks;
    HPMLG_RUN(d, hpmlg_k_total, blocks, 256, 0, part, x, t, (int)what, delta, n);
    HPMLG_RUN(d, hpmlg_k_finish, 1, 1024, 0, f);
}

HPMLG_FN hpml_status hpmlg_sumsq(void *, hpml_ctx *ctx, hpml_dtype dtype, const void *x, int64_t n, double *out)
{
    hpmlg_finish f = {};
    f.divisor = 1, f.wide = out;
    hpmlg_total_run(hpmlg_enter(ctx), f, hpmlg_of((void *)x, dtype), hpmlg_none(), HPMLG_SQUARE, 0, n);
    return hpml_ctx_status(ctx);
}

// ---------------------------------------------------------------------------------------------------------------------
// >>gpu-shape   reshape, permute, slice, concat
// ---------------------------------------------------------------------------------------------------------------------

/* A reshape of what an op made is the same memory; inputs and parameters are copied. */
HPMLG_OP(reshape)
{
    hpmlg_array   to = hpmlg_writes(n, back), from = hpmlg_reads(n, back);
    if (to.p && to.p != from.p) hpmlg_copy_run(d, to, from, hpml_tensor_count(n->out), hpmlg_adds(n, back));
}

/* to (+)= from, permuted, in tiles of 64 x 64: `from` is read along its last dimension, which is dimension p of `to`,
   and `to` written along its own. w: over the tiles, (.., tiles along p, tiles along the last dimension), with the
   strides of from and to; p, last: sizes and strides of these two. */
#define HPMLG_TILE 64
typedef struct hpmlg_turn {
    hpmlg_array from, to;
    hpmlg_walk  w;
    int64_t     p, last, from_last, to_p; /* strides in from of `last`, in to of `p`; the others are 1 */
    int64_t     p_tiles, last_tiles;
    bool        add;
} hpmlg_turn;

static __global__ void hpmlg_k_turn(hpmlg_turn t)
{
    __shared__ float tile[HPMLG_TILE][HPMLG_TILE + 1];
    int64_t b = hpmlg_quotient(blockIdx.x, t.last_tiles), c0 = (blockIdx.x - b * t.last_tiles) * HPMLG_TILE;
    int64_t outer = hpmlg_quotient(b, t.p_tiles), r0 = (b - outer * t.p_tiles) * HPMLG_TILE;
    int64_t from = hpmlg_walk_at(t.w, 0, outer), to = hpmlg_walk_at(t.w, 1, outer);
    int     x = (int)threadIdx.x % HPMLG_TILE, y = (int)threadIdx.x / HPMLG_TILE;
    for (int i = y; i < HPMLG_TILE; i += 4)
        if (r0 + x < t.p && c0 + i < t.last) tile[i][x] = hpmlg_get(t.from, from + r0 + x + (c0 + i) * t.from_last);
    __syncthreads();
    for (int i = y; i < HPMLG_TILE; i += 4) {
        if (r0 + i >= t.p || c0 + x >= t.last) continue;
        int64_t at = to + (r0 + i) * t.to_p + c0 + x;
        hpmlg_put(t.to, at, t.add ? hpmlg_get(t.to, at) + tile[x][i] : tile[x][i]);
    }
}

/* Backward is the permutation that undoes it. */
HPMLG_OP(permute)
{
    const hpml_tensor *shape = back ? n->src[0] : n->out, *other = back ? n->out : n->src[0];
    hpmlg_array        to = hpmlg_writes(n, back), from = hpmlg_reads(n, back);
    bool               add = hpmlg_adds(n, back);
    hpmlg_walk         w = {};
    hpmlg_turn         t = {};
    int64_t            step[HPML_MAX_DIMS], stride[HPML_MAX_DIMS], whole = 1;
    int                p = 0;
    for (int i = other->ndim - 1; i >= 0; i--) step[i] = whole, whole *= other->shape[i];
    for (int i = 0; i < shape->ndim; i++) {
        int k = n->attr.permute.dims[i]; /* dimension i of the result is k of x */
        if (back) stride[k] = step[i];
        else stride[i] = step[k];
    }
    for (int i = shape->ndim - 1; i >= 0; i--) hpmlg_walk_push(&w, shape->shape[i], stride[i], w.count);
    for (int i = 1; i < w.ndim; i++)
        if (w.stride[0][i] == 1) p = i;
    t.p = w.shape[p], t.last = w.shape[0];
    if (p == 0 || t.p < 16 || t.last < 16) return hpmlg_spread_run(d, to, from, &w, 1, add);
    t.from = from, t.to = to, t.add = add, t.from_last = w.stride[0][0], t.to_p = w.stride[1][p];
    for (int i = 1; i < w.ndim; i++)
        if (i != p) hpmlg_walk_push(&t.w, w.shape[i], w.stride[0][i], w.stride[1][i]);
    t.p_tiles = (t.p + HPMLG_TILE - 1) / HPMLG_TILE, t.last_tiles = (t.last + HPMLG_TILE - 1) / HPMLG_TILE;
    HPMLG_RUN(d, hpmlg_k_turn, (unsigned)(t.w.count * t.p_tiles * t.last_tiles), 256, 0, t);
}

/* Row o of `to`, `width` elements from to_at on, becomes (or is added) row o of `from`, `block` elements from from_at
   on, with `lead` zeros before it and zeros behind. */
typedef struct hpmlg_blocked {
    hpmlg_array to, from;
    int64_t     to_at, to_step, from_at, from_step, width, block, lead, rows;
    bool        add;
} hpmlg_blocked;

static __global__ void hpmlg_k_blocked(hpmlg_blocked b)
{
    int64_t eights = (b.width + 7) / 8;
    HPMLG_EACH(i, b.rows * eights) {
        int64_t     o = hpmlg_quotient(i, eights), k = (i - o * eights) * 8;
        int64_t     to = b.to_at + o * b.to_step, from = b.from_at + o * b.from_step;
        hpmlg_eight e = hpmlg_get_part(b.from, from + k - b.lead, from, from + b.block, 0);
        hpmlg_put_part(b.to, to + k, to, to + b.width, e, b.add);
    }
}

/* The dimension `dim` of `whole` (.., dim, ..) from `start` on is all of part's: copies (or adds) one into the other,
   values or gradients. */
HPMLG_FN void hpmlg_part(hpmlg_device *d, const hpml_tensor *whole, const hpml_tensor *part, int dim, int64_t start,
                         bool into_whole, bool gradient, bool add)
{
    hpmlg_blocked b = {};
    int64_t       rows, count, width, inner;
    hpmlg_split_dims(whole, dim, &rows, &count, &inner);
    width  = part->shape[dim] * inner;
    b.to   = hpmlg_either(into_whole ? whole : part, gradient);
    b.from = hpmlg_either(into_whole ? part : whole, gradient);
    b.rows = rows, b.block = b.width = width, b.add = add;
    if (into_whole) b.to_at = start * inner, b.to_step = count * inner, b.from_step = width;
    else b.to_step = width, b.from_at = start * inner, b.from_step = count * inner;
    if (into_whole && gradient && !add) b.to_at = 0, b.width = count * inner, b.lead = start * inner;
    HPMLG_DEAL(d, hpmlg_k_blocked, b.rows * ((b.width + 7) / 8), 256, b);
}

HPMLG_OP(slice)
{
    hpmlg_part(d, n->src[0], n->out, n->attr.slice.dim, n->attr.slice.start, back, back, hpmlg_adds(n, back));
}

HPMLG_OP(concat)
{
    int64_t start = 0;
    int     dim = n->attr.slice.dim;
    for (int i = 0; i < n->src_count; i++) {
        if (!back || n->src[i]->raw_grad)
            hpmlg_part(d, n->out, n->src[i], dim, start, !back, back, back && n->accumulate[i]);
        start += n->src[i]->shape[dim];
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// >>gpu-norm   softmax, layernorm, rmsnorm
// ---------------------------------------------------------------------------------------------------------------------

/* A row is the work of a team, a warp or a whole block: thread t takes the eights t, t + TEAM, ... of a tile of TEAM G
   eights. A row that fits in one tile is read once and stays in registers, a longer one is read again for each pass
   over it, from the cache. */

/* Elements c to c + 7 of a row; those past its end are `fill` and are not written. */
HPMLG_DEVICE hpmlg_eight hpmlg_row_get(hpmlg_array a, int64_t row, int64_t cols, int64_t c, float fill)
{
    return hpmlg_get_part(a, row * cols + c, row * cols + c, row * cols + cols, fill);
}

HPMLG_DEVICE void hpmlg_row_put(hpmlg_array a, int64_t row, int64_t cols, int64_t c, hpmlg_eight e, bool add)
{
    hpmlg_put_part(a, row * cols + c, row * cols + c, row * cols + cols, e, add);
}

/* The same of a parameter (cols), all `none` where a layer has none. */
HPMLG_DEVICE hpmlg_eight hpmlg_param_get(const float *p, int64_t cols, int64_t c, float none)
{
    hpmlg_array a = { (void *)p, HPML_DTYPE_F32 };
    hpmlg_eight e = { { none, none, none, none, none, none, none, none } };
    return p ? hpmlg_row_get(a, 0, cols, c, none) : e;
}

HPMLG_FN int64_t hpmlg_last_dim(const hpml_tensor *t) { return t->ndim > 0 ? t->shape[t->ndim - 1] : 1; }

#define HPMLG_WARP_ROW 1024 /* columns that a warp takes; more are for a block */

HPMLG_FN unsigned hpmlg_row_blocks(const hpmlg_device *d, int64_t rows, int64_t cols)
{
    return hpmlg_blocks(d, rows, cols <= HPMLG_WARP_ROW ? 4 : 1);
}

/* Launches the team that suits rows of `cols`. */
#define HPMLG_ROWS(d, kernel, blocks, cols, shared, ...)                                                               \
    ((cols) <= 256              ? HPMLG_RUN(d, (kernel<32, 1>), blocks, 128, shared, __VA_ARGS__)                      \
     : (cols) <= 768            ? HPMLG_RUN(d, (kernel<32, 3>), blocks, 128, shared, __VA_ARGS__)                      \
     : (cols) <= HPMLG_WARP_ROW ? HPMLG_RUN(d, (kernel<32, 4>), blocks, 128, shared, __VA_ARGS__)                      \
     : (cols) <= 2048           ? HPMLG_RUN(d, (kernel<128, 2>), blocks, 128, shared, __VA_ARGS__)                     \
                                : HPMLG_RUN(d, (kernel<256, 4>), blocks, 256, shared, __VA_ARGS__))

/* Every row of this team, every tile of a row, every eight of a tile: k counts them, c is its first column. */
#define HPMLG_EACH_ROW                                                                                                 \
    for (int64_t row = (int64_t)blockIdx.x * (blockDim.x / TEAM) + threadIdx.x / TEAM; row < rows;                     \
         row += (int64_t)gridDim.x * (blockDim.x / TEAM))
#define HPMLG_EACH_EIGHT                                                                                               \
    for (int64_t tile = 8 * (int64_t)(threadIdx.x % TEAM), end = cols + tile; tile < end; tile += 8 * TEAM * G)        \
        HPMLG_UNROLL for (int64_t k = 0, c = tile; k < G; k++, c += 8 * TEAM)

template <int TEAM, int G>
static __global__ void hpmlg_k_softmax(hpmlg_array y, hpmlg_array x, int64_t rows, int64_t cols, bool log)
{
    __shared__ float space[HPMLG_WARP];
    const bool       many = cols > 8 * TEAM * G;
    hpmlg_eight      e[G];
    HPMLG_EACH_ROW {
        float most = -INFINITY, sum = 0;
        HPMLG_EACH_EIGHT {
            e[k] = hpmlg_row_get(x, row, cols, c, -INFINITY);
            for (int j = 0; j < 8; j++) most = e[k].v[j] > most || e[k].v[j] != e[k].v[j] ? e[k].v[j] : most;
        }
        most = hpmlg_group(most, space, TEAM, true);
        HPMLG_EACH_EIGHT {
            if (many) e[k] = hpmlg_row_get(x, row, cols, c, -INFINITY);
            for (int j = 0; j < 8; j++) sum += expf(e[k].v[j] - most);
        }
        sum = hpmlg_group(sum, space, TEAM, false);
        float less = logf(sum), scale = 1 / sum; /* because most + less is rounded at the magnitude of most */
        HPMLG_EACH_EIGHT {
            if (many) e[k] = hpmlg_row_get(x, row, cols, c, 0);
            for (int j = 0; j < 8; j++) e[k].v[j] = log ? e[k].v[j] - most - less : expf(e[k].v[j] - most) * scale;
            hpmlg_row_put(y, row, cols, c, e[k], false);
        }
    }
}

/* dx (+)= y (dy - <dy, y>), for the logarithm dy - exp(y) sum(dy). */
template <int TEAM, int G>
static __global__ void hpmlg_k_softmax_back(hpmlg_array dx, hpmlg_array y, hpmlg_array dy, int64_t rows, int64_t cols,
                                            bool log, bool add)
{
    __shared__ float space[HPMLG_WARP];
    const bool       many = cols > 8 * TEAM * G;
    hpmlg_eight      e[G], f[G];
    HPMLG_EACH_ROW {
        float sum = 0;
        HPMLG_EACH_EIGHT {
            e[k] = hpmlg_row_get(y, row, cols, c, 0);
            f[k] = hpmlg_row_get(dy, row, cols, c, 0);
            for (int j = 0; j < 8; j++) sum += log ? f[k].v[j] : f[k].v[j] * e[k].v[j];
        }
        sum = hpmlg_group(sum, space, TEAM, false);
        HPMLG_EACH_EIGHT {
            if (many) e[k] = hpmlg_row_get(y, row, cols, c, 0), f[k] = hpmlg_row_get(dy, row, cols, c, 0);
            for (int j = 0; j < 8; j++)
                f[k].v[j] = log ? f[k].v[j] - expf(e[k].v[j]) * sum : e[k].v[j] * (f[k].v[j] - sum);
            hpmlg_row_put(dx, row, cols, c, f[k], add);
        }
    }
}

HPMLG_FN void hpmlg_softmax_pass(hpmlg_device *d, hpml_node *n, bool back)
{
    int64_t       cols   = hpmlg_last_dim(n->out), rows = hpml_tensor_count(n->out) / cols;
    unsigned      blocks = hpmlg_row_blocks(d, rows, cols);
    hpmlg_array   y      = hpmlg_value(n->out);
    bool          log    = n->op == HPML_OP_LOG_SOFTMAX;
    if (!back) return HPMLG_ROWS(d, hpmlg_k_softmax, blocks, cols, 0, y, hpmlg_value(n->src[0]), rows, cols, log);
    HPMLG_ROWS(d, hpmlg_k_softmax_back, blocks, cols, 0, hpmlg_grad(n->src[0]), y, hpmlg_grad(n->out), rows, cols, log,
               n->accumulate[0]);
}
HPMLG_OP(softmax) { hpmlg_softmax_pass(d, n, back); }
HPMLG_OP(log_softmax) { hpmlg_softmax_pass(d, n, back); }

/* xhat = (x - mean - rest) rstd, y = xhat gamma + beta. The mean is the sum of two floats, so that numbers far from 0
   lose no digits; saved: mean and rstd of each row, then, behind all of them, rest of each. rmsnorm: both 0. A residual
   sum right before a norm, x = p + q, is made by the same kernel: x is written and not read again. */
template <int TEAM, int G>
static __global__ void hpmlg_k_norm(hpmlg_array y, hpmlg_array x, hpmlg_array p, hpmlg_array q, const float *gamma,
                                    const float *beta, float2 *saved, int64_t rows, int64_t cols, float eps,
                                    bool centred)
{
    __shared__ float space[HPMLG_WARP];
    const bool       many = cols > 8 * TEAM * G;
    hpmlg_eight      e[G];
    HPMLG_EACH_ROW {
        float mean = 0, sum = 0, rest = 0;
        HPMLG_EACH_EIGHT {
            e[k] = hpmlg_row_get(p.p ? p : x, row, cols, c, 0);
            if (p.p) { /* x = p + q comes with it */
                hpmlg_eight f = hpmlg_row_get(q, row, cols, c, 0);
                for (int j = 0; j < 8; j++) e[k].v[j] = hpmlg_rounded(e[k].v[j] + f.v[j], x.type);
                hpmlg_row_put(x, row, cols, c, e[k], false);
            }
            for (int j = 0; j < 8; j++) mean += e[k].v[j];
        }
        mean = centred ? hpmlg_group(mean, space, TEAM, false) / (float)cols : 0;
        HPMLG_EACH_EIGHT {
            if (many) e[k] = hpmlg_row_get(x, row, cols, c, 0);
            for (int j = 0; j < 8; j++) {
                float v = c + j < cols ? e[k].v[j] - mean : 0;
                sum += v * v, rest += v;
            }
        }
        rest = centred ? hpmlg_group(rest, space, TEAM, false) / (float)cols : 0;
        float var = hpmlg_group(sum, space, TEAM, false) / (float)cols - rest * rest;
        float rstd = 1 / sqrtf((var < 0 ? 0 : var) + eps);
        if (threadIdx.x % TEAM == 0) saved[row] = make_float2(mean, rstd), ((float *)(saved + rows))[row] = rest;
        HPMLG_EACH_EIGHT {
            if (many) e[k] = hpmlg_row_get(x, row, cols, c, 0);
            hpmlg_eight g = hpmlg_param_get(gamma, cols, c, 1), b = hpmlg_param_get(beta, cols, c, 0);
            for (int j = 0; j < 8; j++) e[k].v[j] = (e[k].v[j] - mean - rest) * rstd * g.v[j] + b.v[j];
            hpmlg_row_put(y, row, cols, c, e[k], false);
        }
    }
}

/* With g = dy gamma: dx (+)= rstd (g - mean(g) - xhat mean(g xhat)). Each block leaves its rows' share of dgamma and
   dbeta in part (blocks, 2, cols): every thread sums its own columns, then the teams add up in order. */
template <int TEAM, int G>
static __global__ void hpmlg_k_norm_back(hpmlg_array dx, hpmlg_array x, hpmlg_array dy, const float *gamma,
                                         const float2 *saved, float *part, int64_t rows, int64_t cols, bool centred,
                                         bool add)
{
    __shared__ float space[HPMLG_WARP];
    HPMLG_SHARED(float, sums); /* (2, cols) where a block has several teams */
    const bool  many = cols > 8 * TEAM * G;
    const int   teams = (int)blockDim.x / TEAM;
    hpmlg_eight e[G], f[G], a[G] = {}, b[G] = {};
    if (part) part += (int64_t)blockIdx.x * 2 * cols;
    hpmlg_array dgamma = { teams == 1 ? part : sums, HPML_DTYPE_F32 };
    hpmlg_array dbeta  = { (float *)dgamma.p + cols, HPML_DTYPE_F32 };
    HPMLG_EACH_ROW {
        float mean = saved[row].x, rstd = saved[row].y, rest = ((const float *)(saved + rows))[row], sum = 0, dot = 0;
        auto  take = [&](int64_t k, int64_t c) { /* xhat and dy */
            e[k] = hpmlg_row_get(x, row, cols, c, mean), f[k] = hpmlg_row_get(dy, row, cols, c, 0);
            for (int j = 0; j < 8; j++) e[k].v[j] = (e[k].v[j] - mean - rest) * rstd;
        };
        auto weigh = [&](int64_t k, int64_t c) { /* dy becomes g */
            hpmlg_eight g = hpmlg_param_get(gamma, cols, c, 1);
            for (int j = 0; j < 8; j++) f[k].v[j] *= g.v[j];
        };
        HPMLG_EACH_EIGHT {
            take(k, c);
            for (int j = 0; j < 8; j++) a[k].v[j] += f[k].v[j] * e[k].v[j], b[k].v[j] += f[k].v[j];
            if (many && part) {
                hpmlg_row_put(dgamma, 0, cols, c, a[k], row != blockIdx.x);
                hpmlg_row_put(dbeta, 0, cols, c, b[k], row != blockIdx.x);
                for (int j = 0; j < 8; j++) a[k].v[j] = b[k].v[j] = 0;
            }
            weigh(k, c);
            for (int j = 0; j < 8; j++) sum += f[k].v[j], dot += f[k].v[j] * e[k].v[j];
        }
        if (!dx.p) continue;
        sum = centred ? hpmlg_group(sum, space, TEAM, false) / (float)cols : 0;
        dot = hpmlg_group(dot, space, TEAM, false) / (float)cols;
        HPMLG_EACH_EIGHT {
            if (many) take(k, c), weigh(k, c);
            for (int j = 0; j < 8; j++) f[k].v[j] = rstd * (f[k].v[j] - sum - e[k].v[j] * dot);
            hpmlg_row_put(dx, row, cols, c, f[k], add);
        }
    }
    if (!part || many) return;
    for (int team = 0; team < teams; team++) {
        if ((int)threadIdx.x / TEAM == team) HPMLG_EACH_EIGHT {
            hpmlg_row_put(dgamma, 0, cols, c, a[k], team > 0);
            hpmlg_row_put(dbeta, 0, cols, c, b[k], team > 0);
        }
        __syncthreads();
    }
    for (int64_t i = threadIdx.x; i < 2 * cols && teams > 1; i += blockDim.x) part[i] = sums[i];
}

/* out[0] (cols) and out[1] (cols) (+)= the sums of the parts (parts, 2, cols): 32 columns a block, its warps deal the
   parts out and add what they have in order. */
static __global__ void hpmlg_k_norm_params(float *dgamma, float *dbeta, const float *part, int parts, int64_t cols,
                                           bool add_gamma, bool add_beta)
{
    __shared__ float space[8][HPMLG_WARP];
    int     lane = (int)threadIdx.x % HPMLG_WARP, warp = (int)threadIdx.x / HPMLG_WARP;
    int64_t c    = (int64_t)blockIdx.x * HPMLG_WARP + lane;
    float   sum  = 0;
    for (int p = warp; p < parts && c < 2 * cols; p += 8) sum += part[(int64_t)p * 2 * cols + c];
    space[warp][lane] = sum;
    __syncthreads();
    float *out = c < cols ? dgamma : dbeta;
    bool   add = c < cols ? add_gamma : add_beta;
    if (warp != 0 || c >= 2 * cols || !out) return;
    for (int w = 1; w < 8; w++) sum += space[w][lane];
    c -= c < cols ? 0 : cols;
    out[c] = (add ? out[c] : 0) + sum;
}

HPMLG_FN int hpmlg_norm_parts(const hpmlg_device *d, int64_t rows, int64_t cols)
{
    int blocks = (int)hpmlg_row_blocks(d, rows, cols);
    int most   = d->sms * (cols > 256 && cols <= 768 ? 3 : 4); /* whole waves of what registers allow */
    return blocks < most ? blocks : most;
}

HPMLG_FN const float *hpmlg_param_of(const hpml_node *n, int s) { return n->src[s] ? n->src[s]->data : NULL; }
HPMLG_FN float       *hpmlg_param_grad(const hpml_node *n, int s) { return n->src[s] ? n->src[s]->grad : NULL; }

/* The sum that norm n does on its way; planned once, for passes that run as a whole. */
HPMLG_FN void hpmlg_norm_plan(hpml_node *n, hpml_node *before)
{
    hpml_node *add = n->src[0]->node;
    if (!add || add != before || add->op != HPML_OP_ADD || !add->src[0] || !add->src[1]) return;
    for (int s = 0; s < 2; s++)
        if (add->src[s]->ndim != n->out->ndim || memcmp(add->src[s]->shape, n->out->shape, sizeof n->out->shape) != 0)
            return;
    add->fused_with = n;
}

HPMLG_FN void hpmlg_norm(hpmlg_device *d, hpml_node *n, bool back)
{
    int64_t       cols = hpmlg_last_dim(n->out), rows = hpml_tensor_count(n->out) / cols;
    float2       *saved = (float2 *)n->saved;
    hpmlg_array   x = hpmlg_value(n->src[0]), p = hpmlg_none(), q = p;
    const float  *gamma = hpmlg_param_of(n, 1);
    bool          centred = n->op == HPML_OP_LAYERNORM;
    if (!back) {
        const hpml_node *sum = n->src[0]->node;
        if (sum && sum->fused_with == n && d->passing) p = hpmlg_value(sum->src[0]), q = hpmlg_value(sum->src[1]);
        return HPMLG_ROWS(d, hpmlg_k_norm, hpmlg_row_blocks(d, rows, cols), cols, 0, hpmlg_value(n->out), x, p, q,
                          gamma, hpmlg_param_of(n, 2), saved, rows, cols, n->attr.norm.eps, centred);
    }
    int         parts  = hpmlg_norm_parts(d, rows, cols);
    float      *dgamma = hpmlg_param_grad(n, 1), *dbeta = hpmlg_param_grad(n, 2);
    float      *part   = dgamma || dbeta ? (float *)n->scratch : NULL;
    size_t      shared = cols <= HPMLG_WARP_ROW ? (size_t)(2 * cols) * sizeof(float) : 0;
    HPMLG_ROWS(d, hpmlg_k_norm_back, (unsigned)parts, cols, shared, hpmlg_grad(n->src[0]), x, hpmlg_grad(n->out), gamma,
               (const float2 *)saved, part, rows, cols, centred, n->accumulate[0]);
    if (part) HPMLG_RUN(d, hpmlg_k_norm_params, (unsigned)((2 * cols + HPMLG_WARP - 1) / HPMLG_WARP), 256, 0, dgamma,
                        dbeta, part, parts, cols, n->accumulate[1], n->accumulate[2]);
}
HPMLG_OP(layernorm) { return hpmlg_norm(d, n, back); }
HPMLG_OP(rmsnorm) { return hpmlg_norm(d, n, back); }

// ---------------------------------------------------------------------------------------------------------------------
// >>gpu-batchnorm   batch normalization
// ---------------------------------------------------------------------------------------------------------------------

/* Per channel, N = B P numbers, P = H W: y = gamma (x - mean) rstd + beta. First sums over pieces of a channel, one
   block each, then one thread for a channel joins the pieces in order, then all elements are written. Means and squares
   are kept as (count, mean, sum of squared distances to it) and joined so (Chan, Golub & LeVeque 1979), which loses
   nothing where the mean is far from zero. A thread joins its own as floats, so they are less the channel's first
   number. Backward the same places hold plain sums: mean is s1 = sum dy and square that of dy (x - mean), of which s2 =
   sum dy xhat is made. A block takes one channel, or 32 channels side by side where P is 1. */

#define HPMLG_BN_SPLITS 64

template <class T> struct hpmlg_moments { T n, mean, square; };

template <bool back, class T>
HPMLG_DEVICE hpmlg_moments<T> hpmlg_moments_join(hpmlg_moments<T> a, hpmlg_moments<T> b)
{
    hpmlg_moments<T> s = { a.n + b.n, a.mean + b.mean, a.square + b.square };
    T                apart = b.mean - a.mean;
    if (back || s.n == 0) return s;
    s.mean = a.mean + apart * (b.n / s.n);
    s.square += apart * apart * (a.n * b.n / s.n);
    return s;
}

typedef struct hpmlg_bn {
    int64_t      B, C, P, N, width; /* width: channels of a block */
    int64_t      splits, unit;      /* pieces of a channel; numbers taken at once: 8 where planes are whole eights */
    hpmlg_array  x, y, dx, dy;
    const float *gamma, *beta;      /* (C), or NULL; as their gradients */
    float       *dgamma, *dbeta, *running_mean, *running_var;
    float2      *saved, *means;     /* (C): mean and rstd; s1 / N and s2 / N */
    float       *rest;              /* (C): the mean is saved[c].x + rest[c], as in layernorm */
    hpmlg_moments<double> *part;    /* (splits, C) */
    float        eps, momentum;
    bool         train, relu, add[3];
} hpmlg_bn;

/* Where unit u of channel c stands. */
HPMLG_DEVICE int64_t hpmlg_bn_at(const hpmlg_bn &s, int64_t c, int64_t u)
{
    int64_t i = u * s.unit, image = hpmlg_quotient(i, s.P);
    return (image * s.C + c) * s.P + (i - image * s.P);
}

/* Up to 8 numbers of a channel, for the unit u of this thread and those a block's step further on; how many. */
HPMLG_DEVICE int hpmlg_bn_take(const hpmlg_bn &s, hpmlg_array x, int64_t c, int64_t u, int64_t to, hpmlg_eight *e)
{
    int count = 0;
    if (s.unit == 8) {
        *e = hpmlg_get8(x, hpmlg_bn_at(s, c, u) >> 3);
        return 8;
    }
    for (int j = 0; j < 8; j++) {
        int64_t v = u + j * (blockDim.x / s.width);
        e->v[j]   = v < to ? hpmlg_get(x, hpmlg_bn_at(s, c, v)) : 0;
        count += v < to;
    }
    return count;
}

template <bool back> static __global__ void hpmlg_k_bn_pieces(hpmlg_bn s)
{
    typedef typename std::conditional<back, double, float>::type T; /* what a thread joins its own in */
    __shared__ hpmlg_moments<double> all[256];
    int64_t c = (int64_t)blockIdx.x * s.width + threadIdx.x % s.width, units = s.N / s.unit;
    int64_t to = c < s.C ? units * (blockIdx.y + 1) / s.splits : 0;
    int64_t step = (int64_t)(blockDim.x / s.width) * (s.unit == 8 ? 1 : 8);
    float   mean = back && c < s.C ? s.saved[c].x : 0;
    float   pivot = !back && units > 0 && c < s.C ? hpmlg_get(s.x, hpmlg_bn_at(s, c, 0)) : 0; /* its first number */
    hpmlg_moments<T> mine = { 0, 0, 0 };
    for (int64_t u = units * blockIdx.y / s.splits + threadIdx.x / s.width; u < to; u += step) {
        hpmlg_eight e, f, z;
        float       sum = 0, other = 0, n = (float)hpmlg_bn_take(s, s.x, c, u, to, &e);
        if (back) {
            hpmlg_bn_take(s, s.dy, c, u, to, &f);
            if (s.relu) hpmlg_bn_take(s, s.y, c, u, to, &z);
            for (int j = 0; j < 8; j++) { /* what is not there is 0 in dy */
                float v = s.relu && !(z.v[j] > 0) ? 0 : f.v[j];
                sum += v, other += v * (e.v[j] - mean);
            }
        } else {
            for (int j = 0; j < 8; j++) sum += e.v[j] = (float)j < n ? e.v[j] - pivot : 0;
            sum /= n;
            for (int j = 0; j < 8; j++) other += (float)j < n ? (e.v[j] - sum) * (e.v[j] - sum) : 0;
        }
        mine = hpmlg_moments_join<back, T>(mine, { back ? 0 : (T)n, (T)sum, (T)other });
    }
    all[threadIdx.x] = { (double)mine.n, (double)mine.mean + (double)pivot, (double)mine.square };
    for (int h = (int)blockDim.x / 2; h >= s.width; h /= 2) {
        __syncthreads();
        if ((int)threadIdx.x < h)
            all[threadIdx.x] = hpmlg_moments_join<back>(all[threadIdx.x], all[threadIdx.x + h]);
    }
    if (threadIdx.x < s.width && c < s.C) s.part[blockIdx.y * s.C + c] = all[threadIdx.x];
}

/* What the pieces of each channel say: its statistics, which also move the running ones (these are taken where nothing
   is trained); backward the gradients of gamma and beta, and the means that dx needs. */
template <bool back> static __global__ void hpmlg_k_bn_channels(hpmlg_bn s)
{
    int64_t c = hpmlg_me();
    hpmlg_moments<double> all = { 0, 0, 0 };
    if (c >= s.C) return;
    for (int64_t i = 0; i < s.splits && (back || s.train); i++)
        all = hpmlg_moments_join<back>(all, s.part[i * s.C + c]);
    if (back) {
        double N = (double)s.N, s2 = (double)s.saved[c].y * (all.square - (double)s.rest[c] * all.mean);
        if (s.dgamma) s.dgamma[c] = (s.add[1] ? s.dgamma[c] : 0) + (float)s2;
        if (s.dbeta) s.dbeta[c] = (s.add[2] ? s.dbeta[c] : 0) + (float)all.mean;
        s.means[c] = s.train ? make_float2((float)(all.mean / N), (float)(s2 / N)) : make_float2(0, 0);
        return;
    }
    double mean = s.train ? all.mean : s.running_mean[c], var = s.train ? all.square / all.n : s.running_var[c];
    s.saved[c]  = make_float2((float)mean, (float)(1 / sqrt(var + (double)s.eps)));
    s.rest[c]   = (float)(mean - (double)s.saved[c].x);
    if (!s.train) return;
    s.running_mean[c] = (1 - s.momentum) * s.running_mean[c] + s.momentum * (float)mean;
    s.running_var[c]  = (1 - s.momentum) * s.running_var[c] + s.momentum * (float)(all.square / fmax(all.n - 1, 1.0));
}

/* y = a (x - mean) + b, a = rstd gamma, b = beta - rest a, with a relu if wanted; dx (+)= a (dy - s1 / N - xhat s2 /
   N). Eights of the whole array; channels change within. */
template <bool back> static __global__ void hpmlg_k_bn_apply(hpmlg_bn s)
{
    int64_t n = s.B * s.C * s.P;
    HPMLG_EIGHTS(i, n) {
        int64_t     plane = hpmlg_quotient(i, s.P), r = i - plane * s.P, c = plane - hpmlg_quotient(plane, s.C) * s.C;
        hpmlg_eight e = hpmlg_row_get(s.x, 0, n, i, 0), f, z;
        if (back) f = hpmlg_row_get(s.dy, 0, n, i, 0);
        if (back && s.relu) z = hpmlg_row_get(s.y, 0, n, i, 0);
        float a = 0, b = 0, two = 0, mean = 0;
        for (int j = 0; j < 8; j++, r++) {
            if (r == s.P) r = 0, c = c + 1 == s.C ? 0 : c + 1;
            if (j == 0 || r == 0) {
                float rstd = s.saved[c].y, rest = s.rest[c];
                mean = s.saved[c].x;
                a    = rstd * (s.gamma ? s.gamma[c] : 1);
                two  = back ? rstd * s.means[c].y : 0;
                b    = back ? s.means[c].x - rest * two : (s.beta ? s.beta[c] : 0) - rest * a;
            }
            if (back) e.v[j] = a * ((s.relu && !(z.v[j] > 0) ? 0 : f.v[j]) - b - (e.v[j] - mean) * two);
            else e.v[j] = hpmlg_act(s.relu ? HPML_ACT_RELU : HPML_ACT_NONE, 0, a * (e.v[j] - mean) + b);
        }
        hpmlg_row_put(back ? s.dx : s.y, 0, n, i, e, back && s.add[0]);
    }
}

HPMLG_FN hpmlg_bn hpmlg_bn_of(const hpmlg_device *d, const hpml_node *n, bool train)
{
    const int64_t *y = n->out->shape; /* dimensions that are not there are 1 */
    hpml_tensor *const *src = n->src;
    hpmlg_bn       s = {};
    s.B = y[0], s.C = y[1], s.P = y[2] * y[3], s.N = s.B * s.P, s.width = s.P == 1 ? 32 : 1;
    int64_t   blocks = (s.C + s.width - 1) / s.width, splits = (d->sms * 8 + blocks - 1) / blocks;
    int64_t   turn = 8 * (256 / s.width), most = (s.N + turn - 1) / turn; /* 8 numbers a thread */
    uintptr_t places = (uintptr_t)src[0]->raw | (uintptr_t)n->out->raw | (uintptr_t)n->out->raw_grad;
    s.splits = splits < most ? splits : most;
    if (s.splits > HPMLG_BN_SPLITS) s.splits = HPMLG_BN_SPLITS;
    s.unit  = s.P % 8 == 0 && places % 16 == 0 ? 8 : 1;
    s.x     = hpmlg_value(src[0]), s.dx = hpmlg_grad(src[0]), s.y = hpmlg_value(n->out), s.dy = hpmlg_grad(n->out);
    s.gamma = hpmlg_param_of(n, 1), s.dgamma = hpmlg_param_grad(n, 1);
    s.beta  = hpmlg_param_of(n, 2), s.dbeta = hpmlg_param_grad(n, 2);
    s.part  = (hpmlg_moments<double> *)n->scratch, s.means = (float2 *)(s.part + s.C * s.splits);
    s.saved = (float2 *)n->saved, s.running_mean = src[3]->data, s.running_var = src[4]->data;
    s.rest  = (float *)(s.saved + s.C);
    s.eps   = n->attr.norm.eps, s.momentum = n->attr.norm.momentum, s.train = train;
    s.relu  = n->attr.norm.act == HPML_ACT_RELU;
    for (int i = 0; i < 3; i++) s.add[i] = n->accumulate[i];
    return s;
}

HPMLG_FN size_t hpmlg_bn_scratch(const hpmlg_device *d, const hpml_node *n)
{
    hpmlg_bn s = hpmlg_bn_of(d, n, true);
    return (size_t)(s.C * s.splits) * sizeof *s.part + (size_t)s.C * sizeof *s.means;
}

/* Where ranks share a batch: the pieces of each channel are joined here on the host, as sums about 0 added up over the
   ranks, and go back as the one piece. The host waits, so such passes are not recorded. */
HPMLG_FN void hpmlg_bn_share(const hpml_run *run, hpmlg_device *d, hpmlg_bn *s, bool back)
{
    size_t      bytes = (size_t)(s->C * s->splits) * sizeof *s->part;
    hpmlg_moments<double> *p = (hpmlg_moments<double> *)hpml_ctx_alloc(run->ctx, bytes, NULL);
    double     *sum = (double *)hpml_ctx_alloc(run->ctx, (size_t)(2 * s->C + 1) * sizeof(double), NULL);
    hpml_status status = p && sum ? hpmlg_read(d, p, s->part, bytes) : HPML_ERR_MEMORY;
    for (int64_t i = 0; i < s->C * s->splits && status == HPML_OK; i++) {
        double *to = sum + 2 * (i % s->C), n = back ? 0 : p[i].n;
        to[0] += back ? p[i].mean : n * p[i].mean, to[1] += p[i].square + n * p[i].mean * p[i].mean;
    }
    if (status == HPML_OK) sum[2 * s->C] = (double)s->N, status = run->sum(run->sum_user, sum, 2 * s->C + 1);
    for (int64_t c = 0; c < s->C && status == HPML_OK; c++) {
        double a = sum[2 * c], b = sum[2 * c + 1], N = sum[2 * s->C];
        p[c].n = N, p[c].mean = back ? a : a / N, p[c].square = back ? b : fmax(b - a * a / N, 0);
    }
    if (status == HPML_OK) s->N = (int64_t)sum[2 * s->C], status = hpmlg_write(d, s->part, p, (size_t)s->C * sizeof *p);
    if (status != HPML_OK) hpml_ctx_fail(run->ctx, status, "batchnorm: the sums over all ranks could not be taken");
    hpml_ctx_release(run->ctx, p);
    hpml_ctx_release(run->ctx, sum);
    s->splits = 1;
}

HPMLG_OP(batchnorm)
{
    hpmlg_bn      s = hpmlg_bn_of(d, n, run->train), all;
    bool          shared = run->train && run->sum;
    unsigned      channels = (unsigned)((s.C + 127) / 128);
    dim3          grid((unsigned)((s.C + s.width - 1) / s.width), (unsigned)s.splits);
    if (run->idle) s.B = s.N = 0;
    all = s;
    if (back || s.train) HPMLG_RUN_EITHER(d, back, hpmlg_k_bn_pieces, true, false, grid, 256, 0, s);
    if (back) HPMLG_RUN(d, hpmlg_k_bn_channels<true>, channels, 128, 0, s);
    if (shared) hpmlg_bn_share(run, d, &all, back);
    all.dgamma = all.dbeta = NULL; /* gamma's and beta's are this rank's, above; the means are of all */
    if (!back || shared) HPMLG_RUN_EITHER(d, back, hpmlg_k_bn_channels, true, false, channels, 128, 0, all);
    if (s.N == 0 || (back && !s.dx.p)) return;
    HPMLG_RUN_EITHER(d, back, hpmlg_k_bn_apply, true, false, hpmlg_blocks(d, s.N * s.C, 2048), 256, 0, s);
}

// ---------------------------------------------------------------------------------------------------------------------
// >>gpu-pool   max and average pooling
// ---------------------------------------------------------------------------------------------------------------------

/* One thread for each output; backward one for each input, which gathers from the windows that hold it: nothing is
   scattered, the order is fixed. Max keeps the place of each winner within its plane, a NaN wins; average divides by
   the pixels inside the image. */
typedef struct hpmlg_pool {
    hpmlg_array x, y; /* backward: gradients */
    int        *at;   /* winners, NULL: average */
    int64_t     planes;
    int         H, W, OH, OW, kh, kw, stride, pad;
    bool        add;
} hpmlg_pool;

/* i = (plane, row, column) of planes of (h, w); returns the plane. */
HPMLG_DEVICE int64_t hpmlg_place(int64_t i, int h, int w, int *row, int *column)
{
    int64_t q = hpmlg_quotient(i, w), plane = hpmlg_quotient(q, h);
    *column = (int)(i - q * w), *row = (int)(q - plane * h);
    return plane;
}

/* The part [from, to) of window o that lies inside [0, size). */
HPMLG_DEVICE void hpmlg_window(int o, int stride, int pad, int kernel, int size, int *from, int *to)
{
    int first = o * stride - pad, end = first + kernel;
    *from = first < 0 ? 0 : first, *to = end < size ? end : size;
}

static __global__ void hpmlg_k_pool(hpmlg_pool p)
{
    HPMLG_EACH(i, p.planes * p.OH * p.OW) {
        int     oh, ow, r0, r1, c0, c1;
        int64_t x = hpmlg_place(i, p.OH, p.OW, &oh, &ow) * p.H * p.W;
        hpmlg_window(oh, p.stride, p.pad, p.kh, p.H, &r0, &r1);
        hpmlg_window(ow, p.stride, p.pad, p.kw, p.W, &c0, &c1);
        int   best = r0 * p.W + c0;
        float v = p.at ? hpmlg_get(p.x, x + best) : 0;
        for (int r = r0; r < r1; r++)
            for (int c = c0; c < c1; c++) {
                float w = hpmlg_get(p.x, x + r * p.W + c);
                if (!p.at) v += w;
                else if (!(w <= v) && v == v) v = w, best = r * p.W + c;
            }
        if (p.at) p.at[i] = best;
        hpmlg_put(p.y, i, p.at ? v : v * (1 / (float)((r1 - r0) * (c1 - c0))));
    }
}

static __global__ void hpmlg_k_pool_back(hpmlg_pool p)
{
    HPMLG_EACH(i, p.planes * p.H * p.W) {
        int     r, c, r0, r1, c0, c1;
        int64_t y = hpmlg_place(i, p.H, p.W, &r, &c) * p.OH * p.OW;
        int     first_h = r + p.pad < p.kh ? 0 : (r + p.pad - p.kh) / p.stride + 1, last_h = (r + p.pad) / p.stride;
        int     first_w = c + p.pad < p.kw ? 0 : (c + p.pad - p.kw) / p.stride + 1, last_w = (c + p.pad) / p.stride;
        float   sum = p.add ? hpmlg_get(p.x, i) : 0;
        for (int oh = first_h; oh <= last_h && oh < p.OH; oh++)
            for (int ow = first_w; ow <= last_w && ow < p.OW; ow++) {
                int64_t o = y + oh * p.OW + ow;
                if (p.at) {
                    if (p.at[o] == r * p.W + c) sum += hpmlg_get(p.y, o);
                    continue;
                }
                hpmlg_window(oh, p.stride, p.pad, p.kh, p.H, &r0, &r1);
                hpmlg_window(ow, p.stride, p.pad, p.kw, p.W, &c0, &c1);
                sum += hpmlg_get(p.y, o) * (1 / (float)((r1 - r0) * (c1 - c0)));
            }
        hpmlg_put(p.x, i, sum);
    }
}

HPMLG_FN void hpmlg_pool_pass(hpmlg_device *d, hpml_node *n, bool back)
{
    const int64_t *x = n->src[0]->shape, *y = n->out->shape;
    hpmlg_pool     p = {};
    p.x  = hpmlg_either(n->src[0], back), p.y = hpmlg_either(n->out, back);
    p.at = n->op == HPML_OP_MAX_POOL2D ? (int *)n->saved : NULL;
    p.planes = x[0] * x[1], p.H = (int)x[2], p.W = (int)x[3], p.OH = (int)y[2], p.OW = (int)y[3];
    p.kh = n->attr.conv.kernel[0], p.kw = n->attr.conv.kernel[1], p.stride = n->attr.conv.stride[0];
    p.pad = n->attr.conv.padding[0], p.add = hpmlg_adds(n, back);
    if (back) return HPMLG_DEAL(d, hpmlg_k_pool_back, p.planes * p.H * p.W, 256, p);
    if (!p.at && p.pad == 0 && p.kh == p.H && p.kw == p.W) /* global: the mean of each plane */
        return hpmlg_sum_run(d, p.y, p.x, hpmlg_stretched(p.planes, x[2] * x[3], 1), 1 / (float)(x[2] * x[3]), false);
    HPMLG_DEAL(d, hpmlg_k_pool, p.planes * p.OH * p.OW, 256, p);
}
HPMLG_OP(max_pool2d) { return hpmlg_pool_pass(d, n, back); }
HPMLG_OP(avg_pool2d) { return hpmlg_pool_pass(d, n, back); }

// ---------------------------------------------------------------------------------------------------------------------
// >>gpu-random   Philox, dropout, embedding
// ---------------------------------------------------------------------------------------------------------------------

/* Words 4 block to 4 block + 3 of a stream, as hpml_philox4x32 has them. */
HPMLG_DEVICE uint4 hpmlg_philox(unsigned long long seed, unsigned long long stream, unsigned long long block)
{
    unsigned k0 = (unsigned)seed, k1 = (unsigned)(seed >> 32);
    uint4    c = make_uint4((unsigned)block, (unsigned)(block >> 32), (unsigned)stream, (unsigned)(stream >> 32));
    HPMLG_UNROLL for (int round = 0; round < 10; round++) {
        unsigned h0 = __umulhi(0xD2511F53u, c.x), l0 = 0xD2511F53u * c.x;
        unsigned h1 = __umulhi(0xCD9E8D57u, c.z), l1 = 0xCD9E8D57u * c.z;
        c = make_uint4(h1 ^ c.y ^ k0, l1, h0 ^ c.w ^ k1, l0);
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    return c;
}

/* Words first to first + 7 of a stream: two blocks, three where the first word is not the first of its block. */
HPMLG_DEVICE void hpmlg_words8(unsigned w[8], unsigned long long seed, unsigned long long stream,
                               unsigned long long first)
{
    uint4    a = hpmlg_philox(seed, stream, first / 4), b = hpmlg_philox(seed, stream, first / 4 + 1);
    uint4    c = first % 4 ? hpmlg_philox(seed, stream, first / 4 + 2) : a;
    unsigned all[12] = { a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w, c.x, c.y, c.z, c.w };
    HPMLG_UNROLL for (int j = 0; j < 10; j++) all[j] = first & 2 ? all[j + 2] : all[j];
    HPMLG_UNROLL for (int j = 0; j < 8; j++) w[j] = first & 1 ? all[j + 1] : all[j];
}

/* y (+)= x scale where the word of the element is `least` or more, else 0. Word i belongs to element i counted from the
   first sample of the global batch; `each`: elements of a sample. */
static __global__ void hpmlg_k_dropout(hpmlg_array y, hpmlg_array x, const hpmlg_now *now, int index, unsigned least,
                                       float scale, int64_t each, int64_t n, bool add)
{
    unsigned long long stream = now->step << 24 ^ (unsigned long long)index ^ 0xdull << 60;
    unsigned long long first = now->sample * (unsigned long long)each, seed = now->seed;
    HPMLG_EIGHTS(i, n) {
        hpmlg_eight e = hpmlg_row_get(x, 0, n, i, 0);
        unsigned    w[8];
        hpmlg_words8(w, seed, stream, first + (unsigned long long)i);
        for (int j = 0; j < 8; j++) e.v[j] = w[j] >= least ? e.v[j] * scale : 0;
        hpmlg_row_put(y, 0, n, i, e, add);
    }
}

HPMLG_OP(dropout)
{
    hpmlg_array to    = hpmlg_writes(n, back), from = hpmlg_reads(n, back);
    float       p     = n->attr.dropout.p;
    int64_t     count = hpml_tensor_count(n->out), each = 0;
    bool        add   = hpmlg_adds(n, back);
    if (!run->train || p <= 0) return from.p == to.p && !add ? (void)0 : hpmlg_copy_run(d, to, from, count, add);
    if (n->out->batch_rows) each = count / (n->out->shape[0] / n->out->batch_rows);
    hpmlg_now_set(d, run);
    HPMLG_DEAL(d, hpmlg_k_dropout, count, 2048, to, from, (const hpmlg_now *)d->now, n->index,
               (unsigned)((double)p * 4294967296.0), 1 / (1 - p), each, count, add);
}

/* The gradient of the table without float atomics: the positions of each token are brought together and sorted, then
   every row of the table adds its own in order. Places come from integer atomics: which one a position gets first is
   chance, but ranks among a token's positions put them in order. A token of more than HPMLG_LONG positions, such
   as a blank, is long: its positions are cut into pieces of HPMLG_LONG, summed piece by piece, then added in order. */
#define HPMLG_LONG 64
typedef struct hpmlg_buckets {
    const int *token;              /* (tokens) */
    int64_t    tokens, vocabulary, most; /* most: upper bound of the number of pieces */
    int       *count, *used;       /* (vocabulary): positions of a token; (2): entries used of `order`, `piece` */
    int       *start;              /* (vocabulary): offset of a token's positions in `order` */
    int       *first;              /* (vocabulary): index in `piece` of a long token's first piece */
    int       *slot, *order;       /* (tokens): index of a position in its token, then sorted positions; unsorted */
    int       *piece;              /* (most): the token that a piece belongs to */
    float     *sums;               /* (most, width): the sum of each piece */
} hpmlg_buckets;

/* y[i] = table[token[i]], a warp for each row; a token out of range gets a row of zeros and an error. */
static __global__ void hpmlg_k_embedding(hpmlg_array y, hpmlg_array table, hpmlg_buckets b, int64_t width,
                                         hpmlg_note *note, int *taken, const hpml_node *node)
{
    int lane = (int)threadIdx.x % HPMLG_WARP;
    HPMLG_WARPS(i, b.tokens) {
        int  t  = b.token[i];
        bool ok = t >= 0 && t < b.vocabulary;
        if (!ok && lane == 0) hpmlg_complain(note, taken, i, t, node);
        for (int64_t c = 8 * lane; c < width; c += 8 * HPMLG_WARP)
            hpmlg_row_put(y, i, width, c, hpmlg_row_get(table, t, ok ? width : 0, c, 0), false);
    }
}

/* Step 0 counts positions and gives each its slot, in step 1 the position with slot 0 reserves entries of `order` for
   its token, step 2 fills `order`, step 3 sorts each token's positions, into `slot` because the slots are used up. */
static __global__ void hpmlg_k_bucket(hpmlg_buckets b, int step)
{
    int64_t i = hpmlg_me();
    int     t = i < b.tokens ? b.token[i] : -1, rank = 0;
    if (t < 0 || t >= b.vocabulary) return;
    if (step == 0) b.slot[i] = atomicAdd(&b.count[t], 1);
    if (step == 1 && b.slot[i] == 0) {
        int n = b.count[t], pieces = n > HPMLG_LONG ? (n + HPMLG_LONG - 1) / HPMLG_LONG : 0;
        b.start[t] = atomicAdd(&b.used[0], n);
        if (pieces) b.first[t] = atomicAdd(&b.used[1], pieces);
        for (int j = 0; j < pieces; j++) b.piece[b.first[t] + j] = t;
    }
    if (step == 2) b.order[b.start[t] + b.slot[i]] = (int)i;
    if (step != 3) return;
    for (int j = 0; j < b.count[t]; j++) rank += b.order[b.start[t] + j] < (int)i;
    b.slot[b.start[t] + rank] = (int)i;
}

/* The sum, for columns c to c + 7, of n rows of x: rows at[0], at[1], ..., or, where `at` is NULL, the first n. */
HPMLG_DEVICE hpmlg_eight hpmlg_rows_sum(hpmlg_array x, const int *at, int n, int64_t width, int64_t c)
{
    hpmlg_eight sum = {}, e[4];
    for (int k = 0; k < n; k += 4) { /* keeps four loads in flight */
        HPMLG_UNROLL for (int q = 0; q < 4; q++) {
            bool    in  = k + q < n;
            int64_t row = in && at ? at[k + q] : k + q;
            e[q] = hpmlg_row_get(x, row, in ? width : 0, c, 0);
        }
        HPMLG_UNROLL for (int q = 0; q < 4; q++)
            for (int j = 0; j < 8; j++) sum.v[j] += e[q].v[j];
    }
    return sum;
}

/* Sums each piece of a long token: a warp for 256 columns of a piece. */
static __global__ void hpmlg_k_embedding_pieces(hpmlg_array dy, hpmlg_buckets b, int64_t width)
{
    int64_t     parts = (width + 255) / 256;
    hpmlg_array sums = { b.sums, HPML_DTYPE_F32 };
    HPMLG_WARPS(u, b.used[1] * parts) {
        int64_t p = hpmlg_quotient(u, parts), c = (u - p * parts) * 256 + 8 * (threadIdx.x % HPMLG_WARP);
        int     t = b.piece[p], from = (int)(p - b.first[t]) * HPMLG_LONG, n = b.count[t] - from;
        hpmlg_row_put(sums, p, width, c,
                      hpmlg_rows_sum(dy, b.slot + b.start[t] + from, n < HPMLG_LONG ? n : HPMLG_LONG, width, c), false);
    }
}

/* Row t of dw (+)= the sum of dy over the positions of token t: a warp for 256 columns of a row. */
static __global__ void hpmlg_k_embedding_back(hpmlg_array dw, hpmlg_array dy, hpmlg_buckets b, int64_t width, bool add)
{
    int64_t parts = (width + 255) / 256;
    HPMLG_WARPS(u, b.vocabulary * parts) {
        int64_t     t = hpmlg_quotient(u, parts), c = (u - t * parts) * 256 + 8 * (threadIdx.x % HPMLG_WARP);
        int         n = b.count[t];
        bool        cut = n > HPMLG_LONG;
        const int  *at = n && !cut ? b.slot + b.start[t] : NULL;
        hpmlg_array from = dy;
        if (n == 0 && add) continue;
        if (cut) {
            from.p = b.sums + b.first[t] * width, from.type = HPML_DTYPE_F32;
            n      = (n + HPMLG_LONG - 1) / HPMLG_LONG;
        }
        hpmlg_row_put(dw, t, width, c, hpmlg_rows_sum(from, at, n, width, c), add);
    }
}

/* Lays the arrays out in the node's scratch memory, where it is allocated. Returns the bytes that they need. */
HPMLG_FN size_t hpmlg_embedding_layout(const hpml_node *n, hpmlg_buckets *b)
{
    b->tokens = hpml_tensor_count(n->src[0]), b->vocabulary = n->src[1]->shape[0];
    b->most   = 2 * b->tokens / HPMLG_LONG; /* a token of 65 has two pieces */
    int64_t sums  = b->most * n->src[1]->shape[1];
    size_t  bytes = (size_t)(sums + 3 * b->vocabulary + 2 + 2 * b->tokens + b->most) * sizeof(int);
    if (!n->scratch) return bytes;
    b->sums  = (float *)n->scratch;
    b->count = (int *)n->scratch + sums, b->used = b->count + b->vocabulary, b->start = b->used + 2;
    b->first = b->start + b->vocabulary, b->slot = b->first + b->vocabulary, b->order = b->slot + b->tokens;
    b->piece = b->order + b->tokens;
    return bytes;
}

HPMLG_OP(embedding)
{
    hpmlg_array   table = hpmlg_either(n->src[1], back), y = hpmlg_either(n->out, back);
    int64_t       width = n->src[1]->shape[1], parts = (width + 255) / 256;
    hpmlg_buckets b     = {};
    b.token = (const int *)n->src[0]->raw;
    hpmlg_embedding_layout(n, &b);
    if (!back)
        return HPMLG_DEAL(d, hpmlg_k_embedding, b.tokens, 8, y, table, b, width, d->note, d->note_taken,
                          (const hpml_node *)n);
    if (!table.p) return;
    hpmlg_zero(d, b.count, (size_t)(b.vocabulary + 2) * sizeof(int));
    for (int step = 0; step < 4; step++)
        HPMLG_RUN(d, hpmlg_k_bucket, (unsigned)((b.tokens + 255) / 256), 256, 0, b, step);
    if (b.most > 0) HPMLG_DEAL(d, hpmlg_k_embedding_pieces, b.most * parts, 8, y, b, width);
    HPMLG_DEAL(d, hpmlg_k_embedding_back, b.vocabulary * parts, 8, table, y, b, width, n->accumulate[1]);
}

// ---------------------------------------------------------------------------------------------------------------------
// >>gpu-operand   operands of products: where their elements lie
// ---------------------------------------------------------------------------------------------------------------------

/* All products, convolutions included, are one sum, c[row, col] = sum over k of a[row, k] b[k, col], and differ in
   where an operand's elements lie. An operand has two axes, its lines (rows of a, columns of b) and k; an axis splits
   its index into up to three, i = (q nu + u) nv + v, and says how far apart each lie, in memory and, for images, in
   height and width; an element outside of the image is 0. So one kernel gathers whatever there is (edges, any strides,
   mixed types, f32, TF32 or halves), and a second one copies 16 bytes at a time where halves lie densely. A block of
   128 threads makes a tile of T x T. When there are too few tiles for the device, k is split and the sums of the
   pieces are added in order. */

typedef struct hpmlg_divisor { unsigned shift, mul, by, unused; } hpmlg_divisor;

/* n / by for n below 2^31 as a multiplication: mul = ceil(2^shift / by), shift = 31 + ceil(log2(by)). */
HPMLG_FN hpmlg_divisor hpmlg_divisor_of(int64_t by)
{
    by = by < 1 ? 1 : by;
    hpmlg_divisor d = { 31, 0, (unsigned)by, 0 };
    while (((int64_t)1 << (d.shift - 31)) < by) d.shift++;
    d.mul = (unsigned)((((uint64_t)1 << d.shift) + (uint64_t)by - 1) / (uint64_t)by);
    return d;
}

HPMLG_DEVICE unsigned hpmlg_divide(unsigned n, hpmlg_divisor d) { return (unsigned)((uint64_t)n * d.mul >> d.shift); }

typedef struct hpmlg_axis {
    hpmlg_divisor block, row; /* nu nv; nv */
    int64_t   q, u, v;      /* elements from one to the next */
    int16_t   h0, h, w0, w; /* height h0 + u h, width w0 + v w */
} hpmlg_axis;

typedef struct __align__(16) hpmlg_spot {
    int64_t at; /* below 0: beyond the end */
    int     h, w;
} hpmlg_spot;

HPMLG_FN hpmlg_axis hpmlg_folded(int64_t nu, int64_t nv, int64_t q, int64_t u, int64_t v)
{
    hpmlg_axis x = {};
    x.block = hpmlg_divisor_of(nu * nv), x.row = hpmlg_divisor_of(nv), x.q = q, x.u = u, x.v = v;
    return x;
}

HPMLG_FN hpmlg_axis hpmlg_plain(int64_t step) { return hpmlg_folded(1, 1, step, 0, 0); }

HPMLG_DEVICE hpmlg_spot hpmlg_spot_at(const hpmlg_axis &x, int64_t i, int64_t end)
{
    hpmlg_spot s = { -1, 0, 0 };
    if (i >= end) return s;
    unsigned q = hpmlg_divide((unsigned)i, x.block), r = (unsigned)i - q * x.block.by;
    unsigned u = hpmlg_divide(r, x.row), v = r - u * x.row.by;
    s.at = q * x.q + u * x.u + v * x.v;
    s.h  = x.h0 + (int)u * x.h;
    s.w  = x.w0 + (int)v * x.w;
    return s;
}

typedef struct hpmlg_side {
    hpmlg_array x;
    int64_t     batch;        /* elements to the next matrix */
    hpmlg_axis  line, k;
    int64_t     H, W;         /* of the image; H 0: not an image */
    int64_t     along_k;      /* neighbours in k are closer in memory than neighbouring lines */
    int64_t     ld;           /* not 0: dense along one axis, and this far apart along the other */
} hpmlg_side;

HPMLG_DEVICE float hpmlg_pick(const hpmlg_side &o, int64_t base, hpmlg_spot line, hpmlg_spot k)
{
    int64_t at = base + line.at + k.at;
    if (line.at < 0 || k.at < 0) return 0;
    if (o.H) {
        int h = line.h + k.h, w = line.w + k.w;
        if ((unsigned)h >= (unsigned)o.H || (unsigned)w >= (unsigned)o.W) return 0;
        at += (int64_t)h * o.W + w;
    }
    return hpmlg_get(o.x, at);
}

/* c = act(alpha a b (+ c) + bias); what goes into act is kept in z, where there is one. back: c = (alpha a b (+ c))
   act'(z). */
typedef struct hpmlg_job {
    int64_t       m, n, k, batch;
    hpmlg_side a, b;
    hpmlg_array   c, z;
    int64_t       ldc, c_batch;
    hpmlg_axis    col;           /* of c */
    int64_t       flat, eights;  /* columns of c lie side by side; rows of c can be moved 8 at a time */
    int64_t       add;
    float         alpha, slope;
    const float  *bias;
    int64_t       bias_row, bias_col, bias_batch; /* elements to the next */
    int64_t       act, back;
    int64_t       half;          /* HPML_DTYPE_BF16 or _F16: what halves are multiplied as */
    float        *part;          /* (splits, batch, m, n) sums of the pieces of k, when there are several */
    int64_t       splits, k_each;
    int64_t       tiles_m, tiles_n;
} hpmlg_job;

HPMLG_DEVICE float hpmlg_end_of(const hpmlg_job &g, int64_t batch, int64_t row, int64_t col, float v)
{
    return g.bias ? v + g.bias[batch * g.bias_batch + row * g.bias_row + col * g.bias_col] : v;
}

/* One sum is complete. */
HPMLG_DEVICE void hpmlg_emit(const hpmlg_job &g, int64_t batch, int64_t row, int64_t col, float v)
{
    int64_t at = batch * g.c_batch + row * g.ldc + (g.flat ? col : hpmlg_spot_at(g.col, col, g.n).at);
    v = hpmlg_end_of(g, batch, row, col, v * g.alpha);
    if (g.add) v += hpmlg_get(g.c, at);
    if (g.back) v *= hpmlg_slope_far((int)g.act, g.slope, hpmlg_get(g.z, at));
    else if (g.z.p) hpmlg_put(g.z, at, v);
    if (g.act && !g.back) v = hpmlg_act_far((int)g.act, g.slope, v);
    hpmlg_put(g.c, at, v);
}

/* Eight neighbours of a row; col and the row's start are multiples of 8. */
HPMLG_DEVICE void hpmlg_emit8(const hpmlg_job &g, int64_t batch, int64_t row, int64_t col, hpmlg_eight e)
{
    int64_t     at  = (batch * g.c_batch + row * g.ldc + col) / 8;
    hpmlg_eight old = {};
    if (g.add) old = hpmlg_get8(g.c, at);
    HPMLG_UNROLL for (int j = 0; j < 8; j++) e.v[j] = hpmlg_end_of(g, batch, row, col + j, e.v[j] * g.alpha) + old.v[j];
    if (g.z.p && !g.back) hpmlg_put8(g.z, at, e);
    if (g.back) {
        old = hpmlg_get8(g.z, at);
        HPMLG_UNROLL for (int j = 0; j < 8; j++) e.v[j] *= hpmlg_slope_far((int)g.act, g.slope, old.v[j]);
    } else if (g.act == HPML_ACT_RELU) {
        HPMLG_UNROLL for (int j = 0; j < 8; j++) e.v[j] = hpmlg_act(HPML_ACT_RELU, 0, e.v[j]);
    } else if (g.act) {
        HPMLG_UNROLL for (int j = 0; j < 8; j++) e.v[j] = hpmlg_act_far((int)g.act, g.slope, e.v[j]);
    }
    hpmlg_put8(g.c, at, e);
}

// ---------------------------------------------------------------------------------------------------------------------
// >>gpu-tiles   products by tiles: dense halves on tensor cores, and anything
// ---------------------------------------------------------------------------------------------------------------------

typedef struct hpmlg_tile { int64_t batch, split, row, col, k0, k1; } hpmlg_tile;

/* The tile of this block: neighbours in time share rows of a and columns of b, which the cache then holds. */
template <int T> HPMLG_DEVICE hpmlg_tile hpmlg_tile_here(const hpmlg_job &g)
{
    unsigned   m = (unsigned)g.tiles_m, n = (unsigned)g.tiles_n;
    unsigned   tile = blockIdx.x % (m * n), rest = blockIdx.x / (m * n);
    unsigned   first = tile / (8 * n) * 8, rows = m - first < 8 ? m - first : 8, in = tile % (8 * n);
    hpmlg_tile t;
    t.row   = (int64_t)(first + in % rows) * T;
    t.col   = (int64_t)(in / rows) * T;
    t.split = rest % g.splits;
    t.batch = rest / g.splits;
    t.k0    = t.split * g.k_each;
    t.k1    = t.k0 + g.k_each < g.k ? t.k0 + g.k_each : g.k;
    return t;
}

/* Where element (row, col) of a tile of sums stands in shared memory: neither way in nor out meets a bank twice. */
template <int T> HPMLG_DEVICE int hpmlg_sum_at(int row, int col) { return row * T + (col ^ (row & 3) << 3); }

/* Sums in registers, as the tensor cores (mma) or the plain kernel leave them, to where they belong, through shared
   memory. Warp w of four has the quarter (w / 2, w % 2). */
template <int T, bool MMA>
HPMLG_DEVICE void hpmlg_tile_end(const hpmlg_job &g, hpmlg_tile t, const float *acc, float *sums)
{
    int id = (int)threadIdx.x, lane = id % 32, warp = id / 32;
    __syncthreads();
    HPMLG_UNROLL for (int i = 0; i < T * T / 128; i += 2) {
        int row, col;
        if (MMA) {
            int mi = i / (T / 4), ni = i / 4 % (T / 16);
            row = warp / 2 * (T / 2) + mi * 16 + i / 2 % 2 * 8 + lane / 4;
            col = warp % 2 * (T / 2) + ni * 8 + lane % 4 * 2;
        } else {
            int r = i / (T / 16), c = i % (T / 16);
            row = id / 16 * 4 + r / 4 * 32 + r % 4;
            col = id % 16 * 4 + c / 4 * 64 + c % 4;
        }
        *(float2 *)&sums[hpmlg_sum_at<T>(row, col)] = make_float2(acc[i], acc[i + 1]);
    }
    __syncthreads();
    HPMLG_ROLLED for (int i = id; i < T * T / 8; i += 128) {
        int          r = i / (T / 8), c = i % (T / 8) * 8;
        int64_t      row = t.row + r, col = t.col + c;
        const float *from = &sums[hpmlg_sum_at<T>(r, c)];
        if (row >= g.m || col >= g.n) continue;
        if (g.part) {
            float *to = g.part + ((t.split * g.batch + t.batch) * g.m + row) * g.n + col;
            for (int j = 0; j < 8 && col + j < g.n; j++) to[j] = from[j];
        } else if (g.eights && col + 8 <= g.n) {
            hpmlg_emit8(g, t.batch, row, col, hpmlg_get8({ (void *)from, HPML_DTYPE_F32 }, 0));
        } else {
            for (int j = 0; j < 8 && col + j < g.n; j++) hpmlg_emit(g, t.batch, row, col + j, from[j]);
        }
    }
}

/* How an operand's tile lies in shared memory: halves as [line][32 k] or [32 k][line], 16-byte pieces exchanged so that
   ldmatrix meets no bank twice, or gathered as [line][16 k]. */
enum hpmlg_layout { HPMLG_K, HPMLG_LINE, HPMLG_GATHERED };

template <int T, int L> HPMLG_DEVICE int hpmlg_tile_at(int line, int k)
{
    if (L == HPMLG_K) return line * 32 + ((k >> 3) ^ (line >> 1 & 3)) * 8 + (k & 7);
    if (L == HPMLG_LINE) return k * T + ((line >> 3) ^ (k & 7)) * 8 + (line & 7);
    return line * 24 + k;
}

/* Lines `line` to + 15 at k to k + 15, as hpmlg_mma_16816 wants them: one a, or (second) two neighbouring b. */
template <int T, int L>
HPMLG_DEVICE void hpmlg_fragment(unsigned r[4], const unsigned short *x, int line, int k, bool b)
{
    int lane = (int)threadIdx.x % 32, in = lane % 8, low = lane / 8 % 2, high = lane / 16;
    int l8 = line + (b ? high : low) * 8, k8 = k + (b ? low : high) * 8;
    if (L == HPMLG_LINE) hpmlg_ldmatrix_x4_trans(r, x + hpmlg_tile_at<T, L>(l8, k8 + in));
    else hpmlg_ldmatrix_x4(r, x + hpmlg_tile_at<T, L>(l8 + in, k8));
}

/* The warp's quarter of a tile += its share of 16 k. */
template <int T, int LA, int LB, bool F16>
HPMLG_DEVICE void hpmlg_half_step(float *acc, const unsigned short *a, const unsigned short *b, int k)
{
    int      warp = (int)threadIdx.x / 32;
    unsigned fa[T / 32][4], fb[T / 32][4];
    HPMLG_UNROLL for (int i = 0; i < T / 32; i++) {
        hpmlg_fragment<T, LA>(fa[i], a, warp / 2 * (T / 2) + i * 16, k, false);
        hpmlg_fragment<T, LB>(fb[i], b, warp % 2 * (T / 2) + i * 16, k, true);
    }
    HPMLG_UNROLL for (int i = 0; i < T / 32; i++)
        HPMLG_UNROLL for (int j = 0; j < T / 16; j++)
            hpmlg_mma_16816(acc + (i * (T / 16) + j) * 4, fa[i], fb[j / 2] + j % 2 * 2, F16);
}

/* A dense tile of halves, 32 k deep, on its way into shared memory. x: its first element; lines, ks: their numbers. */
template <int T, int L>
HPMLG_DEVICE void hpmlg_dense_load(unsigned short *tile, const unsigned short *x, int64_t ld, int64_t lines, int64_t ks)
{
    HPMLG_UNROLL for (int i = 0; i < T / 32; i++) {
        int piece = (int)threadIdx.x + 128 * i, line, k;
        if (L == HPMLG_K) line = piece / 4, k = piece % 4 * 8;
        else k = piece / (T / 8), line = piece % (T / 8) * 8;
        hpmlg_copy_async16(tile + hpmlg_tile_at<T, L>(line, k), L == HPMLG_K ? x + line * ld + k : x + k * ld + line,
                           line < lines && k < ks);
    }
}

#define HPMLG_STAGES 4

template <int T, int LA, int LB>
HPMLG_DEVICE void hpmlg_dense_stage(const hpmlg_job &g, const hpmlg_tile &t, int64_t step, unsigned short *tiles)
{
    unsigned short       *at = tiles + step % HPMLG_STAGES * (2 * T * 32);
    int64_t               k  = t.k0 + step * 32;
    const unsigned short *a  = (const unsigned short *)g.a.x.p + t.batch * g.a.batch;
    const unsigned short *b  = (const unsigned short *)g.b.x.p + t.batch * g.b.batch;
    if (k < t.k1) {
        a += LA == HPMLG_K ? t.row * g.a.ld + k : k * g.a.ld + t.row;
        b += LB == HPMLG_K ? t.col * g.b.ld + k : k * g.b.ld + t.col;
        hpmlg_dense_load<T, LA>(at, a, g.a.ld, g.m - t.row, t.k1 - k);
        hpmlg_dense_load<T, LB>(at + T * 32, b, g.b.ld, g.n - t.col, t.k1 - k);
    }
    hpmlg_copy_commit(); /* an empty group keeps the count */
}

/* Dense halves: four stages of 32 k, three on their way while one is multiplied. */
template <int T, int LA, int LB>
static __global__ void __launch_bounds__(128, 2) hpmlg_k_dense(const __grid_constant__ hpmlg_job g)
{
    HPMLG_SHARED(unsigned short, tiles);
    hpmlg_tile t = hpmlg_tile_here<T>(g);
    int64_t    steps = (t.k1 - t.k0 + 31) / 32;
    float      acc[T * T / 128];
    HPMLG_UNROLL for (int i = 0; i < T * T / 128; i++) acc[i] = 0;
    for (int s = 0; s < HPMLG_STAGES - 1; s++) hpmlg_dense_stage<T, LA, LB>(g, t, s, tiles);
    HPMLG_ROLLED for (int64_t s = 0; s < steps; s++) {
        const unsigned short *a = tiles + s % HPMLG_STAGES * (2 * T * 32);
        hpmlg_copy_wait(HPMLG_STAGES - 2);
        __syncthreads(); /* stage s is here for all, and nobody reads stage s - 1 any more */
        hpmlg_dense_stage<T, LA, LB>(g, t, s + HPMLG_STAGES - 1, tiles);
        if (g.half == HPML_DTYPE_F16) {
            hpmlg_half_step<T, LA, LB, true>(acc, a, a + T * 32, 0);
            hpmlg_half_step<T, LA, LB, true>(acc, a, a + T * 32, 16);
        } else {
            hpmlg_half_step<T, LA, LB, false>(acc, a, a + T * 32, 0);
            hpmlg_half_step<T, LA, LB, false>(acc, a, a + T * 32, 16);
        }
    }
    hpmlg_tile_end<T, true>(g, t, acc, (float *)(void *)tiles); /* the groups behind the last stage are empty */
}

/* What the gathering kernel multiplies in. */
enum hpmlg_kind { HPMLG_IN_F32, HPMLG_IN_TF32, HPMLG_IN_HALF };

/* 16 k of a tile into registers, and from there into shared memory: f32 as [k][line], tf32 as [line][k], halves. */
template <int T> HPMLG_DEVICE void hpmlg_fetch(float *v, const hpmlg_side &o, int64_t base, const hpmlg_spot *lines,
                                                const hpmlg_spot *ks)
{
    HPMLG_UNROLL for (int j = 0; j < T / 8; j++) {
        int i = (int)threadIdx.x + 128 * j;
        v[j]  = hpmlg_pick(o, base, lines[o.along_k ? i / 16 : i % T], ks[o.along_k ? i % 16 : i / T]);
    }
}

/* v rounded to the bits that count. The device's NaN, 0x7fffffff, plus a half would be -0. */
HPMLG_DEVICE unsigned hpmlg_tf32(float v) { return v == v ? __float_as_uint(v) + 0x1000u : 0x7fffffffu; }

template <int T, int KIND> HPMLG_DEVICE void hpmlg_settle(void *tile, const float *v, int64_t along_k, int type)
{
    HPMLG_UNROLL for (int j = 0; j < T / 8; j++) {
        int i = (int)threadIdx.x + 128 * j, line = along_k ? i / 16 : i % T, k = along_k ? i % 16 : i / T;
        if (KIND == HPMLG_IN_F32) ((float *)tile)[k * (T + 4) + line] = v[j];
        else if (KIND == HPMLG_IN_TF32) ((unsigned *)tile)[line * 20 + k] = hpmlg_tf32(v[j]);
        else ((unsigned short *)tile)[hpmlg_tile_at<T, HPMLG_GATHERED>(line, k)] =
                 (unsigned short)hpmlg_narrow(v[j], 0, type);
    }
}

/* Sixteen rows of eight columns (T 128) or eight of four for each thread. */
template <int T> HPMLG_DEVICE void hpmlg_f32_step(float *acc, const float *a, const float *b)
{
    int ty = (int)threadIdx.x / 16 * 4, tx = (int)threadIdx.x % 16 * 4;
    HPMLG_UNROLL for (int k = 0; k < 16; k++) {
        float fa[T / 8], fb[T / 16];
        HPMLG_UNROLL
        for (int i = 0; i < T / 32; i++) *(float4 *)(fa + i * 4) = *(const float4 *)&a[k * (T + 4) + ty + i * 32];
        HPMLG_UNROLL
        for (int j = 0; j < T / 64; j++) *(float4 *)(fb + j * 4) = *(const float4 *)&b[k * (T + 4) + tx + j * 64];
        HPMLG_UNROLL for (int i = 0; i < T / 8; i++)
            HPMLG_UNROLL for (int j = 0; j < T / 16; j++) acc[i * (T / 16) + j] += fa[i] * fb[j];
    }
}

template <int T> HPMLG_DEVICE void hpmlg_tf32_step(float *acc, const unsigned *a, const unsigned *b)
{
    int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, g = lane / 4, t = lane % 4;
    a += (warp / 2 * (T / 2) + g) * 20 + t;
    b += (warp % 2 * (T / 2) + g) * 20 + t;
    HPMLG_UNROLL for (int k = 0; k < 16; k += 8) {
        unsigned fa[T / 32][4], fb[2];
        HPMLG_UNROLL for (int i = 0; i < T / 32; i++)
            HPMLG_UNROLL for (int e = 0; e < 4; e++) fa[i][e] = a[(i * 16 + e % 2 * 8) * 20 + k + e / 2 * 4];
        HPMLG_UNROLL for (int j = 0; j < T / 16; j++) {
            fb[0] = b[j * 8 * 20 + k], fb[1] = b[j * 8 * 20 + k + 4];
            HPMLG_UNROLL for (int i = 0; i < T / 32; i++) hpmlg_mma_1688_tf32(acc + (i * (T / 16) + j) * 4, fa[i], fb);
        }
    }
}

#define HPMLG_TILE_BYTES(T, KIND)                                                                                      \
    ((KIND) == HPMLG_IN_F32 ? 16 * ((T) + 4) * 4 : (KIND) == HPMLG_IN_TF32 ? (T) * 80 : (T) * 48)

/* Anything: 16 k at a time by way of registers, in two stages. */
template <int T, int KIND>
static __global__ void __launch_bounds__(128, 2) hpmlg_k_gather(const __grid_constant__ hpmlg_job g)
{
    enum { BYTES = HPMLG_TILE_BYTES(T, KIND) };
    HPMLG_SHARED(unsigned char, shared);
    hpmlg_spot    *lines = (hpmlg_spot *)shared, *ks = lines + 2 * T; /* (a, b)(T); (stage)(a, b)(16) */
    unsigned char *tiles = shared + (2 * T + 64) * sizeof(hpmlg_spot);
    hpmlg_tile     t     = hpmlg_tile_here<T>(g);
    int            id = (int)threadIdx.x, steps = (int)((t.k1 - t.k0 + 15) / 16);
    float          acc[T * T / 128], va[T / 8], vb[T / 8];
    HPMLG_UNROLL for (int i = 0; i < T * T / 128; i++) acc[i] = 0;
    for (int i = id; i < 2 * T; i += 128)
        lines[i] = i < T ? hpmlg_spot_at(g.a.line, t.row + i, g.m) : hpmlg_spot_at(g.b.line, t.col + i - T, g.n);
    for (int s = -2; s < steps; s++) { /* where the k of step s + 2 are; load s + 1; multiply s */
        unsigned char *now = tiles + (s & 1) * 2 * BYTES, *next = tiles + (~s & 1) * 2 * BYTES;
        hpmlg_spot    *soon = ks + (~s & 1) * 32;
        bool           load = s >= -1 && s + 1 < steps;
        if (load) {
            hpmlg_fetch<T>(va, g.a, t.batch * g.a.batch, lines, soon);
            hpmlg_fetch<T>(vb, g.b, t.batch * g.b.batch, lines + T, soon + 16);
        }
        if (id < 32) {
            int64_t k = t.k0 + (int64_t)(s + 2) * 16 + id % 16;
            ks[(s & 1) * 32 + id] = id < 16 ? hpmlg_spot_at(g.a.k, k, t.k1) : hpmlg_spot_at(g.b.k, k, t.k1);
        }
        if (s >= 0) {
            if (KIND == HPMLG_IN_F32) hpmlg_f32_step<T>(acc, (float *)now, (float *)(now + BYTES));
            else if (KIND == HPMLG_IN_TF32) hpmlg_tf32_step<T>(acc, (unsigned *)now, (unsigned *)(now + BYTES));
            else if (g.half == HPML_DTYPE_F16) hpmlg_half_step<T, HPMLG_GATHERED, HPMLG_GATHERED, true>(
                acc, (unsigned short *)now, (unsigned short *)(now + BYTES), 0);
            else hpmlg_half_step<T, HPMLG_GATHERED, HPMLG_GATHERED, false>(
                acc, (unsigned short *)now, (unsigned short *)(now + BYTES), 0);
        }
        if (load) {
            hpmlg_settle<T, KIND>(next, va, g.a.along_k, (int)g.half);
            hpmlg_settle<T, KIND>(next + BYTES, vb, g.b.along_k, (int)g.half);
        }
        __syncthreads();
    }
    hpmlg_tile_end<T, KIND != HPMLG_IN_F32>(g, t, acc, (float *)(void *)shared);
}

/* Many products of few rows or columns (depthwise convolutions): each sum by one thread, or by a whole block. */
static __global__ void hpmlg_k_thin(const __grid_constant__ hpmlg_job g, bool block)
{
    __shared__ float space[HPMLG_WARP];
    int64_t i = block ? (int64_t)blockIdx.x : hpmlg_me();
    int64_t col = i % g.n, row = i / g.n % g.m, batch = i / g.n / g.m;
    float   sum = 0;
    if (batch >= g.batch) return;
    hpmlg_spot a = hpmlg_spot_at(g.a.line, row, g.m), b = hpmlg_spot_at(g.b.line, col, g.n);
    for (int64_t k = block ? threadIdx.x : 0; k < g.k; k += block ? blockDim.x : 1)
        sum += hpmlg_pick(g.a, batch * g.a.batch, a, hpmlg_spot_at(g.a.k, k, g.k)) *
               hpmlg_pick(g.b, batch * g.b.batch, b, hpmlg_spot_at(g.b.k, k, g.k));
    if (block) sum = hpmlg_group(sum, space, 256, false);
    if (!block || threadIdx.x == 0) hpmlg_emit(g, batch, row, col, sum);
}

/* The pieces of k come together, in order. */
static __global__ void hpmlg_k_join(const __grid_constant__ hpmlg_job g)
{
    int64_t size = g.batch * g.m * g.n;
    HPMLG_EACH(i, size) {
        float sum = 0;
        for (int64_t s = 0; s < g.splits; s++) sum += g.part[s * size + i];
        hpmlg_emit(g, i / (g.m * g.n), i / g.n % g.m, i % g.n, sum);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// >>gpu-product   matrix products: our kernels, half copies of parameters
// ---------------------------------------------------------------------------------------------------------------------

typedef void hpmlg_job_kernel(const hpmlg_job);

/* [T 64, 128]: dense for a and b along k, for b along its lines, for both along their lines; gathering, by kind. */
static hpmlg_job_kernel *const hpmlg_kernels[2][6] = {
    { hpmlg_k_dense<64, HPMLG_K, HPMLG_K>, hpmlg_k_dense<64, HPMLG_K, HPMLG_LINE>,
      hpmlg_k_dense<64, HPMLG_LINE, HPMLG_LINE>, hpmlg_k_gather<64, HPMLG_IN_F32>, hpmlg_k_gather<64, HPMLG_IN_TF32>,
      hpmlg_k_gather<64, HPMLG_IN_HALF> },
    { hpmlg_k_dense<128, HPMLG_K, HPMLG_K>, hpmlg_k_dense<128, HPMLG_K, HPMLG_LINE>,
      hpmlg_k_dense<128, HPMLG_LINE, HPMLG_LINE>, hpmlg_k_gather<128, HPMLG_IN_F32>,
      hpmlg_k_gather<128, HPMLG_IN_TF32>, hpmlg_k_gather<128, HPMLG_IN_HALF> },
};

/* Shared memory: the four stages of dense operands; the sums of a tile and gathered operands take no more. */
#define HPMLG_JOB_SHARED(T) ((size_t)(T) * 512)

HPMLG_FN void hpmlg_kernels_open(hpmlg_device *d)
{
    cudaError_t e = cudaSuccess;
    for (hpmlg_job_kernel *kernel : hpmlg_kernels[1])
        HPMLG_TRY(e, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                          (int)HPMLG_JOB_SHARED(128)));
    hpmlg_check(d, e, "64 KiB of shared memory for matrix products");
}

HPMLG_FN bool hpmlg_is_half(hpmlg_array x) { return x.type == HPML_DTYPE_BF16 || x.type == HPML_DTYPE_F16; }

/* Can 16 bytes be copied at a time? */
HPMLG_FN bool hpmlg_is_dense(const hpmlg_side *o, int64_t lines, int64_t k)
{
    int64_t extent = o->along_k ? k : lines;
    return o->ld && hpmlg_is_half(o->x) && o->ld % 8 == 0 && o->batch % 8 == 0 && extent % 8 == 0 &&
           (uintptr_t)o->x.p % 16 == 0;
}

/* Tiles and pieces of k: enough of them for the device. */
HPMLG_FN void hpmlg_job_split(const hpmlg_device *d, hpmlg_job *g, int T)
{
    int64_t tiles, most, want;
    g->tiles_m = (g->m + T - 1) / T, g->tiles_n = (g->n + T - 1) / T;
    tiles = g->tiles_m * g->tiles_n * g->batch;
    want  = (2 * d->sms + tiles - 1) / tiles;
    most  = (int64_t)(d->d.workspace / sizeof(float)) / (g->batch * g->m * g->n);
    if (most > g->k / 256) most = g->k / 256;
    if (want > most) want = most;
    if (want < 2 || tiles >= d->sms) want = 1;
    g->k_each = ((g->k + want - 1) / want + 63) / 64 * 64;
    g->splits = g->k > 0 ? (g->k + g->k_each - 1) / g->k_each : 1; /* an empty sum is 0 */
    g->part   = g->splits > 1 ? (float *)d->workspace : NULL;
}

HPMLG_FN void hpmlg_job_run(hpmlg_device *d, hpmlg_job *g)
{
    bool    dense = hpmlg_is_dense(&g->a, g->m, g->k) && hpmlg_is_dense(&g->b, g->n, g->k) &&
                    g->a.x.type == g->b.x.type;
    bool    a_half = hpmlg_is_half(g->a.x), large = g->m > 64 && g->n > 64;
    int64_t limit = (int64_t)1 << 31, tiles = ((g->m + 127) / 128) * ((g->n + 127) / 128) * g->batch;
    int     kind = a_half || hpmlg_is_half(g->b.x) ? HPMLG_IN_HALF : d->d.precision == HPML_CUDA_F32 ? HPMLG_IN_F32
                 : HPMLG_IN_TF32;
    if (g->m >= limit || g->n >= limit || g->k >= limit)
        return (void)hpml_ctx_fail(d->ctx, HPML_ERR_OVERFLOW, "cuda: a product of %lld x %lld x %lld: each must be "
                                   "below 2^31", (long long)g->m, (long long)g->n, (long long)g->k);
    g->half   = a_half ? g->a.x.type : g->b.x.type;
    g->eights = g->flat && g->ldc % 8 == 0 && g->c_batch % 8 == 0 && (uintptr_t)g->c.p % 16 == 0 &&
                (uintptr_t)g->z.p % 16 == 0;
    if (g->batch >= 8 && (g->m < 8 || g->n < 8)) {
        int64_t sums = g->batch * g->m * g->n;
        bool    block = g->k > 512 && sums < limit;
        return HPMLG_RUN(d, hpmlg_k_thin, (unsigned)(block ? sums : (sums + 255) / 256), 256, 0, *g, block);
    }
    large = large && tiles * (g->k / 1024 + 1) >= d->sms;
    hpmlg_job_split(d, g, large ? 128 : 64);
    if (dense && (g->a.along_k || !g->b.along_k)) kind = g->b.along_k ? 0 : g->a.along_k ? 1 : 2;
    else kind += 3;
    hpmlg_job_kernel *hpmlg_k_product = hpmlg_kernels[large][kind];
    int64_t           blocks = g->tiles_m * g->tiles_n * g->splits * g->batch;
    if (blocks >= limit) hpml_ctx_fail(d->ctx, HPML_ERR_OVERFLOW, "cuda: a product of too many tiles");
    HPMLG_RUN(d, hpmlg_k_product, (unsigned)blocks, 128, HPMLG_JOB_SHARED(large ? 128 : 64), *g);
    if (g->splits > 1) HPMLG_DEAL(d, hpmlg_k_join, g->batch * g->m * g->n, 256, *g);
}

/* A plain product: c (batch, m, n) = act(alpha a b (+ c) + bias), or back: c = (alpha a b (+ c)) act'(z). */
struct hpmlg_gemm : hpmlg_job {  /* z: gets what goes into act; p NULL: nobody wants it. back: read */
    float      *sums;            /* (m) gets the sums of a's rows; NULL: nobody wants them */
    bool        rode;            /* set by the product: it did act' (back), or the sums, on its way */
    const void *bias_half;       /* bias (n) in c's type, for cuBLASLt; NULL: no such copy */
};

/* The array from element `at` on. */
HPMLG_FN hpmlg_array hpmlg_from(hpmlg_array x, int64_t at)
{
    x.p = (char *)x.p + at * (int64_t)hpml_dtype_size((hpml_dtype)x.type);
    return x;
}

/* H 0: not an image. */
HPMLG_FN hpmlg_side hpmlg_side_of(hpmlg_array x, int64_t batch, hpmlg_axis line, hpmlg_axis k, bool along_k,
                                  int64_t H = 0, int64_t W = 0)
{
    hpmlg_side o = {};
    o.x = x, o.batch = batch, o.line = line, o.k = k, o.along_k = along_k, o.H = H, o.W = W;
    return o;
}

/* A matrix, its rows ld apart: k goes along its rows, or down its columns. `batch` numbers further the next one. */
HPMLG_FN hpmlg_side hpmlg_matrix(hpmlg_array x, int64_t ld, int64_t batch, bool along_k)
{
    hpmlg_axis one = hpmlg_plain(1), far = hpmlg_plain(ld);
    hpmlg_side o = hpmlg_side_of(x, batch, along_k ? far : one, along_k ? one : far, along_k);
    o.ld = ld;
    return o;
}

HPMLG_FN hpmlg_gemm hpmlg_gemm_of(int64_t m, int64_t n, int64_t k, hpmlg_side a, hpmlg_side b, hpmlg_array c,
                                  int64_t ldc, bool add)
{
    hpmlg_gemm g = {};
    g.m = m, g.n = n, g.k = k, g.batch = 1, g.a = a, g.b = b, g.c = c, g.ldc = ldc, g.c_batch = m * n;
    g.alpha = 1, g.add = add, g.flat = g.bias_col = 1;
    return g;
}

HPMLG_FN bool hpmlg_blas_product(hpmlg_device *d, hpmlg_gemm *g);

HPMLG_FN void hpmlg_product(hpmlg_device *d, hpmlg_gemm *g)
{
    if (!hpmlg_well(d) || hpmlg_blas_product(d, g)) return;
    g->rode = g->back;
    d->ran.products[1]++;
    hpmlg_job_run(d, g);
}

/* Half copies of parameters are made when first asked for, and again when old. The first run of a pass is not recorded,
   so that memory can be taken in it. */
HPMLG_FN void hpmlg_weight_refresh(hpmlg_device *d, hpmlg_weights *w)
{
    if (w->fresh) return;
    hpmlg_copy_run(d, hpmlg_of(w->half, d->store), hpmlg_of((void *)w->w, HPML_DTYPE_F32), w->n, false);
    w->fresh = hpmlg_well(d);
}

/* The half copy of a parameter; NULL, and an error on the context, when there is no memory for it. */
HPMLG_FN void *hpmlg_half(hpmlg_device *d, const hpml_tensor *t)
{
    hpmlg_weights *w = d->weights;
    while (w && w->w != t->data) w = w->next;
    if (!w) {
        void *copy = hpmlg_own(d, (size_t)hpml_tensor_count(t) * 2, "memory for half copies of parameters");
        if (!copy || !(w = (hpmlg_weights *)hpml_ctx_alloc(d->ctx, sizeof *w, NULL))) return NULL;
        w->w = t->data, w->n = hpml_tensor_count(t), w->half = copy;
        w->next = d->weights, d->weights = w;
    }
    hpmlg_weight_refresh(d, w);
    return w->half;
}

/* A tensor as products want it: the half copy of a parameter; an f32 input of a half model narrowed into `place`. */
HPMLG_FN hpmlg_array hpmlg_factor(hpmlg_device *d, const hpml_tensor *t, void *place)
{
    hpmlg_array x = hpmlg_value(t);
    if (d->store == HPML_DTYPE_F32 || t->dtype != HPML_DTYPE_F32) return x;
    if (t->param) return hpmlg_of(hpmlg_half(d, t), d->store);
    if (place) hpmlg_copy_run(d, hpmlg_of(place, d->store), x, hpml_tensor_count(t), false);
    return place ? hpmlg_of(place, d->store) : x;
}

/* Bytes of that place. */
HPMLG_FN size_t hpmlg_factor_bytes(const hpmlg_device *d, const hpml_tensor *t)
{
    bool narrow = d->store != HPML_DTYPE_F32 && t->dtype == HPML_DTYPE_F32 && !t->param;
    return narrow ? ((size_t)hpml_tensor_count(t) * 2 + 255) / 256 * 256 : 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// >>gpu-cublas   matrix products by cuBLASLt
// ---------------------------------------------------------------------------------------------------------------------

/* Row-major matrices are column-major ones, transposed: c = a b is c^T = b^T a^T, so the operands change places. What
   the library said about a shape (its algorithm, or that it will not) is kept. Bias, relu, gelu and gelu' ride on the
   product, and so do sums of a's rows; where the library has no such kernel, an activation follows by itself, and the
   others are left to the caller. In HPML_CUDA_F32 gelu and gelu' are not fused, because the library's have only the 11
   bits of the hardware's tanh. Its relu is max(z, 0), which turns a NaN into 0: the update finds the NaN in the
   gradient of the layer's weights, where 0 is multiplied by what was NaN. */
HPMLG_FN void hpmlg_list_add(int list[16], int *count, int v)
{
    int i = 0;
    while (i < *count && list[i] != v) i++;
    if (i == *count && i < 16) list[(*count)++] = v;
}

#ifdef HPML_CUDA_NO_CUBLAS
HPMLG_FN bool hpmlg_blas_product(hpmlg_device *, hpmlg_gemm *) { return false; }
HPMLG_FN int  hpmlg_blas_algorithms(const hpmlg_device *, int *) { return 0; }
HPMLG_FN void hpmlg_blas_open(hpmlg_device *) {}
HPMLG_FN void hpmlg_blas_close(hpmlg_device *) {}
#else
HPMLG_FN hpml_status hpmlg_blas_check(hpmlg_device *d, cublasStatus_t s, const char *what)
{
    if (s == CUBLAS_STATUS_SUCCESS) return HPML_OK;
    return hpmlg_fail(d, s == CUBLAS_STATUS_ALLOC_FAILED, what, cublasLtGetStatusName(s), cublasLtGetStatusString(s),
                      "; hpml_cuda_desc.own_kernels does without cuBLASLt");
}

HPMLG_FN bool hpmlg_blas_refused(cublasStatus_t s) /* ours does it */
{
    return s == CUBLAS_STATUS_NOT_SUPPORTED || s == CUBLAS_STATUS_INVALID_VALUE || s == CUBLAS_STATUS_ARCH_MISMATCH;
}

typedef struct hpmlg_blas_key {
    int64_t m, n, k, batch, lda, ldb, ldc, a_batch, b_batch, c_batch;
    int64_t a_type, c_type, trans_a, trans_b, epilogue, align, add;
} hpmlg_blas_key;

typedef struct hpmlg_blas_plan {
    hpmlg_blas_key         key;
    uint64_t               used;
    bool                   set, usable;
    int                    id; /* of the algorithm, in cuBLASLt */
    cublasLtMatmulDesc_t   op;
    cublasLtMatrixLayout_t a, b, c;
    cublasLtMatmulAlgo_t   algo;
} hpmlg_blas_plan;

#define HPMLG_BLAS_PLANS 256

typedef struct hpmlg_blas {
    cublasLtHandle_t handle;
    hpmlg_blas_plan  plans[HPMLG_BLAS_PLANS];
} hpmlg_blas;

HPMLG_FN void hpmlg_drop(hpmlg_blas_plan *p)
{
    if (p->op) cublasLtMatmulDescDestroy(p->op);
    if (p->a) cublasLtMatrixLayoutDestroy(p->a);
    if (p->b) cublasLtMatrixLayoutDestroy(p->b);
    if (p->c) cublasLtMatrixLayoutDestroy(p->c);
}

HPMLG_FN cublasStatus_t hpmlg_blas_layout(cublasLtMatrixLayout_t *l, int64_t type, int64_t rows, int64_t cols,
                                          int64_t ld, int64_t batch, int64_t stride)
{
    cudaDataType_t kind  = type == HPML_DTYPE_F32 ? CUDA_R_32F : type == HPML_DTYPE_BF16 ? CUDA_R_16BF : CUDA_R_16F;
    int32_t        count = (int32_t)batch;
    cublasStatus_t s     = cublasLtMatrixLayoutCreate(l, kind, (uint64_t)rows, (uint64_t)cols, ld);
    if (batch == 1) return s;
    HPMLG_TRY(s, cublasLtMatrixLayoutSetAttribute(*l, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count, sizeof count));
    HPMLG_TRY(s, cublasLtMatrixLayoutSetAttribute(*l, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride,
                                                  sizeof stride));
    return s;
}

#define HPMLG_BLAS_SET(attribute, value)                                                                               \
    HPMLG_TRY(s, cublasLtMatmulDescSetAttribute(p->op, CUBLASLT_MATMUL_DESC_##attribute, &value, sizeof value))

HPMLG_FN cublasStatus_t hpmlg_blas_describe(const hpmlg_device *d, hpmlg_blas_plan *p)
{
    const hpmlg_blas_key *k = &p->key;
    cublasOperation_t     ta = k->trans_b ? CUBLAS_OP_T : CUBLAS_OP_N, tb = k->trans_a ? CUBLAS_OP_T : CUBLAS_OP_N;
    cublasLtEpilogue_t    epilogue = (cublasLtEpilogue_t)k->epilogue;
    int64_t               aux = k->ldc;
    bool                  with_z = (k->epilogue & CUBLASLT_EPILOGUE_DGELU & CUBLASLT_EPILOGUE_GELU_AUX) != 0;
    cublasStatus_t        s = cublasLtMatmulDescCreate(&p->op, d->d.precision == HPML_CUDA_TF32 ?
                                                       CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F, CUDA_R_32F);
    HPMLG_BLAS_SET(TRANSA, ta);
    HPMLG_BLAS_SET(TRANSB, tb);
    HPMLG_BLAS_SET(EPILOGUE, epilogue);
    if (with_z) HPMLG_BLAS_SET(EPILOGUE_AUX_LD, aux);
    HPMLG_TRY(s, hpmlg_blas_layout(&p->a, k->a_type, k->trans_b ? k->k : k->n, k->trans_b ? k->n : k->k, k->ldb,
                                   k->batch, k->b_batch));
    HPMLG_TRY(s, hpmlg_blas_layout(&p->b, k->a_type, k->trans_a ? k->m : k->k, k->trans_a ? k->k : k->m, k->lda,
                                   k->batch, k->a_batch));
    HPMLG_TRY(s, hpmlg_blas_layout(&p->c, k->c_type, k->n, k->m, k->ldc, k->batch, k->c_batch));
    return s;
}

/* Sets where bias and z are; they are not part of the key. */
HPMLG_FN cublasStatus_t hpmlg_blas_point(hpmlg_blas_plan *p, const void *bias, void *z)
{
    cublasStatus_t s = CUBLAS_STATUS_SUCCESS;
    if (bias) HPMLG_BLAS_SET(BIAS_POINTER, bias);
    if (z) HPMLG_BLAS_SET(EPILOGUE_AUX_POINTER, z);
    return s;
}

/* Asks cuBLASLt for an algorithm and keeps the answer in *p, also a refusal. */
HPMLG_FN void hpmlg_blas_ask(hpmlg_device *d, hpmlg_blas *blas, hpmlg_blas_plan *p, const void *bias, void *z)
{
    cublasLtMatmulPreference_t       want = NULL;
    cublasLtMatmulHeuristicResult_t  found[4];
    int                              count = 0;
    uint32_t                         align = (uint32_t)p->key.align;
    cublasStatus_t s = hpmlg_blas_describe(d, p);
    HPMLG_TRY(s, hpmlg_blas_point(p, bias, z));
    HPMLG_TRY(s, cublasLtMatmulPreferenceCreate(&want));
    HPMLG_TRY(s, cublasLtMatmulPreferenceSetAttribute(want, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                                      &d->d.workspace, sizeof d->d.workspace));
    for (int i = 0; i < 4; i++) {
        static const cublasLtMatmulPreferenceAttributes_t bytes[4] = {
            CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
            CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES };
        HPMLG_TRY(s, cublasLtMatmulPreferenceSetAttribute(want, bytes[i], &align, sizeof align));
    }
    HPMLG_TRY(s, cublasLtMatmulAlgoGetHeuristic(blas->handle, p->op, p->a, p->b, p->c, p->c, want, 4, found, &count));
    if (want) cublasLtMatmulPreferenceDestroy(want);
    p->set = true;
    for (int i = 0; i < count && s == CUBLAS_STATUS_SUCCESS && !p->usable; i++) {
        if (found[i].state != CUBLAS_STATUS_SUCCESS) continue;
        size_t written = 0;
        p->usable = true, p->algo = found[i].algo, p->id = -1;
        cublasLtMatmulAlgoConfigGetAttribute(&p->algo, CUBLASLT_ALGO_CONFIG_ID, &p->id, sizeof p->id, &written);
        if (found[i].workspaceSize > d->workspace_asked) d->workspace_asked = found[i].workspaceSize;
    }
    if (!hpmlg_blas_refused(s)) hpmlg_blas_check(d, s, "cublasLtMatmulAlgoGetHeuristic");
}

/* Lists cuBLASLt's ids of the algorithms that products use; returns their count. */
HPMLG_FN int hpmlg_blas_algorithms(const hpmlg_device *d, int list[16])
{
    const hpmlg_blas *blas = (const hpmlg_blas *)d->blas;
    int               count = 0;
    for (int i = 0; blas && i < HPMLG_BLAS_PLANS; i++)
        if (blas->plans[i].usable) hpmlg_list_add(list, &count, blas->plans[i].id);
    return count;
}

/* Describes the product for cuBLASLt; false: cuBLASLt must not be asked. line: the vector of bias or bias sums. A
   vector that is not aligned to 16 bytes is refused here, because cuBLASLt has no preference for the alignment of
   vectors. */
HPMLG_FN bool hpmlg_blas_key_of(hpmlg_blas_key *k, const hpmlg_gemm *g, const void *line)
{
    memset(k, 0, sizeof *k);
    if (g->a.x.type != g->b.x.type || (g->c.type != g->a.x.type && g->c.type != HPML_DTYPE_F32)) return false;
    k->trans_a = !g->a.along_k, k->trans_b = g->b.along_k;
    k->m = g->m, k->n = g->n, k->k = g->k, k->batch = g->batch, k->lda = g->a.ld, k->ldb = g->b.ld, k->ldc = g->ldc;
    if (k->lda < (k->trans_a ? k->m : k->k) || k->ldb < (k->trans_b ? k->k : k->n) || k->ldc < k->n) return false;
    if (k->batch > 1) k->a_batch = g->a.batch, k->b_batch = g->b.batch, k->c_batch = g->c_batch;
    k->a_type = g->a.x.type, k->c_type = g->c.type, k->add = g->add;
    uintptr_t places = (uintptr_t)g->a.x.p | (uintptr_t)g->b.x.p | (uintptr_t)g->c.p | (uintptr_t)line |
                       (uintptr_t)g->z.p;
    for (k->align = 256; places % (uintptr_t)k->align; k->align /= 2) {} /* bytes, of all arrays */
    return (k->batch == 1 || !g->bias) && (uintptr_t)line % 16 == 0;
}

/* The epilogue to fuse into the product: cuBLASLt's B is our A. */
HPMLG_FN cublasLtEpilogue_t hpmlg_blas_epilogue(const hpmlg_device *d, const hpmlg_gemm *g, bool act)
{
    bool bias = g->bias != NULL, z = g->z.type == g->c.type && (uintptr_t)g->z.p % 16 == 0 && g->ldc % 8 == 0;
    bool gelu = act && g->act == HPML_ACT_GELU && d->d.precision != HPML_CUDA_F32;
    if (act && g->sums) return CUBLASLT_EPILOGUE_BGRADB;
    if (gelu && g->back && z && !g->add) return CUBLASLT_EPILOGUE_DGELU;
    if (act && g->back) return CUBLASLT_EPILOGUE_DEFAULT;
    if (act && g->act == HPML_ACT_RELU && !g->z.p) return bias ? CUBLASLT_EPILOGUE_RELU_BIAS : CUBLASLT_EPILOGUE_RELU;
    if (gelu && !g->z.p) return bias ? CUBLASLT_EPILOGUE_GELU_BIAS : CUBLASLT_EPILOGUE_GELU;
    if (gelu && z) return bias ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX;
    return bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
}

/* Counts the epilogue that was fused into a product, or that cuBLASLt refused. */
HPMLG_FN void hpmlg_blas_count(hpmlg_device *d, cublasLtEpilogue_t e, bool refused)
{
    long long *n = d->ran.epilogues[refused];
    if (e == CUBLASLT_EPILOGUE_BGRADB) n[HPMLG_SUMS]++;
    else if (e == CUBLASLT_EPILOGUE_DGELU) n[HPMLG_GELU_BACK]++;
    else {
        n[HPMLG_BIAS] += !refused && (e & CUBLASLT_EPILOGUE_BIAS) != 0;
        n[HPMLG_RELU] += (e & CUBLASLT_EPILOGUE_RELU) != 0;
        n[HPMLG_GELU] += (e & CUBLASLT_EPILOGUE_GELU) != 0;
    }
}

/* Runs the product with its epilogue fused, else plain, with the activation as a kernel after. False: neither works. */
HPMLG_FN bool hpmlg_blas_product(hpmlg_device *d, hpmlg_gemm *g)
{
    hpmlg_blas      *blas = (hpmlg_blas *)d->blas;
    hpmlg_blas_key   key;
    const void      *bias = g->c.type == HPML_DTYPE_F32 ? g->bias : g->bias ? g->bias_half : NULL;
    float            beta = g->add ? 1.0f : 0.0f;
    bool             act  = g->act != HPML_ACT_NONE && !g->back, one = g->ldc == g->n && g->batch == 1;
    if (!blas || !hpmlg_blas_key_of(&key, g, g->sums ? g->sums : bias)) return false;
    if ((g->bias && !bias) || (act && !one)) return false;
    for (int aboard = act || g->back || g->sums; aboard >= 0; aboard--) {
        cublasLtEpilogue_t e = hpmlg_blas_epilogue(d, g, aboard);
        bool        plain = e == CUBLASLT_EPILOGUE_BIAS || e == CUBLASLT_EPILOGUE_DEFAULT, after = act && plain;
        void       *z = !plain ? g->z.p : NULL, *c = after && g->z.p ? g->z.p : g->c.p;
        const void *line = e == CUBLASLT_EPILOGUE_BGRADB ? g->sums : bias;
        if (plain && aboard) continue;
        key.epilogue = (int64_t)e;
        key.c_type   = after && g->z.p ? g->z.type : g->c.type;
        hpmlg_blas_plan *p = hpmlg_kept(d, blas->plans, key);
        if (!p->set) hpmlg_blas_ask(d, blas, p, line, z);
        cublasStatus_t s = p->usable ? hpmlg_blas_point(p, line, z) : CUBLAS_STATUS_NOT_SUPPORTED;
        HPMLG_TRY(s, cublasLtMatmul(blas->handle, p->op, &g->alpha, g->b.x.p, p->a, g->a.x.p, p->b, &beta, c, p->c, c,
                                    p->c, &p->algo, d->workspace, d->d.workspace, d->stream));
        p->usable = !hpmlg_blas_refused(s); /* cuBLASLt may refuse only when called */
        hpmlg_blas_count(d, e, !p->usable);
        if (!p->usable) continue;
        hpmlg_blas_check(d, s, "cublasLtMatmul");
        d->ran.products[0]++;
        if (after) HPMLG_DEAL(d, hpmlg_k_act, g->m * g->n, 2048, g->c, g->z.p ? g->z : g->c, hpmlg_none(),
                              (int)g->act, g->slope, g->m * g->n, false);
        g->rode = aboard;
        return true;
    }
    d->ran.products_refused++;
    return false;
}

HPMLG_FN void hpmlg_blas_open(hpmlg_device *d)
{
    hpmlg_blas *blas = (hpmlg_blas *)hpml_ctx_alloc(d->ctx, sizeof *blas, NULL);
    d->blas = blas;
    if (blas) hpmlg_blas_check(d, cublasLtCreate(&blas->handle), "cublasLtCreate");
}

HPMLG_FN void hpmlg_blas_close(hpmlg_device *d)
{
    hpmlg_blas *blas = (hpmlg_blas *)d->blas;
    for (int i = 0; blas && i < HPMLG_BLAS_PLANS; i++) hpmlg_drop(&blas->plans[i]);
    if (blas && blas->handle) cublasLtDestroy(blas->handle);
}
#endif

// ---------------------------------------------------------------------------------------------------------------------
// >>gpu-matmul   matmul and linear layers
// ---------------------------------------------------------------------------------------------------------------------

/* y = act(x w^T + bias) is one product. Backward: dz = dy act'(z) takes the place of dy, which nobody reads after us;
   the same pass over it sums its columns for the bias. Where a linear layer follows at once, its product for dy
   multiplies by act'(z) on the way; the product for dw can sum the columns. */

/* In one pass: dy *= act'(v), where there is an act; db, if not NULL, (+)= the sums of dy over what w stretches. */
HPMLG_FN void hpmlg_slopes_run(hpmlg_device *d, hpmlg_array dy, hpmlg_array v, hpml_act act, float slope, hpmlg_walk w,
                               float *db, bool add)
{
    hpmlg_binary b = {};
    b.op = HPML_OP_ADD, b.out = dy, b.src[0] = v, b.w = w, b.act = (int)act, b.slope = slope;
    if (db) hpmlg_fold_run(d, &b, 0, hpmlg_of(db, HPML_DTYPE_F32), 1, add);
    else if (act) HPMLG_DEAL(d, hpmlg_k_act, w.count, 2048, dy, v, dy, (int)act, slope, w.count, false);
}

typedef struct hpmlg_dims {
    int64_t batch, m, n, k;
    bool    shared; /* one b for all */
} hpmlg_dims;

/* Untransposed products with a shared b are one tall product. */
HPMLG_FN hpmlg_dims hpmlg_matmul_dims(const hpml_node *node)
{
    const hpml_tensor *c = node->out, *a = node->src[0], *b = node->src[1];
    hpmlg_dims         d = { 1, 0, 0, 0, false };
    for (int i = 0; i < c->ndim - 2; i++) d.batch *= c->shape[i];
    d.m = c->shape[c->ndim - 2], d.n = c->shape[c->ndim - 1];
    d.k = a->shape[a->ndim - (node->attr.matmul.trans_a ? 2 : 1)];
    d.shared = b->ndim == 2 && c->ndim > 2;
    if (d.shared && !node->attr.matmul.trans_a) d.m *= d.batch, d.batch = 1, d.shared = false;
    return d;
}

/* c (m, n) (+)= a b; turned: its transpose. */
HPMLG_FN void hpmlg_batched(hpmlg_device *d, int64_t batch, int64_t m, int64_t n, int64_t k, hpmlg_side a, hpmlg_side b,
                            hpmlg_array c, bool add, bool turned = false)
{
    hpmlg_gemm g = turned ? hpmlg_gemm_of(n, m, k, b, a, c, m, add) : hpmlg_gemm_of(m, n, k, a, b, c, n, add);
    g.batch = batch;
    hpmlg_product(d, &g);
}

/* op(A) (m, k), or second: op(B) (k, n); turned: its transpose. */
HPMLG_FN hpmlg_side hpmlg_matmul_of(const hpml_node *n, const hpmlg_dims *s, hpmlg_array x, bool second, bool turned)
{
    bool    stored = second ? n->attr.matmul.trans_b : n->attr.matmul.trans_a; /* as its transpose */
    int64_t rows = second ? s->k : s->m, cols = second ? s->n : s->k;
    return hpmlg_matrix(x, stored ? rows : cols, second && s->shared ? 0 : rows * cols, (stored != turned) == second);
}

HPMLG_OP(matmul)
{
    hpmlg_dims   s = hpmlg_matmul_dims(n);
    hpml_tensor *ta = n->src[0], *tb = n->src[1];
    hpmlg_array  a = hpmlg_factor(d, ta, NULL), b = hpmlg_factor(d, tb, NULL), dc = hpmlg_grad(n->out);
    int64_t      mn = s.m * s.n;
    if (!back)
        return hpmlg_batched(d, s.batch, s.m, s.n, s.k, hpmlg_matmul_of(n, &s, a, false, false),
                             hpmlg_matmul_of(n, &s, b, true, false), hpmlg_value(n->out), false);
    if (ta->raw_grad) /* dA (m, k) = dC op(B)^T, as A is stored */
        hpmlg_batched(d, s.batch, s.m, s.k, s.n, hpmlg_matrix(dc, s.n, mn, true), hpmlg_matmul_of(n, &s, b, true, true),
                      hpmlg_grad(ta), n->accumulate[0], n->attr.matmul.trans_a);
    for (int64_t i = 0; tb->raw_grad && i < (s.shared ? s.batch : 1); i++) { /* dB = op(A)^T dC */
        bool        add = n->accumulate[1] || i > 0 || ta == tb; /* a shared b sums over the batch, in order */
        hpmlg_array ai = hpmlg_from(a, i * s.m * s.k), ci = hpmlg_from(dc, i * mn);
        hpmlg_batched(d, s.shared ? 1 : s.batch, s.k, s.n, s.m, hpmlg_matmul_of(n, &s, ai, false, true),
                      hpmlg_matrix(ci, s.n, mn, false), hpmlg_grad(tb), add, n->attr.matmul.trans_b);
    }
}

/* What act' is computed from. */
HPMLG_FN hpmlg_array hpmlg_linear_z(const hpml_node *n)
{
    return n->saved ? hpmlg_of(n->saved, n->out->dtype) : hpmlg_value(n->out);
}

HPMLG_FN void hpmlg_linear_forward(hpmlg_device *d, hpml_node *n)
{
    const hpml_tensor *w = n->src[1], *bias = n->src[2];
    int64_t            out = w->shape[0], in = w->shape[1], rows = hpml_tensor_count(n->src[0]) / in;
    hpmlg_array        x = hpmlg_factor(d, n->src[0], n->scratch), wt = hpmlg_factor(d, w, NULL);
    hpmlg_gemm         g = hpmlg_gemm_of(rows, out, in, hpmlg_matrix(x, in, 0, true), hpmlg_matrix(wt, in, 0, true),
                                         hpmlg_value(n->out), out, false);
    g.act = n->attr.act.act, g.slope = n->attr.act.slope;
    g.z   = hpmlg_of(n->saved, n->out->dtype);
    if (bias) g.bias = bias->data;
    if (bias && g.c.type != HPML_DTYPE_F32) g.bias_half = hpmlg_half(d, bias);
    hpmlg_product(d, &g);
}

/* The layer before, when n is the first to be recorded of those that read it, and so the last to write its gradient. */
HPMLG_FN const hpml_node *hpmlg_linear_before(const hpml_node *n)
{
    const hpml_node *m = n->src[0]->node;
    return m && m->op == HPML_OP_LINEAR && m->attr.act.act && m->index + 1 == n->index ? m : NULL;
}

HPMLG_FN void hpmlg_linear_backward(hpmlg_device *d, hpml_node *n)
{
    hpml_tensor     *x = n->src[0], *w = n->src[1], *bias = n->src[2];
    const hpml_node *m = hpmlg_linear_before(n);
    int64_t          out = w->shape[0], in = w->shape[1], rows = hpml_tensor_count(x) / in;
    hpmlg_array      dz = hpmlg_grad(n->out), none = hpmlg_none();
    hpmlg_walk       rows_of = hpmlg_stretched(1, rows, out);
    hpml_act         act = d->left.sloped == n ? HPML_ACT_NONE : n->attr.act.act;
    float           *db = bias ? bias->grad : NULL;
    hpmlg_gemm       dw = hpmlg_gemm_of(out, in, rows, hpmlg_matrix(dz, out, 0, false),
                                        hpmlg_matrix(none, in, 0, false), hpmlg_grad(w), in, n->accumulate[1]);
    hpmlg_gemm       dx = hpmlg_gemm_of(rows, in, out, hpmlg_matrix(dz, out, 0, true),
                                        hpmlg_matrix(none, in, 0, false), hpmlg_grad(x), in, n->accumulate[0]);
    bool             ride = act == HPML_ACT_NONE && w->raw_grad && db &&
                            out <= (int64_t)(HPMLG_SCRATCH / sizeof(float));
    d->left.sloped = NULL;
    if (ride) dw.sums = n->accumulate[2] ? (float *)d->scratch : db;
    else hpmlg_slopes_run(d, dz, hpmlg_linear_z(n), act, n->attr.act.slope, rows_of, db, n->accumulate[2]);
    if (w->raw_grad) {
        dw.b.x = hpmlg_factor(d, x, n->scratch);
        hpmlg_product(d, &dw);
    }
    if (ride && !dw.rode) hpmlg_slopes_run(d, dz, none, HPML_ACT_NONE, 0, rows_of, db, n->accumulate[2]);
    else if (ride && n->accumulate[2])
        hpmlg_copy_run(d, hpmlg_of(db, HPML_DTYPE_F32), hpmlg_of(dw.sums, HPML_DTYPE_F32), out, true);
    if (!x->raw_grad) return;
    dx.b.x = hpmlg_factor(d, w, NULL);
    if (m) dx.back = true, dx.z = hpmlg_linear_z(m), dx.act = m->attr.act.act, dx.slope = m->attr.act.slope;
    hpmlg_product(d, &dx);
    if (dx.rode) d->left.sloped = m;
}
HPMLG_OP(linear) { return back ? hpmlg_linear_backward(d, n) : hpmlg_linear_forward(d, n); }

// ---------------------------------------------------------------------------------------------------------------------
// >>gpu-conv   convolution: our kernels
// ---------------------------------------------------------------------------------------------------------------------

/* A convolution is a product: y (out, pixels) = w (out, channels x taps) x (channels x taps, pixels), where the second
   operand is never made: its elements are looked up in the image. Likewise dx (channels, pixels) = w' (channels, out x
   taps) dy (out x taps, pixels), and dw (out, channels x taps) = dy (out, pixels) x' (pixels, channels x taps). With a
   stride, pixels of x that leave the same rest see the same taps: dx is one product for each rest. Groups are a batch
   of products. */

typedef struct hpmlg_conv {
    int64_t B, C, H, W, OC, OH, OW, groups; /* C, OC of one group */
    int64_t taps, P;                        /* P: pixels of a plane of y */
    const int32_t *kernel, *stride, *padding, *dilation; /* (2) */
} hpmlg_conv;

HPMLG_FN hpmlg_conv hpmlg_conv_of(const hpml_node *n)
{
    const hpml_tensor *x = n->src[0], *y = n->out;
    hpmlg_conv         c = {};
    c.groups = n->attr.conv.groups;
    c.B = x->shape[0], c.C = x->shape[1] / c.groups, c.H = x->shape[2], c.W = x->shape[3];
    c.OC = y->shape[1] / c.groups, c.OH = y->shape[2], c.OW = y->shape[3];
    c.kernel = n->attr.conv.kernel, c.stride = n->attr.conv.stride;
    c.padding = n->attr.conv.padding, c.dilation = n->attr.conv.dilation;
    c.taps = (int64_t)c.kernel[0] * c.kernel[1], c.P = c.OH * c.OW;
    return c;
}

/* Of one axis, `count` pixels first, first + stride, ... of x: `taps` of the kernel's, tap, tap + step, ..., bring the
   first one to at, at - back, ... of y, and each next one further by 1. */
typedef struct hpmlg_rest { int first, count, tap, step, taps, at, back; } hpmlg_rest;

HPMLG_FN hpmlg_rest hpmlg_rest_of(const hpmlg_conv *c, int i, int first, int64_t size)
{
    int        s = c->stride[i], by = c->dilation[i];
    hpmlg_rest r = { first, (int)((size - first + s - 1) / s), 0, 1, 0, 0, 0 };
    while (r.step * by % s) r.step++;
    while (r.tap < r.step && (first + c->padding[i] - r.tap * by) % s) r.tap++;
    if (r.tap < r.step && r.tap < c->kernel[i]) r.taps = (c->kernel[i] - 1 - r.tap) / r.step + 1;
    r.at = (first + c->padding[i] - r.tap * by) / s, r.back = r.step * by / s;
    return r;
}

HPMLG_FN void hpmlg_conv_dx(hpmlg_device *d, const hpmlg_conv *c, hpmlg_array dy, hpmlg_array w, hpmlg_array dx,
                            bool add)
{
    int64_t size = c->H * c->W, kw = c->kernel[1];
    for (int i = 0; i < c->stride[0] * c->stride[1]; i++) {
        hpmlg_rest h = hpmlg_rest_of(c, 0, i / c->stride[1], c->H), v = hpmlg_rest_of(c, 1, i % c->stride[1], c->W);
        hpmlg_axis pixels = hpmlg_folded(h.count, v.count, c->groups * c->OC * c->P, 0, 0);
        hpmlg_axis taps   = hpmlg_folded(h.taps, v.taps, c->P, 0, 0);
        hpmlg_job  j      = {};
        j.batch = c->groups, j.c = hpmlg_from(dx, h.first * c->W + v.first), j.alpha = 1, j.add = add;
        j.m = c->C, j.n = c->B * h.count * v.count, j.k = c->OC * h.taps * v.taps;
        if (j.n == 0 || (j.k == 0 && add)) continue;
        pixels.h0 = (int16_t)h.at, pixels.w0 = (int16_t)v.at, pixels.h = pixels.w = 1;
        taps.h = (int16_t)-h.back, taps.w = (int16_t)-v.back;
        j.a = hpmlg_side_of(hpmlg_from(w, h.tap * kw + v.tap), c->OC * c->C * c->taps, hpmlg_plain(c->taps),
                            hpmlg_folded(h.taps, v.taps, c->C * c->taps, h.step * kw, v.step), true);
        j.b = hpmlg_side_of(dy, c->OC * c->P, pixels, taps, false, c->OH, c->OW);
        j.ldc = size, j.c_batch = c->C * size;
        j.col = hpmlg_folded(h.count, v.count, c->groups * c->C * size, c->stride[0] * c->W, c->stride[1]);
        hpmlg_job_run(d, &j);
    }
}

/* y (images, C, P) = act(y + bias), in place. */
static __global__ void hpmlg_k_planes_end(hpmlg_array y, const float *bias, int act, int64_t C, int64_t P, int64_t n)
{
    bool one = P % 8 == 0; /* eight pixels are of one plane */
    HPMLG_EIGHTS(at, n) {
        hpmlg_eight e = hpmlg_get_part(y, at, 0, n, 0);
        float       b = bias && one ? bias[at / P % C] : 0;
        for (int j = 0; j < 8; j++)
            e.v[j] = hpmlg_act_far(act, 0.01f, e.v[j] + (bias && !one ? bias[(at + j) / P % C] : b));
        hpmlg_put_part(y, at, 0, n, e, false);
    }
}

/* False: cuDNN cannot. */
typedef enum hpmlg_dnn_pass { HPMLG_DNN_Y, HPMLG_DNN_DX, HPMLG_DNN_DW, HPMLG_DNN_PASSES } hpmlg_dnn_pass;
HPMLG_FN bool hpmlg_dnn_run(hpmlg_device *d, hpml_node *n, hpmlg_dnn_pass pass, hpmlg_array x, hpmlg_array w,
                            hpmlg_array y, bool add);

/* One pass, by cuDNN or by ours. */
HPMLG_FN void hpmlg_conv_run(hpmlg_device *d, hpml_node *n, hpmlg_dnn_pass pass, hpmlg_array x, hpmlg_array w,
                             hpmlg_array y, bool add)
{
    hpmlg_conv c = hpmlg_conv_of(n);
    hpmlg_job  j = {};
    int64_t    size = c.C * c.taps, image = c.C * c.H * c.W;
    hpmlg_axis pixels = hpmlg_folded(c.P, 1, c.groups * c.OC * c.P, 1, 0);   /* of y, */
    hpmlg_axis seen = hpmlg_folded(c.OH, c.OW, c.groups * image, 0, 0);      /* where tap (0, 0) of each lies in x, */
    hpmlg_axis taps = hpmlg_folded(c.kernel[0], c.kernel[1], c.H * c.W, 0, 0); /* and how far a tap moves */
    if (!hpmlg_well(d) || hpmlg_dnn_run(d, n, pass, x, w, y, add)) return;
    d->ran.convolutions[1]++;
    if (pass == HPMLG_DNN_DX) return hpmlg_conv_dx(d, &c, y, w, x, add);
    seen.h0 = (int16_t)-c.padding[0], seen.h = (int16_t)c.stride[0], taps.h = (int16_t)c.dilation[0];
    seen.w0 = (int16_t)-c.padding[1], seen.w = (int16_t)c.stride[1], taps.w = (int16_t)c.dilation[1];
    j.batch = c.groups, j.m = c.OC, j.alpha = 1, j.add = add;
    if (pass == HPMLG_DNN_Y) {
        j.a = hpmlg_matrix(w, size, c.OC * size, true);
        j.b = hpmlg_side_of(x, image, seen, taps, false, c.H, c.W);
        j.c = y, j.n = c.B * c.P, j.k = size, j.ldc = c.P, j.c_batch = c.OC * c.P, j.col = pixels;
        j.bias = hpmlg_param_of(n, 2), j.bias_row = 1, j.bias_batch = c.OC, j.act = n->attr.conv.act, j.slope = 0.01f;
    } else {
        j.a = hpmlg_side_of(y, c.OC * c.P, hpmlg_plain(c.P), pixels, true);
        j.b = hpmlg_side_of(x, image, taps, seen, true, c.H, c.W);
        j.c = w, j.n = j.ldc = size, j.k = c.B * c.P, j.c_batch = c.OC * size, j.flat = true;
    }
    hpmlg_job_run(d, &j);
}

HPMLG_OP(conv2d)
{
    hpml_tensor  *x = n->src[0], *w = n->src[1], *y = n->out;
    if (!back)
        return hpmlg_conv_run(d, n, HPMLG_DNN_Y, hpmlg_factor(d, x, n->scratch), hpmlg_factor(d, w, NULL),
                              hpmlg_value(y), false);
    hpmlg_walk planes = {}; /* the bias has a number for each channel */
    hpmlg_walk_push(&planes, y->shape[2] * y->shape[3], 0, 0);
    hpmlg_walk_push(&planes, y->shape[1], 1, 0);
    hpmlg_walk_push(&planes, y->shape[0], 0, 0);
    hpmlg_slopes_run(d, hpmlg_grad(y), hpmlg_value(y), n->attr.conv.act, 0.01f, planes, hpmlg_param_grad(n, 2),
                     n->accumulate[2]);
    if (w->raw_grad)
        hpmlg_conv_run(d, n, HPMLG_DNN_DW, hpmlg_factor(d, x, n->scratch), hpmlg_grad(w), hpmlg_grad(y),
                       n->accumulate[1]);
    if (x->raw_grad)
        hpmlg_conv_run(d, n, HPMLG_DNN_DX, hpmlg_grad(x), hpmlg_factor(d, w, NULL), hpmlg_grad(y), n->accumulate[0]);
}

// ---------------------------------------------------------------------------------------------------------------------
// >>gpu-cudnn   convolution by cuDNN
// ---------------------------------------------------------------------------------------------------------------------

/* Each convolution and batch size has its descriptors and, for each pass, the algorithm that cuDNN's heuristics put
   first among those that are deterministic and fit the workspace, which grows for it while the pass is not recorded;
   where there is none, ours runs. HPML_CUDA_F32 takes no Winograd and no FFT, whose sums are not products of the f32
   operands. In a half model cuDNN gives the gradient of the weights in halves, which are added to the f32 gradient. */

/* Grows the workspace to `bytes` bytes. False: over the limit, while recording, or out of memory. Recorded passes are
   dropped and recorded again when they next run, because they hold the old address. */
HPMLG_FN bool hpmlg_workspace_grow(hpmlg_device *d, size_t bytes)
{
    if (bytes <= d->workspace_bytes) return true;
    void *larger = bytes <= d->workspace_most && !d->recording ? hpmlg_alloc(d, bytes) : NULL;
    if (!larger) return false;
    hpmlg_free(d, d->workspace, d->workspace_bytes);
    d->workspace = larger, d->workspace_bytes = bytes;
    for (hpmlg_pass &p : d->passes) hpmlg_drop(&p);
    return true;
}

#ifdef HPML_CUDA_NO_CUDNN
HPMLG_FN bool hpmlg_dnn_run(hpmlg_device *, hpml_node *, hpmlg_dnn_pass, hpmlg_array, hpmlg_array, hpmlg_array, bool)
{ return false; }
HPMLG_FN int  hpmlg_dnn_algorithms(const hpmlg_device *, int, int *) { return 0; }
HPMLG_FN void hpmlg_dnn_close(hpmlg_device *) {}
#else
HPMLG_FN hpml_status hpmlg_dnn_check(hpmlg_device *d, cudnnStatus_t s, const char *what)
{
    char why[256] = "";
    if (s == CUDNN_STATUS_SUCCESS) return HPML_OK;
#if CUDNN_MAJOR >= 9
    cudnnGetLastErrorString(why, sizeof why);
#endif
    return hpmlg_fail(d, s == CUDNN_STATUS_ALLOC_FAILED, what, cudnnGetErrorString(s), why,
                      "; hpml_cuda_desc.own_kernels does without cuDNN");
}

HPMLG_FN bool hpmlg_dnn_refused(cudnnStatus_t s) /* ours does it; since version 9 a reason stands in the last digits */
{
    int family = CUDNN_MAJOR < 9 ? (int)s : (int)s / 1000 * 1000;
    return family == CUDNN_STATUS_NOT_SUPPORTED || family == CUDNN_STATUS_BAD_PARAM;
}

typedef struct hpmlg_dnn_key {
    const hpml_node *n;
    int64_t          batch;
} hpmlg_dnn_key;

typedef struct hpmlg_dnn_plan {
    hpmlg_dnn_key                key;
    uint64_t                     used;
    cudnnTensorDescriptor_t      x, y, bias;
    cudnnFilterDescriptor_t      w;
    cudnnConvolutionDescriptor_t conv;
    cudnnActivationDescriptor_t  act;
    int                          algo[HPMLG_DNN_PASSES];
    cudnnMathType_t              math[HPMLG_DNN_PASSES]; /* that the algorithm was offered with */
    bool                         asked[HPMLG_DNN_PASSES], usable[HPMLG_DNN_PASSES], set, refused, unfused;
} hpmlg_dnn_plan;

#define HPMLG_DNN_PLANS 128

typedef struct hpmlg_dnn {
    cudnnHandle_t  handle;
    hpmlg_dnn_plan plans[HPMLG_DNN_PLANS];
} hpmlg_dnn;

HPMLG_FN void hpmlg_drop(hpmlg_dnn_plan *p)
{
    if (p->x) cudnnDestroyTensorDescriptor(p->x);
    if (p->y) cudnnDestroyTensorDescriptor(p->y);
    if (p->bias) cudnnDestroyTensorDescriptor(p->bias);
    if (p->w) cudnnDestroyFilterDescriptor(p->w);
    if (p->conv) cudnnDestroyConvolutionDescriptor(p->conv);
    if (p->act) cudnnDestroyActivationDescriptor(p->act);
}

HPMLG_FN cudnnStatus_t hpmlg_dnn_describe(const hpmlg_device *d, hpmlg_dnn_plan *p)
{
    hpmlg_conv      c = hpmlg_conv_of(p->key.n);
    cudnnDataType_t type = d->store == HPML_DTYPE_F32 ? CUDNN_DATA_FLOAT : d->store == HPML_DTYPE_BF16
                         ? CUDNN_DATA_BFLOAT16 : CUDNN_DATA_HALF;
    bool            relu = p->key.n->attr.conv.act == HPML_ACT_RELU;
    int             channels = (int)(c.groups * c.OC);
    cudnnStatus_t   s = cudnnCreateTensorDescriptor(&p->x);
    HPMLG_TRY(s, cudnnCreateTensorDescriptor(&p->y));
    HPMLG_TRY(s, cudnnCreateTensorDescriptor(&p->bias));
    HPMLG_TRY(s, cudnnCreateFilterDescriptor(&p->w));
    HPMLG_TRY(s, cudnnCreateConvolutionDescriptor(&p->conv));
    HPMLG_TRY(s, cudnnCreateActivationDescriptor(&p->act));
    HPMLG_TRY(s, cudnnSetTensor4dDescriptor(p->x, CUDNN_TENSOR_NCHW, type, (int)c.B, (int)(c.groups * c.C), (int)c.H,
                                             (int)c.W));
    HPMLG_TRY(s, cudnnSetTensor4dDescriptor(p->y, CUDNN_TENSOR_NCHW, type, (int)c.B, channels, (int)c.OH, (int)c.OW));
    HPMLG_TRY(s, cudnnSetTensor4dDescriptor(p->bias, CUDNN_TENSOR_NCHW, type, 1, channels, 1, 1));
    HPMLG_TRY(s, cudnnSetFilter4dDescriptor(p->w, type, CUDNN_TENSOR_NCHW, channels, (int)c.C, c.kernel[0],
                                             c.kernel[1]));
    HPMLG_TRY(s, cudnnSetConvolution2dDescriptor(p->conv, c.padding[0], c.padding[1], c.stride[0], c.stride[1],
                                                  c.dilation[0], c.dilation[1], CUDNN_CROSS_CORRELATION,
                                                  CUDNN_DATA_FLOAT));
    HPMLG_TRY(s, cudnnSetConvolutionGroupCount(p->conv, (int)c.groups));
    HPMLG_TRY(s, cudnnSetActivationDescriptor(p->act, relu ? CUDNN_ACTIVATION_RELU : CUDNN_ACTIVATION_IDENTITY,
                                               CUDNN_PROPAGATE_NAN, 0));
    return s;
}

/* Which algorithms of a pass are Winograd's or an FFT. */
#define HPMLG_DNN_EXACT(pass, a)                                                                                       \
    ((int)(a) != CUDNN_CONVOLUTION_##pass##_ALGO_FFT && (int)(a) != CUDNN_CONVOLUTION_##pass##_ALGO_FFT_TILING &&      \
     (int)(a) != CUDNN_CONVOLUTION_##pass##_ALGO_WINOGRAD &&                                                           \
     (int)(a) != CUDNN_CONVOLUTION_##pass##_ALGO_WINOGRAD_NONFUSED)

/* The first that will do. */
#define HPMLG_DNN_CHOOSE(Kind, KIND, Pass, ...)                                                                        \
    do {                                                                                                               \
        cudnnConvolution##Kind##AlgoPerf_t found[8];                                                                   \
        HPMLG_TRY(s, cudnnGetConvolution##Pass##Algorithm_v7(dnn->handle, __VA_ARGS__, 8, &count, found));             \
        for (int i = 0; i < count && s == CUDNN_STATUS_SUCCESS && !p->usable[pass]; i++)                               \
            if (found[i].status == CUDNN_STATUS_SUCCESS && found[i].determinism == CUDNN_DETERMINISTIC &&              \
                (!f32 || found[i].mathType == CUDNN_FMA_MATH || found[i].mathType == CUDNN_DEFAULT_MATH) &&            \
                (!f32 || HPMLG_DNN_EXACT(KIND, found[i].algo)) && hpmlg_workspace_grow(d, found[i].memory)) {          \
                p->usable[pass] = true, p->algo[pass] = (int)found[i].algo;                                            \
                p->math[pass] = f32 ? CUDNN_FMA_MATH : found[i].mathType;                                              \
                if (found[i].memory > d->workspace_asked) d->workspace_asked = found[i].memory;                        \
            }                                                                                                          \
    } while (0)

HPMLG_FN void hpmlg_dnn_ask(hpmlg_device *d, hpmlg_dnn *dnn, hpmlg_dnn_plan *p, hpmlg_dnn_pass pass)
{
    bool          f32 = d->d.precision == HPML_CUDA_F32;
    cudnnStatus_t s = cudnnSetConvolutionMathType(p->conv, f32 ? CUDNN_FMA_MATH : CUDNN_TENSOR_OP_MATH);
    int           count = 0;
    p->asked[pass] = true;
    if (pass == HPMLG_DNN_Y)
        HPMLG_DNN_CHOOSE(Fwd, FWD, Forward, p->x, p->w, p->conv, p->y);
    else if (pass == HPMLG_DNN_DX)
        HPMLG_DNN_CHOOSE(BwdData, BWD_DATA, BackwardData, p->w, p->y, p->conv, p->x);
    else
        HPMLG_DNN_CHOOSE(BwdFilter, BWD_FILTER, BackwardFilter, p->x, p->y, p->conv, p->w);
    if (!hpmlg_dnn_refused(s)) hpmlg_dnn_check(d, s, "asking cuDNN for an algorithm");
}

HPMLG_FN hpmlg_dnn_plan *hpmlg_dnn_plan_of(hpmlg_device *d, hpmlg_dnn *dnn, const hpml_node *n, hpmlg_dnn_pass pass)
{
    hpmlg_dnn_plan *p = hpmlg_kept(d, dnn->plans, hpmlg_dnn_key{ n, n->out->shape[0] });
    if (!p->set) {
        cudnnStatus_t s = hpmlg_dnn_describe(d, p);
        p->set = true, p->refused = s != CUDNN_STATUS_SUCCESS;
        if (!hpmlg_dnn_refused(s)) hpmlg_dnn_check(d, s, "describing a convolution to cuDNN");
    }
    if (!p->refused && !p->asked[pass]) hpmlg_dnn_ask(d, dnn, p, pass);
    return p;
}

/* y = conv(x, w), or, where cuDNN can, act(conv(x, w) + bias) in one: *whole. That goes by one algorithm only. */
HPMLG_FN cudnnStatus_t hpmlg_dnn_forward(hpmlg_device *d, hpmlg_dnn *dnn, hpmlg_dnn_plan *p, hpml_node *n,
                                         hpmlg_array x, hpmlg_array w, hpmlg_array y, bool *whole)
{
    const float               one = 1, zero = 0;
    hpml_act                  act = n->attr.conv.act;
    cudnnConvolutionFwdAlgo_t algo = (cudnnConvolutionFwdAlgo_t)p->algo[HPMLG_DNN_Y];
    *whole = !n->src[2] && act == HPML_ACT_NONE;
    if (n->src[2] && !p->unfused && (act == HPML_ACT_NONE || act == HPML_ACT_RELU) &&
        algo == CUDNN_CONVOLUTION_FWD_ALGO_IMPLICIT_PRECOMP_GEMM) {
        hpmlg_array   b = hpmlg_factor(d, n->src[2], NULL);
        cudnnStatus_t s = cudnnConvolutionBiasActivationForward(dnn->handle, &one, p->x, x.p, p->w, w.p, p->conv, algo,
                                                                d->workspace, d->workspace_bytes, &zero, p->y, y.p,
                                                                p->bias, b.p, p->act, p->y, y.p);
        *whole     = !hpmlg_dnn_refused(s);
        p->unfused = !*whole;
        if (!p->unfused) return s;
    }
    return cudnnConvolutionForward(dnn->handle, &one, p->x, x.p, p->w, w.p, p->conv, algo, d->workspace,
                                   d->workspace_bytes, &zero, p->y, y.p);
}

/* With the first convolution: cuDNN takes a while to come up. NULL: it did not. */
HPMLG_FN hpmlg_dnn *hpmlg_dnn_open(hpmlg_device *d)
{
    hpmlg_dnn *dnn = (hpmlg_dnn *)d->dnn;
    if (dnn || !(dnn = (hpmlg_dnn *)hpml_ctx_alloc(d->ctx, sizeof *dnn, NULL))) return dnn;
    cudnnStatus_t s = cudnnCreate(&dnn->handle);
    HPMLG_TRY(s, cudnnSetStream(dnn->handle, d->stream));
    if (hpmlg_dnn_check(d, s, "cudnnCreate") == HPML_OK) return (hpmlg_dnn *)(d->dnn = dnn);
    if (dnn->handle) cudnnDestroy(dnn->handle);
    hpml_ctx_release(d->ctx, dnn);
    return NULL;
}

/* What is refused when it comes to it is ours from then on. */
HPMLG_FN bool hpmlg_dnn_run(hpmlg_device *d, hpml_node *n, hpmlg_dnn_pass pass, hpmlg_array x, hpmlg_array w,
                            hpmlg_array y, bool add)
{
    const float     one = 1, zero = 0, beta = add ? 1.0f : 0.0f;
    bool            narrow = pass == HPMLG_DNN_DW && d->store != HPML_DTYPE_F32, whole = true;
    void           *dw = narrow ? (char *)n->scratch + hpmlg_factor_bytes(d, n->src[0]) : w.p;
    int64_t         count = hpml_tensor_count(n->out);
    uintptr_t       places = (uintptr_t)x.p | (uintptr_t)w.p | (uintptr_t)y.p; /* a piece of a batch begins anywhere */
    if (d->d.own_kernels || x.type != (int)d->store || y.type != (int)d->store || places % 16) return false;
    hpmlg_dnn      *dnn = hpmlg_dnn_open(d);
    hpmlg_dnn_plan *p   = dnn ? hpmlg_dnn_plan_of(d, dnn, n, pass) : NULL;
    d->ran.convolutions_refused += p && !p->usable[pass];
    if (!p || !p->usable[pass]) return false;
    cudnnStatus_t s = cudnnSetConvolutionMathType(p->conv, p->math[pass]);
    if (pass == HPMLG_DNN_Y) HPMLG_TRY(s, hpmlg_dnn_forward(d, dnn, p, n, x, w, y, &whole));
    if (pass == HPMLG_DNN_DW)
        HPMLG_TRY(s, cudnnConvolutionBackwardFilter(dnn->handle, &one, p->x, x.p, p->y, y.p, p->conv,
                                                    (cudnnConvolutionBwdFilterAlgo_t)p->algo[pass], d->workspace,
                                                    d->workspace_bytes, narrow ? &zero : &beta, p->w, dw));
    if (pass == HPMLG_DNN_DX)
        HPMLG_TRY(s, cudnnConvolutionBackwardData(dnn->handle, &one, p->w, w.p, p->y, y.p, p->conv,
                                                  (cudnnConvolutionBwdDataAlgo_t)p->algo[pass], d->workspace,
                                                  d->workspace_bytes, &beta, p->x, x.p));
    p->usable[pass] = !hpmlg_dnn_refused(s);
    d->ran.convolutions_refused += !p->usable[pass];
    if (!p->usable[pass]) return false;
    d->ran.convolutions[0]++;
    d->ran.fused += whole && n->src[2] && pass == HPMLG_DNN_Y;
    hpmlg_dnn_check(d, s, "a convolution by cuDNN");
    if (narrow) hpmlg_copy_run(d, w, hpmlg_of(dw, d->store), hpml_tensor_count(n->src[1]), add);
    if (!whole) HPMLG_DEAL(d, hpmlg_k_planes_end, count, 2048, y, hpmlg_param_of(n, 2), (int)n->attr.conv.act,
                           n->out->shape[1], n->out->shape[2] * n->out->shape[3], count);
    return true;
}

/* Lists cuDNN's ids of the algorithms that this pass of convolutions uses; returns their count. */
HPMLG_FN int hpmlg_dnn_algorithms(const hpmlg_device *d, int pass, int list[16])
{
    const hpmlg_dnn *dnn = (const hpmlg_dnn *)d->dnn;
    int              count = 0;
    for (int i = 0; dnn && i < HPMLG_DNN_PLANS; i++)
        if (dnn->plans[i].usable[pass]) hpmlg_list_add(list, &count, dnn->plans[i].algo[pass]);
    return count;
}

HPMLG_FN void hpmlg_dnn_close(hpmlg_device *d)
{
    hpmlg_dnn *dnn = (hpmlg_dnn *)d->dnn;
    for (int i = 0; dnn && i < HPMLG_DNN_PLANS; i++) hpmlg_drop(&dnn->plans[i]);
    if (dnn && dnn->handle) cudnnDestroy(dnn->handle);
}
#endif

// ---------------------------------------------------------------------------------------------------------------------
// >>gpu-attention   multi-head attention, never storing the (T, T) matrix
// ---------------------------------------------------------------------------------------------------------------------

/* Per sample and head S = scale Q K^T, P = softmax(S), O = P V, in one pass over blocks of keys: the softmax of the
   blocks so far, its maximum and its sum, is corrected when a block brings a larger maximum (FlashAttention-2, Dao).
   What is kept for backward is the log of the sum for each query, in base 2: exp2(S log2(e) - kept) is P. With it

       delta = rowsum(dO O),  dP = dO V^T,  dS = P (dP - delta),  dQ = scale dS K,  dK = scale dS^T Q,  dV = P^T dO.

   Backward is one kernel in two roles. Both hold two tiles of rows and let two others stream by: for dK and dV the rows
   are keys, for dQ queries. S and dP are computed twice, but every sum stays in the registers of one thread, in order:
   the same bits each time.

   A warp has M x 16 rows, in the registers as hpmlg_mma_16816 has them: thread (g, t) = (lane / 4, lane % 4) holds of 8
   columns 2t and 2t + 1 in rows g and g + 8. So P, a result, is at once the left side of the next product. f32 has the
   same distribution, with plain arithmetic in place of tensor cores. Tiles lie in shared memory, DP columns (D and
   zeros), 16 bytes at a time in swapped places, so that 8 rows of one column lie in all banks. They come by copies
   beside the computation, one block ahead; rows that are not aligned or of another type come element by element. */

#define HPMLG_ATTN_MOST 256 /* columns of a head */
#define HPMLG_ATTN_LD(columns) ((columns) + 8) /* floats from row to row, so that 8 rows lie in other banks */

enum hpmlg_attn_part { HPMLG_ATTN_Q, HPMLG_ATTN_K, HPMLG_ATTN_V, HPMLG_ATTN_O };

typedef struct hpmlg_attn {
    hpmlg_array qkv, o;         /* (B, T, 3C), (B, T, C); backward: o is the gradient of O */
    hpmlg_array out;            /* forward: O, backward: the gradient of qkv */
    float      *lse, *delta;    /* (B, heads, T) */
    int64_t     pairs;          /* B heads */
    int         T, heads, D;
    float       scale;
    bool        causal, add;
    bool        wide, wide_o;   /* qkv, o can be copied as they are, 16 bytes at a time */
} hpmlg_attn;

template <int type> struct hpmlg_cell { typedef unsigned short t; }; /* an element in shared memory */
template <> struct hpmlg_cell<HPML_DTYPE_F32> { typedef float t; };

HPMLG_DEVICE void hpmlg_cell_put(float *to, float v, int) { *to = v; }
HPMLG_DEVICE void hpmlg_cell_put(unsigned short *to, float v, int type)
{
    *to = (unsigned short)hpmlg_narrow(v, 0, type);
}

/* 2^x; 0 below 2^-126. */
HPMLG_DEVICE float hpmlg_exp2(float x)
{
#ifdef HPML_CUDA_ON_CPU
    return exp2f(x);
#else
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#endif
}

/* Where 16 bytes number `chunk` of a row of a tile lie. */
template <int DP, class E> HPMLG_DEVICE E *hpmlg_tile_at(E *tile, int row, int chunk)
{
    int swap = DP * sizeof(E) % 128 == 0 ? row & 7 : row >> 1 & 3;
    return tile + row * DP + (chunk ^ swap) * (int)(16 / sizeof(E));
}

/* Where row `row` of a part of pair bh begins. */
HPMLG_DEVICE int64_t hpmlg_attn_at(const hpmlg_attn &p, int64_t bh, int part, int row)
{
    int64_t C = (int64_t)p.heads * p.D, b = bh / p.heads, at = (b * p.T + row) * C, in = (bh - b * p.heads) * p.D;
    return part == HPMLG_ATTN_O ? at + in : 3 * at + part * C + in;
}

/* `rows` rows from `row` on into a tile, by a block of `threads`; zeros where there are none. */
template <int type, int DP, int threads, int rows>
HPMLG_DEVICE void hpmlg_attn_load(const hpmlg_attn &p, typename hpmlg_cell<type>::t *tile, int64_t bh, int part,
                                  int row)
{
    typedef typename hpmlg_cell<type>::t E;
    const int   each = (int)(16 / sizeof(E)), chunks = DP / each, span = chunks < threads ? chunks : threads;
    const int   step = threads / span; /* rows at a time */
    bool        is_o = part == HPMLG_ATTN_O, wide = is_o ? p.wide_o : p.wide;
    hpmlg_array a  = is_o ? p.o : p.qkv;
    int         r  = (int)threadIdx.x / span;
    int64_t     at = hpmlg_attn_at(p, bh, part, row + r), ld = (int64_t)p.heads * p.D * (is_o ? 1 : 3);
    if (r >= step) return;
    for (int c = (int)threadIdx.x % span; c < chunks; c += span) {
        const E *from = (const E *)a.p + at + c * each;
        int      have = c * each < p.D ? p.T - row - r : 0;
        HPMLG_UNROLL for (int i = 0; wide && i < rows; i += step)
            if (rows % step == 0 || r + i < rows)
                hpmlg_copy_async16(hpmlg_tile_at<DP>(tile, r + i, c), i < have ? from + i * ld : (E *)a.p, i < have);
        HPMLG_ROLLED for (int i = 0; !wide && r + i < rows; i += step)
            for (int j = 0; j < each; j++)
                hpmlg_cell_put(hpmlg_tile_at<DP>(tile, r + i, c) + j, i < have && c * each + j < p.D
                               ? hpmlg_get(a, at + i * ld + c * each + j) : 0, type);
    }
}

/* d (16 M, 8 N) = a b^T over DP columns; a: this warp's rows of a tile, b: all 8 N of another. */
template <int type, int DP, int M, int N>
HPMLG_DEVICE void hpmlg_attn_scores(float (&d)[M][N][4], const unsigned short *a, const unsigned short *b)
{
    int lane = (int)threadIdx.x % HPMLG_WARP;
    HPMLG_UNROLL for (int m = 0; m < M; m++)
        HPMLG_UNROLL for (int j = 0; j < N; j++) d[m][j][0] = d[m][j][1] = d[m][j][2] = d[m][j][3] = 0;
    HPMLG_UNROLL for (int k = 0; k < DP / 16; k++) {
        unsigned x[M][4], y[4];
        HPMLG_UNROLL for (int m = 0; m < M; m++)
            hpmlg_ldmatrix_x4(x[m], hpmlg_tile_at<DP>(a, 16 * m + (lane & 15), 2 * k + (lane >> 4)));
        HPMLG_UNROLL for (int j = 0; j < N; j += 2) {
            hpmlg_ldmatrix_x4(y, hpmlg_tile_at<DP>(b, 8 * j + (lane & 7) + (lane >> 4) * 8, 2 * k + (lane >> 3 & 1)));
            HPMLG_UNROLL for (int m = 0; m < M; m++) {
                hpmlg_mma_16816(d[m][j], x[m], y, type == HPML_DTYPE_F16);
                hpmlg_mma_16816(d[m][j + 1], x[m], y + 2, type == HPML_DTYPE_F16);
            }
        }
    }
}

template <int type, int DP, int M, int N>
HPMLG_DEVICE void hpmlg_attn_scores(float (&d)[M][N][4], const float *a, const float *b)
{
    int g = (int)threadIdx.x % HPMLG_WARP / 4, t = (int)threadIdx.x % 4;
    HPMLG_UNROLL for (int m = 0; m < M; m++)
        HPMLG_UNROLL for (int j = 0; j < N; j++) d[m][j][0] = d[m][j][1] = d[m][j][2] = d[m][j][3] = 0;
    HPMLG_ROLLED for (int k = 0; k < DP / 4; k++) {
        float4 x[M][2];
        HPMLG_UNROLL for (int i = 0; i < 2 * M; i++)
            x[i / 2][i % 2] = *(const float4 *)hpmlg_tile_at<DP>(a, 8 * i + g, k);
        HPMLG_UNROLL for (int j = 0; j < N; j++)
            HPMLG_UNROLL for (int i = 0; i < 2; i++) {
                float4 y = *(const float4 *)hpmlg_tile_at<DP>(b, 8 * j + 2 * t + i, k);
                HPMLG_UNROLL for (int m = 0; m < M; m++)
                    HPMLG_UNROLL for (int h = 0; h < 2; h++) {
                        float4 v = x[m][h];
                        d[m][j][2 * h + i] += v.x * y.x + v.y * y.y + v.z * y.z + v.w * y.w;
                    }
            }
    }
}

/* d (16 M, 8 NO) += s (16 M, 8 N) b; s: results as above, b: 8 N rows of a tile, from column `column` on. */
template <int type, int DP, int M, int N, int NO>
HPMLG_DEVICE void hpmlg_attn_blend(float (&d)[M][NO][4], const float (&s)[M][N][4], const unsigned short *b, int column)
{
    int lane = (int)threadIdx.x % HPMLG_WARP;
    HPMLG_UNROLL for (int k = 0; k < N; k += 2) {
        unsigned x[M][4], y[4];
        HPMLG_UNROLL for (int m = 0; m < M; m++)
            HPMLG_UNROLL for (int i = 0; i < 4; i++)
                x[m][i] = hpmlg_narrow(s[m][k + i / 2][i % 2 * 2], s[m][k + i / 2][i % 2 * 2 + 1], type);
        HPMLG_UNROLL for (int j = 0; j < NO; j += 2) {
            hpmlg_ldmatrix_x4_trans(y, hpmlg_tile_at<DP>(b, 8 * k + (lane & 15), column / 8 + j + (lane >> 4)));
            HPMLG_UNROLL for (int m = 0; m < M; m++) {
                hpmlg_mma_16816(d[m][j], x[m], y, type == HPML_DTYPE_F16);
                hpmlg_mma_16816(d[m][j + 1], x[m], y + 2, type == HPML_DTYPE_F16);
            }
        }
    }
}

template <int type, int DP, int M, int N, int NO>
HPMLG_DEVICE void hpmlg_attn_blend(float (&d)[M][NO][4], const float (&s)[M][N][4], const float *b, int column)
{
    int lane = (int)threadIdx.x % HPMLG_WARP, t = lane % 4;
    HPMLG_ROLLED for (int from = 0; from < 4; from++) /* what this thread of the four holds of s */
        HPMLG_UNROLL for (int k = 0; k < 2 * N; k++) {
            float x[M][2];
            HPMLG_UNROLL for (int i = 0; i < 2 * M; i++)
                x[i / 2][i % 2] = __shfl_sync(HPMLG_ALL, s[i / 2][k / 2][i % 2 * 2 + k % 2], (lane & 28) + from);
            HPMLG_UNROLL for (int j = 0; j < NO; j++) {
                const float *row = hpmlg_tile_at<DP>(b, k / 2 * 8 + 2 * from + k % 2, column / 4 + 2 * j + t / 2);
                float2       y   = *(const float2 *)(row + t % 2 * 2);
                HPMLG_UNROLL for (int i = 0; i < 2 * M; i++) {
                    d[i / 2][j][i % 2 * 2] += x[i / 2][i % 2] * y.x;
                    d[i / 2][j][i % 2 * 2 + 1] += x[i / 2][i % 2] * y.y;
                }
            }
        }
}

/* out (+)= scale[row] d, in rows from `row` and columns from `column` on. It goes through `space`, shared memory of
   this warp, to be written in whole eights. */
template <int M, int NO>
HPMLG_DEVICE void hpmlg_attn_store(const hpmlg_attn &p, int64_t bh, int part, int row, int column,
                                   const float (&d)[M][NO][4], const float (&scale)[M][2], float *space)
{
    int lane = (int)threadIdx.x % HPMLG_WARP, g = lane / 4, t = lane % 4;
    __syncwarp(); /* space may still be read */
    HPMLG_UNROLL for (int i = 0; i < 2 * M; i++)
        HPMLG_UNROLL for (int j = 0; j < NO; j++) {
            float *to = space + (8 * i + g) * HPMLG_ATTN_LD(8 * NO) + 8 * j + 2 * t, k = scale[i / 2][i % 2];
            *(float2 *)to = make_float2(k * d[i / 2][j][i % 2 * 2], k * d[i / 2][j][i % 2 * 2 + 1]);
        }
    __syncwarp();
    HPMLG_ROLLED for (int i = lane; i < 16 * M * NO; i += HPMLG_WARP) {
        int         r = i / NO, c = column + i % NO * 8;
        int64_t     at = hpmlg_attn_at(p, bh, part, row + r);
        hpmlg_eight e = hpmlg_get8(hpmlg_array{ space + r * HPMLG_ATTN_LD(8 * NO), HPML_DTYPE_F32 }, i % NO);
        if (row + r < p.T) hpmlg_put_part(p.out, at + c, at, at + p.D, e, p.add);
    }
}

/* The tile of a block, the longest first: with a causal mask the last queries see most, and so do the first keys. */
HPMLG_DEVICE int hpmlg_attn_tile(const hpmlg_attn &p, int rows, bool last_first, int64_t *bh)
{
    int64_t tile = blockIdx.x / p.pairs;
    *bh = blockIdx.x - tile * p.pairs;
    return (int)(last_first ? (p.T + rows - 1) / rows - 1 - tile : tile) * rows;
}

/* s: scores of 16 M rows with keys from `key` on, some of them hidden where edge; becomes P without its divisor. `most`
   and `sum` (of this thread's columns) of the rows go on, in base 2, o is corrected. */
template <int M, int N, int NO>
HPMLG_DEVICE void hpmlg_attn_softmax(const hpmlg_attn &p, float (&s)[M][N][4], float (&most)[M][2], float (&sum)[M][2],
                                     float (&o)[M][NO][4], int row, int key, bool edge)
{
    int   g = (int)threadIdx.x % HPMLG_WARP / 4, t = (int)threadIdx.x % 4;
    float base2 = p.scale * 1.4426950408889634f;
    bool  moved = false;
    float shrink[M][2];
    HPMLG_UNROLL for (int i = 0; i < 2 * M; i++) {
        float top = most[i / 2][i % 2], add = 0;
        int   see = p.causal && row + 8 * i + g < p.T ? row + 8 * i + g + 1 : p.T;
        HPMLG_UNROLL for (int j = 0; j < 2 * N; j++) {
            float &v = s[i / 2][j / 2][i % 2 * 2 + j % 2];
            v   = edge && key + j / 2 * 8 + 2 * t + j % 2 >= see ? -INFINITY : v * base2;
            top = fmaxf(top, v);
        }
        top = fmaxf(top, __shfl_xor_sync(HPMLG_ALL, top, 1));
        top = fmaxf(top, __shfl_xor_sync(HPMLG_ALL, top, 2));
        HPMLG_UNROLL for (int j = 0; j < 2 * N; j++) {
            float &v = s[i / 2][j / 2][i % 2 * 2 + j % 2];
            v = hpmlg_exp2(v - top);
            add += v;
        }
        float k = hpmlg_exp2(most[i / 2][i % 2] - top);
        most[i / 2][i % 2] = top, shrink[i / 2][i % 2] = k, moved |= k != 1;
        sum[i / 2][i % 2]  = sum[i / 2][i % 2] * k + add;
    }
    if (!__any_sync(HPMLG_ALL, moved)) return;
    HPMLG_UNROLL for (int m = 0; m < M; m++)
        HPMLG_UNROLL for (int j = 0; j < NO; j++)
            HPMLG_UNROLL for (int e = 0; e < 4; e++) o[m][j][e] *= shrink[m][e / 2];
}

/* One block: 16 M W queries of one head. N: eights of keys in a block of them. */
template <int type, int DP, int M, int W, int N>
static __global__ void __launch_bounds__(HPMLG_WARP * W) hpmlg_k_attn(hpmlg_attn p)
{
    typedef typename hpmlg_cell<type>::t E;
    const int R = 16 * M * W, K = 8 * N, threads = HPMLG_WARP * W;
    HPMLG_SHARED(E, q);      /* (R, DP) */
    E      *kv = q + R * DP; /* two stages of keys (K, DP) and values (K, DP) */
    int64_t bh;
    int     first = hpmlg_attn_tile(p, R, true, &bh), row = first + (int)threadIdx.x / HPMLG_WARP * 16 * M, stage = 0;
    int     end = p.causal && first + R < p.T ? first + R : p.T;
    float   o[M][DP / 8][4], s[M][N][4], most[M][2], sum[M][2];
    HPMLG_UNROLL for (int m = 0; m < M; m++) {
        most[m][0] = most[m][1] = -INFINITY, sum[m][0] = sum[m][1] = 0;
        HPMLG_UNROLL for (int j = 0; j < DP / 8; j++) o[m][j][0] = o[m][j][1] = o[m][j][2] = o[m][j][3] = 0;
    }
    hpmlg_attn_load<type, DP, threads, R>(p, q, bh, HPMLG_ATTN_Q, first);
    for (int key = -K; key < end; key += K, stage ^= 1) { /* loads a block while it works on the one before */
        E *now = kv + stage * 2 * K * DP, *next = kv + (stage ^ 1) * 2 * K * DP;
        hpmlg_copy_wait(0);
        __syncthreads();
        if (key + K < end) {
            hpmlg_attn_load<type, DP, threads, K>(p, next, bh, HPMLG_ATTN_K, key + K);
            hpmlg_attn_load<type, DP, threads, K>(p, next + K * DP, bh, HPMLG_ATTN_V, key + K);
            hpmlg_copy_commit();
        }
        if (key < 0 || (p.causal && key >= row + 16 * M)) continue;
        hpmlg_attn_scores<type, DP, M, N>(s, q + (row - first) * DP, now);
        hpmlg_attn_softmax(p, s, most, sum, o, row, key, key + K > p.T || (p.causal && key + K > row + 1));
        hpmlg_attn_blend<type, DP>(o, s, now + K * DP, 0);
    }
    HPMLG_UNROLL for (int i = 0; i < 2 * M; i++) {
        float &v = sum[i / 2][i % 2];
        int    r = row + 8 * i + (int)threadIdx.x % HPMLG_WARP / 4;
        v += __shfl_xor_sync(HPMLG_ALL, v, 1);
        v += __shfl_xor_sync(HPMLG_ALL, v, 2);
        if (threadIdx.x % 4 == 0 && r < p.T) p.lse[bh * p.T + r] = most[i / 2][i % 2] + log2f(v);
        v = 1 / v;
    }
    __syncthreads(); /* the tiles' memory is free */
    hpmlg_attn_store(p, bh, HPMLG_ATTN_O, row, 0, o, sum, (float *)q + (row - first) * HPMLG_ATTN_LD(DP));
}

// ---------------------------------------------------------------------------------------------------------------------
// >>gpu-attention-back   attention's gradient
// ---------------------------------------------------------------------------------------------------------------------

/* delta = rowsum(dO O): 8 threads for each row of a head. */
static __global__ void hpmlg_k_attn_delta(hpmlg_attn p, hpmlg_array o)
{
    int64_t rows = p.pairs * p.T;
    int     lane = (int)threadIdx.x % 8;
    for (int64_t i = (int64_t)blockIdx.x * 32 + (int)threadIdx.x / 8; i - (int)threadIdx.x % HPMLG_WARP / 8 < rows;
         i += (int64_t)gridDim.x * 32) {
        int64_t bt = i / p.heads, h = i - bt * p.heads, at = i * p.D;
        float   sum = 0;
        for (int c = 8 * lane; c < p.D && i < rows; c += 64) {
            hpmlg_eight x = hpmlg_get_part(o, at + c, at, at + p.D, 0);
            hpmlg_eight y = hpmlg_get_part(p.o, at + c, at, at + p.D, 0);
            for (int j = 0; j < 8; j++) sum += x.v[j] * y.v[j];
        }
        for (int k = 4; k > 0; k >>= 1) sum += __shfl_xor_sync(HPMLG_ALL, sum, k);
        if (lane == 0 && i < rows) p.delta[(bt / p.T * p.heads + h) * p.T + bt % p.T] = sum;
    }
}

/* s: scores of rows with a block of columns, becomes P; dp: dP, becomes dS. The kept sum and delta of queries: KEYS,
   line[c] and line[8 N + c] of column c, else of_row. Where edge, some keys are hidden. */
template <bool KEYS, int M, int N>
HPMLG_DEVICE void hpmlg_attn_slopes(const hpmlg_attn &p, float (&s)[M][N][4], float (&dp)[M][N][4],
                                    const float (&of_row)[M][2][2], const float *line, int row, int column, bool edge)
{
    int   g = (int)threadIdx.x % HPMLG_WARP / 4, t = (int)threadIdx.x % 4;
    float base2 = p.scale * 1.4426950408889634f;
    HPMLG_UNROLL for (int j = 0; j < 2 * N; j++) {
        int   c = j / 2 * 8 + 2 * t + j % 2;
        float lse = KEYS ? line[c] : 0, delta = KEYS ? line[8 * N + c] : 0;
        HPMLG_UNROLL for (int i = 0; i < 2 * M; i++) {
            int    r = row + 8 * i + g, query = KEYS ? column + c : r, key = KEYS ? r : column + c;
            float &v = s[i / 2][j / 2][i % 2 * 2 + j % 2], &w = dp[i / 2][j / 2][i % 2 * 2 + j % 2];
            bool   hidden = edge && (key >= p.T || (p.causal && key > query));
            v = hidden ? 0 : hpmlg_exp2(v * base2 - (KEYS ? lse : of_row[i / 2][i % 2][0]));
            w = v * (w - (KEYS ? delta : of_row[i / 2][i % 2][1]));
        }
    }
}

/* One block: 16 M W keys of one head, their dK and dV, or as many queries and their dQ; DA columns of these from
   blockIdx.y DA on. */
template <int type, int DP, int DA, int M, int W, int N, bool KEYS>
static __global__ void __launch_bounds__(HPMLG_WARP * W) hpmlg_k_attn_back(hpmlg_attn p)
{
    typedef typename hpmlg_cell<type>::t E;
    const int R = 16 * M * W, K = 8 * N, threads = HPMLG_WARP * W;
    HPMLG_SHARED(E, own);                              /* keys and values, or queries and dO: two of (R, DP) */
    E      *stream = own + 2 * R * DP;                 /* the others: two stages of two (K, DP) */
    float  *lines = (float *)(stream + 4 * K * DP);    /* two stages of kept sum and delta of the queries in stream */
    int64_t bh;
    int     first = hpmlg_attn_tile(p, R, !KEYS, &bh), at = (int)threadIdx.x / HPMLG_WARP * 16 * M, row = first + at;
    int     begin = KEYS && p.causal ? first / K * K : 0, stage = 0, column = (int)blockIdx.y * DA;
    int     end = !KEYS && p.causal && first + R < p.T ? first + R : p.T;
    float   d0[M][DA / 8][4], d1[KEYS ? M : 1][KEYS ? DA / 8 : 1][4], s[M][N][4], dp[M][N][4], of_row[M][2][2];
    float   scale[M][2], one[M][2];
    HPMLG_UNROLL for (int i = 0; i < 2 * M; i++) {
        int r = row + 8 * i + (int)threadIdx.x % HPMLG_WARP / 4;
        of_row[i / 2][i % 2][0] = !KEYS && r < p.T ? p.lse[bh * p.T + r] : INFINITY;
        of_row[i / 2][i % 2][1] = !KEYS && r < p.T ? p.delta[bh * p.T + r] : 0;
        scale[i / 2][i % 2] = p.scale, one[i / 2][i % 2] = 1;
        HPMLG_UNROLL for (int j = 0; j < DA / 8; j++)
            HPMLG_UNROLL for (int e = 0; e < 2; e++) {
                d0[i / 2][j][i % 2 * 2 + e] = 0;
                if (KEYS) d1[KEYS ? i / 2 : 0][KEYS ? j : 0][i % 2 * 2 + e] = 0;
            }
    }
    hpmlg_attn_load<type, DP, threads, R>(p, own, bh, KEYS ? HPMLG_ATTN_K : HPMLG_ATTN_Q, first);
    hpmlg_attn_load<type, DP, threads, R>(p, own + R * DP, bh, KEYS ? HPMLG_ATTN_V : HPMLG_ATTN_O, first);
    for (int c = begin - K; c < end; c += K, stage ^= 1) {
        E     *now = stream + stage * 2 * K * DP, *next = stream + (stage ^ 1) * 2 * K * DP;
        float *line = lines + stage * 2 * K, *next_line = lines + (stage ^ 1) * 2 * K;
        hpmlg_copy_wait(0);
        __syncthreads();
        if (c + K < end) {
            hpmlg_attn_load<type, DP, threads, K>(p, next, bh, KEYS ? HPMLG_ATTN_Q : HPMLG_ATTN_K, c + K);
            hpmlg_attn_load<type, DP, threads, K>(p, next + K * DP, bh, KEYS ? HPMLG_ATTN_O : HPMLG_ATTN_V, c + K);
            hpmlg_copy_commit();
            for (int i = (int)threadIdx.x; KEYS && i < K; i += threads) {
                bool in = c + K + i < p.T; /* what lies behind the end has weight 0 */
                next_line[i]     = in ? p.lse[bh * p.T + c + K + i] : INFINITY;
                next_line[K + i] = in ? p.delta[bh * p.T + c + K + i] : 0;
            }
        }
        if (c < begin || (p.causal && (KEYS ? c + K <= row : c >= row + 16 * M))) continue;
        hpmlg_attn_scores<type, DP, M, N>(s, own + at * DP, now);
        hpmlg_attn_scores<type, DP, M, N>(dp, own + (R + at) * DP, now + K * DP);
        hpmlg_attn_slopes<KEYS>(p, s, dp, of_row, line, row, c, KEYS ? p.causal && c < row + 16 * M - 1
                                : c + K > p.T || (p.causal && c + K > row + 1));
        if constexpr (KEYS) hpmlg_attn_blend<type, DP>(d1, s, now + K * DP, column);
        hpmlg_attn_blend<type, DP>(d0, dp, now, column);
    }
    float *space = (float *)own + at * HPMLG_ATTN_LD(DA);
    __syncthreads();
    hpmlg_attn_store(p, bh, KEYS ? HPMLG_ATTN_K : HPMLG_ATTN_Q, row, column, d0, scale, space);
    if constexpr (KEYS) hpmlg_attn_store(p, bh, HPMLG_ATTN_V, row, column, d1, one, space);
}

/* Launches with more shared memory than a kernel has without asking: asks in passes that are not recorded. */
HPMLG_FN void hpmlg_attn_start(hpmlg_device *d, void (*kernel)(hpmlg_attn), const hpmlg_attn *p, int rows,
                               unsigned parts, int threads, size_t shared)
{
    int64_t blocks = (p->T + rows - 1) / rows * p->pairs;
    if (blocks > 0x7fffffff)
        hpml_ctx_fail(d->ctx, HPML_ERR_UNSUPPORTED, "attention: %lld samples and heads of %d positions are too many "
                      "for one launch", (long long)p->pairs, p->T);
    if (!d->recording && shared > (size_t)48 << 10)
        hpmlg_check(d, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared),
                    "shared memory for attention");
    HPMLG_RUN(d, kernel, dim3((unsigned)blocks, parts), (unsigned)threads, shared, *p);
}

/* Sizes such that the results stay in registers and two blocks share a multiprocessor, or at least one has room in
   99 KiB. */
template <int type, int DP> HPMLG_FN void hpmlg_attn_run(hpmlg_device *d, const hpmlg_attn *p, bool backward)
{
    const bool   f32 = type == HPML_DTYPE_F32, large = DP > 128;
    const int    cell = f32 ? 4 : 2, M = large ? 1 : 2, W = large ? 2 : 4, N = !f32 ? 8 : DP > 64 ? 2 : 4;
    const int    BM = !f32 && DP <= 64 ? 2 : 1, BW = large ? 1 : 4, BN = f32 && DP > 64 ? 2 : 4;
    const size_t shared = (size_t)((16 * M * W + 32 * N) * DP * cell);
    const size_t back = (size_t)((32 * BM * BW + 32 * BN) * DP * cell) + (size_t)(32 * BN) * sizeof(float);
    if (!backward)
        return hpmlg_attn_start(d, hpmlg_k_attn<type, DP, M, W, N>, p, 16 * M * W, 1, HPMLG_WARP * W, shared);
    hpmlg_attn_start(d, hpmlg_k_attn_back<type, DP, large ? 128 : DP, BM, BW, BN, true>, p, 16 * BM * BW, large ? 2 : 1,
                     HPMLG_WARP * BW, back);
    hpmlg_attn_start(d, hpmlg_k_attn_back<type, DP, DP, BM, BW, BN, false>, p, 16 * BM * BW, 1, HPMLG_WARP * BW, back);
}

template <int type> HPMLG_FN void hpmlg_attn_half(hpmlg_device *d, const hpmlg_attn *p, bool backward)
{
    if (p->D <= 32) return hpmlg_attn_run<type, 32>(d, p, backward);
    if (p->D <= 64) return hpmlg_attn_run<type, 64>(d, p, backward);
    return p->D <= 96 ? hpmlg_attn_run<type, 96>(d, p, backward) : hpmlg_attn_run<type, 128>(d, p, backward);
}

HPMLG_OP(attention)
{
    hpmlg_attn    p = {};
    int64_t       C = n->out->shape[2], T = n->out->shape[1], D = C / n->attr.attention.heads;
    hpml_dtype    type = D > 128 ? HPML_DTYPE_F32 : n->out->dtype; /* large heads are rare: no tensor cores */
    int           each = type == HPML_DTYPE_F32 ? 4 : 8;
    if (D > HPMLG_ATTN_MOST || T > 0x7fff0000)
        hpml_ctx_fail(run->ctx, HPML_ERR_UNSUPPORTED, "attention \"%s\": heads of %lld columns, %lld positions; the "
                      "GPU's kernels take up to %d columns and 2^31 positions: take more heads", n->out->name,
                      (long long)D, (long long)T, HPMLG_ATTN_MOST);
    p.qkv = hpmlg_value(n->src[0]), p.o = hpmlg_grad(n->out);
    p.out = hpmlg_writes(n, back);
    p.lse = (float *)n->saved, p.delta = (float *)n->scratch;
    p.T = (int)T, p.heads = n->attr.attention.heads, p.D = (int)D, p.pairs = n->out->shape[0] * p.heads;
    p.scale = n->attr.attention.scale, p.causal = n->attr.attention.causal, p.add = hpmlg_adds(n, back);
    p.wide   = p.qkv.type == (int)type && D % each == 0 && ((uintptr_t)p.qkv.p & 15) == 0;
    p.wide_o = p.o.type == (int)type && D % each == 0 && ((uintptr_t)p.o.p & 15) == 0;
    if (p.pairs * T == 0) return;
    if (back) HPMLG_DEAL(d, hpmlg_k_attn_delta, p.pairs * T, 32, p, hpmlg_value(n->out));
    if (type == HPML_DTYPE_BF16) hpmlg_attn_half<HPML_DTYPE_BF16>(d, &p, back);
    else if (type == HPML_DTYPE_F16) hpmlg_attn_half<HPML_DTYPE_F16>(d, &p, back);
    else if (D <= 64) hpmlg_attn_run<HPML_DTYPE_F32, 64>(d, &p, back);
    else if (D <= 128) hpmlg_attn_run<HPML_DTYPE_F32, 128>(d, &p, back);
    else hpmlg_attn_run<HPML_DTYPE_F32, 256>(d, &p, back);
}

// ---------------------------------------------------------------------------------------------------------------------
// >>gpu-lstm   long short-term memory
// ---------------------------------------------------------------------------------------------------------------------

/* As on the CPU: one product for all that x gives to the gates, then step by step the recurrent product and the cell.
   Backward the kept gates become da, and the gradients of the weights are one product each over all steps, that of w_h
   with the h of one step before. Half models multiply half copies of da. */

typedef struct hpmlg_lstm {
    int64_t     B, T, H, in;
    float      *gates, *cells, *dh, *dc;  /* (B, T, 4H), (B, T, H), (B, H), (B, H) */
    hpmlg_array h, dy, da, before;        /* da (B, T, 4H): gates, or their half copy; before (B, T, H) */
} hpmlg_lstm;

/* Deals out saved and scratch; returns the bytes of scratch. */
HPMLG_FN size_t hpmlg_lstm_layout(const hpmlg_device *d, const hpml_node *n, hpmlg_lstm *l)
{
    const hpml_tensor *x = n->src[0];
    int64_t rows, size = (int64_t)hpml_dtype_size(d->store);
    bool    narrow = d->store != HPML_DTYPE_F32;
    uintptr_t p = (uintptr_t)n->scratch;
    l->B = n->out->shape[0], l->T = n->out->shape[1], l->H = n->out->shape[2], l->in = x->shape[2];
    rows     = l->B * l->T;
    l->gates = (float *)n->saved, l->cells = n->saved ? l->gates + rows * 4 * l->H : NULL;
    p += hpmlg_factor_bytes(d, x);
    l->dh = (float *)p, p += (uintptr_t)(l->B * l->H + 63) / 64 * 256;
    l->dc = (float *)p, p += (uintptr_t)(l->B * l->H + 63) / 64 * 256;
    l->da = hpmlg_of(narrow ? (void *)p : n->saved, d->store);
    if (narrow) p += (uintptr_t)(rows * 4 * l->H * size + 255) / 256 * 256;
    l->before = hpmlg_of((void *)p, n->out->dtype), p += (uintptr_t)(rows * l->H * size);
    l->h = hpmlg_value(n->out), l->dy = hpmlg_grad(n->out);
    return (size_t)(p - (uintptr_t)n->scratch);
}

HPMLG_DEVICE float hpmlg_sigmoid(float x) { return 1 / (1 + expf(-x)); }

/* One number of h and c at step t: i, f, g, o from their sums. */
static __global__ void hpmlg_k_lstm(hpmlg_lstm l, int64_t t)
{
    int64_t at = hpmlg_me(), b = hpmlg_quotient(at, l.H), j = at - b * l.H, row = b * l.T + t;
    float  *a = l.gates + row * 4 * l.H + j, *c = l.cells + row * l.H + j;
    if (b >= l.B) return;
    float in = hpmlg_sigmoid(a[0]), forget = hpmlg_sigmoid(a[l.H]);
    float g = tanhf(a[2 * l.H]), out = hpmlg_sigmoid(a[3 * l.H]);
    float cell = in * g + (t > 0 ? forget * c[-l.H] : 0);
    a[0] = in, a[l.H] = forget, a[2 * l.H] = g, a[3 * l.H] = out;
    *c = cell;
    hpmlg_put(l.h, row * l.H + j, out * tanhf(cell));
}

/* The same backward: gates become da; dc goes on to the step before. */
static __global__ void hpmlg_k_lstm_back(hpmlg_lstm l, int64_t t)
{
    int64_t      at = hpmlg_me(), b = hpmlg_quotient(at, l.H), j = at - b * l.H, row = b * l.T + t;
    float       *a = l.gates + row * 4 * l.H + j, d[4];
    const float *c = l.cells + row * l.H + j;
    if (b >= l.B) return;
    bool  last = t == l.T - 1;
    float in = a[0], forget = a[l.H], g = a[2 * l.H], out = a[3 * l.H], th = tanhf(*c);
    float dh = hpmlg_get(l.dy, row * l.H + j) + (last ? 0 : l.dh[at]);
    float dcell = dh * out * (1 - th * th) + (last ? 0 : l.dc[at]);
    d[0] = dcell * g * in * (1 - in);
    d[1] = t > 0 ? dcell * c[-l.H] * forget * (1 - forget) : 0;
    d[2] = dcell * in * (1 - g * g);
    d[3] = dh * th * out * (1 - out);
    for (int i = 0; i < 4; i++) {
        a[i * l.H] = d[i];
        if (l.da.p != l.gates) hpmlg_put(l.da, (row * 4 + i) * l.H + j, d[i]);
    }
    l.dc[at] = dcell * forget;
    hpmlg_put(l.before, row * l.H + j, t > 0 ? hpmlg_get(l.h, (row - 1) * l.H + j) : 0);
}

HPMLG_FN void hpmlg_lstm_forward(hpmlg_device *d, hpml_node *n)
{
    hpmlg_lstm    l = {};
    hpmlg_lstm_layout(d, n, &l);
    int64_t     H = l.H;
    hpmlg_array w_h = hpmlg_factor(d, n->src[2], NULL), gates = hpmlg_of(l.gates, HPML_DTYPE_F32);
    hpmlg_array x = hpmlg_factor(d, n->src[0], n->scratch), w_x = hpmlg_factor(d, n->src[1], NULL);
    hpmlg_gemm  g = hpmlg_gemm_of(l.B * l.T, 4 * H, l.in, hpmlg_matrix(x, l.in, 0, true),
                                  hpmlg_matrix(w_x, l.in, 0, true), gates, 4 * H, false);
    g.bias = n->src[3]->data;
    hpmlg_product(d, &g);
    for (int64_t t = 0; t < l.T; t++) {
        g = hpmlg_gemm_of(l.B, 4 * H, H, hpmlg_matrix(hpmlg_from(l.h, (t - 1) * H), l.T * H, 0, true),
                          hpmlg_matrix(w_h, H, 0, true), hpmlg_from(gates, t * 4 * H), l.T * 4 * H, true);
        if (t > 0) hpmlg_product(d, &g);
        HPMLG_RUN(d, hpmlg_k_lstm, (unsigned)((l.B * H + 255) / 256), 256, 0, l, t);
    }
}

HPMLG_FN void hpmlg_lstm_backward(hpmlg_device *d, hpml_node *n)
{
    hpmlg_lstm    l = {};
    hpmlg_gemm    g;
    hpml_tensor  *x = n->src[0], *w_x = n->src[1], *w_h = n->src[2], *bias = n->src[3];
    hpmlg_lstm_layout(d, n, &l);
    int64_t       H = l.H, rows = l.B * l.T;
    hpmlg_array   half_w_h = hpmlg_factor(d, w_h, NULL);
    for (int64_t t = l.T - 1; t >= 0; t--) {
        HPMLG_RUN(d, hpmlg_k_lstm_back, (unsigned)((l.B * H + 255) / 256), 256, 0, l, t);
        if (t == 0) break; /* dh_{t-1} = da_t W_h */
        g = hpmlg_gemm_of(l.B, H, 4 * H, hpmlg_matrix(hpmlg_from(l.da, t * 4 * H), l.T * 4 * H, 0, true),
                          hpmlg_matrix(half_w_h, H, 0, false), hpmlg_of(l.dh, HPML_DTYPE_F32), H, false);
        hpmlg_product(d, &g);
    }
    hpmlg_side da = hpmlg_matrix(l.da, 4 * H, 0, true), turned = hpmlg_matrix(l.da, 4 * H, 0, false);
    if (x->raw_grad)
        hpmlg_batched(d, 1, rows, l.in, 4 * H, da, hpmlg_matrix(hpmlg_factor(d, w_x, NULL), l.in, 0, false),
                      hpmlg_grad(x), n->accumulate[0]);
    if (w_x->grad)
        hpmlg_batched(d, 1, 4 * H, l.in, rows, turned, hpmlg_matrix(hpmlg_factor(d, x, n->scratch), l.in, 0, false),
                      hpmlg_grad(w_x), n->accumulate[1]);
    if (w_h->grad)
        hpmlg_batched(d, 1, 4 * H, H, rows, turned, hpmlg_matrix(l.before, H, 0, false), hpmlg_grad(w_h),
                      n->accumulate[2]);
    hpmlg_array all = hpmlg_of(l.gates, HPML_DTYPE_F32);
    hpmlg_slopes_run(d, all, all, HPML_ACT_NONE, 0, hpmlg_stretched(1, rows, 4 * H), bias->grad, n->accumulate[3]);
}
HPMLG_OP(lstm) { return back ? hpmlg_lstm_backward(d, n) : hpmlg_lstm_forward(d, n); }

// ---------------------------------------------------------------------------------------------------------------------
// >>gpu-loss   losses
// ---------------------------------------------------------------------------------------------------------------------

/* As in hpml.h: with d_i = x_i - max and sum = sum of exp(d_i), loss = log(sum) - (1 - s) d_l - s mean(d), dx_i =
   exp(d_i) / sum - (1 - s) [i = l] - s / V. One group of threads has a row and reads it once: each thread keeps a
   maximum and the sum of exp(x - maximum), which is rescaled when the maximum grows. Probabilities are not stored; kept
   are max, 1 / sum and loss of each row and 1 / rows that count. Hits are counted on the way. */
typedef struct hpmlg_rows {
    hpmlg_array      x, dx;    /* (rows, V) */
    const int       *labels;   /* (rows) */
    float           *max, *share, *loss, *inverse; /* (rows), 1 / sum (rows), (rows), (1) */
    const float     *dloss;    /* (1) */
    int64_t          rows, V, blocks;
    float            smoothing;
    int              ignore, tx;
    bool             add;
    hpmlg_note      *note;
    int             *taken;
    unsigned long long *counts; /* hits, rows that count */
} hpmlg_rows;

#define HPMLG_LOWEST (-3.402823466e38f) /* not infinity: rows may begin with it, and inf - inf is NaN */

HPMLG_DEVICE bool hpmlg_label_counts(int label, int ignore, int64_t classes)
{
    return label != ignore && label >= 0 && label < classes;
}

/* A row is a hit unless an element before the label's is as large, or one after it larger. A NaN hits nothing; at the
   front it is never overtaken. node NULL: hits are counted, nothing else. */
static __global__ void hpmlg_k_cross_entropy(hpmlg_rows p, const hpml_node *node)
{
    __shared__ float space[HPMLG_FOLD / HPMLG_WARP];
    int64_t row = (int64_t)blockIdx.x * (HPMLG_FOLD / p.tx) + threadIdx.x / (unsigned)p.tx, first = row * p.V;
    int64_t end = first + p.V;
    int     lane = (int)threadIdx.x % p.tx, label = row < p.rows ? p.labels[row] : p.ignore;
    bool    counts = row < p.rows && hpmlg_label_counts(label, p.ignore, p.V);
    float   m = HPMLG_LOWEST, s = 0, all = 0, mine = counts ? hpmlg_get(p.x, first + label) : 0;
    float   beaten = counts && label > 0 && (mine != mine || isnan(hpmlg_get(p.x, first)));
    for (int64_t at = first / 8 * 8 + lane * 8; counts && at < end; at += p.tx * 8) {
        hpmlg_eight e = hpmlg_get_part(p.x, at, first, end, -INFINITY);
        float       most = m;
        bool        more = false;
        for (int j = 0; j < 8; j++)
            more = more || e.v[j] > mine || (e.v[j] == mine && at + j >= first && at + j < first + label);
        if (more) beaten = 1;
        for (int j = 0; j < 8; j++) most = fmaxf(most, e.v[j]);
        s *= __expf(m - most);
        m = most;
        for (int j = 0; j < 8; j++) s += __expf(e.v[j] - m);
        for (int j = 0; j < 8 && p.smoothing > 0; j++) all += at + j >= first && at + j < end ? e.v[j] - mine : 0;
    }
    float most = hpmlg_group(m, space, p.tx, true);
    s = hpmlg_group(s * __expf(m - most), space, p.tx, false);
    beaten = hpmlg_group(beaten, space, p.tx, true);
    if (p.smoothing > 0) all = hpmlg_group(all, space, p.tx, false);
    if (lane != 0 || row >= p.rows) return;
    if (counts) atomicAdd(&p.counts[1], 1ull); /* integers may be added in any order */
    if (counts && beaten == 0) atomicAdd(&p.counts[0], 1ull);
    if (!node) return;
    p.max[row]   = most;
    p.share[row] = 1 / s;
    p.loss[row]  = 0;
    if (counts) p.loss[row] = logf(s) - (mine - most) - p.smoothing * all / (float)p.V; /* all: sum of x - x_l */
    else if (label != p.ignore) hpmlg_complain(p.note, p.taken, row, label, node);
}

static __global__ void hpmlg_k_cross_entropy_back(hpmlg_rows p)
{
    int64_t row = (int64_t)blockIdx.x * (HPMLG_FOLD / p.tx) + threadIdx.x / (unsigned)p.tx, first = row * p.V;
    int64_t end = first + p.V;
    int     lane = (int)threadIdx.x % p.tx;
    if (row >= p.rows) return;
    bool    counts = hpmlg_label_counts(p.labels[row], p.ignore, p.V);
    int64_t label = first + p.labels[row];
    float   scale = p.inverse[0] * p.dloss[0], rest = scale * p.smoothing / (float)p.V;
    float   most = p.max[row], share = scale * p.share[row];
    if (!counts && p.add) return;
    for (int64_t at = first / 8 * 8 + lane * 8; at < end; at += p.tx * 8) {
        hpmlg_eight e;
        if (counts) e = hpmlg_get_part(p.x, at, first, end, 0);
        for (int j = 0; j < 8; j++) e.v[j] = counts ? share * __expf(e.v[j] - most) - rest : 0;
        if (counts && label >= at && label < at + 8)
            for (int j = 0; j < 8; j++)
                if (at + j == label) e.v[j] -= scale * (1 - p.smoothing);
        hpmlg_put_part(p.dx, at, first, end, e, p.add);
    }
}

HPMLG_FN hpmlg_rows hpmlg_rows_make(hpmlg_array x, const void *labels, int64_t rows, int64_t V)
{
    hpmlg_rows p = {};
    p.x = x, p.labels = (const int *)labels, p.rows = rows, p.V = V, p.ignore = -1;
    p.tx = hpmlg_power((V + 14) / 8, HPMLG_FOLD);
    p.blocks = (rows + HPMLG_FOLD / p.tx - 1) / (HPMLG_FOLD / p.tx);
    return p;
}

HPMLG_FN void hpmlg_loss_run(hpmlg_device *d, const hpmlg_rows *p, const hpml_node *n)
{
    hpmlg_zero(d, p->counts, 2 * sizeof *p->counts);
    HPMLG_RUN(d, hpmlg_k_cross_entropy, (unsigned)p->blocks, HPMLG_FOLD, 0, *p, n);
}

HPMLG_OP(cross_entropy)
{
    const hpml_tensor *x = n->src[0];
    int64_t            V = x->shape[x->ndim - 1];
    hpmlg_rows         p = hpmlg_rows_make(hpmlg_value(x), n->src[1]->raw, hpml_tensor_count(x) / V, V);
    hpmlg_finish       f = {};
    p.dx = hpmlg_grad(x), p.dloss = n->out->grad, p.add = n->accumulate[0];
    p.max = (float *)n->saved, p.share = p.max + p.rows, p.loss = p.share + p.rows, p.inverse = p.loss + p.rows;
    p.smoothing = n->attr.cross_entropy.smoothing, p.ignore = n->attr.cross_entropy.ignore;
    p.note = d->note, p.taken = d->note_taken, p.counts = d->counts;
    if (back) return HPMLG_RUN(d, hpmlg_k_cross_entropy_back, (unsigned)p.blocks, HPMLG_FOLD, 0, p);
    bool classes = p.ignore < 0 || p.ignore >= V; /* all that count are */
    d->left.y = classes ? p.x.p : NULL, d->left.labels = p.labels;
    hpmlg_loss_run(d, &p, n);
    f.part = p.loss, f.n = p.rows, f.counted = &p.counts[1], f.out = n->out->data, f.inverse = p.inverse;
    HPMLG_RUN(d, hpmlg_k_finish, 1, 1024, 0, f);
}

HPMLG_FN hpml_status hpmlg_correct(void *, hpml_ctx *ctx, hpml_dtype dtype, const void *y, const int32_t *labels,
                                   int64_t rows, int64_t classes, int64_t counts[2])
{
    hpmlg_device *d = hpmlg_enter(ctx);
    hpmlg_rows    p = hpmlg_rows_make(hpmlg_of((void *)y, dtype), labels, rows, classes);
    p.counts = (unsigned long long *)counts;
    if (d->left.y != y || d->left.labels != (const void *)labels) hpmlg_loss_run(d, &p, NULL);
    else /* the loss has counted them */
        hpmlg_check(d, cudaMemcpyAsync(counts, d->counts, 2 * sizeof *counts, cudaMemcpyDeviceToDevice, d->stream),
                    "hits");
    return hpml_ctx_status(ctx);
}

HPMLG_DEVICE float hpmlg_term_slope(int what, float delta, float x, float t)
{
    float d = x - t;
    if (what == HPMLG_BCE) return hpmlg_act_sigmoid(x) - t;
    if (what == HPMLG_MSE) return 2 * d;
    if (delta == 0) return d > 0 ? 1.0f : d < 0 ? -1.0f : 0.0f;
    return d > delta ? delta : d < -delta ? -delta : d;
}

/* dx (+)= slope * dloss / n, dt (+)= the opposite; p NULL: not wanted. */
static __global__ void hpmlg_k_term_back(hpmlg_array dx, hpmlg_array dt, hpmlg_array x, hpmlg_array t, int what,
                                         float delta, const float *dloss, int64_t n, bool add_x, bool add_t)
{
    float scale = dloss[0] / (float)n;
    HPMLG_EIGHTS(at, n) {
        hpmlg_eight e = hpmlg_get_part(x, at, 0, n, 0), u = hpmlg_get_part(t, at, 0, n, 0);
        for (int j = 0; j < 8; j++) e.v[j] = scale * hpmlg_term_slope(what, delta, e.v[j], u.v[j]);
        if (dx.p) hpmlg_put_part(dx, at, 0, n, e, add_x);
        for (int j = 0; j < 8; j++) e.v[j] = -e.v[j];
        if (dt.p) hpmlg_put_part(dt, at, 0, n, e, add_t);
    }
}

HPMLG_FN enum hpmlg_term hpmlg_term_of(const hpml_node *n)
{
    if (n->op == HPML_OP_BCE_WITH_LOGITS) return HPMLG_BCE;
    return n->op == HPML_OP_MSE ? HPMLG_MSE : HPMLG_HUBER;
}

HPMLG_FN void hpmlg_term_pass(hpmlg_device *d, hpml_node *n, bool back)
{
    const hpml_tensor *x = n->src[0], *t = n->src[1];
    int64_t            count = hpml_tensor_count(x);
    float              delta = n->op == HPML_OP_HUBER ? n->attr.huber.delta : 0;
    hpmlg_finish       f = {};
    f.divisor = (double)count, f.out = n->out->data;
    if (!back) return hpmlg_total_run(d, f, hpmlg_value(x), hpmlg_value(t), hpmlg_term_of(n), delta, count);
    if (n->op == HPML_OP_BCE_WITH_LOGITS && t->raw_grad)
        hpml_ctx_fail(d->ctx, HPML_ERR_UNSUPPORTED, "bce_with_logits: the target \"%s\" is computed from parameters; "
                      "only the logits get a gradient", t->name);
    HPMLG_DEAL(d, hpmlg_k_term_back, count, 2048, hpmlg_grad(x), hpmlg_grad(t), hpmlg_value(x), hpmlg_value(t),
               (int)hpmlg_term_of(n), delta, (const float *)n->out->grad, count, n->accumulate[0], n->accumulate[1]);
}
HPMLG_OP(bce_with_logits) { return hpmlg_term_pass(d, n, back); }
HPMLG_OP(mse) { return hpmlg_term_pass(d, n, back); }
HPMLG_OP(huber) { return hpmlg_term_pass(d, n, back); }

// ---------------------------------------------------------------------------------------------------------------------
// >>gpu-update   optimizers: one launch for all parameters
// ---------------------------------------------------------------------------------------------------------------------

/* The parameters of a model, some of a few numbers and some of millions, are cut into chunks; a block finds the
   parameter of its chunk in a table that is uploaded for each step. LARS and LAMB need the norms of whole parameters:
   every chunk leaves its sums of squares, and one block for a parameter adds them in order. A weight that would not be
   finite stays, moments that are not finite start again from 0, as on the CPU, and both are noted (hpml_update.bad). */

#define HPMLG_CHUNK ((int64_t)4096) /* two turns of a block */

typedef struct hpmlg_step {
    hpml_update u;
    float       correction1, correction2; /* 1 - beta^step */
    void       *half;                     /* (n) the copy of w in halves, NULL: none */
    int64_t     chunk, chunks;            /* the first of its chunks, and how many */
    int         param;                    /* its number in the context; -1: not known */
} hpmlg_step;

typedef struct hpmlg_finder { /* where an update records a non-finite gradient or parameter */
    unsigned long long *worst;
    hpmlg_note         *note;
} hpmlg_finder;

HPMLG_DEVICE void hpmlg_note_nonfinite(const hpmlg_finder &f, const hpmlg_step *s, bool gradient)
{
    unsigned long long found = hpmlg_worst_of(s->u.step, s->param, gradient);
    if (atomicMax(f.worst, found) >= found) return;
    __threadfence_system();
    f.note->nonfinite = 1;
}

HPMLG_DEVICE const hpmlg_step *hpmlg_step_find(const hpmlg_step *steps, int count, int64_t chunk)
{
    int low = 0, high = count; /* the last whose first chunk is not beyond */
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (steps[middle].chunk <= chunk) low = middle;
        else high = middle;
    }
    return &steps[low];
}

HPMLG_DEVICE float hpmlg_step_scale(const hpml_update &u)
{
    float norm = u.sumsq ? (float)sqrt(*u.sumsq) : 0;
    return norm > u.clip ? u.grad_scale * (u.clip / norm) : u.grad_scale;
}

HPMLG_DEVICE float hpmlg_moment(float *state, float g, float beta) { return *state = fmaf(1 - beta, g, beta * *state); }

/* The new w of one number, for LAMB its direction; hpml.h, vupdate, has the formulas. */
HPMLG_DEVICE float hpmlg_step_one(const hpml_update *u, float c1, float c2, float w, float g, float *m, float *v)
{
    float step = 0;
    bool  coupled = u->opt != HPML_OPT_ADAMW && u->opt != HPML_OPT_LAMB;
    g *= u->grad_scale;
    if (coupled) g = fmaf(u->weight_decay, w, g);
    switch (u->opt) {
    case HPML_OPT_SGD: case HPML_OPT_LARS:
        step = g;
        if (u->m) {
            *m   = u->step == 1 ? g : fmaf(u->momentum, *m, g);
            step = u->nesterov ? fmaf(u->momentum, *m, g) : *m;
        }
        break;
    case HPML_OPT_ADAGRAD:
        *v   = fmaf(g, g, *v);
        step = g / (sqrtf(*v) + u->eps);
        break;
    case HPML_OPT_RMSPROP:
        step = g / (sqrtf(hpmlg_moment(v, g * g, u->beta2)) + u->eps);
        if (u->m) step = *m = fmaf(u->momentum, *m, step);
        break;
    default: /* ADAM, ADAMW, LAMB */
        step = hpmlg_moment(m, g, u->beta1) / c1;
        step /= sqrtf(hpmlg_moment(v, g * g, u->beta2) / c2) + u->eps;
        if (u->opt == HPML_OPT_LAMB) return fmaf(u->weight_decay, w, step);
        if (u->opt == HPML_OPT_ADAMW) w = fmaf(-(u->lr * u->weight_decay), w, w);
    }
    return fmaf(-u->lr, step, w);
}

/* The same, where what is not finite stays out as on the CPU: a gradient counts as 0 for LAMB, a weight that would not
   be finite stays, and states that are not start again. *gradient, *step: set where that was so. */
HPMLG_DEVICE float hpmlg_step_checked(const hpml_update *u, float c1, float c2, float w, float g, float *m, float *v,
                                      bool *gradient, bool *step)
{
    bool  good = isfinite(g * u->grad_scale), lamb = u->opt == HPML_OPT_LAMB;
    float y = hpmlg_step_one(u, c1, c2, w, good || !lamb ? g : 0, m, v);
    bool  states = isfinite(*m) && isfinite(*v);
    if (!states) *m = *v = 0;
    *gradient = *gradient || !good;
    *step     = *step || (good && !(states && isfinite(y)));
    return isfinite(y) || lamb ? y : w;
}

/* The step of every chunk. With LARS and LAMB it takes two passes: the first leaves the sums of squares of w and of g,
   or, LAMB, of the direction, which is written over g; the second finds the ratio of the layer in the learning rate. */
static __global__ void hpmlg_k_update(const hpmlg_step *steps, int count, int64_t chunks, double2 *part, int half_type,
                                      int pass, hpmlg_finder finder)
{
    __shared__ float space[HPMLG_WARP];
    for (int64_t chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
        const hpmlg_step *s = hpmlg_step_find(steps, count, chunk);
        hpml_update       u = s->u;
        const float       c1 = s->correction1, c2 = s->correction2;
        const bool        lars = u.opt == HPML_OPT_LARS, lamb = u.opt == HPML_OPT_LAMB;
        const bool        look = lars && pass == 0, apply = lamb && pass == 1, direction = lamb && pass == 0;
        if (pass == 1 && !lars && !lamb) continue;
        u.grad_scale = hpmlg_step_scale(u);
        hpmlg_array w = { u.w, HPML_DTYPE_F32 }, g = { (void *)u.g, HPML_DTYPE_F32 }, m = { u.m, HPML_DTYPE_F32 };
        hpmlg_array v = { u.v, HPML_DTYPE_F32 }, copy = { s->half, half_type };
        int64_t     from = (chunk - s->chunk) * HPMLG_CHUNK, to = from + HPMLG_CHUNK < u.n ? from + HPMLG_CHUNK : u.n;
        float       ww = 0, gg = 0;
        bool        gradient = false, step = false; /* what is not finite */
        if (look || apply) m.p = v.p = NULL;
        for (int64_t i = from + 8 * threadIdx.x; i < to; i += 8 * blockDim.x) {
            hpmlg_eight x = hpmlg_row_get(w, 0, u.n, i, 0), d = hpmlg_row_get(g, 0, u.n, i, 0), p = {}, q = {};
            if (m.p) p = hpmlg_row_get(m, 0, u.n, i, 0);
            if (v.p) q = hpmlg_row_get(v, 0, u.n, i, 0);
            for (int j = 0; j < 8; j++) {
                float y = d.v[j];
                if (apply) y = fmaf(-u.lr, y, x.v[j]);
                else if (!look && !u.bad) y = hpmlg_step_one(&u, c1, c2, x.v[j], y, &p.v[j], &q.v[j]);
                else if (!look)
                    y = hpmlg_step_checked(&u, c1, c2, x.v[j], y, &p.v[j], &q.v[j], &gradient, &step);
                ww += x.v[j] * x.v[j], gg += y * y;
                d.v[j] = y;
            }
            if (look) continue;
            if (m.p) hpmlg_row_put(m, 0, u.n, i, p, false);
            if (v.p) hpmlg_row_put(v, 0, u.n, i, q, false);
            hpmlg_row_put(direction ? g : w, 0, u.n, i, d, false);
            if (copy.p && !direction) hpmlg_row_put(copy, 0, u.n, i, d, false);
        }
        if (gradient) hpmlg_note_nonfinite(finder, s, true);
        if (step) hpmlg_note_nonfinite(finder, s, false);
        if (pass == 1 || (!lars && !lamb)) continue;
        ww = hpmlg_group(ww, space, 256, false), gg = hpmlg_group(gg, space, 256, false);
        if (threadIdx.x == 0) part[chunk] = make_double2((double)ww, (double)gg);
    }
}

/* One block for a parameter: the layer's factor goes into its learning rate. LARS: trust |w| / (|g| + decay |w|), none
   without trust, and the rate into the momentum; LAMB: |w| / |direction|. */
static __global__ void hpmlg_k_update_rates(hpmlg_step *steps, const double2 *part)
{
    __shared__ double all[2][256];
    hpmlg_step *s  = &steps[blockIdx.x];
    double      ww = 0, gg = 0;
    bool        lamb = s->u.opt == HPML_OPT_LAMB;
    if ((!lamb && s->u.opt != HPML_OPT_LARS) || s->chunks == 0) return;
    part += s->chunk;
    for (int64_t i = threadIdx.x; i < s->chunks; i += blockDim.x) ww += part[i].x, gg += part[i].y;
    all[0][threadIdx.x] = ww, all[1][threadIdx.x] = gg;
    for (int h = (int)blockDim.x / 2; h > 0; h /= 2) {
        __syncthreads();
        for (int k = 0; k < 2 && (int)threadIdx.x < h; k++) all[k][threadIdx.x] += all[k][threadIdx.x + h];
    }
    if (threadIdx.x != 0) return;
    ww = sqrt(all[0][0]), gg = sqrt(all[1][0]);
    if (!lamb) gg = gg * (double)hpmlg_step_scale(s->u) + (double)s->u.weight_decay * ww;
    if (ww > 0 && gg > 0 && (lamb || s->u.trust > 0)) s->u.lr *= (float)((lamb ? 1 : (double)s->u.trust) * ww / gg);
    if (s->u.bad && !lamb && !isfinite(gg)) s->u.lr = 0; /* a non-finite gradient has no direction: no step */
    if (lamb) return;
    s->u.grad_scale *= s->u.lr, s->u.weight_decay *= s->u.lr, s->u.lr = 1;
}

/* The half copy that w (n) is all or a piece of: the step writes it too. Others that w overlaps are old then. */
HPMLG_FN void *hpmlg_update_half(hpmlg_device *d, const float *w, int64_t n)
{
    for (hpmlg_weights *h = d->weights; h; h = h->next) {
        if (w < h->w || w + n > h->w + h->n) continue;
        h->fresh = h->fresh || n == h->n;
        return (char *)h->half + (size_t)(w - h->w) * hpml_dtype_size(d->store);
    }
    hpmlg_weights_touch(d, w, (size_t)n * sizeof *w);
    return NULL;
}

/* The number of the parameter that w lies in, which mostly follows the one before; -1: none. */
HPMLG_FN int hpmlg_param_number(const hpml_ctx *ctx, const float *w, int before)
{
    int count = hpml_param_count(ctx);
    for (int k = 1; k <= count; k++) {
        int                i = (before + k) % count;
        const hpml_tensor *p = hpml_param_at(ctx, i);
        if (p->data && w >= p->data && w < p->data + hpml_tensor_count(p)) return i;
    }
    return -1;
}

HPMLG_FN hpmlg_step hpmlg_step_of(hpmlg_device *d, const hpml_update *u, int64_t chunk, int before)
{
    hpmlg_step s = {};
    s.u           = *u;
    s.param       = u->bad && u->n > 0 ? hpmlg_param_number(d->ctx, u->w, before) : before;
    s.correction1 = (float)(1 - pow((double)u->beta1, (double)u->step));
    s.correction2 = (float)(1 - pow((double)u->beta2, (double)u->step));
    s.half        = u->n > 0 ? hpmlg_update_half(d, u->w, u->n) : NULL;
    s.chunk = chunk, s.chunks = (u->n + HPMLG_CHUNK - 1) / HPMLG_CHUNK;
    return s;
}

/* Room for the table and the parts on the device; grows with the first step of a larger model. */
HPMLG_FN hpml_status hpmlg_update_room(hpmlg_device *d, size_t bytes)
{
    if (bytes <= d->updates_room) return HPML_OK;
    hpmlg_free(d, d->updates, d->updates_room); /* when the step before is done with it */
    d->updates      = hpmlg_own(d, bytes, "the table of parameters");
    d->updates_room = d->updates ? bytes : 0;
    return hpml_ctx_status(d->ctx);
}

HPMLG_FN hpml_status hpmlg_update(void *, hpml_ctx *ctx, const hpml_update *updates, int count)
{
    hpmlg_device *d = hpmlg_enter(ctx);
    hpmlg_step    some[32];
    int64_t       chunks = 0;
    bool          twice = false;
    for (int i = 0; i < count; i++) {
        chunks += (updates[i].n + HPMLG_CHUNK - 1) / HPMLG_CHUNK;
        twice = twice || updates[i].opt == HPML_OPT_LARS || updates[i].opt == HPML_OPT_LAMB;
    }
    if (chunks == 0) return HPML_OK;
    size_t      table  = ((size_t)count * sizeof(hpmlg_step) + 255) / 256 * 256;
    hpml_status status = hpmlg_update_room(d, table + (twice ? (size_t)chunks * sizeof(double2) : 0));
    hpmlg_step *steps  = (hpmlg_step *)d->updates;
    double2    *part   = (double2 *)(void *)((char *)d->updates + table);
    int64_t     chunk  = 0;
    int         before = -1;
    hpmlg_finder finder = { d->worst, d->note };
    for (int i = 0; i < count && status == HPML_OK; i += 32) {
        int n = count - i < 32 ? count - i : 32;
        for (int j = 0; j < n; j++) {
            some[j] = hpmlg_step_of(d, &updates[i + j], chunk, before);
            chunk += some[j].chunks, before = some[j].param;
        }
        status = hpmlg_upload(d, steps + i, some, (size_t)n * sizeof *some);
    }
    for (int pass = 0; pass <= (int)twice; pass++) {
        HPMLG_DEAL(d, hpmlg_k_update, chunks, 1, steps, count, chunks, part, (int)d->store, pass, finder);
        if (pass < (int)twice) HPMLG_RUN(d, hpmlg_k_update_rates, (unsigned)count, 256, 0, steps, part);
    }
    for (hpmlg_weights *w = hpmlg_well(d) ? NULL : d->weights; w; w = w->next) w->fresh = false; /* nothing is sure */
    return hpml_ctx_status(d->ctx);
}

// ---------------------------------------------------------------------------------------------------------------------
// >>gpu-codec   gradients packed on the device
// ---------------------------------------------------------------------------------------------------------------------

/* The bytes and residuals of hpml.h's codecs, bit for bit; sections api-codec and onebit there say what they are. The
   sums of ONEBIT are taken as on the CPU: element i of a chunk of 1,024 goes to lane i % 16, lanes are joined by
   halves, chunks in order in double. Half a warp does a chunk, a number in each lane's registers for every turn; rows
   of up to 16 chunks are read once. A row that holds a NaN or an infinity is marked while packed, then wiped. */

#define HPMLG_PACK_ROWS    ((int64_t)262136) /* rows at a time: their marks fit in the scratch memory; whole eights */
#define HPMLG_ONEBIT_CHUNK 1024
#define HPMLG_ONEBIT_TURNS (HPMLG_ONEBIT_CHUNK / 16) /* of a lane */

typedef struct hpmlg_pack { /* rows of one call */
    unsigned char *packed;
    float         *e;        /* (rows, cols), NULL: no feedback */
    const float   *g;        /* (rows, cols) */
    int64_t        rows, cols, row_size;
    int           *bad;      /* (1 + rows): any, and each */
    int            printed;
    float          threshold;
} hpmlg_pack;

HPMLG_DEVICE void hpmlg_pack_mark(const hpmlg_pack *p, int64_t row) { p->bad[0] = p->bad[1 + row] = 1; }

typedef struct hpmlg_chunk { /* one chunk, or row: [0] what is negative, [1] the rest */
    float sum[2], least[2], most[2];
    int   ones;
} hpmlg_chunk;

/* A chunk by half a warp: n numbers from g and e; v: this lane's, bits: words 2 lane and 2 lane + 1 of the chunk. */
HPMLG_DEVICE hpmlg_chunk hpmlg_onebit_scan(float v[HPMLG_ONEBIT_TURNS], unsigned bits[2], const float *g,
                                           const float *e, int n, int turns)
{
    int         lane = (int)threadIdx.x % 16, shift = (int)threadIdx.x & 16;
    hpmlg_chunk s    = { { 0, 0 }, { INFINITY, INFINITY }, { -INFINITY, -INFINITY }, 0 };
    bits[0] = bits[1] = 0;
    HPMLG_UNROLL for (int j = 0; j < HPMLG_ONEBIT_TURNS; j++) v[j] = 16 * j + lane < n ? g[16 * j + lane] : 0;
    HPMLG_UNROLL for (int j = 0; j < HPMLG_ONEBIT_TURNS; j++)
        if (e && 16 * j + lane < n) v[j] += e[16 * j + lane];
    HPMLG_UNROLL for (int j = 0; j < HPMLG_ONEBIT_TURNS; j++) {
        if (j >= turns) break;
        bool     in = 16 * j + lane < n, high = v[j] >= 0;
        unsigned m  = __ballot_sync(HPMLG_ALL, in && high) >> shift & 0xffffu;
        if (j / 4 == lane) bits[j / 2 % 2] |= m << 16 * (j % 2);
        s.ones += __popc(m);
        s.sum[0] += high ? 0 : v[j];
        s.sum[1] += high ? v[j] : 0;
        if (in && high) s.least[1] = fminf(s.least[1], v[j]), s.most[1] = fmaxf(s.most[1], v[j]);
        if (in && !high) s.least[0] = fminf(s.least[0], v[j]), s.most[0] = fmaxf(s.most[0], v[j]);
    }
    for (int k = 0; k < 2; k++)
        for (int o = 8; o > 0; o /= 2) {
            s.sum[k] += __shfl_xor_sync(HPMLG_ALL, s.sum[k], o);
            s.least[k] = fminf(s.least[k], __shfl_xor_sync(HPMLG_ALL, s.least[k], o));
            s.most[k]  = fmaxf(s.most[k], __shfl_xor_sync(HPMLG_ALL, s.most[k], o));
        }
    return s;
}

/* Mean of a side, within its least and greatest element; 0 where it is empty. */
HPMLG_DEVICE float hpmlg_onebit_level(double sum, int64_t count, float least, float most)
{
    float mean = count ? (float)(sum / (double)count) : 0;
    if (count && mean < least) mean = least;
    if (count && mean > most) mean = most;
    return mean;
}

/* A row of words: low, high, bits. */
HPMLG_DEVICE float *hpmlg_onebit_row(const hpmlg_pack *p, int64_t row)
{
    return (float *)(void *)(p->packed + row * p->row_size);
}

HPMLG_DEVICE void hpmlg_onebit_bits(const hpmlg_pack *p, int64_t row, int64_t chunk, const unsigned bits[2])
{
    unsigned *words = (unsigned *)hpmlg_onebit_row(p, row) + 2;
    int64_t   at    = 32 * chunk + 2 * (threadIdx.x % 16), count = (p->cols + 31) / 32;
    for (int k = 0; k < 2; k++)
        if (at + k < count) words[at + k] = bits[k];
}

/* A block packs 16 / chunks rows at a time; of a row over 16,384 columns, one block's work (few such rows leave most of
   the device idle), 16 chunks: v stays in e until the levels are known. each: chunks side by side. */
template <bool longer>
static __global__ void __launch_bounds__(256, 2) hpmlg_k_onebit(hpmlg_pack p, int64_t chunks, int each)
{
    __shared__ hpmlg_chunk all[16];
    int   team = (int)threadIdx.x / 16, lane = (int)threadIdx.x % 16, slots = 16 / each, slot = team / each;
    int   turns = p.cols < HPMLG_ONEBIT_CHUNK ? (int)(p.cols + 15) / 16 : HPMLG_ONEBIT_TURNS;
    float v[HPMLG_ONEBIT_TURNS];
    for (int64_t first = (int64_t)blockIdx.x * slots; first < p.rows; first += (int64_t)gridDim.x * slots) {
        int64_t row = first + slot, ones = 0, chunk;
        bool    mine = slot < slots && row < p.rows;
        double  sum[2] = { 0, 0 };
        float   least[2] = { INFINITY, INFINITY }, most[2] = { -INFINITY, -INFINITY };
        auto    count = [&]() { /* numbers of this team's chunk */
            int64_t left = mine ? p.cols - chunk * HPMLG_ONEBIT_CHUNK : 0;
            return (int)(left < 0 ? 0 : left < HPMLG_ONEBIT_CHUNK ? left : HPMLG_ONEBIT_CHUNK);
        };
        for (int64_t c0 = 0; c0 < (longer ? chunks : 1); c0 += each) {
            unsigned bits[2];
            chunk = c0 + team % each;
            int          n = count();
            int64_t      at = row * p.cols + chunk * HPMLG_ONEBIT_CHUNK;
            hpmlg_chunk  s = hpmlg_onebit_scan(v, bits, p.g + at, p.e && n ? p.e + at : NULL, n, turns);
            __syncthreads();
            if (lane == 0) all[team] = s;
            __syncthreads();
            for (int c = 0; mine && c < each && c0 + c < chunks; c++) {
                const hpmlg_chunk *o = &all[slot * each + c];
                ones += o->ones;
                for (int k = 0; k < 2; k++) {
                    sum[k] += (double)o->sum[k];
                    least[k] = fminf(least[k], o->least[k]), most[k] = fmaxf(most[k], o->most[k]);
                }
            }
            if (n > 0) hpmlg_onebit_bits(&p, row, chunk, bits);
            HPMLG_UNROLL for (int j = 0; j < HPMLG_ONEBIT_TURNS; j++)
                if (longer && p.e && 16 * j + lane < n) p.e[at + 16 * j + lane] = v[j];
        }
        float low  = hpmlg_onebit_level(sum[0], p.cols - ones, least[0], most[0]);
        float high = hpmlg_onebit_level(sum[1], ones, least[1], most[1]);
        if (mine && lane == 0 && team % each == 0) {
            hpmlg_onebit_row(&p, row)[0] = low, hpmlg_onebit_row(&p, row)[1] = high;
            if (!(isfinite(sum[0]) && isfinite(sum[1]))) hpmlg_pack_mark(&p, row);
        }
        for (int64_t c0 = 0; p.e && c0 < (longer ? chunks : 1); c0 += each) {
            chunk = c0 + team % each;
            int    n = count();
            float *e = p.e + row * p.cols + chunk * HPMLG_ONEBIT_CHUNK;
            HPMLG_UNROLL for (int j = 0; j < HPMLG_ONEBIT_TURNS; j++) {
                int i = 16 * j + lane;
                if (i >= n) break;
                float x = longer ? e[i] : v[j];
                e[i] = (p.printed ? p.g[e - p.e + i] : x) - (x >= 0 ? high : low);
            }
        }
    }
}

/* What TWOBIT sends: 0 for 0 (codes 0 and 1), code 2 for -threshold, 3 for threshold. */
HPMLG_DEVICE float hpmlg_twobit_value(const hpmlg_pack &p, unsigned code)
{
    return code < 2 ? 0 : code == 3 ? p.threshold : -p.threshold;
}

/* TWOBIT, 8 elements of a row are 16 bits, rows end with whole words; else BF16, whose rows are one to it. */
template <bool two> static __global__ void __launch_bounds__(256, 6) hpmlg_k_pack(hpmlg_pack p)
{
    hpmlg_array out = { p.packed, HPML_DTYPE_BF16 }, e = { p.e, HPML_DTYPE_F32 }, g = { (void *)p.g, HPML_DTYPE_F32 };
    int64_t     rows = two ? p.rows : 1, cols = two ? p.cols : p.rows * p.cols;
    int64_t     eights = two ? (cols + 15) / 16 * 2 : (cols + 7) / 8;
    HPMLG_EACH(u, rows * eights) {
        int64_t     row = two ? hpmlg_quotient(u, eights) : 0, k = u - row * eights;
        hpmlg_eight x = hpmlg_row_get(g, row, cols, 8 * k, 0), v = x, lost;
        unsigned    codes = 0, bad = 0;
        if (p.e) {
            lost = hpmlg_row_get(e, row, cols, 8 * k, 0);
            for (int j = 0; j < 8; j++) v.v[j] += lost.v[j];
        }
        for (int j = 0; j < 8; j++) {
            unsigned code = v.v[j] >= p.threshold ? 3 : v.v[j] <= -p.threshold ? 2 : 0;
            float    sent = two ? hpmlg_twobit_value(p, code) : hpmlg_rounded(v.v[j], HPML_DTYPE_BF16);
            codes |= code << 2 * j;
            lost.v[j] = (p.printed ? x.v[j] : v.v[j]) - sent;
            bad |= (unsigned)!isfinite(two ? v.v[j] : sent) << j;
        }
        HPMLG_ROLLED for (int j = 0; bad >> j; j++)
            if (bad >> j & 1) hpmlg_pack_mark(&p, two ? row : hpmlg_quotient(8 * k + j, p.cols));
        if (two) ((unsigned short *)hpmlg_onebit_row(&p, row))[k] = (unsigned short)codes;
        else hpmlg_row_put(out, 0, cols, 8 * k, v, false);
        if (p.e) hpmlg_row_put(e, row, cols, 8 * k, lost, false);
    }
}

/* Marked rows are packed as zeros and carry nothing: a block a row. */
static __global__ void hpmlg_k_pack_wipe(hpmlg_pack p)
{
    for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
        if (!p.bad[1 + row]) continue;
        for (int64_t i = threadIdx.x; i < p.row_size; i += blockDim.x) p.packed[row * p.row_size + i] = 0;
        for (int64_t i = threadIdx.x; p.e && i < p.cols; i += blockDim.x) p.e[row * p.cols + i] = 0;
    }
}

/* Which of hpml.h's codecs a tensor gets; one of the user's own has no kernels. */
HPMLG_FN hpml_status hpmlg_pack_kind(hpml_ctx *ctx, const hpml_packing *p, int *kind)
{
    for (*kind = HPML_CODEC_NONE; *kind <= HPML_CODEC_TWOBIT; ++*kind)
        if (p->codec == hpml_codec_get((hpml_codec_kind)*kind)) return HPML_OK;
    return hpml_ctx_fail(ctx, HPML_ERR_UNSUPPORTED, "cuda: codec \"%s\" is custom and runs on the CPU only; take one "
                         "of hpml_codec_kind, or a context without this backend", p->codec->name ? p->codec->name : "");
}

HPMLG_FN hpmlg_pack hpmlg_pack_of(const hpml_packing *p, const void *packed, int64_t row, int64_t rows)
{
    hpmlg_pack some = {};
    some.packed = (unsigned char *)packed + (size_t)row * p->row_size, some.row_size = (int64_t)p->row_size;
    some.rows = rows, some.cols = p->cols, some.printed = p->desc.printed_residual;
    some.threshold = p->desc.threshold > 0 ? p->desc.threshold : 0.5f;
    return some;
}

/* Some rows of a lossy codec. */
HPMLG_FN void hpmlg_pack_some(hpmlg_device *d, int kind, hpmlg_pack p)
{
    int64_t n = p.rows * p.cols, chunks = (p.cols + HPMLG_ONEBIT_CHUNK - 1) / HPMLG_ONEBIT_CHUNK;
    int     each = chunks < 16 ? (int)chunks : 16;
    hpmlg_zero(d, p.bad + 1, (size_t)p.rows * sizeof(int));
    if (kind == HPML_CODEC_TWOBIT) HPMLG_DEAL(d, hpmlg_k_pack<true>, n, 2048, p);
    if (kind == HPML_CODEC_BF16) HPMLG_DEAL(d, hpmlg_k_pack<false>, n, 2048, p);
    if (kind == HPML_CODEC_ONEBIT)
        HPMLG_RUN_EITHER(d, chunks > 16, hpmlg_k_onebit, true, false, hpmlg_blocks(d, p.rows, 16 / each), 256, 0, p,
                         chunks, each);
    HPMLG_DEAL(d, hpmlg_k_pack_wipe, p.rows, 1, p);
}

HPMLG_FN hpml_status hpmlg_encode(void *, hpml_ctx *ctx, const hpml_packing *p, void *packed, float *residual,
                                  const float *grad, int64_t rows)
{
    hpmlg_device *d = hpmlg_enter(ctx);
    int           kind, any = 0, *bad = (int *)d->scratch;
    hpml_status   status = hpmlg_pack_kind(ctx, p, &kind);
    if (status != HPML_OK || rows <= 0 || p->cols <= 0) return status;
    if (kind == HPML_CODEC_NONE) {
        hpmlg_copy_run(d, hpmlg_of(packed, HPML_DTYPE_F32), hpmlg_of((void *)grad, HPML_DTYPE_F32), rows * p->cols,
                       false);
        return hpml_ctx_status(ctx);
    }
    hpmlg_zero(d, bad, sizeof *bad);
    for (int64_t row = 0; row < rows; row += HPMLG_PACK_ROWS) {
        hpmlg_pack some = hpmlg_pack_of(p, packed, row, rows - row < HPMLG_PACK_ROWS ? rows - row : HPMLG_PACK_ROWS);
        some.g = grad + row * p->cols, some.bad = bad;
        if (residual && p->residual_count) some.e = residual + row * p->cols;
        hpmlg_pack_some(d, kind, some);
    }
    status = hpmlg_read(d, &any, bad, sizeof any);
    return status == HPML_OK && any ? HPML_ERR_NONFINITE : hpml_ctx_status(d->ctx);
}

/* TWOBIT or ONEBIT, 8 elements of a row at a time: 16 bits or 8. */
template <bool two>
static __global__ void __launch_bounds__(256, 6) hpmlg_k_unpack(hpmlg_pack p, hpmlg_array out, bool add)
{
    int64_t eights = (p.cols + 7) / 8;
    HPMLG_EACH(u, p.rows * eights) {
        int64_t      row = hpmlg_quotient(u, eights), k = u - row * eights;
        const float *level = hpmlg_onebit_row(&p, row);
        unsigned     codes = two ? ((const unsigned short *)level)[k] : ((const unsigned char *)(level + 2))[k];
        hpmlg_eight  e;
        for (int j = 0; j < 8; j++)
            e.v[j] = two ? hpmlg_twobit_value(p, codes >> 2 * j & 3) : level[codes >> j & 1];
        hpmlg_row_put(out, row, p.cols, 8 * k, e, add);
    }
}

HPMLG_FN hpml_status hpmlg_decode(void *, hpml_ctx *ctx, const hpml_packing *p, float *out, const void *packed,
                                  int64_t rows, bool add)
{
    hpmlg_device *d = hpmlg_enter(ctx);
    int           kind;
    hpml_status   status = hpmlg_pack_kind(ctx, p, &kind);
    hpmlg_pack    all    = hpmlg_pack_of(p, packed, 0, rows);
    if (status != HPML_OK || rows <= 0 || p->cols <= 0) return status;
    if (kind == HPML_CODEC_NONE || kind == HPML_CODEC_BF16)
        hpmlg_copy_run(d, hpmlg_of(out, HPML_DTYPE_F32), hpmlg_of(all.packed, kind == HPML_CODEC_BF16 ?
                       HPML_DTYPE_BF16 : HPML_DTYPE_F32), rows * p->cols, add);
    else HPMLG_RUN_EITHER(d, kind == HPML_CODEC_TWOBIT, hpmlg_k_unpack, true, false,
                          hpmlg_blocks(d, rows * p->cols, 2048), 256, 0, all, hpmlg_of(out, HPML_DTYPE_F32), add);
    return hpml_ctx_status(d->ctx);
}

#ifdef HPML_USE_NCCL
// ---------------------------------------------------------------------------------------------------------------------
// >>gpu-nccl   NCCL: loading it, meeting, deadlines
// ---------------------------------------------------------------------------------------------------------------------

/* NCCL's kernels run on a stream of their own: begin makes it wait for the device's stream, end leaves an event there,
   and wait makes the device's stream wait for that. Communicators are non-blocking: a call may be in progress when it
   returns, and is asked about until it is done, has failed, or the deadline has passed. nccl.h is for types only. */

#define HPMLG_NCCL_CALLS(X)                                                                                            \
    X(GetUniqueId) X(CommInitRankConfig) X(CommGetAsyncError) X(CommAbort) X(CommDestroy) X(AllReduce) X(Send) X(Recv) \
    X(GroupStart) X(GroupEnd) X(GetErrorString) X(GetLastError) X(Reduce) X(Broadcast) X(GetVersion)

typedef struct hpmlg_nccl_calls {
#define HPMLG_X(name) decltype(&nccl##name) name;
    HPMLG_NCCL_CALLS(HPMLG_X)
#undef HPMLG_X
} hpmlg_nccl_calls;

typedef struct hpmlg_card { /* what each rank shows the others */
    char         host[64];
    cudaUUID_t   gpu;
    int          device;
    ncclUniqueId id; /* rank 0's counts */
} hpmlg_card;

typedef struct hpmlg_stage { /* at the beginning of a piece of pinned memory */
    cudaEvent_t         landed;
    struct hpmlg_stage *next;
    float               space[12]; /* as wide as a cache line */
} hpmlg_stage;

struct hpml_nccl {
    hpml_ctx        *ctx;
    hpmlg_device    *d;
    hpml_nccl_desc   desc;
    hpmlg_nccl_calls call;
    ncclComm_t       comm;
    cudaStream_t     stream;
    cudaEvent_t      before, after;
    hpmlg_stage     *stages;
    bool             given_up; /* atomic */
    bool             open, under_way, closing, looked; /* open: between begin and end */
    char             doing[96];
};

/* Between two looks at what takes long: a short one is not worth a sleep. */
HPMLG_FN void hpmlg_nap(double since)
{
    struct timespec t = { 0, 50000 };
    if (hpml_now() - since > 1e-3) nanosleep(&t, NULL);
}

/* Gives NCCL up and says why. What its kernels wait for will not come; aborted, they end. */
HPMLG_FN hpml_status hpmlg_nccl_fail(hpml_nccl *n, hpml_status status, const char *why)
{
    char        text[400];
    const char *more = n->call.GetLastError(n->comm);
    snprintf(text, sizeof text, "%s%s%s", why, more && more[0] ? ": " : "", more ? more : "");
    __atomic_store_n(&n->given_up, true, __ATOMIC_RELEASE); /* what lands now is no result */
    if (n->open) n->call.GroupEnd();
    if (n->comm) n->call.CommAbort(n->comm);
    n->comm = NULL, n->open = n->under_way = false;
    return hpml_ctx_fail(n->ctx, status, "rank %d: NCCL %s: %s", (int)n->desc.called, n->doing, text);
}

HPMLG_FN hpml_status hpmlg_nccl_result(hpml_nccl *n, ncclResult_t r)
{
    if (r == ncclSuccess) return HPML_OK;
    return hpmlg_nccl_fail(n, r == ncclRemoteError ? HPML_ERR_PEER : HPML_ERR_COMM, n->call.GetErrorString(r));
}

/* The end of a call that gave r, and of what is before this event, NULL: none. */
HPMLG_FN hpml_status hpmlg_nccl_done(hpml_nccl *n, ncclResult_t r, cudaEvent_t event)
{
    char text[96];
    for (double start = hpml_now(); hpml_now() - start <= n->desc.timeout; hpmlg_nap(start)) {
        cudaError_t  e = r == ncclSuccess && event ? cudaEventQuery(event) : cudaSuccess;
        ncclResult_t asked;
        if (r == ncclSuccess && e != cudaErrorNotReady) return hpmlg_check(n->d, e, "NCCL");
        if (r != ncclSuccess && r != ncclInProgress) return hpmlg_nccl_result(n, r);
        if ((asked = n->call.CommGetAsyncError(n->comm, &r)) != ncclSuccess) r = asked;
    }
    snprintf(text, sizeof text, "not done after %g seconds: has a rank died, or not come?", n->desc.timeout);
    return hpmlg_nccl_fail(n, HPML_ERR_TIMEOUT, text);
}

/* The functions: the program's own, or of a library that is loaded. */
HPMLG_FN hpml_status hpmlg_nccl_load(hpml_nccl *n)
{
    const char *name = n->desc.library ? n->desc.library : "libnccl.so.2";
    bool        own  = !n->desc.library && dlsym(RTLD_DEFAULT, "ncclCommInitRankConfig");
    void       *from = own ? RTLD_DEFAULT : dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (!own && !from) {
        const char *why = dlerror();
        return hpml_ctx_fail(n->ctx, HPML_ERR_UNSUPPORTED, "rank %d: NCCL cannot be loaded (%s); install libnccl2 or "
                             "set hpml_nccl_desc.library", (int)n->desc.called, why ? why : name);
    }
    bool all = true;
    int  v = 0;
#define HPMLG_X(name) *(void **)(void *)&n->call.name = dlsym(from, "nccl" #name), all = all && n->call.name;
    HPMLG_NCCL_CALLS(HPMLG_X)
#undef HPMLG_X
    if (n->call.GetVersion) n->call.GetVersion(&v);
    if (all && v >= 21400) return HPML_OK;
    int major = v < 10000 ? v / 1000 : v / 10000, minor = v < 10000 ? v % 1000 / 100 : v % 10000 / 100;
    return hpml_ctx_fail(n->ctx, HPML_ERR_UNSUPPORTED, v ? "rank %d: %s is NCCL %d.%d.%d; hpml needs 2.14 or later"
                         : "rank %d: %s is no NCCL", (int)n->desc.called, name, major, minor, v % 100);
}

/* A rank's file: the number it drew for this meeting, those it has read of the others, its card. It appears whole. */
HPMLG_FN bool hpmlg_nccl_file(const hpml_nccl *n, int rank, uint64_t *drawn, char *card, size_t bytes, bool write)
{
    char   name[1024], part[1032];
    size_t count = (size_t)n->desc.ranks;
    snprintf(name, sizeof name, "%s.%d", n->desc.file, rank);
    snprintf(part, sizeof part, "%s%s", name, write ? ".part" : "");
    FILE *f = fopen(part, write ? "wb" : "rb");
    if (!f) return false;
    bool good = write ? fwrite(drawn, sizeof *drawn, count, f) == count && fwrite(card, 1, bytes, f) == bytes
                      : fread(drawn, sizeof *drawn, count, f) == count && fread(card, 1, bytes, f) == bytes;
    return fclose(f) == 0 && good && (!write || rename(part, name) == 0);
}

/* What desc.gather does, by files: mine is written again whenever I have read somebody's new number. Whose file has the
   number that I drew is here, and knows of me; a killed run's files, which lie there still, have not. */
HPMLG_FN hpml_status hpmlg_nccl_files(hpml_nccl *n, char *all, size_t bytes)
{
    int             me = n->desc.rank, ranks = n->desc.ranks, missing = -1;
    bool            said = false;
    double          start = hpml_now();
    struct timespec t;
    uint64_t       *mine = (uint64_t *)hpml_ctx_alloc(n->ctx, 2 * sizeof *mine * (size_t)ranks, NULL);
    if (!mine) return HPML_ERR_MEMORY;
    clock_gettime(CLOCK_REALTIME, &t);
    mine[me] = ((uint64_t)t.tv_sec * 1000000000 + (uint64_t)t.tv_nsec) * 1000003 + (uint64_t)getpid() + (uintptr_t)n;
    while (hpml_ctx_status(n->ctx) == HPML_OK && (!said || missing >= 0)) {
        if (!said && !hpmlg_nccl_file(n, me, mine, all + (size_t)me * bytes, bytes, true))
            hpml_ctx_fail(n->ctx, HPML_ERR_WRITE, "rank %d: NCCL: cannot write %s.%d", me, n->desc.file, me);
        said = true, missing = -1;
        for (int r = 0; r < ranks; r++) {
            uint64_t *theirs = mine + ranks;
            bool      here = r == me || hpmlg_nccl_file(n, r, theirs, all + (size_t)r * bytes, bytes, false);
            if (!here || (r != me && theirs[me] != mine[me])) missing = r;
            if (here && r != me && mine[r] != theirs[r]) mine[r] = theirs[r], said = false;
        }
        if (missing >= 0 && hpml_now() - start > n->desc.timeout)
            hpml_ctx_fail(n->ctx, HPML_ERR_TIMEOUT, "rank %d: NCCL: no %s.%d of this run after %g seconds: rank %d has "
                          "not come, or does not see this file", me, n->desc.file, missing, n->desc.timeout, missing);
        else if (missing >= 0) hpmlg_nap(start);
    }
    hpml_ctx_release(n->ctx, mine);
    return hpml_ctx_status(n->ctx);
}

/* Everybody's card to everybody. A rank that has failed comes, too: so the others hear of it. */
HPMLG_FN hpml_status hpmlg_nccl_cards(hpml_nccl *n, hpmlg_card *all)
{
    hpmlg_card    *mine = &all[n->desc.rank];
    cudaDeviceProp p;
    hpml_status    status = hpmlg_nccl_load(n);
    snprintf(n->doing, sizeof n->doing, "ncclGetUniqueId");
    HPMLG_TRY(status, hpmlg_check(n->d, cudaGetDeviceProperties(&p, n->d->d.device), "properties"));
    if (n->desc.rank == 0) HPMLG_TRY(status, hpmlg_nccl_result(n, n->call.GetUniqueId(&mine->id)));
    gethostname(mine->host, sizeof mine->host - 1);
    mine->device = n->d->d.device;
    if (status == HPML_OK) mine->gpu = p.uuid;
    hpml_status met = n->desc.gather ? n->desc.gather(n->desc.user, all, sizeof *all)
                                     : hpmlg_nccl_files(n, (char *)all, sizeof *all);
    return status != HPML_OK ? status : met;
}

/* NCCL itself finds two ranks on one GPU late, and says little. */
HPMLG_FN hpml_status hpmlg_nccl_apart(hpml_nccl *n, const hpmlg_card *all)
{
    for (int b = 1; b < n->desc.ranks; b++)
        for (int a = 0; a < b; a++)
            if (strcmp(all[a].host, all[b].host) == 0 && memcmp(&all[a].gpu, &all[b].gpu, sizeof all[a].gpu) == 0)
                return hpml_ctx_fail(n->ctx, HPML_ERR_ARGUMENT, "ranks %d and %d are both on GPU %d of host %s: give "
                                     "each its own (hpml_cuda_desc.device = rank %% hpml_cuda_device_count())", a, b,
                                     all[a].device, all[a].host);
    return HPML_OK;
}

HPMLG_FN hpml_status hpmlg_nccl_open(hpml_nccl *n)
{
    hpmlg_card  *all = (hpmlg_card *)hpml_ctx_alloc(n->ctx, sizeof *all * (size_t)n->desc.ranks, NULL);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    char         name[1024];
    if (!all) return HPML_ERR_MEMORY;
    hpml_status status = hpmlg_nccl_cards(n, all);
    HPMLG_TRY(status, hpmlg_nccl_apart(n, all));
    cudaError_t e = cudaStreamCreateWithFlags(&n->stream, cudaStreamNonBlocking);
    HPMLG_TRY(e, cudaEventCreateWithFlags(&n->before, cudaEventDisableTiming));
    HPMLG_TRY(e, cudaEventCreateWithFlags(&n->after, cudaEventDisableTiming));
    HPMLG_TRY(status, hpmlg_check(n->d, e, "a stream for NCCL"));
    snprintf(n->doing, sizeof n->doing, "communicator of %d ranks", (int)n->desc.ranks);
    config.blocking = 0;
    HPMLG_TRY(status, hpmlg_nccl_done(n, n->call.CommInitRankConfig(&n->comm, n->desc.ranks, all[0].id, n->desc.rank,
                                                                    &config), NULL));
    hpml_ctx_release(n->ctx, all);
    if (n->desc.gather) return status;
    snprintf(name, sizeof name, "%s.%d", n->desc.file, (int)n->desc.rank);
    remove(name); /* all have been here, or will not come any more */
    return status;
}

HPMLG_FN void hpmlg_nccl_drop(void *object)
{
    hpml_nccl *n = (hpml_nccl *)object;
    n->closing = true;
    __atomic_store_n(&n->given_up, true, __ATOMIC_RELEASE);
    if (n->desc.closed) n->desc.closed(n->desc.owner);
    if (!n->ctx) return;
    hpmlg_enter(n->ctx);
    if (n->open) n->call.GroupEnd(); /* an error came between: this thread's next communicator is not part of it */
    if (n->comm && hpml_ctx_status(n->ctx) == HPML_OK && hpml_nccl_link_check(n) == HPML_OK)
        n->call.CommDestroy(n->comm);
    else if (n->comm) n->call.CommAbort(n->comm);
    if (n->before) cudaEventDestroy(n->before);
    if (n->after) cudaEventDestroy(n->after);
    if (n->stream) cudaStreamDestroy(n->stream);
    for (hpmlg_stage *s = n->stages, *next; s; s = next) {
        next = s->next;
        if (s->landed) cudaEventDestroy(s->landed);
        cudaFreeHost(s);
    }
}

HPML_API hpml_nccl *hpml_nccl_create(hpml_ctx *ctx, const hpml_nccl_desc *desc)
{
    hpml_nccl *n = NULL;
    bool       good = desc && !desc->_begin && !desc->_end && desc->ranks > 0 && desc->rank >= 0 &&
                desc->rank < desc->ranks && (desc->gather || desc->file) && desc->timeout >= 0;
    if (!ctx) return NULL;
    if (hpml_ctx_status(ctx) == HPML_OK && !good)
        hpml_ctx_fail(ctx, HPML_ERR_ARGUMENT, "nccl desc: needs a rank below ranks and a file where they meet, or is "
                      "not cleared");
    if (hpml_ctx_status(ctx) == HPML_OK && hpml_ctx_backend(ctx) != hpml_backend_cuda())
        hpml_ctx_fail(ctx, HPML_ERR_UNSUPPORTED, "nccl: rank %d computes on %s; its context needs hpml_backend_cuda()",
                      (int)desc->rank, hpml_ctx_backend(ctx)->name);
    if (hpml_ctx_status(ctx) == HPML_OK) n = (hpml_nccl *)hpml_ctx_alloc(ctx, sizeof *n, hpmlg_nccl_drop);
    if (!n) {
        if (good && desc->gather) desc->gather(desc->user, NULL, 0); /* the others hear of the error */
        return NULL;
    }
    n->ctx = ctx, n->d = hpmlg_enter(ctx), n->desc = *desc, n->desc.closed = NULL;
    if (n->desc.timeout == 0) n->desc.timeout = 60;
    if (!n->desc.gather) n->desc.called = n->desc.rank;
    if (hpmlg_nccl_open(n) != HPML_OK) {
        hpml_ctx_release(ctx, n);
        return NULL;
    }
    n->desc.closed = desc->closed;
    return n;
}

HPML_API void hpml_nccl_free(hpml_nccl *n)
{
    if (n && !n->closing) hpml_ctx_release(n->ctx, n);
}

HPML_API void hpml_nccl_link_free(void *nccl)
{
    hpml_nccl *n = (hpml_nccl *)nccl;
    if (!n->closing) n->desc.closed = NULL, hpml_nccl_free(n); /* who calls this has closed already */
}

// ---------------------------------------------------------------------------------------------------------------------
// >>gpu-link   how arrays of several GPUs are added up and move
// ---------------------------------------------------------------------------------------------------------------------

HPMLG_FN hpml_status hpmlg_nccl_ready(hpml_nccl *n)
{
    if (!n) return HPML_ERR_ARGUMENT;
    if (hpml_ctx_status(n->ctx) != HPML_OK) return hpml_ctx_status(n->ctx);
    if (!n->comm)
        return hpml_ctx_fail(n->ctx, HPML_ERR_COMM, "rank %d: NCCL was given up after an error; make it anew",
                             (int)n->desc.called);
    hpmlg_enter(n->ctx);
    return HPML_OK;
}

#define HPMLG_NCCL_ENTER(n, nccl)                                                                                      \
    hpml_nccl  *n     = (hpml_nccl *)nccl;                                                                             \
    hpml_status ready = hpmlg_nccl_ready(n);                                                                           \
    if (ready != HPML_OK) return ready

HPML_API hpml_status hpml_nccl_link_begin(void *nccl)
{
    HPMLG_NCCL_ENTER(n, nccl);
    if (n->open) return hpmlg_nccl_fail(n, HPML_ERR_COMM, "an error came in the middle of an earlier call");
    cudaError_t e = cudaEventRecord(n->before, n->d->stream);
    if (e == cudaSuccess) e = cudaStreamWaitEvent(n->stream, n->before, 0);
    if (e != cudaSuccess) return hpmlg_check(n->d, e, "a stream for NCCL");
    n->open = true, n->looked = n->d->look_count > 0; /* at the ops */
    if (n->looked) hpmlg_look_mark(n->d, n->stream, NULL, NULL, 0);
    return hpmlg_nccl_result(n, n->call.GroupStart());
}

/* A call within the group has at most been begun. */
HPMLG_FN hpml_status hpmlg_nccl_begun(hpml_nccl *n, ncclResult_t r)
{
    return r == ncclInProgress ? HPML_OK : hpmlg_nccl_result(n, r);
}

HPML_API hpml_status hpml_nccl_link_allreduce(void *nccl, float *x, int64_t count, bool mean)
{
    HPMLG_NCCL_ENTER(n, nccl);
    snprintf(n->doing, sizeof n->doing, "allreduce of %lld floats", (long long)count);
    hpmlg_weights_touch(n->d, x, (size_t)count * sizeof *x);
    return hpmlg_nccl_begun(n, n->call.AllReduce(x, x, (size_t)count, ncclFloat32, mean ? ncclAvg : ncclSum, n->comm,
                                                 n->stream));
}

HPML_API hpml_status hpml_nccl_link_move(void *nccl, const void *out, const size_t *out_at, bool same, void *in,
                                         const size_t *in_at)
{
    HPMLG_NCCL_ENTER(n, nccl);
    hpml_status status = HPML_OK;
    int p = n->desc.ranks, me = n->desc.rank;
    snprintf(n->doing, sizeof n->doing, "%s, %zu bytes", same ? "sums to all" : "stripes to their owners", in_at[p]);
    for (int k = 1; k < p && status == HPML_OK; k++) {
        int          to = (me + k) % p, from = (me - k + p) % p, mine = same ? me : to;
        const char  *what = (const char *)out + out_at[mine];
        char        *where = (char *)in + in_at[from];
        ncclResult_t r = n->call.Send(what, out_at[mine + 1] - out_at[mine], ncclUint8, to, n->comm, n->stream);
        if (r == ncclSuccess || r == ncclInProgress)
            r = n->call.Recv(where, in_at[from + 1] - in_at[from], ncclUint8, from, n->comm, n->stream);
        status = hpmlg_nccl_begun(n, r);
    }
    return status;
}

HPML_API hpml_status hpml_nccl_link_end(void *nccl)
{
    HPMLG_NCCL_ENTER(n, nccl);
    n->open = false;
    hpml_status status = hpmlg_nccl_done(n, n->call.GroupEnd(), NULL);
    if (status != HPML_OK) return status;
    n->under_way = true;
    if (n->looked) hpmlg_look_mark(n->d, n->stream, "nccl", NULL, HPML_LANE_COMM);
    return hpmlg_check(n->d, cudaEventRecord(n->after, n->stream), "a stream for NCCL");
}

HPML_API hpml_status hpml_nccl_link_wait(void *nccl)
{
    HPMLG_NCCL_ENTER(n, nccl);
    return hpmlg_check(n->d, cudaStreamWaitEvent(n->d->stream, n->after, 0), "a stream for NCCL");
}

/* The host waits: before it waits for the device without a deadline. */
HPML_API hpml_status hpml_nccl_link_check(void *nccl)
{
    HPMLG_NCCL_ENTER(n, nccl);
    hpml_status status = hpmlg_nccl_done(n, ncclInProgress, n->under_way ? n->after : NULL);
    n->under_way = false;
    return status;
}

static __global__ void hpmlg_k_share(float *x, int64_t n, float times, float by)
{
    HPMLG_EACH(i, n)
        x[i] = x[i] * times / by;
}

HPML_API hpml_status hpml_nccl_link_scale(void *nccl, float *x, int64_t count, float times, float by)
{
    HPMLG_NCCL_ENTER(n, nccl);
    if (count <= 0) return HPML_OK;
    HPMLG_DEAL(n->d, hpmlg_k_share, count, 1024, x, count, times, by);
    return hpml_ctx_status(n->ctx);
}

HPML_API float *hpml_nccl_link_stage(void *nccl, int64_t count)
{
    hpml_nccl   *n = (hpml_nccl *)nccl;
    hpmlg_stage *s = NULL;
    size_t       bytes = sizeof *s + (size_t)count * sizeof(float);
    if (hpmlg_nccl_ready(n) != HPML_OK) return NULL;
    cudaError_t e = cudaHostAlloc((void **)&s, bytes, cudaHostAllocDefault);
    if (e == cudaSuccess) {
        memset(s, 0, bytes);
        s->next = n->stages, n->stages = s;
        e = cudaEventCreateWithFlags(&s->landed, cudaEventDisableTiming);
    }
    return hpmlg_check(n->d, e, "host memory for gradients between nodes") == HPML_OK ? (float *)(s + 1) : NULL;
}

/* Shares differ in size, for which NCCL has no reduce-scatter; calls of a group run as one. */
HPML_API hpml_status hpml_nccl_link_share(void *nccl, float *x, const int64_t *at, float *stage, bool back)
{
    HPMLG_NCCL_ENTER(n, nccl);
    float      *mine   = x + at[n->desc.rank];
    size_t      bytes  = (size_t)(at[n->desc.rank + 1] - at[n->desc.rank]) * sizeof(float);
    cudaError_t e      = cudaSuccess;
    hpml_status status = hpml_nccl_link_begin(nccl);
    if (back) e = cudaMemcpyAsync(mine, stage, bytes, cudaMemcpyHostToDevice, n->stream);
    snprintf(n->doing, sizeof n->doing, "%s of %lld floats", back ? "allgather" : "reduce-scatter",
             (long long)at[n->desc.ranks]);
    for (int r = 0; r < n->desc.ranks && status == HPML_OK; r++) {
        float *p = x + at[r];
        size_t count = (size_t)(at[r + 1] - at[r]);
        if (count == 0) continue;
        status = hpmlg_nccl_begun(n, back ? n->call.Broadcast(p, p, count, ncclFloat32, r, n->comm, n->stream)
                                          : n->call.Reduce(p, p, count, ncclFloat32, ncclSum, r, n->comm, n->stream));
    }
    if (status == HPML_OK) status = hpml_nccl_link_end(nccl);
    if (status != HPML_OK || back) return status == HPML_OK ? hpmlg_check(n->d, e, "a share's way back") : status;
    e = cudaMemcpyAsync(stage, mine, bytes, cudaMemcpyDeviceToHost, n->stream);
    if (e == cudaSuccess) e = cudaEventRecord(((hpmlg_stage *)(void *)stage - 1)->landed, n->stream);
    return hpmlg_check(n->d, e, "a share's way to the host");
}

HPML_API hpml_status hpml_nccl_link_landed(void *nccl, float *stage)
{
    hpml_nccl   *n = (hpml_nccl *)nccl;
    hpmlg_stage *s = (hpmlg_stage *)(void *)stage - 1;
    cudaError_t  e = cudaErrorNotReady;
    hpmlg_enter(n->ctx);
    for (double start = hpml_now(); e == cudaErrorNotReady; hpmlg_nap(start)) {
        e = cudaEventQuery(s->landed);
        if (__atomic_load_n(&n->given_up, __ATOMIC_ACQUIRE)) return HPML_ERR_COMM;
        if (e == cudaErrorNotReady && hpml_now() - start > n->desc.timeout) return HPML_ERR_TIMEOUT;
    }
    return e == cudaSuccess ? HPML_OK : HPML_ERR_CUDA;
}

HPML_API hpml_status hpml_nccl_allreduce(hpml_nccl *n, float *x, int64_t count, bool mean)
{
    hpml_nccl_link_check(n); /* the one before: the host then gets at most one call ahead */
    hpml_nccl_link_begin(n);
    hpml_nccl_link_allreduce(n, x, count, mean);
    hpml_nccl_link_end(n);
    return hpml_nccl_link_wait(n);
}
#else /* without HPML_USE_NCCL: there is never a hpml_nccl */
HPML_API hpml_nccl *hpml_nccl_create(hpml_ctx *ctx, const hpml_nccl_desc *desc)
{
    if (!ctx) return NULL;
    hpml_ctx_fail(ctx, HPML_ERR_UNSUPPORTED, "nccl: this program was built without NCCL; compile the file that has "
                  "hpml_cuda.cuh's body with -DHPML_USE_NCCL");
    if (desc && desc->gather) desc->gather(desc->user, NULL, 0); /* the others hear of the error */
    return NULL;
}

#define HPMLG_X(name, types) HPML_API hpml_status hpml_nccl_link_##name types { return HPML_ERR_UNSUPPORTED; }
HPMLG_LINK(HPMLG_X)
#undef HPMLG_X
HPML_API hpml_status hpml_nccl_allreduce(hpml_nccl *, float *, int64_t, bool) { return HPML_ERR_UNSUPPORTED; }
HPML_API float *hpml_nccl_link_stage(void *, int64_t) { return NULL; }
HPML_API void hpml_nccl_link_free(void *nccl) { (void)nccl; }
HPML_API void hpml_nccl_free(hpml_nccl *n) { (void)n; }
#endif /* HPML_USE_NCCL */

// ---------------------------------------------------------------------------------------------------------------------
// >>gpu-backend   opening and closing; the table
// ---------------------------------------------------------------------------------------------------------------------

/* What the passes of a node want kept and as working space here; the CPU's wishes stand when nothing is set. */
HPMLG_FN void hpmlg_plan(void *device, hpml_node *n)
{
    hpmlg_device *d      = (hpmlg_device *)device;
    int64_t       cols   = hpmlg_last_dim(n->out);
    hpml_node    *before = d->planned;
    hpmlg_lstm    lstm   = {};
    hpmlg_buckets buckets = {};
    d->planned = n;
    switch (n->op) {
    case HPML_OP_LAYERNORM: case HPML_OP_RMSNORM:
        hpmlg_norm_plan(n, before);
        n->scratch_bytes = (size_t)hpmlg_norm_parts(d, hpml_tensor_count(n->out) / cols, cols) * (size_t)(2 * cols) *
                           sizeof(float);
        break;
    case HPML_OP_BATCHNORM: n->scratch_bytes = hpmlg_bn_scratch(d, n); break;
    case HPML_OP_ATTENTION: n->scratch_bytes = n->saved_bytes; break;
    case HPML_OP_EMBEDDING: n->scratch_bytes = hpmlg_embedding_layout(n, &buckets); break;
    case HPML_OP_LINEAR:
        if (n->saved_bytes) n->saved_bytes = (size_t)hpml_tensor_count(n->out) * hpml_dtype_size(n->out->dtype);
        n->scratch_bytes = hpmlg_factor_bytes(d, n->src[0]);
        break;
    case HPML_OP_CONV2D: /* the input in halves, and the gradient of the weights in halves */
        n->scratch_bytes = hpmlg_factor_bytes(d, n->src[0]);
        if (d->store != HPML_DTYPE_F32) n->scratch_bytes += (size_t)hpml_tensor_count(n->src[1]) * 2;
        break;
    case HPML_OP_LSTM: n->scratch_bytes = hpmlg_lstm_layout(d, n, &lstm); break;
    default: break;
    }
}

/* The first thing that fails on an unfit machine, in words. */
HPMLG_FN hpml_status hpmlg_open_device(hpmlg_device *d)
{
    int            count = 0;
    cudaDeviceProp p;
    cudaError_t    e = cudaGetDeviceCount(&count);
    if (e == cudaErrorInsufficientDriver || e == cudaErrorNoDevice || (e == cudaSuccess && count == 0))
        return hpml_ctx_fail(d->ctx, HPML_ERR_CUDA, "cuda: no usable device: %s; is there an NVIDIA GPU, a driver "
                             "(nvidia-smi), and is CUDA_VISIBLE_DEVICES right? Without a .backend the CPU computes",
                             e == cudaSuccess ? "none is there" : cudaGetErrorString(e));
    if (e == cudaSuccess && (d->d.device < 0 || d->d.device >= count))
        return hpml_ctx_fail(d->ctx, HPML_ERR_ARGUMENT, "cuda: there is no device %d, only 0 to %d", (int)d->d.device,
                             count - 1);
    HPMLG_TRY(e, cudaSetDevice(d->d.device));
    HPMLG_TRY(e, cudaGetDeviceProperties(&p, d->d.device));
    if (e != cudaSuccess) return hpmlg_check(d, e, "opening");
    d->sms = p.multiProcessorCount;
    if (d->workspace_most == 0) d->workspace_most = p.totalGlobalMem / 16;
    if (d->d.precision != HPML_CUDA_F32 && p.major < 8)
        return hpml_ctx_fail(d->ctx, HPML_ERR_UNSUPPORTED, "cuda: precision %d needs compute capability 8.0, %s has "
                             "%d.%d; take HPML_CUDA_F32", (int)d->d.precision, p.name, p.major, p.minor);
    return HPML_OK;
}

/* Streams, and memory for the device's own use, pinned and on the device: hpmlg_open waits until it is zeroed. */
HPMLG_FN hpml_status hpmlg_open_memory(hpmlg_device *d)
{
    const char    *what = "memory for the device's own use";
    size_t         ring = HPMLG_SLOTS * HPMLG_SLOT_BYTES;
    cudaError_t    e = cudaStreamCreateWithFlags(&d->stream, cudaStreamNonBlocking);
    HPMLG_TRY(e, cudaStreamCreateWithFlags(&d->copies, cudaStreamNonBlocking));
    HPMLG_TRY(e, cudaHostAlloc((void **)&d->pinned, ring + HPMLG_RESULT + sizeof *d->note, cudaHostAllocMapped));
    for (int i = 0; i < HPMLG_SLOTS; i++) {
        HPMLG_TRY(e, cudaEventCreateWithFlags(&d->slots[i].landed, cudaEventDisableTiming));
        HPMLG_TRY(e, cudaEventCreateWithFlags(&d->slots[i].free, cudaEventDisableTiming));
    }
    if (hpmlg_check(d, e, what) != HPML_OK) return hpml_ctx_status(d->ctx);
    d->result = d->pinned + ring, d->note = (hpmlg_note *)(void *)(d->pinned + ring + HPMLG_RESULT);
    memset(d->note, 0, sizeof *d->note);
    d->scratch    = hpmlg_own(d, HPMLG_SCRATCH, what);
    d->workspace  = hpmlg_own(d, d->d.workspace, what);
    d->worst      = (unsigned long long *)hpmlg_own(d, sizeof *d->worst, what);
    d->now        = (hpmlg_now *)hpmlg_own(d, sizeof *d->now, what);
    d->counts     = (unsigned long long *)hpmlg_own(d, 2 * sizeof *d->counts, what);
    d->note_taken = (int *)hpmlg_own(d, sizeof *d->note_taken, what);
    for (int i = 0; i < HPMLG_SLOTS; i++) {
        d->slots[i].host   = d->pinned + i * HPMLG_SLOT_BYTES;
        d->slots[i].device = (unsigned char *)hpmlg_own(d, HPMLG_SLOT_BYTES, what);
    }
    return hpml_ctx_status(d->ctx);
}

typedef struct hpmlg_line { /* a text that grows; used: its length, also beyond size */
    char  *text;
    size_t size, used;
} hpmlg_line;

HPMLG_FN void hpmlg_line_add(hpmlg_line *l, const char *format, ...)
{
    va_list some;
    size_t  left = l->used < l->size ? l->size - l->used : 0;
    va_start(some, format);
    int n = vsnprintf(left ? l->text + l->used : NULL, left, format, some);
    va_end(some);
    if (n > 0) l->used += (size_t)n;
}

HPMLG_FN void hpmlg_line_list(hpmlg_line *l, const char *what, const int *list, int count)
{
    if (count > 0) hpmlg_line_add(l, "%s", what);
    for (int i = 0; i < count; i++) hpmlg_line_add(l, " %d", list[i]);
}

HPMLG_FN void hpmlg_line_epilogues(hpmlg_line *l, const char *what, const long long n[HPMLG_EPILOGUES])
{
    static const char *const names[] = { "bias", "relu", "gelu", "gelu'", "bias sums" };
    const char              *before = what;
    for (int i = 0; i < HPMLG_EPILOGUES; i++) {
        if (n[i] == 0) continue;
        hpmlg_line_add(l, "%s%s %lld", before, names[i], n[i]);
        before = ", ";
    }
}

HPMLG_FN void hpmlg_line_own(hpmlg_line *l, const long long ran[2], long long refused)
{
    hpmlg_line_add(l, ", %lld by own kernels", ran[1]);
    if (refused) hpmlg_line_add(l, " (%lld refused)", refused);
}

HPML_API int hpml_cuda_text(const hpml_ctx *ctx, char *buffer, size_t size)
{
    static const char *const passes[] = { "; forward", "; dx", "; dw" };
    hpmlg_line               l = { buffer, size, 0 };
    int                      list[16];
    if (size > 0) buffer[0] = 0;
    if (!hpml_cuda_stream(ctx)) return 0;
    const hpmlg_device *d = (const hpmlg_device *)hpml_ctx_device(ctx);
    const hpmlg_ran    *r = &d->ran;
    hpmlg_line_add(&l, "products: %lld by cuBLASLt", r->products[0]);
    hpmlg_line_epilogues(&l, " with ", r->epilogues[0]);
    hpmlg_line_list(&l, "; algorithms", list, hpmlg_blas_algorithms(d, list));
    hpmlg_line_epilogues(&l, "; refused ", r->epilogues[1]);
    hpmlg_line_own(&l, r->products, r->products_refused);
    hpmlg_line_add(&l, " | convolutions: %lld by cuDNN", r->convolutions[0]);
    if (r->fused) hpmlg_line_add(&l, " with bias and act %lld", r->fused);
    for (int pass = 0; pass < 3; pass++)
        hpmlg_line_list(&l, passes[pass], list, hpmlg_dnn_algorithms(d, pass, list));
    hpmlg_line_own(&l, r->convolutions, r->convolutions_refused);
    hpmlg_line_add(&l, " | workspace %.1f MiB, %.1f asked for", (double)d->workspace_bytes / (1 << 20),
                   (double)d->workspace_asked / (1 << 20));
    hpmlg_line_add(&l, " | passes: %lld op by op, %lld recorded, %lld replayed, %lld given up | %lld waits",
                   d->passes_ran[HPMLG_OP_BY_OP], d->passes_ran[HPMLG_RECORDED], d->passes_ran[HPMLG_REPLAYED],
                   d->passes_ran[HPMLG_GIVEN_UP], d->waits);
    return (int)l.used;
}

HPMLG_FN void hpmlg_close(void *device)
{
    hpmlg_device *d = hpmlg_current(device);
    if (d->stream) cudaStreamSynchronize(d->stream);
    hpmlg_blas_close(d);
    hpmlg_dnn_close(d);
    for (hpmlg_pass &p : d->passes) hpmlg_drop(&p);
    for (hpmlg_block *b = d->blocks; b; b = b->next) cudaFree(b->p);
    for (hpmlg_slot &s : d->slots) {
        if (s.landed) cudaEventDestroy(s.landed);
        if (s.free) cudaEventDestroy(s.free);
    }
    for (hpmlg_look *l = d->looks; l < d->looks + HPMLG_LOOKS && l->from; l++)
        cudaEventDestroy(l->from), cudaEventDestroy(l->to);
    if (d->look_zero) cudaEventDestroy(d->look_zero);
    if (d->pinned) cudaFreeHost(d->pinned);
    if (d->copies) cudaStreamDestroy(d->copies);
    if (d->stream) cudaStreamDestroy(d->stream);
}

static __global__ void hpmlg_k_hello(int *taken) { *taken = 0; }

HPMLG_FN hpml_status hpmlg_open(hpml_ctx *ctx, const void *desc, void **device)
{
    hpmlg_device *d = (hpmlg_device *)hpml_ctx_alloc(ctx, sizeof *d, NULL);
    if (!d) return HPML_ERR_MEMORY;
    if (desc) d->d = *(const hpml_cuda_desc *)desc;
    d->ctx = ctx;
    if (d->d._begin || d->d._end || (int)d->d.precision < 0 || (int)d->d.precision > HPML_CUDA_F16)
        return hpml_ctx_fail(ctx, HPML_ERR_ARGUMENT, "cuda desc: precision %d, or a canary is not zero; zero the "
                             "struct before you set fields", (int)d->d.precision);
    d->workspace_most = d->d.workspace;
    if (d->d.workspace == 0) d->d.workspace = (size_t)64 << 20;
    d->workspace_bytes = d->d.workspace;
    d->store = d->d.precision == HPML_CUDA_BF16 ? HPML_DTYPE_BF16
             : d->d.precision == HPML_CUDA_F16 ? HPML_DTYPE_F16 : HPML_DTYPE_F32;
    cudaGetLastError();
    if (hpmlg_open_device(d) == HPML_OK && hpmlg_open_memory(d) == HPML_OK) {
        HPMLG_RUN(d, hpmlg_k_hello, 1, 1, 0, d->note_taken);
        hpmlg_check(d, cudaStreamSynchronize(d->stream), "the first kernel");
        hpmlg_kernels_open(d);
        if (!d->d.own_kernels) hpmlg_blas_open(d);
    }
    if (hpmlg_well(d)) *device = d;
    else hpmlg_close(d);
    return hpml_ctx_status(ctx);
}

template <void (*op)(hpmlg_device *, const hpml_run *, hpml_node *, bool), bool back>
static hpml_status hpmlg_run_op(const hpml_run *run, hpml_node *n)
{
    op(hpmlg_enter(run->ctx), run, n, back);
    return hpml_ctx_status(run->ctx);
}

HPML_API const hpml_backend *hpml_backend_cuda(void)
{
    static const hpml_op_impl ops[HPML_OP_COUNT] = {
#define HPMLG_X(op, name) { hpmlg_run_op<hpmlg_op_##name, false>, hpmlg_run_op<hpmlg_op_##name, true> },
        HPML_OPS(HPMLG_X)
#undef HPMLG_X
    };
    static const hpml_backend cuda = { "cuda", hpmlg_open, hpmlg_close, hpmlg_alloc, hpmlg_free, hpmlg_write,
        hpmlg_read, hpmlg_zero, hpmlg_sync, ops, hpmlg_update, hpmlg_sumsq, hpmlg_store, hpmlg_plan, hpmlg_begin,
        hpmlg_end, hpmlg_correct, hpmlg_encode, hpmlg_decode, hpmlg_look_at, false };
    return &cuda;
}

#endif /* HPML_CUDA_BODY */

// MIT License
//
// Copyright (c) 2026 hpml authors
//
// Permission is hereby granted, free of charge, to any person obtaining a copy of this software and associated
// documentation files (the "Software"), to deal in the Software without restriction, including without limitation the
// rights to use, copy, modify, merge, publish, distribute, sublicense, and/or sell copies of the Software, and to
// permit persons to whom the Software is furnished to do so, subject to the following conditions:
//
// The above copyright notice and this permission notice shall be included in all copies or substantial portions of the
// Software.
//
// THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT NOT LIMITED TO THE
// WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR
// COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR
// OTHERWISE, ARISING FROM, OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE.
