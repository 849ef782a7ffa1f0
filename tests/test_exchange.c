/* Gradients added up in fewer bytes: nothing is lost, all ranks get the same bits, and controls that must fail do. */
#include "../hpml_comm.h"
#include "control_codecs.h"
#include "test.h"

#include <unistd.h>

#ifdef __SANITIZE_THREAD__
enum { ROWS = 40, COLS = 100, STEPS = 100 };
#else
enum { ROWS = 40, COLS = 100, STEPS = 1000 };
#endif

typedef struct trial {
    hpml_exchange_desc d;
    int                steps;
    double             drift;  /* |sum of exchanged gradients + residuals - sum of gradients| / |sum of gradients| */
    bool               same;   /* all ranks had the same bits after every step */
    int64_t            bytes, sent;
    hpml_status        status[16];
    int                poison; /* step at which rank 1 has a NaN; 0: never */
    char               text[256];
} trial;

static void draw(float *g, int rank, int step)
{
    hpml_rng r = { .seed = 11, .stream = (uint64_t)(step * 64 + rank) };
    hpml_rng_fill_normal(&r, g, ROWS * COLS);
    for (int i = 0; i < ROWS * COLS; i++) g[i] = 0.3f * g[i] + 0.05f; /* a mean, so that lost sums show */
}

static uint64_t bits_of(const float *x, int n)
{
    uint64_t h = 1469598103934665603u;
    for (int i = 0; i < n; i++) {
        uint32_t u;
        memcpy(&u, &x[i], 4);
        h = (h ^ u) * 1099511628211u;
    }
    return h;
}

static hpml_status telescope(hpml_comm *c, void *user)
{
    trial  *t = (trial *)user;
    int     p = hpml_comm_size(c), rank = hpml_comm_rank(c);
    float  *g = (float *)malloc(sizeof(float) * ROWS * COLS), bias[7] = { 0 };
    double *sum = (double *)calloc(2 * ROWS * COLS, sizeof *sum), *want = sum + ROWS * COLS;
    hpml_gradient tensors[2] = { { "w", g, ROWS, COLS }, { "b", bias, 1, 7 } };
    hpml_exchange_desc d = t->d;
    d.count = 2, d.tensors = tensors;
    hpml_exchange *x = hpml_exchange_create(c, &d);
    hpml_status    status = x ? HPML_OK : hpml_ctx_status(hpml_comm_ctx(c));
    hpml_counters  sent;
    hpml_comm_counters_reset(c);
    for (int s = 1; s <= t->steps && x && status == HPML_OK; s++) {
        draw(g, rank, s);
        if (s == t->poison && rank == 1) g[5] = (float)NAN;
        for (int i = 0; i < 7; i++) bias[i] = (float)(rank + i);
        for (int i = 0; i < ROWS * COLS; i++) want[i] += (double)g[i];
        status = hpml_exchange_run(x);
        if (t->status[rank] == HPML_OK) t->status[rank] = status;
        if (status == HPML_ERR_NONFINITE) status = HPML_OK;
        /* rank 0 adds up the exchanged gradients */
        for (int i = 0; i < ROWS * COLS; i++) sum[i] += (double)g[i] / (rank == 0 ? 1 : 1e300);
        int64_t hash[2] = { (int64_t)(bits_of(g, ROWS * COLS) >> 2), 0 };
        hash[1] = -hash[0];
        if (s % 100 == 0) {
            hpml_allreduce(c, hash, 2, &(hpml_allreduce_desc){ .reduce = HPML_MAX, .element = HPML_ELEMENT_I64 });
            if (rank == 0 && hash[0] != -hash[1]) t->same = false;
            for (int i = 0; i < 7 && rank == 0; i++)
                if (bias[i] != (float)(p * (p - 1) / 2 + p * i)) t->same = false;
        }
    }
    hpml_comm_counters(c, &sent);
    if (rank == 0 && x) t->bytes = hpml_exchange_bytes(x), t->sent = sent.bytes;
    if (x && status == HPML_OK) { /* sum over ranks of (gradients - residuals), minus the exchanged gradients */
        int64_t row = 0, rows = 0, n = 0;
        float  *e = hpml_exchange_residual(x, 0, &n), *stripe = hpml_exchange_stripe(x, 0, &row, &rows);
        for (int i = 0; i < ROWS * COLS; i++) {
            double own = rank == 0 ? sum[i] : 0;
            if (e && n) own += (double)e[i];
            if (stripe && i >= row * COLS && i < (row + rows) * COLS) own += (double)stripe[i - row * COLS];
            sum[i] = own;
        }
        hpml_allreduce(c, sum, 2 * ROWS * COLS, &(hpml_allreduce_desc){ .element = HPML_ELEMENT_F64 });
        double a = 0, b = 0;
        for (int i = 0; i < ROWS * COLS; i++) a += (sum[i] - want[i]) * (sum[i] - want[i]), b += want[i] * want[i];
        if (rank == 0) t->drift = sqrt(a / b);
    }
    free(g);
    free(sum);
    return hpml_ctx_status(hpml_comm_ctx(c));
}

