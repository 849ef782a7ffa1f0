/* Matrix product: against a plain double loop on every instruction set, and the same bits at any thread count. */
#define HPML_IMPLEMENTATION
#include "../hpml.h"
#include "kernels.h"
#include "test.h"

/* n floats with a guard of 64 behind them. */
#define GUARD 64
static float *floats(int64_t n)
{
    float *p = (float *)malloc(sizeof(float) * (size_t)(n + GUARD));
    for (int64_t i = 0; i < n + GUARD; i++) p[i] = uniform();
    return p;
}

typedef struct product { /* what is asked for; arrays are made to fit */
    int64_t m, n, k, batch;
    int     ta, tb, bias_n, bias_m, act, pad;
    float   alpha, beta;
} product;

static double reference(const hpmli_gemm_desc *d, const float *c, int64_t t, int64_t i, int64_t j, double *scale)
{
    double sum = 0, size = 1e-3;
    for (int64_t p = 0; d->alpha != 0 && p < d->k; p++) {
        double x = (double)d->a[t * d->a_batch + i * d->a_rs + p * d->a_cs];
        x *= (double)d->b[t * d->b_batch + p * d->b_rs + j * d->b_cs];
        sum += x, size += fabs(x);
    }
    sum *= (double)d->alpha;
    if (d->beta != 0) sum += (double)d->beta * (double)c[t * d->c_batch + i * d->ldc + j];
    if (d->bias_n) sum += (double)d->bias_n[j];
    if (d->bias_m) sum += (double)d->bias_m[i];
    if (d->act == 1 && sum < 0) sum = 0;
    *scale = size + 4;
    return sum;
}

/* Runs the product on every context; returns the number of wrong or differing elements. */
static int64_t wrong(hpml_ctx *const *ctx, int contexts, const product *s)
{
    hpmli_gemm_desc d;
    int64_t bad = 0, lda = (s->ta ? s->m : s->k) + s->pad, ldb = (s->tb ? s->k : s->n) + s->pad, ldc = s->n + s->pad;
    int64_t na = (s->ta ? s->k : s->m) * lda, nb = (s->tb ? s->n : s->k) * ldb, nc = s->m * ldc;
    float  *a = floats(na * s->batch), *b = floats(nb * s->batch), *c = floats(nc * s->batch), *bias_n = floats(s->n);
    float  *bias_m = floats(s->m), *got = floats(nc * s->batch), *first = floats(nc * s->batch);
    size_t  bytes = sizeof(float) * (size_t)(nc * s->batch + GUARD);
    memset(&d, 0, sizeof d);
    d.m = s->m, d.n = s->n, d.k = s->k, d.batch = s->batch, d.alpha = s->alpha, d.beta = s->beta, d.act = s->act;
    d.a = a, d.a_rs = s->ta ? 1 : lda, d.a_cs = s->ta ? lda : 1, d.a_batch = na;
    d.b = b, d.b_rs = s->tb ? 1 : ldb, d.b_cs = s->tb ? ldb : 1, d.b_batch = nb;
    d.c = got, d.ldc = ldc, d.c_batch = nc;
    d.bias_n = s->bias_n ? bias_n : NULL, d.bias_m = s->bias_m ? bias_m : NULL;
    for (int64_t i = 0; s->beta == 0 && i < nc * s->batch; i++) /* C must not be read: NaN all over */
        if (i % ldc < s->n) c[i] = NAN;
    for (int x = 0; x < contexts; x++) {
        double scale;
        memcpy(got, c, bytes);
        hpmli_gemm(ctx[x], &d);
        if (x == 0) memcpy(first, got, bytes);
        else if (memcmp(first, got, bytes) != 0) bad++;
        for (int64_t i = 0; x == 0 && i < nc * s->batch + GUARD; i++) {
            int64_t t = nc ? i / nc : 0, r = nc ? i % nc / ldc : 0, j = nc ? i % nc % ldc : 0;
            if (i >= nc * s->batch || j >= s->n) bad += memcmp(&got[i], &c[i], sizeof(float)) != 0; /* guards, gaps */
            else {
                double want = reference(&d, c, t, r, j, &scale);
                bad += !(fabs((double)got[i] - want) <= 2e-6 * scale);
            }
        }
    }
    free(a), free(b), free(c), free(bias_n), free(bias_m), free(got), free(first);
    if (bad)
        printf("  %s: %lld x %lld x %lld batch %lld %c%c alpha %g beta %g bias %d %d act %d: %lld wrong\n",
               hpml_ctx_cpu(ctx[0]), (long long)s->m, (long long)s->n, (long long)s->k, (long long)s->batch,
               s->ta ? 'T' : 'N', s->tb ? 'T' : 'N', (double)s->alpha, (double)s->beta, s->bias_n, s->bias_m,
               s->act, (long long)bad);
    return bad;
}

