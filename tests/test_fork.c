/* Ranks as forked processes: the bits of threads, large messages, what hpml_launch collects; ranks that are killed,
   exit, hang or leave; what is refused; that nothing is left behind. test_comm.c runs the collectives over FORK. */
#define _GNU_SOURCE /* PR_SET_CHILD_SUBREAPER */
#include "../hpml_comm.h"
#include "test.h"
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-function" /* most checks are test_comm.c's */
#include "comm_check.h"
#pragma GCC diagnostic pop
#include "plan_train.h"
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/time.h>
#include <sys/wait.h>

static char error[768];

/* What the processes of a test share. */
typedef struct common {
    int  ended, pid[8], good;
    char text[8][300]; /* each rank's error */
} common;

static common *shared;

static void share(void)
{
    const int how = MAP_SHARED | MAP_ANONYMOUS;
    if (!shared) shared = (common *)mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, how, -1, 0);
    memset(shared, 0, sizeof *shared);
}

static hpml_launch_desc desc_of(int ranks, double timeout)
{
    hpml_launch_desc d;
    memset(&d, 0, sizeof d);
    d.transport = HPML_TRANSPORT_FORK, d.ranks = ranks, d.timeout = timeout, d.ctx.threads = 1;
    share();
    return d;
}

static hpml_status launch(const hpml_launch_desc *d, hpml_rank_fn *fn, void *user)
{
    return hpml_launch(d, fn, user, error, sizeof error);
}

/* ---- what ranks compute ---- */

TEST(every_strategy_has_the_bits_of_threads)
{
    static const char *const plans[] = { "", "codec=onebit", "codec=topk,codec.ratio=0.1", "codec=lowrank", "exact=1",
        "delayed=1", "algorithm=hierarchical", "shard=1", "shard=2", "shard=3", "strategy=local,period=2",
        "strategy=block,period=2", "strategy=elastic,period=2", "strategy=gossip", "strategy=ps,servers=1",
        "strategy=ps,servers=2,codec=onebit", "route=factors", "route=hybrid" };
    int trained = 0;
    for (size_t i = 0; i < sizeof plans / sizeof plans[0]; i++) {
        plan_trial       j[2];
        hpml_launch_desc d = desc_of(4, 20);
        char             why[300] = "";
        hpml_status      status[2];
        memset(j, 0, sizeof j);
        for (int k = 0; k < 2; k++) {
            const hpml_status parsed = hpml_plan_parse(plans[i], &j[k].plan, why, sizeof why);
            if (parsed != HPML_OK) printf("    %s: %s\n", plans[i], why);
            ENSURE(parsed == HPML_OK);
            d.transport = k == 0 ? HPML_TRANSPORT_THREADS : HPML_TRANSPORT_FORK;
            status[k]   = launch(&d, plan_train, &j[k]);
        }
        if (status[1] != HPML_OK || j[0].hash != j[1].hash) printf("    \"%s\": %s\n", plans[i], error);
        ENSURE(status[0] == status[1] && j[0].hash == j[1].hash && j[0].made == j[1].made && j[0].same == j[1].same);
        trained += status[1] == HPML_OK;
    }
    ENSURE(trained >= 16);
}

TEST(hogwild_is_refused)
{
    hpml_launch_desc d = desc_of(2, 20);
    plan_trial       j;
    memset(&j, 0, sizeof j);
    j.plan.strategy = HPML_STRATEGY_HOGWILD;
    ENSURE(launch(&d, plan_train, &j) != HPML_OK && strstr(error, "hogwild shares values in the memory of one"));
}

