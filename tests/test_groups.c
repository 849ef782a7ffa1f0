/* Layers split over the ranks of a group (.split), parameters that are parts of a whole, the ops hpml_group_*, and
   files of wholes: losses, gradients, weights and files against the same program on one rank. */
#include "groups.h"
#include "files.h"
#include "test.h"

enum { B = 4, T = 8, C = 32, HEADS = 4, VOCABULARY = 24, MAX_PARAMS = 64, STEPS = 20 };

/* What a model computes on one rank: its first loss and gradients, the weights after STEPS steps. */
typedef struct outcome {
    float  loss, last_loss, accuracy, *first[MAX_PARAMS], *grad[MAX_PARAMS], *after[MAX_PARAMS];
    int    params;
} outcome;
typedef struct model {
    const char *name;
    void      (*record)(hpml_ctx *ctx, hpml_trainer_desc *d);
    int         forward, backward; /* sums of a pass; -1: any */
    double      grad_off;          /* most difference of gradients, in parts of their norm */
} model;
typedef struct job {
    const model *m;
    outcome      serial;
    float        x[B * T * C], y[B * T * C]; /* a batch of numbers; tokens and labels are derived from them */
    int32_t      tokens[B * T], labels[B * T];
    double       worst;            /* of all ranks; for messages */
    char         where[128];
} job;

static float number(int64_t i)
{
    hpml_rng r = { 5, 1, (uint64_t)i };
    return 2 * hpml_rng_uniform(&r) - 1;
}

static float *copy_of(const float *x, int64_t n)
{
    float *y = (float *)malloc((size_t)n * sizeof *y);
    memcpy(y, x, (size_t)n * sizeof *y);
    return y;
}

/* Returns the norm of the difference between a part and its place in the whole, in parts of the whole's norm. */
static double off_whole(const hpml_tensor *p, const float *mine, const float *whole)
{
    int64_t shape[HPML_MAX_DIMS], n = hpml_tensor_count(p), all = 1;
    double  worst = 0, norm = 0;
    float  *part = (float *)malloc((size_t)n * sizeof *part);
    hpml_param_whole(p, shape);
    for (int i = 0; i < p->ndim; i++) all *= shape[i];
    for (int64_t i = 0; i < all; i++) norm += (double)whole[i] * (double)whole[i];
    hpml_param_copy(p, part, 0, n, (float *)(uintptr_t)whole, false);
    for (int64_t i = 0; i < n; i++) worst += pow((double)part[i] - (double)mine[i], 2);
    free(part);
    return sqrt(worst) / (sqrt(norm) + 1e-6);
}

static void *batch_of(job *j, const hpml_tensor *t, bool target)
{
    if (t->dtype != HPML_DTYPE_I32) return target ? j->y : j->x;
    return target ? j->labels : j->tokens;
}

/* Runs a pass forward and backward, then STEPS steps; the serial run keeps all, other ranks compare with it. */
static hpml_status train(hpml_ctx *ctx, seat *at, void *user)
{
    job              *j = (job *)user;
    outcome          *o = &j->serial;
    hpml_trainer_desc d = { .optimizer = HPML_OPT_ADAMW, .lr = 0.003f };
    hpml_step_info    info = { 0 };
    j->m->record(ctx, &d);
    hpml_trainer *t = hpml_trainer_create(ctx, &d);
    hpml_graph   *g = hpml_trainer_graph(t);
    if (!t) return hpml_ctx_status(ctx);
    void *x = batch_of(j, d.input, false), *y = batch_of(j, d.target, true);
    hpml_tensor_set_raw(d.input, x, (size_t)hpml_tensor_count(d.input) * 4);
    hpml_tensor_set_raw(d.target, y, (size_t)hpml_tensor_count(d.target) * 4);
    hpml_graph_forward(g, true, 3);
    int forward = at->sums;
    hpml_graph_backward(g, 1, false);
    int   backward = at->sums - forward;
    float loss = d.loss_tensor->data[0];
    bool  serial = at->w->ranks == 1;
    int   params = hpml_param_count(ctx);
    double worst[3] = { 0, 0, 0 };
    for (int i = 0; i < params; i++) {
        hpml_tensor *p = hpml_param_at(ctx, i);
        int64_t      n = hpml_tensor_count(p);
        if (serial) o->first[i] = copy_of(p->data, n);
        if (serial && p->grad) o->grad[i] = copy_of(p->grad, n);
        if (serial) continue;
        worst[0] = fmax(worst[0], off_whole(p, p->data, o->first[i]));
        double off = p->grad ? off_whole(p, p->grad, o->grad[i]) : 0;
        if (off > worst[1]) snprintf(j->where, sizeof j->where, "%s", p->name);
        worst[1] = fmax(worst[1], off);
    }
    hpml_trainer_forward_backward(t, 0, 0, 1, false, NULL); /* ranks without samples: ops of groups run, with zeros */
    for (int i = 0; i < params; i++)
        for (int64_t k = 0; hpml_param_at(ctx, i)->grad && k < hpml_tensor_count(hpml_param_at(ctx, i)); k++)
            if (hpml_param_at(ctx, i)->grad[k] != 0) worst[0] = 1;
    for (int i = 0; i < STEPS; i++) hpml_trainer_step(t, x, y, B, &info);
    for (int i = 0; i < params; i++) {
        hpml_tensor *p = hpml_param_at(ctx, i);
        if (serial) o->after[i] = copy_of(p->data, hpml_tensor_count(p));
        else if (p->ndim > 1) worst[2] = fmax(worst[2], off_whole(p, p->data, o->after[i]));
    }
    if (hpml_ctx_status(ctx) != HPML_OK) return hpml_ctx_status(ctx);
    if (serial) {
        o->loss      = loss;
        o->last_loss = info.loss;
        o->accuracy  = info.accuracy;
        o->params    = params;
        return HPML_OK;
    }
    bool counts = j->m->forward < 0 || (forward == j->m->forward && backward == j->m->backward);
    if (worst[0] != 0 || worst[1] > j->m->grad_off || fabsf(loss - o->loss) > 1e-6f * fabsf(o->loss) ||
        worst[2] > 1e-3 || fabsf(info.loss - o->last_loss) > 1e-4f || info.accuracy != o->accuracy || !counts ||
        params != o->params)
        return hpml_ctx_fail(ctx, HPML_ERR_STATE, "%s, rank %d of %d: first values off %.2g, gradients off %.2g (%s), "
                             "weights off %.2g at the end; loss %.8g for %.8g, then %.8g for %.8g; accuracy %g for "
                             "%g; sums %d and %d", j->m->name, at->rank, at->w->ranks, worst[0], worst[1], j->where,
                             worst[2], (double)loss, (double)o->loss, (double)info.loss, (double)o->last_loss,
                             (double)info.accuracy, (double)o->accuracy, forward, backward);
    return HPML_OK;
}

