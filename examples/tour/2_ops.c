/* A tour of the ops: each on a few numbers, with what it computes. Difficulty 1 of 4.
   cc -O2 examples/tour/2_ops.c -o ops -lm -lpthread && ./ops
   prints the conditions that hold, and WRONG before one that does not; exits with 1 then. */
#define HPML_IMPLEMENTATION
#include "../../hpml.h"
#include "tour.h"
#include <math.h>
#include <string.h>

enum { MOST = 64 };

static float result[MOST]; /* what `runs` has computed */

/* Runs one recorded result, whose inputs have their values, and leaves its numbers in `result`. */
static bool runs(hpml_tensor *y)
{
    hpml_graph_desc d = { .output_count = 1, .outputs = &y };
    if (!y) return false;
    hpml_graph *g = hpml_graph_create(y->ctx, &d);
    hpml_graph_forward(g, false, 0);
    if (y->dtype == HPML_DTYPE_F32) return hpml_tensor_get(y, result, hpml_tensor_count(y)) == HPML_OK;
    int32_t numbers[MOST];
    hpml_tensor_get_raw(y, numbers, 4 * (size_t)hpml_tensor_count(y));
    for (int64_t i = 0; i < hpml_tensor_count(y); i++) result[i] = (float)numbers[i];
    return true;
}

/* A constant of up to three dimensions; sizes of 0 are not there. */
static hpml_tensor *constant(hpml_ctx *ctx, const float *values, int64_t a, int64_t b, int64_t c)
{
    hpml_tensor *t = c ? hpml_tensor_create_3d(ctx, a, b, c) : b ? hpml_tensor_create_2d(ctx, a, b) : NULL;
    if (!t) t = hpml_tensor_create_1d(ctx, a);
    hpml_tensor_set(t, values, hpml_tensor_count(t));
    return t;
}

static hpml_tensor *integers(hpml_ctx *ctx, const int32_t *values, int ndim, const int64_t *shape)
{
    hpml_tensor *t = hpml_tensor_create(ctx, HPML_DTYPE_I32, ndim, shape);
    hpml_tensor_set_raw(t, values, 4 * (size_t)hpml_tensor_count(t));
    return t;
}

static bool near(int i, double value) { return fabs((double)result[i] - value) < 1e-5; }

static void element_by_element(hpml_ctx *ctx)
{
    const float  va[4] = { -2, -0.5f, 0.5f, 2 }, vb[4] = { 1, -1, 1, 3 }, vc[4] = { 0, 1, 0, 1 };
    hpml_tensor *a = constant(ctx, va, 4, 0, 0), *b = constant(ctx, vb, 4, 0, 0), *c = constant(ctx, vc, 4, 0, 0);
    SHOW(runs(hpml_minimum(a, b)) && near(0, -2) && near(1, -1));
    SHOW(runs(hpml_maximum(a, b)) && near(0, 1) && near(3, 3));
    SHOW(runs(hpml_where(c, a, b)) && near(0, 1) && near(1, -0.5) && near(3, 2)); /* a where c is not 0 */
    SHOW(runs(hpml_clamp(a, -1, 1)) && near(0, -1) && near(2, 0.5));
    SHOW(runs(hpml_pow(a, 3)) && near(0, -8) && near(3, 8));
    SHOW(runs(hpml_sin(a)) && near(2, sin(0.5)));
    SHOW(runs(hpml_cos(a)) && near(2, cos(0.5)));
    SHOW(runs(hpml_leaky_relu(a, 0.1f)) && near(0, -0.2) && near(3, 2));
    SHOW(runs(hpml_gelu_erf(a)) && near(2, 0.5 * 0.5 * (1 + erf(0.5 / sqrt(2)))));
    SHOW(runs(hpml_silu(a)) && near(2, 0.5 / (1 + exp(-0.5))));
}

static void shapes(hpml_ctx *ctx)
{
    const float   v[6] = { 1, 2, 3, 4, 5, 6 };
    const int     turn[2] = { 1, 0 };
    const int64_t flat[1] = { -1 }, two[1] = { 2 }, each[2] = { 2, 1 };
    const int32_t second[2] = { 1, 0 }, lengths[2] = { 2, 3 };
    hpml_tensor  *x = constant(ctx, v, 2, 3, 0); /* (2, 3) */
    SHOW(hpml_reshape(x, 1, flat)->shape[0] == 6 && hpml_reshape_2d(x, 3, -1)->shape[1] == 2);
    SHOW(hpml_reshape_3d(x, 1, 2, 3)->ndim == 3 && hpml_reshape_4d(x, 1, 1, 2, 3)->ndim == 4);
    SHOW(runs(hpml_permute(x, turn)) && near(1, 4));
    SHOW(runs(hpml_transpose(x, 0, 1)) && near(1, 4) && near(2, 2));
    SHOW(runs(hpml_slice(x, 1, 1, 2)) && near(0, 2) && near(3, 6));
    SHOW(runs(hpml_max(x, 1)) && near(0, 3) && near(1, 6));
    SHOW(runs(hpml_argmax(x, 1)) && near(0, 2) && near(1, 2));
    SHOW(runs(hpml_take_along(x, 1, integers(ctx, second, 2, each))) && near(0, 2) && near(1, 4));
    SHOW(runs(hpml_pad(x, 1, 1, 0, 9)) && near(0, 9) && near(1, 1) && near(4, 9));
    SHOW(runs(hpml_reverse(x, 1, NULL)) && near(0, 3) && near(5, 4));
    SHOW(runs(hpml_mask(integers(ctx, lengths, 1, two), 3)) && near(1, 1) && near(2, 0) && near(5, 1));
    SHOW(runs(hpml_last(hpml_reshape_3d(x, 2, 3, 1), integers(ctx, lengths, 1, two))) && near(0, 2) && near(1, 6));
}

