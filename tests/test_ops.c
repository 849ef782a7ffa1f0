/* Every op: gradients against central differences, values against plain loops, on every set of kernels; the same bits
   for any number of threads; short batches. */
#include "../hpml.h"
#include "test.h"
#include "op_cases.h"

static hpml_dtype   store; /* type of stored results in the next graph; f32 unless a test changes it */
static hpml_tensor *built_x, *built_loss;
/* Builds the graph of a case with loss = mean of (tanh(op(x)) - t)^2; its context goes to *ctx. */
static hpml_graph *build(const op_case *c, const char *cpu, int threads, int64_t batch, hpml_ctx **ctx)
{
    hpml_tensor *x, *y, *t, *loss;
    hpml_graph  *g;
    *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .cpu = cpu, .threads = threads, .seed = 11, .activation_dtype = store });
    x    = hpml_input_4d(*ctx, batch, 4, 9, 7);
    hpml_tensor_require_grad(x);
    y    = hpml_reshape_2d(hpml_tanh(c->record(x)), batch, -1);
    t    = y ? hpml_input_2d(*ctx, batch, y->shape[1]) : NULL;
    loss = hpml_mse(y, t);
    g    = hpml_graph_create(*ctx, &(hpml_graph_desc){ .loss = loss });
    if (hpml_graph_alloc(g) != HPML_OK) return NULL;
    fill(x, 1);
    fill(t, 2);
    built_x = x, built_loss = loss;
    return g;
}

static bool has(const char *cpu)
{
    hpml_ctx *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .cpu = cpu });
    bool      yes = hpml_ctx_status(ctx) == HPML_OK;
    hpml_ctx_free(ctx);
    return yes;
}

TEST(gradients_on_all_kernels)
{
    static const char *const cpus[] = { "scalar", "avx2", "avx512", "neon" };
    for (int k = 0; k < 4; k++)
        for (size_t i = 0; has(cpus[k]) && i < sizeof cases / sizeof cases[0]; i++) {
            hpml_ctx   *ctx;
            hpml_graph *g     = build(&cases[i], cpus[k], 2, 3, &ctx);
            double      error = g ? hpml_check_grad(g, 2e-2f, 24) : -1;
            if (!(error >= 0 && error < 2 * cases[i].tolerance))
                printf("    %s with %s: %g %s\n", cases[i].name, cpus[k], error, hpml_ctx_error(ctx)), test_failed = 1;
            hpml_ctx_free(ctx);
        }
}

/* Compares loss and all gradients of 1, 2 and 3 threads bit by bit. */
static void compare_threads(void)
{
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        uint64_t hash[3] = { 0 };
        for (int threads = 1; threads <= 3; threads++) {
            hpml_ctx   *ctx;
            hpml_graph *g = build(&cases[i], NULL, threads, 3, &ctx);
            ENSURE(g && hpml_graph_forward(g, true, 3) == HPML_OK && hpml_graph_backward(g, 1, false) == HPML_OK);
            for (int p = 0; p < hpml_param_count(ctx) + 1; p++) {
                hpml_tensor   *t = p < hpml_param_count(ctx) ? hpml_param_at(ctx, p) : built_x;
                unsigned char *b = (unsigned char *)t->grad;
                size_t         bytes = (size_t)hpml_tensor_count(t) * sizeof *t->grad;
                for (size_t j = 0; b && j < bytes; j++) hash[threads - 1] = (hash[threads - 1] ^ b[j]) * 1099511628211u;
            }
            hpml_ctx_free(ctx);
        }
        if (hash[0] != hash[1] || hash[0] != hash[2]) printf("    %s differs\n", cases[i].name), test_failed = 1;
    }
}

TEST(bits_do_not_depend_on_threads)
{
    compare_threads();
    store = HPML_DTYPE_BF16;
    compare_threads();
    store = HPML_DTYPE_F32;
}

/* Writes the loss, the gradients of the parameters and that of x to `out`, at most `capacity` floats; returns their
   number. */
static int64_t results(hpml_graph *g, hpml_ctx *ctx, hpml_tensor *x, hpml_tensor *loss, float *out,
                       int64_t capacity)
{
    int64_t n = 1;
    if (hpml_graph_forward(g, true, 5) != HPML_OK || hpml_graph_backward(g, 1, false) != HPML_OK) return 0;
    out[0] = loss->data[0];
    for (int p = 0; p <= hpml_param_count(ctx); p++) {
        hpml_tensor *t = p < hpml_param_count(ctx) ? hpml_param_at(ctx, p) : x;
        for (int64_t i = 0; t->grad && i < hpml_tensor_count(t) && n < capacity; i++) out[n++] = t->grad[i];
    }
    return n;
}

/* A short batch between two full ones gives the same results as its samples in a graph of that batch size. */
static void compare_short_batches(void)
{
    static float of_short[8192], of_small[8192];
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        hpml_ctx    *ctx, *small_ctx;
        hpml_graph  *small = build(&cases[i], NULL, 1, 2, &small_ctx), *g;
        hpml_tensor *small_x = built_x, *small_loss = built_loss;
        double       apart = 0, size = 0;
        g = build(&cases[i], NULL, 1, 3, &ctx);
        ENSURE(g && small);
        if (!hpml_graph_batchable(g)) { printf("    %s: not batchable\n", cases[i].name); test_failed = 1; }
        ENSURE(hpml_graph_forward(g, true, 4) == HPML_OK && hpml_graph_set_batch(g, 2) == HPML_OK);
        int64_t n = results(g, ctx, built_x, built_loss, of_short, 8192);
        ENSURE(n > 0 && n < 8192 && n == results(small, small_ctx, small_x, small_loss, of_small, 8192));
        for (int64_t j = 0; j < n; j++) {
            apart = fmax(apart, fabs((double)of_short[j] - (double)of_small[j]));
            size = fmax(size, fabs((double)of_small[j]));
            if (of_short[j] != of_short[j]) apart = 1e9;
        }
        if (!(apart <= 1e-6 * size)) printf("    %s: %g apart of %g\n", cases[i].name, apart, size), test_failed = 1;
        ENSURE(hpml_graph_set_batch(g, 3) == HPML_OK && hpml_graph_forward(g, false, 0) == HPML_OK &&
               isfinite(built_loss->data[0]));
        ENSURE(hpml_graph_set_batch(g, 4) != HPML_OK);
        hpml_ctx_free(ctx);
        hpml_ctx_free(small_ctx);
    }
}

