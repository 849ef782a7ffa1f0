/* What you learn: define-by-run, as in Chainer and PyTorch: the graph is recorded anew for each step, because its
   structure depends on the data. Difficulty 3 of 4.
   cc -O2 examples/40_define_by_run.c -o define_by_run -lm -lpthread && ./define_by_run
   A digit is cut into quarters, these again, down to 64 blocks of 4 x 4 pixels. A recursive net (Socher et al. 2011)
   follows this tree: one layer makes a vector of a block, another one a vector of four vectors. Blocks without ink are
   left out, so each digit has a graph of its own. A hook `run` of the trainer records the graph of a step in a second
   context, whose parameters lie in the trainer's array of values, and copies its gradients to the trainer's. Batches,
   optimizer and validation are the trainer's, whose own graph is the static one of the same net: it computes all 85
   blocks and multiplies those without ink by 0.
   prints   how equal the gradients of both are, the loss of three epochs, and what a digit costs each way; fails unless
            gradients are equal and the net learns. */
#define HPML_IMPLEMENTATION
#include "../hpml.h"
#include "digits.h"
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

enum { BATCH = 8, LEAVES = 64, PIXELS = 16, H = 24, CLASSES = 10, LEARN = 640, TEST = 400, EPOCHS = 3 };
enum { PARAMS = 6, MOST = 4096 }; /* parameters; floats of all of them, at most */

/* A graph over the parameters at `values`, recorded from samples, in a context of its own. */
typedef struct tape {
    hpml_ctx    *ctx;
    hpml_graph  *graph;
    hpml_tensor *loss, *labels, *empty; /* empty: (1, H) zeros, the vector of a block without ink */
    hpml_tensor *leaf[BATCH * LEAVES];  /* (1, 16) each: pixels of the blocks that are computed */
    int          leaves, blocks;        /* numbers of these blocks; of all blocks that are computed */
    bool         whole;                 /* true: blocks without ink are computed, too */
} tape;

/* Sums over steps. Times: microseconds of this process's processor time. */
typedef struct cost { double record, run, blocks, digits; } cost;

typedef struct define_by_run {
    hpml_tensor *x, *labels;  /* of the trainer: (B, 64, 16), (B) */
    float        other[MOST]; /* the static graph's gradients in the first step */
    double       worst;       /* their largest difference from those of the new graph, by the largest gradient */
    cost         sum;
} define_by_run;

static double now(void) { return 1e6 * (double)clock() / CLOCKS_PER_SEC; }

/* The parameters, in the same order in each context, so that all contexts have them at the same places. */
static void declare(hpml_ctx *ctx)
{
    static const struct { const char *name; int64_t out, in; } p[PARAMS] = {
        { "leaf.weight", H, PIXELS }, { "leaf.bias", H, 0 }, { "node.weight", H, 4 * H }, { "node.bias", H, 0 },
        { "out.weight", CLASSES, H }, { "out.bias", CLASSES, 0 } };
    hpml_share(ctx, true); /* layers of these names use these parameters */
    for (int i = 0; i < PARAMS; i++) {
        hpml_param_desc d = { .name = p[i].name, .ndim = p[i].in > 0 ? 2 : 1, .shape = { p[i].out, p[i].in } };
        if (p[i].in == 0) d.init = HPML_INIT_ZEROS;
        hpml_param_create(ctx, &d);
    }
}

static hpml_tensor *layer(hpml_tensor *x, int64_t out, const char *name)
{
    return hpml_linear(x, out, &(hpml_linear_desc){ .name = name, .activation = out == H ? HPML_ACT_TANH : 0 });
}

static bool has_ink(const float *x, int n)
{
    while (n > 0 && x[n - 1] < 0.35f) n--;
    return n > 0;
}

/* Records the tree over `leaves` adjacent blocks, 64 for a whole digit. Returns its vector, (1, H). */
static hpml_tensor *tree(tape *t, const float *x, int leaves)
{
    hpml_tensor *child[4];
    if (!t->whole && !has_ink(x, leaves * PIXELS)) return t->empty;
    t->blocks++;
    if (leaves == 1) {
        hpml_tensor *pixels = hpml_tensor_create_2d(t->ctx, 1, PIXELS);
        hpml_tensor_set(pixels, x, PIXELS);
        t->leaf[t->leaves++] = pixels;
        return layer(pixels, H, "leaf");
    }
    for (int k = 0; k < 4; k++) child[k] = tree(t, x + k * leaves / 4 * PIXELS, leaves / 4);
    return layer(hpml_concat(child, 4, 1), H, "node");
}

