/* Exercise 24: checks the scheduler of a cluster: on which nodes a job runs, and which waiting job starts next. */
#include "../grade.h"

/* Sets take[i] to how many GPUs a job of `gpus` GPUs gets from node i, of which free[i] are free. Returns false, with
   all take[i] 0, if the cluster has not enough. Uses as few nodes as possible: as long as the rest of the job fits into
   no node, takes all free GPUs of the node that has most; then the node in which the rest leaves the fewest free (best
   fit). Of equal nodes the one with the lower number. */
bool sched_place(int gpus, const int *free, int nodes, int *take);

typedef struct sched_job {
    int    gpus;
    double seconds; /* that it runs, as its owner has declared */
} sched_job;
typedef struct sched_running {
    int    gpus;
    double end; /* seconds from now until it ends */
} sched_running;
/* Returns the number of the job that starts now, of the waiting jobs queue[0] (has waited longest) to queue[count - 1];
   -1: none. Nodes do not matter here: a job fits if as many GPUs are free. If queue[0] fits, it starts. If not, its
   start is promised for the time T at which enough of the running jobs will have ended, and `spare` GPUs will then be
   free besides its own. Meanwhile the first job of the queue starts that fits now and does not break the promise: it
   ends by T, or it needs no more than `spare` GPUs. (Backfilling, as in EASY and in Slurm.) */
int sched_next(const sched_job *queue, int count, const sched_running *running, int running_count, int free);

enum { SCHED_NODES = 8, SCHED_JOBS = 60, SCHED_GPUS = 16 };

/* ---- where ---- */

static void sched_right_place(int gpus, const int *available, int nodes, int *take)
{
    int left[SCHED_NODES];
    memcpy(left, available, (size_t)nodes * sizeof *left);
    memset(take, 0, (size_t)nodes * sizeof *take);
    while (gpus > 0) {
        int best = -1, most = 0;
        for (int i = 0; i < nodes; i++) {
            if (left[i] > left[most]) most = i;
            if (left[i] >= gpus && (best < 0 || left[i] < left[best])) best = i;
        }
        if (best < 0) best = most;
        const int taken = left[best] < gpus ? left[best] : gpus;
        take[best] += taken;
        left[best] -= taken;
        gpus -= taken;
    }
}

static const char *sched_list(const int *x, int n)
{
    static char text[4][64];
    static int  turn;
    char       *t = text[turn++ % 4];
    int         used = 0;
    t[0] = 0;
    for (int i = 0; i < n; i++) used += snprintf(t + used, 64 - (size_t)used, "%s%d", i ? " " : "", x[i]);
    return t;
}

/* Asks for a place and compares it with the rule; not `exact`: only the number of nodes. */
static bool sched_place_is_right(int gpus, const int *available, int nodes, bool exact)
{
    int  take[SCHED_NODES + 1], right[SCHED_NODES], total = 0, taken = 0, used = 0, least = 0;
    bool placed;
    for (int i = 0; i <= nodes; i++) take[i] = -7;
    for (int i = 0; i < nodes; i++) total += available[i];
    placed = sched_place(gpus, available, nodes, take);
    if (take[nodes] != -7) return grade_fail("take[%d] was written, and there are %d nodes", nodes, nodes);
    if (placed != (total >= gpus))
        return grade_fail("%d GPUs on nodes with %s free: %s", gpus, sched_list(available, nodes),
                          placed ? "there are not enough, return false" : "there are enough, if the job is divided");
    for (int i = 0; i < nodes; i++) {
        if (take[i] < 0 || take[i] > available[i] || (!placed && take[i] != 0))
            return grade_fail("%d GPUs on nodes with %s free: takes %s, on node %d from 0 to %d were expected", gpus,
                              sched_list(available, nodes), sched_list(take, nodes), i, placed ? available[i] : 0);
        taken += take[i];
        used += take[i] > 0;
    }
    if (!placed) return true;
    sched_right_place(gpus, available, nodes, right);
    for (int i = 0; i < nodes; i++) least += right[i] > 0;
    if (taken != gpus)
        return grade_fail("%d GPUs on nodes with %s free: takes %s, %d in all", gpus, sched_list(available, nodes),
                          sched_list(take, nodes), taken);
    if (used > least)
        return grade_fail("%d GPUs on nodes with %s free: takes %s, of %d nodes, and %d are enough: messages between "
                          "nodes are slow; take all of the node that has most", gpus, sched_list(available, nodes),
                          sched_list(take, nodes), used, least);
    if (exact && memcmp(take, right, (size_t)nodes * sizeof *take))
        return grade_fail("%d GPUs on nodes with %s free: takes %s, expected %s: the last piece goes where it leaves "
                          "the fewest free, so that large jobs find whole nodes; of equal nodes the first", gpus,
                          sched_list(available, nodes), sched_list(take, nodes), sched_list(right, nodes));
    return true;
}

static bool one_node(void)
{
    for (int k = 0; k < 300; k++) {
        int available[SCHED_NODES], nodes = grade_int(1, SCHED_NODES), most = 0;
        for (int i = 0; i < nodes; i++) available[i] = grade_int(0, 8);
        for (int i = 0; i < nodes; i++) most = available[i] > most ? available[i] : most;
        if (most > 0 && !sched_place_is_right(grade_int(1, most), available, nodes, k >= 150)) return false;
    }
    return true;
}

static bool many_nodes(void)
{
    for (int k = 0; k < 300; k++) {
        int available[SCHED_NODES], nodes = grade_int(1, SCHED_NODES);
        for (int i = 0; i < nodes; i++) available[i] = grade_int(0, 8);
        if (!sched_place_is_right(grade_int(1, 8 * nodes), available, nodes, k >= 150)) return false;
    }
    return true;
}

