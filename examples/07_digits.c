/* What you learn: a convolutional network in one file: data, model, trainer, evaluation. Difficulty 1 of 4.
   cc -O2 examples/07_digits.c -o digits -lm -lpthread && ./digits          (or ./digits FOLDER with MNIST's IDX files)
   prints: a line for each of 3 passes over the data, then: test accuracy 9x.xx % on 1000 digits */
#define HPML_IMPLEMENTATION
#include "../hpml.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Seven-segment digits of 16 x 16 pixels, shifted at random, with noise. */
static hpml_dataset *draw_digits(hpml_ctx *ctx, int64_t count, uint64_t seed)
{
    static const int lit[10] = { 0x77, 0x24, 0x5d, 0x6d, 0x2e, 0x6b, 0x7b, 0x25, 0x7f, 0x6f }; /* bit s: segment s */
    static const int segment[7][4] = { /* row, column, height, width */
        { 0, 0, 1, 6 }, { 0, 0, 6, 1 }, { 0, 5, 6, 1 }, { 5, 0, 1, 6 }, { 5, 0, 6, 1 }, { 5, 5, 6, 1 },
        { 10, 0, 1, 6 } };
    const int64_t shape[3] = { 1, 16, 16 };
    hpml_rng      rng      = { .seed = seed };
    uint8_t      *x        = (uint8_t *)malloc((size_t)count * 256); /* (count, 16, 16) */
    int32_t      *y        = (int32_t *)malloc((size_t)count * sizeof *y);
    for (int64_t i = 0; x && y && i < count; i++) {
        uint8_t *image = x + 256 * i;
        int64_t  top = hpml_rng_below(&rng, 5), left = hpml_rng_below(&rng, 10);
        y[i] = (int32_t)hpml_rng_below(&rng, 10);
        for (int p = 0; p < 256; p++) image[p] = (uint8_t)hpml_rng_below(&rng, 140);
        for (int s = 0; s < 7; s++) {
            uint8_t *at = image + (top + segment[s][0]) * 16 + left + segment[s][1];
            bool     on = lit[y[i]] >> s & 1;
            for (int r = 0; on && r < segment[s][2]; r++) memset(at + 16 * r, 200, (size_t)segment[s][3]);
        }
    }
    hpml_dataset *d = hpml_dataset_create(ctx, count, HPML_DTYPE_U8, 3, shape, x, HPML_DTYPE_I32, 1, y);
    free(x);
    free(y);
    return d;
}

/* MNIST's training files (name "train") or test files ("t10k") in a folder. */
static hpml_dataset *load_mnist(hpml_ctx *ctx, const char *folder, const char *name)
{
    char images[512], labels[512];
    snprintf(images, sizeof images, "%s/%s-images-idx3-ubyte", folder, name);
    snprintf(labels, sizeof labels, "%s/%s-labels-idx1-ubyte", folder, name);
    return hpml_dataset_load_idx(ctx, images, labels);
}

int main(int argc, char **argv)
{
    hpml_ctx     *ctx   = hpml_ctx_create(&(hpml_ctx_desc){ .seed = 1, .log = hpml_log_stderr });
    hpml_dataset *train = argc > 1 ? load_mnist(ctx, argv[1], "train") : draw_digits(ctx, 4000, 1);
    hpml_dataset *test  = argc > 1 ? load_mnist(ctx, argv[1], "t10k") : draw_digits(ctx, 1000, 2);
    int64_t       side  = train ? train->x_shape[1] : 0;

    hpml_conv2d_desc relu = { .kernel_h = 5, .padding_h = 2, .activation = HPML_ACT_RELU };
    hpml_tensor     *x    = hpml_input_4d(ctx, 64, 1, side, side);         /* (B, 1, H, W) */
    hpml_tensor     *h    = hpml_max_pool2d(hpml_conv2d(x, 8, &relu), 2, 0, 0);  /* (B, 8, H/2, W/2) */
    h                     = hpml_max_pool2d(hpml_conv2d(h, 16, &relu), 2, 0, 0); /* (B, 16, H/4, W/4) */
    hpml_tensor     *y    = hpml_linear(hpml_flatten(h), 10, NULL);        /* (B, 10) */

    hpml_trainer_desc desc = { .input = x, .output = y, .lr = 0.05f, .momentum = 0.9f };
    hpml_trainer     *t    = hpml_trainer_create(ctx, &desc);
    hpml_metrics      m    = { 0 };
    for (int epoch = 1; epoch <= 3 && hpml_trainer_fit(t, train, NULL) == HPML_OK; epoch++) {
        hpml_trainer_evaluate(t, train, &m);
        printf("pass %d: loss %.4f, accuracy %.2f %%\n", epoch, m.loss, 100 * m.accuracy);
    }
    if (hpml_trainer_evaluate(t, test, &m) == HPML_OK)
        printf("test accuracy %.2f %% on %lld digits\n", 100 * m.accuracy, (long long)m.samples);
    hpml_status status = hpml_ctx_status(ctx);
    hpml_ctx_free(ctx);
    return status != HPML_OK;
}
