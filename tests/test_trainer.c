/* Optimizers against their formulas, training, accumulation, clipping, hooks, determinism, checkpoints, the loader's
   order. */
#include "../hpml.h"
#include "test.h"
#include "mlp.h"
#include "loss_scale.h"
#include <sys/stat.h>
#ifndef _WIN32
#include <sys/wait.h>
#endif
#include <unistd.h>

/* A model with one weight vector w (1, 3): loss = mean (x w - t)^2 over 2 samples. */
static hpml_dtype    line_store;
static hpml_trainer *line(hpml_ctx **ctx, hpml_trainer_desc d)
{
    hpml_linear_desc l = { .no_bias = true, .name = "w" };
    *ctx     = hpml_ctx_create(&(hpml_ctx_desc){ .threads = 1, .activation_dtype = line_store });
    d.input  = hpml_input_2d(*ctx, 2, 3);
    d.output = hpml_linear(d.input, 1, &l);
    d.loss   = HPML_LOSS_MSE;
    return hpml_trainer_create(*ctx, &d);
}

/* Optimizers as a user writes them: SGD, LARS and LAMB again, and one whose step needs the whole gradient. */
static void own_sgd_step(const hpml_update *u, float *w, float *g, float *const *state, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        float step = fmaf(u->weight_decay, w[i], g[i]);
        if (state[0]) step = state[0][i] = u->step == 1 ? step : fmaf(u->momentum, state[0][i], step);
        w[i] = fmaf(-u->lr, step, w[i]);
    }
}

static void own_lars_prepare(hpml_update *u, double weight_norm, double grad_norm)
{
    double length = grad_norm + (double)u->weight_decay * weight_norm;
    if (u->trust > 0) u->lr *= (float)((double)u->trust * weight_norm / length);
    u->grad_scale *= u->lr;
    u->weight_decay *= u->lr;
    u->lr = 1;
}

static void own_lamb_step(const hpml_update *u, float *w, float *g, float *const *state, int64_t n)
{
    float *m = state[0], *v = state[1];
    float  c1 = 1 - powf(u->beta1, (float)u->step), c2 = 1 - powf(u->beta2, (float)u->step);
    for (int64_t i = 0; i < n; i++) {
        m[i] = u->beta1 * m[i] + (1 - u->beta1) * g[i];
        v[i] = u->beta2 * v[i] + (1 - u->beta2) * g[i] * g[i];
        g[i] = m[i] / c1 / (sqrtf(v[i] / c2) + u->eps) + u->weight_decay * w[i];
    }
}

static void centred_step(const hpml_update *u, float *w, float *g, float *const *state, int64_t n)
{
    float mean = 0;
    (void)w, (void)state;
    for (int64_t i = 0; i < n; i++) mean += g[i] / (float)n;
    for (int64_t i = 0; i < n; i++) g[i] -= mean;
    *(bool *)u->user = n == hpml_tensor_count(u->param);
}

static const hpml_optimizer own_sgd  = { .name = "own_sgd", .state_count = 1, .states = { { "velocity", false, true } },
                                         .lr = 0.01f, .step = own_sgd_step },
                            own_lars = { .name = "own_lars", .state_count = 1,
                                         .states = { { "velocity", false, true } }, .lr = 0.01f,
                                         .momentum = 0.9f, .trust = 0.001f,
                                         .prepare = own_lars_prepare, .step = own_sgd_step },
                            own_lamb = { .name = "own_lamb", .state_count = 2,
                                         .states = { { "m", false, false }, { "v", true, false } },
                                         .lr = 0.001f, .beta1 = 0.9f, .beta2 = 0.999f, .eps = 1e-6f,
                                         .direction = true, .layer_ratio = true, .step = own_lamb_step },
                            centred  = { .name = "centred", .lr = 0.1f, .direction = true, .whole = true,
                                         .step = centred_step };

static const hpml_optimizer *own_row(hpml_opt opt) { return opt == HPML_OPT_CUSTOM ? &own_sgd : NULL; }

static const float X[6] = { 1, 2, -1, 0.5f, -1, 2 }, T[2] = { 1, -2 };

static void gradient(const double *w, double *g)
{
    for (int j = 0; j < 3; j++) g[j] = 0;
    for (int i = 0; i < 2; i++) {
        double y = 0;
        for (int j = 0; j < 3; j++) y += (double)X[3 * i + j] * w[j];
        for (int j = 0; j < 3; j++) g[j] += (y - (double)T[i]) * (double)X[3 * i + j];
    }
}

/* Twelve steps in double by the formulas of the papers; the library must follow. */
TEST(optimizers_follow_their_formulas)
{
    static const struct { hpml_opt opt; double lr, momentum, decay; bool nesterov; } runs[] = {
        { HPML_OPT_SGD, 0.1, 0, 0, false }, { HPML_OPT_SGD, 0.05, 0.9, 0.01, false },
        { HPML_OPT_SGD, 0.05, 0.9, 0, true }, { HPML_OPT_ADAGRAD, 0.1, 0, 0.02, false },
        { HPML_OPT_RMSPROP, 0.02, 0, 0, false }, { HPML_OPT_RMSPROP, 0.02, 0.5, 0, false },
        { HPML_OPT_ADAM, 0.05, 0, 0.1, false }, { HPML_OPT_ADAMW, 0.05, 0, 0.1, false },
        { HPML_OPT_LARS, 10, 0.9, 0.1, false }, { HPML_OPT_LARS, 10, 0.9, 0, true },
        { HPML_OPT_LAMB, 0.05, 0, 0.1, false } };
    for (size_t r = 0; r < sizeof runs / sizeof runs[0]; r++) {
        hpml_ctx     *ctx;
        hpml_trainer *t = line(&ctx, (hpml_trainer_desc){
            .optimizer = runs[r].opt, .lr = (float)runs[r].lr, .momentum = (float)runs[r].momentum,
            .weight_decay = (float)runs[r].decay, .nesterov = runs[r].nesterov });
        double w[3], m[3] = { 0 }, v[3] = { 0 }, g[3], u[3];
        ENSURE(t);
        for (int j = 0; j < 3; j++) w[j] = (double)hpml_param_at(ctx, 0)->data[j];
        for (int step = 1; step <= 12; step++) {
            double wn = 0, gn = 0, un = 0, lr = runs[r].lr, wd = runs[r].decay, rate;
            gradient(w, g);
            for (int j = 0; j < 3; j++) wn += w[j] * w[j], gn += g[j] * g[j];
            for (int j = 0; j < 3; j++) {
                switch (runs[r].opt) {
                case HPML_OPT_LARS: lr = runs[r].lr * 0.001 * sqrt(wn) / (sqrt(gn) + wd * sqrt(wn)); /* fall through */
                case HPML_OPT_SGD:
                    rate = runs[r].opt == HPML_OPT_LARS ? lr : 1; /* in the momentum */
                    g[j] = rate * (g[j] + wd * w[j]);
                    m[j] = step == 1 ? g[j] : runs[r].momentum * m[j] + g[j];
                    u[j] = lr / rate * (runs[r].nesterov ? g[j] + runs[r].momentum * m[j] : m[j]);
                    break;
                case HPML_OPT_ADAGRAD:
                    g[j] += wd * w[j], v[j] += g[j] * g[j];
                    u[j] = lr * g[j] / (sqrt(v[j]) + 1e-10);
                    break;
                case HPML_OPT_RMSPROP:
                    v[j] = 0.99 * v[j] + 0.01 * g[j] * g[j];
                    m[j] = runs[r].momentum * m[j] + g[j] / (sqrt(v[j]) + 1e-8);
                    u[j] = lr * m[j];
                    break;
                default:
                    if (runs[r].opt == HPML_OPT_ADAM) g[j] += wd * w[j];
                    m[j] = 0.9 * m[j] + 0.1 * g[j], v[j] = 0.999 * v[j] + 0.001 * g[j] * g[j];
                    u[j] = sqrt(v[j] / (1 - pow(0.999, step))) + (runs[r].opt == HPML_OPT_LAMB ? 1e-6 : 1e-8);
                    u[j] = m[j] / (1 - pow(0.9, step)) / u[j];
                    if (runs[r].opt != HPML_OPT_ADAM) u[j] += wd * w[j];
                    if (runs[r].opt != HPML_OPT_LAMB) u[j] *= lr;
                }
                un += u[j] * u[j];
            }
            for (int j = 0; j < 3; j++) w[j] -= runs[r].opt == HPML_OPT_LAMB ? lr * sqrt(wn / un) * u[j] : u[j];
            ENSURE(hpml_trainer_step(t, X, T, 2, NULL) == HPML_OK);
            for (int j = 0; j < 3; j++) ENSURE_NEAR(hpml_param_at(ctx, 0)->data[j], w[j], 2e-5 * (1 + fabs(w[j])));
        }
        hpml_ctx_free(ctx);
    }
}

/* Batch, minibatch and stochastic gradient descent on y = x w + c, one setting: the loops of a textbook in double, and
   a learning rate that is too high runs away. The rules scale it by the batch. */
TEST(gradient_descent_with_batches_of_any_size)
{
    enum { M = 1000, D = 3 };
    static const int64_t batches[] = { 1, 10, M };
    static float x[M * D], y[M];
    hpml_rng     r = { .seed = 8 };
    hpml_rng_fill_normal(&r, x, M * D);
    for (int i = 0; i < M; i++)
        y[i] = 2 * x[D * i] - x[D * i + 1] + 0.5f * x[D * i + 2] + 3 + 0.1f * hpml_rng_normal(&r);
    for (int k = 0; k < 4; k++) {
        int64_t       b   = batches[k < 3 ? k : 1];
        float         lr  = k == 3 ? 40 : 0.02f;
        hpml_ctx     *ctx = hpml_ctx_create(NULL);
        hpml_tensor  *in  = hpml_input_2d(ctx, b, D);
        hpml_trainer *t   = hpml_trainer_create(ctx, &(hpml_trainer_desc){
            .input = in, .output = hpml_linear(in, 1, NULL), .loss = HPML_LOSS_MSE, .lr = lr });
        double        w[D], c = 0;
        hpml_status   status = t ? HPML_OK : HPML_ERR_STATE;
        ENSURE(status == HPML_OK);
        for (int j = 0; j < D; j++) w[j] = (double)hpml_param_at(ctx, 0)->data[j];
        for (int64_t step = 0; step < 300 && status == HPML_OK; step++) {
            const float *xb = x + step * b % M * D, *yb = y + step * b % M;
            double       g[D] = { 0 }, gc = 0;
            for (int64_t i = 0; i < b; i++) {
                double e = c - (double)yb[i];
                for (int j = 0; j < D; j++) e += w[j] * (double)xb[D * i + j];
                for (int j = 0; j < D; j++) g[j] += 2 * e * (double)xb[D * i + j] / (double)b;
                gc += 2 * e / (double)b;
            }
            for (int j = 0; j < D; j++) w[j] -= (double)lr * g[j];
            c -= (double)lr * gc;
            status = hpml_trainer_step(t, xb, yb, b, NULL);
        }
        ENSURE(k == 3 ? status == HPML_ERR_NONFINITE : status == HPML_OK);
        for (int j = 0; j < D && k < 3; j++) ENSURE_NEAR(hpml_param_at(ctx, 0)->data[j], w[j], 1e-6);
        if (k < 3) ENSURE_NEAR(hpml_param_at(ctx, 1)->data[0], c, 1e-6);
        if (k < 3) ENSURE_NEAR(c, 3, 0.1);
        hpml_ctx_free(ctx);
    }
    for (int rule = HPML_LR_AS_GIVEN; rule <= HPML_LR_SQRT; rule++) {
        static const double want[] = { 0.1, 0.8, 0.282842712 }; /* 8 times the batch */
        hpml_ctx     *ctx;
        hpml_trainer *t = line(&ctx, (hpml_trainer_desc){
            .lr = 0.1f, .lr_rule = (hpml_lr_rule)rule, .lr_base_batch = 1, .accumulate = 4 });
        ENSURE_NEAR(hpml_trainer_lr(t), want[rule], 1e-6);
        hpml_ctx_free(ctx);
    }
}

