/* Every op against plain loops in double: values, and gradients against central differences of those loops, on every
   set of kernels, at odd shapes: 1, primes, longer than a block of the cache. The loops walk the recorded nodes. */
#include "../hpml.h"
#include "test.h"
#include "op_cases.h"

enum { NODES = 64, LEAVES = 32, SAMPLES = 8 };
typedef struct world { /* a graph whose values are computed in double */
    hpml_profile_row   row[NODES];
    double            *made[NODES], *leaf[LEAVES]; /* values of results; of inputs and parameters */
    const hpml_tensor *of[LEAVES];
    int                nodes, leaves;
} world;

static double *value(world *w, const hpml_tensor *t)
{
    for (int i = 0; t && i < w->nodes; i++)
        if (w->row[i].node->out == t) return w->made[i];
    for (int i = 0; t && i < w->leaves; i++)
        if (w->of[i] == t) return w->leaf[i];
    return NULL;
}

static void add_leaf(world *w, const hpml_tensor *t)
{
    int64_t n = hpml_tensor_count(t);
    void   *x = malloc((size_t)n * 4);
    double *v = (double *)malloc((size_t)n * sizeof(double));
    hpml_tensor_get_raw(t, x, (size_t)n * 4);
    for (int64_t i = 0; i < n; i++) v[i] = t->dtype == HPML_DTYPE_I32 ? ((int32_t *)x)[i] : (double)((float *)x)[i];
    free(x);
    w->of[w->leaves] = t, w->leaf[w->leaves++] = v;
}

static void open_world(world *w, hpml_graph *g)
{
    memset(w, 0, sizeof *w);
    hpml_profile_enable(g, true);
    w->nodes = hpml_profile(g, w->row, NODES);
    for (int i = 0; i < w->nodes; i++) {
        const hpml_node *n = w->row[i].node;
        for (int s = 0; s < n->src_count; s++)
            if (n->src[s] && !n->src[s]->node && !value(w, n->src[s])) add_leaf(w, n->src[s]);
        w->made[i] = (double *)malloc((size_t)hpml_tensor_count(n->out) * sizeof(double));
    }
}

static void close_world(world *w)
{
    for (int i = 0; i < w->nodes; i++) free(w->made[i]);
    for (int i = 0; i < w->leaves; i++) free(w->leaf[i]);
}

/* split: element number f of y as indices. place: the number of the element at these indices in t, whose dimensions are
   matched from the last. */
static void split(const hpml_tensor *y, int64_t f, int64_t *at)
{
    for (int d = y->ndim - 1; d >= 0; d--) at[d] = f % y->shape[d], f /= y->shape[d];
}

static int64_t place(const hpml_tensor *t, const int64_t *at, int ndim)
{
    int64_t f = 0;
    for (int d = 0; d < t->ndim; d++) f = f * t->shape[d] + (t->shape[d] > 1 ? at[d + ndim - t->ndim] : 0);
    return f;
}

static double act(hpml_act a, double x, double slope)
{
    switch (a) {
    case HPML_ACT_RELU: return x > 0 ? x : 0;
    case HPML_ACT_LEAKY_RELU: return x > 0 ? x : slope * x;
    case HPML_ACT_GELU: return x / 2 * (1 + tanh(sqrt(2 / 3.14159265358979323846) * (x + 0.044715 * x * x * x)));
    case HPML_ACT_GELU_ERF: return x / 2 * (1 + erf(x / sqrt(2)));
    case HPML_ACT_SILU: return x / (1 + exp(-x));
    case HPML_ACT_SIGMOID: return 1 / (1 + exp(-x));
    case HPML_ACT_TANH: return tanh(x);
    case HPML_ACT_EXP: return exp(x);
    case HPML_ACT_LOG: return log(x);
    case HPML_ACT_SQRT: return sqrt(x);
    case HPML_ACT_SQUARE: return x * x;
    case HPML_ACT_NEG: return -x;
    case HPML_ACT_ABS: return fabs(x);
    case HPML_ACT_NONE: break;
    }
    return x;
}

/* Products, with the sources' values s[]. */
static void matmul(const hpml_node *n, double **s, double *y)
{
    const hpml_tensor *a = n->src[0], *b = n->src[1];
    bool    ta = n->attr.matmul.trans_a, tb = n->attr.matmul.trans_b;
    int64_t M = n->out->shape[n->out->ndim - 2], N = n->out->shape[n->out->ndim - 1];
    int64_t K = a->shape[a->ndim - (ta ? 2 : 1)];
    for (int64_t i = 0; i < hpml_tensor_count(n->out); i++) {
        int64_t batch = i / (M * N), r = i / N % M, c = i % N;
        const double *x = s[0] + batch * M * K, *w = s[1] + (b->ndim == 2 ? 0 : batch * K * N);
        for (int64_t k = y[i] = 0; k < K; k++)
            y[i] += (ta ? x[k * M + r] : x[r * K + k]) * (tb ? w[c * K + k] : w[k * N + c]);
    }
}

static void linear(const hpml_node *n, double **s, double *y)
{
    int64_t K = n->src[1]->shape[1], N = n->src[1]->shape[0];
    for (int64_t i = 0; i < hpml_tensor_count(n->out); i++) {
        double v = s[2] ? s[2][i % N] : 0;
        for (int64_t k = 0; k < K; k++) v += s[0][i / N * K + k] * s[1][i % N * K + k];
        y[i] = act(n->attr.act.act, v, (double)n->attr.act.slope);
    }
}

/* Convolution and pooling: a loop over the windows; pooling has no weights. */
static void windows(const hpml_node *n, double **s, double *y)
{
    const hpml_tensor *x = n->src[0];
    const int32_t *k = n->attr.conv.kernel, *stride = n->attr.conv.stride;
    const int32_t *pad = n->attr.conv.padding, *dil = n->attr.conv.dilation;
    bool    conv = n->op == HPML_OP_CONV2D;
    bool    last = x->layout == HPML_NHWC; /* channels are the last dimension */
    int64_t C = x->shape[last ? 3 : 1], H = x->shape[last ? 1 : 2], W = x->shape[last ? 2 : 3];
    int64_t O = n->out->shape[last && n->out->ndim == 4 ? 3 : 1], cg = conv ? C / n->attr.conv.groups : 1, at[5];
    for (int64_t i = 0; i < hpml_tensor_count(n->out); i++) {
        split(n->out, i, at);
        bool    turned = last && n->out->ndim == 4;
        int64_t o = at[turned ? 3 : 1], row = n->out->ndim == 2 ? 0 : at[turned ? 1 : 2];
        int64_t col = n->out->ndim == 2 ? 0 : at[turned ? 2 : 3];
        double  sum = conv && s[2] ? s[2][o] : 0, most = -1e300;
        int64_t seen = 0, first = conv ? o / (O / n->attr.conv.groups) * cg : o;
        for (int64_t c = 0; c < cg; c++)
            for (int u = 0; u < k[0]; u++)
                for (int v = 0; v < k[1]; v++) {
                    int64_t r = row * stride[0] + u * (conv ? dil[0] : 1) - pad[0];
                    int64_t q = col * stride[conv] + v * (conv ? dil[1] : 1) - pad[conv];
                    if (r < 0 || r >= H || q < 0 || q >= W) continue;
                    int64_t in = last ? ((at[0] * H + r) * W + q) * C + first + c
                                      : ((at[0] * C + first + c) * H + r) * W + q;
                    double e = s[0][in];
                    sum += conv ? e * s[1][((o * cg + c) * k[0] + u) * k[1] + v] : e;
                    most = e > most ? e : most;
                    seen++;
                }
        y[i] = conv ? act(n->attr.conv.act, sum, 0.01) : n->op == HPML_OP_MAX_POOL2D ? most : sum / (double)seen;
    }
}