TEST(short_batches)
{
    compare_short_batches();
    store = HPML_DTYPE_F16;
    compare_short_batches();
    store = HPML_DTYPE_F32;
}

/* Computes loss and gradients of a case with `batch` samples and returns their number; *out is an array of them. x has
   8 bits of precision, which bf16 and f16 represent exactly, because rounding could move a maximum to another element.
   */
static int64_t gradients(const op_case *c, hpml_dtype kept, int64_t batch, float scale, float **out, hpml_memory *m)
{
    hpml_ctx *ctx;
    int64_t   n = 0, room = 1;
    store = kept;
    hpml_graph *g = build(c, NULL, 2, batch, &ctx);
    store = HPML_DTYPE_F32;
    if (!g) {
        printf("    %s: %s\n", c->name, hpml_ctx_error(ctx));
        hpml_ctx_free(ctx);
        return 0;
    }
    int64_t   numbers = hpml_tensor_count(built_x);
    uint16_t *raw     = (uint16_t *)malloc(sizeof *raw * (size_t)numbers);
    hpml_convert(ctx, HPML_DTYPE_BF16, raw, HPML_DTYPE_F32, built_x->data, numbers);
    hpml_convert(ctx, HPML_DTYPE_F32, built_x->data, HPML_DTYPE_BF16, raw, numbers);
    free(raw);
    for (int p = 0; p <= hpml_param_count(ctx); p++)
        room += hpml_tensor_count(p < hpml_param_count(ctx) ? hpml_param_at(ctx, p) : built_x);
    *out = (float *)calloc((size_t)room, sizeof **out);
    hpml_graph_memory(g, m);
    if (hpml_graph_forward(g, true, 5) == HPML_OK && hpml_graph_backward(g, scale, false) == HPML_OK) {
        (*out)[n++] = built_loss->data[0];
        for (int p = 0; p <= hpml_param_count(ctx); p++) {
            hpml_tensor *t = p < hpml_param_count(ctx) ? hpml_param_at(ctx, p) : built_x;
            for (int64_t i = 0; t->grad && i < hpml_tensor_count(t); i++) (*out)[n++] = t->grad[i] / scale;
        }
    } else printf("    %s: %s\n", c->name, hpml_ctx_error(ctx));
    hpml_ctx_free(ctx);
    return n;
}

/* A number stored in halves has a relative error of at most u, half of its last bit: 2^-8 in bf16, 2^-11 in f16. The
   forward pass of a case stores at most 8 arrays and rounds at most one weight, and the backward pass stores as many
   gradients. Their errors have either sign and do not depend on each other, so that their squares add up: sqrt(17) u at
   most, 4 u of a gradient's norm, where no op makes a relative error larger. A logarithm under tanh does, by half:
   log_softmax has 6 u. The limit is 8 u. The loss, a mean of many errors of either sign, is off by less than u. In f16
   gradients need a scale, as those of many samples are below the smallest number. 3 samples are one block, 600 are
   several. */
TEST_PLAIN(every_op_in_halves)
{
    static const double u[] = { 0, 1.0 / 256, 1.0 / 2048 };
    for (int64_t batch = 3; batch <= 600; batch += 597)
        for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
            float      *want, *got;
            hpml_memory whole, m;
            int64_t     n = gradients(&cases[i], HPML_DTYPE_F32, batch, 1, &want, &whole);
            for (int kept = HPML_DTYPE_BF16; kept <= HPML_DTYPE_F16; kept++) {
                double size = 0, apart = 0;
                ENSURE(n > 1 && gradients(&cases[i], (hpml_dtype)kept, batch, 64 * (float)batch, &got, &m) == n);
                for (int64_t k = 1; k < n; k++) {
                    apart += pow((double)got[k] - (double)want[k], 2);
                    size += pow((double)want[k], 2);
                }
                apart = sqrt(apart / size) / u[kept];
                if (!(apart > 0 && apart < 8) || !(fabs((double)(got[0] - want[0])) < u[kept] * (double)want[0]))
                    printf("    %s in %s, batch %lld: gradients %g u apart, loss %g, in f32 %g\n", cases[i].name,
                           hpml_dtype_name((hpml_dtype)kept), (long long)batch, apart, (double)got[0],
                           (double)want[0]), test_failed = 1;
                if (batch == 600 && m.activations >= whole.activations)
                    printf("    %s in %s: activations take %zu bytes, in f32 %zu\n", cases[i].name,
                           hpml_dtype_name((hpml_dtype)kept), m.activations, whole.activations), test_failed = 1;
                free(got);
            }
            free(want);
        }
}

/* Three samples, each so large that it is a block: a loss is the mean over all of them, whatever the number of ignored
   labels in each, and an error names the index of a label or a token in the whole batch. */
