/* Parts and slots of a graph: a model cut at every op into parts on contexts of their own, which run one after another
   as a pipeline would, against the same model in one piece; memory of slots; results computed again. */
#include <time.h>
#include "../hpml.h"
#include "test.h"

enum { BATCH = 12, IN = 16, CLASSES = 5, MOST = 3 };

/* A skip connection, ops in place, reshapes, dropout. */
static hpml_tensor *record(hpml_tensor *x)
{
    const hpml_linear_desc relu = { .activation = HPML_ACT_RELU }, gelu = { .activation = HPML_ACT_GELU };
    const int64_t          rows[] = { BATCH, 4, 6 }, flat[] = { BATCH, 24 };
    hpml_tensor *h = hpml_dropout(hpml_linear(x, 24, &relu), 0.3f);
    hpml_tensor *r = hpml_layernorm(hpml_reshape(h, 3, rows), NULL);
    hpml_tensor *q = hpml_linear(hpml_reshape(r, 2, flat), 24, &gelu);
    return hpml_linear(hpml_relu(hpml_add(q, h)), CLASSES, NULL);
}

typedef struct rank { /* one context with the model, and the part of it that runs there */
    hpml_ctx     *ctx;
    hpml_trainer *t;
    hpml_graph   *g;
    int           from, to, number;
    struct pipeline  *pipe;
} rank;
typedef struct pipeline {
    rank         rank[MOST];
    int          ranks, micro;
    const float *x;
    const void  *y;
    bool         evaluate;
    float       *predicted;
    float        loss, inner;
} pipeline;

static rank create(int accumulate)
{
    rank r = { .ctx = hpml_ctx_create(&(hpml_ctx_desc){ .threads = 1, .seed = 3 }) };
    hpml_ctx_defer(r.ctx, true);
    hpml_tensor *x = hpml_input_2d(r.ctx, BATCH, IN);
    r.t = hpml_trainer_create(r.ctx, &(hpml_trainer_desc){ .input = x, .output = record(x), .lr = 0.1f,
                                                           .momentum = 0.9f, .accumulate = accumulate });
    r.g  = hpml_trainer_graph(r.t);
    r.to = hpml_graph_op_count(r.g);
    return r;
}

static void fill(float *x, int32_t *y)
{
    hpml_rng rng = { 5, 0, 0 };
    for (int i = 0; i < BATCH * IN; i++) x[i] = hpml_rng_uniform(&rng) - 0.5f;
    for (int i = 0; i < BATCH; i++) y[i] = (int32_t)hpml_rng_below(&rng, CLASSES);
}

static int order_of(const hpml_graph *g, const hpml_tensor *t)
{
    int i = 0;
    while (hpml_graph_op(g, i)->out != t) i++;
    return i;
}

/* Copies what crosses into rank r, in slot `slot`, from the ranks that compute it; back: sends the gradients there. */
static void exchange(pipeline *p, int r, int slot, bool back)
{
    hpml_tensor *in[64];
    rank        *to = &p->rank[r];
    int          count = hpml_graph_crossing(to->g, to->from, in, 64);
    hpml_graph_slot(to->g, slot);
    for (int k = 0; k < count; k++) {
        int   op   = order_of(to->g, in[k]), s = 0;
        rank *from = p->rank;
        if (!in[k]->raw) continue; /* passes over this rank */
        while (from->to <= op) from++;
        hpml_graph_slot(from->g, slot);
        hpml_tensor *out   = hpml_graph_op(from->g, op)->out;
        size_t       bytes = (size_t)hpml_tensor_count(in[k]) * sizeof(float);
        hpml_tensor *later[64];
        int          also = r + 1 < p->ranks ? hpml_graph_crossing(to->g, to->to, later, 64) : 0;
        while (s < also && (later[s] != in[k] || !hpml_graph_op(p->rank[r + 1].g, op)->out->raw)) s++;
        if (!back) memcpy(in[k]->raw, out->raw, bytes);
        else if (s == also) memcpy(out->raw_grad, in[k]->raw_grad, bytes);
        else
            for (size_t i = 0; i < bytes / sizeof(float); i++) out->grad[i] += in[k]->grad[i];
    }
}

