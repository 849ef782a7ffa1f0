/* Checks of hpml_comm.h that its tests run on threads, in virtual time and under mpiexec. Each check is a function of a
   rank; a check that fails returns an error that names the line. */
#ifndef HPML_COMM_CHECK_H
#define HPML_COMM_CHECK_H

#include <unistd.h>
#include <math.h>
#ifdef __linux__
#include <sys/mman.h>
#endif
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"

/* Element i of a rank's input, a whole number so small that the sums over all ranks are exact in bf16. */
static double whole(int rank, int64_t i) { return (double)((i * 7 + rank * 3) % 11 - 4); }

/* Element i of a rank's input, a number whose sums are rounded. */
static float real(int rank, int64_t i)
{
    uint32_t h = (uint32_t)i * 2654435761u ^ (uint32_t)(rank + 1) * 40503u;
    h ^= h >> 15, h *= 2246822519u, h ^= h >> 13;
    return ((float)(h & 0xffffff) / 8388608.0f - 1) * (h >> 24 & 1 ? 100 : 0.01f);
}

static uint64_t hash_of(const void *data, size_t bytes)
{
    uint64_t h = 1469598103934665603u, word;
    for (; bytes > 0; bytes -= bytes < 8 ? bytes : 8) {
        word = 0;
        memcpy(&word, data, bytes < 8 ? bytes : 8);
        h    = (h ^ word) * 1099511628211u;
        h   ^= h >> 32; /* because multiplication carries bits upwards only */
        data = (const char *)data + 8;
    }
    return h;
}

/* Returns true on all ranks if all have the same bits. */
static bool same_bits(hpml_comm *c, const void *data, size_t bytes)
{
    int64_t all[64] = { 0 }, p = hpml_comm_size(c);
    all[hpml_comm_rank(c)] = (int64_t)hash_of(data, bytes);
    if (hpml_allgather(c, all, p, HPML_ELEMENT_I64) != HPML_OK) return false;
    for (int i = 1; i < p; i++)
        if (all[i] != all[0]) return false;
    return true;
}

static void element_set(void *data, hpml_element e, int64_t i, double x)
{
    float    f = (float)x;
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    switch (e) {
    case HPML_ELEMENT_F32: ((float *)data)[i] = f; break;
    case HPML_ELEMENT_BF16: ((uint16_t *)data)[i] = (uint16_t)(u >> 16); break;
    case HPML_ELEMENT_I32: ((int32_t *)data)[i] = (int32_t)x; break;
    case HPML_ELEMENT_I64: ((int64_t *)data)[i] = (int64_t)x; break;
    case HPML_ELEMENT_F64: ((double *)data)[i] = x; break;
    case HPML_ELEMENT_BYTE: ((unsigned char *)data)[i] = (unsigned char)(int)x; break;
    }
}

static double element_get(const void *data, hpml_element e, int64_t i)
{
    uint32_t u;
    float    f;
    switch (e) {
    case HPML_ELEMENT_F32: return (double)((const float *)data)[i];
    case HPML_ELEMENT_BF16:
        u = (uint32_t)((const uint16_t *)data)[i] << 16;
        memcpy(&f, &u, sizeof f);
        return (double)f;
    case HPML_ELEMENT_I32: return (double)((const int32_t *)data)[i];
    case HPML_ELEMENT_I64: return (double)((const int64_t *)data)[i];
    case HPML_ELEMENT_F64: return ((const double *)data)[i];
    case HPML_ELEMENT_BYTE: return (double)((const unsigned char *)data)[i];
    }
    return 0;
}

/* The sum and the maximum of whole(rank, i) over p ranks. */
static double whole_sum(int p, int64_t i)
{
    double sum = 0;
    for (int r = 0; r < p; r++) sum += whole(r, i);
    return sum;
}

static double whole_max(int p, int64_t i)
{
    double max = -100;
    for (int r = 0; r < p; r++) max = whole(r, i) > max ? whole(r, i) : max;
    return max;
}

/* Checks one allreduce. Elements alternate: whole numbers, whose sums are exact, and real numbers, whose sums may be
   off by p - 1 roundings. Each rank checks its own block, and *hash is the hash of all elements, which must be equal on
   all ranks. */
static hpml_status allreduce_hash(hpml_comm *c, hpml_algorithm a, int64_t n, uint64_t *hash)
{
    int                 p = hpml_comm_size(c), rank = hpml_comm_rank(c);
    int64_t             begin = hpml_block(n, p, rank), end = hpml_block(n, p, rank + 1);
    hpml_allreduce_desc d;
    float              *x = (float *)malloc(((size_t)n + 1) * sizeof *x);
    memset(&d, 0, sizeof d);
    d.algorithm = a;
    x[n]        = 12345;
    for (int64_t i = 0; i < n; i++) x[i] = i % 2 ? real(rank, i) : (float)whole(rank, i);
    hpml_status status = hpml_allreduce(c, x, n, &d);
    int64_t     wrong = x[n] != 12345;
    for (int64_t i = begin; i < end && status == HPML_OK; i++) {
        double sum = 0, size = 0;
        for (int r = 0; r < p && i % 2; r++) sum += (double)real(r, i), size += fabs((double)real(r, i));
        if (i % 2 == 0) sum = whole_sum(p, i);
        wrong += !(fabs((double)x[i] - sum) <= (p - 1) * 1.2e-7 * size);
    }
    *hash = hash_of(x, (size_t)n * sizeof *x);
    free(x);
    if (wrong)
        printf("    %s of %lld on %d ranks, rank %d: %lld wrong\n", hpml_algorithm_name(a), (long long)n, p, rank,
               (long long)wrong);
    CHECK(status == HPML_OK && wrong == 0);
    return HPML_OK;
}