/* Messages larger than a ring, to a rank that receives them in another order, to each other, and to oneself. */
static hpml_status large(hpml_comm *c, void *user)
{
    enum { N = 400000 };
    const int    me = hpml_comm_rank(c), p = hpml_comm_size(c), to = (me + 1) % p, from = (me + p - 1) % p;
    int32_t     *x = (int32_t *)hpml_ctx_alloc(hpml_comm_ctx(c), 4 * N * sizeof *x, NULL), small = me, got = -1;
    hpml_message m[6];
    (void)user;
    CHECK(x);
    for (int i = 0; i < 2 * N; i++) x[i] = me * N + i;
    CHECK(hpml_isend(c, to, 1, x, N * sizeof *x, &m[0]) == HPML_OK);
    CHECK(hpml_isend(c, to, 2, x + N, N * sizeof *x, &m[1]) == HPML_OK);
    CHECK(hpml_isend(c, to, 3, &small, sizeof small, &m[2]) == HPML_OK);
    CHECK(hpml_irecv(c, from, 3, &got, sizeof got, &m[3]) == HPML_OK);
    CHECK(hpml_wait(c, &m[3]) == HPML_OK && got == from);
    CHECK(hpml_irecv(c, from, 2, x + 3 * N, N * sizeof *x, &m[4]) == HPML_OK);
    CHECK(hpml_irecv(c, from, 1, x + 2 * N, N * sizeof *x, &m[5]) == HPML_OK);
    for (int i = 0; i < 6; i++) CHECK(i == 3 || hpml_wait(c, &m[i]) == HPML_OK);
    for (int i = 0; i < 2 * N; i++) CHECK(x[2 * N + i] == from * N + i);
    CHECK(hpml_sendrecv(c, me, x, N * sizeof *x, me, x + 2 * N, N * sizeof *x, 9) == HPML_OK);
    CHECK(memcmp(x, x + 2 * N, N * sizeof *x) == 0);
    return hpml_barrier(c);
}

TEST(messages_larger_than_a_ring)
{
    for (int p = 1; p <= 5; p += 2) {
        hpml_launch_desc d = desc_of(p, 20);
        ENSURE(launch(&d, large, NULL) == HPML_OK);
    }
    hpml_launch_desc d = desc_of(40, 20); /* small rings */
    ENSURE(launch(&d, large, NULL) == HPML_OK);
}

/* The result of rank 0 is in the caller's struct; counters and the log have all ranks. */
static hpml_status adds(hpml_comm *c, void *user)
{
    float x[1000];
    for (int i = 0; i < 1000; i++) x[i] = (float)hpml_comm_rank(c);
    CHECK(hpml_allreduce(c, x, 1000, NULL) == HPML_OK);
    if (hpml_comm_rank(c) == 0) *(float *)user = x[999];
    return HPML_OK;
}

TEST(counters_log_and_result)
{
    hpml_counters       n[2][3];
    hpml_message_record r[2][40];
    hpml_message_log    log[2] = { { r[0], 40, 0 }, { r[1], 40, 0 } };
    float               sum[2] = { 0, 0 };
    for (int k = 0; k < 2; k++) {
        hpml_launch_desc d = desc_of(3, 20);
        d.counters = n[k], d.log = &log[k];
        if (k == 0) d.transport = HPML_TRANSPORT_THREADS;
        ENSURE(launch(&d, adds, &sum[k]) == HPML_OK && (k == 0 || sum[k] == 3));
    }
    for (int i = 0; i < 3; i++) {
        const hpml_counters *a = &n[0][i], *b = &n[1][i];
        ENSURE(a->messages == b->messages && a->bytes == b->bytes && a->rounds == b->rounds && a->depth == b->depth);
        ENSURE(a->received_bytes == b->received_bytes && b->messages > 0 && b->held_bytes == 0);
    }
    ENSURE(log[0].count == log[1].count && log[1].count > 0);
    for (int64_t i = 0; i < log[1].count; i++) ENSURE(r[1][i].bytes > 0 && r[1][i].end >= r[1][i].start);
    log[1].capacity = 2; /* more messages than records */
    hpml_launch_desc d = desc_of(3, 20);
    d.log = &log[1];
    ENSURE(launch(&d, adds, &sum[1]) == HPML_OK && log[1].count == log[0].count);
}

/* ---- failures ---- */

static hpml_status work(hpml_comm *c) /* until an error */
{
    float x[3000] = { 0 };
    while (hpml_allreduce(c, x, 3000, NULL) == HPML_OK) {}
    snprintf(shared->text[hpml_comm_rank(c)], sizeof shared->text[0], "%s", hpml_ctx_error(hpml_comm_ctx(c)));
    return hpml_ctx_status(hpml_comm_ctx(c));
}

