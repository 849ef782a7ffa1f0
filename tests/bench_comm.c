/* Allreduce of f32, seconds by size: bench_comm threads | mpi | ring [BYTES]. Prints "case bytes seconds" for each
   measurement; bench_comm.sh repeats, takes the best of each and writes the rows. */
#define HPML_IMPLEMENTATION
#include "../hpml_comm.h"

enum { OURS, NATIVE, COPY, RING };
#define LARGEST ((int64_t)64 << 20)

static void once(hpml_comm *c, int what, float *x, int64_t bytes)
{
    static const hpml_allreduce_desc ring = { 0, HPML_RING, HPML_SUM, HPML_ELEMENT_F32, 0 };
    if (what == OURS) hpml_allreduce(c, x, bytes / 4, NULL);
    if (what == RING) hpml_allreduce(c, x, bytes / 4, &ring);
    if (what == COPY) memcpy(x + LARGEST / 4, x, (size_t)bytes);
#ifdef HPML_USE_MPI
    if (what == NATIVE) MPI_Allreduce(MPI_IN_PLACE, x, (int)(bytes / 4), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
#endif
}

/* Best of `runs` stretches of about 5 ms; the slowest rank's time counts. */
static double seconds(hpml_comm *c, int what, float *x, int64_t bytes, int runs)
{
    hpml_allreduce_desc max;
    double              best = 1e30, t;
    int                 times = 1;
    memset(&max, 0, sizeof max);
    max.reduce = HPML_MAX, max.element = HPML_ELEMENT_F64;
    for (int run = -2; run < runs; run++) {
        hpml_barrier(c);
        double start = hpml_now();
        for (int i = 0; i < times; i++) once(c, what, x, bytes);
        t = (hpml_now() - start) / times;
        hpml_allreduce(c, &t, 1, &max);
        if (run >= 0 && t < best) best = t;
        times = t > 0.005 ? 1 : t > 5e-6 ? (int)(0.005 / t) : 1000;
    }
    return best;
}

static hpml_status measure(hpml_comm *c, void *user)
{
    float *x    = (float *)hpml_ctx_alloc(hpml_comm_ctx(c), (size_t)LARGEST * 2, NULL);
    bool   mpi  = strcmp(hpml_comm_transport(c), "mpi") == 0;
    double t[3] = { 0 };
    (void)user;
    if (!x) return hpml_ctx_status(hpml_comm_ctx(c));
    hpml_comm_tune(c);
    for (int64_t bytes = 1024; bytes <= LARGEST; bytes *= 4) {
        t[0] = seconds(c, OURS, x, bytes, 6);
        t[1] = seconds(c, mpi ? NATIVE : COPY, x, bytes, 6);
        if (hpml_comm_rank(c) > 0) continue;
        printf("%s %lld %.9g\n", mpi ? "ours_mpi" : "ours_threads", (long long)bytes, t[0]);
        printf("%s %lld %.9g\n", mpi ? "mpich" : "copy", (long long)bytes, t[1]);
    }
    return hpml_ctx_status(hpml_comm_ctx(c));
}

#ifdef HPML_USE_MPI
/* The ring as most programs write it: MPI_Sendrecv, and MPI waits as it does. */
static void plain_ring(float *x, float *buffer, int64_t n, int p, int rank)
{
    int next = (rank + 1) % p, before = (rank + p - 1) % p;
    for (int k = 0; k < 2 * (p - 1); k++) {
        int     out = ((rank - (k < p - 1 ? 1 : 0) - k % (p - 1)) % p + p) % p, in = (out + p - 1) % p;
        int64_t from = hpml_block(n, p, out), to = hpml_block(n, p, in), size = hpml_block(n, p, in + 1) - to;
        MPI_Sendrecv(x + from, (int)(hpml_block(n, p, out + 1) - from), MPI_FLOAT, next, 0, k < p - 1 ? buffer : x + to,
                     (int)size, MPI_FLOAT, before, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        for (int64_t i = 0; i < size && k < p - 1; i++) x[to + i] += buffer[i];
    }
}

static hpml_status crowd(hpml_comm *c, void *user) /* more ranks than cores */
{
    int64_t bytes = *(int64_t *)user, n = bytes / 4;
    int     p = hpml_comm_size(c), rank = hpml_comm_rank(c);
    float  *x = (float *)hpml_ctx_alloc(hpml_comm_ctx(c), (size_t)LARGEST, NULL), *buffer = x + n;
    double  ours, theirs = 1e30;
    if (!x) return hpml_ctx_status(hpml_comm_ctx(c));
    for (int64_t i = 0; i < n; i++) x[i] = (float)rank;
    plain_ring(x, buffer, n, p, rank);
    for (int64_t i = 0; i < n; i++)
        if (x[i] != (float)(p * (p - 1) / 2))
            return hpml_ctx_fail(hpml_comm_ctx(c), HPML_ERR_STATE, "plain ring is wrong");
    ours = seconds(c, RING, x, bytes, 10);
    for (int run = 0; run < 5; run++) {
        MPI_Barrier(MPI_COMM_WORLD);
        double start = hpml_now(), t;
        for (int i = 0; i < 4; i++) plain_ring(x, buffer, n, p, rank);
        t      = (hpml_now() - start) / 4;
        theirs = t < theirs ? t : theirs;
    }
    if (rank == 0) printf("ours_ring %lld %.9g\n", (long long)bytes, ours);
    if (rank == 0) printf("plain_ring %lld %.9g\n", (long long)bytes, theirs);
    return hpml_ctx_status(hpml_comm_ctx(c));
}
#endif

int main(int argc, char **argv)
{
    char             error[768];
    hpml_launch_desc d;
    int64_t          bytes = argc > 2 ? atoll(argv[2]) : 410000;
    memset(&d, 0, sizeof d);
    hpml_rank_fn *fn = measure;
    if (argc > 1 && strcmp(argv[1], "threads") == 0) d.ranks = 2;
    else d.transport = HPML_TRANSPORT_MPI;
#ifdef HPML_USE_MPI
    if (argc > 1 && strcmp(argv[1], "ring") == 0) fn = crowd;
#endif
    if (hpml_launch(&d, fn, &bytes, error, sizeof error) == HPML_OK) return 0;
    fprintf(stderr, "%s\n", error);
    return 1;
}
