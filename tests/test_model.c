/* Models as files: saved, loaded and run again; damaged and foreign files; names, sharing, groups of parameters, maps
   of names. */
#include "../hpml.h"
#include "test.h"
#include "files.h"

static hpml_ctx *new_ctx(void) { return hpml_ctx_create(&(hpml_ctx_desc){ .threads = 1, .seed = 5 }); }

/* Models of one input. Each returns its output, and its input in *x. */
static hpml_tensor *images_model(hpml_ctx *ctx, int64_t batch, hpml_tensor **x)
{
    hpml_conv2d_desc c1 = { .kernel_h = 3, .kernel_w = 2, .padding_h = 1, .padding_w = HPML_NO_PAD, .stride_h = 2,
                            .stride_w = 1, .activation = HPML_ACT_RELU, .name = "first" };
    hpml_conv2d_desc c2 = { .kernel_h = 3, .groups = 2, .dilation_h = 2, .padding_h = 2, .no_bias = true };
    *x = hpml_input_4d(ctx, batch, 2, 12, 13);
    hpml_tensor *h = hpml_conv2d(*x, 4, &c1);
    h = hpml_batchnorm(hpml_conv2d(h, 6, &c2), &(hpml_norm_desc){ .eps = 1e-3f, .activation = HPML_ACT_RELU });
    h = hpml_add(hpml_max_pool2d(h, 3, 2, 1), hpml_avg_pool2d(h, 3, 2, 1));
    h = hpml_concat((hpml_tensor *[]){ hpml_global_avg_pool2d(h), hpml_slice(hpml_flatten(h), 1, 2, 5) }, 2, 1);
    return hpml_log_softmax(hpml_dropout(hpml_linear(h, 7, NULL), 0.5f));
}

static hpml_tensor *nhwc_model(hpml_ctx *ctx, int64_t batch, hpml_tensor **x)
{
    *x = hpml_input_4d(ctx, batch, 2, 6, 6);
    hpml_tensor *h = hpml_conv2d(hpml_to_layout(*x, HPML_NHWC), 4, &(hpml_conv2d_desc){ .kernel_h = 3 });
    return hpml_linear(hpml_flatten(hpml_max_pool2d(h, 2, 0, 0)), 3, &(hpml_linear_desc){ .no_bias = true });
}

static hpml_tensor *text_model(hpml_ctx *ctx, int64_t batch, hpml_tensor **x)
{
    float        mask[8] = { 0.5f, -1, 2, 3, 1e-3f, 7, 8, 9 };
    hpml_tensor *c       = hpml_tensor_create_2d(ctx, 1, 8);
    hpml_tensor_set(c, mask, 8);
    *x = hpml_input_tokens(ctx, batch, 5);
    hpml_tensor *h = hpml_embedding(*x, 11, 8, &(hpml_embedding_desc){ .name = "tokens" });
    hpml_tensor *a = hpml_attention(hpml_linear(hpml_layernorm(h, NULL), 24, NULL),
                                    &(hpml_attention_desc){ .heads = 2, .not_causal = true });
    h = hpml_add(h, hpml_mul(a, c));
    h = hpml_lstm(hpml_rmsnorm(h, NULL), 8, NULL);
    h = hpml_div(hpml_sub(h, hpml_mean(h, 2)), hpml_scale(hpml_gelu(h), 2, 3.5f));
    h = hpml_matmul(h, hpml_param_find(ctx, "tokens.weight"), false, true); /* tied: (B, 5, 11) */
    return hpml_softmax(hpml_activation(hpml_transpose(h, 1, 2), HPML_ACT_LEAKY_RELU, 0.3f));
}

typedef hpml_tensor *model_fn(hpml_ctx *ctx, int64_t batch, hpml_tensor **x);
static model_fn *const models[] = { images_model, nhwc_model, text_model };
enum { MODELS = 3, SAMPLES = 11, BATCH = 4, MOST = SAMPLES * 400 };

/* Fills `raw` with SAMPLES samples of input x, and the parameters, also statistics, with numbers of their own. */
static void fill(hpml_ctx *ctx, const hpml_tensor *x, void *raw)
{
    hpml_rng r = { .seed = 9 };
    int64_t  n = hpml_tensor_count(x) / x->shape[0] * SAMPLES;
    for (int64_t i = 0; i < n; i++)
        if (x->dtype == HPML_DTYPE_I32) ((int32_t *)raw)[i] = (int32_t)hpml_rng_below(&r, 11);
        else ((float *)raw)[i] = hpml_rng_normal(&r);
    hpml_param_init(ctx);
    for (int i = 0; i < hpml_param_count(ctx); i++) {
        hpml_tensor *p = hpml_param_at(ctx, i);
        for (int64_t k = 0; k < hpml_tensor_count(p); k++) p->data[k] = 0.1f + 0.5f * hpml_rng_uniform(&r);
    }
}

/* Runs the graph of y on all samples of raw, one batch after the other; the last one is filled up. */
static void run_by_hand(hpml_ctx *ctx, hpml_tensor *x, hpml_tensor *y, const char *raw, float *out)
{
    hpml_graph *g    = hpml_graph_create(ctx, &(hpml_graph_desc){ .outputs = &y, .output_count = 1 });
    size_t      size = (size_t)(hpml_tensor_count(x) / x->shape[0]) * 4;
    int64_t     each = hpml_tensor_count(y) / y->shape[0];
    hpml_graph_alloc(g);
    for (int64_t i = 0; i < SAMPLES; i++) {
        for (int b = 0; b < BATCH; b++) memcpy((char *)x->raw + (size_t)b * size, raw + (size_t)i * size, size);
        hpml_graph_forward(g, false, 0);
        memcpy(out + i * each, y->data, (size_t)each * sizeof *out);
    }
}