TEST(clipping_scales_the_global_norm)
{
    hpml_ctx      *ctx;
    hpml_trainer  *t = line(&ctx, (hpml_trainer_desc){ .lr = 1, .clip_norm = 0.5f });
    hpml_step_info info;
    double         before[3], move = 0;
    for (int j = 0; j < 3; j++) before[j] = (double)hpml_param_at(ctx, 0)->data[j];
    ENSURE(hpml_trainer_step(t, X, T, 2, &info) == HPML_OK && info.grad_norm > 0.5f);
    for (int j = 0; j < 3; j++) move += pow((double)hpml_param_at(ctx, 0)->data[j] - before[j], 2);
    ENSURE_NEAR(sqrt(move), 0.5, 1e-5);
    hpml_ctx_free(ctx);
}

static bool       halves;
static hpml_dtype store(void *device) { return (void)device, halves ? HPML_DTYPE_F16 : HPML_DTYPE_F32; }
static float      seen; /* the scale that the loss is asked for */
static hpml_status watch(const hpml_run *run, hpml_node *n)
{
    seen = run->loss_scale;
    return hpml_backend_cpu()->ops[HPML_OP_MSE].backward(run, n);
}

/* A fixed loss scale, a power of two, changes no bit. A dynamic one (a backend that says it stores f16) is halved until
   the gradient does not overflow, updates are left out meanwhile, and it goes on from a checkpoint. */
TEST(loss_scales)
{
    double        w[3];
    float         zeros[3] = { 0 }, big[6] = { 6e29f, 0, 0, 6e29f, 0, 0 }, far[2] = { -1e5f, -1e5f };
    hpml_backend  cpu = *hpml_backend_cpu();
    hpml_ctx     *ctx;
    for (int k = 0; k < 2; k++) {
        hpml_trainer *t = line(&ctx, (hpml_trainer_desc){ .clip_norm = 1, .loss_scale = k ? 4096 : 0 });
        for (int i = 0; i < 5; i++) ENSURE(hpml_trainer_step(t, X, T, 2, NULL) == HPML_OK);
        for (int j = 0; j < 3; j++) {
            if (k) ENSURE(w[j] == (double)hpml_param_at(ctx, 0)->data[j]);
            w[j] = (double)hpml_param_at(ctx, 0)->data[j];
        }
        hpml_ctx_free(ctx);
    }
    hpml_op_impl ops[HPML_OP_COUNT];
    memcpy(ops, cpu.ops, sizeof ops);
    ops[HPML_OP_MSE].backward = watch;
    cpu.activation_dtype = store, cpu.ops = ops;
    ctx = hpml_ctx_create(&(hpml_ctx_desc){ .backend = &cpu });
    hpml_tensor      *x = hpml_input_2d(ctx, 2, 3), *y = hpml_linear(x, 1, &(hpml_linear_desc){ .no_bias = true });
    hpml_trainer_desc d = { .input = x, .output = y, .loss = HPML_LOSS_MSE, .lr = 1e-20f };
    hpml_step_info    info;
    halves = true;
    hpml_trainer *t = hpml_trainer_create(ctx, &d);
    halves = false;
    hpml_tensor_set(hpml_param_at(ctx, 0), zeros, 3);
    for (int i = 0; i < 5; i++) {
        ENSURE(hpml_trainer_step(t, big, far, 2, &info) == HPML_OK && info.skipped && info.step == 0);
        ENSURE(hpml_param_at(ctx, 0)->data[0] == 0);
    }
    ENSURE(hpml_trainer_step(t, big, far, 2, &info) == HPML_OK && !info.skipped && info.step == 1 && seen == 2048);
    ENSURE(hpml_param_at(ctx, 0)->data[0] < 0);
    hpml_ctx_free(ctx);
    ctx = hpml_ctx_create(NULL);
    x = hpml_input_2d(ctx, 2, 3);
    d = (hpml_trainer_desc){ .input = x, .output = hpml_linear(x, 1, NULL), .loss_scale = -1 };
    ENSURE(!hpml_trainer_create(ctx, &d) && strstr(hpml_ctx_error(ctx), "loss_scale -1"));
    hpml_ctx_free(ctx);
}

/* The loss scale in a checkpoint of t. */
static double scale_of(hpml_trainer *t, hpml_ctx *ctx)
{
    char   path[] = "/tmp/hpml_test_XXXXXX";
    int    fd = mkstemp(path);
    double scale = -1;
    if (fd < 0 || close(fd) != 0 || hpml_checkpoint_save(t, path) != HPML_OK) return -1;
    hpml_safetensors *f = hpml_safetensors_open(ctx, path);
    if (hpml_safetensors_meta(f, "hpml.loss_scale")) scale = atof(hpml_safetensors_meta(f, "hpml.loss_scale"));
    hpml_safetensors_close(f);
    remove(path);
    return scale;
}

/* A gradient that overflows f16 under the dynamic loss scale: the step is left out, in parameters, momentum and count,
   and the scale is halved; it is doubled after 2,000 steps without. The same data in bf16 and f32 are no overflow. */
TEST(an_overflow_in_f16_skips_its_step)
{
    const float calm[2] = { 0.25f, -0.25f }, wild[2] = { 8, -8 };
    float       zeros[3] = { 0 };
    for (int store = 0; store < 3; store++) {
        hpml_ctx      *ctx;
        hpml_step_info info;
        float          before[3];
        line_store = (hpml_dtype)store;
        hpml_trainer *t = line(&ctx, (hpml_trainer_desc){ .lr = 1e-3f, .momentum = 0.9f });
        line_store = HPML_DTYPE_F32;
        ENSURE(hpml_tensor_set(hpml_param_at(ctx, 0), zeros, 3) == HPML_OK);
        for (int i = 0; i < 3; i++)
            ENSURE(hpml_trainer_step(t, X, calm, 2, &info) == HPML_OK && !info.skipped && info.step == i + 1);
        ENSURE(hpml_tensor_get(hpml_param_at(ctx, 0), before, 3) == HPML_OK);
        ENSURE(scale_of(t, ctx) == (store == 2 ? 65536 : 1));
        ENSURE(hpml_trainer_step(t, X, wild, 2, &info) == HPML_OK && info.skipped == (store == 2));
        ENSURE(info.step == (store == 2 ? 3 : 4) && scale_of(t, ctx) == (store == 2 ? 32768 : 1));
        ENSURE((memcmp(before, hpml_param_at(ctx, 0)->data, sizeof before) == 0) == (store == 2));
        size_t had = hpml_ctx_allocations(ctx);
        for (int i = 0; store == 2 && i < 2000; i++) {
            ENSURE(hpml_trainer_step(t, X, calm, 2, &info) == HPML_OK && !info.skipped);
            ENSURE(info.grad_norm >= 0 && info.grad_norm < 2); /* of the gradients as they are without a scale */
        }
        ENSURE(hpml_ctx_allocations(ctx) == had);
        ENSURE(scale_of(t, ctx) == (store == 2 ? 65536 : 1));
        hpml_ctx_free(ctx);
    }
}

TEST(the_dynamic_loss_scale_settles)
{
    hpml_ctx *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .seed = 11, .activation_dtype = HPML_DTYPE_F16 });
    ENSURE(loss_scale_adapts(ctx));
    hpml_ctx_free(ctx);
}

/* Test accuracy of an MLP of 784-128-10 after 15 epochs, the mean over two seeds. */
static double mlp_accuracy(hpml_dtype store, double *loss)
{
    double accuracy = 0;
    *loss = 0;
    for (uint64_t seed = 1; seed <= 2; seed++) {
        hpml_ctx     *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .seed = seed, .activation_dtype = store });
        hpml_tensor  *x = hpml_input_2d(ctx, 128, 784);
        hpml_trainer *t = hpml_trainer_create(ctx, &(hpml_trainer_desc){ .input = x, .output = mlp(x), .lr = 0.05f,
                                                                         .momentum = 0.9f });
        hpml_metrics  test = { 0 }, train = { 0 };
        hpml_trainer_fit(t, digits(ctx, 0, to_learn), &(hpml_fit_desc){ .epochs = 15 });
        hpml_trainer_evaluate(t, digits(ctx, to_learn, TESTED), &test);
        hpml_trainer_evaluate(t, digits(ctx, 0, to_learn), &train);
        if (hpml_ctx_status(ctx) != HPML_OK) printf("    %s\n", hpml_ctx_error(ctx));
        accuracy += 50 * test.accuracy, *loss += train.loss / 2;
        hpml_ctx_free(ctx);
    }
    return accuracy;
}

TEST(halves_learn_what_f32_learns)
{
    double loss, whole, accuracy;
    if (SLOW_BUILD) SKIP("takes its time");
    get_digits(8000);
    whole = mlp_accuracy(HPML_DTYPE_F32, &loss);
    ENSURE(whole > 96);
    for (int store = HPML_DTYPE_BF16; store <= HPML_DTYPE_F16; store++) {
        double half;
        accuracy = mlp_accuracy((hpml_dtype)store, &half);
        if (!(accuracy >= whole - 0.5 && half < 1.1 * loss))
            printf("    %s: accuracy %.2f %%, loss %.4f; f32: %.2f %%, %.4f\n", hpml_dtype_name((hpml_dtype)store),
                   accuracy, half, whole, loss), test_failed = 1;
    }
}

/* Three noisy classes in the plane. */
static hpml_dataset *blobs(hpml_ctx *ctx, int64_t n)
{
    float   *x = (float *)malloc(sizeof(float) * (size_t)n * 2);
    int32_t *y = (int32_t *)malloc(sizeof(int32_t) * (size_t)n);
    hpml_rng r = { .seed = 5 };
    hpml_dataset *d;
    for (int64_t i = 0; i < n; i++) {
        y[i] = (int32_t)hpml_rng_below(&r, 3);
        x[2 * i]     = cosf(2.1f * (float)y[i]) + 0.2f * hpml_rng_normal(&r);
        x[2 * i + 1] = sinf(2.1f * (float)y[i]) + 0.2f * hpml_rng_normal(&r);
    }
    d = hpml_dataset_create(ctx, n, HPML_DTYPE_F32, 1, (int64_t[]){ 2 }, x, HPML_DTYPE_I32, 1, y);
    free(x);
    free(y);
    return d;
}

static hpml_trainer *classifier(hpml_ctx *ctx, int64_t batch, hpml_trainer_desc d)
{
    d.input  = hpml_input_2d(ctx, batch, 2);
    d.output = hpml_linear(hpml_dropout(hpml_tanh(hpml_linear(d.input, 16, NULL)), 0.1f), 3, NULL);
    return hpml_trainer_create(ctx, &d);
}

