/* For exercises whose ranks exchange messages, beside grade.h: runs a function on all ranks, in virtual time or as
   threads, and keeps what each rank has sent and when it was ready. Collectives are refused. */
#ifndef RANKS_H
#define RANKS_H

#define HPML_IMPLEMENTATION
#include "../../hpml_comm.h"
#include "grade.h"

enum { RANKS_MAX = 64 };

typedef struct rank_report {
    hpml_counters sent;
    int64_t       messages_to[RANKS_MAX], bytes_to[RANKS_MAX]; /* to each rank */
    double        end;                                         /* virtual seconds */
} rank_report;
static rank_report rank_reports[RANKS_MAX]; /* of the last run */

/* Each rank on a node of its own. In virtual time: a message of b bytes takes latency + b / bandwidth seconds. With a
   latency of 1 and bandwidth 0 (none counted) the clock of the last rank shows the longest chain of messages. As
   threads: a send of more than 256 bytes waits for its receive. */
static __attribute__((unused)) hpml_launch_desc ranks_clock(int ranks, double latency, double bandwidth)
{
    return (hpml_launch_desc){ .transport = HPML_TRANSPORT_CLOCK, .ranks = ranks, .ctx.threads = 1,
                               .network = { .ranks_per_node = 1, .between = { latency, bandwidth } } };
}
static __attribute__((unused)) hpml_launch_desc ranks_threads(int ranks)
{
    return (hpml_launch_desc){ .transport = HPML_TRANSPORT_THREADS, .ranks = ranks, .ctx.threads = 1 };
}

typedef struct ranks_job {
    hpml_rank_fn *fn;
    void         *user;
} ranks_job;

static hpml_status ranks_main(hpml_comm *c, void *user)
{
    const ranks_job *job    = (const ranks_job *)user;
    rank_report     *report = &rank_reports[hpml_comm_rank(c)];
    hpml_status      status = job->fn(c, job->user);
    report->end             = hpml_comm_now(c);
    hpml_comm_counters(c, &report->sent);
    for (int r = 0; r < hpml_comm_size(c); r++) {
        report->messages_to[r] = hpml_comm_messages_to(c, r);
        report->bytes_to[r]    = hpml_comm_bytes_to(c, r);
    }
    return status;
}

/* Runs fn on all ranks. False: a rank has failed, or called a collective; grade_fail has been called with `what`, the
   sizes of this run. */
static bool ranks_run(const char *what, const hpml_launch_desc *launch, hpml_rank_fn *fn, void *user)
{
    ranks_job job = { fn, user };
    char      error[512];
    memset(rank_reports, 0, sizeof rank_reports);
    if (hpml_launch(launch, ranks_main, &job, error, sizeof error) != HPML_OK)
        return grade_fail("%s: %s%s", what, error,
                          strstr(error, "deadlock") ? "; a send may wait for its receive: use hpml_sendrecv, or "
                                                      "hpml_irecv before the send" : "");
    for (int r = 0; r < launch->ranks; r++)
        if (rank_reports[r].sent.rounds > 0)
            return grade_fail("%s: rank %d has called a collective of the library: write your own from hpml_send, "
                              "hpml_recv and hpml_sendrecv", what, r);
    return true;
}

/* When the last rank was ready. */
static __attribute__((unused)) double ranks_end(int ranks)
{
    double end = 0;
    for (int r = 0; r < ranks; r++)
        if (rank_reports[r].end > end) end = rank_reports[r].end;
    return end;
}

#endif
