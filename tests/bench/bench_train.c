/* Training steps a second of four models, on the data of zeros and ones that costs what real data cost. One model a
   run: bench_train mlp|lenet|cifar|gpt [threads] prints
   "samples/s GFLOP/s fraction-of-FMA-peak milliseconds-to-the-end-of-the-first-step". */
#define HPML_IMPLEMENTATION
#include "../../hpml.h"
#include "peak.h"

static hpml_tensor *conv(hpml_tensor *x, int64_t out)
{
    hpml_conv2d_desc c = { .kernel_h = 3, .padding_h = 1, .no_bias = true };
    hpml_norm_desc   n = { .activation = HPML_ACT_RELU };
    return hpml_max_pool2d(hpml_batchnorm(hpml_conv2d(x, out, &c), &n), 2, 0, 0);
}

static hpml_tensor *record(const char *model, hpml_ctx *ctx, hpml_tensor **in)
{
    hpml_linear_desc relu = { .activation = HPML_ACT_RELU }, gelu = { .activation = HPML_ACT_GELU };
    hpml_tensor     *x;
    if (strcmp(model, "mlp") == 0) {
        *in = x = hpml_input_2d(ctx, 64, 784);
        return hpml_linear(hpml_linear(hpml_linear(x, 512, &relu), 256, &relu), 10, NULL);
    }
    if (strcmp(model, "lenet") == 0) {
        hpml_conv2d_desc c = { .kernel_h = 5, .activation = HPML_ACT_RELU };
        *in = hpml_input_4d(ctx, 64, 1, 28, 28);
        x = hpml_max_pool2d(hpml_conv2d(*in, 20, &c), 2, 0, 0);
        x = hpml_max_pool2d(hpml_conv2d(x, 50, &c), 2, 0, 0);
        return hpml_linear(hpml_linear(hpml_flatten(x), 500, &relu), 10, NULL);
    }
    if (strcmp(model, "cifar") == 0) {
        *in = hpml_input_4d(ctx, 64, 3, 32, 32);
        return hpml_linear(hpml_flatten(conv(conv(conv(*in, 32), 64), 128)), 10, NULL);
    }
    *in = hpml_input_tokens(ctx, 16, 64);
    x   = hpml_embedding(*in, 65, 128, NULL);
    for (int l = 0; l < 4; l++) {
        hpml_tensor *a = hpml_attention(hpml_linear(hpml_layernorm(x, NULL), 384, NULL),
                                        &(hpml_attention_desc){ .heads = 4 });
        x = hpml_add(x, hpml_linear(a, 128, NULL));
        x = hpml_add(x, hpml_linear(hpml_linear(hpml_layernorm(x, NULL), 512, &gelu), 128, NULL));
    }
    return hpml_linear(hpml_layernorm(x, NULL), 65, NULL);
}

int main(int argc, char **argv)
{
    double        born = hpml_now();
    hpml_ctx     *ctx  = hpml_ctx_create(&(hpml_ctx_desc){ .threads = argc > 2 ? atoi(argv[2]) : 2 });
    hpml_tensor  *in = NULL, *out = record(argc > 1 ? argv[1] : "mlp", ctx, &in);
    hpml_trainer *t =
        hpml_trainer_create(ctx, &(hpml_trainer_desc){ .input = in, .output = out, .lr = 1e-4f, .momentum = 0.9f });
    int64_t       batch = in ? in->shape[0] : 1, steps = 0;
    int64_t       labels = out ? hpml_tensor_count(out) / out->shape[out->ndim - 1] : 1;
    float        *x = (float *)calloc((size_t)hpml_tensor_count(in), 4);
    int32_t      *y = (int32_t *)calloc((size_t)labels, 4);
    double        start, seconds, first, gflops, peak = 0;
    char          text[8192];
    for (int64_t i = 0; in && in->dtype == HPML_DTYPE_F32 && i < hpml_tensor_count(in); i++)
        x[i] = (float)(i * 37 % 11) / 11;
    hpml_trainer_step(t, x, y, batch, NULL);
    first = hpml_now() - born;
    for (int i = 0; i < 5; i++) hpml_trainer_step(t, x, y, batch, NULL);
    for (start = hpml_now(); (seconds = hpml_now() - start) < 1.5 && hpml_ctx_status(ctx) == HPML_OK; steps++)
        hpml_trainer_step(t, x, y, batch, NULL);
    if (hpml_ctx_status(ctx) != HPML_OK) return fprintf(stderr, "%s\n", hpml_ctx_error(ctx)), 1;
    gflops = 1e-9 * (double)steps / seconds *
             (hpml_graph_flops(hpml_trainer_graph(t), false) + hpml_graph_flops(hpml_trainer_graph(t), true));
    for (int i = 0; i < 20; i++) peak = fmax(peak, peak_gflops() * hpml_ctx_threads(ctx));
    printf("%.1f %.1f %.3f %.1f\n", (double)(steps * batch) / seconds, gflops,
           peak > 0 ? gflops / peak : 0, 1e3 * first);
    if (argc > 3) {
        hpml_profile_enable(hpml_trainer_graph(t), true);
        for (int i = 0; i < 30; i++) hpml_trainer_step(t, x, y, batch, NULL);
        hpml_profile_text(hpml_trainer_graph(t), text, sizeof text);
        fputs(text, stderr);
    }
    hpml_ctx_free(ctx);
    free(x);
    free(y);
    return 0;
}
