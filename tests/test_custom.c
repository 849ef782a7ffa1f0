/* Ops of the user (hpml_custom_op): gradients, memory, batches, names, errors; the same bits as a built-in op; ranks
   without samples. */
#include "../hpml_comm.h"
#include "test.h"

/* y = x / (1 + |x|): backward reads x, or computes with y alone: 1 - |y| = 1 / (1 + |x|). */
static hpml_status soft_forward(const hpml_run *run, hpml_node *n)
{
    const float *x = n->src[0]->data;
    (void)run;
    for (int64_t i = 0; i < hpml_tensor_count(n->out); i++) n->out->data[i] = x[i] / (1 + fabsf(x[i]));
    return HPML_OK;
}
static hpml_status soft_backward(const hpml_run *run, hpml_node *n)
{
    float *dy = n->out->grad;
    bool   by_y = n->attr.custom->user != NULL;
    for (int64_t i = 0; i < hpml_tensor_count(n->out); i++) {
        float d = by_y ? 1 - fabsf(n->out->data[i]) : 1 / (1 + fabsf(n->src[0]->data[i]));
        dy[i] *= d * d;
    }
    hpml_node_give(run, n, 0, dy);
    return HPML_OK;
}
static const hpml_custom soft = { .name = "softsign", .forward = soft_forward, .backward = soft_backward, .flops = 70 };

/* y = w[0] x[0] + 2 w[1] x[1] + ..., source i of i + 1 times its numbers; gradients are given in reverse order. */
static hpml_status blend_forward(const hpml_run *run, hpml_node *n)
{
    (void)run;
    for (int64_t i = 0; i < hpml_tensor_count(n->out); i++) {
        n->out->data[i] = 0;
        for (int s = 0; s < n->src_count; s++) n->out->data[i] += (float)(s + 1) * n->src[s]->data[i];
    }
    return HPML_OK;
}
static hpml_status blend_backward(const hpml_run *run, hpml_node *n)
{
    int64_t count = hpml_tensor_count(n->out);
    float  *d     = (float *)n->scratch;
    for (int s = n->src_count - 1; s >= 0; s--) {
        for (int64_t i = 0; i < count; i++) d[i] = (float)(s + 1) * n->out->grad[i];
        hpml_node_give(run, n, s, d);
    }
    return HPML_OK;
}
static const hpml_custom blend = { .name = "blend", .forward = blend_forward, .backward = blend_backward,
                                   .keeps = HPML_KEEP_NONE, .scratch_bytes = 4096 };

static void fill(hpml_tensor *t, uint64_t stream)
{
    hpml_rng r = { .seed = 5, .stream = stream };
    float    v[4096];
    hpml_rng_fill_normal(&r, v, hpml_tensor_count(t));
    hpml_tensor_set(t, v, hpml_tensor_count(t));
}

static hpml_ctx *context(hpml_dtype store)
{
    return hpml_ctx_create(&(hpml_ctx_desc){ .threads = 2, .seed = 3, .activation_dtype = store });
}

/* Plans mean (h - t)^2, fills all inputs, and returns the largest error of a gradient. */
static double checked(hpml_ctx *ctx, hpml_tensor *x, hpml_tensor *h)
{
    hpml_tensor *t = hpml_input(ctx, HPML_DTYPE_F32, h ? h->ndim : 1, h ? h->shape : NULL);
    hpml_graph  *g = hpml_graph_create(ctx, &(hpml_graph_desc){ .loss = hpml_mse(h, t) });
    if (hpml_graph_alloc(g) != HPML_OK) return -1;
    fill(x, 1), fill(t, 2);
    return hpml_check_grad(g, 0, 1000);
}

