/* What the GPU reaches: bench_gpu GROUP [PEERS], a group being kernels, matmul, attention or train. Kernels that only
   move memory are measured against a device-to-device copy, products against the fastest algorithm of cuBLASLt,
   attention against what that reaches with large matrices of bf16, and attention and training steps against what
   PyTorch reached (PEERS, the lines that bench_gpu.py printed). Each result is a row of the table, with what has run
   where (hpml_cuda_text) below it, and a line of build/bench.jsonl; what fails says why, and the rest goes on. */
#define HPML_IMPLEMENTATION
#include "../../hpml_cuda.cuh"
#ifndef HPML_CUDA_NO_CUBLAS
#include <cublasLt.h>
#endif

#define MIB ((int64_t)1 << 20)
#define N   (64 * MIB) /* numbers in an array: 128 MiB and more, far above what a cache holds */

static const char *const precisions[] = { "f32", "tf32", "bf16", "f16" };
static char              device_name[256];
static const char       *peers_path;
static int               failures;
static char              ran[1024], shown[1024]; /* hpml_cuda_text of the rows to come, and of those before */

static void failed(const char *name, const char *why)
{
    printf("%-46s FAILED: %s\n", name, why);
    fflush(stdout);
    failures++;
}

static bool good(const char *name, cudaError_t e)
{
    if (e != cudaSuccess) failed(name, cudaGetErrorString(e)), cudaGetLastError();
    return e == cudaSuccess;
}

static void row(const char *name, const char *unit, double value, const char *peer, double peer_value)
{
    FILE *f = fopen("build/bench.jsonl", "a");
    char  theirs[64] = "null", ratio[64] = "null";
    if (peer_value > 0) {
        snprintf(theirs, sizeof theirs, "%.4g", peer_value);
        snprintf(ratio, sizeof ratio, "%.3f", value / peer_value);
    }
    printf("%-46s %10.4g %-10s %-18s %10s %7s\n", name, value, unit, peer, theirs, ratio);
    if (strcmp(ran, shown) != 0) printf("    %s\n", ran); /* printed once for a result with several peers */
    snprintf(shown, sizeof shown, "%s", ran);
    fflush(stdout);
    if (!f) return;
    fprintf(f, "{\"bench\": \"gpu\", \"case\": \"%s\", \"unit\": \"%s\", \"hpml\": %.6g, \"peer\": \"%s\", "
            "\"peer_value\": %s, \"ratio\": %s, \"device\": \"%s\", \"ran\": \"%s\"}\n",
            name, unit, value, peer, theirs, ratio, device_name, ran);
    fclose(f);
}

/* A row for each value that PyTorch has for this case, or one without. */
static void row_beside_peers(const char *name, const char *unit, double value)
{
    FILE *f = peers_path ? fopen(peers_path, "r") : NULL;
    char  line[512], its[128], peer[64];
    int   rows = 0;
    while (f && fgets(line, sizeof line, f)) {
        double v = 0;
        if (sscanf(line, "{\"case\": \"%127[^\"]\", \"peer\": \"%63[^\"]\", \"value\": %lf", its, peer, &v) != 3 ||
            strcmp(its, name) != 0)
            continue;
        row(name, unit, value, peer, v), rows++;
    }
    if (f) fclose(f);
    if (rows == 0) row(name, unit, value, "pytorch (absent)", 0);
}

typedef hpml_status work(void *user);