/* A learns x w + b, B 2 x w; B is made when A has already trained, and decays all it has. */
TEST(trainers_share_a_context)
{
    hpml_ctx        *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .threads = 1 });
    hpml_linear_desc named = { .name = "a" };
    hpml_tensor     *x = hpml_input_2d(ctx, 2, 3), *out = hpml_linear(x, 1, &named);
    hpml_trainer    *a = hpml_trainer_create(ctx, &(hpml_trainer_desc){
        .input = x, .output = out, .loss = HPML_LOSS_MSE, .lr = 0.05f, .momentum = 0.9f });
    hpml_trainer    *b = NULL;
    ENSURE(a);
    hpml_tensor *w = hpml_param_at(ctx, 0), *bias = hpml_param_at(ctx, 1);
    double       W[3], B = 0, m[4] = { 0 }, y[2];
    for (int j = 0; j < 3; j++) W[j] = (double)w->data[j];
    for (int step = 0; step < 8; step++) {
        bool   of_a = step % 3 == 0;
        double g[4] = { 0 };
        if (step == 1) {
            hpml_tensor *in = hpml_input_2d(ctx, 2, 3);
            b = hpml_trainer_create(ctx, &(hpml_trainer_desc){
                .input = in, .output = hpml_scale(hpml_matmul(in, w, false, true), 2, 0), .loss = HPML_LOSS_MSE,
                .lr = 0.02f, .weight_decay = 0.5f, .decay_all = true });
            ENSURE(b);
        }
        for (int i = 0; i < 2; i++) {
            y[i] = of_a ? B : 0;
            for (int j = 0; j < 3; j++) y[i] += (of_a ? 1 : 2) * (double)X[3 * i + j] * W[j];
            for (int j = 0; j < 3; j++) g[j] += (of_a ? 1 : 2) * (y[i] - (double)T[i]) * (double)X[3 * i + j];
            g[3] += y[i] - (double)T[i];
        }
        for (int j = 0; j < 4; j++) {
            double *p = j < 3 ? &W[j] : &B;
            if (of_a) m[j] = 0.9 * m[j] + g[j], *p -= 0.05 * m[j];
            else if (j < 3) *p -= 0.02 * (g[j] + 0.5 * *p);
        }
        ENSURE(hpml_trainer_step(of_a ? a : b, X, T, 2, NULL) == HPML_OK);
        for (int j = 0; j < 3; j++) ENSURE_NEAR((double)w->data[j], W[j], 1e-5);
        ENSURE_NEAR((double)bias->data[0], B, 1e-5);
    }
    hpml_ctx_free(ctx);
}

TEST(learns_and_evaluates)
{
    hpml_ctx     *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .seed = 2 });
    hpml_dataset *d = blobs(ctx, 1000), *train = hpml_dataset_slice(d, 0, 803), *test = hpml_dataset_slice(d, 803, 197);
    hpml_trainer *t = classifier(ctx, 32, (hpml_trainer_desc){ .lr = 0.1f, .momentum = 0.9f });
    int64_t       confusion[9] = { 0 }, sum = 0;
    hpml_metrics  m = { .confusion = confusion };
    float         scores[197 * 3];
    ENSURE(hpml_trainer_fit(t, train, &(hpml_fit_desc){ .epochs = 5 }) == HPML_OK);
    ENSURE(hpml_trainer_step_count(t) == 5 * 26); /* ceil(803 / 32) */
    ENSURE(hpml_trainer_evaluate(t, test, &m) == HPML_OK && m.samples == 197 && m.accuracy > 0.98);
    for (int i = 0; i < 9; i++) sum += confusion[i];
    ENSURE(sum == 197);
    ENSURE(hpml_trainer_predict(t, test->x, 197, scores) == HPML_OK);
    for (int i = 0, right = 0; i < 197; i++) {
        float *s = scores + 3 * i;
        right += (s[1] > s[0] ? s[2] > s[1] ? 2 : 1 : s[2] > s[0] ? 2 : 0) == ((const int32_t *)test->y)[i];
        if (i == 196) ENSURE_NEAR(right / 197.0, m.accuracy, 1e-9);
    }
    hpml_ctx_free(ctx);
}

/* An autoencoder learns its input; a second input stays as it was set. */
TEST(a_loss_without_targets)
{
    hpml_ctx         *ctx = hpml_ctx_create(NULL);
    hpml_tensor      *in = hpml_input_2d(ctx, 4, 6), *more = hpml_input_2d(ctx, 4, 1);
    hpml_tensor      *y = hpml_linear(hpml_tanh(hpml_linear(in, 2, NULL)), 6, NULL);
    hpml_trainer_desc d = { .input = in, .output = y, .loss_tensor = hpml_mse(hpml_mul(y, more), in),
                            .optimizer = HPML_OPT_ADAM, .lr = 0.05f };
    hpml_step_info    first = { 0 }, last;
    const float       scale[4] = { 1, 2, 0.5f, 1 };
    float             x[24];
    ENSURE_ERROR(ctx, !hpml_trainer_create(ctx, &d), HPML_ERR_ARGUMENT, ".target is .input if there are no targets");
    d.target = in;
    hpml_trainer *t = hpml_trainer_create(ctx, &d);
    for (int i = 0; i < 24; i++) x[i] = (float)(i / 6 - 1) * (float)(i % 6 - 2) * 0.3f;
    ENSURE(hpml_tensor_set(more, scale, 4) == HPML_OK);
    for (int step = 0; step < 200; step++) ENSURE(hpml_trainer_step(t, x, x, 4, step ? &last : &first) == HPML_OK);
    ENSURE(last.loss < 0.1f * first.loss && last.accuracy == -1);
    char text[2000];
    ENSURE(hpml_summary_text(hpml_trainer_graph(t), text, sizeof text) > 0 && strstr(text, " mse ") &&
           !strstr(text, "huber"));
    hpml_ctx_free(ctx);
}

/* Two batches of 16 that make one update equal one batch of 32. */
TEST(accumulation_equals_the_larger_batch)
{
    float w[2][16];
    for (int k = 0; k < 2; k++) {
        hpml_ctx     *ctx = hpml_ctx_create(NULL);
        hpml_dataset *d   = blobs(ctx, 320);
        hpml_trainer_desc td = { .lr = 0.1f, .accumulate = k ? 2 : 1, .input = hpml_input_2d(ctx, k ? 16 : 32, 2) };
        hpml_trainer *t;
        td.output = hpml_linear(hpml_tanh(hpml_linear(td.input, 8, NULL)), 3, NULL);
        t = hpml_trainer_create(ctx, &td);
        ENSURE(hpml_trainer_fit(t, d, NULL) == HPML_OK && hpml_trainer_step_count(t) == 10);
        memcpy(w[k], hpml_param_at(ctx, 0)->data, sizeof w[k]);
        hpml_ctx_free(ctx);
    }
    for (int i = 0; i < 16; i++) ENSURE_NEAR(w[0][i], w[1][i], 1e-5);
}

/* So do short ones, in any order, clipped as well: each sample weighs as much as any other. */
TEST(accumulation_weighs_samples)
{
    static const int32_t parts[3][3] = { { 24, 0, 0 }, { 16, 3, 5 }, { 5, 16, 3 } };
    float                w[3][16], norm[3];
    for (int clip = 0; clip < 2; clip++) {
        for (int k = 0; k < 3; k++) {
            hpml_ctx      *ctx = hpml_ctx_create(NULL);
            hpml_dataset  *d   = blobs(ctx, 24);
            hpml_tensor   *in  = hpml_input_2d(ctx, 24, 2);
            hpml_trainer  *t   = hpml_trainer_create(ctx, &(hpml_trainer_desc){
                .input = in, .output = hpml_linear(hpml_tanh(hpml_linear(in, 8, NULL)), 3, NULL), .momentum = 0.9f,
                .lr = 0.1f, .accumulate = k ? 3 : 1, .clip_norm = clip ? 0.05f : 0 });
            hpml_step_info info;
            for (int step = 0; step < 4; step++)
                for (int i = 0, at = 0; i < 3 && parts[k][i]; at += parts[k][i++])
                    ENSURE(hpml_trainer_step(t, (const float *)d->x + 2 * at, (const int32_t *)d->y + at, parts[k][i],
                                             &info) == HPML_OK);
            ENSURE(info.step == 4);
            memcpy(w[k], hpml_param_at(ctx, 0)->data, sizeof w[k]), norm[k] = info.grad_norm;
            hpml_ctx_free(ctx);
        }
        for (int k = 1; k < 3; k++) {
            for (int i = 0; i < 16; i++) ENSURE_NEAR(w[k][i], w[0][i], 1e-6);
            ENSURE_NEAR(norm[k], norm[0], 1e-6); /* -1 without clip_norm */
        }
    }
}

TEST(a_nan_is_named)
{
    hpml_ctx     *ctx = hpml_ctx_create(NULL);
    hpml_trainer *t   = classifier(ctx, 2, (hpml_trainer_desc){ .lr = 0.1f });
    float         x[4] = { 1, NAN, 0, 0 };
    int32_t       y[2] = { 0, 5 };
    ENSURE(hpml_trainer_step(t, x, y, 2, NULL) == HPML_ERR_LABEL);
    hpml_ctx_clear_error(ctx);
    y[1] = 1;
    uint64_t before = hpml_param_hash(ctx);
    ENSURE(hpml_trainer_step(t, x, y, 2, NULL) == HPML_ERR_NONFINITE && strstr(hpml_ctx_error(ctx), "data"));
    hpml_ctx_clear_error(ctx);
    ENSURE(hpml_param_hash(ctx) == before);
    x[1] = 1;
    hpml_param_at(ctx, 2)->data[0] = INFINITY;
    ENSURE(hpml_trainer_step(t, x, y, 2, NULL) == HPML_ERR_NONFINITE &&
           strstr(hpml_ctx_error(ctx), hpml_param_at(ctx, 2)->name));
    hpml_ctx_free(ctx);
}

/* The layer whose result it is; of gradients, the one nearest to the loss: those behind it have theirs from there. */
TEST(a_nan_inside_is_named)
{
    static const hpml_act    inside[] = { HPML_ACT_LOG, HPML_ACT_SQRT }; /* of 0: a result, a slope without an end */
    static const char *const says[]   = { "step 1: the loss is", "step 1: the gradient norm is" };
    static const char *const names[]  = { "in the result of \"activation", "in the gradient of \"near." };
    const float              x[2] = { 1, 2 };
    for (int k = 0; k < 2; k++) {
        hpml_ctx     *ctx  = hpml_ctx_create(NULL);
        hpml_tensor  *in   = hpml_input_2d(ctx, 1, 2);
        hpml_tensor  *near = hpml_linear(hpml_linear(in, 3, &(hpml_linear_desc){ .name = "far" }), 3,
                                         &(hpml_linear_desc){ .name = "near" });
        hpml_tensor  *out  = hpml_linear(hpml_activation(hpml_scale(near, 0, 0), inside[k], 0), 2, NULL);
        hpml_trainer *t = hpml_trainer_create(ctx, &(hpml_trainer_desc){ .input = in, .output = out, .clip_norm = 1 });
        ENSURE_ERROR(ctx, t && hpml_trainer_step(t, x, (int32_t[]){ 1 }, 1, NULL) == HPML_ERR_NONFINITE,
                     HPML_ERR_NONFINITE, says[k]);
        ENSURE(hpml_trainer_step(t, x, (int32_t[]){ 1 }, 1, NULL) == HPML_ERR_NONFINITE &&
               strstr(hpml_ctx_error(ctx), names[k]));
        hpml_ctx_free(ctx);
    }
}

/* The step that meets a gradient without an end fails by itself, and keeps it out: whether parameters step by blocks
   with the backward pass, with their op, after several batches, or all at the end. */
static hpml_status steps_later(void *user, hpml_trainer *t, const hpml_moment *at)
{
    (void)user, (void)at;
    return hpml_trainer_apply(t, 0, 100);
}

