/* Exercise 21: checks backup workers: for how many gradients a server should wait, and a server that does. */
#include "../ranks.h"

/* Returns for how many gradients, 1 to `workers`, a server should wait in each round, to use the most gradients per
   second: m such that m / (mean time of a round that waits for the first m) is the largest; of equal ones the smaller.
   seconds, (rounds, workers): how long each worker took in each of the rounds that were measured. */
int backup_choose(const double *seconds, int rounds, int workers);
/* Rank 0. Sends in each round (from 0) its number and the weights w to all workers, n + 1 floats; adds up the first
   wait_for gradients of this round; then w -= lr * sum / wait_for, and the next round begins. A worker (in this file)
   sends n + 1 floats for each round, in their order: the round's number and the gradient. Late ones, of earlier rounds,
   are dropped. In the end receives what is still on its way. room: memory for p + 2 arrays of n + 1 floats. */
hpml_status serve(hpml_comm *c, float *w, int64_t n, int rounds, int wait_for, float lr, float *room);

enum { BACKUP_MAX = 8, BACKUP_ROUNDS = 15 };

/* ---- how many ---- */

static int backup_compare(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static double backup_rate(const double *seconds, int rounds, int workers, int m)
{
    double sum = 0, sorted[BACKUP_MAX];
    for (int r = 0; r < rounds; r++) {
        memcpy(sorted, seconds + r * workers, (size_t)workers * sizeof *sorted);
        qsort(sorted, (size_t)workers, sizeof *sorted, backup_compare);
        sum += sorted[m - 1];
    }
    return m * rounds / sum;
}

static bool how_many(void)
{
    for (int k = 0; k < 200; k++) {
        const int workers = grade_int(1, BACKUP_MAX), rounds = grade_int(1, BACKUP_ROUNDS), slow = grade_int(0, 5);
        double    seconds[BACKUP_MAX * BACKUP_ROUNDS];
        int       best = 1;
        for (int i = 0; i < workers * rounds; i++)
            seconds[i] = grade_real(1, 1.4) * (grade_int(0, 9) < slow ? grade_real(2, 9) : 1);
        for (int m = 2; m <= workers; m++)
            if (backup_rate(seconds, rounds, workers, m) > backup_rate(seconds, rounds, workers, best)) best = m;
        const int got = backup_choose(seconds, rounds, workers);
        if (got < 1 || got > workers) return grade_fail("%d workers: waits for %d", workers, got);
        if (got != best)
            return grade_fail("%d workers, %d rounds: waits for %d gradients, %.3f per second; for %d it would be "
                              "%.3f: sort the times of each round, because another worker is slow each time; the m-th "
                              "of them is when m gradients are there", workers, rounds, got,
                              backup_rate(seconds, rounds, workers, got), best,
                              backup_rate(seconds, rounds, workers, best));
    }
    return true;
}

/* ---- the server ---- */

typedef struct backup_run {
    int    p, rounds, wait_for;
    int    n; /* weight k counts gradients of worker k + 1, weight p - 1 + r those of round r */
    float *w[BACKUP_MAX + 1], *g[BACKUP_MAX + 1], *room;
    double seconds[BACKUP_MAX + 1][BACKUP_ROUNDS];
    char   what[96];
} backup_run;
static backup_run backup;

/* A worker: its gradient is 1 at its own weight and at the round's, so that with lr 1 the round's weight is -1 when
   exactly wait_for gradients of that round have been used. */
static hpml_status backup_worker(hpml_comm *c, int me)
{
    const size_t bytes = (size_t)(backup.n + 1) * sizeof(float);
    float       *w = backup.w[me], *g = backup.g[me];
    for (int r = 0; r < backup.rounds; r++) {
        hpml_status status = hpml_recv(c, 0, 0, w, bytes);
        if (status != HPML_OK) return status;
        if (w[0] != (float)r)
            grade_fail("%s: worker %d gets weights of round %g, and the next one is %d: send each round to all "
                       "workers, also to late ones", backup.what, me, w[0], r);
        for (int q = 0; q < backup.rounds; q++) {
            const float used = -w[backup.p + q] * (float)backup.wait_for;
            if (fabsf(used - (float)(q < r ? backup.wait_for : 0)) > 1e-3f)
                grade_fail("%s: when round %d begins, %g gradients of round %d are in the weights, expected %d: "
                           "exactly wait_for of each round; late ones are received and dropped", backup.what, r, used,
                           q, q < r ? backup.wait_for : 0);
        }
        hpml_comm_compute(c, backup.seconds[me][r]);
        memset(g, 0, bytes);
        g[0] = (float)r;
        g[me] = g[backup.p + r] = 1;
        status = hpml_send(c, 0, 0, g, bytes);
        if (status != HPML_OK) return status;
    }
    return HPML_OK;
}

static hpml_status backup_rank(hpml_comm *c, void *user)
{
    const int r = hpml_comm_rank(c);
    (void)user;
    if (r == 0) return serve(c, backup.w[0], backup.n, backup.rounds, backup.wait_for, 1, backup.room);
    return backup_worker(c, r);
}

/* When round `round` begins, by the rule: when the first wait_for gradients of the round before have come. */
static double backup_right_start(int round)
{
    double end[BACKUP_MAX + 1] = { 0 }, sorted[BACKUP_MAX], start = 0;
    for (int r = 0; r < round; r++) {
        for (int k = 1; k < backup.p; k++) {
            end[k]        = fmax(end[k], start) + backup.seconds[k][r];
            sorted[k - 1] = end[k];
        }
        qsort(sorted, (size_t)(backup.p - 1), sizeof *sorted, backup_compare);
        start = sorted[backup.wait_for - 1];
    }
    return start;
}

static bool backup_go(int p, int rounds, int wait_for)
{
    const hpml_launch_desc launch = ranks_clock(p, 1e-7, 0);
    backup = (backup_run){ .p = p, .rounds = rounds, .wait_for = wait_for, .n = p - 1 + rounds };
    snprintf(backup.what, sizeof backup.what, "%d workers, %d rounds, waits for %d", p - 1, rounds, wait_for);
    backup.room = grade_floats("room", (p + 2) * (backup.n + 1));
    backup.w[0] = grade_floats("w", backup.n);
    memset(backup.w[0], 0, (size_t)backup.n * sizeof(float));
    for (int r = 1; r < p; r++) {
        backup.w[r] = grade_floats("w of a worker", backup.n + 1);
        backup.g[r] = grade_floats("g of a worker", backup.n + 1);
        for (int k = 0; k < rounds; k++)
            backup.seconds[r][k] = grade_real(1, 1.4) * (grade_int(0, 6) == 0 ? 4 : 1);
    }
    if (!ranks_run(backup.what, &launch, backup_rank, NULL) || grade_text[0]) return false;
    for (int q = 0; q < rounds; q++)
        if (fabsf(backup.w[0][p - 1 + q] + 1) > 1e-3f)
            return grade_fail("%s: in the end %g gradients of round %d are in the weights", backup.what,
                              -backup.w[0][p - 1 + q] * (float)wait_for, q);
    return true;
}

static bool waits_for_all(void)
{
    for (int p = 2; p <= BACKUP_MAX + 1; p++)
        if (!backup_go(p, 4, p - 1)) return false;
    return true;
}

static bool drops_late_ones(void)
{
    for (int p = 3; p <= BACKUP_MAX + 1; p++)
        for (int m = 1; m < p - 1; m += 2)
            if (!backup_go(p, BACKUP_ROUNDS, m)) return false;
    return true;
}

static bool begins_in_time(void)
{
    for (int m = 1; m <= 6; m++) {
        double begins = 0;
        if (!backup_go(7, BACKUP_ROUNDS, m)) return false;
        for (int64_t i = 0; i < ranks_log.count; i++)
            if (ranks_records[i].from == 0 && ranks_records[i].to == 1) begins = fmax(begins, ranks_records[i].start);
        const double right = backup_right_start(BACKUP_ROUNDS - 1);
        if (begins > 1.001 * right)
            return grade_fail("%s: the last round begins after %.2f s, and the first %d gradients of each round are "
                              "there after %.2f: take them from any workers, as they come (hpml_wait_any)", backup.what,
                              begins, m, right);
    }
    return true;
}

static bool nothing_left(void)
{
    if (!backup_go(6, 10, 3)) return false;
    const int64_t got = rank_reports[0].count.received_messages;
    if (got != 50)
        return grade_fail("%s: the server has received %lld messages of 50: those that are on their way when the last "
                          "round is over have to be received as well, or the next user of this tag gets them",
                          backup.what, (long long)got);
    return true;
}

static const grade_case cases[] = {
    { "how many gradients to wait for", 30, how_many },
    { "waits for all", 15, waits_for_all },
    { "drops late gradients", 25, drops_late_ones },
    { "begins the next round in time", 20, begins_in_time },
    { "leaves no message behind", 10, nothing_left },
};
int main(int argc, char **argv) { return GRADE("21 backup workers", cases); }
