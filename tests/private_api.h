/* Private functions of hpml.h that tests call. private_api.c, the unit with hpml.h's body, defines them. */
#include "../hpml.h"

/* Returns the kernels for an instruction set, NULL if this CPU or build has none. hpml_packing.kernels and the argument
   k below take the result. */
const void *private_kernels(const char *isa);
void private_parallel(hpml_ctx *ctx, int64_t tasks, void (*fn)(void *arg, int64_t task, int thread), void *arg);

void private_activation(const void *k, hpml_act f, float *y, const float *x, int64_t n);

/* hpmli_gemm_desc: a batch of products, c = act(alpha a b + beta c + biases). */
typedef struct private_product {
    int64_t      m, n, k;
    const float *a, *b;                            /* (m, k), (k, n) */
    float       *c;                                /* (m, n) */
    int64_t      a_row, a_k, b_k, b_col, ldc;       /* strides in floats: a[i a_row + p a_k], b[p b_k + j b_col] */
    float        alpha, beta;
    const float *bias_n, *bias_m;                  /* (n), (m), or NULL */
    int          act;                              /* 1: relu */
    int64_t      batch, a_batch, b_batch, c_batch; /* number of products; strides between them, in floats */
} private_product;
void private_gemm(hpml_ctx *ctx, const private_product *p);
void private_gemm_blocks(hpml_ctx *ctx, int64_t l2, int64_t l3); /* blocks for second and third caches of such bytes */
bool private_byte_dot(hpml_ctx *ctx, bool use); /* turns the instruction for bytes on or off; returns what was before */
void private_gemm_serial(hpml_ctx *ctx, int thread, const private_product *p); /* called inside a task */

typedef enum private_numbers { PRIVATE_WORDS, PRIVATE_UNIFORM, PRIVATE_NORMAL } private_numbers;
void private_random(const void *k, private_numbers kind, void *out, uint64_t seed, uint64_t stream,
                    uint64_t first, int64_t n);

/* Sorts `count` arrays, each in use from time `from` to time `to`, by size, and plans their offsets. */
typedef struct private_slot { size_t bytes, offset; int from, to; } private_slot;
bool private_offsets(hpml_ctx *ctx, private_slot *slots, int count);
