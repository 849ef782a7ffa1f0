/* Exercise 10: checks that gradients are added up in buckets, while the backward pass computes the next ones. */
#include "../ranks.h"

enum { LAYERS = 12, STEPS = 3, JOBS_MAX = 64 };

typedef struct sum_job sum_job;

/* One for each rank. The gradients of all layers are one array; those of layer l are its elements begin[l] to
   begin[l + 1] - 1. The backward pass computes them from the last layer to the first. */
typedef struct overlap {
    hpml_comm *c;
    float     *gradient; /* (begin[LAYERS]) */
    int64_t    begin[LAYERS + 1];
    int64_t    bucket;   /* a sum starts as soon as it has this many floats or more */
    /* Yours, 0 before the first step: */
    int64_t    end;      /* gradients from here on have been given to sums */
    sum_job   *job[JOBS_MAX];
    int        jobs;
} overlap;

/* Starts to add up x, n floats, over all ranks, in the background; all ranks have to start the same sums in the same
   order. wait_sum returns when the sum is complete; call it once for each job. */
sum_job    *start_sum(hpml_comm *c, float *x, int64_t n);
hpml_status wait_sum(hpml_comm *c, sum_job *job);

/* The backward pass begins. */
void overlap_begin(overlap *o);
/* The gradients of this layer are there; LAYERS - 1 comes first. May start a sum; does not wait. */
void gradient_ready(overlap *o, int layer);
/* The backward pass is over. Returns when all gradients are sums. */
hpml_status overlap_finish(overlap *o);

typedef struct sum_start { /* a call of start_sum */
    int64_t at, n;
    double  time;
} sum_start;

struct sum_job {
    hpml_job *job;
    int       waits;
};

typedef struct step_log { /* what a rank has done in one step */
    double    ready[LAYERS], called[LAYERS]; /* when gradients were there; how long gradient_ready took */
    sum_start start[2 * LAYERS];
    sum_job   job[2 * LAYERS];
    int       starts;
    double    begin, end;
} step_log;

typedef struct overlap_run {
    int      p, steps, step[RANKS_MAX], computed[RANKS_MAX]; /* computed: first layer whose gradients are there */
    overlap  o[RANKS_MAX];
    double   seconds[LAYERS]; /* of each layer's backward pass */
    step_log log[RANKS_MAX][STEPS];
    float   *sum;
    char     what[128];
} overlap_run;
static overlap_run run;

static __attribute__((noreturn)) void run_wrong(void) { grade_exit(GRADE_WRONG); }

sum_job *start_sum(hpml_comm *c, float *x, int64_t n)
{
    const int                 r     = hpml_comm_rank(c);
    const overlap            *o     = &run.o[r];
    step_log                 *l     = &run.log[r][run.step[r]];
    const int64_t             at    = x - o->gradient, all = o->begin[LAYERS];
    const hpml_allreduce_desc ring  = { .algorithm = HPML_RING };
    if (n < 1 || at < 0 || at + n > all) {
        grade_fail("%s: start_sum of elements %lld to %lld, of %lld in all", run.what, (long long)at,
                   (long long)(at + n - 1), (long long)all);
        run_wrong();
    }
    if (at < o->begin[run.computed[r]]) {
        grade_fail("%s: a sum of elements from %lld on starts, and the gradients before element %lld have not been "
                   "computed yet", run.what, (long long)at, (long long)o->begin[run.computed[r]]);
        run_wrong();
    }
    if (l->starts == 2 * LAYERS) {
        grade_fail("%s: more than %d sums in a step", run.what, 2 * LAYERS);
        run_wrong();
    }
    sum_job *job           = &l->job[l->starts];
    l->start[l->starts++]  = (sum_start){ at, n, hpml_comm_now(c) };
    *job                   = (sum_job){ hpml_iallreduce(c, x, n, &ring), 0 };
    return job;
}

hpml_status wait_sum(hpml_comm *c, sum_job *job)
{
    if (!job || job->waits++ > 0) {
        grade_fail("%s: wait_sum is called %s", run.what, job ? "twice for one job" : "with NULL");
        run_wrong();
    }
    const hpml_status s = hpml_job_wait(job->job);
    return s != HPML_OK ? s : hpml_ctx_status(hpml_comm_ctx(c));
}