static hpml_status allreduce_case(hpml_comm *c, hpml_algorithm a, int64_t n)
{
    uint64_t hash;
    CHECK(allreduce_hash(c, a, n, &hash) == HPML_OK && same_bits(c, &hash, sizeof hash));
    return HPML_OK;
}

/* Checks allreduce for every type of element and for sum, mean and maximum. */
static hpml_status types_case(hpml_comm *c, hpml_algorithm a, int64_t n)
{
    int                 p = hpml_comm_size(c), rank = hpml_comm_rank(c);
    hpml_allreduce_desc d;
    double              data[64];
    memset(&d, 0, sizeof d);
    d.algorithm = a;
    for (int e = HPML_ELEMENT_F32; e <= HPML_ELEMENT_F64; e++)
        for (int op = HPML_SUM; op <= HPML_MAX; op++) {
            d.element = (hpml_element)e, d.reduce = (hpml_reduce)op;
            for (int64_t i = 0; i < n; i++) element_set(data, d.element, i, whole(rank, i));
            if (a == HPML_NATIVE && e == HPML_ELEMENT_BF16) continue;
            CHECK(hpml_allreduce(c, data, n, &d) == HPML_OK);
            for (int64_t i = 0; i < n; i++) {
                double right = op == HPML_MAX ? whole_max(p, i) : whole_sum(p, i), slack = 0;
                double got   = element_get(data, d.element, i);
                if (op == HPML_MEAN) {
                    right /= p;
                    if (e == HPML_ELEMENT_I32 || e == HPML_ELEMENT_I64) right = trunc(right);
                    slack = (e == HPML_ELEMENT_BF16 ? 4e-3 : e == HPML_ELEMENT_F32 ? 1e-7 : 0) * fabs(right);
                }
                CHECK(fabs(got - right) <= slack);
            }
        }
    return HPML_OK;
}

/* Checks all collectives but allreduce, with every rank as the root. */
static hpml_status others_case(hpml_comm *c, int64_t n)
{
    enum { MAX = 64 * 37 };
    int     p = hpml_comm_size(c), rank = hpml_comm_rank(c);
    int32_t x[MAX], y[MAX];
    int64_t begin = hpml_block(n, p, rank), end = hpml_block(n, p, rank + 1);
    for (int op = HPML_SUM; op <= HPML_MAX; op++) {
        for (int64_t i = 0; i < n; i++) x[i] = 60 * (int32_t)whole(rank, i);
        CHECK(hpml_reduce_scatter(c, x, n, HPML_ELEMENT_I32, (hpml_reduce)op) == HPML_OK);
        for (int64_t i = begin; i < end; i++) {
            int32_t right = 60 * (int32_t)(op == HPML_MAX ? whole_max(p, i) : whole_sum(p, i));
            CHECK(x[i] == right / (op == HPML_MEAN ? p : 1));
        }
    }
    for (int64_t i = 0; i < n; i++) x[i] = i >= begin && i < end ? (int32_t)(i + 5) : -1;
    CHECK(hpml_allgather(c, x, n, HPML_ELEMENT_I32) == HPML_OK);
    for (int64_t i = 0; i < n; i++) CHECK(x[i] == i + 5);
    for (int root = 0; root < p; root++) {
        size_t bytes = (size_t)n * sizeof *x;
        for (int64_t i = 0; i < n; i++) x[i] = rank == root ? (int32_t)i + root : -1;
        CHECK(hpml_broadcast(c, x, bytes, root) == HPML_OK);
        for (int64_t i = 0; i < n; i++) CHECK(x[i] == i + root);
        for (int mean = 0; mean < 2; mean++) {
            for (int64_t i = 0; i < n; i++) x[i] = 60 * (int32_t)whole(rank, i);
            CHECK(hpml_reduce_to(c, x, n, HPML_ELEMENT_I32, mean ? HPML_MEAN : HPML_SUM, root) == HPML_OK);
            for (int64_t i = 0; i < n && rank == root; i++)
                CHECK(x[i] == 60 * (int32_t)whole_sum(p, i) / (mean ? p : 1));
        }
        for (int64_t i = 0; i < n; i++) x[i] = (int32_t)(rank * 1000 + i);
        memset(y, 0, sizeof y);
        CHECK(hpml_gather(c, x, bytes, rank == root ? y : NULL, root) == HPML_OK);
        for (int64_t i = 0; i < n * p && rank == root; i++) CHECK(y[i] == i / n * 1000 + i % n);
        CHECK(hpml_scatter(c, rank == root ? y : NULL, bytes, x, root) == HPML_OK);
        for (int64_t i = 0; i < n; i++) CHECK(x[i] == rank * 1000 + i);
    }
    for (int64_t i = 0; i < n * p; i++) x[i] = (int32_t)(rank * 100000 + i / n * 1000 + i % n);
    CHECK(hpml_all_to_all(c, x, y, (size_t)n * sizeof *x) == HPML_OK);
    for (int64_t i = 0; i < n * p; i++) CHECK(y[i] == i / n * 100000 + rank * 1000 + i % n);
    CHECK(hpml_barrier(c) == HPML_OK);
    return HPML_OK;
}

