/* Layers whose ranks communicate: each equals the same model on one rank, results and gradients, on 2 and 4 ranks; the
   bytes that each rank sends are those of the formula; what does not fit is refused. */
#include "../hpml_comm.h"
#include "test.h"
#include "check.h"

/* Makes all ranks of c the group of an axis of its context. */
static void set_group(hpml_comm *c, hpml_axis axis)
{
    hpml_plan plan = { 0 };
    int32_t  *size[HPML_AXES] = { &plan.data, &plan.pipe, &plan.tensor, &plan.sequence, &plan.expert };
    *size[axis] = hpml_comm_size(c);
    hpml_comm_set_plan(c, &plan);
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
/* What this rank has sent since the last call, over c, or over all communicators of c's mesh. */
static int64_t bytes_of(hpml_comm *c)
{
    hpml_counters k = { 0 };
    hpml_comm_counters(c, &k);
    hpml_comm_counters_reset(c);
    return k.bytes;
}
static int64_t bytes_sent(hpml_comm *c)
{
    const hpml_mesh *m = hpml_comm_mesh(c);
    int64_t          bytes = bytes_of(c);
    for (int k = 0; m && k < HPML_AXES; k++) bytes += m->axis[k] ? bytes_of(m->axis[k]) : 0;
    return m ? bytes + bytes_of(m->replicas) : bytes;
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
    set_group(c, HPML_AXIS_SEQUENCE);
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
    set_group(c, HPML_AXIS_SEQUENCE);
    hpml_tensor *x = hpml_input_3d(ctx, 2, 4, 12);
    CHECK(!hpml_ring_attention(NULL, NULL) && hpml_ctx_status(ctx) == HPML_OK);
    CHECK(!hpml_ring_attention(x, &(hpml_attention_desc){ .heads = 3 }));
    CHECK(strstr(hpml_ctx_error(ctx), "ring_attention: input is f32 2x4x12") && strstr(hpml_ctx_error(ctx), "3 heads"));
    hpml_ctx_clear_error(ctx);
    CHECK(!hpml_ring_attention(x, &(hpml_attention_desc){ .heads = 2, .kv_heads = 1 }));
    CHECK(strstr(hpml_ctx_error(ctx), "kv_heads is 1") && strstr(hpml_ctx_error(ctx), "on 2 ranks"));
    hpml_ctx_clear_error(ctx);
    return HPML_OK;
}
TEST(ring_attention_refuses_heads_that_do_not_divide) { ENSURE(on_ranks(2, ring_refuses, NULL)); }

/* ---- convolution and locally connected layers on blocks of an image ---- */
typedef struct image_case {
    int B, C, H, W, out, kernel;
    int rows, cols;  /* of the grid of blocks */
    bool local;      /* hpml_local2d, else hpml_conv2d_rows */
} image_case;
typedef struct image_result { float y[4096], dx[4096], loss; int64_t bytes[2], weights; } image_result;

/* Number of the pixel in the whole image that pixel i of block `block` is. */
static int64_t pixel(const image_case *k, int channels, int block, int blocks, int64_t i)
{
    int64_t h = blocks > 1 ? k->H / k->rows : k->H, w = blocks > 1 ? k->W / k->cols : k->W;
    int64_t y = i / w % h + block / k->cols * h, x = i % w + block % k->cols * w;
    return (i / (h * w) * k->H + y) * k->W + x + 0 * channels;
}

/* whole: convolution of the whole image by the built-in op. */
static hpml_tensor *image_layer(const image_case *k, hpml_tensor *x, bool whole, const char *name)
{
    hpml_local2d_desc local = { .kernel = k->kernel, .rows = k->rows, .cols = k->cols, .activation = HPML_ACT_TANH };
    hpml_conv2d_desc  conv = { .kernel_h = k->kernel, .padding_h = k->kernel / 2, .name = name };
    if (k->local) return hpml_local2d(x, k->out, &local);
    return whole ? hpml_conv2d(x, k->out, &conv) : hpml_conv2d_rows(x, k->out, &conv);
}

/* Two layers; the gradients of sum (y dy) / pixels. Weights of the whole are number(10 + parameter, place). */
static void image_model(hpml_ctx *ctx, const image_case *k, int block, int blocks, image_result *out, hpml_comm *c)
{
    int64_t h = blocks > 1 ? k->H / k->rows : k->H, w = blocks > 1 ? k->W / k->cols : k->W;
    hpml_tensor *x = hpml_input_4d(ctx, k->B, k->C, h, w), *dy = hpml_input_4d(ctx, k->B, k->out, h, w);
    hpml_tensor_require_grad(x);
    hpml_tensor *y = image_layer(k, image_layer(k, x, !c, "c1"), !c, "c2");
    hpml_tensor *loss = hpml_sum(hpml_mul(y, dy), HPML_ALL_DIMS);
    hpml_graph  *g = hpml_graph_create(ctx, &(hpml_graph_desc){ .outputs = &y, .output_count = 1, .loss = loss });
    if (hpml_graph_alloc(g) != HPML_OK) return;
    for (int64_t i = 0; i < hpml_tensor_count(x); i++) x->data[i] = number(1, pixel(k, k->C, block, blocks, i));
    for (int64_t i = 0; i < hpml_tensor_count(dy); i++) dy->data[i] = number(2, pixel(k, k->out, block, blocks, i));
    for (int i = 0; i < hpml_param_count(ctx); i++) {
        hpml_tensor *p = hpml_param_at(ctx, i);
        int64_t      n = hpml_tensor_count(p), first = k->local && blocks > 1 ? block * n : 0;
        for (int64_t j = 0; j < n; j++) p->data[j] = 0.3f * number(10 + (uint64_t)i, first + j);
        out->weights += n;
    }
    if (c) bytes_sent(c);
    hpml_graph_forward(g, true, 0);
    if (c) out->bytes[0] = bytes_sent(c);
    hpml_graph_backward(g, 1, false);
    if (c) out->bytes[1] = bytes_sent(c);
    out->loss = loss->data[0];
    memcpy(out->y, y->data, (size_t)hpml_tensor_count(y) * sizeof(float));
    memcpy(out->dx, x->grad, (size_t)hpml_tensor_count(x) * sizeof(float));
}

static hpml_status image_check(hpml_comm *c, void *user)
{
    image_case k = *(const image_case *)user;
    hpml_ctx *ctx = hpml_comm_ctx(c), *alone = one_rank();
    int       p = hpml_comm_size(c), r = hpml_comm_rank(c), half = k.kernel / 2;
    image_result *mine = (image_result *)calloc(2, sizeof *mine), *whole = mine + 1;
    if (!k.local) k.rows = p, k.cols = 1;
    set_group(c, HPML_AXIS_SEQUENCE);
    image_model(ctx, &k, r, p, mine, c);
    image_model(alone, &k, 0, 1, whole, NULL);
    CHECK(hpml_ctx_status(ctx) == HPML_OK && hpml_ctx_status(alone) == HPML_OK);
    int64_t h = k.H / (p > 1 ? k.rows : 1), w = k.W / (p > 1 ? k.cols : 1);
    for (int64_t i = 0; i < k.B * k.out * h * w; i++)
        CHECK(fabs((double)mine->y[i] - whole->y[pixel(&k, k.out, r, p, i)]) < 1e-4);
    for (int64_t i = 0; i < k.B * k.C * h * w; i++)
        CHECK(fabs((double)mine->dx[i] - whole->dx[pixel(&k, k.C, r, p, i)]) < 1e-4);
    int64_t wide = p > 1 && k.cols > 1 ? h + 2 * half : 0, high = p > 1 && k.rows > 1 ? w : 0;
    int64_t bytes = (int64_t)4 * k.B * (k.C + k.out) * 2 * half * (high + wide); /* of two layers */
    CHECK(mine->bytes[0] == bytes && mine->bytes[1] == bytes);
    if (k.local) CHECK(mine->weights * p == whole->weights);
    for (int i = 0; i < hpml_param_count(ctx); i++) {
        hpml_tensor *mine_p = hpml_param_at(ctx, i), *whole_p = hpml_param_at(alone, i);
        int64_t      n = hpml_tensor_count(mine_p), first = k.local ? r * n : 0;
        CHECK(strcmp(mine_p->name, whole_p->name) == 0);
        if (!k.local) hpml_allreduce(c, mine_p->grad, n, NULL);
        CHECK(difference(mine_p->grad, whole_p->grad + first, n) < 1e-5);
    }
    free(mine);
    hpml_ctx_free(alone);
    return hpml_ctx_status(ctx);
}
TEST(convolution_on_rows_equals_that_of_the_whole_image)
{
    image_case k = { 2, 3, 8, 7, 4, 3, 0, 0, false };
    for (int p = 1; p <= 4; p *= 2) {
        k.kernel = 3;
        ENSURE(on_ranks(p, image_check, &k));
        k.kernel = 5;
        ENSURE(on_ranks(p, image_check, &k));
    }
}
TEST(locally_connected_layers_in_a_grid_equal_those_of_the_whole_image)
{
    image_case k = { 3, 2, 8, 12, 3, 3, 2, 2, true }, row = k, column = k;
    row.rows = 1, row.cols = 2;
    column.rows = 4, column.cols = 1, column.kernel = 5;
    ENSURE(on_ranks(4, image_check, &k) && on_ranks(2, image_check, &row) && on_ranks(4, image_check, &column));
    ENSURE(on_ranks(1, image_check, &k));
}

TEST(locally_connected_layers_follow_their_formula)
{
    hpml_ctx    *ctx = one_rank();
    hpml_tensor *x = hpml_input_4d(ctx, 2, 2, 4, 6), *dy = hpml_input_4d(ctx, 2, 3, 4, 6);
    hpml_tensor_require_grad(x);
    hpml_tensor *y = hpml_local2d(x, 3, &(hpml_local2d_desc){ .kernel = 3, .rows = 2, .cols = 3, .name = "l" });
    hpml_tensor *loss = hpml_sum(hpml_mul(y, dy), HPML_ALL_DIMS);
    hpml_graph  *g = hpml_graph_create(ctx, &(hpml_graph_desc){ .outputs = &y, .output_count = 1, .loss = loss });
    ENSURE(hpml_graph_alloc(g) == HPML_OK);
    const float *w = hpml_param_find(ctx, "l.weight")->data; /* (6 blocks, 2 x 2 pixels, 3, 2 x 3 x 3) */
    float       *b = hpml_param_find(ctx, "l.bias")->data;   /* (6, 4, 3) */
    for (int64_t i = 0; i < hpml_tensor_count(x); i++) x->data[i] = number(1, i);
    for (int64_t i = 0; i < hpml_tensor_count(dy); i++) dy->data[i] = number(2, i);
    for (int i = 0; i < 6 * 4 * 3; i++) b[i] = number(3, i);
    hpml_graph_forward(g, true, 0);
    for (int i = 0; i < 2 * 3 * 4 * 6; i++) {
        int    n = i / 72, out = i / 24 % 3, row = i / 6 % 4, col = i % 6;
        int    place = (row / 2 * 3 + col / 2) * 4 + row % 2 * 2 + col % 2;
        double sum = b[place * 3 + out];
        for (int k = 0; k < 18; k++) {
            int r = row + k / 3 % 3 - 1, c = col + k % 3 - 1;
            if (r < 0 || r > 3 || c < 0 || c > 5) continue;
            sum += (double)w[(place * 3 + out) * 18 + k] * x->data[((n * 2 + k / 9) * 4 + r) * 6 + c];
        }
        ENSURE_NEAR(y->data[i], sum, 1e-5);
    }
    double error = hpml_check_grad(g, 0, 1000);
    ENSURE(error >= 0 && error < 1e-3);
    hpml_ctx_free(ctx);
}

static hpml_status image_refuses(hpml_comm *c, void *user)
{
    hpml_ctx *ctx = hpml_comm_ctx(c);
    (void)user;
    set_group(c, HPML_AXIS_SEQUENCE);
    hpml_tensor *x = hpml_input_4d(ctx, 2, 3, 1, 8);
    CHECK(!hpml_conv2d_rows(x, 4, &(hpml_conv2d_desc){ .kernel_h = 3, .padding_h = 1, .stride_h = 2 }));
    CHECK(strstr(hpml_ctx_error(ctx), "stride_h 2") && strstr(hpml_ctx_error(ctx), "expected an odd kernel_h"));
    hpml_ctx_clear_error(ctx);
    CHECK(!hpml_conv2d_rows(x, 4, &(hpml_conv2d_desc){ .kernel_h = 5, .padding_h = 2 }));
    CHECK(strstr(hpml_ctx_error(ctx), "fewer pixels than a halo of 2 x 0"));
    hpml_ctx_clear_error(ctx);
    CHECK(!hpml_local2d(x, 4, &(hpml_local2d_desc){ .kernel = 3, .rows = 2, .cols = 2 }));
    CHECK(strstr(hpml_ctx_error(ctx), "a grid of 2 x 2 blocks on 2 ranks"));
    hpml_ctx_clear_error(ctx);
    CHECK(!hpml_local2d(x, 4, &(hpml_local2d_desc){ .kernel = 4, .rows = 2 }));
    CHECK(strstr(hpml_ctx_error(ctx), "kernel 4"));
    hpml_ctx_clear_error(ctx);
    return HPML_OK;
}
TEST(images_that_do_not_fit_are_refused) { ENSURE(on_ranks(2, image_refuses, NULL)); }

/* ---- mixture of experts ---- */
typedef struct expert_case {
    int   B, T, D, E, hidden, top;
    float capacity;
    bool  idle;      /* the last rank has no samples */
} expert_case;
enum { PARAMS = 5 }; /* gate, w1, b1, w2, b2 */
typedef struct expert_result { float y[4096], dx[4096], d[PARAMS][4096]; } expert_result;

static hpml_status expert_run(void *user, hpml_trainer *t, const hpml_moment *at, int64_t samples, float *loss)
{
    (void)user, (void)at;
    return hpml_trainer_forward_backward(t, 0, samples, 1, false, loss);
}
/* Adds to *out the gradients of sum (y dy) + balance, y = x + experts(x), with the samples of rank r. */
static void expert_model(hpml_ctx *ctx, const expert_case *k, int r, int block, bool idle, expert_result *out,
                         hpml_comm *c, int64_t *bytes)
{
    hpml_tensor *x = hpml_input_3d(ctx, k->B, k->T, k->D), *dy = hpml_input_3d(ctx, k->B, k->T, k->D), *balance;
    hpml_tensor_require_grad(x);
    hpml_experts_desc e = { .experts = k->E, .top = k->top, .hidden = k->hidden, .capacity = k->capacity,
                            .name = "moe" };
    hpml_tensor *y    = hpml_add(x, hpml_experts(x, &e, &balance));
    hpml_tensor *loss = hpml_add(hpml_sum(hpml_mul(y, dy), HPML_ALL_DIMS), balance);
    hpml_trainer *t = hpml_trainer_create(ctx, &(hpml_trainer_desc){ .input = x, .output = y, .target = dy,
                                                                     .loss_tensor = loss, .lr = HPML_ZERO });
    hpml_hooks pass = { .user = t, .run = expert_run };
    float      in[2][512];
    hpml_trainer_attach(t, &pass);
    if (!t) return;
    for (int64_t i = 0; i < hpml_tensor_count(x); i++) {
        in[0][i] = number(100 + (uint64_t)r, i);
        in[1][i] = number(200 + (uint64_t)r, i);
    }
    for (int i = 0; i < PARAMS; i++) {
        hpml_tensor *p = hpml_param_at(ctx, i);
        int64_t      n = hpml_tensor_count(p), first = i > 0 ? block * n : 0;
        for (int64_t j = 0; j < n; j++) p->data[j] = 0.5f * number(10 + (uint64_t)i, first + j);
    }
    if (c) bytes_sent(c);
    hpml_trainer_step(t, in[0], in[1], idle ? 0 : k->B, NULL);
    if (c) *bytes = bytes_sent(c);
    int64_t n = hpml_tensor_count(x);
    for (int64_t i = 0; i < n; i++) out->y[i] = y->data[i], out->dx[i] = x->grad[i];
    for (int i = 0; i < PARAMS; i++)
        for (int64_t j = 0; j < hpml_tensor_count(hpml_param_at(ctx, i)); j++)
            out->d[i][j] += hpml_param_at(ctx, i)->grad[j];
}

static hpml_status expert_check(hpml_comm *c, void *user)
{
    const expert_case *k = (const expert_case *)user;
    hpml_ctx *ctx = hpml_comm_ctx(c);
    int       p = hpml_comm_size(c), r = hpml_comm_rank(c);
    bool      idle = k->idle && r == p - 1;
    int64_t   bytes = 0, n = k->B * k->T * k->D, tokens = k->B * k->T;
    expert_result *mine = (expert_result *)calloc(2, sizeof *mine), *whole = mine + 1;
    float     *y = (float *)calloc(2, sizeof mine->y), *dx = y + 4096;
    set_group(c, HPML_AXIS_EXPERT);
    expert_model(ctx, k, r, r, idle, mine, c, &bytes);
    CHECK(hpml_ctx_status(ctx) == HPML_OK);
    for (int s = 0; s < p - k->idle; s++) { /* one rank with all experts, once with each rank's samples */
        hpml_ctx *alone = one_rank();
        expert_model(alone, k, s, 0, false, whole, NULL, NULL);
        CHECK(hpml_ctx_status(alone) == HPML_OK);
        for (int i = 0; i < PARAMS; i++)
            CHECK(strcmp(hpml_param_at(ctx, i)->name, hpml_param_at(alone, i)->name) == 0);
        if (s == r) memcpy(y, whole->y, sizeof whole->y), memcpy(dx, whole->dx, sizeof whole->dx);
        hpml_ctx_free(alone);
    }
    CHECK(idle || (difference(mine->y, y, n) < 1e-5 && difference(mine->dx, dx, n) < 1e-5));
    for (int i = 0; i < PARAMS; i++) {
        int64_t count = hpml_tensor_count(hpml_param_at(ctx, i));
        if (i == 0) hpml_allreduce(c, mine->d[0], count, NULL);
        CHECK(difference(mine->d[i], whole->d[i] + (i > 0 ? r * count : 0), count) < 1e-5);
    }
    int64_t cap = (int64_t)ceil((double)k->capacity * k->top * (double)tokens / k->E);
    cap = cap < tokens ? cap : tokens;
    CHECK(bytes == 4 * (int64_t)(p - 1) * (k->E / p) * cap * k->D * 4); /* four all-to-all */
    free(mine), free(y);
    return hpml_ctx_status(ctx);
}
TEST(experts_on_many_ranks_equal_all_experts_on_one)
{
    expert_case one = { 2, 5, 6, 4, 7, 1, 1.25f, false }, two = { 2, 6, 5, 8, 4, 2, 1.0f, false }, idle = two;
    idle.idle = true;
    for (int p = 1; p <= 4; p *= 2) ENSURE(on_ranks(p, expert_check, &one) && on_ranks(p, expert_check, &two));
    ENSURE(on_ranks(2, expert_check, &idle) && on_ranks(4, expert_check, &idle));
}

/* The formula of hpml_experts for one token in double precision; used: places taken (experts). */
static void expert_formula(const expert_case *k, hpml_ctx *ctx, const float *x, const int *choice, const bool *has,
                           double *y)
{
    const float *gate = hpml_param_at(ctx, 0)->data;
    const float *w1 = hpml_param_at(ctx, 1)->data, *b1 = hpml_param_at(ctx, 2)->data;
    const float *w2 = hpml_param_at(ctx, 3)->data, *b2 = hpml_param_at(ctx, 4)->data;
    double       p[16], sum = 0, chosen = 0;
    for (int e = 0; e < k->E; e++) {
        p[e] = 0;
        for (int d = 0; d < k->D; d++) p[e] += (double)gate[e * k->D + d] * x[d];
        sum += p[e] = exp(p[e]);
    }
    for (int i = 0; i < k->top; i++) chosen += p[choice[i]];
    for (int d = 0; d < k->D; d++) y[d] = x[d];
    for (int i = 0; i < k->top; i++) {
        int    e = choice[i];
        double g = p[e] / (k->top == 2 ? chosen : sum);
        for (int d = 0; has[i] && d < k->D; d++) {
            double z = b2[e * k->D + d];
            for (int h = 0; h < k->hidden; h++) {
                double a = b1[e * k->hidden + h];
                for (int c = 0; c < k->D; c++) a += (double)w1[(e * k->hidden + h) * k->D + c] * x[c];
                if (a > 0) z += a * w2[(e * k->D + d) * k->hidden + h];
            }
            y[d] += g * z;
        }
    }
}
/* The best and second best experts of a token. */
static void expert_choices(const expert_case *k, hpml_ctx *ctx, const float *x, int *choice)
{
    double s[16];
    for (int e = 0; e < k->E; e++) {
        s[e] = 0;
        for (int d = 0; d < k->D; d++) s[e] += (double)hpml_param_at(ctx, 0)->data[e * k->D + d] * x[d];
    }
    for (int i = 0; i < 2; i++) {
        choice[i] = -1;
        for (int e = 0; e < k->E; e++)
            if ((i == 0 || e != choice[0]) && (choice[i] < 0 || s[e] > s[choice[i]])) choice[i] = e;
    }
}
TEST(experts_follow_their_formula)
{
    expert_case cases[] = { { 2, 5, 6, 4, 7, 1, 1.0f, false }, { 2, 6, 5, 3, 4, 2, 0.6f, false } };
    for (int i = 0; i < 2; i++) {
        expert_case   *k = &cases[i];
        hpml_ctx      *ctx = one_rank();
        expert_result *got = (expert_result *)calloc(1, sizeof *got);
        int            tokens = k->B * k->T, cap = (int)ceil((double)k->capacity * k->top * tokens / k->E);
        int            used[16] = { 0 }, choice[16][2], without = 0;
        bool           has[16][2];
        expert_model(ctx, k, 0, 0, false, got, NULL, NULL);
        ENSURE(hpml_ctx_status(ctx) == HPML_OK);
        float x[16][8];
        for (int t = 0; t < tokens; t++) {
            for (int d = 0; d < k->D; d++) x[t][d] = number(100, t * k->D + d);
            expert_choices(k, ctx, x[t], choice[t]);
        }
        for (int j = 0; j < k->top * tokens; j++) {
            int t = j % tokens, c = j / tokens;
            has[t][c] = used[choice[t][c]]++ < cap;
            without += !has[t][c];
        }
        ENSURE(without > 0); /* some tokens find no place */
        for (int t = 0; t < tokens; t++) {
            double y[8];
            expert_formula(k, ctx, x[t], choice[t], has[t], y);
            for (int d = 0; d < k->D; d++) ENSURE_NEAR(got->y[t * k->D + d], y[d], 1e-5);
        }
        free(got);
        hpml_ctx_free(ctx);
    }
}
TEST(gradients_of_experts_agree_with_differences)
{
    for (int top = 1; top <= 2; top++) {
        hpml_ctx    *ctx = one_rank();
        hpml_tensor *x = hpml_input_2d(ctx, 6, 5), *dy = hpml_input_2d(ctx, 6, 5), *balance;
        hpml_tensor_require_grad(x);
        hpml_tensor *y = hpml_experts(x, &(hpml_experts_desc){ .experts = 3, .top = top, .hidden = 4 }, &balance);
        hpml_tensor *loss = hpml_add(hpml_sum(hpml_mul(y, dy), HPML_ALL_DIMS), balance);
        hpml_graph  *g = hpml_graph_create(ctx, &(hpml_graph_desc){ .loss = loss });
        ENSURE(hpml_graph_alloc(g) == HPML_OK);
        for (int64_t i = 0; i < 30; i++) x->data[i] = number(31, i), dy->data[i] = number(32, i);
        for (int64_t i = 0; i < 15; i++) hpml_param_at(ctx, 0)->data[i] = 2 * number(33, i); /* clear choices */
        double error = hpml_check_grad(g, 3e-3f, 1000);
        ENSURE(error >= 0 && error < 1e-3);
        hpml_ctx_free(ctx);
    }
}
static hpml_status expert_refuses(hpml_comm *c, void *user)
{
    hpml_ctx *ctx = hpml_comm_ctx(c);
    (void)user;
    set_group(c, HPML_AXIS_EXPERT);
    hpml_tensor *x = hpml_input_2d(ctx, 4, 6);
    CHECK(!hpml_experts(x, &(hpml_experts_desc){ .experts = 3, .name = "moe" }, NULL));
    CHECK(strstr(hpml_ctx_error(ctx), "experts \"moe\": 3 experts on 2 ranks"));
    hpml_ctx_clear_error(ctx);
    CHECK(!hpml_experts(x, &(hpml_experts_desc){ .experts = 4, .top = 3 }, NULL));
    CHECK(strstr(hpml_ctx_error(ctx), "top 3"));
    hpml_ctx_clear_error(ctx);
    return HPML_OK;
}
TEST(experts_that_do_not_fit_are_refused) { ENSURE(on_ranks(2, expert_refuses, NULL)); }

/* ---- collectives as layers ---- */
typedef struct member_case { int kind, root; } member_case; /* 0 bcast, 1 reduce, 2 gather */
/* The sum of all ranks' losses, sum (y dy), as a function of the first element of rank 1's x: differences of this sum
   against the gradient that backward gives rank 1. */
static hpml_status member_check(hpml_comm *c, void *user)
{
    const member_case *k = (const member_case *)user;
    hpml_ctx *ctx = hpml_comm_ctx(c);
    int       p = hpml_comm_size(c), r = hpml_comm_rank(c), to = k->kind == 0 ? k->root : 1;
    int64_t   cols = k->kind == 2 ? 3 * p : 3;
    set_group(c, HPML_AXIS_EXPERT);
    hpml_tensor *x = hpml_input_2d(ctx, 4, 3), *dy = hpml_input_2d(ctx, 4, cols), *y = NULL;
    hpml_tensor_require_grad(x);
    if (k->kind == 0) y = hpml_layer_bcast(x, HPML_AXIS_EXPERT, k->root);
    if (k->kind == 1) y = hpml_layer_reduce(x, HPML_AXIS_EXPERT, k->root);
    if (k->kind == 2) y = hpml_layer_gather(x, HPML_AXIS_EXPERT, k->root);
    hpml_tensor *loss = hpml_sum(hpml_mul(y, dy), HPML_ALL_DIMS);
    hpml_graph  *g = hpml_graph_create(ctx, &(hpml_graph_desc){ .outputs = &y, .output_count = 1, .loss = loss });
    CHECK(hpml_graph_alloc(g) == HPML_OK);
    float total[2], slope = 0;
    for (int i = 0; i < 12; i++) x->data[i] = number((uint64_t)r, i);
    for (int i = 0; i < 4 * cols; i++) dy->data[i] = number(50 + (uint64_t)r, i);
    for (int s = 0; s < 2; s++) {
        if (r == to) x->data[5] += s ? 0.5f : 0;
        hpml_graph_forward(g, true, 0);
        hpml_graph_backward(g, 1, false);
        total[s] = loss->data[0];
        if (r == to) slope = x->grad[5];
        else if (k->kind == 0) CHECK(x->grad[5] == 0);
    }
    hpml_allreduce(c, total, 2, NULL);
    if (r == to) CHECK(fabs((double)(total[1] - total[0]) / 0.5 - slope) < 1e-4 && slope != 0);
    bool empty = k->kind > 0 && k->root >= 0 && r != k->root;
    if (k->kind == 2) for (int i = 0; i < 4 * cols; i++) {
        int   from = i % (3 * p) / 3, at = i / (3 * p) * 3 + i % 3;
        float moved = from == to && at == 5 ? 0.5f : 0;
        CHECK(y->data[i] == (empty ? 0 : number((uint64_t)from, at) + moved));
    }
    if (k->kind == 0) CHECK(y->data[4] == number((uint64_t)k->root, 4));
    if (k->kind == 1) CHECK(empty ? y->data[4] == 0 : y->data[4] != 0);
    return hpml_ctx_status(ctx);
}
TEST(collectives_as_layers_have_the_gradients_of_all_ranks_losses)
{
    member_case cases[] = { { 0, 0 }, { 0, 1 }, { 1, 0 }, { 1, -1 }, { 2, 0 }, { 2, 1 }, { 2, -1 } };
    for (int p = 2; p <= 4; p += 2)
        for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) ENSURE(on_ranks(p, member_check, &cases[i]));
}

