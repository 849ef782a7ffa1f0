/* The CUDA backend against the CPU's: every op, optimizer, codec and loss, whole trainings, wrong data. This file is C and
   knows no CUDA: the header's body is linked in, compiled by nvcc (ninja test-gpu) or, by a C++ compiler, for the emulation
   in cuda_on_cpu.h (ninja test). */
#include "../hpml_cuda.cuh"
#include "test.h"
#include "op_cases.h"

#define MOST 40 /* arrays of a case: loss, gradient of x, parameters' gradients */

typedef struct results {
    int     count;
    int64_t n[MOST];
    float  *v[MOST];
    char    name[MOST][48];
} results;

static void keep(results *r, hpml_ctx *ctx, const char *name, const void *device, hpml_dtype dtype, int64_t n)
{
    float *v = (float *)malloc((size_t)n * sizeof(float));
    char  *raw = (char *)malloc((size_t)n * sizeof(float));
    hpml_ctx_backend(ctx)->read(hpml_ctx_device(ctx), raw, device, (size_t)n * hpml_dtype_size(dtype));
    hpml_convert(ctx, HPML_DTYPE_F32, v, dtype, raw, n);
    free(raw);
    snprintf(r->name[r->count], sizeof r->name[0], "%s", name);
    r->n[r->count]   = n;
    r->v[r->count++] = v;
}

static hpml_ctx *context(bool gpu, hpml_cuda_precision precision)
{
    hpml_cuda_desc cuda = { .precision = precision };
    return hpml_ctx_create(&(hpml_ctx_desc){ .seed = 11, .threads = 1, .backend = gpu ? hpml_backend_cuda() : NULL,
                                             .backend_desc = gpu ? &cuda : NULL });
}

/* Loss = mean of (tanh(op(x)) - t)^2, forward and backward `passes` times (recorded passes start at the second); everything
   that came out. */
static hpml_status run_case(const op_case *c, bool gpu, hpml_cuda_precision precision, int passes, results *r, char *error)
{
    hpml_ctx    *ctx = context(gpu, precision);
    int64_t      usual[4] = { 3, 4, 9, 7 };
    hpml_tensor *x = hpml_input(ctx, HPML_DTYPE_F32, 4, c->shape[0] ? c->shape : usual), *y, *t, *loss;
    memset(r, 0, sizeof *r);
    hpml_tensor_require_grad(x);
    y    = hpml_reshape_2d(hpml_tanh(c->record(x)), x ? x->shape[0] : 1, -1);
    t    = y ? hpml_input_2d(ctx, y->shape[0], y->shape[1]) : NULL;
    loss = hpml_mse(y, t);
    hpml_graph *g = hpml_graph_create(ctx, &(hpml_graph_desc){ .loss = loss, .outputs = &y, .output_count = 1 });
    if (g && hpml_graph_alloc(g) == HPML_OK) {
        fill(x, 1);
        fill(t, 2);
        for (int i = 0; i < passes; i++) hpml_graph_forward(g, true, 3), hpml_graph_backward(g, 1, false);
    }
    if (hpml_ctx_status(ctx) == HPML_OK) {
        keep(r, ctx, "loss", loss->data, loss->dtype, 1);
        keep(r, ctx, "result", y->data, y->dtype, hpml_tensor_count(y));
        keep(r, ctx, "gradient of x", x->grad, x->dtype, hpml_tensor_count(x));
        for (int p = 0; p < hpml_param_count(ctx); p++) {
            hpml_tensor *w = hpml_param_at(ctx, p);
            keep(r, ctx, w->name, w->param->buffer ? w->data : w->grad, HPML_DTYPE_F32, hpml_tensor_count(w));
        }
    }
    hpml_status status = hpml_ctx_status(ctx);
    snprintf(error, 256, "%s", hpml_ctx_error(ctx));
    hpml_ctx_free(ctx);
    return status;
}

static void drop(results *r)
{
    for (int i = 0; i < r->count; i++) free(r->v[i]);
}

/* |a - b| <= tolerance (rms of the array + |b|): gradients that cancel to nothing are compared with their like. The first
   five that differ are printed. */
static void compare(const char *what, const results *gpu, const results *cpu, double tolerance)
{
    for (int i = 0; i < cpu->count; i++) {
        double rms = 0;
        int    bad = 0;
        for (int64_t j = 0; j < cpu->n[i]; j++) rms += (double)cpu->v[i][j] * (double)cpu->v[i][j];
        rms = sqrt(rms / (double)cpu->n[i]) + 1e-6;
        for (int64_t j = 0; j < cpu->n[i]; j++) {
            double a = (double)gpu->v[i][j], b = (double)cpu->v[i][j];
            if (fabs(a - b) <= tolerance * (rms + fabs(b))) continue;
            if (++bad <= 5) printf("    %s: %s[%lld]: %g, expected %g\n", what, cpu->name[i], (long long)j, a, b);
        }
        if (bad) printf("    %s: %s: %d of %lld differ\n", what, cpu->name[i], bad, (long long)cpu->n[i]), test_failed = 1;
    }
}

