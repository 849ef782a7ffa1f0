/* Sequences: attention with a cache of keys and values against whole passes; indices along a dimension; what their
   arguments refuse. */
#include "../hpml.h"
#include "test.h"

static hpml_ctx *context(int threads) { return hpml_ctx_create(&(hpml_ctx_desc){ .threads = threads, .seed = 3 }); }

/* A block of a language model: attention with grouped queries and rotary positions. Without `cache` the whole text;
   with it the next tokens, from position[b] on. */
enum { B = 3, T = 21, C = 24, HEADS = 6, KV = 2, D = C / HEADS, WORDS = 11, ROOM = 29 };
static hpml_tensor *language_model(hpml_tensor *tokens, hpml_tensor *cache, hpml_tensor *position, hpml_tensor *mask)
{
    hpml_rotary_desc    turn = { .heads = HEADS + 2 * KV, .rotated = HEADS + KV, .position = position };
    hpml_attention_desc a = { .heads = HEADS, .kv_heads = KV, .cache = cache, .position = position, .mask = mask };
    hpml_tensor *x = hpml_embedding(tokens, WORDS, C, NULL);
    hpml_tensor *y = hpml_attention(hpml_rotary(hpml_linear(hpml_rmsnorm(x, NULL), C + 2 * KV * D, NULL), &turn), &a);
    return hpml_linear(hpml_add(x, hpml_linear(y, C, NULL)), WORDS, NULL);
}

/* The logits of the whole text equal those of runs of `each` tokens with a cache; sample b begins b runs later. */
static void compare_cached(int each, bool masked)
{
    hpml_ctx    *whole = context(2), *step = context(1);
    hpml_tensor *all = hpml_input_tokens(whole, B, T), *next = hpml_input_tokens(step, B, each);
    hpml_tensor *position = hpml_input(step, HPML_DTYPE_I32, 1, (int64_t[]){ B });
    hpml_tensor *cache = hpml_tensor_create_3d(step, B, ROOM, 2 * KV * D);
    hpml_tensor *hide[2] = { NULL, NULL };
    if (masked) hide[0] = hpml_tensor_create_2d(whole, B, T), hide[1] = hpml_tensor_create_2d(step, B, ROOM);
    for (int i = 0; masked && i < B * ROOM; i++) {
        hide[1]->data[i] = i % 4 != 1;
        if (i % ROOM < T) hide[0]->data[i / ROOM * T + i % ROOM] = i % 4 != 1;
    }
    hpml_tensor *want = language_model(all, NULL, NULL, hide[0]), *got = language_model(next, cache, position, hide[1]);
    hpml_graph  *g = hpml_graph_create(whole, &(hpml_graph_desc){ .outputs = &want, .output_count = 1 });
    hpml_graph  *h = hpml_graph_create(step, &(hpml_graph_desc){ .outputs = &got, .output_count = 1 });
    ENSURE(hpml_graph_alloc(g) == HPML_OK && hpml_graph_alloc(h) == HPML_OK);
    for (int p = 0; p < hpml_param_count(whole); p++)
        memcpy(hpml_param_at(step, p)->data, hpml_param_at(whole, p)->data,
               (size_t)hpml_tensor_count(hpml_param_at(whole, p)) * sizeof(float));
    int32_t text[B * T], now[B * T], at[B];
    for (int i = 0; i < B * T; i++) text[i] = i * i % 13 % WORDS;
    hpml_tensor_set_raw(all, text, sizeof text);
    ENSURE(hpml_graph_forward(g, false, 0) == HPML_OK);
    for (int run = 0; run < T / each + B - 1; run++) {
        for (int b = 0; b < B; b++) {
            at[b] = (run - b) * each;
            if (at[b] < 0) at[b] = 0;
            if (at[b] > T - each) at[b] = T - each;
            for (int i = 0; i < each; i++) now[b * each + i] = text[b * T + at[b] + i];
        }
        hpml_tensor_set_raw(next, now, (size_t)(B * each) * sizeof *now);
        hpml_tensor_set_raw(position, at, sizeof at);
        ENSURE(hpml_graph_forward(h, false, 0) == HPML_OK);
        for (int i = 0; i < B * each * WORDS; i++) {
            int b = i / (each * WORDS);
            ENSURE_NEAR(got->data[i], want->data[(b * T + at[b]) * WORDS + i % (each * WORDS)], 1e-5);
        }
    }
    at[1] = ROOM - each + 1;
    hpml_tensor_set_raw(position, at, sizeof at);
    ENSURE_ERROR(step, hpml_graph_forward(h, false, 0) != HPML_OK, HPML_ERR_LABEL, "position of sample 1 is");
    hpml_ctx_free(whole);
    hpml_ctx_free(step);
}