/* One trunk on rank 0 and heads on ranks 1 to 3 (TreeNet): the gradients of all heads' losses in one model. */
enum { HEADS = 3 };
static hpml_tensor *tree_trunk(hpml_tensor *x)
{
    return hpml_tanh(hpml_linear(x, 7, &(hpml_linear_desc){ .name = "trunk" }));
}
static hpml_tensor *tree_head(hpml_tensor *h, hpml_tensor *target, int i)
{
    char name[16];
    snprintf(name, sizeof name, "head%d", i);
    return hpml_mse(hpml_linear(h, 2, &(hpml_linear_desc){ .name = name }), target);
}
static void tree_fill(hpml_tensor *t, uint64_t stream)
{
    for (int64_t i = 0; i < hpml_tensor_count(t); i++) t->data[i] = number(stream, i);
}
static hpml_status tree_check(hpml_comm *c, void *user)
{
    hpml_ctx *ctx = hpml_comm_ctx(c), *alone = one_rank();
    int       r = hpml_comm_rank(c);
    (void)user;
    set_group(c, HPML_AXIS_EXPERT);
    hpml_tensor *x = hpml_input_2d(ctx, 5, r == 0 ? 4 : 7), *t = hpml_input_2d(ctx, 5, 2);
    hpml_tensor *h = hpml_layer_bcast(r == 0 ? tree_trunk(x) : x, HPML_AXIS_EXPERT, 0);
    hpml_tensor *loss = r == 0 ? hpml_scale(hpml_mean(h, HPML_ALL_DIMS), 0, 0) : tree_head(h, t, r);
    hpml_graph  *g = hpml_graph_create(ctx, &(hpml_graph_desc){ .loss = loss });
    hpml_tensor *X = hpml_input_2d(alone, 5, 4), *T[HEADS], *H = tree_trunk(X), *sum = NULL;
    for (int i = 0; i < HEADS; i++) {
        T[i] = hpml_input_2d(alone, 5, 2);
        hpml_tensor *l = tree_head(H, T[i], i + 1);
        sum = sum ? hpml_add(sum, l) : l;
    }
    hpml_graph *all = hpml_graph_create(alone, &(hpml_graph_desc){ .loss = sum });
    CHECK(hpml_graph_alloc(g) == HPML_OK && hpml_graph_alloc(all) == HPML_OK);
    for (int i = 0; i < hpml_param_count(alone); i++) tree_fill(hpml_param_at(alone, i), 20 + (uint64_t)i);
    for (int i = 0; i < hpml_param_count(ctx); i++) {
        hpml_tensor *p = hpml_param_at(ctx, i);
        tree_fill(p, 20 + (uint64_t)hpml_param_find(alone, p->name)->param->index);
    }
    tree_fill(X, 1), tree_fill(x, 1);
    if (r > 0) tree_fill(t, 1 + (uint64_t)r);
    for (int i = 0; i < HEADS; i++) tree_fill(T[i], 2 + (uint64_t)i);
    hpml_graph_forward(g, true, 0), hpml_graph_backward(g, 1, false);
    hpml_graph_forward(all, true, 0), hpml_graph_backward(all, 1, false);
    for (int i = 0; i < hpml_param_count(ctx); i++) {
        hpml_tensor *p = hpml_param_at(ctx, i);
        CHECK(difference(p->grad, hpml_param_find(alone, p->name)->grad, hpml_tensor_count(p)) < 1e-5);
    }
    hpml_ctx_free(alone);
    return hpml_ctx_status(ctx);
}
TEST(a_tree_of_three_heads_has_the_gradients_of_one_model) { ENSURE(on_ranks(1 + HEADS, tree_check, NULL)); }

