/* Matrix products against OpenBLAS and oneDNN, in one process, taking turns; medians of several rounds.

   The peers are opened at run time: where a library is not installed its column is 0. GFLOP/s are 2 m n k / seconds.
   The last column compares with what a loop of nothing but multiply-adds in registers reaches on one thread in the same
   run, times threads. At the end products of bytes: hpml_igemm against oneDNN's u8 x s8, and as a multiple of
   hpml_sgemm; of bf16: hpml_bgemm as a multiple of hpml_sgemm.

   build   cc -O2 tests/bench/bench_gemm.c -o build/bench_gemm -lm -lpthread -ldl
   run     build/bench_gemm [--filter TEXT] [--rounds N] [--threads 1|2]      rows are appended to build/bench.jsonl */
#define _GNU_SOURCE
#define HPML_IMPLEMENTATION
#include "../../hpml.h"
#include "peak.h"
#include <dlfcn.h>

typedef void cblas_sgemm_fn(int, int, int, int, int, int, float, const float *, int, const float *, int, float,
                            float *, int);
typedef int  dnnl_sgemm_fn(char, char, int64_t, int64_t, int64_t, float, const float *, int64_t, const float *, int64_t,
                           float, float *, int64_t);
typedef int  dnnl_bytes_fn(char, char, char, int64_t, int64_t, int64_t, float, const uint8_t *, int64_t, uint8_t,
                           const int8_t *, int64_t, int8_t, float, int32_t *, int64_t, const int32_t *);
typedef void set_threads_fn(int);

enum { HPML, OPENBLAS, ONEDNN, LIBRARIES };
static const char *const library_names[LIBRARIES] = { "hpml", "openblas", "onednn" };

typedef struct bench {
    hpml_ctx        *ctx;
    cblas_sgemm_fn  *openblas;
    dnnl_sgemm_fn   *onednn;
    dnnl_bytes_fn   *onednn_bytes;
    set_threads_fn  *openblas_threads, *omp_threads;
    float           *a, *b, *c;
    uint16_t        *half; /* the first 1 Mi numbers of a, in bf16 */
} bench;

typedef struct shape {
    const char *group;
    int64_t     m, n, k;
    int         ta, tb;
} shape;

#define ALL_TRANSPOSES(group, m, n, k) \
    { group, m, n, k, 0, 0 }, { group, m, n, k, 0, 1 }, { group, m, n, k, 1, 0 }, { group, m, n, k, 1, 1 }
/* Linear layer, rows x in -> out: forward, gradient of the input, gradient of the weight. */
#define LAYER(group, rows, in, out) \
    { group, rows, out, in, 0, 1 }, { group, rows, in, out, 0, 0 }, { group, out, in, rows, 1, 0 }
/* Convolution of one image, `taps` = channels in x kernel area: forward, gradients of columns and weight. */
#define CONV(group, out, taps, pixels) \
    { group, out, pixels, taps, 0, 0 }, { group, taps, pixels, out, 1, 0 }, { group, out, taps, pixels, 0, 1 }

static const shape shapes[] = {
    ALL_TRANSPOSES("square", 64, 64, 64), { "square", 96, 96, 96, 0, 0 }, ALL_TRANSPOSES("square", 128, 128, 128),
    { "square", 192, 192, 192, 0, 0 }, ALL_TRANSPOSES("square", 256, 256, 256), { "square", 384, 384, 384, 0, 0 },
    ALL_TRANSPOSES("square", 512, 512, 512), { "square", 768, 768, 768, 0, 0 },
    ALL_TRANSPOSES("square", 1024, 1024, 1024), { "square", 1500, 1500, 1500, 0, 0 },
    ALL_TRANSPOSES("square", 2048, 2048, 2048),
    LAYER("mlp", 64, 784, 512), LAYER("mlp", 64, 512, 256), LAYER("mlp", 64, 256, 10), LAYER("mlp", 64, 512, 10),
    CONV("cnn", 6, 25, 784), CONV("cnn", 16, 150, 100), CONV("cnn", 32, 27, 1024), CONV("cnn", 32, 288, 1024),
    CONV("cnn", 64, 288, 256), CONV("cnn", 64, 576, 256), CONV("cnn", 128, 576, 64), CONV("cnn", 128, 1152, 64),
    { "cnn", 32, 65536, 27, 0, 0 }, { "cnn", 64, 16384, 288, 0, 0 }, { "cnn", 32, 27, 50000, 0, 1 },
    { "cnn", 64, 288, 16384, 0, 1 },
    LAYER("transformer", 1024, 128, 384), LAYER("transformer", 1024, 128, 128), LAYER("transformer", 1024, 128, 512),
    LAYER("transformer", 1024, 512, 128), LAYER("transformer", 1024, 128, 65),
    { "attention", 64, 64, 32, 0, 1 }, { "attention", 64, 32, 64, 0, 0 }, { "attention", 64, 32, 64, 1, 0 },
    { "gemv", 1, 512, 784, 0, 1 }, { "gemv", 1, 784, 512, 0, 0 }, { "gemv", 512, 1, 784, 0, 0 }
};
#define SHAPES ((int)(sizeof shapes / sizeof shapes[0]))

