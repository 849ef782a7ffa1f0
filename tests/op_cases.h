/* One small graph for each variant of each op; the tests of all backends run them. */
#ifndef HPML_OP_CASES_H
#define HPML_OP_CASES_H

typedef struct op_case {
    const char *name;
    hpml_tensor *(*record)(hpml_tensor *x); /* x (3, 4, 9, 7) */
    double  tolerance;
    int64_t shape[4]; /* of x, if not (3, 4, 9, 7) */
} op_case;

#define OP(name, e, tolerance) { #name, op_##name, tolerance, { 0 } },
#define OPS(X)                                                                                                         \
    X(add, hpml_add(x, hpml_scale(x, 0.5f, 1)), 3e-3)                                                                  \
    X(sub, hpml_sub(hpml_mul(x, x), x), 3e-3)                                                                          \
    X(div, hpml_div(x, hpml_scale(hpml_mul(x, x), 1, 2)), 3e-3)                                                        \
    X(broadcast, hpml_mul(x, weight(x, 4, 1, 7)), 3e-3)                                                                \
    X(broadcast_sub, hpml_sub(weight(x, 1, 9, 1), x), 3e-3)                                                            \
    X(add_itself, hpml_add(x, x), 3e-3)                                                                                \
    X(div_scalar, hpml_div(weight(x, 1, 1, 1), hpml_activation(x, HPML_ACT_EXP, 0)), 3e-3)                             \
    X(broadcast_both, hpml_add(x, hpml_mul(weight(x, 4, 1, 7), weight(x, 1, 9, 1))), 3e-3)                             \
    X(broadcast_div, hpml_div(x, hpml_activation(weight(x, 4, 1, 1), HPML_ACT_EXP, 0)), 3e-3)                          \
    X(bias, hpml_sub(x, weight(x, 4, 9, 7)), 3e-3)                                                                     \
    X(relu, hpml_relu(x), 1e-2) X(square, hpml_activation(x, HPML_ACT_SQUARE, 0), 3e-3)                                \
    X(neg, hpml_activation(x, HPML_ACT_NEG, 0), 3e-3) X(abs, hpml_activation(x, HPML_ACT_ABS, 0), 1e-2)                \
    X(leaky_relu, hpml_leaky_relu(x, 0.2f), 1e-2)                                                                      \
    X(gelu, hpml_gelu(x), 3e-3) X(gelu_erf, hpml_gelu_erf(x), 3e-3) X(silu, hpml_silu(x), 3e-3)                        \
    X(sigmoid, hpml_sigmoid(x), 3e-3) X(tanh, hpml_tanh(x), 3e-3) X(exp, hpml_activation(x, HPML_ACT_EXP, 0), 3e-3)    \
    X(log, hpml_activation(hpml_scale(hpml_mul(x, x), 1, 1), HPML_ACT_LOG, 0), 3e-3)                                   \
    X(sqrt, hpml_activation(hpml_scale(hpml_mul(x, x), 1, 1), HPML_ACT_SQRT, 0), 3e-3)                                 \
    X(softmax, hpml_softmax(x), 5e-3) X(log_softmax, hpml_log_softmax(x), 5e-3)                                        \
    X(layernorm, hpml_layernorm(x, NULL), 5e-3) X(rmsnorm, hpml_rmsnorm(x, NULL), 5e-3)                                \
    X(softmax_wide, hpml_scale(hpml_softmax(hpml_reshape_2d(x, -1, 252)), 60, 0), 5e-3)                                \
    X(layernorm_wide, hpml_layernorm(hpml_reshape_2d(x, -1, 252), NULL), 5e-3)                                         \
    X(rmsnorm_plain, hpml_rmsnorm(x, &(hpml_norm_desc){ .no_affine = true }), 5e-3)                                    \
    X(groupnorm, hpml_groupnorm(x, 2, NULL), 8e-3) X(instancenorm, hpml_groupnorm(nhwc(x), 4, NULL), 8e-3)             \
    X(conv1d, hpml_conv1d(hpml_reshape_3d(x, -1, 4, 63), 6, &(hpml_conv2d_desc){ .kernel_h = 3, .padding_h = 1,        \
                                                                                .stride_h = 2 }), 5e-3)                \
    X(conv_transpose, hpml_conv_transpose2d(x, 6, &(hpml_conv2d_desc){ .kernel_h = 3, .stride_h = 2, .padding_h = 1,   \
                                                                       .extra_h = 1 }), 5e-3)                          \
    X(conv_transpose_groups, hpml_mul(x, hpml_conv_transpose2d(x, 4, &(hpml_conv2d_desc){ .kernel_h = 3,               \
                                      .padding_h = 1, .groups = 2, .activation = HPML_ACT_SILU })), 5e-3)              \
    X(conv_transpose_nhwc, hpml_conv_transpose2d(nhwc(x), 3, &(hpml_conv2d_desc){ .kernel_h = 2, .stride_h = 2,        \
                                                                                  .no_bias = true }), 5e-3)            \
    X(batchnorm, hpml_batchnorm(x, NULL), 8e-3)                                                                        \
    X(batchnorm_rows, hpml_batchnorm(hpml_reshape_2d(x, -1, 7), &(hpml_norm_desc){ .no_affine = true }), 8e-3)         \
    X(batchnorm_relu, hpml_batchnorm(x, &(hpml_norm_desc){ .activation = HPML_ACT_RELU }), 1e-2)                       \
    X(matmul, hpml_matmul(x, x, false, true), 5e-3) X(matmul_at, hpml_matmul(x, x, true, false), 5e-3)                 \
    X(matmul_shared, hpml_matmul(x, weight(x, 1, 7, 5), false, false), 5e-3)                                           \
    X(matmul_shared_t, hpml_matmul(x, weight(x, 1, 5, 9), true, true), 5e-3)                                           \
    X(linear, hpml_linear(x, 5, NULL), 5e-3)                                                                           \
    X(linear_gelu, hpml_linear(x, 5, &(hpml_linear_desc){ .activation = HPML_ACT_GELU }), 5e-3)                        \
    X(linear_tanh, hpml_linear(x, 5, &(hpml_linear_desc){ .activation = HPML_ACT_TANH, .no_bias = true }), 5e-3)       \
    X(conv, hpml_conv2d(x, 6, &(hpml_conv2d_desc){ .kernel_h = 3, .padding_h = 1 }), 5e-3)                             \
    X(conv_stride, hpml_conv2d(x, 5, &(hpml_conv2d_desc){ .kernel_h = 3, .kernel_w = 2, .stride_h = 2, .stride_w = 3,  \
                                                          .padding_h = 1 }), 5e-3)                                     \
    X(conv_groups, hpml_conv2d(x, 6, &(hpml_conv2d_desc){ .kernel_h = 3, .dilation_h = 2, .padding_h = 2,              \
                                                          .groups = 2 }), 5e-3)                                        \
    X(conv_depthwise, hpml_conv2d(x, 8, &(hpml_conv2d_desc){ .kernel_h = 3, .padding_h = 1, .groups = 4,               \
                                                             .activation = HPML_ACT_TANH }), 5e-3)                     \
    X(conv_1x1, hpml_conv2d(x, 5, &(hpml_conv2d_desc){ .kernel_h = 1 }), 5e-3)                                         \
    X(conv_large, hpml_conv2d(x, 3, &(hpml_conv2d_desc){ .kernel_h = 5, .padding_h = 3, .stride_h = 3 }), 5e-3)        \
    X(conv_nhwc, hpml_conv2d(nhwc(x), 6, &(hpml_conv2d_desc){ .kernel_h = 3, .padding_h = 1 }), 5e-3)                  \
    X(conv_nhwc_groups, hpml_conv2d(nhwc(x), 6, &(hpml_conv2d_desc){ .kernel_h = 3, .stride_h = 2, .padding_h = 2,     \
                                                                     .groups = 2 }), 5e-3)                             \
    X(conv_nhwc_1x1, hpml_flatten(hpml_conv2d(nhwc(x), 5, &(hpml_conv2d_desc){ .kernel_h = 1 })), 5e-3)                \
    X(max_pool_nhwc, hpml_max_pool2d(as_nhwc(x), 3, 2, 1), 1e-2)                                                       \
    X(avg_pool_nhwc, hpml_avg_pool2d(nhwc(x), 3, 2, 1), 5e-3)                                                          \
    X(global_pool_nhwc, hpml_global_avg_pool2d(nhwc(x)), 5e-3)                                                         \
    X(batchnorm_nhwc, hpml_batchnorm(hpml_relu(nhwc(x)), NULL), 8e-3)                                                  \
    X(max_pool, hpml_max_pool2d(x, 2, 0, 0), 1e-2) X(max_pool_3, hpml_max_pool2d(x, 3, 2, 1), 1e-2)                    \
    X(max_pools, hpml_add(hpml_max_pool2d(x, 2, 0, 0), hpml_max_pool2d(x, 2, 0, 0)), 1e-2)                             \
    X(avg_pool, hpml_avg_pool2d(x, 3, 2, 1), 5e-3) X(global_pool, hpml_global_avg_pool2d(x), 5e-3)                     \
    X(permute, hpml_permute(x, (int[]){ 0, 3, 1, 2 }), 3e-3) X(slice, hpml_slice(x, 2, 3, 4), 3e-3)                    \
    X(transpose, hpml_transpose(x, 1, 3), 3e-3) X(permute_rows, hpml_permute(x, (int[]){ 0, 2, 1, 3 }), 3e-3)          \
    X(slices, hpml_concat((hpml_tensor *[]){ hpml_slice(x, 1, 3, 1), hpml_slice(x, 1, 1, 2) }, 2, 1), 3e-3)            \
    X(concat, hpml_concat((hpml_tensor *[]){ x, hpml_tanh(x), x }, 3, 1), 3e-3)                                        \
    X(reshape_input, hpml_softmax(hpml_reshape_3d(x, -1, 6, 21)), 5e-3)                                                \
    X(reshape_weight, hpml_mul(x, hpml_reshape_3d(weight(x, 1, 7, 4), 4, 1, 7)), 5e-3)                                 \
    X(sum, hpml_sum(x, 2), 3e-3) X(mean, hpml_mean(x, 3), 3e-3) X(sum_batch, hpml_add(x, hpml_sum(x, 0)), 3e-3)        \
    X(mean_all, hpml_add(hpml_mean(x, HPML_ALL_DIMS), x), 3e-3)                                                        \
    X(dropout, hpml_dropout(hpml_scale(x, 2, 0), 0.4f), 3e-3)                                                          \
    X(attention, hpml_attention(three(x), &(hpml_attention_desc){ .heads = 2 }), 8e-3)                                 \
    X(attention_full, hpml_attention(three(x), &(hpml_attention_desc){ .heads = 1, .not_causal = true }), 8e-3)        \
    X(attention_scale, hpml_attention(three(x), &(hpml_attention_desc){ .heads = 4, .scale = 0.7f }), 8e-3)            \
    X(attention_grouped, hpml_attention(three(x), &(hpml_attention_desc){ .heads = 4, .kv_heads = 1 }), 8e-3)      \
    X(attention_mask, hpml_attention(three(x), &(hpml_attention_desc){ .heads = 2, .kv_heads = 2, .not_causal = true,  \
                                                                       .mask = mask(x, 14, 1) }), 8e-3)                \
    X(attention_masks, hpml_attention(three(x), &(hpml_attention_desc){ .heads = 2, .mask = mask(x, 14, 14) }), 8e-3)  \
    X(rotary, hpml_rotary(three(x), &(hpml_rotary_desc){ .heads = 6, .rotated = 4 }), 3e-3)                            \
    X(rotary_adjacent, hpml_rotary(hpml_tanh(three(x)), &(hpml_rotary_desc){ .heads = 2, .dims = 4, .base = 100,       \
                                   .adjacent = true, .position = per_sample(x, 5, 3) }), 3e-3)                         \
    X(minimum, hpml_minimum(hpml_scale(x, 2, 0), x), 1e-2) X(maximum, hpml_maximum(x, hpml_scale(x, -1, 0)), 1e-2)     \
    X(maximum_itself, hpml_maximum(x, x), 3e-3) X(clamp, hpml_clamp(x, 0, 100), 1e-2)                                  \
    X(where, hpml_where(bits(x, 9, 1), x, weight(x, 4, 1, 7)), 3e-3) X(sin, hpml_sin(x), 3e-3)                         \
    X(where_either, hpml_where(weight(x, 1, 9, 7), hpml_tanh(x), weight(x, 1, 1, 1)), 3e-3)                            \
    X(cos, hpml_cos(hpml_scale(x, 2, 1)), 3e-3) X(pow, hpml_pow(hpml_scale(hpml_mul(x, x), 1, 1), -1.5f), 3e-3)        \
    X(max, hpml_max(x, 2), 1e-2) X(max_last, hpml_max(hpml_slice(x, 3, 1, 2), 3), 1e-2)                              \
    X(max_twice, hpml_mul(x, hpml_max(x, 1)), 1e-2)                                                                    \
    X(argmax, hpml_take_along(hpml_tanh(x), 1, hpml_argmax(x, 1)), 1e-2) X(reverse, hpml_reverse(x, 3, NULL), 3e-3)    \
    X(gather, hpml_take_along(x, 2, indices(x, 9, 5, 7)), 3e-3)                                                        \
    X(gather_rows, hpml_take_along(x, 2, indices(x, 9, 4, 1)), 3e-3)                                                   \
    X(reverse_lengths, hpml_add(hpml_reverse(three(x), 1, per_sample(x, 3, 5)), three(x)), 3e-3)                       \
    X(last, hpml_last(three(x), per_sample(x, 0, 5)), 3e-3) X(last_of_all, hpml_last(x, NULL), 3e-3)                   \
    X(pad, hpml_pad(x, 2, 2, 3, 0.5f), 3e-3) X(upsample, hpml_upsample2d(x, 2, false), 3e-3)                           \
    X(upsample_bilinear, hpml_upsample2d(x, 3, true), 3e-3) X(upsample_nhwc, hpml_upsample2d(nhwc(x), 2, true), 3e-3)  \
    X(mask, hpml_mul(three(x), hpml_reshape_3d(hpml_mask(per_sample(x, 3, 5), 14), -1, 14, 1)), 3e-3)                  \
    X(lstm_states, states(x, hpml_lstm_states, 7, true), 8e-3) X(gru_states, states(x, hpml_gru, 6, true), 8e-3)       \
    X(lstm_cells, states(x, hpml_lstm_states, 4, false), 8e-3) X(gru, hpml_gru(three(x), 5, NULL), 8e-3)               \
    X(lstm, hpml_lstm(three(x), 5, NULL), 8e-3)                                                                        \
    X(residual_norm, hpml_layernorm(hpml_add(hpml_tanh(x), x), NULL), 5e-3)                                            \
    X(residual_norms, norms(hpml_add(hpml_tanh(x), hpml_scale(x, 2, 0))), 5e-3)                                        \
    X(residual_rmsnorm, hpml_rmsnorm(hpml_add(hpml_linear(x, 7, NULL), x), NULL), 5e-3)                                \
    X(residual, hpml_add(hpml_dropout(hpml_linear(x, 7, NULL), 0.2f), x), 5e-3)                                        \
    X(custom, gated(x, hpml_scale(x, 2, 1)), 3e-3) X(custom_itself, gated(x, x), 3e-3)                                 \
    X(mul_reshaped, by_reshaped(hpml_tanh(x), hpml_mul), 3e-3)                                                         \
    X(custom_reshaped, by_reshaped(hpml_tanh(x), gated), 3e-3)                                                         \
    X(custom_param, gated(hpml_reshape_2d(x, -1, 63), weight(x, 1, 1, 63)), 3e-3)