TEST(gradients_agree_with_differences)
{
    for (int k = 0; k < 4; k++) {
        hpml_ctx    *ctx = context(HPML_DTYPE_F32);
        hpml_tensor *x = hpml_input_2d(ctx, 6, 5), *src[HPML_MAX_SRC];
        hpml_custom  own = soft;
        hpml_tensor_require_grad(x);
        hpml_tensor *a = hpml_linear(x, 7, NULL), *h = NULL;
        if (k == 0) h = hpml_custom_op(&a, 1, &own);
        own.keeps = HPML_KEEP_OUT, own.in_place = true, own.user = ctx;
        if (k == 1) h = hpml_custom_op(&a, 1, &own);
        if (k == 2) /* sources that are one tensor, and a reshape of that tensor: one gradient */
            h = hpml_custom_op((hpml_tensor *[]){ a, hpml_reshape_2d(a, 6, 7), a }, 3, &blend);
        for (int i = 0; k == 3 && i < HPML_MAX_SRC; i++) src[i] = hpml_linear(x, 3, NULL);
        if (k == 3) h = hpml_custom_op(src, HPML_MAX_SRC, &blend);
        double e = checked(ctx, x, hpml_add(h, hpml_custom_op(&h, 1, &soft)));
        if (!(e >= 0 && e < 3e-3)) printf("    case %d: %g %s\n", k, e, hpml_ctx_error(ctx)), test_failed = 1;
        hpml_ctx_free(ctx);
    }
}

/* A wrong derivative is found. */
static hpml_status wrong_backward(const hpml_run *run, hpml_node *n)
{
    hpml_node_give(run, n, 0, n->out->grad);
    return HPML_OK;
}
static hpml_status no_gradient(const hpml_run *run, hpml_node *n) { return (void)run, (void)n, HPML_OK; }
TEST(a_wrong_gradient_and_a_missing_one_are_found)
{
    for (int k = 0; k < 2; k++) {
        hpml_ctx    *ctx = context(HPML_DTYPE_F32);
        hpml_tensor *x = hpml_input_2d(ctx, 6, 5), *a = hpml_linear(x, 7, NULL);
        hpml_custom  own = soft;
        own.backward = k ? no_gradient : wrong_backward;
        ENSURE(checked(ctx, x, hpml_custom_op(&a, 1, &own)) > 0.1);
        hpml_tensor *w = hpml_param_at(ctx, 0);
        for (int64_t i = 0; k && i < hpml_tensor_count(w); i++) ENSURE(w->grad[i] == 0); /* not what was there before */
        hpml_ctx_free(ctx);
    }
}

/* relu, as the built-in op computes it */
static hpml_status relu_forward(const hpml_run *run, hpml_node *n)
{
    (void)run;
    for (int64_t i = 0; i < hpml_tensor_count(n->out); i++) n->out->data[i] = fmaxf(n->src[0]->data[i], 0);
    return HPML_OK;
}
static hpml_status relu_backward(const hpml_run *run, hpml_node *n)
{
    for (int64_t i = 0; i < hpml_tensor_count(n->out); i++)
        if (!(n->out->data[i] > 0)) n->out->grad[i] = 0;
    hpml_node_give(run, n, 0, n->out->grad);
    return HPML_OK;
}
static const hpml_custom own_relu = { .name = "own_relu", .forward = relu_forward, .backward = relu_backward,
                                      .keeps = HPML_KEEP_OUT, .in_place = true };

