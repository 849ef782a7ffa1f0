/* Convolution, pooling, batch normalization: against plain double loops, on any instruction set and thread count. */
#include "kernels.h"
#include "test.h"

static void randomize(float *x, int64_t n) { for (int64_t i = 0; i < n; i++) x[i] = uniform(); }

/* A model of one op: loss = sum(y * r), so dy = r. */
typedef struct model {
    hpml_ctx    *ctx;
    hpml_graph  *g;
    hpml_tensor *x, *r, *y;
} model;

static bool model_make(model *m)
{
    hpml_graph_desc d;
    hpml_tensor    *loss;
    if (!m->y) return false;
    m->r = hpml_input(m->ctx, HPML_DTYPE_F32, m->y->ndim, m->y->shape);
    loss = hpml_sum(hpml_mul(m->y, m->r), HPML_ALL_DIMS);
    memset(&d, 0, sizeof d);
    d.outputs = &m->y, d.output_count = 1, d.loss = loss;
    m->g = hpml_graph_create(m->ctx, &d);
    if (hpml_graph_alloc(m->g) != HPML_OK) return false;
    for (int i = 0; i < hpml_param_count(m->ctx); i++) {
        hpml_tensor *p = hpml_param_at(m->ctx, i);
        randomize(p->data, hpml_tensor_count(p));
        if (p->param->buffer)
            for (int64_t j = 0; j < hpml_tensor_count(p); j++) p->data[j] = 0.5f + 0.25f * p->data[j];
    }
    randomize(m->x->data, hpml_tensor_count(m->x));
    randomize(m->r->data, hpml_tensor_count(m->r));
    return true;
}

/* Largest |a - b| / (1 + |b|). */
static double distance(const float *a, const double *b, int64_t n)
{
    double worst = 0;
    for (int64_t i = 0; i < n; i++) {
        double e = fabs((double)a[i] - b[i]) / (1 + fabs(b[i]));
        if (!(e <= worst)) worst = e;
    }
    return worst;
}

typedef struct convolution {
    int64_t B, C, H, W, OC;
    int32_t kh, kw, sh, sw, ph, pw, dh, dw, groups;
    int     bias;
    hpml_act act;
} convolution;

static hpml_tensor *conv_record(hpml_tensor *x, const convolution *t)
{
    hpml_conv2d_desc d;
    memset(&d, 0, sizeof d);
    d.kernel_h = t->kh, d.kernel_w = t->kw, d.stride_h = t->sh, d.stride_w = t->sw;
    d.padding_h = t->ph, d.padding_w = t->pw == 0 ? HPML_NO_PAD : t->pw;
    d.dilation_h = t->dh, d.dilation_w = t->dw, d.groups = t->groups;
    d.no_bias = !t->bias, d.activation = t->act, d.name = "c";
    return hpml_conv2d(x, t->OC, &d);
}

/* One step of the reference: calls `visit` for every product w[wi] x[xi] that goes into y[yi]. */
#define EACH_PRODUCT(t, y, body)                                                                                       \
    for (int64_t b = 0; b < (t)->B; b++)                                                                               \
        for (int64_t o = 0; o < (t)->OC; o++)                                                                          \
            for (int64_t i = 0; i < (y)->shape[2]; i++)                                                                \
                for (int64_t j = 0; j < (y)->shape[3]; j++) {                                                          \
                    int64_t IC = (t)->C / (t)->groups, g = o / ((t)->OC / (t)->groups);                                \
                    int64_t yi = ((b * (t)->OC + o) * (y)->shape[2] + i) * (y)->shape[3] + j;                          \
                    for (int64_t c = 0; c < IC; c++)                                                                   \
                        for (int64_t u = 0; u < (t)->kh; u++)                                                          \
                            for (int64_t v = 0; v < (t)->kw; v++) {                                                    \
                                int64_t row = i * (t)->sh + u * (t)->dh - (t)->ph;                                     \
                                int64_t col = j * (t)->sw + v * (t)->dw - (t)->pw;                                     \
                                int64_t wi = ((o * IC + c) * (t)->kh + u) * (t)->kw + v;                               \
                                int64_t xi = ((b * (t)->C + g * IC + c) * (t)->H + row) * (t)->W + col;                \
                                if (row < 0 || col < 0 || row >= (t)->H || col >= (t)->W) continue;                    \
                                body;                                                                                  \
                            }                                                                                          \
                }