static int by_size(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

/* Seconds that a call keeps the stream busy: the median of five rounds of at least 20 ms; 0 and a line if it fails. */
static double seconds_of(const char *name, const hpml_ctx *ctx, cudaStream_t stream, work *f, void *user)
{
    cudaEvent_t start = NULL, stop = NULL;
    float       ms = 0, rounds[5] = { 0 };
    int         n = 1;
    hpml_status status = HPML_OK;
    bool        fine = good(name, cudaEventCreate(&start)) && good(name, cudaEventCreate(&stop));
    for (int i = 0; i < 3 && status == HPML_OK; i++) status = f(user);
    for (int r = -1; r < 5 && fine && status == HPML_OK; r++) {
        fine = good(name, cudaEventRecord(start, stream));
        for (int i = 0; i < n && status == HPML_OK; i++) status = f(user);
        fine = fine && good(name, cudaEventRecord(stop, stream)) && good(name, cudaEventSynchronize(stop)) &&
               good(name, cudaEventElapsedTime(&ms, start, stop));
        if (r >= 0) rounds[r] = ms / (float)n;
        else n = ms > 20 ? 1 : ms < 0.02f ? 1000 : (int)(20 / ms) + 1;
    }
    if (start) cudaEventDestroy(start);
    if (stop) cudaEventDestroy(stop);
    if (status != HPML_OK) failed(name, ctx && hpml_ctx_status(ctx) != HPML_OK ? hpml_ctx_error(ctx) : "refused");
    if (!fine || status != HPML_OK) return 0;
    qsort(rounds, 5, sizeof rounds[0], by_size);
    return 1e-3 * rounds[2];
}

static hpml_ctx *context(hpml_cuda_precision precision, bool own)
{
    hpml_cuda_desc gpu  = {};
    hpml_ctx_desc  desc = {};
    gpu.precision = precision, gpu.own_kernels = own, gpu.tune = true;
    desc.backend = hpml_backend_cuda(), desc.backend_desc = &gpu, desc.seed = 1;
    return hpml_ctx_create(&desc);
}

static cudaStream_t stream_of(const hpml_ctx *ctx) { return (cudaStream_t)hpml_cuda_stream(ctx); }

/* Fills n numbers of the device with normal ones (a million of them again and again): zeros would take less power. */
static void fill(hpml_ctx *ctx, void *p, hpml_dtype dtype, int64_t n)
{
    static float  *values;
    static char    raw[MIB * sizeof(float)];
    hpml_rng       r = {};
    size_t         each = hpml_dtype_size(dtype);
    if (!values && (values = (float *)malloc(sizeof raw))) hpml_rng_fill_normal(&r, values, MIB);
    if (!values || !p) return;
    hpml_convert(ctx, dtype, raw, HPML_DTYPE_F32, values, MIB);
    for (int64_t i = 0; i < n; i += MIB)
        hpml_ctx_backend(ctx)->write(hpml_ctx_device(ctx), (char *)p + (size_t)i * each, raw,
                                     (size_t)(n - i < MIB ? n - i : MIB) * each);
}

static void *array(hpml_ctx *ctx, hpml_dtype dtype, int64_t n)
{
    void  *p = NULL;
    size_t bytes = (size_t)n * hpml_dtype_size(dtype);
    if (hpml_ctx_status(ctx) == HPML_OK) p = hpml_ctx_backend(ctx)->alloc(hpml_ctx_device(ctx), bytes);
    if (!p) hpml_ctx_fail(ctx, HPML_ERR_MEMORY, "no device memory for %lld numbers", (long long)n);
    fill(ctx, p, dtype, n);
    return p;
}

/* One node by itself: forward or backward. */
typedef struct one_node {
    hpml_run   run;
    hpml_node *node;
    bool       backward;
} one_node;

static hpml_status run_node(void *user)
{
    one_node           *o  = (one_node *)user;
    const hpml_op_impl *op = &hpml_ctx_backend(o->run.ctx)->ops[o->node->op];
    return (o->backward ? op->backward : op->forward)(&o->run, o->node);
}

/* Memory for y = op(x), one pass forward, and gradients where the graph has none. */
static hpml_status prepare(hpml_tensor *in, hpml_tensor *y, one_node *o)
{
    hpml_graph_desc d = {};
    if (!y) return HPML_ERR_ARGUMENT;
    d.outputs = &y, d.output_count = 1;
    if (y->ndim == 0) d.loss = y, d.output_count = 0;
    hpml_graph *g = hpml_graph_create(y->ctx, &d);
    if (!g || hpml_graph_alloc(g) != HPML_OK) return HPML_ERR_MEMORY;
    if (in->dtype == HPML_DTYPE_F32) fill(in->ctx, in->data, in->dtype, hpml_tensor_count(in));
    if (hpml_graph_forward(g, true, 1) != HPML_OK) return hpml_ctx_status(y->ctx);
    memset(o, 0, sizeof *o);
    o->run.ctx = y->ctx, o->run.train = true, o->run.step = 1, o->run.loss_scale = 1, o->node = y->node;
    for (int s = -1; s < y->node->src_count; s++) {
        hpml_tensor *t = s < 0 ? y : y->node->src[s];
        if (t && !t->grad && t->dtype != HPML_DTYPE_I32 && !(t->param && t->param->buffer))
            t->grad = (float *)array(t->ctx, t->dtype, hpml_tensor_count(t));
    }
    return hpml_ctx_status(y->ctx);
}

// --- kernels that move memory ----------------------------------------------------------------------------------------

static double copy_ceiling; /* bytes read and written a second by the driver's own copy */

typedef struct copy_args {
    void        *to, *from;
    cudaStream_t stream;
} copy_args;

static hpml_status run_copy(void *user)
{
    copy_args *c = (copy_args *)user;
    cudaError_t e = cudaMemcpyAsync(c->to, c->from, (size_t)N * 8, cudaMemcpyDeviceToDevice, c->stream);
    return e == cudaSuccess ? HPML_OK : HPML_ERR_CUDA;
}

static void bench_copy(void)
{
    hpml_ctx *ctx = context(HPML_CUDA_F32, false);
    copy_args c   = {};
    c.to = array(ctx, HPML_DTYPE_F32, 2 * N), c.from = array(ctx, HPML_DTYPE_F32, 2 * N), c.stream = stream_of(ctx);
    double seconds = 0;
    if (hpml_ctx_status(ctx) == HPML_OK) seconds = seconds_of("copy", ctx, c.stream, run_copy, &c);
    else failed("copy", hpml_ctx_error(ctx));
    if (seconds > 0) {
        copy_ceiling = 2.0 * (double)N * 8 / seconds;
        row("copy on the device", "GB/s", 1e-9 * copy_ceiling, "", 0);
    }
    hpml_ctx_free(ctx);
}

static hpml_tensor *k_relu(hpml_tensor *x) { return hpml_relu(x); }
static hpml_tensor *k_add(hpml_tensor *x) /* of another array of the same kind */
{
    hpml_tensor *z = hpml_input(x->ctx, HPML_DTYPE_F32, x->ndim, x->shape);
    return hpml_add(x, x->node ? hpml_dropout(z, 0) : z);
}
static hpml_tensor *k_bias(hpml_tensor *x)
{
    hpml_param_desc d = {};
    d.ndim = 1, d.shape[0] = x->shape[x->ndim - 1];
    return hpml_add(x, hpml_param_create(x->ctx, &d));
}
static hpml_tensor *k_gelu(hpml_tensor *x) { return hpml_gelu(x); }
static hpml_tensor *k_layernorm(hpml_tensor *x) { return hpml_layernorm(x, NULL); }
static hpml_tensor *k_softmax(hpml_tensor *x) { return hpml_softmax(x); }
static hpml_tensor *k_dropout(hpml_tensor *x) { return hpml_dropout(x, 0.1f); }
static hpml_tensor *k_batchnorm(hpml_tensor *x) { return hpml_batchnorm(x, NULL); }
static hpml_tensor *k_cross_entropy(hpml_tensor *x)
{
    return hpml_cross_entropy(x, hpml_input(x->ctx, HPML_DTYPE_I32, 1, x->shape), NULL);
}
static hpml_tensor *k_embedding(hpml_tensor *x) { return hpml_embedding(x, 50257, 1024, NULL); }

/* How often forward and backward must move the array at least: batchnorm reads all before it can write any. */
static const struct kernel_case {
    const char *name;
    hpml_tensor *(*record)(hpml_tensor *x);
    int     ndim;
    int64_t shape[4];
    double  forward, backward;
} kernels[] = {
    { "relu", k_relu, 2, { 65536, 1024 }, 2, 3 },
    { "add", k_add, 2, { 65536, 1024 }, 3, 3 },
    { "bias add", k_bias, 2, { 65536, 1024 }, 2, 2 },
    { "gelu", k_gelu, 2, { 65536, 1024 }, 2, 3 },
    { "layernorm 768", k_layernorm, 2, { 87040, 768 }, 2, 3 },
    { "layernorm 4096", k_layernorm, 2, { 16384, 4096 }, 2, 3 },
    { "softmax 1024", k_softmax, 2, { 65536, 1024 }, 2, 3 },
    { "cross-entropy 50257", k_cross_entropy, 2, { 1024, 50257 }, 1, 2 },
    { "dropout", k_dropout, 2, { 65536, 1024 }, 2, 2 },
    { "batchnorm 256x64x64x64", k_batchnorm, 4, { 256, 64, 64, 64 }, 3, 5 },
    { "embedding 50257x1024", k_embedding, 2, { 64, 1024 }, 1, 1 },
};

static void bench_kernel(const struct kernel_case *c, hpml_cuda_precision precision)
{
    hpml_ctx    *ctx    = context(precision, false);
    bool         tokens = c->record == k_embedding;
    hpml_tensor *in     = hpml_input(ctx, tokens ? HPML_DTYPE_I32 : HPML_DTYPE_F32, c->ndim, c->shape), *x = in;
    char         name[96];
    one_node     o;
    if (!tokens) hpml_tensor_require_grad(in);
    if (!tokens && precision != HPML_CUDA_F32) x = hpml_dropout(in, 0); /* what it leaves is stored in halves */
    hpml_tensor *y = c->record(x);
    snprintf(name, sizeof name, "%s %s", c->name, precisions[precision]);
    if (prepare(in, y, &o) != HPML_OK) failed(name, hpml_ctx_error(ctx));
    else {
        hpml_tensor *big = tokens ? y : y->node->src[0];
        double       n = (double)hpml_tensor_count(big), bytes = n * (double)hpml_dtype_size(big->dtype);
        if (tokens) {
            static int32_t t[65536];
            hpml_rng       r = {};
            for (int i = 0; i < 65536; i++) t[i] = (int32_t)hpml_rng_below(&r, 50257);
            hpml_tensor_set_raw(in, t, sizeof t);
        }
        for (int back = 0; back < 2; back++) {
            double moved = bytes * (back ? c->backward : c->forward); /* embedding: and the table, in f32 */
            if (tokens) moved += 4.0 * (back ? 50257.0 * 1024 : n);
            o.backward = back == 1;
            snprintf(name, sizeof name, "%s %s %s", c->name, back ? "backward" : "forward", precisions[precision]);
            double seconds = seconds_of(name, ctx, stream_of(ctx), run_node, &o);
            hpml_cuda_text(ctx, ran, sizeof ran);
            if (seconds > 0) row(name, "GB/s", 1e-9 * moved / seconds, "device copy", 1e-9 * copy_ceiling);
        }
    }
    hpml_ctx_free(ctx);
}

typedef struct update_args {
    hpml_ctx    *ctx;
    hpml_update  u;
    hpml_packing p;
    void        *packed;
    int          what; /* 0: AdamW, 1: encode, 2: decode, 3: decode and add */
} update_args;

static hpml_status run_update(void *user)
{
    update_args        *a = (update_args *)user;
    const hpml_backend *b = hpml_ctx_backend(a->ctx);
    void               *d = hpml_ctx_device(a->ctx);
    if (a->what == 0) return b->update(d, a->ctx, &a->u, 1);
    if (a->what == 1) return b->encode(d, a->ctx, &a->p, a->packed, a->u.m, a->u.g, a->p.rows);
    return b->decode(d, a->ctx, &a->p, a->u.w, a->packed, a->p.rows, a->what == 3);
}

static void bench_updates(void)
{
    static const struct { const char *name; double bytes; } cases[] = { { "AdamW f32", 28 }, { "1-bit encode", 12.125 },
        { "1-bit decode", 4.125 }, { "1-bit decode and add", 8.125 } };
    update_args     a = {};
    hpml_codec_desc onebit = {};
    onebit.kind = HPML_CODEC_ONEBIT, onebit.compress_all = true;
    a.ctx  = context(HPML_CUDA_F32, false);
    a.u.opt = HPML_OPT_ADAMW, a.u.n = N, a.u.step = 1, a.u.lr = 1e-4f;
    a.u.beta1 = 0.9f, a.u.beta2 = 0.999f, a.u.eps = 1e-8f;
    a.u.weight_decay = 0.1f, a.u.grad_scale = 1;
    a.u.w = (float *)array(a.ctx, HPML_DTYPE_F32, N), a.u.g = (float *)array(a.ctx, HPML_DTYPE_F32, N);
    a.u.m = (float *)array(a.ctx, HPML_DTYPE_F32, N), a.u.v = (float *)array(a.ctx, HPML_DTYPE_F32, N);
    if (hpml_packing_init(&a.p, &onebit, N / 4096, 4096) != HPML_OK) failed("1-bit", "the packing is refused");
    a.packed = array(a.ctx, HPML_DTYPE_U8, (int64_t)a.p.size);
    for (a.what = 0; a.what < 4; a.what++) {
        if (hpml_ctx_status(a.ctx) != HPML_OK) { failed(cases[a.what].name, hpml_ctx_error(a.ctx)); continue; }
        double seconds = seconds_of(cases[a.what].name, a.ctx, stream_of(a.ctx), run_update, &a);
        if (seconds > 0)
            row(cases[a.what].name, "GB/s", 1e-9 * cases[a.what].bytes * (double)N / seconds,
                "device copy", 1e-9 * copy_ceiling);
    }
    hpml_ctx_free(a.ctx);
}

static void bench_kernels(void)
{
    bench_copy();
    for (size_t i = 0; i < sizeof kernels / sizeof kernels[0]; i++)
        bench_kernel(&kernels[i], HPML_CUDA_F32), bench_kernel(&kernels[i], HPML_CUDA_BF16);
    bench_updates();
}

// --- products --------------------------------------------------------------------------------------------------------

#ifndef HPML_CUDA_NO_CUBLAS
#define TRIED 8
typedef struct product {
    cublasLtHandle_t       lt;
    cublasLtMatmulDesc_t   op;
    cublasLtMatrixLayout_t a, b;
    const void            *w, *x;
    void                  *y, *space;
    cublasLtMatmulAlgo_t  *algo;
    cudaStream_t           stream;
} product;

#define SPACE ((size_t)64 << 20)
static hpml_status run_product(void *user)
{
    product    *p   = (product *)user;
    const float one = 1, zero = 0;
    return cublasLtMatmul(p->lt, p->op, &one, p->w, p->a, p->x, p->b, &zero, p->y, p->b, p->y, p->b, p->algo,
                          p->space, SPACE, p->stream) == CUBLAS_STATUS_SUCCESS
               ? HPML_OK : HPML_ERR_CUDA;
}

/* The fastest of what cuBLASLt proposes for y = x w^T, (n, n) each, in seconds; 0 when it has none. */
static double best_of_cublas(hpml_ctx *ctx, int64_t n, hpml_cuda_precision precision)
{
    bool                            half = precision == HPML_CUDA_BF16;
    cudaDataType_t                  type = half ? CUDA_R_16BF : CUDA_R_32F;
    cublasComputeType_t             sums = precision == HPML_CUDA_TF32 ? CUBLAS_COMPUTE_32F_FAST_TF32
                                                                       : CUBLAS_COMPUTE_32F;
    hpml_dtype                      dtype = half ? HPML_DTYPE_BF16 : HPML_DTYPE_F32;
    cublasOperation_t               turned = CUBLAS_OP_T;
    cublasLtMatmulPreference_t      wish = NULL;
    cublasLtMatmulHeuristicResult_t found[TRIED];
    product p = {};
    int     count = 0;
    double  best  = 0;
    size_t  space = SPACE;
    p.w = array(ctx, dtype, n * n), p.x = array(ctx, dtype, n * n), p.y = array(ctx, dtype, n * n);
    p.space = array(ctx, HPML_DTYPE_U8, (int64_t)SPACE), p.stream = stream_of(ctx);
    const cublasStatus_t good = CUBLAS_STATUS_SUCCESS;
    bool fine = hpml_ctx_status(ctx) == HPML_OK && cublasLtCreate(&p.lt) == good &&
        cublasLtMatmulDescCreate(&p.op, sums, CUDA_R_32F) == good &&
        cublasLtMatmulDescSetAttribute(p.op, CUBLASLT_MATMUL_DESC_TRANSA, &turned, sizeof turned) == good &&
        cublasLtMatrixLayoutCreate(&p.a, type, (uint64_t)n, (uint64_t)n, n) == good &&
        cublasLtMatrixLayoutCreate(&p.b, type, (uint64_t)n, (uint64_t)n, n) == good &&
        cublasLtMatmulPreferenceCreate(&wish) == good &&
        cublasLtMatmulPreferenceSetAttribute(wish, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &space,
                                             sizeof space) == good &&
        cublasLtMatmulAlgoGetHeuristic(p.lt, p.op, p.a, p.b, p.b, p.b, wish, TRIED, found, &count) == good;
    for (int i = 0; fine && i < count; i++) {
        p.algo = &found[i].algo;
        double seconds = seconds_of("cuBLASLt", NULL, p.stream, run_product, &p);
        if (seconds > 0 && (best == 0 || seconds < best)) best = seconds;
    }
    if (best == 0)
        failed("cuBLASLt", hpml_ctx_status(ctx) == HPML_OK ? "has nothing for this product" : hpml_ctx_error(ctx));
    if (wish) cublasLtMatmulPreferenceDestroy(wish);
    if (p.a) cublasLtMatrixLayoutDestroy(p.a);
    if (p.b) cublasLtMatrixLayoutDestroy(p.b);
    if (p.op) cublasLtMatmulDescDestroy(p.op);
    if (p.lt) cublasLtDestroy(p.lt);
    return best;
}
#else
static double best_of_cublas(hpml_ctx *ctx, int64_t n, hpml_cuda_precision precision)
{
    return (void)ctx, (void)n, (void)precision, 0;
}
#endif

static void bench_product(int64_t n, hpml_cuda_precision precision)
{
    hpml_ctx *ctx   = context(precision, false);
    double    flops = 2.0 * (double)n * (double)n * (double)n, peer = best_of_cublas(ctx, n, precision);
    hpml_ctx_free(ctx);
    for (int own = 0; own < 2; own++) {
        hpml_linear_desc d = {};
        char             name[96];
        one_node         o;
        ctx = context(precision, own == 1);
        hpml_tensor *in = hpml_input_2d(ctx, n, n);
        d.no_bias = true;
        hpml_tensor *y = hpml_linear(precision == HPML_CUDA_BF16 ? hpml_dropout(in, 0) : in, n, &d);
        snprintf(name, sizeof name, "linear %lld^3 %s%s", (long long)n, precisions[precision],
                 own ? ", own kernels" : "");
        if (prepare(in, y, &o) != HPML_OK) failed(name, hpml_ctx_error(ctx));
        else {
            double seconds = seconds_of(name, ctx, stream_of(ctx), run_node, &o);
            hpml_cuda_text(ctx, ran, sizeof ran);
            if (seconds > 0)
                row(name, "TFLOP/s", 1e-12 * flops / seconds, "best of cuBLASLt", peer > 0 ? 1e-12 * flops / peer : 0);
        }
        hpml_ctx_free(ctx);
    }
}

/* Backward of a layer of GPT-2, (8192, 3072) to (8192, 768): with the slope of the gelu before it and the sums for its
   bias on board of the two products, against the products alone. */
static void bench_linear(void)
{
    const char *name = "linear backward 8192x3072x768 bf16";
    double      seconds[2] = { 0, 0 }, flops = 2 * 2.0 * 8192 * 3072 * 768;
    for (int aboard = 0; aboard < 2; aboard++) {
        hpml_ctx        *ctx  = context(HPML_CUDA_BF16, false);
        hpml_linear_desc gelu = {}, last = {};
        one_node         o;
        gelu.activation = HPML_ACT_GELU, last.no_bias = !aboard;
        hpml_tensor *in = hpml_input_2d(ctx, 8192, 768), *x = hpml_dropout(in, 0);
        x = aboard ? hpml_linear(x, 3072, &gelu) : hpml_gelu(hpml_linear(x, 3072, NULL));
        if (prepare(in, hpml_linear(x, 768, &last), &o) != HPML_OK) failed(name, hpml_ctx_error(ctx));
        else o.backward = true, seconds[aboard] = seconds_of(name, ctx, stream_of(ctx), run_node, &o);
        hpml_cuda_text(ctx, ran, sizeof ran);
        hpml_ctx_free(ctx);
    }
    if (seconds[1] > 0)
        row(name, "TFLOP/s", 1e-12 * flops / seconds[1], "plain products",
            seconds[0] > 0 ? 1e-12 * flops / seconds[0] : 0);
}

static void bench_matmul(void)
{
    bench_linear();
    static const hpml_cuda_precision kinds[] = { HPML_CUDA_BF16, HPML_CUDA_TF32, HPML_CUDA_F32 };
    for (int k = 0; k < 3; k++)
        for (int64_t n = 1024; n <= 8192; n *= 2) bench_product(n, kinds[k]);
}

// --- attention -------------------------------------------------------------------------------------------------------

static void bench_attention(void)
{
    hpml_ctx *one     = context(HPML_CUDA_BF16, false);
    double    seconds = best_of_cublas(one, 8192, HPML_CUDA_BF16);
    double    ceiling = seconds > 0 ? 1e-12 * 2 * 8192.0 * 8192 * 8192 / seconds : 0;
    hpml_ctx_free(one);
    /* B, T, heads, columns */
    static const int64_t shapes[][4] = { { 8, 1024, 12, 64 }, { 4, 2048, 16, 128 }, { 2, 8192, 12, 64 } };
    for (int i = 0; i < 3; i++)
        for (int causal = 1; causal >= 0; causal--) {
            int64_t   B = shapes[i][0], T = shapes[i][1], H = shapes[i][2], D = shapes[i][3];
            hpml_ctx *ctx = context(HPML_CUDA_BF16, false);
            one_node  o;
            char      name[96];
            hpml_attention_desc d = {};
            d.heads = (int32_t)H, d.not_causal = !causal;
            hpml_tensor *in = hpml_input_3d(ctx, B, T, 3 * H * D), *y = hpml_attention(hpml_dropout(in, 0), &d);
            double       flops = 4.0 * (double)(B * H * D) * (double)T * (double)T * (causal ? 0.5 : 1);
            hpml_status  status = prepare(in, y, &o);
            for (int back = 0; back < 2; back++) {
                snprintf(name, sizeof name, "attention %lldx%lldx%lldx%lld%s %s", (long long)B, (long long)T,
                         (long long)H, (long long)D, causal ? " causal" : "", back ? "backward" : "forward");
                if (status != HPML_OK) { failed(name, hpml_ctx_error(ctx)); continue; }
                o.backward = back == 1;
                seconds = seconds_of(name, ctx, stream_of(ctx), run_node, &o);
                double speed = seconds > 0 ? 1e-12 * flops * (back ? 2.5 : 1) / seconds : 0;
                hpml_cuda_text(ctx, ran, sizeof ran);
                if (seconds > 0)
                    row(name, "TFLOP/s", speed, "best product", ceiling), row_beside_peers(name, "TFLOP/s", speed);
            }
            hpml_ctx_free(ctx);
        }
}

// --- training steps --------------------------------------------------------------------------------------------------

static hpml_tensor *mlp(hpml_ctx *ctx, int64_t batch, hpml_tensor **in)
{
    hpml_linear_desc relu = {};
    relu.activation = HPML_ACT_RELU;
    *in = hpml_input_2d(ctx, batch, 784);
    return hpml_linear(hpml_linear(hpml_linear(*in, 512, &relu), 256, &relu), 10, NULL);
}

static hpml_tensor *conv_norm(hpml_tensor *x, int64_t out, int kernel, int stride, hpml_act act)
{
    hpml_conv2d_desc c = {};
    hpml_norm_desc   n = {};
    c.kernel_h = kernel, c.stride_h = stride, c.padding_h = kernel / 2, c.no_bias = true;
    n.activation = act;
    return hpml_batchnorm(hpml_conv2d(x, out, &c), &n);
}

static hpml_tensor *resnet(hpml_ctx *ctx, int64_t batch, hpml_tensor **in) /* of CIFAR-10's images; 6 residual blocks */
{
    *in = hpml_input_4d(ctx, batch, 3, 32, 32);
    hpml_tensor *x = conv_norm(*in, 64, 3, 1, HPML_ACT_RELU);
    for (int b = 0; b < 6; b++) {
        int64_t      width = (int64_t)64 << b / 2;
        int          stride = b == 2 || b == 4 ? 2 : 1;
        hpml_tensor *y = conv_norm(conv_norm(x, width, 3, stride, HPML_ACT_RELU), width, 3, 1, HPML_ACT_NONE);
        x = hpml_relu(hpml_add(y, stride == 2 ? conv_norm(x, width, 1, 2, HPML_ACT_NONE) : x));
    }
    return hpml_linear(hpml_flatten(hpml_global_avg_pool2d(x)), 10, NULL);
}

static hpml_tensor *gpt2(hpml_ctx *ctx, int64_t batch, hpml_tensor **in) /* 124 M parameters, 1,024 tokens */
{
    const int64_t       T = 1024, C = 768, V = 50304;
    hpml_embedding_desc table = {};
    hpml_linear_desc    gelu = {}, head = {};
    hpml_param_desc     place = {};
    hpml_attention_desc heads = {};
    table.name = "wte", table.init = HPML_INIT_NORMAL, gelu.activation = HPML_ACT_GELU, heads.heads = 12;
    place.name = "wpe.weight", place.init = HPML_INIT_NORMAL, place.ndim = 2, place.shape[0] = T, place.shape[1] = C;
    *in = hpml_input_tokens(ctx, batch, T);
    hpml_tensor *x = hpml_embedding(*in, V, C, &table);
    x = hpml_add(x, hpml_param_create(ctx, &place));
    for (int l = 0; l < 12; l++) {
        x = hpml_add(x,
                     hpml_linear(hpml_attention(hpml_linear(hpml_layernorm(x, NULL), 3 * C, NULL), &heads), C, NULL));
        x = hpml_add(x, hpml_linear(hpml_linear(hpml_layernorm(x, NULL), 4 * C, &gelu), C, NULL));
    }
    head.no_bias = true, head.weight = hpml_param_find(ctx, "wte.weight");
    return hpml_linear(hpml_layernorm(x, NULL), V, &head);
}

static const struct train_case {
    const char *name; /* as in bench_gpu.py */
    hpml_tensor *(*record)(hpml_ctx *ctx, int64_t batch, hpml_tensor **in);
    int64_t             batch;
    hpml_cuda_precision precision;
    hpml_opt            opt;
    const char         *unit;
} trainings[] = {
    { "mlp 784-512-256-10 batch 64 tf32", mlp, 64, HPML_CUDA_TF32, HPML_OPT_SGD, "samples/s" },
    { "mlp 784-512-256-10 batch 4096 tf32", mlp, 4096, HPML_CUDA_TF32, HPML_OPT_SGD, "samples/s" },
    { "resnet cifar batch 256 bf16", resnet, 256, HPML_CUDA_BF16, HPML_OPT_SGD, "samples/s" },
    { "gpt2 124M batch 8x1024 bf16", gpt2, 8, HPML_CUDA_BF16, HPML_OPT_ADAMW, "tokens/s" },
    { "gpt2 124M batch 16x1024 bf16", gpt2, 16, HPML_CUDA_BF16, HPML_OPT_ADAMW, "tokens/s" },
};

/* Seconds of a step, batch from host memory and update included: the median of five rounds of a third of a second. */
static double seconds_of_step(hpml_ctx *ctx, hpml_trainer *t, const void *x, const int32_t *y, int64_t batch)
{
    float rounds[5] = { 0 };
    int   n = 5;
    for (int r = -2; r < 5; r++) { /* the first round warms up, the second sets the number of steps */
        double start = hpml_now();
        for (int i = 0; i < n; i++) hpml_trainer_step(t, x, y, batch, NULL);
        hpml_ctx_backend(ctx)->sync(hpml_ctx_device(ctx));
        double each = (hpml_now() - start) / n;
        if (hpml_ctx_status(ctx) != HPML_OK) return 0;
        if (r == -1) n = each > 0.1 ? 3 : (int)(0.33 / each) + 1;
        if (r >= 0) rounds[r] = (float)each;
    }
    qsort(rounds, 5, sizeof rounds[0], by_size);
    return rounds[2];
}

static void bench_training(const struct train_case *c)
{
    hpml_ctx         *ctx = context(c->precision, false);
    hpml_trainer_desc d   = {};
    hpml_rng          r   = {};
    d.output = c->record(ctx, c->batch, &d.input);
    d.optimizer = c->opt, d.lr = 1e-4f, d.no_finite_check = true;
    if (c->opt == HPML_OPT_SGD) d.momentum = 0.9f;
    else d.weight_decay = 0.1f;
    hpml_trainer *t = hpml_trainer_create(ctx, &d);
    int64_t       n = hpml_tensor_count(d.input), classes = d.output ? d.output->shape[d.output->ndim - 1] : 1;
    int64_t       labels = hpml_tensor_count(d.output) / classes;
    float        *x = (float *)malloc((size_t)n * sizeof(float) + 1);
    int32_t      *y = (int32_t *)malloc((size_t)labels * sizeof(int32_t) + 1);
    if (t && x && y) {
        if (d.input->dtype == HPML_DTYPE_F32) hpml_rng_fill_normal(&r, x, n);
        else for (int64_t i = 0; i < n; i++) ((int32_t *)x)[i] = (int32_t)hpml_rng_below(&r, 50257);
        for (int64_t i = 0; i < labels; i++)
            y[i] = (int32_t)hpml_rng_below(&r, (int)(classes < 50257 ? classes : 50257));
        double seconds = seconds_of_step(ctx, t, x, y, c->batch);
        hpml_cuda_text(ctx, ran, sizeof ran);
        if (seconds > 0) row_beside_peers(c->name, c->unit, (double)labels / seconds);
    }
    if (hpml_ctx_status(ctx) != HPML_OK) failed(c->name, hpml_ctx_error(ctx));
    free(x);
    free(y);
    hpml_ctx_free(ctx);
}

static void bench_train(void)
{
    for (size_t i = 0; i < sizeof trainings / sizeof trainings[0]; i++) bench_training(&trainings[i]);
}

int main(int argc, char **argv)
{
    static const struct { const char *name; void (*run)(void); } groups[] = {
        { "kernels", bench_kernels }, { "matmul", bench_matmul },
        { "attention", bench_attention }, { "train", bench_train } };
    hpml_cuda_info info = {};
    peers_path = argc > 2 ? argv[2] : NULL;
    if (hpml_cuda_device_count() == 0) return printf("SKIP: no CUDA device\n"), 77;
    if (hpml_cuda_device_info(0, &info) != HPML_OK) return printf("the device does not say what it is\n"), 1;
    snprintf(device_name, sizeof device_name, "%s", info.name);
    for (size_t i = 0; i < sizeof groups / sizeof groups[0]; i++)
        if (argc > 1 && strcmp(argv[1], groups[i].name) == 0) return groups[i].run(), failures > 0;
    return fprintf(stderr, "bench_gpu kernels|matmul|attention|train [peers]\n"), 2;
}