/* The hook `pass`: each rank's step calls the next rank's; the last one then runs all micro-batches, as GPipe does. */
static hpml_status pass(void *user, hpml_trainer *t, const hpml_moment *at, int64_t first, int64_t samples,
                        float grad_scale, bool accumulate, float *loss)
{
    rank   *me = (rank *)user;
    pipeline *p  = me->pipe;
    rank   *next = me->number + 1 < p->ranks ? me + 1 : NULL;
    int64_t rows = BATCH / p->micro;
    int     slots = (int)((samples + rows - 1) / rows);
    (void)t;
    if (next && at->pass == HPML_PASS_EVALUATE) {
        int64_t floats;
        float  *out = hpml_trainer_output(me->t, &floats);
        float       got[BATCH * CLASSES];
        bool        mine   = order_of(me->g, hpml_trainer_settings(me->t)->output) < me->to;
        hpml_status status = hpml_trainer_predict(next->t, p->x, samples, got);
        if (!mine) memcpy(out, got, (size_t)(samples * floats) * sizeof(float));
        return status;
    }
    if (next) {
        hpml_step_info info;
        hpml_status    status = hpml_trainer_step(next->t, p->x, p->y, samples, &info);
        *loss = p->loss;
        return status;
    }
    p->loss = 0;
    for (int r = 0; r < p->ranks; r++) {
        for (int j = 0; j < slots; j++) { /* results wait in their slots until all are computed */
            int64_t n = rows < samples - j * rows ? rows : samples - j * rows;
            float   part = 0;
            hpml_graph_slot(p->rank[r].g, j);
            hpml_graph_set_batch(p->rank[r].g, n);
            exchange(p, r, j, false);
            if (hpml_trainer_forward(p->rank[r].t, j, first + j * rows, n, loss ? &part : NULL) != HPML_OK)
                return hpml_ctx_status(p->rank[r].ctx);
            p->loss += part * (float)n / (float)samples;
        }
    }
    if (loss) *loss = p->loss;
    for (int j = 0; j < slots && at->pass == HPML_PASS_TRAIN; j++) {
        int64_t n = rows < samples - j * rows ? rows : samples - j * rows;
        for (int r = p->ranks - 1; r >= 0; r--) {
            float scale = grad_scale * (float)n / (float)samples;
            if (hpml_trainer_backward(p->rank[r].t, j, scale, accumulate || j > 0, j + 1 == slots) != HPML_OK)
                return hpml_ctx_status(p->rank[r].ctx);
            exchange(p, r, j, true);
        }
    }
    return HPML_OK;
}

/* Cuts the model before the ops at[0] < at[1] .. into ranks parts. */
static void cut(pipeline *p, int ranks, const int *at, int micro)
{
    memset(p, 0, sizeof *p);
    p->ranks = ranks;
    p->micro = micro;
    for (int r = 0; r < ranks; r++) {
        rank *k = &p->rank[r];
        *k        = create(1);
        k->number = r;
        k->pipe   = p;
        k->from   = r > 0 ? at[r - 1] : 0;
        k->to     = r + 1 < ranks ? at[r] : k->to;
        hpml_graph_part(k->g, k->from, k->to, BATCH / micro, micro);
        hpml_trainer_attach(k->t, &(hpml_hooks){ .user = k, .pass = pass });
    }
}

/* A hook `run` that runs a batch as `micro` micro-batches. */
static int         micro_now;
static hpml_status run_micro(void *user, hpml_trainer *t, const hpml_moment *at, int64_t samples, float *loss)
{
    int64_t rows = BATCH / micro_now, n;
    (void)user;
    *loss = 0;
    for (int64_t j = 0; j * rows < samples; j++) {
        float part;
        n = rows < samples - j * rows ? rows : samples - j * rows;
        hpml_status status = hpml_trainer_forward_backward(t, j * rows, n, (float)n / (float)samples,
                                                           at->batch > 0 || j > 0, &part);
        if (status != HPML_OK) return status;
        *loss += part * (float)n / (float)samples;
    }
    return HPML_OK;
}

/* True if values and gradients of the part's parameters have the bits of the whole model's; others have no memory. */
static bool same_parameters(const rank *part, const rank *whole)
{
    for (int i = 0; i < hpml_param_count(whole->ctx); i++) {
        const hpml_tensor *a = hpml_param_at(part->ctx, i), *b = hpml_param_at(whole->ctx, i);
        size_t             bytes = (size_t)hpml_tensor_count(b) * sizeof(float);
        bool               here = false;
        for (int k = part->from; k < part->to; k++)
            for (int s = 0; s < hpml_graph_op(part->g, k)->src_count; s++)
                if (hpml_graph_op(part->g, k)->src[s] == a) here = true;
        if (here != (a->raw != NULL) || here != (hpml_trainer_place(part->t, i) >= 0)) return false;
        if (here && (memcmp(a->raw, b->raw, bytes) != 0 || memcmp(a->grad, b->grad, bytes) != 0)) return false;
    }
    return true;
}

static bool cut_is_whole(int ranks, const int *at, int micro)
{
    pipeline p;
    rank    whole = create(1);
    float   x[BATCH * IN], out[2][BATCH * CLASSES];
    int32_t y[BATCH];
    bool    good = true;
    fill(x, y);
    cut(&p, ranks, at, micro);
    p.x       = x;
    p.y       = y;
    micro_now = micro;
    hpml_trainer_attach(whole.t, &(hpml_hooks){ .run = run_micro });
    for (int step = 0; step < 3; step++) {
        int64_t        samples = step == 1 ? BATCH - 3 : BATCH; /* the second batch is short */
        hpml_step_info a, b;
        good = good && hpml_trainer_step(p.rank[0].t, x, y, samples, &a) == HPML_OK;
        good = good && hpml_trainer_step(whole.t, x, y, samples, &b) == HPML_OK && a.loss == b.loss;
        for (int r = 0; r < ranks && good; r++) good = same_parameters(&p.rank[r], &whole);
        if (!good) printf("    step %d: cut at %d of %d, %d micro-batches: %s\n", step, at[0], whole.to, micro,
                          hpml_ctx_error(p.rank[ranks - 1].ctx));
    }
    good = good && hpml_trainer_predict(p.rank[0].t, x, BATCH - 1, out[0]) == HPML_OK &&
           hpml_trainer_predict(whole.t, x, BATCH - 1, out[1]) == HPML_OK &&
           memcmp(out[0], out[1], (BATCH - 1) * CLASSES * sizeof(float)) == 0;
    for (int r = 0; r < ranks; r++) hpml_ctx_free(p.rank[r].ctx);
    hpml_ctx_free(whole.ctx);
    return good;
}