static hpml_status member_refuses(hpml_comm *c, void *user)
{
    hpml_ctx *ctx = hpml_comm_ctx(c);
    (void)user;
    set_group(c, HPML_AXIS_EXPERT);
    hpml_tensor *x = hpml_input_2d(ctx, 4, 6);
    CHECK(!hpml_layer_bcast(x, HPML_AXIS_EXPERT, -1));
    CHECK(strstr(hpml_ctx_error(ctx), "layer_bcast: root -1 of 2 ranks of the expert axis"));
    hpml_ctx_clear_error(ctx);
    CHECK(!hpml_linear_rows(x, 5, NULL) && strstr(hpml_ctx_error(ctx), "out 5 on 2 ranks of the expert axis"));
    hpml_ctx_clear_error(ctx);
    return HPML_OK;
}
TEST(roots_and_widths_that_do_not_fit_are_refused) { ENSURE(on_ranks(2, member_refuses, NULL)); }

/* ---- dense layers split by rows, on samples of each rank's own, behind a convolution of all samples ---- */
static void trick_model(hpml_ctx *ctx, int ranks, int r, int p, float *dw[4], float *loss)
{
    hpml_tensor *(*dense)(hpml_tensor *, int64_t, const hpml_linear_desc *) = hpml_linear_rows;
    if (ranks > 1) dense = hpml_linear; /* one rank, with the samples of all */
    int          B = 3 * ranks;
    hpml_tensor *x = hpml_input_4d(ctx, B, 2, 4, 4), *t = hpml_input_2d(ctx, B, 8);
    hpml_tensor *h = hpml_conv2d(x, 3, &(hpml_conv2d_desc){ .kernel_h = 3, .no_bias = true, .name = "c" });
    h = hpml_flatten(h);
    h = dense(h, 16, &(hpml_linear_desc){ .activation = HPML_ACT_TANH, .name = "d1" });
    h = dense(h, 8, &(hpml_linear_desc){ .no_bias = true, .name = "d2" });
    hpml_tensor *mse = hpml_mse(h, t);
    hpml_graph  *g = hpml_graph_create(ctx, &(hpml_graph_desc){ .loss = mse });
    if (hpml_graph_alloc(g) != HPML_OK) return;
    int64_t each = 3 * 2 * 16, targets = 3 * 8;
    for (int64_t i = 0; i < hpml_tensor_count(x); i++) x->data[i] = number(1, (ranks == p ? 0 : r * each) + i);
    for (int64_t i = 0; i < hpml_tensor_count(t); i++) t->data[i] = number(2, (ranks == p ? 0 : r * targets) + i);
    for (int i = 0; i < 4; i++) {
        hpml_tensor *w = hpml_param_at(ctx, i);
        int64_t      n = hpml_tensor_count(w), first = i > 0 && ranks != p ? r * n : 0;
        for (int64_t j = 0; j < n; j++) w->data[j] = 0.4f * number(10 + (uint64_t)i, first + j);
    }
    hpml_graph_forward(g, true, 0);
    hpml_graph_backward(g, 1, false);
    *loss = mse->data[0];
    for (int i = 0; i < 4; i++) dw[i] = hpml_param_at(ctx, i)->grad;
}
static hpml_status trick_check(hpml_comm *c, void *user)
{
    hpml_ctx *ctx = hpml_comm_ctx(c), *alone = one_rank();
    int       p = hpml_comm_size(c), r = hpml_comm_rank(c);
    float    *mine[4], *whole[4], loss, all;
    (void)user;
    set_group(c, HPML_AXIS_EXPERT);
    bytes_sent(c);
    trick_model(ctx, 1, r, p, mine, &loss);
    int64_t bytes = bytes_sent(c), formula = 0, in[2] = { 12, 16 }, out[2] = { 16, 8 };
    trick_model(alone, p, 0, p, whole, &all);
    CHECK(hpml_ctx_status(ctx) == HPML_OK && hpml_ctx_status(alone) == HPML_OK);
    for (int i = 0; i < 2; i++) formula += 2 * 4 * (int64_t)(p - 1) * 3 * (in[i] + out[i] / p);
    CHECK(bytes == formula);
    hpml_allreduce(c, &loss, 1, NULL);
    CHECK(fabs(loss / p - all) < 1e-5 * all);
    hpml_allreduce(c, mine[0], 3 * 2 * 9, NULL);
    for (int i = 0; i < 4; i++) {
        int64_t n = hpml_tensor_count(hpml_param_at(ctx, i));
        CHECK(strcmp(hpml_param_at(ctx, i)->name, hpml_param_at(alone, i)->name) == 0);
        for (int64_t j = 0; j < n; j++) mine[i][j] /= (float)p; /* the mean of the ranks' losses */
        CHECK(difference(mine[i], whole[i] + (i > 0 ? r * n : 0), n) < 1e-5);
    }
    hpml_ctx_free(alone);
    return hpml_ctx_status(ctx);
}
TEST(convolutions_by_samples_and_dense_layers_by_rows_equal_one_rank)
{
    for (int p = 1; p <= 4; p *= 2) ENSURE(on_ranks(p, trick_check, NULL));
}