/* Transposed convolution: each number of x adds its multiple of the kernel to y. */
static void conv_transpose(const hpml_node *n, double **s, double *y)
{
    const hpml_tensor *x = n->src[0], *o = n->out, *w = n->src[1];
    const hpml_attr   *a = &n->attr.conv_transpose.mirror->node.attr;
    bool    last = x->layout == HPML_NHWC;
    int64_t C = w->shape[0], per = w->shape[1], OH = o->shape[last ? 1 : 2], OW = o->shape[last ? 2 : 3], at[5];
    int64_t out = per * a->conv.groups;
    memset(y, 0, (size_t)hpml_tensor_count(o) * sizeof *y);
    for (int64_t i = 0; i < hpml_tensor_count(x); i++) {
        split(x, i, at);
        int64_t c = at[last ? 3 : 1], h = at[last ? 1 : 2], v = at[last ? 2 : 3];
        for (int64_t k = 0; k < per * w->shape[2] * w->shape[3]; k++) {
            int64_t p = c / (C / a->conv.groups) * per + k / (w->shape[2] * w->shape[3]);
            int64_t row = h * a->conv.stride[0] + k / w->shape[3] % w->shape[2] - a->conv.padding[0];
            int64_t col = v * a->conv.stride[1] + k % w->shape[3] - a->conv.padding[1];
            if (row < 0 || row >= OH || col < 0 || col >= OW) continue;
            int64_t to = last ? ((at[0] * OH + row) * OW + col) * out + p : ((at[0] * out + p) * OH + row) * OW + col;
            y[to] += s[0][i] * s[1][c * per * w->shape[2] * w->shape[3] + k];
        }
    }
}

/* Row by row: softmax, layernorm, rmsnorm. */
static void rows(const hpml_node *n, double **s, double *y)
{
    int64_t N = n->out->shape[n->out->ndim - 1];
    for (int64_t r = 0; r < hpml_tensor_count(n->out) / N; r++) {
        const double *x = s[0] + r * N;
        double most = x[0], sum = 0, mean = 0, var = 0, eps = (double)n->attr.norm.eps;
        for (int64_t i = 0; i < N; i++)
            most = fmax(most, x[i]), mean += n->op == HPML_OP_LAYERNORM ? x[i] / (double)N : 0;
        for (int64_t i = 0; i < N; i++) var += (x[i] - mean) * (x[i] - mean) / (double)N, sum += exp(x[i] - most);
        for (int64_t i = 0; i < N; i++)
            if (n->op == HPML_OP_SOFTMAX || n->op == HPML_OP_LOG_SOFTMAX)
                y[r * N + i] = n->op == HPML_OP_LOG_SOFTMAX ? x[i] - most - log(sum) : exp(x[i] - most) / sum;
            else y[r * N + i] = (x[i] - mean) / sqrt(var + eps) * (s[1] ? s[1][i] : 1) + (s[2] ? s[2][i] : 0);
    }
}

static void batchnorm(const hpml_node *n, double **s, double *y)
{
    const hpml_tensor *x = n->src[0];
    int64_t C = x->shape[1], P = x->shape[2] * x->shape[3], R = x->shape[0] * P;
    for (int64_t c = 0; c < C; c++) {
        double mean = 0, var = 0;
        for (int64_t i = 0; i < R; i++) mean += s[0][(i / P * C + c) * P + i % P] / (double)R;
        for (int64_t i = 0; i < R; i++) var += pow(s[0][(i / P * C + c) * P + i % P] - mean, 2) / (double)R;
        for (int64_t i = 0; i < R; i++) {
            int64_t at = (i / P * C + c) * P + i % P;
            y[at] = (s[0][at] - mean) / sqrt(var + (double)n->attr.norm.eps);
            y[at] = act(n->attr.norm.act, y[at] * (s[1] ? s[1][c] : 1) + (s[2] ? s[2][c] : 0), 0);
        }
    }
}

static void attention(const hpml_node *n, double **s, double *y)
{
    int64_t heads = n->attr.attention.heads, kv = n->attr.attention.kv_heads;
    int64_t T = n->out->shape[1], C = n->out->shape[2], D = C / heads, width = C + 2 * kv * D;
    double *p = (double *)malloc((size_t)T * sizeof *p);
    for (int64_t i = 0; i < n->out->shape[0] * T * heads; i++) {
        int64_t h = i % heads, t = i / heads % T, b = i / heads / T, last = n->attr.attention.causal ? t + 1 : T;
        int64_t key = C + h * kv / heads * D;
        const double *q = s[0] + (b * T + t) * width + h * D;
        const double *m = s[2] ? s[2] + (n->src[2]->ndim == 3 ? b * T + t : b) * T : NULL;
        double sum = 0;
        for (int64_t u = 0; u < last; u++) {
            const double *k = s[0] + (b * T + u) * width + key;
            for (int64_t d = p[u] = 0; d < D; d++) p[u] += q[d] * k[d] * (double)n->attr.attention.scale;
            sum += p[u] = m && m[u] == 0 ? 0 : exp(p[u]);
        }
        for (int64_t d = 0; d < D; d++) {
            double *o = y + (b * T + t) * C + h * D + d;
            *o = 0;
            for (int64_t u = 0; u < last && sum > 0; u++)
                *o += p[u] / sum * s[0][(b * T + u) * width + key + kv * D + d];
        }
    }
    free(p);
}