static void outcome_free(outcome *o)
{
    for (int i = 0; i < o->params; i++) {
        free(o->first[i]);
        free(o->grad[i]);
        free(o->after[i]);
    }
}

static job batch; /* for tests of files */
static void batch_fill(job *j)
{
    for (int i = 0; i < B * T * C; i++) {
        j->x[i] = number(i);
        j->y[i] = number(100000 + i);
    }
    for (int i = 0; i < B * T; i++) {
        j->tokens[i] = (int32_t)(12 * (1 + 0.99f * number(200000 + i)));
        j->labels[i] = (int32_t)(12 * (1 + 0.99f * number(300000 + i)));
    }
    j->labels[5] = HPML_IGNORE;
}

/* Trains the model on 1 rank, then on 2 and 4. */
static bool as_serial(const model *m)
{
    static job j;
    char       error[300] = "";
    memset(&j, 0, sizeof j);
    j.m = m;
    batch_fill(&j);
    for (int ranks = 1; ranks <= 4 && !error[0]; ranks *= 2)
        run_ranks(ranks, HPML_AXIS_TENSOR, NULL, train, &j, error);
    outcome_free(&j.serial);
    if (error[0]) printf("    %s\n", error);
    return !error[0];
}

static bool without_split; /* linear layers are recorded without .split */
static hpml_tensor *linear(hpml_tensor *x, int64_t out, hpml_split split, hpml_act act)
{
    const hpml_linear_desc d = { .split = without_split ? HPML_SPLIT_NONE : split, .activation = act };
    return hpml_linear(x, out, &d);
}

static hpml_tensor *mlp(hpml_tensor *x, int64_t hidden)
{
    int64_t      out = x ? x->shape[x->ndim - 1] : 1;
    hpml_tensor *h   = hpml_dropout(linear(x, hidden, HPML_SPLIT_OUT, HPML_ACT_GELU), 0.2f); /* the serial mask */
    return linear(h, out, HPML_SPLIT_IN, HPML_ACT_RELU);
}

static hpml_tensor *attention(hpml_tensor *x)
{
    const hpml_linear_desc    qkv = { .split = HPML_SPLIT_OUT, .sections = 3 };
    const hpml_attention_desc a   = { .heads = HEADS };
    return linear(hpml_attention(hpml_linear(x, 3 * C, &qkv), &a), C, HPML_SPLIT_IN, HPML_ACT_NONE);
}

/* Heads with rotary positions, which ranks rotate each for themselves, and a mask, which all have. */
static hpml_tensor *rotary_attention(hpml_tensor *x)
{
    const hpml_linear_desc qkv = { .split = HPML_SPLIT_OUT, .sections = 3 };
    const hpml_rotary_desc turn = { .heads = 3 * HEADS, .rotated = 2 * HEADS };
    hpml_attention_desc    a = { .heads = HEADS, .mask = hpml_tensor_create_2d(x->ctx, x->shape[0], x->shape[1]) };
    for (int64_t i = 0; a.mask && i < hpml_tensor_count(a.mask); i++) a.mask->data[i] = i % 3 != 1;
    return linear(hpml_attention(hpml_rotary(hpml_linear(x, 3 * C, &qkv), &turn), &a), C, HPML_SPLIT_IN, HPML_ACT_NONE);
}

static void squares(hpml_ctx *ctx, hpml_trainer_desc *d, hpml_tensor *x, hpml_tensor *y)
{
    d->input       = x;
    d->output      = y;
    d->target      = y ? hpml_input(ctx, HPML_DTYPE_F32, y->ndim, y->shape) : NULL;
    d->loss        = HPML_LOSS_MSE;
    d->loss_tensor = hpml_mse(y, d->target);
}

static void record_mlp(hpml_ctx *ctx, hpml_trainer_desc *d)
{
    hpml_tensor *x = hpml_input_2d(ctx, B * T, C), *h = linear(x, C, HPML_SPLIT_NONE, HPML_ACT_NONE);
    squares(ctx, d, x, linear(mlp(h, 4 * C), 8, HPML_SPLIT_NONE, HPML_ACT_NONE));
}

static void record_attention(hpml_ctx *ctx, hpml_trainer_desc *d)
{
    hpml_tensor *x = hpml_input_3d(ctx, B, T, C), *h = linear(x, C, HPML_SPLIT_NONE, HPML_ACT_NONE);
    squares(ctx, d, x, hpml_add(h, attention(hpml_layernorm(h, NULL))));
}

static void record_rotary(hpml_ctx *ctx, hpml_trainer_desc *d)
{
    hpml_tensor *x = hpml_input_3d(ctx, B, T, C), *h = linear(x, C, HPML_SPLIT_NONE, HPML_ACT_NONE);
    squares(ctx, d, x, hpml_add(h, rotary_attention(hpml_layernorm(hpml_clamp(h, -2, 2), NULL))));
}