TEST(tokens_one_by_one_with_a_cache_equal_the_whole_text)
{
    for (int each = 1; each <= 7; each += 2)
        if (T % each == 0) compare_cached(each, false), compare_cached(each, true);
}

TEST(a_cache_has_no_backward_pass)
{
    hpml_ctx    *ctx = context(1);
    hpml_tensor *x = hpml_input_3d(ctx, 2, 1, 12), *position = hpml_input(ctx, HPML_DTYPE_I32, 1, (int64_t[]){ 2 });
    hpml_tensor_require_grad(x);
    hpml_attention_desc a = { .heads = 2, .cache = hpml_tensor_create_3d(ctx, 2, 5, 8), .position = position };
    hpml_tensor *sum = hpml_sum(hpml_attention(x, &a), HPML_ALL_DIMS);
    hpml_graph  *g = hpml_graph_create(ctx, &(hpml_graph_desc){ .loss = sum });
    ENSURE(hpml_graph_alloc(g) == HPML_OK && hpml_graph_forward(g, true, 0) == HPML_OK);
    ENSURE_ERROR(ctx, hpml_graph_backward(g, 1, false) != HPML_OK, HPML_ERR_UNSUPPORTED, "there is no backward pass");
    hpml_ctx_free(ctx);
}

/* Records an attention on (2, 6, 16) with an argument that does not fit. */
static void refuse_attention(int kind, const char *text)
{
    hpml_ctx    *ctx = context(1);
    hpml_tensor *x = hpml_input_3d(ctx, 2, 6, 16), *two = hpml_input(ctx, HPML_DTYPE_I32, 1, (int64_t[]){ 2 });
    hpml_attention_desc a = { .heads = 4, .kv_heads = 2 };
    if (kind == 0) a.kv_heads = 3;
    if (kind == 1) a.mask = hpml_tensor_create_2d(ctx, 2, 5);
    if (kind == 2) a.mask = hpml_tanh(hpml_param_create(ctx, &(hpml_param_desc){ .ndim = 2, .shape = { 2, 6 } }));
    if (kind == 3) a.position = two;
    if (kind == 4) a.cache = hpml_tensor_create_3d(ctx, 2, 9, 8);
    if (kind == 5) a.cache = hpml_tensor_create_3d(ctx, 2, 5, 8), a.position = two;
    if (kind == 6) a.cache = hpml_tensor_create_3d(ctx, 2, 9, 8), a.position = two, a.not_causal = true;
    if (kind == 7) a.cache = hpml_tensor_create_3d(ctx, 2, 9, 8), a.position = hpml_input_tokens(ctx, 2, 6);
    if (kind == 8) a.heads = a.kv_heads = 1431655766; /* 3 times this number is 2 in 32 bits */
    ENSURE_ERROR(ctx, hpml_attention(x, &a) == NULL, kind == 2 || kind == 3 || kind == 4 || kind == 6
                 ? HPML_ERR_ARGUMENT : HPML_ERR_SHAPE, text);
    hpml_ctx_free(ctx);
}

TEST(arguments_of_attention_that_do_not_fit)
{
    static const char *const texts[] = { "with 4 heads and 3 of keys", "expected (2, 6) or (2, 6, 6)",
        "a mask gets none", ".position without .cache", ".cache without .position", "2 x positions (6 or more) x 8",
        ".cache with .not_causal", "one number for each of 2 samples",
        "with 1431655766 heads" };
    for (int kind = 0; kind < 9; kind++) refuse_attention(kind, texts[kind]);
    static const hpml_rotary_desc wrong[] = { { .heads = 3 }, { .heads = 2, .dims = 3 }, { .heads = 2, .rotated = 3 } };
    for (int i = 0; i < 3; i++) {
        hpml_ctx    *ctx = context(1);
        hpml_tensor *x = hpml_input_3d(ctx, 2, 6, 16);
        ENSURE_ERROR(ctx, hpml_rotary(x, &wrong[i]) == NULL, i == 1 ? HPML_ERR_ARGUMENT : HPML_ERR_SHAPE,
                     i == 1 ? "dims is 3" : "rotary: x is");
        hpml_ctx_free(ctx);
    }
}