static double *zeros(int64_t n) { return (double *)calloc((size_t)n, sizeof(double)); }

static double activate(hpml_act act, double x)
{
    switch ((int)act) {
    case HPML_ACT_RELU: return x > 0 ? x : 0;
    case HPML_ACT_LEAKY_RELU: return x > 0 ? x : 0.01 * x;
    case HPML_ACT_TANH: return tanh(x);
    case HPML_ACT_SIGMOID: return 1 / (1 + exp(-x));
    default: return x;
    }
}

/* Slope from the result, as the library computed it: a relu at 0 has one of two slopes. */
static double slope(hpml_act act, double y)
{
    switch ((int)act) {
    case HPML_ACT_RELU: return y > 0 ? 1 : 0;
    case HPML_ACT_LEAKY_RELU: return y > 0 ? 1 : 0.01;
    case HPML_ACT_TANH: return 1 - y * y;
    case HPML_ACT_SIGMOID: return y * (1 - y);
    default: return 1;
    }
}

/* Forward and gradients of one convolution on one instruction set; `rows` of the batch; the worst distance. */
static double conv_check(const char *isa, int threads, const convolution *full, int64_t rows, bool accumulate)
{
    convolution  t = *full;
    model        m;
    hpml_tensor *w, *bias;
    double      *y, *dx, *dw, *db, worst = 1e9, scale = accumulate ? 2 : 1;
    memset(&m, 0, sizeof m);
    m.ctx = context(isa, threads);
    if (!m.ctx) return 0;
    m.x = hpml_input_4d(m.ctx, t.B, t.C, t.H, t.W);
    hpml_tensor_require_grad(m.x);
    m.y = conv_record(m.x, &t);
    if (!model_make(&m)) {
        printf("%s\n", hpml_ctx_error(m.ctx));
        hpml_ctx_free(m.ctx);
        return worst;
    }
    w = hpml_param_find(m.ctx, "c.weight"), bias = hpml_param_find(m.ctx, "c.bias");
    hpml_graph_batch(m.g, rows);
    t.B = rows;
    y = zeros(hpml_tensor_count(m.y)), dx = zeros(hpml_tensor_count(m.x));
    dw = zeros(hpml_tensor_count(w)), db = zeros(t.OC);
    for (int i = 0; i < (accumulate ? 2 : 1); i++) {
        hpml_graph_forward(m.g, true, 1);
        hpml_graph_backward(m.g, 1, i > 0);
    }
    if (hpml_ctx_status(m.ctx) == HPML_OK) {
        int64_t plane = m.y->shape[2] * m.y->shape[3];
        EACH_PRODUCT(&t, m.y, y[yi] += (double)w->data[wi] * (double)m.x->data[xi])
        for (int64_t i = 0; i < hpml_tensor_count(m.y); i++)
            y[i] = activate(t.act, y[i] + (bias ? (double)bias->data[i / plane % t.OC] : 0));
        worst = distance(m.y->data, y, hpml_tensor_count(m.y));
        for (int64_t i = 0; i < hpml_tensor_count(m.y); i++) { /* y becomes dz */
            y[i] = (double)m.r->data[i] * slope(t.act, (double)m.y->data[i]);
            db[i / plane % t.OC] += scale * y[i];
        }
        EACH_PRODUCT(&t, m.y, dw[wi] += scale * y[yi] * (double)m.x->data[xi]; dx[xi] += y[yi] * (double)w->data[wi])
        worst = fmax(worst, distance(w->grad, dw, hpml_tensor_count(w)));
        worst = fmax(worst, distance(m.x->grad, dx, hpml_tensor_count(m.x)));
        if (bias) worst = fmax(worst, distance(bias->grad, db, t.OC));
    } else printf("%s\n", hpml_ctx_error(m.ctx));
    free(y), free(dx), free(dw), free(db);
    hpml_ctx_free(m.ctx);
    return worst;
}

