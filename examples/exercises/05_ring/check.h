/* Exercise 05: checks an allreduce by a ring: its sums, and that it is a ring. */
#include "../ranks.h"

/* Adds up x, n floats, over all ranks: every rank ends with the same sums. `spare`: memory for the largest block, n / p
   floats rounded up. */
hpml_status ring_allreduce(hpml_comm *c, float *x, int64_t n, float *spare);

typedef struct ring_run {
    int     p;
    int64_t n;
    float  *x[RANKS_MAX], *spare[RANKS_MAX];
    char    what[64];
} ring_run;
static ring_run ring;

static hpml_status ring_rank(hpml_comm *c, void *user)
{
    const int r = hpml_comm_rank(c);
    (void)user;
    return ring_allreduce(c, ring.x[r], ring.n, ring.spare[r]);
}

static void ring_fill(int p, int64_t n, bool whole_numbers)
{
    ring = (ring_run){ .p = p, .n = n };
    snprintf(ring.what, sizeof ring.what, "%d ranks, %lld floats", p, (long long)n);
    for (int r = 0; r < p; r++) {
        ring.x[r]     = grade_floats("x", n);
        ring.spare[r] = grade_floats("spare", (n + p - 1) / p);
        for (int64_t i = 0; i < n; i++)
            ring.x[r][i] = whole_numbers ? (float)grade_int(-1000, 1000) : (float)grade_real(-1, 1);
    }
}

static bool ring_go(int p, int64_t n, double latency, double bandwidth)
{
    const hpml_launch_desc launch = ranks_clock(p, latency, bandwidth);
    ring_fill(p, n, true);
    return ranks_run(ring.what, &launch, ring_rank, NULL);
}

/* Fills, runs, and compares with sums in double precision. */
static bool ring_sums(const hpml_launch_desc *launch, int64_t n)
{
    double *sum = (double *)grade_memory("the checker's sums", (size_t)n * sizeof(double));
    ring_fill(launch->ranks, n, true);
    for (int64_t i = 0; i < n; i++) {
        sum[i] = 0;
        for (int r = 0; r < ring.p; r++) sum[i] += ring.x[r][i];
    }
    if (!ranks_run(ring.what, launch, ring_rank, NULL)) return false;
    for (int r = 0; r < ring.p; r++)
        for (int64_t i = 0; i < n; i++)
            if (ring.x[r][i] != sum[i])
                return grade_fail("%s: element %lld of rank %d is %g, the sum is %g; of %d blocks, block b is elements "
                                  "n b / p to n (b + 1) / p (hpml_block)", ring.what, (long long)i, r, ring.x[r][i],
                                  sum[i], ring.p);
    return true;
}

static bool sums_that_divide(void)
{
    for (int p = 1; p <= 8; p++) {
        const hpml_launch_desc launch = ranks_clock(p, 1e-6, 1e9);
        if (!ring_sums(&launch, p * grade_int(1, 50))) return false;
    }
    return true;
}

static bool sums_of_any_size(void)
{
    for (int p = 1; p <= 9; p++) {
        const hpml_launch_desc launch  = ranks_clock(p, 1e-6, 1e9);
        const int64_t          sizes[] = { 0, 1, p - 1, p + 1, 1003, grade_int(2, 400) };
        for (int i = 0; i < 6; i++)
            if (!ring_sums(&launch, sizes[i])) return false;
    }
    return true;
}

static bool same_bits(void)
{
    for (int p = 2; p <= 9; p++) {
        const hpml_launch_desc launch = ranks_clock(p, 1e-6, 1e9);
        ring_fill(p, 500 + p, false);
        if (!ranks_run(ring.what, &launch, ring_rank, NULL)) return false;
        for (int r = 1; r < p; r++)
            if (memcmp(ring.x[0], ring.x[r], (size_t)ring.n * sizeof(float)))
                return grade_fail("%s: ranks 0 and %d differ in the last bits, because they have added in different "
                                  "orders; one rank completes a block and the others copy its bits", ring.what, r);
    }
    return true;
}

static bool without_buffers(void)
{
    for (int p = 2; p <= 5; p++) {
        const hpml_launch_desc launch = ranks_threads(p);
        if (!ring_sums(&launch, p * grade_int(200, 300))) return false;
    }
    return true;
}

static bool neighbours(void)
{
    for (int p = 3; p <= 9; p += 2) {
        if (!ring_go(p, 40 * p, 1e-6, 1e9)) return false;
        for (int r = 0; r < p; r++)
            for (int to = 0; to < p; to++)
                if (rank_reports[r].messages_to[to] > 0 && to != (r + 1) % p)
                    return grade_fail("%s: rank %d has sent to rank %d; in this ring it sends to rank %d alone",
                                      ring.what, r, to, (r + 1) % p);
    }
    return true;
}

static bool messages_and_bytes(void)
{
    for (int p = 2; p <= 9; p++) {
        const int64_t block = grade_int(10, 90), most = 2 * (p - 1);
        if (!ring_go(p, block * p, 1e-6, 1e9)) return false;
        for (int r = 0; r < p; r++) {
            const hpml_counters *s = &rank_reports[r].count;
            if (s->bytes > most * block * 4)
                return grade_fail("%s: rank %d has sent %lld bytes, a ring sends 2 (p - 1) blocks of n / p floats, "
                                  "%lld bytes: send one block in each move, not the whole array",
                                  ring.what, r, (long long)s->bytes, (long long)(most * block * 4));
            if (s->messages > most)
                return grade_fail("%s: rank %d has sent %lld messages, a ring sends 2 (p - 1) = %lld: one block in "
                                  "each move", ring.what, r, (long long)s->messages, (long long)most);
        }
    }
    return true;
}

static bool chain_of_messages(void)
{
    for (int p = 2; p <= 9; p++) {
        if (!ring_go(p, 40 * p, 1e-6, 1e9)) return false;
        if (ranks_depth(p) > 2 * (p - 1))
            return grade_fail("%s: %lld messages follow each other, in a ring 2 (p - 1) = %d: all ranks send at the "
                              "same time, each another block", ring.what, (long long)ranks_depth(p), 2 * (p - 1));
    }
    return true;
}

static bool virtual_time(void)
{
    for (int p = 2; p <= 16; p *= 2) {
        const double latency = 20e-6, bandwidth = 125e6, n = 20000.0 * p;
        const double formula = 2 * (p - 1) * (latency + 4 * n / p / bandwidth);
        if (!ring_go(p, (int64_t)n, latency, bandwidth)) return false;
        if (ranks_end(p) > 1.02 * formula)
            return grade_fail("%s: %.3f ms in virtual time; 2 (p - 1) (latency + n / p / bandwidth) is %.3f ms",
                              ring.what, 1e3 * ranks_end(p), 1e3 * formula);
    }
    return true;
}

static const grade_case cases[] = {
    { "sums, n a multiple of p", 20, sums_that_divide },
    { "sums of any size", 15, sums_of_any_size },
    { "the same bits on all ranks", 10, same_bits },
    { "sends that wait for their receives", 15, without_buffers },
    { "talks to its right neighbour alone", 10, neighbours },
    { "messages and bytes", 15, messages_and_bytes },
    { "longest chain of messages", 10, chain_of_messages },
    { "virtual time", 5, virtual_time },
};
int main(int argc, char **argv) { return GRADE("05 ring allreduce", cases); }