/* ---- elementwise functions, indices along a dimension ---- */
TEST(arguments_of_indices_that_do_not_fit)
{
    static const char *const texts[] = { "index is", "no such dimension", "expected 0 or more", "reverse another one",
        "expected i32 (B)", "expected (B, C, H, W)", "no dimension 3", "expected low <= high", "equal or 1",
        "one number for each of 2 samples" };
    for (int kind = 0; kind < 10; kind++) {
        hpml_ctx    *ctx = context(1);
        hpml_tensor *x = hpml_input_3d(ctx, 2, 6, 5), *two = hpml_input(ctx, HPML_DTYPE_I32, 1, (int64_t[]){ 2 });
        hpml_tensor *y = NULL;
        if (kind == 0) y = hpml_take_along(x, 1, two);
        if (kind == 1) y = hpml_pad(x, 3, 1, 1, 0);
        if (kind == 2) y = hpml_pad(x, 1, -1, 1, 0);
        if (kind == 3) y = hpml_reverse(x, 0, two);
        if (kind == 4) y = hpml_mask(hpml_input_tokens(ctx, 2, 6), 6);
        if (kind == 5) y = hpml_upsample2d(x, 2, true);
        if (kind == 6) y = hpml_argmax(x, 3);
        if (kind == 7) y = hpml_clamp(x, 2, 1);
        if (kind == 8) y = hpml_where(x, hpml_input_3d(ctx, 2, 6, 4), x);
        if (kind == 9) y = hpml_last(x, hpml_input_tokens(ctx, 2, 6));
        ENSURE_ERROR(ctx, y == NULL, kind == 2 || kind == 7 ? HPML_ERR_ARGUMENT : HPML_ERR_SHAPE, texts[kind]);
        hpml_ctx_free(ctx);
    }
}

/* An index outside of x, or a length outside of 0 to T, is an error of the step, which names it. */
TEST(indices_and_lengths_out_of_range)
{
    static const char *const texts[] = { "index 1 is 6, expected 0 to 5", "length 1 is 7, expected 0 to 6" };
    for (int kind = 0; kind < 2; kind++) {
        hpml_ctx     *ctx = context(1);
        const int64_t shape[3] = { 2, 1, 1 };
        int32_t       good[2] = { 5, 0 }, bad[2] = { 0, 6 + kind };
        hpml_tensor  *x = hpml_input_3d(ctx, 2, 6, 5), *i = hpml_input(ctx, HPML_DTYPE_I32, kind ? 1 : 3, shape);
        hpml_tensor  *y = kind ? hpml_last(x, i) : hpml_take_along(x, 1, i);
        hpml_graph   *g = hpml_graph_create(ctx, &(hpml_graph_desc){ .outputs = &y, .output_count = 1 });
        ENSURE(hpml_graph_alloc(g) == HPML_OK);
        for (int k = 0; k < 60; k++) x->data[k] = (float)k;
        hpml_tensor_set_raw(i, good, sizeof good);
        ENSURE(hpml_graph_forward(g, false, 0) == HPML_OK);
        for (int k = 0; k < 5; k++) { /* of a sequence of length 0 the last step is 0 */
            ENSURE(y->data[k] == (float)(kind ? 20 + k : 25 + k));
            ENSURE(y->data[5 + k] == (float)(kind ? 0 : 30 + k));
        }
        hpml_tensor_set_raw(i, bad, sizeof bad);
        ENSURE_ERROR(ctx, hpml_graph_forward(g, false, 0) != HPML_OK, HPML_ERR_LABEL, texts[kind]);
        hpml_ctx_free(ctx);
    }
}