TEST(a_gradient_without_an_end_stays_out)
{
    static float x[8 * 300];
    const int32_t y[8] = { 0, 1, 0, 1, 1, 1, 0, 0 };
    for (int i = 0; i < 8 * 300; i++) x[i] = (float)(i % 7) - 3;
    for (int k = 0; k < 7 * 4; k++) {
        hpml_ctx     *ctx  = hpml_ctx_create(&(hpml_ctx_desc){ .threads = 1 + k % 2 });
        hpml_tensor  *in   = hpml_input_2d(ctx, 8, 300);
        hpml_tensor  *far  = hpml_linear(in, 512, &(hpml_linear_desc){ .name = "far" });
        hpml_tensor  *root = hpml_activation(hpml_scale(far, 0, 0), HPML_ACT_SQRT, 0); /* of 0: slope 1 / 0 */
        hpml_trainer *t    = hpml_trainer_create(ctx, &(hpml_trainer_desc){ .input = in, .momentum = 0.9f,
            .output = hpml_linear(root, 2, NULL), .optimizer = (hpml_opt)(k / 4), .accumulate = k % 4 == 2 ? 2 : 1 });
        if (k % 4 == 3) hpml_trainer_attach(t, &(hpml_hooks){ .update = steps_later });
        if (k % 4 == 2) ENSURE(hpml_trainer_step(t, x, y, 8, NULL) == HPML_OK);
        ENSURE_ERROR(ctx, hpml_trainer_step(t, x, y, 8, NULL) == HPML_ERR_NONFINITE, HPML_ERR_NONFINITE,
                     "step 1: a gradient is nan: the first NaN or infinity is in the gradient of \"far.bias\"");
        ENSURE(hpml_trainer_step_count(t) == 0);
        for (int i = 0; i < hpml_param_count(ctx); i++)
            for (int64_t j = 0; j < hpml_tensor_count(hpml_param_at(ctx, i)); j++)
                ENSURE(isfinite(hpml_param_at(ctx, i)->data[j]));
        hpml_ctx_free(ctx);
    }
}

/* Of the kernels: finite numbers take the same step to the bit, with and without the check of the others. */
TEST(a_step_reports_numbers_that_are_not_finite)
{
    static const char *const cpus[] = { "scalar", "avx2", "avx512", "neon" };
    for (int k = 0; k < 4 * 8 * 2; k++) {
        hpml_ctx *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .threads = 1, .cpu = cpus[k % 4] });
        int32_t   bad = 0;
        float     w[2][37], g[2][37], m[2][37], v[2][37];
        if (!ctx || hpml_ctx_status(ctx) != HPML_OK) { hpml_ctx_free(ctx); continue; }
        hpml_update u[2];
        for (int i = 0; i < 2; i++) {
            for (int j = 0; j < 37; j++)
                w[i][j] = 1.0f / (float)(1 + j), g[i][j] = (float)(j % 5) - 2, m[i][j] = v[i][j] = 0.5f;
            u[i] = (hpml_update){ .opt = (hpml_opt)(k / 4 % 8), .n = 37, .w = w[i], .g = g[i], .state = { m[i], v[i] },
                .step = 2, .lr = 0.1f, .momentum = 0.9f, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f,
                .grad_scale = 0.5f, .weight_decay = 0.01f, .found_nonfinite = i ? &bad : NULL,
                .custom = &own_sgd };
        }
        ENSURE(hpml_backend_cpu()->update(NULL, ctx, u, 2) == HPML_OK && !bad && memcmp(w[0], w[1], sizeof w[0]) == 0);
        for (int j = 0; j < 37; j++) g[0][j] = g[1][j] = (float)(j % 5) - 2; /* LAMB's direction was there */
        g[0][36] = g[1][36] = k / 32 ? -(float)INFINITY : (float)NAN;
        ENSURE(hpml_backend_cpu()->update(NULL, ctx, u, 2) == HPML_OK && (bad & HPML_NONFINITE_GRADIENT));
        ENSURE(!isfinite(w[0][36]));
        bool normed = u[0].opt == HPML_OPT_LARS || u[0].opt == HPML_OPT_LAMB; /* a length of all of it */
        for (int i = 0; i < 37; i++)
            ENSURE(isfinite(w[1][i]) && isfinite(m[1][i]) && isfinite(v[1][i]) &&
                   (i == 36 || normed || w[0][i] == w[1][i]));
        hpml_ctx_free(ctx);
    }
}

static bool finite_parameters(hpml_ctx *ctx)
{
    for (int i = 0; i < hpml_param_count(ctx); i++)
        for (int64_t j = 0; j < hpml_tensor_count(hpml_param_at(ctx, i)); j++)
            if (!isfinite(hpml_param_at(ctx, i)->data[j])) return false;
    return true;
}

/* A finite gradient times a large rate, or squared, is infinite: the step that finds it fails, and keeps it out. */
TEST(an_update_to_infinity_fails_in_its_own_step)
{
    static float x[8 * 300];
    for (int i = 0; i < 8 * 300; i++) x[i] = 1e25f;
    for (int k = 0; k < 7 * 4; k++) {
        hpml_opt opt = (hpml_opt)(k / 4);
        if (opt == HPML_OPT_LARS) continue; /* its rate is divided by the gradient */
        hpml_ctx     *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .threads = 1 + k % 2 });
        hpml_tensor  *in  = hpml_input_2d(ctx, 8, 300);
        hpml_tensor  *out = hpml_linear(in, 512, &(hpml_linear_desc){ .name = "wide", .no_bias = true });
        hpml_trainer *t   = hpml_trainer_create(ctx, &(hpml_trainer_desc){ .input = in, .output = out, .target = in,
            .loss_tensor = hpml_mean(out, HPML_ALL_DIMS), .optimizer = opt, .lr = 1e25f,
            .accumulate = k % 4 == 2 ? 2 : 1 });
        if (k % 4 == 3) hpml_trainer_attach(t, &(hpml_hooks){ .update = steps_later });
        if (k % 4 == 2) ENSURE(hpml_trainer_step(t, x, x, 8, NULL) == HPML_OK);
        ENSURE_ERROR(ctx, hpml_trainer_step(t, x, x, 8, NULL) == HPML_ERR_NONFINITE, HPML_ERR_NONFINITE,
                     "step 1: an update is inf: the first NaN or infinity is in the step of parameter \"wide.weight\"");
        ENSURE(hpml_trainer_step_count(t) == 0 && finite_parameters(ctx));
        hpml_ctx_free(ctx);
    }
}

/* Finite numbers whose squares overflow are not what is named; and a norm of them has its value. */
TEST(large_numbers_are_not_taken_for_infinite_ones)
{
    for (int clip = 0; clip < 2; clip++) {
        hpml_ctx     *ctx = hpml_ctx_create(NULL);
        hpml_trainer *t   = classifier(ctx, 2, (hpml_trainer_desc){ .lr = 0.1f, .clip_norm = (float)clip });
        float         x[4] = { 1, 0, 0, NAN };
        int32_t       y[2] = { 0, 1 };
        hpml_param_at(ctx, 0)->data[0] = 3e38f;
        ENSURE_ERROR(ctx, hpml_trainer_step(t, x, y, 2, NULL) == HPML_ERR_NONFINITE, HPML_ERR_NONFINITE,
                     "step 1: the loss is nan: the first NaN or infinity is in the data of \"input\"");
        hpml_ctx_free(ctx);
    }
    float             far[2] = { -1e5f, -1e5f }, big[6] = { 1e20f, 0, 0, 1e20f, 0, 0 };
    hpml_step_info    info;
    hpml_ctx         *ctx = hpml_ctx_create(NULL);
    hpml_tensor      *in  = hpml_input_2d(ctx, 2, 3);
    hpml_trainer     *t   = hpml_trainer_create(ctx, &(hpml_trainer_desc){ .input = in, .clip_norm = 1, .lr = 0.5f,
        .output = hpml_linear(in, 1, &(hpml_linear_desc){ .no_bias = true }), .loss = HPML_LOSS_MSE });
    memset(hpml_param_at(ctx, 0)->data, 0, 12);
    ENSURE(hpml_trainer_step(t, big, far, 2, &info) == HPML_OK);
    ENSURE_NEAR(info.grad_norm / 2e25f, 1, 1e-6); /* its square is beyond a float */
    ENSURE_NEAR(hpml_param_at(ctx, 0)->data[0], -0.5, 1e-6);
    hpml_ctx_free(ctx);
}

/* By the loss (a batch at a time, of which the sample is found), by the output; with the check off as they come. */
TEST(evaluation_and_prediction_name_the_sample_that_is_not_finite)
{
    for (int off = 0; off < 2; off++) {
        hpml_ctx     *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .seed = 2 });
        hpml_dataset *d   = blobs(ctx, 100);
        hpml_trainer *t   = classifier(ctx, 32, (hpml_trainer_desc){ .no_finite_check = off });
        hpml_metrics  m   = { 0 };
        float         out[300];
        ENSURE(hpml_trainer_evaluate(t, d, &m) == HPML_OK && hpml_trainer_predict(t, d->x, 100, out) == HPML_OK);
        ((float *)(uintptr_t)d->x)[2 * 71] = (float)NAN, ((float *)(uintptr_t)d->x)[2 * 83] = (float)INFINITY;
        if (off) {
            ENSURE(hpml_trainer_evaluate(t, d, &m) == HPML_OK && !isfinite(m.loss) && m.samples == 100);
            ENSURE(hpml_trainer_predict(t, d->x, 100, out) == HPML_OK && !isfinite(out[3 * 71]));
        } else {
            ENSURE_ERROR(ctx, hpml_trainer_evaluate(t, d, &m) == HPML_ERR_NONFINITE, HPML_ERR_NONFINITE,
                         "evaluate: the loss of sample 71 is nan");
            ENSURE_ERROR(ctx, hpml_trainer_predict(t, d->x, 100, out) == HPML_ERR_NONFINITE, HPML_ERR_NONFINITE,
                         "predict: output 0 of sample 71 is nan");
            ENSURE(hpml_trainer_evaluate(t, hpml_dataset_slice(d, 0, 71), &m) == HPML_OK && isfinite(m.loss));
        }
        hpml_ctx_free(ctx);
    }
}

/* The last batch, which is short, has the NaN: after the error tensors have their whole shapes again. */
TEST(a_prediction_that_fails_leaves_whole_batches)
{
    float         in[200] = { 0 }, out[300];
    hpml_ctx     *ctx = hpml_ctx_create(NULL);
    hpml_tensor  *x   = hpml_input_2d(ctx, 32, 2), *y = hpml_linear(x, 3, NULL);
    hpml_trainer *t   = hpml_trainer_create(ctx, &(hpml_trainer_desc){ .input = x, .output = y });
    in[2 * 97] = (float)NAN;
    ENSURE_ERROR(ctx, hpml_trainer_predict(t, in, 100, out) == HPML_ERR_NONFINITE, HPML_ERR_NONFINITE, "sample 97");
    ENSURE(x->shape[0] == 32 && y->shape[0] == 32);
    hpml_ctx_free(ctx);
}