TEST(two_parts_cut_anywhere_compute_the_bits_of_the_whole)
{
    rank r   = create(1);
    int  ops = r.to;
    hpml_ctx_free(r.ctx);
    ENSURE(ops == 10);
    for (int micro = 1; micro <= 4; micro++)
        for (int at = 1; at < ops; at++) ENSURE(cut_is_whole(2, (int[]){ at, 0 }, micro));
}

TEST(three_parts_cut_anywhere_compute_the_bits_of_the_whole)
{
    for (int at = 1; at < 9; at++)
        for (int to = at + 1; to < 10; to++) ENSURE(cut_is_whole(3, (int[]){ at, to }, 3));
}

static size_t bytes_of(int from, int to, int64_t rows, int slots)
{
    rank        r = create(1);
    hpml_memory m;
    hpml_graph_part(r.g, from, to, rows, slots);
    hpml_graph_memory(r.g, &m);
    size_t before = hpml_ctx_bytes(r.ctx);
    hpml_trainer_alloc(r.t);
    size_t taken = hpml_ctx_bytes(r.ctx) - before;
    if (taken < m.total || taken > m.total + 4096) m.activations = 0;
    hpml_ctx_free(r.ctx);
    return m.activations;
}

TEST(slots_add_what_lives_from_forward_to_backward)
{
    rank        r = create(1);
    hpml_memory m;
    hpml_graph_memory(r.g, &m);
    ENSURE(bytes_of(0, r.to, BATCH, 1) == m.activations); /* one part that is all: nothing changes */
    size_t one = bytes_of(0, r.to, BATCH, 1), two = bytes_of(0, r.to, BATCH, 2), four = bytes_of(0, r.to, BATCH, 4);
    ENSURE(one > 0 && two > one && two < 2 * one && four - two == 2 * (bytes_of(0, r.to, BATCH, 3) - two));
    ENSURE(bytes_of(0, r.to, BATCH / 4, 4) < two && bytes_of(0, 5, BATCH, 1) < one);
    hpml_ctx_free(r.ctx);
}

TEST(crossing_lists_results_that_later_ops_read)
{
    rank         r = create(1);
    hpml_tensor *t[8];
    ENSURE(hpml_graph_crossing(r.g, 0, t, 8) == 0 && hpml_graph_crossing(r.g, r.to, t, 8) == 0);
    ENSURE(hpml_graph_crossing(r.g, 1, t, 8) == 1 && t[0] == hpml_graph_op(r.g, 0)->out);
    ENSURE(hpml_graph_crossing(r.g, 5, t, 1) == 2 && t[0] == hpml_graph_op(r.g, 1)->out); /* the skip connection */
    ENSURE(hpml_graph_op(r.g, r.to) == NULL && hpml_graph_op(NULL, 0) == NULL && hpml_graph_op_count(NULL) == 0);
    hpml_ctx_free(r.ctx);
}

TEST(parts_that_cannot_be_are_refused)
{
    rank    r = create(1);
    float   x[BATCH * IN];
    int32_t y[BATCH];
    fill(x, y);
    ENSURE_ERROR(r.ctx, hpml_graph_part(r.g, 3, 3, BATCH, 1) != HPML_OK, HPML_ERR_ARGUMENT, "expected a range");
    ENSURE_ERROR(r.ctx, hpml_graph_part(r.g, 0, 3, BATCH + 1, 1) != HPML_OK, HPML_ERR_ARGUMENT, "1 to 12 rows");
    ENSURE_ERROR(r.ctx, hpml_graph_part(r.g, 0, 3, BATCH, 0) != HPML_OK, HPML_ERR_ARGUMENT, "at least 1 slot");
    ENSURE(hpml_graph_part(r.g, 0, 3, BATCH, 1) == HPML_OK);
    ENSURE_ERROR(r.ctx, hpml_graph_part(r.g, 2, 5, BATCH, 1) != HPML_OK, HPML_ERR_ARGUMENT, "overlap");
    ENSURE_ERROR(r.ctx, hpml_trainer_step(r.t, x, y, BATCH, NULL) != HPML_OK, HPML_ERR_STATE, "hook `pass`");
    ENSURE_ERROR(r.ctx, hpml_graph_slot(r.g, 1) != HPML_OK, HPML_ERR_ARGUMENT, "slot 1 of 1");
    ENSURE_ERROR(r.ctx, hpml_graph_part(r.g, 5, 6, BATCH, 1) != HPML_OK, HPML_ERR_STATE, "memory already");
    ENSURE(hpml_trainer_attach(r.t, &(hpml_hooks){ .pass = pass }) == HPML_OK);
    ENSURE_ERROR(r.ctx, hpml_trainer_attach(r.t, &(hpml_hooks){ .pass = pass }) != HPML_OK, HPML_ERR_STATE, "only one");
    hpml_ctx_free(r.ctx);
}