TEST(nan_stays_nan_and_the_first_maximum_counts)
{
    hpml_ctx    *ctx = context(1);
    hpml_tensor *x = hpml_input_2d(ctx, 2, 5), *zero = hpml_tensor_create_1d(ctx, 1), *y[5];
    y[0] = hpml_minimum(x, zero);
    y[1] = hpml_maximum(zero, x);
    y[2] = hpml_clamp(x, -1, 1);
    y[3] = hpml_max(x, 1);
    y[4] = hpml_argmax(x, 1);
    hpml_graph *g = hpml_graph_create(ctx, &(hpml_graph_desc){ .outputs = y, .output_count = 5 });
    ENSURE(hpml_graph_alloc(g) == HPML_OK);
    for (int i = 0; i < 10; i++) x->data[i] = i == 2 ? NAN : (float)(i % 3);
    ENSURE(hpml_graph_forward(g, false, 0) == HPML_OK);
    for (int k = 0; k < 3; k++) ENSURE(y[k]->data[2] != y[k]->data[2] && y[k]->data[3] == y[k]->data[3]);
    ENSURE(y[3]->data[0] != y[3]->data[0] && y[3]->data[1] == 2);
    ENSURE(y[4]->dtype == HPML_DTYPE_I32 && ((const int32_t *)y[4]->raw)[0] == 2 && ((int32_t *)y[4]->raw)[1] == 0);
    hpml_ctx_free(ctx);
}

/* ---- recurrent layers ---- */
enum { STEPS = 10, IN = 4, HIDDEN = 7 };
typedef struct run { /* a recurrent layer on sequences of `steps` time steps, with initial states as inputs */
    hpml_ctx    *ctx;
    hpml_graph  *graph;
    hpml_tensor *x, *h0, *c0, *lengths, *out[3]; /* out: y, final h, final c */
} run;
static run recurrent(bool gru, int batch, int steps, bool lengths)
{
    run                 r = { .ctx = context(2) };
    hpml_recurrent_desc d = { .name = "r", .final_h = &r.out[1], .final_c = gru ? NULL : &r.out[2] };
    r.x = hpml_input_3d(r.ctx, batch, steps, IN);
    r.h0 = d.h0 = hpml_input_2d(r.ctx, batch, HIDDEN);
    if (!gru) r.c0 = d.c0 = hpml_input_2d(r.ctx, batch, HIDDEN);
    if (lengths) r.lengths = d.lengths = hpml_input(r.ctx, HPML_DTYPE_I32, 1, (int64_t[]){ batch });
    r.out[0] = gru ? hpml_gru(r.x, HIDDEN, &d) : hpml_lstm_states(r.x, HIDDEN, &d);
    r.graph  = hpml_graph_create(r.ctx, &(hpml_graph_desc){ .outputs = r.out, .output_count = gru ? 2 : 3 });
    hpml_graph_alloc(r.graph);
    return r;
}
static float number(int i) { return (float)(i * 37 % 23 - 11) / 8; }

/* Two halves of a sequence, of which the second begins with the final state of the first, equal the whole sequence; a
   sequence with a length equals the shorter sequence, and is zero behind its end. */