/* Records the graph of some digits, x (samples, 64, 16). */
static hpml_status record(tape *t, float *values, const float *x, const int32_t *labels, int64_t samples)
{
    hpml_tensor *score[BATCH];
    t->ctx = hpml_ctx_create(&(hpml_ctx_desc){ .threads = 1, .log = hpml_log_stderr });
    declare(t->ctx);
    hpml_params_place(t->ctx, values, true);
    t->empty  = hpml_tensor_create_2d(t->ctx, 1, H);
    t->labels = hpml_tensor_create(t->ctx, HPML_DTYPE_I32, 1, &samples);
    hpml_tensor_set_raw(t->labels, labels, (size_t)samples * sizeof *labels);
    for (int i = 0; i < samples; i++) score[i] = layer(tree(t, x + i * LEAVES * PIXELS, LEAVES), CLASSES, "out");
    t->loss  = hpml_cross_entropy(hpml_concat(score, (int)samples, 0), t->labels, NULL);
    t->graph = hpml_graph_create(t->ctx, &(hpml_graph_desc){ .loss = t->loss });
    return hpml_graph_alloc(t->graph);
}

static hpml_status run(hpml_graph *g)
{
    hpml_graph_forward(g, true, 0);
    return hpml_graph_backward(g, 1, false);
}

/* Records and runs a graph, copies its gradients to the places that the trainer's have, and frees the graph. */
static hpml_status run_anew(hpml_trainer *t, bool whole, const float *x, const int32_t *labels, int64_t samples,
                            float *gradient, float *loss, cost *sum)
{
    tape        new    = { .whole = whole };
    double      start  = now();
    hpml_status status = record(&new, hpml_trainer_array(t, HPML_ARRAY_VALUES, NULL), x, labels, samples);
    double      ready  = now();
    if (status == HPML_OK) status = run(new.graph);
    double ran = now();
    for (int p = 0; p < PARAMS && status == HPML_OK; p++) {
        const hpml_tensor *w = hpml_param_at(new.ctx, p);
        memcpy(gradient + hpml_trainer_place(t, p), w->grad, (size_t)hpml_tensor_count(w) * sizeof *gradient);
    }
    if (status == HPML_OK) hpml_tensor_get(new.loss, loss, 1);
    hpml_ctx_free(new.ctx);
    sum->run += ran - ready;
    sum->record += ready - start + now() - ran;
    sum->blocks += new.blocks;
    sum->digits += (double)samples;
    return status;
}

/* The hook: forward and backward of a step, by a graph that exists for this step alone. */
static hpml_status step(void *user, hpml_trainer *t, const hpml_moment *at, int64_t samples, float *loss)
{
    define_by_run *d = (define_by_run *)user;
    int64_t        n;
    float         *gradient = hpml_trainer_array(t, HPML_ARRAY_GRADIENTS, &n);
    double         most     = 0;
    if (at->step == 0) { /* by the static graph, too, to compare */
        if (hpml_trainer_run_inner(t, samples, loss) != HPML_OK) return hpml_ctx_status(d->x->ctx);
        memcpy(d->other, gradient, (size_t)n * sizeof *gradient);
    }
    hpml_status status = run_anew(t, false, d->x->data, (const int32_t *)d->labels->raw, samples, gradient, loss,
                                  &d->sum);
    for (int64_t i = 0; at->step == 0 && i < n; i++) {
        d->worst = fmax(d->worst, fabs((double)gradient[i] - (double)d->other[i]));
        most     = fmax(most, fabs((double)d->other[i]));
    }
    if (most > 0) d->worst /= most;
    return status;
}

/* The static graph: all trees at once, level by level, with masks. x (B, 64, 16) -> (B, 10) */
static hpml_tensor *static_net(hpml_tensor *x)
{
    hpml_tensor *mask = hpml_clamp(hpml_scale(hpml_max(x, 2), 1e6f, -0.35e6f), 0, 1); /* (B, 64, 1) 1: has ink */
    hpml_tensor *h    = hpml_mul(layer(x, H, "leaf"), mask);                          /* (B, 64, H) */
    for (int n = LEAVES / 4; n >= 1; n /= 4) {
        mask = hpml_max(hpml_reshape_3d(mask, BATCH, n, 4), 2);                       /* (B, n, 1) */
        h    = hpml_mul(layer(hpml_reshape_3d(h, BATCH, n, 4 * H), H, "node"), mask); /* (B, n, H) */
    }
    return layer(hpml_reshape_2d(h, BATCH, H), CLASSES, "out");
}

/* Whole trees of digits 8 to 15, recorded once from digits 0 to 7, and anew: true if all gradients have the same bits.
   *once, *anew: what both cost. */
static bool same_bits(hpml_trainer *t, const float *x, const int32_t *labels, cost *once, cost *anew)
{
    static float gradient[MOST];
    const float *other = x + BATCH * LEAVES * PIXELS;
    tape         fixed = { .whole = true };
    float        loss;
    bool   same  = record(&fixed, hpml_trainer_array(t, HPML_ARRAY_VALUES, NULL), x, labels, BATCH) == HPML_OK;
    double start = now();
    for (int i = 0; i < fixed.leaves; i++) hpml_tensor_set(fixed.leaf[i], other + i * PIXELS, PIXELS);
    hpml_tensor_set_raw(fixed.labels, labels + BATCH, BATCH * sizeof *labels);
    same  = same && run(fixed.graph) == HPML_OK;
    *once = (cost){ 0, now() - start, fixed.blocks, BATCH };
    same  = same && run_anew(t, true, other, labels + BATCH, BATCH, gradient, &loss, anew) == HPML_OK;
    for (int p = 0; p < PARAMS && same; p++) {
        const hpml_tensor *w = hpml_param_at(fixed.ctx, p);
        same = memcmp(w->grad, gradient + hpml_trainer_place(t, p), (size_t)hpml_tensor_count(w) * 4) == 0;
    }
    hpml_ctx_free(fixed.ctx);
    return same;
}