TEST(losses_and_labels_of_many_blocks)
{
    enum { B = 3, ROWS = 256, COLS = 512 };
    static float   grad[2][B * ROWS * COLS];
    static int32_t label[B * ROWS];
    for (int kind = 0; kind < 4; kind++) {
        double loss[2];
        for (int halves = 0; halves < 2; halves++) {
            hpml_dtype   dtype = halves ? HPML_DTYPE_F16 : HPML_DTYPE_F32;
            hpml_ctx    *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .activation_dtype = dtype });
            hpml_tensor *x = hpml_input_3d(ctx, B, ROWS, COLS), *t = hpml_input_3d(ctx, B, ROWS, COLS);
            hpml_tensor *l = hpml_input_tokens(ctx, B, ROWS);
            hpml_tensor_require_grad(x);
            hpml_tensor *y = kind == 0 ? hpml_cross_entropy(x, l, &(hpml_cross_entropy_desc){ .label_smoothing = 0.1f })
                           : kind == 1 ? hpml_bce_with_logits(x, t) : kind == 2 ? hpml_mse(x, t) : hpml_huber(x, t, 1);
            hpml_graph  *g = hpml_graph_create(ctx, &(hpml_graph_desc){ .loss = y });
            ENSURE(hpml_graph_alloc(g) == HPML_OK);
            fill(x, 1);
            if (kind) fill(t, 2);
            for (int i = 0; i < B * ROWS; i++) /* all, half and none of a sample's labels are used */
                label[i] = i / ROWS == 2 || i % (i / ROWS + 1) ? HPML_IGNORE : i * 7 % COLS;
            if (!kind) hpml_tensor_set_raw(l, label, sizeof label);
            for (int pass = 0; pass < 2; pass++)
                ENSURE(hpml_graph_forward(g, true, 0) == HPML_OK && hpml_graph_backward(g, 64, false) == HPML_OK);
            loss[halves] = (double)y->data[0];
            memcpy(grad[halves], x->grad, sizeof grad[0]);
            label[2 * ROWS + 3] = COLS;
            if (!kind) {
                hpml_tensor_set_raw(l, label, sizeof label);
                ENSURE_ERROR(ctx, hpml_graph_forward(g, true, 0) != HPML_OK, HPML_ERR_LABEL,
                             "label 515 of the batch is 512");
            }
            hpml_ctx_free(ctx);
        }
        ENSURE_NEAR(loss[0], loss[1], 1e-6 * loss[0]);
        for (int i = 0; i < B * ROWS * COLS; i++)
            ENSURE_NEAR(grad[0][i], grad[1][i], 1e-6 * fabs((double)grad[0][i]) + 1e-9);
    }
    hpml_ctx    *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .activation_dtype = HPML_DTYPE_BF16 });
    hpml_tensor *x = hpml_input_tokens(ctx, B, ROWS), *y = hpml_embedding(x, 9, COLS, NULL);
    hpml_graph  *g = hpml_graph_create(ctx, &(hpml_graph_desc){ .outputs = &y, .output_count = 1 });
    for (int i = 0; i < B * ROWS; i++) label[i] = i == ROWS + 7 ? 9 : i % 9;
    ENSURE(hpml_graph_alloc(g) == HPML_OK && hpml_tensor_set_raw(x, label, sizeof label) == HPML_OK);
    ENSURE_ERROR(ctx, hpml_graph_forward(g, true, 0) != HPML_OK, HPML_ERR_LABEL, "token 263 is 9");
    hpml_ctx_free(ctx);
}

/* A parameter with a row for each sample of a batch that is larger than a block: each sample is combined with its own
   row. */
TEST(each_block_reads_its_own_rows_of_a_parameter)
{
    enum { B = 3, ROWS = 256, COLS = 512, N = B * ROWS * COLS };
    hpml_param_desc d = { .ndim = 3, .shape = { B, ROWS, COLS }, .init = HPML_INIT_NORMAL };
    hpml_ctx       *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .activation_dtype = HPML_DTYPE_BF16 });
    hpml_tensor    *x = hpml_input_3d(ctx, B, ROWS, COLS), *p = hpml_param_create(ctx, &d), *y = hpml_mul(x, p);
    hpml_graph     *g = hpml_graph_create(ctx, &(hpml_graph_desc){ .outputs = &y, .output_count = 1,
                                                                   .loss = hpml_mean(y, HPML_ALL_DIMS) });
    ENSURE(hpml_graph_alloc(g) == HPML_OK);
    fill(x, 1);
    ENSURE(hpml_graph_forward(g, true, 0) == HPML_OK && hpml_graph_backward(g, N, false) == HPML_OK);
    float *got = (float *)malloc(N * sizeof *got);
    hpml_tensor_get(y, got, N);
    for (int i = 0; i < N; i++) {
        double want = (double)x->data[i] * (double)p->data[i];
        ENSURE_NEAR(got[i], want, fabs(want) / 255);
        ENSURE_NEAR(p->grad[i], x->data[i], 1e-6 * fabs((double)x->data[i]));
    }
    free(got);
    hpml_ctx_free(ctx);
}

/* Returns the f16 nearest to x, ties to even, computed in double. */
static float to_f16(float x)
{
    int    e;
    double unit, y;
    frexp((double)x, &e);
    unit = ldexp(1, e - 11 < -24 ? -24 : e - 11); /* between two f16 of this size */
    y    = nearbyint((double)x / unit) * unit;
    return (float)(fabs(y) > 65504 ? y * (double)INFINITY : y);
}

/* D = A B + C of 4 x 4 numbers in f16, as a tensor core computes it: products and sums in f32, the result rounded once.
   The same bits as plain loops; with C added by an op of its own the product is rounded before. */
