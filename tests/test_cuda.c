/* Compares the CUDA backend with the CPU's: every op, optimizer, codec and loss, whole trainings, wrong data. This file
   is C without CUDA: the header's body is linked, compiled by nvcc (ninja test-gpu) or by a C++ compiler for the
   emulation in cuda_on_cpu.h (ninja test). */
#include "../hpml_cuda.cuh"
#include "test.h"
#include "op_cases.h"
#include "loss_scale.h"
#include "files.h"


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

/* Faults that only the emulation can cause. */
__attribute__((weak)) void cuda_on_cpu_fault(const char *what, long k);
__attribute__((weak)) long cuda_on_cpu_count(const char *what);

static bool emulated(void) { return cuda_on_cpu_fault != NULL; }

/* Does the emulated library behave like this (library_mode in cublas_on_cpu.h)? */
enum { LIBRARY_RELU = 1, LIBRARY_BGRADB = 8, LIBRARY_NCHW = 16, LIBRARY_CAPTURE = 32, LIBRARY_REFUSE = 64 };
static bool library_is(long mode) { return emulated() && (cuda_on_cpu_count("libraries") & mode) != 0; }

/* Every other case runs on a device of one multiprocessor, so that the few blocks of a launch loop over their work. */
static void multiprocessors(size_t i)
{
    if (emulated()) cuda_on_cpu_fault("multiprocessors", i % 2 ? 1 : 132);
}

/* With HPML_LIBRARIES the same programs run once for each mode of the emulated libraries; then tests of own kernels,
   which do not depend on the mode, are skipped. */
static bool libraries_only(void) { return emulated() && getenv("HPML_LIBRARIES"); }

/* Chooses the products and convolutions of the libraries or of this header; the emulation chooses own kernels unless a
   test asks for the libraries. */
static enum { AS_EVER, LIBRARIES, OWN } products;

static hpml_ctx *context(bool gpu, hpml_cuda_precision precision)
{
    hpml_cuda_desc cuda = { .precision = precision, .workspace = (size_t)4 << 20,
                            .own_kernels = products == OWN || (products == AS_EVER && emulated()) };
    return hpml_ctx_create(&(hpml_ctx_desc){ .seed = 11, .threads = 1, .backend = gpu ? hpml_backend_cuda() : NULL,
                                             .backend_desc = gpu ? &cuda : NULL });
}

/* The number in hpml_cuda_text before the words `what`; -1: they are not in the text. */
static long long text_number(const hpml_ctx *ctx, const char *what)
{
    char        text[1024];
    const char *at = hpml_cuda_text(ctx, text, sizeof text) > 0 ? strstr(text, what) : NULL;
    if (!at) return -1;
    while (at > text && at[-1] >= '0' && at[-1] <= '9') at--;
    return atoll(at);
}

static long long reordered;     /* copies of images to NHWC or back in run_case's last run on the device; -1: none */
static bool      whole_numbers; /* run_case: x, filters and biases are small whole numbers, so that sums are exact */

static void fill_whole(hpml_ctx *ctx, hpml_tensor *x)
{
    hpml_rng r = { .seed = 3 };
    for (int p = -1; p < hpml_param_count(ctx); p++) {
        hpml_tensor *w = p < 0 ? x : hpml_param_at(ctx, p);
        int64_t      n = hpml_tensor_count(w);
        float       *v = (float *)malloc((size_t)n * sizeof(float));
        for (int64_t i = 0; i < n; i++) v[i] = (float)hpml_rng_below(&r, 3) - 1;
        if (p < 0 || w->ndim == 4 || strstr(w->name, "bias")) hpml_tensor_set(w, v, n);
        free(v);
    }
}

/* Runs loss = mean of (tanh(op(x)) - t)^2 forward and backward `passes` times (passes are recorded from the second on);
   returns the loss and all gradients. */
static hpml_status run_case(const op_case *c, bool gpu, hpml_cuda_precision precision, int passes, results *r,
                            char *error)
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
        if (whole_numbers) fill_whole(ctx, x);
        for (int i = 0; i < passes; i++) hpml_graph_forward(g, true, 3), hpml_graph_backward(g, 1, false);
    }
    if (passes == 3) hpml_graph_forward(g, true, 3), hpml_graph_backward(g, 0.5f, true); /* gradients add up */
    if (hpml_ctx_status(ctx) == HPML_OK) {
        keep(r, ctx, "loss", loss->data, loss->dtype, 1);
        keep(r, ctx, "result", y->raw, y->dtype, hpml_tensor_count(y));
        keep(r, ctx, "gradient of x", x->grad, x->dtype, hpml_tensor_count(x));
        for (int p = 0; p < hpml_param_count(ctx); p++) {
            hpml_tensor *w = hpml_param_at(ctx, p);
            keep(r, ctx, w->name, w->param->buffer ? w->data : w->grad, HPML_DTYPE_F32, hpml_tensor_count(w));
        }
    }
    hpml_status status = hpml_ctx_status(ctx);
    if (gpu) reordered = text_number(ctx, " copies to NHWC or back");
    snprintf(error, 256, "%s", hpml_ctx_error(ctx));
    hpml_ctx_free(ctx);
    return status;
}

static void drop(results *r)
{
    for (int i = 0; i < r->count; i++) free(r->v[i]);
}

/* |a - b| <= tolerance (rms of the array + |b|), so that gradients that cancel to almost 0 are compared by the size of
   the others. numbers: of x, where arrays may be sums of numbers / n terms of size 1: each may also be off by one
   rounding of its partial sums, about the root of the terms, because it may cancel; 0: no sums. Prints the first five
   that differ. */
static void compare_sums(const char *what, const results *gpu, const results *cpu, double tolerance, int64_t numbers)
{
    for (int i = 0; i < cpu->count; i++) {
        double terms = (double)(numbers / cpu->n[i]), rounding = terms > 1 ? 1.2e-7 * sqrt(terms) : 0, rms = 0;
        int    bad = 0;
        for (int64_t j = 0; j < cpu->n[i]; j++) rms += (double)cpu->v[i][j] * (double)cpu->v[i][j];
        rms = sqrt(rms / (double)cpu->n[i]) + 1e-6;
        for (int64_t j = 0; j < cpu->n[i]; j++) {
            double a = (double)gpu->v[i][j], b = (double)cpu->v[i][j];
            if (fabs(a - b) <= tolerance * (rms + fabs(b)) + rounding) continue;
            if (++bad <= 5) printf("    %s: %s[%lld]: %g, expected %g\n", what, cpu->name[i], (long long)j, a, b);
        }
        if (bad)
            printf("    %s: %s: %d of %lld differ\n", what, cpu->name[i], bad, (long long)cpu->n[i]), test_failed = 1;
    }
}

static void compare(const char *what, const results *gpu, const results *cpu, double tolerance)
{
    compare_sums(what, gpu, cpu, tolerance, 0);
}

static bool no_device(void) { return hpml_cuda_device_count() == 0; }