static uint64_t trained(hpml_dtype store, bool own, hpml_memory *memory)
{
    hpml_ctx    *ctx = context(store);
    hpml_tensor *x = hpml_input_2d(ctx, 8, 12), *h = hpml_linear(x, 20, NULL);
    h = own ? hpml_custom_op(&h, 1, &own_relu) : hpml_relu(h);
    hpml_trainer *t = hpml_trainer_create(ctx, &(hpml_trainer_desc){ .input = x, .output = hpml_linear(h, 4, NULL),
                                                                      .lr = 0.1f, .optimizer = HPML_OPT_ADAM });
    float         in[8 * 12];
    int32_t       y[8];
    for (int s = 0; s < 12; s++) {
        hpml_rng r = { .seed = 9, .stream = (uint64_t)s };
        hpml_rng_fill_normal(&r, in, 8 * 12);
        for (int i = 0; i < 8; i++) y[i] = (int32_t)(in[i * 12] > 0) + 2 * (in[i * 12 + 1] > 0);
        hpml_trainer_step(t, in, y, s % 3 == 2 ? 5 : 8, NULL); /* short batches, too */
    }
    if (memory) hpml_graph_memory(hpml_trainer_graph(t), memory);
    uint64_t hash = hpml_ctx_status(ctx) == HPML_OK ? hpml_param_hash(ctx) : 0;
    if (!hash) printf("    %s\n", hpml_ctx_error(ctx));
    hpml_ctx_free(ctx);
    return hash;
}
TEST(the_same_bits_and_the_same_memory_as_a_built_in_op)
{
    hpml_memory built_in, own;
    ENSURE(trained(HPML_DTYPE_F32, false, &built_in) == trained(HPML_DTYPE_F32, true, &own));
    ENSURE(own.activations == built_in.activations && own.unshared == built_in.unshared);
    ENSURE(trained(HPML_DTYPE_BF16, false, NULL) == trained(HPML_DTYPE_BF16, true, NULL));
    ENSURE(trained(HPML_DTYPE_F16, false, NULL) == trained(HPML_DTYPE_F16, true, NULL));
}

/* Memory of a chain of five softsigns, with what backward keeps. */
static hpml_memory chain(uint32_t keeps, bool in_place, size_t saved)
{
    hpml_ctx    *ctx = context(HPML_DTYPE_F32);
    hpml_custom  own = soft;
    hpml_memory  m;
    own.keeps = keeps, own.in_place = in_place, own.saved_bytes = saved;
    hpml_tensor *h = hpml_linear(hpml_input_2d(ctx, 64, 4), 256, NULL);
    for (int i = 0; i < 5; i++) h = hpml_custom_op(&h, 1, &own);
    hpml_graph_memory(hpml_graph_create(ctx, &(hpml_graph_desc){ .loss = hpml_mean(h, HPML_ALL_DIMS) }), &m);
    hpml_ctx_free(ctx);
    return m;
}
TEST(keeps_in_place_and_saved_bytes_are_planned)
{
    enum { EACH = 64 * 256 * 4 }; /* bytes of a layer's values */
    hpml_memory plain = chain(HPML_KEEP_NONE, false, 0), in_place = chain(HPML_KEEP_NONE, true, 0);
    ENSURE(plain.activations < 3 * EACH && in_place.activations < 3 * EACH);
    ENSURE(plain.unshared == in_place.unshared + 3 * EACH); /* every second result is in place */
    ENSURE(chain(HPML_KEEP_OUT, true, 0).activations >= plain.activations + 4 * EACH);
    ENSURE(chain(0, false, 0).activations >= plain.activations + 5 * EACH);
    ENSURE(chain(HPML_KEEP_NONE, true, EACH).activations >= plain.activations + 5 * EACH);
}