/* A small GPT: everything that has a split is split; the last layer is the table of tokens. */
static void record_gpt(hpml_ctx *ctx, hpml_trainer_desc *d)
{
    const hpml_embedding_desc words  = { .split = HPML_SPLIT_OUT, .name = "wte", .init = HPML_INIT_NORMAL };
    const hpml_param_desc     places = { .ndim = 2, .shape = { T, C }, .name = "wpe", .init = HPML_INIT_NORMAL };
    const hpml_cross_entropy_desc ce = { .label_smoothing = 0.1f };
    hpml_tensor *x = hpml_input_tokens(ctx, B, T);
    hpml_tensor *h = hpml_add(hpml_embedding(x, VOCABULARY, C, &words), hpml_param_create(ctx, &places));
    for (int l = 0; l < 2; l++) {
        h = hpml_add(h, hpml_dropout(attention(hpml_layernorm(h, NULL)), 0.1f));
        h = hpml_add(h, hpml_dropout(mlp(hpml_layernorm(h, NULL), 4 * C), 0.1f));
    }
    const hpml_linear_desc head = { .split = HPML_SPLIT_OUT, .no_bias = true,
                                    .weight = hpml_param_find(ctx, "wte.weight") };
    d->input       = x;
    d->output      = hpml_linear(hpml_layernorm(h, NULL), VOCABULARY, &head);
    d->target      = hpml_input_tokens(ctx, B, T);
    d->loss_tensor = hpml_cross_entropy(d->output, d->target, &ce);
}

TEST(mlp_of_two_parts_computes_what_one_rank_computes_with_one_sum_a_pass)
{
    const model m = { "mlp", record_mlp, 1, 1, 1e-5 };
    ENSURE(as_serial(&m));
}

TEST(attention_with_split_heads_makes_one_sum_forward_and_one_backward)
{
    const model m = { "attention", record_attention, 1, 1, 1e-5 };
    ENSURE(as_serial(&m));
}

TEST(rotary_positions_and_a_mask_fit_split_heads)
{
    const model m = { "rotary", record_rotary, 1, 1, 1e-5 };
    ENSURE(as_serial(&m));
}

/* Forward: the table, 2 attention blocks, 2 MLPs, the loss's sum; backward: the last layer's copy and the 4 blocks'. */
TEST(gpt_with_a_split_vocabulary_trains_as_on_one_rank)
{
    const model m = { "gpt", record_gpt, 6, 5, 1e-5 };
    ENSURE(as_serial(&m));
}

/* Files. Weights are drawn, then changed by steps of a program on one rank; ranks load that file and save another. */
typedef struct filing {
    void      (*record)(hpml_ctx *ctx, hpml_trainer_desc *d);
    const char *load, *save, *params; /* checkpoints; NULL: not. params: written by hpml_params_save */
    int         steps;
    job        *j;
} filing;
static hpml_status save_and_load(hpml_ctx *ctx, seat *at, void *user)
{
    const filing     *f = (const filing *)user;
    hpml_trainer_desc d = { .optimizer = HPML_OPT_ADAMW, .lr = 0.003f };
    (void)at;
    f->record(ctx, &d);
    hpml_trainer *t = hpml_trainer_create(ctx, &d);
    if (!t) return hpml_ctx_status(ctx);
    if (f->load) hpml_checkpoint_load(t, f->load);
    for (int i = 0; i < f->steps; i++)
        hpml_trainer_step(t, batch_of(f->j, d.input, false), batch_of(f->j, d.target, true), B, NULL);
    if (f->save) hpml_checkpoint_save(t, f->save);
    if (f->params) hpml_params_save(ctx, f->params, HPML_DTYPE_BF16);
    return hpml_ctx_status(ctx);
}

static bool same_files(const char *a, const char *b)
{
    FILE *f = fopen(a, "rb"), *g = fopen(b, "rb");
    bool  same = f && g;
    int   c = 0;
    while (same && c != EOF) {
        c    = getc(f);
        same = c == getc(g);
    }
    if (f) fclose(f);
    if (g) fclose(g);
    return same;
}

TEST(files_and_checkpoints_of_parts_have_the_bytes_of_one_rank)
{
    char error[300] = "", serial[200], again[200], params[200], others[200];
    snprintf(serial, sizeof serial, "%s", file("serial"));
    snprintf(again, sizeof again, "%s", file("again"));
    snprintf(params, sizeof params, "%s", file("params"));
    snprintf(others, sizeof others, "%s", file("others"));
    filing f = { record_gpt, NULL, serial, params, 3, &batch };
    batch_fill(&batch);
    ENSURE(run_ranks(1, HPML_AXIS_TENSOR, NULL, save_and_load, &f, error) == HPML_OK);
    for (int ranks = 2; ranks <= 4; ranks *= 2) { /* the first values are equal, too: see as_serial */
        f = (filing){ record_gpt, serial, again, others, 0, &batch };
        ENSURE(run_ranks(ranks, HPML_AXIS_TENSOR, NULL, save_and_load, &f, error) == HPML_OK);
        ENSURE(same_files(serial, again));
        ENSURE(same_files(params, others));
        f = (filing){ record_gpt, NULL, again, NULL, 2, &batch }; /* a file of parts that were trained ... */
        ENSURE(run_ranks(ranks, HPML_AXIS_TENSOR, NULL, save_and_load, &f, error) == HPML_OK);
        f = (filing){ record_gpt, again, others, NULL, 0, &batch }; /* ... goes through one rank unchanged */
        ENSURE(run_ranks(1, HPML_AXIS_TENSOR, NULL, save_and_load, &f, error) == HPML_OK);
        ENSURE(same_files(again, others));
    }
    ENSURE(files_like("*.tmp*") == 0);
}