static const convolution convolutions[] = {
    /* B C  H   W   OC  kernel stride padding dilation groups bias act */
    { 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1, HPML_ACT_NONE },
    { 2, 1, 28, 28, 6, 5, 5, 1, 1, 2, 2, 1, 1, 1, 1, HPML_ACT_RELU },
    { 3, 1, 28, 28, 20, 5, 5, 1, 1, 0, 0, 1, 1, 1, 1, HPML_ACT_NONE },
    { 3, 6, 14, 14, 16, 5, 5, 1, 1, 0, 0, 1, 1, 1, 1, HPML_ACT_RELU },
    { 2, 20, 12, 12, 50, 5, 5, 1, 1, 0, 0, 1, 1, 1, 1, HPML_ACT_TANH },
    { 2, 3, 32, 32, 32, 3, 3, 1, 1, 1, 1, 1, 1, 1, 0, HPML_ACT_NONE },
    { 17, 33, 4, 4, 35, 3, 3, 1, 1, 1, 1, 1, 1, 1, 0, HPML_ACT_RELU },
    { 3, 16, 8, 8, 64, 3, 3, 1, 1, 1, 1, 1, 1, 1, 1, HPML_ACT_LEAKY_RELU },
    { 2, 4, 9, 11, 5, 3, 3, 2, 2, 1, 1, 1, 1, 1, 1, HPML_ACT_NONE },
    { 2, 5, 13, 7, 7, 3, 2, 2, 3, 1, 0, 1, 1, 1, 1, HPML_ACT_SIGMOID },
    { 2, 2, 11, 13, 3, 1, 1, 3, 2, 0, 0, 1, 1, 1, 1, HPML_ACT_NONE },
    { 2, 3, 17, 19, 4, 7, 7, 2, 2, 3, 3, 1, 1, 1, 1, HPML_ACT_NONE },
    { 2, 3, 17, 19, 4, 7, 5, 3, 1, 2, 3, 1, 1, 1, 1, HPML_ACT_NONE },
    { 2, 4, 12, 15, 6, 3, 3, 1, 1, 2, 2, 2, 2, 1, 1, HPML_ACT_NONE },
    { 2, 4, 12, 15, 6, 3, 2, 2, 3, 2, 1, 3, 2, 1, 1, HPML_ACT_RELU },
    { 2, 5, 9, 9, 4, 2, 2, 2, 2, 0, 0, 1, 1, 1, 1, HPML_ACT_NONE },
    { 2, 5, 9, 10, 4, 2, 3, 3, 3, 4, 3, 1, 1, 1, 1, HPML_ACT_NONE },
    { 2, 19, 7, 5, 40, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1, HPML_ACT_RELU },
    { 2, 6, 7, 5, 4, 1, 1, 1, 1, 1, 1, 1, 1, 2, 1, HPML_ACT_NONE },
    { 2, 12, 7, 9, 8, 3, 3, 1, 1, 1, 1, 1, 1, 4, 1, HPML_ACT_RELU },
    { 2, 12, 7, 9, 8, 1, 1, 1, 1, 0, 0, 1, 1, 4, 1, HPML_ACT_RELU },
    { 2, 7, 16, 16, 7, 3, 3, 1, 1, 1, 1, 1, 1, 7, 1, HPML_ACT_RELU },
    { 3, 5, 17, 33, 5, 5, 3, 2, 2, 2, 1, 1, 1, 5, 0, HPML_ACT_NONE },
    { 2, 3, 12, 13, 9, 3, 3, 1, 1, 2, 2, 2, 2, 3, 1, HPML_ACT_NONE },
    { 2, 3, 12, 23, 6, 3, 3, 3, 3, 1, 2, 1, 2, 3, 1, HPML_ACT_NONE },
    { 2, 4, 37, 40, 4, 7, 7, 1, 1, 3, 3, 1, 1, 4, 1, HPML_ACT_NONE },
    { 5, 40, 1, 1, 33, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1, HPML_ACT_NONE },
    { 5, 3, 1, 70, 3, 1, 5, 1, 1, 0, 2, 1, 1, 1, 1, HPML_ACT_NONE },
    { 5, 3, 70, 1, 3, 5, 1, 1, 1, 2, 0, 1, 1, 1, 1, HPML_ACT_NONE },
};
#define CONVOLUTIONS ((int)(sizeof convolutions / sizeof convolutions[0]))

TEST(conv_against_loops)
{
    for (int isa = 0; isa < ISAS; isa++)
        for (int i = 0; i < CONVOLUTIONS; i++) {
            const convolution *t = &convolutions[i];
            double d = conv_check(isas[isa], 1 + i % 3, t, t->B, i % 2 == 0);
            if (!(d < 1e-4)) printf("%s, convolution %d: %g\n", isas[isa], i, d);
            ENSURE(d < 1e-4);
            d = conv_check(isas[isa], 2, t, (t->B + 1) / 2, false);
            if (!(d < 1e-4)) printf("%s, convolution %d, short batch: %g\n", isas[isa], i, d);
            ENSURE(d < 1e-4);
        }
}