/* Digits amid 32 x 32 pixels. The bits of a pixel's number are those of row and column in turn: squares are ranges. */
static hpml_dataset *digits(hpml_ctx *ctx, uint64_t seed, int64_t count, float *x, int32_t *y)
{
    const int64_t shape[2] = { LEAVES, PIXELS };
    uint8_t       image[DIGITS_PIXELS];
    for (int64_t i = 0; i < count; i++) {
        y[i] = digits_draw(seed, i, image);
        for (int p = 0; p < DIGITS_PIXELS; p++) {
            int r = p / DIGITS_SIDE + 2, c = p % DIGITS_SIDE + 2, at = 0;
            for (int bit = 0; bit < 5; bit++) at |= (r >> bit & 1) << (2 * bit + 1) | (c >> bit & 1) << 2 * bit;
            x[i * LEAVES * PIXELS + at] = (float)image[p] / 255;
        }
    }
    return hpml_dataset_create(ctx, count, HPML_DTYPE_F32, 2, shape, x, HPML_DTYPE_I32, 1, y);
}

static int train(hpml_ctx *ctx)
{
    static float   x[LEARN * LEAVES * PIXELS];
    static int32_t y[LEARN];
    define_by_run  d     = { .x = hpml_input_3d(ctx, BATCH, LEAVES, PIXELS) };
    hpml_epoch     e[EPOCHS] = { { 0 } };
    enum { DYNAMIC, ANEW, ONCE, LEVELS, WAYS };
    static const char *const way[WAYS] = { "recorded anew, blocks with ink", "recorded anew, all blocks",
                                           "recorded once, all blocks", "recorded once, by levels, masks" };
    cost c[WAYS] = { { 0 } };
    declare(ctx);
    hpml_tensor *scores = static_net(d.x);
    d.labels = hpml_input(ctx, HPML_DTYPE_I32, 1, (const int64_t[]){ BATCH });
    hpml_trainer *t = hpml_trainer_create(ctx, &(hpml_trainer_desc){
        .input = d.x, .output = scores, .loss_tensor = hpml_cross_entropy(scores, d.labels, NULL), .target = d.labels,
        .optimizer = HPML_OPT_ADAM, .lr = 0.004f });
    hpml_dataset *test = digits(ctx, 2, TEST, x, y), *learn = digits(ctx, 1, LEARN, x, y);
    if (!t || !learn || !test) return 1;
    bool same = same_bits(t, x, y, &c[ONCE], &c[ANEW]);
    hpml_trainer_attach(t, &(hpml_hooks){ .user = &d, .run = step });
    hpml_trainer_fit(t, learn, &(hpml_fit_desc){ .epochs = EPOCHS, .validation = test });
    hpml_trainer_detach(t, &d);
    double start = now();
    run(hpml_trainer_graph(t));
    c[LEVELS]  = (cost){ 0, now() - start, 85 * BATCH, BATCH };
    c[DYNAMIC] = d.sum;
    if (hpml_trainer_history(t, e, EPOCHS) != EPOCHS) return 1;
    printf("whole trees: gradients recorded once and anew %s\n", same ? "have the same bits" : "differ");
    printf("blocks with ink alone: gradients differ by %.0e from those of the static graph\n", d.worst);
    for (int i = 0; i < EPOCHS; i++)
        printf("epoch %d  loss %.3f; %.3f on other digits, by the static graph\n", i + 1, e[i].loss, e[i].val_loss);
    printf("%-34s %6s %9s %9s\n", "a digit, us of processor time", "blocks", "to record", "to run");
    for (int i = 0; i < WAYS; i++)
        printf("%-34s %6.1f %9.0f %9.0f\n", way[i], c[i].blocks / c[i].digits, c[i].record / c[i].digits,
               c[i].run / c[i].digits);
    if (!same || !(d.worst < 1e-4)) return fprintf(stderr, "gradients differ\n"), 1;
    if (!(e[EPOCHS - 1].val_loss < 1.5)) return fprintf(stderr, "the net does not learn\n"), 1;
    return 0;
}

int main(void)
{
    hpml_ctx *ctx    = hpml_ctx_create(&(hpml_ctx_desc){ .seed = 1, .threads = 1, .log = hpml_log_stderr });
    int       failed = train(ctx);
    hpml_ctx_free(ctx);
    return failed;
}
