/* Exercise 06: checks an allreduce by recursive doubling, and the size from which on a ring is faster. */
#include "../ranks.h"

/* Adds up x, n floats, over all ranks: every rank ends with the same sums, the same bits. spare: n floats. */
hpml_status doubling_allreduce(hpml_comm *c, float *x, int64_t n, float *spare);

/* For p ranks, a power of two from 4 on: the number of floats at which recursive doubling and a ring take equally long,
   if a message of b bytes takes latency + b / bandwidth seconds. */
double crossover(int p, double latency, double bandwidth);

typedef struct doubling_run {
    int     p;
    int64_t n;
    float  *x[RANKS_MAX], *spare[RANKS_MAX];
    char    what[128];
} doubling_run;
static doubling_run doubling;

static hpml_status doubling_rank(hpml_comm *c, void *user)
{
    const int r = hpml_comm_rank(c);
    (void)user;
    return doubling_allreduce(c, doubling.x[r], doubling.n, doubling.spare[r]);
}

/* The largest power of two that is not above p, and its logarithm. */
static int power_below(int p)
{
    int m = 1;
    while (2 * m <= p) m *= 2;
    return m;
}
static int log_of(int m)
{
    int log = 0;
    while (1 << log < m) log++;
    return log;
}

static void doubling_fill(int p, int64_t n, bool whole_numbers)
{
    const int m = power_below(p);
    doubling    = (doubling_run){ .p = p, .n = n };
    snprintf(doubling.what, sizeof doubling.what, "%d ranks, %lld floats", p, (long long)n);
    if (m < p)
        snprintf(doubling.what + strlen(doubling.what), 96,
                 " (no power of two: ranks %d to %d first give their arrays to others)", m, p - 1);
    for (int r = 0; r < p; r++) {
        doubling.x[r]     = grade_floats("x", n);
        doubling.spare[r] = grade_floats("spare", n);
        for (int64_t i = 0; i < n; i++)
            doubling.x[r][i] = whole_numbers ? (float)grade_int(-1000, 1000) : (float)grade_real(-1, 1);
    }
}

static bool doubling_sums(const hpml_launch_desc *launch, int64_t n)
{
    double *sum = (double *)grade_memory("the checker's sums", (size_t)n * sizeof(double));
    doubling_fill(launch->ranks, n, true);
    for (int64_t i = 0; i < n; i++) {
        sum[i] = 0;
        for (int r = 0; r < doubling.p; r++) sum[i] += doubling.x[r][i];
    }
    if (!ranks_run(doubling.what, launch, doubling_rank, NULL)) return false;
    for (int r = 0; r < doubling.p; r++)
        for (int64_t i = 0; i < n; i++)
            if (doubling.x[r][i] != sum[i])
                return grade_fail("%s: element %lld of rank %d is %g, the sum is %g", doubling.what, (long long)i, r,
                                  doubling.x[r][i], sum[i]);
    return true;
}

static bool powers_of_two(void)
{
    for (int p = 1; p <= 16; p *= 2) {
        const hpml_launch_desc clock = ranks_clock(p, 1e-6, 1e9), threads = ranks_threads(p);
        if (!doubling_sums(&clock, grade_int(0, 300))) return false;
        if (p <= 4 && !doubling_sums(&threads, grade_int(100, 300))) return false;
    }
    return true;
}

static bool any_number(void)
{
    static const int ps[] = { 3, 5, 6, 7, 9, 11 };
    for (int k = 0; k < 6; k++) {
        const hpml_launch_desc clock = ranks_clock(ps[k], 1e-6, 1e9), threads = ranks_threads(ps[k]);
        if (!doubling_sums(&clock, grade_int(0, 300))) return false;
        if (ps[k] <= 5 && !doubling_sums(&threads, grade_int(100, 300))) return false;
    }
    return true;
}

static bool same_bits(void)
{
    for (int p = 2; p <= 9; p++) {
        const hpml_launch_desc launch = ranks_clock(p, 1e-6, 1e9);
        doubling_fill(p, 500 + p, false);
        if (!ranks_run(doubling.what, &launch, doubling_rank, NULL)) return false;
        for (int r = 1; r < p; r++)
            if (memcmp(doubling.x[0], doubling.x[r], (size_t)doubling.n * sizeof(float)))
                return grade_fail("%s: ranks 0 and %d differ in the last bits: they have added in different orders",
                                  doubling.what, r);
    }
    return true;
}