/* y (2 B, C) has each row of x (B, C) twice; backward adds to the gradient by itself. */
static hpml_status twice_forward(const hpml_run *run, hpml_node *n)
{
    int64_t cols = n->out->shape[1];
    (void)run;
    for (int64_t i = 0; i < hpml_tensor_count(n->out); i++)
        n->out->data[i] = n->src[0]->data[i / (2 * cols) * cols + i % cols];
    return HPML_OK;
}
static hpml_status twice_backward(const hpml_run *run, hpml_node *n)
{
    int64_t cols = n->out->shape[1];
    (void)run;
    for (int64_t i = 0; i < hpml_tensor_count(n->out); i++)
        n->src[0]->grad[i / (2 * cols) * cols + i % cols] += n->out->grad[i];
    return HPML_OK;
}
TEST(batches_follow_the_shape_or_batch_rows)
{
    static const struct { int64_t rows, given, want; bool batchable; } cases[] = {
        { 12, 0, 2, true }, { 12, 2, 2, true }, { 12, -1, 0, false }, { 7, 0, 0, false } };
    for (int k = 0; k < 4; k++) {
        hpml_ctx    *ctx = context(HPML_DTYPE_F32);
        hpml_tensor *x = hpml_input_2d(ctx, 6, 5), *a = hpml_linear(x, 3, NULL);
        hpml_custom  own = { .name = "twice", .forward = twice_forward, .backward = twice_backward, .ndim = 2,
                             .shape = { cases[k].rows, 3 }, .batch_rows = cases[k].given };
        hpml_tensor *y = hpml_custom_op(&a, 1, &own);
        hpml_graph  *g = hpml_graph_create(ctx, &(hpml_graph_desc){ .loss = hpml_mean(y, HPML_ALL_DIMS) });
        ENSURE(y && y->batch_rows == cases[k].want && hpml_graph_batchable(g) == cases[k].batchable);
        ENSURE(hpml_graph_alloc(g) == HPML_OK);
        fill(x, 1);
        if (k < 2) {
            ENSURE(hpml_check_grad(g, 0, 100) < 2e-3);
            ENSURE(hpml_graph_set_batch(g, 4) == HPML_OK && y->shape[0] == 8);
            ENSURE(hpml_check_grad(g, 0, 100) < 2e-3);
        }
        hpml_ctx_free(ctx);
    }
}

TEST(summary_profile_and_trace_name_the_op)
{
    hpml_ctx    *ctx = context(HPML_DTYPE_F32);
    hpml_tensor *x = hpml_input_2d(ctx, 2, 5), *a = hpml_linear(x, 7, NULL), *h = hpml_custom_op(&a, 1, &soft);
    hpml_graph  *g = hpml_graph_create(ctx, &(hpml_graph_desc){ .loss = hpml_mean(h, HPML_ALL_DIMS) });
    char         text[4000], line[4000] = "";
    hpml_profile_enable(g, true);
    hpml_trace_start(ctx, NULL);
    ENSURE(hpml_graph_forward(g, true, 0) == HPML_OK && hpml_graph_backward(g, 1, false) == HPML_OK);
    hpml_summary_text(g, text, sizeof text);
    ENSURE(strstr(text, "softsign0        softsign"));
    hpml_profile_text(g, text, sizeof text);
    ENSURE(strstr(text, "softsign0        softsign"));
    hpml_profile_row rows[3];
    ENSURE(hpml_profile(g, rows, 3) == 3 && rows[1].calls == 1);
    ENSURE(rows[1].forward_flops == 70 && rows[1].backward_flops == 140);
    ENSURE(hpml_trace_save(ctx, "build/test_custom.trace") == HPML_OK);
    FILE *f = fopen("build/test_custom.trace", "r");
    ENSURE(f && fread(line, 1, sizeof line - 1, f) > 0 && fclose(f) == 0);
    ENSURE(strstr(line, "\"softsign0\"") && strstr(line, "\"softsign0 backward\""));
    remove("build/test_custom.trace");
    hpml_ctx_free(ctx);
}

