/* What you learn: training without the trainer: you record a graph, run it forward and backward, and change the
   parameters yourself, by an optimizer of your own and with a loss made of ops. Difficulty 2 of 4.
   cc -O2 examples/26_own_loop.c -o own_loop -lm -lpthread && ./own_loop
   The net learns y = sin(3 x) + x / 2 from noisy samples, some of which are far off. The loss is the mean of log(cosh(y
   - target)), which such outliers hardly move. The optimizer is Lion (Chen et al. 2023): the sign of a momentum.
   prints   largest gradient error 2e-04 (finite differences), five lines "step  500  loss 0.2513",
            error without noise 0.107 (root of the mean square) */
#define HPML_IMPLEMENTATION
#include "../hpml.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { BATCH = 64, STEPS = 2000 };

/* log(cosh(e)) = |e| + log(1 + exp(-2 |e|)) - log 2; its derivative is tanh(e). e (B, 1); the result is one number. */
static hpml_tensor *log_cosh(hpml_tensor *e)
{
    hpml_tensor *size = hpml_activation(e, HPML_ACT_ABS, 0);                          /* (B, 1) */
    hpml_tensor *rest = hpml_activation(hpml_scale(size, -2, 0), HPML_ACT_EXP, 0);    /* exp(-2 |e|) */
    hpml_tensor *soft = hpml_activation(hpml_scale(rest, 1, 1), HPML_ACT_LOG, 0);
    return hpml_mean(hpml_scale(hpml_add(size, soft), 1, -logf(2)), HPML_ALL_DIMS);
}

/* One step of Lion for all parameters: w -= lr (sign(b1 m + (1 - b1) g) + decay w), then m = b2 m + (1 - b2) g. */
static void lion(hpml_ctx *ctx, float **momentum, float lr)
{
    const float b1 = 0.9f, b2 = 0.99f, decay = 0.01f;
    for (int p = 0; p < hpml_param_count(ctx); p++) {
        hpml_tensor *w = hpml_param_at(ctx, p); /* its values and gradient are host arrays on the CPU */
        for (int64_t i = 0; i < hpml_tensor_count(w); i++) {
            float *m = &momentum[p][i], g = w->grad[i], direction = b1 * *m + (1 - b1) * g;
            w->data[i] -= lr * ((float)((direction > 0) - (direction < 0)) + decay * w->data[i]);
            *m = b2 * *m + (1 - b2) * g;
        }
    }
}

/* Fills a batch: uniform x in [-1, 1), y with noise, and one sample of ten far off. */
static void samples(hpml_ctx *ctx, int step, float *x, float *y)
{
    hpml_rng rng = { .seed = hpml_ctx_seed(ctx), .counter = (uint64_t)step * 8 * BATCH };
    for (int i = 0; i < BATCH; i++) {
        x[i] = 2 * hpml_rng_uniform(&rng) - 1;
        y[i] = sinf(3 * x[i]) + x[i] / 2 + 0.05f * hpml_rng_normal(&rng);
        if (hpml_rng_below(&rng, 10) == 0) y[i] += 3;
    }
}

static hpml_status train(hpml_ctx *ctx)
{
    hpml_tensor *x = hpml_input_2d(ctx, BATCH, 1), *target = hpml_input_2d(ctx, BATCH, 1); /* (B, 1) each */
    hpml_tensor *h = hpml_tanh(hpml_linear(hpml_tanh(hpml_linear(x, 32, NULL)), 32, NULL)); /* (B, 32) */
    hpml_tensor *y = hpml_linear(h, 1, NULL);                                               /* (B, 1) */
    hpml_graph_desc d = { .output_count = 1, .outputs = &y, .loss = log_cosh(hpml_sub(y, target)) };
    hpml_graph     *g = hpml_graph_create(ctx, &d);
    float           loss = 0, xs[BATCH], ys[BATCH], *momentum[8] = { NULL };
    if (hpml_graph_alloc(g) != HPML_OK) return hpml_ctx_status(ctx);
    for (int p = 0; p < hpml_param_count(ctx); p++) /* the context frees it */
        momentum[p] = (float *)hpml_ctx_alloc(ctx, (size_t)hpml_tensor_count(hpml_param_at(ctx, p)) * 4, NULL);
    for (int step = 0; step <= STEPS && hpml_ctx_status(ctx) == HPML_OK; step++) {
        samples(ctx, step, xs, ys);
        hpml_tensor_set(x, xs, BATCH);
        hpml_tensor_set(target, ys, BATCH);
        if (step == 0) printf("largest gradient error %.0e (finite differences)\n", hpml_check_grad(g, 0, 20));
        hpml_graph_forward(g, true, (uint64_t)step);
        hpml_graph_backward(g, 1, false);
        hpml_tensor_get(d.loss, &loss, 1);
        if (step % 500 == 0) printf("step %4d  loss %.4f\n", step, (double)loss);
        lion(ctx, momentum, step < STEPS / 2 ? 1e-3f : 1e-4f);
    }
    for (int i = 0; i < BATCH; i++) xs[i] = -1 + 2 * (float)i / BATCH;
    hpml_tensor_set(x, xs, BATCH);
    hpml_graph_forward(g, false, 0);
    hpml_tensor_get(y, ys, BATCH);
    double error = 0;
    for (int i = 0; i < BATCH; i++) error += pow((double)ys[i] - sin(3 * (double)xs[i]) - (double)xs[i] / 2, 2) / BATCH;
    printf("error without noise %.3f (root of the mean square)\n", sqrt(error));
    return hpml_ctx_status(ctx);
}

int main(void)
{
    hpml_ctx   *ctx    = hpml_ctx_create(&(hpml_ctx_desc){ .seed = 1, .threads = 1, .log = hpml_log_stderr });
    hpml_status status = train(ctx);
    hpml_ctx_free(ctx);
    return status != HPML_OK;
}