static float outs[2][MOST];
static char  input[SAMPLES * 400 * 4];

static bool save(hpml_ctx *ctx, hpml_tensor *y, const char *path)
{
    const hpml_meta meta[] = { { "classes", "cat,dog \"x\"\n\xc3\xa4" }, { "scale", "0.5" } };
    bool ok = hpml_model_save(ctx, path, &(hpml_model_desc){ .outputs = &y, .output_count = 1, .meta = meta,
                                                             .meta_count = 2 }) == HPML_OK;
    if (!ok) printf("    %s\n", hpml_ctx_error(ctx));
    return ok;
}

TEST(a_loaded_model_computes_what_was_saved)
{
    for (int k = 0; k < MODELS; k++) {
        hpml_ctx    *ctx = new_ctx(), *other = new_ctx();
        hpml_tensor *x, *y = models[k](ctx, BATCH, &x);
        hpml_linear(hpml_input_2d(ctx, BATCH, 3), 5, &(hpml_linear_desc){ .name = "not in the model" });
        ENSURE(y);
        fill(ctx, x, input);
        ENSURE(save(ctx, y, file("model")));
        run_by_hand(ctx, x, y, input, outs[0]);
        for (int batch = 0; batch < 7; batch += 3) { /* as saved, 3, 6 */
            hpml_ctx_free(other);
            other = new_ctx();
            hpml_model *m = hpml_model_load(other, file("model"), batch);
            if (!m) printf("    %d: %s\n", k, hpml_ctx_error(other));
            ENSURE(m && hpml_param_count(other) == hpml_param_count(ctx) - 2);
            ENSURE(hpml_model_input(m, 0)->shape[0] == (batch ? batch : BATCH) && !hpml_model_input(m, 1));
            memset(outs[1], 0, sizeof outs[1]);
            ENSURE(hpml_model_predict(m, input, SAMPLES, outs[1]) == HPML_OK);
            for (int64_t i = 0; i < SAMPLES * hpml_tensor_count(y) / BATCH; i++)
                ENSURE_NEAR(outs[1][i], outs[0][i], 2e-6 + 2e-6 * fabs((double)outs[0][i]));
            ENSURE(strcmp(hpml_model_meta(m, "classes"), "cat,dog \"x\"\n\xc3\xa4") == 0);
            ENSURE(!hpml_model_meta(m, "hpml.model") && !hpml_model_meta(m, "none"));
            for (int i = 0; i < hpml_param_count(other); i++) {
                const hpml_tensor *p = hpml_param_at(other, i), *was = hpml_param_find(ctx, p->name);
                ENSURE(was && p->param->buffer == was->param->buffer && p->param->no_decay == was->param->no_decay);
            }
            size_t before = hpml_ctx_allocations(other);
            ENSURE(hpml_model_predict(m, input, SAMPLES, outs[1]) == HPML_OK);
            ENSURE(hpml_ctx_allocations(other) == before);
        }
        hpml_ctx_free(ctx);
        hpml_ctx_free(other);
    }
}

TEST(a_loaded_model_is_saved_again_and_trained)
{
    hpml_ctx    *ctx = new_ctx(), *other = new_ctx();
    hpml_tensor *x, *y = images_model(ctx, BATCH, &x);
    fill(ctx, x, input);
    ENSURE(save(ctx, y, file("one")));
    hpml_model *m = hpml_model_load(other, file("one"), 0);
    ENSURE(m && save(other, hpml_model_output(m, 0), file("two")));
    char compare[400];
    snprintf(compare, sizeof compare, "cmp %s %s", file("one"), file("two"));
    ENSURE(system(compare) == 0);
    hpml_trainer *t = hpml_trainer_create(other, &(hpml_trainer_desc){ .input = hpml_model_input(m, 0),
                                                                       .output = hpml_model_output(m, 0) });
    const int32_t labels[BATCH] = { 1, 2, 3, 4 };
    ENSURE(hpml_trainer_step(t, input, labels, BATCH, NULL) == HPML_OK);
    hpml_ctx_free(ctx);
    hpml_ctx_free(other);
}

/* Models with several inputs and outputs that together have all ops of HPML_OPS but CUSTOM, with constants that are not
   the defaults. Inputs of I32 are lengths, indices, tokens and labels, of which 1, 2 and 3 must be valid. */
enum { ENDS = 8 };
typedef struct net {
    hpml_tensor *in[ENDS], *out[ENDS];
    int          ins, outs;
} net;
static hpml_tensor *net_input(hpml_ctx *ctx, net *n, hpml_dtype dtype, int ndim, int64_t d1, int64_t d2, int64_t d3)
{
    return n->in[n->ins++] = hpml_input(ctx, dtype, ndim, (int64_t[]){ BATCH, d1, d2, d3 });
}
static void net_output(net *n, hpml_tensor *y) { n->out[n->outs++] = y; }