/* Shapes drawn at random. */
TEST(conv_random)
{
    for (int i = 0; i < 150; i++) {
        convolution t;
        double      d;
        int32_t     draw[16];
        noise = (uint32_t)i * 7919u;
        for (int j = 0; j < 16; j++) uniform(), draw[j] = (int32_t)(noise >> 16);
        memset(&t, 0, sizeof t);
        t.groups = 1 + draw[0] % 3;
        t.B = 1 + draw[1] % 5, t.C = t.groups * (1 + draw[2] % 20), t.OC = t.groups * (1 + draw[3] % 37);
        t.kh = 1 + draw[4] % 4, t.kw = 1 + draw[5] % 4, t.sh = 1 + draw[6] % 3, t.sw = 1 + draw[7] % 3;
        t.dh = 1 + draw[8] % 3, t.dw = 1 + draw[9] % 3, t.ph = draw[10] % 4, t.pw = draw[11] % 4;
        t.H = (t.kh - 1) * t.dh + 1 + draw[12] % 12, t.W = (t.kw - 1) * t.dw + 1 + draw[13] % 19;
        t.bias = draw[14] % 2, t.act = draw[15] % 2 ? HPML_ACT_RELU : HPML_ACT_NONE;
        d = conv_check(isas[i % ISAS], 1 + i % 2, &t, t.B, i % 3 == 0);
        if (!(d < 1e-4))
            printf("%s: B%d C%d %dx%d OC%d k%dx%d s%dx%d p%dx%d d%dx%d g%d: %g\n", isas[i % ISAS], (int)t.B, (int)t.C,
                   (int)t.H, (int)t.W, (int)t.OC, t.kh, t.kw, t.sh, t.sw, t.ph, t.pw, t.dh, t.dw, t.groups, d);
        ENSURE(d < 1e-4);
    }
}

/* FNV-1a over the bits of an array. */
static uint64_t hash(uint64_t h, const float *x, int64_t n)
{
    const unsigned char *p = (const unsigned char *)x;
    for (int64_t i = 0; i < n * 4; i++) h = (h ^ p[i]) * UINT64_C(1099511628211);
    return h;
}

static uint64_t model_hash(model *m, bool train)
{
    uint64_t h = 1;
    noise = 5;
    if (!model_make(m)) return 0;
    hpml_graph_forward(m->g, train, 1);
    hpml_graph_backward(m->g, 1, false);
    h = hash(h, m->y->data, hpml_tensor_count(m->y));
    h = hash(h, m->x->grad, hpml_tensor_count(m->x));
    for (int i = 0; i < hpml_param_count(m->ctx); i++) {
        hpml_tensor *p = hpml_param_at(m->ctx, i);
        h = hash(h, p->data, hpml_tensor_count(p));
        if (p->grad) h = hash(h, p->grad, hpml_tensor_count(p));
    }
    return hpml_ctx_status(m->ctx) == HPML_OK ? h : 0;
}

TEST(conv_same_bits_at_any_thread_count)
{
    for (int i = 0; i < CONVOLUTIONS; i++) {
        uint64_t h[3];
        for (int threads = 1; threads <= 3; threads++) {
            model m;
            memset(&m, 0, sizeof m);
            m.ctx = context(NULL, threads);
            m.x   = hpml_input_4d(m.ctx, convolutions[i].B, convolutions[i].C, convolutions[i].H, convolutions[i].W);
            hpml_tensor_require_grad(m.x);
            m.y = conv_record(m.x, &convolutions[i]);
            h[threads - 1] = model_hash(&m, true);
            hpml_ctx_free(m.ctx);
        }
        ENSURE(h[0] != 0 && h[0] == h[1] && h[0] == h[2]);
    }
}

