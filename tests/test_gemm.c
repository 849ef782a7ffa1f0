/* Matrix products and the rest of BLAS: against plain double loops on every instruction set, and the same bits at any
   thread count. */
#include "kernels.h"
#include "private_api.h"
#include "test.h"

/* Returns n random floats and 64 more behind them, which nothing may change. */
#define GUARD 64
static float *floats(int64_t n)
{
    float *p = (float *)malloc(sizeof(float) * (size_t)(n + GUARD));
    for (int64_t i = 0; i < n + GUARD; i++) p[i] = uniform();
    return p;
}

typedef struct product { /* a product to test; pad: unused columns of each matrix */
    int64_t m, n, k, batch;
    int     ta, tb, bias_n, bias_m, act, pad;
    float   alpha, beta;
} product;

static double reference(const private_product *d, const float *c, int64_t t, int64_t i, int64_t j, double *scale)
{
    double sum = 0, size = 1e-3;
    for (int64_t p = 0; d->alpha != 0 && p < d->k; p++) {
        double x = (double)d->a[t * d->a_batch + i * d->a_row + p * d->a_k];
        x *= (double)d->b[t * d->b_batch + p * d->b_k + j * d->b_col];
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

/* Computes the product on each context, with the blocks for the second and third caches that caches[x / 2] says (in
   bytes; NULL: this machine's). Returns the number of elements that are wrong or whose bits differ. */
static int64_t wrong_blocks(hpml_ctx *const *ctx, int contexts, const product *s, const int64_t (*caches)[2])
{
    private_product d;
    int64_t bad = 0, lda = (s->ta ? s->m : s->k) + s->pad, ldb = (s->tb ? s->k : s->n) + s->pad, ldc = s->n + s->pad;
    int64_t na = (s->ta ? s->k : s->m) * lda, nb = (s->tb ? s->n : s->k) * ldb, nc = s->m * ldc;
    float  *a = floats(na * s->batch), *b = floats(nb * s->batch), *c = floats(nc * s->batch), *bias_n = floats(s->n);
    float  *bias_m = floats(s->m), *got = floats(nc * s->batch), *first = floats(nc * s->batch);
    size_t  bytes = sizeof(float) * (size_t)(nc * s->batch + GUARD);
    memset(&d, 0, sizeof d);
    d.m = s->m, d.n = s->n, d.k = s->k, d.batch = s->batch, d.alpha = s->alpha, d.beta = s->beta, d.act = s->act;
    d.a = a, d.a_row = s->ta ? 1 : lda, d.a_k = s->ta ? lda : 1, d.a_batch = na;
    d.b = b, d.b_k = s->tb ? 1 : ldb, d.b_col = s->tb ? ldb : 1, d.b_batch = nb;
    d.c = got, d.ldc = ldc, d.c_batch = nc;
    d.bias_n = s->bias_n ? bias_n : NULL, d.bias_m = s->bias_m ? bias_m : NULL;
    for (int64_t i = 0; s->beta == 0 && i < nc * s->batch; i++) /* with beta 0 C must not be read */
        if (i % ldc < s->n) c[i] = NAN;
    for (int x = 0; x < contexts; x++) {
        double scale;
        memcpy(got, c, bytes);
        if (caches) private_gemm_blocks(ctx[x], caches[x / 2][0], caches[x / 2][1]);
        private_gemm(ctx[x], &d);
        if (x == 0) memcpy(first, got, bytes);
        else if (memcmp(first, got, bytes) != 0) bad++;
        for (int64_t i = 0; x == 0 && i < nc * s->batch + GUARD; i++) {
            int64_t t = nc ? i / nc : 0, r = nc ? i % nc / ldc : 0, j = nc ? i % nc % ldc : 0;
            if (i >= nc * s->batch || j >= s->n) bad += memcmp(&got[i], &c[i], sizeof(float)) != 0; /* not C */
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

static int64_t wrong(hpml_ctx *const *ctx, int contexts, const product *s)
{
    return wrong_blocks(ctx, contexts, s, NULL);
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

/* An allocator whose last block of 4 KB or more, the working memory of products here, has a fence behind it. */
typedef struct fence {
    unsigned char *block;
    size_t         size;
} fence;
enum { FENCE = 8192 };
static void *fence_alloc(size_t size, size_t align, void *user)
{
    fence *f = (fence *)user;
    void  *p;
    if (posix_memalign(&p, align, size + FENCE) != 0) return NULL;
    memset((char *)p + size, 0xA5, FENCE);
    if (size >= 4096) f->block = (unsigned char *)p, f->size = size;
    return p;
}
static void fence_free(void *p, size_t size, void *user)
{
    (void)size, (void)user;
    free(p);
}
/* A product takes working memory for its own size, if none was taken before, and writes nothing behind it. */
TEST(products_stay_in_their_working_memory)
{
    static const int64_t sizes[] = { 1, 2, 5, 13, 16, 17, 24, 25, 31, 33, 47, 63, 64, 65, 97, 130, 257, 400, 803 };
    for (int a = 0; a < ISAS; a++)
        for (int i = 0; i < 200; i++) {
            fence         f = { NULL, 0 };
            hpml_ctx_desc d = { .cpu = isas[a], .threads = 1, .allocator = { fence_alloc, fence_free, &f } };
            hpml_ctx     *ctx = hpml_ctx_create(&d);
            product       s   = random_product(sizes, sizeof sizes / sizeof sizes[0]);
            if (hpml_ctx_status(ctx) != HPML_OK) i = 200; /* an instruction set that this CPU has not */
            else ENSURE(wrong(&ctx, 1, &s) == 0);
            for (int k = 0; k < FENCE && f.block && i < 200; k++) ENSURE(f.block[f.size + (size_t)k] == 0xA5);
            hpml_ctx_free(ctx);
        }
}

/* A short k, for which one call computes several columns of tiles, and a packed A^T. */
static int64_t check_columns(hpml_ctx *const *ctx, int contexts)
{
    static const int64_t of[][3] = { { 61, 183, 10 }, { 183, 256, 1 }, { 25, 784, 6 }, { 200, 130, 32 },
                                     { 14, 640, 33 }, { 9, 128, 300 }, { 61, 300, 513 }, { 170, 200, 1030 } };
    int64_t bad = 0;
    for (int i = 0; i < 8 * 6; i++) {
        product s = random_product(of[i / 6], 1);
        s.m = of[i / 6][0], s.n = of[i / 6][1], s.k = of[i / 6][2], s.batch = 1 + i % 2, s.alpha = 1;
        s.ta = i % 3 > 0, s.tb = 0, s.beta = i % 4 == 1, s.bias_n = s.bias_m = i % 6 == 5;
        s.pad = i % 6 == 2 ? 700 : i % 2; /* a large step from one column of A to the next */
        bad += wrong(ctx, contexts, &s);
    }
    return bad;
}

TEST_LONG(gemm_columns_of_tiles_and_packed_a)
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
        { 1200, 260, 230 }, { 400, 130, 1030 },                /* A^T with distant columns: packed, swapped */
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

/* Caches of three sizes, for which the blocks of rows and columns differ, give the same bits: products across these
   blocks, transposed and not, of which some pack A. */
static int64_t check_caches(hpml_ctx *const *ctx, int contexts)
{
    static const int64_t caches[][2] = { { 1 << 18, 1 << 21 }, { 1 << 20, 1 << 24 }, { 1 << 21, 1 << 26 } };
    static const int64_t shape[][3]  = { { 401, 323, 67 }, { 90, 1111, 33 }, { 100, 300, 810 } };
    hpml_ctx *const two[] = { ctx[0], ctx[1], ctx[0], ctx[1], ctx[0], ctx[1] };
    int64_t bad = contexts < 2;
    for (int i = 0; i < 3 * 4; i++) {
        product s;
        memset(&s, 0, sizeof s);
        s.m = shape[i / 4][0], s.n = shape[i / 4][1], s.k = shape[i / 4][2], s.batch = 1, s.alpha = 1;
        s.ta = i & 1, s.tb = i >> 1 & 1, s.bias_n = i / 4 == 1, s.pad = i & 2;
        bad += wrong_blocks(two, 6, &s, caches);
    }
    return bad;
}

TEST(gemm_gives_the_same_bits_for_caches_of_any_size)
{
    ENSURE(on_all(check_caches) == 0);
}

static int64_t check_serial(hpml_ctx *const *ctx, int contexts)
{
    int64_t bad = 0;
    for (int x = 0; x < contexts; x++) {
        private_product d;
        float a[6] = { 1, 2, 3, 4, 5, 6 }, b[6] = { 1, 0, 0, 1, 1, 1 }, c[4] = { NAN, NAN, NAN, NAN };
        memset(&d, 0, sizeof d);
        d.m = 2, d.n = 2, d.k = 3, d.batch = 1, d.alpha = 1;
        d.a = a, d.a_row = 3, d.a_k = 1, d.b = b, d.b_k = 2, d.b_col = 1, d.c = c, d.ldc = 2;
        private_gemm_serial(ctx[x], x, &d); /* context x has x + 1 threads */
        bad += c[0] != 4 || c[1] != 5 || c[2] != 10 || c[3] != 11;
    }
    return bad;
}

TEST(gemm_inside_a_task)
{
    ENSURE(on_all(check_serial) == 0);
}

TEST(sgemm_rejects_invalid_sizes)
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

/* Products of 16-bit floats: each pair of types, transposes, leading dimensions, sizes around those of tiles and
   blocks. */
typedef struct halves {
    int64_t    m, n, k, lda, ldb, ldc;
    int        ta, tb;
    float      alpha, beta;
    hpml_dtype type[2];
} halves;

static void *stored(hpml_ctx *ctx, hpml_dtype type, float *x, int64_t n) /* x becomes the values as they are stored */
{
    void *p = malloc((size_t)n * hpml_dtype_size(type) + 1);
    hpml_convert(ctx, type, p, HPML_DTYPE_F32, x, n);
    hpml_convert(ctx, HPML_DTYPE_F32, x, type, p, n);
    return p;
}

static int64_t wrong_halves(hpml_ctx *const *ctx, int contexts, const halves *s)
{
    int64_t bad = 0, na = (s->ta ? s->k : s->m) * s->lda, nb = (s->tb ? s->n : s->k) * s->ldb, nc = s->m * s->ldc;
    float  *a = floats(na), *b = floats(nb), *c = floats(nc), *got = floats(nc), *first = floats(nc);
    void   *ha = stored(ctx[0], s->type[0], a, na), *hb = stored(ctx[0], s->type[1], b, nb);
    size_t  bytes = sizeof(float) * (size_t)(nc + GUARD);
    for (int64_t i = 0; s->beta == 0 && i < nc; i++)
        if (i % s->ldc < s->n) c[i] = NAN;
    for (int x = 0; x < contexts; x++) {
        memcpy(got, c, bytes);
        bad += hpml_gemm(ctx[x], s->ta, s->tb, s->m, s->n, s->k, s->alpha, s->type[0], ha, s->lda, s->type[1], hb,
                         s->ldb, s->beta, got, s->ldc) != HPML_OK;
        if (x == 0) memcpy(first, got, bytes);
        else bad += memcmp(first, got, bytes) != 0;
    }
    for (int64_t i = 0; i < nc + GUARD; i++) {
        int64_t r = i / (s->ldc > 0 ? s->ldc : 1), j = i - r * s->ldc;
        double  sum = 0, size = 1;
        if (i >= nc || j >= s->n) { /* guards and unused columns */
            bad += memcmp(&first[i], &c[i], sizeof(float)) != 0;
            continue;
        }
        for (int64_t p = 0; p < s->k && s->alpha != 0; p++) {
            double v = (double)a[s->ta ? p * s->lda + r : r * s->lda + p];
            v *= (double)b[s->tb ? j * s->ldb + p : p * s->ldb + j], sum += v, size += fabs(v);
        }
        sum = (double)s->alpha * sum + (s->beta != 0 ? (double)s->beta * (double)c[i] : 0);
        bad += !(fabs((double)first[i] - sum) <= 1e-6 * size);
    }
    free(a), free(b), free(c), free(got), free(first), free(ha), free(hb);
    if (bad)
        printf("  %s: %s x %s, %lld x %lld x %lld %c%c alpha %g beta %g: %lld wrong\n", hpml_ctx_cpu(ctx[0]),
               hpml_dtype_name(s->type[0]), hpml_dtype_name(s->type[1]), (long long)s->m, (long long)s->n,
               (long long)s->k, s->ta ? 'T' : 'N', s->tb ? 'T' : 'N', (double)s->alpha, (double)s->beta,
               (long long)bad);
    return bad;
}

static int64_t check_halves(hpml_ctx *const *ctx, int contexts)
{
    static const int64_t sizes[] = { 0, 1, 2, 7, 16, 33, 64, 100 }, large[][3] = {
        { 1, 700, 600 }, { 700, 1, 600 }, { 530, 70, 260 }, { 70, 1100, 257 }, { 513, 515, 20 }, { 40, 33, 3000 } };
    int64_t bad = 0;
    for (int i = 0; i < 400 + 6 * 4; i++) {
        const int64_t *l = i < 400 ? NULL : large[(i - 400) / 4];
        halves s = { .type = { (hpml_dtype)(i % 3), (hpml_dtype)(i / 3 % 3) }, .ta = i & 1, .tb = i >> 1 & 1 };
        s.m = l ? l[0] : sizes[below(8)], s.n = l ? l[1] : sizes[below(8)], s.k = l ? l[2] : sizes[below(8)];
        s.lda = (s.ta ? s.m : s.k) + below(3), s.ldb = (s.tb ? s.k : s.n) + below(3), s.ldc = s.n + below(3);
        s.alpha = below(3) ? 1 : below(4) ? -0.75f : 0, s.beta = below(2) ? 0 : below(2) ? 1 : 0.5f;
        bad += wrong_halves(ctx, contexts, &s);
    }
    return bad;
}

TEST(gemm_of_halves_in_every_pair_of_types)
{
    ENSURE(on_all(check_halves) == 0);
}

/* Products of 8-bit integers against sums in 64 bits, with the instruction for bytes where the CPU has one and without.
   Unused columns are guarded; extreme: all numbers are the largest, which saturated sums would show. */
static int64_t wrong_bytes(hpml_ctx *const *ctx, int contexts, const int64_t *shape, int ta, int tb, bool add,
                           bool extreme)
{
    int64_t  m = shape[0], n = shape[1], k = shape[2], bad = 0;
    int64_t  lda = (ta ? m : k) + below(3), ldb = (tb ? k : n) + below(3), ldc = n + below(3);
    int64_t  na = (ta ? k : m) * lda, nb = (tb ? n : k) * ldb, nc = m * ldc + GUARD;
    int8_t  *a = (int8_t *)malloc((size_t)na + 1);
    uint8_t *b = (uint8_t *)malloc((size_t)nb + 1);
    int32_t *c = (int32_t *)malloc((size_t)nc * sizeof *c), *got = (int32_t *)malloc((size_t)nc * sizeof *c);
    for (int64_t i = 0; i < na; i++) a[i] = (int8_t)(extreme ? -128 : below(256) - 128);
    for (int64_t i = 0; i < nb; i++) b[i] = (uint8_t)(extreme ? 255 : below(256));
    for (int64_t i = 0; i < nc; i++) c[i] = (int32_t)below(2000000) - 1000000;
    for (int x = 0; x < 2 * contexts; x++) {
        bool has = private_byte_dot(ctx[x / 2], false);
        if (x % 2 && !has) continue;
        private_byte_dot(ctx[x / 2], x % 2);
        memcpy(got, c, (size_t)nc * sizeof *c);
        bad += hpml_igemm(ctx[x / 2], ta, tb, m, n, k, a, lda, b, ldb, add, got, ldc) != HPML_OK;
        private_byte_dot(ctx[x / 2], has);
        for (int64_t i = 0; i < nc; i++) {
            int64_t r = i / (ldc > 0 ? ldc : 1), j = i - r * ldc, sum = add ? c[i] : 0;
            for (int64_t p = 0; p < k && r < m && j < n; p++)
                sum += a[ta ? p * lda + r : r * lda + p] * b[tb ? j * ldb + p : p * ldb + j];
            if (r >= m || j >= n) sum = c[i];
            bad += got[i] != (int32_t)sum;
        }
    }
    free(a), free(b), free(c), free(got);
    if (bad)
        printf("  %s: %lld x %lld x %lld %d %d, %s: %lld wrong\n", hpml_ctx_cpu(ctx[0]), (long long)m, (long long)n,
               (long long)k, ta, tb, add ? "added" : "stored", (long long)bad);
    return bad;
}

static int64_t check_bytes(hpml_ctx *const *ctx, int contexts)
{
    static const int64_t sizes[] = { 0, 1, 2, 3, 5, 7, 13, 14, 15, 16, 27, 31, 32, 33, 47, 64, 65 };
    static const int64_t large[][3] = { { 3, 530, 1030 }, { 131, 515, 40 }, { 9, 300, 2055 }, { 2, 5, 16387 },
                                       { 1, 2, 65793 } };
    int64_t bad = 0;
    for (int i = 0; i < 300; i++) {
        const int64_t shape[3] = { sizes[below(17)], sizes[below(17)], sizes[below(17)] };
        bad += wrong_bytes(ctx, contexts, shape, i & 1, i >> 1 & 1, i % 3 == 0, i % 7 == 0);
    }
    for (int i = 0; i < 5 * 4; i++) bad += wrong_bytes(ctx, contexts, large[i / 4], i & 1, i >> 1 & 1, false, i >= 16);
    return bad;
}

TEST(igemm_is_exact_on_every_instruction_set)
{
    ENSURE(on_all(check_bytes) == 0);
}

/* Products of bf16 equal, bit for bit, a model of the instruction VDPBF16PS: the values of k in pairs, the odd one
   first, each sum rounded once by fmaf, subnormal numbers taken as 0; sums of 512 values of k added to each other. */
static float bf16_value(uint16_t bits)
{
    uint32_t word = (uint32_t)bits << 16;
    float    x;
    memcpy(&x, &word, sizeof x);
    return fabsf(x) < 1.17549435e-38f ? copysignf(0, x) : x;
}

static float bf16_model(const uint16_t *a, int64_t a_k, const uint16_t *b, int64_t b_k, int64_t k)
{
    float total = 0;
    for (int64_t first = 0; first < k; first += 512) {
        float   sum = 0;
        int64_t end = k < first + 512 ? k : first + 512;
        for (int64_t p = first; p < end; p += 2) {
            if (p + 1 < end) sum = fmaf(bf16_value(a[(p + 1) * a_k]), bf16_value(b[(p + 1) * b_k]), sum);
            sum = fmaf(bf16_value(a[p * a_k]), bf16_value(b[p * b_k]), sum);
        }
        total = first > 0 ? total + sum : sum;
    }
    return total;
}

static int64_t wrong_bf16(hpml_ctx *const *ctx, int contexts, const int64_t *shape, int ta, int tb, bool scaled)
{
    int64_t   m = shape[0], n = shape[1], k = shape[2], bad = 0;
    int64_t   lda = (ta ? m : k) + below(3), ldb = (tb ? k : n) + below(3), ldc = n + below(3);
    int64_t   na = (ta ? k : m) * lda, nb = (tb ? n : k) * ldb, nc = m * ldc;
    float    *c = floats(nc), *got = floats(nc), alpha = scaled ? -0.75f : 1, beta = scaled ? 0.5f : 0;
    uint16_t *a = (uint16_t *)malloc((size_t)na * 2 + 2), *b = (uint16_t *)malloc((size_t)nb * 2 + 2);
    for (int64_t i = 0; i < na; i++) /* every tenth number is subnormal */
        a[i] = (uint16_t)(below(2) << 15 | (below(10) ? 110 + below(30) : 0) << 7 | below(128));
    for (int64_t i = 0; i < nb; i++) b[i] = (uint16_t)(below(2) << 15 | (110 + below(30)) << 7 | below(128));
    for (int x = 0; x < contexts; x++) {
        memcpy(got, c, sizeof(float) * (size_t)(nc + GUARD));
        bad += hpml_bgemm(ctx[x], ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, got, ldc) != HPML_OK;
        for (int64_t i = 0; i < nc + GUARD; i++) {
            int64_t r = i / (ldc > 0 ? ldc : 1), j = i - r * ldc;
            float   want = c[i];
            if (r < m && j < n)
                want = bf16_model(a + r * (ta ? 1 : lda), ta ? lda : 1, b + j * (tb ? ldb : 1), tb ? 1 : ldb, k);
            const float scale = 1e-6f * (fabsf(want) + 1);
            if (scaled && r < m && j < n) bad += !(fabsf(got[i] - (alpha * want + beta * c[i])) <= scale);
            else bad += got[i] != want;
        }
    }
    free(a), free(b), free(c), free(got);
    if (bad)
        printf("  %s: %lld x %lld x %lld %d %d: %lld wrong\n", hpml_ctx_cpu(ctx[0]), (long long)m, (long long)n,
               (long long)k, ta, tb, (long long)bad);
    return bad;
}

static int64_t check_bf16(hpml_ctx *const *ctx, int contexts)
{
    static const int64_t sizes[] = { 0, 1, 2, 3, 5, 7, 13, 14, 15, 16, 27, 31, 32, 33, 47, 64, 65 };
    static const int64_t large[][3] = { { 3, 530, 300 }, { 131, 515, 40 }, { 9, 60, 1055 } };
    int64_t bad = 0;
    for (int i = 0; i < 200; i++) {
        const int64_t shape[3] = { sizes[below(17)], sizes[below(17)], sizes[below(17)] };
        bad += wrong_bf16(ctx, contexts, shape, i & 1, i >> 1 & 1, i % 5 == 0);
    }
    for (int i = 0; i < 3 * 4; i++) bad += wrong_bf16(ctx, contexts, large[i / 4], i & 1, i >> 1 & 1, false);
    return bad;
}

TEST(bgemm_rounds_as_the_instruction_does)
{
    ENSURE(on_all(check_bf16) == 0);
}

/* Returns an array for n numbers that are inc elements apart. */
static float *strided(int64_t n, int64_t inc) { return floats(n > 0 ? (n - 1) * inc + 1 : 0); }

static int64_t wrong_gemv(hpml_ctx *ctx, int64_t m, int64_t n, bool trans, int64_t inc_x, int64_t inc_y, int64_t pad,
                          float alpha, float beta)
{
    int64_t bad = 0, rows = trans ? n : m, k = trans ? m : n, lda = n + pad;
    int64_t all = rows > 0 ? (rows - 1) * inc_y + 1 : 0;
    float  *a = floats(m * lda), *x = strided(k, inc_x), *y = strided(rows, inc_y), *got = strided(rows, inc_y);
    for (int64_t i = 0; i < rows && beta == 0; i++) y[i * inc_y] = NAN; /* must not be read */
    memcpy(got, y, sizeof(float) * (size_t)(all + GUARD));
    bad += hpml_sgemv(ctx, trans, m, n, alpha, a, lda, x, inc_x, beta, got, inc_y) != HPML_OK;
    for (int64_t i = 0; i < all + GUARD; i++) {
        double sum = 0, size = 1;
        if (i >= all || i % inc_y != 0) {
            bad += memcmp(&got[i], &y[i], sizeof(float)) != 0;
            continue;
        }
        for (int64_t p = 0; p < k && alpha != 0; p++) {
            double v = (double)a[trans ? p * lda + i / inc_y : i / inc_y * lda + p] * (double)x[p * inc_x];
            sum += v, size += fabs(v);
        }
        sum = (double)alpha * sum + (beta != 0 ? (double)beta * (double)y[i] : 0);
        bad += !(fabs((double)got[i] - sum) <= 1e-6 * size);
    }
    free(a), free(x), free(y), free(got);
    if (bad)
        printf("  %s: gemv %lld x %lld %c increments %lld %lld: %lld wrong\n", hpml_ctx_cpu(ctx), (long long)m,
               (long long)n, trans ? 'T' : 'N', (long long)inc_x, (long long)inc_y, (long long)bad);
    return bad;
}

static int64_t check_gemv(hpml_ctx *const *ctx, int contexts)
{
    static const int64_t sizes[] = { 0, 1, 2, 3, 5, 16, 17, 31, 64, 100, 257, 700 };
    int64_t bad = 0;
    for (int i = 0; i < 600; i++) {
        float alpha = below(3) ? 1 : below(3) ? -0.75f : 0, beta = below(2) ? 0 : below(2) ? 1 : 0.5f;
        bad += wrong_gemv(ctx[i % contexts], sizes[below(12)], sizes[below(12)], i & 1, i & 2 ? 1 : 1 + below(4),
                          i & 4 ? 1 : 1 + below(4), below(3), alpha, beta);
    }
    for (int trans = 0; trans < 2; trans++) bad += wrong_gemv(ctx[2], 1500, 1030, trans, 1, 1, 0, 1, 1); /* threads */
    return bad;
}

TEST(gemv_of_every_shape_and_increment)
{
    ENSURE(on_all(check_gemv) == 0);
}

static int64_t wrong_vectors(hpml_ctx *ctx, int64_t n, int64_t inc_x, int64_t inc_y, float alpha)
{
    int64_t bad = 0, all = n > 0 ? (n - 1) * inc_y + 1 : 0, best = -1;
    float  *x = strided(n, inc_x), *y = strided(n, inc_y), *got = strided(n, inc_y);
    size_t  bytes = sizeof(float) * (size_t)(all + GUARD);
    if (alpha == 0 && n > 0) x[0] = NAN; /* must not be read */
    for (int scal = 0; scal < 2; scal++) {
        if (scal && alpha == 0 && n > 0) y[0] = NAN;
        memcpy(got, y, bytes);
        hpml_status status = scal ? hpml_sscal(ctx, n, alpha, got, inc_y)
                                  : hpml_saxpy(ctx, n, alpha, x, inc_x, got, inc_y);
        bad += status != HPML_OK;
        for (int64_t i = 0; i < all + GUARD; i++) {
            double want = (double)alpha * (double)(scal ? y[i] : i < all ? x[i / inc_y * inc_x] : 0);
            if (alpha == 0) want = 0;
            if (!scal) want += (double)y[i];
            if (i >= all || i % inc_y != 0) bad += memcmp(&got[i], &y[i], sizeof(float)) != 0;
            else bad += !(fabs((double)got[i] - want) <= 2e-7);
        }
    }
    if (n > 0 && alpha == 0) x[0] = 0, y[0] = 0;
    for (int64_t i = 0; i < n; i++) { /* many have the same magnitude: isamax returns the first */
        x[i * inc_x] = rintf(8 * x[i * inc_x]);
        if (best < 0 || fabsf(x[i * inc_x]) > fabsf(x[best * inc_x])) best = i;
    }
    bad += hpml_isamax(ctx, n, x, inc_x) != best;
    if (n > 2) x[n / 2 * inc_x] = -INFINITY, bad += hpml_isamax(ctx, n, x, inc_x) != n / 2;
    if (n > 2) x[(n - 1) * inc_x] = NAN, bad += hpml_isamax(ctx, n, x, inc_x) != n - 1;
    if (n > 2) x[n / 3 * inc_x] = -NAN, bad += hpml_isamax(ctx, n, x, inc_x) != n / 3;
    free(x), free(y), free(got);
    if (bad)
        printf("  %s: vectors of %lld, increments %lld %lld, alpha %g: %lld wrong\n", hpml_ctx_cpu(ctx), (long long)n,
               (long long)inc_x, (long long)inc_y, (double)alpha, (long long)bad);
    return bad;
}

static int64_t check_vectors(hpml_ctx *const *ctx, int contexts)
{
    static const int64_t sizes[] = { 0, 1, 2, 3, 7, 16, 17, 65, 511, 513, 3000, 16384, 16385, 100003 };
    static const float   alphas[] = { 1, -0.75f, 0 };
    int64_t bad = 0;
    for (int i = 0; i < 14 * 9; i++)
        bad += wrong_vectors(ctx[i % contexts], sizes[i / 9], i % 2 ? 1 : 1 + i % 3, i % 5 ? 1 : 3, alphas[i % 3]);
    return bad;
}

TEST(vectors_of_every_length_and_increment)
{
    ENSURE(on_all(check_vectors) == 0);
}

TEST(blas_rejects_invalid_arguments)
{
    hpml_ctx *ctx = context(NULL, 1);
    float     x[4] = { 1, 2, 3, 4 }, y[4] = { 0 };
    uint16_t  h[4] = { 0 };
#define GEMM(m, type, p, ld) hpml_gemm(ctx, false, false, m, 2, 2, 1, type, p, ld, HPML_DTYPE_F32, x, 2, 0, y, 2)
    ENSURE_ERROR(ctx, GEMM(-2, HPML_DTYPE_BF16, h, 2), HPML_ERR_ARGUMENT, "gemm: m -2");
    ENSURE_ERROR(ctx, GEMM(2, HPML_DTYPE_BF16, h, 1), HPML_ERR_ARGUMENT, "lda 1");
    ENSURE_ERROR(ctx, GEMM(2, HPML_DTYPE_BF16, NULL, 2), HPML_ERR_ARGUMENT, "no array NULL");
    ENSURE_ERROR(ctx, GEMM(2, HPML_DTYPE_I32, x, 2), HPML_ERR_DTYPE, "A is i32");
    ENSURE_ERROR(ctx, GEMM(2, (hpml_dtype)-1, x, 2), HPML_ERR_DTYPE, "A is ?");
    int8_t  s8[4] = { 0 };
    uint8_t u8[4] = { 0 };
    int32_t s32[4] = { 7, 7, 7, 7 };
    ENSURE_ERROR(ctx, hpml_igemm(ctx, false, false, 2, 2, 2, s8, 1, u8, 2, false, s32, 2), HPML_ERR_ARGUMENT, "lda 1");
    ENSURE_ERROR(ctx, hpml_bgemm(ctx, false, false, 2, 2, 2, 1, h, 1, h, 2, 0, y, 2), HPML_ERR_ARGUMENT, "bgemm: m 2");
    ENSURE_ERROR(ctx, hpml_bgemm(ctx, true, true, 2, 2, 2, 1, h, 2, h, 2, 0, NULL, 2), HPML_ERR_ARGUMENT, "NULL");
    ENSURE_ERROR(ctx, hpml_igemm(ctx, true, false, 2, -2, 2, s8, 2, u8, 2, false, s32, 2), HPML_ERR_ARGUMENT, "n -2");
    ENSURE_ERROR(ctx, hpml_igemm(ctx, false, true, 2, 2, 2, s8, 2, NULL, 2, false, s32, 2), HPML_ERR_ARGUMENT, "NULL");
    ENSURE(hpml_igemm(ctx, false, true, 2, 2, 0, NULL, 0, NULL, 0, true, s32, 2) == HPML_OK && s32[3] == 7);
    ENSURE(hpml_igemm(ctx, false, true, 2, 1, 0, NULL, 0, NULL, 0, false, s32, 2) == HPML_OK && s32[2] == 0);
    ENSURE(s32[1] == 7 && hpml_igemm(NULL, false, false, 0, 0, 0, NULL, 0, NULL, 0, false, NULL, 0) != HPML_OK);
    ENSURE_ERROR(ctx, hpml_sgemv(ctx, false, 2, 2, 1, x, 1, x, 1, 0, y, 1), HPML_ERR_ARGUMENT, "lda 1");
    ENSURE_ERROR(ctx, hpml_sgemv(ctx, false, 2, -1, 1, x, 2, x, 1, 0, y, 1), HPML_ERR_ARGUMENT, "n -1");
    ENSURE_ERROR(ctx, hpml_sgemv(ctx, true, 2, 2, 1, x, 2, x, 0, 0, y, 1), HPML_ERR_ARGUMENT, "inc_x 0");
    ENSURE_ERROR(ctx, hpml_sgemv(ctx, true, 2, 2, 1, x, 2, NULL, 1, 0, y, 1), HPML_ERR_ARGUMENT, "no array NULL");
    ENSURE_ERROR(ctx, hpml_saxpy(ctx, -1, 1, x, 1, y, 1), HPML_ERR_ARGUMENT, "saxpy: n -1");
    ENSURE_ERROR(ctx, hpml_saxpy(ctx, 2, 1, NULL, 1, y, 1), HPML_ERR_ARGUMENT, "no array NULL");
    ENSURE_ERROR(ctx, hpml_sscal(ctx, 2, 1, x, -1), HPML_ERR_ARGUMENT, "sscal: n 2");
    ENSURE_ERROR(ctx, hpml_isamax(ctx, 2, NULL, 1) == -1, HPML_ERR_ARGUMENT, "isamax");
    ENSURE_ERROR(ctx, hpml_isamax(ctx, -2, x, 1) == -1, HPML_ERR_ARGUMENT, "n -2");
    ENSURE(hpml_sgemv(ctx, false, 0, 0, 1, NULL, 0, NULL, 1, 0, NULL, 1) == HPML_OK);
    ENSURE(hpml_saxpy(ctx, 0, 1, NULL, 1, NULL, 1) == HPML_OK && hpml_sscal(ctx, 0, 1, NULL, 1) == HPML_OK);
    ENSURE(hpml_isamax(ctx, 0, NULL, 1) == -1 && hpml_isamax(NULL, 1, x, 1) == -1 && hpml_ctx_status(ctx) == HPML_OK);
    hpml_ctx_free(ctx);
}