static trial run(hpml_exchange_desc d, int ranks, int steps, int poison)
{
    trial t = { .d = d, .steps = steps, .same = true, .drift = -1, .poison = poison };
    hpml_launch(&(hpml_launch_desc){ .ranks = ranks, .ctx.threads = 1 }, telescope, &t, t.text, sizeof t.text);
    return t;
}

TEST(one_bit_loses_nothing)
{
    for (int p = 1; p <= 5; p++) {
        trial t = run((hpml_exchange_desc){ .codec.kind = HPML_CODEC_ONEBIT }, p, STEPS, 0);
        if (!(t.drift < 1e-6)) printf("%d ranks: %g %s\n", p, t.drift, t.text);
        ENSURE(t.drift >= 0 && t.drift < 1e-6 && t.same);
    }
}

/* Compares hpml_exchange_bytes with the bytes counted in one run, on every rank. */
static hpml_status declare_bytes(hpml_comm *c, void *user)
{
    static const int64_t shape[4][2] = { { 37, 50 }, { 1, 137 }, { 10, 64 }, { 1, 9 } };
    hpml_exchange_desc   d = *(hpml_exchange_desc *)user;
    hpml_ctx            *ctx = hpml_comm_ctx(c);
    hpml_gradient        g[4];
    hpml_counters        before, after;
    for (int i = 0; i < 4; i++) {
        size_t bytes = (size_t)(shape[i][0] * shape[i][1]) * sizeof(float);
        g[i] = (hpml_gradient){ NULL, (float *)hpml_ctx_alloc(ctx, bytes, NULL), shape[i][0], shape[i][1] };
    }
    d.count = 4, d.tensors = g;
    hpml_exchange *x = hpml_exchange_create(c, &d);
    if (hpml_exchange_run(x) != HPML_OK) return hpml_ctx_status(ctx);
    hpml_comm_counters(c, &before);
    hpml_exchange_run(x);
    hpml_comm_counters(c, &after);
    int64_t sent = after.bytes - before.bytes;
    if (sent == hpml_exchange_bytes(x)) return hpml_ctx_status(ctx);
    return hpml_ctx_fail(ctx, HPML_ERR_STATE, "codec %d, algorithm %d: %lld bytes declared, %lld sent",
                         (int)d.codec.kind, (int)d.algorithm, (long long)hpml_exchange_bytes(x),
                         (long long)sent);
}

TEST(exchange_bytes_equal_the_bytes_sent)
{
    static const hpml_exchange_desc ways[] = { { .codec.kind = HPML_CODEC_NONE }, { .fuse_bytes = 300 },
        { .codec = { .kind = HPML_CODEC_ONEBIT, .min_elements = 100 } }, { .codec.kind = HPML_CODEC_TOPK },
        { .codec = { .kind = HPML_CODEC_LOWRANK, .min_elements = 100 } } };
    for (int p = 1; p <= 6; p++)
        for (size_t way = 0; way < sizeof ways / sizeof ways[0]; way++)
            EACH_ALGORITHM(a, HPML_AUTO) {
                hpml_exchange_desc d = ways[way];
                char               text[500];
                hpml_launch_desc   l = { .transport = HPML_TRANSPORT_CLOCK, .ranks = p, .ctx.threads = 1 };
                d.algorithm = (hpml_algorithm)a, l.network.ranks_per_node = 2;
                hpml_status status = hpml_launch(&l, declare_bytes, &d, text, sizeof text);
                if (status != HPML_OK) printf("    %d ranks: %s\n", p, text);
                ENSURE(status == HPML_OK);
            }
}

