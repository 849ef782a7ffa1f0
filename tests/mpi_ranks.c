/* The checks of comm_check.h on ranks of MPI, and the failures that are special to MPI. Run by test_mpi.sh: mpi_ranks
   CASE. A rank that finds an error prints one line, "rank R: status S: text", and exits with 1. */
#include "../hpml_comm.h"
#include "comm_check.h"
#include "trace.h"
#include "plan_train.h"

#include <mpi.h>
#include <signal.h>
#include <unistd.h>

static hpml_status sums(hpml_comm *c, void *user)
{
    int           p = hpml_comm_size(c);
    const int64_t sizes[] = { 0, 1, p - 1, p, p + 1, 1000, 1003, 1000000 };
    (void)user;
    for (int a = HPML_AUTO; a < HPML_ALGORITHM_COUNT; a++)
        for (int k = 0; k < 8; k++)
            if (allreduce_case(c, (hpml_algorithm)a, sizes[k]) != HPML_OK) return hpml_ctx_status(hpml_comm_ctx(c));
    return HPML_OK;
}

/* Trainings by each strategy without servers (test_servers.c has the others) have the bits of as many threads. */
static hpml_status strategies(hpml_comm *c, void *user)
{
    static const hpml_strategy_kind kinds[] = { HPML_STRATEGY_SYNC, HPML_STRATEGY_LOCAL, HPML_STRATEGY_BLOCK,
                                                HPML_STRATEGY_ELASTIC, HPML_STRATEGY_GOSSIP };
    (void)user;
    for (int i = 0; i < 5; i++) {
        hpml_strategy_kind kind = kinds[i];
        plan_trial         mpi = { .plan = { .strategy = kind, .algorithm = HPML_RING }, .steps = 5 };
        hpml_launch_desc d = { .transport = HPML_TRANSPORT_THREADS, .ranks = hpml_comm_size(c), .alone = true,
                               .ctx = { .seed = 3, .threads = 1 } };
        if (kind == HPML_STRATEGY_LOCAL || kind == HPML_STRATEGY_ELASTIC) mpi.plan.period = 2;
        plan_trial threads = mpi;
        if (hpml_comm_rank(c) == 0) CHECK(hpml_launch(&d, plan_train, &threads, NULL, 0) == HPML_OK);
        hpml_ctx  *ctx = hpml_ctx_create(&d.ctx); /* without the parameters of the training before */
        hpml_comm *own = hpml_comm_create(ctx, &(hpml_comm_desc){ .transport = HPML_TRANSPORT_MPI });
        CHECK(plan_train(own, &mpi) == HPML_OK);
        if (hpml_comm_rank(c) == 0) CHECK(mpi.same && threads.same && mpi.hash == threads.hash && mpi.made == 5);
        hpml_ctx_free(ctx);
    }
    return HPML_OK;
}

/* NATIVE on a part of a communicator is refused, unless all ranks are in it in their order. */
static hpml_status native_parts(hpml_comm *c, void *user)
{
    float               x = 1;
    hpml_comm          *all    = hpml_comm_split(c, 0, hpml_comm_rank(c));
    hpml_comm          *turned = hpml_comm_split(c, 0, -hpml_comm_rank(c));
    hpml_allreduce_desc d;
    (void)user;
    memset(&d, 0, sizeof d);
    d.algorithm = HPML_NATIVE;
    CHECK(hpml_allreduce(all, &x, 1, &d) == HPML_OK && (int)x == hpml_comm_size(c));
    CHECK(hpml_job_wait(hpml_iallreduce(all, &x, 1, &d)) == HPML_OK);
    CHECK(hpml_job_wait(hpml_iallreduce(c, &x, 1, &d)) == HPML_OK);
    return hpml_allreduce(turned, &x, 1, &d);
}