TEST(products_of_f16_add_up_in_f32)
{
    static const char *const cpus[] = { "scalar", "avx2", "avx512", "neon" };
    for (int k = 0; k < 4; k++) {
        if (!has(cpus[k])) continue;
        const int64_t     square[2] = { 4, 4 };
        hpml_linear_desc  named = { .name = "l" };
        hpml_rng          r = { .seed = 3 };
        hpml_ctx         *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .cpu = cpus[k], .activation_dtype = HPML_DTYPE_F16 });
        hpml_tensor      *a = hpml_input(ctx, HPML_DTYPE_F16, 2, square);
        hpml_tensor      *b = hpml_input(ctx, HPML_DTYPE_F16, 2, square);
        hpml_tensor      *c = hpml_input(ctx, HPML_DTYPE_F16, 2, square);
        hpml_tensor      *d[2] = { hpml_linear(a, 4, &named), hpml_add(hpml_matmul(a, b, false, false), c) };
        hpml_graph       *g = hpml_graph_create(ctx, &(hpml_graph_desc){ .outputs = d, .output_count = 2 });
        hpml_tensor      *w = hpml_param_find(ctx, "l.weight"), *bias = hpml_param_find(ctx, "l.bias");
        ENSURE(hpml_graph_alloc(g) == HPML_OK && d[0]->dtype == HPML_DTYPE_F16);
        for (int turn = 0; turn < 200; turn++) {
            float    x[3][16], got[2][16]; /* A, B, C; some are denormal, some so large that D is infinite */
            uint16_t raw[16];
            for (int i = 0; i < 48; i++)
                x[i / 16][i % 16] = to_f16(ldexpf(hpml_rng_uniform(&r) - 0.5f, turn % 34 - 24));
            for (int i = 0; i < 16; i++) { /* B transposed, with bits that f16 does not keep; one row of C */
                w->data[i % 4 * 4 + i / 4] = x[1][i] * (1 + 1e-5f);
                if (to_f16(w->data[i % 4 * 4 + i / 4]) != x[1][i]) w->data[i % 4 * 4 + i / 4] = x[1][i];
                bias->data[i % 4] = x[2][i % 4];
            }
            hpml_tensor *in[3] = { a, b, c };
            for (int i = 0; i < 3; i++) {
                hpml_convert(ctx, HPML_DTYPE_F16, raw, HPML_DTYPE_F32, x[i], 16);
                ENSURE(hpml_tensor_set_raw(in[i], raw, sizeof raw) == HPML_OK);
            }
            ENSURE(hpml_graph_forward(g, false, 0) == HPML_OK);
            for (int i = 0; i < 2; i++) ENSURE(hpml_tensor_get(d[i], got[i], 16) == HPML_OK);
            for (int i = 0; i < 16; i++) {
                float sum = 0;
                for (int p = 0; p < 4; p++) sum = fmaf(x[0][i / 4 * 4 + p], x[1][p * 4 + i % 4], sum);
                float want[2] = { to_f16(sum + x[2][i % 4]), to_f16(to_f16(sum) + x[2][i]) };
                for (int how = 0; how < 2; how++)
                    if (memcmp(&want[how], &got[how][i], sizeof want[0]) != 0 && !(want[how] == 0 && got[how][i] == 0))
                        printf("    %s, turn %d: %a, expected %a\n", cpus[k], turn, (double)got[how][i],
                               (double)want[how]), test_failed = 1;
            }
        }
        hpml_ctx_free(ctx);
    }
}

/* A tensor without a batch dimension that has as many rows as the batch: a short batch leaves the gradients of the
   other rows zero. */
TEST(short_batches_combined_with_rows_of_a_parameter)
{
    for (int i = 0; i < 16; i++) { /* a parameter or a result computed from one; in f32 or in halves */
        int          kind = i % 4;
        hpml_dtype   dtype = i / 8 ? HPML_DTYPE_BF16 : HPML_DTYPE_F32;
        hpml_ctx    *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .activation_dtype = dtype });
        hpml_tensor *x = hpml_input_3d(ctx, 4, 3, 3);
        hpml_tensor *p = hpml_param_create(ctx, &(hpml_param_desc){ .ndim = 3, .shape = { 4, 3, 3 } });
        hpml_tensor *q = i / 4 % 2 ? hpml_tanh(p) : p, *both[2] = { x, q };
        hpml_tensor *y = kind == 0 ? hpml_concat(both, 2, 1)
                       : kind == 1 ? hpml_matmul(q, x, false, false) : hpml_mul(x, q);
        hpml_tensor *loss = kind == 2 ? hpml_mse(x, q) : hpml_mse(y, hpml_input(ctx, HPML_DTYPE_F32, 3, y->shape));
        hpml_graph  *g = hpml_graph_create(ctx, &(hpml_graph_desc){ .loss = loss });
        ENSURE(hpml_graph_alloc(g) == HPML_OK);
        for (int k = 0; k < 36; k++) x->data[k] = (float)(k + 1);
        for (int samples = 4; samples > 0; samples -= 2) {
            ENSURE(hpml_graph_set_batch(g, samples) == HPML_OK && hpml_graph_forward(g, true, 0) == HPML_OK &&
                   hpml_graph_backward(g, 1, false) == HPML_OK);
            for (int k = 0; k < 36; k++) ENSURE((p->grad[k] != 0) == (k < 9 * samples));
        }
        hpml_ctx_free(ctx);
    }
}

/* A product that sums over the batch of both operands may run on a short batch, which is a shorter sum; a product that
   sums over the batch of one operand may not. */
TEST(short_batches_that_are_summed_over)
{
    for (int kind = 0; kind < 4; kind++) {
        hpml_ctx    *ctx = hpml_ctx_create(NULL);
        hpml_tensor *x = hpml_input_2d(ctx, 4, 3), *of_samples = hpml_input_3d(ctx, 4, 2, 4);
        hpml_tensor *p = hpml_param_create(ctx, &(hpml_param_desc){ .ndim = 2, .shape = { 4, 4 } });
        hpml_tensor *y = kind == 0 ? hpml_matmul(x, x, true, false) : kind == 1 ? hpml_matmul(p, x, true, false)
                       : kind == 2 ? hpml_matmul(p, x, false, false) : hpml_matmul(of_samples, x, false, false);
        hpml_graph  *g = hpml_graph_create(ctx, &(hpml_graph_desc){ .outputs = &y, .output_count = 1 });
        ENSURE(g && hpml_graph_batchable(g) == (kind == 0));
        hpml_ctx_free(ctx);
    }
}