/* An autoencoder of untied weights (Le et al. 2012), cut into 2 x 2 blocks: its reconstruction loss over ten steps. */
enum { AUTO_STEPS = 10 };
static void autoencoder(hpml_comm *c, hpml_ctx *ctx, int block, int blocks, double *losses)
{
    const image_case whole = { 4, 1, 8, 8, 3, 3, 2, 2, true };
    int64_t          side = blocks > 1 ? 4 : 8;
    hpml_tensor *x = hpml_input_4d(ctx, 4, 1, side, side), *h = image_layer(&whole, x, !c, NULL);
    hpml_local2d_desc decoder = { .kernel = 3, .rows = 2, .cols = 2 };
    hpml_tensor *loss = hpml_mse(hpml_local2d(h, 1, &decoder), x);
    hpml_graph  *g = hpml_graph_create(ctx, &(hpml_graph_desc){ .loss = loss });
    if (hpml_graph_alloc(g) != HPML_OK) return;
    for (int64_t i = 0; i < hpml_tensor_count(x); i++) x->data[i] = number(1, pixel(&whole, 1, block, blocks, i));
    for (int i = 0; i < hpml_param_count(ctx); i++) {
        hpml_tensor *p = hpml_param_at(ctx, i);
        int64_t      n = hpml_tensor_count(p);
        for (int64_t j = 0; j < n; j++) p->data[j] = 0.3f * number(10 + (uint64_t)i, block * n + j);
    }
    for (int s = 0; s < AUTO_STEPS; s++) {
        hpml_graph_forward(g, true, 0);
        hpml_graph_backward(g, 1.0f / (float)blocks, false); /* of the mean over blocks */
        float mean = loss->data[0] / (float)blocks;
        if (c) hpml_allreduce(c, &mean, 1, NULL);
        losses[s] = (double)mean;
        for (int i = 0; i < hpml_param_count(ctx); i++) {
            hpml_tensor *p = hpml_param_at(ctx, i);
            for (int64_t j = 0; j < hpml_tensor_count(p); j++) p->data[j] -= 2 * p->grad[j];
        }
    }
}
static hpml_status autoencoder_check(hpml_comm *c, void *user)
{
    hpml_ctx *ctx = hpml_comm_ctx(c), *alone = one_rank();
    double    mine[AUTO_STEPS] = { 0 }, whole[AUTO_STEPS] = { 0 };
    (void)user;
    set_group(c, HPML_AXIS_SEQUENCE);
    autoencoder(c, ctx, hpml_comm_rank(c), 4, mine);
    autoencoder(NULL, alone, 0, 1, whole);
    CHECK(hpml_ctx_status(ctx) == HPML_OK && hpml_ctx_status(alone) == HPML_OK);
    for (int s = 0; s < AUTO_STEPS; s++) CHECK(fabs(mine[s] - whole[s]) < 1e-5 * whole[s]);
    CHECK(whole[AUTO_STEPS - 1] < 0.8 * whole[0]);
    hpml_ctx_free(alone);
    return hpml_ctx_status(ctx);
}
TEST(an_autoencoder_in_blocks_reconstructs_as_on_one_rank) { ENSURE(on_ranks(4, autoencoder_check, NULL)); }