static void rotary(const hpml_node *n, double **s, double *y)
{
    int64_t T = n->out->shape[1], C = n->out->shape[2], D = C / n->attr.rotary.heads, half = n->attr.rotary.dims / 2;
    for (int64_t i = 0; i < hpml_tensor_count(n->out); i++) {
        int64_t d = i % D, h = i % C / D, t = i / C % T, b = i / C / T;
        int64_t pair = n->attr.rotary.adjacent ? d / 2 : d % half;
        bool    second = n->attr.rotary.adjacent ? d % 2 : d >= half;
        double  a = ((double)t + (s[1] ? s[1][b] : 0)) * pow((double)n->attr.rotary.base, -(double)pair / (double)half);
        int64_t other = n->attr.rotary.adjacent ? 1 : half;
        y[i] = s[0][i];
        if (h < n->attr.rotary.rotated && d < 2 * half)
            y[i] = s[0][i] * cos(a) + (second ? s[0][i - other] : -s[0][i + other]) * sin(a);
    }
}

/* Elementwise functions of one to three operands. */
static void map(const hpml_node *n, double **s, double *y)
{
    int64_t at[5], ndim = n->out->ndim;
    double  p = (double)n->attr.map.p, q = (double)n->attr.map.q;
    for (int64_t i = 0; i < hpml_tensor_count(n->out); i++) {
        double v[3] = { 0 };
        split(n->out, i, at);
        for (int k = 0; k < n->src_count; k++) v[k] = s[k][place(n->src[k], at, (int)ndim)];
        switch (n->attr.map.kind) {
        case HPML_MAP_MINIMUM: y[i] = fmin(v[0], v[1]); break;
        case HPML_MAP_MAXIMUM: y[i] = fmax(v[0], v[1]); break;
        case HPML_MAP_WHERE: y[i] = v[v[0] != 0 ? 1 : 2]; break;
        case HPML_MAP_CLAMP: y[i] = fmin(fmax(v[0], p), q); break;
        case HPML_MAP_POW: y[i] = pow(v[0], p); break;
        case HPML_MAP_SIN: y[i] = sin(v[0]); break;
        case HPML_MAP_COS: y[i] = cos(v[0]); break;
        }
    }
}

/* Rows taken along a dimension, and the largest number along it. */
static void take(const hpml_node *n, double **s, double *y)
{
    const hpml_tensor *x = n->src[0];
    int64_t at[5];
    for (int64_t i = 0; i < hpml_tensor_count(n->out); i++) {
        int64_t dim = n->op == HPML_OP_MAX ? n->attr.max.dim : n->attr.take.dim, size = x->shape[dim];
        split(n->out, i, at);
        int64_t k = at[dim], start = n->attr.take.start, length = s[1] ? (int64_t)s[1][at[0]] : size;
        int64_t from = k, best = 0;
        double  centre = ((double)k + 0.5) / (double)(start > 0 ? start : 1) - 0.5;
        if (n->op == HPML_OP_MAX) {
            for (at[dim] = 0; at[dim] < size; at[dim]++) {
                double v = s[0][place(x, at, x->ndim)];
                if (at[dim] > 0 && v <= y[i]) continue;
                y[i] = v;
                best = at[dim];
            }
            if (n->attr.max.index) y[i] = (double)best;
            continue;
        }
        switch (n->attr.take.rule) {
        case HPML_TAKE_INDEX: from = (int64_t)s[1][place(n->src[1], at, x->ndim)]; break;
        case HPML_TAKE_REVERSE: from = k < length ? length - 1 - k : k; break;
        case HPML_TAKE_LAST: from = length - 1; break;
        case HPML_TAKE_PAD: from = k - start; break;
        default: from = k / start;
        }
        at[dim] = from;
        y[i] = from < 0 || from >= size ? (double)n->attr.take.value : s[0][place(x, at, x->ndim)];
        if (n->attr.take.rule != HPML_TAKE_LINEAR) continue;
        double low = floor(centre), part = centre - low;
        at[dim] = low < 0 ? 0 : (int64_t)low;
        y[i]    = (1 - part) * s[0][place(x, at, x->ndim)];
        at[dim] = low + 1 >= (double)size ? size - 1 : (int64_t)low + 1;
        y[i] += part * s[0][place(x, at, x->ndim)];
    }
}

static void lstm(const hpml_node *n, double **s, double *y)
{
    int64_t B = n->out->shape[0], T = n->out->shape[1], H = n->src[2]->shape[1], I = n->src[0]->shape[2];
    int64_t W = n->out->shape[2];
    double *c = (double *)malloc((size_t)H * sizeof *c), gate[4];
    for (int64_t b = 0; b < B; b++) {
        for (int64_t j = 0; j < H; j++) c[j] = s[5] ? s[5][b * H + j] : 0;
        for (int64_t t = 0; t < T; t++)
            for (int64_t j = 0; j < H; j++) {
                const double *h = s[4] ? s[4] + b * H : NULL;
                if (t > 0) h = y + (b * T + t - 1) * W;
                for (int g = 0; g < 4; g++) {
                    gate[g] = s[3][g * H + j];
                    for (int64_t i = 0; i < I; i++) gate[g] += s[1][(g * H + j) * I + i] * s[0][(b * T + t) * I + i];
                    for (int64_t i = 0; i < H && h; i++) gate[g] += s[2][(g * H + j) * H + i] * h[i];
                    gate[g] = act(g == 2 ? HPML_ACT_TANH : HPML_ACT_SIGMOID, gate[g], 0);
                }
                c[j] = gate[1] * c[j] + gate[0] * gate[2];
                y[(b * T + t) * W + j] = gate[3] * tanh(c[j]);
                if (W > H) y[(b * T + t) * W + H + j] = c[j];
            }
    }
    free(c);
}

static void gru(const hpml_node *n, double **s, double *y)
{
    int64_t B = n->out->shape[0], T = n->out->shape[1], H = n->out->shape[2], I = n->src[0]->shape[2];
    for (int64_t at = 0; at < B * T * H; at++) {
        int64_t j = at % H, t = at / H % T, b = at / H / T;
        const double *h = s[5] ? s[5] + b * H : NULL;
        double x[3], m[3];
        if (t > 0) h = y + (b * T + t - 1) * H;
        for (int g = 0; g < 3; g++) {
            x[g] = s[3][g * H + j];
            m[g] = s[4][g * H + j];
            for (int64_t i = 0; i < I; i++) x[g] += s[1][(g * H + j) * I + i] * s[0][(b * T + t) * I + i];
            for (int64_t i = 0; i < H && h; i++) m[g] += s[2][(g * H + j) * H + i] * h[i];
        }
        double r = act(HPML_ACT_SIGMOID, x[0] + m[0], 0), z = act(HPML_ACT_SIGMOID, x[1] + m[1], 0);
        y[at] = (1 - z) * tanh(x[2] + r * m[2]) + (h ? z * h[j] : 0);
    }
}