static void some_cases(const op_case *c, size_t count, hpml_cuda_precision precision, int passes, double tolerance)
{
    for (; count > 0; c++, count--) {
        results cpu, gpu;
        char    error[256];
        multiprocessors(count + (precision == HPML_CUDA_BF16));
        if (run_case(c, false, HPML_CUDA_F32, passes, &cpu, error) != HPML_OK ||
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

/* Tolerances: f32 adds in another order; tf32 and f16 keep 11 bits, bf16 8, of every number between the layers. */
TEST(ops_in_f32)
{
    if (no_device()) SKIP("no CUDA device");
    all_cases(HPML_CUDA_F32, 1, 2e-5);
}

TEST_PLAIN(ops_in_tf32)
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

/* The second pass is recorded, the third replayed. Running statistics change with each pass, so the CPU runs three too.
   */
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

/* An op of the user by host functions (no kernel) or by functions for the device: the same numbers; only passes with
   the latter are recorded and replayed. One that is collective never is. */
hpml_status own_kernel_forward(const hpml_run *run, hpml_node *n);
hpml_status own_kernel_backward(const hpml_run *run, hpml_node *n);
static hpml_status own_forward(const hpml_run *run, hpml_node *n)
{
    const float *x = n->src[0]->data;
    (void)run;
    for (int64_t i = 0; i < hpml_tensor_count(n->out); i++) n->out->data[i] = x[i] * fabsf(x[i]);
    return HPML_OK;
}
static hpml_status own_backward(const hpml_run *run, hpml_node *n)
{
    (void)run;
    for (int64_t i = 0; i < hpml_tensor_count(n->out); i++)
        n->src[0]->grad[i] += 2 * fabsf(n->src[0]->data[i]) * n->out->grad[i];
    return HPML_OK;
}
static hpml_status pair_forward(const hpml_run *run, hpml_node *n) /* of two sources, which may be one tensor */
{
    const float *x = n->src[0]->data, *y = n->src[1]->data;
    (void)run;
    for (int64_t i = 0; i < hpml_tensor_count(n->out); i++) n->out->data[i] = x[i] * y[i] + (float)(i % 7);
    return HPML_OK;
}
static hpml_status pair_backward(const hpml_run *run, hpml_node *n)
{
    (void)run;
    for (int s = 0; s < 2; s++)
        for (int64_t i = 0; i < hpml_tensor_count(n->out); i++)
            n->src[s]->grad[i] += n->src[1 - s]->data[i] * n->out->grad[i];
    return HPML_OK;
}
static hpml_custom own_op;
static hpml_tensor *op_own(hpml_tensor *x)
{
    hpml_tensor *h = hpml_scale(hpml_linear(x, 5, NULL), 0.3f, 0), *y = hpml_custom_op(&h, 1, &own_op);
    return hpml_add(y, hpml_custom_op(&y, 1, &own_op));
}
TEST(ops_of_the_user_on_the_host_or_by_kernels)
{
    static const op_case own = { "own", op_own, 0, { 0 } };
    if (no_device()) SKIP("no CUDA device");
    for (int k = 0; k < 3; k++) {
        results cpu, gpu;
        char    error[256];
        own_op = (hpml_custom){ .name = "signed_square", .forward = own_forward, .backward = own_backward,
                                .keeps = HPML_KEEP_SRC(0), .collective = k == 2 };
        if (k > 0) own_op.kernel = (hpml_op_impl){ own_kernel_forward, own_kernel_backward };
        long graphs = emulated() ? cuda_on_cpu_count("graphs") : 0;
        ENSURE(run_case(&own, false, HPML_CUDA_F32, 3, &cpu, error) == HPML_OK);
        ENSURE(run_case(&own, true, HPML_CUDA_F32, 3, &gpu, error) == HPML_OK);
        compare("own", &gpu, &cpu, 2e-5);
        if (emulated() && !library_is(LIBRARY_CAPTURE)) ENSURE((cuda_on_cpu_count("graphs") > graphs) == (k == 1));
        drop(&cpu);
        drop(&gpu);
    }
}

/* A residual sum is fused into the norm after it in a pass that runs as a whole, recorded or not; when an op is run
   alone, it is not. */
TEST(ops_by_themselves_after_a_replay)
{
    float v[24], y[24];
    if (no_device()) SKIP("no CUDA device");
    hpml_ctx    *ctx = context(true, HPML_CUDA_F32);
    hpml_tensor *x = hpml_input_2d(ctx, 3, 8), *sum = hpml_add(x, hpml_tanh(x)), *out = hpml_layernorm(sum, NULL);
    hpml_graph  *g = hpml_graph_create(ctx, &(hpml_graph_desc){ .outputs = &out, .output_count = 1 });
    hpml_run     run = { .ctx = ctx };
    ENSURE(hpml_graph_alloc(g) == HPML_OK);
    fill(x, 1);
    for (int i = 0; i < 3; i++) ENSURE(hpml_graph_forward(g, false, 0) == HPML_OK);
    fill(x, 2);
    hpml_node *nodes[2] = { sum->node->src[1]->node, sum->node };
    for (int i = 0; i < 2; i++) ENSURE(hpml_ctx_backend(ctx)->ops[nodes[i]->op].forward(&run, nodes[i]) == HPML_OK);
    ENSURE(hpml_tensor_get(x, v, 24) == HPML_OK && hpml_tensor_get(sum, y, 24) == HPML_OK);
    for (int i = 0; i < 24; i++) ENSURE_NEAR(y[i], v[i] + tanhf(v[i]), 1e-5);
    hpml_ctx_free(ctx);
}

/* A pass that failed does not count as the first run: libraries that an op opens are not open yet, and must not be
   opened while a pass is recorded. */
TEST(a_pass_that_failed_is_recorded_later)
{
    if (!cuda_on_cpu_fault) SKIP("needs the emulation");
    hpml_ctx    *ctx = context(true, HPML_CUDA_F32);
    hpml_tensor *x = hpml_input_2d(ctx, 3, 8), *out = hpml_tanh(hpml_softmax(x));
    hpml_graph  *g = hpml_graph_create(ctx, &(hpml_graph_desc){ .outputs = &out, .output_count = 1 });
    ENSURE(hpml_graph_alloc(g) == HPML_OK);
    fill(x, 1);
    for (int i = 0; i < 5; i++) {
        cuda_on_cpu_fault("none", 0);
        if (i < 2) cuda_on_cpu_fault("other architecture", 1);
        ENSURE(hpml_graph_forward(g, false, 0) == (i < 2 ? HPML_ERR_CUDA : HPML_OK));
        ENSURE(cuda_on_cpu_count("graphs") == (i > 2 && !library_is(LIBRARY_CAPTURE)));
        hpml_ctx_clear_error(ctx);
    }
    hpml_ctx_free(ctx);
}

/* A half copy of a parameter is fresh after it was written, not after a failed attempt, by a pass or by a step. */
TEST(half_copies_that_failed_are_made_later)
{
    static const float ones[64] = { 1, 1, 1, 1, 1, 1, 1, 1 }; /* the first output adds up its inputs */
    if (!cuda_on_cpu_fault) SKIP("needs the emulation");
    for (int step = 0; step < 2; step++) {
        float        y[24]; /* activations are bf16 too, between layers and at the end */
        hpml_ctx    *ctx = context(true, HPML_CUDA_BF16);
        hpml_tensor *x = hpml_input_2d(ctx, 3, 8), *out = hpml_linear(hpml_linear(x, 8, NULL), 8, NULL);
        hpml_graph  *g = hpml_graph_create(ctx, &(hpml_graph_desc){ .outputs = &out, .output_count = 1 });
        hpml_update  u[2] = { { .opt = HPML_OPT_SGD, .n = 64, .lr = 0, .grad_scale = 1, .step = 1 } };
        ENSURE(hpml_graph_alloc(g) == HPML_OK);
        u[1] = u[0];
        for (int i = 0; i < 2; i++) u[i].w = hpml_param_at(ctx, 2 * i)->data, u[i].g = hpml_param_at(ctx, 2)->data;
        for (int i = 0; i < 24; i++) y[i] = 1;
        ENSURE(hpml_tensor_set(x, y, 24) == HPML_OK && hpml_graph_forward(g, false, 0) == HPML_OK);
        for (int p = 0; p < 4; p += 2) ENSURE(hpml_tensor_set(hpml_param_at(ctx, p), ones, 64) == HPML_OK);
        cuda_on_cpu_fault("other architecture", 1);
        ENSURE((step ? hpml_ctx_backend(ctx)->update(hpml_ctx_device(ctx), ctx, u, 2)
                     : hpml_graph_forward(g, false, 0)) == HPML_ERR_CUDA);
        cuda_on_cpu_fault("none", 0);
        hpml_ctx_clear_error(ctx);
        ENSURE(hpml_graph_forward(g, false, 0) == HPML_OK && hpml_tensor_get(out, y, 24) == HPML_OK);
        for (int i = 0; i < 24; i++) ENSURE_NEAR(y[i], i % 8 ? 0 : 8, 1e-6);
        hpml_ctx_free(ctx);
    }
}

/* After a kernel has failed, every later call returns its error, which is not "out of memory". */
TEST(a_lost_device_is_not_out_of_memory)
{
    float v[24];
    if (!cuda_on_cpu_fault) SKIP("needs the emulation");
    hpml_ctx    *ctx = context(true, HPML_CUDA_F32);
    hpml_tensor *x = hpml_input_2d(ctx, 3, 8), *out = hpml_tanh(x);
    hpml_graph  *g = hpml_graph_create(ctx, &(hpml_graph_desc){ .outputs = &out, .output_count = 1 });
    ENSURE(hpml_graph_alloc(g) == HPML_OK);
    fill(x, 1);
    cuda_on_cpu_fault("launch", 1);
    hpml_graph_forward(g, false, 0);
    ENSURE(hpml_tensor_get(out, v, 24) == HPML_ERR_CUDA);
    hpml_ctx_clear_error(ctx);
    ENSURE(!hpml_tensor_create_1d(ctx, 8) && hpml_ctx_status(ctx) == HPML_ERR_CUDA);
    ENSURE(strstr(hpml_ctx_error(ctx), "cudaMalloc: ") && strstr(hpml_ctx_error(ctx), "compute-sanitizer"));
    hpml_ctx_free(ctx);
    cuda_on_cpu_fault("none", 0);
}

/* Runs one op alone: forward as a graph and backward by hand with a given dy. `halves`: its input is the result of a
   dropout of 0, so it has the device's type of activations. */
typedef struct one_op {
    const char *name;
    hpml_tensor *(*record)(hpml_tensor *x);
    bool eval, accumulate, no_dx, halves, ones; /* ones: all parameters are 1, not normal */
    bool sums;                                  /* gradients of parameters are long sums, see compare_sums */
    float shift;
} one_op;

#define ONE(name, e) static hpml_tensor *one_##name(hpml_tensor *x) { return e; }
ONE(softmax, hpml_softmax(x))
ONE(log_softmax, hpml_log_softmax(x))
ONE(layernorm, hpml_layernorm(x, NULL))
ONE(layernorm_plain, hpml_layernorm(x, &(hpml_norm_desc){ .no_affine = true }))
ONE(rmsnorm, hpml_rmsnorm(x, NULL))
ONE(batchnorm, hpml_batchnorm(x, NULL))
ONE(batchnorm_relu, hpml_batchnorm(x, &(hpml_norm_desc){ .activation = HPML_ACT_RELU, .momentum = 0.3f }))
ONE(dropout, hpml_dropout(x, 0.3f))
ONE(linear_sqrt, hpml_linear(x, 1, &(hpml_linear_desc){ .activation = HPML_ACT_SQRT }))
ONE(linear_log, hpml_linear(x, 1, &(hpml_linear_desc){ .activation = HPML_ACT_LOG }))
ONE(conv_sqrt, hpml_conv2d(x, 3, &(hpml_conv2d_desc){ .kernel_h = 3, .padding_h = 1, .activation = HPML_ACT_SQRT }))
ONE(sin, hpml_sin(x))
ONE(cos, hpml_cos(x))
ONE(attention, hpml_attention(x, &(hpml_attention_desc){ .heads = 2 }))
ONE(attention_full, hpml_attention(x, &(hpml_attention_desc){ .heads = 2, .not_causal = true, .scale = 0.11f }))

static float *numbers(uint64_t seed, int64_t n, float shift)
{
    hpml_rng r = { .seed = seed };
    float   *x = (float *)malloc((size_t)n * sizeof(float));
    hpml_rng_fill_normal(&r, x, n);
    for (int64_t i = 0; i < n; i++) x[i] += shift;
    return x;
}

/* Memory of the device with n numbers in it, stored as dtype. */
static void *place(hpml_ctx *ctx, hpml_dtype dtype, const float *x, int64_t n)
{
    const hpml_backend *b = hpml_ctx_backend(ctx);
    size_t bytes = (size_t)n * hpml_dtype_size(dtype);
    void  *p = b->alloc(hpml_ctx_device(ctx), bytes), *raw = malloc(bytes);
    hpml_convert(ctx, dtype, raw, HPML_DTYPE_F32, x, n);
    b->write(hpml_ctx_device(ctx), p, raw, bytes);
    free(raw);
    return p;
}

static void give_back(hpml_ctx *ctx, void *p, int64_t n, hpml_dtype dtype)
{
    if (p) hpml_ctx_backend(ctx)->free(hpml_ctx_device(ctx), p, (size_t)n * hpml_dtype_size(dtype));
}

static void grad_place(hpml_tensor *t, uint64_t seed)
{
    int64_t n = hpml_tensor_count(t);
    float  *x   = numbers(seed, n, 0);
    t->raw_grad = place(t->ctx, t->dtype, x, n);
    t->grad     = t->dtype == HPML_DTYPE_F32 ? (float *)t->raw_grad : NULL;
    free(x);
}

static void grad_keep(results *r, hpml_tensor *t)
{
    if (!t || !t->raw_grad) return;
    if (r) keep(r, t->ctx, t->name, t->raw_grad, t->dtype, hpml_tensor_count(t));
    give_back(t->ctx, t->raw_grad, hpml_tensor_count(t), t->dtype);
    t->raw_grad = NULL;
    t->grad     = NULL;
}

/* y = op(x): the pass forward on v, and the pass backward of its node on numbers of seed 2. */
static void run_node(hpml_tensor *x, hpml_tensor *y, const void *v, const one_op *o, results *r)
{
    hpml_ctx   *ctx = x->ctx;
    hpml_graph *g   = hpml_graph_create(ctx, &(hpml_graph_desc){ .outputs = &y, .output_count = 1 });
    hpml_run    run = { .ctx = ctx, .train = !o->eval, .step = 5, .loss_scale = 1 };
    size_t      bytes = (size_t)hpml_tensor_count(x) * hpml_dtype_size(x->dtype);
    if (!g || hpml_graph_alloc(g) != HPML_OK || hpml_tensor_set_raw(x, v, bytes) != HPML_OK) return;
    if (hpml_graph_forward(g, !o->eval, 5) != HPML_OK) return;
    keep(r, ctx, "y", y->raw, y->dtype, hpml_tensor_count(y));
    grad_place(y, 2);
    for (int s = 0; s < y->node->src_count; s++) {
        hpml_tensor *t = y->node->src[s];
        if (!t || t->dtype == HPML_DTYPE_I32 || (s == 0 && o->no_dx)) continue;
        if (t->param && t->param->buffer) keep(r, ctx, t->name, t->data, t->dtype, hpml_tensor_count(t));
        else grad_place(t, 3 + (uint64_t)s);
        y->node->accumulate[s] = o->accumulate;
    }
    hpml_ctx_backend(ctx)->ops[y->node->op].backward(&run, y->node);
    for (int s = 0; s < y->node->src_count; s++) grad_keep(r, y->node->src[s]);
    grad_keep(NULL, y);
}

static void one_case(const one_op *o, const int64_t shape[4], hpml_cuda_precision precision, double tolerance)
{
    static size_t turn;
    results       r[2];
    char          what[128];
    multiprocessors(turn++);
    for (int gpu = 0; gpu < 2; gpu++) {
        hpml_ctx    *ctx = context(gpu == 1, precision);
        int          ndim = shape[3] ? 4 : shape[2] ? 3 : 2;
        hpml_tensor *x = hpml_input(ctx, HPML_DTYPE_F32, ndim, shape), *y;
        float       *v = numbers(1, hpml_tensor_count(x), o->shift);
        memset(&r[gpu], 0, sizeof r[gpu]);
        y = o->record(o->halves ? hpml_dropout(x, 0) : x);
        for (int p = 0; p < hpml_param_count(ctx); p++) /* gamma 1 and beta 0 would hide a mistake */
            if (!hpml_param_at(ctx, p)->param->buffer)
                hpml_param_at(ctx, p)->param->init = o->ones ? HPML_INIT_ONES : HPML_INIT_NORMAL,
                hpml_param_at(ctx, p)->param->init_scale = 1;
        if (y) run_node(x, y, v, o, &r[gpu]);
        if (hpml_ctx_status(ctx) != HPML_OK) printf("    %s: %s\n", o->name, hpml_ctx_error(ctx)), test_failed = 1;
        hpml_ctx_free(ctx);
        free(v);
    }
    snprintf(what, sizeof what, "%s of %dx%dx%dx%d", o->name, (int)shape[0], (int)shape[1], (int)shape[2],
             (int)shape[3]);
    if (r[0].count != r[1].count) printf("    %s: not all there\n", what), test_failed = 1;
    else compare_sums(what, &r[1], &r[0], tolerance, o->sums ? shape[0] * shape[1] * (shape[2] ? shape[2] : 1) *
                      (shape[3] ? shape[3] : 1) : 0);
    drop(&r[0]);
    drop(&r[1]);
}

#define EACH(list, i) for (size_t i = 0; i < sizeof list / sizeof list[0]; i++)

TEST(rows_of_every_length)
{
    static const one_op ops[] = {
        { "softmax", one_softmax, .accumulate = true },
        { "log_softmax", one_log_softmax, .shift = 0 },
        { "layernorm", one_layernorm, .accumulate = true, .shift = 3 },
        { "layernorm without parameters", one_layernorm_plain, .shift = 0 },
        { "layernorm far from 0", one_layernorm, .shift = 3000 },
        { "log_softmax far from 0", one_log_softmax, .shift = 3000 },
        { "layernorm for its parameters", one_layernorm, .no_dx = true },
        { "rmsnorm", one_rmsnorm, .shift = 1 },
    };
    static const int64_t shapes[][4] = { { 5, 3 }, { 3, 1, 5, 24 }, { 9, 257 }, { 6, 1000 }, { 2, 1027 }, { 3, 1600 },
                                         { 2, 2056 }, { 2, 8200 }, { 2, 9001 }, { 1, 8 } };
    if (no_device()) SKIP("no CUDA device");
    EACH(ops, i) EACH(shapes, k) one_case(&ops[i], shapes[k], HPML_CUDA_F32, 2e-5);
    one_case(&ops[2], (const int64_t[4]){ 2300, 9 }, HPML_CUDA_F32, 2e-5); /* more rows than teams */
    one_case(&ops[2], (const int64_t[4]){ 530, 1032 }, HPML_CUDA_F32, 2e-5);
}

TEST(channels_of_every_size)
{
    static const one_op ops[] = {
        { "batchnorm", one_batchnorm, .shift = 30 },
        { "batchnorm far from 0", one_batchnorm, .shift = 3000 },
        { "batchnorm, accumulating", one_batchnorm_relu, .accumulate = true, .sums = true },
        { "batchnorm in evaluation", one_batchnorm_relu, .eval = true },
        { "batchnorm for its parameters", one_batchnorm, .no_dx = true },
    };
    static const int64_t shapes[][4] = { { 70, 37 }, { 3, 5, 3, 3 }, { 4, 3, 4, 6 }, { 4, 2, 33, 17 }, { 3, 3, 40, 50 },
                                         { 7, 1, 1, 1 }, { 300, 8 }, { 5, 1100, 2, 2 } };
    if (no_device()) SKIP("no CUDA device");
    EACH(ops, i) EACH(shapes, k) one_case(&ops[i], shapes[k], HPML_CUDA_F32, 2e-5);
}

/* Sums for a bias whose rows end within a vec8, of derivatives that are infinite at 0: elements after the end are left
   out. */
TEST(derivatives_end_with_their_rows)
{
    static const one_op linear[] = { { "linear, sqrt", one_linear_sqrt, .ones = true, .shift = 6 },
                                     { "linear, log", one_linear_log, .ones = true, .accumulate = true, .shift = 6 } };
    static const one_op conv = { "conv, sqrt", one_conv_sqrt, .ones = true, .shift = 6 };
    if (no_device()) SKIP("no CUDA device");
    EACH(linear, i) one_case(&linear[i], (const int64_t[4]){ 5, 3 }, HPML_CUDA_F32, 2e-5);
    one_case(&conv, (const int64_t[4]){ 2, 2, 5, 5 }, HPML_CUDA_F32, 2e-5);
}

/* Numbers that sinf and cosf reduce in another way than small ones: the kernel's own reduction has all their bits. */
TEST(sines_of_large_numbers)
{
    static const one_op ops[] = {
        { "sin from 3e5 on", one_sin, .shift = 3e5f }, { "cos from 3e5 on", one_cos, .shift = 3e5f },
        { "sin of 2e9", one_sin, .shift = -2e9f },     { "cos of 2e9", one_cos, .shift = -2e9f },
        { "sin of 3e38", one_sin, .shift = 3e38f },    { "cos of 3e38", one_cos, .shift = 3e38f },
    };
    if (no_device()) SKIP("no CUDA device");
    EACH(ops, i) one_case(&ops[i], (const int64_t[4]){ 30, 40 }, HPML_CUDA_F32, 1e-6);
}

/* The input of these nodes and all their results are halves. */
TEST(rows_and_channels_in_halves)
{
    static const one_op ops[] = {
        { "softmax", one_softmax, .halves = true },
        { "layernorm", one_layernorm, .accumulate = true, .halves = true },
        { "batchnorm", one_batchnorm, .halves = true },
        { "dropout", one_dropout, .accumulate = true, .halves = true },
    };
    static const int64_t shapes[][4] = { { 5, 3, 3, 7 }, { 3, 4, 5, 264 } };
    if (no_device()) SKIP("no CUDA device");
    EACH(ops, i) EACH(shapes, k) one_case(&ops[i], shapes[k], HPML_CUDA_F16, 3e-3);
    EACH(ops, i) EACH(shapes, k) one_case(&ops[i], shapes[k], HPML_CUDA_BF16, 2e-2);
}

/* (B, T, 3C): positions below, at and above the sizes of the kernels' blocks; heads of all padded sizes, aligned and
   not. A negative scale reverses every order of scores. */
ONE(attention_turned, hpml_attention(x, &(hpml_attention_desc){ .heads = 2, .scale = -0.2f }))
static void attention_cases(bool halves, hpml_cuda_precision precision, double tolerance)
{
    const one_op ops[] = {
        { "attention", one_attention, .halves = halves },
        { "attention, not causal", one_attention_full, .halves = halves, .accumulate = true },
        { "attention with a negative scale", one_attention_turned, .halves = halves },
    };
    static const int64_t lengths[] = { 1, 63, 64, 65, 150 }, widths[] = { 5, 32, 40, 96, 100, 128, 136, 256 };
    EACH(lengths, i) EACH(ops, k)
        if (k < 2) one_case(&ops[k], (const int64_t[4]){ 2, lengths[i], 6 * 64 }, precision, tolerance);
    EACH(widths, i) EACH(ops, k) { /* more queries than a block has once for each kernel, where heads fill it */
        int64_t queries = k ? 17 : widths[i] % 32 ? 70 : 145;
        one_case(&ops[k], (const int64_t[4]){ 1, queries, 6 * widths[i] }, precision, tolerance);
    }
}

TEST(attention_in_f32)
{
    if (no_device()) SKIP("no CUDA device");
    attention_cases(false, HPML_CUDA_F32, 2e-5);
}

TEST(attention_in_halves)
{
    if (no_device()) SKIP("no CUDA device");
    attention_cases(true, HPML_CUDA_F16, 6e-3);
    attention_cases(true, HPML_CUDA_BF16, 6e-2);
}

TEST(attention_of_an_f32_input_in_halves)
{
    static const one_op o = { "attention", one_attention, .accumulate = true };
    if (no_device()) SKIP("no CUDA device");
    one_case(&o, (const int64_t[4]){ 2, 70, 6 * 24 }, HPML_CUDA_F16, 4e-3);
    one_case(&o, (const int64_t[4]){ 2, 70, 6 * 24 }, HPML_CUDA_TF32, 2e-5);
}

TEST(attention_the_device_refuses)
{
    if (no_device()) SKIP("no CUDA device");
    hpml_ctx    *ctx = context(true, HPML_CUDA_BF16);
    hpml_tensor *x = hpml_input_3d(ctx, 1, 4, 3 * 264), *y = hpml_attention(x, &(hpml_attention_desc){ .heads = 1 });
    hpml_graph  *g = hpml_graph_create(ctx, &(hpml_graph_desc){ .outputs = &y, .output_count = 1 });
    ENSURE(hpml_graph_alloc(g) == HPML_OK && hpml_graph_forward(g, true, 0) == HPML_ERR_UNSUPPORTED);
    ENSURE(strstr(hpml_ctx_error(ctx), "heads of 264 columns"));
    hpml_ctx_free(ctx);
}

/* A one becomes zero where the random word of its position is below p 2^32. */
TEST(masks_are_the_words_of_the_stream)
{
    static const float chances[] = { 0.1f, 0.5f, 0.93f };
    if (no_device()) SKIP("no CUDA device");
    EACH(chances, k) for (uint64_t step = 0; step < 3; step++) {
        hpml_ctx    *ctx = context(true, HPML_CUDA_F32);
        hpml_tensor *x = hpml_input_2d(ctx, 7, 93), *y = hpml_dropout(x, 0);
        y = hpml_dropout(x, chances[k]);
        hpml_graph *g = hpml_graph_create(ctx, &(hpml_graph_desc){ .outputs = &y, .output_count = 1 });
        hpml_rng    r = { .seed = 11, .stream = step << 24 ^ (uint64_t)y->node->index ^ (uint64_t)0xd << 60 };
        hpml_node  *n = y->node;
        uint32_t    words[651 + 3 * 93];
        float       v[651];
        for (int i = 0; i < 651; i++) v[i] = 1;
        ENSURE(hpml_graph_alloc(g) == HPML_OK && hpml_tensor_set(x, v, 651) == HPML_OK);
        hpml_rng_fill_u32(&r, words, 651 + 3 * 93);
        for (uint64_t sample = 0; sample < 4; sample++) { /* of 93 numbers: every position within a block of words */
            hpml_run run = { .ctx = ctx, .train = true, .step = step, .sample = sample };
            ENSURE(hpml_ctx_backend(ctx)->ops[HPML_OP_DROPOUT].forward(&run, n) == HPML_OK);
            ENSURE(hpml_tensor_get(y, v, 651) == HPML_OK);
            for (int i = 0; i < 651; i++) {
                bool kept = words[93 * sample + (uint64_t)i] >= (uint32_t)((double)chances[k] * 4294967296.0);
                ENSURE(v[i] == (kept ? 1 / (1 - chances[k]) : 0));
            }
        }
        hpml_ctx_free(ctx);
    }
}

static void embedding_case(int64_t tokens, int64_t vocabulary, int64_t width, bool accumulate)
{
    results  r[3];
    one_op   o = { .name = "embedding", .accumulate = accumulate };
    int32_t *token = (int32_t *)malloc((size_t)tokens * sizeof *token);
    int     *count = (int *)malloc((size_t)vocabulary * sizeof *count);
    hpml_rng rng = { .seed = 3 };
    for (int64_t i = 0; i < tokens; i++) /* every other one is frequent */
        token[i] = (int32_t)hpml_rng_below(&rng, i % 2 && vocabulary > 3 ? 3 : vocabulary);
    for (int gpu = 0; gpu < 3; gpu++) {
        multiprocessors(gpu == 2);
        hpml_ctx    *ctx = context(gpu > 0, HPML_CUDA_F32);
        hpml_tensor *x = hpml_input_tokens(ctx, 1, tokens), *y = hpml_embedding(x, vocabulary, width, NULL);
        memset(&r[gpu], 0, sizeof r[gpu]);
        run_node(x, y, token, &o, &r[gpu]);
        if (hpml_ctx_status(ctx) != HPML_OK) printf("    %s\n", hpml_ctx_error(ctx)), test_failed = 1;
        hpml_ctx_free(ctx);
    }
    for (int64_t i = 0; i < vocabulary; i++) count[i] = 0;
    for (int64_t i = 0; i < tokens; i++) count[token[i]]++;
    for (int64_t i = 0; i < vocabulary && r[1].count == 2; i++) /* the rows of long tokens have other sums */
        if (count[i] > 64)
            for (int64_t k = i * width; k < (i + 1) * width; k++) {
                if (fabsf(r[1].v[1][k] - r[0].v[1][k]) > 1e-4f) test_failed = 1;
                r[0].v[1][k] = r[1].v[1][k];
            }
    for (int i = 0; i < 2; i++) /* sums in order of position: the CPU's bits */
        if (r[1].count != 2 || memcmp(r[0].v[i], r[1].v[i], (size_t)r[0].n[i] * sizeof(float)) != 0)
            printf("    embedding of %dx%d: other bits in array %d\n", (int)vocabulary, (int)width, i), test_failed = 1;
    for (int i = 0; i < 2; i++) /* and on another number of multiprocessors, the same */
        if (memcmp(r[1].v[i], r[2].v[i], (size_t)r[1].n[i] * sizeof(float)) != 0)
            printf("    embedding of %dx%d: its bits change in array %d\n", (int)vocabulary, (int)width, i),
                test_failed = 1;
    for (int i = 0; i < 3; i++) drop(&r[i]);
    free(token);
    free(count);
}

TEST(embedding_adds_in_order)
{
    if (no_device()) SKIP("no CUDA device");
    embedding_case(700, 300, 24, false);
    embedding_case(300, 1000, 260, false);
    embedding_case(90, 7, 5, false);
    embedding_case(1, 1, 1, false);
    embedding_case(64, 1, 9, false);
    embedding_case(65, 1, 9, true); /* two pieces, the second of one position */
    embedding_case(900, 1, 300, false);
    embedding_case(900, 2, 16, true);
}

TEST(a_token_out_of_range_is_an_error)
{
    if (no_device()) SKIP("no CUDA device");
    for (int bad = -1; bad <= 9; bad += 10) {
        hpml_ctx    *ctx = context(true, HPML_CUDA_F32);
        hpml_tensor *x = hpml_input_tokens(ctx, 2, 3), *y = hpml_embedding(x, 9, 4, NULL);
        hpml_graph  *g = hpml_graph_create(ctx, &(hpml_graph_desc){ .outputs = &y, .output_count = 1 });
        int32_t      token[6] = { 1, 2, 3, 4, bad, 5 };
        float        v[24];
        ENSURE(hpml_graph_alloc(g) == HPML_OK && hpml_tensor_set_raw(x, token, sizeof token) == HPML_OK);
        hpml_graph_forward(g, true, 0);
        ENSURE(hpml_tensor_get(y, v, 24) == HPML_ERR_LABEL);
        ENSURE(strstr(hpml_ctx_error(ctx), "token 4 is"));
        hpml_ctx_free(ctx);
    }
}

/* Some steps of an optimizer over parameters of many sizes, one at an address that is not a multiple of 16 bytes. With
   u.found_nonfinite the second step's gradients are not all finite, and there is an error. */
#define PARAMS 6
static void optimizer_case(hpml_update u, bool m, bool v, results *r, bool gpu)
{
    static const int64_t sizes[PARAMS] = { 7, 4096, 0, 12301, 1, 4099 };
    hpml_ctx           *ctx = context(gpu, HPML_CUDA_F32);
    const hpml_backend *b   = hpml_ctx_backend(ctx);
    hpml_update         all[PARAMS];
    float              *at[PARAMS][4];
    memset(r, 0, sizeof *r);
    for (int step = 1; step <= 3; step++) {
        for (int p = 0; p < PARAMS; p++) {
            int64_t n = sizes[p] + 1;
            for (int k = step == 1 ? 0 : 1; k < (step == 1 ? 4 : 2); k++) { /* w, g, m, v; then a new gradient */
                float *x = numbers((uint64_t)(100 * step + 10 * p + k), n, 0);
                for (int64_t i = 0; k > 1 && i < n; i++) x[i] = 0;
                if (u.found_nonfinite && step == 2 && n > 4096) x[9] = NAN, x[4000] = -INFINITY;
                if (u.found_nonfinite && step == 2 && n > 4096 && v) x[20] = 1e30f; /* its square is infinite: step 0 */
                if (step == 1) at[p][k] = (float *)place(ctx, HPML_DTYPE_F32, x, n);
                else b->write(hpml_ctx_device(ctx), at[p][k], x, (size_t)n * sizeof(float));
                free(x);
            }
            int64_t skip = p == PARAMS - 1;
            all[p] = u, all[p].n = sizes[p], all[p].step = (uint64_t)step;
            all[p].w = at[p][0] + skip, all[p].g = at[p][1] + skip;
            all[p].state[0] = m ? at[p][2] + skip : NULL, all[p].state[1] = v ? at[p][3] + skip : NULL;
            if (p == 1) all[p].weight_decay = 0;
        }
        if (b->update(hpml_ctx_device(ctx), ctx, all, PARAMS) != HPML_OK) printf("    %s\n", hpml_ctx_error(ctx));
        if (u.found_nonfinite && gpu) *u.found_nonfinite = b->sync(hpml_ctx_device(ctx)) == HPML_ERR_NONFINITE;
        int32_t *found = u.found_nonfinite;
        if (found && *found != (step == 2)) printf("    step %d: found: %d\n", step, *found), test_failed = 1;
        if (found) *found = false;
        hpml_ctx_clear_error(ctx);
    }
    for (int p = 0; p < PARAMS; p++)
        for (int k = 0; k < 4; k++) {
            char name[48];
            snprintf(name, sizeof name, "%s of %d", k == 0 ? "w" : k == 1 ? "g" : k == 2 ? "m" : "v", (int)sizes[p]);
            if (sizes[p] && (k != 1 || u.opt == HPML_OPT_LAMB))
                keep(r, ctx, name, at[p][k], HPML_DTYPE_F32, sizes[p] + 1);
            give_back(ctx, at[p][k], sizes[p] + 1, HPML_DTYPE_F32);
        }
    hpml_ctx_free(ctx);
}

TEST(optimizers)
{
    static const char *const names[] = { "sgd", "adagrad", "rmsprop", "adam", "adamw", "lars", "lamb" };
    if (no_device()) SKIP("no CUDA device");
    for (int opt = HPML_OPT_SGD; opt <= HPML_OPT_LAMB; opt++)
        for (int variant = 0; variant < 4; variant++) {
            int32_t     bad = 0;
            hpml_update u = { .opt = (hpml_opt)opt, .lr = 0.02f, .momentum = 0.9f, .beta1 = 0.9f, .beta2 = 0.99f,
                              .eps = 1e-6f, .weight_decay = variant == 1 ? 0 : 0.03f, .trust = variant == 2 ? 0 : 0.01f,
                              .grad_scale = 0.7f, .nesterov = variant == 2,
                              .found_nonfinite = variant == 3 ? &bad : NULL };
            bool    moments = opt == HPML_OPT_ADAM || opt == HPML_OPT_ADAMW || opt == HPML_OPT_LAMB;
            bool    m = moments || (variant > 0 && opt != HPML_OPT_ADAGRAD);
            bool    v = moments || opt == HPML_OPT_ADAGRAD || opt == HPML_OPT_RMSPROP;
            results cpu, gpu;
            optimizer_case(u, m, v, &cpu, false);
            optimizer_case(u, m, v, &gpu, true);
            compare(names[opt], &gpu, &cpu, 2e-6);
            drop(&cpu);
            drop(&gpu);
        }
}

static void no_step(const hpml_update *u, float *w, float *g, float *const *state, int64_t n)
{
    (void)u, (void)w, (void)g, (void)state, (void)n;
}

/* A step of the user's own is a function of the host: a trainer on a device refuses it, and takes built-in rows. */
TEST(optimizers_of_the_user_are_refused)
{
    static const hpml_optimizer own = { .name = "own", .step = no_step };
    if (no_device()) SKIP("no CUDA device");
    hpml_ctx         *ctx = context(true, HPML_CUDA_F32);
    hpml_tensor      *in = hpml_input_2d(ctx, 4, 3), *out = hpml_linear(in, 2, NULL);
    hpml_trainer_desc d = { .input = in, .output = out, .custom_optimizer = &own };
    ENSURE_ERROR(ctx, !hpml_trainer_create(ctx, &d), HPML_ERR_UNSUPPORTED,
                 "custom_optimizer \"own\" runs on the CPU backend only, this context's is \"cuda\"");
    d.custom_optimizer = hpml_optimizer_find("lamb");
    ENSURE(hpml_trainer_create(ctx, &d) && hpml_ctx_status(ctx) == HPML_OK);
    hpml_ctx_free(ctx);
}

/* Three steps of a codec on the device and on the CPU: the same bytes, residuals and decoded numbers. */
static void codec_case(const hpml_codec_desc *c, int64_t rows, int64_t cols, bool hostile)
{
    hpml_ctx           *ctx  = context(true, HPML_CUDA_F32);
    const hpml_backend *b    = hpml_ctx_backend(ctx);
    void               *dev  = hpml_ctx_device(ctx);
    hpml_packing        p;
    int64_t             n = rows * cols;
    size_t              bytes = (size_t)n * sizeof(float);
    const char         *wrong = NULL;
    ENSURE(hpml_packing_init(&p, c, rows, cols) == HPML_OK);
    char  *packed = (char *)calloc(p.size, 1), *packed2 = (char *)calloc(p.size, 1);
    float *e = (float *)calloc(bytes, 1), *out = (float *)calloc(bytes, 1), *back = (float *)calloc(bytes, 1);
    float *dp = (float *)b->alloc(dev, p.size), *de = (float *)place(ctx, HPML_DTYPE_F32, e, n);
    float *dout = (float *)place(ctx, HPML_DTYPE_F32, e, n), *dg = (float *)b->alloc(dev, bytes);
    for (int step = 0; step < 3 && !wrong; step++) {
        float *g = numbers((uint64_t)step + 40, n, 0.1f);
        if (hostile) { /* rows: whole, NaN, infinity, sums that overflow, tiny, zeros of both signs */
            g[cols] = NAN, g[3 * cols - 1] = -INFINITY;
            if (rows > 6) g[n - 1] = NAN;
            for (int64_t i = 0; i < cols; i++)
                g[3 * cols + i] *= 3e38f, g[4 * cols + i] *= 1e-42f, g[5 * cols + i] = i % 3 ? -0.0f : 0.0f;
        }
        b->write(dev, dg, g, bytes);
        hpml_status cpu = hpml_packing_encode(&p, packed, e, g, rows, NULL);
        if (b->encode(dev, ctx, &p, dp, de, dg, rows) != cpu) wrong = "status";
        if (b->decode(dev, ctx, &p, dout, dp, rows, step > 0) != HPML_OK) wrong = hpml_ctx_error(ctx);
        (step > 0 ? hpml_packing_decode_add : hpml_packing_decode)(&p, out, packed, rows);
        b->read(dev, packed2, dp, p.size);
        if (memcmp(packed, packed2, (size_t)rows * p.row_size) != 0) wrong = "bytes";
        b->read(dev, back, de, bytes);
        if (p.residual_count && memcmp(e, back, bytes) != 0) wrong = "residual";
        b->read(dev, back, dout, bytes);
        if (memcmp(out, back, bytes) != 0) wrong = "decoded";
        free(g);
    }
    if (wrong) printf("    codec %d, %lld rows of %lld%s: %s\n", (int)c->kind, (long long)rows, (long long)cols,
                      c->no_feedback ? ", no feedback" : "", wrong),
               test_failed = 1;
    b->free(dev, dp, p.size), b->free(dev, dg, bytes), b->free(dev, de, bytes), b->free(dev, dout, bytes);
    free(packed), free(packed2), free(e), free(out), free(back);
    hpml_ctx_free(ctx);
}

TEST(codecs_bit_for_bit)
{
    static const int64_t shapes[][2] = { { 1, 300 }, { 3, 1 }, { 40, 5 }, { 37, 27 }, { 6, 64 }, { 9, 513 },
                                         { 5, 1024 }, { 3, 1025 }, { 5, 3000 }, { 2, 16384 }, { 7, 16390 },
                                         { 1, 40001 } };
    if (no_device()) SKIP("no CUDA device");
    for (int kind = HPML_CODEC_NONE; kind <= HPML_CODEC_TWOBIT; kind++)
        EACH(shapes, i) for (int variant = 0; variant < 3; variant++) {
            hpml_codec_desc c = { .kind = (hpml_codec_kind)kind, .compress_all = i % 2 == 0,
                                  .no_feedback = variant == 1, .threshold = variant == 2 ? 0.8f : 0 };
            codec_case(&c, shapes[i][0], shapes[i][1], false);
            if (shapes[i][0] > 5) codec_case(&c, shapes[i][0], shapes[i][1], true);
        }
    codec_case(&(hpml_codec_desc){ .kind = HPML_CODEC_ONEBIT, .compress_all = true }, 7, 17000, true);
    codec_case(&(hpml_codec_desc){ .kind = HPML_CODEC_BF16 }, 262140, 1, true);
    for (int kind = HPML_CODEC_BF16; kind <= HPML_CODEC_TWOBIT; kind++) { /* more rows than blocks take at once */
        multiprocessors(1);
        codec_case(&(hpml_codec_desc){ .kind = (hpml_codec_kind)kind }, 40, 9000, false);
        codec_case(&(hpml_codec_desc){ .kind = (hpml_codec_kind)kind }, 40, 17000, true);
    }
    multiprocessors(0);
}

static hpml_status no_encode(const hpml_packing *p, void *to, float *e, const float *g, int64_t rows,
                             const hpml_encode_info *info)
{
    (void)p, (void)to, (void)e, (void)g, (void)rows, (void)info;
    return HPML_OK;
}

static void no_decode(const hpml_packing *p, float *out, const void *from, int64_t rows, bool add)
{
    (void)p, (void)out, (void)from, (void)rows, (void)add;
}

static size_t no_size(const hpml_codec_desc *c, int64_t cols) { return (void)c, (size_t)cols; }

TEST(codecs_the_device_refuses)
{
    hpml_codec   mine = { "mine", false, true, false, false, no_size, no_encode, no_decode };
    hpml_packing p;
    if (no_device()) SKIP("no CUDA device");
    hpml_ctx           *ctx = context(true, HPML_CUDA_F32);
    const hpml_backend *b   = hpml_ctx_backend(ctx);
    float              *x   = (float *)b->alloc(hpml_ctx_device(ctx), 800000);
    hpml_packing_init(&p, &(hpml_codec_desc){ .custom = &mine }, 1, 100000);
    ENSURE(b->encode(hpml_ctx_device(ctx), ctx, &p, x, NULL, x + 100000, 1) == HPML_ERR_UNSUPPORTED);
    ENSURE(strstr(hpml_ctx_error(ctx), "\"mine\" is custom"));
    b->free(hpml_ctx_device(ctx), x, 800000);
    hpml_ctx_free(ctx);
}

/* Cases that need several blocks, tiles or splits of a sum: name, op and the shape of x, (B, C, H, W). */
#define WIDE(X)                                                                                                        \
    X(bias, hpml_add(x, weight(x, 1, 1, 88)), 5, 6, 70, 88)                                                            \
    X(bias_odd, hpml_mul(x, weight(x, 1, 1, 90)), 5, 6, 70, 90)                                                        \
    X(bias_long, hpml_add(x, weight(x, 1, 1, 3)), 40, 5, 60, 3)                                                        \
    X(bias_one, hpml_mul(x, weight(x, 1, 1, 1)), 5, 6, 70, 90)                                                         \
    X(channels, hpml_mul(x, weight(x, 6, 1, 1)), 5, 6, 70, 91)                                                         \
    X(column, hpml_sub(x, weight(x, 1, 70, 1)), 5, 6, 70, 90)                                                          \
    X(batch, hpml_mul(weight(x, 6, 33, 40), x), 9, 6, 33, 40) X(same, hpml_mul(x, x), 5, 6, 70, 90)                    \
    X(mean_all, hpml_add(x, hpml_mean(x, HPML_ALL_DIMS)), 5, 6, 70, 90)                                                \
    X(mean_0, hpml_add(x, hpml_mean(x, 0)), 300, 4, 5, 6) X(mean_1, hpml_add(x, hpml_mean(x, 1)), 3, 300, 5, 7)        \
    X(mean_2, hpml_add(x, hpml_mean(x, 2)), 2, 3, 300, 40) X(mean_3, hpml_add(x, hpml_mean(x, 3)), 3, 4, 5, 901)       \
    X(turn, hpml_permute(x, (int[]){ 0, 1, 3, 2 }), 2, 3, 70, 131)                                                     \
    X(to_nhwc, hpml_permute(x, (int[]){ 0, 2, 3, 1 }), 2, 66, 9, 13)                                                   \
    X(heads, hpml_permute(x, (int[]){ 0, 2, 1, 3 }), 2, 33, 4, 24)                                                     \
    X(turn_all, hpml_permute(x, (int[]){ 3, 2, 1, 0 }), 20, 3, 5, 66)                                                  \
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

static hpml_tensor *dense(hpml_tensor *x, int64_t n, hpml_act f)
{
    return hpml_linear(x, n, &(hpml_linear_desc){ .activation = f });
}

static hpml_tensor *dense_no_bias(hpml_tensor *x, int64_t n, hpml_act f)
{
    return hpml_linear(x, n, &(hpml_linear_desc){ .activation = f, .no_bias = true });
}

/* Products and convolutions of several tiles, with and without whole ones, split sums, many groups. */
#define PRODUCTS(X)                                                                                                    \
    X(linear, dense(x, 136, HPML_ACT_GELU), 5, 2, 100, 72)                                                             \
    X(linear_odd, dense(x, 131, HPML_ACT_SIGMOID), 3, 2, 67, 37)                                                       \
    X(linear_tall, hpml_linear(hpml_tanh(x), 9, NULL), 30, 7, 11, 16)                                                  \
    X(linear_twice, dense(hpml_linear(x, 40, NULL), 24, HPML_ACT_SILU), 6, 5, 9, 16)                                   \
    X(matmul_nt, hpml_matmul(hpml_tanh(x), x, false, true), 2, 1, 136, 72)                                             \
    X(matmul_tn, hpml_matmul(hpml_tanh(x), hpml_tanh(x), true, false), 2, 1, 72, 136)                                  \
    X(matmul_nn, hpml_matmul(hpml_tanh(x), weight(x, 1, 72, 80), false, false), 2, 1, 136, 72)                         \
    X(matmul_tt, hpml_matmul(hpml_tanh(x), weight(x, 1, 24, 72), true, true), 3, 1, 72, 40)                            \
    X(conv, hpml_conv2d(hpml_tanh(x), 70, &(hpml_conv2d_desc){ .kernel_h = 3, .stride_h = 2, .padding_h = 1,           \
                                                               .activation = HPML_ACT_TANH }), 3, 24, 12, 11)          \
    X(conv_8, hpml_conv2d(x, 16, &(hpml_conv2d_desc){ .kernel_h = 5, .padding_h = 2, .dilation_h = 1 }), 5, 8, 16, 16) \
    X(conv_groups, hpml_conv2d(x, 24, &(hpml_conv2d_desc){ .kernel_h = 3, .groups = 2, .dilation_h = 2 }),             \
      3, 20, 9, 14)                                                                                                    \
    X(conv_depthwise, hpml_conv2d(x, 32, &(hpml_conv2d_desc){ .kernel_h = 3, .padding_h = 1, .groups = 16 }),          \
      4, 16, 13, 12)                                                                                                   \
    X(lstm, hpml_lstm(hpml_reshape_3d(x, 4, 9, 24), 40, NULL), 4, 3, 3, 24)                                            \
    X(mlp, hpml_linear(dense(x, 136, HPML_ACT_GELU), 72, NULL), 3, 1, 40, 24)                                          \
    X(mlp_add, read_twice(x, 24), 3, 1, 40, 24) X(mlp_odd, read_twice(x, 7), 3, 1, 11, 7)                              \
    X(mlp_deep, dense(dense_no_bias(dense(x, 40, HPML_ACT_SILU), 24, HPML_ACT_GELU), 16, HPML_ACT_TANH), 3, 1, 40, 24) \
    X(conv_1x1, hpml_conv2d(x, 20, &(hpml_conv2d_desc){ .kernel_h = 1, .stride_h = 2 }), 3, 24, 13, 12)                \
    X(conv_rests, hpml_conv2d(x, 8, &(hpml_conv2d_desc){ .kernel_h = 4, .kernel_w = 3, .stride_h = 4, .stride_w = 2,   \
                                                         .dilation_h = 2, .padding_h = 2 }), 2, 5, 21, 14)             \
    X(conv_twice, hpml_add(hpml_conv2d(x, 6, &(hpml_conv2d_desc){ .kernel_h = 1, .stride_h = 3 }),                     \
                           hpml_conv2d(x, 6, &(hpml_conv2d_desc){ .kernel_h = 2, .stride_h = 3, .padding_h = 0 })),    \
      2, 6, 11, 11)                                                                                                    \
    X(conv_apart, hpml_conv2d(x, 8, &(hpml_conv2d_desc){ .kernel_h = 2, .stride_h = 3, .groups = 8, .padding_h = 1 }), \
      2, 8, 10, 2)                                                                                                     \
    X(relu, dense(hpml_conv2d(x, 9, &(hpml_conv2d_desc){ .kernel_h = 3, .activation = HPML_ACT_RELU }), 40,            \
                  HPML_ACT_RELU), 3, 6, 9, 18)
static hpml_tensor *read_twice(hpml_tensor *x, int64_t n) /* a layer whose result has two readers */
{
    hpml_tensor *y = hpml_linear(x, n, &(hpml_linear_desc){ .activation = HPML_ACT_GELU });
    hpml_tensor *z = n % 2 ? hpml_tanh(y) : y; /* before it, or after */
    return hpml_add(hpml_linear(y, n, NULL), z);
}
#define DEFINE_PRODUCT(name, e, ...) static hpml_tensor *product_##name(hpml_tensor *x) { return e; }
#define PRODUCT_CASE(name, e, ...) { "large " #name, product_##name, 0, { __VA_ARGS__ } },
PRODUCTS(DEFINE_PRODUCT)
static const op_case product_cases[] = { PRODUCTS(PRODUCT_CASE) };

/* The last case only in f32: rounding decides on which side of a kink an element is. */
static void all_products(hpml_cuda_precision precision, double tolerance)
{
    size_t count = sizeof product_cases / sizeof product_cases[0] - (precision != HPML_CUDA_F32);
    for (products = OWN; products != AS_EVER; products--)
        if (products == LIBRARIES || !libraries_only()) some_cases(product_cases, count, precision, 1, tolerance);
}

TEST(large_products_in_f32)
{
    if (no_device()) SKIP("no CUDA device");
    all_products(HPML_CUDA_F32, 1e-4);
}

TEST_LONG(large_products_in_tf32)
{
    if (no_device()) SKIP("no CUDA device");
    all_products(HPML_CUDA_TF32, 2e-2);
}

TEST_LONG(large_products_in_halves)
{
    if (no_device()) SKIP("no CUDA device");
    all_products(HPML_CUDA_BF16, 0.15);
    all_products(HPML_CUDA_F16, 2e-2);
}

/* The libraries' products fuse act' and the sums for biases, also where gradients are added; where a library refuses or
   fails, other kernels follow. The counts prove it. */
TEST(products_fuse_derivatives_and_sums)
{
    enum { DGELU = 192, BGRADB = 512, LATE = 1 << 20 };
    if (!cuda_on_cpu_fault) SKIP("needs the emulation");
    for (int i = 0; i < 6; i++) {
        const int refused[6] = { 0, DGELU & ~128, BGRADB, 0xfff, DGELU | LATE, 0xfff | LATE };
        long      slopes = cuda_on_cpu_count("cublas 192"), sums = cuda_on_cpu_count("cublas 512");
        products = LIBRARIES;
        cuda_on_cpu_fault("cublas", refused[i]);
        EACH(product_cases, c)
            if (strstr(product_cases[c].name, "mlp")) some_cases(&product_cases[c], 1, HPML_CUDA_BF16, 3 - i % 3, 0.1);
        cuda_on_cpu_fault("none", 0);
        products = AS_EVER;
        ENSURE((cuda_on_cpu_count("cublas 192") > slopes) == ((i == 0 || i == 2) && !library_is(LIBRARY_REFUSE)));
        ENSURE((cuda_on_cpu_count("cublas 512") > sums) ==
               ((i == 0 || i == 1 || i == 4) && !library_is(LIBRARY_REFUSE | LIBRARY_BGRADB)));
        ENSURE(cuda_on_cpu_count("cublas") == 0);
    }
}

/* cuDNN runs all passes of a convolution; passes that it refuses, when asked for an algorithm or when called, recorded
   or not, run by own kernels. */
TEST(convolutions_by_the_library_or_own_kernels)
{
    enum { DESCRIBE = 1, ASK = 2, FUSED = 4, Y = 8, DX = 16, DW = 32 };
    static const struct { int refused, runs; } ways[] = { /* runs: bits for y, dx, dw, fused y */
        { 0, 15 }, { FUSED, 7 }, { Y | DX, 4 }, { DW, 11 }, { ASK, 0 }, { DESCRIBE, 0 } };
    if (!cuda_on_cpu_fault) SKIP("needs the emulation");
    products = LIBRARIES;
    hpml_ctx *ctx = context(true, HPML_CUDA_F32);
    products = AS_EVER;
    /* cuDNN is opened with the first convolution */
    ENSURE(hpml_ctx_status(ctx) == HPML_OK && cuda_on_cpu_count("cudnn") == 0);
    hpml_ctx_free(ctx);
    EACH(ways, i) {
        const char *const counts[4] = { "cudnn 0", "cudnn 1", "cudnn 2", "cudnn 3" };
        long              before[4];
        for (int k = 0; k < 4; k++) before[k] = cuda_on_cpu_count(counts[k]);
        products = LIBRARIES;
        cuda_on_cpu_fault("cudnn", ways[i].refused);
        EACH(product_cases, c)
            if (strstr("large conv_groups, large conv, large relu", product_cases[c].name))
                some_cases(&product_cases[c], 1, HPML_CUDA_F32, 3 - (int)i % 3, 1e-4);
        cuda_on_cpu_fault("none", 0);
        products = AS_EVER;
        for (int k = 0; k < 4; k++)
            ENSURE((cuda_on_cpu_count(counts[k]) > before[k]) ==
                   ((ways[i].runs >> k & 1) && !library_is(LIBRARY_REFUSE)));
        ENSURE(cuda_on_cpu_count("cudnn") == 0);
    }
}

/* Transposed convolutions by cuDNN: its passes in other roles, where gradients are added as well. */
TEST(transposed_convolutions_by_the_library)
{
    if (!cuda_on_cpu_fault) SKIP("needs the emulation");
    products = LIBRARIES;
    EACH(cases, c) {
        if (strncmp(cases[c].name, "conv_transpose", 14) != 0) continue;
        some_cases(&cases[c], 1, HPML_CUDA_F32, 3, 1e-4);
        some_cases(&cases[c], 1, HPML_CUDA_BF16, 1, 0.1);
    }
    products = AS_EVER;
}

/* Images of half models that cuDNN computes: NHWC from the input to where an op needs the shape's order. CONV: with 5
   channels, so that no vec8 holds whole pixels. */
#define CONV(x, ...) hpml_conv2d(x, 5, &(hpml_conv2d_desc){ .kernel_h = 3, .padding_h = 1, __VA_ARGS__ })
#define IMAGES(X)                                                                                                      \
    X(bare, CONV(x, .no_bias = true))                                                                                  \
    X(fused, CONV(CONV(x, .stride_h = 2), .stride_w = 2, .stride_h = 1))                                               \
    X(stretched, hpml_conv2d(CONV(x, 0), 7, &(hpml_conv2d_desc){ .kernel_h = 3, .kernel_w = 2, .stride_h = 2,          \
                                                                 .stride_w = 3, .dilation_h = 2, .padding_h = 2 }))    \
    X(grouped, hpml_conv2d(hpml_conv2d(x, 6, &(hpml_conv2d_desc){ .kernel_h = 3, .groups = 2 }), 9,                    \
                           &(hpml_conv2d_desc){ .kernel_h = 2, .groups = 3, .padding_h = 1, .stride_h = 2 }))          \
    X(depthwise, hpml_conv2d(CONV(x, 0), 10, &(hpml_conv2d_desc){ .kernel_h = 3, .groups = 5, .activation =            \
                                                                  HPML_ACT_TANH }))                                    \
    X(pixels, hpml_conv2d(CONV(x, .activation = HPML_ACT_SIGMOID), 1, &(hpml_conv2d_desc){ .kernel_h = 1 }))           \
    X(one_channel, CONV(hpml_slice(x, 1, 2, 1), 0))                                                                    \
    X(norm, CONV(hpml_batchnorm(hpml_tanh(CONV(x, .no_bias = true)), NULL), 0))                                        \
    X(norm_of_input, CONV(hpml_batchnorm(x, NULL), 0))                                                                 \
    X(norm_wide, hpml_batchnorm(hpml_conv2d(x, 16, &(hpml_conv2d_desc){ .kernel_h = 1, .no_bias = true }), NULL))      \
    X(norm_odd, hpml_batchnorm(hpml_conv2d(x, 13, &(hpml_conv2d_desc){ .kernel_h = 1, .no_bias = true }), NULL))       \
    X(sums, hpml_sub(hpml_add(CONV(x, 0), CONV(x, 0)), hpml_scale(CONV(x, 0), 0.5f, 1)))                               \
    X(ratio, hpml_div(hpml_mul(CONV(x, 0), CONV(x, 0)), hpml_scale(hpml_sigmoid(CONV(x, 0)), 1, 1)))                   \
    X(residual, residual(CONV(x, 0), 3))                                                                               \
    X(two_orders, hpml_add(hpml_conv2d(x, 4, &(hpml_conv2d_desc){ .kernel_h = 3, .padding_h = 1 }), hpml_tanh(x)))     \
    X(two_orders_too, CONV(hpml_sub(hpml_tanh(x), hpml_conv2d(x, 4, &(hpml_conv2d_desc){ .kernel_h = 1 })), 0))        \
    X(gates, gates(CONV(x, 0))) X(shared_filter, shared_filter(x)) X(two_orders_linear, two_orders_linear(x))          \
    X(channel, hpml_mul(CONV(x, 0), weight(x, 5, 1, 1))) X(pixel, hpml_add(weight(x, 1, 9, 7), CONV(x, 0)))            \
    X(broadcast_image, hpml_mul(CONV(x, 0), weight(x, 5, 9, 7)))                                                       \
    X(columns, hpml_mul(hpml_reshape_4d(hpml_mean(CONV(x, 0), 2), 3, 5, 1, 7), CONV(x, 0)))                            \
    X(pools, hpml_avg_pool2d(hpml_avg_pool2d(CONV(x, 0), 3, 2, 1), 2, 1, 0))                                           \
    X(pool_all, hpml_tanh(hpml_global_avg_pool2d(CONV(x, 0))))                                                         \
    X(flat, hpml_linear(hpml_flatten(CONV(x, 0)), 6, NULL))                                                            \
    X(reshaped, CONV(hpml_reshape_4d(CONV(x, 0), 3, 7, 5, 9), 0))                                                      \
    X(permuted, CONV(hpml_permute(CONV(x, 0), (const int[]){ 0, 3, 1, 2 }), 0))                                        \
    X(declared, CONV(nhwc(CONV(x, 0)), 0))                                                                             \
    X(parts, parts(CONV(x, 0), 1)) X(parts_of_rows, parts(CONV(x, 0), 2)) X(parts_of_batch, parts(CONV(x, 0), 0))      \
    X(strange, CONV(hpml_softmax(CONV(x, .no_bias = true)), 0))                                                        \
    X(strange_sum, hpml_layernorm(hpml_add(CONV(x, .no_bias = true), CONV(x, .no_bias = true)), NULL))                 \
    X(strange_mean, hpml_mul(hpml_mean(hpml_mean(CONV(x, 0), 3), 2), weight(x, 1, 1, 5)))                              \
    X(dropped, CONV(hpml_dropout(CONV(x, 0), 0.4f), 0))                                                                \
    X(linear, hpml_linear(CONV(x, 0), 6, NULL)) X(product, product_of(CONV(x, 0)))                                     \
    X(own, own_of(CONV(x, 0)))                                                                                         \
    X(readers, readers(CONV(x, 0))) X(again, again(x))                                                                 \
    X(larger, hpml_conv_transpose2d(CONV(x, 0), 3, &(hpml_conv2d_desc){ .kernel_h = 3, .stride_h = 2 }))               \
    X(larger_input, CONV(hpml_conv_transpose2d(x, 4, &(hpml_conv2d_desc){ .kernel_h = 2, .stride_h = 2,                \
                                               .groups = 2, .activation = HPML_ACT_TANH }), 0))                        \
    X(groupnorm, CONV(hpml_groupnorm(CONV(x, .no_bias = true), 5, NULL), 0))
static hpml_tensor *residual(hpml_tensor *x, int blocks) /* gradients of all sums are one array */
{
    for (int i = 0; i < blocks; i++) x = hpml_add(x, CONV(hpml_tanh(x), 0));
    return x;
}
static hpml_tensor *shared_filter(hpml_tensor *x) /* read by a convolution and, as its shape says, by a product */
{
    hpml_tensor *y = hpml_conv2d(x, 3, &(hpml_conv2d_desc){ .kernel_h = 3, .padding_h = 1, .no_bias = true });
    hpml_tensor *z = hpml_matmul(hpml_slice(x, 3, 0, 3), hpml_param_at(x->ctx, 0), false, false);
    return hpml_add(hpml_slice(y, 3, 0, 3), hpml_slice(z, 1, 0, 3));
}
static hpml_tensor *two_orders_linear(hpml_tensor *x) /* whose gradients would be one array if both were NCHW */
{
    hpml_tensor *y = hpml_conv2d(x, 4, &(hpml_conv2d_desc){ .kernel_h = 3, .padding_h = 1 });
    return hpml_add(y, hpml_linear(hpml_tanh(x), 7, NULL));
}
static hpml_tensor *gates(hpml_tensor *x) /* squeeze and excitation */
{
    hpml_tensor *means = hpml_reshape_4d(hpml_global_avg_pool2d(x), 3, 5, 1, 1);
    return hpml_mul(x, hpml_sigmoid(hpml_conv2d(means, 5, &(hpml_conv2d_desc){ .kernel_h = 1 })));
}
static hpml_tensor *parts(hpml_tensor *x, int dim) /* the second part, then the first, then all */
{
    int64_t      n = x ? x->shape[dim] : 3;
    hpml_tensor *part[3] = { hpml_slice(x, dim, 2, n - 2), hpml_slice(x, dim, 0, 2), x };
    return hpml_concat(part, 2 + (dim == 1), dim);
}
static hpml_tensor *product_of(hpml_tensor *x) { return hpml_matmul(x, x, false, true); }
static hpml_tensor *own_of(hpml_tensor *x)
{
    hpml_tensor *both[2] = { x, x };
    return hpml_add(hpml_custom_op(both, 2, &own_op), x);
}
static hpml_tensor *again(hpml_tensor *x) /* a segment that runs again for the backward pass, with a reshape in it */
{
    hpml_recompute(x->ctx, true);
    hpml_tensor *y = hpml_tanh(hpml_linear(hpml_flatten(hpml_tanh(CONV(x, 0))), 63, NULL));
    x = CONV(hpml_reshape_4d(y, 3, 1, 9, 7), 0);
    hpml_recompute(x->ctx, false);
    return hpml_tanh(CONV(x, 0));
}
static hpml_tensor *readers(hpml_tensor *x) /* of both orders */
{
    hpml_tensor *flat = hpml_reshape_4d(hpml_linear(hpml_flatten(x), 63, NULL), 3, 1, 9, 7);
    return hpml_mul(hpml_add(hpml_softmax(x), CONV(x, 0)), hpml_add(flat, x));
}
#define DEFINE_IMAGE(name, e) static hpml_tensor *image_##name(hpml_tensor *x) { return e; }
#define IMAGE_CASE(name, e) { "images " #name, image_##name, 0, { 0 } },
IMAGES(DEFINE_IMAGE)
static const op_case image_cases[] = { IMAGES(IMAGE_CASE) };

/* Blocks of a ResNet, whose kinks see whole numbers, which are the same in every precision. */
static hpml_tensor *small_resnet(hpml_tensor *x)
{
    x = hpml_max_pool2d(CONV(x, .activation = HPML_ACT_RELU), 3, 2, 1);
    x = hpml_relu(hpml_add(CONV(x, .no_bias = true), hpml_conv2d(x, 5, &(hpml_conv2d_desc){ .kernel_h = 1 })));
    x = hpml_tanh(hpml_batchnorm(hpml_max_pool2d(x, 2, 1, 0), NULL));
    x = hpml_batchnorm(CONV(x, .no_bias = true), NULL);
    return hpml_linear(hpml_flatten(hpml_avg_pool2d(x, 2, 0, 0)), 6, NULL);
}
static hpml_tensor *small_vgg(hpml_tensor *x)
{
    x = hpml_relu(CONV(hpml_max_pool2d(x, 2, 0, 0), 0));
    return hpml_global_avg_pool2d(hpml_batchnorm(hpml_avg_pool2d(hpml_relu(x), 2, 1, 0), NULL));
}
static const op_case whole_cases[] = { { "small ResNet", small_resnet, 0, { 4, 3, 14, 13 } },
                                       { "small VGG", small_vgg, 0, { 0 } } };

/* The same numbers by NHWC images as on the CPU, and as by NCHW images, which own kernels have. refused: see ways[] of
   convolutions_by_the_library_or_own_kernels; own kernels then read and write NHWC images. */
static void image_run(const op_case *c, hpml_cuda_precision precision, int passes, double tolerance, int refused)
{
    results cpu = { 0 }, nchw = { 0 }, gpu = { 0 };
    char    error[256];
    bool    good = run_case(c, false, HPML_CUDA_F32, passes, &cpu, error) == HPML_OK;
    products = OWN;
    good     = good && run_case(c, true, precision, passes, &nchw, error) == HPML_OK && reordered == -1;
    products = LIBRARIES;
    cuda_on_cpu_fault("cudnn", refused);
    good = good && run_case(c, true, precision, passes, &gpu, error) == HPML_OK && reordered > 0;
    cuda_on_cpu_fault("none", 0);
    products = AS_EVER;
    if (!good) printf("    %s: %s, %lld copies\n", c->name, error, reordered), test_failed = 1;
    else compare(c->name, &gpu, &cpu, tolerance), compare(c->name, &gpu, &nchw, tolerance);
    drop(&cpu), drop(&nchw), drop(&gpu);
}

static void images(hpml_cuda_precision precision, double tolerance, int refused)
{
    static const op_case thin = { "input of one channel", image_bare, 0, { 3, 1, 9, 7 } };
    if (!cuda_on_cpu_fault) SKIP("needs the emulation");
    image_run(&thin, precision, 1, tolerance, refused);
    ENSURE(reordered == 2); /* the result, and its gradient; one channel is the same in both orders */
    own_op = (hpml_custom){ .name = "product", .forward = pair_forward, .backward = pair_backward };
    EACH(image_cases, c) image_run(&image_cases[c], precision, 1 + 2 * (int)(c % 2), tolerance, refused);
    whole_numbers = true;
    for (int passes = 1; passes <= 3; passes++) /* refused: the fused call and dw; y; dx */
        EACH(whole_cases, c)
            image_run(&whole_cases[c], precision, passes, tolerance, refused ? (int[]){ 36, 8, 16 }[passes - 1] : 0);
    whole_numbers = false;
}
TEST(images_are_nhwc_in_bf16) { images(HPML_CUDA_BF16, 0.15, 0); }
TEST(images_are_nhwc_in_f16) { images(HPML_CUDA_F16, 2e-2, 0); }
TEST(own_kernels_read_nhwc) { images(HPML_CUDA_F16, 2e-2, 2); }

/* What the host reads and writes has the order of the shape, (B, C, H, W): results between ops, outputs, any batch. */
TEST(the_host_sees_images_in_the_order_of_their_shape)
{
    enum { B = 3, C = 5, H = 6, W = 7, N = B * C * H * W };
    static float want[2][N], got[N], x[B * 3 * H * W];
    uint16_t     halves[N];
    char         path[] = "/tmp/hpml_images_XXXXXX", text[1024];
    if (no_device()) SKIP("no CUDA device");
    for (int i = 0; i < B * 3 * H * W; i++) x[i] = sinf((float)i);
    products = LIBRARIES;
    for (int gpu = 0; gpu < 2; gpu++) {
        hpml_ctx    *ctx = context(gpu, HPML_CUDA_F16);
        hpml_tensor *in = hpml_input_4d(ctx, B, 3, H, W), *h = CONV(in, .activation = HPML_ACT_RELU);
        hpml_tensor *out[3] = { h, hpml_max_pool2d(CONV(h, 0), 2, 1, 0), hpml_linear(hpml_flatten(h), 4, NULL) };
        hpml_graph  *g = hpml_graph_create(ctx, &(hpml_graph_desc){ .outputs = out, .output_count = 3,
                                                                    .predict = true });
        ENSURE(hpml_graph_alloc(g) == HPML_OK && hpml_tensor_set(in, x, B * 3 * H * W) == HPML_OK);
        for (int pass = 0; pass < 3; pass++) ENSURE(hpml_graph_forward(g, false, 0) == HPML_OK);
        for (int i = 0; i < 2; i++) {
            int64_t n = hpml_tensor_count(out[i]);
            ENSURE(hpml_tensor_get(out[i], got, n) == HPML_OK);
            for (int64_t k = 0; k < n && gpu; k++) ENSURE_NEAR(got[k], want[i][k], 1e-2 * (1 + fabsf(want[i][k])));
            if (!gpu) memcpy(want[i], got, (size_t)n * sizeof *got);
        }
        if (gpu && hpml_cuda_text(ctx, text, sizeof text) && strstr(text, "convolutions: 0 by cuDNN, 0 by") == NULL) {
            /* a pass copies the input, and h for the flatten */
            ENSURE(h->stride[1] == 1 && h->stride[2] == W * C && h->stride[3] == C);
            ENSURE(strstr(text, ", 6 copies to NHWC or back"));
            ENSURE(hpml_tensor_get_raw(h, halves, sizeof halves) == HPML_OK);
            hpml_convert(ctx, HPML_DTYPE_F32, got, HPML_DTYPE_F16, halves, N);
            for (int k = 0; k < N; k++) ENSURE_NEAR(got[k], want[0][k], 1e-2 * (1 + fabsf(want[0][k])));
            for (int k = 0; k < N; k++) got[k] = (float)k;
            ENSURE(hpml_tensor_set(h, got, N) == HPML_OK && hpml_tensor_get_raw(h, halves, sizeof halves) == HPML_OK);
            ENSURE(hpml_tensor_set_raw(h, halves, sizeof halves) == HPML_OK);
            memset(got, 0, sizeof got);
            ENSURE(hpml_tensor_get(h, got, N) == HPML_OK);
            for (int k = 0; k < N; k++) ENSURE(got[k] == (float)k);
            hpml_ctx_backend(ctx)->read(hpml_ctx_device(ctx), halves, h->raw, sizeof halves); /* the order in memory */
            hpml_convert(ctx, HPML_DTYPE_F32, got, HPML_DTYPE_F16, halves, N);
            for (int k = 0; k < C; k++) ENSURE(got[k] == (float)(k * H * W));
            close(mkstemp(path));
            ENSURE(hpml_npy_save(h, path) == HPML_OK);
            hpml_tensor *file = hpml_npy_load(ctx, path);
            ENSURE(hpml_tensor_get_raw(file, halves, sizeof halves) == HPML_OK);
            hpml_convert(ctx, HPML_DTYPE_F32, got, HPML_DTYPE_F16, halves, N);
            for (int k = 0; k < N; k++) ENSURE(got[k] == (float)k);
            unlink(path);
        }
        ENSURE(hpml_graph_set_batch(g, 2) == HPML_OK && hpml_graph_forward(g, false, 0) == HPML_OK);
        ENSURE(hpml_tensor_get(h, got, 2 * C * H * W) == HPML_OK);
        for (int k = 0; k < 2 * C * H * W; k++) ENSURE_NEAR(got[k], want[0][k], 1e-2 * (1 + fabsf(want[0][k])));
        hpml_ctx_free(ctx);
    }
    products = AS_EVER;
}

/* A trainer whose output is NHWC images: predictions, and hits in rows of the last dimension. */
TEST(hits_in_images)
{
    enum { B = 4, ROWS = B * 5 * 6, CLASSES_HERE = 7 };
    static float  x[B * 2 * 6 * 7], y[2][ROWS * CLASSES_HERE];
    int32_t       labels[ROWS];
    float         accuracy[2], loss[2];
    if (no_device()) SKIP("no CUDA device");
    for (int i = 0; i < B * 2 * 6 * 7; i++) x[i] = sinf((float)i);
    products = LIBRARIES;
    for (int gpu = 0; gpu < 2; gpu++) {
        hpml_ctx      *ctx = context(gpu, HPML_CUDA_F16);
        hpml_tensor   *in = hpml_input_4d(ctx, B, 2, 6, 7), *out = CONV(in, 0);
        hpml_trainer  *t = hpml_trainer_create(ctx, &(hpml_trainer_desc){ .input = in, .output = out, .lr = 1e-6f });
        hpml_step_info info = { 0 };
        ENSURE(hpml_trainer_predict(t, x, B, y[gpu]) == HPML_OK);
        for (int r = 0; r < ROWS && !gpu; r++) { /* two of three labels are right */
            labels[r] = 0;
            for (int c = 1; c < CLASSES_HERE; c++)
                if (y[0][r * CLASSES_HERE + c] > y[0][r * CLASSES_HERE + labels[r]]) labels[r] = c;
            if (r % 3 == 0) labels[r] = (labels[r] + 1) % CLASSES_HERE;
        }
        ENSURE(hpml_trainer_step(t, x, labels, B, &info) == HPML_OK);
        accuracy[gpu] = info.accuracy;
        loss[gpu]     = info.loss;
        ENSURE(hpml_trainer_predict(t, x, 3, y[gpu]) == HPML_OK);
        hpml_ctx_free(ctx);
    }
    products = AS_EVER;
    ENSURE_NEAR(accuracy[0], 2 / 3.0, 1e-6);
    ENSURE_NEAR(accuracy[1], accuracy[0], 0.03);
    ENSURE_NEAR(loss[1], loss[0], 1e-2);
    for (int i = 0; i < ROWS * CLASSES_HERE; i++) ENSURE_NEAR(y[1][i], y[0][i], 1e-2);
}

static hpml_status one_by_one(void *user, hpml_trainer *t, const hpml_moment *at, int64_t samples, float *loss)
{
    hpml_status status = HPML_OK;
    float       part;
    (void)user, (void)at;
    for (int64_t i = 0; i < samples && status == HPML_OK; i++) {
        status = hpml_trainer_forward_backward(t, i, 1, 1 / (float)samples, i > 0, &part);
        if (loss) *loss = (i > 0 ? *loss : 0) + part / (float)samples;
    }
    return status;
}

TEST(convolutions_have_no_limit_of_workspace)
{
    if (no_device()) SKIP("no CUDA device");
    hpml_ctx        *ctx = context(true, HPML_CUDA_F32);
    hpml_tensor     *x = hpml_input_4d(ctx, 2, 3, 6, 6);
    hpml_conv2d_desc d = { .kernel_h = 3, .name = "c", .workspace = (size_t)1 << 30 };
    ENSURE_ERROR(ctx, !hpml_conv2d(x, 4, &d), HPML_ERR_UNSUPPORTED, "\"c\": on \"cuda\" algorithm and workspace");
    d.workspace = 0, d.algorithm = HPML_CONV_DIRECT;
    ENSURE_ERROR(ctx, !hpml_conv2d(x, 4, &d), HPML_ERR_UNSUPPORTED, "leave them 0");
    hpml_ctx_free(ctx);
}

/* A micro-batch begins at any address; where cuDNN or cuBLASLt refuses the alignment, own kernels run. */
TEST(a_batch_one_by_one)
{
    float         x[3 * 9], loss[2][4];
    const int32_t y[3] = { 1, 0, 1 };
    if (no_device()) SKIP("no CUDA device");
    for (int i = 0; i < 27; i++) x[i] = sinf((float)i);
    for (int gpu = 0; gpu < 2; gpu++) {
        products = LIBRARIES;
        hpml_ctx        *ctx = context(gpu, HPML_CUDA_F32);
        hpml_tensor     *in = hpml_input_4d(ctx, 3, 1, 3, 3);
        hpml_conv2d_desc conv = { .kernel_h = 3, .padding_h = 1, .activation = HPML_ACT_RELU };
        hpml_tensor     *h = hpml_conv2d(in, 4, &conv);
        hpml_tensor     *out = hpml_linear(hpml_flatten(h), 2, NULL);
        hpml_trainer    *t = hpml_trainer_create(ctx, &(hpml_trainer_desc){ .input = in, .output = out, .lr = 0.1f });
        hpml_step_info   info;
        long             ran = emulated() ? cuda_on_cpu_count("cudnn 3") : 0;
        hpml_trainer_attach(t, &(hpml_hooks){ .run = one_by_one });
        for (int i = 0; i < 4; i++) {
            ENSURE(hpml_trainer_step(t, x, y, 3, &info) == HPML_OK);
            loss[gpu][i] = info.loss;
        }
        if (emulated() && gpu && !library_is(LIBRARY_REFUSE))
            ENSURE(cuda_on_cpu_count("cudnn 3") > ran); /* the first one is aligned */
        hpml_ctx_free(ctx);
        products = AS_EVER;
    }
    for (int i = 0; i < 4; i++) ENSURE_NEAR(loss[1][i], loss[0][i], 1e-4);
}

/* With batches of several sizes in turn the library is asked once about each product. */
TEST(shapes_in_turn_are_planned_once)
{
    const float    x[8] = { 0, 0, 0, 1, 1, 0, 1, 1 };
    const int32_t  y[4] = { 0, 1, 1, 0 };
    hpml_cuda_desc cuda = { .no_record = true };
    long           asked = 0;
    if (!cuda_on_cpu_fault) SKIP("needs the emulation");
    hpml_ctx     *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .backend = hpml_backend_cuda(), .backend_desc = &cuda });
    hpml_tensor  *in  = hpml_input_2d(ctx, 4, 2);
    hpml_tensor  *out = hpml_linear(hpml_linear(in, 8, &(hpml_linear_desc){ .activation = HPML_ACT_GELU }), 2, NULL);
    hpml_trainer *t   = hpml_trainer_create(ctx, &(hpml_trainer_desc){ .input = in, .output = out });
    for (int i = 0; i < 12; i++) {
        ENSURE(hpml_trainer_step(t, x, y, 4 - i % 3, NULL) == HPML_OK);
        if (i == 2) asked = cuda_on_cpu_count("cublas 0");
    }
    ENSURE(asked > 0 && cuda_on_cpu_count("cublas 0") == asked);
    hpml_ctx_free(ctx);
}

/* After the host writes a weight, products use the new value, in recorded passes too. */
TEST(half_copies_follow_their_weights)
{
    float zero[24] = { 0 }, y[8];
    if (no_device()) SKIP("no CUDA device");
    hpml_ctx    *ctx = context(true, HPML_CUDA_BF16);
    hpml_tensor *x = hpml_input_2d(ctx, 2, 6), *out = hpml_linear(x, 4, NULL);
    hpml_graph  *g = hpml_graph_create(ctx, &(hpml_graph_desc){ .outputs = &out, .output_count = 1 });
    ENSURE(hpml_graph_alloc(g) == HPML_OK);
    fill(x, 1);
    for (int pass = 0; pass < 4; pass++) {
        bool all_zero = true;
        if (pass == 3) ENSURE(hpml_tensor_set(hpml_param_at(ctx, 0), zero, 24) == HPML_OK);
        ENSURE(hpml_graph_forward(g, false, 0) == HPML_OK);
        hpml_ctx_backend(ctx)->read(hpml_ctx_device(ctx), y, out->raw, 8 * hpml_dtype_size(out->dtype));
        for (int i = 0; i < 4; i++) all_zero = all_zero && y[i] == 0; /* 8 halves */
        ENSURE(all_zero == (pass == 3));
    }
    hpml_ctx_free(ctx);
}

/* The same for a filter, whose half copy has another order: after updates of the whole filter and of a part that is not
   aligned, and after the host writes it. */
TEST(half_copies_follow_their_filters)
{
    enum { N = 5 * 6 * 9, FIRST = 7, PART = 3 * 6 * 9 + 3 };
    static float w[N], g[N], y[2][2 * 6 * 5 * 5];
    if (no_device()) SKIP("no CUDA device");
    for (int i = 0; i < N; i++) g[i] = cosf((float)i);
    products = LIBRARIES;
    hpml_ctx    *ctx[2] = { context(false, HPML_CUDA_F16), context(true, HPML_CUDA_F16) };
    hpml_graph  *graph[2];
    hpml_tensor *out[2], *step[2];
    for (int k = 0; k < 2; k++) {
        hpml_tensor *x = hpml_input_4d(ctx[k], 2, 6, 5, 5);
        out[k]   = hpml_conv2d(x, 5, &(hpml_conv2d_desc){ .kernel_h = 3, .padding_h = 1, .no_bias = true });
        step[k]  = hpml_tensor_create_1d(ctx[k], N);
        graph[k] = hpml_graph_create(ctx[k], &(hpml_graph_desc){ .outputs = &out[k], .output_count = 1 });
        ENSURE(hpml_graph_alloc(graph[k]) == HPML_OK && hpml_tensor_set(step[k], g, N) == HPML_OK);
        fill(x, 1);
    }
    for (int pass = 0; pass < 6; pass++)
        for (int k = 0; k < 2; k++) {
            hpml_tensor *p = hpml_param_at(ctx[k], 0);
            hpml_update  u = { .opt = HPML_OPT_SGD, .n = N, .w = p->data, .g = step[k]->data, .step = 1, .lr = 0.5f,
                               .grad_scale = 1, .clip = INFINITY };
            if (pass == 3) u.n = PART, u.w += FIRST;
            for (int i = 0; i < N; i++) w[i] = sinf((float)i);
            if (pass == 2 || pass == 3)
                ENSURE(hpml_ctx_backend(ctx[k])->update(hpml_ctx_device(ctx[k]), ctx[k], &u, 1) == HPML_OK);
            else if (pass == 5) ENSURE(hpml_tensor_set(p, w, N) == HPML_OK);
            ENSURE(hpml_graph_forward(graph[k], false, 0) == HPML_OK);
            ENSURE(hpml_tensor_get(out[k], y[k], 2 * 5 * 5 * 5) == HPML_OK);
            for (int i = 0; i < 2 * 5 * 5 * 5 && k; i++) ENSURE_NEAR(y[1][i], y[0][i], 2e-2 * (1 + fabsf(y[0][i])));
        }
    products = AS_EVER;
    hpml_ctx_free(ctx[0]);
    hpml_ctx_free(ctx[1]);
}

typedef struct loss_case {
    int     kind;     /* 0: cross-entropy, 1: bce, 2: mse, 3: huber with a computed target, 4: l1 */
    int64_t rows, classes;
    float   smoothing;
    bool    add;      /* another term after the loss: the loss adds to the gradient */
    int     bad;      /* a label for row 2; 0: a good one */
    bool    masked;   /* some logits are -infinity */
} loss_case;

/* The loss of 3 x and its gradients. */
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
    if (c->kind == 0) loss = hpml_cross_entropy(y, l, &ce);
    else if (c->kind == 1) loss = hpml_bce_with_logits(y, hpml_sigmoid(t));
    else if (c->kind == 2) loss = hpml_mse(y, t);
    else loss = hpml_huber(y, c->kind == 3 ? hpml_scale(x, -1, 1) : t, c->kind == 3 ? 2.0f : 0);
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
        if (l->raw) hpml_tensor_set_raw(l, labels, (size_t)c->rows * sizeof *labels);
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

/* The CPU and the GPU give the same error for a label out of range. */
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

/* Sums of squares of any type from any element on; hits with ties and NaNs as the trainer counts them on the CPU. */
TEST(counts_and_squares)
{
    if (no_device()) SKIP("no CUDA device");
    hpml_ctx           *ctx = context(true, HPML_CUDA_F32);
    const hpml_backend *b = hpml_ctx_backend(ctx);
    enum { ROWS = 40, WIDEST = 600, N = ROWS * WIDEST };
    static float        v[N];
    static int32_t      labels[ROWS];
    void               *x = b->alloc(hpml_ctx_device(ctx), sizeof v);
    int32_t            *l = (int32_t *)b->alloc(hpml_ctx_device(ctx), sizeof labels);
    int64_t            *there = (int64_t *)b->alloc(hpml_ctx_device(ctx), 2 * sizeof(int64_t));
    for (int i = 0; i < N; i++) v[i] = (float)((i * 37 + i / 11) % 9 - 4);
    for (int i = 0; i < ROWS; i += 7) v[i * 10 + i % 10] = NAN;
    for (int i = 0; i < ROWS; i++) labels[i] = i % 9 == 8 ? -100 : i * 3 % 10;
    b->write(hpml_ctx_device(ctx), x, v, sizeof v);
    b->write(hpml_ctx_device(ctx), l, labels, sizeof labels);
    for (int classes = 10; classes <= WIDEST; classes += WIDEST - 10) {
        int64_t counts[2], want[2] = { 0, 0 };
        ENSURE(b->correct(hpml_ctx_device(ctx), ctx, HPML_DTYPE_F32, x, l, ROWS, classes, there) == HPML_OK);
        b->read(hpml_ctx_device(ctx), counts, there, sizeof counts);
        for (int r = 0; r < ROWS; r++) {
            int best = 0;
            for (int c = 1; c < classes; c++)
                if (v[r * classes + c] > v[r * classes + best]) best = c;
            want[0] += best == labels[r], want[1] += labels[r] >= 0;
        }
        ENSURE(counts[0] == want[0] && counts[1] == want[1] && want[0] > 0);
    }
    for (int from = 400; from < 403; from++) { /* after the NaNs */
        double sum = 0, got = 0;
        for (int i = from; i < N - 5; i++) sum += (double)v[i] * (double)v[i];
        ENSURE(b->sumsq(hpml_ctx_device(ctx), ctx, HPML_DTYPE_F32, (float *)x + from, N - 5 - from,
                        (double *)(void *)there) == HPML_OK);
        b->read(hpml_ctx_device(ctx), &got, there, sizeof got);
        ENSURE(fabs(got - sum) < 1e-6 * sum);
    }
    b->free(hpml_ctx_device(ctx), x, sizeof v);
    b->free(hpml_ctx_device(ctx), l, sizeof labels);
    b->free(hpml_ctx_device(ctx), there, 2 * sizeof(int64_t));
    hpml_ctx_free(ctx);
}

/* Hits of whole steps, which the loss counts: with ignored labels, short batches, two graphs in turn. */
TEST(the_loss_counts_hits)
{
    if (no_device()) SKIP("no CUDA device");
    for (int ignore = 0; ignore < 2; ignore++) {
        float accuracy[2][8];
        for (int gpu = 0; gpu < 2; gpu++) {
            hpml_ctx      *ctx = context(gpu == 1, HPML_CUDA_F32);
            hpml_trainer  *t[2];
            hpml_step_info info = { 0 };
            float          x[60];
            int32_t        y[12];
            for (int i = 0; i < 60; i++) x[i] = (float)((i * 13 + i / 7) % 5 - 2);
            for (int i = 0; i < 12; i++) y[i] = i == 5 && ignore ? HPML_IGNORE : i % 3;
            hpml_tensor *in[2] = { hpml_input_2d(ctx, 12, 5), NULL }, *out[2] = { hpml_linear(in[0], 3, NULL), NULL };
            in[1] = hpml_input_2d(ctx, 12, 5), out[1] = hpml_linear(in[1], 3, NULL);
            for (int k = 0; k < 2; k++)
                t[k] = hpml_trainer_create(ctx, &(hpml_trainer_desc){ .input = in[k], .output = out[k], .lr = 0.1f });
            for (int i = 0; i < 8; i++) {
                ENSURE(hpml_trainer_step(t[i / 2 % 2], x, y, 12 - i % 3, &info) == HPML_OK);
                accuracy[gpu][i] = info.accuracy;
            }
            long launches[6] = { 0 }; /* the last two: a step that asks for its hits, and one that does not */
            for (int i = 0; i < 5 && gpu && emulated(); i++) {
                launches[i + 1] = -cuda_on_cpu_count("launches");
                ENSURE(hpml_trainer_step(t[0], x, y, 12, i == 4 ? NULL : &info) == HPML_OK);
                launches[i + 1] += cuda_on_cpu_count("launches");
            }
            ENSURE(launches[4] == launches[5]);
            hpml_ctx_free(ctx);
        }
        for (int i = 0; i < 8; i++) ENSURE(accuracy[0][i] == accuracy[1][i]);
    }
}

/* A small training of 3 steps; returns the status, and the context's error. */
static hpml_status train_briefly(hpml_cuda_precision precision, char *error, float *losses)
{
    const float    x[8] = { 0, 0, 0, 1, 1, 0, 1, 1 };
    const int32_t  y[4] = { 0, 1, 1, 0 };
    hpml_ctx      *ctx = context(true, precision);
    hpml_tensor   *in  = hpml_input_2d(ctx, 4, 2);
    hpml_tensor   *out = hpml_linear(hpml_linear(in, 8, &(hpml_linear_desc){ .activation = HPML_ACT_GELU }), 2, NULL);
    hpml_trainer  *t   = hpml_trainer_create(ctx, &(hpml_trainer_desc){ .input = in, .output = out, .lr = 0.5f });
    hpml_step_info info = { 0 };
    for (int i = 0; i < 3 && hpml_trainer_step(t, x, y, 4, &info) == HPML_OK; i++)
        if (losses) losses[i] = info.loss;
    hpml_status status = hpml_ctx_status(ctx);
    snprintf(error, 512, "%s", hpml_ctx_error(ctx));
    hpml_ctx_free(ctx);
    return status;
}

TEST(unfit_machines_are_named)
{
    char error[512];
    if (!cuda_on_cpu_fault) SKIP("needs the emulation");
    static const struct { const char *fault, *text; hpml_status status; } cases_[] = {
        { "no device", "no usable device", HPML_ERR_CUDA }, { "no driver", "nvidia-smi", HPML_ERR_CUDA },
        { "other architecture", "-arch=native", HPML_ERR_CUDA } };
    EACH(cases_, i) {
        cuda_on_cpu_fault(cases_[i].fault, 0);
        hpml_status status = train_briefly(HPML_CUDA_F32, error, NULL);
        cuda_on_cpu_fault("none", 0);
        ENSURE(status == cases_[i].status && strstr(error, cases_[i].text) && cuda_on_cpu_count("bytes") == 0);
    }
    hpml_cuda_desc bad[2] = { { .device = 7 }, { ._end = 1 } };
    for (int i = 0; i < 2; i++) {
        hpml_ctx *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .backend = hpml_backend_cuda(), .backend_desc = &bad[i] });
        ENSURE(hpml_ctx_status(ctx) == HPML_ERR_ARGUMENT);
        ENSURE(strstr(hpml_ctx_error(ctx), i ? "canary" : "no device 7, only 0 to 0"));
        hpml_ctx_free(ctx);
        ENSURE(train_briefly(HPML_CUDA_F32, error, NULL) == HPML_OK); /* all its memory is freed */
    }
}