static void net_of(hpml_ctx *ctx, net *n, model_fn *model)
{
    net_output(n, model(ctx, BATCH, &n->in[0]));
    n->ins = 1;
}
static void images_net(hpml_ctx *ctx, net *n) { net_of(ctx, n, images_model); }
static void nhwc_net(hpml_ctx *ctx, net *n) { net_of(ctx, n, nhwc_model); }
static void text_net(hpml_ctx *ctx, net *n) { net_of(ctx, n, text_model); }

static void maps_net(hpml_ctx *ctx, net *n)
{
    hpml_tensor *a = net_input(ctx, n, HPML_DTYPE_F32, 2, 6, 0, 0), *b = net_input(ctx, n, HPML_DTYPE_F32, 2, 1, 0, 0);
    hpml_tensor *h = hpml_minimum(hpml_sin(a), hpml_maximum(hpml_cos(a), b));
    net_output(n, hpml_where(hpml_relu(a), hpml_pow(hpml_activation(b, HPML_ACT_ABS, 0), 1.7f), h));
    net_output(n, hpml_clamp(a, -0.3f, INFINITY));
    net_output(n, hpml_clamp(a, -INFINITY, 0.1f));
}

static void takes_net(hpml_ctx *ctx, net *n)
{
    hpml_tensor *x = net_input(ctx, n, HPML_DTYPE_F32, 3, 5, 4, 0), *l = net_input(ctx, n, HPML_DTYPE_I32, 1, 0, 0, 0);
    hpml_tensor *index = net_input(ctx, n, HPML_DTYPE_I32, 3, 3, 1, 0);
    hpml_tensor *h = hpml_concat((hpml_tensor *[]){ hpml_take_along(x, 1, index), hpml_reverse(x, 1, l) }, 2, 1);
    h = hpml_mul(hpml_pad(hpml_reverse(h, 2, NULL), 1, 1, 2, -0.7f), hpml_reshape_3d(hpml_mask(l, 11), BATCH, 11, 1));
    net_output(n, h);
    net_output(n, hpml_add(hpml_last(x, l), hpml_last(x, NULL)));
    net_output(n, hpml_max(hpml_pad(x, 1, 1, 0, -INFINITY), 1));
    net_output(n, hpml_take_along(x, 2, hpml_argmax(x, 2)));
    net_output(n, hpml_argmax(hpml_pad(x, 1, 0, 1, NAN), 1)); /* a NaN is larger than all numbers */
}

static void pictures_net(hpml_ctx *ctx, net *n, hpml_layout layout)
{
    hpml_conv2d_desc odd = { .kernel_h = 3, .kernel_w = 2, .stride_h = 2, .stride_w = 3, .padding_h = 1, .groups = 2,
                             .dilation_h = 2, .dilation_w = 1, .extra_h = 1, .extra_w = 2, .activation = HPML_ACT_GELU,
                             .padding_w = HPML_NO_PAD, .name = "up" };
    hpml_tensor *x = hpml_to_layout(net_input(ctx, n, HPML_DTYPE_F32, 4, 4, 3, 5), layout);
    hpml_tensor *h = hpml_groupnorm(hpml_conv_transpose2d(x, 6, &odd), 3, &(hpml_norm_desc){ .eps = 1e-2f });
    net_output(n, hpml_flatten(h));
    net_output(n, hpml_flatten(hpml_add(hpml_upsample2d(x, 3, true), hpml_upsample2d(x, 3, false))));
}
static void pictures_nchw(hpml_ctx *ctx, net *n) { pictures_net(ctx, n, HPML_NCHW); }
static void pictures_nhwc(hpml_ctx *ctx, net *n) { pictures_net(ctx, n, HPML_NHWC); }

static void signals_net(hpml_ctx *ctx, net *n)
{
    hpml_conv2d_desc causal = { .kernel_h = 3, .dilation_h = 2, .activation = HPML_ACT_RELU };
    hpml_tensor     *x = net_input(ctx, n, HPML_DTYPE_F32, 3, 4, 9, 0);
    net_output(n, hpml_conv1d(hpml_pad(x, 2, 4, 0, 0), 6, &causal));
}

static void recurrent_net(hpml_ctx *ctx, net *n)
{
    hpml_tensor *x = net_input(ctx, n, HPML_DTYPE_F32, 3, 5, 4, 0), *l = net_input(ctx, n, HPML_DTYPE_I32, 1, 0, 0, 0);
    hpml_tensor *h = net_input(ctx, n, HPML_DTYPE_F32, 2, 3, 0, 0), *c = net_input(ctx, n, HPML_DTYPE_F32, 2, 3, 0, 0);
    hpml_tensor *last[4];
    hpml_recurrent_desc all = { .name = "all", .h0 = h, .c0 = c, .lengths = l, .final_h = &last[0],
                                .final_c = &last[1] };
    hpml_recurrent_desc ends = { .final_h = &last[2], .final_c = &last[3] }, few = { .h0 = h, .lengths = l };
    hpml_tensor *y = hpml_lstm_states(x, 3, &all);
    net_output(n, hpml_lstm_states(y, 4, &ends));
    net_output(n, hpml_gru(y, 3, &few));
    net_output(n, hpml_gru(y, 2, NULL));
    for (int i = 0; i < 4; i++) net_output(n, last[i]);
}