typedef struct fate { int rank, how; unsigned microseconds; } fate; /* how: 0: killed, 1: exits, 2: hangs, 3: fails */

static void strike(int signal_number)
{
    (void)signal_number;
    kill(getpid(), SIGKILL);
}

static hpml_status doomed(hpml_comm *c, void *user)
{
    const fate *f = (const fate *)user;
    shared->pid[hpml_comm_rank(c)] = (int)getpid();
    hpml_barrier(c); /* which may end in the victim's failure already */
    if (hpml_comm_rank(c) != f->rank) return work(c);
    if (f->how == 0) { /* at any moment of the work */
        struct itimerval timer;
        memset(&timer, 0, sizeof timer);
        timer.it_value.tv_usec = (suseconds_t)f->microseconds;
        signal(SIGALRM, strike);
        setitimer(ITIMER_REAL, &timer, NULL);
        return work(c);
    }
    usleep(f->microseconds);
    if (f->how == 1) exit(3);
    while (f->how == 2) pause();
    return hpml_ctx_fail(hpml_comm_ctx(c), HPML_ERR_NONFINITE, "the loss is NaN");
}

/* Whether all processes of a launch are gone: they were children of this process. */
static bool nothing_is_left(void)
{
    char  line[300];
    bool  clean = waitpid(-1, NULL, WNOHANG) < 0 && errno == ECHILD;
    FILE *maps = fopen("/proc/self/maps", "r");
    while (maps && fgets(line, sizeof line, maps))
        if (strstr(line, "/dev/zero")) clean = clean && (uintptr_t)strtoull(line, NULL, 16) == (uintptr_t)shared;
    if (maps) fclose(maps);
    return clean;
}

static bool each_names(int ranks, int victim, const char *what)
{
    char name[20];
    snprintf(name, sizeof name, "rank %d", victim);
    for (int i = 0; i < ranks; i++)
        if (i != victim && (!strstr(shared->text[i], name) || !strstr(shared->text[i], what))) {
            printf("    rank %d of %d: %s\n", i, ranks, shared->text[i]);
            return false;
        }
    return true;
}

TEST(a_killed_rank_is_named_at_once)
{
    const int rounds = getenv("HPML_TEST_ALL") ? 100 : 6;
    hpml_rng  r      = { .seed = (uint64_t)time(NULL) };
    for (int i = 0; i < rounds; i++) {
        fate             f = { 1, 0, 1 + (unsigned)hpml_rng_below(&r, 20000) };
        hpml_launch_desc d = desc_of(2 + i % 4, 20);
        f.rank = 1 + (int)hpml_rng_below(&r, d.ranks - 1);
        const double start  = hpml_now();
        hpml_status  status = launch(&d, doomed, &f);
        char         text[60];
        snprintf(text, sizeof text, "rank %d: its process was killed by signal 9", f.rank);
        if (status != HPML_ERR_COMM || !strstr(error, text)) printf("    %d of %d: %s\n", f.rank, d.ranks, error);
        ENSURE(status == HPML_ERR_COMM && strstr(error, text) && hpml_now() - start < 10);
        ENSURE(each_names(d.ranks, f.rank, "killed by signal 9") && nothing_is_left());
    }
}

static void keep_log(hpml_status status, const char *text, void *user) /* its peers fail with HPML_ERR_PEER */
{
    if (status == HPML_ERR_COMM) snprintf((char *)user, 200, "%s", text);
}

TEST(a_rank_that_calls_exit_is_named)
{
    char             log[200] = "";
    hpml_launch_desc d = desc_of(3, 20);
    fate             f = { 2, 1, 1000 };
    d.ctx.log = keep_log, d.ctx.log_user = log;
    ENSURE(launch(&d, doomed, &f) == HPML_ERR_COMM);
    ENSURE(strstr(error, "rank 2: its process ended early, with exit code 3"));
    ENSURE(strstr(log, "exit code 3"));
    ENSURE(each_names(3, 2, "exit code 3") && nothing_is_left());
}