/* Creates more parts, one after another, than there are numbers; then too many at the same time, which is refused. */
static hpml_status many_parts(hpml_comm *c, void *user)
{
    (void)user;
    for (int i = 0; i < 150; i++) {
        float      x    = (float)(i % 100);
        hpml_comm *part = hpml_comm_split(c, 0, -hpml_comm_rank(c));
        CHECK(part && hpml_allreduce(part, &x, 1, NULL) == HPML_OK && (int)x == hpml_comm_size(c) * (i % 100));
        hpml_comm_free(part);
    }
    for (int i = 0; i < 129; i++)
        if (!hpml_comm_split(c, 0, -hpml_comm_rank(c))) break;
    return hpml_ctx_status(hpml_comm_ctx(c));
}

static hpml_status chain(hpml_comm *c, void *user) { return (void)user, chain_hangs(c, NULL); }
static hpml_status came(hpml_status status)
{
    if (status == HPML_OK) printf("all came\n");
    return status;
}

static hpml_status works(hpml_comm *c, void *user) { return (void)user, came(works_long(c, false, NULL)); }
static hpml_status works_beside(hpml_comm *c, void *user) { return (void)user, came(works_beside_a_job(c)); }
static hpml_status works_to_end(hpml_comm *c, void *user) { return (void)user, came(works_to_the_end(c)); }

/* Rank 1 waits for rank 0 for most of a deadline; its message comes, and then rank 1 hangs. Rank 2 waits for rank 1. */
static hpml_status hangs_after_a_wait(hpml_comm *c, void *user)
{
    char x = 0;
    int  rank = hpml_comm_rank(c);
    (void)user;
    if (hpml_barrier(c) != HPML_OK) return hpml_ctx_status(hpml_comm_ctx(c));
    if (rank == 2) return hpml_recv(c, 1, 1, &x, 1);
    if (rank == 0) usleep(700000), hpml_send(c, 1, 1, &x, 1);
    else hpml_recv(c, 0, 1, &x, 1);
    sleep(2);
    return hpml_ctx_status(hpml_comm_ctx(c));
}

/* Rank 1 says that it is busy for 2.1 s, which extends the deadline of rank 0 by less than 3 s, and hangs. */
static hpml_status hangs_while_busy(hpml_comm *c, void *user)
{
    double start;
    (void)user;
    hpml_barrier(c);
    start = hpml_now();
    if (hpml_comm_rank(c) == 1) hpml_comm_busy(c, 2.1), sleep(5);
    hpml_barrier(c);
    const double waited = hpml_now() - start;
    if (hpml_comm_rank(c) == 0) printf("waited %s\n", waited >= 2.1 && waited < 3.5 ? "2 seconds" : "another time");
    fflush(stdout);
    return hpml_ctx_status(hpml_comm_ctx(c));
}

/* The part lives longer than the communicator that it was split from. */
static hpml_status part_outlives(void)
{
    float          x = 1;
    int            level;
    hpml_comm_desc d;
    MPI_Init_thread(NULL, NULL, MPI_THREAD_SERIALIZED, &level);
    memset(&d, 0, sizeof d);
    d.transport = HPML_TRANSPORT_MPI;
    hpml_ctx  *ctx = hpml_ctx_create(NULL);
    hpml_comm *c = hpml_comm_create(ctx, &d), *part = hpml_comm_split(c, 0, 0);
    hpml_allreduce(part, &x, 1, NULL);
    hpml_comm_free(c);
    hpml_status status = hpml_ctx_status(ctx);
    bool        named  = hpml_allreduce(part, &x, 1, NULL) == HPML_ERR_STATE &&
                         strstr(hpml_ctx_error(ctx), "split from has been freed") != NULL;
    if (status == HPML_OK && !named) status = HPML_ERR_STATE;
    hpml_comm_free(part); /* frees its number, which is shared with the first communicator */
    hpml_ctx_free(ctx);
    MPI_Finalize();
    return status;
}

/* The other ranks wait for this rank when they free their communicators. */
static hpml_status stays(hpml_comm *c, void *user)
{
    (void)user;
    sum_of_four(c);
    if (hpml_comm_rank(c) == 1) sleep(3);
    return hpml_ctx_status(hpml_comm_ctx(c));
}

static hpml_status survives(hpml_comm *c, void *user)
{
    (void)user;
    hpml_status status = survive_case(c);
    if (status == HPML_OK) printf("rank %d ends\n", hpml_comm_rank(c));
    return status;
}