TEST(controls_that_must_fail)
{
    trial none = run((hpml_exchange_desc){ .codec = { .kind = HPML_CODEC_ONEBIT, .no_feedback = true } }, 4, STEPS, 0);
    const hpml_codec onebit = printed_residual(HPML_CODEC_ONEBIT);
    trial printed = run((hpml_exchange_desc){ .codec.custom = &onebit }, 4, STEPS, 0);
    printf("    drift without feedback %.3f, with the residual as printed %.3f\n", none.drift, printed.drift);
    ENSURE(none.drift > 0.01 && printed.drift > 0.01);
}

TEST(other_codecs_lose_nothing)
{
    trial bf16 = run((hpml_exchange_desc){ .codec.kind = HPML_CODEC_BF16 }, 4, 200, 0);
    trial two  = run((hpml_exchange_desc){ .codec = { .kind = HPML_CODEC_TWOBIT, .threshold = 0.5f } }, 4, STEPS, 0);
    trial top  = run((hpml_exchange_desc){ .codec = { .kind = HPML_CODEC_TOPK, .ratio = 0.05f } }, 4, 200, 0);
    trial low  = run((hpml_exchange_desc){ .codec = { .kind = HPML_CODEC_LOWRANK, .lowrank = 2 } }, 4, 200, 0);
    trial sum  = run((hpml_exchange_desc){ .codec = { .kind = HPML_CODEC_LOWRANK, .lowrank = 2 },
                                           .reduce = HPML_SUM }, 1, 50, 0);
    ENSURE(bf16.drift >= 0 && bf16.drift < 1e-6 && bf16.same);
    ENSURE(two.drift >= 0 && two.drift < 1e-6 && two.same);
    ENSURE(top.drift >= 0 && top.drift < 1e-5 && top.same);
    ENSURE(low.same && low.drift >= 0 && low.drift < 1e-4);
    ENSURE(sum.drift >= 0 && sum.drift < 1e-4);
}

/* Weights that start at zero give the layer before them a gradient of zeros: LOWRANK must still learn when the gradient
   is no longer zero. */
static hpml_status late_gradient(hpml_comm *c, void *user)
{
    float         *g = (float *)hpml_ctx_alloc(hpml_comm_ctx(c), sizeof(float) * ROWS * COLS, NULL);
    hpml_gradient  t = { "w", g, ROWS, COLS };
    hpml_exchange *x = hpml_exchange_create(c, &(hpml_exchange_desc){
        .count = 1, .tensors = &t, .codec = { .kind = HPML_CODEC_LOWRANK, .lowrank = 3 } });
    double         size = 0;
    for (int step = 0; step < 4; step++) { /* the gradient is a matrix of rank 1 from the third step on */
        for (int i = 0; i < ROWS * COLS; i++) g[i] = step < 2 ? 0 : 1;
        hpml_exchange_run(x);
        for (int i = 0; i < ROWS * COLS; i++) size += (double)g[i];
    }
    if (hpml_comm_rank(c) == 0) *(double *)user = size / (ROWS * COLS);
    return hpml_ctx_status(hpml_comm_ctx(c));
}

TEST(low_rank_begins_again_after_zeros)
{
    double mean = 0;
    ENSURE(hpml_launch(&(hpml_launch_desc){ .ranks = 3 }, late_gradient, &mean, NULL, 0) == HPML_OK);
    ENSURE_NEAR(mean, 2 * 3, 1e-4);
}