/* Counters of each rank after an allreduce. count_one checks that they equal those counted from the algorithm's moves.
   */
typedef struct traffic {
    hpml_algorithm algorithm;
    int            per_node;
    int64_t        n;
    hpml_counters  rank[16];
} traffic;

static hpml_status count_one(hpml_comm *c, void *user)
{
    traffic            *t = (traffic *)user;
    float              *x = (float *)calloc((size_t)t->n + 1, sizeof *x);
    hpml_allreduce_desc d;
    int                 rank = hpml_comm_rank(c), p = hpml_comm_size(c);
    int64_t             to[16][2] = { { 0 } }; /* messages and bytes to each rank, counted from the moves */
    memset(&d, 0, sizeof d);
    d.algorithm = t->algorithm;
    hpml_comm_counters_reset(c);
    hpml_allreduce(c, x, t->n, &d);
    free(x);
    hpml_comm_counters(c, &t->rank[rank]);
    int64_t messages = 0, bytes = 0, rounds = 0, between = 0; /* in all, counted from the moves */
    for (int k = 0;; k++) {
        hpml_move m;
        if (!hpml_allreduce_move(t->algorithm, p, t->per_node, rank, t->n, k, &m)) break;
        rounds += m.to >= 0 || m.from >= 0;
        if (m.to < 0) continue;
        messages++, to[m.to][0]++;
        bytes += 4 * m.send_count, to[m.to][1] += 4 * m.send_count;
        if (hpml_comm_node(c, m.to) != hpml_comm_node(c, rank)) between += 4 * m.send_count;
    }
    const hpml_counters *got = &t->rank[rank];
    CHECK(messages == got->messages && bytes == got->bytes && rounds == got->rounds && between == got->between_bytes);
    for (int i = 0; i < p; i++) CHECK(hpml_comm_messages_to(c, i) == to[i][0] && hpml_comm_bytes_to(c, i) == to[i][1]);
    return HPML_OK;
}

/* Checks a hundred messages of random length between random ranks, which begin them and wait for them in different
   orders. */
static hpml_status messages_case(hpml_comm *c, uint32_t seed, size_t longest)
{
    enum { COUNT = 100 };
    int            p = hpml_comm_size(c), rank = hpml_comm_rank(c);
    static const int strides[] = { 1, 3, 7, 9, 11, 13, 17, 19 };
    hpml_message   m[COUNT];
    unsigned char *data[COUNT];
    size_t         size[COUNT];
    int            from[COUNT], to[COUNT];
    bool           good = true;
    for (int i = 0; i < COUNT; i++) {
        for (int k = 0; k < 3; k++) {
            seed = seed * 1664525u + 1013904223u;
            if (k == 0) from[i] = (int)(seed >> 10) % p;
            if (k == 1) to[i] = (int)(seed >> 10) % p;
            if (k == 2) size[i] = i % 10 == 0 ? 0 : (seed >> 8) % (longest >> (i % 5 * 2));
        }
        data[i] = (unsigned char *)malloc(size[i] + 1);
        for (size_t k = 0; k < size[i]; k++) data[i][k] = (unsigned char)(rank == from[i] ? k * 31 + (size_t)i : 0);
    }
    int first = strides[rank % 8], last = strides[(rank + 3) % 8];
    for (int k = 0; k < COUNT; k++) {
        int i = k * first % COUNT;
        if (from[i] == to[i]) continue; /* messages from a rank to itself have another test */
        if (rank == from[i]) hpml_isend(c, to[i], i, data[i], size[i], &m[i]);
        if (rank == to[i]) hpml_irecv(c, from[i], i, data[i], size[i], &m[i]);
    }
    for (int k = 0; k < COUNT; k++) {
        int i = k * last % COUNT;
        if (from[i] == to[i] || (rank != from[i] && rank != to[i])) continue;
        good = hpml_wait(c, &m[i]) == HPML_OK && good;
        for (size_t b = 0; b < size[i] && good; b++) good = data[i][b] == (unsigned char)(b * 31 + (size_t)i);
    }
    for (int i = 0; i < COUNT; i++) free(data[i]);
    CHECK(good);
    return HPML_OK;
}