TEST(a_rank_that_hangs_is_named_and_killed)
{
    bool named = false;
    for (int tries = 0; tries < 3 && !named; tries++) { /* a busy machine may delay another rank by 0.5 s */
        hpml_launch_desc d = desc_of(3, 0.5);
        fate             f = { 1, 2, 1000 };
        ENSURE(launch(&d, doomed, &f) == HPML_ERR_TIMEOUT && strstr(error, "waited 0.5 s for rank"));
        ENSURE(kill(shared->pid[1], 0) != 0 && nothing_is_left());
        named = strstr(error, "rank 1") && strstr(error, "allreduce");
    }
    if (!named) printf("    %s\n", error);
    ENSURE(named);
}

/* No rank waits for the one that hangs; so only the launch ends it, when the time limit and a deadline have passed. */
static hpml_status hangs_alone(hpml_comm *c, void *user)
{
    (void)user;
    while (hpml_comm_rank(c) == 1) pause();
    return HPML_OK;
}

TEST(a_rank_without_peers_that_wait_is_killed_after_the_time_limit)
{
    hpml_launch_desc d = desc_of(2, 0.2);
    d.time_limit = 0.2;
    ENSURE(launch(&d, hangs_alone, NULL) == HPML_ERR_TIMEOUT);
    ENSURE(strstr(error, "rank 1: its process was killed, because"));
    ENSURE(nothing_is_left());
}

TEST(a_rank_that_fails_is_named)
{
    hpml_launch_desc d = desc_of(4, 20);
    fate             f = { 3, 3, 1000 };
    ENSURE(launch(&d, doomed, &f) == HPML_ERR_NONFINITE && strcmp(error, "rank 3: the loss is NaN") == 0);
    ENSURE(each_names(4, 3, "the loss is NaN"));
    f.rank = 0; /* in the process of the caller */
    ENSURE(launch(&d, doomed, &f) == HPML_ERR_NONFINITE && strstr(error, "rank 0: the loss is NaN"));
}

static hpml_status chain(hpml_comm *c, void *user) { return (void)user, chain_hangs(c, &shared->ended); }
static hpml_status works(hpml_comm *c, void *user) { return (void)user, works_long(c, false, &shared->ended); }
static hpml_status works_beside(hpml_comm *c, void *user) { return (void)user, works_beside_a_job(c); }
static hpml_status survives(hpml_comm *c, void *user) { return (void)user, survive_case(c); }
static hpml_status deaths(hpml_comm *c, void *user) { return deaths_case(c, *(int *)user); }
static hpml_status other_order(hpml_comm *c, void *user) /* each rank waits for a message that is not sent */
{
    char byte;
    (void)user;
    return hpml_recv(c, 1 - hpml_comm_rank(c), 7, &byte, 1);
}

static hpml_status other_length(hpml_comm *c, void *user)
{
    char bytes[8] = { 0 };
    (void)user;
    return hpml_comm_rank(c) ? hpml_send(c, 0, 1, bytes, 8) : hpml_recv(c, 1, 1, bytes, 4);
}

TEST(errors_say_who_waits_for_whom)
{
    hpml_launch_desc d = desc_of(3, 20);
    ENSURE(launch(&d, leaves, NULL) == HPML_ERR_PEER);
    ENSURE(strstr(error, "rank 1 has left while this rank waits for it in allreduce"));
    d = desc_of(2, 20);
    ENSURE(launch(&d, other_length, NULL) == HPML_ERR_COMM && strstr(error, "rank 1 sent 8 bytes, rank 0 expected 4"));
    d = desc_of(2, 0.3);
    ENSURE(launch(&d, other_order, NULL) == HPML_ERR_TIMEOUT && strstr(error, "waited 0.3 s for rank"));
    ENSURE(strstr(error, "in receive"));
    bool named = false;
    for (int tries = 0; tries < 3 && !named; tries++) { /* a deadline of 0.4 s: a busy machine may delay another rank */
        d     = desc_of(6, 0.4);
        named = launch(&d, chain, NULL) == HPML_ERR_TIMEOUT && strstr(error, "which waits for rank 5,");
    }
    if (!named) printf("    %s\n", error);
    ENSURE(named);
    d = desc_of(2, 20), d.time_limit = 0.3;
    ENSURE(launch(&d, other_order, NULL) == HPML_ERR_TIMEOUT);
    ENSURE(strstr(error, "not over after 0.3 s (.time_limit): rank 0 waits for rank 1 in receive"));
}