/* The seed is in the environment, because MPI can be started only once. */
static hpml_status survives_deaths(hpml_comm *c, void *user)
{
    (void)user;
    hpml_status status = deaths_case(c, getenv("HPML_TEST_SEED") ? atoi(getenv("HPML_TEST_SEED")) : 1);
    if (status == HPML_OK && hpml_comm_rank(c) == hpml_comm_size(c) - 1) printf("the server ends\n");
    return status;
}

static hpml_status survives_no_sum(hpml_comm *c, void *user)
{
    bool named = false;
    (void)user;
    hpml_status status = sum_without_one(c, &named);
    if (named) printf("rank %d names it\n", hpml_comm_rank(c));
    return status;
}

static hpml_status correct(hpml_comm *c, void *user)
{
    int p = hpml_comm_size(c);
    if (sums(c, user) != HPML_OK) return hpml_ctx_status(hpml_comm_ctx(c));
    for (int a = HPML_AUTO; a < HPML_ALGORITHM_COUNT; a++)
        if (types_case(c, (hpml_algorithm)a, 37) != HPML_OK) return hpml_ctx_status(hpml_comm_ctx(c));
    hpml_rng shape = { .seed = 3 };
    for (int k = 0; k < 100; k++)
        if (others_case(c, k < 8 ? k : hpml_rng_below(&shape, 500)) != HPML_OK)
            return hpml_ctx_status(hpml_comm_ctx(c));
    CHECK(split_case(c) == HPML_OK);
    if (p > 1) {
        CHECK(messages_case(c, 3, 100000) == HPML_OK);
        CHECK(order_case(c, 1000) == HPML_OK);
        CHECK(serve_case(c, 100) == HPML_OK);
    }
    CHECK(jobs_case(c, 5) == HPML_OK);
    CHECK(orders_case(c, 100, false) == HPML_OK && orders_case(c, 10, true) == HPML_OK);
    CHECK(hpml_comm_tune(c) == HPML_OK);
    CHECK(allreduce_case(c, HPML_AUTO, 20000) == HPML_OK);
    return HPML_OK;
}

/* Messages of many pieces: sums, and two at once with the same tag. */
static hpml_status large(hpml_comm *c, void *user)
{
    (void)user;
    CHECK(allreduce_case(c, HPML_RING, 7000003) == HPML_OK);
    CHECK(allreduce_case(c, HPML_BUTTERFLY, 3000001) == HPML_OK);
    if (hpml_comm_size(c) > 1) CHECK(order_case(c, (size_t)13 << 20) == HPML_OK);
    return HPML_OK;
}

static hpml_status traffic_case(hpml_comm *c, void *user)
{
    int                 p = hpml_comm_size(c);
    const int64_t       sizes[] = { 0, 1, 3, 1003 };
    float               x[1003] = { 0 };
    hpml_counters       k;
    hpml_allreduce_desc d;
    (void)user;
    for (int a = HPML_CENTRAL; a < HPML_ALGORITHM_COUNT; a++)
        for (int i = 0; i < 4 && a != HPML_NATIVE; i++) {
            traffic t;
            memset(&t, 0, sizeof t);
            t.algorithm = (hpml_algorithm)a, t.n = sizes[i];
            CHECK(count_one(c, &t) == HPML_OK);
        }
    memset(&d, 0, sizeof d);
    d.algorithm = HPML_RING;
    hpml_comm_counters_reset(c);
    CHECK(hpml_allreduce(c, x, 1003, &d) == HPML_OK);
    hpml_comm_counters(c, &k);
    CHECK(k.rounds == 2 * (p - 1) && k.messages == 2 * (p - 1));
    int64_t blocks[2] = { 0, 0 };
    for (int i = 0; i < 2; i++) {
        int b     = (hpml_comm_rank(c) + i) % p;
        blocks[i] = hpml_block(1003, p, b + 1) - hpml_block(1003, p, b);
    }
    CHECK(k.bytes == 4 * (2 * 1003 - blocks[0] - blocks[1]));
    for (int i = 0, next = (hpml_comm_rank(c) + 1) % p; i < p; i++) /* all bytes to the next rank */
        CHECK(hpml_comm_messages_to(c, i) == (i == next ? k.messages : 0) &&
              hpml_comm_bytes_to(c, i) == (i == next ? k.bytes : 0));
    return HPML_OK;
}