/* Checks that messages of one tag arrive in the order sent, though the receiver waits for the last one first. */
static hpml_status order_case(hpml_comm *c, size_t bytes)
{
    int           p = hpml_comm_size(c), rank = hpml_comm_rank(c), next = (rank + 1) % p, before = (rank + p - 1) % p;
    hpml_message  out[4], in[4];
    char         *send = (char *)malloc(4 * bytes), *receive = (char *)calloc(4, bytes);
    hpml_status   status = HPML_OK;
    bool          good = true;
    for (int i = 0; i < 4; i++) {
        memset(send + (size_t)i * bytes, i + 1, bytes);
        hpml_irecv(c, before, 7, receive + (size_t)i * bytes, bytes, &in[i]);
    }
    for (int i = 0; i < 4; i++) hpml_isend(c, next, 7, send + (size_t)i * bytes, bytes, &out[i]);
    for (int i = 3; i >= 0; i--) {
        if (hpml_wait(c, &in[i]) != HPML_OK) status = in[i].status;
        if (hpml_wait(c, &out[(i + 1) % 4]) != HPML_OK) status = HPML_ERR_STATE;
    }
    for (size_t i = 0; i < 4 * bytes; i++) good = good && receive[i] == (char)(i / bytes + 1);
    free(send);
    free(receive);
    CHECK(status == HPML_OK && good);
    return HPML_OK;
}

/* Checks communicators of hpml_comm_split: two colours in reversed order of ranks; one colour that odd ranks are not
   in; the ranks of a node; a part of a part. */
static hpml_status split_case(hpml_comm *c)
{
    int        p = hpml_comm_size(c), rank = hpml_comm_rank(c);
    hpml_comm *half = hpml_comm_split(c, rank % 2, -rank), *none = hpml_comm_split(c, rank % 2 ? -1 : 0, 0);
    hpml_comm *node = hpml_comm_split_node(c), *again;
    int32_t    x[2] = { 1, rank };
    hpml_allreduce_desc d;
    CHECK(half && node && (none == NULL) == (rank % 2 == 1));
    CHECK(hpml_comm_size(half) == (p + (rank % 2 == 0)) / 2);
    CHECK(hpml_comm_rank(half) == hpml_comm_size(half) - 1 - rank / 2);
    memset(&d, 0, sizeof d);
    d.element = HPML_ELEMENT_I32;
    CHECK(hpml_allreduce(half, x, 2, &d) == HPML_OK);
    int m = hpml_comm_size(half);
    CHECK(x[0] == m && x[1] == (rank % 2) * m + m * (m - 1));
    for (int i = 0, count = 0; i <= p; i++) {
        if (i == p) CHECK(hpml_comm_size(node) == count);
        else count += hpml_comm_node(c, i) == hpml_comm_node(c, rank);
    }
    again = hpml_comm_split(half, 0, hpml_comm_rank(half));
    x[0]  = 1;
    CHECK(again && hpml_allreduce(again, x, 1, &d) == HPML_OK && x[0] == m);
    hpml_comm_free(again);
    hpml_comm_free(half);
    CHECK(hpml_barrier(c) == HPML_OK);
    return HPML_OK;
}

/* A job for hpml_background: adds up x[1] over the ranks and notes in x[0] that it ran once. */
static hpml_status add_rank(hpml_comm *c, void *user)
{
    int32_t            *x = (int32_t *)user;
    hpml_allreduce_desc d;
    memset(&d, 0, sizeof d);
    d.element = HPML_ELEMENT_I32;
    x[0]      = x[0] * 10 + hpml_comm_size(c);
    return hpml_allreduce(c, x + 1, 1, &d);
}

/* Checks jobs in the background that run while collectives run in the foreground. */
static hpml_status jobs_case(hpml_comm *c, int rounds)
{
    enum { N = 1000 };
    int       p = hpml_comm_size(c), rank = hpml_comm_rank(c);
    float     x[4][N], y[N];
    int32_t   z[2] = { 0, 0 };
    hpml_job *job[5];
    for (int round = 0; round < rounds; round++) {
        for (int k = 0; k < 4; k++) {
            for (int i = 0; i < N; i++) x[k][i] = (float)whole(rank, i + k);
            job[k] = hpml_iallreduce(c, x[k], N >> k, NULL);
            CHECK(job[k]);
        }
        z[0] = 0, z[1] = rank;
        job[4] = hpml_background(c, add_rank, z);
        CHECK(job[4]);
        for (int i = 0; i < N; i++) y[i] = (float)whole(rank, i + round);
        CHECK(hpml_allreduce(c, y, N, NULL) == HPML_OK);
        CHECK(hpml_barrier(c) == HPML_OK);
        for (int i = 0; i < N; i++) CHECK((double)y[i] == whole_sum(p, i + round));
        for (int k = 4; k >= 0; k--) CHECK(hpml_job_wait(job[k]) == HPML_OK);
        for (int k = 0; k < 4; k++)
            for (int i = 0; i < N >> k; i++) CHECK((double)x[k][i] == whole_sum(p, i + k));
        CHECK(z[0] == p && z[1] == p * (p - 1) / 2);
    }
    return HPML_OK;
}

/* Checks hpml_exchange_ready: every rank finishes the tensors in an order of its own, another one in each step; odd
   ranks compute between two tensors; a job of another kind follows. The trace must contain as many allreduces as the
   size of the fusion buffer implies. */
