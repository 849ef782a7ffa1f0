// hpml.h - v0.1.0 - high-performance machine learning in one C header - MIT licence (end of file)
//
// Do this in exactly one C or C++ file, before you include it:
//     #define HPML_IMPLEMENTATION
//     #include "hpml.h"
// Elsewhere include it without the define. Build: cc -O2 my.c -lm -lpthread
//
// QUICK EXAMPLE: the exclusive or, learned from its four cases
//
//     #define HPML_IMPLEMENTATION
//     #include "hpml.h"
//
//     int main(void)
//     {
//         const float   x[8] = { 0, 0, 0, 1, 1, 0, 1, 1 };
//         const int32_t y[4] = { 0, 1, 1, 0 };
//         hpml_ctx     *ctx  = hpml_ctx_create(NULL);
//         hpml_tensor  *in   = hpml_input_2d(ctx, 4, 2);
//         hpml_tensor  *out  = hpml_linear(hpml_tanh(hpml_linear(in, 8, NULL)), 2, NULL);
//         hpml_trainer_desc d = { .input = in, .output = out, .lr = 0.5f };
//         hpml_trainer *t    = hpml_trainer_create(ctx, &d);
//         hpml_step_info info = { 0 };
//         for (int step = 0; step < 500; step++) hpml_trainer_step(t, x, y, 4, &info);
//         printf("loss %.4f, accuracy %.2f %s\n", info.loss, info.accuracy, hpml_ctx_error(ctx));
//         hpml_ctx_free(ctx);
//         return 0;
//     }
//
// hpml.h DOES NOT
//     - print, exit, abort, or touch globals: everything hangs on a context, errors stay in it, output is yours
//     - allocate during training steps, or anywhere but through your allocator (stdio, zlib, pthreads: their own)
//     - compute in anything but f32 (bf16, f16, i32, u8 are storage types)
//     - know of MPI, NCCL or CUDA: workers plug into the hooks (>>api-trainer), GPUs into a table (>>api-backend)
//     - differentiate twice, or change the graph between steps
//
// BUILD
//     cc -O2 program.c -lm -lpthread          C99 or later; also C++17 and the host side of nvcc; not -ffast-math
//
// OPTIONS, defined before the include that has HPML_IMPLEMENTATION
//     HPML_API              linkage of public functions (dllexport, ...)
//     HPML_STATIC           everything static: one-file programs
//     HPML_NO_THREADS       no pthreads; one thread
//     HPML_NO_SIMD          portable kernels only
//     HPML_NATIVE           portable kernels and one other set: AVX-512 if -march=native allows it, else AVX2; compiles
//                           in about 3/4 of the time
//     HPML_USE_ZLIB         read gzipped IDX files (-lz)
//     HPML_USE_CBLAS        large matrix products by a BLAS (cblas.h; -lopenblas)
//     HPML_DEBUG            check internal assumptions
//     HPML_SELF             this file's name, if you renamed it: it includes itself once for each instruction set
//
// THREADS: a context and all that hangs on it belongs to one thread at a time. Contexts are independent of each other.
// After fork, both processes may go on with a context that was not in use; in the child it computes on one thread.
// SAME BITS: same seed, same build, same kind of CPU give the same bits, at any number of threads.
//
// GLOSSARY: one noun for each concept
//     context        owns memory, threads, errors, the device and all objects created from it
//     status         the first error stays in the context; later calls do nothing
//     tensor         an array with a type, a shape and, if needed, a gradient; view: a tensor in another one's memory
//     parameter      a tensor that is trained; buffer: one that is only saved; frozen: one that is not updated
//     op             a kind of computation (linear, relu ...); node: one recorded op, with sources and a result
//     graph          the planned nodes that lead to outputs and a loss; leaf: an input or constant of a graph
//     slot           memory of a plan for one array; root: the tensor in whose memory a result stands
//     pass           one run of all nodes, forward or backward; piece: part of a pass that a device replays as a whole
//     saved, scratch memory of a node from forward to backward; memory during one call
//     sample         one example; batch: the samples of a run; micro-batch: one of the batches whose gradients are
//                    added up for an update; global batch: the samples of all ranks
//     step           one update of the parameters; epoch: one pass over a data set
//     row            the elements along the last dimension; column: the elements of one index of the last dimension;
//                    batch_rows: indices of dimension 0 that belong to one sample
//     task           a unit of work of the thread pool; chunk: a fixed number of elements, mostly HPMLI_GRAIN
//     kernel         a function compiled once for each instruction set (scalar, AVX2, AVX-512, NEON)
//     half           bf16 or f16; halves are stored types, all arithmetic is f32
//     layout         the order of an image's dimensions: NCHW or NHWC
//     backend        a table of functions that holds tensors and runs ops on a device
//     hook           a callback around a training step, by which strategies of data parallelism work
//     rank           one of the workers that train together; shard: a rank's part of data or state
//     axis           a direction in which ranks divide a model or its data; group: the ranks along an axis
//     whole, part    a tensor as one rank alone has it; the block of it that a rank of a group has
//     codec          packs a gradient into fewer bytes; residual: the error of packing, added to the next gradient
//     dataset        samples in memory or in a file; loader: makes shuffled, sharded batches of it ahead of their use
//     checkpoint     a file from which a training continues with the same bits
//     stream         one of the sequences of random numbers of a seed; counter: a position in a stream
//     desc           a struct of options whose zero fields mean documented defaults
//     hpml_, hpmli_  prefixes of public and of private names of this header
//
// INDEX (grep -E '^// (>>|PART)' hpml.h)
// PART I    INTERFACE: what a program calls
//     api-status   status codes
//     api-context   allocator, logger, context
//     api-group   groups of ranks that hold parts of one model
//     api-tensor   tensors
//     api-ops   recording a model: inputs, parameters, ops
//     api-graph   planning and running a recorded graph
//     api-optimizer   optimizers: a table of rows, your own rows too
//     api-backend   the seam to devices: a table of functions
//     api-custom   ops of your own
//     api-trainer   schedules, the trainer and its hooks
//     api-data   datasets, readers, the loader
//     api-save   safetensors and checkpoints
//     api-see   timeline, profile, summary
//     api-random   counter-based random numbers
//     api-codec   gradients packed for the wire: plain, bf16, 1-bit with error feedback
// PART II   CONTEXTS: memory, threads, random numbers
//     platform   compilers, system headers, macros
//     kernels   the table of kernels: what each computes, and the structs that they take
//     context   the context: errors, memory
//     threads   the clock and the thread pool
//     create   creating and freeing contexts
//     rng   single random numbers, permutations
// PART III  TENSORS AND GRAPH: what is recorded, where its arrays lie, how it runs
//     tensor   tensors and views, copies and conversions
//     host   whole tensors to and from host memory
//     op-table   the table of ops: a row for each, and the loops of which most passes consist
//     split   parts of tensors: where they lie in the whole, and which ops keep a split
//     record   recording: nodes and inputs
//     params   parameters: names, first values
//     rows   gradients of embeddings as rows
//     place   a place in memory for each array of a plan: first fit
//     list   the list of entries that a pass runs, and which values of it are computed again
//     plan   from a recorded graph to a memory plan: how long each array is needed, and where
//     graph   creating graphs and their parts
//     retain   segments that run again or are swapped, and their choice for a budget of memory
//     slots   taking memory, choosing a slot
//     node-hooks   hooks called for the parameters of an op; the ops that run next
//     run   running a graph forward and backward
//     check-grad   gradients compared with central differences
// PART IV   OPS: forward and backward of each, and the products under them
//     gemm-threads   cutting a matrix product into tasks for threads
//     blas   plain arrays: matrix products, also of halves; matrix times vector; vectors
//     elementwise   add, sub, mul, div with broadcasting; scale; activations
//     matmul   matrix products and linear layers
//     shape   reshape, permute, slice, concat, sum
//     conv   two-dimensional convolution: recording, sizes
//     conv-run   convolution: its forward and backward pass
//     pool   max, average and global pooling
//     norm   batch normalization; softmax, layernorm, rmsnorm: row by row
//     dropout   dropout and embedding
//     sequence   multi-head attention; long short-term memory
//     loss   cross-entropy, binary cross-entropy, squared and huber loss
//     half   results stored in bf16 or f16: the wrapper that gives ops f32 copies
//     custom   ops of the user, on the host or on host copies of a device's arrays
//     groups   ops that communicate in a group: copy, sum, split, gather
//     backend   the CPU backend: memory, sums of squares, the table of ops
// PART V    TRAINING: optimizers, steps, gradients packed for the wire
//     optimizers   the table of optimizers, the driver of their steps, schedules
//     codec   gradients packed for the wire
//     trainer   the trainer: settings, creation, a batch in its inputs
//     keep   the memory of a trainer: what this rank keeps, taken when it is needed
//     hooks   hooks of a trainer, and its arrays of values, gradients and states
//     nonfinite   a step's scalars; the names of layers whose numbers are not finite
//     norms   norms of whole parameters of which several ranks have parts
//     step   one step: its norm, its loss scale
//     half-steps   the passes of a step: whole, or in halves for a hook
//     update   the steps of parameters, micro-batches, a whole step
//     fit   passes over data, evaluation, prediction
// PART VI   DATA AND FILES: datasets, batches, safetensors, checkpoints, the timeline
//     files   reading files, writing files that appear whole
//     json   UTF-8, decimal numbers, JSON
//     dataset   datasets; images as data: IDX, CIFAR
//     csv   numbers and text as data: CSV, characters
//     npy   numpy arrays and packed records
//     loader   batches: shuffled, sharded, augmented, made ahead
//     safetensors   safetensors files
//     collect   arrays of whole parameters from the parts that ranks have, and back
//     checkpoint   parameters and whole trainings in safetensors files
//     trace   the timeline; where the time goes, and what a model is
// PART VII  KERNELS: one text, compiled once for each instruction set
//     passes   the header includes itself, once for each instruction set
//     isa   instruction sets: for each one block of constants
//     simd   vectors: one kernel text for all instruction sets; the scalar set
//     simd-x86   vectors: AVX2, AVX-512
//     simd-neon   vectors: NEON; operations made of others, for all instruction sets
//     vmath   exp, log, tanh, erf and the activations
//     vreduce   sums, maxima, norms
//     vupdate   optimizer steps, one pass over the data
//     vconvert   storage types, checksums
//     gemm   matrix product: tiles
//     gemm-pack   matrix product: packing, transposing, storing
//     gemm-part   matrix product: one rectangle of C
//     gemm-thin   matrix product: small and thin shapes
//     random   Philox: random numbers by number
//     onebit   gradient codecs: 1 bit and bf16, one row
//     conv-kernels   convolution: tiles of pixels by channels
//     table   the kernels of this pass
//     choose   which of the kernels run: the best instruction set of the CPU
#ifndef HPML_H_INCLUDED
#define HPML_H_INCLUDED
#include <stddef.h>
#include <stdint.h>
#include <stdbool.h>

#define HPML_VERSION 100 /* 10000 * major + 100 * minor + patch */

/* Linkage of every public function. Define HPML_API yourself (dllexport, ...), or HPML_STATIC for static functions. */
#ifndef HPML_API
#ifdef HPML_STATIC
#if defined(__GNUC__)
#define HPML_API static __attribute__((unused))
#else
#define HPML_API static
#endif
#else
#define HPML_API extern
#endif
#endif

#ifdef __cplusplus
extern "C" {
#endif

// =====================================================================================================================
// PART I    INTERFACE: what a program calls
// =====================================================================================================================

// ---------------------------------------------------------------------------------------------------------------------
// >>api-status   status codes
// ---------------------------------------------------------------------------------------------------------------------
/* Status codes and texts: -1.. general, -100.. shapes, -200.. memory, -300.. files, -400.. communication, -500 CUDA */
#define HPML_STATUS_LIST(X)                                                                                            \
    X(HPML_OK, 0, "ok")                                                                                                \
    X(HPML_ERR_ARGUMENT, -1, "invalid argument")                                                                       \
    X(HPML_ERR_STATE, -2, "call out of order")                                                                         \
    X(HPML_ERR_UNSUPPORTED, -3, "not supported")                                                                       \
    X(HPML_ERR_NONFINITE, -4, "a value is NaN or infinite")                                                            \
    X(HPML_ERR_LABEL, -5, "a label is out of range")                                                                   \
    X(HPML_ERR_STOPPED, -6, "stopped by a callback")                                                                   \
    X(HPML_ERR_SHAPE, -100, "shapes do not fit")                                                                       \
    X(HPML_ERR_DTYPE, -101, "element types do not fit")                                                                \
    X(HPML_ERR_OVERFLOW, -102, "a size does not fit in memory")                                                        \
    X(HPML_ERR_MEMORY, -200, "out of memory")                                                                          \
    X(HPML_ERR_OPEN, -300, "cannot open the file")                                                                     \
    X(HPML_ERR_READ, -301, "cannot read the file")                                                                     \
    X(HPML_ERR_WRITE, -302, "cannot write the file")                                                                   \
    X(HPML_ERR_FORMAT, -303, "the file is not what it should be")                                                      \
    X(HPML_ERR_PEER, -400, "another rank failed")                                                                      \
    X(HPML_ERR_TIMEOUT, -401, "a deadline passed")                                                                     \
    X(HPML_ERR_COMM, -402, "communication failed")                                                                     \
    X(HPML_ERR_CUDA, -500, "CUDA failed")

typedef enum hpml_status {
#define HPMLI_STATUS_VALUE(name, code, text) name = code,
    HPML_STATUS_LIST(HPMLI_STATUS_VALUE)
} hpml_status;
HPML_API const char *hpml_status_string(hpml_status status); /* a static text such as "out of memory"; never NULL */
HPML_API int         hpml_version(void);                     /* HPML_VERSION of the compiled implementation */

// ---------------------------------------------------------------------------------------------------------------------
// >>api-context   allocator, logger, context
// ---------------------------------------------------------------------------------------------------------------------
/* In a desc a zero field means its default; HPML_ZERO in a field means 0 itself, where that is not the default. */
#define HPML_ZERO (1e-38f)
#define HPML_MAX_DIMS    5  /* most dimensions of a tensor */
#define HPML_MAX_SRC     16 /* most source tensors of one op */
#define HPML_MAX_OUTPUTS 32 /* most outputs of one graph */

typedef struct hpml_ctx     hpml_ctx;     /* owns memory, threads, errors, the device and all objects; opaque */
typedef struct hpml_tensor  hpml_tensor;  /* an array with a shape; transparent, see >>api-tensor */
typedef struct hpml_node    hpml_node;    /* one recorded op; transparent for backends, see >>api-backend */
typedef struct hpml_graph   hpml_graph;   /* a planned graph; opaque */
typedef struct hpml_trainer hpml_trainer; /* a graph with a loss, an optimizer and hooks; opaque */
typedef struct hpml_backend hpml_backend; /* a table of functions, see >>api-backend */
typedef struct hpml_packing hpml_packing; /* how a gradient is packed, see >>api-codec */

/* Element types. All arithmetic is f32; the others are storage types: I32 for labels and tokens, U8 for pixels, BF16
   and F16 (halves) for files, messages and, in mixed precision (hpml_ctx_desc.activation_dtype), results of ops. */
typedef enum hpml_dtype {
    HPML_DTYPE_F32 = 0, HPML_DTYPE_BF16 = 1, HPML_DTYPE_F16 = 2, HPML_DTYPE_I32 = 3, HPML_DTYPE_U8 = 4
} hpml_dtype;

/* The functions by which a context takes memory; all zero: malloc and free. align: a power of two, at most 64 bytes;
   alloc returns NULL on failure. Only the thread that calls the library calls these functions, no worker thread. */
typedef struct hpml_allocator {
    void *(*alloc)(size_t size, size_t align, void *user);
    void (*free)(void *ptr, size_t size, void *user);
    void *user;
} hpml_allocator;

/* The callback for errors: called once for each, with its text. The library prints nothing itself. */
typedef void hpml_log_fn(hpml_status status, const char *text, void *user);
HPML_API void hpml_log_stderr(hpml_status status, const char *text, void *user);

typedef struct hpml_ctx_desc {
    uint32_t            _begin;    /* canary: first and last field of every desc; nonzero is an error (garbage) */
    int32_t             threads;   /* computing threads, the caller included, 1 to 1024; 0: all cores of this process */
    uint64_t            seed;      /* seed of all random numbers of this context */
    const char         *cpu;       /* kernels: "scalar", "avx2", "avx512", "neon"; NULL: the best of this CPU */
    /* Mixed precision on the CPU: the type in which results of ops and their gradients are stored: F32 (default), BF16
       (8 bits of precision, the range of f32) or F16 (11 bits of precision, at most 65504, see
       hpml_trainer_desc.loss_scale). Ops compute in f32, on f32 copies of some samples at a time; matrix products round
       a copy of their weights to this type. Parameters, their gradients, optimizer state, scalars, values that an op
       saves for its backward pass, and files stay f32. A GPU's precision is set in its own desc. */
    hpml_dtype          activation_dtype;
    const hpml_backend *backend;   /* the device that holds tensors and runs ops; NULL: CPU */
    void               *backend_desc; /* passed to backend->open */
    hpml_allocator      allocator; /* all fields zero: malloc and free */
    hpml_log_fn        *log;       /* NULL: errors are not logged */
    void               *log_user;  /* passed to each call of `log` */
    uint32_t            _end;
} hpml_ctx_desc;

/* Creates a context. `desc` NULL: all defaults. Returns NULL only if there is no memory for the context itself; after
   any other failure (an unknown kernel name, say) the context returned contains the error. See THREADS at the top. */
HPML_API hpml_ctx   *hpml_ctx_create(const hpml_ctx_desc *desc);
HPML_API void        hpml_ctx_free(hpml_ctx *ctx); /* frees ctx and all objects created from it; ctx may be NULL */
HPML_API hpml_status hpml_ctx_status(const hpml_ctx *ctx); /* first error, or HPML_OK; NULL: HPML_ERR_ARGUMENT */
HPML_API const char *hpml_ctx_error(const hpml_ctx *ctx);  /* the first error's text: object, expected, got; or "" */
HPML_API void        hpml_ctx_clear_error(hpml_ctx *ctx); /* forgets the error and the failed op's parameters */
HPML_API int         hpml_ctx_threads(const hpml_ctx *ctx); /* threads that compute, the caller included */
HPML_API const char *hpml_ctx_cpu(const hpml_ctx *ctx);    /* kernels in use: "avx512", ... */
HPML_API uint64_t    hpml_ctx_seed(const hpml_ctx *ctx);
HPML_API size_t      hpml_ctx_allocations(const hpml_ctx *ctx); /* calls of alloc; a training step makes none */
HPML_API size_t      hpml_ctx_bytes(const hpml_ctx *ctx);       /* bytes allocated now */
HPML_API hpml_allocator hpml_ctx_allocator(const hpml_ctx *ctx); /* returns all zero for ctx NULL */

/* A callback during the writing of safetensors, parameters and checkpoints: called after each 64 MB that are on the
   disk, with the bytes written to the file by then. fn NULL: none, and the file is synced once, at its end. */
typedef struct hpml_progress {
    void (*fn)(void *user, uint64_t bytes);
    void  *user;
} hpml_progress;
HPML_API hpml_progress hpml_ctx_progress(hpml_ctx *ctx, hpml_progress progress); /* sets it; returns the previous */

/* Allocates zeroed, 64-byte aligned memory that the context frees at its end, or returns NULL with an error on the
   context. `destroy`, if not NULL, is called before the memory is freed. */
HPML_API void *hpml_ctx_alloc(hpml_ctx *ctx, size_t bytes, void (*destroy)(void *object));
HPML_API void  hpml_ctx_release(hpml_ctx *ctx, void *object); /* frees memory of hpml_ctx_alloc; NULL: nothing */
/* Logs an error of your own code, stores it in the context if that has none, returns `status`. format: as printf's. */
HPML_API hpml_status hpml_ctx_fail(hpml_ctx *ctx, hpml_status status, const char *format, ...)
#if defined(__GNUC__)
    __attribute__((format(printf, 3, 4)))
#endif
    ;

// ---------------------------------------------------------------------------------------------------------------------
// >>api-group   groups of ranks that hold parts of one model
// ---------------------------------------------------------------------------------------------------------------------
/* Ranks divide work along axes: DATA (samples), PIPE (layers), TENSOR (parts of layers), SEQUENCE (time steps), EXPERT.
   All ranks of the TENSOR axis compute the same samples and the same loss; those of DATA, SEQUENCE and EXPERT have a
   loss of their own each, whose mean is trained. */
typedef enum hpml_axis {
    HPML_AXIS_DATA = 0, HPML_AXIS_PIPE, HPML_AXIS_TENSOR, HPML_AXIS_SEQUENCE, HPML_AXIS_EXPERT
} hpml_axis;
#define HPML_AXES 5
HPML_API const char *hpml_axis_name(hpml_axis axis); /* "data", "pipe", "tensor", "sequence", "expert" */

/* The ranks of one axis as ops use them: communication as a table of functions, because this header knows no transport
   (hpml_comm.h makes groups of its communicators). All functions are collective, that is called by all ranks of the
   group in the same order with the same n, and work on arrays in host memory; sums and maxima have the same bits on all
   ranks. Each returns HPML_OK or a status, after which the context of the rank has an error. */
typedef struct hpml_group {
    int32_t rank, size;  /* this rank, 0 to size - 1; ranks of the group */
    void   *user;        /* passed to each function; must live as long as the context */
    hpml_status (*sum)(void *user, float *x, int64_t n);     /* in place: all ranks get the sum */
    hpml_status (*max)(void *user, float *x, int64_t n);     /* in place: all ranks get the largest */
    hpml_status (*gather)(void *user, const float *part, float *all, int64_t n); /* n floats of each rank, by rank */
    hpml_status (*scatter)(void *user, const float *all, float *part, int64_t n); /* block number `rank`, of n floats,
                                                                                   of the sum of `all` (size n) */
    hpml_status (*swap)(void *user, const float *out, float *in, int64_t n); /* n floats for each rank, from each */
    hpml_status (*pass)(void *user, const float *out, float *in, int64_t n, int shift); /* n floats to rank + shift and
                                                                   from rank - shift, counted modulo size */
    hpml_status (*bcast)(void *user, float *x, int64_t n, int root); /* n floats of rank `root` */
} hpml_group;
/* Sets the group of an axis (copied; NULL: none), before the first op or parameter is recorded. Without groups every
   `split` below means nothing: the same program then runs alone, and computes the same bits as without `split`. */
HPML_API hpml_status       hpml_ctx_set_group(hpml_ctx *ctx, hpml_axis axis, const hpml_group *group);
HPML_API const hpml_group *hpml_ctx_group(const hpml_ctx *ctx, hpml_axis axis); /* none set: a group of size 1 */

/* How the ranks of the TENSOR axis divide a layer y = w x + bias (Shoeybi et al. 2019). Sizes and heads that a program
   gives are those of the whole; shapes of tensors (hpml_tensor.shape) are those of this rank's part. OUT, then ops that
   work on each element or head, then IN, make one sum in the forward and one in the backward pass. */
typedef enum hpml_split {
    HPML_SPLIT_NONE = 0, /* every rank has the whole layer */
    HPML_SPLIT_OUT  = 1, /* each rank has some outputs, that is rows of w: x is whole, y is split along its features */
    HPML_SPLIT_IN   = 2  /* each rank has some inputs, that is columns of w: x is split, y is the sum over the ranks */
} hpml_split;

/* The ops of which split layers consist, each with its backward pass; each op sets `split` of its result and refuses an
   x whose split does not fit. With a group of one rank, or x NULL, they record nothing and return x. dim: the dimension
   that is divided.
   copy    y = x on all ranks of TENSOR, each of which then computes another part with y: backward adds up the ranks'
           gradients. Recorded once for each result x. On other axes y = x, because their ranks' losses are added anyway
   sum     y = the sum of the ranks' x; backward: the gradient itself (TENSOR), else the sum of the ranks' gradients
   split   y = this rank's block of x; backward: the ranks' gradients joined (TENSOR), else zeros but in the block
   gather  y = the ranks' x joined; backward: this rank's block (TENSOR), else of the sum of the ranks' gradients */
HPML_API hpml_tensor *hpml_group_copy(hpml_tensor *x, hpml_axis axis);
HPML_API hpml_tensor *hpml_group_sum(hpml_tensor *x, hpml_axis axis);
HPML_API hpml_tensor *hpml_group_split(hpml_tensor *x, hpml_axis axis, int dim);
HPML_API hpml_tensor *hpml_group_gather(hpml_tensor *x, hpml_axis axis, int dim);

// ---------------------------------------------------------------------------------------------------------------------
// >>api-tensor   tensors
// ---------------------------------------------------------------------------------------------------------------------
/* First values of a parameter of shape (out, in, ...). fan_in: the product of all dimensions but the first; fan_out:
   shape[0] times the product of the dimensions after the second. U: uniform, N: normal distribution. */
typedef enum hpml_init {
    HPML_INIT_DEFAULT         = 0, /* weights KAIMING_UNIFORM, biases ZEROS, norm scales ONES, embeddings NORMAL 1 */
    HPML_INIT_KAIMING_UNIFORM = 1, /* U(-b, b), b = sqrt(6 / fan_in), He et al. 2015 */
    HPML_INIT_KAIMING_NORMAL  = 2, /* N(0, 2 / fan_in) */
    HPML_INIT_XAVIER_UNIFORM  = 3, /* U(-b, b), b = sqrt(6 / (fan_in + fan_out)), Glorot & Bengio 2010 */
    HPML_INIT_XAVIER_NORMAL   = 4, /* N(0, 2 / (fan_in + fan_out)) */
    HPML_INIT_NORMAL          = 5, /* N(0, init_scale^2); scale 0: 0.02 */
    HPML_INIT_UNIFORM         = 6, /* U(-init_scale, init_scale); scale 0: 0.1 */
    HPML_INIT_ZEROS           = 7,
    HPML_INIT_ONES            = 8
} hpml_init;

/* The properties of a parameter. You may change `frozen`, `no_decay` and `lr_scale` before or between training steps.
   A parameter may be this rank's part of a whole: dimension split_dim of the whole consists of `sections` equal
   sections (3 for queries, keys and values), each cut into as many blocks as the group of `axis` has ranks; the part
   has the rank's block of each section. Initial values, their scale, names and the contents of files are those of the
   whole. */
typedef struct hpml_param {
    int       index;      /* position in the context's list of parameters: the order of recording */
    hpml_init init;
    float     init_scale;
    bool      buffer;     /* saved in files but not trained: running mean and variance of batchnorm */
    bool      frozen;     /* not updated; if set when a graph is planned, it has no gradient in that graph */
    bool      no_decay;   /* excluded from weight decay; set for biases and the parameters of norms */
    float     lr_scale;   /* multiplies the learning rate; 1 at first */
    hpml_axis axis;       /* over whose group the whole is split; DATA: the parameter is whole */
    int32_t   split_dim, sections; /* the dimension that is split; its sections, 1 or more */
    int32_t   stage;      /* the rank of the PIPE axis that has the parameter; -1: all of them */
    int32_t   shard;      /* what this rank keeps a part of, see hpml_trainer_keep: 0: nothing; 1: the states of the
                             optimizer; 2: the gradient, too; 3: the values, too */
    int64_t   keep_first, keep_count; /* the part: floats of the parameter; keep_count -1: all of them */
} hpml_param;

/* Order of the dimensions of images: NCHW is (B, C, H, W); NHWC is (B, H, W, C), a pixel's channels being adjacent. */
typedef enum hpml_layout { HPML_NCHW = 0, HPML_NHWC = 1 } hpml_layout;

/* A dense row-major array, owned by its context. hpml_tensor_create, hpml_graph_alloc or hpml_trainer_create allocate
   the memory; until then the four pointers are NULL. `raw` and `raw_grad` point to numbers of the type `dtype`. `data`
   and `grad` are the same addresses where dtype is F32, and NULL for all other types, so that no program reads halves
   or integers as floats. With the CPU backend you may read and write all of them; another backend's are addresses of
   the device: use hpml_tensor_get and _set. The first dimension of an input is the batch; see `batch_rows`. */
struct hpml_tensor {
    hpml_ctx   *ctx;
    const char *name;                  /* unique among parameters; never NULL */
    float      *data;                  /* values, an array of `shape`; NULL unless dtype is F32 */
    float      *grad;                  /* d loss / d data, of `shape`; NULL if not needed or dtype is not F32 */
    void       *raw;                   /* values of type dtype, an array of `shape` */
    void       *raw_grad;              /* d loss / d data of type dtype; NULL if not needed */
    hpml_dtype  dtype;
    int         ndim;                  /* 0 (a scalar) to HPML_MAX_DIMS */
    int64_t     shape[HPML_MAX_DIMS];  /* unused dimensions are 1 */
    int64_t     stride[HPML_MAX_DIMS]; /* in elements; tensors of a graph are contiguous, views need not be */
    int64_t     batch_rows; /* rows of dimension 0 for each sample: shape[0] == batch_rows * batch; 0: no batch */
    hpml_param *param;      /* not NULL: the tensor is a parameter with these properties */
    hpml_node  *node;       /* the op that computes the tensor; NULL: an input, a parameter or a constant */
    bool        needs_grad; /* set for parameters, results of them, and by hpml_tensor_require_grad */
    hpml_layout layout;     /* order of the dimensions, where there are 4 (images); see hpml_to_layout */
    int8_t      split[HPML_MAX_DIMS]; /* the hpml_axis over whose ranks a dimension is split; 0: none */
    int32_t     sections;   /* equal sections of the split dimension, each of which is split, see hpml_param; 0: one */
    struct hpmli_tensor_state *state; /* private */
};
HPML_API size_t  hpml_dtype_size(hpml_dtype dtype);        /* bytes of one element; 0 for an unknown type */
HPML_API const char *hpml_dtype_name(hpml_dtype dtype);    /* "f32", "bf16", "f16", "i32", "u8" */
HPML_API int64_t hpml_tensor_count(const hpml_tensor *t);  /* elements, by the batch set last; 0 for NULL */
/* Writes a text such as f32 64x784 "fc1.weight" to buffer (`size` bytes, the text is cut there) and returns buffer. */
HPML_API const char *hpml_tensor_text(const hpml_tensor *t, char *buffer, size_t size);

/* Creates a tensor of zeros with memory of its own (constants, data, masks): `ndim` sizes above 0. _1d to _4d: f32. */
HPML_API hpml_tensor *hpml_tensor_create(hpml_ctx *ctx, hpml_dtype dtype, int ndim, const int64_t *shape);
HPML_API hpml_tensor *hpml_tensor_create_1d(hpml_ctx *ctx, int64_t d0);
HPML_API hpml_tensor *hpml_tensor_create_2d(hpml_ctx *ctx, int64_t d0, int64_t d1);
HPML_API hpml_tensor *hpml_tensor_create_3d(hpml_ctx *ctx, int64_t d0, int64_t d1, int64_t d2);
HPML_API hpml_tensor *hpml_tensor_create_4d(hpml_ctx *ctx, int64_t d0, int64_t d1, int64_t d2, int64_t d3);
HPML_API void         hpml_tensor_free(hpml_tensor *t); /* optional; frees a view or a tensor of hpml_tensor_create */

/* Creates a view, a tensor that shares the memory of `t`, which must have memory. Ops accept contiguous views only;
   >>api-ops has the reshape, slice and transpose that are recorded as part of a model. */
HPML_API hpml_tensor *hpml_view_reshape(hpml_tensor *t, int ndim, const int64_t *shape); /* contiguous t; one -1 */
HPML_API hpml_tensor *hpml_view_slice(hpml_tensor *t, int dim, int64_t start, int64_t count);
HPML_API hpml_tensor *hpml_view_transpose(hpml_tensor *t, int dim_a, int dim_b);

/* Copies src to dst in CPU memory, of the same shape with any strides, and converts the type: floats are rounded to
   nearest, ties to even; I32 and U8 saturate, and NaN becomes 0 in them. */
HPML_API hpml_status hpml_tensor_copy(hpml_tensor *dst, const hpml_tensor *src);
/* Copies all `count` floats in host memory to or from a contiguous tensor; converts types as hpml_tensor_copy does. */
HPML_API hpml_status hpml_tensor_set(hpml_tensor *t, const float *values, int64_t count);
HPML_API hpml_status hpml_tensor_get(const hpml_tensor *t, float *values, int64_t count);
/* Copies all values unconverted; bytes: hpml_tensor_count times hpml_dtype_size (labels, tokens, halves). */
HPML_API hpml_status hpml_tensor_set_raw(hpml_tensor *t, const void *values, size_t bytes);
HPML_API hpml_status hpml_tensor_get_raw(const hpml_tensor *t, void *values, size_t bytes);
/* Converts n contiguous elements between any two dtypes in host memory. */
HPML_API hpml_status hpml_convert(hpml_ctx *ctx, hpml_dtype to, void *dst, hpml_dtype from, const void *src, int64_t n);

/* BLAS on row-major arrays in host memory, by all threads of the context. An operand that is multiplied by an alpha or
   beta of 0 is not read, so that its NaNs do not matter.
   sgemm: C = alpha * op(A) * op(B) + beta * C: op(A) is (m, k), op(B) (k, n), C (m, n). trans_a: A is stored as (k, m),
   trans_b: B as (n, k). lda, ldb, ldc: elements from one row to the next as stored. */
HPML_API hpml_status hpml_sgemm(hpml_ctx *ctx, bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k, float alpha,
                                const float *a, int64_t lda, const float *b, int64_t ldb, float beta, float *c,
                                int64_t ldc);
/* As hpml_sgemm, with A and B each in a type of its own, F32, BF16 or F16; products, sums and C are f32. */
HPML_API hpml_status hpml_gemm(hpml_ctx *ctx, bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k, float alpha,
                               hpml_dtype type_a, const void *a, int64_t lda, hpml_dtype type_b, const void *b,
                               int64_t ldb, float beta, float *c, int64_t ldc);
/* y = alpha op(A) x + beta y: A is stored as (m, n), rows lda apart; x has n numbers and y m; with trans_a x m, y n.
   inc_x, inc_y: elements from one number of the vector to the next, 1 or more (for a column: the row length). */
HPML_API hpml_status hpml_sgemv(hpml_ctx *ctx, bool trans_a, int64_t m, int64_t n, float alpha, const float *a,
                                int64_t lda, const float *x, int64_t inc_x, float beta, float *y, int64_t inc_y);
HPML_API hpml_status hpml_saxpy(hpml_ctx *ctx, int64_t n, float alpha, const float *x, int64_t inc_x, float *y,
                                int64_t inc_y); /* y += alpha x, vectors of n numbers */
HPML_API hpml_status hpml_sscal(hpml_ctx *ctx, int64_t n, float alpha, float *x, int64_t inc_x); /* x *= alpha */
/* Returns the first i, from 0, whose |x[i]| is largest; that of the first NaN, if any; -1 for n 0 and on error. */
HPML_API int64_t     hpml_isamax(hpml_ctx *ctx, int64_t n, const float *x, int64_t inc_x);

// ---------------------------------------------------------------------------------------------------------------------
// >>api-ops   recording a model: inputs, parameters, ops
// ---------------------------------------------------------------------------------------------------------------------
/* Records a model. Each call checks the shapes of its sources, adds a node to the context and returns the tensor of the
   result; tensor memory is allocated later. A call that fails returns NULL and leaves the error on the context; a call
   with a NULL source returns NULL and does nothing, so a model is written without a check on each line. `name` (copied)
   names the layer: "fc1" gives the parameters "fc1.weight" and "fc1.bias"; NULL gives "linear3" and so on.
   Shapes: B batch, T time, C channels or features, H x W image; (..) any leading dimensions.
   hpml_input creates an input, to which each step writes a batch. Its dimension 0 is the batch, of the same size in all
   inputs of a graph; a tensor without a batch dimension comes from hpml_tensor_create. Ops pass the batch dimension on,
   so that a short last batch runs on fewer rows. Most ops read F32; tokens and labels are I32. */
HPML_API hpml_tensor *hpml_input(hpml_ctx *ctx, hpml_dtype dtype, int ndim, const int64_t *shape);
HPML_API hpml_tensor *hpml_input_2d(hpml_ctx *ctx, int64_t b, int64_t d1);                         /* f32 (b, d1) */
HPML_API hpml_tensor *hpml_input_3d(hpml_ctx *ctx, int64_t b, int64_t d1, int64_t d2);             /* f32 (b, d1, d2) */
HPML_API hpml_tensor *hpml_input_4d(hpml_ctx *ctx, int64_t b, int64_t c, int64_t h, int64_t w);    /* f32 images */
HPML_API hpml_tensor *hpml_input_tokens(hpml_ctx *ctx, int64_t b, int64_t t);                      /* i32 (b, t) */

typedef struct hpml_param_desc {
    uint32_t    _begin;
    int32_t     ndim;       /* required, 1 to HPML_MAX_DIMS */
    int64_t     shape[HPML_MAX_DIMS];
    const char *name;       /* NULL: "param<index>", such as "param3" */
    hpml_init   init;       /* DEFAULT: KAIMING_UNIFORM */
    float       init_scale; /* scale of the inits NORMAL and UNIFORM */
    bool        buffer, frozen, no_decay; /* see hpml_param */
    hpml_axis   axis;       /* not DATA: this rank has a part, see hpml_param; `shape` is that of the whole */
    int32_t     split_dim, sections; /* sections 0: 1 */
    uint32_t    _end;
} hpml_param_desc;
HPML_API hpml_tensor *hpml_param_create(hpml_ctx *ctx, const hpml_param_desc *desc); /* creates a parameter */
HPML_API int          hpml_param_count(const hpml_ctx *ctx);
HPML_API hpml_tensor *hpml_param_at(const hpml_ctx *ctx, int index);            /* number `index` recorded, or NULL */
HPML_API hpml_tensor *hpml_param_find(const hpml_ctx *ctx, const char *name);   /* NULL: no such parameter; O(1) */
HPML_API int64_t      hpml_param_total(const hpml_ctx *ctx);                    /* elements of all, without buffers */
HPML_API uint64_t     hpml_param_hash(hpml_ctx *ctx);           /* FNV-1a 64 of all values' bytes on this rank */
HPML_API hpml_status  hpml_param_init(hpml_ctx *ctx); /* gives new ones memory and values; hpml_graph_alloc calls it */
/* Places the values of all parameters recorded until now in `memory`: hpml_params_bytes(ctx) bytes of host memory,
   64-byte aligned, that outlive the context, for example shared by contexts of the same model, mapped from a file or
   pinned. keep: the values in `memory` stay; else they are overwritten by initial values. An error if a parameter has
   memory already, or on a device. */
HPML_API hpml_status  hpml_params_place(hpml_ctx *ctx, float *memory, bool keep);
HPML_API size_t       hpml_params_bytes(const hpml_ctx *ctx);
/* Returns the elements of the whole of which t, a parameter or any other tensor, is a part; 0 for NULL. shape: NULL, or
   receives the shape of the whole, HPML_MAX_DIMS numbers. */
HPML_API int64_t      hpml_param_whole(const hpml_tensor *t, int64_t *shape);
/* Copies elements first .. first + count - 1 of a parameter, which begin at `part`, to their places in an array of the
   whole (to_whole), or from there; both arrays in host memory: values, gradients, states of optimizers, residuals. */
HPML_API void         hpml_param_copy(const hpml_tensor *param, float *part, int64_t first, int64_t count,
                                      float *whole, bool to_whole);

/* Elementwise ops with numpy's broadcasting: shapes are matched from the last dimension; a size of 1 is repeated. */
HPML_API hpml_tensor *hpml_add(hpml_tensor *a, hpml_tensor *b); /* a + b */
HPML_API hpml_tensor *hpml_sub(hpml_tensor *a, hpml_tensor *b); /* a - b */
HPML_API hpml_tensor *hpml_mul(hpml_tensor *a, hpml_tensor *b); /* a * b */
HPML_API hpml_tensor *hpml_div(hpml_tensor *a, hpml_tensor *b); /* a / b */
HPML_API hpml_tensor *hpml_scale(hpml_tensor *x, float a, float b); /* a * x + b */

/* Activations: functions of one element x. */
typedef enum hpml_act {
    HPML_ACT_NONE       = 0,
    HPML_ACT_RELU       = 1,  /* max(x, 0) */
    HPML_ACT_LEAKY_RELU = 2,  /* x > 0 ? x : slope x */
    HPML_ACT_GELU       = 3,  /* x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), Hendrycks & Gimpel 2016 */
    HPML_ACT_GELU_ERF   = 4,  /* x/2 (1 + erf(x / sqrt 2)) */
    HPML_ACT_SILU       = 5,  /* x sigmoid(x) */
    HPML_ACT_SIGMOID    = 6,  /* 1 / (1 + exp(-x)) */
    HPML_ACT_TANH = 7, HPML_ACT_EXP = 8, HPML_ACT_LOG = 9, HPML_ACT_SQRT = 10, HPML_ACT_SQUARE = 11, HPML_ACT_NEG = 12,
    HPML_ACT_ABS = 13
} hpml_act;
#define HPML_ACT_COUNT 14
HPML_API hpml_tensor *hpml_activation(hpml_tensor *x, hpml_act act, float slope); /* slope: LEAKY_RELU's; 0: 0.01 */
HPML_API hpml_tensor *hpml_relu(hpml_tensor *x);
HPML_API hpml_tensor *hpml_leaky_relu(hpml_tensor *x, float slope);
HPML_API hpml_tensor *hpml_gelu(hpml_tensor *x);
HPML_API hpml_tensor *hpml_gelu_erf(hpml_tensor *x);
HPML_API hpml_tensor *hpml_silu(hpml_tensor *x);
HPML_API hpml_tensor *hpml_sigmoid(hpml_tensor *x);
HPML_API hpml_tensor *hpml_tanh(hpml_tensor *x);

/* y = op(a) op(b): a (.., m, k), b (.., k, n), y (.., m, n). trans_a: a is (.., k, m); trans_b: b is (.., n, k). The
   leading dimensions (..) of a and b are equal, or b has two dimensions and multiplies each matrix of a. */
HPML_API hpml_tensor *hpml_matmul(hpml_tensor *a, hpml_tensor *b, bool trans_a, bool trans_b);

/* y = act(x w^T + bias): x (.., in), w (out, in), bias (out), y (.., out). Records a parameter "name.weight" and,
   unless no_bias, "name.bias". */
typedef struct hpml_linear_desc {
    uint32_t     _begin;
    const char  *name;
    hpml_act     activation; /* 0: none */
    bool         no_bias;
    hpml_init    init;       /* of the weight; DEFAULT: KAIMING_UNIFORM */
    float        init_scale;
    hpml_tensor *weight;     /* an (out, in) parameter to use instead of a new one (tied embeddings); NULL: a new one */
    hpml_split   split;      /* over the TENSOR axis; with IN the bias is added once */
    int32_t      sections;   /* OUT: y consists of so many sections, each of which is split (3: q, k, v); 0: 1 */
    uint32_t     _end;
} hpml_linear_desc;
HPML_API hpml_tensor *hpml_linear(hpml_tensor *x, int64_t out, const hpml_linear_desc *desc);

/* Converts images to another layout: records a permute, or returns x if x has that layout. The result of an op has the
   layout of its sources; reshape and permute give NCHW. Both layouts give equal results up to rounding and need equal
   parameters (shapes, order); hpml_flatten gives (B, C H W) for both, so files of parameters fit both. Loaders, crops
   and augmentation produce (C, H, W), so record hpml_to_layout(input, HPML_NHWC). batchnorm, and on a GPU conv2d and
   pooling, convert NHWC to NCHW and back. Other ops ignore the layout; images of two layouts in an op are an error. */
HPML_API hpml_tensor *hpml_to_layout(hpml_tensor *x, hpml_layout layout);
/* Declares, without moving numbers, the layout of x: an input or a reshape that no op has read yet. */
HPML_API hpml_status  hpml_tensor_set_layout(hpml_tensor *x, hpml_layout layout);

/* How the CPU computes hpml_conv2d; results agree up to rounding. C: channels of x; t: height x width of a kernel. */
typedef enum hpml_conv_algorithm {
    HPML_CONV_AUTO   = 0, /* DIRECT, or IM2COL if DIRECT would exceed the limit of the workspace */
    HPML_CONV_DIRECT = 1, /* reads images in place. Workspace: up to 17 t C out floats, some images per thread */
    HPML_CONV_IM2COL = 2  /* multiplies the weights by a matrix of t C / groups rows, for some rows of y at a time */
} hpml_conv_algorithm;

/* Convolution (cross-correlation, as usual in the field): x (B, C, H, W), w (out, C / groups, kernel_h, kernel_w), y
   (B, out, H', W') with H' = floor((H + 2 padding - dilation (kernel - 1) - 1) / stride) + 1. groups = C is depthwise.
   y->node->attr.conv.algorithm is the algorithm chosen and y->node->scratch_bytes the bytes of its workspace, with the
   f32 copies that are needed where results are stored in halves. */
typedef struct hpml_conv2d_desc {
    uint32_t    _begin;
    int32_t     kernel_h, kernel_w;     /* size of the kernel; kernel_h required; kernel_w 0: as kernel_h */
    int32_t     stride_h, stride_w;     /* 0: 1 (w: as h) */
    int32_t     padding_h, padding_w;   /* zeros added on each side; w 0: as h, HPML_NO_PAD: none */
    int32_t     dilation_h, dilation_w; /* 0: 1 (w: as h) */
    int32_t     groups;                 /* 0: 1 */
    const char *name;
    hpml_act    activation;             /* applied to y; any but GELU, GELU_ERF, SILU, LOG, SQUARE, ABS */
    bool        no_bias;
    hpml_init   init;
    float       init_scale;
    hpml_conv_algorithm algorithm;      /* CPU only, as is workspace; on other backends both must be 0 */
    size_t      workspace;              /* most bytes of working memory; 0: no limit */
    hpml_split  split;                  /* of the output or input channels over the TENSOR axis; needs groups 1 */
    uint32_t    _end;
} hpml_conv2d_desc;
#define HPML_NO_PAD (-1)
HPML_API hpml_tensor *hpml_conv2d(hpml_tensor *x, int64_t out, const hpml_conv2d_desc *desc);

/* Pooling over windows of kernel x kernel: (B, C, H, W) to (B, C, H', W'), H' = floor((H + 2 padding - kernel) /
   stride) + 1. stride 0: kernel. Padding is excluded from maxima and averages; padding <= kernel / 2. */
HPML_API hpml_tensor *hpml_max_pool2d(hpml_tensor *x, int32_t kernel, int32_t stride, int32_t padding);
HPML_API hpml_tensor *hpml_avg_pool2d(hpml_tensor *x, int32_t kernel, int32_t stride, int32_t padding);
HPML_API hpml_tensor *hpml_global_avg_pool2d(hpml_tensor *x); /* (B, C, H, W) to (B, C) */

/* Shapes. One dimension of a reshape may be -1: the one that keeps the number of elements. permute: dimension i of the
   result is dimension dims[i] of x; dims has x->ndim entries. slice: `count` indices from `start` on. */
HPML_API hpml_tensor *hpml_reshape(hpml_tensor *x, int ndim, const int64_t *shape);
HPML_API hpml_tensor *hpml_reshape_2d(hpml_tensor *x, int64_t d0, int64_t d1);
HPML_API hpml_tensor *hpml_reshape_3d(hpml_tensor *x, int64_t d0, int64_t d1, int64_t d2);
HPML_API hpml_tensor *hpml_reshape_4d(hpml_tensor *x, int64_t d0, int64_t d1, int64_t d2, int64_t d3);
HPML_API hpml_tensor *hpml_flatten(hpml_tensor *x); /* (B, ...) to (B, rest); NHWC images to (B, C H W) */
HPML_API hpml_tensor *hpml_permute(hpml_tensor *x, const int *dims);
HPML_API hpml_tensor *hpml_transpose(hpml_tensor *x, int dim_a, int dim_b);
HPML_API hpml_tensor *hpml_slice(hpml_tensor *x, int dim, int64_t start, int64_t count);
HPML_API hpml_tensor *hpml_concat(hpml_tensor *const *x, int count, int dim); /* count 1 to HPML_MAX_SRC */

/* Sum and mean over dimension `dim`, which keeps size 1; HPML_ALL_DIMS: over all elements, giving a scalar. */
#define HPML_ALL_DIMS (-1)
HPML_API hpml_tensor *hpml_sum(hpml_tensor *x, int dim);
HPML_API hpml_tensor *hpml_mean(hpml_tensor *x, int dim);

/* softmax over the last dimension: y_i = exp(x_i) / sum_j exp(x_j); log_softmax: the logarithm of y. */
HPML_API hpml_tensor *hpml_softmax(hpml_tensor *x);
HPML_API hpml_tensor *hpml_log_softmax(hpml_tensor *x);

/* Normalization. layernorm: y = (x - mean) / sqrt(var + eps) gamma + beta, mean and variance over the last dimension
   (Ba et al. 2016). rmsnorm: y = x / sqrt(mean(x^2) + eps) gamma (Zhang & Sennrich 2019). batchnorm: as layernorm, but
   for each channel over (B, H, W) or B; training uses the batch's statistics and updates the running statistics,
   running = (1 - momentum) running + momentum batch (unbiased variance), which evaluation uses (Ioffe & Szegedy 2015).
   Parameters: weight (gamma), bias (beta); buffers: running_mean, running_var. */
typedef struct hpml_norm_desc {
    uint32_t    _begin;
    const char *name;
    float       eps;        /* 0: 1e-5 */
    float       momentum;   /* of batchnorm's running statistics; 0: 0.1 */
    bool        no_affine;  /* without gamma and beta */
    hpml_act    activation; /* applied by batchnorm: NONE or RELU; others ignore it */
    uint32_t    _end;
} hpml_norm_desc;
HPML_API hpml_tensor *hpml_layernorm(hpml_tensor *x, const hpml_norm_desc *desc);
HPML_API hpml_tensor *hpml_rmsnorm(hpml_tensor *x, const hpml_norm_desc *desc);
HPML_API hpml_tensor *hpml_batchnorm(hpml_tensor *x, const hpml_norm_desc *desc); /* (B, C) or (B, C, H, W) */

/* In training sets each element to zero with probability p, 0 <= p < 1, and multiplies the others by 1 / (1 - p)
   (Srivastava et al. 2014); in evaluation y = x. The mask is not stored but computed again in the backward pass, from
   seed, step, node and the element's place in the global batch. */
HPML_API hpml_tensor *hpml_dropout(hpml_tensor *x, float p);

/* y[b][t] = table[tokens[b][t]]: tokens I32 (B, T) in 0 .. vocabulary - 1, table (vocabulary, width), y (B, T, width).
   A token outside that range is an error of the step. */
typedef struct hpml_embedding_desc {
    uint32_t     _begin;
    const char  *name;
    hpml_init    init;   /* DEFAULT: NORMAL with standard deviation 1 */
    float        init_scale;
    hpml_tensor *weight; /* a (vocabulary, width) parameter to use instead of a new one; NULL: a new one */
    bool         sparse; /* the table's gradient has the rows of a step's tokens alone, see hpml_param_rows */
    hpml_split   split;  /* OUT: each rank of the TENSOR axis has some rows of the table, that is some tokens */
    uint32_t     _end;
} hpml_embedding_desc;
HPML_API hpml_tensor *hpml_embedding(hpml_tensor *tokens, int64_t vocabulary, int64_t width,
                                     const hpml_embedding_desc *desc);
/* A sparse table's gradient is a list of rows; row r of its `grad` holds the sum over all positions of token r, and
   rows that are not listed are zero. Only listed rows are cleared, sent and updated by the optimizer. An update leaves
   rows without a gradient as they are, weight decay and states of the optimizer included (lazy updates). With SGD
   without momentum and decay a sparse table has the bits of a dense one. Refused: tables that other ops read too,
   devices, and trainers that need a norm of the gradient (clip_norm, dynamic loss scale, LARS, LAMB, own optimizers
   with prepare or direction).
   hpml_param_rows returns the rows in the order in which the passes met them, and *count, the number of rows; NULL: the
   gradient is dense. hpml_param_add_rows adds `values` (count, width) to the `count` rows with the indices `rows` of
   the gradient; clear: first clears the whole gradient. */
HPML_API const int32_t *hpml_param_rows(const hpml_tensor *table, int64_t *count);
HPML_API hpml_status    hpml_param_add_rows(hpml_tensor *table, bool clear, const int32_t *rows, const float *values,
                                            int64_t count);

/* Multi-head attention without its projections. qkv (B, T, 3C): queries, keys and values of C numbers each; head h has
   the numbers h C/heads to (h+1) C/heads - 1 of each. y (B, T, C): for each head softmax(scale q k^T) v, where a query
   attends to the keys up to its own position. Works on blocks of queries, so that the (T, T) matrix is not stored. */
typedef struct hpml_attention_desc {
    uint32_t _begin;
    int32_t  heads;      /* number of heads, required, divides C; of the whole, if qkv is split (in 3 sections) */
    bool     not_causal; /* true: every query attends to all keys */
    float    scale;      /* 0: 1 / sqrt(C / heads) */
    uint32_t _end;
} hpml_attention_desc;
HPML_API hpml_tensor *hpml_attention(hpml_tensor *qkv, const hpml_attention_desc *desc);

/* Long short-term memory (Hochreiter & Schmidhuber 1997): x (B, T, in), y (B, T, hidden). Parameters weight_x
   (4 hidden, in), weight_h (4 hidden, hidden), bias (4 hidden), in the order of the gates i, f, g, o. The state is zero
   at the first time step. To carry the state from batch to batch, record a cell's steps from linear, slice, sigmoid and
   mul, with the state as an input. */
HPML_API hpml_tensor *hpml_lstm(hpml_tensor *x, int64_t hidden, const char *name);

/* Losses: f32 scalars. cross_entropy: -log softmax(logits)[label], logits (.., classes), labels I32 (..), averaged over
   labels other than ignore_index; the classes may be split over the TENSOR axis. bce (s = sigmoid(logits)), mse, huber:
   means over all elements. */
typedef struct hpml_cross_entropy_desc {
    uint32_t _begin;
    float    label_smoothing; /* 0 to 1: this part of the target is spread evenly over all classes */
    int32_t  ignore_index;    /* rows with this label do not count; 0: HPML_IGNORE (so label 0 always counts) */
    uint32_t _end;
} hpml_cross_entropy_desc;
#define HPML_IGNORE (-100)
HPML_API hpml_tensor *hpml_cross_entropy(hpml_tensor *logits, hpml_tensor *labels, const hpml_cross_entropy_desc *desc);
HPML_API hpml_tensor *hpml_bce_with_logits(hpml_tensor *logits, hpml_tensor *target); /* -t log s - (1-t) log(1-s) */
HPML_API hpml_tensor *hpml_mse(hpml_tensor *y, hpml_tensor *target);                  /* (y - t)^2 */
HPML_API hpml_tensor *hpml_huber(hpml_tensor *y, hpml_tensor *target, float delta);   /* 0: |y - t| */

// ---------------------------------------------------------------------------------------------------------------------
// >>api-graph   planning and running a recorded graph
// ---------------------------------------------------------------------------------------------------------------------
/* Bytes of memory that a graph needs, known before any is allocated. A few KB of lists come on top. */
typedef struct hpml_memory {
    size_t parameters;  /* values of all parameters of the context, each padded to HPML_GRADIENT_ALIGN floats */
    size_t gradients;   /* gradients of the parameters that this graph trains */
    size_t activations; /* inputs, results of ops, their gradients and saved values; memory is used again */
    size_t unshared;    /* what activations would be if no memory were used again */
    size_t scratch;     /* working memory of ops; all ops use the same memory */
    size_t optimizer;   /* state of the optimizer; 0 for a graph without a trainer, and with .host_optimizer on a
                           device, because then the states are in host memory */
    size_t host;        /* copies in host memory of what is swapped out of the arena; not part of total */
    size_t total;       /* parameters + gradients + activations + scratch + optimizer */
    double extra;       /* operations that a step computes again, and 1 for each byte of these results; a byte swapped
                           out and in counts as hpml_graph_budget says */
} hpml_memory;

typedef struct hpml_graph_desc {
    uint32_t            _begin;
    int32_t             output_count; /* 0 to HPML_MAX_OUTPUTS */
    hpml_tensor *const *outputs;      /* results that may be read after a run */
    hpml_tensor        *loss;         /* an f32 scalar; NULL: no backward pass */
    uint32_t            _end;
} hpml_graph_desc;

/* Plans the ops on which outputs and loss depend; no tensor memory is allocated. A result of an op belongs to at most
   one graph, and its memory may be used again unless it is an output; inputs and parameters may be in several. */
HPML_API hpml_graph *hpml_graph_create(hpml_ctx *ctx, const hpml_graph_desc *desc);
HPML_API void        hpml_graph_memory(const hpml_graph *g, hpml_memory *out);
HPML_API hpml_status hpml_graph_alloc(hpml_graph *g);   /* allocates the planned memory; the first run calls it */
/* Sets the number of samples of later runs, 1 to the inputs' batch, and so shape[0] of all tensors with batch_rows. */
HPML_API hpml_status hpml_graph_set_batch(hpml_graph *g, int64_t samples);
HPML_API bool        hpml_graph_batchable(const hpml_graph *g); /* false: an op mixes samples; full batches only */
HPML_API int         hpml_graph_op_count(const hpml_graph *g);
HPML_API const hpml_node *hpml_graph_op(const hpml_graph *g, int i); /* in running order, from 0 */
/* Computes all results. train: dropout is active and batchnorm uses the batch's statistics. step: the step's number, on
   which the dropout masks depend. */
HPML_API hpml_status hpml_graph_forward(hpml_graph *g, bool train, uint64_t step);
/* Computes the gradients of `scale` times the loss of the last forward pass; accumulate: adds the new gradients of
   parameters to their old ones, instead of replacing the old ones. */
HPML_API hpml_status hpml_graph_backward(hpml_graph *g, float scale, bool accumulate);

/* The backward pass in two halves (Qi et al. 2023): WEIGHTS computes the gradients of the parameters that only products
   (linear, conv2d, matmul, lstm) and own ops with .halves read, INPUTS all other gradients, so that a pipeline's stage
   can send them before it computes WEIGHTS. Both halves together have the bits of one pass. hpml_graph_halves, called
   before the graph's memory is allocated, plans memory in which the arrays that WEIGHTS reads are kept until then, also
   while other slots run (hpml_graph_part); on the host only. hpml_graph_backward_half runs one half, INPUTS first, or
   both. */
typedef enum hpml_half { HPML_HALF_BOTH = 0, HPML_HALF_INPUTS, HPML_HALF_WEIGHTS } hpml_half;
HPML_API hpml_status hpml_graph_halves(hpml_graph *g);
HPML_API hpml_status hpml_graph_backward_half(hpml_graph *g, hpml_half half, float scale, bool accumulate);

/* Cuts a graph, before its memory is taken, so that in this graph only the ops `from` to `to` - 1 (in running order)
   run, on at most `rows` samples at a time, in `slots` slots, which are sets of activations. The numbers of slots go on
   from call to call, so that the number of a slot also names its ops. Further calls add ranges of ops that do not
   overlap. Values that a forward pass leaves for the backward pass are kept for each slot; all slots share the memory
   of values that live within one pass, because one pass runs at a time. A result computed in another part is like an
   input: write its values to `raw` before the forward pass, and find its gradient in `raw_grad` after the backward pass
   (NULL: it gets no gradient); both stay until the slot is used again. A result that another part reads has its values
   until the slot's backward pass begins; before that, write its gradient to `raw_grad`, to which ops of this part add.
   Parameters that no op of these parts reads have no memory, gradient or state. Parts run one after another compute the
   bits of the whole graph, except where one cut separates a result from a reshape of it: their gradients are added up
   in another order. A parameter that is trained by two parts of one graph is an error. */
HPML_API hpml_status hpml_graph_part(hpml_graph *g, int from, int to, int64_t rows, int slots);
/* Allocates the planned memory if the graph has none yet, and makes `slot` the current slot (0 at first): later passes
   run the ops of this slot, whose tensors now point to the slot's memory. */
HPML_API hpml_status hpml_graph_slot(hpml_graph *g, int slot);
/* Writes the results of ops before op `at` that ops from `at` on read to `tensors` (capacity); returns how many. */
HPML_API int         hpml_graph_crossing(const hpml_graph *g, int at, hpml_tensor **tensors, int capacity);

/* Less memory for more work, with the same bits. The results of a segment of ops that the backward pass reads are kept
   from the forward pass (KEEP); or the segment's ops run AGAIN at the beginning of its backward pass (Chen et al.
   2016), so that between both passes only the inputs of the segment are kept; or the results are copied to host memory
   and back (SWAP). Ops that run again compute the same results, dropout with the same masks; running statistics are
   updated only once; ops of your own run again, too, and collective ones communicate again. hpml_recompute makes the
   ops recorded between its calls with `true` and with `false` a segment that runs AGAIN. hpml_graph_retain makes ops
   `from` to `to` - 1 a segment, before the graph's memory is allocated. */
typedef enum hpml_retain_how { HPML_RETAIN_KEEP = 0, HPML_RETAIN_AGAIN, HPML_RETAIN_SWAP } hpml_retain_how;
HPML_API void        hpml_recompute(hpml_ctx *ctx, bool on);
HPML_API hpml_status hpml_graph_retain(hpml_graph *g, int from, int to, hpml_retain_how how);
/* Chooses by cost how each segment is retained (kept, run AGAIN or swapped), so that activations and scratch of
   hpml_memory are at most `bytes` (as KARMA does, Wahib et al. 2020). Segments are cut where those of hpml_recompute
   begin and end, and joined if they are more than 8; where none is recorded, the graph is cut into up to 8 segments
   with about equally large results. ops_per_byte: operations that take as long as copying a byte to or from the host;
   0: 8. An error, which names the least bytes that were found, if `bytes` are too few. With bytes 0 every segment runs
   AGAIN, and a graph where none is recorded is cut into about sqrt(ops) segments, at most 8. */
HPML_API hpml_status hpml_graph_budget(hpml_graph *g, size_t bytes, double ops_per_byte);

/* Compares the gradients of the backward pass with central differences of fourth order, in f32 with steps of eps (0:
   1e-2), at up to `samples` elements of each parameter and of each input that needs a gradient. Returns the largest |a
   - b| / (|a| + |b| + r), r the root mean square of the gradient that a and b belong to; negative on error. All ranks
   of a split graph (>>api-group) call this together; each checks its own parts. */
HPML_API double hpml_check_grad(hpml_graph *g, float eps, int samples);
/* Requests the gradient of an f32 input; an error if an op reads the input already. */
HPML_API hpml_status hpml_tensor_require_grad(hpml_tensor *input);

// ---------------------------------------------------------------------------------------------------------------------
// >>api-optimizer   optimizers: a table of rows, your own rows too
// ---------------------------------------------------------------------------------------------------------------------
/* The built-in optimizers. Section >>optimizers has their table, section >>vupdate their formulas. */
typedef enum hpml_opt { HPML_OPT_SGD = 0, HPML_OPT_ADAGRAD, HPML_OPT_RMSPROP, HPML_OPT_ADAM, HPML_OPT_ADAMW,
                        HPML_OPT_LARS, HPML_OPT_LAMB,
                        HPML_OPT_CUSTOM /* the step of hpml_trainer_desc.custom_optimizer */ } hpml_opt;
#define HPML_MAX_STATES 4 /* arrays that an optimizer may keep for each parameter */
/* Bits of hpml_update.found_nonfinite: a gradient was NaN or infinite; a new weight or a new optimizer state was. */
enum { HPML_NONFINITE_GRADIENT = 1, HPML_NONFINITE_STEP = 2 };

/* One optimizer step on one parameter. All arrays have n floats and lie in the memory of the backend (GPU or host). */
typedef struct hpml_update {
    hpml_opt opt;              /* the formula; HPML_OPT_CUSTOM: that of custom->step (CPU only) */
    const struct hpml_optimizer *custom; /* the optimizer, where opt is HPML_OPT_CUSTOM */
    void    *user;             /* hpml_trainer_desc.optimizer_user */
    const hpml_tensor *param;  /* the parameter to step, for its name and shape; NULL: not known */
    int64_t  n;                /* numbers in each array; 0: nothing to do */
    float   *w;                /* weights */
    float   *g;                /* gradient; optimizers with `direction` overwrite it */
    float   *state[HPML_MAX_STATES]; /* the optimizer's arrays for this parameter; NULL: none */
    uint64_t step;             /* number of the update, from 1 */
    float    lr;               /* of this step and parameter, after schedule and hpml_param_desc.lr_scale */
    float    momentum, beta1, beta2, eps;
    float    weight_decay, trust;  /* both 0 where the parameter has no decay */
    float    grad_scale;       /* multiplies g: 1 / loss scale */
    float    clip;             /* largest norm of all gradients together, before grad_scale */
    const double *sumsq;       /* sum of squares of all gradients, in device memory; NULL: no clipping */
    bool     nesterov;
    int32_t *found_nonfinite;  /* not NULL: a gradient that is not finite counts as 0; a weight that would not be finite
                                  stays, its states restart from 0. The CPU sets HPML_NONFINITE_* bits here; a device
                                  has an error when the host next waits for it. NULL: NaN and infinity get into w and
                                  state */
} hpml_update;

typedef struct hpml_optimizer_state {
    const char *name;          /* 1 to 23 letters, digits or `_`: checkpoints store "opt.<name>.<parameter>". NULL in a
                                  built-in optimizer: no array */
    bool        nonnegative;   /* sums or means of squares: checkpoints with a number below 0 are refused */
    bool        with_momentum; /* array exists only where the trainer's momentum is not 0 */
} hpml_optimizer_state;

/* An optimizer. For your own, define one (static const, or as long-lived as its trainers) and pass it as
   hpml_trainer_desc.custom_optimizer. Clipping, loss scaling, accumulation, weight decay by parameter, schedules,
   checkpoints and the data parallelism of hpml_comm.h work as for built-in ones. Your own steps run on the CPU backend
   only: a trainer on another device refuses them. u: the hpml_update that both functions get.
   step     computes new weights w and states of n numbers of one parameter from g, a copy of their gradient (unscaled,
            clipped, without weight decay) that step may change. Number i must depend on numbers i of w, g and state
            alone, because step is called for one part of a parameter at a time, and threads and fused ops cut the parts
            differently; several threads call at once. Learning rate and other settings are in u; use the arguments w,
            g and state, not the arrays in u. States are 0 before the first step.
   prepare  optional; called once for each parameter before its parts, with the Euclidean norms of its weights and of
            its gradient (unscaled, clipped; NaN or infinite where the gradient is): may change settings in u (LARS) */
typedef struct hpml_optimizer {
    const char *name;          /* 1 to 31 characters, not a built-in optimizer's name; checkpoints store it */
    hpml_opt    opt;           /* of a built-in optimizer: its number; HPML_OPT_CUSTOM or 0 in your own */
    int         state_count;   /* number of states, 0 to HPML_MAX_STATES */
    hpml_optimizer_state states[HPML_MAX_STATES];
    float       lr, momentum, beta1, beta2, eps, trust; /* used if the trainer's desc has 0 (HPML_ZERO: a true 0) */
    bool        nesterov;      /* supports Nesterov's momentum, and then needs a momentum */
    bool        direction;     /* step leaves w unchanged and replaces g by a direction r; then w -= lr r */
    bool        layer_ratio;   /* with direction: w -= lr |w| / |r| r (LAMB); lr r where |w| or |r| is 0 */
    bool        whole;         /* with direction: step is called once with all n numbers, whose shape u->param has; a
                                  number of r may then depend on all numbers of g (Muon) */
    void (*prepare)(hpml_update *u, double weight_norm, double grad_norm); /* optional */
    void (*step)(const hpml_update *u, float *w, float *g, float *const *state, int64_t n); /* NULL: built-in */
} hpml_optimizer;
HPML_API const hpml_optimizer *hpml_optimizer_find(const char *name); /* "sgd", "adamw", ...; NULL: none of that name */
HPML_API const hpml_optimizer *hpml_optimizer_at(int index);          /* built-in ones, from index 0; NULL: no more */

// ---------------------------------------------------------------------------------------------------------------------
// >>api-backend   the seam to devices: a table of functions
// ---------------------------------------------------------------------------------------------------------------------
/* All ops: X(name in the enum, name of the function that records it). The enum, hpml_op_name and the backends' tables
   are generated from this list. hpml_relu and the like record ACTIVATION, hpml_mean SUM, hpml_custom_op CUSTOM. */
#define HPML_OPS(X)                                                                                                    \
    X(ADD, add) X(SUB, sub) X(MUL, mul) X(DIV, div) X(SCALE, scale) X(ACTIVATION, activation) X(MATMUL, matmul)        \
    X(LINEAR, linear) X(CONV2D, conv2d) X(MAX_POOL2D, max_pool2d) X(AVG_POOL2D, avg_pool2d) X(RESHAPE, reshape)        \
    X(PERMUTE, permute) X(SLICE, slice) X(CONCAT, concat) X(SUM, sum) X(SOFTMAX, softmax) X(LOG_SOFTMAX, log_softmax)  \
    X(LAYERNORM, layernorm) X(RMSNORM, rmsnorm) X(BATCHNORM, batchnorm) X(DROPOUT, dropout) X(EMBEDDING, embedding)    \
    X(ATTENTION, attention) X(LSTM, lstm) X(CROSS_ENTROPY, cross_entropy) X(BCE_WITH_LOGITS, bce_with_logits)          \
    X(MSE, mse) X(HUBER, huber) X(CUSTOM, custom)

typedef enum hpml_op {
#define HPMLI_OP_VALUE(op, name) HPML_OP_##op,
    HPML_OPS(HPMLI_OP_VALUE)
        HPML_OP_COUNT
} hpml_op;
HPML_API const char *hpml_op_name(hpml_op op); /* "linear" for HPML_OP_LINEAR; "?" for an unknown op */

/* The constants of a node; its op determines the member. */
typedef union hpml_attr {
    struct { float a, b; } scale;
    struct { hpml_act act; float slope; } act;                          /* ACTIVATION, LINEAR */
    struct { bool trans_a, trans_b; } matmul;
    struct { int32_t kernel[2], stride[2], padding[2], dilation[2], groups; hpml_act act;
             hpml_conv_algorithm algorithm; int32_t rows; } conv; /* CONV2D and pooling; [0]: height, [1]: width; rows
                                                                     of the result that IM2COL computes at a time */
    struct { int32_t dims[HPML_MAX_DIMS]; } permute;
    struct { int32_t dim; int64_t start; } slice;                       /* SLICE and CONCAT */
    struct { int32_t dim; bool mean; } sum;
    struct { float eps, momentum; hpml_act act; } norm;
    struct { float p; } dropout;
    struct { int32_t heads; bool causal; float scale; } attention;
    struct { float smoothing; int32_t ignore; } cross_entropy;
    struct { float delta; } huber;
    const struct hpml_custom *custom;                                   /* the context's copy of the desc */
} hpml_attr;

/* A node: one recorded op with its sources and its result, as backends get it. */
struct hpml_node {
    hpml_op      op;
    int          index;                        /* position in the order of recording, in which nodes run */
    hpml_tensor *out;
    int          src_count;
    hpml_tensor *src[HPML_MAX_SRC];            /* (src_count) sources; NULL: an optional source that is absent */
    bool         accumulate[HPML_MAX_SRC];     /* backward adds to the gradient of src[i], else overwrites it */
    hpml_attr    attr;
    bool         mixes_batch;                  /* the result has no batch dimension 0 although a source has one */
    size_t       saved_bytes, scratch_bytes;   /* bytes needed from forward to backward; during one call */
    void        *saved, *scratch;              /* addresses of saved and scratch memory, on the device */
    hpml_node   *fused_with;                   /* set by a backend's plan: the next node, inside whose op the backend
                                                  computes this op; the sources of this op stay valid until then */
    struct hpmli_node_state *state;            /* private */
};

/* The arguments that each op gets for a forward or backward run. */
typedef struct hpml_run {
    hpml_ctx *ctx;
    bool      train;       /* dropout is active, batchnorm uses the batch's statistics */
    uint64_t  step;        /* number of the step, on which random masks depend */
    float     loss_scale;  /* the value that the gradient of the loss starts with */
    uint64_t  sample;      /* number, in the global batch, of this rank's first sample: masks depend on it */
    bool      idle;        /* this rank has no samples: only ops that call `sum` (batchnorm) run, and add zeros */
    /* Adds up n numbers in host memory over all ranks, in place. Ops whose result depends on the whole global batch
       call it, equally often and with the same n on all ranks. NULL: this rank has the whole batch. */
    hpml_status (*sum)(void *user, double *values, int64_t n);
    void     *sum_user;
    bool      again;       /* forward runs once more for the backward pass (hpml_recompute): the same results, and no
                              other effects, such as running statistics that move */
} hpml_run;
typedef hpml_status hpml_op_fn(const hpml_run *run, hpml_node *node);
typedef struct hpml_op_impl { hpml_op_fn *forward, *backward; } hpml_op_impl; /* backward NULL: none */

/* A forward or backward pass through a graph, or a part of a pass. Passes that are equal in every byte of this struct
   run the same ops on the same memory, so that a device may record the first and replay the others. */
typedef struct hpml_pass {
    const hpml_graph *graph;
    int64_t           samples, first; /* number of samples; index of the first sample in the inputs */
    int64_t           slot;                        /* the set of activations, see hpml_graph_part; 0: the only one */
    int64_t           from, to;                    /* ops from .. to - 1 in running order: gradient hooks cut a pass */
    uint64_t          train, backward, accumulate; /* 0 or 1 */
} hpml_pass;

/* A device: a table of functions. `device` is the object that open returned. Functions marked optional may be NULL. All
   arrays and sums (out, counts) are in the device's memory, except parameters that are called `host`. */
struct hpml_backend {
    const char *name;
    hpml_status (*open)(hpml_ctx *ctx, const void *desc, void **device);
    void (*close)(void *device);
    void *(*alloc)(void *device, size_t bytes);          /* zeroed, aligned to 64 bytes; NULL on failure */
    void (*free)(void *device, void *ptr, size_t bytes);
    hpml_status (*write)(void *device, void *dst, const void *host, size_t bytes); /* keeps the calls' order */
    hpml_status (*read)(void *device, void *host, const void *src, size_t bytes);  /* waits for the data */
    hpml_status (*zero)(void *device, void *dst, size_t bytes);
    hpml_status (*sync)(void *device);                   /* optional: waits until all work of the device is done */
    const hpml_op_impl *ops;                             /* [HPML_OP_COUNT] */
    hpml_status (*update)(void *device, hpml_ctx *ctx, const hpml_update *updates, int count); /* n 0: none */
    hpml_status (*sumsq)(void *device, hpml_ctx *ctx, hpml_dtype dtype, const void *x, int64_t n, double *out);
    hpml_dtype (*activation_dtype)(void *device); /* optional (NULL: F32): the type in which results of ops are stored:
                                                     F32, BF16 or F16. Scalars are always F32 */
    void (*plan)(void *device, hpml_node *node); /* optional: sets saved_bytes, scratch_bytes, fused_with of a node */
    /* optional: begin is called before the first op of a pass. It sets *done if the device has replayed the whole pass;
       otherwise the ops run, and then end is called with their status. end sets *again if recording has failed and no
       op has run: begin, the ops and end are then called once more. Neither begin nor end is called while ops must run
       one by one: for a trace, a profile or hooks other than `grad`. */
    hpml_status (*begin)(void *device, const hpml_run *run, const hpml_pass *pass, bool *done);
    hpml_status (*end)(void *device, const hpml_run *run, hpml_status status, bool *again);
    /* optional: counts[0] = number of rows of y (rows, classes) whose largest number is at the label; counts[1] =
       number of labels in 0 .. classes - 1 */
    hpml_status (*correct)(void *device, hpml_ctx *ctx, hpml_dtype dtype, const void *y, const int32_t *labels,
                           int64_t rows, int64_t classes, int64_t counts[2]);
    /* optional: hpml_packing_encode and _decode (add: hpml_packing_decode_add) on arrays of the device */
    hpml_status (*encode)(void *device, hpml_ctx *ctx, const hpml_packing *p, void *packed, float *residual,
                          const float *grad, int64_t rows);
    hpml_status (*decode)(void *device, hpml_ctx *ctx, const hpml_packing *p, float *out, const void *packed,
                          int64_t rows, bool add);
    /* optional: times an op without waiting: called with name NULL before the op and with its name after it. When the
       host next waits for the device, the span is added to the trace (lane GPU) and to *seconds, if not NULL. */
    void (*time_op)(void *device, const char *name, double *seconds);
    bool layouts; /* conv2d and pooling support NHWC, and conv2d supports attr.conv.algorithm */
    bool host;    /* arrays lie in host memory, which the program reads and writes, and `update` runs own optimizers */
};
HPML_API const hpml_backend *hpml_backend_cpu(void);
HPML_API const hpml_backend *hpml_ctx_backend(const hpml_ctx *ctx);
HPML_API void *hpml_ctx_device(const hpml_ctx *ctx); /* the object that the backend's open returned */

// ---------------------------------------------------------------------------------------------------------------------
// >>api-custom   ops of your own
// ---------------------------------------------------------------------------------------------------------------------
/* An op of your own: recorded, planned, differentiated, timed and checked (hpml_check_grad) as a built-in op is.
   forward    computes the values of node->out from those of node->src[i]
   backward   computes from node->out->grad, which it may overwrite, the gradient of each source whose grad is not NULL,
              and adds it there, by hpml_node_give or by itself: the array holds zeros or what other ops have added
   Both find shapes of the current batch and f32 in host memory, whatever the backend is and in which type results are
   stored: halves and the arrays of a device are copied, which waits for the device. They return HPML_OK or a status,
   best by hpml_ctx_fail(run->ctx, ...). Random numbers: key a hpml_rng by run->step, run->sample and node->index. */
typedef struct hpml_custom {
    uint32_t     _begin;
    const char  *name;         /* required, copied: the kind of op in summaries, profiles, traces and errors */
    hpml_op_fn  *forward;      /* required */
    hpml_op_fn  *backward;     /* NULL: the result has no gradient */
    hpml_op_impl kernel;       /* optional: both for hpml_backend_cuda, where src and out have addresses raw, raw_grad
                                  of the device and halves are halves; they only launch work on hpml_cuda_stream */
    void        *user;         /* yours: node->attr.custom->user; must live as long as the context */
    bool         one_number;   /* the result is a scalar, such as a loss */
    int32_t      ndim;         /* dimensions of the result; 0: the result has the shape of source 0, and its `split` */
    int64_t      shape[HPML_MAX_DIMS]; /* of the result, for a full batch */
    int64_t      batch_rows;   /* rows of the result that belong to a sample; 0: shape[0] / batch if that is whole, else
                                  none; -1: none. Without such rows the op mixes samples: full batches only */
    uint32_t     keeps;        /* a sum of HPML_KEEP_: the values that backward reads, because others are overwritten by
                                  then; 0: all sources (but source 0 if in_place) and the result */
    bool         in_place;     /* forward also works where the result is in the memory of source 0 */
    bool         collective;   /* communicates with ranks that make the same calls. Also runs where run->idle, on a rank
                                  without samples, as on a full batch of zeros; runs once in a pass, never replayed */
    bool         halves;       /* backward may run twice (hpml_graph_halves), the second time for parameters, the first
                                  time for the other sources: each time the others' grad is NULL. The first call must
                                  then overwrite neither node->out->grad nor node->saved */
    size_t       saved_bytes, scratch_bytes; /* of node->saved, from forward to backward; of node->scratch, in a call */
    double       flops;        /* operations of forward on a full batch, for profiles; backward counts twice as many */
    uint32_t     _end;
} hpml_custom;
#define HPML_KEEP_SRC(i) (UINT32_C(1) << (i))          /* the value of source i */
#define HPML_KEEP_OUT    (UINT32_C(1) << HPML_MAX_SRC) /* the value of the result */
#define HPML_KEEP_NONE   (UINT32_C(1) << 31)
/* Records an op of your own with `count` sources, 1 to HPML_MAX_SRC, of floats or of I32 (at address `raw`). */
HPML_API hpml_tensor *hpml_custom_op(hpml_tensor *const *src, int count, const hpml_custom *desc);
/* In backward: adds an array of the shape of source number `source` to the gradient of that source, if it needs one. */
HPML_API void hpml_node_give(const hpml_run *run, hpml_node *node, int source, const float *gradient);
/* For backends: runs an op's forward or backward on host copies of the device's arrays. */
HPML_API hpml_status hpml_custom_on_host(const hpml_run *run, hpml_node *node, bool backward);

// ---------------------------------------------------------------------------------------------------------------------
// >>api-trainer   schedules, the trainer and its hooks
// ---------------------------------------------------------------------------------------------------------------------
typedef enum hpml_loss { HPML_LOSS_CROSS_ENTROPY = 0, HPML_LOSS_BCE, HPML_LOSS_MSE, HPML_LOSS_HUBER } hpml_loss;
typedef enum hpml_schedule_kind {
    HPML_SCHEDULE_CONSTANT = 0,
    HPML_SCHEDULE_STEP     = 1, /* lr gamma^(floor(step / period)) */
    HPML_SCHEDULE_COSINE   = 2, /* half a cosine from lr to min_lr over total_steps (Loshchilov & Hutter 2017) */
    HPML_SCHEDULE_LINEAR   = 3  /* a straight line from lr to min_lr over total_steps */
} hpml_schedule_kind;

/* How the learning rate changes with the number of updates. All fields zero: it is constant. */
typedef struct hpml_schedule {
    hpml_schedule_kind kind;
    int64_t warmup_steps; /* updates of warm-up: lr (step + 1) / warmup_steps (Goyal et al. 2017); 0: none */
    int64_t total_steps;  /* COSINE, LINEAR, required: updates until min_lr, warm-up included */
    int64_t period;       /* STEP, required: updates from one change to the next */
    float   gamma;        /* STEP: factor of a change; 0: 0.1 */
    float   min_lr;       /* COSINE, LINEAR: learning rate at the end and afterwards */
} hpml_schedule;
/* Returns the learning rate of update `step`, counted from 0; lr: the rate without a schedule. s NULL: returns lr. */
HPML_API float hpml_schedule_lr(const hpml_schedule *s, float lr, int64_t step);

/* How the learning rate lr depends on the batch size; factor: the batch size / the one that lr was tuned for. */
typedef enum hpml_lr_rule {
    HPML_LR_AS_GIVEN = 0, /* lr */
    HPML_LR_LINEAR   = 1, /* lr factor */
    HPML_LR_SQRT     = 2  /* lr sqrt(factor) */
} hpml_lr_rule;
HPML_API float hpml_lr_scale(hpml_lr_rule rule, float lr, double factor);

/* What is trained, and how. Numbers must be finite and not negative; the error names a field that is out of range. */
typedef struct hpml_trainer_desc {
    uint32_t      _begin;
    hpml_tensor  *input;           /* required: receives x of each batch. Set other inputs that the loss depends on with
                                      hpml_tensor_set before a step */
    hpml_tensor  *output;          /* required, (B, ..): read by hpml_trainer_predict and for the accuracy */
    hpml_loss     loss;            /* the loss that the trainer records, from output and a target input that it adds */
    hpml_tensor  *loss_tensor;     /* not NULL: your own scalar instead of `loss`; `target` is then required */
    hpml_tensor  *target;          /* with loss_tensor: the input that receives y; no targets: as .input, y = x */
    float         label_smoothing; /* CROSS_ENTROPY: 0 to 1 */
    float         huber_delta;     /* HUBER: where the square ends and the line begins; 0: l1 */
    hpml_opt      optimizer;
    const hpml_optimizer *custom_optimizer; /* not NULL: replaces `optimizer`; your own or hpml_optimizer_find's */
    void         *optimizer_user;  /* passed to each step as hpml_update.user */
    float         lr;              /* learning rate; 0: SGD, LARS, ADAGRAD 0.01; RMSPROP, ADAM, ADAMW, LAMB 0.001 */
    float         momentum;        /* 0 to 1; SGD, RMSPROP, LARS; 0: none (LARS: 0.9) */
    bool          nesterov;        /* SGD, LARS: Nesterov's momentum; needs a momentum */
    float         beta1, beta2;    /* below 1; ADAM, ADAMW, LAMB; 0: 0.9, 0.999. RMSPROP: beta2, 0: 0.99 */
    float         eps;             /* added to a square root before it divides; 0: 1e-8 (ADAGRAD 1e-10, LAMB 1e-6) */
    float         weight_decay;    /* L2: weight_decay w is added to the gradient; ADAMW, LAMB: decoupled from it */
    bool          decay_all;       /* biases and norms decay as well */
    float         trust;           /* LARS: a parameter's rate is lr trust |w| / (|g| + weight_decay |w|), but lr for
                                      biases and norms unless decay_all; 0: 0.001. LAMB's rate is lr |w| / |r| for
                                      all parameters (You et al. 2020, algorithm 2) */
    bool          host_optimizer;  /* on a device: the optimizer's states take host memory, and none of the device. A
                                      step copies gradients and values to the host, steps there with the CPU's kernels
                                      (so an optimizer of your own runs, too), and copies the values back (Ren et al.
                                      2021, "ZeRO-Offload"). On the host nothing changes */
    hpml_schedule schedule;
    hpml_lr_rule  lr_rule;         /* scales lr by (samples of an update, all ranks) / lr_base_batch */
    int64_t       lr_base_batch;   /* samples of the update that lr was tuned for; 0: no scaling */
    float         clip_norm;       /* scales gradients so that the norm of all together is at most this; 0: no */
    int32_t       accumulate;      /* micro-batches of an update; each weighs as many as it has samples; 0: 1 */
    float         loss_scale;      /* gradients are computed times this and divided by it before use, because small ones
                                      would be 0 in halves; 0: 1, but dynamic where results are stored as F16: it begins
                                      with 65,536; when a gradient overflows, it is halved and the update skipped; after
                                      2,000 updates without, it is doubled (Micikevicius et al. 2018) */
    bool          no_finite_check; /* skips the check of loss, gradients and new parameters for NaN and infinity. The
                                      check fails with the step and the layer and keeps such numbers out of parameters,
                                      but the rest of the step is applied. It makes the host wait for a device in each
                                      step. Without clip_norm a device finds a non-finite gradient in the update: the
                                      next step, the end of fit or reading a tensor returns the error */
    uint32_t      _end;
} hpml_trainer_desc;

/* Plans the graph, allocates all memory, initializes the parameters; no training step allocates. Batch, minibatch and
   stochastic gradient descent differ only in the first dimension of the input. A context may have several trainers,
   which may share parameters; each trainer updates the parameters that its loss depends on. A parameter's `grad` is the
   gradient of the trainer or graph that ran its backward pass last. */
HPML_API hpml_trainer *hpml_trainer_create(hpml_ctx *ctx, const hpml_trainer_desc *desc);
/* on: from now on hpml_trainer_create checks and plans, but takes no memory until hpml_trainer_alloc, hpml_distribute
   or the first step, evaluation, prediction or checkpoint. Until then hpml_trainer_keep may reduce the memory. Until
   then inputs have no memory either, so set values of your own (hpml_tensor_set) after hpml_trainer_alloc. */
HPML_API void          hpml_ctx_defer(hpml_ctx *ctx, bool on);
HPML_API hpml_status   hpml_trainer_alloc(hpml_trainer *t); /* takes the memory; nothing if the trainer has it */
/* Must be called before the trainer's memory is allocated: from the call on this rank keeps and steps only the floats
   [first, first + count) of parameter number `param`, one shard of the parameter (Rajbhandari et al. 2020, "ZeRO").
   Other ranks keep the other shards, and hooks exchange them. shard: 1 to 3, as in hpml_param; hpml_graph_memory then
   has the bytes of this rank. An error once the trainer has memory, for a range outside the parameter, and for
   optimizers that step whole tensors (.whole). */
HPML_API hpml_status   hpml_trainer_keep(hpml_trainer *t, int param, int shard, int64_t first, int64_t count);
/* Copies *d to *out, with zeros replaced by the defaults that they mean. */
HPML_API void          hpml_trainer_desc_resolve(const hpml_trainer_desc *d, hpml_trainer_desc *out);
/* Computes the bytes that hpml_trainer_create with this desc would allocate, without allocating tensors. */
HPML_API hpml_status   hpml_trainer_memory(hpml_ctx *ctx, const hpml_trainer_desc *desc, hpml_memory *out);
HPML_API hpml_graph   *hpml_trainer_graph(hpml_trainer *t);
HPML_API const hpml_trainer_desc *hpml_trainer_settings(const hpml_trainer *t); /* with defaults in */

typedef struct hpml_step_info {
    int64_t  step;               /* updates of this trainer, this one included */
    int64_t  epoch;              /* number of the epoch, from 0 */
    int64_t  epoch_step, epoch_steps; /* in fit: batches of this epoch, this one included; batches of an epoch */
    float    loss;               /* mean over the samples of this step */
    float    accuracy;           /* 0 to 1, of this step's samples in training; -1: loss is not CROSS_ENTROPY */
    float    lr;                 /* learning rate of this update */
    float    grad_norm;          /* norm of all gradients, unclipped; -1 without clip_norm and dynamic loss scale */
    bool     skipped;            /* a gradient overflowed: no update was made, and the loss scale is halved */
    int64_t  samples;            /* of this step */
    double   seconds;            /* seconds since the start of fit; without fit, of this step */
    double   samples_per_second; /* since the start of fit; 0 without fit */
} hpml_step_info;
typedef int hpml_step_fn(const hpml_step_info *info, void *user); /* returns not 0: fit stops with HPML_ERR_STOPPED */

/* Trains on one micro-batch in host memory: x and y have `samples` samples (1 to the input's batch) in the dtypes of
   input and target (I32 labels for cross-entropy). Every accumulate-th call (hpml_trainer_desc.accumulate) updates the
   parameters. info may be NULL. */
HPML_API hpml_status hpml_trainer_step(hpml_trainer *t, const void *x, const void *y, int64_t samples,
                                       hpml_step_info *info);

typedef struct hpml_metrics {
    double   loss;      /* mean over the samples */
    double   accuracy;  /* 0 to 1; -1 if the loss is not CROSS_ENTROPY */
    int64_t  samples;
    int64_t *confusion; /* in: NULL, or (classes, classes) counts to add to; row: label, column: prediction */
    double   seconds;
} hpml_metrics;

typedef struct hpml_dataset hpml_dataset;
typedef struct hpml_loader  hpml_loader;
struct hpml_loader_desc;
typedef struct hpml_fit_desc {
    uint32_t      _begin;
    int32_t       epochs;                  /* 0: 1 */
    const struct hpml_loader_desc *loader; /* batch, shuffling, augmentation; NULL: shuffled with the context's seed */
    hpml_step_fn *on_step;                 /* callback after each batch, or NULL */
    void         *user;                    /* passed to on_step */
    int64_t       max_steps;               /* most updates of this call; 0: no limit */
    uint32_t      _end;
} hpml_fit_desc;
/* Trains on whole epochs of a data set; continues an earlier fit, or a checkpoint of one, that stopped inside an epoch.
   d NULL: one epoch. */
HPML_API hpml_status hpml_trainer_fit(hpml_trainer *t, hpml_dataset *data, const hpml_fit_desc *d);
/* Computes loss and accuracy over all samples in evaluation mode; the last batch may be short. In evaluate and predict
   a NaN or infinite loss or output is HPML_ERR_NONFINITE and the error names the sample, except with
   no_finite_check. Where each rank keeps only a part of the parameters' values (hpml_param.shard 3), all ranks must
   make the same calls of these functions, because ranks exchange values in them. */
HPML_API hpml_status hpml_trainer_evaluate(hpml_trainer *t, hpml_dataset *data, hpml_metrics *out);
/* Computes the output of `samples` samples of x, host memory in the dtype of the input; there may be more samples than
   in a batch. out: (samples, numbers of an output). In evaluate and predict all ranks of a group work together; each
   gets the whole of an output that is split. */
HPML_API hpml_status hpml_trainer_predict(hpml_trainer *t, const void *x, int64_t samples, float *out);

/* What a trainer is doing when it calls a hook: the kind of pass, the micro-batch, the step. */
typedef enum hpml_pass_kind { HPML_PASS_TRAIN = 0, HPML_PASS_FORWARD, HPML_PASS_BACKWARD, HPML_PASS_EVALUATE,
                              HPML_PASS_UPDATE, HPML_PASS_AGAIN } hpml_pass_kind;
typedef struct hpml_moment {
    hpml_pass_kind   pass;    /* run: TRAIN; update: UPDATE; others: FORWARD, BACKWARD, EVALUATE without training, or
                                 AGAIN for an op that runs forward again within the backward pass (hpml_recompute) */
    int32_t          batch, batches; /* index of the micro-batch in its update, from 0; micro-batches of an update */
    int64_t          step;    /* updates before this one; as batch, that of the last training step in EVALUATE */
    int              param;   /* index in the context of the parameter; -1: none (run, update) */
    const hpml_node *node;    /* need, release: the op that reads the parameter; grad: the op that has added the last
                                 part of its gradient; NULL: none */
} hpml_moment;

/* Callbacks around a step, to which distributed training is attached (hpml_comm.h, or your own strategy). A serial
   trainer has none: all NULL. Each returns HPML_OK, or a status that ends the step. Of several sets of hooks the one
   attached last is outermost: only its `run` and `update` are called, which call those of the next set, and at last
   the trainer's own, by hpml_trainer_run_inner and hpml_trainer_update_inner; the other hooks of all sets are called,
   those attached first before the others.
   run     replaces forward and backward of a micro-batch, to prepare it or to cut it into parts: calls
           hpml_trainer_run_inner, or hpml_trainer_forward_backward for the parts that this rank computes, with
           `accumulate` set if at->batch > 0, and sets *loss
   need    before an op reads the value of a parameter, forward and backward: to fetch the parameter, or to wait for it
   release after an op has read the value of a parameter for the last time in a pass
   grad    when the gradient of a parameter is final for this update (in the last micro-batch), in reverse order of
           recording: to start its communication, which then overlaps the rest of the backward pass. A device that
           replays passes runs them in up to 8 parts, and grad is called at the end of a part
   update  replaces hpml_trainer_apply for all parameters: waits for the communication in flight, then calls
           hpml_trainer_update_inner, or hpml_trainer_apply for the parameters that are stepped on this rank
   free    destructor of `user`: called when the hooks are detached, and by hpml_ctx_free
   sum     adds up n numbers over all ranks, for statistics of the global batch (batchnorm), in forward and backward
           passes of training; called in the same order on all ranks, also on a rank that computes 0 samples
   data    before the first batch of a fit that takes this rank's part of the data; `mark` is a hash of the data, their
           order and the epochs to come: if it is the same on all ranks, the ranks' parts are disjoint and complete
   pass    replaces the passes through the graph inside hpml_trainer_forward_backward, and in evaluate and predict (then
           at->pass is EVALUATE, grad_scale 0, loss NULL in predict), to run parts of the graph (hpml_graph_part) by
           hpml_trainer_forward and hpml_trainer_backward; sets *loss to the mean of these samples on every rank, and
           in evaluate and predict their rows of hpml_trainer_output. Only one set of hooks may have it
   norms   adds up `sums`, an array of shape (parameters of the context, each), over all ranks that have parts of the
           model; on entry it has the sums of squares of the parts that this rank keeps: for clip_norm, LARS, LAMB,
           .prepare and .layer_ratio, before the step of hpml_trainer_apply, which all ranks then call alike
   join    fills in the array `which` of parameter `param`: on entry `whole` has the part that this rank keeps, in its
           place; on return also the parts of all other ranks, which call it alike
   next    returns which batch a fit that takes this rank's part of the data computes next, counted over all epochs of
           `batches` batches; below 0: the fit's epoch ends, or an error is on the context. is_last: the epoch is the
           last one of this fit */
typedef hpml_status hpml_hook_fn(void *user, hpml_trainer *t, const hpml_moment *at);
typedef struct hpml_hooks {
    void *user;
    hpml_status (*run)(void *user, hpml_trainer *t, const hpml_moment *at, int64_t samples, float *loss);
    hpml_hook_fn *need, *release, *grad, *update;
    void (*free)(void *user);
    hpml_status (*sum)(void *user, hpml_trainer *t, double *values, int64_t n);
    hpml_status (*data)(void *user, hpml_trainer *t, uint64_t mark);
    int64_t (*next)(void *user, hpml_trainer *t, int64_t epoch, int64_t batches, bool is_last);
    hpml_status (*pass)(void *user, hpml_trainer *t, const hpml_moment *at, int64_t first, int64_t samples,
                        float grad_scale, bool accumulate, float *loss);
    hpml_status (*norms)(void *user, hpml_trainer *t, double *sums, int64_t each);
    hpml_status (*join)(void *user, hpml_trainer *t, int param, int which, float *whole); /* which: an hpml_array */
} hpml_hooks;
#define HPML_MAX_HOOKS 8 /* sets of hooks of a trainer */
/* For hooks `need` that fetch parameters ahead of time: returns the op that runs in the same pass after the present one
   or, if called with the same *place again, after the one returned before; NULL: no op follows. *place: 0 at first */
HPML_API const hpml_node *hpml_graph_ahead(const hpml_graph *g, int *place);
HPML_API hpml_status hpml_trainer_attach(hpml_trainer *t, const hpml_hooks *hooks); /* copies *hooks */
/* Returns the sets of hooks that are attached, the innermost first; *count: how many. */
HPML_API const hpml_hooks *hpml_trainer_hooks(const hpml_trainer *t, int *count);
/* Detaches the sets of hooks with this `user`, those attached last first. Not from within a hook. */
HPML_API void        hpml_trainer_detach(hpml_trainer *t, const void *user);
/* Within a hook `run`, once for each call, and within a hook `update`: run what this hook replaces. The trainer's own
   run weighs micro-batches by their samples (.accumulate), its own update is hpml_trainer_apply for all parameters. */
HPML_API hpml_status hpml_trainer_run_inner(hpml_trainer *t, int64_t samples, float *loss);
HPML_API hpml_status hpml_trainer_update_inner(hpml_trainer *t);
/* Runs forward and backward on samples [first, first + samples) of the micro-batch that is in the inputs; gradients are
   multiplied by grad_scale, and added to the present ones if `accumulate`. loss, if not NULL, receives the mean loss.
   samples 0: gradients become zero, and the hooks are called as on other ranks. */
HPML_API hpml_status hpml_trainer_forward_backward(hpml_trainer *t, int64_t first, int64_t samples, float grad_scale,
                                                   bool accumulate, float *loss);
/* The two halves of hpml_trainer_forward_backward, for a hook `pass`. A slot is a set of activations of one part of the
   graph (hpml_graph_part); without parts, slot is 0. forward runs the ops of the slot's part on samples [first, first +
   samples) of the batch, which with parts it copies to this slot's inputs, so that passes on other slots, and of other
   batches, may come before the slot's backward pass. loss, if not NULL, receives the mean loss of these samples; 0 if
   the loss is not computed in this part. Random masks are those of the samples in a pass over the whole batch. backward
   goes back through the slot's last forward pass. accumulate: adds to the gradients of parameters; else overwrites
   those of the slot's ops. last: this pass makes these gradients final, and calls the hooks `grad`, unless
   further micro-batches of .accumulate follow. */
HPML_API hpml_status hpml_trainer_forward(hpml_trainer *t, int slot, int64_t first, int64_t samples, float *loss);
HPML_API hpml_status hpml_trainer_backward(hpml_trainer *t, int slot, float grad_scale, bool accumulate, bool last);
/* One half of backward, for a graph of hpml_graph_halves; pass both halves the same numbers. */
HPML_API hpml_status hpml_trainer_backward_half(hpml_trainer *t, int slot, hpml_half half, float grad_scale,
                                                bool accumulate, bool last);
/* For hooks, while evaluate or predict runs a graph that is cut into parts: returns the array, in host memory of every
   rank, for the output of the whole batch; hpml_trainer_forward fills the array on the rank that computes the output.
   *floats: floats of a sample. Returns NULL at other times. */
HPML_API float *hpml_trainer_output(hpml_trainer *t, int64_t *floats);
/* Clips the gradients and steps parameters first_param .. first_param + param_count - 1, as far as they exist. */
HPML_API hpml_status hpml_trainer_apply(hpml_trainer *t, int first_param, int param_count);
/* Steps floats first .. first + count - 1 of the arrays of hpml_trainer_array alone, with gradients times grad_scale
   (1: as they are). Ranges that together cover the arrays give the bits of hpml_trainer_apply. clip_norm takes the norm
   of the whole array of gradients, once in a step; weight decay, lr_scale and frozen are those of each parameter. An
   error for optimizers that step whole tensors: LARS, LAMB, own ones with prepare, layer_ratio or whole. */
HPML_API hpml_status hpml_trainer_apply_range(hpml_trainer *t, int64_t first, int64_t count, float grad_scale);
/* Returns the values, the gradients, or state i (hpml_optimizer.states) of all trained parameters as one array in the
   backend's memory: parameters in order of recording, each padded to a multiple of HPML_GRADIENT_ALIGN floats with
   zeros, which stay zeros in sums over ranks and in steps. hpml_trainer_place: the index of the float where parameter
   `param` begins in each of these arrays; -1: not trained. *floats: the array's length. Returns NULL if the optimizer
   has no such state or, with an error that names a parameter, if the values are not one array: parameters lie in the
   order of recording, the trained ones first, but only parameters that got memory at the same time, and a parameter
   that was frozen afterwards, or on which the loss does not depend, leaves a gap. GRADIENTS: after this call `grad` of
   each parameter points to its place in the array. With .host_optimizer states are in host memory. Where ranks keep
   only parts of an array (hpml_trainer_keep), the returned array has the parts that this rank keeps, one behind the
   other, each padded. */
#define HPML_GRADIENT_ALIGN 16
typedef enum hpml_array { HPML_ARRAY_VALUES = 0, HPML_ARRAY_GRADIENTS, HPML_ARRAY_STATE, /* STATE + i: state i */
                          HPML_ARRAY_END = HPML_ARRAY_STATE + HPML_MAX_STATES } hpml_array;
HPML_API float  *hpml_trainer_array(hpml_trainer *t, hpml_array which, int64_t *floats);
/* Writes the array `which` of one parameter to host memory, whole (hpml_param_whole), from the parts that ranks have:
   shards, blocks of split dimensions, the rank of a pipeline that has the parameter. If any rank has not the whole, all
   ranks of all groups call this together, and all get the whole; an error of one of them is an error on all. */
HPML_API hpml_status hpml_trainer_collect(hpml_trainer *t, int param, hpml_array which, float *whole);
HPML_API int64_t hpml_trainer_place(const hpml_trainer *t, int param);
/* Returns the address of the part that this rank keeps of an array of a trained parameter. This part begins with float
   hpml_param.keep_first of the array, or float 0 if the rank keeps the whole array. With hpml_param.shard 2 and 3 the
   parameter's field `grad`, with 3 also its field `data`, which point to whole arrays, are NULL except where hooks
   `need` set them for the ops that follow. */
HPML_API float  *hpml_trainer_part(hpml_trainer *t, int param, hpml_array which);
/* Before the trainer's memory is allocated: reserves `floats` floats for hooks that hold whole VALUES or GRADIENTS for
   a time. They count as parameters or gradients in hpml_memory; *memory gets their address when they are allocated. */
HPML_API hpml_status hpml_trainer_reserve(hpml_trainer *t, hpml_array which, int64_t floats, float **memory);
/* Sets which part of each global batch fit reads on this rank, and the global batch (samples) that lr_rule uses; rank,
   ranks and grain as in hpml_loader_desc. rank = ranks: none, because this rank computes nothing (a server). */
HPML_API hpml_status hpml_trainer_set_shard(hpml_trainer *t, int rank, int ranks, int64_t global_batch, int64_t grain);
/* Adds `count` floats in the backend's memory to the trainer's checkpoints (a residual, state of a strategy); replaces
   an earlier array of that name, values NULL: removes it. Until then the memory must stay valid. */
HPML_API hpml_status hpml_trainer_add_state(hpml_trainer *t, const char *name, float *values, int64_t count);
HPML_API int64_t     hpml_trainer_step_count(const hpml_trainer *t); /* updates until now */
HPML_API void        hpml_trainer_set_step(hpml_trainer *t, int64_t step); /* for hooks that step on others' behalf */
HPML_API float       hpml_trainer_lr(const hpml_trainer *t);         /* learning rate of the next update */

// ---------------------------------------------------------------------------------------------------------------------
// >>api-data   datasets, readers, the loader
// ---------------------------------------------------------------------------------------------------------------------
/* Samples in host memory. The dataset owns its arrays and frees them; a slice uses those of its dataset. */
struct hpml_dataset {
    hpml_ctx   *ctx;
    int64_t     count;                  /* samples */
    hpml_dtype  x_dtype;                /* U8, F32 or I32 */
    int         x_ndim;                 /* of one sample */
    int64_t     x_shape[HPML_MAX_DIMS]; /* of one sample: (C, H, W) for images */
    const void *x;                      /* array of shape (count, x_shape) */
    hpml_dtype  y_dtype;                /* I32: class labels; F32: targets */
    int64_t     y_size;                 /* numbers of y for one sample */
    const void *y;                      /* (count, y_size), NULL: unlabelled */
    int         classes;                /* 1 + largest label; 0 when y is not labels */
    float       x_scale, x_shift;       /* loaders convert U8 to x * x_scale + x_shift; 1/255, 0 at first; may be set */
    int32_t     x_crop;                 /* side to which loaders crop images, set by you; 0: none; see hpml_augment */
    int64_t     x_step;                 /* elements of x from one sample to the next; 0: a sample's size; text: 1 */
    int64_t     y_step;                 /* elements of y from one sample to the next; 0: y_size */
    void       *owner;                  /* private */
};

/* Readers return NULL on failure, with an error on the context. They trust no file: one that is truncated, oversized,
   random or of another format ends in an error that names the place and what was expected there; pipes, devices and
   folders are refused. They copy the data and allocate at most four times the file's (decompressed) size and 1 MB. */
/* Reads images and labels in MNIST's IDX format; gzipped files need HPML_USE_ZLIB. */
HPML_API hpml_dataset *hpml_dataset_load_idx(hpml_ctx *ctx, const char *images, const char *labels);
/* Reads `count` files of CIFAR-10's binary version into one dataset of (3, 32, 32) pixels. */
HPML_API hpml_dataset *hpml_dataset_load_cifar10(hpml_ctx *ctx, const char *const *paths, int count);
/* Reads numbers (also the labels) separated by `,` `;` or tabs, each rounded to the nearest float in any locale. The
   first line is a header if no field is a number. Errors name the line, the column and the column's name in the header.
   label_column: index from 0; negative: from the end (-1 the last); HPML_NO_LABEL: there are no labels. regression: the
   label is a float target, not the number of a class. */
#define HPML_NO_LABEL INT32_MIN
HPML_API hpml_dataset *hpml_dataset_load_csv(hpml_ctx *ctx, const char *path, int32_t label_column, bool regression);
/* Reads text as tokens: x of a sample is `context` characters, y the same characters shifted by one. bytes: the
   vocabulary is all 256 bytes; else the bytes that occur, in ascending order (see hpml_dataset_vocabulary). */
HPML_API hpml_dataset *hpml_dataset_load_text(hpml_ctx *ctx, const char *const *paths, int count, int64_t context,
                                              bool bytes);
HPML_API const unsigned char *hpml_dataset_vocabulary(const hpml_dataset *d, int *size); /* of text: each token's
                                                                                            byte */
/* Creates a dataset from arrays in memory, which are copied; y NULL: unlabelled. */
HPML_API hpml_dataset *hpml_dataset_create(hpml_ctx *ctx, int64_t count, hpml_dtype x_dtype, int x_ndim,
                                           const int64_t *x_shape, const void *x, hpml_dtype y_dtype, int64_t y_size,
                                           const void *y);
HPML_API hpml_dataset *hpml_dataset_slice(hpml_dataset *d, int64_t first, int64_t count); /* d must outlive the slice */
HPML_API void          hpml_dataset_free(hpml_dataset *d); /* optional: hpml_ctx_free frees datasets, too */

/* Loads and saves numpy's .npy files: f32, f16, i32, u8 in C order. Loading accepts versions 1 to 3 and converts f64 to
   f32 and i64 to i32 (an error if a number is out of range). Saving writes version 1. */
HPML_API hpml_tensor *hpml_npy_load(hpml_ctx *ctx, const char *path);
HPML_API hpml_status  hpml_npy_save(const hpml_tensor *t, const char *path);

/* A file of records: many small byte strings with an index, read through mmap (the role of LMDB in Caffe).
   Little-endian: "HPMLREC1", count u64, offset of the index u64, the records, the index: count + 1 offsets u64. While
   it is open no program may truncate the file, because reading the missing part kills this process (SIGBUS). */
typedef struct hpml_records_writer hpml_records_writer;
typedef struct hpml_records_file   hpml_records_file;
HPML_API hpml_records_writer *hpml_records_create(hpml_ctx *ctx, const char *path);
HPML_API hpml_status          hpml_records_add(hpml_records_writer *w, const void *bytes, size_t size);
HPML_API hpml_status          hpml_records_finish(hpml_records_writer *w);  /* completes the file; frees w */
HPML_API void                 hpml_records_abandon(hpml_records_writer *w); /* discards the file; frees w */
HPML_API hpml_records_file   *hpml_records_open(hpml_ctx *ctx, const char *path);
HPML_API int64_t              hpml_records_count(const hpml_records_file *f);
/* Returns the bytes of a record, valid until f is closed; *size (may be NULL) is their number. */
HPML_API const void          *hpml_records_get(const hpml_records_file *f, int64_t index, size_t *size);
HPML_API void                 hpml_records_close(hpml_records_file *f);
/* Save a dataset's samples as records, and load them (the first record holds the shapes). */
HPML_API hpml_status   hpml_dataset_save_records(const hpml_dataset *d, const char *path);
HPML_API hpml_dataset *hpml_dataset_load_records(hpml_ctx *ctx, const char *path);

/* Image augmentation, random by (seed, epoch, sample). All fields zero: none. With hpml_dataset.x_crop = k, images (..,
   H, W) are first cropped to (.., k, k): at a random place; with in_order and in evaluation, in the middle. */
typedef struct hpml_augment {
    int32_t shift;  /* shift by up to this many pixels in each direction, filled with zeros (as padding and cropping) */
    bool    flip;   /* mirror left to right with probability 1/2 */
    int32_t cutout; /* side of a random square that is set to zero, in pixels */
} hpml_augment;

typedef struct hpml_loader_desc {
    uint32_t     _begin;
    int32_t      batch;      /* samples per batch of this rank; required (fit: 0 = the trainer's) */
    bool         in_order;   /* samples are not shuffled */
    bool         drop_last;  /* skip a last batch that is not full */
    bool         no_prefetch; /* prepare batches in the caller's thread instead of a background thread; same batches */
    uint64_t     seed;       /* seed of order and augmentation; 0: the context's */
    int32_t      rank, ranks; /* this rank takes shard number `rank` of each global batch; ranks 0: 1 (in fit: set by
                                 hpml_distribute). If each rank already has only its own part of the data: 0 and 1 */
    int64_t      global_batch; /* samples of all ranks; 0: ranks * batch. Shards are near-equal, at most `batch` */
    int64_t      grain;        /* samples that stay together on one rank (a leaf of hpml_comm.h's exact mode); 0: 1 */
    int64_t      samples_per_epoch; /* 0: all of the data; more than the data: they are shuffled again each round */
    hpml_augment augment;
    uint32_t     _end;
} hpml_loader_desc;

typedef struct hpml_batch {
    const void *x;        /* (samples, ...) f32 (U8 pixels already scaled) or i32 tokens; valid until the next call */
    const void *y;        /* (samples, y_size) or NULL */
    int64_t     samples;  /* samples of this rank; fewer, or 0, in the last global batch */
    int64_t     global_samples; /* samples of all ranks: the divisor of a mean */
    int64_t     first;    /* offset of this rank's first sample in the global batch */
    int64_t     index;    /* number of the batch in its epoch, from 0 */
} hpml_batch;

/* Creates a loader. Seed and epoch alone give the order of the samples, a random permutation. */
HPML_API hpml_loader *hpml_loader_create(hpml_ctx *ctx, hpml_dataset *d, const hpml_loader_desc *desc);
HPML_API int64_t      hpml_loader_steps(const hpml_loader *l); /* batches of an epoch, the same on every rank */
HPML_API hpml_status  hpml_loader_seek(hpml_loader *l, int64_t epoch, int64_t index); /* sets the next batch */
/* Returns the next batch. False: an error, or the end of an epoch; then the next call begins the next epoch. */
HPML_API bool         hpml_loader_next(hpml_loader *l, hpml_batch *out);
HPML_API void         hpml_loader_free(hpml_loader *l);

// ---------------------------------------------------------------------------------------------------------------------
// >>api-save   safetensors and checkpoints
// ---------------------------------------------------------------------------------------------------------------------
/* safetensors files: 8-byte length, JSON header, data. As every file of this library, such a file is written to
   `path`.tmp, synced and renamed, and its folder is synced: if the process is killed at any moment, `path` is the old
   file or the new one, complete. An old file's permissions are kept; a symbolic link is resolved. Only .npy files and
   timelines can be written to a pipe. Reading accepts the headers that the format's reference implementation accepts,
   except names that contain a NUL; tensors of other dtypes, size 0 or more than HPML_MAX_DIMS dimensions are
   skipped. */
typedef struct hpml_safetensors hpml_safetensors; /* an open, mapped file: no program may truncate it (SIGBUS) */
typedef struct hpml_safetensor {                  /* one tensor of a file */
    const char *name;
    hpml_dtype  dtype;
    int         ndim;
    int64_t     shape[HPML_MAX_DIMS];
    const void *data; /* when read: in the mapped file, valid until it is closed; may be unaligned for dtype */
    size_t      bytes;
} hpml_safetensor;
HPML_API hpml_safetensors *hpml_safetensors_open(hpml_ctx *ctx, const char *path);
HPML_API int               hpml_safetensors_count(const hpml_safetensors *f);
HPML_API bool              hpml_safetensors_at(const hpml_safetensors *f, int index, hpml_safetensor *out);
HPML_API bool              hpml_safetensors_find(const hpml_safetensors *f, const char *name, hpml_safetensor *out);
HPML_API const char       *hpml_safetensors_meta(const hpml_safetensors *f, const char *key); /* NULL: none */
HPML_API void              hpml_safetensors_close(hpml_safetensors *f);
typedef struct hpml_meta { const char *key, *value; } hpml_meta;
HPML_API hpml_status hpml_safetensors_save(hpml_ctx *ctx, const char *path, const hpml_safetensor *tensors, int count,
                                           const hpml_meta *meta, int meta_count);

/* Saves all parameters under their names, as F32, BF16 or F16, with a CRC-32C of each array as metadata
   "hpml.crc32c.<name>". Loading checks the checksums that a file has, and that all numbers are finite.
   Groups: of the ranks that call this, the one with rank 0 in all groups writes. Files have whole parameters and
   states, with the bytes that a program on one rank would write: where ranks have parts of them, all ranks save
   together, and an error of one is an error on all. Each rank loads by itself and keeps its part, so a file fits any
   groups. */
HPML_API hpml_status hpml_params_save(hpml_ctx *ctx, const char *path, hpml_dtype dtype);
HPML_API hpml_status hpml_params_load(hpml_ctx *ctx, const char *path); /* all or none; ignores other tensors */

/* Saves all that a training needs to continue with the same bits: parameters, optimizer state, states added by
   hpml_trainer_add_state, step, epoch and position in the data, seed. A checkpoint is a safetensors file: parameters by
   their names, "opt.<state>.<param>" for each hpml_optimizer_state, "state.<name>", metadata "hpml.step",
   "hpml.optimizer" (the optimizer's name) ..., and checksums as in hpml_params_save. */
HPML_API hpml_status hpml_checkpoint_save(hpml_trainer *t, const char *path);
HPML_API hpml_status hpml_checkpoint_load(hpml_trainer *t, const char *path); /* on an error changes nothing */

// ---------------------------------------------------------------------------------------------------------------------
// >>api-see   timeline, profile, summary
// ---------------------------------------------------------------------------------------------------------------------
/* The timeline in Chrome's trace format, for Perfetto: one process for each rank, one lane (thread) for each stream of
   work that has events; steps as spans, loss and bytes sent in each step as counters. Recording an event takes about
   50 ns. */
typedef struct hpml_trace_desc {
    uint32_t _begin;
    int32_t  rank;                  /* process id in the trace */
    int64_t  first_step, last_step; /* steps that are traced, counted from 0; last_step 0: no end */
    int64_t  capacity;              /* events kept, of 72 bytes; older ones are overwritten; 0: 65,536 */
    double   origin;                /* hpml_now() at time 0 of the file, in seconds; 0: at the first event's start */
    bool     arrows;                /* draws arrows from send to receive of collectives' messages: two events each */
    uint32_t _end;
} hpml_trace_desc;
enum { HPML_LANE_COMPUTE = 0, HPML_LANE_COMM, HPML_LANE_IO, HPML_LANE_GPU, HPML_LANE_STEP }; /* lanes of events */
HPML_API hpml_status hpml_trace_start(hpml_ctx *ctx, const hpml_trace_desc *desc);
HPML_API double      hpml_now(void); /* seconds, monotonic */
/* Adds a span; `name` must live as long as the trace. Thread-safe. Without a trace does nothing. */
HPML_API void        hpml_trace_span(hpml_ctx *ctx, int lane, const char *name, double start, double end);
HPML_API bool        hpml_trace_on(const hpml_ctx *ctx); /* true: a trace was started and includes the current step */
typedef enum hpml_trace_kind {
    HPML_TRACE_SPAN = 0,
    HPML_TRACE_STEP,    /* a span with the number of a step */
    HPML_TRACE_COUNTER, /* a point of a curve */
    HPML_TRACE_SEND, HPML_TRACE_RECEIVE /* the two ends of an arrow, each inside a span of its lane */
} hpml_trace_kind;

/* One event. Names must live as long as the trace; their bytes that are not UTF-8 are replaced in the file. */
typedef struct hpml_trace_event {
    hpml_trace_kind kind;
    int         lane;
    const char *name;         /* required */
    double      start, end;   /* seconds of hpml_now; COUNTER, SEND and RECEIVE use only the start */
    const char *first, *last; /* SPAN: first and last tensor sent; last NULL: one tensor; both NULL: none */
    int32_t     bucket;       /* SPAN: number of those tensors' bucket, from 1; 0: none */
    int64_t     number;       /* SPAN: bytes, 0: unknown. STEP: the step. SEND, RECEIVE: an id, equal at both */
    double      value;        /* COUNTER; NaN and infinity are not written */
} hpml_trace_event;
/* Adds a copy of an event. Thread-safe. Without a trace does nothing. */
HPML_API void        hpml_trace_add(hpml_ctx *ctx, const hpml_trace_event *event);
HPML_API hpml_status hpml_trace_save(hpml_ctx *ctx, const char *path);
/* Returns the earliest start of the events that are kept, in seconds from the trace's origin; 0 if there is none. */
HPML_API double      hpml_trace_first(const hpml_ctx *ctx);
HPML_API void        hpml_trace_shift(hpml_ctx *ctx, double seconds); /* adds to the trace's origin */
/* Makes *seconds, instead of hpml_now(), the clock of the trace's spans of layers and updates on the CPU, and returns
   the previous clock; NULL, also as argument: hpml_now(). With another clock than hpml_now() the loader adds no spans.
   hpml_comm.h uses it for virtual time. */
HPML_API const double *hpml_trace_clock(hpml_ctx *ctx, const double *seconds);

/* One layer of a profile; times are sums in seconds over the runs since the profile was enabled. */
typedef struct hpml_profile_row {
    const hpml_node *node;
    const char      *name;              /* the layer's name */
    int64_t          calls;
    double           forward_s, backward_s;
    double           forward_flops, backward_flops; /* operations of one call, a multiply-add counts 2 */
    double           bytes;             /* read and written by one forward call: inputs, output, parameters */
} hpml_profile_row;
HPML_API void hpml_profile_enable(hpml_graph *g, bool on); /* on: starts a profile from zero; else ends it */
/* Copies up to `capacity` layers to rows; returns the number of layers that there are. */
HPML_API int  hpml_profile(const hpml_graph *g, hpml_profile_row *rows, int capacity);
/* Write a table as text to `buffer`, cut off to fit in `size` bytes; return the length of the whole text, as snprintf
   does. */
HPML_API int  hpml_profile_text(const hpml_graph *g, char *buffer, size_t size);
HPML_API int  hpml_summary_text(const hpml_graph *g, char *buffer, size_t size); /* layers, parameters, FLOPs, memory */
HPML_API double hpml_graph_flops(const hpml_graph *g, bool backward); /* operations at full batch */
HPML_API double hpml_node_flops(const hpml_node *n, bool backward);   /* of one op */

// ---------------------------------------------------------------------------------------------------------------------
// >>api-random   counter-based random numbers
// ---------------------------------------------------------------------------------------------------------------------
/* Writes the four words of block `counter` under `key` to out: Philox 4x32-10 (Salmon et al. 2011), a keyed bijection
   of 128-bit counters, so that any thread, rank or device computes any part of a sequence directly, with the same bits
   on every instruction set. Not for cryptography. */
HPML_API void hpml_philox4x32(const uint32_t key[2], const uint32_t counter[4], uint32_t out[4]);

/* A position in a sequence: number `counter` of stream `stream` of `seed`. Set the fields freely; all zero is valid.
   Word i is word i % 4 of Philox block i / 4 under the key (seed low, seed high) with the counter (block low, block
   high, stream low, stream high). A function returns the number at `counter` and adds 1 to counter; a fill of n gives
   the n numbers of single calls and adds n. */
typedef struct hpml_rng {
    uint64_t seed, stream, counter;
} hpml_rng;
HPML_API uint32_t hpml_rng_u32(hpml_rng *r);
HPML_API float    hpml_rng_uniform(hpml_rng *r); /* [0, 1): a multiple of 2^-24 */
HPML_API float    hpml_rng_normal(hpml_rng *r);  /* mean 0, variance 1, |x| < 6.8 (Box & Muller 1958) */
HPML_API int64_t  hpml_rng_below(hpml_rng *r, int64_t n); /* [0, n), unbiased; draws 1 or more words; 0 for n < 1 */
HPML_API void     hpml_rng_fill_u32(hpml_rng *r, uint32_t *x, int64_t n);
HPML_API void     hpml_rng_fill_uniform(hpml_rng *r, float *x, int64_t n);
HPML_API void     hpml_rng_fill_normal(hpml_rng *r, float *x, int64_t n);

/* Returns element i of a random permutation of [0, n), a different one for each seed and epoch; -1 if i is not in [0,
   n). Takes no memory and about 40 ns, so each rank computes its own part of a shuffle. */
HPML_API int64_t hpml_permute_index(uint64_t seed, uint64_t epoch, int64_t n, int64_t i);

// ---------------------------------------------------------------------------------------------------------------------
// >>api-codec   gradients packed for the wire: plain, bf16, 1-bit with error feedback
// ---------------------------------------------------------------------------------------------------------------------
/* A codec packs a gradient g in fewer bytes and adds what packing lost, the residual e, to the next step's gradient:
       v = g + e,   packed = encode(v),   e <- v - decode(packed)
   so that the sum of all packed gradients plus e is the sum of all gradients. Packing works on bare arrays, needs no
   context or model and allocates nothing. A gradient is (rows, cols), row-major: a weight of shape (out, ...) has
   rows = out and cols = fan-in, a vector rows = 1. Codecs pack row by row, independently: rows [r0, r1) are the bytes
   [r0 * row_size, r1 * row_size), in however many calls they are packed, and the same bytes on every instruction set.
   Packed forms, little-endian, nothing between rows:
     NONE    cols x f32
     BF16    cols x bf16, rounded to nearest even
     ONEBIT  f32 low, f32 high, then ceil(cols / 32) x 4 bytes of bits: element i is bit i % 8 of byte i / 8, set for
             `high`; the unused last bits are 0
     TWOBIT  ceil(cols / 16) x 4 bytes: element i is the bits 2 (i % 4) of byte i / 4: 3 for +threshold, 2 for
             -threshold, 0 for nothing (as MXNet does; tune the threshold to the size of the gradients)
   Two codecs work on whole tensors and on all ranks together, so only exchanges (hpml_comm.h) execute them:
     TOPK    the largest numbers, as pairs of place and value; the rest stays in the residual (Lin et al. 2018, Deep
             Gradient Compression)
     LOWRANK P Q^T of a given rank, P and Q being thin matrices (Vogels et al. 2019, PowerSGD) */
typedef enum hpml_codec_kind {
    HPML_CODEC_UNKNOWN = -1, /* hpml_codec_find: no codec has this name */
    HPML_CODEC_NONE = 0, HPML_CODEC_BF16, HPML_CODEC_ONEBIT, HPML_CODEC_TWOBIT, HPML_CODEC_TOPK, HPML_CODEC_LOWRANK,
    HPML_CODEC_COUNT /* the number of codecs */
} hpml_codec_kind;
#define HPML_CODEC_MIN_ELEMENTS 256
typedef struct hpml_codec hpml_codec; /* a table of functions, below */

typedef struct hpml_codec_desc {
    uint32_t          _begin;
    hpml_codec_kind   kind;
    const hpml_codec *custom;       /* your own codec instead of `kind`; NULL: none. Not copied: it must live on */
    void             *user;         /* passed to your own codec as p->desc.user */
    float             threshold;    /* TWOBIT: smaller numbers are not sent; 0: 0.5 */
    float             ratio;        /* TOPK: fraction of the numbers that is sent; 0: 0.01 */
    float             momentum;     /* TOPK: momentum correction; the optimizer must then have no momentum */
    int32_t           lowrank;      /* LOWRANK: the rank of P Q^T; 0: 2 */
    int64_t           min_elements; /* all but NONE and BF16: smaller tensors and vectors are sent as NONE; 0: 256 */
    bool              compress_all; /* vectors and small tensors are packed too, except those that would grow */
    bool              no_feedback;  /* no residual: fine for BF16; for ONEBIT only an experiment that must fail */
    uint64_t          seed;         /* of codecs that round at random; 0: in an exchange the context's */
    uint32_t          _end;
} hpml_codec_desc;

/* How one tensor is packed: the codec, its options with the defaults filled in, and the sizes that follow from the
   tensor's shape; hpml_packing_init computes them once. Read the fields; do not change them. */
struct hpml_packing {
    const hpml_codec *codec;          /* the codec used for this tensor: NONE's if the tensor is exempt */
    hpml_codec_desc   desc;
    int64_t           rows, cols;
    size_t            row_size;       /* bytes of a packed row */
    size_t            size;           /* bytes of all rows: rows * row_size, rounded up to 4 to align what follows */
    int64_t           residual_count; /* floats of the residual: rows * cols or 0. Set them to 0 at the start */
    const struct hpmli_kernels *kernels; /* private */
};

/* Fills *p; desc NULL: NONE. Returns HPML_ERR_SHAPE, HPML_ERR_OVERFLOW or HPML_ERR_ARGUMENT if rows, cols or desc are
   not valid, HPML_ERR_UNSUPPORTED for TOPK and LOWRANK, which do not pack rows. */
HPML_API hpml_status hpml_packing_init(hpml_packing *p, const hpml_codec_desc *desc, int64_t rows, int64_t cols);

/* What encode gets besides the numbers: stochastic rounding takes its random numbers (>>api-random) from these fields,
   so that the same gradients give the same bytes again. */
typedef struct hpml_encode_info {
    int64_t  row;  /* number, in the tensor, of the first row that is packed */
    int64_t  step; /* number of the trainer's step; without a trainer, how often an exchange has run */
    uint64_t seed; /* in exchanges a mix of desc.seed, the tensor and the contribution, so that each seed differs */
} hpml_encode_info;

/* Packs `rows` rows, which may be all or a part of the tensor's rows. packed: rows * row_size bytes, aligned to 4;
   residual, grad: (rows, cols), from the first packed row on; residual is read and updated, NULL: no error feedback.
   The arrays may not overlap. A lossy codec never packs NaN or infinity: a row of grad + residual that has one is
   packed as zeros, its residual becomes zero, the other rows are packed as usual, and the call returns
   HPML_ERR_NONFINITE: skip this step on all ranks. The codec NONE copies rows unchecked. Clip gradients before packing.
   The residual is in the unit of `grad`: neither a sum or mean over ranks nor the learning rate is applied to it. You
   own the residual: save it with the weights (hpml_safetensors_save); zero it when the loss function changes.
   info: for codecs that round at random, which the built-in codecs do not; NULL: zeros. */
HPML_API hpml_status hpml_packing_encode(const hpml_packing *p, void *packed, float *residual, const float *grad,
                                         int64_t rows, const hpml_encode_info *info);
HPML_API void hpml_packing_decode(const hpml_packing *p, float *out, const void *packed, int64_t rows);     /* out = */
HPML_API void hpml_packing_decode_add(const hpml_packing *p, float *out, const void *packed, int64_t rows); /* out += */

/* A built-in codec, or one of your own, to which hpml_codec_desc.custom points. The functions get the desc and the
   tensor's shape in p, and in `rows` a number of rows, all or a part of the tensor's. Several threads call them at the
   same time, with CPU arrays. */
struct hpml_codec {
    const char *name;
    bool        linear;        /* the packed form is f32, and packed sums decode to sums: any allreduce adds it */
    bool        has_residual;  /* encode keeps what it lost in the residual; false: residual is NULL */
    bool        exempts_small; /* vectors and small tensors are sent as NONE */
    bool        whole_tensors; /* TOPK, LOWRANK: do not pack rows, so the functions below are NULL */
    size_t (*row_size)(const hpml_codec_desc *desc, int64_t cols); /* bytes of a packed row */
    hpml_status (*encode)(const hpml_packing *p, void *packed, float *residual, const float *grad, int64_t rows,
                          const hpml_encode_info *info); /* info is never NULL */
    void (*decode)(const hpml_packing *p, float *out, const void *packed, int64_t rows, bool add); /* add: out += */
};
HPML_API const hpml_codec *hpml_codec_get(hpml_codec_kind kind);   /* the codec of a kind; NULL: none */
HPML_API hpml_codec_kind   hpml_codec_find(const char *name);      /* "onebit", ...; else HPML_CODEC_UNKNOWN */

#ifdef __cplusplus
} /* extern "C" */

/* Overloads for C++: a desc may be passed as an object, as in hpml_linear(x, 10, desc). */
#define HPMLI_REF(ret, name, params, args) \
    static inline ret name params { return name args; }
HPMLI_REF(hpml_ctx *, hpml_ctx_create, (const hpml_ctx_desc &d), (&d))
HPMLI_REF(hpml_tensor *, hpml_param_create, (hpml_ctx *c, const hpml_param_desc &d), (c, &d))
HPMLI_REF(hpml_tensor *, hpml_linear, (hpml_tensor *x, int64_t out, const hpml_linear_desc &d), (x, out, &d))
HPMLI_REF(hpml_tensor *, hpml_conv2d, (hpml_tensor *x, int64_t out, const hpml_conv2d_desc &d), (x, out, &d))
HPMLI_REF(hpml_tensor *, hpml_layernorm, (hpml_tensor *x, const hpml_norm_desc &d), (x, &d))
HPMLI_REF(hpml_tensor *, hpml_rmsnorm, (hpml_tensor *x, const hpml_norm_desc &d), (x, &d))
HPMLI_REF(hpml_tensor *, hpml_batchnorm, (hpml_tensor *x, const hpml_norm_desc &d), (x, &d))
HPMLI_REF(hpml_tensor *, hpml_attention, (hpml_tensor *x, const hpml_attention_desc &d), (x, &d))
HPMLI_REF(hpml_graph *, hpml_graph_create, (hpml_ctx *c, const hpml_graph_desc &d), (c, &d))
HPMLI_REF(hpml_trainer *, hpml_trainer_create, (hpml_ctx *c, const hpml_trainer_desc &d), (c, &d))
HPMLI_REF(hpml_status, hpml_trainer_fit, (hpml_trainer *t, hpml_dataset *s, const hpml_fit_desc &d), (t, s, &d))
HPMLI_REF(hpml_loader *, hpml_loader_create, (hpml_ctx *c, hpml_dataset *s, const hpml_loader_desc &d), (c, s, &d))
#undef HPMLI_REF
#endif

/* All code but kernels is between these macros, which turn off six optimization passes of gcc, because without these
   passes gcc compiles the code in two thirds of the time. */
#if defined(__GNUC__) && !defined(__clang__) && !defined(__CUDACC__)
#define HPMLI_COMPILE_FAST_BEGIN                                                                                       \
    _Pragma("GCC push_options") _Pragma("GCC optimize(\"no-tree-pre,no-tree-vrp,no-tree-dominator-opts\")")            \
    _Pragma("GCC optimize(\"no-thread-jumps,no-gcse,no-schedule-insns2\")")
#define HPMLI_COMPILE_FAST_END _Pragma("GCC pop_options")
#else
#define HPMLI_COMPILE_FAST_BEGIN
#define HPMLI_COMPILE_FAST_END
#endif
#endif /* HPML_H_INCLUDED: stop here if you only want the API */

#if defined(__INTELLISENSE__) || defined(__JETBRAINS_IDE__) || defined(__CLANGD__) /* shown in editors */
#define HPMLI_EDITOR
#ifndef HPML_IMPLEMENTATION
#define HPML_IMPLEMENTATION
#endif
#endif

#ifdef HPML_IMPLEMENTATION
#if defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__
#error "compile this file without -ffast-math or -Ofast: hpml tests for NaN and infinity, which these options exclude"
#endif
#ifdef __CUDACC__ /* nvcc warns of gcc's pragma that unrolls loops, but passes it on to gcc */
#pragma nv_diagnostic push
#pragma nv_diag_suppress 1675
#endif
#ifndef HPMLI_ISA /* the implementation, once; with HPMLI_ISA only kernels are compiled, see PART VII */
#ifndef HPMLI_BODY_INCLUDED
#define HPMLI_BODY_INCLUDED

// =====================================================================================================================
// PART II   CONTEXTS: memory, threads, random numbers
// =====================================================================================================================

// ---------------------------------------------------------------------------------------------------------------------
// >>platform   compilers, system headers, macros
// ---------------------------------------------------------------------------------------------------------------------
#ifndef __GNUC__
#error "hpml.h: the implementation needs gcc or clang; the declarations compile with any compiler"
#endif
#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "hpml.h: big-endian machines are not supported, because its files and messages are little-endian"
#endif

#if !defined(HPML_NO_SIMD) && defined(__x86_64__)
#define HPMLI_HAVE_X86
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define HPMLI_HAVE_AVX512
#endif
#ifndef HPML_NATIVE /* kernels for both instruction sets, whatever the compiler's options allow */
#undef  HPMLI_HAVE_AVX512
#define HPMLI_HAVE_AVX512
#endif
#if !defined(HPML_NATIVE) || !defined(HPMLI_HAVE_AVX512)
#define HPMLI_HAVE_AVX2
#endif
#if !defined(__clang__) /* gcc 12 warns, as C++, about "undefined" vectors in its own header */
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#if !defined(__clang__)
#pragma GCC diagnostic pop
#endif
#elif !defined(HPML_NO_SIMD) && defined(__aarch64__)
#define HPMLI_HAVE_NEON
#include <arm_neon.h>
#endif

/* System headers are included here, once, before the kernel passes include this file again. */
#include <errno.h>
#include <float.h>
#include <limits.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#if defined(__unix__) || defined(__APPLE__)
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <unistd.h>
#define HPMLI_POSIX   1
#define HPMLI_PROCESS (long)getpid() /* id of this process */
#else
#define HPMLI_PROCESS 0
#endif
#include <time.h>
#ifndef HPML_NO_THREADS
#include <pthread.h>
#include <sched.h>
#if defined(__linux__) && defined(_DEFAULT_SOURCE)
#include <sys/syscall.h>
#define HPMLI_AFFINITY 1
#endif
#endif
#ifdef HPML_USE_CBLAS
#include <cblas.h>
#define HPMLI_BLAS true
#else
#define HPMLI_BLAS false
#endif

/* True if a is to replace b as the largest value, in a way that keeps NaN: a NaN in b stays, and a NaN in a replaces a
   number in b. */
#define HPMLI_MAX_OR_NAN(a, b) (!((a) <= (b)) && (b) == (b))
#define HPMLI_FN     static __attribute__((unused))
#define HPMLI_UNUSED __attribute__((unused))
#define HPMLI_PRINTF(text, args) __attribute__((format(printf, text, args)))

/* Initializes a struct with zeros, as in T x = HPMLI_ZEROED; an empty list in C++, { 0 } in C. */
#ifdef __cplusplus
#define HPMLI_ZEROED {}
#else
#define HPMLI_ZEROED { 0 }
#endif

/* Checks internal assumptions, never a caller's mistakes; compiled with HPML_DEBUG only. */
#ifndef HPML_ASSERT
#ifdef HPML_DEBUG
#include <assert.h>
#define HPML_ASSERT(condition) assert(condition)
#else
#define HPML_ASSERT(condition) do { } while (0)
#endif
#endif
#ifdef HPML_USE_ZLIB
#include <zlib.h>
#endif

HPMLI_COMPILE_FAST_BEGIN

// ---------------------------------------------------------------------------------------------------------------------
// >>kernels   the table of kernels: what each computes, and the structs that they take
// ---------------------------------------------------------------------------------------------------------------------
/* Describes `batch` matrix products C = act(alpha A B + beta C + bias), see >>gemm. Strides, in elements, lead to the
   next row (a_row, b_k, ldc) and the next column (a_k, b_col), so A and B may be transposed. Zero the struct first. */
typedef struct hpmli_gemm_desc {
    int64_t      m, n, k;
    const float *a;             /* (m, k): a[i * a_row + p * a_k] */
    int64_t      a_row, a_k;
    const float *b;             /* (k, n): b[p * b_k + j * b_col] */
    int64_t      b_k, b_col;
    float       *c;             /* (m, n): c[i * ldc + j] */
    int64_t      ldc;
    float        alpha, beta;   /* for beta 0 C is not read, for alpha 0 A and B are not */
    const float *bias_n;        /* (n) numbers added to each row of C, or NULL */
    const float *bias_m;        /* (m) numbers added to each column of C, or NULL */
    int          act;           /* activation: 0 none, 1 relu */
    int64_t      batch;         /* number of products */
    int64_t      a_batch, b_batch, c_batch; /* elements from an array of one product to that of the next */
} hpmli_gemm_desc;

/* A rectangle of C that one thread computes: rows [i0, i1), columns [j0, j1) of product number `batch` of *d. */
typedef struct hpmli_gemm_part {
    const hpmli_gemm_desc *d;
    int64_t                batch, i0, i1, j0, j1;
    float                 *ws; /* packing space of this thread: HPMLI_GEMM_WS floats */
} hpmli_gemm_part;

/* Sizes of blocks of C = A B: MC rows by KC columns of A, copied (packed), stay in the second-level cache while all
   packed columns of B are multiplied by them; NC columns of B stay packed. A large KC touches C less often. */
#define HPMLI_GEMM_KC 800
#define HPMLI_GEMM_MC 168
#define HPMLI_GEMM_NC 1024
#define HPMLI_GEMM_SUMS 65536 /* floats for the partial sums of a product that is cut along k */
#define HPMLI_GEMM_PACKED_A (HPMLI_GEMM_NC * HPMLI_GEMM_KC) /* offset of packed A, behind packed B */
#define HPMLI_GEMM_WS (HPMLI_GEMM_PACKED_A + (HPMLI_GEMM_MC + 16) * (HPMLI_GEMM_KC + 16) + HPMLI_GEMM_SUMS)

/* Pragmas that unroll loops over registers at any optimization level. */
#if defined(__clang__)
#define HPMLI_UNROLL   _Pragma("clang loop unroll(full)")
#define HPMLI_UNROLL_4 /* clang's code is slower with it */
#else
#define HPMLI_UNROLL   _Pragma("GCC unroll 16")
#define HPMLI_UNROLL_4 _Pragma("GCC unroll 4")
#endif

/* The arguments of an optimizer step that are equal for all weights of a parameter, see >>vupdate. */
typedef struct hpmli_opt_args {
    hpml_update u;                         /* the step; for LARS grad_scale and weight_decay include lr */
    float       correction1, correction2;  /* 1 / (1 - beta1^step), 1 / (1 - beta2^step) */
} hpmli_opt_args;
#define HPMLI_PHILOX_CHUNK 64       /* random words that a call makes at once */
#define HPMLI_PHILOX_M0 0xD2511F53u /* multipliers of Philox */
#define HPMLI_PHILOX_M1 0xCD9E8D57u
#define HPMLI_PHILOX_W0 0x9E3779B9u /* added to the key of Philox in each round */
#define HPMLI_PHILOX_W1 0xBB67AE85u
typedef enum hpmli_draw { HPMLI_WORDS, HPMLI_UNIFORM, HPMLI_NORMAL } hpmli_draw; /* the kind of random numbers */
#define HPMLI_ONEBIT_LANES 16   /* elements packed in one step: two bytes of bits */
#define HPMLI_ONEBIT_CHUNK 1024 /* elements whose sum is in float, before it is added in double */

/* Statistics, for the 1-bit codec, of one row of a gradient: index 0 for its elements below zero, 1 for the others. */
typedef struct hpmli_onebit_row {
    double  sum[2];
    int64_t count[2];
    float   least[2], most[2];
} hpmli_onebit_row;

/* A convolution of x to y, see >>conv. Images are NHWC; sizes, distances and steps (to the next element) in floats. */
typedef struct hpmli_conv {
    hpml_ctx  *ctx;
    hpml_node *n;
    int64_t    B, C, H, W, OC, OH, OW; /* C and OC: channels of one group */
    int64_t    groups, taps;           /* taps: height x width of the kernel */
    int64_t    x_pitch;                /* length of a row of the padded image of x */
    int64_t    x_floats;               /* the padded image of x, and memory behind it that a tile may touch */
    int64_t    x_first;                /* offset of the first pixel of the padded image that is not padding */
    int64_t    y_floats;               /* the image of dy, and memory behind it that a tile may touch */
    bool       nhwc;                   /* x and y are NHWC */
    int64_t    x_pixel, y_pixel;       /* distance of pixels in x and y, NHWC; else 1 */
    int64_t    x_row_step;             /* distance in x that belongs to one row of y */
    int64_t    x_pixel_step;           /* distance in x that belongs to one pixel of y */
    int64_t    runs[2];                /* a pixel of y reads runs[0] x runs[1] contiguous runs of x */
    int64_t    run_floats;             /* length of a run in floats */
    int64_t    run_step[2];            /* distances of the runs in x */
    int64_t    band_rows;              /* forward: rows of y that are computed in a buffer before they are stored */
    int64_t    channel_pieces;         /* forward: tasks for one image, each for some channels */
    bool       want_dx, want_dw, want_db;
    int64_t    sums, sum_floats;       /* backward: number and size of partial sums of dw and db */
    int64_t    images_at_once;         /* backward: images whose dw is summed by one product */
    bool       by_channels;            /* backward: dw is summed over all images, in tasks for some channels each */
    float     *all_x, *all_dy, *all_dw; /* by_channels: x and dy of all images in NHWC order; dw as tiles store it */
    int64_t    images_forward;         /* forward: images of a task; above 1 the rows of a tile are a pixel of each */
    float     *packed;                 /* packed weights: (groups, packed_floats) */
    float     *sum_space;              /* partial sums: (sums, sum_floats) */
    float     *thread_space;           /* working memory of threads: (threads, thread_floats) */
    int64_t    packed_floats, thread_floats, scratch_floats; /* scratch: packed, sum_space and thread_space together */
} hpmli_conv;

/* Describes a copy of `rows` rows of `pixels` pixels, `channels` floats of each. to_row, to_pixel, from_row and
   from_pixel: distances in floats from a row or pixel to the next one, in the destination and in the source. */
typedef struct hpmli_conv_copy {
    int64_t rows, pixels, channels, to_row, to_pixel, from_row, from_pixel;
} hpmli_conv_copy;

/* Describes a product C of `rows` rows, each of one or two SIMD vectors, c_row floats apart. Row i of C is the sum,
   over runs u < runs[0] and v < runs[1] and over k < length, of the number a[u * a_run[0] + v * a_run[1] + i * a_row +
   k * a_k] times the vectors at b + u * b_run[0] + v * b_run[1] + k * b_k. add: the sum is added to C. */
typedef struct hpmli_conv_product {
    int64_t rows, a_row, a_k, b_k, c_row, length, runs[2], a_run[2], b_run[2];
    int     add;
} hpmli_conv_product;
#define HPMLI_CONV_TILE_ARGS const hpmli_conv_product *s, const float *a, const float *b, float *c
typedef void hpmli_conv_tile_fn(HPMLI_CONV_TILE_ARGS);
#define HPMLI_CONV_IMAGES 12 /* images that share a load of the weights, where images are small */
#define HPMLI_CONV_NARROW 8  /* images with narrower rows have tiles that go over rows or images */
#define HPMLI_CONV_PIXELS 32 /* pixels whose products with a panel of weights are computed at once */
#define HPMLI_CONV_PANEL 32 /* channels in a task of a convolution; a multiple of HPMLI_NR in every instruction set */

/* The cells of an LSTM at one time step, `units` hidden units of `rows` samples, see hpml_lstm. Arrays begin with the
   numbers of the first of these units, of the first of these samples, at this time step; shapes are of whole arrays. */
typedef struct hpmli_lstm_cells {
    int64_t      rows, units, T, H;
    bool         first, last; /* this is time step 0, time step T - 1 */
    const float *bias;        /* forward: (4, H) */
    float       *gates;       /* (B, T, 4, H) forward: products with x, then gates i f g o; backward: gates, then da */
    float       *cells;       /* (B, T, H) c */
    float       *h;           /* (B, T, H) forward: result h; backward: dy, the gradient of the result */
    const float *sums;        /* forward: (rows, 4, units) h W_h^T of the step before, which is not read at the first;
                                 backward: (rows, units) da W_h of the step after, which is not read at the last */
    float       *next;        /* forward: (B, H) a copy of h; backward: (B, 4, H) a copy of da */
    float       *dc;          /* backward: (B, H) gradient of c, through the step after; then that of the step before */
} hpmli_lstm_cells;

/* The kernels: loops over contiguous f32 arrays of any alignment. Each instruction set has its own version of each
   kernel (PART VII), with equal results up to rounding; ctx->k is the table of the fastest set that the CPU runs.
   accumulate: adds to the result, else overwrites it. A result may overwrite an operand unless a comment says no. */
typedef void hpmli_binary_fn(float *y, const float *a, const float *b, int64_t n);
typedef struct hpmli_kernels {
    const char *name; /* "scalar", "avx2", "avx512", "neon" */
    /* Elementwise loops over n elements of each array. */
    void (*act_forward)(hpml_act act, float slope, float *y, const float *x, int64_t n); /* y = act(x) */
    /* dx = dy act'(x) from x or from y = act(x); x or y may be NULL where the derivative does not read it */
    void (*act_backward)(hpml_act act, float slope, float *dx, const float *dy, const float *x, const float *y,
                         int64_t n, int accumulate);
    hpmli_binary_fn *vadd, *vsub, *vmul, *vdiv;                                /* y = a + b, a - b, a b, a / b */
    void (*vfill)(float *y, float value, int64_t n);                           /* y = value */
    void (*vaxpby)(float *y, float a, const float *x, float b, int64_t n);     /* y = a x + b y; b 0: y is not read */
    void (*vscale_add)(float *y, const float *x, float a, float b, int64_t n); /* y = a x + b */
    /* y = a (x - centre) + b; with relu max(y, 0) */
    void (*vcentred)(float *y, const float *x, float centre, float a, float b, bool relu, int64_t n);
    /* y = a x + b (z - centre) + constant */
    void (*vaxpbypc)(float *y, float a, const float *x, float b, const float *z, float centre, float constant,
                     int64_t n, int accumulate);
    /* Reductions of n elements. vsum_wide, vdot_wide, vmoments add in double the float sums of 1,024 numbers. */
    float (*vsum)(const float *x, int64_t n);
    float (*vdot)(const float *a, const float *b, int64_t n);
    double (*vsum_wide)(const float *x, int64_t n);
    double (*vdot_wide)(const float *a, const float *b, int64_t n);
    /* sums[0] += sum of w, sums[1] += sum of w d, where d = x - centre; w NULL: w = d */
    void (*vmoments)(double *sums, const float *w, const float *x, float centre, int64_t n);
    float (*vmax)(const float *x, int64_t n);                            /* largest x; -infinity for n = 0 */
    float (*vamax)(const float *x, int64_t n);                           /* largest |x|, or NaN; 0 for n = 0 */
    float (*vexp_sum)(float *y, const float *x, float shift, int64_t n); /* y = exp(x - shift); returns the sum of y */
    /* y[j] = sum over r of x[r][j]; x: (rows, cols), y: (cols) */
    void (*vsum_rows)(float *y, const float *x, int64_t rows, int64_t cols, int accumulate);
    void (*lstm_cells)(const hpmli_lstm_cells *s); /* computes gates, c and h */
    void (*lstm_cells_back)(const hpmli_lstm_cells *s); /* computes da, gradient of the gates' sums, and dc */
    /* One step of a built-in optimizer on n weights w. dw: their gradients, which LAMB overwrites with its direction;
       m, v: first and second moments, or NULL. Returns HPML_NONFINITE_ bits. */
    int (*opt_step)(const hpmli_opt_args *args, float *w, float *dw, float *m, float *v, int64_t n);
    /* Conversions of n numbers between f32 and a storage type. */
    void (*to_f32)(float *y, hpml_dtype dtype, const void *x, int64_t n);
    void (*from_f32)(hpml_dtype dtype, void *y, const float *x, int64_t n);
    /* gemm_part: a rectangle of a product C; gemm_sum: row i of C from `count` partial sums, `stride` floats apart */
    void (*gemm_part)(const hpmli_gemm_part *part);
    void (*gemm_sum)(const hpmli_gemm_desc *d, int64_t i, const float *sums, int64_t count, int64_t stride);
    /* Writes numbers first .. first + n - 1 of a random stream to out; kind: 32-bit words, uniform or normal floats. */
    void (*random)(hpmli_draw kind, void *out, uint64_t seed, uint64_t stream, uint64_t first, int64_t n);
    /* Codecs of n gradient elements g; e: the error of the last encoding, or NULL. onebit_scan: e += g; writes signs as
       bits and, to *row, sums and extremes of both signs; onebit_carry: e -= its decoded value, low or high. */
    void (*onebit_scan)(hpmli_onebit_row *row, uint8_t *bits, float *e, const float *g, int64_t n);
    void (*onebit_carry)(float *e, float low, float high, int64_t n);
    void (*onebit_decode)(float *y, const uint8_t *bits, float low, float high, int64_t n);
    void (*onebit_decode_add)(float *y, const uint8_t *bits, float low, float high, int64_t n);
    bool (*bf16_encode)(uint16_t *packed, float *e, const float *g, int64_t n); /* false: not finite in bf16 */
    void (*bf16_decode_add)(float *y, const void *packed, int64_t n);
    /* Convolution: packing of weights w (for y, for dx), copies of images to and from NHWC order, the products that
       give y, dx and dw, and the sum of partial sums of dw. */
    void (*conv_pack)(const hpmli_conv *d, float *dst, const float *w, int64_t o);
    void (*conv_pack_for_dx)(const hpmli_conv *d, float *dst, const float *w, int64_t o);
    void (*conv_to_nhwc)(float *image, const float *x, int64_t channels, int64_t height, int64_t width, int64_t pitch);
    void (*conv_copy)(const hpmli_conv_copy *d, float *to, const float *from, const float *bias, int relu,
                      int accumulate);
    void (*conv_from_nhwc)(const hpmli_conv *d, float *dx, const float *image, int accumulate);
    void (*conv_forward)(const hpmli_conv *d, int64_t images, const float *w, const float *x, int64_t o0, int64_t o1,
                         const float *bias, int relu, float *y, float *band);
    void (*conv_input_grad)(const hpmli_conv *d, int64_t images, const float *w, const float *dy, float *dx);
    void (*conv_weight_grad)(const hpmli_conv *d, int64_t images, const float *x, const float *dy, float *dw,
                             int64_t o0, int64_t o1, int add);
    void (*conv_unpack)(const hpmli_conv *d, float *dw, const float *partial_sums, int64_t count, int64_t o,
                        int accumulate);
    /* Sets y to the n maxima of the 2 x 2 windows in the rows at x and x + width, and `at` to the position of each
       maximum in its window, 0 to 3. */
    void (*max_pool_row)(float *y, float *at, const float *x, int64_t width, int64_t n);
    void (*max_pool_row_back)(float *dx, const float *at, const float *dy, int64_t width, int64_t n, bool accumulate);
    /* Returns the CRC-32C of a string to which n bytes are appended; crc: that of the string before, 0 if empty. */
    uint32_t (*crc32c)(uint32_t crc, const void *bytes, size_t n);
} hpmli_kernels;

/* Kernels called directly, not by the table, for single random numbers: the four words of a Philox block, see >>rng. */
HPMLI_FN void hpmli_philox_scalar(uint64_t seed, uint64_t stream, uint64_t block, uint32_t out[4]);
HPMLI_FN void hpmli_box_muller_scalar(const uint32_t *a, const uint32_t *b, float *x, float *y);
HPMLI_FN const hpmli_kernels *hpmli_kernels_find(const char *name);

// ---------------------------------------------------------------------------------------------------------------------
// >>context   the context: errors, memory
// ---------------------------------------------------------------------------------------------------------------------
typedef void hpmli_destroy_fn(void *object); /* a destructor */
/* The header before each allocation of a context. All are in one list, newest first, so that hpml_ctx_free can free
   them. `destroy`, if not NULL, is called before the memory is freed (to join a thread, to close a file). */
typedef struct hpmli_block {
    struct hpmli_block *older, *newer;
    hpmli_destroy_fn      *destroy;
    size_t              size; /* bytes taken from the allocator, header included */
} hpmli_block;
#define HPMLI_BLOCK 64 /* bytes of a header; the memory after it stays aligned to a cache line */

typedef struct hpmli_pool  hpmli_pool;  /* see >>threads */
typedef struct hpmli_trace hpmli_trace; /* see >>trace */
static void hpmli_trace_step(hpml_ctx *ctx, int64_t step);
static void hpmli_trace_stepped(hpml_ctx *ctx, int64_t step, double since, float loss);
static void hpmli_names_fill(hpml_ctx *ctx);

struct hpml_ctx {
    hpml_allocator       allocator;
    hpml_log_fn         *log;
    void                *log_user;
    hpml_status          status;     /* the first error */
    char                 error[768]; /* text of the first error */
    hpmli_block         *blocks;     /* newest */
    size_t               allocations, bytes;
    const hpmli_kernels *k;
    int                  threads;
    hpmli_pool          *pool;       /* worker threads; NULL: one thread computes */
    long                 process;    /* id of the process that created the context, see hpmli_forked */
    uint64_t             seed;
    const hpml_backend  *backend;
    const hpml_op_impl  *ops;        /* (HPML_OP_COUNT) of the backend, or the wrappers of >>half */
    hpml_dtype           activation_dtype; /* hpml_ctx_desc.activation_dtype */
    void                *device;     /* the object that backend->open returned */
    float               *gemm_ws;    /* packing buffers of matrix products, one for each thread, see >>gemm */
    hpml_tensor        **params;     /* (param_count) in order of recording */
    int                  param_count;
    int                  param_kept; /* parameters whose op is recorded; after an error those after them go */
    hpml_graph          *grads_of;   /* the graph whose memory contains the parameters' gradients now */
    int64_t              param_capacity;
    int                 *names;      /* (name_size) hash table of names: 1 + index of a parameter; 0: free */
    int64_t              name_size;  /* a power of two, at least twice the number of parameters */
    int                  node_count; /* recorded nodes: the next node's index, used in names and masks */
    int64_t              source_count; /* sources of all recorded nodes together */
    int                  segment, segments; /* that ops are recorded into, 0: none; number of segments until now */
    int                  layout_permutes; /* nodes recorded by hpml_to_layout, which default names do not count */
    bool                 deferred;   /* trainers take their memory late, see hpml_ctx_defer */
    int                  group_nodes;    /* nodes that groups need and a serial program has not: names, masks */
    hpml_group           groups[HPML_AXES]; /* by axis; size 0: none is set */
    hpml_node            spare;      /* a dummy node that hpmli_node_create returns after an error */
    hpmli_trace         *trace;      /* the timeline; NULL: none is recorded */
    const double        *clock;      /* clock for traces, see hpml_trace_clock */
    hpml_progress        progress;   /* callback while files are written */
    char                 texts[8][192]; /* texts for error messages, used in turn, see hpmli_describe */
    unsigned             text_count;    /* number of texts made in `texts` */
};
HPMLI_FN double hpmli_trace_time(const hpml_ctx *ctx, double now) { return ctx->clock ? *ctx->clock : now; }

HPML_API const char *hpml_status_string(hpml_status status)
{
    switch (status) {
#define HPMLI_STATUS_TEXT(name, code, text) case name: return text;
        HPML_STATUS_LIST(HPMLI_STATUS_TEXT)
    default: return "unknown status";
    }
}
HPML_API int hpml_version(void) { return HPML_VERSION; }

HPML_API void hpml_log_stderr(hpml_status status, const char *text, void *user)
{
    (void)status, (void)user;
    fprintf(stderr, "%s\n", text);
}

/* Logs an error with the line of hpml.h (0: unknown) and stores it in the context if that has none. */
HPMLI_FN void hpmli_fail_va(hpml_ctx *ctx, hpml_status status, int line, const char *format, va_list args)
{
    char text[sizeof ctx->error], whole[sizeof ctx->error + 32];
    vsnprintf(text, sizeof text, format, args);
    if (ctx->status == HPML_OK) {
        ctx->status = status;
        memcpy(ctx->error, text, sizeof text);
    }
    if (ctx->log) {
        int prefix = 0; /* characters of the file and line; hpml_ctx_fail, which knows neither, passes line 0 */
        if (line > 0) prefix = snprintf(whole, sizeof whole, "hpml.h:%d: ", line);
        snprintf(whole + prefix, sizeof whole - (size_t)prefix, "%s", text);
        ctx->log(status, whole, ctx->log_user);
    }
}

HPMLI_PRINTF(4, 5)
HPMLI_FN hpml_status hpmli_fail_at(hpml_ctx *ctx, hpml_status status, int line, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    hpmli_fail_va(ctx, status, line, format, args);
    va_end(args);
    return status;
}
#define hpmli_fail(ctx, status, ...) hpmli_fail_at(ctx, status, __LINE__, __VA_ARGS__)

/* Report an error, as hpmli_fail does, and have the value NULL (hpmli_null) or false (hpmli_false), to be returned. */
#ifdef __cplusplus
#define hpmli_null(...) (hpmli_fail(__VA_ARGS__), nullptr)
#else
#define hpmli_null(...) (hpmli_fail(__VA_ARGS__), NULL)
#endif
#define hpmli_false(...) (hpmli_fail(__VA_ARGS__), false)

HPML_API hpml_status hpml_ctx_fail(hpml_ctx *ctx, hpml_status status, const char *format, ...)
{
    va_list args;
    if (!ctx) return HPML_ERR_ARGUMENT;
    va_start(args, format);
    hpmli_fail_va(ctx, status, 0, format, args);
    va_end(args);
    return status;
}

/* A text to which formatted text is appended. As with snprintf, what does not fit is cut off, and `used` counts all. */
typedef struct hpmli_text_buffer {
    char  *buffer;
    size_t size;
    int    used;
} hpmli_text_buffer;

HPMLI_FN hpmli_text_buffer hpmli_text_begin(char *buffer, size_t size)
{
    hpmli_text_buffer t = { buffer, size, 0 };
    if (size > 0 && buffer) buffer[0] = 0;
    return t;
}

HPMLI_PRINTF(2, 3)
HPMLI_FN void hpmli_text_add(hpmli_text_buffer *t, const char *format, ...)
{
    va_list args;
    bool    open = t->buffer && (size_t)t->used < t->size; /* the buffer is not full */
    va_start(args, format);
    char *to = open ? t->buffer + t->used : NULL;
    int   n  = vsnprintf(to, open ? t->size - (size_t)t->used : 0, format, args);
    va_end(args);
    if (n > 0) t->used += n;
}

/* True if ctx is NULL or has an error: then calls do nothing. */
HPMLI_FN bool hpmli_failed(const hpml_ctx *ctx) { return !ctx || ctx->status != HPML_OK; }

/* True if the guards _begin and _end of desc d are 0, as after zeroing; else an error that names `what`, and false. */
#define HPMLI_DESC_OK(ctx, what, d)                                                                                    \
    (((d)->_begin == 0 && (d)->_end == 0) ||                                                                           \
     hpmli_false(ctx, HPML_ERR_ARGUMENT, what " desc: canary is not zero; zero the struct before you set fields"))

/* Copies *desc to d (zeros if desc is NULL). True if the guards _begin and _end of d are 0; else false, with
   an error. */
#define HPMLI_COPY_DESC(ctx, what, d, desc)                                                                            \
    ((desc) ? (void)((d) = *(desc)) : (void)memset(&(d), 0, sizeof(d)), HPMLI_DESC_OK(ctx, what, &(d)))
HPMLI_FN int64_t hpmli_min(int64_t a, int64_t b) { return a < b ? a : b; }
HPMLI_FN int64_t hpmli_max(int64_t a, int64_t b) { return a > b ? a : b; }
HPMLI_FN int     hpmli_later(int a, int b) { return a > b ? a : b; }

/* Sets *out = a b; false if the product could not be the size of an array. */
HPMLI_FN bool hpmli_mul(size_t a, size_t b, size_t *out)
{
    if (a != 0 && b > SIZE_MAX / 2 / a) return false; /* half of SIZE_MAX, so that every size also fits ptrdiff_t */
    *out = a * b;
    return true;
}

/* Aligned malloc in C99: the pointer that malloc returned is stored right before the memory that is returned. */
HPMLI_FN void *hpmli_default_alloc(size_t size, size_t align, void *user HPMLI_UNUSED)
{
    char *raw = (char *)malloc(size + align + sizeof(void *));
    if (!raw) return NULL;
    char *p = raw + sizeof(void *);
    p += (align - (uintptr_t)p % align) % align;
    memcpy(p - sizeof(void *), &raw, sizeof(void *));
    return p;
}

HPMLI_FN void hpmli_default_free(void *p, size_t size HPMLI_UNUSED, void *user HPMLI_UNUSED)
{
    void *raw;
    memcpy(&raw, (char *)p - sizeof(void *), sizeof(void *));
    free(raw);
}

/* Allocates 64-byte aligned memory, not zeroed. Returns NULL, with an error on the context, when memory is short. */
HPMLI_FN void *hpmli_alloc(hpml_ctx *ctx, size_t bytes)
{
    hpmli_block *b = NULL;
    if (bytes <= SIZE_MAX / 2 - HPMLI_BLOCK)
        b = (hpmli_block *)ctx->allocator.alloc(bytes + HPMLI_BLOCK, HPMLI_BLOCK, ctx->allocator.user);
    if (!b)
        return hpmli_null(ctx, HPML_ERR_MEMORY, "out of memory: %zu bytes were requested while this context holds %zu; "
                          "use a smaller batch or model", bytes, ctx->bytes);
    memset(b, 0, sizeof *b);
    b->size  = bytes + HPMLI_BLOCK;
    b->older = ctx->blocks;
    if (ctx->blocks) ctx->blocks->newer = b;
    ctx->blocks = b;
    ctx->allocations++;
    ctx->bytes += b->size;
    return (char *)b + HPMLI_BLOCK;
}

HPMLI_FN void *hpmli_alloc_object(hpml_ctx *ctx, size_t bytes, hpmli_destroy_fn *destroy)
{
    void *p = hpmli_alloc(ctx, bytes);
    if (!p) return NULL;
    ((hpmli_block *)(void *)((char *)p - HPMLI_BLOCK))->destroy = destroy;
    return memset(p, 0, bytes);
}

HPMLI_FN void *hpmli_alloc_array(hpml_ctx *ctx, int64_t count, size_t size)
{
    size_t bytes;
    if (count < 0 || !hpmli_mul((size_t)count, size, &bytes))
        return hpmli_null(ctx, HPML_ERR_OVERFLOW, "an array of %lld elements of %zu bytes does not fit in memory",
                          (long long)count, size);
    return hpmli_alloc_object(ctx, bytes, NULL);
}

HPML_API void *hpml_ctx_alloc(hpml_ctx *ctx, size_t bytes, void (*destroy)(void *object))
{
    return hpmli_failed(ctx) ? NULL : hpmli_alloc_object(ctx, bytes, destroy);
}
#define hpmli_new(ctx, T, count) ((T *)hpmli_alloc_array(ctx, count, sizeof(T)))

HPMLI_FN char *hpmli_strdup(hpml_ctx *ctx, const char *s)
{
    size_t size = strlen(s) + 1;
    char  *p    = (char *)hpmli_alloc(ctx, size);
    if (p) memcpy(p, s, size);
    return p;
}

HPMLI_FN void hpmli_free(hpml_ctx *ctx, void *p)
{
    if (!p) return;
    hpmli_block *b = (hpmli_block *)(void *)((char *)p - HPMLI_BLOCK);
    if (b->destroy) b->destroy(p);
    if (b->newer) b->newer->older = b->older;
    else ctx->blocks = b->older;
    if (b->older) b->older->newer = b->newer;
    ctx->bytes -= b->size;
    ctx->allocator.free(b, b->size, ctx->allocator.user);
}

/* Makes room for one more element of `size` bytes in an array of `count`: doubles the capacity when the array is full.
   array: the address of the array's pointer. False, with an error on the context, when there is no memory. */
HPMLI_FN bool hpmli_grow(hpml_ctx *ctx, void *array, int64_t count, int64_t *capacity, size_t size)
{
    int64_t larger = *capacity ? 2 * *capacity : 64;
    void   *old, *copy;
    if (count < *capacity) return true;
    copy = hpmli_alloc_array(ctx, larger, size);
    if (!copy) return false;
    memcpy(&old, array, sizeof old);
    memcpy(array, &copy, sizeof copy);
    if (count > 0) memcpy(copy, old, (size_t)count * size);
    hpmli_free(ctx, old);
    *capacity = larger;
    return true;
}
HPML_API void hpml_ctx_release(hpml_ctx *ctx, void *object) { hpmli_free(ctx, object); }

// ---------------------------------------------------------------------------------------------------------------------
// >>threads   the clock and the thread pool
// ---------------------------------------------------------------------------------------------------------------------
HPML_API double hpml_now(void)
{
#if defined(CLOCK_MONOTONIC)
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
#elif HPMLI_POSIX
    struct timeval t;
    gettimeofday(&t, NULL);
    return (double)t.tv_sec + 1e-6 * (double)t.tv_usec;
#else
    return (double)clock() / CLOCKS_PER_SEC;
#endif
}

/* A thread pool runs numbered tasks. The caller opens a job (a function and its tasks), works on them as thread 0,
   closes the job, and waits for workers that are still in it. Each thread begins with a fixed range of the tasks, so
   that it finds the same data in its cache from job to job, and then takes tasks from other threads' ranges. A task's
   result does not depend on the thread, and no sum is split by the number of threads, so results have the same bits on
   any number of threads. A worker spins for a moment (the next job usually comes within microseconds), then yields,
   then sleeps. `state` of the pool packs (job number << 32 | open bit << 31 | workers in the job) in one word, so that
   a worker that wakes late cannot enter a job that is closed or is not the one it has seen. */
typedef void hpmli_task_fn(void *arg, int64_t task, int thread);

/* True in a child of fork: joining a thread of the parent, or locking a mutex that it held, would wait forever. */
HPMLI_FN bool hpmli_forked(const hpml_ctx *ctx) { return ctx->process != HPMLI_PROCESS; }

#ifndef HPML_NO_THREADS
#define HPMLI_JOB_OPEN   (UINT64_C(1) << 31)
#define HPMLI_SPINS      4000 /* pauses before a waiting worker yields: about 50 us */
#define HPMLI_YIELDS     50

typedef struct hpmli_worker {
    hpmli_pool *pool;
    pthread_t   thread;
    int         index;  /* number of the thread; 0: the caller */
    long        asleep; /* the system's id of this thread while the thread sleeps, else 0; protected by the mutex */
    int64_t     next;   /* atomic: the first task of this thread's range that no thread has taken */
} hpmli_worker;

struct hpmli_pool {
    const hpml_ctx *ctx;
    uint64_t        state;    /* atomic: job, open bit, workers in it; see >>threads */
    int64_t         count;    /* number of tasks of the job */
    hpmli_task_fn  *fn;
    void           *arg;
    int             sleepers; /* atomic: number of sleeping workers */
    int             stop;     /* atomic */
    pthread_mutex_t mutex;
    pthread_cond_t  wake;
    int             worker_count;
    unsigned long   cores[128 / sizeof(long)]; /* a bit for each core that this process may use */
    hpmli_worker    workers[1]; /* (worker_count + 1) the first is the caller */
};

/* Waits a moment in turn number `turn` of a busy loop: a pause of the CPU; from turn HPMLI_SPINS on, also a yield. */
HPMLI_FN void hpmli_pause(int turn)
{
    if (turn >= HPMLI_SPINS) sched_yield();
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

/* Keeps a woken worker off the caller's core, because Linux may place the worker there, where it waits for milliseconds
   behind the busy caller while other cores idle. wake 1, by the caller: excludes the caller's core for each sleeping
   worker; wake 0, by an awake worker: allows itself all cores. The callers of this function have locked the pool's
   mutex, because otherwise a worker that wakes at the same time could stay excluded from that core. */
HPMLI_FN void hpmli_pool_avoid_caller_core(hpmli_pool *p, int wake)
{
#if HPMLI_AFFINITY
    unsigned      cpu = 0, bits = 8 * sizeof(long);
    unsigned long cores[sizeof p->cores / sizeof(long)];
    memcpy(cores, p->cores, sizeof cores);
    if (!wake) (void)syscall(SYS_sched_setaffinity, 0L, sizeof cores, cores);
    if (!wake || syscall(SYS_getcpu, &cpu, NULL, NULL) != 0 || cpu / bits >= sizeof cores / sizeof *cores) return;
    cores[cpu / bits] &= ~(1ul << cpu % bits);
    for (int i = 1; i <= p->worker_count; i++) {
        long id = p->workers[i].asleep;
        if (id > 0) (void)syscall(SYS_sched_setaffinity, id, sizeof cores, cores);
    }
#endif
    (void)p, (void)wake;
}

/* Runs the tasks of the open job until none is left: first those in this thread's range, then those in the ranges of
   the other threads. */
HPMLI_FN void hpmli_pool_work(hpmli_pool *p, int thread)
{
    for (int i = 0, threads = p->worker_count + 1; i < threads; i++) {
        hpmli_worker *w = &p->workers[(thread + i) % threads];
        int64_t       end = p->count * (w->index + 1) / threads, task;
        while (__atomic_load_n(&w->next, __ATOMIC_RELAXED) < end &&
               (task = __atomic_fetch_add(&w->next, 1, __ATOMIC_RELAXED)) < end)
            p->fn(p->arg, task, thread);
    }
}

/* True if a job is open whose number is not `seen`, that of the worker's last job, or if the pool stops. */
HPMLI_FN bool hpmli_pool_ready(hpmli_pool *p, uint64_t seen)
{
    uint64_t s = __atomic_load_n(&p->state, __ATOMIC_SEQ_CST);
    return ((s & HPMLI_JOB_OPEN) && s >> 32 != seen) || __atomic_load_n(&p->stop, __ATOMIC_SEQ_CST);
}

/* Waits until a job other than number `seen` is open or the pool stops: spins, then yields, then sleeps. */
HPMLI_FN void hpmli_pool_wait(hpmli_pool *p, hpmli_worker *w, uint64_t seen)
{
    for (int i = 0; i < HPMLI_SPINS + HPMLI_YIELDS; i++) {
        if (hpmli_pool_ready(p, seen)) return;
        hpmli_pause(i);
    }
    pthread_mutex_lock(&p->mutex);
    __atomic_add_fetch(&p->sleepers, 1, __ATOMIC_SEQ_CST);
#if HPMLI_AFFINITY
    w->asleep = syscall(SYS_gettid);
#endif
    while (!hpmli_pool_ready(p, seen)) {
        pthread_cond_wait(&p->wake, &p->mutex);
        hpmli_pool_avoid_caller_core(p, 0); /* allows this worker all cores, even if the job has ended */
    }
    w->asleep = 0;
    __atomic_sub_fetch(&p->sleepers, 1, __ATOMIC_SEQ_CST);
    pthread_mutex_unlock(&p->mutex);
}

HPMLI_FN void *hpmli_worker_main(void *arg)
{
    hpmli_worker *w    = (hpmli_worker *)arg;
    hpmli_pool   *p    = w->pool;
    uint64_t      seen = 0;
    for (;;) {
        uint64_t s;
        hpmli_pool_wait(p, w, seen);
        if (__atomic_load_n(&p->stop, __ATOMIC_SEQ_CST)) return NULL;
        s = __atomic_load_n(&p->state, __ATOMIC_SEQ_CST);
        while ((s & HPMLI_JOB_OPEN) && s >> 32 != seen) /* enters the job unless that is closed */
            if (__atomic_compare_exchange_n(&p->state, &s, s + 1, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
                seen = s >> 32;
                hpmli_pool_work(p, w->index);
                __atomic_sub_fetch(&p->state, 1, __ATOMIC_SEQ_CST);
                break;
            }
    }
}

HPMLI_FN void hpmli_pool_run(hpmli_pool *p, int64_t n, hpmli_task_fn *fn, void *arg)
{
    uint64_t job = (__atomic_load_n(&p->state, __ATOMIC_RELAXED) >> 32) + 1;
    p->fn    = fn;
    p->arg   = arg;
    p->count = n;
    for (int i = 0; i <= p->worker_count; i++)
        __atomic_store_n(&p->workers[i].next, n * i / (p->worker_count + 1), __ATOMIC_RELAXED);
    if ((job & UINT32_MAX) == 0) job = 1; /* a worker that has seen no job has seen == 0 */
    __atomic_store_n(&p->state, job << 32 | HPMLI_JOB_OPEN, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&p->sleepers, __ATOMIC_SEQ_CST) > 0 && !hpmli_forked(p->ctx)) {
        pthread_mutex_lock(&p->mutex);
        hpmli_pool_avoid_caller_core(p, 1);
        pthread_cond_broadcast(&p->wake);
        pthread_mutex_unlock(&p->mutex);
    }
    hpmli_pool_work(p, 0);
    __atomic_and_fetch(&p->state, ~HPMLI_JOB_OPEN, __ATOMIC_SEQ_CST);
    for (int i = 0; (__atomic_load_n(&p->state, __ATOMIC_SEQ_CST) & (HPMLI_JOB_OPEN - 1)) != 0; i++) hpmli_pause(i);
}

HPMLI_FN void hpmli_pool_destroy(void *object)
{
    hpmli_pool *p = (hpmli_pool *)object;
    if (hpmli_forked(p->ctx)) return; /* a forked child has no worker threads to wake and join */
    pthread_mutex_lock(&p->mutex);
    __atomic_store_n(&p->stop, 1, __ATOMIC_SEQ_CST);
    pthread_cond_broadcast(&p->wake);
    pthread_mutex_unlock(&p->mutex);
    for (int i = 1; i <= p->worker_count; i++) pthread_join(p->workers[i].thread, NULL);
    pthread_cond_destroy(&p->wake);
    pthread_mutex_destroy(&p->mutex);
}

HPMLI_FN int hpmli_cores(void)
{
    long n = 1;
#if defined(CPU_COUNT)
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) n = CPU_COUNT(&set);
#elif defined(_SC_NPROCESSORS_ONLN)
    n = sysconf(_SC_NPROCESSORS_ONLN);
#endif
    return (int)hpmli_max(n, 1);
}

/* Creates a pool of `threads` - 1 workers; fewer if the system creates no more threads. */
HPMLI_FN hpmli_pool *hpmli_pool_create(hpml_ctx *ctx, int threads)
{
    size_t      bytes = sizeof(hpmli_pool) + (size_t)threads * sizeof(hpmli_worker);
    hpmli_pool *p     = (hpmli_pool *)hpmli_alloc_object(ctx, bytes, hpmli_pool_destroy);
    if (!p) return NULL;
    p->ctx = ctx;
    pthread_mutex_init(&p->mutex, NULL);
    pthread_cond_init(&p->wake, NULL);
#if HPMLI_AFFINITY
    (void)syscall(SYS_sched_getaffinity, 0L, sizeof p->cores, p->cores);
#endif
    for (int i = 1; i < threads; i++) {
        hpmli_worker *w = &p->workers[i];
        w->pool  = p;
        w->index = i;
        if (pthread_create(&w->thread, NULL, hpmli_worker_main, w) != 0) break;
        p->worker_count++;
    }
    return p;
}
#endif

/* Calls fn(arg, task, thread's number) for tasks 0 .. n - 1, by all threads of ctx; returns when all tasks are done. */
HPMLI_FN void hpmli_parallel(hpml_ctx *ctx, int64_t n, hpmli_task_fn *fn, void *arg)
{
#ifndef HPML_NO_THREADS
    if (n > 1 && ctx->pool) {
        hpmli_pool_run(ctx->pool, n, fn, arg);
        return;
    }
#endif
    for (int64_t i = 0; i < n; i++) fn(arg, i, 0);
    (void)ctx;
}

/* Elements of a task's chunk of a long array: few, to balance threads; many, so that starting a task costs little. */
#define HPMLI_GRAIN 16384
/* Largest number of parts of a long sum. It does not depend on the number of threads, and the parts are added in order,
   so that the sum has the same bits for any number of threads. */
#define HPMLI_SUM_TASKS 64
/* Returns how many rows of `cols` elements make a task of about HPMLI_GRAIN elements. */
HPMLI_FN int64_t hpmli_rows_per_task(int64_t cols) { return hpmli_max(HPMLI_GRAIN / hpmli_max(cols, 1), 1); }

// ---------------------------------------------------------------------------------------------------------------------
// >>create   creating and freeing contexts
// ---------------------------------------------------------------------------------------------------------------------
HPMLI_FN bool hpmli_ctx_open(hpml_ctx *ctx, const hpml_ctx_desc *d)
{
    if (!HPMLI_DESC_OK(ctx, "ctx", d)) return false;
    ctx->k = hpmli_kernels_find(d->cpu);
    if (!ctx->k) {
        ctx->k = hpmli_kernels_find(NULL);
        hpmli_fail(ctx, HPML_ERR_UNSUPPORTED, "ctx: this CPU or build has no \"%s\" kernels; leave .cpu NULL for the "
                   "best (\"%s\")", d->cpu, ctx->k->name);
    }
    if (d->threads < 0)
        return hpmli_false(ctx, HPML_ERR_ARGUMENT, "ctx: %d threads, expected 1 or more, or 0 for all cores",
                           d->threads);
#ifndef HPML_NO_THREADS
    ctx->threads = (int)hpmli_min(d->threads > 0 ? d->threads : hpmli_cores(), 1024);
    if (ctx->threads > 1) {
        ctx->pool = hpmli_pool_create(ctx, ctx->threads);
        if (!ctx->pool) return false;
        ctx->threads = ctx->pool->worker_count + 1;
    }
#endif
    ctx->gemm_ws = (float *)hpmli_alloc(ctx, (size_t)ctx->threads * HPMLI_GEMM_WS * sizeof(float)); /* not zeroed */
    if (!ctx->gemm_ws) return false;
    hpml_dtype dtype = d->activation_dtype;
    if (dtype != HPML_DTYPE_F32 && dtype != HPML_DTYPE_BF16 && dtype != HPML_DTYPE_F16)
        return hpmli_false(ctx, HPML_ERR_ARGUMENT, "ctx: .activation_dtype is %s (%d), expected f32, bf16 or f16",
                           hpml_dtype_name(dtype), (int)dtype);
    if (dtype != HPML_DTYPE_F32 && ctx->backend != hpml_backend_cpu())
        return hpmli_false(ctx, HPML_ERR_ARGUMENT, "ctx: .activation_dtype %s is for the CPU; the backend \"%s\" takes "
                           "its precision from its own desc", hpml_dtype_name(dtype), ctx->backend->name);
    ctx->activation_dtype = dtype;
    return ctx->backend->open(ctx, d->backend_desc, &ctx->device) == HPML_OK;
}

HPML_API hpml_ctx *hpml_ctx_create(const hpml_ctx_desc *desc)
{
    hpml_ctx_desc d = HPMLI_ZEROED;
    hpml_ctx     *ctx;
    if (desc && (desc->_begin || desc->_end)) d._begin = 1; /* makes hpmli_ctx_open fail; desc is not used */
    else if (desc) d = *desc;
    if (!d.allocator.alloc || !d.allocator.free) {
        d.allocator.alloc = hpmli_default_alloc;
        d.allocator.free  = hpmli_default_free;
    }
    ctx = (hpml_ctx *)d.allocator.alloc(sizeof *ctx, HPMLI_BLOCK, d.allocator.user);
    if (!ctx) return NULL;
    memset(ctx, 0, sizeof *ctx);
    ctx->allocator   = d.allocator;
    ctx->log         = d.log;
    ctx->log_user    = d.log_user;
    ctx->seed        = d.seed;
    ctx->process     = HPMLI_PROCESS;
    ctx->backend     = d.backend ? d.backend : hpml_backend_cpu();
    ctx->ops         = ctx->backend->ops;
    ctx->allocations = 1;
    ctx->bytes       = sizeof *ctx;
    ctx->threads     = 1;
    if (!hpmli_ctx_open(ctx, &d) && ctx->status == HPML_OK)
        hpmli_fail(ctx, HPML_ERR_STATE, "ctx: the backend \"%s\" did not open", ctx->backend->name);
    return ctx;
}

HPML_API void hpml_ctx_free(hpml_ctx *ctx)
{
    if (!ctx) return;
    for (hpmli_block *b = ctx->blocks; b; b = b->older) { /* newest first: an object before those that it uses */
        hpmli_destroy_fn *destroy = b->destroy;
        b->destroy = NULL;
        if (destroy) destroy((char *)b + HPMLI_BLOCK);
    }
    if (ctx->device) ctx->backend->close(ctx->device);
    while (ctx->blocks) hpmli_free(ctx, (char *)ctx->blocks + HPMLI_BLOCK);
    hpml_allocator allocator = ctx->allocator;
    allocator.free(ctx, sizeof *ctx, allocator.user);
}
HPML_API hpml_status hpml_ctx_status(const hpml_ctx *ctx) { return ctx ? ctx->status : HPML_ERR_ARGUMENT; }
HPML_API const char *hpml_ctx_error(const hpml_ctx *ctx) { return ctx ? ctx->error : "no context"; }

HPML_API void hpml_ctx_clear_error(hpml_ctx *ctx)
{
    if (!ctx) return;
    ctx->status      = HPML_OK;
    ctx->error[0]    = 0;
    ctx->param_count = ctx->param_kept;
    hpmli_names_fill(ctx);
}
HPML_API int         hpml_ctx_threads(const hpml_ctx *ctx)     { return ctx ? ctx->threads : 0; }
HPML_API const char *hpml_ctx_cpu(const hpml_ctx *ctx)         { return ctx ? ctx->k->name : ""; }
HPML_API uint64_t    hpml_ctx_seed(const hpml_ctx *ctx)        { return ctx ? ctx->seed : 0; }
HPML_API size_t      hpml_ctx_allocations(const hpml_ctx *ctx) { return ctx ? ctx->allocations : 0; }
HPML_API size_t      hpml_ctx_bytes(const hpml_ctx *ctx)       { return ctx ? ctx->bytes : 0; }
HPML_API hpml_progress hpml_ctx_progress(hpml_ctx *ctx, hpml_progress progress)
{
    hpml_progress before = { NULL, NULL };
    if (!ctx) return before;
    before        = ctx->progress;
    ctx->progress = progress;
    return before;
}
HPML_API hpml_allocator hpml_ctx_allocator(const hpml_ctx *ctx)
{
    hpml_allocator none = HPMLI_ZEROED;
    return ctx ? ctx->allocator : none;
}

/* The functions of a group of one rank: they send nothing, because sum, maximum and copy are this rank's own array. */
HPMLI_FN hpml_status hpmli_alone(void *user, float *x, int64_t n)
{
    (void)user, (void)x, (void)n;
    return HPML_OK;
}
HPMLI_FN hpml_status hpmli_alone_copy(void *user, const float *from, float *to, int64_t n)
{
    (void)user;
    memmove(to, from, (size_t)n * sizeof *to);
    return HPML_OK;
}
HPMLI_FN hpml_status hpmli_alone_pass(void *user, const float *out, float *in, int64_t n, int shift)
{
    (void)shift;
    return hpmli_alone_copy(user, out, in, n);
}
HPMLI_FN hpml_status hpmli_alone_bcast(void *user, float *x, int64_t n, int root)
{
    (void)root;
    return hpmli_alone(user, x, n);
}

HPML_API const hpml_group *hpml_ctx_group(const hpml_ctx *ctx, hpml_axis axis)
{
    static const hpml_group alone = { 0, 1, NULL, hpmli_alone, hpmli_alone, hpmli_alone_copy, hpmli_alone_copy,
                                      hpmli_alone_copy, hpmli_alone_pass, hpmli_alone_bcast };
    bool set = ctx && (int)axis >= 0 && axis < HPML_AXES && ctx->groups[axis].size > 0;
    return set ? &ctx->groups[axis] : &alone;
}

HPML_API const char *hpml_axis_name(hpml_axis axis)
{
    static const char *const names[HPML_AXES] = { "data", "pipe", "tensor", "sequence", "expert" };
    return (int)axis >= 0 && axis < HPML_AXES ? names[axis] : "?";
}

HPML_API hpml_status hpml_ctx_set_group(hpml_ctx *ctx, hpml_axis axis, const hpml_group *group)
{
    const hpml_group none = HPMLI_ZEROED;
    if (!ctx || ctx->status != HPML_OK) return hpml_ctx_status(ctx);
    if ((int)axis < 0 || axis >= HPML_AXES)
        return hpmli_fail(ctx, HPML_ERR_ARGUMENT, "set_group: no axis %d, expected 0 to %d", (int)axis, HPML_AXES - 1);
    if (ctx->node_count > 0 || ctx->param_count > 0)
        return hpmli_fail(ctx, HPML_ERR_STATE, "set_group of the %s axis: %d ops and %d parameters are recorded "
                          "without the group; set groups first", hpml_axis_name(axis), ctx->node_count,
                          ctx->param_count);
    const hpml_group *g = group ? group : &none;
    if (group && (g->size < 1 || g->rank < 0 || g->rank >= g->size))
        return hpmli_fail(ctx, HPML_ERR_ARGUMENT, "set_group of the %s axis: rank %d of %d, expected 0 to size - 1",
                          hpml_axis_name(axis), g->rank, g->size);
    if (group && !(g->sum && g->max && g->gather && g->scatter && g->swap && g->pass && g->bcast))
        return hpmli_fail(ctx, HPML_ERR_ARGUMENT, "set_group of the %s axis: a function is NULL, expected all of "
                          "hpml_group", hpml_axis_name(axis));
    ctx->groups[axis] = *g;
    return HPML_OK;
}

HPML_API const hpml_backend *hpml_ctx_backend(const hpml_ctx *ctx) { return ctx ? ctx->backend : NULL; }
HPML_API void       *hpml_ctx_device(const hpml_ctx *ctx)      { return ctx ? ctx->device : NULL; }

// ---------------------------------------------------------------------------------------------------------------------
// >>rng   single random numbers, permutations
// ---------------------------------------------------------------------------------------------------------------------
/* Streams of random numbers of a seed: the four highest bits of a stream's number stand for its use, so that no two
   uses draw the same numbers. A single number costs one Philox block, about 20 ns. */
#define HPMLI_STREAM_INIT       UINT64_C(0)           /* + index of the parameter; its first values */
#define HPMLI_STREAM_CHECK_GRAD UINT64_C(77)          /* elements that hpml_check_grad compares */
#define HPMLI_STREAM_SHUFFLE    (UINT64_C(0x5) << 60) /* order of a data set's samples; the block is the epoch */
#define HPMLI_STREAM_AUGMENT    (UINT64_C(0xa) << 60) /* | epoch; random augmentation of samples */
#define HPMLI_STREAM_DROPOUT    (UINT64_C(0xd) << 60) /* ^ step << 24 ^ node; dropout masks */

HPML_API void hpml_philox4x32(const uint32_t key[2], const uint32_t counter[4], uint32_t out[4])
{
    hpmli_philox_scalar((uint64_t)key[1] << 32 | key[0], (uint64_t)counter[3] << 32 | counter[2],
                        (uint64_t)counter[1] << 32 | counter[0], out);
}

/* Returns 32-bit random word i of stream r->stream of seed r->seed, whatever r has drawn before. */
HPMLI_FN uint32_t hpmli_rng_word(const hpml_rng *r, uint64_t i)
{
    uint32_t block[4];
    hpmli_philox_scalar(r->seed, r->stream, i / 4, block);
    return block[i % 4];
}
HPML_API uint32_t hpml_rng_u32(hpml_rng *r) { return hpmli_rng_word(r, r->counter++); }
HPML_API float hpml_rng_uniform(hpml_rng *r) { return (float)(hpml_rng_u32(r) >> 8) * (1.0f / 16777216.0f); }

HPML_API float hpml_rng_normal(hpml_rng *r)
{
    /* Box & Muller make two numbers from two words, here from those at positions j and j + half a chunk */
    uint64_t i    = r->counter++, j = i & ~(uint64_t)(HPMLI_PHILOX_CHUNK / 2);
    uint32_t a    = hpmli_rng_word(r, j), b = hpmli_rng_word(r, j + HPMLI_PHILOX_CHUNK / 2);
    float    x, y;
    hpmli_box_muller_scalar(&a, &b, &x, &y);
    return i == j ? x : y;
}

/* Returns a random integer below n: draws as many bits as n - 1 has until they are below n, on average < 2 times. */
HPML_API int64_t hpml_rng_below(hpml_rng *r, int64_t n)
{
    uint64_t mask = n > 1 ? (uint64_t)(n - 1) : 0, x;
    if (mask == 0) return 0;
    for (int shift = 1; shift < 64; shift *= 2) mask |= mask >> shift;
    do {
        x = hpml_rng_u32(r);
        if (mask >> 32) x |= (uint64_t)hpml_rng_u32(r) << 32;
        x &= mask;
    } while (x >= (uint64_t)n);
    return (int64_t)x;
}

/* Writes the next n numbers of the stream of r to x, 32-bit words or floats as `kind` says, and advances r by n. */
HPMLI_FN void hpmli_rng_fill(hpml_rng *r, hpmli_draw kind, void *x, int64_t n)
{
    hpmli_kernels_find(NULL)->random(kind, x, r->seed, r->stream, r->counter, n);
    if (n > 0) r->counter += (uint64_t)n;
}
HPML_API void hpml_rng_fill_u32(hpml_rng *r, uint32_t *x, int64_t n) { hpmli_rng_fill(r, HPMLI_WORDS, x, n); }
HPML_API void hpml_rng_fill_uniform(hpml_rng *r, float *x, int64_t n) { hpmli_rng_fill(r, HPMLI_UNIFORM, x, n); }
HPML_API void hpml_rng_fill_normal(hpml_rng *r, float *x, int64_t n) { hpmli_rng_fill(r, HPMLI_NORMAL, x, n); }

/* Mixes the bits of x, as the last step of splitmix64: each bit of x affects all bits of the result. */
HPMLI_FN uint64_t hpmli_mix64(uint64_t x)
{
    x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
    return x ^ x >> 31;
}

/* A Feistel network permutes the numbers of b bits, 2^(b-1) < n <= 2^b: it splits the bits into two parts and changes,
   in turn, one part by a random function of the other. Each change can be undone, so the network is a bijection. A
   result of n or more is permuted again until it is below n, fewer than two times on average ("cycle walking", Black &
   Rogaway 2002): this follows a cycle of the larger permutation from [0, n) back into [0, n), so it permutes [0, n). */
HPML_API int64_t hpml_permute_index(uint64_t seed, uint64_t epoch, int64_t n, int64_t i)
{
    uint32_t k[4];
    uint64_t x = (uint64_t)i, key0, key1, low_mask, high_mask;
    int      bits = 2, low_bits;
    if (i < 0 || i >= n) return -1;
    if (n == 1) return 0;
    while ((uint64_t)(n - 1) >> bits) bits++;
    low_bits  = (bits + 1) / 2;
    low_mask  = ((uint64_t)1 << low_bits) - 1;
    high_mask = ((uint64_t)1 << (bits - low_bits)) - 1;
    hpmli_philox_scalar(seed, HPMLI_STREAM_SHUFFLE, epoch, k);
    key0 = (uint64_t)k[1] << 32 | k[0];
    key1 = (uint64_t)k[3] << 32 | k[2] | 1;
    do {
        uint64_t low = x & low_mask, high = x >> low_bits, round_key = key0;
        for (int round = 0; round < 4; round++) { /* a round changes the high and then the low bits */
            high ^= hpmli_mix64(low + (round_key += key1)) >> 32 & high_mask;
            low ^= hpmli_mix64(high + (round_key += key1)) >> 32 & low_mask;
        }
        x = high << low_bits | low;
    } while (x >= (uint64_t)n);
    return (int64_t)x;
}

// =====================================================================================================================
// PART III  TENSORS AND GRAPH: what is recorded, where its arrays lie, how it runs
// =====================================================================================================================

// ---------------------------------------------------------------------------------------------------------------------
// >>tensor   tensors and views, copies and conversions
// ---------------------------------------------------------------------------------------------------------------------
/* Private state of a tensor; allocated together with the tensor. */
struct hpmli_tensor_state {
    bool owns_memory; /* true: made by hpml_tensor_create; freed with the tensor */
    bool used;        /* true: a recorded op reads the tensor */
    float *kept;      /* a parameter of whose values this rank keeps a part (hpml_trainer_keep): the part */
    bool away;        /* true: a parameter that only ops in other ranks' parts read: it has no memory here */
    int64_t samples;  /* of an input, in the memory that a graph with parts gave it; 0: the whole batch */
    int  leaf;        /* index among the leaves of the graph that was planned last */
    struct hpmli_rows *rows; /* rows of a sparse table's gradient; NULL: the gradient is dense */
    hpml_tensor *copied; /* what hpml_group_copy has recorded for the tensor; NULL: nothing yet */
};

/* Element types by hpml_dtype: bytes of an element; names in hpml, safetensors and numpy (which lacks bf16). */
static const struct hpmli_dtype {
    size_t      size;
    const char *name, *safe, *numpy;
} hpmli_dtypes[] = { { 4, "f32", "F32", "<f4" }, { 2, "bf16", "BF16", NULL }, { 2, "f16", "F16", "<f2" },
                     { 4, "i32", "I32", "<i4" }, { 1, "u8", "U8", "|u1" } };
#define HPMLI_DTYPES 5
HPML_API size_t hpml_dtype_size(hpml_dtype dtype)
{
    return (unsigned)dtype < HPMLI_DTYPES ? hpmli_dtypes[dtype].size : 0;
}
HPML_API const char *hpml_dtype_name(hpml_dtype dtype)
{
    return (unsigned)dtype < HPMLI_DTYPES ? hpmli_dtypes[dtype].name : "?";
}

/* Returns the number of elements of a shape; -1 if a size is not positive or the number of bytes would overflow. */
HPMLI_FN int64_t hpmli_shape_count(int ndim, const int64_t *shape)
{
    size_t count = 1;
    for (int i = 0; i < ndim; i++)
        if (shape[i] <= 0 || !hpmli_mul(count, (size_t)shape[i], &count) || count > SIZE_MAX / 16) return -1;
    return (int64_t)count;
}

/* Returns a shape as text for a message, such as "64x784"; valid until eight more texts are made in the context. */
HPMLI_FN const char *hpmli_shape_text(hpml_ctx *ctx, int ndim, const int64_t *shape)
{
    hpmli_text_buffer t = hpmli_text_begin(ctx->texts[ctx->text_count++ % 8], sizeof ctx->texts[0]);
    if (ndim < 1) hpmli_text_add(&t, "scalar");
    for (int i = 0; i < ndim; i++) hpmli_text_add(&t, "%s%lld", i ? "x" : "", (long long)shape[i]);
    return t.buffer;
}

HPML_API int64_t hpml_tensor_count(const hpml_tensor *t)
{
    int64_t count = 1;
    if (!t) return 0;
    for (int i = 0; i < t->ndim; i++) count *= t->shape[i];
    return count;
}
HPMLI_FN size_t hpmli_tensor_bytes(const hpml_tensor *t)
{
    return (size_t)hpml_tensor_count(t) * hpml_dtype_size(t->dtype);
}

HPML_API const char *hpml_tensor_text(const hpml_tensor *t, char *buffer, size_t size)
{
    if (!t) snprintf(buffer, size, "no tensor");
    else snprintf(buffer, size, "%s %s \"%s\"", hpml_dtype_name(t->dtype),
                  hpmli_shape_text(t->ctx, t->ndim, t->shape), t->name);
    return buffer;
}

/* Returns a text such as f32 64x784 "fc1.weight" for a message; valid until eight more texts are made. */
HPMLI_FN const char *hpmli_describe(const hpml_tensor *t)
{
    char *buffer = t->ctx->texts[t->ctx->text_count++ % 8];
    return hpml_tensor_text(t, buffer, sizeof t->ctx->texts[0]);
}

HPMLI_FN void hpmli_set_shape(hpml_tensor *t, int ndim, const int64_t *shape)
{
    int64_t stride = 1;
    t->ndim = ndim;
    for (int i = 0; i < HPML_MAX_DIMS; i++) t->shape[i] = i < ndim ? shape[i] : 1;
    for (int i = HPML_MAX_DIMS - 1; i >= 0; i--) {
        t->stride[i] = stride;
        stride *= t->shape[i];
    }
}

HPMLI_FN hpml_tensor *hpmli_tensor_new(hpml_ctx *ctx, const char *name, hpml_dtype dtype, int ndim,
                                       const int64_t *shape)
{
    if (hpmli_failed(ctx)) return NULL;
    if (ndim < 0 || ndim > HPML_MAX_DIMS || (ndim > 0 && !shape))
        return hpmli_null(ctx, HPML_ERR_SHAPE, "tensor \"%s\": %d dimensions, expected 0 to %d", name, ndim,
                          HPML_MAX_DIMS);
    if (hpml_dtype_size(dtype) == 0)
        return hpmli_null(ctx, HPML_ERR_DTYPE, "tensor \"%s\": unknown dtype %d", name, (int)dtype);
    for (int i = 0; i < ndim; i++)
        if (shape[i] <= 0)
            return hpmli_null(ctx, HPML_ERR_SHAPE, "tensor \"%s\": shape %s, every dimension must be at least 1", name,
                              hpmli_shape_text(ctx, ndim, shape));
    if (hpmli_shape_count(ndim, shape) < 0)
        return hpmli_null(ctx, HPML_ERR_OVERFLOW, "tensor \"%s\": shape %s does not fit in memory", name,
                          hpmli_shape_text(ctx, ndim, shape));
    struct block { hpml_tensor tensor; struct hpmli_tensor_state state; } *block = hpmli_new(ctx, struct block, 1);
    if (!block) return NULL;
    hpml_tensor *t = &block->tensor;
    t->state = &block->state;
    t->ctx   = ctx;
    t->name  = name;
    t->dtype = dtype;
    hpmli_set_shape(t, ndim, shape);
    return t;
}

HPMLI_FN void hpmli_set_memory(hpml_tensor *t, void *raw, void *raw_grad)
{
    bool f32 = t->dtype == HPML_DTYPE_F32;
    t->raw      = raw;
    t->raw_grad = raw_grad;
    t->data     = f32 ? (float *)raw : NULL;
    t->grad     = f32 ? (float *)raw_grad : NULL;
}

/* Allocates zeroed memory on the context's device. Returns NULL, with an error on the context, when memory is short. */
HPMLI_FN void *hpmli_device_alloc(hpml_ctx *ctx, size_t bytes)
{
    void *p = ctx->backend->alloc(ctx->device, bytes);
    if (!p) hpmli_fail(ctx, HPML_ERR_MEMORY, "out of memory on the %s device: %zu bytes were requested",
                       ctx->backend->name, bytes);
    return p;
}

HPML_API hpml_tensor *hpml_tensor_create(hpml_ctx *ctx, hpml_dtype dtype, int ndim, const int64_t *shape)
{
    hpml_tensor *t = hpmli_tensor_new(ctx, "tensor", dtype, ndim, shape);
    if (!t) return NULL;
    void *raw = hpmli_device_alloc(ctx, hpmli_tensor_bytes(t));
    if (!raw) {
        hpmli_free(ctx, t);
        return NULL;
    }
    hpmli_set_memory(t, raw, NULL);
    t->state->owns_memory = true;
    return t;
}
HPML_API hpml_tensor *hpml_tensor_create_1d(hpml_ctx *ctx, int64_t d0)
{
    return hpml_tensor_create(ctx, HPML_DTYPE_F32, 1, &d0);
}
HPML_API hpml_tensor *hpml_tensor_create_2d(hpml_ctx *ctx, int64_t d0, int64_t d1)
{
    const int64_t shape[2] = { d0, d1 };
    return hpml_tensor_create(ctx, HPML_DTYPE_F32, 2, shape);
}
HPML_API hpml_tensor *hpml_tensor_create_3d(hpml_ctx *ctx, int64_t d0, int64_t d1, int64_t d2)
{
    const int64_t shape[3] = { d0, d1, d2 };
    return hpml_tensor_create(ctx, HPML_DTYPE_F32, 3, shape);
}
HPML_API hpml_tensor *hpml_tensor_create_4d(hpml_ctx *ctx, int64_t d0, int64_t d1, int64_t d2, int64_t d3)
{
    const int64_t shape[4] = { d0, d1, d2, d3 };
    return hpml_tensor_create(ctx, HPML_DTYPE_F32, 4, shape);
}

HPMLI_FN bool hpmli_has_views(const hpml_tensor *t)
{
    if (!t || hpmli_failed(t->ctx)) return false;
    if (t->raw) return true;
    return hpmli_false(t->ctx, HPML_ERR_STATE, "view of \"%s\": it has no memory yet; record hpml_reshape, hpml_slice "
                       "or hpml_transpose instead", t->name);
}

/* Creates a view of t with the same shape and strides; the caller changes them. */
HPMLI_FN hpml_tensor *hpmli_view(const hpml_tensor *t)
{
    hpml_tensor *v = hpmli_tensor_new(t->ctx, "view", t->dtype, t->ndim, t->shape);
    if (!v) return NULL;
    hpmli_set_memory(v, t->raw, NULL);
    memcpy(v->stride, t->stride, sizeof v->stride);
    return v;
}

HPML_API void hpml_tensor_free(hpml_tensor *t)
{
    if (!t || t->node || t->param || t->batch_rows) return;
    if (t->state->owns_memory) t->ctx->backend->free(t->ctx->device, t->raw, hpmli_tensor_bytes(t));
    hpmli_free(t->ctx, t);
}

HPMLI_FN bool hpmli_contiguous(const hpml_tensor *t)
{
    int64_t stride = 1;
    for (int i = t->ndim - 1; i >= 0; i--) {
        if (t->shape[i] != 1 && t->stride[i] != stride) return false;
        stride *= t->shape[i];
    }
    return true;
}

/* Copies the shape `want` to `shape`, a -1 replaced so that it has `count` elements; false if no size does that. */
HPMLI_FN bool hpmli_reshape_rule(int64_t count, int ndim, const int64_t *want, int64_t *shape)
{
    int64_t known = 1;
    int     open  = -1;
    if (ndim < 0 || ndim > HPML_MAX_DIMS || (ndim > 0 && !want)) return false;
    for (int i = 0; i < ndim; i++) {
        shape[i] = want[i];
        if (want[i] == -1 && open < 0) open = i;
        else if (want[i] <= 0 || known > count / want[i]) return false;
        else known *= want[i];
    }
    if (open >= 0) {
        if (known == 0 || count % known != 0) return false;
        shape[open] = count / known;
        known *= shape[open];
    }
    return known == count;
}

HPMLI_FN hpml_tensor *hpmli_reshape_error(hpml_tensor *t, int ndim, const int64_t *want)
{
    const char *shape = hpmli_shape_text(t->ctx, !want || ndim > HPML_MAX_DIMS ? 0 : ndim, want);
    return hpmli_null(t->ctx, HPML_ERR_SHAPE, "reshape of %s to %s: the number of elements must stay the same, and at "
                      "most one dimension may be -1", hpmli_describe(t), shape);
}

HPML_API hpml_tensor *hpml_view_reshape(hpml_tensor *t, int ndim, const int64_t *shape)
{
    int64_t full[HPML_MAX_DIMS];
    if (!hpmli_has_views(t)) return NULL;
    if (!hpmli_contiguous(t) || !hpmli_reshape_rule(hpml_tensor_count(t), ndim, shape, full))
        return hpmli_reshape_error(t, ndim, shape);
    hpml_tensor *v = hpmli_view(t);
    if (v) hpmli_set_shape(v, ndim, full);
    return v;
}

HPMLI_FN bool hpmli_slice_fits(const hpml_tensor *t, int dim, int64_t start, int64_t count)
{
    if (dim >= 0 && dim < t->ndim && start >= 0 && count > 0 && start <= t->shape[dim] - count) return true;
    return hpmli_false(t->ctx, HPML_ERR_SHAPE, "slice of %s: %lld indices from %lld on are not in dimension %d",
                       hpmli_describe(t), (long long)count, (long long)start, dim);
}

HPML_API hpml_tensor *hpml_view_slice(hpml_tensor *t, int dim, int64_t start, int64_t count)
{
    if (!hpmli_has_views(t) || !hpmli_slice_fits(t, dim, start, count)) return NULL;
    hpml_tensor *v = hpmli_view(t);
    if (!v) return NULL;
    v->shape[dim] = count;
    hpmli_set_memory(v, (char *)t->raw + (size_t)(start * t->stride[dim]) * hpml_dtype_size(t->dtype), NULL);
    return v;
}

HPML_API hpml_tensor *hpml_view_transpose(hpml_tensor *t, int dim_a, int dim_b)
{
    if (!hpmli_has_views(t)) return NULL;
    if (dim_a < 0 || dim_b < 0 || dim_a >= t->ndim || dim_b >= t->ndim)
        return hpmli_null(t->ctx, HPML_ERR_SHAPE, "transpose of %s: no dimension %d or %d", hpmli_describe(t), dim_a,
                          dim_b);
    hpml_tensor *v = hpmli_view(t);
    if (!v) return NULL;
    v->shape[dim_a]  = t->shape[dim_b];
    v->stride[dim_a] = t->stride[dim_b];
    v->shape[dim_b]  = t->shape[dim_a];
    v->stride[dim_b] = t->stride[dim_a];
    return v;
}

/* Converts n elements between any two types through f32, 1,024 at a time, which stay in the cache. Equal types are
   copied, because f32 keeps only 24 bits of an I32. */
HPMLI_FN void hpmli_convert(const hpmli_kernels *k, hpml_dtype to, void *dst, hpml_dtype from, const void *src,
                            int64_t n)
{
    float  piece[1024], raw[1024]; /* raw: an aligned copy of elements that are not aligned, as in files */
    size_t to_size = hpml_dtype_size(to), from_size = hpml_dtype_size(from);
    if (to == from) memmove(dst, src, (size_t)n * to_size);
    for (int64_t i = 0, count; i < n && to != from; i += count) {
        const void *x = (const char *)src + (size_t)i * from_size;
        void       *y = (char *)dst + (size_t)i * to_size, *made = (uintptr_t)y % to_size ? raw : y;
        count = hpmli_min(n - i, 1024);
        if ((uintptr_t)x % from_size) x = memcpy(raw, x, (size_t)count * from_size);
        k->to_f32(piece, from, x, count);
        k->from_f32(to, made, piece, count);
        if (made != y) memcpy(y, made, (size_t)count * to_size);
    }
}

HPML_API hpml_status hpml_convert(hpml_ctx *ctx, hpml_dtype to, void *dst, hpml_dtype from, const void *src, int64_t n)
{
    if (hpmli_failed(ctx)) return hpml_ctx_status(ctx);
    if (!dst || !src || n < 0 || !hpml_dtype_size(to) || !hpml_dtype_size(from))
        return hpmli_fail(ctx, HPML_ERR_ARGUMENT, "convert: needs two arrays, two dtypes, n >= 0; n is %lld",
                          (long long)n);
    hpmli_convert(ctx->k, to, dst, from, src, n);
    return HPML_OK;
}

/* A loop over two operands, a and b, in the shape of a result. Shapes are matched from the last dimension; a dimension
   of size 1 is repeated, which in memory is a stride of 0. Adjacent dimensions are joined where both operands allow, so
   that equal shapes become one long run of elements and (B, C) + (C) becomes B runs of C elements. */
typedef struct hpmli_broadcast_iter {
    int     ndim;
    int64_t shape[HPML_MAX_DIMS];     /* of the result, with joined dimensions */
    int64_t stride[2][HPML_MAX_DIMS]; /* of a and b, in elements; 0 where the operand is repeated */
    int64_t runs, run;                /* number of runs; elements of a run (the last joined dimension) */
} hpmli_broadcast_iter;

HPMLI_FN void hpmli_broadcast_make(hpmli_broadcast_iter *w, const hpml_tensor *out, const hpml_tensor *a,
                                   const hpml_tensor *b)
{
    const hpml_tensor *src[2] = { a, b };
    w->ndim = 0;
    for (int i = 0; i == 0 || i < out->ndim; i++) { /* outermost first; i joins the one before, if both allow */
        bool    last = i + 1 >= out->ndim;
        int64_t size = out->shape[i], stride[2];
        for (int s = 0; s < 2; s++) {
            int dim = i - (out->ndim - src[s]->ndim);
            stride[s] = dim >= 0 && src[s]->shape[dim] > 1 ? src[s]->stride[dim] : 0;
        }
        if (w->ndim > 0 && w->stride[0][w->ndim - 1] == stride[0] * size &&
            w->stride[1][w->ndim - 1] == stride[1] * size)
            size *= w->shape[--w->ndim];
        else if (size == 1 && !(last && w->ndim == 0)) continue; /* a scalar is one run of one element */
        w->shape[w->ndim]     = size;
        w->stride[0][w->ndim] = stride[0];
        w->stride[1][w->ndim] = stride[1];
        w->ndim++;
    }
    w->run  = w->shape[w->ndim - 1];
    w->runs = 1;
    for (int i = 0; i < w->ndim - 1; i++) w->runs *= w->shape[i];
}

/* Returns the offset, in elements, of operand s (0: a, 1: b) at the start of run r, which is the r-th row of the result
   if its last joined dimension counts as the row. */
HPMLI_FN int64_t hpmli_broadcast_offset(const hpmli_broadcast_iter *w, int s, int64_t r)
{
    int64_t at = 0;
    for (int i = w->ndim - 2; i > 0; i--) {
        at += r % w->shape[i] * w->stride[s][i];
        r /= w->shape[i];
    }
    return at + r * w->stride[s][0];
}

HPML_API hpml_status hpml_tensor_copy(hpml_tensor *dst, const hpml_tensor *src)
{
    hpmli_broadcast_iter w;
    if (!dst || !src || hpmli_failed(dst->ctx)) return dst ? hpml_ctx_status(dst->ctx) : HPML_ERR_ARGUMENT;
    if (dst->ndim != src->ndim || memcmp(dst->shape, src->shape, sizeof dst->shape) != 0 || !dst->raw || !src->raw)
        return hpmli_fail(dst->ctx, HPML_ERR_SHAPE, "copy of %s to %s: both need memory and the same shape",
                          hpmli_describe(src), hpmli_describe(dst));
    hpmli_broadcast_make(&w, dst, dst, src);
    int64_t to = w.stride[0][w.ndim - 1], from = w.stride[1][w.ndim - 1], whole = to == 1 && from == 1 ? w.run : 1;
    for (int64_t i = 0; i < w.runs * w.run; i += whole) {
        int64_t run = i / w.run, d = hpmli_broadcast_offset(&w, 0, run) + i % w.run * to;
        int64_t s = hpmli_broadcast_offset(&w, 1, run) + i % w.run * from;
        hpmli_convert(dst->ctx->k, dst->dtype, (char *)dst->raw + (size_t)d * hpml_dtype_size(dst->dtype), src->dtype,
                      (const char *)src->raw + (size_t)s * hpml_dtype_size(src->dtype), whole);
    }
    return HPML_OK;
}

// ---------------------------------------------------------------------------------------------------------------------
// >>host   whole tensors to and from host memory
// ---------------------------------------------------------------------------------------------------------------------
HPMLI_FN bool hpmli_is_half(hpml_dtype dtype) { return dtype == HPML_DTYPE_BF16 || dtype == HPML_DTYPE_F16; }
HPMLI_FN hpml_status hpmli_read_floats(hpml_ctx *ctx, const hpml_tensor *t, int64_t n, float *out)
{
    size_t      bytes  = (size_t)n * hpml_dtype_size(t->dtype);
    char       *raw    = (char *)out + ((size_t)n * sizeof(float) - bytes); /* the end of out, converted there */
    hpml_status status = ctx->backend->read(ctx->device, raw, t->raw, bytes);
    if (t->dtype != HPML_DTYPE_F32) hpmli_convert(ctx->k, HPML_DTYPE_F32, out, t->dtype, raw, n);
    return status;
}

HPMLI_FN hpml_status hpmli_write_floats(hpml_ctx *ctx, const hpml_tensor *t, int64_t n, const float *in)
{
    size_t bytes = (size_t)n * hpml_dtype_size(t->dtype);
    void  *raw   = hpmli_alloc(ctx, bytes);
    if (!raw) return ctx->status;
    hpmli_convert(ctx->k, t->dtype, raw, HPML_DTYPE_F32, in, n);
    hpml_status status = ctx->backend->write(ctx->device, t->raw, raw, bytes);
    hpmli_free(ctx, raw);
    return status;
}

/* True if `values` is not NULL, t has memory and no gaps, and has `count` values; else an error that names `verb`. */
HPMLI_FN bool hpmli_transferable(const hpml_tensor *t, const char *verb, const void *values, int64_t count)
{
    if (!t || hpmli_failed(t->ctx)) return false;
    if (values && t->raw && hpmli_contiguous(t) && count == hpml_tensor_count(t)) return true;
    return hpmli_false(t->ctx, HPML_ERR_SHAPE, "%s %s: needs memory, a contiguous tensor and %lld values, got %lld%s",
                       verb, hpmli_describe(t), (long long)hpml_tensor_count(t), (long long)count,
                       t->raw ? "" : " (no memory yet: create the trainer or call hpml_graph_alloc first)");
}

HPMLI_FN bool hpmli_transferable_raw(const hpml_tensor *t, const char *verb, const void *values, size_t bytes)
{
    if (!t || !hpmli_transferable(t, verb, values, hpml_tensor_count(t))) return false;
    if (bytes == hpmli_tensor_bytes(t)) return true;
    return hpmli_false(t->ctx, HPML_ERR_SHAPE, "%s %s: expected %zu bytes, got %zu", verb, hpmli_describe(t),
                       hpmli_tensor_bytes(t), bytes);
}

HPMLI_FN hpml_status hpmli_tensor_status(const hpml_tensor *t) { return t ? t->ctx->status : HPML_ERR_ARGUMENT; }
HPML_API hpml_status hpml_tensor_set(hpml_tensor *t, const float *values, int64_t count)
{
    if (!hpmli_transferable(t, "set", values, count)) return hpmli_tensor_status(t);
    if (t->dtype != HPML_DTYPE_F32) return hpmli_write_floats(t->ctx, t, count, values);
    return t->ctx->backend->write(t->ctx->device, t->raw, values, hpmli_tensor_bytes(t));
}
HPML_API hpml_status hpml_tensor_get(const hpml_tensor *t, float *values, int64_t count)
{
    if (!hpmli_transferable(t, "get", values, count)) return hpmli_tensor_status(t);
    return hpmli_read_floats(t->ctx, t, count, values);
}
HPML_API hpml_status hpml_tensor_set_raw(hpml_tensor *t, const void *values, size_t bytes)
{
    if (!hpmli_transferable_raw(t, "set_raw", values, bytes)) return hpmli_tensor_status(t);
    return t->ctx->backend->write(t->ctx->device, t->raw, values, bytes);
}
HPML_API hpml_status hpml_tensor_get_raw(const hpml_tensor *t, void *values, size_t bytes)
{
    if (!hpmli_transferable_raw(t, "get_raw", values, bytes)) return hpmli_tensor_status(t);
    return t->ctx->backend->read(t->ctx->device, values, t->raw, bytes);
}

// ---------------------------------------------------------------------------------------------------------------------
// >>op-table   the table of ops: a row for each, and the loops of which most passes consist
// ---------------------------------------------------------------------------------------------------------------------
/* Bits of hpmli_op_info.needs: values that a node's backward pass reads, so that the planner keeps them until then. */
#define HPMLI_NEED_SRC(i) HPML_KEEP_SRC(i)            /* the value of source i */
#define HPMLI_NEED_OUT    HPML_KEEP_OUT               /* the value of the result */
#define HPMLI_INPLACE     (1u << (HPML_MAX_SRC + 1))  /* no value: forward may write the result over source 0 */
#define HPMLI_NEED_BOTH   (HPMLI_NEED_SRC(0) | HPMLI_NEED_SRC(1))

/* Traits of an op (hpmli_op_info.traits): what code outside the op's section has to know. */
enum {
    HPMLI_OP_IS_ALIAS    = 1,   /* the result is in the memory of source 0, of any dtype; nothing is computed */
    HPMLI_OP_REORDERS    = 2,   /* the result's dimensions differ from the sources', so it has no image layout */
    HPMLI_OP_INDEX_0     = 4,   /* source 0 (INDEX_1: source 1) is indices (tokens, labels): I32, no gradient */
    HPMLI_OP_INDEX_1     = 8,
    HPMLI_OP_PRODUCT     = 16,  /* a matrix product; weights are rounded where results are stored in halves */
    HPMLI_OP_PAIRS_ROWS  = 32,  /* row i of the result reads row i of each source with as many dimensions */
    HPMLI_OP_JOINS_BATCH = 64,  /* results depend on the whole global batch: ranks without samples take part */
    HPMLI_OP_IS_MEAN     = 128, /* a loss: the mean over the rows or elements of source 0 */
    HPMLI_OP_KEEPS_SUM   = 256, /* `saved` is the sum before the activation, an array of the result's shape */
    HPMLI_OP_IS_WHOLE    = 512, /* runs on all samples at once, also where results are stored in halves */
    /* If source 0 is split over ranks (see >>split) in a way that a flag below allows, the result is split alike: */
    HPMLI_OP_SPLIT_ANY   = 1024, /* along any dimension */
    HPMLI_OP_SPLIT_ROWS  = 2048, /* along all dimensions but the last one */
    HPMLI_OP_SPLIT_PLANE = 4096, /* along the channels */
    HPMLI_OP_SPLIT_OWN   = 8192, /* as the function that records the op checks, which sets the result's split */
    HPMLI_OP_KEEPS_DZ    = 16384 /* backward overwrites dy by dz, the gradient before the activation; the gradient of
                                    source 0 is a product of dz and source 1, that of source 1 of dz and source 0 */
};

/* An entry of the table of ops; hpmli_op_of returns the entry of a node's op. */
typedef struct hpmli_op_info {
    unsigned (*needs)(const hpml_node *n);            /* HPMLI_NEED_* and HPMLI_INPLACE of this node */
    double (*flops)(const hpml_node *n, bool back);   /* operations of one forward or backward pass */
    unsigned     traits;                              /* HPMLI_OP_* flags */
    hpml_op_impl run;
} hpmli_op_info;
HPMLI_FN const hpmli_op_info *hpmli_op_row(hpml_op op); /* the table is defined behind all ops, in >>backend */
HPMLI_FN const hpmli_op_info *hpmli_op_of(const hpml_node *n) { return hpmli_op_row(n->op); }
HPMLI_FN bool hpmli_has_trait(const hpml_node *n, unsigned trait) { return (hpmli_op_of(n)->traits & trait) != 0; }
HPMLI_FN bool hpmli_is_collective(const hpml_node *n)
{
    return n->op == HPML_OP_CUSTOM && n->attr.custom->collective;
}
HPML_API const char *hpml_op_name(hpml_op op)
{
    static const char *const names[] = {
#define HPMLI_OP_NAME(op, name) #name,
        HPML_OPS(HPMLI_OP_NAME)
    };
    return op >= 0 && op < HPML_OP_COUNT ? names[op] : "?";
}

/* Returns the operations of a pass of n, one for each element of its result; none in backward without a gradient. */
HPMLI_FN double hpmli_flops_pointwise(const hpml_node *n, bool back)
{
    return back && !n->out->needs_grad ? 0 : (double)hpml_tensor_count(n->out);
}

/* Returns the operations of a matrix product each of whose results is a sum of `inner` products; a multiply-add counts
   2. The backward pass makes one product for each of the sources 0 and 1 that needs a gradient. */
HPMLI_FN double hpmli_flops_product(const hpml_node *n, bool back, int64_t inner)
{
    int products = n->src[0]->needs_grad + n->src[1]->needs_grad;
    return 2 * (double)hpml_tensor_count(n->out) * (double)inner * (back ? products : 1);
}

/* Defines an op and its entry in the table of ops. traits, needs: HPMLI_OP_, HPMLI_NEED_ bits; flops: a number from `n`
   and `back` (backward); forward, backward: statements with `run` and `n`, which return a status on failure. */
#define HPMLI_OP(name, traits, needs, flops, forward, backward)                                                        \
    HPMLI_FN unsigned hpmli_##name##_needs(const hpml_node *n HPMLI_UNUSED) { return needs; }                          \
    HPMLI_FN double hpmli_##name##_flops(const hpml_node *n HPMLI_UNUSED, bool back HPMLI_UNUSED) { return flops; }    \
    HPMLI_FN hpml_status hpmli_##name##_forward(const hpml_run *run HPMLI_UNUSED, hpml_node *n)                        \
    {                                                                                                                  \
        forward;                                                                                                       \
        return HPML_OK;                                                                                                \
    }                                                                                                                  \
    HPMLI_FN hpml_status hpmli_##name##_backward(const hpml_run *run HPMLI_UNUSED, hpml_node *n)                       \
    {                                                                                                                  \
        backward;                                                                                                      \
        return HPML_OK;                                                                                                \
    }                                                                                                                  \
    static const hpmli_op_info hpmli_##name##_op = { hpmli_##name##_needs, hpmli_##name##_flops, traits,               \
                                                     { hpmli_##name##_forward, hpmli_##name##_backward } }

/* A loop over independent items (rows, planes, channels, chunks of elements), as most ops are: calls fn for each of
   `count` items; `per_task` items make one task of the thread pool. */
typedef struct hpmli_work hpmli_work;
typedef void hpmli_work_fn(const hpmli_work *w, int64_t item, int thread);
struct hpmli_work {
    const hpml_run      *run;
    const hpmli_kernels *k;
    hpml_node           *n;
    int64_t              cols; /* elements in the last dimension of source 0 */
    bool                 back; /* true in the backward pass */
    int64_t              count, per_task;
    hpmli_work_fn       *fn;
};
HPMLI_FN void hpmli_for_each_task(void *arg, int64_t task, int thread)
{
    const hpmli_work *w = (const hpmli_work *)arg;
    for (int64_t i = task * w->per_task; i < (task + 1) * w->per_task && i < w->count; i++) w->fn(w, i, thread);
}
HPMLI_FN void hpmli_for_each_parallel(const hpml_run *run, hpml_node *n, bool back, int64_t count, int64_t per_task,
                                      hpmli_work_fn *fn)
{
    const hpml_tensor *x = n->src[0];
    hpmli_work         w = { run, run->ctx->k, n, x->ndim ? x->shape[x->ndim - 1] : 1, back, count, per_task, fn };
    hpmli_parallel(run->ctx, (count + per_task - 1) / per_task, hpmli_for_each_task, &w);
}

/* Defines an op (HPMLI_OP) whose passes call a function for each of `count` items, `per_task` items in one task. */
#define HPMLI_WORK_OP(name, traits, needs, flops, count, per_task, forward, backward)                                  \
    HPMLI_OP(name, traits, needs, flops, hpmli_for_each_parallel(run, n, false, count, per_task, hpmli_##forward),     \
             hpmli_for_each_parallel(run, n, true, count, per_task, hpmli_##backward))

HPMLI_FN void hpmli_for_each_row(const hpml_run *run, hpml_node *n, bool back, hpmli_work_fn *fn)
{
    int64_t cols = n->src[0]->shape[n->src[0]->ndim - 1];
    hpmli_for_each_parallel(run, n, back, hpml_tensor_count(n->src[0]) / cols, hpmli_rows_per_task(cols), fn);
}

/* Loops over n elements in parts of at most HPMLI_PIECE, for buffers on the stack: c elements from element i on. */
#define HPMLI_PIECE 512
#define HPMLI_PIECES(i, c, n) \
    for (int64_t i = 0, c; c = (n) - i < HPMLI_PIECE ? (n) - i : HPMLI_PIECE, i < (n); i += HPMLI_PIECE)

// ---------------------------------------------------------------------------------------------------------------------
// >>split   parts of tensors: where they lie in the whole, and which ops keep a split
// ---------------------------------------------------------------------------------------------------------------------
/* A dimension that is split consists of sections, each cut into one block for each rank of the group. As arrays are
   row-major, the whole is a sequence of stretches of `size` runs, one for each rank in turn, and a part has its run of
   each stretch, one after the other. A run is n elements: a block, times the elements of all later dimensions. */
typedef struct hpmli_cut {
    int64_t n, rank, size;
} hpmli_cut;

/* Returns the index in the whole of element i of the part. */
HPMLI_FN int64_t hpmli_cut_place(const hpmli_cut *c, int64_t i)
{
    return (i / c->n * c->size + c->rank) * c->n + i % c->n;
}

/* Returns how each of the equal sections of dimension dim is cut over the ranks of `axis`; t has a part's shape. */
HPMLI_FN hpmli_cut hpmli_cut_of(const hpml_tensor *t, hpml_axis axis, int dim, int64_t sections)
{
    const hpml_group *g = hpml_ctx_group(t->ctx, axis);
    hpmli_cut         c = { t->shape[dim] / sections, g->rank, g->size };
    for (int i = dim + 1; i < t->ndim; i++) c.n *= t->shape[i];
    return c;
}

/* Copies elements first .. first + count - 1 of a part, which begin at `part`, to their places in the whole (join), or
   from there. */
HPMLI_FN void hpmli_cut_copy(const hpmli_cut *c, float *whole, float *part, int64_t first, int64_t count, bool join)
{
    for (int64_t i = first, n; i < first + count; i += n, part += n) {
        float *at = whole + hpmli_cut_place(c, i);
        n = hpmli_min(c->n - i % c->n, first + count - i);
        if (join) memcpy(at, part, (size_t)n * sizeof *part);
        else memcpy(part, at, (size_t)n * sizeof *part);
    }
}

/* Gathers the parts of all ranks of g (count elements each) in the array `all` (count times size), and copies each part
   from there to its place in `whole`, which c describes. */
HPMLI_FN hpml_status hpmli_cut_join(const hpml_group *g, hpmli_cut c, const float *part, int64_t count, float *all,
                                    float *whole)
{
    hpml_status status = g->gather(g->user, part, all, count);
    for (c.rank = 0; status == HPML_OK && c.rank < c.size; c.rank++)
        hpmli_cut_copy(&c, whole, all + c.rank * count, 0, count, true);
    return status;
}

HPMLI_FN bool hpmli_is_split(const hpml_tensor *t)
{
    for (int i = 0; i < t->ndim; i++)
        if (t->split[i]) return true;
    return false;
}

/* Returns the number of sections of dimension dim, equal ranges of which each is split over all ranks by itself:
   t->sections if dim is the last split dimension of t, else 1. */
HPMLI_FN int64_t hpmli_sections(const hpml_tensor *t, int dim)
{
    for (int i = dim + 1; i < t->ndim; i++)
        if (t->split[i]) return 1;
    return t->split[dim] ? hpmli_max(t->sections, 1) : 1;
}

/* Returns the index, in the whole, of element i of t, which is this rank's part of the whole. *run: the number of
   elements, from element i on, that follow each other without a gap both in t and in the whole. */
HPMLI_FN int64_t hpmli_whole_place(const hpml_tensor *t, int64_t i, int64_t *run)
{
    int64_t later = 1; /* elements of the whole in the dimensions after d */
    *run = hpml_tensor_count(t) - i;
    for (int d = t->ndim - 1; d >= 0; later *= t->shape[d--]) {
        if (!t->split[d]) continue;
        const hpml_group *g = hpml_ctx_group(t->ctx, (hpml_axis)t->split[d]);
        hpmli_cut         c = { t->shape[d] / hpmli_sections(t, d) * later, g->rank, g->size };
        *run = hpmli_min(*run, c.n - i % c.n);
        i    = hpmli_cut_place(&c, i);
        later *= g->size;
    }
    return i;
}

HPMLI_FN void hpmli_split_set(hpml_tensor *t, int dim, hpml_axis axis, int64_t sections)
{
    t->split[dim] = (int8_t)axis;
    t->sections   = (int32_t)sections;
}

/* Returns for a message how t is split; valid until eight more texts are made in the context. */
HPMLI_FN const char *hpmli_split_text(const hpml_tensor *t)
{
    hpmli_text_buffer b = hpmli_text_begin(t->ctx->texts[t->ctx->text_count++ % 8], sizeof t->ctx->texts[0]);
    const char       *more = "split over the";
    for (int i = 0; i < t->ndim; i++) {
        if (!t->split[i]) continue;
        hpmli_text_add(&b, "%s %s axis along dimension %d", more, hpml_axis_name((hpml_axis)t->split[i]), i);
        if (hpmli_sections(t, i) > 1) hpmli_text_add(&b, " in %lld sections", (long long)hpmli_sections(t, i));
        more = " and over the";
    }
    if (b.used == 0) hpmli_text_add(&b, "whole");
    return b.buffer;
}

HPMLI_FN bool hpmli_split_refuse(const char *op, const hpml_tensor *x, int dim, const char *why)
{
    return hpmli_false(x->ctx, HPML_ERR_SHAPE, "%s: %s is %s; %s: record hpml_group_gather(x, axis, %d) first", op,
                       hpmli_describe(x), hpmli_split_text(x), why, dim);
}

HPMLI_FN void hpmli_split_take(hpml_tensor *t, const int8_t *split, int32_t sections) /* t may be NULL */
{
    if (!t) return;
    memcpy(t->split, split, sizeof t->split);
    t->sections = sections;
}

/* Splits n's result as its source 0 is split; false, with an error, if the op needs the whole of a dimension that is
   split. An op that computes a loss or the gradient of a whole (not split) parameter needs the whole of dimensions that
   are split on TENSOR, because each rank of this axis would compute only a part of the loss or gradient. */
HPMLI_FN bool hpmli_split_follow(hpml_node *n)
{
    const hpml_tensor *x       = n->src[0];
    const unsigned     traits  = hpmli_op_of(n)->traits;
    const int          channel = x->layout == HPML_NHWC ? x->ndim - 1 : 1;
    const bool         trains  = n->src_count > 1 && n->src[1] && n->src[1]->needs_grad && !hpmli_is_split(n->src[1]);
    if (n->op == HPML_OP_CUSTOM && memcmp(n->out->shape, x->shape, sizeof x->shape) != 0) return true;
    for (int d = 0; d < x->ndim && !(traits & HPMLI_OP_SPLIT_OWN); d++) {
        const bool tensor = x->split[d] == HPML_AXIS_TENSOR, last = d == x->ndim - 1;
        bool       fits   = (traits & HPMLI_OP_SPLIT_ANY) || ((traits & HPMLI_OP_SPLIT_PLANE) && d == channel);
        if (traits & HPMLI_OP_SPLIT_ROWS && !last) fits = true;
        if (tensor && trains && n->op != HPML_OP_CUSTOM) fits = false;
        if (traits & HPMLI_OP_IS_MEAN) fits = !tensor;
        if (x->split[d] && !fits) return hpmli_split_refuse(hpml_op_name(n->op), x, d, "the op needs it whole");
        if (x->split[d] && d < n->out->ndim) hpmli_split_set(n->out, d, (hpml_axis)x->split[d], x->sections);
    }
    return true;
}

/* The classes of logits or the tokens of an embedding table, `whole` in number, of which this rank has `count` from
   number `first` on. If they are split over ranks, the loss or embedding is a custom op, and `group` is not NULL,
   because its results must be added up over the ranks. */
typedef struct hpmli_vocabulary {
    const hpml_group *group;
    int64_t           first, count, whole;
    float             smoothing; /* of the loss; it ignores rows with the label `ignore` */
    int32_t           ignore;
} hpmli_vocabulary;
HPMLI_FN hpmli_vocabulary hpmli_vocabulary_of(const hpml_node *n, int64_t count)
{
    hpmli_vocabulary v = { NULL, 0, count, count, 0, 0 };
    if (n->op == HPML_OP_CUSTOM) return *(const hpmli_vocabulary *)n->attr.custom->user;
    if (n->op != HPML_OP_CROSS_ENTROPY) return v;
    v.smoothing = n->attr.cross_entropy.smoothing;
    v.ignore    = n->attr.cross_entropy.ignore;
    return v;
}
static hpml_tensor *hpmli_vocabulary_op(hpml_tensor *const src[2], hpml_custom *d, int64_t count, float smoothing,
                                        int32_t ignore); /* see >>groups */

HPMLI_FN bool hpmli_split_mismatch(const char *op, const hpml_tensor *a, const hpml_tensor *b)
{
    return hpmli_false(a->ctx, HPML_ERR_SHAPE, "%s: %s is %s, %s is %s; record hpml_group_gather for the one or "
                       "hpml_group_split for the other", op, hpmli_describe(a), hpmli_split_text(a), hpmli_describe(b),
                       hpmli_split_text(b));
}

/* Checks how the operands a (.., m, k) and b (.., k, n) of a matrix product are split; m_k and k_n: the numbers of
   these dimensions in a and b. If rows of a or columns of b are split over TENSOR, records hpml_group_copy of the other
   operand, because each rank computes only a part of that operand's gradient. Sets split and *sections of the result,
   and *sum, the axis over which the ranks' products must be added up because k is split (DATA: k is not split). False:
   an error. */
HPMLI_FN bool hpmli_split_matmul(hpml_tensor **src, const int m_k[2], const int k_n[2], int8_t *split,
                                 int32_t *sections, hpml_axis *sum)
{
    const hpml_tensor *a = src[0], *b = src[1];
    const int          last = a->ndim - 1;
    bool alike  = a->split[m_k[1]] == b->split[k_n[0]], rows = false; /* rows: a rank has some of all rows of a */
    alike = alike && hpmli_sections(a, m_k[1]) == hpmli_sections(b, k_n[0]);
    memset(split, 0, HPML_MAX_DIMS);
    for (int i = 0; i < last - 1 && alike; i++) {
        split[i] = a->split[i];
        alike    = b->ndim == 2 || a->split[i] == b->split[i];
        rows |= b->ndim == 2 && a->split[i] == HPML_AXIS_TENSOR;
    }
    split[last - 1] = a->split[m_k[0]];
    split[last]     = b->split[k_n[1]];
    *sections       = split[last] ? b->sections : a->sections;
    *sum            = (hpml_axis)a->split[m_k[1]];
    rows |= split[last - 1] == HPML_AXIS_TENSOR;
    if (!alike || (rows && split[last] == HPML_AXIS_TENSOR)) return hpmli_split_mismatch("matmul", a, b);
    if (rows) src[1] = hpml_group_copy(src[1], HPML_AXIS_TENSOR);
    if (split[last] == HPML_AXIS_TENSOR) src[0] = hpml_group_copy(src[0], HPML_AXIS_TENSOR);
    return true;
}

/* Checks the operands of an elementwise op before it is recorded: dimensions, paired from the last one backwards, must
   be split alike, or one operand's dimension is not split and has size 1. On axis TENSOR this operand is then replaced
   by hpml_group_copy of it, because each rank computes a part of its gradient. Sets split (ndim) and *sections of the
   result; false: an error. */
HPMLI_FN bool hpmli_split_pair(const char *op, hpml_tensor **src, int ndim, int8_t *split, int32_t *sections)
{
    bool copy[2] = { false, false };
    memset(split, 0, HPML_MAX_DIMS);
    *sections = 0;
    for (int k = 1; k <= ndim && (hpmli_is_split(src[0]) || hpmli_is_split(src[1])); k++) {
        int d[2] = { src[0]->ndim - k, src[1]->ndim - k };
        int axis[2], of;
        for (int s = 0; s < 2; s++) axis[s] = d[s] < 0 ? 0 : src[s]->split[d[s]];
        of = axis[0] ? 0 : 1; /* the operand that is split */
        if (!axis[of]) continue;
        bool repeated = !axis[!of] && (d[!of] < 0 || src[!of]->shape[d[!of]] == 1);
        bool alike    = axis[0] == axis[1] && hpmli_sections(src[0], d[0]) == hpmli_sections(src[1], d[1]);
        if (!repeated && !alike) return hpmli_split_mismatch(op, src[0], src[1]);
        copy[!of] |= repeated && axis[of] == HPML_AXIS_TENSOR;
        split[ndim - k] = (int8_t)axis[of];
        *sections       = src[of]->sections;
    }
    for (int s = 0; s < 2; s++)
        if (copy[s]) src[s] = hpml_group_copy(src[s], HPML_AXIS_TENSOR);
    return true;
}

/* Changes start and count of a slice along dim from indices of the whole to indices of this rank's part, if dim is
   split. The slice must consist of whole sections (hpmli_sections); *sections: gets their number. False: an error. */
HPMLI_FN bool hpmli_split_slice(const hpml_tensor *x, int dim, int64_t *start, int64_t *count, int64_t *sections)
{
    if (dim < 0 || dim >= x->ndim || !x->split[dim]) return true;
    const int64_t size = hpml_ctx_group(x->ctx, (hpml_axis)x->split[dim])->size;
    const int64_t section = x->shape[dim] / hpmli_sections(x, dim) * size; /* its length in the whole */
    if (*start % section != 0 || *count % section != 0)
        return hpmli_split_refuse("slice", x, dim, "only whole sections can be taken from it");
    *sections = *count / section;
    *start /= size;
    *count /= size;
    return true;
}

/* Checks that x, to be concatenated with `first` along dimension dim, is split as `first` is; along dim, if that is
   split, the sections of both must have the same length, along other dimensions there must be as many sections. */
HPMLI_FN bool hpmli_split_concat(const hpml_tensor *first, const hpml_tensor *x, int dim)
{
    bool fits = memcmp(first->split, x->split, sizeof x->split) == 0;
    for (int d = 0; d < x->ndim && fits; d++) {
        int64_t a = hpmli_sections(first, d), b = hpmli_sections(x, d);
        fits = d == dim ? first->shape[d] * b == x->shape[d] * a : a == b;
        if (d == dim && !x->split[d]) fits = true;
    }
    return fits || hpmli_false(x->ctx, HPML_ERR_SHAPE, "concat: %s is %s, %s is %s; expected the same splits, with "
                               "sections of the same length", hpmli_describe(first), hpmli_split_text(first),
                               hpmli_describe(x), hpmli_split_text(x));
}

/* Computes for a reshape of the whole tensor of x to the shape `whole` (ndim sizes): the shape `part` of this rank's
   block, the axis split[i] over whose ranks dimension i is then split (0: none), and the number of its *sections (0: no
   dimension is split). For each split dimension of x there must be a dimension of `whole` which, split over the same
   axis, leaves each rank the same elements as before; false if there is none. */
HPMLI_FN bool hpmli_split_reshape(const hpml_tensor *x, int ndim, const int64_t *whole, int64_t *part, int8_t *split,
                                  int32_t *sections)
{
    int64_t from[HPML_MAX_DIMS], later = 1; /* later: elements of x's whole in the dimensions after d */
    hpml_param_whole(x, from);
    memcpy(part, whole, (size_t)ndim * sizeof *part);
    memset(split, 0, HPML_MAX_DIMS);
    *sections = 0;
    for (int d = x->ndim - 1; d >= 0; later *= from[d--]) {
        int64_t size = hpml_ctx_group(x->ctx, (hpml_axis)x->split[d])->size;
        int64_t run  = from[d] / size / hpmli_sections(x, d) * later, inner = 1;
        int     at   = ndim - 1;
        if (!x->split[d]) continue;
        for (; at >= 0; inner *= whole[at--]) {
            int64_t length = whole[at] / size;
            bool    fits   = !split[at] && whole[at] % size == 0 && run % inner == 0 && length * inner % run == 0;
            if (!fits) continue;
            if (length * inner > run && *sections > 1) return false;
            *sections = (int32_t)hpmli_max(*sections, length * inner / run);
            break;
        }
        if (at < 0) return false;
        split[at] = x->split[d];
        part[at]  = whole[at] / size;
    }
    return true;
}

// ---------------------------------------------------------------------------------------------------------------------
// >>record   recording: nodes and inputs
// ---------------------------------------------------------------------------------------------------------------------
/* Private state of a node; allocated together with the node. */
struct hpmli_node_state {
    hpml_tensor *out_root[2], *grad_root;      /* tensors in whose memory the lives of the value, and the gradient, of
                                                  the result are; out_root[0] NULL: in no graph */
    int          order, at[6];                 /* place in the graph's nodes; in the part's entries by hpmli_move */
    int          segment;                      /* number of the segment; 0: none */
    hpml_retain_how how;                       /* what the backward pass reads of the segment's results */
    bool         kept, has_gradient;           /* an output or the loss; some node's backward writes the gradient */
    bool         again, swapped;               /* the op runs again for backward; is swapped in instead */
    bool         relives;                      /* the result then has a second life, as n->saved has */
    bool         second;                       /* backward now computes the gradients of the sources in `late` */
    unsigned     late;                         /* bits of the sources whose gradients are in the half WEIGHTS */
    char        *copy;                         /* (slots, copy_bytes) what is swapped out: the result, then n->saved */
    size_t       copy_bytes, copy_saved;       /* of `copy` in a slot; of n->saved in it */
    void        *raw[2], *saved[2];            /* addresses in both lives: of the value, if its root; of n->saved */
    struct hpml_update *update[HPML_MAX_SRC];  /* not NULL: the optimizer step of this source, taken when backward has
                                                  made its gradient final. A CPU op that takes the step sets n to 0 */
    /* Of an op whose tensors are stored as halves (>>half), which runs on one block of samples after another: */
    int64_t block_samples;                     /* samples of a block; 0: all samples */
    int64_t first_index;                       /* number of labels or tokens in the blocks before the present block */
    size_t  copies_at, block_saved;            /* bytes: offset of f32 copies in scratch; saved for a block */
    int     number;                            /* the index that the node has in the serial program, see >>groups */
    size_t  host_bytes;                        /* of `host` */
    char   *host;                              /* of an op of the user on a device, NULL until it runs: its saved and
                                                  scratch memory and copies of the device's arrays */
};

HPMLI_FN hpml_dtype hpmli_activation_dtype(const hpml_ctx *ctx)
{
    return ctx->backend->activation_dtype ? ctx->backend->activation_dtype(ctx->device) : HPML_DTYPE_F32;
}

/* Returns a copy of `name` or, if that is NULL or empty, "<kind><number of the node>". */
HPMLI_FN const char *hpmli_layer_name(hpml_ctx *ctx, const char *name, const char *kind)
{
    char text[64];
    if (hpmli_failed(ctx)) return NULL;
    if (name && name[0]) return hpmli_strdup(ctx, name);
    snprintf(text, sizeof text, "%s%d", kind, ctx->node_count - ctx->layout_permutes - ctx->group_nodes);
    return hpmli_strdup(ctx, text);
}

/* True if an op may read all sources: all are contiguous, not NULL and of one context, which has no error. */
HPMLI_FN bool hpmli_recordable(int src_count, hpml_tensor *const *src)
{
    hpml_ctx *ctx = NULL;
    for (int i = 0; i < src_count; i++) {
        if (!src[i]) return false;
        if (!ctx) ctx = src[i]->ctx;
        if (hpmli_failed(ctx)) return false;
        if (src[i]->ctx != ctx)
            return hpmli_false(ctx, HPML_ERR_ARGUMENT, "\"%s\" and \"%s\" belong to different contexts", src[0]->name,
                               src[i]->name);
        if (!hpmli_contiguous(src[i]))
            return hpmli_false(ctx, HPML_ERR_SHAPE, "%s is a view with gaps, which ops do not read: hpml_tensor_copy "
                               "it to another tensor, or record hpml_permute or hpml_slice",
                               hpmli_describe(src[i]));
    }
    return true;
}

/* Returns the layout of a 4-dimensional result: NHWC if a source is. Batches of images in both layouts: an error. */
HPMLI_FN hpml_layout hpmli_check_layouts(hpml_op op, int src_count, hpml_tensor *const *src)
{
    const hpml_tensor *first = NULL; /* the latest source that is a batch of images */
    hpml_layout        layout = HPML_NCHW;
    for (int i = 0; i < src_count; i++) {
        if (!src[i] || src[i]->ndim != 4) continue;
        if (src[i]->layout == HPML_NHWC) layout = HPML_NHWC;
        if (!src[i]->batch_rows) continue;
        if (first && first->layout != src[i]->layout)
            hpmli_fail(src[i]->ctx, HPML_ERR_SHAPE, "%s of %s and %s: one is NCHW, one NHWC; hpml_to_layout one of "
                       "them", hpml_op_name(op), hpmli_describe(first), hpmli_describe(src[i]));
        first = src[i];
    }
    return layout;
}

/* Checks the sources' dtypes: I32 for indices, F32 or the type of stored results for numbers; else an error. */
HPMLI_FN void hpmli_check_dtypes(hpml_op op, unsigned traits, int src_count, hpml_tensor *const *src)
{
    hpml_dtype stored = hpmli_activation_dtype(src[0]->ctx);
    for (int i = 0; i < src_count; i++) {
        bool index = (i == 0 && (traits & HPMLI_OP_INDEX_0)) || (i == 1 && (traits & HPMLI_OP_INDEX_1));
        if (!src[i]) continue;
        hpml_dtype dtype = src[i]->dtype;
        bool       fits  = index ? dtype == HPML_DTYPE_I32 : dtype == HPML_DTYPE_F32 || dtype == stored;
        if (op == HPML_OP_CUSTOM) fits |= dtype == HPML_DTYPE_I32;
        if (!fits)
            hpmli_fail(src[i]->ctx, HPML_ERR_DTYPE, "%s of %s: expected %s", hpml_op_name(op), hpmli_describe(src[i]),
                       hpml_dtype_name(index ? HPML_DTYPE_I32 : stored));
    }
}

/* Makes s (may be NULL) source i of n; the result of n has a batch if s has one, needs a gradient if s needs one. */
HPMLI_FN void hpmli_node_add_source(hpml_node *n, int i, hpml_tensor *s)
{
    hpml_tensor *out = n->out;
    n->src[i] = s;
    if (!s) return;
    s->state->used = true;
    if (s->needs_grad) out->needs_grad = true;
    if (!s->batch_rows) return;
    if (out->ndim > 0 && out->shape[0] == s->shape[0]) out->batch_rows = s->batch_rows;
    else n->mixes_batch = out->ndim > 0; /* a scalar result of a short batch is only a shorter sum */
}

/* Records a node. Its result, n->out, is called `name` (from hpmli_layer_name; NULL: after the op). src[0] is never
   NULL; an absent optional source is NULL. The caller sets n->attr, saved_bytes and scratch_bytes. After an error
   returns a dummy node whose `out` is NULL, so that callers may set its fields without a check. */
HPMLI_FN hpml_node *hpmli_node_create(hpml_op op, const char *name, int src_count, hpml_tensor *const *src, int ndim,
                                      const int64_t *shape)
{
    hpml_ctx   *ctx   = src[0]->ctx;
    hpml_node  *none  = &ctx->spare;
    unsigned    traits = hpmli_op_row(op)->traits;
    hpml_dtype  dtype  = ndim > 0 ? hpmli_activation_dtype(ctx) : HPML_DTYPE_F32;
    hpml_layout layout = HPML_NCHW;
    none->out = NULL;
    if (ndim == 4 && !(traits & HPMLI_OP_REORDERS)) layout = hpmli_check_layouts(op, src_count, src);
    if (traits & HPMLI_OP_IS_ALIAS) dtype = src[0]->dtype;
    else hpmli_check_dtypes(op, traits, src_count, src);
    if (!name) name = hpmli_layer_name(ctx, NULL, hpml_op_name(op));
    hpml_tensor *out = hpmli_tensor_new(ctx, name, dtype, ndim, shape);
    struct block { hpml_node node; struct hpmli_node_state state; } *block = NULL;
    if (out) block = hpmli_new(ctx, struct block, 1);
    if (!block) return none;
    hpml_node *n = &block->node;
    HPML_ASSERT(src_count <= HPML_MAX_SRC);
    n->state     = &block->state;
    n->op        = op;
    n->index     = ctx->node_count++;
    block->state.segment = ctx->segment;
    block->state.how     = ctx->segment > 0 ? HPML_RETAIN_AGAIN : HPML_RETAIN_KEEP;
    n->state->number = n->index - ctx->group_nodes;
    ctx->source_count += src_count;
    n->out       = out;
    n->src_count = src_count;
    out->node    = n;
    out->layout  = layout;
    for (int i = 0; i < src_count; i++) hpmli_node_add_source(n, i, src[i]);
    if (out->batch_rows) n->mixes_batch = false;
    if (hpmli_is_split(src[0]) && !hpmli_split_follow(n)) return none;
    ctx->param_kept = ctx->param_count;
    return n;
}

/* Sets the number of the result's rows that belong to one sample, for ops where this number is not the same as that of
   a source with as many rows. rows 0: the result has no batch dimension; if a source has one, the op mixes samples. */
HPMLI_FN void hpmli_node_batch(hpml_node *n, int64_t rows)
{
    if (!n->out) return;
    n->out->batch_rows = rows;
    n->mixes_batch     = false;
    for (int i = 0; i < n->src_count; i++) n->mixes_batch |= rows == 0 && n->src[i]->batch_rows > 0;
}

HPML_API hpml_tensor *hpml_input(hpml_ctx *ctx, hpml_dtype dtype, int ndim, const int64_t *shape)
{
    if (hpmli_failed(ctx)) return NULL;
    if (ndim < 1) return hpmli_null(ctx, HPML_ERR_SHAPE, "input: needs at least the batch dimension");
    hpml_tensor *t = hpmli_tensor_new(ctx, "input", dtype, ndim, shape);
    if (t) t->batch_rows = 1;
    return t;
}
HPML_API hpml_tensor *hpml_input_2d(hpml_ctx *ctx, int64_t b, int64_t d1)
{
    const int64_t shape[2] = { b, d1 };
    return hpml_input(ctx, HPML_DTYPE_F32, 2, shape);
}
HPML_API hpml_tensor *hpml_input_3d(hpml_ctx *ctx, int64_t b, int64_t d1, int64_t d2)
{
    const int64_t shape[3] = { b, d1, d2 };
    return hpml_input(ctx, HPML_DTYPE_F32, 3, shape);
}
HPML_API hpml_tensor *hpml_input_4d(hpml_ctx *ctx, int64_t b, int64_t c, int64_t h, int64_t w)
{
    const int64_t shape[4] = { b, c, h, w };
    return hpml_input(ctx, HPML_DTYPE_F32, 4, shape);
}
HPML_API hpml_tensor *hpml_input_tokens(hpml_ctx *ctx, int64_t b, int64_t t)
{
    int64_t shape[2] = { b, t };
    return hpml_input(ctx, HPML_DTYPE_I32, 2, shape);
}

HPML_API hpml_status hpml_tensor_require_grad(hpml_tensor *input)
{
    if (!input || hpmli_failed(input->ctx)) return input ? input->ctx->status : HPML_ERR_ARGUMENT;
    if (input->node || input->dtype != HPML_DTYPE_F32)
        return hpmli_fail(input->ctx, HPML_ERR_ARGUMENT, "require_grad of \"%s\": only f32 inputs; results of ops get "
                          "a gradient without this call", input->name);
    if (input->state->used && !input->needs_grad)
        return hpmli_fail(input->ctx, HPML_ERR_STATE, "require_grad of \"%s\": an op uses it already, and its backward "
                          "pass would not compute the gradient; call this before the op is recorded", input->name);
    input->needs_grad = true;
    return HPML_OK;
}

// ---------------------------------------------------------------------------------------------------------------------
// >>params   parameters: names, first values
// ---------------------------------------------------------------------------------------------------------------------
#define HPMLI_NAME 256 /* bytes of an array's name in a file, with the final 0 */
#define HPMLI_HASH UINT64_C(14695981039346656037)
/* Returns the FNV-1a hash of n bytes, continued from `hash`; HPMLI_HASH is that of no bytes. */
HPMLI_FN uint64_t hpmli_hash(uint64_t hash, const void *bytes, size_t n)
{
    for (size_t i = 0; i < n; i++) hash = (hash ^ ((const unsigned char *)bytes)[i]) * UINT64_C(1099511628211);
    return hash;
}

/* Returns the address of the entry for a parameter's name in the hash table. An entry contains the index + 1 of the
   parameter with this name; 0: the entry is free, because no parameter has this name. */
HPMLI_FN int *hpmli_name_entry(const hpml_ctx *ctx, const char *name)
{
    uint64_t hash = hpmli_hash(HPMLI_HASH, name, strlen(name));
    for (uint64_t at = hash ^ hash >> 32;; at++) {
        int *entry = &ctx->names[at & (uint64_t)(ctx->name_size - 1)];
        if (*entry == 0 || strcmp(ctx->params[*entry - 1]->name, name) == 0) return entry;
    }
}

static void hpmli_names_fill(hpml_ctx *ctx)
{
    if (ctx->name_size > 0) memset(ctx->names, 0, (size_t)ctx->name_size * sizeof *ctx->names);
    for (int i = 0; i < ctx->param_count; i++) *hpmli_name_entry(ctx, ctx->params[i]->name) = i + 1;
}

/* Doubles the hash table of names if one more parameter would fill more than half of it; false: no memory. */
HPMLI_FN bool hpmli_names_grow(hpml_ctx *ctx)
{
    int64_t size = ctx->name_size > 0 ? 2 * ctx->name_size : 128;
    if (2 * ((int64_t)ctx->param_count + 1) <= ctx->name_size) return true;
    int *names = hpmli_new(ctx, int, size);
    if (!names) return false;
    hpmli_free(ctx, ctx->names);
    ctx->names     = names;
    ctx->name_size = size;
    hpmli_names_fill(ctx);
    return true;
}

/* How a parameter is split over the group of an axis. DATA: the parameter is whole. */
typedef struct hpmli_part {
    hpml_axis axis;
    int       dim;
    int32_t   sections;
} hpmli_part;

/* Changes `shape` from that of a whole parameter to that of this rank's part; false: an error, it cannot be split. */
HPMLI_FN bool hpmli_part_shape(hpml_ctx *ctx, const char *name, const hpmli_part *part, int ndim, int64_t *shape)
{
    const int64_t size = hpml_ctx_group(ctx, part->axis)->size, sections = hpmli_max(part->sections, 1);
    if (part->axis == HPML_AXIS_DATA) return true;
    if ((int)part->axis < 0 || part->axis >= HPML_AXES || part->axis == HPML_AXIS_PIPE || part->dim < 0 ||
        part->dim >= ndim || part->sections < 0)
        return hpmli_false(ctx, HPML_ERR_ARGUMENT, "parameter \"%s\": %d sections of dimension %d split over the %s "
                           "axis; expected the tensor, sequence or expert axis and one of %d dimensions", name,
                           part->sections, part->dim, hpml_axis_name(part->axis), ndim);
    if (shape[part->dim] % (sections * size) != 0)
        return hpmli_false(ctx, HPML_ERR_SHAPE, "parameter \"%s\": dimension %d of %s in %lld sections does not divide "
                           "among the %lld ranks of the %s axis; expected a multiple of %lld", name, part->dim,
                           hpmli_shape_text(ctx, ndim, shape), (long long)sections, (long long)size,
                           hpml_axis_name(part->axis), (long long)(sections * size));
    shape[part->dim] /= size;
    return true;
}

/* Creates a parameter: this rank's part of one that has the shape `whole` and is split as `part` says. */
HPMLI_FN hpml_tensor *hpmli_param_new(hpml_ctx *ctx, const char *name, hpml_init init, float scale, int ndim,
                                      const int64_t *whole, const hpmli_part *part)
{
    int64_t shape[HPML_MAX_DIMS];
    if (!name || hpmli_failed(ctx)) return NULL;
    if ((int)init < 0 || init > HPML_INIT_ONES)
        return hpmli_null(ctx, HPML_ERR_ARGUMENT, "parameter \"%s\": no initializer %d", name, (int)init);
    if (strlen(name) >= HPMLI_NAME - 8) /* names in files have prefixes such as "state." */
        return hpmli_null(ctx, HPML_ERR_ARGUMENT, "parameter \"%s\": a name of %zu characters, expected fewer than %d",
                          name, strlen(name), HPMLI_NAME - 8);
    if (hpml_param_find(ctx, name))
        return hpmli_null(ctx, HPML_ERR_ARGUMENT, "parameter \"%s\" exists already; give the layers different "
                          "names", name);
    for (int i = 0; i < ndim && i < HPML_MAX_DIMS; i++) shape[i] = whole[i];
    if (!hpmli_part_shape(ctx, name, part, ndim, shape)) return NULL;
    hpml_tensor *t = hpmli_tensor_new(ctx, name, HPML_DTYPE_F32, ndim, shape);
    if (!t || !hpmli_grow(ctx, &ctx->params, ctx->param_count, &ctx->param_capacity, sizeof t)) return NULL;
    if (!hpmli_names_grow(ctx)) return NULL;
    t->param = hpmli_new(ctx, hpml_param, 1);
    if (!t->param) return NULL;
    t->param->index      = ctx->param_count;
    t->param->init       = init == HPML_INIT_DEFAULT ? HPML_INIT_KAIMING_UNIFORM : init;
    t->param->init_scale = scale;
    t->param->lr_scale   = 1;
    t->param->sections   = 1;
    t->param->stage      = -1;
    t->param->keep_count = -1;
    t->needs_grad        = true;
    if (part->axis != HPML_AXIS_DATA && hpml_ctx_group(ctx, part->axis)->size > 1) {
        t->param->axis      = part->axis;
        t->param->split_dim = part->dim;
        t->param->sections  = (int32_t)hpmli_max(part->sections, 1);
        hpmli_split_set(t, part->dim, part->axis, t->param->sections);
    }
    *hpmli_name_entry(ctx, name) = ctx->param_count + 1;
    ctx->params[ctx->param_count++] = t;
    return t;
}

/* Creates the parameter "<layer>.<suffix>". Vectors (biases, scales of norms) are excluded from weight decay. */
HPMLI_FN hpml_tensor *hpmli_layer_part(hpml_ctx *ctx, const char *layer, const char *suffix, hpml_init init,
                                       float scale, int ndim, const int64_t *shape, const hpmli_part *part)
{
    char text[HPMLI_NAME];
    if (!layer || hpmli_failed(ctx)) return NULL;
    snprintf(text, sizeof text, "%s.%s", layer, suffix);
    hpml_tensor *t = hpmli_param_new(ctx, hpmli_strdup(ctx, text), init, scale, ndim, shape, part);
    if (t) t->param->no_decay = ndim == 1;
    return t;
}
HPMLI_FN hpml_tensor *hpmli_layer_param(hpml_ctx *ctx, const char *layer, const char *suffix, hpml_init init,
                                        float scale, int ndim, const int64_t *shape)
{
    const hpmli_part whole = { HPML_AXIS_DATA, 0, 1 };
    return hpmli_layer_part(ctx, layer, suffix, init, scale, ndim, shape, &whole);
}

HPML_API hpml_tensor *hpml_param_create(hpml_ctx *ctx, const hpml_param_desc *desc)
{
    hpml_param_desc d;
    char            text[32];
    if (hpmli_failed(ctx) || !HPMLI_COPY_DESC(ctx, "param", d, desc)) return NULL;
    if (d.ndim < 1) return hpmli_null(ctx, HPML_ERR_ARGUMENT, "param: the desc needs a shape");
    snprintf(text, sizeof text, "param%d", ctx->param_count);
    const hpmli_part part = { d.axis, d.split_dim, d.sections };
    hpml_tensor *t = hpmli_param_new(ctx, hpmli_strdup(ctx, d.name ? d.name : text), d.init, d.init_scale, d.ndim,
                                     d.shape, &part);
    if (!t) return NULL;
    t->param->buffer   = d.buffer;
    t->param->frozen   = d.frozen;
    t->param->no_decay = d.no_decay;
    t->needs_grad      = !d.buffer && !d.frozen;
    ctx->param_kept    = ctx->param_count;
    return t;
}

HPML_API int hpml_param_count(const hpml_ctx *ctx) { return ctx ? ctx->param_count : 0; }
HPML_API hpml_tensor *hpml_param_at(const hpml_ctx *ctx, int index)
{
    return ctx && index >= 0 && index < ctx->param_count ? ctx->params[index] : NULL;
}
HPML_API hpml_tensor *hpml_param_find(const hpml_ctx *ctx, const char *name)
{
    int *entry = ctx && name && ctx->name_size > 0 ? hpmli_name_entry(ctx, name) : NULL;
    return entry && *entry > 0 ? ctx->params[*entry - 1] : NULL;
}
HPML_API int64_t hpml_param_total(const hpml_ctx *ctx)
{
    int64_t total = 0;
    for (int i = 0; i < hpml_param_count(ctx); i++)
        if (!ctx->params[i]->param->buffer) total += hpml_tensor_count(ctx->params[i]);
    return total;
}

/* A job that computes the initial values w of a parameter on the host. They are drawn from a random stream that depends
   on the parameter's index alone. */
typedef struct hpmli_init_job {
    const hpml_ctx *ctx;
    const hpml_tensor *t;          /* the parameter */
    float          *w;             /* (n) */
    int64_t         n;
    uint64_t        stream;
    double          scale;
    bool            drawn, normal; /* random; normally distributed. Not drawn: all elements are `scale` */
} hpmli_init_job;
HPMLI_FN void hpmli_init_task(void *arg, int64_t task, int thread HPMLI_UNUSED)
{
    const hpmli_init_job *j = (const hpmli_init_job *)arg;
    int64_t i = task * HPMLI_GRAIN, end = i + HPMLI_GRAIN < j->n ? i + HPMLI_GRAIN : j->n;
    for (int64_t at = i, run; j->drawn && at < end; at += run) { /* a part has the whole's numbers */
        int64_t place = hpmli_whole_place(j->t, at, &run);
        j->ctx->k->random(j->normal ? HPMLI_NORMAL : HPMLI_UNIFORM, j->w + at, j->ctx->seed, j->stream,
                          (uint64_t)place, hpmli_min(run, end - at));
    }
    for (; i < end; i++)
        if (!j->drawn) j->w[i] = (float)j->scale;
        else j->w[i] = (float)(j->scale * (j->normal ? (double)j->w[i] : 2 * (double)j->w[i] - 1));
}

HPMLI_FN void hpmli_init_values(hpml_ctx *ctx, const hpml_tensor *t, float *w)
{
    const hpml_param *p = t->param;
    hpmli_init_job    j = { ctx, t, w, hpml_tensor_count(t), HPMLI_STREAM_INIT + (uint64_t)p->index,
                            (double)p->init_scale, true, false };
    int64_t whole[HPML_MAX_DIMS];
    double fan_in = (double)hpml_param_whole(t, whole) / (double)whole[0], field = fan_in / (double)whole[1];
    double fan_out = (double)whole[0] * field;
    switch (p->init) {
    case HPML_INIT_DEFAULT: case HPML_INIT_KAIMING_UNIFORM: j.scale = sqrt(6 / fan_in); break;
    case HPML_INIT_KAIMING_NORMAL: j.scale = sqrt(2 / fan_in); break;
    case HPML_INIT_XAVIER_UNIFORM: j.scale = sqrt(6 / (fan_in + fan_out)); break;
    case HPML_INIT_XAVIER_NORMAL: j.scale = sqrt(2 / (fan_in + fan_out)); break;
    case HPML_INIT_NORMAL: j.scale = j.scale > 0 ? j.scale : 0.02; break;
    case HPML_INIT_UNIFORM: j.scale = j.scale > 0 ? j.scale : 0.1; break;
    case HPML_INIT_ZEROS: j.scale = 0; break;
    case HPML_INIT_ONES: j.scale = 1; break;
    }
    j.drawn  = p->init != HPML_INIT_ZEROS && p->init != HPML_INIT_ONES;
    j.normal = p->init == HPML_INIT_KAIMING_NORMAL || p->init == HPML_INIT_XAVIER_NORMAL || p->init == HPML_INIT_NORMAL;
    hpmli_parallel(ctx, (j.n + HPMLI_GRAIN - 1) / HPMLI_GRAIN, hpmli_init_task, &j);
}

HPMLI_FN bool hpmli_trainable(const hpml_tensor *t) { return t->param && !t->param->buffer && !t->param->frozen; }
/* Returns how many floats a parameter has in an array of all values, gradients or states, with padding. */
HPMLI_FN int64_t hpmli_param_floats(const hpml_tensor *p)
{
    const int64_t align = HPML_GRADIENT_ALIGN;
    if (p->state->away) return 0;
    return (hpml_tensor_count(p) + align - 1) / align * align;
}

/* Returns how many floats of p this rank keeps between steps in an array (values, gradients or states) in which a
   parameter whose hpml_param.shard is at least `level` has only this rank's shard. */
HPMLI_FN int64_t hpmli_param_kept(const hpml_tensor *p, int level)
{
    const int64_t align = HPML_GRADIENT_ALIGN;
    if (p->param->shard < level) return hpmli_param_floats(p);
    return (p->param->keep_count + align - 1) / align * align;
}

HPML_API int64_t hpml_param_whole(const hpml_tensor *t, int64_t *shape)
{
    int64_t count = t != NULL;
    for (int i = 0; i < HPML_MAX_DIMS; i++) {
        int64_t n = t ? t->shape[i] : 1;
        if (t && t->split[i]) n *= hpml_ctx_group(t->ctx, (hpml_axis)t->split[i])->size;
        if (shape) shape[i] = n;
        count *= n;
    }
    return count;
}

HPML_API void hpml_param_copy(const hpml_tensor *param, float *part, int64_t first, int64_t count, float *whole,
                              bool to_whole)
{
    hpmli_cut c = { hpml_tensor_count(param), 0, 1 };
    if (param->param && param->param->axis != HPML_AXIS_DATA)
        c = hpmli_cut_of(param, param->param->axis, param->param->split_dim, param->param->sections);
    hpmli_cut_copy(&c, whole, part, first, count, to_whole);
}

HPML_API size_t hpml_params_bytes(const hpml_ctx *ctx)
{
    int64_t floats = 0;
    for (int i = 0; i < hpml_param_count(ctx); i++) floats += hpmli_param_kept(ctx->params[i], 3);
    return (size_t)floats * sizeof(float);
}

/* Places parameters without memory in `memory`, or, if NULL, in new memory of the device: first those that are trained,
   so that a trainer has them as one array, then the others. Writes the parameters' first values or, if `keep`, leaves
   the contents of the memory as they are. */
HPMLI_FN hpml_status hpmli_params_place(hpml_ctx *ctx, float *memory, bool keep)
{
    int64_t largest = 0, floats = 0; /* of the parameters without memory: the largest one's floats, those to take */
    for (int i = 0; i < ctx->param_count; i++) {
        const hpml_tensor *t = ctx->params[i];
        if (t->raw || t->state->kept) continue;
        largest = hpmli_max(largest, hpmli_param_floats(t));
        floats += hpmli_param_kept(t, 3);
    }
    float *w = floats > 0 ? (float *)hpmli_alloc(ctx, (size_t)largest * sizeof(float)) : NULL;
    if (w && !memory) memory = (float *)hpmli_device_alloc(ctx, (size_t)floats * sizeof(float));
    for (int i = 0; w && memory && i < 2 * ctx->param_count; i++) {
        hpml_tensor *t = ctx->params[i % ctx->param_count];
        bool         whole = t->param->shard < 3;
        if (t->raw || t->state->kept || t->state->away || hpmli_trainable(t) != (i < ctx->param_count)) continue;
        if (whole) hpmli_set_memory(t, memory, t->raw_grad);
        else t->state->kept = memory;
        if (!keep) hpmli_init_values(ctx, t, w);
        const float *first = whole ? w : w + t->param->keep_first;
        size_t       bytes = whole ? hpmli_tensor_bytes(t) : (size_t)t->param->keep_count * sizeof *w;
        if (!keep) ctx->backend->write(ctx->device, memory, first, bytes);
        memory += hpmli_param_kept(t, 3);
    }
    hpmli_free(ctx, w);
    return ctx->status;
}

HPML_API hpml_status hpml_param_init(hpml_ctx *ctx)
{
    return hpmli_failed(ctx) ? hpml_ctx_status(ctx) : hpmli_params_place(ctx, NULL, false);
}

HPML_API hpml_status hpml_params_place(hpml_ctx *ctx, float *memory, bool keep)
{
    if (hpmli_failed(ctx)) return hpml_ctx_status(ctx);
    if (!memory || (uintptr_t)memory % 64 != 0)
        return hpmli_fail(ctx, HPML_ERR_ARGUMENT, "params place: memory at %p, expected a multiple of 64 bytes; take "
                          "aligned_alloc(64, hpml_params_bytes(ctx)), mapped or pinned memory", (void *)memory);
    if (!ctx->backend->host)
        return hpmli_fail(ctx, HPML_ERR_UNSUPPORTED, "params place: the backend \"%s\" has its parameters on its "
                          "device; memory of your own is for backends on the host", ctx->backend->name);
    for (int i = 0; i < ctx->param_count; i++)
        if (ctx->params[i]->raw)
            return hpmli_fail(ctx, HPML_ERR_STATE, "params place: parameter \"%s\" has memory already; place the "
                              "parameters before a graph, a trainer or a file gives them memory",
                              ctx->params[i]->name);
    if (!keep) memset(memory, 0, hpml_params_bytes(ctx)); /* the padding, too */
    return hpmli_params_place(ctx, memory, keep);
}

HPML_API uint64_t hpml_param_hash(hpml_ctx *ctx)
{
    uint64_t hash = HPMLI_HASH;
    if (hpmli_failed(ctx)) return 0;
    for (int i = 0; i < ctx->param_count; i++) {
        const hpml_tensor *t     = ctx->params[i];
        size_t             bytes = hpmli_tensor_bytes(t);
        unsigned char     *host  = t->data ? (unsigned char *)hpmli_alloc(ctx, bytes) : NULL;
        if (!host) continue;
        ctx->backend->read(ctx->device, host, t->data, bytes);
        hash = hpmli_hash(hash, host, bytes);
        hpmli_free(ctx, host);
    }
    return hash;
}

// ---------------------------------------------------------------------------------------------------------------------
// >>rows   gradients of embeddings as rows
// ---------------------------------------------------------------------------------------------------------------------
typedef struct hpmli_rows {
    int32_t *index;  /* (count) rows with a gradient, in the order in which the passes met them */
    int64_t  count;
    bool    *listed; /* (rows of the table) whether the row is in `index` */
} hpmli_rows;

/* Makes the gradient of t sparse; false: no memory. */
HPMLI_FN bool hpmli_rows_create(hpml_tensor *t)
{
    hpmli_rows *r = t->state->rows = t->state->rows ? t->state->rows : hpmli_new(t->ctx, hpmli_rows, 1);
    if (r && !r->index) r->index = hpmli_new(t->ctx, int32_t, t->shape[0]);
    if (r && !r->listed) r->listed = hpmli_new(t->ctx, bool, t->shape[0]);
    return r && r->index && r->listed;
}

HPMLI_FN void hpmli_rows_add(hpmli_rows *r, int32_t row)
{
    if (r->listed[row]) return;
    r->listed[row]       = true;
    r->index[r->count++] = row;
}

/* Zeroes the gradient of t, if it has one; of a sparse table (hpml_embedding_desc.sparse) only the rows that are listed
   in hpmli_rows.index, and empties this list. */
HPMLI_FN void hpmli_gradient_clear(const hpml_tensor *t)
{
    hpmli_rows *r = t->state->rows;
    if (!r && t->raw_grad) t->ctx->backend->zero(t->ctx->device, t->raw_grad, hpmli_tensor_bytes(t));
    for (int64_t i = 0; r && i < r->count; i++) {
        memset(t->grad + r->index[i] * t->shape[1], 0, (size_t)t->shape[1] * sizeof(float));
        r->listed[r->index[i]] = false;
    }
    if (r) r->count = 0;
}

HPML_API const int32_t *hpml_param_rows(const hpml_tensor *table, int64_t *count)
{
    const hpmli_rows *r = table ? table->state->rows : NULL;
    if (count) *count = r ? r->count : 0;
    return r ? r->index : NULL;
}

HPML_API hpml_status hpml_param_add_rows(hpml_tensor *table, bool clear, const int32_t *rows, const float *values,
                                         int64_t count)
{
    if (!table || hpmli_failed(table->ctx)) return table ? table->ctx->status : HPML_ERR_ARGUMENT;
    if (!table->state->rows || !table->grad)
        return hpmli_fail(table->ctx, HPML_ERR_STATE, "param rows: \"%s\" has no sparse gradient; set .sparse of its "
                          "embedding, and create a trainer", table->name);
    for (int64_t i = 0; i < count; i++)
        if (rows[i] < 0 || rows[i] >= table->shape[0])
            return hpmli_fail(table->ctx, HPML_ERR_SHAPE, "param rows: row %d of \"%s\", expected 0 to %lld", rows[i],
                              table->name, (long long)table->shape[0] - 1);
    const int64_t width = table->shape[1];
    if (clear) hpmli_gradient_clear(table);
    for (int64_t i = 0; i < count; i++) {
        float *row = table->grad + rows[i] * width;
        hpmli_rows_add(table->state->rows, rows[i]);
        table->ctx->k->vadd(row, row, values + i * width, width);
    }
    return HPML_OK;
}

/* Fails if an op other than embedding reads the table of a sparse embedding, because such an op's gradient has all
   rows. */
HPMLI_FN bool hpmli_rows_fit(hpml_ctx *ctx, hpml_node *const *nodes, int count)
{
    for (int i = 0; i < count; i++)
        for (int s = 0; s < nodes[i]->src_count; s++) {
            const hpml_tensor *t = nodes[i]->src[s];
            if (t && t->state->rows && nodes[i]->op != HPML_OP_EMBEDDING)
                return hpmli_false(ctx, HPML_ERR_UNSUPPORTED, "graph: \"%s\" reads the table \"%s\" of a sparse "
                                   "embedding, whose gradient then has all rows; leave .sparse false",
                                   nodes[i]->out->name, t->name);
        }
    return true;
}

// ---------------------------------------------------------------------------------------------------------------------
// >>place   a place in memory for each array of a plan: first fit
// ---------------------------------------------------------------------------------------------------------------------
/* A life is an array and the interval of times at which the array is needed. Arrays are placed in order of size, the
   largest first, each at the lowest address where its bytes are free during its whole life (first fit; close to the
   optimum for chains of layers). A search among all arrays placed before takes n^2 / 2 steps for n arrays; a binary
   tree over the times (a segment tree) takes about n log n for each size of arrays, and networks have few sizes.
   Each tree node has two lists of address ranges in use, in which adjacent ranges are joined: `whole`, of arrays
   alive at all times of the tree node, and `part`, of arrays alive at some of them. A life is cut into at most two tree
   nodes a level; it can collide only with the `part` lists of these and the `whole` lists of the tree nodes above. */
typedef struct hpmli_life {
    size_t   bytes, offset; /* offset: before the array is placed, its number, for a stable order */
    int      from, to;      /* first and last time at which the array is needed */
    void   **place;         /* set to the address when memory is allocated */
} hpmli_life;
HPMLI_FN int hpmli_life_order(const void *a, const void *b)
{
    const hpmli_life *x = (const hpmli_life *)a, *y = (const hpmli_life *)b;
    if (x->bytes != y->bytes) return x->bytes < y->bytes ? 1 : -1;
    return x->offset < y->offset ? -1 : x->offset > y->offset;
}

typedef struct hpmli_range {
    size_t from, to; /* range of addresses, without `to` */
    int    next;     /* number of the list's next range, which begins above `to`; 0: none */
} hpmli_range;
typedef struct hpmli_times {
    hpml_ctx    *ctx;
    hpmli_range *ranges; /* (count, at most capacity) ranges of all lists; number 0 means none */
    int64_t      capacity;
    int          count, spare;     /* spare: first of the ranges that are free again */
    int         *whole, *part;     /* (4 * times) first range by tree node: 1 is the root, 2i and 2i + 1 are below i */
    int          path[4 * 32 + 4]; /* (path_count) tree nodes into which a life is cut, and those above them */
    bool         inside[4 * 32 + 4]; /* (path_count) true: the tree node lies inside the life */
    int          path_count;
} hpmli_times;

/* Appends to m->path nodes of the interval tree: `node`, which stands for the times `first` to `last`, and, unless it
   lies inside lifetime s, those nodes below it that overlap s, down to the nodes that lie inside s. */
HPMLI_FN void hpmli_times_path(hpmli_times *m, int node, int first, int last, const hpmli_life *s)
{
    int  middle = first + (last - first) / 2;
    bool inside = s->from <= first && last <= s->to;
    m->inside[m->path_count] = inside;
    m->path[m->path_count++] = node;
    if (!inside && s->from <= middle) hpmli_times_path(m, 2 * node, first, middle, s);
    if (!inside && s->to > middle) hpmli_times_path(m, 2 * node + 1, middle + 1, last, s);
}

/* Returns the lowest offset at which `bytes` bytes overlap no range of addresses in use during the life for which
   m->path was set: no range in the lists `part` and `whole` of the interval tree's nodes m->path. */
HPMLI_FN size_t hpmli_times_fit(const hpmli_times *m, size_t bytes)
{
    int    list[sizeof m->path / sizeof *m->path], count = 0;
    size_t at = 0, before;
    for (int k = 0; k < m->path_count; k++) {
        int first = m->inside[k] ? m->part[m->path[k]] : m->whole[m->path[k]];
        if (first) list[count++] = first;
    }
    do { /* repeated until `at` is free in every list */
        before = at;
        for (int k = 0; k < count; k++)
            for (const hpmli_range *r; r = &m->ranges[list[k]], list[k] && r->from < at + bytes; list[k] = r->next)
                if (at < r->to) at = r->to;
    } while (at != before);
    return at;
}

/* Adds a range of addresses to the list at *head, joined with ranges that it touches or overlaps; false: no memory. */
HPMLI_FN bool hpmli_times_add(hpmli_times *m, int *head, size_t from, size_t to)
{
    int before = 0, at = *head;
    for (; at && m->ranges[at].to < from; at = m->ranges[at].next) before = at;
    while (at && m->ranges[at].from <= to) {
        hpmli_range *r    = &m->ranges[at];
        int          next = r->next;
        if (r->from < from) from = r->from;
        if (r->to > to) to = r->to;
        r->next  = m->spare;
        m->spare = at;
        at       = next;
    }
    int added = m->spare;
    if (added) m->spare = m->ranges[added].next;
    else if (hpmli_grow(m->ctx, &m->ranges, m->count, &m->capacity, sizeof *m->ranges)) added = m->count++;
    else return false;
    hpmli_range range = { from, to, at };
    m->ranges[added] = range;
    if (before) m->ranges[before].next = added;
    else *head = added;
    return true;
}

/* Gives each array of `lives`, the largest first, an offset in memory; raises *bytes to the size of the memory that
   holds all of these arrays. False: out of memory. */
HPMLI_FN bool hpmli_lives_place(hpml_ctx *ctx, hpmli_life *lives, int count, size_t *bytes)
{
    hpmli_times m     = HPMLI_ZEROED;
    int         times = 1;
    if (count > 0) qsort(lives, (size_t)count, sizeof *lives, hpmli_life_order);
    for (int i = 0; i < count; i++)
        if (lives[i].to >= times) times = lives[i].to + 1;
    m.ctx   = ctx;
    m.count = 1;
    m.whole = hpmli_new(ctx, int, 4 * (int64_t)times);
    m.part  = hpmli_new(ctx, int, 4 * (int64_t)times);
    bool good = m.whole && m.part && hpmli_grow(ctx, &m.ranges, 0, &m.capacity, sizeof *m.ranges);
    for (int i = 0; i < count && good; i++) {
        hpmli_life *s = &lives[i];
        m.path_count = 0;
        hpmli_times_path(&m, 1, 0, times - 1, s);
        s->offset  = hpmli_times_fit(&m, s->bytes);
        size_t end = s->offset + s->bytes;
        if (end > *bytes) *bytes = end;
        for (int k = 0; k < m.path_count && good; k++) {
            good = hpmli_times_add(&m, &m.part[m.path[k]], s->offset, end);
            if (m.inside[k]) good = good && hpmli_times_add(&m, &m.whole[m.path[k]], s->offset, end);
        }
    }
    hpmli_free(ctx, m.ranges);
    hpmli_free(ctx, m.part);
    hpmli_free(ctx, m.whole);
    return good;
}

// ---------------------------------------------------------------------------------------------------------------------
// >>list   the list of entries that a pass runs, and which values of it are computed again
// ---------------------------------------------------------------------------------------------------------------------
/* A part is a range of a graph's nodes and the list of entries that run it: each node forward in the recorded order,
   then each node backward in the reverse order, and last, in a graph of hpml_graph_halves, second halves of backward
   runs in the same order. In the backward pass of a segment (hpml_recompute) come first entries that compute its
   results again. All times of the plan are places in this list; a life of a result is the range of times for which its
   values are in memory.
   A result that is computed again has two lives, one from its forward pass to its last reader before the entry that
   computes it again, the other from that entry on, and so two addresses; between the two lives only the inputs of its
   segment are kept. A result of the segment that a later backward pass reads is in memory until then in any case, so it
   has one life, and is computed again only if its op needs saved values. A result that is swapped has two lives in the
   same way: OUT follows its op, IN comes before the first entry of the backward pass that reads it. The result of a
   reshape is stored in the memory of its source: hpmli_base returns the op that computes this source. */
typedef enum hpmli_move {
    HPMLI_FORWARD, HPMLI_BACKWARD, HPMLI_AGAIN, HPMLI_OUT, HPMLI_IN,
    HPMLI_WEIGHTS /* the second half of a node's backward pass, see hpml_graph_halves */
} hpmli_move;
typedef struct hpmli_entry {
    int        node; /* its place in hpml_graph.nodes */
    hpmli_move move;
} hpmli_entry;

typedef struct hpmli_area { /* arrays that are placed together */
    hpmli_life *lives;      /* (count) */
    int         count;
    size_t      bytes;
} hpmli_area;
/* Areas of memory of a part of the graph. HELD: each slot (set of activations, see hpml_graph_part) has its own;
   PASSING: all slots share one, because one pass runs at a time. */
enum { HPMLI_HELD, HPMLI_PASSING, HPMLI_AREAS };

typedef struct hpmli_list {
    int           from, to;         /* nodes from .. to - 1 of the graph */
    int64_t       rows;             /* most samples of a pass */
    int           slot_count, first_slot;
    hpmli_entry  *entries;          /* (entry_count) the forward pass, then from `turn` on the backward pass */
    int           entry_count, turn;
    int           late;             /* the first entry of the half WEIGHTS; entry_count: there is none */
    hpml_tensor **inputs;           /* (input_count) read here and not computed here, but no parameters */
    int           input_count;
    hpmli_area    area[HPMLI_AREAS];
} hpmli_list;

typedef struct hpmli_slot { /* memory for the arrays of a part, and the pass that has written to it */
    int      part;          /* place in hpml_graph.parts */
    size_t   base;          /* bytes: where its HELD arrays begin in the arena */
    int64_t  first, samples; /* in the inputs of the batch */
    int64_t  sample;        /* number of the first sample in the global batch */
    bool     idle;          /* the pass had no samples */
    bool     train;
    uint64_t step;
} hpmli_slot;

struct hpml_graph {
    hpml_ctx      *ctx;
    hpml_node    **nodes;      /* (count) in the order of recording */
    int            count;
    hpml_tensor  **leaves;     /* (leaf_count) inputs and constants that the nodes read */
    int            leaf_count;
    hpml_tensor   *loss;
    hpml_tensor   *outputs[HPML_MAX_OUTPUTS];
    int            output_count;
    hpmli_list    *parts;      /* (part_count) what runs here: at first one part, all nodes */
    int64_t        part_capacity, slot_capacity;
    int            part_count;
    bool           cut;        /* hpml_graph_part has named the parts */
    bool           halves;     /* backward passes have two halves, see hpml_graph_halves */
    hpmli_slot    *slots;      /* (slot_count) */
    int            slot_count, slot;  /* slot: the one that the pointers of all tensors belong to */
    double         ops_per_byte; /* operations that take as long as copying a byte to the host */
    hpml_memory    memory;
    void          *elsewhere;  /* unused address of an input that has its memory from another graph */
    char          *arena;      /* memory of activations, their gradients and scratch, on the device */
    float         *grads;      /* gradients of all parameters, in order of recording, each 64-byte aligned */
    int64_t        grad_count; /* floats */
    size_t         scratch_bytes;
    int            param_count; /* parameters of the context when the graph was planned */
    int           *param_last;  /* (param_count) node whose backward makes the parameter's gradient final; -1: none */
    int64_t        batch, batch_now; /* samples of a full batch; of the current batch */
    bool           batchable;   /* no op mixes samples: short batches may run */
    bool           collective;  /* an op communicates with other ranks */
    bool           unreplayable; /* an op of the user does more than launch work of the device */
    int64_t        first_sample, shift; /* index of this pass's first sample: in the global batch, in the inputs */
    const char   **back_names; /* (count) names of backward spans in the timeline */
    hpml_profile_row *profile; /* (count) times of the nodes; NULL: no profile */
    hpml_trainer  *trainer;
    hpml_hooks     hooks[HPML_MAX_HOOKS]; /* (hook_count) the trainer's hooks, the innermost set first */
    int            hook_count;
    hpml_hooks     any;        /* in each field a hook of one of the sets; NULL: no set has this hook */
    hpml_moment    at;         /* where the training is */
    int            entry;      /* place, in the list of the current part, of the entry that runs now */
    bool           last;       /* the last micro-batch of an update: gradients become final, hooks are called */
    hpml_update   *updates;    /* (param_count) optimizer steps to take during the backward pass; NULL: none */
    bool           idle;       /* this rank has no samples, see hpml_run.idle */
    bool           no_targets; /* a forward pass leaves the loss out */
};

/* True if t is a leaf (input, constant) of g. t->state->leaf may be the index of t in the leaves of another graph, so
   the leaf of g at this index is compared with t. */
HPMLI_FN bool hpmli_graph_leaf(const hpml_graph *g, const hpml_tensor *t)
{
    return t->state->leaf < g->leaf_count && g->leaves[t->state->leaf] == t;
}

/* Enters t into the leaves of g, or, if a node computes t, the node into `found` by its index; ignores parameters. */
HPMLI_FN void hpmli_graph_mark(hpml_graph *g, hpml_node **found, hpml_tensor *t)
{
    if (!t || t->param) return;
    if (t->node) {
        found[t->node->index] = t->node;
        return;
    }
    if (hpmli_graph_leaf(g, t)) return;
    HPML_ASSERT(g->leaf_count <= g->ctx->source_count + HPML_MAX_OUTPUTS);
    t->state->leaf = g->leaf_count;
    g->leaves[g->leaf_count++] = t;
}

/* Collects the nodes and leaves on which the targets depend, from the last recorded node to the first, because the
   nodes that read a result are recorded after the node that computes it. False: no memory. */
HPMLI_FN bool hpmli_graph_collect(hpml_graph *g, hpml_tensor *const *targets, int target_count)
{
    hpml_ctx   *ctx   = g->ctx;
    hpml_node **found = hpmli_new(ctx, hpml_node *, ctx->node_count + 1); /* by a node's index, at first with gaps */
    g->nodes  = found;
    g->leaves = hpmli_new(ctx, hpml_tensor *, ctx->source_count + HPML_MAX_OUTPUTS + 1);
    if (!found || !g->leaves) return false;
    for (int i = 0; i < target_count; i++) hpmli_graph_mark(g, found, targets[i]);
    for (int i = ctx->node_count - 1; i >= 0; i--)
        for (int s = 0; found[i] && s < found[i]->src_count; s++) hpmli_graph_mark(g, found, found[i]->src[s]);
    for (int i = 0; i < ctx->node_count; i++)
        if (found[i]) g->nodes[g->count++] = found[i];
    return true;
}

/* Returns the node that computes t in part p; NULL: t is computed elsewhere, or is an input or a parameter. */
HPMLI_FN hpml_node *hpmli_node_in(const hpmli_list *p, const hpml_tensor *t)
{
    hpml_node *n = t ? t->node : NULL;
    return n && n->state->order >= p->from && n->state->order < p->to ? n : NULL;
}

/* Returns the node of part p whose result has the memory of n's value: n itself or, because a reshape has the memory of
   its source, where n is a reshape, the node at the beginning of the chain of reshapes. */
HPMLI_FN hpml_node *hpmli_base(const hpmli_list *p, hpml_node *n)
{
    for (hpml_node *from; hpmli_has_trait(n, HPMLI_OP_IS_ALIAS); n = from) {
        from = hpmli_node_in(p, n->src[0]);
        if (!from) break;
    }
    return n;
}

HPMLI_FN bool hpmli_goes_back(const hpml_graph *g, const hpml_node *n) { return g->loss && n->out->needs_grad; }

/* True if `move` is a backward run of a node, or the second half of one. */
HPMLI_FN bool hpmli_is_back(hpmli_move move) { return move == HPMLI_BACKWARD || move == HPMLI_WEIGHTS; }

/* True if the first half of n's backward pass leaves dz in the memory of dy. Where results are stored as halves
   (>>half) it does not, because dz is in an f32 copy; the second half then computes dz again. */
HPMLI_FN bool hpmli_keeps_dz(const hpml_node *n)
{
    return hpmli_has_trait(n, HPMLI_OP_KEEPS_DZ) && n->state->copies_at == 0;
}
/* True if the gradient of n's result is dz already, because backward of n runs its second half. */
HPMLI_FN bool hpmli_dz_is_done(const hpml_node *n) { return n->state->second && hpmli_keeps_dz(n); }

/* Returns which values the backward run `move` of node n reads, as HPMLI_NEED_ bits. */
HPMLI_FN unsigned hpmli_back_needs(const hpml_node *n, hpmli_move move)
{
    const unsigned needs = hpmli_op_of(n)->needs(n), late = n->state->late;
    const unsigned makes = move == HPMLI_WEIGHTS ? late : ~late; /* the sources whose gradients this run computes */
    unsigned       reads = move == HPMLI_WEIGHTS ? 0 : HPMLI_NEED_OUT;
    if (!late || !hpmli_keeps_dz(n)) return needs;
    if (makes & 1 && n->src[0]->needs_grad) reads |= HPMLI_NEED_SRC(1);
    if (makes & 2 && n->src[1]->needs_grad) reads |= HPMLI_NEED_SRC(0);
    return needs & reads;
}

/* True if the backward pass of node n, or n itself when recomputed for backward, reads the value of node `of`. */
HPMLI_FN bool hpmli_reads_late(const hpml_graph *g, const hpmli_list *p, hpml_node *n, const hpml_node *of)
{
    unsigned needs = hpmli_goes_back(g, n) ? hpmli_op_of(n)->needs(n) : 0;
    if (hpmli_base(p, n) == of && needs & HPMLI_NEED_OUT) return true;
    for (int j = 0; j < n->src_count; j++) {
        hpml_node *s    = hpmli_node_in(p, n->src[j]);
        bool       late = needs & HPMLI_NEED_SRC(j) || (n->state->again && !n->state->swapped);
        if (s && late && hpmli_base(p, s) == of) return true;
    }
    return false;
}

/* True if node n reads the tensor t. */
HPMLI_FN bool hpmli_reads(const hpml_node *n, const hpml_tensor *t)
{
    for (int j = 0; j < n->src_count; j++)
        if (n->src[j] == t) return true;
    return false;
}

/* True if one of the nodes from .. to - 1 reads the tensor t. */
HPMLI_FN bool hpmli_any_reads(const hpml_graph *g, int from, int to, const hpml_tensor *t)
{
    for (int i = from; i < to; i++)
        if (hpmli_reads(g->nodes[i], t)) return true;
    return false;
}

/* True if n's result, or a reshape of it, is an output or is read by a later part of the graph; then it must not be
   swapped. */
HPMLI_FN bool hpmli_stays(const hpml_graph *g, const hpmli_list *p, const hpml_node *n)
{
    for (int i = n->state->order; i < p->to; i++) {
        hpml_node *same = g->nodes[i];
        if (hpmli_base(p, same) != n) continue;
        if (same->state->kept || hpmli_any_reads(g, p->to, g->count, same->out)) return true;
    }
    return false;
}

/* Chooses which nodes of the segment from .. to - 1 run again, and whose results have two lives in memory (>>list). */
HPMLI_FN void hpmli_segment_choose(hpml_graph *g, const hpmli_list *p, int from, int to)
{
    for (int k = to - 1; k >= from; k--) {
        hpml_node *n    = g->nodes[k];
        bool       held = n->state->kept, needed = false, swapped = n->state->how == HPML_RETAIN_SWAP;
        if (hpmli_base(p, n) != n || (swapped && hpmli_stays(g, p, n))) continue;
        for (int j = k; j < p->to; j++) {
            if (!hpmli_reads_late(g, p, g->nodes[j], n)) continue;
            if (j < to || swapped) needed = true;
            else held = true;
        }
        n->state->again   = (needed && !held) || (hpmli_goes_back(g, n) && n->saved_bytes > 0);
        n->state->swapped = n->state->again && swapped;
        n->state->relives = n->state->again && !held && (needed || !swapped);
    }
}

HPMLI_FN void hpmli_entry_add(hpml_graph *g, hpmli_list *p, int node, hpmli_move move)
{
    const hpmli_entry e = { node, move };
    g->nodes[node]->state->at[move] = p->entry_count;
    p->entries[p->entry_count++]    = e;
}

/* Returns the first node of the segment of which node `last` is the last one in part p; without a segment: last. */
HPMLI_FN int hpmli_segment_first(const hpml_graph *g, const hpmli_list *p, int last)
{
    int segment = g->nodes[last]->state->segment, first = last;
    while (segment > 0 && first > p->from && g->nodes[first - 1]->state->segment == segment) first--;
    return first;
}

/* If the result of the op that computes t is swapped out, adds an entry that swaps it in, unless p has it already. */
HPMLI_FN void hpmli_entry_fetch(hpml_graph *g, hpmli_list *p, const hpml_tensor *t)
{
    hpml_node *n = hpmli_node_in(p, t);
    if (!n) return;
    n = hpmli_base(p, n);
    if (!n->state->swapped || n->state->at[HPMLI_IN] >= 0) return;
    n->state->at[HPMLI_AGAIN] = p->entry_count; /* where the second life begins */
    hpmli_entry_add(g, p, n->state->order, HPMLI_IN);
}

/* Adds the entry (node, move) of the backward pass to the list p, and before it entries that swap in the values that
   this entry reads. */
HPMLI_FN void hpmli_entry_late(hpml_graph *g, hpmli_list *p, int node, hpmli_move move)
{
    const hpml_node *n     = g->nodes[node];
    bool             back  = hpmli_is_back(move);
    unsigned         needs = back ? 0 : HPMLI_NEED_OUT - 1;
    if (back && hpmli_goes_back(g, n)) needs = hpmli_back_needs(n, move);
    for (int j = 0; j < n->src_count; j++)
        if (needs & HPMLI_NEED_SRC(j)) hpmli_entry_fetch(g, p, n->src[j]);
    if (move == HPMLI_BACKWARD && (needs & HPMLI_NEED_OUT || (hpmli_goes_back(g, n) && n->saved_bytes > 0)))
        hpmli_entry_fetch(g, p, n->out);
    hpmli_entry_add(g, p, node, move);
}

/* Chooses the sources of node n whose gradients the half WEIGHTS computes: trained parameters, if all ops of part p
   that read one can run in halves, because the gradient is added up in the order in which these ops run. */
HPMLI_FN void hpmli_late_choose(const hpml_graph *g, const hpmli_list *p, hpml_node *n)
{
    n->state->late   = 0;
    n->state->second = false;
    for (int s = 0; g->halves && hpmli_goes_back(g, n) && s < n->src_count; s++) {
        const hpml_tensor *w    = n->src[s];
        bool               late = w && hpmli_trainable(w);
        for (int i = p->from; i < p->to && late; i++) {
            const hpml_node *k   = g->nodes[i];
            const bool       own = k->op == HPML_OP_CUSTOM && k->attr.custom->halves;
            late = own || hpmli_has_trait(k, HPMLI_OP_PRODUCT) || !hpmli_reads(k, w);
        }
        if (late) n->state->late |= 1u << s;
    }
}

/* Chooses the ops of part p that run again for the backward pass, and those whose results are swapped (copied out and
   back in), in its last segment first. */
HPMLI_FN void hpmli_part_choose(hpml_graph *g, const hpmli_list *p)
{
    for (int i = p->from; i < p->to; i++) {
        struct hpmli_node_state *state = g->nodes[i]->state;
        state->again   = false;
        state->swapped = false;
        state->relives = false;
        for (int move = 0; move <= HPMLI_WEIGHTS; move++) state->at[move] = -1;
        hpmli_late_choose(g, p, g->nodes[i]);
    }
    for (int last = p->to - 1, first; g->loss && last >= p->from; last = first - 1) {
        first = hpmli_segment_first(g, p, last);
        if (g->nodes[last]->state->how != HPML_RETAIN_KEEP) hpmli_segment_choose(g, p, first, last + 1);
    }
}

/* Lists, in the order of execution, the entries of part p: nodes that run forward, backward, or again for the backward
   pass, second halves, and swaps. False: no memory. */
HPMLI_FN bool hpmli_part_list(hpml_graph *g, hpmli_list *p)
{
    p->entries = hpmli_new(g->ctx, hpmli_entry, (4 + g->halves) * ((int64_t)p->to - p->from) + 1);
    if (!p->entries) return false;
    hpmli_part_choose(g, p);
    for (int i = p->from; i < p->to; i++) {
        hpmli_entry_add(g, p, i, HPMLI_FORWARD);
        if (g->nodes[i]->state->swapped) hpmli_entry_add(g, p, i, HPMLI_OUT);
    }
    p->turn = p->entry_count;
    for (int last = p->to - 1, first; g->loss && last >= p->from; last = first - 1) {
        first = hpmli_segment_first(g, p, last);
        for (int i = first; i <= last; i++)
            if (g->nodes[i]->state->again && !g->nodes[i]->state->swapped) hpmli_entry_late(g, p, i, HPMLI_AGAIN);
        for (int i = last; i >= first; i--) hpmli_entry_late(g, p, i, HPMLI_BACKWARD);
    }
    p->late = p->entry_count;
    for (int i = p->to - 1; i >= p->from; i--)
        if (g->nodes[i]->state->late) hpmli_entry_late(g, p, i, HPMLI_WEIGHTS);
    return true;
}

// ---------------------------------------------------------------------------------------------------------------------
// >>plan   from a recorded graph to a memory plan: how long each array is needed, and where
// ---------------------------------------------------------------------------------------------------------------------
/* The life of an array is the time from the entry of a part's list (a node's pass, or a swap) that writes it to the
   last one that reads it; hpmli_op_info.needs says which values a node's backward pass reads. Arrays whose lives do not
   overlap may share memory: see >>place. Planning happens once, so that a step allocates nothing. Some results have no
   memory of their own: a reshape is in the memory of its source, and so is the result of an op that works in place on a
   source which no other op reads. out_root and grad_root of a node's state are the tensors at the end of such chains,
   which own the memory. */
typedef struct hpmli_use {      /* how a part uses the result of a node, or an input */
    int  last[2];               /* last time of each life of the value */
    int  readers[2];            /* number of entries forward and again that read this life */
    int  grad_first, grad_last; /* first and last time of the gradient's life */
    bool grad_written;          /* a node's backward, or the caller, writes the gradient */
    bool crosses;               /* a later node that is in another part reads the result */
} hpmli_use;
typedef struct hpmli_plan {     /* a part while it is planned */
    hpml_graph *g;
    hpmli_list *p;
    hpmli_use  *uses;           /* one for each node of the graph, then one for each leaf */
    int         end;            /* the time after all entries */
} hpmli_plan;

/* Returns the entry of t in the plan's uses; NULL for a parameter. */
HPMLI_FN hpmli_use *hpmli_use_of(const hpmli_plan *pl, const hpml_tensor *t)
{
    if (t && t->node) return &pl->uses[t->node->state->order];
    return t && hpmli_graph_leaf(pl->g, t) ? &pl->uses[pl->g->count + t->state->leaf] : NULL;
}

/* Returns which of the two lives of the value of t the list's entry at `time` reads: 0 or, after the value has been
   computed again or swapped in for the backward pass, 1. */
HPMLI_FN int hpmli_life_at(const hpmli_plan *pl, const hpml_tensor *t, int time)
{
    hpml_node *n = hpmli_node_in(pl->p, t);
    if (!n) return 0;
    const struct hpmli_node_state *base = hpmli_base(pl->p, n)->state;
    return base->relives && time >= base->at[HPMLI_AGAIN];
}

/* Notes that entry number `time` of the plan's list reads (`reads`) or writes t; if t is the result of a reshape, also
   that the source in whose memory t is stored is needed until then. */
HPMLI_FN void hpmli_use_note(const hpmli_plan *pl, const hpml_tensor *t, int time, bool reads)
{
    hpmli_use *u    = hpmli_use_of(pl, t);
    int        life = hpmli_life_at(pl, t, time);
    if (!u) return;
    u->last[life] = hpmli_later(u->last[life], time);
    u->readers[life] += reads;
    hpml_node *n = hpmli_node_in(pl->p, t);
    if (!n) return;
    hpmli_use *base  = hpmli_use_of(pl, hpmli_base(pl->p, n)->out);
    base->last[life] = hpmli_later(base->last[life], time);
}

/* Computes how long each value is needed. */
HPMLI_FN void hpmli_plan_values(const hpmli_plan *pl)
{
    const hpmli_list *p = pl->p;
    for (int k = 0; k < p->entry_count; k++) {
        const hpmli_entry *e    = &p->entries[k];
        const hpml_node   *n    = pl->g->nodes[e->node];
        bool               back = hpmli_is_back(e->move);
        if (e->move == HPMLI_OUT || e->move == HPMLI_IN) {
            if (n->state->relives) hpmli_use_note(pl, n->out, k, false);
            continue;
        }
        unsigned           needs = back ? hpmli_back_needs(n, e->move) : HPMLI_NEED_OUT | (HPMLI_NEED_OUT - 1);
        int                fused = e->move == HPMLI_FORWARD && n->fused_with;
        if (back && !hpmli_goes_back(pl->g, n)) continue;
        for (int j = 0; j < n->src_count; j++)
            if (needs & HPMLI_NEED_SRC(j)) hpmli_use_note(pl, n->src[j], k + fused, !back);
        if (needs & HPMLI_NEED_OUT) hpmli_use_note(pl, n->out, k, false);
    }
    for (int i = p->from; i < p->to; i++) {
        hpmli_use *u = &pl->uses[i];
        if (u->crosses) u->last[0] = hpmli_later(u->last[0], p->turn);
        if (pl->g->nodes[i]->state->kept) u->last[0] = pl->end;
    }
}

/* Computes out_root of the nodes: the tensor in whose memory the result stands. A result has one out_root for its life
   from the forward pass on, and one for its second life, if it is computed again or swapped in for backward. */
HPMLI_FN void hpmli_plan_roots(const hpmli_plan *pl)
{
    const hpmli_list *p = pl->p;
    for (int k = 0; k < p->entry_count; k++) { /* in place: a node that alone reads a source, which is not read later */
        hpml_node *n = pl->g->nodes[p->entries[k].node], *x = hpmli_node_in(p, n->src[0]);
        int        life = hpmli_life_at(pl, n->out, k);
        hpmli_move move = p->entries[k].move;
        bool       again = (move == HPMLI_AGAIN || move == HPMLI_IN) && life == 1;
        if (move != HPMLI_FORWARD && !again) continue;
        n->state->out_root[life] = n->out;
        if (!x || move == HPMLI_IN || hpmli_life_at(pl, x->out, k) != life) continue;
        const hpmli_use *u = hpmli_use_of(pl, x->out);
        bool inplace = (hpmli_op_of(n)->needs(n) & HPMLI_INPLACE) && u->readers[life] == 1 && !x->state->kept &&
                       u->last[life] <= k && x->state->out_root[life] == x->out && x->out->dtype == n->out->dtype;
        if (inplace || hpmli_has_trait(n, HPMLI_OP_IS_ALIAS)) n->state->out_root[life] = x->state->out_root[life];
    }
    for (int i = p->from; i < p->to; i++) { /* reshapes of what is computed again */
        hpml_node *n = pl->g->nodes[i], *base = hpmli_base(p, n);
        if (base != n && base->state->relives) n->state->out_root[1] = base->state->out_root[1];
    }
    for (int i = p->to - 1; i >= p->from; i--) { /* a root lives as long as the results in its memory */
        for (int life = 0; life < 2; life++) {
            const hpml_tensor *root = pl->g->nodes[i]->state->out_root[life];
            hpmli_use         *u = &pl->uses[i], *r = root ? hpmli_use_of(pl, root) : u;
            r->last[life] = hpmli_later(r->last[life], u->last[life]);
        }
    }
}

/* Chooses, for each node of the part, grad_root, the tensor that owns the memory of its result's gradient, and sets
   grad_written where the caller writes this gradient, because another part reads the result. */
HPMLI_FN void hpmli_plan_grad_roots(const hpmli_plan *pl)
{
    for (int i = pl->p->from; i < pl->p->to; i++) {
        hpml_node *n = pl->g->nodes[i], *x = hpmli_node_in(pl->p, n->src[0]);
        hpmli_use *u = &pl->uses[i];
        bool       given = u->crosses && n->state->has_gradient;
        n->state->grad_root = n->out;
        u->grad_first = pl->end;
        u->grad_last  = hpmli_later(n->state->at[HPMLI_BACKWARD], n->state->at[HPMLI_WEIGHTS]);
        if (x && hpmli_has_trait(n, HPMLI_OP_IS_ALIAS)) {
            hpml_tensor *root = x->state->grad_root;
            bool         both = given && hpmli_use_of(pl, root)->grad_written; /* the caller writes two arrays */
            if (!both) n->state->grad_root = root;
        }
        if (!given) continue;
        u = hpmli_use_of(pl, n->state->grad_root);
        u->grad_written = true;
        u->grad_first   = pl->p->turn - 1;
    }
}

/* Computes how long gradients are needed and, in backward order, which node overwrites a gradient and which nodes add
   to it. A result whose gradient no node has written when its own node is reached does not affect the loss. */
HPMLI_FN void hpmli_plan_grads(const hpmli_plan *pl)
{
    hpml_graph *g = pl->g;
    hpmli_plan_grad_roots(pl);
    for (int i = pl->p->to - 1; i >= pl->p->from; i--) {
        hpml_node *n = g->nodes[i];
        int        time = n->state->at[HPMLI_BACKWARD];
        bool       written = hpmli_use_of(pl, n->state->grad_root)->grad_written;
        bool       shares  = n->state->grad_root != n->out;
        if (!n->out->needs_grad || (n->out != g->loss && !written)) continue;
        for (int j = 0; j < n->src_count; j++) {
            hpml_tensor *s = n->src[j];
            hpml_node   *from = hpmli_node_in(pl->p, s);
            hpmli_use   *u = hpmli_use_of(pl, s), *r;
            n->accumulate[j] = false;
            if (!s || !s->needs_grad) continue;
            if (hpmli_trainable(s)) {
                n->accumulate[j] = g->param_last[s->param->index] >= 0;
                g->param_last[s->param->index] = i;
            }
            if (!u) continue;
            r = from ? hpmli_use_of(pl, from->state->grad_root) : u;
            n->accumulate[j] = r->grad_written && !shares;
            r->grad_written  = true;
            if (r->grad_first > time) r->grad_first = time;
            r->grad_last = hpmli_later(r->grad_last, u->grad_last);
        }
    }
    for (int i = pl->p->from; i < pl->p->to && !g->cut; i++) { /* later parts are planned with this of the whole */
        struct hpmli_node_state *state = g->nodes[i]->state;
        state->has_gradient = hpmli_use_of(pl, state->grad_root)->grad_written;
    }
}

/* Plans memory of `bytes` bytes that is in use from entry `from` to entry `to` of the part's list of entries; *place
   gets the address of this memory in the graph's current slot. */
HPMLI_FN void hpmli_life_add(const hpmli_plan *pl, size_t bytes, int from, int to, void **place)
{
    bool        held = from < pl->p->turn && to >= pl->p->turn; /* something of a pass whose backward pass is to come */
    if (pl->g->halves && from < pl->p->late && to >= pl->p->late) held = true; /* or the second half of that */
    hpmli_area *area = &pl->p->area[held || pl->g->slot_count == 1 ? HPMLI_HELD : HPMLI_PASSING];
    hpmli_life  life = { (bytes + 63) / 64 * 64, (size_t)area->count, from, to, place };
    area->lives[area->count++] = life;
    pl->g->memory.unshared += life.bytes * (size_t)(held ? pl->p->slot_count : 1);
}

/* Returns the bytes of n->saved for pl->p->rows samples, which may be fewer than the batch. Fewer samples take fewer
   bytes only on the CPU, where an op saves the same number of bytes for each sample. */
HPMLI_FN size_t hpmli_saved_bytes(const hpmli_plan *pl, const hpml_node *n)
{
    const hpml_graph  *g = pl->g;
    const hpml_tensor *y = n->out->ndim > 0 ? n->out : n->src[0];
    size_t             block = (size_t)n->state->block_samples, rows = (size_t)pl->p->rows;
    bool               whole = !y->batch_rows || hpmli_has_trait(n, HPMLI_OP_JOINS_BATCH) || n->op == HPML_OP_CUSTOM;
    if (pl->p->rows == g->batch || whole || !g->ctx->backend->host) return n->saved_bytes;
    if (block > 0 && n->state->block_saved > 0) return (rows + block - 1) / block * n->state->block_saved;
    return n->saved_bytes / (size_t)g->batch * rows + 64; /* a loss saves one number more */
}

/* Bytes of memory reserved for each scalar. The memory of the loss, or of the tensor whose memory the loss shares,
   holds the struct of a step's scalars (>>trainer), which begins with the loss, because the host then reads loss, hits
   and gradient norm in one copy. This memory is reserved from time 0 on, because the trainer writes to the struct
   before the loss is computed. */
#define HPMLI_SCALAR_BYTES 64
HPMLI_FN void hpmli_plan_lives(const hpmli_plan *pl)
{
    hpml_graph *g = pl->g;
    hpmli_list *p = pl->p;
    for (int i = p->from; i < p->to; i++) {
        hpml_node       *n      = g->nodes[i];
        const hpmli_use *u      = &pl->uses[i];
        struct hpmli_node_state *state = n->state;
        bool             back   = hpmli_goes_back(g, n), scalar = hpml_tensor_count(n->out) == 1;
        size_t           bytes  = scalar ? HPMLI_SCALAR_BYTES : hpmli_tensor_bytes(n->out);
        size_t           saved  = n->saved_bytes > 0 ? hpmli_saved_bytes(pl, n) : 0;
        int              fore   = state->at[HPMLI_FORWARD], again = state->at[HPMLI_AGAIN];
        int              last   = state->again ? again : fore; /* time of the last pass that reads n->saved */
        if (back) last = state->at[HPMLI_BACKWARD];
        if (!hpmli_keeps_dz(n)) last = hpmli_later(last, state->at[HPMLI_WEIGHTS]);
        if (state->out_root[0] == n->out) hpmli_life_add(pl, bytes, scalar ? 0 : fore, u->last[0], &state->raw[0]);
        if (state->out_root[1] == n->out) hpmli_life_add(pl, bytes, again, u->last[1], &state->raw[1]);
        if (back && state->grad_root == n->out && (n->out == g->loss || u->grad_written))
            hpmli_life_add(pl, hpmli_tensor_bytes(n->out), n->out == g->loss ? p->turn - 1 : u->grad_first,
                           u->grad_last, &n->out->raw_grad);
        if (saved > 0) hpmli_life_add(pl, saved, fore, state->again ? hpmli_later(fore, state->at[HPMLI_OUT]) : last,
                                      &state->saved[0]);
        if (saved > 0 && state->again) hpmli_life_add(pl, saved, again, last, &state->saved[1]);
        state->copy_saved = state->swapped ? (saved + 63) / 64 * 64 : 0;
        state->copy_bytes = state->copy_saved + (state->swapped && state->relives ? (bytes + 63) / 64 * 64 : 0);
        if (n->scratch_bytes > g->scratch_bytes) g->scratch_bytes = (n->scratch_bytes + 63) / 64 * 64;
    }
    for (int i = 0; i < p->input_count; i++) {
        hpml_tensor *t    = p->inputs[i];
        bool         grad = g->loss && t->needs_grad && (!t->node || hpmli_use_of(pl, t)->grad_written);
        if (!t->raw) hpmli_life_add(pl, hpmli_tensor_bytes(t), 0, pl->end, &t->raw);
        if (grad) hpmli_life_add(pl, hpmli_tensor_bytes(t), 0, pl->end, &t->raw_grad);
    }
    if (g->loss && g->loss->node && !hpmli_node_in(p, g->loss))
        hpmli_life_add(pl, HPMLI_SCALAR_BYTES, 0, pl->end, &g->loss->raw);
}

/* Lists what part p reads and does not compute: inputs, constants, results of earlier parts. False: no memory. */
HPMLI_FN bool hpmli_part_inputs(hpml_graph *g, hpmli_list *p)
{
    p->inputs      = hpmli_new(g->ctx, hpml_tensor *, (int64_t)g->leaf_count + p->from + 1);
    p->input_count = 0;
    if (!p->inputs) return false;
    for (int i = 0; i < g->leaf_count + p->from; i++) {
        hpml_tensor *t = i < g->leaf_count ? g->leaves[i] : g->nodes[i - g->leaf_count]->out;
        if (!g->cut || hpmli_any_reads(g, p->from, p->to, t)) p->inputs[p->input_count++] = t;
    }
    return true;
}

HPMLI_FN void hpmli_part_free(hpml_ctx *ctx, hpmli_list *p) /* what its plan has made */
{
    for (int a = 0; a < HPMLI_AREAS; a++) hpmli_free(ctx, p->area[a].lives);
    hpmli_free(ctx, p->inputs);
    hpmli_free(ctx, p->entries);
    memset(p->area, 0, sizeof p->area);
    p->inputs      = NULL;
    p->entries     = NULL;
    p->entry_count = 0;
}

/* Sets shape[0] of all tensors with a batch dimension to the current batch; called before each pass, because graphs may
   share inputs, whose shape[0] another graph may have changed. */
HPMLI_FN void hpmli_graph_apply_batch(hpml_graph *g)
{
    for (int i = 0; i < g->leaf_count + g->count; i++) {
        hpml_tensor *t = i < g->leaf_count ? g->leaves[i] : g->nodes[i - g->leaf_count]->out;
        if (t->batch_rows) t->shape[0] = t->batch_rows * g->batch_now;
    }
}

HPMLI_FN void hpmli_graph_restore_batch(hpml_graph *g)
{
    g->batch_now = g->batch;
    hpmli_graph_apply_batch(g);
}

/* Plans the memory of part p of the graph for passes of up to p->rows samples; false: no memory. */
HPMLI_FN bool hpmli_part_plan(hpml_graph *g, hpmli_list *p)
{
    hpml_ctx   *ctx  = g->ctx;
    hpmli_plan  pl   = { g, p, NULL, 0 };
    int64_t     most = 5 * ((int64_t)p->to - p->from) + 2 * ((int64_t)g->leaf_count + p->from) + 1;
    hpmli_part_free(ctx, p);
    if (!hpmli_part_list(g, p) || !hpmli_part_inputs(g, p)) return false;
    for (int a = 0; a < HPMLI_AREAS; a++) p->area[a].lives = hpmli_new(ctx, hpmli_life, a < g->slot_count ? most : 1);
    pl.uses = hpmli_new(ctx, hpmli_use, (int64_t)g->count + g->leaf_count + 1);
    pl.end  = p->entry_count;
    if (!pl.uses || !p->area[HPMLI_HELD].lives || !p->area[HPMLI_PASSING].lives) return false;
    for (int i = p->from; i < p->to; i++) {
        g->nodes[i]->state->out_root[1] = NULL;
        pl.uses[i].crosses = hpmli_any_reads(g, p->to, g->count, g->nodes[i]->out);
    }
    if (p->to < g->count) g->nodes[p->to - 1]->fused_with = NULL;
    g->batch_now = p->rows;
    hpmli_graph_apply_batch(g);
    hpmli_plan_values(&pl);
    hpmli_plan_roots(&pl);
    if (g->loss) hpmli_plan_grads(&pl);
    hpmli_plan_lives(&pl);
    hpmli_graph_restore_batch(g);
    hpmli_free(ctx, pl.uses);
    for (int a = 0; a < HPMLI_AREAS; a++)
        if (!hpmli_lives_place(ctx, p->area[a].lives, p->area[a].count, &p->area[a].bytes)) return false;
    return true;
}

/* Returns the operations that an entry adds to a step because its segment is not kept (>>retain): those of an op that
   runs again, or as many as could be done in the time of a swap's copy. */
HPMLI_FN double hpmli_entry_cost(const hpml_graph *g, const hpmli_entry *e)
{
    const hpml_node *n = g->nodes[e->node];
    if (e->move == HPMLI_AGAIN) return hpmli_op_of(n)->flops(n, false) + (double)hpmli_tensor_bytes(n->out);
    if (e->move == HPMLI_OUT || e->move == HPMLI_IN) return (double)n->state->copy_bytes * g->ops_per_byte;
    return 0;
}

/* Adds up the memory that the planned parts, the parameters and the optimizer need; places the slots in the arena. */
HPMLI_FN void hpmli_graph_sum(hpml_graph *g)
{
    hpml_memory *m = &g->memory;
    size_t       at = 0; /* bytes of the arena in use: first what all slots share, then each slot's own */
    for (int i = 0; i < g->part_count; i++)
        if (g->parts[i].area[HPMLI_PASSING].bytes > at) at = g->parts[i].area[HPMLI_PASSING].bytes;
    for (hpmli_slot *s = g->slots; s < g->slots + g->slot_count; s++) {
        s->base = at;
        at += g->parts[s->part].area[HPMLI_HELD].bytes;
    }
    g->grad_count = 0;
    for (int i = 0; i < g->param_count; i++)
        if (g->loss && g->param_last[i] >= 0) g->grad_count += hpmli_param_floats(g->ctx->params[i]);
    m->activations = at;
    m->host        = 0;
    m->extra       = 0;
    for (const hpmli_list *p = g->parts; p < g->parts + g->part_count; p++) {
        for (int k = 0; k < p->entry_count; k++) m->extra += hpmli_entry_cost(g, &p->entries[k]);
        for (int i = p->from; i < p->to; i++) m->host += g->nodes[i]->state->copy_bytes * (size_t)p->slot_count;
    }
    m->scratch     = g->scratch_bytes;
    m->parameters  = hpml_params_bytes(g->ctx);
    m->gradients   = (size_t)g->grad_count * sizeof(float);
    m->total       = m->parameters + m->gradients + m->activations + m->scratch + m->optimizer;
}

/* Plans all parts; false: no memory. */
HPMLI_FN bool hpmli_graph_plan_parts(hpml_graph *g)
{
    g->scratch_bytes   = 0;
    g->memory.unshared = 0;
    for (int i = 0; i < g->param_count; i++) g->param_last[i] = -1;
    for (int i = 0; i < g->part_count; i++)
        if (!hpmli_part_plan(g, &g->parts[i])) return false;
    hpmli_graph_sum(g);
    return true;
}

/* Adds a part with its slots, not yet planned; false: no memory. */
HPMLI_FN bool hpmli_part_add(hpml_graph *g, int from, int to, int64_t rows, int slots)
{
    hpmli_list p    = HPMLI_ZEROED;
    hpmli_slot slot = HPMLI_ZEROED;
    if (!hpmli_grow(g->ctx, &g->parts, g->part_count, &g->part_capacity, sizeof p)) return false;
    p.from       = from;
    p.to         = to;
    p.rows       = rows;
    p.slot_count = slots;
    p.first_slot = g->slot_count;
    slot.part    = g->part_count;
    slot.samples = rows;
    g->parts[g->part_count++] = p;
    for (int i = 0; i < slots; i++) {
        if (!hpmli_grow(g->ctx, &g->slots, g->slot_count, &g->slot_capacity, sizeof slot)) return false;
        g->slots[g->slot_count++] = slot;
    }
    return true;
}

// ---------------------------------------------------------------------------------------------------------------------
// >>graph   creating graphs and their parts
// ---------------------------------------------------------------------------------------------------------------------
/* Sets g->batch, the samples of each input, and g->batchable, true if fewer may run; an error if inputs differ. */
HPMLI_FN bool hpmli_graph_batches(hpml_graph *g)
{
    g->batchable = true;
    for (int i = 0; i < g->leaf_count; i++) {
        const hpml_tensor *t = g->leaves[i];
        if (!t->batch_rows) continue;
        if (g->batch == 0) g->batch = t->shape[0];
        if (g->batch != t->shape[0])
            return hpmli_false(g->ctx, HPML_ERR_SHAPE, "graph: its inputs have batches of %lld and %lld; they must be "
                               "the same", (long long)g->batch, (long long)t->shape[0]);
    }
    for (int i = 0; i < g->count; i++) {
        const hpml_node *n = g->nodes[i];
        if (n->mixes_batch) g->batchable = false;
        if (hpmli_is_collective(n)) g->collective = true;
        if (n->op == HPML_OP_CUSTOM && !n->attr.custom->kernel.forward) g->unreplayable = true;
    }
    if (g->batch == 0) g->batch = 1;
    g->batch_now = g->batch;
    return true;
}

/* Plans the whole graph as one part with one slot, that is memory for one pass at a time; false: no memory. */
HPMLI_FN bool hpmli_graph_plan(hpml_graph *g)
{
    hpml_ctx *ctx = g->ctx;
    g->param_count  = ctx->param_count;
    g->ops_per_byte = 8;
    g->param_last = hpmli_new(ctx, int, ctx->param_count + 1);
    g->back_names = hpmli_new(ctx, const char *, g->count + 1);
    g->parts      = hpmli_new(ctx, hpmli_list, 1);
    g->slots      = hpmli_new(ctx, hpmli_slot, 1);
    g->part_capacity = 1;
    g->slot_capacity = 1;
    if (!g->param_last || !g->back_names || !g->parts || !g->slots) return false;
    for (int i = 0; i < g->count; i++) {
        hpml_node *n = g->nodes[i];
        char       text[160];
        if (ctx->backend->plan) ctx->backend->plan(ctx->device, n);
        snprintf(text, sizeof text, "%s backward", n->out->name);
        g->back_names[i] = hpmli_strdup(ctx, text);
        if (!g->back_names[i]) return false;
        n->state->order = i;
        n->state->kept  = false;
    }
    for (int i = 0; i < g->output_count; i++)
        if (g->outputs[i]->node) g->outputs[i]->node->state->kept = true;
    if (g->loss && g->loss->node) g->loss->node->state->kept = true;
    return hpmli_part_add(g, 0, g->count, g->batch, 1) && hpmli_graph_plan_parts(g);
}

/* Marks the nodes of g as planned by no graph, so that another graph may plan them. */
HPMLI_FN void hpmli_graph_release_nodes(hpml_graph *g)
{
    for (int i = 0; i < g->count; i++) {
        g->nodes[i]->state->out_root[0] = NULL;
        g->nodes[i]->state->grad_root   = NULL;
    }
}

HPML_API hpml_graph *hpml_graph_create(hpml_ctx *ctx, const hpml_graph_desc *desc)
{
    hpml_graph_desc d;
    hpml_tensor    *targets[HPML_MAX_OUTPUTS + 1];
    int             count = 0;
    if (hpmli_failed(ctx) || !HPMLI_COPY_DESC(ctx, "graph", d, desc)) return NULL;
    if (d.output_count < 0 || d.output_count > HPML_MAX_OUTPUTS || (d.output_count == 0 && !d.loss) ||
        (d.output_count > 0 && !d.outputs) || (d.loss && hpml_tensor_count(d.loss) != 1))
        return hpmli_null(ctx, HPML_ERR_ARGUMENT, "graph: needs outputs (at most %d) or a loss, and the loss must be "
                          "one number", HPML_MAX_OUTPUTS);
    for (int i = 0; i < d.output_count; i++) targets[count++] = d.outputs[i];
    if (d.loss) targets[count++] = d.loss;
    if (!hpmli_recordable(count, targets)) return NULL;
    if (d.loss && d.loss->dtype != HPML_DTYPE_F32)
        return hpmli_null(ctx, HPML_ERR_DTYPE, "graph: the loss is %s, expected an f32 scalar, such as a loss or "
                          "hpml_mean over HPML_ALL_DIMS", hpmli_describe(d.loss));
    if (targets[0]->ctx != ctx)
        return hpmli_null(ctx, HPML_ERR_ARGUMENT, "graph: \"%s\" belongs to another context", targets[0]->name);
    hpml_graph *g = hpmli_new(ctx, hpml_graph, 1);
    if (!g) return NULL;
    g->ctx          = ctx;
    g->loss         = d.loss;
    g->output_count = d.output_count;
    for (int i = 0; i < d.output_count; i++) g->outputs[i] = d.outputs[i];
    if (!hpmli_graph_collect(g, targets, count)) return NULL;
    for (int i = 0; i < g->count; i++)
        if (g->nodes[i]->state->out_root[0])
            return hpmli_null(ctx, HPML_ERR_STATE, "graph: \"%s\" belongs to another graph already; name all results "
                              "as outputs of one graph, or record the model again",
                              g->nodes[i]->out->name);
    if (hpmli_rows_fit(ctx, g->nodes, g->count) && hpmli_graph_batches(g) && hpmli_graph_plan(g)) return g;
    hpmli_graph_release_nodes(g);
    return NULL;
}

HPML_API void hpml_graph_memory(const hpml_graph *g, hpml_memory *out)
{
    if (out) memset(out, 0, sizeof *out);
    if (g && out) *out = g->memory;
}
HPML_API bool hpml_graph_batchable(const hpml_graph *g) { return g && g->batchable; }
HPML_API int  hpml_graph_op_count(const hpml_graph *g) { return g ? g->count : 0; }
HPML_API const hpml_node *hpml_graph_op(const hpml_graph *g, int i)
{
    return g && i >= 0 && i < g->count ? g->nodes[i] : NULL;
}

HPML_API int hpml_graph_crossing(const hpml_graph *g, int at, hpml_tensor **tensors, int capacity)
{
    int count = 0;
    for (int i = 0; g && i < at && i < g->count; i++) {
        hpml_tensor *t = g->nodes[i]->out;
        if (!hpmli_any_reads(g, at, g->count, t)) continue;
        if (tensors && count < capacity) tensors[count] = t;
        count++;
    }
    return count;
}

static void hpmli_trainer_planned(hpml_trainer *t); /* places and measures its arrays; see >>trainer-memory */
/* Checks a part (ops `from` to `to` - 1) before it is added to the graph g; false: an error on the context. */
HPMLI_FN bool hpmli_part_check(hpml_graph *g, int from, int to, int64_t rows, int slots)
{
    if (g->arena)
        return hpmli_false(g->ctx, HPML_ERR_STATE, "graph part: the graph has its memory already; name its parts "
                           "before the first run, and before a trainer's with hpml_ctx_defer");
    if (from < 0 || to > g->count || from >= to || slots < 1 || rows < 1 || rows > g->batch)
        return hpmli_false(g->ctx, HPML_ERR_ARGUMENT, "graph part: ops %d to %d, %lld rows, %d slots: expected a range "
                           "of the %d ops, 1 to %lld rows, at least 1 slot", from, to, (long long)rows, slots, g->count,
                           (long long)g->batch);
    if (rows < g->batch && !g->batchable)
        return hpmli_false(g->ctx, HPML_ERR_SHAPE, "graph part: %lld rows of %lld, but an op mixes samples, so that "
                           "only full batches run", (long long)rows, (long long)g->batch);
    for (int i = 0; i < g->part_count && g->cut; i++)
        if (from < g->parts[i].to && to > g->parts[i].from)
            return hpmli_false(g->ctx, HPML_ERR_ARGUMENT, "graph part: ops %d to %d and the ops %d to %d of an earlier "
                               "part overlap; an op runs in one part", from, to, g->parts[i].from, g->parts[i].to);
    for (int i = 0; i < g->count && g->cut; i++) /* param_last is of the parts until now */
        for (int j = 0; i >= from && i < to && j < g->nodes[i]->src_count; j++) {
            const hpml_tensor *w = g->nodes[i]->src[j];
            if (w && hpmli_trainable(w) && g->param_last[w->param->index] >= 0)
                return hpmli_false(g->ctx, HPML_ERR_UNSUPPORTED, "graph part: \"%s\" is trained by two parts of one "
                                   "rank; cut the graph so that its readers are in one part", w->name);
        }
    return true;
}

/* Marks (`away`) the parameters of g that only ops outside the parts of g read: these get no memory on this rank. */
HPMLI_FN void hpmli_params_note(hpml_graph *g)
{
    for (int k = 0; k < g->param_count; k++) {
        hpml_tensor *p    = g->ctx->params[k];
        bool         here = false;
        for (int i = 0; i < g->part_count && !here; i++) here = hpmli_any_reads(g, g->parts[i].from, g->parts[i].to, p);
        if (hpmli_any_reads(g, 0, g->count, p)) p->state->away = !here;
    }
}

HPML_API hpml_status hpml_graph_part(hpml_graph *g, int from, int to, int64_t rows, int slots)
{
    if (!g || hpmli_failed(g->ctx)) return g ? g->ctx->status : HPML_ERR_ARGUMENT;
    if (!hpmli_part_check(g, from, to, rows, slots)) return g->ctx->status;
    if (!g->cut) { /* these parts replace the one that is the whole graph */
        hpmli_part_free(g->ctx, &g->parts[0]);
        g->part_count = 0;
        g->slot_count = 0;
        g->cut        = true;
    }
    if (!hpmli_part_add(g, from, to, rows, slots)) return g->ctx->status;
    hpmli_params_note(g);
    if (hpmli_graph_plan_parts(g) && g->trainer) hpmli_trainer_planned(g->trainer);
    return g->ctx->status;
}

// ---------------------------------------------------------------------------------------------------------------------
// >>retain   segments that run again or are swapped, and their choice for a budget of memory
// ---------------------------------------------------------------------------------------------------------------------
HPML_API void hpml_recompute(hpml_ctx *ctx, bool on)
{
    if (hpmli_failed(ctx)) return;
    ctx->segment = on ? ++ctx->segments : 0;
}

/* Plans the graph's memory again, after the choice of results to keep, recompute or swap has changed. */
HPMLI_FN hpml_status hpmli_graph_plan_again(hpml_graph *g)
{
    if (hpmli_graph_plan_parts(g) && g->trainer) hpmli_trainer_planned(g->trainer);
    return g->ctx->status;
}

/* True if the memory of g has not been allocated yet; else false, with an error that names the call, `what`. */
HPMLI_FN bool hpmli_graph_open(hpml_graph *g, const char *what)
{
    if (!g || hpmli_failed(g->ctx)) return false;
    if (!g->arena) return true;
    return hpmli_false(g->ctx, HPML_ERR_STATE, "graph %s: the graph has its memory already; call this before the first "
                       "run, and before a trainer's with hpml_ctx_defer", what);
}

/* Makes the nodes from .. to - 1 one segment, whose results `how` keeps in memory, computes again for the backward pass
   or copies to host memory. The caller then plans the graph's memory again. */
HPMLI_FN void hpmli_segment_make(hpml_graph *g, int from, int to, hpml_retain_how how)
{
    int number = ++g->ctx->segments;
    for (int i = from; i < to; i++) {
        g->nodes[i]->state->segment = number;
        g->nodes[i]->state->how     = how;
    }
}

HPML_API hpml_status hpml_graph_retain(hpml_graph *g, int from, int to, hpml_retain_how how)
{
    if (!hpmli_graph_open(g, "retain")) return g ? g->ctx->status : HPML_ERR_ARGUMENT;
    if (from < 0 || to > g->count || from >= to || (int)how < 0 || how > HPML_RETAIN_SWAP)
        return hpmli_fail(g->ctx, HPML_ERR_ARGUMENT, "graph retain: ops %d to %d, how %d: expected a range of the %d "
                          "ops, and HPML_RETAIN_KEEP, _AGAIN or _SWAP", from, to, (int)how, g->count);
    hpmli_segment_make(g, from, to, how);
    return hpmli_graph_plan_again(g);
}

HPML_API hpml_status hpml_graph_halves(hpml_graph *g)
{
    if (!hpmli_graph_open(g, "halves")) return g ? g->ctx->status : HPML_ERR_ARGUMENT;
    if (!g->ctx->backend->host)
        return hpmli_fail(g->ctx, HPML_ERR_UNSUPPORTED, "graph halves: ops of backend \"%s\" compute all gradients at "
                          "once; take the CPU", g->ctx->backend->name);
    g->halves = true;
    return hpmli_graph_plan_again(g);
}

enum { HPMLI_SEGMENTS = 8 }; /* most segments among which a budget chooses */
typedef struct hpmli_budget {
    hpml_graph     *g;
    size_t          bytes;                                /* at most, of activations and scratch */
    int             from[HPMLI_SEGMENTS + 1], count;      /* first node of each segment */
    hpml_retain_how best[HPMLI_SEGMENTS];                 /* the cheapest choice that fits */
    double          best_cost;                            /* below 0: none fits */
    size_t          least;                                /* bytes of all choices tried */
    double          cost[HPMLI_SEGMENTS][HPML_RETAIN_SWAP + 1]; /* extra operations of each segment alone */
} hpmli_budget;

/* Makes at most `most` segments, cut where segments of hpml_recompute begin or end; false: none is recorded. */
HPMLI_FN bool hpmli_budget_recorded(hpmli_budget *b, int most)
{
    const hpml_graph *g = b->g;
    int               cuts = 0, made = 0;
    for (int i = 1; i < g->count; i++) cuts += g->nodes[i]->state->segment != g->nodes[i - 1]->state->segment;
    b->count = 1;
    for (int i = 1; i < g->count; i++) {
        if (g->nodes[i]->state->segment == g->nodes[i - 1]->state->segment) continue;
        made++;
        if (made * (most - 1) / cuts > (made - 1) * (most - 1) / cuts || cuts < most) b->from[b->count++] = i;
    }
    return cuts > 0;
}

/* Cuts the graph into `count` segments with about the same bytes of results. */
HPMLI_FN void hpmli_budget_equal(hpmli_budget *b, int count)
{
    const hpml_graph *g = b->g;
    double            all = 0, at = 0;
    for (int i = 0; i < g->count; i++) all += (double)hpmli_tensor_bytes(g->nodes[i]->out);
    b->count = 1;
    for (int i = 0; i + 1 < g->count; i++) {
        at += (double)hpmli_tensor_bytes(g->nodes[i]->out);
        if (b->count < count && at * count >= all * b->count) b->from[b->count++] = i + 1;
    }
}

/* Plans the graph with how[i] for segment i; returns the extra operations of that plan. Copies `how` to b->best if the
   plan fits in b->bytes and has fewer extra operations than every plan tried before that fits. */
HPMLI_FN double hpmli_budget_try(hpmli_budget *b, const hpml_retain_how *how)
{
    hpml_graph *g = b->g;
    for (int i = 0; i < b->count; i++) hpmli_segment_make(g, b->from[i], b->from[i + 1], how[i]);
    if (!hpmli_graph_plan_parts(g)) return 0;
    size_t bytes = g->memory.activations + g->memory.scratch;
    if (b->least == 0 || bytes < b->least) b->least = bytes;
    if (bytes > b->bytes || (b->best_cost >= 0 && g->memory.extra >= b->best_cost)) return g->memory.extra;
    b->best_cost = g->memory.extra;
    memcpy(b->best, how, sizeof b->best);
    return g->memory.extra;
}

/* Tries all choices of `how` for the segments, except choices that cannot cost less than the best one found before. */
HPMLI_FN void hpmli_budget_all(hpmli_budget *b)
{
    hpml_retain_how how[HPMLI_SEGMENTS] = HPMLI_ZEROED;
    int             choices = 1;
    for (int i = 0; i < b->count; i++) choices *= HPML_RETAIN_SWAP + 1;
    for (int c = 0; c < choices && b->g->ctx->status == HPML_OK; c++) {
        double cost = 0;
        for (int i = 0, rest = c; i < b->count; i++, rest /= HPML_RETAIN_SWAP + 1) {
            how[i] = (hpml_retain_how)(rest % (HPML_RETAIN_SWAP + 1));
            cost += b->cost[i][how[i]];
        }
        if (b->best_cost < 0 || cost < b->best_cost) hpmli_budget_try(b, how);
    }
}

/* Tries the choice `all` for every segment; then, starting from the best choices found, makes again and again the
   change of one segment that is cheapest, until no change of one segment is cheaper. */
HPMLI_FN void hpmli_budget_descend(hpmli_budget *b, hpml_retain_how all)
{
    hpml_retain_how how[HPMLI_SEGMENTS];
    for (int i = 0; i < HPMLI_SEGMENTS; i++) how[i] = all;
    hpmli_budget_try(b, how);
    for (double before = -2; before != b->best_cost && b->best_cost >= 0;) {
        before = b->best_cost;
        hpml_retain_how start[HPMLI_SEGMENTS];
        memcpy(start, b->best, sizeof start);
        for (int c = 0; c < b->count * (HPML_RETAIN_SWAP + 1); c++) {
            memcpy(how, start, sizeof how);
            how[c / (HPML_RETAIN_SWAP + 1)] = (hpml_retain_how)(c % (HPML_RETAIN_SWAP + 1));
            hpmli_budget_try(b, how);
        }
    }
}

/* Finds the cheapest choice within the budget to keep, recompute or swap each segment: tries all choices or, if there
   are too many, improves a choice by changing one segment at a time (hpmli_budget_descend). */
HPMLI_FN void hpmli_budget_search(hpmli_budget *b)
{
    hpml_retain_how how[HPMLI_SEGMENTS] = HPMLI_ZEROED;
    hpmli_budget_try(b, how);
    if (b->best_cost == 0) return; /* everything may be kept */
    for (int i = 0; i < b->count; i++) {
        for (int c = 1; c <= HPML_RETAIN_SWAP; c++) {
            how[i]        = (hpml_retain_how)c;
            b->cost[i][c] = hpmli_budget_try(b, how);
        }
        how[i] = HPML_RETAIN_KEEP;
    }
    if (b->count <= 6 || b->g->count <= 40) {
        hpmli_budget_all(b);
        return;
    }
    hpmli_budget_descend(b, HPML_RETAIN_AGAIN);
    hpmli_budget_descend(b, HPML_RETAIN_SWAP);
}

HPML_API hpml_status hpml_graph_budget(hpml_graph *g, size_t bytes, double ops_per_byte)
{
    hpmli_budget b = HPMLI_ZEROED;
    if (!hpmli_graph_open(g, "budget")) return g ? g->ctx->status : HPML_ERR_ARGUMENT;
    b.g         = g;
    b.bytes     = bytes;
    b.best_cost = -1;
    if (ops_per_byte > 0) g->ops_per_byte = ops_per_byte;
    if (!hpmli_budget_recorded(&b, HPMLI_SEGMENTS))
        hpmli_budget_equal(&b, (int)hpmli_min(HPMLI_SEGMENTS, bytes > 0 ? g->count : (int64_t)sqrt((double)g->count)));
    b.from[b.count] = g->count;
    for (int i = 0; i < HPMLI_SEGMENTS; i++) b.best[i] = HPML_RETAIN_AGAIN;
    if (bytes > 0) hpmli_budget_search(&b);
    for (int i = 0; i < b.count; i++) hpmli_segment_make(g, b.from[i], b.from[i + 1], b.best[i]);
    hpmli_graph_plan_again(g);
    if (bytes == 0 || b.best_cost >= 0) return g->ctx->status;
    return hpmli_fail(g->ctx, HPML_ERR_MEMORY, "graph budget: %zu bytes for activations and scratch, but the least "
                      "that was found is %zu, with every segment kept, computed again or swapped; take smaller "
                      "batches, or record shorter segments (hpml_recompute)", bytes, b.least);
}

// ---------------------------------------------------------------------------------------------------------------------
// >>slots   taking memory, choosing a slot
// ---------------------------------------------------------------------------------------------------------------------
/* Sets `grad` of the parameters to addresses in this graph's array of gradients, if they are in another graph's array;
   returns this graph's array. */
HPMLI_FN float *hpmli_graph_place_grads(hpml_graph *g)
{
    int64_t at = 0;
    if (!g->loss || g->ctx->grads_of == g) return g->grads;
    g->ctx->grads_of = g;
    for (int i = 0; i < g->ctx->param_count; i++) {
        hpml_tensor *p    = g->ctx->params[i];
        bool         mine = i < g->param_count && g->param_last[i] >= 0;
        if (p->state->rows) hpmli_gradient_clear(p); /* rows that are not listed are zero in each graph's array */
        hpmli_set_memory(p, p->raw, mine && p->param->shard < 2 ? g->grads + at : NULL);
        if (mine) at += hpmli_param_kept(p, 2);
    }
    return g->grads;
}

/* Returns this rank's bytes of an array (values, gradients or states) of all trained parameters, in which a parameter
   whose hpml_param.shard is at least `level` has only this rank's shard. */
HPMLI_FN size_t hpmli_graph_kept(const hpml_graph *g, int level)
{
    int64_t floats = 0;
    for (int i = 0; i < g->param_count; i++)
        if (g->param_last[i] >= 0) floats += hpmli_param_kept(g->ctx->params[i], level);
    return (size_t)floats * sizeof(float);
}

/* Points the value of n, and its gradient, to their memory; life 1: after n ran again or its value was swapped in. */
HPMLI_FN void hpmli_value_point(hpml_node *n, int life)
{
    const hpml_tensor *root = n->state->out_root[life], *grad = n->state->grad_root ? n->state->grad_root : n->out;
    hpmli_set_memory(n->out, root->node->state->raw[life], grad->raw_grad);
}

/* Points n->saved and, where the result of n has a second life (>>list), this result and reshapes of it to the memory
   of the second life, before n runs again or is swapped in. */
HPMLI_FN void hpmli_node_again(const hpml_graph *g, const hpmli_list *p, hpml_node *n)
{
    n->saved = n->state->saved[1];
    for (int i = n->state->order; i < p->to && n->state->relives; i++)
        if (hpmli_base(p, g->nodes[i]) == n) hpmli_value_point(g->nodes[i], 1);
}

/* Sets the addresses of all tensors of the current slot's part to the slot's memory, at the places that the tensors
   have in the forward pass. */
HPMLI_FN void hpmli_graph_point(hpml_graph *g)
{
    const hpmli_slot *slot = &g->slots[g->slot];
    const hpmli_list *p    = &g->parts[slot->part];
    char             *base[HPMLI_AREAS] = { g->arena + slot->base, g->arena };
    for (int i = 0; i < p->input_count; i++) /* results of other parts, which another slot may have placed */
        if (p->inputs[i]->node) hpmli_set_memory(p->inputs[i], NULL, NULL);
    for (int a = 0; a < HPMLI_AREAS; a++)
        for (const hpmli_life *l = p->area[a].lives; l < p->area[a].lives + p->area[a].count; l++)
            *l->place = base[a] + l->offset;
    for (int i = 0; i < p->input_count; i++)
        hpmli_set_memory(p->inputs[i], p->inputs[i]->raw, p->inputs[i]->raw_grad);
    for (int i = p->from; i < p->to; i++) {
        hpml_node *n = g->nodes[i];
        hpmli_value_point(n, 0);
        n->saved   = n->state->saved[0];
        n->scratch = g->arena + g->memory.activations;
    }
    if (g->loss && !hpmli_node_in(p, g->loss)) hpmli_set_memory(g->loss, g->loss->raw, NULL);
}

/* Checks, before memory is taken, that no input which g shares with another graph is in memory for a few samples at a
   time in one of the two, and that the parameters which g reads are in this rank's memory. */
HPMLI_FN bool hpmli_graph_whole(hpml_graph *g)
{
    for (int i = 0; i < g->leaf_count; i++) {
        const hpml_tensor *t    = g->leaves[i];
        int64_t            most = t->state->samples;
        if (t->raw && t->batch_rows && (g->slot_count > 1 || (most > 0 && most < g->batch)))
            return hpmli_false(g->ctx, HPML_ERR_STATE, "graph: input %s is shared with another graph, and one of the "
                               "two runs in parts, a few samples at a time; record an input for each",
                               hpmli_describe(t));
    }
    for (const hpmli_list *p = g->parts; p < g->parts + g->part_count; p++)
        for (int i = p->from; i < p->to; i++)
            for (int j = 0; j < g->nodes[i]->src_count; j++) {
                const hpml_tensor *w = g->nodes[i]->src[j];
                if (w && w->param && !w->raw && !w->state->kept)
                    return hpmli_false(g->ctx, HPML_ERR_STATE, "graph: parameter \"%s\" is in the memory of another "
                                       "rank, whose part of a graph reads it", w->name);
            }
    return true;
}

HPML_API hpml_status hpml_graph_alloc(hpml_graph *g)
{
    if (!g) return HPML_ERR_ARGUMENT;
    hpml_ctx *ctx = g->ctx;
    if (hpmli_failed(ctx)) return ctx->status;
    if (g->arena) return HPML_OK;
    if (hpml_param_init(ctx) != HPML_OK || !hpmli_graph_whole(g)) return ctx->status;
    g->arena = (char *)hpmli_device_alloc(ctx, g->memory.activations + g->scratch_bytes + 64);
    if (g->arena && g->grad_count > 0) g->grads = (float *)hpmli_device_alloc(ctx, hpmli_graph_kept(g, 2));
    if (ctx->status != HPML_OK) return ctx->status;
    for (const hpmli_list *p = g->parts; p < g->parts + g->part_count; p++) {
        for (int a = 0; a < HPMLI_AREAS; a++) /* a leaf keeps the memory that another graph gave it */
            for (int i = 0; i < p->area[a].count; i++)
                if (*p->area[a].lives[i].place) p->area[a].lives[i].place = &g->elsewhere;
        for (int i = 0; i < p->input_count && g->cut; i++)
            if (!p->inputs[i]->raw) p->inputs[i]->state->samples = p->rows;
    }
    char *copies = g->memory.host > 0 ? (char *)hpmli_alloc(ctx, g->memory.host) : NULL;
    for (const hpmli_list *p = g->parts; p < g->parts + g->part_count && copies; p++)
        for (int i = p->from; i < p->to; i++) {
            g->nodes[i]->state->copy = copies;
            copies += g->nodes[i]->state->copy_bytes * (size_t)p->slot_count;
        }
    hpmli_graph_place_grads(g);
    hpmli_graph_point(g);
    if (g->cut) hpml_graph_set_batch(g, g->slots[0].samples);
    return ctx->status;
}
HPML_API hpml_status hpml_graph_slot(hpml_graph *g, int slot)
{
    if (hpml_graph_alloc(g) != HPML_OK) return g ? g->ctx->status : HPML_ERR_ARGUMENT;
    if (slot < 0 || slot >= g->slot_count)
        return hpmli_fail(g->ctx, HPML_ERR_ARGUMENT, "graph: slot %d of %d; hpml_graph_part says how many there are",
                          slot, g->slot_count);
    if (slot == g->slot) return HPML_OK;
    g->slot = slot;
    hpmli_graph_point(g);
    return hpml_graph_set_batch(g, g->slots[slot].samples);
}

// ---------------------------------------------------------------------------------------------------------------------
// >>node-hooks   hooks called for the parameters of an op; the ops that run next
// ---------------------------------------------------------------------------------------------------------------------
typedef enum hpmli_hook { HPMLI_HOOK_NEED, HPMLI_HOOK_RELEASE, HPMLI_HOOK_GRAD } hpmli_hook;
/* Calls the hook `which` of all attached sets of hooks, the innermost set first, for parameter p of node n. */
HPMLI_FN hpml_status hpmli_hooks_call(hpml_graph *g, hpmli_hook which, const hpml_node *n, const hpml_tensor *p)
{
    hpml_status status = HPML_OK;
    g->at.node  = n;
    g->at.param = p->param->index;
    for (int k = 0; k < g->hook_count && status == HPML_OK; k++) {
        const hpml_hooks   *h    = &g->hooks[k];
        hpml_hook_fn *const fn[] = { h->need, h->release, h->grad };
        if (fn[which]) status = fn[which](h->user, g->trainer, &g->at);
    }
    return status;
}

/* True if entry e of a list runs an op of graph g, forward, again or backward, so that it reads parameters. */
HPMLI_FN bool hpmli_entry_runs(const hpml_graph *g, const hpmli_entry *e)
{
    const hpml_tensor *out = g->nodes[e->node]->out;
    if (hpmli_is_back(e->move)) return out->needs_grad && out->raw_grad;
    return e->move == HPMLI_FORWARD || e->move == HPMLI_AGAIN;
}

/* True if no entry after place `at` in the list of part p, within the same pass (forward or backward), reads the
   parameter w. */
HPMLI_FN bool hpmli_is_last_reader(const hpml_graph *g, const hpmli_list *p, int at, const hpml_tensor *w)
{
    int end = at < p->turn ? p->turn : p->entry_count;
    for (int k = at + 1; k < end; k++)
        if (hpmli_entry_runs(g, &p->entries[k]) && hpmli_reads(g->nodes[p->entries[k].node], w)) return false;
    return true;
}

HPMLI_FN const hpmli_list *hpmli_part_now(const hpml_graph *g) { return &g->parts[g->slots[g->slot].part]; }

HPML_API const hpml_node *hpml_graph_ahead(const hpml_graph *g, int *place)
{
    const hpmli_list *p   = hpmli_part_now(g);
    const int         end = g->entry < p->turn ? p->turn : p->entry_count;
    *place = (int)hpmli_max(*place, g->entry);
    while (++*place < end)
        if (hpmli_entry_runs(g, &p->entries[*place])) return g->nodes[p->entries[*place].node];
    return NULL;
}

/* True if source s of node n is a parameter for which hooks are called: one that is no earlier source of n, too. */
HPMLI_FN bool hpmli_is_hooked(const hpml_node *n, int s)
{
    for (int k = 0; k < s; k++)
        if (n->src[k] == n->src[s]) return false;
    return n->src[s] && n->src[s]->param;
}

/* Calls the hook `need` for each parameter that node n reads, or `release` for each of them that no later node of the
   same pass reads. */
HPMLI_FN hpml_status hpmli_node_hooks(hpml_graph *g, hpmli_hook which, const hpml_node *n, hpmli_move move)
{
    const hpmli_list *part   = hpmli_part_now(g);
    hpml_status       status = HPML_OK;
    bool              called = which == HPMLI_HOOK_NEED ? g->any.need != NULL : g->any.release != NULL;
    for (int s = 0; called && s < n->src_count && status == HPML_OK; s++) {
        const hpml_tensor *p = n->src[s];
        if (!hpmli_is_hooked(n, s)) continue;
        if (which == HPMLI_HOOK_NEED || hpmli_is_last_reader(g, part, n->state->at[move], p))
            status = hpmli_hooks_call(g, which, n, p);
    }
    return status;
}

// ---------------------------------------------------------------------------------------------------------------------
// >>run   running a graph forward and backward
// ---------------------------------------------------------------------------------------------------------------------
HPML_API hpml_status hpml_graph_set_batch(hpml_graph *g, int64_t samples)
{
    if (!g || hpmli_failed(g->ctx)) return g ? g->ctx->status : HPML_ERR_ARGUMENT;
    hpmli_slot *slot = &g->slots[g->slot];
    int64_t     rows = g->parts[slot->part].rows;
    if (samples < 1 || samples > rows || (samples != g->batch && !g->batchable))
        return hpmli_fail(g->ctx, HPML_ERR_SHAPE, "graph: %lld samples, expected %s%lld", (long long)samples,
                          g->batchable ? "1 to " : "(an op mixes samples) exactly ", (long long)rows);
    slot->samples = samples;
    g->batch_now  = samples;
    hpmli_graph_apply_batch(g);
    return HPML_OK;
}

/* Zeroes the gradients that backward of n would overwrite and that have no batch dimension, because a short batch may
   not write all of their elements, and a rank without samples writes none. On a rank without samples, in a graph with
   collective ops, zeroes also those with a batch dimension, because the collective ops read these gradients. */
HPMLI_FN void hpmli_zero_gradients(hpml_graph *g, const hpml_node *n)
{
    for (int s = 0; s < n->src_count; s++) {
        const hpml_tensor *t = n->src[s];
        bool partial = t && (!t->batch_rows || (g->idle && g->collective));
        if (partial && t->raw_grad && !n->accumulate[s] && t->raw_grad != n->out->raw_grad)
            hpmli_gradient_clear(t);
    }
}

/* Zeroes the values of t, an input or a result of a rank without samples, for collective ops. */
HPMLI_FN void hpmli_zero_values(hpml_graph *g, const hpml_tensor *t)
{
    if (t->node && hpmli_has_trait(t->node, HPMLI_OP_IS_ALIAS)) return;
    if (g->collective) g->ctx->backend->zero(g->ctx->device, t->raw, hpmli_tensor_bytes(t));
}

/* Runs the op of n, unless this rank has no samples and the op is not one that computes with all ranks' samples. */
HPMLI_FN hpml_status hpmli_node_op(hpml_graph *g, const hpml_run *run, hpml_node *n, bool backward)
{
    const hpml_op_impl *op    = &g->ctx->ops[n->op];
    bool                joins = hpmli_is_collective(n) || (run->sum && hpmli_has_trait(n, HPMLI_OP_JOINS_BATCH));
    bool                idle  = run->idle && !joins;
    if (backward && (idle || g->batch_now < g->batch)) hpmli_zero_gradients(g, n);
    if (idle && !backward) hpmli_zero_values(g, n->out);
    if (idle) return HPML_OK;
    return backward ? op->backward(run, n) : op->forward(run, n);
}

/* If status is HPML_OK, makes the optimizer steps that are due after the backward pass of n: of the parameters whose
   gradients n made final. Skips those that the op of n has made itself, which sets their hpml_update.n to 0. */
HPMLI_FN hpml_status hpmli_node_update(hpml_graph *g, hpml_node *n, hpml_status status)
{
    for (int s = 0; s < n->src_count; s++) {
        hpml_update *u = n->state->update[s];
        n->state->update[s] = NULL;
        if (!u || u->n == 0 || status != HPML_OK) continue;
        status = g->ctx->backend->update(g->ctx->device, g->ctx, u, 1);
        u->n   = 0; /* the step is not repeated where an op reads a parameter twice */
    }
    return status;
}

HPMLI_FN hpml_status hpmli_run_untimed(hpml_graph *g, const hpml_run *run, int i, hpmli_move move)
{
    hpml_node  *n      = g->nodes[i];
    bool        backward = hpmli_is_back(move);
    hpml_status status = hpmli_node_hooks(g, HPMLI_HOOK_NEED, n, move);
    if (status == HPML_OK) status = hpmli_node_op(g, run, n, backward);
    if (backward) status = hpmli_node_update(g, n, status);
    return status == HPML_OK ? hpmli_node_hooks(g, HPMLI_HOOK_RELEASE, n, move) : status;
}

/* Runs node i forward or backward, and times it if a trace or a profile is on. A backend with time_op measures the time
   on its device; the trace's span is then the time that the host took to launch the op. The time of a forward run that
   is repeated for the backward pass counts as the node's backward time. */
HPMLI_FN hpml_status hpmli_run_node(hpml_graph *g, const hpml_run *run, int i, hpmli_move move)
{
    hpml_node          *n = g->nodes[i];
    const hpml_backend *b = g->ctx->backend;
    if (!g->profile && !g->ctx->trace) return hpmli_run_untimed(g, run, i, move);
    const char *name    = hpmli_is_back(move) ? g->back_names[i] : n->out->name;
    double     *seconds = NULL, start = hpml_now(), span_start = hpmli_trace_time(g->ctx, start);
    if (g->profile) seconds = move == HPMLI_FORWARD ? &g->profile[i].forward_s : &g->profile[i].backward_s;
    if (b->time_op) b->time_op(g->ctx->device, NULL, NULL);
    hpml_status status = hpmli_run_untimed(g, run, i, move);
    if (b->time_op) b->time_op(g->ctx->device, name, seconds);
    else if (b->sync) b->sync(g->ctx->device);
    double end = hpml_now();
    hpml_trace_span(g->ctx, HPML_LANE_COMPUTE, name, span_start, hpmli_trace_time(g->ctx, end));
    if (seconds && !b->time_op) *seconds += end - start;
    if (g->profile && move == HPMLI_FORWARD) g->profile[i].calls++;
    return status;
}

HPMLI_FN hpml_status hpmli_run_sum(void *graph, double *values, int64_t n)
{
    const hpml_graph *g = (const hpml_graph *)graph;
    hpml_status       status = HPML_OK;
    for (const hpml_hooks *h = g->hooks; h < g->hooks + g->hook_count && status == HPML_OK; h++)
        if (h->sum) status = h->sum(h->user, g->trainer, values, n);
    return status;
}
HPMLI_FN hpml_run hpmli_run_of(hpml_graph *g, bool train, uint64_t step, float scale)
{
    hpml_run run = { g->ctx, train, step, scale, (uint64_t)g->first_sample, g->idle,
                     g->any.sum ? hpmli_run_sum : NULL, g, false };
    g->at.pass = train ? HPML_PASS_FORWARD : HPML_PASS_EVALUATE;
    return run;
}

/* True if the run `move` of node n, backward or the second half of it, computes the gradient of source s. */
HPMLI_FN bool hpmli_is_made(const hpml_node *n, int s, hpmli_move move)
{
    return (n->state->late >> s & 1) == (move == HPMLI_WEIGHTS);
}

/* Runs node n in one half of its backward pass: meanwhile the sources of the other half have no gradient. */
HPMLI_FN hpml_status hpmli_run_half(hpml_graph *g, const hpml_run *run, hpml_node *n, hpmli_move move)
{
    void *grad[HPML_MAX_SRC];
    for (int s = 0; s < n->src_count; s++) grad[s] = n->src[s] ? n->src[s]->raw_grad : NULL;
    for (int s = 0; s < n->src_count; s++)
        if (n->src[s] && !hpmli_is_made(n, s, move)) hpmli_set_memory(n->src[s], n->src[s]->raw, NULL);
    n->state->second   = move == HPMLI_WEIGHTS;
    hpml_status status = hpmli_run_node(g, run, n->state->order, move);
    for (int s = 0; s < n->src_count; s++)
        if (n->src[s]) hpmli_set_memory(n->src[s], n->src[s]->raw, grad[s]);
    n->state->second = false;
    return status;
}

/* Runs entry e, a node's backward pass or the second half of it. accumulate: gradients of parameters are added to, else
   overwritten. */
HPMLI_FN hpml_status hpmli_run_back(hpml_graph *g, const hpml_run *run, const hpmli_entry *e, bool accumulate)
{
    hpml_node *n = g->nodes[e->node];
    bool       before[HPML_MAX_SRC];
    if (!n->out->needs_grad || !n->out->raw_grad) return HPML_OK;
    for (int s = 0; s < n->src_count; s++) { /* with `accumulate` the first node adds to a gradient, too */
        before[s] = n->accumulate[s];
        if (!n->src[s] || !hpmli_trainable(n->src[s])) continue;
        int param = n->src[s]->param->index;
        if (accumulate) n->accumulate[s] = true;
        bool due = g->updates && g->param_last[param] == e->node && hpmli_is_made(n, s, e->move);
        if (due) n->state->update[s] = &g->updates[param];
    }
    hpml_status status = HPML_OK;
    if (n->state->late) status = hpmli_run_half(g, run, n, e->move);
    else status = hpmli_run_node(g, run, e->node, e->move);
    memcpy(n->accumulate, before, sizeof(bool) * (size_t)n->src_count);
    return status;
}

/* Calls the hook `grad` for each parameter whose gradient is final after entry e, a node's backward run. */
HPMLI_FN hpml_status hpmli_run_hooks(hpml_graph *g, const hpmli_entry *e)
{
    hpml_node  *n      = g->nodes[e->node];
    hpml_status status = HPML_OK;
    for (int s = 0; n->out->needs_grad && n->out->raw_grad && s < n->src_count && status == HPML_OK; s++) {
        const hpml_tensor *w = n->src[s];
        if (!hpmli_is_hooked(n, s) || !hpmli_trainable(w) || g->param_last[w->param->index] != e->node) continue;
        if (hpmli_is_made(n, s, e->move)) status = hpmli_hooks_call(g, HPMLI_HOOK_GRAD, n, w);
    }
    return status;
}

/* A backward pass with gradient hooks is cut, if a device replays it, into at most HPMLI_PIECES_OF_PASS pieces of at
   least HPMLI_PIECES_OF_PASS entries (the last may be shorter): the device replays a piece as a whole, and then the
   hooks of the piece's gradients are called. Few pieces cost few launches; many let communication begin early. */
#define HPMLI_PIECES_OF_PASS 8
/* Sets the addresses of the tensors that entries `from` to `to` - 1 of part p compute again or swap in to the memory of
   their second lives (>>list). */
HPMLI_FN void hpmli_entries_point(hpml_graph *g, const hpmli_list *p, int64_t from, int64_t to)
{
    for (const hpmli_entry *e = p->entries + from; e < p->entries + to; e++)
        if (e->move == HPMLI_AGAIN || e->move == HPMLI_IN) hpmli_node_again(g, p, g->nodes[e->node]);
}

/* Copies the swapped arrays of node n (result, n->saved) for the current slot to host memory or, if `in`, back. */
HPMLI_FN hpml_status hpmli_node_swap(hpml_graph *g, const hpml_node *n, bool in)
{
    const hpml_backend *b    = g->ctx->backend;
    size_t              size = hpmli_tensor_bytes(n->out), saved = n->state->copy_saved;
    int                 slot = g->slot - hpmli_part_now(g)->first_slot;
    char               *copy = n->state->copy + (size_t)slot * n->state->copy_bytes;
    hpml_status         status = HPML_OK;
    if (n->state->relives && in) status = b->write(g->ctx->device, n->out->raw, copy, size);
    else if (n->state->relives) status = b->read(g->ctx->device, copy, n->out->raw, size);
    copy += n->state->copy_bytes - saved;
    if (saved == 0 || status != HPML_OK) return status;
    return in ? b->write(g->ctx->device, n->saved, copy, saved) : b->read(g->ctx->device, copy, n->saved, saved);
}

/* Runs entries pass->from to pass->to - 1, counted from the first entry of the forward or backward pass; an entry runs
   a node or swaps its result out or in. */
HPMLI_FN hpml_status hpmli_run_nodes(hpml_graph *g, const hpml_run *run, const hpml_pass *pass)
{
    const hpmli_list *p      = hpmli_part_now(g);
    int               start  = pass->backward ? p->turn : 0;
    hpml_run          again  = *run;
    hpml_status       status = HPML_OK;
    again.again = true;
    for (int k = start + (int)pass->from; k < start + pass->to && status == HPML_OK; k++) {
        const hpmli_entry *e = &p->entries[k];
        g->entry = k;
        hpmli_entries_point(g, p, k, k + 1);
        switch (e->move) {
        case HPMLI_FORWARD:
            if (!g->no_targets || g->nodes[e->node]->out != g->loss) status = hpmli_run_node(g, run, e->node, e->move);
            break;
        case HPMLI_AGAIN:
            g->at.pass = HPML_PASS_AGAIN;
            status     = hpmli_run_node(g, &again, e->node, e->move);
            g->at.pass = HPML_PASS_BACKWARD;
            break;
        case HPMLI_BACKWARD:
        case HPMLI_WEIGHTS: status = hpmli_run_back(g, run, e, pass->accumulate != 0); break;
        case HPMLI_OUT: status = hpmli_node_swap(g, g->nodes[e->node], false); break;
        case HPMLI_IN: status = hpmli_node_swap(g, g->nodes[e->node], true); break;
        }
    }
    return status;
}

/* Runs a piece of a pass: the device replays its recording of the piece, or records it while the nodes run. */
HPMLI_FN hpml_status hpmli_run_recorded(hpml_graph *g, const hpml_run *run, const hpml_pass *pass)
{
    const hpml_backend *b = g->ctx->backend;
    const hpmli_list   *p = hpmli_part_now(g);
    bool                done, again;
    hpml_status         status;
    do {
        done = again = false;
        status = b->begin(g->ctx->device, run, pass, &done);
        if (done && pass->backward) hpmli_entries_point(g, p, p->turn + pass->from, p->turn + pass->to);
        if (done) return status;
        if (status == HPML_OK) status = hpmli_run_nodes(g, run, pass);
        status = b->end(g->ctx->device, run, status, &again);
    } while (again);
    return status;
}

/* Zeroes the inputs if the rank has no samples. Sets the addresses of the results that have another place in memory in
   the backward pass (computed again or swapped in) back to their place in the forward pass. */
HPMLI_FN void hpmli_forward_begin(hpml_graph *g, const hpmli_list *p)
{
    for (int i = 0; i < p->input_count && g->idle; i++)
        if (p->inputs[i]->batch_rows) hpmli_zero_values(g, p->inputs[i]);
    for (int i = p->from; i < p->to; i++) {
        hpml_node *n = g->nodes[i];
        if (hpmli_base(p, n)->state->relives) hpmli_value_point(n, 0);
        if (n->state->again) n->saved = n->state->saved[0];
    }
}

/* Runs all nodes forward or backward (both halves, or one), piece by piece, and after each piece of the backward pass
   the gradient hooks of its nodes. accumulate: the backward pass adds to the parameters' gradients. */
HPMLI_FN hpml_status hpmli_graph_pass(hpml_graph *g, const hpml_run *run, bool backward, hpml_half half,
                                      bool accumulate)
{
    const hpmli_list *p       = hpmli_part_now(g);
    const hpml_hooks *h       = &g->any;
    bool              timed   = g->profile || g->ctx->trace;
    bool              single  = timed || h->need || h->release || h->sum; /* run nodes singly */
    bool              rare    = g->idle || g->no_targets || g->memory.host > 0;
    bool              replays = g->ctx->backend->begin && !single && !rare && !g->unreplayable && !g->collective;
    bool              hooks   = backward && h->grad && g->last;
    int               start   = backward ? p->turn : 0;
    int               count   = backward ? p->entry_count - p->turn : p->turn;
    int               first   = half == HPML_HALF_WEIGHTS ? p->late - p->turn : 0;
    int               piece   = 1; /* number of entries */
    hpml_status       status  = HPML_OK;
    hpml_pass         pass;
    if (half == HPML_HALF_INPUTS) count = p->late - p->turn;
    if (half == HPML_HALF_WEIGHTS) hpmli_entries_point(g, p, p->turn, p->late); /* another slot was current, perhaps */
    if (replays) piece = (int)hpmli_max(HPMLI_PIECES_OF_PASS, (count - 1) / HPMLI_PIECES_OF_PASS + 1);
    if (replays && !hooks) piece = count;
    memset(&pass, 0, sizeof pass); /* padding too: compared by bytes */
    pass.graph      = g;
    pass.samples    = g->batch_now;
    pass.first      = g->shift;
    pass.slot       = g->slot;
    pass.train      = run->train;
    pass.backward   = backward;
    pass.accumulate = accumulate;
    if (backward) g->at.pass = HPML_PASS_BACKWARD;
    hpmli_graph_apply_batch(g);
    if (!backward) hpmli_forward_begin(g, p);
    for (int from = first; from < count && status == HPML_OK; from += piece) {
        pass.from = from;
        pass.to   = hpmli_min((int64_t)from + piece, count);
        status = replays ? hpmli_run_recorded(g, run, &pass) : hpmli_run_nodes(g, run, &pass);
        for (int k = start + from; k < start + pass.to && hooks && status == HPML_OK; k++)
            if (hpmli_is_back(p->entries[k].move)) status = hpmli_run_hooks(g, &p->entries[k]);
    }
    return status;
}

HPML_API hpml_status hpml_graph_forward(hpml_graph *g, bool train, uint64_t step)
{
    hpml_status status = hpml_graph_alloc(g);
    if (status != HPML_OK) return status;
    hpml_run    run  = hpmli_run_of(g, train, step, 1);
    hpmli_slot *slot = &g->slots[g->slot];
    slot->train  = train;
    slot->step   = step;
    slot->sample = g->first_sample;
    return hpmli_graph_pass(g, &run, false, HPML_HALF_BOTH, false);
}

HPML_API hpml_status hpml_graph_backward(hpml_graph *g, float scale, bool accumulate)
{
    return hpml_graph_backward_half(g, HPML_HALF_BOTH, scale, accumulate);
}

HPML_API hpml_status hpml_graph_backward_half(hpml_graph *g, hpml_half half, float scale, bool accumulate)
{
    if (!g || hpmli_failed(g->ctx)) return g ? g->ctx->status : HPML_ERR_ARGUMENT;
    bool has_loss = g->loss && hpmli_node_in(hpmli_part_now(g), g->loss);
    if (!g->loss || !g->arena || (has_loss && !g->loss->grad))
        return hpmli_fail(g->ctx, HPML_ERR_STATE, "graph backward: needs a loss that depends on a parameter, and a "
                          "forward pass before the backward pass");
    if ((int)half < 0 || half > HPML_HALF_WEIGHTS || (half != HPML_HALF_BOTH && !g->halves))
        return hpmli_fail(g->ctx, HPML_ERR_STATE, "graph backward: half %d, expected HPML_HALF_BOTH, or after "
                          "hpml_graph_halves _INPUTS or _WEIGHTS", (int)half);
    const hpmli_slot *slot = &g->slots[g->slot];
    hpml_run          run  = hpmli_run_of(g, slot->train, slot->step, scale);
    hpmli_graph_place_grads(g);
    if (has_loss && half != HPML_HALF_WEIGHTS)
        g->ctx->backend->write(g->ctx->device, g->loss->grad, &scale, sizeof scale);
    return hpmli_graph_pass(g, &run, true, half, accumulate);
}

// ---------------------------------------------------------------------------------------------------------------------
// >>check-grad   gradients compared with central differences
// ---------------------------------------------------------------------------------------------------------------------
/* Returns the loss that g computes with `by` added to element `at` of t, and restores the element. */
HPMLI_FN double hpmli_loss_moved(hpml_graph *g, hpml_tensor *t, int64_t at, float by)
{
    float was, now, loss = 0;
    g->ctx->backend->read(g->ctx->device, &was, t->data + at, sizeof was);
    now = was + by;
    g->ctx->backend->write(g->ctx->device, t->data + at, &now, sizeof now);
    hpml_graph_forward(g, g->slots[g->slot].train, g->slots[g->slot].step);
    g->ctx->backend->read(g->ctx->device, &loss, g->loss->data, sizeof loss);
    g->ctx->backend->write(g->ctx->device, t->data + at, &was, sizeof was);
    return (double)loss;
}

HPML_API double hpml_check_grad(hpml_graph *g, float step, int samples)
{
    double worst = 0;
    if (!g) return -1;
    if (hpmli_activation_dtype(g->ctx) != HPML_DTYPE_F32) {
        hpmli_fail(g->ctx, HPML_ERR_UNSUPPORTED, "check_grad: results are stored as %s, whose rounding hides the "
                   "differences that are compared; record the model on a context that stores f32",
                   hpml_dtype_name(hpmli_activation_dtype(g->ctx)));
        return -1;
    }
    if (step == 0) step = 1e-2f;
    if (!(step > 0) || samples < 1) {
        hpmli_fail(g->ctx, HPML_ERR_ARGUMENT, "check_grad: eps %g, %d samples, expected both above 0 (or eps 0 for "
                   "1e-2)", (double)step, samples);
        return -1;
    }
    if (hpml_graph_forward(g, true, 0) != HPML_OK || hpml_graph_backward(g, 1, false) != HPML_OK) return -1;
    for (int p = 0; p < g->ctx->param_count + g->leaf_count; p++) {
        hpml_tensor *t = p < g->ctx->param_count ? g->ctx->params[p] : g->leaves[p - g->ctx->param_count];
        int64_t      n = hpml_tensor_count(t);
        hpml_rng     rng   = { g->ctx->seed, HPMLI_STREAM_CHECK_GRAD, 0 };
        double       scale = 0;
        if (!t->grad || !t->needs_grad) continue;
        float *grad = hpmli_new(g->ctx, float, n);
        if (!grad) return -1;
        g->ctx->backend->read(g->ctx->device, grad, t->grad, (size_t)n * sizeof(float));
        for (int64_t i = 0; i < n; i++) scale += (double)grad[i] * (double)grad[i];
        scale = sqrt(scale / (double)n); /* smaller differences are rounding errors */
        const hpml_group *ranks = hpml_ctx_group(g->ctx, t->param ? t->param->axis : HPML_AXIS_DATA);
        const int64_t     turns = t->param && t->param->axis ? ranks->size : 1; /* one rank's part moves at a time */
        for (int64_t i = 0; i < turns * samples && i < turns * n; i++) {
            int64_t at    = samples >= n ? i / turns : hpml_rng_below(&rng, n);
            float   eps   = turns == 1 || i % turns == ranks->rank ? step : 0;
            double  step_1 = hpmli_loss_moved(g, t, at, eps) - hpmli_loss_moved(g, t, at, -eps);
            double  step_2 = hpmli_loss_moved(g, t, at, 2 * eps) - hpmli_loss_moved(g, t, at, -2 * eps);
            double  want   = (8 * step_1 - step_2) / (12 * (double)step); /* fourth order: error about step^4 */
            double  got    = (double)grad[at];
            double  error  = fabs(want - got) / (fabs(want) + fabs(got) + scale + 1e-6);
            if (!(error <= worst) && eps != 0) worst = error;
        }
        hpmli_free(g->ctx, grad);
    }
    hpml_graph_forward(g, true, 0);
    return worst;
}

// =====================================================================================================================
// PART IV   OPS: forward and backward of each, and the products under them
// =====================================================================================================================

// ---------------------------------------------------------------------------------------------------------------------
// >>gemm-threads   cutting a matrix product into tasks for threads
// ---------------------------------------------------------------------------------------------------------------------
/* Splits a matrix product C = A B over threads: C is cut into rectangles, and one thread computes a rectangle with its
   own packing space, so that threads share nothing and never wait for each other. Each rectangle packs (copies for the
   kernel) its rows of A and columns of B itself; from 100 rows on, that takes a few percent of the time. */
typedef struct hpmli_gemm_job {
    hpml_ctx              *ctx;
    const hpmli_gemm_desc *d;
    int64_t                rows, cols; /* numbers of rectangles down and across C */
    int64_t                pieces;     /* a product that is cut along k: number of pieces */
    float                 *sums;       /* (pieces, m, n) one partial C for each piece */
} hpmli_gemm_job;

/* Returns the first index of part t when indices 0 .. length - 1 are cut into `pieces` parts at multiples of 32. */
HPMLI_FN int64_t hpmli_piece_start(int64_t length, int64_t pieces, int64_t t)
{
    return hpmli_min((length + 31) / 32 * t / pieces * 32, length);
}

HPMLI_FN void hpmli_gemm_task(void *arg, int64_t task, int thread)
{
    const hpmli_gemm_job *job = (const hpmli_gemm_job *)arg;
    int64_t               rectangle = task % (job->rows * job->cols);
    int64_t               r = rectangle / job->cols, c = rectangle % job->cols;
    hpmli_gemm_part       part;
    part.d     = job->d;
    part.batch = task / (job->rows * job->cols);
    part.i0    = job->d->m * r / job->rows;
    part.i1    = job->d->m * (r + 1) / job->rows;
    part.j0    = hpmli_piece_start(job->d->n, job->cols, c);
    part.j1    = hpmli_piece_start(job->d->n, job->cols, c + 1);
    part.ws    = job->ctx->gemm_ws + (int64_t)thread * HPMLI_GEMM_WS;
    if (part.i0 < part.i1 && part.j0 < part.j1) job->ctx->k->gemm_part(&part);
}

/* Computes the product d on the calling thread, number `thread` of the pool, whose packing space is used. */
HPMLI_FN void hpmli_gemm_serial(hpml_ctx *ctx, int thread, const hpmli_gemm_desc *d)
{
    hpmli_gemm_part part = { d, 0, 0, d->m, 0, d->n, ctx->gemm_ws + (int64_t)thread * HPMLI_GEMM_WS };
    if (d->m > 0 && d->n > 0)
        for (part.batch = 0; part.batch < d->batch; part.batch++) ctx->k->gemm_part(&part);
}

/* A product with a small C and a long k, the summed dimension (as for gradients of convolution weights), is cut along
   k. The shape alone decides the pieces, and their sums are added in order, so that threads do not change the bits.
   Returns the number of pieces, 1 to 64; 1 for a batch or a large C. */
HPMLI_FN int64_t hpmli_gemm_pieces(const hpmli_gemm_desc *d)
{
    int64_t pieces = d->k / 2048;
    if (d->batch != 1 || d->alpha == 0 || d->m * d->n > HPMLI_GEMM_SUMS / 8) return 1;
    if (pieces > HPMLI_GEMM_SUMS / (d->m * d->n)) pieces = HPMLI_GEMM_SUMS / (d->m * d->n);
    return pieces > 64 ? 64 : pieces;
}

HPMLI_FN void hpmli_gemm_split_task(void *arg, int64_t task, int thread)
{
    const hpmli_gemm_job *job = (const hpmli_gemm_job *)arg;
    int64_t               p0  = task * job->d->k / job->pieces, p1 = (task + 1) * job->d->k / job->pieces;
    hpmli_gemm_desc       d   = *job->d;
    d.k = p1 - p0;
    d.a += p0 * d.a_k;
    d.b += p0 * d.b_k;
    d.c      = job->sums + task * d.m * d.n;
    d.ldc    = d.n;
    d.alpha  = 1;
    d.beta   = 0;
    d.bias_n = NULL;
    d.bias_m = NULL;
    d.act    = 0;
    hpmli_gemm_serial(job->ctx, thread, &d);
}

#ifdef HPML_USE_CBLAS
/* Lets the BLAS library compute the product d, with its own threads and rounding, if d is a single product of matrices
   that BLAS can address; copies the bias to C before, applies relu after. Returns false for all other products
   (batches, a bias for each row): hpml's kernels compute these, and also all products inside tasks. */
HPMLI_FN bool hpmli_gemm_cblas(hpml_ctx *ctx, const hpmli_gemm_desc *d)
{
    bool  ta = d->a_k != 1, tb = d->b_col != 1;
    float beta = d->beta;
    if (d->batch != 1 || d->bias_m || d->k < 1) return false;
    if (d->m > INT_MAX || d->n > INT_MAX || d->k > INT_MAX ||
        (ta && d->a_row != 1) || (tb && d->b_k != 1) || (ta ? d->a_k < d->m : d->a_row < d->k) ||
        (tb ? d->b_col < d->k : d->b_k < d->n) || d->ldc < d->n)
        return false;
    for (int64_t i = 0; d->bias_n && i < d->m; i++) {
        if (d->beta == 0) memcpy(d->c + i * d->ldc, d->bias_n, (size_t)d->n * sizeof(float));
        else return false;
        beta = 1;
    }
    cblas_sgemm(CblasRowMajor, ta ? CblasTrans : CblasNoTrans, tb ? CblasTrans : CblasNoTrans, (int)d->m, (int)d->n,
                (int)d->k, d->alpha, d->a, (int)(ta ? d->a_k : d->a_row), d->b, (int)(tb ? d->b_col : d->b_k), beta,
                d->c, (int)d->ldc);
    for (int64_t i = 0; d->act == 1 && i < d->m; i++)
        ctx->k->act_forward(HPML_ACT_RELU, 0, d->c + i * d->ldc, d->c + i * d->ldc, d->n);
    return true;
}
#endif

/* Raises job->rows and job->cols, the numbers of rectangles down and across C, for `want` threads: cuts the longer side
   of a rectangle until there is a rectangle for each thread, or they are small. */
HPMLI_FN void hpmli_gemm_cut(hpmli_gemm_job *job, int64_t want)
{
    const hpmli_gemm_desc *d = job->d;
    while (job->rows * job->cols * d->batch < want) {
        int64_t height = d->m / job->rows, width = d->n / job->cols;
        /* prefer to cut the rows of C if A is stored by columns that lie far apart, because then all of A is copied
           (packed) once for each column of rectangles */
        bool    prefer_rows = d->a_row == 1 && d->a_k * d->k >= 262144 && width >= 256;
        bool    even_cols   = width >= 256 || d->n % (32 * (job->cols + 1)) == 0; /* cut at multiples of 32 */
        if (width >= height + prefer_rows && width >= 64 && even_cols) job->cols++;
        else if (height >= 8) job->rows++;
        else if (width >= 64) job->cols++;
        else break;
    }
}

/* Computes the product d, or the batch of products, on all threads of the context; on one thread if it is small. */
HPMLI_FN void hpmli_gemm(hpml_ctx *ctx, const hpmli_gemm_desc *d)
{
    double  elements = (double)d->m * (double)d->n * (double)d->batch;
    /* threads: 1 for a product that takes less time than waking other threads and moving C between caches */
    int64_t want = elements * (double)d->k < 250e3 + 4 * fmin(elements, 65536) ? 1 : ctx->threads;
    if (d->m < 1 || d->n < 1 || d->batch < 1) return;
#ifdef HPML_USE_CBLAS
    if (hpmli_gemm_cblas(ctx, d)) return;
#endif
    hpmli_gemm_job job = { ctx, d, 1, 1, hpmli_gemm_pieces(d), ctx->gemm_ws + HPMLI_GEMM_WS - HPMLI_GEMM_SUMS };
    if (job.pieces > 1) {
        hpmli_parallel(ctx, job.pieces, hpmli_gemm_split_task, &job);
        for (int64_t i = 0; i < d->m; i++) ctx->k->gemm_sum(d, i, job.sums, job.pieces, d->m * d->n);
        return;
    }
    if (want == 1) {
        hpmli_gemm_serial(ctx, 0, d);
        return;
    }
    hpmli_gemm_cut(&job, want);
    /* Rectangles of C of more than 8e6 multiply-adds are cut into up to four, so that a slow core can take fewer of
       them. They are cut along the columns of C, so that no part of B is packed twice. */
    double each = elements * (double)d->k / (double)(job.rows * job.cols * d->batch);
    if (d->a_k == 1) job.cols *= (int64_t)fmax(1, fmin(fmin(each / 8e6, 4), (double)(d->n / job.cols / 128)));
    hpmli_parallel(ctx, job.rows * job.cols * d->batch, hpmli_gemm_task, &job);
}

/* A matrix, or a batch of them. The products C = A B and, backward, dA = dC B^T and dB = A^T dC are of the same kind: a
   transposed matrix is the same memory with rows and columns exchanged, so one function computes all of them. */
typedef struct hpmli_mat {
    float  *p;
    int64_t rows, cols, ld; /* ld: elements from one row to the next; if trans, from one column to the next */
    int64_t count, apart;   /* number of matrices in a batch; elements from one to the next */
    bool    trans;          /* stored transposed: columns are contiguous */
} hpmli_mat;
HPMLI_FN hpmli_mat hpmli_matrix(float *p, int64_t rows, int64_t cols, int64_t ld)
{
    hpmli_mat m = { p, rows, cols, ld, 1, 0, false };
    return m;
}
HPMLI_FN hpmli_mat hpmli_transposed(hpmli_mat m)
{
    hpmli_mat t = { m.p, m.cols, m.rows, m.ld, m.count, m.apart, !m.trans };
    return t;
}

/* Describes for hpmli_gemm the product c = a b, or c += a b if `accumulate`; for a transposed c it is c^T = b^T a^T. */
HPMLI_FN hpmli_gemm_desc hpmli_gemm_of(hpmli_mat a, hpmli_mat b, hpmli_mat c, bool accumulate)
{
    hpmli_gemm_desc d = HPMLI_ZEROED;
    if (c.trans) return hpmli_gemm_of(hpmli_transposed(b), hpmli_transposed(a), hpmli_transposed(c), accumulate);
    d.m     = c.rows;
    d.n     = c.cols;
    d.k     = a.cols;
    d.alpha = 1;
    d.beta  = accumulate ? 1.0f : 0.0f;
    d.batch = c.count;
    d.a       = a.p;
    d.a_row   = a.trans ? 1 : a.ld;
    d.a_k     = a.trans ? a.ld : 1;
    d.a_batch = a.apart;
    d.b       = b.p;
    d.b_k     = b.trans ? 1 : b.ld;
    d.b_col   = b.trans ? b.ld : 1;
    d.b_batch = b.apart;
    d.c = c.p, d.ldc = c.ld, d.c_batch = c.apart;
    return d;
}

HPMLI_FN void hpmli_product(hpml_ctx *ctx, hpmli_mat a, hpmli_mat b, hpmli_mat c, bool accumulate)
{
    hpmli_gemm_desc d = hpmli_gemm_of(a, b, c, accumulate);
    hpmli_gemm(ctx, &d);
}

// ---------------------------------------------------------------------------------------------------------------------
// >>blas   plain arrays: matrix products, also of halves; matrix times vector; vectors
// ---------------------------------------------------------------------------------------------------------------------
/* A product with halves (bf16, f16) in A or B is computed in tiles of C, one a task, and in blocks of k, the summed
   dimension. A task converts its blocks of A and B to f32, in the part of its packing space that products of this size
   leave free, and adds their product to its tile. The sizes of tiles and blocks depend on the shape alone, so that the
   number of threads does not change the bits. */
#define HPMLI_MIXED_SIDE  512 /* rows and columns of a tile of C, at most */
#define HPMLI_MIXED_DEPTH 256 /* length of a block along k, the summed dimension */
#define HPMLI_MIXED_BLOCK (HPMLI_MIXED_SIDE * HPMLI_MIXED_DEPTH)
#define HPMLI_MIXED_A     ((HPMLI_MIXED_SIDE + 64) * HPMLI_MIXED_DEPTH) /* offset of A's f32 block, behind packed B */
#define HPMLI_MIXED_B     (HPMLI_MIXED_A + HPMLI_MIXED_BLOCK) /* offset of B's f32 block, before packed A */
#define HPMLI_MIXED_THIN  8   /* so few rows or columns of C that reading the longer operand takes most of the time */
typedef struct hpmli_mixed {
    hpml_ctx       *ctx;
    hpmli_gemm_desc d;          /* d.a and d.b are addresses of elements of type[0] and type[1] */
    hpml_dtype      type[2];
    int64_t         rows, cols; /* of a tile of C */
    int64_t         depth;      /* of a block along k, the summed dimension */
} hpmli_mixed;

/* Returns rows x cols elements of the matrix x, from (row, col) on, as f32. Elements of another type are converted to
   `space`, and *row_stride and *col_stride (in elements) become those of the converted block. */
HPMLI_FN const float *hpmli_mixed_block(const hpmli_kernels *k, hpml_dtype type, const void *x, int64_t row,
                                        int64_t col, int64_t rows, int64_t cols, int64_t *row_stride,
                                        int64_t *col_stride, float *space)
{
    bool        by_rows = *col_stride == 1; /* rows are contiguous, else columns are */
    int64_t     lines = by_rows ? rows : cols;
    int64_t     length = by_rows ? cols : rows;
    int64_t     step  = by_rows ? *row_stride : *col_stride;
    const char *from = (const char *)x + (size_t)(row * *row_stride + col * *col_stride) * hpml_dtype_size(type);
    if (type == HPML_DTYPE_F32) return (const float *)(const void *)from;
    for (int64_t i = 0; i < lines; i++)
        k->to_f32(space + i * length, type, from + (size_t)(i * step) * hpml_dtype_size(type), length);
    *row_stride = by_rows ? length : 1;
    *col_stride = by_rows ? 1 : length;
    return space;
}

HPMLI_FN void hpmli_mixed_task(void *arg, int64_t task, int thread)
{
    const hpmli_mixed   *j  = (const hpmli_mixed *)arg;
    const hpmli_kernels *k  = j->ctx->k;
    float               *ws = j->ctx->gemm_ws + (int64_t)thread * HPMLI_GEMM_WS;
    int64_t across = (j->d.n + j->cols - 1) / j->cols, row = task / across * j->rows, col = task % across * j->cols;
    int64_t k0 = 0;
    do {
        hpmli_gemm_desc d = j->d;
        d.m = hpmli_min(d.m - row, j->rows);
        d.n = hpmli_min(d.n - col, j->cols);
        d.k = hpmli_min(d.k - k0, j->depth);
        d.a = hpmli_mixed_block(k, j->type[0], d.a, row, k0, d.m, d.k, &d.a_row, &d.a_k, ws + HPMLI_MIXED_A);
        d.b = hpmli_mixed_block(k, j->type[1], d.b, k0, col, d.k, d.n, &d.b_k, &d.b_col, ws + HPMLI_MIXED_B);
        d.c += row * d.ldc + col;
        if (k0 > 0) d.beta = 1;
        hpmli_gemm_serial(j->ctx, thread, &d);
        k0 += j->depth;
    } while (k0 < j->d.k);
}

/* Runs a task for each tile of C. The tiles are large, because each converted number is then used for a whole row or
   column of a tile; but they are halved until there are at least 16 tiles or tiles are small. */
HPMLI_FN void hpmli_mixed_run(hpmli_mixed *j)
{
    const hpmli_gemm_desc *d = &j->d;
    bool    thin_m = d->m <= HPMLI_MIXED_THIN, thin_n = d->n <= HPMLI_MIXED_THIN, thin = thin_m || thin_n;
    bool    along_k = thin_m ? d->b_k == 1 : d->a_k == 1; /* k runs along memory in the operand that is not thin */
    int64_t across, down, side = HPMLI_MIXED_SIDE;
    if (thin) side = along_k ? 8 : 1024; /* the rows or columns that are converted are long either way */
    j->depth = !thin ? HPMLI_MIXED_DEPTH : HPMLI_MIXED_BLOCK / 4 / side;
    j->rows  = hpmli_min(d->m, side);
    j->cols  = hpmli_min(d->n, side);
    for (;;) {
        down   = (d->m + j->rows - 1) / j->rows;
        across = (d->n + j->cols - 1) / j->cols;
        if (thin || down * across >= 16 || hpmli_max(j->rows, j->cols) < 128) break;
        if (j->cols >= j->rows) j->cols = (j->cols + 63) / 64 * 32;
        else j->rows = (j->rows + 1) / 2;
    }
    hpmli_parallel(j->ctx, down * across, hpmli_mixed_task, j);
}

HPML_API hpml_status hpml_gemm(hpml_ctx *ctx, bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k, float alpha,
                               hpml_dtype type_a, const void *a, int64_t lda, hpml_dtype type_b, const void *b,
                               int64_t ldb, float beta, float *c, int64_t ldc)
{
    hpmli_mixed j;
    bool        all_f32 = type_a == HPML_DTYPE_F32 && type_b == HPML_DTYPE_F32;
    if (hpmli_failed(ctx)) return hpml_ctx_status(ctx);
    if (m < 0 || n < 0 || k < 0 || lda < (trans_a ? m : k) || ldb < (trans_b ? k : n) || ldc < n ||
        (m > 0 && n > 0 && (!c || (k > 0 && alpha != 0 && (!a || !b)))))
        return hpmli_fail(ctx, HPML_ERR_ARGUMENT, "%sgemm: m %lld n %lld k %lld lda %lld ldb %lld ldc %lld: sizes must "
                          "not be negative, a leading dimension not smaller than a stored row, and no array NULL",
                          all_f32 ? "s" : "", (long long)m, (long long)n, (long long)k, (long long)lda, (long long)ldb,
                          (long long)ldc);
    if ((unsigned)type_a > HPML_DTYPE_F16 || (unsigned)type_b > HPML_DTYPE_F16)
        return hpmli_fail(ctx, HPML_ERR_DTYPE, "gemm: A is %s and B is %s, expected f32, bf16 or f16",
                          hpml_dtype_name(type_a), hpml_dtype_name(type_b));
    if (m == 0 || n == 0) return HPML_OK;
    hpmli_mat A = { (float *)(uintptr_t)a, m, k, lda, 1, 0, trans_a };
    hpmli_mat B = { (float *)(uintptr_t)b, k, n, ldb, 1, 0, trans_b };
    j.ctx     = ctx;
    j.d       = hpmli_gemm_of(A, B, hpmli_matrix(c, m, n, ldc), false);
    j.d.k     = alpha == 0 ? 0 : k;
    j.d.alpha = alpha;
    j.d.beta  = beta;
    j.type[0] = type_a;
    j.type[1] = type_b;
    if (all_f32 || j.d.k == 0) hpmli_gemm(ctx, &j.d);
    else hpmli_mixed_run(&j);
    return HPML_OK;
}
HPML_API hpml_status hpml_sgemm(hpml_ctx *ctx, bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k, float alpha,
                                const float *a, int64_t lda, const float *b, int64_t ldb, float beta, float *c,
                                int64_t ldc)
{
    return hpml_gemm(ctx, trans_a, trans_b, m, n, k, alpha, HPML_DTYPE_F32, a, lda, HPML_DTYPE_F32, b, ldb, beta, c,
                     ldc);
}

/* Returns n numbers of x, `inc` elements apart, as a contiguous array: x itself if inc is 1, else a copy in `space`. */
HPMLI_FN const float *hpmli_unit_stride(float *space, const float *x, int64_t inc, int64_t n)
{
    if (inc == 1) return x;
    for (int64_t i = 0; i < n; i++) space[i] = x[i * inc];
    return space;
}

/* Matrix times vector is a product with one column; transposed matrix times vector, with a contiguous y, a product with
   one row, which reads A row by row. Neither packs operands: the packing space can hold copies of strided vectors. */
#define HPMLI_VECTOR (HPMLI_GEMM_PACKED_A / 2) /* elements of such a copy, at most; longer vectors are not copied */
HPML_API hpml_status hpml_sgemv(hpml_ctx *ctx, bool trans_a, int64_t m, int64_t n, float alpha, const float *a,
                                int64_t lda, const float *x, int64_t inc_x, float beta, float *y, int64_t inc_y)
{
    int64_t rows = trans_a ? n : m; /* elements of y */
    int64_t k    = trans_a ? m : n; /* elements of x */
    float  *to   = y;
    if (hpmli_failed(ctx)) return hpml_ctx_status(ctx);
    if (m < 0 || n < 0 || lda < n || inc_x < 1 || inc_y < 1 ||
        (rows > 0 && (!y || (k > 0 && alpha != 0 && (!a || !x)))))
        return hpmli_fail(ctx, HPML_ERR_ARGUMENT, "sgemv: m %lld n %lld lda %lld inc_x %lld inc_y %lld: sizes must not "
                          "be negative, lda not smaller than n, increments 1 or more, and no array NULL", (long long)m,
                          (long long)n, (long long)lda, (long long)inc_x, (long long)inc_y);
    if (inc_x > 1 && !trans_a && alpha != 0 && k <= HPMLI_VECTOR) {
        x     = hpmli_unit_stride(ctx->gemm_ws, x, inc_x, k);
        inc_x = 1;
    }
    if (inc_y > 1 && trans_a && rows > 1 && rows <= HPMLI_VECTOR) {
        to = ctx->gemm_ws + HPMLI_VECTOR;
        if (beta != 0) hpmli_unit_stride(to, y, inc_y, rows);
    }
    hpmli_mat A = { (float *)(uintptr_t)a, rows, k, lda, 1, 0, trans_a };
    hpmli_mat X = { (float *)(uintptr_t)x, k, 1, inc_x, 1, 0, false }, Y = hpmli_matrix(to, rows, 1, inc_y);
    if (trans_a && inc_x == 1) X = hpmli_transposed(hpmli_matrix(X.p, 1, k, k));
    if (to != y) Y.ld = 1;
    if (trans_a && Y.ld == 1) Y = hpmli_transposed(hpmli_matrix(to, 1, rows, rows));
    hpmli_gemm_desc d = hpmli_gemm_of(A, X, Y, false);
    d.alpha = alpha;
    d.beta  = beta;
    hpmli_gemm(ctx, &d);
    for (int64_t i = 0; i < rows && to != y; i++) y[i * inc_y] = to[i];
    return HPML_OK;
}

/* Vectors of saxpy, sscal or isamax, cut into tasks; parts that are strided are copied to a contiguous array. */
typedef struct hpmli_vectors {
    const hpmli_kernels *k;
    int64_t              n, inc_x, inc_y, pieces;
    float                alpha;
    const float         *x;
    float               *y;
    float                most[HPMLI_SUM_TASKS];  /* isamax: the largest magnitude in each task's part, or NaN */
    int64_t              first[HPMLI_SUM_TASKS]; /* isamax: index of the part's first element of that magnitude */
} hpmli_vectors;

/* Computes HPMLI_GRAIN elements (one task) of y = alpha x + y, or of y = alpha y if v->x is NULL. */
HPMLI_FN void hpmli_axpy_task(void *arg, int64_t task, int thread HPMLI_UNUSED)
{
    const hpmli_vectors *v = (const hpmli_vectors *)arg;
    int64_t              first = task * HPMLI_GRAIN, count = hpmli_min(v->n - first, HPMLI_GRAIN);
    float                px[HPMLI_PIECE], py[HPMLI_PIECE];
    HPMLI_PIECES(i, c, count) {
        float       *y  = v->y + (first + i) * v->inc_y;
        float       *to = v->inc_y == 1 ? y : py;
        const float *x  = v->x ? hpmli_unit_stride(px, v->x + (first + i) * v->inc_x, v->inc_x, c) : to;
        hpmli_unit_stride(py, y, v->inc_y, c);
        if (!v->x && v->alpha == 0) v->k->vfill(to, 0, c);
        else v->k->vaxpby(to, v->alpha, x, v->x ? 1.0f : 0.0f, c);
        for (int64_t e = 0; e < c && to == py; e++) y[e * v->inc_y] = py[e];
    }
}

HPMLI_FN hpml_status hpmli_axpy(hpml_ctx *ctx, const char *name, int64_t n, float alpha, const float *x, int64_t inc_x,
                                float *y, int64_t inc_y, bool reads_x)
{
    hpmli_vectors v;
    if (hpmli_failed(ctx)) return hpml_ctx_status(ctx);
    if (n < 0 || inc_x < 1 || inc_y < 1 || (n > 0 && (!y || (reads_x && !x))))
        return hpmli_fail(ctx, HPML_ERR_ARGUMENT, "%s: n %lld, increments %lld and %lld: n must not be negative, "
                          "increments 1 or more, and no array NULL", name, (long long)n, (long long)inc_x,
                          (long long)inc_y);
    v.k     = ctx->k;
    v.n     = n;
    v.alpha = alpha;
    v.x     = x;
    v.inc_x = inc_x;
    v.y     = y;
    v.inc_y = inc_y;
    hpmli_parallel(ctx, (n + HPMLI_GRAIN - 1) / HPMLI_GRAIN, hpmli_axpy_task, &v);
    return HPML_OK;
}

HPML_API hpml_status hpml_saxpy(hpml_ctx *ctx, int64_t n, float alpha, const float *x, int64_t inc_x, float *y,
                                int64_t inc_y)
{
    if (alpha == 0) n = hpmli_min(n, 0); /* y does not change; only the arguments are checked */
    return hpmli_axpy(ctx, "saxpy", n, alpha, x, inc_x, y, inc_y, true);
}
HPML_API hpml_status hpml_sscal(hpml_ctx *ctx, int64_t n, float alpha, float *x, int64_t inc_x)
{
    return hpmli_axpy(ctx, "sscal", n, alpha, NULL, 1, x, inc_x, false);
}

HPMLI_FN void hpmli_isamax_task(void *arg, int64_t task, int thread HPMLI_UNUSED)
{
    hpmli_vectors *v   = (hpmli_vectors *)arg;
    int64_t        end = v->n * (task + 1) / v->pieces, best = v->n * task / v->pieces;
    float          most = -1, space[HPMLI_PIECE];
    for (int64_t i = best, c; i < end && most == most; i += c) { /* finds the part that holds the largest, or a NaN */
        c = hpmli_min(end - i, HPMLI_PIECE);
        float here = v->k->vamax(hpmli_unit_stride(space, v->x + i * v->inc_x, v->inc_x, c), c);
        if (here > most || here != here) {
            most = here;
            best = i;
        }
    }
    while (most == most ? fabsf(v->x[best * v->inc_x]) != most : v->x[best * v->inc_x] == v->x[best * v->inc_x]) best++;
    v->most[task]  = most;
    v->first[task] = best;
}

HPML_API int64_t hpml_isamax(hpml_ctx *ctx, int64_t n, const float *x, int64_t inc_x)
{
    hpmli_vectors v;
    int64_t       best = 0;
    if (hpmli_failed(ctx)) return -1;
    if (n < 0 || inc_x < 1 || (n > 0 && !x)) {
        hpmli_fail(ctx, HPML_ERR_ARGUMENT, "isamax: n %lld, increment %lld: n must not be negative, the increment 1 or "
                   "more, and x not NULL", (long long)n, (long long)inc_x);
        return -1;
    }
    if (n == 0) return -1;
    v.k      = ctx->k;
    v.n      = n;
    v.x      = x;
    v.inc_x  = inc_x;
    v.pieces = hpmli_min((n + HPMLI_GRAIN - 1) / HPMLI_GRAIN, HPMLI_SUM_TASKS);
    hpmli_parallel(ctx, v.pieces, hpmli_isamax_task, &v);
    for (int64_t i = 1; i < v.pieces && v.most[best] == v.most[best]; i++)
        if (!(v.most[i] <= v.most[best])) best = i;
    return v.first[best];
}

// ---------------------------------------------------------------------------------------------------------------------
// >>elementwise   add, sub, mul, div with broadcasting; scale; activations
// ---------------------------------------------------------------------------------------------------------------------
/* add, sub, mul and div, with numpy's broadcasting (hpmli_broadcast_iter). The gradient of a repeated operand is the
   sum over its repetitions. If a source with a batch has fewer dimensions than the result, its batch dimension is
   matched with a later dimension of the result, and a batch shorter than the recorded one cannot run. */
typedef struct hpmli_binary {
    const hpmli_kernels *k;
    hpml_node           *n;
    void (*op)(float *y, const float *a, const float *b, int64_t n); /* forward: y = a op b */
    hpmli_broadcast_iter           w;
    int64_t              chunks; /* chunks of HPMLI_GRAIN elements in a run */
    int                  side;   /* backward: the operand whose gradient is computed; -1: forward */
} hpmli_binary;

/* Returns n elements of operand s (0 or 1) for row number `run` of the result, from element `from` on: their address,
   or `piece` filled with the operand's one value if that is repeated over the row. */
HPMLI_FN const float *hpmli_operand(const hpmli_binary *b, int s, int64_t run, int64_t from, int64_t n, float *piece)
{
    const float *x = b->n->src[s]->data + hpmli_broadcast_offset(&b->w, s, run);
    if (b->w.stride[s][b->w.ndim - 1] != 0) return x + from;
    b->k->vfill(piece, x[0], n);
    return piece;
}

/* Sets d to what dy, the gradient of the result, adds to the gradient of operand b->side (0 or 1), for n elements. */
HPMLI_FN void hpmli_binary_derivative(const hpmli_binary *b, float *d, const float *dy, const float *x0,
                                      const float *x1, int64_t n)
{
    switch (b->n->op) {
    case HPML_OP_ADD: b->k->vscale_add(d, dy, 1, 0, n); break;
    case HPML_OP_SUB: b->k->vscale_add(d, dy, b->side ? -1.0f : 1.0f, 0, n); break;
    case HPML_OP_MUL: b->k->vmul(d, dy, b->side ? x0 : x1, n); break;
    default: /* a / b: da = dy / b, db = -dy a / b^2 */
        b->k->vdiv(d, dy, x1, n);
        if (!b->side) break;
        b->k->vmul(d, d, x0, n);
        b->k->vdiv(d, d, x1, n);
        b->k->vscale_add(d, d, -1, 0, n);
    }
}

/* Computes one task's elements of the result, or, if b->side >= 0, what they add to the gradient of operand b->side. */
HPMLI_FN void hpmli_binary_task(void *arg, int64_t task, int thread HPMLI_UNUSED)
{
    const hpmli_binary *b   = (const hpmli_binary *)arg;
    int64_t             run = task / b->chunks, from = task % b->chunks * HPMLI_GRAIN;
    int64_t             end = b->w.run - from < HPMLI_GRAIN ? b->w.run : from + HPMLI_GRAIN, c;
    float               pa[HPMLI_PIECE], pb[HPMLI_PIECE], d[HPMLI_PIECE];
    for (int64_t i = from; i < end; i += c) {
        c = end - i < HPMLI_PIECE ? end - i : HPMLI_PIECE;
        const float *x0 = hpmli_operand(b, 0, run, i, c, pa);
        const float *x1 = hpmli_operand(b, 1, run, i, c, pb);
        if (b->side < 0) {
            b->op(b->n->out->data + run * b->w.run + i, x0, x1, c);
            continue;
        }
        float *dx = b->n->src[b->side]->grad + hpmli_broadcast_offset(&b->w, b->side, run);
        hpmli_binary_derivative(b, d, b->n->out->grad + run * b->w.run + i, x0, x1, c);
        if (b->w.stride[b->side][b->w.ndim - 1] != 0) b->k->vadd(dx + i, dx + i, d, c);
        else dx[0] += b->k->vsum(d, c); /* the operand is one value, repeated over the run */
    }
}

/* Computes the result of n (side -1) or the gradient of operand 0 or 1 (that side), for sides first .. end - 1. The
   gradient of a repeated operand is summed by one thread, in order; other arrays are computed by all threads. */
HPMLI_FN void hpmli_binary_run(const hpml_run *run, hpml_node *n, int first, int end)
{
    hpmli_binary b = HPMLI_ZEROED;
    b.k = run->ctx->k;
    b.n = n;
    switch (n->op) {
    case HPML_OP_ADD: b.op = b.k->vadd; break;
    case HPML_OP_SUB: b.op = b.k->vsub; break;
    case HPML_OP_MUL: b.op = b.k->vmul; break;
    default: b.op = b.k->vdiv;
    }
    hpmli_broadcast_make(&b.w, n->out, n->src[0], n->src[1]);
    b.chunks = (b.w.run + HPMLI_GRAIN - 1) / HPMLI_GRAIN;
    for (b.side = first; b.side < end; b.side++) {
        hpml_tensor *s     = b.side < 0 ? n->out : n->src[b.side];
        int64_t      tasks = b.w.runs * b.chunks;
        if (b.side >= 0 && !s->grad) continue;
        if (b.side == 1 && s == n->src[0]) n->accumulate[1] = true; /* x + x: both operands are one tensor */
        if (b.side >= 0 && !n->accumulate[b.side]) b.k->vfill(s->grad, 0, hpml_tensor_count(s));
        if (hpml_tensor_count(s) == hpml_tensor_count(n->out)) hpmli_parallel(run->ctx, tasks, hpmli_binary_task, &b);
        else
            for (int64_t i = 0; i < tasks; i++) hpmli_binary_task(&b, i, 0);
    }
}

HPMLI_FN hpml_tensor *hpmli_binary_record(hpml_op op, hpml_tensor *a, hpml_tensor *b)
{
    int64_t      shape[HPML_MAX_DIMS];
    hpml_tensor *src[2] = { a, b };
    int8_t       split[HPML_MAX_DIMS];
    int32_t      sections;
    if (!hpmli_recordable(2, src)) return NULL;
    int ndim = a->ndim > b->ndim ? a->ndim : b->ndim;
    if (!hpmli_split_pair(hpml_op_name(op), src, ndim, split, &sections) || !hpmli_recordable(2, src)) return NULL;
    for (int i = 0; i < ndim; i++) {
        int64_t da = i < ndim - a->ndim ? 1 : a->shape[i - (ndim - a->ndim)];
        int64_t db = i < ndim - b->ndim ? 1 : b->shape[i - (ndim - b->ndim)];
        if (da != db && da != 1 && db != 1)
            return hpmli_null(a->ctx, HPML_ERR_SHAPE, "%s: %s and %s do not fit: dimensions must be equal or 1",
                              hpml_op_name(op), hpmli_describe(a), hpmli_describe(b));
        shape[i] = da > db ? da : db;
    }
    hpml_node *n = hpmli_node_create(op, NULL, 2, src, ndim, shape);
    n->mixes_batch |= (a->batch_rows && a->ndim < ndim) || (b->batch_rows && b->ndim < ndim);
    hpmli_split_take(n->out, split, sections);
    return n->out;
}
HPML_API hpml_tensor *hpml_add(hpml_tensor *a, hpml_tensor *b) { return hpmli_binary_record(HPML_OP_ADD, a, b); }
HPML_API hpml_tensor *hpml_sub(hpml_tensor *a, hpml_tensor *b) { return hpmli_binary_record(HPML_OP_SUB, a, b); }
HPML_API hpml_tensor *hpml_mul(hpml_tensor *a, hpml_tensor *b) { return hpmli_binary_record(HPML_OP_MUL, a, b); }
HPML_API hpml_tensor *hpml_div(hpml_tensor *a, hpml_tensor *b) { return hpmli_binary_record(HPML_OP_DIV, a, b); }

#define HPMLI_BINARY_OP(name, needs)                                                                                   \
    HPMLI_OP(name, HPMLI_OP_PAIRS_ROWS | HPMLI_OP_SPLIT_OWN, needs, hpmli_flops_pointwise(n, back),                    \
             hpmli_binary_run(run, n, -1, 0), hpmli_binary_run(run, n, 0, 2))
HPMLI_BINARY_OP(add, 0);
HPMLI_BINARY_OP(sub, 0);
HPMLI_BINARY_OP(mul, HPMLI_NEED_BOTH);
HPMLI_BINARY_OP(div, HPMLI_NEED_BOTH);

/* Returns the number of chunks of HPMLI_GRAIN elements in the result of n: the tasks of an elementwise op. */
HPMLI_FN int64_t hpmli_chunk_count(const hpml_node *n)
{
    return (hpml_tensor_count(n->out) + HPMLI_GRAIN - 1) / HPMLI_GRAIN;
}

HPML_API hpml_tensor *hpml_scale(hpml_tensor *x, float a, float b)
{
    if (!hpmli_recordable(1, &x)) return NULL;
    hpml_node *n = hpmli_node_create(HPML_OP_SCALE, NULL, 1, &x, x->ndim, x->shape);
    n->attr.scale.a = a;
    n->attr.scale.b = b;
    return n->out;
}

/* Computes HPMLI_GRAIN elements of y = a x + b or, if w->back, of dx = a dy (dx += a dy if n->accumulate[0]). */
HPMLI_FN void hpmli_scale_chunk(const hpmli_work *w, int64_t chunk, int thread HPMLI_UNUSED)
{
    const hpml_tensor *x = w->n->src[0], *y = w->n->out;
    int64_t            at = chunk * HPMLI_GRAIN, c = hpmli_min(hpml_tensor_count(y) - at, HPMLI_GRAIN);
    float              a = w->n->attr.scale.a;
    if (!w->back) w->k->vscale_add(y->data + at, x->data + at, a, w->n->attr.scale.b, c);
    else if (w->n->accumulate[0]) w->k->vaxpby(x->grad + at, a, y->grad + at, 1, c);
    else w->k->vscale_add(x->grad + at, y->grad + at, a, 0, c);
}
HPMLI_WORK_OP(scale, HPMLI_OP_SPLIT_ANY, HPMLI_INPLACE, hpmli_flops_pointwise(n, back), hpmli_chunk_count(n), 1,
              scale_chunk,
              scale_chunk);

/* Returns true if the derivative of act is computed from its argument; false if it is computed from its result. */
HPMLI_FN bool hpmli_act_reads_x(hpml_act act)
{
    return act == HPML_ACT_GELU || act == HPML_ACT_GELU_ERF || act == HPML_ACT_SILU || act == HPML_ACT_LOG ||
           act == HPML_ACT_SQUARE || act == HPML_ACT_ABS;
}

HPML_API hpml_tensor *hpml_activation(hpml_tensor *x, hpml_act act, float slope)
{
    if (!hpmli_recordable(1, &x)) return NULL;
    if ((int)act <= HPML_ACT_NONE || (int)act >= HPML_ACT_COUNT)
        return hpmli_null(x->ctx, HPML_ERR_ARGUMENT, "activation of \"%s\": no function %d", x->name, (int)act);
    hpml_node *n = hpmli_node_create(HPML_OP_ACTIVATION, NULL, 1, &x, x->ndim, x->shape);
    n->attr.act.act   = act;
    n->attr.act.slope = slope == 0 ? 0.01f : slope;
    return n->out;
}
HPML_API hpml_tensor *hpml_relu(hpml_tensor *x) { return hpml_activation(x, HPML_ACT_RELU, 0); }
HPML_API hpml_tensor *hpml_leaky_relu(hpml_tensor *x, float s) { return hpml_activation(x, HPML_ACT_LEAKY_RELU, s); }
HPML_API hpml_tensor *hpml_gelu(hpml_tensor *x) { return hpml_activation(x, HPML_ACT_GELU, 0); }
HPML_API hpml_tensor *hpml_gelu_erf(hpml_tensor *x) { return hpml_activation(x, HPML_ACT_GELU_ERF, 0); }
HPML_API hpml_tensor *hpml_silu(hpml_tensor *x) { return hpml_activation(x, HPML_ACT_SILU, 0); }
HPML_API hpml_tensor *hpml_sigmoid(hpml_tensor *x) { return hpml_activation(x, HPML_ACT_SIGMOID, 0); }
HPML_API hpml_tensor *hpml_tanh(hpml_tensor *x) { return hpml_activation(x, HPML_ACT_TANH, 0); }

/* Computes one chunk of y = act(z); backward dz = dy act'(z), or dz += dy act'(z). In an activation op z is the source;
   in the activation that ends a linear or conv2d op, z is saved or in the memory of y, and dz overwrites dy, which no
   other op reads. */
HPMLI_FN void hpmli_act_chunk(const hpmli_work *w, int64_t chunk, int thread HPMLI_UNUSED)
{
    const hpml_node *n    = w->n;
    bool             conv = n->op == HPML_OP_CONV2D, alone = n->op == HPML_OP_ACTIVATION;
    hpml_act         act  = conv ? n->attr.conv.act : n->attr.act.act;
    float            slope = conv ? 0.01f : n->attr.act.slope, *y = n->out->data, *dy = n->out->grad;
    const float     *z  = n->saved ? (const float *)n->saved : y;
    float           *dz = alone ? n->src[0]->grad : dy;
    if (alone) z = n->src[0]->data;
    int64_t          at = chunk * HPMLI_GRAIN, c = hpmli_min(hpml_tensor_count(n->out) - at, HPMLI_GRAIN);
    if (!w->back) w->k->act_forward(act, slope, y + at, z + at, c);
    else w->k->act_backward(act, slope, dz + at, dy + at, z + at, y + at, c, alone && n->accumulate[0]);
}
HPMLI_WORK_OP(activation, HPMLI_OP_SPLIT_ANY,
              hpmli_act_reads_x(n->attr.act.act) ? HPMLI_NEED_SRC(0) : HPMLI_NEED_OUT | HPMLI_INPLACE,
              hpmli_flops_pointwise(n, back), hpmli_chunk_count(n), 1, act_chunk, act_chunk);

// ---------------------------------------------------------------------------------------------------------------------
// >>matmul   matrix products and linear layers
// ---------------------------------------------------------------------------------------------------------------------
/* Returns the values of t, or if `grad` its gradient, as one matrix whose rows run along the last dimension. */
HPMLI_FN hpmli_mat hpmli_mat_of(const hpml_tensor *t, bool grad)
{
    int64_t cols = t->shape[t->ndim - 1];
    return hpmli_matrix(grad ? t->grad : t->data, hpml_tensor_count(t) / cols, cols, cols);
}
HPMLI_FN hpmli_mat hpmli_values(const hpml_tensor *t) { return hpmli_mat_of(t, false); }
HPMLI_FN hpmli_mat hpmli_grads(const hpml_tensor *t) { return hpmli_mat_of(t, true); }

/* Returns the `rows` x `cols` elements at (row, col) of m, which is not transposed, as a matrix in its memory. */
HPMLI_FN hpmli_mat hpmli_mat_at(hpmli_mat m, int64_t row, int64_t rows, int64_t col, int64_t cols)
{
    return hpmli_matrix(m.p + row * m.ld + col, rows, cols, m.ld);
}

HPML_API hpml_tensor *hpml_matmul(hpml_tensor *a, hpml_tensor *b, bool trans_a, bool trans_b)
{
    int64_t      shape[HPML_MAX_DIMS];
    hpml_tensor *src[2] = { a, b };
    int8_t       split[HPML_MAX_DIMS];
    int32_t      sections = 0;
    hpml_axis    sum      = HPML_AXIS_DATA;
    if (!hpmli_recordable(2, src)) return NULL;
    bool fits = a->ndim >= 2 && (b->ndim == 2 || b->ndim == a->ndim);
    const int m_k[2] = { a->ndim - (trans_a ? 1 : 2), a->ndim - (trans_a ? 2 : 1) }; /* dimensions m and k of a */
    const int k_n[2] = { b->ndim - (trans_b ? 1 : 2), b->ndim - (trans_b ? 2 : 1) }; /* dimensions k and n of b */
    if (fits && (!hpmli_split_matmul(src, m_k, k_n, split, &sections, &sum) || !hpmli_recordable(2, src))) return NULL;
    for (int i = 0; i < a->ndim - 2; i++) {
        shape[i] = a->shape[i];
        fits     = fits && (b->ndim == 2 || b->shape[i] == a->shape[i]);
    }
    if (!fits || a->shape[m_k[1]] != b->shape[k_n[0]])
        return hpmli_null(a->ctx, HPML_ERR_SHAPE, "matmul: %s%s and %s%s do not fit: expected (.., m, k) and (.., k, "
                          "n) with the same leading dimensions, or (k, n)", hpmli_describe(a),
                          trans_a ? " transposed" : "", hpmli_describe(b), trans_b ? " transposed" : "");
    shape[a->ndim - 2] = a->shape[m_k[0]];
    shape[a->ndim - 1] = b->shape[k_n[1]];
    hpml_node *n = hpmli_node_create(HPML_OP_MATMUL, NULL, 2, src, a->ndim, shape);
    n->attr.matmul.trans_a = trans_a;
    n->attr.matmul.trans_b = trans_b;
    if (b->ndim == 2) { /* rows of A are rows of C; a batch that the product sums over is just a shorter sum */
        bool contracts = a->ndim == 2 && trans_a;
        hpmli_node_batch(n, contracts ? 0 : a->batch_rows);
        n->mixes_batch = b->batch_rows ? trans_b || !contracts || !a->batch_rows : contracts && a->batch_rows;
    }
    if (!n->out) return NULL;
    hpmli_split_take(n->out, split, sections);
    return sum == HPML_AXIS_DATA ? n->out : hpml_group_sum(n->out, sum);
}

/* Sets m to the matrices a, b and c of the matmul n: values, or gradients if `grad`. If all matrices a of a batch are
   multiplied by one b, and a is not transposed, they are one tall matrix, and so are the matrices c. */
HPMLI_FN void hpmli_matmul_of(const hpml_node *n, bool grad, hpmli_mat m[3])
{
    const hpml_tensor *t[3]     = { n->src[0], n->src[1], n->out };
    const bool         trans[3] = { n->attr.matmul.trans_a, n->attr.matmul.trans_b, false };
    const bool         shared   = t[1]->ndim == 2;
    const int64_t     *end      = t[2]->shape + t[2]->ndim, batch = hpml_tensor_count(t[2]) / (end[-1] * end[-2]);
    for (int i = 0; i < 3; i++) {
        m[i]      = hpmli_mat_of(t[i], grad);
        m[i].rows = t[i]->shape[t[i]->ndim - 2];
        if (!shared || (i != 1 && trans[0])) {
            m[i].count = batch;
            m[i].apart = m[i].rows * m[i].cols;
        } else if (i != 1) m[i].rows *= batch;
        if (trans[i]) m[i] = hpmli_transposed(m[i]);
    }
}

HPMLI_FN void hpmli_matmul_pass(const hpml_run *run, hpml_node *n)
{
    hpmli_mat v[3];
    hpmli_matmul_of(n, false, v);
    hpmli_product(run->ctx, v[0], v[1], v[2], false);
}

HPMLI_FN void hpmli_matmul_back(const hpml_run *run, hpml_node *n)
{
    hpmli_mat v[3], d[3];
    hpmli_matmul_of(n, false, v);
    hpmli_matmul_of(n, true, d);
    if (d[0].p) hpmli_product(run->ctx, d[2], hpmli_transposed(v[1]), d[0], n->accumulate[0]);
    for (int64_t i = 0; d[1].p && i < d[2].count / d[1].count; i++) { /* the gradient of a shared b: a sum, in order */
        hpmli_product(run->ctx, hpmli_transposed(v[0]), d[2], d[1], n->accumulate[1] || i > 0);
        v[0].p += v[0].apart;
        d[2].p += d[2].apart;
    }
}
HPMLI_OP(matmul, HPMLI_OP_PRODUCT | HPMLI_OP_KEEPS_DZ | HPMLI_OP_PAIRS_ROWS | HPMLI_OP_SPLIT_OWN, HPMLI_NEED_BOTH,
         hpmli_flops_product(n, back, n->src[0]->shape[n->src[0]->ndim - (n->attr.matmul.trans_a ? 2 : 1)]),
         hpmli_matmul_pass(run, n), hpmli_matmul_back(run, n));

/* Prepares the source *x of a layer split by outputs (OUT) or by inputs (IN); dimension dim of *x has the inputs. Sets
   *split to NONE if the axis TENSOR has one rank, checks how *x is split, and records hpml_group_copy of *x for OUT.
   False: an error. */
HPMLI_FN bool hpmli_layer_split(const char *op, const char *name, hpml_tensor **x, int dim, hpml_split *split,
                                int32_t sections)
{
    const hpml_tensor *t = *x;
    if ((int)*split < 0 || *split > HPML_SPLIT_IN || sections < 0 || (sections > 1 && *split != HPML_SPLIT_OUT))
        return hpmli_false(t->ctx, HPML_ERR_ARGUMENT, "%s \"%s\": .split %d with %d sections; expected HPML_SPLIT_OUT, "
                           "or HPML_SPLIT_IN or NONE without sections", op, name ? name : "", (int)*split, sections);
    if (hpml_ctx_group(t->ctx, HPML_AXIS_TENSOR)->size == 1) *split = HPML_SPLIT_NONE;
    if (*split == HPML_SPLIT_IN && t->split[dim] != HPML_AXIS_TENSOR)
        return hpmli_false(t->ctx, HPML_ERR_SHAPE, "%s \"%s\": .split is HPML_SPLIT_IN, and its input %s is %s; split "
                           "the layer before by HPML_SPLIT_OUT, or record hpml_group_split(x, HPML_AXIS_TENSOR, %d)",
                           op, name ? name : "", hpmli_describe(t), hpmli_split_text(t), dim);
    if (*split != HPML_SPLIT_IN && t->split[dim])
        return hpmli_false(t->ctx, HPML_ERR_SHAPE, "%s \"%s\": its input %s is %s; set .split = HPML_SPLIT_IN, or "
                           "record hpml_group_gather(x, axis, %d)", op, name ? name : "", hpmli_describe(t),
                           hpmli_split_text(t), dim);
    for (int i = 0; i < t->ndim; i++)
        if (i != dim && t->split[i] == HPML_AXIS_TENSOR)
            return hpmli_split_refuse(op, t, i, "each rank would have a part of the weight's gradient");
    if (*split == HPML_SPLIT_OUT) *x = hpml_group_copy(*x, HPML_AXIS_TENSOR);
    return *x != NULL;
}

/* Records the end of a layer whose inputs are split over ranks: act(s + bias), where s is the sum of the tensors y of
   all ranks of the TENSOR axis; bias may be NULL. */
HPMLI_FN hpml_tensor *hpmli_layer_sum(hpml_tensor *y, hpml_tensor *bias, hpml_act act)
{
    if (!y) return NULL;
    hpml_ctx *ctx = y->ctx;
    y = hpml_group_sum(y, HPML_AXIS_TENSOR);
    if (bias && y) {
        y = hpml_add(y, bias);
        ctx->group_nodes++;
    }
    if (act == HPML_ACT_NONE || !y) return y;
    ctx->group_nodes++;
    return hpml_activation(y, act, 0);
}

/* True if w, a parameter that several layers use, has the shape `whole` and is split as `part` says; else an error. */
HPMLI_FN bool hpmli_shared_fits(const char *op, const char *name, const hpml_tensor *w, const int64_t *whole,
                                const hpmli_part *part)
{
    int64_t shape[HPML_MAX_DIMS];
    hpml_param_whole(w, shape);
    hpml_axis axis = w->param ? w->param->axis : HPML_AXIS_DATA;
    bool      fits = axis == part->axis && w->ndim == 2 && shape[0] == whole[0] && shape[1] == whole[1];
    if (fits && axis != HPML_AXIS_DATA)
        fits = w->param->split_dim == part->dim && w->param->sections == hpmli_max(part->sections, 1);
    if (fits) return true;
    const bool  split = axis != HPML_AXIS_DATA || part->axis != HPML_AXIS_DATA;
    const char *want  = "";
    if (part->axis != HPML_AXIS_DATA) want = part->dim ? " split along dimension 1" : " split along dimension 0";
    return hpmli_false(w->ctx, HPML_ERR_SHAPE, "%s \"%s\": the shared weight is %s%s%s, expected %s%s", op, name,
                       hpmli_describe(w), split ? ", " : "", split ? hpmli_split_text(w) : "",
                       hpmli_shape_text(w->ctx, 2, whole), want);
}

/* Records y = act(x w^T + bias), with w (out, columns of x). Sources of the node: x, w, bias (NULL without). */
HPML_API hpml_tensor *hpml_linear(hpml_tensor *x, int64_t out, const hpml_linear_desc *desc)
{
    hpml_linear_desc d;
    int64_t          shape[HPML_MAX_DIMS], weight[2];
    hpml_tensor     *src[3];
    if (!hpmli_recordable(1, &x) || !HPMLI_COPY_DESC(x->ctx, "linear", d, desc)) return NULL;
    if (x->ndim < 2 || out < 1 || (int)d.activation < 0 || d.activation >= HPML_ACT_COUNT)
        return hpmli_null(x->ctx, HPML_ERR_SHAPE, "linear \"%s\": input is %s, expected (.., in); %lld outputs, "
                          "expected 1 or more; activation %d", d.name ? d.name : "", hpmli_describe(x), (long long)out,
                          (int)d.activation);
    const int   last = x->ndim - 1;
    const char *name = hpmli_layer_name(x->ctx, d.name, "linear");
    if (!hpmli_layer_split("linear", name, &x, last, &d.split, d.sections)) return NULL;
    const bool       in   = d.split == HPML_SPLIT_IN;
    const hpml_axis  axis = d.split ? HPML_AXIS_TENSOR : HPML_AXIS_DATA;
    const hpmli_part rows = { axis, in, in ? x->sections : d.sections };
    const hpmli_part bias = { in ? HPML_AXIS_DATA : rows.axis, 0, rows.sections };
    hpml_param_whole(x, shape);
    weight[0] = out, weight[1] = shape[last];
    src[0]    = x;
    src[1]    = d.weight ? d.weight : hpmli_layer_part(x->ctx, name, "weight", d.init, d.init_scale, 2, weight, &rows);
    src[2]    = d.no_bias ? NULL : hpmli_layer_part(x->ctx, name, "bias", HPML_INIT_ZEROS, 0, 1, &out, &bias);
    if (!hpmli_recordable(2, src) || (!d.no_bias && !src[2])) return NULL;
    if (d.weight && !hpmli_shared_fits("linear", name, src[1], weight, &rows)) return NULL;
    memcpy(shape, x->shape, sizeof shape);
    shape[last] = src[1]->shape[0];
    hpml_tensor *after = in ? src[2] : NULL; /* the bias, if it is added after the ranks' sum */
    hpml_act     act   = in ? HPML_ACT_NONE : d.activation;
    if (in) src[2] = NULL;
    hpml_node *n = hpmli_node_create(HPML_OP_LINEAR, name, 3, src, x->ndim, shape);
    n->attr.act.act   = act;
    n->attr.act.slope = 0.01f;
    if (n->out && hpmli_act_reads_x(act)) n->saved_bytes = hpmli_tensor_bytes(n->out); /* saves x w^T + bias */
    hpmli_split_take(n->out, x->split, x->sections);
    if (n->out) n->out->split[last] = (int8_t)bias.axis;
    if (n->out && bias.axis) n->out->sections = bias.sections;
    return in ? hpmli_layer_sum(n->out, after, d.activation) : n->out;
}

HPMLI_FN void hpmli_linear_pass(const hpml_run *run, hpml_node *n)
{
    const hpml_tensor *x = n->src[0], *w = n->src[1];
    hpml_act           act = n->attr.act.act;
    hpmli_mat          z   = hpmli_values(n->out); /* x w^T + bias, (rows, out) */
    if (n->saved) z.p = (float *)n->saved;
    hpmli_gemm_desc d = hpmli_gemm_of(hpmli_values(x), hpmli_transposed(hpmli_values(w)), z, false);
    d.bias_n = n->src[2] ? n->src[2]->data : NULL;
    d.act    = act == HPML_ACT_RELU;
    hpmli_gemm(run->ctx, &d);
    if (act != HPML_ACT_NONE && act != HPML_ACT_RELU)
        hpmli_for_each_parallel(run, n, false, hpmli_chunk_count(n), 1, hpmli_act_chunk);
}

/* Takes the optimizer step u. d: NULL, or the product that makes the gradient: each task then computes some rows of the
   gradient and steps the same rows of the parameter, see >>optimizers. */
static void hpmli_optimizer_step(hpml_ctx *ctx, const hpml_update *u, const hpmli_gemm_desc *d);
static bool hpmli_optimizer_by_pieces(const hpml_update *u); /* true: the step needs no sum over the whole gradient */

/* Computes dz = dy act'(z), in the memory of dy; dbias = sums of the columns of dz; dx = dz w; and last dw = dz^T x:
   the optimizer's step of w may be fused with this product, and dx must be computed with w as it is before the step. */
HPMLI_FN void hpmli_linear_back(const hpml_run *run, hpml_node *n)
{
    hpml_tensor *x = n->src[0], *w = n->src[1], *bias = n->src[2];
    hpmli_mat    dz = hpmli_grads(n->out); /* dy, then dz: (rows, out) */
    if (n->attr.act.act != HPML_ACT_NONE && !hpmli_dz_is_done(n))
        hpmli_for_each_parallel(run, n, true, hpmli_chunk_count(n), 1, hpmli_act_chunk);
    if (bias && bias->grad) run->ctx->k->vsum_rows(bias->grad, dz.p, dz.rows, dz.cols, n->accumulate[2]);
    if (x->grad) hpmli_product(run->ctx, dz, hpmli_values(w), hpmli_grads(x), n->accumulate[0]);
    if (!w->grad) return;
    hpmli_gemm_desc d = hpmli_gemm_of(hpmli_transposed(dz), hpmli_values(x), hpmli_grads(w), n->accumulate[1]);
    /* The optimizer step is fused with the product dw = dz^T x only where dw is large: a small dw stays in the cache
       until its step, and its product may be cut along k or has too few blocks for all threads. A batch of more than
       256 rows would be packed again for each block of dw, and some optimizers need the norm of the whole gradient
       first. */
    bool         own = run->ctx->backend->update != hpml_backend_cpu()->update; /* the backend steps by itself */
    hpml_update *u = own || x == w ? NULL : n->state->update[1];
    bool         large = u && u->n >= 4 * HPMLI_GRAIN * run->ctx->threads && dz.rows <= 256;
    if (!large || !hpmli_optimizer_by_pieces(u) || HPMLI_BLAS) {
        hpmli_gemm(run->ctx, &d);
        return;
    }
    hpmli_optimizer_step(run->ctx, u, &d);
    u->n = 0;
}
HPMLI_OP(linear, HPMLI_OP_PRODUCT | HPMLI_OP_KEEPS_DZ | HPMLI_OP_KEEPS_SUM | HPMLI_OP_SPLIT_OWN,
         HPMLI_NEED_BOTH | (n->attr.act.act && !hpmli_act_reads_x(n->attr.act.act) ? HPMLI_NEED_OUT : 0),
         hpmli_flops_product(n, back, n->src[1]->shape[1]), hpmli_linear_pass(run, n), hpmli_linear_back(run, n));

// ---------------------------------------------------------------------------------------------------------------------
// >>shape   reshape, permute, slice, concat, sum
// ---------------------------------------------------------------------------------------------------------------------
/* A reshape of a result costs nothing: the planner gives it, and its gradient, the memory of its source. Permute, slice
   and concat copy between a tensor and a range of another one, or one with reordered dimensions, in runs of contiguous
   elements that are as long as the strides allow. */
HPML_API hpml_tensor *hpml_reshape(hpml_tensor *x, int ndim, const int64_t *shape)
{
    int64_t full[HPML_MAX_DIMS], part[HPML_MAX_DIMS];
    int8_t  split[HPML_MAX_DIMS];
    int32_t sections;
    if (!hpmli_recordable(1, &x)) return NULL;
    if (!hpmli_reshape_rule(hpml_param_whole(x, NULL), ndim, shape, full)) return hpmli_reshape_error(x, ndim, shape);
    if (!hpmli_split_reshape(x, ndim, full, part, split, &sections))
        return hpmli_null(x->ctx, HPML_ERR_SHAPE, "reshape to %s, sizes of the whole: %s is %s, and no dimension of "
                          "the result would be split alike; hpml_group_gather it first",
                          hpmli_shape_text(x->ctx, ndim, full), hpmli_describe(x), hpmli_split_text(x));
    hpml_node *n = hpmli_node_create(HPML_OP_RESHAPE, NULL, 1, &x, ndim, part);
    if (x->batch_rows) { /* there is a batch dimension if the new number of rows is a multiple of the samples */
        int64_t batch = x->shape[0] / x->batch_rows;
        hpmli_node_batch(n, ndim > 0 && part[0] % batch == 0 ? part[0] / batch : 0);
    }
    hpmli_split_take(n->out, split, sections);
    return n->out;
}
HPML_API hpml_tensor *hpml_reshape_2d(hpml_tensor *x, int64_t d0, int64_t d1)
{
    const int64_t shape[2] = { d0, d1 };
    return hpml_reshape(x, 2, shape);
}
HPML_API hpml_tensor *hpml_reshape_3d(hpml_tensor *x, int64_t d0, int64_t d1, int64_t d2)
{
    const int64_t shape[3] = { d0, d1, d2 };
    return hpml_reshape(x, 3, shape);
}
HPML_API hpml_tensor *hpml_reshape_4d(hpml_tensor *x, int64_t d0, int64_t d1, int64_t d2, int64_t d3)
{
    const int64_t shape[4] = { d0, d1, d2, d3 };
    return hpml_reshape(x, 4, shape);
}
HPML_API hpml_tensor *hpml_flatten(hpml_tensor *x)
{
    if (x && x->ndim == 4) x = hpml_to_layout(x, HPML_NCHW);
    return x ? hpml_reshape_2d(x, x->shape[0], -1) : NULL;
}

typedef struct hpmli_strided_copy {
    const hpmli_kernels *k;
    float               *to;
    const float         *from;
    hpmli_broadcast_iter           w; /* the runs of `to` and `from` */
    int64_t              runs_per_task;
    bool                 add; /* backward: to += from */
} hpmli_strided_copy;
HPMLI_FN void hpmli_strided_copy_task(void *arg, int64_t task, int thread HPMLI_UNUSED)
{
    const hpmli_strided_copy *m = (const hpmli_strided_copy *)arg;
    const hpmli_broadcast_iter  *w = &m->w;
    const int64_t      n = w->run, a = w->stride[0][w->ndim - 1], b = w->stride[1][w->ndim - 1];
    int64_t            run = task * m->runs_per_task, left = run, at[HPML_MAX_DIMS];
    float             *to   = m->to + hpmli_broadcast_offset(w, 0, run);
    const float       *from = m->from + hpmli_broadcast_offset(w, 1, run);
    for (int i = w->ndim - 2; i >= 0; left /= w->shape[i--]) at[i] = left % w->shape[i];
    for (; run < (task + 1) * m->runs_per_task && run < w->runs; run++) {
        if (a == 1 && b == 1 && m->add) m->k->vadd(to, to, from, n);
        else if (a == 1 && b == 1) memcpy(to, from, (size_t)n * sizeof(float));
        else if (a == 1 && !m->add) for (int64_t i = 0; i < n; i++) to[i] = from[i * b];
        else for (int64_t i = 0; i < n; i++) to[i * a] = m->add ? to[i * a] + from[i * b] : from[i * b];
        for (int i = w->ndim - 2; i >= 0; i--) { /* to the start of the next run: increments the index, with carry */
            at[i]++;
            to += w->stride[0][i];
            from += w->stride[1][i];
            if (at[i] < w->shape[i]) break;
            at[i] = 0;
            to -= w->shape[i] * w->stride[0][i];
            from -= w->shape[i] * w->stride[1][i];
        }
    }
}

/* Copies values of x to y or, backward, the gradient of y to that of x (if `add`: adds it). x or y may be a range of a
   larger tensor or have reordered dimensions. Copies as many elements as y has with the current batch. */
HPMLI_FN void hpmli_strided_copy_run(const hpml_run *run, const hpml_tensor *y, const hpml_tensor *x, bool backward,
                                     bool add)
{
    hpmli_strided_copy m = { run->ctx->k, backward ? x->grad : y->data, backward ? y->grad : x->data, HPMLI_ZEROED, 0,
                      backward && add };
    if (!m.to || m.to == m.from) return;
    hpmli_broadcast_make(&m.w, y, backward ? x : y, backward ? y : x);
    m.runs_per_task = hpmli_rows_per_task(m.w.run);
    hpmli_parallel(run->ctx, (m.w.runs + m.runs_per_task - 1) / m.runs_per_task, hpmli_strided_copy_task, &m);
}

/* Sets *part to the range of t with the indices start .. start + count - 1 in dimension dim, in the memory of t. *part
   is not returned, because gcc 12 for Arm miscompiles the callers of a function that returns this struct. */
HPMLI_FN void hpmli_tensor_range(hpml_tensor *part, const hpml_tensor *t, int dim, int64_t start, int64_t count)
{
    *part = *t;
    part->shape[dim] = count;
    part->data += start * t->stride[dim];
    if (t->grad) part->grad += start * t->stride[dim];
}

HPMLI_FN void hpmli_reshape_back(const hpml_run *run, const hpml_node *n)
{
    hpml_tensor x = *n->out; /* becomes the source, in the shape of the result */
    x.grad = n->src[0]->grad;
    hpmli_strided_copy_run(run, n->out, &x, true, n->accumulate[0]);
}

/* Reshape copies a source that is an input or a parameter, of any dtype, because inputs and parameters own their
   memory; the result of another source stays in the source's memory. */
HPMLI_OP(reshape, HPMLI_OP_IS_ALIAS | HPMLI_OP_REORDERS | HPMLI_OP_SPLIT_OWN, 0, 0,
         if (n->out->raw != n->src[0]->raw) memcpy(n->out->raw, n->src[0]->raw, hpmli_tensor_bytes(n->out)),
         hpmli_reshape_back(run, n));

HPML_API hpml_tensor *hpml_permute(hpml_tensor *x, const int *dims)
{
    int64_t  shape[HPML_MAX_DIMS];
    unsigned seen = 0;
    if (!hpmli_recordable(1, &x)) return NULL;
    for (int i = 0; dims && i < x->ndim; i++) {
        if (dims[i] < 0 || dims[i] >= x->ndim) break;
        seen |= 1u << dims[i];
        shape[i] = x->shape[dims[i]];
    }
    if (seen == 0 || seen != (1u << x->ndim) - 1)
        return hpmli_null(x->ctx, HPML_ERR_SHAPE, "permute of %s: name each dimension once", hpmli_describe(x));
    hpml_node *n = hpmli_node_create(HPML_OP_PERMUTE, NULL, 1, &x, x->ndim, shape);
    for (int i = 0; i < x->ndim; i++) n->attr.permute.dims[i] = dims[i];
    hpmli_node_batch(n, dims[0] == 0 ? x->batch_rows : 0);
    for (int i = 0; i < x->ndim && n->out; i++) n->out->split[i] = x->split[dims[i]];
    if (n->out) n->out->sections = x->sections;
    return n->out;
}

HPMLI_FN bool hpmli_layout_check(hpml_tensor *x, hpml_layout layout)
{
    if (!hpmli_recordable(1, &x)) return false;
    return (x->ndim == 4 && (layout == HPML_NCHW || layout == HPML_NHWC)) ||
           hpmli_false(x->ctx, HPML_ERR_SHAPE, "layout %d of %s: expected HPML_NCHW or HPML_NHWC, and 4 dimensions",
                       (int)layout, hpmli_describe(x));
}

HPML_API hpml_tensor *hpml_to_layout(hpml_tensor *x, hpml_layout layout)
{
    static const int dims[2][4] = { { 0, 3, 1, 2 }, { 0, 2, 3, 1 } };
    if (!hpmli_layout_check(x, layout)) return NULL;
    if (x->layout == layout) return x;
    hpml_tensor *y = hpml_permute(x, dims[layout]);
    if (!y) return NULL;
    y->layout = layout;
    x->ctx->layout_permutes++;
    return y;
}

HPML_API hpml_status hpml_tensor_set_layout(hpml_tensor *x, hpml_layout layout)
{
    if (!hpmli_layout_check(x, layout)) return x ? x->ctx->status : HPML_ERR_ARGUMENT;
    if (x->state->used)
        return hpmli_fail(x->ctx, HPML_ERR_STATE, "layout of \"%s\": an op reads it already; set the layout earlier "
                          "or record hpml_to_layout", x->name);
    x->layout = layout;
    return HPML_OK;
}

/* Returns the number of channels (i 0), the height (i 1) or the width (i 2) of the images t, in either layout. */
HPMLI_FN int64_t hpmli_image(const hpml_tensor *t, int i)
{
    return t->shape[t->layout == HPML_NHWC ? (i + 2) % 3 + 1 : i + 1];
}

/* Sets `shape` (4 numbers) to that of images with the batch and layout of x and the given sizes. */
HPMLI_FN void hpmli_image_shape(const hpml_tensor *x, int64_t channels, int64_t height, int64_t width, int64_t *shape)
{
    bool nhwc = x->layout == HPML_NHWC;
    shape[0] = x->shape[0];
    shape[1] = nhwc ? height : channels;
    shape[2] = nhwc ? width : height;
    shape[3] = nhwc ? channels : width;
}

/* Returns true if x is images in NHWC and the backend of its context has no kernels for NHWC. */
HPMLI_FN bool hpmli_image_foreign(const hpml_tensor *x)
{
    return x->ndim == 4 && x->layout == HPML_NHWC && !x->ctx->backend->layouts;
}

HPML_API hpml_tensor *hpml_transpose(hpml_tensor *x, int dim_a, int dim_b)
{
    int dims[HPML_MAX_DIMS];
    for (int i = 0; i < HPML_MAX_DIMS; i++) {
        dims[i] = i;
        if (i == dim_a) dims[i] = dim_b;
        else if (i == dim_b) dims[i] = dim_a;
    }
    return hpml_permute(x, dims);
}

/* Permutes one image between NCHW and NHWC: a transpose of the image, seen as a matrix. */
HPMLI_FN void hpmli_permute_image(const hpmli_work *w, int64_t image, int thread HPMLI_UNUSED)
{
    const hpml_tensor *x = w->n->src[0], *y = w->n->out;
    int64_t size = y->stride[0], rows = w->n->attr.permute.dims[1] == 2 ? x->shape[1] : size / x->shape[3];
    float  *from = (w->back ? y->grad : x->data) + image * size;
    float  *to   = (w->back ? x->grad : y->data) + image * size;
    if (w->back) rows = size / rows;
    w->k->conv_to_nhwc(to, from, rows, 1, size / rows, size);
}

/* Copies x to y or, backward, dy to dx, in the order of the destination, reordering the source's dimensions. */
HPMLI_FN void hpmli_permute_run(const hpml_run *run, hpml_node *n, bool backward)
{
    const hpml_tensor *x = n->src[0], *y = n->out;
    const int32_t     *d = n->attr.permute.dims;
    hpml_tensor        read = backward ? *y : *x;
    bool images = y->ndim == 4 && d[0] == 0 && d[1] != 1 && d[2] == d[1] % 3 + 1; /* as hpml_to_layout permutes */
    if (images && !(backward && (n->accumulate[0] || !x->grad))) {
        hpmli_for_each_parallel(run, n, backward, y->shape[0], 1, hpmli_permute_image);
        return;
    }
    for (int i = 0; i < y->ndim; i++) {
        int dim = d[i], at = backward ? dim : i;
        read.shape[at]  = y->shape[i];
        read.stride[at] = backward ? y->stride[i] : x->stride[dim];
    }
    hpmli_strided_copy_run(run, backward ? &read : y, backward ? x : &read, backward, n->accumulate[0]);
}
HPMLI_OP(permute, HPMLI_OP_REORDERS | HPMLI_OP_SPLIT_OWN, 0, hpmli_flops_pointwise(n, back),
         hpmli_permute_run(run, n, false), hpmli_permute_run(run, n, true));

HPML_API hpml_tensor *hpml_slice(hpml_tensor *x, int dim, int64_t start, int64_t count)
{
    int64_t shape[HPML_MAX_DIMS], sections = 0;
    if (!hpmli_recordable(1, &x) || !hpmli_split_slice(x, dim, &start, &count, &sections)) return NULL;
    if (!hpmli_slice_fits(x, dim, start, count)) return NULL;
    memcpy(shape, x->shape, sizeof shape);
    shape[dim] = count;
    hpml_node *n = hpmli_node_create(HPML_OP_SLICE, NULL, 1, &x, x->ndim, shape);
    n->attr.slice.dim   = dim;
    n->attr.slice.start = start;
    if (dim == 0) hpmli_node_batch(n, 0);
    hpmli_split_take(n->out, x->split, (int32_t)(sections > 0 ? sections : x->sections));
    return n->out;
}

HPMLI_FN void hpmli_slice_run(const hpml_run *run, hpml_node *n, bool backward)
{
    int         dim = n->attr.slice.dim;
    hpml_tensor x;
    hpmli_tensor_range(&x, n->src[0], dim, n->attr.slice.start, n->out->shape[dim]);
    if (backward && !n->accumulate[0]) run->ctx->k->vfill(n->src[0]->grad, 0, hpml_tensor_count(n->src[0]));
    hpmli_strided_copy_run(run, n->out, &x, backward, true);
}
HPMLI_OP(slice, HPMLI_OP_SPLIT_OWN, 0, hpmli_flops_pointwise(n, back), hpmli_slice_run(run, n, false),
         hpmli_slice_run(run, n, true));

HPML_API hpml_tensor *hpml_concat(hpml_tensor *const *x, int count, int dim)
{
    int64_t shape[HPML_MAX_DIMS];
    if (!x || count < 1 || !hpmli_recordable(count, x)) return NULL;
    if (count > HPML_MAX_SRC)
        return hpmli_null(x[0]->ctx, HPML_ERR_ARGUMENT, "concat of %d tensors, at most %d", count, HPML_MAX_SRC);
    memcpy(shape, x[0]->shape, sizeof shape);
    for (int i = 0; i < count; i++) {
        bool fits = dim >= 0 && dim < x[0]->ndim && x[i]->ndim == x[0]->ndim;
        for (int d = 0; fits && d < x[0]->ndim; d++) fits = d == dim || x[i]->shape[d] == x[0]->shape[d];
        if (!fits)
            return hpmli_null(x[0]->ctx, HPML_ERR_SHAPE, "concat along dimension %d: %s and %s do not fit", dim,
                              hpmli_describe(x[0]), hpmli_describe(x[i]));
        if (!hpmli_split_concat(x[0], x[i], dim)) return NULL;
        if (i > 0) shape[dim] += x[i]->shape[dim];
    }
    hpml_node *n = hpmli_node_create(HPML_OP_CONCAT, NULL, count, x, x[0]->ndim, shape);
    n->attr.slice.dim = dim;
    if (dim == 0) hpmli_node_batch(n, 0);
    hpmli_split_take(n->out, x[0]->split, x[0]->sections);
    if (n->out && x[0]->split[dim])
        n->out->sections = (int32_t)(shape[dim] * hpmli_sections(x[0], dim) / x[0]->shape[dim]);
    return n->out;
}

HPMLI_FN void hpmli_concat_run(const hpml_run *run, hpml_node *n, bool backward)
{
    for (int64_t i = 0, start = 0, count; i < n->src_count; i++, start += count) {
        hpml_tensor y;
        count = n->src[i]->shape[n->attr.slice.dim];
        hpmli_tensor_range(&y, n->out, n->attr.slice.dim, start, count);
        hpmli_strided_copy_run(run, &y, n->src[i], backward, n->accumulate[i]);
    }
}
HPMLI_OP(concat, HPMLI_OP_PAIRS_ROWS | HPMLI_OP_SPLIT_OWN, 0, hpmli_flops_pointwise(n, back),
         hpmli_concat_run(run, n, false), hpmli_concat_run(run, n, true));

HPMLI_FN hpml_tensor *hpmli_sum_record(hpml_tensor *x, int dim, bool mean)
{
    int64_t shape[HPML_MAX_DIMS];
    if (!hpmli_recordable(1, &x)) return NULL;
    if (dim < HPML_ALL_DIMS || dim >= x->ndim)
        return hpmli_null(x->ctx, HPML_ERR_SHAPE, "sum of %s: no dimension %d", hpmli_describe(x), dim);
    memcpy(shape, x->shape, sizeof shape);
    if (dim >= 0) shape[dim] = 1;
    for (int i = 0; i < x->ndim; i++) {
        if (!x->split[i] || (dim >= 0 && dim != i)) continue;
        hpmli_split_refuse("sum", x, i, "each rank would have a part of it");
        return NULL;
    }
    hpml_node *n = hpmli_node_create(HPML_OP_SUM, NULL, 1, &x, dim >= 0 ? x->ndim : 0, shape);
    n->attr.sum.dim  = dim;
    n->attr.sum.mean = mean;
    if (dim <= 0) hpmli_node_batch(n, 0);
    n->mixes_batch = false; /* a sum over a short batch is a shorter sum */
    hpmli_split_take(n->out, x->split, x->sections);
    return n->out;
}
HPML_API hpml_tensor *hpml_sum(hpml_tensor *x, int dim) { return hpmli_sum_record(x, dim, false); }
HPML_API hpml_tensor *hpml_mean(hpml_tensor *x, int dim) { return hpmli_sum_record(x, dim, true); }

/* Sums x (outer, size, inner) over `size`, to y; backward adds dy to dx. HPML_ALL_DIMS: outer and inner are 1. */
HPMLI_FN void hpmli_sum_run(const hpml_run *run, hpml_node *n, bool back)
{
    const hpmli_kernels *k   = run->ctx->k;
    const hpml_tensor   *src = n->src[0];
    int     dim   = n->attr.sum.dim;
    int64_t size  = dim == HPML_ALL_DIMS ? hpml_tensor_count(src) : src->shape[dim], inner = 1;
    float   scale = n->attr.sum.mean ? 1 / (float)size : 1;
    for (int i = dim + 1; dim != HPML_ALL_DIMS && i < src->ndim; i++) inner *= src->shape[i];
    int64_t outer = hpml_tensor_count(src) / (size * inner);
    if (back && !n->accumulate[0]) k->vfill(src->grad, 0, outer * size * inner);
    for (int64_t o = 0; o < outer; o++) {
        float *x = (back ? src->grad : src->data) + o * size * inner;
        float *y = (back ? n->out->grad : n->out->data) + o * inner;
        if (!back && inner == 1) *y = k->vsum(x, size);
        else if (!back) k->vsum_rows(y, x, size, inner, 0);
        else if (inner == 1) k->vscale_add(x, x, 1, scale * *y, size);
        else for (int64_t i = 0; i < size; i++) k->vaxpby(x + i * inner, scale, y, 1, inner);
    }
    if (!back && n->attr.sum.mean) k->vscale_add(n->out->data, n->out->data, scale, 0, outer * inner);
}
HPMLI_OP(sum, HPMLI_OP_SPLIT_OWN, 0, hpmli_flops_pointwise(n, back), hpmli_sum_run(run, n, false),
         hpmli_sum_run(run, n, true));

// ---------------------------------------------------------------------------------------------------------------------
// >>conv   two-dimensional convolution: recording, sizes
// ---------------------------------------------------------------------------------------------------------------------
/* This section computes convolutions y = act(w * x + bias), see hpml_conv2d. Sources of the node: x, w, bias (NULL
   without). Groups are convolutions of some channels each, which are computed one after another. With kernel K x K,
   stride S, padding P and dilation D, as plain C for one image and one group in the order NCHW:
       for (int64_t oc = 0; oc < OC; oc++) for (int64_t oh = 0; oh < OH; oh++) for (int64_t ow = 0; ow < OW; ow++) {
           float sum = bias[oc];
           for (int64_t c = 0; c < C; c++) for (int64_t kh = 0; kh < K; kh++) for (int64_t kw = 0; kw < K; kw++) {
               int64_t h = oh * S - P + kh * D, w = ow * S - P + kw * D;
               if (h >= 0 && h < H && w >= 0 && w < W) sum += x[c][h][w] * weight[oc][c][kh][kw];
           }
           y[oc][oh][ow] = act(sum);
       }
   HPML_CONV_DIRECT computes this by the kernels of >>conv-kernels, HPML_CONV_IM2COL by a matrix product with copies of
   x, in less memory. The gradient of the weights is summed image by image into a number of partial sums that depends on
   the shape alone and that are added up in order, or (by_channels) over all images in tasks for some channels each; so
   the bits do not depend on the number of threads. */

HPMLI_FN int64_t hpmli_round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }
HPMLI_FN int64_t hpmli_conv_panels(int64_t channels) { return (channels + HPMLI_CONV_PANEL - 1) / HPMLI_CONV_PANEL; }

/* Sets the sizes, in floats, and addresses of the arrays in n's scratch memory, which both passes use alike. */
HPMLI_FN void hpmli_conv_scratch(hpmli_conv *c, const hpml_node *n)
{
    int64_t weights = c->taps * c->C * hpmli_round_up(c->OC, HPMLI_CONV_PANEL);
    int64_t for_dx  = c->runs[0] * c->runs[1] * hpmli_round_up(c->run_floats, HPMLI_CONV_PANEL) * c->OC;
    int64_t band, forward, backward; /* floats of scratch memory for a thread */
    int64_t copies;                  /* floats of scratch memory for all threads together, if by_channels */
    /* Rows of a tile are pixels of one row, or one pixel of several images where a row would fill a part of a tile. */
    c->images_forward = c->OW < HPMLI_CONV_NARROW ? hpmli_min(c->B, HPMLI_CONV_IMAGES) : 1;
    c->band_rows      = c->images_forward > 1 ? c->OH : hpmli_max(64 / c->OW, 1);
    c->sums           = hpmli_min(c->groups * weights > 65536 ? 8 : 16, c->B);
    c->images_at_once = hpmli_max(hpmli_min(128 / (c->OH * c->OW), (c->B - 1) / c->sums + 1), 1);
    band              = hpmli_round_up(c->images_forward * c->band_rows * c->OW, 16) * HPMLI_CONV_PANEL;
    forward           = c->images_forward * c->x_floats + band;
    backward          = c->images_at_once * (2 * c->x_floats + c->y_floats);
    /* Many weights of small images: copies of all images take less memory, and time, than partial sums of dw. */
    copies            = c->B * (c->x_floats + c->y_floats) + weights;
    c->by_channels    = c->groups == 1 && c->OW < HPMLI_CONV_NARROW && copies < c->sums * weights;
    c->sum_floats     = (c->by_channels ? 0 : c->groups * weights) + hpmli_round_up(c->groups * c->OC, 16);
    c->packed_floats  = hpmli_max(weights, for_dx);
    c->thread_floats  = hpmli_max(forward, c->by_channels ? HPMLI_CONV_IMAGES * c->x_floats : backward);
    c->scratch_floats = c->sums * c->sum_floats + c->groups * c->packed_floats + c->ctx->threads * c->thread_floats;
    if (c->by_channels) c->scratch_floats += copies;
    if (!n->scratch || n->attr.conv.algorithm == HPML_CONV_IM2COL) return; /* not allocated yet, or not used */
    HPML_ASSERT((size_t)c->scratch_floats * sizeof(float) <= n->scratch_bytes);
    c->sum_space    = (float *)n->scratch;
    c->packed       = c->sum_space + c->sums * c->sum_floats;
    c->thread_space = c->packed + c->groups * c->packed_floats;
    c->all_dw       = c->thread_space + c->ctx->threads * c->thread_floats;
    c->all_x        = c->all_dw + weights;
    c->all_dy       = c->all_x + c->B * c->x_floats;
}

/* Returns the sizes of the convolution n, and the addresses of its scratch memory if that is allocated. */
HPMLI_FN hpmli_conv hpmli_conv_of(hpml_ctx *ctx, hpml_node *n)
{
    const hpml_tensor *x = n->src[0], *y = n->out;
    const hpml_attr   *a = &n->attr;
    hpmli_conv         c = HPMLI_ZEROED;
    c.ctx     = ctx;
    c.n       = n;
    c.groups  = a->conv.groups;
    c.B       = x->shape[0];
    c.C       = hpmli_image(x, 0) / c.groups;
    c.H       = hpmli_image(x, 1);
    c.W       = hpmli_image(x, 2);
    c.OC      = hpmli_image(y, 0) / c.groups;
    c.OH      = hpmli_image(y, 1);
    c.OW      = hpmli_image(y, 2);
    c.nhwc    = x->layout == HPML_NHWC;
    c.x_pixel = c.nhwc ? c.groups * c.C : 1;
    c.y_pixel = c.nhwc ? c.groups * c.OC : 1;
    c.taps    = (int64_t)a->conv.kernel[0] * a->conv.kernel[1];
    c.x_pitch = (c.W + 2 * a->conv.padding[1]) * c.C;
    c.x_first = a->conv.padding[0] * c.x_pitch + a->conv.padding[1] * c.C;
    /* Kernels read and write whole tiles of pixels, so unused memory is allocated behind the padded image of x and
       behind the image of dy. */
    c.x_floats     = hpmli_round_up((c.H + 2 * a->conv.padding[0]) * c.x_pitch + HPMLI_CONV_PANEL, 16);
    c.y_floats     = hpmli_round_up(c.OH * c.OW * c.OC + 2 * HPMLI_CONV_PANEL, 16);
    c.x_row_step   = a->conv.stride[0] * c.x_pitch;
    c.x_pixel_step = a->conv.stride[1] * c.C;
    c.runs[0]      = a->conv.kernel[0];
    c.runs[1]      = a->conv.dilation[1] == 1 ? 1 : a->conv.kernel[1]; /* 1: a row of the kernel is contiguous in x */
    c.run_floats   = c.taps * c.C / (c.runs[0] * c.runs[1]);
    c.run_step[0]  = a->conv.dilation[0] * c.x_pitch;
    c.run_step[1]  = a->conv.dilation[1] * c.C;
    hpmli_conv_scratch(&c, n);
    return c;
}

/* Returns true for a convolution of 1 x 1 without stride and padding, a matrix product that reads x itself. */
HPMLI_FN bool hpmli_conv_is_1x1(const hpmli_conv *c)
{
    return c->taps == 1 && c->x_row_step == c->x_pitch && c->x_pixel_step == c->C && c->x_first == 0;
}

/* Returns the height (i 0) or width (i 1) of the result, or 0 if the kernel is larger than the padded image of x. */
HPMLI_FN int64_t hpmli_conv_size(const hpml_tensor *x, const hpml_attr *a, int i)
{
    int64_t span = hpmli_image(x, 1 + i) + 2 * (int64_t)a->conv.padding[i] - 1;
    span -= (int64_t)a->conv.dilation[i] * (a->conv.kernel[i] - 1);
    return span < 0 ? 0 : span / a->conv.stride[i] + 1;
}

/* Returns what is wrong with the options a of a convolution of x with `out` output channels, or NULL. */
HPMLI_FN const char *hpmli_conv_check(const hpml_tensor *x, int64_t out, const hpml_attr *a)
{
    if (x->ndim != 4) return "the input must be (B, C, H, W) or, in NHWC, (B, H, W, C)";
    if (a->conv.groups < 1 || hpmli_image(x, 0) % a->conv.groups != 0 || out < 1 || out % a->conv.groups != 0)
        return "input and output channels must be multiples of the groups";
    for (int i = 0; i < 2; i++) {
        if (a->conv.kernel[i] < 1 || a->conv.stride[i] < 1 || a->conv.padding[i] < 0 || a->conv.dilation[i] < 1)
            return "kernel_h is required, and kernel, stride, dilation must be at least 1, padding at least 0";
        if (a->conv.kernel[i] > INT16_MAX || a->conv.stride[i] > INT16_MAX || a->conv.padding[i] > INT16_MAX ||
            a->conv.dilation[i] > INT16_MAX)
            return "kernel, stride, padding and dilation must be below 32768";
        if (hpmli_conv_size(x, a, i) < 1)
            return "the kernel is larger than the padded image";
    }
    if ((int)a->conv.act < 0 || a->conv.act >= HPML_ACT_COUNT) return "there is no such activation";
    if (a->conv.act != HPML_ACT_NONE && hpmli_act_reads_x(a->conv.act))
        return "this activation needs its argument in the backward pass; record it after the convolution";
    return NULL;
}
HPMLI_FN int32_t hpmli_conv_default(int32_t value, int32_t if_zero) { return value == 0 ? if_zero : value; }

/* Chooses the algorithm, in a, for a result of this shape within the workspace that d allows, and sets *bytes to the
   workspace that the algorithm needs. Returns false, and reports an error, if d allows too little. */
HPMLI_FN bool hpmli_conv_choose(hpml_tensor *x, const int64_t *shape, hpml_attr *a, const hpml_conv2d_desc *d,
                                size_t *bytes)
{
    hpml_node   n = HPMLI_ZEROED;
    hpml_tensor y = *x;
    hpmli_set_shape(&y, 4, shape);
    n.src[0] = x, n.out = &y, n.attr = *a;
    hpmli_conv c    = hpmli_conv_of(x->ctx, &n);
    size_t     row  = (size_t)(c.C * c.taps * c.OW) * sizeof(float), most = d->workspace ? d->workspace : SIZE_MAX;
    bool       fits = (size_t)c.scratch_floats * sizeof(float) <= most;
    *bytes = (size_t)c.scratch_floats * sizeof(float);
    a->conv.algorithm = HPML_CONV_DIRECT;
    if (fits && d->algorithm != HPML_CONV_IM2COL) return true;
    if (d->algorithm == HPML_CONV_DIRECT || row > most)
        return hpmli_false(x->ctx, HPML_ERR_ARGUMENT, "conv2d \"%s\": workspace of %zu bytes; direct needs %zu, im2col "
                           "at least %zu: raise it", d->name ? d->name : "", d->workspace, *bytes, row);
    if (d->workspace == 0) most = (size_t)4 << 20; /* bytes: about the size of a cache */
    a->conv.algorithm = HPML_CONV_IM2COL;
    a->conv.rows      = (int32_t)hpmli_max(hpmli_min((int64_t)(most / row), c.OH), 1);
    *bytes            = (size_t)a->conv.rows * row;
    return true;
}

/* Creates weight (src[1]) and bias (src[2]; NULL: no bias) of a convolution; src[0]: x. False: an error. */
HPMLI_FN bool hpmli_conv_params(hpml_tensor *x, const char *name, int64_t out, const hpml_attr *a,
                                const hpml_conv2d_desc *d, hpml_tensor **src)
{
    const bool       in   = d->split == HPML_SPLIT_IN;
    const hpml_axis  axis = d->split ? HPML_AXIS_TENSOR : HPML_AXIS_DATA;
    const hpmli_part part = { axis, in, in ? x->sections : 1 };
    const hpmli_part rest = { in ? HPML_AXIS_DATA : part.axis, 0, 1 };
    int64_t w[4] = { out, hpmli_image(x, 0) / a->conv.groups, a->conv.kernel[0], a->conv.kernel[1] };
    if (in) w[1] *= hpml_ctx_group(x->ctx, HPML_AXIS_TENSOR)->size;
    src[0] = x;
    src[1] = hpmli_layer_part(x->ctx, name, "weight", d->init, d->init_scale, 4, w, &part);
    src[2] = d->no_bias ? NULL : hpmli_layer_part(x->ctx, name, "bias", HPML_INIT_ZEROS, 0, 1, &out, &rest);
    return !hpmli_failed(x->ctx);
}

/* Ends a convolution that is split by input channels: sums y over the ranks, adds the bias at each pixel, then act. */
HPMLI_FN hpml_tensor *hpmli_conv_sum(hpml_tensor *y, hpml_tensor *bias, hpml_act act)
{
    if (!y || !bias || y->layout == HPML_NHWC) return hpmli_layer_sum(y, bias, act);
    y->ctx->group_nodes++;
    return hpmli_layer_sum(y, hpml_reshape_3d(bias, bias->shape[0], 1, 1), act);
}

HPML_API hpml_tensor *hpml_conv2d(hpml_tensor *x, int64_t out, const hpml_conv2d_desc *desc)
{
    hpml_attr    a;
    hpml_tensor *src[3];
    int64_t      shape[4];
    size_t       bytes = 0;
    hpml_conv2d_desc d; /* a desc of zeros is an error, because kernel_h is required */
    if (!hpmli_recordable(1, &x) || !HPMLI_COPY_DESC(x->ctx, "conv2d", d, desc)) return NULL;
    if (hpmli_image_foreign(x))
        return hpml_to_layout(hpml_conv2d(hpml_to_layout(x, HPML_NCHW), out, desc), HPML_NHWC);
    if ((int)d.algorithm < 0 || d.algorithm > HPML_CONV_IM2COL)
        return hpmli_null(x->ctx, HPML_ERR_ARGUMENT, "conv2d \"%s\": there is no algorithm %d", d.name ? d.name : "",
                          (int)d.algorithm);
    if ((d.algorithm != HPML_CONV_AUTO || d.workspace > 0) && !x->ctx->backend->layouts)
        return hpmli_null(x->ctx, HPML_ERR_UNSUPPORTED, "conv2d \"%s\": on \"%s\" algorithm and workspace cannot be "
                          "chosen; leave them 0", d.name ? d.name : "", x->ctx->backend->name);
    memset(&a, 0, sizeof a);
    a.conv.kernel[0]   = d.kernel_h;
    a.conv.kernel[1]   = hpmli_conv_default(d.kernel_w, d.kernel_h);
    a.conv.stride[0]   = hpmli_conv_default(d.stride_h, 1);
    a.conv.stride[1]   = hpmli_conv_default(d.stride_w, a.conv.stride[0]);
    a.conv.padding[0]  = d.padding_h == HPML_NO_PAD ? 0 : d.padding_h;
    a.conv.padding[1]  = d.padding_w == HPML_NO_PAD ? 0 : hpmli_conv_default(d.padding_w, a.conv.padding[0]);
    a.conv.dilation[0] = hpmli_conv_default(d.dilation_h, 1);
    a.conv.dilation[1] = hpmli_conv_default(d.dilation_w, a.conv.dilation[0]);
    a.conv.groups      = hpmli_conv_default(d.groups, 1);
    a.conv.act         = d.activation;
    const int channels = x->layout == HPML_NHWC ? 3 : 1; /* the dimension of the channels */
    if (x->ndim == 4 && !hpmli_layer_split("conv2d", d.name, &x, channels, &d.split, 0)) return NULL;
    const bool  in  = d.split == HPML_SPLIT_IN;
    const char *why = hpmli_conv_check(x, out, &a);
    if (!why && d.split && a.conv.groups != 1) why = "groups with .split; set one of them";
    for (int i = 0; i < x->ndim && !why; i++)
        if (x->split[i] && !(in && i == channels)) why = "the input is split along another dimension than its channels";
    if (why)
        return hpmli_null(x->ctx, HPML_ERR_SHAPE, "conv2d \"%s\": input %s, %lld outputs, kernel %dx%d, stride %dx%d, "
                          "padding %dx%d, dilation %dx%d, %d groups: %s", d.name ? d.name : "", hpmli_describe(x),
                          (long long)out, a.conv.kernel[0], a.conv.kernel[1], a.conv.stride[0], a.conv.stride[1],
                          a.conv.padding[0], a.conv.padding[1], a.conv.dilation[0], a.conv.dilation[1], a.conv.groups,
                          why);
    const char *name = hpmli_layer_name(x->ctx, d.name, "conv");
    if (!hpmli_conv_params(x, name, out, &a, &d, src)) return NULL;
    if (in) a.conv.act = HPML_ACT_NONE; /* activation and bias follow the sum over the ranks */
    hpmli_image_shape(x, src[1]->shape[0], hpmli_conv_size(x, &a, 0), hpmli_conv_size(x, &a, 1), shape);
    if (hpmli_shape_count(4, shape) > 0 && !hpmli_conv_choose(x, shape, &a, &d, &bytes)) return NULL;
    hpml_tensor *bias = src[2];
    if (in) src[2] = NULL;
    hpml_node *n = hpmli_node_create(HPML_OP_CONV2D, name, 3, src, 4, shape);
    n->attr          = a;
    n->scratch_bytes = bytes;
    if (in) return hpmli_conv_sum(n->out, bias, d.activation);
    if (n->out && d.split) hpmli_split_set(n->out, channels, HPML_AXIS_TENSOR, 1);
    return n->out;
}

// ---------------------------------------------------------------------------------------------------------------------
// >>conv-run   convolution: its forward and backward pass
// ---------------------------------------------------------------------------------------------------------------------
/* Packs weights of HPMLI_CONV_PANEL output channels of a group (one task) in the order in which kernels read them to
   compute y or, if c->want_dx, dx. */
HPMLI_FN void hpmli_conv_pack_task(void *arg, int64_t task, int thread HPMLI_UNUSED)
{
    const hpmli_conv *c = (const hpmli_conv *)arg;
    int64_t panels = hpmli_conv_panels(c->OC), g = task / panels, o = task % panels * HPMLI_CONV_PANEL;
    int64_t end    = o + HPMLI_CONV_PANEL < c->OC ? o + HPMLI_CONV_PANEL : c->OC;
    const float *w = c->n->src[1]->data + g * c->OC * c->C * c->taps;
    float  *packed = c->packed + g * c->packed_floats;
    if (!c->want_dx) c->ctx->k->conv_pack(c, packed, w, o);
    for (; c->want_dx && o < end; o++) c->ctx->k->conv_pack_for_dx(c, packed, w, o);
}

/* Returns rows [row, row + rows) of image b and group g of the array p as a matrix: (OC, pixels) if is_y, then p is y
   or its gradient; else (C, pixels), then p is x or its gradient. */
HPMLI_FN hpmli_mat hpmli_conv_mat(const hpmli_conv *c, float *p, bool is_y, int64_t b, int64_t g, int64_t row,
                                  int64_t rows)
{
    int64_t channels = is_y ? c->OC : c->C;
    int64_t width = is_y ? c->OW : c->W;
    int64_t pixels = width * (is_y ? c->OH : c->H);
    int64_t ld = c->nhwc ? c->groups * channels : pixels;
    p += (b * c->groups * pixels + g * (c->nhwc ? 1 : pixels)) * channels + row * width * (c->nhwc ? ld : 1);
    hpmli_mat m = { p, channels, rows * width, ld, 1, c->groups * channels * pixels, c->nhwc };
    return m;
}

/* Copies group g of image b of x to `image`, in NHWC order and with its padding. */
HPMLI_FN void hpmli_conv_x_to_nhwc(const hpmli_conv *c, int64_t b, int64_t g, float *image)
{
    const float    *x    = hpmli_conv_mat(c, c->n->src[0]->data, false, b, g, 0, 1).p;
    hpmli_conv_copy copy = { c->H, c->W, c->C, c->x_pitch, c->C, c->W * c->x_pixel, c->x_pixel };
    if (c->x_first) memset(image, 0, (size_t)c->x_floats * sizeof(float));
    if (c->nhwc) c->ctx->k->conv_copy(&copy, image + c->x_first, x, NULL, 0, 0);
    else c->ctx->k->conv_to_nhwc(image + c->x_first, x, c->C, c->H, c->W, c->x_pitch);
}

/* Copies group g of image b of dy, the gradient of the result, to `image`, in NHWC order and without padding. */
HPMLI_FN void hpmli_conv_dy_to_nhwc(const hpmli_conv *c, int64_t b, int64_t g, float *image)
{
    const float    *dy   = hpmli_conv_mat(c, c->n->out->grad, true, b, g, 0, 1).p;
    hpmli_conv_copy copy = { 1, c->OH * c->OW, c->OC, 0, c->OC, 0, c->y_pixel };
    if (c->nhwc) c->ctx->k->conv_copy(&copy, image, dy, NULL, 0, 0);
    else c->ctx->k->conv_to_nhwc(image, dy, c->OC, c->OH, c->OW, c->OW * c->OC);
}

/* Computes, for images_forward images, one of channel_pieces ranges of the output channels of each group (one task). */
HPMLI_FN void hpmli_conv_forward_task(void *arg, int64_t task, int thread)
{
    const hpmli_conv *c = (const hpmli_conv *)arg;
    int64_t b = task / c->channel_pieces * c->images_forward, images = hpmli_min(c->images_forward, c->B - b);
    int64_t piece = task % c->channel_pieces, panels = hpmli_conv_panels(c->OC);
    int64_t o0 = piece * panels / c->channel_pieces * HPMLI_CONV_PANEL;
    int64_t o1 = hpmli_min((piece + 1) * panels / c->channel_pieces * HPMLI_CONV_PANEL, c->OC);
    float  *xs = c->thread_space + thread * c->thread_floats, *band = xs + c->images_forward * c->x_floats;
    for (int64_t g = 0; g < c->groups; g++) {
        const float *bias = c->n->src[2] ? c->n->src[2]->data + g * c->OC : NULL;
        for (int64_t i = 0; i < images; i++) hpmli_conv_x_to_nhwc(c, b + i, g, xs + i * c->x_floats);
        c->ctx->k->conv_forward(c, images, c->packed + g * c->packed_floats, xs, o0, o1, bias,
                              c->n->attr.conv.act == HPML_ACT_RELU,
                              hpmli_conv_mat(c, c->n->out->data, true, b, g, 0, 1).p, band);
    }
}

HPMLI_FN void hpmli_conv_bias(const hpmli_conv *c, hpmli_gemm_desc *d, const float *bias)
{
    if (c->nhwc) d->bias_n = bias;
    else d->bias_m = bias;
}

/* Computes 1 x 1 convolutions, image by image or, for NHWC, of all images at once: y (OC, pixels) = w (OC, C) x (C,
   pixels); back: dx = w^T dy. */
HPMLI_FN void hpmli_conv_1x1(const hpmli_conv *c, bool back)
{
    const hpml_tensor *x = c->n->src[0], *w = c->n->src[1], *bias = c->n->src[2], *y = c->n->out;
    int64_t rows = c->nhwc ? c->B * c->OH : c->OH;
    for (int64_t g = 0; g < c->groups; g++) {
        hpmli_mat a  = hpmli_matrix(w->data + g * c->OC * c->C, c->OC, c->C, c->C);
        hpmli_mat b  = hpmli_conv_mat(c, back ? y->grad : x->data, back, 0, g, 0, rows);
        hpmli_mat to = hpmli_conv_mat(c, back ? x->grad : y->data, !back, 0, g, 0, rows);
        b.count = to.count = c->nhwc ? 1 : c->B;
        hpmli_gemm_desc d = hpmli_gemm_of(back ? hpmli_transposed(a) : a, b, to, back && c->n->accumulate[0]);
        hpmli_conv_bias(c, &d, !back && bias ? bias->data + g * c->OC : NULL);
        d.act = !back && c->n->attr.conv.act == HPML_ACT_RELU;
        hpmli_gemm(c->ctx, &d);
    }
}

/* Overwrites dy of image b by dz = dy act', because no later op reads dy; adds sums of dz to db (first: sets db). */
HPMLI_FN void hpmli_conv_dz_and_db(const hpmli_conv *c, int64_t b, float *db, bool first)
{
    int64_t pixels = c->OH * c->OW, channels = c->groups * c->OC;
    float  *dz = c->n->out->grad + b * channels * pixels;
    if (c->n->attr.conv.act != HPML_ACT_NONE && !hpmli_dz_is_done(c->n))
        c->ctx->k->act_backward(c->n->attr.conv.act, 0.01f, dz, dz, NULL, c->n->out->data + b * channels * pixels,
                                channels * pixels, 0);
    if (c->want_db && c->nhwc) c->ctx->k->vsum_rows(db, dz, pixels, channels, !first);
    for (int64_t o = 0; c->want_db && !c->nhwc && o < channels; o++)
        db[o] = (first ? 0 : db[o]) + c->ctx->k->vsum(dz + o * pixels, pixels);
}

/* im2col: the matrix of the numbers of x from which some rows of y are computed: a row for each channel and kernel
   position (tap), a column for each pixel of these rows of y. */
typedef struct hpmli_columns {
    const hpmli_conv *c;
    float            *p;         /* the matrix: (C x taps, rows x OW) */
    int64_t           b, g;      /* image and group of x */
    int64_t           row, rows; /* first row of y, number of rows */
    bool              back;      /* the matrix is added to dx, else filled from x */
} hpmli_columns;

/* Fills row `task` of the im2col matrix from x. If m->back, instead adds the matrix's rows of channel `task` to dx, all
   in one task, because they overlap in dx. */
HPMLI_FN void hpmli_columns_task(void *arg, int64_t task, int thread HPMLI_UNUSED)
{
    const hpmli_columns *m = (const hpmli_columns *)arg;
    const hpmli_conv    *c = m->c;
    const hpml_attr     *a = &c->n->attr;
    int64_t first = m->back ? task * c->taps : task;
    int64_t end = m->back ? first + c->taps : first + 1;
    int64_t pixel = c->nhwc ? c->x_pixel : 1, stride = a->conv.stride[1];
    float  *x = m->back ? c->n->src[0]->grad : c->n->src[0]->data;
    x = hpmli_conv_mat(c, x, false, m->b, m->g, 0, 1).p + first / c->taps * (c->nhwc ? 1 : c->H * c->W);
    for (int64_t k = first; k < end; k++) {
        int64_t tap = k % c->taps, w0 = tap % a->conv.kernel[1] * a->conv.dilation[1] - a->conv.padding[1];
        for (int64_t r = 0; r < m->rows; r++) {
            int64_t h = (m->row + r) * a->conv.stride[0] + tap / a->conv.kernel[1] * a->conv.dilation[0] -
                        a->conv.padding[0];
            float  *row    = m->p + (k * m->rows + r) * c->OW;
            bool    inside = h >= 0 && h < c->H;
            for (int64_t j = 0, w = w0; j < c->OW; j++, w += stride) {
                bool is_image = inside && w >= 0 && w < c->W; /* else padding, which counts as 0 */
                if (!m->back) row[j] = is_image ? x[(h * c->W + w) * pixel] : 0;
                else if (is_image) x[(h * c->W + w) * pixel] += row[j];
            }
        }
    }
}

/* Computes y (OC, pixels) = w (OC, K) columns (K, pixels), K = C x taps, or, back, dw = dy columns^T and columns = w^T
   dy, with the im2col matrix `columns` of as many rows of y of one image as the workspace has space for. */
HPMLI_FN void hpmli_conv_by_columns(const hpmli_conv *c, bool back)
{
    hpml_node   *n  = c->n;
    hpml_tensor *x  = n->src[0], *w = n->src[1], *bias = n->src[2], *y = n->out;
    int64_t      K  = c->C * c->taps, step = n->attr.conv.rows;
    bool         dw = back && w->grad, dx = back && x->grad;
    if (dx && !n->accumulate[0]) memset(x->grad, 0, hpmli_tensor_bytes(x));
    for (int64_t b = 0; b < c->B && back; b++)
        hpmli_conv_dz_and_db(c, b, bias ? bias->grad : NULL, b == 0 && !n->accumulate[2]);
    for (int64_t i = 0; i < c->B * c->groups; i++)
        for (int64_t row = 0; row < c->OH; row += step) {
            hpmli_columns m = { c, (float *)n->scratch, i / c->groups, i % c->groups, row,
                                hpmli_min(step, c->OH - row), false };
            int64_t   weights = m.g * c->OC * K;
            hpmli_mat columns = hpmli_matrix(m.p, K, m.rows * c->OW, m.rows * c->OW);
            hpmli_mat to      = hpmli_conv_mat(c, back ? y->grad : y->data, true, m.b, m.g, row, m.rows);
            hpmli_mat by      = hpmli_matrix(w->data + weights, c->OC, K, K);
            if (!back || dw) hpmli_parallel(c->ctx, K, hpmli_columns_task, &m);
            if (!back) {
                hpmli_gemm_desc d = hpmli_gemm_of(by, columns, to, false);
                hpmli_conv_bias(c, &d, bias ? bias->data + m.g * c->OC : NULL);
                d.act = n->attr.conv.act == HPML_ACT_RELU;
                hpmli_gemm(c->ctx, &d);
            }
            if (dw)
                hpmli_product(c->ctx, to, hpmli_transposed(columns), hpmli_matrix(w->grad + weights, c->OC, K, K),
                              m.b > 0 || row > 0 || n->accumulate[1]);
            if (!dx) continue;
            hpmli_product(c->ctx, hpmli_transposed(by), to, columns, false);
            m.back = true;
            hpmli_parallel(c->ctx, c->C, hpmli_columns_task, &m);
        }
}

HPMLI_FN void hpmli_conv2d_pass(const hpml_run *run, hpml_node *n)
{
    hpmli_conv c   = hpmli_conv_of(run->ctx, n);
    hpml_act   act = n->attr.conv.act;
    if (n->attr.conv.algorithm == HPML_CONV_IM2COL) hpmli_conv_by_columns(&c, false);
    else if (hpmli_conv_is_1x1(&c)) hpmli_conv_1x1(&c, false);
    else {
        int64_t panels = hpmli_conv_panels(c.OC), want = 2 * run->ctx->threads; /* number of tasks */
        hpmli_parallel(run->ctx, c.groups * panels, hpmli_conv_pack_task, &c);
        int64_t tasks  = (c.B - 1) / c.images_forward + 1;
        c.channel_pieces = hpmli_min((want - 1) / tasks + 1, panels); /* too few tasks: cut the channels as well */
        if (run->ctx->threads == 1) c.channel_pieces = 1;
        hpmli_parallel(run->ctx, tasks * c.channel_pieces, hpmli_conv_forward_task, &c);
    }
    if (act != HPML_ACT_NONE && act != HPML_ACT_RELU)
        hpmli_for_each_parallel(run, n, false, hpmli_chunk_count(n), 1, hpmli_act_chunk);
}

/* Computes dx of group g of `images` images, the first of which is b. ys: dy in NHWC order; dx: scratch memory for
   padded images. */
HPMLI_FN void hpmli_conv_dx(const hpmli_conv *c, int64_t b, int64_t images, int64_t g, const float *ys, float *dx)
{
    memset(dx, 0, (size_t)(images * c->x_floats) * sizeof(float));
    c->ctx->k->conv_input_grad(c, images, c->packed + g * c->packed_floats, ys, dx);
    for (int64_t i = 0; i < images; i++)
        c->ctx->k->conv_from_nhwc(c, hpmli_conv_mat(c, c->n->src[0]->grad, false, b + i, g, 0, 1).p,
                                  dx + i * c->x_floats + c->x_first, c->n->accumulate[0]);
}

/* The task of one range of images: computes the images' dx, and the partial sum number `sum` of dw and db over them. */
HPMLI_FN void hpmli_conv_back_task(void *arg, int64_t sum, int thread)
{
    const hpmli_conv *c = (const hpmli_conv *)arg;
    float  *ys = c->thread_space + thread * c->thread_floats;
    float  *xs = ys + c->images_at_once * c->y_floats, *dx = xs + c->images_at_once * c->x_floats;
    float  *dw = c->sum_space + sum * c->sum_floats, *db = dw + c->sum_floats - hpmli_round_up(c->groups * c->OC, 16);
    int64_t first = sum * c->B / c->sums, end = (sum + 1) * c->B / c->sums;
    int64_t panels = c->taps * c->C * hpmli_round_up(c->OC, HPMLI_CONV_PANEL);
    for (int64_t b = first; b < end; b += c->images_at_once) {
        int64_t images = end - b < c->images_at_once ? end - b : c->images_at_once;
        for (int64_t i = 0; i < images; i++) hpmli_conv_dz_and_db(c, b + i, db, b + i == first);
        for (int64_t g = 0; g < c->groups; g++) {
            for (int64_t i = 0; i < images; i++) {
                if (c->want_dw) hpmli_conv_x_to_nhwc(c, b + i, g, xs + i * c->x_floats);
                if (c->want_dw || c->want_dx) hpmli_conv_dy_to_nhwc(c, b + i, g, ys + i * c->y_floats);
            }
            if (c->want_dw) c->ctx->k->conv_weight_grad(c, images, xs, ys, dw + g * panels, 0, c->OC, b > first);
            if (c->want_dx) hpmli_conv_dx(c, b, images, g, ys, dx);
        }
    }
}

/* by_channels: computes dz and partial sum number `sum` of db of a range of images, which it copies (one task). */
HPMLI_FN void hpmli_conv_copy_task(void *arg, int64_t sum, int thread HPMLI_UNUSED)
{
    const hpmli_conv *c = (const hpmli_conv *)arg;
    int64_t first = sum * c->B / c->sums, end = (sum + 1) * c->B / c->sums;
    for (int64_t b = first; b < end; b++) {
        hpmli_conv_dz_and_db(c, b, c->sum_space + sum * c->sum_floats, b == first);
        if (c->want_dw) hpmli_conv_x_to_nhwc(c, b, 0, c->all_x + b * c->x_floats);
        hpmli_conv_dy_to_nhwc(c, b, 0, c->all_dy + b * c->y_floats);
    }
}

/* by_channels: sums dw over all images for HPMLI_CONV_PANEL output channels (one task). */
HPMLI_FN void hpmli_conv_dw_task(void *arg, int64_t task, int thread HPMLI_UNUSED)
{
    const hpmli_conv *c = (const hpmli_conv *)arg;
    int64_t o = task * HPMLI_CONV_PANEL;
    c->ctx->k->conv_weight_grad(c, c->B, c->all_x, c->all_dy, c->all_dw + o * c->taps * c->C, o,
                                hpmli_min(o + HPMLI_CONV_PANEL, c->OC), 0);
}

/* by_channels: computes dx of up to HPMLI_CONV_IMAGES images (one task). */
HPMLI_FN void hpmli_conv_dx_task(void *arg, int64_t task, int thread)
{
    const hpmli_conv *c = (const hpmli_conv *)arg;
    int64_t b = task * HPMLI_CONV_IMAGES;
    hpmli_conv_dx(c, b, hpmli_min(HPMLI_CONV_IMAGES, c->B - b), 0, c->all_dy + b * c->y_floats,
                  c->thread_space + thread * c->thread_floats);
}

/* Adds up the partial sums of dw for HPMLI_CONV_PANEL output channels of one group (one task). */
HPMLI_FN void hpmli_conv_sum_parts_task(void *arg, int64_t task, int thread HPMLI_UNUSED)
{
    const hpmli_conv *c = (const hpmli_conv *)arg;
    int64_t panels = hpmli_conv_panels(c->OC), g = task / panels, o = task % panels * HPMLI_CONV_PANEL;
    const float *sums = c->by_channels ? c->all_dw : c->sum_space + g * c->taps * c->C * panels * HPMLI_CONV_PANEL;
    c->ctx->k->conv_unpack(c, c->n->src[1]->grad + g * c->OC * c->C * c->taps, sums, c->by_channels ? 1 : c->sums, o,
                           c->n->accumulate[1]);
}

HPMLI_FN void hpmli_conv2d_back(const hpml_run *run, hpml_node *n)
{
    hpmli_conv c = hpmli_conv_of(run->ctx, n);
    int64_t    channels = c.groups * c.OC, panels = hpmli_conv_panels(c.OC);
    c.want_dw = n->src[1]->grad != NULL;
    c.want_db = n->src[2] && n->src[2]->grad;
    if (n->attr.conv.algorithm == HPML_CONV_IM2COL) {
        hpmli_conv_by_columns(&c, true);
        return;
    }
    c.want_dx = n->src[0]->grad && !hpmli_conv_is_1x1(&c);
    if (c.want_dx) hpmli_parallel(run->ctx, c.groups * panels, hpmli_conv_pack_task, &c);
    hpmli_parallel(run->ctx, c.sums, c.by_channels ? hpmli_conv_copy_task : hpmli_conv_back_task, &c);
    if (c.by_channels && c.want_dw) hpmli_parallel(run->ctx, panels, hpmli_conv_dw_task, &c);
    if (c.by_channels && c.want_dx)
        hpmli_parallel(run->ctx, (c.B - 1) / HPMLI_CONV_IMAGES + 1, hpmli_conv_dx_task, &c);
    if (c.want_dw) hpmli_parallel(run->ctx, c.groups * panels, hpmli_conv_sum_parts_task, &c);
    for (int64_t p = 0; c.want_db && p < c.sums; p++)
        run->ctx->k->vaxpby(n->src[2]->grad, 1, c.sum_space + (p + 1) * c.sum_floats - hpmli_round_up(channels, 16),
                            p > 0 || n->accumulate[2] ? 1.0f : 0.0f, channels);
    if (n->src[0]->grad && hpmli_conv_is_1x1(&c)) hpmli_conv_1x1(&c, true);
}
HPMLI_OP(conv2d, HPMLI_OP_PRODUCT | HPMLI_OP_KEEPS_DZ | HPMLI_OP_SPLIT_OWN,
         HPMLI_NEED_BOTH | (n->attr.conv.act != HPML_ACT_NONE ? HPMLI_NEED_OUT : 0),
         hpmli_flops_product(n, back, n->src[1]->stride[0]), hpmli_conv2d_pass(run, n), hpmli_conv2d_back(run, n));

// ---------------------------------------------------------------------------------------------------------------------
// >>pool   max, average and global pooling
// ---------------------------------------------------------------------------------------------------------------------
/* Pooling: a task is a plane (a channel of an image) or, in NHWC, an image. Max saves the position of each window's
   maximum for the backward pass; average divides by the number of the window's pixels that lie in the image. */
HPMLI_FN hpml_tensor *hpmli_pool_record(hpml_tensor *x, hpml_op op, int32_t kh, int32_t kw, int32_t stride,
                                        int32_t padding)
{
    hpml_attr a;
    int64_t   shape[4];
    if (!hpmli_recordable(1, &x)) return NULL;
    if (hpmli_image_foreign(x))
        return hpml_to_layout(hpmli_pool_record(hpml_to_layout(x, HPML_NCHW), op, kh, kw, stride, padding), HPML_NHWC);
    if (stride == 0) stride = kh;
    memset(&a, 0, sizeof a);
    for (int i = 0; i < 2; i++) {
        a.conv.kernel[i]   = i ? kw : kh;
        a.conv.stride[i]   = stride;
        a.conv.padding[i]  = padding;
        a.conv.dilation[i] = 1;
    }
    if (x->ndim != 4 || kh < 1 || kw < 1 || stride < 1 || padding < 0 || padding > kh / 2 || padding > kw / 2 ||
        padding > INT16_MAX || hpmli_conv_size(x, &a, 0) < 1 || hpmli_conv_size(x, &a, 1) < 1)
        return hpmli_null(x->ctx, HPML_ERR_SHAPE, "%s: input %s, kernel %dx%d, stride %d, padding %d; expected (B, C, "
                          "H, W), a kernel that fits and padding of at most half of it", hpml_op_name(op),
                          hpmli_describe(x), kh, kw, stride, padding);
    hpmli_image_shape(x, hpmli_image(x, 0), hpmli_conv_size(x, &a, 0), hpmli_conv_size(x, &a, 1), shape);
    hpml_node *n = hpmli_node_create(op, NULL, 1, &x, 4, shape);
    n->attr = a;
    if (op == HPML_OP_MAX_POOL2D) n->saved_bytes = (size_t)hpml_tensor_count(n->out) * sizeof(int32_t);
    return n->out;
}
HPML_API hpml_tensor *hpml_max_pool2d(hpml_tensor *x, int32_t kernel, int32_t stride, int32_t padding)
{
    return hpmli_pool_record(x, HPML_OP_MAX_POOL2D, kernel, kernel, stride, padding);
}
HPML_API hpml_tensor *hpml_avg_pool2d(hpml_tensor *x, int32_t kernel, int32_t stride, int32_t padding)
{
    return hpmli_pool_record(x, HPML_OP_AVG_POOL2D, kernel, kernel, stride, padding);
}
HPML_API hpml_tensor *hpml_global_avg_pool2d(hpml_tensor *x)
{
    bool         image = x && x->ndim == 4; /* else hpmli_pool_record reports the error */
    int32_t      kh = image ? (int32_t)hpmli_image(x, 1) : 1;
    int32_t      kw = image ? (int32_t)hpmli_image(x, 2) : 1;
    hpml_tensor *y = hpmli_pool_record(x, HPML_OP_AVG_POOL2D, kh, kw, 1, 0);
    return y ? hpml_reshape_2d(y, y->shape[0], hpmli_image(y, 0)) : NULL;
}

/* Sets [*from, *to) to the rows (i 0) or columns (i 1) of the image that window number o of that dimension covers. */
HPMLI_FN void hpmli_window(const hpml_node *n, int i, int64_t o, int64_t *from, int64_t *to)
{
    int64_t at = o * n->attr.conv.stride[i] - n->attr.conv.padding[i], end = at + n->attr.conv.kernel[i];
    *from = at > 0 ? at : 0;
    *to   = hpmli_min(end, hpmli_image(n->src[0], 1 + i));
}

/* Max-pools a plane (channel of an image) by 2 x 2 windows, stride 2; a kernel does a row and saves which pixel won. */
HPMLI_FN void hpmli_max_pool_2x2(const hpmli_work *w, int64_t plane)
{
    const hpml_tensor *x = w->n->src[0], *y = w->n->out;
    int64_t            H = x->shape[2], W = x->shape[3], OH = y->shape[2], OW = y->shape[3];
    for (int64_t row = 0; row < OH; row++) {
        int64_t from = (plane * H + row * 2) * W, to = (plane * OH + row) * OW;
        float  *won  = (float *)w->n->saved + to;
        if (w->back) w->k->max_pool_row_back(x->grad + from, won, y->grad + to, W, OW, w->n->accumulate[0]);
        else w->k->max_pool_row(y->data + to, won, x->data + from, W, OW);
    }
}

/* Pools a plane (a channel of an image). Backward adds dy at the saved places of maxima, or spreads it over windows. */
HPMLI_FN void hpmli_pool_plane(const hpmli_work *w, int64_t plane, int thread HPMLI_UNUSED)
{
    const hpml_node *n = w->n;
    const int32_t   *kernel = n->attr.conv.kernel;
    bool     max = n->op == HPML_OP_MAX_POOL2D;
    int64_t  H = n->src[0]->shape[2], W = n->src[0]->shape[3], r0, r1, c0, c1;
    int64_t  OW = n->out->shape[3], size = n->out->shape[2] * OW;
    int32_t *at = max ? (int32_t *)n->saved + plane * size : NULL; /* where each maximum is */
    float   *x  = (w->back ? n->src[0]->grad : n->src[0]->data) + plane * H * W;
    float   *y  = (w->back ? n->out->grad : n->out->data) + plane * size;
    bool     halves = max && kernel[0] == 2 && kernel[1] == 2 && n->attr.conv.stride[0] == 2;
    halves = halves && n->attr.conv.padding[0] == 0;
    if (w->back && !n->accumulate[0] && (!halves || H % 2 || W % 2)) memset(x, 0, (size_t)(H * W) * sizeof(float));
    if (halves) hpmli_max_pool_2x2(w, plane);
    for (int64_t o = 0; !halves && o < size; o++) {
        double sum = 0;
        if (max && w->back) {
            x[at[o]] += y[o];
            continue;
        }
        hpmli_window(n, 0, o / OW, &r0, &r1);
        hpmli_window(n, 1, o % OW, &c0, &c1);
        int64_t best  = r0 * W + c0;
        float   share = max ? 0 : 1 / (float)((r1 - r0) * (c1 - c0));
        for (int64_t r = r0; r < r1; r++)
            if (w->back) w->k->vscale_add(x + r * W + c0, x + r * W + c0, 1, share * y[o], c1 - c0);
            else if (!max) sum += (double)w->k->vsum(x + r * W + c0, c1 - c0);
            else
                for (int64_t c = c0; c < c1; c++)
                    if (HPMLI_MAX_OR_NAN(x[r * W + c], x[best])) best = r * W + c;
        if (max) at[o] = (int32_t)best;
        if (!w->back) y[o] = max ? x[best] : (float)sum * share;
    }
}

/* Pools one NHWC image, all channels of a window together; for maxima keeps the index of each maximum's pixel. */
HPMLI_FN void hpmli_pool_image(const hpmli_work *w, int64_t image, int thread HPMLI_UNUSED)
{
    const hpml_node   *n = w->n;
    const hpml_tensor *x = n->src[0], *y = n->out;
    bool     max = n->op == HPML_OP_MAX_POOL2D;
    int64_t  C = x->shape[3], W = x->shape[2], pixels = x->shape[1] * W, size = y->shape[1] * y->shape[2];
    int64_t  r0, r1, c0, c1;
    int32_t *at   = max ? (int32_t *)n->saved + image * size * C : NULL;
    float   *from = (w->back ? x->grad : x->data) + image * pixels * C;
    float   *to   = (w->back ? y->grad : y->data) + image * size * C;
    if (w->back && !n->accumulate[0]) memset(from, 0, (size_t)(pixels * C) * sizeof(float));
    for (int64_t o = 0; o < size; o++, at += max ? C : 0, to += C) {
        for (int64_t c = 0; max && w->back && c < C; c++) from[at[c] * C + c] += to[c];
        if (max && w->back) continue;
        hpmli_window(n, 0, o / y->shape[2], &r0, &r1);
        hpmli_window(n, 1, o % y->shape[2], &c0, &c1);
        float share = max ? 0 : 1 / (float)((r1 - r0) * (c1 - c0));
        for (int64_t c = 0; max && c < C; c++) at[c] = (int32_t)(r0 * W + c0);
        if (max) memcpy(to, from + (r0 * W + c0) * C, (size_t)C * sizeof(float));
        for (int64_t r = r0; r < r1; r++) {
            if (!max && !w->back) w->k->vsum_rows(to, from + (r * W + c0) * C, c1 - c0, C, r > r0);
            for (int64_t p = r * W + c0; w->back && p < r * W + c1; p++) w->k->vaxpby(from + p * C, share, to, 1, C);
            for (int64_t p = r * W + c0; max && p < r * W + c1; p++)
                for (int64_t c = 0; c < C; c++) {
                    bool won = HPMLI_MAX_OR_NAN(from[p * C + c], to[c]);
                    at[c] = won ? (int32_t)p : at[c];
                    to[c] = won ? from[p * C + c] : to[c];
                }
        }
        if (!max && !w->back) w->k->vscale_add(to, to, share, 0, C);
    }
}

HPMLI_FN void hpmli_pooling(const hpml_run *run, hpml_node *n, bool back)
{
    bool nhwc = n->out->layout == HPML_NHWC;
    hpmli_for_each_parallel(run, n, back, n->out->shape[0] * (nhwc ? 1 : n->out->shape[1]), 1,
                            nhwc ? hpmli_pool_image : hpmli_pool_plane);
}
HPMLI_OP(max_pool2d, HPMLI_OP_SPLIT_PLANE, 0, hpmli_flops_pointwise(n, back), hpmli_pooling(run, n, false),
         hpmli_pooling(run, n, true));
HPMLI_OP(avg_pool2d, HPMLI_OP_SPLIT_PLANE, 0, hpmli_flops_pointwise(n, back), hpmli_pooling(run, n, false),
         hpmli_pooling(run, n, true));

// ---------------------------------------------------------------------------------------------------------------------
// >>norm   batch normalization; softmax, layernorm, rmsnorm: row by row
// ---------------------------------------------------------------------------------------------------------------------
#define HPMLI_NORM_ROWS 32 /* rows of a block in the backward pass of layernorm and rmsnorm */
/* Saved by a normalization for each channel or row: its mean, as the sum of two floats, mean + rest, and rstd = 1 /
   sqrt(variance + eps). */
typedef struct hpmli_centre { float mean, rstd, rest; } hpmli_centre;

/* Batch normalization, for each channel of N = B H W numbers: xhat = (x - mean) rstd, y = gamma xhat + beta, and a relu
   if requested. Training uses the statistics of the batch and moves the running ones, which evaluation uses. Backward,
   with s1 = sum of dy and s2 = sum of dy xhat:
       dx = gamma rstd (dy - s1 / N - xhat s2 / N),  dgamma = s2,  dbeta = s1.
   The mean is stored as the sum of two floats, mean + rest, and x - mean is computed as (x - mean) - rest, so that
   numbers that are far from 0 and close to each other lose no digits. A first pass over x computes `mean`; a second
   pass computes `rest`, the mean of x - mean. One task is one channel: statistics, then normalization. If the ranks
   share a batch, the sums of all channels are added up over the ranks in between. Sources of the node: x, gamma, beta
   (NULL without affine), running mean, running variance. */
HPMLI_FN hpml_tensor *hpmli_norm_record(hpml_tensor *x, const hpml_norm_desc *desc, hpml_op op)
{
    const bool     batch = op == HPML_OP_BATCHNORM;
    hpml_norm_desc d;
    hpml_tensor   *src[5] = { x, NULL, NULL, NULL, NULL };
    if (!hpmli_recordable(1, &x) || !HPMLI_COPY_DESC(x->ctx, "norm", d, desc)) return NULL;
    if (batch && x->ndim == 4 && x->layout == HPML_NHWC)
        return hpml_to_layout(hpmli_norm_record(hpml_to_layout(x, HPML_NCHW), desc, op), HPML_NHWC);
    if (d.eps == 0) d.eps = 1e-5f;
    if (d.momentum == 0) d.momentum = 0.1f;
    if (!(d.eps > 0 && d.eps < 1e30f && d.momentum > 0 && d.momentum <= 1))
        return hpmli_null(x->ctx, HPML_ERR_ARGUMENT, "norm \"%s\": eps is %g, expected 0 or more; momentum is %g, "
                          "expected 0 to 1", d.name ? d.name : "", (double)d.eps, (double)d.momentum);
    if (batch && ((x->ndim != 2 && x->ndim != 4) || (d.activation != HPML_ACT_NONE && d.activation != HPML_ACT_RELU)))
        return hpmli_null(x->ctx, HPML_ERR_SHAPE, "batchnorm \"%s\": input is %s, expected (B, C) or (B, C, H, W), "
                          "activation NONE or RELU", d.name ? d.name : "", hpmli_describe(x));
    if (x->ndim < 2)
        return hpmli_null(x->ctx, HPML_ERR_SHAPE, "%s of \"%s\": needs (.., features)", hpml_op_name(op), x->name);
    const char *name = hpmli_layer_name(x->ctx, d.name, hpml_op_name(op));
    int64_t     cols = x->shape[batch ? 1 : x->ndim - 1], rows = hpml_tensor_count(x) / cols;
    int64_t     blocks = (rows + HPMLI_NORM_ROWS - 1) / HPMLI_NORM_ROWS;
    int64_t     whole[HPML_MAX_DIMS], *c = &whole[batch ? 1 : x->ndim - 1]; /* parameters: one number a column */
    hpmli_part  part = { batch ? (hpml_axis)x->split[1] : HPML_AXIS_DATA, 0, x->sections };
    hpml_param_whole(x, whole);
    if (!d.no_affine) src[1] = hpmli_layer_part(x->ctx, name, "weight", HPML_INIT_ONES, 0, 1, c, &part);
    if (!d.no_affine && op != HPML_OP_RMSNORM)
        src[2] = hpmli_layer_part(x->ctx, name, "bias", HPML_INIT_ZEROS, 0, 1, c, &part);
    if (batch) src[3] = hpmli_layer_part(x->ctx, name, "running_mean", HPML_INIT_ZEROS, 0, 1, c, &part);
    if (batch) src[4] = hpmli_layer_part(x->ctx, name, "running_var", HPML_INIT_ONES, 0, 1, c, &part);
    for (int i = 3; i < 5 && src[i]; i++) {
        src[i]->param->buffer = true;
        src[i]->needs_grad    = false;
    }
    hpml_node *n = hpmli_node_create(op, name, batch ? 5 : 3, src, x->ndim, x->shape);
    n->attr.norm.eps      = d.eps;
    n->attr.norm.momentum = d.momentum;
    n->attr.norm.act = batch ? d.activation : HPML_ACT_NONE;
    n->saved_bytes   = (size_t)(batch ? cols : rows) * sizeof(hpmli_centre);
    n->scratch_bytes = batch ? (size_t)(2 * cols + 1) * sizeof(double) : (size_t)(blocks * 2 * cols) * sizeof(float);
    return n->out;
}
HPML_API hpml_tensor *hpml_batchnorm(hpml_tensor *x, const hpml_norm_desc *desc)
{
    return hpmli_norm_record(x, desc, HPML_OP_BATCHNORM);
}
HPML_API hpml_tensor *hpml_layernorm(hpml_tensor *x, const hpml_norm_desc *desc)
{
    return hpmli_norm_record(x, desc, HPML_OP_LAYERNORM);
}
HPML_API hpml_tensor *hpml_rmsnorm(hpml_tensor *x, const hpml_norm_desc *desc)
{
    return hpmli_norm_record(x, desc, HPML_OP_RMSNORM);
}

typedef struct hpmli_bn_job {
    const hpml_run      *run;
    const hpmli_kernels *k;
    hpml_node           *n;
    int64_t              B, C, P; /* samples, channels, pixels of a plane */
    double              *sums;    /* (C, 2) two sums of each channel, then N: of this rank or of all ranks */
    bool                 backward;
    bool                 measure, apply; /* compute the sums; use the sums */
} hpmli_bn_job;

/* Computes the sums of x and of (x - mean)^2 over channel c. `mean` is rounded to float, so both sums are computed in
   double from the differences x - mean. */
HPMLI_FN void hpmli_bn_measure(const hpmli_bn_job *j, int64_t c)
{
    const float *x = j->n->src[0]->data + c * j->P;
    double       N = (double)(j->B * j->P), sum = 0, about[2] = { 0, 0 };
    for (int64_t b = 0; b < j->B; b++) sum += j->k->vsum_wide(x + b * j->C * j->P, j->P);
    float mean = (float)(N > 0 ? sum / N : 0);
    for (int64_t b = 0; b < j->B; b++) j->k->vmoments(about, NULL, x + b * j->C * j->P, mean, j->P);
    double square = N > 0 ? about[1] - about[0] * about[0] / N : 0;
    j->sums[2 * c]     = (double)mean * N + about[0];
    j->sums[2 * c + 1] = square < 0 ? 0 : square; /* a NaN stays a NaN: it is not < 0 */
}

/* Normalizes channel c and, in training, moves its running mean and variance towards those of the batch. */
HPMLI_FN void hpmli_bn_apply(const hpmli_bn_job *j, int64_t c)
{
    const hpml_node *n     = j->n;
    hpmli_centre    *saved = (hpmli_centre *)n->saved + c;
    float           *running_mean = n->src[3]->data + c, *running_var = n->src[4]->data + c;
    float            a, b, m = n->attr.norm.momentum;
    double           N = j->sums[2 * j->C], square = j->sums[2 * c + 1];
    double           mean = (double)*running_mean, var = (double)*running_var;
    if (j->run->train) {
        mean          = j->sums[2 * c] / N;
        var           = square / N;
    }
    if (j->run->train && !j->run->again) {
        *running_mean = (1 - m) * *running_mean + m * (float)mean;
        *running_var  = (1 - m) * *running_var + m * (float)(square / (N > 1 ? N - 1 : 1));
    }
    saved->mean = (float)mean;
    saved->rest = (float)(mean - (double)saved->mean);
    saved->rstd = (float)(1 / sqrt(var + (double)n->attr.norm.eps));
    a = saved->rstd * (n->src[1] ? n->src[1]->data[c] : 1);
    b = (n->src[2] ? n->src[2]->data[c] : 0) - saved->rest * a;
    for (int64_t i = 0; i < j->B; i++) {
        const float *x = n->src[0]->data + (i * j->C + c) * j->P;
        float       *y = n->out->data + (i * j->C + c) * j->P;
        j->k->vcentred(y, x, saved->mean, a, b, n->attr.norm.act == HPML_ACT_RELU, j->P);
    }
}

/* Computes s1 = sum of dy and s2 = sum of dy xhat of channel c: the gradients of beta and gamma, for this rank. */
HPMLI_FN void hpmli_bn_back_measure(const hpmli_bn_job *j, int64_t c)
{
    const hpml_node *n = j->n;
    hpmli_centre     at = ((const hpmli_centre *)n->saved)[c];
    double           sums[2] = { 0, 0 }, s1, s2; /* sums of dy and of dy (x - mean), without `rest` */
    int64_t          step = j->C * j->P, first = c * j->P;
    for (int64_t i = 0; i < j->B; i++) {
        float *dy = n->out->grad + first + i * step;
        if (n->attr.norm.act == HPML_ACT_RELU)
            j->k->act_backward(HPML_ACT_RELU, 0, dy, dy, NULL, n->out->data + first + i * step, j->P, 0);
        j->k->vmoments(sums, dy, n->src[0]->data + first + i * step, at.mean, j->P);
    }
    s1 = sums[0];
    s2 = (double)at.rstd * (sums[1] - (double)at.rest * s1);
    if (n->src[1] && n->src[1]->grad) n->src[1]->grad[c] = (n->accumulate[1] ? n->src[1]->grad[c] : 0) + (float)s2;
    if (n->src[2] && n->src[2]->grad) n->src[2]->grad[c] = (n->accumulate[2] ? n->src[2]->grad[c] : 0) + (float)s1;
    j->sums[2 * c]     = s1;
    j->sums[2 * c + 1] = s2;
}

/* Computes dx, the gradient of the input, of channel c from s1 = sum of dy and s2 = sum of dy xhat. */
HPMLI_FN void hpmli_bn_back_apply(const hpmli_bn_job *j, int64_t c)
{
    const hpml_node *n = j->n;
    hpmli_centre     at = ((const hpmli_centre *)n->saved)[c];
    double           N = j->sums[2 * j->C], s1 = j->sums[2 * c], s2 = j->sums[2 * c + 1];
    double           a = (double)at.rstd * (n->src[1] ? (double)n->src[1]->data[c] : 1);
    int64_t          step = j->C * j->P, first = c * j->P;
    if (!n->src[0]->grad) return;
    if (!j->run->train) s1 = s2 = 0; /* the running statistics do not depend on x */
    double per_x = (double)at.rstd * s2; /* xhat s2 = (x - mean - rest) per_x */
    for (int64_t i = 0; i < j->B; i++)
        j->k->vaxpbypc(n->src[0]->grad + first + i * step, (float)a, n->out->grad + first + i * step,
                       (float)(-a * per_x / N), n->src[0]->data + first + i * step, at.mean,
                       (float)(a * ((double)at.rest * per_x - s1) / N), j->P, n->accumulate[0]);
}

HPMLI_FN void hpmli_bn_task(void *arg, int64_t c, int thread HPMLI_UNUSED)
{
    const hpmli_bn_job *j = (const hpmli_bn_job *)arg;
    if (j->measure && j->backward) hpmli_bn_back_measure(j, c);
    else if (j->measure) hpmli_bn_measure(j, c);
    if (j->apply && j->backward) hpmli_bn_back_apply(j, c);
    else if (j->apply) hpmli_bn_apply(j, c);
}

/* Converts each channel's sum of squared differences to this rank's mean to a sum of squares (sign 1), because only
   sums of squares can be added up over ranks, or back (sign -1); a double has digits enough for that. */
HPMLI_FN void hpmli_bn_recenter(const hpmli_bn_job *j, double sign)
{
    double *s = j->sums, N = s[2 * j->C];
    for (int64_t c = 0; c < j->C && !j->backward && N > 0; c++, s += 2) s[1] = fmax(s[1] + sign * s[0] * s[0] / N, 0);
}

HPMLI_FN hpml_status hpmli_bn_run(const hpml_run *run, hpml_node *n, bool backward)
{
    const int64_t *y = n->out->shape; /* absent dimensions are 1 */
    bool           measure = run->train || backward, shared = run->sum && run->train;
    hpmli_bn_job   j = { run, run->ctx->k, n, run->idle ? 0 : y[0], y[1], y[2] * y[3], (double *)n->scratch,
                         backward, measure, !shared };
    j.sums[2 * j.C]  = (double)(j.B * j.P);
    hpmli_parallel(run->ctx, j.C, hpmli_bn_task, &j);
    if (!shared) return HPML_OK;
    hpmli_bn_recenter(&j, 1);
    hpml_status status = run->sum(run->sum_user, j.sums, 2 * j.C + 1);
    hpmli_bn_recenter(&j, -1);
    j.measure = false;
    j.apply   = true;
    if (status == HPML_OK) hpmli_parallel(run->ctx, j.C, hpmli_bn_task, &j);
    return status;
}
HPMLI_OP(batchnorm, HPMLI_OP_JOINS_BATCH | HPMLI_OP_SPLIT_PLANE,
         HPMLI_NEED_BOTH | (n->attr.norm.act == HPML_ACT_RELU ? HPMLI_NEED_OUT : 0), hpmli_flops_pointwise(n, back),
         return hpmli_bn_run(run, n, false), return hpmli_bn_run(run, n, true));

/* softmax: y_i = exp(x_i - max) / sum, with sum = sum over j of exp(x_j - max). log_softmax: y_i = (x_i - max) -
   log(sum), in this order, because max + log(sum) would be rounded to the precision of max. Backward: dx = y (dy - <dy,
   y>) for softmax, dx = dy - exp(y) sum(dy) for log_softmax. Rows are independent. */
HPMLI_FN hpml_tensor *hpmli_softmax_record(hpml_op op, hpml_tensor *x)
{
    if (!hpmli_recordable(1, &x)) return NULL;
    if (x->ndim < 1)
        return hpmli_null(x->ctx, HPML_ERR_SHAPE, "%s of \"%s\": a scalar has no last dimension",
                          hpml_op_name(op), x->name);
    return hpmli_node_create(op, NULL, 1, &x, x->ndim, x->shape)->out;
}
HPML_API hpml_tensor *hpml_softmax(hpml_tensor *x) { return hpmli_softmax_record(HPML_OP_SOFTMAX, x); }
HPML_API hpml_tensor *hpml_log_softmax(hpml_tensor *x) { return hpmli_softmax_record(HPML_OP_LOG_SOFTMAX, x); }

HPMLI_FN void hpmli_softmax_row(const hpmli_work *w, int64_t row, int thread HPMLI_UNUSED)
{
    const float *x   = w->n->src[0]->data + row * w->cols; /* a row: (cols) */
    float       *y   = w->n->out->data + row * w->cols;    /* a row: (cols) */
    float        max = w->k->vmax(x, w->cols), sum = w->k->vexp_sum(y, x, max, w->cols);
    if (w->n->op == HPML_OP_LOG_SOFTMAX) w->k->vcentred(y, x, max, 1, -logf(sum), false, w->cols);
    else w->k->vscale_add(y, y, 1 / sum, 0, w->cols);
}

HPMLI_FN void hpmli_softmax_back_row(const hpmli_work *w, int64_t row, int thread HPMLI_UNUSED)
{
    const float *y = w->n->out->data + row * w->cols, *dy = w->n->out->grad + row * w->cols;
    float       *dx = w->n->src[0]->grad + row * w->cols, d[HPMLI_PIECE];
    bool         log = w->n->op == HPML_OP_LOG_SOFTMAX;
    float        s   = log ? w->k->vsum(dy, w->cols) : w->k->vdot(dy, y, w->cols);
    HPMLI_PIECES(i, c, w->cols) {
        if (log) {
            w->k->act_forward(HPML_ACT_EXP, 0, d, y + i, c);
            w->k->vaxpby(d, 1, dy + i, -s, c);
        } else {
            w->k->vscale_add(d, dy + i, 1, -s, c);
            w->k->vmul(d, d, y + i, c);
        }
        w->k->vaxpby(dx + i, 1, d, w->n->accumulate[0] ? 1.0f : 0.0f, c);
    }
}
HPMLI_OP(softmax, HPMLI_OP_SPLIT_ROWS, HPMLI_NEED_OUT, hpmli_flops_pointwise(n, back),
         hpmli_for_each_row(run, n, false, hpmli_softmax_row),
         hpmli_for_each_row(run, n, true, hpmli_softmax_back_row));
HPMLI_OP(log_softmax, HPMLI_OP_SPLIT_ROWS, HPMLI_NEED_OUT, hpmli_flops_pointwise(n, back),
         hpmli_for_each_row(run, n, false, hpmli_softmax_row),
         hpmli_for_each_row(run, n, true, hpmli_softmax_back_row));

/* layernorm of a row x: xhat = (x - mean) rstd; y = xhat gamma + beta. With g = dy gamma:
       dx = rstd (g - mean(g) - xhat mean(g xhat)),  dgamma = sum over rows of dy xhat,  dbeta = sum over rows of dy.
   rmsnorm is the same with mean = 0 and without the term mean(g). Backward works on blocks of rows; each block computes
   a partial sum of dgamma and dbeta, and these sums are added in order. Sources: x, gamma, beta (or NULL). */
HPMLI_FN void hpmli_norm_row(const hpmli_work *w, int64_t row, int thread HPMLI_UNUSED)
{
    const hpml_node *n = w->n;
    const float     *x = n->src[0]->data + row * w->cols; /* a row: (cols) */
    float           *y = n->out->data + row * w->cols;
    hpmli_centre    *saved = (hpmli_centre *)n->saved + row;
    double           C = (double)w->cols, about[2] = { 0, 0 }, rest = 0, var;
    saved->mean = n->op == HPML_OP_LAYERNORM ? (float)(w->k->vsum_wide(x, w->cols) / C) : 0;
    w->k->vmoments(about, NULL, x, saved->mean, w->cols);
    if (n->op == HPML_OP_LAYERNORM) rest = about[0] / C;
    var = about[1] / C - rest * rest;
    if (var < 0) var = 0; /* a NaN stays a NaN: it is not < 0 */
    saved->rest = (float)rest;
    saved->rstd = (float)(1 / sqrt(var + (double)n->attr.norm.eps));
    w->k->vcentred(y, x, saved->mean, saved->rstd, -saved->rest * saved->rstd, false, w->cols);
    if (n->src[1]) w->k->vmul(y, y, n->src[1]->data, w->cols);
    if (n->src[2]) w->k->vadd(y, y, n->src[2]->data, w->cols);
}

/* Computes dx of one row, and adds its terms to `part`, the sums of dgamma and dbeta of its block of rows. */
HPMLI_FN void hpmli_norm_back_row(const hpmli_work *w, int64_t row, int thread HPMLI_UNUSED)
{
    const hpml_node *n     = w->n;
    float           *part  = (float *)n->scratch + row / HPMLI_NORM_ROWS * 2 * w->cols, g[HPMLI_PIECE], h[HPMLI_PIECE];
    const float     *gamma = n->src[1] ? n->src[1]->data : NULL;
    const float     *x = n->src[0]->data + row * w->cols, *dy = n->out->grad + row * w->cols;
    hpmli_centre     at  = ((const hpmli_centre *)n->saved)[row];
    double           sum = 0, dot = 0;
    if (row % HPMLI_NORM_ROWS == 0) w->k->vfill(part, 0, 2 * w->cols);
    HPMLI_PIECES(i, c, w->cols) { /* sums for mean(g) and mean(g xhat); adds the row to dgamma and dbeta */
        const float *gi = dy + i;
        w->k->vcentred(h, x + i, at.mean, at.rstd, -at.rest * at.rstd, false, c); /* xhat */
        if (gamma) {
            w->k->vmul(g, dy + i, gamma + i, c);
            gi = g;
        }
        sum += (double)w->k->vsum(gi, c);
        dot += (double)w->k->vdot(gi, h, c);
        w->k->vmul(h, h, dy + i, c);
        w->k->vadd(part + i, part + i, h, c);
        w->k->vadd(part + w->cols + i, part + w->cols + i, dy + i, c);
    }
    if (!n->src[0]->grad) return;
    sum = n->op == HPML_OP_LAYERNORM ? sum / (double)w->cols : 0;
    dot = dot / (double)w->cols;
    HPMLI_PIECES(i, c, w->cols) { /* dx = rstd g - rstd^2 dot (x - mean) + rstd (rest rstd dot - sum) */
        const float *gi = dy + i;
        if (gamma) {
            w->k->vmul(g, dy + i, gamma + i, c);
            gi = g;
        }
        w->k->vaxpbypc(n->src[0]->grad + row * w->cols + i, at.rstd, gi, (float)(-dot) * at.rstd * at.rstd, x + i,
                       at.mean, at.rstd * (float)(dot * (double)(at.rest * at.rstd) - sum), c, n->accumulate[0]);
    }
}

HPMLI_FN void hpmli_norm_back(const hpml_run *run, hpml_node *n)
{
    int64_t cols = n->out->shape[n->out->ndim - 1], rows = hpml_tensor_count(n->out) / cols;
    hpmli_for_each_parallel(run, n, true, rows, HPMLI_NORM_ROWS, hpmli_norm_back_row);
    for (int s = 1; s < 3; s++) {
        if (!n->src[s] || !n->src[s]->grad) continue;
        if (!n->accumulate[s]) run->ctx->k->vfill(n->src[s]->grad, 0, cols);
        for (int64_t b = 0; b * HPMLI_NORM_ROWS < rows; b++)
            run->ctx->k->vadd(n->src[s]->grad, n->src[s]->grad, (float *)n->scratch + (2 * b + s - 1) * cols, cols);
    }
}
HPMLI_OP(layernorm, HPMLI_OP_SPLIT_ROWS, HPMLI_NEED_BOTH, hpmli_flops_pointwise(n, back),
         hpmli_for_each_row(run, n, false, hpmli_norm_row), hpmli_norm_back(run, n));
HPMLI_OP(rmsnorm, HPMLI_OP_SPLIT_ROWS, HPMLI_NEED_BOTH, hpmli_flops_pointwise(n, back),
         hpmli_for_each_row(run, n, false, hpmli_norm_row), hpmli_norm_back(run, n));

// ---------------------------------------------------------------------------------------------------------------------
// >>dropout   dropout and embedding
// ---------------------------------------------------------------------------------------------------------------------
/* Drops element i if word i of the random stream of this step and node is below p 2^32. Both passes compute the mask;
   neither stores it. i counts from the first sample of the global batch, in the whole of a split tensor, so that masks
   are the same on any rank. */
HPML_API hpml_tensor *hpml_dropout(hpml_tensor *x, float p)
{
    if (!hpmli_recordable(1, &x)) return NULL;
    if (!(p >= 0 && p < 1))
        return hpmli_null(x->ctx, HPML_ERR_ARGUMENT, "dropout of \"%s\": p is %g, expected 0 <= p < 1", x->name,
                          (double)p);
    if (hpmli_is_split(x) && !x->ctx->backend->host)
        return hpmli_null(x->ctx, HPML_ERR_UNSUPPORTED, "dropout: %s is %s, and on \"%s\" masks are those of whole "
                          "tensors; record dropout after the layer that joins the parts", hpmli_describe(x),
                          hpmli_split_text(x), x->ctx->backend->name);
    hpml_node *n = hpmli_node_create(HPML_OP_DROPOUT, NULL, 1, &x, x->ndim, x->shape);
    n->attr.dropout.p = p;
    return n->out;
}

HPMLI_FN void hpmli_dropout_piece(const hpmli_work *w, int64_t piece, int thread HPMLI_UNUSED)
{
    const hpml_run *run = w->run;
    hpml_tensor    *x = w->n->src[0], *y = w->n->out;
    const float    *from  = w->back ? y->grad : x->data;
    float          *to    = w->back ? x->grad : y->data, p = w->n->attr.dropout.p, scale = 1 / (1 - p);
    int64_t         count = hpml_tensor_count(y), sample = y->batch_rows * (hpml_param_whole(y, NULL) / y->shape[0]);
    int64_t         at = piece * HPMLI_PIECE, c = hpmli_min(count - at, HPMLI_PIECE), run_length;
    uint64_t        stream = run->step << 24 ^ (uint64_t)w->n->state->number ^ HPMLI_STREAM_DROPOUT;
    uint32_t        words[HPMLI_PIECE], least = (uint32_t)((double)p * 4294967296.0);
    bool            add = w->back && w->n->accumulate[0];
    if (!run->train || p == 0) {
        if (from != to || add) w->k->vaxpby(to + at, 1, from + at, add ? 1.0f : 0.0f, c);
        return;
    }
    for (int64_t i = 0; i < c; i += run_length) { /* the words of the elements' places in the whole */
        int64_t place = hpmli_whole_place(y, at + i, &run_length);
        w->k->random(HPMLI_WORDS, words + i, run->ctx->seed, stream,
                     run->sample * (uint64_t)sample + (uint64_t)place, hpmli_min(run_length, c - i));
    }
    for (int64_t i = 0; i < c; i++) {
        float v = words[i] >= least ? from[at + i] * scale : 0;
        to[at + i] = add ? to[at + i] + v : v;
    }
}
HPMLI_WORK_OP(dropout, HPMLI_OP_SPLIT_ANY, HPMLI_INPLACE, hpmli_flops_pointwise(n, back),
              (hpml_tensor_count(n->out) + HPMLI_PIECE - 1) / HPMLI_PIECE, HPMLI_GRAIN / HPMLI_PIECE, dropout_piece,
              dropout_piece);

HPMLI_FN hpml_status hpmli_embedding_pass(const hpml_run *run, hpml_node *n)
{
    const int32_t   *token = (const int32_t *)n->src[0]->raw; /* rows of the table */
    const int64_t    count = hpml_tensor_count(n->src[0]), width = n->src[1]->shape[1];
    hpmli_vocabulary v     = hpmli_vocabulary_of(n, n->src[1]->shape[0]);
    for (int64_t i = 0; i < count; i++) {
        int64_t row = token[i] - v.first;
        float  *y   = n->out->data + i * width;
        if (token[i] < 0 || token[i] >= v.whole)
            return hpmli_fail(run->ctx, HPML_ERR_LABEL, "embedding \"%s\": token %lld is %d, expected 0 to %lld",
                              n->out->name, (long long)(n->state->first_index + i), token[i], (long long)v.whole - 1);
        if (row < 0 || row >= v.count) run->ctx->k->vfill(y, 0, width); /* another rank has the row */
        else memcpy(y, n->src[1]->data + row * width, (size_t)width * sizeof *y);
    }
    return v.group ? v.group->sum(v.group->user, n->out->data, count * width) : HPML_OK;
}

HPMLI_FN hpml_status hpmli_embedding_back(const hpml_run *run, hpml_node *n)
{
    const int32_t   *token = (const int32_t *)n->src[0]->raw;
    const int64_t    count = hpml_tensor_count(n->src[0]), width = n->src[1]->shape[1];
    hpmli_vocabulary v     = hpmli_vocabulary_of(n, n->src[1]->shape[0]);
    float           *dw    = n->src[1]->grad;
    hpmli_rows      *rows  = n->src[1]->state->rows;
    if (dw && !n->accumulate[1] && !v.group) hpmli_gradient_clear(n->src[1]);
    for (int64_t i = 0; dw && i < count; i++) {
        int64_t row = token[i] - v.first;
        if (row < 0 || row >= v.count) continue;
        if (rows) hpmli_rows_add(rows, token[i]);
        run->ctx->k->vadd(dw + row * width, dw + row * width, n->out->grad + i * width, width);
    }
    return HPML_OK;
}
HPMLI_OP(embedding, HPMLI_OP_INDEX_0 | HPMLI_OP_SPLIT_ANY, HPMLI_NEED_SRC(0), hpmli_flops_pointwise(n, back),
         return hpmli_embedding_pass(run, n), return hpmli_embedding_back(run, n));

/* Records y[i] = table[token[i]]; backward adds dy[i] to row token[i] of the table's gradient, in the order of i.
   Sources of the node: tokens, table. */
HPML_API hpml_tensor *hpml_embedding(hpml_tensor *tokens, int64_t vocabulary, int64_t width,
                                     const hpml_embedding_desc *desc)
{
    hpml_embedding_desc d;
    int64_t             table[2];
    hpml_tensor        *src[2];
    if (!hpmli_recordable(1, &tokens) || !HPMLI_COPY_DESC(tokens->ctx, "embedding", d, desc)) return NULL;
    if (tokens->dtype != HPML_DTYPE_I32 || tokens->ndim >= HPML_MAX_DIMS || vocabulary < 1 || width < 1)
        return hpmli_null(tokens->ctx, HPML_ERR_DTYPE, "embedding \"%s\": tokens are %s, expected i32 with at most %d "
                          "dimensions; table %lldx%lld", d.name ? d.name : "", hpmli_describe(tokens),
                          HPML_MAX_DIMS - 1, (long long)vocabulary, (long long)width);
    const char *name = hpmli_layer_name(tokens->ctx, d.name, "embedding");
    bool        parts = d.split != HPML_SPLIT_NONE && hpml_ctx_group(tokens->ctx, HPML_AXIS_TENSOR)->size > 1;
    hpmli_part  part = { parts ? HPML_AXIS_TENSOR : HPML_AXIS_DATA, 0, 1 };
    if ((int)d.split < 0 || d.split > HPML_SPLIT_OUT || (parts && d.sparse))
        return hpmli_null(tokens->ctx, HPML_ERR_UNSUPPORTED, "embedding \"%s\": .split %d%s; expected HPML_SPLIT_OUT, "
                          "by vocabulary, and then no .sparse", name ? name : "", (int)d.split,
                          d.sparse ? " with .sparse" : "");
    table[0] = vocabulary;
    table[1] = width;
    src[0]   = tokens;
    src[1]   = d.weight ? d.weight : hpmli_layer_part(tokens->ctx, name, "weight",
                   d.init == HPML_INIT_DEFAULT ? HPML_INIT_NORMAL : d.init,
                   d.init == HPML_INIT_DEFAULT ? 1.0f : d.init_scale, 2, table, &part);
    if (!hpmli_recordable(2, src)) return NULL;
    if (d.weight && !hpmli_shared_fits("embedding", name, src[1], table, &part)) return NULL;
    if (d.sparse && (!src[1]->param || !tokens->ctx->backend->host))
        return hpmli_null(tokens->ctx, HPML_ERR_UNSUPPORTED, "embedding \"%s\": .sparse is for parameters on the host, "
                          "the table is %s on the backend \"%s\"; leave it false", name, hpmli_describe(src[1]),
                          tokens->ctx->backend->name);
    if (d.sparse && !hpmli_rows_create(src[1])) return NULL;
    hpml_custom own = HPMLI_ZEROED; /* the op, where the vocabulary is split */
    own.name     = "embedding";
    own.forward  = hpmli_embedding_pass;
    own.backward = hpmli_embedding_back;
    own.keeps    = HPML_KEEP_SRC(0);
    own.ndim     = tokens->ndim + 1;
    memcpy(own.shape, tokens->shape, sizeof own.shape);
    own.shape[tokens->ndim] = width;
    if (!parts) return hpmli_node_create(HPML_OP_EMBEDDING, name, 2, src, own.ndim, own.shape)->out;
    hpml_tensor *y = hpmli_vocabulary_op(src, &own, src[1]->shape[0], 0, 0);
    if (y) y->name = name;
    hpmli_split_take(y, tokens->split, tokens->sections);
    return y;
}

// ---------------------------------------------------------------------------------------------------------------------
// >>sequence   multi-head attention; long short-term memory
// ---------------------------------------------------------------------------------------------------------------------
/* Multi-head attention. For each sample and head, with Q, K, V (T, D) and D = C / heads:
       S = scale Q K^T,  P = softmax of the rows of S (causal: row t has the columns 0 .. t),  O = P V.
   A scalar reference of the forward pass; q(t)[d] is number h D + d of position t in head h, k and v are C and 2 C
   numbers further:
       for (int t = 0; t < T; t++) {                         // query
           int keys = causal ? t + 1 : T; double p[T], o[D] = { 0 }, sum = 0, max = -INFINITY;
           for (int s = 0; s < keys; s++) {                  // key: scores
               p[s] = 0; for (int d = 0; d < D; d++) p[s] += scale * q(t)[d] * k(s)[d];
               max = fmax(max, p[s]);
           }
           for (int s = 0; s < keys; s++) sum += p[s] = exp(p[s] - max);
           for (int s = 0; s < keys; s++) for (int d = 0; d < D; d++) o[d] += p[s] / sum * v(s)[d];
           lse[t] = max + log(sum);                          // saved for the backward pass
       }
   The functions below do the same for a block of HPMLI_QUERIES queries at a time, with matrix products. Only this block
   of S is in memory, (64, T) numbers for each thread; saved is one number for each query, lse = log sum exp of its row
   of S, from which backward computes P again (Dao et al. 2022):
       P = exp(S - lse),  delta = row sums of dO O,  dP = dO V^T,  dS = scale P (dP - delta),
       dQ = dS K,  dK += dS^T Q,  dV += P^T dO.
   Backward goes from the last block to the first, because with a causal mask the last block attends to all keys: it
   overwrites dK and dV, and the other blocks add to them. One task is one sample and head. */
#define HPMLI_QUERIES 64 /* queries in a block, see the comment above */
HPML_API hpml_tensor *hpml_attention(hpml_tensor *qkv, const hpml_attention_desc *desc)
{
    hpml_attention_desc d;
    if (!hpmli_recordable(1, &qkv) || !HPMLI_COPY_DESC(qkv->ctx, "attention", d, desc)) return NULL;
    const int64_t C = qkv->shape[2] / 3, shape[3] = { qkv->shape[0], qkv->shape[1], C };
    const int32_t size = hpml_ctx_group(qkv->ctx, (hpml_axis)qkv->split[2])->size; /* ranks that share the heads */
    const bool fits = !qkv->split[2] || (d.heads % size == 0 && hpmli_sections(qkv, 2) == 3);
    if (!fits || qkv->split[0] || qkv->split[1])
        return hpmli_null(qkv->ctx, HPML_ERR_SHAPE, "attention: input %s is %s, with %d heads; expected a split along "
                          "dimension 2 alone in 3 sections (.sections of the linear layer before) and heads that "
                          "divide among the %d ranks", hpmli_describe(qkv), hpmli_split_text(qkv), d.heads, size);
    if (qkv->split[2]) d.heads /= size;
    if (d.heads < 1 || qkv->ndim != 3 || qkv->shape[2] % 3 != 0 || C % d.heads != 0)
        return hpmli_null(qkv->ctx, HPML_ERR_SHAPE, "attention: input is %s with %d heads, expected (B, T, 3C) with C "
                          "a multiple of the heads", hpmli_describe(qkv), d.heads);
    hpml_node *n = hpmli_node_create(HPML_OP_ATTENTION, NULL, 1, &qkv, 3, shape);
    n->attr.attention.heads  = d.heads;
    n->attr.attention.causal = !d.not_causal;
    n->attr.attention.scale  = d.scale != 0 ? d.scale : (float)(1 / sqrt((double)(C / d.heads)));
    n->saved_bytes   = (size_t)(shape[0] * shape[1] * d.heads) * sizeof(float); /* (B, heads, T) log sum exp */
    n->scratch_bytes = (size_t)(qkv->ctx->threads * 2 * HPMLI_QUERIES * shape[1]) * sizeof(float);
    hpmli_split_take(n->out, qkv->split, 1);
    return n->out;
}

/* Returns the number of keys to which query number `query` attends: with a causal mask those up to its own position. */
HPMLI_FN int64_t hpmli_visible(const hpml_node *n, int64_t query)
{
    return n->attr.attention.causal ? query + 1 : n->out->shape[1];
}

/* Computes c = alpha a b, or c += alpha a b if `accumulate`, on the calling thread, number `thread` of the pool. */
HPMLI_FN void hpmli_head_product(const hpmli_work *w, int thread, float alpha, hpmli_mat a, hpmli_mat b, hpmli_mat c,
                                 bool accumulate)
{
    hpmli_gemm_desc d = hpmli_gemm_of(a, b, c, accumulate);
    d.alpha = alpha;
    hpmli_gemm_serial(w->run->ctx, thread, &d);
}

HPMLI_FN void hpmli_attention_head(const hpmli_work *w, int64_t task, int thread)
{
    const hpml_node *n = w->n;
    int64_t   heads = n->attr.attention.heads, T = n->out->shape[1], C = n->out->shape[2], D = C / heads;
    int64_t   first = task / heads * T, col = task % heads * D;
    hpmli_mat qkv = hpmli_values(n->src[0]), out = hpmli_values(n->out); /* (B T, 3C), (B T, C) */
    float    *lse = (float *)n->saved + task * T;                         /* (T) one for each query */
    for (int64_t q0 = 0; q0 < T; q0 += HPMLI_QUERIES) {
        int64_t   rows = hpmli_min(T - q0, HPMLI_QUERIES), keys = hpmli_visible(n, q0 + rows - 1);
        hpmli_mat q = hpmli_mat_at(qkv, first + q0, rows, col, D), k = hpmli_mat_at(qkv, first, keys, col + C, D);
        hpmli_mat v = hpmli_mat_at(qkv, first, keys, col + 2 * C, D), o = hpmli_mat_at(out, first + q0, rows, col, D);
        hpmli_mat s = hpmli_matrix((float *)n->scratch + thread * 2 * HPMLI_QUERIES * T, rows, keys, keys);
        hpmli_head_product(w, thread, n->attr.attention.scale, q, hpmli_transposed(k), s, false);
        for (int64_t r = 0; r < rows; r++) {
            float  *row = s.p + r * keys;
            int64_t visible = hpmli_visible(n, q0 + r);
            float   max = w->k->vmax(row, visible), sum = w->k->vexp_sum(row, row, max, visible);
            lse[q0 + r] = max + logf(sum);
            w->k->vscale_add(row, row, 1 / sum, 0, visible);
            if (visible < keys) w->k->vfill(row + visible, 0, keys - visible);
        }
        hpmli_head_product(w, thread, 1, s, v, o, false);
    }
}

HPMLI_FN void hpmli_attention_head_back(const hpmli_work *w, int64_t task, int thread)
{
    const hpml_node *n = w->n;
    int64_t   heads = n->attr.attention.heads, T = n->out->shape[1], C = n->out->shape[2], D = C / heads;
    int64_t   first = task / heads * T, col = task % heads * D, last = (T - 1) / HPMLI_QUERIES * HPMLI_QUERIES;
    hpmli_mat qkv = hpmli_values(n->src[0]), d_qkv = hpmli_grads(n->src[0]);
    float    *lse = (float *)n->saved + task * T, scale = n->attr.attention.scale;
    for (int64_t q0 = last; q0 >= 0; q0 -= HPMLI_QUERIES) {
        int64_t   rows = hpmli_min(T - q0, HPMLI_QUERIES), keys = hpmli_visible(n, q0 + rows - 1);
        bool      add  = q0 != last || n->accumulate[0];
        hpmli_mat q = hpmli_mat_at(qkv, first + q0, rows, col, D), k = hpmli_mat_at(qkv, first, keys, col + C, D);
        hpmli_mat v = hpmli_mat_at(qkv, first, keys, col + 2 * C, D);
        hpmli_mat o = hpmli_mat_at(hpmli_values(n->out), first + q0, rows, col, D);
        hpmli_mat d_o = hpmli_mat_at(hpmli_grads(n->out), first + q0, rows, col, D);
        hpmli_mat dq = hpmli_mat_at(d_qkv, first + q0, rows, col, D), dk = hpmli_mat_at(d_qkv, first, keys, col + C, D);
        hpmli_mat dv = hpmli_mat_at(d_qkv, first, keys, col + 2 * C, D);
        hpmli_mat p = hpmli_matrix((float *)n->scratch + thread * 2 * HPMLI_QUERIES * T, rows, keys, keys);
        hpmli_mat ds = hpmli_matrix(p.p + HPMLI_QUERIES * T, rows, keys, keys);
        hpmli_head_product(w, thread, scale, q, hpmli_transposed(k), p, false);
        hpmli_head_product(w, thread, 1, d_o, hpmli_transposed(v), ds, false);
        for (int64_t r = 0; r < rows; r++) {
            float  *pr = p.p + r * keys, *dr = ds.p + r * keys;
            int64_t visible = hpmli_visible(n, q0 + r);
            float   delta = w->k->vdot(d_o.p + r * C, o.p + r * C, D);
            w->k->vexp_sum(pr, pr, lse[q0 + r], visible);
            w->k->vscale_add(dr, dr, scale, -delta * scale, visible);
            w->k->vmul(dr, dr, pr, visible);
            if (visible == keys) continue;
            w->k->vfill(pr + visible, 0, keys - visible);
            w->k->vfill(dr + visible, 0, keys - visible);
        }
        hpmli_head_product(w, thread, 1, ds, k, dq, n->accumulate[0]);
        hpmli_head_product(w, thread, 1, hpmli_transposed(ds), q, dk, add);
        hpmli_head_product(w, thread, 1, hpmli_transposed(p), d_o, dv, add);
    }
}

/* Operations of a sample: 2 T T C for q k^T, as many for softmax(q k^T) v, half if causal; backward twice as many. */
HPMLI_WORK_OP(attention, HPMLI_OP_SPLIT_OWN, HPMLI_NEED_SRC(0) | HPMLI_NEED_OUT,
              (n->attr.attention.causal ? 2 : 4) * (double)hpml_tensor_count(n->out) * (double)n->out->shape[1] *
                  (back ? 2 : 1),
              n->out->shape[0] * n->attr.attention.heads, 1, attention_head, attention_head_back);

/* LSTM with H hidden units, for each time step t: a = x_t W_x^T + bias + h_{t-1} W_h^T (4H numbers); i, f and o are
   the sigmoid, g the tanh of a quarter of a, in the order i, f, g, o; c_t = f c_{t-1} + i g; h_t = o tanh(c_t). The
   products with x of all time steps are one matrix product. A task of the recurrent part computes, for one time step, a
   block of samples and a panel of hidden units, the product with h of the step before and then the cells. W_h is packed
   once a pass, panel by panel, so that these products read contiguous memory; their left operand is a compact copy,
   because rows of h and of da that are T time steps apart would share few sets of the cache. Backward goes from the
   last time step to the first, overwrites the saved gates with da, and ends with one product for each gradient. Sources
   of the node: x, w_x, w_h, bias. Saved: gates i, f, g, o (B, T, 4H), cells c (B, T, H). */
#define HPMLI_LSTM_UNITS 32 /* hidden units in a panel: the width of one or more tiles of >>gemm */
#define HPMLI_LSTM_ROWS  32 /* samples in a block */
#define HPMLI_LSTM_FEW   4  /* for fewer samples panels are 4 times as wide, so that a product has enough sums */
HPML_API hpml_tensor *hpml_lstm(hpml_tensor *x, int64_t hidden, const char *given)
{
    hpml_tensor *src[4];
    if (!hpmli_recordable(1, &x)) return NULL;
    if (x->ndim != 3 || hidden < 1 || hidden > INT64_MAX / 4)
        return hpmli_null(x->ctx, HPML_ERR_SHAPE, "lstm \"%s\": input is %s, expected (B, T, features), hidden %lld",
                          given ? given : "", hpmli_describe(x), (long long)hidden);
    const char *name = hpmli_layer_name(x->ctx, given, "lstm");
    const int64_t shape[3] = { x->shape[0], x->shape[1], hidden };
    const int64_t w_x[2] = { 4 * hidden, x->shape[2] }, w_h[2] = { 4 * hidden, hidden };
    const size_t  B = (size_t)shape[0], H = (size_t)hidden;
    src[0] = x;
    src[1] = hpmli_layer_param(x->ctx, name, "weight_x", HPML_INIT_XAVIER_UNIFORM, 0, 2, w_x);
    src[2] = hpmli_layer_param(x->ctx, name, "weight_h", HPML_INIT_XAVIER_UNIFORM, 0, 2, w_h);
    src[3] = hpmli_layer_param(x->ctx, name, "bias", HPML_INIT_ZEROS, 0, 1, w_x);
    hpml_node *n = hpmli_node_create(HPML_OP_LSTM, name, 4, src, 3, shape);
    n->saved_bytes   = B * (size_t)shape[1] * 5 * H * sizeof(float);
    n->scratch_bytes = (H * 4 * H + B * 9 * H) * sizeof(float);
    n->scratch_bytes += (size_t)x->ctx->threads * HPMLI_LSTM_ROWS * 4 * HPMLI_LSTM_UNITS * sizeof(float);
    return n->out;
}

typedef struct hpmli_lstm_job {
    hpml_ctx  *ctx;
    hpml_node *n;
    bool       back;
    int64_t    B, T, H, t;         /* t: the time step that is computed */
    int64_t    width, panels;      /* hidden units in a panel; number of panels */
    float     *gates, *cells;      /* i, f, g, o: (B, T, 4H), c: (B, T, H) */
    float     *dc;                 /* (B, H) gradient of c */
    float     *packed;             /* W_h: (4, H, units) for each panel; backward: (4H, units) */
    float     *next[2];            /* (B, 4H) h or da of time step t in next[t % 2], of its neighbour in the other */
    float     *sums;               /* (threads, rows, 4, units) products of a task */
} hpmli_lstm_job;
HPMLI_FN hpmli_lstm_job hpmli_lstm_of(const hpml_run *run, hpml_node *n, bool back)
{
    int64_t B = n->out->shape[0], T = n->out->shape[1], H = n->out->shape[2];
    int64_t width = B < HPMLI_LSTM_FEW ? 4 * HPMLI_LSTM_UNITS : HPMLI_LSTM_UNITS, panels = (H + width - 1) / width;
    float  *gates = (float *)n->saved, *dc = (float *)n->scratch, *packed = dc + B * H, *next = packed + 4 * H * H;
    hpmli_lstm_job j = { run->ctx, n, back, B, T, H, 0, width, panels, gates, gates + B * T * 4 * H, dc, packed,
                         { next, next + B * 4 * H }, next + B * 8 * H };
    return j;
}

/* Packs the weights of a panel: forward, W_h^T of one gate after the other; backward, some columns of W_h. */
HPMLI_FN void hpmli_lstm_pack(void *arg, int64_t panel, int thread HPMLI_UNUSED)
{
    const hpmli_lstm_job *j = (const hpmli_lstm_job *)arg;
    const float          *w = j->n->src[2]->data;
    int64_t H = j->H, first = panel * j->width, units = hpmli_min(H - first, j->width);
    float  *to = j->packed + first * 4 * H;
    for (int64_t gate = 0; !j->back && gate < 4; gate++)
        j->ctx->k->conv_to_nhwc(to + gate * H * units, w + (gate * H + first) * H, units, 1, H, H * units);
    for (int64_t i = 0; j->back && i < 4 * H; i++)
        memcpy(to + i * units, w + i * H + first, (size_t)units * sizeof(float));
}

/* Computes the time step j->t of the samples of a block and the hidden units of a panel. */
HPMLI_FN void hpmli_lstm_task(void *arg, int64_t task, int thread)
{
    const hpmli_lstm_job *j = (const hpmli_lstm_job *)arg;
    hpmli_lstm_cells      s;
    int64_t H = j->H, unit = task % j->panels * j->width, row = task / j->panels * HPMLI_LSTM_ROWS;
    int64_t units = hpmli_min(H - unit, j->width), at = row * j->T + j->t;
    int64_t products = j->back ? 1 : 4, k = j->back ? 4 * H : H;
    float  *sums = j->sums + thread * HPMLI_LSTM_ROWS * 4 * HPMLI_LSTM_UNITS;
    s.rows  = hpmli_min(j->B - row, HPMLI_LSTM_ROWS);
    s.units = units;
    s.T     = j->T;
    s.H     = H;
    s.first = j->t == 0;
    s.last  = j->t == j->T - 1;
    s.bias  = j->n->src[3]->data + unit;
    s.gates = j->gates + at * 4 * H + unit;
    s.cells = j->cells + at * H + unit;
    s.h     = (j->back ? j->n->out->grad : j->n->out->data) + at * H + unit;
    s.sums  = sums;
    s.next  = j->next[j->t % 2] + row * k + unit;
    s.dc    = j->dc + row * H + unit;
    if (j->back ? !s.last : !s.first) {
        hpmli_mat a = hpmli_matrix(j->next[1 - j->t % 2] + row * k, s.rows, k, k);
        hpmli_mat w = { j->packed + unit * 4 * H, k, units, units, products, k * units, false };
        hpmli_mat c = { sums, s.rows, units, products * units, products, units, false };
        hpmli_gemm_desc d = hpmli_gemm_of(a, w, c, false);
        hpmli_gemm_serial(j->ctx, thread, &d);
    }
    if (j->back) j->ctx->k->lstm_cells_back(&s);
    else j->ctx->k->lstm_cells(&s);
}

/* Computes all time steps, forward from the first to the last, backward from the last to the first. */
HPMLI_FN void hpmli_lstm_steps(hpmli_lstm_job *j)
{
    int64_t tasks = (j->B + HPMLI_LSTM_ROWS - 1) / HPMLI_LSTM_ROWS * j->panels;
    if (j->T > 1) hpmli_parallel(j->ctx, j->panels, hpmli_lstm_pack, j);
    for (int64_t i = 0; i < j->T; i++) {
        j->t = j->back ? j->T - 1 - i : i;
        hpmli_parallel(j->ctx, tasks, hpmli_lstm_task, j);
    }
}

HPMLI_FN void hpmli_lstm_pass(const hpml_run *run, hpml_node *n)
{
    hpmli_lstm_job j = hpmli_lstm_of(run, n, false);
    hpmli_product(run->ctx, hpmli_values(n->src[0]), hpmli_transposed(hpmli_values(n->src[1])),
                  hpmli_matrix(j.gates, j.B * j.T, 4 * j.H, 4 * j.H), false);
    hpmli_lstm_steps(&j);
}

/* dW_h is the sum, over the samples and t >= 1, of da_t^T h_{t-1}: one product of all rows of da but the first with all
   rows of h but the last, where da of time step 0 is set to 0, because the row of h before it is another sample's. */
HPMLI_FN void hpmli_lstm_back(const hpml_run *run, hpml_node *n)
{
    hpmli_lstm_job     j = hpmli_lstm_of(run, n, true);
    const hpml_tensor *x = n->src[0], *w_x = n->src[1], *w_h = n->src[2], *bias = n->src[3];
    int64_t            H = j.H, rows = j.B * j.T, pairs = j.T > 1 ? rows - 1 : 0;
    hpmli_mat          da = hpmli_matrix(j.gates, rows, 4 * H, 4 * H);
    bool               steps = !n->state->second; /* the second half finds da in the gates */
    if (steps) hpmli_lstm_steps(&j);
    if (x->grad) hpmli_product(run->ctx, da, hpmli_values(w_x), hpmli_grads(x), n->accumulate[0]);
    if (w_x->grad) hpmli_product(run->ctx, hpmli_transposed(da), hpmli_values(x), hpmli_grads(w_x), n->accumulate[1]);
    if (bias->grad) run->ctx->k->vsum_rows(bias->grad, da.p, da.rows, da.cols, n->accumulate[3]);
    if (!w_h->grad) return;
    for (int64_t b = 0; b < j.B; b++) run->ctx->k->vfill(j.gates + b * j.T * 4 * H, 0, 4 * H);
    hpmli_product(run->ctx, hpmli_transposed(hpmli_mat_at(da, rows - pairs, pairs, 0, 4 * H)),
                  hpmli_mat_at(hpmli_values(n->out), 0, pairs, 0, H), hpmli_grads(w_h), n->accumulate[2]);
    for (int64_t b = 0; b < j.B && steps; b++) /* the second half may still need da of time step 0 */
        memcpy(j.gates + b * j.T * 4 * H, j.next[0] + b * 4 * H, (size_t)(4 * H) * sizeof(float));
}
HPMLI_OP(lstm, HPMLI_OP_PRODUCT, HPMLI_NEED_BOTH | HPMLI_NEED_SRC(2) | HPMLI_NEED_OUT,
         hpmli_flops_product(n, back, 4 * (n->out->shape[2] + n->src[0]->shape[2])), hpmli_lstm_pass(run, n),
         hpmli_lstm_back(run, n));

// ---------------------------------------------------------------------------------------------------------------------
// >>loss   cross-entropy, binary cross-entropy, squared and huber loss
// ---------------------------------------------------------------------------------------------------------------------
/* All losses are means over elements or over the rows that are not ignored; sums are added in double, in order. The
   gradient of the loss itself is out->grad[0]. Cross-entropy of logits x and label l, with smoothing s and V classes:
       loss = log(sum) - (1 - s) d_l - s mean(d),  dx_i = exp(d_i) / sum - (1 - s) [i = l] - s / V,
       with d_i = x_i - max(x),  sum = sum of exp(d_i),  [i = l] = 1 for i = l, else 0.
   Each row saves max and 1 / sum, not max + log(sum), because that is rounded to the precision of max: a constant added
   to all logits would cost digits. Probabilities are not saved: backward computes the exponentials again. */
HPMLI_FN hpml_tensor *hpmli_loss_record(hpml_op op, hpml_tensor *y, hpml_tensor *target, float delta)
{
    hpml_tensor *src[2] = { y, target };
    if (!hpmli_recordable(2, src)) return NULL;
    if (target->ndim != y->ndim || memcmp(target->shape, y->shape, sizeof y->shape) != 0)
        return hpmli_null(y->ctx, HPML_ERR_SHAPE, "%s: %s and target %s; expected two f32 tensors of the same shape",
                          hpml_op_name(op), hpmli_describe(y), hpmli_describe(target));
    if (!(delta >= 0))
        return hpmli_null(y->ctx, HPML_ERR_ARGUMENT, "%s: delta is %g, expected 0 or more", hpml_op_name(op),
                          (double)delta);
    hpml_node *n = hpmli_node_create(op, NULL, 2, src, 0, NULL);
    n->attr.huber.delta = delta;
    return n->out;
}

HPMLI_FN void hpmli_cross_entropy_row(const hpmli_work *w, int64_t row, int thread HPMLI_UNUSED)
{
    const hpml_node *n     = w->n;
    const float     *x     = n->src[0]->data + row * w->cols; /* the row's logits: (V) */
    int32_t          label = ((const int32_t *)n->src[1]->raw)[row];
    float           *max   = (float *)n->saved + row, *inverse = max + w->count, *loss = inverse + w->count;
    float            s     = n->attr.cross_entropy.smoothing, sum = 0, piece[HPMLI_PIECE];
    *loss = *max = *inverse = 0;
    if (label == n->attr.cross_entropy.ignore) return;
    *max = w->k->vmax(x, w->cols);
    HPMLI_PIECES(i, c, w->cols) sum += w->k->vexp_sum(piece, x + i, *max, c);
    *inverse = 1 / sum;
    *loss    = logf(sum) - (1 - s) * (x[label] - *max);
    if (s == 0) return;
    double about[2] = { 0, 0 }; /* sums of x - max, and of its squares */
    w->k->vmoments(about, NULL, x, *max, w->cols);
    *loss -= s * (float)(about[0] / (double)w->cols);
}

/* Cross-entropy of logits split by classes: the maximum and three sums of each row are taken over the ranks. */
HPMLI_FN hpml_status hpmli_cross_entropy_parts(const hpml_run *run, hpml_node *n, const hpmli_vocabulary *v)
{
    const int32_t *label = (const int32_t *)n->src[1]->raw;
    const int64_t  rows  = hpml_tensor_count(n->src[1]);
    float         *max   = (float *)n->saved, *inverse = max + rows, *loss = inverse + rows, piece[HPMLI_PIECE];
    float         *sums  = (float *)n->scratch, s = v->smoothing; /* (rows, 3) sums: of exp(d), d of the label, d */
    const float   *x     = n->src[0]->data;                       /* (rows, count), d = x - max */
    for (int64_t r = 0; r < rows; r++) max[r] = run->ctx->k->vmax(x + r * v->count, v->count);
    hpml_status status = v->group->max(v->group->user, max, rows);
    for (int64_t r = 0; r < rows; r++, sums += 3, x += v->count) {
        int64_t at       = label[r] - v->first;
        double  about[2] = { 0, 0 };
        sums[0] = 0;
        HPMLI_PIECES(i, c, v->count) sums[0] += run->ctx->k->vexp_sum(piece, x + i, max[r], c);
        sums[1] = at >= 0 && at < v->count ? x[at] - max[r] : 0;
        if (s > 0) run->ctx->k->vmoments(about, NULL, x, max[r], v->count);
        sums[2] = (float)about[0];
    }
    sums -= 3 * rows;
    if (status == HPML_OK) status = v->group->sum(v->group->user, sums, 3 * rows);
    for (int64_t r = 0; r < rows; r++, sums += 3) {
        inverse[r] = 1 / sums[0];
        loss[r]    = logf(sums[0]) - (1 - s) * sums[1] - s * (sums[2] / (float)v->whole);
        if (label[r] == v->ignore) loss[r] = 0;
    }
    return status;
}

HPMLI_FN hpml_status hpmli_cross_entropy_pass(const hpml_run *run, hpml_node *n)
{
    const hpml_tensor *x     = n->src[0];
    const int32_t     *label = (const int32_t *)n->src[1]->raw;
    hpmli_vocabulary   v     = hpmli_vocabulary_of(n, x->shape[x->ndim - 1]);
    int64_t            rows = hpml_tensor_count(x) / v.count, counted = 0;
    const float       *loss = (const float *)n->saved + 2 * rows;
    double             sum  = 0;
    hpml_status        status = HPML_OK;
    for (int64_t i = 0; i < rows; i++) {
        if (label[i] == v.ignore) continue;
        if (label[i] < 0 || label[i] >= v.whole)
            return hpmli_fail(run->ctx, HPML_ERR_LABEL, "cross_entropy: label %lld of the batch is %d, expected 0 to "
                              "%lld (or %d to be ignored)", (long long)(n->state->first_index + i), label[i],
                              (long long)v.whole - 1, v.ignore);
        counted++;
    }
    if (v.group) status = hpmli_cross_entropy_parts(run, n, &v);
    else hpmli_for_each_row(run, n, false, hpmli_cross_entropy_row);
    for (int64_t i = 0; i < rows; i++) sum += (double)loss[i];
    ((float *)n->saved)[3 * rows] = counted > 0 ? 1 / (float)counted : 0;
    n->out->data[0] = counted > 0 ? (float)(sum / (double)counted) : 0;
    return status;
}

HPMLI_FN void hpmli_cross_entropy_back_row(const hpmli_work *w, int64_t row, int thread HPMLI_UNUSED)
{
    const hpml_node *n     = w->n;
    const float     *x     = n->src[0]->data + row * w->cols;
    float           *dx    = n->src[0]->grad + row * w->cols, piece[HPMLI_PIECE];
    int32_t          label = ((const int32_t *)n->src[1]->raw)[row];
    const float     *saved = (const float *)n->saved;
    hpmli_vocabulary v     = hpmli_vocabulary_of(n, w->cols);
    float            max   = saved[row], s = v.smoothing, shares = (float)v.whole;
    float            scale = saved[3 * w->count] * n->out->grad[0], share = scale * saved[w->count + row];
    bool             add   = n->accumulate[0];
    if (label == v.ignore) {
        if (!add) w->k->vfill(dx, 0, w->cols);
        return;
    }
    HPMLI_PIECES(i, c, w->cols) {
        w->k->vexp_sum(piece, x + i, max, c);
        if (add) w->k->vaxpby(dx + i, share, piece, 1, c);
        else w->k->vscale_add(dx + i, piece, share, -scale * s / shares, c);
        if (add && s > 0) w->k->vscale_add(dx + i, dx + i, 1, -scale * s / shares, c);
    }
    if (label >= v.first && label < v.first + v.count) dx[label - v.first] -= scale * (1 - s);
}
HPMLI_FN hpml_status hpmli_cross_entropy_back(const hpml_run *run, hpml_node *n)
{
    hpmli_for_each_row(run, n, true, hpmli_cross_entropy_back_row);
    return HPML_OK;
}
HPMLI_OP(cross_entropy, HPMLI_OP_IS_MEAN | HPMLI_OP_INDEX_1, HPMLI_NEED_BOTH, hpmli_flops_pointwise(n, back),
         return hpmli_cross_entropy_pass(run, n), return hpmli_cross_entropy_back(run, n));

HPML_API hpml_tensor *hpml_cross_entropy(hpml_tensor *logits, hpml_tensor *labels, const hpml_cross_entropy_desc *desc)
{
    hpml_cross_entropy_desc d;
    hpml_tensor            *src[2] = { logits, labels };
    if (!hpmli_recordable(2, src) || !HPMLI_COPY_DESC(logits->ctx, "cross_entropy", d, desc)) return NULL;
    bool fits = labels->dtype == HPML_DTYPE_I32 && labels->ndim == logits->ndim - 1;
    for (int i = 0; fits && i < labels->ndim; i++) fits = labels->shape[i] == logits->shape[i];
    if (!fits || !(d.label_smoothing >= 0 && d.label_smoothing <= 1))
        return hpmli_null(logits->ctx, HPML_ERR_SHAPE, "cross_entropy: logits %s, labels %s; expected (.., classes) "
                          "and i32 (..), label_smoothing in 0..1", hpmli_describe(logits), hpmli_describe(labels));
    const int64_t rows = hpml_tensor_count(labels);
    hpml_custom   own  = HPMLI_ZEROED; /* the op, where the classes are split */
    own.name          = "cross_entropy";
    own.forward       = hpmli_cross_entropy_pass;
    own.backward      = hpmli_cross_entropy_back;
    own.keeps         = HPML_KEEP_SRC(0) | HPML_KEEP_SRC(1);
    own.one_number    = true;
    own.saved_bytes   = (size_t)(3 * rows + 1) * sizeof(float); /* max, 1 / sum, loss of rows; 1 / counted */
    own.scratch_bytes = (size_t)(3 * rows) * sizeof(float);
    if (d.ignore_index == 0) d.ignore_index = HPML_IGNORE;
    if (logits->split[labels->ndim] == HPML_AXIS_TENSOR)
        return hpmli_vocabulary_op(src, &own, logits->shape[labels->ndim], d.label_smoothing, d.ignore_index);
    hpml_node *n = hpmli_node_create(HPML_OP_CROSS_ENTROPY, NULL, 2, src, 0, NULL);
    n->attr.cross_entropy.smoothing = d.label_smoothing;
    n->attr.cross_entropy.ignore    = d.ignore_index;
    n->saved_bytes = own.saved_bytes;
    return n->out;
}

HPML_API hpml_tensor *hpml_bce_with_logits(hpml_tensor *logits, hpml_tensor *target)
{
    return hpmli_loss_record(HPML_OP_BCE_WITH_LOGITS, logits, target, 0);
}
HPML_API hpml_tensor *hpml_mse(hpml_tensor *y, hpml_tensor *target)
{
    return hpmli_loss_record(HPML_OP_MSE, y, target, 0);
}
HPML_API hpml_tensor *hpml_huber(hpml_tensor *y, hpml_tensor *target, float delta)
{
    return hpmli_loss_record(HPML_OP_HUBER, y, target, delta);
}

/* Returns the loss of x with target t. bce_with_logits: max(x, 0) - x t + log(1 + exp(-|x|)), which never overflows.
   mse: d^2 with d = x - t. huber: d^2 / 2 if |d| <= delta, else delta (|d| - delta / 2); with delta 0: |d|. */
HPMLI_FN double hpmli_pair_loss(const hpml_node *n, float x, float t)
{
    double d = fabs((double)x - (double)t), delta = (double)n->attr.huber.delta;
    if (n->op == HPML_OP_BCE_WITH_LOGITS) return (double)((x > 0 ? x : 0) - x * t) + log1p(exp(-fabs((double)x)));
    if (n->op == HPML_OP_MSE) return d * d;
    if (delta == 0) return d;
    return d <= delta ? d * d / 2 : delta * (d - delta / 2);
}

/* Returns the derivative of the loss of an element x with target t, with respect to x. */
HPMLI_FN float hpmli_pair_derivative(const hpml_node *n, float x, float t)
{
    float d = x - t, delta = n->attr.huber.delta;
    if (n->op == HPML_OP_BCE_WITH_LOGITS) return 1 / (1 + expf(-x)) - t;
    if (n->op == HPML_OP_MSE) return 2 * d;
    if (delta == 0) return (float)((d > 0) - (d < 0));
    if (d > delta) return delta;
    return d < -delta ? -delta : d;
}

HPMLI_FN void hpmli_pairs_pass(hpml_node *n)
{
    int64_t count = hpml_tensor_count(n->src[0]);
    double  sum   = 0;
    for (int64_t i = 0; i < count; i++) sum += hpmli_pair_loss(n, n->src[0]->data[i], n->src[1]->data[i]);
    n->out->data[0] = (float)(sum / (double)count);
}

HPMLI_FN hpml_status hpmli_pairs_back(const hpml_run *run, hpml_node *n)
{
    const float *x = n->src[0]->data, *t = n->src[1]->data;
    int64_t      count = hpml_tensor_count(n->src[0]);
    float        scale = n->out->grad[0] / (float)count;
    if (n->op == HPML_OP_BCE_WITH_LOGITS && n->src[1]->grad)
        return hpmli_fail(run->ctx, HPML_ERR_UNSUPPORTED, "bce_with_logits: the target \"%s\" is computed from "
                          "parameters; only the logits get a gradient", n->src[1]->name);
    for (int s = 0; s < 2; s++) { /* a target that is a result gets a gradient, too: minus that of y */
        float *d = n->src[s]->grad, sign = s ? -scale : scale;
        for (int64_t i = 0; d && i < count; i++)
            d[i] = (n->accumulate[s] ? d[i] : 0) + sign * hpmli_pair_derivative(n, x[i], t[i]);
    }
    return HPML_OK;
}
HPMLI_OP(bce_with_logits, HPMLI_OP_IS_MEAN, HPMLI_NEED_BOTH, hpmli_flops_pointwise(n, back), hpmli_pairs_pass(n),
         return hpmli_pairs_back(run, n));
HPMLI_OP(mse, HPMLI_OP_IS_MEAN, HPMLI_NEED_BOTH, hpmli_flops_pointwise(n, back), hpmli_pairs_pass(n),
         return hpmli_pairs_back(run, n));
HPMLI_OP(huber, HPMLI_OP_IS_MEAN, HPMLI_NEED_BOTH, hpmli_flops_pointwise(n, back), hpmli_pairs_pass(n),
         return hpmli_pairs_back(run, n));

// ---------------------------------------------------------------------------------------------------------------------
// >>half   results stored in bf16 or f16: the wrapper that gives ops f32 copies
// ---------------------------------------------------------------------------------------------------------------------
/* Mixed precision (Micikevicius et al. 2018): results of ops and their gradients are stored in 2 bytes a number;
   arithmetic, parameters, their gradients and optimizer states stay f32. The ops know f32 only. One wrapper replaces
   all ops in ctx->ops: it gives an op f32 copies, in scratch memory, of the halves that the op reads, and rounds the
   results of the op (to nearest, ties to even) to their stored type. Most ops treat samples independently, so the
   wrapper cuts a batch into blocks of samples whose copies stay in the cache; gradients of parameters are added up over
   the blocks in f32. An op that joins samples (batchnorm, a sum over the batch) gets a copy of the whole batch; a loss
   is the mean over the blocks, weighted by the number of rows that are not ignored in each. Blocks and results do not
   depend on the threads. The weights of products (parameters of two or more dimensions) are rounded, too, in an f32
   copy. With few samples and large layers, the copy of the largest weight is most of the scratch memory. */
#define HPMLI_WRAP_NUMBERS ((int64_t)1 << 18) /* numbers in the f32 copies of a block: 1 MB, or one sample if larger */
#define HPMLI_WRAP_ROWS    256 /* least rows of a block: with fewer, packing would slow matrix products down */
enum {
    HPMLI_LOAD  = 1, /* before the op: copy halves to f32 */
    HPMLI_SAVE  = 2, /* after the op: round the f32 copy to halves */
    HPMLI_ROUND = 4, /* before the op: copy f32 to f32, rounded to the precision of halves */
    HPMLI_PLAIN = 8  /* on a device: the stored numbers have 4 bytes and are copied as they are */
};
typedef struct hpmli_copy {
    void    *stored; /* (n) halves; with HPMLI_ROUND n f32 numbers */
    float   *f32;    /* (n) the f32 copy that the op reads or writes */
    int64_t  n;
    unsigned how;    /* a sum of HPMLI_LOAD, HPMLI_SAVE, HPMLI_ROUND, HPMLI_PLAIN */
} hpmli_copy;

/* One op on one block of samples, with f32 copies of the bf16 or f16 numbers that it reads or writes, ready to run. */
typedef struct hpmli_wrap {
    const hpml_ctx *ctx;
    hpml_node       node;                /* the node as recorded, but with the tensors t */
    struct hpmli_node_state state;       /* the node's state, changed for this block */
    int             count;               /* number of copies */
    unsigned        now;                 /* HPMLI_LOAD or HPMLI_SAVE: the phase that hpmli_wrap_task runs */
    char           *at;                  /* memory of the f32 copies; NULL while planning */
    size_t          used;                /* bytes of the memory at `at` in use */
    int64_t         first, samples;      /* first sample and number of samples of the block */
    bool            last;                /* this is the last block of the batch */
    bool            on_device;           /* stored numbers are in a device's memory, so all arrays are copied */
    hpml_tensor     t[HPML_MAX_SRC + 1]; /* what the op gets as sources and, last, as result */
    hpmli_copy      copy[2 * HPML_MAX_SRC + 3];
} hpmli_wrap;

/* Adds to e an f32 copy of n numbers, with memory for `most`, and returns its address (NULL while planning). how:
   HPMLI_LOAD, _ROUND and _SAVE, bits that say when numbers are copied. */
HPMLI_FN float *hpmli_wrap_copy(hpmli_wrap *e, void *stored, int64_t n, int64_t most, unsigned how)
{
    float     *f32 = e->at ? (float *)(void *)(e->at + e->used) : NULL;
    hpmli_copy c   = { stored, f32, n, how };
    e->used += ((size_t)most * sizeof(float) + 63) / 64 * 64;
    e->copy[e->count++] = c;
    return f32;
}

/* Sets *to to the tensor that the op gets instead of t: the samples of block e, with f32 copies of halves. value and
   grad say how values and gradient are copied (HPMLI_LOAD ...; 0: not copied, but the copy has memory, because kernels
   may read numbers that they do not use). A t without a batch dimension is loaded for the first block of samples and
   saved after the last one. */
HPMLI_FN void hpmli_wrap_tensor(hpmli_wrap *e, hpml_tensor *to, const hpml_tensor *t, unsigned value, unsigned grad)
{
    int64_t  block = e->state.block_samples, n = hpml_tensor_count(t), most = n;
    unsigned once  = (e->first > 0 ? HPMLI_LOAD | HPMLI_ROUND : 0) | (e->last ? 0 : HPMLI_SAVE);
    bool     half  = hpmli_is_half(t->dtype), has_grad = e->at ? t->raw_grad != NULL : t->needs_grad;
    char    *raw   = (char *)t->raw, *raw_grad = (char *)t->raw_grad;
    *to = *t;
    if (block > 0 && t->batch_rows > 0) {
        int64_t each = n / t->shape[0] * t->batch_rows; /* numbers of a sample */
        size_t  skip = (size_t)(e->first * each) * hpml_dtype_size(t->dtype);
        if (raw) raw += skip;
        if (raw_grad) raw_grad += skip;
        if (t->dtype == HPML_DTYPE_I32) e->state.first_index = e->first * each;
        to->shape[0] = e->samples * t->batch_rows;
        n    = e->samples * each;
        most = block * each;
        once = 0;
    }
    unsigned plain = half ? 0 : HPMLI_PLAIN;
    if (half || value & HPMLI_ROUND || e->on_device)
        raw = (char *)hpmli_wrap_copy(e, raw, n, most, (value & ~once) | plain);
    if ((half || e->on_device) && has_grad)
        raw_grad = (char *)hpmli_wrap_copy(e, raw_grad, n, most, (grad & ~once) | plain);
    if (half) to->dtype = HPML_DTYPE_F32; /* the type of the f32 copies */
    hpmli_set_memory(to, raw, raw_grad);
}

/* True if a and b are one tensor, or have one array in memory because one is a reshape of the other: an op that reads
   both then needs only one f32 copy of the array. */
HPMLI_FN bool hpmli_one_array(const hpml_tensor *a, const hpml_tensor *b)
{
    bool alike = a && a->raw == b->raw && a->dtype == b->dtype && (a->batch_rows > 0) == (b->batch_rows > 0);
    return a == b || (alike && a->raw);
}

/* Sets up e: the op of n on samples first .. first + samples - 1, with its f32 copies from address `at` on (NULL: only
   their sizes are counted). last: no block of the batch follows. */
HPMLI_FN void hpmli_wrap_open(hpmli_wrap *e, const hpml_ctx *ctx, const hpml_node *n, bool back, int64_t first,
                              int64_t samples, bool last, char *at)
{
    unsigned needs   = back ? hpmli_op_of(n)->needs(n) : HPMLI_NEED_OUT - 1; /* forward: the values of all sources */
    bool     product = hpmli_has_trait(n, HPMLI_OP_PRODUCT);
    memset(e, 0, offsetof(hpmli_wrap, t));
    e->node       = *n;
    e->state      = *n->state;
    e->node.state = &e->state;
    memset(e->state.update, 0, sizeof e->state.update); /* optimizer steps wait for the gradients of all blocks */
    e->ctx     = ctx;
    e->at      = at;
    e->first   = first;
    e->samples = samples;
    e->last    = last;
    e->on_device = ctx->device != (const void *)ctx; /* the CPU's device is the context itself */
    for (int i = 0, same; i < n->src_count; i++) {
        const hpml_tensor *s = n->src[i];
        unsigned           value = 0, grad = back ? HPMLI_SAVE : 0;
        if (!s) continue;
        for (same = 0; !hpmli_one_array(n->src[same], s); same++) {}
        e->node.src[i] = &e->t[n->src[same] == s ? same : i]; /* one copy where an op reads an array twice */
        if (!s->batch_rows && first > 0) e->node.accumulate[i] = true;
        if (n->src[same] != s) { /* a reshape of that array */
            e->t[i] = *s;
            if (e->state.block_samples > 0 && s->batch_rows > 0) e->t[i].shape[0] = samples * s->batch_rows;
            e->t[i].dtype = e->t[same].dtype;
            hpmli_set_memory(&e->t[i], e->t[same].raw, e->t[same].raw_grad);
        }
        if (same < i) continue;
        for (int k = i; k < n->src_count; k++)
            if (hpmli_one_array(n->src[k], s) && needs & HPMLI_NEED_SRC(k)) value = HPMLI_LOAD;
        if (value && product && s->param && s->ndim >= 2) value = HPMLI_ROUND;
        if (grad && (n->accumulate[i] || !s->batch_rows)) grad |= HPMLI_LOAD; /* a short batch may write only a part */
        hpmli_wrap_tensor(e, &e->t[i], s, value, grad);
    }
    hpml_tensor *y     = e->node.out = &e->t[HPML_MAX_SRC];
    unsigned     value = back ? 0 : HPMLI_SAVE;
    if (back && needs & HPMLI_NEED_OUT) value = HPMLI_LOAD;
    hpmli_wrap_tensor(e, y, n->out, value, back ? HPMLI_LOAD : 0);
    if (hpmli_has_trait(n, HPMLI_OP_KEEPS_SUM) && n->saved_bytes > 0) { /* n->saved is in halves, too */
        hpml_tensor z = *n->out;
        hpmli_set_memory(&z, n->saved, NULL);
        hpmli_wrap_tensor(e, &e->t[3], &z, back ? HPMLI_LOAD : HPMLI_SAVE, 0);
        e->node.saved = e->t[3].data;
    } else if (n->saved && first > 0)
        e->node.saved = (char *)n->saved + (size_t)(first / n->state->block_samples) * n->state->block_saved;
}

/* Returns how many tasks, of HPMLI_GRAIN numbers each, it takes to load (if e->now is HPMLI_LOAD) or save (HPMLI_SAVE)
   the f32 copy c; 0: c is not among the copies that are loaded, or saved. */
HPMLI_FN int64_t hpmli_wrap_tasks(const hpmli_wrap *e, const hpmli_copy *c)
{
    bool wanted = c->how & (e->now == HPMLI_LOAD ? HPMLI_LOAD | HPMLI_ROUND : HPMLI_SAVE);
    return wanted ? (c->n + HPMLI_GRAIN - 1) / HPMLI_GRAIN : 0;
}

/* Loads or saves, as e->now says, up to HPMLI_GRAIN numbers of one of the f32 copies of an op's arrays (one task). */
HPMLI_FN void hpmli_wrap_task(void *arg, int64_t task, int thread HPMLI_UNUSED)
{
    const hpmli_wrap    *e = (const hpmli_wrap *)arg;
    const hpmli_copy    *c = e->copy;
    const hpmli_kernels *k = e->ctx->k;
    hpml_dtype           dtype = e->ctx->activation_dtype;
    uint16_t             piece[HPMLI_PIECE];
    for (int64_t tasks; tasks = hpmli_wrap_tasks(e, c), task >= tasks; c++) task -= tasks;
    int64_t   at = task * HPMLI_GRAIN, n = hpmli_min(c->n - at, HPMLI_GRAIN);
    uint16_t *half = (uint16_t *)c->stored + at;
    if (e->now == HPMLI_SAVE) k->from_f32(dtype, half, c->f32 + at, n);
    else if (c->how & HPMLI_LOAD) k->to_f32(c->f32 + at, dtype, half, n);
    else
        HPMLI_PIECES(i, count, n) {
            k->from_f32(dtype, piece, (const float *)c->stored + at + i, count);
            k->to_f32(c->f32 + at + i, dtype, piece, count);
        }
}

/* Reads all arrays of an op from the device to the host (e->now: HPMLI_LOAD), or writes them back. */
HPMLI_FN void hpmli_wrap_transfer(const hpmli_wrap *e, hpml_ctx *ctx)
{
    for (const hpmli_copy *c = e->copy; c < e->copy + e->count; c++) {
        hpml_tensor t = HPMLI_ZEROED;
        t.dtype = c->how & HPMLI_PLAIN ? HPML_DTYPE_F32 : hpmli_activation_dtype(ctx);
        t.raw   = c->stored;
        if (hpmli_wrap_tasks(e, c) == 0) continue;
        if (e->now == HPMLI_LOAD) hpmli_read_floats(ctx, &t, c->n, c->f32);
        else hpmli_write_floats(ctx, &t, c->n, c->f32);
    }
}

/* Loads (now: HPMLI_LOAD) or saves (HPMLI_SAVE) all f32 copies of e, an op on a block of samples: with all threads, or
   from or to the device. */
HPMLI_FN void hpmli_wrap_move(hpmli_wrap *e, hpml_ctx *ctx, unsigned now)
{
    int64_t tasks = 0;
    e->now = now;
    for (int i = 0; i < e->count; i++) tasks += hpmli_wrap_tasks(e, &e->copy[i]);
    if (e->on_device) hpmli_wrap_transfer(e, ctx);
    else if (tasks > 0) hpmli_parallel(ctx, tasks, hpmli_wrap_task, e);
}

HPMLI_FN bool hpmli_is_mean(const hpml_node *n) { return hpmli_has_trait(n, HPMLI_OP_IS_MEAN); }
/* Returns the tensor whose samples are cut into blocks: source 0 of a loss, else the result. */
HPMLI_FN const hpml_tensor *hpmli_wrap_batch(const hpml_node *n) { return hpmli_is_mean(n) ? n->src[0] : n->out; }

/* Returns the number of samples of a block, or 0 if all samples are to be one block, because the op mixes samples or
   the batch is small. */
HPMLI_FN int64_t hpmli_wrap_block(const hpml_node *n)
{
    const hpml_tensor *y = hpmli_wrap_batch(n);
    bool    product = hpmli_has_trait(n, HPMLI_OP_PRODUCT), pairs = hpmli_has_trait(n, HPMLI_OP_PAIRS_ROWS);
    int64_t numbers = hpml_tensor_count(n->out), batch;
    if (!y->batch_rows || n->mixes_batch || hpmli_has_trait(n, HPMLI_OP_JOINS_BATCH | HPMLI_OP_IS_WHOLE)) return 0;
    for (int i = 0; i < n->src_count; i++) {
        const hpml_tensor *s = n->src[i];
        bool rows_meet = pairs && s && s->ndim == y->ndim && s->shape[0] > 1 && !(product && s->ndim == 2);
        if (s && s->batch_rows) numbers += hpml_tensor_count(s);
        else if (s && (rows_meet || hpmli_is_mean(n))) return 0; /* s has a row for each row of the batch */
    }
    batch = y->shape[0] / y->batch_rows;
    int64_t rows  = hpml_tensor_count(y) / y->shape[y->ndim - 1] / batch, each = 2 * numbers / batch;
    int64_t block = hpmli_max((HPMLI_WRAP_NUMBERS + each - 1) / each, (HPMLI_WRAP_ROWS + rows - 1) / rows);
    return block < batch ? block : 0;
}

/* Implements hpml_backend.plan of the CPU, once for each node n: sets how many samples of the batch make a block, and
   the bytes that a block saves; adds the bytes of the block's f32 copies to n's scratch memory. */
HPMLI_FN void hpmli_wrap_plan(void *device, hpml_node *n)
{
    const hpml_ctx *ctx = (const hpml_ctx *)device;
    hpmli_wrap      e;
    bool copies = ctx->activation_dtype != HPML_DTYPE_F32 || ctx->device != device;
    if (!copies || hpmli_has_trait(n, HPMLI_OP_IS_ALIAS) || n->state->copies_at > 0) return;
    const hpml_tensor *y = hpmli_wrap_batch(n);
    int64_t batch = y->batch_rows ? y->shape[0] / y->batch_rows : 1, block = hpmli_wrap_block(n);
    n->state->block_samples = block;
    size_t  most  = 0;
    for (int back = 0; back < 2; back++) {
        hpmli_wrap_open(&e, ctx, n, back, 0, block, true, NULL);
        if (e.used > most) most = e.used;
    }
    n->state->copies_at       = (n->scratch_bytes + 63) / 64 * 64 + 64;
    n->scratch_bytes = n->state->copies_at + most;
    if (block == 0 || n->saved_bytes == 0 || hpmli_has_trait(n, HPMLI_OP_KEEPS_SUM)) return;
    /* with up to 64 bytes to spare, because a loss saves one number besides those of its rows */
    n->state->block_saved = n->saved_bytes / (size_t)batch * (size_t)block / 64 * 64 + 64;
    n->saved_bytes += 64 * (size_t)((batch + block - 1) / block);
}

/* Returns the number of rows or elements, without ignored rows, of which the loss n is the mean. */
HPMLI_FN double hpmli_wrap_weight(const hpml_node *n)
{
    bool           labels = hpmli_has_trait(n, HPMLI_OP_INDEX_1);
    int64_t        count  = hpml_tensor_count(n->src[labels ? 1 : 0]), ignored = 0;
    const int32_t *label  = (const int32_t *)n->src[1]->raw;
    for (int64_t i = 0; labels && i < count; i++)
        ignored += label[i] == n->attr.cross_entropy.ignore;
    return (double)(count - ignored);
}

/* Runs node n of any op forward or, if `back`, backward: one block of samples after another, but a reshape in one call,
   because a reshape copies bytes of any type. */
HPMLI_FN hpml_status hpmli_wrap_run(const hpml_run *run, hpml_node *n, bool back)
{
    const hpml_op_impl *op = &hpmli_op_of(n)->run;
    const hpml_tensor  *y  = hpmli_wrap_batch(n);
    hpml_status         status = HPML_OK;
    int64_t             block = n->state->block_samples, batch = block > 0 ? y->shape[0] / y->batch_rows : 1;
    bool                mean = block > 0 && hpmli_is_mean(n);
    double              all = mean ? hpmli_wrap_weight(n) : 1, sum = 0;
    if (hpmli_has_trait(n, HPMLI_OP_IS_ALIAS)) return back ? op->backward(run, n) : op->forward(run, n);
    for (int64_t first = 0, count; first < batch && status == HPML_OK; first += count) {
        hpmli_wrap e;
        hpml_run   part = *run;
        float      dloss = 0;
        count = block > 0 ? hpmli_min(block, batch - first) : batch;
        hpmli_wrap_open(&e, run->ctx, n, back, first, count, first + count == batch,
                        (char *)n->scratch + n->state->copies_at);
        part.sample += (uint64_t)first;
        double share = mean && all > 0 ? hpmli_wrap_weight(&e.node) / all : 1;
        if (mean && back) {
            dloss = (float)(share * (double)n->out->grad[0]);
            e.node.out->grad = &dloss;
        }
        hpmli_wrap_move(&e, run->ctx, HPMLI_LOAD);
        status = back ? op->backward(&part, &e.node) : op->forward(&part, &e.node);
        if (status == HPML_OK) hpmli_wrap_move(&e, run->ctx, HPMLI_SAVE);
        if (mean && !back) sum += share * (double)n->out->data[0];
    }
    if (mean && !back) n->out->data[0] = (float)sum;
    return status;
}
HPMLI_FN hpml_status hpmli_wrap_forward(const hpml_run *run, hpml_node *n) { return hpmli_wrap_run(run, n, false); }
HPMLI_FN hpml_status hpmli_wrap_backward(const hpml_run *run, hpml_node *n) { return hpmli_wrap_run(run, n, true); }
HPMLI_FN const hpml_op_impl *hpmli_wrap_ops(void)
{
    static const hpml_op_impl ops[HPML_OP_COUNT] = {
#define HPMLI_WRAP_IMPL(op, name) { hpmli_wrap_forward, hpmli_wrap_backward },
        HPML_OPS(HPMLI_WRAP_IMPL)
    };
    return ops;
}

// ---------------------------------------------------------------------------------------------------------------------
// >>custom   ops of the user, on the host or on host copies of a device's arrays
// ---------------------------------------------------------------------------------------------------------------------
/* Calls the user's function forward or backward. Because backward adds to the gradients of the op's sources, gradients
   that no op has written in this pass are set to 0 first. */
HPMLI_FN hpml_status hpmli_custom_call(const hpml_run *run, hpml_node *n, bool back)
{
    const hpml_custom *d = n->attr.custom;
    for (int i = 0; i < n->src_count && back; i++)
        if (n->src[i]->grad && !n->accumulate[i])
            run->ctx->k->vfill(n->src[i]->grad, 0, hpml_tensor_count(n->src[i]));
    hpml_status status = back ? d->backward(run, n) : d->forward(run, n);
    if (status != HPML_OK && run->ctx->status == HPML_OK)
        hpmli_fail(run->ctx, status, "%s \"%s\": its %s returned: %s", d->name, n->out->name,
                   back ? "backward" : "forward", hpml_status_string(status));
    return run->ctx->status;
}
HPMLI_OP(custom, HPMLI_OP_IS_WHOLE | HPMLI_OP_SPLIT_ANY,
         n->attr.custom->keeps | (n->attr.custom->in_place ? HPMLI_INPLACE : 0),
         n->attr.custom->flops * (back ? 2 * n->out->needs_grad : 1), return hpmli_custom_call(run, n, false),
         return hpmli_custom_call(run, n, true));

HPML_API void hpml_node_give(const hpml_run *run, hpml_node *node, int source, const float *gradient)
{
    const hpml_tensor *s = source >= 0 && source < node->src_count ? node->src[source] : NULL;
    if (!s || !gradient)
        hpmli_fail(run->ctx, HPML_ERR_ARGUMENT, "node_give: \"%s\" has %d sources; got number %d and %s",
                   node->out->name, node->src_count, source, gradient ? "a gradient" : "NULL");
    else if (s->grad) run->ctx->k->vadd(s->grad, s->grad, gradient, hpml_tensor_count(s));
}

/* True if the fields of d, the desc of an op with these sources, fit each other and the sources; else an error. */
HPMLI_FN bool hpmli_custom_fits(hpml_ctx *ctx, const hpml_custom *d, int count, hpml_tensor *const *src)
{
    const char        *wrong  = NULL;
    const hpml_tensor *x      = src[0];
    uint32_t           values = ((UINT32_C(1) << count) - 1) | HPML_KEEP_OUT;
    bool same = d->ndim == x->ndim && memcmp(d->shape, x->shape, sizeof *d->shape * (size_t)x->ndim) == 0;
    if (!d->name || !d->name[0]) wrong = "name is required";
    else if (!d->forward) wrong = "forward is required";
    else if (d->kernel.forward ? !d->kernel.backward != !d->backward : d->kernel.backward != NULL)
        wrong = "kernel needs the same functions as the op: forward, and backward if the op has one";
    else if (d->one_number && (d->ndim != 0 || d->batch_rows > 0)) wrong = "one_number excludes ndim and batch_rows";
    else if (d->batch_rows < -1) wrong = "batch_rows is below -1";
    else if (d->keeps & ~values && d->keeps != HPML_KEEP_NONE) wrong = "keeps has bits of no source of the op";
    else if (d->in_place && (d->one_number || (d->ndim != 0 && !same) || x->dtype == HPML_DTYPE_I32))
        wrong = "in_place needs a result of the shape and type of source 0";
    else if (d->in_place && d->keeps & HPML_KEEP_SRC(0)) wrong = "in_place overwrites source 0, which keeps names";
    else if (!(d->flops >= 0)) wrong = "flops is negative or NaN";
    else if (d->saved_bytes > SIZE_MAX / 4 || d->scratch_bytes > SIZE_MAX / 4)
        wrong = "saved_bytes or scratch_bytes does not fit in memory";
    if (!wrong) return true;
    return hpmli_false(ctx, HPML_ERR_ARGUMENT, "custom op \"%s\" of %s: %s", d->name ? d->name : "",
                       hpmli_describe(x), wrong);
}

/* Sets, by desc.batch_rows, how many rows of the result belong to a sample; false, with an error, if batch_rows is
   positive and the result does not have that many rows for each sample of the batch. */
HPMLI_FN bool hpmli_custom_batch(hpml_node *n)
{
    const hpml_custom *d     = n->attr.custom;
    int64_t            batch = 0, rows = d->batch_rows;
    for (int i = n->src_count - 1; i >= 0; i--)
        if (n->src[i]->batch_rows) batch = n->src[i]->shape[0] / n->src[i]->batch_rows;
    if (rows > 0 && (batch == 0 || n->out->shape[0] != rows * batch))
        return hpmli_false(n->out->ctx, HPML_ERR_SHAPE, "custom op \"%s\": batch_rows %lld do not make the result %s "
                           "of %lld samples", d->name, (long long)rows, hpmli_describe(n->out), (long long)batch);
    if (rows == 0 && batch > 0 && n->out->shape[0] % batch == 0) rows = n->out->shape[0] / batch;
    if (n->out->ndim > 0 || rows < 0) hpmli_node_batch(n, hpmli_max(rows, 0));
    return true;
}

HPML_API hpml_tensor *hpml_custom_op(hpml_tensor *const *src, int count, const hpml_custom *desc)
{
    hpml_custom d;
    if (!src || count < 1 || !src[0]) return NULL;
    hpml_ctx *ctx = src[0]->ctx;
    if (hpmli_failed(ctx) || !HPMLI_COPY_DESC(ctx, "custom op", d, desc)) return NULL;
    if (count > HPML_MAX_SRC)
        return hpmli_null(ctx, HPML_ERR_ARGUMENT, "custom op \"%s\": %d sources, at most %d", d.name ? d.name : "",
                          count, HPML_MAX_SRC);
    if (!hpmli_recordable(count, src) || !hpmli_custom_fits(ctx, &d, count, src)) return NULL;
    if (d.keeps == 0) d.keeps = ((UINT32_C(1) << count) - 1 - d.in_place) | HPML_KEEP_OUT;
    d.keeps &= ~HPML_KEEP_NONE;
    if (d.ndim == 0 && !d.one_number) {
        d.ndim = src[0]->ndim;
        memcpy(d.shape, src[0]->shape, sizeof d.shape);
    }
    d.name = hpmli_strdup(ctx, d.name);
    hpml_custom *copy = hpmli_new(ctx, hpml_custom, 1);
    const char  *name = hpmli_layer_name(ctx, NULL, d.name);
    if (!copy) return NULL;
    *copy = d;
    hpml_node *n = hpmli_node_create(HPML_OP_CUSTOM, name, count, src, d.ndim, d.shape);
    n->attr.custom   = copy;
    n->saved_bytes   = d.saved_bytes;
    n->scratch_bytes = d.scratch_bytes;
    if (!n->out || !hpmli_custom_batch(n)) return NULL;
    if (!d.backward) n->out->needs_grad = false;
    if (ctx->device != (void *)ctx && !d.kernel.forward) hpmli_wrap_plan(ctx, n);
    n->state->host_bytes = (n->saved_bytes + 63) / 64 * 64 + n->scratch_bytes;
    return n->out;
}

HPML_API hpml_status hpml_custom_on_host(const hpml_run *run, hpml_node *node, bool backward)
{
    hpml_node on_host = *node; /* with memory of the host */
    if (!node->state->host) node->state->host = (char *)hpmli_alloc(run->ctx, node->state->host_bytes);
    if (hpmli_failed(run->ctx)) return run->ctx->status;
    on_host.saved   = node->state->host;
    on_host.scratch = node->state->host + (node->attr.custom->saved_bytes + 63) / 64 * 64;
    return hpmli_wrap_run(run, &on_host, backward);
}

// ---------------------------------------------------------------------------------------------------------------------
// >>groups   ops that communicate in a group: copy, sum, split, gather
// ---------------------------------------------------------------------------------------------------------------------
/* The ops copy, sum, split and gather transfer arrays between the ranks of a group, and so do their backward passes.
   Where all ranks have one loss (axis TENSOR), copy and sum, and split and gather, are conjugate: each is the backward
   pass of the other, as in Megatron (Shoeybi et al. 2019). Where each rank has a loss of its own (DATA, SEQUENCE,
   EXPERT), the backward passes of sum and gather add up the ranks' gradients; the backward passes of copy and split do
   not, because gradients of whole parameters are added up over these ranks afterwards. */
typedef enum hpmli_transfer {
    HPMLI_TRANSFER_KEEP,    /* the array itself */
    HPMLI_TRANSFER_ADD_UP,  /* the sum of the ranks' arrays */
    HPMLI_TRANSFER_CUT,     /* this rank's part of a whole */
    HPMLI_TRANSFER_JOIN,    /* the whole of the ranks' parts */
    HPMLI_TRANSFER_PAD,     /* a whole of zeros with this rank's part */
    HPMLI_TRANSFER_SCATTER  /* this rank's part of the sum of the ranks' wholes */
} hpmli_transfer;
typedef struct hpmli_group_kind {
    const char    *name;
    hpmli_transfer forward, back, back_apart; /* back: all ranks have one loss; back_apart: each has its own */
} hpmli_group_kind;
static const hpmli_group_kind hpmli_group_kinds[] = {
    { "group_copy", HPMLI_TRANSFER_KEEP, HPMLI_TRANSFER_ADD_UP, HPMLI_TRANSFER_KEEP },
    { "group_sum", HPMLI_TRANSFER_ADD_UP, HPMLI_TRANSFER_KEEP, HPMLI_TRANSFER_ADD_UP },
    { "group_split", HPMLI_TRANSFER_CUT, HPMLI_TRANSFER_JOIN, HPMLI_TRANSFER_PAD },
    { "group_gather", HPMLI_TRANSFER_JOIN, HPMLI_TRANSFER_CUT, HPMLI_TRANSFER_SCATTER }
};
enum { HPMLI_GROUP_COPY, HPMLI_GROUP_SUM, HPMLI_GROUP_SPLIT, HPMLI_GROUP_GATHER };

typedef struct hpmli_group_op {
    const hpml_group *group;
    hpmli_transfer    forward, back;
    hpmli_cut         cut; /* the part in the whole */
} hpmli_group_op;

/* Runs transfer `kind` of the array `from` to the array `to`, which may be the same array for KEEP and ADD_UP.
   n: elements of a rank's part; work: scratch memory for a whole tensor. */
HPMLI_FN hpml_status hpmli_transfer_run(const hpmli_group_op *o, hpmli_transfer kind, float *from, float *to,
                                        int64_t n, float *work)
{
    const hpml_group *g = o->group;
    hpmli_cut         c = o->cut;
    switch (kind) {
    case HPMLI_TRANSFER_KEEP: case HPMLI_TRANSFER_ADD_UP:
        if (to != from) memcpy(to, from, (size_t)n * sizeof *to);
        return kind == HPMLI_TRANSFER_KEEP ? HPML_OK : g->sum(g->user, to, n);
    case HPMLI_TRANSFER_CUT: hpmli_cut_copy(&c, from, to, 0, n, false); break;
    case HPMLI_TRANSFER_JOIN: return hpmli_cut_join(g, c, from, n, work, to);
    case HPMLI_TRANSFER_PAD:
        memset(to, 0, (size_t)(n * c.size) * sizeof *to);
        hpmli_cut_copy(&c, to, from, 0, n, true);
        break;
    case HPMLI_TRANSFER_SCATTER:
        for (c.rank = 0; c.rank < c.size; c.rank++) hpmli_cut_copy(&c, from, work + c.rank * n, 0, n, false);
        return g->scatter(g->user, work, to, n);
    }
    return HPML_OK;
}

HPMLI_FN hpml_status hpmli_group_pass(const hpml_run *run HPMLI_UNUSED, hpml_node *n)
{
    const hpmli_group_op *o    = (const hpmli_group_op *)n->attr.custom->user;
    int64_t               part = hpmli_min(hpml_tensor_count(n->src[0]), hpml_tensor_count(n->out));
    return hpmli_transfer_run(o, o->forward, n->src[0]->data, n->out->data, part, (float *)n->scratch);
}

HPMLI_FN hpml_status hpmli_group_back(const hpml_run *run, hpml_node *n)
{
    const hpmli_group_op *o     = (const hpmli_group_op *)n->attr.custom->user;
    int64_t               part  = hpmli_min(hpml_tensor_count(n->src[0]), hpml_tensor_count(n->out));
    float                *given = n->out->grad, *work = (float *)n->scratch;
    if (o->cut.size > 0) given = work + part * o->cut.size; /* split, gather: behind the memory of the parts */
    hpml_status status = hpmli_transfer_run(o, o->back, n->out->grad, given, part, work);
    hpml_node_give(run, n, 0, given);
    return status;
}

/* True if a group op is to be recorded, because `axis` has several ranks; false also after an error. */
HPMLI_FN bool hpmli_group_ready(int kind, hpml_tensor *x, hpml_axis axis, int dim)
{
    if (!hpmli_recordable(1, &x)) return false;
    if ((int)axis < 0 || axis >= HPML_AXES || axis == HPML_AXIS_PIPE || dim < 0 || dim >= hpmli_max(x->ndim, 1))
        return hpmli_false(x->ctx, HPML_ERR_ARGUMENT, "%s of %s: %s axis, dimension %d; expected the data, tensor, "
                           "sequence or expert axis and a dimension of the tensor", hpmli_group_kinds[kind].name,
                           hpmli_describe(x), hpml_axis_name(axis), dim);
    return hpml_ctx_group(x->ctx, axis)->size > 1;
}

/* Records the node of a transfer over the ranks of an axis (hpmli_group_kinds); a group of one rank needs none. */
HPMLI_FN hpml_tensor *hpmli_group_record(int kind, hpml_tensor *x, hpml_axis axis, int dim)
{
    const hpmli_group_kind *k    = &hpmli_group_kinds[kind];
    const int64_t           size = hpml_ctx_group(x->ctx, axis)->size;
    const bool              cuts = k->forward == HPMLI_TRANSFER_CUT, joins = k->forward == HPMLI_TRANSFER_JOIN;
    hpml_custom             d    = HPMLI_ZEROED;
    hpmli_group_op         *o    = hpmli_new(x->ctx, hpmli_group_op, 1);
    if (!o) return NULL;
    o->group     = hpml_ctx_group(x->ctx, axis);
    o->forward   = k->forward;
    o->back      = axis == HPML_AXIS_TENSOR ? k->back : k->back_apart;
    d.name       = k->name;
    d.forward    = hpmli_group_pass;
    d.backward   = hpmli_group_back;
    d.user       = o;
    d.keeps      = HPML_KEEP_NONE;
    d.in_place   = !cuts && !joins;
    d.collective = true;
    if (!d.in_place) {
        o->cut = hpmli_cut_of(x, axis, dim, cuts ? size : hpmli_sections(x, dim));
        d.ndim = x->ndim;
        memcpy(d.shape, x->shape, sizeof d.shape);
        d.shape[dim]    = cuts ? x->shape[dim] / size : x->shape[dim] * size;
        d.batch_rows    = x->batch_rows * d.shape[0] / x->shape[0];
        d.scratch_bytes = (size_t)hpml_tensor_count(x) * (size_t)(cuts ? 1 : size) * 2 * sizeof(float);
        if (d.batch_rows == 0) d.batch_rows = -1;
    }
    hpml_tensor *y = hpml_custom_op(&x, 1, &d);
    if (!y) return NULL;
    x->ctx->group_nodes++;
    hpmli_split_take(y, x->split, x->sections);
    if (!d.in_place) y->split[dim] = (int8_t)(cuts ? axis : HPML_AXIS_DATA);
    return y;
}

HPML_API hpml_tensor *hpml_group_copy(hpml_tensor *x, hpml_axis axis)
{
    bool ready = hpmli_group_ready(HPMLI_GROUP_COPY, x, axis, 0);
    if (!ready || axis != HPML_AXIS_TENSOR || !x->needs_grad) return x && x->ctx->status == HPML_OK ? x : NULL;
    if (x->state->copied) return x->state->copied;
    hpml_tensor *y = hpmli_group_record(HPMLI_GROUP_COPY, x, axis, 0);
    if (y) y->state->copied = y;
    if (x->node) x->state->copied = y; /* inputs and parameters may be in several graphs, results are in one */
    return y;
}

HPML_API hpml_tensor *hpml_group_sum(hpml_tensor *x, hpml_axis axis)
{
    if (hpmli_group_ready(HPMLI_GROUP_SUM, x, axis, 0)) return hpmli_group_record(HPMLI_GROUP_SUM, x, axis, 0);
    return x && x->ctx->status == HPML_OK ? x : NULL;
}

HPML_API hpml_tensor *hpml_group_split(hpml_tensor *x, hpml_axis axis, int dim)
{
    if (!hpmli_group_ready(HPMLI_GROUP_SPLIT, x, axis, dim)) return x && x->ctx->status == HPML_OK ? x : NULL;
    const int64_t size = hpml_ctx_group(x->ctx, axis)->size;
    if (x->split[dim] || x->sections > 1 || x->shape[dim] % size != 0 || (dim == 0 && x->batch_rows % size != 0))
        return hpmli_null(x->ctx, HPML_ERR_SHAPE, "group_split along dimension %d over the %s axis: %s is %s; expected "
                          "a whole dimension%s that divides among the %lld ranks", dim, hpml_axis_name(axis),
                          hpmli_describe(x), hpmli_split_text(x), dim == 0 && x->batch_rows ? " of a sample" : "",
                          (long long)size);
    return hpmli_group_record(HPMLI_GROUP_SPLIT, x, axis, dim);
}

HPML_API hpml_tensor *hpml_group_gather(hpml_tensor *x, hpml_axis axis, int dim)
{
    if (!hpmli_group_ready(HPMLI_GROUP_GATHER, x, axis, dim)) return x && x->ctx->status == HPML_OK ? x : NULL;
    if (x->split[dim] && x->split[dim] != (int8_t)axis)
        return hpmli_null(x->ctx, HPML_ERR_SHAPE, "group_gather along dimension %d over the %s axis: %s is %s", dim,
                          hpml_axis_name(axis), hpmli_describe(x), hpmli_split_text(x));
    return hpmli_group_record(HPMLI_GROUP_GATHER, x, axis, dim);
}

/* Records an op that reads a table or logits split by vocabulary, with the passes of the built-in op; see >>split. */
static hpml_tensor *hpmli_vocabulary_op(hpml_tensor *const src[2], hpml_custom *d, int64_t count, float smoothing,
                                        int32_t ignore)
{
    hpmli_vocabulary *v = hpmli_new(src[0]->ctx, hpmli_vocabulary, 1);
    if (!v) return NULL;
    v->group      = hpml_ctx_group(src[0]->ctx, HPML_AXIS_TENSOR);
    v->first      = v->group->rank * count;
    v->count      = count;
    v->whole      = v->group->size * count;
    v->smoothing  = smoothing;
    v->ignore     = ignore;
    d->user       = v;
    d->collective = true;
    return hpml_custom_op(src, 2, d);
}

// ---------------------------------------------------------------------------------------------------------------------
// >>backend   the CPU backend: memory, sums of squares, the table of ops
// ---------------------------------------------------------------------------------------------------------------------
HPMLI_FN hpml_status hpmli_cpu_open(hpml_ctx *ctx, const void *desc HPMLI_UNUSED, void **device)
{
    *device = ctx;
    if (ctx->activation_dtype != HPML_DTYPE_F32) ctx->ops = hpmli_wrap_ops();
    return HPML_OK;
}
HPMLI_FN hpml_dtype hpmli_cpu_activation_dtype(void *device)
{
    return ((const hpml_ctx *)device)->activation_dtype;
}
HPMLI_FN void  hpmli_cpu_close(void *device) { (void)device; }

/* hpmli_cpu_alloc zeroes new memory by all threads, in pieces of HPMLI_CLEAR bytes, because the first access to each
   page is slow: the system has to provide the page. Requesting the pages of a piece at once halves the time. */
#define HPMLI_CLEAR (UINT32_C(1) << 21)
typedef struct hpmli_clear_job {
    char  *p;
    size_t bytes;
} hpmli_clear_job;
HPMLI_FN void hpmli_clear_task(void *arg, int64_t task, int thread HPMLI_UNUSED)
{
    const hpmli_clear_job *j = (const hpmli_clear_job *)arg;
    size_t at = (size_t)task * HPMLI_CLEAR, end = j->bytes - at < HPMLI_CLEAR ? j->bytes : at + HPMLI_CLEAR;
    for (size_t n; at < end; at += n) { /* an eighth at a time: it is still in the cache when it is zeroed */
        n = end - at < HPMLI_CLEAR / 8 ? end - at : HPMLI_CLEAR / 8;
#ifdef MADV_POPULATE_WRITE
        char *page = j->p + at + (4096 - (uintptr_t)(j->p + at) % 4096) % 4096;
        if (n > 8192) madvise(page, n - 4096, MADV_POPULATE_WRITE);
#endif
        memset(j->p + at, 0, n);
    }
}

HPMLI_FN void *hpmli_cpu_alloc(void *device, size_t bytes)
{
    hpml_ctx       *ctx = (hpml_ctx *)device;
    hpmli_clear_job j   = { (char *)hpmli_alloc(ctx, bytes), bytes };
    if (j.p) hpmli_parallel(ctx, (int64_t)((bytes + HPMLI_CLEAR - 1) / HPMLI_CLEAR), hpmli_clear_task, &j);
    return j.p;
}
HPMLI_FN void hpmli_cpu_free(void *device, void *p, size_t bytes HPMLI_UNUSED) { hpmli_free((hpml_ctx *)device, p); }
HPMLI_FN hpml_status hpmli_cpu_copy(void *device HPMLI_UNUSED, void *to, const void *from, size_t bytes)
{
    memcpy(to, from, bytes);
    return HPML_OK;
}
HPMLI_FN hpml_status hpmli_cpu_zero(void *device HPMLI_UNUSED, void *dst, size_t bytes)
{
    memset(dst, 0, bytes);
    return HPML_OK;
}

typedef struct hpmli_sumsq_job {
    const hpmli_kernels *k;
    hpml_dtype           dtype;
    const void          *x;
    int64_t              n, piece;
    double               part[HPMLI_SUM_TASKS];
} hpmli_sumsq_job;
HPMLI_FN void hpmli_sumsq_task(void *arg, int64_t task, int thread HPMLI_UNUSED)
{
    hpmli_sumsq_job *j = (hpmli_sumsq_job *)arg;
    int64_t          i = task * j->piece, n = j->n - i < j->piece ? j->n - i : j->piece;
    const char      *x = (const char *)j->x + (size_t)i * hpml_dtype_size(j->dtype);
    float            piece[HPMLI_PIECE];
    if (j->dtype == HPML_DTYPE_F32) {
        j->part[task] = j->k->vdot_wide((const float *)(const void *)x, (const float *)(const void *)x, n);
        return;
    }
    j->part[task] = 0;
    HPMLI_PIECES(at, c, n) {
        j->k->to_f32(piece, j->dtype, x + (size_t)at * hpml_dtype_size(j->dtype), c);
        j->part[task] += j->k->vdot_wide(piece, piece, c);
    }
}

HPMLI_FN hpml_status hpmli_cpu_sumsq(void *device HPMLI_UNUSED, hpml_ctx *ctx, hpml_dtype dtype, const void *x,
                                     int64_t n, double *out)
{
    hpmli_sumsq_job j;
    j.k     = ctx->k;
    j.dtype = dtype;
    j.x     = x;
    j.n     = n;
    j.piece = hpmli_max((n + HPMLI_SUM_TASKS - 1) / HPMLI_SUM_TASKS, HPMLI_GRAIN);
    int64_t tasks = (n + j.piece - 1) / j.piece;
    hpmli_parallel(ctx, tasks, hpmli_sumsq_task, &j);
    *out = 0;
    for (int64_t i = 0; i < tasks; i++) *out += j.part[i];
    if (*out - *out == 0) return HPML_OK;
    float piece[HPMLI_PIECE]; /* squares that overflow in float do not in double, so a finite sum may remain */
    *out = 0;
    HPMLI_PIECES(at, c, n) {
        j.k->to_f32(piece, dtype, (const char *)x + (size_t)at * hpml_dtype_size(dtype), c);
        for (int64_t i = 0; i < c; i++) *out += (double)piece[i] * (double)piece[i];
    }
    return HPML_OK;
}

/* Takes the optimizer steps of `count` parameters; see >>optimizers. */
static hpml_status hpmli_cpu_update(void *device, hpml_ctx *ctx, const hpml_update *updates, int count);

HPMLI_FN const hpmli_op_info *hpmli_op_row(hpml_op op)
{
    static const hpmli_op_info *const table[HPML_OP_COUNT] = {
#define HPMLI_OP_ROW(op, name) &hpmli_##name##_op,
        HPML_OPS(HPMLI_OP_ROW)
    };
    return table[op];
}

HPML_API const hpml_backend *hpml_backend_cpu(void)
{
    static const hpml_op_impl ops[HPML_OP_COUNT] = {
#define HPMLI_CPU_IMPL(op, name) { hpmli_##name##_forward, hpmli_##name##_backward },
        HPML_OPS(HPMLI_CPU_IMPL)
    };
    static const hpml_backend cpu = {
        "cpu",
        hpmli_cpu_open,
        hpmli_cpu_close,
        hpmli_cpu_alloc,
        hpmli_cpu_free,
        hpmli_cpu_copy,             /* write: to the device from the host */
        hpmli_cpu_copy,             /* read: to the host from the device */
        hpmli_cpu_zero,
        NULL,                       /* sync: all calls are complete on return */
        ops,
        hpmli_cpu_update,
        hpmli_cpu_sumsq,
        hpmli_cpu_activation_dtype,
        hpmli_wrap_plan,
        NULL,                       /* begin: passes are not recorded */
        NULL,                       /* end: passes are not recorded */
        NULL,                       /* correct: the trainer counts on the host */
        NULL,                       /* encode: hpml_packing_encode is the CPU's */
        NULL,                       /* decode: hpml_packing_decode is the CPU's */
        NULL,                       /* time_op: the host's clock times ops */
        true,                       /* layouts: kernels take NHWC, too */
        true                        /* host */
    };
    return &cpu;
}

// =====================================================================================================================
// PART V    TRAINING: optimizers, steps, gradients packed for the wire
// =====================================================================================================================
/* An update of the parameters w from k micro-batches (k = accumulate; the i-th has B_i samples and is given to one call
   of hpml_trainer_step) does in order:
       x, y -> inputs                       hpml_trainer_step copies the next micro-batch to the device
       l_i = mean over B_i of loss          forward pass
       G  = L a_i dl_i/dw, added from i = 2 backward pass; L: loss scale, a_i = B_i / (k B_1)
       g  = G / (L s)                       s = sum of a_i: so g is the mean over all samples, short batches included
       g  = g min(1, clip_norm / |g|)       |g|: norm over all parameters; overflow: no update
       w, states = step(w, g, states)       see >>optimizers; lr by schedule and lr_rule
       L  = L / 2 after an overflow, 2 L after 2,000 updates without one, where L is dynamic
   G / (L s) and clipping are factors of the step (hpml_update.grad_scale, .clip), not passes over memory. The hooks of
   hpml_hooks: `run` replaces the forward and backward pass, `grad` is called within backward when a gradient is final,
   `update` before clipping. A hook that is not set costs a branch. */

// ---------------------------------------------------------------------------------------------------------------------
// >>optimizers   the table of optimizers, the driver of their steps, schedules
// ---------------------------------------------------------------------------------------------------------------------
/* The step of one parameter w, from its gradient G in memory, by the optimizer's row of the table below, in order:
       g = grad_scale G                   grad_scale: 1 / loss scale, times clip / norm if all gradients are clipped
       row->prepare(u, |w|, |g|)          may change rates: LARS
       w, states = row->step(w, g, ..)    or, in a row with `direction`: r = row->step(w, g, ..), and then
       w = w - lr r                       layer_ratio: w - lr |w| / |r| r (LAMB)
   Weight decay is part of a row's formula. Built-in rows have no function `step`, but vector kernels (>>vupdate) and,
   for devices, kernels of the device (hpml_cuda.cuh, >>gpu-update). Threads step ranges of a parameter at once. A large
   linear layer steps a range of its weights right after the product that makes their gradient, because the range is
   still in the cache; that needs an optimizer whose step reads no other gradient, without prepare and direction. */
#define HPMLI_OPTIMIZER_NAME 31 /* characters of an optimizer's name, at most */
#define HPMLI_STATE_NAME     23 /* characters of a state's name, at most */
HPMLI_FN void hpmli_lars_prepare(hpml_update *u, double weight_norm, double grad_norm);
/* The built-in optimizers, indexed by hpml_opt. Columns: name, hpml_opt, state_count, states (name, nonnegative,
   with_momentum: kept only if momentum is not 0; state 0 is a sum or mean of gradients, state 1 of their squares);
   defaults of lr, momentum, beta1, beta2, eps, trust; nesterov, direction, layer_ratio, whole, prepare, step. */
static const hpml_optimizer hpmli_optimizers[] = {
    { "sgd", HPML_OPT_SGD, 1, { { "momentum", false, true } },
      0.01f, 0, 0, 0, 0, 0, true, false, false, false, NULL, NULL },
    { "adagrad", HPML_OPT_ADAGRAD, 2, { { NULL, false, false }, { "square_sum", true, false } },
      0.01f, 0, 0, 0, 1e-10f, 0, false, false, false, false, NULL, NULL },
    { "rmsprop", HPML_OPT_RMSPROP, 2, { { "momentum", false, true }, { "square_mean", true, false } },
      0.001f, 0, 0, 0.99f, 1e-8f, 0, false, false, false, false, NULL, NULL },
    { "adam", HPML_OPT_ADAM, 2, { { "mean", false, false }, { "square_mean", true, false } },
      0.001f, 0, 0.9f, 0.999f, 1e-8f, 0, false, false, false, false, NULL, NULL },
    { "adamw", HPML_OPT_ADAMW, 2, { { "mean", false, false }, { "square_mean", true, false } },
      0.001f, 0, 0.9f, 0.999f, 1e-8f, 0, false, false, false, false, NULL, NULL },
    { "lars", HPML_OPT_LARS, 1, { { "momentum", false, true } },
      0.01f, 0.9f, 0, 0, 0, 0.001f, true, false, false, false, hpmli_lars_prepare, NULL },
    { "lamb", HPML_OPT_LAMB, 2, { { "mean", false, false }, { "square_mean", true, false } },
      0.001f, 0, 0.9f, 0.999f, 1e-6f, 0, false, true, true, false, NULL, NULL },
};

HPML_API const hpml_optimizer *hpml_optimizer_at(int index)
{
    int count = (int)(sizeof hpmli_optimizers / sizeof *hpmli_optimizers);
    return index >= 0 && index < count ? &hpmli_optimizers[index] : NULL;
}

HPML_API const hpml_optimizer *hpml_optimizer_find(const char *name)
{
    const hpml_optimizer *row = NULL;
    for (int i = 0; name && (row = hpml_optimizer_at(i)) != NULL; i++)
        if (strcmp(row->name, name) == 0) return row;
    return NULL;
}

/* Returns the user's optimizer `custom` or, where it is NULL, the built-in one of kind `opt`; NULL: there is none. */
HPMLI_FN const hpml_optimizer *hpmli_optimizer_row(hpml_opt opt, const hpml_optimizer *custom)
{
    return custom ? custom : hpml_optimizer_at((int)opt);
}

/* True if the optimizer `row` uses its state array number k; some states are used only if momentum is not 0. */
HPMLI_FN bool hpmli_optimizer_keeps(const hpml_optimizer *row, int k, float momentum)
{
    return k < row->state_count && row->states[k].name && (!row->states[k].with_momentum || momentum != 0);
}

HPMLI_FN float hpmli_default_if_zero(float value, float otherwise) /* maps 0 to `otherwise`, HPML_ZERO to 0 */
{
    if (value == 0) return otherwise;
    return value == HPML_ZERO ? 0 : value;
}

/* True if state k of an optimizer has a name of 1 to 23 letters, digits and `_` that no state before k has. */
HPMLI_FN bool hpmli_state_name_fits(const hpml_optimizer *row, int k)
{
    static const char legal[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_";
    const char       *name    = row->states[k].name;
    size_t            length  = name ? strlen(name) : 0;
    if (length < 1 || length > HPMLI_STATE_NAME || strspn(name, legal) != length) return false;
    for (int i = 0; i < k; i++)
        if (strcmp(row->states[i].name, name) == 0) return false;
    return true;
}

/* Checks the user's own optimizer (built-in ones are right); false: an error on ctx names the field that is wrong.
   on_host: the optimizer steps on the host, as hpml_trainer_desc.host_optimizer asks, also for a device. */
HPMLI_FN bool hpmli_optimizer_check(hpml_ctx *ctx, const hpml_optimizer *row, bool on_host)
{
    const char *name = row->name ? row->name : "";
    if (hpml_optimizer_find(name) == row) return true;
    if (!*name || strlen(name) > HPMLI_OPTIMIZER_NAME)
        return hpmli_false(ctx, HPML_ERR_ARGUMENT, "trainer: custom_optimizer has %s; set .name to 1 to %d "
                           "characters, because checkpoints hold it", *name ? "too long a name" : "no name",
                           HPMLI_OPTIMIZER_NAME);
    if (hpml_optimizer_find(name))
        return hpmli_false(ctx, HPML_ERR_ARGUMENT, "trainer: custom_optimizer \"%s\" has the name of a built-in row; "
                           "take another name, because a checkpoint names its optimizer", name);
    if (!row->step)
        return hpmli_false(ctx, HPML_ERR_ARGUMENT, "trainer: custom_optimizer \"%s\" has no step; set .step to a "
                           "function", name);
    if (row->state_count < 0 || row->state_count > HPML_MAX_STATES)
        return hpmli_false(ctx, HPML_ERR_ARGUMENT, "trainer: custom_optimizer \"%s\" has a state_count of %d, expected "
                           "0 to %d (HPML_MAX_STATES)", name, row->state_count, HPML_MAX_STATES);
    for (int k = 0; k < row->state_count; k++)
        if (!hpmli_state_name_fits(row, k))
            return hpmli_false(ctx, HPML_ERR_ARGUMENT, "trainer: custom_optimizer \"%s\": the name of state %d of %d "
                               "is \"%.32s\", expected 1 to %d letters, digits or _, no two the same", name, k,
                               row->state_count, row->states[k].name ? row->states[k].name : "", HPMLI_STATE_NAME);
    if ((row->whole || row->layer_ratio) && !row->direction)
        return hpmli_false(ctx, HPML_ERR_ARGUMENT, "trainer: custom_optimizer \"%s\" sets %s without .direction; its "
                           "step must write a direction over g", name, row->whole ? ".whole" : ".layer_ratio");
    if (!ctx->backend->host && !on_host)
        return hpmli_false(ctx, HPML_ERR_UNSUPPORTED, "trainer: custom_optimizer \"%s\" runs on the CPU backend only, "
                           "this context's is \"%s\"; take a built-in row (hpml_optimizer_find), or set "
                           ".host_optimizer", name, ctx->backend->name);
    return true;
}

/* Writes to g the gradient of elements i .. i + n - 1 of u's parameter, times u->grad_scale. If u->found_nonfinite is
   set, a NaN or infinity becomes 0. Returns HPML_NONFINITE_GRADIENT if there was one, else 0. g may be u->g + i. */
HPMLI_FN int hpmli_custom_gradient(const hpml_update *u, float *g, int64_t i, int64_t n)
{
    int found = 0;
    for (int64_t j = 0; j < n; j++) {
        g[j] = u->g[i + j] * u->grad_scale;
        if (!u->found_nonfinite || g[j] - g[j] == 0) continue;
        g[j]  = 0;
        found = HPML_NONFINITE_GRADIENT;
    }
    return found;
}

/* Repairs n weights after a step: a w that is not finite becomes its old value in `was` (NULL: w stays as it is); if
   one of a weight's states is not finite, all become 0. Returns HPML_NONFINITE_STEP if it changed any, else 0. */
HPMLI_FN int hpmli_custom_restore(float *w, const float *was, float *const *state, int64_t n)
{
    int found = 0;
    for (int64_t j = 0; j < n; j++) {
        bool lost = false;
        for (int k = 0; k < HPML_MAX_STATES; k++)
            if (state[k] && state[k][j] - state[k][j] != 0) lost = true;
        for (int k = 0; k < HPML_MAX_STATES; k++)
            if (state[k] && lost) state[k][j] = 0;
        if (lost) found = HPML_NONFINITE_STEP;
        if (!was || w[j] - w[j] == 0) continue;
        w[j]  = was[j];
        found = HPML_NONFINITE_STEP;
    }
    return found;
}

/* Calls the step of the user's optimizer for elements i .. i + n - 1 of u's parameter. g, was: (n) memory for gradients
   and old weights; was NULL: the optimizer writes a direction. Returns HPML_NONFINITE_ bits, or 0. */
HPMLI_FN int hpmli_custom_piece(const hpml_update *u, float *g, float *was, int64_t i, int64_t n)
{
    float *state[HPML_MAX_STATES], *w = u->w + i;
    int    found = hpmli_custom_gradient(u, g, i, n);
    for (int k = 0; k < HPML_MAX_STATES; k++) state[k] = u->state[k] ? u->state[k] + i : NULL;
    if (was) memcpy(was, w, (size_t)n * sizeof *w);
    u->custom->step(u, w, g, state, n);
    if (u->found_nonfinite) found |= hpmli_custom_restore(w, was, state, n);
    return found;
}

/* Steps elements i .. i + n - 1 of o's parameter, by a kernel or the user's function; returns HPML_NONFINITE_ bits. */
HPMLI_FN int hpmli_optimizer_piece(hpml_ctx *ctx, const hpmli_opt_args *o, int64_t i, int64_t n)
{
    const hpml_update *u = &o->u;
    if (u->opt != HPML_OPT_CUSTOM) {
        float *first  = u->state[0] ? u->state[0] + i : NULL;
        float *second = u->state[1] ? u->state[1] + i : NULL;
        return ctx->k->opt_step(o, u->w + i, u->g + i, first, second, n);
    }
    if (u->custom->direction) return hpmli_custom_piece(u, u->g + i, NULL, i, n);
    float g[HPMLI_PIECE], was[HPMLI_PIECE];
    int   found = 0;
    HPMLI_PIECES(at, c, n) found |= hpmli_custom_piece(u, g, was, i + at, c);
    return found;
}

/* The step of a parameter, cut into tasks. If d, the product that makes the gradient, is not NULL, a task computes some
   rows of the gradient and then steps the same rows of the parameter, because they are still in the cache. */
typedef struct hpmli_update_job {
    hpml_ctx              *ctx;
    const hpmli_gemm_desc *d;
    hpmli_opt_args         o;
    int64_t                piece; /* numbers of the parameter that a task steps */
} hpmli_update_job;

HPMLI_FN void hpmli_update_task(void *arg, int64_t task, int thread)
{
    const hpmli_update_job *j = (const hpmli_update_job *)arg;
    const hpml_update      *u = &j->o.u;
    int64_t                 i = task * j->piece, n = hpmli_min(u->n - i, j->piece);
    if (j->d) {
        hpmli_gemm_part p = { j->d, 0, i / j->d->n, (i + n) / j->d->n, 0, j->d->n, NULL };
        p.ws = j->ctx->gemm_ws + (int64_t)thread * HPMLI_GEMM_WS;
        j->ctx->k->gemm_part(&p);
    }
    int found = hpmli_optimizer_piece(j->ctx, &j->o, i, n);
    if (found && u->found_nonfinite) __atomic_fetch_or(u->found_nonfinite, found, __ATOMIC_RELAXED);
}

/* Steps one row of a sparse table, number `task` in the list of rows with a gradient. Of that row only the elements are
   stepped that are in u->w, which may be a shard of the table. */
HPMLI_FN void hpmli_update_row_task(void *arg, int64_t task, int thread HPMLI_UNUSED)
{
    const hpmli_update_job *j = (const hpmli_update_job *)arg;
    const hpml_update      *u = &j->o.u;
    const int64_t           width = u->param->shape[1], skipped = u->w - u->param->data;
    const int64_t           row = u->param->state->rows->index[task] * width - skipped;
    const int64_t           at = hpmli_max(row, 0), end = hpmli_min(row + width, u->n);
    int found = at < end ? hpmli_optimizer_piece(j->ctx, &j->o, at, end - at) : 0;
    if (found && u->found_nonfinite) __atomic_fetch_or(u->found_nonfinite, found, __ATOMIC_RELAXED);
}

static void hpmli_optimizer_step(hpml_ctx *ctx, const hpml_update *u, const hpmli_gemm_desc *d)
{
    hpmli_update_job  j    = { ctx, d, { *u, 0, 0 }, HPMLI_GRAIN };
    const hpmli_rows *rows = u->param ? u->param->state->rows : NULL;
    j.o.correction1 = (float)(1 / (1 - pow((double)u->beta1, (double)u->step)));
    j.o.correction2 = (float)(1 / (1 - pow((double)u->beta2, (double)u->step)));
    if (d) j.piece = (2 * HPMLI_GRAIN / d->n / 12 + 1) * 12 * d->n; /* rows of d by 12: its tiles have 6 or 12 */
    if (u->opt == HPML_OPT_CUSTOM && u->custom->whole) j.piece = u->n;
    if (rows) hpmli_parallel(ctx, rows->count, hpmli_update_row_task, &j);
    else hpmli_parallel(ctx, (u->n + j.piece - 1) / j.piece, hpmli_update_task, &j);
}

HPMLI_FN const hpml_optimizer *hpmli_update_row(const hpml_update *u)
{
    return hpmli_optimizer_row(u->opt, u->opt == HPML_OPT_CUSTOM ? u->custom : NULL);
}

static bool hpmli_optimizer_by_pieces(const hpml_update *u)
{
    const hpml_optimizer *row = hpmli_update_row(u);
    return !row->prepare && !row->direction;
}

HPMLI_FN double hpmli_l2_norm(hpml_ctx *ctx, const float *x, int64_t n)
{
    double sum;
    hpmli_cpu_sumsq(NULL, ctx, HPML_DTYPE_F32, x, n, &sum);
    return sqrt(sum);
}

/* Computes norm[0] and norm[1], the Euclidean norms of the weights and of the array u->g: the gradient, or the
   direction that an optimizer's step has written over the gradient. */
HPMLI_FN void hpmli_update_norms(hpml_ctx *ctx, const hpml_update *u, double *norm)
{
    norm[0] = hpmli_l2_norm(ctx, u->w, u->n);
    norm[1] = hpmli_l2_norm(ctx, u->g, u->n);
}

/* LARS (You et al. 2017): lr = lr trust |w| / (|g| + decay |w|); parameters without decay (vectors) keep lr, as in the
   paper's code. The rate multiplies the gradient before it enters the momentum, so that a new rate does not rescale
   older gradients: the step is then SGD with lr 1. */
HPMLI_FN void hpmli_lars_prepare(hpml_update *u, double weight_norm, double grad_norm)
{
    double length = grad_norm + (double)u->weight_decay * weight_norm;
    if (weight_norm > 0 && length > 0 && u->trust > 0) u->lr *= (float)((double)u->trust * weight_norm / length);
    if (u->found_nonfinite && length - length != 0) u->lr = 0; /* a non-finite gradient has no direction */
    u->grad_scale *= u->lr;
    u->weight_decay *= u->lr;
    u->lr = 1;
}

/* Makes the optimizer's step with a clipped gradient. norm[2]: Euclidean norms of the weights and of the gradient, of
   the whole parameter, for an optimizer with `prepare`. */
HPMLI_FN void hpmli_step_prepared(hpml_ctx *ctx, const hpml_optimizer *row, hpml_update *u, const double *norm)
{
    if (row->prepare) row->prepare(u, norm[0], norm[1] * (double)u->grad_scale);
    hpmli_optimizer_step(ctx, u, NULL);
}

/* Steps along the direction r, which the optimizer's step has written over the gradient: w -= lr r, by plain SGD; with
   layer_ratio (LAMB, You et al. 2020): w -= lr |w| / |r| r. norm[2]: |w| and |r| of the whole parameter, if used. */
HPMLI_FN void hpmli_direction_apply(hpml_ctx *ctx, const hpml_optimizer *row, hpml_update u, const double *norm)
{
    if (row->layer_ratio) u.lr *= (float)(norm[0] > 0 && norm[1] > 0 ? norm[0] / norm[1] : 1);
    u.opt          = HPML_OPT_SGD;
    u.state[0]     = NULL;
    u.grad_scale   = 1;
    u.weight_decay = 0;
    hpmli_optimizer_step(ctx, &u, NULL);
}

/* Clips: reduces u->grad_scale, which multiplies the gradient, if the norm of all gradients is larger than u->clip. */
HPMLI_FN void hpmli_update_clip(hpml_update *u)
{
    float norm = u->sumsq ? (float)sqrt(*u->sumsq) : 0;
    if (norm > u->clip) u->grad_scale *= u->clip / norm;
}

static hpml_status hpmli_cpu_update(void *device HPMLI_UNUSED, hpml_ctx *ctx, const hpml_update *updates, int count)
{
    for (int i = 0; i < count; i++) {
        hpml_update           u       = updates[i];
        const hpml_optimizer *row     = hpmli_update_row(&u);
        double                norm[2] = { 0, 0 };
        if (u.n == 0) continue;
        hpmli_update_clip(&u);
        if (row->prepare) hpmli_update_norms(ctx, &u, norm);
        hpmli_step_prepared(ctx, row, &u, norm);
        if (row->layer_ratio) hpmli_update_norms(ctx, &u, norm);
        if (row->direction) hpmli_direction_apply(ctx, row, u, norm);
    }
    return HPML_OK;
}

HPML_API float hpml_schedule_lr(const hpml_schedule *s, float lr, int64_t step)
{
    if (!s) return lr;
    if (step < s->warmup_steps) return lr * (float)(step + 1) / (float)s->warmup_steps;
    double span = (double)(s->total_steps - s->warmup_steps);
    double t    = span > 0 ? fmin((double)(step - s->warmup_steps) / span, 1) : 1;
    if (s->kind == HPML_SCHEDULE_STEP && s->period > 0)
        lr *= (float)pow(s->gamma > 0 ? (double)s->gamma : 0.1, (double)(step / s->period));
    if (s->kind == HPML_SCHEDULE_COSINE) t = 0.5 - 0.5 * cos(3.14159265358979323846 * t);
    bool falls = s->kind == HPML_SCHEDULE_COSINE || s->kind == HPML_SCHEDULE_LINEAR;
    return falls ? s->min_lr + (lr - s->min_lr) * (float)(1 - t) : lr;
}

HPML_API float hpml_lr_scale(hpml_lr_rule rule, float lr, double factor)
{
    if (rule == HPML_LR_AS_GIVEN) return lr;
    return (float)((double)lr * (rule == HPML_LR_SQRT ? sqrt(factor) : factor));
}

// ---------------------------------------------------------------------------------------------------------------------
// >>codec   gradients packed for the wire
// ---------------------------------------------------------------------------------------------------------------------
/* The codecs none (plain f32), bf16 and 1-bit; the residual e is what packing lost. The paper on 1-bit gradients (Seide
   et al. 2014) prints the new e without the old one. Taken literally, sums drift apart by 30 % in 1,000 steps while
   training looks plausible: tests show it with a codec of their own. The paper's column, which shares two levels, is a
   row here: it is the fan-in, contiguous in our [out][in] weights, and long, so that the levels cost little. */

HPMLI_FN size_t hpmli_none_row_size(const hpml_codec_desc *desc HPMLI_UNUSED, int64_t cols)
{
    return (size_t)cols * sizeof(float);
}

HPMLI_FN size_t hpmli_bf16_row_size(const hpml_codec_desc *desc HPMLI_UNUSED, int64_t cols)
{
    return (size_t)cols * sizeof(uint16_t);
}

HPMLI_FN size_t hpmli_onebit_row_size(const hpml_codec_desc *desc HPMLI_UNUSED, int64_t cols)
{
    return 2 * sizeof(float) + (size_t)((cols + 31) / 32) * sizeof(uint32_t); /* two levels, then a bit a number */
}

HPMLI_FN size_t hpmli_twobit_row_size(const hpml_codec_desc *desc HPMLI_UNUSED, int64_t cols)
{
    return (size_t)((cols + 15) / 16) * sizeof(uint32_t);
}

HPMLI_FN hpml_status hpmli_none_encode(const hpml_packing *p, void *packed, float *e HPMLI_UNUSED, const float *g,
                                       int64_t rows, const hpml_encode_info *info HPMLI_UNUSED)
{
    if (rows > 0 && p->cols > 0) memcpy(packed, g, (size_t)rows * p->row_size);
    return HPML_OK;
}

HPMLI_FN void hpmli_none_decode(const hpml_packing *p, float *out, const void *packed, int64_t rows, bool add)
{
    if (add) p->kernels->vadd(out, out, (const float *)packed, rows * p->cols);
    else if (rows > 0 && p->cols > 0) memcpy(out, packed, (size_t)rows * p->row_size);
}

/* Packs g + e (gradient, residual or NULL), p->cols numbers, into q; e becomes what packing lost. False: NaN or inf. */
typedef bool hpmli_pack_row(const hpml_packing *p, uint8_t *q, float *e, const float *g);
HPMLI_FN bool hpmli_bf16_pack(const hpml_packing *p, uint8_t *q, float *e, const float *g)
{
    return p->kernels->bf16_encode((uint16_t *)(void *)q, e, g, p->cols);
}

HPMLI_FN void hpmli_bf16_decode(const hpml_packing *p, float *out, const void *packed, int64_t rows, bool add)
{
    if (add) p->kernels->bf16_decode_add(out, packed, rows * p->cols);
    else p->kernels->to_f32(out, HPML_DTYPE_BF16, packed, rows * p->cols);
}

/* Returns the mean of a row's numbers below 0 (side 0) or of the others (side 1), clamped to their range; none: 0. */
HPMLI_FN float hpmli_onebit_level(const hpmli_onebit_row *row, int side)
{
    if (row->count[side] == 0) return 0;
    float mean = (float)(row->sum[side] / (double)row->count[side]);
    if (mean < row->least[side]) return row->least[side];
    return mean > row->most[side] ? row->most[side] : mean;
}

HPMLI_FN bool hpmli_onebit_pack(const hpml_packing *p, uint8_t *q, float *e, const float *g)
{
    hpmli_onebit_row row;
    float            level[2];
    p->kernels->onebit_scan(&row, q + sizeof level, e, g, p->cols);
    if (!(fabs(row.sum[0]) <= DBL_MAX && fabs(row.sum[1]) <= DBL_MAX)) return false;
    level[0] = hpmli_onebit_level(&row, 0);
    level[1] = hpmli_onebit_level(&row, 1);
    memcpy(q, level, sizeof level);
    if (e) p->kernels->onebit_carry(e, level[0], level[1], p->cols);
    return true;
}

HPMLI_FN void hpmli_onebit_decode(const hpml_packing *p, float *out, const void *packed, int64_t rows, bool add)
{
    const hpmli_kernels *k = p->kernels;
    const uint8_t       *q = (const uint8_t *)packed;
    for (int64_t r = 0; r < rows; r++, out += p->cols, q += p->row_size) {
        float level[2];
        memcpy(level, q, sizeof level);
        (add ? k->onebit_decode_add : k->onebit_decode)(out, q + sizeof level, level[0], level[1], p->cols);
    }
}

HPMLI_FN bool hpmli_twobit_pack(const hpml_packing *p, uint8_t *q, float *e, const float *g)
{
    const float t   = p->desc.threshold;
    float       bad = 0;
    memset(q, 0, p->row_size);
    for (int64_t i = 0; i < p->cols; i++) {
        float    v    = g[i] + (e ? e[i] : 0), sent = 0;
        unsigned code = 0;
        if (v >= t) {
            sent = t;
            code = 3;
        } else if (v <= -t) {
            sent = -t;
            code = 2;
        }
        q[i / 4] = (uint8_t)(q[i / 4] | code << (2 * (i % 4)));
        bad += v - v; /* 0 unless v is NaN or infinite */
        if (e) e[i] = v - sent;
    }
    return bad == 0;
}

/* Packs rows of g + e by `pack`. A row with a NaN or infinity is packed as zeros and its residual e is zeroed, because
   e would keep it for ever and the packed row bring it to other ranks; returns HPML_ERR_NONFINITE then. */
HPMLI_FN hpml_status hpmli_encode_rows(const hpml_packing *p, void *packed, float *e, const float *g, int64_t rows,
                                       hpmli_pack_row *pack)
{
    hpml_status status = HPML_OK;
    for (int64_t r = 0; r < rows; r++, g += p->cols) {
        uint8_t *q  = (uint8_t *)packed + (size_t)r * p->row_size;
        float   *er = e ? e + r * p->cols : NULL;
        if (pack(p, q, er, g)) continue;
        memset(q, 0, p->row_size);
        if (er) memset(er, 0, (size_t)p->cols * sizeof(float));
        status = HPML_ERR_NONFINITE;
    }
    return status;
}

HPMLI_FN hpml_status hpmli_bf16_encode(const hpml_packing *p, void *packed, float *e, const float *g, int64_t rows,
                                       const hpml_encode_info *info HPMLI_UNUSED)
{
    return hpmli_encode_rows(p, packed, e, g, rows, hpmli_bf16_pack);
}

HPMLI_FN hpml_status hpmli_onebit_encode(const hpml_packing *p, void *packed, float *e, const float *g, int64_t rows,
                                         const hpml_encode_info *info HPMLI_UNUSED)
{
    return hpmli_encode_rows(p, packed, e, g, rows, hpmli_onebit_pack);
}

HPMLI_FN hpml_status hpmli_twobit_encode(const hpml_packing *p, void *packed, float *e, const float *g, int64_t rows,
                                         const hpml_encode_info *info HPMLI_UNUSED)
{
    return hpmli_encode_rows(p, packed, e, g, rows, hpmli_twobit_pack);
}

HPMLI_FN void hpmli_twobit_decode(const hpml_packing *p, float *out, const void *packed, int64_t rows, bool add)
{
    const float    t = p->desc.threshold, value[4] = { 0, 0, -t, t };
    const uint8_t *q = (const uint8_t *)packed;
    for (int64_t r = 0; r < rows; r++, out += p->cols, q += p->row_size)
        for (int64_t i = 0; i < p->cols; i++) {
            float x = value[q[i / 4] >> (2 * (i % 4)) & 3];
            out[i]  = add ? out[i] + x : x;
        }
}

HPML_API const hpml_codec *hpml_codec_get(hpml_codec_kind kind)
{
    static const hpml_codec codecs[] = { /* indexed by hpml_codec_kind */
        { "none", true, false, false, false, hpmli_none_row_size, hpmli_none_encode, hpmli_none_decode },
        { "bf16", false, true, false, false, hpmli_bf16_row_size, hpmli_bf16_encode, hpmli_bf16_decode },
        { "onebit", false, true, true, false, hpmli_onebit_row_size, hpmli_onebit_encode, hpmli_onebit_decode },
        { "twobit", false, true, true, false, hpmli_twobit_row_size, hpmli_twobit_encode, hpmli_twobit_decode },
        { "topk", false, true, true, true, NULL, NULL, NULL },
        { "lowrank", false, true, true, true, NULL, NULL, NULL },
    };
    return (unsigned)kind < sizeof codecs / sizeof codecs[0] ? &codecs[kind] : NULL;
}

HPML_API hpml_codec_kind hpml_codec_find(const char *name)
{
    for (int kind = 0; name && kind < HPML_CODEC_COUNT; kind++)
        if (strcmp(name, hpml_codec_get((hpml_codec_kind)kind)->name) == 0) return (hpml_codec_kind)kind;
    return HPML_CODEC_UNKNOWN;
}

HPML_API hpml_status hpml_packing_init(hpml_packing *p, const hpml_codec_desc *desc, int64_t rows, int64_t cols)
{
    const hpml_codec *none = hpml_codec_get(HPML_CODEC_NONE);
    if (!p) return HPML_ERR_ARGUMENT;
    hpml_codec_desc *d = &p->desc;
    memset(p, 0, sizeof *p);
    if (desc) *d = *desc;
    p->codec = d->custom ? d->custom : hpml_codec_get(d->kind);
    if (!p->codec || d->_begin || d->_end || d->min_elements < 0 || !(d->threshold >= 0)) return HPML_ERR_ARGUMENT;
    if (p->codec->whole_tensors) return HPML_ERR_UNSUPPORTED;
    if (!p->codec->row_size || !p->codec->encode || !p->codec->decode) return HPML_ERR_ARGUMENT;
    if (rows < 0 || cols < 0) return HPML_ERR_SHAPE;
    if (cols > 0 && (uint64_t)rows >= SIZE_MAX / 32 / (uint64_t)cols) return HPML_ERR_OVERFLOW;
    if (d->min_elements == 0) d->min_elements = HPML_CODEC_MIN_ELEMENTS;
    if (d->threshold == 0) d->threshold = 0.5f;
    p->rows     = rows;
    p->cols     = cols;
    p->kernels  = hpmli_kernels_find(NULL);
    p->row_size = p->codec->row_size(d, cols);
    bool small  = (rows == 1 || cols == 1 || rows * cols < d->min_elements) && !d->compress_all;
    if (p->codec->exempts_small && (small || p->row_size >= none->row_size(d, cols))) {
        p->codec    = none;
        p->row_size = none->row_size(d, cols);
    }
    p->size           = ((size_t)rows * p->row_size + 3) / 4 * 4;
    p->residual_count = p->codec->has_residual && !d->no_feedback ? rows * cols : 0;
    return HPML_OK;
}

HPML_API hpml_status hpml_packing_encode(const hpml_packing *p, void *packed, float *residual, const float *grad,
                                         int64_t rows, const hpml_encode_info *info)
{
    static const hpml_encode_info zeros = { 0, 0, 0 };
    return p->codec->encode(p, packed, p->residual_count ? residual : NULL, grad, rows, info ? info : &zeros);
}

HPML_API void hpml_packing_decode(const hpml_packing *p, float *out, const void *packed, int64_t rows)
{
    p->codec->decode(p, out, packed, rows, false);
}

HPML_API void hpml_packing_decode_add(const hpml_packing *p, float *out, const void *packed, int64_t rows)
{
    p->codec->decode(p, out, packed, rows, true);
}

// ---------------------------------------------------------------------------------------------------------------------
// >>trainer   the trainer: settings, creation, a batch in its inputs
// ---------------------------------------------------------------------------------------------------------------------
/* A trainer is a graph that ends in a loss, the settings of its steps, and what they keep: states of the optimizer, the
   number of updates, the place in the data. This section checks, plans and allocates all of it; >>step runs it. */

typedef struct hpmli_named_array { /* an array of the user's that checkpoints save */
    const char *name;   /* allocated with this struct, behind it */
    float      *values; /* (count) in device memory */
    int64_t     count;
    struct hpmli_named_array *next;
} hpmli_named_array;

/* Results of a step, on the device: the loss; the number of the output's rows whose largest number is at the label, and
   of rows that have a label; the sum of squares of all gradients. The struct is in the memory of the loss tensor, so
   that one copy to the host reads all: the planner gives each scalar HPMLI_SCALAR_BYTES bytes (hpmli_plan_slots). */
typedef struct hpmli_step_scalars { float loss, unused; int64_t counts[2]; double sumsq; } hpmli_step_scalars;
typedef char hpmli_step_scalars_fit[sizeof(hpmli_step_scalars) <= HPMLI_SCALAR_BYTES ? 1 : -1];
#define HPMLI_LOSS_SCALE_START 65536.0f /* first value of a dynamic loss scale: 2^16 */
#define HPMLI_LOSS_SCALE_MAX   1099511627776.0f /* the largest: 2^40, because gradients that stay 0 never overflow */
struct hpml_trainer {
    hpml_ctx           *ctx;
    hpml_trainer_desc   d;               /* the user's desc, with defaults in place of zeros */
    hpml_graph         *graph;
    hpml_tensor        *target, *loss;
    const hpml_optimizer *optimizer;     /* the optimizer's entry in the table, or the user's */
    int64_t            *place;           /* (param_count) see hpml_trainer_place */
    float              *state[HPML_MAX_STATES]; /* on the device, with .host_optimizer on the host, laid out as
                                            graph->grads; NULL: not needed */
    float              *staged;          /* host: values, then gradient, of a parameter that steps on the host for a
                                            device; NULL: parameters step where they are */
    hpml_update        *updates;         /* (param_count) the next step of each parameter, of what this rank keeps */
    int64_t             window[2];       /* floats of hpml_trainer_reserve: for values, for gradients */
    float             **window_at[2];    /* where to write their address */
    double             *norms;           /* (param_count, 2) for hooks `norms`; NULL: there was no such hook */
    int32_t            *found_nonfinite; /* (param_count) HPML_NONFINITE_ bits of the last update */
    float              *host_out;        /* host memory for a batch of the output */
    float              *best;            /* (2, rows) of an output split by classes: largest number; - its class */
    int32_t            *host_y;          /* host memory for a batch of labels */
    const void         *x, *y;           /* host: the batch, of which a graph with parts copies a slot's samples */
    float              *batch_out;       /* host memory for a batch of outputs of all parts; NULL: not evaluated yet */
    bool                evaluating;      /* a hook `pass` runs for evaluate or predict */
    hpmli_named_array  *states;          /* list of the arrays named by hpml_trainer_add_state */
    int                 running[2];      /* 1 + the set of hooks whose `run`, whose `update` is running; 0: none */
    int                 rank, ranks;
    int64_t             global_batch, grain; /* samples of all ranks; of a grain, see hpml_trainer_set_shard */
    int64_t             batch_samples;   /* samples of the micro-batch that is in the inputs */
    const int32_t      *labels;          /* host: labels of this micro-batch; NULL: its accuracy is not wanted */
    int64_t             correct, counted; /* rows of this step: with the right class; with a label that counts */
    int64_t             step, epoch, epoch_step;
    int32_t             micro_batch;     /* micro-batches since the last update */
    int64_t             first_batch_samples, samples_so_far; /* of this update: its first micro-batch; all of them */
    float               accumulate_weight; /* samples_so_far / (accumulate first_batch_samples): divides gradients */
    float               loss_scale;
    int64_t             scale_age;       /* updates since the loss scale changed; -1: the loss scale is fixed */
    hpmli_step_scalars  scalars;         /* the host's copy of what follows, as of hpmli_read_step_scalars */
    hpmli_step_scalars *device_scalars;  /* results of a step on the device: t->loss->data */
    bool                wants_norm;      /* an update needs the norm of all gradients: clipping, dynamic loss scale */
    bool                norm_ready;      /* device_scalars holds this step's norm */
    bool                norm_fetched;    /* `scalars` holds this step's norm, too */
    bool                update_follows;  /* no hook comes between this backward pass and the update */
    bool                update_early;    /* each parameter steps after the op that makes its gradient final, because
                                            the gradient is in the cache then */
    bool                overflowed;      /* a gradient of this step is not finite, because of the loss scale */
};

HPML_API void hpml_trainer_desc_resolve(const hpml_trainer_desc *desc, hpml_trainer_desc *out)
{
    const hpml_optimizer *row = hpmli_optimizer_row(desc->optimizer, desc->custom_optimizer);
    *out = *desc;
    if (row) {
        out->optimizer = row->step ? HPML_OPT_CUSTOM : row->opt;
        out->lr        = hpmli_default_if_zero(desc->lr, row->lr);
        out->momentum  = hpmli_default_if_zero(desc->momentum, row->momentum);
        out->beta1     = hpmli_default_if_zero(desc->beta1, row->beta1);
        out->beta2     = hpmli_default_if_zero(desc->beta2, row->beta2);
        out->eps       = hpmli_default_if_zero(desc->eps, row->eps);
        out->trust     = hpmli_default_if_zero(desc->trust, row->trust);
    }
    out->accumulate = desc->accumulate > 0 ? desc->accumulate : 1;
}

HPMLI_FN bool hpmli_trainer_record_loss(hpml_trainer *t) /* records loss and targets unless given; false: error */
{
    const hpml_trainer_desc *d      = &t->d;
    const hpml_tensor       *y      = d->output;
    bool                     labels = d->loss == HPML_LOSS_CROSS_ENTROPY;
    hpml_cross_entropy_desc  ce     = HPMLI_ZEROED;
    if (d->loss_tensor || d->target) {
        t->loss   = d->loss_tensor;
        t->target = d->target;
        if (t->loss && t->target) return true;
        return hpmli_false(t->ctx, HPML_ERR_ARGUMENT, "trainer: .loss_tensor without .target, or the other way round; "
                           "set both (.target is .input if there are no targets)");
    }
    t->target = hpml_input(t->ctx, labels ? HPML_DTYPE_I32 : HPML_DTYPE_F32, y->ndim - (labels ? 1 : 0), y->shape);
    if (!t->target) return false;
    t->target->name = "target";
    if (y->batch_rows) t->target->batch_rows = y->batch_rows;
    ce.label_smoothing = d->label_smoothing;
    switch (d->loss) {
    case HPML_LOSS_CROSS_ENTROPY: t->loss = hpml_cross_entropy(d->output, t->target, &ce); break;
    case HPML_LOSS_BCE: t->loss = hpml_bce_with_logits(d->output, t->target); break;
    case HPML_LOSS_MSE: t->loss = hpml_mse(d->output, t->target); break;
    case HPML_LOSS_HUBER: t->loss = hpml_huber(d->output, t->target, d->huber_delta); break;
    }
    return t->loss != NULL;
}

HPMLI_FN bool hpmli_trainer_ranges_check(hpml_ctx *ctx, const hpml_trainer_desc *d)
{
    bool ends = d->schedule.kind == HPML_SCHEDULE_COSINE || d->schedule.kind == HPML_SCHEDULE_LINEAR;
    const char  *warmup     = ends ? "schedule.warmup_steps, part of total_steps," : "schedule.warmup_steps";
    const double warmup_max = ends ? (double)d->schedule.total_steps : 1e15;
    const struct { const char *name; double value, most; } in[] = {
        { "lr", (double)d->lr, 1e30 }, { "momentum", (double)d->momentum, 1 }, { "trust", (double)d->trust, 1e30 },
        { "weight_decay", (double)d->weight_decay, 1e30 }, { "clip_norm", (double)d->clip_norm, 1e30 },
        { "loss_scale", (double)d->loss_scale, 1e30 }, { "eps", (double)d->eps, 1e30 },
        { "beta1", (double)d->beta1, 0.999999 }, { "beta2", (double)d->beta2, 0.999999 },
        { "label_smoothing", (double)d->label_smoothing, 1 }, { "loss", (double)d->loss, HPML_LOSS_HUBER },
        { "accumulate", (double)d->accumulate, 1e9 },
        { "schedule.kind", (double)d->schedule.kind, HPML_SCHEDULE_LINEAR },
        { warmup, (double)d->schedule.warmup_steps, warmup_max },
        { "schedule.gamma", (double)d->schedule.gamma, 1e30 }, { "lr_base_batch", (double)d->lr_base_batch, 1e15 },
        { "lr_rule", (double)d->lr_rule, HPML_LR_SQRT }, { "schedule.min_lr", (double)d->schedule.min_lr, 1e30 } };
    for (size_t i = 0; i < sizeof in / sizeof in[0]; i++)
        if (!(in[i].value >= 0 && in[i].value <= in[i].most))
            return hpmli_false(ctx, HPML_ERR_ARGUMENT, "trainer: %s %g is not in 0..%g", in[i].name, in[i].value,
                               in[i].most);
    if (ends && d->schedule.total_steps < 1)
        return hpmli_false(ctx, HPML_ERR_ARGUMENT, "trainer: a COSINE or LINEAR schedule needs .schedule.total_steps");
    if (d->schedule.kind == HPML_SCHEDULE_STEP && d->schedule.period < 1)
        return hpmli_false(ctx, HPML_ERR_ARGUMENT, "trainer: a STEP schedule needs .schedule.period");
    return true;
}

HPMLI_FN bool hpmli_trainer_desc_check(hpml_ctx *ctx, const hpml_trainer_desc *d)
{
    if (hpmli_failed(ctx)) return false;
    if (d && !HPMLI_DESC_OK(ctx, "trainer", d)) return false;
    if (!d || !d->input || !d->output || d->input->ctx != ctx || d->output->ctx != ctx || d->output->ndim < 2)
        return hpmli_false(ctx, HPML_ERR_ARGUMENT, "trainer: needs .input and .output of this context, output (B, ..)");
    if (!hpmli_trainer_ranges_check(ctx, d)) return false;
    const hpml_optimizer *row = hpmli_optimizer_row(d->optimizer, d->custom_optimizer);
    if (!row)
        return hpmli_false(ctx, HPML_ERR_ARGUMENT, "trainer: optimizer %d is not a built-in one; set .optimizer to an "
                           "HPML_OPT_ value, or .custom_optimizer", (int)d->optimizer);
    if (!hpmli_optimizer_check(ctx, row, d->host_optimizer)) return false;
    if (d->nesterov && row->nesterov && hpmli_default_if_zero(d->momentum, row->momentum) == 0)
        return hpmli_false(ctx, HPML_ERR_ARGUMENT, "trainer: .nesterov needs a .momentum");
    return true;
}

HPMLI_FN void hpmli_trainer_destroy(void *object)
{
    hpml_trainer *t = (hpml_trainer *)object;
    while (t->graph && t->graph->hook_count > 0) hpml_trainer_detach(t, t->graph->hooks[t->graph->hook_count - 1].user);
}

/* Checks that the loss depends on desc.input, desc.target and a trainable parameter; false: an error on the context. */
HPMLI_FN bool hpmli_trainer_check_inputs(hpml_trainer *t)
{
    const hpml_tensor *missing[2] = { t->d.input, t->target };
    for (int i = 0; i < 2 * t->graph->leaf_count; i++)
        if (t->graph->leaves[i / 2] == missing[i % 2] && missing[i % 2]->batch_rows) missing[i % 2] = NULL;
    for (int i = 0; i < 2; i++)
        if (missing[i])
            hpmli_fail(t->ctx, HPML_ERR_ARGUMENT, "trainer: .%s is %s, expected an input that the loss depends on",
                       i ? "target" : "input", hpmli_describe(missing[i]));
    if (t->graph->grad_count == 0)
        hpmli_fail(t->ctx, HPML_ERR_ARGUMENT, "trainer: the loss depends on no parameter that may be trained; is "
                   "every layer frozen?");
    const hpml_optimizer *row = t->optimizer;
    for (int i = 0; i < t->graph->param_count; i++) {
        bool sparse = t->graph->param_last[i] >= 0 && t->ctx->params[i]->state->rows;
        if (sparse && (t->wants_norm || row->prepare || row->direction))
            hpmli_fail(t->ctx, HPML_ERR_UNSUPPORTED, "trainer: \"%s\" has a sparse gradient, but %s needs the norm of "
                       "a whole one; take another optimizer and a fixed loss_scale, or leave .sparse false",
                       t->ctx->params[i]->name, t->wants_norm ? "clip_norm or a dynamic loss_scale" : row->name);
    }
    if (hpmli_failed(t->ctx)) hpmli_graph_release_nodes(t->graph);
    return !hpmli_failed(t->ctx);
}

/* Returns how many floats this rank keeps of an array of all trained parameters: of those with hpml_param.shard of at
   least `level` only this rank's shard. */
HPMLI_FN int64_t hpmli_trainer_kept(const hpml_trainer *t, int level)
{
    return (int64_t)(hpmli_graph_kept(t->graph, level) / sizeof(float));
}

/* Returns whether the optimizer's states are in host memory, and steps are made there, for parameters on a device. */
HPMLI_FN bool hpmli_trainer_steps_on_host(const hpml_trainer *t)
{
    return t->d.host_optimizer && !t->ctx->backend->host;
}

/* Computes the bytes of what the trainer keeps between steps (values, gradients, optimizer states) and the total. */
HPMLI_FN void hpmli_trainer_measure(hpml_trainer *t)
{
    hpml_memory *m = &t->graph->memory;
    m->parameters = hpml_params_bytes(t->ctx) + (size_t)t->window[0] * sizeof(float);
    m->gradients  = (size_t)(hpmli_trainer_kept(t, 2) + t->window[1]) * sizeof(float);
    m->optimizer  = 0;
    for (int k = 0; k < HPML_MAX_STATES && !hpmli_trainer_steps_on_host(t); k++)
        if (hpmli_optimizer_keeps(t->optimizer, k, t->d.momentum))
            m->optimizer += (size_t)hpmli_trainer_kept(t, 1) * sizeof(float);
    m->total = m->parameters + m->gradients + m->activations + m->scratch + m->optimizer;
}

/* Checks the desc, records the loss and plans the graph: all of hpml_trainer_create but its memory. NULL: an error. */
HPMLI_FN hpml_trainer *hpmli_trainer_plan(hpml_ctx *ctx, const hpml_trainer_desc *desc)
{
    hpml_graph_desc gd = HPMLI_ZEROED;
    if (!hpmli_trainer_desc_check(ctx, desc)) return NULL;
    hpml_trainer *t = (hpml_trainer *)hpmli_alloc_object(ctx, sizeof *t, hpmli_trainer_destroy);
    if (!t) return NULL;
    t->ctx   = ctx;
    t->ranks = 1;
    hpml_trainer_desc_resolve(desc, &t->d);
    t->optimizer = hpmli_optimizer_row(t->d.optimizer, t->d.custom_optimizer);
    bool dynamic = desc->loss_scale == 0 && hpmli_activation_dtype(ctx) == HPML_DTYPE_F16;
    t->accumulate_weight = 1;
    t->loss_scale        = desc->loss_scale > 0 ? desc->loss_scale : 1.0f;
    if (dynamic) t->loss_scale = HPMLI_LOSS_SCALE_START;
    t->scale_age  = dynamic ? 0 : -1;
    t->wants_norm = dynamic || t->d.clip_norm > 0;
    if (!hpmli_trainer_record_loss(t)) return NULL;
    gd.output_count = 1;
    gd.outputs      = &t->d.output;
    gd.loss         = t->loss;
    t->graph        = hpml_graph_create(ctx, &gd);
    if (!t->graph || !hpmli_trainer_check_inputs(t)) return NULL;
    t->graph->trainer = t;
    hpmli_trainer_measure(t);
    return t;
}

HPML_API hpml_status hpml_trainer_memory(hpml_ctx *ctx, const hpml_trainer_desc *desc, hpml_memory *out)
{
    if (ctx && !out) return hpmli_fail(ctx, HPML_ERR_ARGUMENT, "trainer memory: `out` is NULL, expected a hpml_memory "
                                       "to fill");
    hpml_trainer *t = hpmli_trainer_plan(ctx, desc);
    if (out) memset(out, 0, sizeof *out);
    if (!t) return hpml_ctx_status(ctx);
    *out = t->graph->memory;
    hpmli_graph_release_nodes(t->graph);
    return HPML_OK;
}

HPMLI_FN bool hpmli_is_classifier(const hpml_trainer *t) /* true if targets are labels: there is an accuracy */
{
    return t->d.loss == HPML_LOSS_CROSS_ENTROPY && !t->d.loss_tensor && t->target->dtype == HPML_DTYPE_I32;
}

/* Returns host memory for a batch of outputs: that of the output tensor if this is f32 on the host, else t->host_out,
   which the first call allocates. */
HPMLI_FN float *hpmli_trainer_host_out(hpml_trainer *t)
{
    if (t->ctx->backend->host && t->d.output->dtype == HPML_DTYPE_F32) return t->d.output->data;
    if (!t->host_out) t->host_out = hpmli_new(t->ctx, float, hpml_tensor_count(t->d.output));
    return t->host_out;
}

HPMLI_FN bool hpmli_trainer_places(hpml_trainer *t);
HPML_API hpml_trainer *hpml_trainer_create(hpml_ctx *ctx, const hpml_trainer_desc *desc)
{
    hpml_trainer *t = hpmli_trainer_plan(ctx, desc);
    if (!t) return NULL;
    bool        deferred = ctx->deferred && hpmli_trainer_places(t);
    hpml_status status   = deferred ? HPML_OK : hpml_trainer_alloc(t);
    return status == HPML_OK ? t : NULL;
}

HPML_API hpml_graph *hpml_trainer_graph(hpml_trainer *t) { return t ? t->graph : NULL; }
HPML_API const hpml_trainer_desc *hpml_trainer_settings(const hpml_trainer *t) { return t ? &t->d : NULL; }
HPML_API int64_t hpml_trainer_step_count(const hpml_trainer *t) { return t ? t->step : 0; }
HPML_API void    hpml_trainer_set_step(hpml_trainer *t, int64_t step) { if (t) t->step = step; }

HPML_API float hpml_trainer_lr(const hpml_trainer *t)
{
    if (!t) return 0;
    double samples = (double)(t->global_batch > 0 ? t->global_batch : t->graph->batch * t->ranks) * t->d.accumulate;
    double factor  = t->d.lr_base_batch > 0 ? samples / (double)t->d.lr_base_batch : 1;
    return hpml_schedule_lr(&t->d.schedule, hpml_lr_scale(t->d.lr_rule, t->d.lr, factor), t->step);
}

HPML_API hpml_status hpml_trainer_set_shard(hpml_trainer *t, int rank, int ranks, int64_t global_batch, int64_t grain)
{
    if (!t) return HPML_ERR_ARGUMENT;
    if (ranks < 1 || rank < 0 || rank > ranks || global_batch < 0 || grain < 0)
        return hpmli_fail(t->ctx, HPML_ERR_ARGUMENT, "trainer: rank %d of %d, global batch %lld in grains of %lld: "
                          "expected a rank from 0 to ranks, and no negative sizes", rank, ranks,
                          (long long)global_batch, (long long)grain);
    t->rank         = rank;
    t->ranks        = ranks;
    t->global_batch = global_batch;
    t->grain        = grain;
    return HPML_OK;
}

HPML_API hpml_status hpml_trainer_add_state(hpml_trainer *t, const char *name, float *values, int64_t count)
{
    size_t length = name ? strlen(name) + 1 : 0; /* bytes, with the 0 at the end */
    if (!t || !name || (values && hpmli_failed(t->ctx))) return t && name ? t->ctx->status : HPML_ERR_ARGUMENT;
    hpmli_named_array **link = &t->states;
    while (*link && strcmp((*link)->name, name) != 0) link = &(*link)->next;
    hpmli_named_array *s = *link;
    if (s) *link = s->next;
    hpmli_free(t->ctx, s); /* replaces an earlier array of that name */
    s = values ? (hpmli_named_array *)hpmli_alloc(t->ctx, sizeof *s + length) : NULL;
    if (!s) return t->ctx->status;
    s->name   = (const char *)memcpy(s + 1, name, length);
    s->values = values;
    s->count  = count;
    s->next   = t->states;
    t->states = s;
    return HPML_OK;
}

HPMLI_FN void hpmli_write_samples(hpml_trainer *t, hpml_tensor *input, const void *from, int64_t samples)
{
    int64_t n = hpml_tensor_count(input) / input->shape[0] * input->batch_rows * samples;
    t->ctx->backend->write(t->ctx->device, input->raw, from, (size_t)n * hpml_dtype_size(input->dtype));
}

/* Sets the batch size, copies x and y (NULL: none) into the inputs. A graph whose ops mix samples cannot run fewer rows
   than it was recorded with: short batches of labels are filled up with HPML_IGNORE, which the loss leaves out. */
HPMLI_FN hpml_status hpmli_write_batch(hpml_trainer *t, const void *x, const void *y, int64_t samples)
{
    hpml_graph *g    = t->graph;
    int64_t     rows = samples;
    if (!x) return hpmli_fail(t->ctx, HPML_ERR_ARGUMENT, "trainer: no data, x is NULL");
    if (samples < 1 || samples > g->batch)
        return hpmli_fail(t->ctx, HPML_ERR_ARGUMENT, "trainer: a batch of %lld samples, expected 1 to %lld, the first "
                          "dimension of input \"%s\"; record a larger one, or cut the batch", (long long)samples,
                          (long long)g->batch, t->d.input->name);
    if (!g->batchable && samples < g->batch) {
        if (t->d.loss != HPML_LOSS_CROSS_ENTROPY || t->d.loss_tensor)
            return hpmli_fail(t->ctx, HPML_ERR_UNSUPPORTED, "trainer: this graph mixes samples and takes full batches "
                              "of %lld only; set drop_last in the loader", (long long)g->batch);
        rows = g->batch;
    }
    t->x = x;
    t->y = y;
    g->batch_now = rows;
    hpmli_graph_apply_batch(g);
    if (!g->cut && hpml_graph_set_batch(g, rows) != HPML_OK) return t->ctx->status;
    if (!g->cut) hpmli_write_samples(t, t->d.input, x, samples);
    if (!y) return HPML_OK;
    if (rows > samples) {
        int64_t labels = hpml_tensor_count(t->target), given = labels / rows * samples;
        for (int64_t i = 0; i < labels; i++) t->host_y[i] = i < given ? ((const int32_t *)y)[i] : HPML_IGNORE;
        y = t->host_y;
    }
    t->y = y;
    if (!g->cut) hpmli_write_samples(t, t->target, y, rows);
    return HPML_OK;
}

// ---------------------------------------------------------------------------------------------------------------------
// >>keep   the memory of a trainer: what this rank keeps, taken when it is needed
// ---------------------------------------------------------------------------------------------------------------------
/* A trainer plans first and takes its memory once: at its creation or, after hpml_ctx_defer, when it is needed. Between
   the two, hpml_trainer_keep cuts parameters: this rank then keeps a range of the floats of states, gradient or values,
   and t->updates has the addresses of that range. */
/* Sets t->place[i] to where parameter i begins in the trainer's arrays; -1: it is not trained. False: no memory. */
HPMLI_FN bool hpmli_trainer_places(hpml_trainer *t)
{
    const hpml_graph *g  = t->graph;
    int64_t           at = 0;
    if (!t->place) t->place = hpmli_new(t->ctx, int64_t, g->param_count);
    for (int i = 0; t->place && i < g->param_count; i++) {
        bool trained = g->param_last[i] >= 0;
        t->place[i]  = trained ? at : -1;
        if (trained) at += hpmli_param_floats(t->ctx->params[i]);
    }
    return t->place != NULL;
}

static void hpmli_trainer_planned(hpml_trainer *t)
{
    hpmli_trainer_places(t);
    hpmli_trainer_measure(t);
}

HPMLI_FN void hpmli_trainer_take(hpml_trainer *t) /* allocates all arrays; an error stays on the context */
{
    hpml_ctx   *ctx = t->ctx;
    hpml_graph *g   = t->graph;
    if (hpml_graph_alloc(g) != HPML_OK) return;
    for (int k = 0; k < 2; k++)
        if (t->window[k] > 0) *t->window_at[k] = (float *)hpmli_device_alloc(ctx, (size_t)t->window[k] * sizeof(float));
    const int64_t states = hpmli_trainer_kept(t, 1);
    int64_t       most   = 0;
    for (int k = 0; k < HPML_MAX_STATES; k++) {
        if (!hpmli_optimizer_keeps(t->optimizer, k, t->d.momentum)) continue;
        if (hpmli_trainer_steps_on_host(t)) t->state[k] = hpmli_new(ctx, float, states);
        else t->state[k] = (float *)hpmli_device_alloc(ctx, (size_t)states * sizeof(float));
    }
    for (int i = 0; i < g->param_count; i++)
        if (t->place[i] >= 0) most = hpmli_max(most, hpml_tensor_count(ctx->params[i]));
    if (hpmli_trainer_steps_on_host(t)) t->staged = hpmli_new(ctx, float, 2 * most);
    t->updates         = hpmli_new(ctx, hpml_update, ctx->param_count);
    t->found_nonfinite = hpmli_new(ctx, int32_t, ctx->param_count);
    if (hpmli_is_classifier(t) && !ctx->backend->correct) hpmli_trainer_host_out(t);
    const hpml_tensor *y = t->d.output;
    if (hpmli_is_classifier(t) && y->split[y->ndim - 1] == HPML_AXIS_TENSOR)
        t->best = hpmli_new(ctx, float, 2 * hpml_tensor_count(y) / y->shape[y->ndim - 1]);
    t->host_y         = hpmli_new(ctx, int32_t, hpml_tensor_count(t->target));
    t->device_scalars = (hpmli_step_scalars *)(void *)t->loss->data;
}

/* Returns how many numbers of parameter p this rank steps. */
HPMLI_FN int64_t hpmli_update_count(const hpml_tensor *p)
{
    return p->param->shard > 0 ? p->param->keep_count : hpml_tensor_count(p);
}

/* Sets the fields that all updates of parameter i share. at, gradient_at: the index of the parameter's first float in
   the arrays of the optimizer's state, and in the array of gradients. */
HPMLI_FN void hpmli_update_init(hpml_trainer *t, int i, int64_t at, int64_t gradient_at)
{
    hpml_tensor *p = t->ctx->params[i];
    hpml_update *u = &t->updates[i];
    u->opt      = t->d.optimizer;
    u->custom   = t->optimizer;
    u->user     = t->d.optimizer_user;
    u->param    = p;
    u->momentum = t->d.momentum;
    u->beta1    = t->d.beta1;
    u->beta2    = t->d.beta2;
    u->eps      = t->d.eps;
    u->nesterov = t->d.nesterov;
    if (t->place[i] < 0) return;
    int64_t first = p->param->shard > 0 ? p->param->keep_first : 0;
    u->n = hpmli_update_count(p);
    u->w = p->param->shard < 3 ? p->data + first : p->state->kept;
    u->g = t->graph->grads + gradient_at + (p->param->shard < 2 ? first : 0);
    for (int k = 0; k < HPML_MAX_STATES; k++) u->state[k] = t->state[k] ? t->state[k] + at : NULL;
}

HPML_API hpml_status hpml_trainer_alloc(hpml_trainer *t)
{
    if (!t) return HPML_ERR_ARGUMENT;
    hpml_ctx *ctx = t->ctx;
    int64_t   at = 0, gradient_at = 0;
    if (hpmli_failed(ctx) || t->updates) return ctx->status;
    if (hpmli_trainer_places(t)) hpmli_trainer_take(t);
    for (int i = 0; ctx->status == HPML_OK && i < t->graph->param_count; i++) {
        hpmli_update_init(t, i, at, gradient_at);
        if (t->place[i] < 0) continue;
        at += hpmli_param_kept(ctx->params[i], 1);
        gradient_at += hpmli_param_kept(ctx->params[i], 2);
    }
    if (ctx->status != HPML_OK && !t->graph->arena) hpmli_graph_release_nodes(t->graph);
    return ctx->status;
}

HPML_API hpml_status hpml_trainer_keep(hpml_trainer *t, int param, int shard, int64_t first, int64_t count)
{
    if (!t || hpmli_failed(t->ctx)) return t ? t->ctx->status : HPML_ERR_ARGUMENT;
    hpml_tensor *p = hpml_param_at(t->ctx, param);
    if (!p || shard < 0 || shard > 3 || first < 0 || count < 0 || first > hpml_tensor_count(p) - count)
        return hpmli_fail(t->ctx, HPML_ERR_ARGUMENT, "trainer keep: shard %d, floats %lld to %lld of parameter %d "
                          "(\"%s\"): expected a shard from 0 to 3 and a range of the parameter", shard,
                          (long long)first, (long long)(first + count), param, p ? p->name : "there is none");
    hpml_param *kept = p->param;
    bool same_range = kept->keep_first == first && kept->keep_count == count;
    if (kept->shard == shard && (shard == 0 || same_range)) return HPML_OK;
    if (t->updates || (shard > 2 && p->raw))
        return hpmli_fail(t->ctx, HPML_ERR_STATE, "trainer keep: \"%s\" has memory already; call hpml_ctx_defer "
                          "before hpml_trainer_create, and this before the first step, evaluation or file", p->name);
    if (t->optimizer->whole)
        return hpmli_fail(t->ctx, HPML_ERR_UNSUPPORTED, "trainer keep: %s steps whole tensors, not a part of \"%s\"; "
                          "take another optimizer", t->optimizer->name, p->name);
    kept->shard      = shard;
    kept->keep_first = first;
    kept->keep_count = count;
    hpmli_trainer_measure(t);
    return HPML_OK;
}

HPML_API hpml_status hpml_trainer_reserve(hpml_trainer *t, hpml_array which, int64_t floats, float **memory)
{
    const int k = which == HPML_ARRAY_VALUES ? 0 : 1;
    if (!t || hpmli_failed(t->ctx)) return t ? t->ctx->status : HPML_ERR_ARGUMENT;
    if (!memory || floats < 0 || which > HPML_ARRAY_GRADIENTS || t->updates)
        return hpmli_fail(t->ctx, HPML_ERR_ARGUMENT, "trainer reserve: %lld floats for array %d: expected VALUES or "
                          "GRADIENTS, 0 floats or more, an address, and a trainer without memory", (long long)floats,
                          (int)which);
    t->window[k]    = floats;
    t->window_at[k] = memory;
    hpmli_trainer_measure(t);
    return HPML_OK;
}

HPML_API float *hpml_trainer_part(hpml_trainer *t, int param, hpml_array which)
{
    const int k = (int)which - HPML_ARRAY_STATE;
    if (hpml_trainer_alloc(t) != HPML_OK || hpml_trainer_place(t, param) < 0 || k >= HPML_MAX_STATES) return NULL;
    const hpml_update *u = &t->updates[param];
    if (which == HPML_ARRAY_VALUES) return u->w;
    return which == HPML_ARRAY_GRADIENTS ? u->g : u->state[k];
}

HPML_API void hpml_ctx_defer(hpml_ctx *ctx, bool on)
{
    if (ctx) ctx->deferred = on;
}

// ---------------------------------------------------------------------------------------------------------------------
// >>hooks   hooks of a trainer, and its arrays of values, gradients and states
// ---------------------------------------------------------------------------------------------------------------------
HPMLI_FN void hpmli_hooks_note(hpml_graph *g)
{
    memset(&g->any, 0, sizeof g->any);
    for (const hpml_hooks *h = g->hooks; h < g->hooks + g->hook_count; h++) {
        if (h->run) g->any.run = h->run;
        if (h->need) g->any.need = h->need;
        if (h->release) g->any.release = h->release;
        if (h->grad) g->any.grad = h->grad;
        if (h->update) g->any.update = h->update;
        if (h->sum) g->any.sum = h->sum;
        if (h->pass) g->any.pass = h->pass;
        if (h->norms) g->any.norms = h->norms;
        if (h->join) g->any.join = h->join;
    }
}

HPML_API hpml_status hpml_trainer_attach(hpml_trainer *t, const hpml_hooks *hooks)
{
    if (!t || !hooks) return HPML_ERR_ARGUMENT;
    hpml_graph *g = t->graph;
    if (g->hook_count == HPML_MAX_HOOKS)
        return hpmli_fail(t->ctx, HPML_ERR_STATE, "trainer: %d sets of hooks are attached, as many as there may be "
                          "(HPML_MAX_HOOKS); detach one", HPML_MAX_HOOKS);
    if (hooks->pass && g->any.pass)
        return hpmli_fail(t->ctx, HPML_ERR_STATE, "trainer: a set of hooks with `pass` is attached already, and only "
                          "one may run the passes; detach the other");
    g->hooks[g->hook_count++] = *hooks;
    hpmli_hooks_note(g);
    return HPML_OK;
}

HPML_API const hpml_hooks *hpml_trainer_hooks(const hpml_trainer *t, int *count)
{
    *count = t ? t->graph->hook_count : 0;
    return t ? t->graph->hooks : NULL;
}

HPML_API void hpml_trainer_detach(hpml_trainer *t, const void *user)
{
    hpml_graph *g = t ? t->graph : NULL;
    for (int k = g ? g->hook_count - 1 : -1; k >= 0; k--) {
        hpml_hooks gone = g->hooks[k];
        if (gone.user != user) continue;
        g->hook_count--;
        memmove(&g->hooks[k], &g->hooks[k + 1], sizeof gone * (size_t)(g->hook_count - k));
        hpmli_hooks_note(g);
        if (gone.free) gone.free(gone.user);
    }
}

HPML_API int64_t hpml_trainer_place(const hpml_trainer *t, int param)
{
    return t && param >= 0 && param < t->graph->param_count ? t->place[param] : -1;
}

/* Returns the values of the trained parameters as one array; NULL, with an error, if a parameter's values do not lie at
   the parameter's place in such an array (hpml_trainer_place). */
HPMLI_FN float *hpmli_trainer_values(hpml_trainer *t)
{
    const hpml_tensor *first = NULL;
    for (int i = 0; i < t->graph->param_count; i++) {
        const hpml_tensor *p  = t->ctx->params[i];
        int64_t            at = hpml_trainer_place(t, i);
        if (at == 0) first = p;
        if (at > 0 && p->data != first->data + at)
            return (float *)hpmli_null(t->ctx, HPML_ERR_UNSUPPORTED, "trainer: the values of its parameters are no "
                                       "array: \"%s\" lies apart from \"%s\" and those between, because it got memory "
                                       "later, or another lies between that the trainer does not train; record and "
                                       "freeze all parameters before a graph, a trainer or a file gives them memory",
                                       p->name, first->name);
    }
    return first->data;
}

/* Returns the least hpml_param.shard with which a rank keeps only a part of a parameter's array `which`. */
HPMLI_FN int hpmli_shard_of(hpml_array which)
{
    if (which == HPML_ARRAY_VALUES) return 3;
    return which == HPML_ARRAY_GRADIENTS ? 2 : 1;
}

HPML_API float *hpml_trainer_array(hpml_trainer *t, hpml_array which, int64_t *floats)
{
    float *array = NULL;
    int    k     = (int)which - HPML_ARRAY_STATE;
    if (hpml_trainer_alloc(t) != HPML_OK) t = NULL;
    if (t && which == HPML_ARRAY_VALUES) array = hpmli_trainer_values(t);
    if (t && which == HPML_ARRAY_GRADIENTS) array = hpmli_graph_place_grads(t->graph);
    if (t && k >= 0 && k < HPML_MAX_STATES) array = t->state[k];
    if (floats) *floats = array ? hpmli_trainer_kept(t, hpmli_shard_of(which)) : 0;
    return array;
}

// ---------------------------------------------------------------------------------------------------------------------
// >>nonfinite   a step's scalars; the names of layers whose numbers are not finite
// ---------------------------------------------------------------------------------------------------------------------
/* A step finds a NaN or infinity in a scalar (loss, gradients' sum of squares) or while it steps a parameter. Only then
   the step searches for the layer: it runs forward once more and checks each result. */

HPMLI_FN int64_t hpmli_best(const float *y, int64_t classes) /* returns the class of the largest number */
{
    int64_t best = 0;
    for (int64_t c = 1; c < classes; c++)
        if (y[c] > y[best]) best = c;
    return best;
}

/* Sets t->best (2, rows) for an output split by classes over the ranks: each row's largest number on all ranks, then
   minus the class of that number. y: this rank's part of the output (rows, classes). */
HPMLI_FN void hpmli_best_of_ranks(hpml_trainer *t, const float *y, int64_t rows, int64_t classes)
{
    const hpml_group *g    = hpml_ctx_group(t->ctx, HPML_AXIS_TENSOR);
    float            *most = t->best, *at = t->best + rows;
    for (int64_t r = 0; r < rows; r++) most[r] = y[r * classes + hpmli_best(y + r * classes, classes)];
    hpml_status status = g->max(g->user, most, rows);
    for (int64_t r = 0; r < rows && status == HPML_OK; r++) {
        int64_t best = hpmli_best(y + r * classes, classes);
        at[r] = -(float)(y[r * classes + best] >= most[r] ? g->rank * classes + best : g->size * classes - 1);
    }
    if (status == HPML_OK) status = g->max(g->user, at, rows);
    if (status != HPML_OK) hpmli_fail(t->ctx, status, "accuracy of a split output: %s", hpml_status_string(status));
}

/* Counts on the host, into t->scalars, the rows of the output y (samples) whose largest number is at their label, and
   the rows whose label is a class (HPML_IGNORE is none); counts each of the latter in the matrix `confusion` (label,
   predicted class), unless that is NULL. */
HPMLI_FN void hpmli_count_hits(hpml_trainer *t, const float *y, int64_t samples, const int32_t *labels,
                               int64_t *confusion)
{
    const hpml_tensor *out = t->d.output;
    int64_t            classes = out->shape[out->ndim - 1], n = hpml_tensor_count(out) / out->shape[0], best;
    const int64_t      rows = n * out->batch_rows * samples / classes;
    if (t->best) hpmli_best_of_ranks(t, y, rows, classes);
    if (t->best) classes *= hpml_ctx_group(t->ctx, HPML_AXIS_TENSOR)->size;
    t->scalars.counts[0] = 0;
    t->scalars.counts[1] = 0;
    for (int64_t r = 0; r < rows; r++) {
        if (labels[r] < 0 || labels[r] >= classes) continue;
        best = t->best ? (int64_t)-t->best[rows + r] : hpmli_best(y + r * classes, classes);
        if (best == labels[r]) t->scalars.counts[0]++;
        t->scalars.counts[1]++;
        if (confusion) confusion[labels[r] * classes + best]++;
    }
}

/* Waits for the device and reads t->scalars. With labels (in host memory, or NULL) also counts the rows predicted
   right: on the device if its backend can and `confusion` (a matrix on the host) is NULL, else on the host. */
HPMLI_FN void hpmli_read_step_scalars(hpml_trainer *t, const int32_t *labels, int64_t *confusion)
{
    const hpml_backend *b   = t->ctx->backend;
    const hpml_tensor  *out = t->d.output;
    int64_t             classes = out->shape[out->ndim - 1];
    bool                on_device = labels && b->correct && !confusion && !t->best;
    if (on_device)
        b->correct(t->ctx->device, t->ctx, out->dtype, out->raw, (const int32_t *)t->target->raw,
                   hpml_tensor_count(out) / classes, classes, t->device_scalars->counts);
    b->read(t->ctx->device, &t->scalars, t->device_scalars, sizeof t->scalars);
    t->norm_fetched = t->norm_ready;
    const float *y = labels && !on_device ? hpmli_trainer_host_out(t) : NULL; /* (rows, classes) the output */
    if (!y) return;
    if (y != out->data) hpmli_read_floats(t->ctx, out, hpml_tensor_count(out), t->host_out);
    hpmli_count_hits(t, y, t->graph->batch_now, labels, confusion);
}

/* Moves the data address of each input, and of each reshape of an input, on by `samples` samples (negative: back), so
   that the next passes begin there. */
HPMLI_FN void hpmli_inputs_offset(hpml_trainer *t, int64_t samples)
{
    hpml_graph *g = t->graph;
    g->first_sample += samples;
    if (samples == 0 || g->cut) return; /* with parts each slot has copies of its samples */
    g->shift += samples;
    for (int i = 0; i < g->leaf_count + g->count; i++) {
        hpml_tensor *x = i < g->leaf_count ? g->leaves[i] : g->nodes[i - g->leaf_count]->out;
        hpml_tensor *root = x->node ? x->node->state->out_root[0] : x;
        if (root->node || !root->batch_rows) continue;
        int64_t sample_bytes = hpml_tensor_count(x) / g->batch_now * (int64_t)hpml_dtype_size(x->dtype);
        hpmli_set_memory(x, (char *)x->raw + samples * sample_bytes, x->raw_grad);
    }
}

HPMLI_FN int32_t hpmli_updates_found(const hpml_trainer *t) /* ORs HPML_NONFINITE_ bits of all parameters' steps */
{
    int32_t found = 0;
    for (int i = 0; i < t->graph->param_count; i++) found |= t->found_nonfinite[i];
    return found;
}

HPMLI_FN double hpmli_plain_nan(double value) { return value == value ? value : fabs(value); } /* "nan", not "-nan" */
HPMLI_FN int64_t hpmli_first_nonfinite(const float *x, int64_t n) /* returns the first non-finite's index; n: none */
{
    int64_t i = 0;
    while (i < n && x[i] - x[i] == 0) i++;
    return i;
}

/* True if one of the numbers x (on the device, laid out as tensor y) is not finite. First the device sums their
   squares; if the sum is not finite, which an overflow may cause, the host checks each number. */
HPMLI_FN bool hpmli_has_nonfinite(hpml_trainer *t, const hpml_tensor *y, const void *x)
{
    int64_t     count = hpml_tensor_count(y);
    size_t      size  = hpml_dtype_size(y->dtype);
    hpml_tensor piece = *y;
    float       host[HPMLI_PIECE];
    t->ctx->backend->sumsq(t->ctx->device, t->ctx, y->dtype, x, count, &t->device_scalars->sumsq);
    hpmli_read_step_scalars(t, NULL, NULL);
    if (t->scalars.sumsq - t->scalars.sumsq == 0) return false;
    HPMLI_PIECES(i, c, count) {
        piece.raw = (char *)(uintptr_t)x + (size_t)i * size;
        hpmli_read_floats(t->ctx, &piece, c, host);
        if (hpmli_first_nonfinite(host, c) < c) return true;
    }
    return false;
}

/* Sets an error and returns true if `known` is true or if x (an array on the device, laid out as tensor y; NULL: none)
   has a number that is not finite; else returns false. The error names `place` (such as "parameter"), the tensor y, and
   `what`, the quantity with the non-finite `value` by which the trainer found the problem. */
HPMLI_FN bool hpmli_report_nonfinite(hpml_trainer *t, const char *what, double value, const char *place,
                                     const hpml_tensor *y, const void *x, bool known)
{
    if (!known && (!x || !hpmli_has_nonfinite(t, y, x))) return false;
    bool stepped = hpmli_updates_found(t) != 0;
    hpmli_fail(t->ctx, HPML_ERR_NONFINITE, "step %lld: %s is %g: the first NaN or infinity is in %s \"%s\"; look at "
               "the data, lower the learning rate (now %g) or set clip_norm%s", (long long)t->step + 1, what,
               hpmli_plain_nan(value), place, y->name, (double)hpml_trainer_lr(t),
               stepped ? ". The rest of this step is in the parameters: go on from a checkpoint" : "");
    return true;
}

/* Fails with an error that names the first layer with a NaN or infinity: runs forward again and checks each result. */
HPMLI_FN hpml_status hpmli_find_nonfinite(hpml_trainer *t, const char *what, double value)
{
    hpml_ctx           *ctx = t->ctx;
    hpml_graph         *g   = t->graph;
    hpml_tensor *const *p   = ctx->params;
    hpml_run            run = hpmli_run_of(g, true, g->slots[g->slot].step, 1);
    run.sum = NULL; /* no sum over all ranks, which would wait: the other ranks are not here */
    for (int i = 0; i < ctx->param_count; i++)
        if (hpmli_report_nonfinite(t, what, value, "parameter", p[i], p[i]->data, false)) return ctx->status;
    if (hpmli_trainer_kept(t, 3) != g->grad_count) /* ops wait for values of other ranks, which are not here */
        return hpmli_fail(ctx, HPML_ERR_NONFINITE, "step %lld: %s is %g", (long long)t->step + 1, what,
                          hpmli_plain_nan(value));
    const hpmli_list *part = hpmli_part_now(g);
    hpmli_forward_begin(g, part);
    for (int i = part->from - part->input_count; i < part->to; i++) {
        const hpml_tensor *y = i < part->from ? part->inputs[i - part->from + part->input_count] : g->nodes[i]->out;
        bool               input = i < part->from;
        if (!input && hpmli_is_collective(g->nodes[i])) break; /* would wait for the other ranks */
        if (!input && hpmli_run_node(g, &run, i, HPMLI_FORWARD) != HPML_OK) return ctx->status;
        const char *place = input ? "the data of" : "the result of";
        bool floats = y->dtype == HPML_DTYPE_F32 || hpmli_is_half(y->dtype);
        if (floats && hpmli_report_nonfinite(t, what, value, place, y, y->raw, false)) return ctx->status;
    }
    for (int i = g->param_count - 1; i >= 0; i--) /* in the order of the backward pass */
        if (hpmli_report_nonfinite(t, what, value, "the gradient of", p[i], p[i]->grad, false)) return ctx->status;
    return hpmli_fail(ctx, HPML_ERR_NONFINITE, "step %lld: %s is %g", (long long)t->step + 1, what,
                      hpmli_plain_nan(value));
}

HPMLI_FN hpml_status hpmli_updates_check(hpml_trainer *t) /* fails if a parameter's step found a non-finite number */
{
    int32_t     found = t->ctx->status == HPML_OK ? hpmli_updates_found(t) : 0;
    bool        grad  = (found & HPML_NONFINITE_GRADIENT) != 0;
    int32_t     bit   = grad ? HPML_NONFINITE_GRADIENT : HPML_NONFINITE_STEP;
    const char *what  = grad ? "a gradient" : "an update";
    const char *place = grad ? "the gradient of" : "the step of parameter";
    double      value = grad ? (double)NAN : (double)INFINITY;
    for (int i = t->graph->param_count - 1; found && i >= 0; i--) { /* in the order of the backward pass */
        bool here = (t->found_nonfinite[i] & bit) != 0;
        if (hpmli_report_nonfinite(t, what, value, place, t->ctx->params[i], NULL, here)) break;
    }
    return t->ctx->status;
}

// ---------------------------------------------------------------------------------------------------------------------
// >>norms   norms of whole parameters of which several ranks have parts
// ---------------------------------------------------------------------------------------------------------------------
/* Returns the sum of squares of n floats on the device. */
HPMLI_FN double hpmli_sum_of_squares(hpml_trainer *t, const float *x, int64_t n)
{
    const hpml_backend *b = t->ctx->backend;
    double              sum = 0;
    if (n == 0) return 0;
    b->sumsq(t->ctx->device, t->ctx, HPML_DTYPE_F32, x, n, &t->device_scalars->sumsq);
    b->read(t->ctx->device, &sum, &t->device_scalars->sumsq, sizeof sum);
    return sum;
}

/* Sets t->norms (param_count, each) to sums of squares of each gradient or, if `each` is 2, of each weight, then of its
   gradient; the hooks `norms` add up the ranks' parts. Returns the sum over all gradients; NaN: an error. */
HPMLI_FN double hpmli_norms_of_parts(hpml_trainer *t, int64_t each)
{
    hpml_graph *g   = t->graph;
    double      all = 0;
    if (!t->norms) t->norms = hpmli_new(t->ctx, double, 2 * (int64_t)g->param_count);
    if (!t->norms) return (double)NAN;
    for (int i = 0; i < g->param_count; i++) {
        const hpml_update *u = &t->updates[i];
        int64_t            n = u->g ? hpmli_update_count(t->ctx->params[i]) : 0;
        double            *s = t->norms + each * i;
        if (each > 1) s[0] = hpmli_sum_of_squares(t, u->w, n);
        s[each - 1] = hpmli_sum_of_squares(t, u->g, n);
    }
    for (const hpml_hooks *h = g->hooks; h < g->hooks + g->hook_count; h++)
        if (h->norms && h->norms(h->user, t, t->norms, each) != HPML_OK) return (double)NAN;
    for (int i = 0; i < g->param_count; i++) all += t->norms[each * i + each - 1];
    return all;
}

/* Steps parameters by an optimizer that needs norms of whole tensors, of which other ranks have parts: as the CPU's
   update does, but with the hooks' sums over ranks between the parts of the step. */
HPMLI_FN hpml_status hpmli_apply_by_norms(hpml_trainer *t, int first_param, int param_count)
{
    hpml_ctx             *ctx = t->ctx;
    const hpml_optimizer *row = t->optimizer;
    if (!ctx->backend->host)
        return hpmli_fail(ctx, HPML_ERR_UNSUPPORTED, "trainer: %s needs norms of tensors of which ranks have parts; on "
                          "\"%s\" take sgd, adam or adamw", row->name, ctx->backend->name);
    for (int i = first_param; i < first_param + param_count; i++)
        hpmli_update_clip(&t->updates[i]); /* first, because the sums below replace the one that it reads */
    for (int pass = 0; pass < 2; pass++) {
        bool sums = pass == 0 ? row->prepare != NULL : row->layer_ratio;
        if (pass == 1 && !row->direction) break;
        if (sums) hpmli_norms_of_parts(t, 2);
        if (hpmli_failed(ctx)) return ctx->status;
        for (int i = first_param; i < first_param + param_count; i++) {
            hpml_update *u       = &t->updates[i];
            double       norm[2] = { 0, 0 };
            for (int k = 0; k < 2 && sums; k++) norm[k] = sqrt(t->norms[2 * i + k]);
            if (u->n == 0) continue;
            if (pass == 0) hpmli_step_prepared(ctx, row, u, norm);
            else hpmli_direction_apply(ctx, row, *u, norm);
        }
    }
    return HPML_OK;
}

// ---------------------------------------------------------------------------------------------------------------------
// >>step   one step: its norm, its loss scale
// ---------------------------------------------------------------------------------------------------------------------
/* hpml_trainer_step runs the update described at the beginning of PART V in hpmli_step_begin, hpmli_step_run,
   hpmli_step_update and hpmli_step_fill_info. Hooks of data parallelism replace the end of hpmli_step_run and of
   hpmli_step_update, and call hpml_trainer_forward_backward and hpml_trainer_apply themselves. */

/* Computes the norm of all gradients on the device, once a step, if clipping or a dynamic loss scale needs the norm. */
HPMLI_FN void hpmli_grad_norm_on_device(hpml_trainer *t)
{
    const hpml_backend *b = t->ctx->backend;
    if (!t->norm_ready && t->wants_norm && t->graph->any.norms) {
        double sum = hpmli_norms_of_parts(t, 1);
        b->write(t->ctx->device, &t->device_scalars->sumsq, &sum, sizeof sum);
    } else if (!t->norm_ready && t->wants_norm) {
        b->sumsq(t->ctx->device, t->ctx, HPML_DTYPE_F32, t->graph->grads, t->graph->grad_count,
                 &t->device_scalars->sumsq);
    }
    t->norm_ready = t->wants_norm;
}

/* Reads the gradients' norm: if not finite, sets t->overflowed where the loss scale may be the cause, or else fails. */
HPMLI_FN hpml_status hpmli_grad_norm_on_host(hpml_trainer *t)
{
    if (!t->norm_fetched) hpmli_read_step_scalars(t, NULL, NULL);
    double sum    = t->scalars.sumsq;
    bool   finite = sum - sum == 0;
    t->overflowed = t->scale_age >= 0 && !finite && t->loss_scale > 1;
    if (t->d.no_finite_check || t->overflowed || finite) return t->ctx->status;
    return hpmli_find_nonfinite(t, "the gradient norm", sqrt(sum));
}

HPMLI_FN void hpmli_trainer_rescale(hpml_trainer *t) /* dynamic loss scale: / 2 on overflow, * 2 per 2,000 updates */
{
    if (t->scale_age < 0) return;
    t->scale_age = t->overflowed ? 0 : t->scale_age + 1;
    if (t->overflowed) t->loss_scale /= 2;
    if (t->scale_age < 2000) return;
    t->scale_age = 0;
    if (t->loss_scale < HPMLI_LOSS_SCALE_MAX) t->loss_scale *= 2;
}

/* Reads the loss of the pass over the samples from `first` on; if t->labels is set, adds the number of correctly
   predicted rows to t->correct and the number of rows with a valid label to t->counted. */
HPMLI_FN void hpmli_read_pass(hpml_trainer *t, int64_t first)
{
    const int32_t *labels = t->labels;
    if (labels) labels += first * hpml_tensor_count(t->target) / t->graph->batch_now;
    hpmli_read_step_scalars(t, labels, NULL);
    if (!labels) return;
    t->correct += t->scalars.counts[0];
    t->counted += t->scalars.counts[1];
}

// ---------------------------------------------------------------------------------------------------------------------
// >>half-steps   the passes of a step: whole, or in halves for a hook
// ---------------------------------------------------------------------------------------------------------------------
/* Begins a pass on samples [first, first + samples) of the batch. In a graph without parts hpmli_inputs_offset moves
   the inputs to these rows; in a graph with parts the inputs stay, because the caller copies these samples from the
   host to the inputs of a slot. */
HPMLI_FN hpml_status hpmli_pass_begin(hpml_trainer *t, int64_t first, int64_t samples)
{
    hpml_graph *g    = t->graph;
    bool        part = g->cut || first != 0 || samples != t->batch_samples;
    int64_t     rows = g->cut && !g->batchable ? g->batch : samples;
    if (first < 0 || samples < 0 || first + samples > t->batch_samples)
        return hpmli_fail(t->ctx, HPML_ERR_ARGUMENT, "trainer: samples %lld to %lld of a batch of %lld",
                          (long long)first, (long long)(first + samples), (long long)t->batch_samples);
    if (part && samples > 0 && hpml_graph_set_batch(g, rows) != HPML_OK) return t->ctx->status;
    if (samples == 0 && g->collective) hpml_graph_set_batch(g, hpmli_part_now(g)->rows); /* of zeros */
    hpmli_inputs_offset(t, first);
    g->idle = samples == 0;
    return HPML_OK;
}
HPMLI_FN void hpmli_pass_end(hpml_trainer *t, int64_t first)
{
    t->graph->idle = false;
    hpmli_inputs_offset(t, -first);
}

HPMLI_FN uint64_t hpmli_pass_step(const hpml_trainer *t) /* the number that keys random masks of a training pass */
{
    return (uint64_t)(t->step * t->d.accumulate + t->micro_batch);
}

/* Runs forward and backward on the samples at the start of the inputs; see hpml_trainer_forward_backward. */
HPMLI_FN hpml_status hpmli_forward_backward(hpml_trainer *t, float grad_scale, bool accumulate)
{
    hpml_graph *g      = t->graph;
    hpml_status status = hpml_graph_forward(g, true, hpmli_pass_step(t));
    if (status != HPML_OK) return status;
    if (g->updates && !t->d.no_finite_check) { /* read now, because parameters step within the backward pass */
        hpmli_read_step_scalars(t, NULL, NULL);
        float loss = t->scalars.loss;
        if (loss - loss != 0) return hpmli_find_nonfinite(t, "the loss", (double)loss);
    }
    return hpml_graph_backward(g, grad_scale * t->loss_scale, accumulate);
}

/* True if a hook `pass` runs the forward and backward passes: there is one, or the graph is cut into parts, which only
   such a hook can run. */
HPMLI_FN bool hpmli_has_pass(const hpml_trainer *t) { return t->graph->any.pass || t->graph->cut; }

/* Makes the hook `pass` compute samples [first, first + samples) and their mean *loss; without such a hook an error. */
HPMLI_FN hpml_status hpmli_pass_call(hpml_trainer *t, hpml_pass_kind kind, int64_t first, int64_t samples,
                                     float grad_scale, bool accumulate, float *loss)
{
    const hpml_hooks *h  = t->graph->hooks, *end = h + t->graph->hook_count;
    const hpml_moment at = { kind, t->micro_batch, t->d.accumulate, t->step, -1, NULL };
    while (h < end && !h->pass) h++;
    if (h == end)
        return hpmli_fail(t->ctx, HPML_ERR_STATE, "trainer: its graph runs in parts (hpml_graph_part), but no hook "
                          "`pass` is attached that runs them");
    return h->pass(h->user, t, &at, first, samples, grad_scale, accumulate, loss);
}

/* Runs the hook `pass` on the batch in t->x and t->y for evaluate, or for predict (loss NULL). */
HPMLI_FN hpml_status hpmli_pass_outside(hpml_trainer *t, int64_t samples, float *loss)
{
    int64_t floats = hpml_tensor_count(t->d.output) / t->d.output->shape[0] * t->d.output->batch_rows;
    if (!t->batch_out) t->batch_out = hpmli_new(t->ctx, float, floats * t->graph->batch);
    if (hpmli_failed(t->ctx)) return t->ctx->status;
    t->batch_samples     = samples;
    t->evaluating        = true;
    t->graph->no_targets = !loss;
    hpml_status status = hpmli_pass_call(t, HPML_PASS_EVALUATE, 0, samples, 0, false, loss);
    t->graph->no_targets = false;
    t->evaluating        = false;
    return status;
}

HPML_API float *hpml_trainer_output(hpml_trainer *t, int64_t *floats)
{
    if (!t || !t->evaluating) return NULL;
    if (floats) *floats = hpml_tensor_count(t->d.output) / t->d.output->shape[0] * t->d.output->batch_rows;
    return t->batch_out;
}

HPML_API hpml_status hpml_trainer_forward_backward(hpml_trainer *t, int64_t first, int64_t samples, float grad_scale,
                                                   bool accumulate, float *loss)
{
    if (!t) return HPML_ERR_ARGUMENT;
    hpml_graph *g    = t->graph;
    float       mean = 0;
    if (hpmli_has_pass(t)) {
        hpml_status status = hpmli_pass_call(t, HPML_PASS_TRAIN, first, samples, grad_scale, accumulate, &mean);
        if (status == HPML_OK && t->update_follows) hpmli_grad_norm_on_device(t);
        if (loss) *loss = mean;
        return status;
    }
    hpml_status status = hpmli_pass_begin(t, first, samples);
    if (status != HPML_OK) return status;
    g->last = t->micro_batch + 1 == t->d.accumulate;
    status  = hpmli_forward_backward(t, grad_scale, accumulate);
    g->idle = false;
    if (status == HPML_OK) {
        if (t->update_follows) hpmli_grad_norm_on_device(t); /* now, so that the host waits once for loss and norm */
        if (samples > 0 && (loss || t->labels)) hpmli_read_pass(t, first);
        if (loss) *loss = samples > 0 ? t->scalars.loss : 0;
    }
    hpmli_pass_end(t, first);
    return status;
}

/* Copies samples [first, first + samples) of the batch to `input`, if the current part of the graph reads it. */
HPMLI_FN void hpmli_slot_write(hpml_trainer *t, hpml_tensor *input, const void *batch, int64_t first, int64_t samples)
{
    const hpmli_list *p = hpmli_part_now(t->graph);
    int64_t           n = hpml_tensor_count(input) / input->shape[0] * input->batch_rows; /* numbers of a sample */
    for (int i = 0; i < p->input_count && batch; i++)
        if (p->inputs[i] == input)
            hpmli_write_samples(t, input, (const char *)batch + first * n * (int64_t)hpml_dtype_size(input->dtype),
                                samples);
}

/* Makes slot number `slot` of the graph's memory current and points t->device_scalars to the loss in this slot, because
   the loss is the first of the step's scalars in memory. */
HPMLI_FN hpml_status hpmli_slot_begin(hpml_trainer *t, int slot)
{
    if (hpml_trainer_alloc(t) != HPML_OK) return t ? t->ctx->status : HPML_ERR_ARGUMENT;
    hpml_status status = hpml_graph_slot(t->graph, slot);
    t->device_scalars  = (hpmli_step_scalars *)(void *)t->loss->data;
    return status;
}

/* After a forward pass of the current part of the graph: reads the loss and the number of right predictions if this
   part computes the loss; in an evaluation reads the output to t->batch_out if this part computes the output. */
HPMLI_FN void hpmli_slot_results(hpml_trainer *t, int64_t first, int64_t samples, float *loss)
{
    hpml_graph       *g   = t->graph;
    const hpmli_list *p   = hpmli_part_now(g);
    hpml_tensor      *out = t->d.output;
    bool              has_output = hpmli_node_in(p, out) != NULL, has_loss = hpmli_node_in(p, g->loss) != NULL;
    if (samples == 0) return;
    if (has_loss && !g->no_targets && (loss || (t->labels && !t->evaluating))) {
        if (t->labels && !t->evaluating && out->raw) hpmli_read_pass(t, first);
        else hpmli_read_step_scalars(t, NULL, NULL);
        if (loss) *loss = t->scalars.loss;
    }
    int64_t floats = hpml_tensor_count(out) / out->shape[0] * out->batch_rows; /* of a sample */
    if (t->evaluating && has_output)
        hpmli_read_floats(t->ctx, out, samples * floats, t->batch_out + first * floats);
}

HPML_API hpml_status hpml_trainer_forward(hpml_trainer *t, int slot, int64_t first, int64_t samples, float *loss)
{
    if (loss) *loss = 0;
    hpml_status status = hpmli_slot_begin(t, slot);
    if (status == HPML_OK) status = hpmli_pass_begin(t, first, samples);
    if (status != HPML_OK) return status;
    hpml_graph *g = t->graph;
    hpmli_slot *s = &g->slots[slot];
    s->first = first;
    s->idle  = samples == 0;
    if (g->cut) {
        hpmli_slot_write(t, t->d.input, t->x, first, samples);
        hpmli_slot_write(t, t->target, t->y, first, g->batchable ? samples : g->batch);
    }
    status = hpml_graph_forward(g, !t->evaluating, t->evaluating ? 0 : hpmli_pass_step(t));
    if (status == HPML_OK) hpmli_slot_results(t, first, samples, loss);
    hpmli_pass_end(t, first);
    return status;
}

HPML_API hpml_status hpml_trainer_backward(hpml_trainer *t, int slot, float grad_scale, bool accumulate, bool last)
{
    return hpml_trainer_backward_half(t, slot, HPML_HALF_BOTH, grad_scale, accumulate, last);
}

HPML_API hpml_status hpml_trainer_backward_half(hpml_trainer *t, int slot, hpml_half half, float grad_scale,
                                                bool accumulate, bool last)
{
    hpml_status status = hpmli_slot_begin(t, slot);
    if (status != HPML_OK) return status;
    hpml_graph       *g = t->graph;
    const hpmli_slot *s = &g->slots[slot];
    const int64_t     first_sample = g->first_sample;
    hpmli_inputs_offset(t, s->first);
    g->batch_now    = s->samples;
    g->first_sample = s->sample;
    g->idle         = s->idle;
    g->last         = last && t->micro_batch + 1 == t->d.accumulate;
    status = hpml_graph_backward_half(g, half, grad_scale * t->loss_scale, accumulate);
    hpmli_pass_end(t, s->first);
    g->first_sample = first_sample;
    return status;
}

// ---------------------------------------------------------------------------------------------------------------------
// >>update   the steps of parameters, micro-batches, a whole step
// ---------------------------------------------------------------------------------------------------------------------
/* Sets the fields that change with each step (lr, grad_scale ..) in t->updates of parameters first_param to first_param
   + param_count - 1. */
HPMLI_FN void hpmli_updates_prepare(hpml_trainer *t, int first_param, int param_count)
{
    float lr = hpml_trainer_lr(t), scale = t->loss_scale * t->accumulate_weight;
    for (int i = first_param; i < first_param + param_count; i++) {
        const hpml_param *p = t->ctx->params[i]->param;
        hpml_update      *u = &t->updates[i];
        bool              no_decay = p->no_decay && !t->d.decay_all;
        u->n          = u->g && !p->frozen ? hpmli_update_count(t->ctx->params[i]) : 0;
        u->step       = (uint64_t)t->step + 1;
        u->lr         = lr * p->lr_scale;
        u->grad_scale = 1 / scale;
        u->clip       = t->d.clip_norm * scale;
        u->sumsq      = t->d.clip_norm > 0 ? &t->device_scalars->sumsq : NULL;
        u->weight_decay = no_decay ? 0 : t->d.weight_decay;
        u->trust        = no_decay ? 0 : t->d.trust;
        t->found_nonfinite[i] = 0;
        u->found_nonfinite    = t->d.no_finite_check ? NULL : &t->found_nonfinite[i];
    }
}

/* Makes `count` steps: on the backend or, where t->staged is set, on the host with copies of values and gradient. */
HPMLI_FN hpml_status hpmli_updates_run(hpml_trainer *t, const hpml_update *updates, int count)
{
    hpml_ctx           *ctx    = t->ctx;
    const hpml_backend *b      = ctx->backend;
    hpml_status         status = HPML_OK;
    double              sumsq  = 0;
    if (!t->staged) return b->update(ctx->device, ctx, updates, count);
    if (updates[0].sumsq) status = b->read(ctx->device, &sumsq, updates[0].sumsq, sizeof sumsq);
    for (int i = 0; i < count && status == HPML_OK; i++) {
        hpml_update  u     = updates[i];
        const size_t bytes = (size_t)u.n * sizeof(float);
        if (u.n == 0) continue;
        if (u.sumsq) u.sumsq = &sumsq;
        u.w = t->staged;
        u.g = t->staged + u.n;
        if (status == HPML_OK) status = b->read(ctx->device, u.w, updates[i].w, bytes);
        if (status == HPML_OK) status = b->read(ctx->device, u.g, updates[i].g, bytes);
        if (status == HPML_OK) status = hpmli_cpu_update(NULL, ctx, &u, 1);
        if (status == HPML_OK) status = b->write(ctx->device, updates[i].w, u.w, bytes);
    }
    return status;
}

/* Gets ready to step: computes the gradients' norm where one is needed. False: an error, or a gradient overflowed. */
HPMLI_FN bool hpmli_apply_begin(hpml_trainer *t)
{
    if (hpmli_failed(t->ctx)) return false;
    hpmli_grad_norm_on_device(t);
    if (hpmli_failed(t->ctx)) return false;
    bool host_needs_norm = t->wants_norm && (t->scale_age >= 0 || !t->d.no_finite_check);
    return !host_needs_norm || (hpmli_grad_norm_on_host(t) == HPML_OK && !t->overflowed);
}

HPML_API hpml_status hpml_trainer_apply(hpml_trainer *t, int first_param, int param_count)
{
    if (!t) return HPML_ERR_ARGUMENT;
    hpml_ctx *ctx = t->ctx;
    if (first_param < 0 || param_count < 0)
        return hpmli_fail(ctx, HPML_ERR_ARGUMENT, "trainer: update of %d parameters from number %d on: expected 0 or "
                          "more of both", param_count, first_param);
    if (hpml_trainer_alloc(t) != HPML_OK || !hpmli_apply_begin(t)) return ctx->status;
    if (param_count > t->graph->param_count - first_param) param_count = t->graph->param_count - first_param;
    if (param_count <= 0) return ctx->status;
    double start = ctx->trace ? hpmli_trace_time(ctx, hpml_now()) : 0;
    hpmli_updates_prepare(t, first_param, param_count);
    bool by_norms = t->graph->any.norms && (t->optimizer->prepare || t->optimizer->layer_ratio);
    if (by_norms) hpmli_apply_by_norms(t, first_param, param_count);
    else hpmli_updates_run(t, t->updates + first_param, param_count);
    if (ctx->trace) hpml_trace_span(ctx, HPML_LANE_COMPUTE, "update", start, hpmli_trace_time(ctx, hpml_now()));
    return hpmli_updates_check(t);
}

/* Steps, of the floats first .. end - 1 of the trainer's arrays, those of parameter i, whose t->updates[i] is ready. */
HPMLI_FN void hpmli_apply_part(hpml_trainer *t, int i, int64_t first, int64_t end, float grad_scale)
{
    hpml_update u  = t->updates[i];
    int64_t     at = hpml_trainer_place(t, i), from = hpmli_max(first - at, 0), to = hpmli_min(end - at, u.n);
    if (at < 0 || from >= to) return;
    u.n = to - from;
    u.w += from;
    u.g += from;
    for (int k = 0; k < HPML_MAX_STATES; k++)
        if (u.state[k]) u.state[k] += from;
    u.grad_scale *= grad_scale;
    u.clip /= grad_scale;
    hpmli_updates_run(t, &u, 1);
}

HPML_API hpml_status hpml_trainer_apply_range(hpml_trainer *t, int64_t first, int64_t count, float grad_scale)
{
    if (!t) return HPML_ERR_ARGUMENT;
    const hpml_optimizer *row = t->optimizer;
    int64_t               all = t->graph->grad_count;
    if (first < 0 || count < 0 || first > all - count || !(grad_scale > 0))
        return hpmli_fail(t->ctx, HPML_ERR_ARGUMENT, "trainer: update of %lld floats from number %lld on, times %g: "
                          "expected a range of %lld floats, and a factor above 0", (long long)count,
                          (long long)first, (double)grad_scale, (long long)all);
    if (hpmli_trainer_kept(t, 1) != all)
        return hpmli_fail(t->ctx, HPML_ERR_STATE, "trainer: update of a range, but this rank keeps parts of parameters "
                          "(hpml_trainer_keep); call hpml_trainer_apply, which steps these");
    if (row->prepare || row->layer_ratio || row->whole)
        return hpmli_fail(t->ctx, HPML_ERR_UNSUPPORTED, "trainer: %s cannot step a range, because its step depends on "
                          "whole tensors; take sgd, adagrad, rmsprop, adam or adamw", row->name);
    if (hpml_trainer_alloc(t) != HPML_OK || !hpmli_apply_begin(t)) return t->ctx->status;
    hpmli_updates_prepare(t, 0, t->graph->param_count);
    for (int i = 0; i < t->graph->param_count; i++) hpmli_apply_part(t, i, first, first + count, grad_scale);
    return hpmli_updates_check(t);
}

/* Returns the factor of a micro-batch's gradients, so that over all micro-batches they add up to t->accumulate_weight
   times the mean over the update's samples. A hook `run` that computes gradients by itself weights them itself. */
HPMLI_FN float hpmli_batch_weight(hpml_trainer *t, int64_t samples)
{
    if (t->d.accumulate == 1) return 1;
    if (t->micro_batch == 0) {
        t->first_batch_samples = hpmli_max(samples, 1);
        t->samples_so_far      = 0;
    }
    t->samples_so_far += samples;
    double first = (double)t->first_batch_samples;
    if (t->samples_so_far > 0) t->accumulate_weight = (float)((double)t->samples_so_far / (first * t->d.accumulate));
    return (float)((double)samples / first) / (float)t->d.accumulate;
}

typedef struct hpmli_step { /* one call of hpml_trainer_step */
    int64_t    number;    /* updates before this call */
    int64_t    samples;
    double     start, traced_start; /* seconds: of hpml_now, of the timeline */
    float      lr, scale;  /* learning rate; loss scale times accumulate_weight */
    float      loss;       /* mean of the samples; 0 unless loss_known */
    bool       loss_known; /* the host reads the loss, or a hook returns it */
    bool       info;       /* the caller wants a hpml_step_info */
} hpmli_step;

/* Copies micro-batch x, y into the inputs, clears the last step's results, and fills in *s, the data of this step that
   its later functions read. */
HPMLI_FN hpml_status hpmli_step_begin(hpml_trainer *t, const void *x, const void *y, hpmli_step *s)
{
    const hpml_backend *b       = t->ctx->backend;
    const hpml_hooks   *any     = &t->graph->any;
    int64_t             samples = s->samples;
    s->start = hpml_now();
    if (samples != 0 || !any->run) { /* 0: this rank has no part in a short last batch */
        hpml_status status = hpmli_write_batch(t, x, y, samples);
        if (status != HPML_OK) return status;
    }
    t->batch_samples = samples;
    t->correct       = 0;
    t->counted       = 0;
    t->norm_ready    = false;
    t->norm_fetched  = false;
    t->overflowed    = false;
    t->labels        = NULL;
    bool counts = s->info ? hpmli_is_classifier(t) : t->best != NULL; /* best: all ranks count together */
    if (counts) t->labels = samples < t->graph->batch_now ? t->host_y : (const int32_t *)y;
    hpmli_trace_step(t->ctx, t->step);
    s->number       = t->step;
    s->traced_start = hpmli_trace_time(t->ctx, s->start);
    s->lr           = hpml_trainer_lr(t);
    s->loss_known   = any->run || s->info || !t->d.no_finite_check;
    t->update_follows    = t->micro_batch + 1 == t->d.accumulate && !any->run && !any->grad && !any->update;
    t->update_early      = t->update_follows && !t->wants_norm && !b->sync && !b->begin && !any->pass &&
                           !t->staged;
    t->accumulate_weight = t->micro_batch > 0 ? t->accumulate_weight : 1;
    t->graph->at.batch   = t->micro_batch;
    t->graph->at.batches = t->d.accumulate;
    t->graph->at.step    = t->step;
    return HPML_OK;
}

/* Runs forward and backward of a micro-batch; with t->update_early each parameter steps within the backward pass. */
HPMLI_FN hpml_status hpmli_run_own(hpml_trainer *t, int64_t samples, float *loss)
{
    float weight = hpmli_batch_weight(t, samples);
    if (t->update_early) {
        hpmli_updates_prepare(t, 0, t->graph->param_count);
        t->graph->updates = t->updates;
    }
    hpml_status status = hpml_trainer_forward_backward(t, 0, samples, weight, t->micro_batch > 0, loss);
    t->graph->updates = NULL;
    t->update_follows = false;
    return status;
}

/* Calls the hook `run` (or `update`) of the outermost set of hooks that has it, of the sets number 0, the innermost, to
   `below` - 1; if none of them has it, does what the trainer does without hooks. */
HPMLI_FN hpml_status hpmli_hook_below(hpml_trainer *t, int below, bool update, int64_t samples, float *loss)
{
    const hpml_hooks *first   = t->graph->hooks, *h = first + below - 1;
    int              *running = &t->running[update], before = *running;
    hpml_moment       at      = { update ? HPML_PASS_UPDATE : HPML_PASS_TRAIN, t->micro_batch, t->d.accumulate, t->step,
                                  -1, NULL };
    hpml_status       status;
    while (h >= first && !(update ? h->update != NULL : h->run != NULL)) h--;
    if (h < first && update) return hpml_trainer_apply(t, 0, t->graph->param_count);
    if (h < first) return hpmli_run_own(t, samples, loss);
    *running = (int)(h - first) + 1;
    status   = update ? h->update(h->user, t, &at) : h->run(h->user, t, &at, samples, loss);
    *running = before;
    return status;
}

/* Runs what the hook `run` (if `update`: the hook `update`) that is running now replaces: the same hook of the next
   inner set or, without one, the trainer's own function. */
HPMLI_FN hpml_status hpmli_hook_inner(hpml_trainer *t, bool update, int64_t samples, float *loss)
{
    const char *name = update ? "update" : "run";
    if (!t) return HPML_ERR_ARGUMENT;
    if (t->running[update]) return hpmli_hook_below(t, t->running[update] - 1, update, samples, loss);
    return hpmli_fail(t->ctx, HPML_ERR_STATE, "trainer: the inner %s was called, but no hook `%s` is running that "
                      "replaces it", name, name);
}
HPML_API hpml_status hpml_trainer_run_inner(hpml_trainer *t, int64_t samples, float *loss)
{
    return hpmli_hook_inner(t, false, samples, loss);
}
HPML_API hpml_status hpml_trainer_update_inner(hpml_trainer *t) { return hpmli_hook_inner(t, true, 0, NULL); }

/* Runs forward and backward on a micro-batch, by the hooks `run` or, without such hooks, by the trainer's own function.
   Fails if the loss is not finite, unless no_finite_check is set. */
HPMLI_FN hpml_status hpmli_step_run(hpml_trainer *t, hpmli_step *s)
{
    hpml_status status = hpmli_hook_below(t, t->graph->hook_count, false, s->samples,
                                          s->loss_known ? &s->loss : NULL);
    s->scale = t->loss_scale * t->accumulate_weight;
    if (status != HPML_OK) return status;
    if (!t->d.no_finite_check && s->loss - s->loss != 0) return hpmli_find_nonfinite(t, "the loss", (double)s->loss);
    return HPML_OK;
}

/* Counts the micro-batch. After the last micro-batch of an update steps the parameters or, if they have been stepped
   within the backward pass, checks the new parameters. */
HPMLI_FN hpml_status hpmli_step_update(hpml_trainer *t)
{
    hpml_status status = HPML_OK;
    t->micro_batch++;
    if (t->micro_batch < t->d.accumulate) return HPML_OK;
    if (t->update_early) status = hpmli_updates_check(t);
    else status = hpmli_hook_below(t, t->graph->hook_count, true, 0, NULL);
    t->micro_batch = 0;
    if (status == HPML_OK && !t->overflowed) t->step++;
    hpmli_trainer_rescale(t);
    return status;
}

HPMLI_FN void hpmli_step_fill_info(hpml_trainer *t, const hpmli_step *s, hpml_step_info *info)
{
    if (t->norm_ready && !t->norm_fetched) hpmli_read_step_scalars(t, NULL, NULL);
    memset(info, 0, sizeof *info);
    info->step      = t->step;
    info->epoch     = t->epoch;
    info->samples   = s->samples;
    info->lr        = s->lr;
    info->loss      = s->loss;
    info->accuracy  = t->counted > 0 ? (float)t->correct / (float)t->counted : -1;
    info->grad_norm = t->norm_ready ? (float)sqrt(t->scalars.sumsq) / s->scale : -1;
    info->skipped   = t->overflowed;
    info->seconds   = hpml_now() - s->start;
}

/* Allocates the trainer's memory. False, with an error: out of memory; or this rank keeps only parts of the arrays that
   sharding (ZeRO) of stage `level` or higher cuts, and no hook `join` fills in the parts of the other ranks. */
HPMLI_FN bool hpmli_trainer_joined(hpml_trainer *t, const char *call, int level)
{
    if (hpml_trainer_alloc(t) != HPML_OK) return false;
    if (t->graph->any.join || hpmli_trainer_kept(t, level) == t->graph->grad_count) return true;
    return hpmli_false(t->ctx, HPML_ERR_STATE, "trainer %s: this rank keeps parts of the parameters, and no hooks join "
                       "them to those of other ranks; call hpml_distribute again with the same plan", call);
}

HPML_API hpml_status hpml_trainer_step(hpml_trainer *t, const void *x, const void *y, int64_t samples,
                                       hpml_step_info *info)
{
    hpmli_step s;
    if (!t || hpmli_failed(t->ctx)) return t ? t->ctx->status : HPML_ERR_ARGUMENT;
    if (!y) return hpmli_fail(t->ctx, HPML_ERR_ARGUMENT, "trainer step: no targets; the dataset has no labels?");
    if (!hpmli_trainer_joined(t, "step", 1)) return t->ctx->status;
    memset(&s, 0, sizeof s);
    s.samples = samples;
    s.info    = info != NULL;
    hpml_status status = hpmli_step_begin(t, x, y, &s);
    if (status == HPML_OK) status = hpmli_step_run(t, &s);
    if (status != HPML_OK) return status;
    status = hpmli_step_update(t);
    if (t->ctx->trace) hpmli_trace_stepped(t->ctx, s.number, s.traced_start, s.loss_known ? s.loss : (float)NAN);
    if (info && status == HPML_OK) hpmli_step_fill_info(t, &s, info);
    return status;
}

// ---------------------------------------------------------------------------------------------------------------------
// >>fit   passes over data, evaluation, prediction
// ---------------------------------------------------------------------------------------------------------------------
HPMLI_FN int64_t hpmli_sample_floats(const hpml_dataset *d); /* see >>dataset */
/* Fails if samples of the data do not fit the model's input and target. augments: images get shifted, flipped, cut. */
HPMLI_FN bool hpmli_data_fits(hpml_trainer *t, const hpml_dataset *data, bool augments)
{
    const hpml_tensor *x = t->d.input, *y = t->target;
    int64_t x_data  = hpmli_sample_floats(data); /* numbers of a sample: in the data, as the model's input and target */
    int64_t x_model = hpml_tensor_count(x) / t->graph->batch, y_model = hpml_tensor_count(y) / t->graph->batch;
    bool    tokens = data->x_dtype == HPML_DTYPE_I32; /* other types become floats */
    bool    x_fits = x_data == x_model && x->dtype == (tokens ? HPML_DTYPE_I32 : HPML_DTYPE_F32);
    bool    y_fits = !data->y || (data->y_size == y_model && data->y_dtype == y->dtype);
    if (!x_fits || !y_fits)
        return hpmli_false(t->ctx, HPML_ERR_SHAPE, "trainer: a sample of the data has %lld numbers of %s and %lld of "
                           "%s to learn, the model takes %lld of %s and %lld of %s", (long long)x_data,
                           hpml_dtype_name(data->x_dtype), (long long)data->y_size, hpml_dtype_name(data->y_dtype),
                           (long long)x_model, hpml_dtype_name(x->dtype), (long long)y_model,
                           hpml_dtype_name(y->dtype));
    bool moves = augments || data->x_crop > 0 || memcmp(data->x_shape, x->shape + 1, 3 * sizeof *x->shape) != 0;
    if (x->layout == HPML_NHWC && moves)
        return hpmli_false(t->ctx, HPML_ERR_SHAPE, "trainer: input %s is NHWC, a sample of the data is %s, and crops "
                           "and augmentation are of (C, H, W): take an input of (B, C, H, W) and record "
                           "hpml_to_layout(input, HPML_NHWC)", hpmli_describe(x),
                           hpmli_shape_text(t->ctx, data->x_ndim, data->x_shape));
    return true;
}

HPMLI_FN const hpml_hooks *hpmli_hooks_deal(const hpml_trainer *t) /* returns hooks with a `next`; NULL: none have */
{
    int k = t->graph->hook_count - 1;
    while (k >= 0 && !t->graph->hooks[k].next) k--;
    return k >= 0 ? &t->graph->hooks[k] : NULL;
}

/* Creates a loader for `data`: if `evaluate`, of all samples in order, else of this rank's shard. given: its options,
   NULL: defaults. Returns NULL after an error, or if `data` is NULL. */
HPMLI_FN hpml_loader *hpmli_trainer_loader(hpml_trainer *t, hpml_dataset *data, const hpml_loader_desc *given,
                                           bool evaluate)
{
    hpml_loader_desc d = HPMLI_ZEROED;
    if (hpmli_failed(t->ctx) || !data) return NULL;
    hpmli_graph_restore_batch(t->graph);
    if (given) d = *given;
    if (!hpmli_data_fits(t, data, d.augment.shift > 0 || d.augment.flip || d.augment.cutout > 0)) return NULL;
    if (d.batch == 0) d.batch = (int32_t)t->graph->batch;
    if (d.batch > t->graph->batch)
        return hpmli_null(t->ctx, HPML_ERR_ARGUMENT, "trainer: the loader's batch %d is larger than the model's %lld",
                          d.batch, (long long)t->graph->batch);
    if (evaluate) d.in_order = true;
    else if (d.ranks == 0) {
        d.rank         = t->rank;
        d.ranks        = t->ranks;
        d.global_batch = t->global_batch;
        d.grain        = t->grain;
        d.no_prefetch  = d.no_prefetch || hpmli_hooks_deal(t); /* only the hook knows which batch comes next */
    }
    return hpml_loader_create(t->ctx, data, &d);
}

static uint64_t hpmli_loader_mark(const hpml_loader *l); /* a hash of data and order; see >>loader */
typedef struct hpmli_fit { /* what one call of hpml_trainer_fit counts */
    double  start;   /* seconds, by hpml_now */
    int64_t samples, updates;
    bool    is_last; /* in the last epoch of the call */
    const hpml_hooks *deals; /* hooks with a `next`, which says which batches this rank takes; NULL: none */
} hpmli_fit;

/* Gets the next batch of fit. False: the end of the epoch on this rank, or an error, on the context. */
HPMLI_FN bool hpmli_fit_next(hpml_trainer *t, hpml_loader *l, const hpmli_fit *f, hpml_batch *b)
{
    const int64_t batches = hpml_loader_steps(l);
    if (!f->deals) return hpml_loader_next(l, b);
    int64_t n = f->deals->next(f->deals->user, t, t->epoch, batches, f->is_last);
    if (n >= 0) return hpml_loader_seek(l, n / batches, n % batches) == HPML_OK && hpml_loader_next(l, b);
    t->epoch += !hpmli_failed(t->ctx);
    return false;
}

/* Trains from the trainer's place in the data to the epoch's end; HPML_ERR_STOPPED: on_step or max_steps ended it. */
HPMLI_FN hpml_status hpmli_fit_epoch(hpml_trainer *t, hpml_loader *l, const hpml_fit_desc *d, hpmli_fit *f)
{
    hpml_batch     b;
    hpml_step_info info;
    hpml_loader_seek(l, t->epoch, t->epoch_step);
    while (hpmli_fit_next(t, l, f, &b)) {
        int64_t before = t->step;
        bool    last   = !f->deals && b.index + 1 == hpml_loader_steps(l);
        t->graph->first_sample = b.first;
        hpml_status status = hpml_trainer_step(t, b.x, b.y, b.samples, d->on_step ? &info : NULL);
        if (status != HPML_OK) return status;
        if (last) t->epoch++;
        t->epoch_step = last || f->deals ? 0 : b.index + 1;
        f->samples += b.samples;
        f->updates += t->step - before;
        if (d->on_step) {
            info.epoch_step         = b.index + 1;
            info.epoch_steps        = hpml_loader_steps(l);
            info.seconds            = hpml_now() - f->start;
            info.samples_per_second = (double)f->samples / info.seconds;
            if (d->on_step(&info, d->user) != 0) return HPML_ERR_STOPPED;
        }
        if (d->max_steps > 0 && f->updates >= d->max_steps && !last) return HPML_ERR_STOPPED;
    }
    return t->ctx->status;
}

HPML_API hpml_status hpml_trainer_fit(hpml_trainer *t, hpml_dataset *data, const hpml_fit_desc *desc)
{
    hpml_fit_desc d;
    hpml_status   status = HPML_OK;
    hpmli_fit     f      = { hpml_now(), 0, 0, false, NULL };
    if (!t) return HPML_ERR_ARGUMENT;
    if (!HPMLI_COPY_DESC(t->ctx, "fit", d, desc)) return t->ctx->status;
    if (d.epochs < 0 || d.max_steps < 0)
        return hpmli_fail(t->ctx, HPML_ERR_ARGUMENT, "fit: %d epochs, max_steps %lld: expected 0 or more", d.epochs,
                          (long long)d.max_steps);
    hpml_loader *l = hpmli_trainer_loader(t, data, d.loader, false);
    if (!l) return t->ctx->status != HPML_OK ? t->ctx->status : HPML_ERR_ARGUMENT;
    for (int k = 0; k < t->graph->hook_count && (!d.loader || d.loader->ranks == 0) && status == HPML_OK; k++) {
        const hpml_hooks *h        = &t->graph->hooks[k];
        const int64_t     passes[] = { t->epoch, t->epoch_step, d.epochs, d.max_steps };
        if (h->data) status = h->data(h->user, t, hpmli_hash(hpmli_loader_mark(l), passes, sizeof passes));
    }
    if (!d.loader || d.loader->ranks == 0) f.deals = hpmli_hooks_deal(t);
    for (int e = 0; e < (d.epochs > 0 ? d.epochs : 1) && status == HPML_OK; e++) {
        f.is_last = e + 1 >= d.epochs;
        if (d.max_steps > 0 && f.updates >= d.max_steps) break; /* the last update ended an epoch */
        status = hpmli_fit_epoch(t, l, &d, &f);
    }
    hpml_loader_free(l);
    hpmli_graph_restore_batch(t->graph);
    if (status == HPML_ERR_STOPPED && d.max_steps > 0 && f.updates >= d.max_steps) status = HPML_OK;
    /* Waits for the device, whose sync returns an error if the last step has found a non-finite number. */
    if (status == HPML_OK && t->ctx->backend->sync) status = t->ctx->backend->sync(t->ctx->device);
    return status;
}

/* Fails with an error that names the sample whose loss is not finite, by evaluating one sample at a time. The inputs
   hold `samples` samples, which begin with number `first` of the data. */
HPMLI_FN hpml_status hpmli_evaluate_report(hpml_trainer *t, int64_t first, int64_t samples)
{
    hpml_graph *g    = t->graph;
    double      loss = (double)t->scalars.loss;
    bool        found = false;
    for (int64_t i = 0; g->batchable && !g->collective && !g->any.pass && i < samples && !found; i++) {
        if (hpml_graph_set_batch(g, 1) != HPML_OK) return t->ctx->status;
        hpmli_inputs_offset(t, i);
        hpml_status status = hpml_graph_forward(g, false, 0);
        hpmli_inputs_offset(t, -i);
        if (status != HPML_OK) return status;
        hpmli_read_step_scalars(t, NULL, NULL);
        found = t->scalars.loss - t->scalars.loss != 0;
        if (!found) continue;
        loss = (double)t->scalars.loss;
        first += i;
        samples = 1;
    }
    return hpmli_fail(t->ctx, HPML_ERR_NONFINITE, "evaluate: the loss of sample %lld%s is %g: look at the data, and "
                      "whether training has left the parameters finite", (long long)first,
                      samples > 1 ? " or one of its batch" : "", hpmli_plain_nan(loss));
}

/* Computes, into t->scalars, the loss of the batch that is in the model's inputs and, with labels, its hits (rows
   predicted right); by the hook `pass` if there is one. */
HPMLI_FN hpml_status hpmli_evaluate_run(hpml_trainer *t, int64_t samples, const int32_t *labels, int64_t *confusion)
{
    hpml_status status;
    if (!hpmli_has_pass(t)) {
        status = hpml_graph_forward(t->graph, false, 0);
        if (status == HPML_OK) hpmli_read_step_scalars(t, labels, confusion);
        return status;
    }
    float loss = 0;
    status = hpmli_pass_outside(t, samples, &loss);
    t->scalars.loss = loss;
    if (status == HPML_OK && labels) hpmli_count_hits(t, t->batch_out, samples, labels, confusion);
    return status;
}

/* Evaluates one batch; adds its loss, its samples and its rows predicted right to *out (in .accuracy, which is a count
   until the last batch), and its rows that have a label to *counted. False: an error on the context. */
HPMLI_FN bool hpmli_evaluate_batch(hpml_trainer *t, const hpml_batch *b, hpml_metrics *out, int64_t *counted)
{
    bool classifier = hpmli_is_classifier(t);
    if (!b->y) hpmli_fail(t->ctx, HPML_ERR_ARGUMENT, "evaluate: the dataset has no labels");
    if (hpmli_failed(t->ctx) || hpmli_write_batch(t, b->x, b->y, b->samples) != HPML_OK) return false;
    if (hpmli_evaluate_run(t, b->samples, classifier ? (const int32_t *)b->y : NULL, out->confusion) != HPML_OK)
        return false;
    if (!t->d.no_finite_check && t->scalars.loss - t->scalars.loss != 0) {
        hpmli_evaluate_report(t, out->samples, b->samples);
        return false;
    }
    out->loss += (double)t->scalars.loss * (double)b->samples;
    out->samples += b->samples;
    if (!classifier) return true;
    out->accuracy += (double)t->scalars.counts[0];
    *counted += t->scalars.counts[1];
    return true;
}

HPML_API hpml_status hpml_trainer_evaluate(hpml_trainer *t, hpml_dataset *data, hpml_metrics *out)
{
    hpml_batch b;
    int64_t    counted = 0;
    double     start = hpml_now();
    if (!t || !out) return HPML_ERR_ARGUMENT;
    if (!hpmli_trainer_joined(t, "evaluate", 3)) return t->ctx->status;
    hpml_loader *l = hpmli_trainer_loader(t, data, NULL, true);
    if (!l) return t->ctx->status != HPML_OK ? t->ctx->status : HPML_ERR_ARGUMENT;
    int64_t *confusion = out->confusion;
    memset(out, 0, sizeof *out);
    out->confusion = confusion;
    while (hpml_loader_next(l, &b) && hpmli_evaluate_batch(t, &b, out, &counted)) {}
    hpml_loader_free(l);
    hpmli_graph_restore_batch(t->graph);
    if (out->samples > 0) out->loss /= (double)out->samples;
    out->accuracy = counted > 0 ? out->accuracy / (double)counted : -1;
    out->seconds  = hpml_now() - start;
    return t->ctx->status;
}

/* Copies n numbers of the whole output y to `out`; if a dimension of y is split, gathers the parts of all ranks. given:
   this rank's numbers in host memory; NULL: reads them from y. */
HPMLI_FN void hpmli_read_whole(hpml_trainer *t, const hpml_tensor *y, const float *given, int64_t n, float *out)
{
    int d = y->ndim - 1;
    while (d >= 0 && !y->split[d]) d--;
    if (d < 0) {
        if (given) memcpy(out, given, (size_t)n * sizeof *out);
        else hpmli_read_floats(t->ctx, y, n, out);
        return;
    }
    const hpml_group *g     = hpml_ctx_group(t->ctx, (hpml_axis)y->split[d]);
    const int64_t     count = n / g->size;
    float            *part  = hpmli_new(t->ctx, float, count + n), *all = part + count;
    hpmli_cut         c     = hpmli_cut_of(y, (hpml_axis)y->split[d], d, hpmli_sections(y, d));
    if (!part) return;
    if (given) memcpy(part, given, (size_t)count * sizeof *part);
    else hpmli_read_floats(t->ctx, y, count, part);
    hpml_status status = hpmli_cut_join(g, c, part, count, all, out);
    if (status != HPML_OK) hpmli_fail(t->ctx, status, "predict: %s", hpml_status_string(status));
    hpmli_free(t->ctx, part);
}

/* Computes the output for `samples` samples of x, at most one batch; an output that is split over ranks is joined, so
   that `out` gets the whole. */
HPMLI_FN hpml_status hpmli_predict_run(hpml_trainer *t, const void *x, int64_t samples, float *out)
{
    hpml_graph *g   = t->graph;
    hpml_run    run = hpmli_run_of(g, false, 0, 1);
    int64_t     all = hpml_param_whole(t->d.output, NULL);
    int64_t     floats = all / t->d.output->shape[0] * t->d.output->batch_rows * samples;
    if (hpmli_has_pass(t)) {
        t->x = x;
        t->y = NULL;
        hpml_status status = hpmli_pass_outside(t, samples, NULL);
        if (status == HPML_OK) hpmli_read_whole(t, t->d.output, t->batch_out, floats, out);
        return status;
    }
    if (hpml_graph_set_batch(g, g->batchable ? samples : g->batch) != HPML_OK) return t->ctx->status;
    hpmli_write_samples(t, t->d.input, x, samples);
    hpmli_forward_begin(g, hpmli_part_now(g));
    for (int k = 0; k < g->count && t->ctx->status == HPML_OK; k++) /* without the loss: no targets are given */
        if (g->nodes[k]->out != t->loss) hpmli_run_node(g, &run, k, HPMLI_FORWARD);
    if (t->ctx->status == HPML_OK) hpmli_read_whole(t, t->d.output, NULL, floats, out);
    return t->ctx->status;
}

HPML_API hpml_status hpml_trainer_predict(hpml_trainer *t, const void *x, int64_t samples, float *out)
{
    if (!t || !out || !x) return HPML_ERR_ARGUMENT;
    if (!hpmli_trainer_joined(t, "predict", 3)) return t->ctx->status;
    if (samples < 0) return hpmli_fail(t->ctx, HPML_ERR_ARGUMENT, "predict: %lld samples", (long long)samples);
    hpml_graph *g = t->graph;
    hpmli_graph_restore_batch(g);
    int64_t x_bytes    = hpml_tensor_count(t->d.input) / g->batch * (int64_t)hpml_dtype_size(t->d.input->dtype);
    int64_t out_floats = hpml_param_whole(t->d.output, NULL) / g->batch; /* x_bytes and out_floats are of one sample */
    for (int64_t i = 0; i < samples && t->ctx->status == HPML_OK; i += g->batch) {
        int64_t n = hpmli_min(samples - i, g->batch), floats = n * out_floats;
        if (hpmli_predict_run(t, (const char *)x + i * x_bytes, n, out + i * out_floats) != HPML_OK) break;
        if (t->d.no_finite_check) continue;
        int64_t at = hpmli_first_nonfinite(out + i * out_floats, floats);
        if (at < floats)
            hpmli_fail(t->ctx, HPML_ERR_NONFINITE, "predict: output %lld of sample %lld is %g: look at the data, and "
                       "whether training has left the parameters finite", (long long)(at % out_floats),
                       (long long)(i + at / out_floats), hpmli_plain_nan((double)out[i * out_floats + at]));
    }
    hpmli_graph_restore_batch(g);
    return t->ctx->status;
}

// =====================================================================================================================
// PART VI   DATA AND FILES: datasets, batches, safetensors, checkpoints, the timeline
// =====================================================================================================================
// ---------------------------------------------------------------------------------------------------------------------
// >>files   reading files, writing files that appear whole
// ---------------------------------------------------------------------------------------------------------------------
/* Files are untrusted input. Readers that copy data use read(), not mmap(), because a mapped file that another program
   truncates kills this process (SIGBUS). A writer writes to a temporary name in the same folder, syncs the file,
   renames it and syncs the folder: at any moment the final name refers to the old or to the new content. */
#if HPMLI_POSIX
#if defined(__STRICT_ANSI__) && !defined(__cplusplus) /* -std=c99 hides these functions */
int     fchmod(int fd, mode_t mode);
FILE   *fdopen(int fd, const char *mode);
int     fileno(FILE *f);
int     fsync(int fd);
int     ftruncate(int fd, off_t size);
ssize_t readlink(const char *path, char *target, size_t size);
#endif
#if defined(O_NOFOLLOW)
#define HPMLI_NOFOLLOW O_NOFOLLOW
#elif defined(__O_NOFOLLOW) /* the name of O_NOFOLLOW in glibc under -std=c99 */
#define HPMLI_NOFOLLOW __O_NOFOLLOW
#else
#define HPMLI_NOFOLLOW O_EXCL /* refuses links, but any other existing file as well */
#endif
#endif
typedef struct hpmli_file {
    hpml_ctx            *ctx;
    const char          *path;
    FILE                *in;    /* the open file; NULL: closed */
    const unsigned char *bytes; /* (size) the content, if the file was mapped or read as a whole; else NULL */
    size_t               size;  /* of the file, in bytes */
    bool                 mapped;
#ifdef HPML_USE_ZLIB
    gzFile               gz;    /* reads a gzipped file; NULL: the file is plain */
#endif
} hpmli_file;

HPMLI_FN void hpmli_file_close(hpmli_file *f)
{
    if (f->in) fclose(f->in);
    f->in = NULL;
#ifdef HPML_USE_ZLIB
    if (f->gz) gzclose(f->gz);
    f->gz = NULL;
#endif
    if (!f->bytes) return;
#if HPMLI_POSIX
    if (f->mapped) munmap((void *)(uintptr_t)f->bytes, f->size);
    else
#endif
        hpmli_free(f->ctx, (void *)(uintptr_t)f->bytes);
    f->bytes = NULL;
}

/* The destructor of objects of a context whose first member is a hpmli_file. */
HPMLI_FN void hpmli_file_destroy(void *object) { hpmli_file_close((hpmli_file *)object); }
/* Opens a regular file that is not empty. Refuses pipes, devices and folders without blocking; false: an error. */
HPMLI_FN bool hpmli_file_open(hpml_ctx *ctx, hpmli_file *f, const char *path)
{
    memset(f, 0, sizeof *f);
    f->ctx = ctx, f->path = path;
    if (!path) return hpmli_false(ctx, HPML_ERR_ARGUMENT, "no file name given");
#if HPMLI_POSIX
    struct stat st;
    const char *wrong = NULL;
    int         fd    = open(path, O_RDONLY | O_NONBLOCK);
    if (fd < 0 || fstat(fd, &st) != 0) wrong = strerror(errno);
    else if (S_ISDIR(st.st_mode)) wrong = "it is a folder, expected a file";
    else if (!S_ISREG(st.st_mode)) wrong = "it is a pipe or a device, expected a regular file";
    else if (!(f->in = fdopen(fd, "rb"))) wrong = strerror(errno);
    if (wrong) hpmli_fail(ctx, HPML_ERR_OPEN, "\"%s\": cannot open: %s", path, wrong);
    if (wrong && fd >= 0) close(fd);
    if (wrong) return false;
    f->size = (size_t)st.st_size;
#else
    f->in  = fopen(path, "rb");
    long n = f->in && fseek(f->in, 0, SEEK_END) == 0 ? ftell(f->in) : -1;
    if (n < 0 || fseek(f->in, 0, SEEK_SET) != 0) {
        hpmli_file_close(f);
        return hpmli_false(ctx, HPML_ERR_OPEN, "\"%s\": cannot open", path);
    }
    f->size = (size_t)n;
#endif
    if (f->size > 0) return true;
    hpmli_file_close(f);
    return hpmli_false(ctx, HPML_ERR_FORMAT, "\"%s\": the file is empty", path);
}

/* Reads the next `size` bytes and returns the number read, which is smaller at the end of the file. Gzipped files are
   decompressed; `size` and the result then count decompressed bytes. */
HPMLI_FN size_t hpmli_file_next(hpmli_file *f, void *to, size_t size)
{
    size_t got = 0;
#ifdef HPML_USE_ZLIB
    for (int n = 1; f->gz && got < size && n > 0; got += n > 0 ? (size_t)n : 0)
        n = gzread(f->gz, (char *)to + got, (unsigned)hpmli_min((int64_t)(size - got), 1 << 30));
    if (f->gz) return got;
#endif
    got = fread(to, 1, size, f->in);
    if (ferror(f->in)) hpmli_fail(f->ctx, HPML_ERR_READ, "\"%s\": cannot read: %s", f->path, strerror(errno));
    return got;
}

HPMLI_FN bool hpmli_file_read(hpmli_file *f, void *to, size_t size) /* reads `size` bytes; fewer are an error */
{
    return hpmli_file_next(f, to, size) == size ||
           hpmli_false(f->ctx, HPML_ERR_READ, "\"%s\": cannot read: it became shorter while it was read", f->path);
}

/* Opens a file and reads, or maps if `map`, all of it into f->bytes. A mapped file must not be truncated while open. */
HPMLI_FN bool hpmli_file_whole(hpml_ctx *ctx, hpmli_file *f, const char *path, bool map)
{
    if (!hpmli_file_open(ctx, f, path)) return false;
    bool good = false;
#if HPMLI_POSIX
    void *p = map ? mmap(NULL, f->size, PROT_READ, MAP_PRIVATE, fileno(f->in), 0) : MAP_FAILED;
    if (map && p == MAP_FAILED) hpmli_fail(ctx, HPML_ERR_READ, "\"%s\": cannot map: %s", path, strerror(errno));
    f->mapped = good = p != MAP_FAILED;
    if (f->mapped) f->bytes = (const unsigned char *)p;
#else
    map = false;
#endif
    if (!map) {
        f->bytes = (const unsigned char *)hpmli_alloc(ctx, f->size);
        good     = f->bytes && hpmli_file_read(f, (void *)(uintptr_t)f->bytes, f->size);
    }
    if (good) {
        fclose(f->in);
        f->in = NULL;
    } else hpmli_file_close(f);
    return good;
}
typedef struct hpmli_writer {
    hpml_ctx *ctx;
    FILE     *f;
    char     *path, *temporary; /* the final name, with symbolic links resolved; the name while writing */
    uint64_t  size, synced;     /* bytes written; bytes written at the last sync */
    int       error;            /* errno of the first failure; 0: none */
    int       fd;               /* POSIX: the temporary file, locked until it is renamed; -1: none */
    bool      direct;           /* `path` is a device or a pipe: no temporary file, no rename */
} hpmli_writer;
#if HPMLI_POSIX
/* Replaces a `path` (memory of `size` bytes) that names a symbolic link by the link's target, so that a save replaces
   the file and not the link. False: too many links, or too long a path; sets errno. */
HPMLI_FN bool hpmli_resolve_links(char *path, size_t size)
{
    char target[4096];
    for (int links = 0; links < 40; links++) {
        ssize_t n = readlink(path, target, sizeof target);
        if (n < 0) return true; /* not a link */
        char  *name = strrchr(path, '/');
        size_t kept = name && target[0] != '/' ? (size_t)(name + 1 - path) : 0;
        if (kept + (size_t)n >= size) break;
        memcpy(path + kept, target, (size_t)n);
        path[kept + (size_t)n] = 0;
    }
    errno = ELOOP;
    return false;
}

/* True if the existing temporary file open as w->fd may be overwritten: this process could lock it, this user owns it,
   it has no second link, and the name w->temporary still refers to it. */
HPMLI_FN bool hpmli_temporary_is_ours(const hpmli_writer *w)
{
    struct stat mine, there;
    if (flock(w->fd, LOCK_EX | LOCK_NB) != 0 || fstat(w->fd, &mine) != 0 || stat(w->temporary, &there) != 0)
        return false;
    return S_ISREG(mine.st_mode) && mine.st_nlink == 1 && mine.st_uid == geteuid() && mine.st_ino == there.st_ino &&
           mine.st_dev == there.st_dev;
}

/* Empties the file w->fd, copies the permissions of `old` unless NULL, opens w->f on it. False: error, file removed. */
HPMLI_FN bool hpmli_temporary_take(hpmli_writer *w, const struct stat *old)
{
    struct stat mine;
    bool        good = fstat(w->fd, &mine) == 0 && ftruncate(w->fd, 0) == 0;
    if (good && old && (mine.st_mode & 07777) != (old->st_mode & 07777))
        good = fchmod(w->fd, old->st_mode & 07777) == 0;
    int copy = good ? dup(w->fd) : -1;
    w->f = copy >= 0 ? fdopen(copy, "wb") : NULL;
    if (w->f) return true;
    w->error = errno;
    if (copy >= 0) close(copy);
    remove(w->temporary);
    close(w->fd);
    return false;
}

/* Opens the file "path.tmp", so that a save overwrites the file that a killed save left; if "path.tmp" is a link,
   another user's, locked by another writer or not lockable, creates a new file with a number in its name. size: bytes
   of w->temporary's memory. */
HPMLI_FN bool hpmli_temporary_open(hpmli_writer *w, size_t size)
{
    struct stat old;
    bool        exists = stat(w->path, &old) == 0;
    for (int n = 0; n < 100; n++) {
        if (n == 0) snprintf(w->temporary, size, "%s.tmp", w->path);
        else snprintf(w->temporary, size, "%s.tmp%ld-%d", w->path, (long)getpid(), n);
        int flags = O_RDWR | O_CREAT | O_NONBLOCK | HPMLI_NOFOLLOW;
        w->fd = open(w->temporary, n == 0 ? flags : flags | O_EXCL, exists ? 0600 : 0666);
        if (w->fd < 0 && n > 0 && errno != EEXIST) break;
        if (w->fd < 0) continue;
        if (n > 0 || hpmli_temporary_is_ours(w)) return hpmli_temporary_take(w, exists ? &old : NULL);
        close(w->fd);
    }
    w->error = errno;
    return false;
}

/* Syncs the folder of the renamed file: otherwise a crash of the machine could lose the rename. False: an error. */
HPMLI_FN bool hpmli_folder_sync(hpmli_writer *w)
{
    char *folder = w->temporary, *end = strrchr(folder, '/'); /* reuses the temporary name: the file is renamed */
    if (end) end[end == folder] = 0;
    else strcpy(folder, ".");
    int fd = open(folder, O_RDONLY);
    if (fd < 0) w->error = errno == EACCES ? 0 : errno; /* EACCES: a folder that may be written but not read */
    else if (fsync(fd) != 0 && errno != EINVAL) w->error = errno; /* EINVAL: a file system that cannot sync folders */
    if (fd >= 0) close(fd);
    return w->error == 0;
}
#endif
/* Opens a file for writing, which appears under its name in hpmli_writer_close. seeks: the caller will rewrite the
   start of the file at the end, which pipes and devices do not allow. False: an error on ctx. */
HPMLI_FN bool hpmli_writer_open(hpml_ctx *ctx, hpmli_writer *w, const char *path, bool seeks)
{
    size_t name_size = 4096 + 48; /* bytes: the longest path of any system, and a suffix */
    memset(w, 0, sizeof *w);
    w->ctx = ctx;
    w->fd  = -1;
    if (!path) return hpmli_false(ctx, HPML_ERR_ARGUMENT, "no file name given");
    if (strlen(path) >= 4096)
        return hpmli_false(ctx, HPML_ERR_WRITE, "\"%.64s...\": cannot write: %s", path, strerror(ENAMETOOLONG));
    w->temporary = (char *)hpmli_alloc(ctx, 2 * name_size); /* for w->temporary and w->path */
    if (!w->temporary) return false;
    w->path = strcpy(w->temporary + name_size, path);
#if HPMLI_POSIX
    struct stat there;
    w->direct = stat(path, &there) == 0 && !S_ISREG(there.st_mode);
    if (w->direct && seeks) w->error = ESPIPE;
    else if (w->direct) w->f = fopen(path, "wb");
    else if (hpmli_resolve_links(w->path, 4096)) hpmli_temporary_open(w, name_size);
#else
    snprintf(w->temporary, name_size, "%s.tmp", w->path);
    w->f = fopen(w->temporary, "wb");
#endif
    if (w->f) return true;
    hpmli_fail(ctx, HPML_ERR_WRITE, "\"%s\": cannot write: %s", path, w->direct && seeks
               ? "it is a pipe, a device or a folder, and this kind of file is completed at its start; save to a file"
               : strerror(w->error ? w->error : errno));
    hpmli_free(ctx, w->temporary);
    return false;
}

/* Appends `size` bytes. Errors are kept in the writer; hpmli_writer_close reports the first. */
HPMLI_FN void hpmli_write(hpmli_writer *w, const void *bytes, size_t size)
{
    if (size > 0 && !w->error && fwrite(bytes, 1, size, w->f) != size) w->error = errno ? errno : EIO;
    w->size += size;
}

HPMLI_FN void hpmli_write_start(hpmli_writer *w) /* seeks to 0: the next writes replace the first bytes */
{
    if (!w->error && fseek(w->f, 0, SEEK_SET) != 0) w->error = errno;
}

/* Appends large data. After each 64 MB, if there is a progress callback, syncs the file and calls the callback, so that
   the last sync is short and the callback counts only bytes that are on the disk. */
HPMLI_FN void hpmli_write_data(hpmli_writer *w, const char *data, size_t size)
{
    const size_t         piece    = (size_t)64 << 20;
    const hpml_progress *progress = &w->ctx->progress;
    for (size_t n; size > 0; data += n, size -= n) {
        n = size < piece ? size : piece;
        hpmli_write(w, data, n);
        if (!progress->fn || w->size - w->synced < piece) continue;
        w->synced = w->size;
#if HPMLI_POSIX
        if (!w->direct && !w->error && (fflush(w->f) != 0 || fsync(w->fd) != 0)) w->error = errno;
#endif
        progress->fn(progress->user, w->size);
    }
}

/* Closes the writer. keep: the file gets its final name, or there is an error; else the temporary file is removed. */
HPMLI_FN hpml_status hpmli_writer_close(hpmli_writer *w, bool keep)
{
    bool good = keep && !w->error && !ferror(w->f) && fflush(w->f) == 0;
    bool renamed = false; /* the file has its final name */
#if HPMLI_POSIX
    if (good && !w->direct) good = fsync(w->fd) == 0; /* the data must be on the disk before the rename */
#endif
    if (!good && !w->error) w->error = errno ? errno : EIO;
    if (fclose(w->f) != 0 && good) {
        good     = false;
        w->error = errno;
    }
    w->f = NULL;
    if (good && !w->direct) good = renamed = rename(w->temporary, w->path) == 0;
    if (!good && !w->error) w->error = errno;
    if (!renamed && !w->direct) remove(w->temporary);
#if HPMLI_POSIX
    if (renamed) good = hpmli_folder_sync(w);
    if (w->fd >= 0) close(w->fd);
#endif
    if (keep && !good)
        hpmli_fail(w->ctx, HPML_ERR_WRITE, "\"%s\": cannot %s: %s", w->path, renamed ? "sync its folder" : "write",
                   strerror(w->error));
    hpmli_free(w->ctx, w->temporary);
    return good || !keep ? HPML_OK : HPML_ERR_WRITE;
}

HPMLI_FN uint64_t hpmli_read_little(const unsigned char *p, int bytes) /* reads 1 to 8 little-endian bytes */
{
    uint64_t x = 0;
    for (int i = bytes - 1; i >= 0; i--) x = x << 8 | p[i];
    return x;
}

HPMLI_FN void hpmli_write_little(hpmli_writer *w, uint64_t x, int bytes) /* appends 1 to 8 little-endian bytes */
{
    unsigned char p[8];
    for (int i = 0; i < bytes; i++) p[i] = (unsigned char)(x >> 8 * i);
    hpmli_write(w, p, (size_t)bytes);
}

// ---------------------------------------------------------------------------------------------------------------------
// >>json   UTF-8, decimal numbers, JSON
// ---------------------------------------------------------------------------------------------------------------------
/* Returns the length in bytes (1 to 4) of the UTF-8 character at the start of `text`; 0: no valid character. */
HPMLI_FN size_t hpmli_utf8(const char *text, size_t size)
{
    static const uint32_t least[] = { 0, 0, 0x80, 0x800, 0x10000 }; /* by length: overlong forms are invalid */
    const unsigned char  *p = (const unsigned char *)text;
    size_t                n = 2;
    if (size > 0 && p[0] < 0x80) return 1;
    if (size == 0 || p[0] < 0xc0 || p[0] > 0xf4) return 0;
    if (p[0] >= 0xe0) n++;
    if (p[0] >= 0xf0) n++;
    if (n > size) return 0;
    uint32_t code = p[0] & (0x7fu >> n);
    for (size_t i = 1; i < n; i++) {
        if (p[i] >> 6 != 2) return 0;
        code = code << 6 | (p[i] & 0x3fu);
    }
    bool good = code >= least[n] && code <= 0x10ffff && code >> 11 != 0x1b; /* in Unicode, no UTF-16 surrogate */
    return good ? n : 0;
}

HPMLI_FN bool hpmli_utf8_all(const char *text, size_t size) /* true if all of the text is valid UTF-8 */
{
    for (size_t n; size > 0; text += n, size -= n)
        if ((n = hpmli_utf8(text, size)) == 0) return false;
    return true;
}
#define HPMLI_F32_END 3.4028235677973366e38 /* the smallest double that rounds to an infinite f32 */
/* Returns the f32 nearest to (the digits from p to end) 10^exponent, by strtof, which rounds exactly and, without a
   decimal point, equally in all locales. After the 200th, digits matter only by being 0 or not, because the middle of
   two neighbouring floats has at most 113 digits. */
HPMLI_FN float hpmli_decimal_exact(const char *p, const char *end, int64_t exponent)
{
    char text[256]; /* 200 digits, one for all others, the exponent */
    int  digits = 0;
    bool more   = false;
    for (; p < end; p++) {
        if (*p == '.' || (digits == 0 && *p == '0')) continue;
        if (digits < 200) text[digits++] = *p;
        else exponent++, more = more || *p != '0';
    }
    snprintf(text + digits, sizeof text - (size_t)digits, "%de%lld", more, (long long)exponent - 1);
    return strtof(text, NULL);
}

HPMLI_FN double hpmli_decimal_near(uint64_t w, int64_t exponent) /* w 10^exponent; relative error < 2^-50 if an f32 */
{
    static const double tens[] = { 1e0, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9, 1e10, 1e11, 1e12, 1e13, 1e14, 1e15,
                                   1e16, 1e17, 1e18, 1e19, 1e20, 1e21, 1e22 }; /* each of them exact */
    double  d    = (double)w;
    int64_t left = hpmli_min(exponent < 0 ? -exponent : exponent, 400);
    for (int64_t step; left > 0; left -= step) {
        step = hpmli_min(left, 22);
        if (exponent < 0) d /= tens[step];
        else d *= tens[step];
    }
    return d;
}

/* Parses a decimal number in any locale, so that *out rounds to the f32 nearest to the number (infinity beyond the
   largest). Returns the position after the number, or NULL if there is none. */
HPMLI_FN const char *hpmli_parse_number(const char *p, const char *end, double *out)
{
    const double slack = 1.0 / ((int64_t)1 << 50);
    uint64_t     w = 0; /* the first 19 digits of the number */
    int64_t      exponent = 0, given = 0, decimals = 0; /* of w; after the e; digits after the point */
    int          digits = 0;
    bool         any = false, point = false, cut = false, below = false, negative = p < end && *p == '-';
    if (p < end && (*p == '-' || *p == '+')) p++;
    const char *start = p;
    for (; p < end && ((*p >= '0' && *p <= '9') || (*p == '.' && !point)); p++) {
        if (*p == '.') { point = true; continue; }
        any = true;
        decimals += point;
        if (digits < 19) {
            w = 10 * w + (uint64_t)(*p - '0');
            exponent -= point;
        } else {
            exponent += !point;
            cut = cut || *p != '0';
        }
        digits += digits > 0 || *p != '0';
    }
    if (!any) return NULL;
    const char *stop = p;
    if (p < end && (*p == 'e' || *p == 'E')) {
        p++;
        if (p < end && (*p == '-' || *p == '+')) below = *p++ == '-';
        if (p >= end || *p < '0' || *p > '9') return NULL;
        for (; p < end && *p >= '0' && *p <= '9'; p++)
            if (given < INT64_C(1) << 50) given = given * 10 + (*p - '0');
        if (below) given = -given;
    }
    double d = hpmli_decimal_near(w, exponent + given);
    bool   exact = exponent + given == 0 && w < UINT64_C(1) << 53 && !cut;
    float  least = (float)(exact ? d : d - slack * d);
    float  most = (float)(exact ? d : d + slack * d);
    if (least < most) { /* too near to the middle of two floats to know which one is nearest */
        float nearest = hpmli_decimal_exact(start, stop, given - decimals);
        d = nearest - nearest == 0 ? (double)nearest : HPMLI_F32_END;
    }
    *out = negative ? -d : d;
    return p;
}

/* A JSON reader for a private, writable copy of the text, in which strings are unescaped in place. The reader accepts
   and refuses the same texts as safetensors' own one, but accepts Python tuples, (2, 3,), for .npy headers, and refuses
   strings that contain a NUL, because C strings cannot contain one. */
typedef struct hpmli_json {
    char *p, *end; /* the next character; the end of the text */
    bool  bad;     /* a syntax error was found; every later call does nothing */
} hpmli_json;

HPMLI_FN bool hpmli_json_is(hpmli_json *j, char c) /* skips blanks, then c if it comes next; true: c came */
{
    while (j->p < j->end && (*j->p == ' ' || *j->p == '\n' || *j->p == '\t' || *j->p == '\r')) j->p++;
    if (j->p >= j->end || *j->p != c) return false;
    j->p++;
    return true;
}

HPMLI_FN void hpmli_json_want(hpmli_json *j, char c) { if (!hpmli_json_is(j, c)) j->bad = true; }
HPMLI_FN bool hpmli_json_word(hpmli_json *j, const char *word) /* consumes `word`, e.g. true; false: not there */
{
    size_t n = strlen(word);
    hpmli_json_is(j, ' '); /* skips blanks */
    if ((size_t)(j->end - j->p) < n || memcmp(j->p, word, n) != 0) return false;
    j->p += n;
    return true;
}

HPMLI_FN bool hpmli_json_unit(hpmli_json *j, uint32_t *unit) /* consumes backslash uXXXX, a UTF-16 unit, if there */
{
    char hex[5] = { 0 };
    if (j->end - j->p < 6 || j->p[0] != '\\' || j->p[1] != 'u') return false;
    memcpy(hex, j->p + 2, 4);
    *unit = (uint32_t)strtoul(hex, NULL, 16);
    j->p += 6;
    return strspn(hex, "0123456789abcdefABCDEF") == 4;
}

/* Consumes backslash uXXXX, or the surrogate pair of a character from 0x10000 on, and appends its character at *to in
   UTF-8. False: the escape is invalid, or is 0, which would end a C string. */
HPMLI_FN bool hpmli_json_unicode(hpmli_json *j, char **to)
{
    uint32_t code, low = 0;
    int      more = 0;
    if (!hpmli_json_unit(j, &code) || code == 0 || code >> 10 == 0x37) return false;
    if (code >> 10 == 0x36) {
        if (!hpmli_json_unit(j, &low) || low >> 10 != 0x37) return false;
        code = 0x10000 + ((code & 0x3ff) << 10) + (low & 0x3ff);
    }
    j->p--; /* on the last digit, because the caller steps over one character */
    for (uint32_t most = 0x80; code >= most && more < 3; more++) most = more == 0 ? 0x800 : 0x10000;
    *(*to)++ = (char)(more ? (0xf00 >> (more + 1) & 0xff) | code >> 6 * more : code);
    while (more-- > 0) *(*to)++ = (char)(0x80 | (code >> 6 * more & 0x3f));
    return true;
}

/* Consumes a string, unescapes it in place and returns it, ended by 0; "" after a syntax error. */
HPMLI_FN const char *hpmli_json_text(hpmli_json *j)
{
    char *start, *to;
    hpmli_json_want(j, '"');
    for (start = to = j->p; !j->bad && j->p < j->end && *j->p != '"'; j->p++) {
        if (*j->p == '\\') {
            static const char of[] = "\"\\/nrtbf", is[] = "\"\\/\n\r\t\b\f";
            const char       *at   = j->p + 1 < j->end && j->p[1] ? strchr(of, j->p[1]) : NULL;
            if (at) {
                j->p++;
                *to++ = is[at - of];
            } else if (!hpmli_json_unicode(j, &to)) j->bad = true;
        } else if ((unsigned char)*j->p < 32) j->bad = true;
        else *to++ = *j->p;
    }
    if (j->p >= j->end) j->bad = true;
    if (j->bad) return "";
    j->p++;
    *to = 0; /* at or before the closing quote, because unescaping never makes a string longer */
    return start;
}

HPMLI_FN int64_t hpmli_json_digits(const char *p, const char *end) /* counts the decimal digits at p */
{
    const char *start = p;
    while (p < end && *p >= '0' && *p <= '9') p++;
    return p - start;
}

HPMLI_FN uint64_t hpmli_json_number(hpmli_json *j) /* consumes a non-negative integer */
{
    uint64_t v = 0;
    hpmli_json_is(j, ' '); /* skips blanks */
    int64_t digits = hpmli_json_digits(j->p, j->end);
    j->bad = j->bad || digits == 0 || (digits > 1 && *j->p == '0');
    for (; digits > 0 && !j->bad; digits--) {
        uint64_t digit = (uint64_t)(*j->p++ - '0');
        if (v > (UINT64_MAX - digit) / 10) j->bad = true;
        else v = v * 10 + digit;
    }
    return j->bad ? 0 : v;
}

/* Called before element n of a list or object: consumes the bracket `open` (n = 0) or the comma in front of the
   element. False: the bracket `close` came and is consumed, or a syntax error. */
HPMLI_FN bool hpmli_json_next(hpmli_json *j, int n, char open, char close)
{
    if (n == 0) hpmli_json_want(j, open);
    if (j->bad || hpmli_json_is(j, close)) return false;
    if (n > 0) hpmli_json_want(j, ',');
    return !j->bad && !(close == ')' && hpmli_json_is(j, close));
}

/* Returns an upper bound of the number of elements of the list or object that comes next; consumes nothing. */
HPMLI_FN int64_t hpmli_json_length(hpmli_json j)
{
    int64_t count = 1;
    int     depth = 0;
    bool    text  = false;
    for (; j.p < j.end; j.p++) {
        if (*j.p == '"') text = !text;
        else if (text) j.p += *j.p == '\\';
        else if (*j.p == '{' || *j.p == '[') depth++;
        else if ((*j.p == '}' || *j.p == ']') && --depth == 0) break;
        else count += *j.p == ',' && depth == 1;
    }
    return count;
}

/* Consumes a list of non-negative integers, stores the first `capacity` in `out`, returns how many there are. *product
   (NULL: not wanted) is multiplied by each; an overflow of 64 bits is a syntax error. */
HPMLI_FN int hpmli_json_numbers(hpmli_json *j, char open, char close, int64_t *out, int capacity, uint64_t *product)
{
    int n = 0;
    for (; hpmli_json_next(j, n, open, close); n++) {
        uint64_t number = hpmli_json_number(j);
        if (n < capacity) out[n] = number > INT64_MAX ? INT64_MAX : (int64_t)number;
        if (!product) continue;
        if (number > 0 && *product > UINT64_MAX / number) j->bad = true;
        *product *= number;
    }
    return n;
}

HPMLI_FN void hpmli_json_skip_number(hpmli_json *j) /* skips a JSON number: 1.5e-7; not .5, 5., 05, +5 */
{
    double      v   = 0;
    const char *end = hpmli_parse_number(j->p, j->end, &v), *p = j->p;
    if (!end || fabs(v) > DBL_MAX || *p == '+') { j->bad = true; return; }
    if (*p == '-') p++;
    int64_t digits = hpmli_json_digits(p, end);
    j->bad = j->bad || digits == 0 || (digits > 1 && *p == '0');
    p += digits;
    if (p < end && *p == '.' && hpmli_json_digits(p + 1, end) == 0) j->bad = true;
    j->p += end - j->p;
}

HPMLI_FN void hpmli_json_skip(hpmli_json *j, int depth) /* skips any value, at most `depth` brackets deep */
{
    hpmli_json_is(j, ' '); /* skips blanks */
    char first = 0;
    if (j->p < j->end) first = *j->p;
    bool object = first == '{', list = first == '[';
    if ((object || list) && depth == 0) j->bad = true;
    for (int n = 0; (object && hpmli_json_next(j, n, '{', '}')) || (list && hpmli_json_next(j, n, '[', ']')); n++) {
        if (object) hpmli_json_text(j);
        if (object) hpmli_json_want(j, ':');
        hpmli_json_skip(j, depth - 1);
    }
    if (object || list || j->bad) return;
    if (first == '"') hpmli_json_text(j);
    else if (!hpmli_json_word(j, "true") && !hpmli_json_word(j, "false") && !hpmli_json_word(j, "null"))
        hpmli_json_skip_number(j);
}

// ---------------------------------------------------------------------------------------------------------------------
// >>dataset   datasets; images as data: IDX, CIFAR
// ---------------------------------------------------------------------------------------------------------------------
/* Returns how many numbers a sample has as loaders deliver it: those of the crop, if the dataset d crops its images. */
HPMLI_FN int64_t hpmli_sample_floats(const hpml_dataset *d)
{
    int64_t n = hpmli_shape_count(d->x_ndim, d->x_shape), crop = d->x_crop;
    if (crop <= 0 || d->x_ndim < 2) return n;
    return n / d->x_shape[d->x_ndim - 2] / d->x_shape[d->x_ndim - 1] * crop * crop;
}

/* A dataset with its own arrays, which lie in memory behind this struct. A slice of a dataset (hpml_dataset_slice) is
   a hpml_dataset alone, because its arrays are ranges of that dataset's. */
typedef struct hpmli_samples {
    hpml_dataset  d;
    char         *x;
    int32_t      *y;               /* labels; targets in f32 use the same memory */
    unsigned char vocabulary[256]; /* text datasets: vocabulary[i] is the byte that token i stands for */
    int           vocabulary_size;
} hpmli_samples;

HPML_API void hpml_dataset_free(hpml_dataset *d) { if (d) hpmli_free(d->ctx, d); }
/* Finishes a dataset that a file reader has filled: after an error frees it and returns NULL; else returns it, and
   where labels are integers and d.classes is 0 sets the number of classes to the largest label + 1. */
HPMLI_FN hpml_dataset *hpmli_dataset_done(hpmli_samples *s)
{
    bool    bad    = s && s->d.ctx->status != HPML_OK;
    int64_t labels = s && s->d.y_dtype == HPML_DTYPE_I32 && s->d.classes == 0 && s->y ? s->d.count * s->d.y_size : 0;
    for (int64_t i = 0; i < labels && !bad; i++)
        if (s->y[i] >= s->d.classes && s->y[i] < INT32_MAX) s->d.classes = s->y[i] + 1;
    if (bad) hpml_dataset_free(&s->d);
    return s && !bad ? &s->d : NULL;
}

/* Allocates a dataset with uninitialized samples; NULL and an error if the sizes overflow or memory is exhausted. */
HPMLI_FN hpmli_samples *hpmli_samples_new(hpml_ctx *ctx, int64_t count, hpml_dtype x_dtype, int x_ndim,
                                          const int64_t *x_shape, hpml_dtype y_dtype, int64_t y_size)
{
    const size_t head = (sizeof(hpmli_samples) + 63) / 64 * 64; /* the arrays begin at multiples of 64 bytes */
    int64_t      sample_size = hpmli_shape_count(x_ndim, x_shape); /* elements */
    size_t       xs, ys;
    if (sample_size < 0 || count < 1 || !hpmli_mul((size_t)count, (size_t)sample_size, &xs) ||
        !hpmli_mul(xs, hpml_dtype_size(x_dtype), &xs) || !hpmli_mul(4, (size_t)y_size, &ys) ||
        !hpmli_mul((size_t)count, ys, &ys) || xs > SIZE_MAX / 4 || ys > SIZE_MAX / 8)
        return hpmli_null(ctx, HPML_ERR_OVERFLOW, "dataset: %lld samples do not fit in memory", (long long)count);
    xs = (xs + 63) / 64 * 64;
    hpmli_samples *s = (hpmli_samples *)hpmli_alloc(ctx, head + xs + ys);
    if (!s) return NULL;
    memset(s, 0, sizeof *s);
    hpml_dataset *d = &s->d;
    d->ctx     = ctx;
    d->owner   = s;
    d->x_scale = 1.0f / 255.0f;
    d->count   = count;
    d->x_dtype = x_dtype;
    d->x_ndim  = x_ndim;
    d->y_dtype = y_dtype;
    d->y_size  = y_size;
    for (int i = 0; i < HPML_MAX_DIMS; i++) d->x_shape[i] = i < x_ndim ? x_shape[i] : 1;
    d->x = s->x = (char *)s + head;
    if (ys > 0) d->y = s->y = (int32_t *)(void *)(s->x + xs);
    return s;
}

HPML_API hpml_dataset *hpml_dataset_create(hpml_ctx *ctx, int64_t count, hpml_dtype x_dtype, int x_ndim,
                                           const int64_t *x_shape, const void *x, hpml_dtype y_dtype, int64_t y_size,
                                           const void *y)
{
    if (hpmli_failed(ctx)) return NULL;
    if (!x || count < 1 || x_ndim < 0 || x_ndim >= HPML_MAX_DIMS || (x_ndim > 0 && !x_shape) ||
        hpmli_shape_count(x_ndim, x_shape) < 0 ||
        y_size < 0 || (x_dtype != HPML_DTYPE_U8 && x_dtype != HPML_DTYPE_F32 && x_dtype != HPML_DTYPE_I32) ||
        (y && y_dtype != HPML_DTYPE_I32 && y_dtype != HPML_DTYPE_F32))
        return hpmli_null(ctx, HPML_ERR_ARGUMENT, "dataset: needs data, a count and a shape of positive sizes, x u8, "
                          "f32 or i32, y i32 or f32; got %lld samples of %d dimensions", (long long)count, x_ndim);
    hpmli_samples *s = hpmli_samples_new(ctx, count, x_dtype, x_ndim, x_shape, y_dtype, y ? y_size : 0);
    if (s) memcpy(s->x, x, (size_t)(count * hpmli_shape_count(x_ndim, x_shape)) * hpml_dtype_size(x_dtype));
    if (s && s->y) memcpy(s->y, y, (size_t)(count * y_size) * 4);
    return hpmli_dataset_done(s);
}

HPMLI_FN const char *hpmli_sample_x(const hpml_dataset *d, int64_t i) /* returns the address of x of sample i */
{
    int64_t step = d->x_step ? d->x_step : hpmli_shape_count(d->x_ndim, d->x_shape);
    return (const char *)d->x + (size_t)(i * step) * hpml_dtype_size(d->x_dtype);
}

HPMLI_FN const char *hpmli_sample_y(const hpml_dataset *d, int64_t i) /* returns the address of y of sample i */
{
    return (const char *)d->y + (size_t)(i * (d->y_step ? d->y_step : d->y_size)) * 4;
}

HPML_API hpml_dataset *hpml_dataset_slice(hpml_dataset *d, int64_t first, int64_t count)
{
    hpml_dataset *s;
    if (!d || hpmli_failed(d->ctx)) return NULL;
    if (first < 0 || count < 1 || first > d->count - count)
        return hpmli_null(d->ctx, HPML_ERR_SHAPE, "dataset slice: %lld samples from %lld on of %lld",
                          (long long)count, (long long)first, (long long)d->count);
    s = (hpml_dataset *)hpmli_alloc(d->ctx, sizeof *s);
    if (!s) return NULL;
    *s = *d;
    s->owner = NULL;
    s->count = count;
    s->x     = hpmli_sample_x(d, first);
    if (d->y) s->y = hpmli_sample_y(d, first);
    return s;
}
#ifdef HPML_USE_ZLIB
/* Decompresses the `want` bytes after the header into f->bytes, whose memory grows with the data read, because a forged
   header could ask for any amount. False: an error, also for more or fewer bytes. */
HPMLI_FN bool hpmli_idx_unzip(hpmli_file *f, size_t want)
{
    int64_t capacity = 0;
    size_t  got = 0;
    char    extra;
    int     wrong;
    for (size_t n = 1; n > 0 && got < want; got += n) {
        if (!hpmli_grow(f->ctx, &f->bytes, (int64_t)got, &capacity, 1)) return false;
        n = (size_t)hpmli_min(capacity, (int64_t)want) - got;
        n = hpmli_file_next(f, (void *)(uintptr_t)(f->bytes + got), n);
    }
    bool more = hpmli_file_next(f, &extra, 1) == 1; /* past the end zlib checks the checksum, too */
    gzerror(f->gz, &wrong);
    if (wrong < 0) return hpmli_false(f->ctx, HPML_ERR_FORMAT, "\"%s\": damaged gzip file", f->path);
    return (got == want && !more) ||
           hpmli_false(f->ctx, HPML_ERR_FORMAT, "\"%s\": the header promises %zu bytes of data, the file has %s%zu",
                       f->path, want, more ? "more than " : "", got);
}
#endif
/* Opens an IDX file, MNIST's format, perhaps gzipped: bytes 0, 0, type, number of dimensions; sizes as big-endian u32;
   data. Reads the sizes and *want, the bytes of data; decompresses gzipped data into f->bytes. */
HPMLI_FN bool hpmli_idx_open(hpml_ctx *ctx, hpmli_file *f, const char *path, int dims, int64_t *sizes, size_t *want)
{
    unsigned char head[16];
    size_t        length = 4 + 4 * (size_t)dims;
    if (!hpmli_file_open(ctx, f, path)) return false;
    size_t got  = hpmli_file_next(f, head, length);
    bool   gzip = got >= 2 && head[0] == 0x1f && head[1] == 0x8b;
#ifdef HPML_USE_ZLIB
    if (gzip && !(f->gz = gzopen(path, "rb")))
        return hpmli_false(ctx, HPML_ERR_OPEN, "\"%s\": cannot open: %s", path, strerror(errno));
    if (gzip) got = hpmli_file_next(f, head, length);
#else
    if (gzip)
        return hpmli_false(ctx, HPML_ERR_UNSUPPORTED, "\"%s\" is gzipped: run gunzip on it, or build with "
                           "-DHPML_USE_ZLIB -lz", path);
#endif
    if (got < length || head[0] || head[1] || head[2] != 8 || head[3] != dims)
        return hpmli_false(ctx, HPML_ERR_FORMAT, "\"%s\": not an IDX file of bytes with %d dimensions: it should start "
                           "with 00 00 08 %02x", path, dims, (unsigned)dims);
    *want = 1;
    for (int i = 0; i < dims; i++) {
        const unsigned char *p = head + 4 + 4 * i;
        sizes[i] = (int64_t)((uint32_t)p[0] << 24 | (uint32_t)p[1] << 16 | (uint32_t)p[2] << 8 | p[3]);
        if (sizes[i] == 0 || !hpmli_mul(*want, (size_t)sizes[i], want))
            return hpmli_false(ctx, HPML_ERR_FORMAT, "\"%s\": dimension %d of %d is %lld, expected %s", path, i + 1,
                               dims, (long long)sizes[i], sizes[i] ? "no more than any file holds" : "1 or more");
    }
#ifdef HPML_USE_ZLIB
    if (gzip) return hpmli_idx_unzip(f, *want);
#endif
    return f->size - length == *want ||
           hpmli_false(ctx, HPML_ERR_FORMAT, "\"%s\": the header promises %zu bytes of data, the file has %zu", path,
                       *want, f->size - length);
}

HPMLI_FN bool hpmli_idx_read(hpmli_file *f, void *to, size_t want) /* copies the `want` data bytes of an IDX file */
{
    if (f->bytes) memcpy(to, f->bytes, want);
    return f->bytes || hpmli_file_read(f, to, want);
}

HPML_API hpml_dataset *hpml_dataset_load_idx(hpml_ctx *ctx, const char *images, const char *labels)
{
    hpmli_file     fx = HPMLI_ZEROED, fy = HPMLI_ZEROED;
    int64_t        shape[3] = { 0 }, images_count, count = 0; /* images, height, width; labels */
    size_t         xs, ys;
    hpmli_samples *s = NULL;
    if (hpmli_failed(ctx)) return NULL;
    if (hpmli_idx_open(ctx, &fx, images, 3, shape, &xs) && hpmli_idx_open(ctx, &fy, labels, 1, &count, &ys)) {
        images_count = shape[0];
        shape[0]     = 1; /* number of channels */
        if (images_count == count) s = hpmli_samples_new(ctx, count, HPML_DTYPE_U8, 3, shape, HPML_DTYPE_I32, 1);
        else hpmli_fail(ctx, HPML_ERR_FORMAT, "\"%s\" holds %lld images, \"%s\" %lld labels", images,
                        (long long)images_count, labels, (long long)count);
    }
    if (s && hpmli_idx_read(&fx, s->x, xs)) {
        unsigned char *bytes = (unsigned char *)(s->y + count) - count; /* in the last quarter of y, widened in place */
        hpmli_idx_read(&fy, bytes, ys);
        for (int64_t i = 0; i < count; i++) s->y[i] = bytes[i];
    }
    hpmli_file_close(&fx);
    hpmli_file_close(&fy);
    return hpmli_dataset_done(s);
}

/* CIFAR-10's binary format: records of a label byte and 3072 bytes of pixels, the planes R, G, B of 32 x 32. */
HPML_API hpml_dataset *hpml_dataset_load_cifar10(hpml_ctx *ctx, const char *const *paths, int count)
{
    const int64_t  shape[3] = { 3, 32, 32 };
    int64_t        records  = 0, at = 0;
    hpmli_samples *s = NULL;
    hpmli_file     f;
    unsigned char  label = 0;
    if (hpmli_failed(ctx)) return NULL;
    if (!paths || count < 1) return hpmli_null(ctx, HPML_ERR_ARGUMENT, "cifar10: no file names given");
    for (int i = 0; i < count && hpmli_file_open(ctx, &f, paths[i]); i++) {
        if (f.size % 3073 != 0)
            hpmli_fail(ctx, HPML_ERR_FORMAT, "\"%s\": %zu bytes, expected a multiple of 3073 (a label and 3 x 32 x 32 "
                       "pixels)", paths[i], f.size);
        records += (int64_t)(f.size / 3073);
        hpmli_file_close(&f);
    }
    if (ctx->status == HPML_OK) s = hpmli_samples_new(ctx, records, HPML_DTYPE_U8, 3, shape, HPML_DTYPE_I32, 1);
    for (int i = 0; s && i < count && ctx->status == HPML_OK && hpmli_file_open(ctx, &f, paths[i]); i++) {
        for (size_t r = 0; r < f.size / 3073 && at < records && ctx->status == HPML_OK; r++, at++) {
            if (hpmli_file_read(&f, &label, 1)) hpmli_file_read(&f, s->x + at * 3072, 3072);
            s->y[at] = label;
            if (label > 9)
                hpmli_fail(ctx, HPML_ERR_LABEL, "\"%s\": label of record %zu is %d, expected 0 to 9", paths[i], r,
                           label);
        }
        hpmli_file_close(&f);
    }
    if (ctx->status == HPML_OK && at < records)
        hpmli_fail(ctx, HPML_ERR_READ, "\"%s\": the files became shorter while they were read", paths[0]);
    if (s) s->d.classes = 10;
    return hpmli_dataset_done(s);
}

// ---------------------------------------------------------------------------------------------------------------------
// >>csv   numbers and text as data: CSV, characters
// ---------------------------------------------------------------------------------------------------------------------
typedef struct hpmli_csv {
    hpml_ctx   *ctx;
    const char *path, *p, *end;
    const char *names;            /* the header line; NULL: the file has none */
    int64_t     line, columns;    /* the current line, from 1; fields of a line */
    int64_t     label, capacity;  /* column of the label, -1: none; samples that fit in memory */
    char        separator;
} hpmli_csv;

/* Reads the next field into [*text, *stop), without blanks and quotes around it; true: the line has another field. */
HPMLI_FN bool hpmli_csv_field(hpmli_csv *c, const char **text, const char **stop)
{
    const char *p = c->p;
    while (p < c->end && (*p == ' ' || (*p == '\t' && c->separator != '\t'))) p++;
    bool quoted = p < c->end && *p == '"', open = quoted;
    *text = p;
    if (quoted) p++;
    for (; p < c->end && *p != '\n' && (open || *p != c->separator); p++)
        if (quoted && *p == '"') open = !open;
    bool another = p < c->end && *p == c->separator;
    c->p = p < c->end ? p + 1 : p;
    while (p > *text && (p[-1] == ' ' || p[-1] == '\r' || p[-1] == '\t')) p--;
    if (quoted && p - *text > 1 && p[-1] == '"') {
        ++*text;
        p--;
    }
    *stop = p;
    return another;
}

/* Counts the first line's columns, and decides whether the line is a header: a line with a number is not, because its
   data would be lost silently if it were skipped as a header. */
HPMLI_FN void hpmli_csv_first_line(hpmli_csv *c)
{
    static const char nonfinite[][4] = { "nan", "inf" }; /* here also numbers; as data, errors later */
    const char *start = c->p, *text, *stop;
    bool        more = true, numbers = false, words = false;
    double      v;
    for (; more; c->columns++) {
        more = hpmli_csv_field(c, &text, &stop);
        int64_t size = stop - text;
        bool    number = hpmli_parse_number(text, stop, &v) == stop && size > 0;
        for (int i = 0; i < 2 && size >= 3; i++)
            number = number || ((stop[-3] | 32) == nonfinite[i][0] && (stop[-2] | 32) == nonfinite[i][1] &&
                                (stop[-1] | 32) == nonfinite[i][2] && (size == 3 || (size == 4 && *text == '-')));
        numbers = numbers || number;
        words   = words || (size > 0 && !number);
    }
    if (words && !numbers) c->names = start;
    else { /* the line is data: read it again */
        c->p = start;
        c->line--;
    }
}

/* Fails with the file, line, column, the column's name in the header, and the text of the field [text, stop). */
HPMLI_FN void hpmli_csv_fail(const hpmli_csv *c, hpml_status status, int64_t column, const char *text, const char *stop,
                             const char *expected)
{
    hpmli_csv   head = *c;
    const char *name = "", *end = name;
    bool        more = c->names != NULL;
    head.p = c->names;
    for (int64_t i = 0; more && i <= column; i++) more = hpmli_csv_field(&head, &name, &end);
    hpmli_fail(c->ctx, status, "\"%s\" line %lld, column %lld%s%.*s%s: \"%.*s\" is not %s", c->path,
               (long long)c->line, (long long)column + 1, end > name ? " \"" : "", (int)hpmli_min(end - name, 64), name,
               end > name ? "\"" : "", (int)hpmli_min(stop - text, 64), text, expected);
}

HPMLI_FN void hpmli_csv_row(hpmli_csv *c, hpmli_samples *s) /* parses a line into sample s->d.count */
{
    const char *text, *stop;
    int64_t     column = 0, at = s ? s->d.count * (c->columns - (c->label >= 0)) : 0;
    bool        more = true, fits = s && s->d.count < c->capacity; /* no memory: the row has too few fields */
    bool        first = !c->names && (!s || s->d.count == 0); /* the user may have meant this line as a header */
    for (; more; column++) {
        double v = 0;
        more = hpmli_csv_field(c, &text, &stop);
        if (hpmli_parse_number(text, stop, &v) != stop || stop == text)
            hpmli_csv_fail(c, HPML_ERR_FORMAT, column, text, stop, first ? "a number; a header has none in any field"
                           : "a number");
        else if (fabs(v) >= HPMLI_F32_END)
            hpmli_csv_fail(c, HPML_ERR_FORMAT, column, text, stop, "within what f32 holds");
        else if (column == c->label && s && s->d.y_dtype == HPML_DTYPE_I32 &&
                 (v < 0 || v >= INT32_MAX || v != floor(v)))
            hpmli_csv_fail(c, HPML_ERR_LABEL, column, text, stop, "a whole number from 0, as labels are");
        if (c->ctx->status != HPML_OK) return;
        if (!fits || column >= c->columns) continue;
        if (column != c->label) ((float *)(void *)s->x)[at++] = (float)v;
        else if (s->d.y_dtype == HPML_DTYPE_F32) ((float *)(void *)s->y)[s->d.count] = (float)v;
        else s->y[s->d.count] = (int32_t)v;
    }
    if (column != c->columns || !fits)
        hpmli_fail(c->ctx, HPML_ERR_FORMAT, "\"%s\" line %lld: %lld fields, expected %lld as on the first line",
                   c->path, (long long)c->line, (long long)column, (long long)c->columns);
    else s->d.count++;
}

/* Allocates as many samples as the rest of the file can contain: each takes a line, and 2 bytes or more a field. given:
   the label's column, negative from the end. NULL without an error: the rest is too short for one sample. */
HPMLI_FN hpmli_samples *hpmli_csv_samples(hpmli_csv *c, int32_t given, hpml_dtype y_dtype)
{
    int64_t columns = c->columns, lines = 1;
    c->label = given < 0 ? columns + given : given;
    if (given == HPML_NO_LABEL) c->label = -1;
    else if (c->label < 0 || c->label >= columns || columns < 2)
        return hpmli_null(c->ctx, HPML_ERR_FORMAT, "\"%s\": %lld columns of numbers found, label column %lld", c->path,
                          (long long)columns, (long long)given);
    for (const char *p = c->p; p < c->end; p++) lines += *p == '\n';
    c->capacity = hpmli_min(lines, (c->end - c->p + 1) / (2 * columns));
    columns -= c->label >= 0;
    if (c->capacity == 0) return NULL;
    hpmli_samples *s = hpmli_samples_new(c->ctx, c->capacity, HPML_DTYPE_F32, 1, &columns, y_dtype, c->label >= 0);
    if (s) s->d.count = 0;
    return s;
}

HPML_API hpml_dataset *hpml_dataset_load_csv(hpml_ctx *ctx, const char *path, int32_t label_column, bool regression)
{
    hpmli_file     f;
    hpmli_csv      c = HPMLI_ZEROED;
    hpmli_samples *s = NULL;
    bool           begun = false;
    if (hpmli_failed(ctx) || !hpmli_file_whole(ctx, &f, path, false)) return NULL;
    c.ctx       = ctx;
    c.path      = path;
    c.p         = (const char *)f.bytes;
    c.end       = c.p + f.size;
    c.separator = ',';
    if (f.size >= 3 && memcmp(c.p, "\xEF\xBB\xBF", 3) == 0) c.p += 3; /* the byte order mark of spreadsheets */
    for (const char *p = c.p; p < c.end && *p != '\n'; p++) /* the separator: the first of , ; tab on the first line */
        if (*p == ',' || *p == ';' || *p == '\t') { c.separator = *p; break; }
    while (c.p < c.end && ctx->status == HPML_OK) {
        if (*c.p == '\n' || *c.p == '\r') { c.line += *c.p++ == '\n'; continue; }
        c.line++;
        if (c.columns == 0) { hpmli_csv_first_line(&c); continue; }
        if (!begun) s = hpmli_csv_samples(&c, label_column, regression ? HPML_DTYPE_F32 : HPML_DTYPE_I32);
        begun = true;
        if (ctx->status == HPML_OK) hpmli_csv_row(&c, s);
    }
    if (!begun && ctx->status == HPML_OK)
        hpmli_fail(ctx, HPML_ERR_FORMAT, "\"%s\": no line of numbers, separated by , ; or tabs", path);
    hpmli_file_close(&f);
    return hpmli_dataset_done(s);
}

HPML_API hpml_dataset *hpml_dataset_load_text(hpml_ctx *ctx, const char *const *paths, int count, int64_t context,
                                              bool bytes)
{
    hpmli_samples *s = NULL;
    hpmli_file     f;
    int32_t        token_of[256], *token;
    size_t         total = 0, at = 0;
    bool           used[256] = { false }; /* used[b]: byte b occurs */
    if (hpmli_failed(ctx)) return NULL;
    if (!paths || count < 1 || context < 1)
        return hpmli_null(ctx, HPML_ERR_ARGUMENT, "text: needs file names and a context, got %d and %lld", count,
                          (long long)context);
    for (int i = 0; i < count && hpmli_file_open(ctx, &f, paths[i]); i++) {
        total += f.size;
        hpmli_file_close(&f);
    }
    if (ctx->status == HPML_OK && (int64_t)total <= context)
        hpmli_fail(ctx, HPML_ERR_FORMAT, "text: %zu characters, expected more than the context of %lld", total,
                   (long long)context);
    if (ctx->status == HPML_OK) s = hpmli_samples_new(ctx, (int64_t)total, HPML_DTYPE_I32, 0, NULL, HPML_DTYPE_I32, 0);
    if (!s) return NULL;
    unsigned char *text = (unsigned char *)s->x + 3 * total; /* the last quarter of x: bytes widened to i32 in place */
    for (int i = 0; i < count && ctx->status == HPML_OK && hpmli_file_open(ctx, &f, paths[i]); i++) {
        if (f.size > total - at) f.size = total - at; /* the file grew meanwhile */
        if (hpmli_file_read(&f, text + at, f.size)) at += f.size;
        hpmli_file_close(&f);
    }
    if (ctx->status == HPML_OK && at < total)
        hpmli_fail(ctx, HPML_ERR_READ, "\"%s\": the files became shorter while they were read", paths[0]);
    for (size_t i = 0; i < at; i++) used[text[i]] = true;
    for (int c = 0; c < 256; c++) {
        token_of[c] = s->vocabulary_size;
        if (used[c] || bytes) s->vocabulary[s->vocabulary_size++] = (unsigned char)c;
    }
    token  = (int32_t *)(void *)s->x;
    s->d.y = token + 1;
    for (size_t i = 0; i < at; i++) token[i] = token_of[text[i]];
    s->d.count -= context;
    s->d.classes    = s->vocabulary_size;
    s->d.x_ndim     = 1;
    s->d.x_shape[0] = s->d.y_size = context;
    s->d.x_step     = s->d.y_step = 1; /* a sample begins at every character */
    return hpmli_dataset_done(s);
}

HPML_API const unsigned char *hpml_dataset_vocabulary(const hpml_dataset *d, int *size)
{
    const hpmli_samples *s = d ? (const hpmli_samples *)d->owner : NULL;
    if (size) *size = s ? s->vocabulary_size : 0;
    return s && s->vocabulary_size > 0 ? s->vocabulary : NULL;
}

// ---------------------------------------------------------------------------------------------------------------------
// >>npy   numpy arrays and packed records
// ---------------------------------------------------------------------------------------------------------------------
/* A .npy file: \x93NUMPY; bytes 1 0, 2 0 or 3 0, the version; the header's length, u16 in version 1, else u32; the
   header, a Python dict; the data. */
HPMLI_FN char *hpmli_npy_key(char *header, const char *key) /* returns the text after 'key': in a dict; "": none */
{
    char *p = strstr(header, key);
    return p ? p + strlen(key) + strspn(p + strlen(key), " :") : header + strlen(header);
}

/* Converts f8 values to f4, i8 values to i4, in place; an error if a value is out of the range of `dtype`. */
HPMLI_FN bool hpmli_npy_narrow(hpml_ctx *ctx, const char *path, hpml_dtype dtype, char *data, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        double  v;
        int64_t w = (int64_t)hpmli_read_little((const unsigned char *)data + 8 * i, 8);
        memcpy(&v, &w, 8);
        bool    f32 = dtype == HPML_DTYPE_F32;
        float   x = (float)v;
        int32_t n = (int32_t)w;
        if (f32 ? fabs(v) >= HPMLI_F32_END && v - v == 0 : n != w)
            return hpmli_false(ctx, HPML_ERR_FORMAT, "\"%s\": element %lld is %.10g, more than %s holds; make the "
                               "numbers smaller", path, (long long)i, f32 ? v : (double)w, hpml_dtype_name(dtype));
        memcpy(data + 4 * i, f32 ? (void *)&x : (void *)&n, 4);
    }
    return true;
}

/* Reads the header's text of a .npy file into `header`, zeroed memory of `capacity` bytes; returns the offset of the
   data in the file, or 0 if f is not a .npy file. */
HPMLI_FN size_t hpmli_npy_header(hpmli_file *f, char *header, size_t capacity)
{
    unsigned char start[12] = { 0 };
    bool   good  = hpmli_file_next(f, start, 10) == 10 && memcmp(start, "\x93NUMPY", 6) == 0;
    size_t field = start[6] == 1 ? 2 : 4; /* bytes of the header's length */
    good = good && start[6] >= 1 && start[6] <= 3 && hpmli_file_next(f, start + 10, field - 2) == field - 2;
    size_t length = (size_t)hpmli_read_little(start + 8, (int)field);
    good = good && length > 0 && length < capacity && hpmli_file_next(f, header, length) == length;
    return good ? 8 + field + length : 0;
}

HPML_API hpml_tensor *hpml_npy_load(hpml_ctx *ctx, const char *path)
{
    static const struct { const char *code; hpml_dtype dtype; size_t size; } kinds[] = {
        { "'<f4'", HPML_DTYPE_F32, 4 }, { "'<f2'", HPML_DTYPE_F16, 2 }, { "'<i4'", HPML_DTYPE_I32, 4 },
        { "'|u1'", HPML_DTYPE_U8, 1 }, { "'<f8'", HPML_DTYPE_F32, 8 }, { "'<i8'", HPML_DTYPE_I32, 8 } };
    hpmli_file   f;
    char         header[1024] = "", *data = NULL;
    size_t       known = sizeof kinds / sizeof kinds[0], kind = known;
    int64_t      shape[HPML_MAX_DIMS], count;
    int          ndim = 0;
    hpml_tensor *t = NULL;
    if (hpmli_failed(ctx) || !hpmli_file_open(ctx, &f, path)) return NULL;
    size_t front = hpmli_npy_header(&f, header, sizeof header);
    for (size_t i = 0; i < known; i++)
        if (strncmp(hpmli_npy_key(header, "'descr'"), kinds[i].code, 5) == 0) kind = i;
    hpmli_json j = { hpmli_npy_key(header, "'shape'"), header + strlen(header), false };
    ndim  = hpmli_json_numbers(&j, '(', ')', shape, HPML_MAX_DIMS, NULL);
    count = j.bad || ndim > HPML_MAX_DIMS ? -1 : hpmli_shape_count(ndim, shape);
    if (count < 0 || kind == known || strncmp(hpmli_npy_key(header, "'fortran_order'"), "False", 5) != 0 ||
        front == 0 || f.size - front != (size_t)count * kinds[kind].size)
        hpmli_fail(ctx, HPML_ERR_FORMAT, "\"%s\": expected a .npy file (version 1, 2 or 3) of <f4, <f2, <i4, |u1, <f8 "
                   "or <i8 in C order, at most %d dimensions, none 0, and data of just that size; the header says %.*s",
                   path, HPML_MAX_DIMS, (int)strcspn(header, "}\n") + 1, header);
    else t = hpml_tensor_create(ctx, kinds[kind].dtype, ndim, shape);
    if (t) data = (char *)hpmli_alloc(ctx, (size_t)count * kinds[kind].size);
    if (data && hpmli_file_read(&f, data, (size_t)count * kinds[kind].size) &&
        (kinds[kind].size < 8 || hpmli_npy_narrow(ctx, path, kinds[kind].dtype, data, count)))
        hpml_tensor_set_raw(t, data, hpmli_tensor_bytes(t));
    hpmli_free(ctx, data);
    hpmli_file_close(&f);
    if (t && ctx->status != HPML_OK) {
        hpml_tensor_free(t);
        return NULL;
    }
    return t;
}

HPML_API hpml_status hpml_npy_save(const hpml_tensor *t, const char *path)
{
    const char  *code = t ? hpmli_dtypes[t->dtype].numpy : NULL;
    char         header[256];
    int          n;
    hpmli_writer w;
    if (!t || hpmli_failed(t->ctx)) return t ? t->ctx->status : HPML_ERR_ARGUMENT;
    if (!code || !t->raw || !hpmli_contiguous(t))
        return hpmli_fail(t->ctx, HPML_ERR_UNSUPPORTED, "npy \"%s\": numpy has no bf16, and the tensor must be "
                          "contiguous with memory", path);
    hpmli_text_buffer text = hpmli_text_begin(header, sizeof header);
    hpmli_text_add(&text, "{'descr': '%s', 'fortran_order': False, 'shape': (", code);
    for (int i = 0; i < t->ndim; i++)
        hpmli_text_add(&text, "%lld,%s", (long long)t->shape[i], i < t->ndim - 1 ? " " : "");
    hpmli_text_add(&text, "), }");
    n = text.used;
    while ((n + 10) % 64 != 63) header[n++] = ' '; /* the data begin at a multiple of 64 bytes */
    header[n++] = '\n';
    void *host = hpmli_alloc(t->ctx, hpmli_tensor_bytes(t));
    if (!host || !hpmli_transferable(t, "save", host, hpml_tensor_count(t)) ||
        t->ctx->backend->read(t->ctx->device, host, t->raw, hpmli_tensor_bytes(t)) != HPML_OK ||
        !hpmli_writer_open(t->ctx, &w, path, false)) {
        hpmli_free(t->ctx, host);
        return t->ctx->status;
    }
    hpmli_write(&w, "\x93NUMPY\1\0", 8);
    hpmli_write_little(&w, (uint64_t)n, 2);
    hpmli_write(&w, header, (size_t)n);
    hpmli_write(&w, host, hpmli_tensor_bytes(t));
    hpmli_free(t->ctx, host);
    return hpmli_writer_close(&w, true);
}
struct hpml_records_writer {
    hpmli_writer w;
    uint64_t    *offsets; /* (count) where each record begins */
    int64_t      count, capacity;
};

HPMLI_FN void hpmli_records_writer_destroy(void *object) /* destructor: discards an unfinished file */
{
    hpml_records_writer *w = (hpml_records_writer *)object;
    if (w->w.f) hpmli_writer_close(&w->w, false);
    hpmli_free(w->w.ctx, w->offsets);
}

/* Writes the head of a record file; index: the offset in the file of the index, which follows the records. */
HPMLI_FN void hpmli_records_head(hpml_records_writer *w, uint64_t index)
{
    hpmli_write(&w->w, "HPMLREC1", 8);
    hpmli_write_little(&w->w, (uint64_t)w->count, 8);
    hpmli_write_little(&w->w, index, 8);
}

HPML_API hpml_records_writer *hpml_records_create(hpml_ctx *ctx, const char *path)
{
    if (hpmli_failed(ctx)) return NULL;
    hpml_records_writer *w = (hpml_records_writer *)hpmli_alloc_object(ctx, sizeof *w, hpmli_records_writer_destroy);
    if (!w || !hpmli_writer_open(ctx, &w->w, path, true)) {
        hpmli_free(ctx, w);
        return NULL;
    }
    hpmli_records_head(w, 0);
    return w;
}

HPML_API hpml_status hpml_records_add(hpml_records_writer *w, const void *bytes, size_t size)
{
    if (!w || hpmli_failed(w->w.ctx)) return w ? w->w.ctx->status : HPML_ERR_ARGUMENT;
    if (!hpmli_grow(w->w.ctx, &w->offsets, w->count, &w->capacity, sizeof *w->offsets)) return w->w.ctx->status;
    w->offsets[w->count++] = w->w.size;
    hpmli_write(&w->w, bytes, size);
    return HPML_OK;
}

HPML_API hpml_status hpml_records_finish(hpml_records_writer *w)
{
    if (!w) return HPML_ERR_ARGUMENT;
    hpml_ctx *ctx   = w->w.ctx;
    uint64_t  index = w->w.size;
    for (int64_t i = 0; i < w->count; i++) hpmli_write_little(&w->w, w->offsets[i], 8);
    hpmli_write_little(&w->w, index, 8);
    hpmli_write_start(&w->w);
    hpmli_records_head(w, index);
    hpml_status status = hpmli_writer_close(&w->w, ctx->status == HPML_OK);
    hpmli_free(ctx, w);
    return ctx->status != HPML_OK ? ctx->status : status;
}

HPML_API void hpml_records_abandon(hpml_records_writer *w) { if (w) hpmli_free(w->w.ctx, w); }
struct hpml_records_file {
    hpmli_file           file;
    int64_t              count;
    const unsigned char *index; /* (count + 1) offsets as little-endian u64: record i is [index[i], index[i + 1]) */
};

HPMLI_FN hpml_records_file *hpmli_records_open(hpml_ctx *ctx, const char *path, bool map)
{
    uint64_t count = 0, index = 0, last = 24;
    if (hpmli_failed(ctx)) return NULL;
    hpml_records_file *f = (hpml_records_file *)hpmli_alloc_object(ctx, sizeof *f, hpmli_file_destroy);
    if (!f || !hpmli_file_whole(ctx, &f->file, path, map)) {
        hpmli_free(ctx, f);
        return NULL;
    }
    const hpmli_file *in = &f->file;
    if (in->size >= 32) {
        count = hpmli_read_little(in->bytes + 8, 8);
        index = hpmli_read_little(in->bytes + 16, 8);
    }
    bool good = index >= 24 && index <= in->size && memcmp(in->bytes, "HPMLREC1", 8) == 0 && count < in->size / 8 &&
                in->size - index == (count + 1) * 8;
    for (uint64_t i = 0; good && i <= count; i++) {
        uint64_t at = hpmli_read_little(in->bytes + index + 8 * i, 8);
        good = at >= last && at <= index && (i < count || at == index);
        last = at;
    }
    if (!good) {
        hpmli_free(ctx, f);
        return hpmli_null(ctx, HPML_ERR_FORMAT, "\"%s\": not a record file, or damaged", path);
    }
    f->count = (int64_t)count;
    f->index = in->bytes + index;
    return f;
}

HPML_API hpml_records_file *hpml_records_open(hpml_ctx *ctx, const char *path)
{
    return hpmli_records_open(ctx, path, true);
}

HPML_API int64_t hpml_records_count(const hpml_records_file *f) { return f ? f->count : 0; }
HPML_API const void *hpml_records_get(const hpml_records_file *f, int64_t i, size_t *size)
{
    if (size) *size = 0;
    if (!f || i < 0 || i >= f->count) return NULL;
    uint64_t at = hpmli_read_little(f->index + 8 * i, 8);
    if (size) *size = (size_t)(hpmli_read_little(f->index + 8 * (i + 1), 8) - at);
    return f->file.bytes + at;
}

HPML_API void hpml_records_close(hpml_records_file *f) { if (f) hpmli_free(f->file.ctx, f); }
/* Record 0 describes the samples in ten i64: dtype of x, number of dimensions of x, five sizes of these (1 where x has
   fewer), dtype of y, size of y, number of classes. Each further record is x and y of a sample. */
HPML_API hpml_status hpml_dataset_save_records(const hpml_dataset *d, const char *path)
{
    int64_t head[10];
    if (!d || hpmli_failed(d->ctx)) return d ? d->ctx->status : HPML_ERR_ARGUMENT;
    size_t xs = (size_t)hpmli_shape_count(d->x_ndim, d->x_shape) * hpml_dtype_size(d->x_dtype);
    size_t ys = (size_t)d->y_size * 4;
    head[0] = d->x_dtype;
    head[1] = d->x_ndim;
    head[7] = d->y_dtype;
    head[8] = d->y_size;
    head[9] = d->classes;
    for (int i = 0; i < HPML_MAX_DIMS; i++) head[2 + i] = i < d->x_ndim ? d->x_shape[i] : 1;
    hpml_records_writer *w = hpml_records_create(d->ctx, path);
    if (!w) return d->ctx->status;
    hpml_records_add(w, head, sizeof head);
    for (int64_t i = 0; i < d->count; i++) {
        hpml_records_add(w, hpmli_sample_x(d, i), xs);
        if (ys) hpmli_write(&w->w, hpmli_sample_y(d, i), ys); /* adds to the record, which ends where the next begins */
    }
    return hpml_records_finish(w);
}

HPML_API hpml_dataset *hpml_dataset_load_records(hpml_ctx *ctx, const char *path)
{
    hpml_records_file *f = hpmli_records_open(ctx, path, false);
    hpmli_samples    *s = NULL;
    size_t            size = 0;
    const void       *first = hpml_records_get(f, 0, &size);
    int64_t           h[10] = { 0 }, count = hpml_records_count(f) - 1;
    bool              good = size == sizeof h;
    if (!f) return NULL;
    if (good) memcpy(h, first, sizeof h);
    good = good && (h[0] == HPML_DTYPE_U8 || h[0] == HPML_DTYPE_F32 || h[0] == HPML_DTYPE_I32) && h[1] >= 0 &&
           h[1] < HPML_MAX_DIMS && hpmli_shape_count((int)h[1], h + 2) > 0 && h[8] >= 0 && h[8] < INT32_MAX &&
           (h[7] == HPML_DTYPE_I32 || h[7] == HPML_DTYPE_F32) && h[9] >= 0 && h[9] <= INT32_MAX && count > 0;
    size_t xs = good ? (size_t)hpmli_shape_count((int)h[1], h + 2) * hpml_dtype_size((hpml_dtype)h[0]) : 0;
    size_t ys = good ? (size_t)h[8] * 4 : 0;
    for (int64_t i = 0; good && i < count; i++) { /* before memory is allocated: the header may be false */
        hpml_records_get(f, i + 1, &size);
        good = size == xs + ys;
    }
    if (good) s = hpmli_samples_new(ctx, count, (hpml_dtype)h[0], (int)h[1], h + 2, (hpml_dtype)h[7], h[8]);
    else hpmli_fail(ctx, HPML_ERR_FORMAT, "\"%s\": not a dataset in records: the first must describe the others", path);
    for (int64_t i = 0; s && i < count; i++) {
        const char *p = (const char *)hpml_records_get(f, i + 1, &size);
        memcpy(s->x + (size_t)i * xs, p, xs);
        if (ys) memcpy((char *)s->y + (size_t)i * ys, p + xs, ys);
    }
    if (s) s->d.classes = (int)h[9];
    hpml_records_close(f);
    return hpmli_dataset_done(s);
}

// ---------------------------------------------------------------------------------------------------------------------
// >>loader   batches: shuffled, sharded, augmented, made ahead
// ---------------------------------------------------------------------------------------------------------------------
/* Global batch g of an epoch, of G samples, has positions [g G, (g + 1) G) of the shuffled data, at any number of
   ranks; rank r takes the r-th shard of it. So the order of the samples depends only on seed and epoch, and all ranks
   make the same number of steps. A thread prepares the next batch while the current one is used. */
struct hpml_loader {
    hpml_ctx            *ctx;
    const hpmli_kernels *k;
    hpml_dataset        *data;
    hpml_loader_desc     d;
    int64_t              steps, crop;          /* batches of an epoch; side of the cropped image, 0: not cropped */
    int64_t              stored_size, size;    /* numbers of a sample in the data; in a batch */
    float               *image;                /* (stored_size) one sample before augmentation */
    float               *x[2];                 /* memory of two batches: batch n, counted over all epochs, in n % 2 */
    char                *y[2];
    hpml_batch           batch[2];
    int64_t              made, taken, done;    /* numbers of batches: next to prepare, next to return, in use */
    bool                 ended;                /* the next call returns false: the end of an epoch */
#ifndef HPML_NO_THREADS
    bool                 threaded, stop;
    pthread_t            thread;
    pthread_mutex_t      mutex;                /* guards made, done and stop while the thread runs */
    pthread_cond_t       changed;
#endif
};

/* Copies a sample with random crop, shift (dx, dy), flip and cutout: to[c][i][j] = from[c][i + dy][j' + dx], where j'
   is j or, if flipped, w - 1 - j, with w the width of the result; 0 outside the image and in the cutout. */
HPMLI_FN void hpmli_augment(const hpml_loader *l, float *to, const float *from, uint64_t epoch, int64_t sample)
{
    const hpml_augment *a     = &l->d.augment;
    const int64_t      *shape = l->data->x_shape;
    int64_t  dims = l->data->x_ndim, H = shape[dims - 2], W = shape[dims - 1], C = l->stored_size / (H * W);
    int64_t  dx, dy, cx, cy;
    int64_t  h = l->crop > 0 ? l->crop : H; /* height of the result */
    int64_t  w = l->crop > 0 ? l->crop : W; /* width of the result */
    uint32_t word[4];
    l->ctx->k->random(HPMLI_WORDS, word, l->d.seed, HPMLI_STREAM_AUGMENT | epoch, (uint64_t)(4 * sample), 4);
    dx   = (int64_t)word[0] % (W - w + 2 * (int64_t)a->shift + 1) - a->shift;
    dy   = (int64_t)word[1] % (H - h + 2 * (int64_t)a->shift + 1) - a->shift;
    if (l->crop > 0 && l->d.in_order) { /* an evaluation takes the middle */
        dx = (W - w) / 2;
        dy = (H - h) / 2;
    }
    bool flip = a->flip && (word[2] & 1);
    cx   = (int64_t)(word[2] >> 1) % w - a->cutout / 2;
    cy   = (int64_t)word[3] % h - a->cutout / 2;
    for (int64_t c = 0; c < C; c++)
        for (int64_t i = 0; i < h; i++)
            for (int64_t j = 0; j < w; j++) {
                int64_t si = i + dy, sj = (flip ? w - 1 - j : j) + dx;
                bool    out = si < 0 || si >= H || sj < 0 || sj >= W;
                bool    cut = i >= cy && i < cy + a->cutout && j >= cx && j < cx + a->cutout;
                to[(c * h + i) * w + j] = out || cut ? 0 : from[(c * H + si) * W + sj];
            }
}

/* Writes sample number `sample` of the data as sample `at` of the batch x, y: converted, scaled, augmented. */
HPMLI_FN void hpmli_load_sample(const hpml_loader *l, float *x, char *y, int64_t at, int64_t sample, uint64_t epoch)
{
    const hpml_dataset *d = l->data;
    const char *from    = hpmli_sample_x(d, sample);
    bool        augment = l->d.augment.shift > 0 || l->d.augment.flip || l->d.augment.cutout > 0 || l->crop > 0;
    float      *to      = x + at * l->size, *converted = augment ? l->image : to;
    hpml_dtype  dtype   = d->x_dtype == HPML_DTYPE_U8 ? HPML_DTYPE_F32 : d->x_dtype;
    hpmli_convert(l->k, dtype, converted, d->x_dtype, from, l->stored_size);
    if (d->x_dtype == HPML_DTYPE_U8) l->k->vscale_add(converted, converted, d->x_scale, d->x_shift, l->stored_size);
    if (augment) hpmli_augment(l, to, l->image, epoch, sample);
    if (d->y) memcpy(y + (size_t)(at * d->y_size) * 4, hpmli_sample_y(d, sample), (size_t)d->y_size * 4);
}

/* Returns the index, within a global batch of `size` samples, of the first sample of the shard of `rank`. */
HPMLI_FN int64_t hpmli_shard_begin(const hpml_loader_desc *d, int64_t size, int64_t rank)
{
    int64_t grains = d->grain > 0 ? (d->global_batch + d->grain - 1) / d->grain : 0;
    int64_t at     = d->grain > 0 ? grains * rank / d->ranks * d->grain : size * rank / d->ranks;
    return at < size ? at : size;
}

/* Hashes the settings that decide which samples make a batch, and the targets of 64 samples spread over the data. Ranks
   compare their hashes, which are equal for the same data and differ for two slices of the data. */
static uint64_t hpmli_loader_mark(const hpml_loader *l)
{
    const hpml_dataset *d    = l->data;
    const int64_t       settings[] = { d->count, l->d.global_batch, l->d.grain, l->d.ranks, (int64_t)l->d.seed,
                                       l->d.in_order, l->d.drop_last, l->d.samples_per_epoch };
    const int64_t       size = d->y ? d->y_size * 4 : 0;
    uint64_t            mark = hpmli_hash(HPMLI_HASH, settings, sizeof settings);
    for (int64_t i = 0; i < 64 && size > 0; i++) {
        int64_t sample = (d->count - 1) / 63 * i + (d->count - 1) % 63 * i / 63;
        mark = hpmli_hash(mark, hpmli_sample_y(d, sample), (size_t)(size < 4096 ? size : 4096));
    }
    return mark;
}

HPMLI_FN void hpmli_load_batch(hpml_loader *l) /* prepares batch l->made, in l->x[l->made % 2] */
{
    int     slot  = (int)(l->made % 2);
    int64_t epoch = l->made / l->steps, index = l->made % l->steps, start = index * l->d.global_batch;
    int64_t left  = l->d.samples_per_epoch - start, size = left < l->d.global_batch ? left : l->d.global_batch;
    int64_t first = hpmli_shard_begin(&l->d, size, l->d.rank), end = hpmli_shard_begin(&l->d, size, l->d.rank + 1);
    double  begin = hpml_now();
    for (int64_t i = first; i < end; i++) { /* an epoch longer than the data: a new shuffle each round */
        int64_t at = (start + i) % l->data->count, round = (start + i) / l->data->count;
        if (!l->d.in_order) at = hpml_permute_index(l->d.seed, (uint64_t)(epoch + (round << 32)), l->data->count, at);
        hpmli_load_sample(l, l->x[slot], l->y[slot], i - first, at, (uint64_t)epoch);
    }
    hpml_batch b = { l->x[slot], l->data->y ? l->y[slot] : NULL, end - first, size, first, index };
    l->batch[slot] = b;
    bool real = !__atomic_load_n(&l->ctx->clock, __ATOMIC_RELAXED); /* a virtual clock is not for this thread */
    if (real) hpml_trace_span(l->ctx, HPML_LANE_IO, "batch", begin, hpml_now());
}
#ifndef HPML_NO_THREADS
HPMLI_FN void *hpmli_loader_main(void *arg)
{
    hpml_loader *l = (hpml_loader *)arg;
    pthread_mutex_lock(&l->mutex);
    while (!l->stop) {
        if (l->made - l->done >= 2) { pthread_cond_wait(&l->changed, &l->mutex); continue; }
        pthread_mutex_unlock(&l->mutex);
        hpmli_load_batch(l);
        pthread_mutex_lock(&l->mutex);
        l->made++;
        pthread_cond_broadcast(&l->changed);
    }
    pthread_mutex_unlock(&l->mutex);
    return NULL;
}

HPMLI_FN void hpmli_loader_stop(hpml_loader *l)
{
    if (l->threaded && !hpmli_forked(l->ctx)) {
        pthread_mutex_lock(&l->mutex);
        l->stop = true;
        pthread_cond_broadcast(&l->changed);
        pthread_mutex_unlock(&l->mutex);
        pthread_join(l->thread, NULL);
        pthread_mutex_destroy(&l->mutex);
        pthread_cond_destroy(&l->changed);
    }
    l->threaded = l->stop = false;
}

/* Waits for the next batch of the background thread, which the first call starts. False: there is no such thread. */
HPMLI_FN bool hpmli_loader_wait(hpml_loader *l)
{
    if (!l->d.no_prefetch && hpmli_forked(l->ctx)) { /* a forked child has no thread and starts none */
        hpmli_loader_stop(l);
        l->d.no_prefetch = true;
        l->made          = l->taken; /* again: the parent's thread may have left a batch half prepared */
    }
    if (!l->d.no_prefetch && !l->threaded) {
        pthread_mutex_init(&l->mutex, NULL);
        pthread_cond_init(&l->changed, NULL);
        l->threaded      = pthread_create(&l->thread, NULL, hpmli_loader_main, l) == 0;
        l->d.no_prefetch = !l->threaded;
    }
    if (l->d.no_prefetch) return false;
    pthread_mutex_lock(&l->mutex);
    l->done = l->taken;
    pthread_cond_broadcast(&l->changed);
    while (l->made == l->taken) pthread_cond_wait(&l->changed, &l->mutex);
    pthread_mutex_unlock(&l->mutex);
    return true;
}
#else
HPMLI_FN void hpmli_loader_stop(hpml_loader *l) { (void)l; }
HPMLI_FN bool hpmli_loader_wait(hpml_loader *l) { return (void)l, false; }
#endif
HPMLI_FN void hpmli_loader_destroy(void *object)
{
    hpml_loader *l = (hpml_loader *)object;
    hpmli_loader_stop(l);
    for (int i = 0; i < 2; i++) {
        hpmli_free(l->ctx, l->x[i]);
        hpmli_free(l->ctx, l->y[i]);
    }
    hpmli_free(l->ctx, l->image);
}

HPMLI_FN bool hpmli_loader_check(hpml_ctx *ctx, const hpml_dataset *data, hpml_loader_desc *d)
{
    bool augment = d->augment.shift != 0 || d->augment.flip || d->augment.cutout != 0 || data->x_crop != 0;
    const int64_t *side = data->x_shape + (data->x_ndim < 2 ? 0 : data->x_ndim - 2); /* height, width */
    if (d->ranks == 0) d->ranks = 1;
    if (d->global_batch == 0) d->global_batch = (int64_t)d->batch * d->ranks;
    if (d->seed == 0) d->seed = ctx->seed;
    if (d->batch < 1 || d->ranks < 1 || d->rank < 0 || d->rank > d->ranks || d->samples_per_epoch < 0 ||
        d->augment.shift < 0 || d->augment.cutout < 0)
        return hpmli_false(ctx, HPML_ERR_ARGUMENT, "loader: batch %d, rank %d of %d, %lld samples per epoch: out of "
                           "range", d->batch, d->rank, d->ranks, (long long)d->samples_per_epoch);
    int64_t grain = d->grain > 0 ? d->grain : 1;
    int64_t most  = ((d->global_batch + grain - 1) / grain + d->ranks - 1) / d->ranks * grain;
    if (d->global_batch < 1 || d->grain < 0 || most > d->batch)
        return hpmli_false(ctx, HPML_ERR_ARGUMENT, "loader: a global batch of %lld in grains of %lld gives a rank of "
                           "%d up to %lld samples, its batch holds %d", (long long)d->global_batch, (long long)d->grain,
                           d->ranks, (long long)most, d->batch);
    if (augment && (data->x_ndim < 2 || data->x_dtype == HPML_DTYPE_I32))
        return hpmli_false(ctx, HPML_ERR_SHAPE, "loader: augmentation needs images (.., H, W), the samples have %d "
                           "dimensions", data->x_ndim);
    if (data->x_crop < 0 || (data->x_crop > 0 && (data->x_crop > side[0] || data->x_crop > side[1])))
        return hpmli_false(ctx, HPML_ERR_SHAPE, "loader: x_crop %d of images of %lldx%lld, expected 0 or at most the "
                           "shorter side", data->x_crop, (long long)side[0], (long long)side[1]);
    if (d->samples_per_epoch == 0) d->samples_per_epoch = data->count;
    return !d->drop_last || d->samples_per_epoch >= d->global_batch ||
           hpmli_false(ctx, HPML_ERR_ARGUMENT, "loader: %lld samples do not fill one batch of %lld and drop_last is "
                       "set", (long long)d->samples_per_epoch, (long long)d->global_batch);
}

HPML_API hpml_loader *hpml_loader_create(hpml_ctx *ctx, hpml_dataset *data, const hpml_loader_desc *desc)
{
    hpml_loader_desc d;
    if (hpmli_failed(ctx) || !data) return NULL;
    if (!HPMLI_COPY_DESC(ctx, "loader", d, desc) || !hpmli_loader_check(ctx, data, &d)) return NULL;
    hpml_loader *l = (hpml_loader *)hpmli_alloc_object(ctx, sizeof *l, hpmli_loader_destroy);
    if (!l) return NULL;
    l->ctx  = ctx;
    l->k    = ctx->k;
    l->data = data;
    l->d    = d;
    l->crop = data->x_crop;
    l->size = hpmli_sample_floats(data);
    l->stored_size = hpmli_shape_count(data->x_ndim, data->x_shape);
    l->steps = (d.samples_per_epoch + (d.drop_last ? 0 : d.global_batch - 1)) / d.global_batch;
    l->image = hpmli_new(ctx, float, l->stored_size);
    for (int i = 0; i < 2 && ctx->status == HPML_OK; i++) {
        l->x[i] = (float *)hpmli_alloc_array(ctx, l->size, (size_t)d.batch * sizeof(float));
        l->y[i] = (char *)hpmli_alloc_array(ctx, data->y_size + 1, (size_t)d.batch * 4);
    }
    if (ctx->status == HPML_OK) return l;
    hpml_loader_free(l);
    return NULL;
}

HPML_API int64_t hpml_loader_steps(const hpml_loader *l) { return l ? l->steps : 0; }

HPML_API hpml_status hpml_loader_seek(hpml_loader *l, int64_t epoch, int64_t index)
{
    if (!l) return HPML_ERR_ARGUMENT;
    if (epoch < 0 || epoch > INT64_MAX / l->steps - 2 || index < 0 || index > l->steps)
        return hpmli_fail(l->ctx, HPML_ERR_ARGUMENT, "loader: epoch %lld, batch %lld of %lld", (long long)epoch,
                          (long long)index, (long long)l->steps);
    int64_t to = epoch * l->steps + index;
    if (to != l->taken) {
        hpmli_loader_stop(l);
        l->made = l->taken = l->done = to;
    }
    l->ended = index == l->steps;
    return HPML_OK;
}

HPML_API bool hpml_loader_next(hpml_loader *l, hpml_batch *out)
{
    if (!l || l->ctx->status != HPML_OK) return false;
    if (l->ended) return l->ended = false;
    if (!hpmli_loader_wait(l)) {
        hpmli_load_batch(l);
        l->made++;
    }
    *out = l->batch[l->taken++ % 2];
    l->ended = l->taken % l->steps == 0;
    return true;
}

HPML_API void hpml_loader_free(hpml_loader *l) { if (l) hpmli_free(l->ctx, l); }

// ---------------------------------------------------------------------------------------------------------------------
// >>safetensors   safetensors files
// ---------------------------------------------------------------------------------------------------------------------
/* A safetensors file: length of the header as u64; the header in JSON; the data. An entry of the header is "name":
   {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, with offsets in bytes from the end of the header. The
   entries must cover the data without holes or overlaps. */
#define HPMLI_SAFE_HEADER 100000000 /* bytes of a header at most, the format's own limit */
#define HPMLI_SAFE_META   "__metadata__"
struct hpml_safetensors {
    hpmli_file       file;
    char            *text;                 /* writable copy of the header of a mapped file; names point into it */
    hpml_safetensor *entries;              /* (count) sorted by name */
    hpml_meta       *meta;                 /* (meta_count) sorted by key */
    int              count, meta_count;
};

HPML_API void hpml_safetensors_close(hpml_safetensors *f)
{
    if (!f) return;
    hpml_ctx *ctx = f->file.ctx;
    hpmli_free(ctx, f->text);
    hpmli_free(ctx, f->entries);
    hpmli_free(ctx, f->meta);
    hpmli_free(ctx, f);
}

/* For qsort: compares two entries or hpml_metas, whose first member is a name; equal names by place in the header. */
HPMLI_FN int hpmli_name_order(const void *a, const void *b)
{
    const char *x = *(const char *const *)a, *y = *(const char *const *)b;
    int         order = strcmp(x, y);
    if (order != 0 || x == y) return order;
    return x < y ? -1 : 1;
}

HPMLI_FN int hpmli_name_find(const void *name, const void *b)
{
    return strcmp((const char *)name, *(const char *const *)b);
}

/* Sorts structs of `size` bytes by name and keeps the last one of each name; returns the number of those kept. Sets
   *twice to a name that occurs more than once, if there is one. */
HPMLI_FN int hpmli_name_sort(void *named, int count, size_t size, const char **twice)
{
    char *p = (char *)named, *to = p;
    if (count > 0) qsort(named, (size_t)count, size, hpmli_name_order);
    for (int i = 0; i < count; i++, p += size) {
        const char *name = *(const char *const *)(const void *)p;
        if (i + 1 < count && hpmli_name_find(name, p + size) == 0) {
            *twice = name;
            continue;
        }
        memmove(to, p, size);
        to += size;
    }
    return (int)((size_t)(to - (char *)named) / size);
}

/* Parses the object of metadata, pairs of strings, into f->meta; false: a syntax error, or no memory. */
HPMLI_FN bool hpmli_safe_meta(hpml_safetensors *f, hpmli_json *j)
{
    int64_t     capacity = hpmli_json_length(*j);
    const char *twice;
    if (hpmli_json_word(j, "null")) return true;
    f->meta = hpmli_new(f->file.ctx, hpml_meta, capacity);
    if (!f->meta) return false;
    for (int n = 0; hpmli_json_next(j, n, '{', '}') && n < capacity; n++) {
        f->meta[f->meta_count].key = hpmli_json_text(j);
        hpmli_json_want(j, ':');
        f->meta[f->meta_count++].value = hpmli_json_text(j);
    }
    f->meta_count = hpmli_name_sort(f->meta, f->meta_count, sizeof *f->meta, &twice);
    return !j->bad;
}

/* The types of the safetensors format and their bits; those that hpml_dtype has, too, come first, in its order. */
static const struct { const char *name; unsigned bits; } hpmli_safe_types[] = {
    { "F32", 32 }, { "BF16", 16 }, { "F16", 16 }, { "I32", 32 }, { "U8", 8 }, { "BOOL", 8 }, { "I8", 8 }, { "I16", 16 },
    { "U16", 16 }, { "U32", 32 }, { "I64", 64 }, { "U64", 64 }, { "F64", 64 }, { "C64", 64 }, { "F4", 4 },
    { "F6_E2M3", 6 }, { "F6_E3M2", 6 }, { "F8_E5M2", 8 }, { "F8_E4M3", 8 }, { "F8_E8M0", 8 }, { "F8_E4M3FNUZ", 8 },
    { "F8_E5M2FNUZ", 8 } };
#define HPMLI_SAFE_TYPES ((int)(sizeof hpmli_safe_types / sizeof hpmli_safe_types[0]))
/* Values of ndim that mark an entry: FOREIGN, valid but nothing hpml can load, is skipped; WRONG makes the file
   invalid, unless a later entry of the same name replaces it. */
enum { HPMLI_SAFE_FOREIGN = -1, HPMLI_SAFE_WRONG = -2 };
/* Parses a tensor's entry in the header of a safetensors file: an object or, because the format's reference
   implementation accepts it, a list of dtype, shape and data_offsets. size: bytes of all tensors' data in the file. */
HPMLI_FN bool hpmli_safe_entry(hpml_safetensors *f, hpmli_json *j, const char *name, size_t size)
{
    static const char *const keys[] = { "dtype", "shape", "data_offsets" };
    hpml_safetensor *e;
    int64_t          at[2]   = { 1, 0 };
    uint64_t         numbers = 1;
    int              seen[4] = { 0 }, ndim = 0, offsets = 0, type = HPMLI_SAFE_TYPES, n = 0;
    hpmli_json       ahead   = *j;
    bool             list    = hpmli_json_is(&ahead, '[');
    e = &f->entries[f->count++];
    e->name = name;
    for (; hpmli_json_next(j, n, list ? '[' : '{', list ? ']' : '}'); n++) {
        int key = n;
        if (!list) {
            const char *text = hpmli_json_text(j);
            hpmli_json_want(j, ':');
            for (key = 0; key < 3 && strcmp(text, keys[key]) != 0; key++) {}
        }
        if (key > 3 || (key < 3 && seen[key]++)) j->bad = true;
        if (key == 0) {
            const char *text = hpmli_json_text(j);
            for (type = 0; type < HPMLI_SAFE_TYPES && strcmp(text, hpmli_safe_types[type].name) != 0; type++) {}
        } else if (key == 1) ndim = hpmli_json_numbers(j, '[', ']', e->shape, HPML_MAX_DIMS, &numbers);
        else if (key == 2) offsets = hpmli_json_numbers(j, '[', ']', at, 2, NULL);
        else hpmli_json_skip(j, 125); /* in all 128 brackets deep, as in the reference reader */
    }
    if (j->bad || !seen[0] || !seen[1] || offsets != 2 || type == HPMLI_SAFE_TYPES || (list && n != 3)) return false;
    for (int i = ndim; i < HPML_MAX_DIMS; i++) e->shape[i] = 1;
    e->dtype = (hpml_dtype)(type < HPMLI_DTYPES ? type : 0);
    e->ndim  = ndim;
    uint64_t bits = hpmli_safe_types[type].bits;
    bool fits = at[0] <= at[1] && (uint64_t)at[1] <= size;
    e->bytes = fits ? (size_t)(at[1] - at[0]) : 0;
    e->data  = f->file.bytes + (f->file.size - size) + (fits ? at[0] : 0);
    if (numbers == 0 || type >= HPMLI_DTYPES || ndim > HPML_MAX_DIMS) e->ndim = HPMLI_SAFE_FOREIGN;
    if (!fits || numbers > UINT64_MAX / bits || numbers * bits % 8 != 0 || numbers * bits / 8 != e->bytes)
        e->ndim = HPMLI_SAFE_WRONG;
    return true;
}

HPMLI_FN int hpmli_safe_order(const void *a, const void *b) /* for qsort: by offset of the data, then size */
{
    const hpml_safetensor *x = (const hpml_safetensor *)a, *y = (const hpml_safetensor *)b;
    if (x->data == y->data) return x->bytes < y->bytes ? -1 : x->bytes > y->bytes;
    return (const char *)x->data < (const char *)y->data ? -1 : 1;
}

HPMLI_FN bool hpmli_safe_parse(hpml_safetensors *f)
{
    uint64_t    length = f->file.size >= 8 ? hpmli_read_little(f->file.bytes, 8) : 0;
    bool        meta = false;
    int         kept = 0;
    const char *twice;
    hpmli_json  j;
    if (length < 2 || length > HPMLI_SAFE_HEADER || length > f->file.size - 8) return false;
    size_t data_bytes = f->file.size - 8 - (size_t)length;
    j.p = (char *)(uintptr_t)(f->file.bytes + 8);
    if (f->file.mapped) {
        f->text = (char *)hpmli_alloc(f->file.ctx, (size_t)length);
        if (!f->text) return false;
        j.p = (char *)memcpy(f->text, j.p, (size_t)length);
    }
    j.end = j.p + length;
    j.bad = !hpmli_utf8_all(j.p, (size_t)length);
    int64_t capacity = hpmli_json_length(j);
    if (j.bad || capacity > (int64_t)length / 24 + 1) return false; /* an entry takes more than 24 bytes of text */
    f->entries = hpmli_new(f->file.ctx, hpml_safetensor, capacity);
    if (!f->entries) return false;
    for (int n = 0; hpmli_json_next(&j, n, '{', '}') && n < capacity; n++) {
        const char *name = hpmli_json_text(&j);
        bool        is_meta = strcmp(name, HPMLI_SAFE_META) == 0;
        hpmli_json_want(&j, ':');
        if (j.bad || (is_meta && meta)) return false;
        if (!(is_meta ? hpmli_safe_meta(f, &j) : hpmli_safe_entry(f, &j, name, data_bytes))) return false;
        meta = meta || is_meta;
    }
    hpmli_json_is(&j, ' '); /* skips blanks */
    if (j.bad || j.p != j.end) return false;
    f->count = hpmli_name_sort(f->entries, f->count, sizeof *f->entries, &twice);
    if (f->count > 0) qsort(f->entries, (size_t)f->count, sizeof *f->entries, hpmli_safe_order);
    const unsigned char *next = f->file.bytes + 8 + length;
    for (int i = 0; i < f->count; i++) { /* data without holes or overlaps */
        if (f->entries[i].ndim == HPMLI_SAFE_WRONG || (const unsigned char *)f->entries[i].data != next) return false;
        next += f->entries[i].bytes;
        if (f->entries[i].ndim >= 0) f->entries[kept++] = f->entries[i];
    }
    f->count = hpmli_name_sort(f->entries, kept, sizeof *f->entries, &twice);
    return next == f->file.bytes + f->file.size;
}

HPMLI_FN hpml_safetensors *hpmli_safe_open(hpml_ctx *ctx, const char *path, bool map)
{
    if (hpmli_failed(ctx)) return NULL;
    hpml_safetensors *f = (hpml_safetensors *)hpmli_alloc_object(ctx, sizeof *f, hpmli_file_destroy);
    if (f && hpmli_file_whole(ctx, &f->file, path, map) && hpmli_safe_parse(f)) return f;
    if (ctx->status == HPML_OK)
        hpmli_fail(ctx, HPML_ERR_FORMAT, "\"%s\": not a whole safetensors file", path);
    hpml_safetensors_close(f);
    return NULL;
}

HPML_API hpml_safetensors *hpml_safetensors_open(hpml_ctx *ctx, const char *path)
{
    return hpmli_safe_open(ctx, path, true);
}

HPML_API int hpml_safetensors_count(const hpml_safetensors *f) { return f ? f->count : 0; }
HPML_API bool hpml_safetensors_at(const hpml_safetensors *f, int index, hpml_safetensor *out)
{
    if (!f || index < 0 || index >= f->count) return false;
    *out = f->entries[index];
    return true;
}

HPML_API bool hpml_safetensors_find(const hpml_safetensors *f, const char *name, hpml_safetensor *out)
{
    hpml_safetensor *e = NULL;
    if (f && f->count > 0 && name)
        e = (hpml_safetensor *)bsearch(name, f->entries, (size_t)f->count, sizeof *e, hpmli_name_find);
    if (e) *out = *e;
    return e != NULL;
}

HPML_API const char *hpml_safetensors_meta(const hpml_safetensors *f, const char *key)
{
    const hpml_meta *m = NULL;
    if (f && key && f->meta_count > 0)
        m = (const hpml_meta *)bsearch(key, f->meta, (size_t)f->meta_count, sizeof *m, hpmli_name_find);
    return m ? m->value : NULL;
}

/* Appends s as the inside of a JSON string; bytes that are not UTF-8 become U+FFFD. */
HPMLI_FN void hpmli_write_escaped(hpmli_writer *w, const char *s)
{
    char code[8];
    for (size_t n, left = strlen(s); left > 0; s += n, left -= n) {
        n = hpmli_utf8(s, left);
        bool plain = n > 0 && *s != '"' && *s != '\\' && (unsigned char)*s >= 32;
        if (plain) hpmli_write(w, s, n);
        else hpmli_write(w, code, (size_t)snprintf(code, sizeof code, "\\u%04x", n > 0 ? (unsigned)*s : 0xfffdu));
        if (n == 0) n = 1;
    }
}

/* Appends the text `before`, then the string s, quoted and escaped for JSON. */
HPMLI_FN void hpmli_write_json(hpmli_writer *w, const char *before, const char *s)
{
    hpmli_write(w, before, strlen(before));
    hpmli_write(w, "\"", 1);
    hpmli_write_escaped(w, s);
    hpmli_write(w, "\"", 1);
}

/* Appends the text `before`, then the header's entry of the tensor t, whose data begin at offset `at`. */
HPMLI_FN void hpmli_write_entry(hpmli_writer *w, const char *before, const hpml_safetensor *t, uint64_t at)
{
    char        text[256];
    hpmli_text_buffer line = hpmli_text_begin(text, sizeof text);
    hpmli_text_add(&line, ":{\"dtype\":\"%s\",\"shape\":[", hpmli_dtypes[t->dtype].safe);
    for (int i = 0; i < t->ndim; i++) hpmli_text_add(&line, "%s%lld", i ? "," : "", (long long)t->shape[i]);
    hpmli_text_add(&line, "],\"data_offsets\":[%llu,%llu]}", (unsigned long long)at,
                    (unsigned long long)(at + t->bytes));
    hpmli_write_json(w, before, t->name);
    hpmli_write(w, text, (size_t)line.used);
}

typedef struct hpmli_safe_content { /* what is to be written to a safetensors file */
    const hpml_safetensor *t;    /* (count) the tensors */
    const hpml_meta       *meta; /* (meta_count) pairs of key and value */
    int                    count, meta_count;
    uint32_t              *sums; /* (count) CRC-32C of each tensor's data; NULL: without checksums */
    void (*read)(void *user, int i, float *host); /* reads tensor i as f32, an error on the context; NULL: t has data */
    void                  *user;
} hpmli_safe_content;

/* Fails, with an error about a `kind`, unless the names that begin `count` structs are UTF-8, distinct, unreserved. */
HPMLI_FN bool hpmli_names_check(hpml_ctx *ctx, const char *kind, const void *named, int count, size_t size)
{
    const char *wrong = NULL, *why = "the name is used twice", *name;
    char       *sorted = (char *)hpmli_alloc_array(ctx, count, size);
    if (!sorted) return false;
    if (count > 0) memcpy(sorted, named, (size_t)count * size);
    hpmli_name_sort(sorted, count, size, &wrong);
    for (int i = 0; i < count && !wrong; i++) {
        name = *(const char *const *)(const void *)((const char *)named + (size_t)i * size);
        bool utf8 = hpmli_utf8_all(name, strlen(name)), reserved = strcmp(name, HPMLI_SAFE_META) == 0;
        if (!utf8) why = "it is not UTF-8";
        if (reserved) why = "the format reserves that name";
        if (!utf8 || reserved) wrong = name;
    }
    if (wrong)
        hpmli_fail(ctx, HPML_ERR_ARGUMENT, "safetensors: %s cannot be called \"%s\": %s; give it another name", kind,
                   wrong, why);
    hpmli_free(ctx, sorted);
    return !wrong;
}

HPMLI_FN bool hpmli_safe_check(hpml_ctx *ctx, const hpmli_safe_content *c)
{
    const hpml_safetensor *t = c->t;
    for (int i = 0; i < c->meta_count; i++) {
        if (!c->meta[i].key || !c->meta[i].value)
            return hpmli_false(ctx, HPML_ERR_ARGUMENT, "safetensors: metadata %d needs a key and a value", i);
        if (!hpmli_utf8_all(c->meta[i].value, strlen(c->meta[i].value)))
            return hpmli_false(ctx, HPML_ERR_ARGUMENT, "safetensors: the value of metadata \"%s\" is not UTF-8",
                               c->meta[i].key);
    }
    for (int i = 0; i < c->count; i++) {
        int64_t n = t[i].ndim < 0 || t[i].ndim > HPML_MAX_DIMS ? -1 : hpmli_shape_count(t[i].ndim, t[i].shape);
        if (!t[i].name || !(t[i].data || c->read) || n < 0 || t[i].bytes == 0 ||
            (size_t)n * hpml_dtype_size(t[i].dtype) != t[i].bytes)
            return hpmli_false(ctx, HPML_ERR_ARGUMENT, "safetensors: tensor %d needs a name, data and the bytes of its "
                               "shape, not %zu", i, t[i].bytes);
    }
    return hpmli_names_check(ctx, "a tensor", t, c->count, sizeof *t) &&
           hpmli_names_check(ctx, "metadata", c->meta, c->meta_count, sizeof *c->meta);
}
#define HPMLI_ARRAY_NAME (HPMLI_NAME + 32) /* bytes for "opt.<state>." and the name of a parameter */
#define HPMLI_SUM "hpml.crc32c." /* metadata: checksum of the tensor whose name follows, in hexadecimal */
/* Appends what comes before the data in a safetensors file: length field and header. Its size depends neither on the
   value of `length`, the length field, nor on the checksums, so that both can be filled in later. */
HPMLI_FN void hpmli_write_head(hpmli_writer *w, const hpmli_safe_content *c, uint64_t length)
{
    const char *before = "\"" HPMLI_SAFE_META "\":{";
    uint64_t    at = 0, start = w->size;
    char        sum[9];
    hpmli_write_little(w, length, 8);
    hpmli_write(w, "{", 1);
    for (int i = 0; i < c->meta_count; i++, before = ",") {
        hpmli_write_json(w, before, c->meta[i].key);
        hpmli_write_json(w, ":", c->meta[i].value);
    }
    for (int i = 0; i < c->count && c->sums; i++, before = ",") {
        char key[sizeof HPMLI_SUM + HPMLI_ARRAY_NAME];
        snprintf(key, sizeof key, HPMLI_SUM "%s", c->t[i].name);
        snprintf(sum, sizeof sum, "%08x", (unsigned)c->sums[i]);
        hpmli_write_json(w, before, key);
        hpmli_write_json(w, ":", sum);
    }
    bool meta = before[0] == ',';
    if (meta) hpmli_write(w, "}", 1);
    for (int i = 0; i < c->count; at += c->t[i++].bytes)
        hpmli_write_entry(w, i > 0 || meta ? "," : "", &c->t[i], at);
    hpmli_write(w, "}", 1);
    while ((w->size - start) % 8 != 0) hpmli_write(w, " ", 1);
}

/* Writes a safetensors file. host NULL: each tensor's data are in host memory, in the dtype of the file; else they are
   read by c->read and converted in `host`, memory for the largest tensor. The file's header is written first with zeros
   for its length and the checksums, and again at the end, when length and checksums are known. */
HPMLI_FN hpml_status hpmli_safe_save(hpml_ctx *ctx, const char *path, const hpmli_safe_content *c, float *host)
{
    hpmli_writer w;
    if (!hpmli_safe_check(ctx, c) || !hpmli_writer_open(ctx, &w, path, true)) return ctx->status;
    hpmli_write_head(&w, c, 0);
    uint64_t length = w.size - 8;
    if (length > HPMLI_SAFE_HEADER)
        hpmli_fail(ctx, HPML_ERR_UNSUPPORTED, "\"%s\": names, shapes and metadata take %llu bytes, the format allows "
                   "%d", path, (unsigned long long)length, HPMLI_SAFE_HEADER);
    for (int i = 0; i < c->count && ctx->status == HPML_OK; i++) {
        const hpml_safetensor *t = &c->t[i];
        size_t                 n = t->bytes / hpml_dtype_size(t->dtype);
        if (host) c->read(c->user, i, host);
        if (host) hpmli_convert(ctx->k, t->dtype, host, HPML_DTYPE_F32, host, (int64_t)n); /* in place */
        if (c->sums) c->sums[i] = ctx->k->crc32c(0, host ? host : t->data, t->bytes);
        hpmli_write_data(&w, (const char *)(host ? host : t->data), t->bytes);
    }
    hpmli_write_start(&w);
    hpmli_write_head(&w, c, length);
    return hpmli_writer_close(&w, ctx->status == HPML_OK);
}

HPML_API hpml_status hpml_safetensors_save(hpml_ctx *ctx, const char *path, const hpml_safetensor *tensors, int count,
                                           const hpml_meta *meta, int meta_count)
{
    hpmli_safe_content c = { tensors, meta, count, meta_count, NULL, NULL, NULL };
    if (hpmli_failed(ctx)) return hpml_ctx_status(ctx);
    if (count < 0 || meta_count < 0 || (count > 0 && !tensors) || (meta_count > 0 && !meta))
        return hpmli_fail(ctx, HPML_ERR_ARGUMENT, "safetensors save: %d tensors, %d pairs of metadata: expected 0 or "
                          "more, in arrays that are not NULL", count, meta_count);
    return hpmli_safe_save(ctx, path, &c, NULL);
}

// ---------------------------------------------------------------------------------------------------------------------
// >>collect   arrays of whole parameters from the parts that ranks have, and back
// ---------------------------------------------------------------------------------------------------------------------
/* Returns whether other ranks have a part of parameter p, or all of it in place of this rank. */
HPMLI_FN bool hpmli_param_is_cut(const hpml_tensor *p)
{
    return p->param->axis != HPML_AXIS_DATA || p->param->stage >= 0 || p->param->shard > 0;
}

/* Returns whether ranks have to communicate to get whole parameters. All ranks return the same. */
HPMLI_FN bool hpmli_params_are_cut(const hpml_ctx *ctx)
{
    for (int i = 0; i < ctx->param_count; i++)
        if (hpmli_param_is_cut(ctx->params[i])) return true;
    return false;
}

/* Returns whether the rank is number 0 in all groups: the one that writes files. */
HPMLI_FN bool hpmli_groups_first(const hpml_ctx *ctx)
{
    for (int a = 0; a < HPML_AXES; a++)
        if (hpml_ctx_group(ctx, (hpml_axis)a)->rank > 0) return false;
    return true;
}

/* Returns HPML_OK if no rank has an error. Else every rank has an error on return: its own or, in the name of the call
   `what`, that another rank has failed. Called by all ranks. */
HPMLI_FN hpml_status hpmli_groups_agree(hpml_ctx *ctx, const char *what)
{
    float worst = -(float)ctx->status;
    for (int a = 0; a < HPML_AXES; a++) {
        const hpml_group *g = hpml_ctx_group(ctx, (hpml_axis)a);
        hpml_status       s = g->max(g->user, &worst, 1);
        if (s != HPML_OK) worst = -(float)s;
    }
    if (worst > 0 && ctx->status == HPML_OK)
        hpmli_fail(ctx, HPML_ERR_PEER, "%s: another rank has failed: %s", what,
                   hpml_status_string((hpml_status)-(int)worst));
    return ctx->status;
}

/* Returns whether only the floats of p's array `which` from keep_first on, keep_count of them, are valid on this rank:
   the part of the array that it keeps, or the part of the gradient with which it steps. */
HPMLI_FN bool hpmli_array_is_shard(const hpml_tensor *p, hpml_array which)
{
    return p->param->shard >= (which == HPML_ARRAY_VALUES ? 3 : 1);
}

/* Returns the address, on the device, of the array `which` of p, or of the part of this array that this rank has; NULL:
   the trainer has no such array, or this rank has no part of it. */
HPMLI_FN float *hpmli_param_array(const hpml_trainer *t, const hpml_tensor *p, hpml_array which)
{
    const bool         known = t && t->updates && p->param->index < t->graph->param_count;
    const hpml_update *u     = known ? &t->updates[p->param->index] : NULL;
    if (which == HPML_ARRAY_VALUES) return p->state->kept ? p->state->kept : (float *)p->raw;
    if (!u) return NULL;
    if (which == HPML_ARRAY_GRADIENTS) return u->g && hpmli_array_is_shard(p, which) ? u->g : (float *)p->raw_grad;
    return u->state[(int)which - HPML_ARRAY_STATE];
}

/* Copies `count` floats of an array of t (NULL: of no trainer) to `host` or, if `set`, from there. */
HPMLI_FN hpml_status hpmli_array_copy(hpml_ctx *ctx, const hpml_trainer *t, hpml_array which, float *array, float *host,
                                      int64_t count, bool set)
{
    const size_t bytes   = (size_t)count * sizeof *host;
    const bool   on_host = t && t->staged && which >= HPML_ARRAY_STATE;
    if (on_host) memcpy(set ? array : host, set ? host : array, bytes);
    else if (set) return ctx->backend->write(ctx->device, array, host, bytes);
    else return ctx->backend->read(ctx->device, host, array, bytes);
    return HPML_OK;
}

/* Reads the array `which` of p, joined from the shards of all ranks, to `mine`, which has as many floats as p. */
HPMLI_FN hpml_status hpmli_read_shards(hpml_ctx *ctx, hpml_trainer *t, const hpml_tensor *p, hpml_array which,
                                       float *mine)
{
    const bool        shard  = hpmli_array_is_shard(p, which);
    const int64_t     first  = shard ? p->param->keep_first : 0;
    const int64_t     count  = shard ? p->param->keep_count : hpml_tensor_count(p);
    float            *array  = hpmli_param_array(t, p, which);
    hpml_status       status = HPML_OK;
    if (count > 0 && array) status = hpmli_array_copy(ctx, t, which, array, mine + first, count, false);
    for (int h = 0; t && shard && h < t->graph->hook_count; h++) {
        const hpml_hooks *hooks  = &t->graph->hooks[h];
        hpml_status       joined = HPML_OK; /* the other ranks wait for this one, also after an error */
        if (hooks->join) joined = hooks->join(hooks->user, t, p->param->index, (int)which, mine);
        if (status == HPML_OK) status = joined;
    }
    return status;
}

/* Returns whether the array `which` of parameter p exists, on this rank or on another one. */
HPMLI_FN bool hpmli_param_has(const hpml_trainer *t, const hpml_tensor *p, hpml_array which)
{
    const int k = (int)which - HPML_ARRAY_STATE;
    if (p->param->stage < 0 && p->param->shard == 0) return hpmli_param_array(t, p, which) != NULL;
    if (which == HPML_ARRAY_VALUES) return true;
    if (!t || !hpmli_trainable(p) || p->param->index >= t->graph->param_count) return false;
    return which == HPML_ARRAY_GRADIENTS || hpmli_optimizer_keeps(t->optimizer, k, t->d.momentum);
}

/* Writes the whole array `which` of p to `whole`, on every rank that calls this; work: memory for two such arrays. */
HPMLI_FN hpml_status hpmli_collect(hpml_ctx *ctx, hpml_trainer *t, const hpml_tensor *p, hpml_array which, float *work,
                                   float *whole)
{
    const hpml_param *d     = p->param;
    const hpml_group *pipe  = hpml_ctx_group(ctx, HPML_AXIS_PIPE), *g = hpml_ctx_group(ctx, d->axis);
    const int64_t     n     = hpml_tensor_count(p);
    const bool        split = d->axis != HPML_AXIS_DATA;
    hpml_status       status = HPML_OK;
    if (d->stage < 0 || d->stage == pipe->rank) {
        float *part = split ? work : whole, *all = work + n;
        status = hpmli_read_shards(ctx, t, p, which, part);
        hpmli_cut c = hpmli_cut_of(p, d->axis, d->split_dim, d->sections);
        if (split && status == HPML_OK) status = hpmli_cut_join(g, c, part, n, all, whole);
    }
    if (d->stage >= 0 && status == HPML_OK)
        status = pipe->bcast(pipe->user, whole, hpml_param_whole(p, NULL), d->stage);
    if (status != HPML_OK && ctx->status == HPML_OK)
        hpmli_fail(ctx, status, "collect of \"%s\": %s", p->name, hpml_status_string(status));
    return ctx->status;
}

/* Sets this rank's array `which` of p to its part of `whole`; part: scratch memory as large as this rank's array. */
HPMLI_FN void hpmli_distribute(hpml_ctx *ctx, const hpml_trainer *t, const hpml_tensor *p, hpml_array which,
                               const float *whole, float *part)
{
    const bool    shard = hpmli_array_is_shard(p, which);
    const int64_t first = shard ? p->param->keep_first : 0;
    const int64_t count = shard ? p->param->keep_count : hpml_tensor_count(p);
    float        *array = hpmli_param_array(t, p, which);
    if (!array || count == 0) return; /* another rank has the array */
    float *mine = hpmli_param_is_cut(p) ? part : (float *)(uintptr_t)whole;
    if (mine == part) hpml_param_copy(p, part, first, count, (float *)(uintptr_t)whole, false);
    hpmli_array_copy(ctx, t, which, array, mine, count, true);
}

HPML_API hpml_status hpml_trainer_collect(hpml_trainer *t, int param, hpml_array which, float *whole)
{
    if (!t || !whole) return HPML_ERR_ARGUMENT;
    hpml_ctx    *ctx  = t->ctx;
    hpml_tensor *p    = hpml_param_at(ctx, param);
    float       *work = NULL;
    if (!p || (int)which < 0 || which >= HPML_ARRAY_END || !hpmli_param_has(t, p, which))
        return hpmli_fail(ctx, HPML_ERR_ARGUMENT, "trainer collect: parameter %d has no array %d", param, (int)which);
    if (!hpmli_failed(ctx)) work = (float *)hpmli_alloc(ctx, 2 * (size_t)hpml_param_whole(p, NULL) * sizeof *work);
    bool ready = !hpmli_param_is_cut(p) || hpmli_groups_agree(ctx, "trainer collect") == HPML_OK;
    if (ready && work) hpmli_collect(ctx, t, p, which, work, whole);
    hpmli_free(ctx, work);
    return ctx->status;
}

// ---------------------------------------------------------------------------------------------------------------------
// >>checkpoint   parameters and whole trainings in safetensors files
// ---------------------------------------------------------------------------------------------------------------------
/* One array of a file: array `which` of parameter `param`, or the values, on the device, of a named state. */
typedef struct hpmli_array {
    const hpml_tensor *param; /* NULL: a named state */
    hpml_array         which;
    bool               nonnegative; /* its numbers are sums or means of squares */
    float             *values;
} hpmli_array;

/* Named arrays that are saved to a file or loaded from one. Loading checks every array before it changes any. If
   parameters are split over ranks, all ranks save together: each reads the same arrays in the same order by
   hpmli_array_read, also after an error, because this is collective; the rank that is first in all groups writes. */
typedef struct hpmli_arrays {
    hpml_ctx        *ctx;
    hpml_trainer    *trainer; /* NULL: parameters only */
    hpml_safetensor *t;     /* (count) as in the file, without data. First in the memory of all these arrays */
    hpmli_array     *of;    /* (count) */
    float           *host;  /* host memory for the largest array */
    float           *work;  /* for two more */
    uint32_t        *sums;  /* (count) CRC-32C of each array's data */
    char            *names; /* (count, HPMLI_ARRAY_NAME) names */
    int              count, done; /* done: arrays that were read */
    hpml_dtype       dtype; /* of the data in the file */
} hpmli_arrays;

/* Adds the array `of`, of the given shape, to the list `a`; returns the memory to which the caller writes its name. */
HPMLI_FN char *hpmli_arrays_add(hpmli_arrays *a, hpmli_array of, int ndim, const int64_t *shape)
{
    hpml_safetensor *t    = &a->t[a->count];
    char            *name = a->names + a->count * HPMLI_ARRAY_NAME;
    a->of[a->count++] = of;
    t->name  = name;
    t->dtype = a->dtype;
    t->ndim  = ndim;
    t->data  = NULL;
    t->bytes = (size_t)hpmli_shape_count(ndim, shape) * hpml_dtype_size(a->dtype);
    memcpy(t->shape, shape, (size_t)ndim * sizeof *shape);
    return name;
}

/* Adds to the list *a the array `which` of each parameter that has one: the values, or a state of the optimizer, which
   is named "opt.<state>.<parameter>". */
HPMLI_FN void hpmli_arrays_add_params(hpmli_arrays *a, hpml_array which)
{
    const int k     = (int)which - HPML_ARRAY_STATE;
    int       count = k < 0 ? a->ctx->param_count : a->trainer->graph->param_count; /* not those recorded later */
    for (int i = 0; i < count; i++) {
        const hpml_tensor *p  = a->ctx->params[i];
        hpmli_array        of = { p, which, false, NULL };
        int64_t            whole[HPML_MAX_DIMS];
        if (!hpmli_param_has(a->trainer, p, which)) continue; /* the optimizer does not step it */
        if (k >= 0) of.nonnegative = a->trainer->optimizer->states[k].nonnegative;
        hpml_param_whole(p, whole);
        char *name = hpmli_arrays_add(a, of, p->ndim, whole);
        if (k < 0) snprintf(name, HPMLI_ARRAY_NAME, "%s", p->name);
        else snprintf(name, HPMLI_ARRAY_NAME, "opt.%s.%s", a->trainer->optimizer->states[k].name, p->name);
    }
}

/* Allocates the memory of *a: a list of `count` arrays, and a buffer for one array of `largest` numbers, the most that
   an array has (three such buffers if parameters are split over ranks). False: no memory. */
HPMLI_FN bool hpmli_arrays_take(hpmli_arrays *a, int64_t count, int64_t largest)
{
    const int64_t floats = hpmli_params_are_cut(a->ctx) ? 3 * largest : largest;
    const size_t  each   = sizeof *a->t + sizeof *a->of + sizeof *a->sums + HPMLI_ARRAY_NAME;
    a->t = (hpml_safetensor *)hpmli_alloc(a->ctx, (size_t)count * each + (size_t)floats * sizeof *a->host);
    if (!a->t) return false;
    a->of    = (hpmli_array *)(void *)(a->t + count);
    a->host  = (float *)(void *)(a->of + count);
    a->work  = a->host + largest;
    a->sums  = (uint32_t *)(void *)(a->host + floats);
    a->names = (char *)(a->sums + count);
    return true;
}

/* Lists in *a the parameters; with a trainer t also the states of its optimizer, and the named arrays that were added
   to the trainer's checkpoints (t->states). False: no memory. */
HPMLI_FN bool hpmli_arrays_of(hpml_ctx *ctx, hpml_trainer *t, hpml_dtype dtype, hpmli_arrays *a)
{
    int64_t most = (1 + HPML_MAX_STATES) * (int64_t)ctx->param_count, largest = 1;
    for (int i = 0; i < ctx->param_count; i++) largest = hpmli_max(largest, hpml_param_whole(ctx->params[i], NULL));
    for (const hpmli_named_array *v = t ? t->states : NULL; v; v = v->next) {
        largest = hpmli_max(largest, v->count);
        most++;
    }
    memset(a, 0, sizeof *a);
    a->ctx     = ctx;
    a->trainer = t;
    a->dtype   = dtype;
    if (hpml_param_init(ctx) != HPML_OK || !hpmli_arrays_take(a, most, largest)) return false;
    hpmli_arrays_add_params(a, HPML_ARRAY_VALUES);
    if (!t) return true;
    for (int k = 0; k < HPML_MAX_STATES; k++)
        if (hpmli_optimizer_keeps(t->optimizer, k, t->d.momentum))
            hpmli_arrays_add_params(a, (hpml_array)(HPML_ARRAY_STATE + k));
    for (const hpmli_named_array *v = t->states; v; v = v->next) {
        hpmli_array of = { NULL, HPML_ARRAY_VALUES, false, v->values };
        snprintf(hpmli_arrays_add(a, of, 1, &v->count), HPMLI_ARRAY_NAME, "state.%s", v->name);
    }
    return true;
}

/* Reads array i of `list`, an hpmli_arrays, whole to `host`; collective if split, because ranks join its parts. */
HPMLI_FN void hpmli_array_read(void *list, int i, float *host)
{
    hpmli_arrays *a = (hpmli_arrays *)list;
    hpmli_array   of = a->of[i];
    if (of.param) hpmli_collect(a->ctx, a->trainer, of.param, of.which, a->work, host);
    else a->ctx->backend->read(a->ctx->device, host, of.values, (size_t)a->t[i].shape[0] * sizeof *host);
    a->done = i + 1;
}

HPMLI_FN hpml_status hpmli_arrays_save(hpml_ctx *ctx, hpml_trainer *of, const char *path, hpml_dtype dtype,
                                       const hpml_meta *meta, int meta_count)
{
    hpmli_arrays a = HPMLI_ZEROED;
    const bool   together = hpmli_params_are_cut(ctx), writes = hpmli_groups_first(ctx);
    if (!together && !writes) return ctx->status; /* rank 0 has all that is saved */
    bool ready = !hpmli_failed(ctx) && hpmli_arrays_of(ctx, of, dtype, &a);
    if (together) ready = hpmli_groups_agree(ctx, path) == HPML_OK;
    if (ready && writes) {
        hpmli_safe_content c = { a.t, meta, a.count, meta_count, a.sums, hpmli_array_read, &a };
        hpmli_safe_save(ctx, path, &c, a.host);
    }
    for (int i = ready && together ? a.done : a.count; i < a.count && a.of[i].param; i++)
        hpmli_array_read(&a, i, a.host);
    hpmli_free(ctx, a.t);
    return together ? hpmli_groups_agree(ctx, path) : ctx->status;
}

/* Checks the CRC-32C of every tensor of file f that has one; files of other programs have none. */
HPMLI_FN bool hpmli_sums_check(hpml_ctx *ctx, const hpml_safetensors *f, const char *path)
{
    for (int i = 0; i < f->meta_count; i++) {
        hpml_safetensor e;
        char             sum[9];
        const hpml_meta *m = &f->meta[i];
        if (strncmp(m->key, HPMLI_SUM, strlen(HPMLI_SUM)) != 0) continue;
        bool found = hpml_safetensors_find(f, m->key + strlen(HPMLI_SUM), &e);
        snprintf(sum, sizeof sum, "%08x", found ? (unsigned)ctx->k->crc32c(0, e.data, e.bytes) : 0u);
        if (!found || strcmp(sum, m->value) != 0)
            return hpmli_false(ctx, HPML_ERR_FORMAT, "\"%s\": \"%s\" is damaged: its CRC-32C is %s, the file says %s; "
                               "take an older file", path, m->key + strlen(HPMLI_SUM), found ? sum : "missing",
                               m->value);
    }
    return true;
}

/* Returns the n numbers of tensor e of a file as f32: in the file's memory if f32, else converted into a->host. */
HPMLI_FN const float *hpmli_array_values(hpml_ctx *ctx, const hpmli_arrays *a, const hpml_safetensor *e, int64_t n)
{
    if (e->dtype == HPML_DTYPE_F32 && (uintptr_t)e->data % sizeof(float) == 0) return (const float *)e->data;
    hpmli_convert(ctx->k, HPML_DTYPE_F32, a->host, e->dtype, e->data, n);
    return a->host;
}

/* Checks that file f has array i of the list `a`, with the same shape and finite numbers; fails otherwise. */
HPMLI_FN bool hpmli_array_check(hpml_ctx *ctx, const hpmli_arrays *a, int i, const hpml_safetensors *f,
                                const char *path)
{
    const hpml_safetensor *t = &a->t[i];
    hpml_safetensor        e;
    int64_t                n = (int64_t)(t->bytes / sizeof(float));
    float                  least = a->of[i].nonnegative ? 0 : -FLT_MAX;
    if (!hpml_safetensors_find(f, t->name, &e))
        return hpmli_false(ctx, HPML_ERR_FORMAT, "\"%s\": no tensor \"%s\", which this model has; expected the same "
                           "names, and at most %d dimensions", path, t->name, HPML_MAX_DIMS);
    if (e.ndim != t->ndim || memcmp(e.shape, t->shape, (size_t)t->ndim * sizeof *t->shape) != 0)
        return hpmli_false(ctx, HPML_ERR_SHAPE, "\"%s\": \"%s\" is %s, this model expects %s", path, t->name,
                           hpmli_shape_text(ctx, e.ndim, e.shape), hpmli_shape_text(ctx, t->ndim, t->shape));
    const float *values = hpmli_array_values(ctx, a, &e, n);
    for (int64_t at = 0; at < n; at++)
        if (!(values[at] >= least && values[at] <= FLT_MAX))
            return hpmli_false(ctx, HPML_ERR_NONFINITE, "\"%s\": element %lld of \"%s\" is %g, expected finite "
                               "numbers%s", path, (long long)at, t->name, (double)values[at],
                               least == 0 ? " from 0, as sums and means of squares are" : "");
    return true;
}

HPMLI_FN hpml_status hpmli_arrays_load(hpml_ctx *ctx, hpml_trainer *of, const hpml_safetensors *f,
                                       const char *path)
{
    hpmli_arrays    a;
    hpml_safetensor e;
    bool            good = hpmli_arrays_of(ctx, of, HPML_DTYPE_F32, &a) && hpmli_sums_check(ctx, f, path);
    for (int i = 0; i < a.count && good; i++) good = hpmli_array_check(ctx, &a, i, f, path);
    for (int i = 0; i < a.count && good; i++) {
        hpml_safetensors_find(f, a.t[i].name, &e);
        const float *values = hpmli_array_values(ctx, &a, &e, (int64_t)(a.t[i].bytes / sizeof(float)));
        hpmli_array  to     = a.of[i];
        if (to.param) hpmli_distribute(ctx, of, to.param, to.which, values, a.work);
        else ctx->backend->write(ctx->device, to.values, values, a.t[i].bytes);
    }
    hpmli_free(ctx, a.t);
    return ctx->status;
}

HPML_API hpml_status hpml_params_save(hpml_ctx *ctx, const char *path, hpml_dtype dtype)
{
    if (hpmli_failed(ctx)) return hpml_ctx_status(ctx);
    if (dtype != HPML_DTYPE_F32 && dtype != HPML_DTYPE_BF16 && dtype != HPML_DTYPE_F16)
        return hpmli_fail(ctx, HPML_ERR_DTYPE, "params_save: parameters are stored as f32, bf16 or f16");
    for (int i = 0; i < ctx->param_count; i++)
        if (ctx->params[i]->state->kept)
            return hpmli_fail(ctx, HPML_ERR_STATE, "params_save: this rank keeps a part of \"%s\" (shard 3), and only "
                              "the trainer's hooks join parts; call hpml_checkpoint_save", ctx->params[i]->name);
    return hpmli_arrays_save(ctx, NULL, path, dtype, NULL, 0);
}

HPML_API hpml_status hpml_params_load(hpml_ctx *ctx, const char *path)
{
    hpml_safetensors *f = hpmli_safe_open(ctx, path, false);
    if (f) hpmli_arrays_load(ctx, NULL, f, path);
    hpml_safetensors_close(f);
    return hpml_ctx_status(ctx);
}

/* A checkpoint's metadata about its training: the optimizer's name; the other entries are whole numbers as text. */
enum { HPMLI_SEED, HPMLI_STEP, HPMLI_EPOCH, HPMLI_EPOCH_STEP, HPMLI_OPTIMIZER, HPMLI_SCALE, HPMLI_SCALE_AGE,
       HPMLI_ENTRIES };
static const char *const hpmli_entries[] = { "hpml.seed", "hpml.step", "hpml.epoch", "hpml.epoch_step",
                                             "hpml.optimizer", "hpml.loss_scale", "hpml.scale_steps" };
#define HPMLI_ENTRIES_SUM "hpml.crc32c" /* the checksum of the texts of hpmli_entries, concatenated */
#define HPMLI_COUNT_END   (INT64_C(1) << 53) /* no training makes as many steps; a double counts them exactly */
HPML_API hpml_status hpml_checkpoint_save(hpml_trainer *t, const char *path)
{
    char      text[HPMLI_ENTRIES][HPMLI_OPTIMIZER_NAME + 1], sum[9];
    hpml_meta meta[HPMLI_ENTRIES + 1];
    uint32_t  crc = 0;
    if (hpml_trainer_alloc(t) != HPML_OK) return t ? t->ctx->status : HPML_ERR_ARGUMENT;
    if (t->micro_batch != 0)
        return hpmli_fail(t->ctx, HPML_ERR_STATE, "checkpoint \"%s\": %d of %d micro-batches of an update are done; "
                          "save between updates", path, t->micro_batch, t->d.accumulate);
    const int64_t n[] = { (int64_t)t->ctx->seed, t->step, t->epoch, t->epoch_step, 0, (int64_t)t->loss_scale,
                          t->scale_age };
    for (int i = 0; i < HPMLI_ENTRIES; i++) {
        if (i == HPMLI_OPTIMIZER) snprintf(text[i], sizeof text[i], "%s", t->optimizer->name);
        else snprintf(text[i], sizeof text[i], "%lld", (long long)n[i]);
        meta[i].key   = hpmli_entries[i];
        meta[i].value = text[i];
        crc = t->ctx->k->crc32c(crc, text[i], strlen(text[i]));
    }
    snprintf(sum, sizeof sum, "%08x", (unsigned)crc);
    meta[HPMLI_ENTRIES].key   = HPMLI_ENTRIES_SUM;
    meta[HPMLI_ENTRIES].value = sum;
    return hpmli_arrays_save(t->ctx, t, path, HPML_DTYPE_F32, meta, HPMLI_ENTRIES + 1);
}

/* Reads entry i of a checkpoint's metadata from `text` as a whole number, checks its range; false: an error. */
HPMLI_FN bool hpmli_entry_number(hpml_ctx *ctx, const char *path, int i, const char *text, int64_t *number)
{
    char *end = NULL;
    errno   = 0;
    *number = strtoll(text, &end, 10);
    if (end == text || *end != 0 || errno == ERANGE)
        return hpmli_false(ctx, HPML_ERR_FORMAT, "\"%s\": \"%s\" is \"%s\", expected a whole number of 64 bits", path,
                           hpmli_entries[i], text);
    int least = i == HPMLI_SCALE_AGE ? -1 : 0; /* -1: the loss scale is fixed */
    if (i != HPMLI_SEED && i != HPMLI_SCALE && (*number < least || *number > HPMLI_COUNT_END))
        return hpmli_false(ctx, HPML_ERR_FORMAT, "\"%s\": \"%s\" is %lld, expected %d to 2^53", path, hpmli_entries[i],
                           (long long)*number, least);
    return true;
}

/* Reads and checks a checkpoint's metadata: sets n[HPMLI_ENTRIES] to the numbers and, for the one entry that is a text,
   the optimizer's name, n to 0 and *optimizer to this name. False: an error. */
HPMLI_FN bool hpmli_entries_read(hpml_ctx *ctx, const hpml_safetensors *f, const char *path, int64_t *n,
                                 const char **optimizer)
{
    const char *sum = hpml_safetensors_meta(f, HPMLI_ENTRIES_SUM);
    char        actual[9];
    uint32_t    crc = 0;
    for (int i = 0; i < HPMLI_ENTRIES; i++) {
        const char *text = hpml_safetensors_meta(f, hpmli_entries[i]);
        if (!text)
            return hpmli_false(ctx, HPML_ERR_FORMAT, "\"%s\": has parameters only, no state of a training; load "
                               "them with hpml_params_load", path);
        n[i] = 0;
        if (i == HPMLI_OPTIMIZER) *optimizer = text;
        else if (!hpmli_entry_number(ctx, path, i, text, &n[i])) return false;
        crc = ctx->k->crc32c(crc, text, strlen(text));
    }
    snprintf(actual, sizeof actual, "%08x", (unsigned)crc);
    if (sum && strcmp(sum, actual) != 0)
        return hpmli_false(ctx, HPML_ERR_FORMAT, "\"%s\": the state of the training is damaged: its CRC-32C is "
                           "%s, the file says %s; take an older file", path, actual, sum);
    return true;
}

/* True if `name`, the optimizer that the file `path` was saved with, is that of trainer t; false: an error. */
HPMLI_FN bool hpmli_optimizer_matches(const hpml_trainer *t, const char *path, const char *name)
{
    if (strcmp(name, t->optimizer->name) == 0) return true;
    if (*name && strspn(name, "0123456789") == strlen(name))
        return hpmli_false(t->ctx, HPML_ERR_FORMAT, "\"%s\": names its optimizer by a number (%.20s), as files of "
                           "older versions do, expected a name like \"%s\"; load only the parameters with "
                           "hpml_params_load", path, name, t->optimizer->name);
    return hpmli_false(t->ctx, HPML_ERR_FORMAT, "\"%s\": was written by optimizer \"%.*s\"%s, this trainer's is "
                       "\"%s\"; make a trainer with that optimizer, or load only the parameters with hpml_params_load",
                       path, HPMLI_OPTIMIZER_NAME, name, hpml_optimizer_find(name) ? "" : " (not a built-in one)",
                       t->optimizer->name);
}

HPML_API hpml_status hpml_checkpoint_load(hpml_trainer *t, const char *path)
{
    int64_t     n[HPMLI_ENTRIES];
    const char *optimizer = "";
    if (!t) return HPML_ERR_ARGUMENT;
    hpml_ctx         *ctx = t->ctx;
    hpml_safetensors *f   = hpml_trainer_alloc(t) == HPML_OK ? hpmli_safe_open(ctx, path, false) : NULL;
    if (!f) return ctx->status;
    bool good = hpmli_entries_read(ctx, f, path, n, &optimizer) && hpmli_optimizer_matches(t, path, optimizer);
    if (good && hpmli_arrays_load(ctx, t, f, path) == HPML_OK) {
        ctx->seed      = (uint64_t)n[HPMLI_SEED];
        t->step        = n[HPMLI_STEP];
        t->epoch       = n[HPMLI_EPOCH];
        t->epoch_step  = n[HPMLI_EPOCH_STEP];
        t->micro_batch = 0;
        if (t->scale_age >= 0 && n[HPMLI_SCALE_AGE] >= 0 && n[HPMLI_SCALE] >= 1) { /* both loss scales are dynamic */
            t->loss_scale = (float)n[HPMLI_SCALE];
            t->scale_age  = n[HPMLI_SCALE_AGE];
        }
    }
    hpml_safetensors_close(f);
    return ctx->status;
}

// ---------------------------------------------------------------------------------------------------------------------
// >>trace   the timeline; where the time goes, and what a model is
// ---------------------------------------------------------------------------------------------------------------------
/* A timeline: events are kept in a ring of fixed size; adding one takes an atomic increment and a copy. The file is in
   Chrome's trace format, as an array with one event a line, and times in microseconds. */
struct hpmli_trace {
    hpml_trace_desc  d;         /* the user's, with defaults in place of zeros */
    bool             at_first;  /* time 0 of the file is the start of the first event */
    int64_t          count;     /* atomic: events added since the start, also those overwritten */
    bool             paused;    /* the current step is not one of the steps to be traced */
    hpml_trace_event events[1]; /* (capacity) the ring: event i is at i % capacity */
};

HPML_API hpml_status hpml_trace_start(hpml_ctx *ctx, const hpml_trace_desc *desc)
{
    hpml_trace_desc d;
    if (hpmli_failed(ctx) || !HPMLI_COPY_DESC(ctx, "trace", d, desc)) return hpml_ctx_status(ctx);
    if (d.capacity < 0 || d.capacity > INT64_C(1) << 32)
        return hpmli_fail(ctx, HPML_ERR_ARGUMENT, "trace: capacity %lld", (long long)d.capacity);
    if (d.capacity == 0) d.capacity = 65536;
    size_t       bytes = sizeof(hpmli_trace) + (size_t)d.capacity * sizeof(hpml_trace_event);
    hpmli_trace *t     = (hpmli_trace *)hpmli_alloc_object(ctx, bytes, NULL);
    if (!t) return ctx->status;
    t->d        = d;
    t->paused   = d.first_step > 0;
    t->at_first = d.origin == 0;
    if (t->at_first) t->d.origin = hpmli_trace_time(ctx, hpml_now());
    hpmli_free(ctx, ctx->trace);
    ctx->trace = t;
    return HPML_OK;
}

HPML_API const double *hpml_trace_clock(hpml_ctx *ctx, const double *seconds)
{
    return ctx ? __atomic_exchange_n(&ctx->clock, seconds, __ATOMIC_RELAXED) : NULL;
}

HPMLI_FN void hpmli_trace_step(hpml_ctx *ctx, int64_t step) /* pauses the trace before first_step, after last_step */
{
    hpmli_trace *t = ctx->trace;
    bool         off = t && (step < t->d.first_step || (t->d.last_step > 0 && step > t->d.last_step));
    if (t) __atomic_store_n(&t->paused, off, __ATOMIC_RELAXED); /* atomic, because the loader's thread adds spans */
}

HPML_API bool hpml_trace_on(const hpml_ctx *ctx)
{
    return ctx && ctx->trace && !__atomic_load_n(&ctx->trace->paused, __ATOMIC_RELAXED);
}

HPML_API void hpml_trace_add(hpml_ctx *ctx, const hpml_trace_event *event)
{
    if (!hpml_trace_on(ctx) || !event || !event->name) return;
    hpmli_trace *t = ctx->trace;
    if (event->kind >= HPML_TRACE_SEND && !t->d.arrows) return;
    t->events[__atomic_fetch_add(&t->count, 1, __ATOMIC_RELAXED) % t->d.capacity] = *event;
}

HPML_API void hpml_trace_span(hpml_ctx *ctx, int lane, const char *name, double start, double end)
{
    hpml_trace_event e = HPMLI_ZEROED;
    if (!hpml_trace_on(ctx)) return;
    e.lane  = lane;
    e.name  = name;
    e.start = start;
    e.end   = end;
    hpml_trace_add(ctx, &e);
}

/* Adds the events of a step that ends now: its span, begun at time `since` (seconds), and its loss as a counter. */
HPMLI_FN void hpmli_trace_stepped(hpml_ctx *ctx, int64_t step, double since, float loss)
{
    hpml_trace_event e = HPMLI_ZEROED;
    e.kind   = HPML_TRACE_STEP;
    e.lane   = HPML_LANE_STEP;
    e.name   = "step";
    e.number = step;
    e.start  = since;
    e.end    = hpmli_trace_time(ctx, hpml_now());
    hpml_trace_add(ctx, &e);
    e.kind  = HPML_TRACE_COUNTER;
    e.name  = "loss";
    e.start = e.end;
    e.value = (double)loss;
    hpml_trace_add(ctx, &e);
}

/* Returns the i-th event of the ring, the oldest first; NULL after the last. */
HPMLI_FN const hpml_trace_event *hpmli_trace_at(const hpmli_trace *t, int64_t i)
{
    int64_t count = __atomic_load_n(&t->count, __ATOMIC_RELAXED), lost = count - t->d.capacity;
    if (lost < 0) lost = 0;
    return i < count - lost ? &t->events[(lost + i) % t->d.capacity] : NULL;
}

HPML_API double hpml_trace_first(const hpml_ctx *ctx)
{
    const hpml_trace_event *e;
    double                  first = 1e300;
    for (int64_t i = 0; ctx && ctx->trace && (e = hpmli_trace_at(ctx->trace, i)) != NULL; i++)
        if (e->start < first) first = e->start;
    return first < 1e300 ? first - ctx->trace->d.origin : 0;
}

HPML_API void hpml_trace_shift(hpml_ctx *ctx, double seconds)
{
    if (ctx && ctx->trace) ctx->trace->d.origin += seconds;
}

/* Writes `before` and a time in microseconds, without %f or %g, because some locales have a decimal comma for them. */
HPMLI_FN void hpmli_trace_time_at(hpmli_writer *w, const char *before, double seconds)
{
    long long ns = (long long)(1e9 * seconds);
    fprintf(w->f, "%s%s%lld.%03lld", before, ns < 0 ? "-" : "", llabs(ns) / 1000, llabs(ns) % 1000);
}

HPMLI_FN void hpmli_trace_args(hpmli_writer *w, const hpml_trace_event *e)
{
    const char *comma = "";
    fprintf(w->f, ",\"args\":{");
    if (e->bucket > 0) {
        fprintf(w->f, "\"bucket\":%d", e->bucket);
        comma = ",";
    }
    if (e->first) {
        fprintf(w->f, "%s\"tensors\":\"", comma);
        hpmli_write_escaped(w, e->first);
        if (e->last && e->last != e->first) {
            fprintf(w->f, " .. ");
            hpmli_write_escaped(w, e->last);
        }
        fprintf(w->f, "\"");
        comma = ",";
    }
    if (e->number > 0) fprintf(w->f, "%s\"bytes\":%lld", comma, (long long)e->number);
    fprintf(w->f, "}");
}

/* Writes one event as a line of the file; origin: time 0 of the file, in seconds. */
HPMLI_FN void hpmli_trace_write(hpmli_writer *w, const hpml_trace_event *e, int rank, double origin)
{
    static const char *const phases[] = { "X", "X", "C", "s", "f" }; /* indexed by hpml_trace_kind */
    bool                     spans    = e->kind == HPML_TRACE_SPAN || e->kind == HPML_TRACE_STEP;
    fprintf(w->f, ",\n{\"name\":\"");
    hpmli_write_escaped(w, e->name);
    if (e->kind == HPML_TRACE_STEP) fprintf(w->f, " %lld", (long long)e->number);
    fprintf(w->f, "\",\"ph\":\"%s\",\"pid\":%d,\"tid\":%d", phases[e->kind], rank, e->lane);
    hpmli_trace_time_at(w, ",\"ts\":", e->start - origin);
    if (spans) hpmli_trace_time_at(w, ",\"dur\":", e->end - e->start);
    if (e->kind == HPML_TRACE_SPAN && (e->first || e->bucket > 0 || e->number > 0)) hpmli_trace_args(w, e);
    if (e->kind == HPML_TRACE_SEND || e->kind == HPML_TRACE_RECEIVE)
        fprintf(w->f, ",\"cat\":\"message\",\"id\":%lld%s", (long long)e->number,
                e->kind == HPML_TRACE_SEND ? "" : ",\"bp\":\"e\""); /* the arrow ends at the enclosing span */
    if (e->kind == HPML_TRACE_COUNTER) {
        int exponent = e->value == 0 ? 0 : (int)fmax(floor(log10(fabs(e->value))) - 8, -300);
        fprintf(w->f, ",\"args\":{\"");
        hpmli_write_escaped(w, e->name);
        fprintf(w->f, "\":%llde%d}", llround(e->value / pow(10, exponent)), exponent);
    }
    fprintf(w->f, "}");
}

HPML_API hpml_status hpml_trace_save(hpml_ctx *ctx, const char *path)
{
    static const char *const lanes[] = { "compute", "communication", "input", "gpu", "steps" };
    hpmli_writer w;
    unsigned     used = 0;
    if (hpmli_failed(ctx)) return hpml_ctx_status(ctx);
    hpmli_trace *t = ctx->trace;
    if (!t) return hpmli_fail(ctx, HPML_ERR_STATE, "trace \"%s\": no trace was started", path);
    if (ctx->backend->time_op) ctx->backend->sync(ctx->device);
    if (!hpmli_writer_open(ctx, &w, path, false)) return ctx->status;
    fprintf(w.f, "[\n{\"name\":\"process_name\",\"ph\":\"M\",\"pid\":%d,\"args\":{\"name\":\"rank %d\"}}", t->d.rank,
            t->d.rank);
    const hpml_trace_event *e;
    double                  origin = t->d.origin + (t->at_first ? hpml_trace_first(ctx) : 0);
    for (int64_t i = 0; (e = hpmli_trace_at(t, i)) != NULL; i++)
        if (e->lane >= 0 && e->lane <= HPML_LANE_STEP && e->kind != HPML_TRACE_COUNTER) used |= 1u << e->lane;
    for (int l = 0; l <= HPML_LANE_STEP; l++)
        if (used >> l & 1)
            fprintf(w.f, ",\n{\"name\":\"thread_name\",\"ph\":\"M\",\"pid\":%d,\"tid\":%d,\"args\":{\"name\":\"%s\"}}",
                    t->d.rank, l, lanes[l]);
    for (int64_t i = 0; (e = hpmli_trace_at(t, i)) != NULL; i++) {
        bool odd = !e->name || (e->kind == HPML_TRACE_COUNTER && e->value - e->value != 0);
        if (!odd) hpmli_trace_write(&w, e, t->d.rank, origin);
    }
    fprintf(w.f, "\n]\n");
    return hpmli_writer_close(&w, true);
}

HPMLI_FN const char *hpmli_op_kind(const hpml_node *n)
{
    return n->op == HPML_OP_CUSTOM ? n->attr.custom->name : hpml_op_name(n->op);
}
HPML_API double hpml_node_flops(const hpml_node *n, bool backward) { return hpmli_op_of(n)->flops(n, backward); }
HPML_API double hpml_graph_flops(const hpml_graph *g, bool backward)
{
    double sum = 0;
    for (int i = 0; g && i < g->count; i++) sum += hpml_node_flops(g->nodes[i], backward);
    return sum;
}

HPML_API void hpml_profile_enable(hpml_graph *g, bool on)
{
    if (!g || hpmli_failed(g->ctx)) return;
    if (g->profile) hpml_profile(g, NULL, 0); /* waits for the device, which may still add to the rows */
    hpmli_free(g->ctx, g->profile);
    g->profile = NULL;
    if (!on) return;
    g->profile = hpmli_new(g->ctx, hpml_profile_row, g->count);
    for (int i = 0; g->profile && i < g->count; i++) {
        hpml_node        *n = g->nodes[i];
        hpml_profile_row *r = &g->profile[i];
        r->node = n;
        r->name = n->out->name;
        r->forward_flops  = hpmli_op_of(n)->flops(n, false);
        r->backward_flops = n->out->needs_grad ? hpmli_op_of(n)->flops(n, true) : 0;
        if (hpmli_has_trait(n, HPMLI_OP_IS_ALIAS)) continue;
        r->bytes = (double)hpmli_tensor_bytes(n->out);
        for (int s = 0; s < n->src_count; s++) r->bytes += n->src[s] ? (double)hpmli_tensor_bytes(n->src[s]) : 0;
    }
}

HPML_API int hpml_profile(const hpml_graph *g, hpml_profile_row *rows, int capacity)
{
    if (!g || !g->profile) return 0;
    if (g->ctx->backend->time_op) g->ctx->backend->sync(g->ctx->device);
    if (rows) memcpy(rows, g->profile, sizeof *rows * (size_t)(capacity < g->count ? capacity : g->count));
    return g->count;
}

HPML_API int hpml_profile_text(const hpml_graph *g, char *buffer, size_t size)
{
    hpmli_text_buffer t     = hpmli_text_begin(buffer, size);
    double     total = 0;
    if (hpml_profile(g, NULL, 0) == 0) return 0;
    for (int i = 0; i < g->count; i++) total += g->profile[i].forward_s + g->profile[i].backward_s;
    hpmli_text_add(&t, "%-16s %-14s %9s %9s %6s %9s %9s\n", "layer", "op", "fwd us", "bwd us", "share", "GFLOP/s",
                    "MB");
    for (int i = 0; i < g->count; i++) {
        const hpml_profile_row *r = &g->profile[i];
        double calls = r->calls > 0 ? (double)r->calls : 1, s = r->forward_s + r->backward_s;
        hpmli_text_add(&t, "%-16s %-14s %9.1f %9.1f %5.1f%% %9.1f %9.3f\n", r->name, hpmli_op_kind(r->node),
                       1e6 * r->forward_s / calls, 1e6 * r->backward_s / calls, total > 0 ? 100 * s / total : 0,
                       s > 0 ? 1e-9 * calls * (r->forward_flops + (r->backward_s > 0 ? r->backward_flops : 0)) / s : 0,
                       1e-6 * r->bytes);
    }
    hpmli_text_add(&t, "total %.3f ms a step\n", g->count > 0 && g->profile[0].calls > 0 ?
                   1e3 * total / (double)g->profile[0].calls : 0);
    return t.used;
}

HPML_API int hpml_summary_text(const hpml_graph *g, char *buffer, size_t size)
{
    hpmli_text_buffer t = hpmli_text_begin(buffer, size);
    if (!g) return 0;
    hpmli_text_add(&t, "%-16s %-14s %-18s %12s %12s\n", "layer", "op", "output", "parameters", "MFLOP");
    for (int i = 0; i < g->count; i++) {
        const hpml_node *n      = g->nodes[i];
        int64_t          params = 0;
        for (int s = 0; s < n->src_count; s++)
            if (n->src[s] && n->src[s]->param && !n->src[s]->param->buffer) params += hpml_tensor_count(n->src[s]);
        hpmli_text_add(&t, "%-16s %-14s %-18s %12lld %12.3f\n", n->out->name, hpmli_op_kind(n),
                       hpmli_shape_text(g->ctx, n->out->ndim, n->out->shape), (long long)params,
                       1e-6 * hpmli_op_of(n)->flops(n, false));
    }
    hpmli_text_add(&t, "%lld parameters, %.1f MFLOP forward and %.1f backward for a batch of %lld\n",
                    (long long)hpml_param_total(g->ctx), 1e-6 * hpml_graph_flops(g, false),
                    1e-6 * hpml_graph_flops(g, true), (long long)g->batch);
    const hpml_memory *m = &g->memory;
    hpmli_text_add(&t, "memory: parameters %.3f MB, gradients %.3f, optimizer %.3f, activations %.3f (%.3f without "
                    "reuse), scratch %.3f, total %.3f\n", 1e-6 * (double)m->parameters, 1e-6 * (double)m->gradients,
                    1e-6 * (double)m->optimizer, 1e-6 * (double)m->activations, 1e-6 * (double)m->unshared,
                    1e-6 * (double)m->scratch, 1e-6 * (double)m->total);
    return t.used;
}

HPMLI_COMPILE_FAST_END

// =====================================================================================================================
// PART VII  KERNELS: one text, compiled once for each instruction set
// =====================================================================================================================

// ---------------------------------------------------------------------------------------------------------------------
// >>passes   the header includes itself, once for each instruction set
// ---------------------------------------------------------------------------------------------------------------------
/* A pass is one inclusion of this file by itself with HPMLI_ISA defined as an instruction set: only the rest of PART
   VII is compiled, for that set. If you rename the file, define HPML_SELF as its new name. A further instruction set
   whose vectors have a fixed width (SSE4, AVX10/256, LSX ..) needs: a constant and a pass here, a row in
   hpmli_kernels_find, a block of constants in >>isa, and its primitive operations (about 30 functions of one line) in a
   section like >>simd-neon. Scalable vectors (SVE, RVV) are not covered, because HV_LANES, on which tile sizes and
   arrays depend, is a compile-time constant. */
#ifndef HPML_SELF
#define HPML_SELF "hpml.h"
#endif
#define HPMLI_SCALAR 0
#define HPMLI_AVX2   1
#define HPMLI_AVX512 2
#define HPMLI_NEON   3

#ifdef HPMLI_EDITOR /* editors cannot include a file in itself: they compile only the scalar pass, which follows here */
#define HPMLI_ISA HPMLI_SCALAR
#else
#define HPMLI_ISA HPMLI_SCALAR
#include HPML_SELF
#if defined(HPMLI_HAVE_AVX2)
#define HPMLI_ISA HPMLI_AVX2
#include HPML_SELF
#endif
#if defined(HPMLI_HAVE_AVX512)
#define HPMLI_ISA HPMLI_AVX512
#include HPML_SELF
#endif
#if defined(HPMLI_HAVE_NEON)
#define HPMLI_ISA HPMLI_NEON
#include HPML_SELF
#endif
#endif /* !HPMLI_EDITOR */
#define HPMLI_CHOOSE /* all passes are compiled: section >>choose, at the end of this file, is compiled next */
#endif /* HPMLI_BODY_INCLUDED */
#endif /* !HPMLI_ISA */

#ifdef HPMLI_ISA
// ---------------------------------------------------------------------------------------------------------------------
// >>isa   instruction sets: for each one block of constants
// ---------------------------------------------------------------------------------------------------------------------
/* All of PART VII below this line is compiled once for each instruction set, see >>passes. A set is described by the
   constants of this section and its primitive operations in the next three; no other code asks which set it is for.
     HPMLI_ISA_NAME        name of the set: hpml_ctx_desc.cpu
     HPMLI_SUFFIX          end of the names of the set's functions: _avx2
     HPMLI_TARGET          target attribute of the set's functions, so that a plain `cc -O2` compiles all sets
     HV_LANES              floats in a vector
     HV(f32) (u32) (u64)   vectors of the same size: of float, uint32_t, uint64_t
     HPMLI_NV              vectors in a row of a tile of C, at most; for tiles see >>gemm
     HPMLI_MR              rows of a tile of 1 or 2 vectors, at most
     HPMLI_MR_3, _MR_4     rows of a tile of 3 or 4 vectors, at most, where HPMLI_NV is 4
     HPMLI_DOT_MR          rows of a tile of dot products, see >>gemm-thin
     HPMLI_CRC32C_WORD     optional: the instruction that adds 8 bytes to a CRC-32C; without it the CRC uses tables
     HPMLI_MM ..           only x86: the intrinsic functions of the set's width, see >>simd-x86
   Tile sizes follow from the number of vector registers: a tile of R rows and V vectors takes R V registers for its
   sums, V for B (the right operand of the product A B) and one for A. */

/* HPMLI_CAT joins two names after their expansion. Macros that are the same for all instruction sets are defined again
   in the pass of each set (see >>passes), which C allows. */
#define HPMLI_CAT_(a, b) a##b
#define HPMLI_CAT(a, b)  HPMLI_CAT_(a, b)
#define HV(name)         HPMLI_CAT(hpmli_##name, HPMLI_SUFFIX) /* HV(exp): hpmli_exp_avx2 */
/* Repeat the macro X: HPMLI_TIMES_4(X, a) is X(a, 0) X(a, 1) X(a, 2) X(a, 3); HPMLI_ROWS(X, a) repeats X for each row
   of a tile of C, and HPMLI_DOT_ROWS for each row of a tile of dot products. */
#define HPMLI_TIMES_2(X, a)  X(a, 0) X(a, 1)
#define HPMLI_TIMES_4(X, a)  HPMLI_TIMES_2(X, a) X(a, 2) X(a, 3)
#define HPMLI_TIMES_6(X, a)  HPMLI_TIMES_4(X, a) X(a, 4) X(a, 5)
#define HPMLI_TIMES_8(X, a)  HPMLI_TIMES_6(X, a) X(a, 6) X(a, 7)
#define HPMLI_TIMES_14(X, a) HPMLI_TIMES_8(X, a) X(a, 8) X(a, 9) X(a, 10) X(a, 11) X(a, 12) X(a, 13)
#define HPMLI_TIMES_16(X, a) HPMLI_TIMES_14(X, a) X(a, 14) X(a, 15)
#define HPMLI_TIMES_(n)      HPMLI_TIMES_##n
#define HPMLI_TIMES(n)       HPMLI_TIMES_(n)
#define HPMLI_ROWS           HPMLI_TIMES(HPMLI_MR)
#define HPMLI_ROWS_3         HPMLI_TIMES(HPMLI_MR_3)
#define HPMLI_ROWS_4         HPMLI_TIMES(HPMLI_MR_4)
#define HPMLI_DOT_ROWS       HPMLI_TIMES(HPMLI_DOT_MR)
#define HPMLI_ROW_VECTORS    (4 * HPMLI_NV) /* vectors of C that a product of one row keeps in registers, at most */

#undef HPMLI_ISA_NAME
#undef HPMLI_SUFFIX
#undef HPMLI_TARGET
#undef HV_LANES
#undef HPMLI_NV
#undef HPMLI_MR
#undef HPMLI_MR_3
#undef HPMLI_MR_4
#undef HPMLI_DOT_MR
#undef HPMLI_CRC32C_WORD
#undef HPMLI_MM
#undef HPMLI_MM_ALL
#undef HPMLI_MM_HALF
#undef HPMLI_MM_WHERE
#if HPMLI_ISA == HPMLI_SCALAR
#define HPMLI_ISA_NAME    "scalar"
#define HPMLI_SUFFIX      _scalar
#define HPMLI_TARGET
#define HV_LANES          1
typedef float    HV(f32);
typedef uint32_t HV(u32);
#define HPMLI_NV          2
#define HPMLI_MR          4
#define HPMLI_DOT_MR      2
#elif HPMLI_ISA == HPMLI_AVX2 /* 16 registers of 8 floats; tiles of 6 x 2 vectors */
#define HPMLI_ISA_NAME    "avx2"
#define HPMLI_SUFFIX      _avx2
#define HPMLI_TARGET      __attribute__((target("avx2,fma,f16c")))
#define HV_LANES          8
typedef __m256   HV(f32);
typedef uint32_t HV(u32) __attribute__((vector_size(32)));
typedef uint64_t HV(u64) __attribute__((vector_size(32)));
#define HPMLI_NV          2
#define HPMLI_MR          6
#define HPMLI_DOT_MR      2
#define HPMLI_CRC32C_WORD _mm_crc32_u64
#define HPMLI_MM(op)      HPMLI_CAT(_mm256_, op)
#define HPMLI_MM_ALL      __m256i
#define HPMLI_MM_HALF     __m128i                                                         /* 16 bits for each lane */
#define HPMLI_MM_WHERE(a, op, b, x, y) _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, op))    /* a op b ? x : y */
#elif HPMLI_ISA == HPMLI_AVX512 /* 32 registers of 16 floats; tiles of 14 x 2, 8 x 3 or 6 x 4 vectors */
#define HPMLI_ISA_NAME    "avx512"
#define HPMLI_SUFFIX      _avx512
#define HPMLI_TARGET      __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")))
#define HV_LANES          16
typedef __m512   HV(f32);
typedef uint32_t HV(u32) __attribute__((vector_size(64)));
typedef uint64_t HV(u64) __attribute__((vector_size(64)));
#define HPMLI_NV          4
#define HPMLI_MR          14
#define HPMLI_MR_3        8
#define HPMLI_MR_4        6
#define HPMLI_DOT_MR      6
#define HPMLI_CRC32C_WORD _mm_crc32_u64
#define HPMLI_MM(op)      HPMLI_CAT(_mm512_, op)
#define HPMLI_MM_ALL      __m512i
#define HPMLI_MM_HALF     __m256i
#define HPMLI_MM_WHERE(a, op, b, x, y) _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, op), y, x)
#elif HPMLI_ISA == HPMLI_NEON /* 32 registers of 4 floats; tiles of 8 x 2 vectors */
#define HPMLI_ISA_NAME    "neon"
#define HPMLI_SUFFIX      _neon
#define HPMLI_TARGET
#define HV_LANES          4
typedef float32x4_t HV(f32);
typedef uint32x4_t  HV(u32);
typedef uint64x2_t  HV(u64);
#define HPMLI_NV          2
#define HPMLI_MR          8
#define HPMLI_DOT_MR      4
#endif

// ---------------------------------------------------------------------------------------------------------------------
// >>simd   vectors: one kernel text for all instruction sets; the scalar set
// ---------------------------------------------------------------------------------------------------------------------
/* Kernels are written once over a few operations on vectors. HV(name) is the name of an operation, type or kernel in
   this pass: HV(exp) is hpmli_exp_avx2 in the pass for AVX2. HV(f32) is a vector of HV_LANES floats, its lanes. gcc and
   clang compile + - * / << & and so on for vectors as for numbers. The last, partial vector of an array is loaded by
   HV(load_upto) and goes through the same instructions as whole vectors, so that the result for an element does not
   depend on its place in the array. Below, a, b, c, x, y are vectors; p is an address of any alignment:
     as_floats as_words          the same bits as floats, as words of 32 bits
     set1 zero                   all lanes are the number x; are 0
     load store                  all lanes at p; load_words store_words: a vector of words
     load_partial store_partial  the first n lanes, n < HV_LANES; a load sets the others to 0
     load_upto store_upto        the first n lanes, or all for n >= HV_LANES, which is the usual case
     load_T store_T              converted from and to T: bf16, f16, u8, i32; load_upto_T store_upto_T: the first n
     load_u32                    words converted to floats, rounded once; from_i32: integers in a register
     fma fnma                    a b + c; c - a b
     max min                     a > b ? a : b, so that a NaN in a gives b; b > a ? a : b
     if_ge if_gt if_eq           a >= b ? x : y, lane by lane; the same for > and ==
     pow2i exponent mantissa     2^a; a = 2^exponent mantissa
     sum_lanes max_lane          of all lanes; sum4: out[0..3] = the sums of the lanes of a, of b, of c, of d
     even_lanes odd_lanes        lanes 0, 2, 4 .. of a, then those of b; lanes 1, 3, 5 ..
     interleave_low _high        a0 b0 a1 b1 .., the first half of these; the second half
     sign_bits select_bits       bit i is set where lane i of a is >= 0; lane i is a where bit i of m is set, else b
     widen narrow                16-bit words in memory to and from vectors of words
     transpose                   a square of HV_LANES x HV_LANES floats
     set_u64_pairs philox_products   see >>random */

#define HPMLI_KERNEL     static __attribute__((unused)) HPMLI_TARGET /* begins a function of this set */
#define HPMLI_VEC_INLINE static inline __attribute__((always_inline, unused)) HPMLI_TARGET /* always inlined */
/* Defines a function that returns the expression e. Each macro that defines functions ends in a prototype without a
   semicolon, so that a use of the macro ends in one, as editors and ctags expect of a declaration. */
#define HPMLI_VEC_FN(name, e, ...) HPMLI_VEC_INLINE HV(f32) name(__VA_ARGS__) { return e; }                            \
    static inline HV(f32) name(__VA_ARGS__)
#define HPMLI_VEC_FN1(name, e) HPMLI_VEC_FN(name, e, HV(f32) a)
#define HPMLI_VEC_FN2(name, e) HPMLI_VEC_FN(name, e, HV(f32) a, HV(f32) b)
#define HPMLI_VEC_FN3(name, e) HPMLI_VEC_FN(name, e, HV(f32) a, HV(f32) b, HV(f32) c)
#define HPMLI_VEC_FN4(name, e) HPMLI_VEC_FN(name, e, HV(f32) a, HV(f32) b, HV(f32) x, HV(f32) y)
/* Loops over n elements by vectors, the next at index i; c is the number of lanes of that vector that are elements. */
#define HV_LOOP(n)                                                                                                     \
    for (int64_t i = 0, c; c = HV_LANES > 1 && (n) - i < HV_LANES ? (n) - i : HV_LANES, i < (n); i += HV_LANES)

/* Operations that need no instruction of their own. */
HPMLI_VEC_INLINE HV(f32) HV(as_floats)(HV(u32) u) { HV(f32) a; memcpy(&a, &u, sizeof a); return a; }
HPMLI_VEC_INLINE HV(u32) HV(as_words)(HV(f32) a) { HV(u32) u; memcpy(&u, &a, sizeof u); return u; }
typedef HV(f32) HV(floats_anywhere) __attribute__((aligned(4)));
typedef HV(u32) HV(words_anywhere) __attribute__((aligned(HV_LANES == 1 ? 4 : 1))); /* 1: words at odd addresses */
HPMLI_VEC_INLINE HV(u32) HV(load_words)(const uint32_t *p) { return *(const HV(words_anywhere) *)p; }
HPMLI_VEC_INLINE void HV(store_words)(uint32_t *p, HV(u32) a) { *(HV(words_anywhere) *)p = a; }
HPMLI_VEC_INLINE HV(f32) HV(load)(const float *p) { return *(const HV(floats_anywhere) *)p; }
HPMLI_VEC_INLINE void HV(store)(float *p, HV(f32) a) { *(HV(floats_anywhere) *)p = a; }
HPMLI_VEC_FN1(HV(abs), HV(as_floats)(HV(as_words)(a) & 0x7fffffffu));
HPMLI_VEC_FN1(HV(mantissa), HV(as_floats)((HV(as_words)(a) & 0x7fffffu) | 0x3f800000u));

#if HPMLI_ISA == HPMLI_SCALAR
HPMLI_VEC_INLINE HV(f32) HV(set1)(float x) { return x; }
HPMLI_VEC_INLINE HV(f32) HV(load_partial)(const float *p, int64_t n) { return n > 0 ? *p : 0; }
HPMLI_VEC_INLINE void HV(store_partial)(float *p, HV(f32) a, int64_t n) { if (n > 0) *p = a; }
#ifdef __FP_FAST_FMAF /* always fuse where the CPU can: were it the compiler's choice, bits would differ by place */
HPMLI_VEC_FN3(HV(fma), fmaf(a, b, c));
HPMLI_VEC_FN3(HV(fnma), fmaf(-a, b, c));
#else
HPMLI_VEC_FN3(HV(fma), a * b + c);
HPMLI_VEC_FN3(HV(fnma), c - a * b);
#endif
HPMLI_VEC_FN1(HV(sqrt), sqrtf(a));
HPMLI_VEC_FN1(HV(round), rintf(a));
HPMLI_VEC_FN2(HV(max), a > b ? a : b);
HPMLI_VEC_FN2(HV(min), b > a ? a : b);
HPMLI_VEC_FN4(HV(if_ge), a >= b ? x : y);
HPMLI_VEC_FN4(HV(if_gt), a > b ? x : y);
HPMLI_VEC_FN4(HV(if_eq), a == b ? x : y);
HPMLI_VEC_FN2(HV(even_lanes), ((void)b, a));
HPMLI_VEC_FN2(HV(odd_lanes), ((void)a, b));
HPMLI_VEC_FN2(HV(interleave_low), ((void)b, a));
HPMLI_VEC_FN2(HV(interleave_high), ((void)a, b));
HPMLI_VEC_INLINE float HV(sum_lanes)(HV(f32) a) { return a; }
HPMLI_VEC_INLINE void HV(sum4)(float *out, HV(f32) a, HV(f32) b, HV(f32) c, HV(f32) d)
{
    const float sums[4] = { a, b, c, d };
    memcpy(out, sums, sizeof sums);
}
HPMLI_VEC_INLINE float HV(max_lane)(HV(f32) a) { return a; }
HPMLI_VEC_INLINE uint32_t HV(sign_bits)(HV(f32) a) { return a >= 0; }
HPMLI_VEC_INLINE HV(f32) HV(select_bits)(uint32_t m, HV(f32) a, HV(f32) b) { return m & 1 ? a : b; }
HPMLI_VEC_INLINE HV(f32) HV(from_i32)(HV(u32) u) { return (float)(int32_t)u; }
HPMLI_VEC_INLINE HV(f32) HV(load_u32)(const uint32_t *p) { return (float)*p; }
HPMLI_VEC_INLINE HV(u32) HV(widen)(const uint16_t *p) { return *p; }
HPMLI_VEC_INLINE void HV(narrow)(uint16_t *p, HV(u32) u) { *p = (uint16_t)u; }
HPMLI_VEC_INLINE HV(f32) HV(load_f16)(const uint16_t *p)
{
    uint32_t sign = (uint32_t)(*p & 0x8000u) << 16, exponent = *p >> 10 & 31u, fraction = *p & 0x3ffu;
    if (exponent == 31) return HV(as_floats)(sign | 0x7f800000u | fraction << 13 | (fraction ? 0x400000u : 0));
    if (exponent == 0) return (sign ? -1.0f : 1.0f) * (float)fraction * (1.0f / 16777216.0f); /* subnormal, 0 */
    return HV(as_floats)(sign | (exponent + 112) << 23 | fraction << 13);
}
HPMLI_VEC_INLINE void HV(store_f16)(uint16_t *p, HV(f32) a)
{
    uint32_t u = HV(as_words)(a), sign = u >> 16 & 0x8000u, x = u & 0x7fffffffu, h;
    if (x > 0x7f800000u) h = 0x7e00u | (x >> 13 & 0x3ffu); /* a NaN */
    else if (x >= 0x477ff000u) h = 0x7c00u;                /* 65520 and more round to infinity */
    else if (x >= 0x38800000u) h = (x - 0x38000000u + 0xfffu + (x >> 13 & 1)) >> 13;
    else h = (uint32_t)rintf(HV(as_floats)(x) * 16777216.0f); /* subnormal */
    *p = (uint16_t)(sign | h);
}
HPMLI_VEC_INLINE HV(f32) HV(load_u8)(const uint8_t *p) { return (float)*p; }
HPMLI_VEC_INLINE void HV(store_i32)(int32_t *p, HV(f32) a) /* rounds to the nearest int32_t; NaN gives 0 */
{
    if (a != a) *p = 0;
    else if (a >= 2147483648.0f) *p = INT32_MAX;
    else if (a <= -2147483648.0f) *p = INT32_MIN;
    else *p = (int32_t)rintf(a);
}
#endif

// ---------------------------------------------------------------------------------------------------------------------
// >>simd-x86   vectors: AVX2, AVX-512
// ---------------------------------------------------------------------------------------------------------------------
/* HPMLI_MM(add_ps) is _mm256_add_ps where the kernels are compiled for AVX2, _mm512_add_ps for AVX-512. Operations
   whose intrinsics differ by more than this prefix are in the middle of this section, once for each instruction set;
   the other operations are written once for both. */
#pragma GCC diagnostic push /* at -O0 some functions of gcc's own headers are macros, about which -Wconversion warns */
#pragma GCC diagnostic ignored "-Wsign-conversion"
#ifdef HPMLI_MM
/* Defines a function that returns the sum (op add) or the largest (op max) of the lanes of a. 16 lanes are stored to
   memory and loaded as two times 8, because gcc 12 warns about its own casts from a register to half of it. */
#define HPMLI_FOLD(name, op)                                                                                           \
    HPMLI_VEC_INLINE float HV(name)(HV(f32) a)                                                                         \
    {                                                                                                                  \
        float t[HV_LANES];                                                                                             \
        HV(store)(t, a);                                                                                               \
        __m256 h = _mm256_loadu_ps(t);                                                                                 \
        if (HV_LANES > 8) h = _mm256_##op##_ps(h, _mm256_loadu_ps(t + HV_LANES - 8));                                  \
        __m128 s = _mm_##op##_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));                              \
        s = _mm_##op##_ps(s, _mm_movehl_ps(s, s));                                                                     \
        return _mm_cvtss_f32(_mm_##op##_ss(s, _mm_shuffle_ps(s, s, 1)));                                               \
    }                                                                                                                  \
    static inline float HV(name)(HV(f32) a)
HPMLI_FOLD(sum_lanes, add);
HPMLI_FOLD(max_lane, max);
HPMLI_VEC_INLINE HV(f32) HV(load_u8)(const uint8_t *p)
{
    __m128i bytes = _mm_setzero_si128();
    memcpy(&bytes, p, HV_LANES);
    return HPMLI_MM(cvtepi32_ps)(HPMLI_MM(cvtepu8_epi32)(bytes));
}
#endif

#if HPMLI_ISA == HPMLI_AVX2
HPMLI_VEC_INLINE __m256i HV(lane_mask)(int64_t n) /* all bits set in the first n lanes */
{
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
HPMLI_VEC_INLINE HV(f32) HV(load_partial)(const float *p, int64_t n) { return _mm256_maskload_ps(p, HV(lane_mask)(n)); }
HPMLI_VEC_INLINE void HV(store_partial)(float *p, HV(f32) a, int64_t n) { _mm256_maskstore_ps(p, HV(lane_mask)(n), a); }
HPMLI_VEC_FN1(HV(round), _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#define HPMLI_SWAP_MIDDLE(x) _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(x), 0xd8)) /* quarters 0 2 1 3 */
HPMLI_VEC_FN2(HV(even_lanes), HPMLI_SWAP_MIDDLE(_mm256_shuffle_ps(a, b, 0x88)));
HPMLI_VEC_FN2(HV(odd_lanes), HPMLI_SWAP_MIDDLE(_mm256_shuffle_ps(a, b, 0xdd)));
HPMLI_VEC_FN2(HV(interleave_low), _mm256_permute2f128_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b), 0x20));
HPMLI_VEC_FN2(HV(interleave_high), _mm256_permute2f128_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b), 0x31));
HPMLI_VEC_FN2(HV(even_quads), _mm256_permute2f128_ps(a, b, 0x20)); /* quads (four lanes) 0, 2 .. of a, of b */
HPMLI_VEC_FN2(HV(odd_quads), _mm256_permute2f128_ps(a, b, 0x31)); /* quads 1, 3 .. of a, of b */
HPMLI_VEC_INLINE void HV(sum4)(float *out, HV(f32) a, HV(f32) b, HV(f32) c, HV(f32) d)
{
    __m256 s = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1)));
}
HPMLI_VEC_INLINE uint32_t HV(sign_bits)(HV(f32) a)
{
    return (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(a, _mm256_setzero_ps(), _CMP_GE_OQ));
}
HPMLI_VEC_INLINE HV(f32) HV(select_bits)(uint32_t m, HV(f32) a, HV(f32) b)
{
    __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    __m256i on  = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32((int)m), bit), bit);
    return _mm256_blendv_ps(b, a, _mm256_castsi256_ps(on));
}
HPMLI_VEC_INLINE __m128i HV(low_halves)(HV(u32) u) /* returns the low 16 bits of each lane */
{
    return _mm256_castsi256_si128(_mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)u, (__m256i)u), 0x08));
}
HPMLI_VEC_INLINE HV(u32) HV(set_u64_pairs)(int64_t a, int64_t b) { return (HV(u32))_mm256_set_epi64x(b, a, b, a); }
#elif HPMLI_ISA == HPMLI_AVX512
HPMLI_VEC_INLINE __mmask16 HV(lane_mask)(int64_t n) { return (__mmask16)((1u << n) - 1); }
HPMLI_VEC_INLINE HV(f32) HV(load_partial)(const float *p, int64_t n)
{
    return _mm512_maskz_loadu_ps(HV(lane_mask)(n), p);
}
HPMLI_VEC_INLINE void HV(store_partial)(float *p, HV(f32) a, int64_t n)
{
    _mm512_mask_storeu_ps(p, HV(lane_mask)(n), a);
}
HPMLI_VEC_FN1(HV(round), _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
/* HPMLI_PICK(n0, n1, ..): lane i of the result is lane ni of a, or, for ni >= 16, lane ni - 16 of b. */
#define HPMLI_PICK(...) _mm512_permutex2var_ps(a, _mm512_setr_epi32(__VA_ARGS__), b)
HPMLI_VEC_FN2(HV(even_lanes), HPMLI_PICK(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30));
HPMLI_VEC_FN2(HV(odd_lanes), HPMLI_PICK(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31));
HPMLI_VEC_FN2(HV(interleave_low), HPMLI_PICK(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23));
HPMLI_VEC_FN2(HV(interleave_high), HPMLI_PICK(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31));
HPMLI_VEC_FN2(HV(even_quads), _mm512_shuffle_f32x4(a, b, 0x88));
HPMLI_VEC_FN2(HV(odd_quads), _mm512_shuffle_f32x4(a, b, 0xdd));
HPMLI_VEC_INLINE void HV(sum4)(float *out, HV(f32) a, HV(f32) b, HV(f32) c, HV(f32) d)
{
    __m512 ab = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    __m512 cd = _mm512_add_ps(_mm512_shuffle_f32x4(c, d, 0x44), _mm512_shuffle_f32x4(c, d, 0xee));
    __m512 s  = _mm512_add_ps(HV(even_quads)(ab, cd), HV(odd_quads)(ab, cd));
    s = _mm512_add_ps(s, _mm512_permute_ps(s, 0x4e)); /* s has a quad for each of a, b, c, d: add the quad's lanes */
    s = _mm512_add_ps(s, _mm512_permute_ps(s, 0xb1));
    _mm_storeu_ps(out, _mm512_castps512_ps128(_mm512_maskz_compress_ps(0x1111, s)));
}
HPMLI_VEC_INLINE uint32_t HV(sign_bits)(HV(f32) a) { return _mm512_cmp_ps_mask(a, _mm512_setzero_ps(), _CMP_GE_OQ); }
HPMLI_VEC_INLINE HV(f32) HV(select_bits)(uint32_t m, HV(f32) a, HV(f32) b)
{
    return _mm512_mask_blend_ps((__mmask16)m, b, a);
}
HPMLI_VEC_INLINE __m256i HV(low_halves)(HV(u32) u) { return _mm512_cvtepi32_epi16((__m512i)u); }
HPMLI_VEC_INLINE HV(u32) HV(set_u64_pairs)(int64_t a, int64_t b) { return (HV(u32))_mm512_set4_epi64(b, a, b, a); }
#endif

#ifdef HPMLI_MM
HPMLI_VEC_INLINE HV(f32) HV(set1)(float x) { return HPMLI_MM(set1_ps)(x); }
HPMLI_VEC_FN3(HV(fma), HPMLI_MM(fmadd_ps)(a, b, c));
HPMLI_VEC_FN3(HV(fnma), HPMLI_MM(fnmadd_ps)(a, b, c));
HPMLI_VEC_FN2(HV(max), HPMLI_MM(max_ps)(a, b));
HPMLI_VEC_FN2(HV(min), HPMLI_MM(min_ps)(a, b));
HPMLI_VEC_FN1(HV(sqrt), HPMLI_MM(sqrt_ps)(a));
HPMLI_VEC_FN4(HV(if_ge), HPMLI_MM_WHERE(a, _CMP_GE_OQ, b, x, y));
HPMLI_VEC_FN4(HV(if_gt), HPMLI_MM_WHERE(a, _CMP_GT_OQ, b, x, y));
HPMLI_VEC_FN4(HV(if_eq), HPMLI_MM_WHERE(a, _CMP_EQ_OQ, b, x, y));
HPMLI_VEC_INLINE HV(f32) HV(from_i32)(HV(u32) u) { return HPMLI_MM(cvtepi32_ps)((HPMLI_MM_ALL)u); }
HPMLI_VEC_INLINE HPMLI_MM_HALF HV(load_half)(const uint16_t *p) { HPMLI_MM_HALF h; memcpy(&h, p, sizeof h); return h; }
HPMLI_VEC_INLINE void HV(store_half)(uint16_t *p, HPMLI_MM_HALF h) { memcpy(p, &h, sizeof h); }
HPMLI_VEC_INLINE HV(u32) HV(widen)(const uint16_t *p) { return (HV(u32))HPMLI_MM(cvtepu16_epi32)(HV(load_half)(p)); }
HPMLI_VEC_INLINE void HV(narrow)(uint16_t *p, HV(u32) u) { HV(store_half)(p, HV(low_halves)(u)); }
HPMLI_VEC_INLINE HV(f32) HV(load_f16)(const uint16_t *p) { return HPMLI_MM(cvtph_ps)(HV(load_half)(p)); }
HPMLI_VEC_INLINE void HV(store_f16)(uint16_t *p, HV(f32) a)
{
    HV(store_half)(p, HPMLI_MM(cvtps_ph)(a, _MM_FROUND_TO_NEAREST_INT));
}
HPMLI_VEC_INLINE void HV(store_i32)(int32_t *p, HV(f32) a)
{
    HV(f32) i = HV(as_floats)((HV(u32))HPMLI_MM(cvtps_epi32)(a)); /* out of range: INT32_MIN */
    i = HV(if_ge)(a, HV(set1)(2147483648.0f), HV(as_floats)((HV(u32))HPMLI_MM(set1_epi32)(INT32_MAX)), i);
    i = HV(if_eq)(a, a, i, HV(set1)(0));
    memcpy(p, &i, sizeof i);
}
#if HPMLI_ISA == HPMLI_AVX512
HPMLI_VEC_INLINE HV(f32) HV(load_u32)(const uint32_t *p) { return _mm512_cvtepu32_ps((__m512i)HV(load_words)(p)); }
#else
HPMLI_VEC_INLINE HV(f32) HV(load_u32)(const uint32_t *p) /* top 24 bits x 256 + low 8 bits, rounded once */
{
    HV(u32) words = HV(load_words)(p);
    return HV(fma)(HV(from_i32)(words >> 8), HV(set1)(256), HV(from_i32)(words & 255u));
}
#endif
HPMLI_VEC_INLINE HV(u32) HV(philox_products)(HV(u32) c, HV(u32) m)
{
    HPMLI_MM_ALL products = HPMLI_MM(mul_epu32)((HPMLI_MM_ALL)c, (HPMLI_MM_ALL)m);
    return (HV(u32))HPMLI_MM(shuffle_epi32)(products, (_MM_PERM_ENUM)0x1b);
}
/* In each 2 * half vectors of r, vector i of the first half gets the even quads (of four lanes) of vectors i of both
   halves, vector i of the second half their odd quads. */
HPMLI_VEC_INLINE void HV(exchange_quads)(HV(f32) *r, const int half)
{
    HV(f32) t[HV_LANES];
    HPMLI_UNROLL
    for (int i = 0; i < HV_LANES; i++)
        t[i] = i / half % 2 ? HV(odd_quads)(r[i - half], r[i]) : HV(even_quads)(r[i], r[i + half]);
    HPMLI_UNROLL
    for (int i = 0; i < HV_LANES; i++) r[i] = t[i];
}
/* Transposes HV_LANES rows of HV_LANES floats in registers: out[p * out_row + j] = in[j * in_row + p], or 0 for j >=
   rows. Each square of 4 x 4 floats is transposed first, then the squares are exchanged. */
HPMLI_VEC_INLINE void HV(transpose)(const float *in, int64_t in_row, int64_t rows, float *out, int64_t out_row)
{
    HV(f32) r[HV_LANES], t[HV_LANES];
    HPMLI_UNROLL
    for (int i = 0; i < HV_LANES; i++) r[i] = i < rows ? HV(load)(in + i * in_row) : HV(set1)(0);
    HPMLI_UNROLL
    for (int i = 0; i < HV_LANES; i += 2) {
        t[i]     = HPMLI_MM(unpacklo_ps)(r[i], r[i + 1]);
        t[i + 1] = HPMLI_MM(unpackhi_ps)(r[i], r[i + 1]);
    }
    HPMLI_UNROLL
    for (int i = 0; i < HV_LANES; i += 4) {
        r[i]     = HPMLI_MM(shuffle_ps)(t[i], t[i + 2], 0x44);
        r[i + 1] = HPMLI_MM(shuffle_ps)(t[i], t[i + 2], 0xee);
        r[i + 2] = HPMLI_MM(shuffle_ps)(t[i + 1], t[i + 3], 0x44);
        r[i + 3] = HPMLI_MM(shuffle_ps)(t[i + 1], t[i + 3], 0xee);
    }
    HV(exchange_quads)(r, 4);
    if (HV_LANES > 8) HV(exchange_quads)(r, 8);
    HPMLI_UNROLL
    for (int i = 0; i < HV_LANES; i++) HV(store)(out + i * out_row, r[i]);
}
#endif
#pragma GCC diagnostic pop

// ---------------------------------------------------------------------------------------------------------------------
// >>simd-neon   vectors: NEON; operations made of others, for all instruction sets
// ---------------------------------------------------------------------------------------------------------------------
#if HPMLI_ISA == HPMLI_NEON
HPMLI_VEC_INLINE HV(f32) HV(set1)(float x) { return vdupq_n_f32(x); }
HPMLI_VEC_INLINE HV(f32) HV(load_partial)(const float *p, int64_t n)
{
    float t[4] = { 0, 0, 0, 0 };
    for (int64_t i = 0; i < n; i++) t[i] = p[i];
    return HV(load)(t);
}
HPMLI_VEC_INLINE void HV(store_partial)(float *p, HV(f32) a, int64_t n)
{
    float t[4];
    HV(store)(t, a);
    for (int64_t i = 0; i < n; i++) p[i] = t[i];
}
HPMLI_VEC_FN3(HV(fma), vfmaq_f32(c, a, b));
HPMLI_VEC_FN3(HV(fnma), vfmsq_f32(c, a, b));
HPMLI_VEC_FN1(HV(sqrt), vsqrtq_f32(a));
HPMLI_VEC_FN1(HV(round), vrndnq_f32(a));
HPMLI_VEC_FN4(HV(if_ge), vbslq_f32(vcgeq_f32(a, b), x, y));
HPMLI_VEC_FN4(HV(if_gt), vbslq_f32(vcgtq_f32(a, b), x, y));
HPMLI_VEC_FN4(HV(if_eq), vbslq_f32(vceqq_f32(a, b), x, y));
HPMLI_VEC_FN2(HV(max), HV(if_gt)(a, b, a, b)); /* vmaxq_f32 would give a NaN for a NaN in a */
HPMLI_VEC_FN2(HV(min), HV(if_gt)(b, a, a, b));
HPMLI_VEC_FN2(HV(even_lanes), vuzp1q_f32(a, b));
HPMLI_VEC_FN2(HV(odd_lanes), vuzp2q_f32(a, b));
HPMLI_VEC_FN2(HV(interleave_low), vzip1q_f32(a, b));
HPMLI_VEC_FN2(HV(interleave_high), vzip2q_f32(a, b));
HPMLI_VEC_INLINE float HV(sum_lanes)(HV(f32) a)
{
    float32x2_t s = vadd_f32(vget_low_f32(a), vget_high_f32(a));
    return vget_lane_f32(s, 0) + vget_lane_f32(s, 1);
}
HPMLI_VEC_INLINE void HV(sum4)(float *out, HV(f32) a, HV(f32) b, HV(f32) c, HV(f32) d)
{
    HV(store)(out, vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d)));
}
HPMLI_VEC_INLINE float HV(max_lane)(HV(f32) a) { return vmaxvq_f32(a); }
static const uint32_t hpmli_lane_bit[4] = { 1, 2, 4, 8 };
HPMLI_VEC_INLINE uint32_t HV(sign_bits)(HV(f32) a)
{
    return vaddvq_u32(vandq_u32(vcgeq_f32(a, vdupq_n_f32(0)), vld1q_u32(hpmli_lane_bit)));
}
HPMLI_VEC_INLINE HV(f32) HV(select_bits)(uint32_t m, HV(f32) a, HV(f32) b)
{
    return vbslq_f32(vtstq_u32(vdupq_n_u32(m), vld1q_u32(hpmli_lane_bit)), a, b);
}
HPMLI_VEC_INLINE HV(f32) HV(from_i32)(HV(u32) u) { return vcvtq_f32_s32(vreinterpretq_s32_u32(u)); }
HPMLI_VEC_INLINE HV(f32) HV(load_u32)(const uint32_t *p) { return vcvtq_f32_u32(HV(load_words)(p)); }
HPMLI_VEC_INLINE HV(u32) HV(widen)(const uint16_t *p) { return vmovl_u16(vld1_u16(p)); }
HPMLI_VEC_INLINE void HV(narrow)(uint16_t *p, HV(u32) u) { vst1_u16(p, vmovn_u32(u)); }
HPMLI_VEC_INLINE HV(f32) HV(load_f16)(const uint16_t *p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
HPMLI_VEC_INLINE void HV(store_f16)(uint16_t *p, HV(f32) a) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(a))); }
HPMLI_VEC_INLINE HV(f32) HV(load_u8)(const uint8_t *p)
{
    uint32_t t[4];
    for (int i = 0; i < 4; i++) t[i] = p[i];
    return vcvtq_f32_u32(vld1q_u32(t));
}
HPMLI_VEC_INLINE void HV(store_i32)(int32_t *p, HV(f32) a) { vst1q_s32(p, vcvtnq_s32_f32(a)); } /* saturates; NaN: 0 */
HPMLI_VEC_INLINE HV(u32) HV(set_u64_pairs)(int64_t a, int64_t b)
{
    return (HV(u32))vcombine_u64(vcreate_u64((uint64_t)a), vcreate_u64((uint64_t)b));
}
HPMLI_VEC_INLINE HV(u32) HV(philox_products)(HV(u32) c, HV(u32) m)
{
    HV(u32) products = vrev64q_u32((HV(u32))vmull_u32(vmovn_u64((HV(u64))c), vmovn_u64((HV(u64))m)));
    return vextq_u32(products, products, 2);
}
#endif

#ifndef HPMLI_MM /* scalar and NEON transpose one number after the other; the result is that of >>simd-x86 */
HPMLI_VEC_INLINE void HV(transpose)(const float *in, int64_t in_row, int64_t rows, float *out, int64_t out_row)
{
    for (int64_t j = 0; j < HV_LANES; j++)
        for (int64_t p = 0; p < HV_LANES; p++) out[p * out_row + j] = j < rows ? in[j * in_row + p] : 0;
}
#endif

HPMLI_VEC_INLINE HV(f32) HV(zero)(void) { return HV(set1)(0); }
HPMLI_VEC_FN1(HV(exponent), HV(from_i32)(HV(as_words)(a) >> 23 & 255u) - 127.0f);
/* Returns 2^a for integers a: adding 2^23 + 127 puts a + 127 into the last bits of the sum, and the shift moves these
   bits to the place of the exponent. */
HPMLI_VEC_FN1(HV(pow2i), HV(as_floats)(HV(as_words)(a + (8388608.0f + 127.0f)) << 23));
HPMLI_VEC_INLINE HV(f32) HV(load_i32)(const int32_t *p) { return HV(from_i32)(HV(load_words)((const uint32_t *)p)); }
HPMLI_VEC_INLINE HV(f32) HV(load_bf16)(const uint16_t *p) { return HV(as_floats)(HV(widen)(p) << 16); }
HPMLI_VEC_INLINE void HV(store_bf16)(uint16_t *p, HV(f32) a) /* rounds to nearest, ties to even; a NaN stays NaN */
{
    HV(u32) u = HV(as_words)(a), rounded = u + 0x7fffu + (u >> 16 & 1u), nan = u | 0x400000u;
    HV(narrow)(p, HV(as_words)(HV(if_eq)(a, a, HV(as_floats)(rounded), HV(as_floats)(nan))) >> 16);
}
HPMLI_VEC_INLINE void HV(store_u8)(uint8_t *p, HV(f32) a)
{
    int32_t t[HV_LANES];
    HV(store_i32)(t, HV(min)(HV(max)(a, HV(zero)()), HV(set1)(255)));
    for (int i = 0; i < HV_LANES; i++) p[i] = (uint8_t)t[i];
}

HPMLI_VEC_INLINE HV(f32) HV(zero_beyond)(HV(f32) v, int64_t n) /* returns v with 0 in lanes n and above, as load_upto */
{
    return n >= HV_LANES ? v : HV(select_bits)((1u << n) - 1, v, HV(zero)());
}
HPMLI_VEC_INLINE HV(f32) HV(load_upto)(const float *p, int64_t n) /* loads the first n lanes; n >= HV_LANES: all */
{
    return n >= HV_LANES ? HV(load)(p) : HV(load_partial)(p, n);
}
HPMLI_VEC_INLINE void HV(store_upto)(float *p, HV(f32) a, int64_t n) /* stores the first n lanes; n >= HV_LANES: all */
{
    if (n >= HV_LANES) HV(store)(p, a);
    else HV(store_partial)(p, a, n);
}
/* Defines load_upto_TYPE and store_upto_TYPE, which convert numbers of that type at p to floats and back: the first
   min(n, HV_LANES) numbers. Fewer than HV_LANES are copied through a buffer, so that the same instruction converts
   them. */
#define HPMLI_LOAD_STORE_UPTO(type, T)                                                                                 \
    HPMLI_VEC_INLINE HV(f32) HV(load_upto_##type)(const T *p, int64_t n)                                               \
    {                                                                                                                  \
        T t[HV_LANES];                                                                                                 \
        if (__builtin_expect(n >= HV_LANES, 1)) return HV(load_##type)(p);                                             \
        for (int64_t i = 0; i < HV_LANES; i++) t[i] = i < n ? p[i] : 0;                                                \
        return HV(load_##type)(t);                                                                                     \
    }                                                                                                                  \
    HPMLI_VEC_INLINE void HV(store_upto_##type)(T *p, HV(f32) a, int64_t n)                                            \
    {                                                                                                                  \
        T t[HV_LANES];                                                                                                 \
        if (__builtin_expect(n >= HV_LANES, 1)) {                                                                      \
            HV(store_##type)(p, a);                                                                                    \
            return;                                                                                                    \
        }                                                                                                              \
        HV(store_##type)(t, a);                                                                                        \
        for (int64_t i = 0; i < n; i++) p[i] = t[i];                                                                   \
    }                                                                                                                  \
    static inline void HV(store_upto_##type)(T *p, HV(f32) a, int64_t n)
HPMLI_LOAD_STORE_UPTO(bf16, uint16_t);
HPMLI_LOAD_STORE_UPTO(f16, uint16_t);
HPMLI_LOAD_STORE_UPTO(i32, int32_t);
HPMLI_LOAD_STORE_UPTO(u8, uint8_t);

// ---------------------------------------------------------------------------------------------------------------------
// >>vmath   exp, log, tanh, erf and the activations
// ---------------------------------------------------------------------------------------------------------------------
/* Evaluate a polynomial in x by Horner's rule, highest coefficient first, where op is a fused multiply-add: HV_POLY5
   with coefficients a to e, HV_POLY_ON with b to e after p, the value of the higher coefficients. */
#define HV_POLY5(op, x, a, b, c, d, e)    HV_POLY_ON(op, x, HV(set1)(a), b, c, d, e)
#define HV_POLY_ON(op, x, p, b, c, d, e)                                                                               \
    op(op(op(op(p, x, HV(set1)(b)), x, HV(set1)(c)), x, HV(set1)(d)), x, HV(set1)(e))
/* Returns e^x after Cody & Waite: exp(x) = 2^n exp(r), where n = round(x / ln 2) and |r| <= ln 2 / 2, and exp(r) is a
   polynomial. The error is below 2 units in the last place everywhere; a NaN stays NaN, and exp underflows to 0. */
HPMLI_VEC_INLINE HV(f32) HV(exp)(HV(f32) x)
{
    HV(f32) clamped = HV(max)(HV(min)(x, HV(set1)(88.9f)), HV(set1)(-104.0f));
    HV(f32) n       = HV(round)(clamped * 1.44269504088896341f);
    HV(f32) r       = HV(fnma)(n, HV(set1)(-2.12194440e-4f), HV(fnma)(n, HV(set1)(0.693359375f), clamped));
    HV(f32) p       = HV_POLY5(HV(fma), r, 1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f,
                          1.6666665459e-1f);
    p = HV(fma)(p, r, HV(set1)(5.0000001201e-1f));
    p = HV(fma)(p, r * r, r) + 1.0f;
    HV(f32) low = HV(round)(n * 0.5f), high = n - low; /* 2^n as two factors, because n is from -150 to 128 */
    return HV(if_eq)(x, x, p * HV(pow2i)(low) * HV(pow2i)(high), x);
}
/* The Cephes library's polynomial for log m in f = m - 1, m in [sqrt 1/2, sqrt 2): log(2^e m) = e ln 2 + log m. */
#define HPMLI_LOG_POLY(op, f)                                                                                          \
    HV_POLY_ON(op, f, HV_POLY5(op, f, 7.0376836292e-2f, -1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f,        \
               1.4249322787e-1f), -1.6668057665e-1f, 2.0000714765e-1f, -2.4999993993e-1f, 3.3333331174e-1f)
HPMLI_VEC_INLINE HV(f32) HV(log)(HV(f32) x)
{
    HV(f32) tiny = HV(set1)(1.17549435e-38f);
    HV(f32) s    = HV(if_gt)(tiny, x, x * 8388608.0f, x); /* a subnormal x is multiplied by 2^23 */
    HV(f32) e    = HV(exponent)(s) - HV(if_gt)(tiny, x, HV(set1)(23), HV(zero)());
    HV(f32) m = HV(mantissa)(s), big = HV(set1)(1.41421356f), f, z, p, y;
    e = HV(if_gt)(m, big, e + 1.0f, e);
    f = HV(if_gt)(m, big, m * 0.5f, m) - 1.0f;
    z = f * f;
    p = HPMLI_LOG_POLY(HV(fma), f);
    y = p * f * z;
    y = HV(fma)(e, HV(set1)(-2.12194440e-4f), y);
    y = HV(fma)(z, HV(set1)(-0.5f), y);
    y = HV(fma)(e, HV(set1)(0.693359375f), f + y);
    y = HV(if_eq)(x, HV(set1)(INFINITY), x, y);
    y = HV(if_eq)(x, HV(zero)(), HV(set1)(-INFINITY), y);
    return HV(if_ge)(x, HV(zero)(), y, HV(set1)(NAN));
}
HPMLI_VEC_INLINE HV(f32) HV(sigmoid)(HV(f32) x) { return 1.0f / (1.0f + HV(exp)(-x)); }
/* Returns tanh x: a polynomial for |x| < 0.625, elsewhere 1 - 2 / (exp(2|x|) + 1) with the sign of x. */
HPMLI_VEC_INLINE HV(f32) HV(tanh)(HV(f32) x)
{
    HV(f32) a = HV(abs)(x), z = x * x, far;
    HV(f32) p = HV_POLY5(HV(fma), z, -5.70498872745e-3f, 2.06390887954e-2f, -5.37397155531e-2f, 1.33314422036e-1f,
                    -3.33332819422e-1f);
    p = HV(fma)(p * z, x, x);
    far = 1.0f - 2.0f / (HV(exp)(a + a) + 1.0f);
    far = HV(if_ge)(x, HV(zero)(), far, -far);
    return HV(if_ge)(a, HV(set1)(0.625f), far, p);
}
/* Returns erf x: its series for |x| < 0.5, elsewhere Abramowitz & Stegun 7.1.26; the absolute error is below 3e-7. */
HPMLI_VEC_INLINE HV(f32) HV(erf)(HV(f32) x)
{
    HV(f32) a = HV(abs)(x), z = x * x, t, p, far, near_;
    t = 1.0f / HV(fma)(a, HV(set1)(0.3275911f), HV(set1)(1));
    p = HV_POLY5(HV(fma), t, 1.061405429f, -1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f);
    far = HV(fnma)(p * t, HV(exp)(-z), HV(set1)(1));
    far = HV(if_ge)(x, HV(zero)(), far, -far);
    p = HV_POLY5(HV(fma), z, -8.5483270e-4f, 5.2239776e-3f, -2.6866170e-2f, 1.1283792e-1f,
                 -3.7612639e-1f); /* coefficients 2 / sqrt(pi) (-1)^k / (k! (2k + 1)) */
    near_ = HV(fma)(p, z, HV(set1)(1.1283792f)) * x;
    return HV(if_gt)(HV(set1)(0.5f), a, near_, far);
}
/* Returns t of gelu's tanh form x / 2 (1 + t), where t = tanh(u) and u = sqrt(2/pi) (x + 0.044715 x^3). */
HPMLI_VEC_INLINE HV(f32) HV(gelu_tanh)(HV(f32) x)
{
    HV(f32) cubic = HV(fma)(x * x * x, HV(set1)(0.044715f), x);
    return HV(tanh)(cubic * 0.79788456080286535588f);
}
HPMLI_VEC_INLINE HV(f32) HV(gelu_derivative)(HV(f32) x)
{
    HV(f32) t  = HV(gelu_tanh)(x);
    HV(f32) du = HV(fma)(x * x, HV(set1)(0.79788456080286535588f * 3 * 0.044715f), HV(set1)(0.79788456080286535588f));
    HV(f32) dt = HV(fnma)(t, t, HV(set1)(1)) * du;
    return 0.5f * (1.0f + t + x * dt);
}
HPMLI_VEC_INLINE HV(f32) HV(normal_cdf)(HV(f32) x) { return 0.5f * (1.0f + HV(erf)(x * 0.70710678118654752f)); }
HPMLI_VEC_INLINE HV(f32) HV(normal_pdf)(HV(f32) x) { return 0.39894228040143268f * HV(exp)(x * x * -0.5f); }
HPMLI_VEC_INLINE HV(f32) HV(silu_derivative)(HV(f32) x)
{
    HV(f32) s = HV(sigmoid)(x);
    return s * HV(fma)(x, 1.0f - s, HV(set1)(1));
}
/* The activations: X(name, y = f(x), dy/dx in terms of x or y, the cheaper). s: leaky relu's factor for x < 0. */
#define HPMLI_ACTS(X)                                                                                                  \
    X(NONE, x, HV(set1)(1))                                                                                            \
    X(RELU, HV(if_gt)(x, HV(zero)(), x, HV(if_eq)(x, x, HV(zero)(), x)),                                               \
      HV(if_gt)(y, HV(zero)(), HV(set1)(1), HV(zero)()))                                                               \
    X(LEAKY_RELU, HV(if_gt)(x, HV(zero)(), x, x * s), HV(if_gt)(y, HV(zero)(), HV(set1)(1), s))                        \
    X(GELU, x * 0.5f * (1.0f + HV(gelu_tanh)(x)), HV(gelu_derivative)(x))                                              \
    X(GELU_ERF, x * HV(normal_cdf)(x), HV(fma)(x, HV(normal_pdf)(x), HV(normal_cdf)(x)))                               \
    X(SILU, x * HV(sigmoid)(x), HV(silu_derivative)(x))                                                                \
    X(SIGMOID, HV(sigmoid)(x), y * (1.0f - y))                                                                         \
    X(TANH, HV(tanh)(x), HV(fnma)(y, y, HV(set1)(1)))                                                                  \
    X(EXP, HV(exp)(x), y)                                                                                              \
    X(LOG, HV(log)(x), 1.0f / x)                                                                                       \
    X(SQRT, HV(sqrt)(x), 0.5f / y)                                                                                     \
    X(SQUARE, x * x, x + x)                                                                                            \
    X(NEG, -x, HV(set1)(-1))                                                                                           \
    X(ABS, HV(abs)(x), HV(if_gt)(x, HV(zero)(), HV(set1)(1), HV(if_gt)(HV(zero)(), x, HV(set1)(-1), HV(zero)())))

HPMLI_KERNEL void HV(act_forward)(hpml_act act, float slope, float *to, const float *from, int64_t n)
{
    HV(f32) s = HV(set1)(slope);
    switch (act) {
#define HPMLI_ACT_CASE(name, f, df)                                                                                    \
    case HPML_ACT_##name:                                                                                              \
        HV_LOOP(n) {                                                                                                   \
            HV(f32) x = HV(load_upto)(from + i, c);                                                                    \
            HV(store_upto)(to + i, f, c);                                                                              \
        }                                                                                                              \
        break;
        HPMLI_ACTS(HPMLI_ACT_CASE)
    }
}

HPMLI_KERNEL void HV(act_backward)(hpml_act act, float slope, float *dx, const float *dy, const float *xs,
                                   const float *ys, int64_t n, int accumulate)
{
    HV(f32) s = HV(set1)(slope);
    if (!xs) xs = dy; /* any address that can be read */
    if (!ys) ys = dy;
    switch (act) {
#define HPMLI_ACT_BACK_CASE(name, f, df)                                                                               \
    case HPML_ACT_##name:                                                                                              \
        HV_LOOP(n) {                                                                                                   \
            HV(f32) x = HV(load_upto)(xs + i, c), y = HV(load_upto)(ys + i, c);                                        \
            HV(f32) d = HV(load_upto)(dy + i, c) * (df);                                                               \
            if (accumulate) d += HV(load_upto)(dx + i, c);                                                             \
            HV(store_upto)(dx + i, d, c);                                                                              \
            (void)x;                                                                                                   \
            (void)y;                                                                                                   \
        }                                                                                                              \
        break;
        HPMLI_ACTS(HPMLI_ACT_BACK_CASE)
    }
}

#define HPMLI_ELEMENTWISE(name, op)                                                                                    \
    HPMLI_KERNEL void HV(v##name)(float *y, const float *a, const float *b, int64_t n)                                 \
    {                                                                                                                  \
        HV_LOOP(n) HV(store_upto)(y + i, HV(load_upto)(a + i, c) op HV(load_upto)(b + i, c), c);                       \
    }                                                                                                                  \
    static void HV(v##name)(float *y, const float *a, const float *b, int64_t n)
HPMLI_ELEMENTWISE(add, +);
HPMLI_ELEMENTWISE(sub, -);
HPMLI_ELEMENTWISE(mul, *);
HPMLI_ELEMENTWISE(div, /);
HPMLI_KERNEL void HV(vfill)(float *y, float value, int64_t n) { HV_LOOP(n) HV(store_upto)(y + i, HV(set1)(value), c); }
HPMLI_KERNEL void HV(vaxpby)(float *y, float a, const float *x, float b, int64_t n) /* y = a x + b y; b 0: y not read */
{
    HV(f32) va = HV(set1)(a), vb = HV(set1)(b);
    if (b == 0) HV_LOOP(n) HV(store_upto)(y + i, va * HV(load_upto)(x + i, c), c);
    else HV_LOOP(n) HV(store_upto)(y + i, HV(fma)(va, HV(load_upto)(x + i, c), vb * HV(load_upto)(y + i, c)), c);
}
HPMLI_KERNEL void HV(vscale_add)(float *y, const float *x, float a, float b, int64_t n) /* y = a x + b */
{
    HV(f32) va = HV(set1)(a), vb = HV(set1)(b);
    HV_LOOP(n) HV(store_upto)(y + i, HV(fma)(va, HV(load_upto)(x + i, c), vb), c);
}
/* Computes y = a (x - centre) + b; if `relu`, then max(y, 0). The centre is subtracted first, because the products
   a * x and a * centre have rounding errors in proportion to the centre, which their difference would keep. */
HPMLI_KERNEL void HV(vcentred)(float *y, const float *x, float centre, float a, float b, bool relu, int64_t n)
{
    HV(f32) va = HV(set1)(a), vb = HV(set1)(b), vc = HV(set1)(centre);
    if (relu) HV_LOOP(n) HV(store_upto)(y + i, HV(max)(HV(zero)(), HV(fma)(va, HV(load_upto)(x + i, c) - vc, vb)), c);
    else HV_LOOP(n) HV(store_upto)(y + i, HV(fma)(va, HV(load_upto)(x + i, c) - vc, vb), c);
}
HPMLI_KERNEL void HV(vaxpbypc)(float *y, float a, const float *x, float b, const float *z, float centre, float constant,
                            int64_t n, int accumulate)
{
    HV(f32) va = HV(set1)(a), vb = HV(set1)(b), vz = HV(set1)(centre), vc = HV(set1)(constant);
    HV_LOOP(n) {
        HV(f32) r = HV(fma)(va, HV(load_upto)(x + i, c), HV(fma)(vb, HV(load_upto)(z + i, c) - vz, vc));
        if (accumulate) r += HV(load_upto)(y + i, c);
        HV(store_upto)(y + i, r, c);
    }
}

/* Prefetches the gates, c and h of row r + 2, T time steps away: too far for the prefetcher of the CPU. */
HPMLI_VEC_INLINE void HV(lstm_prefetch)(const hpmli_lstm_cells *s, int64_t r)
{
    const int64_t at = (r + 2) * s->T * s->H;
    if (r + 2 >= s->rows) return;
    for (int64_t i = 0; i < s->units; i += 16) {
        for (int64_t gate = 0; gate < 4; gate++) __builtin_prefetch(s->gates + 4 * at + gate * s->H + i, 1);
        __builtin_prefetch(s->cells + at + i, 1);
        __builtin_prefetch(s->h + at + i, 1);
    }
}
/* Computes c = f c_before + i g and h = o tanh(c), with gates from the sum of bias and the products with x and h. */
HPMLI_KERNEL void HV(lstm_cells)(const hpmli_lstm_cells *s)
{
    const int64_t H = s->H, units = s->units;
    for (int64_t r = 0; r < s->rows; r++) {
        float       *a = s->gates + r * s->T * 4 * H, *cell = s->cells + r * s->T * H, *h = s->h + r * s->T * H;
        const float *sums = s->sums + r * 4 * units, *bias = s->bias;
        HV(lstm_prefetch)(s, r);
        HV_LOOP(units) {
            HV(f32) in     = HV(load_upto)(a + i, c) + HV(load_upto)(bias + i, c);
            HV(f32) forget = HV(load_upto)(a + H + i, c) + HV(load_upto)(bias + H + i, c);
            HV(f32) g      = HV(load_upto)(a + 2 * H + i, c) + HV(load_upto)(bias + 2 * H + i, c);
            HV(f32) out    = HV(load_upto)(a + 3 * H + i, c) + HV(load_upto)(bias + 3 * H + i, c);
            if (!s->first) {
                in += HV(load_upto)(sums + i, c);
                forget += HV(load_upto)(sums + units + i, c);
                g += HV(load_upto)(sums + 2 * units + i, c);
                out += HV(load_upto)(sums + 3 * units + i, c);
            }
            in     = HV(sigmoid)(in);
            forget = HV(sigmoid)(forget);
            g      = HV(tanh)(g);
            out    = HV(sigmoid)(out);
            HV(f32) now = in * g;
            if (!s->first) now = HV(fma)(forget, HV(load_upto)(cell - H + i, c), now);
            HV(f32) y = out * HV(tanh)(now);
            HV(store_upto)(a + i, in, c);
            HV(store_upto)(a + H + i, forget, c);
            HV(store_upto)(a + 2 * H + i, g, c);
            HV(store_upto)(a + 3 * H + i, out, c);
            HV(store_upto)(cell + i, now, c);
            HV(store_upto)(h + i, y, c);
            HV(store_upto)(s->next + r * H + i, y, c);
        }
    }
}
/* Stores v, derivatives of gate number `gate` of row r, as da and as its copy. */
HPMLI_VEC_INLINE void HV(lstm_store)(const hpmli_lstm_cells *s, int64_t r, int gate, int64_t i, HV(f32) v, int64_t c)
{
    HV(store_upto)(s->gates + (r * s->T * 4 + gate) * s->H + i, v, c);
    HV(store_upto)(s->next + (r * 4 + gate) * s->H + i, v, c);
}
/* Computes da and dc from dh, the gradient of h: sigmoid'(x) = s (1 - s) with s = sigmoid(x), tanh' = 1 - tanh^2. */
HPMLI_KERNEL void HV(lstm_cells_back)(const hpmli_lstm_cells *s)
{
    const int64_t H   = s->H;
    const HV(f32) one = HV(set1)(1);
    for (int64_t r = 0; r < s->rows; r++) {
        const float *a = s->gates + r * s->T * 4 * H, *cell = s->cells + r * s->T * H, *dy = s->h + r * s->T * H;
        float       *dc = s->dc + r * H;
        HV(lstm_prefetch)(s, r);
        HV_LOOP(s->units) {
            HV(f32) in = HV(load_upto)(a + i, c), forget = HV(load_upto)(a + H + i, c);
            HV(f32) g = HV(load_upto)(a + 2 * H + i, c), out = HV(load_upto)(a + 3 * H + i, c);
            HV(f32) t = HV(tanh)(HV(load_upto)(cell + i, c)), dh = HV(load_upto)(dy + i, c), dcell = HV(zero)();
            if (!s->last) {
                dh += HV(load_upto)(s->sums + r * s->units + i, c);
                dcell = HV(load_upto)(dc + i, c);
            }
            dcell = HV(fma)(dh * out, HV(fnma)(t, t, one), dcell);
            HV(store_upto)(dc + i, dcell * forget, c);
            HV(f32) before = s->first ? HV(zero)() : HV(load_upto)(cell - H + i, c);
            HV(lstm_store)(s, r, 0, i, dcell * g * in * (one - in), c);
            HV(lstm_store)(s, r, 1, i, dcell * before * forget * (one - forget), c);
            HV(lstm_store)(s, r, 2, i, dcell * in * HV(fnma)(g, g, one), c);
            HV(lstm_store)(s, r, 3, i, dh * t * out * (one - out), c);
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// >>vreduce   sums, maxima, norms
// ---------------------------------------------------------------------------------------------------------------------
/* Sums have four independent accumulators, to hide the latency of an addition, added up in a fixed order. The `_wide`
   sums and vmoments add the sum of each HPMLI_BLOCK_SUM elements to a double, for statistics over long arrays. */
#define HPMLI_BLOCK_SUM 1024
/* Defines a function that sums n elements: `term` is the accumulator `sum` plus the c elements from index `at` on. */
#define HPMLI_REDUCE(name, params, term)                                                                               \
    HPMLI_KERNEL float HV(name) params                                                                                 \
    {                                                                                                                  \
        HV(f32) s[4] = { HV(zero)(), HV(zero)(), HV(zero)(), HV(zero)() };                                             \
        int64_t i    = 0;                                                                                              \
        for (; i + 4 * HV_LANES <= n; i += 4 * HV_LANES) {                                                             \
            HPMLI_UNROLL                                                                                               \
            for (int u = 0; u < 4; u++) {                                                                              \
                const int64_t c = HV_LANES, at = i + u * HV_LANES;                                                     \
                const HV(f32) sum = s[u];                                                                              \
                s[u] = term;                                                                                           \
            }                                                                                                          \
        }                                                                                                              \
        for (; i < n; i += HV_LANES) {                                                                                 \
            const int64_t c = n - i < HV_LANES ? n - i : HV_LANES, at = i;                                             \
            const HV(f32) sum = s[0];                                                                                  \
            s[0] = term;                                                                                               \
        }                                                                                                              \
        return HV(sum_lanes)((s[0] + s[1]) + (s[2] + s[3]));                                                           \
    }                                                                                                                  \
    static float HV(name) params
HPMLI_REDUCE(vsum, (const float *x, int64_t n), sum + HV(load_upto)(x + at, c));
HPMLI_REDUCE(vdot, (const float *a, const float *b, int64_t n),
             HV(fma)(HV(load_upto)(a + at, c), HV(load_upto)(b + at, c), sum));

#define HPMLI_REDUCE_WIDE(name, params, block_sum)                                                                     \
    HPMLI_KERNEL double HV(name) params                                                                                \
    {                                                                                                                  \
        double sum = 0;                                                                                                \
        for (int64_t i = 0; i < n; i += HPMLI_BLOCK_SUM) {                                                             \
            int64_t c = n - i < HPMLI_BLOCK_SUM ? n - i : HPMLI_BLOCK_SUM;                                             \
            sum += (double)block_sum;                                                                                  \
        }                                                                                                              \
        return sum;                                                                                                    \
    }                                                                                                                  \
    static double HV(name) params
HPMLI_REDUCE_WIDE(vsum_wide, (const float *x, int64_t n), HV(vsum)(x + i, c));
HPMLI_REDUCE_WIDE(vdot_wide, (const float *a, const float *b, int64_t n), HV(vdot)(a + i, b + i, c));
/* Adds the sum of weights w to sums[0] and the sum of w d to sums[1], where d = x - centre. Not `weighted`: w = d; for
   a centre near the mean of x, sums[1] then gets the sum of squared deviations, sums[0] n times (mean - centre). */
HPMLI_VEC_INLINE void HV(add_moments)(double *sums, const bool weighted, const float *w, const float *x, float centre,
                                      int64_t n)
{
    const HV(f32) vc = HV(set1)(centre);
    for (int64_t i = 0, end; i < n; i = end) {
        HV(f32) s[4] = { HV(zero)(), HV(zero)(), HV(zero)(), HV(zero)() }, t[4] = { s[0], s[0], s[0], s[0] };
        end = n - i < HPMLI_BLOCK_SUM ? n : i + HPMLI_BLOCK_SUM;
        for (; i + 4 * HV_LANES <= end; i += 4 * HV_LANES) {
            HPMLI_UNROLL
            for (int u = 0; u < 4; u++) {
                HV(f32) d = HV(load)(x + i + u * HV_LANES) - vc, v = weighted ? HV(load)(w + i + u * HV_LANES) : d;
                s[u] = s[u] + v;
                t[u] = HV(fma)(v, d, t[u]);
            }
        }
        for (; i < end; i += HV_LANES) {
            int64_t c = end - i < HV_LANES ? end - i : HV_LANES;
            HV(f32) d = HV(zero_beyond)(HV(load_upto)(x + i, c) - vc, c), v = weighted ? HV(load_upto)(w + i, c) : d;
            s[0] = s[0] + v;
            t[0] = HV(fma)(v, d, t[0]);
        }
        sums[0] += (double)HV(sum_lanes)((s[0] + s[1]) + (s[2] + s[3]));
        sums[1] += (double)HV(sum_lanes)((t[0] + t[1]) + (t[2] + t[3]));
    }
}
HPMLI_KERNEL void HV(vmoments)(double *sums, const float *w, const float *x, float centre, int64_t n)
{
    if (w) HV(add_moments)(sums, true, w, x, centre, n);
    else HV(add_moments)(sums, false, NULL, x, centre, n);
}
HPMLI_KERNEL float HV(vmax)(const float *x, int64_t n)
{
    HV(f32) m = HV(set1)(-INFINITY);
    int64_t i = 0;
    for (; i + HV_LANES <= n; i += HV_LANES) m = HV(max)(HV(load)(x + i), m);
    float best = HV(max_lane)(m);
    for (; i < n; i++) best = x[i] > best ? x[i] : best;
    return best;
}
HPMLI_KERNEL float HV(vamax)(const float *x, int64_t n) /* returns the largest |x|; 0 for n = 0; NaN if one is NaN */
{
    HV(f32) m = HV(zero)(), nan = HV(zero)();
    HV_LOOP(n) {
        HV(f32) v = HV(abs)(HV(load_upto)(x + i, c));
        m   = HV(max)(v, m);
        nan = HV(if_eq)(v, v, nan, v);
    }
    return HV(sum_lanes)(nan) == 0 ? HV(max_lane)(m) : NAN;
}
HPMLI_KERNEL float HV(vexp_sum)(float *y, const float *x, float shift, int64_t n)
{
    HV(f32) s = HV(zero)(), vs = HV(set1)(shift);
    HV_LOOP(n) {
        HV(f32) e = HV(exp)(HV(load_upto)(x + i, c) - vs);
        HV(store_upto)(y + i, e, c);
        s += HV(zero_beyond)(e, c);
    }
    return HV(sum_lanes)(s);
}
/* Sums each column of x (rows, cols). Blocks of 64 rows are summed separately, to keep the rounding error small. */
HPMLI_KERNEL void HV(vsum_rows)(float *out, const float *x, int64_t rows, int64_t cols, int accumulate)
{
    HV_LOOP(cols) {
        HV(f32) total = HV(zero)();
        for (int64_t r0 = 0; r0 < rows; r0 += 64) {
            int64_t r = r0, end = r0 + 64 < rows ? r0 + 64 : rows;
            HV(f32) s[4] = { HV(zero)(), HV(zero)(), HV(zero)(), HV(zero)() };
            for (; r + 4 <= end; r += 4) {
                HPMLI_UNROLL
                for (int u = 0; u < 4; u++) s[u] += HV(load_upto)(x + (r + u) * cols + i, c);
            }
            for (; r < end; r++) s[0] += HV(load_upto)(x + r * cols + i, c);
            total += (s[0] + s[1]) + (s[2] + s[3]);
        }
        if (accumulate) total += HV(load_upto)(out + i, c);
        HV(store_upto)(out + i, total, c);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// >>vupdate   optimizer steps, one pass over the data
// ---------------------------------------------------------------------------------------------------------------------
/* The formulas of the built-in optimizers: those of PyTorch's optimizers of the same names. g = grad_scale gradient;
   b1, b2, c: beta1, beta2, weight_decay; t: the step, from 1; states m (first moment) and v (second) start with 0.
     SGD      g = g + c w;  m = momentum m + g (t = 1: m = g);  w = w - lr m (nesterov: lr (g + momentum m))
     Adagrad  g = g + c w;  v = v + g g;  w = w - lr g / (sqrt(v) + eps)                   Duchi et al. 2011
     RMSprop  g = g + c w;  v = b2 v + (1 - b2) g g;  m = momentum m + g / (sqrt(v) + eps);  w = w - lr m
     Adam     g = g + c w;  m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g g;  r = (m / (1 - b1^t)) /
              (sqrt(v / (1 - b2^t)) + eps);  w = w - lr r                                  Kingma & Ba 2015
     AdamW    Adam without c in g;  w = w - lr c w - lr r                                  Loshchilov & Hutter 2019
     LARS     SGD with lr 1; hpmli_lars_prepare has put the layer's rate into g and c      You et al. 2017
     LAMB     AdamW's r + c w, written over the gradient; hpmli_direction_apply steps      You et al. 2020 */

/* Collects the non-finite results of one update: weight, square and gradient are sums that are 0, or NaN once a new
   weight, a mean square or LAMB's gradient was not finite. Where a new weight is not finite, `replacement` is added to
   the old one and the sum is stored: 0 (with hpml_update.found_nonfinite) keeps the old weight, NaN stores NaN. */
typedef struct HV(update_check) { HV(f32) weight, square, gradient, replacement; } HV(update_check);
/* Stores c lanes of x, updated weights, at w; where x is not finite, stores the old weight plus f->replacement (0 or
   NaN) and makes f->weight NaN. Only x is checked, because a non-finite gradient makes x non-finite as well. */
HPMLI_VEC_INLINE void HV(store_weight)(float *w, HV(f32) x, HV(f32) old, HV(update_check) *f, int64_t c)
{
    HV(f32) nan_or_0 = x * HV(zero)();
    f->weight = f->weight + nan_or_0;
    HV(store_upto)(w, HV(if_eq)(nan_or_0, nan_or_0, x, old + f->replacement), c);
}
/* Stores c lanes of x, the optimizer's new state, with denormals set to 0, and returns x. Where all gradients are 0 (a
   dead unit) the state would decay to denormals, with which CPUs compute a hundred times slower. NaN stays NaN. */
HPMLI_VEC_INLINE HV(f32) HV(store_state)(float *state, HV(f32) x, int64_t c)
{
    x = HV(if_gt)(HV(set1)(1.17549435e-38f), HV(abs)(x), HV(set1)(0), x);
    HV(store_upto)(state, x, c);
    return x;
}
HPMLI_VEC_INLINE HV(f32) HV(update_mean)(float *state, HV(f32) g, float beta, int64_t c)
{
    return HV(store_state)(state, HV(fma)(HV(set1)(1 - beta), g, HV(set1)(beta) * HV(load_upto)(state, c)), c);
}

HPMLI_VEC_INLINE void HV(sgd)(const hpmli_opt_args *o, float *w, HV(f32) g, float *m, HV(update_check) *f, int64_t c)
{
    HV(f32) x = HV(load_upto)(w, c), step;
    g    = HV(fma)(HV(set1)(o->u.weight_decay), x, g);
    step = g;
    if (m) {
        HV(f32) v = o->u.step == 1 ? g : HV(fma)(HV(set1)(o->u.momentum), HV(load_upto)(m, c), g);
        v = HV(store_state)(m, v, c);
        step = o->u.nesterov ? HV(fma)(HV(set1)(o->u.momentum), v, g) : v;
    }
    HV(store_weight)(w, HV(fnma)(HV(set1)(o->u.lr), step, x), x, f, c);
}
HPMLI_VEC_INLINE void HV(adagrad)(const hpmli_opt_args *o, float *w, HV(f32) g, float *v, HV(update_check) *f,
                                  int64_t c)
{
    HV(f32) x = HV(load_upto)(w, c), s;
    g = HV(fma)(HV(set1)(o->u.weight_decay), x, g);
    s = HV(fma)(g, g, HV(load_upto)(v, c));
    HV(store_upto)(v, s, c);
    f->square = HV(fma)(s, HV(zero)(), f->square);
    HV(store_weight)(w, HV(fnma)(HV(set1)(o->u.lr), g / (HV(sqrt)(s) + HV(set1)(o->u.eps)), x), x, f, c);
}
HPMLI_VEC_INLINE void HV(rmsprop)(const hpmli_opt_args *o, float *w, HV(f32) g, float *m, float *v,
                                  HV(update_check) *f, int64_t c)
{
    HV(f32) x = HV(load_upto)(w, c), step;
    g    = HV(fma)(HV(set1)(o->u.weight_decay), x, g);
    step = HV(update_mean)(v, g * g, o->u.beta2, c);
    f->square = HV(fma)(step, HV(zero)(), f->square);
    step = g / (HV(sqrt)(step) + HV(set1)(o->u.eps));
    if (m) step = HV(store_state)(m, HV(fma)(HV(set1)(o->u.momentum), HV(load_upto)(m, c), step), c);
    HV(store_weight)(w, HV(fnma)(HV(set1)(o->u.lr), step, x), x, f, c);
}
/* Updates moments m, v by gradient g; returns m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) for step t. The two
   corrections are factors, because a division takes as long as ten multiplications. */
HPMLI_VEC_INLINE HV(f32) HV(adam_direction)(const hpmli_opt_args *o, HV(f32) g, float *m, float *v,
                                            HV(update_check) *f, int64_t c)
{
    HV(f32) mean   = HV(update_mean)(m, g, o->u.beta1, c) * HV(set1)(o->correction1);
    HV(f32) square = HV(update_mean)(v, g * g, o->u.beta2, c) * HV(set1)(o->correction2);
    f->square = HV(fma)(square, HV(zero)(), f->square); /* an infinite v would make all later steps 0 */
    return mean / (HV(sqrt)(square) + HV(set1)(o->u.eps));
}
HPMLI_VEC_INLINE void HV(adam)(const hpmli_opt_args *o, float *w, HV(f32) g, float *m, float *v, HV(update_check) *f,
                               int64_t c)
{
    HV(f32) old = HV(load_upto)(w, c), x = old, lr = HV(set1)(o->u.lr), decay = HV(set1)(o->u.weight_decay);
    if (o->u.opt == HPML_OPT_ADAM) g = HV(fma)(decay, x, g);
    else x = HV(fnma)(lr * decay, x, x);
    HV(store_weight)(w, HV(fnma)(lr, HV(adam_direction)(o, g, m, v, f, c), x), old, f, c);
}

/* Called after an update with a non-finite result: returns HPML_NONFINITE_GRADIENT if a gradient in dw is non-finite
   (unknown after LAMB, which overwrites dw), else HPML_NONFINITE_STEP. If o->u.found_nonfinite is set, sets non-finite
   elements of the optimizer's states m and v to 0, because no later gradient would make them finite. */
HPMLI_KERNEL int HV(opt_restart)(const hpmli_opt_args *o, const float *dw, float *m, float *v, int64_t n)
{
    int found = HPML_NONFINITE_STEP;
    for (int64_t i = 0; i < n; i++) {
        float g = dw[i] * o->u.grad_scale;
        bool  nonfinite = (m && m[i] - m[i] != 0) || (v && v[i] - v[i] != 0);
        if (g - g != 0) found = HPML_NONFINITE_GRADIENT;
        if (nonfinite && m && o->u.found_nonfinite) m[i] = 0;
        if (nonfinite && v && o->u.found_nonfinite) v[i] = 0;
    }
    return found;
}
/* HPMLI_STEP(step): `step` updates the c weights from index i on, with g, their scaled gradient. HPMLI_STEPS(step) does
   this for all n weights and then leaves the `switch`. */
#define HPMLI_STEP(step)                                                                                               \
    {                                                                                                                  \
        HV(f32) g = HV(load_upto)(dw + i, c);                                                                          \
        g = g * HV(set1)(o->u.grad_scale);                                                                             \
        step;                                                                                                          \
    }
#define HPMLI_STEPS(step)                                                                                              \
    for (const int64_t c = HV_LANES; i + c <= n; i += c) HPMLI_STEP(step)                                              \
    for (int64_t c = n - i; i < n; i += c) HPMLI_STEP(step)                                                            \
    break;
/* Writes LAMB's direction to r, over the gradient, which no later op reads. Non-finite gradients count as
   f->replacement (0 if found_nonfinite is set), because they would make the norm of the whole direction non-finite. */
HPMLI_VEC_INLINE void HV(lamb)(const hpmli_opt_args *o, const float *w, HV(f32) g, float *r, float *m, float *v,
                               HV(update_check) *f, int64_t c)
{
    HV(f32) nan_or_0 = g * HV(zero)();
    f->gradient = f->gradient + nan_or_0;
    g = HV(if_eq)(nan_or_0, nan_or_0, g, f->replacement);
    g = HV(adam_direction)(o, g, m, v, f, c);
    HV(store_upto)(r, HV(fma)(HV(set1)(o->u.weight_decay), HV(load_upto)(w, c), g), c);
}

HPMLI_KERNEL int HV(opt_step)(const hpmli_opt_args *args, float *w, float *dw, float *m, float *v, int64_t n)
{
    const hpmli_opt_args own = *args, *o = &own; /* a copy: *args would be reloaded after each store */
    HV(update_check)     all = { HV(zero)(), HV(zero)(), HV(zero)(), HV(set1)(o->u.found_nonfinite ? 0 : NAN) };
    HV(update_check)    *f = &all;
    int64_t              i = 0;
    switch (o->u.opt) {
    case HPML_OPT_SGD: case HPML_OPT_LARS: HPMLI_STEPS(HV(sgd)(o, w + i, g, m ? m + i : NULL, f, c))
    case HPML_OPT_ADAGRAD: HPMLI_STEPS(HV(adagrad)(o, w + i, g, v + i, f, c))
    case HPML_OPT_RMSPROP: HPMLI_STEPS(HV(rmsprop)(o, w + i, g, m ? m + i : NULL, v + i, f, c))
    case HPML_OPT_ADAM: case HPML_OPT_ADAMW: HPMLI_STEPS(HV(adam)(o, w + i, g, m + i, v + i, f, c))
    case HPML_OPT_LAMB: HPMLI_STEPS(HV(lamb)(o, w + i, g, dw + i, m + i, v + i, f, c))
    case HPML_OPT_CUSTOM: break; /* updated by hpmli_optimizer_piece */
    }
    if (HV(sum_lanes)(all.weight + all.square + all.gradient) == 0) return 0;
    int found = HV(opt_restart)(o, dw, m, v, n);
    return HV(sum_lanes)(all.gradient) == 0 ? found : HPML_NONFINITE_GRADIENT;
}

// ---------------------------------------------------------------------------------------------------------------------
// >>vconvert   storage types, checksums
// ---------------------------------------------------------------------------------------------------------------------
/* Calls X(dtype, name, C type) for each storage type that must be converted to and from f32. */
#define HPMLI_STORED(X) X(BF16, bf16, uint16_t) X(F16, f16, uint16_t) X(I32, i32, int32_t) X(U8, u8, uint8_t)

HPMLI_KERNEL void HV(to_f32)(float *y, hpml_dtype dtype, const void *x, int64_t n)
{
    switch (dtype) {
    case HPML_DTYPE_F32: memcpy(y, x, (size_t)n * sizeof *y); break;
#define HPMLI_TO_F32_CASE(type, name, T)                                                                               \
    case HPML_DTYPE_##type: HV_LOOP(n) HV(store_upto)(y + i, HV(load_upto_##name)((const T *)x + i, c), c); break;
    HPMLI_STORED(HPMLI_TO_F32_CASE)
    }
}
HPMLI_KERNEL void HV(from_f32)(hpml_dtype dtype, void *y, const float *x, int64_t n)
{
    switch (dtype) {
    case HPML_DTYPE_F32: memcpy(y, x, (size_t)n * sizeof *x); break;
#define HPMLI_FROM_F32_CASE(type, name, T)                                                                             \
    case HPML_DTYPE_##type: HV_LOOP(n) HV(store_upto_##name)((T *)y + i, HV(load_upto)(x + i, c), c); break;
    HPMLI_STORED(HPMLI_FROM_F32_CASE)
    }
}

/* CRC-32C has Castagnoli's polynomial, as in iSCSI. Where the CPU has no instruction for it, and n >= 1,024, tables are
   made on the stack and eight bytes at a time are looked up in them (Kounavis and Berry 2005); other bytes are
   processed bit by bit. */
HPMLI_KERNEL uint32_t HV(crc32c)(uint32_t crc, const void *bytes, size_t n)
{
    const unsigned char *p = (const unsigned char *)bytes;
    crc = ~crc;
#ifdef HPMLI_CRC32C_WORD
    for (uint64_t word; n >= 8; p += 8, n -= 8) {
        memcpy(&word, p, 8);
        crc = (uint32_t)HPMLI_CRC32C_WORD(crc, word);
    }
#else
    uint32_t table[8][256];
    bool     use_tables = n >= 1024;
    for (uint32_t i = 0; i < 256 && use_tables; i++) {
        table[0][i] = i;
        for (int k = 0; k < 8; k++) table[0][i] = table[0][i] >> 1 ^ (0x82f63b78u & (0 - (table[0][i] & 1)));
    }
    for (int k = 1; k < 8 && use_tables; k++)
        for (int i = 0; i < 256; i++) table[k][i] = table[k - 1][i] >> 8 ^ table[0][table[k - 1][i] & 255];
    for (; use_tables && n >= 8; p += 8, n -= 8) {
        uint64_t word;
        memcpy(&word, p, 8);
        word ^= crc;
        crc = 0;
        for (int k = 0; k < 8; k++) crc ^= table[7 - k][word >> 8 * k & 255];
    }
#endif
    for (; n > 0; n--) {
        crc ^= *p++;
        for (int k = 0; k < 8; k++) crc = crc >> 1 ^ (0x82f63b78u & (0 - (crc & 1)));
    }
    return ~crc;
}

// ---------------------------------------------------------------------------------------------------------------------
// >>gemm   matrix product: tiles
// ---------------------------------------------------------------------------------------------------------------------
/* C (m, n) = A (m, k) B (k, n) after Goto & van de Geijn 2008. A tile of C stays in vector registers while k runs over
   a range; for AVX2 it has at most 6 rows by 16 columns, which are 2 vectors. Each step of k loads 2 vectors of B,
   broadcasts one number of each row of A, and multiplies and adds each with each:
                                b0 = B[k][0..7]     b1 = B[k][8..15]
                              +-------------------+-------------------+
         x = A[0][k] x8  -->  | s0 = s0 + x b0    | t0 = t0 + x b1    |
         x = A[1][k] x8  -->  | s1 = s1 + x b0    | t1 = t1 + x b1    |     12 sums, 2 vectors of B and x:
            ..                |  ..               |  ..               |     15 of the 16 registers
         x = A[5][k] x8  -->  | s5 = s5 + x b0    | t5 = t5 + x b1    |
                              +-------------------+-------------------+

   These are 12 multiply-adds for 8 loads; the nearer to a square a tile is, the fewer loads it needs. In plain C:
         void tile(int rows, int cols, int64_t K, const float *a, int64_t a_row, int64_t a_k,
                   const float *b, int64_t b_k, float *c, int64_t ldc)
         {
             float sum[6][16] = { { 0 } };
             for (int64_t k = 0; k < K; k++)
                 for (int r = 0; r < rows; r++) {
                     float x = a[r * a_row + k * a_k];
                     for (int j = 0; j < cols; j++) sum[r][j] += x * b[k * b_k + j];
                 }
             for (int r = 0; r < rows; r++) memcpy(c + r * ldc, sum[r], (size_t)cols * sizeof(float));
         }
   HV(tile) is this function with the loop over r unrolled by HPMLI_ROWS. The sums of row r are the variables s##r,
   t##r, u##r, v##r (vectors 0 to 3), because compilers keep an array in registers only when they unroll every loop
   over the array. `rows` and `cols` are constants in each variant, HV(tile_V_R) for V vectors and R + 1 rows.
   So that operands come from the nearest caches, k is cut into blocks of at most HPMLI_GEMM_KC, and A and B are packed
   into the order in which the tile reads them, unless they already are in a good one. Rows and vectors are dealt out
   evenly (16 rows are 6 + 5 + 5, not 6 + 6 + 4). Every element of C is summed over k in an order that only the shape
   decides, and not the number of threads, so that results have the same bits for any number of threads. */

#define HPMLI_NR (2 * HV_LANES) /* columns of two vectors: the width of the panels of convolutions */

#ifndef HPMLI_TILE_ROW
/* The work of one call of a tile function: `panels` columns of tiles of C, each of `tiles` tiles, all of one size. */
typedef struct hpmli_tile_run {
    int64_t tiles;         /* tiles below each other in a column */
    int64_t a_tile;        /* floats in A from a tile's first row to that of the tile below */
    int64_t panels;        /* panels (B's columns for one tile's width), next to each other */
    int64_t b_panel;       /* floats in B from one panel to the next */
    int64_t c_panel;       /* floats in C from below the last tile of a panel to the first tile of the next panel */
    float  *c;             /* first element of the first tile */
    int64_t ldc;           /* floats from one row of C to the next */
    int64_t prefetch_rows; /* rows of C to prefetch for each tile, or 0 */
    int     add;           /* true: the sums are added to C, else replace it */
    int64_t cols;          /* columns of a panel: 1 vector, maybe partial, or more than HV_LANES (nv - 1) */
    float  *packed;        /* NULL, or where the first tile of a panel packs that panel of B while it computes */
} hpmli_tile_run;
/* The operations on C that follow the product: C = alpha (A B) + beta C + bias, or 0 where that is negative (relu). */
typedef struct hpmli_gemm_epilogue {
    float        alpha, beta;
    const float *bias_row; /* added to the elements of each row: one number for each row, or NULL */
    const float *bias_col; /* one number for each column, or NULL */
    int          relu;
} hpmli_gemm_epilogue;
/* A tile function computes tiles of C = A B over kc values of k, the summed index: A is at a, a_row floats from row to
   row, a_k from k to k; B is at b, b_k floats from k to k, with contiguous columns; `run` describes the tiles. */
#define HPMLI_TILE_ARGS                                                                                                \
    int64_t kc, const float *a, int64_t a_row, int64_t a_k, const float *b, int64_t b_k, const hpmli_tile_run *run
typedef void hpmli_tile_fn(HPMLI_TILE_ARGS);
/* Row r of a tile of mr rows, nv vectors, has the sums s##r .. v##r: HPMLI_TILE_ZERO clears these sums, HPMLI_TILE_ROW
   adds a number of A times the vectors b0 .. b3 of B to them. Once inlined, mr and nv are constants, so the compiler
   removes the code for further rows and vectors. Rows 0, 3, 6, 9 and 12 of A have pointers (a0, a3 ..); the address of
   another row is that of the last such row before it plus one or two times a_row. */
#define HPMLI_TILE_ZERO(nv, r) HV(f32) s##r = HV(zero)(), t##r = HV(zero)(), u##r = HV(zero)(), v##r = HV(zero)();
#define HPMLI_TILE_A(r)        (r < 3 ? a0 : r < 6 ? a3 : r < 9 ? a6 : r < 12 ? a9 : a12)[r % 3 * a_row]
#define HPMLI_TILE_ROW(nv, r)  HPMLI_TILE_FMA(nv, r, HV(set1)(HPMLI_TILE_A(r)))
#define HPMLI_TILE_FMA(nv, r, from_a)                                                                                  \
    if (mr > r) {                                                                                                      \
        HV(f32) x = from_a;                                                                                            \
        s##r = HV(fma)(x, b0, s##r);                                                                                   \
        if (nv > 1) t##r = HV(fma)(x, b1, t##r);                                                                       \
        if (nv > 2) u##r = HV(fma)(x, b2, u##r);                                                                       \
        if (nv > 3) v##r = HV(fma)(x, b3, v##r);                                                                       \
    }
/* Offset in floats of vector i in a tile's row. The last vector ends with the last of the tile's `cols` columns, and
   may therefore overlap the vector before it. */
#define HPMLI_TILE_V(i) (nv == i + 1 ? last : i * HV_LANES)
#define HPMLI_TILE_LOAD(i, p)                                                                                          \
    (nv <= i ? HV(zero)() : nv == 1 ? HV(load_partial)(p, cols) : HV(load)((p) + HPMLI_TILE_V(i)))
#define HPMLI_TILE_PUT(i, p, x)                                                                                        \
    if (nv == 1 && i == 0) HV(store_partial)(p, x, cols);                                                              \
    else if (nv > i) HV(store)((p) + HPMLI_TILE_V(i), x);
#define HPMLI_TILE_STORE(nv, r)                                                                                        \
    if (mr > r) {                                                                                                      \
        HPMLI_TILE_PUT(0, c, s##r)                                                                                     \
        HPMLI_TILE_PUT(1, c, t##r)                                                                                     \
        HPMLI_TILE_PUT(2, c, u##r)                                                                                     \
        HPMLI_TILE_PUT(3, c, v##r)                                                                                     \
        c += ldc;                                                                                                      \
    }
#define HPMLI_TILE_ADD(nv, r)                                                                                          \
    if (mr > r) {                                                                                                      \
        s##r = HPMLI_TILE_LOAD(0, c) + s##r;                                                                           \
        t##r = HPMLI_TILE_LOAD(1, c) + t##r;                                                                           \
        u##r = HPMLI_TILE_LOAD(2, c) + u##r;                                                                           \
        v##r = HPMLI_TILE_LOAD(3, c) + v##r;                                                                           \
        HPMLI_TILE_STORE(nv, r)                                                                                        \
    }
#define HPMLI_PREFETCH(p) __builtin_prefetch(p, 1) /* 1: for writing */
#endif

/* HPMLI_TILE_B loads the tile's columns of one row of B, up to four vectors, into b0 .. b3. HPMLI_TILE_STEP does one
   step of the sum over k: it loads b0 .. b3, adds to the sums of each row of the tile these vectors times the row's
   element of A, and advances the row pointers of A (a0, a3, a6, a9, a12) and b, the pointer to B, to the next k. */
#define HPMLI_TILE_B                                                                                                   \
    HV(f32) b0 = HPMLI_TILE_LOAD(0, b), b1 = HPMLI_TILE_LOAD(1, b);                                                    \
    HV(f32) b2 = HPMLI_TILE_LOAD(2, b), b3 = HPMLI_TILE_LOAD(3, b);
#define HPMLI_TILE_STEP                                                                                                \
    {                                                                                                                  \
        HPMLI_TILE_B                                                                                                   \
        HPMLI_ROWS(HPMLI_TILE_ROW, nv)                                                                                 \
        a0 += a_k, a3 += a_k, a6 += a_k, a9 += a_k, a12 += a_k, b += b_k;                                              \
    }
/* Computes the tiles that `run`, the last of HPMLI_TILE_ARGS, describes: each of mr rows by nv vectors, summed over kc
   values of k. */
HPMLI_VEC_INLINE void HV(tile)(const int mr, const int nv, HPMLI_TILE_ARGS)
{
    float  *c = run->c, *packed = run->packed;
    int64_t ldc = run->ldc, cols = run->cols, last = cols - HV_LANES;
    int64_t prefetch_rows = run->prefetch_rows < kc ? run->prefetch_rows : kc;
    for (int64_t t = 0, left = run->tiles * run->panels; left > 0; left--, b -= kc * b_k) {
        const float *a0 = a + t * run->a_tile, *c_row = c;
        const float *a3 = a0 + 3 * a_row, *a6 = a3 + 3 * a_row, *a9 = a6 + 3 * a_row, *a12 = a9 + 3 * a_row;
        HPMLI_ROWS(HPMLI_TILE_ZERO, nv)
        int64_t k = 0, special = packed ? kc : prefetch_rows; /* steps of k that also pack B or prefetch C */
        for (; k < special; k++) {
            if (packed) {
                HPMLI_TILE_B
                const float *ahead = b + (k + 16 < kc ? 16 * b_k : (16 - kc) * b_k + nv * HV_LANES); /* or next panel */
                HPMLI_TILE_PUT(0, packed, b0)
                HPMLI_TILE_PUT(1, packed, b1)
                HPMLI_TILE_PUT(2, packed, b2)
                HPMLI_TILE_PUT(3, packed, b3)
                for (int i = 0; i < nv; i++) HPMLI_PREFETCH(ahead + i * HV_LANES);
                packed += nv * HV_LANES;
            }
            if (k < prefetch_rows) { /* one row a step, because loads of A and B would wait behind all rows at once */
                for (int i = 0; i < nv; i++) HPMLI_PREFETCH(c_row + i * HV_LANES);
                HPMLI_PREFETCH(c_row + cols - 1);
                c_row += ldc;
            }
            HPMLI_TILE_STEP
        }
        if (mr * nv < 20)
            for (; k < kc; k++) HPMLI_TILE_STEP
        else
            HPMLI_UNROLL_4 /* here the speed is limited by the instructions other than multiply-adds */
            for (; k < kc; k++) HPMLI_TILE_STEP
        (void)a3, (void)a6, (void)a9, (void)a12, (void)last, (void)cols;
        if (run->add) { HPMLI_ROWS(HPMLI_TILE_ADD, nv) }
        else { HPMLI_ROWS(HPMLI_TILE_STORE, nv) }
        if (++t == run->tiles) {
            t = 0;
            b += run->b_panel;
            c += run->c_panel;
        }
    }
}
/* HV(tile_V_R) is the tile function for V vectors and R + 1 rows; HV(tiles)[V - 1][R] points to it. */
#define HPMLI_TILE(nv, r)                                                                                              \
    HPMLI_KERNEL void HV(tile_##nv##_##r)(HPMLI_TILE_ARGS) { HV(tile)(r + 1, nv, kc, a, a_row, a_k, b, b_k, run); }
#define HPMLI_TILE_NAME(nv, r) HV(tile_##nv##_##r),
HPMLI_ROWS(HPMLI_TILE, 1)
HPMLI_ROWS(HPMLI_TILE, 2)
#if HPMLI_NV > 2
HPMLI_ROWS_3(HPMLI_TILE, 3)
HPMLI_ROWS_4(HPMLI_TILE, 4)
#endif
static hpmli_tile_fn *const HV(tiles)[HPMLI_NV][HPMLI_MR] = {
    { HPMLI_ROWS(HPMLI_TILE_NAME, 1) },
    { HPMLI_ROWS(HPMLI_TILE_NAME, 2) },
#if HPMLI_NV > 2
    { HPMLI_ROWS_3(HPMLI_TILE_NAME, 3) },
    { HPMLI_ROWS_4(HPMLI_TILE_NAME, 4) },
#endif
};
static const int HV(tile_rows)[HPMLI_NV] = { /* [V - 1]: rows of a tile of V vectors, at most */
    HPMLI_MR, HPMLI_MR,
#if HPMLI_NV > 2
    HPMLI_MR_3, HPMLI_MR_4,
#endif
};

// ---------------------------------------------------------------------------------------------------------------------
// >>gemm-pack   matrix product: packing, transposing, storing
// ---------------------------------------------------------------------------------------------------------------------
/* Packs `cols` columns of x into a panel: dst[k * width + j] = x[k * x_k + j * x_col] for k < kc, j < cols, and 0 for j
   up to width, a multiple of HV_LANES. Where k runs along memory (x_k 1) the panel is transposed in registers. */
HPMLI_KERNEL void HV(pack_columns)(const float *x, int64_t x_k, int64_t x_col, int64_t kc, int64_t cols, int64_t width,
                                   float *dst)
{
    for (int64_t j = 0; j < width; j += HV_LANES) {
        int64_t rows = cols - j < HV_LANES ? cols - j : HV_LANES, k = 0;
        if (x_k == 1)
            for (; k + HV_LANES <= kc; k += HV_LANES)
                HV(transpose)(x + j * x_col + k, x_col, rows, dst + k * width + j, width);
        for (; k < kc; k++)
            for (int64_t q = 0; q < HV_LANES; q++)
                dst[k * width + j + q] = q < rows ? x[(j + q) * x_col + k * x_k] : 0;
    }
}
/* Applies the epilogue e (alpha, beta, bias, relu) to the first n lanes of v, which belong to elements (r, j) to
   (r, j + n - 1) of C, and stores them at c. */
HPMLI_VEC_INLINE void HV(finish_vector)(const hpmli_gemm_epilogue *e, float *c, int64_t r, int64_t j, HV(f32) v,
                                        int64_t n)
{
    v *= HV(set1)(e->alpha);
    if (e->beta != 0) v = HV(fma)(HV(set1)(e->beta), HV(load_upto)(c, n), v);
    if (e->bias_col) v += HV(load_upto)(e->bias_col + j, n);
    if (e->bias_row) v += HV(set1)(e->bias_row[r]);
    if (e->relu) v = HV(max)(HV(zero)(), v); /* in this order a NaN stays NaN */
    HV(store_upto)(c, v, n);
}
/* Applies the epilogue e to a tile of mr rows, HPMLI_NV vectors apart, and stores its rows ldc floats apart at c. */
HPMLI_KERNEL void HV(finish_tile)(const float *tile, int64_t mr, int64_t cols, const hpmli_gemm_epilogue *e, float *c,
                                  int64_t ldc)
{
    for (int64_t r = 0; r < mr; r++, c += ldc, tile += HPMLI_NV * HV_LANES)
        for (int64_t j = 0; j < cols; j += HV_LANES)
            HV(finish_vector)(e, c + j, r, j, HV(load)(tile + j), cols - j);
}
/* Transposes `tile`, mr rows of cols columns of C^T, applies the epilogue e (alpha, beta, bias, relu), stores the
   result at c. Rows and columns of e are those of C. store_only: e changes nothing, and is skipped. */
HPMLI_KERNEL void HV(finish_tile_transposed)(const float *tile, int64_t mr, int64_t cols, const hpmli_gemm_epilogue *e,
                                             bool store_only, float *c, int64_t ldc)
{
    float square[HV_LANES * HV_LANES];
    for (int64_t r = 0; r < mr; r += HV_LANES)
        for (int64_t q = 0; q < cols; q += HV_LANES) {
            int64_t lanes = mr - r < HV_LANES ? mr - r : HV_LANES;
            int64_t rows = cols - q < HV_LANES ? cols - q : HV_LANES;
            float  *to    = c + q * ldc + r;
            HV(transpose)(tile + r * HPMLI_NV * HV_LANES + q, HPMLI_NV * HV_LANES, lanes, square, HV_LANES);
            for (int64_t i = 0; i < rows; i++)
                if (store_only) HV(store_upto)(to + i * ldc, HV(load)(square + i * HV_LANES), lanes);
                else HV(finish_vector)(e, to + i * ldc, q + i, r, HV(load)(square + i * HV_LANES), lanes);
        }
}

// ---------------------------------------------------------------------------------------------------------------------
// >>gemm-part   matrix product: one rectangle of C
// ---------------------------------------------------------------------------------------------------------------------
/* One rectangle of C is computed block after block of k, of columns and of rows. Tiles broadcast numbers from rows of
   P, the left operand as tiles see it, and load vectors from columns of Q, the right operand. Mostly P is A and Q is B.
   `swapped` products, for which transposing B would cost more, compute C^T = B^T A^T instead: P is B^T, Q is A^T, and
   each tile is transposed on its way to C. */
typedef struct HV(gemm_view) { /* a product as its tiles see it: P Q, see >>gemm-part */
    const hpmli_gemm_part *part;
    const float *p;          /* first element of P, the left operand of the tiles: A, or B^T when swapped */
    int64_t      p_row, p_k; /* floats in P from one row to the next, from one k to the next */
    const float *q;          /* first element of Q, the right operand of the tiles: B, or A^T when swapped */
    int64_t      q_k, q_col; /* floats in Q from one k to the next, from one column to the next */
    float       *c;          /* first element of the rectangle of C */
    int64_t      ldc, rows, cols, k; /* floats from row to row of C; rows of P, columns of Q, steps of k */
    bool         swapped;    /* the tiles compute C^T = B^T A^T */
    bool         pack_q;     /* panels of Q, each as wide as a tile, are packed */
    float       *packed_p;   /* NULL, or where blocks of rows of P are packed */
} HV(gemm_view);
#ifndef HPMLI_GEMM_BLOCK
#define HPMLI_GEMM_BLOCK
/* A block: rows of P, the left operand, over a range of k, cut into tiles, and how the tiles' sums get into C. */
typedef struct hpmli_gemm_block {
    int64_t row, rows;      /* rows [row, row + rows) of P */
    int64_t k0, k;          /* over k [k0, k0 + k) */
    int64_t tiles, height;  /* tiles in a column; rows of a tile, at most */
    bool    plain;          /* the epilogue is at most an addition to C: tiles can store into C themselves */
    bool    prefetch;       /* C is worth a prefetch, see HV(gemm_block_epilogue) */
    hpmli_gemm_epilogue epilogue;
} hpmli_gemm_block;
/* A panel: columns of Q, the right operand, that form the width of a tile. */
typedef struct hpmli_gemm_panel {
    int64_t col, cols;  /* columns [col, col + cols) of Q */
    int64_t count;      /* so many panels of this width, side by side */
    float  *packed;     /* space for the packed panel: (k, cols rounded up to vectors) */
    bool    is_packed;  /* true: the panel was packed for an earlier block of rows */
} hpmli_gemm_panel;
/* Arguments of a tile function: rows of (packed) P begin at `a`, columns of (packed) Q at `b`; a_row: floats from one
   row of P to the next; a_k, b_k: floats from one k, the summed index, to the next. */
typedef struct hpmli_gemm_operands {
    const float *a;
    int64_t      a_row, a_k;
    const float *b;
    int64_t      b_k;
} hpmli_gemm_operands;
#endif

/* Returns true when packing P, the left operand, pays: its k columns are k_stride floats apart, so that all are in few
   sets of the cache (conflict misses) and each in another page, and C has 4 columns of tiles or more, which read P. */
HPMLI_VEC_INLINE bool HV(columns_alias_cache)(int64_t row_stride, int64_t k_stride, int64_t k, int64_t cols)
{
    return row_stride == 1 && k_stride * k >= 262144 && cols >= 4 * HPMLI_NR;
}
/* Returns the product for a rectangle of C in the form P Q in which its tiles are computed: chooses the operands P and
   Q (see >>gemm-part), and which of them to pack. */
HPMLI_KERNEL HV(gemm_view) HV(gemm_view_of)(const hpmli_gemm_part *part)
{
    const hpmli_gemm_desc *d = part->d;
    HV(gemm_view) v;
    int64_t m = part->i1 - part->i0, n = part->j1 - part->j0;
    memset(&v, 0, sizeof v);
    v.part = part;
    v.ldc  = d->ldc;
    v.k    = d->alpha == 0 ? 0 : d->k;
    v.c    = d->c + part->batch * d->c_batch + part->i0 * d->ldc + part->j0;
    v.p    = part->ws; /* any address: nothing is read if k = 0 */
    v.q    = part->ws;
    v.rows = m;
    v.cols = n;
    if (v.k == 0) return v;
    v.p     = d->a + part->batch * d->a_batch + part->i0 * d->a_row;
    v.p_row = d->a_row;
    v.p_k   = d->a_k;
    v.q     = d->b + part->batch * d->b_batch + part->j0 * d->b_col;
    v.q_k   = d->b_k;
    v.q_col = d->b_col;
    /* Floats moved for each k. C = A B (plain): transposing B, packing A. C^T = B^T A^T (swapped): transposing A,
       packing B and, once for each block of k, transposing C, where writing the columns of C costs 7/4 as much. */
    int64_t moved_plain   = (v.q_col != 1) * n + HV(columns_alias_cache)(v.p_row, v.p_k, v.k, n) * m;
    int64_t moved_swapped = (v.p_row != 1) * m + HV(columns_alias_cache)(v.q_col, v.q_k, v.k, m) * n;
    if (moved_plain * v.k > moved_swapped * v.k + m * n * 7 / 4 * ((v.k - 1) / HPMLI_GEMM_KC + 1)) {
        const float *p = v.p;
        int64_t      row = v.p_row, k = v.p_k;
        v.p     = v.q;
        v.p_row = v.q_col;
        v.p_k   = v.q_k;
        v.q     = p;
        v.q_col = row;
        v.q_k   = k;
        v.rows  = n;
        v.cols  = m;
        v.swapped = true;
    }
    v.pack_q = v.q_col != 1 || (v.k > 16 && (v.rows > 100 || v.k * (v.q_k & -v.q_k) >= 262144));
    if (HV(columns_alias_cache)(v.p_row, v.p_k, v.k, v.cols)) v.packed_p = part->ws + HPMLI_GEMM_PACKED_A;
    return v;
}
/* Returns the distance in floats, in packed P, the left operand, from one tile's rows to the next tile's. The 16 extra
   floats keep the distance from being a power of two (conflict misses of the cache), and absorb the surplus that
   HV(pack_rows) writes behind a tile. */
HPMLI_VEC_INLINE int64_t HV(packed_tile_floats)(const hpmli_gemm_block *block)
{
    return block->height * block->k + 16;
}
/* Packs the block's rows of P, the left operand: eight steps of k of all tiles, then the next eight, whose cache lines
   have been prefetched meanwhile. Copies eight rows at a time, from the last eight of a tile to the first: what the
   last eight write beyond the tile's height belongs to the next step of k, which is packed later. */
HPMLI_KERNEL void HV(pack_rows)(const HV(gemm_view) *v, const hpmli_gemm_block *block)
{
    const float *p = v->p + block->row * v->p_row + block->k0 * v->p_k;
    int64_t rows = block->rows / block->tiles, higher = block->rows % block->tiles, height = block->height;
    for (int64_t k0 = 0, n; k0 < block->k; k0 += n, p += n * v->p_k) {
        n = block->k - k0 < 8 ? block->k - k0 : 8;
        for (int64_t k = n; k < 2 * n; k++)
            for (int64_t i = 0; i < block->rows; i += 16) __builtin_prefetch(p + k * v->p_k + i);
        for (int64_t t = 0, i = 0; t < block->tiles; i += rows + (t < higher), t++)
            for (int64_t j = (height - 1) / 8 * 8; j >= 0; j -= 8) {
                float       *to   = v->packed_p + t * HV(packed_tile_floats)(block) + k0 * height + j;
                const float *from = p + i + j;
                int64_t      left = block->rows - i - j;
                for (int64_t k = 0; k < n; k++, to += height, from += v->p_k)
                    if (left >= 8) memcpy(to, from, 8 * sizeof(float));
                    else
                        for (int64_t q = 0; q < left; q++) to[q] = from[q];
            }
    }
}
/* Calls the tile function for the tiles of `run`, `height` rows each, and advances x->a, the address in the left
   operand, to the tile below. The first call for a panel may pack it; then x->b becomes the packed panel. */
HPMLI_VEC_INLINE void HV(gemm_run)(const hpmli_gemm_block *block, const hpmli_gemm_panel *panel, int64_t height,
                                   hpmli_tile_run *run, hpmli_gemm_operands *x)
{
    int64_t vectors = (panel->cols + HV_LANES - 1) / HV_LANES;
    HV(tiles)[vectors - 1][height - 1](block->k, x->a, x->a_row, x->a_k, x->b, x->b_k, run);
    x->a += run->a_tile * run->tiles;
    if (!run->packed) return;
    run->packed = NULL;
    x->b   = panel->packed;
    x->b_k = vectors * HV_LANES;
}
/* Computes a panel, a column of tiles of C that store into C, or add to C, themselves. One call of gemm_run computes
   all tiles of one height, except that the first tile has a call of its own if it also packs the panel of B. */
HPMLI_KERNEL void HV(gemm_panel_direct)(const HV(gemm_view) *v, const hpmli_gemm_block *block,
                                        const hpmli_gemm_panel *panel, hpmli_tile_run *run, hpmli_gemm_operands *x)
{
    int64_t higher = block->rows % block->tiles; /* the first `higher` tiles have one row more */
    float  *c      = v->c + block->row * v->ldc + panel->col;
    run->ldc = v->ldc;
    run->add = block->epilogue.beta != 0;
    for (int64_t t = 0; t < block->tiles; t += run->tiles) {
        int64_t height = block->rows / block->tiles + (t < higher);
        run->tiles   = (t < higher ? higher : block->tiles) - t;
        if (run->packed) run->tiles = 1;
        run->a_tile  = v->packed_p ? HV(packed_tile_floats)(block) : height * v->p_row;
        run->c       = c;
        run->c_panel = panel->cols - run->tiles * height * v->ldc;
        run->prefetch_rows = block->prefetch ? height : 0;
        HV(gemm_run)(block, panel, height, run, x);
        c += run->tiles * height * v->ldc;
    }
}
/* Computes a panel, a column of tiles of C, tile by tile in a buffer. The epilogue is applied to the buffer, which is
   also transposed for swapped products (their tiles compute C^T), and the result is stored into C. */
HPMLI_KERNEL void HV(gemm_panel_buffered)(const HV(gemm_view) *v, const hpmli_gemm_block *block,
                                          const hpmli_gemm_panel *panel, hpmli_tile_run *run, hpmli_gemm_operands *x)
{
    float   tile[HPMLI_MR * HPMLI_NV * HV_LANES];
    int64_t higher = block->rows % block->tiles; /* the first `higher` tiles have one row more */
    run->c     = tile;
    run->ldc   = HPMLI_NV * HV_LANES;
    run->add   = 0;
    run->tiles = 1;
    run->c_panel       = 0;
    run->prefetch_rows = 0;
    for (int64_t t = 0, row = block->row, height; t < block->tiles; t++, row += height) {
        height = block->rows / block->tiles + (t < higher);
        run->a_tile = v->packed_p ? HV(packed_tile_floats)(block) : height * v->p_row;
        HV(gemm_run)(block, panel, height, run, x);
        int64_t i = v->swapped ? panel->col : row; /* row of C */
        int64_t j = v->swapped ? row : panel->col; /* column of C */
        hpmli_gemm_epilogue e = block->epilogue;
        if (e.bias_col) e.bias_col += j;
        if (e.bias_row) e.bias_row += i;
        float *c = v->c + i * v->ldc + j;
        bool   store_only = block->plain && e.beta == 0;
        if (v->swapped) HV(finish_tile_transposed)(tile, height, panel->cols, &e, store_only, c, v->ldc);
        else HV(finish_tile)(tile, height, panel->cols, &e, c, v->ldc);
    }
}
/* Computes the tiles of a block of rows of P (left operand) by a panel of columns of Q (right operand). Q is read as it
   is, or the panel is packed: before the first tile if the panel must be transposed, else by the function that computes
   the first tile, while it reads the panel. */
HPMLI_KERNEL void HV(gemm_panel)(const HV(gemm_view) *v, const hpmli_gemm_block *block, const hpmli_gemm_panel *panel)
{
    int64_t             width = (panel->cols + HV_LANES - 1) / HV_LANES * HV_LANES;
    hpmli_tile_run      run;
    hpmli_gemm_operands x;
    x.a     = v->packed_p ? v->packed_p : v->p + block->row * v->p_row + block->k0 * v->p_k;
    x.a_row = v->packed_p ? 1 : v->p_row;
    x.a_k   = v->packed_p ? block->height : v->p_k;
    x.b     = v->q + block->k0 * v->q_k + panel->col * v->q_col;
    x.b_k   = v->q_k;
    run.panels  = panel->count;
    run.b_panel = panel->cols;
    run.cols    = panel->cols;
    run.packed  = v->pack_q && !panel->is_packed && v->q_col == 1 ? panel->packed : NULL;
    if (v->pack_q && !run.packed) {
        if (!panel->is_packed) HV(pack_columns)(x.b, v->q_k, v->q_col, block->k, panel->cols, width, panel->packed);
        x.b   = panel->packed;
        x.b_k = width;
    }
    if (block->plain && !v->swapped) HV(gemm_panel_direct)(v, block, panel, &run, &x);
    else HV(gemm_panel_buffered)(v, block, panel, &run, &x);
}
/* Sets the epilogue (the operations that follow the sums) for the block's range of k. The first range of k multiplies
   the previous C by beta, the last range adds bias and applies relu. */
HPMLI_KERNEL void HV(gemm_block_epilogue)(const HV(gemm_view) *v, hpmli_gemm_block *block)
{
    const hpmli_gemm_desc *d    = v->part->d;
    hpmli_gemm_epilogue   *e    = &block->epilogue;
    bool                   last = block->k0 + block->k == v->k;
    e->alpha    = d->alpha;
    e->beta     = block->k0 == 0 ? d->beta : 1;
    e->bias_col = last && d->bias_n ? d->bias_n + v->part->j0 : NULL;
    e->bias_row = last && d->bias_m ? d->bias_m + v->part->i0 : NULL;
    e->relu     = last && d->act == 1;
    block->plain = d->alpha == 1 && (e->beta == 0 || e->beta == 1) && !e->bias_col && !e->bias_row && !e->relu;
    /* Prefetching C pays if C is larger than the first-level cache; but not for a small k if the rows of C are a
       multiple of 1 KiB apart, because loads wait for stores to addresses a multiple of 4 KiB away. */
    block->prefetch = v->rows * v->cols >= 8192 && !v->swapped && (v->k > 32 || v->ldc % 256 != 0);
}
/* Computes a block of rows of P (left operand) by columns [col, col + cols) of Q (right), cut evenly into panels of at
   most `widest` vectors. For a single row of tiles, or a short k, one call of HV(gemm_panel) computes all panels of
   full width, because a call for each panel would cost too much. keep: the packed panels lie one behind the other,
   because other blocks of rows read them, too; else each panel overwrites the one before. is_packed: an earlier block
   of rows has packed the panels. */
HPMLI_KERNEL void HV(gemm_block)(const HV(gemm_view) *v, const hpmli_gemm_block *block, int64_t col, int64_t cols,
                                 bool keep, bool is_packed)
{
    int64_t widest  = v->swapped ? 2 : HPMLI_NV, full_width = widest * HV_LANES;
    int64_t vectors = (cols + HV_LANES - 1) / HV_LANES, panels = (vectors + widest - 1) / widest, joined = 0;
    if (block->plain && !v->swapped && !v->pack_q && block->height == HV(tile_rows)[widest - 1] &&
        (block->tiles == 1 || (v->k <= 32 && !v->packed_p)))
        joined = cols / full_width;
    for (int64_t t = 0, at = 0, end; t < panels; t = t < joined ? joined : t + 1, at = end) {
        hpmli_gemm_panel panel;
        end = t < joined ? joined * full_width : vectors * (t + 1) / panels * HV_LANES;
        if (end > cols) end = cols;
        panel.count     = t < joined ? joined : 1;
        panel.col       = col + at;
        panel.cols      = (end - at) / panel.count;
        panel.packed    = v->part->ws + (keep ? at * block->k : 0);
        panel.is_packed = is_packed;
        HV(gemm_panel)(v, block, &panel);
    }
}
/* Computes the product P Q, see >>gemm-part, in blocks of k, columns and rows; the first block of rows packs Q. */
HPMLI_KERNEL void HV(gemm_block_loop)(const HV(gemm_view) *v)
{
    int64_t          k_blocks = (v->k - 1) / HPMLI_GEMM_KC + 1; /* 1 for k = 0, too, because C is still to be scaled */
    int64_t          row_blocks = (v->rows - 1) / HPMLI_GEMM_MC + 1;
    hpmli_gemm_block block;
    for (int64_t kb = 0; kb < k_blocks; kb++) {
        block.k0 = kb * v->k / k_blocks;
        block.k  = (kb + 1) * v->k / k_blocks - block.k0;
        HV(gemm_block_epilogue)(v, &block);
        for (int64_t col = 0, cols; col < v->cols; col += cols) {
            cols = !v->pack_q || v->cols - col < HPMLI_GEMM_NC ? v->cols - col : HPMLI_GEMM_NC;
            int64_t widest  = v->swapped ? 2 : HPMLI_NV, vectors = (cols + HV_LANES - 1) / HV_LANES;
            int64_t panels  = (vectors + widest - 1) / widest;
            block.height    = HV(tile_rows)[(vectors - 1) / panels];
            for (int64_t rb = 0; rb < row_blocks; rb++) {
                block.row   = rb * v->rows / row_blocks;
                block.rows  = (rb + 1) * v->rows / row_blocks - block.row;
                block.tiles = (block.rows + block.height - 1) / block.height;
                if (v->packed_p) HV(pack_rows)(v, &block);
                HV(gemm_block)(v, &block, col, cols, row_blocks > 1, rb > 0);
            }
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// >>gemm-thin   matrix product: small and thin shapes
// ---------------------------------------------------------------------------------------------------------------------
/* Where C is small, or a single row, packing and transposing would cost more than the product. If k, the summed index,
   runs along memory in both operands, each element of C is a dot product of a row of P with a row of Q, where P and Q
   are A and B^T or, swapped, B^T and A. Vectors run along k; HPMLI_DOT_MR x 4 accumulators, named s0 t0 u0 v0 s1 .. as
   in >>gemm, share the loads of P and Q; at the end the lanes of each accumulator are added up. */
#ifndef HPMLI_DOT_ROW
#define HPMLI_DOT_ROW(LOAD, r) HPMLI_TILE_FMA(4, r, LOAD(p + r * p_row))
#define HPMLI_DOT_STEP(LOAD)                                                                                           \
    HV(f32) b0 = LOAD(q0), b1 = LOAD(q1), b2 = LOAD(q2), b3 = LOAD(q3);                                                \
    HPMLI_DOT_ROWS(HPMLI_DOT_ROW, LOAD)
#define HPMLI_DOT_REST(p) HV(load_partial)(p, k - i) /* the last, partial vector */
#define HPMLI_DOT_SAVE(L, r) if (mr > r) HV(sum4)(out + 4 * r, s##r, t##r, u##r, v##r);
#define HPMLI_DOT_ARGS                                                                                                 \
    int64_t k, const float *p, int64_t p_row, const float *q, int64_t q_row, int64_t n, float *out
#define HPMLI_DOT(L, r)                                                                                                \
    HPMLI_KERNEL void HV(dot_##r)(HPMLI_DOT_ARGS) { HV(dot)(r + 1, k, p, p_row, q, q_row, n, out); }
#define HPMLI_DOT_NAME(L, r) HV(dot_##r),
typedef void hpmli_dot_fn(HPMLI_DOT_ARGS);
#endif

/* Computes the dot products of mr rows at p with n <= 4 rows at q, of k floats each, p_row and q_row floats apart:
   out[r * 4 + j]. For n < 4 the last row at q is read in place of the missing rows. */
HPMLI_VEC_INLINE void HV(dot)(const int mr, HPMLI_DOT_ARGS)
{
    const float *q0 = q, *q1 = n > 1 ? q0 + q_row : q0;
    const float *q2 = n > 2 ? q1 + q_row : q1;
    const float *q3 = n > 3 ? q2 + q_row : q2;
    int64_t      i  = 0;
    HPMLI_DOT_ROWS(HPMLI_TILE_ZERO, 4)
    for (; i + HV_LANES <= k; i += HV_LANES) {
        HPMLI_DOT_STEP(HV(load))
        p += HV_LANES, q0 += HV_LANES, q1 += HV_LANES, q2 += HV_LANES, q3 += HV_LANES;
    }
    if (i < k) { HPMLI_DOT_STEP(HPMLI_DOT_REST) }
    HPMLI_DOT_ROWS(HPMLI_DOT_SAVE, 0)
}
HPMLI_DOT_ROWS(HPMLI_DOT, 0)
static hpmli_dot_fn *const HV(dots)[] = { HPMLI_DOT_ROWS(HPMLI_DOT_NAME, 0) }; /* [R] is for R + 1 rows of P */

/* Applies alpha, beta, bias and relu of d to x, element (i, j) of the product A B, and stores the result at c. */
HPMLI_VEC_INLINE void HV(finish_element)(const hpmli_gemm_desc *d, float *c, int64_t i, int64_t j, float x)
{
    x *= d->alpha;
    if (d->beta != 0) x += d->beta * *c;
    if (d->bias_n) x += d->bias_n[j];
    if (d->bias_m) x += d->bias_m[i];
    *c = d->act == 1 && !(x > 0) ? 0 : x;
}
HPMLI_VEC_INLINE void HV(store_4)(float *to, int64_t stride, const float *from)
{
    if (stride == 1) {
        memcpy(to, from, 4 * sizeof(float));
        return;
    }
    to[0]          = from[0];
    to[stride]     = from[1];
    to[2 * stride] = from[2];
    to[3 * stride] = from[3];
}
/* Computes a rectangle of C by dot products, in groups of up to four neighbouring elements of a row; as C^T = B^T A^T
   (swapped) where C^T has fewer such groups. */
HPMLI_KERNEL void HV(gemm_dots)(const hpmli_gemm_part *part)
{
    const hpmli_gemm_desc *d = part->d;
    int64_t m = part->i1 - part->i0, n = part->j1 - part->j0;
    const float *a = d->a + part->batch * d->a_batch + part->i0 * d->a_row;
    const float *b = d->b + part->batch * d->b_batch + part->j0 * d->b_col;
    float       *c = d->c + part->batch * d->c_batch + part->i0 * d->ldc + part->j0;
    bool    swapped = n * ((m + 3) / 4) < m * ((n + 3) / 4);
    bool    plain   = d->alpha == 1 && d->beta == 0 && !d->bias_n && !d->bias_m && d->act != 1;
    int64_t rows = swapped ? n : m;
    int64_t cols = swapped ? m : n;
    int64_t p_row = swapped ? d->b_col : d->a_row;
    int64_t q_row = swapped ? d->a_row : d->b_col;
    int64_t c_row = swapped ? 1 : d->ldc; /* floats in C to the next row of P */
    int64_t c_col = swapped ? d->ldc : 1; /* floats in C to the next row of Q */
    const float *p = swapped ? b : a;
    const float *q = swapped ? a : b;
    int64_t tiles = (rows + HPMLI_DOT_MR - 1) / HPMLI_DOT_MR;
    for (int64_t j = 0; j < cols; j += 4)
        for (int64_t t = 0; t < tiles; t++) {
            int64_t i = t * rows / tiles, mr = (t + 1) * rows / tiles - i, nr = cols - j < 4 ? cols - j : 4;
            float   out[4 * HPMLI_DOT_MR];
            HV(dots)[mr - 1](d->k, p + i * p_row, p_row, q + j * q_row, q_row, nr, out);
            for (int64_t r = 0; r < mr; r++) {
                if (plain && nr == 4) {
                    HV(store_4)(c + (i + r) * c_row + j * c_col, c_col, out + 4 * r);
                    continue;
                }
                for (int64_t s = 0; s < nr; s++) {
                    int64_t ci = swapped ? j + s : i + r;
                    int64_t cj = swapped ? i + r : j + s;
                    HV(finish_element)(d, c + ci * d->ldc + cj, part->i0 + ci, part->j0 + cj, out[4 * r + s]);
                }
            }
        }
}

/* For vector i of the nv vectors that make up n columns of a row of C (the last may be partial); s##i has its sums.
   _ZERO clears s##i, _B loads its columns of a row of B, _ADD adds x (a number of A) times these, _SAVE stores to C. */
#define HPMLI_ROW_ZERO(nv, i) HV(f32) s##i = HV(zero)();
#define HPMLI_ROW_B(nv, i)                                                                                             \
    (nv > i + 1 ? HV(load)(b + i * HV_LANES) : HV(load_upto)(b + i * HV_LANES, n - i * HV_LANES))
#define HPMLI_ROW_ADD(nv, i)                                                                                           \
    if (nv > i) s##i = HV(fma)(x, HPMLI_ROW_B(nv, i), s##i);
#define HPMLI_ROW_SAVE(nv, i)                                                                                          \
    if (nv > i)                                                                                                        \
        HV(finish_vector)(&e, c + i * HV_LANES, 0, j + i * HV_LANES, s##i, nv > i + 1 ? HV_LANES : n - i * HV_LANES);
/* Computes columns [j, j + n) of C, a product of one row, in nv vectors of sums; the rows of B are contiguous. */
HPMLI_VEC_INLINE void HV(gemm_row_piece)(const int nv, const hpmli_gemm_part *part, int64_t j, int64_t n)
{
    const hpmli_gemm_desc *d = part->d;
    const float *a = d->a + part->batch * d->a_batch, *b = d->b + part->batch * d->b_batch + j;
    float       *c = d->c + part->batch * d->c_batch + j;
    const hpmli_gemm_epilogue e = { d->alpha, d->beta, d->bias_m, d->bias_n, d->act == 1 };
    HPMLI_TIMES_16(HPMLI_ROW_ZERO, nv)
    for (int64_t k = 0; k < d->k; k++, b += d->b_k) {
        HV(f32) x = HV(set1)(a[k * d->a_k]);
        HPMLI_TIMES_16(HPMLI_ROW_ADD, nv)
    }
    HPMLI_TIMES_16(HPMLI_ROW_SAVE, nv)
}
/* Returns how many vectors of a row of C to compute next, when `left` are not computed: as many as there are registers
   for, so that long contiguous runs of B are read; 9 rather than 8 and then a single one. */
HPMLI_VEC_INLINE int64_t HV(row_piece_vectors)(int64_t left)
{
    if (HPMLI_ROW_VECTORS >= 16 && (left == 16 || left >= 24)) return 16;
    if (left == 9) return 9;
    if (left >= 8) return 8;
    return left >= 4 ? 4 : 1;
}
/* Computes a rectangle of C that is one row, where the rows of B are contiguous, a few vectors of columns at a time. */
HPMLI_KERNEL void HV(gemm_row)(const hpmli_gemm_part *part)
{
    for (int64_t j = part->j0, n; j < part->j1; j += n) {
        int64_t left = part->j1 - j, vectors = HV(row_piece_vectors)((left + HV_LANES - 1) / HV_LANES);
        n = left < vectors * HV_LANES ? left : vectors * HV_LANES;
        if (HPMLI_ROW_VECTORS >= 16 && vectors == 16) HV(gemm_row_piece)(16, part, j, n);
        else if (vectors == 9) HV(gemm_row_piece)(9, part, j, n);
        else if (vectors == 8) HV(gemm_row_piece)(8, part, j, n);
        else if (vectors == 4) HV(gemm_row_piece)(4, part, j, n);
        else HV(gemm_row_piece)(1, part, j, n);
    }
}

HPMLI_KERNEL void HV(gemm_part)(const hpmli_gemm_part *part)
{
    const hpmli_gemm_desc *d = part->d;
    bool reads_operands = d->alpha != 0 && d->k > 0;
    bool is_thin = d->m == 1 || d->n == 1, is_small = d->n <= 16 || d->m <= 16 || d->m * d->n <= 1024;
    if (reads_operands && d->m == 1 && d->b_col == 1 && d->n > 1) HV(gemm_row)(part);
    else if (reads_operands && d->a_k == 1 && d->b_k == 1 && (is_thin || (d->k >= 128 && is_small)))
        HV(gemm_dots)(part);
    else {
        HV(gemm_view) v = HV(gemm_view_of)(part);
        HV(gemm_block_loop)(&v);
    }
}

HPMLI_KERNEL void HV(gemm_sum)(const hpmli_gemm_desc *d, int64_t i, const float *sums, int64_t count, int64_t stride)
{
    const hpmli_gemm_epilogue e = { d->alpha, d->beta, d->bias_m ? d->bias_m + i : NULL, d->bias_n, d->act == 1 };
    float *c = d->c + i * d->ldc;
    for (int64_t j = 0; j < d->n; j += HV_LANES) {
        int64_t n = d->n - j < HV_LANES ? d->n - j : HV_LANES;
        HV(f32) s = HV(load_upto)(sums + i * d->n + j, n);
        for (int64_t t = 1; t < count; t++) s += HV(load_upto)(sums + t * stride + i * d->n + j, n);
        HV(finish_vector)(&e, c + j, 0, j, s, n);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// >>random   Philox: random numbers by number
// ---------------------------------------------------------------------------------------------------------------------
/* One round of Philox takes the words c of a counter and the key k to
       (high(M1 c2) ^ c1 ^ k0,  low(M1 c2),  high(M0 c0) ^ c3 ^ k1,  low(M0 c0))
   and adds a constant to each half of the key; ten rounds make a block of four random words [Salmon et al., "Parallel
   random numbers: as easy as 1, 2, 3", SC 2011]. In a vector register that holds whole blocks the factors c0 and c2 are
   the even words, where the 32 x 32 -> 64 bit multiplication wants them; the products read backwards are (high, low,
   high, low) of the line above, and the counter shifted right by one word is (c1, 0, c3, 0): a round is five
   instructions. The unit of work is a chunk of 64 words, 16 blocks, on every instruction set; a range that starts or
   ends inside a chunk computes all of the chunk and copies what it needs. HV(exact_fma) fuses every multiplication with
   the addition that follows, on the scalar set too, so that all sets compute the same floats: a seed gives the same
   initial weights on every CPU. Operations for this section, where HV(u32) holds HV_LANES / 4 blocks:
   HV(set_u64_pairs)(a, b) sets each pair of 64-bit words to a, b; HV(philox_products)(c, M) is the line above without
   its ^ terms. */
#if HV_LANES == 1
HPMLI_VEC_INLINE void hpmli_philox_scalar(uint64_t seed, uint64_t stream, uint64_t block, uint32_t out[4])
{
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    uint32_t c0 = (uint32_t)block, c1 = (uint32_t)(block >> 32), c2 = (uint32_t)stream, c3 = (uint32_t)(stream >> 32);
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = (uint64_t)HPMLI_PHILOX_M0 * c0, p1 = (uint64_t)HPMLI_PHILOX_M1 * c2;
        c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)p1;
        c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)p0;
        k0 += HPMLI_PHILOX_W0;
        k1 += HPMLI_PHILOX_W1;
    }
    out[0] = c0;
    out[1] = c1;
    out[2] = c2;
    out[3] = c3;
}
static HPMLI_UNUSED const uint32_t hpmli_block_numbers[16] = { 0, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0 };
HPMLI_VEC_INLINE HV(f32) HV(exact_fma)(HV(f32) a, HV(f32) b, HV(f32) c) { return fmaf(a, b, c); }
/* Writes the 64 random words of chunk number `chunk` of a stream to w. */
HPMLI_VEC_INLINE void HV(philox_chunk)(uint32_t *w, uint64_t seed, uint64_t stream, uint64_t chunk) // w: (64)
{
    uint64_t block = chunk * (HPMLI_PHILOX_CHUNK / 4);
    for (int b = 0; b < HPMLI_PHILOX_CHUNK / 4; b++) hpmli_philox_scalar(seed, stream, block + (uint64_t)b, w + 4 * b);
}
#else
HPMLI_VEC_INLINE HV(f32) HV(exact_fma)(HV(f32) a, HV(f32) b, HV(f32) c) { return HV(fma)(a, b, c); }
HPMLI_VEC_INLINE HV(u32) HV(philox_round)(HV(u32) c, HV(u32) key, HV(u32) m)
{
    return HV(philox_products)(c, m) ^ key ^ (HV(u32))((HV(u64))c >> 32);
}
HPMLI_VEC_INLINE HV(u32) HV(philox_count)(uint64_t block, uint64_t stream) /* the counters of block, block + 1 .. */
{
    return (HV(u32))((HV(u64))HV(set_u64_pairs)((int64_t)block, (int64_t)stream) +
                     (HV(u64))HV(load_words)(hpmli_block_numbers));
}
/* Writes the 64 words of chunk number `chunk` to w, four vectors at a time to hide the multiplication's latency. */
HPMLI_VEC_INLINE void HV(philox_chunk)(uint32_t *w, uint64_t seed, uint64_t stream, uint64_t chunk) // w: (64)
{
    uint64_t block = chunk * (HPMLI_PHILOX_CHUNK / 4);
    HV(u32)  m         = HV(set_u64_pairs)(HPMLI_PHILOX_M0, HPMLI_PHILOX_M1);
    HV(u32)  increment = HV(set_u64_pairs)(HPMLI_PHILOX_W0, HPMLI_PHILOX_W1);
    for (int i = 0; i < HPMLI_PHILOX_CHUNK; i += 4 * HV_LANES, block += HV_LANES) {
        HV(u32) key = HV(set_u64_pairs)((uint32_t)seed, (uint32_t)(seed >> 32)), c[4];
        HPMLI_UNROLL
        for (int u = 0; u < 4; u++) c[u] = HV(philox_count)(block + (uint64_t)u * (HV_LANES / 4), stream);
        for (int round = 0; round < 10; round++, key += increment) {
            HPMLI_UNROLL
            for (int u = 0; u < 4; u++) c[u] = HV(philox_round)(c[u], key, m);
        }
        HPMLI_UNROLL
        for (int u = 0; u < 4; u++) HV(store_words)(w + i + u * HV_LANES, c[u]);
    }
}
#endif

/* Returns sqrt(-2 log u) for u in (0, 1]: u = 2^e m for m in [sqrt(1/2), sqrt(2)), log u = e log 2 + log m, where log m
   is the polynomial of HV(log); log 2 is split in two so that e times the larger part is exact. */
HPMLI_VEC_INLINE HV(f32) HV(normal_radius)(HV(f32) u)
{
    HV(f32) m = HV(mantissa)(u), e = HV(exponent)(u), root2 = HV(set1)(1.41421356f), f, z, y;
    e = HV(if_gt)(m, root2, e + 1.0f, e);
    f = HV(if_gt)(m, root2, m * 0.5f, m) - 1.0f;
    z = f * f;
    y = HPMLI_LOG_POLY(HV(exact_fma), f);
    y = HV(exact_fma)(f * z, y, e * -2.12194440e-4f);
    y = HV(exact_fma)(z, HV(set1)(-0.5f), y) + f;
    y = HV(exact_fma)(e, HV(set1)(0.693359375f), y);
    return HV(sqrt)(HV(max)(y * -2.0f, HV(zero)()));
}
/* Computes cos and sin of 2 pi t, |t| <= 1/2: exact reduction to an eighth of a turn, then Cephes' polynomials. */
HPMLI_VEC_INLINE void HV(cos_sin)(HV(f32) t, HV(f32) *cosine, HV(f32) *sine)
{
    HV(f32) q = HV(round)(t * 4.0f), one = HV(set1)(1), aq = HV(abs)(q);
    HV(f32) x = HV(exact_fma)(q, HV(set1)(-0.25f), t) * 6.28318531f, z = x * x;
    HV(f32) s = HV(exact_fma)(HV(set1)(-1.9515295891e-4f), z, HV(set1)(8.3321608736e-3f));
    HV(f32) c = HV(exact_fma)(HV(set1)(2.443315711809948e-5f), z, HV(set1)(-1.388731625493765e-3f));
    s = HV(exact_fma)(x * z, HV(exact_fma)(s, z, HV(set1)(-1.6666654611e-1f)), x);
    c = HV(exact_fma)(c, z, HV(set1)(4.166664568298827e-2f));
    c = HV(exact_fma)(z, HV(exact_fma)(z, c, HV(set1)(-0.5f)), one);
    /* (cosine, sine) for q quarter turns: 0 (c, s), 1 (-s, c), 2 and -2 (-c, -s), -1 (s, -c) */
    HV(f32) u = HV(if_eq)(aq, one, s, c);
    HV(f32) v = HV(if_eq)(aq, one, c, s);
    u = HV(if_gt)(aq, one, -u, u);
    v = HV(if_gt)(aq, one, -v, v);
    *cosine = HV(if_eq)(q, one, -u, u);
    *sine   = HV(if_eq)(q, HV(set1)(-1), -v, v);
}
/* Makes normal floats x, y, independent, of random words: radius from a, angle from b (Box & Muller). */
HPMLI_VEC_INLINE void HV(box_muller)(const uint32_t *a, const uint32_t *b, HV(f32) *x, HV(f32) *y)
{
    const float scale = 1.0f / 4294967296.0f;
    HV(f32) u = HV(exact_fma)(HV(load_u32)(a), HV(set1)(scale), HV(set1)(scale / 2)), r = HV(normal_radius)(u), c, s;
    HV(cos_sin)(HV(from_i32)(HV(load_words)(b)) * scale, &c, &s);
    *x = r * c;
    *y = r * s;
}
/* Makes 64 floats in [0, 1), x, of the top 24 bits of each of the 64 random words w. */
HPMLI_VEC_INLINE void HV(chunk_uniform)(float *x, const uint32_t *w) // x, w: (64)
{
    for (int i = 0; i < HPMLI_PHILOX_CHUNK; i += HV_LANES)
        HV(store)(x + i, HV(from_i32)(HV(load_words)(w + i) >> 8) * (1.0f / 16777216.0f));
}
/* Makes 64 normally distributed floats: x[j] and x[j + 32] from the random words w[j] and w[j + 32], for j < 32. */
HPMLI_VEC_INLINE void HV(chunk_normal)(float *x, const uint32_t *w) // x, w: (64)
{
    for (int i = 0; i < HPMLI_PHILOX_CHUNK / 2; i += HV_LANES) {
        HV(f32) a, b;
        HV(box_muller)(w + i, w + i + HPMLI_PHILOX_CHUNK / 2, &a, &b);
        HV(store)(x + i, a);
        HV(store)(x + i + HPMLI_PHILOX_CHUNK / 2, b);
    }
}
HPMLI_KERNEL void HV(random)(hpmli_draw kind, void *out, uint64_t seed, uint64_t stream, uint64_t first, int64_t n)
{
    uint32_t w[HPMLI_PHILOX_CHUNK];
    float    x[HPMLI_PHILOX_CHUNK], *to = (float *)out;
    for (int64_t c; n > 0; to += c, first += (uint64_t)c, n -= c) {
        int64_t skip = (int64_t)(first % HPMLI_PHILOX_CHUNK);
        c = HPMLI_PHILOX_CHUNK - skip < n ? HPMLI_PHILOX_CHUNK - skip : n;
        HV(philox_chunk)(w, seed, stream, first / HPMLI_PHILOX_CHUNK);
        if (kind == HPMLI_UNIFORM) HV(chunk_uniform)(c == HPMLI_PHILOX_CHUNK ? to : x, w);
        else if (kind == HPMLI_NORMAL) HV(chunk_normal)(c == HPMLI_PHILOX_CHUNK ? to : x, w);
        else memcpy(to, w + skip, (size_t)c * sizeof *w);
        if (kind != HPMLI_WORDS && c < HPMLI_PHILOX_CHUNK) memcpy(to, x + skip, (size_t)c * sizeof *x);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// >>onebit   gradient codecs: 1 bit and bf16, one row
// ---------------------------------------------------------------------------------------------------------------------
/* 1-bit SGD [Seide, Fu, Droppo, Li, Yu, Interspeech 2014]. A row v = g + e (g: gradient, e: residual, the error of the
   last packing) becomes a bit for each element, v >= 0, and two levels: the mean of the elements on each side, which
   for this threshold is the best reconstruction in the sense of least squares. Pass 1 reads g and e, stores v in e,
   writes the bits and sums both sides; pass 2 finds v still in the cache and subtracts the levels: e = v - level,
   rounded once. Every instruction set sums in the same order, hence sends the same bits: element i is added to lane
   i % 16 of a float accumulator (of one or several registers), the lanes are added by halves, and every 1,024 elements
   their sum is added to a double. A mean is limited to the range from the least to the greatest element of its side, so
   that the mean of equal elements is exact: a row that was quantized once is quantized again without loss. */
#define HPMLI_ONEBIT_V (HPMLI_ONEBIT_LANES / HV_LANES) /* registers that make up the 16 lanes of an accumulator */

typedef struct HV(onebit_acc) { /* [0]: of elements below zero, [1]: of the others */
    HV(f32) sum[2][HPMLI_ONEBIT_V], least[2][HPMLI_ONEBIT_V], most[2][HPMLI_ONEBIT_V];
} HV(onebit_acc);

/* Adds v = g + e (e NULL: g), c <= 16 elements, to the sums a; stores v in e; returns a bit for each, 1 if v >= 0. */
HPMLI_VEC_INLINE uint32_t HV(onebit_step)(HV(onebit_acc) *a, float *e, const float *g, int64_t c)
{
    HV(f32)  zero = HV(zero)(), inf = HV(set1)(INFINITY), minf = HV(set1)(-INFINITY);
    uint32_t bits = 0, valid = (1u << c) - 1;
#if HV_LANES > 1 /* 16 single numbers stay a loop */
    HPMLI_UNROLL
#endif
    for (int u = 0; u < HPMLI_ONEBIT_V; u++) {
        int64_t at = u * HV_LANES, left = c > at ? c - at : 0;
        HV(f32) v  = HV(load_upto)(g + at, left), least; /* 0 in lanes behind the end of the row */
        if (e) {
            v += HV(load_upto)(e + at, left);
            HV(store_upto)(e + at, v, left);
        }
        bits |= HV(sign_bits)(v) << at;
        a->sum[0][u] += HV(if_ge)(v, zero, zero, v);
        a->sum[1][u] += HV(if_ge)(v, zero, v, zero);
        /* Lanes behind the end of the row hold 0. On a side that has elements, these zeros could change only
           a->least[1], the least element >= 0; hence select_bits leaves the lanes behind the end out of it. */
        least = HV(min)(HV(if_ge)(v, zero, v, inf), a->least[1][u]);
        a->least[0][u] = HV(min)(v, a->least[0][u]);
        a->most[0][u]  = HV(max)(HV(if_ge)(v, zero, minf, v), a->most[0][u]);
        a->least[1][u] = left < HV_LANES ? HV(select_bits)(valid >> at, least, a->least[1][u]) : least;
        a->most[1][u]  = HV(max)(v, a->most[1][u]);
    }
    return bits & valid;
}

/* Pass 1 of 1-bit SGD over a row: adds gradient g to the error e (if not NULL), writes the signs as bits and, to *row,
   sums and extremes of both signs. The sums are not finite if an element is NaN or infinite. */
HPMLI_KERNEL void HV(onebit_scan)(hpmli_onebit_row *row, uint8_t *bits, float *e, const float *g, int64_t n)
{
    HV(onebit_acc) a;
    int64_t        ones = 0;
    row->sum[0] = row->sum[1] = 0;
    HPMLI_UNROLL
    for (int u = 0; u < HPMLI_ONEBIT_V; u++) {
        a.least[0][u] = a.least[1][u] = HV(set1)(INFINITY);
        a.most[0][u] = a.most[1][u] = HV(set1)(-INFINITY);
    }
    for (int64_t i = 0; i < n;) {
        int64_t end = n - i < HPMLI_ONEBIT_CHUNK ? n : i + HPMLI_ONEBIT_CHUNK;
        HPMLI_UNROLL
        for (int u = 0; u < HPMLI_ONEBIT_V; u++) a.sum[0][u] = a.sum[1][u] = HV(zero)();
        for (; i < end; i += HPMLI_ONEBIT_LANES) { /* two calls, so that whole steps are compiled without checks of c */
            float   *ei = e ? e + i : NULL;
            uint32_t m  = end - i >= HPMLI_ONEBIT_LANES ? HV(onebit_step)(&a, ei, g + i, HPMLI_ONEBIT_LANES)
                                                        : HV(onebit_step)(&a, ei, g + i, end - i);
            bits[i / 8]     = (uint8_t)m;
            bits[i / 8 + 1] = (uint8_t)(m >> 8);
            ones += __builtin_popcount(m);
        }
        for (int side = 0; side < 2; side++) {
            HPMLI_UNROLL
            for (int h = HPMLI_ONEBIT_V / 2; h > 0; h /= 2)
                for (int u = 0; u < h; u++) a.sum[side][u] += a.sum[side][u + h];
            row->sum[side] += (double)HV(sum_lanes)(a.sum[side][0]);
        }
    }
    if ((n + 15) / 16 % 2) bits[(n + 15) / 16 * 2] = bits[(n + 15) / 16 * 2 + 1] = 0; /* up to whole 32-bit words */
    for (int side = 0; side < 2; side++) {
        HPMLI_UNROLL
        for (int u = 1; u < HPMLI_ONEBIT_V; u++) {
            a.least[side][0] = HV(min)(a.least[side][0], a.least[side][u]);
            a.most[side][0]  = HV(max)(a.most[side][0], a.most[side][u]);
        }
        row->least[side] = -HV(max_lane)(-a.least[side][0]);
        row->most[side]  = HV(max_lane)(a.most[side][0]);
    }
    row->count[1] = ones;
    row->count[0] = n - ones;
}

/* Pass 2 of 1-bit SGD: turns e, gradient + residual, into the new residual, by subtracting from each element its level:
   `high` if the element is 0 or more, else `low`. */
HPMLI_KERNEL void HV(onebit_carry)(float *e, float low, float high, int64_t n)
{
    HV(f32) l = HV(set1)(low), h = HV(set1)(high);
    HV_LOOP(n) {
        HV(f32) v = HV(load_upto)(e + i, c);
        HV(store_upto)(e + i, v - HV(if_ge)(v, HV(zero)(), h, l), c);
    }
}

#define HPMLI_ONEBIT_DECODE(name, result)                                                                              \
    HPMLI_KERNEL void HV(name)(float *out, const uint8_t *bits, float low, float high, int64_t n)                      \
    {                                                                                                                  \
        HV(f32) l = HV(set1)(low), h = HV(set1)(high);                                                                 \
        for (int64_t i = 0; i < n; i += HPMLI_ONEBIT_LANES) {                                                          \
            uint32_t m = bits[i / 8] | (uint32_t)bits[i / 8 + 1] << 8;                                                 \
            HPMLI_UNROLL                                                                                               \
            for (int u = 0; u < HPMLI_ONEBIT_LANES; u += HV_LANES) {                                                   \
                int64_t c = n - i > u ? n - i - u : 0;                                                                 \
                float  *y = out + i + u;                                                                               \
                HV(f32) v = HV(select_bits)(m >> u, h, l);                                                             \
                HV(store_upto)(y, result, c);                                                                          \
            }                                                                                                          \
        }                                                                                                              \
    }                                                                                                                  \
    static void HV(name)(float *out, const uint8_t *bits, float low, float high, int64_t n)
HPMLI_ONEBIT_DECODE(onebit_decode, v);
HPMLI_ONEBIT_DECODE(onebit_decode_add, HV(load_upto)(y, c) + v);

/* Packs g + e as bf16 and stores the rounding error in the residual e, or NULL. Returns false for a NaN, an infinity,
   or a float that rounds to infinity: 0 * error is NaN then, and stays NaN in the sum. */
HPMLI_KERNEL bool HV(bf16_encode)(uint16_t *packed, float *e, const float *g, int64_t n)
{
    HV(f32) nan = HV(zero)();
    HV_LOOP(n) {
        HV(f32) v = HV(load_upto)(g + i, c), error;
        if (e) v += HV(load_upto)(e + i, c);
        HV(store_upto_bf16)(packed + i, v, c);
        error = v - HV(load_upto_bf16)(packed + i, c);
        if (e) HV(store_upto)(e + i, error, c);
        nan = HV(fma)(error, HV(zero)(), nan);
    }
    return HV(sum_lanes)(nan) == 0;
}
HPMLI_KERNEL void HV(bf16_decode_add)(float *out, const void *packed, int64_t n)
{
    HV_LOOP(n) {
        HV(f32) v = HV(load_upto)(out + i, c) + HV(load_upto_bf16)((const uint16_t *)packed + i, c);
        HV(store_upto)(out + i, v, c);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// >>conv-kernels   convolution: tiles of pixels by channels
// ---------------------------------------------------------------------------------------------------------------------
/* A convolution is a matrix product: Y (pixels, OC) = columns (pixels, K) W (K, OC), K = taps x channels, see >>conv.
   The matrix of columns is never made. In a copy of the image in NHWC order, channels innermost, with its padding, the
   numbers that a pixel of the result reads are a few contiguous runs, one for each row of the convolution's kernel; the
   next pixel's are the same runs moved by one pixel. For a 3 x 3 kernel, C channels and padding p:
        padded image, a row of it:  | 0 .. 0 | pixel 0: C floats | pixel 1 | pixel 2 | ..
                                      \__________ run of 3 C floats for y[0] _________/
                                               \__________ for y[1], C floats later __________/ ..
   As plain C, for one image, stride 1 and no groups (x_pitch: floats of a padded row):
        for (int64_t oh = 0; oh < OH; oh++)
            for (int64_t ow = 0; ow < OW; ow++)
                for (int64_t oc = 0; oc < OC; oc++) {
                    float sum = bias[oc];
                    for (int64_t kh = 0; kh < KH; kh++) {
                        const float *run = image + (oh + kh) * x_pitch + ow * C;
                        for (int64_t i = 0; i < KW * C; i++) sum += run[i] * w[(kh * KW * C + i) * OC + oc];
                    }
                    y[(oh * OW + ow) * OC + oc] = sum;
                }
   HV(conv_tile) does so for a tile of a few pixels (ow) by one or two vectors of channels (oc), whose sums stay in
   registers as in >>gemm: each number of a run is broadcast and multiplied by vectors of w. The copy of the image costs
   about a hundredth of the work; results go back to the order of y in bands of a few rows.
   The same tile computes all three products. The gradient of the weights has taps x channels as rows and sums over
   pixels; the gradient of the input has pixels of dy as rows, taps x channels as columns, and is added to the places
   that those taps read. */
/* Computes a tile of mr rows by nv vectors of the product that s describes, of the operands at a and b, into c, with
   the row macros of >>gemm. All lanes are stored, because the arrays have space for whole tiles. */
HPMLI_VEC_INLINE void HV(conv_tile)(const int mr, const int nv, HPMLI_CONV_TILE_ARGS)
{
    const int64_t a_row = s->a_row, a_k = s->a_k, b_k = s->b_k, ldc = s->c_row;
    const int64_t cols = HV_LANES, last = (nv - 1) * HV_LANES;
    HPMLI_ROWS(HPMLI_TILE_ZERO, nv)
    for (int64_t u = s->runs[0]; u > 0; u--, a += s->a_run[0], b += s->b_run[0]) {
        const float *a_from = a, *b_from = b;
        for (int64_t v = s->runs[1]; v > 0; v--, a_from += s->a_run[1], b_from += s->b_run[1]) {
            const float *a0 = a_from, *a3 = a0 + 3 * a_row, *a6 = a3 + 3 * a_row, *a9 = a6 + 3 * a_row;
            const float *a12 = a9 + 3 * a_row, *q = b_from;
            for (int64_t k = s->length; k > 0; k--) {
                HV(f32) b0 = HV(load)(q), b1 = nv < 2 ? b0 : HV(load)(q + HV_LANES), b2 = b1, b3 = b1;
                HPMLI_ROWS(HPMLI_TILE_ROW, nv)
                a0 += a_k, a3 += a_k, a6 += a_k, a9 += a_k, a12 += a_k, q += b_k;
            }
            (void)a3, (void)a6, (void)a9, (void)a12, (void)cols, (void)last;
        }
    }
    if (s->add) { HPMLI_ROWS(HPMLI_TILE_ADD, nv) }
    else { HPMLI_ROWS(HPMLI_TILE_STORE, nv) }
}

#define HPMLI_CONV_TILE(nv, r)                                                                                         \
    HPMLI_KERNEL void HV(conv_tile_##nv##_##r)(HPMLI_CONV_TILE_ARGS) { HV(conv_tile)(r + 1, nv, s, a, b, c); }
#define HPMLI_CONV_TILE_NAME(nv, r) HV(conv_tile_##nv##_##r),
HPMLI_ROWS(HPMLI_CONV_TILE, 1)
HPMLI_ROWS(HPMLI_CONV_TILE, 2)
static hpmli_conv_tile_fn *const HV(conv_tiles)[2][HPMLI_MR] = { { HPMLI_ROWS(HPMLI_CONV_TILE_NAME, 1) },
                                                                 { HPMLI_ROWS(HPMLI_CONV_TILE_NAME, 2) } };

/* Computes the product of a and b that s describes into c: rows dealt out evenly to tiles, cols <= HPMLI_NR columns. */
HPMLI_VEC_INLINE void HV(conv_product)(const hpmli_conv_product *s, int64_t cols, const float *a, const float *b,
                                       float *c)
{
    int64_t tiles = (s->rows + HPMLI_MR - 1) / HPMLI_MR;
    for (int64_t t = 0; t < tiles; t++) {
        int64_t i = t * s->rows / tiles, mr = (t + 1) * s->rows / tiles - i;
        HV(conv_tiles)[cols > HV_LANES][mr - 1](s, a + i * s->a_row, b, c + i * s->c_row);
    }
}
/* Sets out[j * HV_LANES + i] = x[i * ldx + j] for i < rows, j < cols, at most HV_LANES each; 0 for other i. */
HPMLI_KERNEL void HV(transpose_block)(const float *x, int64_t ldx, int64_t rows, int64_t cols, float *out)
{
    float part[HV_LANES * HV_LANES];
    if (cols < HV_LANES) {
        for (int64_t i = 0; i < rows; i++) HV(store)(part + i * HV_LANES, HV(load_partial)(x + i * ldx, cols));
        x   = part;
        ldx = HV_LANES;
    }
    HV(transpose)(x, ldx, rows, out, HV_LANES);
}
/* Sets y[j * ldy + i] = x[i * ldx + j] + bias[j] (bias NULL: no bias) for i < rows, j < cols. If `accumulate`, adds the
   previous y; then, if `relu`, applies relu. padded: whole vectors may be read from the last columns of x, because
   there is memory behind them. */
HPMLI_VEC_INLINE void HV(conv_store_transposed)(const float *x, int64_t ldx, int64_t rows, int64_t cols, bool padded,
                                                float *y, int64_t ldy, const float *bias, int relu, int accumulate)
{
    float square[HV_LANES * HV_LANES];
    for (int64_t i = 0; i < rows; i += HV_LANES) {
        int64_t lanes = rows - i < HV_LANES ? rows - i : HV_LANES;
        for (int64_t j = 0; j < cols; j += HV_LANES) {
            int64_t n = cols - j < HV_LANES ? cols - j : HV_LANES;
            HV(transpose_block)(x + i * ldx + j, ldx, lanes, padded ? HV_LANES : n, square);
            for (int64_t q = 0; q < n; q++) {
                float  *to = y + (j + q) * ldy + i;
                HV(f32) v  = HV(load)(square + q * HV_LANES);
                if (bias) v += HV(set1)(bias[j + q]);
                if (accumulate) v = HV(load_upto)(to, lanes) + v;
                if (relu) v = HV(max)(HV(zero)(), v); /* in this order a NaN stays NaN */
                HV(store_upto)(to, v, lanes);
            }
        }
    }
}
/* Packs the weights w (OC, C, taps) of output channels [o, o + HPMLI_CONV_PANEL) as tiles read them, in panels of
   HPMLI_NR channels: dst[panel][(tap * C + c) * HPMLI_NR + lane], with zeros in lanes without a channel. */
HPMLI_KERNEL void HV(conv_pack)(const hpmli_conv *d, float *dst, const float *w, int64_t o)
{
    int64_t end = o + HPMLI_CONV_PANEL < d->OC ? o + HPMLI_CONV_PANEL : d->OC, each = d->C * d->taps;
    if (end % HPMLI_NR) memset(dst + end / HPMLI_NR * HPMLI_NR * each, 0, (size_t)(each * HPMLI_NR) * sizeof *dst);
    for (; o < end; o += HV_LANES) {
        int64_t rows = end - o < HV_LANES ? end - o : HV_LANES;
        float  *to   = dst + o / HPMLI_NR * HPMLI_NR * each + o % HPMLI_NR;
        for (int64_t c = 0; c < d->C; c++)
            HV(conv_store_transposed)(w + o * each + c * d->taps, each, rows, d->taps, false, to + c * HPMLI_NR,
                                      d->C * HPMLI_NR, NULL, 0, 0);
    }
}
/* Packs the weights w of output channel o for the gradient of the convolution's input: the weights of each run of
   contiguous taps, in the order (tap, channel of the input), are cut into panels of HPMLI_NR floats, the last one
   filled up with zeros: dst[run][panel][o * HPMLI_NR + lane]. */
HPMLI_KERNEL void HV(conv_pack_for_dx)(const hpmli_conv *d, float *dst, const float *w, int64_t o)
{
    int64_t runs  = d->runs[0] * d->runs[1], run_taps = d->run_floats / d->C;
    int64_t width = (d->run_floats + HPMLI_NR - 1) / HPMLI_NR * HPMLI_NR;
    for (int64_t run = 0; run < runs; run++, dst += width * d->OC)
        for (int64_t lane = 0, tap = 0, c = 0; lane < width; lane++) {
            dst[lane / HPMLI_NR * HPMLI_NR * d->OC + o * HPMLI_NR + lane % HPMLI_NR] =
                lane < d->run_floats ? w[(o * d->C + c) * d->taps + run * run_taps + tap] : 0;
            if (++c == d->C) {
                c = 0;
                tap++;
            }
        }
}
/* Copies an image x (channels, height, width) to `image` in NHWC order, whose rows are `pitch` floats apart. */
HPMLI_KERNEL void HV(conv_to_nhwc)(float *image, const float *x, int64_t channels, int64_t height, int64_t width,
                                   int64_t pitch)
{
    float   square[HV_LANES * HV_LANES];
    int64_t plane = height * width, row = 0, col = 0;
    if (channels == 1) {
        for (; row < height; row++) memcpy(image + row * pitch, x + row * width, (size_t)width * sizeof *x);
        return;
    }
    if (channels < 4) {
        for (; row < height; row++)
            for (int64_t c = 0; c < channels; c++)
                for (col = 0; col < width; col++)
                    image[row * pitch + col * channels + c] = x[c * plane + row * width + col];
        return;
    }
    for (int64_t p = 0; p < plane; p += HV_LANES) {
        float  *to[HV_LANES]; /* where each pixel's channels go */
        int64_t n = plane - p < HV_LANES ? plane - p : HV_LANES;
        for (int64_t i = 0; i < n; i++) {
            to[i] = image + row * pitch + col * channels;
            if (++col == width) {
                col = 0;
                row++;
            }
        }
        for (int64_t c = 0; c < channels; c += HV_LANES) {
            int64_t rows = channels - c < HV_LANES ? channels - c : HV_LANES;
            HV(transpose_block)(x + c * plane + p, plane, rows, n, square);
            for (int64_t i = 0; i < n; i++) HV(store_upto)(to[i] + c, HV(load)(square + i * HV_LANES), rows);
        }
    }
}
HPMLI_KERNEL void HV(conv_copy)(const hpmli_conv_copy *d, float *to, const float *from, const float *bias, int relu,
                                int accumulate)
{
    bool    rows_contiguous = !bias && d->to_pixel == d->channels && d->from_pixel == d->channels;
    int64_t n = rows_contiguous ? d->pixels * d->channels : d->channels;
    int64_t count = rows_contiguous ? 1 : d->pixels;
    for (int64_t r = 0; r < d->rows; r++)
        for (int64_t p = 0; p < count; p++) {
            const float *x = from + r * d->from_row + p * d->from_pixel;
            float       *y = to + r * d->to_row + p * d->to_pixel;
            HV_LOOP(n) {
                HV(f32) v = HV(load_upto)(x + i, c);
                if (bias) v += HV(load_upto)(bias + i, c);
                if (accumulate) v += HV(load_upto)(y + i, c);
                if (relu) v = HV(max)(HV(zero)(), v); /* in this order a NaN stays NaN */
                HV(store_upto)(y + i, v, c);
            }
        }
}
/* Copies, or adds if `accumulate`, a padded NHWC image without its padding to dx, an array (C, H, W) or, if d->nhwc,
   the channels of one group in an NHWC image. */
HPMLI_KERNEL void HV(conv_from_nhwc)(const hpmli_conv *d, float *dx, const float *image, int accumulate)
{
    hpmli_conv_copy copy = { d->H, d->W, d->C, d->W * d->x_pixel, d->x_pixel, d->x_pitch, d->C };
    if (d->nhwc) {
        HV(conv_copy)(&copy, dx, image, NULL, 0, accumulate);
        return;
    }
    bool    unpadded = d->x_pitch == d->W * d->C;
    int64_t rows = unpadded ? 1 : d->H;
    int64_t n = unpadded ? d->H * d->W : d->W;
    for (int64_t r = 0; r < rows; r++)
        HV(conv_store_transposed)(image + r * d->x_pitch, d->C, n, d->C, true, dx + r * n, d->H * d->W, NULL, 0,
                                  accumulate);
}
/* Computes output channels [o, o + n) of `rows` rows of `images` images into the band (images, rows, OW, HPMLI_NR). The
   rows of a tile are pixels of a row, or one pixel of several images where rows are narrow (see hpmli_conv). */
HPMLI_VEC_INLINE void HV(conv_band)(const hpmli_conv *d, int64_t images, int64_t rows, const float *w, const float *x,
                                    int64_t n, float *band)
{
    const int64_t      w_run = d->run_floats * HPMLI_NR; /* weights of a run for a panel of channels */
    hpmli_conv_product s = { d->OW, d->x_pixel_step, 1, HPMLI_NR, HPMLI_NR, d->run_floats, { d->runs[0], d->runs[1] },
                             { d->run_step[0], d->run_step[1] }, { d->runs[1] * w_run, w_run }, 0 };
    if (d->images_forward == 1) {
        for (int64_t r = 0; r < rows; r++)
            HV(conv_product)(&s, n, x + r * d->x_row_step, w, band + r * d->OW * HPMLI_NR);
        return;
    }
    s.rows  = images;
    s.a_row = d->x_floats;
    s.c_row = rows * d->OW * HPMLI_NR;
    for (int64_t p = 0; p < rows * d->OW; p++)
        HV(conv_product)(&s, n, x + p / d->OW * d->x_row_step + p % d->OW * d->x_pixel_step, w, band + p * HPMLI_NR);
}
/* Computes output channels [o0, o1) of `images` images of one group from their padded images in NHWC order and packed
   weights w. band: scratch of (images_forward, band_rows, OW, HPMLI_NR) floats. y: the group's first channel. */
HPMLI_KERNEL void HV(conv_forward)(const hpmli_conv *d, int64_t images, const float *w, const float *x, int64_t o0,
                                   int64_t o1, const float *bias, int relu, float *y, float *band)
{
    const int64_t pixels = d->OH * d->OW, y_image = d->groups * d->OC * pixels;
    for (int64_t o = o0; o < o1; o += HPMLI_NR) {
        int64_t      n   = o1 - o < HPMLI_NR ? o1 - o : HPMLI_NR;
        const float *add = bias ? bias + o : NULL;
        for (int64_t row = 0; row < d->OH; row += d->band_rows) {
            int64_t rows = d->OH - row < d->band_rows ? d->OH - row : d->band_rows;
            hpmli_conv_copy copy = { 1, rows * d->OW, n, 0, d->y_pixel, 0, HPMLI_NR };
            HV(conv_band)(d, images, rows, w + o * d->taps * d->C, x + row * d->x_row_step, n, band);
            for (int64_t i = 0; i < images; i++) {
                float       *to   = y + i * y_image + row * d->OW * (d->nhwc ? d->y_pixel : 1);
                const float *from = band + i * rows * d->OW * HPMLI_NR;
                if (d->nhwc) HV(conv_copy)(&copy, to + o, from, add, relu, 0);
                else HV(conv_store_transposed)(from, HPMLI_NR, rows * d->OW, n, true, to + o * pixels, pixels, add,
                                               relu, 0);
            }
        }
    }
}
/* Adds dy times a panel of W^T, of `cols` numbers of a run, to the dx of one image. The products of HPMLI_CONV_PIXELS
   pixels are computed first, in tiles that go over rows, because a tile of one narrow row would be small. */
HPMLI_VEC_INLINE void HV(conv_input_grad_narrow)(const hpmli_conv *d, int64_t cols, const float *w, const float *dy,
                                                 float *dx)
{
    float              sums[HPMLI_CONV_PIXELS * HPMLI_NR];
    hpmli_conv_product s = { 0, d->OC, 1, HPMLI_NR, HPMLI_NR, d->OC, { 1, 1 }, { 0, 0 }, { 0, 0 }, 0 };
    const int64_t      pixels = d->OH * d->OW;
    for (int64_t p = 0; p < pixels; p += s.rows) {
        s.rows = pixels - p < HPMLI_CONV_PIXELS ? pixels - p : HPMLI_CONV_PIXELS;
        HV(conv_product)(&s, cols, dy + p * d->OC, w, sums);
        for (int64_t q = 0; q < s.rows; q++) {
            float *to = dx + (p + q) / d->OW * d->x_row_step + (p + q) % d->OW * d->x_pixel_step;
            for (int64_t j = 0; j < HPMLI_NR && j < cols; j += HV_LANES)
                HV(store)(to + j, HV(load)(to + j) + HV(load)(sums + q * HPMLI_NR + j));
        }
    }
}
/* dx += dy W^T, the gradient of the input, for padded NHWC images, one run (contiguous taps) after the other. The
   pixels of a row of dy are added one after the other, because the runs of dx that they are added to overlap. */
HPMLI_KERNEL void HV(conv_input_grad)(const hpmli_conv *d, int64_t images, const float *w, const float *dy, float *dx)
{
    hpmli_conv_product s = { d->OW, d->OC, 1, HPMLI_NR, d->x_pixel_step, d->OC, { 1, 1 }, { 0, 0 }, { 0, 0 }, 1 };
    for (int64_t u = 0; u < d->runs[0]; u++)
        for (int64_t v = 0; v < d->runs[1]; v++)
            for (int64_t lane = 0; lane < d->run_floats; lane += HPMLI_NR, w += HPMLI_NR * d->OC)
                for (int64_t i = 0; i < images; i++) {
                    const float *from = dy + i * d->y_floats;
                    float *to = dx + i * d->x_floats + u * d->run_step[0] + v * d->run_step[1] + lane;
                    if (d->OW < HPMLI_CONV_NARROW) HV(conv_input_grad_narrow)(d, d->run_floats - lane, w, from, to);
                    for (int64_t row = 0; row < d->OH && d->OW >= HPMLI_CONV_NARROW; row++)
                        HV(conv_product)(&s, d->run_floats - lane, from + row * d->OW * d->OC, w,
                                         to + row * d->x_row_step);
                }
}
/* Sums the weights' gradient of output channels [o0, o1), of which dw has panels (panel, taps, C, HPMLI_NR), over all
   pixels of `images` images; add: adds to dw. */
HPMLI_KERNEL void HV(conv_weight_grad)(const hpmli_conv *d, int64_t images, const float *x, const float *dy, float *dw,
                                       int64_t o0, int64_t o1, int add)
{
    hpmli_conv_product s = { d->run_floats, 1, d->x_pixel_step, d->OC, HPMLI_NR, d->OW, { images, d->OH },
                             { d->x_floats, d->x_row_step }, { d->y_floats, d->OW * d->OC }, add };
    for (int64_t o = o0; o < o1; o += HPMLI_NR)
        for (int64_t u = 0; u < d->runs[0]; u++)
            for (int64_t v = 0; v < d->runs[1]; v++, dw += d->run_floats * HPMLI_NR)
                HV(conv_product)(&s, d->OC - o, x + u * d->run_step[0] + v * d->run_step[1], dy + o, dw);
}
/* Adds up `count` partial sums of dw in order: dw (OC, C, taps) of channels [o, o + HPMLI_CONV_PANEL), += if
   `accumulate`. */
HPMLI_KERNEL void HV(conv_unpack)(const hpmli_conv *d, float *dw, const float *partial_sums, int64_t count,
                              int64_t o, int accumulate)
{
    float   sum[HV_LANES * HV_LANES];
    int64_t end = o + HPMLI_CONV_PANEL < d->OC ? o + HPMLI_CONV_PANEL : d->OC;
    for (; o < end; o += HV_LANES) {
        const float *from = partial_sums + o / HPMLI_NR * HPMLI_NR * d->taps * d->C + o % HPMLI_NR;
        for (int64_t c = 0; c < d->C; c++)
            for (int64_t t = 0; t < d->taps; t += HV_LANES) {
                int64_t n = d->taps - t < HV_LANES ? d->taps - t : HV_LANES;
                for (int64_t i = 0; i < n; i++) {
                    const float *p = from + ((t + i) * d->C + c) * HPMLI_NR;
                    HV(f32)      s = HV(load)(p);
                    for (int64_t k = 1; k < count; k++) s += HV(load)(p + k * d->sum_floats);
                    HV(store)(sum + i * HV_LANES, s);
                }
                HV(conv_store_transposed)(sum, HV_LANES, n, end - o < HV_LANES ? end - o : HV_LANES, true,
                                          dw + (o * d->C + c) * d->taps + t, d->C * d->taps, NULL, 0, accumulate);
            }
    }
}
/* Loads one corner of each of n adjacent windows of 2 x 2 pixels. q: the corner; 0 and 1 are in the image row at x, 2
   and 3 in the row below, at x + width. */
HPMLI_VEC_INLINE HV(f32) HV(pool_corner)(const float *x, int64_t width, int q, int64_t n)
{
    const float *p = x + q / 2 * width;
    HV(f32) a = HV(load_upto)(p, 2 * n);
    HV(f32) b = 2 * n > HV_LANES ? HV(load_upto)(p + HV_LANES, 2 * n - HV_LANES) : HV(zero)();
    return q % 2 ? HV(odd_lanes)(a, b) : HV(even_lanes)(a, b);
}
/* at: for each window, the corner (0 to 3, as in pool_corner) of the first of equal maxima, or of the first NaN. */
HPMLI_KERNEL void HV(max_pool_row)(float *y, float *at, const float *x, int64_t width, int64_t n)
{
    HV_LOOP(n) {
        HV(f32) best = HV(pool_corner)(x + 2 * i, width, 0, c), from = HV(zero)();
        for (int q = 1; q < 4; q++) {
            HV(f32) v = HV(pool_corner)(x + 2 * i, width, q, c);
            from = HV(if_eq)(best, best, HV(if_ge)(best, v, from, HV(set1)((float)q)), from);
            best = HV(if_eq)(best, best, HV(if_ge)(best, v, best, v), best);
        }
        HV(store_upto)(y + i, best, c);
        HV(store_upto)(at + i, from, c);
    }
}
/* Sets the gradient dx of n windows of 2 x 2 pixels: dy at position `at` of each window, which had the maximum, and 0
   at the other three; `accumulate`: adds them to dx. */
HPMLI_KERNEL void HV(max_pool_row_back)(float *dx, const float *at, const float *dy, int64_t width, int64_t n,
                                        bool accumulate)
{
    HV_LOOP(n) {
        HV(f32) from = HV(load_upto)(at + i, c), v = HV(load_upto)(dy + i, c);
        for (int q = 0; q < 4; q += 2) {
            HV(f32) a = HV(if_eq)(from, HV(set1)((float)q), v, HV(zero)());
            HV(f32) b = HV(if_eq)(from, HV(set1)((float)q + 1), v, HV(zero)());
            for (int64_t h = 0, lanes = 2 * c; h < 2 && lanes > 0; h++, lanes -= HV_LANES) {
                float  *p = dx + 2 * i + q / 2 * width + h * HV_LANES;
                HV(f32) d = h ? HV(interleave_high)(a, b) : HV(interleave_low)(a, b);
                if (accumulate) d += HV(load_upto)(p, lanes);
                HV(store_upto)(p, d, lanes);
            }
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// >>table   the kernels of this pass
// ---------------------------------------------------------------------------------------------------------------------
static const hpmli_kernels HV(kernels) = {
    HPMLI_ISA_NAME, HV(act_forward), HV(act_backward), HV(vadd), HV(vsub), HV(vmul), HV(vdiv),
    HV(vfill), HV(vaxpby), HV(vscale_add), HV(vcentred), HV(vaxpbypc), HV(vsum), HV(vdot), HV(vsum_wide),
    HV(vdot_wide), HV(vmoments), HV(vmax), HV(vamax), HV(vexp_sum), HV(vsum_rows), HV(lstm_cells),
    HV(lstm_cells_back), HV(opt_step), HV(to_f32),
    HV(from_f32), HV(gemm_part), HV(gemm_sum), HV(random), HV(onebit_scan), HV(onebit_carry), HV(onebit_decode),
    HV(onebit_decode_add), HV(bf16_encode), HV(bf16_decode_add), HV(conv_pack), HV(conv_pack_for_dx),
    HV(conv_to_nhwc), HV(conv_copy), HV(conv_from_nhwc), HV(conv_forward), HV(conv_input_grad), HV(conv_weight_grad),
    HV(conv_unpack), HV(max_pool_row), HV(max_pool_row_back), HV(crc32c),
};
#undef HPMLI_ISA
#endif /* HPMLI_ISA */

#ifdef HPMLI_CHOOSE
#undef HPMLI_CHOOSE
// ---------------------------------------------------------------------------------------------------------------------
// >>choose   which of the kernels run: the best instruction set of the CPU
// ---------------------------------------------------------------------------------------------------------------------
#undef HV
#undef HV_LANES
#undef HV_LOOP
#undef HV_POLY5
#undef HV_POLY_ON

/* Returns the kernels called `name` (NULL: the fastest) that this CPU runs; NULL: there are none of that name. */
HPMLI_FN const hpmli_kernels *hpmli_kernels_find(const char *name)
{
    const hpmli_kernels *sets[3]; /* those that this CPU runs, the fastest first */
    int                  count = 0;
#if defined(HPMLI_EDITOR) /* an editor knows only the scalar pass */
#elif defined(HPMLI_HAVE_X86)
    __builtin_cpu_init();
#ifdef HPMLI_HAVE_AVX512
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        sets[count++] = &hpmli_kernels_avx512;
#endif
#ifdef HPMLI_HAVE_AVX2
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) sets[count++] = &hpmli_kernels_avx2;
#endif
#elif defined(HPMLI_HAVE_NEON)
    sets[count++] = &hpmli_kernels_neon;
#endif
    sets[count++] = &hpmli_kernels_scalar;
    for (int i = 0; i < count; i++)
        if (!name || strcmp(name, sets[i]->name) == 0) return sets[i];
    return NULL;
}
#endif
#ifdef __CUDACC__
#pragma nv_diagnostic pop
#endif
#endif /* HPML_IMPLEMENTATION */

// CHANGES
//     0.1.0   first version: tensors, graph, layers, optimizers, trainer, codecs, data, checkpoints, CPU kernels
//
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
