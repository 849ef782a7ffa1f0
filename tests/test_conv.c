/* Tests convolution, pooling and batch normalization against plain loops in double, on each instruction set and with
   several numbers of threads; graphs that predict against plain graphs. */
#include "kernels.h"
#include "test.h"

static void randomize(float *x, int64_t n) { for (int64_t i = 0; i < n; i++) x[i] = uniform(); }

/* A model of one op, y = op(x), whose loss is sum(y * r), so that dy = r. */
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
    if (m->y->ndim == 4) hpml_tensor_set_layout(m->r, m->y->layout);
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

/* Returns the largest |a - b| / (1 + |b|). */
static double distance(const float *a, const double *b, int64_t n)
{
    double worst = 0;
    for (int64_t i = 0; i < n; i++) {
        double e = fabs((double)a[i] - b[i]) / (1 + fabs(b[i]));
        if (!(e <= worst)) worst = e;
    }
    return worst;
}

static const hpml_layout layouts[2] = { HPML_NCHW, HPML_NHWC };

/* Records an input for B images of C channels, H x W. */
static hpml_tensor *images(hpml_ctx *ctx, hpml_layout layout, int64_t B, int64_t C, int64_t H, int64_t W)
{
    hpml_tensor *x = layout == HPML_NHWC ? hpml_input_4d(ctx, B, H, W, C) : hpml_input_4d(ctx, B, C, H, W);
    hpml_tensor_set_layout(x, layout);
    hpml_tensor_require_grad(x);
    return x;
}

/* Returns the offset in t, of either layout, of element i of the same images in the order (B, C, H, W). */
static int64_t place(const hpml_tensor *t, int64_t i)
{
    int64_t C = t->shape[3], pixels = t->shape[1] * t->shape[2];
    return t->layout == HPML_NHWC ? (i / pixels / C * pixels + i % pixels) * C + i / pixels % C : i;
}

/* Returns a copy of the values of t in the order (B, C, H, W). */
static float *in_order(const hpml_tensor *t, const float *values)
{
    int64_t n = hpml_tensor_count(t);
    float  *copy = (float *)malloc((size_t)n * sizeof(float));
    for (int64_t i = 0; i < n; i++) copy[i] = values[place(t, i)];
    return copy;
}

typedef struct convolution {
    int64_t B, C, H, W, OC;
    int32_t kh, kw, sh, sw, ph, pw, dh, dw, groups;
    int     bias;
    hpml_act act;
    hpml_layout layout;
    hpml_conv_algorithm algorithm;
    size_t  workspace;
} convolution;

static hpml_tensor *conv_record(hpml_tensor *x, const convolution *t)
{
    hpml_conv2d_desc d;
    memset(&d, 0, sizeof d);
    d.kernel_h = t->kh, d.kernel_w = t->kw, d.stride_h = t->sh, d.stride_w = t->sw;
    d.padding_h = t->ph, d.padding_w = t->pw == 0 ? HPML_NO_PAD : t->pw;
    d.dilation_h = t->dh, d.dilation_w = t->dw, d.groups = t->groups;
    d.no_bias = !t->bias, d.activation = t->act, d.name = "c";
    d.algorithm = t->algorithm, d.workspace = t->workspace;
    return hpml_conv2d(x, t->OC, &d);
}