/* A codec that keeps all bits travels by stripes as 1-bit gradients do, and gives the plain sum, bit for bit. */
typedef struct pair { float a[ROWS * COLS], b[ROWS * COLS]; } pair;

static hpml_status both_ways(hpml_comm *c, void *user)
{
    pair *out = (pair *)user, mine;
    draw(mine.a, hpml_comm_rank(c), 1);
    memcpy(mine.b, mine.a, sizeof mine.a);
    hpml_gradient g = { "w", mine.a, ROWS, COLS };
    hpml_exchange *x = hpml_exchange_create(c, &(hpml_exchange_desc){
        .count = 1, .tensors = &g, .codec.custom = &all_bits });
    hpml_exchange_run(x);
    hpml_allreduce(c, mine.b, ROWS * COLS, &(hpml_allreduce_desc){ .algorithm = HPML_CENTRAL });
    if (hpml_comm_rank(c) == 0) *out = mine;
    return hpml_ctx_status(hpml_comm_ctx(c));
}

TEST(all_bits_by_stripes_equal_the_plain_sum)
{
    static pair p;
    ENSURE(hpml_launch(&(hpml_launch_desc){ .ranks = 3 }, both_ways, &p, NULL, 0) == HPML_OK);
    ENSURE(memcmp(p.a, p.b, sizeof p.a) == 0);
}

/* Ranks whose tensors lie in memory in different ways: apart, in order, in the opposite order. */
static hpml_status laid_out(hpml_comm *c, void *user)
{
    float         store[3][10] = { { 0 } };
    float *const  at[3][2] = { { store[0], store[2] }, { store[0], store[0] + 4 }, { store[0] + 6, store[0] } };
    int           rank = hpml_comm_rank(c);
    hpml_gradient g[2] = { { "a", at[rank][0], 1, 4 }, { "b", at[rank][1], 1, 6 } };
    for (int t = 0; t < 2; t++)
        for (int64_t i = 0; i < g[t].cols; i++) g[t].data[i] = (float)(10 * t + (int)i);
    hpml_exchange *x = hpml_exchange_create(c, &(hpml_exchange_desc){ .count = 2, .tensors = g });
    if (!x || hpml_exchange_run(x) != HPML_OK) return hpml_ctx_status(hpml_comm_ctx(c));
    for (int t = 0; t < 2; t++)
        for (int64_t i = 0; i < g[t].cols; i++)
            if (g[t].data[i] != 3 * (float)(10 * t + (int)i)) *(bool *)user = false;
    return HPML_OK;
}

TEST(tensors_need_not_lie_alike)
{
    char text[512];
    bool good = true;
    ENSURE(hpml_launch(&(hpml_launch_desc){ .ranks = 3 }, laid_out, &good, text, sizeof text) == HPML_OK && good);
}

TEST(bytes_are_what_the_formula_says)
{
    trial t = run((hpml_exchange_desc){ .codec.kind = HPML_CODEC_ONEBIT, .algorithm = HPML_RING }, 4, 10, 0);
    int64_t packed = ROWS * (8 + 4 * ((COLS + 31) / 32)), expected = 2 * packed * 3 / 4 + 2 * 3 * 8;
    expected += 4 * (2 * 7 - 1 - 2); /* the bias's ring: all but rank 0's own block, then all but rank 1's */
    ENSURE(t.bytes == expected && t.sent == 10 * expected);
}

TEST(all_ranks_learn_of_a_nan)
{
    for (int kind = HPML_CODEC_ONEBIT; kind < HPML_CODEC_COUNT; kind++) {
        trial t = run((hpml_exchange_desc){ .codec.kind = (hpml_codec_kind)kind }, 3, 20, 7);
        for (int r = 0; r < 3; r++) ENSURE(t.status[r] == HPML_ERR_NONFINITE);
        ENSURE(t.text[0] == 0 && t.same);
    }
}

static hpml_status differs(hpml_comm *c, void *user)
{
    float         x[64] = { 0 };
    hpml_gradient g = { "w", x, hpml_comm_rank(c) == 1 ? 4 : 8, 8 };
    (void)user;
    hpml_exchange_create(c, &(hpml_exchange_desc){ .count = 1, .tensors = &g });
    return hpml_ctx_status(hpml_comm_ctx(c));
}

