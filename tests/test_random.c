/* Random numbers: known answers, the same bits in any cut and on every instruction set, moments, permutations. */
#include "private_api.h"
#include "kernels.h"
#include "test.h"

TEST(philox_known_answers)
{
    static const uint32_t kat[3][10] = { /* counter, key, output: Random123 kat_vectors */
        { 0, 0, 0, 0, 0, 0, 0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u },
        { 0xffffffffu, 0xffffffffu, 0xffffffffu, 0xffffffffu, 0xffffffffu, 0xffffffffu,
          0x408f276du, 0x41c83b0eu, 0xa20bc7c6u, 0x6d5451fdu },
        { 0x243f6a88u, 0x85a308d3u, 0x13198a2eu, 0x03707344u, 0xa4093822u, 0x299f31d0u,
          0xd16cfe09u, 0x94fdcceb, 0x5001e420u, 0x24126ea1u },
    };
    for (int t = 0; t < 3; t++) {
        uint32_t out[4];
        hpml_philox4x32(kat[t] + 4, kat[t], out);
        ENSURE(memcmp(out, kat[t] + 6, sizeof out) == 0);
    }
}

TEST(words_are_blocks_of_philox)
{
    const uint64_t seed = UINT64_C(0x123456789abcdef0), stream = UINT64_C(0xfeedfacecafebeef);
    const uint64_t first = (UINT64_C(7) << 34) - 40; /* block numbers cross 32 bits */
    const uint32_t key[2] = { (uint32_t)seed, (uint32_t)(seed >> 32) };
    for (int a = 0; a < ISAS; a++) {
        const void *k = private_kernels(isas[a]);
        uint32_t    w[200];
        if (!k) continue;
        private_random(k, PRIVATE_WORDS, w, seed, stream, first, 200);
        for (uint64_t i = 0; i < 200; i++) {
            uint64_t at = first + i;
            uint32_t counter[4], out[4];
            counter[0] = (uint32_t)(at / 4);
            counter[1] = (uint32_t)(at / 4 >> 32);
            counter[2] = (uint32_t)stream;
            counter[3] = (uint32_t)(stream >> 32);
            hpml_philox4x32(key, counter, out);
            ENSURE(w[i] == out[at % 4]);
        }
    }
}

TEST(same_bits_in_pieces_of_any_size_and_on_any_instruction_set)
{
    enum { N = 1000 };
    static float u[N], z[N], x[N];
    hpml_rng     r = { 42, 7, 13 }, s;
    s = r;
    hpml_rng_fill_uniform(&s, u, N);
    ENSURE(s.counter == r.counter + N);
    s = r;
    hpml_rng_fill_normal(&s, z, N);
    s = r;
    for (int i = 0; i < N; i++) x[i] = hpml_rng_uniform(&s);
    ENSURE(memcmp(x, u, sizeof x) == 0);
    s = r;
    for (int i = 0; i < N; i++) x[i] = hpml_rng_normal(&s);
    ENSURE(memcmp(x, z, sizeof x) == 0);
    for (int a = 0; a < ISAS; a++) {
        const void      *k      = private_kernels(isas[a]);
        static const int cuts[] = { 1, 3, 7, 31, 32, 33, 63, 64, 65, 129, 1000 };
        if (!k) continue;
        for (size_t c = 0; c < sizeof cuts / sizeof cuts[0]; c++) {
            for (int i = 0; i < N; i += cuts[c])
                private_random(k, PRIVATE_UNIFORM, x + i, 42, 7, 13 + (uint64_t)i, i + cuts[c] < N ? cuts[c] : N - i);
            ENSURE(memcmp(x, u, sizeof x) == 0);
            for (int i = 0; i < N; i += cuts[c])
                private_random(k, PRIVATE_NORMAL, x + i, 42, 7, 13 + (uint64_t)i, i + cuts[c] < N ? cuts[c] : N - i);
            ENSURE(memcmp(x, z, sizeof x) == 0);
        }
        private_random(k, PRIVATE_NORMAL, x, 42, 7, 13, 0);
        private_random(k, PRIVATE_NORMAL, x, 42, 7, 13, -5);
        ENSURE(memcmp(x, z, sizeof x) == 0);
    }
}

