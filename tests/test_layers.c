/* Layers whose ranks communicate: each equals the same model on one rank, results and gradients, on 2 and 4 ranks; the
   bytes that each rank sends are those of the formula; what does not fit is refused. */
#include "../hpml_comm.h"
#include "test.h"
#include "comm_check.h"

/* ---- groups of communicators ---- */
static hpml_status group_sum(void *c, float *x, int64_t n) { return hpml_allreduce((hpml_comm *)c, x, n, NULL); }
static hpml_status group_max(void *c, float *x, int64_t n)
{
    return hpml_allreduce((hpml_comm *)c, x, n, &(hpml_allreduce_desc){ .reduce = HPML_MAX });
}
static hpml_status group_gather(void *user, const float *part, float *all, int64_t n)
{
    hpml_comm *c = (hpml_comm *)user;
    memcpy(all + n * hpml_comm_rank(c), part, (size_t)n * sizeof(float));
    return hpml_allgather(c, all, n * hpml_comm_size(c), HPML_ELEMENT_F32);
}
static hpml_status group_scatter(void *user, const float *all, float *part, int64_t n)
{
    hpml_comm  *c = (hpml_comm *)user;
    int64_t     p = hpml_comm_size(c);
    float      *copy = (float *)malloc((size_t)(n * p) * sizeof(float));
    memcpy(copy, all, (size_t)(n * p) * sizeof(float));
    hpml_status status = hpml_reduce_scatter(c, copy, n * p, HPML_ELEMENT_F32, HPML_SUM);
    memcpy(part, copy + n * hpml_comm_rank(c), (size_t)n * sizeof(float));
    free(copy);
    return status;
}
static hpml_status group_swap(void *c, const float *out, float *in, int64_t n)
{
    return hpml_all_to_all((hpml_comm *)c, out, in, (size_t)n * sizeof(float));
}
static hpml_status group_pass(void *user, const float *out, float *in, int64_t n, int shift)
{
    hpml_comm *c = (hpml_comm *)user;
    int        p = hpml_comm_size(c), me = hpml_comm_rank(c);
    shift = (shift % p + p) % p;
    return hpml_sendrecv(c, (me + shift) % p, out, (size_t)n * sizeof(float), (me + p - shift) % p, in,
                         (size_t)n * sizeof(float), 1);
}
static hpml_status group_bcast(void *c, float *x, int64_t n, int root)
{
    return hpml_broadcast((hpml_comm *)c, x, (size_t)n * sizeof(float), root);
}
/* Sets the group of an axis of the communicator's own context. */
static void set_group(hpml_comm *c, hpml_axis axis, hpml_ctx *ctx)
{
    hpml_group g = { hpml_comm_rank(c), hpml_comm_size(c), c, group_sum, group_max, group_gather, group_scatter,
                     group_swap, group_pass, group_bcast };
    hpml_ctx_set_group(ctx, axis, &g);
}

/* ---- numbers that both sides know ---- */
static float number(uint64_t stream, int64_t i)
{
    hpml_rng r = { .seed = 7, .stream = stream, .counter = (uint64_t)i };
    return hpml_rng_normal(&r);
}
/* The largest |a - b| in relation to the largest |b|. */
static double difference(const float *a, const float *b, int64_t n)
{
    double worst = 0, size = 1e-3;
    for (int64_t i = 0; i < n; i++) {
        double d = fabs((double)a[i] - (double)b[i]);
        if (!(d <= worst)) worst = d;
        if (fabs((double)b[i]) > size) size = fabs((double)b[i]);
    }
    return worst / size;
}
static int64_t bytes_sent(hpml_comm *c)
{
    hpml_counters k;
    hpml_comm_counters(c, &k);
    hpml_comm_counters_reset(c);
    return k.bytes;
}
static hpml_ctx *one_rank(void) { return hpml_ctx_create(&(hpml_ctx_desc){ .threads = 1, .seed = 3 }); }

/* Runs `check` on p ranks. */
static bool on_ranks(int p, hpml_rank_fn *check, void *user)
{
    char             error[700];
    hpml_launch_desc d = { .ranks = p, .timeout = 20, .ctx = { .threads = 1, .seed = 3 } };
    if (hpml_launch(&d, check, user, error, sizeof error) == HPML_OK) return true;
    printf("    %s\n", error);
    return false;
}

/* ---- ring attention ---- */
typedef struct ring_case { int B, T, C, heads; bool not_causal; } ring_case;
enum { MOST = 1 << 16 };
typedef struct ring_result { float y[MOST], dx[MOST], dw[4096]; } ring_result;