static double loss_of(const hpml_node *n, double **s)
{
    const hpml_tensor *x = n->src[0];
    int64_t N = hpml_tensor_count(x), C = x->shape[x->ndim - 1];
    double  sum = 0, counted = 0;
    for (int64_t r = 0; n->op == HPML_OP_CROSS_ENTROPY && r < N / C; r++) {
        const double *z = s[0] + r * C, e = (double)n->attr.cross_entropy.smoothing;
        double all = 0, mean = 0;
        if ((int32_t)s[1][r] == n->attr.cross_entropy.ignore) continue;
        for (int64_t c = 0; c < C; c++) all += exp(z[c]), mean += z[c] / (double)C;
        sum += log(all) - (1 - e) * z[(int64_t)s[1][r]] - e * mean;
        counted++;
    }
    for (int64_t i = 0; n->op != HPML_OP_CROSS_ENTROPY && i < N; i++, counted++) {
        double d = s[0][i] - s[1][i], delta = (double)n->attr.huber.delta;
        if (n->op == HPML_OP_BCE_WITH_LOGITS) sum += fmax(s[0][i], 0) - s[0][i] * s[1][i] + log1p(exp(-fabs(s[0][i])));
        else if (n->op == HPML_OP_MSE) sum += d * d;
        else sum += delta == 0 ? fabs(d) : fabs(d) <= delta ? d * d / 2 : delta * (fabs(d) - delta / 2);
    }
    return sum / counted;
}

/* Ops that copy numbers, or compute each element of the result from one element of each source. */
static void element(const hpml_node *n, double **s, double *y)
{
    const hpml_tensor *x = n->src[0], *o = n->out;
    int64_t at[5], to[5], count = hpml_tensor_count(o);
    if (n->op == HPML_OP_SUM) {
        memset(y, 0, (size_t)count * sizeof *y);
        for (int64_t i = 0; i < hpml_tensor_count(x); i++) {
            split(x, i, at);
            if (n->attr.sum.dim >= 0) at[n->attr.sum.dim] = 0;
            y[o->ndim == 0 ? 0 : place(o, at, x->ndim)] +=
                s[0][i] / (n->attr.sum.mean ? (double)(hpml_tensor_count(x) / count) : 1);
        }
        return;
    }
    for (int64_t i = 0; i < count; i++) {
        bool   pair = n->op <= HPML_OP_DIV, one = n->op == HPML_OP_SCALE || n->op == HPML_OP_ACTIVATION;
        split(o, i, at);
        double a = s[0][pair ? place(x, at, o->ndim) : one || n->op == HPML_OP_RESHAPE ? i : 0];
        double b = pair ? s[1][place(n->src[1], at, o->ndim)] : 0;
        int    d = n->attr.slice.dim, k = 0;
        switch (n->op) {
        case HPML_OP_ADD: y[i] = a + b; break;
        case HPML_OP_SUB: y[i] = a - b; break;
        case HPML_OP_MUL: y[i] = a * b; break;
        case HPML_OP_DIV: y[i] = a / b; break;
        case HPML_OP_SCALE: y[i] = (double)n->attr.scale.a * a + (double)n->attr.scale.b; break;
        case HPML_OP_ACTIVATION: y[i] = act(n->attr.act.act, a, (double)n->attr.act.slope); break;
        case HPML_OP_PERMUTE:
            for (int j = 0; j < o->ndim; j++) to[n->attr.permute.dims[j]] = at[j];
            y[i] = s[0][place(x, to, x->ndim)];
            break;
        case HPML_OP_SLICE: at[d] += n->attr.slice.start, y[i] = s[0][place(x, at, x->ndim)]; break;
        case HPML_OP_CONCAT:
            while (at[d] >= n->src[k]->shape[d]) at[d] -= n->src[k++]->shape[d];
            y[i] = s[k][place(n->src[k], at, o->ndim)];
            break;
        case HPML_OP_EMBEDDING:
            y[i] = s[1][(int64_t)s[0][i / o->shape[o->ndim - 1]] * o->shape[o->ndim - 1] + at[o->ndim - 1]];
            break;
        default: y[i] = a; /* reshape */
        }
    }
}

/* The op of the user in op_cases.h. */
static void gated_reference(const hpml_node *n, double **s, double *y)
{
    int64_t count = hpml_tensor_count(n->src[1]);
    for (int64_t i = 0; i < hpml_tensor_count(n->out); i++) y[i] = s[0][i] * (1 + sin(s[1][i % count]));
}

/* Runs the graph; the loss is the last result. */
static double run_world(world *w)
{
    for (int i = 0; i < w->nodes; i++) {
        const hpml_node *n = w->row[i].node;
        double *s[HPML_MAX_SRC] = { NULL }, *y = w->made[i];
        for (int k = 0; k < n->src_count; k++) s[k] = value(w, n->src[k]);
        switch (n->op) {
        case HPML_OP_MATMUL: matmul(n, s, y); break;
        case HPML_OP_LINEAR: linear(n, s, y); break;
        case HPML_OP_CONV2D: case HPML_OP_MAX_POOL2D: case HPML_OP_AVG_POOL2D: windows(n, s, y); break;
        case HPML_OP_SOFTMAX: case HPML_OP_LOG_SOFTMAX: case HPML_OP_LAYERNORM: case HPML_OP_RMSNORM:
            rows(n, s, y);
            break;
        case HPML_OP_BATCHNORM: batchnorm(n, s, y); break;
        case HPML_OP_ATTENTION: attention(n, s, y); break;
        case HPML_OP_ROTARY: rotary(n, s, y); break;
        case HPML_OP_MAP: map(n, s, y); break;
        case HPML_OP_TAKE: case HPML_OP_MAX: take(n, s, y); break;
        case HPML_OP_MASK:
            for (int64_t k = 0; k < hpml_tensor_count(n->out); k++)
                y[k] = (double)(k % n->out->shape[1]) < s[0][k / n->out->shape[1]];
            break;
        case HPML_OP_CONV_TRANSPOSE2D: conv_transpose(n, s, y); break;
        case HPML_OP_LSTM: lstm(n, s, y); break;
        case HPML_OP_GRU: gru(n, s, y); break;
        case HPML_OP_CROSS_ENTROPY: case HPML_OP_BCE_WITH_LOGITS: case HPML_OP_MSE: case HPML_OP_HUBER:
            y[0] = loss_of(n, s);
            break;
        case HPML_OP_CUSTOM: gated_reference(n, s, y); break;
        default: element(n, s, y);
        }
    }
    return w->made[w->nodes - 1][0];
}

