/* small FOLDER [SUFFIX]: predictions of programs that only predict. Built with training, the program saves models,
   whose layers have kernels of their own in small programs, and what they predict, in FOLDER; built with
   HPML_NO_TRAINING it loads them, and compares: with the same kernels, bit for bit. Models with ops that are not in the
   program must be refused. SUFFIX: the predictions are written to files KIND.SUFFIX in FOLDER. test_small.sh builds the
   program in all ways. */
#ifdef HPML_NO_TRAINING
#define HPML_IMPLEMENTATION
#endif
#include "../hpml.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <math.h>
enum { MODELS = 3, SAMPLES = 5, BATCH = 2, MOST = 4096 };
#if defined(HPML_NO_TRAINING) && defined(HPML_NO_SIMD) /* kernels of small programs, which add in another order */
#define TOLERANCE 1e-5
#else
#define TOLERANCE 0
#endif

/* Part of the error that loading model number `kind` gives in this program; NULL: the model loads. */
static const char *refusal(int kind)
{
#ifdef HPML_NO_CONVOLUTION
    if (kind < 2) return "op conv2d is not in this build: HPML_NO_CONVOLUTION is defined;";
#endif
#ifdef HPML_NO_SEQUENCES
    if (kind == 2) return "op embedding is not in this build: HPML_NO_SEQUENCES is defined;";
#endif
    (void)kind;
    return NULL;
}

#ifndef HPML_NO_TRAINING
static hpml_tensor *images(hpml_ctx *ctx, bool nhwc, hpml_tensor **x)
{
    *x = hpml_input_4d(ctx, BATCH, 4, 13, 10);
    hpml_tensor *h = nhwc ? hpml_to_layout(*x, HPML_NHWC) : *x;
    h = hpml_conv2d(h, 6, &(hpml_conv2d_desc){ .kernel_h = 3, .padding_h = 1, .activation = HPML_ACT_RELU });
    h = hpml_batchnorm(hpml_conv2d(h, 6, &(hpml_conv2d_desc){ .kernel_h = 3, .kernel_w = 2, .padding_h = 1,
                                                              .groups = 6 }), NULL); /* folded into the convolution */
    h = hpml_conv2d(h, 8, &(hpml_conv2d_desc){ .kernel_h = 1, .activation = HPML_ACT_TANH });
    h = hpml_conv2d(h, 34, &(hpml_conv2d_desc){ .kernel_h = 3, .stride_h = 2, .dilation_w = 2, .groups = 2 });
    h = hpml_max_pool2d(h, 2, 1, 0);
    h = hpml_conv_transpose2d(h, 5, &(hpml_conv2d_desc){ .kernel_h = 3, .stride_h = 2, .extra_h = 1 });
    if (nhwc) h = hpml_to_layout(h, HPML_NCHW);
    return hpml_softmax(hpml_linear(hpml_flatten(hpml_avg_pool2d(h, 3, 2, 1)), 7, NULL));
}

static hpml_tensor *text(hpml_ctx *ctx, hpml_tensor **x)
{
    *x = hpml_input_tokens(ctx, BATCH, 6);
    hpml_tensor *h = hpml_embedding(*x, 11, 16, &(hpml_embedding_desc){ .name = "tokens" });
    hpml_tensor *q = hpml_rotary(hpml_linear(hpml_layernorm(h, NULL), 48, NULL), &(hpml_rotary_desc){ .heads = 6,
                                 .rotated = 4 });
    h = hpml_add(h, hpml_attention(q, &(hpml_attention_desc){ .heads = 2 }));
    h = hpml_gru(hpml_lstm(hpml_rmsnorm(h, NULL), 9, NULL), 7, NULL);
    h = hpml_mul(hpml_clamp(h, -0.5f, 0.4f), hpml_sigmoid(hpml_dropout(h, 0.5f)));
    return hpml_log_softmax(hpml_matmul(hpml_linear(h, 16, NULL), hpml_param_find(ctx, "tokens.weight"), false, true));
}

static void save(int kind, const char *path)
{
    hpml_ctx    *ctx = hpml_ctx_create(NULL);
    hpml_tensor *x, *y = kind == 2 ? text(ctx, &x) : images(ctx, kind == 1, &x);
    hpml_param_init(ctx);
    hpml_model_save(ctx, path, &(hpml_model_desc){ .outputs = &y, .output_count = 1 });
    hpml_ctx_free(ctx);
}
#endif

#ifdef HPML_NO_TRAINING
/* True if the context has an error with this text; frees the context. */
static int has_error(hpml_ctx *ctx, const char *text)
{
    const int found = strstr(hpml_ctx_error(ctx), text) != NULL;
    hpml_ctx_free(ctx);
    return found;
}

