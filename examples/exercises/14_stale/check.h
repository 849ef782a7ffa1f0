/* Exercise 14: checks the server of a stale synchronous training: which steps workers may begin, and when they do. */
#include "../ranks.h"

/* Rank 0. Ranks 1 to p - 1 are workers (in this file): each receives the weights w, n floats, from rank 0, computes a
   gradient, sends it to rank 0, and so on, `steps` times. The server applies each gradient when it comes: w -= lr * g.
   It sends w to a worker as soon as, and not before, the worker may begin its next step: when it is at most `bound`
   steps ahead of the slowest worker, that is (steps that the worker has finished) - (steps that the slowest one has
   finished) <= bound. A worker that has finished all steps gets nothing more. room: memory for p arrays of n floats. */
hpml_status serve(hpml_comm *c, float *w, int64_t n, int steps, int bound, float lr, float *room);

enum { STALE_MAX = 8, STALE_STEPS = 24 };

typedef struct stale_run {
    int    p, steps, bound;
    float *w[STALE_MAX + 1], *g[STALE_MAX + 1], *room; /* n is p: weight k counts the steps of worker k, downwards */
    double seconds[STALE_MAX + 1][STALE_STEPS];        /* that worker k computes step s */
    char   what[96];
} stale_run;
static stale_run stale;

/* A worker: its gradient is 1 at its own weight and 0 elsewhere, so that with lr 1 weight k is minus the number of
   steps that worker k has finished. */
static hpml_status stale_worker(hpml_comm *c, int me)
{
    const size_t bytes = (size_t)stale.p * sizeof(float);
    float       *w = stale.w[me], *g = stale.g[me];
    for (int s = 0; s < stale.steps; s++) {
        hpml_status status = hpml_recv(c, 0, 0, w, bytes);
        if (status != HPML_OK) return status;
        for (int k = 1; k < stale.p; k++)
            if (-w[k] < (float)(s - stale.bound))
                grade_fail("%s: worker %d begins its step %d (from 0) when worker %d has finished %g; a worker that "
                           "has finished %d steps waits for all to have finished %d", stale.what, me, s, k, -w[k], s,
                           s - stale.bound);
        if (-w[me] != (float)s)
            grade_fail("%s: worker %d has sent %d gradients, and gets weights with %g of them: w -= lr * g first, then "
                       "answer", stale.what, me, s, -w[me]);
        hpml_comm_compute(c, stale.seconds[me][s]);
        memset(g, 0, bytes);
        g[me]  = 1;
        status = hpml_send(c, 0, 0, g, bytes);
        if (status != HPML_OK) return status;
    }
    return HPML_OK;
}

static hpml_status stale_rank(hpml_comm *c, void *user)
{
    const int r = hpml_comm_rank(c);
    (void)user;
    if (r == 0) return serve(c, stale.w[0], stale.p, stale.steps, stale.bound, 1, stale.room);
    return stale_worker(c, r);
}

/* Seconds of the whole training: step s of a worker begins when it has finished step s - 1, and all step
   s - 1 - bound. */
static double stale_right_time(void)
{
    double end[STALE_MAX + 1][STALE_STEPS], last = 0;
    for (int s = 0; s < stale.steps; s++)
        for (int k = 1; k < stale.p; k++) {
            double start = s > 0 ? end[k][s - 1] : 0;
            for (int j = 1; j < stale.p && s > stale.bound; j++) start = fmax(start, end[j][s - 1 - stale.bound]);
            end[k][s] = start + stale.seconds[k][s];
            last      = fmax(last, end[k][s]);
        }
    return last;
}

static bool stale_go(int p, int steps, int bound)
{
    const hpml_launch_desc launch = ranks_clock(p, 1e-7, 0);
    stale = (stale_run){ .p = p, .steps = steps, .bound = bound };
    snprintf(stale.what, sizeof stale.what, "%d workers, %d steps, bound %d", p - 1, steps, bound);
    ranks_deadlock = "a worker that had to wait is answered when the slowest worker has moved on, so with each "
                     "gradient look at all workers that wait, not only at its sender";
    stale.room = grade_floats("room", p * p);
    for (int r = 0; r < p; r++) {
        stale.w[r] = grade_floats("w", p);
        stale.g[r] = grade_floats("g", p);
        for (int s = 0; s < steps; s++) /* now and then a step takes five times as long */
            stale.seconds[r][s] = grade_real(1, 1.5) * (grade_int(0, 5) == 0 ? 5 : 1);
    }
    memset(stale.w[0], 0, (size_t)p * sizeof(float));
    if (!ranks_run(stale.what, &launch, stale_rank, NULL)) return false;
    for (int k = 1; k < p && !grade_text[0]; k++)
        if (stale.w[0][k] != (float)-steps)
            return grade_fail("%s: in the end w has %g gradients of worker %d, which has sent %d", stale.what,
                              -stale.w[0][k], k, steps);
    return !grade_text[0];
}

static bool no_bound(void)
{
    for (int p = 2; p <= STALE_MAX; p++)
        if (!stale_go(p, 8, 100)) return false;
    return true;
}

static bool lockstep(void)
{
    for (int p = 2; p <= STALE_MAX; p++)
        if (!stale_go(p, 8, 0)) return false;
    return true;
}

static bool any_bound(void)
{
    for (int p = 3; p <= STALE_MAX; p++)
        for (int bound = 1; bound <= 4; bound++)
            if (!stale_go(p, STALE_STEPS, bound)) return false;
    return true;
}

static bool never_in_vain(void)
{
    for (int bound = 0; bound <= 4; bound++) {
        if (!stale_go(6, STALE_STEPS, bound)) return false;
        if (ranks_end(6) > 1.001 * stale_right_time())
            return grade_fail("%s: %.1f s of virtual time, and %.1f are enough: a worker that may begin its next step "
                              "gets the weights at once; exactly `bound` steps ahead is allowed", stale.what,
                              ranks_end(6), stale_right_time());
    }
    return true;
}

static bool one_answer(void)
{
    if (!stale_go(5, 10, 2)) return false;
    for (int r = 1; r < 5; r++)
        if (rank_reports[0].messages_to[r] != 10)
            return grade_fail("%s: worker %d gets %lld messages; the weights once for each step are 10", stale.what, r,
                              (long long)rank_reports[0].messages_to[r]);
    return true;
}

static const grade_case cases[] = {
    { "no bound: asynchronous", 20, no_bound },
    { "bound 0: all in step", 20, lockstep },
    { "no worker is further ahead than the bound", 25, any_bound },
    { "no worker waits in vain", 25, never_in_vain },
    { "one answer for each gradient", 10, one_answer },
};
int main(int argc, char **argv) { return GRADE("14 stale synchronous parallel", cases); }