static hpml_status timeline(hpml_comm *c, void *user)
{
    static trace seen;
    const char  *path = "build/mpi_ranks.json", *wrong = NULL;
    float        x[100] = { 0 };
    int          sums = 0;
    (void)user;
    CHECK(hpml_comm_trace_start(c, NULL) == HPML_OK);
    for (int i = 0; i < 3; i++)
        CHECK(hpml_allreduce(c, x, 100, NULL) == HPML_OK && hpml_job_wait(hpml_iallreduce(c, x, 100, NULL)) == HPML_OK);
    CHECK(hpml_comm_trace_save(c, path) == HPML_OK);
    if (hpml_comm_rank(c) > 0) return HPML_OK;
    wrong = trace_read(path, hpml_comm_size(c), &seen);
    if (wrong) printf("%s\n", wrong);
    for (int i = 0; i < seen.spans; i++) sums += strcmp(seen.span[i].text[TRACE_NAME], "allreduce") == 0;
    remove(path);
    CHECK(!wrong && sums == 6 * hpml_comm_size(c));
    return HPML_OK;
}

static hpml_status raises(hpml_comm *c, void *user)
{
    (void)user;
    if (hpml_comm_rank(c) == 1) return hpml_ctx_fail(hpml_comm_ctx(c), HPML_ERR_NONFINITE, "the loss is NaN");
    return sum_of_four(c);
}

static hpml_status not_ready(hpml_comm *c, void *user) { return (void)user, unready(c, false, NULL); }

/* Checks the error of a wait of 1 s, begun at `start`. Closing takes up to 5 s more, and the first process that ends
   may end all. */
static hpml_status at_once(hpml_comm *c, double start, hpml_status status)
{
    printf("%s: %s\n", hpml_now() - start < 3 ? "at once" : "late", hpml_ctx_error(hpml_comm_ctx(c)));
    fflush(stdout);
    return status;
}

static hpml_status killed(hpml_comm *c, void *user)
{
    (void)user;
    sum_of_four(c);
    if (hpml_comm_rank(c) == 1) usleep(300000), kill(getpid(), SIGKILL); /* when all ranks have connected */
    return at_once(c, hpml_now(), sum_of_four(c));
}

/* Rank 1 hangs, which mpiexec cannot notice. Rank 2 waits for rank 0, which waits for rank 1. */
static hpml_status stopped(hpml_comm *c, void *user)
{
    float               x[4] = { 0 };
    hpml_allreduce_desc d;
    (void)user;
    memset(&d, 0, sizeof d);
    d.algorithm = HPML_BUTTERFLY;
    hpml_allreduce(c, x, 4, &d);
    if (hpml_comm_rank(c) == 1) usleep(300000), raise(SIGSTOP);
    return at_once(c, hpml_now(), hpml_allreduce(c, x, 4, &d));
}

static hpml_status leaves_native(hpml_comm *c, void *user)
{
    hpml_allreduce_desc d;
    float               x[4] = { 0 };
    (void)user;
    memset(&d, 0, sizeof d);
    d.algorithm = HPML_NATIVE;
    return hpml_comm_rank(c) == 1 ? HPML_OK : hpml_allreduce(c, x, 4, &d);
}

static hpml_status exits(hpml_comm *c, void *user)
{
    (void)user;
    sum_of_four(c);
    if (hpml_comm_rank(c) == 1) exit(3);
    return at_once(c, hpml_now(), sum_of_four(c));
}

static hpml_status sleeps(hpml_comm *c, void *user)
{
    (void)user;
    if (hpml_comm_rank(c) == 1) sleep(1);
    return sum_of_four(c);
}

static hpml_status hungry(hpml_comm *c, void *user)
{
    float x[8] = { 0 };
    (void)user;
    sum_of_four(c);
    hpml_barrier(hpml_comm_split(c, 0, 0));
    hpml_job_wait(hpml_iallreduce(c, x, 8, NULL));
    return hpml_ctx_status(hpml_comm_ctx(c));
}