static bool partners(void)
{
    for (int p = 2; p <= 16; p *= 2) {
        const hpml_launch_desc launch = ranks_clock(p, 1e-6, 1e9);
        doubling_fill(p, 100, true);
        if (!ranks_run(doubling.what, &launch, doubling_rank, NULL)) return false;
        for (int r = 0; r < p; r++)
            for (int to = 0; to < p; to++) {
                const int  differ   = r ^ to;
                const bool partner  = differ > 0 && (differ & (differ - 1)) == 0;
                const int  messages = (int)rank_reports[r].messages_to[to];
                if (messages != (partner ? 1 : 0))
                    return grade_fail("%s: rank %d sends %d messages to rank %d, and should send %d: its partners are "
                                      "the ranks whose numbers differ in one bit", doubling.what, r, messages, to,
                                      partner ? 1 : 0);
            }
    }
    return true;
}

static bool messages_and_chain(void)
{
    for (int p = 2; p <= 23; p += 3) {
        const hpml_launch_desc launch = ranks_clock(p, 1e-6, 1e9);
        const int              m = power_below(p), depth = log_of(m) + (m < p ? 2 : 0);
        const int64_t          most = m * log_of(m) + 2 * (p - m);
        int64_t                count = 0, bytes = 0;
        doubling_fill(p, 100, true);
        if (!ranks_run(doubling.what, &launch, doubling_rank, NULL)) return false;
        for (int r = 0; r < p; r++) {
            count += rank_reports[r].count.messages;
            bytes += rank_reports[r].count.bytes;
        }
        if (ranks_depth(p) > depth)
            return grade_fail("%s: %lld messages follow each other, %d are enough: log2 %d%s", doubling.what,
                              (long long)ranks_depth(p), depth, m, m < p ? ", one before and one behind" : "");
        if (count > most || bytes > 400 * most)
            return grade_fail("%s: %lld messages with %lld bytes in all, %lld with %lld are enough: one array in each "
                              "round", doubling.what, (long long)count, (long long)bytes, (long long)most,
                              (long long)(400 * most));
    }
    return true;
}

static hpml_status ring_rank(hpml_comm *c, void *user)
{
    const hpml_allreduce_desc desc = { .algorithm = HPML_RING };
    rank_report              *mine = &rank_reports[hpml_comm_rank(c)];
    (void)user;
    hpml_allreduce(c, doubling.x[hpml_comm_rank(c)], doubling.n, &desc);
    mine->end = hpml_comm_now(c);
    return hpml_ctx_status(hpml_comm_ctx(c));
}

/* Runs both on a network in virtual time, a fifth below and above the student's size. */
static bool crossover_measured(void)
{
    for (int k = 0; k < 4; k++) {
        const int              p = 4 << grade_int(0, 2);
        const double           latency = grade_real(5e-6, 50e-6), bandwidth = grade_real(1e8, 1e9);
        const double           rounds = log_of(p), moves = 2 * (p - 1);
        const double           exact = latency * bandwidth / 4 * (moves - rounds) / (rounds - moves / p);
        const double           n = crossover(p, latency, bandwidth);
        const hpml_launch_desc launch = ranks_clock(p, latency, bandwidth);
        if (fabs(n - 4 * exact) < 0.01 * exact)
            return grade_fail("%g is the number of bytes: a float has 4", n);
        if (!(n > 0 && n < 1e8))
            return grade_fail("%d ranks, %.0f us, %.0f MB/s: crossover returns %g floats", p, 1e6 * latency,
                              1e-6 * bandwidth, n);
        for (int above = 0; above < 2; above++) {
            doubling_fill(p, (int64_t)((above ? 1.2 : 0.8) * n) / p * p, true);
            if (!ranks_run(doubling.what, &launch, doubling_rank, NULL)) return false;
            const double tree = ranks_end(p);
            hpml_launch_desc library = launch;
            library.only_messages    = false;
            if (hpml_launch(&library, ring_rank, NULL, NULL, 0) != HPML_OK)
                return grade_fail("%s: the library's ring fails", doubling.what);
            const double ring = ranks_end(p);
            if ((tree < ring) == (above == 0)) continue;
            return grade_fail("%s, %.0f us, %.0f MB/s: recursive doubling takes %.4g ms, a ring %.4g ms, and crossover "
                              "says %.0f floats: compare log2 p messages of n floats with 2 (p - 1) of n / p",
                              doubling.what, 1e6 * latency, 1e-6 * bandwidth, 1e3 * tree, 1e3 * ring, n);
        }
    }
    return true;
}

static const grade_case cases[] = {
    { "sums, 1 to 16 ranks, powers of two", 25, powers_of_two },
    { "sums, any number of ranks", 15, any_number },
    { "the same bits on all ranks", 10, same_bits },
    { "partners", 15, partners },
    { "messages and their longest chain", 15, messages_and_chain },
    { "where the ring becomes faster", 20, crossover_measured },
};
int main(int argc, char **argv) { return GRADE("06 recursive doubling", cases); }