/* y and gradients of sum (y dy), y = attention(x w^T), for time steps first .. first + t - 1. */
static void ring_model(hpml_ctx *ctx, const ring_case *k, int t, int first, bool ring, ring_result *out, hpml_comm *c,
                       int64_t *bytes)
{
    int64_t             width = t * k->C, row = k->T * k->C;
    hpml_attention_desc a = { .heads = k->heads, .not_causal = k->not_causal };
    hpml_tensor *x = hpml_input_3d(ctx, k->B, t, k->C), *dy = hpml_input_3d(ctx, k->B, t, k->C);
    hpml_tensor_require_grad(x);
    hpml_tensor *qkv = hpml_linear(x, 3 * k->C, &(hpml_linear_desc){ .no_bias = true });
    hpml_tensor *y   = ring ? hpml_ring_attention(qkv, &a) : hpml_attention(qkv, &a);
    hpml_tensor *loss = hpml_sum(hpml_mul(y, dy), HPML_ALL_DIMS);
    hpml_graph  *g = hpml_graph_create(ctx, &(hpml_graph_desc){ .outputs = &y, .output_count = 1, .loss = loss });
    if (hpml_graph_alloc(g) != HPML_OK) return;
    for (int64_t i = 0; i < k->B * width; i++) {
        int64_t at = i / width * row + first * k->C + i % width;
        x->data[i]  = number(1, at);
        dy->data[i] = number(2, at);
    }
    if (c) bytes_sent(c);
    hpml_graph_forward(g, true, 0);
    if (c) bytes[0] = bytes_sent(c);
    hpml_graph_backward(g, 1, false);
    if (c) bytes[1] = bytes_sent(c);
    memcpy(out->y, y->data, (size_t)(k->B * width) * sizeof(float));
    memcpy(out->dx, x->grad, (size_t)(k->B * width) * sizeof(float));
    memcpy(out->dw, hpml_param_at(ctx, 0)->grad, (size_t)(3 * k->C * k->C) * sizeof(float));
}

static hpml_status ring_check(hpml_comm *c, void *user)
{
    const ring_case *k = (const ring_case *)user;
    hpml_ctx *ctx = hpml_comm_ctx(c), *alone = one_rank();
    int       p = hpml_comm_size(c), r = hpml_comm_rank(c), t = k->T / p;
    int64_t   width = t * k->C, row = k->T * k->C, bytes[2] = { 0, 0 }, block = k->B * t * 2 * k->C * 4;
    static ring_result mine[4], whole[4];
    set_group(c, HPML_AXIS_SEQUENCE, ctx);
    ring_model(ctx, k, t, r * t, true, &mine[r], c, bytes);
    ring_model(alone, k, k->T, 0, false, &whole[r], NULL, NULL);
    CHECK(hpml_ctx_status(ctx) == HPML_OK && hpml_ctx_status(alone) == HPML_OK);
    for (int b = 0; b < k->B; b++) {
        CHECK(difference(mine[r].y + b * width, whole[r].y + b * row + r * width, width) < 1e-5);
        CHECK(difference(mine[r].dx + b * width, whole[r].dx + b * row + r * width, width) < 1e-5);
    }
    CHECK(bytes[0] == (p - 1) * block && bytes[1] == (p > 1 ? (2 * p - 1) * block : 0));
    hpml_allreduce(c, mine[r].dw, 3 * k->C * k->C, NULL);
    CHECK(difference(mine[r].dw, whole[r].dw, 3 * k->C * k->C) < 1e-5);
    hpml_ctx_free(alone);
    return hpml_ctx_status(ctx);
}
TEST(ring_attention_equals_attention)
{
    ring_case causal = { 2, 16, 12, 3, false }, all = causal, long_ = { 1, 272, 8, 2, false };
    all.not_causal = true;
    for (int p = 1; p <= 4; p *= 2) ENSURE(on_ranks(p, ring_check, &causal) && on_ranks(p, ring_check, &all));
    ENSURE(on_ranks(2, ring_check, &long_)); /* more than one block of queries on each rank */
}

static hpml_status ring_refuses(hpml_comm *c, void *user)
{
    hpml_ctx *ctx = hpml_comm_ctx(c);
    (void)user;
    set_group(c, HPML_AXIS_SEQUENCE, ctx);
    hpml_tensor *x = hpml_input_3d(ctx, 2, 4, 12);
    CHECK(!hpml_ring_attention(NULL, NULL) && hpml_ctx_status(ctx) == HPML_OK);
    CHECK(!hpml_ring_attention(x, &(hpml_attention_desc){ .heads = 3 }));
    CHECK(strstr(hpml_ctx_error(ctx), "ring_attention: input is f32 2x4x12") && strstr(hpml_ctx_error(ctx), "3 heads"));
    hpml_ctx_clear_error(ctx);
    return HPML_OK;
}
TEST(ring_attention_refuses_heads_that_do_not_divide) { ENSURE(on_ranks(2, ring_refuses, NULL)); }