/* The k-th allocation fails, the k-th launch fails, for every k: there is an error, and no memory is leaked. */
TEST(every_allocation_and_every_launch_may_fail)
{
    char error[512];
    if (!cuda_on_cpu_fault) SKIP("needs the emulation");
    for (int kind = 0; kind < 2; kind++) {
        long k = 0;
        hpml_status status;
        do {
            cuda_on_cpu_fault(kind ? "launch" : "malloc", ++k);
            status = train_briefly(HPML_CUDA_BF16, error, NULL);
            cuda_on_cpu_fault("none", 0);
            ENSURE(cuda_on_cpu_count("bytes") == 0);
            if (status == HPML_OK) break;
            ENSURE(status == (kind ? HPML_ERR_CUDA : HPML_ERR_MEMORY));
            ENSURE(strstr(error, kind ? "compute-sanitizer" : "emory"));
        } while (k < 500);
        ENSURE(k > 8 && k < 500);
    }
}

/* A step whose loss is not read does not wait; passes are replayed; the losses are the same when the emulation delays
   work as long as allowed, in any order of threads. */
TEST(a_step_does_not_wait)
{
    const float x[8] = { 0, 0, 0, 1, 1, 0, 1, 1 };
    const int32_t y[4] = { 0, 1, 1, 0 };
    float         plain[3], other[3];
    char          error[512];
    if (!cuda_on_cpu_fault) SKIP("needs the emulation");
    hpml_ctx     *ctx = context(true, HPML_CUDA_F32);
    hpml_tensor  *in  = hpml_input_2d(ctx, 4, 2), *h = hpml_dropout(hpml_linear(in, 8, NULL), 0.2f);
    hpml_tensor  *out = hpml_linear(h, 2, NULL);
    hpml_trainer *t   = hpml_trainer_create(ctx, &(hpml_trainer_desc){
        .input = in, .output = out, .no_finite_check = true });
    for (int i = 0; i < 2; i++) ENSURE(hpml_trainer_step(t, x, y, 4, NULL) == HPML_OK);
    long waits = cuda_on_cpu_count("synchronisations"), mallocs = cuda_on_cpu_count("mallocs");
    long graphs = cuda_on_cpu_count("graphs");
    for (int i = 0; i < 5; i++) ENSURE(hpml_trainer_step(t, x, y, 4, NULL) == HPML_OK);
    ENSURE(cuda_on_cpu_count("synchronisations") == waits && cuda_on_cpu_count("mallocs") == mallocs);
    ENSURE(cuda_on_cpu_count("graphs") == graphs + (library_is(LIBRARY_CAPTURE) ? 0 : 10));
    hpml_ctx_free(ctx);
    ENSURE(train_briefly(HPML_CUDA_F32, error, plain) == HPML_OK);
    for (long way = 1; way < 6; way++) {
        cuda_on_cpu_fault("lazy", way % 3);
        cuda_on_cpu_fault("order", way);
        ENSURE(train_briefly(HPML_CUDA_F32, error, other) == HPML_OK && memcmp(plain, other, sizeof plain) == 0);
        cuda_on_cpu_fault("none", 0);
    }
}