/* The reference: runs a statement for every product w[wi] x[xi] that is a term of y[yi]. */
#define EACH_PRODUCT(t, OH, OW, body)                                                                                  \
    for (int64_t b = 0; b < (t)->B; b++)                                                                               \
        for (int64_t o = 0; o < (t)->OC; o++)                                                                          \
            for (int64_t i = 0; i < (OH); i++)                                                                         \
                for (int64_t j = 0; j < (OW); j++) {                                                                   \
                    int64_t IC = (t)->C / (t)->groups, g = o / ((t)->OC / (t)->groups);                                \
                    int64_t yi = ((b * (t)->OC + o) * (OH) + i) * (OW) + j;                                            \
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

/* Returns the derivative of an activation from its result y. y is what the library computed, because rounding decides
   on which side of 0 a relu is. */
static double derivative(hpml_act act, double y)
{
    switch ((int)act) {
    case HPML_ACT_RELU: return y > 0 ? 1 : 0;
    case HPML_ACT_LEAKY_RELU: return y > 0 ? 1 : 0.01;
    case HPML_ACT_TANH: return 1 - y * y;
    case HPML_ACT_SIGMOID: return y * (1 - y);
    default: return 1;
    }
}

/* Computes one convolution and its gradients on one instruction set, for the first `rows` samples of the batch. Returns
   the largest distance from the reference. */
static double conv_check(const char *isa, int threads, const convolution *full, int64_t rows, bool accumulate)
{
    convolution  t = *full;
    model        m;
    hpml_tensor *w, *bias;
    double      *y, *dx, *dw, *db, worst = 1e9, scale = accumulate ? 2 : 1;
    memset(&m, 0, sizeof m);
    m.ctx = context(isa, threads);
    if (!m.ctx) return 0;
    m.x = images(m.ctx, t.layout, t.B, t.C, t.H, t.W);
    m.y = conv_record(m.x, &t);
    if (!model_make(&m) || (t.workspace > 0 && m.y->node->scratch_bytes > t.workspace)) {
        printf("%s\n", hpml_ctx_error(m.ctx));
        hpml_ctx_free(m.ctx);
        return worst;
    }
    w = hpml_param_find(m.ctx, "c.weight"), bias = hpml_param_find(m.ctx, "c.bias");
    hpml_graph_set_batch(m.g, rows);
    t.B = rows;
    y = zeros(hpml_tensor_count(m.y)), dx = zeros(hpml_tensor_count(m.x));
    dw = zeros(hpml_tensor_count(w)), db = zeros(t.OC);
    for (int i = 0; i < (accumulate ? 2 : 1); i++) {
        hpml_graph_forward(m.g, true, 1);
        hpml_graph_backward(m.g, 1, i > 0);
    }
    if (hpml_ctx_status(m.ctx) == HPML_OK) {
        int64_t OH = m.y->shape[t.layout == HPML_NHWC ? 1 : 2], OW = m.y->shape[t.layout == HPML_NHWC ? 2 : 3];
        float  *xs = in_order(m.x, m.x->data), *dxs = in_order(m.x, m.x->grad);
        float  *ys = in_order(m.y, m.y->data), *rs = in_order(m.r, m.r->data);
        EACH_PRODUCT(&t, OH, OW, y[yi] += (double)w->data[wi] * (double)xs[xi])
        for (int64_t i = 0; i < hpml_tensor_count(m.y); i++)
            y[i] = activate(t.act, y[i] + (bias ? (double)bias->data[i / (OH * OW) % t.OC] : 0));
        worst = distance(ys, y, hpml_tensor_count(m.y));
        for (int64_t i = 0; i < hpml_tensor_count(m.y); i++) { /* y becomes dz */
            y[i] = (double)rs[i] * derivative(t.act, (double)ys[i]);
            db[i / (OH * OW) % t.OC] += scale * y[i];
        }
        EACH_PRODUCT(&t, OH, OW, dw[wi] += scale * y[yi] * (double)xs[xi]; dx[xi] += y[yi] * (double)w->data[wi])
        worst = fmax(worst, distance(w->grad, dw, hpml_tensor_count(w)));
        worst = fmax(worst, distance(dxs, dx, hpml_tensor_count(m.x)));
        if (bias) worst = fmax(worst, distance(bias->grad, db, t.OC));
        free(xs), free(dxs), free(ys), free(rs);
    } else printf("%s\n", hpml_ctx_error(m.ctx));
    free(y), free(dx), free(dw), free(db);
    hpml_ctx_free(m.ctx);
    return worst;
}

/* Layout, algorithm and workspace are set by the tests. */
#define CONV(...) { __VA_ARGS__, HPML_NCHW, HPML_CONV_AUTO, 0 },
static const convolution convolutions[] = {
    /*   B C  H   W   OC  kernel stride padding dilation groups bias act */
    CONV(1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1, HPML_ACT_NONE)
    CONV(2, 1, 28, 28, 6, 5, 5, 1, 1, 2, 2, 1, 1, 1, 1, HPML_ACT_RELU)
    CONV(3, 1, 28, 28, 20, 5, 5, 1, 1, 0, 0, 1, 1, 1, 1, HPML_ACT_NONE)
    CONV(3, 6, 14, 14, 16, 5, 5, 1, 1, 0, 0, 1, 1, 1, 1, HPML_ACT_RELU)
    CONV(2, 20, 12, 12, 50, 5, 5, 1, 1, 0, 0, 1, 1, 1, 1, HPML_ACT_TANH)
    CONV(2, 3, 32, 32, 32, 3, 3, 1, 1, 1, 1, 1, 1, 1, 0, HPML_ACT_NONE)
    CONV(17, 33, 4, 4, 35, 3, 3, 1, 1, 1, 1, 1, 1, 1, 0, HPML_ACT_RELU)
    CONV(14, 96, 3, 3, 160, 3, 3, 1, 1, 1, 1, 1, 1, 1, 1, HPML_ACT_RELU)
    CONV(3, 16, 8, 8, 64, 3, 3, 1, 1, 1, 1, 1, 1, 1, 1, HPML_ACT_LEAKY_RELU)
    CONV(2, 4, 9, 11, 5, 3, 3, 2, 2, 1, 1, 1, 1, 1, 1, HPML_ACT_NONE)
    CONV(2, 5, 13, 7, 7, 3, 2, 2, 3, 1, 0, 1, 1, 1, 1, HPML_ACT_SIGMOID)
    CONV(2, 2, 11, 13, 3, 1, 1, 3, 2, 0, 0, 1, 1, 1, 1, HPML_ACT_NONE)
    CONV(2, 3, 17, 19, 4, 7, 7, 2, 2, 3, 3, 1, 1, 1, 1, HPML_ACT_NONE)
    CONV(2, 3, 17, 19, 4, 7, 5, 3, 1, 2, 3, 1, 1, 1, 1, HPML_ACT_NONE)
    CONV(2, 4, 12, 15, 6, 3, 3, 1, 1, 2, 2, 2, 2, 1, 1, HPML_ACT_NONE)
    CONV(2, 4, 12, 15, 6, 3, 2, 2, 3, 2, 1, 3, 2, 1, 1, HPML_ACT_RELU)
    CONV(2, 5, 9, 9, 4, 2, 2, 2, 2, 0, 0, 1, 1, 1, 1, HPML_ACT_NONE)
    CONV(2, 5, 9, 10, 4, 2, 3, 3, 3, 4, 3, 1, 1, 1, 1, HPML_ACT_NONE)
    CONV(2, 19, 7, 5, 40, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1, HPML_ACT_RELU)
    CONV(2, 6, 7, 5, 4, 1, 1, 1, 1, 1, 1, 1, 1, 2, 1, HPML_ACT_NONE)
    CONV(2, 12, 7, 9, 8, 3, 3, 1, 1, 1, 1, 1, 1, 4, 1, HPML_ACT_RELU)
    CONV(2, 12, 7, 9, 8, 1, 1, 1, 1, 0, 0, 1, 1, 4, 1, HPML_ACT_RELU)
    CONV(2, 7, 16, 16, 7, 3, 3, 1, 1, 1, 1, 1, 1, 7, 1, HPML_ACT_RELU)
    CONV(3, 5, 17, 33, 5, 5, 3, 2, 2, 2, 1, 1, 1, 5, 0, HPML_ACT_NONE)
    CONV(2, 3, 12, 13, 9, 3, 3, 1, 1, 2, 2, 2, 2, 3, 1, HPML_ACT_NONE)
    CONV(2, 3, 12, 23, 6, 3, 3, 3, 3, 1, 2, 1, 2, 3, 1, HPML_ACT_NONE)
    CONV(2, 4, 37, 40, 4, 7, 7, 1, 1, 3, 3, 1, 1, 4, 1, HPML_ACT_NONE)
    /* groups of few channels, which have kernels of their own */
    CONV(3, 17, 8, 8, 17, 3, 3, 1, 1, 1, 1, 1, 1, 17, 1, HPML_ACT_RELU)
    CONV(2, 18, 9, 35, 18, 3, 3, 2, 2, 1, 1, 1, 1, 18, 1, HPML_ACT_TANH)
    CONV(2, 4, 21, 32, 4, 5, 5, 1, 1, 2, 2, 1, 1, 4, 1, HPML_ACT_RELU)
    CONV(3, 3, 16, 19, 3, 5, 5, 2, 2, 2, 2, 1, 1, 3, 0, HPML_ACT_NONE)
    CONV(2, 3, 15, 37, 6, 3, 3, 2, 2, 0, 0, 2, 2, 3, 1, HPML_ACT_NONE)
    CONV(2, 8, 11, 16, 8, 3, 3, 1, 1, 1, 1, 1, 1, 4, 1, HPML_ACT_RELU)
    CONV(2, 8, 9, 13, 12, 3, 3, 2, 2, 1, 1, 1, 1, 2, 1, HPML_ACT_NONE)
    CONV(37, 5, 4, 4, 5, 3, 3, 1, 1, 1, 1, 1, 1, 5, 1, HPML_ACT_NONE)
    CONV(2, 2, 8, 21, 4, 2, 2, 4, 5, 1, 3, 1, 1, 2, 1, HPML_ACT_NONE)
    CONV(2, 3, 1, 2, 3, 3, 3, 2, 2, 5, 7, 3, 4, 3, 1, HPML_ACT_NONE)
    CONV(5, 40, 1, 1, 33, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1, HPML_ACT_NONE)
    CONV(5, 3, 1, 70, 3, 1, 5, 1, 1, 0, 2, 1, 1, 1, 1, HPML_ACT_NONE)
    CONV(5, 3, 70, 1, 3, 5, 1, 1, 1, 2, 0, 1, 1, 1, 1, HPML_ACT_NONE)
};
#define CONVOLUTIONS ((int)(sizeof convolutions / sizeof convolutions[0]))

/* Each convolution in both layouts and by both algorithms, which are variants 0 to 3. */
TEST(conv_against_loops)
{
    for (int isa = 0; isa < ISAS; isa++)
        for (int i = 0; i < 4 * CONVOLUTIONS; i++) {
            convolution t = convolutions[i / 4];
            t.layout    = i % 2 ? HPML_NHWC : HPML_NCHW;
            t.algorithm = i % 4 < 2 ? HPML_CONV_AUTO : HPML_CONV_IM2COL;
            double d = conv_check(isas[isa], 1 + i / 4 % 3, &t, t.B, i / 4 % 2 == 0);
            if (!(d < 1e-4)) printf("%s, convolution %d, variant %d: %g\n", isas[isa], i / 4, i % 4, d);
            ENSURE(d < 1e-4);
            d = conv_check(isas[isa], 2, &t, (t.B + 1) / 2, false);
            if (!(d < 1e-4)) printf("%s, convolution %d, variant %d, short batch: %g\n", isas[isa], i / 4, i % 4, d);
            ENSURE(d < 1e-4);
        }
}

/* Result and gradients of one convolution: y, dx, dw, db, in order; its workspace, or -1. The values of x, r and the
   parameters do not depend on how. */
static int64_t conv_values(const convolution *t, float *out[4], int64_t count[4], hpml_conv_algorithm *chosen)
{
    model m;
    memset(&m, 0, sizeof m);
    m.ctx = context(NULL, 2);
    m.x   = images(m.ctx, t->layout, t->B, t->C, t->H, t->W);
    m.y   = conv_record(m.x, t);
    noise = 9;
    if (!model_make(&m)) return -1;
    const hpml_tensor *w = hpml_param_find(m.ctx, "c.weight"), *bias = hpml_param_find(m.ctx, "c.bias");
    for (int64_t i = 0; i < hpml_tensor_count(m.x); i++) m.x->data[place(m.x, i)] = uniform();
    for (int64_t i = 0; i < hpml_tensor_count(m.r); i++) m.r->data[place(m.r, i)] = uniform();
    hpml_graph_forward(m.g, true, 1);
    hpml_graph_backward(m.g, 1, false);
    out[0] = in_order(m.y, m.y->data), count[0] = hpml_tensor_count(m.y);
    out[1] = in_order(m.x, m.x->grad), count[1] = hpml_tensor_count(m.x);
    out[2] = in_order(w, w->grad), count[2] = hpml_tensor_count(w);
    out[3] = bias ? in_order(bias, bias->grad) : NULL, count[3] = bias ? t->OC : 0;
    *chosen = m.y->node->attr.conv.algorithm;
    int64_t bytes = hpml_ctx_status(m.ctx) == HPML_OK ? (int64_t)m.y->node->scratch_bytes : -1;
    hpml_ctx_free(m.ctx);
    return bytes;
}

/* Under any limit of workspace, in both layouts: the same numbers, no byte more, and IM2COL only where DIRECT needs
   more than the limit. */
TEST(conv_keeps_to_its_workspace)
{
    for (int i = 0; i < CONVOLUTIONS; i++) {
        const convolution *t = &convolutions[i];
        float  *want[4], *have[4];
        int64_t n[4], most[2], row = t->C / t->groups * t->kh * t->kw * 4; /* most: of NCHW and of NHWC images */
        hpml_conv_algorithm chosen;
        convolution nhwc = *t;
        nhwc.layout = HPML_NHWC;
        ENSURE((most[1] = conv_values(&nhwc, want, n, &chosen)) > 0 && chosen == HPML_CONV_DIRECT);
        for (int v = 0; v < 4; v++) free(want[v]);
        ENSURE((most[0] = conv_values(t, want, n, &chosen)) > 0 && chosen == HPML_CONV_DIRECT);
        row *= (t->W + 2 * t->pw - t->dw * (t->kw - 1) - 1) / t->sw + 1;
        for (int k = 0; k < 8; k++) {
            const int64_t limits[] = { row, 3 * row, most[k % 2] - 1, most[k % 2] };
            convolution   l = *t;
            l.layout = k % 2 ? HPML_NHWC : HPML_NCHW, l.workspace = (size_t)limits[k / 2];
            if (limits[k / 2] < row) continue;
            int64_t bytes = conv_values(&l, have, n, &chosen);
            ENSURE(bytes >= 0 && bytes <= limits[k / 2]);
            ENSURE(chosen == (limits[k / 2] < most[k % 2] ? HPML_CONV_IM2COL : HPML_CONV_DIRECT));
            for (int v = 0; v < 4; v++) {
                double scale = 1e-9; /* the largest number: rounding of sums goes by it */
                for (int64_t j = 0; j < n[v]; j++) scale = fmax(scale, fabs((double)want[v][j]));
                for (int64_t j = 0; j < n[v]; j++) ENSURE_NEAR(have[v][j], want[v][j], 1e-5 * scale);
                free(have[v]);
            }
        }
        for (int v = 0; v < 4; v++) free(want[v]);
    }
}

/* Where another op reads x as well, a convolution adds to the gradient of x, which has the other op's part, 3. */
TEST(conv_adds_to_the_gradient_of_its_input)
{
    for (int i = 0; i < 2 * CONVOLUTIONS * ISAS; i++) {
        const char *isa = isas[i % ISAS];
        convolution t = convolutions[i / ISAS / 2];
        model       m[2];
        memset(m, 0, sizeof m);
        t.layout = layouts[i / ISAS % 2];
        for (int k = 0; k < 2; k++) {
            if (!(m[k].ctx = context(isa, 2))) break;
            m[k].x = images(m[k].ctx, t.layout, t.B, t.C, t.H, t.W);
            hpml_tensor *loss = hpml_sum(conv_record(m[k].x, &t), HPML_ALL_DIMS);
            if (k == 1) loss = hpml_add(loss, hpml_sum(hpml_scale(m[k].x, 3, 0), HPML_ALL_DIMS));
            hpml_graph_desc d = { .loss = loss };
            m[k].g = hpml_graph_create(m[k].ctx, &d);
            ENSURE(hpml_graph_alloc(m[k].g) == HPML_OK);
            noise = 3;
            randomize(m[k].x->data, hpml_tensor_count(m[k].x));
            randomize(hpml_param_at(m[k].ctx, 0)->data, hpml_tensor_count(hpml_param_at(m[k].ctx, 0)));
            hpml_graph_forward(m[k].g, true, 1);
            ENSURE(hpml_graph_backward(m[k].g, 1, false) == HPML_OK);
        }
        for (int64_t j = 0; m[1].x && j < hpml_tensor_count(m[0].x); j++)
            ENSURE_NEAR(m[1].x->grad[j], m[0].x->grad[j] + 3, 1e-4);
        for (int k = 0; k < 2; k++) hpml_ctx_free(m[k].ctx);
    }
}

/* The gradient of images that are stored in halves: both algorithms agree within the rounding of their copies. */
TEST(conv_algorithms_agree_on_halves)
{
    for (int i = 0; i < 8; i++) {
        float      *dx[2], scale = 0;
        int64_t     n = 0;
        convolution t = convolutions[0];
        t.B = 9, t.layout = i / 2 % 2 ? HPML_NHWC : HPML_NCHW, t.act = HPML_ACT_NONE;
        for (int k = 0; k < 2; k++) {
            model m = { .ctx = hpml_ctx_create(&(hpml_ctx_desc){
                            .threads = 2, .activation_dtype = i % 2 ? HPML_DTYPE_F16 : HPML_DTYPE_BF16 }) };
            t.algorithm = k ? HPML_CONV_IM2COL : HPML_CONV_DIRECT;
            m.x   = images(m.ctx, t.layout, t.B, t.C, t.H, t.W);
            m.y   = conv_record(hpml_scale(m.x, 1, 0), &t);
            noise = 9;
            ENSURE(model_make(&m));
            hpml_graph_set_batch(m.g, i / 4 ? t.B - 2 : t.B);
            hpml_graph_forward(m.g, true, 1);
            ENSURE(hpml_graph_backward(m.g, 1, false) == HPML_OK);
            n     = hpml_tensor_count(m.x);
            dx[k] = (float *)malloc((size_t)n * sizeof(float));
            memcpy(dx[k], m.x->grad, (size_t)n * sizeof(float));
            hpml_ctx_free(m.ctx);
        }
        for (int64_t j = 0; j < n; j++) scale = fmaxf(scale, fabsf(dx[0][j]));
        ENSURE(scale > 0);
        for (int64_t j = 0; j < n; j++) ENSURE_NEAR(dx[1][j], dx[0][j], (double)scale / 128);
        for (int k = 0; k < 2; k++) free(dx[k]);
    }
}

/* Layers without a name get the same default names in both layouts, so that a file of parameters fits both. */
TEST(layouts_name_parameters_alike)
{
    hpml_ctx *ctx[2];
    for (int nhwc = 0; nhwc < 2; nhwc++) {
        hpml_conv2d_desc c = { .kernel_h = 3 };
        ctx[nhwc] = hpml_ctx_create(NULL);
        hpml_tensor *h = hpml_to_layout(hpml_input_4d(ctx[nhwc], 2, 3, 9, 9), nhwc ? HPML_NHWC : HPML_NCHW);
        h = hpml_conv2d(hpml_batchnorm(hpml_conv2d(h, 4, &c), NULL), 4, &c);
        ENSURE(hpml_linear(hpml_flatten(h), 2, NULL));
    }
    ENSURE(hpml_param_count(ctx[0]) == hpml_param_count(ctx[1]) && hpml_param_count(ctx[0]) > 8);
    for (int i = 0; i < hpml_param_count(ctx[0]); i++)
        ENSURE(strcmp(hpml_param_at(ctx[0], i)->name, hpml_param_at(ctx[1], i)->name) == 0);
    for (int nhwc = 0; nhwc < 2; nhwc++) hpml_ctx_free(ctx[nhwc]);
}

/* Convolutions of random shapes. */
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
        t.layout    = draw[15] / 2 % 2 ? HPML_NHWC : HPML_NCHW;
        t.algorithm = draw[15] / 4 % 2 ? HPML_CONV_IM2COL : HPML_CONV_AUTO;
        t.workspace = t.algorithm == HPML_CONV_IM2COL && draw[15] / 8 % 2 ? 40000 : 0; /* one row takes at most 35 KB */
        d = conv_check(isas[i % ISAS], 1 + i % 2, &t, t.B, i % 3 == 0);
        if (!(d < 1e-4))
            printf("%s: B%d C%d %dx%d OC%d k%dx%d s%dx%d p%dx%d d%dx%d g%d: %g\n", isas[i % ISAS], (int)t.B, (int)t.C,
                   (int)t.H, (int)t.W, (int)t.OC, t.kh, t.kw, t.sh, t.sw, t.ph, t.pw, t.dh, t.dw, t.groups, d);
        ENSURE(d < 1e-4);
    }
}