static bool no_device(void) { return hpml_cuda_device_count() == 0; }

static void some_cases(const op_case *c, size_t count, hpml_cuda_precision precision, int passes, double tolerance)
{
    for (; count > 0; c++, count--) {
        results cpu, gpu;
        char    error[256];
        if (run_case(c, false, HPML_CUDA_F32, 1, &cpu, error) != HPML_OK ||
            run_case(c, true, precision, passes, &gpu, error) != HPML_OK)
            printf("    %s: %s\n", c->name, error), test_failed = 1;
        else compare(c->name, &gpu, &cpu, tolerance);
        drop(&cpu);
        drop(&gpu);
    }
}

static void all_cases(hpml_cuda_precision precision, int passes, double tolerance)
{
    some_cases(cases, sizeof cases / sizeof cases[0], precision, passes, tolerance);
}

/* Tolerances: f32 sums in another order; tf32 and f16 keep 11 bits, bf16 8, of every number between the layers. */
TEST(ops_in_f32)
{
    if (no_device()) SKIP("no CUDA device");
    all_cases(HPML_CUDA_F32, 1, 2e-5);
}

TEST(ops_in_tf32)
{
    if (no_device()) SKIP("no CUDA device");
    all_cases(HPML_CUDA_TF32, 1, 1e-2);
}

TEST(ops_in_bf16)
{
    if (no_device()) SKIP("no CUDA device");
    all_cases(HPML_CUDA_BF16, 1, 0.1);
}

TEST(ops_in_f16)
{
    if (no_device()) SKIP("no CUDA device");
    all_cases(HPML_CUDA_F16, 1, 1.5e-2);
}

/* The second pass is recorded, the third replayed. Running statistics move with each pass, so the CPU runs three too. */
TEST(recorded_passes)
{
    if (no_device()) SKIP("no CUDA device");
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        results cpu, gpu;
        char    error[256];
        if (run_case(&cases[i], false, HPML_CUDA_F32, 3, &cpu, error) != HPML_OK ||
            run_case(&cases[i], true, HPML_CUDA_F32, 3, &gpu, error) != HPML_OK)
            printf("    %s: %s\n", cases[i].name, error), test_failed = 1;
        else compare(cases[i].name, &gpu, &cpu, 2e-5);
        drop(&cpu);
        drop(&gpu);
    }
}

/* What needs several blocks, tiles or splits of a sum: name, op and the shape of x, (B, C, H, W). */
#define WIDE(X)                                                                                                        \
    X(bias, hpml_add(x, weight(x, 1, 1, 88)), 5, 6, 70, 88) X(bias_odd, hpml_mul(x, weight(x, 1, 1, 90)), 5, 6, 70, 90) \
    X(bias_long, hpml_add(x, weight(x, 1, 1, 3)), 40, 5, 60, 3) X(bias_one, hpml_mul(x, weight(x, 1, 1, 1)), 5, 6, 70, 90) \
    X(channels, hpml_mul(x, weight(x, 6, 1, 1)), 5, 6, 70, 91) X(column, hpml_sub(x, weight(x, 1, 70, 1)), 5, 6, 70, 90) \
    X(batch, hpml_mul(weight(x, 6, 33, 40), x), 9, 6, 33, 40) X(same, hpml_mul(x, x), 5, 6, 70, 90)                     \
    X(mean_all, hpml_add(x, hpml_mean(x, HPML_ALL_DIMS)), 5, 6, 70, 90)                                                \
    X(mean_0, hpml_add(x, hpml_mean(x, 0)), 300, 4, 5, 6) X(mean_1, hpml_add(x, hpml_mean(x, 1)), 3, 300, 5, 7)        \
    X(mean_2, hpml_add(x, hpml_mean(x, 2)), 2, 3, 300, 40) X(mean_3, hpml_add(x, hpml_mean(x, 3)), 3, 4, 5, 901)       \
    X(turn, hpml_permute(x, (int[]){ 0, 1, 3, 2 }), 2, 3, 70, 131) X(to_nhwc, hpml_permute(x, (int[]){ 0, 2, 3, 1 }), 2, 66, 9, 13) \
    X(heads, hpml_permute(x, (int[]){ 0, 2, 1, 3 }), 2, 33, 4, 24) X(turn_all, hpml_permute(x, (int[]){ 3, 2, 1, 0 }), 20, 3, 5, 66) \
    X(slice, hpml_concat((hpml_tensor *[]){ hpml_slice(x, 3, 8, 40), hpml_slice(x, 3, 3, 30) }, 2, 3), 5, 6, 20, 90)   \
    X(pools, hpml_add(hpml_max_pool2d(x, 3, 1, 1), hpml_avg_pool2d(x, 3, 1, 1)), 2, 5, 40, 33)                         \
    X(global, hpml_mul(x, hpml_reshape_4d(hpml_global_avg_pool2d(x), 3, 50, 1, 1)), 3, 50, 7, 7)
