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
    hpml_tensor *x   = hpml_input_4d(ctx, 3, 4, 9, 7), *y, *t, *loss;
    memset(r, 0, sizeof *r);
    hpml_tensor_require_grad(x);
    y    = hpml_reshape_2d(hpml_tanh(c->record(x)), 3, -1);
    t    = y ? hpml_input_2d(ctx, 3, y->shape[1]) : NULL;
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

static void all_cases(hpml_cuda_precision precision, int passes, double tolerance)
{
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        results cpu, gpu;
        char    error[256];
        if (run_case(&cases[i], false, HPML_CUDA_F32, 1, &cpu, error) != HPML_OK ||
            run_case(&cases[i], true, precision, passes, &gpu, error) != HPML_OK)
            printf("    %s: %s\n", cases[i].name, error), test_failed = 1;
        else compare(cases[i].name, &gpu, &cpu, tolerance);
        drop(&cpu);
        drop(&gpu);
    }
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