/* Returns the FNV-1a hash of the bits of an array. */
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
    for (int i = 0; i < 4 * CONVOLUTIONS; i++) {
        convolution t = convolutions[i / 4];
        t.layout    = i % 2 ? HPML_NHWC : HPML_NCHW;
        t.algorithm = i % 4 < 2 ? HPML_CONV_AUTO : HPML_CONV_IM2COL;
        uint64_t h[3];
        for (int threads = 1; threads <= 3; threads++) {
            model m;
            memset(&m, 0, sizeof m);
            m.ctx = context(NULL, threads);
            m.x   = images(m.ctx, t.layout, t.B, t.C, t.H, t.W);
            m.y   = conv_record(m.x, &t);
            h[threads - 1] = model_hash(&m, true);
            hpml_ctx_free(m.ctx);
        }
        ENSURE(h[0] != 0 && h[0] == h[1] && h[0] == h[2]);
    }
}

/* Sums leave out the padding, and have the same bits as if its zeros were in the image: result and all gradients. */
TEST(conv_same_bits_with_zeros_around_the_image)
{
    for (int i = 0; i < ISAS * CONVOLUTIONS; i++) {
        convolution t = convolutions[i % CONVOLUTIONS];
        uint64_t    h[2] = { 0, 0 };
        const int32_t ph = t.ph, pw = t.pw;
        if (t.groups > 1) continue; /* groups of few channels are grids of images, whose order depends on their size */
        t.layout = HPML_NCHW, t.algorithm = HPML_CONV_AUTO;
        for (int zeros = 0; zeros < 2; zeros++) {
            model m;
            memset(&m, 0, sizeof m);
            m.ctx = context(isas[i / CONVOLUTIONS], 1);
            if (!m.ctx) continue;
            m.x = images(m.ctx, t.layout, t.B, t.C, t.H, t.W);
            if (zeros) t.ph = t.pw = 0;
            m.y = conv_record(zeros ? hpml_pad(hpml_pad(m.x, 2, ph, ph, 0), 3, pw, pw, 0) : m.x, &t);
            h[zeros] = model_hash(&m, true);
            hpml_ctx_free(m.ctx);
        }
        if (h[0] != h[1]) printf("%s, convolution %d\n", isas[i / CONVOLUTIONS], i % CONVOLUTIONS);
        ENSURE(h[0] == h[1]);
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

static hpml_tensor *small_net(hpml_tensor *x)
{
    hpml_conv2d_desc c = { .kernel_h = 3, .padding_h = 1 }, point = { .kernel_h = 1, .activation = HPML_ACT_RELU };
    hpml_norm_desc   relu = { .activation = HPML_ACT_RELU };
    hpml_tensor     *h = hpml_max_pool2d(hpml_batchnorm(hpml_conv2d(x, 8, &c), &relu), 2, 0, 0), *side[2];
    side[0] = hpml_add(h, hpml_conv2d(h, 8, &point)), side[1] = hpml_avg_pool2d(h, 3, 1, 1);
    h = hpml_concat(side, 2, h->layout == HPML_NHWC ? 3 : 1);
    return hpml_linear(hpml_flatten(hpml_relu(h)), 5, NULL);
}

/* Trains the same model in NCHW and in NHWC, fed by a loader that augments: the same parameters to begin with, nearly
   the same after some steps. */
TEST(a_model_trains_the_same_in_nchw_and_nhwc)
{
    float   *x = (float *)malloc(sizeof(float) * 64 * 3 * 12 * 12), *after[2];
    int32_t  y[64];
    uint64_t start[2];
    int64_t  n = 0;
    noise = 5; /* whatever tests ran before, because some data bring a relu so near to 0 that rounding decides */
    for (int64_t i = 0; i < 64 * 3 * 12 * 12; i++) x[i] = uniform();
    for (int i = 0; i < 64; i++) y[i] = i % 5;
    for (int k = 0; k < 2; k++) {
        hpml_ctx         *ctx  = context(NULL, 2);
        const int64_t     shape[3] = { 3, 12, 12 };
        hpml_dataset     *data = hpml_dataset_create(ctx, 64, HPML_DTYPE_F32, 3, shape, x, HPML_DTYPE_I32, 1, y);
        hpml_loader_desc  l    = { .augment = { .shift = 2, .flip = true } };
        hpml_trainer_desc d    = { .lr = 0.05f };
        hpml_fit_desc     f    = { .loader = &l };
        d.input  = hpml_input_4d(ctx, 16, 3, 12, 12);
        d.output = small_net(hpml_to_layout(d.input, layouts[k]));
        hpml_trainer *t = hpml_trainer_create(ctx, &d);
        hpml_param_init(ctx);
        start[k] = hpml_param_hash(ctx);
        ENSURE(hpml_trainer_fit(t, data, &f) == HPML_OK && hpml_trainer_fit(t, data, &f) == HPML_OK);
        after[k] = (float *)calloc((size_t)hpml_param_total(ctx), sizeof(float)), n = 0;
        for (int i = 0; i < hpml_param_count(ctx); i++) {
            hpml_tensor *p = hpml_param_at(ctx, i);
            if (p->param->buffer) continue;
            memcpy(after[k] + n, p->data, sizeof(float) * (size_t)hpml_tensor_count(p));
            n += hpml_tensor_count(p);
        }
        hpml_ctx_free(ctx);
    }
    ENSURE(start[0] == start[1]);
    for (int64_t i = 0; i < n; i++) ENSURE_NEAR(after[0][i], after[1][i], 1e-5);
    free(after[0]), free(after[1]), free(x);
}

TEST(invalid_layouts_are_errors)
{
    hpml_ctx        *ctx = context(NULL, 1);
    hpml_tensor     *x = hpml_input_4d(ctx, 2, 3, 6, 6), *y = images(ctx, HPML_NHWC, 2, 3, 6, 6);
    hpml_tensor     *flat = hpml_flatten(x);
    hpml_conv2d_desc c = { .kernel_h = 3, .name = "c", .workspace = 400 };
    const int64_t    shape[3] = { 3, 6, 6 }, other[3] = { 6, 6, 3 };
    float            v[2 * 108] = { 0 };
    ENSURE(hpml_to_layout(NULL, HPML_NHWC) == NULL && hpml_tensor_set_layout(NULL, HPML_NHWC) == HPML_ERR_ARGUMENT);
    ENSURE(hpml_to_layout(y, HPML_NHWC) == y && hpml_to_layout(y, HPML_NCHW)->shape[1] == 3);
    ENSURE(hpml_relu(y)->layout == HPML_NHWC && hpml_reshape_4d(y, 2, 3, 6, 6)->layout == HPML_NCHW);
    ENSURE_ERROR(ctx, !hpml_to_layout(flat, HPML_NHWC), HPML_ERR_SHAPE, "4 dimensions");
    ENSURE_ERROR(ctx, !hpml_to_layout(x, (hpml_layout)2), HPML_ERR_SHAPE, "layout 2");
    ENSURE_ERROR(ctx, hpml_tensor_set_layout(x, HPML_NHWC), HPML_ERR_STATE, "an op reads it already");
    ENSURE_ERROR(ctx, !hpml_add(hpml_relu(x), hpml_permute(y, (int[]){ 0, 3, 1, 2 })) ||
                 !hpml_add(hpml_input_4d(ctx, 2, 6, 6, 3), y), HPML_ERR_SHAPE, "one is NCHW, one NHWC");
    ENSURE_ERROR(ctx, !hpml_conv2d(x, 4, &c), HPML_ERR_ARGUMENT, "\"c\": workspace of 400 bytes; direct needs");
    c.workspace = 3 * 9 * 4 * 4;
    ENSURE(hpml_conv2d(x, 4, &c)->node->attr.conv.algorithm == HPML_CONV_IM2COL);
    c.algorithm = HPML_CONV_DIRECT, c.name = "d";
    ENSURE_ERROR(ctx, !hpml_conv2d(x, 4, &c), HPML_ERR_ARGUMENT, "im2col at least 432: raise");
    c.algorithm = (hpml_conv_algorithm)3;
    ENSURE_ERROR(ctx, !hpml_conv2d(x, 4, &c), HPML_ERR_ARGUMENT, "no algorithm 3");
    for (int k = 0; k < 2; k++) { /* samples in another order; samples that a loader would shift by the wrong sides */
        hpml_loader_desc  l = { .augment = { .shift = k } };
        const int64_t    *sides = k ? other : shape;
        hpml_dataset     *data = hpml_dataset_create(ctx, 2, HPML_DTYPE_F32, 3, sides, v, HPML_DTYPE_F32, 108, v);
        hpml_trainer_desc d = { .loss = HPML_LOSS_MSE };
        hpml_fit_desc     f = { .loader = &l };
        d.input  = images(ctx, HPML_NHWC, 2, 3, 6, 6);
        d.output = hpml_linear(hpml_flatten(d.input), 108, NULL);
        hpml_trainer *t = hpml_trainer_create(ctx, &d);
        ENSURE_ERROR(ctx, hpml_trainer_fit(t, data, &f), HPML_ERR_SHAPE, "is NHWC, a sample of the data is");
    }
    hpml_ctx_free(ctx);
}

typedef struct pooling { int64_t B, C, H, W; int32_t kernel, stride, padding; } pooling;

static hpml_tensor *pool_record(hpml_tensor *x, const pooling *t, int kind)
{
    if (kind == 0) return hpml_max_pool2d(x, t->kernel, t->stride, t->padding);
    return kind == 1 ? hpml_avg_pool2d(x, t->kernel, t->stride, t->padding) : hpml_global_avg_pool2d(x);
}

static double pool_check(const char *isa, int threads, const pooling *t, hpml_layout layout, int kind)
{
    model   m;
    double *y, *dx, worst = 1e9;
    int64_t stride = t->stride ? t->stride : t->kernel, OH, OW;
    memset(&m, 0, sizeof m);
    m.ctx = context(isa, threads);
    if (!m.ctx) return 0;
    m.x = images(m.ctx, layout, t->B, t->C, t->H, t->W);
    m.y = pool_record(m.x, t, kind);
    if (!model_make(&m)) return worst;
    for (int64_t i = 0; i < hpml_tensor_count(m.x); i += 3) m.x->data[i] = 0.25f; /* ties */
    hpml_graph_forward(m.g, true, 1);
    hpml_graph_backward(m.g, 1, false);
    y = zeros(hpml_tensor_count(m.y)), dx = zeros(hpml_tensor_count(m.x));
    OH = kind == 2 ? 1 : m.y->shape[layout == HPML_NHWC ? 1 : 2];
    OW = kind == 2 ? 1 : m.y->shape[layout == HPML_NHWC ? 2 : 3];
    float *xs = in_order(m.x, m.x->data), *rs = in_order(m.r, m.r->data);
    float *ys = in_order(m.y, m.y->data), *dxs = in_order(m.x, m.x->grad);
    for (int64_t p = 0; p < t->B * t->C; p++)
        for (int64_t o = 0; o < OH * OW; o++) {
            const float *x = xs + p * t->H * t->W;
            double       sum = 0, best = -1e30, dy = (double)rs[p * OH * OW + o];
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
        worst = fmax(distance(ys, y, hpml_tensor_count(m.y)), distance(dxs, dx, hpml_tensor_count(m.x)));
    free(y), free(dx), free(xs), free(rs), free(ys), free(dxs);
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
            for (int kind = 0; kind < 6; kind++) {
                double d = pool_check(isas[isa], 1 + i % 3, &poolings[i], layouts[kind / 3], kind % 3);
                if (!(d < 1e-5)) printf("%s, pooling %d, kind %d: %g\n", isas[isa], i, kind, d);
                ENSURE(d < 1e-5);
            }
}

/* The maximum of a window with a NaN is NaN, so that errors are not hidden. */
TEST(pool_keeps_nan)
{
    for (int isa = 0; isa < ISAS; isa++)
        for (int64_t at = 0; at < 64; at += 7) {
            for (int32_t k = 4; k < 8; k++) {
                int32_t kernel = k / 2;
                model m;
                bool  found = false;
                memset(&m, 0, sizeof m);
                m.ctx = context(isas[isa], 1);
                if (!m.ctx) break;
                m.x = images(m.ctx, layouts[k % 2], 1, 1, 8, 8);
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

/* Graphs that predict have the same maxima, also where these are NaN, and no memory for the places of maxima. */
TEST(pool_predicts_the_same_in_less_memory)
{
    for (int i = 0; i < ISAS * POOLINGS * 2; i++) {
        const pooling *t = &poolings[i / 2 % POOLINGS];
        hpml_memory    memory[2] = { { 0 } };
        uint64_t       h[2] = { 0, 0 };
        size_t         places = 0;
        for (int predicts = 0; predicts < 2; predicts++) {
            hpml_ctx *ctx = context(isas[i / 2 / POOLINGS], 1 + i % 3);
            if (!ctx) continue;
            hpml_tensor    *x = images(ctx, layouts[i % 2], t->B, t->C, t->H, t->W);
            hpml_tensor    *y = hpml_max_pool2d(x, t->kernel, t->stride, t->padding);
            hpml_graph_desc d = { .output_count = 1, .outputs = &y, .predict = predicts };
            hpml_graph     *g = hpml_graph_create(ctx, &d);
            hpml_graph_memory(g, &memory[predicts]);
            ENSURE(hpml_graph_alloc(g) == HPML_OK);
            noise = 3;
            randomize(x->data, hpml_tensor_count(x));
            for (int64_t k = 0; k < hpml_tensor_count(x); k += 17) x->data[k] = (float)NAN;
            ENSURE(hpml_graph_forward(g, false, 0) == HPML_OK);
            places      = sizeof(int32_t) * (size_t)hpml_tensor_count(y);
            h[predicts] = hash(1, y->data, hpml_tensor_count(y));
            hpml_ctx_free(ctx);
        }
        ENSURE(h[0] == h[1] && memory[1].activations + places <= memory[0].activations);
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

/* Checks the result, the gradients and the running statistics of one batch normalization, in training or evaluation. */
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
    for (int64_t i = 0; i < count; i++) m.x->data[i] = 3 + 2 * m.x->data[i]; /* a mean other than 0 */
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
    for (int i = 0; i < NORMS + 6 * POOLINGS; i++) {
        uint64_t h[3];
        for (int threads = 1; threads <= 3; threads++) {
            model m;
            memset(&m, 0, sizeof m);
            m.ctx = context(NULL, threads);
            if (i < NORMS) m.y = norm_record(m.ctx, &norms[i], &m.x);
            else {
                const pooling *t = &poolings[(i - NORMS) / 6];
                m.x = images(m.ctx, layouts[(i - NORMS) % 6 / 3], t->B, t->C, t->H, t->W);
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

/* A network for the tests of graphs that predict: in this order a convolution, perhaps other readers of its result, a
   batchnorm, and a convolution with relu that no batchnorm follows. */
typedef struct net {
    int  C, size, out, kernel, stride, dilation, groups;
    bool bias, affine, relu;
    hpml_conv_algorithm algorithm;
    int  act;    /* of the first convolution */
    int  layout; /* of the images */
    int  other;  /* 1: another op reads the first convolution's result; 2: the result is an output; 3: two batchnorms */
} net;
static const net nets[] = {
    { 3, 20, 40, 3, 1, 1, 1, false, true, true, HPML_CONV_AUTO, 0, 0, 0 },
    { 5, 6, 37, 3, 1, 1, 1, true, true, false, HPML_CONV_AUTO, 0, 0, 0 },
    { 19, 7, 64, 3, 2, 1, 1, true, false, true, HPML_CONV_AUTO, 0, 0, 0 },
    { 8, 9, 33, 3, 1, 2, 1, false, true, true, HPML_CONV_AUTO, 0, 0, 0 },
    { 8, 9, 33, 3, 2, 2, 1, false, true, true, HPML_CONV_AUTO, 0, 0, 0 },
    { 6, 5, 18, 1, 1, 1, 1, true, true, true, HPML_CONV_AUTO, 0, 0, 0 },
    { 6, 5, 35, 1, 2, 1, 1, false, true, false, HPML_CONV_AUTO, 0, 0, 0 },
    { 8, 8, 12, 3, 1, 1, 4, true, true, true, HPML_CONV_AUTO, 0, 0, 0 },
    { 68, 6, 68, 3, 1, 1, 2, true, true, true, HPML_CONV_AUTO, 0, 0, 0 },
    { 9, 8, 9, 3, 1, 1, 9, false, true, true, HPML_CONV_AUTO, 0, 0, 0 },
    { 9, 8, 18, 3, 2, 1, 9, true, true, true, HPML_CONV_AUTO, 0, 0, 0 },
    { 32, 6, 32, 3, 1, 1, 32, false, true, true, HPML_CONV_AUTO, 0, 0, 0 },
    { 16, 4, 16, 3, 1, 1, 16, true, true, false, HPML_CONV_AUTO, 0, 0, 0 },
    { 16, 7, 16, 3, 2, 1, 16, true, true, true, HPML_CONV_AUTO, 0, 0, 0 },
    { 48, 8, 48, 5, 3, 1, 48, true, false, true, HPML_CONV_AUTO, 0, 0, 0 },
    { 5, 6, 17, 3, 1, 1, 1, true, true, true, HPML_CONV_IM2COL, 0, 0, 0 },
    { 10, 6, 10, 5, 1, 1, 5, true, true, true, HPML_CONV_IM2COL, 0, 0, 0 },
    { 4, 6, 35, 3, 1, 1, 1, true, true, true, HPML_CONV_AUTO, 0, 1, 0 },
    { 4, 6, 35, 3, 1, 1, 1, true, true, true, HPML_CONV_AUTO, HPML_ACT_RELU, 0, 0 },
    { 4, 6, 35, 3, 1, 1, 1, true, true, true, HPML_CONV_AUTO, HPML_ACT_TANH, 0, 0 },
    { 4, 6, 35, 3, 1, 1, 1, true, true, true, HPML_CONV_AUTO, 0, 0, 1 },
    { 4, 6, 35, 3, 1, 1, 1, true, true, true, HPML_CONV_AUTO, 0, 0, 2 },
    { 4, 6, 35, 3, 1, 1, 1, true, true, true, HPML_CONV_AUTO, 0, 0, 3 },
    { 12, 8, 40, 1, 1, 1, 2, true, true, true, HPML_CONV_AUTO, 0, 0, 0 },
    { 33, 8, 40, 1, 1, 1, 1, false, true, true, HPML_CONV_AUTO, 0, 1, 0 },
    { 12, 9, 40, 1, 1, 1, 1, true, true, true, HPML_CONV_AUTO, HPML_ACT_RELU, 0, 1 },
    { 12, 8, 40, 1, 1, 1, 1, true, true, true, HPML_CONV_IM2COL, 0, 0, 0 },
    { 12, 8, 12, 1, 1, 1, 12, true, true, true, HPML_CONV_AUTO, 0, 0, 0 },
};
#define NETS ((int)(sizeof nets / sizeof nets[0]))

/* A network, its input and the graph that computes y, with parameters and images that depend on `noise` alone. */
typedef struct netted {
    hpml_ctx    *ctx;
    hpml_graph  *g;
    hpml_tensor *x, *y;
    hpml_memory  memory;
} netted;

static netted net_make(hpml_ctx *ctx, const net *n, int64_t batch, bool predict)
{
    netted           m;
    hpml_conv2d_desc c;
    hpml_norm_desc   b;
    hpml_graph_desc  d;
    hpml_tensor     *z, *out[2];
    memset(&c, 0, sizeof c), memset(&b, 0, sizeof b), memset(&d, 0, sizeof d), memset(&m, 0, sizeof m);
    m.ctx        = ctx;
    m.x          = images(ctx, layouts[n->layout], batch, n->C, n->size, n->size);
    c.kernel_h   = n->kernel, c.stride_h = n->stride, c.dilation_h = n->dilation, c.groups = n->groups;
    c.padding_h  = n->kernel / 2, c.no_bias = !n->bias, c.algorithm = n->algorithm, c.activation = (hpml_act)n->act;
    b.no_affine  = !n->affine;
    b.activation = n->relu ? HPML_ACT_RELU : HPML_ACT_NONE;
    z            = hpml_conv2d(m.x, n->out, &c);
    m.y          = hpml_batchnorm(z, &b);
    if (n->other == 1) m.y = hpml_add(m.y, z);
    if (n->other == 3) m.y = hpml_add(m.y, hpml_batchnorm(z, &b));
    memset(&c, 0, sizeof c);
    c.kernel_h = 3, c.padding_h = 1, c.activation = HPML_ACT_RELU;
    m.y = hpml_conv2d(m.y, 20, &c);
    out[0] = m.y, out[1] = z;
    d.outputs = out, d.output_count = n->other == 2 ? 2 : 1, d.predict = predict;
    m.g = hpml_graph_create(ctx, &d);
    hpml_graph_memory(m.g, &m.memory);
    if (hpml_graph_alloc(m.g) != HPML_OK) return m;
    noise = 11;
    randomize(m.x->data, hpml_tensor_count(m.x));
    for (int i = 0; i < hpml_param_count(ctx); i++) {
        hpml_tensor *p = hpml_param_at(ctx, i);
        randomize(p->data, hpml_tensor_count(p));
        for (int64_t j = 0; p->ndim == 1 && j < hpml_tensor_count(p); j++) p->data[j] = 0.7f + 0.4f * p->data[j];
    }
    return m;
}

/* Returns the largest difference of the two results, divided by the largest number. */
static double net_distance(const netted *a, const netted *b)
{
    double  worst = 0, most = 1e-30;
    int64_t n = hpml_tensor_count(b->y);
    if (hpml_ctx_status(a->ctx) != HPML_OK || hpml_ctx_status(b->ctx) != HPML_OK) return 1;
    for (int64_t i = 0; i < n; i++) most = fmax(most, fabs((double)b->y->data[i]));
    for (int64_t i = 0; i < n; i++) {
        double e = fabs((double)a->y->data[i] - (double)b->y->data[i]) / most;
        if (!(e <= worst)) worst = e;
    }
    return worst;
}

TEST(predict_equals_plain_graphs)
{
    for (int i = 0; i < 2 * ISAS * NETS; i++) {
        const int   threads = 1 + i % 3, planned = i < ISAS * NETS ? 3 : 1; /* images */
        const char *isa = isas[i / NETS % ISAS];
        const net  *n = &nets[i % NETS];
        hpml_ctx   *ctx[2] = { context(isa, threads), context(isa, threads) };
        if (ctx[0]) {
            netted a = net_make(ctx[0], n, planned, true), b = net_make(ctx[1], n, planned, false);
            for (int pass = 0; pass < 3; pass++) {
                if (planned == 3) hpml_graph_set_batch(a.g, 3 - pass), hpml_graph_set_batch(b.g, 3 - pass);
                hpml_graph_forward(a.g, false, 0), hpml_graph_forward(b.g, false, 0);
                double d = net_distance(&a, &b);
                if (!(d < 1e-5)) printf("%s, net %d of %d, pass %d: %g\n", isa, i % NETS, planned, pass, d);
                ENSURE(d < 1e-5);
                for (int64_t k = 0; k < hpml_tensor_count(a.x); k++) a.x->data[k] = b.x->data[k] *= 0.9f;
            }
            ENSURE(hpml_graph_backward(a.g, 1, false) == HPML_ERR_STATE);
        }
        hpml_ctx_free(ctx[0]), hpml_ctx_free(ctx[1]);
    }
}

TEST(predict_same_bits_at_any_thread_count)
{
    for (int i = 0; i < NETS; i++) {
        float first[2 * 20 * 400];
        for (int threads = 1; threads <= 3; threads++) {
            hpml_ctx *ctx = context(NULL, threads);
            netted    m   = net_make(ctx, &nets[i], 2, true);
            ENSURE(hpml_graph_forward(m.g, false, 0) == HPML_OK);
            size_t bytes = (size_t)hpml_tensor_count(m.y) * sizeof(float);
            ENSURE(bytes <= sizeof first);
            if (threads == 1) memcpy(first, m.y->data, bytes);
            ENSURE(memcmp(first, m.y->data, bytes) == 0);
            hpml_ctx_free(ctx);
        }
    }
}

/* The memory plan: packed weights and a stamp for each convolution, and with a folded batchnorm its scale and bias. */
TEST(predict_memory)
{
    static const net n = { 8, 6, 40, 3, 1, 1, 1, true, true, true, HPML_CONV_AUTO, 0, 0, 0 };
    hpml_ctx *ctx[2] = { context(NULL, 1), context(NULL, 1) };
    netted    plain  = net_make(ctx[0], &n, 4, false);
    size_t    before = hpml_ctx_bytes(ctx[1]);
    netted    lean   = net_make(ctx[1], &n, 4, true);
    const hpml_memory *m = &lean.memory;
    ENSURE(plain.memory.packed == 0 && m->gradients == 0 && m->parameters == plain.memory.parameters);
    ENSURE(m->packed == sizeof(float) * (16 + 2 * 48 + 9 * 8 * 64 + 16 + 9 * 40 * 32));
    ENSURE(m->total == m->parameters + m->activations + m->scratch + m->packed + m->products);
    ENSURE(m->scratch < plain.memory.scratch / 2 && m->unshared < plain.memory.unshared);
    ENSURE(m->activations < plain.memory.activations);
    ENSURE(hpml_ctx_bytes(ctx[1]) >= before + m->total && hpml_ctx_bytes(ctx[1]) < before + m->total + 24000);
    before = hpml_ctx_bytes(ctx[1]);
    ENSURE(hpml_graph_forward(lean.g, false, 0) == HPML_OK && hpml_ctx_bytes(ctx[1]) == before);
    hpml_ctx_free(ctx[0]), hpml_ctx_free(ctx[1]);
}

/* Im2col in groups of few channels has the scratch memory that it needs, which is more than the grids would need. */
TEST(predict_with_columns_in_groups_has_its_scratch_memory)
{
    hpml_ctx        *ctx = context(NULL, 1);
    hpml_conv2d_desc c;
    hpml_graph_desc  d;
    hpml_memory      m;
    memset(&c, 0, sizeof c), memset(&d, 0, sizeof d);
    c.kernel_h = 4, c.padding_h = 4, c.padding_w = 5, c.dilation_w = 3, c.groups = 5, c.algorithm = HPML_CONV_IM2COL;
    hpml_tensor *y = hpml_conv2d(hpml_input_4d(ctx, 1, 5, 3, 11), 5, &c);
    d.outputs = &y, d.output_count = 1, d.predict = true;
    hpml_graph *g = hpml_graph_create(ctx, &d);
    hpml_graph_memory(g, &m);
    ENSURE(y->node->scratch_bytes > 0 && m.scratch >= y->node->scratch_bytes);
    ENSURE(hpml_graph_forward(g, false, 0) == HPML_OK);
    hpml_ctx_free(ctx);
}

/* Two networks with the same parameters, of which the first predicts with kept weights. */
typedef struct twins {
    netted kept, plain;
    double last; /* the sum of the result's numbers */
} twins;

static double net_sum(const netted *m)
{
    double sum = 0;
    for (int64_t i = 0; i < hpml_tensor_count(m->y); i++) sum += (double)m->y->data[i];
    return sum;
}

/* Copies all parameters to the plain network. True if both then have the same result, other than before. */
static bool twins_moved(twins *t)
{
    double was = t->last;
    for (int i = 0; i < hpml_param_count(t->plain.ctx); i++) {
        const hpml_tensor *from = hpml_param_at(t->kept.ctx, i);
        memcpy(hpml_param_at(t->plain.ctx, i)->data, from->data, (size_t)hpml_tensor_count(from) * sizeof(float));
    }
    hpml_graph_forward(t->kept.g, false, 0), hpml_graph_forward(t->plain.g, false, 0);
    t->last = net_sum(&t->kept);
    return net_distance(&t->kept, &t->plain) < 1e-5 && t->last != was;
}

static const net twin = { 4, 6, 32, 3, 1, 1, 1, true, true, false, HPML_CONV_AUTO, 0, 0, 0 };
static bool twins_make(twins *t)
{
    t->kept  = net_make(context(NULL, 1), &twin, 1, true);
    t->plain = net_make(context(NULL, 1), &twin, 1, false);
    t->last  = -1;
    return twins_moved(t);
}

TEST(predict_notices_writes)
{
    twins t;
    float values[4 * 32 * 9];
    ENSURE(twins_make(&t));
    hpml_ctx    *ctx = t.kept.ctx;
    hpml_tensor *w = hpml_param_find(ctx, "conv0.weight"), *b = hpml_param_find(ctx, "conv0.bias");
    hpml_tensor *one = hpml_tensor_create_1d(ctx, 32);
    ENSURE(w && b && one);
    ENSURE(!twins_moved(&t)); /* nothing has changed */
    randomize(values, 4 * 32 * 9);
    ENSURE(hpml_tensor_set(w, values, 4 * 32 * 9) == HPML_OK && twins_moved(&t));
    for (int i = 0; i < hpml_param_count(ctx); i++) { /* weight, bias; gamma, beta, mean, variance; weight, bias */
        hpml_tensor *p = hpml_param_at(ctx, i);
        size_t       n = (size_t)hpml_tensor_count(p);
        float       *x = (float *)malloc(n * sizeof *x);
        for (size_t k = 0; k < n; k++) x[k] = 0.9f * p->data[k] + 0.1f;
        ENSURE(hpml_tensor_set_raw(p, x, n * sizeof *x) == HPML_OK && twins_moved(&t));
        free(x);
    }
    for (int k = 0; k < 32; k++) one->data[k] = 0.25f * (float)k;
    ENSURE(hpml_tensor_copy(b, one) == HPML_OK && twins_moved(&t));
    for (int k = 0; k < 36; k++) values[k] = 1 - values[k];
    hpml_tensor *view = hpml_view_slice(hpml_view_reshape(w, 2, (const int64_t[2]){ 32, 36 }), 0, 0, 1);
    ENSURE(hpml_tensor_set(view, values, 36) == HPML_OK && twins_moved(&t));
    w->data[0] += 1;
    hpml_tensor_changed(one), hpml_tensor_changed(t.kept.x), hpml_tensor_set(one, values, 32); /* not parameters */
    hpml_graph_forward(t.kept.g, false, 0);
    ENSURE(net_sum(&t.kept) == t.last); /* as documented: the write is not known yet */
    ENSURE(hpml_tensor_changed(w) == HPML_OK && twins_moved(&t));
    w->data[3] += 1;
    ENSURE(hpml_tensor_changed(view) == HPML_OK && twins_moved(&t));
    hpml_ctx_free(t.kept.ctx), hpml_ctx_free(t.plain.ctx);
}

TEST(predict_notices_files)
{
    twins t, other;
    ENSURE(twins_make(&t) && twins_make(&other));
    hpml_tensor *w = hpml_param_find(other.kept.ctx, "conv0.weight");
    randomize(w->data, hpml_tensor_count(w));
    ENSURE(hpml_params_save(other.kept.ctx, "build/predict.safetensors", HPML_DTYPE_F32) == HPML_OK);
    ENSURE(hpml_params_load(t.kept.ctx, "build/predict.safetensors") == HPML_OK && twins_moved(&t));
    remove("build/predict.safetensors");
    hpml_ctx_free(t.kept.ctx), hpml_ctx_free(t.plain.ctx);
    hpml_ctx_free(other.kept.ctx), hpml_ctx_free(other.plain.ctx);
}

/* A graph that trains shares the convolution's weight with the graph that predicts. */
TEST(predict_notices_training)
{
    twins             t;
    hpml_trainer_desc d;
    int64_t           floats = 0;
    float             in[2 * 36], target[2 * 32];
    ENSURE(twins_make(&t));
    hpml_ctx    *ctx = t.kept.ctx;
    hpml_tensor *w = hpml_param_find(ctx, "conv0.weight");
    memset(&d, 0, sizeof d);
    d.input  = hpml_input_2d(ctx, 2, 36);
    d.output = hpml_matmul(d.input, hpml_reshape_2d(w, 36, 32), false, false);
    d.loss = HPML_LOSS_MSE, d.lr = 0.1f;
    hpml_trainer *trainer = hpml_trainer_create(ctx, &d);
    randomize(in, 2 * 36), randomize(target, 2 * 32);
    ENSURE(!twins_moved(&t));
    for (int i = 0; i < 3; i++) ENSURE(hpml_trainer_step(trainer, in, target, 2, NULL) == HPML_OK && twins_moved(&t));
    ENSURE(!twins_moved(&t));
    ENSURE(hpml_checkpoint_save(trainer, "build/predict.checkpoint") == HPML_OK);
    ENSURE(hpml_trainer_apply(trainer, 0, hpml_param_count(ctx)) == HPML_OK && twins_moved(&t));
    ENSURE(hpml_trainer_apply_range(trainer, 0, 36 * 32, 0.5f) == HPML_OK && twins_moved(&t));
    ENSURE(hpml_checkpoint_load(trainer, "build/predict.checkpoint") == HPML_OK && twins_moved(&t));
    remove("build/predict.checkpoint");
    hpml_trainer_array(trainer, HPML_ARRAY_VALUES, &floats)[hpml_trainer_place(trainer, w->param->index)] += 1;
    ENSURE(floats >= 36 * 32 && twins_moved(&t));
    hpml_trainer_part(trainer, w->param->index, HPML_ARRAY_VALUES)[1] += 1;
    ENSURE(twins_moved(&t));
    hpml_ctx_free(t.kept.ctx), hpml_ctx_free(t.plain.ctx);
}

/* A trainer of two convolutions with a batchnorm between them, of up to 3 images. */
static hpml_trainer *kept_trainer(int threads, bool keep, hpml_memory *memory)
{
    hpml_ctx         *ctx = context(NULL, threads);
    hpml_trainer_desc d;
    hpml_conv2d_desc  c;
    memset(&d, 0, sizeof d), memset(&c, 0, sizeof c);
    c.kernel_h = 3, c.padding_h = 1;
    d.input  = hpml_input_4d(ctx, 3, 4, 6, 6);
    d.output = hpml_batchnorm(hpml_conv2d(d.input, 40, &c), NULL);
    c.groups = 2, c.name = "second";
    d.output = hpml_linear(hpml_reshape_2d(hpml_conv2d(d.output, 66, &c), 3, 66 * 36), 2, NULL);
    d.loss = HPML_LOSS_MSE, d.lr = 1e-4f, d.keep_packed = keep;
    if (hpml_trainer_memory(ctx, &d, memory) != HPML_OK) return NULL;
    return hpml_trainer_create(ctx, &d);
}

/* Trainers that keep packed weights and one that does not: the same bits, also after steps and writes. */
TEST(trainers_keep_packed_weights)
{
    float       in[5 * 144], target[3 * 2], out[2][5 * 2];
    hpml_memory m[2];
    randomize(in, 5 * 144), randomize(target, 3 * 2);
    for (int threads = 1; threads <= 3; threads += 2) {
        hpml_trainer *t[2] = { kept_trainer(threads, false, &m[0]), kept_trainer(threads, true, &m[1]) };
        ENSURE(t[0] && t[1] && m[0].packed == 0 && m[0].scratch == m[1].scratch);
        ENSURE(m[1].packed >= sizeof(float) * (16 + 9 * 4 * 40 + 16 + 9 * 20 * 66) && m[1].packed <= 400000);
        ENSURE(m[1].total - m[0].total == m[1].packed && m[0].activations == m[1].activations);
        size_t bytes = hpml_ctx_bytes(hpml_trainer_settings(t[1])->input->ctx);
        for (int round = 0; round < 4; round++)
            for (int samples = 1; samples <= 5; samples += 2) { /* of 5, in two batches */
                for (int i = 0; i < 2; i++) {
                    hpml_tensor *w = hpml_param_find(hpml_trainer_settings(t[i])->input->ctx, "second.weight");
                    if (samples == 3) ENSURE(hpml_trainer_step(t[i], in, target, 1 + round % 3, NULL) == HPML_OK);
                    w->data[round] += 0.5f;
                    ENSURE(hpml_tensor_changed(w) == HPML_OK);
                    ENSURE(hpml_trainer_predict(t[i], in, samples, out[i]) == HPML_OK);
                }
                ENSURE(memcmp(out[0], out[1], sizeof(float) * 2 * (size_t)samples) == 0);
            }
        hpml_tensor *w = hpml_param_find(hpml_trainer_settings(t[1])->input->ctx, "second.weight");
        ENSURE(hpml_ctx_bytes(w->ctx) == bytes);
        w->data[0] += 1; /* as documented: unknown until hpml_tensor_changed, because packed weights are kept */
        ENSURE(hpml_trainer_predict(t[1], in, 5, out[0]) == HPML_OK && memcmp(out[0], out[1], sizeof out[0]) == 0);
        ENSURE(hpml_tensor_changed(w) == HPML_OK && hpml_trainer_predict(t[1], in, 5, out[0]) == HPML_OK);
        ENSURE(memcmp(out[0], out[1], sizeof out[0]) != 0);
        for (int i = 0; i < 2; i++) hpml_ctx_free(hpml_trainer_settings(t[i])->input->ctx);
    }
}

/* Two graphs of one context predict from parameters that both read, and from their own. */
TEST(predict_two_graphs)
{
    twins            t;
    hpml_graph_desc  d;
    hpml_conv2d_desc c;
    ENSURE(twins_make(&t));
    hpml_tensor *w = hpml_param_find(t.kept.ctx, "conv0.weight"), *x = hpml_input_4d(t.kept.ctx, 1, 4, 3, 3), *y;
    memset(&d, 0, sizeof d), memset(&c, 0, sizeof c);
    c.kernel_h = 3, c.no_bias = true, c.name = "second";
    y = hpml_matmul(hpml_reshape_2d(hpml_conv2d(x, 32, &c), 1, 32), hpml_reshape_2d(w, 32, 36), false, false);
    d.outputs = &y, d.output_count = 1, d.predict = true;
    hpml_graph  *g = hpml_graph_create(t.kept.ctx, &d);
    ENSURE(hpml_graph_alloc(g) == HPML_OK);
    hpml_tensor *second = hpml_param_find(t.kept.ctx, "second.weight");
    float        ones[4 * 9 * 32];
    for (int i = 0; i < 36; i++) x->data[i] = 1;
    for (int round = 1; round < 4; round++) {
        for (int i = 0; i < 36 * 32; i++) ones[i] = (float)round;
        ENSURE(hpml_tensor_set(round == 2 ? second : w, ones, 36 * 32) == HPML_OK);
        ENSURE(hpml_graph_forward(g, false, 0) == HPML_OK);
        double sum = 0;
        for (int i = 0; i < 36 * 32; i++) sum += (double)second->data[i] * (double)w->data[0];
        ENSURE_NEAR(y->data[5], sum, 1e-4 * fabs(sum) + 1e-2);
        ENSURE(round == 2 || twins_moved(&t));
    }
    hpml_ctx_free(t.kept.ctx), hpml_ctx_free(t.plain.ctx);
}

TEST(predict_in_halves)
{
    float    y[2][2 * 20 * 36];
    for (int predict = 0; predict < 2; predict++) {
        hpml_ctx_desc d;
        memset(&d, 0, sizeof d);
        d.activation_dtype = HPML_DTYPE_BF16;
        hpml_ctx *ctx = hpml_ctx_create(&d);
        netted    m   = net_make(ctx, &nets[1], 2, predict != 0);
        ENSURE(hpml_graph_forward(m.g, false, 0) == HPML_OK && m.memory.packed == 0);
        ENSURE(hpml_tensor_get(m.y, y[predict], hpml_tensor_count(m.y)) == HPML_OK);
        hpml_ctx_free(ctx);
    }
    ENSURE(memcmp(y[0], y[1], sizeof y[0]) == 0);
}

TEST(predict_errors)
{
    hpml_ctx       *ctx = context(NULL, 1);
    hpml_graph_desc d;
    hpml_tensor    *y = hpml_linear(hpml_input_2d(ctx, 2, 3), 4, NULL), *loss = hpml_mean(y, HPML_ALL_DIMS);
    memset(&d, 0, sizeof d);
    ENSURE(hpml_tensor_changed(NULL) == HPML_ERR_ARGUMENT);
    d.outputs = &y, d.output_count = 1, d.loss = loss, d.predict = true;
    ENSURE_ERROR(ctx, !hpml_graph_create(ctx, &d), HPML_ERR_ARGUMENT, "name the loss among the outputs");
    d.loss = NULL;
    hpml_graph *g = hpml_graph_create(ctx, &d);
    ENSURE_ERROR(ctx, hpml_graph_part(g, 0, 1, 2, 1) != HPML_OK, HPML_ERR_UNSUPPORTED, "runs as a whole");
    ENSURE_ERROR(ctx, hpml_graph_forward(g, true, 0) != HPML_OK, HPML_ERR_STATE, "only evaluate");
    ENSURE(hpml_graph_forward(g, false, 0) == HPML_OK && hpml_tensor_changed(y) == HPML_OK);
    hpml_ctx_free(ctx);
}
