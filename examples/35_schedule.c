/* What you learn: an algorithm apart from its schedule, as in Halide (Ragan-Kelley et al. 2013). Difficulty 3 of 4.
   cc -O2 examples/35_schedule.c -o schedule -lm -lpthread && ./schedule
   The algorithm is a small net and its gradient: the sum over four tiles of 16 digits, in their order. A schedule says
   when each tile is computed and what becomes of the results until its backward pass: stored, computed again, or
   swapped to the host. It is three calls on the graph (hpml_graph_part, _retain, _budget) and one hook `pass`; the net
   does not change. Dropout draws the same masks each time. A tile of another size would be another algorithm, because
   it adds the gradients up in another order.
   prints a line for each of six schedules: KiB as predicted before any memory is taken, KiB that an allocator counts
   then, operations and processor time of a step, a hash of the weights. It fails unless all hashes are equal, memory is
   as predicted (to 16 KiB), and storing everything takes most. */
#define HPML_IMPLEMENTATION
#include "../hpml.h"
#include "digits.h"
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { TILE = 16, TILES = 4, BATCH = TILE * TILES, STEPS = 4, LAYERS = 6, CHANNELS = 8, SLACK = 16384 };

/* What may change without changing a bit of the result. */
typedef struct schedule {
    const char     *name;
    int             slots;   /* tiles that are in flight, that is, between their forward and their backward pass */
    int             segment; /* so many ops at a time are retained as `how` says; 0: all results are stored */
    hpml_retain_how how;
    double          budget;  /* the library chooses segments that fit in this part of the bytes; 0: it does not */
} schedule;

typedef struct result {
    hpml_memory predicted;
    size_t      measured; /* most bytes that the trainer had at a time, counted by the allocator */
    double      ms;       /* of a step, processor time */
    float       loss;
    uint64_t    hash;     /* of all weights after the last step */
} result;

typedef struct meter { size_t now, most; } meter;

static void *meter_alloc(size_t size, size_t align, void *user)
{
    meter *m = (meter *)user;
    void  *p = aligned_alloc(align, (size + align - 1) / align * align);
    if (p) m->now += size;
    if (m->now > m->most) m->most = m->now;
    return p;
}

static void meter_free(void *p, size_t size, void *user)
{
    ((meter *)user)->now -= size;
    free(p);
}

/* The algorithm: the net. (B, 1, 28, 28) -> (B, 10) */
static hpml_tensor *net(hpml_tensor *x)
{
    hpml_conv2d_desc c = { .kernel_h = 3, .padding_h = 1, .activation = HPML_ACT_RELU };
    for (int i = 0; i < LAYERS; i++) x = hpml_conv2d(x, CHANNELS, &c); /* (B, 8, 28, 28) */
    x = hpml_max_pool2d(hpml_dropout(x, 0.1f), 4, 0, 0);               /* (B, 8, 7, 7) */
    return hpml_linear(hpml_flatten(x), 10, NULL);
}

/* The schedule of tiles, as the hook `pass`: forward passes of `slots` tiles, then their backward passes. Gradients are
   added up in the order of the tiles in any case. */
static hpml_status pass(void *user, hpml_trainer *t, const hpml_moment *at, int64_t first, int64_t samples,
                        float grad_scale, bool accumulate, float *loss)
{
    const int   slots  = *(const int *)user;
    hpml_ctx   *ctx    = hpml_trainer_settings(t)->input->ctx;
    float       part   = 0, sum = 0;
    hpml_status status = HPML_OK;
    if (at->pass == HPML_PASS_EVALUATE || samples != BATCH)
        return hpml_ctx_fail(ctx, HPML_ERR_UNSUPPORTED, "this schedule is for training steps of %d digits", BATCH);
    for (int tile = 0; tile < TILES && status == HPML_OK; tile += slots) {
        for (int k = 0; k < slots && status == HPML_OK; k++) {
            status = hpml_trainer_forward(t, k, first + TILE * (tile + k), TILE, &part);
            sum += part / TILES;
        }
        for (int k = 0; k < slots && status == HPML_OK; k++)
            status = hpml_trainer_backward(t, k, grad_scale / TILES, accumulate || tile + k > 0,
                                           tile + k == TILES - 1);
    }
    *loss = sum;
    return status;
}

/* Gives the graph its schedule, before its memory is taken, and writes what it will need to *m. */
static void plan(hpml_graph *g, const schedule *s, hpml_memory *m)
{
    const int ops = hpml_graph_op_count(g);
    hpml_graph_part(g, 0, ops, TILE, s->slots);
    for (int from = 0; s->segment > 0 && from < ops; from += s->segment)
        hpml_graph_retain(g, from, from + s->segment < ops ? from + s->segment : ops, s->how);
    hpml_graph_memory(g, m);
    if (s->budget > 0) hpml_graph_budget(g, (size_t)(s->budget * (double)(m->activations + m->scratch)), 0);
    hpml_graph_memory(g, m);
}