/* Blocks with batchnorm, dropout, saved sums (gelu), reshapes and skip connections. how: of each block. */
enum { BLOCKS = 4, WIDTH = 48 };
typedef struct deep {
    hpml_ctx     *ctx;
    hpml_trainer *t;
    hpml_graph   *g;
    int           first[BLOCKS + 1]; /* op of each block */
} deep;
static deep create_deep(bool recompute, hpml_dtype dtype)
{
    const hpml_linear_desc gelu = { .activation = HPML_ACT_GELU };
    const int64_t          rows[] = { BATCH, 4, WIDTH / 4 }, flat[] = { BATCH, WIDTH };
    deep d = { .ctx = hpml_ctx_create(&(hpml_ctx_desc){ .threads = 1, .seed = 3, .activation_dtype = dtype }) };
    hpml_ctx_defer(d.ctx, true);
    hpml_tensor *x = hpml_input_2d(d.ctx, BATCH, IN), *h = hpml_linear(x, WIDTH, NULL);
    int          at = 1;
    for (int i = 0; i < BLOCKS; i++) {
        d.first[i] = at;
        hpml_recompute(d.ctx, recompute);
        hpml_tensor *n = hpml_batchnorm(hpml_linear(h, WIDTH, &gelu), NULL), *a = hpml_dropout(hpml_relu(n), 0.2f);
        hpml_tensor *b = hpml_reshape(hpml_layernorm(hpml_reshape(n, 3, rows), NULL), 2, flat);
        h = hpml_add(a, h);
        h = hpml_relu(hpml_add(hpml_linear(b, WIDTH, &gelu), h));
        hpml_recompute(d.ctx, false);
        at += 11;
    }
    d.first[BLOCKS] = at;
    d.t = hpml_trainer_create(d.ctx, &(hpml_trainer_desc){ .input = x, .output = hpml_linear(h, CLASSES, NULL),
                                                           .lr = 0.1f, .momentum = 0.9f });
    d.g = hpml_trainer_graph(d.t);
    return d;
}

static hpml_memory memory_of(const hpml_graph *g)
{
    hpml_memory m;
    hpml_graph_memory(g, &m);
    return m;
}

/* Trains 3 steps, the second on a short batch, and returns the hash of all parameters and running statistics. */
static uint64_t train(deep *d)
{
    float   x[BATCH * IN];
    int32_t y[BATCH];
    fill(x, y);
    for (int step = 0; step < 3; step++) hpml_trainer_step(d->t, x, y, step == 1 ? BATCH - 3 : BATCH, NULL);
    uint64_t hash = hpml_param_hash(d->ctx);
    if (hpml_ctx_status(d->ctx) != HPML_OK) printf("    %s\n", hpml_ctx_error(d->ctx));
    hpml_ctx_free(d->ctx);
    return hash;
}

TEST(segments_computed_again_give_the_same_bits_in_less_memory)
{
    for (int half = 0; half < 2; half++) {
        hpml_dtype  dtype = half ? HPML_DTYPE_BF16 : HPML_DTYPE_F32;
        deep        kept = create_deep(false, dtype), again = create_deep(true, dtype);
        hpml_memory a = memory_of(kept.g), b = memory_of(again.g);
        ENSURE(hpml_graph_op_count(kept.g) == kept.first[BLOCKS] + 2);
        ENSURE(b.activations * 10 < a.activations * 7 && b.extra > 0 && a.extra == 0 && b.host == 0);
        size_t before = hpml_ctx_bytes(again.ctx);
        ENSURE(hpml_trainer_alloc(again.t) == HPML_OK && hpml_ctx_bytes(again.ctx) - before < b.total + 24000);
        ENSURE(train(&kept) == train(&again));
    }
}

/* Sets how each block is retained, by the digits of `choice` in base 3. */
static void retain(deep *d, int choice)
{
    for (int i = 0; i < BLOCKS; i++, choice /= 3)
        hpml_graph_retain(d->g, d->first[i], d->first[i + 1], (hpml_retain_how)(choice % 3));
}

TEST(each_segment_kept_computed_again_or_swapped_gives_the_same_bits)
{
    deep     whole = create_deep(false, HPML_DTYPE_F32);
    uint64_t want = train(&whole);
    for (int choice = 1; choice < 81; choice += 4) {
        deep d = create_deep(false, HPML_DTYPE_F32);
        retain(&d, choice);
        bool swaps = false;
        for (int rest = choice; rest > 0; rest /= 3) swaps = swaps || rest % 3 == HPML_RETAIN_SWAP;
        ENSURE((memory_of(d.g).host > 0) == swaps);
        ENSURE(train(&d) == want);
    }
}

TEST(a_budget_takes_the_cheapest_plan_that_fits)
{
    deep        d = create_deep(true, HPML_DTYPE_F32), whole = create_deep(false, HPML_DTYPE_F32);
    hpml_memory in_core = memory_of(whole.g), m;
    size_t      all = in_core.activations + in_core.scratch;
    uint64_t    want = train(&whole);
    double      extra[81];
    size_t      bytes[81], least = all;
    for (int choice = 0; choice < 81; choice++) {
        retain(&d, choice);
        m = memory_of(d.g);
        extra[choice] = m.extra;
        bytes[choice] = m.activations + m.scratch;
        if (bytes[choice] < least) least = bytes[choice];
    }
    hpml_ctx_free(d.ctx);
    for (int percent = 40; percent <= 100; percent += 10) {
        size_t budget = all * (size_t)percent / 100;
        double best = -1;
        for (int choice = 0; choice < 81; choice++)
            if (bytes[choice] <= budget && (best < 0 || extra[choice] < best)) best = extra[choice];
        d = create_deep(true, HPML_DTYPE_F32);
        ENSURE(hpml_graph_budget(d.g, budget, 0) == (best < 0 ? HPML_ERR_MEMORY : HPML_OK));
        m = memory_of(d.g);
        if (best < 0) hpml_ctx_free(d.ctx);
        if (best < 0) continue;
        ENSURE(m.activations + m.scratch <= budget && m.extra <= 1.05 * best && (percent < 100 || m.extra == 0));
        ENSURE(train(&d) == want);
    }
    ENSURE(least < all);
}

