/* Codecs: gigabytes of gradient per second, encode and decode + add, one thread, beside memcpy of the same bytes in the
   same run. Prints a table and appends a line for each case to build/bench.jsonl (or to the file named as argument). */
#define HPML_IMPLEMENTATION
#include "../../hpml.h"

typedef struct bench {
    hpml_packing p;
    float       *g, *e, *out;
    void        *packed;
    int          what; /* 0 encode, 1 decode, 2 decode + add, 3 memcpy */
} bench;

static void once(bench *b)
{
    if (b->what == 0) hpml_packing_encode(&b->p, b->packed, b->e, b->g, b->p.rows, NULL);
    if (b->what == 1) hpml_packing_decode(&b->p, b->out, b->packed, b->p.rows);
    if (b->what == 2) hpml_packing_decode_add(&b->p, b->out, b->packed, b->p.rows);
    if (b->what == 3) memcpy(b->out, b->g, (size_t)(b->p.rows * b->p.cols) * sizeof(float));
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* GB/s of gradient of `what` and of memcpy, taking turns: medians of 7 stretches of 20 ms or more. */
static void rates(bench *b, int what, double *ours, double *copy)
{
    double bytes = 4.0 * (double)b->p.rows * (double)b->p.cols, rate[2][7];
    int    times[2] = { 1, 1 };
    for (int run = 0; run < 14;) {
        double start = hpml_now(), t;
        b->what = run % 2 ? 3 : what;
        for (int i = 0; i < times[run % 2]; i++) once(b);
        t = hpml_now() - start;
        if (t < 0.02) times[run % 2] *= 2;
        else rate[run % 2][run / 2] = bytes * times[run % 2] / t / 1e9, run++;
    }
    qsort(rate[0], 7, sizeof(double), by_value);
    qsort(rate[1], 7, sizeof(double), by_value);
    *ours = rate[0][3], *copy = rate[1][3];
}

int main(int argc, char **argv)
{
    static const int64_t     shape[][2] = { { 128, 784 }, { 64, 25 }, { 1024, 1024 }, { 4096, 4096 }, { 16, 1 << 20 } };
    static const char *const verbs[] = { "encode", "decode", "decode_add" };
    FILE                    *f = fopen(argc > 1 ? argv[1] : "build/bench.jsonl", "a");
    printf("%-10s %-8s %14s %8s %8s %8s\n", "codec", "verb", "rows x cols", "GB/s", "memcpy", "ratio");
    for (int s = 0; s < 5; s++)
        for (int kind = HPML_CODEC_BF16; kind <= HPML_CODEC_TWOBIT; kind++) {
            hpml_codec_desc d;
            hpml_rng        r = { 1, 0, 0 };
            bench           b;
            size_t          n = (size_t)(shape[s][0] * shape[s][1]);
            memset(&d, 0, sizeof d);
            d.kind = (hpml_codec_kind)kind;
            if (hpml_packing_init(&b.p, &d, shape[s][0], shape[s][1]) != HPML_OK) return 1;
            b.g      = (float *)malloc(n * sizeof(float));
            b.e      = (float *)calloc(n, sizeof(float));
            b.out    = (float *)calloc(n, sizeof(float));
            b.packed = malloc(b.p.size);
            if (!b.g || !b.e || !b.out || !b.packed) return 1;
            hpml_rng_fill_normal(&r, b.g, (int64_t)n);
            for (int verb = 0; verb < 3; verb++) {
                double copy, ours;
                char   name[64];
                rates(&b, verb, &ours, &copy);
                snprintf(name, sizeof name, "%s_%s_%lldx%lld", b.p.codec->name, verbs[verb], (long long)shape[s][0],
                         (long long)shape[s][1]);
                printf("%-10s %-10s %7lld x %-7lld %7.2f %8.2f %8.2f\n", b.p.codec->name, verbs[verb],
                       (long long)shape[s][0], (long long)shape[s][1], ours, copy, ours / copy);
                if (f)
                    fprintf(f, "{\"bench\":\"codec\",\"case\":\"%s\",\"unit\":\"GB/s\",\"hpml\":%.3f,"
                               "\"peer\":\"memcpy\",\"peer_value\":%.3f,\"ratio\":%.3f}\n",
                            name, ours, copy, ours / copy);
            }
            free(b.g);
            free(b.e);
            free(b.out);
            free(b.packed);
        }
    if (f) fclose(f);
    return 0;
}
