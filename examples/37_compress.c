/* What you learn: a trained net made smaller for a device: integers of 8 bits; or pruning, shared weights and a code of
   few bits (Han et al. 2016, "Deep Compression"). Difficulty 3 of 4.
   cc -O2 examples/37_compress.c -o compress -lm -lpthread && ./compress [FILE [seed]]
   int8: each weight of an MLP becomes an integer of 8 bits, with a scale for each row; a prediction rounds the inputs
   of a layer to 8 bits, by the sample's largest input, and multiplies integers (hpml_igemm). Pruning: the smallest
   weights become 0, and the hook `update` keeps them 0 while the others are trained on, until 90 % are 0. k-means finds
   31 values for all other weights of a layer. The files FILE.int8 and FILE.pruned have Huffman codes (compress.h).
   prints   accuracy and bytes: f32; int8, 4 times smaller; 90 % pruned; 31 values, coded, 36 times smaller; then
            both files are read back bit for bit, 400 damaged ones are refused
   exit 1 with a sentence if int8 loses more than 0.5 points, pruning more than 1, or a file is too large or differs. */
#define HPML_IMPLEMENTATION
#include "../hpml.h"
#include "digits.h"
#include "compress.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { BATCH = 100, LEARN = 6000, TESTED = 2000, CLASSES = 10, HIDDEN = 128, PIXELS = DIGITS_PIXELS, LAYERS = 2 };
enum { ALL = HIDDEN * (PIXELS + CLASSES), MOST = HIDDEN * PIXELS }; /* weights of both layers, of the larger one */
enum { EPOCHS = 18, RETRAIN = 3, BOOK = 32, FILE_BYTES = 4 * MOST, DAMAGES = 200 };
typedef enum kind { INT8, PRUNED } kind;

static const int64_t inputs[LAYERS] = { PIXELS, HIDDEN }, outputs[LAYERS] = { HIDDEN, CLASSES };
static const int64_t weights[LAYERS] = { HIDDEN * PIXELS, CLASSES * HIDDEN };
static float         test_x[TESTED * PIXELS];

typedef struct net {
    hpml_ctx     *ctx;
    hpml_trainer *trainer;
    hpml_dataset *learn, *test;
    float        *w[LAYERS], *b[LAYERS]; /* (out, in), (out) */
    bool          pruned[LAYERS][MOST];
} net;

/* A layer for a file. INT8: weight = value[row] (symbol - 128). PRUNED: weight = value[symbol], and value[0] = 0. */
typedef struct packed {
    float   bias[HIDDEN], value[HIDDEN];
    uint8_t symbol[MOST];
} packed;

/* After each step of the optimizer, pruned weights are 0 again. */
static hpml_status update(void *user, hpml_trainer *t, const hpml_moment *at)
{
    net        *n      = (net *)user;
    hpml_status status = hpml_trainer_update_inner(t);
    (void)at;
    for (int l = 0; l < LAYERS; l++)
        for (int64_t i = 0; i < weights[l]; i++)
            if (n->pruned[l][i]) n->w[l][i] = 0;
    return status;
}

static bool create(net *n, uint64_t seed)
{
    const hpml_linear_desc relu = { .activation = HPML_ACT_RELU };
    n->ctx              = hpml_ctx_create(&(hpml_ctx_desc){ .seed = seed, .threads = 1, .log = hpml_log_stderr });
    hpml_tensor      *x = hpml_input_2d(n->ctx, BATCH, PIXELS);                           /* (B, 784) */
    hpml_tensor      *y = hpml_linear(hpml_linear(x, HIDDEN, &relu), CLASSES, NULL); /* (B, 10) */
    hpml_trainer_desc d = { .input = x, .output = y, .lr = 0.05f, .momentum = 0.9f };
    n->trainer          = hpml_trainer_create(n->ctx, &d);
    n->learn            = digits_dataset(n->ctx, 2 * seed, LEARN);
    n->test             = digits_dataset(n->ctx, 2 * seed + 1, TESTED);
    for (int l = 0; l < LAYERS && n->trainer; l++) {
        n->w[l] = hpml_param_at(n->ctx, 2 * l)->data;
        n->b[l] = hpml_param_at(n->ctx, 2 * l + 1)->data;
    }
    return hpml_trainer_attach(n->trainer, &(hpml_hooks){ .user = n, .update = update }) == HPML_OK;
}

/* Returns for how many percent of the test's digits the label has the largest score. score: (TESTED, 10). */
static double accuracy(const float *score, const int32_t *label)
{
    int right = 0;
    for (int i = 0; i < TESTED; i++, score += CLASSES) {
        int best = 0;
        for (int c = 1; c < CLASSES; c++) best = score[c] > score[best] ? c : best;
        right += best == label[i];
    }
    return 100.0 * right / TESTED;
}