static int64_t below(uint32_t n) { return (int64_t)((double)(uniform() + 1) * 0.5 * n) % n; }

static product random_product(const int64_t *sizes, uint32_t count)
{
    product s;
    memset(&s, 0, sizeof s);
    s.m = sizes[below(count)], s.n = sizes[below(count)], s.k = sizes[below(count)];
    s.batch   = below(4) == 0 ? 3 : 1;
    s.ta      = (int)below(2), s.tb = (int)below(2);
    s.pad     = (int)below(3);
    s.alpha   = below(3) ? 1 : below(4) ? -0.75f : 0;
    s.beta    = below(2) ? 0 : below(2) ? 1 : 0.5f;
    s.bias_n  = below(4) == 0, s.bias_m = below(4) == 0;
    s.act     = below(4) == 0;
    return s;
}

/* Calls `check` with contexts of 1, 2 and 3 threads for every instruction set. */
static int64_t on_all(int64_t (*check)(hpml_ctx *const *ctx, int contexts))
{
    int64_t bad = 0;
    for (int a = 0; a < ISAS; a++) {
        hpml_ctx *ctx[3];
        for (int t = 0; t < 3; t++) ctx[t] = context(isas[a], t + 1);
        noise = 1;
        if (ctx[0]) bad += check(ctx, 3);
        for (int t = 0; t < 3; t++) hpml_ctx_free(ctx[t]);
    }
    return bad;
}

static int64_t check_small(hpml_ctx *const *ctx, int contexts)
{
    static const int64_t sizes[] = { 0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 13, 14, 15, 16, 17, 25, 27, 31, 32, 33,
                                     47, 64, 65, 97 };
    int64_t bad = 0;
    for (int i = 0; i < 3000; i++) {
        product s = random_product(sizes, sizeof sizes / sizeof sizes[0]);
        bad += wrong(ctx, contexts, &s);
    }
    return bad;
}

TEST(gemm_small_shapes_of_every_kind)
{
    ENSURE(on_all(check_small) == 0);
}

/* Short k, where columns of tiles are taken in one call, and A^T that is packed. */
static int64_t check_columns(hpml_ctx *const *ctx, int contexts)
{
    static const int64_t of[][3] = { { 61, 183, 10 }, { 183, 256, 1 }, { 25, 784, 6 }, { 200, 130, 32 },
                                     { 14, 640, 33 }, { 9, 128, 300 }, { 61, 300, 513 }, { 170, 200, 1030 } };
    int64_t bad = 0;
    for (int i = 0; i < 8 * 6; i++) {
        product s = random_product(of[i / 6], 1);
        s.m = of[i / 6][0], s.n = of[i / 6][1], s.k = of[i / 6][2], s.batch = 1 + i % 2, s.alpha = 1;
        s.ta = i % 3 > 0, s.tb = 0, s.beta = i % 4 == 1, s.bias_n = s.bias_m = i % 6 == 5;
        s.pad = i % 6 == 2 ? 700 : i % 2; /* columns of A far apart */
        bad += wrong(ctx, contexts, &s);
    }
    return bad;
}

TEST(gemm_columns_of_tiles_and_packed_a)
{
    ENSURE(on_all(check_columns) == 0);
}

