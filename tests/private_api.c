/* hpml.h's body, compiled once and linked to nearly every program of build.ninja, and the functions of private_api.h,
   which make a few private functions of hpml.h callable from tests. */
#define HPML_IMPLEMENTATION
#include "private_api.h"

const void *private_kernels(const char *isa) { return hpmli_kernels_find(isa); }

void private_parallel(hpml_ctx *ctx, int64_t tasks, void (*fn)(void *arg, int64_t task, int thread), void *arg)
{
    hpmli_parallel(ctx, tasks, fn, arg);
}

void private_activation(const void *k, hpml_act f, float *y, const float *x, int64_t n)
{
    ((const hpmli_kernels *)k)->act_forward(f, 0, y, x, n);
}

void private_random(const void *k, private_numbers kind, void *out, uint64_t seed, uint64_t stream,
                    uint64_t first, int64_t n)
{
    ((const hpmli_kernels *)k)->random((hpmli_draw)kind, out, seed, stream, first, n);
}

static hpmli_gemm_desc gemm_desc(const private_product *p)
{
    hpmli_gemm_desc d;
    memset(&d, 0, sizeof d);
    d.m       = p->m;
    d.n       = p->n;
    d.k       = p->k;
    d.a       = p->a;
    d.a_row   = p->a_row;
    d.a_k     = p->a_k;
    d.b       = p->b;
    d.b_k     = p->b_k;
    d.b_col   = p->b_col;
    d.c       = p->c;
    d.ldc     = p->ldc;
    d.alpha   = p->alpha;
    d.beta    = p->beta;
    d.bias_n  = p->bias_n;
    d.bias_m  = p->bias_m;
    d.act     = p->act;
    d.batch   = p->batch;
    d.a_batch = p->a_batch;
    d.b_batch = p->b_batch;
    d.c_batch = p->c_batch;
    return d;
}

void private_gemm(hpml_ctx *ctx, const private_product *p)
{
    hpmli_gemm_desc d = gemm_desc(p);
    hpmli_gemm(ctx, &d);
}

void private_gemm_blocks(hpml_ctx *ctx, int64_t l2, int64_t l3) { hpmli_gemm_blocks(ctx, l2, l3); }

bool private_byte_dot(hpml_ctx *ctx, bool use)
{
    bool before = ctx->byte_word == HPMLI_WORD_BYTES;
    ctx->byte_word = use ? HPMLI_WORD_BYTES : HPMLI_WORD_PAIR;
    return before;
}

void private_gemm_serial(hpml_ctx *ctx, int thread, const private_product *p)
{
    hpmli_gemm_desc d = gemm_desc(p);
    hpmli_gemm_serial(ctx, thread, &d);
}

bool private_offsets(hpml_ctx *ctx, private_slot *slots, int count)
{
    hpmli_life *s = hpmli_new(ctx, hpmli_life, count);
    for (int i = 0; s && i < count; i++) {
        s[i].bytes  = slots[i].bytes;
        s[i].offset = (size_t)i;
        s[i].from   = slots[i].from;
        s[i].to     = slots[i].to;
    }
    size_t bytes = 0;
    bool   good  = s && hpmli_lives_place(ctx, s, count, &bytes);
    for (int i = 0; good && i < count; i++)
        slots[i] = (private_slot){ s[i].bytes, s[i].offset, s[i].from, s[i].to };
    hpmli_free(ctx, s);
    return good;
}