static hpml_tensor *weight(hpml_tensor *x, int64_t a, int64_t b, int64_t c)
{
    hpml_param_desc d = { .ndim = a > 1 ? 3 : 2, .shape = { a, b, c }, .init = HPML_INIT_NORMAL, .init_scale = 1 };
    if (a <= 1) d.shape[0] = b, d.shape[1] = c;
    return hpml_param_create(x->ctx, &d);
}

static hpml_tensor *nhwc(hpml_tensor *x) { return hpml_to_layout(x, HPML_NHWC); }

/* Declares x (3, 4, 9, 7) as 4 x 9 pixels of 7 channels. hpml_to_layout would round the numbers where halves are
   stored, and then a maximum could be at another pixel. */
static hpml_tensor *as_nhwc(hpml_tensor *x)
{
    hpml_tensor_set_layout(x, HPML_NHWC);
    return x;
}

/* Two norms and a third op that read the same sum. */
static hpml_tensor *norms(hpml_tensor *x)
{
    return hpml_add(hpml_mul(hpml_layernorm(x, NULL), hpml_rmsnorm(x, NULL)), x);
}

/* An op of the user: y = a (1 + sin b), b as large as a or one row of it; saved: cos b; scratch: da. */
static hpml_status gated_forward(const hpml_run *run, hpml_node *n)
{
    const float *a = n->src[0]->data, *b = n->src[1]->data;
    float       *c = (float *)n->saved;
    int64_t      count = hpml_tensor_count(n->src[1]);
    (void)run;
    for (int64_t i = 0; i < hpml_tensor_count(n->out); i++) {
        if (i < count) c[i] = cosf(b[i]);
        n->out->data[i] = a[i] * (1 + sinf(b[i % count]));
    }
    return HPML_OK;
}
static hpml_status gated_backward(const hpml_run *run, hpml_node *n)
{
    const float *a = n->src[0]->data, *b = n->src[1]->data, *c = (const float *)n->saved, *dy = n->out->grad;
    float       *da = (float *)n->scratch, *db = n->src[1]->grad;
    int64_t      count = hpml_tensor_count(n->src[1]);
    for (int64_t i = 0; i < hpml_tensor_count(n->out); i++) {
        da[i] = dy[i] * (1 + sinf(b[i % count]));
        db[i % count] += dy[i] * a[i] * c[i % count];
    }
    hpml_node_give(run, n, 0, da);
    return HPML_OK;
}
static hpml_tensor *gated(hpml_tensor *a, hpml_tensor *b)
{
    hpml_tensor *src[] = { a, b };
    size_t       bytes = (size_t)hpml_tensor_count(a) * sizeof(float);
    hpml_custom  op = { .name = "gated", .forward = gated_forward, .backward = gated_backward, .saved_bytes = bytes,
                        .scratch_bytes = bytes };
    return hpml_custom_op(src, 2, &op);
}

