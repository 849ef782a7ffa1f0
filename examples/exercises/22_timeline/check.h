/* Exercise 22: checks what is read from a timeline: how long a rank computes, communicates, and waits. */
#include "../ranks.h"

typedef struct timeline_span {
    int    rank;
    bool   computes;   /* else it communicates */
    double start, end; /* seconds */
} timeline_span;
typedef struct timeline_report {
    double computes;     /* seconds in which at least one computation of the rank runs */
    double communicates; /* in which at least one communication of the rank runs */
    double exposed;      /* in which it communicates and does not compute: what communication costs */
    double idle;         /* in which it does neither, between the first start and the last end of all ranks */
} timeline_report;
/* Reads the report of rank `rank` from the spans of all ranks, s[0] to s[n - 1], which are in any order. Spans of one
   kind may overlap, for example those of several buckets. */
timeline_report timeline_read(const timeline_span *s, int n, int rank);

enum { TIMELINE_MAX = 4000 };
static timeline_span timeline[TIMELINE_MAX];
static int           timeline_count;

static void timeline_add(int rank, bool computes, double start, double end)
{
    if (timeline_count < TIMELINE_MAX) timeline[timeline_count++] = (timeline_span){ rank, computes, start, end };
}

static int timeline_compare(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

/* The report, from the pieces between neighbouring starts and ends. */
static timeline_report timeline_right(int rank)
{
    static double   times[2 * TIMELINE_MAX];
    timeline_report r = { 0, 0, 0, 0 };
    int             count = 0;
    for (int i = 0; i < timeline_count; i++) {
        times[count++] = timeline[i].start;
        times[count++] = timeline[i].end;
    }
    qsort(times, (size_t)count, sizeof *times, timeline_compare);
    for (int k = 0; k + 1 < count; k++) {
        const double middle = 0.5 * (times[k] + times[k + 1]), seconds = times[k + 1] - times[k];
        bool         open[2] = { false, false };
        for (int i = 0; i < timeline_count; i++)
            if (timeline[i].rank == rank && timeline[i].start <= middle && middle < timeline[i].end)
                open[timeline[i].computes] = true;
        r.computes += open[1] ? seconds : 0;
        r.communicates += open[0] ? seconds : 0;
        r.exposed += open[0] && !open[1] ? seconds : 0;
        r.idle += !open[0] && !open[1] ? seconds : 0;
    }
    return r;
}

static bool timeline_is(const char *name, const char *what, int rank, double got, double right, const char *hint)
{
    if (fabs(got - right) <= 1e-9 + 1e-6 * fabs(right)) return true;
    return grade_fail("%s, %d spans: rank %d %s for %.6g s, expected %.6g: %s", name, timeline_count, rank, what, got,
                      right, hint);
}

static bool timeline_check(const char *name, int ranks)
{
    for (int rank = 0; rank < ranks; rank++) {
        const timeline_report right = timeline_right(rank), got = timeline_read(timeline, timeline_count, rank);
        if (!timeline_is(name, "computes", rank, got.computes, right.computes,
                         "each moment counts once, also where spans overlap, and only this rank's spans count") ||
            !timeline_is(name, "communicates", rank, got.communicates, right.communicates,
                         "each moment counts once, also where spans overlap, and only this rank's spans count") ||
            !timeline_is(name, "is exposed", rank, got.exposed, right.exposed,
                         "the moments in which it communicates and does not compute; a difference of sums does not say "
                         "when they were") ||
            !timeline_is(name, "is idle", rank, got.idle, right.idle,
                         "from the first start to the last end of all ranks, because a rank that is ready waits for "
                         "the others"))
            return false;
    }
    return true;
}

/* One rank; no span overlaps another of its kind. */
static bool simple(void)
{
    for (int k = 0; k < 50; k++) {
        double time[2] = { grade_real(0, 5), grade_real(0, 5) };
        timeline_count = 0;
        for (int i = 0; i < 12; i++) {
            const int    kind  = i % 2;
            const double start = time[kind] + grade_real(0, 2);
            time[kind] = start + grade_real(0.1, 3);
            timeline_add(0, kind == 1, start, time[kind]);
        }
        if (!timeline_check("one rank, one span of each kind at a time", 1)) return false;
    }
    return true;
}

static bool overlapping(void)
{
    for (int k = 0; k < 50; k++) {
        timeline_count = 0;
        for (int i = 0; i < 20; i++) {
            const double start = grade_real(0, 20);
            timeline_add(0, grade_int(0, 1), start, start + grade_real(0, 4));
        }
        timeline_add(0, true, timeline[0].end, timeline[0].end + 1); /* touches another one */
        if (!timeline_check("one rank, spans that overlap", 1)) return false;
    }
    return true;
}

static bool many_ranks(void)
{
    for (int k = 0; k < 20; k++) {
        timeline_count = 0;
        for (int i = 0; i < 60; i++) {
            const double start = grade_real(100, 120);
            timeline_add(grade_int(0, 3), grade_int(0, 1), start, start + grade_real(0, 2));
        }
        if (!timeline_check("four ranks, in any order", 4)) return false;
    }
    timeline_count = 0;
    timeline_add(0, true, 1, 3);
    timeline_add(1, true, 2, 9);
    return timeline_check("two ranks, of which one does not communicate", 2);
}

/* ---- a timeline of a training ---- */

enum { TIMELINE_RANKS = 4, TIMELINE_FLOATS = 50000 };
static char timeline_file[64];

/* Four layers, last first: each takes 10 ms of computation; then its gradients are added up in the background. */
static hpml_status timeline_step(hpml_comm *c, void *user)
{
    static float x[TIMELINE_RANKS][4][TIMELINE_FLOATS];
    const bool   overlaps = *(const bool *)user;
    float      (*mine)[TIMELINE_FLOATS] = x[hpml_comm_rank(c)];
    hpml_job    *job[4];
    hpml_job_wait(hpml_iallreduce(c, mine[0], 1, NULL)); /* makes the background, which is not in the timeline */
    hpml_comm_trace_start(c, NULL);
    for (int layer = 0; layer < 4; layer++) {
        hpml_comm_compute(c, 0.010);
        job[layer] = hpml_iallreduce(c, mine[layer], TIMELINE_FLOATS, NULL);
        if (!overlaps) hpml_job_wait(job[layer]);
    }
    for (int layer = 0; layer < 4 && overlaps; layer++) hpml_job_wait(job[layer]);
    return hpml_comm_trace_save(c, timeline_file);
}

/* Reads the spans from a file of hpml_comm_trace_save, Chrome's trace format with one event in a line. */
static void timeline_load(void)
{
    char  line[4096];
    FILE *f = fopen(timeline_file, "r");
    timeline_count = 0;
    while (f && fgets(line, sizeof line, f)) {
        const char *start = strstr(line, "\"ts\":"), *length = strstr(line, "\"dur\":");
        const char *rank = strstr(line, "\"pid\":");
        const bool  computes = strstr(line, "\"name\":\"compute\"") != NULL;
        if (!start || !length || !rank || (!computes && !strstr(line, "\"name\":\"allreduce\""))) continue;
        const double from = 1e-6 * atof(start + 5);
        timeline_add(atoi(rank + 6), computes, from, from + 1e-6 * atof(length + 6));
    }
    if (f) fclose(f);
    remove(timeline_file);
}

static bool training(void)
{
    for (int overlaps = 0; overlaps < 2; overlaps++) {
        bool             user   = overlaps == 1;
        const char      *name   = user ? "a step whose exchange overlaps" : "a step without overlap";
        hpml_launch_desc launch = ranks_clock(TIMELINE_RANKS, 20e-6, 125e6);
        launch.only_messages    = false;
        snprintf(timeline_file, sizeof timeline_file, "/tmp/hpml_exercise_22_%ld.json", (long)getpid());
        if (!ranks_run(name, &launch, timeline_step, &user)) return false;
        timeline_load();
        if (timeline_count != 8 * TIMELINE_RANKS)
            return grade_fail("the checker has read %d spans from %s, and expected %d: please report this",
                              timeline_count, timeline_file, 8 * TIMELINE_RANKS);
        if (!timeline_check(name, TIMELINE_RANKS)) return false;
    }
    return true;
}

static const grade_case cases[] = {
    { "one span of each kind at a time", 25, simple },
    { "spans that overlap", 30, overlapping },
    { "many ranks, in any order", 25, many_ranks },
    { "the timeline of a training", 20, training },
};
int main(int argc, char **argv) { return GRADE("22 reading a timeline", cases); }