/* Returns how many ops that are not in this program are accepted, each on a context of its own. */
static int ops_accepted(void)
{
    int          count = 0;
    hpml_ctx    *ctx = hpml_ctx_create(NULL);
    hpml_tensor *x   = hpml_input_2d(ctx, 2, 2);
    count += hpml_mse(x, hpml_scale(x, 2, 0)) != NULL;
    count += !has_error(ctx, "op mse is not in this build: HPML_NO_TRAINING is defined;");
#ifdef HPML_NO_CONVOLUTION
    ctx = hpml_ctx_create(NULL);
    count += hpml_max_pool2d(hpml_input_4d(ctx, 1, 2, 4, 4), 2, 0, 0) != NULL;
    count += !has_error(ctx, "op max_pool2d is not in this build: HPML_NO_CONVOLUTION is defined;");
    ctx = hpml_ctx_create(NULL);
    count += hpml_batchnorm(hpml_input_2d(ctx, 2, 2), NULL) != NULL;
    count += !has_error(ctx, "op batchnorm is not in this build: HPML_NO_CONVOLUTION is defined;");
#endif
#ifdef HPML_NO_SEQUENCES
    ctx = hpml_ctx_create(NULL);
    count += hpml_lstm(hpml_input_3d(ctx, 1, 2, 3), 4, NULL) != NULL;
    count += !has_error(ctx, "op lstm is not in this build: HPML_NO_SEQUENCES is defined;");
#endif
    return count;
}
#endif

/* What a program that only predicts refuses, each on a context of its own. Returns how many things are accepted. */
static int accepted(void)
{
    int count = 0;
#ifdef HPML_NO_TRAINING
    hpml_ctx     *ctx[4];
    int32_t       sum = 0;
    const int8_t  a = 2;
    const uint8_t b = 3;
    for (int i = 0; i < 4; i++) ctx[i] = hpml_ctx_create(NULL);
    hpml_tensor    *x = hpml_input_2d(ctx[0], 2, 2), *y = hpml_linear(x, 1, NULL);
    hpml_graph_desc d = { .outputs = &y, .output_count = 1 };
    count += hpml_graph_forward(hpml_graph_create(ctx[0], &d), true, 0) != HPML_ERR_UNSUPPORTED;
    count += hpml_ctx_set_group(ctx[1], HPML_AXIS_TENSOR, NULL) != HPML_ERR_UNSUPPORTED;
    x = hpml_input_2d(ctx[2], 2, 2);
    d.loss = hpml_mean(hpml_linear(x, 1, NULL), HPML_ALL_DIMS);
    count += hpml_graph_create(ctx[2], &d) != NULL;
    count += ops_accepted();
    hpml_status product = hpml_igemm(ctx[3], false, false, 1, 1, 1, &a, 1, &b, 1, false, &sum, 1);
#ifdef HPML_NO_SIMD
    count += product != HPML_ERR_UNSUPPORTED;
#else
    count += product != HPML_OK || sum != 6;
#endif
    for (int i = 0; i < 4; i++) hpml_ctx_free(ctx[i]);
#endif
    return count;
}

int main(int argc, char **argv)
{
    static float   y[SAMPLES * MOST], want[SAMPLES * MOST];
    static float   pixels[SAMPLES * MOST];
    static int32_t tokens[SAMPLES * MOST];
    for (int i = 0; i < SAMPLES * MOST; i++) {
        pixels[i] = (float)sin(0.7 * i) + (float)cos(0.01 * i * i);
        tokens[i] = i * i % 11;
    }
    for (int kind = 0; kind < MODELS && argc > 1; kind++) {
        char        path[512];
        hpml_ctx   *ctx = hpml_ctx_create(NULL);
        hpml_model *m;
        snprintf(path, sizeof path, "%s/%d.safetensors", argv[1], kind);
#ifndef HPML_NO_TRAINING
        save(kind, path);
#endif
        m = hpml_model_load(ctx, path, BATCH);
        if (refusal(kind)) {
            if (!m && strstr(hpml_ctx_error(ctx), refusal(kind)) && hpml_ctx_status(ctx) == HPML_ERR_UNSUPPORTED) {
                hpml_ctx_free(ctx);
                continue;
            }
            printf("model %d: expected \"%s\", got \"%s\"\n", kind, refusal(kind), hpml_ctx_error(ctx));
            return 1;
        }
        const hpml_tensor *out = hpml_model_output(m, 0);
        const int64_t      n   = out ? hpml_tensor_count(out) / out->shape[0] * SAMPLES : 0;
        const void *x = kind == 2 ? (const void *)tokens : pixels;
        if (n > SAMPLES * MOST || hpml_model_predict(m, x, SAMPLES, y) != HPML_OK) {
            printf("model %d: %s\n", kind, hpml_ctx_error(ctx));
            return 1;
        }
        snprintf(path, sizeof path, "%s/%d.%s", argv[1], kind, argc > 2 ? argv[2] : "floats");
        FILE *own = argc > 2 ? fopen(path, "wb") : NULL;
        if (own && (fwrite(y, sizeof *y, (size_t)n, own) != (size_t)n || fclose(own) != 0)) return 1;
        snprintf(path, sizeof path, "%s/%d.floats", argv[1], kind);
#ifdef HPML_NO_TRAINING
        FILE  *f     = fopen(path, "rb");
        double worst = 0;
        size_t read  = f ? fread(want, sizeof *want, (size_t)n, f) : 0;
        for (int64_t i = 0; i < n; i++) worst = fmax(worst, fabs((double)y[i] - (double)want[i]));
        if (read != (size_t)n || !(worst <= TOLERANCE)) {
            printf("model %d: %g from the predictions of the program that saved it\n", kind, worst);
            return 1;
        }
#else
        FILE *f = fopen(path, "wb");
        if (!f || fwrite(y, sizeof *y, (size_t)n, f) != (size_t)n) return 1;
        (void)want;
#endif
        fclose(f);
        hpml_ctx_free(ctx);
    }
    if (accepted() == 0) return 0;
    printf("%d things that are not in this program are not refused\n", accepted());
    return 1;
}