#define NAMED .name = "a", .forward = soft_forward
TEST(wrong_fields_are_named)
{
    static const struct { hpml_custom own; const char *text; } cases[] = {
        { { .forward = soft_forward }, "name is required" },
        { { .name = "a" }, "\"a\" of f32 6x5 \"input\": forward is required" },
        { { NAMED, .kernel = { NULL, soft_backward } }, "kernel" },
        { { NAMED, .kernel = { soft_forward, soft_backward } }, "kernel" },
        { { NAMED, .backward = soft_backward, .kernel = { soft_forward, NULL } }, "kernel" },
        { { NAMED, .one_number = true, .ndim = 1, .shape = { 3 } }, "one_number" },
        { { NAMED, .one_number = true, .batch_rows = 1 }, "one_number" },
        { { NAMED, .ndim = -1 }, "-1 dimensions" },
        { { NAMED, .ndim = HPML_MAX_DIMS + 1 }, "6 dimensions" },
        { { NAMED, .ndim = 2, .shape = { 6, 0 } }, "\"a0\": shape 6x0" },
        { { NAMED, .ndim = 2, .shape = { INT64_MAX, 9 } }, "does not fit in memory" },
        { { NAMED, .batch_rows = -2 }, "batch_rows is below -1" },
        { { NAMED, .batch_rows = 2 }, "\"a\": batch_rows 2 do not make the result" },
        { { NAMED, .keeps = HPML_KEEP_SRC(1) }, "keeps" },
        { { NAMED, .keeps = HPML_KEEP_NONE | HPML_KEEP_OUT }, "keeps" },
        { { NAMED, .keeps = HPML_KEEP_SRC(0), .in_place = true }, "in_place" },
        { { NAMED, .ndim = 2, .shape = { 6, 4 }, .in_place = true }, "in_place" },
        { { NAMED, .one_number = true, .in_place = true }, "in_place" },
        { { NAMED, .saved_bytes = SIZE_MAX }, "saved_bytes" },
        { { NAMED, .scratch_bytes = SIZE_MAX }, "scratch_bytes" },
        { { NAMED, .flops = -1 }, "flops" },
        { { NAMED, ._end = 1 }, "canary" },
    };
    hpml_ctx    *ctx = context(HPML_DTYPE_F32);
    hpml_tensor *x = hpml_input_2d(ctx, 6, 5), *many[HPML_MAX_SRC + 1];
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        ENSURE(hpml_custom_op(&x, 1, &cases[i].own) == NULL);
        bool named = strstr(hpml_ctx_error(ctx), cases[i].text) != NULL;
        if (!named) printf("    %zu: %s\n", i, hpml_ctx_error(ctx)), test_failed = 1;
        hpml_ctx_clear_error(ctx);
    }
    for (int i = 0; i <= HPML_MAX_SRC; i++) many[i] = x;
    ENSURE(!hpml_custom_op(many, HPML_MAX_SRC + 1, &soft) && strstr(hpml_ctx_error(ctx), "\"softsign\": 17 sources"));
    hpml_ctx_clear_error(ctx);
    ENSURE(!hpml_custom_op(&x, 1, NULL) && strstr(hpml_ctx_error(ctx), "name is required"));
    hpml_ctx_clear_error(ctx);
    many[1] = NULL;
    ENSURE(!hpml_custom_op(many, 2, &blend) && !hpml_custom_op(NULL, 1, &soft) && !hpml_custom_op(&x, 0, &soft));
    ENSURE(hpml_ctx_status(ctx) == HPML_OK);
    many[0] = hpml_input(ctx, HPML_DTYPE_U8, 2, (int64_t[]){ 6, 5 });
    ENSURE(!hpml_custom_op(many, 1, &soft) && strstr(hpml_ctx_error(ctx), "u8"));
    hpml_ctx_free(ctx);
}

