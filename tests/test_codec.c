/* Gradient codecs: against a naive double reference, error feedback, sizes, cuts, hostile values, instruction sets. */
#define _GNU_SOURCE /* mkstemp */
#include "control_codecs.h"
#include "private_api.h"
#include "kernels.h"
#include "test.h"
#include <float.h>
#include <unistd.h>

#define MAX  (64 * 1024)

static float         g[MAX], e[MAX], v[MAX], out[MAX], before[MAX];
static unsigned char packed[MAX * 4], other[MAX * 4];

static hpml_packing packing_of(hpml_codec_kind kind, int64_t rows, int64_t cols)
{
    hpml_codec_desc d;
    hpml_packing    p;
    memset(&d, 0, sizeof d);
    d.kind         = kind;
    d.compress_all = true;
    if (hpml_packing_init(&p, &d, rows, cols) != HPML_OK) memset(&p, 0, sizeof p);
    return p;
}

static void fill(float *x, uint64_t stream, int64_t n, float scale, float shift)
{
    hpml_rng r = { 77, 0, 0 };
    r.stream   = stream;
    hpml_rng_fill_normal(&r, x, n);
    for (int64_t i = 0; i < n; i++) x[i] = x[i] * scale + shift;
}

/* The definition, in double: levels of one row. */
static void reference(const float *x, int64_t n, double level[2])
{
    double  sum[2] = { 0, 0 };
    int64_t count[2] = { 0, 0 };
    for (int64_t i = 0; i < n; i++) sum[x[i] >= 0] += x[i], count[x[i] >= 0]++;
    for (int s = 0; s < 2; s++) level[s] = count[s] ? sum[s] / (double)count[s] : 0;
}

TEST(onebit_is_the_definition_at_all_sizes)
{
    static const int sizes[] = { 1,  4,  5,  7,  15,  16,  17,  31,   32,   33,   47,   48,
                                 49, 63, 64, 65, 127, 257, 784, 1021, 1024, 1025, 4099, 20011 };
    for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++) {
        int64_t      n = sizes[s], rows = 3;
        hpml_packing p = packing_of(HPML_CODEC_ONEBIT, rows, n);
        ENSURE(p.row_size == 8 + 4 * (size_t)((n + 31) / 32) || (n <= 4 && p.row_size == 4 * (size_t)n));
        if (p.codec != hpml_codec_get(HPML_CODEC_ONEBIT)) continue;
        fill(g, (uint64_t)n, rows * n, 0.01f, 0.002f);
        fill(e, (uint64_t)n + 1, rows * n, 0.02f, 0);
        for (int64_t i = 0; i < rows * n; i++) v[i] = g[i] + e[i];
        memset(packed, 0xa5, sizeof packed);
        ENSURE(hpml_packing_encode(&p, packed, e, g, rows, NULL) == HPML_OK);
        ENSURE(packed[p.size] == 0xa5); /* not a byte more */
        hpml_packing_decode(&p, out, packed, rows);
        for (int64_t r = 0; r < rows; r++) {
            const unsigned char *q = packed + (size_t)r * p.row_size;
            float                level[2];
            double               right[2];
            reference(v + r * n, n, right);
            memcpy(level, q, sizeof level);
            ENSURE_NEAR(level[0], right[0], 1e-6 * fabs(right[0]));
            ENSURE_NEAR(level[1], right[1], 1e-6 * fabs(right[1]));
            for (int64_t i = 0; i < (n + 31) / 32 * 32; i++) {
                int bit = q[8 + i / 8] >> i % 8 & 1;
                ENSURE(bit == (i < n && v[r * n + i] >= 0));
                if (i >= n) continue;
                ENSURE(out[r * n + i] == level[bit]);
                ENSURE(e[r * n + i] == v[r * n + i] - out[r * n + i]); /* bit for bit */
            }
        }
        for (int64_t i = 0; i < rows * n; i++) before[i] = out[i], out[i] = g[i];
        hpml_packing_decode_add(&p, out, packed, rows);
        for (int64_t i = 0; i < rows * n; i++) ENSURE(out[i] == g[i] + before[i]);
    }
}