static hpml_status nothing(hpml_comm *c, void *user)
{
    (void)user;
    hpml_gradient g = { "w", NULL, 8, 8 };
    hpml_exchange_create(c, &(hpml_exchange_desc){ .count = 1, .tensors = &g });
    return hpml_ctx_status(hpml_comm_ctx(c));
}

static hpml_status no_codec(hpml_comm *c, void *user)
{
    (void)user;
    float         x = 0;
    hpml_gradient g = { "w", &x, 1, 1 };
    hpml_exchange_create(c, &(hpml_exchange_desc){
        .count = 1, .tensors = &g, .codec.kind = hpml_codec_find("threebit") });
    return hpml_ctx_status(hpml_comm_ctx(c));
}

static hpml_status no_desc(hpml_comm *c, void *user)
{
    *(bool *)user = hpml_exchange_create(c, NULL) == NULL;
    return hpml_ctx_status(hpml_comm_ctx(c));
}

TEST(bad_input)
{
    char text[512];
    bool refused = false;
    ENSURE(hpml_launch(&(hpml_launch_desc){ .ranks = 1 }, no_desc, &refused, text, sizeof text) == HPML_ERR_ARGUMENT);
    ENSURE(refused && strstr(text, "exchange: 0 tensors") && strstr(text, "no desc"));
    ENSURE(hpml_launch(&(hpml_launch_desc){ .ranks = 3 }, differs, NULL, text, sizeof text) == HPML_ERR_SHAPE);
    ENSURE(strstr(text, "different tensors"));
    ENSURE(hpml_launch(&(hpml_launch_desc){ .ranks = 2 }, nothing, NULL, text, sizeof text) == HPML_ERR_SHAPE);
    ENSURE(strstr(text, "without data"));
    ENSURE(hpml_launch(&(hpml_launch_desc){ .ranks = 1 }, no_codec, NULL, text, sizeof text) == HPML_ERR_ARGUMENT);
    ENSURE(strstr(text, "exchange: there is no codec -1"));
}

/* Stands for Adagrad on the sum, inside the stripe, where the paper places it. */
static void scale_down(void *user, int tensor, int64_t row, int64_t rows, float *sum)
{
    (void)tensor;
    for (int64_t i = 0; i < rows * COLS; i++) sum[i] *= 0.5f;
    ((int64_t *)user)[row] += rows;
}

static hpml_status in_stripe(hpml_comm *c, void *user)
{
    static int64_t seen[4][ROWS];
    float         *x = (float *)malloc(sizeof(float) * ROWS * COLS);
    hpml_gradient  g = { "w", x, ROWS, COLS };
    for (int i = 0; i < ROWS * COLS; i++) x[i] = 3; /* equal values are exact */
    hpml_exchange *e = hpml_exchange_create(c, &(hpml_exchange_desc){
        .count = 1, .tensors = &g, .codec.kind = HPML_CODEC_ONEBIT, .reduce = HPML_MEAN, .in_stripe = scale_down,
        .user = seen[hpml_comm_rank(c)] });
    hpml_exchange_run(e);
    for (int i = 0; i < ROWS * COLS; i++)
        if (x[i] != 1.5f) __atomic_store_n((bool *)user, false, __ATOMIC_RELAXED);
    free(x);
    return hpml_ctx_status(hpml_comm_ctx(c));
}

TEST(work_inside_the_stripe)
{
    bool right = true;
    ENSURE(hpml_launch(&(hpml_launch_desc){ .ranks = 4 }, in_stripe, &right, NULL, 0) == HPML_OK);
    ENSURE(right);
}

/* Adagrad in the stripe, step by step, against a serial program: each gradient is packed with its rank's residual;
   what comes out is added in the order of the ranks and divided; what Adagrad makes of that is packed with a residual
   of its own. */
static void adagrad(void *user, int tensor, int64_t row, int64_t rows, float *sum)
{
    float *of = (float *)user + row * COLS;
    (void)tensor;
    for (int64_t i = 0; i < rows * COLS; i++) of[i] += sum[i] * sum[i], sum[i] /= sqrtf(of[i]) + 1e-10f;
}