/* ---- named dimensions: every layout of y = tanh(x w1^T) w2^T on a mesh of 2 x 2 ranks ---- */
enum { MLP_B = 4, MLP_IN = 6, MLP_HIDDEN = 8, MLP_OUT = 10 };
typedef struct mlp_case { hpml_axis in, hidden, out; } mlp_case; /* DATA: whole */
typedef struct mlp_result { hpml_tensor *w1, *w2; float loss; } mlp_result;

static void mlp_rules(const mlp_case *k, char *rules, size_t size)
{
    const char     *names[3] = { "in", "hidden", "out" };
    const hpml_axis axes[3] = { k->in, k->hidden, k->out };
    int             n = snprintf(rules, size, "batch:data");
    for (int i = 0; i < 3; i++)
        if (axes[i]) n += snprintf(rules + n, size - (size_t)n, ",%s:%s", names[i], hpml_axis_name(axes[i]));
}
static bool mlp_legal(const mlp_case *k) /* each parameter is split along one dimension */
{
    return !(k->hidden && (k->in || k->out));
}
static mlp_result mlp_model(hpml_ctx *ctx, const char *rules, hpml_axis out)
{
    mlp_result   r = { NULL, NULL, 0 };
    hpml_tensor *x = hpml_input_2d(ctx, MLP_B, MLP_IN), *t = hpml_input_2d(ctx, MLP_B, MLP_OUT);
    hpml_param_desc w1 = { .name = "w1", .ndim = 2, .shape = { MLP_HIDDEN, MLP_IN } };
    hpml_param_desc w2 = { .name = "w2", .ndim = 2, .shape = { MLP_OUT, MLP_HIDDEN } };
    r.w1 = hpml_named_param(ctx, rules, "hidden in", &w1);
    r.w2 = hpml_named_param(ctx, rules, "out hidden", &w2);
    hpml_tensor *h = hpml_einsum("batch in, hidden in -> batch hidden", hpml_named_part(x, rules, "batch in"), r.w1);
    hpml_tensor *y = hpml_einsum("batch hidden, out hidden -> batch out", hpml_tanh(h), r.w2);
    if (out) y = hpml_group_gather(y, out, 1);
    hpml_tensor *loss = hpml_mse(y, t);
    hpml_graph  *g = hpml_graph_create(ctx, &(hpml_graph_desc){ .loss = loss });
    if (hpml_graph_alloc(g) != HPML_OK) return r;
    for (int64_t i = 0; i < hpml_tensor_count(x); i++) x->data[i] = number(1, i);
    for (int64_t i = 0; i < hpml_tensor_count(t); i++) t->data[i] = number(2, i);
    hpml_graph_forward(g, true, 0);
    hpml_graph_backward(g, 1, false);
    r.loss = loss->data[0];
    return r;
}
/* Floats that a rank sends over both axes: a sum of n floats over two ranks sends n, and so does joining n of each. */
static int64_t mlp_floats(const mlp_case *k)
{
    int64_t hidden = MLP_B * MLP_HIDDEN, out = MLP_B * MLP_OUT, sum = 0;
    bool    own[3] = { k->in == HPML_AXIS_SEQUENCE, k->hidden == HPML_AXIS_SEQUENCE, k->out == HPML_AXIS_SEQUENCE };
    if (k->in) sum += hidden * (1 + own[0]);                         /* of the first layer's results */
    if (k->hidden) sum += out * (1 + own[1]);                        /* of the second one's */
    if (k->out) sum += out / 2 * (1 + own[2]);                       /* joining y */
    if (k->out == HPML_AXIS_TENSOR) sum += hidden;                   /* gradients of h */
    return sum;
}
/* The part of a whole's gradient that a rank has, against the rank's own. */
static bool mlp_gradient(const hpml_tensor *part, const hpml_tensor *whole, const int at[HPML_AXES], const float *grad)
{
    int axis[2] = { part->split[0], part->split[1] };
    for (int64_t i = 0; i < hpml_tensor_count(part); i++) {
        int64_t row = i / part->shape[1] + (axis[0] ? at[axis[0]] * part->shape[0] : 0);
        int64_t col = i % part->shape[1] + (axis[1] ? at[axis[1]] * part->shape[1] : 0);
        if (fabs((double)grad[i] - whole->grad[row * whole->shape[1] + col]) > 1e-5) return false;
    }
    return true;
}
static hpml_status mlp_check(hpml_comm *c, void *user)
{
    int        r = hpml_comm_rank(c), at[HPML_AXES] = { 0, 0, r % 2, r / 2, 0 }, legal = 0, refused = 0;
    hpml_plan  plan = { .tensor = 2, .sequence = 2 };
    (void)user;
    CHECK(hpml_comm_set_plan(c, &plan) == HPML_OK);
    hpml_comm *sequence = hpml_comm_mesh(c)->axis[HPML_AXIS_SEQUENCE];
    hpml_ctx  *alone = one_rank();
    mlp_result whole = mlp_model(alone, NULL, HPML_AXIS_DATA);
    for (int layout = 0; layout < 27; layout++) {
        static const hpml_axis axes[3] = { HPML_AXIS_DATA, HPML_AXIS_TENSOR, HPML_AXIS_SEQUENCE };
        mlp_case  k = { axes[layout % 3], axes[layout / 3 % 3], axes[layout / 9] };
        char      rules[96];
        hpml_ctx *ctx = one_rank();
        mlp_rules(&k, rules, sizeof rules);
        for (int a = HPML_AXIS_TENSOR; a <= HPML_AXIS_SEQUENCE; a++)
            hpml_ctx_set_group(ctx, (hpml_axis)a, hpml_ctx_group(hpml_comm_ctx(c), (hpml_axis)a));
        bytes_sent(c);
        mlp_result mine = mlp_model(ctx, rules, k.out);
        if (!mlp_legal(&k)) {
            const char *why = strstr(hpml_ctx_error(ctx), "both split");
            CHECK(hpml_ctx_status(ctx) == HPML_ERR_SHAPE && why);
            hpml_ctx_free(ctx), refused++;
            continue;
        }
        legal++;
        if (hpml_ctx_status(ctx) != HPML_OK) printf("    %s: %s\n", rules, hpml_ctx_error(ctx));
        CHECK(hpml_ctx_status(ctx) == HPML_OK && fabs(mine.loss - whole.loss) < 1e-5);
        CHECK(bytes_sent(c) == 4 * mlp_floats(&k));
        hpml_tensor *w[2] = { mine.w1, mine.w2 };
        for (int i = 0; i < 2; i++) { /* over the sequence axis: the mean of the ranks' losses */
            bool part = w[i]->param->axis == HPML_AXIS_SEQUENCE;
            int64_t n = hpml_tensor_count(w[i]);
            if (!part) hpml_allreduce(sequence, w[i]->grad, n, NULL);
            for (int64_t j = 0; j < n; j++) w[i]->grad[j] /= 2;
            CHECK(mlp_gradient(w[i], i ? whole.w2 : whole.w1, at, w[i]->grad));
        }
        hpml_ctx_free(ctx);
    }
    CHECK(legal == 11 && refused == 16);
    hpml_ctx_free(alone);
    return hpml_ctx_status(hpml_comm_ctx(c));
}
TEST(all_layouts_of_named_dimensions_equal_one_rank) { ENSURE(on_ranks(4, mlp_check, NULL)); }