/* All numbers of a few rows, among them both thresholds and their neighbours, at all positions in a word. */
TEST(twobit_is_the_definition_at_all_sizes)
{
    const float t = 0.3f, edges[] = { t, -t, nextafterf(t, 0), nextafterf(-t, 0), nextafterf(t, 1), -0.0f, FLT_MAX };
    const int   rows = 3;
    for (int a = 0; a < ISAS; a++)
        for (int64_t n = 1; n < 70; n++) {
            hpml_packing p = packing_of(HPML_CODEC_TWOBIT, rows, n);
            if (p.codec != hpml_codec_get(HPML_CODEC_TWOBIT)) continue;
            p.kernels        = private_kernels(isas[a]);
            p.desc.threshold = t;
            if (!p.kernels) continue;
            fill(g, (uint64_t)n, rows * n, 0.4f, 0);
            fill(e, (uint64_t)n + 1, rows * n, 0.4f, 0);
            for (int64_t i = 0; i < rows * n; i++) {
                if ((i + n) % 3 == 0) g[i] = edges[(i + n) / 3 % 7], e[i] = 0;
                v[i] = g[i] + e[i];
            }
            memset(packed, 0xa5, sizeof packed);
            ENSURE(hpml_packing_encode(&p, packed, e, g, rows, NULL) == HPML_OK);
            ENSURE(packed[p.size] == 0xa5); /* not a byte more */
            hpml_packing_decode(&p, out, packed, rows);
            for (int64_t r = 0; r < rows; r++)
                for (int64_t i = 0; i < (n + 15) / 16 * 16; i++) {
                    const int64_t at   = r * n + i;
                    const int     code = packed[(size_t)r * p.row_size + (size_t)i / 4] >> 2 * (i % 4) & 3;
                    float         sent = 0;
                    if (i < n && v[at] >= t) sent = t;
                    if (i < n && v[at] <= -t) sent = -t;
                    ENSURE(code == (sent != 0) * 2 + (sent > 0));
                    if (i < n) ENSURE(out[at] == sent && e[at] == v[at] - sent);
                }
            for (int64_t i = 0; i < rows * n; i++) before[i] = out[i], out[i] = g[i];
            hpml_packing_decode_add(&p, out, packed, rows);
            for (int64_t i = 0; i < rows * n; i++) ENSURE(out[i] == g[i] + before[i]);
        }
}

/* |sum of gradients - sum of what was sent - residual| / |sum of gradients| after 1,000 steps. */
static double telescope(const hpml_codec_desc *d, int64_t rows, int64_t cols)
{
    static double sum[8192], sent[8192];
    double        error = 0, norm = 0;
    int64_t       n = rows * cols;
    hpml_packing  p;
    if (hpml_packing_init(&p, d, rows, cols) != HPML_OK) return -1;
    memset(sum, 0, sizeof sum);
    memset(sent, 0, sizeof sent);
    memset(e, 0, sizeof e);
    for (int step = 0; step < 1000; step++) {
        fill(g, 1000 + (uint64_t)step, n, 0.01f, 0);
        for (int64_t i = 0; i < n; i++) g[i] += 0.002f * (float)(i % 5 - 2); /* some signal under the noise */
        if (hpml_packing_encode(&p, packed, e, g, rows, NULL) != HPML_OK) return -1;
        hpml_packing_decode(&p, out, packed, rows);
        for (int64_t i = 0; i < n; i++) sum[i] += g[i], sent[i] += out[i];
    }
    for (int64_t i = 0; i < n; i++) {
        double lost = sum[i] - sent[i] - e[i];
        error += lost * lost;
        norm += sum[i] * sum[i];
    }
    return sqrt(error / norm);
}

TEST(error_feedback_telescopes)
{
    hpml_codec_desc d;
    memset(&d, 0, sizeof d);
    ENSURE(telescope(&d, 20, 97) == 0); /* nothing is lost */
    d.kind = HPML_CODEC_ONEBIT;
    ENSURE(telescope(&d, 20, 97) < 1e-6);
    ENSURE(telescope(&d, 3, 1031) < 1e-6);
    d.kind = HPML_CODEC_BF16;
    ENSURE(telescope(&d, 20, 97) < 1e-6);
}

TEST(controls_fail_to_telescope)
{
    hpml_codec_desc d;
    memset(&d, 0, sizeof d);
    const hpml_codec onebit = printed_residual(HPML_CODEC_ONEBIT), bf16 = printed_residual(HPML_CODEC_BF16);
    d.custom = &onebit;
    ENSURE(telescope(&d, 20, 97) > 0.1);
    d.custom = &bf16;
    ENSURE(telescope(&d, 20, 97) > 1e-5);
    d.custom      = NULL;
    d.kind        = HPML_CODEC_BF16;
    d.no_feedback = true;
    ENSURE(telescope(&d, 20, 97) > 1e-5);
    d.kind = HPML_CODEC_ONEBIT;
    ENSURE(telescope(&d, 20, 97) > 0.1);
}