TEST(a_graph_without_segments_cuts_itself_for_a_budget)
{
    deep        whole = create_deep(false, HPML_DTYPE_F32), d = create_deep(false, HPML_DTYPE_F32);
    hpml_memory in_core = memory_of(whole.g), m;
    size_t      all = in_core.activations + in_core.scratch;
    uint64_t    want = train(&whole);
    ENSURE_ERROR(d.ctx, hpml_graph_budget(d.g, 1000, 0) != HPML_OK, HPML_ERR_MEMORY, "the least that was found is");
    ENSURE(hpml_graph_budget(d.g, all * 4 / 10, 0) == HPML_OK); /* 40 % */
    m = memory_of(d.g);
    ENSURE(m.activations + m.scratch <= all * 4 / 10 && m.extra > 0);
    ENSURE(train(&d) == want);
    d = create_deep(false, HPML_DTYPE_F32);
    ENSURE(hpml_graph_budget(d.g, 0, 0) == HPML_OK && memory_of(d.g).activations < in_core.activations);
    hpml_trainer_alloc(d.t);
    ENSURE_ERROR(d.ctx, hpml_graph_budget(d.g, all, 0) != HPML_OK, HPML_ERR_STATE, "memory already");
    ENSURE_ERROR(d.ctx, hpml_graph_retain(d.g, 0, 1, HPML_RETAIN_SWAP) != HPML_OK, HPML_ERR_STATE, "memory already");
    ENSURE(train(&d) == want);
}

/* An output that is a reshape of a result within a segment keeps its numbers through the backward pass. */
TEST(an_output_that_reshapes_a_result_of_a_segment_outlives_the_backward_pass)
{
    float        before[2 * 4], after[2 * 4];
    hpml_ctx    *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .threads = 1 });
    hpml_tensor *x = hpml_input_3d(ctx, 2, 3, 4), *h = hpml_linear(hpml_tanh(hpml_linear(x, 4, NULL)), 4, NULL);
    hpml_tensor *y = hpml_last(h, NULL), *loss = hpml_mean(hpml_mul(y, hpml_sin(y)), HPML_ALL_DIMS);
    hpml_graph  *g = hpml_graph_create(ctx, &(hpml_graph_desc){ .output_count = 1, .outputs = &y, .loss = loss });
    ENSURE(hpml_graph_budget(g, 0, 0) == HPML_OK && hpml_graph_alloc(g) == HPML_OK);
    for (int i = 0; i < 24; i++) x->data[i] = (float)i - 2.5f;
    ENSURE(hpml_graph_forward(g, true, 0) == HPML_OK && hpml_tensor_get(y, before, 8) == HPML_OK);
    ENSURE(hpml_graph_backward(g, 1, false) == HPML_OK && hpml_tensor_get(y, after, 8) == HPML_OK);
    ENSURE(memcmp(before, after, sizeof before) == 0);
    hpml_ctx_free(ctx);
}

/* ---- copies to host memory and back while ops run ---- */

/* Ops and copies that sleep, and when they do. */
enum { ASLEEP = 8, SPANS = 64 }; /* layers; most spans of one kind in a step */
#define OP_S   0.010
#define COPY_S 0.003
typedef struct spans { double begin[SPANS], end[SPANS]; int count; } spans;
static spans ops_slept, copies_slept;
static bool  copies_sleep, copies_fail;

static void sleep_for(spans *s, double seconds)
{
    const struct timespec time = { 0, (long)(1e9 * seconds) };
    const int k = __atomic_fetch_add(&s->count, 1, __ATOMIC_RELAXED);
    if (k >= SPANS) return;
    s->begin[k] = hpml_now();
    nanosleep(&time, NULL);
    s->end[k] = hpml_now();
}

static hpml_status sleeping_read(void *device, void *host, const void *src, size_t bytes)
{
    if (copies_sleep && bytes > 1000) sleep_for(&copies_slept, COPY_S);
    if (copies_sleep && copies_fail) return HPML_ERR_WRITE;
    return hpml_backend_cpu()->read(device, host, src, bytes);
}
static hpml_status sleeping_write(void *device, void *dst, const void *host, size_t bytes)
{
    if (copies_sleep && bytes > 1000) sleep_for(&copies_slept, COPY_S);
    return hpml_backend_cpu()->write(device, dst, host, bytes);
}
static hpml_status bend_forward(const hpml_run *run, hpml_node *n)
{
    (void)run;
    if (copies_sleep) sleep_for(&ops_slept, OP_S);
    for (int64_t i = 0; i < hpml_tensor_count(n->out); i++) n->out->data[i] = tanhf(n->src[0]->data[i]);
    return HPML_OK;
}
static hpml_status bend_backward(const hpml_run *run, hpml_node *n)
{
    float dx[BATCH * WIDTH];
    if (copies_sleep) sleep_for(&ops_slept, 2 * OP_S);
    for (int64_t i = 0; i < hpml_tensor_count(n->out); i++) {
        const float y = tanhf(n->src[0]->data[i]);
        dx[i] = (1 - y * y) * n->out->grad[i];
    }
    hpml_node_give(run, n, 0, dx);
    return HPML_OK;
}

