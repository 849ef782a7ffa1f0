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
//     - take GPU memory behind your back: one arena for each graph, taken when the graph takes its memory
//     - spread over several GPUs by itself: a context is one GPU; ranks do the rest (hpml_comm.h)
//
// OPTIONS, defined before the include that has the implementation
//     HPML_CUDA_IMPLEMENTATION     only this header's body: split builds, where another file has hpml.h's
//     HPML_CUDA_NO_CUBLAS          matrix products by this header's kernels
//     HPML_CUDA_NO_CUDNN           convolutions by this header's kernels
//
// THREADS: as in hpml.h, a context belongs to one thread at a time. All its work runs on one stream, in order.
// SAME BITS: the same program on the same kind of GPU gives the same bits. They are not the CPU's: sums are taken in
// another order.
//
// INDEX (grep '^// >>' hpml_cuda.cuh)
//     api-cuda   devices and the backend
//     gpu-language   what kernels are written in
//     gpu-device   the device: opening, errors, memory
//     gpu-copy   to and from the host, through pinned memory
//     gpu-pass   whole passes, recorded once and replayed
//     gpu-elementwise   add, sub, mul, div with broadcasting; scale; activations
//     gpu-sums   sums, sums of squares, counting hits
//     gpu-shape   reshape, permute, slice, concat
//     gpu-norm   softmax, layernorm, rmsnorm
//     gpu-batchnorm   batch normalization
//     gpu-pool   max and average pooling
//     gpu-random   Philox, dropout, embedding
//     gpu-product   matrix products: our kernels
//     gpu-cublas   matrix products by cuBLASLt
//     gpu-matmul   matmul and linear layers
//     gpu-conv   convolution: our kernels
//     gpu-cudnn   convolution by cuDNN
//     gpu-attention   multi-head attention, never storing the (T, T) matrix
//     gpu-lstm   long short-term memory
//     gpu-loss   losses
//     gpu-update   optimizers: one launch for all parameters
//     gpu-codec   gradients packed on the device
//     gpu-backend   the table
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
    size_t              workspace;    /* bytes for cuBLASLt and cuDNN; 0: 64 MiB */
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

/* Kernels are plain CUDA C++. What differs between nvcc and the emulation in tests/cuda_on_cpu.h (which runs the same
   text on a CPU, thread by thread) stands here: how a kernel is launched, its dynamic shared memory, the tensor-core
   instructions and asynchronous copies.

   Arrays may be f32, bf16 or f16; a kernel takes hpmlg_array and reads and writes f32 through hpmlg_get and hpmlg_put.
   The branch on the type is the same for all threads and costs nothing beside the memory access. Fast kernels move 8
   elements at a time, 16 or 32 bytes. Sums are taken in an order that depends on the shape alone: no float atomics. */

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#error "hpml_cuda.cuh needs compute capability 8.0 (Ampere) or later: nvcc -arch=native, or -arch=sm_80"
#endif
#ifdef HPML_CUDA_ON_CPU
#define HPML_CUDA_NO_CUBLAS
#define HPML_CUDA_NO_CUDNN
#else
#include <cuda_runtime.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#ifndef HPML_CUDA_NO_CUBLAS
#include <cublasLt.h>
#endif
#ifndef HPML_CUDA_NO_CUDNN
#include <cudnn.h>
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
    if (f16)
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                     "{%0,%1,%2,%3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    else
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                     "{%0,%1,%2,%3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
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
static __device__ __forceinline__ void hpmlg_ldmatrix_x4(unsigned r[4], const void *row)
{
    unsigned at = (unsigned)__cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}

static __device__ __forceinline__ void hpmlg_ldmatrix_x4_trans(unsigned r[4], const void *row)
{
    unsigned at = (unsigned)__cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}

/* 16 bytes from global to shared memory, beside the computation; not valid: zeros, and `global` is not read. Copies
   are committed in groups; wait(n) returns when all but the last n groups of this thread have arrived. */
static __device__ __forceinline__ void hpmlg_copy_async16(void *shared, const void *global, bool valid)
{
    unsigned at = (unsigned)__cvta_generic_to_shared(shared), bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(global), "r"(bytes) : "memory");
}

static __device__ __forceinline__ void hpmlg_copy_commit(void) { asm volatile("cp.async.commit_group;" ::: "memory"); }
#define hpmlg_copy_wait(n) asm volatile("cp.async.wait_group %0;" ::"n"(n) : "memory")
#endif

#define HPMLG_FN static __attribute__((unused))
#define HPMLG_DEVICE static __device__ __forceinline__
#define HPMLG_WARP 32
#define HPMLG_ALL 0xffffffffu