static void attention_net(hpml_ctx *ctx, net *n)
{
    hpml_tensor *qkv = net_input(ctx, n, HPML_DTYPE_F32, 3, 5, 48, 0);
    hpml_tensor *l     = net_input(ctx, n, HPML_DTYPE_I32, 1, 0, 0, 0);
    hpml_tensor *pairs = net_input(ctx, n, HPML_DTYPE_F32, 3, 5, 5, 0);
    hpml_rotary_desc    turned = { .heads = 8, .rotated = 6, .dims = 4, .base = 300, .adjacent = true, .position = l };
    hpml_attention_desc few = { .heads = 4, .kv_heads = 2, .not_causal = true, .mask = hpml_mask(l, 5) };
    hpml_attention_desc row = { .heads = 4, .kv_heads = 2, .scale = 0.3f, .mask = hpml_relu(pairs) };
    net_output(n, hpml_attention(hpml_rotary(qkv, &turned), &few));
    net_output(n, hpml_attention(hpml_rotary(qkv, &(hpml_rotary_desc){ .heads = 8 }), &row));
}

static void losses_net(hpml_ctx *ctx, net *n)
{
    hpml_tensor *x = net_input(ctx, n, HPML_DTYPE_F32, 2, 5, 0, 0), *t = net_input(ctx, n, HPML_DTYPE_F32, 2, 5, 0, 0);
    hpml_tensor *labels = net_input(ctx, n, HPML_DTYPE_I32, 1, 0, 0, 0);
    hpml_cross_entropy_desc odd = { .label_smoothing = 0.2f, .ignore_index = 2 };
    net_output(n, hpml_cross_entropy(x, labels, &odd));
    net_output(n, hpml_cross_entropy(x, labels, NULL));
    net_output(n, hpml_bce_with_logits(x, hpml_sigmoid(t)));
    net_output(n, hpml_mse(x, t));
    net_output(n, hpml_huber(x, t, 0.4f));
    net_output(n, hpml_huber(x, t, 0));
}

typedef void net_fn(hpml_ctx *ctx, net *n);
static net_fn *const nets[] = { images_net, nhwc_net, text_net, maps_net, takes_net, pictures_nchw, pictures_nhwc,
                                signals_net, recurrent_net, attention_net, losses_net };
enum { NETS = sizeof nets / sizeof *nets, NUMBERS = BATCH * 800 };
static char  arrays[ENDS][NUMBERS * 4]; /* of the inputs */
static float results[2][ENDS][NUMBERS];

static bool net_save(hpml_ctx *ctx, const net *n, const char *path)
{
    hpml_model_desc d = { .outputs = n->out, .output_count = n->outs, .inputs = n->in, .input_count = n->ins };
    return hpml_model_save(ctx, path, &d) == HPML_OK;
}

/* Records net number k; fills the arrays of its inputs and its parameters with numbers of their own. */
static net net_create(hpml_ctx *ctx, int k)
{
    net n = { .ins = 0 };
    nets[k](ctx, &n);
    for (int i = 0; i < n.ins && hpml_ctx_status(ctx) == HPML_OK; i++) {
        const hpml_tensor *x = n.in[i];
        hpml_rng           r = { .seed = 9 + (uint64_t)i };
        for (int64_t j = 0; j < hpml_tensor_count(x); j++)
            if (x->dtype == HPML_DTYPE_I32) ((int32_t *)(void *)arrays[i])[j] = 1 + (int32_t)hpml_rng_below(&r, 3);
            else ((float *)(void *)arrays[i])[j] = hpml_rng_normal(&r);
    }
    hpml_rng r = { .seed = 4 };
    hpml_param_init(ctx);
    for (int i = 0; i < hpml_param_count(ctx); i++)
        for (int64_t j = 0; j < hpml_tensor_count(hpml_param_at(ctx, i)); j++)
            hpml_param_at(ctx, i)->data[j] = 0.1f + 0.5f * hpml_rng_uniform(&r);
    return n;
}

/* Computes the results of a recorded net, of one batch. */
static bool net_run(hpml_ctx *ctx, net *n, float to[ENDS][NUMBERS])
{
    hpml_graph_desc d = { .outputs = n->out, .output_count = n->outs, .predict = true };
    hpml_graph     *g = hpml_graph_create(ctx, &d);
    if (hpml_graph_alloc(g) != HPML_OK) return false;
    for (int i = 0; i < n->ins; i++) memcpy(n->in[i]->raw, arrays[i], (size_t)hpml_tensor_count(n->in[i]) * 4);
    if (hpml_graph_forward(g, false, 0) != HPML_OK) return false;
    for (int i = 0; i < n->outs; i++)
        hpml_tensor_get(n->out[i], to[i], hpml_tensor_count(n->out[i]));
    return true;
}

static hpml_status net_predict(hpml_model *m, float to[ENDS][NUMBERS])
{
    const void *in[ENDS];
    float      *out[ENDS];
    for (int i = 0; i < ENDS; i++) in[i] = arrays[i];
    for (int i = 0; i < ENDS; i++) out[i] = to[i];
    return hpml_model_run(m, in, BATCH, out);
}

static void mark_ops(const hpml_tensor *t, bool *seen) /* sets seen[op] of all ops on which t depends */
{
    if (!t || !t->node) return;
    seen[t->node->op] = true;
    for (int i = 0; i < t->node->src_count; i++) mark_ops(t->node->src[i], seen);
}

static bool same_files(const char *a, const char *b)
{
    char command[1000];
    snprintf(command, sizeof command, "cmp %s %s", a, b);
    return system(command) == 0;
}

static hpml_status own_forward(const hpml_run *run, hpml_node *n) { return (void)run, (void)n, HPML_OK; }