#define DEFINE_WIDE(name, e, ...) static hpml_tensor *wide_##name(hpml_tensor *x) { return e; }
#define WIDE_CASE(name, e, ...) { "wide " #name, wide_##name, 0, { __VA_ARGS__ } },
WIDE(DEFINE_WIDE)
static const op_case wide_cases[] = { WIDE(WIDE_CASE) };

TEST(wide_ops_in_f32)
{
    if (no_device()) SKIP("no CUDA device");
    some_cases(wide_cases, sizeof wide_cases / sizeof wide_cases[0], HPML_CUDA_F32, 1, 2e-5);
}

TEST(wide_ops_in_bf16)
{
    if (no_device()) SKIP("no CUDA device");
    some_cases(wide_cases, sizeof wide_cases / sizeof wide_cases[0], HPML_CUDA_BF16, 1, 0.1);
}

typedef struct loss_case {
    int     kind;     /* 0: cross-entropy, 1: bce, 2: mse, 3: huber with a computed target, 4: l1 */
    int64_t rows, classes;
    float   smoothing;
    bool    add;      /* another term after the loss: the loss adds to the gradient */
    int     bad;      /* a label for row 2; 0: a good one */
    bool    masked;   /* some logits are -infinity */
} loss_case;

/* The loss of 3 x and what the optimizer would see. */
static hpml_status run_loss(const loss_case *c, bool gpu, hpml_cuda_precision precision, results *r, char *error)
{
    hpml_ctx    *ctx = context(gpu, precision);
    hpml_tensor *x = hpml_input_2d(ctx, c->rows, c->classes), *t = hpml_input_2d(ctx, c->rows, c->classes), *y, *loss;
    int64_t      labels_shape[1] = { c->rows };
    hpml_tensor *l = hpml_input(ctx, HPML_DTYPE_I32, 1, labels_shape);
    int32_t     *labels = (int32_t *)malloc((size_t)c->rows * sizeof(int32_t));
    hpml_cross_entropy_desc ce = { .label_smoothing = c->smoothing };
    memset(r, 0, sizeof *r);
    hpml_tensor_require_grad(x);
    y    = hpml_scale(x, 3, 0);
    loss = c->kind == 0 ? hpml_cross_entropy(y, l, &ce) : c->kind == 1 ? hpml_bce_with_logits(y, hpml_sigmoid(t))
         : c->kind == 2 ? hpml_mse(y, t) : hpml_huber(y, c->kind == 3 ? hpml_scale(x, -1, 1) : t, c->kind == 3 ? 2.0f : 0);
    if (c->add) loss = hpml_add(loss, hpml_mean(hpml_mul(y, y), HPML_ALL_DIMS));
    hpml_graph *g = hpml_graph_create(ctx, &(hpml_graph_desc){ .loss = loss });
    if (hpml_graph_alloc(g) == HPML_OK) {
        fill(x, 1);
        if (t->data) fill(t, 2);
        if (c->masked) {
            float *v = (float *)malloc((size_t)(c->rows * c->classes) * sizeof(float));
            hpml_tensor_get(x, v, c->rows * c->classes);
            for (int64_t i = 0; i < c->rows * c->classes; i++)
                if (i % c->classes < c->classes / 2) v[i] = -INFINITY;
            hpml_tensor_set(x, v, c->rows * c->classes);
            free(v);
        }
        for (int64_t i = 0; i < c->rows; i++)
            labels[i] = i % 5 == 4 ? HPML_IGNORE : (int32_t)(c->classes - 1 - i * 7 % ((c->classes + 1) / 2));
        if (c->bad) labels[2] = c->bad;
        if (l->data) hpml_tensor_set(l, labels, c->rows);
        hpml_graph_forward(g, true, 0), hpml_graph_backward(g, 2, false);
    }
    free(labels);
    if (hpml_ctx_status(ctx) == HPML_OK) {
        keep(r, ctx, "loss", loss->data, loss->dtype, 1);
        keep(r, ctx, "gradient of x", x->grad, x->dtype, hpml_tensor_count(x));
    }
    hpml_status status = hpml_ctx_status(ctx);
    snprintf(error, 256, "%s", hpml_ctx_error(ctx));
    hpml_ctx_free(ctx);
    return status;
}