/* The number before `what` in hpml_cuda_text; -1: not found. */
/* A trace or a profile costs one more wait for the device in a step, and has every op of every step: spans in order,
   whose times add up to the profile's. */
TEST(timing_ops_waits_once_a_step)
{
    enum { LOOKED = 3 };
    const float    x[8] = { 0, 0, 0, 1, 1, 0, 1, 1 };
    const int32_t  y[4] = { 0, 1, 1, 0 };
    char           path[] = "/tmp/hpml_trace_XXXXXX", line[512], name[64];
    hpml_step_info info;
    double         at, dur, last = 0, sum = 0, table = 0;
    int            fd = mkstemp(path), lane, spans[4] = { 0 };
    long long      fewest = 1000;
    if (no_device()) SKIP("no CUDA device");
    hpml_ctx     *ctx = context(true, HPML_CUDA_F32);
    hpml_tensor  *in  = hpml_input_2d(ctx, 4, 2), *out = hpml_linear(hpml_tanh(hpml_linear(in, 8, NULL)), 2, NULL);
    hpml_trainer *t   = hpml_trainer_create(ctx, &(hpml_trainer_desc){ .input = in, .output = out });
    ENSURE(fd >= 0 && hpml_trainer_step(t, x, y, 4, &info) == HPML_OK);
    close(fd);
    long long plain = text_number(ctx, " waits");
    ENSURE(hpml_trainer_step(t, x, y, 4, &info) == HPML_OK);
    plain = text_number(ctx, " waits") - plain;
    ENSURE(hpml_trace_start(ctx, NULL) == HPML_OK);
    hpml_profile_enable(hpml_trainer_graph(t), true);
    if (emulated()) cuda_on_cpu_fault("lazy", 1);
    for (int i = 0; i < LOOKED; i++) {
        long long waits = text_number(ctx, " waits");
        ENSURE(hpml_trainer_step(t, x, y, 4, &info) == HPML_OK);
        waits  = text_number(ctx, " waits") - waits - plain;
        fewest = waits < fewest ? waits : fewest; /* an interrupted host compares the clocks once more */
    }
    ENSURE(plain == 1 && fewest >= 0 && fewest <= 1);
    ENSURE(hpml_trace_save(ctx, path) == HPML_OK);
    if (emulated()) cuda_on_cpu_fault("none", 0);
    hpml_profile_row rows[8];
    int ops = hpml_profile(hpml_trainer_graph(t), rows, 8);
    FILE *f = fopen(path, "r");
    while (fgets(line, sizeof line, f)) {
        if (sscanf(line, "{\"name\":\"%63[^\"]\",\"ph\":\"X\",\"pid\":0,\"tid\":%d,\"ts\":%lf,\"dur\":%lf",
                   name, &lane, &at, &dur) != 4 || lane != HPML_LANE_GPU)
            continue;
        ENSURE(dur >= 0 && (at >= last - 0.5 || spans[lane] % (2 * ops) == 0)); /* microseconds, by one clock a step */
        spans[lane]++, last = at + dur, sum += dur;
    }
    fclose(f);
    remove(path);
    for (int i = 0; i < ops; i++) {
        ENSURE(rows[i].calls == LOOKED && rows[i].forward_s > 0);
        table += 1e6 * (rows[i].forward_s + rows[i].backward_s);
    }
    ENSURE(spans[HPML_LANE_GPU] == 2 * ops * LOOKED);
    ENSURE_NEAR(sum, table, 1e-3 * table + 1);
    hpml_profile_enable(hpml_trainer_graph(t), false);
    hpml_ctx_free(ctx);
}