TEST(all_bits_equals_plain)
{
    hpml_codec_desc d;
    hpml_packing    p, plain;
    memset(&d, 0, sizeof d);
    d.custom = &all_bits;
    fill(g, 1, 9999, 1, 0);
    g[17] = -0.0f, g[18] = 1e-42f, g[19] = INFINITY;
    fill(e, 2, 9999, 1, 0);
    memcpy(before, e, sizeof e);
    ENSURE(hpml_packing_init(&p, &d, 101, 99) == HPML_OK && hpml_packing_init(&plain, NULL, 101, 99) == HPML_OK);
    ENSURE(p.size == plain.size && p.size == 101 * 99 * 4 && p.residual_count == 0 && plain.codec->linear);
    ENSURE(hpml_packing_encode(&p, packed, e, g, 101, NULL) == HPML_OK);
    ENSURE(hpml_packing_encode(&plain, other, NULL, g, 101, NULL) == HPML_OK);
    ENSURE(memcmp(packed, other, p.size) == 0 && memcmp(packed, g, p.size) == 0 && memcmp(e, before, sizeof e) == 0);
    hpml_packing_decode(&p, out, packed, 101);
    ENSURE(memcmp(out, g, 101 * 99 * sizeof *g) == 0);
}

/* A side whose elements are all equal is exact: constant rows, and anything that was quantized before. */
TEST(equal_values_are_exact)
{
    static const float values[] = { 0.1f, -0.1f, 3e-39f, -1e30f, 1.0f / 3, 0.0f, -7.7f };
    for (size_t t = 0; t < sizeof values / sizeof values[0]; t++)
        for (int64_t n = 5; n < 2100; n = n * 3 / 2 + 1) {
            hpml_packing p = packing_of(HPML_CODEC_ONEBIT, 1, n);
            for (int64_t i = 0; i < n; i++) g[i] = values[t], e[i] = 0;
            ENSURE(hpml_packing_encode(&p, packed, e, g, 1, NULL) == HPML_OK);
            hpml_packing_decode(&p, out, packed, 1);
            for (int64_t i = 0; i < n; i++) ENSURE(out[i] == values[t] && e[i] == 0);
        }
    for (int64_t n = 5; n < 5000; n = n * 2 + 1) {
        hpml_packing p = packing_of(HPML_CODEC_ONEBIT, 2, n);
        fill(g, 3, 2 * n, 0.3f, 0.1f);
        ENSURE(hpml_packing_encode(&p, packed, NULL, g, 2, NULL) == HPML_OK);
        hpml_packing_decode(&p, out, packed, 2);
        memset(e, 0, sizeof e);
        ENSURE(hpml_packing_encode(&p, other, e, out, 2, NULL) == HPML_OK); /* once more: nothing is lost */
        ENSURE(memcmp(packed, other, p.size) == 0);
        for (int64_t i = 0; i < 2 * n; i++) ENSURE(e[i] == 0);
    }
}

TEST(zeros_are_positive)
{
    hpml_packing p = packing_of(HPML_CODEC_ONEBIT, 1, 40);
    float        level[2];
    for (int i = 0; i < 40; i++) g[i] = i % 3 == 0 ? 0.0f : i % 3 == 1 ? -0.0f : -1.0f, e[i] = 0;
    ENSURE(hpml_packing_encode(&p, packed, e, g, 1, NULL) == HPML_OK);
    memcpy(level, packed, sizeof level);
    ENSURE(level[0] == -1 && level[1] == 0);
    for (int i = 0; i < 40; i++) ENSURE((packed[8 + i / 8] >> i % 8 & 1) == (i % 3 != 2));
}

static size_t size_of(hpml_codec_kind kind, int64_t rows, int64_t cols, bool all, int64_t least)
{
    hpml_codec_desc d;
    hpml_packing    p;
    memset(&d, 0, sizeof d);
    d.kind         = kind;
    d.compress_all = all;
    d.min_elements = least;
    return hpml_packing_init(&p, &d, rows, cols) == HPML_OK ? p.size : 0;
}