/* LAMB scales every parameter, biases too: the first direction is the gradient's signs, its length the root of 2. */
TEST(lamb_scales_biases_as_the_paper_does)
{
    hpml_ctx     *ctx = hpml_ctx_create(NULL);
    hpml_tensor  *in  = hpml_input_2d(ctx, 1, 2);
    hpml_tensor  *out = hpml_linear(in, 2, &(hpml_linear_desc){ .name = "l" });
    hpml_trainer *t   = hpml_trainer_create(ctx, &(hpml_trainer_desc){ .input = in, .output = out, .target = in,
        .loss_tensor = hpml_sum(out, HPML_ALL_DIMS), .optimizer = HPML_OPT_LAMB, .lr = 0.1f, .weight_decay = 0.3f });
    const float   x[2] = { 1, 1 };
    ENSURE(t && hpml_param_find(ctx, "l.bias")->param->no_decay);
    float *b = hpml_param_find(ctx, "l.bias")->data;
    b[0] = 3, b[1] = 4;
    ENSURE(hpml_trainer_step(t, x, x, 1, NULL) == HPML_OK);
    ENSURE_NEAR(b[0], 3 - 0.1 * 5 / sqrt(2), 1e-5);
    ENSURE_NEAR(b[1], 4 - 0.1 * 5 / sqrt(2), 1e-5);
    hpml_ctx_free(ctx);
}

#ifndef _WIN32
/* A child of fork goes on alone with what its parent made, to the same bits, and frees it; threads of the pool and of a
   loader sleep, or hold a mutex, in the parent only. */
static uint64_t go_on(hpml_ctx *ctx, hpml_trainer *t, hpml_loader *l)
{
    hpml_batch b;
    for (int i = 0; i < 7 && hpml_loader_next(l, &b); i++)
        if (hpml_trainer_step(t, b.x, b.y, b.samples, NULL) != HPML_OK) return 0;
    uint64_t hash = hpml_param_hash(ctx);
    hpml_ctx_free(ctx);
    return hash;
}

TEST(a_child_of_fork_goes_on_alone)
{
    for (int round = 0; round < 3; round++) {
        hpml_ctx     *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .threads = 4, .seed = 3 });
        hpml_dataset *d   = blobs(ctx, 4096);
        hpml_tensor  *in  = hpml_input_2d(ctx, 256, 2), *wide = hpml_tanh(hpml_linear(in, 256, NULL));
        hpml_trainer *t   = hpml_trainer_create(ctx, &(hpml_trainer_desc){ .input = in,
            .output = hpml_linear(hpml_tanh(hpml_linear(wide, 256, NULL)), 3, NULL), .lr = 0.1f });
        hpml_loader  *l = hpml_loader_create(ctx, d, &(hpml_loader_desc){ .batch = 256 });
        hpml_batch    b;
        int           pipes[2], status = 1;
        uint64_t      hash = 0;
        for (int i = 0; i < 3; i++)
            ENSURE(hpml_loader_next(l, &b) && hpml_trainer_step(t, b.x, b.y, b.samples, NULL) == HPML_OK);
        if (round > 0) usleep(30000); /* all sleep */
        ENSURE(pipe(pipes) == 0);
        pid_t child = fork();
        if (child == 0) {
            alarm(60);
            hash = go_on(ctx, t, l);
            _exit(write(pipes[1], &hash, sizeof hash) != (ssize_t)sizeof hash);
        }
        ENSURE(child > 0 && waitpid(child, &status, 0) == child && status == 0);
        ENSURE(read(pipes[0], &hash, sizeof hash) == (ssize_t)sizeof hash);
        close(pipes[0]), close(pipes[1]);
        ENSURE(hash != 0 && go_on(ctx, t, l) == hash);
    }
}

/* Nor does a loader that the child itself makes: Linux counts the threads as links of a folder. */
TEST(a_child_of_fork_starts_no_thread)
{
    hpml_ctx     *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .threads = 1 });
    hpml_dataset *d   = blobs(ctx, 64);
    int           status = 1;
    pid_t         child  = fork();
    if (child == 0) {
        struct stat  before = { 0 }, after = { 0 };
        hpml_batch   b;
        hpml_loader *l = hpml_loader_create(ctx, d, &(hpml_loader_desc){ .batch = 8 });
        alarm(60);
        stat("/proc/self/task", &before);
        bool good = hpml_loader_next(l, &b) && hpml_loader_next(l, &b);
        stat("/proc/self/task", &after);
        _exit(!good || before.st_nlink != after.st_nlink);
    }
    ENSURE(child > 0 && waitpid(child, &status, 0) == child && status == 0);
    hpml_ctx_free(ctx);
}
#endif

/* Settings and data that make no sense, and data that do not fit the model. */
TEST(what_does_not_fit_is_refused)
{
    static const hpml_trainer_desc bad[] = {
        { .optimizer = (hpml_opt)99 }, { .loss = (hpml_loss)99 }, { .beta1 = 1.5f }, { .eps = -1 },
        { .schedule = { .kind = HPML_SCHEDULE_COSINE } }, { .schedule = { .kind = HPML_SCHEDULE_STEP } }, { ._end = 1 },
        { .schedule.gamma = (float)NAN }, { .schedule.min_lr = -1 }, { .momentum = 2 }, { .nesterov = true },
        { .lr_rule = (hpml_lr_rule)7 }, { .lr_base_batch = -64 },
        { .schedule = { .kind = HPML_SCHEDULE_COSINE, .warmup_steps = 11, .total_steps = 10 } } };
    const float   x[20]    = { 0 };
    const int32_t y[30]    = { 0 };
    const int64_t shape[1] = { 2 };
    hpml_ctx     *ctx      = hpml_ctx_create(NULL);
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        ENSURE(!classifier(ctx, 4, bad[i]) && hpml_ctx_status(ctx) == HPML_ERR_ARGUMENT);
        hpml_ctx_clear_error(ctx);
    }
    hpml_trainer *t = classifier(ctx, 4, (hpml_trainer_desc){ .lr = 0.1f });
    hpml_dataset *d[] = {
        hpml_dataset_create(ctx, 10, HPML_DTYPE_F32, 1, shape, x, HPML_DTYPE_F32, 1, x),
        hpml_dataset_create(ctx, 10, HPML_DTYPE_I32, 1, shape, y, HPML_DTYPE_I32, 1, y),
        hpml_dataset_create(ctx, 10, HPML_DTYPE_F32, 1, shape, x, HPML_DTYPE_I32, 3, y),
        hpml_dataset_create(ctx, 5, HPML_DTYPE_F32, 2, (int64_t[]){ 2, 2 }, x, HPML_DTYPE_I32, 1, y) };
    for (int i = 0; i < 4; i++) {
        hpml_metrics m = { 0 };
        ENSURE(hpml_trainer_fit(t, d[i], NULL) == HPML_ERR_SHAPE &&
               strstr(hpml_ctx_error(ctx), "the model takes 2 of f32 and 1 of i32"));
        hpml_ctx_clear_error(ctx);
        ENSURE(hpml_trainer_evaluate(t, d[i], &m) == HPML_ERR_SHAPE);
        hpml_ctx_clear_error(ctx);
    }
    static const hpml_loader_desc few = { .batch = -3 };
    const hpml_fit_desc fit[] = { { ._begin = 1 }, { .epochs = -1 }, { .max_steps = -1 }, { .loader = &few } };
    for (int i = 0; i < 4; i++) {
        ENSURE(hpml_trainer_fit(t, blobs(ctx, 8), &fit[i]) == HPML_ERR_ARGUMENT);
        hpml_ctx_clear_error(ctx);
    }
    hpml_tensor *in = hpml_input_2d(ctx, 4, 2), *to = hpml_input(ctx, HPML_DTYPE_I32, 1, (int64_t[]){ 4 });
    hpml_tensor *wide = hpml_linear(in, 3, NULL), *loss = hpml_cross_entropy(wide, to, NULL);
    hpml_tensor *data = hpml_tensor_create_2d(ctx, 4, 2);
    hpml_trainer_desc wrong[] = {
        { .input = hpml_input_2d(ctx, 4, 2), .output = wide }, { .input = wide, .output = hpml_relu(wide) },
        { .input = data, .output = hpml_linear(data, 3, NULL) },
        { .input = in, .output = wide, .loss_tensor = loss, .target = hpml_input_tokens(ctx, 4, 1) } };
    for (int i = 0; i < 4; i++)
        ENSURE_ERROR(ctx, !hpml_trainer_create(ctx, &wrong[i]), HPML_ERR_ARGUMENT,
                     i < 3 ? "trainer: .input is f32 4x" : "trainer: .target is i32 4x1");
    float out[6];
    ENSURE_ERROR(ctx, hpml_trainer_apply(t, -5, 1000) == HPML_ERR_ARGUMENT, HPML_ERR_ARGUMENT, "number -5");
    ENSURE_ERROR(ctx, hpml_trainer_apply(t, 0, -1) == HPML_ERR_ARGUMENT, HPML_ERR_ARGUMENT, "-1 parameters");
    ENSURE(hpml_trainer_predict(t, x, -1, out) == HPML_ERR_ARGUMENT && strstr(hpml_ctx_error(ctx), "-1 samples"));
    hpml_ctx_free(ctx);
}

typedef struct log { int order[64], count, needs, updates, runs; } log_t;
static hpml_status on_grad(void *u, hpml_trainer *t, const hpml_moment *at)
{
    log_t *l = (log_t *)u;
    (void)t;
    l->order[l->count++] = at->param;
    return HPML_OK;
}
static hpml_status on_need(void *u, hpml_trainer *t, const hpml_moment *at)
{
    (void)t;
    ((log_t *)u)->needs += at->node != NULL && at->param >= 0;
    return HPML_OK;
}
static hpml_status on_update(void *u, hpml_trainer *t, const hpml_moment *at)
{
    (void)at;
    ((log_t *)u)->updates++;
    return hpml_trainer_apply(t, 0, 100);
}
static hpml_status on_run(void *u, hpml_trainer *t, const hpml_moment *at, int64_t n, float *loss)
{
    (void)at;
    ((log_t *)u)->runs++;
    return hpml_trainer_forward_backward(t, 0, n, 1, false, loss);
}

/* With hooks that do what a serial trainer does, the bits are those of a serial trainer. */
TEST(the_four_hooks)
{
    uint64_t hash[2];
    for (int k = 0; k < 2; k++) {
        hpml_ctx     *ctx = hpml_ctx_create(NULL);
        hpml_dataset *d   = blobs(ctx, 64);
        hpml_trainer *t   = classifier(ctx, 64, (hpml_trainer_desc){ .lr = 0.1f });
        log_t         l   = { .count = 0 };
        if (k) hpml_trainer_attach(t, &(hpml_hooks){ .user = &l, .run = on_run, .need = on_need, .grad = on_grad,
                                                      .update = on_update });
        ENSURE(hpml_trainer_fit(t, d, NULL) == HPML_OK);
        hash[k] = hpml_param_hash(ctx);
        if (k)
            ENSURE(l.count == 4 && l.runs == 1 && l.updates == 1 && l.needs == 8 && l.order[0] + l.order[1] == 5 &&
                   l.order[2] + l.order[3] == 1);
        hpml_ctx_free(ctx);
    }
    ENSURE(hash[0] == hash[1]);
}

/* A limit that is reached with the last batch of a pass: the pass is over, the next call makes the next one. */
TEST(a_limit_at_the_end_of_a_pass)
{
    hpml_ctx     *ctx = hpml_ctx_create(NULL);
    hpml_dataset *d   = blobs(ctx, 200);
    hpml_trainer *t   = classifier(ctx, 32, (hpml_trainer_desc){ .lr = 0.1f });
    ENSURE(hpml_trainer_fit(t, d, &(hpml_fit_desc){ .epochs = 10, .max_steps = 7 }) == HPML_OK &&
           hpml_trainer_step_count(t) == 7);
    ENSURE(hpml_trainer_fit(t, d, NULL) == HPML_OK && hpml_trainer_step_count(t) == 14);
    ENSURE(hpml_trainer_fit(t, d, &(hpml_fit_desc){ .max_steps = 3 }) == HPML_OK && hpml_trainer_step_count(t) == 17);
    ENSURE(hpml_trainer_fit(t, d, NULL) == HPML_OK && hpml_trainer_step_count(t) == 21); /* the rest of it */
    hpml_ctx_free(ctx);
}