static hpml_status conv_status(int64_t C, int64_t H, int64_t out, int32_t kernel, int32_t padding, int32_t groups,
                               hpml_act act, bool flat, const char *words)
{
    hpml_ctx        *ctx = context(NULL, 1);
    hpml_conv2d_desc d;
    hpml_status      status;
    memset(&d, 0, sizeof d);
    d.kernel_h = kernel, d.padding_h = padding, d.groups = groups, d.activation = act, d.name = "c1";
    if (hpml_conv2d(flat ? hpml_input_3d(ctx, 2, C, H) : hpml_input_4d(ctx, 2, C, H, H), out, &d)) {
        hpml_ctx_free(ctx);
        return HPML_OK;
    }
    status = hpml_ctx_status(ctx);
    if (!strstr(hpml_ctx_error(ctx), words) || !strstr(hpml_ctx_error(ctx), "c1")) status = HPML_OK;
    hpml_ctx_free(ctx);
    return status;
}

TEST(conv_errors)
{
    hpml_ctx *ctx = context(NULL, 1);
    ENSURE(conv_status(3, 5, 4, 3, 1, 1, HPML_ACT_RELU, false, "") == HPML_OK);
    ENSURE(conv_status(3, 5, 4, 6, 0, 1, HPML_ACT_NONE, false, "larger than the padded image") == HPML_ERR_SHAPE);
    ENSURE(conv_status(3, 5, 4, 0, 0, 1, HPML_ACT_NONE, false, "kernel_h is required") == HPML_ERR_SHAPE);
    ENSURE(conv_status(3, 5, 4, -3, 0, 1, HPML_ACT_NONE, false, "at least 1") == HPML_ERR_SHAPE);
    ENSURE(conv_status(3, 5, 4, 3, -7, 1, HPML_ACT_NONE, false, "padding") == HPML_ERR_SHAPE);
    ENSURE(conv_status(3, 5, 4, 3, 100000, 1, HPML_ACT_NONE, false, "32768") == HPML_ERR_SHAPE);
    ENSURE(conv_status(3, 5, 4, 3, 0, 2, HPML_ACT_NONE, false, "multiples of the groups") == HPML_ERR_SHAPE);
    ENSURE(conv_status(4, 5, 3, 3, 0, 2, HPML_ACT_NONE, false, "multiples of the groups") == HPML_ERR_SHAPE);
    ENSURE(conv_status(4, 5, 0, 3, 0, 1, HPML_ACT_NONE, false, "multiples of the groups") == HPML_ERR_SHAPE);
    ENSURE(conv_status(4, 5, 3, 3, 0, 1, HPML_ACT_NONE, true, "(B, C, H, W)") == HPML_ERR_SHAPE);
    ENSURE(conv_status(4, 5, 3, 3, 0, 1, HPML_ACT_GELU, false, "after the convolution") == HPML_ERR_SHAPE);
    ENSURE(hpml_conv2d(NULL, 3, NULL) == NULL);
    ENSURE(hpml_conv2d(hpml_input_4d(ctx, 1, 1, 5, 5), 3, NULL) == NULL && hpml_ctx_status(ctx) == HPML_ERR_SHAPE);
    hpml_ctx_free(ctx);
}

typedef struct pooling { int64_t B, C, H, W; int32_t kernel, stride, padding; } pooling;

static hpml_tensor *pool_record(hpml_tensor *x, const pooling *t, int kind)
{
    if (kind == 0) return hpml_max_pool2d(x, t->kernel, t->stride, t->padding);
    return kind == 1 ? hpml_avg_pool2d(x, t->kernel, t->stride, t->padding) : hpml_global_avg_pool2d(x);
}