/* A rank cannot write: every rank has an error, and none waits for ever. */
TEST(a_rank_that_cannot_write_is_an_error_on_all_ranks)
{
    char   error[300] = "";
    filing f = { record_mlp, NULL, "/nowhere/at/all", NULL, 0, &batch };
    ENSURE(run_ranks(2, HPML_AXIS_TENSOR, NULL, save_and_load, &f, error) != HPML_OK);
    ENSURE(strstr(error, "/nowhere/at/all") && ranks_failed == 2);
}

/* Collects each array of each parameter on all ranks, after a step. */
static hpml_status collect_all(hpml_ctx *ctx, seat *at, void *user)
{
    job              *j = (job *)user;
    hpml_trainer_desc d = { .optimizer = HPML_OPT_ADAMW, .lr = 0.003f };
    record_gpt(ctx, &d);
    hpml_trainer *t = hpml_trainer_create(ctx, &d);
    hpml_trainer_step(t, j->tokens, j->labels, B, NULL);
    for (int i = 0; i < hpml_param_count(ctx); i++) {
        int64_t whole[HPML_MAX_DIMS], n = 1;
        hpml_param_whole(hpml_param_at(ctx, i), whole);
        for (int k = 0; k < HPML_MAX_DIMS; k++) n *= whole[k];
        float *v = (float *)malloc((size_t)n * sizeof *v);
        hpml_trainer_collect(t, i, HPML_ARRAY_GRADIENTS, v);
        if (at->w->ranks == 1) j->serial.grad[i] = copy_of(v, n);
        if (off_whole(hpml_param_at(ctx, i), hpml_param_at(ctx, i)->grad, v) != 0) j->worst = 1;
        for (int64_t k = 0; at->w->ranks > 1 && k < n; k++)
            if (fabsf(v[k] - j->serial.grad[i][k]) > 1e-5f) j->worst = 1;
        free(v);
    }
    if (hpml_trainer_collect(t, 0, (hpml_array)(HPML_ARRAY_STATE + HPML_MAX_STATES - 1), j->x) == HPML_OK) j->worst = 1;
    hpml_ctx_clear_error(ctx);
    return HPML_OK;
}

TEST(each_rank_can_collect_a_whole_gradient)
{
    static job j;
    char       error[300] = "";
    batch_fill(&j);
    ENSURE(run_ranks(1, HPML_AXIS_TENSOR, NULL, collect_all, &j, error) == HPML_OK);
    ENSURE(run_ranks(4, HPML_AXIS_TENSOR, NULL, collect_all, &j, error) == HPML_OK);
    ENSURE(j.worst == 0);
    for (int i = 0; i < MAX_PARAMS; i++) free(j.serial.grad[i]);
}

/* Attention of simple ops: slices of sections, heads as a dimension, products of heads, with a gate and a bias that
   every rank has whole, so that their gradients are sums over the ranks. */
static void record_composed(hpml_ctx *ctx, hpml_trainer_desc *d)
{
    const hpml_linear_desc qkv   = { .split = HPML_SPLIT_OUT, .sections = 3, .no_bias = true };
    const hpml_param_desc  gate  = { .ndim = 1, .shape = { 1 }, .name = "gate", .init = HPML_INIT_ONES };
    const hpml_param_desc  scale = { .ndim = 4, .shape = { 1, 1, T, T }, .name = "scale" };
    const hpml_param_desc  part  = { .ndim = 1, .shape = { C }, .name = "part", .axis = HPML_AXIS_TENSOR };
    const hpml_param_desc  value = { .ndim = 2, .shape = { C / HEADS, C / HEADS }, .name = "value" };
    const int              by_head[4] = { 0, 2, 1, 3 };
    hpml_tensor *x = hpml_input_3d(ctx, B, T, C), *h = linear(x, C, HPML_SPLIT_NONE, HPML_ACT_NONE), *p[3], *all;
    all = hpml_linear(h, 3 * C, &qkv);
    for (int i = 0; i < 3; i++)
        p[i] = hpml_permute(hpml_reshape_4d(hpml_slice(all, 2, i * C, C), B, T, HEADS, C / HEADS), by_head);
    hpml_tensor *a = hpml_softmax(hpml_mul(hpml_matmul(p[0], p[1], false, true), hpml_param_create(ctx, &scale)));
    a = hpml_matmul(a, hpml_matmul(p[2], hpml_param_create(ctx, &value), false, false), false, false);
    a = hpml_reshape(hpml_permute(a, by_head), 3, (const int64_t[]){ B, T, C });
    a = hpml_mul(hpml_mul(a, hpml_param_create(ctx, &gate)), linear(h, C, HPML_SPLIT_OUT, HPML_ACT_SIGMOID));
    a = hpml_add(a, hpml_param_create(ctx, &part));
    hpml_tensor *both[2] = { a, hpml_tanh(a) };
    a = hpml_slice(hpml_concat(both, 2, 2), 2, C, C);
    squares(ctx, d, x, hpml_add(h, linear(a, C, HPML_SPLIT_IN, HPML_ACT_TANH)));
}

TEST(simple_ops_keep_splits_and_sum_gradients_of_whole_operands)
{
    const model m = { "composed", record_composed, 1, 4, 1e-5 }; /* backward: h's one copy, scale, value, gate */
    ENSURE(as_serial(&m));
}

/* A product whose sums over k are split, and tensors cut and joined by hand. */
static void record_products(hpml_ctx *ctx, hpml_trainer_desc *d)
{
    const hpml_param_desc w = { .ndim = 2, .shape = { C, 8 }, .name = "w" };
    hpml_tensor *x = hpml_input_3d(ctx, B, T, C), *h = linear(x, C, HPML_SPLIT_NONE, HPML_ACT_TANH);
    hpml_tensor *k = hpml_group_split(hpml_param_create(ctx, &w), HPML_AXIS_TENSOR, 0);
    hpml_tensor *y = hpml_matmul(hpml_group_split(h, HPML_AXIS_TENSOR, 2), k, false, false);
    hpml_tensor *t = hpml_group_split(hpml_layernorm(h, NULL), HPML_AXIS_TENSOR, 1);
    t = hpml_group_gather(hpml_tanh(t), HPML_AXIS_TENSOR, 1);
    squares(ctx, d, x, hpml_add(hpml_slice(t, 2, 0, 8), y));
}

