// hpml_cuda.cuh - v0.1.0 - hpml on NVIDIA GPUs: a backend for hpml.h - MIT licence (end of file)
//
// Do this in exactly one file that nvcc compiles, before you include this header:
//     #define HPML_IMPLEMENTATION          (or HPML_CUDA_IMPLEMENTATION, where another file has hpml.h's body)
//     #include "hpml_cuda.cuh"
// In all other files, C files too, include it without the define. Build: nvcc -O2 program.cu -lcublasLt -lcudnn
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
//     - allocate GPU memory unasked: one arena for each graph, allocated with the graph, and a workspace for the
//       libraries (hpml_cuda_desc.workspace)
//     - use cuDNN's attention: its own kernels run on tensor cores in halves and add in a fixed order
//     - spread over several GPUs by itself: a context is one GPU; ranks do that (hpml_comm.h)
//
// OPTIONS, defined before the include that has the implementation
//     HPML_CUDA_IMPLEMENTATION     only this header's body: split builds, where another file has hpml.h's
//     HPML_CUDA_NO_CUBLAS          matrix products by this header's kernels
//     HPML_CUDA_NO_CUDNN           convolutions by this header's kernels
//     HPML_USE_NCCL                reductions over several GPUs (>>api-nccl); needs nccl.h, and NCCL at run time
//
// THREADS: as in hpml.h, a context belongs to one thread at a time. All its work runs on one stream, in order.
// SAME BITS: the same program on the same kind of GPU gives the same bits, unless hpml_cuda_desc.tune is set. They are
// not the CPU's, because sums are taken in another order.
//
// GLOSSARY: words and all of their senses here. Private names begin with hpmlg_ (g: GPU).
//     grid, block      a kernel runs as a grid of blocks; the 32 to 1,024 threads of a block run on one multiprocessor,
//                      share its memory (99 to 227 KiB) and can wait for each other
//     warp, lane       32 threads of a block that execute together; a lane is one of them
//     row, column      of an array: the elements along its last dimension; those of one index of the last dimension
//     team             the threads that share the work on one row: a warp or a whole block
//     half             a number of 2 bytes, bf16 or f16; a half model stores its activations in halves
//     half copy        the copy of an f32 parameter in halves that products read
//     vec8             8 neighbouring elements, which a thread reads or writes in one or two accesses of 16 bytes
//     product          c = a b in any form: matrix products, linear layers, convolutions
//     line             a row of the left operand of a product, or a column of the right one
//     tile             the rectangle of a result that one block or one warp computes; also a part of an operand in
//                      shared memory
//     bank             one of the 32 parts of shared memory, of which each serves one access of a warp at a time
//     fragment         the elements of a tile that a warp holds in its registers for one tensor-core instruction
//     stage            one of the buffers in shared memory that are filled while another one is multiplied
//     split            a piece of a long sum, computed by a block of its own; the splits are added in order
//     unit             16 bytes of a row of a tile in shared memory; of batchnorm: 1 or 8 numbers that are read at once
//     chunk            4,096 elements of a parameter, which one block updates; of codec ONEBIT: 1,024 elements;
//                      of an attention tile: a unit
//     pair             of attention: one sample and one head
//     epilogue         the work on a finished sum before it is stored: bias, activation, derivative
//     pass             all ops of one forward or backward run of a graph; of a convolution: y, dx or dw is computed
//     capture, replay  a pass is captured as a CUDA graph the second time it runs, and then replayed by one launch
//     slot             a part of the ring of pinned host memory that uploads pass through
//     pinned           of host memory: at a fixed physical address, so that the GPU can copy without the CPU
//     note             a message from a kernel to the host: an index out of range, a value that is not finite
//     op notes         results of an op, besides its output, that a later op uses
//     span             a timed interval of work on a stream; its lane is the row of the trace that shows it
//     plan             the descriptors and the algorithm of a library for one shape, kept in a cache; to refuse: of a
//                      library, to have no kernel for a product or a convolution, so that this header's kernels run
//     codec, packing   the form in which gradients travel (1 bit, 2 bits, bf16) and the packed bytes; residual: the
//                      error of packing, which is added to the next gradient
//     link             the functions through which hpml_comm.h reduces device memory over NCCL (hpml_device_link)
//     rank, identity   one of the processes or threads that train together; identity: the host, GPU and NCCL id that
//                      ranks exchange before NCCL exists
//
// INDEX (grep '^// >>' hpml_cuda.cuh)
// PART I     INTERFACE: what a program calls
//     api-cuda   devices and the backend
//     api-nccl   ranks on several GPUs
// PART II    LANGUAGE AND DEVICE: how kernels are written, launched and recorded
//     gpu-tour   one training step of GPT-2, kernel by kernel
//     gpu-language   the CUDA features that kernels use
//     gpu-vec8   reading and writing 8 elements at a time
//     gpu-device   the device: errors, launches, memory
//     gpu-copy   copies to and from the host through pinned memory
//     gpu-sync   waiting: times of ops, errors that kernels found
//     gpu-pass   whole passes, captured once and replayed
// PART III   OPS: everything but products, sequences and losses
//     gpu-elementwise   add, sub, mul, div with broadcasting; scale; activations
//     gpu-sums   sums over dimensions, sums of squares
//     gpu-shape   permute, slice, concat
//     gpu-nhwc   images whose channels are adjacent in memory; reshape
//     gpu-map   elementwise functions of up to three operands; indices along a dimension, maxima, masks
//     gpu-norm   softmax, layernorm, rmsnorm
//     gpu-batchnorm   batch normalization
//     gpu-pool   max and average pooling
//     gpu-random   Philox, dropout
//     gpu-embedding   rows of a table, and their gradient
// PART IV    PRODUCTS: matrices and convolutions, by own kernels and by libraries
//     gpu-operand   operands of products: the addresses of their elements
//     gpu-tiles   product kernels: dense halves on tensor cores, and any operands
//     gpu-product   choosing a product kernel; half copies of parameters
//     gpu-cublas   matrix products by cuBLASLt
//     gpu-tune   products chosen by the clock
//     gpu-matmul   matmul and linear layers
//     gpu-conv   convolution by own kernels
//     gpu-cudnn   convolution by cuDNN
// PART V     ATTENTION AND SEQUENCES
//     gpu-attention   multi-head attention without storing the (T, T) matrix
//     gpu-attention-back   the gradient of attention
//     gpu-attention-op   attention with a cache; which kernels run; rotary positions
//     gpu-lstm   long short-term memory
//     gpu-gru   gated recurrent units
// PART VI    TRAINING: losses, optimizers, gradient codecs
//     gpu-loss   losses
//     gpu-update   optimizers: one launch for all parameters
//     gpu-codec   gradients packed on the device
// PART VII   SEVERAL GPUS
//     gpu-nccl   NCCL: loading, meeting of ranks, deadlines
//     gpu-link   collectives on device memory
// PART VIII  BACKEND
//     gpu-text   what has run where, as a line of text
//     gpu-backend   opening and closing; the table of functions
#ifndef HPML_CUDA_CUH_INCLUDED
#define HPML_CUDA_CUH_INCLUDED

#include "hpml.h"

#if HPML_VERSION != 100
#error "hpml.h and hpml_cuda.cuh are of different versions"
#endif

#ifdef __cplusplus
extern "C" {
#endif

// =====================================================================================================================
// PART I     INTERFACE: what a program calls
// =====================================================================================================================

// ---------------------------------------------------------------------------------------------------------------------
// >>api-cuda   devices and the backend
// ---------------------------------------------------------------------------------------------------------------------

/* The type of activations, and of the operands of products. Parameters, their gradients, the optimizer's state and all
   sums are f32 in every precision. */
typedef enum hpml_cuda_precision {
    HPML_CUDA_F32  = 0, /* all numbers are f32, as on the CPU */
    HPML_CUDA_TF32 = 1, /* f32, but matrix products round their operands to 11 bits (Ampere and later) */
    HPML_CUDA_BF16 = 2, /* activations and copies of the weights are bf16, products run on tensor cores */
    HPML_CUDA_F16  = 3  /* as BF16, in f16: 8 times finer, but small gradients become 0: hpml_trainer_desc.loss_scale */
} hpml_cuda_precision;

typedef struct hpml_cuda_desc {
    uint32_t            _begin;
    int32_t             device;       /* index of the GPU, as CUDA counts; CUDA_VISIBLE_DEVICES applies */
    hpml_cuda_precision precision;
    bool                no_record;    /* true: each kernel is launched by itself, without CUDA graphs: for debuggers */
    bool                own_kernels;  /* true: this header's kernels run even where cuBLASLt or cuDNN could be used */
    /* true: while a pass first runs, unrecorded, up to 8 of cuBLASLt's algorithms are timed for each product, with its
       epilogue fused and apart, and the fastest is kept (empirical optimization: Whaley and Dongarra 1998); takes some
       seconds, and memory for a copy of the result. false, or no such memory: the first proposal, the same bits in each
       run. Choices may change with each run, unless it loads a checkpoint of the same kind of GPU. Ranks that step
       together, all with `tune`, take those of rank 0 after the first update, keep the others, and time no more */
    bool                tune;
    size_t              workspace;    /* bytes for cuBLASLt and cuDNN. 0: 64 MiB, which grow while a graph first runs,
                                         where cuDNN's best algorithm needs more, to 1/16 of the GPU's memory at most */
    uint32_t            _end;
} hpml_cuda_desc;

/* Returns the table for hpml_ctx_desc.backend. backend_desc is then a hpml_cuda_desc; NULL: all defaults. A context
   whose device cannot be opened holds an error with the reason (no driver, no such device, a program built for another
   architecture). The `data` and `grad` of tensors are device addresses: use hpml_tensor_set and hpml_tensor_get. */
HPML_API const hpml_backend *hpml_backend_cuda(void);

typedef struct hpml_cuda_info {
    char   name[256];
    int    major, minor;       /* compute capability */
    int    multiprocessors;
    size_t memory, memory_free; /* bytes */
} hpml_cuda_info;
HPML_API int         hpml_cuda_device_count(void); /* 0: no device, or no driver */
HPML_API hpml_status hpml_cuda_device_info(int device, hpml_cuda_info *out);

/* Returns the cudaStream_t that ops run on; NULL: the context is not on a GPU. */
HPML_API void *hpml_cuda_stream(const hpml_ctx *ctx);

/* Writes one line of text to `buffer`, to judge a speed by: how much work each implementation has done since the
   context was created:
   - matrix products by cuBLASLt with the epilogues fused into them (bias, relu, gelu, gelu', bias sums), the numbers by
     which cuBLASLt knows its algorithms, and the epilogues that cuBLASLt refused, so that another kernel followed;
     with hpml_cuda_desc.tune how many products (fused and apart count as two) have a choice by the clock, how many of
     these choices are from a checkpoint or rank 0, not the first proposal, or to leave the epilogue apart;
     products by this header's own kernels, and how many of these cuBLASLt had refused;
   - the same for convolutions and cuDNN, with the algorithms of each pass, and the copies of images between the orders
     NCHW and NHWC, which half models have in memory: at the input, at hpml_flatten, at ops that need NCHW;
   - the workspace, and the largest workspace that an algorithm wanted;
   - passes that ran op by op, were captured as a CUDA graph, were replayed (their products are counted in each replay),
     and passes whose capture failed, so that they run op by op; a pass under a profile or a trace is not counted;
   - how often the host has waited for the device.
   Returns the length of the text as snprintf does; 0 and "" for a context that is not on a GPU. */
HPML_API int hpml_cuda_text(const hpml_ctx *ctx, char *buffer, size_t size);

// ---------------------------------------------------------------------------------------------------------------------
// >>api-nccl   ranks on several GPUs
// ---------------------------------------------------------------------------------------------------------------------

/* NCCL reduces arrays that live on GPUs over NVLink or the network, without passing through host memory. NCCL is used
   only if HPML_USE_NCCL is defined; its library is loaded when the first communicator is made, so that a program starts
   also where NCCL is not installed. Every rank has a context on a GPU of its own: hpml_cuda_desc.device is the rank
   modulo hpml_cuda_device_count() (which may be 0); set the device in the callback hpml_launch_desc.place. With
   hpml_comm.h, included before this header, one call is enough:

       hpml_nccl_attach(comm, NULL);    then hpml_distribute(trainer, comm, ...) as without NCCL

   No wait lasts longer than the timeout: then ncclCommAbort ends the NCCL communicator, and the context has an error
   with the rank, the operation and NCCL's own text. */
typedef struct hpml_nccl hpml_nccl; /* opaque; hpml_ctx_free frees each hpml_nccl of the context that is left */

/* How ranks exchange their identities before NCCL exists: by your own means, such as MPI_Allgather. hpml_nccl_attach
   uses the messages of the communicator. */
typedef struct hpml_nccl_meeting {
    hpml_status (*allgather)(void *user, void *all, size_t bytes); /* collective. all (ranks, bytes): this rank's row is
                                                                      set, the call fills in the others. all NULL and
                                                                      bytes 0: this rank has failed, others must too */
    void   *user;
    void  (*destroyed)(void *owner); /* called when the hpml_nccl is freed, also by hpml_ctx_free. NULL: no call */
    void   *owner;
    int32_t rank_in_errors;          /* this rank's number in error texts */
} hpml_nccl_meeting;

typedef struct hpml_nccl_desc {
    uint32_t    _begin;
    int32_t     rank, ranks; /* hpml_nccl_create: required; hpml_nccl_attach takes the communicator's */
    const char *file;        /* hpml_nccl_create: ranks exchange identities by files, named this path, "." and the
                                rank; files of an earlier run do no harm. Not needed with `meeting` */
    const char *library;     /* NULL: the NCCL that the program was linked with, else libnccl.so.2 */
    double      timeout;     /* most seconds that one wait for other ranks lasts; 0: 60 */
    bool        in_nodes;    /* hpml_nccl_attach: NCCL sums inside each node only; all nodes must have the same number
                                of ranks. Between nodes every rank sends its share of the sums by the communicator's
                                messages, packed if there is a codec. With two GPUs on a node the result has the same
                                bits as with HPML_HIERARCHICAL; with more GPUs, NCCL chooses the order of the sums */
    const hpml_nccl_meeting *meeting; /* copied; NULL: ranks meet by `file`. Not used by hpml_nccl_attach */
    uint32_t    _end;
} hpml_nccl_desc;

/* Collective. Returns NULL on failure, with the error on the context: NCCL is missing, two ranks are on one GPU, a rank
   did not call this function before the timeout. */
HPML_API hpml_nccl  *hpml_nccl_create(hpml_ctx *ctx, const hpml_nccl_desc *desc);
HPML_API void        hpml_nccl_free(hpml_nccl *n); /* optional, before hpml_ctx_free, which frees n too */
/* Replaces each of the `count` floats of x, on the device, by its sum or, if `mean`, mean over all ranks. The reduction
   comes after the device's earlier work and before its later work; the host does not wait. */
HPML_API hpml_status hpml_nccl_allreduce(hpml_nccl *n, float *x, int64_t count, bool mean);

/* The functions for the fields of a hpml_device_link: hpml_comm.h describes hpml_nccl_link_begin at the field `begin`,
   and so on. nccl: the result of hpml_nccl_create. */
HPML_API hpml_status hpml_nccl_link_begin(void *nccl);
HPML_API hpml_status hpml_nccl_link_allreduce(void *nccl, float *x, int64_t count, bool mean);
HPML_API hpml_status hpml_nccl_link_swap(void *nccl, const void *out, const size_t *out_at, bool same, void *in,
                                         const size_t *in_at);
HPML_API hpml_status hpml_nccl_link_end(void *nccl);
HPML_API hpml_status hpml_nccl_link_wait(void *nccl);
HPML_API hpml_status hpml_nccl_link_check(void *nccl);
HPML_API hpml_status hpml_nccl_link_scale(void *nccl, float *x, int64_t count, float times, float by);
HPML_API void        hpml_nccl_link_free(void *nccl);
HPML_API float      *hpml_nccl_link_stage(void *nccl, int64_t count);
HPML_API hpml_status hpml_nccl_link_reduce_scatter(void *nccl, float *x, const int64_t *at, float *stage);
HPML_API hpml_status hpml_nccl_link_allgather(void *nccl, float *x, const int64_t *at, const float *stage);
HPML_API hpml_status hpml_nccl_link_landed(void *nccl, float *stage);

#ifdef HPML_COMM_H_INCLUDED
/* The two functions that hpml_nccl_attach puts into its hpml_nccl_meeting: hpml_nccl_meet gathers the identities of all
   ranks by messages, and hpml_nccl_closed removes the communicator's link when the hpml_nccl is freed. */
static inline hpml_status hpml_nccl_meet(void *comm, void *all, size_t bytes)
{
    hpml_comm *c = (hpml_comm *)comm;
    return hpml_allgather(c, all, (int64_t)bytes * hpml_comm_size(c), HPML_ELEMENT_BYTE);
}

static inline void hpml_nccl_closed(void *comm) { hpml_comm_set_link((hpml_comm *)comm, NULL); }

/* Collective: this communicator's ranks reduce gradients by NCCL between their GPUs from now on; without this call the
   gradients pass through host memory. desc NULL: all defaults. The NCCL communicator is freed with c. */
static inline hpml_status hpml_nccl_attach(hpml_comm *c, const hpml_nccl_desc *desc)
{
    static hpml_nccl_desc defaults;
    hpml_nccl_desc        d = desc ? *desc : defaults;
    hpml_comm            *in = d.in_nodes ? hpml_comm_split_node(c) : c;
    hpml_nccl_meeting     meeting = { hpml_nccl_meet, in, hpml_nccl_closed, c, hpml_comm_rank(c) };
    hpml_device_link link = { NULL, hpml_nccl_link_begin, hpml_nccl_link_allreduce, hpml_nccl_link_swap,
                              hpml_nccl_link_end, hpml_nccl_link_wait, hpml_nccl_link_check, hpml_nccl_link_scale,
                              hpml_nccl_link_free, NULL, hpml_nccl_link_stage, hpml_nccl_link_reduce_scatter,
                              hpml_nccl_link_allgather, hpml_nccl_link_landed };
    d.rank    = hpml_comm_rank(in);
    d.ranks   = hpml_comm_size(in);
    d.meeting = &meeting;
    if (d.ranks < hpml_comm_size(c)) link.across = hpml_comm_split(c, d.rank, hpml_comm_rank(c));
    if (link.across && d.ranks * hpml_comm_size(link.across) != hpml_comm_size(c))
        hpml_ctx_fail(hpml_comm_ctx(c), HPML_ERR_UNSUPPORTED, "nccl in_nodes: this node has %d of %d ranks, others "
                      "more or fewer; start as many on each", (int)d.ranks, hpml_comm_size(c));
    link.user = hpml_nccl_create(hpml_comm_ctx(c), &d);
    return link.user ? hpml_comm_set_link(c, &link) : hpml_ctx_status(hpml_comm_ctx(c));
}
#endif

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* HPML_CUDA_CUH_INCLUDED: stop here if you only want the API */

/* The code analysis of an editor, which defines one of these macros, gets this header's body too, so that the editor
   does not show the body as excluded by the preprocessor. */
#if defined(__cplusplus) && (defined(__INTELLISENSE__) || defined(__JETBRAINS_IDE__) || defined(__CLANGD__))
#define HPML_CUDA_EDITOR
#ifndef HPML_CUDA_IMPLEMENTATION
#define HPML_CUDA_IMPLEMENTATION
#endif
#endif

#if defined(HPML_CUDA_IMPLEMENTATION) && !defined(__CUDACC__) && !defined(HPML_CUDA_ON_CPU) &&                         \
    !defined(HPML_CUDA_EDITOR)
#error "hpml_cuda.cuh: its body is for nvcc; define HPML_CUDA_IMPLEMENTATION in one .cu file"
#endif
#if (defined(HPML_IMPLEMENTATION) || defined(HPML_CUDA_IMPLEMENTATION)) &&                                             \
    (defined(__CUDACC__) || defined(HPML_CUDA_ON_CPU) || defined(HPML_CUDA_EDITOR)) && !defined(HPML_CUDA_BODY)
#define HPML_CUDA_BODY

// =====================================================================================================================
// PART II    LANGUAGE AND DEVICE: how kernels are written, launched and recorded
// =====================================================================================================================

// ---------------------------------------------------------------------------------------------------------------------
// >>gpu-tour   one training step of GPT-2, kernel by kernel
// ---------------------------------------------------------------------------------------------------------------------

/* examples/11_gpt2.cu trains GPT-2 with 124 M parameters in bf16. Its default step has B = 8 windows of T = 1,024
   tokens, so N = B T = 8,192 rows; width C = 768, 12 heads of D = 64 columns, 12 layers, a vocabulary of V = 50,304. An
   array (N, C) of bf16 has 12.6 MB, (N, 3C) 37.7, (N, 4C) 50.3, the logits (N, V) 824 MB. Each array is counted once
   for each kernel that reads it: repeated reads within a kernel come from the 50 MB of L2 cache.

   Forward, a layer (7 launches)                                                   GFLOP  MB read  written
     x = p + q; ln_1      hpmlg_k_norm, the residual sum fused                         -     25.2     25.2
     attn.c_attn          cuBLASLt + bias           (N, C) (C, 3C)                  29.0     16.1     37.7
     attention            hpmlg_k_attn              (B, T, 3C) -> (B, T, C)         12.9     37.7     13.0
     attn.c_proj          cuBLASLt + bias           (N, C) (C, C)                    9.7     13.8     12.6
     x = p + q; ln_2      hpmlg_k_norm                                                 -     25.2     25.2
     mlp.c_fc             cuBLASLt + bias + gelu    (N, C) (C, 4C); keeps z         38.7     17.3    100.7
     mlp.c_proj           cuBLASLt + bias           (N, 4C) (4C, C)                 38.7     55.1     12.6
   Backward, a layer (15 launches); the gradients of both residual sums, and of what they add, are one array
     mlp.c_proj  dw       cuBLASLt + bias sums      (C, N) (N, 4C), dw in f32       38.7     62.9      9.4
                 dx       cuBLASLt + gelu'(z)       (N, C) (C, 4C)                  38.7     67.6     50.3
     mlp.c_fc    dw       cuBLASLt + bias sums      (4C, N) (N, C)                  38.7     62.9      9.4
                 dx       cuBLASLt                  (N, 4C) (4C, C)                 38.7     55.1     12.6
     ln_2                 hpmlg_k_norm_back, _params                                   -     40.1     15.0
     attn.c_proj dw, dx   cuBLASLt, two launches                                    19.3     39.0     15.0
     attention            hpmlg_k_attn_delta        rowsum(dO O)                       -     25.2      0.4
                          hpmlg_k_attn_back twice   dK and dV; dQ                   32.2    100.6     37.7
     attn.c_attn dw, dx   cuBLASLt, two launches                                    58.0     91.6     19.7
     ln_1                 hpmlg_k_norm_back, _params                                   -     40.1     15.0
   Outside of the layers (21 launches)
     embedding, wpe, ln_f and their gradients                                          -    0.1 GB   0.05 GB
     head                 cuBLASLt: y, dw, dx       (N, C) (C, V)                  1,899    1.8 GB   1.0 GB
     cross-entropy        hpmlg_k_cross_entropy, _back                                 -    1.6 GB   0.8 GB
     clip_norm, AdamW     hpmlg_k_sum_terms; hpmlg_k_update: 30 bytes a parameter      -    2.5 GB   1.7 GB

   The graph is 2 launches of the host (a captured forward and a captured backward pass); the update is launched by
   itself. An H200 multiplies 989 TFLOP/s of bf16 and moves 4.8 TB/s: a kernel with fewer than 206 FLOP a byte is memory
   bound, which all are but products (c_attn: 540) and attention (250 forward). Attention's GFLOP count the half of the
   (T, T) matrix that the causal mask leaves, and backward 5 products, although the kernels compute 7.

   Estimated time of a step, in ms (assumed: products run at 550 TFLOP/s, attention forward at 205 and backward at 170,
   as the instructions of the compiled kernels allow; memory-bound kernels at 80 % of 4.8 TB/s; 1.3 us between two of
   the 285 kernels of the graphs; not measured):
     products, 6.07 TFLOP = 3 (12 (29.0 + 9.7 + 38.7 + 38.7) + 633) GFLOP          11.0
     attention forward, 155 GFLOP                                                   0.75
     attention backward, 387 GFLOP; delta                                           2.35
     25 norms with their residual sums, and their gradients, 2.6 GB                 0.7
     cross-entropy, 2.5 GB                                                          0.65
     AdamW, 124.5 M parameters of 30 bytes, 3.7 GB; the gradients' norm, 0.5 GB     1.1
     embeddings                                                                     0.05
     gaps between kernels                                                           0.4
     sum: 8,192 tokens in 17.0 ms                                                  17.0
   482,000 tokens/s at 6 x 124.5 M + 12 x 12 C T = 860 MFLOP a token are 42 % of the GPU's peak (MFU). */

// ---------------------------------------------------------------------------------------------------------------------
// >>gpu-language   the CUDA features that kernels use
// ---------------------------------------------------------------------------------------------------------------------

/* Kernels are plain CUDA C++. This section has all that differs between nvcc and the emulation in
   tests/emulator/cuda_on_cpu.h, which runs the same text on a CPU, thread by thread: how a kernel is launched, its
   dynamic shared memory, the tensor-core instructions and asynchronous copies.

   Sums are taken in an order that depends on the shape and the kind of GPU alone: no kernel adds floats atomically. */

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
#define HPMLG_DEVICE static __device__ __forceinline__
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
/* Declares `name`, a pointer to `type`: the dynamic shared memory of the kernel that contains this macro. */
#define HPMLG_SHARED(type, name)                                                                                       \
    extern __shared__ __align__(16) unsigned char hpmlg_dynamic[];                                                     \
    type *name = (type *)hpmlg_dynamic

/* Multiplies on tensor cores, by one warp: d (16, 8) += a (16, 16) b (16, 8), a and b in f16 if `f16`, else bf16, d in
   f32. The arguments are one lane's registers, as PTX defines them: with g = lane / 4, t = lane % 4, a[0] to a[3]
   contain rows g, g + 8, g, g + 8 at columns 2t, 2t, 2t + 8, 2t + 8 (two neighbouring numbers each); b[0], b[1] rows 2t
   and 2t + 8 (two numbers each, downward) of column g; d rows g, g, g + 8, g + 8 at columns 2t, 2t + 1, 2t, 2t + 1. */
HPMLG_DEVICE void hpmlg_mma_16816(float d[4], const unsigned a[4], const unsigned b[2], bool f16)
{
#define HPMLG_MMA(type)                                                                                                \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, " \
                 "{%0,%1,%2,%3};" : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                     \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
    if (f16) HPMLG_MMA("f16");
    else HPMLG_MMA("bf16");
}

/* Multiplies in tf32 on tensor cores, by one warp: d (16, 8) += a (16, 8) b (8, 8). With g = lane / 4, t = lane % 4:
   a[0..3] contain rows g, g + 8, g, g + 8 at columns t, t, t + 4, t + 4; b[0], b[1] rows t, t + 4 of column g; d[0..3]
   rows g, g, g + 8, g + 8 at columns 2t, 2t + 1, 2t, 2t + 1. a, b: f32 bits, whose low 13 are ignored. */
HPMLG_DEVICE void hpmlg_mma_1688_tf32(float d[4], const unsigned a[4], const unsigned b[2])
{
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                 "{%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/* Loads four 8 x 8 matrices of 16-bit elements from shared memory into registers r[0..3] of each lane of a warp. Lane l
   passes in `row` the address of row l % 8 of matrix l / 8 (16 bytes, aligned); its r[i] gets, from matrix i, row l /
   4, columns 2 (l % 4) and the next. variant: "" or, to load each matrix transposed, ".trans". */
#define HPMLG_LDMATRIX(variant)                                                                                        \
    asm volatile("ldmatrix.sync.aligned.m8n8.x4" variant ".shared.b16 {%0,%1,%2,%3}, [%4];"                            \
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])                                                      \
                 : "r"((unsigned)__cvta_generic_to_shared(row)) : "memory")
HPMLG_DEVICE void hpmlg_ldmatrix_x4(unsigned r[4], const void *row) { HPMLG_LDMATRIX(""); }
HPMLG_DEVICE void hpmlg_ldmatrix_x4_trans(unsigned r[4], const void *row) { HPMLG_LDMATRIX(".trans"); }

/* Starts the copy of 16 bytes from global to shared memory, which overlaps with computation. If `valid` is false, the
   destination gets 16 zeros and `global` is not read. hpmlg_copy_commit closes a group of copies; hpmlg_copy_wait(n)
   returns when all groups of this thread but the last n have arrived. */
HPMLG_DEVICE void hpmlg_copy_async16(void *shared, const void *global, bool valid)
{
    unsigned at = (unsigned)__cvta_generic_to_shared(shared), bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(global), "r"(bytes) : "memory");
}

HPMLG_DEVICE void hpmlg_copy_commit(void) { asm volatile("cp.async.commit_group;" ::: "memory"); }
#define hpmlg_copy_wait(n) asm volatile("cp.async.wait_group %0;" ::"n"(n) : "memory")

#define HPMLG_UNROLL _Pragma("unroll")
#define HPMLG_ROLLED _Pragma("unroll 1")
#else
#define HPMLG_UNROLL
#define HPMLG_ROLLED
#endif

#define HPMLG_FN static __attribute__((unused))
#define HPMLG_WARP 32
#define HPMLG_ALL_LANES 0xffffffffu

/* Return the index of this thread among all threads of a kernel launch, and the number of all these threads. The macros
   HPMLG_FOR_EACH... loop over 0 to n - 1, shared out to threads one by one or 8 neighbours at a time, or to warps. */
HPMLG_DEVICE int64_t hpmlg_thread_index(void) { return (int64_t)blockIdx.x * blockDim.x + threadIdx.x; }
HPMLG_DEVICE int64_t hpmlg_thread_count(void) { return (int64_t)gridDim.x * blockDim.x; }
#define HPMLG_FOR_EACH(i, n)                                                                                           \
    for (int64_t i##_step = hpmlg_thread_count(), i = hpmlg_thread_index(); i < (n); i += i##_step)
#define HPMLG_FOR_EACH_VEC8(i, n)                                                                                      \
    for (int64_t i = 8 * hpmlg_thread_index(); i < (n); i += 8 * hpmlg_thread_count())
#define HPMLG_FOR_EACH_WARP(i, n)                                                                                      \
    for (int64_t i = hpmlg_thread_index() / HPMLG_WARP; i < (n); i += hpmlg_thread_count() / HPMLG_WARP)

/* Returns a / b, by the 32-bit division, which is several times faster, where a and b fit in 32 unsigned bits. */
HPMLG_DEVICE int64_t hpmlg_quotient(int64_t a, int64_t b)
{
    return (((uint64_t)a | (uint64_t)b) >> 32) == 0 ? (int64_t)((uint32_t)a / (uint32_t)b) : a / b;
}

HPMLG_DEVICE float hpmlg_combine(float v, float w, bool maximum)
{
    if (!maximum) return v + w;
    return w > v || w != w ? w : v;
}

/* Returns, to each of tx neighbouring threads (a power of two), the sum of their values v, or, if `maximum`, the
   largest v, where a NaN counts as the largest. If tx exceeds 32 (a warp), all threads of the block must call. space:
   shared memory for one float per warp of the block; not used if tx is at most 32. */
HPMLG_DEVICE float hpmlg_group_reduce(float v, float *space, int tx, bool maximum)
{
    int lane = (int)threadIdx.x % HPMLG_WARP, warp = (int)threadIdx.x / HPMLG_WARP, warps = tx / HPMLG_WARP, first;
    for (int o = (tx < HPMLG_WARP ? tx : HPMLG_WARP) / 2; o > 0; o >>= 1)
        v = hpmlg_combine(v, __shfl_xor_sync(HPMLG_ALL_LANES, v, o), maximum);
    if (warps <= 1) return v;
    __syncthreads(); /* wait, because threads may still read `space` for an earlier call */
    if (lane == 0) space[warp] = v;
    __syncthreads();
    first = warp / warps * warps;
    v     = space[first];
    for (int i = 1; i < warps; i++) v = hpmlg_combine(v, space[first + i], maximum);
    return v;
}

// ---------------------------------------------------------------------------------------------------------------------
// >>gpu-vec8   reading and writing 8 elements at a time
// ---------------------------------------------------------------------------------------------------------------------

/* Describes an array of f32, bf16 or f16 numbers. Kernels read and write f32 values through hpmlg_get and hpmlg_put,
   which convert: all threads take the same branch on the type, which costs nothing next to the memory access. Fast
   kernels move 8 neighbouring elements, a vec8, in one or two accesses of 16 bytes. */
typedef struct hpmlg_array {
    void   *p;
    int64_t type; /* HPML_DTYPE_F32, _BF16 or _F16; as wide as the pointer `p`, so that the struct has no padding */
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

/* Returns the two 16-bit floats in w (type: bf16 or f16) as floats: .x from the low, .y from the high 16 bits. */
HPMLG_DEVICE float2 hpmlg_widen(unsigned w, int type)
{
    unsigned short low = (unsigned short)w, high = (unsigned short)(w >> 16);
    if (type == HPML_DTYPE_BF16) return make_float2(__uint_as_float(w << 16), __uint_as_float(w & 0xffff0000u));
    return make_float2(__half2float(__ushort_as_half(low)), __half2float(__ushort_as_half(high)));
}

/* Returns a 32-bit word of two numbers rounded to `type` (bf16 or f16): `a` in its low 16 bits, `b` in the high 16. */
HPMLG_DEVICE unsigned hpmlg_narrow(float a, float b, int type)
{
    __nv_bfloat162 x = __floats2bfloat162_rn(a, b); /* one instruction converts both floats */
    __half2        y = __floats2half2_rn(a, b);
    unsigned       w;
    if (type == HPML_DTYPE_BF16) memcpy(&w, &x, sizeof w);
    else memcpy(&w, &y, sizeof w);
    return w;
}

/* Returns the float v rounded to `type`, HPML_DTYPE_F32, _BF16 or _F16. */
HPMLG_DEVICE float hpmlg_round_to(float v, int64_t type)
{
    return type == HPML_DTYPE_F32 ? v : hpmlg_widen(hpmlg_narrow(v, v, (int)type), (int)type).x;
}

typedef struct hpmlg_vec8 { float v[8]; } hpmlg_vec8;

/* Read or write (hpmlg_put8), as floats, elements 8 i to 8 i + 7 of the array `a`, which is aligned to 16 bytes. */
HPMLG_DEVICE hpmlg_vec8 hpmlg_get8(hpmlg_array a, int64_t i)
{
    if (a.type == HPML_DTYPE_F32) {
        float4 x = ((const float4 *)a.p)[2 * i], y = ((const float4 *)a.p)[2 * i + 1];
        return hpmlg_vec8{ { x.x, x.y, x.z, x.w, y.x, y.y, y.z, y.w } };
    }
    hpmlg_vec8 e;
    uint4      w = ((const uint4 *)a.p)[i];
    unsigned   u[4] = { w.x, w.y, w.z, w.w };
    for (int j = 0; j < 8; j++) {
        float2 f = hpmlg_widen(u[j / 2], a.type);
        e.v[j] = j % 2 ? f.y : f.x;
    }
    return e;
}

HPMLG_DEVICE void hpmlg_put8(hpmlg_array a, int64_t i, hpmlg_vec8 e)
{
    if (a.type == HPML_DTYPE_F32) {
        ((float4 *)a.p)[2 * i]     = make_float4(e.v[0], e.v[1], e.v[2], e.v[3]);
        ((float4 *)a.p)[2 * i + 1] = make_float4(e.v[4], e.v[5], e.v[6], e.v[7]);
    } else {
        ((uint4 *)a.p)[i] = make_uint4(hpmlg_narrow(e.v[0], e.v[1], a.type), hpmlg_narrow(e.v[2], e.v[3], a.type),
                                       hpmlg_narrow(e.v[4], e.v[5], a.type), hpmlg_narrow(e.v[6], e.v[7], a.type));
    }
}

/* Returns true if elements at to at + 7 of the array `a` can be read or written 16 bytes at a time: all lie in [from,
   to) and their address is a multiple of 16 bytes. Rows of any length may begin anywhere (50,257 columns of bf16); only
   the ends of such a row are accessed element by element. */
HPMLG_DEVICE bool hpmlg_is_one_access(hpmlg_array a, int64_t at, int64_t from, int64_t to)
{
    return at >= from && at + 8 <= to && (((uintptr_t)a.p & 15) | (uintptr_t)(at & 7)) == 0;
}

/* Reads elements at to at + 7 of the array `a`; returns `fill` for those outside [from, to), which are not read. */
HPMLG_DEVICE hpmlg_vec8 hpmlg_get_range(hpmlg_array a, int64_t at, int64_t from, int64_t to, float fill)
{
    hpmlg_vec8 e;
    if (hpmlg_is_one_access(a, at, from, to)) return hpmlg_get8(a, at >> 3);
    for (int j = 0; j < 8; j++) e.v[j] = at + j >= from && at + j < to ? hpmlg_get(a, at + j) : fill;
    return e;
}

/* Writes e to elements at to at + 7 of array `a` or, if `add`, adds e; elements outside [from, to) are not touched. */
HPMLG_DEVICE void hpmlg_put_range(hpmlg_array a, int64_t at, int64_t from, int64_t to, hpmlg_vec8 e, bool add)
{
    if (add) {
        hpmlg_vec8 old = hpmlg_get_range(a, at, from, to, 0);
        for (int j = 0; j < 8; j++) e.v[j] += old.v[j];
    }
    if (hpmlg_is_one_access(a, at, from, to)) hpmlg_put8(a, at >> 3, e);
    else
        for (int j = 0; j < 8; j++)
            if (at + j >= from && at + j < to) hpmlg_put(a, at + j, e.v[j]);
}

/* hpmlg_row_get reads and hpmlg_row_put writes elements c to c + 7 of row `row` of the matrix `a` with `cols` columns.
   For columns past the row's end the read returns `fill`, the write does nothing; add: e is added to the elements. */
HPMLG_DEVICE hpmlg_vec8 hpmlg_row_get(hpmlg_array a, int64_t row, int64_t cols, int64_t c, float fill)
{
    return hpmlg_get_range(a, row * cols + c, row * cols + c, row * cols + cols, fill);
}

HPMLG_DEVICE void hpmlg_row_put(hpmlg_array a, int64_t row, int64_t cols, int64_t c, hpmlg_vec8 e, bool add)
{
    hpmlg_put_range(a, row * cols + c, row * cols + c, row * cols + cols, e, add);
}

/* Returns elements c to c + 7 of a layer's parameter p (cols); all are `fallback` if p is NULL, because the layer has
   no such parameter. */
HPMLG_DEVICE hpmlg_vec8 hpmlg_param_get8(const float *p, int64_t cols, int64_t c, float fallback)
{
    hpmlg_array a = { (void *)p, HPML_DTYPE_F32 };
    hpmlg_vec8  e = { { fallback, fallback, fallback, fallback, fallback, fallback, fallback, fallback } };
    return p ? hpmlg_row_get(a, 0, cols, c, fallback) : e;
}

// ---------------------------------------------------------------------------------------------------------------------
// >>gpu-device   the device: errors, launches, memory
// ---------------------------------------------------------------------------------------------------------------------

/* A message from a kernel to the host. Kernels cannot fail, but data can be wrong: a token or a label out of range, a
   gradient that is NaN. The first kernel that finds such a value writes this struct in host memory; when the host next
   waits for the device, it reads the struct and gives the context an error. */
typedef struct hpmlg_note {
    long long        index;
    int              value;
    int              nonfinite; /* 1: first_nonfinite (of hpmlg_device) names step and parameter; else 0 */
    const hpml_node *node;      /* the op whose token or index number `index` is `value`, out of range; NULL: no op */
} hpmlg_note;

/* hpmlg_epilogue_kind lists the work that cuBLASLt can fuse into a product's kernel, its epilogue. hpmlg_work_counts
   counts launches, for hpml_cuda_text: products, convolutions: [0] by a library, [1] by this header's kernels;
   products_refused, convolutions_refused: those of [1] that the library had refused before; fused: convolutions with
   bias and activation in one launch; reordered: copies of images to NHWC or back; epilogues: [0] fused into cuBLASLt's
   products, [1] refused by cuBLASLt. */
enum hpmlg_epilogue_kind { HPMLG_BIAS, HPMLG_RELU, HPMLG_GELU, HPMLG_GELU_BACK, HPMLG_SUMS, HPMLG_EPILOGUES };
typedef struct hpmlg_work_counts {
    long long products[2], convolutions[2], products_refused, convolutions_refused, fused, reordered;
    long long epilogues[2][HPMLG_EPILOGUES];
} hpmlg_work_counts;

/* The key of dropout's random numbers. A recorded pass replays the same launches in each step although the key changes,
   so kernels read the key from device memory. */
typedef struct hpmlg_random_key {
    unsigned long long step, sample, seed;
} hpmlg_random_key;

#define HPMLG_SLOTS      4
#ifndef HPMLG_SLOT_BYTES
#define HPMLG_SLOT_BYTES ((size_t)4 << 20)
#endif

typedef struct hpmlg_slot { /* a part of the upload ring: pinned host memory, and a device buffer of its size */
    unsigned char *host, *device;
    cudaEvent_t    arrived;  /* event: the last large upload from `host` has arrived in `device` */
    cudaEvent_t    reusable; /* event: the device has read all of `host`; it may be overwritten */
} hpmlg_slot;

#define HPMLG_PASSES  64                   /* number of passes that a device's cache keeps recorded */
#define HPMLG_SCRATCH ((size_t)1 << 20)    /* bytes of hpmlg_device.scratch */
#define HPMLG_RESULT  ((size_t)4096)       /* bytes of hpmlg_device.result; larger downloads bypass this memory */

/* Results of an op, besides its output, that a later op uses. They are saved with a recorded pass, because a replay
   runs no op's host code, and restores the saved notes instead. */
typedef struct hpmlg_op_notes {
    const void      *y, *labels;           /* logits and labels of the last cross-entropy, which counted hits */
    const hpml_node *activation_grad_done; /* the linear layer whose dy the next layer has already multiplied by
                                              act'(z), in the epilogue of the product for its own dx */
} hpmlg_op_notes;

typedef struct hpmlg_pass {
    hpml_pass         key;
    hpmlg_op_notes    op_notes; /* hpmlg_device.op_notes after the pass; a replay restores them */
    hpmlg_work_counts work;     /* numbers of launches in one replay of the pass */
    bool              has_run;  /* true: the pass has run op by op without an error, so its ops' memory is allocated */
    bool              given_up; /* true: recording failed, so the pass always runs op by op */
    cudaGraphExec_t   exec;     /* the CUDA graph of the pass; NULL: not recorded yet */
    uint64_t          used;     /* hpmlg_device.clock at the last use; 0: the entry is free */
} hpmlg_pass;

typedef struct hpmlg_half_copy { /* the copy of one f32 parameter in halves, in the list hpmlg_device.half_copies */
    const float *w;              /* (n): the parameter, f32, on the device */
    void        *half;           /* (n): the parameter's copy in halves, on the device */
    int64_t      n;
    int64_t      channels, taps; /* channels 0: the order of w; else w is a filter (OC, channels, taps) and `half` (OC,
                                    taps, channels), as cuDNN reads it with NHWC images */
    bool         fresh;          /* true: `half` has the values of w; false: w has changed since then */
    struct hpmlg_half_copy *next;
} hpmlg_half_copy;

typedef struct hpmlg_allocation { /* device memory, an entry of hpmlg_device.allocations; hpmlg_close frees all */
    void                    *p;
    struct hpmlg_allocation *next;
} hpmlg_allocation;

#define HPMLG_SPANS 1024

typedef struct hpmlg_span { /* a timed span of work, between two events on a stream */
    cudaEvent_t from, to;
    const char *name;
    double     *seconds;    /* the counter to which the span's seconds are added; NULL: the trace only shows the span */
    int         lane;       /* row of the trace that shows the span: HPML_LANE_GPU or another */
} hpmlg_span;

typedef struct hpmlg_device {
    hpml_ctx         *ctx;
    hpmlg_allocation *allocations;
    hpml_cuda_desc    d;
    hpml_dtype        act_dtype;      /* type in which activations are stored */
    bool              nhwc;           /* true: images are NHWC in memory where convolutions read them (>>gpu-nhwc) */
    int               sms;            /* number of multiprocessors */
    cudaStream_t      stream, copies; /* streams: `stream` runs ops, `copies` large uploads */
    uint64_t          clock;          /* counts uses of passes and plans in caches, to find the least recently used */
    /* state of uploads (slots: a ring of pinned buffers), downloads and messages from kernels to the host */
    hpmlg_slot        slots[HPMLG_SLOTS];
    int               slot;                      /* index in `slots` of the slot that is being filled */
    size_t            slot_used;                 /* bytes filled in slots[slot] */
    unsigned char    *pinned;                    /* host memory that the device can access: slots, result, note */
    void             *result;                    /* HPMLG_RESULT bytes of pinned memory for small downloads */
    hpmlg_note       *note;
    int              *note_taken;                /* on the device: 1 once a kernel has written *note */
    unsigned long long *first_nonfinite;         /* on the device: a number that hpmlg_nonfinite_pack made; 0: none */
    hpmlg_random_key *random_key;                /* on the device: the key of dropout's random numbers */
    hpmlg_random_key  random_key_host;           /* the key that was last uploaded to *random_key */
    bool              random_key_known;          /* true: random_key_host equals *random_key */
    /* state of passes, forward or backward runs of a model's ops, which are recorded as CUDA graphs (>>gpu-pass) */
    hpmlg_pass        passes[HPMLG_PASSES];
    hpmlg_pass       *running;                   /* the pass that is now run op by op; NULL: none */
    hpmlg_pass       *recording;                 /* the pass that is now captured; NULL: none */
    bool              in_whole_forward;          /* true: a whole forward pass runs: norms may fuse residual sums */
    hpmlg_op_notes    op_notes, op_notes_before; /* op notes now; at the start of the current capture */
    hpmlg_work_counts work, work_before;         /* counts of launches now; at the start of the capture */
    long long         pass_counts[4];            /* numbers of passes, indexed by enum hpmlg_pass_kind */
    long long         waits;                     /* times that the host has waited for the device */
    hpml_node        *planned;                   /* the node that hpmlg_plan planned last */
    /* the times of ops (>>gpu-sync); a span is an op's time between two CUDA events */
    hpmlg_span        spans[HPMLG_SPANS];
    int               span_count;
    cudaEvent_t       span_clock;                /* an event that occurred at host time span_clock_time */
    double            span_clock_time;
    /* memory on the device that ops share; half_copies: a list of parameters' copies in bf16 or f16 */
    hpmlg_half_copy  *half_copies;
    unsigned long long *counts;                  /* on the device: hits and valid labels of cross-entropy */
    void             *scratch;                   /* HPMLG_SCRATCH bytes of the device for partial sums */
    void             *workspace;                 /* device memory for libraries and for split products */
    size_t            workspace_bytes;           /* bytes of `workspace`: at least d.workspace */
    size_t            workspace_limit;           /* bytes: the largest size that `workspace` may grow to */
    size_t            workspace_wanted;          /* bytes: the largest request of a library's algorithm in use */
    void             *updates;                   /* on the device: an optimizer step's table of parameters */
    size_t            updates_bytes;
    void             *blas, *dnn;                /* cuBLASLt, cuDNN with their plans by shape; NULL: not in use */
} hpmlg_device;

/* Sets the context's error to one of CUDA or its libraries and returns its status, HPML_ERR_MEMORY if `memory`. what:
   the call's purpose; error, more: the error's text and name; cure: a remedy for the user, "" if there is none. */
HPMLG_FN hpml_status hpmlg_fail(hpmlg_device *d, bool memory, const char *what, const char *error, const char *more,
                                const char *cure)
{
    return hpml_ctx_fail(d->ctx, memory ? HPML_ERR_MEMORY : HPML_ERR_CUDA, "cuda device %d: %s: %s (%s)%s",
                         (int)d->d.device, what, error, more, cure);
}

/* Gives the context an error if the CUDA call that returned `e` failed; returns the status. what: names the call. */
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

/* If s is 0, because no earlier call has failed, makes the library call `...` and stores its status in s. */
#define HPMLG_TRY(s, ...)                                                                                              \
    if ((int)(s) == 0) s = __VA_ARGS__

/* Returns true until the device's context has an error. After an error HPMLG_RUN launches nothing, so functions of ops
   launch one kernel after the other without checking for errors and return nothing. */
HPMLG_FN bool hpmlg_ok(const hpmlg_device *d) { return hpml_ctx_status(d->ctx) == HPML_OK; }

/* Launches a kernel with its arguments on the stream of device d, unless the context has an error; `shared`: bytes of
   dynamic shared memory. A failed launch gives the context an error. */
#define HPMLG_RUN(d, kernel, grid, block, shared, ...)                                                                 \
    (!hpmlg_ok(d) ? (void)0 : (HPMLG_LAUNCH(kernel, grid, block, shared, (d)->stream, __VA_ARGS__),                    \
                               (void)hpmlg_check(d, cudaGetLastError(), #kernel)))

/* Launches a kernel whose threads loop over n elements (or rows): blocks of 256 threads, one block for every `each`
   elements, but no more than 16 blocks for each multiprocessor, which fill the device. */
#define HPMLG_RUN_ITEMS(d, kernel, n, each, ...)                                                                       \
    HPMLG_RUN(d, kernel, hpmlg_grid_blocks(d, n, each), 256, 0, __VA_ARGS__)

/* Launches kernel<a> if `test` is true, else kernel<b>; the other arguments are HPMLG_RUN's. */
#define HPMLG_RUN_BOOL(d, test, kernel, a, b, ...)                                                                     \
    ((test) ? HPMLG_RUN(d, (kernel<a>), __VA_ARGS__) : HPMLG_RUN(d, (kernel<b>), __VA_ARGS__))

/* The parameters of every function hpmlg_op_NAME, which runs one op, node n: forward or, if `back`, backward. */
#define HPMLG_OP_ARGUMENTS                                                                                             \
    [[maybe_unused]] hpmlg_device *d, [[maybe_unused]] const hpml_run *run, hpml_node *n, bool back

/* Makes `device` (a hpmlg_device) the calling thread's current CUDA device, and clears an error that other code has
   left on the thread, because later launches check for errors. Returns `device`. */
HPMLG_FN hpmlg_device *hpmlg_make_current(void *device)
{
    hpmlg_device *d = (hpmlg_device *)device;
    cudaSetDevice(d->d.device);
    cudaGetLastError();
    return d;
}

HPMLG_FN hpmlg_device *hpmlg_device_of(const hpml_ctx *ctx) { return hpmlg_make_current(hpml_ctx_device(ctx)); }

HPMLG_FN hpmlg_array hpmlg_array_of(void *p, hpml_dtype type)
{
    hpmlg_array a = { p, (int)type };
    return a;
}

HPMLG_FN hpmlg_array hpmlg_array_null(void) { return hpmlg_array_of(NULL, HPML_DTYPE_F32); }
HPMLG_FN hpmlg_array hpmlg_value(const hpml_tensor *t) { return hpmlg_array_of(t->raw, t->dtype); }
HPMLG_FN hpmlg_array hpmlg_grad(const hpml_tensor *t) { return hpmlg_array_of(t->raw_grad, t->dtype); }

HPMLG_FN hpmlg_array hpmlg_value_or_grad(const hpml_tensor *t, bool grad)
{
    return grad ? hpmlg_grad(t) : hpmlg_value(t);
}

/* Return the array that an op of one operand reads (hpmlg_op_input: forward x, backward the gradient dy) or writes
   (hpmlg_op_output: forward y, backward dx). */
HPMLG_FN hpmlg_array hpmlg_op_input(const hpml_node *n, bool back)
{
    return hpmlg_value_or_grad(back ? n->out : n->src[0], back);
}

HPMLG_FN hpmlg_array hpmlg_op_output(const hpml_node *n, bool back)
{
    return hpmlg_value_or_grad(back ? n->src[0] : n->out, back);
}

/* Returns true if the op adds its result to its output array: a gradient to which another op has already added. */
HPMLG_FN bool hpmlg_op_adds(const hpml_node *n, bool back) { return back && n->accumulate[0]; }

HPMLG_FN int64_t hpmlg_last_dim(const hpml_tensor *t) { return t->ndim > 0 ? t->shape[t->ndim - 1] : 1; }

/* Returns true if t, images (B, C, H, W), is the same in memory in the orders NCHW and NHWC, because it has one channel
   or one pixel. Fewer dimensions count as if dimensions of size 1 came before. */
HPMLG_FN bool hpmlg_has_any_order(const hpml_tensor *t)
{
    int n = t->ndim;
    return n < 3 || (n <= 4 && (t->shape[n - 3] == 1 || t->shape[n - 2] * t->shape[n - 1] == 1));
}

/* Returns true if the images t, of shape (B, C, H, W), are in memory in the order NHWC (>>gpu-nhwc). */
HPMLG_FN bool hpmlg_is_nhwc(const hpml_tensor *t)
{
    return t->ndim == 4 && t->stride[1] == 1 && !hpmlg_has_any_order(t);
}
HPMLG_FN bool hpmlg_fits_nhwc(const hpml_tensor *t) { return hpmlg_is_nhwc(t) || hpmlg_has_any_order(t); }

/* Returns the dimension of t at place i of the order in memory: place ndim - 1 is the innermost one. */
HPMLG_FN int hpmlg_dim_in_memory(const hpml_tensor *t, int i) { return hpmlg_is_nhwc(t) && i > 0 ? i % 3 + 1 : i; }

/* Returns a number of blocks for n elements or rows, `each` to a block, for a kernel whose threads loop: at most 16
   blocks for each multiprocessor, which fill the device. */
HPMLG_FN unsigned hpmlg_grid_blocks(const hpmlg_device *d, int64_t n, int64_t each)
{
    int64_t blocks = (n + each - 1) / each, limit = (int64_t)d->sms * 16;
    if (blocks > limit) blocks = limit;
    return (unsigned)(blocks < 1 ? 1 : blocks);
}

/* Implements the backend's `alloc`: returns device memory, set to 0; NULL: out of memory, which the caller reports. */
HPMLG_FN void *hpmlg_alloc(void *device, size_t bytes)
{
    hpmlg_device     *d = hpmlg_make_current(device);
    hpmlg_allocation *b = (hpmlg_allocation *)hpml_ctx_alloc(d->ctx, sizeof *b, NULL);
    if (!b) return NULL;
    cudaError_t e = cudaMalloc(&b->p, bytes);
    if (e != cudaSuccess) {
        cudaGetLastError();
        if (e != cudaErrorMemoryAllocation) hpmlg_check(d, e, "cudaMalloc");
        hpml_ctx_release(d->ctx, b);
        return NULL;
    }
    b->next        = d->allocations;
    d->allocations = b;
    cudaMemsetAsync(b->p, 0, bytes, d->stream);
    return b->p;
}

/* Allocates `bytes` bytes of device memory, set to 0, for the backend itself. Returns NULL, and sets an error that
   names `what`, if the allocation fails. */
HPMLG_FN void *hpmlg_alloc_own(hpmlg_device *d, size_t bytes, const char *what)
{
    void *p = hpmlg_alloc(d, bytes);
    if (!p) hpmlg_check(d, cudaErrorMemoryAllocation, what);
    return p;
}

/* Implements the backend's `free` of memory from hpmlg_alloc; waits for the device, which may still use the memory. */
HPMLG_FN void hpmlg_free(void *device, void *p, size_t)
{
    hpmlg_device      *d = hpmlg_make_current(device);
    hpmlg_allocation **at, *b;
    for (at = &d->allocations; *at && (*at)->p != p; at = &(*at)->next) {}
    b = *at;
    if (!b) return;
    *at = b->next;
    cudaStreamSynchronize(d->stream);
    d->waits++;
    cudaFree(b->p);
    hpml_ctx_release(d->ctx, b);
}

/* Returns the entry of the cache all[N] that has this key; else the least recently used entry, destroyed, cleared and
   given this key. The entries' type P has the members `key` (of type K) and `used` and a function hpmlg_destroy. */
template <class P, class K, int N> HPMLG_FN P *hpmlg_cache_find(hpmlg_device *d, P (&all)[N], const K &key)
{
    P *oldest = &all[0];
    for (P &p : all) {
        if (p.used && memcmp(&p.key, &key, sizeof key) == 0) {
            p.used = ++d->clock;
            return &p;
        }
        if (p.used < oldest->used) oldest = &p;
    }
    hpmlg_destroy(oldest);
    memset((void *)oldest, 0, sizeof *oldest);
    oldest->key  = key;
    oldest->used = ++d->clock;
    return oldest;
}

HPMLG_FN hpml_dtype hpmlg_act_dtype(void *device) { return ((hpmlg_device *)device)->act_dtype; }

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
    out->major = p.major;
    out->minor = p.minor;
    out->multiprocessors = p.multiProcessorCount;
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
// >>gpu-copy   copies to and from the host through pinned memory
// ---------------------------------------------------------------------------------------------------------------------

/* Uploads do not wait for the device: the host copies the bytes into pinned memory and returns, so that the caller may
   reuse its array. A large upload is copied to a device buffer on a second stream (hpmlg_device.copies), so that the
   copy overlaps with the previous step, and from the buffer to its destination on the stream of the ops; a small upload
   is copied to its destination on the stream of the ops. The pinned memory is a ring of HPMLG_SLOTS slots; the host
   waits only when the device has still to read from each of them. */

#define HPMLG_SMALL ((size_t)64 << 10) /* bytes: larger uploads use a second stream */

HPMLG_FN hpml_status hpmlg_upload(hpmlg_device *d, void *dst, const void *host, size_t bytes)
{
    cudaError_t e = cudaSuccess;
    if (d->slot_used + bytes > HPMLG_SLOT_BYTES) {
        e            = cudaEventRecord(d->slots[d->slot].reusable, d->stream);
        d->slot      = (d->slot + 1) % HPMLG_SLOTS;
        d->slot_used = 0;
        HPMLG_TRY(e, cudaEventSynchronize(d->slots[d->slot].reusable));
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
        HPMLG_TRY(e, cudaEventRecord(s->arrived, d->copies));
        HPMLG_TRY(e, cudaStreamWaitEvent(d->stream, s->arrived, 0));
        HPMLG_TRY(e, cudaMemcpyAsync(dst, s->device + at, bytes, cudaMemcpyDeviceToDevice, d->stream));
    }
    return hpmlg_check(d, e, "upload");
}

/* Marks the bf16 or f16 copies of parameters that overlap `bytes` bytes at dst as stale: these bytes will change. */
HPMLG_FN void hpmlg_half_copies_expire(hpmlg_device *d, const void *dst, size_t bytes)
{
    const char *from = (const char *)dst, *to = from + bytes;
    for (hpmlg_half_copy *w = d->half_copies; w; w = w->next)
        if ((const char *)w->w < to && from < (const char *)(w->w + w->n)) w->fresh = false;
}

/* Implements the backend's `write`: uploads bytes to device memory dst, without waiting for the device. */
HPMLG_FN hpml_status hpmlg_write(void *device, void *dst, const void *host, size_t bytes)
{
    hpmlg_device *d      = hpmlg_make_current(device);
    hpml_status   status = HPML_OK;
    hpmlg_half_copies_expire(d, dst, bytes);
    for (size_t i = 0; i < bytes && status == HPML_OK; i += HPMLG_SLOT_BYTES) {
        size_t n = bytes - i < HPMLG_SLOT_BYTES ? bytes - i : HPMLG_SLOT_BYTES;
        status   = hpmlg_upload(d, (char *)dst + i, (const char *)host + i, n);
    }
    return status;
}

/* Implements the backend's `zero`: sets `bytes` bytes of device memory to 0, without waiting for the device. */
HPMLG_FN hpml_status hpmlg_zero(void *device, void *dst, size_t bytes)
{
    hpmlg_device *d = hpmlg_make_current(device);
    hpmlg_half_copies_expire(d, dst, bytes);
    return hpmlg_check(d, cudaMemsetAsync(dst, 0, bytes, d->stream), "zeroing");
}

// ---------------------------------------------------------------------------------------------------------------------
// >>gpu-sync   waiting: times of ops, errors that kernels found
// ---------------------------------------------------------------------------------------------------------------------

/* Ops are timed without waiting: an event is recorded on the stream before and after each op, and the events' times are
   read when the host has waited for the stream for another reason. CUDA events have their own clock, so the host
   compares this clock with its own each time: it records an event, waits for the event, and assumes that it occurred in
   the middle of the host's times before and after. The error is at most half of the time between these; the comparison
   is repeated if they are more than 100 us apart, because the host was interrupted. */

/* Adds each timed span, the time between two CUDA events, to the trace, and to its counter of seconds, if its second
   event has occurred; keeps the other spans for later. */
HPMLG_FN void hpmlg_spans_emit(hpmlg_device *d)
{
    int   unfinished = 0;
    float from, to;
    for (int i = 0; i < d->span_count; i++) {
        hpmlg_span  l = d->spans[i];
        cudaError_t e = cudaEventElapsedTime(&from, d->span_clock, l.from);
        if (e == cudaSuccess) e = cudaEventElapsedTime(&to, d->span_clock, l.to);
        if (e == cudaSuccess) {
            hpml_trace_span(d->ctx, l.lane, l.name, d->span_clock_time + 1e-3 * from, d->span_clock_time + 1e-3 * to);
            if (l.seconds) *l.seconds += 1e-3 * (to - from);
        } else { /* a span on another stream, whose work still runs: kept */
            d->spans[i] = d->spans[unfinished];
            d->spans[unfinished++] = l;
        }
    }
    cudaGetLastError();
    d->span_count = unfinished;
    if (unfinished) return;
    if (!d->span_clock) cudaEventCreate(&d->span_clock);
    double before = 0, after = 1; /* host times in seconds; first 1 apart, so that the loop runs */
    for (int tries = 0; tries < 10 && after - before > 100e-6; tries++) {
        before = hpml_now();
        cudaEventRecord(d->span_clock, d->stream);
        cudaEventSynchronize(d->span_clock);
        d->waits++;
        after = hpml_now();
    }
    d->span_clock_time = (before + after) / 2;
}

/* Begins a timed span of work on the stream if `name` is NULL; else ends the span that was begun last, and gives it its
   name, the counter to which its seconds are added (or NULL), and its lane, the line of the trace that shows it. */
HPMLG_FN void hpmlg_span_mark(hpmlg_device *d, cudaStream_t stream, const char *name, double *seconds, int lane)
{
    hpmlg_span *l    = &d->spans[d->span_count];
    bool        full = d->span_count == HPMLG_SPANS - 1; /* true: only the entry for spans that are not kept is left */
    if (!name) {
        if (full) cudaStreamSynchronize(d->stream);
        if (full || !d->span_clock) {
            hpmlg_spans_emit(d);
            l = &d->spans[d->span_count];
        }
        if (!l->from) {
            cudaEventCreate(&l->from);
            cudaEventCreate(&l->to);
        }
        cudaEventRecord(l->from, stream);
    } else if (l->from) {
        cudaEventRecord(l->to, stream);
        l->name    = name;
        l->seconds = seconds;
        l->lane    = lane;
        if (!full) d->span_count++;
    }
}

/* Implements the backend's function that times ops: called before an op with name NULL, after the op with its name;
   `seconds` is the counter to which its time is added. */
HPMLG_FN void hpmlg_time_op(void *device, const char *name, double *seconds)
{
    hpmlg_device *d = hpmlg_make_current(device);
    hpmlg_span_mark(d, d->stream, name, seconds, HPML_LANE_GPU);
}

/* Packs a finding, a NaN or infinity in parameter number `param` at `step`, into a number such that the largest number
   is the finding to report: the earliest step; within a step the parameter with the highest number, whose gradient
   backward computed first; for one parameter a finding in its gradient (`gradient`) rather than in its update. */
HPMLG_DEVICE unsigned long long hpmlg_nonfinite_pack(uint64_t step, int param, bool gradient)
{
    return (unsigned long long)(0xffffffffu - (unsigned)step) << 32 | (unsigned)(2 * (param + 1) + (gradient ? 1 : 0));
}

/* Downloads the number into which hpmlg_nonfinite_pack has packed where a NaN or infinity was found, clears it on the
   device, and gives the context the error that names the step and the parameter. Returns the error's status. */
HPMLG_FN hpml_status hpmlg_nonfinite_error(hpmlg_device *d)
{
    unsigned long long worst = 0;
    cudaError_t        e = cudaMemcpyAsync(&worst, d->first_nonfinite, sizeof worst, cudaMemcpyDeviceToHost, d->stream);
    HPMLG_TRY(e, cudaMemsetAsync(d->first_nonfinite, 0, sizeof *d->first_nonfinite, d->stream));
    HPMLG_TRY(e, cudaStreamSynchronize(d->stream));
    if (e != cudaSuccess) return hpmlg_check(d, e, "download of non-finite findings");
    const hpml_tensor *p = hpml_param_at(d->ctx, (int)(worst & 0xffffffffu) / 2 - 1);
    return hpml_ctx_fail(d->ctx, HPML_ERR_NONFINITE, "step %llu: the first NaN or infinity is in %s \"%s\"; look at "
                         "the data, lower the learning rate or set clip_norm. The rest of this step is in the "
                         "parameters: go on from a checkpoint", 0xffffffffu - (worst >> 32),
                         worst & 1 ? "the gradient of" : "the step of parameter", p ? p->name : "?");
}

/* Implements the backend's `sync`: waits until the device has done all its work. If a kernel has written an error to
   hpmlg_device.note, in host memory, it becomes the context's error. Returns the status. */
HPMLG_FN hpml_status hpmlg_sync(void *device)
{
    hpmlg_device *d = hpmlg_make_current(device);
    hpmlg_note    n;
    hpml_status status = hpmlg_check(d, cudaStreamSynchronize(d->stream), "waiting for the device");
    d->waits++;
    if (status == HPML_OK && d->span_count > 0) hpmlg_spans_emit(d);
    if (status != HPML_OK || !(d->note->node || d->note->nonfinite)) return status;
    n = *d->note;
    memset(d->note, 0, sizeof *d->note);
    if (n.nonfinite) status = hpmlg_nonfinite_error(d);
    if (!n.node) return status;
    cudaMemsetAsync(d->note_taken, 0, sizeof *d->note_taken, d->stream);
    if (n.node->op == HPML_OP_EMBEDDING)
        return hpml_ctx_fail(d->ctx, HPML_ERR_LABEL, "embedding \"%s\": token %lld is %d, expected 0 to %lld",
                             n.node->out->name, n.index, n.value, (long long)n.node->src[1]->shape[0] - 1);
    if (n.node->op == HPML_OP_ATTENTION)
        return hpml_ctx_fail(d->ctx, HPML_ERR_LABEL, "attention \"%s\": position of sample %lld is %d, expected 0 to "
                             "%lld: the cache has %lld positions, a run adds %lld", n.node->out->name, n.index, n.value,
                             (long long)(n.node->src[3]->shape[1] - n.node->out->shape[1]),
                             (long long)n.node->src[3]->shape[1], (long long)n.node->out->shape[1]);
    bool index = n.node->op == HPML_OP_TAKE && n.node->attr.take.rule == HPML_TAKE_INDEX;
    if (n.node->op == HPML_OP_TAKE)
        return hpml_ctx_fail(d->ctx, HPML_ERR_LABEL, "take \"%s\": %s %lld is %d, expected 0 to %lld",
                             n.node->out->name, index ? "index" : "length", n.index, n.value,
                             (long long)n.node->src[0]->shape[n.node->attr.take.dim] - index);
    return hpml_ctx_fail(d->ctx, HPML_ERR_LABEL, "cross_entropy: label %lld of the batch is %d, expected 0 to %lld (or "
                         "%d to be ignored)", n.index, n.value,
                         (long long)n.node->src[0]->shape[n.node->src[0]->ndim - 1] - 1,
                         (int)n.node->attr.cross_entropy.ignore);
}

/* Implements the backend's `read`: downloads bytes from device memory src, after waiting for the device. */
HPMLG_FN hpml_status hpmlg_read(void *device, void *host, const void *src, size_t bytes)
{
    hpmlg_device *d     = hpmlg_make_current(device);
    bool          small = bytes <= HPMLG_RESULT;
    cudaError_t e = cudaMemcpyAsync(small ? (void *)d->result : host, src, bytes, cudaMemcpyDeviceToHost, d->stream);
    hpml_status status = hpmlg_check(d, e, "download");
    if (status == HPML_OK) status = hpmlg_sync(d);
    if (status == HPML_OK && small) memcpy(host, d->result, bytes);
    return status;
}

/* Reports to the host, from a kernel, in *note, which is host memory, that element `index` of the tokens or labels that
   `node` reads is `value`, out of range. Only the first report counts: *taken, on the device, is then set to 1. */
HPMLG_DEVICE void hpmlg_report_index(hpmlg_note *note, int *taken, long long index, int value, const hpml_node *node)
{
    if (atomicCAS(taken, 0, 1) != 0) return;
    note->index = index;
    note->value = value;
    __threadfence_system();
    note->node = node;
}

// ---------------------------------------------------------------------------------------------------------------------
// >>gpu-pass   whole passes, captured once and replayed
// ---------------------------------------------------------------------------------------------------------------------

/* A pass, the forward or backward run of a model's ops, launches hundreds of small kernels, the same kernels on the
   same memory in each step. The first run goes op by op, because libraries allocate their memory in it. In the second
   run the launches are captured as a CUDA graph, and in later runs the pass is one launch of this graph. The number of
   the step, which keys dropout, changes from step to step, so kernels read the key from memory. While a pass is
   captured its ops do not run. Therefore, if capturing fails for any reason, the pass still runs op by op, now and
   later, and an error that an op caused occurs again. */

/* Uploads the key of the random numbers of this run's step, if it differs from the key on the device. Does nothing
   while a pass is captured as a CUDA graph, because hpmlg_begin has uploaded the key already. */
HPMLG_FN void hpmlg_random_key_set(hpmlg_device *d, const hpml_run *run)
{
    hpmlg_random_key key;
    memset(&key, 0, sizeof key);
    key.step   = run->step;
    key.sample = run->sample;
    key.seed   = hpml_ctx_seed(run->ctx);
    if (d->recording || (d->random_key_known && memcmp(&key, &d->random_key_host, sizeof key) == 0)) return;
    d->random_key_host  = key;
    d->random_key_known = hpmlg_upload(d, d->random_key, &key, sizeof key) == HPML_OK;
}

HPMLG_FN void hpmlg_destroy(hpmlg_pass *p)
{
    if (p->exec) cudaGraphExecDestroy(p->exec);
    p->exec = NULL;
}

HPMLG_FN void hpmlg_half_copy_refresh(hpmlg_device *d, hpmlg_half_copy *w);

enum hpmlg_pass_kind { HPMLG_OP_BY_OP, HPMLG_RECORDED, HPMLG_REPLAYED, HPMLG_GIVEN_UP };

/* Adds to each count of launches in *to the count of the same name in *from minus that in *less (NULL: minus 0). */
HPMLG_FN void hpmlg_work_add(hpmlg_work_counts *to, const hpmlg_work_counts *from, const hpmlg_work_counts *less)
{
    long long       *t = (long long *)(void *)to;
    const long long *f = (const long long *)(const void *)from, *l = (const long long *)(const void *)less;
    for (size_t i = 0; i < sizeof *to / sizeof *t; i++) t[i] += f[i] - (l ? l[i] : 0);
}

HPMLG_FN hpml_status hpmlg_replay(hpmlg_device *d, hpmlg_pass *p)
{
    d->op_notes         = p->op_notes;
    d->in_whole_forward = false;
    d->pass_counts[HPMLG_REPLAYED]++;
    hpmlg_work_add(&d->work, &p->work, NULL);
    return hpmlg_check(d, cudaGraphLaunch(p->exec, d->stream), "launching a recorded pass");
}

/* Implements the backend's `begin`, called before the ops of the forward or backward pass `key`: if the pass is
   recorded as a CUDA graph, launches the graph and sets *done to true, so that the caller must not run the ops; else
   *done is false, and the ops that the caller runs may be recorded. */
HPMLG_FN hpml_status hpmlg_begin(void *, const hpml_run *run, const hpml_pass *key, bool *done)
{
    hpmlg_device *d = hpmlg_device_of(run->ctx);
    hpmlg_random_key_set(d, run);
    for (hpmlg_half_copy *w = d->half_copies; w; w = w->next) hpmlg_half_copy_refresh(d, w);
    d->in_whole_forward = !key->backward;
    if (!hpmlg_ok(d)) return hpml_ctx_status(d->ctx);
    hpmlg_pass *p = d->d.no_record ? NULL : hpmlg_cache_find(d, d->passes, *key);
    *done = p && p->exec;
    if (*done) return hpmlg_replay(d, p);
    if (p && p->has_run && !p->given_up) {
        d->work_before     = d->work;
        d->op_notes_before = d->op_notes;
        p->given_up = cudaStreamBeginCapture(d->stream, cudaStreamCaptureModeThreadLocal) != cudaSuccess;
        cudaGetLastError();
        d->pass_counts[HPMLG_GIVEN_UP] += p->given_up;
        if (!p->given_up) {
            d->recording = p;
            return HPML_OK;
        }
    }
    d->running = p;
    d->pass_counts[HPMLG_OP_BY_OP]++;
    return HPML_OK;
}

/* Gives up recording the pass p as a CUDA graph, after an error. Its ops were only captured and have not run: restores
   the counts of launches (d->work) and the op notes (d->op_notes) from before the recording, and marks p to
   run op by op from now on. Returns HPML_OK. */
HPMLG_FN hpml_status hpmlg_record_give_up(hpmlg_device *d, hpmlg_pass *p)
{
    cudaGetLastError();
    hpml_ctx_clear_error(d->ctx);
    hpmlg_destroy(p);
    p->given_up = true;
    d->work     = d->work_before;
    d->op_notes = d->op_notes_before;
    d->pass_counts[HPMLG_GIVEN_UP]++;
    for (hpmlg_half_copy *w = d->half_copies; w; w = w->next) w->fresh = false;
    return HPML_OK;
}

/* Implements the backend's `end`, called after the ops of a pass, whose status is `status`. If they were recorded as a
   CUDA graph, launches the graph; if recording has failed, sets *again to true: the caller must run the ops again. */
HPMLG_FN hpml_status hpmlg_end(void *, const hpml_run *run, hpml_status status, bool *again)
{
    hpmlg_device *d = hpmlg_device_of(run->ctx);
    hpmlg_pass   *p = d->recording;
    cudaGraph_t   graph = NULL;
    d->in_whole_forward = false;
    if (d->running) d->running->has_run = status == HPML_OK;
    d->running = NULL;
    if (!p) return status;
    d->recording  = NULL;
    p->op_notes   = d->op_notes;
    cudaError_t e = cudaStreamEndCapture(d->stream, &graph);
    if (status == HPML_OK && e == cudaSuccess) e = cudaGraphInstantiate(&p->exec, graph, 0);
    if (graph) cudaGraphDestroy(graph);
    if (status == HPML_OK && e == cudaSuccess) e = cudaGraphLaunch(p->exec, d->stream);
    *again = status != HPML_OK || e != cudaSuccess;
    if (*again) return hpmlg_record_give_up(d, p);
    memset(&p->work, 0, sizeof p->work);
    hpmlg_work_add(&p->work, &d->work, &d->work_before);
    d->pass_counts[HPMLG_RECORDED]++;
    return HPML_OK;
}

// =====================================================================================================================
// PART III   OPS: everything but products, sequences and losses
// =====================================================================================================================

// ---------------------------------------------------------------------------------------------------------------------
// >>gpu-elementwise   add, sub, mul, div with broadcasting; scale; activations
// ---------------------------------------------------------------------------------------------------------------------

HPMLG_DEVICE float hpmlg_act_sigmoid(float x) { return __fdividef(1, 1 + __expf(-x)); }
HPMLG_DEVICE float hpmlg_act_gate(float x)
{
    return hpmlg_act_sigmoid(1.5957691216057308f * (x + 0.044715f * x * x * x));
}

/* Returns the derivative of x s(u(x)), where s is the sigmoid's value at u(x), and du = u'(x). */
HPMLG_DEVICE float hpmlg_act_gated_derivative(float x, float s, float du) { return s + x * s * (1 - s) * du; }

/* Lists the activations as X(name, true if dy / dx is computed from x, false if from y, formulas of y and dy / dx). */
#define HPMLG_ACTS(X)                                                                                                  \
    X(RELU, false, x > 0 || x != x ? x : 0, y > 0 ? 1 : 0)                                                             \
    X(LEAKY_RELU, false, x > 0 ? x : slope * x, y > 0 ? 1 : slope)                                                     \
    X(GELU, true, x * hpmlg_act_gate(x),                                                                               \
      hpmlg_act_gated_derivative(x, hpmlg_act_gate(x), 1.5957691216057308f * (1 + 3 * 0.044715f * x * x)))             \
    X(GELU_ERF, true, 0.5f * x * (1 + erff(x * 0.70710678118654752f)),                                                 \
      0.5f * (1 + erff(x * 0.70710678118654752f)) + x * 0.39894228040143268f * __expf(-0.5f * x * x))                  \
    X(SILU, true, x * hpmlg_act_sigmoid(x), hpmlg_act_gated_derivative(x, hpmlg_act_sigmoid(x), 1))                    \
    X(SIGMOID, false, hpmlg_act_sigmoid(x), y * (1 - y))                                                               \
    X(TANH, false, tanhf(x), 1 - y * y)                                                                                \
    X(EXP, false, expf(x), y)                                                                                          \
    X(LOG, true, logf(x), 1 / x)                                                                                       \
    X(SQRT, false, sqrtf(x), 0.5f / y)                                                                                 \
    X(SQUARE, true, x * x, 2 * x)                                                                                      \
    X(NEG, false, -x, -1)                                                                                              \
    X(ABS, true, fabsf(x), x > 0 ? 1 : x < 0 ? -1 : 0)

/* Returns act(x) for the activation HPML_ACT_... number `act`; act 0: x. slope: LEAKY_RELU's factor of negative x. */
HPMLG_DEVICE float hpmlg_act(int act, float slope, float x)
{
#define HPMLG_X(name, needs_x, value, derivative) if (act == HPML_ACT_##name) return value;
    HPMLG_ACTS(HPMLG_X)
#undef HPMLG_X
    return x;
}

/* Returns the derivative of activation `act`. v: its input x if hpmlg_act_needs_x(act), else its output y. */
HPMLG_DEVICE float hpmlg_act_derivative(int act, float slope, float v)
{
    const float x = v, y = v;
#define HPMLG_X(name, needs_x, value, derivative) if (act == HPML_ACT_##name) return derivative;
    HPMLG_ACTS(HPMLG_X)
#undef HPMLG_X
    return 1;
}

/* Call hpmlg_act and hpmlg_act_derivative, but are not inlined, because inlined code takes many registers. */
static __device__ __attribute__((noinline)) float hpmlg_act_called(int act, float slope, float x)
{
    return hpmlg_act(act, slope, x);
}

static __device__ __attribute__((noinline)) float hpmlg_derivative_called(int act, float slope, float v)
{
    return hpmlg_act_derivative(act, slope, v);
}

/* Returns true if the derivative of the activation is computed from its input x, false if from its output y. */
HPMLG_FN bool hpmlg_act_needs_x(hpml_act act)
{
#define HPMLG_X(name, needs_x, value, derivative) if (act == HPML_ACT_##name) return needs_x;
    HPMLG_ACTS(HPMLG_X)
#undef HPMLG_X
    return false;
}

/* Computes y (+)= act(x) or, if dy.p is not NULL, y (+)= dy act'(x), where x is the activation's output if act' is
   computed from it (hpmlg_act_needs_x is false). n: elements; slope: LEAKY_RELU's; add: adds to y. y may be x or dy. */
static __global__ void hpmlg_k_act(hpmlg_array y, hpmlg_array x, hpmlg_array dy, int act, float slope, int64_t n,
                                   bool add)
{
    HPMLG_FOR_EACH_VEC8(at, n) {
        hpmlg_vec8 e = hpmlg_get_range(x, at, 0, n, 1);
        if (dy.p) {
            hpmlg_vec8 g = hpmlg_get_range(dy, at, 0, n, 0);
            for (int j = 0; j < 8; j++) e.v[j] = g.v[j] * hpmlg_act_derivative(act, slope, e.v[j]);
        } else {
            for (int j = 0; j < 8; j++) e.v[j] = hpmlg_act(act, slope, e.v[j]);
        }
        hpmlg_put_range(y, at, 0, n, e, add);
    }
}

/* Copies n elements of x to y, or, if `add`, adds them to y; the types of the arrays may differ. */
HPMLG_FN void hpmlg_copy_run(hpmlg_device *d, hpmlg_array y, hpmlg_array x, int64_t n, bool add)
{
    HPMLG_RUN_ITEMS(d, hpmlg_k_act, n, 2048, y, x, hpmlg_array_null(), (int)HPML_ACT_NONE, 0.0f, n, add);
}

HPMLG_FN void hpmlg_op_activation(HPMLG_OP_ARGUMENTS)
{
    int64_t     count = hpml_tensor_count(n->out);
    hpml_act    act = n->attr.act.act;
    hpmlg_array x = hpmlg_value(back && !hpmlg_act_needs_x(act) ? n->out : n->src[0]);
    hpmlg_array dy = back ? hpmlg_grad(n->out) : hpmlg_array_null();
    HPMLG_RUN_ITEMS(d, hpmlg_k_act, count, 2048, hpmlg_op_output(n, back), x, dy, (int)act, n->attr.act.slope, count,
                    hpmlg_op_adds(n, back));
}

/* The strides of two arrays over a common shape: element i of the shape, in order, has the offset hpmlg_strides_at(w,
   s, i) in array s (0 or 1). A stride of 0 repeats an element (broadcasting). Dimension 0 is the innermost one.
   Dimensions that one stride per array steps through are merged: (B, T, C) + (C) becomes (B T, C) + (C). */
typedef struct hpmlg_strides {
    int     ndim = 1;
    int64_t count = 1; /* number of elements of the shape */
    int64_t shape[HPML_MAX_DIMS] = { 1 }, stride[2][HPML_MAX_DIMS];
} hpmlg_strides;

HPMLG_DEVICE int64_t hpmlg_strides_at(const hpmlg_strides &w, int s, int64_t i)
{
    int64_t at = 0;
    HPMLG_ROLLED for (int k = 0; k < w.ndim - 1; k++) { /* rolled, because copies of a division hold many registers */
        int64_t q = hpmlg_quotient(i, w.shape[k]);
        at += (i - q * w.shape[k]) * w.stride[s][k];
        i = q;
    }
    return at + i * w.stride[s][w.ndim - 1];
}

/* Adds an outer dimension of `size` elements, with its strides in array 0 and array 1, to w; merges it with the
   previous dimension where the strides of both arrays allow. */
HPMLG_FN void hpmlg_strides_push(hpmlg_strides *w, int64_t size, int64_t stride0, int64_t stride1)
{
    int to = w->count == 1 ? 0 : w->ndim, last = to > 0 ? to - 1 : 0;
    if (size == 1) return;
    w->count *= size;
    if (to > 0 && stride0 == w->stride[0][last] * w->shape[last] && stride1 == w->stride[1][last] * w->shape[last]) {
        w->shape[last] *= size;
        return;
    }
    w->shape[to] = size;
    w->stride[0][to] = stride0;
    w->stride[1][to] = stride1;
    w->ndim = to + 1;
}

/* Reads from array a the values of elements at to at + 7 of the shape that w describes; s (0 or 1): which of the two
   strides in w is a's. Values beyond `count` elements are undefined. */
HPMLG_DEVICE hpmlg_vec8 hpmlg_get_strided(hpmlg_array a, const hpmlg_strides &w, int s, int64_t at, int64_t count)
{
    hpmlg_vec8 e;
    int64_t    run = w.shape[0], step = w.stride[s][0];
    int64_t    in = at - hpmlg_quotient(at, run) * run, p = hpmlg_strides_at(w, s, at);
    bool       one_run = in + 8 <= run;
    if (one_run && step == 1) return hpmlg_get_range(a, p, p, p + 8, 0);
    for (int j = 0; j < 8; j++) {
        if (j > 0 && one_run && step == 0) e.v[j] = e.v[0];
        else e.v[j] = at + j < count ? hpmlg_get(a, p) : 1;
        p += step;
        if (++in == run && at + j + 1 < count) {
            in = 0;
            p  = hpmlg_strides_at(w, s, at + j + 1);
        }
    }
    return e;
}

/* Computes y (+)= a x + b for n elements; add: the result is added to y. If `flat`, x has all elements of y in order,
   else x is broadcast: w is the shape of y, with x's strides in w.stride[0]. y may be x. */
template <bool flat>
static __global__ void hpmlg_k_affine(hpmlg_array y, hpmlg_array x, const __grid_constant__ hpmlg_strides w, float a,
                                      float b, int64_t n, bool add)
{
    HPMLG_FOR_EACH_VEC8(at, n) {
        hpmlg_vec8 e = flat ? hpmlg_get_range(x, at, 0, n, 0) : hpmlg_get_strided(x, w, 0, at, n);
        for (int j = 0; j < 8; j++) e.v[j] = a * e.v[j] + b;
        hpmlg_put_range(y, at, 0, n, e, add);
    }
}

/* Computes y (+)= scale x, where x is broadcast: w is the shape of y, with x's strides in stride[0]; add: adds to y. */
HPMLG_FN void hpmlg_broadcast_run(hpmlg_device *d, hpmlg_array y, hpmlg_array x, const hpmlg_strides *w, float scale,
                                  bool add)
{
    HPMLG_RUN_ITEMS(d, hpmlg_k_affine<false>, w->count, 2048, y, x, *w, scale, 0.0f, w->count, add);
}

HPMLG_FN void hpmlg_op_scale(HPMLG_OP_ARGUMENTS)
{
    int64_t count = hpml_tensor_count(n->out);
    HPMLG_RUN_ITEMS(d, hpmlg_k_affine<true>, count, 2048, hpmlg_op_output(n, back), hpmlg_op_input(n, back),
                    hpmlg_strides(), n->attr.scale.a, back ? 0 : n->attr.scale.b, count, hpmlg_op_adds(n, back));
}

typedef struct hpmlg_binary { /* an op of two operands: add, sub, mul or div, or its gradients */
    int           op;
    hpmlg_strides w;             /* shape of the result; w.stride[s]: strides of src[s] over this shape */
    bool          same_shape[2]; /* true: src[s] has the shape of the result: no element is repeated */
    hpmlg_array   out, src[2];   /* out: the result or, backward, its gradient; src: the operands */
    hpmlg_array   grad[2];       /* backward: grad[s] gets the gradient of src[s]; p NULL: this one is not written */
    bool          add[2];
    int           act;           /* for ADD: an activation, for which first out *= act'(src[0]); 0: none */
    float         slope;
} hpmlg_binary;

/* Reads the values of operand s (0 or 1) of the op b for elements at to at + 7 of its result. flat: no operand is
   broadcast; the code then takes half the registers, so that more loads run at the same time. */
template <bool flat> HPMLG_DEVICE hpmlg_vec8 hpmlg_binary_operand(const hpmlg_binary &b, int s, int64_t at)
{
    if (flat || b.same_shape[s]) return hpmlg_get_range(b.src[s], at, 0, b.w.count, 1);
    return hpmlg_get_strided(b.src[s], b.w, s, at, b.w.count);
}

template <bool flat> static __global__ void __launch_bounds__(256, flat ? 6 : 4) hpmlg_k_binary(hpmlg_binary b)
{
    HPMLG_FOR_EACH_VEC8(at, b.w.count) {
        hpmlg_vec8 x0 = hpmlg_binary_operand<flat>(b, 0, at), x1 = hpmlg_binary_operand<flat>(b, 1, at);
        for (int j = 0; j < 8; j++) {
            float p = x0.v[j], q = x1.v[j];
            if (b.op == HPML_OP_ADD) x0.v[j] = p + q;
            else if (b.op == HPML_OP_SUB) x0.v[j] = p - q;
            else if (b.op == HPML_OP_MUL) x0.v[j] = p * q;
            else x0.v[j] = p / q;
        }
        hpmlg_put_range(b.out, at, 0, b.w.count, x0, false);
    }
}

/* Returns the terms that elements at to at + 7 of the result of op b contribute to the gradient of operand src[side]; 0
   outside [from, to). For a / b: da = dy / b, db = -dy a / b^2. Outside, the derivative of an activation is computed
   from 1, because from 0 it may be infinite, which gives NaN when multiplied by 0. flat: no operand is broadcast;
   plain: the op is ADD without an activation (b.act is 0). */
template <bool flat, bool plain = false>
HPMLG_DEVICE hpmlg_vec8 hpmlg_operand_grad(const hpmlg_binary &b, int side, int64_t at, int64_t from, int64_t to)
{
    hpmlg_vec8 d = hpmlg_get_range(b.out, at, from, to, 0), x0 = d, x1 = d;
    if (!flat && !plain && b.act) {
        x0 = hpmlg_get_range(b.src[0], at, from, to, 1);
        HPMLG_UNROLL for (int j = 0; j < 8; j++) d.v[j] *= hpmlg_derivative_called(b.act, b.slope, x0.v[j]);
        hpmlg_put_range(b.out, at, from, to, d, false);
    }
    if (plain || b.op == HPML_OP_ADD) return d;
    if (b.op == HPML_OP_DIV || (b.op == HPML_OP_MUL && !side)) x1 = hpmlg_binary_operand<flat>(b, 1, at);
    if (b.op != HPML_OP_SUB && side) x0 = hpmlg_binary_operand<flat>(b, 0, at);
    for (int j = 0; j < 8; j++) {
        float g = d.v[j], p = x0.v[j], q = x1.v[j];
        if (b.op == HPML_OP_SUB) g = side ? -g : g;
        else if (b.op == HPML_OP_MUL) g = g * (side ? p : q);
        else g = side ? -g / q * p / q : g / q;
        d.v[j] = flat || (at + j >= from && at + j < to) ? g : 0;
    }
    return d;
}

/* Computes the gradients of those operands of op b that are not broadcast; both may be one tensor. flat: no operand is
   broadcast. */
template <bool flat> static __global__ void __launch_bounds__(256, flat ? 5 : 3) hpmlg_k_binary_back(hpmlg_binary b)
{
    const int64_t n = b.w.count;
    HPMLG_FOR_EACH_VEC8(at, n)
        HPMLG_UNROLL for (int side = 0; side < 2; side++)
            if (b.grad[side].p)
                hpmlg_put_range(b.grad[side], at, 0, n, hpmlg_operand_grad<flat>(b, side, at, 0, n), b.add[side]);
}

HPMLG_FN hpmlg_binary hpmlg_binary_make(const hpml_node *n)
{
    hpmlg_binary       b = {};
    const hpml_tensor *y = n->out;
    b.op  = (int)n->op;
    b.out = hpmlg_value(y);
    for (int i = y->ndim - 1; i >= 0; i--) {
        int     dim = hpmlg_dim_in_memory(y, i);
        int64_t stride[2] = { 0, 0 };
        for (int s = 0; s < 2; s++) {
            int k = dim - (y->ndim - n->src[s]->ndim);
            if (k >= 0 && n->src[s]->shape[k] > 1) stride[s] = n->src[s]->stride[k];
        }
        hpmlg_strides_push(&b.w, y->shape[dim], stride[0], stride[1]);
    }
    for (int s = 0; s < 2; s++) {
        b.src[s]        = hpmlg_value(n->src[s]);
        b.same_shape[s] = hpml_tensor_count(n->src[s]) == b.w.count;
    }
    return b;
}

HPMLG_FN void hpmlg_reduce_run(hpmlg_device *d, const hpmlg_binary *b, int side, hpmlg_array out, float scale,
                               bool add);

HPMLG_FN void hpmlg_binary_pass(hpmlg_device *d, hpml_node *n, bool back)
{
    hpmlg_binary b = hpmlg_binary_make(n);
    unsigned     blocks = hpmlg_grid_blocks(d, b.w.count, 2048);
    bool         flat = b.same_shape[0] && b.same_shape[1];
    if (!back && n->fused_with && d->in_whole_forward) return; /* the next norm's kernel computes the sum */
    if (!back) return HPMLG_RUN_BOOL(d, flat, hpmlg_k_binary, true, false, blocks, 256, 0, b);
    b.out    = hpmlg_grad(n->out);
    b.add[0] = n->accumulate[0];
    b.add[1] = n->accumulate[1] || n->src[1] == n->src[0];
    for (int s = 0; s < 2; s++) /* a gradient in the memory of dy is complete: see >>plan-grads of hpml.h */
        if (b.same_shape[s] && n->src[s]->raw_grad != n->out->raw_grad) b.grad[s] = hpmlg_grad(n->src[s]);
    if (b.grad[0].p || b.grad[1].p) HPMLG_RUN_BOOL(d, flat, hpmlg_k_binary_back, true, false, blocks, 256, 0, b);
    for (int s = 0; s < 2; s++)
        if (!b.same_shape[s] && n->src[s]->raw_grad)
            hpmlg_reduce_run(d, &b, s, hpmlg_grad(n->src[s]), 1, n->accumulate[s]);
}
HPMLG_FN void hpmlg_op_add(HPMLG_OP_ARGUMENTS) { hpmlg_binary_pass(d, n, back); }
HPMLG_FN void hpmlg_op_sub(HPMLG_OP_ARGUMENTS) { hpmlg_binary_pass(d, n, back); }
HPMLG_FN void hpmlg_op_mul(HPMLG_OP_ARGUMENTS) { hpmlg_binary_pass(d, n, back); }
HPMLG_FN void hpmlg_op_div(HPMLG_OP_ARGUMENTS) { hpmlg_binary_pass(d, n, back); }

// ---------------------------------------------------------------------------------------------------------------------
// >>gpu-sums   sums over dimensions, sums of squares
// ---------------------------------------------------------------------------------------------------------------------

/* Sums over dimensions: the sum op and the gradient of a broadcast operand are the same reduction, in which some
   dimensions of an array are kept and the others are summed over. The terms are computed by hpmlg_operand_grad; for op
   ADD they are the array's elements. There are two kernels: where the last dimension (last_dim neighbouring elements)
   is kept, a thread sums 8 columns down the rows; where the last dimension is summed over, a group of tx threads sums a
   row. Where the kept elements alone do not fill the device, the summed dimensions are cut into splits, whose partial
   sums are reduced by another launch. The order depends on the shape and the kind of GPU alone. */
typedef struct hpmlg_reduce {
    hpmlg_binary  b;
    int           side;
    hpmlg_strides kept, summed; /* the kept and the summed dimensions except the last; stride[0]: strides in b.out */
    int64_t       last_dim;
    hpmlg_array   out;          /* (splits, kept elements): the partial sums of each split; of one split: the sums */
    float         scale;
    bool          add;
    int           tx;           /* number of neighbouring threads in a group: a power of two up to 256 */
} hpmlg_reduce;

#define HPMLG_REDUCE_THREADS 256 /* threads of a block of the reducing kernels */

template <bool plain>
static __global__ void __launch_bounds__(HPMLG_REDUCE_THREADS, plain ? 5 : 3) hpmlg_k_reduce_columns(hpmlg_reduce f)
{
    __shared__ float part[HPMLG_REDUCE_THREADS * 8];
    int        lane = (int)threadIdx.x % f.tx, row = (int)threadIdx.x / f.tx, ty = HPMLG_REDUCE_THREADS / f.tx;
    int64_t      tiles = (f.last_dim + 8 * f.tx - 1) / (8 * f.tx), o = blockIdx.x / tiles;
    int64_t      c = ((blockIdx.x - o * tiles) * f.tx + lane) * 8, end = c + 8 < f.last_dim ? c + 8 : f.last_dim;
    int64_t      base = hpmlg_strides_at(f.kept, 0, o), first = ((int64_t)blockIdx.y * f.kept.count + o) * f.last_dim;
    float     *mine = part + threadIdx.x;
    hpmlg_vec8 sum = {};
    for (int64_t r = (int64_t)blockIdx.y * ty + row; r < f.summed.count && c < f.last_dim;
         r += (int64_t)gridDim.y * ty) {
        int64_t    at = base + hpmlg_strides_at(f.summed, 0, r);
        hpmlg_vec8 e  = hpmlg_operand_grad<false, plain>(f.b, f.side, at + c, at + c, at + end);
        for (int j = 0; j < 8; j++) sum.v[j] += e.v[j];
    }
    for (int j = 0; j < 8; j++) mine[j * HPMLG_REDUCE_THREADS] = sum.v[j];
    for (int h = ty / 2; h > 0; h /= 2) {
        __syncthreads();
        for (int j = 0; j < 8 && row < h; j++)
            mine[j * HPMLG_REDUCE_THREADS] += mine[j * HPMLG_REDUCE_THREADS + h * f.tx];
    }
    for (int j = 0; j < 8; j++) sum.v[j] = f.scale * mine[j * HPMLG_REDUCE_THREADS];
    if (row == 0 && c < f.last_dim) hpmlg_put_range(f.out, first + c, first + c, first + end, sum, f.add);
}

template <bool plain>
static __global__ void __launch_bounds__(HPMLG_REDUCE_THREADS, plain ? 5 : 3) hpmlg_k_reduce_rows(hpmlg_reduce f)
{
    __shared__ float space[HPMLG_REDUCE_THREADS / HPMLG_WARP];
    int     lane = (int)threadIdx.x % f.tx, ty = HPMLG_REDUCE_THREADS / f.tx;
    int64_t k = (int64_t)blockIdx.x * ty + threadIdx.x / (unsigned)f.tx, to = (int64_t)blockIdx.y * f.kept.count + k;
    int64_t vecs = (f.last_dim + 14) / 8; /* most vec8s that a row touches, wherever it begins */
    int64_t base = k < f.kept.count ? hpmlg_strides_at(f.kept, 0, k) : 0;
    float   sum = 0;
    for (int64_t q = (int64_t)blockIdx.y * f.tx + lane; q < f.summed.count * vecs && k < f.kept.count;
         q += (int64_t)gridDim.y * f.tx) {
        int64_t r = hpmlg_quotient(q, vecs), start = base + hpmlg_strides_at(f.summed, 0, r);
        int64_t at = start / 8 * 8 + (q - r * vecs) * 8;
        if (at >= start + f.last_dim) continue;
        hpmlg_vec8 e = hpmlg_operand_grad<false, plain>(f.b, f.side, at, start, start + f.last_dim);
        sum += ((e.v[0] + e.v[1]) + (e.v[2] + e.v[3])) + ((e.v[4] + e.v[5]) + (e.v[6] + e.v[7]));
    }
    sum = f.scale * hpmlg_group_reduce(sum, space, f.tx, false);
    if (lane == 0 && k < f.kept.count) hpmlg_put(f.out, to, f.add ? hpmlg_get(f.out, to) + sum : sum);
}

/* Returns the smallest power of two that is at least n, or `most`, a power of two, if this is smaller. */
HPMLG_FN int hpmlg_power_of_two(int64_t n, int most)
{
    int p = 1;
    while (p < n && p < most) p *= 2;
    return p;
}

/* Returns the strides that repeat an array (outer, inner) `dim` times, over a shape (outer, dim, inner). */
HPMLG_FN hpmlg_strides hpmlg_broadcast_strides(int64_t outer, int64_t dim, int64_t inner)
{
    hpmlg_strides w = {};
    hpmlg_strides_push(&w, inner, 1, 0);
    hpmlg_strides_push(&w, dim, 0, 0);
    hpmlg_strides_push(&w, outer, inner, 0);
    return w;
}

/* Computes out (+)= scale * the sums of x. w: the shape of x, and in stride[0] the strides of out, 0 for the dimensions
   that are summed over. add: the result is added to out. */
HPMLG_FN void hpmlg_sum_run(hpmlg_device *d, hpmlg_array out, hpmlg_array x, hpmlg_strides w, float scale, bool add)
{
    hpmlg_binary b = {};
    b.op  = HPML_OP_ADD;
    b.out = x;
    b.w   = w;
    hpmlg_reduce_run(d, &b, 0, out, scale, add);
}

/* Computes out (+)= scale * the gradient of operand `side` (0 or 1) of the op b; the operand is broadcast, so the terms
   are summed over its repeated dimensions. add: the result is added to out. */
HPMLG_FN void hpmlg_reduce_run(hpmlg_device *d, const hpmlg_binary *b, int side, hpmlg_array out, float scale, bool add)
{
    hpmlg_reduce f = {};
    int64_t      step = b->w.shape[0];
    bool         keeps_last = b->w.stride[side][0] != 0;
    f.b        = *b;
    f.side     = side;
    f.out      = out;
    f.scale    = scale;
    f.add      = add;
    f.last_dim = b->w.shape[0];
    for (int i = 1; i < b->w.ndim; i++) {
        hpmlg_strides_push(b->w.stride[side][i] ? &f.kept : &f.summed, b->w.shape[i], step, step);
        step *= b->w.shape[i];
    }
    int64_t vecs = (f.last_dim + (keeps_last ? 7 : 14)) / 8; /* number of vec8s in a row */
    int64_t kept = keeps_last ? f.kept.count * f.last_dim : f.kept.count;
    f.tx = hpmlg_power_of_two(keeps_last ? vecs : f.summed.count * vecs, keeps_last ? 32 : HPMLG_REDUCE_THREADS);
    int     ty     = HPMLG_REDUCE_THREADS / f.tx;
    int64_t blocks = keeps_last ? f.kept.count * ((vecs + f.tx - 1) / f.tx) : (kept + ty - 1) / ty;
    /* useful: the largest number of splits in which each thread still adds 4 rows or vec8s */
    int64_t useful = keeps_last ? f.summed.count / (4 * ty) : f.summed.count * vecs / (4 * f.tx);
    int64_t splits = (int64_t)d->sms * 8 / blocks;
    int64_t fit    = (int64_t)(HPMLG_SCRATCH / sizeof(float)) / kept; /* splits whose sums fit in the scratch memory */
    if (splits > useful) splits = useful;
    if (splits > fit) splits = fit;
    if (splits <= 1 || b->out.p == d->scratch) splits = 1; /* the input is partial sums in `scratch`: one split */
    else {
        f.out   = hpmlg_array_of(d->scratch, HPML_DTYPE_F32);
        f.scale = 1;
        f.add   = false;
    }
    dim3 grid((unsigned)blocks, (unsigned)splits);
    bool plain = b->op == HPML_OP_ADD && !b->act; /* true: no derivatives, so the kernel needs fewer registers */
    if (keeps_last)
        HPMLG_RUN_BOOL(d, plain, hpmlg_k_reduce_columns, true, false, grid, HPMLG_REDUCE_THREADS, 0, f);
    else HPMLG_RUN_BOOL(d, plain, hpmlg_k_reduce_rows, true, false, grid, HPMLG_REDUCE_THREADS, 0, f);
    if (splits > 1) hpmlg_sum_run(d, out, f.out, hpmlg_broadcast_strides(1, splits, kept), scale, add);
}

/* Computes the sizes of t, in memory, outside of dimension dim, of dim, and inside of it, so that element (o, m, i) is
   (o middle + m) inner + i; for HPML_ALL_DIMS they are 1, all elements, 1. */
HPMLG_FN void hpmlg_split_dims(const hpml_tensor *t, int dim, int64_t *outer, int64_t *middle, int64_t *inner)
{
    bool all = dim == HPML_ALL_DIMS;
    *inner  = 1;
    *middle = all ? hpml_tensor_count(t) : t->shape[dim];
    for (int i = t->ndim - 1; !all && hpmlg_dim_in_memory(t, i) != dim; i--)
        *inner *= t->shape[hpmlg_dim_in_memory(t, i)];
    *outer = hpml_tensor_count(t) / (*middle * *inner);
}

HPMLG_FN void hpmlg_op_sum(HPMLG_OP_ARGUMENTS)
{
    hpmlg_array to = hpmlg_op_output(n, back), from = hpmlg_op_input(n, back);
    int64_t     outer, dim, inner;
    hpmlg_split_dims(n->src[0], n->attr.sum.dim, &outer, &dim, &inner);
    float         scale = n->attr.sum.mean ? 1 / (float)dim : 1;
    hpmlg_strides w = hpmlg_broadcast_strides(outer, dim, inner);
    if (back) hpmlg_broadcast_run(d, to, from, &w, scale, n->accumulate[0]);
    else hpmlg_sum_run(d, to, from, w, scale, false);
}

/* The kinds of terms that hpmlg_k_sum_terms sums over all elements: squares of x, or losses of x and the target t. */
enum hpmlg_loss_kind { HPMLG_SQUARE, HPMLG_BCE, HPMLG_HUBER, HPMLG_MSE };

/* Returns the term of kind `what` (an hpmlg_loss_kind) of one element x and target t. BCE: max(x, 0) - x t + log(1 +
   exp(-|x|)), which never overflows. Huber: quadratic below |x - t| = delta; with delta 0 it is |x - t|. */
HPMLG_DEVICE float hpmlg_loss_term(int what, float delta, float x, float t)
{
    float d = fabsf(x - t);
    switch (what) {
    case HPMLG_SQUARE: return x * x;
    case HPMLG_BCE: return (x > 0 ? x : 0) - x * t + log1pf(expf(-fabsf(x)));
    case HPMLG_MSE: return d * d;
    default:
        if (delta == 0) return d;
        return d <= delta ? 0.5f * d * d : delta * (d - 0.5f * delta);
    }
}

/* Computes part[b] = the sum of hpmlg_loss_term(what, delta, x, t), squares or losses, over those of the n elements of
   x and of the target t (t.p NULL: no target) that block b loops over. */
static __global__ void hpmlg_k_sum_terms(float *part, hpmlg_array x, hpmlg_array t, int what, float delta, int64_t n)
{
    __shared__ float space[256 / HPMLG_WARP];
    float sum = 0;
    HPMLG_FOR_EACH_VEC8(at, n) {
        hpmlg_vec8 e = hpmlg_get_range(x, at, 0, n, 0), u = e;
        if (t.p) u = hpmlg_get_range(t, at, 0, n, 0);
        for (int j = 0; j < 8; j++) sum += at + j < n ? hpmlg_loss_term(what, delta, e.v[j], u.v[j]) : 0;
    }
    sum = hpmlg_group_reduce(sum, space, 256, false);
    if (threadIdx.x == 0) part[blockIdx.x] = sum;
}

/* The arguments of hpmlg_k_sum_finish, which adds n partial sums in double, in one block, and divides their sum
   by *counted or by `divisor`. */
typedef struct hpmlg_sum_finish {
    const float *part;                 /* (n): the partial sums */
    int64_t      n;
    const unsigned long long *counted; /* the divisor, where a kernel has counted it; NULL: use `divisor` */
    double       divisor;
    float       *out, *inverse;        /* out: sum / divisor; inverse: 1 / divisor; each may be NULL: not wanted */
    double      *wide;                 /* sum / divisor in double; NULL: not wanted */
} hpmlg_sum_finish;

static __global__ void __launch_bounds__(1024) hpmlg_k_sum_finish(hpmlg_sum_finish f)
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

/* Sums squares of x, or losses of x and the target t (`what`: which), over n elements, and divides the sum. The caller
   has set, in `f`, the divisor (1 for a plain sum, n for a mean) and the addresses that get the results: `out` and
   `wide` the quotient as float and as double, `inverse` 1 / divisor. */
HPMLG_FN void hpmlg_sum_terms_run(hpmlg_device *d, hpmlg_sum_finish f, hpmlg_array x, hpmlg_array t,
                                  enum hpmlg_loss_kind what, float delta, int64_t n)
{
    float   *part = (float *)d->scratch + 64; /* the first 256 bytes of `scratch` are for results */
    unsigned blocks = hpmlg_grid_blocks(d, n, 2048);
    f.part = part;
    f.n    = blocks;
    HPMLG_RUN(d, hpmlg_k_sum_terms, blocks, 256, 0, part, x, t, (int)what, delta, n);
    HPMLG_RUN(d, hpmlg_k_sum_finish, 1, 1024, 0, f);
}

/* Implements the backend's `sumsq`: writes the sum of squares of the n elements of x to *out, on the device. */
HPMLG_FN hpml_status hpmlg_sumsq(void *, hpml_ctx *ctx, hpml_dtype dtype, const void *x, int64_t n, double *out)
{
    hpmlg_sum_finish f = {};
    f.divisor = 1;
    f.wide    = out;
    hpmlg_sum_terms_run(hpmlg_device_of(ctx), f, hpmlg_array_of((void *)x, dtype), hpmlg_array_null(), HPMLG_SQUARE, 0,
                        n);
    return hpml_ctx_status(ctx);
}

// ---------------------------------------------------------------------------------------------------------------------
// >>gpu-shape   permute, slice, concat
// ---------------------------------------------------------------------------------------------------------------------

/* The kernel hpmlg_k_transpose permutes: to (+)= from, in tiles of 64 x 64 in shared memory, so that both arrays are
   accessed along rows: `from` along its last dimension, which is dimension p of `to`, and `to` along its own. */
#define HPMLG_TRANSPOSE_TILE 64
typedef struct hpmlg_transpose {
    hpmlg_array   from, to;
    hpmlg_strides w;                 /* over all dimensions but p and the last, with the strides of from and to */
    int64_t       p, last;           /* sizes of dimension p and of the last dimension of `to` */
    int64_t       from_last, to_p;   /* strides of `last` in `from`, of p in `to`; p in `from`, `last` in `to`: 1 */
    int64_t       p_tiles, last_tiles;
    bool          add;
} hpmlg_transpose;

static __global__ void hpmlg_k_transpose(hpmlg_transpose t)
{
    __shared__ float tile[HPMLG_TRANSPOSE_TILE][HPMLG_TRANSPOSE_TILE + 1];
    int64_t b = hpmlg_quotient(blockIdx.x, t.last_tiles), c0 = (blockIdx.x - b * t.last_tiles) * HPMLG_TRANSPOSE_TILE;
    int64_t outer = hpmlg_quotient(b, t.p_tiles), r0 = (b - outer * t.p_tiles) * HPMLG_TRANSPOSE_TILE;
    int64_t from = hpmlg_strides_at(t.w, 0, outer), to = hpmlg_strides_at(t.w, 1, outer);
    int     x = (int)threadIdx.x % HPMLG_TRANSPOSE_TILE, y = (int)threadIdx.x / HPMLG_TRANSPOSE_TILE;
    for (int i = y; i < HPMLG_TRANSPOSE_TILE; i += 4)
        if (r0 + x < t.p && c0 + i < t.last) tile[i][x] = hpmlg_get(t.from, from + r0 + x + (c0 + i) * t.from_last);
    __syncthreads();
    for (int i = y; i < HPMLG_TRANSPOSE_TILE; i += 4) {
        if (r0 + i >= t.p || c0 + x >= t.last) continue;
        int64_t at = to + (r0 + i) * t.to_p + c0 + x;
        hpmlg_put(t.to, at, t.add ? hpmlg_get(t.to, at) + tile[x][i] : tile[x][i]);
    }
}

/* Computes to (+)= from, in another order. w: the shape of `to`, with the strides of `from` in stride[0] and those of
   `to`, which has no gaps, in stride[1]. add: adds to `to`. */
HPMLG_FN void hpmlg_transpose_run(hpmlg_device *d, hpmlg_array to, hpmlg_array from, const hpmlg_strides &w, bool add)
{
    hpmlg_transpose t = {};
    int             p = 0;
    const int64_t   T = HPMLG_TRANSPOSE_TILE;
    for (int i = 1; i < w.ndim; i++)
        if (w.stride[0][i] == 1) p = i;
    t.p    = w.shape[p];
    t.last = w.shape[0];
    if (p == 0 || t.p < 16 || t.last < 16) return hpmlg_broadcast_run(d, to, from, &w, 1, add);
    t.from      = from;
    t.to        = to;
    t.add       = add;
    t.from_last = w.stride[0][0];
    t.to_p      = w.stride[1][p];
    for (int i = 1; i < w.ndim; i++)
        if (i != p) hpmlg_strides_push(&t.w, w.shape[i], w.stride[0][i], w.stride[1][i]);
    t.p_tiles    = (t.p + T - 1) / T;
    t.last_tiles = (t.last + T - 1) / T;
    HPMLG_RUN(d, hpmlg_k_transpose, (unsigned)(t.w.count * t.p_tiles * t.last_tiles), 256, 0, t);
}

/* Runs the permute op, which permutes dimensions; backward it permutes the gradient by the inverse permutation. */
HPMLG_FN void hpmlg_op_permute(HPMLG_OP_ARGUMENTS)
{
    const hpml_tensor *shape = back ? n->src[0] : n->out;
    const hpml_tensor *other = back ? n->out : n->src[0];
    hpmlg_strides      w = {};
    int64_t            stride[HPML_MAX_DIMS];
    for (int i = 0; i < shape->ndim; i++) {
        int k = n->attr.permute.dims[i]; /* dimension i of the result is dimension k of the operand */
        if (back) stride[k] = other->stride[i];
        else stride[i] = other->stride[k];
    }
    for (int i = shape->ndim - 1; i >= 0; i--) {
        int dim = hpmlg_dim_in_memory(shape, i);
        hpmlg_strides_push(&w, shape->shape[dim], stride[dim], w.count);
    }
    hpmlg_transpose_run(d, hpmlg_op_output(n, back), hpmlg_op_input(n, back), w, hpmlg_op_adds(n, back));
}

/* Copies rows: the `width` elements of row o of `to`, from offset to_at on, become (or, if `add`, are increased by)
   `lead` zeros, then `block` elements of row o of `from`, from offset from_at on, then zeros. */
typedef struct hpmlg_row_copy {
    hpmlg_array to, from;
    int64_t     to_at, to_step, from_at, from_step; /* in elements: offset of row 0, distance of rows */
    int64_t     width, block, lead, rows;
    bool        add;
} hpmlg_row_copy;

static __global__ void hpmlg_k_row_copy(hpmlg_row_copy b)
{
    int64_t vecs = (b.width + 7) / 8;
    HPMLG_FOR_EACH(i, b.rows * vecs) {
        int64_t    o = hpmlg_quotient(i, vecs), k = (i - o * vecs) * 8;
        int64_t    to = b.to_at + o * b.to_step, from = b.from_at + o * b.from_step;
        hpmlg_vec8 e = hpmlg_get_range(b.from, from + k - b.lead, from, from + b.block, 0);
        hpmlg_put_range(b.to, to + k, to, to + b.width, e, b.add);
    }
}

/* Copies `part` into `whole` if into_whole, else `whole` into `part`; gradients if `gradient`, else values; add: adds
   instead. part is the slice of whole's dimension dim from index `start` on. A gradient that is copied into `whole`
   without adding is written with zeros around it. */
HPMLG_FN void hpmlg_copy_slice(hpmlg_device *d, const hpml_tensor *whole, const hpml_tensor *part, int dim,
                               int64_t start, bool into_whole, bool gradient, bool add)
{
    hpmlg_row_copy b = {};
    int64_t        rows, count, width, inner;
    hpmlg_split_dims(whole, dim, &rows, &count, &inner);
    width   = part->shape[dim] * inner;
    b.to    = hpmlg_value_or_grad(into_whole ? whole : part, gradient);
    b.from  = hpmlg_value_or_grad(into_whole ? part : whole, gradient);
    b.rows  = rows;
    b.block = width;
    b.width = width;
    b.add   = add;
    if (into_whole) {
        b.to_at     = start * inner;
        b.to_step   = count * inner;
        b.from_step = width;
    } else {
        b.to_step   = width;
        b.from_at   = start * inner;
        b.from_step = count * inner;
    }
    if (into_whole && gradient && !add) {
        b.to_at = 0;
        b.width = count * inner;
        b.lead  = start * inner;
    }
    HPMLG_RUN_ITEMS(d, hpmlg_k_row_copy, b.rows * ((b.width + 7) / 8), 256, b);
}

HPMLG_FN void hpmlg_op_slice(HPMLG_OP_ARGUMENTS)
{
    hpmlg_copy_slice(d, n->src[0], n->out, n->attr.slice.dim, n->attr.slice.start, back, back, hpmlg_op_adds(n, back));
}

HPMLG_FN void hpmlg_op_concat(HPMLG_OP_ARGUMENTS)
{
    int64_t start = 0;
    int     dim = n->attr.slice.dim;
    for (int i = 0; i < n->src_count; i++) {
        if (!back || n->src[i]->raw_grad)
            hpmlg_copy_slice(d, n->out, n->src[i], dim, start, !back, back, back && n->accumulate[i]);
        start += n->src[i]->shape[dim];
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// >>gpu-nhwc   images whose channels are adjacent in memory; reshape
// ---------------------------------------------------------------------------------------------------------------------

/* cuDNN's tensor-core kernels read images in the order NHWC, (B, H, W, C), and first copy NCHW images of halves to this
   order in their workspace. Therefore, where cuDNN computes the convolutions of a half model, the result of each
   convolution is NHWC in memory, and so are the results of the ops that hpmlg_keeps_nhwc names, such as batchnorm,
   activations, sums and pooling, up to the op that flattens the images. Their shape is still (B, C, H, W); their
   strides give the order, which values and gradients have alike. An op that needs the other order reads a copy of its
   source, in its scratch memory, and the gradient of the copy is copied back; reshape and permute, which copy anyway,
   need no such copy. hpmlg_plan chooses the order of a result, from the op and its sources, when a graph is created. */

/* Computes to (+)= from, images (B, C, P) of P pixels in the order NCHW, for which `to` or, if not to_nhwc, `from` has
   the order NHWC, (B, P, C). The types may differ. add: adds to `to`. */
HPMLG_FN void hpmlg_reorder_run(hpmlg_device *d, hpmlg_array to, hpmlg_array from, int64_t B, int64_t C, int64_t P,
                                bool to_nhwc, bool add)
{
    const int64_t last = to_nhwc ? C : P; /* dimension of `to` whose elements are adjacent */
    const int64_t other = to_nhwc ? P : C;
    hpmlg_strides w = {};
    hpmlg_strides_push(&w, last, other, 1);
    hpmlg_strides_push(&w, other, 1, last);
    hpmlg_strides_push(&w, B, C * P, C * P);
    hpmlg_transpose_run(d, to, from, w, add);
}

/* Runs hpmlg_reorder_run on images that have the shape of t, and counts it. */
HPMLG_FN void hpmlg_reorder_images(hpmlg_device *d, hpmlg_array to, hpmlg_array from, const hpml_tensor *t,
                                   bool to_nhwc, bool add)
{
    d->work.reordered += !hpmlg_has_any_order(t);
    hpmlg_reorder_run(d, to, from, t->shape[0], t->shape[1], t->shape[2] * t->shape[3], to_nhwc, add);
}

/* Runs the reshape op, which copies only where its source is an input, a parameter or NHWC: else the result and the
   source are the same memory. */
HPMLG_FN void hpmlg_op_reshape(HPMLG_OP_ARGUMENTS)
{
    hpmlg_array to = hpmlg_op_output(n, back), from = hpmlg_op_input(n, back);
    if (!to.p || to.p == from.p) return;
    if (hpmlg_is_nhwc(n->src[0])) return hpmlg_reorder_images(d, to, from, n->src[0], back, hpmlg_op_adds(n, back));
    hpmlg_copy_run(d, to, from, hpml_tensor_count(n->out), hpmlg_op_adds(n, back));
}

HPMLG_FN bool hpmlg_is_conv(const hpml_node *n) { return n->op == HPML_OP_CONV2D || n->op == HPML_OP_CONV_TRANSPOSE2D; }

/* Returns true if op n, not a convolution, has NHWC images among its sources and gives such images: all sources that
   are not the same in both orders are NHWC, and those of an elementwise op have the shape of the result. */
HPMLG_FN bool hpmlg_keeps_nhwc(const hpml_node *n)
{
    bool found = hpmlg_is_nhwc(n->src[0]);
    switch (n->op) {
    case HPML_OP_BATCHNORM: case HPML_OP_MAX_POOL2D: case HPML_OP_AVG_POOL2D: case HPML_OP_ACTIVATION:
    case HPML_OP_SCALE: case HPML_OP_SLICE: return found;
    case HPML_OP_ADD: case HPML_OP_SUB: case HPML_OP_MUL: case HPML_OP_DIV: case HPML_OP_CONCAT:
        for (int s = 0; s < n->src_count; s++) {
            bool nhwc = hpmlg_is_nhwc(n->src[s]);
            bool whole = n->op == HPML_OP_CONCAT || hpml_tensor_count(n->src[s]) == hpml_tensor_count(n->out);
            if (!(nhwc ? whole : hpmlg_has_any_order(n->src[s]))) return false;
            found = found || nhwc;
        }
        return found;
    default: return false;
    }
}

/* Returns true if op n reads source number s from a copy in another order: a convolution all images that are not NHWC
   halves, another op NHWC images that it does not know. */
HPMLG_FN bool hpmlg_reads_reordered(const hpmlg_device *d, const hpml_node *n, int s)
{
    const hpml_tensor *t = n->src[s];
    if (!t || t->ndim != 4) return false;
    if (d->nhwc && hpmlg_is_conv(n)) return s == 0 && (t->dtype == HPML_DTYPE_F32 || !hpmlg_fits_nhwc(t));
    return hpmlg_is_nhwc(t) && n->op != HPML_OP_RESHAPE && n->op != HPML_OP_PERMUTE && !hpmlg_keeps_nhwc(n);
}

/* Sets the strides of images t to those of the order NHWC or, if not nhwc, NCHW. */
HPMLG_FN void hpmlg_set_order(hpml_tensor *t, bool nhwc)
{
    t->stride[3] = nhwc ? t->shape[1] : 1;
    t->stride[2] = t->shape[3] * t->stride[3];
    t->stride[1] = nhwc ? 1 : t->shape[2] * t->shape[3];
}

/* Returns the bytes, in scratch memory, of a copy in another order of the values of t, or of their gradient. */
HPMLG_FN size_t hpmlg_reordered_bytes(const hpml_tensor *t)
{
    return ((size_t)hpml_tensor_count(t) * 2 + 255) / 256 * 256;
}

/* Chooses the order of the result of n in memory. Returns the bytes of the copies of sources in another order. */
HPMLG_FN size_t hpmlg_order_plan(const hpmlg_device *d, hpml_node *n)
{
    size_t bytes = 0;
    bool nhwc = d->nhwc && (hpmlg_is_conv(n) || hpmlg_keeps_nhwc(n));
    if (nhwc && n->out->ndim == 4 && !hpmlg_has_any_order(n->out)) hpmlg_set_order(n->out, true);
    for (int s = 0; d->nhwc && s < n->src_count; s++)
        if (hpmlg_reads_reordered(d, n, s))
            bytes += hpmlg_reordered_bytes(n->src[s]) * (n->src[s]->needs_grad ? 2 : 1);
    return bytes;
}

/* Runs n by its function op; sources that n reads in another order are first copied to the beginning of n's scratch
   memory. During the op the copies are the sources of n; afterwards their gradients are copied back. */
HPMLG_FN void hpmlg_run_reordered(HPMLG_OP_ARGUMENTS, void (*op)(HPMLG_OP_ARGUMENTS))
{
    hpml_tensor copies[HPML_MAX_SRC];
    hpml_node   before = *n;
    bool        to_nhwc = hpmlg_is_conv(n);
    char       *at = (char *)n->scratch;
    for (int s = 0, same = 0; s < n->src_count; s++, same = 0) {
        hpml_tensor *x = before.src[s], *t = &copies[s];
        if (!hpmlg_reads_reordered(d, &before, s)) continue;
        while (before.src[same] != x) same++;
        n->src[s] = &copies[same]; /* one copy where an op reads a tensor twice */
        if (same < s) continue;
        size_t bytes = hpmlg_reordered_bytes(x);
        *t = *x;
        t->dtype = d->act_dtype;
        t->data  = t->grad = NULL;
        hpmlg_set_order(t, to_nhwc);
        t->raw = at;
        if (x->raw_grad) t->raw_grad = at + bytes;
        at += bytes * (x->needs_grad ? 2 : 1);
        n->accumulate[s] = false;
        hpmlg_reorder_images(d, hpmlg_value(t), hpmlg_value(x), t, to_nhwc, false);
        if (back && t->raw_grad && !t->batch_rows) hpmlg_zero(d, t->raw_grad, bytes); /* may be written in part */
    }
    n->scratch = at;
    op(d, run, n, back);
    n->scratch = before.scratch;
    for (int s = 0; s < n->src_count; s++) {
        hpml_tensor *x = before.src[s], *t = n->src[s];
        if (t == &copies[s] && back && t->raw_grad)
            hpmlg_reorder_images(d, hpmlg_grad(x), hpmlg_grad(t), t, !to_nhwc, before.accumulate[s]);
        n->src[s]        = x;
        n->accumulate[s] = before.accumulate[s];
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// >>gpu-map   elementwise functions of up to three operands; indices along a dimension, maxima, masks
// ---------------------------------------------------------------------------------------------------------------------

/* The op MAP, an elementwise function of up to three operands (HPML_MAPS of hpml.h): a thread computes one element of
   y. Backward, the gradient of an operand that is repeated by broadcasting goes to scratch memory, with the shape of y,
   and is then summed. */
typedef struct hpmlg_map {
    hpmlg_array   y, dy, x[3];
    hpmlg_strides w, third; /* strides, along the dimensions of y, of operands 0 and 1; of operand 2 */
    hpml_map      kind;
    float         p, q;
    int           operands;
} hpmlg_map;

/* Returns cos(x) if is_cosine, else sin(x). CUDA's sinf and cosf reduce large x through an array in local memory. Here
   x becomes quarter turns, x times 2 / pi: in parts of 29 bits, so that each product is exact in double; of each one
   multiples of 4, whole turns, are dropped. */
HPMLG_DEVICE float hpmlg_sine(float x, bool is_cosine)
{
    const double parts[] = { 0x1.45f306dp-1, 0x1.9391054p-30, 0x1.4fe13abp-59, 0x1.d1f534dp-88, 0x1.b81b6c5p-117,
                             0x1.5993c4p-148, 0x1.c820ff2p-175 };
    double quarters = 0, sine, cosine;
    if (!(fabsf(x) >= 105615.0f)) return is_cosine ? cosf(x) : sinf(x); /* above, they would need the array */
    HPMLG_UNROLL for (double part : parts) quarters += part * x - 4 * rint(part * x / 4);
    sincospi(quarters / 2, &sine, &cosine);
    return (float)(is_cosine ? cosine : sine);
}

/* Returns the value f(a, b, c) of the function m.kind if side is -1, or its derivative by a (side 0), b (1), c (2). */
HPMLG_DEVICE float hpmlg_map_value(const hpmlg_map &m, float a, [[maybe_unused]] float b, [[maybe_unused]] float c,
                                   int side)
{
    [[maybe_unused]] const float p = m.p, q = m.q;
    if (m.kind == HPML_MAP_SIN) return hpmlg_sine(a, side >= 0);
    if (m.kind == HPML_MAP_COS) return side < 0 ? hpmlg_sine(a, true) : -hpmlg_sine(a, false);
#define HPMLG_X(name, operands, value, by_a, by_b, by_c)                                                               \
    if (m.kind == HPML_MAP_##name) {                                                                                   \
        if (side < 0) return value;                                                                                    \
        if (side == 0) return by_a;                                                                                    \
        return side == 1 ? by_b : by_c;                                                                                \
    }
    HPML_MAPS(HPMLG_X)
#undef HPMLG_X
    return 0;
}

/* If side is -1, writes the function's values to `to`, which is y; else writes dy times the derivative by operand
   number `side` to `to` or, if `add`, adds the product to `to`: one number for each element of y. */
static __global__ void hpmlg_k_map(hpmlg_map m, hpmlg_array to, int side, bool add)
{
    HPMLG_FOR_EACH(i, m.w.count) {
        float x[3] = { 0, 0, 0 };
        HPMLG_UNROLL for (int s = 0; s < 3; s++) {
            const hpmlg_strides &w = s < 2 ? m.w : m.third;
            if (s < m.operands) x[s] = hpmlg_get(m.x[s], hpmlg_strides_at(w, s % 2, i));
        }
        float v = hpmlg_map_value(m, x[0], x[1], x[2], side);
        if (side >= 0) v *= hpmlg_get(m.dy, i);
        hpmlg_put(to, i, add ? hpmlg_get(to, i) + v : v);
    }
}

HPMLG_FN void hpmlg_op_map(HPMLG_OP_ARGUMENTS)
{
    const hpml_tensor *y = n->out;
    hpmlg_map          m = {};
    int64_t            step[3] = { 1, 1, 1 }, stride[3] = { 0, 0, 0 };
    m.y        = hpmlg_value(y);
    m.dy       = hpmlg_grad(y);
    m.kind     = n->attr.map.kind;
    m.p        = n->attr.map.p;
    m.q        = n->attr.map.q;
    m.operands = n->src_count;
    for (int i = y->ndim - 1; i >= 0; i--) {
        for (int s = 0; s < n->src_count; s++) {
            int     k    = i - (y->ndim - n->src[s]->ndim);
            int64_t size = k < 0 ? 1 : n->src[s]->shape[k];
            stride[s] = size == 1 ? 0 : step[s];
            step[s] *= size;
        }
        hpmlg_strides_push(&m.w, y->shape[i], stride[0], stride[1]);
        hpmlg_strides_push(&m.third, y->shape[i], stride[2], stride[2]);
    }
    for (int s = 0; s < n->src_count; s++) m.x[s] = hpmlg_value(n->src[s]);
    if (!back) return HPMLG_RUN_ITEMS(d, hpmlg_k_map, m.w.count, 256, m, m.y, -1, false);
    for (int s = 0; s < n->src_count; s++) {
        hpmlg_array   to = hpmlg_grad(n->src[s]), terms = hpmlg_array_of(n->scratch, HPML_DTYPE_F32);
        hpmlg_strides w = s < 2 ? m.w : m.third;
        bool          add = n->accumulate[s], whole = step[s] == m.w.count;
        for (int e = 0; e < s; e++) add |= n->src[e] == n->src[s]; /* operand e has written this tensor's gradient */
        if (!to.p) continue;
        HPMLG_RUN_ITEMS(d, hpmlg_k_map, m.w.count, 256, m, whole ? to : terms, s, whole && add);
        if (s == 1)
            for (int i = 0; i < w.ndim; i++) w.stride[0][i] = w.stride[1][i];
        if (!whole) hpmlg_sum_run(d, to, terms, w, 1, add);
    }
}

/* The op `take` (see >>take of hpml.h): y (outer, m, inner) from x (outer, size, inner). */
typedef struct hpmlg_take {
    hpmlg_array     y, x;            /* forward values of y and x, backward their gradients */
    const int      *index;
    int64_t         outer, m, size, inner, start;
    int64_t         each, rows;      /* each: indices for a row of y (inner, or 1); rows: outer / samples, so that x[o]
                                        belongs to sample o / rows */
    hpml_take       rule;
    float           value;
    bool            add;
    hpmlg_note     *note;
    int            *taken;
} hpmlg_take;

/* Sets row and weight so that number k of row i of y[o] is the sum of weight[r] times number k of row row[r] of x[o],
   over r = 0 and 1; a row below 0 adds nothing. */
HPMLG_DEVICE void hpmlg_take_rows(const hpmlg_take &t, int64_t o, int64_t i, int64_t k, int64_t *row, float *weight)
{
    int64_t length = t.index && t.rule != HPML_TAKE_INDEX ? t.index[o / t.rows] : t.size;
    row[0]    = i;
    row[1]    = -1;
    weight[0] = 1;
    weight[1] = 0;
    if (t.rule == HPML_TAKE_INDEX) row[0] = t.index[(o * t.m + i) * t.each + (t.each > 1 ? k : 0)];
    if (t.rule == HPML_TAKE_REVERSE && i < length) row[0] = length - 1 - i;
    if (t.rule == HPML_TAKE_LAST) row[0] = length - 1;
    if (t.rule == HPML_TAKE_PAD) row[0] = i - t.start;
    if (t.rule == HPML_TAKE_NEAREST) row[0] = i / t.start;
    if (t.rule == HPML_TAKE_LINEAR) {
        double at = ((double)i + 0.5) / (double)t.start - 0.5;
        at        = at > 0 ? at : 0;
        row[0]    = (int64_t)at;
        row[1]    = row[0] + 1 < t.size ? row[0] + 1 : row[0];
        weight[1] = (float)(at - (double)row[0]);
        weight[0] = 1 - weight[1];
    }
    if (row[0] >= t.size) row[0] = -1;
}

static __global__ void hpmlg_k_take(hpmlg_take t)
{
    HPMLG_FOR_EACH(at, t.outer * t.m * t.inner) {
        int64_t oi = hpmlg_quotient(at, t.inner), k = at - oi * t.inner, o = oi / t.m, row[2];
        float   weight[2], v = t.value;
        hpmlg_take_rows(t, o, oi - o * t.m, k, row, weight);
        if (row[0] >= 0) v = weight[0] * hpmlg_get(t.x, (o * t.size + row[0]) * t.inner + k);
        if (row[1] >= 0) v += weight[1] * hpmlg_get(t.x, (o * t.size + row[1]) * t.inner + k);
        hpmlg_put(t.y, at, v);
    }
}

/* Computes dx: the thread of an element in row j of x adds up, in order, the gradients of the rows of y that were made
   from row j. The thread searches, for NEAREST and LINEAR, the rows of y near j times the factor, for PAD one row, for
   the other rules all rows. */
static __global__ void hpmlg_k_take_back(hpmlg_take t)
{
    HPMLG_FOR_EACH(at, t.outer * t.size * t.inner) {
        int64_t oj = hpmlg_quotient(at, t.inner), k = at - oj * t.inner, o = oj / t.size, j = oj - o * t.size, row[2];
        bool    scaled = t.rule == HPML_TAKE_NEAREST || t.rule == HPML_TAKE_LINEAR;
        int64_t first = scaled ? (j - 1) * t.start : 0, end = scaled ? (j + 2) * t.start : t.m;
        float   weight[2], sum = 0;
        if (t.rule == HPML_TAKE_PAD) first = j + t.start, end = first + 1;
        for (int64_t i = first < 0 ? 0 : first; i < end && i < t.m; i++) {
            hpmlg_take_rows(t, o, i, k, row, weight);
            for (int r = 0; r < 2; r++)
                if (row[r] == j) sum += weight[r] * hpmlg_get(t.y, (o * t.m + i) * t.inner + k);
        }
        hpmlg_put(t.x, at, t.add ? hpmlg_get(t.x, at) + sum : sum);
    }
}

/* Checks t.index[0 .. count - 1], indices or lengths: reports one that is outside of 0 to `most` to the host, as an
   error of `node`. */
static __global__ void hpmlg_k_take_check(hpmlg_take t, int64_t count, int64_t most, const hpml_node *node)
{
    HPMLG_FOR_EACH(i, count)
        if (t.index[i] < 0 || t.index[i] > most) hpmlg_report_index(t.note, t.taken, i, t.index[i], node);
}

HPMLG_FN void hpmlg_op_take(HPMLG_OP_ARGUMENTS)
{
    hpmlg_take t = {};
    int        dim = n->attr.take.dim;
    hpmlg_split_dims(n->src[0], dim, &t.outer, &t.size, &t.inner);
    t.y     = hpmlg_value_or_grad(n->out, back);
    t.x     = hpmlg_value_or_grad(n->src[0], back);
    t.index = n->src_count > 1 ? (const int *)n->src[1]->raw : NULL;
    t.m     = n->out->shape[dim];
    t.start = n->attr.take.start;
    t.rule  = n->attr.take.rule;
    t.value = n->attr.take.value;
    t.rows  = dim > 0 && t.outer > 0 ? t.outer / n->src[0]->shape[0] : 1;
    t.each  = 1;
    t.add   = hpmlg_op_adds(n, back);
    t.note  = d->note;
    t.taken = d->note_taken;
    for (int i = dim + 1; t.index && i < n->src[1]->ndim; i++) t.each *= n->src[1]->shape[i];
    if (back) return HPMLG_RUN_ITEMS(d, hpmlg_k_take_back, t.outer * t.size * t.inner, 256, t);
    if (t.index)
        HPMLG_RUN_ITEMS(d, hpmlg_k_take_check, hpml_tensor_count(n->src[1]), 256, t, hpml_tensor_count(n->src[1]),
                        t.size - (t.rule == HPML_TAKE_INDEX), n);
    HPMLG_RUN_ITEMS(d, hpmlg_k_take, t.outer * t.m * t.inner, 256, t);
}

static __global__ void hpmlg_k_mask(hpmlg_array y, const int *lengths, int64_t count, int64_t T)
{
    HPMLG_FOR_EACH(i, count) {
        int64_t b = hpmlg_quotient(i, T);
        hpmlg_put(y, i, i - b * T < lengths[b] ? 1 : 0);
    }
}
HPMLG_FN void hpmlg_op_mask(HPMLG_OP_ARGUMENTS)
{
    int64_t count = hpml_tensor_count(n->out);
    if (!back)
        HPMLG_RUN_ITEMS(d, hpmlg_k_mask, count, 256, hpmlg_value(n->out), (const int *)n->src[0]->raw, count,
                        n->out->shape[1]);
}

/* Finds the first maximum of each line of x (outer, size, inner) along `size`, where a NaN exceeds all numbers, by a
   warp for each line. y (outer, inner) gets the maxima, unless y.p is NULL; `at` (outer, inner) gets their indices. */
static __global__ void hpmlg_k_max(hpmlg_array y, hpmlg_array x, int *at, int64_t lines, int64_t size, int64_t inner)
{
    int lane = (int)threadIdx.x % HPMLG_WARP;
    HPMLG_FOR_EACH_WARP(i, lines) {
        int64_t o = i / inner, start = o * size * inner + (i - o * inner);
        float   best = hpmlg_get(x, start);
        int     where = 0;
        for (int64_t j = lane; j < size; j += HPMLG_WARP) {
            float v = hpmlg_get(x, start + j * inner);
            if (!(v > best || (v != v && best == best))) continue;
            best  = v;
            where = (int)j;
        }
        for (int step = HPMLG_WARP / 2; step > 0; step >>= 1) {
            float v = __shfl_xor_sync(HPMLG_ALL_LANES, best, step);
            int   w = __shfl_xor_sync(HPMLG_ALL_LANES, where, step);
            bool  equal = v == best || (v != v && best != best), larger = v > best || (v != v && best == best);
            if (!larger && !(equal && w < where)) continue;
            best  = v;
            where = w;
        }
        if (lane == 0) at[i] = where;
        if (lane == 0 && y.p) hpmlg_put(y, i, best);
    }
}

static __global__ void hpmlg_k_max_back(hpmlg_array dx, hpmlg_array dy, const int *at, int64_t count, int64_t size,
                                        int64_t inner, bool add)
{
    HPMLG_FOR_EACH(i, count) {
        int64_t oj = hpmlg_quotient(i, inner), o = oj / size, line = o * inner + (i - oj * inner);
        float   v = at[line] == oj - o * size ? hpmlg_get(dy, line) : 0;
        hpmlg_put(dx, i, add ? hpmlg_get(dx, i) + v : v);
    }
}

HPMLG_FN void hpmlg_op_max(HPMLG_OP_ARGUMENTS)
{
    int64_t outer, size, inner;
    bool    index = n->attr.max.index;
    hpmlg_split_dims(n->src[0], n->attr.max.dim, &outer, &size, &inner);
    if (back)
        return HPMLG_RUN_ITEMS(d, hpmlg_k_max_back, outer * size * inner, 256, hpmlg_grad(n->src[0]),
                               hpmlg_grad(n->out), (const int *)n->saved, outer * size * inner, size, inner,
                               n->accumulate[0]);
    HPMLG_RUN_ITEMS(d, hpmlg_k_max, outer * inner, 8, index ? hpmlg_array_null() : hpmlg_value(n->out),
                    hpmlg_value(n->src[0]), (int *)(index ? n->out->raw : n->saved), outer * inner, size, inner);
}

// ---------------------------------------------------------------------------------------------------------------------
// >>gpu-norm   softmax, layernorm, rmsnorm
// ---------------------------------------------------------------------------------------------------------------------

/* A team, TEAM threads of a warp or a block, computes a row, in vec8s, groups of 8 elements: thread t takes the vec8s
   t, t + TEAM, ... of a tile of TEAM G vec8s, so it has G of each tile. A row that fits in one tile is read once and
   stays in registers; a longer row is read again, from the cache, for each loop over it (reload). */

#define HPMLG_WARP_ROW 1024 /* columns: a row of at most these is computed by a warp, a longer one by a block */

HPMLG_FN unsigned hpmlg_row_blocks(const hpmlg_device *d, int64_t rows, int64_t cols)
{
    return hpmlg_grid_blocks(d, rows, cols <= HPMLG_WARP_ROW ? 4 : 1);
}

/* Launches kernel<TEAM, G> on rows of `cols` columns: TEAM threads for a row, G groups of 8 columns for a thread. */
#define HPMLG_RUN_ROWS(d, kernel, blocks, cols, shared, ...)                                                           \
    ((cols) <= 256              ? HPMLG_RUN(d, (kernel<32, 1>), blocks, 128, shared, __VA_ARGS__)                      \
     : (cols) <= 768            ? HPMLG_RUN(d, (kernel<32, 3>), blocks, 128, shared, __VA_ARGS__)                      \
     : (cols) <= HPMLG_WARP_ROW ? HPMLG_RUN(d, (kernel<32, 4>), blocks, 128, shared, __VA_ARGS__)                      \
     : (cols) <= 2048           ? HPMLG_RUN(d, (kernel<128, 2>), blocks, 128, shared, __VA_ARGS__)                     \
                                : HPMLG_RUN(d, (kernel<256, 4>), blocks, 256, shared, __VA_ARGS__))

/* Loop over the rows of this thread's team, TEAM threads; and over a row's tiles and this thread's vec8s (8 columns) of
   a tile: k counts the vec8s (0 to G - 1), c is the first column of vec8 k. TEAM, G, rows, cols: the kernel's. */
#define HPMLG_FOR_EACH_ROW                                                                                             \
    for (int64_t row = (int64_t)blockIdx.x * (blockDim.x / TEAM) + threadIdx.x / TEAM; row < rows;                     \
         row += (int64_t)gridDim.x * (blockDim.x / TEAM))
#define HPMLG_FOR_EACH_ROW_VEC8                                                                                        \
    for (int64_t tile = 8 * (int64_t)(threadIdx.x % TEAM), end = cols + tile; tile < end; tile += 8 * TEAM * G)        \
        HPMLG_UNROLL for (int64_t k = 0, c = tile; k < G; k++, c += 8 * TEAM)

/* Computes y = softmax(x), or its logarithm if `log`, of each row of x. TEAM threads compute a row, each with G groups
   of 8 columns in registers; longer rows are read from memory three times. */
template <int TEAM, int G>
static __global__ void hpmlg_k_softmax(hpmlg_array y, hpmlg_array x, int64_t rows, int64_t cols, bool log)
{
    __shared__ float space[HPMLG_WARP];
    const bool       reload = cols > 8 * TEAM * G;
    hpmlg_vec8       e[G];
    HPMLG_FOR_EACH_ROW {
        float row_max = -INFINITY, sum = 0;
        HPMLG_FOR_EACH_ROW_VEC8 {
            e[k] = hpmlg_row_get(x, row, cols, c, -INFINITY);
            for (int j = 0; j < 8; j++)
                row_max = e[k].v[j] > row_max || e[k].v[j] != e[k].v[j] ? e[k].v[j] : row_max;
        }
        row_max = hpmlg_group_reduce(row_max, space, TEAM, true);
        HPMLG_FOR_EACH_ROW_VEC8 {
            if (reload) e[k] = hpmlg_row_get(x, row, cols, c, -INFINITY);
            for (int j = 0; j < 8; j++) sum += expf(e[k].v[j] - row_max);
        }
        sum = hpmlg_group_reduce(sum, space, TEAM, false);
        /* row_max and log_sum are subtracted one by one, because their sum would be rounded as coarsely as row_max */
        float log_sum = logf(sum), scale = 1 / sum;
        HPMLG_FOR_EACH_ROW_VEC8 {
            if (reload) e[k] = hpmlg_row_get(x, row, cols, c, 0);
            for (int j = 0; j < 8; j++)
                e[k].v[j] = log ? e[k].v[j] - row_max - log_sum : expf(e[k].v[j] - row_max) * scale;
            hpmlg_row_put(y, row, cols, c, e[k], false);
        }
    }
}

/* Computes the gradient of softmax for each row, dx (+)= y (dy - <dy, y>); of its logarithm, if `log`, dx (+)= dy -
   exp(y) sum(dy). add: adds to dx. TEAM threads compute a row, each with G groups of 8 columns in registers. */
template <int TEAM, int G>
static __global__ void hpmlg_k_softmax_back(hpmlg_array dx, hpmlg_array y, hpmlg_array dy, int64_t rows, int64_t cols,
                                            bool log, bool add)
{
    __shared__ float space[HPMLG_WARP];
    const bool       reload = cols > 8 * TEAM * G;
    hpmlg_vec8       e[G], f[G];
    HPMLG_FOR_EACH_ROW {
        float sum = 0;
        HPMLG_FOR_EACH_ROW_VEC8 {
            e[k] = hpmlg_row_get(y, row, cols, c, 0);
            f[k] = hpmlg_row_get(dy, row, cols, c, 0);
            for (int j = 0; j < 8; j++) sum += log ? f[k].v[j] : f[k].v[j] * e[k].v[j];
        }
        sum = hpmlg_group_reduce(sum, space, TEAM, false);
        HPMLG_FOR_EACH_ROW_VEC8 {
            if (reload) {
                e[k] = hpmlg_row_get(y, row, cols, c, 0);
                f[k] = hpmlg_row_get(dy, row, cols, c, 0);
            }
            for (int j = 0; j < 8; j++)
                f[k].v[j] = log ? f[k].v[j] - expf(e[k].v[j]) * sum : e[k].v[j] * (f[k].v[j] - sum);
            hpmlg_row_put(dx, row, cols, c, f[k], add);
        }
    }
}

HPMLG_FN void hpmlg_softmax_pass(hpmlg_device *d, hpml_node *n, bool back)
{
    int64_t     cols   = hpmlg_last_dim(n->out), rows = hpml_tensor_count(n->out) / cols;
    unsigned    blocks = hpmlg_row_blocks(d, rows, cols);
    hpmlg_array x      = hpmlg_value_or_grad(n->src[0], back), y = hpmlg_value(n->out);
    bool        log    = n->op == HPML_OP_LOG_SOFTMAX;
    if (!back) return HPMLG_RUN_ROWS(d, hpmlg_k_softmax, blocks, cols, 0, y, x, rows, cols, log);
    HPMLG_RUN_ROWS(d, hpmlg_k_softmax_back, blocks, cols, 0, x, y, hpmlg_grad(n->out), rows, cols, log,
                   n->accumulate[0]);
}
HPMLG_FN void hpmlg_op_softmax(HPMLG_OP_ARGUMENTS) { hpmlg_softmax_pass(d, n, back); }
HPMLG_FN void hpmlg_op_log_softmax(HPMLG_OP_ARGUMENTS) { hpmlg_softmax_pass(d, n, back); }

/* Computes y = xhat gamma + beta of each row, with xhat = (x - mean - rest) rstd, rstd = 1 / sqrt(variance + eps);
   layernorm if `centred`, else rmsnorm: mean = rest = 0. The mean is the sum of two floats, mean + rest, so that
   numbers far from 0 lose no digits. saved: all rows' (mean, rstd), then all rows' rest. A residual sum x = p + q right
   before the norm can be fused (p.p not NULL): the kernel then also writes x and does not read it again. */
template <int TEAM, int G>
static __global__ void hpmlg_k_norm(hpmlg_array y, hpmlg_array x, hpmlg_array p, hpmlg_array q, const float *gamma,
                                    const float *beta, float2 *saved, int64_t rows, int64_t cols, float eps,
                                    bool centred)
{
    __shared__ float space[HPMLG_WARP];
    const bool       reload = cols > 8 * TEAM * G;
    hpmlg_vec8       e[G];
    HPMLG_FOR_EACH_ROW {
        float mean = 0, sum = 0, rest = 0;
        HPMLG_FOR_EACH_ROW_VEC8 {
            e[k] = hpmlg_row_get(p.p ? p : x, row, cols, c, 0);
            if (p.p) {
                hpmlg_vec8 f = hpmlg_row_get(q, row, cols, c, 0);
                for (int j = 0; j < 8; j++) e[k].v[j] = hpmlg_round_to(e[k].v[j] + f.v[j], x.type);
                hpmlg_row_put(x, row, cols, c, e[k], false);
            }
            for (int j = 0; j < 8; j++) mean += e[k].v[j];
        }
        mean = centred ? hpmlg_group_reduce(mean, space, TEAM, false) / (float)cols : 0;
        HPMLG_FOR_EACH_ROW_VEC8 {
            if (reload) e[k] = hpmlg_row_get(x, row, cols, c, 0);
            for (int j = 0; j < 8; j++) {
                float v = c + j < cols ? e[k].v[j] - mean : 0;
                sum += v * v;
                rest += v;
            }
        }
        rest = centred ? hpmlg_group_reduce(rest, space, TEAM, false) / (float)cols : 0;
        float var = hpmlg_group_reduce(sum, space, TEAM, false) / (float)cols - rest * rest;
        float rstd = 1 / sqrtf((var < 0 ? 0 : var) + eps);
        if (threadIdx.x % TEAM == 0) {
            saved[row] = make_float2(mean, rstd);
            ((float *)(saved + rows))[row] = rest;
        }
        HPMLG_FOR_EACH_ROW_VEC8 {
            if (reload) e[k] = hpmlg_row_get(x, row, cols, c, 0);
            hpmlg_vec8 g = hpmlg_param_get8(gamma, cols, c, 1), b = hpmlg_param_get8(beta, cols, c, 0);
            for (int j = 0; j < 8; j++) e[k].v[j] = (e[k].v[j] - mean - rest) * rstd * g.v[j] + b.v[j];
            hpmlg_row_put(y, row, cols, c, e[k], false);
        }
    }
}

/* Computes, with g = dy gamma and the normalized x, xhat = (x - mean - rest) rstd, for layernorm (`centred`) dx (+)=
   rstd (g - mean(g) - xhat mean(g xhat)), for rmsnorm without mean(g). Each block writes the sums of dgamma and
   dbeta over its rows to part (blocks, 2, cols), unless `part` is NULL: every thread sums its own columns, then the
   teams' sums (a team: TEAM threads) are added in order. */
template <int TEAM, int G>
static __global__ void hpmlg_k_norm_back(hpmlg_array dx, hpmlg_array x, hpmlg_array dy, const float *gamma,
                                         const float2 *saved, float *part, int64_t rows, int64_t cols, bool centred,
                                         bool add)
{
    __shared__ float space[HPMLG_WARP];
    HPMLG_SHARED(float, sums); /* (2, cols): sums of dgamma, dbeta, where a block has several teams */
    const bool reload = cols > 8 * TEAM * G;
    const int  teams = (int)blockDim.x / TEAM;
    hpmlg_vec8 e[G], f[G], a[G] = {}, b[G] = {};
    if (part) part += (int64_t)blockIdx.x * 2 * cols;
    hpmlg_array dgamma = { teams == 1 ? part : sums, HPML_DTYPE_F32 };
    hpmlg_array dbeta  = { (float *)dgamma.p + cols, HPML_DTYPE_F32 };
    HPMLG_FOR_EACH_ROW {
        float mean = saved[row].x, rstd = saved[row].y, rest = ((const float *)(saved + rows))[row], sum = 0, dot = 0;
        auto  load = [&](int64_t k, int64_t c) { /* computes e = xhat, f = dy */
            e[k] = hpmlg_row_get(x, row, cols, c, mean);
            f[k] = hpmlg_row_get(dy, row, cols, c, 0);
            for (int j = 0; j < 8; j++) e[k].v[j] = (e[k].v[j] - mean - rest) * rstd;
        };
        auto times_gamma = [&](int64_t k, int64_t c) { /* computes f = g = dy gamma */
            hpmlg_vec8 g = hpmlg_param_get8(gamma, cols, c, 1);
            for (int j = 0; j < 8; j++) f[k].v[j] *= g.v[j];
        };
        HPMLG_FOR_EACH_ROW_VEC8 {
            load(k, c);
            for (int j = 0; j < 8; j++) {
                a[k].v[j] += f[k].v[j] * e[k].v[j];
                b[k].v[j] += f[k].v[j];
            }
            if (reload && part) {
                hpmlg_row_put(dgamma, 0, cols, c, a[k], row != blockIdx.x);
                hpmlg_row_put(dbeta, 0, cols, c, b[k], row != blockIdx.x);
                for (int j = 0; j < 8; j++) a[k].v[j] = b[k].v[j] = 0;
            }
            times_gamma(k, c);
            for (int j = 0; j < 8; j++) {
                sum += f[k].v[j];
                dot += f[k].v[j] * e[k].v[j];
            }
        }
        if (!dx.p) continue;
        sum = centred ? hpmlg_group_reduce(sum, space, TEAM, false) / (float)cols : 0;
        dot = hpmlg_group_reduce(dot, space, TEAM, false) / (float)cols;
        HPMLG_FOR_EACH_ROW_VEC8 {
            if (reload) {
                load(k, c);
                times_gamma(k, c);
            }
            for (int j = 0; j < 8; j++) f[k].v[j] = rstd * (f[k].v[j] - sum - e[k].v[j] * dot);
            hpmlg_row_put(dx, row, cols, c, f[k], add);
        }
    }
    if (!part || reload) return;
    for (int team = 0; team < teams; team++) {
        if ((int)threadIdx.x / TEAM == team) HPMLG_FOR_EACH_ROW_VEC8 {
            hpmlg_row_put(dgamma, 0, cols, c, a[k], team > 0);
            hpmlg_row_put(dbeta, 0, cols, c, b[k], team > 0);
        }
        __syncthreads();
    }
    for (int64_t i = threadIdx.x; i < 2 * cols && teams > 1; i += blockDim.x) part[i] = sums[i];
}

/* Computes dgamma (cols) and dbeta (cols) (+)= the sums of part (parts, 2, cols) over its first dimension. A block of 8
   warps computes 32 columns; each warp sums every 8th of the `parts` rows, and the warps' sums are added in order. */
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

/* Returns the number of blocks of hpmlg_k_norm_back, each of which writes its own sums of dgamma and dbeta. */
HPMLG_FN int hpmlg_norm_parts(const hpmlg_device *d, int64_t rows, int64_t cols)
{
    int blocks = (int)hpmlg_row_blocks(d, rows, cols);
    int limit  = d->sms * (cols > 256 && cols <= 768 ? 3 : 4); /* registers allow 3 or 4 blocks a multiprocessor */
    return blocks < limit ? blocks : limit;
}

HPMLG_FN const float *hpmlg_param_value(const hpml_node *n, int s) { return n->src[s] ? n->src[s]->data : NULL; }
HPMLG_FN float       *hpmlg_param_grad(const hpml_node *n, int s) { return n->src[s] ? n->src[s]->grad : NULL; }

/* Lets the kernel of norm n also compute the sum that n reads (of a residual connection), by setting fused_with of the
   sum's node: if that node is `before`, planned just before n, and adds two tensors of n's shape. The fused kernel is
   used only in forward passes that run as a whole. */
HPMLG_FN void hpmlg_norm_plan(hpml_node *n, hpml_node *before)
{
    hpml_node *add = n->src[0]->node;
    if (!add || add != before || add->op != HPML_OP_ADD || !add->src[0] || !add->src[1]) return;
    for (int s = 0; s < 2; s++)
        if (add->src[s]->ndim != n->out->ndim || hpmlg_is_nhwc(add->src[s]) ||
            memcmp(add->src[s]->shape, n->out->shape, sizeof n->out->shape) != 0)
            return;
    add->fused_with = n;
}

HPMLG_FN void hpmlg_norm(hpmlg_device *d, hpml_node *n, bool back)
{
    int64_t      cols = hpmlg_last_dim(n->out), rows = hpml_tensor_count(n->out) / cols;
    float2      *saved = (float2 *)n->saved;
    hpmlg_array  x = hpmlg_value(n->src[0]), p = hpmlg_array_null(), q = p;
    const float *gamma = hpmlg_param_value(n, 1);
    bool         centred = n->op == HPML_OP_LAYERNORM;
    if (!back) {
        const hpml_node *sum = n->src[0]->node;
        if (sum && sum->fused_with == n && d->in_whole_forward) {
            p = hpmlg_value(sum->src[0]);
            q = hpmlg_value(sum->src[1]);
        }
        return HPMLG_RUN_ROWS(d, hpmlg_k_norm, hpmlg_row_blocks(d, rows, cols), cols, 0, hpmlg_value(n->out), x, p, q,
                              gamma, hpmlg_param_value(n, 2), saved, rows, cols, n->attr.norm.eps, centred);
    }
    int         parts  = hpmlg_norm_parts(d, rows, cols);
    float      *dgamma = hpmlg_param_grad(n, 1), *dbeta = hpmlg_param_grad(n, 2);
    float      *part   = dgamma || dbeta ? (float *)n->scratch : NULL;
    size_t      shared = cols <= HPMLG_WARP_ROW ? (size_t)(2 * cols) * sizeof(float) : 0;
    HPMLG_RUN_ROWS(d, hpmlg_k_norm_back, (unsigned)parts, cols, shared, hpmlg_grad(n->src[0]), x, hpmlg_grad(n->out),
                   gamma, (const float2 *)saved, part, rows, cols, centred, n->accumulate[0]);
    if (part)
        HPMLG_RUN(d, hpmlg_k_norm_params, (unsigned)((2 * cols + HPMLG_WARP - 1) / HPMLG_WARP), 256, 0, dgamma, dbeta,
                  part, parts, cols, n->accumulate[1], n->accumulate[2]);
}
HPMLG_FN void hpmlg_op_layernorm(HPMLG_OP_ARGUMENTS) { hpmlg_norm(d, n, back); }
HPMLG_FN void hpmlg_op_rmsnorm(HPMLG_OP_ARGUMENTS) { hpmlg_norm(d, n, back); }

// ---------------------------------------------------------------------------------------------------------------------
// >>gpu-batchnorm   batch normalization
// ---------------------------------------------------------------------------------------------------------------------

/* Batch normalization, for each channel over its N = B P numbers (B images of P = H W pixels): y = gamma (x - mean)
   rstd + beta. Three kernels: blocks sum a split, a part of a channel's numbers, each; one thread for each channel
   joins the channel's splits in order; all elements are written. A split's result is (count, mean, sum of squared
   distances from the mean), joined as in Chan, Golub & LeVeque 1979, which loses no digits where the mean is far from
   zero. A thread joins the numbers that it reads in float, after subtracting the channel's first number. Backward, the
   same struct contains plain sums: its mean is s1 = sum dy, its square is sum dy (x - mean), from which s2 = sum dy
   xhat is computed (xhat = (x - mean) rstd). A block works on one channel, or on 32 neighbouring channels if P is 1. */

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

typedef struct hpmlg_bn {           /* the arguments of batchnorm's kernels */
    int64_t      B, C, P, N, width; /* B images, C channels, P = H W pixels, N = B P; width: channels of a block */
    int64_t      splits, unit;      /* splits of a channel; numbers read at once: 8 where 8 divides P, else 1 */
    hpmlg_array  x, y, dx, dy;
    const float *gamma, *beta;      /* (C), or NULL; dgamma and dbeta may be NULL too */
    float       *dgamma, *dbeta, *running_mean, *running_var;
    float2      *saved;             /* (C): mean, rstd */
    float       *rest;              /* (C): what rounding took from saved[c].x: the mean is saved[c].x + rest[c] */
    float       *coef;              /* (4, C): the coefficients a, b, pivot and two of hpmlg_k_bn_apply */
    hpmlg_moments<double> *part;    /* (splits, C): each split's count, mean and square (backward: 0 and two sums) */
    float        eps, momentum;
    bool         train, relu, add[3];
    bool         again;             /* true: forward is recomputed for backward: running statistics stay */
} hpmlg_bn;

/* Returns the offset in x of unit u of channel c, where a unit is s.unit (1 or 8) neighbouring numbers. */
HPMLG_DEVICE int64_t hpmlg_bn_offset(const hpmlg_bn &s, int64_t c, int64_t u)
{
    int64_t i = u * s.unit, image = hpmlg_quotient(i, s.P);
    return (image * s.C + c) * s.P + (i - image * s.P);
}

/* Loads up to 8 numbers of channel c of the array x into *e and returns their count. A unit is s.unit neighbouring
   numbers of a channel: if these are 8, loads unit u; if it is one, loads units u, u + d, ..., u + 7 d as far as they
   are below `to`, and 0 for the others, where d is the number of this block's threads for one channel. */
HPMLG_DEVICE int hpmlg_bn_load(const hpmlg_bn &s, hpmlg_array x, int64_t c, int64_t u, int64_t to, hpmlg_vec8 *e)
{
    int count = 0;
    if (s.unit == 8) {
        *e = hpmlg_get8(x, hpmlg_bn_offset(s, c, u) >> 3);
        return 8;
    }
    for (int j = 0; j < 8; j++) {
        int64_t v = u + j * (blockDim.x / s.width);
        e->v[j]   = v < to ? hpmlg_get(x, hpmlg_bn_offset(s, c, v)) : 0;
        count += v < to;
    }
    return count;
}

template <bool back> static __global__ void hpmlg_k_bn_splits(hpmlg_bn s)
{
    typedef typename std::conditional<back, double, float>::type T; /* the type of a thread's sums */
    __shared__ hpmlg_moments<double> all[256];
    int64_t c = (int64_t)blockIdx.x * s.width + threadIdx.x % s.width, units = s.N / s.unit;
    int64_t to = c < s.C ? units * (blockIdx.y + 1) / s.splits : 0;
    int64_t step = (int64_t)(blockDim.x / s.width) * (s.unit == 8 ? 1 : 8);
    float   mean = back && c < s.C ? s.saved[c].x : 0;
    /* pivot: the channel's first number, subtracted from all so that sums in float lose no digits */
    float   pivot = !back && units > 0 && c < s.C ? hpmlg_get(s.x, hpmlg_bn_offset(s, c, 0)) : 0;
    hpmlg_moments<T> mine = { 0, 0, 0 };
    for (int64_t u = units * blockIdx.y / s.splits + threadIdx.x / s.width; u < to; u += step) {
        hpmlg_vec8 e, f, z;
        float      sum = 0, other = 0, n = (float)hpmlg_bn_load(s, s.x, c, u, to, &e);
        if (back) {
            hpmlg_bn_load(s, s.dy, c, u, to, &f);
            if (s.relu) hpmlg_bn_load(s, s.y, c, u, to, &z);
            for (int j = 0; j < 8; j++) { /* dy is 0 beyond the end of the split */
                float v = s.relu && !(z.v[j] > 0) ? 0 : f.v[j];
                sum += v;
                other += v * (e.v[j] - mean);
            }
        } else {
            for (int j = 0; j < 8; j++) {
                e.v[j] = (float)j < n ? e.v[j] - pivot : 0;
                sum += e.v[j];
            }
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

/* Joins the sums over the splits, the parts of a channel's numbers, one thread for each channel. Forward: computes the
   mean and rstd of the batch, and updates the running statistics with them (in evaluation, mean and rstd are computed
   from the running statistics); if `back`: computes the gradients of gamma and beta. Both compute the coefficients of
   hpmlg_k_bn_apply: a = rstd gamma; forward b = beta - rest a, where mean + rest is the mean as two floats; if `back`,
   two = rstd s2 / N and b = s1 / N - rest two, where s1 = sum dy, s2 = sum dy xhat, xhat the normalized x. */
template <bool back> static __global__ void hpmlg_k_bn_channels(hpmlg_bn s)
{
    int64_t c = hpmlg_thread_index();
    float  *a = s.coef + c, *b = a + s.C, *pivot = b + s.C, *two = pivot + s.C;
    hpmlg_moments<double> all = { 0, 0, 0 };
    if (c >= s.C) return;
    for (int64_t i = 0; i < s.splits && (back || s.train); i++)
        all = hpmlg_moments_join<back>(all, s.part[i * s.C + c]);
    if (back) {
        double N = (double)s.N, s2 = (double)s.saved[c].y * (all.square - (double)s.rest[c] * all.mean);
        if (s.dgamma) s.dgamma[c] = (s.add[1] ? s.dgamma[c] : 0) + (float)s2;
        if (s.dbeta) s.dbeta[c] = (s.add[2] ? s.dbeta[c] : 0) + (float)all.mean;
        *a   = s.saved[c].y * (s.gamma ? s.gamma[c] : 1);
        *two = s.train ? s.saved[c].y * (float)(s2 / N) : 0;
        *b   = s.train ? (float)(all.mean / N) - s.rest[c] * *two : 0;
        *pivot = s.saved[c].x;
        return;
    }
    double mean = s.train ? all.mean : s.running_mean[c], var = s.train ? all.square / all.n : s.running_var[c];
    s.saved[c]  = make_float2((float)mean, (float)(1 / sqrt(var + (double)s.eps)));
    s.rest[c]   = (float)(mean - (double)s.saved[c].x);
    *a     = s.saved[c].y * (s.gamma ? s.gamma[c] : 1);
    *b     = (s.beta ? s.beta[c] : 0) - s.rest[c] * *a;
    *pivot = s.saved[c].x;
    if (!s.train || s.again) return;
    s.running_mean[c] = (1 - s.momentum) * s.running_mean[c] + s.momentum * (float)mean;
    s.running_var[c]  = (1 - s.momentum) * s.running_var[c] + s.momentum * (float)(all.square / fmax(all.n - 1, 1.0));
}

/* Computes, forward, y = a (x - pivot) + b, then relu if s.relu; if `back`, dx (+)= a (dy - b - (x - pivot) two), where
   with s.relu dy counts as 0 at y <= 0. The channel has the coefficients a, b, two and pivot, its mean as one float. A
   thread computes 8 neighbouring elements at a time; they may be of several channels, and of 8 where P is 1 (NHWC). */
template <bool back> static __global__ void hpmlg_k_bn_apply(hpmlg_bn s)
{
    int64_t n = s.B * s.C * s.P;
    HPMLG_FOR_EACH_VEC8(i, n) {
        int64_t    plane = hpmlg_quotient(i, s.P), r = i - plane * s.P, c = plane - hpmlg_quotient(plane, s.C) * s.C;
        bool       wide = s.P == 1 && c + 8 <= s.C;
        hpmlg_vec8 e = hpmlg_row_get(s.x, 0, n, i, 0), f, z, k[4];
        float      q[4] = { 0, 0, 0, 0 };
        if (back) f = hpmlg_row_get(s.dy, 0, n, i, 0);
        if (back && s.relu) z = hpmlg_row_get(s.y, 0, n, i, 0);
        HPMLG_UNROLL for (int m = 0; m < (back ? 4 : 3); m++)
            if (wide) k[m] = hpmlg_param_get8(s.coef + m * s.C, s.C, c, 0);
        HPMLG_UNROLL for (int j = 0; j < 8; j++, r++) {
            if (r == s.P) {
                r = 0;
                c = c + 1 == s.C ? 0 : c + 1;
            }
            HPMLG_UNROLL for (int m = 0; m < (back ? 4 : 3); m++) {
                if (wide) q[m] = k[m].v[j];
                else if (j == 0 || r == 0) q[m] = s.coef[m * s.C + c];
            }
            float apart = e.v[j] - q[2];
            if (back) e.v[j] = q[0] * ((s.relu && !(z.v[j] > 0) ? 0 : f.v[j]) - q[1] - apart * q[3]);
            else e.v[j] = hpmlg_act(s.relu ? HPML_ACT_RELU : HPML_ACT_NONE, 0, q[0] * apart + q[1]);
        }
        hpmlg_row_put(back ? s.dx : s.y, 0, n, i, e, back && s.add[0]);
    }
}

HPMLG_FN hpmlg_bn hpmlg_bn_of(const hpmlg_device *d, const hpml_node *n, bool train)
{
    const int64_t *y = n->out->shape; /* the sizes of dimensions beyond ndim are 1 */
    hpml_tensor *const *src = n->src;
    hpmlg_bn       s = {};
    s.B     = y[0];
    s.C     = y[1];
    s.P     = y[2] * y[3];
    s.N     = s.B * s.P;
    if (hpmlg_is_nhwc(n->out)) { /* in memory as N images of one pixel */
        s.B = s.N;
        s.P = 1;
    }
    s.width = s.P == 1 ? 32 : 1;
    int64_t   blocks = (s.C + s.width - 1) / s.width, splits = (d->sms * 8 + blocks - 1) / blocks;
    int64_t   of_block = 8 * (256 / s.width), useful = (s.N + of_block - 1) / of_block; /* 8 numbers a thread */
    uintptr_t addresses = (uintptr_t)src[0]->raw | (uintptr_t)n->out->raw | (uintptr_t)n->out->raw_grad;
    s.splits = splits < useful ? splits : useful;
    if (s.splits > HPMLG_BN_SPLITS) s.splits = HPMLG_BN_SPLITS;
    s.unit   = s.P % 8 == 0 && addresses % 16 == 0 ? 8 : 1;
    s.x      = hpmlg_value(src[0]);
    s.dx     = hpmlg_grad(src[0]);
    s.y      = hpmlg_value(n->out);
    s.dy     = hpmlg_grad(n->out);
    s.gamma  = hpmlg_param_value(n, 1);
    s.dgamma = hpmlg_param_grad(n, 1);
    s.beta   = hpmlg_param_value(n, 2);
    s.dbeta  = hpmlg_param_grad(n, 2);
    s.part   = (hpmlg_moments<double> *)n->scratch;
    s.coef   = (float *)(s.part + s.C * s.splits);
    s.saved  = (float2 *)n->saved;
    s.rest   = (float *)(s.saved + s.C);
    s.running_mean = src[3]->data;
    s.running_var  = src[4]->data;
    s.eps      = n->attr.norm.eps;
    s.momentum = n->attr.norm.momentum;
    s.train    = train;
    s.relu     = n->attr.norm.act == HPML_ACT_RELU;
    for (int i = 0; i < 3; i++) s.add[i] = n->accumulate[i];
    return s;
}

HPMLG_FN size_t hpmlg_bn_scratch(const hpmlg_device *d, const hpml_node *n)
{
    hpmlg_bn s = hpmlg_bn_of(d, n, true);
    return (size_t)(s.C * s.splits) * sizeof *s.part + (size_t)(4 * s.C) * sizeof *s.coef;
}

/* Sums the statistics (if `back`, the gradients' sums) over the ranks that share a batch: on the host, turns each
   split's count, mean and square into sums of x and of x^2 (if `back`, they are sums already), adds these up over the
   channel's splits and over the ranks, and uploads the totals as the only split (s->splits = 1; s->N: numbers of a
   channel on all ranks). The host waits for the device, so passes that call this are not captured. */
HPMLG_FN void hpmlg_bn_sum_ranks(const hpml_run *run, hpmlg_device *d, hpmlg_bn *s, bool back)
{
    size_t      bytes = (size_t)(s->C * s->splits) * sizeof *s->part;
    hpmlg_moments<double> *p = (hpmlg_moments<double> *)hpml_ctx_alloc(run->ctx, bytes, NULL);
    double     *sum = (double *)hpml_ctx_alloc(run->ctx, (size_t)(2 * s->C + 1) * sizeof(double), NULL);
    hpml_status status = p && sum ? hpmlg_read(d, p, s->part, bytes) : HPML_ERR_MEMORY;
    for (int64_t i = 0; i < s->C * s->splits && status == HPML_OK; i++) {
        double *to = sum + 2 * (i % s->C), n = back ? 0 : p[i].n;
        to[0] += back ? p[i].mean : n * p[i].mean;
        to[1] += p[i].square + n * p[i].mean * p[i].mean;
    }
    if (status == HPML_OK) {
        sum[2 * s->C] = (double)s->N;
        status = run->sum(run->sum_user, sum, 2 * s->C + 1);
    }
    for (int64_t c = 0; c < s->C && status == HPML_OK; c++) {
        double a = sum[2 * c], b = sum[2 * c + 1], N = sum[2 * s->C];
        p[c].n      = N;
        p[c].mean   = back ? a : a / N;
        p[c].square = back ? b : fmax(b - a * a / N, 0);
    }
    if (status == HPML_OK) {
        s->N   = (int64_t)sum[2 * s->C];
        status = hpmlg_write(d, s->part, p, (size_t)s->C * sizeof *p);
    }
    if (status != HPML_OK) hpml_ctx_fail(run->ctx, status, "batchnorm: the sums over all ranks could not be taken");
    hpml_ctx_release(run->ctx, p);
    hpml_ctx_release(run->ctx, sum);
    s->splits = 1;
}

HPMLG_FN void hpmlg_op_batchnorm(HPMLG_OP_ARGUMENTS)
{
    hpmlg_bn s = hpmlg_bn_of(d, n, run->train), all; /* s: of this rank; all: of all ranks that share the batch */
    bool     shared = run->train && run->sum;
    unsigned channels = (unsigned)((s.C + 127) / 128);
    dim3     grid((unsigned)((s.C + s.width - 1) / s.width), (unsigned)s.splits);
    if (run->idle) s.B = s.N = 0;
    s.again = run->again;
    all = s;
    if (back || s.train) HPMLG_RUN_BOOL(d, back, hpmlg_k_bn_splits, true, false, grid, 256, 0, s);
    if (back) HPMLG_RUN(d, hpmlg_k_bn_channels<true>, channels, 128, 0, s);
    if (shared) hpmlg_bn_sum_ranks(run, d, &all, back);
    all.dgamma = NULL; /* dgamma, dbeta: this rank's own sums, which the launch above has written */
    all.dbeta  = NULL;
    if (!back || shared) HPMLG_RUN_BOOL(d, back, hpmlg_k_bn_channels, true, false, channels, 128, 0, all);
    if (s.N == 0 || (back && !s.dx.p)) return;
    HPMLG_RUN_BOOL(d, back, hpmlg_k_bn_apply, true, false, hpmlg_grid_blocks(d, s.N * s.C, 2048), 256, 0, s);
}

// ---------------------------------------------------------------------------------------------------------------------
// >>gpu-pool   max and average pooling
// ---------------------------------------------------------------------------------------------------------------------

/* Pooling: one thread computes each output; backward one thread computes the gradient of each input, adding the
   gradients of the windows that contain it, in a fixed order and without atomics. Max pooling keeps the offset, within
   its plane, of the element that won; a NaN wins. Average pooling divides by the number of pixels inside the image. */
typedef struct hpmlg_pool {
    hpmlg_array x, y;    /* input and output; backward: their gradients */
    int        *winner;  /* (outputs): offset of the largest element in its plane; NULL: average pooling */
    int64_t     planes, pixel; /* NCHW: (images, channels), 1; NHWC: images, channels; pixel: distance of pixels */
    int         H, W, OH, OW, kh, kw, stride, pad;
    bool        add;
} hpmlg_pool;

/* Computes the row and the column of element i of an array (planes, h, w, pixel). Returns the offset, in such an array
   whose planes have `size` pixels, of the element in row 0 and column 0 that has the same other indices. */
HPMLG_DEVICE int64_t hpmlg_plane_position(int64_t i, int h, int w, int64_t pixel, int64_t size, int *row, int *column)
{
    int64_t p = hpmlg_quotient(i, pixel), q = hpmlg_quotient(p, w), plane = hpmlg_quotient(q, h);
    *column = (int)(p - q * w);
    *row    = (int)(q - plane * h);
    return plane * size * pixel + (i - p * pixel);
}

/* Computes [*from, *to), the pixels of pooling window number o along one dimension, limited to 0 to size - 1. */
HPMLG_DEVICE void hpmlg_window(int o, int stride, int pad, int kernel, int size, int *from, int *to)
{
    int first = o * stride - pad, end = first + kernel;
    *from = first < 0 ? 0 : first;
    *to   = end < size ? end : size;
}

static __global__ void hpmlg_k_pool(hpmlg_pool p)
{
    HPMLG_FOR_EACH(i, p.planes * p.pixel * p.OH * p.OW) {
        int     oh, ow, r0, r1, c0, c1;
        int64_t x = hpmlg_plane_position(i, p.OH, p.OW, p.pixel, (int64_t)p.H * p.W, &oh, &ow);
        hpmlg_window(oh, p.stride, p.pad, p.kh, p.H, &r0, &r1);
        hpmlg_window(ow, p.stride, p.pad, p.kw, p.W, &c0, &c1);
        int   best = r0 * p.W + c0;
        float v = p.winner ? hpmlg_get(p.x, x + best * p.pixel) : 0;
        for (int r = r0; r < r1; r++)
            for (int c = c0; c < c1; c++) {
                float w = hpmlg_get(p.x, x + (r * p.W + c) * p.pixel);
                if (!p.winner) v += w;
                else if (!(w <= v) && v == v) {
                    v    = w;
                    best = r * p.W + c;
                }
            }
        if (p.winner) p.winner[i] = best;
        hpmlg_put(p.y, i, p.winner ? v : v * (1 / (float)((r1 - r0) * (c1 - c0))));
    }
}

static __global__ void hpmlg_k_pool_back(hpmlg_pool p)
{
    HPMLG_FOR_EACH(i, p.planes * p.pixel * p.H * p.W) {
        int     r, c, r0, r1, c0, c1;
        int64_t y = hpmlg_plane_position(i, p.H, p.W, p.pixel, (int64_t)p.OH * p.OW, &r, &c);
        int     first_h = r + p.pad < p.kh ? 0 : (r + p.pad - p.kh) / p.stride + 1, last_h = (r + p.pad) / p.stride;
        int     first_w = c + p.pad < p.kw ? 0 : (c + p.pad - p.kw) / p.stride + 1, last_w = (c + p.pad) / p.stride;
        float   sum = p.add ? hpmlg_get(p.x, i) : 0;
        for (int oh = first_h; oh <= last_h && oh < p.OH; oh++)
            for (int ow = first_w; ow <= last_w && ow < p.OW; ow++) {
                int64_t o = y + (oh * p.OW + ow) * p.pixel;
                if (p.winner) {
                    if (p.winner[o] == r * p.W + c) sum += hpmlg_get(p.y, o);
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
    p.x      = hpmlg_value_or_grad(n->src[0], back);
    p.y      = hpmlg_value_or_grad(n->out, back);
    p.winner = n->op == HPML_OP_MAX_POOL2D ? (int *)n->saved : NULL;
    p.pixel  = hpmlg_is_nhwc(n->src[0]) ? x[1] : 1;
    p.planes = x[0] * x[1] / p.pixel;
    p.H      = (int)x[2];
    p.W      = (int)x[3];
    p.OH     = (int)y[2];
    p.OW     = (int)y[3];
    p.kh     = n->attr.conv.kernel[0];
    p.kw     = n->attr.conv.kernel[1];
    p.stride = n->attr.conv.stride[0];
    p.pad    = n->attr.conv.padding[0];
    p.add    = hpmlg_op_adds(n, back);
    if (back) return HPMLG_RUN_ITEMS(d, hpmlg_k_pool_back, hpml_tensor_count(n->src[0]), 256, p);
    if (!p.winner && p.pad == 0 && p.kh == p.H && p.kw == p.W) { /* global average pooling: the mean of each plane */
        int64_t pixels = x[2] * x[3];
        return hpmlg_sum_run(d, p.y, p.x, hpmlg_broadcast_strides(p.planes, pixels, p.pixel), 1 / (float)pixels, false);
    }
    HPMLG_RUN_ITEMS(d, hpmlg_k_pool, hpml_tensor_count(n->out), 256, p);
}
HPMLG_FN void hpmlg_op_max_pool2d(HPMLG_OP_ARGUMENTS) { hpmlg_pool_pass(d, n, back); }
HPMLG_FN void hpmlg_op_avg_pool2d(HPMLG_OP_ARGUMENTS) { hpmlg_pool_pass(d, n, back); }

// ---------------------------------------------------------------------------------------------------------------------
// >>gpu-random   Philox, dropout
// ---------------------------------------------------------------------------------------------------------------------

/* Returns random words 4 block to 4 block + 3 of sequence `stream` of `seed`, as the CPU's hpml_philox4x32 does. */
HPMLG_DEVICE uint4 hpmlg_philox(unsigned long long seed, unsigned long long stream, unsigned long long block)
{
    unsigned k0 = (unsigned)seed, k1 = (unsigned)(seed >> 32);
    uint4    c = make_uint4((unsigned)block, (unsigned)(block >> 32), (unsigned)stream, (unsigned)(stream >> 32));
    HPMLG_UNROLL for (int round = 0; round < 10; round++) {
        unsigned h0 = __umulhi(0xD2511F53u, c.x), l0 = 0xD2511F53u * c.x;
        unsigned h1 = __umulhi(0xCD9E8D57u, c.z), l1 = 0xCD9E8D57u * c.z;
        c = make_uint4(h1 ^ c.y ^ k0, l1, h0 ^ c.w ^ k1, l0);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return c;
}

/* Computes w = random words first to first + 7 of sequence number `stream` of `seed`. Philox makes blocks of 4 words:
   the 8 words are in two blocks, or in three where `first` is no multiple of 4. */
HPMLG_DEVICE void hpmlg_random_words8(unsigned w[8], unsigned long long seed, unsigned long long stream,
                                      unsigned long long first)
{
    uint4    a = hpmlg_philox(seed, stream, first / 4), b = hpmlg_philox(seed, stream, first / 4 + 1);
    uint4    c = first % 4 ? hpmlg_philox(seed, stream, first / 4 + 2) : a;
    unsigned all[12] = { a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w, c.x, c.y, c.z, c.w };
    HPMLG_UNROLL for (int j = 0; j < 10; j++) all[j] = first & 2 ? all[j + 2] : all[j];
    HPMLG_UNROLL for (int j = 0; j < 8; j++) w[j] = first & 1 ? all[j + 1] : all[j];
}

/* Computes y (+)= x scale where the element's random 32-bit word is at least `least`, else 0; add: adds to y. Word i
   belongs to element i, counted from the first sample of the global batch. key: step, seed and number of the first
   sample, in device memory; index: the node's number; each: elements of a sample. */
static __global__ void hpmlg_k_dropout(hpmlg_array y, hpmlg_array x, const hpmlg_random_key *key, int index,
                                       unsigned least, float scale, int64_t each, int64_t n, bool add)
{
    unsigned long long stream = key->step << 24 ^ (unsigned long long)index ^ 0xdull << 60;
    unsigned long long first = key->sample * (unsigned long long)each, seed = key->seed;
    HPMLG_FOR_EACH_VEC8(i, n) {
        hpmlg_vec8 e = hpmlg_row_get(x, 0, n, i, 0);
        unsigned   w[8];
        hpmlg_random_words8(w, seed, stream, first + (unsigned long long)i);
        for (int j = 0; j < 8; j++) e.v[j] = w[j] >= least ? e.v[j] * scale : 0;
        hpmlg_row_put(y, 0, n, i, e, add);
    }
}

HPMLG_FN void hpmlg_op_dropout(HPMLG_OP_ARGUMENTS)
{
    hpmlg_array to = hpmlg_op_output(n, back), from = hpmlg_op_input(n, back);
    float       p  = n->attr.dropout.p;
    int64_t     count = hpml_tensor_count(n->out), each = 0;
    bool        add   = hpmlg_op_adds(n, back);
    if (!run->train || p <= 0) {
        if (from.p != to.p || add) hpmlg_copy_run(d, to, from, count, add);
        return;
    }
    if (n->out->batch_rows) each = count / (n->out->shape[0] / n->out->batch_rows);
    hpmlg_random_key_set(d, run);
    HPMLG_RUN_ITEMS(d, hpmlg_k_dropout, count, 2048, to, from, (const hpmlg_random_key *)d->random_key, n->index,
                    (unsigned)((double)p * 4294967296.0), 1 / (1 - p), each, count, add);
}

// ---------------------------------------------------------------------------------------------------------------------
// >>gpu-embedding   rows of a table, and their gradient
// ---------------------------------------------------------------------------------------------------------------------

/* The gradient of an embedding's table is computed without float atomics: the positions of each token in the batch are
   listed and sorted, then the gradients at these positions are added in order to the token's row of the table. Entries
   of the lists are assigned by integer atomics, in any order, and sorted afterwards. A token of more than HPMLG_LONG
   positions, such as a blank, is long: its positions are cut into pieces of HPMLG_LONG positions, whose sums are
   computed one by one and then added in order. */
#define HPMLG_LONG 64
typedef struct hpmlg_token_lists {
    const int *token;              /* (tokens): the token at each position */
    int64_t    tokens, vocabulary;
    int64_t    most_pieces;        /* upper bound of the number of pieces of long tokens */
    int       *count, *used;       /* (vocabulary): times each token occurs; (2): entries used in `order`, `piece` */
    int       *start;              /* (vocabulary): offset of a token's positions in `order` */
    int       *first;              /* (vocabulary): index in `piece` of a long token's first piece */
    int       *slot, *order;       /* (tokens): slot: each position's number among the positions of its token, later all
                                      positions by token, sorted; order: the same, but unsorted for each token */
    int       *piece;              /* (most_pieces): the token that a piece belongs to */
    float     *sums;               /* (most_pieces, width): the sum of dy over each piece's positions */
} hpmlg_token_lists;

/* Computes y[i] = table[token[i]], a warp for each row i; a token out of range gives a row of zeros, and is reported to
   the host through *note as an error of `node`. */
static __global__ void hpmlg_k_embedding(hpmlg_array y, hpmlg_array table, hpmlg_token_lists b, int64_t width,
                                         hpmlg_note *note, int *taken, const hpml_node *node)
{
    int lane = (int)threadIdx.x % HPMLG_WARP;
    HPMLG_FOR_EACH_WARP(i, b.tokens) {
        int  t  = b.token[i];
        bool ok = t >= 0 && t < b.vocabulary;
        if (!ok && lane == 0) hpmlg_report_index(note, taken, i, t, node);
        for (int64_t c = 8 * lane; c < width; c += 8 * HPMLG_WARP)
            hpmlg_row_put(y, i, width, c, hpmlg_row_get(table, t, ok ? width : 0, c, 0), false);
    }
}

/* Builds the lists of each token's positions in four launches, a thread for each position. Step 0 counts the positions
   of each token and numbers them (`slot`); in step 1 the position numbered 0 reserves entries of `order` for its token
   and, if these are more than HPMLG_LONG, entries of `piece`, one for each HPMLG_LONG of them; step 2 fills `order`;
   step 3 sorts each token's positions into `slot`, whose numbers are not needed any more. */
static __global__ void hpmlg_k_token_lists(hpmlg_token_lists b, int step)
{
    int64_t i = hpmlg_thread_index();
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

/* Returns the sum, for columns c to c + 7, of n rows of the matrix x (width columns): of the rows whose numbers are
   at[0] to at[n - 1] or, where `at` is NULL, of rows 0 to n - 1. */
HPMLG_DEVICE hpmlg_vec8 hpmlg_rows_sum(hpmlg_array x, const int *at, int n, int64_t width, int64_t c)
{
    hpmlg_vec8 sum = {}, e[4];
    for (int k = 0; k < n; k += 4) { /* 4 rows at a time, so that four loads are in flight */
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

/* Sums the rows of dy over each piece of a token's positions in the batch: tokens with over HPMLG_LONG (64) positions
   have pieces of up to 64. A warp sums 256 columns of a piece. */
static __global__ void hpmlg_k_embedding_pieces(hpmlg_array dy, hpmlg_token_lists b, int64_t width)
{
    int64_t     parts = (width + 255) / 256;
    hpmlg_array sums = { b.sums, HPML_DTYPE_F32 };
    HPMLG_FOR_EACH_WARP(u, b.used[1] * parts) {
        int64_t p = hpmlg_quotient(u, parts), c = (u - p * parts) * 256 + 8 * (threadIdx.x % HPMLG_WARP);
        int     t = b.piece[p], from = (int)(p - b.first[t]) * HPMLG_LONG, n = b.count[t] - from;
        hpmlg_row_put(sums, p, width, c,
                      hpmlg_rows_sum(dy, b.slot + b.start[t] + from, n < HPMLG_LONG ? n : HPMLG_LONG, width, c), false);
    }
}

/* Computes the gradient of an embedding's table, dw: row t (+)= the sum of the rows of dy at all positions of the batch
   whose token is t (listed in b); add: adds to dw. One warp computes 256 of a row's `width` columns. */
static __global__ void hpmlg_k_embedding_back(hpmlg_array dw, hpmlg_array dy, hpmlg_token_lists b, int64_t width,
                                              bool add)
{
    int64_t parts = (width + 255) / 256;
    HPMLG_FOR_EACH_WARP(u, b.vocabulary * parts) {
        int64_t     t = hpmlg_quotient(u, parts), c = (u - t * parts) * 256 + 8 * (threadIdx.x % HPMLG_WARP);
        int         n = b.count[t];
        bool        cut = n > HPMLG_LONG;
        const int  *at = n && !cut ? b.slot + b.start[t] : NULL;
        hpmlg_array from = dy;
        if (n == 0 && add) continue;
        if (cut) {
            from.p    = b.sums + b.first[t] * width;
            from.type = HPML_DTYPE_F32;
            n         = (n + HPMLG_LONG - 1) / HPMLG_LONG;
        }
        hpmlg_row_put(dw, t, width, c, hpmlg_rows_sum(from, at, n, width, c), add);
    }
}

/* Sets the pointers of b, lists of the positions of each token, to places in node n's scratch memory, if that is
   allocated; returns the number of bytes that the lists need. */
HPMLG_FN size_t hpmlg_embedding_layout(const hpml_node *n, hpmlg_token_lists *b)
{
    b->tokens      = hpml_tensor_count(n->src[0]);
    b->vocabulary  = n->src[1]->shape[0];
    b->most_pieces = 2 * b->tokens / HPMLG_LONG; /* because a token of 65 positions already has two pieces */
    int64_t sums  = b->most_pieces * n->src[1]->shape[1];
    size_t  bytes = (size_t)(sums + 3 * b->vocabulary + 2 + 2 * b->tokens + b->most_pieces) * sizeof(int);
    if (!n->scratch) return bytes;
    b->sums  = (float *)n->scratch;
    b->count = (int *)n->scratch + sums;
    b->used  = b->count + b->vocabulary;
    b->start = b->used + 2;
    b->first = b->start + b->vocabulary;
    b->slot  = b->first + b->vocabulary;
    b->order = b->slot + b->tokens;
    b->piece = b->order + b->tokens;
    return bytes;
}

HPMLG_FN void hpmlg_op_embedding(HPMLG_OP_ARGUMENTS)
{
    hpmlg_array       table = hpmlg_value_or_grad(n->src[1], back), y = hpmlg_value_or_grad(n->out, back);
    int64_t           width = n->src[1]->shape[1], parts = (width + 255) / 256;
    hpmlg_token_lists b = {};
    b.token = (const int *)n->src[0]->raw;
    hpmlg_embedding_layout(n, &b);
    if (!back)
        return HPMLG_RUN_ITEMS(d, hpmlg_k_embedding, b.tokens, 8, y, table, b, width, d->note, d->note_taken,
                               (const hpml_node *)n);
    if (!table.p) return;
    hpmlg_zero(d, b.count, (size_t)(b.vocabulary + 2) * sizeof(int));
    for (int step = 0; step < 4; step++)
        HPMLG_RUN(d, hpmlg_k_token_lists, (unsigned)((b.tokens + 255) / 256), 256, 0, b, step);
    if (b.most_pieces > 0) HPMLG_RUN_ITEMS(d, hpmlg_k_embedding_pieces, b.most_pieces * parts, 8, y, b, width);
    HPMLG_RUN_ITEMS(d, hpmlg_k_embedding_back, b.vocabulary * parts, 8, table, y, b, width, n->accumulate[1]);
}

// =====================================================================================================================
// PART IV    PRODUCTS: matrices and convolutions, by own kernels and by libraries
// =====================================================================================================================

// ---------------------------------------------------------------------------------------------------------------------
// >>gpu-operand   operands of products: the addresses of their elements
// ---------------------------------------------------------------------------------------------------------------------

/* All products, convolutions included, are one sum, c[row, col] = sum over k of a[row, k] b[k, col]; they differ in the
   addresses of the elements of the operands a and b. An operand has two axes: its lines (rows of a, columns of b) and
   k. An axis splits an index i into q, u and v, i = (q nu + u) nv + v, and has a distance for each of q, u and v: in
   memory and, for images, in height and width; an element outside of the image is 0. One kernel gathers the elements of
   any operands (edges, any strides, mixed types; f32, tf32 or halves), another copies 16 bytes at a time from dense
   halves. A block of 128 threads computes a tile of T x T elements of c. When there are too few tiles to fill the
   device, k is cut into splits, whose sums are added in order. */

/* Divides n < 2^31 by `by` as n mul >> shift, with mul = ceil(2^shift / by) and shift = 31 + ceil(log2(by)). */
typedef struct hpmlg_divisor { unsigned shift, mul, by, unused; } hpmlg_divisor;

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
    hpmlg_divisor block, row; /* nu nv and nv, which split an index (q nu + u) nv + v */
    int64_t   q, u, v;        /* distances in memory, in elements, from one q, u or v to the next */
    int16_t   h0, h, w0, w;   /* for images: index i lies at height h0 + u h and width w0 + v w */
} hpmlg_axis;

typedef struct __align__(16) hpmlg_coord { /* the part of an element's position that is due to its index on one axis */
    int64_t at;   /* offset in elements; below 0: beyond the end of the axis */
    int     h, w; /* height and width; the parts due to the two axes are added up */
} hpmlg_coord;

HPMLG_FN hpmlg_axis hpmlg_axis_3d(int64_t nu, int64_t nv, int64_t q, int64_t u, int64_t v)
{
    hpmlg_axis x = {};
    x.block = hpmlg_divisor_of(nu * nv);
    x.row   = hpmlg_divisor_of(nv);
    x.q     = q;
    x.u     = u;
    x.v     = v;
    return x;
}

HPMLG_FN hpmlg_axis hpmlg_axis_1d(int64_t step) { return hpmlg_axis_3d(1, 1, step, 0, 0); }

HPMLG_DEVICE hpmlg_coord hpmlg_coord_of(const hpmlg_axis &x, int64_t i, int64_t end)
{
    hpmlg_coord s = { -1, 0, 0 };
    if (i >= end) return s;
    unsigned q = hpmlg_divide((unsigned)i, x.block), r = (unsigned)i - q * x.block.by;
    unsigned u = hpmlg_divide(r, x.row), v = r - u * x.row.by;
    s.at = q * x.q + u * x.u + v * x.v;
    s.h  = x.h0 + (int)u * x.h;
    s.w  = x.w0 + (int)v * x.w;
    return s;
}

typedef struct hpmlg_operand {
    hpmlg_array x;
    int64_t     batch;        /* distance in elements from one matrix of the batch to the next */
    hpmlg_axis  line, k;
    int64_t     H, W, pixel;  /* size of the image; distance in memory of pixels; H 0: the operand is not an image */
    int64_t     along_k;      /* 1: neighbours in k are closer in memory than neighbouring lines; 0: they are not */
    int64_t     ld;           /* distance of elements along one axis, if they are neighbours along the other; else 0 */
} hpmlg_operand;

/* Returns the element of operand o at the coordinates `line` (row of a left operand, column of a right one) and `k`; 0
   outside of the matrix or image. base: offset of the matrix in the batch. */
HPMLG_DEVICE float hpmlg_operand_get(const hpmlg_operand &o, int64_t base, hpmlg_coord line, hpmlg_coord k)
{
    int64_t at = base + line.at + k.at;
    if (line.at < 0 || k.at < 0) return 0;
    if (o.H) {
        int h = line.h + k.h, w = line.w + k.w;
        if ((unsigned)h >= (unsigned)o.H || (unsigned)w >= (unsigned)o.W) return 0;
        at += ((int64_t)h * o.W + w) * o.pixel;
    }
    return hpmlg_get(o.x, at);
}

/* A batch of products c = act(alpha a b (+ c) + bias), c of (m, n); + c if `add`. The input of act is saved in z,
   unless z.p is NULL. If `back`, instead c = (alpha a b (+ c)) act'(z), where z is read. */
typedef struct hpmlg_product {
    int64_t       m, n, k, batch;
    hpmlg_operand a, b;
    hpmlg_array   c, z;
    int64_t       ldc, c_batch;
    hpmlg_axis    col;           /* if not flat: where the elements of a row of c lie in memory */
    int64_t       flat, by_vec8; /* flat: 1: each row of c is contiguous; by_vec8: 1: c can be moved in vec8s */
    int64_t       add;
    float         alpha, slope;
    const float  *bias;
    int64_t       bias_row, bias_col, bias_batch; /* distances in `bias` from a row, column or matrix to the next */
    int64_t       act, back;
    int64_t       half;          /* HPML_DTYPE_BF16 or _F16: the type of operands in halves */
    float        *part;          /* (splits, batch, m, n): sums of the splits; NULL: one split, which writes c */
    int64_t       splits, k_each;
    int64_t       tiles_m, tiles_n;
} hpmlg_product;

HPMLG_DEVICE float hpmlg_add_bias(const hpmlg_product &g, int64_t batch, int64_t row, int64_t col, float v)
{
    return g.bias ? v + g.bias[batch * g.bias_batch + row * g.bias_row + col * g.bias_col] : v;
}

/* Computes element (row, col) of matrix `batch` of c from its sum v: scales, adds bias, applies act, and stores it. */
HPMLG_DEVICE void hpmlg_store_result(const hpmlg_product &g, int64_t batch, int64_t row, int64_t col, float v)
{
    int64_t at = batch * g.c_batch + row * g.ldc + (g.flat ? col : hpmlg_coord_of(g.col, col, g.n).at);
    v = hpmlg_add_bias(g, batch, row, col, v * g.alpha);
    if (g.add) v += hpmlg_get(g.c, at);
    if (g.back) v *= hpmlg_derivative_called((int)g.act, g.slope, hpmlg_get(g.z, at));
    else if (g.z.p) hpmlg_put(g.z, at, v);
    if (g.act && !g.back) v = hpmlg_act_called((int)g.act, g.slope, v);
    hpmlg_put(g.c, at, v);
}

/* Computes elements col to col + 7 of a row of matrix `batch` of c from their sums e, and stores them: scales, adds
   bias, applies act, as hpmlg_store_result does for one element. col and the row's offset: multiples of 8. */
HPMLG_DEVICE void hpmlg_store_result8(const hpmlg_product &g, int64_t batch, int64_t row, int64_t col, hpmlg_vec8 e)
{
    int64_t    at  = (batch * g.c_batch + row * g.ldc + col) / 8;
    hpmlg_vec8 old = {};
    if (g.add) old = hpmlg_get8(g.c, at);
    HPMLG_UNROLL for (int j = 0; j < 8; j++)
        e.v[j] = hpmlg_add_bias(g, batch, row, col + j, e.v[j] * g.alpha) + old.v[j];
    if (g.z.p && !g.back) hpmlg_put8(g.z, at, e);
    if (g.back) {
        old = hpmlg_get8(g.z, at);
        HPMLG_UNROLL for (int j = 0; j < 8; j++) e.v[j] *= hpmlg_derivative_called((int)g.act, g.slope, old.v[j]);
    } else if (g.act == HPML_ACT_RELU) {
        HPMLG_UNROLL for (int j = 0; j < 8; j++) e.v[j] = hpmlg_act(HPML_ACT_RELU, 0, e.v[j]);
    } else if (g.act) {
        HPMLG_UNROLL for (int j = 0; j < 8; j++) e.v[j] = hpmlg_act_called((int)g.act, g.slope, e.v[j]);
    }
    hpmlg_put8(g.c, at, e);
}

// ---------------------------------------------------------------------------------------------------------------------
// >>gpu-tiles   product kernels: dense halves on tensor cores, and any operands
// ---------------------------------------------------------------------------------------------------------------------

/* One block computes one block tile of c, T = 64 or 128 rows and columns, its four warps a quarter each:

                             b (32 k, T)
                         +--------+--------+      The tiles of a and b for 32 k are one stage in shared memory. Four
                         +--------+--------+      stages form a ring: while one is multiplied, copies fill the others.
        a (T, 32 k)      c (T, T)
          +----+         +--------+--------+      A warp tile, (64, 64) for T = 128, is 4 x 8 fragments (16, 8), the
          |    |         | warp 0 | warp 1 |      shape that one tensor-core instruction (mma) computes from 16 k:
          +----+         +--------+--------+      4 x 8 mma read 4 + 4 fragments of a and b from shared memory. Each
          |    |         | warp 2 | warp 3 |      lane holds 4 floats of every fragment of c: 128 registers.
          +----+         +--------+--------+

   The same in scalar code (x[i ..] stands for a slice, loops over the threads' elements are left out):

       for (row = 0; row < m; row += T)                        each (row, col) is a block
           for (col = 0; col < n; col += T) {
               float acc[T][T] = { 0 };                        in registers
               for (k = 0; k < K; k += 32) {                   a stage
                   a_tile = a[row .. row + T][k .. k + 32];    hpmlg_dense_stage
                   b_tile = b[k .. k + 32][col .. col + T];
                   for (s = 0; s < 32; s += 16)                hpmlg_half_step
                       for (i = 0; i < T; i += 16)             fragments
                           for (j = 0; j < T; j += 8)
                               acc[i ..][j ..] += a_tile[i ..][s ..] * b_tile[s ..][j ..];    hpmlg_mma_16816
               }
               c[row ..][col ..] = epilogue(acc);              hpmlg_store_tile
           }

   hpmlg_tile: the tile at (row, col) of matrix `batch` of c, summed over k from k0 to k1 - 1, split number `split`. */

typedef struct hpmlg_tile { int64_t batch, split, row, col, k0, k1; } hpmlg_tile;

/* Returns the tile of T x T elements of c that this block computes. Blocks that run at the same time have tiles in 8
   rows of tiles, so that they share rows of a and columns of b in the cache. */
template <int T> HPMLG_DEVICE hpmlg_tile hpmlg_block_tile(const hpmlg_product &g)
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

/* Returns the index of element (row, col) of a tile (T, T) of sums in shared memory: scattered so that neither
   hpmlg_store_tile's writes nor its reads have bank conflicts. */
template <int T> HPMLG_DEVICE int hpmlg_sum_offset(int row, int col) { return row * T + (col ^ (row & 3) << 3); }

/* Stores the sums of tile t (T x T) of c, which the threads have in their registers acc[], in the layout of tensor-core
   fragments (MMA) or in that of hpmlg_f32_step: the sums pass through the shared memory `sums`, so that each thread
   then has 8 neighbours of a row to store. With MMA, warp w of 4 has one quarter of the tile: the one in the upper or
   lower half w / 2 and the left or right half w % 2. */
template <int T, bool MMA>
HPMLG_DEVICE void hpmlg_store_tile(const hpmlg_product &g, hpmlg_tile t, const float *acc, float *sums)
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
        *(float2 *)&sums[hpmlg_sum_offset<T>(row, col)] = make_float2(acc[i], acc[i + 1]);
    }
    __syncthreads();
    HPMLG_ROLLED for (int i = id; i < T * T / 8; i += 128) {
        int          r = i / (T / 8), c = i % (T / 8) * 8;
        int64_t      row = t.row + r, col = t.col + c;
        const float *from = &sums[hpmlg_sum_offset<T>(r, c)];
        if (row >= g.m || col >= g.n) continue;
        if (g.part) {
            float *to = g.part + ((t.split * g.batch + t.batch) * g.m + row) * g.n + col;
            for (int j = 0; j < 8 && col + j < g.n; j++) to[j] = from[j];
        } else if (g.by_vec8 && col + 8 <= g.n) {
            hpmlg_store_result8(g, t.batch, row, col, hpmlg_get8({ (void *)from, HPML_DTYPE_F32 }, 0));
        } else {
            for (int j = 0; j < 8 && col + j < g.n; j++) hpmlg_store_result(g, t.batch, row, col + j, from[j]);
        }
    }
}

/* The order of an operand's tile in shared memory: 16-bit floats as [line][32 k] or [32 k][line] (line: row of the left
   operand, column of the right one), in 16-byte units permuted to avoid bank conflicts; or, for an operand that
   hpmlg_gather_load reads, as [line][16 k]. */
enum hpmlg_layout { HPMLG_K_MAJOR, HPMLG_LINE_MAJOR, HPMLG_GATHERED };

/* Returns the index of element (line, k) of an operand's tile of T lines in shared memory; L: its hpmlg_layout. */
template <int T, int L> HPMLG_DEVICE int hpmlg_tile_offset(int line, int k)
{
    if (L == HPMLG_K_MAJOR) return line * 32 + ((k >> 3) ^ (line >> 1 & 3)) * 8 + (k & 7);
    if (L == HPMLG_LINE_MAJOR) return k * T + ((line >> 3) ^ (k & 7)) * 8 + (line & 7);
    return line * 24 + k;
}

/* Loads lines `line` to line + 15 at k to k + 15 of the tile x into r as hpmlg_mma_16816 needs them: one fragment of
   the left operand a or, if `b`, two of the right operand. T: lines of the tile; L: its hpmlg_layout. */
template <int T, int L>
HPMLG_DEVICE void hpmlg_fragment(unsigned r[4], const unsigned short *x, int line, int k, bool b)
{
    int lane = (int)threadIdx.x % 32, in = lane % 8, low = lane / 8 % 2, high = lane / 16;
    int l8 = line + (b ? high : low) * 8, k8 = k + (b ? low : high) * 8;
    if (L == HPMLG_LINE_MAJOR) hpmlg_ldmatrix_x4_trans(r, x + hpmlg_tile_offset<T, L>(l8, k8 + in));
    else hpmlg_ldmatrix_x4(r, x + hpmlg_tile_offset<T, L>(l8 + in, k8));
}

/* Adds the products over 16 values of the summed index, from k on, of the tiles a and b (T lines of f16 if F16, else
   bf16; LA, LB: their layouts in shared memory) to acc, the warp's quarter of the tile of sums. */
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

/* Starts the copy of a tile of 16-bit floats, T lines by 32 values of the summed index k, to shared memory, in layout
   L. x: the tile's first element; ld: elements from one line to the next or, in layout HPMLG_LINE_MAJOR, from one k to
   the next; lines, ks: how many lines and values of k the operand has from x on; the rest of the tile becomes 0. */
template <int T, int L>
HPMLG_DEVICE void hpmlg_dense_load(unsigned short *tile, const unsigned short *x, int64_t ld, int64_t lines, int64_t ks)
{
    HPMLG_UNROLL for (int i = 0; i < T / 32; i++) {
        int piece = (int)threadIdx.x + 128 * i, line, k;
        if (L == HPMLG_K_MAJOR) {
            line = piece / 4;
            k    = piece % 4 * 8;
        } else {
            k    = piece / (T / 8);
            line = piece % (T / 8) * 8;
        }
        hpmlg_copy_async16(tile + hpmlg_tile_offset<T, L>(line, k),
                           L == HPMLG_K_MAJOR ? x + line * ld + k : x + k * ld + line, line < lines && k < ks);
    }
}

#define HPMLG_STAGES 4

/* Starts the copies of both operands' tiles, of T lines by 32 values of k, number `step` of this block's, into one of
   the four stages in shared memory in turn. LA, LB: the layouts of the left and the right operand's tiles. */
template <int T, int LA, int LB>
HPMLG_DEVICE void hpmlg_dense_stage(const hpmlg_product &g, const hpmlg_tile &t, int64_t step, unsigned short *tiles)
{
    unsigned short       *at = tiles + step % HPMLG_STAGES * (2 * T * 32);
    int64_t               k  = t.k0 + step * 32;
    const unsigned short *a  = (const unsigned short *)g.a.x.p + t.batch * g.a.batch;
    const unsigned short *b  = (const unsigned short *)g.b.x.p + t.batch * g.b.batch;
    if (k < t.k1) {
        a += LA == HPMLG_K_MAJOR ? t.row * g.a.ld + k : k * g.a.ld + t.row;
        b += LB == HPMLG_K_MAJOR ? t.col * g.b.ld + k : k * g.b.ld + t.col;
        hpmlg_dense_load<T, LA>(at, a, g.a.ld, g.m - t.row, t.k1 - k);
        hpmlg_dense_load<T, LB>(at + T * 32, b, g.b.ld, g.n - t.col, t.k1 - k);
    }
    hpmlg_copy_commit(); /* a group per step, even an empty one, because hpmlg_copy_wait counts groups */
}

/* Computes a tile, T x T, of a product of dense 16-bit floats: in four stages of 32 values of the summed index k, three
   of which are copied while one is multiplied. LA, LB: the layouts of the operands' tiles in shared memory. */
template <int T, int LA, int LB>
static __global__ void __launch_bounds__(128, 2) hpmlg_k_product_dense(const __grid_constant__ hpmlg_product g)
{
    HPMLG_SHARED(unsigned short, tiles);
    hpmlg_tile t = hpmlg_block_tile<T>(g);
    int64_t    steps = (t.k1 - t.k0 + 31) / 32;
    float      acc[T * T / 128] = {};
    for (int s = 0; s < HPMLG_STAGES - 1; s++) hpmlg_dense_stage<T, LA, LB>(g, t, s, tiles);
    HPMLG_ROLLED for (int64_t s = 0; s < steps; s++) {
        const unsigned short *a = tiles + s % HPMLG_STAGES * (2 * T * 32);
        hpmlg_copy_wait(HPMLG_STAGES - 2);
        __syncthreads(); /* stage s has arrived for all threads, and no thread reads stage s - 1 any more */
        hpmlg_dense_stage<T, LA, LB>(g, t, s + HPMLG_STAGES - 1, tiles);
        if (g.half == HPML_DTYPE_F16) {
            hpmlg_half_step<T, LA, LB, true>(acc, a, a + T * 32, 0);
            hpmlg_half_step<T, LA, LB, true>(acc, a, a + T * 32, 16);
        } else {
            hpmlg_half_step<T, LA, LB, false>(acc, a, a + T * 32, 0);
            hpmlg_half_step<T, LA, LB, false>(acc, a, a + T * 32, 16);
        }
    }
    hpmlg_store_tile<T, true>(g, t, acc, (float *)(void *)tiles); /* no copy writes to `tiles` any more */
}

/* The type in which the kernel hpmlg_k_product_gather multiplies. */
enum hpmlg_gather_type { HPMLG_IN_F32, HPMLG_IN_TF32, HPMLG_IN_HALF };

/* Loads a tile of operand o, T lines (rows of A, columns of B) by 16 values of the summed index k, into registers v,
   element by element. base: offset of the matrix; lines, ks: coordinates of the lines and of the 16 values. */
template <int T>
HPMLG_DEVICE void hpmlg_gather_load(float *v, const hpmlg_operand &o, int64_t base, const hpmlg_coord *lines,
                                    const hpmlg_coord *ks)
{
    HPMLG_UNROLL for (int j = 0; j < T / 8; j++) {
        int i = (int)threadIdx.x + 128 * j;
        v[j]  = hpmlg_operand_get(o, base, lines[o.along_k ? i / 16 : i % T], ks[o.along_k ? i % 16 : i / T]);
    }
}

/* Returns v rounded to tf32, for an instruction that cuts off 13 bits: adds half of the last place kept, 0x1000. A NaN
   becomes 0x7fffffff, because 0x7fffffff + 0x1000, with 13 bits cut off, is -0. */
HPMLG_DEVICE unsigned hpmlg_tf32(float v) { return v == v ? __float_as_uint(v) + 0x1000u : 0x7fffffffu; }

/* Stores to shared memory the tile (T lines by 16 k) that hpmlg_gather_load has loaded into registers v. KIND, an
   hpmlg_gather_type, sets the order: f32 as [k][line], tf32 as [line][k], 16-bit floats (of type `type`) as [line][k],
   at hpmlg_tile_offset. along_k: neighbouring threads have neighbouring k, else neighbouring lines. */
template <int T, int KIND>
HPMLG_DEVICE void hpmlg_gather_store(void *tile, const float *v, int64_t along_k, int type)
{
    HPMLG_UNROLL for (int j = 0; j < T / 8; j++) {
        int i = (int)threadIdx.x + 128 * j, line = along_k ? i / 16 : i % T, k = along_k ? i % 16 : i / T;
        if (KIND == HPMLG_IN_F32) ((float *)tile)[k * (T + 4) + line] = v[j];
        else if (KIND == HPMLG_IN_TF32) ((unsigned *)tile)[line * 20 + k] = hpmlg_tf32(v[j]);
        else ((unsigned short *)tile)[hpmlg_tile_offset<T, HPMLG_GATHERED>(line, k)] =
                 (unsigned short)hpmlg_narrow(v[j], 0, type);
    }
}

/* Adds the products over 16 values of k of the f32 tiles a and b in shared memory to acc, this thread's part of the T x
   T tile of sums: 16 rows of 8 columns (T = 128), or 8 of 4 (T = 64). */
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

/* Adds the products over 16 values of k of the tiles a and b, in shared memory, in tf32 on tensor cores to acc, the
   warp's quarter of the T x T tile of sums. */
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
            fb[0] = b[j * 8 * 20 + k];
            fb[1] = b[j * 8 * 20 + k + 4];
            HPMLG_UNROLL for (int i = 0; i < T / 32; i++) hpmlg_mma_1688_tf32(acc + (i * (T / 16) + j) * 4, fa[i], fb);
        }
    }
}

#define HPMLG_TILE_BYTES(T, KIND)                                                                                      \
    ((KIND) == HPMLG_IN_F32 ? 16 * ((T) + 4) * 4 : (KIND) == HPMLG_IN_TF32 ? (T) * 80 : (T) * 48)

/* Computes a product of any operands, a T x T tile for each block: loads 16 values of the summed index k at a time
   through registers into one of two stages in shared memory, and multiplies in the type KIND, an hpmlg_gather_type. */
template <int T, int KIND>
static __global__ void __launch_bounds__(128, 2) hpmlg_k_product_gather(const __grid_constant__ hpmlg_product g)
{
    enum { BYTES = HPMLG_TILE_BYTES(T, KIND) };
    HPMLG_SHARED(unsigned char, shared);
    hpmlg_coord   *lines = (hpmlg_coord *)shared, *ks = lines + 2 * T; /* lines: T of a, T of b; ks: 2 x 16 of each */
    unsigned char *tiles = shared + (2 * T + 64) * sizeof(hpmlg_coord);
    hpmlg_tile     t     = hpmlg_block_tile<T>(g);
    int            id = (int)threadIdx.x, steps = (int)((t.k1 - t.k0 + 15) / 16);
    float          acc[T * T / 128] = {}, va[T / 8], vb[T / 8];
    for (int i = id; i < 2 * T; i += 128)
        lines[i] = i < T ? hpmlg_coord_of(g.a.line, t.row + i, g.m) : hpmlg_coord_of(g.b.line, t.col + i - T, g.n);
    for (int s = -2; s < steps; s++) { /* finds the coordinates of step s + 2, loads step s + 1, multiplies step s */
        unsigned char *now = tiles + (s & 1) * 2 * BYTES, *next = tiles + (~s & 1) * 2 * BYTES;
        hpmlg_coord   *soon = ks + (~s & 1) * 32;
        bool           load = s >= -1 && s + 1 < steps;
        if (load) {
            hpmlg_gather_load<T>(va, g.a, t.batch * g.a.batch, lines, soon);
            hpmlg_gather_load<T>(vb, g.b, t.batch * g.b.batch, lines + T, soon + 16);
        }
        if (id < 32) {
            int64_t k = t.k0 + (int64_t)(s + 2) * 16 + id % 16;
            ks[(s & 1) * 32 + id] = id < 16 ? hpmlg_coord_of(g.a.k, k, t.k1) : hpmlg_coord_of(g.b.k, k, t.k1);
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
            hpmlg_gather_store<T, KIND>(next, va, g.a.along_k, (int)g.half);
            hpmlg_gather_store<T, KIND>(next + BYTES, vb, g.b.along_k, (int)g.half);
        }
        __syncthreads();
    }
    hpmlg_store_tile<T, KIND != HPMLG_IN_F32>(g, t, acc, (float *)(void *)shared);
}

/* Computes products of few rows or columns (depthwise convolutions): each element of the result is summed by one thread
   or, if `block`, by all threads of one block. */
static __global__ void hpmlg_k_product_thin(const __grid_constant__ hpmlg_product g, bool block)
{
    __shared__ float space[HPMLG_WARP];
    int64_t i = block ? (int64_t)blockIdx.x : hpmlg_thread_index();
    int64_t col = i % g.n, row = i / g.n % g.m, batch = i / g.n / g.m;
    float   sum = 0;
    if (batch >= g.batch) return;
    hpmlg_coord a = hpmlg_coord_of(g.a.line, row, g.m), b = hpmlg_coord_of(g.b.line, col, g.n);
    for (int64_t k = block ? threadIdx.x : 0; k < g.k; k += block ? blockDim.x : 1)
        sum += hpmlg_operand_get(g.a, batch * g.a.batch, a, hpmlg_coord_of(g.a.k, k, g.k)) *
               hpmlg_operand_get(g.b, batch * g.b.batch, b, hpmlg_coord_of(g.b.k, k, g.k));
    if (block) sum = hpmlg_group_reduce(sum, space, 256, false);
    if (!block || threadIdx.x == 0) hpmlg_store_result(g, batch, row, col, sum);
}

/* Computes each element of c by adding, in order, its sums over the splits, the parts of the summed index k. */
static __global__ void hpmlg_k_product_join(const __grid_constant__ hpmlg_product g)
{
    int64_t size = g.batch * g.m * g.n;
    HPMLG_FOR_EACH(i, size) {
        float sum = 0;
        for (int64_t s = 0; s < g.splits; s++) sum += g.part[s * size + i];
        hpmlg_store_result(g, i / (g.m * g.n), i / g.n % g.m, i % g.n, sum);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// >>gpu-product   choosing a product kernel; half copies of parameters
// ---------------------------------------------------------------------------------------------------------------------

typedef void hpmlg_product_kernel(const hpmlg_product);

/* First index: the tile edge T, 64 or 128. Second index: 0 to 2, the dense kernel, for 16-bit operands that are copied
   without conversion, where elements adjacent in memory are neighbours along k in a and b (0), along k in a but of
   adjacent lines in b (1), of adjacent lines in both (2); 3 to 5, the gathering kernel, for operands of any layout and
   type, multiplied in f32 (3), in tf32 (4), in 16-bit floats (5) */
static hpmlg_product_kernel *const hpmlg_product_kernels[2][6] = {
    { hpmlg_k_product_dense<64, HPMLG_K_MAJOR, HPMLG_K_MAJOR>,
      hpmlg_k_product_dense<64, HPMLG_K_MAJOR, HPMLG_LINE_MAJOR>,
      hpmlg_k_product_dense<64, HPMLG_LINE_MAJOR, HPMLG_LINE_MAJOR>, hpmlg_k_product_gather<64, HPMLG_IN_F32>,
      hpmlg_k_product_gather<64, HPMLG_IN_TF32>, hpmlg_k_product_gather<64, HPMLG_IN_HALF> },
    { hpmlg_k_product_dense<128, HPMLG_K_MAJOR, HPMLG_K_MAJOR>,
      hpmlg_k_product_dense<128, HPMLG_K_MAJOR, HPMLG_LINE_MAJOR>,
      hpmlg_k_product_dense<128, HPMLG_LINE_MAJOR, HPMLG_LINE_MAJOR>, hpmlg_k_product_gather<128, HPMLG_IN_F32>,
      hpmlg_k_product_gather<128, HPMLG_IN_TF32>, hpmlg_k_product_gather<128, HPMLG_IN_HALF> },
};

/* The bytes of shared memory of a product kernel with tiles of T x T: four stages of two operands' T x 32 16-bit
   floats. The sums of a tile, and gathered operands, need no more. */
#define HPMLG_PRODUCT_SHARED(T) ((size_t)(T) * 512)

HPMLG_FN void hpmlg_product_open(hpmlg_device *d)
{
    cudaError_t e = cudaSuccess;
    for (hpmlg_product_kernel *kernel : hpmlg_product_kernels[1])
        HPMLG_TRY(e, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                          (int)HPMLG_PRODUCT_SHARED(128)));
    hpmlg_check(d, e, "64 KiB of shared memory for matrix products");
}

HPMLG_FN bool hpmlg_is_half(hpmlg_array x) { return x.type == HPML_DTYPE_BF16 || x.type == HPML_DTYPE_F16; }

/* Returns true if operand o, of `lines` rows or columns by k, can be copied 16 bytes at a time by the dense kernels. */
HPMLG_FN bool hpmlg_is_dense(const hpmlg_operand *o, int64_t lines, int64_t k)
{
    int64_t extent = o->along_k ? k : lines;
    return o->ld && hpmlg_is_half(o->x) && o->ld % 8 == 0 && o->batch % 8 == 0 && extent % 8 == 0 &&
           (uintptr_t)o->x.p % 16 == 0;
}

/* Sets the numbers of tiles (of T x T) of g and of splits of its sum over k, so that the device has enough blocks. */
HPMLG_FN void hpmlg_product_split(const hpmlg_device *d, hpmlg_product *g, int T)
{
    int64_t tiles, limit, want;
    g->tiles_m = (g->m + T - 1) / T;
    g->tiles_n = (g->n + T - 1) / T;
    tiles = g->tiles_m * g->tiles_n * g->batch;
    want  = (2 * d->sms + tiles - 1) / tiles;
    limit = (int64_t)(d->d.workspace / sizeof(float)) / (g->batch * g->m * g->n); /* splits that fit in the workspace */
    if (limit > g->k / 256) limit = g->k / 256;
    if (want > limit) want = limit;
    if (want < 2 || tiles >= d->sms) want = 1;
    g->k_each = ((g->k + want - 1) / want + 63) / 64 * 64;
    g->splits = g->k > 0 ? (g->k + g->k_each - 1) / g->k_each : 1; /* for k = 0 one split, which is 0 */
    g->part   = g->splits > 1 ? (float *)d->workspace : NULL;
}

/* Returns the second index into hpmlg_product_kernels: the number of the kernel that fits the layouts and types of g's
   operands and, for f32 operands, the device's precision. */
HPMLG_FN int hpmlg_product_variant(const hpmlg_device *d, const hpmlg_product *g)
{
    bool dense = hpmlg_is_dense(&g->a, g->m, g->k) && hpmlg_is_dense(&g->b, g->n, g->k) && g->a.x.type == g->b.x.type;
    if (dense && g->a.along_k) return g->b.along_k ? 0 : 1;
    if (dense && !g->b.along_k) return 2;
    if (hpmlg_is_half(g->a.x) || hpmlg_is_half(g->b.x)) return 3 + HPMLG_IN_HALF;
    return 3 + (d->d.precision == HPML_CUDA_F32 ? HPMLG_IN_F32 : HPMLG_IN_TF32);
}

/* Runs the product g by this header's kernels. */
HPMLG_FN void hpmlg_product_run(hpmlg_device *d, hpmlg_product *g)
{
    int64_t limit = (int64_t)1 << 31, tiles = ((g->m + 127) / 128) * ((g->n + 127) / 128) * g->batch;
    if (g->m >= limit || g->n >= limit || g->k >= limit)
        return (void)hpml_ctx_fail(d->ctx, HPML_ERR_OVERFLOW, "cuda: a product of %lld x %lld x %lld: each must be "
                                   "below 2^31", (long long)g->m, (long long)g->n, (long long)g->k);
    g->half    = hpmlg_is_half(g->a.x) ? g->a.x.type : g->b.x.type;
    g->by_vec8 = g->flat && g->ldc % 8 == 0 && g->c_batch % 8 == 0 && (uintptr_t)g->c.p % 16 == 0 &&
                 (uintptr_t)g->z.p % 16 == 0;
    if (g->batch >= 8 && (g->m < 8 || g->n < 8)) {
        int64_t sums = g->batch * g->m * g->n;
        bool    block = g->k > 512 && sums < limit;
        return HPMLG_RUN(d, hpmlg_k_product_thin, (unsigned)(block ? sums : (sums + 255) / 256), 256, 0, *g, block);
    }
    bool large = g->m > 64 && g->n > 64 && tiles * (g->k / 1024 + 1) >= d->sms; /* true: tiles of 128 fill the device */
    hpmlg_product_split(d, g, large ? 128 : 64);
    hpmlg_product_kernel *hpmlg_k_product = hpmlg_product_kernels[large][hpmlg_product_variant(d, g)];
    int64_t               blocks = g->tiles_m * g->tiles_n * g->splits * g->batch;
    if (blocks >= limit) hpml_ctx_fail(d->ctx, HPML_ERR_OVERFLOW, "cuda: a product of too many tiles");
    HPMLG_RUN(d, hpmlg_k_product, (unsigned)blocks, 128, HPMLG_PRODUCT_SHARED(large ? 128 : 64), *g);
    if (g->splits > 1) HPMLG_RUN_ITEMS(d, hpmlg_k_product_join, g->batch * g->m * g->n, 256, *g);
}

/* A batch of products of row-major matrices, which cuBLASLt can compute too: c (batch, m, n) = act(alpha a b (+ c) +
   bias) or, if `back`, c = (alpha a b (+ c)) act'(z), where z is read. */
struct hpmlg_gemm : hpmlg_product {
    float      *sums;      /* (m): gets the sums of the rows of a, if the product can compute them; NULL: not wanted */
    const void *bias_half; /* (n): the bias in c's type, for cuBLASLt; NULL: none exists */
};

/* Which of the optional operations on its result (its epilogue) a product's kernel has done. The caller must run the
   others as kernels of their own, because not every implementation has them. */
typedef struct hpmlg_epilogue {
    bool derivative; /* true: c has been multiplied by act'(z) */
    bool row_sums;   /* true: hpmlg_gemm.sums has been written */
} hpmlg_epilogue;

/* Returns the array that begins at element `at` of x. */
HPMLG_FN hpmlg_array hpmlg_array_at(hpmlg_array x, int64_t at)
{
    x.p = (char *)x.p + at * (int64_t)hpml_dtype_size((hpml_dtype)x.type);
    return x;
}

/* Describes a product's operand by its axes: line (rows of a left operand, columns of a right one) and k, the summed
   one. batch: elements to the next matrix; along_k: neighbours in k are closer in memory than neighbouring lines. */
HPMLG_FN hpmlg_operand hpmlg_operand_of(hpmlg_array x, int64_t batch, hpmlg_axis line, hpmlg_axis k, bool along_k)
{
    hpmlg_operand o = {};
    o.x       = x;
    o.batch   = batch;
    o.line    = line;
    o.k       = k;
    o.along_k = along_k;
    return o;
}

/* Describes, as hpmlg_operand_of does from the same first arguments (array, distance of matrices, axes), an operand
   whose elements are pixels of images with H rows and W columns. pixel: elements to the next pixel. */
HPMLG_FN hpmlg_operand hpmlg_image_operand(hpmlg_array x, int64_t batch, hpmlg_axis line, hpmlg_axis k, bool along_k,
                                           int64_t H, int64_t W, int64_t pixel)
{
    hpmlg_operand o = hpmlg_operand_of(x, batch, line, k, along_k);
    o.H     = H;
    o.W     = W;
    o.pixel = pixel;
    return o;
}

/* Describes a matrix whose rows are ld elements apart, as an operand. along_k: k, the summed index, runs along the rows
   of the matrix, else down its columns. batch: elements to the next matrix. */
HPMLG_FN hpmlg_operand hpmlg_matrix(hpmlg_array x, int64_t ld, int64_t batch, bool along_k)
{
    hpmlg_axis    one = hpmlg_axis_1d(1), far = hpmlg_axis_1d(ld);
    hpmlg_operand o = hpmlg_operand_of(x, batch, along_k ? far : one, along_k ? one : far, along_k);
    o.ld = ld;
    return o;
}

HPMLG_FN hpmlg_gemm hpmlg_gemm_of(int64_t m, int64_t n, int64_t k, hpmlg_operand a, hpmlg_operand b, hpmlg_array c,
                                  int64_t ldc, bool add)
{
    hpmlg_gemm g = {};
    g.m        = m;
    g.n        = n;
    g.k        = k;
    g.batch    = 1;
    g.a        = a;
    g.b        = b;
    g.c        = c;
    g.ldc      = ldc;
    g.c_batch  = m * n;
    g.alpha    = 1;
    g.add      = add;
    g.flat     = 1;
    g.bias_col = 1;
    return g;
}

HPMLG_FN bool hpmlg_blas_product(hpmlg_device *d, hpmlg_gemm *g, hpmlg_epilogue *done);

/* Runs the product g by cuBLASLt or, where cuBLASLt refuses, by this header's kernels. Returns which optional
   operations on the result (derivative of the activation, sums of rows) have been done. */
HPMLG_FN hpmlg_epilogue hpmlg_gemm_run(hpmlg_device *d, hpmlg_gemm *g)
{
    hpmlg_epilogue done = {};
    if (g->c.type == HPML_DTYPE_F32) g->bias_half = g->bias;
    if (!hpmlg_ok(d) || hpmlg_blas_product(d, g, &done)) return done;
    done.derivative = g->back;
    d->work.products[1]++;
    hpmlg_product_run(d, g);
    return done;
}

/* Converts a parameter to its copy in bf16 or f16 again if the parameter has changed since the last conversion. */
HPMLG_FN void hpmlg_half_copy_refresh(hpmlg_device *d, hpmlg_half_copy *w)
{
    hpmlg_array to = hpmlg_array_of(w->half, d->act_dtype), from = hpmlg_array_of((void *)w->w, HPML_DTYPE_F32);
    if (w->fresh) return;
    if (w->channels) hpmlg_reorder_run(d, to, from, w->n / (w->channels * w->taps), w->channels, w->taps, true, false);
    else hpmlg_copy_run(d, to, from, w->n, false);
    w->fresh = hpmlg_ok(d);
}

/* Returns the copy in bf16 or f16 of parameter t, allocated when first needed (the first run of a pass is not recorded,
   so memory can be allocated); NULL, and an error on the context, when there is no memory. nhwc: t is a filter (OC, C,
   height, width), and its copy (OC, height, width, C). */
HPMLG_FN void *hpmlg_half_copy_of(hpmlg_device *d, const hpml_tensor *t, bool nhwc)
{
    hpmlg_half_copy *w = d->half_copies;
    int64_t          channels = nhwc && !hpmlg_has_any_order(t) ? t->shape[1] : 0;
    while (w && (w->w != t->data || w->channels != channels)) w = w->next;
    if (!w) {
        void *copy = hpmlg_alloc_own(d, (size_t)hpml_tensor_count(t) * 2, "memory for half copies of parameters");
        if (!copy || !(w = (hpmlg_half_copy *)hpml_ctx_alloc(d->ctx, sizeof *w, NULL))) return NULL;
        w->w    = t->data;
        w->n    = hpml_tensor_count(t);
        w->half = copy;
        w->channels = channels;
        w->taps     = t->shape[2] * t->shape[3];
        w->next = d->half_copies;
        d->half_copies = w;
    }
    hpmlg_half_copy_refresh(d, w);
    return w->half;
}

/* Returns tensor t as an operand of products. In a model that computes in bf16 or f16: for a parameter its 16-bit copy;
   for an f32 input a 16-bit copy made in the memory `place`, unless `place` is NULL. Else the tensor itself. */
HPMLG_FN hpmlg_array hpmlg_product_input(hpmlg_device *d, const hpml_tensor *t, void *place)
{
    hpmlg_array x = hpmlg_value(t);
    if (d->act_dtype == HPML_DTYPE_F32 || t->dtype != HPML_DTYPE_F32) return x;
    if (t->param) return hpmlg_array_of(hpmlg_half_copy_of(d, t, false), d->act_dtype);
    if (!place) return x;
    hpmlg_copy_run(d, hpmlg_array_of(place, d->act_dtype), x, hpml_tensor_count(t), false);
    return hpmlg_array_of(place, d->act_dtype);
}

/* Returns the bytes of memory that hpmlg_product_input needs at its argument `place` for tensor t; 0: none. */
HPMLG_FN size_t hpmlg_narrowed_bytes(const hpmlg_device *d, const hpml_tensor *t)
{
    bool narrow = d->act_dtype != HPML_DTYPE_F32 && t->dtype == HPML_DTYPE_F32 && !t->param;
    return narrow ? ((size_t)hpml_tensor_count(t) * 2 + 255) / 256 * 256 : 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// >>gpu-cublas   matrix products by cuBLASLt
// ---------------------------------------------------------------------------------------------------------------------

/* Row-major matrices are transposed column-major ones: c = a b is c^T = b^T a^T, so a and b change places. The
   library's answer for a shape (an algorithm, or a refusal) is kept as a plan. Bias, relu, gelu and gelu' are fused
   into the product's epilogue, and so are sums of a's rows; where the library has no such kernel, an activation follows
   as a kernel of its own, and the rest is left to the caller (hpmlg_epilogue). In HPML_CUDA_F32 gelu and gelu' are not
   fused, because cuBLASLt uses the hardware's tanh of 11 bits. The relu of cuBLASLt is max(z, 0), which turns a NaN
   into 0: the update finds the NaN in the gradient of the layer's weights, where 0 is multiplied by the NaN in x. */

/* Appends v to a list of at most 16 different numbers, unless v is in the list or the list is full. */
HPMLG_FN void hpmlg_list_add(int list[16], int *count, int v)
{
    int i = 0;
    while (i < *count && list[i] != v) i++;
    if (i == *count && i < 16) list[(*count)++] = v;
}

#ifdef HPML_CUDA_NO_CUBLAS
HPMLG_FN bool    hpmlg_blas_product(hpmlg_device *, hpmlg_gemm *, hpmlg_epilogue *) { return false; }
HPMLG_FN void    hpmlg_blas_open(hpmlg_device *) {}
HPMLG_FN void    hpmlg_blas_close(hpmlg_device *) {}
HPMLG_FN int64_t hpmlg_choices(void *, int64_t *, int64_t) { return 0; }
HPMLG_FN void    hpmlg_choose(void *, const int64_t *, int64_t, bool) {}
#else
HPMLG_FN hpml_status hpmlg_blas_check(hpmlg_device *d, cublasStatus_t s, const char *what)
{
    if (s == CUBLAS_STATUS_SUCCESS) return HPML_OK;
    return hpmlg_fail(d, s == CUBLAS_STATUS_ALLOC_FAILED, what, cublasLtGetStatusName(s), cublasLtGetStatusString(s),
                      "; hpml_cuda_desc.own_kernels does without cuBLASLt");
}

/* Returns true if the status says that cuBLASLt refuses a product, so that this header's kernels run instead. */
HPMLG_FN bool hpmlg_blas_refused(cublasStatus_t s)
{
    return s == CUBLAS_STATUS_NOT_SUPPORTED || s == CUBLAS_STATUS_INVALID_VALUE || s == CUBLAS_STATUS_ARCH_MISMATCH;
}

typedef struct hpmlg_blas_key {
    int64_t m, n, k, batch, lda, ldb, ldc, a_batch, b_batch, c_batch;
    int64_t a_type, c_type, trans_a, trans_b, epilogue, align, add;
} hpmlg_blas_key;

typedef struct hpmlg_blas_plan {
    hpmlg_blas_key         key;
    int64_t                choice;       /* 1 + index among cuBLASLt's proposals of the fastest; 0: none was timed */
    int64_t                id;           /* number of the algorithm in cuBLASLt */
    int64_t                apart;        /* 1: the product is faster with its epilogue as a kernel of its own */
    uint64_t               used;         /* hpmlg_device.clock at the last use; 0: the entry is free */
    bool                   set, usable;  /* set: cuBLASLt was asked for an algorithm; usable: it gave one that runs */
    bool                   taken;        /* true: choice, id and apart are from a checkpoint or another rank */
    cublasLtMatmulDesc_t   op;
    cublasLtMatrixLayout_t a, b, c;
    cublasLtMatmulAlgo_t   algo;
} hpmlg_blas_plan;

#define HPMLG_BLAS_PLANS     256
#define HPMLG_BLAS_PROPOSALS 8 /* algorithms of cuBLASLt that are timed */

typedef struct hpmlg_blas {
    cublasLtHandle_t handle;
    cudaEvent_t      from, to;  /* with hpml_cuda_desc.tune: begin and end of a timed run */
    bool             ignored;   /* true: choices of a checkpoint or another rank do not fit this device */
    bool             settled;   /* true: ranks have agreed on their choices, so that nothing more is timed */
    hpmlg_blas_plan  plans[HPMLG_BLAS_PLANS];
} hpmlg_blas;

HPMLG_FN void hpmlg_destroy(hpmlg_blas_plan *p)
{
    if (p->op) cublasLtMatmulDescDestroy(p->op);
    if (p->a) cublasLtMatrixLayoutDestroy(p->a);
    if (p->b) cublasLtMatrixLayoutDestroy(p->b);
    if (p->c) cublasLtMatrixLayoutDestroy(p->c);
}

HPMLG_FN cudaDataType_t hpmlg_blas_type(int64_t type)
{
    if (type == HPML_DTYPE_F32) return CUDA_R_32F;
    return type == HPML_DTYPE_BF16 ? CUDA_R_16BF : CUDA_R_16F;
}

HPMLG_FN cublasStatus_t hpmlg_blas_layout(cublasLtMatrixLayout_t *l, int64_t type, int64_t rows, int64_t cols,
                                          int64_t ld, int64_t batch, int64_t stride)
{
    int32_t        count = (int32_t)batch;
    cublasStatus_t s     = cublasLtMatrixLayoutCreate(l, hpmlg_blas_type(type), (uint64_t)rows, (uint64_t)cols, ld);
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

/* Describes the product g in *k for cuBLASLt. Returns false if cuBLASLt must not be asked. The bias, or the bias sums,
   must be aligned to 16 bytes, because cuBLASLt has no preference for the alignment of vectors. */
HPMLG_FN bool hpmlg_blas_key_of(hpmlg_blas_key *k, const hpmlg_gemm *g)
{
    const void *line = g->sums ? g->sums : g->bias_half;
    memset(k, 0, sizeof *k);
    if (g->a.x.type != g->b.x.type || (g->c.type != g->a.x.type && g->c.type != HPML_DTYPE_F32)) return false;
    k->trans_a = !g->a.along_k;
    k->trans_b = g->b.along_k;
    k->m       = g->m;
    k->n       = g->n;
    k->k       = g->k;
    k->batch   = g->batch;
    k->lda     = g->a.ld;
    k->ldb     = g->b.ld;
    k->ldc     = g->ldc;
    if (k->lda < (k->trans_a ? k->m : k->k) || k->ldb < (k->trans_b ? k->k : k->n) || k->ldc < k->n) return false;
    if (k->batch > 1) {
        k->a_batch = g->a.batch;
        k->b_batch = g->b.batch;
        k->c_batch = g->c_batch;
    }
    k->a_type = g->a.x.type;
    k->c_type = g->c.type;
    k->add    = g->add;
    uintptr_t addresses = (uintptr_t)g->a.x.p | (uintptr_t)g->b.x.p | (uintptr_t)g->c.p | (uintptr_t)line |
                          (uintptr_t)g->z.p;
    for (k->align = 256; addresses % (uintptr_t)k->align; k->align /= 2) {} /* bytes to which all arrays are aligned */
    return (k->batch == 1 || !g->bias) && (uintptr_t)line % 16 == 0;
}

/* Returns the epilogue (operations on the result) for cuBLASLt to fuse into g; full: with activation, derivative or
   sums, where cuBLASLt has them, else only with bias. cuBLASLt's operand B is g->a, so BGRADB sums a's rows. */
HPMLG_FN cublasLtEpilogue_t hpmlg_blas_epilogue(const hpmlg_device *d, const hpmlg_gemm *g, bool full)
{
    bool bias = g->bias != NULL, z = g->z.type == g->c.type && (uintptr_t)g->z.p % 16 == 0 && g->ldc % 8 == 0;
    bool gelu = full && g->act == HPML_ACT_GELU && d->d.precision != HPML_CUDA_F32;
    if (full && g->sums) return CUBLASLT_EPILOGUE_BGRADB;
    if (gelu && g->back && z && !g->add) return CUBLASLT_EPILOGUE_DGELU;
    if (full && g->back) return CUBLASLT_EPILOGUE_DEFAULT;
    if (full && g->act == HPML_ACT_RELU && !g->z.p)
        return bias ? CUBLASLT_EPILOGUE_RELU_BIAS : CUBLASLT_EPILOGUE_RELU;
    if (gelu && !g->z.p) return bias ? CUBLASLT_EPILOGUE_GELU_BIAS : CUBLASLT_EPILOGUE_GELU;
    if (gelu && z) return bias ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX;
    return bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
}

/* Counts the epilogue e (operations such as bias or gelu), which was fused into a product or, if `refused`, refused. */
HPMLG_FN void hpmlg_blas_count(hpmlg_device *d, cublasLtEpilogue_t e, bool refused)
{
    long long *n = d->work.epilogues[refused];
    if (e == CUBLASLT_EPILOGUE_BGRADB) n[HPMLG_SUMS]++;
    else if (e == CUBLASLT_EPILOGUE_DGELU) n[HPMLG_GELU_BACK]++;
    else {
        n[HPMLG_BIAS] += !refused && (e & CUBLASLT_EPILOGUE_BIAS) != 0;
        n[HPMLG_RELU] += (e & CUBLASLT_EPILOGUE_RELU) != 0;
        n[HPMLG_GELU] += (e & CUBLASLT_EPILOGUE_GELU) != 0;
    }
}

/* Returns true if plan p fuses more into the product's kernel than the bias. */
HPMLG_FN bool hpmlg_blas_fuses(const hpmlg_blas_plan *p)
{
    return p->key.epilogue != CUBLASLT_EPILOGUE_BIAS && p->key.epilogue != CUBLASLT_EPILOGUE_DEFAULT;
}

/* Sets the addresses of bias (or bias sums) and z of the product g in plan p's cuBLASLt descriptor. */
HPMLG_FN cublasStatus_t hpmlg_blas_set_pointers(hpmlg_blas_plan *p, const hpmlg_gemm *g)
{
    const void    *line = p->key.epilogue == CUBLASLT_EPILOGUE_BGRADB ? g->sums : g->bias_half;
    cublasStatus_t s = CUBLAS_STATUS_SUCCESS;
    if (line) HPMLG_BLAS_SET(BIAS_POINTER, line);
    if (g->z.p && hpmlg_blas_fuses(p)) HPMLG_BLAS_SET(EPILOGUE_AUX_POINTER, g->z.p);
    return s;
}

/* Runs the product g, with its activation, by plan p and the algorithm `algo`. */
HPMLG_FN cublasStatus_t hpmlg_blas_run(hpmlg_device *d, hpmlg_blas_plan *p, const hpmlg_gemm *g,
                                       const cublasLtMatmulAlgo_t *algo)
{
    bool           act_after = g->act && !g->back && !hpmlg_blas_fuses(p);
    hpmlg_array    c = act_after && g->z.p ? g->z : g->c;
    float          beta = g->add ? 1.0f : 0.0f;
    cublasStatus_t s = hpmlg_blas_set_pointers(p, g);
    HPMLG_TRY(s, cublasLtMatmul(((hpmlg_blas *)d->blas)->handle, p->op, &g->alpha, g->b.x.p, p->a, g->a.x.p, p->b,
                                &beta, c.p, p->c, c.p, p->c, algo, d->workspace, d->d.workspace, d->stream));
    if (s == CUBLAS_STATUS_SUCCESS && act_after)
        HPMLG_RUN_ITEMS(d, hpmlg_k_act, g->m * g->n, 2048, g->c, c, hpmlg_array_null(), (int)g->act, g->slope,
                        g->m * g->n, false);
    return s;
}

/* Asks cuBLASLt for algorithms for plan p of the product g: `count` of them in found. */
HPMLG_FN cublasStatus_t hpmlg_blas_ask(hpmlg_device *d, hpmlg_blas_plan *p, const hpmlg_gemm *g,
                                       cublasLtMatmulHeuristicResult_t *found, int *count)
{
    cublasLtMatmulPreference_t want = NULL;
    uint32_t                   align = (uint32_t)p->key.align;
    cublasStatus_t             s = hpmlg_blas_describe(d, p);
    HPMLG_TRY(s, hpmlg_blas_set_pointers(p, g));
    HPMLG_TRY(s, cublasLtMatmulPreferenceCreate(&want));
    HPMLG_TRY(s, cublasLtMatmulPreferenceSetAttribute(want, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                                      &d->d.workspace, sizeof d->d.workspace));
    for (int i = 0; i < 4; i++) {
        static const cublasLtMatmulPreferenceAttributes_t bytes[4] = {
            CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
            CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES };
        HPMLG_TRY(s, cublasLtMatmulPreferenceSetAttribute(want, bytes[i], &align, sizeof align));
    }
    HPMLG_TRY(s, cublasLtMatmulAlgoGetHeuristic(((hpmlg_blas *)d->blas)->handle, p->op, p->a, p->b, p->c, p->c, want,
                                                d->d.tune ? HPMLG_BLAS_PROPOSALS : 4, found, count));
    if (want) cublasLtMatmulPreferenceDestroy(want);
    if (s != CUBLAS_STATUS_SUCCESS) *count = 0;
    return s;
}

HPMLG_FN int hpmlg_blas_id(const cublasLtMatmulAlgo_t *algo)
{
    int    id = -1; /* the number by which cuBLASLt knows the algorithm */
    size_t written = 0;
    cublasLtMatmulAlgoConfigGetAttribute(algo, CUBLASLT_ALGO_CONFIG_ID, &id, sizeof id, &written);
    return id;
}

HPMLG_FN int hpmlg_blas_pick(hpmlg_device *d, hpmlg_blas_plan *p, const hpmlg_gemm *g,
                             const cublasLtMatmulHeuristicResult_t *found, int count);

/* Returns the plan of the product g; full: with all that cuBLASLt can fuse, else with the bias alone. For a new plan
   asks cuBLASLt for algorithms and keeps one of them, or the refusal. */
HPMLG_FN hpmlg_blas_plan *hpmlg_blas_plan_of(hpmlg_device *d, const hpmlg_gemm *g, bool full)
{
    cublasLtMatmulHeuristicResult_t found[HPMLG_BLAS_PROPOSALS];
    hpmlg_blas_key                  key;
    int                             count = 0;
    hpmlg_blas_key_of(&key, g);
    key.epilogue = (int64_t)hpmlg_blas_epilogue(d, g, full);
    if (!full && g->act && !g->back && g->z.p) key.c_type = g->z.type;
    hpmlg_blas_plan *p = hpmlg_cache_find(d, ((hpmlg_blas *)d->blas)->plans, key);
    if (p->set) return p;
    cublasStatus_t s = hpmlg_blas_ask(d, p, g, found, &count);
    int            pick = hpmlg_blas_pick(d, p, g, found, count);
    p->set    = true;
    p->usable = pick >= 0;
    if (p->usable) {
        p->algo = found[pick].algo;
        p->id   = hpmlg_blas_id(&p->algo);
        if (found[pick].workspaceSize > d->workspace_wanted) d->workspace_wanted = found[pick].workspaceSize;
    }
    if (!hpmlg_blas_refused(s)) hpmlg_blas_check(d, s, "cublasLtMatmulAlgoGetHeuristic");
    return p;
}

/* Runs the product g by cuBLASLt: first with activation, derivative or sums fused, if there are any; if cuBLASLt has no
   such product, or it is slower, with the bias alone and the activation as a kernel after it. *done: what was fused.
   Returns false if cuBLASLt cannot run the product in either way. */
HPMLG_FN bool hpmlg_blas_product(hpmlg_device *d, hpmlg_gemm *g, hpmlg_epilogue *done)
{
    hpmlg_blas_key key;
    bool           act = g->act != HPML_ACT_NONE && !g->back, one = g->ldc == g->n && g->batch == 1;
    if (!d->blas || !hpmlg_blas_key_of(&key, g)) return false;
    if ((g->bias && !g->bias_half) || (act && !one)) return false;
    for (int full = act || g->back || g->sums; full >= 0; full--) {
        hpmlg_blas_plan *p = hpmlg_blas_plan_of(d, g, full);
        if (full && (!hpmlg_blas_fuses(p) || p->apart)) continue; /* next turn: no more than the bias is fused */
        cublasStatus_t s = p->usable ? hpmlg_blas_run(d, p, g, &p->algo) : CUBLAS_STATUS_NOT_SUPPORTED;
        p->usable = !hpmlg_blas_refused(s); /* some refusals come only from this call */
        hpmlg_blas_count(d, (cublasLtEpilogue_t)p->key.epilogue, !p->usable);
        if (!p->usable) continue;
        hpmlg_blas_check(d, s, "cublasLtMatmul");
        d->work.products[0]++;
        done->derivative = full && g->back;
        done->row_sums   = full && g->sums;
        return true;
    }
    d->work.products_refused++;
    return false;
}

HPMLG_FN void hpmlg_blas_open(hpmlg_device *d)
{
    hpmlg_blas *blas = (hpmlg_blas *)hpml_ctx_alloc(d->ctx, sizeof *blas, NULL);
    d->blas = blas;
    if (blas) hpmlg_blas_check(d, cublasLtCreate(&blas->handle), "cublasLtCreate");
    if (blas && d->d.tune) hpmlg_check(d, cudaEventCreate(&blas->from), "an event");
    if (blas && d->d.tune) hpmlg_check(d, cudaEventCreate(&blas->to), "an event");
}

HPMLG_FN void hpmlg_blas_close(hpmlg_device *d)
{
    hpmlg_blas *blas = (hpmlg_blas *)d->blas;
    for (int i = 0; blas && i < HPMLG_BLAS_PLANS; i++) hpmlg_destroy(&blas->plans[i]);
    if (blas && blas->from) cudaEventDestroy(blas->from);
    if (blas && blas->to) cudaEventDestroy(blas->to);
    if (blas && blas->handle) cublasLtDestroy(blas->handle);
}

// ---------------------------------------------------------------------------------------------------------------------
// >>gpu-tune   products chosen by the clock
// ---------------------------------------------------------------------------------------------------------------------

/* cuBLASLt sorts its algorithms for a product by estimated time. With hpml_cuda_desc.tune they run a few times while a
   pass first runs, and the fastest is kept; likewise of a product with its epilogue fused and apart. These runs write
   to memory of their own, because a product may add to its result. A choice is an index among cuBLASLt's proposals, so
   that a choice from a file, whatever it is, runs no more than what cuBLASLt proposes. */

HPMLG_FN void hpmlg_act_bias_grad(hpmlg_device *d, hpmlg_array dy, hpmlg_array v, hpml_act act, float slope,
                                  hpmlg_strides w, float *db, bool add);

/* Returns the milliseconds of the fastest run of the product g by plan p and the algorithm `algo`, with the kernels by
   which g's caller does what is not fused; HUGE_VALF: cuBLASLt refuses, or an error is on the context. */
HPMLG_FN float hpmlg_tune_time(hpmlg_device *d, hpmlg_blas_plan *p, const hpmlg_gemm *g,
                               const cublasLtMatmulAlgo_t *algo)
{
    const hpmlg_blas *blas = (const hpmlg_blas *)d->blas;
    hpmlg_strides     cells = hpmlg_broadcast_strides(1, g->m, g->n), sums = hpmlg_broadcast_strides(1, g->k, g->m);
    float             least = HUGE_VALF, ms = 0;
    for (int i = 0; i < 6; i++) { /* of which the first may take longer */
        cudaError_t e = cudaEventRecord(blas->from, d->stream);
        if (hpmlg_blas_run(d, p, g, algo) != CUBLAS_STATUS_SUCCESS) return HUGE_VALF;
        if (g->back && !hpmlg_blas_fuses(p))
            hpmlg_act_bias_grad(d, g->c, g->z, (hpml_act)g->act, g->slope, cells, NULL, false);
        if (g->sums && !hpmlg_blas_fuses(p))
            hpmlg_act_bias_grad(d, g->a.x, hpmlg_array_null(), HPML_ACT_NONE, 0, sums, g->sums, false);
        HPMLG_TRY(e, cudaEventRecord(blas->to, d->stream));
        HPMLG_TRY(e, cudaEventSynchronize(blas->to));
        HPMLG_TRY(e, cudaEventElapsedTime(&ms, blas->from, blas->to));
        d->waits++;
        if (hpmlg_check(d, e, "timing a product") != HPML_OK) return HUGE_VALF;
        if (ms < least) least = ms;
    }
    return least;
}

/* Times the proposals found[first] to found[count - 1] for plan p of the product g and, if p fuses more than the bias,
   the product that does not. Returns the index of the fastest; `first` if there is no memory. */
HPMLG_FN int hpmlg_tune(hpmlg_device *d, hpmlg_blas_plan *p, const hpmlg_gemm *g,
                        const cublasLtMatmulHeuristicResult_t *found, int first, int count)
{
    hpmlg_gemm       copy  = *g;
    hpmlg_blas_plan *apart = hpmlg_blas_fuses(p) ? hpmlg_blas_plan_of(d, g, false) : NULL;
    int64_t          cells = (g->batch - 1) * g->c_batch + (g->m - 1) * g->ldc + g->n;
    size_t           bytes = (size_t)(cells + 63) / 64 * 64 * sizeof(float); /* of c, and of z, which may be halves */
    char            *memory = (char *)hpmlg_alloc(d, 2 * bytes + (size_t)g->m * sizeof(float));
    float            least = HUGE_VALF, ms;
    if (!memory) return first;
    copy.c.p = memory;
    if (g->z.p && !g->back) copy.z.p = memory + bytes;
    if (g->sums) copy.sums = (float *)(void *)(memory + 2 * bytes);
    for (int i = first; i < count; i++) {
        ms = found[i].state == CUBLAS_STATUS_SUCCESS ? hpmlg_tune_time(d, p, &copy, &found[i].algo) : HUGE_VALF;
        if (ms < least) p->choice = i + 1;
        if (ms < least) least = ms;
    }
    if (p->choice && apart && apart->choice) p->apart = hpmlg_tune_time(d, apart, &copy, &apart->algo) < least;
    hpmlg_free(d, memory, 0);
    return p->choice > 0 ? (int)p->choice - 1 : first;
}

/* Returns the index in `found` of the algorithm for plan p of the product g: the choice taken from a checkpoint or
   another rank, else the fastest or, if none is timed, the first; -1: there is none. */
HPMLG_FN int hpmlg_blas_pick(hpmlg_device *d, hpmlg_blas_plan *p, const hpmlg_gemm *g,
                             const cublasLtMatmulHeuristicResult_t *found, int count)
{
    int64_t choice = p->choice;
    int     first = 0;
    while (first < count && found[first].state != CUBLAS_STATUS_SUCCESS) first++;
    if (p->taken && choice > 0 && choice <= count && found[choice - 1].state == CUBLAS_STATUS_SUCCESS &&
        hpmlg_blas_id(&found[choice - 1].algo) == p->id)
        return (int)choice - 1;
    if (p->taken) ((hpmlg_blas *)d->blas)->ignored = true;
    p->taken  = false;
    p->choice = 0;
    p->apart  = 0;
    if (first == count) return -1;
    if (!d->d.tune || d->recording || ((hpmlg_blas *)d->blas)->settled) return first;
    return hpmlg_tune(d, p, g, found, first, count);
}

#define HPMLG_SETTING 6 /* numbers on which cuBLASLt's proposals depend */
#define HPMLG_CHOICE  ((int64_t)(offsetof(hpmlg_blas_plan, used) / sizeof(int64_t))) /* int64_t's up to `used` */

/* Implements the backend's `choices`: the setting, then the numbers of each plan with a choice. */
HPMLG_FN int64_t hpmlg_choices(void *device, int64_t *numbers, int64_t capacity)
{
    const hpmlg_device *d    = hpmlg_make_current(device);
    const hpmlg_blas   *blas = (const hpmlg_blas *)d->blas;
    hpml_cuda_info      gpu = {};
    int64_t             n = HPMLG_SETTING;
    if (!blas || !d->d.tune) return 0;
    hpml_cuda_device_info(d->d.device, &gpu);
    const int64_t setting[HPMLG_SETTING] = { (int64_t)cublasLtGetVersion(), gpu.major * 10 + gpu.minor,
                                             gpu.multiprocessors, (int64_t)(gpu.memory >> 30), d->d.precision,
                                             (int64_t)d->d.workspace };
    if (n <= capacity) memcpy(numbers, setting, sizeof setting);
    for (const hpmlg_blas_plan &p : blas->plans) {
        if (p.choice == 0) continue;
        n += HPMLG_CHOICE;
        if (n <= capacity) memcpy(numbers + n - HPMLG_CHOICE, &p, (size_t)HPMLG_CHOICE * sizeof *numbers);
    }
    return n;
}

/* Implements the backend's `choose`. If a choice changes, passes run op by op once more, then are recorded again. */
HPMLG_FN void hpmlg_choose(void *device, const int64_t *numbers, int64_t count, bool settled)
{
    hpmlg_device   *d    = hpmlg_make_current(device);
    hpmlg_blas     *blas = (hpmlg_blas *)d->blas;
    hpmlg_blas_plan taken = {};
    int64_t         setting[HPMLG_SETTING];
    if (hpmlg_choices(d, setting, HPMLG_SETTING) == 0) return;
    blas->settled = settled;
    blas->ignored = count < HPMLG_SETTING || memcmp(numbers, setting, sizeof setting) != 0;
    for (int64_t at = HPMLG_SETTING; !blas->ignored && at + HPMLG_CHOICE <= count; at += HPMLG_CHOICE) {
        memcpy((void *)&taken, numbers + at, (size_t)HPMLG_CHOICE * sizeof *numbers);
        hpmlg_blas_plan *p = hpmlg_cache_find(d, blas->plans, taken.key);
        if (memcmp((void *)p, numbers + at, (size_t)HPMLG_CHOICE * sizeof *numbers) == 0) continue;
        taken.used  = p->used;
        taken.taken = true;
        hpmlg_destroy(p);
        *p = taken;
        for (hpmlg_pass &pass : d->passes) {
            hpmlg_destroy(&pass);
            pass.has_run = false;
        }
    }
}
#endif

// ---------------------------------------------------------------------------------------------------------------------
// >>gpu-matmul   matmul and linear layers
// ---------------------------------------------------------------------------------------------------------------------

/* The linear layer. Forward, y = act(z), z = x w^T + bias, is one product. Backward, dz = dy act'(z) overwrites dy,
   which no later op reads, and the sums of dz's columns are the gradient of the bias; one kernel computes dz and the
   sums. Each of these is fused into a product where possible: the column sums into dw = dz^T x, whose left operand is
   dz^T, and act'(z) of a layer into the dx of the next linear layer, which writes this layer's dy
   (hpmlg_op_notes.activation_grad_done). */

/* Computes in one kernel dy *= act'(v), if `act` is not 0, and, if db is not NULL, db (+)= the sums of dy. v: the input
   or the output of the activation, whichever its derivative is computed from (hpmlg_act_needs_x). w: the shape of dy,
   and in stride[0] the strides of db, 0 for the dimensions that are summed over. add: adds to db. */
HPMLG_FN void hpmlg_act_bias_grad(hpmlg_device *d, hpmlg_array dy, hpmlg_array v, hpml_act act, float slope,
                                  hpmlg_strides w, float *db, bool add)
{
    hpmlg_binary b = {};
    b.op     = HPML_OP_ADD;
    b.out    = dy;
    b.src[0] = v;
    b.w      = w;
    b.act    = (int)act;
    b.slope  = slope;
    if (db) hpmlg_reduce_run(d, &b, 0, hpmlg_array_of(db, HPML_DTYPE_F32), 1, add);
    else if (act) HPMLG_RUN_ITEMS(d, hpmlg_k_act, w.count, 2048, dy, v, dy, (int)act, slope, w.count, false);
}

typedef struct hpmlg_dims {
    int64_t batch, m, n, k;
    bool    shared; /* true: all products of the batch have the same right operand b */
} hpmlg_dims;

/* Returns the sizes of a matmul's products: one of all rows, where the whole batch shares b and a is not transposed. */
HPMLG_FN hpmlg_dims hpmlg_matmul_dims(const hpml_node *node)
{
    const hpml_tensor *c = node->out, *a = node->src[0], *b = node->src[1];
    hpmlg_dims         d = { 1, 0, 0, 0, false };
    for (int i = 0; i < c->ndim - 2; i++) d.batch *= c->shape[i];
    d.m = c->shape[c->ndim - 2];
    d.n = c->shape[c->ndim - 1];
    d.k = a->shape[a->ndim - (node->attr.matmul.trans_a ? 2 : 1)];
    d.shared = b->ndim == 2 && c->ndim > 2;
    if (d.shared && !node->attr.matmul.trans_a) {
        d.m *= d.batch;
        d.batch  = 1;
        d.shared = false;
    }
    return d;
}

/* Computes `batch` products c (m, n) = a (m, k) b (k, n); add: adds them to c. transposed: stores, or adds, the
   transposes of the products, (n, m), instead. */
HPMLG_FN void hpmlg_batched_product(hpmlg_device *d, int64_t batch, int64_t m, int64_t n, int64_t k, hpmlg_operand a,
                                    hpmlg_operand b, hpmlg_array c, bool add, bool transposed)
{
    hpmlg_gemm g = transposed ? hpmlg_gemm_of(n, m, k, b, a, c, m, add) : hpmlg_gemm_of(m, n, k, a, b, c, n, add);
    g.batch = batch;
    hpmlg_gemm_run(d, &g);
}

/* Returns op(A) (m, k) of the matmul n or, if `second`, op(B) (k, n), as an operand of a product; op: transposes, where
   the node says so. x: the array of A or B; transposed: the operand's transpose is returned. */
HPMLG_FN hpmlg_operand hpmlg_matmul_operand(const hpml_node *n, const hpmlg_dims *s, hpmlg_array x, bool second,
                                            bool transposed)
{
    bool    stored = second ? n->attr.matmul.trans_b : n->attr.matmul.trans_a; /* true: x is the operand's transpose */
    int64_t rows = second ? s->k : s->m, cols = second ? s->n : s->k;
    int64_t batch = second && s->shared ? 0 : rows * cols;
    return hpmlg_matrix(x, stored ? rows : cols, batch, (stored != transposed) == second);
}

HPMLG_FN void hpmlg_op_matmul(HPMLG_OP_ARGUMENTS)
{
    hpmlg_dims   s = hpmlg_matmul_dims(n);
    hpml_tensor *ta = n->src[0], *tb = n->src[1];
    hpmlg_array  a = hpmlg_product_input(d, ta, NULL), b = hpmlg_product_input(d, tb, NULL), dc = hpmlg_grad(n->out);
    int64_t      mn = s.m * s.n;
    if (!back)
        return hpmlg_batched_product(d, s.batch, s.m, s.n, s.k, hpmlg_matmul_operand(n, &s, a, false, false),
                                     hpmlg_matmul_operand(n, &s, b, true, false), hpmlg_value(n->out), false, false);
    if (ta->raw_grad) /* dA (m, k) = dC op(B)^T; transposed where trans_a is set */
        hpmlg_batched_product(d, s.batch, s.m, s.k, s.n, hpmlg_matrix(dc, s.n, mn, true),
                              hpmlg_matmul_operand(n, &s, b, true, true), hpmlg_grad(ta), n->accumulate[0],
                              n->attr.matmul.trans_a);
    for (int64_t i = 0; tb->raw_grad && i < (s.shared ? s.batch : 1); i++) { /* dB = op(A)^T dC; trans_b: transposed */
        bool        add = n->accumulate[1] || i > 0 || ta == tb; /* a shared b's gradient is summed over the batch */
        hpmlg_array ai = hpmlg_array_at(a, i * s.m * s.k), ci = hpmlg_array_at(dc, i * mn);
        hpmlg_batched_product(d, s.shared ? 1 : s.batch, s.k, s.n, s.m, hpmlg_matmul_operand(n, &s, ai, false, true),
                              hpmlg_matrix(ci, s.n, mn, false), hpmlg_grad(tb), add, n->attr.matmul.trans_b);
    }
}

/* Returns the array from which the derivative of linear layer n's activation is computed: the activation's input z if z
   is saved, else the activation's output. */
HPMLG_FN hpmlg_array hpmlg_linear_z(const hpml_node *n)
{
    return n->saved ? hpmlg_array_of(n->saved, n->out->dtype) : hpmlg_value(n->out);
}

HPMLG_FN void hpmlg_linear_forward(hpmlg_device *d, hpml_node *n)
{
    const hpml_tensor *w = n->src[1], *bias = n->src[2];
    int64_t            out = w->shape[0], in = w->shape[1], rows = hpml_tensor_count(n->src[0]) / in;
    hpmlg_array        x = hpmlg_product_input(d, n->src[0], n->scratch), wt = hpmlg_product_input(d, w, NULL);
    hpmlg_gemm         g = hpmlg_gemm_of(rows, out, in, hpmlg_matrix(x, in, 0, true), hpmlg_matrix(wt, in, 0, true),
                                         hpmlg_value(n->out), out, false);
    g.act   = n->attr.act.act;
    g.slope = n->attr.act.slope;
    g.z     = hpmlg_array_of(n->saved, n->out->dtype);
    if (bias) g.bias = bias->data;
    if (bias && g.c.type != HPML_DTYPE_F32) g.bias_half = hpmlg_half_copy_of(d, bias, false);
    hpmlg_gemm_run(d, &g);
}

/* Returns m, the linear layer before n, if the product for n's dx can include the multiplication by m's act'(z); NULL:
   none. n must be recorded right after m: then n reads m's result first, and adds to the result's gradient last. */
HPMLG_FN const hpml_node *hpmlg_linear_before(const hpml_node *n)
{
    const hpml_node *m = n->src[0]->node;
    return m && m->op == HPML_OP_LINEAR && m->attr.act.act && m->index + 1 == n->index ? m : NULL;
}

/* Computes a linear layer's dz = dy act'(z), db = the column sums of dz, and dw = dz^T x. The sums are fused into the
   product for dw if `act` is HPML_ACT_NONE: the layer has no activation, or dy is multiplied by act'(z) already. */
HPMLG_FN void hpmlg_linear_dw(hpmlg_device *d, hpml_node *n, hpml_act act)
{
    hpml_tensor  *x = n->src[0], *w = n->src[1], *bias = n->src[2];
    int64_t       out = w->shape[0], in = w->shape[1], rows = hpml_tensor_count(x) / in;
    hpmlg_array   dz = hpmlg_grad(n->out), null = hpmlg_array_null();
    hpmlg_strides columns = hpmlg_broadcast_strides(1, rows, out);
    float        *db = bias ? bias->grad : NULL;
    bool          fuse = act == HPML_ACT_NONE && w->raw_grad && db && out <= (int64_t)(HPMLG_SCRATCH / sizeof(float));
    if (!fuse)
        hpmlg_act_bias_grad(d, dz, hpmlg_linear_z(n), act, n->attr.act.slope, columns, db, n->accumulate[2]);
    if (!w->raw_grad) return;
    hpmlg_gemm dw = hpmlg_gemm_of(out, in, rows, hpmlg_matrix(dz, out, 0, false),
                                  hpmlg_matrix(hpmlg_product_input(d, x, n->scratch), in, 0, false), hpmlg_grad(w), in,
                                  n->accumulate[1]);
    if (fuse) dw.sums = n->accumulate[2] ? (float *)d->scratch : db;
    hpmlg_epilogue done = hpmlg_gemm_run(d, &dw);
    if (fuse && !done.row_sums)
        hpmlg_act_bias_grad(d, dz, null, HPML_ACT_NONE, 0, columns, db, n->accumulate[2]);
    else if (fuse && n->accumulate[2])
        hpmlg_copy_run(d, hpmlg_array_of(db, HPML_DTYPE_F32), hpmlg_array_of(dw.sums, HPML_DTYPE_F32), out, true);
}

HPMLG_FN void hpmlg_linear_backward(hpmlg_device *d, hpml_node *n)
{
    hpml_tensor     *x = n->src[0], *w = n->src[1];
    const hpml_node *before = hpmlg_linear_before(n);
    int64_t          out = w->shape[0], in = w->shape[1], rows = hpml_tensor_count(x) / in;
    bool             act_done = d->op_notes.activation_grad_done == n; /* true: dy includes act'(z) */
    d->op_notes.activation_grad_done = NULL;
    hpmlg_linear_dw(d, n, act_done ? HPML_ACT_NONE : n->attr.act.act);
    if (!x->raw_grad) return;
    hpmlg_gemm dx = hpmlg_gemm_of(rows, in, out, hpmlg_matrix(hpmlg_grad(n->out), out, 0, true),
                                  hpmlg_matrix(hpmlg_product_input(d, w, NULL), in, 0, false), hpmlg_grad(x), in,
                                  n->accumulate[0]);
    if (before) {
        dx.back  = true;
        dx.z     = hpmlg_linear_z(before);
        dx.act   = before->attr.act.act;
        dx.slope = before->attr.act.slope;
    }
    hpmlg_epilogue done = hpmlg_gemm_run(d, &dx);
    if (done.derivative) d->op_notes.activation_grad_done = before;
}

HPMLG_FN void hpmlg_op_linear(HPMLG_OP_ARGUMENTS)
{
    if (back) hpmlg_linear_backward(d, n);
    else hpmlg_linear_forward(d, n);
}

// ---------------------------------------------------------------------------------------------------------------------
// >>gpu-conv   convolution by own kernels
// ---------------------------------------------------------------------------------------------------------------------

/* A convolution is a product whose right operand is never stored (implicit GEMM): for each output channel o, image b
   and pixel (h, w), with s the stride and p the padding,

       for (c = 0; c < C; c++)
           for (i = 0; i < kh; i++)
               for (j = 0; j < kw; j++)                       k = (c, i, j) is the summed axis
                   y[b][o][h][w] += w[o][c][i][j] * x[b][c][h s + i - p][w s + j - p];      0 outside of the image

   that is y (OC, pixels) = w (OC, C taps) x' (C taps, pixels), where an element of x' is found in the image by adding
   what its two axes contribute (hpmlg_operand_get): pixel (b, h, w) contributes image b and position (h s - p, w s -
   p), and k = (c, i, j) channel c and position (i, j). With 3 x 3 taps and a stride of 1:

       x, one channel       pixel (h, w) of y      column of x' for this pixel
       . . . . .            reads the 3 x 3        (the taps from left to right, channel by channel)
       . a b c .            elements around it     a b c d e f g h i | the same of channel 2 | ...
       . d e f .
       . g h i .

   Likewise dx (C, pixels) = w' (C, OC taps) dy' (OC taps, pixels), and dw (OC, C taps) = dy (OC, pixels) x'^T. With a
   stride, pixels of x with the same remainder modulo the stride are reached by the same taps: dx is one product for
   each remainder. Groups are a batch of products. Where cuDNN refuses a convolution of a half model, images are NHWC
   (>>gpu-nhwc), for which only the strides differ. A model that uses no cuDNN at all is NCHW. */

typedef struct hpmlg_conv {
    int64_t B, C, H, W, OC, OH, OW, groups; /* B images; x (C, H, W) and y (OC, OH, OW) of one group */
    int64_t taps, P;                        /* elements of the kernel's window; pixels of a plane of y */
    bool    nhwc;                           /* true: x and y are NHWC in memory, and half copies of w (OC, taps, C) */
    /* distances in memory: of channels and pixels of x and of y; of channels and taps of a filter's half copy */
    int64_t x_channel, x_pixel, y_channel, y_pixel, w_channel, w_tap;
    const int32_t *kernel, *stride, *padding, *dilation; /* (2): along height, width */
} hpmlg_conv;

HPMLG_FN hpmlg_conv hpmlg_conv_of(const hpmlg_device *d, const hpml_node *n)
{
    const hpml_tensor *x = n->src[0], *y = n->out;
    hpmlg_conv         c = {};
    c.groups    = n->attr.conv.groups;
    c.B         = x->shape[0];
    c.C         = x->shape[1] / c.groups;
    c.H         = x->shape[2];
    c.W         = x->shape[3];
    c.OC        = y->shape[1] / c.groups;
    c.OH        = y->shape[2];
    c.OW        = y->shape[3];
    c.kernel    = n->attr.conv.kernel;
    c.stride    = n->attr.conv.stride;
    c.padding   = n->attr.conv.padding;
    c.dilation  = n->attr.conv.dilation;
    c.taps      = (int64_t)c.kernel[0] * c.kernel[1];
    c.P         = c.OH * c.OW;
    c.nhwc      = d->nhwc && hpmlg_fits_nhwc(x) && hpmlg_fits_nhwc(y);
    c.x_channel = c.nhwc ? 1 : c.H * c.W;
    c.x_pixel   = c.nhwc ? x->shape[1] : 1;
    c.y_channel = c.nhwc ? 1 : c.P;
    c.y_pixel   = c.nhwc ? y->shape[1] : 1;
    c.w_channel = c.nhwc ? 1 : c.taps;
    c.w_tap     = c.nhwc ? c.C : 1;
    return c;
}

/* Returns the filter of convolution n for products: in a half model its half copy, in the order of n's images. */
HPMLG_FN hpmlg_array hpmlg_conv_filter(hpmlg_device *d, const hpml_node *n)
{
    if (!hpmlg_conv_of(d, n).nhwc) return hpmlg_product_input(d, n->src[1], NULL);
    return hpmlg_array_of(hpmlg_half_copy_of(d, n->src[1], true), d->act_dtype);
}

/* The pixels of x along one axis that have one remainder modulo the stride: `count` pixels, first, first + stride, ...
   The kernel's taps that reach them are `taps` taps: tap, tap + step, ... These taps connect the first pixel to pixels
   at, at - back, ... of y, and each next pixel of x to pixels of y one further. */
typedef struct hpmlg_residue { int first, count, tap, step, taps, at, back; } hpmlg_residue;

HPMLG_FN hpmlg_residue hpmlg_residue_of(const hpmlg_conv *c, int i, int first, int64_t size)
{
    int           s = c->stride[i], by = c->dilation[i];
    hpmlg_residue r = { first, (int)((size - first + s - 1) / s), 0, 1, 0, 0, 0 };
    while (r.step * by % s) r.step++;
    while (r.tap < r.step && (first + c->padding[i] - r.tap * by) % s) r.tap++;
    if (r.tap < r.step && r.tap < c->kernel[i]) r.taps = (c->kernel[i] - 1 - r.tap) / r.step + 1;
    r.at   = (first + c->padding[i] - r.tap * by) / s;
    r.back = r.step * by / s;
    return r;
}

/* Computes dx (+)= the gradient of a convolution by its input: one product for each pair of remainders that the row and
   the column of a pixel of dx leave when divided by the stride. */
HPMLG_FN void hpmlg_conv_dx(hpmlg_device *d, const hpmlg_conv *c, hpmlg_array dy, hpmlg_array w, hpmlg_array dx,
                            bool add)
{
    int64_t size = c->H * c->W, kw = c->kernel[1];
    for (int i = 0; i < c->stride[0] * c->stride[1]; i++) {
        hpmlg_residue h = hpmlg_residue_of(c, 0, i / c->stride[1], c->H);
        hpmlg_residue v = hpmlg_residue_of(c, 1, i % c->stride[1], c->W);
        hpmlg_axis    pixels = hpmlg_axis_3d(h.count, v.count, c->groups * c->OC * c->P, 0, 0);
        hpmlg_axis    taps   = hpmlg_axis_3d(h.taps, v.taps, c->y_channel, 0, 0);
        hpmlg_product j      = {};
        j.batch = c->groups;
        j.c     = hpmlg_array_at(dx, (h.first * c->W + v.first) * c->x_pixel);
        j.alpha = 1;
        j.add   = add;
        j.m     = c->C;
        j.n     = c->B * h.count * v.count;
        j.k     = c->OC * h.taps * v.taps;
        if (j.n == 0 || (j.k == 0 && add)) continue;
        pixels.h0 = (int16_t)h.at;
        pixels.w0 = (int16_t)v.at;
        pixels.h  = 1;
        pixels.w  = 1;
        taps.h    = (int16_t)-h.back;
        taps.w    = (int16_t)-v.back;
        j.a = hpmlg_operand_of(hpmlg_array_at(w, (h.tap * kw + v.tap) * c->w_tap), c->OC * c->C * c->taps,
                               hpmlg_axis_1d(c->w_channel),
                               hpmlg_axis_3d(h.taps, v.taps, c->C * c->taps, h.step * kw * c->w_tap, v.step * c->w_tap),
                               true);
        j.b = hpmlg_image_operand(dy, c->OC * c->y_channel, pixels, taps, false, c->OH, c->OW, c->y_pixel);
        j.ldc     = c->x_channel;
        j.c_batch = c->C * c->x_channel;
        j.col = hpmlg_axis_3d(h.count, v.count, c->groups * c->C * size, c->stride[0] * c->W * c->x_pixel,
                              c->stride[1] * c->x_pixel);
        hpmlg_product_run(d, &j);
    }
}

/* Computes y (images, C, P) = act(y + bias), in place; bias (C) or NULL; n: elements of y. P is 1 for NHWC images. */
static __global__ void hpmlg_k_bias_act(hpmlg_array y, const float *bias, int act, int64_t C, int64_t P, int64_t n)
{
    HPMLG_FOR_EACH_VEC8(at, n) {
        hpmlg_vec8 e = hpmlg_get_range(y, at, 0, n, 0);
        int64_t    plane = hpmlg_quotient(at, P), r = at - plane * P, c = plane - hpmlg_quotient(plane, C) * C;
        for (int j = 0; j < 8; j++, r++) {
            if (r == P) {
                r = 0;
                c = c + 1 == C ? 0 : c + 1;
            }
            e.v[j] = hpmlg_act_called(act, 0.01f, e.v[j] + (bias ? bias[c] : 0));
        }
        hpmlg_put_range(y, at, 0, n, e, false);
    }
}

/* The passes of a convolution: y, dx or dw is computed. hpmlg_dnn_run runs one pass by cuDNN (add: adds to the
   result) and returns false if cuDNN refuses. */
typedef enum hpmlg_dnn_pass { HPMLG_DNN_Y, HPMLG_DNN_DX, HPMLG_DNN_DW, HPMLG_DNN_PASSES } hpmlg_dnn_pass;
HPMLG_FN bool hpmlg_dnn_run(hpmlg_device *d, hpml_node *n, hpmlg_dnn_pass pass, hpmlg_array x, hpmlg_array w,
                            hpmlg_array y, bool add);

/* Runs one pass of convolution n, which computes y, dx (in x) or dw (in w), by cuDNN or by this header's kernels. */
HPMLG_FN void hpmlg_conv_run(hpmlg_device *d, hpml_node *n, hpmlg_dnn_pass pass, hpmlg_array x, hpmlg_array w,
                             hpmlg_array y, bool add)
{
    hpmlg_conv    c = hpmlg_conv_of(d, n);
    hpmlg_product j = {};
    int64_t       size = c.C * c.taps, kw = c.kernel[1];
    /* axes: pixels: the pixels of y in y; windows: the pixel of x under tap (0, 0), for each pixel of y; taps: the
       pixels of x under all taps, relative to tap (0, 0); weights: the elements of w under all taps */
    hpmlg_axis    pixels = hpmlg_axis_3d(c.P, 1, c.groups * c.OC * c.P, c.y_pixel, 0);
    hpmlg_axis    windows = hpmlg_axis_3d(c.OH, c.OW, c.groups * c.C * c.H * c.W, 0, 0);
    hpmlg_axis    taps = hpmlg_axis_3d(c.kernel[0], kw, c.x_channel, 0, 0);
    hpmlg_axis    weights = hpmlg_axis_3d(c.kernel[0], kw, c.w_channel, kw * c.w_tap, c.w_tap);
    if (!hpmlg_ok(d) || hpmlg_dnn_run(d, n, pass, x, w, y, add)) return;
    d->work.convolutions[1]++;
    if (pass == HPMLG_DNN_DX) return hpmlg_conv_dx(d, &c, y, w, x, add);
    windows.h0 = (int16_t)-c.padding[0];
    windows.w0 = (int16_t)-c.padding[1];
    windows.h  = (int16_t)c.stride[0];
    windows.w  = (int16_t)c.stride[1];
    taps.h     = (int16_t)c.dilation[0];
    taps.w     = (int16_t)c.dilation[1];
    j.batch    = c.groups;
    j.m        = c.OC;
    j.alpha    = 1;
    j.add      = add;
    if (pass == HPMLG_DNN_Y) {
        j.a          = hpmlg_operand_of(w, c.OC * size, hpmlg_axis_1d(size), weights, true);
        j.b          = hpmlg_image_operand(x, c.C * c.x_channel, windows, taps, false, c.H, c.W, c.x_pixel);
        j.c          = y;
        j.n          = c.B * c.P;
        j.k          = size;
        j.ldc        = c.y_channel;
        j.c_batch    = c.OC * c.y_channel;
        j.col        = pixels;
        j.bias       = hpmlg_param_value(n, 2);
        j.bias_row   = 1;
        j.bias_batch = c.OC;
        j.act        = n->attr.conv.act;
        j.slope      = 0.01f;
    } else {
        j.a       = hpmlg_operand_of(y, c.OC * c.y_channel, hpmlg_axis_1d(c.y_channel), pixels, true);
        j.b       = hpmlg_image_operand(x, c.C * c.x_channel, taps, windows, true, c.H, c.W, c.x_pixel);
        j.c       = w;
        j.n       = size;
        j.k       = c.B * c.P;
        j.ldc     = size;
        j.c_batch = c.OC * size;
        j.flat    = true;
    }
    hpmlg_product_run(d, &j);
}

HPMLG_FN void hpmlg_op_conv2d(HPMLG_OP_ARGUMENTS)
{
    hpml_tensor  *x = n->src[0], *w = n->src[1], *y = n->out;
    hpmlg_strides planes = {}; /* strides of the bias: one number per channel */
    if (!back)
        return hpmlg_conv_run(d, n, HPMLG_DNN_Y, hpmlg_product_input(d, x, n->scratch), hpmlg_conv_filter(d, n),
                              hpmlg_value(y), false);
    for (int i = 3; i >= 0; i--)
        hpmlg_strides_push(&planes, y->shape[hpmlg_dim_in_memory(y, i)], hpmlg_dim_in_memory(y, i) == 1, 0);
    hpmlg_act_bias_grad(d, hpmlg_grad(y), hpmlg_value(y), n->attr.conv.act, 0.01f, planes, hpmlg_param_grad(n, 2),
                        n->accumulate[2]);
    if (w->raw_grad)
        hpmlg_conv_run(d, n, HPMLG_DNN_DW, hpmlg_product_input(d, x, n->scratch), hpmlg_grad(w), hpmlg_grad(y),
                       n->accumulate[1]);
    if (x->raw_grad)
        hpmlg_conv_run(d, n, HPMLG_DNN_DX, hpmlg_grad(x), hpmlg_conv_filter(d, n), hpmlg_grad(y), n->accumulate[0]);
}

/* Runs a transposed convolution by the opposite passes of its mirror, the convolution from its result to its source. */
HPMLG_FN void hpmlg_op_conv_transpose2d(HPMLG_OP_ARGUMENTS)
{
    hpml_mirror *m = n->attr.conv_transpose.mirror;
    hpml_tensor *x = n->src[0], *w = n->src[1];
    m->x            = *n->out;
    m->y            = *x;
    m->node.src[1]  = w;
    m->node.state   = n->state;
    m->node.scratch = (char *)n->scratch + hpmlg_narrowed_bytes(d, x);
    if (!back)
        return hpmlg_conv_run(d, &m->node, HPMLG_DNN_DX, hpmlg_value(n->out), hpmlg_conv_filter(d, &m->node),
                              hpmlg_product_input(d, x, n->scratch), false);
    if (w->raw_grad)
        hpmlg_conv_run(d, &m->node, HPMLG_DNN_DW, hpmlg_grad(n->out), hpmlg_grad(w),
                       hpmlg_product_input(d, x, n->scratch), n->accumulate[1]);
    if (x->raw_grad)
        hpmlg_conv_run(d, &m->node, HPMLG_DNN_Y, hpmlg_grad(n->out), hpmlg_conv_filter(d, &m->node), hpmlg_grad(x),
                       n->accumulate[0]);
}

// ---------------------------------------------------------------------------------------------------------------------
// >>gpu-cudnn   convolution by cuDNN
// ---------------------------------------------------------------------------------------------------------------------

/* Each convolution and batch size has a plan: its descriptors and, for each pass, the algorithm that cuDNN's heuristics
   put first among the algorithms that are deterministic and fit in the workspace, which is grown for the algorithm
   unless the pass is being recorded. Where there is no such algorithm, this header's kernels run. HPML_CUDA_F32
   excludes Winograd and FFT, because they do not sum products of the f32 operands. In a half model images and filters
   are NHWC, and cuDNN computes the gradient of the weights in halves, which are then added to the f32 gradient. */

/* Grows the libraries' workspace to `bytes` bytes. Returns false over the limit, while a pass is recorded as a CUDA
   graph, or out of memory. Destroys recorded passes, which contain the old address; they are then recorded again. */
HPMLG_FN bool hpmlg_workspace_grow(hpmlg_device *d, size_t bytes)
{
    if (bytes <= d->workspace_bytes) return true;
    void *larger = bytes <= d->workspace_limit && !d->recording ? hpmlg_alloc(d, bytes) : NULL;
    if (!larger) return false;
    hpmlg_free(d, d->workspace, d->workspace_bytes);
    d->workspace       = larger;
    d->workspace_bytes = bytes;
    for (hpmlg_pass &p : d->passes) hpmlg_destroy(&p);
    return true;
}

#ifdef HPML_CUDA_NO_CUDNN
#define HPMLG_HAS_CUDNN 0
HPMLG_FN bool hpmlg_dnn_run(hpmlg_device *, hpml_node *, hpmlg_dnn_pass, hpmlg_array, hpmlg_array, hpmlg_array, bool)
{ return false; }
HPMLG_FN int  hpmlg_dnn_algorithms(const hpmlg_device *, int, int *) { return 0; }
HPMLG_FN void hpmlg_dnn_close(hpmlg_device *) {}
#else
#define HPMLG_HAS_CUDNN 1
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

/* Returns true if the status says that cuDNN refuses, so that this header's kernels run instead. Since cuDNN 9 the last
   three digits of a status are the reason. */
HPMLG_FN bool hpmlg_dnn_refused(cudnnStatus_t s)
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
    cudnnMathType_t              math[HPMLG_DNN_PASSES]; /* math mode of algorithm algo[pass] */
    bool                         asked[HPMLG_DNN_PASSES], usable[HPMLG_DNN_PASSES]; /* asked: cuDNN was asked for an
                                                                                       algorithm; usable: it gave it */
    bool                         set, refused;           /* set: the descriptors are set; refused: by cuDNN */
    bool                         unfused;                /* true: cuDNN has refused to fuse bias and activation */
} hpmlg_dnn_plan;

#define HPMLG_DNN_PLANS 128

typedef struct hpmlg_dnn {
    cudnnHandle_t  handle;
    hpmlg_dnn_plan plans[HPMLG_DNN_PLANS];
} hpmlg_dnn;

HPMLG_FN void hpmlg_destroy(hpmlg_dnn_plan *p)
{
    if (p->x) cudnnDestroyTensorDescriptor(p->x);
    if (p->y) cudnnDestroyTensorDescriptor(p->y);
    if (p->bias) cudnnDestroyTensorDescriptor(p->bias);
    if (p->w) cudnnDestroyFilterDescriptor(p->w);
    if (p->conv) cudnnDestroyConvolutionDescriptor(p->conv);
    if (p->act) cudnnDestroyActivationDescriptor(p->act);
}

HPMLG_FN cudnnDataType_t hpmlg_dnn_type(hpml_dtype type)
{
    if (type == HPML_DTYPE_F32) return CUDNN_DATA_FLOAT;
    return type == HPML_DTYPE_BF16 ? CUDNN_DATA_BFLOAT16 : CUDNN_DATA_HALF;
}

HPMLG_FN cudnnStatus_t hpmlg_dnn_describe(const hpmlg_device *d, hpmlg_dnn_plan *p)
{
    hpmlg_conv      c = hpmlg_conv_of(d, p->key.n);
    cudnnTensorFormat_t order = c.nhwc ? CUDNN_TENSOR_NHWC : CUDNN_TENSOR_NCHW;
    cudnnDataType_t type = hpmlg_dnn_type(d->act_dtype);
    bool            relu = p->key.n->attr.conv.act == HPML_ACT_RELU;
    int             channels = (int)(c.groups * c.OC);
    cudnnStatus_t   s = cudnnCreateTensorDescriptor(&p->x);
    HPMLG_TRY(s, cudnnCreateTensorDescriptor(&p->y));
    HPMLG_TRY(s, cudnnCreateTensorDescriptor(&p->bias));
    HPMLG_TRY(s, cudnnCreateFilterDescriptor(&p->w));
    HPMLG_TRY(s, cudnnCreateConvolutionDescriptor(&p->conv));
    HPMLG_TRY(s, cudnnCreateActivationDescriptor(&p->act));
    HPMLG_TRY(s, cudnnSetTensor4dDescriptor(p->x, order, type, (int)c.B, (int)(c.groups * c.C), (int)c.H, (int)c.W));
    HPMLG_TRY(s, cudnnSetTensor4dDescriptor(p->y, order, type, (int)c.B, channels, (int)c.OH, (int)c.OW));
    HPMLG_TRY(s, cudnnSetTensor4dDescriptor(p->bias, order, type, 1, channels, 1, 1));
    HPMLG_TRY(s, cudnnSetFilter4dDescriptor(p->w, type, order, channels, (int)c.C, c.kernel[0], c.kernel[1]));
    HPMLG_TRY(s, cudnnSetConvolution2dDescriptor(p->conv, c.padding[0], c.padding[1], c.stride[0], c.stride[1],
                                                  c.dilation[0], c.dilation[1], CUDNN_CROSS_CORRELATION,
                                                  CUDNN_DATA_FLOAT));
    HPMLG_TRY(s, cudnnSetConvolutionGroupCount(p->conv, (int)c.groups));
    HPMLG_TRY(s, cudnnSetActivationDescriptor(p->act, relu ? CUDNN_ACTIVATION_RELU : CUDNN_ACTIVATION_IDENTITY,
                                               CUDNN_PROPAGATE_NAN, 0));
    return s;
}

/* Is true if algorithm `a` of a cuDNN pass (FWD, BWD_DATA or BWD_FILTER) is neither Winograd's nor an FFT. */
#define HPMLG_DNN_EXACT(pass, a)                                                                                       \
    ((int)(a) != CUDNN_CONVOLUTION_##pass##_ALGO_FFT && (int)(a) != CUDNN_CONVOLUTION_##pass##_ALGO_FFT_TILING &&      \
     (int)(a) != CUDNN_CONVOLUTION_##pass##_ALGO_WINOGRAD &&                                                           \
     (int)(a) != CUDNN_CONVOLUTION_##pass##_ALGO_WINOGRAD_NONFUSED)

/* Chooses the first algorithm in cuDNN's list that is deterministic, fits in the workspace and, in f32, multiplies in
   full f32 (no TF32, FFT or Winograd). Kind, KIND, Pass: how cuDNN's names spell the computation (y, dx or dw), such as
   Fwd, FWD, Forward. `...`: the descriptors that cuDNN's function takes. */
#define HPMLG_DNN_CHOOSE(Kind, KIND, Pass, ...)                                                                        \
    do {                                                                                                               \
        cudnnConvolution##Kind##AlgoPerf_t found[8];                                                                   \
        HPMLG_TRY(s, cudnnGetConvolution##Pass##Algorithm_v7(dnn->handle, __VA_ARGS__, 8, &count, found));             \
        for (int i = 0; i < count && s == CUDNN_STATUS_SUCCESS && !p->usable[pass]; i++)                               \
            if (found[i].status == CUDNN_STATUS_SUCCESS && found[i].determinism == CUDNN_DETERMINISTIC &&              \
                (!f32 || found[i].mathType == CUDNN_FMA_MATH || found[i].mathType == CUDNN_DEFAULT_MATH) &&            \
                (!f32 || HPMLG_DNN_EXACT(KIND, found[i].algo)) && hpmlg_workspace_grow(d, found[i].memory)) {          \
                p->usable[pass] = true;                                                                                \
                p->algo[pass]   = (int)found[i].algo;                                                                  \
                p->math[pass]   = f32 ? CUDNN_FMA_MATH : found[i].mathType;                                            \
                if (found[i].memory > d->workspace_wanted) d->workspace_wanted = found[i].memory;                      \
            }                                                                                                          \
    } while (0)

HPMLG_FN void hpmlg_dnn_choose(hpmlg_device *d, hpmlg_dnn *dnn, hpmlg_dnn_plan *p, hpmlg_dnn_pass pass)
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
    hpmlg_dnn_plan *p = hpmlg_cache_find(d, dnn->plans, hpmlg_dnn_key{ n, n->out->shape[0] });
    if (!p->set) {
        cudnnStatus_t s = hpmlg_dnn_describe(d, p);
        p->set     = true;
        p->refused = s != CUDNN_STATUS_SUCCESS;
        if (!hpmlg_dnn_refused(s)) hpmlg_dnn_check(d, s, "describing a convolution to cuDNN");
    }
    if (!p->refused && !p->asked[pass]) hpmlg_dnn_choose(d, dnn, p, pass);
    return p;
}

/* Computes y = beta y + conv(x, w) or, where cuDNN can, act(conv(x, w) + bias) in one launch, which only one of its
   algorithms supports. beta is 0 where there is a bias. Sets *whole to true if bias and activation, where the layer has
   them, are done. */
HPMLG_FN cudnnStatus_t hpmlg_dnn_forward(hpmlg_device *d, hpmlg_dnn *dnn, hpmlg_dnn_plan *p, hpml_node *n,
                                         hpmlg_array x, hpmlg_array w, hpmlg_array y, float beta, bool *whole)
{
    const float               one = 1, zero = 0;
    hpml_act                  act = n->attr.conv.act;
    cudnnConvolutionFwdAlgo_t algo = (cudnnConvolutionFwdAlgo_t)p->algo[HPMLG_DNN_Y];
    *whole = !n->src[2] && act == HPML_ACT_NONE;
    if (n->src[2] && !p->unfused && (act == HPML_ACT_NONE || act == HPML_ACT_RELU) &&
        algo == CUDNN_CONVOLUTION_FWD_ALGO_IMPLICIT_PRECOMP_GEMM) {
        hpmlg_array   b = hpmlg_product_input(d, n->src[2], NULL);
        cudnnStatus_t s = cudnnConvolutionBiasActivationForward(dnn->handle, &one, p->x, x.p, p->w, w.p, p->conv, algo,
                                                                d->workspace, d->workspace_bytes, &zero, p->y, y.p,
                                                                p->bias, b.p, p->act, p->y, y.p);
        *whole     = !hpmlg_dnn_refused(s);
        p->unfused = !*whole;
        if (!p->unfused) return s;
    }
    return cudnnConvolutionForward(dnn->handle, &one, p->x, x.p, p->w, w.p, p->conv, algo, d->workspace,
                                   d->workspace_bytes, &beta, p->y, y.p);
}

/* Returns the device's cuDNN state, opened at the first convolution because that takes long; NULL: an error. */
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

/* Runs a pass of convolution n by cuDNN. False: this header's kernels must run the pass, because cuDNN refuses it, now
   and in later calls, or because cuDNN is not to be used (own_kernels), or not for these types or addresses. */
HPMLG_FN bool hpmlg_dnn_run(hpmlg_device *d, hpml_node *n, hpmlg_dnn_pass pass, hpmlg_array x, hpmlg_array w,
                            hpmlg_array y, bool add)
{
    const float one = 1, zero = 0, beta = add ? 1.0f : 0.0f;
    bool        narrow = pass == HPMLG_DNN_DW && d->act_dtype != HPML_DTYPE_F32, whole = true;
    void       *dw = narrow ? (char *)n->scratch + hpmlg_narrowed_bytes(d, n->src[0]) : w.p;
    hpmlg_conv  c = hpmlg_conv_of(d, n);
    int64_t     count = hpml_tensor_count(n->out), filters = c.groups * c.OC;
    uintptr_t       addresses = (uintptr_t)x.p | (uintptr_t)w.p | (uintptr_t)y.p; /* a micro-batch may be unaligned */
    if (d->d.own_kernels || x.type != (int)d->act_dtype || y.type != (int)d->act_dtype || addresses % 16) return false;
    hpmlg_dnn      *dnn = hpmlg_dnn_open(d);
    hpmlg_dnn_plan *p   = dnn ? hpmlg_dnn_plan_of(d, dnn, n, pass) : NULL;
    d->work.convolutions_refused += p && !p->usable[pass];
    if (!p || !p->usable[pass]) return false;
    cudnnStatus_t s = cudnnSetConvolutionMathType(p->conv, p->math[pass]);
    if (pass == HPMLG_DNN_Y) HPMLG_TRY(s, hpmlg_dnn_forward(d, dnn, p, n, x, w, y, beta, &whole));
    if (pass == HPMLG_DNN_DW)
        HPMLG_TRY(s, cudnnConvolutionBackwardFilter(dnn->handle, &one, p->x, x.p, p->y, y.p, p->conv,
                                                    (cudnnConvolutionBwdFilterAlgo_t)p->algo[pass], d->workspace,
                                                    d->workspace_bytes, narrow ? &zero : &beta, p->w, dw));
    if (pass == HPMLG_DNN_DX)
        HPMLG_TRY(s, cudnnConvolutionBackwardData(dnn->handle, &one, p->w, w.p, p->y, y.p, p->conv,
                                                  (cudnnConvolutionBwdDataAlgo_t)p->algo[pass], d->workspace,
                                                  d->workspace_bytes, &beta, p->x, x.p));
    p->usable[pass] = !hpmlg_dnn_refused(s);
    d->work.convolutions_refused += !p->usable[pass];
    if (!p->usable[pass]) return false;
    d->work.convolutions[0]++;
    d->work.fused += whole && n->src[2] && pass == HPMLG_DNN_Y;
    hpmlg_dnn_check(d, s, "a convolution by cuDNN");
    if (narrow && c.nhwc) hpmlg_reorder_run(d, w, hpmlg_array_of(dw, d->act_dtype), filters, c.C, c.taps, false, add);
    else if (narrow) hpmlg_copy_run(d, w, hpmlg_array_of(dw, d->act_dtype), hpml_tensor_count(n->src[1]), add);
    if (!whole)
        HPMLG_RUN_ITEMS(d, hpmlg_k_bias_act, count, 2048, y, hpmlg_param_value(n, 2), (int)n->attr.conv.act,
                        filters, c.y_channel, count);
    return true;
}

/* Lists the numbers by which cuDNN knows the algorithms that the convolutions use in pass `pass` (0: forward, 1: dx, 2:
   dw), each number once; returns how many there are. */
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
    for (int i = 0; dnn && i < HPMLG_DNN_PLANS; i++) hpmlg_destroy(&dnn->plans[i]);
    if (dnn && dnn->handle) cudnnDestroy(dnn->handle);
}
#endif

// =====================================================================================================================
// PART V     ATTENTION AND SEQUENCES
// =====================================================================================================================

// ---------------------------------------------------------------------------------------------------------------------
// >>gpu-attention   multi-head attention without storing the (T, T) matrix
// ---------------------------------------------------------------------------------------------------------------------

/* Attention: per sample and head, S = scale Q K^T, P = softmax(S), O = P V, in one pass over blocks of keys
   (FlashAttention-2, Dao 2023). Softmax is computed online: for each query the maximum and the sum of exp(score -
   maximum) over the blocks up to now are kept; when a block brings a larger maximum, the sum and the output are
   rescaled. For one query, in scalar code:

       float most = -INFINITY, sum = 0, o[D] = { 0 };
       for (block = 0; block < T; block += K) {                  loaded while the previous block is computed
           float s[K], top = most;
           for (j = 0; j < K; j++) {                             hpmlg_attn_scores
               s[j] = hidden(block + j) ? -INFINITY : scale * dot(q, k[block + j]);
               top  = max(top, s[j]);
           }
           float shrink = exp(most - top);                       hpmlg_attn_softmax; 1 if the maximum stays
           most = top;
           sum *= shrink;
           for (d = 0; d < D; d++) o[d] *= shrink;
           for (j = 0; j < K; j++) {
               s[j] = exp(s[j] - most);
               sum += s[j];
           }
           for (j = 0; j < K; j++)                               hpmlg_attn_accumulate
               for (d = 0; d < D; d++) o[d] += s[j] * v[block + j][d];
       }
       lse = most + log(sum);
       for (d = 0; d < D; d++) o[d] /= sum;

   A block of threads has R = 16 M W queries of one head, a warp 16 M of them, and goes over the keys K = 8 N at a time:

                    K^T, V: one stage (K keys), the next one in flight
                   +----------+----------+- - -
         Q (R, D)  |  S (R, K) in registers      A warp's S tile, (16 M, K), is M x N fragments (16, 8). The lane's
         +------+  +----------+                  elements of a fragment of S are those that it must pass as the left
         | warp |  |  warp    |   O += P V       operand of the next mma, so P never leaves the registers.
         +------+  +----------+

   lse, the log of the sum of each query, is kept for backward in base 2: P is exp2(S log2(e) - lse).

   A thread, with (g, t) = (lane / 4, lane % 4), has of each fragment columns 2t and 2t + 1 in rows g and g + 8, as
   hpmlg_mma_16816 defines. f32 has the same distribution, with plain arithmetic in place of tensor cores. Tiles in
   shared memory have DP columns (D and zeros), in pieces of 16 bytes that are exchanged so that 8 rows of one column
   lie in different banks. They are loaded by asynchronous copies one block ahead; rows that are not aligned, or of
   another type, are loaded element by element. */

#define HPMLG_ATTN_MOST 256 /* columns of a head that the kernels accept */
#define HPMLG_ATTN_LD(columns) ((columns) + 8) /* floats from row to row, so that 8 rows lie in different banks */

/* Returns v, of which the compiler then knows nothing: what is computed from the result is computed anew in every pass
   of a loop, and not kept in registers, which the sums of attention need. */
HPMLG_DEVICE int hpmlg_anew(int v)
{
    asm volatile("" : "+r"(v));
    return v;
}

enum hpmlg_attn_part { HPMLG_ATTN_Q, HPMLG_ATTN_K, HPMLG_ATTN_V, HPMLG_ATTN_O };

typedef struct hpmlg_attn {
    hpmlg_array qkv, o;         /* (B, T, C + 2 kv_heads D), (B, T, C); backward: o is the gradient of the output O */
    hpmlg_array out;            /* forward: the output O; backward: the gradient of qkv */
    float      *lse, *delta;    /* (B, heads, T): log2 of the sum of exp(scores); rowsum(dO O) */
    hpmlg_array mask;           /* (B, T), or (B, T, T) if mask_queries: keys with 0 are hidden; NULL: none are */
    int64_t     pairs;          /* number of pairs of a sample and a head: B heads; for dK and dV B kv_heads */
    int         T, heads, D, kv_heads;
    int         group;          /* heads of queries that read one head of keys and values */
    bool        mask_queries;
    float       scale;
    bool        causal, add;
    bool        is_aligned, is_aligned_o; /* true: qkv, o can be copied 16 bytes at a time, unconverted */
} hpmlg_attn;

template <int type> struct hpmlg_element { /* hpmlg_element<type>::t is the type of an element in shared memory */
    typedef typename std::conditional<type == HPML_DTYPE_F32, float, unsigned short>::type t;
};

HPMLG_DEVICE void hpmlg_element_put(float *to, float v, int) { *to = v; }
HPMLG_DEVICE void hpmlg_element_put(unsigned short *to, float v, int type)
{
    *to = (unsigned short)hpmlg_narrow(v, 0, type);
}

/* Returns 2^x; on the GPU an approximation, which is 0 where 2^x is below 2^-126. */
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

/* Returns the address of 16-byte unit number `chunk` in row `row` of a tile of DP columns of type E in shared memory,
   where the units of each row are swizzled (permuted by an exclusive or with the row) to avoid bank conflicts. */
template <int DP, class E> HPMLG_DEVICE E *hpmlg_tile_chunk(E *tile, int row, int chunk)
{
    int swap = DP * sizeof(E) % 128 == 0 ? row & 7 : row >> 1 & 3;
    return tile + row * DP + (chunk ^ swap) * (int)(16 / sizeof(E));
}

/* Returns the offset in elements of row `row` of Q, K, V or O (part: an hpmlg_attn_part) of pair bh, a sample and a
   head of queries; K and V are those of the head of keys and values that this head of queries reads. */
HPMLG_DEVICE int64_t hpmlg_attn_offset(const hpmlg_attn &p, int bh, int part, int row)
{
    int     b = bh / p.heads, h = bh - b * p.heads;
    int64_t at = (int64_t)b * p.T + row, heads = p.heads + 2 * p.kv_heads;
    if (part == HPMLG_ATTN_O) return (at * p.heads + h) * p.D;
    if (part != HPMLG_ATTN_Q) h = p.heads + (part - HPMLG_ATTN_K) * p.kv_heads + h / p.group;
    return (at * heads + h) * p.D;
}

/* Returns true if key number `key` is hidden from query number `query` of pair bh of a sample and a head. */
HPMLG_DEVICE bool hpmlg_attn_hidden(const hpmlg_attn &p, int bh, int query, int key)
{
    if (key >= p.T || (p.causal && key > query)) return true;
    if (!p.mask.p || query >= p.T) return false;
    int64_t b = bh / p.heads;
    return hpmlg_get(p.mask, (p.mask_queries ? b * p.T + query : b) * p.T + key) == 0;
}

/* Returns bits: bit j is set if the mask hides the pair of row `row` and the thread's column j of 2 N, counted from
   `column` on. KEYS: rows are keys and columns queries, else the reverse. Rolled, because the compiler takes minutes
   for many copies of hpmlg_attn_hidden. */
template <bool KEYS, int N> HPMLG_DEVICE unsigned hpmlg_attn_hides(const hpmlg_attn &p, int bh, int row, int column)
{
    unsigned bits = 0;
    bh = hpmlg_anew(bh);
    HPMLG_ROLLED for (int j = 0; j < 2 * N; j++) {
        int c = column + j / 2 * 8 + (int)threadIdx.x % 4 * 2 + j % 2;
        int query = KEYS ? c : row;
        int key = KEYS ? row : c;
        if (hpmlg_attn_hidden(p, bh, query, key)) bits |= 1u << j;
    }
    return bits;
}

/* Loads `rows` rows of Q, K, V or dO (part) of pair bh, of a sample and a head, from `row` on, into a tile of DP
   columns in shared memory, by a block of `threads` threads; rows beyond T and columns beyond D are zero. Aligned rows
   are copied asynchronously, until hpmlg_copy_wait. */
template <int type, int DP, int threads, int rows>
HPMLG_DEVICE void hpmlg_attn_load(const hpmlg_attn &p, typename hpmlg_element<type>::t *tile, int bh, int part,
                                  int row)
{
    typedef typename hpmlg_element<type>::t E;
    const int   each = (int)(16 / sizeof(E)), chunks = DP / each, span = chunks < threads ? chunks : threads;
    const int   step = threads / span; /* number of rows that the block loads at a time */
    bool        is_o = part == HPMLG_ATTN_O, is_aligned = is_o ? p.is_aligned_o : p.is_aligned;
    hpmlg_array a  = is_o ? p.o : p.qkv;
    int         r  = hpmlg_anew((int)threadIdx.x) / span;
    int64_t     at = hpmlg_attn_offset(p, hpmlg_anew(bh), part, row + r);
    int64_t     ld = (int64_t)(is_o ? p.heads : p.heads + 2 * p.kv_heads) * p.D;
    if (r >= step) return;
    for (int c = (int)threadIdx.x % span; c < chunks; c += span) {
        const E *from = (const E *)a.p + at + c * each;
        int      have = c * each < p.D ? p.T - row - r : 0;
        HPMLG_UNROLL for (int i = 0; is_aligned && i < rows; i += step)
            if (rows % step == 0 || r + i < rows)
                hpmlg_copy_async16(hpmlg_tile_chunk<DP>(tile, r + i, c), i < have ? from + i * ld : (E *)a.p, i < have);
        HPMLG_ROLLED for (int i = 0; !is_aligned && r + i < rows; i += step)
            for (int j = 0; j < each; j++)
                hpmlg_element_put(hpmlg_tile_chunk<DP>(tile, r + i, c) + j, i < have && c * each + j < p.D
                                  ? hpmlg_get(a, at + i * ld + c * each + j) : 0, type);
    }
}

/* Computes d (16 M, 8 N) += a b^T over DP columns, by one warp. a: the warp's 16 M rows of a tile of `type` elements in
   shared memory; b: 8 N rows of another tile. */
template <int type, int DP, int M, int N>
HPMLG_DEVICE void hpmlg_attn_scores(float (&d)[M][N][4], const unsigned short *a, const unsigned short *b)
{
    int lane = hpmlg_anew((int)threadIdx.x) % HPMLG_WARP;
    HPMLG_UNROLL for (int k = 0; k < DP / 16; k++) {
        unsigned x[M][4], y[4];
        HPMLG_UNROLL for (int m = 0; m < M; m++)
            hpmlg_ldmatrix_x4(x[m], hpmlg_tile_chunk<DP>(a, 16 * m + (lane & 15), 2 * k + (lane >> 4)));
        HPMLG_UNROLL for (int j = 0; j < N; j += 2) {
            hpmlg_ldmatrix_x4(y, hpmlg_tile_chunk<DP>(b, 8 * j + (lane & 7) + (lane >> 4) * 8,
                                                      2 * k + (lane >> 3 & 1)));
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
    HPMLG_ROLLED for (int k = 0; k < DP / 4; k++) {
        float4 x[M][2];
        HPMLG_UNROLL for (int i = 0; i < 2 * M; i++)
            x[i / 2][i % 2] = *(const float4 *)hpmlg_tile_chunk<DP>(a, 8 * i + g, k);
        HPMLG_UNROLL for (int j = 0; j < N; j++)
            HPMLG_UNROLL for (int i = 0; i < 2; i++) {
                float4 y = *(const float4 *)hpmlg_tile_chunk<DP>(b, 8 * j + 2 * t + i, k);
                HPMLG_UNROLL for (int m = 0; m < M; m++)
                    HPMLG_UNROLL for (int h = 0; h < 2; h++) {
                        float4 v = x[m][h];
                        d[m][j][2 * h + i] += v.x * y.x + v.y * y.y + v.z * y.z + v.w * y.w;
                    }
            }
    }
}

/* Computes d (16 M, 8 NO) += s (16 M, 8 N) b by one warp. s: in registers, as hpmlg_attn_scores leaves it; b: 8 N rows
   of a tile (type, DP columns) in shared memory, 8 NO columns from `column` on. */
template <int type, int DP, int M, int N, int NO>
HPMLG_DEVICE void hpmlg_attn_accumulate(float (&d)[M][NO][4], const float (&s)[M][N][4], const unsigned short *b,
                                        int column)
{
    int lane = (int)threadIdx.x % HPMLG_WARP;
    HPMLG_UNROLL for (int k = 0; k < N; k += 2) {
        unsigned x[M][4], y[4];
        HPMLG_UNROLL for (int m = 0; m < M; m++)
            HPMLG_UNROLL for (int i = 0; i < 4; i++)
                x[m][i] = hpmlg_narrow(s[m][k + i / 2][i % 2 * 2], s[m][k + i / 2][i % 2 * 2 + 1], type);
        HPMLG_UNROLL for (int j = 0; j < NO; j += 2) {
            hpmlg_ldmatrix_x4_trans(y, hpmlg_tile_chunk<DP>(b, 8 * k + (lane & 15), column / 8 + j + (lane >> 4)));
            HPMLG_UNROLL for (int m = 0; m < M; m++) {
                hpmlg_mma_16816(d[m][j], x[m], y, type == HPML_DTYPE_F16);
                hpmlg_mma_16816(d[m][j + 1], x[m], y + 2, type == HPML_DTYPE_F16);
            }
        }
    }
}

template <int type, int DP, int M, int N, int NO>
HPMLG_DEVICE void hpmlg_attn_accumulate(float (&d)[M][NO][4], const float (&s)[M][N][4], const float *b, int column)
{
    int lane = (int)threadIdx.x % HPMLG_WARP, t = lane % 4;
    HPMLG_ROLLED for (int from = 0; from < 4; from++) /* takes s from the row's four threads one after the other */
        HPMLG_UNROLL for (int k = 0; k < 2 * N; k++) {
            float x[M][2];
            HPMLG_UNROLL for (int i = 0; i < 2 * M; i++)
                x[i / 2][i % 2] = __shfl_sync(HPMLG_ALL_LANES, s[i / 2][k / 2][i % 2 * 2 + k % 2], (lane & 28) + from);
            HPMLG_UNROLL for (int j = 0; j < NO; j++) {
                const float *row = hpmlg_tile_chunk<DP>(b, k / 2 * 8 + 2 * from + k % 2, column / 4 + 2 * j + t / 2);
                float2       y   = *(const float2 *)(row + t % 2 * 2);
                HPMLG_UNROLL for (int i = 0; i < 2 * M; i++) {
                    d[i / 2][j][i % 2 * 2] += x[i / 2][i % 2] * y.x;
                    d[i / 2][j][i % 2 * 2 + 1] += x[i / 2][i % 2] * y.y;
                }
            }
        }
}

/* Stores d (16 M, 8 NO), in the registers of a warp, times `scale` in p.out (p.add: adds to it), in rows from `row`
   and columns from `column` on of Q, K, V or O (part: an hpmlg_attn_part) of pair bh of sample and head. d goes through
   `space`, the warp's shared memory, so that each thread writes 8 neighbours. */
template <int M, int NO>
HPMLG_DEVICE void hpmlg_attn_store(const hpmlg_attn &p, int bh, int part, int row, int column,
                                   const float (&d)[M][NO][4], float scale, float *space)
{
    int lane = (int)threadIdx.x % HPMLG_WARP, g = lane / 4, t = lane % 4;
    __syncwarp(); /* wait, because threads may still read `space` */
    HPMLG_UNROLL for (int i = 0; i < 2 * M; i++)
        HPMLG_UNROLL for (int j = 0; j < NO; j++) {
            float *to = space + (8 * i + g) * HPMLG_ATTN_LD(8 * NO) + 8 * j + 2 * t;
            *(float2 *)to = make_float2(scale * d[i / 2][j][i % 2 * 2], scale * d[i / 2][j][i % 2 * 2 + 1]);
        }
    __syncwarp();
    HPMLG_ROLLED for (int i = lane; i < 16 * M * NO; i += HPMLG_WARP) {
        int        r = i / NO, c = column + i % NO * 8;
        int64_t    at = hpmlg_attn_offset(p, bh, part, row + r);
        hpmlg_vec8 e = hpmlg_get8(hpmlg_array{ space + r * HPMLG_ATTN_LD(8 * NO), HPML_DTYPE_F32 }, i % NO);
        if (row + r < p.T) hpmlg_put_range(p.out, at + c, at, at + p.D, e, p.add);
    }
}

/* Returns the first row of the tile of `rows` rows that this block computes, and sets *bh to the number of its pair of
   sample and head. The longest tiles are computed first: with a causal mask, these are the last tiles of queries
   (last_first), because the last queries read most keys, or the first tiles of keys, because most queries read them. */
HPMLG_DEVICE int hpmlg_attn_tile(const hpmlg_attn &p, int rows, bool last_first, int *bh)
{
    int tile = (int)blockIdx.x / (int)p.pairs;
    *bh = (int)blockIdx.x - tile * (int)p.pairs;
    return (last_first ? (p.T + rows - 1) / rows - 1 - tile : tile) * rows;
}

/* Turns s, the scores of 16 M queries from `row` on with 8 N keys from `key` on, into exp2(score - maximum): softmax
   without its divisor. bh: the pair of sample and head; edge: some of the keys are hidden from a query. Updates the
   rows' maxima `most` and sums `sum` (over this thread's columns), in base 2, and rescales the output o, of 8 NO
   columns, where a maximum grew. A row's maximum is -infinity until a key is not hidden from the row. */
template <int M, int N, int NO>
HPMLG_DEVICE void hpmlg_attn_softmax(const hpmlg_attn &p, float (&s)[M][N][4], float (&most)[M][2], float (&sum)[M][2],
                                     float (&o)[M][NO][4], int bh, int row, int key, bool edge)
{
    int   g = (int)threadIdx.x % HPMLG_WARP / 4;
    float base2 = fabsf(p.scale) * 1.4426950408889634f;
    bool  changed = false;
    float shrink[M][2];
    if (p.scale < 0)
        HPMLG_UNROLL for (int i = 0; i < 4 * M * N; i++) s[i / (4 * N)][i / 4 % N][i % 4] *= -1;
    HPMLG_UNROLL for (int i = 0; i < 2 * M; i++) {
        float    top = -INFINITY, add = 0;
        unsigned hidden = edge ? hpmlg_attn_hides<false, N>(p, bh, row + 8 * i + g, key) : 0;
        HPMLG_UNROLL for (int j = 0; j < 2 * N && edge; j++)
            if (hidden >> j & 1) s[i / 2][j / 2][i % 2 * 2 + j % 2] = -INFINITY;
        HPMLG_UNROLL for (int j = 0; j < 2 * N; j++) top = fmaxf(top, s[i / 2][j / 2][i % 2 * 2 + j % 2]);
        top = fmaxf(top, __shfl_xor_sync(HPMLG_ALL_LANES, top, 1));
        top = fmaxf(top, __shfl_xor_sync(HPMLG_ALL_LANES, top, 2));
        top = fmaxf(most[i / 2][i % 2], top * base2);
        float minus = top == -INFINITY ? 0 : -top;
        HPMLG_UNROLL for (int j = 0; j < 2 * N; j++) {
            float &v = s[i / 2][j / 2][i % 2 * 2 + j % 2];
            v = hpmlg_exp2(v * base2 + minus); /* one fused multiply-add scales v and subtracts the maximum */
            add += v;
        }
        float k = top == -INFINITY ? 1 : hpmlg_exp2(most[i / 2][i % 2] - top);
        most[i / 2][i % 2]   = top;
        shrink[i / 2][i % 2] = k;
        changed |= k != 1;
        sum[i / 2][i % 2] = sum[i / 2][i % 2] * k + add;
    }
    if (!__any_sync(HPMLG_ALL_LANES, changed)) return;
    HPMLG_UNROLL for (int m = 0; m < M; m++)
        HPMLG_UNROLL for (int j = 0; j < NO; j++)
            HPMLG_UNROLL for (int e = 0; e < 4; e++) o[m][j][e] *= shrink[m][e / 2];
}

/* Computes attention forward (see >>gpu-attention): a block of W warps computes 16 M W queries of a head of up to DP
   columns, 8 N keys at a time, in the type `type`. */
template <int type, int DP, int M, int W, int N>
static __global__ void __launch_bounds__(32 * W) hpmlg_k_attn(hpmlg_attn p)
{
    typedef typename hpmlg_element<type>::t E;
    const int R = 16 * M * W, K = 8 * N, threads = HPMLG_WARP * W;
    HPMLG_SHARED(E, q);      /* (R, DP): the block's queries */
    E      *kv = q + R * DP; /* two stages of keys (K, DP) and values (K, DP) */
    int     bh;
    int     first = hpmlg_attn_tile(p, R, true, &bh), row = first + (int)threadIdx.x / HPMLG_WARP * 16 * M, stage = 0;
    int     end = p.causal && first + R < p.T ? first + R : p.T;
    float   o[M][DP / 8][4] = {}, most[M][2], sum[M][2] = {};
    HPMLG_UNROLL for (int m = 0; m < M; m++) most[m][0] = most[m][1] = -INFINITY;
    hpmlg_attn_load<type, DP, threads, R>(p, q, bh, HPMLG_ATTN_Q, first);
    for (int key = -K; key < end; key += K, stage ^= 1) { /* loads the block at key + K, then computes the one at key */
        E *now = kv + stage * 2 * K * DP, *next = kv + (stage ^ 1) * 2 * K * DP;
        hpmlg_copy_wait(0);
        __syncthreads();
        if (key + K < end) {
            hpmlg_attn_load<type, DP, threads, K>(p, next, bh, HPMLG_ATTN_K, key + K);
            hpmlg_attn_load<type, DP, threads, K>(p, next + K * DP, bh, HPMLG_ATTN_V, key + K);
            hpmlg_copy_commit();
        }
        if (key < 0 || (p.causal && key >= row + 16 * M)) continue;
        float s[M][N][4] = {};
        hpmlg_attn_scores<type, DP, M, N>(s, q + (row - first) * DP, now);
        hpmlg_attn_softmax(p, s, most, sum, o, bh, row, key,
                           key + K > p.T || (p.causal && key + K > row + 1) || p.mask.p);
        hpmlg_attn_accumulate<type, DP>(o, s, now + K * DP, 0);
    }
    HPMLG_UNROLL for (int i = 0; i < 2 * M; i++) {
        float &v = sum[i / 2][i % 2];
        int    r = row + 8 * i + (int)threadIdx.x % HPMLG_WARP / 4;
        v += __shfl_xor_sync(HPMLG_ALL_LANES, v, 1);
        v += __shfl_xor_sync(HPMLG_ALL_LANES, v, 2);
        if (threadIdx.x % 4 == 0 && r < p.T)
            p.lse[(int64_t)bh * p.T + r] = v == 0 ? INFINITY : most[i / 2][i % 2] + log2f(v);
        v = v == 0 ? 0 : 1 / v; /* v 0: the mask hides all keys from the query */
        HPMLG_UNROLL for (int j = 0; j < DP / 4; j++) o[i / 2][j / 2][i % 2 * 2 + j % 2] *= v;
    }
    __syncthreads(); /* wait, because the result overwrites the tiles */
    hpmlg_attn_store(p, bh, HPMLG_ATTN_O, row, 0, o, 1, (float *)q + (row - first) * HPMLG_ATTN_LD(DP));
}

// ---------------------------------------------------------------------------------------------------------------------
// >>gpu-attention-back   the gradient of attention
// ---------------------------------------------------------------------------------------------------------------------

/* The gradient of attention, with the probabilities P computed from the saved lse, the log of each query's sum:

       delta = rowsum(dO O),  dP = dO V^T,  dS = P (dP - delta),  dQ = scale dS K,  dK = scale dS^T Q,  dV = P^T dO.

   One kernel template has two roles. In both a block keeps two tiles of its own rows in shared memory, and reads blocks
   of the other side's rows one after the other: for dK and dV its own rows are keys (tiles of K and V; tiles of Q and
   dO are read), for dQ queries (tiles of Q and dO; tiles of K and V are read). S and dP are computed twice, but every
   sum stays in the registers of one thread and is added in order, so that the bits are the same each time. */

/* Computes p.delta, the row sums of dO O for attention's gradient: 8 threads for each row of a head. p.o is dO, o is
   the output O. */
static __global__ void hpmlg_k_attn_delta(hpmlg_attn p, hpmlg_array o)
{
    int64_t rows = p.pairs * p.T;
    int     lane = (int)threadIdx.x % 8;
    for (int64_t i = (int64_t)blockIdx.x * 32 + (int)threadIdx.x / 8; i - (int)threadIdx.x % HPMLG_WARP / 8 < rows;
         i += (int64_t)gridDim.x * 32) {
        int64_t bt = i / p.heads, h = i - bt * p.heads, at = i * p.D;
        float   sum = 0;
        for (int c = 8 * lane; c < p.D && i < rows; c += 64) {
            hpmlg_vec8 x = hpmlg_get_range(o, at + c, at, at + p.D, 0);
            hpmlg_vec8 y = hpmlg_get_range(p.o, at + c, at, at + p.D, 0);
            for (int j = 0; j < 8; j++) sum += x.v[j] * y.v[j];
        }
        for (int k = 4; k > 0; k >>= 1) sum += __shfl_xor_sync(HPMLG_ALL_LANES, sum, k);
        if (lane == 0 && i < rows) p.delta[(bt / p.T * p.heads + h) * p.T + bt % p.T] = sum;
    }
}

/* Turns scores into their gradients in hpmlg_k_attn_back, for the rows from `row` and the columns from `column` on. s:
   the scores S, overwritten by the probabilities P; dp: the gradient dP of P, overwritten by dS, that of S. If KEYS,
   rows are keys and columns queries, and lse and delta of the query in column c are line[c] and line[8 N + c]; else
   rows are queries, and of_row has their lse and delta. bh: the pair of sample and head; edge: some keys are hidden
   from some queries. */
template <bool KEYS, int M, int N>
HPMLG_DEVICE void hpmlg_attn_dscores(const hpmlg_attn &p, float (&s)[M][N][4], float (&dp)[M][N][4],
                                     const float (&of_row)[M][2][2], const float *line, int bh, int row,
                                     int column, bool edge)
{
    int   g = (int)threadIdx.x % HPMLG_WARP / 4, t = (int)threadIdx.x % 4;
    float base2 = p.scale * 1.4426950408889634f;
    HPMLG_UNROLL for (int j = 0; j < 2 * N; j++) {
        float lse = KEYS ? line[j / 2 * 8 + 2 * t + j % 2] : 0;
        HPMLG_UNROLL for (int i = 0; i < 2 * M; i++) {
            float &v = s[i / 2][j / 2][i % 2 * 2 + j % 2];
            v = hpmlg_exp2(v * base2 - (KEYS ? lse : of_row[i / 2][i % 2][0]));
        }
    }
    HPMLG_UNROLL for (int i = 0; i < 2 * M && edge; i++) {
        unsigned hidden = hpmlg_attn_hides<KEYS, N>(p, bh, row + 8 * i + g, column);
        HPMLG_UNROLL for (int j = 0; j < 2 * N; j++)
            if (hidden >> j & 1) s[i / 2][j / 2][i % 2 * 2 + j % 2] = 0;
    }
    HPMLG_UNROLL for (int j = 0; j < 2 * N; j++) {
        float delta = KEYS ? line[8 * N + j / 2 * 8 + 2 * t + j % 2] : 0;
        HPMLG_UNROLL for (int i = 0; i < 2 * M; i++) {
            float &w = dp[i / 2][j / 2][i % 2 * 2 + j % 2];
            w = s[i / 2][j / 2][i % 2 * 2 + j % 2] * (w - (KEYS ? delta : of_row[i / 2][i % 2][1]));
        }
    }
}

/* Loads lse and delta of K queries of pair bh, from `query` on, into line (2, K), by a block of `threads` threads;
   queries beyond the end get P = 0. */
template <int threads, int K>
HPMLG_DEVICE void hpmlg_attn_line(const hpmlg_attn &p, float *line, int bh, int query)
{
    for (int i = (int)threadIdx.x; i < K; i += threads) {
        bool in = query + i < p.T;
        line[i]     = in ? p.lse[(int64_t)bh * p.T + query + i] : INFINITY;
        line[K + i] = in ? p.delta[(int64_t)bh * p.T + query + i] : 0;
    }
}

/* Computes the gradients of attention. A block of W warps computes dK and dV of 16 x M x W keys of one head (KEYS),
   from the queries of all heads of its group one after the other, or dQ of as many queries: DA columns of them, from
   column blockIdx.y x DA on. DP is the number of columns of a head, rounded up; scores need all of them. In shared
   memory, `own` has two tiles of DP columns, the rows of these keys or queries (K and V, or Q and dO); `stream` has two
   stages, each of two tiles of 8 x N rows and DP columns of the other two arrays (Q and dO, or K and V). Registers are
   limited so that four blocks fit a multiprocessor, in the cases where the compiler then spills none. */
template <int type, int DP, int DA, int M, int W, int N, bool KEYS>
static __global__ void __launch_bounds__(32 * W, !KEYS && M == 1 && DP <= 96 ? 4 : 1) hpmlg_k_attn_back(hpmlg_attn p)
{
    typedef typename hpmlg_element<type>::t E;
    const int R = 16 * M * W, K = 8 * N, threads = HPMLG_WARP * W;
    HPMLG_SHARED(E, own);                              /* (R, DP) twice: keys and values, or queries and dO */
    E      *stream = own + 2 * R * DP;                 /* two stages of two tiles (K, DP): Q and dO, or K and V */
    float  *lines = (float *)(stream + 4 * K * DP);    /* two stages of lse and delta of the queries in stream */
    int     bh;
    int     first = hpmlg_attn_tile(p, R, !KEYS, &bh), at = (int)threadIdx.x / HPMLG_WARP * 16 * M, row = first + at;
    int     begin = KEYS && p.causal ? first / K * K : 0, stage = 0, column = (int)blockIdx.y * DA;
    int     end = !KEYS && p.causal && first + R < p.T ? first + R : p.T, tiles = (end - begin + K - 1) / K;
    float   d0[M][DA / 8][4] = {}, d1[M][DA / 8][4] = {}, of_row[M][2][2]; /* d1: for KEYS */
    if (KEYS) bh *= p.group; /* the first head of queries in the group */
    /* 1. Unless KEYS (true: this block computes dK and dV; false: dQ) load lse (log-sum-exp of the scores) and delta
          (sum of dO O) of the block's queries into registers; start to load the tiles in `own`, the block's own keys
          and values, or queries and dO. */
    HPMLG_UNROLL for (int i = 0; i < 2 * M; i++) {
        int r = row + 8 * i + (int)threadIdx.x % HPMLG_WARP / 4;
        of_row[i / 2][i % 2][0] = !KEYS && r < p.T ? p.lse[(int64_t)bh * p.T + r] : INFINITY;
        of_row[i / 2][i % 2][1] = !KEYS && r < p.T ? p.delta[(int64_t)bh * p.T + r] : 0;
    }
    hpmlg_attn_load<type, DP, threads, R>(p, own, bh, KEYS ? HPMLG_ATTN_K : HPMLG_ATTN_Q, first);
    hpmlg_attn_load<type, DP, threads, R>(p, own + R * DP, bh, KEYS ? HPMLG_ATTN_V : HPMLG_ATTN_O, first);
    for (int i = -1; i < (KEYS ? p.group : 1) * tiles; i++, stage ^= 1) {
        int     c = begin + (i < 0 ? 0 : i % tiles) * K, next_c = begin + (i + 1) % tiles * K;
        int     head = bh + (KEYS && i >= 0 ? i / tiles : 0);
        int     next_head = bh + (KEYS ? (i + 1) / tiles : 0);
        E     *now = stream + stage * 2 * K * DP, *next = stream + (stage ^ 1) * 2 * K * DP;
        float *line = lines + stage * 2 * K, *next_line = lines + (stage ^ 1) * 2 * K;
        /* 2. Wait until the current tiles in `stream` are loaded; start to load the next tiles, which for KEYS are of
           queries, together with lse and delta of these queries. */
        hpmlg_copy_wait(0);
        __syncthreads();
        if (i + 1 < (KEYS ? p.group : 1) * tiles) {
            hpmlg_attn_load<type, DP, threads, K>(p, next, next_head, KEYS ? HPMLG_ATTN_Q : HPMLG_ATTN_K, next_c);
            hpmlg_attn_load<type, DP, threads, K>(p, next + K * DP, next_head, KEYS ? HPMLG_ATTN_O : HPMLG_ATTN_V,
                                                  next_c);
            hpmlg_copy_commit();
            if (KEYS) hpmlg_attn_line<threads, K>(p, next_line, next_head, next_c);
        }
        /* 3. Compute S and dP from the tiles, then P and dS in their place; skip tiles that the causal mask hides from
           all rows of this warp. */
        float s[M][N][4] = {}, dp[M][N][4] = {};
        if (i < 0 || (p.causal && (KEYS ? c + K <= row : c >= row + 16 * M))) continue;
        hpmlg_attn_scores<type, DP, M, N>(s, own + at * DP, now);
        hpmlg_attn_scores<type, DP, M, N>(dp, own + (R + at) * DP, now + K * DP);
        hpmlg_attn_dscores<KEYS>(p, s, dp, of_row, line, head, row, c, p.mask.p || (KEYS
                                 ? p.causal && c < row + 16 * M - 1 : c + K > p.T || (p.causal && c + K > row + 1)));
        /* 4. Accumulate. If KEYS (this block computes dK and dV): dV += P^T dO and dK += dS^T Q; else dQ += dS K. */
        if constexpr (KEYS) hpmlg_attn_accumulate<type, DP>(d1, s, now + K * DP, column);
        hpmlg_attn_accumulate<type, DP>(d0, dp, now, column);
    }
    /* 5. Store the sums, through the shared memory of the tiles, which are not needed any more. */
    float *space = (float *)own + at * HPMLG_ATTN_LD(DA);
    __syncthreads();
    hpmlg_attn_store(p, bh, KEYS ? HPMLG_ATTN_K : HPMLG_ATTN_Q, row, column, d0, p.scale, space);
    if constexpr (KEYS) hpmlg_attn_store(p, bh, HPMLG_ATTN_V, row, column, d1, 1, space);
}

/* Launches an attention kernel, `threads` threads a block: one block computes `rows` rows, and of the columns one of
   `parts` parts; shared: bytes of shared memory. The kernel's limit, by default 48 KiB, is raised unless the pass is
   being captured, because the run of the pass before the capture has raised the limit already. */
HPMLG_FN void hpmlg_attn_launch(hpmlg_device *d, void (*kernel)(hpmlg_attn), const hpmlg_attn *p, int rows,
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

/* Launches the attention kernels for elements of `type`, heads of up to DP columns. Tile sizes are such that results
   stay in registers, and two blocks, or at least one, fit in a multiprocessor's shared memory (99 KiB or more). */
template <int type, int DP> HPMLG_FN void hpmlg_attn_run(hpmlg_device *d, const hpmlg_attn *p, bool backward)
{
    const bool   f32 = type == HPML_DTYPE_F32, large = DP > 128;
    const bool   wide = !f32 && DP > 96; /* registers do not hold the results of 32 queries a warp */
    const int    f32_n = DP > 64 ? 2 : 4;
    const int    few = large ? 2 : 4;
    const int    cell = f32 ? 4 : 2;
    const int    M = large || wide ? 1 : 2;
    const int    W = wide ? 8 : few;
    const int    N = f32 ? f32_n : 8;
    const int    BM = !f32 && DP <= 64 ? 2 : 1;
    const int    BW = large ? 1 : 4;
    const int    BN = (f32 && DP > 64) || (!f32 && DP == 64) ? 2 : 4;
    const size_t shared = (size_t)((16 * M * W + 32 * N) * DP * cell);
    const size_t back = (size_t)((32 * BM * BW + 32 * BN) * DP * cell) + (size_t)(32 * BN) * sizeof(float);
    hpmlg_attn   keys = *p;
    keys.pairs /= p->group;
    if (!backward)
        return hpmlg_attn_launch(d, hpmlg_k_attn<type, DP, M, W, N>, p, 16 * M * W, 1, HPMLG_WARP * W, shared);
    hpmlg_attn_launch(d, hpmlg_k_attn_back<type, DP, large ? 128 : DP, BM, BW, BN, true>, &keys, 16 * BM * BW,
                      large ? 2 : 1, HPMLG_WARP * BW, back);
    hpmlg_attn_launch(d, hpmlg_k_attn_back<type, DP, DP, BM, BW, BN, false>, p, 16 * BM * BW, 1, HPMLG_WARP * BW, back);
}

template <int type> HPMLG_FN void hpmlg_attn_half(hpmlg_device *d, const hpmlg_attn *p, bool backward)
{
    if (p->D <= 32) return hpmlg_attn_run<type, 32>(d, p, backward);
    if (p->D <= 64) return hpmlg_attn_run<type, 64>(d, p, backward);
    return p->D <= 96 ? hpmlg_attn_run<type, 96>(d, p, backward) : hpmlg_attn_run<type, 128>(d, p, backward);
}

// ---------------------------------------------------------------------------------------------------------------------
// >>gpu-attention-op   attention with a cache; which kernels run; rotary positions
// ---------------------------------------------------------------------------------------------------------------------

/* The arguments of the kernels of attention with a cache, besides those in hpmlg_attn. */
typedef struct hpmlg_attn_cache {
    float      *kv;       /* (B, S, 2 kv_heads D): the cache: for each position all keys, then all values */
    const int  *position; /* (B): number of positions that the cache has of each sample before this call */
    int64_t     S, B;
    hpmlg_note *note;
    int        *taken;
} hpmlg_attn_cache;

/* Copies the keys and values of the T new positions of each sample to the cache, a warp for each position. A sample
   whose new positions do not fit in the cache is reported to the host as an error of `node`, and not copied. */
static __global__ void hpmlg_k_attn_keep(hpmlg_attn p, hpmlg_attn_cache c, const hpml_node *node)
{
    int64_t width = 2 * (int64_t)p.kv_heads * p.D, skip = (int64_t)p.heads * p.D;
    HPMLG_FOR_EACH_WARP(i, c.B * p.T) {
        int64_t b = i / p.T, t = i - b * p.T, at = c.position[b];
        bool    fits = at >= 0 && at <= c.S - p.T;
        if (!fits && threadIdx.x % HPMLG_WARP == 0)
            hpmlg_report_index(c.note, c.taken, b, c.position[b], node);
        for (int64_t k = (int)threadIdx.x % HPMLG_WARP; fits && k < width; k += HPMLG_WARP)
            c.kv[(b * c.S + at + t) * width + k] = hpmlg_get(p.qkv, i * (skip + width) + skip + k);
    }
}

/* Computes attention of one query (block) to the keys in the cache: warp w takes keys w, w + 4 ..., with the softmax
   computed online (see >>gpu-attention); at the end the warps' maxima, sums and outputs are joined. A lane has columns
   lane, lane + 32 ... of the head. */
static __global__ void __launch_bounds__(128) hpmlg_k_attn_cached(hpmlg_attn p, hpmlg_attn_cache c)
{
    const int most_columns = HPMLG_ATTN_MOST / HPMLG_WARP;
    __shared__ float output[4][HPMLG_ATTN_MOST], maximum[4], sums[4];
    int     lane = (int)threadIdx.x % HPMLG_WARP, warp = (int)threadIdx.x / HPMLG_WARP;
    int64_t row = blockIdx.x / p.heads, h = blockIdx.x - row * p.heads, b = row / p.T, t = row - b * p.T;
    int64_t end = c.position[b] + t + 1, width = 2 * (int64_t)p.kv_heads * p.D, at = h / p.group * p.D;
    int64_t from = hpmlg_attn_offset(p, (int)(b * p.heads + h), HPMLG_ATTN_Q, (int)t);
    float   q[most_columns], o[most_columns] = {}, most = -INFINITY, sum = 0;
    if (end <= 0 || end > c.S) end = 0;
    for (int j = 0; j < most_columns; j++) {
        int k = lane + j * HPMLG_WARP;
        q[j] = k < p.D ? p.scale * hpmlg_get(p.qkv, from + k) : 0;
    }
    for (int64_t key = warp; key < end; key += 4) {
        const float *k = c.kv + (b * c.S + key) * width + at, *v = k + width / 2;
        float        score = 0;
        if (p.mask.p && hpmlg_get(p.mask, (p.mask_queries ? row : b) * c.S + key) == 0) continue;
        for (int j = 0; j < most_columns && lane + j * HPMLG_WARP < p.D; j++)
            score += q[j] * k[lane + j * HPMLG_WARP];
        score = hpmlg_group_reduce(score, NULL, HPMLG_WARP, false);
        float top = fmaxf(most, score), shrink = expf(most - top), e = expf(score - top);
        most = top;
        sum  = sum * shrink + e;
        for (int j = 0; j < most_columns && lane + j * HPMLG_WARP < p.D; j++)
            o[j] = o[j] * shrink + e * v[lane + j * HPMLG_WARP];
    }
    for (int j = 0; j < most_columns; j++) output[warp][lane + j * HPMLG_WARP] = o[j];
    if (lane == 0) maximum[warp] = most;
    if (lane == 0) sums[warp] = sum;
    __syncthreads();
    float top = fmaxf(fmaxf(maximum[0], maximum[1]), fmaxf(maximum[2], maximum[3])), total = 0;
    for (int w = 0; w < 4; w++) total += sums[w] > 0 ? sums[w] * expf(maximum[w] - top) : 0;
    for (int k = (int)threadIdx.x; k < p.D; k += 128) {
        float y = 0;
        for (int w = 0; w < 4; w++) y += sums[w] > 0 ? output[w][k] * expf(maximum[w] - top) : 0;
        hpmlg_put(p.out, (row * p.heads + h) * p.D + k, total > 0 ? y / total : 0);
    }
}

HPMLG_FN void hpmlg_attn_cached(hpmlg_device *d, const hpmlg_attn *p, const hpml_node *n, bool back)
{
    hpmlg_attn_cache c = { n->src[3]->data, (const int *)n->src[1]->raw, n->src[3]->shape[1], n->out->shape[0], d->note,
                           d->note_taken };
    if (back)
        hpml_ctx_fail(d->ctx, HPML_ERR_UNSUPPORTED, "attention \"%s\": with a cache there is no backward pass; record "
                      "the model without .cache to train it", n->out->name);
    HPMLG_RUN_ITEMS(d, hpmlg_k_attn_keep, c.B * p->T, 8, *p, c, n);
    HPMLG_RUN(d, hpmlg_k_attn_cached, (unsigned)(c.B * p->T * p->heads), 128, 0, *p, c);
}

HPMLG_FN void hpmlg_op_attention(HPMLG_OP_ARGUMENTS)
{
    const hpml_tensor *mask = n->src_count > 2 ? n->src[2] : NULL;
    hpmlg_attn  p = {};
    int64_t     C = n->out->shape[2], T = n->out->shape[1], D = C / n->attr.attention.heads;
    hpml_dtype  type = D > 128 ? HPML_DTYPE_F32 : n->out->dtype; /* heads over 128 columns: f32, without tensor cores */
    int         each = type == HPML_DTYPE_F32 ? 4 : 8;           /* number of elements in 16 bytes */
    if (D > HPMLG_ATTN_MOST || T > 0x7fff0000)
        hpml_ctx_fail(run->ctx, HPML_ERR_UNSUPPORTED, "attention \"%s\": heads of %lld columns, %lld positions; the "
                      "GPU's kernels take up to %d columns and 2^31 positions: take more heads", n->out->name,
                      (long long)D, (long long)T, HPMLG_ATTN_MOST);
    p.qkv    = hpmlg_value(n->src[0]);
    p.o      = hpmlg_grad(n->out);
    p.out    = hpmlg_op_output(n, back);
    p.lse    = (float *)n->saved;
    p.delta  = (float *)n->scratch;
    p.T      = (int)T;
    p.heads  = n->attr.attention.heads;
    p.kv_heads = n->attr.attention.kv_heads;
    p.group    = p.heads / p.kv_heads;
    if (mask) p.mask = hpmlg_value(mask);
    p.mask_queries = mask && mask->ndim == 3;
    p.D      = (int)D;
    p.pairs  = n->out->shape[0] * p.heads;
    p.scale  = n->attr.attention.scale;
    p.causal = n->attr.attention.causal;
    p.add    = hpmlg_op_adds(n, back);
    p.is_aligned   = p.qkv.type == (int)type && D % each == 0 && ((uintptr_t)p.qkv.p & 15) == 0;
    p.is_aligned_o = p.o.type == (int)type && D % each == 0 && ((uintptr_t)p.o.p & 15) == 0;
    if (p.pairs * T == 0) return;
    if (n->src_count > 3) return hpmlg_attn_cached(d, &p, n, back);
    if (back) HPMLG_RUN_ITEMS(d, hpmlg_k_attn_delta, p.pairs * T, 32, p, hpmlg_value(n->out));
    if (type == HPML_DTYPE_BF16) hpmlg_attn_half<HPML_DTYPE_BF16>(d, &p, back);
    else if (type == HPML_DTYPE_F16) hpmlg_attn_half<HPML_DTYPE_F16>(d, &p, back);
    else if (D <= 64) hpmlg_attn_run<HPML_DTYPE_F32, 64>(d, &p, back);
    else if (D <= 128) hpmlg_attn_run<HPML_DTYPE_F32, 128>(d, &p, back);
    else hpmlg_attn_run<HPML_DTYPE_F32, 256>(d, &p, back);
}

/* Rotary positions of x (B, T, heads D), see hpml_rotary: a thread takes a pair of numbers, or a number that is only
   copied. y = x, or y += x if .add, with the pairs rotated by the angles of their positions or, if .back, by the
   negative angles. */
typedef struct hpmlg_rotary {
    hpmlg_array y, x;
    const int  *position;
    int64_t     rows, T;
    int         heads, rotated, D, half;
    double      log_base; /* ln(base) / half: the angle of pair i at position t is t exp(-i log_base) */
    bool        adjacent, back, add;
} hpmlg_rotary;

static __global__ void hpmlg_k_rotary(hpmlg_rotary r)
{
    int64_t items = (int64_t)r.rotated * (r.D - r.half) + (int64_t)(r.heads - r.rotated) * r.D;
    HPMLG_FOR_EACH(i, r.rows * items) {
        int64_t row = hpmlg_quotient(i, items), b = row / r.T;
        int     k = (int)(i - row * items), each = r.D - r.half, h = k / each, pair = k - h * each;
        bool    pairs = h < r.rotated && pair < r.half;
        int64_t at = row * r.heads * r.D;
        if (h >= r.rotated) at += k + (int64_t)r.rotated * r.half; /* a number of a head that is not rotated */
        else if (!pairs) at += h * r.D + r.half + pair;            /* a number after the head's pairs, copied */
        else at += h * r.D + (r.adjacent ? 2 * pair : pair);
        float v = hpmlg_get(r.x, at);
        if (!pairs) {
            hpmlg_put(r.y, at, r.add ? hpmlg_get(r.y, at) + v : v);
            continue;
        }
        int64_t other = at + (r.adjacent ? 1 : r.half), now = row - b * r.T + (r.position ? r.position[b] : 0);
        double  half_turns = (double)now * exp(-r.log_base * pair) * 0.31830988618379067, cosine, sine;
        sincospi(half_turns, &sine, &cosine); /* unlike sin and cos, reduces large angles in registers */
        float   w = hpmlg_get(r.x, other), c = (float)cosine, s = (float)(r.back ? -sine : sine);
        float   v1 = v * c - w * s, w1 = w * c + v * s;
        hpmlg_put(r.y, at, r.add ? hpmlg_get(r.y, at) + v1 : v1);
        hpmlg_put(r.y, other, r.add ? hpmlg_get(r.y, other) + w1 : w1);
    }
}

HPMLG_FN void hpmlg_op_rotary(HPMLG_OP_ARGUMENTS)
{
    hpmlg_rotary r = {};
    r.y        = hpmlg_op_output(n, back);
    r.x        = hpmlg_op_input(n, back);
    r.position = n->src_count > 1 ? (const int *)n->src[1]->raw : NULL;
    r.T        = n->out->shape[1];
    r.rows     = n->out->shape[0] * r.T;
    r.heads    = n->attr.rotary.heads;
    r.rotated  = n->attr.rotary.rotated;
    r.D        = (int)(n->out->shape[2] / r.heads);
    r.half     = n->attr.rotary.dims / 2;
    r.log_base = log((double)n->attr.rotary.base) / r.half;
    r.adjacent = n->attr.rotary.adjacent;
    r.back     = back;
    r.add      = hpmlg_op_adds(n, back);
    HPMLG_RUN_ITEMS(d, hpmlg_k_rotary, r.rows * r.heads * r.D, 512, r);
}

// ---------------------------------------------------------------------------------------------------------------------
// >>gpu-lstm   long short-term memory
// ---------------------------------------------------------------------------------------------------------------------

/* The LSTM, computed as on the CPU: one product computes the contribution of x to the gates of all steps, then the
   recurrent product and the cell are computed step by step. Backward, the saved gates are overwritten by da, the
   gradients of the gates' sums; the gradients of the weights are then one product each over all steps, that of w_h with
   the h of the previous step. Half models multiply half copies of da. With states (see hpml_lstm_states) the rows of
   the result are h and c, and there may be a state before the first step. */

typedef struct hpmlg_lstm {
    int64_t     B, T, H, in;
    int64_t     width;                    /* numbers in a row of h and of dy: H or, with states, 2H */
    float      *gates, *cells, *dh, *dc;  /* (B, T, 4H): i f g o; (B, T, H): c; (B, H): gradients of h; of c */
    hpmlg_array h, dy, da, before;        /* da (B, T, 4H): gates, or their half copy; before (B, T, H): h_{t-1} */
    hpmlg_array h0, c0;                   /* (B, H): the state before the first step; NULL: zeros */
} hpmlg_lstm;

/* Places an LSTM's arrays in node n's saved and scratch memory; returns the bytes of scratch memory that they need. */
HPMLG_FN size_t hpmlg_lstm_layout(const hpmlg_device *d, const hpml_node *n, hpmlg_lstm *l)
{
    const hpml_tensor *x = n->src[0];
    int64_t   rows, size = (int64_t)hpml_dtype_size(d->act_dtype);
    bool      narrow = d->act_dtype != HPML_DTYPE_F32;
    uintptr_t p = (uintptr_t)n->scratch;
    l->B  = n->out->shape[0];
    l->T  = n->out->shape[1];
    l->H  = n->src[2]->shape[1];
    l->in = x->shape[2];
    l->width = n->out->shape[2];
    l->h0    = n->src_count > 5 ? hpmlg_value(n->src[4]) : hpmlg_array_null();
    l->c0    = n->src_count > 5 ? hpmlg_value(n->src[5]) : hpmlg_array_null();
    rows     = l->B * l->T;
    l->gates = (float *)n->saved;
    l->cells = n->saved ? l->gates + rows * 4 * l->H : NULL;
    uintptr_t state_bytes = (uintptr_t)(l->B * l->H + 63) / 64 * 256;
    p += hpmlg_narrowed_bytes(d, x);
    l->dh = (float *)p;
    p += state_bytes;
    l->dc = (float *)p;
    p += state_bytes;
    l->da = hpmlg_array_of(narrow ? (void *)p : n->saved, d->act_dtype);
    if (narrow) p += (uintptr_t)(rows * 4 * l->H * size + 255) / 256 * 256;
    l->before = hpmlg_array_of((void *)p, n->out->dtype);
    p += (uintptr_t)(rows * l->H * size);
    l->h  = hpmlg_value(n->out);
    l->dy = hpmlg_grad(n->out);
    return (size_t)(p - (uintptr_t)n->scratch);
}

HPMLG_DEVICE float hpmlg_sigmoid(float x) { return 1 / (1 + expf(-x)); }

/* Returns the cell before step t of element `at` of (B, H), samples by hidden units. c: its address at step t. */
HPMLG_DEVICE float hpmlg_lstm_cell_before(const hpmlg_lstm &l, const float *c, int64_t t, int64_t at)
{
    if (t > 0) return c[-l.H];
    return l.c0.p ? hpmlg_get(l.c0, at) : 0;
}

/* Computes one element of h and of the cell at step t of an LSTM, from the sums (before the activation) of its gates i,
   f, g, o, which are overwritten by the gates; a thread for each of the B H elements (samples, hidden size). */
static __global__ void hpmlg_k_lstm(hpmlg_lstm l, int64_t t)
{
    int64_t at = hpmlg_thread_index(), b = hpmlg_quotient(at, l.H), j = at - b * l.H, row = b * l.T + t;
    float  *a = l.gates + row * 4 * l.H + j, *c = l.cells + row * l.H + j;
    if (b >= l.B) return;
    float in = hpmlg_sigmoid(a[0]), forget = hpmlg_sigmoid(a[l.H]);
    float g = tanhf(a[2 * l.H]), out = hpmlg_sigmoid(a[3 * l.H]);
    float cell = in * g + (t > 0 || l.c0.p ? forget * hpmlg_lstm_cell_before(l, c, t, at) : 0);
    a[0]       = in;
    a[l.H]     = forget;
    a[2 * l.H] = g;
    a[3 * l.H] = out;
    *c = cell;
    hpmlg_put(l.h, row * l.width + j, out * tanhf(cell));
    if (l.width > l.H) hpmlg_put(l.h, row * l.width + l.H + j, cell);
}

/* Computes the gradients of one LSTM element at step t: overwrites its gates by da, the gradients of the gates' sums
   (before the activation), and dc by the gradient of the cell of step t - 1. Writes h of step t - 1 to l.before. */
static __global__ void hpmlg_k_lstm_back(hpmlg_lstm l, int64_t t)
{
    int64_t      at = hpmlg_thread_index(), b = hpmlg_quotient(at, l.H), j = at - b * l.H, row = b * l.T + t;
    float       *a = l.gates + row * 4 * l.H + j, d[4];
    const float *c = l.cells + row * l.H + j;
    if (b >= l.B) return;
    bool  last = t == l.T - 1;
    float in = a[0], forget = a[l.H], g = a[2 * l.H], out = a[3 * l.H], th = tanhf(*c);
    float dh = hpmlg_get(l.dy, row * l.width + j) + (last ? 0 : l.dh[at]);
    float dcell = dh * out * (1 - th * th) + (last ? 0 : l.dc[at]);
    if (l.width > l.H) dcell += hpmlg_get(l.dy, row * l.width + l.H + j);
    d[0] = dcell * g * in * (1 - in);
    d[1] = dcell * hpmlg_lstm_cell_before(l, c, t, at) * forget * (1 - forget);
    d[2] = dcell * in * (1 - g * g);
    d[3] = dh * th * out * (1 - out);
    for (int i = 0; i < 4; i++) {
        a[i * l.H] = d[i];
        if (l.da.p != l.gates) hpmlg_put(l.da, (row * 4 + i) * l.H + j, d[i]);
    }
    l.dc[at] = dcell * forget;
    float before = t > 0 ? hpmlg_get(l.h, (row - 1) * l.width + j) : 0;
    if (t == 0 && l.h0.p) before = hpmlg_get(l.h0, at);
    hpmlg_put(l.before, row * l.H + j, before);
}

HPMLG_FN void hpmlg_lstm_forward(hpmlg_device *d, hpml_node *n)
{
    hpmlg_lstm    l = {};
    hpmlg_lstm_layout(d, n, &l);
    int64_t     H = l.H;
    hpmlg_array w_h = hpmlg_product_input(d, n->src[2], NULL), gates = hpmlg_array_of(l.gates, HPML_DTYPE_F32);
    hpmlg_array x = hpmlg_product_input(d, n->src[0], n->scratch), w_x = hpmlg_product_input(d, n->src[1], NULL);
    hpmlg_gemm  g = hpmlg_gemm_of(l.B * l.T, 4 * H, l.in, hpmlg_matrix(x, l.in, 0, true),
                                  hpmlg_matrix(w_x, l.in, 0, true), gates, 4 * H, false);
    g.bias = n->src[3]->data;
    hpmlg_gemm_run(d, &g);
    for (int64_t t = 0; t < l.T; t++) {
        hpmlg_operand h = t > 0 ? hpmlg_matrix(hpmlg_array_at(l.h, (t - 1) * l.width), l.T * l.width, 0, true)
                                : hpmlg_matrix(l.h0, H, 0, true);
        g = hpmlg_gemm_of(l.B, 4 * H, H, h, hpmlg_matrix(w_h, H, 0, true), hpmlg_array_at(gates, t * 4 * H),
                          l.T * 4 * H, true);
        if (t > 0 || l.h0.p) hpmlg_gemm_run(d, &g);
        HPMLG_RUN(d, hpmlg_k_lstm, (unsigned)((l.B * H + 255) / 256), 256, 0, l, t);
    }
}

HPMLG_FN void hpmlg_lstm_backward(hpmlg_device *d, hpml_node *n)
{
    hpmlg_lstm    l = {};
    hpmlg_gemm    g;
    hpml_tensor  *x = n->src[0], *w_x = n->src[1], *w_h = n->src[2], *bias = n->src[3];
    hpmlg_lstm_layout(d, n, &l);
    int64_t     H = l.H, rows = l.B * l.T;
    hpmlg_array half_w_h = hpmlg_product_input(d, w_h, NULL);
    for (int64_t t = l.T - 1; t >= 0; t--) {
        HPMLG_RUN(d, hpmlg_k_lstm_back, (unsigned)((l.B * H + 255) / 256), 256, 0, l, t);
        if (t == 0 && !(l.h0.p && n->src[4]->raw_grad)) break; /* da_0 W_h is the gradient of h0 */
        g = hpmlg_gemm_of(l.B, H, 4 * H, hpmlg_matrix(hpmlg_array_at(l.da, t * 4 * H), l.T * 4 * H, 0, true),
                          hpmlg_matrix(half_w_h, H, 0, false), hpmlg_array_of(l.dh, HPML_DTYPE_F32), H, false);
        hpmlg_gemm_run(d, &g);
    }
    for (int s = 4; s < n->src_count; s++)
        if (n->src[s]->raw_grad)
            hpmlg_copy_run(d, hpmlg_grad(n->src[s]), hpmlg_array_of(s == 4 ? l.dh : l.dc, HPML_DTYPE_F32), l.B * H,
                           n->accumulate[s]);
    hpmlg_operand da = hpmlg_matrix(l.da, 4 * H, 0, true), da_transposed = hpmlg_matrix(l.da, 4 * H, 0, false);
    if (x->raw_grad) {
        hpmlg_array w = hpmlg_product_input(d, w_x, NULL);
        hpmlg_batched_product(d, 1, rows, l.in, 4 * H, da, hpmlg_matrix(w, l.in, 0, false), hpmlg_grad(x),
                              n->accumulate[0], false);
    }
    if (w_x->grad) {
        hpmlg_array x_in = hpmlg_product_input(d, x, n->scratch);
        hpmlg_batched_product(d, 1, 4 * H, l.in, rows, da_transposed, hpmlg_matrix(x_in, l.in, 0, false),
                              hpmlg_grad(w_x), n->accumulate[1], false);
    }
    if (w_h->grad)
        hpmlg_batched_product(d, 1, 4 * H, H, rows, da_transposed, hpmlg_matrix(l.before, H, 0, false),
                              hpmlg_grad(w_h), n->accumulate[2], false);
    hpmlg_array all = hpmlg_array_of(l.gates, HPML_DTYPE_F32);
    hpmlg_act_bias_grad(d, all, all, HPML_ACT_NONE, 0, hpmlg_broadcast_strides(1, rows, 4 * H), bias->grad,
                        n->accumulate[3]);
}

HPMLG_FN void hpmlg_op_lstm(HPMLG_OP_ARGUMENTS)
{
    if (back) hpmlg_lstm_backward(d, n);
    else hpmlg_lstm_forward(d, n);
}

// ---------------------------------------------------------------------------------------------------------------------
// >>gpu-gru   gated recurrent units
// ---------------------------------------------------------------------------------------------------------------------

/* The GRU, computed as on the CPU (>>gru of hpml.h): one product for x and all time steps, then a product and a kernel
   for each time step. Backward, the gradients dr, dz, dn and dm overwrite r, z, n and m; if results are stored in
   halves, half copies of these gradients (hpmlg_gru.da) are multiplied. */
typedef struct hpmlg_gru {
    int64_t      B, T, H, in;
    float       *gates, *sums, *dh;   /* (B, T, 4H) r z n m; (B, 3H) h_{t-1} W_h^T of a step; (B, H) gradient of h */
    float       *bias_sums;           /* (4H): sums over B and T of the gradients of r, z, n, m */
    hpmlg_array  h, h0, dy, da, before; /* da (B, T, 4H): gates, or their half copy; before (B, T, H): h_{t-1} */
    const float *b_x, *b_h;
} hpmlg_gru;

/* Places a GRU's arrays in node n's saved and scratch memory; returns the bytes of scratch memory that they need. */
HPMLG_FN size_t hpmlg_gru_layout(const hpmlg_device *d, const hpml_node *n, hpmlg_gru *l)
{
    bool      narrow = d->act_dtype != HPML_DTYPE_F32;
    uintptr_t p = (uintptr_t)n->scratch, size = hpml_dtype_size(d->act_dtype);
    l->B  = n->out->shape[0];
    l->T  = n->out->shape[1];
    l->H  = n->out->shape[2];
    l->in = n->src[0]->shape[2];
    uintptr_t state = (uintptr_t)(l->B * l->H + 63) / 64 * 256, rows = (uintptr_t)(l->B * l->T);
    p += hpmlg_narrowed_bytes(d, n->src[0]);
    l->dh = (float *)p;
    p += state;
    l->sums = (float *)p;
    p += 3 * state;
    l->bias_sums = (float *)p;
    p += (uintptr_t)(l->H + 15) / 16 * 256;
    l->gates = (float *)n->saved;
    l->da    = hpmlg_array_of(narrow ? (void *)p : n->saved, d->act_dtype);
    if (narrow) p += (rows * 4 * (uintptr_t)l->H * size + 255) / 256 * 256;
    l->before = hpmlg_array_of((void *)p, n->out->dtype);
    p += (rows * (uintptr_t)l->H * size + 255) / 256 * 256;
    l->h   = hpmlg_value(n->out);
    l->dy  = hpmlg_grad(n->out);
    l->b_x = n->src[3]->data;
    l->b_h = n->src[4]->data;
    l->h0  = n->src_count > 5 ? hpmlg_value(n->src[5]) : hpmlg_array_null();
    return (size_t)(p - (uintptr_t)n->scratch);
}

/* Returns h of hidden unit j of sample b before step t: h of step t - 1, for t = 0 h0, or 0 without h0. */
HPMLG_DEVICE float hpmlg_gru_before(const hpmlg_gru &l, int64_t b, int64_t t, int64_t j)
{
    if (t > 0) return hpmlg_get(l.h, (b * l.T + t - 1) * l.H + j);
    return l.h0.p ? hpmlg_get(l.h0, b * l.H + j) : 0;
}

/* Computes h at step t, a thread for each of the B H elements. l.sums has h_{t-1} W_h^T; it is not read at step 0
   without h0, where the product is 0. */
static __global__ void hpmlg_k_gru(hpmlg_gru l, int64_t t)
{
    int64_t at = hpmlg_thread_index(), b = hpmlg_quotient(at, l.H), j = at - b * l.H, row = b * l.T + t, H = l.H;
    float  *a = l.gates + row * 4 * H + j, s[3] = { 0, 0, 0 };
    if (b >= l.B) return;
    for (int i = 0; i < 3 && (t > 0 || l.h0.p); i++) s[i] = l.sums[(b * 3 + i) * H + j];
    float r = hpmlg_sigmoid(a[0] + l.b_x[j] + s[0] + l.b_h[j]);
    float z = hpmlg_sigmoid(a[H] + l.b_x[H + j] + s[1] + l.b_h[H + j]);
    float m = s[2] + l.b_h[2 * H + j], n = tanhf(a[2 * H] + l.b_x[2 * H + j] + r * m);
    a[0]     = r;
    a[H]     = z;
    a[2 * H] = n;
    a[3 * H] = m;
    hpmlg_put(l.h, row * H + j, n + z * (hpmlg_gru_before(l, b, t, j) - n));
}

/* The backward pass of step t, a thread for each of the B H elements: overwrites r, z, n and m by their gradients, and
   l.dh, which has the gradient of h_t through step t + 1, by dh z, the part of the gradient of h_{t-1} that does not
   pass W_h. Writes h_{t-1} to l.before. */
static __global__ void hpmlg_k_gru_back(hpmlg_gru l, int64_t t)
{
    int64_t at = hpmlg_thread_index(), b = hpmlg_quotient(at, l.H), j = at - b * l.H, row = b * l.T + t, H = l.H;
    float  *a = l.gates + row * 4 * H + j, d[4];
    if (b >= l.B) return;
    float r = a[0], z = a[H], n = a[2 * H], m = a[3 * H], h = hpmlg_gru_before(l, b, t, j);
    float dh = hpmlg_get(l.dy, row * H + j) + (t < l.T - 1 ? l.dh[at] : 0);
    d[2] = dh * (1 - z) * (1 - n * n);
    d[1] = dh * (h - n) * z * (1 - z);
    d[0] = d[2] * m * r * (1 - r);
    d[3] = d[2] * r;
    for (int i = 0; i < 4; i++) {
        a[i * H] = d[i];
        if (l.da.p != l.gates) hpmlg_put(l.da, (row * 4 + i) * H + j, d[i]);
    }
    l.dh[at] = dh * z;
    hpmlg_put(l.before, row * H + j, h);
}

HPMLG_FN void hpmlg_gru_forward(hpmlg_device *d, hpml_node *n)
{
    hpmlg_gru l = {};
    hpmlg_gru_layout(d, n, &l);
    int64_t     H = l.H;
    hpmlg_array x = hpmlg_product_input(d, n->src[0], n->scratch), w_x = hpmlg_product_input(d, n->src[1], NULL);
    hpmlg_array gates = hpmlg_array_of(l.gates, HPML_DTYPE_F32), w_h = hpmlg_product_input(d, n->src[2], NULL);
    hpmlg_gemm  g = hpmlg_gemm_of(l.B * l.T, 3 * H, l.in, hpmlg_matrix(x, l.in, 0, true),
                                  hpmlg_matrix(w_x, l.in, 0, true), gates, 4 * H, false);
    hpmlg_gemm_run(d, &g);
    for (int64_t t = 0; t < l.T; t++) {
        hpmlg_operand h = t > 0 ? hpmlg_matrix(hpmlg_array_at(l.h, (t - 1) * H), l.T * H, 0, true)
                                : hpmlg_matrix(l.h0, H, 0, true);
        g = hpmlg_gemm_of(l.B, 3 * H, H, h, hpmlg_matrix(w_h, H, 0, true), hpmlg_array_of(l.sums, HPML_DTYPE_F32),
                          3 * H, false);
        if (t > 0 || l.h0.p) hpmlg_gemm_run(d, &g);
        HPMLG_RUN(d, hpmlg_k_gru, (unsigned)((l.B * H + 255) / 256), 256, 0, l, t);
    }
}

/* Adds (dr, dz, dm) W_h of step t, the part of the gradient of h_{t-1} that passes W_h, to l->dh: one product for dr
   and dz, and one for dm, because dn stands between them in a row of da. */
HPMLG_FN void hpmlg_gru_step_back(hpmlg_device *d, const hpmlg_gru *l, hpmlg_array w_h, int64_t t)
{
    int64_t     H = l->H;
    hpmlg_array dh = hpmlg_array_of(l->dh, HPML_DTYPE_F32);
    hpmlg_gemm  g = hpmlg_gemm_of(l->B, H, 2 * H, hpmlg_matrix(hpmlg_array_at(l->da, t * 4 * H), l->T * 4 * H, 0, true),
                                  hpmlg_matrix(w_h, H, 0, false), dh, H, true);
    hpmlg_gemm_run(d, &g);
    g = hpmlg_gemm_of(l->B, H, H, hpmlg_matrix(hpmlg_array_at(l->da, (t * 4 + 3) * H), l->T * 4 * H, 0, true),
                      hpmlg_matrix(hpmlg_array_at(w_h, 2 * H * H), H, 0, false), dh, H, true);
    hpmlg_gemm_run(d, &g);
}

/* Computes the gradients of the biases: of b_x from dr, dz and dn, of b_h from dr, dz and dm. */
HPMLG_FN void hpmlg_gru_bias_back(hpmlg_device *d, const hpmlg_gru *l, const hpml_node *n)
{
    int64_t     H = l->H;
    hpmlg_array all = hpmlg_array_of(l->gates, HPML_DTYPE_F32), sums = hpmlg_array_of(l->bias_sums, HPML_DTYPE_F32);
    hpmlg_act_bias_grad(d, all, all, HPML_ACT_NONE, 0, hpmlg_broadcast_strides(1, l->B * l->T, 4 * H), l->bias_sums,
                        false);
    for (int s = 3; s < 5; s++) {
        hpmlg_array to = hpmlg_grad(n->src[s]);
        if (!to.p) continue;
        hpmlg_copy_run(d, to, sums, 2 * H, n->accumulate[s]);
        hpmlg_copy_run(d, hpmlg_array_at(to, 2 * H), hpmlg_array_at(sums, s == 3 ? 2 * H : 3 * H), H, n->accumulate[s]);
    }
}

HPMLG_FN void hpmlg_gru_backward(hpmlg_device *d, hpml_node *n)
{
    hpmlg_gru    l = {};
    hpml_tensor *x = n->src[0], *w_x = n->src[1], *w_h = n->src[2], *h0 = n->src_count > 5 ? n->src[5] : NULL;
    hpmlg_gru_layout(d, n, &l);
    int64_t     H = l.H, rows = l.B * l.T;
    hpmlg_array half_w_h = hpmlg_product_input(d, w_h, NULL);
    for (int64_t t = l.T - 1; t >= 0; t--) {
        HPMLG_RUN(d, hpmlg_k_gru_back, (unsigned)((l.B * H + 255) / 256), 256, 0, l, t);
        if (t > 0 || (h0 && h0->raw_grad)) hpmlg_gru_step_back(d, &l, half_w_h, t);
    }
    hpmlg_operand da = hpmlg_matrix(l.da, 4 * H, 0, true), turned = hpmlg_matrix(l.da, 4 * H, 0, false);
    hpmlg_operand dm = hpmlg_matrix(hpmlg_array_at(l.da, 3 * H), 4 * H, 0, false);
    hpmlg_operand before = hpmlg_matrix(l.before, H, 0, false);
    if (h0 && h0->raw_grad)
        hpmlg_copy_run(d, hpmlg_grad(h0), hpmlg_array_of(l.dh, HPML_DTYPE_F32), l.B * H, n->accumulate[5]);
    if (x->raw_grad) {
        hpmlg_array w = hpmlg_product_input(d, w_x, NULL);
        hpmlg_batched_product(d, 1, rows, l.in, 3 * H, da, hpmlg_matrix(w, l.in, 0, false), hpmlg_grad(x),
                              n->accumulate[0], false);
    }
    if (w_x->grad) {
        hpmlg_array x_in = hpmlg_product_input(d, x, n->scratch);
        hpmlg_batched_product(d, 1, 3 * H, l.in, rows, turned, hpmlg_matrix(x_in, l.in, 0, false), hpmlg_grad(w_x),
                              n->accumulate[1], false);
    }
    if (w_h->grad) {
        hpmlg_batched_product(d, 1, 2 * H, H, rows, turned, before, hpmlg_grad(w_h), n->accumulate[2], false);
        hpmlg_batched_product(d, 1, H, H, rows, dm, before, hpmlg_array_at(hpmlg_grad(w_h), 2 * H * H),
                              n->accumulate[2], false);
    }
    hpmlg_gru_bias_back(d, &l, n);
}

HPMLG_FN void hpmlg_op_gru(HPMLG_OP_ARGUMENTS)
{
    if (back) hpmlg_gru_backward(d, n);
    else hpmlg_gru_forward(d, n);
}

// =====================================================================================================================
// PART VI    TRAINING: losses, optimizers, gradient codecs
// =====================================================================================================================

// ---------------------------------------------------------------------------------------------------------------------
// >>gpu-loss   losses
// ---------------------------------------------------------------------------------------------------------------------

/* Cross-entropy as in hpml.h: with d_i = x_i - max, sum = sum of exp(d_i), label l, smoothing s and V classes, loss =
   log(sum) - (1 - s) d_l - s mean(d), dx_i = exp(d_i) / sum - (1 - s) [i = l] - s / V. A group of threads reads a row
   once: each thread keeps a maximum and the sum of exp(x - maximum), which is rescaled when the maximum grows.
   Probabilities are not stored; max, 1 / sum and loss of each row are saved, and 1 / (number of valid rows). The kernel
   also counts hits, the rows whose largest element is the label's. */
typedef struct hpmlg_cross_entropy {
    hpmlg_array         x, dx;    /* (rows, V) */
    const int          *labels;   /* (rows) */
    float              *max, *inverse_sum, *loss; /* (rows): maximum, 1 / sum, loss of each row */
    float              *inverse;  /* (1): 1 / (number of valid rows) */
    const float        *dloss;    /* (1): the gradient of the loss, an input of backward */
    int64_t             rows, V, blocks;
    float               smoothing;
    int                 ignore;   /* rows with this label do not count, but are no error */
    int                 tx;       /* number of threads that share a row */
    bool                add;
    hpmlg_note         *note;
    int                *taken;
    unsigned long long *counts;   /* (2): hits (correct predictions), valid rows */
} hpmlg_cross_entropy;

#define HPMLG_LOWEST (-3.402823466e38f) /* a running maximum begins here: with -infinity x - maximum may be NaN */

HPMLG_DEVICE bool hpmlg_label_is_valid(int label, int ignore, int64_t classes)
{
    return label != ignore && label >= 0 && label < classes;
}

/* Computes maximum, 1 / sum of exponentials and loss of each row, and counts hits: a valid row is a hit unless an
   element before the label's is as large, or one after it is larger. A NaN at the label, or at the front of the row,
   where nothing exceeds it, prevents a hit too. node: the loss, for errors; NULL: only counts hits. */
static __global__ void hpmlg_k_cross_entropy(hpmlg_cross_entropy p, const hpml_node *node)
{
    __shared__ float space[HPMLG_REDUCE_THREADS / HPMLG_WARP];
    int64_t row = (int64_t)blockIdx.x * (HPMLG_REDUCE_THREADS / p.tx) + threadIdx.x / (unsigned)p.tx, first = row * p.V;
    int64_t end = first + p.V;
    int     lane = (int)threadIdx.x % p.tx, label = row < p.rows ? p.labels[row] : p.ignore;
    bool    valid = row < p.rows && hpmlg_label_is_valid(label, p.ignore, p.V);
    float   m = HPMLG_LOWEST, s = 0, distances = 0, mine = valid ? hpmlg_get(p.x, first + label) : 0;
    float   beaten = valid && label > 0 && (mine != mine || isnan(hpmlg_get(p.x, first)));
    for (int64_t at = first / 8 * 8 + lane * 8; valid && at < end; at += p.tx * 8) {
        hpmlg_vec8 e = hpmlg_get_range(p.x, at, first, end, -INFINITY);
        float      most = m;
        bool       more = false;
        for (int j = 0; j < 8; j++)
            more = more || e.v[j] > mine || (e.v[j] == mine && at + j >= first && at + j < first + label);
        if (more) beaten = 1;
        for (int j = 0; j < 8; j++) most = fmaxf(most, e.v[j]);
        s *= __expf(m - most);
        m = most;
        for (int j = 0; j < 8; j++) s += __expf(e.v[j] - m);
        for (int j = 0; j < 8 && p.smoothing > 0; j++) distances += at + j >= first && at + j < end ? e.v[j] - mine : 0;
    }
    float most = hpmlg_group_reduce(m, space, p.tx, true);
    s = hpmlg_group_reduce(s * __expf(m - most), space, p.tx, false);
    beaten = hpmlg_group_reduce(beaten, space, p.tx, true);
    if (p.smoothing > 0) distances = hpmlg_group_reduce(distances, space, p.tx, false);
    if (lane != 0 || row >= p.rows) return;
    if (valid) atomicAdd(&p.counts[1], 1ull); /* sums of integers are the same in any order */
    if (valid && beaten == 0) atomicAdd(&p.counts[0], 1ull);
    if (!node) return;
    p.max[row]         = most;
    p.inverse_sum[row] = 1 / s;
    p.loss[row]        = 0;
    if (valid) p.loss[row] = logf(s) - (mine - most) - p.smoothing * distances / (float)p.V; /* the sum of x - x_l */
    else if (label != p.ignore) hpmlg_report_index(p.note, p.taken, row, label, node);
}

static __global__ void hpmlg_k_cross_entropy_back(hpmlg_cross_entropy p)
{
    int64_t row = (int64_t)blockIdx.x * (HPMLG_REDUCE_THREADS / p.tx) + threadIdx.x / (unsigned)p.tx, first = row * p.V;
    int64_t end = first + p.V;
    int     lane = (int)threadIdx.x % p.tx;
    if (row >= p.rows) return;
    bool    valid = hpmlg_label_is_valid(p.labels[row], p.ignore, p.V);
    int64_t label = first + p.labels[row];
    float   scale = p.inverse[0] * p.dloss[0], rest = scale * p.smoothing / (float)p.V;
    float   most = p.max[row], share = scale * p.inverse_sum[row];
    if (!valid && p.add) return;
    for (int64_t at = first / 8 * 8 + lane * 8; at < end; at += p.tx * 8) {
        hpmlg_vec8 e;
        if (valid) e = hpmlg_get_range(p.x, at, first, end, 0);
        for (int j = 0; j < 8; j++) e.v[j] = valid ? share * __expf(e.v[j] - most) - rest : 0;
        if (valid && label >= at && label < at + 8)
            for (int j = 0; j < 8; j++)
                if (at + j == label) e.v[j] -= scale * (1 - p.smoothing);
        hpmlg_put_range(p.dx, at, first, end, e, p.add);
    }
}

HPMLG_FN hpmlg_cross_entropy hpmlg_cross_entropy_make(hpmlg_array x, const void *labels, int64_t rows, int64_t V)
{
    hpmlg_cross_entropy p = {};
    p.x      = x;
    p.labels = (const int *)labels;
    p.rows   = rows;
    p.V      = V;
    p.ignore = -1;
    p.tx     = hpmlg_power_of_two((V + 14) / 8, HPMLG_REDUCE_THREADS);
    p.blocks = (rows + HPMLG_REDUCE_THREADS / p.tx - 1) / (HPMLG_REDUCE_THREADS / p.tx);
    return p;
}

HPMLG_FN void hpmlg_cross_entropy_run(hpmlg_device *d, const hpmlg_cross_entropy *p, const hpml_node *n)
{
    hpmlg_zero(d, p->counts, 2 * sizeof *p->counts);
    HPMLG_RUN(d, hpmlg_k_cross_entropy, (unsigned)p->blocks, HPMLG_REDUCE_THREADS, 0, *p, n);
}

HPMLG_FN void hpmlg_op_cross_entropy(HPMLG_OP_ARGUMENTS)
{
    const hpml_tensor  *x = n->src[0];
    int64_t             V = x->shape[x->ndim - 1];
    hpmlg_cross_entropy p = hpmlg_cross_entropy_make(hpmlg_value(x), n->src[1]->raw, hpml_tensor_count(x) / V, V);
    hpmlg_sum_finish    f = {};
    p.dx          = hpmlg_grad(x);
    p.dloss       = n->out->grad;
    p.add         = n->accumulate[0];
    p.max         = (float *)n->saved;
    p.inverse_sum = p.max + p.rows;
    p.loss        = p.inverse_sum + p.rows;
    p.inverse     = p.loss + p.rows;
    p.smoothing   = n->attr.cross_entropy.smoothing;
    p.ignore      = n->attr.cross_entropy.ignore;
    p.note        = d->note;
    p.taken       = d->note_taken;
    p.counts      = d->counts;
    if (back) return HPMLG_RUN(d, hpmlg_k_cross_entropy_back, (unsigned)p.blocks, HPMLG_REDUCE_THREADS, 0, p);
    bool ignores_a_class = p.ignore >= 0 && p.ignore < V; /* true: its rows count as hits, but have no loss */
    d->op_notes.y      = ignores_a_class ? NULL : p.x.p;
    d->op_notes.labels = p.labels;
    hpmlg_cross_entropy_run(d, &p, n);
    f.part    = p.loss;
    f.n       = p.rows;
    f.counted = &p.counts[1];
    f.out     = n->out->data;
    f.inverse = p.inverse;
    HPMLG_RUN(d, hpmlg_k_sum_finish, 1, 1024, 0, f);
}

/* Implements the backend's function that counts hits (correct predictions) and valid rows: copies the counts of the
   last cross-entropy if that loss has read the same y and labels, else counts by its kernel. */
HPMLG_FN hpml_status hpmlg_count_hits(void *, hpml_ctx *ctx, hpml_dtype dtype, const void *y, const int32_t *labels,
                                      int64_t rows, int64_t classes, int64_t counts[2])
{
    hpmlg_device       *d = hpmlg_device_of(ctx);
    hpmlg_cross_entropy p = hpmlg_cross_entropy_make(hpmlg_array_of((void *)y, dtype), labels, rows, classes);
    p.counts = (unsigned long long *)counts;
    if (d->op_notes.y != y || d->op_notes.labels != (const void *)labels) hpmlg_cross_entropy_run(d, &p, NULL);
    else
        hpmlg_check(d, cudaMemcpyAsync(counts, d->counts, 2 * sizeof *counts, cudaMemcpyDeviceToDevice, d->stream),
                    "hits");
    return hpml_ctx_status(ctx);
}

HPMLG_DEVICE float hpmlg_loss_derivative(int what, float delta, float x, float t)
{
    float d = x - t;
    if (what == HPMLG_BCE) return hpmlg_act_sigmoid(x) - t;
    if (what == HPMLG_MSE) return 2 * d;
    if (delta == 0) return d > 0 ? 1.0f : d < 0 ? -1.0f : 0.0f;
    return d > delta ? delta : d < -delta ? -delta : d;
}

/* Computes the gradients of a loss, the mean of f(x, t) over n elements: dx (+)= df/dx dloss / n, and dt (+)= the
   negative of that, for losses of x - t; dx.p, dt.p NULL: not wanted. what: the kind of loss f, an hpmlg_loss_kind;
   add_x, add_t: the gradient is added to dx, dt. */
static __global__ void hpmlg_k_loss_back(hpmlg_array dx, hpmlg_array dt, hpmlg_array x, hpmlg_array t, int what,
                                         float delta, const float *dloss, int64_t n, bool add_x, bool add_t)
{
    float scale = dloss[0] / (float)n;
    HPMLG_FOR_EACH_VEC8(at, n) {
        hpmlg_vec8 e = hpmlg_get_range(x, at, 0, n, 0), u = hpmlg_get_range(t, at, 0, n, 0);
        for (int j = 0; j < 8; j++) e.v[j] = scale * hpmlg_loss_derivative(what, delta, e.v[j], u.v[j]);
        if (dx.p) hpmlg_put_range(dx, at, 0, n, e, add_x);
        for (int j = 0; j < 8; j++) e.v[j] = -e.v[j];
        if (dt.p) hpmlg_put_range(dt, at, 0, n, e, add_t);
    }
}

HPMLG_FN enum hpmlg_loss_kind hpmlg_loss_kind_of(const hpml_node *n)
{
    if (n->op == HPML_OP_BCE_WITH_LOGITS) return HPMLG_BCE;
    return n->op == HPML_OP_MSE ? HPMLG_MSE : HPMLG_HUBER;
}

HPMLG_FN void hpmlg_loss_pass(hpmlg_device *d, hpml_node *n, bool back)
{
    const hpml_tensor *x = n->src[0], *t = n->src[1];
    int64_t            count = hpml_tensor_count(x);
    float              delta = n->op == HPML_OP_HUBER ? n->attr.huber.delta : 0;
    hpmlg_sum_finish   f = {};
    f.divisor = (double)count;
    f.out     = n->out->data;
    if (!back) return hpmlg_sum_terms_run(d, f, hpmlg_value(x), hpmlg_value(t), hpmlg_loss_kind_of(n), delta, count);
    if (n->op == HPML_OP_BCE_WITH_LOGITS && t->raw_grad)
        hpml_ctx_fail(d->ctx, HPML_ERR_UNSUPPORTED, "bce_with_logits: the target \"%s\" is computed from parameters; "
                      "only the logits get a gradient", t->name);
    HPMLG_RUN_ITEMS(d, hpmlg_k_loss_back, count, 2048, hpmlg_grad(x), hpmlg_grad(t), hpmlg_value(x), hpmlg_value(t),
                    (int)hpmlg_loss_kind_of(n), delta, (const float *)n->out->grad, count, n->accumulate[0],
                    n->accumulate[1]);
}
HPMLG_FN void hpmlg_op_bce_with_logits(HPMLG_OP_ARGUMENTS) { hpmlg_loss_pass(d, n, back); }
HPMLG_FN void hpmlg_op_mse(HPMLG_OP_ARGUMENTS) { hpmlg_loss_pass(d, n, back); }
HPMLG_FN void hpmlg_op_huber(HPMLG_OP_ARGUMENTS) { hpmlg_loss_pass(d, n, back); }

// ---------------------------------------------------------------------------------------------------------------------
// >>gpu-update   optimizers: one launch for all parameters
// ---------------------------------------------------------------------------------------------------------------------

/* The parameters of a model, some of a few numbers and some of millions, are cut into chunks of HPMLG_CHUNK elements;
   the block that updates a chunk finds its parameter in a table that is uploaded in each step. LARS and LAMB need the
   norms of whole parameters: each chunk's sums of squares are written to memory, and one block for each parameter adds
   the sums in order. As on the CPU, a weight that would not be finite keeps its value, moments that are not finite
   become 0, and both cases are reported (hpml_update.found_nonfinite). */

#define HPMLG_CHUNK ((int64_t)4096) /* elements of a chunk: two vec8s per thread of a block */

typedef struct hpmlg_param_step {         /* one row of the update kernel's table: a parameter's update */
    hpml_update u;
    float       correction1, correction2; /* 1 / (1 - beta^step), of beta1 and beta2 */
    hpmlg_half_copy copy;                 /* a half copy of w, updated too; copy.half NULL: no half copy exists */
    int64_t     chunk, chunks;            /* index of the parameter's first chunk; number of chunks */
    int         param;                    /* the parameter's index in the context; -1: unknown */
} hpmlg_param_step;

typedef struct hpmlg_nonfinite_sink { /* where kernels report gradients and parameters that are not finite */
    unsigned long long *first_nonfinite;
    hpmlg_note         *note;
} hpmlg_nonfinite_sink;

HPMLG_DEVICE void hpmlg_nonfinite_report(const hpmlg_nonfinite_sink &f, const hpmlg_param_step *s, bool gradient)
{
    unsigned long long found = hpmlg_nonfinite_pack(s->u.step, s->param, gradient);
    if (atomicMax(f.first_nonfinite, found) >= found) return;
    __threadfence_system();
    f.note->nonfinite = 1;
}

/* Returns the entry of the table `steps` (`count` entries) for the parameter to which chunk number `chunk` belongs,
   found by bisection: the last parameter whose first chunk is not after this chunk. */
HPMLG_DEVICE const hpmlg_param_step *hpmlg_param_step_find(const hpmlg_param_step *steps, int count, int64_t chunk)
{
    int low = 0, high = count;
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (steps[middle].chunk <= chunk) low = middle;
        else high = middle;
    }
    return &steps[low];
}

/* Returns the factor to multiply gradients with: u.grad_scale, reduced if the norm of all gradients exceeds u.clip. */
HPMLG_DEVICE float hpmlg_gradient_scale(const hpml_update &u)
{
    float norm = u.sumsq ? (float)sqrt(*u.sumsq) : 0;
    return norm > u.clip ? u.grad_scale * (u.clip / norm) : u.grad_scale;
}

/* Updates and returns the moving average *state of g, with decay beta. */
HPMLG_DEVICE float hpmlg_moment(float *state, float g, float beta)
{
    *state = fmaf(1 - beta, g, beta * *state);
    return *state;
}

/* Returns the new weight of one element (for LAMB its direction of update) from weight w, gradient g and moments *m and
   *v, the optimizer's states, which it updates; c1, c2: 1 / (1 - beta^step). Formulas: hpml.h, vupdate. */
HPMLG_DEVICE float hpmlg_update_one(const hpml_update *u, float c1, float c2, float w, float g, float *m, float *v)
{
    float step = 0;
    bool  coupled = u->opt != HPML_OPT_ADAMW && u->opt != HPML_OPT_LAMB;
    g *= u->grad_scale;
    if (coupled) g = fmaf(u->weight_decay, w, g);
    switch (u->opt) {
    case HPML_OPT_SGD: case HPML_OPT_LARS:
        step = g;
        if (u->state[0]) {
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
        if (u->state[0]) {
            *m   = fmaf(u->momentum, *m, step);
            step = *m;
        }
        break;
    default: /* ADAM, ADAMW, LAMB */
        step = hpmlg_moment(m, g, u->beta1) * c1;
        step /= sqrtf(hpmlg_moment(v, g * g, u->beta2) * c2) + u->eps;
        if (u->opt == HPML_OPT_LAMB) return fmaf(u->weight_decay, w, step);
        if (u->opt == HPML_OPT_ADAMW) w = fmaf(-(u->lr * u->weight_decay), w, w);
    }
    return fmaf(-u->lr, step, w);
}

/* Does what hpmlg_update_one does for a gradient that may not be finite, and returns the new weight (LAMB: the
   direction). LAMB takes such a gradient as 0; a weight that would not be finite keeps its value; both moments become 0
   if one of them is not finite. Sets *gradient or *step to true if the gradient or the step was not finite. */
HPMLG_DEVICE float hpmlg_update_checked(const hpml_update *u, float c1, float c2, float w, float g, float *m, float *v,
                                        bool *gradient, bool *step)
{
    bool  good = isfinite(g * u->grad_scale), lamb = u->opt == HPML_OPT_LAMB;
    float y = hpmlg_update_one(u, c1, c2, w, good || !lamb ? g : 0, m, v);
    bool  states = isfinite(*m) && isfinite(*v);
    if (!states) *m = *v = 0;
    *gradient = *gradient || !good;
    *step     = *step || (good && !(states && isfinite(y)));
    return isfinite(y) || lamb ? y : w;
}

/* Writes weights e, elements i to i + 7 of n, to the array `to` of half copy h, whose parameter has these n elements
   from element `first` on. */
HPMLG_DEVICE void hpmlg_half_copy_put(hpmlg_array to, const hpmlg_half_copy &h, int64_t first, int64_t n, int64_t i,
                                      hpmlg_vec8 e)
{
    if (!h.channels) return hpmlg_put_range(to, first + i, first, first + n, e, false);
    for (int j = 0; j < 8 && i + j < n; j++) {
        int64_t at = first + i + j, q = hpmlg_quotient(at, h.taps), o = hpmlg_quotient(q, h.channels);
        hpmlg_put(to, (o * h.taps + at - q * h.taps) * h.channels + q - o * h.channels, e.v[j]);
    }
}

/* Updates the weights of all chunks (4,096 elements each). LARS and LAMB take two passes: pass 0 writes each chunk's
   sums of squares of w and of g to `part` or, for LAMB, of w and the direction, which overwrites g; pass 1 updates by
   the learning rate that hpmlg_k_update_rates has multiplied by the ratio of norms. Others need pass 0 only. */
static __global__ void hpmlg_k_update(const hpmlg_param_step *steps, int count, int64_t chunks, double2 *part,
                                      int half_type, int pass, hpmlg_nonfinite_sink finder)
{
    __shared__ float space[HPMLG_WARP];
    for (int64_t chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
        const hpmlg_param_step *s = hpmlg_param_step_find(steps, count, chunk);
        hpml_update             u = s->u;
        const float             c1 = s->correction1, c2 = s->correction2;
        const bool              lars = u.opt == HPML_OPT_LARS, lamb = u.opt == HPML_OPT_LAMB;
        const bool norms_only = lars && pass == 0, apply = lamb && pass == 1, direction = lamb && pass == 0;
        if (pass == 1 && !lars && !lamb) continue;
        u.grad_scale = hpmlg_gradient_scale(u);
        hpmlg_array w = { u.w, HPML_DTYPE_F32 }, g = { u.g, HPML_DTYPE_F32 }, m = { u.state[0], HPML_DTYPE_F32 };
        hpmlg_array v = { u.state[1], HPML_DTYPE_F32 }, copy = { s->copy.half, half_type };
        int64_t     from = (chunk - s->chunk) * HPMLG_CHUNK, to = from + HPMLG_CHUNK < u.n ? from + HPMLG_CHUNK : u.n;
        float       ww = 0, gg = 0;
        bool        gradient = false, step = false; /* true: a gradient, a step here was not finite */
        if (norms_only || apply) m.p = v.p = NULL;
        for (int64_t i = from + 8 * threadIdx.x; i < to; i += 8 * blockDim.x) {
            hpmlg_vec8 x = hpmlg_row_get(w, 0, u.n, i, 0), d = hpmlg_row_get(g, 0, u.n, i, 0), p = {}, q = {};
            if (m.p) p = hpmlg_row_get(m, 0, u.n, i, 0);
            if (v.p) q = hpmlg_row_get(v, 0, u.n, i, 0);
            for (int j = 0; j < 8; j++) {
                float y = d.v[j];
                if (apply) y = fmaf(-u.lr, y, x.v[j]);
                else if (!norms_only && !u.found_nonfinite)
                    y = hpmlg_update_one(&u, c1, c2, x.v[j], y, &p.v[j], &q.v[j]);
                else if (!norms_only)
                    y = hpmlg_update_checked(&u, c1, c2, x.v[j], y, &p.v[j], &q.v[j], &gradient, &step);
                ww += x.v[j] * x.v[j];
                gg += y * y;
                d.v[j] = y;
            }
            if (norms_only) continue;
            if (m.p) hpmlg_row_put(m, 0, u.n, i, p, false);
            if (v.p) hpmlg_row_put(v, 0, u.n, i, q, false);
            hpmlg_row_put(direction ? g : w, 0, u.n, i, d, false);
            if (copy.p && !direction) hpmlg_half_copy_put(copy, s->copy, u.w - s->copy.w, u.n, i, d);
        }
        if (gradient) hpmlg_nonfinite_report(finder, s, true);
        if (step) hpmlg_nonfinite_report(finder, s, false);
        if (pass == 1 || (!lars && !lamb)) continue;
        ww = hpmlg_group_reduce(ww, space, 256, false);
        gg = hpmlg_group_reduce(gg, space, 256, false);
        if (threadIdx.x == 0) part[chunk] = make_double2((double)ww, (double)gg);
    }
}

/* Multiplies each parameter's learning rate by its ratio of norms, one block for each parameter, from the chunks' sums
   of squares in `part`. LARS: trust |w| / (|g| + decay |w|), or 1 if trust is 0, and the rate is then multiplied into
   the gradient's factor and the decay, so that momentum contains it; LAMB: |w| / |direction|. */
static __global__ void hpmlg_k_update_rates(hpmlg_param_step *steps, const double2 *part)
{
    __shared__ double all[2][256];
    hpmlg_param_step *s  = &steps[blockIdx.x];
    double            ww = 0, gg = 0;
    bool              lamb = s->u.opt == HPML_OPT_LAMB;
    if ((!lamb && s->u.opt != HPML_OPT_LARS) || s->chunks == 0) return;
    part += s->chunk;
    for (int64_t i = threadIdx.x; i < s->chunks; i += blockDim.x) {
        ww += part[i].x;
        gg += part[i].y;
    }
    all[0][threadIdx.x] = ww;
    all[1][threadIdx.x] = gg;
    for (int h = (int)blockDim.x / 2; h > 0; h /= 2) {
        __syncthreads();
        for (int k = 0; k < 2 && (int)threadIdx.x < h; k++) all[k][threadIdx.x] += all[k][threadIdx.x + h];
    }
    if (threadIdx.x != 0) return;
    ww = sqrt(all[0][0]);
    gg = sqrt(all[1][0]);
    if (!lamb) gg = gg * (double)hpmlg_gradient_scale(s->u) + (double)s->u.weight_decay * ww;
    if (ww > 0 && gg > 0 && (lamb || s->u.trust > 0)) s->u.lr *= (float)((lamb ? 1 : (double)s->u.trust) * ww / gg);
    if (s->u.found_nonfinite && !lamb && !isfinite(gg)) s->u.lr = 0; /* LARS takes no step by such a gradient */
    if (lamb) return;
    s->u.grad_scale *= s->u.lr;
    s->u.weight_decay *= s->u.lr;
    s->u.lr = 1;
}

/* Returns the bf16 or f16 copy of the parameter in which the n weights at w lie; the update writes it too. Its `half`
   is NULL if there is none. Further copies, and copies of weights that only partly overlap w, become stale. */
HPMLG_FN hpmlg_half_copy hpmlg_update_half(hpmlg_device *d, const float *w, int64_t n)
{
    hpmlg_half_copy copy = {};
    for (hpmlg_half_copy *h = d->half_copies; h; h = h->next) {
        bool within = w >= h->w && w + n <= h->w + h->n && !copy.half;
        if (w >= h->w + h->n || h->w >= w + n) continue;
        if (within) copy = *h;
        h->fresh = within && (h->fresh || n == h->n);
    }
    return copy;
}

/* Returns the index in the context of the parameter whose memory contains the address w; -1: none. Tries first the
   parameter after number `before`, the last result, because parameters are looked up in order. */
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

HPMLG_FN hpmlg_param_step hpmlg_param_step_of(hpmlg_device *d, const hpml_update *u, int64_t chunk, int before)
{
    hpmlg_param_step s = {};
    s.u           = *u;
    s.param       = u->found_nonfinite && u->n > 0 ? hpmlg_param_number(d->ctx, u->w, before) : before;
    s.correction1 = (float)(1 / (1 - pow((double)u->beta1, (double)u->step)));
    s.correction2 = (float)(1 / (1 - pow((double)u->beta2, (double)u->step)));
    if (u->n > 0) s.copy = hpmlg_update_half(d, u->w, u->n);
    s.chunk       = chunk;
    s.chunks      = (u->n + HPMLG_CHUNK - 1) / HPMLG_CHUNK;
    return s;
}

/* Makes d->updates at least `bytes` bytes large: device memory for the table of parameters that the update kernel
   reads, and for sums of LARS and LAMB. It grows at the first step of a model that needs more. */
HPMLG_FN hpml_status hpmlg_update_reserve(hpmlg_device *d, size_t bytes)
{
    if (bytes <= d->updates_bytes) return HPML_OK;
    hpmlg_free(d, d->updates, d->updates_bytes); /* waits until the previous step has read the table */
    d->updates      = hpmlg_alloc_own(d, bytes, "the table of parameters");
    d->updates_bytes = d->updates ? bytes : 0;
    return hpml_ctx_status(d->ctx);
}

/* Implements the backend's `update`: updates `count` parameters in one launch, or in three for LARS and LAMB. */
HPMLG_FN hpml_status hpmlg_update(void *, hpml_ctx *ctx, const hpml_update *updates, int count)
{
    hpmlg_device    *d = hpmlg_device_of(ctx);
    hpmlg_param_step some[32];
    int64_t          chunks = 0;
    bool             twice = false;
    for (int i = 0; i < count; i++) {
        chunks += (updates[i].n + HPMLG_CHUNK - 1) / HPMLG_CHUNK;
        twice = twice || updates[i].opt == HPML_OPT_LARS || updates[i].opt == HPML_OPT_LAMB;
    }
    if (chunks == 0) return HPML_OK;
    size_t            table  = ((size_t)count * sizeof(hpmlg_param_step) + 255) / 256 * 256;
    hpml_status       status = hpmlg_update_reserve(d, table + (twice ? (size_t)chunks * sizeof(double2) : 0));
    hpmlg_param_step *steps  = (hpmlg_param_step *)d->updates;
    double2          *part   = (double2 *)(void *)((char *)d->updates + table);
    int64_t           chunk  = 0;
    int               before = -1;
    hpmlg_nonfinite_sink finder = { d->first_nonfinite, d->note };
    for (int i = 0; i < count && status == HPML_OK; i += 32) {
        int n = count - i < 32 ? count - i : 32;
        for (int j = 0; j < n; j++) {
            some[j] = hpmlg_param_step_of(d, &updates[i + j], chunk, before);
            chunk += some[j].chunks;
            before = some[j].param;
        }
        status = hpmlg_upload(d, steps + i, some, (size_t)n * sizeof *some);
    }
    for (int pass = 0; pass <= (int)twice; pass++) {
        HPMLG_RUN_ITEMS(d, hpmlg_k_update, chunks, 1, steps, count, chunks, part, (int)d->act_dtype, pass, finder);
        if (pass < (int)twice) HPMLG_RUN(d, hpmlg_k_update_rates, (unsigned)count, 256, 0, steps, part);
    }
    if (!hpmlg_ok(d)) /* the parameters' copies in halves may be incomplete */
        for (hpmlg_half_copy *w = d->half_copies; w; w = w->next) w->fresh = false;
    return hpml_ctx_status(d->ctx);
}

// ---------------------------------------------------------------------------------------------------------------------
// >>gpu-codec   gradients packed on the device
// ---------------------------------------------------------------------------------------------------------------------

/* The GPU packs gradients to the same bytes and residuals as hpml.h's codecs, bit for bit; sections api-codec and
   onebit there define the formats. The sums of ONEBIT are taken as on the CPU: element i of a chunk of 1,024 is added
   by lane i % 16, lanes are added pairwise, and chunks in order in double. Half a warp reads a chunk, with a register
   in each lane for every 16 elements; rows of up to 16 chunks are read once. A row that contains a NaN or an infinity
   is marked while it is packed, and then overwritten by zeros. */

#define HPMLG_PACK_ROWS    ((int64_t)262136) /* rows packed by one launch: their marks, .nonfinite, fit in scratch */
#define HPMLG_ONEBIT_CHUNK 1024
#define HPMLG_ONEBIT_TURNS (HPMLG_ONEBIT_CHUNK / 16) /* elements of a chunk that one lane reads */

typedef struct hpmlg_pack { /* the rows that one launch packs */
    unsigned char *packed;
    float         *e;         /* (rows, cols): the residual; NULL: the error is dropped */
    const float   *g;         /* (rows, cols): the gradient */
    int64_t        rows, cols, row_size; /* row_size: bytes of a packed row */
    int           *nonfinite; /* (1 + rows) marks: [0] is 1 if any row is not finite, [1 + row] if this row is not */
    float          threshold;
} hpmlg_pack;

HPMLG_DEVICE void hpmlg_mark_nonfinite(const hpmlg_pack *p, int64_t row)
{
    p->nonfinite[1 + row] = 1;
    p->nonfinite[0] = 1;
}

typedef struct hpmlg_chunk { /* sums and extremes of a chunk: [0] of negative elements, [1] of the others */
    float sum[2], least[2], most[2];
    int   ones;
} hpmlg_chunk;

/* Half a warp reads a chunk of n numbers v = g + e (gradient + residual; e NULL: g). Returns, for the negative numbers
   and for the others, the sum, least and largest, and how many are not negative. v: gets this lane's elements, the
   first `turns` of which are counted; bits: gets words 2 lane and 2 lane + 1 of the chunk's signs. */
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
        unsigned m  = __ballot_sync(HPMLG_ALL_LANES, in && high) >> shift & 0xffffu;
        if (j / 4 == lane) bits[j / 2 % 2] |= m << 16 * (j % 2);
        s.ones += __popc(m);
        s.sum[0] += high ? 0 : v[j];
        s.sum[1] += high ? v[j] : 0;
        if (in && high) {
            s.least[1] = fminf(s.least[1], v[j]);
            s.most[1]  = fmaxf(s.most[1], v[j]);
        }
        if (in && !high) {
            s.least[0] = fminf(s.least[0], v[j]);
            s.most[0]  = fmaxf(s.most[0], v[j]);
        }
    }
    for (int k = 0; k < 2; k++)
        for (int o = 8; o > 0; o /= 2) {
            s.sum[k] += __shfl_xor_sync(HPMLG_ALL_LANES, s.sum[k], o);
            s.least[k] = fminf(s.least[k], __shfl_xor_sync(HPMLG_ALL_LANES, s.least[k], o));
            s.most[k]  = fmaxf(s.most[k], __shfl_xor_sync(HPMLG_ALL_LANES, s.most[k], o));
        }
    return s;
}

/* Returns the level, sent for each negative (or other) element of a row: their mean, in [least, most]; 0 for none. */
HPMLG_DEVICE float hpmlg_onebit_level(double sum, int64_t count, float least, float most)
{
    float mean = count ? (float)(sum / (double)count) : 0;
    if (count && mean < least) mean = least;
    if (count && mean > most) mean = most;
    return mean;
}

/* Returns the address of a packed ONEBIT row, a sequence of 32-bit words: low level, high level, bits. */
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

/* Packs rows with ONEBIT. A block of threads packs 16 / each rows at a time, of `each` chunks of 1,024 columns. longer:
   a row has more than 16 chunks; then one block packs the row, 16 chunks at a time, and keeps v = g + e (gradient +
   residual) in e until the row's two levels are known. With few such rows most of the device is idle, because each row
   occupies one block only. */
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
        auto    count = [&]() { /* returns the number of elements of this half warp's chunk */
            int64_t rest = mine ? p.cols - chunk * HPMLG_ONEBIT_CHUNK : 0;
            if (rest > HPMLG_ONEBIT_CHUNK) rest = HPMLG_ONEBIT_CHUNK;
            return (int)(rest < 0 ? 0 : rest);
        };
        /* 1. Read chunks (v = gradient + residual), write signs; add up, in order, the row's sums and the number of its
           ones (set sign bits), and find its extremes. */
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
                    least[k] = fminf(least[k], o->least[k]);
                    most[k]  = fmaxf(most[k], o->most[k]);
                }
            }
            if (n > 0) hpmlg_onebit_bits(&p, row, chunk, bits);
            HPMLG_UNROLL for (int j = 0; j < HPMLG_ONEBIT_TURNS; j++)
                if (longer && p.e && 16 * j + lane < n) p.e[at + 16 * j + lane] = v[j];
        }
        /* 2. Compute and write the row's two levels, the numbers that its 0 bits and its 1 bits stand for, and mark the
           row if a sum is not finite. */
        float low  = hpmlg_onebit_level(sum[0], p.cols - ones, least[0], most[0]);
        float high = hpmlg_onebit_level(sum[1], ones, least[1], most[1]);
        if (mine && lane == 0 && team % each == 0) {
            hpmlg_onebit_row(&p, row)[0] = low;
            hpmlg_onebit_row(&p, row)[1] = high;
            if (!(isfinite(sum[0]) && isfinite(sum[1]))) hpmlg_mark_nonfinite(&p, row);
        }
        /* 3. Compute the new residual: v (gradient + residual) minus the level, low or high, that is sent for v. */
        for (int64_t c0 = 0; p.e && c0 < (longer ? chunks : 1); c0 += each) {
            chunk = c0 + team % each;
            int    n = count();
            float *e = p.e + row * p.cols + chunk * HPMLG_ONEBIT_CHUNK;
            HPMLG_UNROLL for (int j = 0; j < HPMLG_ONEBIT_TURNS; j++) {
                int i = 16 * j + lane;
                if (i >= n) break;
                float x = longer ? e[i] : v[j];
                e[i] = x - (x >= 0 ? high : low);
            }
        }
    }
}

/* Returns the value of a 2-bit TWOBIT code: 0 for codes 0 and 1, -threshold for 2, threshold for 3. */
HPMLG_DEVICE float hpmlg_twobit_value(const hpmlg_pack &p, unsigned code)
{
    if (code < 2) return 0;
    return code == 3 ? p.threshold : -p.threshold;
}

/* Packs rows with the codec TWOBIT if `two`: 8 elements of a row are 16 bits, and rows end with whole 32-bit words;
   else with BF16, whose rows follow each other without padding, as if all were one row. */
template <bool two> static __global__ void __launch_bounds__(256, 6) hpmlg_k_pack(hpmlg_pack p)
{
    hpmlg_array out = { p.packed, HPML_DTYPE_BF16 }, e = { p.e, HPML_DTYPE_F32 }, g = { (void *)p.g, HPML_DTYPE_F32 };
    int64_t     rows = two ? p.rows : 1, cols = two ? p.cols : p.rows * p.cols;
    int64_t     vecs = two ? (cols + 15) / 16 * 2 : (cols + 7) / 8;
    HPMLG_FOR_EACH(u, rows * vecs) {
        int64_t    row = two ? hpmlg_quotient(u, vecs) : 0, k = u - row * vecs;
        hpmlg_vec8 v = hpmlg_row_get(g, row, cols, 8 * k, 0), lost;
        unsigned   codes = 0, bad = 0;
        if (p.e) {
            lost = hpmlg_row_get(e, row, cols, 8 * k, 0);
            for (int j = 0; j < 8; j++) v.v[j] += lost.v[j];
        }
        for (int j = 0; j < 8; j++) {
            unsigned code = 0;
            if (v.v[j] >= p.threshold) code = 3;
            else if (v.v[j] <= -p.threshold) code = 2;
            float    sent = two ? hpmlg_twobit_value(p, code) : hpmlg_round_to(v.v[j], HPML_DTYPE_BF16);
            codes |= code << 2 * j;
            lost.v[j] = v.v[j] - sent;
            bad |= (unsigned)!isfinite(two ? v.v[j] : sent) << j;
        }
        HPMLG_ROLLED for (int j = 0; bad >> j; j++)
            if (bad >> j & 1) hpmlg_mark_nonfinite(&p, two ? row : hpmlg_quotient(8 * k + j, p.cols));
        if (two) ((unsigned short *)hpmlg_onebit_row(&p, row))[k] = (unsigned short)codes;
        else hpmlg_row_put(out, 0, cols, 8 * k, v, false);
        if (p.e) hpmlg_row_put(e, row, cols, 8 * k, lost, false);
    }
}

/* Overwrites the rows marked as not finite, packed bytes and residual, by zeros: a block for each row. */
static __global__ void hpmlg_k_pack_wipe(hpmlg_pack p)
{
    for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
        if (!p.nonfinite[1 + row]) continue;
        for (int64_t i = threadIdx.x; i < p.row_size; i += blockDim.x) p.packed[row * p.row_size + i] = 0;
        for (int64_t i = threadIdx.x; p.e && i < p.cols; i += blockDim.x) p.e[row * p.cols + i] = 0;
    }
}

/* Sets *kind to the kind of p's codec; an error if the codec is the user's own, for which the GPU has no kernel. */
HPMLG_FN hpml_status hpmlg_codec_kind(hpml_ctx *ctx, const hpml_packing *p, int *kind)
{
    for (*kind = HPML_CODEC_NONE; *kind < HPML_CODEC_COUNT; ++*kind)
        if (p->codec == hpml_codec_get((hpml_codec_kind)*kind)) return HPML_OK;
    return hpml_ctx_fail(ctx, HPML_ERR_UNSUPPORTED, "cuda: codec \"%s\" is custom and runs on the CPU only; take one "
                         "of hpml_codec_kind, or a context without this backend", p->codec->name ? p->codec->name : "");
}

/* Returns the arguments of a launch that packs or unpacks `rows` rows from `row` on; to pack, the caller also sets the
   addresses of gradient, residual and marks (g, e, nonfinite). */
HPMLG_FN hpmlg_pack hpmlg_pack_of(const hpml_packing *p, const void *packed, int64_t row, int64_t rows)
{
    hpmlg_pack some = {};
    some.packed    = (unsigned char *)packed + (size_t)row * p->row_size;
    some.row_size  = (int64_t)p->row_size;
    some.rows      = rows;
    some.cols      = p->cols;
    some.threshold = p->desc.threshold > 0 ? p->desc.threshold : 0.5f;
    return some;
}

/* Packs the rows of p with the codec `kind`, marks rows that are not finite, and overwrites these by zeros. */
HPMLG_FN void hpmlg_pack_run(hpmlg_device *d, int kind, hpmlg_pack p)
{
    int64_t n = p.rows * p.cols, chunks = (p.cols + HPMLG_ONEBIT_CHUNK - 1) / HPMLG_ONEBIT_CHUNK;
    int     each = chunks < 16 ? (int)chunks : 16;
    hpmlg_zero(d, p.nonfinite + 1, (size_t)p.rows * sizeof(int));
    if (kind == HPML_CODEC_TWOBIT) HPMLG_RUN_ITEMS(d, hpmlg_k_pack<true>, n, 2048, p);
    if (kind == HPML_CODEC_BF16) HPMLG_RUN_ITEMS(d, hpmlg_k_pack<false>, n, 2048, p);
    if (kind == HPML_CODEC_ONEBIT)
        HPMLG_RUN_BOOL(d, chunks > 16, hpmlg_k_onebit, true, false, hpmlg_grid_blocks(d, p.rows, 16 / each), 256, 0, p,
                       chunks, each);
    HPMLG_RUN_ITEMS(d, hpmlg_k_pack_wipe, p.rows, 1, p);
}

/* Implements the backend's `encode`: packs gradients. Waits for the device, to report gradients that are not finite. */
HPMLG_FN hpml_status hpmlg_encode(void *, hpml_ctx *ctx, const hpml_packing *p, void *packed, float *residual,
                                  const float *grad, int64_t rows)
{
    hpmlg_device *d = hpmlg_device_of(ctx);
    int           kind, any = 0, *marks = (int *)d->scratch;
    hpml_status   status = hpmlg_codec_kind(ctx, p, &kind);
    if (status != HPML_OK || rows <= 0 || p->cols <= 0) return status;
    if (kind == HPML_CODEC_NONE) {
        hpmlg_copy_run(d, hpmlg_array_of(packed, HPML_DTYPE_F32), hpmlg_array_of((void *)grad, HPML_DTYPE_F32),
                       rows * p->cols, false);
        return hpml_ctx_status(ctx);
    }
    hpmlg_zero(d, marks, sizeof *marks);
    for (int64_t row = 0; row < rows; row += HPMLG_PACK_ROWS) {
        hpmlg_pack some = hpmlg_pack_of(p, packed, row, rows - row < HPMLG_PACK_ROWS ? rows - row : HPMLG_PACK_ROWS);
        some.g         = grad + row * p->cols;
        some.nonfinite = marks;
        if (residual && p->residual_count) some.e = residual + row * p->cols;
        hpmlg_pack_run(d, kind, some);
    }
    status = hpmlg_read(d, &any, marks, sizeof any);
    return status == HPML_OK && any ? HPML_ERR_NONFINITE : hpml_ctx_status(d->ctx);
}

/* Unpacks TWOBIT if `two`, else ONEBIT, to out (`add`: adds): 8 elements of a row at a time, from 16 bits or 8. */
template <bool two>
static __global__ void __launch_bounds__(256, 6) hpmlg_k_unpack(hpmlg_pack p, hpmlg_array out, bool add)
{
    int64_t vecs = (p.cols + 7) / 8;
    HPMLG_FOR_EACH(u, p.rows * vecs) {
        int64_t      row = hpmlg_quotient(u, vecs), k = u - row * vecs;
        const float *level = hpmlg_onebit_row(&p, row);
        unsigned     codes = two ? ((const unsigned short *)level)[k] : ((const unsigned char *)(level + 2))[k];
        hpmlg_vec8   e;
        for (int j = 0; j < 8; j++)
            e.v[j] = two ? hpmlg_twobit_value(p, codes >> 2 * j & 3) : level[codes >> j & 1];
        hpmlg_row_put(out, row, p.cols, 8 * k, e, add);
    }
}

/* Implements the backend's `decode`: unpacks `rows` rows of gradients to out, or adds them to out if `add`. */
HPMLG_FN hpml_status hpmlg_decode(void *, hpml_ctx *ctx, const hpml_packing *p, float *out, const void *packed,
                                  int64_t rows, bool add)
{
    hpmlg_device *d = hpmlg_device_of(ctx);
    int           kind;
    hpml_status   status = hpmlg_codec_kind(ctx, p, &kind);
    hpmlg_pack    all    = hpmlg_pack_of(p, packed, 0, rows);
    hpmlg_array   to     = hpmlg_array_of(out, HPML_DTYPE_F32);
    if (status != HPML_OK || rows <= 0 || p->cols <= 0) return status;
    if (kind == HPML_CODEC_NONE)
        hpmlg_copy_run(d, to, hpmlg_array_of(all.packed, HPML_DTYPE_F32), rows * p->cols, add);
    else if (kind == HPML_CODEC_BF16)
        hpmlg_copy_run(d, to, hpmlg_array_of(all.packed, HPML_DTYPE_BF16), rows * p->cols, add);
    else
        HPMLG_RUN_BOOL(d, kind == HPML_CODEC_TWOBIT, hpmlg_k_unpack, true, false,
                       hpmlg_grid_blocks(d, rows * p->cols, 2048), 256, 0, all, to, add);
    return hpml_ctx_status(d->ctx);
}

// =====================================================================================================================
// PART VII   SEVERAL GPUS
// =====================================================================================================================

#ifdef HPML_USE_NCCL
// ---------------------------------------------------------------------------------------------------------------------
// >>gpu-nccl   NCCL: loading, meeting of ranks, deadlines
// ---------------------------------------------------------------------------------------------------------------------

/* NCCL's kernels run on a stream of their own: hpml_nccl_link_begin makes this stream wait for the device's stream,
   hpml_nccl_link_end records an event on it, and hpml_nccl_link_wait makes the device's stream wait for the event.
   Communicators are non-blocking: a call may still be in progress when it returns; then its state is polled until it is
   done, has failed, or the deadline has passed. nccl.h gives types only; these functions are loaded at run time. */

#define HPMLG_NCCL_CALLS(X)                                                                                            \
    X(GetUniqueId) X(CommInitRankConfig) X(CommGetAsyncError) X(CommAbort) X(CommDestroy) X(AllReduce) X(Send) X(Recv) \
    X(GroupStart) X(GroupEnd) X(GetErrorString) X(GetLastError) X(Reduce) X(Broadcast) X(GetVersion)

typedef struct hpmlg_nccl_calls {
#define HPMLG_X(name) decltype(&nccl##name) name;
    HPMLG_NCCL_CALLS(HPMLG_X)
#undef HPMLG_X
} hpmlg_nccl_calls;

typedef struct hpmlg_rank_identity { /* data of a rank, exchanged with all ranks before NCCL exists */
    char         host[64];
    cudaUUID_t   gpu;
    int          device;             /* index of the GPU on its host */
    ncclUniqueId id;                 /* NCCL's id; all ranks use that of rank 0 */
} hpmlg_rank_identity;

typedef struct hpmlg_staging {       /* header of pinned memory through which gradients pass between nodes */
    cudaEvent_t           arrived;   /* event: the last download to this memory is complete */
    struct hpmlg_staging *next;
    float                 padding[12]; /* fills up a cache line of 64 bytes */
} hpmlg_staging;

struct hpml_nccl {
    hpml_ctx         *ctx;
    hpmlg_device     *d;
    hpml_nccl_desc    desc;
    hpml_nccl_meeting meeting;       /* how ranks meet; allgather NULL: by files */
    hpmlg_nccl_calls  call;
    ncclComm_t        comm;          /* NULL: not made yet, or aborted */
    cudaStream_t      stream;
    cudaEvent_t       before, after; /* events: ops before hpml_nccl_link_begin; NCCL up to hpml_nccl_link_end */
    hpmlg_staging    *stages;
    bool              given_up;      /* true: the communicator was aborted; accessed atomically */
    bool              open;          /* true: a group of NCCL calls was begun and not ended */
    bool              in_flight;     /* true: NCCL work before the event `after` may still run */
    bool              closing;       /* true: hpmlg_nccl_destroy is running */
    bool              is_timed;      /* true: a timed span was begun with the group of NCCL calls */
    char              operation[96]; /* name of the current NCCL operation, for error texts */
};

/* Sleeps 50 us between two polls of a wait that began at time `since` (s). Does not sleep in the wait's first ms, in
   which most waits end. */
HPMLG_FN void hpmlg_poll_pause(double since)
{
    struct timespec t = { 0, 50000 };
    if (hpml_now() - since > 1e-3) nanosleep(&t, NULL);
}

/* Aborts the NCCL communicator, so that its kernels, which wait for ranks that do not answer, end; gives the context
   the error `status` with the text `why`, and returns its status. */
HPMLG_FN hpml_status hpmlg_nccl_fail(hpml_nccl *n, hpml_status status, const char *why)
{
    char        text[400];
    const char *more = n->call.GetLastError(n->comm);
    snprintf(text, sizeof text, "%s%s%s", why, more && more[0] ? ": " : "", more ? more : "");
    __atomic_store_n(&n->given_up, true, __ATOMIC_RELEASE); /* from now on no downloaded data is valid */
    if (n->open) n->call.GroupEnd();
    if (n->comm) n->call.CommAbort(n->comm);
    n->comm      = NULL;
    n->open      = false;
    n->in_flight = false;
    return hpml_ctx_fail(n->ctx, status, "rank %d: NCCL %s: %s", (int)n->meeting.rank_in_errors, n->operation, text);
}

HPMLG_FN hpml_status hpmlg_nccl_result(hpml_nccl *n, ncclResult_t r)
{
    if (r == ncclSuccess) return HPML_OK;
    return hpmlg_nccl_fail(n, r == ncclRemoteError ? HPML_ERR_PEER : HPML_ERR_COMM, n->call.GetErrorString(r));
}

/* Waits, at most desc.timeout seconds, for the end of the NCCL call that returned r, then for `event`, unless NULL.
   Returns HPML_OK or, after aborting the communicator, an error. */
HPMLG_FN hpml_status hpmlg_nccl_wait(hpml_nccl *n, ncclResult_t r, cudaEvent_t event)
{
    char text[96];
    for (double start = hpml_now(); hpml_now() - start <= n->desc.timeout; hpmlg_poll_pause(start)) {
        cudaError_t  e = r == ncclSuccess && event ? cudaEventQuery(event) : cudaSuccess;
        ncclResult_t asked;
        if (r == ncclSuccess && e != cudaErrorNotReady) return hpmlg_check(n->d, e, "NCCL");
        if (r != ncclSuccess && r != ncclInProgress) return hpmlg_nccl_result(n, r);
        asked = n->call.CommGetAsyncError(n->comm, &r);
        if (asked != ncclSuccess) r = asked;
    }
    snprintf(text, sizeof text, "not done after %g seconds: has a rank died, or not come?", n->desc.timeout);
    return hpmlg_nccl_fail(n, HPML_ERR_TIMEOUT, text);
}

/* Finds NCCL's functions in the program itself, else loads the library; an error if NCCL is older than 2.14. */
HPMLG_FN hpml_status hpmlg_nccl_load(hpml_nccl *n)
{
    const char *name = n->desc.library ? n->desc.library : "libnccl.so.2";
    bool        own  = !n->desc.library && dlsym(RTLD_DEFAULT, "ncclCommInitRankConfig");
    void       *from = own ? RTLD_DEFAULT : dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (!own && !from) {
        const char *why = dlerror();
        return hpml_ctx_fail(n->ctx, HPML_ERR_UNSUPPORTED, "rank %d: NCCL cannot be loaded (%s); install libnccl2 or "
                             "set hpml_nccl_desc.library", (int)n->meeting.rank_in_errors, why ? why : name);
    }
    bool all = true;
    int  v = 0;
#define HPMLG_X(name)                                                                                                  \
    *(void **)(void *)&n->call.name = dlsym(from, "nccl" #name);                                                       \
    all = all && n->call.name;
    HPMLG_NCCL_CALLS(HPMLG_X)
#undef HPMLG_X
    if (n->call.GetVersion) n->call.GetVersion(&v);
    if (all && v >= 21400) return HPML_OK;
    int thousand = v < 10000 ? 1000 : 10000; /* since 2.9 the major version has one digit more */
    int major = v / thousand, minor = v % thousand / 100;
    return hpml_ctx_fail(n->ctx, HPML_ERR_UNSUPPORTED, v ? "rank %d: %s is NCCL %d.%d.%d; hpml needs 2.14 or later"
                         : "rank %d: %s is not NCCL", (int)n->meeting.rank_in_errors, name, major, minor, v % 100);
}

/* Writes the file of rank `rank` if `write`, else reads it. Ranks find each other by these files: a file contains one
   number for each rank (numbers), its own random number for this start of NCCL and those that it has read of others,
   then the rank's identity (identity, `bytes` bytes). A file appears whole, because it is written under another name
   and renamed. Returns true on success, false if a file is missing or has an error. */
HPMLG_FN bool hpmlg_nccl_file(const hpml_nccl *n, int rank, uint64_t *numbers, char *identity, size_t bytes, bool write)
{
    char   name[1024], part[1032];
    size_t count = (size_t)n->desc.ranks;
    snprintf(name, sizeof name, "%s.%d", n->desc.file, rank);
    snprintf(part, sizeof part, "%s%s", name, write ? ".part" : "");
    FILE *f = fopen(part, write ? "wb" : "rb");
    if (!f) return false;
    bool good = write ? fwrite(numbers, sizeof *numbers, count, f) == count && fwrite(identity, 1, bytes, f) == bytes
                      : fread(numbers, sizeof *numbers, count, f) == count && fread(identity, 1, bytes, f) == bytes;
    return fclose(f) == 0 && good && (!write || rename(part, name) == 0);
}

/* Exchanges the ranks' identities (`bytes` bytes each, in all[]) by files, as meeting.allgather does by other means.
   This rank draws a random number, and writes its file again whenever it has read a new number of another rank. A file
   that contains this rank's number belongs to this run; files that a killed run has left do not contain it. */
HPMLG_FN hpml_status hpmlg_nccl_meet_by_files(hpml_nccl *n, char *all, size_t bytes)
{
    int             me = n->desc.rank, ranks = n->desc.ranks, missing = -1;
    bool            is_written = false; /* true: this rank's file has all random numbers that it has read of others */
    double          start = hpml_now();
    struct timespec t;
    uint64_t       *mine = (uint64_t *)hpml_ctx_alloc(n->ctx, 2 * sizeof *mine * (size_t)ranks, NULL);
    if (!mine) return HPML_ERR_MEMORY;
    clock_gettime(CLOCK_REALTIME, &t);
    mine[me] = ((uint64_t)t.tv_sec * 1000000000 + (uint64_t)t.tv_nsec) * 1000003 + (uint64_t)getpid() + (uintptr_t)n;
    while (hpml_ctx_status(n->ctx) == HPML_OK && (!is_written || missing >= 0)) {
        if (!is_written && !hpmlg_nccl_file(n, me, mine, all + (size_t)me * bytes, bytes, true))
            hpml_ctx_fail(n->ctx, HPML_ERR_WRITE, "rank %d: NCCL: cannot write %s.%d", me, n->desc.file, me);
        is_written = true;
        missing    = -1;
        for (int r = 0; r < ranks; r++) {
            uint64_t *theirs = mine + ranks;
            bool      here = r == me || hpmlg_nccl_file(n, r, theirs, all + (size_t)r * bytes, bytes, false);
            if (!here || (r != me && theirs[me] != mine[me])) missing = r;
            if (here && r != me && mine[r] != theirs[r]) {
                mine[r]    = theirs[r];
                is_written = false;
            }
        }
        if (missing >= 0 && hpml_now() - start > n->desc.timeout)
            hpml_ctx_fail(n->ctx, HPML_ERR_TIMEOUT, "rank %d: NCCL: no %s.%d of this run after %g seconds: rank %d has "
                          "not come, or does not see this file", me, n->desc.file, missing, n->desc.timeout, missing);
        else if (missing >= 0) hpmlg_poll_pause(start);
    }
    hpml_ctx_release(n->ctx, mine);
    return hpml_ctx_status(n->ctx);
}

/* Exchanges identities (host, GPU, NCCL id), so that all[] has those of all ranks. A rank that has failed takes part
   too, because the other ranks then get an error. */
HPMLG_FN hpml_status hpmlg_nccl_exchange_identities(hpml_nccl *n, hpmlg_rank_identity *all)
{
    hpmlg_rank_identity *mine = &all[n->desc.rank];
    cudaDeviceProp       p;
    hpml_status          status = hpmlg_nccl_load(n);
    snprintf(n->operation, sizeof n->operation, "ncclGetUniqueId");
    HPMLG_TRY(status, hpmlg_check(n->d, cudaGetDeviceProperties(&p, n->d->d.device), "properties"));
    if (n->desc.rank == 0) HPMLG_TRY(status, hpmlg_nccl_result(n, n->call.GetUniqueId(&mine->id)));
    gethostname(mine->host, sizeof mine->host - 1);
    mine->device = n->d->d.device;
    if (status == HPML_OK) mine->gpu = p.uuid;
    hpml_status met = n->meeting.allgather ? n->meeting.allgather(n->meeting.user, all, sizeof *all)
                                           : hpmlg_nccl_meet_by_files(n, (char *)all, sizeof *all);
    return status != HPML_OK ? status : met;
}

/* Checks that no two ranks use the same GPU, because NCCL would fail later, with an error that names no rank. */
HPMLG_FN hpml_status hpmlg_nccl_check_gpus(hpml_nccl *n, const hpmlg_rank_identity *all)
{
    for (int b = 1; b < n->desc.ranks; b++)
        for (int a = 0; a < b; a++)
            if (strcmp(all[a].host, all[b].host) == 0 && memcmp(&all[a].gpu, &all[b].gpu, sizeof all[a].gpu) == 0)
                return hpml_ctx_fail(n->ctx, HPML_ERR_ARGUMENT, "ranks %d and %d are both on GPU %d of host %s: give "
                                     "each its own (hpml_cuda_desc.device = rank %% hpml_cuda_device_count())", a, b,
                                     all[a].device, all[a].host);
    return HPML_OK;
}

/* Exchanges identities (host, GPU, NCCL id) with the other ranks and makes the NCCL communicator. */
HPMLG_FN hpml_status hpmlg_nccl_open(hpml_nccl *n)
{
    hpmlg_rank_identity *all = (hpmlg_rank_identity *)hpml_ctx_alloc(n->ctx, sizeof *all * (size_t)n->desc.ranks, NULL);
    ncclConfig_t         config = NCCL_CONFIG_INITIALIZER;
    char                 name[1024];
    if (!all) return HPML_ERR_MEMORY;
    hpml_status status = hpmlg_nccl_exchange_identities(n, all);
    HPMLG_TRY(status, hpmlg_nccl_check_gpus(n, all));
    cudaError_t e = cudaStreamCreateWithFlags(&n->stream, cudaStreamNonBlocking);
    HPMLG_TRY(e, cudaEventCreateWithFlags(&n->before, cudaEventDisableTiming));
    HPMLG_TRY(e, cudaEventCreateWithFlags(&n->after, cudaEventDisableTiming));
    HPMLG_TRY(status, hpmlg_check(n->d, e, "a stream for NCCL"));
    snprintf(n->operation, sizeof n->operation, "communicator of %d ranks", (int)n->desc.ranks);
    config.blocking = 0;
    HPMLG_TRY(status, hpmlg_nccl_wait(n, n->call.CommInitRankConfig(&n->comm, n->desc.ranks, all[0].id, n->desc.rank,
                                                                    &config), NULL));
    hpml_ctx_release(n->ctx, all);
    if (n->meeting.allgather) return status;
    snprintf(name, sizeof name, "%s.%d", n->desc.file, (int)n->desc.rank);
    remove(name); /* all ranks have read this rank's file, or have failed */
    return status;
}

/* Destroys a hpml_nccl: the destructor of its memory, which is also called when its context is freed. */
HPMLG_FN void hpmlg_nccl_destroy(void *object)
{
    hpml_nccl *n = (hpml_nccl *)object;
    n->closing = true;
    __atomic_store_n(&n->given_up, true, __ATOMIC_RELEASE);
    if (n->meeting.destroyed) n->meeting.destroyed(n->meeting.owner);
    if (!n->ctx) return;
    hpmlg_device_of(n->ctx);
    if (n->open) n->call.GroupEnd(); /* after an error; this thread's next communicator must not join the group */
    if (n->comm && hpml_ctx_status(n->ctx) == HPML_OK && hpml_nccl_link_check(n) == HPML_OK)
        n->call.CommDestroy(n->comm);
    else if (n->comm) n->call.CommAbort(n->comm);
    if (n->before) cudaEventDestroy(n->before);
    if (n->after) cudaEventDestroy(n->after);
    if (n->stream) cudaStreamDestroy(n->stream);
    for (hpmlg_staging *s = n->stages, *next; s; s = next) {
        next = s->next;
        if (s->arrived) cudaEventDestroy(s->arrived);
        cudaFreeHost(s);
    }
}

HPML_API hpml_nccl *hpml_nccl_create(hpml_ctx *ctx, const hpml_nccl_desc *desc)
{
    hpml_nccl               *n = NULL;
    const hpml_nccl_meeting *meeting = desc ? desc->meeting : NULL;
    bool good = desc && !desc->_begin && !desc->_end && desc->ranks > 0 && desc->rank >= 0 &&
                desc->rank < desc->ranks && (meeting ? meeting->allgather != NULL : desc->file != NULL) &&
                desc->timeout >= 0;
    if (!ctx) return NULL;
    if (hpml_ctx_status(ctx) == HPML_OK && !good)
        hpml_ctx_fail(ctx, HPML_ERR_ARGUMENT, "nccl desc: expected a rank below ranks, a timeout of 0 or more, and a "
                      "file or a meeting's allgather; or a canary is not zero: zero the struct before you set fields");
    if (hpml_ctx_status(ctx) == HPML_OK && hpml_ctx_backend(ctx) != hpml_backend_cuda())
        hpml_ctx_fail(ctx, HPML_ERR_UNSUPPORTED, "nccl: rank %d computes on %s; its context needs hpml_backend_cuda()",
                      (int)desc->rank, hpml_ctx_backend(ctx)->name);
    if (hpml_ctx_status(ctx) == HPML_OK) n = (hpml_nccl *)hpml_ctx_alloc(ctx, sizeof *n, hpmlg_nccl_destroy);
    if (!n) {
        if (good && meeting) meeting->allgather(meeting->user, NULL, 0); /* so that the other ranks get an error */
        return NULL;
    }
    n->ctx  = ctx;
    n->d    = hpmlg_device_of(ctx);
    n->desc = *desc;
    if (n->desc.timeout == 0) n->desc.timeout = 60;
    if (meeting) n->meeting = *meeting;
    else n->meeting.rank_in_errors = n->desc.rank;
    n->meeting.destroyed = NULL; /* must not be called if this function fails */
    n->desc.meeting      = NULL;
    if (hpmlg_nccl_open(n) != HPML_OK) {
        hpml_ctx_release(ctx, n);
        return NULL;
    }
    if (meeting) n->meeting.destroyed = meeting->destroyed;
    return n;
}

HPML_API void hpml_nccl_free(hpml_nccl *n)
{
    if (n && !n->closing) hpml_ctx_release(n->ctx, n);
}

HPML_API void hpml_nccl_link_free(void *nccl)
{
    hpml_nccl *n = (hpml_nccl *)nccl;
    if (n->closing) return;
    n->meeting.destroyed = NULL; /* the communicator, which calls this function, has cleared its link */
    hpml_nccl_free(n);
}

// ---------------------------------------------------------------------------------------------------------------------
// >>gpu-link   collectives on device memory
// ---------------------------------------------------------------------------------------------------------------------

/* Makes the device current and returns HPML_OK, or returns an error if the NCCL communicator cannot be used. */
HPMLG_FN hpml_status hpmlg_nccl_ready(hpml_nccl *n)
{
    if (!n) return HPML_ERR_ARGUMENT;
    if (hpml_ctx_status(n->ctx) != HPML_OK) return hpml_ctx_status(n->ctx);
    if (!n->comm)
        return hpml_ctx_fail(n->ctx, HPML_ERR_COMM, "rank %d: NCCL was given up after an error; create a new hpml_nccl",
                             (int)n->meeting.rank_in_errors);
    hpmlg_device_of(n->ctx);
    return HPML_OK;
}

#define HPMLG_NCCL_ENTER(n, nccl)                                                                                      \
    hpml_nccl  *n     = (hpml_nccl *)nccl;                                                                             \
    hpml_status ready = hpmlg_nccl_ready(n);                                                                           \
    if (ready != HPML_OK) return ready

HPML_API hpml_status hpml_nccl_link_begin(void *nccl)
{
    HPMLG_NCCL_ENTER(n, nccl);
    if (n->open) return hpmlg_nccl_fail(n, HPML_ERR_COMM, "an earlier group of calls was not ended, after an error");
    cudaError_t e = cudaEventRecord(n->before, n->d->stream);
    if (e == cudaSuccess) e = cudaStreamWaitEvent(n->stream, n->before, 0);
    if (e != cudaSuccess) return hpmlg_check(n->d, e, "a stream for NCCL");
    n->open     = true;
    n->is_timed = n->d->span_count > 0; /* true: ops are timed, so NCCL's calls are too */
    if (n->is_timed) hpmlg_span_mark(n->d, n->stream, NULL, NULL, 0);
    return hpmlg_nccl_result(n, n->call.GroupStart());
}

/* Returns the status of an NCCL call that returned r. The call is in a group: that it is still in progress is no error,
   because it is only queued until the group ends. */
HPMLG_FN hpml_status hpmlg_nccl_queued(hpml_nccl *n, ncclResult_t r)
{
    return r == ncclInProgress ? HPML_OK : hpmlg_nccl_result(n, r);
}

HPML_API hpml_status hpml_nccl_link_allreduce(void *nccl, float *x, int64_t count, bool mean)
{
    HPMLG_NCCL_ENTER(n, nccl);
    snprintf(n->operation, sizeof n->operation, "allreduce of %lld floats", (long long)count);
    hpmlg_half_copies_expire(n->d, x, (size_t)count * sizeof *x);
    return hpmlg_nccl_queued(n, n->call.AllReduce(x, x, (size_t)count, ncclFloat32, mean ? ncclAvg : ncclSum, n->comm,
                                                  n->stream));
}

HPML_API hpml_status hpml_nccl_link_swap(void *nccl, const void *out, const size_t *out_at, bool same, void *in,
                                         const size_t *in_at)
{
    HPMLG_NCCL_ENTER(n, nccl);
    hpml_status status = HPML_OK;
    int p = n->desc.ranks, me = n->desc.rank;
    snprintf(n->operation, sizeof n->operation, "%s, %zu bytes", same ? "sums to all" : "stripes to their owners",
             in_at[p]);
    for (int k = 1; k < p && status == HPML_OK; k++) {
        int          to = (me + k) % p, from = (me - k + p) % p, mine = same ? me : to;
        const char  *what = (const char *)out + out_at[mine];
        char        *where = (char *)in + in_at[from];
        ncclResult_t r = n->call.Send(what, out_at[mine + 1] - out_at[mine], ncclUint8, to, n->comm, n->stream);
        if (r == ncclSuccess || r == ncclInProgress)
            r = n->call.Recv(where, in_at[from + 1] - in_at[from], ncclUint8, from, n->comm, n->stream);
        status = hpmlg_nccl_queued(n, r);
    }
    return status;
}

HPML_API hpml_status hpml_nccl_link_end(void *nccl)
{
    HPMLG_NCCL_ENTER(n, nccl);
    n->open = false;
    hpml_status status = hpmlg_nccl_wait(n, n->call.GroupEnd(), NULL);
    if (status != HPML_OK) return status;
    n->in_flight = true;
    if (n->is_timed) hpmlg_span_mark(n->d, n->stream, "nccl", NULL, HPML_LANE_COMM);
    return hpmlg_check(n->d, cudaEventRecord(n->after, n->stream), "a stream for NCCL");
}

HPML_API hpml_status hpml_nccl_link_wait(void *nccl)
{
    HPMLG_NCCL_ENTER(n, nccl);
    return hpmlg_check(n->d, cudaStreamWaitEvent(n->d->stream, n->after, 0), "a stream for NCCL");
}

/* Waits on the host, at most desc.timeout seconds, until all NCCL collectives are complete. Called before the host
   waits for the device, because that wait has no time limit. */
HPML_API hpml_status hpml_nccl_link_check(void *nccl)
{
    HPMLG_NCCL_ENTER(n, nccl);
    hpml_status status = hpmlg_nccl_wait(n, ncclInProgress, n->in_flight ? n->after : NULL);
    n->in_flight = false;
    return status;
}

/* Computes x = x * times / by, rounded as on the CPU: two operations, not one multiplication by times / by. */
static __global__ void hpmlg_k_scale(float *x, int64_t n, float times, float by)
{
    HPMLG_FOR_EACH(i, n)
        x[i] = x[i] * times / by;
}

HPML_API hpml_status hpml_nccl_link_scale(void *nccl, float *x, int64_t count, float times, float by)
{
    HPMLG_NCCL_ENTER(n, nccl);
    if (count <= 0) return HPML_OK;
    HPMLG_RUN_ITEMS(n->d, hpmlg_k_scale, count, 1024, x, count, times, by);
    return hpml_ctx_status(n->ctx);
}

HPML_API float *hpml_nccl_link_stage(void *nccl, int64_t count)
{
    hpml_nccl     *n = (hpml_nccl *)nccl;
    hpmlg_staging *s = NULL;
    size_t         bytes = sizeof *s + (size_t)count * sizeof(float);
    if (hpmlg_nccl_ready(n) != HPML_OK) return NULL;
    cudaError_t e = cudaHostAlloc((void **)&s, bytes, cudaHostAllocDefault);
    if (e == cudaSuccess) {
        memset(s, 0, bytes);
        s->next   = n->stages;
        n->stages = s;
        e = cudaEventCreateWithFlags(&s->arrived, cudaEventDisableTiming);
    }
    return hpmlg_check(n->d, e, "host memory for gradients between nodes") == HPML_OK ? (float *)(s + 1) : NULL;
}

/* Returns the bytes of part r, elements at[r] to at[r + 1] - 1, of an array of floats. */
HPMLG_FN size_t hpmlg_part_bytes(const int64_t *at, int r) { return (size_t)(at[r + 1] - at[r]) * sizeof(float); }

/* Reduces (sums) part r of x, elements at[r] to at[r + 1] - 1, to rank r, and copies this rank's part to the host
   memory `stage`. NCCL has no reduce-scatter for parts of different sizes: each part is a call; all run as one. */
HPML_API hpml_status hpml_nccl_link_reduce_scatter(void *nccl, float *x, const int64_t *at, float *stage)
{
    HPMLG_NCCL_ENTER(n, nccl);
    int         me     = n->desc.rank;
    hpml_status status = hpml_nccl_link_begin(nccl);
    snprintf(n->operation, sizeof n->operation, "reduce-scatter of %lld floats", (long long)at[n->desc.ranks]);
    for (int r = 0; r < n->desc.ranks && status == HPML_OK; r++) {
        float *p     = x + at[r];
        size_t count = hpmlg_part_bytes(at, r) / sizeof(float);
        if (count > 0)
            status = hpmlg_nccl_queued(n, n->call.Reduce(p, p, count, ncclFloat32, ncclSum, r, n->comm, n->stream));
    }
    if (status == HPML_OK) status = hpml_nccl_link_end(nccl);
    if (status != HPML_OK) return status;
    cudaError_t e = cudaMemcpyAsync(stage, x + at[me], hpmlg_part_bytes(at, me), cudaMemcpyDeviceToHost, n->stream);
    if (e == cudaSuccess) e = cudaEventRecord(((hpmlg_staging *)(void *)stage - 1)->arrived, n->stream);
    return hpmlg_check(n->d, e, "copying a share to the host");
}

/* Copies the host memory `stage` to this rank's part of x, and broadcasts part r, elements at[r] to at[r + 1] - 1, from
   rank r, for all r, so that x is complete on all ranks. */
HPML_API hpml_status hpml_nccl_link_allgather(void *nccl, float *x, const int64_t *at, const float *stage)
{
    HPMLG_NCCL_ENTER(n, nccl);
    int         me     = n->desc.rank;
    hpml_status status = hpml_nccl_link_begin(nccl);
    cudaError_t e = cudaMemcpyAsync(x + at[me], stage, hpmlg_part_bytes(at, me), cudaMemcpyHostToDevice, n->stream);
    snprintf(n->operation, sizeof n->operation, "allgather of %lld floats", (long long)at[n->desc.ranks]);
    for (int r = 0; r < n->desc.ranks && status == HPML_OK; r++) {
        float *p     = x + at[r];
        size_t count = hpmlg_part_bytes(at, r) / sizeof(float);
        if (count > 0)
            status = hpmlg_nccl_queued(n, n->call.Broadcast(p, p, count, ncclFloat32, r, n->comm, n->stream));
    }
    if (status == HPML_OK) status = hpml_nccl_link_end(nccl);
    return status != HPML_OK ? status : hpmlg_check(n->d, e, "copying a share to the device");
}

/* Waits until hpml_nccl_link_reduce_scatter's copy to the host memory `stage` is complete, at most desc.timeout
   seconds. Any thread may call this function, because it gives the context no error: it only returns one. */
HPML_API hpml_status hpml_nccl_link_landed(void *nccl, float *stage)
{
    hpml_nccl     *n = (hpml_nccl *)nccl;
    hpmlg_staging *s = (hpmlg_staging *)(void *)stage - 1;
    cudaError_t    e = cudaErrorNotReady;
    hpmlg_device_of(n->ctx);
    for (double start = hpml_now(); e == cudaErrorNotReady; hpmlg_poll_pause(start)) {
        e = cudaEventQuery(s->arrived);
        if (__atomic_load_n(&n->given_up, __ATOMIC_ACQUIRE)) return HPML_ERR_COMM;
        if (e == cudaErrorNotReady && hpml_now() - start > n->desc.timeout) return HPML_ERR_TIMEOUT;
    }
    return e == cudaSuccess ? HPML_OK : HPML_ERR_CUDA;
}

HPML_API hpml_status hpml_nccl_allreduce(hpml_nccl *n, float *x, int64_t count, bool mean)
{
    hpml_nccl_link_check(n); /* waits for the previous call, so that the host is at most one call ahead */
    hpml_nccl_link_begin(n);
    hpml_nccl_link_allreduce(n, x, count, mean);
    hpml_nccl_link_end(n);
    return hpml_nccl_link_wait(n);
}
#else /* without HPML_USE_NCCL: no hpml_nccl can be created */
HPML_API hpml_nccl *hpml_nccl_create(hpml_ctx *ctx, const hpml_nccl_desc *desc)
{
    if (!ctx) return NULL;
    hpml_ctx_fail(ctx, HPML_ERR_UNSUPPORTED, "nccl: this program was built without NCCL; compile the file that has "
                  "hpml_cuda.cuh's body with -DHPML_USE_NCCL");
    if (desc && desc->meeting) desc->meeting->allgather(desc->meeting->user, NULL, 0); /* so that all ranks fail */
    return NULL;
}

HPML_API void        hpml_nccl_free(hpml_nccl *) {}
HPML_API hpml_status hpml_nccl_allreduce(hpml_nccl *, float *, int64_t, bool) { return HPML_ERR_UNSUPPORTED; }
HPML_API hpml_status hpml_nccl_link_begin(void *) { return HPML_ERR_UNSUPPORTED; }
HPML_API hpml_status hpml_nccl_link_allreduce(void *, float *, int64_t, bool) { return HPML_ERR_UNSUPPORTED; }
HPML_API hpml_status hpml_nccl_link_swap(void *, const void *, const size_t *, bool, void *, const size_t *)
{
    return HPML_ERR_UNSUPPORTED;
}
HPML_API hpml_status hpml_nccl_link_end(void *) { return HPML_ERR_UNSUPPORTED; }
HPML_API hpml_status hpml_nccl_link_wait(void *) { return HPML_ERR_UNSUPPORTED; }
HPML_API hpml_status hpml_nccl_link_check(void *) { return HPML_ERR_UNSUPPORTED; }
HPML_API hpml_status hpml_nccl_link_scale(void *, float *, int64_t, float, float) { return HPML_ERR_UNSUPPORTED; }
HPML_API void        hpml_nccl_link_free(void *) {}
HPML_API float      *hpml_nccl_link_stage(void *, int64_t) { return NULL; }
HPML_API hpml_status hpml_nccl_link_reduce_scatter(void *, float *, const int64_t *, float *)
{
    return HPML_ERR_UNSUPPORTED;
}
HPML_API hpml_status hpml_nccl_link_allgather(void *, float *, const int64_t *, const float *)
{
    return HPML_ERR_UNSUPPORTED;
}
HPML_API hpml_status hpml_nccl_link_landed(void *, float *) { return HPML_ERR_UNSUPPORTED; }
#endif /* HPML_USE_NCCL */

// =====================================================================================================================
// PART VIII  BACKEND
// =====================================================================================================================

// ---------------------------------------------------------------------------------------------------------------------
// >>gpu-text   what has run where, as a line of text
// ---------------------------------------------------------------------------------------------------------------------

typedef struct hpmlg_line { /* a text that grows in a buffer of `size` bytes; used: its length, even over size */
    char  *text;
    size_t size, used;
} hpmlg_line;

HPMLG_FN void hpmlg_line_add(hpmlg_line *l, const char *format, ...)
{
    va_list arguments;
    size_t  rest = l->used < l->size ? l->size - l->used : 0;
    va_start(arguments, format);
    int n = vsnprintf(rest ? l->text + l->used : NULL, rest, format, arguments);
    va_end(arguments);
    if (n > 0) l->used += (size_t)n;
}

HPMLG_FN void hpmlg_line_list(hpmlg_line *l, const char *title, const int *list, int count)
{
    if (count > 0) hpmlg_line_add(l, "%s", title);
    for (int i = 0; i < count; i++) hpmlg_line_add(l, " %d", list[i]);
}

HPMLG_FN void hpmlg_line_epilogues(hpmlg_line *l, const char *title, const long long n[HPMLG_EPILOGUES])
{
    static const char *const names[] = { "bias", "relu", "gelu", "gelu'", "bias sums" };
    const char              *before = title;
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

#ifdef HPML_CUDA_NO_CUBLAS
HPMLG_FN void hpmlg_line_blas(hpmlg_line *, const hpmlg_device *) {}
#else
HPMLG_FN void hpmlg_line_blas(hpmlg_line *l, const hpmlg_device *d)
{
    const hpmlg_blas *blas = (const hpmlg_blas *)d->blas;
    int               list[16] = { 0 }, count = 0, chosen = 0, taken = 0, other = 0, apart = 0;
    for (int i = 0; blas && i < HPMLG_BLAS_PLANS; i++) {
        const hpmlg_blas_plan *p = &blas->plans[i];
        if (p->usable) hpmlg_list_add(list, &count, (int)p->id);
        chosen += p->choice > 0;
        taken  += p->taken;
        other  += p->choice > 1;
        apart  += p->apart != 0;
    }
    hpmlg_line_list(l, "; algorithms", list, count);
    if (blas && d->d.tune)
        hpmlg_line_add(l, "; tuned %d, %d taken over, %d not the first, %d apart%s", chosen, taken, other, apart,
                       blas->ignored ? ", unfit choices ignored" : "");
}
#endif

HPML_API int hpml_cuda_text(const hpml_ctx *ctx, char *buffer, size_t size)
{
    static const char *const passes[] = { "; forward", "; dx", "; dw" };
    hpmlg_line               l = { buffer, size, 0 };
    int                      list[16];
    if (size > 0) buffer[0] = 0;
    if (!hpml_cuda_stream(ctx)) return 0;
    const hpmlg_device      *d = (const hpmlg_device *)hpml_ctx_device(ctx);
    const hpmlg_work_counts *r = &d->work;
    hpmlg_line_add(&l, "products: %lld by cuBLASLt", r->products[0]);
    hpmlg_line_epilogues(&l, " with ", r->epilogues[0]);
    hpmlg_line_blas(&l, d);
    hpmlg_line_epilogues(&l, "; refused ", r->epilogues[1]);
    hpmlg_line_own(&l, r->products, r->products_refused);
    hpmlg_line_add(&l, " | convolutions: %lld by cuDNN", r->convolutions[0]);
    if (r->fused) hpmlg_line_add(&l, " with bias and act %lld", r->fused);
    for (int pass = 0; pass < 3; pass++)
        hpmlg_line_list(&l, passes[pass], list, hpmlg_dnn_algorithms(d, pass, list));
    hpmlg_line_own(&l, r->convolutions, r->convolutions_refused);
    if (r->reordered) hpmlg_line_add(&l, ", %lld copies to NHWC or back", r->reordered);
    hpmlg_line_add(&l, " | workspace %.1f MiB, %.1f asked for", (double)d->workspace_bytes / (1 << 20),
                   (double)d->workspace_wanted / (1 << 20));
    hpmlg_line_add(&l, " | passes: %lld op by op, %lld recorded, %lld replayed, %lld given up | %lld waits",
                   d->pass_counts[HPMLG_OP_BY_OP], d->pass_counts[HPMLG_RECORDED], d->pass_counts[HPMLG_REPLAYED],
                   d->pass_counts[HPMLG_GIVEN_UP], d->waits);
    return (int)l.used;
}

// ---------------------------------------------------------------------------------------------------------------------
// >>gpu-backend   opening and closing; the table of functions
// ---------------------------------------------------------------------------------------------------------------------

/* Implements the backend's `plan`: sets the sizes of a node's saved and scratch memory where the CPU's differ. */
HPMLG_FN void hpmlg_plan(void *device, hpml_node *n)
{
    hpmlg_device     *d      = (hpmlg_device *)device;
    int64_t           cols   = hpmlg_last_dim(n->out);
    size_t            copies = hpmlg_order_plan(d, n);
    hpml_node        *before = d->planned;
    hpmlg_lstm        lstm   = {};
    hpmlg_gru         gru    = {};
    hpmlg_token_lists buckets = {};
    d->planned = n;
    switch (n->op) {
    case HPML_OP_LAYERNORM: case HPML_OP_RMSNORM:
        hpmlg_norm_plan(n, before);
        n->scratch_bytes = (size_t)hpmlg_norm_parts(d, hpml_tensor_count(n->out) / cols, cols) * (size_t)(2 * cols) *
                           sizeof(float);
        break;
    case HPML_OP_BATCHNORM: n->scratch_bytes = hpmlg_bn_scratch(d, n); break;
    case HPML_OP_ATTENTION: n->scratch_bytes = n->saved_bytes; break;
    case HPML_OP_MAP: n->scratch_bytes = (size_t)hpml_tensor_count(n->out) * sizeof(float); break;
    case HPML_OP_EMBEDDING: n->scratch_bytes = hpmlg_embedding_layout(n, &buckets); break;
    case HPML_OP_LINEAR:
        if (n->saved_bytes) n->saved_bytes = (size_t)hpml_tensor_count(n->out) * hpml_dtype_size(n->out->dtype);
        n->scratch_bytes = hpmlg_narrowed_bytes(d, n->src[0]);
        break;
    case HPML_OP_CONV2D: /* scratch: halves of the input, and of the weights' gradient */
        n->scratch_bytes = d->nhwc ? 0 : hpmlg_narrowed_bytes(d, n->src[0]);
        if (d->act_dtype != HPML_DTYPE_F32) n->scratch_bytes += (size_t)hpml_tensor_count(n->src[1]) * 2;
        break;
    case HPML_OP_CONV_TRANSPOSE2D:
        n->scratch_bytes = d->nhwc ? 0 : hpmlg_narrowed_bytes(d, n->src[0]);
        n->scratch_bytes += (size_t)hpml_tensor_count(n->src[1]) * 2;
        break;
    case HPML_OP_LSTM: n->scratch_bytes = hpmlg_lstm_layout(d, n, &lstm); break;
    case HPML_OP_GRU: n->scratch_bytes = hpmlg_gru_layout(d, n, &gru); break;
    case HPML_OP_CUSTOM:
        if (!n->attr.custom->kernel.forward) n->saved_bytes = n->scratch_bytes = 0; /* the op uses host memory */
        break;
    default: break;
    }
    n->scratch_bytes += copies;
}

/* Makes the device current and reads its properties; an error says why the device cannot be used. */
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
    if (d->workspace_limit == 0) d->workspace_limit = p.totalGlobalMem / 16;
    if (d->d.precision != HPML_CUDA_F32 && p.major < 8)
        return hpml_ctx_fail(d->ctx, HPML_ERR_UNSUPPORTED, "cuda: precision %d needs compute capability 8.0, %s has "
                             "%d.%d; take HPML_CUDA_F32", (int)d->d.precision, p.name, p.major, p.minor);
    return HPML_OK;
}

/* Allocates streams, events and the backend's own memory, pinned and on the device. The device memory is zeroed by the
   computing stream, so it is zero for that stream's work, and for the host only after a wait for that stream. */
HPMLG_FN hpml_status hpmlg_open_memory(hpmlg_device *d)
{
    const char    *what = "memory for the device's own use";
    size_t         ring = HPMLG_SLOTS * HPMLG_SLOT_BYTES;
    cudaError_t    e = cudaStreamCreateWithFlags(&d->stream, cudaStreamNonBlocking);
    HPMLG_TRY(e, cudaStreamCreateWithFlags(&d->copies, cudaStreamNonBlocking));
    HPMLG_TRY(e, cudaHostAlloc((void **)&d->pinned, ring + HPMLG_RESULT + sizeof *d->note, cudaHostAllocMapped));
    for (int i = 0; i < HPMLG_SLOTS; i++) {
        HPMLG_TRY(e, cudaEventCreateWithFlags(&d->slots[i].arrived, cudaEventDisableTiming));
        HPMLG_TRY(e, cudaEventCreateWithFlags(&d->slots[i].reusable, cudaEventDisableTiming));
    }
    if (hpmlg_check(d, e, what) != HPML_OK) return hpml_ctx_status(d->ctx);
    d->result = d->pinned + ring;
    d->note   = (hpmlg_note *)(void *)(d->pinned + ring + HPMLG_RESULT);
    memset(d->note, 0, sizeof *d->note);
    d->scratch    = hpmlg_alloc_own(d, HPMLG_SCRATCH, what);
    d->workspace  = hpmlg_alloc_own(d, d->d.workspace, what);
    d->first_nonfinite      = (unsigned long long *)hpmlg_alloc_own(d, sizeof *d->first_nonfinite, what);
    d->random_key        = (hpmlg_random_key *)hpmlg_alloc_own(d, sizeof *d->random_key, what);
    d->counts     = (unsigned long long *)hpmlg_alloc_own(d, 2 * sizeof *d->counts, what);
    d->note_taken = (int *)hpmlg_alloc_own(d, sizeof *d->note_taken, what);
    for (int i = 0; i < HPMLG_SLOTS; i++) {
        d->slots[i].host   = d->pinned + i * HPMLG_SLOT_BYTES;
        d->slots[i].device = (unsigned char *)hpmlg_alloc_own(d, HPMLG_SLOT_BYTES, what);
    }
    return hpml_ctx_status(d->ctx);
}

HPMLG_FN void hpmlg_close(void *device)
{
    hpmlg_device *d = hpmlg_make_current(device);
    if (d->stream) cudaStreamSynchronize(d->stream);
    hpmlg_blas_close(d);
    hpmlg_dnn_close(d);
    for (hpmlg_pass &p : d->passes) hpmlg_destroy(&p);
    for (hpmlg_allocation *b = d->allocations; b; b = b->next) cudaFree(b->p);
    for (hpmlg_slot &s : d->slots) {
        if (s.arrived) cudaEventDestroy(s.arrived);
        if (s.reusable) cudaEventDestroy(s.reusable);
    }
    for (hpmlg_span *l = d->spans; l < d->spans + HPMLG_SPANS && l->from; l++) {
        cudaEventDestroy(l->from);
        cudaEventDestroy(l->to);
    }
    if (d->span_clock) cudaEventDestroy(d->span_clock);
    if (d->pinned) cudaFreeHost(d->pinned);
    if (d->copies) cudaStreamDestroy(d->copies);
    if (d->stream) cudaStreamDestroy(d->stream);
}

/* Writes 0 to *taken (on the device); launched when the device is opened, so that a device that cannot run kernels is
   reported at once. */
static __global__ void hpmlg_k_first(int *taken) { *taken = 0; }

HPMLG_FN hpml_status hpmlg_open(hpml_ctx *ctx, const void *desc, void **device)
{
    hpmlg_device *d = (hpmlg_device *)hpml_ctx_alloc(ctx, sizeof *d, NULL);
    if (!d) return HPML_ERR_MEMORY;
    if (desc) d->d = *(const hpml_cuda_desc *)desc;
    d->ctx = ctx;
    if (d->d._begin || d->d._end || (int)d->d.precision < 0 || (int)d->d.precision > HPML_CUDA_F16)
        return hpml_ctx_fail(ctx, HPML_ERR_ARGUMENT, "cuda desc: precision %d, or a canary is not zero; zero the "
                             "struct before you set fields", (int)d->d.precision);
    d->workspace_limit = d->d.workspace;
    if (d->d.workspace == 0) d->d.workspace = (size_t)64 << 20;
    d->workspace_bytes = d->d.workspace;
    d->act_dtype = HPML_DTYPE_F32;
    if (d->d.precision == HPML_CUDA_BF16) d->act_dtype = HPML_DTYPE_BF16;
    if (d->d.precision == HPML_CUDA_F16) d->act_dtype = HPML_DTYPE_F16;
    d->nhwc = HPMLG_HAS_CUDNN && d->act_dtype != HPML_DTYPE_F32 && !d->d.own_kernels;
    cudaGetLastError();
    if (hpmlg_open_device(d) == HPML_OK && hpmlg_open_memory(d) == HPML_OK) {
        HPMLG_RUN(d, hpmlg_k_first, 1, 1, 0, d->note_taken);
        hpmlg_check(d, cudaStreamSynchronize(d->stream), "the first kernel");
        hpmlg_product_open(d);
        if (!d->d.own_kernels) hpmlg_blas_open(d);
    }
    if (hpmlg_ok(d)) *device = d;
    else hpmlg_close(d);
    return hpml_ctx_status(ctx);
}

/* Runs an op of the user: by its functions for the device or, if it has none, by its functions for the host, on host
   copies of the arrays. `backward` on the device adds to the gradients of the sources; hence those gradients that no
   other op has set before are first filled with zeros. */
HPMLG_FN void hpmlg_op_custom(HPMLG_OP_ARGUMENTS)
{
    const hpml_op_impl *own    = &n->attr.custom->kernel;
    hpml_status         status = HPML_OK;
    for (int i = 0; i < n->src_count && back && own->backward; i++) {
        const hpml_tensor *s = n->src[i];
        if (s->raw_grad && !n->accumulate[i])
            hpmlg_zero(d, s->raw_grad, (size_t)hpml_tensor_count(s) * hpml_dtype_size(s->dtype));
    }
    if (!own->forward) hpml_custom_on_host(run, n, back);
    else status = back ? own->backward(run, n) : own->forward(run, n);
    if (status != HPML_OK && hpmlg_ok(d))
        hpml_ctx_fail(run->ctx, status, "%s \"%s\": its kernel returned: %s", n->attr.custom->name, n->out->name,
                      hpml_status_string(status));
}

/* Runs a pass of the op with function `op`, forward or, if `back`, backward; returns the context's status. */
template <void (*op)(hpmlg_device *, const hpml_run *, hpml_node *, bool), bool back>
static hpml_status hpmlg_run_op(const hpml_run *run, hpml_node *n)
{
    hpmlg_run_reordered(hpmlg_device_of(run->ctx), run, n, back, op);
    return hpml_ctx_status(run->ctx);
}

HPML_API const hpml_backend *hpml_backend_cuda(void)
{
    static const hpml_op_impl ops[HPML_OP_COUNT] = {
#define HPMLG_X(op, name) { hpmlg_run_op<hpmlg_op_##name, false>, hpmlg_run_op<hpmlg_op_##name, true> },
        HPML_OPS(HPMLG_X)
#undef HPMLG_X
    };
    static const hpml_backend cuda = {
        "cuda", hpmlg_open, hpmlg_close, hpmlg_alloc, hpmlg_free, hpmlg_write, hpmlg_read, hpmlg_zero, hpmlg_sync, ops,
        hpmlg_update, hpmlg_sumsq, hpmlg_act_dtype, hpmlg_plan, hpmlg_begin, hpmlg_end, hpmlg_count_hits, hpmlg_encode,
        hpmlg_decode, hpmlg_time_op, hpmlg_choices, hpmlg_choose, false, false };
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