/* Trains a chain of layers whose results are swapped; returns the hash of the parameters. */
static uint64_t train_asleep(bool swaps)
{
    const size_t      bytes  = BATCH * WIDTH * sizeof(float);
    hpml_backend      device = *hpml_backend_cpu();
    const hpml_custom bend = { .name = "bend", .forward = bend_forward, .backward = bend_backward, .keeps = 1,
                                 .flops = 8 * (double)bytes * OP_S / COPY_S }; /* a byte is copied in 8 operations */
    float             x[BATCH * IN];
    int32_t           y[BATCH];
    fill(x, y);
    device.read  = sleeping_read;
    device.write = sleeping_write;
    hpml_ctx *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .threads = 1, .seed = 3, .backend = &device });
    hpml_ctx_defer(ctx, true);
    hpml_tensor *in = hpml_input_2d(ctx, BATCH, IN), *h = hpml_linear(in, WIDTH, NULL);
    for (int i = 0; i < ASLEEP; i++) h = hpml_custom_op(&h, 1, &bend);
    h = hpml_linear(h, CLASSES, NULL);
    hpml_trainer *t = hpml_trainer_create(ctx, &(hpml_trainer_desc){ .input = in, .output = h, .lr = 0.1f });
    for (int i = 0; i < ASLEEP && swaps; i++) hpml_graph_retain(hpml_trainer_graph(t), i, i + 1, HPML_RETAIN_SWAP);
    hpml_trainer_step(t, x, y, BATCH, NULL);
    ops_slept.count = copies_slept.count = 0;
    copies_sleep = swaps;
    hpml_status status = hpml_trainer_step(t, x, y, BATCH, NULL);
    copies_sleep  = false;
    uint64_t hash = status == HPML_OK ? hpml_param_hash(ctx) : 0;
    hpml_ctx_free(ctx);
    return hash;
}

/* A result is copied out while the next layers run, and copied back in while later layers' backward passes run: of the
   time that copies take at least 80 % is hidden. Of several trials the best counts, as a busy machine sleeps long. */
TEST(copies_run_while_ops_run)
{
    const uint64_t want = train_asleep(false);
    double         best = 0;
    ENSURE(want != 0);
    for (int trial = 0; trial < 5 && best < 0.8; trial++) {
        ENSURE(train_asleep(true) == want);
        double all = 0, hidden = 0;
        for (int i = 0; i < copies_slept.count; i++) {
            all += copies_slept.end[i] - copies_slept.begin[i];
            for (int k = 0; k < ops_slept.count; k++)
                hidden += fmax(0, fmin(copies_slept.end[i], ops_slept.end[k]) -
                                  fmax(copies_slept.begin[i], ops_slept.begin[k]));
        }
        ENSURE(copies_slept.count == 2 * ASLEEP && ops_slept.count == 2 * ASLEEP);
        best = fmax(best, hidden / all);
    }
    printf("    %.0f %% of the time of copies is hidden\n", 100 * best);
    ENSURE(best >= 0.8);
}

/* A copy that fails ends the step with its status. */
TEST(a_copy_that_fails_ends_the_step)
{
    copies_fail = true;
    ENSURE(train_asleep(true) == 0);
    copies_fail = false;
}

/* ---- the backward pass in two halves ---- */

/* y = x p, with p (1) a parameter; counts in *user how often each gradient was computed. */
static hpml_status times_forward(const hpml_run *run, hpml_node *n)
{
    (void)run;
    for (int64_t i = 0; i < hpml_tensor_count(n->out); i++) n->out->data[i] = n->src[0]->data[i] * n->src[1]->data[0];
    return HPML_OK;
}
static hpml_status times_backward(const hpml_run *run, hpml_node *n)
{
    int  *calls = (int *)n->attr.custom->user;
    float dx[BATCH * 24], dp = 0;
    for (int64_t i = 0; i < hpml_tensor_count(n->out); i++) {
        dx[i] = n->out->grad[i] * n->src[1]->data[0];
        dp += n->out->grad[i] * n->src[0]->data[i];
    }
    calls[0] += n->src[0]->grad != NULL;
    calls[1] += n->src[1]->grad != NULL;
    calls[2]++;
    hpml_node_give(run, n, 0, dx);
    hpml_node_give(run, n, 1, &dp);
    return HPML_OK;
}

/* All kinds of products, in place and with saved sums; a weight of two layers; a table that an embedding reads as well;
   layers whose parameters are no product's. */
typedef struct halved {
    hpml_ctx    *ctx;
    hpml_graph  *g;
    hpml_tensor *x, *y, *tokens;
    int          ops, calls[3];
} halved;