TEST(split_and_gather_are_each_others_backward_pass)
{
    const model m = { "products", record_products, 1, 0, 1e-5 };
    ENSURE(as_serial(&m));
}

static hpml_layout layout;
static void record_images(hpml_ctx *ctx, hpml_trainer_desc *d)
{
    const hpml_conv2d_desc plain = { .kernel_h = 3, .padding_h = 1 };
    const hpml_conv2d_desc out   = { .kernel_h = 3, .padding_h = 1, .split = HPML_SPLIT_OUT };
    const hpml_conv2d_desc bare  = { .kernel_h = 3, .padding_h = 1, .split = HPML_SPLIT_OUT, .no_bias = true };
    const hpml_conv2d_desc in    = { .kernel_h = 3, .stride_h = 2, .split = HPML_SPLIT_IN,
                                     .activation = HPML_ACT_RELU };
    hpml_tensor *x = hpml_input_4d(ctx, B, 4, 8, 8);
    hpml_tensor *h = hpml_conv2d(hpml_to_layout(x, layout), 6, &plain);
    h = hpml_relu(hpml_batchnorm(hpml_conv2d(h, 8, &bare), NULL));
    h = hpml_max_pool2d(hpml_conv2d(h, 12, &in), 2, 1, 0);
    h = linear(hpml_flatten(hpml_conv2d(h, 8, &out)), 8, HPML_SPLIT_IN, HPML_ACT_NONE); /* channels, then features */
    squares(ctx, d, x, h);
}

TEST(convolutions_split_by_channels_compute_what_one_rank_computes)
{
    const model m = { "images", record_images, 2, 2, 2e-5 };
    for (int l = 0; l < 2; l++) {
        layout = (hpml_layout)l;
        ENSURE(as_serial(&m));
    }
}

/* The ranks of SEQUENCE have a loss each: the mean of their gradients is the serial one. */
typedef struct sequence { float grad[3 * C * C + C], loss; bool parts; } sequence;
static hpml_status sequence_rank(hpml_ctx *ctx, seat *at, void *user)
{
    sequence    *serial = (sequence *)user;
    hpml_axis    axis = HPML_AXIS_SEQUENCE;
    hpml_tensor *x = hpml_input_3d(ctx, B, T, C), *y = hpml_input_3d(ctx, B, T, C), *h;
    h = hpml_group_split(linear(x, C, HPML_SPLIT_NONE, HPML_ACT_TANH), axis, 1);
    h = linear(hpml_layernorm(h, NULL), C, HPML_SPLIT_NONE, HPML_ACT_TANH);
    hpml_tensor *sum  = hpml_scale(hpml_group_sum(hpml_sum(hpml_tanh(linear(x, C, HPML_SPLIT_NONE, HPML_ACT_NONE)), 1),
                                                  axis), 1 / (float)at->w->ranks, 0);
    hpml_tensor *loss = serial->parts ? hpml_mse(hpml_add(h, sum), hpml_group_split(y, axis, 1))
                                      : hpml_mse(hpml_add(hpml_group_gather(h, axis, 1), sum), y);
    hpml_graph_desc gd    = { .loss = loss };
    hpml_graph     *graph = hpml_graph_create(ctx, &gd);
    if (!graph || hpml_graph_alloc(graph) != HPML_OK) return hpml_ctx_status(ctx);
    for (int i = 0; i < B * T * C; i++) {
        x->data[i] = number(i);
        y->data[i] = number(1000000 + i);
    }
    hpml_graph_forward(graph, true, 0);
    hpml_graph_backward(graph, 1, false);
    float  mean = loss->data[0], worst = 0;
    float *sums = serial->grad;
    group_sum(at, &mean, 1);
    if (at->w->ranks == 1) serial->loss = mean;
    worst = fabsf(mean / (float)at->w->ranks - serial->loss);
    for (int i = 0; i < hpml_param_count(ctx); i += 2) { /* weights of the linear layers and of the norm */
        hpml_tensor *p = hpml_param_at(ctx, i);
        int64_t      n = hpml_tensor_count(p) < C * C ? C : C * C;
        if (at->w->ranks > 1) group_sum(at, p->grad, n);
        for (int64_t k = 0; k < n; k++, sums++) {
            if (at->w->ranks == 1) *sums = p->grad[k];
            worst = fmaxf(worst, fabsf(p->grad[k] / (float)at->w->ranks - *sums));
        }
    }
    if (worst > 1e-6f) hpml_ctx_fail(ctx, HPML_ERR_STATE, "%d ranks: off by %g", at->w->ranks, (double)worst);
    return hpml_ctx_status(ctx);
}

TEST(on_other_axes_each_rank_has_a_loss_and_the_mean_is_that_of_one_rank)
{
    for (int parts = 0; parts < 2; parts++) {
        static sequence s;
        char            error[300] = "";
        s.parts = parts;
        for (int ranks = 1; ranks <= 4 && !error[0]; ranks *= 2)
            run_ranks(ranks, HPML_AXIS_SEQUENCE, NULL, sequence_rank, &s, error);
        if (error[0]) printf("    %s\n", error);
        ENSURE(!error[0]);
    }
}