TEST(a_busy_rank_is_waited_for)
{
    hpml_rank_fn *const cases[] = { works, works_beside };
    for (int i = 0; i < 2; i++) {
        hpml_status status = HPML_ERR_TIMEOUT;
        for (int tries = 0; tries < 3 && status != HPML_OK; tries++) {
            hpml_launch_desc d = desc_of(3, 0.3);
            status = launch(&d, cases[i], NULL);
        }
        if (status != HPML_OK) printf("    %s\n", error);
        ENSURE(status == HPML_OK);
    }
}

TEST(lost_ranks_are_survived)
{
    for (int seed = 1; seed <= 6; seed++) {
        hpml_launch_desc d = desc_of(2 + seed % 4, 20);
        d.survive = true;
        ENSURE(launch(&d, survives, NULL) == HPML_OK && strstr(error, "ranks lost: rank 1: the loss is NaN"));
        ENSURE(launch(&d, deaths, &seed) == HPML_OK);
    }
}

/* With .survive a killed rank is lost to the others, which go on. */
static hpml_status bereaved(hpml_comm *c, void *user)
{
    char byte = 0;
    (void)user;
    if (hpml_comm_rank(c) == 1) kill(getpid(), SIGKILL);
    CHECK(hpml_recv(c, 1, 1, &byte, 1) == HPML_ERR_PEER && hpml_comm_lost(c, 1));
    const int other = 2 - hpml_comm_rank(c);
    CHECK(hpml_sendrecv(c, other, &byte, 1, other, &byte, 1, 2) == HPML_OK);
    return hpml_ctx_status(hpml_comm_ctx(c));
}

TEST(a_killed_rank_is_survived)
{
    hpml_launch_desc d = desc_of(3, 20);
    d.survive = true;
    ENSURE(launch(&d, bereaved, NULL) == HPML_OK);
    ENSURE(strstr(error, "1 of 3 ranks lost: rank 1: its process was killed by signal 9") && nothing_is_left());
}

/* ---- processes ---- */

/* Rank 0's process is killed; of the others one waits, one computes. */
static hpml_status orphaned(hpml_comm *c, void *user)
{
    char byte = 0;
    (void)user;
    shared->pid[hpml_comm_rank(c)] = (int)getpid();
    if (hpml_barrier(c) == HPML_OK && hpml_comm_rank(c) == 0) kill(getpid(), SIGKILL);
    while (hpml_comm_rank(c) == 2) {}
    return hpml_recv(c, 0, 1, &byte, 1);
}

TEST(no_process_outlives_that_of_rank_0)
{
    hpml_launch_desc d = desc_of(3, 20);
    int              how = 0;
    prctl(PR_SET_CHILD_SUBREAPER, 1); /* the orphans become children of this process */
    fflush(stdout);
    const pid_t child = fork();
    if (child == 0) _exit(launch(&d, orphaned, NULL) == HPML_OK);
    ENSURE(waitpid(child, &how, 0) == child && WIFSIGNALED(how));
    const double end = hpml_now() + 10;
    int          gone = 0;
    while (gone < 2 && hpml_now() < end) {
        const pid_t ended = waitpid(-1, &how, WNOHANG);
        gone += ended > 0 && (ended == shared->pid[1] || ended == shared->pid[2]);
        usleep(1000);
    }
    for (int i = 1; i < 3 && gone < 2; i++) kill(shared->pid[i], SIGKILL);
    prctl(PR_SET_CHILD_SUBREAPER, 0);
    ENSURE(gone == 2 && nothing_is_left());
}

static hpml_status prints(hpml_comm *c, void *user)
{
    (void)user;
    printf("rank %d\n", hpml_comm_rank(c));
    return hpml_barrier(c);
}