/* More cases: an op and the shape of x. */
#define ROW(x, b, t) hpml_reshape_3d(x, b, t, -1)
#define MORE(X)                                                                                                        \
    X(one_linear, hpml_linear(x, 1, NULL), 1, 1, 1, 1) X(wide_linear, hpml_linear(x, 131, NULL), 1, 1, 3, 1031)        \
    X(long_linear, hpml_linear(hpml_flatten(x), 3, &(hpml_linear_desc){ .activation = HPML_ACT_SILU }), 2, 1, 1, 5003) \
    X(one_matmul, hpml_matmul(x, x, false, true), 1, 1, 1, 1)                                                          \
    X(odd_matmul, hpml_matmul(x, weight(x, 1, 67, 97), false, false), 1, 2, 131, 67)                                   \
    X(one_add, hpml_add(x, weight(x, 1, 1, 1)), 1, 1, 1, 1)                                                            \
    X(long_div, hpml_div(x, hpml_scale(hpml_mul(x, x), 1, 2)), 1, 1, 1, 100003)                                        \
    X(one_conv, hpml_conv2d(x, 1, &(hpml_conv2d_desc){ .kernel_h = 1 }), 1, 1, 1, 1)                                   \
    X(odd_conv, hpml_conv2d(x, 7, &(hpml_conv2d_desc){ .kernel_h = 5, .kernel_w = 3, .padding_h = 2, .dilation_w = 2,  \
                                                       .activation = HPML_ACT_SIGMOID }), 2, 3, 23, 29)                \
    X(deep_conv, hpml_conv2d(x, 37, &(hpml_conv2d_desc){ .kernel_h = 3, .padding_h = 1 }), 1, 61, 11, 13)              \
    X(odd_depthwise, hpml_conv2d(x, 17, &(hpml_conv2d_desc){ .kernel_h = 3, .stride_h = 2, .groups = 17 }),            \
      2, 17, 13, 19)                                                                                                   \
    X(odd_max_pool, hpml_max_pool2d(x, 5, 3, 2), 1, 3, 29, 31)                                                         \
    X(odd_avg_pool, hpml_avg_pool2d(x, 5, 2, 2), 1, 3, 29, 31)                                                         \
    X(one_pool, hpml_max_pool2d(x, 1, 0, 0), 1, 1, 1, 1) X(long_sum, hpml_sum(x, 3), 2, 1, 3, 10007)                   \
    X(one_softmax, hpml_softmax(x), 3, 1, 1, 1)                                                                        \
    X(long_softmax, hpml_scale(hpml_softmax(x), 100, 0), 1, 1, 3, 5003)                                                \
    X(long_log_softmax, hpml_log_softmax(x), 1, 1, 3, 5003) X(long_layernorm, hpml_layernorm(x, NULL), 1, 1, 3, 5003)  \
    X(long_rmsnorm, hpml_rmsnorm(x, &(hpml_norm_desc){ .eps = 0.1f }), 1, 1, 3, 5003)                                  \
    X(odd_batchnorm, hpml_batchnorm(x, NULL), 5, 3, 17, 19)                                                            \
    X(one_attention, hpml_attention(ROW(x, 3, 1), &(hpml_attention_desc){ .heads = 1 }), 3, 1, 1, 3)                   \
    X(long_attention, hpml_attention(ROW(x, 1, 131), &(hpml_attention_desc){ .heads = 3 }), 1, 1, 131, 45)             \
    X(long_attention_full, hpml_attention(ROW(x, 1, 131), &(hpml_attention_desc){ .heads = 2, .not_causal = true }),   \
      1, 1, 131, 66)                                                                                                   \
    X(long_attention_grouped, hpml_attention(ROW(x, 2, 131),                                                           \
      &(hpml_attention_desc){ .heads = 6, .kv_heads = 3, .mask = mask(x, 131, 1), .not_causal = true }),               \
      2, 1, 131, 60)                                                                                                   \
    X(one_lstm, hpml_lstm(ROW(x, 2, 1), 1, NULL), 2, 1, 1, 1)                                                          \
    X(odd_lstm, hpml_lstm(ROW(x, 2, 7), 17, NULL), 2, 1, 7, 33)                                                        \
    X(wide_lstm, hpml_lstm(ROW(x, 33, 3), 65, NULL), 33, 1, 3, 5)                                                      \
    X(few_lstm, hpml_lstm(ROW(x, 1, 4), 139, NULL), 1, 1, 4, 3)                                                        \
    X(wide_lstm_cells, states(x, hpml_lstm_states, 1, true), 33, 4, 9, 7)                                              \
    X(one_gru, hpml_gru(ROW(x, 2, 1), 1, NULL), 2, 1, 1, 1) X(wide_gru, hpml_gru(ROW(x, 9, 3), 65, NULL), 9, 1, 3, 5)
#define MORE_DEFINE(name, e, a, b, c, d) static hpml_tensor *more_##name(hpml_tensor *x) { return e; }
#define MORE_ROW(name, e, a, b, c, d) { #name, more_##name, 0, { a, b, c, d } },
MORE(MORE_DEFINE)
static const op_case more[] = { MORE(MORE_ROW) };

/* Cases whose result is a loss. */
static hpml_tensor *loss_case(hpml_ctx *ctx, int kind, hpml_tensor **x)
{
    hpml_tensor *y = *x = hpml_input_2d(ctx, 5, 37), *t = hpml_tensor_create_2d(ctx, 5, 37), *l;
    hpml_cross_entropy_desc d = { .label_smoothing = kind == 1 ? 0.1f : 0, .ignore_index = kind == 1 ? 3 : 0 };
    static const int32_t    label[] = { 36, 3, HPML_IGNORE, 0, 11 };
    static const int32_t    kept[] = { 36, 3, 3, 0, 11 }, token[] = { 0, 8, 3, 3, 1 };
    hpml_tensor_require_grad(y);
    fill(t, 2);
    if (kind < 2) {
        l = hpml_tensor_create(ctx, HPML_DTYPE_I32, 1, (int64_t[]){ 5 });
        hpml_tensor_set_raw(l, kind ? kept : label, sizeof label);
        return hpml_cross_entropy(y, l, &d);
    }
    l = hpml_tensor_create(ctx, HPML_DTYPE_I32, 1, (int64_t[]){ 5 });
    hpml_tensor_set_raw(l, token, sizeof token);
    if (kind == 2) return hpml_mse(hpml_embedding(l, 9, 37, NULL), t);
    return kind == 3 ? hpml_bce_with_logits(y, t) : hpml_huber(y, t, kind == 4 ? 0 : 0.7f);
}

static hpml_graph *record(const op_case *c, int kind, const char *cpu, hpml_ctx **ctx,
                          hpml_tensor **x, hpml_tensor **out)
{
    const int64_t *d = c && c->shape[0] ? c->shape : (int64_t[]){ 3, 4, 9, 7 };
    hpml_tensor   *loss, *t;
    *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .cpu = cpu, .threads = 2, .seed = 11 });
    if (hpml_ctx_status(*ctx) != HPML_OK) return NULL;
    if (c) {
        *x = hpml_input_4d(*ctx, d[0], d[1], d[2], d[3]);
        hpml_tensor_require_grad(*x);
        *out = c->record(*x);
        t    = *out ? hpml_tensor_create(*ctx, HPML_DTYPE_F32, (*out)->ndim, (*out)->shape) : NULL;
        if (t) fill(t, 2);
        loss = hpml_mse(*out, t);
    } else *out = loss = loss_case(*ctx, kind, x);
    hpml_graph *g = hpml_graph_create(*ctx, &(hpml_graph_desc){ .outputs = out, .output_count = 1, .loss = loss });
    if (hpml_graph_alloc(g) == HPML_OK && (*x)->data) fill(*x, 1);
    return g;
}