/* A classifier whose output is split by classes: accuracy, confusion and predictions are those of one rank. */
enum { ROWS = 37, CLASSES = 12 };
typedef struct judged {
    float   y[ROWS * CLASSES], accuracy;
    int64_t confusion[CLASSES * CLASSES];
    double  loss, mean;
} judged;
static hpml_status judge(hpml_ctx *ctx, seat *at, void *user)
{
    static const int64_t shape[1] = { C };
    judged        *serial = (judged *)user, *mine = (judged *)calloc(1, sizeof *mine);
    float         *rows   = (float *)malloc(sizeof *rows * ROWS * C);
    int32_t        labels[ROWS];
    hpml_metrics   m    = { .confusion = mine->confusion };
    hpml_step_info info = { 0 };
    hpml_tensor   *x    = hpml_input_2d(ctx, 16, C);
    for (int i = 0; i < ROWS * C; i++) rows[i] = number(i);
    for (int i = 0; i < ROWS; i++) labels[i] = (int32_t)(6 * (1 + 0.99f * number(5000 + i)));
    hpml_trainer_desc d = { .input = x, .lr = 0.5f };
    d.output = linear(linear(x, C, HPML_SPLIT_NONE, HPML_ACT_TANH), CLASSES, HPML_SPLIT_OUT, HPML_ACT_NONE);
    hpml_trainer *t    = hpml_trainer_create(ctx, &d);
    hpml_dataset *data = hpml_dataset_create(ctx, ROWS, HPML_DTYPE_F32, 1, shape, rows, HPML_DTYPE_I32, 1, labels);
    for (int i = 0; i < 30; i++) /* not every rank asks for the accuracy of each step */
        hpml_trainer_step(t, rows, labels, 16, at->rank == 0 || i == 29 ? &info : NULL);
    hpml_trainer_evaluate(t, data, &m);
    hpml_trainer_predict(t, rows, ROWS, mine->y);
    mine->accuracy = info.accuracy;
    mine->loss     = m.loss;
    mine->mean     = m.accuracy;
    if (at->w->ranks == 1) *serial = *mine;
    float worst = (float)fabs(mine->loss - serial->loss);
    for (int i = 0; i < ROWS * CLASSES; i++) worst = fmaxf(worst, fabsf(mine->y[i] - serial->y[i]));
    bool same = mine->accuracy == serial->accuracy && mine->mean == serial->mean && serial->mean > 0.2 &&
                memcmp(mine->confusion, serial->confusion, sizeof mine->confusion) == 0;
    if (!same || worst > 1e-4f)
        hpml_ctx_fail(ctx, HPML_ERR_STATE, "rank %d of %d: off by %g; accuracy %g for %g, %g for %g", at->rank,
                      at->w->ranks, (double)worst, (double)mine->accuracy, (double)serial->accuracy, mine->mean,
                      serial->mean);
    free(rows);
    free(mine);
    return hpml_ctx_status(ctx);
}

TEST(accuracy_confusion_and_predictions_of_a_split_output_are_those_of_one_rank)
{
    static judged serial;
    char          error[300] = "";
    for (int ranks = 1; ranks <= 4 && !error[0]; ranks *= 2)
        run_ranks(ranks, HPML_AXIS_TENSOR, NULL, judge, &serial, error);
    if (error[0]) printf("    %s\n", error);
    ENSURE(!error[0]);
}

/* Central differences of a split graph, by all ranks together. */
static hpml_status differences(hpml_ctx *ctx, seat *at, void *user)
{
    hpml_tensor *x = hpml_input_2d(ctx, 4, 6), *y = hpml_input_2d(ctx, 4, 6), *h;
    h = linear(x, 6, HPML_SPLIT_NONE, HPML_ACT_TANH);
    h = linear(linear(h, 8, HPML_SPLIT_OUT, HPML_ACT_TANH), 6, HPML_SPLIT_IN, HPML_ACT_SIGMOID);
    hpml_graph_desc gd    = { .loss = hpml_mse(h, y) };
    hpml_graph     *graph = hpml_graph_create(ctx, &gd);
    hpml_graph_alloc(graph);
    for (int i = 0; i < 24; i++) {
        x->data[i] = number(i);
        y->data[i] = number(50 + i);
    }
    ((double *)user)[at->rank] = hpml_check_grad(graph, 0, 100);
    return hpml_ctx_status(ctx);
}

TEST(check_grad_passes_on_a_graph_of_parts)
{
    double worst[MAX_RANKS] = { 0 };
    ENSURE(run_ranks(2, HPML_AXIS_TENSOR, NULL, differences, worst, NULL) == HPML_OK);
    for (int r = 0; r < 2; r++) {
        ENSURE(worst[r] > 0);
        ENSURE_NEAR(worst[r], 0, 5e-3);
    }
}

/* Parameters of pipeline stages: the writer takes each from the rank that has it. */
static hpml_status staged(hpml_ctx *ctx, seat *at, void *user)
{
    hpml_trainer_desc d = { .optimizer = HPML_OPT_ADAMW, .lr = 0.01f };
    record_mlp(ctx, &d);
    hpml_trainer *t = hpml_trainer_create(ctx, &d);
    for (int i = 0; i < hpml_param_count(ctx) && at->w->ranks > 1; i++) {
        hpml_tensor *p = hpml_param_at(ctx, i);
        p->param->stage = i % 2;
        for (int64_t k = 0; k < hpml_tensor_count(p) && p->param->stage != at->rank; k++) p->data[k] = NAN;
    }
    hpml_checkpoint_save(t, (const char *)user);
    return hpml_ctx_status(ctx);
}

TEST(a_checkpoint_takes_each_parameter_from_the_stage_that_has_it)
{
    char serial[200], both[200], error[300] = "";
    snprintf(serial, sizeof serial, "%s", file("one"));
    snprintf(both, sizeof both, "%s", file("two"));
    ENSURE(run_ranks(1, HPML_AXIS_PIPE, NULL, staged, serial, error) == HPML_OK);
    ENSURE(run_ranks(2, HPML_AXIS_PIPE, NULL, staged, both, error) == HPML_OK);
    ENSURE(same_files(serial, both));
}