static hpml_status overlap_step(hpml_comm *c, overlap *o, step_log *l)
{
    const int r = hpml_comm_rank(c);
    l->begin    = hpml_comm_now(c);
    overlap_begin(o);
    for (int layer = LAYERS - 1; layer >= 0; layer--) {
        hpml_comm_compute(c, run.seconds[layer]);
        for (int64_t i = o->begin[layer]; i < o->begin[layer + 1]; i++) o->gradient[i] = (float)((i * 7 + r * 3) % 50);
        run.computed[r]  = layer;
        l->ready[layer]  = hpml_comm_now(c);
        gradient_ready(o, layer);
        l->called[layer] = hpml_comm_now(c) - l->ready[layer];
    }
    const hpml_status s = overlap_finish(o);
    l->end              = hpml_comm_now(c);
    return s;
}

static hpml_status overlap_rank(hpml_comm *c, void *user)
{
    const int                 r    = hpml_comm_rank(c);
    overlap                  *o    = &run.o[r];
    const hpml_allreduce_desc ring = { .algorithm = HPML_RING };
    float                     one  = 0;
    hpml_status               s    = hpml_job_wait(hpml_iallreduce(c, &one, 1, &ring)); /* makes the second thread */
    (void)user;
    o->c = c;
    for (run.step[r] = 0; run.step[r] < run.steps && s == HPML_OK; run.step[r]++) {
        run.computed[r] = LAYERS;
        s               = overlap_step(c, o, &run.log[r][run.step[r]]);
        for (int64_t i = 0; i < o->begin[LAYERS] && s == HPML_OK; i++) {
            float sum = 0;
            for (int other = 0; other < run.p; other++) sum += (float)((i * 7 + other * 3) % 50);
            if (o->gradient[i] == sum) continue;
            const bool own = o->gradient[i] == (float)((i * 7 + r * 3) % 50);
            return grade_fail("%s, step %d: element %lld of %lld is %g and should be %g%s", run.what, run.step[r],
                              (long long)i, (long long)o->begin[LAYERS], o->gradient[i], sum,
                              own ? ": it was in no sum; the last bucket starts in overlap_finish, however small it is"
                                  : ": was its sum complete, or has it been added up twice?"),
                   HPML_ERR_STATE;
        }
    }
    return s;
}

/* Layers of random sizes and times; 125 MB/s, 20 us. Runs the steps. */
static bool overlap_go(int p, int64_t bucket, int steps)
{
    hpml_launch_desc launch = ranks_clock(p, 20e-6, 125e6);
    overlap          first  = { .bucket = bucket };
    memset(&run, 0, sizeof run);
    run.p     = p;
    run.steps = steps;
    for (int l = 0; l < LAYERS; l++) {
        first.begin[l + 1] = first.begin[l] + grade_int(50, 900) * 8;
        run.seconds[l]     = grade_real(0.2e-3, 0.6e-3);
    }
    snprintf(run.what, sizeof run.what, "%d ranks, %d layers, %lld gradients, buckets of %lld", p, LAYERS,
             (long long)first.begin[LAYERS], (long long)bucket);
    for (int r = 0; r < p; r++) {
        run.o[r]          = first;
        run.o[r].gradient = grade_floats("gradient", first.begin[LAYERS]);
    }
    launch.only_messages = false;
    return ranks_run(run.what, &launch, overlap_rank, NULL) && !grade_text[0];
}

static bool sums(void)
{
    for (int p = 1; p <= 5; p++)
        if (!overlap_go(p, grade_int(1000, 15000), 1)) return false;
    return overlap_go(3, 1, 1) && overlap_go(3, 1000000, 1);
}

static bool repeated(void)
{
    for (int p = 2; p <= 4; p++) {
        if (!overlap_go(p, grade_int(1000, 15000), STEPS)) return false;
        for (int step = 0; step < STEPS; step++)
            for (int i = 0; i < run.log[0][step].starts; i++)
                if (run.log[0][step].job[i].waits == 0)
                    return grade_fail("%s, step %d: sum %d of %d has never been waited for", run.what, step, i + 1,
                                      run.log[0][step].starts);
    }
    return true;
}