TEST(what_is_in_a_buffer_is_printed_once)
{
    char             name[] = "/tmp/hpml_forkXXXXXX", text[200] = "";
    hpml_launch_desc d = desc_of(4, 20);
    const int        file = mkstemp(name);
    int              how = 0;
    fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
        dup2(file, 1);
        printf("before\n"); /* to a file: stays in the buffer */
        const hpml_status status = launch(&d, prints, NULL);
        printf("after\n");
        fflush(stdout);
        _exit(status != HPML_OK);
    }
    ENSURE(waitpid(child, &how, 0) == child && how == 0);
    const ssize_t bytes = pread(file, text, sizeof text - 1, 0);
    close(file);
    remove(name);
    ENSURE(bytes == 4 * 7 + 7 + 6 && strncmp(text, "before\n", 7) == 0 && strcmp(text + bytes - 6, "after\n") == 0);
    for (int i = 0; i < 4; i++) {
        char line[10];
        snprintf(line, sizeof line, "rank %d\n", i);
        ENSURE(strstr(text, line));
    }
}

/* Runs in a child that may start no more processes, or take no more memory. */
static int limited(int resource, rlim_t most)
{
    const struct rlimit limit = { most, most };
    hpml_launch_desc    d = desc_of(4, 20);
    if (resource == RLIMIT_NPROC && getuid() == 0 && setuid(65534) != 0) return 77; /* root has no such limit */
    if (setrlimit(resource, &limit) != 0) return 77;
    const hpml_status status = launch(&d, prints, NULL);
    const char *text = resource == RLIMIT_NPROC ? "process 2 of 4 could not be started" : "no shared memory for 4";
    return status == HPML_ERR_MEMORY && strstr(error, text) ? 0 : 1;
}

TEST_PLAIN(no_process_or_no_memory_is_an_error)
{
    for (int k = 0; k < 2; k++) {
        int how = 0;
        share();
        fflush(stdout);
        const pid_t child = fork();
        if (child == 0) _exit(k == 0 ? limited(RLIMIT_NPROC, 0) : limited(RLIMIT_AS, 1 << 20));
        ENSURE(waitpid(child, &how, 0) == child && WIFEXITED(how));
        if (WEXITSTATUS(how) != 0 && WEXITSTATUS(how) != 77) printf("    limit %d\n", k);
        ENSURE(WEXITSTATUS(how) == 0 || WEXITSTATUS(how) == 77);
    }
}

TEST(bad_launches_are_refused)
{
    hpml_launch_desc d = desc_of(257, 20);
    ENSURE(launch(&d, prints, NULL) == HPML_ERR_UNSUPPORTED && strstr(error, "at most 256 processes"));
    d = desc_of(2, 20), d.network.between.latency = 1e-3;
    ENSURE(launch(&d, prints, NULL) == HPML_ERR_UNSUPPORTED && strstr(error, "no links that take time"));
    d = desc_of(2, 20), d.network.ranks_per_node = -1;
    ENSURE(launch(&d, prints, NULL) == HPML_ERR_ARGUMENT);
    ENSURE(!hpml_world_create(HPML_TRANSPORT_FORK, 2, NULL));
    hpml_ctx      *ctx = hpml_ctx_create(NULL);
    hpml_comm_desc own;
    memset(&own, 0, sizeof own);
    own.transport = HPML_TRANSPORT_FORK;
    ENSURE_ERROR(ctx, !hpml_comm_create(ctx, &own), HPML_ERR_ARGUMENT, "use hpml_launch");
    hpml_ctx_free(ctx);
    setenv("HPML_RUN", "fork:3", 1);
    memset(&d, 0, sizeof d);
    const hpml_status status = launch(&d, prints, NULL);
    setenv("HPML_RUN", "fork:", 1);
    const hpml_status wrong = launch(&d, prints, NULL);
    unsetenv("HPML_RUN");
    ENSURE(status == HPML_OK && wrong == HPML_ERR_ARGUMENT && strstr(error, "fork[:N]") && nothing_is_left());
}