typedef struct hpmlg_array {
    void *p;
    int   type; /* HPML_DTYPE_F32, _BF16 or _F16 */
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
    unsigned short low, high;
    if (type == HPML_DTYPE_BF16) low = __bfloat16_as_ushort(__float2bfloat16_rn(a)),
                                 high = __bfloat16_as_ushort(__float2bfloat16_rn(b));
    else low = __half_as_ushort(__float2half_rn(a)), high = __half_as_ushort(__float2half_rn(b));
    return (unsigned)low | (unsigned)high << 16;
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

/* Sums and maxima over a warp and over a block of up to 1,024 threads; every thread gets the result. */
HPMLG_DEVICE float hpmlg_warp_sum(float v)
{
    for (int o = HPMLG_WARP / 2; o > 0; o >>= 1) v += __shfl_xor_sync(HPMLG_ALL, v, o);
    return v;
}

HPMLG_DEVICE float hpmlg_warp_max(float v) /* NaN wins */
{
    for (int o = HPMLG_WARP / 2; o > 0; o >>= 1) {
        float w = __shfl_xor_sync(HPMLG_ALL, v, o);
        v       = w > v || w != w ? w : v;
    }
    return v;
}

/* space: one float for each warp, shared. The block's size is a multiple of 32. */
HPMLG_DEVICE float hpmlg_block_sum(float v, float *space)
{
    int lane = (int)threadIdx.x % HPMLG_WARP, warp = (int)threadIdx.x / HPMLG_WARP;
    int warps = (int)blockDim.x / HPMLG_WARP;
    v = hpmlg_warp_sum(v);
    __syncthreads(); /* space may still be read from a call before */
    if (lane == 0) space[warp] = v;
    __syncthreads();
    return hpmlg_warp_sum(lane < warps ? space[lane] : 0);
}

HPMLG_DEVICE float hpmlg_block_max(float v, float *space)
{
    int lane = (int)threadIdx.x % HPMLG_WARP, warp = (int)threadIdx.x / HPMLG_WARP;
    int warps = (int)blockDim.x / HPMLG_WARP;
    v = hpmlg_warp_max(v);
    __syncthreads();
    if (lane == 0) space[warp] = v;
    __syncthreads();
    return hpmlg_warp_max(space[lane < warps ? lane : 0]);
}

// ---------------------------------------------------------------------------------------------------------------------
// >>gpu-device   the device: opening, errors, memory
// ---------------------------------------------------------------------------------------------------------------------

/* Kernels cannot fail, but data can be wrong: a token or a label out of range. The first kernel that meets one leaves a
   note in host memory, which is read, and becomes the context's error, when the host waits for the device anyway. */
typedef struct hpmlg_note {
    int              what;  /* hpmlg_trouble */
    long long        index;
    int              value;
    const hpml_node *node;
} hpmlg_note;

enum hpmlg_trouble { HPMLG_NO_TROUBLE = 0, HPMLG_BAD_TOKEN, HPMLG_BAD_LABEL };

/* What changes from step to step while a recorded pass stays the same; kernels read it on the device. */
typedef struct hpmlg_now {
    unsigned long long step, sample, seed;
} hpmlg_now;

#define HPMLG_SLOTS      4
#define HPMLG_SLOT_BYTES ((size_t)4 << 20)

typedef struct hpmlg_slot { /* a piece of pinned memory on its way to the device, and where it lands */
    unsigned char *host, *device;
    cudaEvent_t    landed, free;
} hpmlg_slot;

#define HPMLG_PASSES  32
#define HPMLG_SCRATCH ((size_t)1 << 20)
#define HPMLG_RESULT  ((size_t)4096)

typedef struct hpmlg_pass {
    hpml_pass       key;
    int             runs;  /* that went one by one so far */
    cudaGraphExec_t exec;  /* NULL: not recorded yet */
    uint64_t        used;  /* when last */
} hpmlg_pass;

typedef struct hpmlg_weights { /* the half copy of a parameter */
    const float *w;
    void        *half;
    int64_t      n;
    bool         fresh;
} hpmlg_weights;

typedef struct hpmlg_device {
    hpml_ctx      *ctx;
    hpml_cuda_desc d;
    hpml_dtype     store;
    int            sms;            /* multiprocessors */
    cudaStream_t   stream, copies; /* ops; uploads */
    hpmlg_slot     slots[HPMLG_SLOTS];
    int            slot;           /* the one that is being filled */
    size_t         slot_used;      /* bytes of it */
    hpmlg_note    *note;           /* host memory that the device sees */
    int           *note_taken;     /* on the device */
    hpmlg_now     *now, now_host;  /* on the device; what stands there */
    bool           now_known;
    hpmlg_pass     passes[HPMLG_PASSES];
    hpmlg_pass    *recording;
    uint64_t       clock;
    hpmlg_weights *weights;        /* (weight_count) */
    int            weight_count, weight_room;
    void          *workspace;      /* d.workspace bytes */
    void          *scratch;        /* HPMLG_SCRATCH bytes for partial sums */
    void          *result;         /* HPMLG_RESULT bytes of pinned memory: small downloads land there */
#ifndef HPML_CUDA_NO_CUBLAS
    cublasLtHandle_t blas;
#endif
#ifndef HPML_CUDA_NO_CUDNN
    cudnnHandle_t  dnn;
#endif
} hpmlg_device;

/* A CUDA error becomes the context's, with what to do where that is known. */
HPMLG_FN hpml_status hpmlg_check(hpmlg_device *d, cudaError_t e, const char *what)
{
    const char *cure = "";
    if (e == cudaSuccess) return HPML_OK;
    cudaGetLastError();
    if (e == cudaErrorNoKernelImageForDevice) cure = "; this program holds code for other GPUs: nvcc -arch=native";
    if (e == cudaErrorIllegalAddress) cure = "; the context is lost; compute-sanitizer names the kernel and the line";
    return hpml_ctx_fail(d->ctx, e == cudaErrorMemoryAllocation ? HPML_ERR_MEMORY : HPML_ERR_CUDA,
                         "cuda device %d: %s: %s (%s)%s", (int)d->d.device, what, cudaGetErrorString(e),
                         cudaGetErrorName(e), cure);
}

/* Launches on the device's stream; an expression, its value the status. */
#define HPMLG_RUN(d, kernel, grid, block, shared, ...)                                                                 \
    (HPMLG_LAUNCH(kernel, grid, block, shared, (d)->stream, __VA_ARGS__), hpmlg_check(d, cudaGetLastError(), #kernel))

/* The device of a context, current on this thread. */
HPMLG_FN hpmlg_device *hpmlg_enter(const hpml_ctx *ctx)
{
    hpmlg_device *d = (hpmlg_device *)hpml_ctx_device(ctx);
    cudaSetDevice(d->d.device);
    return d;
}

HPMLG_FN hpmlg_array hpmlg_of(void *p, hpml_dtype type)
{
    hpmlg_array a = { p, (int)type };
    return a;
}

HPMLG_FN hpmlg_array hpmlg_value(const hpml_tensor *t) { return hpmlg_of(t->data, t->dtype); }
HPMLG_FN hpmlg_array hpmlg_grad(const hpml_tensor *t) { return hpmlg_of(t->grad, t->dtype); }

/* Blocks for n things, `each` to a block, when a block may loop: enough to fill the device, not more. */
HPMLG_FN unsigned hpmlg_blocks(const hpmlg_device *d, int64_t n, int64_t each)
{
    int64_t blocks = (n + each - 1) / each, most = (int64_t)d->sms * 16;
    return (unsigned)(blocks < 1 ? 1 : blocks < most ? blocks : most);
}

HPMLG_FN void        hpmlg_close(void *device);
HPMLG_FN hpml_status hpmlg_libraries_open(hpmlg_device *d); /* cuBLASLt, cuDNN */
HPMLG_FN void        hpmlg_libraries_close(hpmlg_device *d);

static __global__ void hpmlg_k_hello(int *taken) { *taken = 0; }

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
    if (e != cudaSuccess) return hpmlg_check(d, e, "counting devices");
    if (d->d.device < 0 || d->d.device >= count)
        return hpml_ctx_fail(d->ctx, HPML_ERR_ARGUMENT, "cuda: there is no device %d, only 0 to %d", (int)d->d.device,
                             count - 1);
    if ((e = cudaSetDevice(d->d.device)) != cudaSuccess) return hpmlg_check(d, e, "cudaSetDevice");
    if ((e = cudaGetDeviceProperties(&p, d->d.device)) != cudaSuccess) return hpmlg_check(d, e, "properties");
    d->sms = p.multiProcessorCount;
    if (d->d.precision != HPML_CUDA_F32 && p.major < 8)
        return hpml_ctx_fail(d->ctx, HPML_ERR_UNSUPPORTED, "cuda: precision %d needs compute capability 8.0, %s has "
                             "%d.%d; take HPML_CUDA_F32", (int)d->d.precision, p.name, p.major, p.minor);
    return HPML_OK;
}

HPMLG_FN hpml_status hpmlg_open_memory(hpmlg_device *d)
{
    cudaError_t e = cudaStreamCreateWithFlags(&d->stream, cudaStreamNonBlocking);
    if (e == cudaSuccess) e = cudaStreamCreateWithFlags(&d->copies, cudaStreamNonBlocking);
    for (int i = 0; i < HPMLG_SLOTS && e == cudaSuccess; i++) {
        hpmlg_slot *s = &d->slots[i];
        e = cudaHostAlloc((void **)&s->host, HPMLG_SLOT_BYTES, cudaHostAllocDefault);
        if (e == cudaSuccess) e = cudaMalloc((void **)&s->device, HPMLG_SLOT_BYTES);
        if (e == cudaSuccess) e = cudaEventCreateWithFlags(&s->landed, cudaEventDisableTiming);
        if (e == cudaSuccess) e = cudaEventCreateWithFlags(&s->free, cudaEventDisableTiming);
    }
    if (e == cudaSuccess) e = cudaHostAlloc((void **)&d->note, sizeof *d->note, cudaHostAllocMapped);
    if (e == cudaSuccess) e = cudaHostAlloc(&d->result, HPMLG_RESULT, cudaHostAllocDefault);
    if (e == cudaSuccess) e = cudaMalloc((void **)&d->note_taken, sizeof *d->note_taken);
    if (e == cudaSuccess) e = cudaMalloc((void **)&d->now, sizeof *d->now);
    if (e == cudaSuccess) e = cudaMalloc(&d->scratch, HPMLG_SCRATCH);
    if (e == cudaSuccess) e = cudaMalloc(&d->workspace, d->d.workspace);
    if (e == cudaSuccess) memset(d->note, 0, sizeof *d->note);
    return hpmlg_check(d, e, "memory for the device's own use");
}

HPMLG_FN hpml_status hpmlg_open(hpml_ctx *ctx, const void *desc, void **device)
{
    hpmlg_device *d = (hpmlg_device *)hpml_ctx_alloc(ctx, sizeof *d, NULL);
    hpml_status   status;
    if (!d) return HPML_ERR_MEMORY;
    if (desc) d->d = *(const hpml_cuda_desc *)desc;
    d->ctx = ctx;
    if (d->d._begin || d->d._end || (int)d->d.precision < 0 || (int)d->d.precision > HPML_CUDA_F16)
        return hpml_ctx_fail(ctx, HPML_ERR_ARGUMENT, "cuda desc: precision %d, or a canary is not zero; zero the "
                             "struct before you set fields", (int)d->d.precision);
    if (d->d.workspace == 0) d->d.workspace = (size_t)64 << 20;
    d->store = d->d.precision == HPML_CUDA_BF16 ? HPML_DTYPE_BF16
             : d->d.precision == HPML_CUDA_F16 ? HPML_DTYPE_F16 : HPML_DTYPE_F32;
    status = hpmlg_open_device(d);
    if (status == HPML_OK) status = hpmlg_open_memory(d);
    if (status == HPML_OK) status = HPMLG_RUN(d, hpmlg_k_hello, 1, 1, 0, d->note_taken);
    if (status == HPML_OK) status = hpmlg_check(d, cudaStreamSynchronize(d->stream), "the first kernel");
    if (status == HPML_OK) status = hpmlg_libraries_open(d);
    if (status != HPML_OK) hpmlg_close(d);
    else *device = d;
    return status;
}

HPMLG_FN void hpmlg_close(void *device)
{
    hpmlg_device *d = (hpmlg_device *)device;
    cudaSetDevice(d->d.device);
    if (d->stream) cudaStreamSynchronize(d->stream);
    hpmlg_libraries_close(d);
    for (int i = 0; i < HPMLG_PASSES; i++)
        if (d->passes[i].exec) cudaGraphExecDestroy(d->passes[i].exec);
    for (int i = 0; i < d->weight_count; i++) cudaFree(d->weights[i].half);
    for (int i = 0; i < HPMLG_SLOTS; i++) {
        hpmlg_slot *s = &d->slots[i];
        if (s->host) cudaFreeHost(s->host);
        if (s->device) cudaFree(s->device);
        if (s->landed) cudaEventDestroy(s->landed);
        if (s->free) cudaEventDestroy(s->free);
    }
    if (d->note) cudaFreeHost(d->note);
    if (d->result) cudaFreeHost(d->result);
    if (d->note_taken) cudaFree(d->note_taken);
    if (d->now) cudaFree(d->now);
    if (d->scratch) cudaFree(d->scratch);
    if (d->workspace) cudaFree(d->workspace);
    if (d->copies) cudaStreamDestroy(d->copies);
    if (d->stream) cudaStreamDestroy(d->stream);
}

HPMLG_FN void *hpmlg_alloc(void *device, size_t bytes)
{
    hpmlg_device *d = (hpmlg_device *)device;
    void         *p = NULL;
    cudaSetDevice(d->d.device);
    if (cudaMalloc(&p, bytes) != cudaSuccess) {
        cudaGetLastError(); /* the caller reports it, with the size */
        return NULL;
    }
    cudaMemsetAsync(p, 0, bytes, d->stream);
    return p;
}

HPMLG_FN void hpmlg_free(void *device, void *p, size_t bytes)
{
    hpmlg_device *d = (hpmlg_device *)device;
    (void)bytes;
    cudaSetDevice(d->d.device);
    cudaStreamSynchronize(d->stream);
    cudaFree(p);
}

HPMLG_FN hpml_dtype hpmlg_store(void *device) { return ((hpmlg_device *)device)->store; }

HPML_API int hpml_cuda_device_count(void)
{
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess) {
        cudaGetLastError();
        return 0;
    }
    return count;
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

HPMLG_FN hpml_status hpmlg_slot_room(hpmlg_device *d, size_t bytes, hpmlg_slot **slot, size_t *at)
{
    cudaError_t e = cudaSuccess;
    if (d->slot_used + bytes > HPMLG_SLOT_BYTES) {
        e       = cudaEventRecord(d->slots[d->slot].free, d->stream);
        d->slot = (d->slot + 1) % HPMLG_SLOTS, d->slot_used = 0;
        if (e == cudaSuccess) e = cudaEventSynchronize(d->slots[d->slot].free);
    }
    *slot = &d->slots[d->slot];
    *at   = d->slot_used;
    d->slot_used += (bytes + 255) / 256 * 256;
    return hpmlg_check(d, e, "waiting for uploads");
}

#define HPMLG_SMALL ((size_t)64 << 10)

HPMLG_FN hpml_status hpmlg_upload(hpmlg_device *d, void *dst, const void *host, size_t bytes)
{
    hpmlg_slot *s;
    size_t      at;
    cudaError_t e;
    if (hpmlg_slot_room(d, bytes, &s, &at) != HPML_OK) return hpml_ctx_status(d->ctx);
    memcpy(s->host + at, host, bytes);
    if (bytes <= HPMLG_SMALL) {
        e = cudaMemcpyAsync(dst, s->host + at, bytes, cudaMemcpyHostToDevice, d->stream);
    } else {
        e = cudaMemcpyAsync(s->device + at, s->host + at, bytes, cudaMemcpyHostToDevice, d->copies);
        if (e == cudaSuccess) e = cudaEventRecord(s->landed, d->copies);
        if (e == cudaSuccess) e = cudaStreamWaitEvent(d->stream, s->landed, 0);
        if (e == cudaSuccess) e = cudaMemcpyAsync(dst, s->device + at, bytes, cudaMemcpyDeviceToDevice, d->stream);
    }
    return hpmlg_check(d, e, "upload");
}

/* Half copies of parameters that this memory holds are old now. */
HPMLG_FN void hpmlg_weights_touch(hpmlg_device *d, const void *dst, size_t bytes)
{
    const char *from = (const char *)dst, *to = from + bytes;
    for (int i = 0; i < d->weight_count; i++) {
        const char *w = (const char *)d->weights[i].w;
        if (w < to && from < w + (size_t)d->weights[i].n * sizeof(float)) d->weights[i].fresh = false;
    }
}

HPMLG_FN hpml_status hpmlg_write(void *device, void *dst, const void *host, size_t bytes)
{
    hpmlg_device *d      = (hpmlg_device *)device;
    hpml_status   status = HPML_OK;
    cudaSetDevice(d->d.device);
    hpmlg_weights_touch(d, dst, bytes);
    for (size_t i = 0; i < bytes && status == HPML_OK; i += HPMLG_SLOT_BYTES) {
        size_t n = bytes - i < HPMLG_SLOT_BYTES ? bytes - i : HPMLG_SLOT_BYTES;
        status   = hpmlg_upload(d, (char *)dst + i, (const char *)host + i, n);
    }
    return status;
}

HPMLG_FN hpml_status hpmlg_zero(void *device, void *dst, size_t bytes)
{
    hpmlg_device *d = (hpmlg_device *)device;
    cudaSetDevice(d->d.device);
    hpmlg_weights_touch(d, dst, bytes);
    return hpmlg_check(d, cudaMemsetAsync(dst, 0, bytes, d->stream), "zeroing");
}

/* All work is done on return; what kernels have noted becomes an error. */
HPMLG_FN hpml_status hpmlg_sync(void *device)
{
    hpmlg_device *d = (hpmlg_device *)device;
    hpmlg_note    n;
    cudaSetDevice(d->d.device);
    hpml_status status = hpmlg_check(d, cudaStreamSynchronize(d->stream), "waiting for the device");
    if (status != HPML_OK || d->note->what == HPMLG_NO_TROUBLE) return status;
    n = *d->note;
    memset(d->note, 0, sizeof *d->note);
    cudaMemsetAsync(d->note_taken, 0, sizeof *d->note_taken, d->stream);
    if (n.what == HPMLG_BAD_TOKEN)
        return hpml_ctx_fail(d->ctx, HPML_ERR_LABEL, "embedding \"%s\": token %lld is %d, expected 0 to %lld",
                             n.node->out->name, n.index, n.value, (long long)n.node->src[1]->shape[0] - 1);
    return hpml_ctx_fail(d->ctx, HPML_ERR_LABEL, "cross_entropy: label %lld of the batch is %d, expected 0 to %lld (or "
                         "%d to be ignored)", n.index, n.value,
                         (long long)n.node->src[0]->shape[n.node->src[0]->ndim - 1] - 1,
                         (int)n.node->attr.cross_entropy.ignore);
}

HPMLG_FN hpml_status hpmlg_read(void *device, void *host, const void *src, size_t bytes)
{
    hpmlg_device *d     = (hpmlg_device *)device;
    bool          small = bytes <= HPMLG_RESULT;
    cudaSetDevice(d->d.device);
    cudaError_t e = cudaMemcpyAsync(small ? (void *)d->result : host, src, bytes, cudaMemcpyDeviceToHost, d->stream);
    hpml_status status = hpmlg_check(d, e, "download");
    if (status == HPML_OK) status = hpmlg_sync(d);
    if (status == HPML_OK && small) memcpy(host, d->result, bytes);
    return status;
}

/* On the device: this index of what node `node` reads is out of range. */
HPMLG_DEVICE void hpmlg_complain(hpmlg_note *note, int *taken, int what, long long index, int value,
                                 const hpml_node *node)
{
    if (atomicCAS(taken, 0, 1) != 0) return;
    note->index = index, note->value = value, note->node = node;
    __threadfence_system();
    note->what = what;
}

// ---------------------------------------------------------------------------------------------------------------------
// >>gpu-pass   whole passes, recorded once and replayed
// ---------------------------------------------------------------------------------------------------------------------

/* A step launches hundreds of small kernels, always the same ones on the same memory. The second time a pass comes by
   it is recorded as a CUDA graph, and from then on it is one launch. The first time goes op by op: libraries take their
   memory then. What changes from step to step, the number of the step that keys random masks, is read from memory. */

HPMLG_FN hpml_status hpmlg_now_set(hpmlg_device *d, const hpml_run *run)
{
    hpmlg_now now;
    memset(&now, 0, sizeof now);
    now.step = run->step, now.sample = run->sample, now.seed = hpml_ctx_seed(run->ctx);
    if (d->recording || (d->now_known && memcmp(&now, &d->now_host, sizeof now) == 0)) return HPML_OK;
    d->now_host = now, d->now_known = true;
    return hpmlg_upload(d, d->now, &now, sizeof now);
}

/* The record of this pass, or the one that was idle longest, cleared. */
HPMLG_FN hpmlg_pass *hpmlg_pass_find(hpmlg_device *d, const hpml_pass *key)
{
    hpmlg_pass *oldest = &d->passes[0];
    for (int i = 0; i < HPMLG_PASSES; i++) {
        if (memcmp(&d->passes[i].key, key, sizeof *key) == 0) return &d->passes[i];
        if (d->passes[i].used < oldest->used) oldest = &d->passes[i];
    }
    if (oldest->exec) cudaGraphExecDestroy(oldest->exec);
    memset(oldest, 0, sizeof *oldest);
    oldest->key = *key;
    return oldest;
}

HPMLG_FN hpml_status hpmlg_weights_refresh(hpmlg_device *d);

HPMLG_FN hpml_status hpmlg_begin(void *device, const hpml_run *run, const hpml_pass *key, bool *done)
{
    hpmlg_device *d = hpmlg_enter(run->ctx);
    hpml_status   status = hpmlg_now_set(d, run);
    (void)device;
    if (status == HPML_OK) status = hpmlg_weights_refresh(d);
    if (status != HPML_OK || d->d.no_record) return status;
    hpmlg_pass *p = hpmlg_pass_find(d, key);
    p->used = ++d->clock;
    *done   = p->exec != NULL;
    if (*done) return hpmlg_check(d, cudaGraphLaunch(p->exec, d->stream), "launching a pass");
    if (p->runs++ == 0) return HPML_OK;
    status = hpmlg_check(d, cudaStreamBeginCapture(d->stream, cudaStreamCaptureModeThreadLocal), "recording a pass");
    if (status == HPML_OK) d->recording = p;
    return status;
}

HPMLG_FN hpml_status hpmlg_end(void *device, const hpml_run *run, hpml_status status)
{
    hpmlg_device *d = hpmlg_enter(run->ctx);
    hpmlg_pass   *p = d->recording;
    cudaGraph_t   graph = NULL;
    (void)device;
    if (!p) return status;
    d->recording  = NULL;
    cudaError_t e = cudaStreamEndCapture(d->stream, &graph);
    if (status == HPML_OK && e == cudaSuccess) e = cudaGraphInstantiate(&p->exec, graph, 0);
    if (graph) cudaGraphDestroy(graph);
    if (status != HPML_OK) return status;
    if (e == cudaSuccess) e = cudaGraphLaunch(p->exec, d->stream);
    return hpmlg_check(d, e, "recording a pass");
}

// ---------------------------------------------------------------------------------------------------------------------
// >>gpu-elementwise   add, sub, mul, div with broadcasting; scale; activations
// ---------------------------------------------------------------------------------------------------------------------

/* Scaffold: an op that another commit brings. */
#define HPMLG_MISSING(pass)                                                                                            \
    HPMLG_FN hpml_status hpmlg_##pass(const hpml_run *run, hpml_node *n)                                               \
    { return hpml_ctx_fail(run->ctx, HPML_ERR_UNSUPPORTED, "%s is missing for \"%s\"", #pass, n->out->name); }

/* y = act(x). */
HPMLG_DEVICE float hpmlg_act(int act, float slope, float x)
{
    switch (act) {
    case HPML_ACT_RELU: return x > 0 || x != x ? x : 0;
    case HPML_ACT_LEAKY_RELU: return x > 0 ? x : slope * x;
    case HPML_ACT_GELU: return x / (1 + expf(-1.5957691216057308f * (x + 0.044715f * x * x * x)));
    case HPML_ACT_GELU_ERF: return 0.5f * x * (1 + erff(x * 0.70710678118654752f));
    case HPML_ACT_SILU: return x / (1 + expf(-x));
    case HPML_ACT_SIGMOID: return 1 / (1 + expf(-x));
    case HPML_ACT_TANH: return tanhf(x);
    case HPML_ACT_EXP: return expf(x);
    case HPML_ACT_LOG: return logf(x);
    case HPML_ACT_SQRT: return sqrtf(x);
    case HPML_ACT_SQUARE: return x * x;
    case HPML_ACT_NEG: return -x;
    case HPML_ACT_ABS: return fabsf(x);
    default: return x;
    }
}

/* y = act(x), 8 elements a thread and turn. */
static __global__ void hpmlg_k_act(hpmlg_array y, hpmlg_array x, int act, float slope, int64_t n)
{
    int64_t step = (int64_t)gridDim.x * blockDim.x, first = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    for (int64_t i = first; i < n / 8; i += step) {
        hpmlg_eight e = hpmlg_get8(x, i);
        for (int j = 0; j < 8; j++) e.v[j] = hpmlg_act(act, slope, e.v[j]);
        hpmlg_put8(y, i, e);
    }
    for (int64_t i = n / 8 * 8 + first; i < n; i += step) hpmlg_put(y, i, hpmlg_act(act, slope, hpmlg_get(x, i)));
}

HPMLG_FN hpml_status hpmlg_act_run(hpmlg_device *d, hpmlg_array y, hpmlg_array x, hpml_act act, float slope, int64_t n)
{
    return HPMLG_RUN(d, hpmlg_k_act, hpmlg_blocks(d, n, 2048), 256, 0, y, x, (int)act, slope, n);
}

HPMLG_FN hpml_status hpmlg_activation_forward(const hpml_run *run, hpml_node *n)
{
    return hpmlg_act_run(hpmlg_enter(run->ctx), hpmlg_value(n->out), hpmlg_value(n->src[0]), n->attr.act.act,
                         n->attr.act.slope, hpml_tensor_count(n->out));
}

HPMLG_MISSING(add_forward)
HPMLG_MISSING(add_backward)
HPMLG_MISSING(sub_forward)
HPMLG_MISSING(sub_backward)
HPMLG_MISSING(mul_forward)
HPMLG_MISSING(mul_backward)
HPMLG_MISSING(div_forward)
HPMLG_MISSING(div_backward)
HPMLG_MISSING(scale_forward)
HPMLG_MISSING(scale_backward)
HPMLG_MISSING(activation_backward)

// ---------------------------------------------------------------------------------------------------------------------
// >>gpu-sums   sums, sums of squares, counting hits
// ---------------------------------------------------------------------------------------------------------------------

HPMLG_MISSING(sum_forward)
HPMLG_MISSING(sum_backward)

HPMLG_FN hpml_status hpmlg_sumsq(void *device, hpml_ctx *ctx, hpml_dtype dtype, const void *x, int64_t n, double *out)
{
    (void)device, (void)dtype, (void)x, (void)n, (void)out;
    return hpml_ctx_fail(ctx, HPML_ERR_UNSUPPORTED, "sumsq is missing");
}

HPMLG_FN hpml_status hpmlg_correct(void *device, hpml_ctx *ctx, hpml_dtype dtype, const void *y, const int32_t *labels,
                                   int64_t rows, int64_t classes, int64_t counts[2])
{
    (void)device, (void)dtype, (void)y, (void)labels, (void)rows, (void)classes, (void)counts;
    return hpml_ctx_fail(ctx, HPML_ERR_UNSUPPORTED, "correct is missing");
}

// ---------------------------------------------------------------------------------------------------------------------
// >>gpu-shape   reshape, permute, slice, concat
// ---------------------------------------------------------------------------------------------------------------------

HPMLG_MISSING(reshape_forward)
HPMLG_MISSING(reshape_backward)
HPMLG_MISSING(permute_forward)
HPMLG_MISSING(permute_backward)
HPMLG_MISSING(slice_forward)
HPMLG_MISSING(slice_backward)
HPMLG_MISSING(concat_forward)
HPMLG_MISSING(concat_backward)

// ---------------------------------------------------------------------------------------------------------------------
// >>gpu-norm   softmax, layernorm, rmsnorm
// ---------------------------------------------------------------------------------------------------------------------

HPMLG_MISSING(softmax_forward)
HPMLG_MISSING(softmax_backward)
HPMLG_MISSING(layernorm_forward)
HPMLG_MISSING(layernorm_backward)
HPMLG_MISSING(rmsnorm_forward)
HPMLG_MISSING(rmsnorm_backward)

// ---------------------------------------------------------------------------------------------------------------------
// >>gpu-batchnorm   batch normalization
// ---------------------------------------------------------------------------------------------------------------------

HPMLG_MISSING(batchnorm_forward)
HPMLG_MISSING(batchnorm_backward)

// ---------------------------------------------------------------------------------------------------------------------
// >>gpu-pool   max and average pooling
// ---------------------------------------------------------------------------------------------------------------------

HPMLG_MISSING(max_pool2d_forward)
HPMLG_MISSING(max_pool2d_backward)
HPMLG_MISSING(avg_pool2d_forward)
HPMLG_MISSING(avg_pool2d_backward)

// ---------------------------------------------------------------------------------------------------------------------
// >>gpu-random   Philox, dropout, embedding
// ---------------------------------------------------------------------------------------------------------------------

HPMLG_MISSING(dropout_forward)
HPMLG_MISSING(dropout_backward)
HPMLG_MISSING(embedding_forward)
HPMLG_MISSING(embedding_backward)

// ---------------------------------------------------------------------------------------------------------------------
// >>gpu-product   matrix products: our kernels
// ---------------------------------------------------------------------------------------------------------------------

/* The half copy of a parameter, made when it is first asked for, and again when it is old. */
HPMLG_FN hpml_status hpmlg_weights_refresh(hpmlg_device *d)
{
    (void)d;
    return HPML_OK;
}

// ---------------------------------------------------------------------------------------------------------------------
// >>gpu-cublas   matrix products by cuBLASLt
// ---------------------------------------------------------------------------------------------------------------------


// ---------------------------------------------------------------------------------------------------------------------
// >>gpu-matmul   matmul and linear layers
// ---------------------------------------------------------------------------------------------------------------------

HPMLG_MISSING(matmul_forward)
HPMLG_MISSING(matmul_backward)
HPMLG_MISSING(linear_forward)
HPMLG_MISSING(linear_backward)

// ---------------------------------------------------------------------------------------------------------------------
// >>gpu-conv   convolution: our kernels
// ---------------------------------------------------------------------------------------------------------------------

HPMLG_MISSING(conv2d_forward)
HPMLG_MISSING(conv2d_backward)

// ---------------------------------------------------------------------------------------------------------------------
// >>gpu-cudnn   convolution by cuDNN
// ---------------------------------------------------------------------------------------------------------------------

HPMLG_FN hpml_status hpmlg_libraries_open(hpmlg_device *d)
{
    (void)d;
    return HPML_OK;
}

HPMLG_FN void hpmlg_libraries_close(hpmlg_device *d) { (void)d; }

// ---------------------------------------------------------------------------------------------------------------------
// >>gpu-attention   multi-head attention, never storing the (T, T) matrix
// ---------------------------------------------------------------------------------------------------------------------

HPMLG_MISSING(attention_forward)
HPMLG_MISSING(attention_backward)

// ---------------------------------------------------------------------------------------------------------------------
// >>gpu-lstm   long short-term memory
// ---------------------------------------------------------------------------------------------------------------------

HPMLG_MISSING(lstm_forward)
HPMLG_MISSING(lstm_backward)

// ---------------------------------------------------------------------------------------------------------------------
// >>gpu-loss   losses
// ---------------------------------------------------------------------------------------------------------------------

HPMLG_MISSING(cross_entropy_forward)
HPMLG_MISSING(cross_entropy_backward)
HPMLG_MISSING(bce_with_logits_forward)
HPMLG_MISSING(bce_with_logits_backward)
HPMLG_MISSING(huber_forward)
HPMLG_MISSING(huber_backward)

// ---------------------------------------------------------------------------------------------------------------------
// >>gpu-update   optimizers: one launch for all parameters
// ---------------------------------------------------------------------------------------------------------------------

HPMLG_FN hpml_status hpmlg_update(void *device, hpml_ctx *ctx, const hpml_update *updates, int count)
{
    (void)device, (void)updates, (void)count;
    return hpml_ctx_fail(ctx, HPML_ERR_UNSUPPORTED, "update is missing");
}

// ---------------------------------------------------------------------------------------------------------------------
// >>gpu-codec   gradients packed on the device
// ---------------------------------------------------------------------------------------------------------------------

HPMLG_FN hpml_status hpmlg_encode(void *device, hpml_ctx *ctx, const hpml_packing *p, void *packed, float *residual,
                                  const float *grad, int64_t rows)
{
    (void)device, (void)p, (void)packed, (void)residual, (void)grad, (void)rows;
    return hpml_ctx_fail(ctx, HPML_ERR_UNSUPPORTED, "encode is missing");
}

HPMLG_FN hpml_status hpmlg_decode(void *device, hpml_ctx *ctx, const hpml_packing *p, float *out, const void *packed,
                                  int64_t rows, bool add)
{
    (void)device, (void)p, (void)out, (void)packed, (void)rows, (void)add;
    return hpml_ctx_fail(ctx, HPML_ERR_UNSUPPORTED, "decode is missing");
}

// ---------------------------------------------------------------------------------------------------------------------
// >>gpu-backend   the table
// ---------------------------------------------------------------------------------------------------------------------

/* What the passes of a node want kept and as working space here; the CPU's wishes stand when nothing is set. */
HPMLG_FN void hpmlg_plan(void *device, hpml_node *n)
{
    (void)device;
    switch (n->op) {
    default: break;
    }
}

HPML_API const hpml_backend *hpml_backend_cuda(void)
{
    static const hpml_op_impl ops[HPML_OP_COUNT] = {
#define HPMLG_X(op, name) { hpmlg_##name##_forward, hpmlg_##name##_backward },
        HPML_OPS(HPMLG_X)
#undef HPMLG_X
    };
    static const hpml_backend cuda = { "cuda", hpmlg_open, hpmlg_close, hpmlg_alloc, hpmlg_free, hpmlg_write,
        hpmlg_read, hpmlg_zero, hpmlg_sync, ops, hpmlg_update, hpmlg_sumsq, hpmlg_store, hpmlg_plan, hpmlg_begin,
        hpmlg_end, hpmlg_correct, hpmlg_encode, hpmlg_decode };
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