TEST(every_op_is_saved_with_all_its_constants_or_refused)
{
    bool seen[HPML_OP_COUNT] = { false };
    for (int k = 0; k < NETS; k++) {
        hpml_ctx *ctx = new_ctx(), *other = new_ctx(), *halved = new_ctx();
        net       n   = net_create(ctx, k), again = { .ins = 0 };
        for (int i = 0; i < n.outs; i++) mark_ops(n.out[i], seen);
        if (hpml_ctx_status(ctx) != HPML_OK) printf("    net %d: %s\n", k, hpml_ctx_error(ctx));
        ENSURE(net_run(ctx, &n, results[0]) && net_save(ctx, &n, file("one")));
        hpml_model *m = hpml_model_load(other, file("one"), 0), *half = hpml_model_load(halved, file("one"), BATCH / 2);
        if (!m) printf("    net %d: %s\n", k, hpml_ctx_error(other));
        ENSURE(m && net_predict(m, results[1]) == HPML_OK);
        for (int i = 0; i < n.outs; i++)
            ENSURE(memcmp(results[0][i], results[1][i], (size_t)hpml_tensor_count(n.out[i]) * sizeof(float)) == 0);
        for (; again.ins < n.ins; again.ins++) again.in[again.ins] = hpml_model_input(m, again.ins);
        for (; again.outs < n.outs; again.outs++) again.out[again.outs] = hpml_model_output(m, again.outs);
        ENSURE(net_save(other, &again, file("two")) && same_files(file("one"), file("two")));
        ENSURE(half && net_predict(half, results[1]) == HPML_OK);
        for (int i = 0; i < n.outs; i++)
            for (int64_t j = 0; j < hpml_tensor_count(n.out[i]) && n.out[i]->batch_rows > 0; j++)
                ENSURE_NEAR(results[1][i][j], results[0][i][j], 2e-6 + 2e-6 * fabs((double)results[0][i][j]));
        hpml_ctx_free(ctx);
        hpml_ctx_free(other);
        hpml_ctx_free(halved);
    }
    for (int op = 0; op < HPML_OP_COUNT; op++) {
        const bool refused = op == HPML_OP_CUSTOM; /* see what_files_cannot_have_is_refused */
        if (seen[op] == refused) printf("    %s: in no net, or saved\n", hpml_op_name((hpml_op)op));
        ENSURE(seen[op] != refused);
    }
}

TEST(models_with_several_inputs_and_outputs)
{
    hpml_ctx    *ctx = new_ctx(), *other = new_ctx();
    hpml_tensor *a = hpml_input_2d(ctx, 3, 2), *b = hpml_input_2d(ctx, 3, 2);
    hpml_tensor *sum = hpml_add(a, b), *total = hpml_sum(hpml_sub(a, b), HPML_ALL_DIMS);
    hpml_tensor *out[2] = { sum, total }, *in[3] = { b, a, hpml_input_2d(ctx, 3, 7) }; /* no op reads the third */
    const float  xa[6] = { 1, 2, 3, 4, 5, 6 }, xb[6] = { 10, 20, 30, 40, 50, 60 };
    float        y[6], z[1];
    hpml_model_desc d = { .outputs = out, .output_count = 2, .inputs = in, .input_count = 3 };
    ENSURE(hpml_model_save(ctx, file("two"), &d) == HPML_OK);
    hpml_model *m = hpml_model_load(other, file("two"), 0);
    ENSURE(m && hpml_model_run(m, (const void *[]){ xb, xa, xa }, 3, (float *[]){ y, z }) == HPML_OK);
    ENSURE(y[0] == 11 && y[5] == 66 && z[0] == 21 - 210);
    ENSURE_ERROR(other, hpml_model_predict(m, xa, 3, y) != HPML_OK, HPML_ERR_ARGUMENT, "3 inputs and 2 outputs");
    ENSURE_ERROR(other, hpml_model_run(m, (const void *[]){ xb, NULL, xa }, 3, (float *[]){ y, z }) != HPML_OK,
                 HPML_ERR_ARGUMENT, "3 arrays of inputs");
    hpml_ctx_free(ctx);
    hpml_ctx_free(other);
}

