/* A small language model over characters whose layers are split over the TENSOR axis, its data, and a training of some
   steps that brings back loss, gradients and values of the whole parameters, for comparisons with one rank. */
#ifndef SPLIT_MODEL_H
#define SPLIT_MODEL_H

#include "../hpml_comm.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SPLIT_LETTERS = 16, SPLIT_TEXT = 4096 };

typedef struct split_model {
    int64_t batch, context, width, layers, heads; /* batch: samples of a step, on all ranks */
    float   dropout;
    bool    is_whole; /* no layer is split, nor the head: all ranks of an axis compute the same */
} split_model;

static const split_model split_small = { 16, 8, 16, 2, 8, 0, false };

/* x + f(norm(x)), twice: attention, then two dense layers. */
static inline hpml_tensor *split_block(hpml_tensor *x, const split_model *m) /* (B, T, C) */
{
    const hpml_split    out = m->is_whole ? HPML_SPLIT_NONE : HPML_SPLIT_OUT;
    const hpml_split    in = m->is_whole ? HPML_SPLIT_NONE : HPML_SPLIT_IN;
    hpml_linear_desc    qkv = { .split = out, .sections = 3 }, joined = { .split = in };
    hpml_linear_desc    wide = { .split = out, .activation = HPML_ACT_GELU };
    hpml_attention_desc heads = { .heads = (int32_t)m->heads };
    hpml_tensor        *a = hpml_attention(hpml_linear(hpml_layernorm(x, NULL), 3 * m->width, &qkv), &heads);
    a = hpml_linear(a, m->width, &joined);
    x = hpml_add(x, m->dropout > 0 ? hpml_dropout(a, m->dropout) : a);
    a = hpml_linear(hpml_linear(hpml_layernorm(x, NULL), 4 * m->width, &wide), m->width, &joined);
    return hpml_add(x, m->dropout > 0 ? hpml_dropout(a, m->dropout) : a);
}

/* Returns scores (B, T, V), split by vocabulary, for tokens (B, T). */
static inline hpml_tensor *split_scores(hpml_tensor *tokens, const split_model *m)
{
    const hpml_split    by_token = m->is_whole ? HPML_SPLIT_NONE : HPML_SPLIT_OUT;
    hpml_embedding_desc table = { .split = by_token };
    hpml_linear_desc    head = { .split = by_token, .no_bias = true };
    hpml_param_desc     place = { .ndim = 2, .shape = { m->context, m->width }, .name = "place",
                                  .init = HPML_INIT_NORMAL, .init_scale = 1 };
    hpml_tensor        *x = hpml_embedding(tokens, SPLIT_LETTERS, m->width, &table);
    x = hpml_add(x, hpml_param_create(tokens->ctx, &place));
    for (int64_t i = 0; i < m->layers; i++) x = split_block(x, m);
    return hpml_linear(hpml_layernorm(x, NULL), SPLIT_LETTERS, &head);
}

/* Windows of a text in which letters follow each other by a rule with exceptions, the same on all ranks. */
static inline hpml_dataset *split_text(hpml_ctx *ctx, const split_model *m)
{
    const int64_t windows = SPLIT_TEXT / m->context;
    int32_t      *text = (int32_t *)malloc(sizeof *text * (SPLIT_TEXT + 1));
    hpml_rng      r = { .seed = 3 };
    text[0] = 0;
    for (int i = 1; i <= SPLIT_TEXT; i++) {
        const int32_t before = i > 1 ? text[i - 2] : 0;
        text[i] = (int32_t)((5 * text[i - 1] + before + 1 + (hpml_rng_below(&r, 8) == 0)) % SPLIT_LETTERS);
    }
    hpml_dataset *d = hpml_dataset_create(ctx, windows, HPML_DTYPE_I32, 1, &m->context, text, HPML_DTYPE_I32,
                                          m->context, text + 1);
    free(text);
    return d;
}

/* A training of `steps` steps, and its results on rank 0: losses, wholes of all parameters' gradients after the first
   step and values after the last one, side by side in the order of the parameters. */
typedef struct split_run {
    split_model model;
    hpml_opt    optimizer;
    int         steps, accumulate;
    float       clip_norm;
    const char *load, *save; /* checkpoints, before the first and after the last step; NULL: none */
    int         fails;    /* 1 + the rank that fails after the first step; 0: none */
    const hpml_plan *plan; /* given to hpml_distribute; NULL: that of the launch */
    double      loss[16];
    int64_t     floats;               /* of all parameters' wholes */
    float      *gradients, *values;   /* (floats), released by split_free */
    hpml_distribute_report report;
    char        errors[64][256];      /* of each rank */
} split_run;