static hpml_status train(hpml_ctx *ctx, meter *m, const schedule *s, const float *x, const int32_t *y, result *r)
{
    int            slots = s->slots;
    hpml_hooks     mine  = { .user = &slots, .pass = pass };
    hpml_tensor   *in    = hpml_input_4d(ctx, BATCH, 1, DIGITS_SIDE, DIGITS_SIDE);
    hpml_step_info info  = { 0 };
    hpml_ctx_defer(ctx, true); /* the trainer takes no memory yet */
    hpml_trainer  *t     = hpml_trainer_create(ctx, &(hpml_trainer_desc){
        .input = in, .output = net(in), .lr = 0.05f, .momentum = 0.9f });
    if (!t) return hpml_ctx_status(ctx);
    plan(hpml_trainer_graph(t), s, &r->predicted);
    size_t before = m->now;
    m->most = before;
    hpml_trainer_alloc(t);
    hpml_trainer_attach(t, &mine);
    clock_t start = clock();
    for (int i = 0; i < STEPS; i++) hpml_trainer_step(t, x, y, BATCH, &info);
    r->ms       = 1e3 * (double)(clock() - start) / CLOCKS_PER_SEC / STEPS;
    r->measured = m->most - before;
    r->loss     = info.loss;
    r->hash     = hpml_param_hash(ctx);
    hpml_trainer_detach(t, &slots);
    return hpml_ctx_status(ctx);
}

/* Why the results are not as they should be; NULL: they are. */
static const char *wrong(const result *r, int count)
{
    for (int i = 0; i < count; i++) {
        size_t predicted = r[i].predicted.total + r[i].predicted.host;
        if (r[i].hash != r[0].hash) return "a schedule has changed the weights";
        if (r[i].measured < predicted || r[i].measured > predicted + SLACK) return "memory is not as predicted";
        if (i > 0 && r[i].predicted.total >= r[0].predicted.total) return "storing everything should take most";
    }
    return r[0].loss < 2.3f ? NULL : "the net does not learn";
}

int main(void)
{
    static const schedule all[] = {
        { "all stored", TILES, 0, HPML_RETAIN_KEEP, 0 },
        { "all, computed again", TILES, 3, HPML_RETAIN_AGAIN, 0 },
        { "tile by tile, stored", 1, 0, HPML_RETAIN_KEEP, 0 },
        { "tiles, computed again", 1, 3, HPML_RETAIN_AGAIN, 0 },
        { "tiles, swapped", 1, 1, HPML_RETAIN_SWAP, 0 },
        { "tiles, 75 % budget", 1, 0, HPML_RETAIN_KEEP, 0.75 } };
    enum { COUNT = sizeof all / sizeof *all };
    static uint8_t pixels[BATCH * DIGITS_PIXELS], labels[BATCH];
    static float   x[BATCH * DIGITS_PIXELS];
    int32_t        y[BATCH];
    result         r[COUNT] = { 0 };
    digits_fill(1, 0, BATCH, pixels, labels);
    for (int i = 0; i < BATCH * DIGITS_PIXELS; i++) x[i] = (float)pixels[i] / 255;
    for (int i = 0; i < BATCH; i++) y[i] = labels[i];
    printf("%-22s%9s%7s%10s%8s%7s%17s\n", "schedule", "predicted", "host", "measured", "again", "ms", "weights");
    for (int i = 0; i < COUNT; i++) {
        meter         m = { 0, 0 };
        hpml_ctx_desc d = { .seed = 1, .threads = 1, .log = hpml_log_stderr,
                            .allocator = { meter_alloc, meter_free, &m } };
        hpml_ctx     *ctx    = hpml_ctx_create(&d);
        hpml_status   status = train(ctx, &m, &all[i], x, y, &r[i]);
        hpml_ctx_free(ctx);
        if (status != HPML_OK) return 1;
        printf("%-22s%9zu%7zu%10zu%8.0f%7.1f %016llx\n", all[i].name, r[i].predicted.total >> 10,
               r[i].predicted.host >> 10, r[i].measured >> 10, r[i].predicted.extra / 1e6, r[i].ms,
               (unsigned long long)r[i].hash);
    }
    printf("predicted, host: KiB of the trainer, KiB of swapped copies; measured: both\n"
           "again: millions of operations that a step repeats to save memory\n");
    const char *why = wrong(r, COUNT);
    if (why) fprintf(stderr, "%s\n", why);
    return why != NULL;
}