/* A batch that is broadcast to a later dimension cannot be shortened, even if the first dimension is as long. */
TEST(short_batches_of_fewer_dimensions)
{
    for (int apart = 0; apart < 2; apart++) {
        hpml_ctx    *ctx = hpml_ctx_create(NULL);
        hpml_tensor *x = hpml_input_3d(ctx, 4, 1, 6), *b = hpml_input_2d(ctx, 4, 6);
        hpml_tensor *y = hpml_add(x, apart ? hpml_reshape_3d(b, 4, 1, 6) : b);
        hpml_graph  *g = hpml_graph_create(ctx, &(hpml_graph_desc){ .outputs = &y, .output_count = 1 });
        ENSURE(g && hpml_graph_batchable(g) == apart);
        hpml_ctx_free(ctx);
    }
}

/* An output that the loss does not depend on is computed; it gives its parameters no gradient. */
TEST(outputs_that_the_loss_does_not_depend_on_have_no_gradient)
{
    hpml_ctx    *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .seed = 1 });
    hpml_tensor *x = hpml_input_2d(ctx, 4, 3), *h = hpml_linear(x, 5, NULL), *loss = hpml_mean(h, HPML_ALL_DIMS);
    hpml_tensor *beside = hpml_linear(hpml_tanh(hpml_linear(h, 6, NULL)), 7, NULL), *out[2] = { h, beside };
    hpml_graph  *g = hpml_graph_create(ctx, &(hpml_graph_desc){ .outputs = out, .output_count = 2, .loss = loss });
    ENSURE(hpml_graph_alloc(g) == HPML_OK);
    for (int i = 0; i < 12; i++) x->data[i] = (float)i;
    for (int step = 0; step < 2; step++)
        ENSURE(hpml_graph_forward(g, true, 0) == HPML_OK && hpml_graph_backward(g, 1, false) == HPML_OK);
    for (int i = 0; i < hpml_param_count(ctx); i++) ENSURE((hpml_param_at(ctx, i)->grad != NULL) == (i < 2));
    ENSURE_NEAR(hpml_param_at(ctx, 1)->grad[0], 0.2, 1e-6);
    hpml_ctx_free(ctx);
}

/* A reshape of an input copies its bytes, of any dtype, and no others. */
TEST(reshape_of_every_dtype)
{
    for (int dtype = 0; dtype < 5; dtype++) {
        hpml_ctx      *ctx  = hpml_ctx_create(NULL);
        hpml_tensor   *x    = hpml_input(ctx, (hpml_dtype)dtype, 2, (int64_t[]){ 4, 48 });
        hpml_tensor   *y    = hpml_reshape_2d(x, 8, 24);
        hpml_tensor   *z    = hpml_relu(hpml_input_2d(ctx, 4, 2)), *both[2] = { y, z };
        hpml_graph    *g    = hpml_graph_create(ctx, &(hpml_graph_desc){ .outputs = both, .output_count = 2 });
        size_t         size = 192 * hpml_dtype_size((hpml_dtype)dtype);
        unsigned char  bytes[192 * 4];
        for (size_t i = 0; i < sizeof bytes; i++) bytes[i] = (unsigned char)(i * 7);
        ENSURE(hpml_graph_alloc(g) == HPML_OK && hpml_tensor_set_raw(x, bytes, size) == HPML_OK);
        memset(y->raw, 1, size);
        memset(z->node->src[0]->raw, 0x7f, 32);
        ENSURE(hpml_graph_forward(g, false, 0) == HPML_OK && memcmp(y->raw, bytes, size) == 0);
        for (int i = 0; i < 32; i++) ENSURE(((unsigned char *)z->node->src[0]->raw)[i] == 0x7f);
        hpml_ctx_free(ctx);
    }
}

TEST(matmul_and_conv_values)
{
    hpml_ctx    *ctx = hpml_ctx_create(NULL);
    hpml_tensor *x   = hpml_input_4d(ctx, 2, 3, 6, 5);
    hpml_tensor *y   = hpml_conv2d(x, 4, &(hpml_conv2d_desc){ .kernel_h = 3, .stride_h = 2, .padding_h = 1 });
    hpml_graph  *g   = hpml_graph_create(ctx, &(hpml_graph_desc){ .outputs = &y, .output_count = 1 });
    hpml_tensor *w   = hpml_param_at(ctx, 0);
    ENSURE(hpml_graph_alloc(g) == HPML_OK);
    fill(x, 5);
    ENSURE(hpml_graph_forward(g, false, 0) == HPML_OK && y->shape[2] == 3 && y->shape[3] == 3);
    for (int b = 0; b < 2; b++)
        for (int o = 0; o < 4; o++)
            for (int i = 0; i < 9; i++) {
                double s = 0;
                for (int c = 0; c < 3; c++)
                    for (int u = 0; u < 3; u++)
                        for (int v = 0; v < 3; v++) {
                            int r = i / 3 * 2 + u - 1, q = i % 3 * 2 + v - 1;
                            if (r < 0 || r >= 6 || q < 0 || q >= 5) continue;
                            s += (double)x->data[((b * 3 + c) * 6 + r) * 5 + q] *
                                 (double)w->data[((o * 3 + c) * 3 + u) * 3 + v];
                        }
                ENSURE_NEAR(y->data[(b * 4 + o) * 9 + i], s, 1e-5);
            }
    hpml_ctx_free(ctx);
}