/* The difference of a and b relative to `size`. */
static double apart(double a, double b, double size) { return fabs(a - b) / (size + 1e-4); }

static void check(const op_case *c, int kind, const char *name)
{
    static const char *const cpus[] = { "scalar", "avx2", "avx512", "neon" };
    static double want[LEAVES][SAMPLES];
    world   w;
    double *whole = NULL;
    for (int k = 0, first = 1; k < 4; k++) {
        hpml_ctx    *ctx;
        hpml_tensor *x = NULL, *y = NULL;
        hpml_graph  *g = record(c, kind, cpus[k], &ctx, &x, &y);
        double       size = 0, worst = 0, slope = 0;
        if (hpml_ctx_status(ctx) == HPML_ERR_UNSUPPORTED) { hpml_ctx_free(ctx); continue; }
        if (hpml_graph_forward(g, true, 0) != HPML_OK || hpml_graph_backward(g, 1, false) != HPML_OK) {
            printf("    %s: %s\n", name, hpml_ctx_error(ctx)), test_failed = 1;
            hpml_ctx_free(ctx);
            continue;
        }
        open_world(&w, g);
        int64_t n = hpml_tensor_count(y);
        if (first) {
            whole = (double *)malloc((size_t)n * sizeof *whole);
            run_world(&w);
            memcpy(whole, value(&w, y), (size_t)n * sizeof *whole);
        }
        for (int64_t i = 0; i < n; i++) size = fmax(size, fabs(whole[i]));
        for (int64_t i = 0; i < n; i++) worst = fmax(worst, apart((double)y->data[i], whole[i], size));
        for (int l = 0; l < w.leaves; l++) {
            const hpml_tensor *t = w.of[l];
            int64_t count = hpml_tensor_count(t);
            double  most = 0, scale = 0;
            if (!t->grad || !t->needs_grad) continue;
            for (int64_t i = 0; i < count; i++) scale = fmax(scale, fabs((double)t->grad[i]));
            for (int i = 0; i < SAMPLES; i++) {
                int64_t at = count * i / SAMPLES;
                double  keep = w.leaf[l][at], h = 1e-5;
                if (first) {
                    w.leaf[l][at] = keep + h, want[l][i] = run_world(&w) / (2 * h);
                    w.leaf[l][at] = keep - h, want[l][i] -= run_world(&w) / (2 * h);
                    w.leaf[l][at] = keep;
                }
                most = fmax(most, fabs((double)t->grad[at] - want[l][i]));
            }
            slope = fmax(slope, most / (scale + 1e-5));
        }
        if (!(worst < 3e-6) || !(slope < 2e-4))
            printf("    %s with %s: value off by %g, gradient by %g\n", name, cpus[k], worst, slope), test_failed = 1;
        close_world(&w);
        hpml_ctx_free(ctx);
        first = 0;
    }
    free(whole);
}

TEST(every_op_in_double)
{
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        /* not the cases with dropout, which is random: see the test of dropout */
        if (!strstr("dropout residual", cases[i].name)) check(&cases[i], 0, cases[i].name);
}

TEST(odd_shapes_in_double)
{
    for (size_t i = 0; i < sizeof more / sizeof more[0]; i++) check(&more[i], 0, more[i].name);
}

TEST(losses_in_double)
{
    static const char *const names[] = { "cross_entropy", "cross_entropy, smooth", "embedding", "bce", "l1", "huber" };
    for (int kind = 0; kind < 6; kind++) check(NULL, kind, names[kind]);
}

/* Two LSTMs of several panels and blocks: with 1 and 3 threads the gradients have the same bits; a second backward pass
   that accumulates doubles them. */
TEST(lstm_gradients_do_not_depend_on_threads_and_accumulate)
{
    static const char *const cpus[] = { "scalar", "avx2", "avx512", "neon" };
    for (int k = 0; k < 4; k++) {
        float *once = NULL;
        for (int threads = 1; threads <= 3; threads += 2) {
            hpml_ctx    *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .cpu = cpus[k], .threads = threads, .seed = 5 });
            hpml_tensor *x = hpml_input_3d(ctx, 33, 4, 5), *y;
            hpml_tensor_require_grad(x);
            y = hpml_lstm(hpml_lstm(x, 65, NULL), 34, NULL);
            hpml_graph *g = hpml_graph_create(ctx, &(hpml_graph_desc){ .loss = hpml_sum(y, HPML_ALL_DIMS) });
            if (hpml_ctx_status(ctx) == HPML_ERR_UNSUPPORTED) { hpml_ctx_free(ctx); continue; }
            ENSURE(hpml_graph_alloc(g) == HPML_OK);
            fill(x, 1);
            for (int pass = 0; pass < 2; pass++) {
                ENSURE(hpml_graph_forward(g, true, 0) == HPML_OK && hpml_graph_backward(g, 1, pass > 0) == HPML_OK);
                for (int64_t p = 0, at = 0; p < hpml_param_count(ctx); p++) {
                    hpml_tensor *w = hpml_param_at(ctx, (int)p);
                    int64_t      n = hpml_tensor_count(w);
                    if (threads == 1 && pass == 0) {
                        once = (float *)realloc(once, (size_t)(at + n) * sizeof *once);
                        memcpy(once + at, w->grad, (size_t)n * sizeof *once);
                    }
                    for (int64_t i = 0; i < n && pass > 0; i++)
                        ENSURE_NEAR(w->grad[i], 2 * (double)once[at + i], 1e-5 * fabs((double)w->grad[i]) + 1e-6);
                    ENSURE(pass > 0 || memcmp(once + at, w->grad, (size_t)n * sizeof *once) == 0);
                    at += n;
                }
            }
            hpml_ctx_free(ctx);
        }
        free(once);
    }
}

/* Dropout keeps about 1 - p of the numbers, multiplied by 1 / (1 - p); gradients pass for the same elements; evaluation
   keeps all numbers. */