static void *no_alloc(size_t size, size_t align, void *user)
{
    int *left = (int *)user;
    if ((*left)-- <= 0) return NULL;
    return aligned_alloc(align, (size + align - 1) / align * align);
}

static void no_free(void *p, size_t size, void *user)
{
    (void)size, (void)user;
    free(p);
}

static int report(hpml_status status, const char *text)
{
    char *rank = getenv("PMI_RANK") ? getenv("PMI_RANK") : getenv("OMPI_COMM_WORLD_RANK");
    if (status != HPML_OK) printf("rank %s: status %d: %s\n", rank ? rank : "0", status, text);
    fflush(stdout);
    if (status != HPML_OK) usleep(300000); /* mpiexec kills the others when the first one ends */
    return status != HPML_OK;
}

static bool survive; /* .survive of all launches */

static int launch(hpml_rank_fn *fn, int ranks, bool check, double timeout)
{
    char             error[768];
    hpml_launch_desc d;
    memset(&d, 0, sizeof d);
    d.transport = HPML_TRANSPORT_MPI, d.ranks = ranks, d.check = check, d.timeout = timeout;
    d.survive = survive;
    return report(hpml_launch(&d, fn, NULL, error, sizeof error), error);
}

/* HPML_RUN has chosen MPI; hpml_launched was right before MPI started. */
static hpml_status announced(hpml_comm *c, void *user)
{
    int rank, size = hpml_launched(&rank);
    (void)user;
    bool right = strcmp(hpml_comm_transport(c), "mpi") == 0 && size == hpml_comm_size(c) && rank == hpml_comm_rank(c);
    return right ? HPML_OK : HPML_ERR_STATE;
}

static int by_environment(void)
{
    char error[768];
    return report(hpml_launch(NULL, announced, NULL, error, sizeof error), error);
}

/* Three messages from each rank to the next one, between processes that have no collectives. */
static hpml_status three_messages(hpml_comm *c, void *user)
{
    int        p = hpml_comm_size(c), me = hpml_comm_rank(c), x = 1, y = 0;
    hpml_comm *part = hpml_comm_split(c, 0, 0);
    CHECK(part);
    hpml_comm_counters_reset(c);
    for (int i = 0; i < 3; i++)
        CHECK(hpml_sendrecv(part, (me + 1) % p, &x, sizeof x, (me + p - 1) % p, &y, sizeof y, i) == HPML_OK);
    return *(const bool *)user ? hpml_barrier(c) : HPML_OK;
}

/* The counters and the log of this process's rank come back; `collective`: the launch fails with that error. */
static int counted(bool collective)
{
    char                error[768];
    hpml_message_record record[64];
    hpml_message_log    log = { record, 64, 0 };
    hpml_counters       own;
    hpml_launch_desc    d;
    int64_t             found = 0;
    memset(&d, 0, sizeof d);
    d.transport = HPML_TRANSPORT_MPI, d.timeout = 10, d.only_messages = true, d.counters = &own, d.log = &log;
    if (report(hpml_launch(&d, three_messages, &collective, error, sizeof error), error)) return 1;
    for (int64_t i = 0; i < log.count && i < 64; i++) found += record[i].tag <= 2 && record[i].bytes == sizeof(int);
    if (own.messages == 3 && own.received_messages == 3 && own.received_bytes == 12 && found == 3) return 0;
    printf("sent %lld, received %lld, logged %lld\n", (long long)own.messages, (long long)own.received_messages,
           (long long)found);
    return 1;
}

/* Every process runs threads of its own: refused, unless `alone` or HPML_RUN allows it. */
static hpml_status own_threads(hpml_comm *c, void *user)
{
    (void)user;
    return hpml_comm_size(c) == 2 && strcmp(hpml_comm_transport(c), "threads") == 0 ? HPML_OK : HPML_ERR_STATE;
}

static int threads_each(bool alone)
{
    char             error[768];
    hpml_launch_desc d;
    memset(&d, 0, sizeof d);
    d.run = "threads:2", d.alone = alone;
    return report(hpml_launch(&d, own_threads, NULL, error, sizeof error), error);
}