TEST(what_files_cannot_have_is_refused)
{
    hpml_ctx    *ctx = new_ctx();
    hpml_tensor *x   = hpml_input_2d(ctx, 3, 2);
    hpml_tensor *own = hpml_custom_op(&x, 1, &(hpml_custom){ .name = "mine", .forward = own_forward });
    hpml_tensor *y   = hpml_linear(x, 2, NULL);
    const hpml_meta reserved = { "hpml.x", "y" };
    ENSURE_ERROR(ctx, hpml_model_save(ctx, file("m"), &(hpml_model_desc){ .outputs = &own, .output_count = 1 }),
                 HPML_ERR_UNSUPPORTED, "an op \"mine\"");
    ENSURE_ERROR(ctx, hpml_model_save(ctx, file("m"), &(hpml_model_desc){ .outputs = &x, .output_count = 1 }),
                 HPML_ERR_ARGUMENT, "computed by no op");
    ENSURE_ERROR(ctx, hpml_model_save(ctx, file("m"), &(hpml_model_desc){ .output_count = 1 }), HPML_ERR_ARGUMENT,
                 "1 to 32 outputs");
    ENSURE_ERROR(ctx, hpml_model_save(ctx, file("m"), &(hpml_model_desc){ .outputs = &y, .output_count = 1,
                                                                          .meta = &reserved, .meta_count = 1 }),
                 HPML_ERR_ARGUMENT, "do not begin with \"hpml.\"");
    ENSURE_ERROR(ctx, hpml_model_save(ctx, file("m"), &(hpml_model_desc){ .outputs = &y, .output_count = 1,
                                                                          .dtype = HPML_DTYPE_U8 }),
                 HPML_ERR_DTYPE, "f32, bf16 or f16");
    hpml_attention_desc kept = { .heads = 2, .cache = hpml_tensor_create_3d(ctx, 3, 6, 8) };
    kept.position = hpml_input(ctx, HPML_DTYPE_I32, 1, (int64_t[]){ 3 });
    hpml_tensor *words = hpml_attention(hpml_input_3d(ctx, 3, 2, 12), &kept);
    ENSURE_ERROR(ctx, hpml_model_save(ctx, file("m"), &(hpml_model_desc){ .outputs = &words, .output_count = 1 }),
                 HPML_ERR_UNSUPPORTED, "an op \"attention\" with a cache");
    hpml_tensor *order = hpml_tensor_create(ctx, HPML_DTYPE_I32, 2, (int64_t[]){ 3, 2 });
    hpml_tensor *taken = hpml_take_along(x, 1, order);
    ENSURE_ERROR(ctx, hpml_model_save(ctx, file("m"), &(hpml_model_desc){ .outputs = &taken, .output_count = 1 }),
                 HPML_ERR_DTYPE, "expected f32 with memory");
    ENSURE(hpml_params_save(ctx, file("params"), HPML_DTYPE_F32) == HPML_OK);
    ENSURE_ERROR(ctx, !hpml_model_load(ctx, file("params"), 0), HPML_ERR_FORMAT, "no structure of a model");
    ENSURE(hpml_model_save(ctx, file("m"), &(hpml_model_desc){ .outputs = &y, .output_count = 1 }) == HPML_OK);
    ENSURE_ERROR(ctx, !hpml_model_load(ctx, file("m"), 0), HPML_ERR_ARGUMENT, "exists already");
    hpml_ctx_free(ctx);
}

/* Loads a copy of file "good", in which `from` was replaced by `to` of the same length. */
static hpml_model *load_changed(hpml_ctx *ctx, const char *from, const char *to)
{
    static char bytes[1 << 16];
    FILE       *f = fopen(file("good"), "rb");
    size_t      n = fread(bytes, 1, sizeof bytes, f), length = strlen(from);
    fclose(f);
    for (size_t i = 0; i + length <= n; i++)
        if (memcmp(bytes + i, from, length) == 0) memcpy(bytes + i, to, length);
    return hpml_model_load(ctx, put("bad", bytes, n), 0);
}

TEST(damaged_structures_are_refused)
{
    static const struct { const char *from, *to, *says; } bad[] = {
        { "version\\\":1", "version\\\":9", "format version 9" },
        { "\\\"op\\\":\\\"add\\\"", "\\\"op\\\":\\\"adx\\\"", "an op \"adx\"" },
        { "\\\"src\\\":[0,", "\\\"src\\\":[9,", "a node" },
        { "\\\"shape\\\":[3,2]", "\\\"shape\\\":[3,7]", "expected 7" },
        { "\\\"rows\\\":1", "\\\"rows\\\":2", "the file says" },
        { "\\\"outputs\\\":[", "\\\"outputs\\\":{", "damaged" },
        { "\\\"inputs\\\"", "\\\"imputs\\\"", "damaged: inputs" },
        { "\\\"f32\\\"", "\\\"f99\\\"", "unknown type" },
        { "fc.weight\\\"", "fc.wheigt\\\"", "" } };
    hpml_ctx    *ctx = new_ctx();
    hpml_tensor *x   = hpml_input_2d(ctx, 3, 2);
    hpml_tensor *y   = hpml_add(hpml_linear(x, 2, &(hpml_linear_desc){ .name = "fc" }), x);
    ENSURE(save(ctx, y, file("good")));
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        hpml_ctx   *other = new_ctx();
        hpml_model *m = load_changed(other, bad[i].from, bad[i].to);
        bool last = i + 1 == sizeof bad / sizeof *bad; /* the name of a parameter alone: the data have another */
        if (m || (!last && !strstr(hpml_ctx_error(other), bad[i].says)))
            printf("    %s: %s\n", bad[i].to, hpml_ctx_error(other)), test_failed = 1;
        hpml_ctx_clear_error(other);
        ENSURE(hpml_param_count(other) == 0);
        hpml_ctx_free(other);
    }
    hpml_ctx_free(ctx);
}

/* True if model m has the inputs of a recorded net, and outputs that fit in the arrays of results. */
static bool net_fits(const hpml_model *m, const net *n)
{
    for (int i = 0; i < n->ins; i++) {
        const hpml_tensor *x = hpml_model_input(m, i);
        if (!x || hpml_tensor_count(x) / x->shape[0] > NUMBERS / BATCH) return false;
    }
    for (int i = 0; i < n->outs; i++) {
        const hpml_tensor *y = hpml_model_output(m, i);
        if (!y || hpml_tensor_count(y) > NUMBERS / BATCH) return false;
    }
    return !hpml_model_input(m, n->ins) && !hpml_model_output(m, n->outs);
}