static hpml_status refuses(const hpml_run *run, hpml_node *n) { return (void)run, (void)n, HPML_ERR_LABEL; }
static hpml_status gives_too_much(const hpml_run *run, hpml_node *n)
{
    hpml_node_give(run, n, 4, n->out->grad);
    return HPML_OK;
}
static hpml_status fails_and_returns_ok(const hpml_run *run, hpml_node *n)
{
    (void)n;
    hpml_ctx_fail(run->ctx, HPML_ERR_MEMORY, "no scratch");
    return HPML_OK;
}
TEST(errors_of_the_functions_reach_the_caller)
{
    for (int k = 0; k < 4; k++) {
        hpml_ctx    *ctx = context(HPML_DTYPE_F32);
        hpml_tensor *a = hpml_linear(hpml_input_2d(ctx, 2, 5), 7, NULL);
        hpml_custom  own = soft;
        if (k == 0) own.forward = refuses;
        if (k == 1) own.backward = refuses;
        if (k == 2) own.backward = gives_too_much;
        if (k == 3) own.forward = fails_and_returns_ok;
        hpml_tensor *h = hpml_custom_op(&a, 1, &own);
        hpml_graph  *g = hpml_graph_create(ctx, &(hpml_graph_desc){ .loss = hpml_mean(h, HPML_ALL_DIMS) });
        hpml_status  f = hpml_graph_forward(g, true, 0), b = hpml_graph_backward(g, 1, false);
        const hpml_status expected[] = { HPML_ERR_LABEL, HPML_OK, HPML_OK, HPML_ERR_MEMORY };
        ENSURE(f == expected[k] && b != HPML_OK);
        ENSURE(k != 2 || strstr(hpml_ctx_error(ctx), "\"softsign0\" has 1 sources; got number 4"));
        const char *forward = "softsign \"softsign0\": its forward returned: a label is out of range";
        ENSURE(k != 0 || strstr(hpml_ctx_error(ctx), forward));
        hpml_ctx_free(ctx);
    }
}

/* No backward: the result is a constant for the layers below. A graph may have 32 outputs. */
TEST(an_op_without_backward_and_many_outputs)
{
    hpml_ctx    *ctx = context(HPML_DTYPE_F32);
    hpml_tensor *x = hpml_input_2d(ctx, 2, 5), *a = hpml_linear(x, 7, NULL), *out[HPML_MAX_OUTPUTS + 1];
    hpml_custom  own = soft;
    own.backward = NULL;
    for (int i = 0; i <= HPML_MAX_OUTPUTS; i++) out[i] = hpml_custom_op(&a, 1, &own);
    ENSURE(!out[0]->needs_grad && a->needs_grad);
    ENSURE(!hpml_graph_create(ctx, &(hpml_graph_desc){ .output_count = HPML_MAX_OUTPUTS + 1, .outputs = out }));
    hpml_ctx_clear_error(ctx);
    hpml_graph *g = hpml_graph_create(ctx, &(hpml_graph_desc){ .output_count = HPML_MAX_OUTPUTS, .outputs = out });
    ENSURE(hpml_graph_alloc(g) == HPML_OK);
    fill(x, 1);
    ENSURE(hpml_graph_forward(g, false, 0) == HPML_OK && out[31]->data[3] == out[0]->data[3] && out[0]->data[3] != 0);
    hpml_ctx_free(ctx);
}