TEST(dropout_keeps_the_right_number_of_elements)
{
    hpml_ctx    *ctx = hpml_ctx_create(NULL);
    hpml_tensor *x = hpml_input_2d(ctx, 7, 1009), *y, *loss;
    hpml_tensor_require_grad(x);
    y = hpml_dropout(x, 0.3f), loss = hpml_sum(y, HPML_ALL_DIMS);
    hpml_graph  *g = hpml_graph_create(ctx, &(hpml_graph_desc){ .outputs = &y, .output_count = 1, .loss = loss });
    ENSURE(hpml_graph_alloc(g) == HPML_OK);
    fill(x, 1);
    for (uint64_t step = 1; step < 4; step++) {
        int kept = 0;
        ENSURE(hpml_graph_forward(g, true, step) == HPML_OK && hpml_graph_backward(g, 1, false) == HPML_OK);
        for (int i = 0; i < 7 * 1009; i++) {
            kept += y->data[i] != 0;
            ENSURE_NEAR(y->data[i], y->data[i] != 0 ? (double)x->data[i] / 0.7 : 0, 1e-5);
            ENSURE_NEAR(x->grad[i], y->data[i] != 0 ? 1 / 0.7 : 0, 1e-5);
        }
        ENSURE_NEAR(kept / 7063.0, 0.7, 0.03);
    }
    ENSURE(hpml_graph_forward(g, false, 1) == HPML_OK && memcmp(y->data, x->data, 7063 * 4) == 0);
    hpml_ctx_free(ctx);
}

/* A constant added to all logits changes only the rounding of the logits, which is the same in the reference. */
typedef struct softmax_errors { double loss, gradient, sum, log, log_gradient; } softmax_errors;

static void softmax_of_row(const float *x, int64_t n, double *p, double *log_sum, double *most)
{
    *most = (double)x[0];
    for (int64_t i = 1; i < n; i++) *most = fmax(*most, (double)x[i]);
    *log_sum = 0;
    for (int64_t i = 0; i < n; i++) *log_sum += p[i] = exp((double)x[i] - *most);
    for (int64_t i = 0; i < n; i++) p[i] /= *log_sum;
    *log_sum = log(*log_sum);
}

enum { ROWS = 5, CLASSES = 37 };
static void check_cross_entropy(const hpml_tensor *x, const int32_t *label, double s, double loss, softmax_errors *e)
{
    double p[CLASSES], log_sum, most, want = 0;
    for (int r = 0; r < ROWS; r++) {
        const float *row = x->data + r * CLASSES, *dx = x->grad + r * CLASSES;
        double       mean = 0, sum = 0;
        softmax_of_row(row, CLASSES, p, &log_sum, &most);
        for (int i = 0; i < CLASSES; i++) {
            double d = (p[i] - (1 - s) * (i == label[r]) - s / CLASSES) / ROWS;
            e->gradient = fmax(e->gradient, fabs((double)dx[i] - d));
            mean += ((double)row[i] - most) / CLASSES, sum += (double)dx[i];
        }
        want += (log_sum - (1 - s) * ((double)row[label[r]] - most) - s * mean) / ROWS;
        e->sum = fmax(e->sum, fabs(sum));
    }
    e->loss = fmax(e->loss, fabs(loss - want));
}

static void check_log_softmax(const hpml_tensor *x, const hpml_tensor *y, const hpml_tensor *dy, softmax_errors *e)
{
    double p[CLASSES], log_sum, most;
    for (int r = 0; r < ROWS; r++) {
        const float *row = x->data + r * CLASSES, *g = dy->data + r * CLASSES;
        double       sum = 0;
        softmax_of_row(row, CLASSES, p, &log_sum, &most);
        for (int i = 0; i < CLASSES; i++) sum += (double)g[i];
        for (int i = 0; i < CLASSES; i++) {
            double want = (double)row[i] - most - log_sum, slope = (double)g[i] - p[i] * sum;
            e->log          = fmax(e->log, fabs((double)y->data[r * CLASSES + i] - want));
            e->log_gradient = fmax(e->log_gradient, fabs((double)x->grad[r * CLASSES + i] - slope));
        }
    }
}

static void shifted_logits(const char *cpu, float shift, float smoothing, bool log, softmax_errors *e)
{
    static const int32_t label[ROWS] = { 36, 3, 3, 0, 11 };
    hpml_ctx    *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .cpu = cpu, .threads = 1 });
    hpml_tensor *x   = hpml_input_2d(ctx, ROWS, CLASSES), *t = hpml_tensor_create(ctx, HPML_DTYPE_I32, 1,
                                                                                  (int64_t[]){ ROWS });
    hpml_tensor *dy  = hpml_tensor_create_2d(ctx, ROWS, CLASSES), *y = NULL, *loss;
    hpml_tensor_require_grad(x);
    if (dy) fill(dy, 2);
    hpml_tensor_set_raw(t, label, sizeof label);
    if (log) y = hpml_log_softmax(x), loss = hpml_sum(hpml_mul(y, dy), HPML_ALL_DIMS);
    else loss = hpml_cross_entropy(x, t, &(hpml_cross_entropy_desc){ .label_smoothing = smoothing });
    hpml_tensor *outputs[] = { loss, y };
    hpml_graph  *g = hpml_graph_create(ctx, &(hpml_graph_desc){ .outputs = outputs, .output_count = log ? 2 : 1,
                                                                .loss = loss });
    if (hpml_graph_alloc(g) == HPML_OK) {
        fill(x, 1);
        for (int i = 0; i < ROWS * CLASSES; i++) x->data[i] = 4 * x->data[i] + shift;
        hpml_graph_forward(g, true, 0);
        hpml_graph_backward(g, 1, false);
        if (log) check_log_softmax(x, y, dy, e);
        else check_cross_entropy(x, label, (double)smoothing, (double)loss->data[0], e);
    } else if (hpml_ctx_status(ctx) != HPML_ERR_UNSUPPORTED) printf("    %s\n", hpml_ctx_error(ctx)), e->loss = NAN;
    hpml_ctx_free(ctx);
}

TEST(log_softmax_and_cross_entropy_keep_their_digits_when_all_logits_are_shifted)
{
    static const char *const cpus[] = { "scalar", "avx2", "avx512", "neon" };
    static const float       shifts[] = { 0, 30, 1000, 30000, -30000 };
    for (int k = 0; k < 4; k++)
        for (int i = 0; i < 5; i++) {
            softmax_errors e = { 0 };
            shifted_logits(cpus[k], shifts[i], 0, false, &e);
            shifted_logits(cpus[k], shifts[i], 0.1f, false, &e);
            shifted_logits(cpus[k], shifts[i], 0, true, &e);
            if (e.loss < 1e-6 && e.gradient < 6e-8 && e.sum < 1e-7 && e.log < 3e-6 && e.log_gradient < 2e-6) continue;
            printf("    %s, shift %g: loss off by %.2g, gradient by %.2g, its sum by %.2g; log_softmax by %.2g, its "
                   "gradient by %.2g\n", cpus[k], (double)shifts[i], e.loss, e.gradient, e.sum, e.log, e.log_gradient);
            test_failed = 1;
        }
}