/* ---- when ---- */

/* The time T of the promise to queue[0], which does not fit, and the GPUs that are spare then. */
static double sched_promise(int gpus, const sched_running *running, int count, int available, int *spare)
{
    double time = 0, last = -1;
    while (available < gpus) {
        time = 1e300;
        for (int i = 0; i < count; i++)
            if (running[i].end > last && running[i].end < time) time = running[i].end;
        for (int i = 0; i < count; i++)
            if (running[i].end == time) available += running[i].gpus;
        last = time;
    }
    *spare = available - gpus;
    return time;
}

static int sched_right_next(const sched_job *queue, int count, const sched_running *running, int n, int available)
{
    int spare = 0;
    if (count == 0) return -1;
    if (queue[0].gpus <= available) return 0;
    const double promise = sched_promise(queue[0].gpus, running, n, available, &spare);
    for (int i = 1; i < count; i++)
        if (queue[i].gpus <= available && (queue[i].seconds <= promise || queue[i].gpus <= spare)) return i;
    return -1;
}

/* Says what is wrong with starting job `got` where `right` is right. */
static bool sched_explain(int got, int right, const sched_job *queue, int count, const sched_running *running, int n,
                          int available)
{
    int          spare   = 0;
    const double promise = sched_promise(queue[0].gpus, running, n, available, &spare);
    char         what[160];
    snprintf(what, sizeof what, "%d GPUs are free, %d jobs run, %d wait, the first for %d GPUs", available, n, count,
             queue[0].gpus);
    if (got < -1 || got >= count) return grade_fail("%s: there is no job %d", what, got);
    if (got >= 0 && queue[got].gpus > available)
        return grade_fail("%s: job %d needs %d GPUs", what, got, queue[got].gpus);
    if (right == 0) return grade_fail("%s, which fits: it starts first, not job %d", what, got);
    if (got < 0)
        return grade_fail("%s, promised for %.1f s from now with %d to spare: job %d (%d GPUs, %.1f s) could run until "
                          "then%s", what, promise, spare, right, queue[right].gpus, queue[right].seconds,
                          queue[right].seconds > promise ? ", and on, beside the first job" : "");
    if (right < 0 || got < right)
        return grade_fail("%s, promised for %.1f s from now with %d to spare: job %d (%d GPUs, %.1f s) would delay it; "
                          "a stream of small jobs could keep a large one waiting for ever", what, promise, spare, got,
                          queue[got].gpus, queue[got].seconds);
    return grade_fail("%s, promised for %.1f s from now with %d to spare: job %d has waited longer than job %d and may "
                      "start as well", what, promise, spare, right, got);
}

/* Plays a queue of random jobs to its end, and compares each decision with the rule. */
static bool sched_play(int jobs)
{
    sched_job     queue[SCHED_JOBS];
    sched_running running[SCHED_JOBS] = { { 0, 0 } };
    int           count = jobs, n = 0, available = SCHED_GPUS;
    for (int i = 0; i < jobs; i++) {
        queue[i].gpus    = grade_int(0, 3) == 0 ? grade_int(SCHED_GPUS / 2, SCHED_GPUS) : grade_int(1, 4);
        queue[i].seconds = grade_real(1, 20);
    }
    while (count > 0 || n > 0) {
        const int right = sched_right_next(queue, count, running, n, available);
        const int got   = count > 0 ? sched_next(queue, count, running, n, available) : -1;
        if (got != right) return sched_explain(got, right, queue, count, running, n, available);
        if (got >= 0) {
            available -= queue[got].gpus;
            running[n++] = (sched_running){ queue[got].gpus, queue[got].seconds };
            count--;
            memmove(queue + got, queue + got + 1, (size_t)(count - got) * sizeof *queue);
            continue;
        }
        int first = 0; /* the next event: a job ends */
        for (int i = 1; i < n; i++)
            if (running[i].end < running[first].end) first = i;
        const double passed = running[first].end;
        available += running[first].gpus;
        running[first] = running[--n];
        for (int i = 0; i < n; i++) running[i].end -= passed;
    }
    return true;
}

static bool first_fits(void)
{
    for (int k = 0; k < 100; k++) {
        sched_job queue[4];
        for (int i = 0; i < 4; i++) queue[i] = (sched_job){ grade_int(1, 8), grade_real(1, 9) };
        const int got = sched_next(queue, 4, NULL, 0, 8);
        if (got != 0) return sched_explain(got, 0, queue, 4, NULL, 0, 8);
    }
    return sched_next(NULL, 0, NULL, 0, 8) == -1 || grade_fail("no job waits: return -1");
}

static bool promises(void)
{
    for (int k = 0; k < 40; k++)
        if (!sched_play(grade_int(5, SCHED_JOBS))) return false;
    return true;
}

static bool spare_gpus(void)
{
    for (int k = 0; k < 200; k++) { /* 10 of 16 run for 5 s; the first job needs 12, so 4 are spare after 5 s */
        const int           small = grade_int(1, 6);
        const sched_running running[1] = { { 10, 5 } };
        const sched_job     queue[3] = { { 12, 9 }, { small, grade_real(6, 90) }, { 2, grade_real(1, 4) } };
        const int           right = small <= 4 ? 1 : 2, got = sched_next(queue, 3, running, 1, 6);
        if (got != right) return sched_explain(got, right, queue, 3, running, 1, 6);
    }
    return true;
}

static const grade_case cases[] = {
    { "jobs that fit into one node", 20, one_node },
    { "jobs of several nodes", 20, many_nodes },
    { "the first job fits", 10, first_fits },
    { "spare GPUs", 20, spare_gpus },
    { "a queue of jobs, to its end", 30, promises },
};
int main(int argc, char **argv) { return GRADE("24 scheduler of a cluster", cases); }
