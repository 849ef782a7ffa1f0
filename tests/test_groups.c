/* Layers split over the ranks of a group (.split), parameters that are parts of a whole, the ops hpml_group_*, and
   files of wholes: losses, gradients, weights and files against the same program on one rank. */
#include "groups.h"
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

/* Trains the model on 1 rank, then on 2 and 4. */
static bool as_serial(const model *m)
{
    static job j;
    char       error[300] = "";
    memset(&j, 0, sizeof j);
    j.m = m;
    for (int i = 0; i < B * T * C; i++) {
        j.x[i] = number(i);
        j.y[i] = number(100000 + i);
    }
    for (int i = 0; i < B * T; i++) {
        j.tokens[i] = (int32_t)(12 * (1 + 0.99f * number(200000 + i)));
        j.labels[i] = (int32_t)(12 * (1 + 0.99f * number(300000 + i)));
    }
    j.labels[5] = HPML_IGNORE;
    for (int ranks = 1; ranks <= 4 && !error[0]; ranks *= 2)
        run_ranks(ranks, HPML_AXIS_TENSOR, NULL, train, &j, error);
    outcome_free(&j.serial);
    if (error[0]) printf("    %s\n", error);
    return !error[0];
}

static hpml_tensor *linear(hpml_tensor *x, int64_t out, hpml_split split, hpml_act act)
{
    const hpml_linear_desc d = { .split = split, .activation = act };
    return hpml_linear(x, out, &d);
}

static hpml_tensor *mlp(hpml_tensor *x, int64_t hidden)
{
    int64_t out = x ? x->shape[x->ndim - 1] : 1;
    return linear(linear(x, hidden, HPML_SPLIT_OUT, HPML_ACT_GELU), out, HPML_SPLIT_IN, HPML_ACT_NONE);
}

static hpml_tensor *attention(hpml_tensor *x)
{
    const hpml_linear_desc    qkv = { .split = HPML_SPLIT_OUT, .sections = 3 };
    const hpml_attention_desc a   = { .heads = HEADS };
    return linear(hpml_attention(hpml_linear(x, 3 * C, &qkv), &a), C, HPML_SPLIT_IN, HPML_ACT_NONE);
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

/* Forward: the table, 2 attention blocks, 2 MLPs, the loss's sum; backward: the last layer's copy and the 4 blocks'. */
TEST(gpt_with_a_split_vocabulary_trains_as_on_one_rank)
{
    const model m = { "gpt", record_gpt, 6, 5, 1e-5 };
    ENSURE(as_serial(&m));
}