static double pool_check(const char *isa, int threads, const pooling *t, int kind)
{
    model   m;
    double *y, *dx, worst = 1e9;
    int64_t stride = t->stride ? t->stride : t->kernel, OH, OW;
    memset(&m, 0, sizeof m);
    m.ctx = context(isa, threads);
    if (!m.ctx) return 0;
    m.x = hpml_input_4d(m.ctx, t->B, t->C, t->H, t->W);
    hpml_tensor_require_grad(m.x);
    m.y = pool_record(m.x, t, kind);
    if (!model_make(&m)) return worst;
    for (int64_t i = 0; i < hpml_tensor_count(m.x); i += 3) m.x->data[i] = 0.25f; /* ties */
    hpml_graph_forward(m.g, true, 1);
    hpml_graph_backward(m.g, 1, false);
    y = zeros(hpml_tensor_count(m.y)), dx = zeros(hpml_tensor_count(m.x));
    OH = kind == 2 ? 1 : m.y->shape[2], OW = kind == 2 ? 1 : m.y->shape[3];
    for (int64_t p = 0; p < t->B * t->C; p++)
        for (int64_t o = 0; o < OH * OW; o++) {
            const float *x = m.x->data + p * t->H * t->W;
            double       sum = 0, best = -1e30, dy = (double)m.r->data[p * OH * OW + o];
            int64_t      at = 0, count = 0;
            for (int pass = 0; pass < 2; pass++) {
                for (int64_t u = 0; u < (kind == 2 ? t->H : t->kernel); u++)
                    for (int64_t v = 0; v < (kind == 2 ? t->W : t->kernel); v++) {
                        int64_t h = kind == 2 ? u : o / OW * stride + u - t->padding;
                        int64_t w = kind == 2 ? v : o % OW * stride + v - t->padding;
                        if (h < 0 || w < 0 || h >= t->H || w >= t->W) continue;
                        if (pass == 0) sum += (double)x[h * t->W + w], count++;
                        else if (kind > 0) dx[p * t->H * t->W + h * t->W + w] += dy / (double)count;
                        if ((double)x[h * t->W + w] > best) best = (double)x[h * t->W + w], at = h * t->W + w;
                    }
            }
            y[p * OH * OW + o] = kind == 0 ? best : sum / (double)count;
            if (kind == 0) dx[p * t->H * t->W + at] += dy;
        }
    if (hpml_ctx_status(m.ctx) == HPML_OK)
        worst = fmax(distance(m.y->data, y, hpml_tensor_count(m.y)), distance(m.x->grad, dx, hpml_tensor_count(m.x)));
    free(y), free(dx);
    hpml_ctx_free(m.ctx);
    return worst;
}

static const pooling poolings[] = {
    { 1, 1, 1, 1, 1, 0, 0 }, { 2, 3, 2, 2, 2, 0, 0 }, { 2, 3, 28, 28, 2, 0, 0 }, { 3, 5, 32, 32, 2, 2, 0 },
    { 2, 3, 7, 9, 2, 0, 0 }, { 2, 3, 24, 50, 2, 0, 0 }, { 2, 3, 33, 67, 2, 2, 0 }, { 2, 3, 9, 7, 3, 2, 1 },
    { 2, 3, 12, 13, 3, 0, 0 }, { 2, 2, 13, 11, 3, 1, 1 }, { 2, 2, 13, 11, 5, 3, 2 }, { 2, 2, 8, 8, 8, 0, 0 },
    { 2, 2, 10, 10, 2, 1, 0 }, { 2, 2, 10, 11, 2, 2, 1 }, { 1, 2, 5, 5, 1, 2, 0 },
};
#define POOLINGS ((int)(sizeof poolings / sizeof poolings[0]))

TEST(pool_against_loops)
{
    for (int isa = 0; isa < ISAS; isa++)
        for (int i = 0; i < POOLINGS; i++)
            for (int kind = 0; kind < 3; kind++) {
                double d = pool_check(isas[isa], 1 + i % 3, &poolings[i], kind);
                if (!(d < 1e-5)) printf("%s, pooling %d, kind %d: %g\n", isas[isa], i, kind, d);
                ENSURE(d < 1e-5);
            }
}

/* NaN wins a maximum: what went wrong stays visible. */
TEST(pool_keeps_nan)
{
    for (int isa = 0; isa < ISAS; isa++)
        for (int64_t at = 0; at < 64; at += 7) {
            for (int32_t kernel = 2; kernel < 4; kernel++) {
                model m;
                bool  found = false;
                memset(&m, 0, sizeof m);
                m.ctx = context(isas[isa], 1);
                if (!m.ctx) break;
                m.x = hpml_input_4d(m.ctx, 1, 1, 8, 8);
                m.y = hpml_max_pool2d(m.x, kernel, 2, kernel - 2);
                ENSURE(model_make(&m));
                m.x->data[at] = (float)NAN;
                hpml_graph_forward(m.g, false, 1);
                for (int64_t i = 0; i < hpml_tensor_count(m.y); i++) found = found || m.y->data[i] != m.y->data[i];
                ENSURE(found);
                hpml_ctx_free(m.ctx);
            }
        }
}