static inline void split_free(split_run *r)
{
    free(r->gradients);
    free(r->values);
    r->gradients = r->values = NULL;
}

/* Copies the wholes of one array of all parameters to `to` (NULL: does not), and returns the number of their floats. */
static inline int64_t split_collect(hpml_trainer *t, hpml_array which, float *to)
{
    hpml_ctx *ctx = hpml_trainer_settings(t)->input->ctx;
    int64_t   at = 0;
    for (int i = 0; i < hpml_param_count(ctx); i++) {
        hpml_tensor *p = hpml_param_at(ctx, i);
        int64_t      shape[HPML_MAX_DIMS], n = 1;
        hpml_param_whole(p, shape);
        for (int k = 0; k < p->ndim; k++) n *= shape[k];
        if (to) hpml_trainer_collect(t, i, which, to + at);
        at += n;
    }
    return at;
}

/* Trains on any number of ranks: a hpml_rank_fn. */
static inline hpml_status split_train(hpml_comm *c, void *user)
{
    const split_run   *r    = (const split_run *)user;
    split_run         *out  = (split_run *)user;
    const hpml_mesh   *mesh = hpml_comm_mesh(c);
    hpml_ctx          *ctx  = hpml_comm_ctx(c);
    int                shares = hpml_comm_size(c);
    const bool         first = hpml_comm_rank(c) == 0;
    if (mesh) shares = mesh->size[HPML_AXIS_DATA] * mesh->size[HPML_AXIS_EXPERT];
    hpml_tensor       *x = hpml_input_tokens(ctx, (r->model.batch - 1) / shares + 1, r->model.context);
    hpml_trainer_desc  desc = { .input = x, .output = split_scores(x, &r->model), .optimizer = r->optimizer,
                                .lr = 0.01f, .accumulate = r->accumulate, .clip_norm = r->clip_norm };
    hpml_trainer      *t = hpml_trainer_create(ctx, &desc);
    hpml_dataset      *text = split_text(ctx, &r->model);
    hpml_distributed  *d = hpml_distribute(t, c, r->plan);
    int64_t            floats = d ? split_collect(t, HPML_ARRAY_VALUES, NULL) : 0;
    float             *whole = (float *)calloc((size_t)(2 * floats + 1), sizeof *whole);
    if (d && r->load) hpml_distribute_load(d, r->load);
    for (int i = 0; i < r->steps && d; i++) {
        hpml_distribute_report report;
        hpml_trainer_fit(t, text, &(hpml_fit_desc){ .epochs = 100, .max_steps = 1 });
        if (hpml_ctx_status(ctx) != HPML_OK) break;
        hpml_distribute_get(d, &report, false);
        if (first) out->loss[i] = report.loss;
        if (first) out->report = report;
        if (i == 0) split_collect(t, HPML_ARRAY_GRADIENTS, whole);
        if (r->fails == hpml_comm_rank(c) + 1) hpml_ctx_fail(ctx, HPML_ERR_WRITE, "a disk is full");
    }
    if (d && r->save) hpml_distribute_save(d, r->save);
    if (d && hpml_ctx_status(ctx) == HPML_OK) split_collect(t, HPML_ARRAY_VALUES, whole + floats);
    if (first) {
        out->floats    = floats;
        out->gradients = (float *)malloc(sizeof(float) * (size_t)(floats + 1));
        out->values    = (float *)malloc(sizeof(float) * (size_t)(floats + 1));
        memcpy(out->gradients, whole, sizeof(float) * (size_t)floats);
        memcpy(out->values, whole + floats, sizeof(float) * (size_t)floats);
    }
    free(whole);
    if (hpml_comm_rank(c) < 64) snprintf(out->errors[hpml_comm_rank(c)], 256, "%s", hpml_ctx_error(ctx));
    return hpml_ctx_status(ctx);
}

/* Returns the largest difference of two arrays, relative to the largest number in b. */
static inline double split_differ(const float *a, const float *b, int64_t n)
{
    double most = 0, largest = 1e-30;
    for (int64_t i = 0; i < n; i++) {
        const double difference = fabs((double)a[i] - (double)b[i]);
        if (!(difference <= most)) most = difference;
        if (fabs((double)b[i]) > largest) largest = fabs((double)b[i]);
    }
    return most / largest;
}

#endif