TEST(sums_over_named_dimensions_follow_their_loops)
{
    hpml_ctx    *ctx = one_rank();
    hpml_tensor *a = hpml_input_4d(ctx, 2, 3, 4, 5), *b = hpml_input_3d(ctx, 2, 6, 4);
    hpml_tensor_require_grad(a), hpml_tensor_require_grad(b);
    hpml_tensor *y = hpml_einsum("s head t in, s out t -> out s in t head", NULL, NULL);
    ENSURE(!y && hpml_ctx_status(ctx) == HPML_OK);
    y = hpml_einsum("s head t in, s out t -> s in out head", a, b); /* t is summed, s is in all three */
    hpml_tensor *dy = hpml_input_4d(ctx, 2, 5, 6, 3), *loss = hpml_sum(hpml_mul(y, dy), HPML_ALL_DIMS);
    hpml_graph  *g = hpml_graph_create(ctx, &(hpml_graph_desc){ .outputs = &y, .output_count = 1, .loss = loss });
    ENSURE(hpml_graph_alloc(g) == HPML_OK && y->batch_rows == 1);
    tree_fill(a, 1), tree_fill(b, 2), tree_fill(dy, 3);
    hpml_graph_forward(g, true, 0);
    for (int i = 0; i < 2 * 5 * 6 * 3; i++) {
        int    head = i % 3, out = i / 3 % 6, in = i / 18 % 5, s = i / 90;
        double sum = 0;
        for (int t = 0; t < 4; t++)
            sum += (double)a->data[((s * 3 + head) * 4 + t) * 5 + in] * b->data[(s * 6 + out) * 4 + t];
        ENSURE_NEAR(y->data[i], sum, 1e-5);
    }
    double error = hpml_check_grad(g, 0, 1000);
    ENSURE(error >= 0 && error < 1e-3);
    hpml_ctx_free(ctx);
}