/* The buckets: layers from the last on, until they have run.o->bucket floats. */
static int expected_buckets(sum_start *b)
{
    const overlap *o     = &run.o[0];
    int            count = 0;
    int64_t        end   = o->begin[LAYERS];
    for (int l = LAYERS - 1; l >= 0; l--) {
        if (end - o->begin[l] < o->bucket && l > 0) continue;
        b[count++] = (sum_start){ o->begin[l], end - o->begin[l], run.log[0][0].ready[l] };
        end        = o->begin[l];
    }
    return count;
}

static bool right_buckets(const step_log *l, const sum_start *expected, int count)
{
    for (int i = 0; i < count && i < l->starts; i++)
        if (l->start[i].at != expected[i].at || l->start[i].n != expected[i].n)
            return grade_fail("%s: sum %d is of elements %lld to %lld and should be of %lld to %lld: whole layers, "
                              "until there are %lld floats or more", run.what, i, (long long)l->start[i].at,
                              (long long)(l->start[i].at + l->start[i].n - 1), (long long)expected[i].at,
                              (long long)(expected[i].at + expected[i].n - 1), (long long)run.o[0].bucket);
    if (l->starts != count)
        return grade_fail("%s: %d sums in a step, and %d are expected", run.what, l->starts, count);
    return true;
}

static bool right_times(const step_log *l, const sum_start *expected, int count)
{
    for (int i = 0; i < count && i < l->starts; i++)
        if (l->start[i].time > expected[i].time + 1e-6)
            return grade_fail("%s: sum %d starts at %.3f ms, and its gradients were ready at %.3f ms", run.what, i,
                              1e3 * l->start[i].time, 1e3 * expected[i].time);
    return true;
}

/* Checks the sums of the first step of some runs on two ranks. */
static bool each_run(bool (*is_right)(const step_log *l, const sum_start *expected, int count))
{
    for (int k = 0; k < 8; k++) {
        sum_start expected[LAYERS];
        if (!overlap_go(2, grade_int(1000, 15000), 1)) return false;
        if (!is_right(&run.log[0][0], expected, expected_buckets(expected))) return false;
    }
    return true;
}
static bool buckets(void) { return each_run(right_buckets); }
static bool at_once(void) { return each_run(right_times); }

static bool no_wait(void)
{
    for (int k = 0; k < 8; k++) {
        const step_log *l = &run.log[0][0];
        if (!overlap_go(4, grade_int(1000, 15000), 1)) return false;
        for (int layer = LAYERS - 1; layer >= 0; layer--)
            if (l->called[layer] > 1e-6)
                return grade_fail("%s: gradient_ready takes %.3f ms for layer %d: meanwhile the backward pass stands "
                                  "still; wait in overlap_finish", run.what, 1e3 * l->called[layer], layer);
    }
    return true;
}

/* A step takes as long as the last sum ends, where each begins when its gradients and the network are ready. */
static bool step_time(void)
{
    for (int p = 2; p <= 8; p *= 2) {
        sum_start expected[LAYERS];
        double    end = 0;
        if (!overlap_go(p, grade_int(2000, 9000), 1)) return false;
        const step_log *l     = &run.log[0][0];
        const int       count = expected_buckets(expected);
        for (int i = 0; i < count; i++)
            end = fmax(end, expected[i].time - l->begin) +
                  2 * (p - 1) * (20e-6 + 4.0 * (double)expected[i].n / p / 125e6);
        if (l->end - l->begin > 1.05 * end)
            return grade_fail("%s: a step takes %.3f ms; if communication overlaps computation, it takes %.3f ms",
                              run.what, 1e3 * (l->end - l->begin), 1e3 * end);
    }
    return true;
}

static const grade_case cases[] = {
    { "all gradients are sums", 25, sums },
    { "several steps, each job waited for", 15, repeated },
    { "the buckets", 20, buckets },
    { "sums start as soon as they can", 15, at_once },
    { "the backward pass never waits", 15, no_wait },
    { "time of a step", 10, step_time },
};
int main(int argc, char **argv)
{
    ranks_deadlock = "all ranks have to start the same sums in the same order";
    return GRADE("10 buckets and overlap", cases);
}