/* A program that starts MPI itself: before MPI_Init, single-threaded, on some ranks only, after MPI_Finalize. */
static int host(const char *what)
{
    bool           part = strcmp(what, "part") == 0, single = strcmp(what, "single") == 0;
    int            level, rank, bad = 0;
    hpml_comm_desc d;
    memset(&d, 0, sizeof d);
    d.transport = HPML_TRANSPORT_MPI, d.timeout = 10;
    if (strcmp(what, "before") == 0) {
        hpml_ctx  *ctx = hpml_ctx_create(NULL);
        hpml_comm *c   = hpml_comm_create(ctx, &d);
        bad            = report(hpml_ctx_status(ctx), hpml_ctx_error(ctx)) && !c;
        hpml_ctx_free(ctx);
        return bad;
    }
    MPI_Init_thread(NULL, NULL, single ? MPI_THREAD_SINGLE : MPI_THREAD_MULTIPLE, &level);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm some = MPI_COMM_NULL;
    if (part) {
        MPI_Comm_split(MPI_COMM_WORLD, rank % 2, -rank, &some);
        d.mpi_comm = &some;
    }
    if (strcmp(what, "after") == 0) MPI_Finalize();
    for (int twice = 0; twice < 2 && !bad; twice++) { /* one after another */
        hpml_ctx  *ctx = hpml_ctx_create(NULL);
        hpml_comm *c   = hpml_comm_create(ctx, &d);
        int        own = 0, size = 0;
        if (c && part) {
            MPI_Comm_rank(some, &own), MPI_Comm_size(some, &size);
            if (own != hpml_comm_rank(c) || size != hpml_comm_size(c)) bad = 1;
        }
        if (c && correct(c, NULL) != HPML_OK) bad = 1;
        bad |= report(hpml_ctx_status(ctx), hpml_ctx_error(ctx));
        hpml_ctx_free(ctx);
    }
    if (part) MPI_Comm_free(&some);
    if (!bad && strcmp(what, "after") != 0) {
        int sum = 0;
        MPI_Allreduce(&rank, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD); /* the host's MPI still works */
        MPI_Finalize();
    }
    return bad;
}

/* Rank 1 comes late to hpml_comm_create. */
static int late(void)
{
    int            rank;
    hpml_comm_desc d;
    MPI_Init(NULL, NULL);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    if (rank == 1) sleep(3);
    memset(&d, 0, sizeof d);
    d.transport = HPML_TRANSPORT_MPI, d.timeout = 0.5;
    hpml_ctx *ctx = hpml_ctx_create(NULL);
    hpml_comm_create(ctx, &d);
    int bad = report(hpml_ctx_status(ctx), hpml_ctx_error(ctx));
    hpml_ctx_free(ctx);
    _exit(bad);
}

/* Freeing the context after MPI_Finalize does nothing. */
static int free_late(void)
{
    hpml_comm_desc d;
    MPI_Init(NULL, NULL);
    memset(&d, 0, sizeof d);
    d.transport    = HPML_TRANSPORT_MPI;
    hpml_ctx  *ctx = hpml_ctx_create(NULL);
    hpml_comm *c   = hpml_comm_create(ctx, &d);
    int        bad = hpml_barrier(hpml_comm_split(c, 0, 0)) != HPML_OK;
    MPI_Finalize();
    hpml_ctx_free(ctx);
    return bad;
}