static hpml_status orders_case(hpml_comm *c, int orders, bool onebit)
{
    enum { TENSORS = 7, EACH = 48, ALL = TENSORS * EACH, BYTES = 400, SUMS = (ALL * 4 + BYTES - 1) / BYTES };
    int                p = hpml_comm_size(c), rank = hpml_comm_rank(c);
    float              x[TENSORS][EACH + 3], extra = 0; /* + 3: with gaps between the tensors */
    hpml_gradient      g[TENSORS];
    hpml_exchange_desc d;
    hpml_rng           r = { .seed = 5, .stream = (uint64_t)rank };
    memset(&d, 0, sizeof d);
    for (int i = 0; i < TENSORS; i++) g[i] = (hpml_gradient){ "t", x[i], 1, EACH };
    if (onebit) g[3].rows = 2, g[3].cols = EACH / 2; /* packed to 1 bit, and summed last */
    if (onebit) d.codec.kind = HPML_CODEC_ONEBIT, d.codec.min_elements = 1;
    d.count = TENSORS, d.tensors = g, d.fuse_bytes = BYTES;
    hpml_exchange *e = hpml_exchange_create(c, &d);
    CHECK(e && hpml_trace_start(hpml_comm_ctx(c), NULL) == HPML_OK);
    for (int k = 0; k < orders; k++) {
        int       order[TENSORS];
        hpml_job *job = NULL, *other = NULL;
        for (int i = 0; i < TENSORS; i++) {
            int64_t at = hpml_rng_below(&r, i + 1);
            order[i] = order[at], order[at] = i;
        }
        for (int i = 0; i < TENSORS; i++) {
            CHECK(!job);
            for (int n = 0; n < EACH; n++) x[order[i]][n] = (float)whole(rank, n + order[i] + k);
            if (onebit)
                for (int n = 0; n < EACH && order[i] == 3; n++) x[3][n] = (float)(k + 1);
            if (rank % 2 && k % 4 == 0) hpml_comm_compute(c, 1e-4);
            job = hpml_exchange_ready(e, order[i]);
        }
        CHECK(job);
        other = hpml_iallreduce(c, &extra, 1, NULL);
        CHECK(hpml_job_wait(job) == HPML_OK && hpml_job_wait(other) == HPML_OK);
        for (int i = 0; i < TENSORS; i++)
            for (int n = 0; n < EACH; n++)
                CHECK((double)x[i][n] == (onebit && i == 3 ? p * (k + 1.0) : whole_sum(p, n + i + k)));
    }
    char path[] = "/tmp/hpml_orders_XXXXXX", line[512];
    int  file = mkstemp(path), sums = -orders, fused = 0; /* - orders: the sums of `other` */
    CHECK(file >= 0 && hpml_trace_save(hpml_comm_ctx(c), path) == HPML_OK);
    close(file);
    FILE *f = fopen(path, "r"); /* opened by name, because hpml_trace_save has replaced the empty file */
    while (fgets(line, sizeof line, f)) {
        sums += (strstr(line, "\"allreduce\"") != NULL) - (strstr(line, "\"negotiate\"") != NULL);
        fused += strstr(line, "\"fuse\"") != NULL;
    }
    fclose(f);
    remove(path);
    CHECK(fused == sums && sums == orders * (onebit ? ((TENSORS - 1) * EACH * 4 + BYTES - 1) / BYTES : SUMS));
    hpml_exchange_free(e);
    return HPML_OK;
}

#ifdef __linux__
/* Checks counts of more than 2^31 elements and 2^32 bytes: memory of this size that maps the same 4 MB again and again.
   A count that was cut off to 32 bits would leave most of the 4 MB unchanged. */