/* Passes whose gradients a hook needs are replayed in pieces: the same hooks in the same order and the same bits as op
   by op, with so many sizes of short batches in between that recorded passes leave the cache. In the first steps a hook
   refuses the first piece, and the step is skipped: later this piece is replayed before a piece that is not, which
   needs the op notes of the replayed one. */
enum { SEEN = 64, REFUSES = SEEN - 1 };
static hpml_status note_final(void *user, hpml_trainer *t, const hpml_moment *at)
{
    (void)t;
    int *seen = (int *)user;
    if (seen[0] < REFUSES - 1) seen[++seen[0]] = at->param;
    return seen[REFUSES] ? HPML_ERR_STATE : HPML_OK;
}

TEST(hooks_of_gradients_cut_passes_in_pieces)
{
    enum { LAYERS = 8, ROWS = 32, STEPS = 100, REFUSED = 2 };
    float    x[ROWS * 4];
    int32_t  y[ROWS];
    uint64_t hash[2];
    int     seen[2][SEEN];
    long    kernels = 0, graphs = 0;
    unsigned seed;
    if (no_device()) SKIP("no CUDA device");
    for (int i = 0; i < ROWS * 4; i++) x[i] = (float)(i * 37 % 11 - 5) / 5;
    for (int i = 0; i < ROWS; i++) y[i] = i % 3;
    for (int replayed = 0; replayed < 2; replayed++) {
        hpml_cuda_desc cuda = { .precision = HPML_CUDA_BF16, .workspace = 1 << 20, .no_record = !replayed,
                                .own_kernels = emulated() };
        hpml_ctx_desc d = { .seed = 3, .threads = 1, .backend = hpml_backend_cuda(), .backend_desc = &cuda };
        hpml_ctx    *ctx = hpml_ctx_create(&d);
        hpml_tensor *in = hpml_input_2d(ctx, ROWS, 4), *h = in;
        seed = 1;
        for (int i = 0; i < LAYERS; i++) h = dense(h, 8, i % 2 ? HPML_ACT_GELU : HPML_ACT_RELU);
        hpml_trainer *t = hpml_trainer_create(ctx, &(hpml_trainer_desc){
            .input = in, .output = hpml_linear(h, 3, NULL), .lr = 0.05f });
        ENSURE(hpml_trainer_attach(t, &(hpml_hooks){ .user = seen[replayed], .grad = note_final }) == HPML_OK);
        for (int i = 0; i < STEPS; i++) {
            bool counted = replayed && cuda_on_cpu_fault && i == 5;
            int  rows = i < 6 ? ROWS : 1 + (int)((seed = seed * 1103515245 + 12345) >> 16) % ROWS;
            seen[replayed][0] = 0, seen[replayed][REFUSES] = i < REFUSED;
            if (counted) kernels = -cuda_on_cpu_count("launches"), graphs = -cuda_on_cpu_count("graphs");
            ENSURE(hpml_trainer_step(t, x, y, rows, NULL) == (i < REFUSED ? HPML_ERR_STATE : HPML_OK));
            if (counted) kernels += cuda_on_cpu_count("launches"), graphs += cuda_on_cpu_count("graphs");
        }
        hash[replayed] = hpml_param_hash(ctx);
        hpml_ctx_free(ctx);
    }
    ENSURE(seen[0][0] == 2 * LAYERS + 2 && memcmp(seen[0], seen[1], sizeof(int) * (size_t)(seen[0][0] + 1)) == 0);
    ENSURE(hash[0] == hash[1]);
    if (emulated() && !library_is(LIBRARY_CAPTURE))
        ENSURE(graphs == 3 && kernels == 1); /* forward, two pieces of ten ops; the update */
}