TEST(losses)
{
    static const loss_case losses[] = {
        { 0, 64, 10, 0, false, 0, false },   { 0, 7, 3, 0.1f, false, 0, false },  { 0, 5, 1, 0, false, 0, false },
        { 0, 300, 17, 0.2f, true, 0, false }, { 0, 6, 2501, 0, false, 0, true },  { 0, 3, 50257, 0.1f, true, 0, false },
        { 1, 70, 333, 0, false, 0, false },  { 1, 3, 5, 0, true, 0, false },
        { 2, 90, 401, 0, true, 0, false },   { 3, 70, 333, 0, false, 0, false },  { 3, 1, 9, 0, true, 0, false },
        { 4, 70, 31, 0, true, 0, false }
    };
    static const double tolerance[] = { 2e-5, 0, 0.1, 1.5e-2 };
    if (no_device()) SKIP("no CUDA device");
    for (size_t i = 0; i < sizeof losses / sizeof losses[0]; i++)
        for (int p = HPML_CUDA_F32; p <= HPML_CUDA_BF16; p += 2) {
            results cpu, gpu;
            char    error[256], name[64];
            snprintf(name, sizeof name, "loss %d of (%d, %d), %d", losses[i].kind, (int)losses[i].rows,
                     (int)losses[i].classes, p);
            if (run_loss(&losses[i], false, HPML_CUDA_F32, &cpu, error) != HPML_OK ||
                run_loss(&losses[i], true, (hpml_cuda_precision)p, &gpu, error) != HPML_OK)
                printf("    %s: %s\n", name, error), test_failed = 1;
            else compare(name, &gpu, &cpu, tolerance[p]);
            drop(&cpu);
            drop(&gpu);
        }
}

/* The CPU and the GPU say the same about a label that is none. */
TEST(bad_labels)
{
    loss_case c = { 0, 6, 10, 0, false, 10, false };
    results   r;
    char      cpu[256], gpu[256];
    if (no_device()) SKIP("no CUDA device");
    for (int i = 0; i < 2; i++, c.bad = -1) {
        ENSURE(run_loss(&c, false, HPML_CUDA_F32, &r, cpu) == HPML_ERR_LABEL);
        run_loss(&c, true, HPML_CUDA_F32, &r, gpu);
        drop(&r);
        ENSURE(strcmp(cpu, gpu) == 0);
    }
}

/* Sums of squares of any type, begun anywhere; hits with ties and NaNs as the trainer counts them on the CPU. */
TEST(counts_and_squares)
{
    if (no_device()) SKIP("no CUDA device");
    hpml_ctx           *ctx = context(true, HPML_CUDA_F32);
    const hpml_backend *b = hpml_ctx_backend(ctx);
    enum { ROWS = 40, WIDEST = 600, N = ROWS * WIDEST };
    static float        v[N];
    static int32_t      labels[ROWS];
    void               *x = b->alloc(hpml_ctx_device(ctx), sizeof v), *l = b->alloc(hpml_ctx_device(ctx), sizeof labels);
    for (int i = 0; i < N; i++) v[i] = (float)((i * 37 + i / 11) % 9 - 4);
    for (int i = 0; i < ROWS; i += 7) v[i * 10 + i % 10] = NAN;
    for (int i = 0; i < ROWS; i++) labels[i] = i % 9 == 8 ? -100 : i * 3 % 10;
    b->write(hpml_ctx_device(ctx), x, v, sizeof v);
    b->write(hpml_ctx_device(ctx), l, labels, sizeof labels);
    for (int classes = 10; classes <= WIDEST; classes += WIDEST - 10) {
        int64_t counts[2] = { 5, 7 }, want[2] = { 5, 7 };
        ENSURE(b->correct(hpml_ctx_device(ctx), ctx, HPML_DTYPE_F32, x, (int32_t *)l, ROWS, classes, counts) == HPML_OK);
        for (int r = 0; r < ROWS; r++) {
            int best = 0;
            for (int c = 1; c < classes; c++)
                if (v[r * classes + c] > v[r * classes + best]) best = c;
            want[0] += best == labels[r], want[1] += labels[r] >= 0;
        }
        ENSURE(counts[0] == want[0] && counts[1] == want[1] && want[0] > 5);
    }
    for (int from = 400; from < 403; from++) { /* after the NaNs */
        double sum = 0, got = 0;
        for (int i = from; i < N - 5; i++) sum += (double)v[i] * (double)v[i];
        ENSURE(b->sumsq(hpml_ctx_device(ctx), ctx, HPML_DTYPE_F32, (float *)x + from, N - 5 - from, &got) == HPML_OK);
        ENSURE(fabs(got - sum) < 1e-6 * sum);
    }
    b->free(hpml_ctx_device(ctx), x, sizeof v);
    b->free(hpml_ctx_device(ctx), l, sizeof labels);
    hpml_ctx_free(ctx);
}