/* Results in bf16: the ops of groups get f32 copies. */
static hpml_status in_halves(hpml_ctx *ctx, seat *at, void *user)
{
    job              *j = (job *)user;
    hpml_trainer_desc d = { .optimizer = HPML_OPT_ADAMW, .lr = 0.003f };
    hpml_step_info    info = { 0 };
    record_gpt(ctx, &d);
    hpml_trainer *t = hpml_trainer_create(ctx, &d);
    for (int i = 0; i < 3; i++) hpml_trainer_step(t, j->tokens, j->labels, i == 1 ? 1 : B, &info);
    if (at->w->ranks == 1) j->worst = (double)info.loss;
    if (fabs((double)info.loss - j->worst) > 0.01) hpml_ctx_fail(ctx, HPML_ERR_STATE, "loss %g", (double)info.loss);
    return hpml_ctx_status(ctx);
}

TEST(halves_and_a_short_batch_train_as_on_one_rank)
{
    const hpml_ctx_desc bf16 = { .threads = 1, .seed = 7, .activation_dtype = HPML_DTYPE_BF16 };
    char error[300] = "";
    batch_fill(&batch);
    for (int ranks = 1; ranks <= 2 && !error[0]; ranks++)
        run_ranks(ranks, HPML_AXIS_TENSOR, &bf16, in_halves, &batch, error);
    if (error[0]) printf("    %s\n", error);
    ENSURE(!error[0]);
}

/* Errors of recording: each is found without communication, on one thread that is rank 1 of 4. */
static hpml_ctx *rank_1_of_4(void)
{
    hpml_ctx  *ctx = hpml_ctx_create(NULL);
    hpml_group g   = { 1, 4, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL };
    seat       s   = { 0 };
    world      w   = { .ranks = 4 };
    s.w = &w;
    g = group_of(&s);
    g.rank = 1;
    hpml_ctx_set_group(ctx, HPML_AXIS_TENSOR, &g);
    return ctx;
}

TEST(what_does_not_fit_is_refused_while_recording)
{
    hpml_ctx    *ctx = rank_1_of_4();
    hpml_tensor *x = hpml_input_3d(ctx, B, T, C), *h = linear(x, 2 * C, HPML_SPLIT_OUT, HPML_ACT_NONE);
    hpml_tensor *image = hpml_input_4d(ctx, B, 8, 8, 8);
    const hpml_linear_desc    sections = { .split = HPML_SPLIT_OUT, .sections = 3 };
    const hpml_linear_desc    in_3 = { .split = HPML_SPLIT_IN, .sections = 3 };
    const hpml_attention_desc heads = { .heads = 6 }, four = { .heads = 4 };
    const hpml_embedding_desc words = { .split = HPML_SPLIT_OUT };
    const hpml_param_desc     part = { .ndim = 1, .shape = { 10 }, .axis = HPML_AXIS_TENSOR };
    const hpml_conv2d_desc    grouped = { .kernel_h = 3, .groups = 2, .split = HPML_SPLIT_OUT };
    hpml_group                group = *hpml_ctx_group(ctx, HPML_AXIS_TENSOR);
    const int64_t             odd[3] = { B, T * 2, C };
    ENSURE(h && h->shape[2] == C / 2 && h->split[2] == HPML_AXIS_TENSOR);
    ENSURE_ERROR(ctx, !hpml_add(h, linear(x, C / 2, HPML_SPLIT_NONE, HPML_ACT_NONE)), HPML_ERR_SHAPE,
                 "is split over the tensor axis along dimension 2");
    ENSURE_ERROR(ctx, !hpml_softmax(h), HPML_ERR_SHAPE, "hpml_group_gather");
    ENSURE_ERROR(ctx, !hpml_layernorm(h, NULL), HPML_ERR_SHAPE, "needs it whole");
    ENSURE_ERROR(ctx, !hpml_sum(h, 2), HPML_ERR_SHAPE, "part of it");
    ENSURE_ERROR(ctx, !hpml_mean(h, HPML_ALL_DIMS), HPML_ERR_SHAPE, "part of it");
    ENSURE_ERROR(ctx, !hpml_mse(h, h), HPML_ERR_SHAPE, "mse: ");
    ENSURE_ERROR(ctx, !hpml_lstm(h, 4, NULL), HPML_ERR_SHAPE, "tensor axis");
    ENSURE_ERROR(ctx, !hpml_slice(h, 2, 1, 4), HPML_ERR_SHAPE, "whole sections");
    ENSURE_ERROR(ctx, !hpml_reshape(h, 3, odd), HPML_ERR_SHAPE, "split alike");
    ENSURE_ERROR(ctx, !linear(h, 8, HPML_SPLIT_NONE, HPML_ACT_NONE), HPML_ERR_SHAPE, "HPML_SPLIT_IN");
    ENSURE_ERROR(ctx, !linear(x, 8, HPML_SPLIT_IN, HPML_ACT_NONE), HPML_ERR_SHAPE, "HPML_SPLIT_OUT");
    ENSURE_ERROR(ctx, !linear(x, 10, HPML_SPLIT_OUT, HPML_ACT_NONE), HPML_ERR_SHAPE, "among the 4 ranks");
    ENSURE_ERROR(ctx, !hpml_linear(h, 8, &in_3), HPML_ERR_ARGUMENT, "sections");
    ENSURE_ERROR(ctx, !hpml_attention(h, &four), HPML_ERR_SHAPE, "3 sections");
    ENSURE_ERROR(ctx, !hpml_attention(hpml_linear(x, 3 * 24, &sections), &heads), HPML_ERR_SHAPE, "heads that divide");
    const hpml_attention_desc fewer = { .heads = 4, .kv_heads = 2 };
    const hpml_rotary_desc    six = { .heads = 6 };
    hpml_tensor              *index = hpml_argmax(x, 1);
    ENSURE_ERROR(ctx, !hpml_attention(hpml_linear(x, 3 * 16, &sections), &fewer), HPML_ERR_SHAPE, "neither .kv_heads");
    ENSURE_ERROR(ctx, !hpml_rotary(hpml_linear(x, 3 * 24, &sections), &six), HPML_ERR_SHAPE, "in whole heads");
    ENSURE_ERROR(ctx, !hpml_where(h, h, h), HPML_ERR_SHAPE, "hpml_group_gather first");
    ENSURE_ERROR(ctx, !hpml_minimum(h, linear(x, C / 2, HPML_SPLIT_NONE, HPML_ACT_NONE)), HPML_ERR_SHAPE, "minimum: ");
    ENSURE_ERROR(ctx, !hpml_max(h, 2), HPML_ERR_SHAPE, "part of it");
    ENSURE_ERROR(ctx, !hpml_pad(h, 2, 1, 1, 0), HPML_ERR_SHAPE, "needs it whole");
    ENSURE_ERROR(ctx, !hpml_take_along(h, 1, index), HPML_ERR_SHAPE, "take_along: ");
    ENSURE_ERROR(ctx, !hpml_gru(h, 4, NULL), HPML_ERR_SHAPE, "tensor axis");
    ENSURE_ERROR(ctx, !hpml_groupnorm(h, 1, NULL), HPML_ERR_SHAPE, "whole, with C");
    ENSURE_ERROR(ctx, !hpml_embedding(hpml_input_tokens(ctx, B, T), 10, C, &words), HPML_ERR_SHAPE, "4 ranks");
    ENSURE_ERROR(ctx, !hpml_param_create(ctx, &part), HPML_ERR_SHAPE, "multiple of 4");
    ENSURE_ERROR(ctx, !hpml_conv2d(image, 8, &grouped), HPML_ERR_SHAPE, "groups with .split");
    ENSURE_ERROR(ctx, !hpml_group_split(x, HPML_AXIS_TENSOR, 0), HPML_ERR_SHAPE, "of a sample");
    ENSURE_ERROR(ctx, !hpml_group_gather(x, HPML_AXIS_PIPE, 0), HPML_ERR_ARGUMENT, "pipe");
    ENSURE_ERROR(ctx, hpml_ctx_set_group(ctx, HPML_AXIS_TENSOR, &group) != HPML_OK, HPML_ERR_STATE, "set groups first");
    hpml_ctx_free(ctx);
    ctx = hpml_ctx_create(NULL);
    group.rank = 4;
    ENSURE_ERROR(ctx, hpml_ctx_set_group(ctx, HPML_AXIS_TENSOR, &group) != HPML_OK, HPML_ERR_ARGUMENT, "rank 4 of 4");
    group.rank = 0;
    group.max  = NULL;
    ENSURE_ERROR(ctx, hpml_ctx_set_group(ctx, HPML_AXIS_TENSOR, &group) != HPML_OK, HPML_ERR_ARGUMENT, "is NULL");
    ENSURE_ERROR(ctx, hpml_ctx_set_group(ctx, (hpml_axis)9, NULL) != HPML_OK, HPML_ERR_ARGUMENT, "no axis 9");
    hpml_ctx_free(ctx);
}