static hpml_tensor *halved_layers(halved *k)
{
    const hpml_linear_desc gelu = { .activation = HPML_ACT_GELU }, relu = { .activation = HPML_ACT_RELU };
    const hpml_conv2d_desc conv[5] = {
        { .kernel_h = 3, .padding_h = 1, .activation = HPML_ACT_RELU }, { .kernel_h = 1, .activation = HPML_ACT_TANH },
        { .kernel_h = 3, .padding_h = 1, .groups = 2, .activation = HPML_ACT_SIGMOID, .algorithm = HPML_CONV_IM2COL },
        { .kernel_h = 3, .padding_h = 1, .groups = 4, .activation = HPML_ACT_RELU },
        { .kernel_h = 3, .padding_h = 1, .groups = 2, .activation = HPML_ACT_TANH },
    };
    const hpml_param_desc  one = { .name = "one", .ndim = 1, .shape = { 1 }, .init = HPML_INIT_ONES };
    const hpml_param_desc  mix = { .name = "mix", .ndim = 2, .shape = { 24, 24 }, .init = HPML_INIT_NORMAL,
                                   .init_scale = 0.2f };
    const hpml_param_desc  table = { .name = "table", .ndim = 2, .shape = { 7, 24 }, .init = HPML_INIT_NORMAL };
    const int64_t          images[] = { BATCH, 4, 2, 2 }, steps[] = { BATCH, 4, 4 }, flat[] = { BATCH, 24 };
    hpml_tensor *h = hpml_reshape(k->x, 4, images), *p = hpml_param_create(k->ctx, &one);
    hpml_tensor *w = hpml_param_create(k->ctx, &table);
    for (int i = 0; i < 5; i++) h = hpml_conv2d(h, 4, &conv[i]);
    h = hpml_reshape(hpml_lstm(hpml_reshape(h, 3, steps), 6, NULL), 2, flat);
    hpml_tensor *first = hpml_linear(h, 24, &gelu);
    h = hpml_add(first, hpml_embedding(k->tokens, 7, 24, &(hpml_embedding_desc){ .weight = w }));
    h = hpml_linear(hpml_dropout(hpml_relu(h), 0.2f), 24, &(hpml_linear_desc){ .weight = first->node->src[1] });
    h = hpml_layernorm(hpml_matmul(h, hpml_param_create(k->ctx, &mix), false, true), NULL);
    h = hpml_custom_op((hpml_tensor *[]){ h, p }, 2, &(hpml_custom){ .name = "times", .forward = times_forward,
                       .backward = times_backward, .user = k->calls, .halves = true });
    h = hpml_add(hpml_linear(h, 24, &relu), h);
    return hpml_linear(h, 7, &(hpml_linear_desc){ .weight = w });
}

/* how: of the layers from op 4 to 14 */
static void halved_create(halved *k, bool halves, hpml_dtype dtype, hpml_retain_how how, int slots)
{
    const int64_t batch = BATCH;
    memset(k, 0, sizeof *k);
    k->ctx    = hpml_ctx_create(&(hpml_ctx_desc){ .threads = 1, .seed = 3, .activation_dtype = dtype });
    k->x      = hpml_input_2d(k->ctx, BATCH, IN);
    k->tokens = hpml_input(k->ctx, HPML_DTYPE_I32, 1, &batch);
    k->y      = hpml_input(k->ctx, HPML_DTYPE_I32, 1, &batch);
    hpml_tensor *loss = hpml_cross_entropy(halved_layers(k), k->y, NULL);
    k->g      = hpml_graph_create(k->ctx, &(hpml_graph_desc){ .loss = loss });
    k->ops    = hpml_graph_op_count(k->g);
    if (how != HPML_RETAIN_KEEP) hpml_graph_retain(k->g, 4, 14, how);
    if (halves) hpml_graph_halves(k->g);
    hpml_graph_part(k->g, 0, k->ops, BATCH, slots);
}

/* Runs the tasks "F0 B0 W0 ...": F is a forward pass in slot 0, B its backward pass or with halves the first of them,
   W the second. The samples of slots differ. */
static bool halved_run(halved *k, bool halves, const char *tasks)
{
    for (const char *t = tasks; *t; t += t[2] ? 3 : 2) {
        const int  slot = t[1] - '0';
        const bool adds = strchr(tasks, t[0]) < t; /* not the first of its kind */
        hpml_rng  rng  = { 5, 0, (uint64_t)slot * 1000 };
        hpml_graph_slot(k->g, slot);
        if (hpml_ctx_status(k->ctx) != HPML_OK) return false;
        if (t[0] == 'F') {
            for (int i = 0; i < BATCH * IN; i++) k->x->data[i] = hpml_rng_uniform(&rng) - 0.5f;
            for (int i = 0; i < BATCH; i++) ((int32_t *)k->tokens->raw)[i] = (int32_t)hpml_rng_below(&rng, 7);
            for (int i = 0; i < BATCH; i++) ((int32_t *)k->y->raw)[i] = (int32_t)hpml_rng_below(&rng, 7);
            hpml_graph_forward(k->g, true, (uint64_t)slot);
        } else if (!halves) {
            if (t[0] == 'B') hpml_graph_backward(k->g, 1, adds);
        } else
            hpml_graph_backward_half(k->g, t[0] == 'B' ? HPML_HALF_INPUTS : HPML_HALF_WEIGHTS, 1, adds);
    }
    if (hpml_ctx_status(k->ctx) != HPML_OK) printf("    %s\n", hpml_ctx_error(k->ctx));
    return hpml_ctx_status(k->ctx) == HPML_OK;
}