TEST(sizes)
{
    size_t mlp = size_of(HPML_CODEC_ONEBIT, 128, 784, false, 0) + size_of(HPML_CODEC_ONEBIT, 1, 128, false, 0) +
                 size_of(HPML_CODEC_ONEBIT, 10, 128, false, 0) + size_of(HPML_CODEC_ONEBIT, 1, 10, false, 0);
    ENSURE(mlp == 14616);
    ENSURE_NEAR(101770 * 4 / (double)mlp, 27.85, 0.005);
    ENSURE(size_of(HPML_CODEC_NONE, 128, 784, false, 0) == 128 * 784 * 4);
    ENSURE(size_of(HPML_CODEC_BF16, 128, 784, false, 0) == 128 * 784 * 2);
    ENSURE(size_of(HPML_CODEC_BF16, 3, 5, false, 0) == 32);                   /* to whole words */
    ENSURE(size_of(HPML_CODEC_ONEBIT, 10, 128, false, 1281) == 10 * 128 * 4); /* exempt: small */
    ENSURE(size_of(HPML_CODEC_ONEBIT, 1, 5000, false, 0) == 5000 * 4);        /* exempt: a vector */
    ENSURE(size_of(HPML_CODEC_ONEBIT, 5000, 1, false, 0) == 5000 * 4);
    ENSURE(size_of(HPML_CODEC_ONEBIT, 1, 5000, true, 0) == 8 + 157 * 4);
    ENSURE(size_of(HPML_CODEC_ONEBIT, 5000, 1, true, 0) == 5000 * 4); /* 12 bytes for each float would be silly */
    ENSURE(size_of(HPML_CODEC_ONEBIT, 2, 8, true, 0) == 24);
    ENSURE(size_of(HPML_CODEC_ONEBIT, 0, 8, true, 0) == 0);
}

TEST(bad_arguments)
{
    hpml_packing    p;
    hpml_codec_desc d;
    memset(&d, 0, sizeof d);
    ENSURE(hpml_packing_init(&p, &d, -1, 4) == HPML_ERR_SHAPE);
    ENSURE(hpml_packing_init(NULL, &d, 4, 4) == HPML_ERR_ARGUMENT);
    ENSURE(hpml_packing_init(&p, &d, INT64_MAX / 2, 4) == HPML_ERR_OVERFLOW);
    d.kind = HPML_CODEC_COUNT;
    ENSURE(hpml_packing_init(&p, &d, 4, 4) == HPML_ERR_ARGUMENT);
    ENSURE(hpml_codec_get(HPML_CODEC_COUNT) == NULL && hpml_codec_get(HPML_CODEC_UNKNOWN) == NULL);
    for (int kind = 0; kind < HPML_CODEC_COUNT; kind++)
        ENSURE((int)hpml_codec_find(hpml_codec_get((hpml_codec_kind)kind)->name) == kind);
    ENSURE(hpml_codec_find("threebit") == HPML_CODEC_UNKNOWN && hpml_codec_find("") == HPML_CODEC_UNKNOWN &&
           hpml_codec_find(NULL) == HPML_CODEC_UNKNOWN);
    d.kind = HPML_CODEC_TOPK;
    ENSURE(hpml_packing_init(&p, &d, 4, 4) == HPML_ERR_UNSUPPORTED);
    d.kind = HPML_CODEC_LOWRANK;
    ENSURE(hpml_packing_init(&p, &d, 4, 4) == HPML_ERR_UNSUPPORTED);
    d.kind = HPML_CODEC_TWOBIT, d.threshold = -1;
    ENSURE(hpml_packing_init(&p, &d, 4, 4) == HPML_ERR_ARGUMENT);
    d.threshold = NAN;
    ENSURE(hpml_packing_init(&p, &d, 4, 4) == HPML_ERR_ARGUMENT);
    d.threshold = 0;
    d.kind = HPML_CODEC_BF16;
    d._end = 1;
    ENSURE(hpml_packing_init(&p, &d, 4, 4) == HPML_ERR_ARGUMENT);
}

/* A row with a NaN, an infinity or an overflow is packed as zeros, the other rows are packed as usual, and encode
   returns HPML_ERR_NONFINITE. */