/* A group's function fails: the step ends with an error that names the op. */
static hpml_status failing(hpml_ctx *ctx, seat *at, void *user)
{
    hpml_trainer_desc d = { .lr = 0.1f };
    job              *j = (job *)user;
    record_mlp(ctx, &d);
    hpml_trainer *t = hpml_trainer_create(ctx, &d);
    at->fails = true;
    return hpml_trainer_step(t, j->x, j->y, B, NULL);
}

TEST(a_group_that_fails_ends_the_step)
{
    char error[300] = "";
    batch_fill(&batch);
    ENSURE(run_ranks(2, HPML_AXIS_TENSOR, NULL, failing, &batch, error) == HPML_ERR_PEER);
    ENSURE(strstr(error, "group_sum") && ranks_failed == 2);
}

/* A file that is no checkpoint is an error on each rank. */
TEST(a_damaged_file_is_refused_by_all_ranks)
{
    char   error[300] = "", path[200];
    filing f = { record_mlp, path, NULL, NULL, 0, &batch };
    snprintf(path, sizeof path, "%s", put("damaged", "no file of tensors", 18));
    ENSURE(run_ranks(2, HPML_AXIS_TENSOR, NULL, save_and_load, &f, error) != HPML_OK && ranks_failed == 2);
}

/* Trains with groups of one rank, then without groups and .split: the same bits and bytes of memory. */
TEST(a_group_of_one_rank_changes_nothing)
{
    uint64_t    hash[2];
    hpml_memory memory[2];
    batch_fill(&batch);
    for (int k = 0; k < 2; k++) {
        const hpml_ctx_desc one = { .threads = 1, .seed = 7 };
        hpml_ctx           *ctx = hpml_ctx_create(&one);
        hpml_trainer_desc   d   = { .lr = 0.1f };
        without_split = k == 1;
        for (int a = 0; a < HPML_AXES && k == 0; a++)
            ENSURE(hpml_ctx_set_group(ctx, (hpml_axis)a, hpml_ctx_group(ctx, (hpml_axis)a)) == HPML_OK);
        record_attention(ctx, &d);
        ENSURE(hpml_group_gather(d.input, HPML_AXIS_TENSOR, 1) == d.input);
        hpml_trainer *t = hpml_trainer_create(ctx, &d);
        for (int i = 0; i < 3; i++) hpml_trainer_step(t, batch.x, batch.y, B, NULL);
        hash[k] = hpml_param_hash(ctx);
        hpml_graph_memory(hpml_trainer_graph(t), &memory[k]);
        ENSURE(hpml_ctx_status(ctx) == HPML_OK);
        hpml_ctx_free(ctx);
    }
    without_split = false;
    ENSURE(hash[0] == hash[1] && memory[0].total == memory[1].total);
}