static bool same_gradients(const halved *a, const halved *b)
{
    for (int i = 0; i < hpml_param_count(a->ctx); i++) {
        const hpml_tensor *p = hpml_param_at(a->ctx, i), *q = hpml_param_at(b->ctx, i);
        if (memcmp(p->grad, q->grad, (size_t)hpml_tensor_count(p) * sizeof(float)) == 0) continue;
        printf("    the gradient of %s differs\n", p->name);
        return false;
    }
    return true;
}

#define HALVED_TASKS "F0 F1 F2 B0 F3 B1 W0 B2 W1 F0 W2 B3 W3 B0 W0" /* slot 0 twice */

TEST(two_halves_have_the_bits_of_one_pass)
{
    for (int dtype = 0; dtype < 2; dtype++)
        for (int how = HPML_RETAIN_KEEP; how <= HPML_RETAIN_SWAP; how++) {
            halved a, b;
            halved_create(&a, false, dtype ? HPML_DTYPE_BF16 : HPML_DTYPE_F32, HPML_RETAIN_KEEP, 4);
            halved_create(&b, true, dtype ? HPML_DTYPE_BF16 : HPML_DTYPE_F32, (hpml_retain_how)how, 4);
            ENSURE(halved_run(&a, false, HALVED_TASKS) && halved_run(&b, true, HALVED_TASKS));
            ENSURE(same_gradients(&a, &b));
            ENSURE(b.calls[0] == a.calls[0] && b.calls[1] == a.calls[1] && b.calls[2] == 2 * a.calls[2]);
            hpml_ctx_free(a.ctx);
            hpml_ctx_free(b.ctx);
        }
}

/* Bytes that a slot adds for a chain of linear layers, (BATCH, 64) each; act: their activation. */
static size_t chain_slot(bool halves, int layers, hpml_act act)
{
    const int64_t batch = BATCH;
    size_t        bytes[2];
    for (int k = 0; k < 2; k++) {
        hpml_ctx    *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .threads = 1 });
        hpml_tensor *h = hpml_input_2d(ctx, BATCH, 64), *y = hpml_input(ctx, HPML_DTYPE_I32, 1, &batch);
        for (int i = 0; i < layers; i++) h = hpml_linear(h, 64, &(hpml_linear_desc){ .activation = act });
        hpml_graph *g = hpml_graph_create(ctx, &(hpml_graph_desc){ .loss = hpml_cross_entropy(h, y, NULL) });
        if (halves) hpml_graph_halves(g);
        hpml_graph_part(g, 0, layers + 1, BATCH, 3 + k);
        size_t before = hpml_ctx_bytes(ctx);
        hpml_graph_alloc(g);
        size_t taken = hpml_ctx_bytes(ctx) - before, want = memory_of(g).total;
        bytes[k] = memory_of(g).activations;
        if (taken < want || taken > want + 4096) bytes[k] = 0;
        hpml_ctx_free(ctx);
    }
    return bytes[1] - bytes[0];
}

TEST(halves_keep_inputs_of_products_and_gradients_of_their_results)
{
    static const hpml_act acts[] = { HPML_ACT_NONE, HPML_ACT_TANH, HPML_ACT_GELU };
    const size_t          one = BATCH * 64 * sizeof(float);
    for (int k = 0; k < 3; k++)
        for (size_t layers = 3; layers <= 6; layers++) {
            size_t whole = chain_slot(false, (int)layers, acts[k]), halves = chain_slot(true, (int)layers, acts[k]);
            size_t sums  = acts[k] == HPML_ACT_GELU; /* gelu keeps sums until the first half */
            ENSURE(whole / one == layers + 1 + sums * layers);
            ENSURE(halves / one == 2 * layers + 3 * sums);
        }
}

TEST(halves_that_cannot_be_are_refused)
{
    halved k;
    halved_create(&k, false, HPML_DTYPE_F32, HPML_RETAIN_KEEP, 1);
    ENSURE(halved_run(&k, false, "F0"));
    ENSURE_ERROR(k.ctx, hpml_graph_backward_half(k.g, HPML_HALF_INPUTS, 1, false) != HPML_OK, HPML_ERR_STATE,
                 "hpml_graph_halves");
    ENSURE_ERROR(k.ctx, hpml_graph_halves(k.g) != HPML_OK, HPML_ERR_STATE, "memory already");
    ENSURE(hpml_graph_halves(NULL) == HPML_ERR_ARGUMENT);
    hpml_ctx_free(k.ctx);
}

/* A trainer steps by both halves in one call, with the same bits, and calls its hook for each gradient once. */
static hpml_status counts_gradients(void *user, hpml_trainer *t, const hpml_moment *at)
{
    (void)t;
    ((int *)user)[at->param]++;
    return HPML_OK;
}
TEST(a_step_with_halves_is_a_step)
{
    deep a = create_deep(false, HPML_DTYPE_F32), b = create_deep(true, HPML_DTYPE_F32);
    int  calls[64] = { 0 };
    ENSURE(hpml_graph_halves(b.g) == HPML_OK);
    hpml_trainer_attach(b.t, &(hpml_hooks){ .user = calls, .grad = counts_gradients });
    int params = hpml_param_count(b.ctx), want[64];
    for (int i = 0; i < params; i++) want[i] = hpml_param_at(b.ctx, i)->param->buffer ? 0 : 3; /* steps */
    ENSURE(train(&a) == train(&b) && params <= 64);
    ENSURE(memcmp(calls, want, (size_t)params * sizeof(int)) == 0);
}