TEST(nonfinite_rows_are_zeroed_and_reported)
{
    static const hpml_codec_kind kinds[] = { HPML_CODEC_BF16, HPML_CODEC_ONEBIT, HPML_CODEC_TWOBIT };
    const float                  bad[] = { NAN, INFINITY, -INFINITY, -NAN, FLT_MAX };
    const int64_t                cols = 37, rows = 5;
    for (int t = 0; t < 3; t++)
        for (int b = 0; b < 5; b++)
            for (int64_t at = 0; at < cols; at++) {
                hpml_packing p = packing_of(kinds[t], rows, cols);
                fill(g, 5, rows * cols, 1, 0);
                fill(e, 6, rows * cols, 1, 0);
                ENSURE(hpml_packing_encode(&p, other, e, g, rows, NULL) == HPML_OK);
                memcpy(before, e, sizeof e);
                fill(e, 6, rows * cols, 1, 0);
                if (b == 4) e[2 * cols + at] = FLT_MAX; /* g + e overflows */
                g[2 * cols + at] = bad[b];
                ENSURE(hpml_packing_encode(&p, packed, e, g, rows, NULL) == HPML_ERR_NONFINITE);
                hpml_packing_decode(&p, out, packed, rows);
                for (int64_t i = 0; i < cols; i++) ENSURE(out[2 * cols + i] == 0 && e[2 * cols + i] == 0);
                memset(other + 2 * p.row_size, 0, p.row_size);
                memset(before + 2 * cols, 0, (size_t)cols * sizeof *e);
                ENSURE(memcmp(packed, other, p.row_size * (size_t)rows) == 0);
                ENSURE(memcmp(e, before, (size_t)(rows * cols) * sizeof *e) == 0);
                if (b < 4) ENSURE(hpml_packing_encode(&p, packed, NULL, g, rows, NULL) == HPML_ERR_NONFINITE);
            }
}

TEST(bf16_rounds_to_nearest_even_and_carries_the_rest)
{
    const int64_t rows = 7, cols = 51;
    hpml_packing  p = packing_of(HPML_CODEC_BF16, rows, cols);
    fill(g, 8, rows * cols, 1, 0);
    fill(e, 9, rows * cols, 0.001f, 0);
    for (int64_t i = 0; i < rows * cols; i++) v[i] = g[i] + e[i];
    ENSURE(hpml_packing_encode(&p, packed, e, g, rows, NULL) == HPML_OK);
    hpml_packing_decode(&p, out, packed, rows);
    for (int64_t i = 0; i < rows * cols; i++) {
        uint32_t u;
        memcpy(&u, v + i, 4);
        u = (u + 0x7fff + (u >> 16 & 1)) & 0xffff0000u;
        ENSURE(memcmp(&u, out + i, 4) == 0);
        ENSURE(e[i] == v[i] - out[i]);
    }
    memcpy(before, out, sizeof out);
    hpml_packing_decode_add(&p, out, packed, rows);
    for (int64_t i = 0; i < rows * cols; i++) ENSURE(out[i] == 2 * before[i]);
}

/* Rows in any pieces, by any kernels: the same bytes and the same residual, over several steps. */
TEST(same_bytes_in_any_cut_on_any_cpu)
{
    static const hpml_codec_kind kinds[] = { HPML_CODEC_NONE, HPML_CODEC_BF16, HPML_CODEC_ONEBIT, HPML_CODEC_TWOBIT };
    static const int64_t         shapes[][2] = { { 13, 31 }, { 17, 128 }, { 11, 785 }, { 5, 4099 }, { 300, 5 } };
    for (int t = 0; t < 4; t++)
        for (int s = 0; s < 5; s++) {
            const int64_t rows = shapes[s][0], cols = shapes[s][1];
            const size_t  bytes = (size_t)(rows * cols) * sizeof *e;
            hpml_packing  p = packing_of(kinds[t], rows, cols);
            p.kernels = private_kernels("scalar");
            p.desc.threshold = 0.1f;
            memset(before, 0, sizeof before);
            for (int step = 0; step < 3; step++) {
                fill(g, 20 + (uint64_t)step, rows * cols, 0.1f, 0);
                ENSURE(hpml_packing_encode(&p, other, before, g, rows, NULL) == HPML_OK);
            }
            for (int a = 0; a < ISAS; a++)
                for (int64_t piece = 1; piece <= rows; piece += 3) {
                    p.kernels = private_kernels(isas[a]);
                    if (!p.kernels) continue;
                    memset(e, 0, sizeof e);
                    memset(packed, 0xff, sizeof packed);
                    for (int step = 0; step < 3; step++) {
                        fill(g, 20 + (uint64_t)step, rows * cols, 0.1f, 0);
                        for (int64_t r = 0; r < rows; r += piece)
                            ENSURE(hpml_packing_encode(&p, packed + (size_t)r * p.row_size, e + r * cols, g + r * cols,
                                                       rows - r < piece ? rows - r : piece, NULL) == HPML_OK);
                    }
                    ENSURE(memcmp(packed, other, (size_t)rows * p.row_size) == 0);
                    ENSURE(memcmp(e, before, bytes) == 0);
                    hpml_packing_decode(&p, out, packed, rows);
                    for (int64_t r = 0; r < rows; r += piece)
                        hpml_packing_decode(&p, v + r * cols, packed + (size_t)r * p.row_size,
                                            rows - r < piece ? rows - r : piece);
                    ENSURE(memcmp(v, out, bytes) == 0);
                    for (int64_t i = 0; i < rows * cols; i++) v[i] = g[i];
                    hpml_packing_decode_add(&p, v, packed, rows);
                    for (int64_t i = 0; i < rows * cols; i++) ENSURE(v[i] == g[i] + out[i]);
                }
        }
}