static void there_and_back(const hpml_packing *p, float *out, float *residual, const float *in)
{
    static _Thread_local char packed[4 * ROWS * COLS];
    hpml_packing_encode(p, packed, residual, in, ROWS, NULL);
    hpml_packing_decode(p, out, packed, ROWS);
}

static hpml_status adagrad_steps(hpml_comm *c, void *user)
{
    enum { N = ROWS * COLS };
    int             p = hpml_comm_size(c), rank = hpml_comm_rank(c);
    float          *x = (float *)calloc((size_t)N * (size_t)(6 + p), sizeof *x);
    float          *g = x + N, *sum = x + 2 * N, *own = x + 3 * N, *all = x + 4 * N, *e = x + 5 * N;
    hpml_gradient   t = { "w", x, ROWS, COLS };
    hpml_codec_desc onebit = { .kind = HPML_CODEC_ONEBIT };
    hpml_packing    packing;
    hpml_exchange  *ex = hpml_exchange_create(c, &(hpml_exchange_desc){
        .count = 1, .tensors = &t, .codec = onebit, .reduce = HPML_MEAN, .in_stripe = adagrad, .user = own });
    hpml_packing_init(&packing, &onebit, ROWS, COLS);
    for (int s = 0; s < 50; s++) {
        memset(sum, 0, sizeof *sum * N);
        for (int r = 0; r < p; r++) {
            draw(x, r, s);
            there_and_back(&packing, g, e + r * N, x);
            for (int i = 0; i < N; i++) sum[i] += g[i];
        }
        for (int i = 0; i < N; i++) sum[i] /= (float)p;
        adagrad(all, 0, 0, ROWS, sum);
        there_and_back(&packing, g, e + p * N, sum);
        draw(x, rank, s);
        if (hpml_exchange_run(ex) == HPML_OK && memcmp(x, g, sizeof *x * N) != 0)
            __atomic_store_n((bool *)user, false, __ATOMIC_RELAXED);
    }
    free(x);
    return hpml_ctx_status(hpml_comm_ctx(c));
}

TEST(adagrad_in_the_stripe_is_the_definition)
{
    for (int p = 1; p <= 4; p++) {
        bool right = true;
        ENSURE(hpml_launch(&(hpml_launch_desc){ .ranks = p, .ctx.threads = 1 }, adagrad_steps,
                           &right, NULL, 0) == HPML_OK);
        ENSURE(right);
    }
}

/* The second largest |eigenvalue| of W, by power iteration on vectors of sum zero. */
static double contraction(const double *w, int p)
{
    double x[16], y[16], norm = 1;
    for (int i = 0; i < p; i++) x[i] = sin(1.0 + 3 * i);
    for (int step = 0; step < 4000; step++) {
        double mean = 0, size = 0;
        for (int i = 0; i < p; i++) mean += x[i] / p;
        for (int i = 0; i < p; i++) size += (x[i] - mean) * (x[i] - mean);
        norm = sqrt(size);
        for (int i = 0; i < p; i++) x[i] = (x[i] - mean) / norm;
        for (int i = 0; i < p; i++) {
            y[i] = 0;
            for (int j = 0; j < p; j++) y[i] += w[i * p + j] * x[j];
        }
        memcpy(x, y, sizeof(double) * (size_t)p);
    }
    double size = 0;
    for (int i = 0; i < p; i++) size += x[i] * x[i];
    return sqrt(size);
}

typedef struct mixing { hpml_topology topology; int p; double mean, spread, wrong; } mixing;