static hpml_status pool_status(int64_t H, int32_t kernel, int32_t stride, int32_t padding, bool flat)
{
    hpml_ctx   *ctx = context(NULL, 1);
    hpml_status status;
    hpml_max_pool2d(flat ? hpml_input_3d(ctx, 2, 3, H) : hpml_input_4d(ctx, 2, 3, H, H), kernel, stride, padding);
    status = hpml_ctx_status(ctx);
    hpml_ctx_free(ctx);
    return status;
}

TEST(pool_errors)
{
    ENSURE(pool_status(4, 2, 0, 0, false) == HPML_OK);
    ENSURE(pool_status(4, 5, 0, 0, false) == HPML_ERR_SHAPE);
    ENSURE(pool_status(4, 0, 0, 0, false) == HPML_ERR_SHAPE);
    ENSURE(pool_status(4, 2, -1, 0, false) == HPML_ERR_SHAPE);
    ENSURE(pool_status(4, 2, 0, 2, false) == HPML_ERR_SHAPE);
    ENSURE(pool_status(4, 2, 0, 0, true) == HPML_ERR_SHAPE);
    ENSURE(hpml_max_pool2d(NULL, 2, 0, 0) == NULL && hpml_global_avg_pool2d(NULL) == NULL);
}

typedef struct norm { int64_t B, C, H, W; bool relu, no_affine; float momentum; } norm; /* H 0: (B, C) */

static hpml_tensor *norm_record(hpml_ctx *ctx, const norm *t, hpml_tensor **x)
{
    hpml_norm_desc d;
    memset(&d, 0, sizeof d);
    d.activation = t->relu ? HPML_ACT_RELU : HPML_ACT_NONE;
    d.no_affine = t->no_affine, d.momentum = t->momentum, d.name = "n";
    *x = t->H ? hpml_input_4d(ctx, t->B, t->C, t->H, t->W) : hpml_input_2d(ctx, t->B, t->C);
    hpml_tensor_require_grad(*x);
    return hpml_batchnorm(*x, &d);
}

/* Forward, gradients, running statistics; in training or in evaluation. */
static double norm_check(const char *isa, int threads, const norm *t, bool train)
{
    model        m;
    int64_t      P = t->H ? t->H * t->W : 1, count = t->B * t->C * P;
    double       worst = 1e9, N = (double)(t->B * P), mom = t->momentum > 0 ? (double)t->momentum : 0.1;
    hpml_tensor *gamma, *beta, *mean_t, *var_t;
    memset(&m, 0, sizeof m);
    m.ctx = context(isa, threads);
    if (!m.ctx) return 0;
    m.y = norm_record(m.ctx, t, &m.x);
    if (!model_make(&m)) return worst;
    gamma = hpml_param_find(m.ctx, "n.weight"), beta = hpml_param_find(m.ctx, "n.bias");
    mean_t = hpml_param_find(m.ctx, "n.running_mean"), var_t = hpml_param_find(m.ctx, "n.running_var");
    for (int64_t i = 0; i < count; i++) m.x->data[i] = 3 + 2 * m.x->data[i]; /* a mean that matters */
    {
        double *y = zeros(count), *dx = zeros(count), *dg = zeros(t->C), *db = zeros(t->C);
        double *rm = zeros(t->C), *rv = zeros(t->C), *mean = zeros(t->C), *rstd = zeros(t->C);
#define CHANNEL(i) ((i) / P % t->C)
        for (int64_t c = 0; c < t->C; c++) rm[c] = (double)mean_t->data[c], rv[c] = (double)var_t->data[c];
        for (int64_t i = 0; i < count; i++) mean[CHANNEL(i)] += (double)m.x->data[i] / N;
        for (int64_t i = 0; i < count; i++) rstd[CHANNEL(i)] += pow((double)m.x->data[i] - mean[CHANNEL(i)], 2);
        for (int64_t c = 0; c < t->C; c++) {
            double square = rstd[c];
            rstd[c] = 1 / sqrt((train ? square / N : rv[c]) + 1e-5);
            if (!train) { mean[c] = rm[c]; continue; }
            rm[c] = (1 - mom) * rm[c] + mom * mean[c];
            rv[c] = (1 - mom) * rv[c] + mom * square / (N > 1 ? N - 1 : 1);
        }
        hpml_graph_forward(m.g, train, 1);
        hpml_graph_backward(m.g, 1, false);
        for (int64_t i = 0; i < count; i++) {
            int64_t c    = CHANNEL(i);
            double  xhat = ((double)m.x->data[i] - mean[c]) * rstd[c], dy = (double)m.r->data[i];
            y[i] = xhat * (gamma ? (double)gamma->data[c] : 1) + (beta ? (double)beta->data[c] : 0);
            if (t->relu && y[i] < 0) y[i] = 0;
            if (t->relu && !(m.y->data[i] > 0)) dy = 0;
            dg[c] += dy * xhat, db[c] += dy;
        }
        for (int64_t i = 0; i < count; i++) {
            int64_t c    = CHANNEL(i);
            double  xhat = ((double)m.x->data[i] - mean[c]) * rstd[c];
            double  dy   = t->relu && !(m.y->data[i] > 0) ? 0 : (double)m.r->data[i];
            dx[i] = rstd[c] * (gamma ? (double)gamma->data[c] : 1) * (dy - (train ? db[c] / N + xhat * dg[c] / N : 0));
        }
        if (hpml_ctx_status(m.ctx) == HPML_OK) {
            worst = fmax(distance(m.y->data, y, count), distance(m.x->grad, dx, count));
            worst = fmax(worst, fmax(distance(mean_t->data, rm, t->C), distance(var_t->data, rv, t->C)));
            if (gamma) worst = fmax(worst, fmax(distance(gamma->grad, dg, t->C), distance(beta->grad, db, t->C)));
        }
        free(y), free(dx), free(dg), free(db), free(rm), free(rv), free(mean), free(rstd);
    }
    hpml_ctx_free(m.ctx);
    return worst;
}