/* Norms of 2 to 9 numbers with an offset, against sums in double of the same f32 numbers. Errors are in units of 2^-24
   times: for y its largest element; for dx rstd times the largest g; for dgamma the sum of its terms' absolute values.
   */
typedef struct norm_case { hpml_op op; int64_t B, C, P; float offset, spread; } norm_case;
typedef struct norm_errors { double y, dx, dgamma, dbeta; } norm_errors;

static void group_errors(const norm_case *c, const float *x, const float *y, const float *dy, const float *dx,
                         const float *gamma, int64_t n, double (*terms)[9], norm_errors *e)
{
    double mean = 0, var = 0, rstd, h[9], g[9], sum = 0, dot = 0, most = 1e-30, most_g = 1e-30;
    for (int64_t i = 0; i < n && c->op != HPML_OP_RMSNORM; i++) mean += (double)x[i] / (double)n;
    for (int64_t i = 0; i < n; i++) var += ((double)x[i] - mean) * ((double)x[i] - mean) / (double)n;
    rstd = 1 / sqrt(var + 1e-5);
    for (int64_t i = 0; i < n; i++) {
        double w = (double)gamma[c->op == HPML_OP_BATCHNORM ? 0 : i];
        h[i] = ((double)x[i] - mean) * rstd, g[i] = (double)dy[i] * w;
        sum += c->op == HPML_OP_RMSNORM ? 0 : g[i] / (double)n, dot += g[i] * h[i] / (double)n;
        most = fmax(most, fabs(h[i] * w)), most_g = fmax(most_g, fabs(g[i]));
        terms[0][i] += (double)dy[i] * h[i], terms[1][i] += fabs((double)dy[i] * h[i]);
    }
    for (int64_t i = 0; i < n; i++) {
        double w = (double)gamma[c->op == HPML_OP_BATCHNORM ? 0 : i], u = ldexp(1, -24);
        e->y  = fmax(e->y, fabs((double)y[i] - h[i] * w) / most / u);
        e->dx = fmax(e->dx, fabs((double)dx[i] - rstd * (g[i] - sum - h[i] * dot)) / (rstd * most_g) / u);
    }
}

static void norm_errors_of(const norm_case *c, hpml_tensor *x, hpml_tensor *y, hpml_tensor *dy, hpml_tensor *gamma,
                           norm_errors *e)
{
    bool    batch  = c->op == HPML_OP_BATCHNORM;
    int64_t groups = batch ? c->C : c->B, n = batch ? c->B * c->P : c->C;
    double  terms[2][9] = { { 0 } };
    for (int64_t k = 0; k < groups; k++) {
        float v[4][9];
        for (int64_t i = 0; i < n; i++) {
            int64_t at = batch ? (i / c->P * c->C + k) * c->P + i % c->P : k * n + i;
            v[0][i] = x->data[at], v[1][i] = y->data[at], v[2][i] = dy->data[at], v[3][i] = x->grad[at];
        }
        group_errors(c, v[0], v[1], v[2], v[3], gamma->data + (batch ? k : 0), n, terms, e);
        for (int64_t i = 1; i < n && batch; i++) terms[0][0] += terms[0][i], terms[1][0] += terms[1][i];
        for (int64_t i = 0; i < (batch ? 1 : n) && (batch || k + 1 == groups); i++)
            e->dgamma = fmax(e->dgamma, fabs((double)gamma->grad[batch ? k : i] - terms[0][i]) /
                             (terms[1][i] + 1e-30) * ldexp(1, 24));
        if (batch) memset(terms, 0, sizeof terms);
    }
}

static void norm_of(const char *cpu, const norm_case *c, uint64_t seed, norm_errors *e)
{
    hpml_ctx    *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .cpu = cpu, .threads = 1 });
    hpml_tensor *x = c->P > 1 ? hpml_input_4d(ctx, c->B, c->C, 1, c->P) : hpml_input_2d(ctx, c->B, c->C);
    hpml_tensor *y, *dy, *loss;
    hpml_tensor_require_grad(x);
    y = c->op == HPML_OP_BATCHNORM ? hpml_batchnorm(x, NULL)
        : c->op == HPML_OP_RMSNORM ? hpml_rmsnorm(x, NULL) : hpml_layernorm(x, NULL);
    dy   = y ? hpml_tensor_create(ctx, HPML_DTYPE_F32, y->ndim, y->shape) : NULL;
    loss = hpml_sum(hpml_mul(y, dy), HPML_ALL_DIMS);
    hpml_tensor *outputs[] = { loss, y };
    hpml_graph  *g = hpml_graph_create(ctx, &(hpml_graph_desc){ .outputs = outputs, .output_count = 2, .loss = loss });
    if (hpml_graph_alloc(g) == HPML_OK) {
        fill(dy, seed + 1), fill(x, seed), fill(hpml_param_at(ctx, 0), seed + 2);
        for (int64_t i = 0; i < hpml_tensor_count(x); i++) x->data[i] = c->spread * x->data[i] + c->offset;
        hpml_graph_forward(g, true, 0);
        hpml_graph_backward(g, 1, false);
        norm_errors_of(c, x, y, dy, hpml_param_at(ctx, 0), e);
    } else if (hpml_ctx_status(ctx) != HPML_ERR_UNSUPPORTED) printf("    %s\n", hpml_ctx_error(ctx)), e->y = NAN;
    hpml_ctx_free(ctx);
}

TEST(norms_of_few_numbers_keep_their_digits_with_a_large_offset)
{
    static const char *const cpus[] = { "scalar", "avx2", "avx512", "neon" };
    static const float       offsets[] = { 0, 3, -40, 1000, 30000 }, spreads[] = { 1, 0.01f };
    static const hpml_op     ops[] = { HPML_OP_LAYERNORM, HPML_OP_RMSNORM, HPML_OP_BATCHNORM };
    for (int i = 0; i < 3 * 5 * 2 * 8; i++) {
        int64_t     n = 2 + i % 8;
        norm_case   c = { ops[i / 80], i / 80 == 2 ? n : 3, i / 80 == 2 ? 3 : n, 1, offsets[i / 16 % 5],
                          spreads[i / 8 % 2] };
        norm_errors e = { 0 };
        if (c.op == HPML_OP_BATCHNORM && n % 2 == 0 && i % 3 == 0) c.B = 2, c.P = n / 2;
        for (int k = 0; k < 4; k++) norm_of(cpus[k], &c, (uint64_t)i, &e);
        if (e.y < 6 && e.dx < 16 && e.dgamma < 16) continue;
        printf("    %s of %d numbers, offset %g, spread %g: y off by %.3g, dx by %.3g, dgamma by %.3g units of 2^-24\n",
               hpml_op_name(c.op), (int)n, (double)c.offset, (double)c.spread, e.y, e.dx, e.dgamma);
        test_failed = 1;
    }
}