/* softmax(q k^T) v by plain loops, longer than a block of queries. */
TEST(attention_values)
{
    const int    T = 150, D = 8;
    hpml_ctx    *ctx = hpml_ctx_create(NULL);
    hpml_tensor *x   = hpml_input_3d(ctx, 1, T, 3 * 2 * D);
    hpml_tensor *y   = hpml_attention(x, &(hpml_attention_desc){ .heads = 2 });
    hpml_graph  *g   = hpml_graph_create(ctx, &(hpml_graph_desc){ .outputs = &y, .output_count = 1 });
    ENSURE(hpml_graph_alloc(g) == HPML_OK);
    fill(x, 9);
    ENSURE(hpml_graph_forward(g, false, 0) == HPML_OK);
    for (int h = 0; h < 2; h++)
        for (int t = 0; t < T; t += 7) {
            double p[150], sum = 0;
            for (int s = 0; s <= t; s++) {
                double dot = 0;
                for (int d = 0; d < D; d++)
                    dot += (double)x->data[t * 48 + h * D + d] * (double)x->data[s * 48 + 16 + h * D + d];
                sum += p[s] = exp(dot / sqrt((double)D));
            }
            for (int d = 0; d < D; d++) {
                double o = 0;
                for (int s = 0; s <= t; s++) o += p[s] / sum * (double)x->data[s * 48 + 32 + h * D + d];
                ENSURE_NEAR(y->data[t * 16 + h * D + d], o, 1e-5);
            }
        }
    hpml_ctx_free(ctx);
}

TEST(losses_against_formulas)
{
    hpml_ctx    *ctx = hpml_ctx_create(NULL);
    hpml_tensor *x   = hpml_input_2d(ctx, 5, 7), *l = hpml_input(ctx, HPML_DTYPE_I32, 1, (int64_t[]){ 5 });
    hpml_tensor *loss = hpml_cross_entropy(x, l, &(hpml_cross_entropy_desc){ .label_smoothing = 0.1f });
    hpml_graph  *g    = hpml_graph_create(ctx, &(hpml_graph_desc){ .outputs = &loss, .output_count = 1 });
    int32_t      label[5] = { 3, 0, HPML_IGNORE, 6, 2 };
    double       want = 0;
    ENSURE(hpml_graph_alloc(g) == HPML_OK);
    fill(x, 3);
    x->data[0] = 1e4f; /* must not overflow */
    hpml_tensor_set_raw(l, label, sizeof label);
    ENSURE(hpml_graph_forward(g, false, 0) == HPML_OK);
    for (int i = 0; i < 5; i++) {
        double most = -1e30, sum = 0, mean = 0;
        if (label[i] < 0) continue;
        for (int c = 0; c < 7; c++)
            most = fmax(most, (double)x->data[i * 7 + c]), mean += (double)x->data[i * 7 + c] / 7;
        for (int c = 0; c < 7; c++) sum += exp((double)x->data[i * 7 + c] - most);
        want += (most + log(sum) - 0.9 * (double)x->data[i * 7 + label[i]] - 0.1 * mean) / 4;
    }
    ENSURE_NEAR(loss->data[0], want, 1e-6 * fabs(want) + 1e-5);
    label[1] = 7;
    hpml_tensor_set_raw(l, label, sizeof label);
    ENSURE(hpml_graph_forward(g, false, 0) == HPML_ERR_LABEL &&
           strstr(hpml_ctx_error(ctx), "label 1 of the batch is 7"));
    hpml_ctx_free(ctx);
}

TEST(other_losses_learn_their_gradient)
{
    for (int kind = 0; kind < 3; kind++) {
        hpml_ctx    *ctx = hpml_ctx_create(NULL);
        hpml_tensor *x = hpml_input_2d(ctx, 4, 6), *t = hpml_input_2d(ctx, 4, 3), *y = hpml_linear(x, 3, NULL);
        hpml_tensor *loss = kind == 0 ? hpml_bce_with_logits(y, t)
                          : kind == 1 ? hpml_huber(y, t, 0.5f) : hpml_huber(y, t, 0);
        hpml_graph  *g    = hpml_graph_create(ctx, &(hpml_graph_desc){ .loss = loss });
        ENSURE(hpml_graph_alloc(g) == HPML_OK);
        fill(x, 21);
        for (int i = 0; i < 12; i++) t->data[i] = (float)(i & 1);
        ENSURE(hpml_check_grad(g, 5e-3f, 30) < 2e-2);
        hpml_ctx_free(ctx);
    }
}

TEST(embedding_gradient_and_range)
{
    hpml_ctx    *ctx = hpml_ctx_create(NULL);
    hpml_tensor *x = hpml_input_tokens(ctx, 2, 5), *t = hpml_input_3d(ctx, 2, 5, 4);
    hpml_tensor *loss = hpml_mse(hpml_tanh(hpml_embedding(x, 9, 4, NULL)), t);
    hpml_graph  *g    = hpml_graph_create(ctx, &(hpml_graph_desc){ .loss = loss });
    int32_t      token[10] = { 0, 8, 3, 3, 3, 1, 0, 2, 8, 3 };
    ENSURE(hpml_graph_alloc(g) == HPML_OK);
    hpml_tensor_set_raw(x, token, sizeof token);
    fill(t, 4);
    ENSURE(hpml_check_grad(g, 1e-2f, 36) < 1e-2 && hpml_check_grad(g, 0, 36) == hpml_check_grad(g, 1e-2f, 36));
    ENSURE_ERROR(ctx, hpml_check_grad(g, -1, 36) < 0, HPML_ERR_ARGUMENT, "eps -1");
    ENSURE_ERROR(ctx, hpml_check_grad(g, 0, 0) < 0, HPML_ERR_ARGUMENT, "0 samples");
    token[7] = 9;
    hpml_tensor_set_raw(x, token, sizeof token);
    ENSURE(hpml_graph_forward(g, true, 0) == HPML_ERR_LABEL && strstr(hpml_ctx_error(ctx), "token 7 is 9"));
    hpml_ctx_free(ctx);
}