static hpml_status named_refuses(hpml_comm *c, void *user)
{
    hpml_ctx *ctx = hpml_comm_ctx(c);
    (void)user;
    set_group(c, HPML_AXIS_TENSOR);
    hpml_tensor *x = hpml_input_2d(ctx, 4, 6);
    const struct { const char *rules, *dims, *said; } cases[] = {
        { "in:tensr", "batch in", "rule \"in:tensr\": no axis \"tensr\"; expected data, tensor, sequence or expert" },
        { "in", "batch in", "rule \"in\"; expected a dimension and an axis" },
        { "in:tensor,batch:tensor", "batch in", "\"in\" and \"batch\" are both split over the tensor axis" },
        { "batch:tensor", "batch in", "\"batch\" over the tensor axis; samples are divided by the data" },
        { "in:data", "batch in", "\"in\" over the data axis" },
        { "in:tensor", "batch", "dimensions \"batch\" of f32 4x6" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        CHECK(!hpml_named_part(x, cases[i].rules, cases[i].dims));
        CHECK(strstr(hpml_ctx_error(ctx), cases[i].said));
        hpml_ctx_clear_error(ctx);
    }
    hpml_param_desc odd = { .name = "w", .ndim = 2, .shape = { 5, 6 } }, even = { .ndim = 2, .shape = { 8, 6 } };
    CHECK(!hpml_named_param(ctx, "out:tensor", "out in", &odd));
    CHECK(strstr(hpml_ctx_error(ctx), "\"out\" of size 5 over 2"));
    hpml_ctx_clear_error(ctx);
    hpml_tensor *w = hpml_named_param(ctx, "in:tensor", "out in", &even);
    CHECK(!hpml_einsum("batch in, out in -> batch out", x, w));
    CHECK(strstr(hpml_ctx_error(ctx), "\"in\" has 6 indices in a, 3"));
    hpml_ctx_clear_error(ctx);
    CHECK(!hpml_einsum("batch in, out in -> batch", x, w) && strstr(hpml_ctx_error(ctx), "every name in two tensors"));
    hpml_ctx_clear_error(ctx);
    return HPML_OK;
}
TEST(layouts_that_do_not_fit_are_refused) { ENSURE(on_ranks(2, named_refuses, NULL)); }

/* ---- tournaments ---- */
typedef struct cup { bool nan; hpml_tournament_result r[4][3]; uint64_t before[4][3], after[4][3]; } cup;
static hpml_status cup_check(hpml_comm *c, void *user)
{
    cup      *k = (cup *)user;
    hpml_ctx *ctx = hpml_comm_ctx(c);
    int       r = hpml_comm_rank(c), p = hpml_comm_size(c);
    hpml_tensor *x = hpml_input_2d(ctx, 8, 3);
    hpml_tensor *y = hpml_linear(hpml_tanh(hpml_linear(x, 5, NULL)), 1, NULL);
    hpml_trainer *t = hpml_trainer_create(ctx, &(hpml_trainer_desc){ .input = x, .output = y, .loss = HPML_LOSS_MSE,
                                               .optimizer = HPML_OPT_ADAM, .lr = 0.02f });
    float   in[16 * 3], out[16];
    int64_t shape[1] = { 3 };
    for (int i = 0; i < 16; i++) {
        for (int d = 0; d < 3; d++) in[3 * i + d] = number(1 + (uint64_t)r, 3 * i + d);
        out[i] = in[3 * i] - 0.5f * in[3 * i + 1] + 0.1f * (float)r;
    }
    hpml_dataset *set = hpml_dataset_create(ctx, 16, HPML_DTYPE_F32, 1, shape, in, HPML_DTYPE_F32, 1, out);
    CHECK(t && set);
    for (int i = 0; i < 5 * r; i++) hpml_trainer_step(t, in, out, 8, NULL); /* rank 0 has not trained */
    for (int round = 0; round < 3; round++) {
        hpml_metrics before = { 0 }, after = { 0 };
        hpml_tournament_result *result = &k->r[r][round];
        bool                    broken = k->nan && r == 1 && round == 1;
        if (broken) hpml_param_at(ctx, 0)->data[0] = NAN;
        else hpml_trainer_evaluate(t, set, &before);
        k->before[r][round] = hpml_param_hash(ctx);
        CHECK(hpml_tournament(t, c, set, 9, round, result) == HPML_OK);
        k->after[r][round] = hpml_param_hash(ctx);
        CHECK(hpml_trainer_evaluate(t, set, &after) == HPML_OK);
        CHECK(broken || (after.loss <= before.loss && result->mine == before.loss));
        CHECK(after.loss == (result->changed ? result->theirs : result->mine));
        CHECK(!broken || p == 3 || (result->changed && isinf(result->mine)));
        for (int i = 0; i < 3; i++) hpml_trainer_step(t, in, out, 8, NULL);
    }
    return hpml_ctx_status(ctx);
}
static int cup_changes(const cup *k, int p)
{
    int changes = 0;
    for (int round = 0; round < 3; round++)
        for (int r = 0; r < p; r++) {
            const hpml_tournament_result *t = &k->r[r][round];
            uint64_t kept = t->changed ? k->before[t->partner][round] : k->before[r][round];
            if (k->after[r][round] != kept || k->r[t->partner][round].partner != r) return -100;
            changes += t->changed;
        }
    return changes;
}
TEST(both_of_a_pair_keep_the_better_model_on_their_own_set)
{
    cup four = { 0 }, again = { 0 }, three = { 0 }, broken = { .nan = true };
    ENSURE(on_ranks(4, cup_check, &four) && cup_changes(&four, 4) > 0);
    ENSURE(on_ranks(4, cup_check, &again) && memcmp(four.after, again.after, sizeof four.after) == 0);
    ENSURE(on_ranks(3, cup_check, &three) && cup_changes(&three, 3) > 0); /* one sits out */
    ENSURE(on_ranks(4, cup_check, &broken) && cup_changes(&broken, 4) > 0);
}
static hpml_status cup_refuses(hpml_comm *c, void *user)
{
    (void)user;
    CHECK(hpml_tournament(NULL, NULL, NULL, 1, 0, NULL) == HPML_ERR_ARGUMENT);
    return hpml_tournament(NULL, c, NULL, 1, 0, NULL);
}
TEST(a_tournament_without_a_trainer_is_refused)
{
    char error[300];
    ENSURE(hpml_launch(&(hpml_launch_desc){ .ranks = 2 }, cup_refuses, NULL, error, sizeof error) == HPML_ERR_ARGUMENT);
    ENSURE(strstr(error, "tournament: no trainer or no data set"));
}

/* ---- a small language model with ring attention and experts, on a mesh ---- */
enum { GPT_B = 4, GPT_T = 8, GPT_C = 12, GPT_V = 11, GPT_STEPS = 6 };
enum { GPT_FLOATS = 512, GPT_PARAMS = 32 };
typedef struct gpt_run {
    double  loss[GPT_STEPS];
    int     params;
    int64_t floats[GPT_PARAMS];
    float   values[GPT_PARAMS][GPT_FLOATS]; /* of the whole */
} gpt_run;
static hpml_status gpt_train(hpml_comm *c, void *user)
{
    gpt_run         *run  = (gpt_run *)user;
    hpml_ctx        *ctx  = hpml_comm_ctx(c);
    const hpml_mesh *m    = hpml_comm_mesh(c);
    const int        experts = m ? m->size[HPML_AXIS_EXPERT] : 1, own = m ? m->size[HPML_AXIS_DATA] * experts : 1;
    const int        at = m ? m->at[HPML_AXIS_DATA] * experts + m->at[HPML_AXIS_EXPERT] : 0, rows = GPT_B / own;
    hpml_tensor *tokens = hpml_input_tokens(ctx, rows, GPT_T), *labels = hpml_input_tokens(ctx, rows, GPT_T);
    hpml_tensor *x = hpml_embedding(tokens, GPT_V, GPT_C, &(hpml_embedding_desc){ .init_scale = 0.5f });
    x = hpml_group_split(x, HPML_AXIS_SEQUENCE, 1);
    for (int i = 0; i < 2; i++) {
        hpml_linear_desc heads = { .split = HPML_SPLIT_OUT, .sections = 3 }, joined = { .split = HPML_SPLIT_IN };
        hpml_tensor     *a = hpml_linear(hpml_layernorm(x, NULL), 3 * GPT_C, &heads);
        a = hpml_linear(hpml_ring_attention(a, &(hpml_attention_desc){ .heads = 4 }), GPT_C, &joined);
        x = hpml_add(x, a);
        a = hpml_experts(x, &(hpml_experts_desc){ .experts = 4, .top = 2, .hidden = 8, .capacity = 4 }, NULL);
        x = hpml_add(x, a); /* capacity 4: every token finds a place, however tokens are divided among ranks */
    }
    hpml_tensor  *y = hpml_linear(hpml_group_gather(x, HPML_AXIS_SEQUENCE, 1), GPT_V, NULL);
    hpml_trainer *t = hpml_trainer_create(ctx, &(hpml_trainer_desc){ .input = tokens, .output = y, .target = labels,
        .loss_tensor = hpml_cross_entropy(y, labels, NULL), .lr = 0.02f, .momentum = 0.9f });
    CHECK(t && hpml_distribute(t, c, NULL));
    for (int s = 0; s < GPT_STEPS; s++) {
        int32_t        in[GPT_B * GPT_T], out[GPT_B * GPT_T];
        hpml_step_info info = { 0 };
        for (int i = 0; i < rows * GPT_T; i++) {
            int64_t place = at * rows * GPT_T + i;
            in[i]  = (int32_t)(fabsf(number((uint64_t)s, place)) * 100) % GPT_V;
            out[i] = (in[i] * 3 + 1) % GPT_V;
        }
        CHECK(hpml_trainer_step(t, in, out, rows, &info) == HPML_OK);
        float loss = info.loss / (float)hpml_comm_size(c);
        hpml_allreduce(c, &loss, 1, NULL);
        if (hpml_comm_rank(c) == 0) run->loss[s] = (double)loss;
    }
    for (int i = 0; i < hpml_param_count(ctx); i++) {
        int64_t whole[HPML_MAX_DIMS], floats = 1;
        float   values[GPT_FLOATS];
        hpml_param_whole(hpml_param_at(ctx, i), whole);
        for (int d = 0; d < HPML_MAX_DIMS; d++) floats *= whole[d];
        CHECK(floats <= GPT_FLOATS && hpml_trainer_collect(t, i, HPML_ARRAY_VALUES, values) == HPML_OK);
        if (hpml_comm_rank(c) > 0) continue;
        run->params    = i + 1;
        run->floats[i] = floats;
        memcpy(run->values[i], values, (size_t)floats * sizeof(float));
    }
    return hpml_ctx_status(ctx);
}
TEST(a_language_model_on_sequence_and_expert_axes_trains_as_one_rank)
{
    static const struct { const char *plan; int ranks; } cases[] = {
        { "sequence=2", 2 }, { "expert=2", 2 }, { "sequence=2,expert=2", 4 }, { "expert=4", 4 }, { "sequence=4", 4 },
        { "pipe=2,sequence=2,micro=2", 4 }, { "pipe=2,expert=2,micro=2", 4 }, { "shard=1,expert=2,data=2", 4 },
        { "tensor=2,sequence=2", 4 }, { "tensor=2,expert=2", 4 }, { "data=2,expert=2", 4 } };
    static gpt_run one, split;
    ENSURE(on_ranks(1, gpt_train, &one) && one.loss[GPT_STEPS - 1] < one.loss[0]);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        hpml_plan plan = { 0 };
        char      error[700];
        ENSURE(hpml_plan_parse(cases[i].plan, &plan, error, sizeof error) == HPML_OK);
        hpml_launch_desc d = { .ranks = cases[i].ranks, .plan = &plan, .timeout = 20,
                               .ctx = { .threads = 1, .seed = 3 } };
        hpml_status      status = hpml_launch(&d, gpt_train, &split, error, sizeof error);
        if (status != HPML_OK) printf("    %s: %s\n", cases[i].plan, error);
        ENSURE(status == HPML_OK && split.params == one.params);
        for (int s = 0; s < GPT_STEPS; s++) ENSURE_NEAR(split.loss[s], one.loss[s], 1e-5);
        for (int p = 0; p < one.params; p++) {
            ENSURE(split.floats[p] == one.floats[p]);
            ENSURE(difference(split.values[p], one.values[p], one.floats[p]) < 1e-4);
        }
    }
}