typedef struct watcher { hpml_trainer *t; hpml_trainer_desc d; int calls, wrong, stop; } watcher;
static int on_step(const hpml_step_info *i, void *user)
{
    watcher *w = (watcher *)user;
    int      at = w->calls++;
    w->wrong += i->step != at + 1 || i->epoch != at / 7 || i->epoch_step != at % 7 + 1 || i->epoch_steps != 7;
    w->wrong += i->samples != (at % 7 == 6 ? 8 : 32) || i->lr != hpml_schedule_lr(&w->d.schedule, w->d.lr, at);
    w->wrong += !(i->loss > 0 && i->loss < 10) || !(i->accuracy >= 0 && i->accuracy <= 1) ||
                !(i->samples_per_second > 0) || !(i->seconds > 0);
    return w->calls == w->stop;
}

/* The callback gets every step, and may end the training; the next call continues there. */
TEST(a_callback_sees_every_step)
{
    for (int stop = 0; stop < 2; stop++) {
        hpml_ctx     *ctx = hpml_ctx_create(NULL);
        hpml_dataset *data = blobs(ctx, 200);
        watcher       w = { .stop = stop ? 3 : 0, .d.lr = 0.1f };
        w.d.schedule = (hpml_schedule){ .kind = HPML_SCHEDULE_COSINE, .warmup_steps = 3, .total_steps = 14 };
        hpml_fit_desc f = { .epochs = 2, .on_step = on_step, .user = &w };
        w.t = classifier(ctx, 32, w.d);
        ENSURE(hpml_trainer_fit(w.t, data, &f) == (stop ? HPML_ERR_STOPPED : HPML_OK) &&
               w.calls == (stop ? 3 : 14) && w.wrong == 0);
        ENSURE(hpml_trainer_step_count(w.t) == w.calls && hpml_ctx_status(ctx) == HPML_OK);
        if (stop) ENSURE(hpml_trainer_fit(w.t, data, &f) == HPML_OK && w.calls == 14 && w.wrong == 0);
        hpml_ctx_free(ctx);
    }
}

/* Weights after some steps of a model whose every op is dealt out to the threads. */
static uint64_t trained_by(int threads, hpml_opt opt)
{
    enum { B = 6, T = 64, C = 96, V = 131 };
    static int32_t x[B * T], y[B * T];
    hpml_ctx    *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .threads = threads, .seed = 3 });
    hpml_tensor *in = hpml_input_tokens(ctx, B, T), *h = hpml_embedding(in, V, C, NULL), *a;
    hpml_rng     r = { .seed = 4 };
    uint64_t     hash = 0;
    for (int i = 0; i < B * T; i++) x[i] = (int32_t)hpml_rng_below(&r, V), y[i] = (int32_t)hpml_rng_below(&r, V);
    a = hpml_attention(hpml_linear(hpml_layernorm(h, NULL), 3 * C, NULL), &(hpml_attention_desc){ .heads = 4 });
    h = hpml_add(h, hpml_dropout(hpml_linear(a, C, &(hpml_linear_desc){ .activation = HPML_ACT_GELU }), 0.1f));
    h = hpml_add(hpml_lstm(hpml_rmsnorm(h, NULL), C, NULL), hpml_mul(hpml_softmax(h), h));
    hpml_tensor *turned = hpml_permute(h, (int[]){ 0, 2, 1 }), *back = hpml_permute(turned, (int[]){ 0, 2, 1 });
    h = hpml_concat((hpml_tensor *[]){ hpml_silu(h), back }, 2, 2);
    hpml_trainer_desc d = { .input = in, .output = hpml_linear(h, V, NULL), .optimizer = opt, .lr = 0.01f,
                            .clip_norm = 0.5f, .label_smoothing = 0.1f, .custom_optimizer = own_row(opt) };
    hpml_trainer *t = hpml_trainer_create(ctx, &d);
    for (int step = 0; step < 2; step++) hpml_trainer_step(t, x, y, B, NULL);
    if (hpml_ctx_status(ctx) == HPML_OK) hash = hpml_param_hash(ctx);
    else printf("    %s\n", hpml_ctx_error(ctx));
    hpml_ctx_free(ctx);
    return hash;
}

TEST(bits_do_not_depend_on_threads)
{
    static const hpml_opt some[] = { HPML_OPT_SGD, HPML_OPT_ADAM, HPML_OPT_LAMB, HPML_OPT_CUSTOM };
    for (int k = 0; k < 4; k++) {
        uint64_t one = trained_by(1, some[k]);
        ENSURE(one != 0 && trained_by(2 + k, some[k]) == one);
    }
}

/* Weights, and a sum over the gradients, after three steps of wide layers, a narrow one and a matrix that one product
   reads twice. clip: a norm that is never reached, but makes all steps wait for the end of the backward pass. */
static uint64_t stepped(int threads, hpml_opt opt, float clip, int accumulate, int64_t samples, double *grads)
{
    enum { B = 20, IN = 301, MID = 401 };
    static float      x[B * IN];
    static int32_t    y[B];
    hpml_ctx         *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .threads = threads, .seed = 5 });
    hpml_linear_desc  act = { .activation = HPML_ACT_TANH };
    hpml_param_desc   turn = { .name = "w", .init = HPML_INIT_NORMAL, .ndim = 2, .shape = { 7, 7 } };
    hpml_tensor      *in = hpml_input_2d(ctx, B, IN), *w = hpml_param_create(ctx, &turn);
    hpml_tensor      *h = hpml_linear(hpml_linear(hpml_linear(in, MID, &act), MID, &act), 7, NULL);
    hpml_tensor      *out = hpml_matmul(h, hpml_matmul(w, w, false, true), false, false);
    hpml_trainer_desc d = { .input = in, .output = out, .optimizer = opt, .lr = 0.01f, .momentum = 0.9f,
                            .weight_decay = 0.01f, .clip_norm = clip, .accumulate = accumulate,
                            .custom_optimizer = own_row(opt) };
    uint64_t          hash = 0;
    hpml_trainer     *t = hpml_trainer_create(ctx, &d);
    for (int i = 0; i < B * IN; i++) x[i] = (float)(i * 37 % 101) / 101 - 0.5f;
    for (int i = 0; i < B; i++) y[i] = i % 7;
    for (int step = 0; step < 3 * accumulate; step++) hpml_trainer_step(t, x, y, samples, NULL);
    if (hpml_ctx_status(ctx) == HPML_OK) hash = hpml_param_hash(ctx);
    else printf("    %s\n", hpml_ctx_error(ctx));
    *grads = 0;
    for (int i = 0; hash && i < hpml_param_count(ctx); i++) {
        const hpml_tensor *p = hpml_param_at(ctx, i);
        for (int64_t k = 0; k < hpml_tensor_count(p); k++) *grads += (double)(k % 13 + 1) * (double)p->grad[k];
    }
    hpml_ctx_free(ctx);
    return hash;
}

/* Steps that parameters take during the backward pass, block by block, are those taken behind it, and leave the
   gradients as they are: on any threads, in short batches, with gradients that add up. */
TEST(early_steps_have_the_same_bits)
{
    for (int opt = HPML_OPT_SGD; opt <= HPML_OPT_CUSTOM; opt += SLOW_BUILD ? 3 : 1)
        for (int kind = 0; kind < 3; kind++) {
            double   late, early, two;
            uint64_t hash = stepped(1, (hpml_opt)opt, 1e20f, 1 + kind % 2, kind == 2 ? 13 : 20, &late);
            ENSURE(hash != 0 && stepped(1, (hpml_opt)opt, 0, 1 + kind % 2, kind == 2 ? 13 : 20, &early) == hash);
            ENSURE(stepped(2, (hpml_opt)opt, 0, 1 + kind % 2, kind == 2 ? 13 : 20, &two) == hash);
            ENSURE(opt == HPML_OPT_LAMB || (early == late && two == late && late != 0)); /* which spends them */
        }
}

/* |w w' - 1|^2 with w as both operands of a layer: what its step writes, its gradient still reads. */
static uint64_t orthogonal(int threads, float clip)
{
    enum { ROWS = 150, COLS = 1001 };
    static float      one[ROWS * ROWS];
    hpml_ctx         *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .threads = threads, .seed = 5 });
    hpml_param_desc   p = { .name = "w", .init = HPML_INIT_NORMAL, .ndim = 2, .shape = { ROWS, COLS } };
    hpml_tensor      *w = hpml_param_create(ctx, &p), *in = hpml_input_2d(ctx, ROWS, ROWS);
    hpml_tensor      *out = hpml_linear(w, ROWS, &(hpml_linear_desc){ .weight = w, .no_bias = true });
    hpml_trainer_desc d = { .input = in, .output = out, .target = in, .loss_tensor = hpml_mse(out, in), .lr = 50,
                            .clip_norm = clip };
    hpml_trainer     *t = hpml_trainer_create(ctx, &d);
    for (int i = 0; i < ROWS; i++) one[i * ROWS + i] = 1;
    for (int i = 0; i < 3; i++) hpml_trainer_step(t, one, one, ROWS, NULL);
    uint64_t hash = hpml_ctx_status(ctx) == HPML_OK ? hpml_param_hash(ctx) : 0;
    if (!hash) printf("    %s\n", hpml_ctx_error(ctx));
    hpml_ctx_free(ctx);
    return hash;
}

TEST(early_step_of_a_weight_that_is_its_own_input)
{
    uint64_t hash = orthogonal(1, 1e20f);
    for (int threads = 1; threads < 4; threads++) ENSURE(hash != 0 && orthogonal(threads, 0) == hash);
}

static uint64_t train_for(const char *load, const char *save, int64_t steps, hpml_opt opt, hpml_dtype store)
{
    hpml_ctx     *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .seed = 3, .activation_dtype = store });
    hpml_dataset *d   = blobs(ctx, 200);
    hpml_trainer *t   = classifier(ctx, 32, (hpml_trainer_desc){ .lr = 0.05f, .momentum = 0.9f, .optimizer = opt,
                                                                .custom_optimizer = own_row(opt) });
    uint64_t      hash;
    if (load) hpml_checkpoint_load(t, load);
    if (steps > 0) hpml_trainer_fit(t, d, &(hpml_fit_desc){ .epochs = 10, .max_steps = steps });
    if (save) hpml_checkpoint_save(t, save);
    hash = hpml_ctx_status(ctx) == HPML_OK ? hpml_param_hash(ctx) : 0;
    if (!hash) printf("    %s\n", hpml_ctx_error(ctx));
    hpml_ctx_free(ctx);
    return hash;
}

static int stop_at(const hpml_step_info *info, void *user) { return info->epoch_step == *(int64_t *)user; }