static void call(const bench *x, int library, const shape *s)
{
    int64_t lda = s->ta ? s->m : s->k, ldb = s->tb ? s->k : s->n;
    if (library == HPML)
        hpml_sgemm(x->ctx, s->ta != 0, s->tb != 0, s->m, s->n, s->k, 1, x->a, lda, x->b, ldb, 0, x->c, s->n);
    else if (library == OPENBLAS)
        x->openblas(101, s->ta ? 112 : 111, s->tb ? 112 : 111, (int)s->m, (int)s->n, (int)s->k, 1, x->a, (int)lda, x->b,
                    (int)ldb, 0, x->c, (int)s->n);
    else
        x->onednn(s->ta ? 'T' : 'N', s->tb ? 'T' : 'N', s->m, s->n, s->k, 1, x->a, lda, x->b, ldb, 0, x->c, s->n);
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static double median(double *x, int n)
{
    qsort(x, (size_t)n, sizeof *x, by_value);
    return n == 0 ? 0 : n % 2 ? x[n / 2] : 0.5 * (x[n / 2 - 1] + x[n / 2]);
}

/* GFLOP/s of `reps` calls. */
static double sample(const bench *x, int library, const shape *s, int reps)
{
    double start = hpml_now();
    for (int i = 0; i < reps; i++) call(x, library, s);
    return 2.0 * (double)s->m * (double)s->n * (double)s->k * reps / (hpml_now() - start) * 1e-9;
}

/* Threads of the peers go on spinning for a while after a call: with more than one, let them fall asleep first. */
static void pause_for(int threads)
{
    struct timespec t = { 0, 30000000 };
    if (threads > 1) nanosleep(&t, NULL);
}

static void measure(const bench *x, const shape *s, int threads, int rounds, double *out, double *peak)
{
    double value[LIBRARIES][64], peaks[64];
    double seconds = 2.0 * (double)s->m * (double)s->n * (double)s->k / (100e9 * threads);
    int    reps = (int)(2e-3 / (seconds + 1e-7)) + 1;
    for (int round = 0; round < rounds; round++) {
        peaks[round] = peak_gflops(hpml_ctx_cpu(x->ctx)) * threads;
        for (int library = 0; library < LIBRARIES; library++) {
            value[library][round] = 0;
            if ((library == OPENBLAS && !x->openblas) || (library == ONEDNN && !x->onednn)) continue;
            pause_for(threads);
            sample(x, library, s, threads > 1 ? 4 * reps : reps / 4 + 1); /* an idle core takes its time to wake up */
            value[library][round] = sample(x, library, s, reps);
        }
    }
    for (int library = 0; library < LIBRARIES; library++) out[library] = median(value[library], rounds);
    *peak = median(peaks, rounds);
}

/* One row of the file; without a peer it is null. */
static void put(FILE *json, const char *what, const char *name, double hpml, const char *peer, double value)
{
    if (!json) return;
    fprintf(json, "{\"bench\":\"%s\",\"case\":\"%s\",\"unit\":\"GFLOP/s\",\"hpml\":%.2f,", what, name, hpml);
    if (value > 0) fprintf(json, "\"peer\":\"%s\",\"peer_value\":%.2f,\"ratio\":%.3f}\n", peer, value, hpml / value);
    else fprintf(json, "\"peer\":null,\"peer_value\":null,\"ratio\":null}\n");
}

static void open_peers(bench *x)
{
    void *library;
    /* The peer at its best, whatever the environment asks for: old builds do not know newer cores than this one. */
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f")) setenv("OPENBLAS_CORETYPE", "SKYLAKEX", 1);
#endif
    unsetenv("OPENBLAS_L2_SIZE");
    library = dlopen("libopenblas.so.0", RTLD_NOW | RTLD_LOCAL);
    if (library) {
        *(void **)&x->openblas         = dlsym(library, "cblas_sgemm");
        *(void **)&x->openblas_threads = dlsym(library, "openblas_set_num_threads");
    }
    for (int version = 2; version < 4 && !x->onednn; version++) {
        char name[32];
        snprintf(name, sizeof name, "libdnnl.so.%d", version);
        library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
        if (!library) continue;
        *(void **)&x->onednn       = dlsym(library, "dnnl_sgemm");
        *(void **)&x->onednn_bytes = dlsym(library, "dnnl_gemm_u8s8s32");
    }
    library = dlopen("libgomp.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library) *(void **)&x->omp_threads = dlsym(library, "omp_set_num_threads");
}

/* Products of bytes and bf16. The arrays of floats serve as bytes, too, because the values of bytes do not matter. */
static const shape byte_shapes[] = {
    { "bytes", 64, 64, 64, 0, 1 }, ALL_TRANSPOSES("bytes", 256, 256, 256), ALL_TRANSPOSES("bytes", 1024, 1024, 1024),
    { "bytes", 64, 512, 784, 0, 1 }, { "bytes", 1, 512, 784, 0, 1 }
};
enum { BYTES, BYTES_ONEDNN, BF16, FLOATS, KINDS };

static void call_kind(const bench *x, int kind, const shape *s)
{
    int64_t        lda = s->ta ? s->m : s->k, ldb = s->tb ? s->k : s->n;
    const int32_t  offset = 0;
    const uint8_t *u8 = (const uint8_t *)x->b;
    const int8_t  *s8 = (const int8_t *)x->a;
    int32_t       *c  = (int32_t *)x->c;
    if (kind == BYTES) hpml_igemm(x->ctx, s->ta, s->tb, s->m, s->n, s->k, s8, lda, u8, ldb, false, c, s->n);
    else if (kind == BYTES_ONEDNN)
        x->onednn_bytes(s->ta ? 'T' : 'N', s->tb ? 'T' : 'N', 'F', s->m, s->n, s->k, 1, u8, lda, 0, s8, ldb, 0, 0, c,
                        s->n, &offset);
    else if (kind == BF16)
        hpml_bgemm(x->ctx, s->ta, s->tb, s->m, s->n, s->k, 1, x->half, lda, x->half, ldb, 0, x->c, s->n);
    else call(x, HPML, s);
}

static void measure_bytes(const bench *x, int threads, int rounds, const char *filter, FILE *json)
{
    for (int i = 0; i < (int)(sizeof byte_shapes / sizeof byte_shapes[0]); i++) {
        const shape *s = &byte_shapes[i];
        double       value[KINDS][64], v[KINDS], work = 2.0 * (double)s->m * (double)s->n * (double)s->k;
        int          reps = (int)(2e-3 / (work / 200e9 + 1e-7)) + 1;
        char         name[64];
        snprintf(name, sizeof name, "%dx%dx%d %c%c %dt", (int)s->m, (int)s->n, (int)s->k, s->ta ? 'T' : 'N',
                 s->tb ? 'T' : 'N', threads);
        if (!strstr(name, filter) && !strstr(s->group, filter)) continue;
        for (int round = 0; round < rounds; round++)
            for (int kind = 0; kind < KINDS; kind++) {
                value[kind][round] = 0;
                if (kind == BYTES_ONEDNN && !x->onednn_bytes) continue;
                pause_for(threads);
                call_kind(x, kind, s);
                double start = hpml_now();
                for (int r = 0; r < reps; r++) call_kind(x, kind, s);
                value[kind][round] = work * reps / (hpml_now() - start) * 1e-9;
            }
        for (int kind = 0; kind < KINDS; kind++) v[kind] = median(value[kind], rounds);
        printf("%-12s %-26s %9.1f %9s %9.1f %7.2f   %.2f times sgemm, bf16 %.2f\n", s->group, name, v[BYTES], "",
               v[BYTES_ONEDNN], v[BYTES_ONEDNN] > 0 ? v[BYTES] / v[BYTES_ONEDNN] : 0, v[BYTES] / v[FLOATS],
               v[BF16] / v[FLOATS]);
        fflush(stdout);
        put(json, "igemm", name, v[BYTES], "onednn u8s8s32", v[BYTES_ONEDNN]);
        put(json, "igemm of sgemm", name, v[BYTES], "hpml_sgemm", v[FLOATS]);
        put(json, "bgemm of sgemm", name, v[BF16], "hpml_sgemm", v[FLOATS]);
    }
}

static float *numbers(int64_t n)
{
    float *x = (float *)aligned_alloc(64, (size_t)(n + 15) / 16 * 64);
    for (int64_t i = 0; x && i < n; i++) x[i] = (float)(i * 7919 % 1000) * 1e-3f - 0.5f;
    return x;
}

int main(int argc, char **argv)
{
    bench       x;
    const char *filter = "";
    int         rounds = 7, only = 0;
    FILE       *json;
    memset(&x, 0, sizeof x);
    for (int i = 1; i + 1 < argc; i += 2) {
        if (strcmp(argv[i], "--filter") == 0) filter = argv[i + 1];
        if (strcmp(argv[i], "--rounds") == 0) rounds = atoi(argv[i + 1]);
        if (strcmp(argv[i], "--threads") == 0) only = atoi(argv[i + 1]);
    }
    rounds = rounds < 1 ? 1 : rounds > 64 ? 64 : rounds;
    open_peers(&x);
    x.a = numbers(8 << 20), x.b = numbers(8 << 20), x.c = numbers(8 << 20);
    x.half = (uint16_t *)malloc((1 << 20) * sizeof *x.half);
    if (!x.a || !x.b || !x.c || !x.half) return 1;
    json = fopen("build/bench.jsonl", "a");
    printf("openblas: %s   onednn: %s\n", x.openblas ? "yes" : "absent", x.onednn ? "yes" : "absent");
    for (int threads = 1; threads <= 2; threads++) {
        hpml_ctx_desc desc;
        double        log_ratio = 0, worst = 1e9;
        int           count = 0;
        if (only && threads != only) continue;
        memset(&desc, 0, sizeof desc);
        desc.threads = threads;
        x.ctx        = hpml_ctx_create(&desc);
        if (hpml_ctx_status(x.ctx) != HPML_OK) return 1;
        hpml_convert(x.ctx, HPML_DTYPE_BF16, x.half, HPML_DTYPE_F32, x.a, 1 << 20);
        if (x.openblas_threads) x.openblas_threads(threads);
        if (x.omp_threads) x.omp_threads(threads);
        printf("%-12s %-26s %9s %9s %9s %7s %7s\n", "", "", "hpml", "openblas", "onednn", "ratio", "peak");
        for (int i = 0; i < SHAPES; i++) {
            const shape *s = &shapes[i];
            double       v[LIBRARIES], peak, best;
            char         name[64];
            int          peer;
            snprintf(name, sizeof name, "%dx%dx%d %c%c %dt", (int)s->m, (int)s->n, (int)s->k, s->ta ? 'T' : 'N',
                     s->tb ? 'T' : 'N', threads);
            if (!strstr(name, filter) && !strstr(s->group, filter)) continue;
            measure(&x, s, threads, rounds, v, &peak);
            peer = v[ONEDNN] > v[OPENBLAS] ? ONEDNN : OPENBLAS;
            best = v[peer] > 0 ? v[peer] : v[HPML];
            printf("%-12s %-26s %9.1f %9.1f %9.1f %7.2f %6.0f%%\n", s->group, name, v[HPML], v[OPENBLAS], v[ONEDNN],
                   v[HPML] / best, peak > 0 ? 100 * v[HPML] / peak : 0);
            fflush(stdout);
            put(json, "sgemm", name, v[HPML], library_names[peer], v[peer]);
            if ((double)s->m * (double)s->n * (double)s->k >= 512. * 512 * 512)
                put(json, "sgemm of peak", name, v[HPML], "FMA loop", peak);
            log_ratio += log(v[HPML] / best), count++;
            if (v[HPML] / best < worst) worst = v[HPML] / best;
        }
        if (count)
            printf("%d threads: geometric mean of hpml / fastest peer over %d shapes %.3f, worst %.2f\n", threads,
                   count, exp(log_ratio / count), worst);
        measure_bytes(&x, threads, rounds, filter, json);
        hpml_ctx_free(x.ctx);
    }
    if (json) fclose(json);
    free(x.a), free(x.b), free(x.c), free(x.half);
    return 0;
}