/* Many random changes of the header: each is loaded and run, or refused, and no memory outside is touched. */
TEST(random_damage_does_no_harm)
{
    static char bytes[1 << 16], bad[1 << 16];
    hpml_rng     r = { .seed = 3 };
    int          loaded = 0;
    for (int k = 0; k < NETS; k++) {
        hpml_ctx *ctx = new_ctx();
        net       n   = net_create(ctx, k);
        uint64_t  header;
        ENSURE(net_save(ctx, &n, file("whole")));
        FILE  *f = fopen(file("whole"), "rb");
        size_t size = fread(bytes, 1, sizeof bytes, f);
        fclose(f);
        ENSURE(size < sizeof bytes);
        memcpy(&header, bytes, 8);
        for (int i = 0; i < (SLOW_BUILD ? 60 : 300); i++) {
            static const char signs[] = "0123456789,:[]{}\"\\-e.abt \0";
            memcpy(bad, bytes, size);
            for (int j = 0; j < 1 + i % 3; j++)
                bad[8 + hpml_rng_below(&r, (int64_t)header)] = signs[hpml_rng_below(&r, sizeof signs - 1)];
            hpml_ctx   *other = hpml_ctx_create(&(hpml_ctx_desc){ .threads = 1 });
            hpml_model *m     = hpml_model_load(other, put("bad", bad, size), 1);
            ENSURE((m != NULL) == (hpml_ctx_status(other) == HPML_OK));
            if (m && net_fits(m, &n)) net_predict(m, results[1]), loaded++;
            hpml_ctx_free(other);
        }
        hpml_ctx_free(ctx);
    }
    ENSURE(loaded > (SLOW_BUILD ? 20 : 100));
}

/* A file that version 1 of the format wrote, which later versions must read: HPML_GOLDEN=1 writes it. */
TEST(the_file_of_version_1_is_read)
{
    const char  *path = "tests/model_v1.safetensors";
    hpml_ctx    *ctx  = new_ctx(), *other = new_ctx();
    hpml_tensor *x, *y = text_model(ctx, BATCH, &x);
    fill(ctx, x, input);
    if (getenv("HPML_GOLDEN")) ENSURE(save(ctx, y, path));
    run_by_hand(ctx, x, y, input, outs[0]);
    hpml_model *m = hpml_model_load(other, path, 0);
    if (!m) printf("    %s\n", hpml_ctx_error(other));
    ENSURE(m && hpml_model_predict(m, input, SAMPLES, outs[1]) == HPML_OK);
    for (int i = 0; i < SAMPLES * 55; i++) ENSURE_NEAR(outs[1][i], outs[0][i], 1e-6);
    hpml_ctx_free(ctx);
    hpml_ctx_free(other);
}

TEST(names_count_the_layers_of_a_kind)
{
    hpml_ctx    *ctx = new_ctx();
    hpml_tensor *x   = hpml_input_2d(ctx, 3, 2);
    hpml_tensor *h   = hpml_relu(hpml_linear(x, 4, NULL));
    hpml_linear_desc wrong = { .weight = hpml_param_find(ctx, "linear0.weight") }; /* (4, 2), expected (4, 4) */
    ENSURE(!hpml_linear(h, 4, &wrong)); /* this layer does not count */
    hpml_ctx_clear_error(ctx);
    h = hpml_tanh(hpml_linear(h, 4, &(hpml_linear_desc){ .name = "named" }));
    h = hpml_linear(hpml_layernorm(h, NULL), 5, NULL);
    ENSURE(hpml_param_find(ctx, "linear0.weight") && hpml_param_find(ctx, "named.bias") &&
           hpml_param_find(ctx, "linear2.weight") && hpml_param_find(ctx, "layernorm0.weight"));
    ENSURE(strcmp(h->name, "linear2") == 0);
    hpml_ctx_free(ctx);
}

TEST(layers_of_one_name_share_all_they_have)
{
    hpml_ctx    *ctx = new_ctx();
    hpml_tensor *x[2], *y[2];
    hpml_share(ctx, true);
    for (int i = 0; i < 2; i++) {
        x[i] = hpml_input_4d(ctx, 2, 1, 5, 5);
        hpml_tensor *h = hpml_conv2d(x[i], 2, &(hpml_conv2d_desc){ .kernel_h = 2, .name = "conv", .no_bias = true });
        h = hpml_batchnorm(h, &(hpml_norm_desc){ .name = "norm" });
        h = hpml_lstm(hpml_reshape_3d(h, 2, 8, 4), 3, "cell");
        y[i] = hpml_linear(hpml_flatten(hpml_reshape_2d(h, 2, 24)), 2, &(hpml_linear_desc){ .name = "fc" });
    }
    ENSURE(y[1] && hpml_param_count(ctx) == 1 + 4 + 3 + 2);
    hpml_tensor *loss = hpml_mean(hpml_activation(hpml_add(hpml_scale(y[0], 2, 0.3f), y[1]), HPML_ACT_SQUARE, 0),
                                  HPML_ALL_DIMS);
    hpml_graph  *g    = hpml_graph_create(ctx, &(hpml_graph_desc){ .loss = loss });
    hpml_rng     r    = { .seed = 1 };
    ENSURE(hpml_graph_alloc(g) == HPML_OK);
    for (int i = 0; i < 2; i++) hpml_rng_fill_normal(&r, x[i]->data, 50);
    double wrong = hpml_check_grad(g, 0, 12);
    ENSURE(wrong >= 0 && wrong < 0.02);
    ENSURE_ERROR(ctx, !hpml_linear(y[0], 3, &(hpml_linear_desc){ .name = "fc" }), HPML_ERR_SHAPE, "is shared");
    hpml_share(ctx, false);
    ENSURE_ERROR(ctx, !hpml_linear(y[0], 2, &(hpml_linear_desc){ .name = "fc" }), HPML_ERR_ARGUMENT, "hpml_share");
    hpml_ctx_free(ctx);
}

