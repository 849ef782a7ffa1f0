/* For exercises whose ranks exchange messages, beside grade.h: runs a function on all ranks, in virtual time or as
   threads, and keeps what each rank has sent and when it was ready. Collectives are refused, unless .only_messages is
   set to false. The option --draw FILE.svg draws the first run of at least 4 ranks. */
#ifndef RANKS_H
#define RANKS_H

#define HPML_IMPLEMENTATION
#include "../../hpml_comm.h"
#include "../spacetime.h"
#include "grade.h"

enum { RANKS_MAX = 64, RANKS_RECORDS = 1 << 16, RANKS_SECONDS = 240 };

typedef struct rank_report {
    hpml_counters count;
    int64_t       messages_to[RANKS_MAX], bytes_to[RANKS_MAX]; /* to each rank */
    double        end;                                         /* seconds, virtual in virtual time */
} rank_report;
static rank_report         rank_reports[RANKS_MAX]; /* of the last run, as are the next two */
static hpml_message_record ranks_records[RANKS_RECORDS];
static hpml_message_log    ranks_log;

/* What to do about a deadlock; an exercise may say something else. */
static const char *ranks_deadlock = "a send may wait for its receive: use hpml_sendrecv, or hpml_irecv before the send";

/* Each rank on a node of its own. In virtual time: a message of b bytes takes latency + b / bandwidth seconds
   (bandwidth 0: latency). As threads: a send of more than 256 bytes waits for its receive. */
static __attribute__((unused)) hpml_launch_desc ranks_clock(int ranks, double latency, double bandwidth)
{
    return (hpml_launch_desc){ .transport = HPML_TRANSPORT_CLOCK, .ranks = ranks, .ctx.threads = 1,
                               .only_messages = true, .time_limit = RANKS_SECONDS,
                               .network = { .ranks_per_node = 1, .between = { latency, bandwidth } } };
}
static __attribute__((unused)) hpml_launch_desc ranks_threads(int ranks)
{
    return (hpml_launch_desc){ .transport = HPML_TRANSPORT_THREADS, .ranks = ranks, .ctx.threads = 1,
                               .only_messages = true, .time_limit = RANKS_SECONDS };
}

typedef struct ranks_job {
    hpml_rank_fn *fn;
    void         *user;
} ranks_job;

static hpml_status ranks_main(hpml_comm *c, void *user)
{
    const ranks_job  *job    = (const ranks_job *)user;
    const hpml_status status = job->fn(c, job->user);
    rank_reports[hpml_comm_rank(c)].end = hpml_comm_now(c);
    return status;
}

static void ranks_draw(const char *what)
{
    spacetime_text(stdout, &ranks_log, 100);
    if (spacetime_svg(grade_draw, what, &ranks_log)) perror(grade_draw);
    grade_draw = NULL;
}

/* Runs fn on all ranks. False: a rank has failed, or called a collective; grade_fail has been called with `what`, the
   sizes of this run. */
static bool ranks_run(const char *what, const hpml_launch_desc *desc, hpml_rank_fn *fn, void *user)
{
    hpml_counters    counters[RANKS_MAX] = { 0 };
    hpml_launch_desc launch = *desc;
    ranks_job        job    = { fn, user };
    char             error[512];
    memset(rank_reports, 0, sizeof rank_reports);
    ranks_log       = (hpml_message_log){ ranks_records, RANKS_RECORDS, 0 };
    launch.log      = &ranks_log;
    launch.counters = counters;
    const hpml_status status = hpml_launch(&launch, ranks_main, &job, error, sizeof error);
    for (int r = 0; r < launch.ranks; r++) rank_reports[r].count = counters[r];
    for (int64_t i = 0; i < ranks_log.count && i < RANKS_RECORDS; i++) {
        const hpml_message_record *m = &ranks_records[i];
        if (m->tag < 0) continue; /* a computation */
        rank_reports[m->from].messages_to[m->to]++;
        rank_reports[m->from].bytes_to[m->to] += m->bytes;
    }
    if (grade_draw && launch.ranks >= 4) ranks_draw(what);
    if (status == HPML_OK)
        return ranks_log.count <= RANKS_RECORDS ||
               grade_fail("%s: %lld messages, many too many", what, (long long)ranks_log.count);
    if (strstr(error, "deadlock")) return grade_fail("%s: %s; %s", what, error, ranks_deadlock);
    return grade_fail("%s: %s", what, error);
}

/* When the last rank was ready. */
static __attribute__((unused)) double ranks_end(int ranks)
{
    double end = 0;
    for (int r = 0; r < ranks; r++)
        if (rank_reports[r].end > end) end = rank_reports[r].end;
    return end;
}

/* The longest chain of messages. */
static __attribute__((unused)) int64_t ranks_depth(int ranks)
{
    int64_t depth = 0;
    for (int r = 0; r < ranks; r++)
        if (rank_reports[r].count.depth > depth) depth = rank_reports[r].count.depth;
    return depth;
}

#endif
