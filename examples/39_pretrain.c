/* What you learn: greedy pretraining, layer by layer, with stacked autoencoders (Bengio et al. 2007): digits without
   labels teach a net its layers, and a few digits with labels teach it their names. Difficulty 2 of 4.
   cc -O2 examples/39_pretrain.c -o pretrain -lm -lpthread && ./pretrain [seed]
   Stage s adds layer s and a decoder behind it, and learns to give back what layer s - 1 computes; the layers below are
   frozen. Stage 0 gives back the pixels, of which dropout has set 30 % to 0 (Vincent et al. 2008, "denoising"). Then a
   classifier starts from these layers and learns from all labels, or from 200; another one starts from random values.
   prints   for each of 3 stages the error on other digits than those learned, before and after, such as 0.72 -> 0.22;
            for 4000 and 200 labels the accuracy from random and from pretrained layers: 1 and 3 points more
   exit 1 with a sentence if the error of a stage is not halved, or pretraining costs more than 0.3 points of accuracy,
   or does not help where labels are few. */
#define HPML_IMPLEMENTATION
#include "../hpml.h"
#include "digits.h"
#include <stdio.h>
#include <stdlib.h>

enum { BATCH = 100, LEARN = 4000, TESTED = 2000, FEW = 200, DRAWS = 3, STAGES = 3 };
enum { CLASSES = 10, PIXELS = DIGITS_PIXELS };
static const int64_t width[STAGES + 1] = { PIXELS, 128, 64, 32 };
static const float   rate              = 2e-3f;

/* Records the first layers of a net, with parameters "net.0.weight", "net.0.bias" and so on; those that exist are used
   again (hpml_share). */
static hpml_tensor *encode(hpml_tensor *x, const char *net, int layers)
{
    for (int s = 0; s < layers; s++) {
        char             name[32];
        hpml_linear_desc d = { .name = name, .activation = HPML_ACT_TANH };
        snprintf(name, sizeof name, "%s.%d", net, s);
        x = hpml_linear(x, width[s + 1], &d); /* (B, width[s + 1]) */
    }
    return x;
}

/* Digits as samples whose targets are their own pixels, from 0 to 1. */
static hpml_dataset unlabelled(const hpml_dataset *digits, float *x)
{
    for (int64_t i = 0; i < digits->count * PIXELS; i++) x[i] = (float)((const uint8_t *)digits->x)[i] / 255;
    return (hpml_dataset){ .ctx = digits->ctx, .count = digits->count, .x_dtype = HPML_DTYPE_F32, .x_ndim = 1,
                           .x_shape = { PIXELS }, .x = x, .y_dtype = HPML_DTYPE_F32, .y_size = PIXELS, .y = x };
}

/* Trains layer s of the net "stack", then freezes it. Returns whether the error has fallen to less than a half. */
static bool stage(hpml_ctx *ctx, int s, hpml_dataset *learn, hpml_dataset *test)
{
    char              pattern[32], name[32];
    hpml_metrics      before = { 0 }, after = { 0 };
    hpml_linear_desc  layer = { .name = name, .activation = HPML_ACT_TANH };
    hpml_trainer_desc d = { .optimizer = HPML_OPT_ADAM, .lr = rate };
    snprintf(name, sizeof name, "stack.%d", s);
    snprintf(pattern, sizeof pattern, "stack.%d.*", s);
    hpml_tensor *x    = hpml_input_2d(ctx, BATCH, PIXELS);        /* (B, 784) */
    hpml_tensor *want = encode(x, "stack", s);                    /* (B, width[s]) */
    hpml_tensor *in   = s == 0 ? hpml_dropout(want, 0.3f) : want; /* (B, width[s]) */
    d.input       = x;
    d.target      = x; /* the data's targets, the pixels, go to the input as well */
    d.output      = hpml_linear(hpml_linear(in, width[s + 1], &layer), width[s], NULL); /* (B, width[s]) */
    d.loss_tensor = s == 0 ? hpml_bce_with_logits(d.output, want) : hpml_mse(d.output, want);
    hpml_trainer *t = hpml_trainer_create(ctx, &d);
    hpml_trainer_evaluate(t, test, &before);
    hpml_trainer_fit(t, learn, &(hpml_fit_desc){ .epochs = s == 0 ? 5 : 8 });
    hpml_trainer_evaluate(t, test, &after);
    hpml_params_group(ctx, pattern, &(hpml_param_group){ .freeze = true });
    printf("stage %d, %3d numbers to %3d and back: error %.4f -> %.4f\n", s, (int)width[s], (int)width[s + 1],
           before.loss, after.loss);
    return after.loss < 0.5 * before.loss;
}