/* The pass of a micro-batch that is not the last of an update has no hooks and is not cut: it must not be confused with
   the first piece of a pass that is cut, nor must the pass of a trainer that has no hooks yet. */
TEST(passes_that_no_hook_waits_for_are_not_cut)
{
    enum { LAYERS = 8, ROWS = 4, STEPS = 18, HOOKED = 9 };
    float    x[ROWS * 4];
    int32_t  y[ROWS];
    uint64_t hash[2];
    int      seen[2][SEEN] = { { 0 } };
    if (no_device()) SKIP("no CUDA device");
    for (int i = 0; i < ROWS * 4; i++) x[i] = (float)(i * 37 % 11 - 5) / 5;
    for (int i = 0; i < ROWS; i++) y[i] = i % 3;
    for (int batches = 1; batches < 4; batches += 2) {
        for (int replayed = 0; replayed < 2; replayed++) {
            hpml_cuda_desc cuda = { .workspace = 1 << 20, .no_record = !replayed, .own_kernels = emulated() };
            hpml_ctx_desc  d = { .seed = 3, .threads = 1, .backend = hpml_backend_cuda(), .backend_desc = &cuda };
            hpml_ctx      *ctx = hpml_ctx_create(&d);
            hpml_tensor   *in = hpml_input_2d(ctx, ROWS, 4), *h = in;
            for (int i = 0; i < LAYERS; i++) h = dense(h, 8, i % 2 ? HPML_ACT_GELU : HPML_ACT_RELU);
            hpml_trainer *t = hpml_trainer_create(ctx, &(hpml_trainer_desc){
                .input = in, .output = hpml_linear(h, 3, NULL), .lr = 0.05f, .accumulate = batches });
            for (int i = 0; i < STEPS; i++) {
                seen[replayed][0] = 0;
                if (i == HOOKED) hpml_trainer_attach(t, &(hpml_hooks){ .user = seen[replayed], .grad = note_final });
                ENSURE(hpml_trainer_step(t, x, y, ROWS, NULL) == HPML_OK);
            }
            hash[replayed] = hpml_param_hash(ctx);
            hpml_ctx_free(ctx);
        }
        ENSURE(hash[0] == hash[1] && seen[0][0] > 0 && memcmp(seen[0], seen[1], sizeof seen[0]) == 0);
    }
}

/* The host waits once in a step for all values that it reads, and not at all if it reads none: clipping runs on the
   device, by the same norm as on the CPU. */
TEST(a_step_waits_once)
{
    const float   x[8] = { 0, 0, 0, 1, 1, 0, 1, 1 };
    const int32_t y[4] = { 0, 1, 1, 0 };
    const struct { bool info, unchecked; float clip; hpml_opt opt; hpml_cuda_precision precision; int waits; } cases[] =
        { { true, false, 0, HPML_OPT_SGD, HPML_CUDA_F32, 1 }, { false, false, 0, HPML_OPT_SGD, HPML_CUDA_F32, 1 },
          { true, false, 0.1f, HPML_OPT_SGD, HPML_CUDA_F32, 1 }, { true, true, 0.1f, HPML_OPT_ADAM, HPML_CUDA_F32, 1 },
          { false, true, 0.1f, HPML_OPT_SGD, HPML_CUDA_F32, 0 }, { false, true, 0.1f, HPML_OPT_LARS, HPML_CUDA_F32, 0 },
          { false, true, 0, HPML_OPT_LAMB, HPML_CUDA_F32, 0 }, { false, true, 0, HPML_OPT_SGD, HPML_CUDA_BF16, 0 },
          { true, false, 1, HPML_OPT_SGD, HPML_CUDA_F16, 1 } };
    if (no_device()) SKIP("no CUDA device");
    for (int k = 0; k < (int)(sizeof cases / sizeof cases[0]); k++) {
        hpml_step_info info[2];
        float          w[2][16];
        for (int gpu = 0; gpu < 2; gpu++) {
            hpml_ctx     *ctx = context(gpu, cases[k].precision);
            hpml_tensor  *in  = hpml_input_2d(ctx, 4, 2), *h = hpml_linear(in, 8, NULL), *out = hpml_linear(h, 2, NULL);
            hpml_trainer *t   = hpml_trainer_create(ctx, &(hpml_trainer_desc){
                .input = in, .output = out, .clip_norm = cases[k].clip, .optimizer = cases[k].opt,
                .no_finite_check = cases[k].unchecked, .lr = 0.1f, .weight_decay = 0.01f });
            for (int i = 0; i < 6; i++) {
                long waits = gpu && cuda_on_cpu_fault ? cuda_on_cpu_count("synchronisations") : 0;
                ENSURE(hpml_trainer_step(t, x, y, 4, cases[k].info ? &info[gpu] : NULL) == HPML_OK);
                if (gpu && cuda_on_cpu_fault && i > 1)
                    ENSURE(cuda_on_cpu_count("synchronisations") - waits == cases[k].waits);
            }
            ENSURE(hpml_tensor_get(h->node->src[1], w[gpu], 16) == HPML_OK);
            hpml_ctx_free(ctx);
        }
        float near = cases[k].precision == HPML_CUDA_F32 ? 1e-5f : 0.02f;
        for (int i = 0; i < 16; i++) ENSURE_NEAR(w[1][i], w[0][i], near);
        if (!cases[k].info) continue;
        ENSURE_NEAR(info[1].loss, info[0].loss, near);
        ENSURE(info[1].accuracy >= 0 && (info[1].accuracy == info[0].accuracy || near > 1e-4f));
        if (cases[k].clip > 0) ENSURE_NEAR(info[1].grad_norm, info[0].grad_norm, near);
        else ENSURE(info[1].grad_norm == -1);
    }
}

/* The error for a non-finite value names the same object as on the CPU: the data, a parameter, the result of a layer.
   */
TEST(a_nan_is_named)
{
    static const char *const where[] = { "in the data of", "in parameter \"linear1.weight\"",
                                         "in the result of \"activation0\"" };
    const int32_t y[4] = { 0, 1, 1, 0 };
    char          said[2][256];
    if (no_device()) SKIP("no CUDA device");
    for (int i = 0; i < 3; i++) {
        for (int gpu = 0; gpu < 2; gpu++) {
            float        x[8] = { 0, 0, 0, i == 0 ? NAN : 1, 1, 0, 1, 1 }, w[16] = { 1, 2, INFINITY };
            hpml_ctx    *ctx = context(gpu == 1, i == 1 ? HPML_CUDA_BF16 : HPML_CUDA_F32);
            hpml_tensor *in  = hpml_input_2d(ctx, 4, 2), *h = hpml_linear(in, 8, NULL);
            if (i == 2) h = hpml_activation(hpml_scale(h, 0, -1), HPML_ACT_LOG, 0);
            hpml_trainer *t = hpml_trainer_create(ctx, &(hpml_trainer_desc){
                .input = in, .output = hpml_linear(h, 2, NULL) });
            if (i == 1) hpml_tensor_set(hpml_param_find(ctx, "linear1.weight"), w, 16);
            ENSURE(hpml_trainer_step(t, x, y, 4, NULL) == HPML_ERR_NONFINITE);
            const char *text = strstr(hpml_ctx_error(ctx), "the first NaN or infinity is ");
            snprintf(said[gpu], sizeof said[0], "%s", text ? text : "");
            hpml_ctx_free(ctx);
        }
        if (!strstr(said[1], where[i]) || strcmp(said[0], said[1]) != 0)
            printf("    %s; the CPU: %s\n", said[1], said[0]), test_failed = 1;
    }
}

/* Trains a net whose hidden layer's relu may turn a NaN into 0: `steps` steps of four samples, with a NaN or an
   infinity in one sample of step `bad`. Returns the status of the last call, and the context's error. */
typedef struct relu_case {
    hpml_cuda_precision precision;
    hpml_opt            opt;
    float               clip, value;
    int                 accumulate, recorded, conv;
} relu_case;

static hpml_status train_behind_relu(const relu_case *c, bool gpu, int steps, int bad, char error[512], int *broken)
{
    const int32_t    y[4] = { 0, 1, 1, 0 };
    hpml_cuda_desc   cuda = { .precision = c->precision, .no_record = !c->recorded };
    hpml_ctx        *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .seed = 4, .backend = gpu ? hpml_backend_cuda() : NULL,
                                                             .backend_desc = gpu ? &cuda : NULL });
    hpml_linear_desc relu = { .activation = HPML_ACT_RELU };
    hpml_conv2d_desc conv = { .kernel_h = 1, .activation = HPML_ACT_RELU };
    int64_t          shape[4] = { 4, 8, 1, 1 };
    hpml_tensor     *in = hpml_input(ctx, HPML_DTYPE_F32, c->conv ? 4 : 2, shape);
    hpml_tensor     *h = c->conv ? hpml_flatten(hpml_conv2d(in, 16, &conv)) : hpml_linear(in, 16, &relu);
    hpml_trainer    *t = hpml_trainer_create(ctx, &(hpml_trainer_desc){
        .input = in, .output = hpml_linear(h, 2, NULL), .optimizer = c->opt, .clip_norm = c->clip, .lr = 0.05f,
        .accumulate = c->accumulate, .loss_scale = 1, .momentum = c->opt == HPML_OPT_SGD ? 0.9f : 0 });
    hpml_status      status = HPML_OK;
    float            w[128];
    for (int s = 1; s <= steps && status == HPML_OK; s++)
        for (int b = 0; b < (c->accumulate ? c->accumulate : 1) && status == HPML_OK; b++) {
            float x[32];
            for (int i = 0; i < 32; i++) x[i] = sinf((float)(i * (s + 3 * b)));
            if (s == bad && b == 0) x[11] = c->value;
            status = hpml_trainer_step(t, x, y, 4, NULL);
        }
    if (status == HPML_OK && gpu) status = hpml_ctx_backend(ctx)->sync(hpml_ctx_device(ctx));
    snprintf(error, 512, "%s", hpml_ctx_error(ctx));
    hpml_ctx_clear_error(ctx);
    *broken = 0;
    for (int p = 0; p < hpml_param_count(ctx); p++) {
        int64_t n = hpml_tensor_count(hpml_param_at(ctx, p));
        hpml_tensor_get(hpml_param_at(ctx, p), w, n);
        for (int64_t i = 0; i < n; i++) *broken += !isfinite(w[i]);
    }
    hpml_ctx_free(ctx);
    return status;
}

/* cuBLASLt's relu turns a NaN into 0, so the loss is finite: the update finds the NaN, names parameter and step, and
   keeps it out of the parameters, with any other options of the step. The CPU's relu keeps the NaN. */
TEST(a_nan_that_relu_hides_is_named_by_the_update)
{
    static const relu_case relus[] = {
        { HPML_CUDA_F32, HPML_OPT_SGD, 0, NAN, 0, 1, 0 },    { HPML_CUDA_F32, HPML_OPT_ADAMW, 0, NAN, 0, 0, 0 },
        { HPML_CUDA_BF16, HPML_OPT_ADAM, 0, NAN, 0, 1, 0 },  { HPML_CUDA_TF32, HPML_OPT_RMSPROP, 0, NAN, 3, 1, 0 },
        { HPML_CUDA_F16, HPML_OPT_SGD, 0, NAN, 2, 1, 0 },    { HPML_CUDA_F32, HPML_OPT_LARS, 0, NAN, 0, 1, 0 },
        { HPML_CUDA_F32, HPML_OPT_LAMB, 0, NAN, 0, 1, 0 },   { HPML_CUDA_F32, HPML_OPT_SGD, 0.5f, NAN, 0, 1, 0 },
        { HPML_CUDA_F32, HPML_OPT_ADAGRAD, 0, NAN, 0, 1, 1 }, { HPML_CUDA_BF16, HPML_OPT_SGD, 0, NAN, 0, 1, 1 },
        { HPML_CUDA_F32, HPML_OPT_SGD, 0, -INFINITY, 0, 1, 0 } };
    if (no_device()) SKIP("no CUDA device");
    EACH(relus, i) for (int gpu = 0; gpu < 2; gpu++) for (int steps = 5; steps <= 8; steps += 3) {
        char error[512];
        int  broken;
        hpml_status status = train_behind_relu(&relus[i], gpu == 1, steps, 5, error, &broken);
        if (status != HPML_ERR_NONFINITE || !strstr(error, "step 5: ") || !strstr(error, "first NaN or infinity is in"))
            printf("    case %d on the %s, %d steps: %d, %s\n", (int)i, gpu ? "GPU" : "CPU", steps, (int)status, error),
                test_failed = 1;
        if (broken)
            printf("    case %d on the %s: %d numbers of the parameters\n", (int)i, gpu ? "GPU" : "CPU", broken),
                test_failed = 1;
        bool killed = gpu && library_is(LIBRARY_RELU) && !library_is(LIBRARY_REFUSE) && isnan(relus[i].value);
        if (killed && relus[i].clip == 0) /* with clip_norm the gradients' norm finds it before the update */
            ENSURE(strstr(error, relus[i].conv ? "the gradient of \"conv0." : "the gradient of \"linear0."));
        ENSURE(train_behind_relu(&relus[i], gpu == 1, steps, 0, error, &broken) == HPML_OK && broken == 0);
    }
}

/* A non-finite value in the last step is an error of hpml_trainer_fit itself. */
TEST(fit_reports_a_nan_of_its_last_step)
{
    static float  x[12 * 8];
    const int32_t y[12] = { 0, 1, 1, 0, 0, 1, 1, 0, 0, 1, 1, 0 };
    const int64_t eight = 8;
    if (no_device()) SKIP("no CUDA device");
    for (int i = 0; i < 96; i++) x[i] = sinf((float)i);
    x[95] = NAN;
    for (int gpu = 0; gpu < 2; gpu++) {
        products = LIBRARIES;
        hpml_ctx         *ctx = context(gpu == 1, HPML_CUDA_F32);
        hpml_linear_desc  relu = { .activation = HPML_ACT_RELU };
        hpml_tensor      *in = hpml_input_2d(ctx, 4, 8), *out = hpml_linear(hpml_linear(in, 16, &relu), 2, NULL);
        hpml_trainer     *t = hpml_trainer_create(ctx, &(hpml_trainer_desc){ .input = in, .output = out });
        hpml_dataset     *data = hpml_dataset_create(ctx, 12, HPML_DTYPE_F32, 1, &eight, x, HPML_DTYPE_I32, 1, y);
        hpml_loader_desc  ordered = { .in_order = true };
        products = AS_EVER;
        ENSURE(hpml_trainer_fit(t, data, &(hpml_fit_desc){ .loader = &ordered }) == HPML_ERR_NONFINITE);
        ENSURE(strstr(hpml_ctx_error(ctx), "step 3: "));
        hpml_ctx_free(ctx);
    }
}

/* A parameter that the step would make infinite is named too, and keeps its value. */
TEST(a_step_that_overflows_is_named)
{
    const float   x[8] = { 1, 2, 3, 4, 5, 6, 7, 8 };
    const int32_t y[4] = { 0, 1, 1, 0 };
    if (no_device()) SKIP("no CUDA device");
    hpml_ctx     *ctx = context(true, HPML_CUDA_F32);
    hpml_tensor  *in = hpml_input_2d(ctx, 4, 2), *out = hpml_linear(in, 2, NULL);
    hpml_trainer *t = hpml_trainer_create(ctx, &(hpml_trainer_desc){ .input = in, .output = out, .lr = 1e29f,
                                                                     .weight_decay = 1e10f });
    float         w[4];
    ENSURE(hpml_trainer_step(t, x, y, 4, NULL) == HPML_OK);
    ENSURE(hpml_tensor_get(hpml_param_at(ctx, 0), w, 4) == HPML_ERR_NONFINITE);
    ENSURE(strstr(hpml_ctx_error(ctx), "step 1: the first NaN or infinity is in the step of parameter \"linear0."));
    hpml_ctx_clear_error(ctx);
    ENSURE(hpml_tensor_get(hpml_param_at(ctx, 0), w, 4) == HPML_OK);
    for (int i = 0; i < 4; i++) ENSURE(fabsf(w[i]) < 10);
    hpml_ctx_free(ctx);
}

/* Recording fails at each of its stages: from then on the pass runs op by op, with the same bits. */
TEST(a_pass_that_cannot_be_recorded_runs_op_by_op)
{
    float plain[3];
    char  error[512];
    if (!cuda_on_cpu_fault) SKIP("needs the emulation");
    for (int own = 0; own < 2; own++) {
        products = own ? OWN : LIBRARIES;
        ENSURE(train_briefly(HPML_CUDA_BF16, error, plain) == HPML_OK);
        for (int way = 1; way <= 16; way *= 2) {
            float other[3];
            cuda_on_cpu_fault("capture", way);
            long graphs = cuda_on_cpu_count("graphs");
            ENSURE(train_briefly(HPML_CUDA_BF16, error, other) == HPML_OK && memcmp(plain, other, sizeof plain) == 0);
            ENSURE(cuda_on_cpu_count("graphs") == graphs);
            cuda_on_cpu_fault("none", 0);
            ENSURE(cuda_on_cpu_count("bytes") == 0);
        }
    }
    products = AS_EVER;
}

/* Libraries compute aligned products and convolutions; hpml_cuda_text counts those of the header's own kernels. */
static void two_layers(hpml_cuda_precision precision, bool record, char text[1024])
{
    float          *x = numbers(1, 16 * 8 * 8 * 8, 0);
    int32_t         y[16] = { 0, 1, 2, 3, 4, 5, 6, 7 };
    hpml_cuda_desc  cuda = { .precision = precision, .no_record = !record };
    hpml_ctx       *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .seed = 4, .backend = hpml_backend_cuda(),
                                                            .backend_desc = &cuda });
    hpml_conv2d_desc conv = { .kernel_h = 3, .padding_h = 1, .activation = HPML_ACT_RELU };
    hpml_linear_desc gelu = { .activation = HPML_ACT_GELU };
    hpml_tensor     *in = hpml_input_4d(ctx, 16, 8, 8, 8), *h = hpml_conv2d(in, 16, &conv);
    hpml_tensor     *out = hpml_linear(hpml_linear(hpml_flatten(hpml_conv2d(h, 8, &conv)), 64, &gelu), 8, NULL);
    hpml_trainer    *t = hpml_trainer_create(ctx, &(hpml_trainer_desc){ .input = in, .output = out });
    for (int i = 0; i < 4; i++) hpml_trainer_step(t, x, y, 16, NULL);
    text[0] = 0;
    if (hpml_ctx_status(ctx) != HPML_OK) snprintf(text, 1024, "%s", hpml_ctx_error(ctx));
    else hpml_cuda_text(ctx, text, 1024);
    hpml_ctx_free(ctx);
    free(x);
}

TEST(libraries_compute_aligned_products_and_convolutions)
{
    char text[1024];
    if (no_device()) SKIP("no CUDA device");
    for (int p = HPML_CUDA_F32; p <= HPML_CUDA_F16; p++) {
        two_layers((hpml_cuda_precision)p, true, text);
        bool products_own     = strstr(text, "products: 0 by cuBLASLt") != NULL;
        bool convolutions_own = strstr(text, "convolutions: 0 by cuDNN") != NULL;
        if (library_is(LIBRARY_REFUSE)) {
            ENSURE(products_own && strstr(text, "24 by own kernels (24 refused) |"));
            ENSURE(convolutions_own && strstr(text, "20 by own kernels (20 refused)"));
            continue;
        }
        if (!emulated()) printf("    precision %d: %s\n", p, text); /* the figures of a first run on a GPU */
        ENSURE(strstr(text, library_is(LIBRARY_CAPTURE) ? "8 op by op, 0 recorded, 0 replayed, 2 given up"
                                                        : "2 op by op, 2 recorded, 4 replayed, 0 given up"));
        if (products_own || convolutions_own) {
            if (emulated()) test_failed = 1;
            else SKIP("built without cuBLASLt or cuDNN, or they refuse all");
        }
        ENSURE(strstr(text, "products: 24 by cuBLASLt") && strstr(text, "convolutions: 20 by cuDNN"));
        ENSURE((strstr(text, "gelu") != NULL) == (p != HPML_CUDA_F32)); /* F32 is f32: no fast tanh */
    }
}

