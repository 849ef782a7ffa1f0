/* A tour of graphs in parts, memory for work, sparse tables, models in files and the timeline. Difficulty 3 of 4.
   cc -O2 examples/tour/7_parts.c -o parts -lm -lpthread && mkdir -p build && ./parts
   prints the conditions that hold, and WRONG before one that does not; exits with 1 then. Writes files to build/. */
#define HPML_IMPLEMENTATION
#include "../../hpml.h"
#include "tour.h"
#include <math.h>
#include <string.h>

enum { BATCH = 4, WIDTH = 8 };

/* A chain of four layers whose loss is the mean of the squares of the result. */
static hpml_graph *chain(hpml_ctx *ctx, hpml_tensor **x)
{
    hpml_tensor *h = *x = hpml_input_2d(ctx, BATCH, WIDTH);
    for (int i = 0; i < 4; i++) h = hpml_tanh(hpml_linear(h, WIDTH, NULL));
    hpml_graph_desc d = { .loss = hpml_mean(hpml_mul(h, h), HPML_ALL_DIMS) };
    return hpml_graph_create(ctx, &d);
}

static void fill(hpml_tensor *x)
{
    float    values[BATCH * WIDTH];
    hpml_rng r = { .seed = 3 };
    hpml_rng_fill_normal(&r, values, BATCH * WIDTH);
    hpml_tensor_set(x, values, BATCH * WIDTH);
}

/* Less memory for more work: segments whose results are computed again. */
static void budget(hpml_ctx *ctx, hpml_ctx *other)
{
    hpml_memory  whole, small;
    hpml_tensor *x, *z;
    hpml_graph  *a = chain(ctx, &x), *b = chain(other, &z);
    hpml_graph_memory(a, &whole);
    SHOW(hpml_graph_retain(b, 0, 6, HPML_RETAIN_AGAIN) == HPML_OK); /* ops 0 to 5 run again in the backward pass */
    hpml_graph_memory(b, &small);
    SHOW(small.extra > 0 && whole.extra == 0);
    hpml_graph_alloc(a);
    hpml_graph_alloc(b);
    fill(x);
    fill(z);
    hpml_graph_forward(a, true, 0);
    hpml_graph_backward(a, 1, false);
    hpml_graph_forward(b, true, 0);
    hpml_graph_backward(b, 1, false);
    const hpml_tensor *p = hpml_param_at(ctx, 0), *q = hpml_param_at(other, 0);
    SHOW(memcmp(p->grad, q->grad, 4 * WIDTH * WIDTH) == 0); /* the same bits */
}

/* The library chooses which segments run again, so that activations and scratch take at most so many bytes. */
static void choice(hpml_ctx *ctx)
{
    hpml_memory  all, less;
    hpml_tensor *x;
    hpml_graph  *g = chain(ctx, &x);
    hpml_graph_memory(g, &all);
    SHOW(hpml_graph_budget(g, all.activations + all.scratch, 0) == HPML_OK);
    hpml_graph_memory(g, &less);
    SHOW(less.extra == 0 && less.activations <= all.activations); /* all of it fits, so nothing runs again */
}

/* A graph cut in two parts, as pipelines run it; the backward pass in two halves. */
static void parts(hpml_ctx *ctx, hpml_ctx *other)
{
    hpml_tensor *x, *z, *crossing[4];
    hpml_graph  *a = chain(ctx, &x), *b = chain(other, &z);
    SHOW(hpml_graph_crossing(a, 2, crossing, 4) == 1); /* one tensor is computed before op 2 and read after it */
    hpml_graph_part(a, 0, 2, BATCH, 1);
    hpml_graph_part(a, 2, hpml_graph_op_count(a), BATCH, 1);
    hpml_graph_slot(a, 0);
    fill(x);
    hpml_graph_forward(a, true, 0);
    float between[BATCH * WIDTH];
    hpml_tensor_get(crossing[0], between, BATCH * WIDTH);
    hpml_graph_slot(a, 1); /* the other part reads it like an input */
    hpml_tensor_set(crossing[0], between, BATCH * WIDTH);
    hpml_graph_forward(a, true, 0);
    SHOW(hpml_ctx_status(ctx) == HPML_OK);
    SHOW(hpml_graph_halves(b) == HPML_OK);
    SHOW(hpml_graph_alloc(b) == HPML_OK);
    fill(z);
    hpml_graph_forward(b, true, 0);
    hpml_graph_backward_half(b, HPML_HALF_INPUTS, 1, false);
    SHOW(hpml_graph_backward_half(b, HPML_HALF_WEIGHTS, 1, false) == HPML_OK);
}