TEST(wrong_shapes_are_errors)
{
    hpml_ctx    *ctx = hpml_ctx_create(NULL);
    hpml_tensor *x   = hpml_input_4d(ctx, 2, 3, 8, 8), *v = hpml_input_2d(ctx, 2, 7), *many[HPML_MAX_SRC + 1];
    for (int i = 0; i <= HPML_MAX_SRC; i++) many[i] = v;
#define REFUSED(e) ENSURE((e) == NULL && hpml_ctx_status(ctx) != HPML_OK); hpml_ctx_clear_error(ctx)
    REFUSED(hpml_add(x, v));
    ENSURE(hpml_conv2d(x, 4, NULL) == NULL && strstr(hpml_ctx_error(ctx), "kernel_h is required"));
    hpml_ctx_clear_error(ctx);
    hpml_conv2d(x, 4, &(hpml_conv2d_desc){ .kernel_h = 3, .stride_h = -1, .dilation_h = -1 });
    ENSURE(strstr(hpml_ctx_error(ctx), "stride -1x-1, padding 0x0, dilation -1x-1"));
    hpml_ctx_clear_error(ctx);
    REFUSED(hpml_conv2d(x, 4, &(hpml_conv2d_desc){ .kernel_h = 9 }));
    REFUSED(hpml_conv2d(x, 4, &(hpml_conv2d_desc){ .kernel_h = 3, .groups = 2 }));
    REFUSED(hpml_conv2d(v, 4, &(hpml_conv2d_desc){ .kernel_h = 3 }));
    REFUSED(hpml_max_pool2d(x, 9, 0, 0));
    REFUSED(hpml_attention(v, &(hpml_attention_desc){ .heads = 2 }));
    REFUSED(hpml_embedding(v, 4, 4, NULL));
    REFUSED(hpml_dropout(x, 1));
    REFUSED(hpml_slice(x, 1, 2, 2));
    REFUSED(hpml_permute(x, (int[]){ 0, 1, 1, 2 }));
    REFUSED(hpml_concat((hpml_tensor *[]){ x, v }, 2, 0));
    ENSURE(hpml_concat(NULL, 0, 0) == NULL && hpml_ctx_status(ctx) == HPML_OK); /* no context for an error */
    ENSURE(hpml_mse(x, v) == NULL && strncmp(hpml_ctx_error(ctx), "mse: ", 5) == 0);
    hpml_ctx_clear_error(ctx);
    REFUSED(hpml_cross_entropy(v, v, NULL));
    REFUSED(hpml_lstm(v, 3, NULL));
    REFUSED(hpml_lstm(hpml_input_3d(ctx, 2, 3, 4), INT64_MAX / 2, NULL));
    REFUSED(hpml_linear(v, 0, NULL));
    REFUSED(hpml_linear(v, 3, &(hpml_linear_desc){ .activation = (hpml_act)55 }));
    REFUSED(hpml_linear(v, 3, &(hpml_linear_desc){ .init = (hpml_init)55 }));
    REFUSED(hpml_linear(v, 3, &(hpml_linear_desc){ ._end = 1 }));
    REFUSED(hpml_conv2d(x, 4, &(hpml_conv2d_desc){ .kernel_h = 3, .activation = (hpml_act)55 }));
    REFUSED(hpml_max_pool2d(x, INT32_MAX, 1, INT32_MAX));
    REFUSED(hpml_slice(x, 1, INT64_MAX, 1));
    REFUSED(hpml_concat(many, HPML_MAX_SRC + 1, 1));
    REFUSED(hpml_huber(v, v, -1));
    REFUSED(hpml_relu(hpml_input_tokens(ctx, 2, 7)));
    REFUSED(hpml_linear(hpml_input(ctx, HPML_DTYPE_BF16, 2, (int64_t[]){ 2, 7 }), 3, NULL));
    ENSURE(hpml_relu(hpml_input(ctx, HPML_DTYPE_U8, 2, (int64_t[]){ 2, 7 })) == NULL);
    ENSURE(hpml_ctx_status(ctx) == HPML_ERR_DTYPE && strstr(hpml_ctx_error(ctx), "u8"));
    hpml_ctx_clear_error(ctx);
    REFUSED(hpml_layernorm(v, &(hpml_norm_desc){ ._begin = 1 }));
    REFUSED(hpml_graph_create(ctx, &(hpml_graph_desc){ .loss = hpml_mse(v, v), ._end = 1 }));
    static const float bad[] = { 1.01f, -0.1f, (float)INFINITY, (float)NAN };
    for (int i = 0; i < 4; i++) {
        ENSURE(hpml_batchnorm(v, &(hpml_norm_desc){ .momentum = bad[i] }) == NULL &&
               strstr(hpml_ctx_error(ctx), "momentum"));
        hpml_ctx_clear_error(ctx);
        if (i == 0) continue;
        REFUSED(hpml_layernorm(v, &(hpml_norm_desc){ .eps = bad[i] }));
    }
    ENSURE(hpml_batchnorm(v, &(hpml_norm_desc){ .momentum = 1, .eps = HPML_ZERO }) != NULL);
    hpml_ctx_free(ctx);
}