static int64_t check_large(hpml_ctx *const *ctx, int contexts)
{
    static const int64_t sizes[] = { 1, 10, 61, 128, 183, 211, 256, 385, 513, 512, 1030 }; /* across blocks */
    int64_t bad = 0;
    for (int i = 0; i < (strcmp(hpml_ctx_cpu(ctx[0]), "scalar") == 0 ? 12 : 40); i++) {
        product s = random_product(sizes, sizeof sizes / sizeof sizes[0]);
        s.batch = 1;
        bad += wrong(ctx, contexts, &s);
    }
    return bad;
}

TEST(gemm_shapes_across_blocks)
{
    ENSURE(on_all(check_large) == 0);
}

static int64_t check_long(hpml_ctx *const *ctx, int contexts)
{
    static const int64_t shape[][3] = {
        { 3, 2500, 33 }, { 30, 1100, 200 }, { 200, 1057, 20 }, /* across the blocks of n */
        { 1200, 260, 230 }, { 400, 130, 1030 },                /* columns of A far apart: packed, swapped */
        { 10, 33, 9000 }, { 32, 27, 20001 }, { 40, 70, 5003 }, { 1, 7, 10000 }, { 2, 1, 70001 }
    };
    int64_t bad = 0;
    for (int i = 0; i < (int)(sizeof shape / sizeof shape[0]); i++)
        for (int trans = 0; trans < 4; trans++) {
            product s;
            memset(&s, 0, sizeof s);
            s.m = shape[i][0], s.n = shape[i][1], s.k = shape[i][2], s.batch = 1, s.alpha = 1;
            s.ta = trans & 1, s.tb = trans >> 1, s.pad = trans & 1;
            s.beta = i % 2 ? 0.5f : 0, s.bias_n = i % 3 == 0, s.bias_m = i % 4 == 1;
            s.act = i % 3 == 1;
            bad += wrong(ctx, contexts, &s);
        }
    return bad;
}

TEST(gemm_long_k_and_wide_n)
{
    ENSURE(on_all(check_long) == 0);
}

static int64_t check_serial(hpml_ctx *const *ctx, int contexts)
{
    int64_t bad = 0;
    for (int x = 0; x < contexts; x++) {
        hpmli_gemm_desc d;
        float a[6] = { 1, 2, 3, 4, 5, 6 }, b[6] = { 1, 0, 0, 1, 1, 1 }, c[4] = { NAN, NAN, NAN, NAN };
        memset(&d, 0, sizeof d);
        d.m = 2, d.n = 2, d.k = 3, d.batch = 1, d.alpha = 1;
        d.a = a, d.a_rs = 3, d.a_cs = 1, d.b = b, d.b_rs = 2, d.b_cs = 1, d.c = c, d.ldc = 2;
        hpmli_gemm_serial(ctx[x], x, &d); /* context x has x + 1 threads */
        bad += c[0] != 4 || c[1] != 5 || c[2] != 10 || c[3] != 11;
    }
    return bad;
}

TEST(gemm_inside_a_task)
{
    ENSURE(on_all(check_serial) == 0);
}

TEST(sgemm_refuses_what_makes_no_sense)
{
    hpml_ctx *ctx = context(NULL, 1);
    float     x[4] = { 1, 2, 3, 4 };
    ENSURE(hpml_sgemm(ctx, false, false, 2, 2, 2, 1, x, 1, x, 2, 0, x, 2) == HPML_ERR_ARGUMENT);
    ENSURE(strstr(hpml_ctx_error(ctx), "sgemm") != NULL);
    hpml_ctx_clear_error(ctx);
    ENSURE(hpml_sgemm(ctx, false, false, -1, 2, 2, 1, x, 2, x, 2, 0, x, 2) == HPML_ERR_ARGUMENT);
    hpml_ctx_clear_error(ctx);
    ENSURE(hpml_sgemm(ctx, false, false, 0, 0, 0, 1, NULL, 1, NULL, 1, 0, NULL, 1) == HPML_OK);
    hpml_ctx_free(ctx);
}