static hpml_status mix(hpml_comm *c, void *user)
{
    mixing *m = (mixing *)user;
    int     p = hpml_comm_size(c), rank = hpml_comm_rank(c);
    double  w[256], want[16], next[16], ends[2];
    float   x[3] = { (float)rank, (float)(rank * rank), 1 };
    for (int i = 0; i < p; i++) want[i] = i * i;
    for (int step = 0; step < 30; step++) {
        hpml_mixing_matrix(m->topology, p, 9, step, w);
        for (int i = 0; i < p; i++) {
            next[i] = 0;
            for (int j = 0; j < p; j++) next[i] += w[i * p + j] * want[j];
        }
        memcpy(want, next, sizeof next);
        hpml_mix(c, x, 3, m->topology, 9, step);
    }
    ends[0] = fabs((double)x[1] - want[rank]), ends[1] = fabs((double)x[2] - 1);
    hpml_allreduce(c, ends, 2, &(hpml_allreduce_desc){ .reduce = HPML_MAX, .element = HPML_ELEMENT_F64 });
    hpml_allreduce(c, x, 1, &(hpml_allreduce_desc){ .reduce = HPML_MEAN });
    if (rank == 0) m->wrong = ends[0] + ends[1], m->mean = (double)x[0];
    return hpml_ctx_status(hpml_comm_ctx(c));
}

TEST(mixing_with_neighbours)
{
    static const double second[2] = { 0.8047, 0.6867 }; /* ring and wheel of 8 */
    for (int t = 0; t < 4; t++) {
        double w[64];
        hpml_mixing_matrix((hpml_topology)t, 8, 9, 3, w);
        for (int i = 0; i < 8; i++) {
            double row = 0;
            for (int j = 0; j < 8; j++) row += w[i * 8 + j];
            ENSURE_NEAR(row, 1, 1e-12);
            for (int j = 0; j < 8; j++) ENSURE_NEAR(w[i * 8 + j], w[j * 8 + i], 1e-12);
        }
        if (t < 2) ENSURE_NEAR(contraction(w, 8), second[t], 1e-3);
        for (int p = 1; p <= 8; p++) {
            mixing           m = { .topology = (hpml_topology)t };
            hpml_launch_desc l = { .ranks = p, .transport = p % 2 ? HPML_TRANSPORT_CLOCK : HPML_TRANSPORT_THREADS };
            ENSURE(hpml_launch(&l, mix, &m, NULL, 0) == HPML_OK);
            ENSURE_NEAR(m.wrong, 0, 1e-4);
            ENSURE_NEAR(m.mean, (p - 1) / 2.0, 1e-5);
        }
    }
}

/* The timeline has the levels of HIERARCHICAL in their order, also where nodes differ in size: rank 0 is the first of
   its node. */
static hpml_status levels(hpml_comm *c, void *user)
{
    float x[100] = { 0 };
    hpml_comm_trace_start(c, &(hpml_trace_desc){ .capacity = 64 });
    hpml_allreduce(c, x, 100, &(hpml_allreduce_desc){ .algorithm = HPML_HIERARCHICAL });
    hpml_allreduce(c, x, 100, &(hpml_allreduce_desc){ .algorithm = HPML_RING });
    if (hpml_comm_rank(c) == 0) hpml_trace_save(hpml_comm_ctx(c), (const char *)user);
    return hpml_ctx_status(hpml_comm_ctx(c));
}

TEST(levels_of_a_hierarchy_in_the_timeline)
{
    static const char *const name[] = { "\"local reduce\"", "\"global allreduce\"",
                                        "\"local gather\"", "\"allreduce\"" };
    char path[64]; /* three builds run this test, perhaps at the same time */
    snprintf(path, sizeof path, "build/levels_%d.json", (int)getpid());
    for (int p = 3; p <= 12; p++)
        for (int k = 2; k < p; k++) {
            char text[4096] = { 0 };
            hpml_launch_desc l = { .ranks = p, .network.ranks_per_node = k };
            ENSURE(hpml_launch(&l, levels, path, NULL, 0) == HPML_OK);
            FILE *f = fopen(path, "rb");
            ENSURE(f && fread(text, 1, sizeof text - 1, f) > 0);
            fclose(f);
            remove(path);
            const char *at = text;
            for (int i = 0; i < 4; i++) {
                at = strstr(at, name[i]);
                ENSURE(at && (i == 3 || !strstr(at + 1, name[i]))); /* only once: a ring has no levels */
            }
        }
}