/* hpml_cuda_text counts refused products, convolutions and epilogues. */
TEST(hpml_cuda_text_counts_refusals)
{
    enum { BGRADB_BIT = 512, ALL = 0xfff, CUDNN_ASK = 2 };
    char text[1024], own[1024], whole[1024];
    if (!cuda_on_cpu_fault) SKIP("needs the emulation");
    cuda_on_cpu_fault("libraries", 0);
    cuda_on_cpu_fault("cublas", BGRADB_BIT);
    two_layers(HPML_CUDA_BF16, false, text);
    ENSURE(strstr(text, "; refused bias sums 8, 0 by own kernels |") && strstr(text, "8 op by op, 0 recorded"));
    ENSURE(strstr(text, "gelu 4") && strstr(text, "; algorithms 21"));
    cuda_on_cpu_fault("cublas", ALL);
    cuda_on_cpu_fault("cudnn", CUDNN_ASK);
    two_layers(HPML_CUDA_BF16, true, own);
    cuda_on_cpu_fault("none", 0);
    ENSURE(strstr(own, "products: 0 by cuBLASLt; refused gelu 4") && strstr(own, ", 24 by own kernels (24 refused) |"));
    ENSURE(strstr(own, "convolutions: 0 by cuDNN, 20 by own kernels (20 refused), 16 copies to NHWC or back |"));
    ENSURE(!strchr(own, '\n'));
    hpml_ctx *ctx = context(true, HPML_CUDA_F32);
    int       n = hpml_cuda_text(ctx, whole, sizeof whole);
    ENSURE(n == (int)strlen(whole) && hpml_cuda_text(ctx, text, 8) == n && strlen(text) == 7);
    ENSURE(hpml_cuda_text(ctx, NULL, 0) == n && hpml_cuda_text(NULL, text, sizeof text) == 0 && !text[0]);
    hpml_ctx_free(ctx);
}

/* A training of two layers and a table whose gradients are added up over micro-batches, with products by cuBLASLt. */
typedef struct tuned {
    hpml_cuda_desc cuda;
    int32_t        accumulate, steps; /* steps 0: 4 */
    const char    *load, *save;
    uint64_t       hash;
    char           text[1024];        /* of hpml_cuda_text, or an error */
} tuned;

static hpml_status tuned_train(tuned *j)
{
    enum { B = 16, IN = 24, HIDDEN = 64, CLASSES = 8 };
    float         *x = numbers(7, B * IN, 0);
    int32_t        y[B];
    for (int i = 0; i < B; i++) y[i] = i % CLASSES;
    hpml_ctx      *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .seed = 4, .threads = 1, .backend = hpml_backend_cuda(),
                                                           .backend_desc = &j->cuda });
    hpml_linear_desc gelu = { .activation = HPML_ACT_GELU };
    hpml_tensor     *in = hpml_input_2d(ctx, B, IN);
    hpml_tensor     *h = hpml_linear(in, HIDDEN, &gelu);
    hpml_tensor     *out = hpml_linear(hpml_linear(h, HIDDEN, &gelu), CLASSES, NULL);
    hpml_trainer    *t = hpml_trainer_create(ctx, &(hpml_trainer_desc){
        .input = in, .output = out, .lr = 0.1f, .accumulate = j->accumulate });
    if (j->load) hpml_checkpoint_load(t, j->load);
    for (int i = 0; i < (j->steps ? j->steps : 4); i++) hpml_trainer_step(t, x, y, B, NULL);
    if (j->save) hpml_checkpoint_save(t, j->save);
    hpml_status status = hpml_ctx_status(ctx);
    j->hash = hpml_param_hash(ctx);
    if (status != HPML_OK) snprintf(j->text, sizeof j->text, "%s", hpml_ctx_error(ctx));
    else hpml_cuda_text(ctx, j->text, sizeof j->text);
    hpml_ctx_free(ctx);
    free(x);
    return status;
}

/* The number that follows `what` in a text of hpml_cuda_text; -1: not found. */
static int number_after(const char *text, const char *what)
{
    const char *at = strstr(text, what);
    return at ? atoi(at + strlen(what)) : -1;
}

/* Four algorithms with these times in microseconds, on a clock that only they and launches of kernels move. */
static void tuned_times(int a, int b, int c, int d, int launch)
{
    const int         us[] = { a, b, c, d };
    const char *const names[] = { "us 0", "us 1", "us 2", "us 3" };
    cuda_on_cpu_fault("libraries", 0);
    cuda_on_cpu_fault("capture", 0);
    cuda_on_cpu_fault("proposals", 4);
    cuda_on_cpu_fault("clock", launch);
    for (int i = 0; i < 4; i++) cuda_on_cpu_fault(names[i], us[i]);
}

/* The fastest algorithm is kept, the first of equal ones, and none that is refused when it runs; parameters get the
   bits of a training that times nothing, gradients that are added up included. Without .tune the first is taken. */
TEST(the_fastest_product_is_kept)
{
    static const struct { int us[4]; const char *best; } clocks[] = {
        { { 50, 30, 10, 40 }, "; algorithms 23; tuned" }, { { 50, 30, -1, 40 }, "; algorithms 22; tuned" },
        { { 20, 30, 20, 20 }, "; algorithms 21; tuned" }, { { 9, 8, 7, 6 }, "; algorithms 24; tuned" } };
    if (!cuda_on_cpu_fault) SKIP("needs the emulation");
    for (int p = HPML_CUDA_F32; p <= HPML_CUDA_F16; p++)
        EACH(clocks, i) {
            const int *us = clocks[i].us;
            tuned     first = { .cuda.precision = (hpml_cuda_precision)p, .accumulate = i % 2 ? 3 : 1 }, best = first;
            best.cuda.tune = true;
            tuned_times(us[0], us[1], us[2], us[3], 1000);
            ENSURE(tuned_train(&first) == HPML_OK && strstr(first.text, "; algorithms 21,"));
            ENSURE(!strstr(first.text, "tuned"));
            ENSURE(tuned_train(&best) == HPML_OK && strstr(best.text, clocks[i].best));
            int products = number_after(best.text, "; tuned ");
            ENSURE(products >= 8 && number_after(best.text, "taken over, ") == (i == 2 ? 0 : products));
            ENSURE(strstr(best.text, " 0 taken over, ") && strstr(best.text, " 0 apart,"));
            ENSURE(first.hash == best.hash);
            cuda_on_cpu_fault("none", 0);
            ENSURE(cuda_on_cpu_count("bytes") == 0 && cuda_on_cpu_count("cublas") == 0);
        }
}

/* Timed by the device's own clock. On a GPU this prints what the clock chose. */
TEST(products_are_timed_on_this_device)
{
    if (no_device()) SKIP("no CUDA device");
    for (int p = HPML_CUDA_F32; p <= HPML_CUDA_F16; p++) {
        tuned j = { .cuda = { .precision = (hpml_cuda_precision)p, .tune = true } };
        ENSURE(tuned_train(&j) == HPML_OK);
        if (!emulated()) printf("    precision %d: %s\n", p, j.text);
        if (strstr(j.text, "products: 0 by cuBLASLt")) continue; /* built without, or refused */
        ENSURE(number_after(j.text, "; tuned ") >= 8);
    }
}

/* An epilogue is fused, or runs as a kernel of its own, whichever is faster. */
TEST(an_epilogue_that_is_slow_runs_apart)
{
    if (!cuda_on_cpu_fault) SKIP("needs the emulation");
    for (int fused_us = 1; fused_us <= 1000; fused_us *= 1000) {
        tuned j = { .cuda = { .precision = HPML_CUDA_BF16, .tune = true } }, plain = { .cuda = j.cuda };
        plain.cuda.tune = false;
        tuned_times(5, 4, 5, 5, 100);
        cuda_on_cpu_fault("fused us", fused_us);
        ENSURE(tuned_train(&j) == HPML_OK && tuned_train(&plain) == HPML_OK);
        cuda_on_cpu_fault("none", 0);
        /* gelu and gelu' of two layers, and sums for the third layer's bias: those for the others are then in the
           kernels of gelu' */
        ENSURE(number_after(j.text, "not the first, ") == (fused_us == 1 ? 0 : 5));
        ENSURE((strstr(j.text, "gelu") != NULL) == (fused_us == 1));
        ENSURE((strstr(j.text, "sums") != NULL) == (fused_us == 1));
        ENSURE(strstr(j.text, " 0 by own kernels |") && strstr(plain.text, "gelu"));
        ENSURE(fused_us > 1 || j.hash == plain.hash);
    }
}

/* Nothing is timed while a pass is recorded, not even a product whose plan was forgotten for 260 others. */
TEST(nothing_is_timed_while_a_pass_is_recorded)
{
    enum { MANY = 260 };
    char text[1024];
    if (!cuda_on_cpu_fault) SKIP("needs the emulation");
    tuned_times(50, 30, 10, 40, 1000);
    hpml_cuda_desc cuda = { .tune = true };
    hpml_ctx      *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .backend = hpml_backend_cuda(), .backend_desc = &cuda });
    hpml_tensor   *in = hpml_input_2d(ctx, 2, 4), *y = hpml_linear(in, 8, NULL), *all[MANY], *sum = NULL;
    for (int i = 0; i < MANY; i++) {
        all[i] = hpml_sum(hpml_linear(in, 8 * (i + 2), NULL), 1);
        sum    = sum ? hpml_add(sum, all[i]) : all[i];
    }
    hpml_graph *one = hpml_graph_create(ctx, &(hpml_graph_desc){ .outputs = &y, .output_count = 1 });
    hpml_graph *many = hpml_graph_create(ctx, &(hpml_graph_desc){ .outputs = &sum, .output_count = 1 });
    ENSURE(hpml_graph_forward(one, false, 0) == HPML_OK);
    ENSURE(hpml_cuda_text(ctx, text, sizeof text) > 0 && strstr(text, "; algorithms 23; tuned 1,"));
    ENSURE(hpml_graph_forward(many, false, 0) == HPML_OK);
    ENSURE(hpml_graph_forward(one, false, 0) == HPML_OK); /* recorded */
    ENSURE(text_number(ctx, " recorded") == 1 && text_number(ctx, " given up") == 0);
    ENSURE(hpml_cuda_text(ctx, text, sizeof text) > 0 && strstr(text, "; algorithms 23 21; tuned 255,"));
    hpml_ctx_free(ctx);
    cuda_on_cpu_fault("none", 0);
}

/* Without memory for the results of timed runs, the first algorithm is taken, and that is no error. Whatever allocation
   or launch fails while products are timed, no memory is leaked, and the error is the one of that call. */
TEST(timing_products_may_fail)
{
    char text[1024];
    if (!cuda_on_cpu_fault) SKIP("needs the emulation");
    tuned_times(50, 30, 10, 40, 1000);
    hpml_cuda_desc cuda = { .tune = true };
    hpml_ctx      *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .backend = hpml_backend_cuda(), .backend_desc = &cuda });
    hpml_tensor   *y = hpml_linear(hpml_input_2d(ctx, 8, 8), 8, NULL);
    hpml_graph    *g = hpml_graph_create(ctx, &(hpml_graph_desc){ .outputs = &y, .output_count = 1 });
    ENSURE(hpml_graph_alloc(g) == HPML_OK);
    cuda_on_cpu_fault("memory", cuda_on_cpu_count("bytes") + 100);
    ENSURE(hpml_graph_forward(g, false, 0) == HPML_OK && hpml_cuda_text(ctx, text, sizeof text) > 0);
    ENSURE(strstr(text, "; algorithms 21; tuned 0, 0 taken over, 0 not the first, 0 apart,"));
    hpml_ctx_free(ctx);
    cuda_on_cpu_fault("none", 0);
    for (int kind = 0; kind < 2; kind++) {
        int failed = 0, k = 0, passed = 0;
        do {
            tuned j = { .cuda = { .precision = HPML_CUDA_BF16, .tune = true, .workspace = 1 << 20 }, .steps = 2 };
            tuned_times(5, 4, 5, 5, 1);
            cuda_on_cpu_fault("fused us", 1000);
            cuda_on_cpu_fault(kind ? "launch" : "malloc", ++k);
            hpml_status status = tuned_train(&j);
            cuda_on_cpu_fault("none", 0);
            ENSURE(cuda_on_cpu_count("bytes") == 0 && cuda_on_cpu_count("cublas") == 0);
            ENSURE(status == HPML_OK || status == (kind ? HPML_ERR_CUDA : HPML_ERR_MEMORY));
            passed = status == HPML_OK ? passed + 1 : 0;
            failed += status != HPML_OK;
        } while (passed < 20);
        ENSURE(failed > 12);
    }
}

/* A checkpoint has the choices; a training that loads it takes them, and times nothing but what is not among them. */
TEST(a_checkpoint_has_the_choices)
{
    if (!cuda_on_cpu_fault) SKIP("needs the emulation");
    tuned j = { .cuda = { .precision = HPML_CUDA_BF16, .tune = true }, .save = file("tuned") };
    tuned_times(50, 30, 10, 40, 100);
    cuda_on_cpu_fault("fused us", 1000);
    ENSURE(tuned_train(&j) == HPML_OK && number_after(j.text, "not the first, ") == 5);
    tuned next = { .cuda = j.cuda, .load = j.save, .save = file("again") };
    cuda_on_cpu_fault("fused us", 0);
    tuned_times(50, 5, 10, 40, 100); /* another would be the fastest now */
    long before = cuda_on_cpu_count("algorithm 22");
    ENSURE(tuned_train(&next) == HPML_OK && cuda_on_cpu_count("algorithm 22") == before);
    int products = number_after(j.text, "; tuned ");
    ENSURE(number_after(next.text, "; tuned ") == products && number_after(next.text, ", ") > 0);
    char wanted[64];
    snprintf(wanted, sizeof wanted, "; tuned %d, %d taken over, %d not the first, 5 apart,", products, products,
             products);
    ENSURE(strstr(next.text, wanted) && strstr(next.text, "; algorithms 23;"));
    tuned third = { .cuda = j.cuda, .load = next.save, .accumulate = 2 }; /* and products that add to their result */
    ENSURE(tuned_train(&third) == HPML_OK && strstr(third.text, "; algorithms 23 22;"));
    ENSURE(number_after(third.text, "; tuned ") > products);
    tuned off = { .cuda.precision = HPML_CUDA_BF16, .load = j.save, .save = file("plain") };
    ENSURE(tuned_train(&off) == HPML_OK && strstr(off.text, "; algorithms 21,") && !strstr(off.text, "ignored"));
    tuned none = { .cuda = j.cuda, .load = off.save }; /* a file without choices */
    ENSURE(tuned_train(&none) == HPML_OK && strstr(none.text, "; algorithms 22; tuned"));
    ENSURE(strstr(none.text, " 0 taken over") && !strstr(none.text, "ignored"));
    cuda_on_cpu_fault("none", 0);
}

/* Choices of another version, GPU or setting, and damaged ones, are ignored, and hpml_cuda_text says so. */
TEST(choices_that_do_not_fit_are_ignored)
{
    if (!cuda_on_cpu_fault) SKIP("needs the emulation");
    tuned j = { .cuda = { .precision = HPML_CUDA_BF16, .tune = true }, .save = file("tuned"), .steps = 1 };
    tuned_times(50, 30, 10, 40, 1000);
    ENSURE(tuned_train(&j) == HPML_OK);
    for (int other = 0; other < 4; other++) {
        tuned next = { .cuda = j.cuda, .load = j.save, .steps = 3 };
        tuned_times(50, 5, 10, 40, 1000);
        if (other == 0) cuda_on_cpu_fault("cublas version", 120001);
        if (other == 1) cuda_on_cpu_fault("multiprocessors", 16);
        if (other == 2) next.cuda.precision = HPML_CUDA_F16;
        if (other == 3) next.cuda.workspace = 1 << 20;
        ENSURE(tuned_train(&next) == HPML_OK && strstr(next.text, "; algorithms 22; tuned "));
        ENSURE(strstr(next.text, " 0 taken over,") && strstr(next.text, ", unfit choices ignored,"));
        cuda_on_cpu_fault("none", 0);
    }
    static char bytes[1 << 18];
    FILE       *f = fopen(j.save, "rb");
    size_t      size = f ? fread(bytes, 1, sizeof bytes, f) : 0, from = 0, to = 0;
    if (f) fclose(f);
    while (from + 14 < size && memcmp(bytes + from, "hpml.choices\":", 14) != 0) from++;
    for (to = from += 15; to < size && bytes[to] != '"'; to++) {}
    ENSURE(from < to && to < size && size < sizeof bytes);
    for (size_t at = from, turn = 0; at < to; at += 1 + (to - from) / 60, turn++) {
        const char kept = bytes[at], junk[] = "7 #-\x01";
        bytes[at] = junk[turn % 5];
        tuned next = { .cuda = j.cuda, .load = put("damaged", bytes, size), .steps = 1 };
        tuned_times(50, 5, 10, 40, 1000);
        hpml_status status = tuned_train(&next);
        cuda_on_cpu_fault("none", 0);
        if (bytes[at] == 1) ENSURE(status == HPML_ERR_FORMAT); /* no JSON */
        else if (bytes[at] != kept)
            ENSURE(status == HPML_OK && strstr(next.text, ", unfit choices ignored"));
        bytes[at] = kept;
    }
}

/* Whatever numbers the backend's `choose` gets, results stay the same: algorithms are those that cuBLASLt proposes. */
TEST(any_numbers_may_be_chosen)
{
    enum { CAPACITY = 20000 };
    static int64_t numbers_of[CAPACITY], wrong[CAPACITY];
    const hpml_backend *b = hpml_backend_cuda();
    const int64_t       values[] = { 0, -1, 1, 2, 7, 99, INT64_MAX, INT64_MIN };
    if (!cuda_on_cpu_fault) SKIP("needs the emulation");
    tuned_times(50, 30, 10, 40, 1000);
    hpml_cuda_desc cuda = { .tune = true };
    hpml_ctx      *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .backend = b, .backend_desc = &cuda });
    hpml_linear_desc relu = { .activation = HPML_ACT_RELU };
    hpml_tensor   *in = hpml_input_2d(ctx, 8, 8), *y = hpml_linear(in, 8, &relu);
    hpml_graph    *g = hpml_graph_create(ctx, &(hpml_graph_desc){ .outputs = &y, .output_count = 1 });
    float          ones[64], first[64], now[64];
    char           text[1024];
    for (int i = 0; i < 64; i++) ones[i] = 1;
    ENSURE(hpml_graph_alloc(g) == HPML_OK && hpml_tensor_set(in, ones, 64) == HPML_OK);
    const long bytes = cuda_on_cpu_count("bytes");
    ENSURE(hpml_graph_forward(g, false, 0) == HPML_OK && hpml_tensor_get(y, first, 64) == HPML_OK);
    ENSURE(cuda_on_cpu_count("bytes") == bytes); /* the memory of timed runs is freed */
    const int64_t count = b->choices(hpml_ctx_device(ctx), numbers_of, CAPACITY);
    ENSURE(count == 6 + 2 * 20 && b->choices(hpml_ctx_device(ctx), NULL, 0) == count); /* relu fused, and apart */
    for (int64_t at = 0; at < count; at++)
        EACH(values, v) {
            memcpy(wrong, numbers_of, sizeof wrong);
            wrong[at] = values[v];
            b->choose(hpml_ctx_device(ctx), wrong, v == 2 ? at : count, false);
            ENSURE(hpml_graph_forward(g, false, 0) == HPML_OK && hpml_tensor_get(y, now, 64) == HPML_OK);
            ENSURE(memcmp(first, now, sizeof now) == 0);
        }
    b->choose(hpml_ctx_device(ctx), NULL, 0, false);
    for (int way = 0; way < 2; way++) { /* the first algorithm for both, then of a number that it does not have */
        memcpy(wrong, numbers_of, sizeof wrong);
        for (int64_t at = 6; at < count; at += 20) {
            wrong[at + 17] = 1;
            wrong[at + 18] = way ? 55 : 21;
        }
        long before = cuda_on_cpu_count("algorithm 21");
        for (int i = 0; i < 3; i++) ENSURE(hpml_graph_forward(g, false, 0) == HPML_OK); /* is recorded */
        b->choose(hpml_ctx_device(ctx), wrong, count, false);
        for (int i = 0; i < 3; i++) ENSURE(hpml_graph_forward(g, false, 0) == HPML_OK);
        ENSURE(hpml_cuda_text(ctx, text, sizeof text) > 0);
        ENSURE((strstr(text, ", unfit choices ignored") != NULL) == (way == 1));
        ENSURE(strstr(text, way ? "; algorithms 23; tuned" : "; algorithms 21; tuned"));
        if (way == 0) ENSURE(cuda_on_cpu_count("algorithm 21") == before + 2); /* op by op, and recorded again */
    }
    for (int i = 0; i < CAPACITY; i++) wrong[i] = i < 6 ? numbers_of[i] : i; /* more choices than plans are kept */
    b->choose(hpml_ctx_device(ctx), wrong, CAPACITY, false);
    ENSURE(hpml_graph_forward(g, false, 0) == HPML_OK && hpml_tensor_get(y, now, 64) == HPML_OK);
    ENSURE(memcmp(first, now, sizeof now) == 0);
    hpml_ctx_free(ctx);
    cuda_on_cpu_fault("none", 0);
    ENSURE(cuda_on_cpu_count("cublas") == 0);
}