TEST(normals_are_box_muller_to_float_accuracy)
{
    enum { N = 1 << 16 };
    static uint32_t w[N];
    static float    z[N];
    double          worst = 0;
    hpml_rng        r = { 5, 0, 0 };
    hpml_rng_fill_u32(&r, w, N);
    r.counter = 0;
    hpml_rng_fill_normal(&r, z, N);
    for (int i = 0; i < N; i += 64)
        for (int j = 0; j < 32; j++) {
            double u = (float)(((double)(float)w[i + j] + 0.5) / 4294967296.0); /* a float in (0, 1] */
            double t = 6.283185307179586 * (w[i + j + 32] / 4294967296.0);
            double radius = sqrt(-2 * log(u));
            double a = fabs(radius * cos(t) - z[i + j]), b = fabs(radius * sin(t) - z[i + j + 32]);
            worst = a > worst ? a : worst;
            worst = b > worst ? b : worst;
        }
    ENSURE(worst < 1e-6);
}

TEST(uniform_moments)
{
    enum { N = 1 << 20 };
    static float x[N];
    double       mean = 0, square = 0, lag = 0, chi2 = 0;
    int          bins[256] = { 0 };
    hpml_rng     r = { 1, 2, 0 };
    hpml_rng_fill_uniform(&r, x, N);
    for (int i = 0; i < N; i++) {
        ENSURE(x[i] >= 0 && x[i] < 1);
        mean += x[i];
        square += (double)x[i] * x[i];
        lag += i ? (x[i] - 0.5) * (x[i - 1] - 0.5) : 0;
        bins[(int)(x[i] * 256)]++;
    }
    for (int b = 0; b < 256; b++) chi2 += (bins[b] - N / 256.0) * (bins[b] - N / 256.0) / (N / 256.0);
    ENSURE_NEAR(mean / N, 0.5, 4 * 0.2887 / 1024);
    ENSURE_NEAR(square / N - mean / N * mean / N, 1 / 12.0, 4 * 0.0745 / 1024);
    ENSURE_NEAR(lag / N * 12, 0, 4.0 / 1024);
    ENSURE(chi2 > 150 && chi2 < 375); /* 255 degrees of freedom: mean 255, standard deviation 22.6 */
}

TEST(normal_moments)
{
    enum { N = 1 << 20 };
    static float x[N];
    double       m1 = 0, m2 = 0, m3 = 0, m4 = 0, pair = 0;
    int          beyond2 = 0, beyond4 = 0;
    hpml_rng     r = { 1, 3, 0 };
    hpml_rng_fill_normal(&r, x, N);
    for (int i = 0; i < N; i++) {
        double z = x[i];
        ENSURE(fabs(z) < 6.8);
        m1 += z, m2 += z * z, m3 += z * z * z, m4 += z * z * z * z;
        beyond2 += fabs(z) > 2;
        beyond4 += fabs(z) > 4;
        if (i % 64 < 32) pair += z * x[i + 32];
    }
    ENSURE_NEAR(m1 / N, 0, 4.0 / 1024);
    ENSURE_NEAR(m2 / N, 1, 4 * 1.415 / 1024);
    ENSURE_NEAR(m3 / N, 0, 4 * 3.88 / 1024);
    ENSURE_NEAR(m4 / N, 3, 4 * 9.8 / 1024);
    ENSURE_NEAR(pair / N, 0, 4.0 / 1024);
    ENSURE_NEAR((double)beyond2 / N, 0.0455, 0.001);
    ENSURE(beyond4 > 30 && beyond4 < 110); /* 66 expected */
}

TEST(seeds_and_streams_differ)
{
    hpml_rng a = { 1, 0, 0 }, b = { 2, 0, 0 }, c = { 1, 1, 0 }, d = { UINT64_C(1) << 32 | 1, 0, 0 };
    int      same = 0;
    for (int i = 0; i < 100; i++) {
        uint32_t x = hpml_rng_u32(&a);
        same += (x == hpml_rng_u32(&b)) + (x == hpml_rng_u32(&c)) + (x == hpml_rng_u32(&d));
    }
    ENSURE(same == 0);
}