TEST(groups_of_parameters_have_rates_of_their_own)
{
    hpml_ctx    *ctx = new_ctx();
    hpml_tensor *x   = hpml_input_2d(ctx, 2, 3);
    hpml_tensor *h   = hpml_linear(x, 3, &(hpml_linear_desc){ .name = "body.a", .init = HPML_INIT_ONES });
    hpml_linear_desc head = { .name = "head", .init = HPML_INIT_ONES, .no_bias = true }, tail = head;
    tail.name = "tail";
    hpml_tensor *y = hpml_linear(hpml_linear(h, 3, &head), 1, &tail);
    ENSURE(hpml_params_group(ctx, "body.*", &(hpml_param_group){ .freeze = true }) == 2);
    ENSURE(hpml_params_group(ctx, "head*", &(hpml_param_group){ .decay_scale = HPML_ZERO }) == 1);
    ENSURE(hpml_params_group(ctx, "*il.weight", &(hpml_param_group){ .lr_scale = 0.5f, .decay_scale = 3 }) == 1);
    ENSURE_ERROR(ctx, hpml_params_group(ctx, "none*", NULL) == 0, HPML_ERR_ARGUMENT, "no parameter has such a name");
    ENSURE_ERROR(ctx, hpml_params_group(ctx, "*", &(hpml_param_group){ .lr_scale = -1 }) == 0, HPML_ERR_ARGUMENT, "-1");
    hpml_trainer *t = hpml_trainer_create(ctx, &(hpml_trainer_desc){ .input = x, .output = y, .loss = HPML_LOSS_MSE,
                                                                     .lr = 0.1f, .weight_decay = 0.5f });
    const float zero[6] = { 0 }, target[2] = { 0 }; /* the gradient is 0: only weight decay moves weights */
    ENSURE(hpml_trainer_step(t, zero, target, 2, NULL) == HPML_OK);
    ENSURE(hpml_param_find(ctx, "body.a.weight")->data[0] == 1 && hpml_param_find(ctx, "head.weight")->data[0] == 1);
    ENSURE_NEAR(hpml_param_find(ctx, "tail.weight")->data[0], 1 - 0.1 * 0.5 * 0.5 * 3, 1e-6);
    hpml_ctx_free(ctx);
}

TEST(parameters_load_under_other_names)
{
    hpml_ctx *from = new_ctx(), *to = new_ctx();
    const float w[6] = { 1, 2, 3, 4, 5, 6 };
    hpml_param_create(from, &(hpml_param_desc){ .name = "net.h.0.c_attn.weight", .ndim = 2, .shape = { 3, 2 },
                                                .values = w });
    hpml_param_create(from, &(hpml_param_desc){ .name = "net.h.0.ln.weight", .ndim = 1, .shape = { 2 }, .values = w });
    ENSURE(hpml_params_save(from, file("from"), HPML_DTYPE_F32) == HPML_OK);
    hpml_param_create(to, &(hpml_param_desc){ .name = "block0.qkv.weight", .ndim = 2, .shape = { 2, 3 } });
    hpml_param_create(to, &(hpml_param_desc){ .name = "h.0.ln.weight", .ndim = 1, .shape = { 2 } });
    hpml_param_create(to, &(hpml_param_desc){ .name = "new.weight", .ndim = 1, .shape = { 2 }, .values = w + 4 });
    const hpml_rename map[] = { { "block*.qkv.weight", "h.*.c_attn.weight", true }, { "new.*", NULL, false } };
    hpml_load_desc d = { .prefix = "net.", .map = map, .map_count = 1 };
    ENSURE_ERROR(to, hpml_params_load_as(to, file("from"), &d), HPML_ERR_FORMAT, "\"net.new.weight\"");
    d.map_count = 2;
    ENSURE(hpml_params_load_as(to, file("from"), &d) == HPML_OK);
    const float turned[6] = { 1, 3, 5, 2, 4, 6 };
    ENSURE(memcmp(hpml_param_at(to, 0)->data, turned, sizeof turned) == 0 && hpml_param_at(to, 1)->data[1] == 2);
    ENSURE(hpml_param_at(to, 2)->data[1] == 6);
    d.map_count = 1, d.skip_missing = true;
    ENSURE(hpml_params_load_as(to, file("from"), &d) == HPML_OK && hpml_param_at(to, 2)->data[1] == 6);
    const hpml_rename straight[] = { { "block*.qkv.weight", "h.*.c_attn.weight", false } };
    d.map = straight;
    ENSURE_ERROR(to, hpml_params_load_as(to, file("from"), &d), HPML_ERR_SHAPE, "3x2, this model expects 2x3");
    d.map_count = -1;
    ENSURE_ERROR(to, hpml_params_load_as(to, file("from"), &d), HPML_ERR_ARGUMENT, "a map of -1 pairs");
    hpml_ctx_free(from);
    hpml_ctx_free(to);
}