static const norm norms[] = {
    { 7, 3, 0, 0, false, false, 0 }, { 64, 37, 0, 0, true, false, 0.5f }, { 2, 1, 1, 1, false, false, 0 },
    { 3, 5, 4, 4, true, false, 0 }, { 2, 3, 7, 5, false, true, 0.2f }, { 5, 4, 32, 32, true, false, 0 },
    { 2, 2, 33, 67, true, true, 0 }, { 9, 33, 8, 8, false, false, 0 }, { 70, 19, 2, 2, true, false, 0 },
};
#define NORMS ((int)(sizeof norms / sizeof norms[0]))

TEST(batchnorm_against_loops)
{
    for (int isa = 0; isa < ISAS; isa++)
        for (int i = 0; i < 2 * NORMS; i++) {
            double d = norm_check(isas[isa], 1 + i % 3, &norms[i / 2], i % 2 == 0);
            if (!(d < 2e-4)) printf("%s, norm %d, %s: %g\n", isas[isa], i / 2, i % 2 ? "eval" : "train", d);
            ENSURE(d < 2e-4);
        }
}

TEST(pool_and_norm_same_bits_at_any_thread_count)
{
    for (int i = 0; i < NORMS + 3 * POOLINGS; i++) {
        uint64_t h[3];
        for (int threads = 1; threads <= 3; threads++) {
            model m;
            memset(&m, 0, sizeof m);
            m.ctx = context(NULL, threads);
            if (i < NORMS) m.y = norm_record(m.ctx, &norms[i], &m.x);
            else {
                const pooling *t = &poolings[(i - NORMS) / 3];
                m.x = hpml_input_4d(m.ctx, t->B, t->C, t->H, t->W);
                hpml_tensor_require_grad(m.x);
                m.y = pool_record(m.x, t, (i - NORMS) % 3);
            }
            h[threads - 1] = model_hash(&m, true);
            hpml_ctx_free(m.ctx);
        }
        ENSURE(h[0] != 0 && h[0] == h[1] && h[0] == h[2]);
    }
}

TEST(batchnorm_errors)
{
    hpml_ctx      *ctx = context(NULL, 1);
    hpml_norm_desc d;
    ENSURE(hpml_batchnorm(NULL, NULL) == NULL);
    ENSURE(hpml_batchnorm(hpml_input_3d(ctx, 2, 3, 4), NULL) == NULL && hpml_ctx_status(ctx) == HPML_ERR_SHAPE);
    hpml_ctx_clear_error(ctx);
    memset(&d, 0, sizeof d);
    d.activation = HPML_ACT_TANH;
    ENSURE(hpml_batchnorm(hpml_input_4d(ctx, 2, 3, 4, 4), &d) == NULL && hpml_ctx_status(ctx) != HPML_OK);
    hpml_ctx_free(ctx);
}