/* A table of which a step touches a few rows. */
static void sparse_rows(hpml_ctx *ctx)
{
    const int32_t       tokens[3] = { 5, 2, 5 }, more[1] = { 7 };
    const float         ones[2]   = { 1, 1 };
    int64_t             count = 0;
    hpml_tensor        *in    = hpml_input_tokens(ctx, 1, 3);
    hpml_embedding_desc e     = { .name = "table", .sparse = true };
    hpml_graph_desc     d     = { .loss = hpml_mean(hpml_embedding(in, 1000, 2, &e), HPML_ALL_DIMS) };
    hpml_graph         *g     = hpml_graph_create(ctx, &d);
    hpml_graph_alloc(g);
    hpml_tensor_set_raw(in, tokens, sizeof tokens);
    hpml_graph_forward(g, true, 0);
    hpml_graph_backward(g, 1, false);
    hpml_tensor *table = hpml_param_find(ctx, "table.weight");
    SHOW(hpml_param_rows(table, &count) != NULL && count == 2); /* rows 2 and 5 of 1,000 */
    SHOW(hpml_param_add_rows(table, false, more, ones, 1) == HPML_OK && hpml_param_rows(table, &count) && count == 3);
}

/* A model of any number of inputs and outputs, in a file. */
static void models(hpml_ctx *ctx, hpml_ctx *other)
{
    const hpml_meta meta = { "classes", "cat dog" };
    hpml_tensor    *x = hpml_input_2d(ctx, BATCH, WIDTH), *y = hpml_softmax(hpml_linear(x, 2, NULL));
    hpml_model_desc d = { .output_count = 1, .outputs = &y, .meta = &meta, .meta_count = 1 };
    float           in[BATCH * WIDTH] = { 1 }, out[2 * BATCH];
    const void     *inputs[1]  = { in };
    float          *outputs[1] = { out };
    hpml_param_init(ctx);
    SHOW(hpml_model_save(ctx, "build/tour.model", &d) == HPML_OK);
    hpml_model *m = hpml_model_load(other, "build/tour.model", 0);
    SHOW(hpml_model_input(m, 0)->shape[1] == WIDTH && hpml_model_output(m, 0)->shape[1] == 2);
    SHOW(strcmp(hpml_model_meta(m, "classes"), "cat dog") == 0);
    SHOW(hpml_model_run(m, inputs, BATCH, outputs) == HPML_OK && fabsf(out[0] + out[1] - 1) < 1e-6f);
    SHOW(hpml_model_graph(m) != NULL);
}

/* Spans of your own on the timeline, which ui.perfetto.dev opens. */
static void timeline(hpml_ctx *ctx)
{
    double                virtual_time = 5;
    const hpml_trace_event point = { .kind = HPML_TRACE_COUNTER, .name = "queue", .start = 1, .value = 3 };
    hpml_trace_start(ctx, &(hpml_trace_desc){ .origin = 1 });
    SHOW(hpml_trace_on(ctx));
    hpml_trace_span(ctx, HPML_LANE_IO, "reading", 2, 3);
    hpml_trace_add(ctx, &point);
    SHOW(hpml_trace_first(ctx) == 0);                 /* seconds from the origin to the earliest event */
    hpml_trace_shift(ctx, -0.5);                      /* the origin is 0.5 s earlier */
    SHOW(hpml_trace_first(ctx) == 0.5);
    SHOW(hpml_trace_clock(ctx, &virtual_time) == NULL); /* layers are then timed by this clock, not by hpml_now */
    SHOW(hpml_trace_save(ctx, "build/tour.json") == HPML_OK);
}

int main(void)
{
    hpml_ctx *ctx[9];
    int       failed = 0;
    for (int i = 0; i < 9; i++) ctx[i] = hpml_ctx_create(&(hpml_ctx_desc){ .seed = 7, .threads = 1 });
    budget(ctx[0], ctx[1]);
    parts(ctx[2], ctx[3]);
    sparse_rows(ctx[4]);
    models(ctx[5], ctx[6]);
    timeline(ctx[7]);
    choice(ctx[8]);
    for (int i = 0; i < 9; i++) failed |= tour_end(ctx[i]);
    return failed;
}