/* cuDNN asks for more than 64 MiB for NCHW images, which TF32 has: the workspace grows in the first pass, if its size
   was not set and the GPU has the memory; a pass recorded before contains the old address, and is recorded again. */
TEST(the_workspace_grows_in_the_first_pass)
{
    char text[1024];
    if (!cuda_on_cpu_fault) SKIP("needs the emulation");
    const bool records = !library_is(LIBRARY_CAPTURE);
    for (int small = 0; small < 2; small++) {
        cuda_on_cpu_fault("libraries", LIBRARY_NCHW);
        if (small) cuda_on_cpu_fault("memory", 1 << 30); /* 1/16 of it is 64 MiB */
        two_layers(HPML_CUDA_TF32, true, text);
        cuda_on_cpu_fault("none", 0);
        ENSURE(strstr(text, small ? "20 by own kernels (20 refused) | workspace 64.0 MiB"
                                  : "convolutions: 20 by cuDNN"));
        ENSURE(small || strstr(text, "workspace 65.1 MiB, 65.1 asked for"));
        ENSURE(cuda_on_cpu_count("bytes") == 0);
    }
    cuda_on_cpu_fault("libraries", LIBRARY_NCHW);
    hpml_cuda_desc cuda = { .precision = HPML_CUDA_TF32 };
    hpml_ctx      *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .backend = hpml_backend_cuda(), .backend_desc = &cuda });
    hpml_graph    *g[2];
    for (int i = 0; i < 2; i++) {
        hpml_conv2d_desc conv = { .kernel_h = 3 };
        hpml_tensor     *in = hpml_input_4d(ctx, 2, 8, 8, 8), *x = hpml_dropout(in, 0);
        hpml_tensor     *out = i ? hpml_conv2d(x, 8, &conv) : hpml_linear(hpml_flatten(x), 8, NULL);
        g[i] = hpml_graph_create(ctx, &(hpml_graph_desc){ .outputs = &out, .output_count = 1 });
    }
    for (int turn = 0; turn < 3; turn++)
        for (int i = 0; i < 4; i++) ENSURE(hpml_graph_forward(g[turn % 2], false, 0) == HPML_OK);
    ENSURE(text_number(ctx, " recorded") == (records ? 3 : 0) && text_number(ctx, " replayed") == (records ? 7 : 0));
    hpml_ctx_free(ctx);
    cuda_on_cpu_fault("none", 0);
}

/* A NaN, with the device's bits, stays a NaN in every result of a product, and an infinity does not become finite. */
TEST(a_nan_goes_through_products)
{
    enum { ROWS = 20, IN = 72, OUT = 24 };
    static const uint32_t nans[] = { 0x7fffffffu, 0xffffffffu, 0x7f800001u, 0x7f800000u };
    float                 v[ROWS * IN], y[ROWS * OUT];
    if (no_device()) SKIP("no CUDA device");
    for (int p = HPML_CUDA_F32; p <= HPML_CUDA_F16; p++)
        EACH(nans, k) {
            products = k % 2 ? LIBRARIES : OWN;
            hpml_ctx    *ctx = context(true, (hpml_cuda_precision)p);
            hpml_tensor *x = hpml_input_2d(ctx, ROWS, IN), *out = hpml_linear(x, OUT, NULL);
            hpml_graph  *g = hpml_graph_create(ctx, &(hpml_graph_desc){ .outputs = &out, .output_count = 1 });
            products = AS_EVER;
            for (int i = 0; i < ROWS * IN; i++) v[i] = (float)(i % 7 - 3);
            memcpy(&v[IN + 5], &nans[k], sizeof v[0]);
            ENSURE(hpml_graph_alloc(g) == HPML_OK && hpml_tensor_set(x, v, ROWS * IN) == HPML_OK);
            ENSURE(hpml_graph_forward(g, false, 0) == HPML_OK && hpml_tensor_get(out, y, ROWS * OUT) == HPML_OK);
            for (int i = 0; i < ROWS * OUT; i++) ENSURE(!isfinite(y[i]) == (i / OUT == 1));
            hpml_ctx_free(ctx);
        }
}

TEST(the_dynamic_loss_scale_settles)
{
    if (no_device()) SKIP("no CUDA device");
    hpml_ctx *ctx = context(true, HPML_CUDA_F16);
    ENSURE(loss_scale_adapts(ctx));
    hpml_ctx_free(ctx);
}

/* Whole trainings, every fifth step with a short batch; returns the loss of each step. Smaller models on the emulated
   GPU. */
enum { STEPS = 30, BATCHES = 3, CLASSES = 10 };

typedef struct training {
    const char *name;
    hpml_tensor *(*record)(hpml_ctx *ctx, bool small, hpml_tensor **in);
    hpml_opt opt;
    float    lr;
} training;

static hpml_tensor *train_mlp(hpml_ctx *ctx, bool small, hpml_tensor **in)
{
    hpml_linear_desc d = { .activation = HPML_ACT_RELU };
    *in = hpml_input_2d(ctx, small ? 16 : 64, small ? 20 : 784);
    hpml_tensor *x = hpml_dropout(hpml_linear(*in, small ? 24 : 512, &d), 0.2f);
    return hpml_linear(hpml_dropout(hpml_linear(x, small ? 17 : 256, &d), 0.2f), CLASSES, NULL);
}

static hpml_tensor *train_cnn(hpml_ctx *ctx, bool small, hpml_tensor **in)
{
    hpml_conv2d_desc c = { .kernel_h = 3, .padding_h = 1, .no_bias = true };
    hpml_norm_desc   n = { .activation = HPML_ACT_RELU };
    int64_t          width = small ? 4 : 32;
    *in = hpml_input_4d(ctx, small ? 8 : 64, 3, small ? 8 : 32, small ? 8 : 32);
    hpml_tensor *x = hpml_batchnorm(hpml_conv2d(*in, width, &c), &n), *y;
    x = hpml_max_pool2d(x, 2, 0, 0);
    y = hpml_batchnorm(hpml_conv2d(x, width, &c), NULL);
    return hpml_linear(hpml_flatten(hpml_relu(hpml_add(x, y))), CLASSES, NULL);
}

static hpml_tensor *train_gpt(hpml_ctx *ctx, bool small, hpml_tensor **in)
{
    int64_t          T = small ? 9 : 128, C = small ? 16 : 256;
    hpml_linear_desc gelu = { .activation = HPML_ACT_GELU };
    hpml_param_desc  place = { .name = "positions", .ndim = 2, .shape = { T, C }, .init = HPML_INIT_NORMAL };
    *in = hpml_input_tokens(ctx, small ? 4 : 8, T);
    hpml_tensor *x = hpml_add(hpml_embedding(*in, CLASSES, C, NULL), hpml_param_create(ctx, &place));
    for (int l = 0; l < (small ? 1 : 4); l++) {
        hpml_tensor *a = hpml_linear(hpml_layernorm(x, NULL), 3 * C, NULL);
        x = hpml_add(x, hpml_linear(hpml_attention(a, &(hpml_attention_desc){ .heads = small ? 2 : 4 }), C, NULL));
        x = hpml_add(x, hpml_linear(hpml_linear(hpml_layernorm(x, NULL), 4 * C, &gelu), C, NULL));
    }
    return hpml_linear(hpml_layernorm(x, NULL), CLASSES, NULL);
}

/* Labels that can be learnt: the position of the largest of the first numbers, or the token plus two. */
static void train_data(hpml_dtype dtype, int64_t samples, int64_t each, int seed, float *x, int32_t *y)
{
    hpml_rng r = { .seed = 90 + (uint64_t)seed };
    int32_t *tokens = (int32_t *)x;
    for (int64_t i = 0; dtype == HPML_DTYPE_I32 && i < samples * each; i++)
        tokens[i] = (int32_t)hpml_rng_below(&r, CLASSES), y[i] = (tokens[i] + 2) % CLASSES;
    if (dtype == HPML_DTYPE_I32) return;
    hpml_rng_fill_normal(&r, x, samples * each);
    for (int64_t i = 0; i < samples; i++) {
        y[i] = 0;
        for (int c = 1; c < CLASSES; c++)
            if (x[i * each + c] > x[i * each + y[i]]) y[i] = c;
    }
}

static bool train_steps(const training *t, bool gpu, bool own, hpml_cuda_precision precision, float losses[STEPS])
{
    hpml_cuda_desc cuda = { .precision = precision, .own_kernels = own };
    hpml_ctx      *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .seed = 5, .backend = gpu ? hpml_backend_cuda() : NULL,
                                                           .backend_desc = gpu ? &cuda : NULL });
    hpml_tensor   *in = NULL, *out = t->record(ctx, emulated(), &in);
    hpml_trainer  *tr = hpml_trainer_create(ctx, &(hpml_trainer_desc){ .input = in, .output = out, .optimizer = t->opt,
                            .lr = t->lr, .momentum = t->opt == HPML_OPT_SGD ? 0.9f : 0, .clip_norm = 5,
                            .loss_scale = precision == HPML_CUDA_F16 ? 256 : 0 });
    int64_t        n = hpml_tensor_count(in), batch = in ? in->shape[0] : 0, each = batch ? n / batch : 0;
    float         *x = (float *)malloc((size_t)n * sizeof(float));
    int32_t       *y = (int32_t *)malloc((size_t)n * sizeof(int32_t));
    for (int s = 0; s < STEPS && hpml_ctx_status(ctx) == HPML_OK; s++) {
        hpml_step_info i = { 0 };
        train_data(in->dtype, batch, each, s % BATCHES, x, y);
        hpml_trainer_step(tr, x, y, s % 5 == 4 ? batch / 2 + 1 : batch, &i);
        losses[s] = i.loss;
    }
    bool good = hpml_ctx_status(ctx) == HPML_OK;
    if (!good) printf("    %s: %s\n", t->name, hpml_ctx_error(ctx)), test_failed = 1;
    free(x);
    free(y);
    hpml_ctx_free(ctx);
    return good;
}

static void train_both(const training *t, const hpml_cuda_precision *precisions, const double *tolerances, int count)
{
    float cpu[STEPS], gpu[STEPS];
    if (!train_steps(t, false, false, HPML_CUDA_F32, cpu)) return;
    for (int own = 0; own < (libraries_only() ? 1 : 2); own++)
        for (int p = 0; p < count; p++) {
            double first = 0, last = 0;
            if (!train_steps(t, true, own == 1, precisions[p], gpu)) continue;
            for (int s = 0; s < STEPS; s++)
                if (!(fabsf(gpu[s] - cpu[s]) <= tolerances[p] * (1 + (double)fabsf(cpu[s])))) {
                    printf("    %s, precision %d%s: loss of step %d is %g, the CPU's %g\n", t->name, (int)precisions[p],
                           own ? ", own kernels" : "", s + 1, (double)gpu[s], (double)cpu[s]);
                    test_failed = 1;
                    break;
                }
            for (int s = 0; s < 2 * BATCHES; s++) first += (double)gpu[s], last += (double)gpu[STEPS - 1 - s];
            if (!(last < 0.8 * first))
                printf("    %s, precision %d: the loss went from %g to %g\n", t->name, (int)precisions[p],
                       first / (2 * BATCHES), last / (2 * BATCHES)), test_failed = 1;
        }
}

static const training trainings[] = { { "MLP with dropout", train_mlp, HPML_OPT_SGD, 0.05f },
                                      { "CNN with batchnorm", train_cnn, HPML_OPT_SGD, 0.02f },
                                      { "GPT", train_gpt, HPML_OPT_ADAMW, 3e-3f } };

TEST(trainings_in_f32)
{
    if (no_device()) SKIP("no CUDA device");
    EACH(trainings, i) train_both(&trainings[i], (hpml_cuda_precision[]){ HPML_CUDA_F32 }, (double[]){ 1e-3 }, 1);
}

/* All three on a GPU; the emulation, which is slow, takes another one for each model. */
TEST_LONG(trainings_in_tf32_and_halves)
{
    static const hpml_cuda_precision kinds[] = { HPML_CUDA_F16, HPML_CUDA_TF32, HPML_CUDA_BF16 };
    static const double              tolerances[] = { 0.05, 0.05, 0.2 };
    if (no_device()) SKIP("no CUDA device");
    EACH(trainings, i)
        if (emulated()) train_both(&trainings[i], kinds + i, tolerances + i, 1);
        else train_both(&trainings[i], kinds, tolerances, 3);
}

/* Steps of a CNN, whose optimizer writes the filters' half copies, by NHWC images. */
TEST(a_cnn_is_trained_in_nhwc)
{
    static const double tolerance = 0.05;
    if (no_device()) SKIP("no CUDA device");
    train_both(&trainings[1], (const hpml_cuda_precision[]){ HPML_CUDA_F16 }, &tolerance, 1);
}

/* A trainer on the GPU with .host_optimizer, and one on the CPU that steps with the GPU's gradients. */
typedef struct on_host { hpml_trainer *cpu; int64_t step; bool same; } on_host;

/* The hook `update` of the trainer on the GPU: the CPU makes the step, too, which must give the same bits. */
static hpml_status step_both(void *user, hpml_trainer *t, const hpml_moment *at)
{
    on_host        *own = (on_host *)user;
    hpml_ctx       *gpu = hpml_trainer_settings(t)->input->ctx, *cpu = hpml_trainer_settings(own->cpu)->input->ctx;
    int64_t         floats, others;
    float          *g = hpml_trainer_array(t, HPML_ARRAY_GRADIENTS, &floats);
    float          *to = hpml_trainer_array(own->cpu, HPML_ARRAY_GRADIENTS, &others);
    own->same = own->same && at->pass == HPML_PASS_UPDATE && floats == others;
    hpml_ctx_backend(gpu)->read(hpml_ctx_device(gpu), to, g, (size_t)floats * sizeof(float));
    hpml_trainer_set_step(own->cpu, own->step++);
    hpml_trainer_apply(own->cpu, 0, (int)hpml_param_count(cpu));
    hpml_status status = hpml_trainer_update_inner(t);
    for (int i = 0; i < hpml_param_count(gpu); i++) {
        hpml_tensor *p = hpml_param_at(gpu, i);
        int64_t      n = hpml_tensor_count(p);
        float       *x = (float *)malloc((size_t)n * sizeof(float));
        hpml_tensor_get(p, x, n);
        own->same = own->same && memcmp(x, hpml_param_at(cpu, i)->data, (size_t)n * sizeof(float)) == 0;
        free(x);
    }
    for (int k = HPML_ARRAY_STATE; hpml_trainer_array(t, (hpml_array)k, NULL); k++) {
        const float *a = hpml_trainer_array(t, (hpml_array)k, NULL);
        const float *b = hpml_trainer_array(own->cpu, (hpml_array)k, NULL);
        own->same = own->same && memcmp(a, b, (size_t)floats * sizeof(float)) == 0;
    }
    return status;
}

static hpml_trainer *record_mlp(hpml_ctx *ctx, hpml_opt opt, bool on)
{
    hpml_tensor *in, *out = train_mlp(ctx, true, &in);
    return hpml_trainer_create(ctx, &(hpml_trainer_desc){ .input = in, .output = out, .optimizer = opt, .lr = 0.01f,
                                                          .momentum = 0.9f, .weight_decay = 0.01f,
                                                          .host_optimizer = on });
}

/* The states are not in the GPU's memory, and each step has the bits of the CPU's; in halves the GPU's next pass reads
   the new values. */
TEST(a_host_optimizer_makes_the_steps_of_the_cpu)
{
    static const hpml_opt opts[] = { HPML_OPT_SGD, HPML_OPT_ADAMW, HPML_OPT_LAMB };
    float                 x[16 * 20];
    int32_t               y[16];
    if (no_device()) SKIP("no CUDA device");
    EACH(opts, o) {
        long bytes[2] = { 0, 0 };
        for (int on = 0; on < 2 && emulated(); on++) {
            hpml_ctx *ctx = context(true, HPML_CUDA_F32);
            ENSURE(record_mlp(ctx, opts[o], on == 1));
            bytes[on] = cuda_on_cpu_count("bytes");
            hpml_ctx_free(ctx);
        }
        for (int half = 0; half < 2; half++) {
            hpml_ctx      *gpu = context(true, half ? HPML_CUDA_BF16 : HPML_CUDA_F32), *cpu = context(false, 0);
            hpml_trainer  *t   = record_mlp(gpu, opts[o], true);
            on_host        own = { record_mlp(cpu, opts[o], true), 0, true };
            hpml_memory    m, plain;
            hpml_step_info info = { 0 };
            float          loss[8];
            hpml_graph_memory(hpml_trainer_graph(t), &m);
            hpml_graph_memory(hpml_trainer_graph(own.cpu), &plain);
            ENSURE(m.optimizer == 0 && plain.optimizer > 0);
            if (emulated()) ENSURE(bytes[0] - bytes[1] >= (long)plain.optimizer);
            hpml_trainer_attach(t, &(hpml_hooks){ .user = &own, .update = step_both });
            for (int i = 0; i < hpml_param_count(gpu); i++) {
                hpml_tensor *p = hpml_param_at(gpu, i);
                hpml_tensor_get(p, hpml_param_at(cpu, i)->data, hpml_tensor_count(p));
            }
            for (int s = 0; s < 8; s++) {
                train_data(HPML_DTYPE_F32, 16, 20, s % 2, x, y);
                ENSURE(hpml_trainer_step(t, x, y, 16, &info) == HPML_OK);
                loss[s] = info.loss;
            }
            ENSURE(own.same && own.step == 8 && loss[6] < loss[0] && loss[7] < loss[1]);
            hpml_ctx_free(gpu);
            hpml_ctx_free(cpu);
        }
    }
}

/* Tokens with a cache of keys and values, one by one and three at a time: the GPU's results are the CPU's. */
TEST(attention_with_a_cache)
{
    enum { B = 2, ROOM = 9, HEADS = 4, KV = 2, D = 6 };
    if (no_device()) SKIP("no CUDA device");
    for (int turn = 0; turn < 4; turn++) {
        static float y[2][B * ROOM * HEADS * D];
        int          each = turn % 2 ? 3 : 1;
        for (int gpu = 0; gpu < 2; gpu++) {
            hpml_ctx    *ctx = context(gpu, HPML_CUDA_F32);
            hpml_tensor *x = hpml_input_3d(ctx, B, each, (HEADS + 2 * KV) * D);
            hpml_tensor *position = hpml_input(ctx, HPML_DTYPE_I32, 1, (int64_t[]){ B });
            hpml_attention_desc a = { .heads = HEADS, .kv_heads = KV, .position = position,
                                      .cache = hpml_tensor_create_3d(ctx, B, ROOM, 2 * KV * D) };
            if (turn > 1) a.mask = mask(x, ROOM, 1);
            hpml_tensor *out = hpml_attention(x, &a);
            hpml_graph  *g = hpml_graph_create(ctx, &(hpml_graph_desc){ .outputs = &out, .output_count = 1 });
            int32_t      at[B] = { 0, 0 };
            ENSURE(hpml_graph_alloc(g) == HPML_OK);
            for (; at[0] < ROOM; at[0] += each, at[1] += each) {
                fill(x, (uint64_t)at[0]);
                ENSURE(hpml_tensor_set_raw(position, at, sizeof at) == HPML_OK);
                ENSURE(hpml_graph_forward(g, false, 0) == HPML_OK);
                float *to = y[gpu] + at[0] * B * HEADS * D;
                ENSURE(hpml_tensor_get(out, to, B * each * HEADS * D) == HPML_OK);
            }
            hpml_tensor_set_raw(position, at, sizeof at);
            hpml_graph_forward(g, false, 0);
            static float unused[B * ROOM * HEADS * D]; /* the GPU reports the error when its results are read */
            ENSURE_ERROR(ctx, hpml_tensor_get(out, unused, B * each * HEADS * D) != HPML_OK, HPML_ERR_LABEL,
                         "position of sample");
            hpml_ctx_free(ctx);
        }
        for (int i = 0; i < B * ROOM * HEADS * D; i++) ENSURE_NEAR(y[1][i], y[0][i], 1e-5);
    }
}

/* An index or a length out of range is an error when the GPU's results are read, with the CPU's text. */
TEST(indices_out_of_range_on_the_device)
{
    static const char *const texts[] = { "index 1 is 6, expected 0 to 5", "length 1 is 7, expected 0 to 6" };
    if (no_device()) SKIP("no CUDA device");
    for (int kind = 0; kind < 2; kind++) {
        hpml_ctx     *ctx = context(true, HPML_CUDA_F32);
        const int64_t shape[3] = { 2, 1, 1 };
        int32_t       bad[2] = { 0, 6 + kind };
        float         out[10];
        hpml_tensor  *x = hpml_input_3d(ctx, 2, 6, 5), *i = hpml_input(ctx, HPML_DTYPE_I32, kind ? 1 : 3, shape);
        hpml_tensor  *y = kind ? hpml_last(x, i) : hpml_take_along(x, 1, i);
        hpml_graph   *g = hpml_graph_create(ctx, &(hpml_graph_desc){ .outputs = &y, .output_count = 1 });
        ENSURE(hpml_graph_alloc(g) == HPML_OK);
        fill(x, 1);
        hpml_tensor_set_raw(i, bad, sizeof bad);
        hpml_graph_forward(g, false, 0);
        ENSURE_ERROR(ctx, hpml_tensor_get(y, out, 10) != HPML_OK, HPML_ERR_LABEL, texts[kind]);
        hpml_ctx_free(ctx);
    }
}