/* A pass that is stopped goes on where it was; stopped at its end it is over. */
TEST(a_pass_may_be_stopped)
{
    const float x[15] = { 1, 2, 3 }, y[5] = { 1 };
    for (int64_t at = 1; at <= 3; at++) {
        hpml_ctx     *ctx;
        hpml_trainer *t = line(&ctx, (hpml_trainer_desc){ .lr = 0.01f });
        hpml_dataset *d = hpml_dataset_create(ctx, 5, HPML_DTYPE_F32, 1, (int64_t[]){ 3 }, x, HPML_DTYPE_F32, 1, y);
        ENSURE(hpml_trainer_fit(t, d, &(hpml_fit_desc){ .on_step = stop_at, .user = &at }) == HPML_ERR_STOPPED &&
               hpml_trainer_step_count(t) == at);
        ENSURE(hpml_trainer_fit(t, d, NULL) == HPML_OK && hpml_trainer_step_count(t) == (at < 3 ? 3 : 6));
        ENSURE(hpml_tensor_count(hpml_trainer_settings(t)->input) == 6); /* the last batch was short */
        hpml_ctx_free(ctx);
    }
}

/* 10 steps, or 5, save, load in a new process, 5: the same bits (7 batches an epoch: it resumes inside one). */
TEST(resume_has_the_same_bits)
{
    char path[] = "/tmp/hpml_test_XXXXXX";
    int  fd = mkstemp(path);
    ENSURE(fd >= 0);
    close(fd);
    for (int k = 0; k <= HPML_OPT_CUSTOM + 2; k++) { /* every optimizer; bf16, f16 */
        hpml_opt   opt = (hpml_opt)(k > HPML_OPT_CUSTOM ? HPML_OPT_ADAM : k);
        hpml_dtype store = (hpml_dtype)(k > HPML_OPT_CUSTOM ? k - HPML_OPT_CUSTOM : 0);
        uint64_t   whole = train_for(NULL, NULL, 10, opt, store);
#ifdef _WIN32
        ENSURE(train_for(NULL, path, 5, opt, store) != 0);
#else
        pid_t      child = fork();
        int        status = 1;
        if (child == 0) _exit(train_for(NULL, path, 5, opt, store) == 0);
        waitpid(child, &status, 0);
        ENSURE(status == 0);
#endif
        ENSURE(whole != 0 && train_for(path, NULL, 5, opt, store) == whole);
    }
    remove(path);
}

/* A checkpoint of a training in halves holds the f32 masters: the same arrays as one in f32, and each goes on from the
   other's. */
TEST(checkpoints_do_not_depend_on_what_is_stored)
{
    char path[3][32];
    for (int store = 0; store < 3; store++) {
        snprintf(path[store], sizeof path[0], "/tmp/hpml_test_XXXXXX");
        int fd = mkstemp(path[store]);
        ENSURE(fd >= 0 && close(fd) == 0);
        uint64_t hash = train_for(NULL, path[store], 5, HPML_OPT_ADAM, (hpml_dtype)store);
        for (int other = 0; other < 3; other++) /* no step: what was loaded */
            ENSURE(hash != 0 && train_for(path[store], NULL, 0, HPML_OPT_ADAM, (hpml_dtype)other) == hash);
        ENSURE(train_for(path[store], NULL, 5, HPML_OPT_ADAM, HPML_DTYPE_F32) != 0);
    }
    hpml_ctx        *ctx = hpml_ctx_create(NULL);
    hpml_safetensor  a, b;
    for (int store = 1; store < 3; store++) {
        hpml_safetensors *f = hpml_safetensors_open(ctx, path[0]), *g = hpml_safetensors_open(ctx, path[store]);
        ENSURE(hpml_safetensors_count(f) == hpml_safetensors_count(g) && hpml_safetensors_count(f) == 12);
        for (int i = 0; hpml_safetensors_at(f, i, &a) && hpml_safetensors_at(g, i, &b); i++)
            ENSURE(strcmp(a.name, b.name) == 0 && b.dtype == HPML_DTYPE_F32 && a.bytes == b.bytes);
        hpml_safetensors_close(f), hpml_safetensors_close(g);
    }
    hpml_ctx_free(ctx);
    for (int store = 0; store < 3; store++) remove(path[store]);
}

/* A copy of a checkpoint with another name of an optimizer. */
static bool renamed(const char *from, const char *to, const char *name)
{
    static const char *const keys[] = { "hpml.optimizer", "hpml.seed", "hpml.step", "hpml.epoch", "hpml.epoch_step",
                                        "hpml.loss_scale", "hpml.scale_steps" };
    hpml_safetensor   t[16];
    hpml_meta         meta[7];
    int               n = 0;
    hpml_ctx         *ctx = hpml_ctx_create(NULL);
    hpml_safetensors *f = hpml_safetensors_open(ctx, from);
    while (n < 16 && hpml_safetensors_at(f, n, &t[n])) n++;
    for (int k = 0; k < 7; k++) meta[k].key = keys[k], meta[k].value = k ? hpml_safetensors_meta(f, keys[k]) : name;
    bool good = hpml_safetensors_save(ctx, to, t, n, meta, 7) == HPML_OK;
    hpml_safetensors_close(f);
    hpml_ctx_free(ctx);
    return good;
}

/* A checkpoint holds the names of the optimizer and of its states; files that name another one are refused, with the
   reason, and so are older files, which had numbers. */
TEST(checkpoints_of_another_optimizer_are_refused)
{
    static const struct { const char *name, *error; } cases[] = {
        { "5", "names its optimizer by a number (5), as files of older versions do, expected a name like \"own_" },
        { "lion", "was written by optimizer \"lion\" (not a built-in one), this trainer's is \"own_lamb\"" },
        { "adam", "was written by optimizer \"adam\", this trainer's is \"own_lamb\"" } };
    char             path[] = "/tmp/hpml_test_XXXXXX", other[64];
    hpml_safetensor  e;
    hpml_ctx        *ctx;
    int              fd = mkstemp(path);
    ENSURE(fd >= 0);
    close(fd);
    snprintf(other, sizeof other, "%s.old", path);
    hpml_trainer *t = line(&ctx, (hpml_trainer_desc){ .custom_optimizer = &own_lamb });
    ENSURE(hpml_checkpoint_save(t, path) == HPML_OK && hpml_checkpoint_load(t, path) == HPML_OK);
    hpml_safetensors *f = hpml_safetensors_open(ctx, path);
    ENSURE(hpml_safetensors_find(f, "opt.m.w.weight", &e) && hpml_safetensors_find(f, "opt.v.w.weight", &e));
    ENSURE(strcmp(hpml_safetensors_meta(f, "hpml.optimizer"), "own_lamb") == 0);
    hpml_safetensors_close(f);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        ENSURE(renamed(path, other, cases[i].name));
        ENSURE_ERROR(ctx, hpml_checkpoint_load(t, other) != HPML_OK, HPML_ERR_FORMAT, cases[i].error);
    }
    hpml_ctx_free(ctx);
    remove(path), remove(other);
}

/* Means of squares are checked for numbers below 0, other arrays are not: nor those that follow a parameter without
   state in the file. */
TEST(checkpoints_hold_negative_named_states)
{
    char  path[] = "/tmp/hpml_test_XXXXXX";
    float residual[3] = { -1, -2, -3 };
    int   fd = mkstemp(path);
    ENSURE(fd >= 0 && close(fd) == 0);
    hpml_ctx        *ctx = hpml_ctx_create(NULL);
    hpml_tensor     *in = hpml_input_2d(ctx, 4, 3), *out = hpml_batchnorm(hpml_linear(in, 2, NULL), NULL);
    hpml_trainer    *t = hpml_trainer_create(ctx, &(hpml_trainer_desc){
        .input = in, .output = out, .optimizer = HPML_OPT_ADAM }); /* the last parameters are running statistics */
    ENSURE(hpml_trainer_add_state(t, "residual", residual, 3) == HPML_OK);
    ENSURE(hpml_checkpoint_save(t, path) == HPML_OK && hpml_checkpoint_load(t, path) == HPML_OK);
    hpml_ctx_free(ctx);
    remove(path);
}

/* A user's rows of the formulas of built-in rows learn the same, with all that may stand between gradient and step. */
TEST(own_rows_step_as_built_in_rows)
{
    static const struct { const hpml_optimizer *own; hpml_opt built_in; float lr; } rows[] = {
        { &own_sgd, HPML_OPT_SGD, 0.05f }, { &own_lars, HPML_OPT_LARS, 10 }, { &own_lamb, HPML_OPT_LAMB, 0.05f } };
    for (int k = 0; k < 3 * 8; k++) {
        hpml_trainer_desc d = { .lr = rows[k / 8].lr, .weight_decay = k & 1 ? 0.1f : 0, .clip_norm = k & 2 ? 0.5f : 0,
                                .accumulate = k & 4 ? 2 : 1, .loss_scale = k & 4 ? 64 : 0,
                                .momentum = k & 2 ? 0.5f : 0, .schedule = { .warmup_steps = k & 1 ? 3 : 0 } };
        hpml_ctx *ctx[2];
        for (int own = 0; own < 2; own++) {
            d.optimizer = rows[k / 8].built_in, d.custom_optimizer = own ? rows[k / 8].own : NULL;
            hpml_trainer *t = line(&ctx[own], d);
            for (int step = 0; step < 10; step++) ENSURE(hpml_trainer_step(t, X, T, 2, NULL) == HPML_OK);
        }
        for (int j = 0; j < 3; j++)
            ENSURE_NEAR(hpml_param_at(ctx[0], 0)->data[j], hpml_param_at(ctx[1], 0)->data[j], 2e-6);
        hpml_ctx_free(ctx[0]), hpml_ctx_free(ctx[1]);
    }
}

/* A built-in row found by its name is the built-in optimizer; a `whole` row gets all numbers of a parameter at once. */
TEST(rows_are_found_by_name_and_may_want_whole_parameters)
{
    hpml_ctx *ctx;
    bool      whole = false;
    for (int i = 0; hpml_optimizer_at(i); i++) {
        const hpml_optimizer *row = hpml_optimizer_at(i);
        ENSURE(hpml_optimizer_find(row->name) == row && row->opt != HPML_OPT_CUSTOM);
        hpml_trainer *t = line(&ctx, (hpml_trainer_desc){ .custom_optimizer = row });
        ENSURE(t && hpml_trainer_settings(t)->optimizer == row->opt && hpml_trainer_settings(t)->lr == row->lr);
        hpml_ctx_free(ctx);
    }
    ENSURE(!hpml_optimizer_find("lion") && !hpml_optimizer_find(NULL) && !hpml_optimizer_at(-1));
    hpml_trainer *t = line(&ctx, (hpml_trainer_desc){ .custom_optimizer = &centred, .optimizer_user = &whole });
    const float  *w = hpml_param_at(ctx, 0)->data;
    float         before = w[0] + w[1] + w[2], first = w[0];
    ENSURE(hpml_trainer_step(t, X, T, 2, NULL) == HPML_OK && whole && w[0] != first);
    ENSURE_NEAR(w[0] + w[1] + w[2], before, 1e-6); /* a step without mean leaves their sum */
    hpml_ctx_free(ctx);
}