TEST(errors_give_the_reason)
{
    hpml_ctx    *ctx = hpml_ctx_create(NULL);
    hpml_tensor *v = hpml_input_2d(ctx, 2, 7), *row = hpml_input(ctx, HPML_DTYPE_F32, 1, (int64_t[]){ 2 });
    hpml_tensor *w = hpml_param_create(ctx, &(hpml_param_desc){ .ndim = 2, .shape = { 4, 7 } });
    hpml_tensor *all = hpml_sum(v, HPML_ALL_DIMS);
    ENSURE_ERROR(ctx, !hpml_activation(v, (hpml_act)55, 0), HPML_ERR_ARGUMENT, "no function 55");
    ENSURE_ERROR(ctx, !hpml_linear(v, 3, &(hpml_linear_desc){ .weight = w }), HPML_ERR_SHAPE,
                 "weight is f32 4x7 \"param0\"");
    ENSURE_ERROR(ctx, !hpml_sum(v, 2), HPML_ERR_SHAPE, "no dimension 2");
    ENSURE_ERROR(ctx, !hpml_softmax(all), HPML_ERR_SHAPE, "a scalar has no last dimension");
    ENSURE_ERROR(ctx, !hpml_permute(all, NULL), HPML_ERR_SHAPE, "name each dimension once");
    ENSURE_ERROR(ctx, !hpml_transpose(v, 0, 2), HPML_ERR_SHAPE, "name each dimension once");
    ENSURE_ERROR(ctx, !hpml_rmsnorm(row, NULL), HPML_ERR_SHAPE, "rmsnorm of \"input\": needs (.., features)");
    ENSURE_ERROR(ctx, !hpml_embedding(hpml_input_tokens(ctx, 2, 3), 5, 7, &(hpml_embedding_desc){ .weight = w }),
                 HPML_ERR_SHAPE, "expected 5x7");
    ENSURE_ERROR(ctx, !hpml_param_create(ctx, NULL), HPML_ERR_ARGUMENT, "the desc needs a shape");
    hpml_tensor *y = hpml_reshape_4d(hpml_reshape_3d(v, 2, 7, 1), 2, 1, 1, -1);
    hpml_tensor *two = hpml_concat((hpml_tensor *[]){ v, v }, 2, 0);
    ENSURE(y && y->ndim == 4 && y->shape[3] == 7 && two && two->shape[0] == 4);
    hpml_graph *g = hpml_graph_create(ctx, &(hpml_graph_desc){ .outputs = &two, .output_count = 1 });
    ENSURE(!hpml_graph_batchable(g));
    ENSURE_ERROR(ctx, hpml_graph_set_batch(g, 1), HPML_ERR_SHAPE, "an op mixes samples");
    y = hpml_linear(v, 7, NULL);
    g = hpml_graph_create(ctx, &(hpml_graph_desc){ .loss = hpml_bce_with_logits(v, hpml_sigmoid(y)) });
    ENSURE(hpml_graph_forward(g, true, 0) == HPML_OK);
    ENSURE_ERROR(ctx, hpml_graph_backward(g, 1, false), HPML_ERR_UNSUPPORTED, "only the logits get a gradient");
    hpml_ctx_free(ctx);
}

/* Each initializer: mean and standard deviation of 60,000 numbers, and the largest number of a uniform one. */
TEST(initial_weights)
{
    const struct { hpml_init init; double scale, deviation, most; } of[] = {
        { HPML_INIT_KAIMING_UNIFORM, 0, sqrt(2 / 300.0), sqrt(6 / 300.0) },
        { HPML_INIT_KAIMING_NORMAL, 0, sqrt(2 / 300.0), 9 },
        { HPML_INIT_XAVIER_UNIFORM, 0, sqrt(2 / 500.0), sqrt(6 / 500.0) },
        { HPML_INIT_XAVIER_NORMAL, 0, sqrt(2 / 500.0), 9 },
        { HPML_INIT_NORMAL, 0, 0.02, 9 }, { HPML_INIT_NORMAL, 3, 3, 99 }, { HPML_INIT_UNIFORM, 0, 0.1 / sqrt(3), 0.1 },
        { HPML_INIT_UNIFORM, 2, 2 / sqrt(3), 2 }, { HPML_INIT_ZEROS, 0, 0, 0 }, { HPML_INIT_ONES, 0, 0, 1 } };
    for (size_t k = 0; k < sizeof of / sizeof of[0]; k++) {
        hpml_ctx    *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .seed = 5 + k });
        hpml_tensor *w = hpml_param_create(ctx, &(hpml_param_desc){
            .ndim = 2, .shape = { 200, 300 }, .init = of[k].init, .init_scale = (float)of[k].scale });
        double       mean = 0, square = 0, most = 0;
        ENSURE(w && hpml_param_init(ctx) == HPML_OK);
        for (int i = 0; i < 60000; i++) mean += (double)w->data[i] / 60000, most = fmax(most, fabs((double)w->data[i]));
        for (int i = 0; i < 60000; i++) square += pow((double)w->data[i] - mean, 2) / 60000;
        ENSURE_NEAR(mean, of[k].init == HPML_INIT_ONES, 0.02 * of[k].deviation + 1e-9);
        ENSURE_NEAR(sqrt(square), of[k].deviation, 0.02 * of[k].deviation + 1e-9);
        ENSURE(most <= of[k].most + 1e-6 && (of[k].most > 2 || most >= 0.99 * of[k].most));
        hpml_ctx_free(ctx);
    }
}

/* relu passes NaN on, as an op and fused, on all kernels. */
TEST(relu_keeps_nan)
{
    static const char *const isas[] = { "scalar", "avx2", "avx512", "neon" };
    for (int i = 0; i < 4; i++)
        for (int fused = 0; fused < 2; fused++) {
            hpml_ctx        *ctx  = hpml_ctx_create(&(hpml_ctx_desc){ .cpu = isas[i], .threads = 1 });
            hpml_linear_desc relu = { .activation = fused ? HPML_ACT_RELU : HPML_ACT_NONE };
            hpml_tensor     *x = hpml_input_2d(ctx, 3, 5), *y = hpml_linear(x, 37, &relu);
            if (hpml_ctx_status(ctx) == HPML_ERR_ARGUMENT || hpml_ctx_status(ctx) == HPML_ERR_UNSUPPORTED) {
                hpml_ctx_free(ctx);
                continue;
            }
            if (!fused) y = hpml_relu(y);
            hpml_graph *g = hpml_graph_create(ctx, &(hpml_graph_desc){ .outputs = &y, .output_count = 1 });
            ENSURE(hpml_graph_alloc(g) == HPML_OK);
            x->data[7] = (float)NAN;
            ENSURE(hpml_graph_forward(g, false, 0) == HPML_OK);
            for (int k = 0; k < 37; k++) ENSURE(y->data[37 + k] != y->data[37 + k] && y->data[k] == y->data[k]);
            hpml_ctx_free(ctx);
        }
}