/* y = sum of x over all ranks; dx = sum of dy. */
static int idle_runs, idle_nonzero; /* calls on a rank without samples; numbers there that are not 0 */
static void count_idle(const hpml_run *run, const float *x, int64_t n)
{
    if (!run->idle) return;
    __atomic_fetch_add(&idle_runs, 1, __ATOMIC_RELAXED);
    for (int64_t i = 0; i < n; i++) __atomic_fetch_add(&idle_nonzero, x[i] != 0, __ATOMIC_RELAXED);
}
static hpml_status summed_forward(const hpml_run *run, hpml_node *n)
{
    count_idle(run, n->src[0]->data, hpml_tensor_count(n->out));
    memcpy(n->out->data, n->src[0]->data, (size_t)hpml_tensor_count(n->out) * sizeof(float));
    return hpml_allreduce((hpml_comm *)n->attr.custom->user, n->out->data, hpml_tensor_count(n->out), NULL);
}
static hpml_status summed_backward(const hpml_run *run, hpml_node *n)
{
    count_idle(run, n->out->grad, hpml_tensor_count(n->out));
    hpml_status s = hpml_allreduce((hpml_comm *)n->attr.custom->user, n->out->grad, hpml_tensor_count(n->out), NULL);
    hpml_node_give(run, n, 0, n->out->grad);
    return s;
}
/* y = x, NaN in the pass before which *user was set. */
static hpml_status poison_forward(const hpml_run *run, hpml_node *n)
{
    bool *now = (bool *)n->attr.custom->user;
    (void)run;
    memcpy(n->out->data, n->src[0]->data, (size_t)hpml_tensor_count(n->out) * sizeof(float));
    if (*now) n->out->data[0] = NAN;
    *now = false;
    return HPML_OK;
}
enum { B = 4 };
typedef struct job { bool nan; double loss[2]; uint64_t hash[2]; } job;
/* Ranks sum the input, and a layer's result; in the second and third step rank 1 has no samples. */
static hpml_status idle(hpml_comm *c, void *user)
{
    job         *j   = (job *)user;
    hpml_ctx    *ctx = hpml_comm_ctx(c);
    int          r   = hpml_comm_rank(c);
    hpml_custom  own = { .name = "summed", .forward = summed_forward, .backward = summed_backward, .user = c,
                         .keeps = HPML_KEEP_NONE, .collective = true };
    hpml_tensor *x = hpml_input_2d(ctx, B, 6);
    bool         nan = false;
    hpml_custom  poison = { .name = "poison", .forward = poison_forward, .backward = wrong_backward, .user = &nan };
    hpml_tensor *h = hpml_linear(hpml_relu(hpml_custom_op(&x, 1, &own)), 6, &(hpml_linear_desc){ .no_bias = true });
    hpml_tensor *sum = hpml_custom_op(&h, 1, &own);
    hpml_trainer *t = hpml_trainer_create(ctx, &(hpml_trainer_desc){
        .input = x, .output = hpml_linear(hpml_custom_op(&sum, 1, &poison), 3, NULL), .lr = 0.1f });
    hpml_distribute(t, c, NULL);
    float          xs[B * 6];
    int32_t        ys[B] = { 0, 1, 2, 0 };
    hpml_step_info info = { 0 };
    hpml_rng       rng = { .seed = 4, .stream = (uint64_t)r };
    for (int s = 0; s < 4; s++) {
        hpml_rng_fill_normal(&rng, xs, B * 6);
        nan = j->nan && s == 3 && r == 0;
        hpml_trainer_step(t, xs, ys, s < 3 && s > 0 && r == 1 ? 0 : B, &info);
        if (s == 2) j->loss[r] = info.loss;
    }
    j->hash[r] = hpml_param_hash(ctx);
    return hpml_ctx_status(ctx);
}
TEST(collective_ops_run_on_ranks_without_samples)
{
    job              j = { 0 }, again = { 0 };
    char             text[500] = "";
    hpml_launch_desc two = { .ranks = 2, .timeout = 20, .ctx = { .threads = 1, .seed = 2 } };
    idle_runs = idle_nonzero = 0;
    hpml_status status = hpml_launch(&two, idle, &j, text, sizeof text);
    if (status != HPML_OK) printf("    %s\n", text);
    ENSURE(status == HPML_OK && idle_runs == 6 && idle_nonzero == 0 && j.hash[0] == j.hash[1]);
    two.ctx.activation_dtype = HPML_DTYPE_BF16;
    ENSURE(hpml_launch(&two, idle, &again, text, sizeof text) == HPML_OK && again.hash[0] == again.hash[1]);
    ENSURE_NEAR(j.loss[0], again.loss[0], 0.05);
    ENSURE(idle_runs == 12 && idle_nonzero == 0);
}

/* The search for the layer with a NaN runs forward again, but no collective op: the other rank is elsewhere. */
TEST(collective_ops_are_not_repeated_to_find_a_nan)
{
    job              j = { .nan = true };
    char             text[500] = "";
    hpml_launch_desc two = { .ranks = 2, .timeout = 2, .ctx = { .threads = 1, .seed = 2 } };
    hpml_status status = hpml_launch(&two, idle, &j, text, sizeof text);
    ENSURE(status == HPML_ERR_NONFINITE && strstr(text, "step 4: the loss is nan"));
}