TEST(rows_that_lack_something_are_refused)
{
    static const struct { hpml_optimizer row; const char *error; } cases[] = {
        { { .step = own_sgd_step }, "has no name; set .name to 1 to 31 characters" },
        { { .name = "a name of more than 31 characters", .step = own_sgd_step }, "has too long a name" },
        { { .name = "adam", .step = own_sgd_step }, "\"adam\" has the name of a built-in row" },
        { { .name = "own" }, "\"own\" has no step; set .step to a function" },
        { { .name = "own", .step = own_sgd_step, .state_count = 5 }, "has a state_count of 5, expected 0 to 4" },
        { { .name = "own", .step = own_sgd_step, .state_count = -1 }, "has a state_count of -1" },
        { { .name = "own", .step = own_sgd_step, .state_count = 1 }, "the name of state 0 of 1 is \"\"" },
        { { .name = "own", .step = own_sgd_step, .state_count = 2, .states = { { .name = "m" }, { .name = "m" } } },
          "the name of state 1 of 2 is \"m\", expected 1 to 23 letters, digits or _, no two the same" },
        { { .name = "own", .step = own_sgd_step, .state_count = 1, .states = { { .name = "m.n" } } }, "is \"m.n\"" },
        { { .name = "own", .step = own_sgd_step, .whole = true }, "sets .whole without .direction" },
        { { .name = "own", .step = own_sgd_step, .layer_ratio = true }, "sets .layer_ratio without .direction" } };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        hpml_ctx *ctx;
        ENSURE(!line(&ctx, (hpml_trainer_desc){ .custom_optimizer = &cases[i].row }));
        ENSURE_ERROR(ctx, true, HPML_ERR_ARGUMENT, cases[i].error);
        hpml_ctx_free(ctx);
    }
    hpml_ctx *ctx;
    ENSURE(!line(&ctx, (hpml_trainer_desc){ .optimizer = HPML_OPT_CUSTOM }));
    ENSURE_ERROR(ctx, true, HPML_ERR_ARGUMENT, "set .optimizer to an HPML_OPT_ value, or .custom_optimizer");
    hpml_ctx_free(ctx);
}

/* A unit that died leaves moments that decay for ever; as denormals they would stay, and slow down each step. A NaN
   must not vanish. */
TEST(moments_decay_to_zero)
{
    static const hpml_opt opt[] = { HPML_OPT_SGD, HPML_OPT_RMSPROP, HPML_OPT_ADAM, HPML_OPT_ADAMW, HPML_OPT_LAMB };
    hpml_ctx *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .threads = 1 });
    for (int k = 0; k < 5; k++) {
        float w[37] = { 0 }, g[37] = { 0 }, m[37], v[37];
        for (int i = 0; i < 37; i++) m[i] = v[i] = 1e-34f;
        m[36] = v[36] = (float)NAN;
        for (int step = 2; step < 400; step++) {
            hpml_update u = { .opt = opt[k], .n = 37, .w = w, .g = g, .state = { m, v }, .step = (uint64_t)step,
                              .lr = 0.1f, .momentum = 0.9f, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f,
                              .grad_scale = 1 };
            hpml_backend_cpu()->update(NULL, ctx, &u, 1);
            memset(g, 0, sizeof g); /* LAMB's direction was there */
        }
        for (int i = 0; i < 36; i++) ENSURE(m[i] == 0 && (k == 0 || v[i] == 0));
        ENSURE(isnan(m[36]));
    }
    hpml_ctx_free(ctx);
}

TEST(trace_and_tables)
{
    char          path[] = "/tmp/hpml_trace_XXXXXX", text[4096], *all;
    int           fd = mkstemp(path);
    hpml_ctx     *ctx = hpml_ctx_create(NULL);
    hpml_dataset *d = blobs(ctx, 96);
    hpml_trainer *t = classifier(ctx, 32, (hpml_trainer_desc){ .lr = 0.1f });
    FILE         *f;
    size_t        n;
    ENSURE(fd >= 0 && hpml_trace_start(ctx, NULL) == HPML_OK);
    close(fd);
    hpml_profile_enable(hpml_trainer_graph(t), true);
    ENSURE(hpml_trainer_fit(t, d, NULL) == HPML_OK && hpml_trace_save(ctx, path) == HPML_OK);
    f   = fopen(path, "rb");
    all = (char *)calloc(1, 1 << 20);
    n   = fread(all, 1, (1 << 20) - 1, f);
    fclose(f);
    remove(path);
    ENSURE(n > 1000 && all[0] == '[' && strstr(all, "\"name\":\"linear0 backward\"") && strstr(all, "\n]\n"));
    free(all);
    ENSURE(hpml_profile_text(hpml_trainer_graph(t), text, sizeof text) > 0 && strstr(text, "linear0"));
    ENSURE(hpml_summary_text(hpml_trainer_graph(t), text, sizeof text) > 0 && strstr(text, "99 parameters"));
    ENSURE(hpml_trace_save(ctx, "/nonexistent/x") == HPML_ERR_WRITE && strstr(hpml_ctx_error(ctx), "/nonexistent/x"));
    hpml_ctx_clear_error(ctx);
    ENSURE(hpml_trace_save(ctx, NULL) == HPML_ERR_ARGUMENT);
    hpml_ctx_clear_error(ctx);
    ENSURE(hpml_trace_start(ctx, &(hpml_trace_desc){ .capacity = -1 }) == HPML_ERR_ARGUMENT);
    hpml_ctx_free(ctx);
}

/* A device of its own memory for tests of .host_optimizer: counts its bytes and copies; its `update` is an error. */
static size_t away_bytes, away_read, away_written;
static void *away_alloc(void *device, size_t bytes)
{
    away_bytes += bytes;
    return hpml_backend_cpu()->alloc(device, bytes);
}

static hpml_status away_read_from(void *device, void *host, const void *src, size_t bytes)
{
    away_read += bytes;
    return hpml_backend_cpu()->read(device, host, src, bytes);
}

static hpml_status away_write(void *device, void *dst, const void *host, size_t bytes)
{
    away_written += bytes;
    return hpml_backend_cpu()->write(device, dst, host, bytes);
}

static hpml_status away_update(void *device, hpml_ctx *ctx, const hpml_update *updates, int count)
{
    (void)device, (void)updates, (void)count;
    return hpml_ctx_fail(ctx, HPML_ERR_STATE, "the device steps");
}

static hpml_backend away_backend(void)
{
    hpml_backend b = *hpml_backend_cpu();
    b.name   = "away";
    b.host   = false;
    b.alloc  = away_alloc;
    b.read   = away_read_from;
    b.write  = away_write;
    b.update = away_update;
    return b;
}

/* Trains and saves a checkpoint to `path`, or loads it before; *m: planned memory. Returns the hash of the values. */
static uint64_t train_away(bool away, hpml_trainer_desc d, const char *path, bool load, hpml_memory *m)
{
    const hpml_backend device = away_backend();
    hpml_ctx          *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .seed = 4, .backend = away ? &device : NULL });
    away_bytes = 0;
    hpml_trainer *t = classifier(ctx, 32, d);
    hpml_graph_memory(hpml_trainer_graph(t), m);
    if (load) hpml_checkpoint_load(t, path);
    hpml_trainer_fit(t, blobs(ctx, 96), &(hpml_fit_desc){ .epochs = 2 + load });
    if (!load) hpml_checkpoint_save(t, path);
    if (hpml_ctx_status(ctx) != HPML_OK) printf("    %s\n", hpml_ctx_error(ctx));
    uint64_t hash = hpml_ctx_status(ctx) == HPML_OK ? hpml_param_hash(ctx) : 0;
    hpml_ctx_free(ctx);
    return hash;
}

/* With .host_optimizer a device has no states, and every optimizer, also of the user's own, makes the CPU's steps. */
TEST(a_host_optimizer_steps_for_a_device)
{
    const hpml_optimizer *const own[] = { &own_sgd, &own_lars, &own_lamb };
    for (int o = 0; o < HPML_OPT_CUSTOM + 3; o++) {
        hpml_trainer_desc d = { .lr = 0.02f, .momentum = 0.9f, .weight_decay = 0.01f, .host_optimizer = true };
        hpml_memory       here, plain, away;
        uint64_t          hash[4];
        if (o < HPML_OPT_CUSTOM) d.optimizer = (hpml_opt)o;
        else d.custom_optimizer = own[o - HPML_OPT_CUSTOM];
        if (o % 2) d.clip_norm = 0.3f;
        if (o % 3 == 1) d.accumulate = 2;
        hash[0] = train_away(false, d, "build/host_optimizer_0.safetensors", false, &here);
        hash[1] = train_away(true, d, "build/host_optimizer_1.safetensors", false, &away);
        const size_t taken = away_bytes;
        hash[2] = train_away(true, d, "build/host_optimizer_0.safetensors", true, &plain);
        hash[3] = train_away(false, d, "build/host_optimizer_1.safetensors", true, &plain);
        ENSURE(hash[0] != 0 && hash[0] == hash[1] && hash[2] != 0 && hash[2] == hash[3]);
        d.host_optimizer = false;
        ENSURE(train_away(false, d, "build/host_optimizer_1.safetensors", false, &plain) == hash[0]);
        ENSURE(memcmp(&plain, &here, sizeof plain) == 0);
        ENSURE(here.optimizer > 0 && away.optimizer == 0 && away.total == here.total - here.optimizer);
        const size_t device = away.total - away.products; /* packed matrices are in host memory */
        ENSURE(taken >= device && taken < device + 1024);
    }
    remove("build/host_optimizer_0.safetensors");
    remove("build/host_optimizer_1.safetensors");
}

/* A plan that is known when the model is recorded says so before the states have memory. */
TEST(a_host_optimizer_is_chosen_before_memory_is_taken)
{
    const hpml_backend device = away_backend();
    hpml_ctx          *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .seed = 4, .backend = &device });
    hpml_memory        before, after;
    hpml_ctx_defer(ctx, true);
    hpml_trainer *t = classifier(ctx, 32, (hpml_trainer_desc){ .optimizer = HPML_OPT_ADAM });
    hpml_graph_memory(hpml_trainer_graph(t), &before);
    ENSURE(hpml_trainer_host_optimizer(t) == HPML_OK && hpml_trainer_settings(t)->host_optimizer);
    hpml_graph_memory(hpml_trainer_graph(t), &after);
    ENSURE(before.optimizer > 0 && after.optimizer == 0 && after.total == before.total - before.optimizer);
    ENSURE(hpml_trainer_fit(t, blobs(ctx, 96), &(hpml_fit_desc){ .epochs = 1 }) == HPML_OK);
    ENSURE(hpml_trainer_host_optimizer(t) == HPML_OK); /* nothing changes */
    hpml_ctx_free(ctx);
    ctx = hpml_ctx_create(&(hpml_ctx_desc){ .backend = &device });
    t   = classifier(ctx, 32, (hpml_trainer_desc){ .optimizer = HPML_OPT_ADAM });
    ENSURE_ERROR(ctx, hpml_trainer_host_optimizer(t) != HPML_OK, HPML_ERR_STATE, "hpml_ctx_defer");
    hpml_ctx_free(ctx);
}

/* A step copies weights and gradients to the host, and weights back; a NaN is named. */
TEST(a_host_optimizer_copies_values_and_gradients)
{
    const hpml_backend device = away_backend();
    hpml_ctx          *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .seed = 4, .backend = &device });
    hpml_tensor       *x = hpml_input_2d(ctx, 2, 3), *y = hpml_linear(x, 4, NULL);
    hpml_trainer      *t = hpml_trainer_create(ctx, &(hpml_trainer_desc){
        .input = x, .output = y, .loss = HPML_LOSS_MSE, .optimizer = HPML_OPT_ADAM, .host_optimizer = true });
    const float        target[8] = { 1 };
    float              bad[6] = { 1, 2, NAN };
    ENSURE(hpml_trainer_step(t, X, target, 2, NULL) == HPML_OK);
    away_read = away_written = 0;
    ENSURE(hpml_trainer_apply(t, 0, 2) == HPML_OK);
    ENSURE(away_read == 2 * 16 * sizeof(float) && away_written == 16 * sizeof(float));
    ENSURE_ERROR(ctx, hpml_trainer_step(t, bad, target, 2, NULL) != HPML_OK, HPML_ERR_NONFINITE, "NaN");
    hpml_ctx_free(ctx);
}