/* Trains a classifier, whose layers begin with the values of the net "stack" or with random values. Returns the percent
   of the test's digits that it classifies right. */
static double classify(const char *net, bool pretrained, hpml_dataset *learn, hpml_dataset *test)
{
    hpml_ctx         *ctx = test->ctx;
    hpml_tensor      *x = hpml_input_2d(ctx, BATCH, PIXELS);                  /* (B, 784) */
    hpml_tensor      *y = hpml_linear(encode(x, net, STAGES), CLASSES, NULL); /* (B, 10) */
    hpml_trainer_desc d = { .input = x, .output = y, .optimizer = HPML_OPT_ADAM, .lr = rate };
    hpml_trainer     *t = hpml_trainer_create(ctx, &d);
    hpml_metrics      m = { 0 };
    for (int i = 0; i < 2 * STAGES && pretrained && t; i++) {
        char from[32], to[32];
        snprintf(from, sizeof from, "stack.%d.%s", i / 2, i % 2 ? "bias" : "weight");
        snprintf(to, sizeof to, "%s.%d.%s", net, i / 2, i % 2 ? "bias" : "weight");
        hpml_tensor_copy(hpml_param_find(ctx, to), hpml_param_find(ctx, from));
    }
    hpml_trainer_fit(t, learn, &(hpml_fit_desc){ .epochs = learn && learn->count == FEW ? 40 : 10 });
    hpml_trainer_evaluate(t, test, &m);
    return 100 * m.accuracy;
}

/* Accuracy with `count` labels, from random layers, mean[0], and from pretrained layers, mean[1]; where labels are few,
   the mean over several choices of labelled digits, because single results differ by points. */
static void compare(hpml_dataset *learn, hpml_dataset *test, int64_t count, double mean[2])
{
    const int draws = count == FEW ? DRAWS : 1;
    mean[0] = 0;
    mean[1] = 0;
    for (int k = 0; k < 2 * draws; k++) {
        char net[32];
        snprintf(net, sizeof net, "net%d_%d", (int)count, k);
        mean[k % 2] += classify(net, k % 2 == 1, hpml_dataset_slice(learn, k / 2 * count, count), test) / draws;
    }
    printf("%6d  %6.2f %%    %6.2f %%\n", (int)count, mean[0], mean[1]);
}

static int fail(const char *why) { return fprintf(stderr, "%s\n", why), 1; }

int main(int argc, char **argv)
{
    static float   learn_x[LEARN * PIXELS], test_x[TESTED * PIXELS];
    const uint64_t seed  = argc > 1 ? strtoull(argv[1], NULL, 10) : 1;
    hpml_ctx      *ctx   = hpml_ctx_create(&(hpml_ctx_desc){ .seed = seed, .threads = 1, .log = hpml_log_stderr });
    hpml_dataset  *learn = digits_dataset(ctx, 2 * seed, LEARN), *test = digits_dataset(ctx, 2 * seed + 1, TESTED);
    double         many[2], few[2];
    if (!learn || !test) return 1; /* the log says why */
    hpml_dataset all = unlabelled(learn, learn_x), unseen = unlabelled(test, test_x);
    hpml_share(ctx, true);
    for (int s = 0; s < STAGES; s++)
        if (!stage(ctx, s, &all, &unseen)) return fail("a stage does not halve its error");
    printf("labels    random  pretrained\n");
    compare(learn, test, LEARN, many);
    compare(learn, test, FEW, few);
    if (hpml_ctx_status(ctx) != HPML_OK) return 1; /* the log says why */
    if (many[1] < many[0] - 0.3) return fail("with all labels, pretraining costs more than 0.3 points");
    if (few[1] <= few[0]) return fail("with few labels, pretraining does not help");
    hpml_ctx_free(ctx);
    return 0;
}