/* Prunes a share of the weights of both layers, the smallest. Finds the limit of small weights by halving its range. */
static void prune(net *n, double share)
{
    double low = 0, high = 10;
    for (int step = 0; step <= 50; step++) {
        const double limit = step < 50 ? (low + high) / 2 : high;
        int64_t      count = 0;
        for (int l = 0; l < LAYERS; l++)
            for (int64_t i = 0; i < weights[l]; i++) {
                n->pruned[l][i] = (double)fabsf(n->w[l][i]) <= limit;
                count += n->pruned[l][i];
            }
        if ((double)count < share * ALL) low = limit;
        else high = limit;
    }
}

static void pack(const net *n, packed *p, kind k)
{
    for (int l = 0; l < LAYERS; l++, p++) {
        memcpy(p->bias, n->b[l], sizeof(float) * (size_t)outputs[l]);
        if (k == PRUNED) compress_means(n->w[l], weights[l], p->value, BOOK, p->symbol);
        for (int64_t i = 0; i < weights[l] && k == INT8; i++) {
            float *scale = &p->value[i / inputs[l]];
            if (i % inputs[l] == 0) *scale = compress_largest(n->w[l] + i, inputs[l]) / 127 + 1e-30f;
            p->symbol[i] = (uint8_t)(128 + lrintf(n->w[l][i] / *scale));
        }
    }
}

static void unpack_pruned(net *n, const packed *p)
{
    for (int l = 0; l < LAYERS; l++) {
        memcpy(n->b[l], p[l].bias, sizeof(float) * (size_t)outputs[l]);
        for (int64_t i = 0; i < weights[l]; i++) n->w[l][i] = p[l].value[p[l].symbol[i]];
    }
}

/* Writes to b, or reads from b, for each layer its kind and sizes, biases, values and symbols. Returns false if b is
   too small or, when reading, if b is not what these layers write. */
static bool transfer(compress_bytes *b, packed *p, kind k, bool write)
{
    static uint8_t work[2 * MOST];
    for (int l = 0; l < LAYERS; l++, p++) {
        const int64_t head[3] = { k, inputs[l], outputs[l] };
        for (int i = 0; i < 3; i++) compress_number(b, (uint32_t)head[i], write);
        compress_floats(b, p->bias, outputs[l], write);
        compress_floats(b, p->value, k == INT8 ? outputs[l] : BOOK, write);
        if (k == INT8) compress_symbols(b, p->symbol, weights[l], 256, write);
        else compress_sparse(b, p->symbol, weights[l], BOOK, work, write);
    }
    return !b->failed && (write || b->at == b->size);
}

/* Writes both layers to a file and reads them back to *copy. Then reads damaged copies: cut short, with another kind
   or size, or a huge number of symbols. Returns the bytes of the file; -1: a difference, or a damage not found. */
static double store(hpml_ctx *ctx, const char *path, packed *p, packed *copy, kind k)
{
    static uint8_t       memory[FILE_BYTES], second[FILE_BYTES];
    static packed        none[LAYERS];
    const int64_t        number = 12 + 4 * (outputs[0] + (k == INT8 ? outputs[0] : BOOK)); /* place of the count */
    compress_bytes       out = { memory, FILE_BYTES, 0, false }, again = { second, FILE_BYTES, 0, false };
    size_t               size = 0;
    bool                 good = transfer(&out, p, k, true);
    hpml_records_writer *w = hpml_records_create(ctx, path);
    hpml_records_add(w, memory, (size_t)out.at);
    hpml_records_finish(w);
    hpml_records_file *f     = hpml_records_open(ctx, path);
    const void        *bytes = hpml_records_get(f, 0, &size);
    compress_bytes     in    = { (uint8_t *)bytes, (int64_t)size, 0, false }; /* is only read */
    good = good && transfer(&in, copy, k, false) && transfer(&again, copy, k, true);
    good = good && again.at == in.size && memcmp(second, bytes, size) == 0;
    hpml_records_close(f);
    for (int i = 0; i < DAMAGES && good; i++) {
        const int64_t  at = i < 12 ? i : number + 3; /* a byte of kind or sizes; the highest of the count */
        compress_bytes b  = { memory, i <= 12 ? out.at : out.at * (i - 13) / DAMAGES, 0, false };
        if (i <= 12) memory[at] ^= 255;
        good = !transfer(&b, none, k, false);
        if (i <= 12) memory[at] ^= 255;
    }
    return good ? (double)size + 40 : -1; /* a file of one record has 40 bytes more */
}