/* Returns op(x, y), y a reshape of x, in the same memory, to the same shape. */
static hpml_tensor *by_reshaped(hpml_tensor *x, hpml_tensor *(*op)(hpml_tensor *, hpml_tensor *))
{
    return op(x, hpml_reshape(hpml_reshape_2d(x, -1, 63), 4, (int64_t[]){ -1, 4, 9, 7 }));
}

/* Returns (B, T, 12). */
static hpml_tensor *three(hpml_tensor *x) { return hpml_reshape_3d(hpml_slice(x, 2, 0, 6), -1, 14, 12); }

/* Returns i32 (B): a + b i for sample i. */
static hpml_tensor *per_sample(hpml_tensor *x, int32_t a, int32_t b)
{
    int32_t      v[1024];
    hpml_tensor *t = hpml_tensor_create(x->ctx, HPML_DTYPE_I32, 1, x->shape);
    for (int i = 0; i < 1024; i++) v[i] = a + b * (i % 3);
    if (t) hpml_tensor_set_raw(t, v, (size_t)x->shape[0] * sizeof *v);
    return t;
}

/* Returns i32 (B, 4, m, inner): indices below `size`, some of them equal. */
static hpml_tensor *indices(hpml_tensor *x, int64_t size, int64_t m, int64_t inner)
{
    const int64_t shape[4] = { x->shape[0], 4, m, inner }, count = shape[0] * 4 * m * inner;
    hpml_tensor  *t = hpml_tensor_create(x->ctx, HPML_DTYPE_I32, 4, shape);
    int32_t      *v = (int32_t *)malloc((size_t)count * sizeof *v);
    for (int64_t i = 0; i < count; i++) v[i] = (int32_t)(i * i * 7 % 11 % size);
    if (t) hpml_tensor_set_raw(t, v, (size_t)count * sizeof *v);
    free(v);
    return t;
}