/* ---- one weird trick: convolutions by samples, dense layers by rows; against both pure choices ---- */
enum { NET_B = 16, NET_SIDE = 8, NET_MAPS = 8, NET_DENSE = 128, NET_STEPS = 3 };
typedef enum net_kind { NET_DATA, NET_TENSOR, NET_TRICK } net_kind;
typedef struct net_run {
    net_kind kind;
    double   loss[NET_STEPS];
    int64_t  bytes, expert; /* sent by rank 0 in a step: in all, over the expert axis */
} net_run;

static hpml_tensor *net_conv(hpml_tensor *x, hpml_split split)
{
    hpml_conv2d_desc d = { .kernel_h = 3, .padding_h = 1, .no_bias = true, .split = split };
    return hpml_conv2d(x, NET_MAPS, &d);
}
static hpml_tensor *net_dense(hpml_tensor *x, int64_t out, hpml_split split, bool rows, const char *name)
{
    hpml_linear_desc d = { .split = split, .name = name };
    return rows ? hpml_linear_rows(x, out, &d) : hpml_linear(x, out, &d);
}
static hpml_status net_train(hpml_comm *c, void *user)
{
    net_run     *run = (net_run *)user;
    int64_t      expert = 0;
    hpml_comm   *axis = hpml_comm_mesh(c) ? hpml_comm_mesh(c)->axis[HPML_AXIS_EXPERT] : NULL;
    hpml_ctx    *ctx = hpml_comm_ctx(c);
    const bool   tensor = run->kind == NET_TENSOR, trick = run->kind == NET_TRICK;
    const int    share = tensor ? 1 : hpml_comm_size(c), rows = NET_B / share, first = tensor ? 0 : hpml_comm_rank(c);
    hpml_split   out = tensor ? HPML_SPLIT_OUT : HPML_SPLIT_NONE, in = tensor ? HPML_SPLIT_IN : HPML_SPLIT_NONE;
    hpml_tensor *x = hpml_input_4d(ctx, rows, 3, NET_SIDE, NET_SIDE);
    hpml_tensor *h = net_conv(hpml_relu(net_conv(x, out)), in);
    h = hpml_flatten(hpml_max_pool2d(hpml_relu(h), 2, 0, 0));
    h = hpml_tanh(net_dense(h, NET_DENSE, out, trick, "d1"));
    hpml_trainer *t = hpml_trainer_create(ctx, &(hpml_trainer_desc){
        .input = x, .output = net_dense(h, 4, in, trick, "d2"), .loss = HPML_LOSS_MSE, .lr = 0.02f });
    CHECK(t);
    CHECK(hpml_distribute(t, c, NULL));
    for (int s = 0; s < NET_STEPS; s++) {
        float          pixels[NET_B * 3 * NET_SIDE * NET_SIDE], target[NET_B * 4];
        hpml_step_info info = { 0 };
        for (int i = 0; i < rows * 3 * NET_SIDE * NET_SIDE; i++)
            pixels[i] = number((uint64_t)s, (int64_t)first * rows * 3 * NET_SIDE * NET_SIDE + i);
        for (int i = 0; i < rows * 4; i++) target[i] = number(40 + (uint64_t)s, first * rows * 4 + i);
        bytes_sent(c);
        CHECK(hpml_trainer_step(t, pixels, target, rows, &info) == HPML_OK);
        if (axis) expert = bytes_of(axis);
        int64_t bytes = bytes_sent(c) + expert;
        float   loss  = info.loss / (float)hpml_comm_size(c);
        hpml_allreduce(c, &loss, 1, NULL);
        if (hpml_comm_rank(c) > 0) continue;
        run->loss[s] = (double)loss;
        run->bytes   = bytes;
        run->expert  = expert;
    }
    return hpml_ctx_status(ctx);
}
TEST(one_weird_trick_sends_less_than_either_pure_choice)
{
    static const struct { const char *plan; net_kind kind; } cases[] = {
        { "", NET_DATA }, { "data=4", NET_DATA }, { "tensor=4", NET_TENSOR }, { "expert=4", NET_TRICK } };
    net_run run[4];
    for (int i = 0; i < 4; i++) {
        hpml_plan        plan = { 0 };
        char             error[700];
        hpml_launch_desc d = { .ranks = i ? 4 : 1, .plan = &plan, .timeout = 20, .ctx = { .threads = 1, .seed = 3 } };
        run[i].kind = cases[i].kind;
        ENSURE(hpml_plan_parse(cases[i].plan, &plan, error, sizeof error) == HPML_OK);
        hpml_status status = hpml_launch(&d, net_train, &run[i], error, sizeof error);
        if (status != HPML_OK) printf("    %s: %s\n", cases[i].plan, error);
        ENSURE(status == HPML_OK);
        for (int s = 0; s < NET_STEPS; s++) ENSURE_NEAR(run[i].loss[s], run[0].loss[s], 1e-5);
    }
    const int64_t flat = NET_MAPS * NET_SIDE * NET_SIDE / 4, rows = NET_B / 4;
    const int64_t dense = 3 * rows * (flat + NET_DENSE / 4) + 3 * rows * (NET_DENSE + 4 / 4); /* floats of one pass */
    printf("    bytes of a step: by samples %lld, by parts of layers %lld, both %lld\n", (long long)run[1].bytes,
           (long long)run[2].bytes, (long long)run[3].bytes);
    ENSURE(run[3].expert == 2 * 4 * dense);
    ENSURE(run[3].bytes < run[1].bytes && run[3].bytes < run[2].bytes);
}

/* ---- a rank that fails ---- */
static hpml_status fail_forward(const hpml_run *run, hpml_node *n)
{
    (void)n;
    return hpml_ctx_fail(run->ctx, HPML_ERR_STATE, "the sensor is broken");
}
typedef struct fail_case { int layer; char text[4][300]; } fail_case;
static hpml_status fail_check(hpml_comm *c, void *user)
{
    fail_case   *k = (fail_case *)user;
    hpml_ctx    *ctx = hpml_comm_ctx(c);
    hpml_custom  bad = { .name = "bad", .forward = fail_forward };
    set_group(c, k->layer == 4 ? HPML_AXIS_EXPERT : HPML_AXIS_SEQUENCE);
    hpml_tensor *x = k->layer % 4 < 2 ? hpml_input_3d(ctx, 2, 4, 6) : hpml_input_4d(ctx, 2, 3, 4, 4), *y = x;
    if (hpml_comm_rank(c) == 2) y = hpml_custom_op(&x, 1, &bad);
    if (k->layer == 0) y = hpml_ring_attention(y, &(hpml_attention_desc){ .heads = 1 });
    if (k->layer == 1) y = hpml_layer_reduce(y, HPML_AXIS_SEQUENCE, 0);
    if (k->layer == 2) y = hpml_conv2d_rows(y, 4, &(hpml_conv2d_desc){ .kernel_h = 3, .padding_h = 1 });
    if (k->layer == 3) y = hpml_local2d(y, 2, &(hpml_local2d_desc){ .kernel = 3, .rows = 2, .cols = 2 });
    if (k->layer == 4) y = hpml_experts(y, &(hpml_experts_desc){ .experts = 4, .hidden = 4 }, NULL);
    hpml_graph *g = hpml_graph_create(ctx, &(hpml_graph_desc){ .outputs = &y, .output_count = 1 });
    hpml_graph_forward(g, false, 0);
    hpml_barrier(c); /* halos need neighbours alone: a rank that is none learns of the failure in the next collective */
    snprintf(k->text[hpml_comm_rank(c)], sizeof k->text[0], "%s", hpml_ctx_error(ctx));
    return hpml_ctx_status(ctx);
}
TEST(a_rank_that_fails_is_named_by_all_ranks_of_its_group)
{
    for (int layer = 0; layer < 5; layer++) {
        fail_case        k = { .layer = layer };
        hpml_launch_desc d = { .ranks = 4, .timeout = 20, .ctx = { .threads = 1 } };
        ENSURE(hpml_launch(&d, fail_check, &k, NULL, 0) != HPML_OK && strstr(k.text[2], "the sensor is broken"));
        for (int r = 0; r < 4; r++) {
            bool named = r == 2 || strstr(k.text[r], "rank 2");
            if (!named) printf("    layer %d, rank %d: %s\n", layer, r, k.text[r]);
            ENSURE(named);
        }
    }
}