static hpml_status huge(hpml_comm *c, void *user)
{
    enum { PART = 4 << 20, EXTRA = 1002 };
    const size_t        parts = 1025, n = ((size_t)1 << 31) + EXTRA;
    FILE               *f = tmpfile();
    char               *x = (char *)mmap(NULL, parts * PART, PROT_NONE,
                                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    int                 rank = hpml_comm_rank(c);
    int64_t             wrong[2] = { 0, 0 };
    hpml_allreduce_desc d;
    (void)user;
    memset(&d, 0, sizeof d);
    d.algorithm = HPML_RING, d.element = HPML_ELEMENT_BF16, d.reduce = HPML_MAX;
    CHECK(f && (void *)x != MAP_FAILED && ftruncate(fileno(f), PART) == 0);
    for (size_t k = 0; k < parts; k++)
        CHECK(mmap(x + k * PART, PART, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fileno(f), 0) != MAP_FAILED);
    for (int i = 0; i < PART && rank == 0; i++) x[i] = (char)(i % 251 + 1);
    CHECK(hpml_broadcast(c, x, 2 * n, 0) == HPML_OK);
    for (int i = 0; i < PART; i++) wrong[0] += x[i] != (char)(i % 251 + 1);
    hpml_barrier(c);
    for (int i = 0; i < PART / 2; i++) element_set(x, HPML_ELEMENT_BF16, i, whole(rank, i));
    CHECK(hpml_allreduce(c, x, (int64_t)n, &d) == HPML_OK);
    for (int i = 0; i < PART / 2; i++)
        wrong[1] += element_get(x, HPML_ELEMENT_BF16, i) != whole_max(hpml_comm_size(c), i);
    munmap(x, parts * PART);
    fclose(f);
    CHECK(wrong[0] == 0 && wrong[1] == 0);
    return HPML_OK;
}
#endif

/* Rank 0 serves all other ranks with one receive posted for each: question i of rank r is answered by 1000 r + i. Every
   rank asks `count` questions, of different lengths, and says farewell by a question below 0. */
static hpml_status serve_case(hpml_comm *c, int count)
{
    enum { MOST = 16 };
    hpml_message  in[MOST], *list[MOST] = { NULL };
    const int     p = hpml_comm_size(c), rank = hpml_comm_rank(c);
    int           living = p - 1, answered = 0, question[MOST], answer;
    static double extra[2][40];
    for (int i = 0; i <= count && rank > 0; i++) {
        hpml_message m;
        question[0] = i < count ? i : -1;
        CHECK(hpml_send(c, 0, 1, question, sizeof *question) == HPML_OK);
        if (i == count) break;
        CHECK(hpml_send(c, 0, 2, extra[1], sizeof **extra * (size_t)(i % 40)) == HPML_OK);
        CHECK(hpml_irecv(c, 0, 3, &answer, sizeof answer, &m) == HPML_OK);
        if (i % 2) while (!hpml_test(c, &m)) hpml_comm_compute(c, 1e-5); /* CLOCK: time passes by computing alone */
        CHECK(hpml_wait(c, &m) == HPML_OK && m.done && answer == 1000 * rank + i);
    }
    for (int r = 1; r < p && rank == 0; r++) {
        list[r] = &in[r];
        CHECK(hpml_irecv(c, r, 1, &question[r], sizeof *question, &in[r]) == HPML_OK);
    }
    while (living > 0 && rank == 0) {
        const int r = hpml_wait_any(c, list, p, -1);
        CHECK(r > 0 && in[r].done && in[r].status == HPML_OK && in[r].peer == r);
        if (question[r] < 0) {
            list[r] = NULL;
            living--;
            continue;
        }
        CHECK(hpml_recv(c, r, 2, extra[0], sizeof **extra * (size_t)(question[r] % 40)) == HPML_OK);
        answer = 1000 * r + question[r];
        answered++;
        CHECK(hpml_irecv(c, r, 1, &question[r], sizeof *question, &in[r]) == HPML_OK);
        CHECK(hpml_send(c, r, 3, &answer, sizeof answer) == HPML_OK);
    }
    CHECK(rank > 0 || answered == count * (p - 1));
    return hpml_barrier(c);
}

/* With .survive: rank 0 answers questions. Rank 1 fails after 3 of its 20, rank 2 leaves after 5, the others leave at
   the end without farewell. Rank 0 notices each loss, and goes on. */
static hpml_status survive_case(hpml_comm *c)
{
    enum { MOST = 16, COUNT = 20 };
    hpml_message in[MOST], *list[MOST] = { NULL };
    const int    p = hpml_comm_size(c), rank = hpml_comm_rank(c);
    int          living = p - 1, question[MOST], answers[MOST] = { 0 }, answer = 0;
    for (int i = 0; i < COUNT && rank > 0; i++) {
        if (rank == 1 && i == 3) return hpml_ctx_fail(hpml_comm_ctx(c), HPML_ERR_NONFINITE, "the loss is NaN");
        if (rank == 2 && i == 5) return HPML_OK;
        hpml_comm_compute(c, 1e-3);
        CHECK(hpml_send(c, 0, 1, &i, sizeof i) == HPML_OK && hpml_recv(c, 0, 2, &answer, sizeof answer) == HPML_OK);
        CHECK(answer == 2 * i && !hpml_comm_lost(c, 0) && !hpml_comm_lost(c, rank));
    }
    for (int r = 1; r < p && rank == 0; r++) {
        list[r] = &in[r];
        CHECK(hpml_irecv(c, r, 1, &question[r], sizeof *question, &in[r]) == HPML_OK);
    }
    while (living > 0 && rank == 0) {
        const int r = hpml_wait_any(c, list, p, -1);
        CHECK(r > 0);
        if (in[r].status == HPML_OK) {
            answers[r]++;
            answer = 2 * question[r];
            CHECK(hpml_irecv(c, r, 1, &question[r], sizeof *question, &in[r]) == HPML_OK);
            CHECK(hpml_send(c, r, 2, &answer, sizeof answer) == HPML_OK);
            continue;
        }
        CHECK(in[r].status == HPML_ERR_PEER && hpml_comm_lost(c, r) && hpml_ctx_status(hpml_comm_ctx(c)) == HPML_OK);
        CHECK(hpml_send(c, r, 2, &answer, sizeof answer) == HPML_ERR_PEER);
        CHECK(hpml_recv(c, r, 1, &answer, sizeof answer) == HPML_ERR_PEER);
        CHECK(answers[r] == (r > 2 ? COUNT : 2 * r + 1)); /* rank 1: 3, rank 2: 5 */
        list[r] = NULL;
        living--;
    }
    CHECK(!hpml_comm_lost(c, -1) && !hpml_comm_lost(c, p) && !hpml_comm_lost(NULL, 0));
    return hpml_ctx_status(hpml_comm_ctx(c));
}

/* How a worker of deaths_case ends: in step `step` (in none, if that is DEATH_STEPS), before its question, before the
   body, while the body is in flight, or before the answer; by an error on its context, an error returned, or early. */
enum { DEATH_STEPS = 30 };
typedef struct death { int step, phase, how; } death;

static death death_of(int rank, int seed)
{
    hpml_rng rng = { .seed = (uint64_t)seed, .stream = (uint64_t)rank };
    death    d;
    d.step  = (int)hpml_rng_below(&rng, DEATH_STEPS + 5);
    d.phase = (int)hpml_rng_below(&rng, 4);
    d.how   = (int)hpml_rng_below(&rng, 3);
    if (d.step > DEATH_STEPS) d.step = DEATH_STEPS;
    return d;
}

static hpml_status die(hpml_comm *c, death d)
{
    if (d.how == 0) return hpml_ctx_fail(hpml_comm_ctx(c), HPML_ERR_NONFINITE, "dies");
    return d.how == 1 ? HPML_ERR_READ : HPML_OK;
}

static hpml_status mortal(hpml_comm *c, death d, int server)
{
    static double body[1000]; /* the same on all ranks, never written */
    for (int i = 0; i < DEATH_STEPS; i++) {
        hpml_message m;
        int          answer = -1;
        const int    phase = i == d.step ? d.phase : -1;
        hpml_comm_compute(c, 1e-5 * (1 + i % 7));
        if (phase == 0) return die(c, d);
        CHECK(hpml_send(c, server, 1, &i, sizeof i) == HPML_OK);
        if (phase == 1) return die(c, d);
        CHECK(hpml_isend(c, server, 2, body, sizeof body, &m) == HPML_OK);
        if (phase == 2) {
            d.how = 0;
            die(c, d);
            hpml_wait(c, &m); /* gives it up, unless it is being received */
            return HPML_ERR_NONFINITE;
        }
        CHECK(hpml_wait(c, &m) == HPML_OK);
        if (phase == 3) return die(c, d);
        CHECK(hpml_recv(c, server, 3, &answer, sizeof answer) == HPML_OK && answer == 7 * i);
    }
    return HPML_OK;
}

/* With .survive: the last rank serves the others, which die or leave at random, until all are lost. It has then served
   exactly the steps that each has finished; of a body that was in flight at a death it has all or nothing. */
static hpml_status deaths_case(hpml_comm *c, int seed)
{
    enum { MOST = 16 };
    const int     workers = hpml_comm_size(c) - 1;
    hpml_message  in[MOST], *list[MOST] = { NULL };
    int           question[MOST], served[MOST] = { 0 }, living = workers;
    static double body[1000]; /* of the only server */
    if (hpml_comm_rank(c) < workers) return mortal(c, death_of(hpml_comm_rank(c), seed), workers);
    for (int r = 0; r < workers; r++) {
        list[r] = &in[r];
        CHECK(hpml_irecv(c, r, 1, &question[r], sizeof *question, &in[r]) == HPML_OK);
    }
    while (living > 0) {
        const int   r = hpml_wait_any(c, list, workers, -1);
        CHECK(r >= 0);
        const death d = death_of(r, seed);
        hpml_status status = in[r].status;
        if (status == HPML_OK) CHECK(question[r] == served[r] && question[r] <= d.step);
        if (status == HPML_OK) status = hpml_recv(c, r, 2, body, sizeof body);
        if (status == HPML_OK) {
            const int answer = 7 * served[r]++;
            CHECK(hpml_irecv(c, r, 1, &question[r], sizeof *question, &in[r]) == HPML_OK);
            status = hpml_send(c, r, 3, &answer, sizeof answer);
            CHECK(status == HPML_OK || (status == HPML_ERR_PEER && hpml_comm_lost(c, r)));
            continue; /* a worker that is lost is found by its next question */
        }
        CHECK(status == HPML_ERR_PEER && hpml_comm_lost(c, r) && hpml_ctx_status(hpml_comm_ctx(c)) == HPML_OK);
        const int more = served[r] - d.step;
        CHECK(d.step == DEATH_STEPS ? more == 0 : more == (d.phase == 3) || (d.phase == 2 && more == 1));
        list[r] = NULL;
        living--;
    }
    return hpml_ctx_status(hpml_comm_ctx(c));
}

/* With .survive the last rank leaves: a sum of the others ends on each of them in an error that names it. */
static hpml_status sum_without_one(hpml_comm *c, bool *named)
{
    float       x[64] = { 0 };
    char        name[32];
    const int   last = hpml_comm_size(c) - 1;
    snprintf(name, sizeof name, "rank %d has left", last);
    if (hpml_comm_rank(c) == last) return HPML_OK;
    hpml_status status = hpml_allreduce(c, x, 64, NULL);
    *named = status == HPML_ERR_PEER && strstr(hpml_ctx_error(hpml_comm_ctx(c)), name) != NULL;
    if (!*named) printf("    rank %d: %s\n", hpml_comm_rank(c), hpml_ctx_error(hpml_comm_ctx(c)));
    return status;
}

/* Keeps a rank late: until all other ranks have failed because they waited for it, which has_ended counts in *ended; if
   ended is NULL, because ranks are processes, for some seconds. */
static void outlast(hpml_comm *c, const int *ended, double seconds)
{
    double end = hpml_now() + (ended ? 20 : seconds);
    while (hpml_now() < end && (!ended || __atomic_load_n(ended, __ATOMIC_ACQUIRE) < hpml_comm_size(c) - 1))
        usleep(ended ? 1000 : (unsigned)(1e6 * seconds));
}

static hpml_status has_ended(int *ended, hpml_status status)
{
    if (ended) __atomic_add_fetch(ended, 1, __ATOMIC_RELEASE);
    return status;
}

/* Rank r waits for rank r + 1, rank 0 for the longest time; the last rank hangs. */
static hpml_status chain_hangs(hpml_comm *c, int *ended)
{
    char x    = 0;
    int  rank = hpml_comm_rank(c), last = hpml_comm_size(c) - 1;
    if (hpml_barrier(c) != HPML_OK) return hpml_ctx_status(hpml_comm_ctx(c));
    if (rank == last) outlast(c, ended, 2);
    else usleep(20000u * (unsigned)rank);
    return has_ended(ended, rank == last ? hpml_barrier(c) : hpml_recv(c, rank + 1, 0, &x, 1));
}

/* The last rank works for 1.2 s, four deadlines of 0.3 s, and announces that by hpml_comm_busy; then it hangs, or comes
   to the barrier. The other ranks wait in the barrier. */
static hpml_status works_long(hpml_comm *c, bool hangs, int *ended)
{
    bool last = hpml_comm_rank(c) == hpml_comm_size(c) - 1;
    if (hpml_barrier(c) != HPML_OK) return hpml_ctx_status(hpml_comm_ctx(c));
    for (int i = 0; i < 12 && last; i++) {
        hpml_comm_busy(c, i < 11 ? 20 : 0);
        usleep(100000);
    }
    if (last && hangs) outlast(c, ended, 2);
    return has_ended(ended, hpml_barrier(c));
}

/* The last rank works for two and a half deadlines while a job of its own waits for the other ranks, which begin their
   part of the job when the last rank's message comes. */
static hpml_status works_beside_a_job(hpml_comm *c)
{
    int   p = hpml_comm_size(c), last = p - 1;
    float y = 0, *x = (float *)hpml_ctx_alloc(hpml_comm_ctx(c), sizeof *x, NULL);
    CHECK(hpml_job_wait(hpml_iallreduce(c, x, 1, NULL)) == HPML_OK && hpml_barrier(c) == HPML_OK);
    if (hpml_comm_rank(c) != last) {
        CHECK(hpml_recv(c, last, 1, &y, sizeof y) == HPML_OK);
        return hpml_job_wait(hpml_iallreduce(c, x, 1, NULL));
    }
    hpml_job *job = hpml_iallreduce(c, x, 1, NULL);
    hpml_comm_busy(c, 20);
    usleep(750000); /* not a multiple of the deadline, at which the job asks whether rank 0 waits or works */
    hpml_comm_busy(c, 0);
    for (int i = 0; i < last; i++) CHECK(hpml_send(c, i, 1, &y, sizeof y) == HPML_OK);
    return hpml_job_wait(job);
}

/* Rank 1 announces 4 s of work twice, 0.4 s apart, and comes back 3.8 s after the second announcement, in time. */
static hpml_status works_to_the_end(hpml_comm *c)
{
    char x = 0;
    CHECK(hpml_barrier(c) == HPML_OK);
    if (hpml_comm_rank(c) != 1) return hpml_comm_rank(c) == 0 ? hpml_recv(c, 1, 1, &x, 1) : HPML_OK;
    hpml_comm_busy(c, 4);
    usleep(400000);
    hpml_comm_busy(c, 4);
    usleep(3800000);
    hpml_comm_busy(c, 0);
    return hpml_send(c, 0, 1, &x, 1);
}

/* Rank 1 finishes one tensor of two. Then it leaves, or is late with the other tensor (see outlast). */
static hpml_status unready(hpml_comm *c, bool leave, int *ended)
{
    static float       x[8][2];
    int                rank = hpml_comm_rank(c);
    hpml_gradient      g[2] = { { "w1", x[rank], 1, 1 }, { "b1", x[rank] + 1, 1, 1 } };
    hpml_exchange_desc d;
    memset(&d, 0, sizeof d);
    d.count = 2, d.tensors = g;
    hpml_exchange *e = hpml_exchange_create(c, &d);
    hpml_exchange_ready(e, rank == 1 ? 0 : 1);
    if (rank == 1 && leave) return HPML_OK;
    if (rank == 1) outlast(c, ended, 1);
    hpml_status status = hpml_job_wait(hpml_exchange_ready(e, rank == 1 ? 1 : 0));
    return has_ended(ended, status);
}

/* Functions of ranks one of which does not do what the others do. */
static hpml_status sum_of_four(hpml_comm *c)
{
    float x[4] = { 1, 1, 1, 1 };
    return hpml_allreduce(c, x, 4, NULL);
}

static hpml_status leaves(hpml_comm *c, void *user)
{
    (void)user;
    return hpml_comm_rank(c) == 1 ? HPML_OK : sum_of_four(c);
}

static hpml_status another(hpml_comm *c, void *user)
{
    float x[4] = { 0 };
    (void)user;
    return hpml_comm_rank(c) == 0 ? hpml_broadcast(c, x, sizeof x, hpml_comm_size(c) - 1) : sum_of_four(c);
}

static hpml_status other_count(hpml_comm *c, void *user)
{
    float x[64] = { 0 };
    (void)user;
    return hpml_allreduce(c, x, hpml_comm_rank(c) == 1 ? 64 : 32, NULL);
}

#endif