/* Returns (a, b): zeros and ones. */
static hpml_tensor *bits(hpml_tensor *x, int64_t a, int64_t b)
{
    float        v[64];
    hpml_tensor *t = hpml_tensor_create_2d(x->ctx, a, b);
    for (int i = 0; i < 64; i++) v[i] = (float)(i * i % 7 % 2);
    if (t) hpml_tensor_set(t, v, a * b);
    return t;
}

/* Returns (B, keys), or (B, queries, keys): zeros and ones, where the last row of a sample in three has no ones. */
static hpml_tensor *mask(hpml_tensor *x, int64_t keys, int64_t queries)
{
    const int64_t  shape[3] = { x->shape[0], queries > 1 ? queries : keys, keys }, count = x->shape[0] * queries * keys;
    hpml_tensor   *t = hpml_tensor_create(x->ctx, HPML_DTYPE_F32, queries > 1 ? 3 : 2, shape);
    float         *v = (float *)malloc((size_t)count * sizeof *v);
    for (int64_t i = 0; i < count; i++) {
        int64_t row = i / keys, sample = row / queries;
        v[i] = (float)(i * i % 7 % 3 != 1 && (row % queries < queries - 1 || sample % 3 != 1));
    }
    if (t) hpml_tensor_set(t, v, count);
    free(v);
    return t;
}