TEST(below_is_unbiased)
{
    hpml_rng r = { 9, 9, 0 };
    int      bins[7] = { 0 };
    double   chi2 = 0, mean = 0;
    int64_t  big = (INT64_C(3) << 40) + 5;
    for (int i = 0; i < 70000; i++) {
        int64_t x = hpml_rng_below(&r, 7);
        ENSURE(x >= 0 && x < 7);
        bins[x]++;
    }
    for (int b = 0; b < 7; b++) chi2 += (bins[b] - 1e4) * (bins[b] - 1e4) / 1e4;
    ENSURE(chi2 < 22.5); /* 6 degrees of freedom, p = 0.001 */
    for (int i = 0; i < 10000; i++) {
        int64_t x = hpml_rng_below(&r, big);
        ENSURE(x >= 0 && x < big);
        mean += (double)x / (double)big / 10000;
    }
    ENSURE_NEAR(mean, 0.5, 0.012);
    ENSURE(hpml_rng_below(&r, 1) == 0 && hpml_rng_below(&r, 0) == 0 && hpml_rng_below(&r, -4) == 0);
    for (int i = 0; i < 100; i++) ENSURE(hpml_rng_below(&r, INT64_MAX) >= 0);
}

static bool is_permutation(uint64_t seed, uint64_t epoch, int64_t n)
{
    static char seen[100000];
    memset(seen, 0, (size_t)n);
    for (int64_t i = 0; i < n; i++) {
        int64_t y = hpml_permute_index(seed, epoch, n, i);
        if (y < 0 || y >= n || seen[y]) return false;
        seen[y] = 1;
    }
    return true;
}

TEST(permutation_is_a_bijection)
{
    for (int64_t n = 1; n < 300; n++) ENSURE(is_permutation(3, 4, n));
    ENSURE(is_permutation(1, 0, 60000));
    ENSURE(is_permutation(1, 1, 65536));
    ENSURE(is_permutation(1, 2, 65537));
    ENSURE(hpml_permute_index(1, 1, 10, 10) == -1 && hpml_permute_index(1, 1, 10, -1) == -1);
    for (int64_t i = 0; i < 100; i++) { /* more elements than memory could hold */
        int64_t y = hpml_permute_index(1, 1, INT64_MAX, i);
        ENSURE(y >= 0);
    }
}

TEST(permutation_mixes)
{
    enum { N = 50000 };
    double step = 0, corr = 0, away = 0;
    int    fixed = 0, repeats = 0;
    for (int64_t i = 0; i < N; i++) {
        int64_t y = hpml_permute_index(11, 0, N, i), z = hpml_permute_index(11, 0, N, (i + 1) % N);
        fixed += y == i;
        repeats += y == hpml_permute_index(11, 1, N, i);
        step += fabs((double)(y - z)) / N / N;
        away += fabs((double)(y - i)) / N / N;
        corr += ((double)i / N - 0.5) * ((double)y / N - 0.5) * 12 / N;
    }
    ENSURE_NEAR(step, 1 / 3.0, 0.006); /* |x - y| of two uniforms */
    ENSURE_NEAR(away, 1 / 3.0, 0.006);
    ENSURE_NEAR(corr, 0, 0.02);
    ENSURE(fixed < 8 && repeats < 8); /* 1 expected */
}

/* All orders of a small set must be equally likely over the epochs. */
TEST(permutation_of_few_elements_is_uniform)
{
    int    order[6] = { 0 }, place[10][10] = { { 0 } };
    double chi2 = 0;
    for (uint64_t e = 0; e < 6000; e++) {
        int64_t a = hpml_permute_index(1, e, 3, 0), b = hpml_permute_index(1, e, 3, 1);
        order[a * 2 + (b > a ? b - 1 : b)]++;
    }
    for (int i = 0; i < 6; i++) chi2 += (order[i] - 1e3) * (order[i] - 1e3) / 1e3;
    ENSURE(chi2 < 20.5); /* 5 degrees of freedom, p = 0.001 */
    for (uint64_t e = 0; e < 10000; e++)
        for (int i = 0; i < 10; i++) place[i][hpml_permute_index(2, e, 10, i)]++;
    chi2 = 0;
    for (int i = 0; i < 100; i++) chi2 += (place[i / 10][i % 10] - 1e3) * (place[i / 10][i % 10] - 1e3) / 1e3;
    ENSURE(chi2 < 130); /* 81 degrees of freedom, p = 0.0005 */
}