static void compare_parts(bool gru)
{
    run   whole = recurrent(gru, 2, STEPS, false), half = recurrent(gru, 2, STEPS / 2, false);
    run   ragged = recurrent(gru, 2, STEPS, true);
    float want[2 * STEPS * HIDDEN], last[3][2 * HIDDEN];
    ENSURE(hpml_ctx_status(whole.ctx) == HPML_OK && hpml_ctx_status(half.ctx) == HPML_OK);
    ENSURE(hpml_ctx_status(ragged.ctx) == HPML_OK);
    for (int i = 0; i < 2 * STEPS * IN; i++) whole.x->data[i] = ragged.x->data[i] = number(i);
    ENSURE(hpml_graph_forward(whole.graph, false, 0) == HPML_OK);
    memcpy(want, whole.out[0]->data, sizeof want);
    for (int k = 1; k < (gru ? 2 : 3); k++) memcpy(last[k], whole.out[k]->data, sizeof last[k]);
    for (int part = 0; part < 2; part++) {
        for (int i = 0; i < STEPS * IN; i++) { /* (2, STEPS / 2, IN) */
            int b = i / (STEPS / 2 * IN), at = i % (STEPS / 2 * IN);
            half.x->data[i] = number((b * STEPS + part * STEPS / 2) * IN + at);
        }
        ENSURE(hpml_graph_forward(half.graph, false, 0) == HPML_OK);
        for (int i = 0; i < STEPS * HIDDEN; i++) {
            int b = i / (STEPS / 2 * HIDDEN), at = i % (STEPS / 2 * HIDDEN);
            ENSURE_NEAR(half.out[0]->data[i], want[(b * STEPS + part * STEPS / 2) * HIDDEN + at], 1e-6);
        }
        memcpy(half.h0->data, half.out[1]->data, sizeof last[1]);
        if (!gru) memcpy(half.c0->data, half.out[2]->data, sizeof last[2]);
    }
    for (int k = 1; k < (gru ? 2 : 3); k++)
        for (int i = 0; i < 2 * HIDDEN; i++) ENSURE_NEAR(half.out[k]->data[i], last[k][i], 1e-6);
    int32_t lengths[2] = { STEPS, STEPS / 2 };
    hpml_tensor_set_raw(ragged.lengths, lengths, sizeof lengths);
    ENSURE(hpml_graph_forward(ragged.graph, false, 0) == HPML_OK);
    for (int i = 0; i < 2 * STEPS * HIDDEN; i++) {
        bool valid = i / HIDDEN % STEPS < lengths[i / (STEPS * HIDDEN)];
        ENSURE_NEAR(ragged.out[0]->data[i], valid ? want[i] : 0, 1e-6);
    }
    for (int i = 0; i < HIDDEN; i++) {
        ENSURE_NEAR(ragged.out[1]->data[i], last[1][i], 1e-6);
        ENSURE_NEAR(ragged.out[1]->data[HIDDEN + i], want[(STEPS + STEPS / 2 - 1) * HIDDEN + i], 1e-6);
    }
    hpml_ctx_free(whole.ctx);
    hpml_ctx_free(half.ctx);
    hpml_ctx_free(ragged.ctx);
}
TEST(states_and_lengths_of_recurrent_layers)
{
    compare_parts(false);
    compare_parts(true);
}

TEST(arguments_of_recurrent_layers_that_do_not_fit)
{
    static const char *const texts[] = { "h0 and c0 come together", "there is no cell", "initial state f32 2x5",
        "one number for each of 2 samples", "expected (B, T, features)", "an input or the result of an op" };
    for (int kind = 0; kind < 6; kind++) {
        hpml_ctx           *ctx = context(1);
        hpml_tensor        *x = hpml_input_3d(ctx, 2, 6, 5), *y, *state = hpml_input_2d(ctx, 2, 3), *c = NULL;
        hpml_recurrent_desc d = { .h0 = state };
        if (kind == 1) d.final_c = &c;
        if (kind == 2) d.h0 = hpml_input_2d(ctx, 2, 5);
        if (kind == 3) d.lengths = hpml_input_tokens(ctx, 2, 6);
        if (kind == 5) d.h0 = hpml_tensor_create_2d(ctx, 2, 3);
        y = kind == 0 ? hpml_lstm_states(x, 3, &d) : hpml_gru(kind == 4 ? state : x, 3, &d);
        ENSURE_ERROR(ctx, y == NULL, kind < 2 ? HPML_ERR_ARGUMENT : HPML_ERR_SHAPE, texts[kind]);
        hpml_ctx_free(ctx);
    }
}

TEST(arguments_of_convolutions_and_norms_that_do_not_fit)
{
    static const char *const texts[] = { "not below stride", "must be (B, C, H, W)", "expected (B, C, T)",
        "C a multiple of the 3 groups", "multiples of the groups", "kernel_h is required" };
    for (int kind = 0; kind < 6; kind++) {
        hpml_ctx        *ctx = context(1);
        hpml_tensor     *x = hpml_input_4d(ctx, 2, 4, 5, 5), *flat = hpml_input_3d(ctx, 2, 4, 5), *y = NULL;
        hpml_conv2d_desc d = { .kernel_h = 3 };
        if (kind == 0) d.extra_h = 1;
        if (kind == 4) d.groups = 3;
        if (kind == 5) d.kernel_h = 0;
        if (kind == 0 || kind == 4) y = hpml_conv_transpose2d(x, 6, &d);
        if (kind == 1) y = hpml_conv_transpose2d(flat, 6, &d);
        if (kind == 2) y = hpml_conv1d(x, 6, &d);
        if (kind == 3) y = hpml_groupnorm(x, 3, NULL);
        if (kind == 5) y = hpml_conv1d(flat, 6, &d);
        ENSURE_ERROR(ctx, y == NULL, HPML_ERR_SHAPE, texts[kind]);
        hpml_ctx_free(ctx);
    }
}