typedef hpml_tensor *recurrent(hpml_tensor *x, int64_t hidden, const hpml_recurrent_desc *desc);

/* Returns all results of a recurrent layer with lengths, as rows (B, ..); `which`: 1: final cells, 2: final hidden
   states, 4: lengths; initial: there are initial states, too. */
static hpml_tensor *states(hpml_tensor *x, recurrent *layer, int which, bool initial)
{
    hpml_tensor        *part[3] = { NULL, NULL, NULL }, *first = hpml_flatten(x);
    hpml_recurrent_desc d = { .lengths = which & 4 ? per_sample(x, 4, 5) : NULL };
    bool                cells = layer == hpml_lstm_states;
    if (initial) d.h0 = hpml_slice(first, 1, 3, 5);
    if (initial && cells) d.c0 = hpml_slice(first, 1, 9, 5);
    if (which & 2) d.final_h = &part[1];
    if (cells) d.final_c = &part[which & 2 ? 2 : 1];
    part[0] = hpml_reshape_2d(layer(three(x), 5, &d), x ? x->shape[0] : 0, 70);
    int parts = 1;
    while (parts < 3 && part[parts]) parts++;
    return hpml_concat(part, parts, 1);
}

#define DEFINE(name, e, tolerance) static hpml_tensor *op_##name(hpml_tensor *x) { return e; }
OPS(DEFINE)
static const op_case cases[] = { OPS(OP) };

static void fill(hpml_tensor *t, uint64_t seed)
{
    hpml_rng r = { .seed = seed };
    int64_t  n = hpml_tensor_count(t);
    float   *x = (float *)malloc((size_t)n * sizeof(float));
    hpml_rng_fill_normal(&r, x, n);
    for (int64_t i = 0; i < n; i++)
        if (fabsf(x[i]) < 0.05f) x[i] = 0.1f; /* not near 0, where relu and max have no derivative */
    hpml_tensor_set(t, x, n);
    free(x);
}

#endif