/* A codec of one's own: sign and one level per row. */
static size_t sign_row_size(const hpml_codec_desc *d, int64_t cols)
{
    (void)d;
    (void)cols;
    return 4;
}
static hpml_status sign_encode(const hpml_packing *p, void *to, float *residual, const float *grad, int64_t rows,
                               const hpml_encode_info *info)
{
    (void)info;
    for (int64_t r = 0; r < rows; r++) {
        float mean = 0;
        for (int64_t i = r * p->cols; i < (r + 1) * p->cols; i++) mean += (grad[i] + residual[i]) / (float)p->cols;
        for (int64_t i = 0; i < p->cols; i++) residual[r * p->cols + i] += grad[r * p->cols + i] - mean;
        memcpy((char *)to + 4 * r, &mean, 4);
    }
    return HPML_OK;
}
static void sign_decode(const hpml_packing *p, float *y, const void *from, int64_t rows, bool add)
{
    for (int64_t i = 0; i < rows * p->cols; i++) {
        float mean;
        memcpy(&mean, (const char *)from + 4 * (i / p->cols), 4);
        y[i] = add ? y[i] + mean : mean;
    }
}

TEST(custom_codec)
{
    static const hpml_codec mean = { "mean", false, true, false, false, sign_row_size, sign_encode, sign_decode };
    hpml_codec_desc         d;
    hpml_packing            p;
    memset(&d, 0, sizeof d);
    d.custom = &mean;
    ENSURE(hpml_packing_init(&p, &d, 30, 40) == HPML_OK);
    ENSURE(p.size == 120 && p.residual_count == 1200 && telescope(&d, 30, 40) < 1e-5);
}

/* Without any model: what a sender owes goes to a file and comes back, and the next packet has the same bytes. */
TEST(a_residual_survives_in_a_file)
{
    enum { ROWS = 7, COLS = 97, N = ROWS * COLS };
    char             path[] = "/tmp/hpml_residual_XXXXXX";
    int              fd = mkstemp(path);
    hpml_ctx        *ctx = hpml_ctx_create(NULL);
    hpml_packing     p = packing_of(HPML_CODEC_ONEBIT, ROWS, COLS);
    hpml_safetensor  t = { "w.residual", HPML_DTYPE_F32, 2, { ROWS, COLS }, e, N * sizeof(float) }, back;
    memset(e, 0, sizeof e);
    for (uint64_t step = 0; step < 6; step++) {
        if (step == 5) ENSURE(hpml_safetensors_save(ctx, path, &t, 1, NULL, 0) == HPML_OK);
        fill(g, step, N, 1, 0);
        ENSURE(hpml_packing_encode(&p, packed, e, g, ROWS, NULL) == HPML_OK);
    }
    hpml_safetensors *f = hpml_safetensors_open(ctx, path);
    ENSURE(f && hpml_safetensors_find(f, "w.residual", &back) && back.bytes == N * sizeof(float));
    memcpy(e, back.data, back.bytes);
    hpml_safetensors_close(f);
    ENSURE(hpml_packing_encode(&p, other, e, g, ROWS, NULL) == HPML_OK && memcmp(packed, other, p.size) == 0);
    memset(e, 0, sizeof e);
    ENSURE(hpml_packing_encode(&p, other, e, g, ROWS, NULL) == HPML_OK && memcmp(packed, other, p.size) != 0);
    close(fd);
    remove(path);
    hpml_ctx_free(ctx);
}