/* Scores of the test's digits. No input of a layer is negative (pixels, results of relu): the integer 0 is 0. */
static void predict_int8(hpml_ctx *ctx, const packed *p, float *score)
{
    static uint8_t q[TESTED * PIXELS];
    static int8_t  w[MOST];
    static float   hidden[TESTED * HIDDEN], scale[TESTED];
    static int32_t sum[HIDDEN * TESTED]; /* (out, TESTED) */
    for (int l = 0; l < LAYERS; l++, p++) {
        const int64_t in = inputs[l], out = outputs[l];
        const float  *x  = l == 0 ? test_x : hidden; /* (TESTED, in) */
        float        *y  = l == 0 ? hidden : score;  /* (TESTED, out) */
        for (int64_t i = 0; i < weights[l]; i++) w[i] = (int8_t)(p->symbol[i] - 128);
        for (int64_t i = 0; i < TESTED * in; i++) {
            if (i % in == 0) scale[i / in] = compress_largest(x + i, in) / 255 + 1e-30f;
            q[i] = (uint8_t)lrintf(x[i] / scale[i / in]);
        }
        hpml_igemm(ctx, false, true, out, TESTED, in, w, in, q, in, false, sum, TESTED);
        for (int64_t i = 0; i < out * TESTED; i++) {
            float v = (float)sum[i] * p->value[i / TESTED] * scale[i % TESTED] + p->bias[i / TESTED];
            y[i % TESTED * out + i / TESTED] = l == 0 ? fmaxf(v, 0) : v;
        }
    }
}

static double test(net *n, float *score)
{
    hpml_trainer_predict(n->trainer, test_x, TESTED, score);
    return accuracy(score, (const int32_t *)n->test->y);
}

static int fail(const char *why) { return fprintf(stderr, "%s\n", why), 1; }

int main(int argc, char **argv)
{
    static net     n;
    static packed  p[LAYERS], copy[LAYERS];
    static float   score[TESTED * CLASSES], again[TESTED * CLASSES];
    const uint64_t seed = argc > 2 ? strtoull(argv[2], NULL, 10) : 1;
    double         right[4], size[2], bytes = 4.0 * (ALL + HIDDEN + CLASSES);
    const char    *kinds[2] = { "int8", "pruned" }, *file = argc > 1 ? argv[1] : "digits";
    char           path[2][512];
    for (int k = 0; k < 2; k++)
        if (snprintf(path[k], 512, "%s.%s", file, kinds[k]) > 511) return fail("FILE is too long");
    if (!create(&n, seed)) return 1; /* the log says why */
    for (int64_t i = 0; i < TESTED * PIXELS; i++) test_x[i] = (float)((const uint8_t *)n.test->x)[i] / 255;
    hpml_trainer_fit(n.trainer, n.learn, &(hpml_fit_desc){ .epochs = EPOCHS });
    right[0] = test(&n, score);
    printf("f32                  %.2f %%  %6.0f bytes\n", right[0], bytes);

    pack(&n, p, INT8);
    size[INT8] = store(n.ctx, path[INT8], p, copy, INT8);
    if (size[INT8] < 0) return fail("the int8 file is not read back as written, or a damaged copy is accepted");
    predict_int8(n.ctx, copy, score);
    right[1] = accuracy(score, (const int32_t *)n.test->y);
    printf("int8, from its file  %.2f %%  %6.0f bytes  %4.1f times smaller\n", right[1], size[0], bytes / size[0]);

    double zeros = 0;
    for (int percent = 60; percent <= 90; percent += 15) {
        prune(&n, 0.01 * percent);
        hpml_trainer_fit(n.trainer, n.learn, &(hpml_fit_desc){ .epochs = RETRAIN });
    }
    right[2] = test(&n, score);
    for (int l = 0; l < LAYERS; l++)
        for (int64_t i = 0; i < weights[l]; i++) zeros += n.w[l][i] == 0;
    printf("%.1f %% are 0         %.2f %%\n", 100 * zeros / ALL, right[2]);
    pack(&n, p, PRUNED);
    size[PRUNED] = store(n.ctx, path[PRUNED], p, copy, PRUNED);
    if (size[PRUNED] < 0) return fail("the pruned file is not read back as written, or a damaged copy is accepted");
    unpack_pruned(&n, p);
    test(&n, score);
    unpack_pruned(&n, copy);
    right[3] = test(&n, again);
    printf("31 values, coded     %.2f %%  %6.0f bytes  %4.1f times smaller\n", right[3], size[1], bytes / size[1]);

    if (hpml_ctx_status(n.ctx) != HPML_OK) return 1; /* the log says why */
    if (memcmp(score, again, sizeof score) != 0) return fail("the model from its file predicts other scores");
    if (right[1] < right[0] - 0.5 || size[0] * 4 > bytes) return fail("int8 loses over 0.5 points, or is too large");
    if (zeros < 0.9 * ALL) return fail("less than 90 % of the weights are 0");
    if (right[2] < right[0] - 1 || right[3] < right[0] - 1) return fail("pruning loses over 1 point");
    if (size[1] * 15 > bytes) return fail("the file of the pruned net is not 15 times smaller");
    printf("both files are read back bit for bit, %d damaged ones are refused\n", 2 * DAMAGES);
    hpml_ctx_free(n.ctx);
    return 0;
}