/* Rank 1 runs out of memory at its k-th allocation, for every k. */
static int memory(void)
{
    int rank, worst = 0, succeeded = 0;
    MPI_Init(NULL, NULL);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    for (int k = 1; k < 60 && !succeeded; k++) {
        char             error[768] = { 0 };
        int              left = k, mine, all;
        hpml_launch_desc d;
        memset(&d, 0, sizeof d);
        d.transport = HPML_TRANSPORT_MPI, d.timeout = 3;
        if (rank == 1) d.ctx.allocator.alloc = no_alloc, d.ctx.allocator.free = no_free, d.ctx.allocator.user = &left;
        mine = hpml_launch(&d, hungry, NULL, error, sizeof error) == HPML_OK;
        MPI_Allreduce(&mine, &all, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
        if (all == 1) worst = 1, printf("rank %d: k = %d: only one rank knows: %s\n", rank, k, error);
        succeeded = all == 2;
    }
    MPI_Finalize();
    return worst || !succeeded;
}

int main(int argc, char **argv)
{
    const char *what = argc > 1 ? argv[1] : "correct";
    if (strcmp(what, "correct") == 0) return launch(correct, 0, false, 30);
    if (strcmp(what, "sums") == 0) return launch(sums, 0, false, 30);
    if (strcmp(what, "strategies") == 0) return launch(strategies, 0, false, 30);
    if (strcmp(what, "checked") == 0) return launch(correct, 0, true, 30);
    if (strcmp(what, "twice") == 0) return launch(announced, 0, false, 30) || launch(announced, 0, false, 30);
    if (strcmp(what, "large") == 0) return launch(large, 0, false, 30);
#ifdef __linux__
    if (strcmp(what, "huge") == 0) return launch(huge, 0, false, 60);
#endif
    survive = strncmp(what, "survives", 8) == 0;
    if (strcmp(what, "survives") == 0) return launch(survives, 0, false, 20);
    if (strcmp(what, "survives_deaths") == 0) return launch(survives_deaths, 0, false, 20);
    if (strcmp(what, "survives_no_sum") == 0) return launch(survives_no_sum, 0, false, 20);
    if (strcmp(what, "traffic") == 0) return launch(traffic_case, 0, false, 10);
    if (strcmp(what, "timeline") == 0) return launch(timeline, 0, false, 10);
    if (strcmp(what, "wrong_number") == 0) return launch(correct, 3, false, 10);
    if (strcmp(what, "raises") == 0) return launch(raises, 0, false, 20);
    if (strcmp(what, "leaves") == 0) return launch(leaves, 0, false, 20);
    if (strcmp(what, "killed") == 0) return launch(killed, 0, false, 1);
    if (strcmp(what, "stopped") == 0) return launch(stopped, 0, false, 1);
    if (strcmp(what, "leaves_native") == 0) return launch(leaves_native, 0, false, 1);
    if (strcmp(what, "exits") == 0) return launch(exits, 0, false, 20);
    if (strcmp(what, "native_parts") == 0) return launch(native_parts, 0, false, 20);
    if (strcmp(what, "many_parts") == 0) return launch(many_parts, 0, false, 20);
    if (strcmp(what, "chain") == 0) return launch(chain, 0, false, 0.8);
    if (strcmp(what, "works") == 0) return launch(works, 0, false, 0.3);
    if (strcmp(what, "works_beside") == 0) return launch(works_beside, 0, false, 0.5);
    if (strcmp(what, "works_to_end") == 0) return launch(works_to_end, 0, false, 0.3);
    if (strcmp(what, "hangs_after_a_wait") == 0) return launch(hangs_after_a_wait, 0, false, 1);
    if (strcmp(what, "hangs_while_busy") == 0) return launch(hangs_while_busy, 0, false, 0.5);
    if (strcmp(what, "part_outlives") == 0) return part_outlives();
    if (strcmp(what, "stays") == 0) return launch(stays, 0, false, 1);
    if (strcmp(what, "late") == 0) return late();
    if (strcmp(what, "free_late") == 0) return free_late();
    if (strcmp(what, "another") == 0) return launch(another, 0, true, 20);
    if (strcmp(what, "other_count") == 0) return launch(other_count, 0, false, 20);
    if (strcmp(what, "other_count_checked") == 0) return launch(other_count, 0, true, 20);
    if (strcmp(what, "sleeps") == 0) return launch(sleeps, 0, false, 0.2);
    if (strcmp(what, "not_ready") == 0) return launch(not_ready, 0, false, 0.4);
    if (strcmp(what, "memory") == 0) return memory();
    if (strcmp(what, "counted") == 0) return counted(false);
    if (strcmp(what, "only_messages") == 0) return counted(true);
    if (strcmp(what, "by_environment") == 0) return by_environment();
    if (strcmp(what, "threads") == 0) return threads_each(false);
    if (strcmp(what, "threads_alone") == 0) return threads_each(true);
    return host(what);
}