static void layers(hpml_ctx *ctx)
{
    const float  v[8] = { 1, 2, 3, 4, 5, 6, 7, 8 }, ones[2] = { 1, 0 }, logits[2] = { 2, -1 };
    hpml_tensor *x = constant(ctx, v, 2, 4, 0), *p = constant(ctx, ones, 1, 2, 0), *z = constant(ctx, logits, 1, 2, 0);
    hpml_tensor *image = hpml_tensor_create_4d(ctx, 1, 2, 2, 2); /* (B, C, H, W) */
    hpml_norm_desc   none = { .name = NULL };
    hpml_rotary_desc one  = { .heads = 1 };
    hpml_conv2d_desc three = { .kernel_h = 3, .padding_h = 1 }, upwards = { .kernel_h = 2, .stride_h = 2 };
    hpml_tensor     *state_h = NULL, *state_c = NULL;
    hpml_recurrent_desc states = { .final_h = &state_h, .final_c = &state_c };
    hpml_tensor_set(image, v, 8);
    SHOW(runs(hpml_matmul(x, x, false, true)) && near(0, 30) && near(1, 70) && near(3, 174)); /* x x^T */
    SHOW(runs(hpml_avg_pool2d(image, 2, 0, 0)) && near(0, 2.5) && near(1, 6.5));
    SHOW(runs(hpml_global_avg_pool2d(image)) && near(0, 2.5) && near(1, 6.5));
    SHOW(hpml_upsample2d(image, 2, true)->shape[2] == 4);
    SHOW(runs(hpml_log_softmax(z)) && near(0, 2 - log(exp(2) + exp(-1))));
    SHOW(runs(hpml_bce_with_logits(z, p)) && near(0, (log1p(exp(-2)) + log1p(exp(-1))) / 2));
    SHOW(runs(hpml_huber(z, p, 1)) && near(0, (0.5 + 0.5) / 2));
    SHOW(runs(hpml_rmsnorm(x, &none)) && fabs((double)result[0] - 1 / sqrt(7.5)) < 1e-4);
    SHOW(hpml_batchnorm(image, &none)->shape[1] == 2);
    SHOW(hpml_groupnorm(image, 2, &none)->shape[1] == 2); /* groups = channels: instance norm */
    SHOW(hpml_conv1d(hpml_reshape_3d(x, 1, 2, 4), 3, &three)->shape[2] == 4);      /* (B, out, T) */
    SHOW(hpml_conv_transpose2d(image, 3, &upwards)->shape[2] == 4);                 /* twice as high and wide */
    SHOW(hpml_gru(hpml_reshape_3d(x, 1, 2, 4), 5, NULL)->shape[2] == 5);
    SHOW(hpml_lstm_states(hpml_reshape_3d(x, 1, 2, 4), 5, &states) && state_h->shape[1] == 5 && state_c != NULL);
    SHOW(hpml_lstm(hpml_reshape_3d(x, 1, 2, 4), 5, NULL)->shape[2] == 5); /* (B, T, hidden) */
    SHOW(runs(hpml_rotary(hpml_reshape_3d(x, 1, 2, 4), &one)) && near(0, 1) && !near(4, 5)); /* time step 0 stays */
}

/* What a graph knows about itself before it runs. */
static void graphs(hpml_ctx *ctx)
{
    char            text[4096];
    hpml_tensor    *x = hpml_input_2d(ctx, 8, 4), *y = hpml_tanh(hpml_linear(x, 3, NULL));
    hpml_graph_desc d = { .output_count = 1, .outputs = &y };
    hpml_graph     *g = hpml_graph_create(ctx, &d);
    double          flops = 0;
    for (int i = 0; i < hpml_graph_op_count(g); i++) flops += hpml_node_flops(hpml_graph_op(g, i), false);
    SHOW(hpml_graph_op_count(g) >= 1 && strcmp(hpml_op_name(hpml_graph_op(g, 0)->op), "linear") == 0);
    SHOW(flops == hpml_graph_flops(g, false) && flops >= 2. * 8 * 4 * 3);
    SHOW(hpml_graph_batchable(g) && hpml_graph_set_batch(g, 5) == HPML_OK && y->shape[0] == 5);
    SHOW(hpml_summary_text(g, text, sizeof text) > 0 && strstr(text, "linear"));
    SHOW(hpml_params_bytes(ctx) > 0 && hpml_param_init(ctx) == HPML_OK);
    SHOW(hpml_tensor_set_layout(hpml_input_4d(ctx, 1, 2, 2, 3), HPML_NHWC) == HPML_OK); /* the order of its values */
}

int main(void)
{
    hpml_ctx *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .seed = 7, .threads = 1 });
    element_by_element(ctx);
    shapes(ctx);
    layers(ctx);
    graphs(ctx);
    return tour_end(ctx);
}
