/* The simulator against formulas, against itself without short cuts, and against threads in virtual time. */
#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
static bool no_more; /* true: pthread_create fails */
static int thread_of(pthread_t *t, const pthread_attr_t *a, void *(*fn)(void *), void *arg)
{
    return no_more ? EAGAIN : pthread_create(t, a, fn, arg);
}
#define pthread_create thread_of
static int    yields; /* calls of sched_yield that were counted; each of them takes a time slice of another program */
static bool   yields_counted;
static int    slow_yield(void);
#define sched_yield slow_yield
#define HPML_COMM_IMPLEMENTATION /* private functions; hpml.h's body is compiled apart */
#include "../hpml_comm.h"
#include "test.h"

static int slow_yield(void)
{
    if (__atomic_load_n(&yields_counted, __ATOMIC_RELAXED)) yields++, hpmlc_nap(1e-3);
    return 0;
}

static hpml_network flat(double latency, double bandwidth)
{
    hpml_network n = { 0 };
    n.ranks_per_node    = 1;
    n.between.latency   = latency;
    n.between.bandwidth = bandwidth;
    return n;
}

static hpml_network nodes(int ranks_per_node, bool spread)
{
    hpml_network n = flat(50e-6, 125e6);
    n.ranks_per_node   = ranks_per_node;
    n.spread           = spread;
    n.inside.latency   = 1e-6;
    n.inside.bandwidth = 1e10;
    return n;
}

static double seconds(hpml_algorithm a, int p, hpml_network n, int64_t bytes)
{
    return hpml_simulate_allreduce(a, p, &n, bytes);
}

#define ENSURE_CLOSE(a, b, relative) ENSURE_NEAR((a) / (b), 1, relative)

TEST(formulas)
{
    static const int ps[] = { 2, 4, 8, 64, 256, 4096 };
    for (size_t i = 0; i < sizeof ps / sizeof *ps; i++)
        for (int net = 0; net < 3; net++) {
            double       alpha = net == 2 ? 1e-3 : 1e-5, beta = net == 1 ? 1e-6 : 1e-9;
            double       p = ps[i], k = log2(p), n = 16384. * 64;
            hpml_network w = flat(alpha, 1 / beta);
            ENSURE_CLOSE(seconds(HPML_RING, ps[i], w, (int64_t)n), 2 * (p - 1) * (alpha + n / p * beta), 1e-9);
            ENSURE_CLOSE(seconds(HPML_BUTTERFLY, ps[i], w, (int64_t)n), k * (alpha + n * beta), 1e-9);
            ENSURE_CLOSE(seconds(HPML_HALVING, ps[i], w, (int64_t)n), 2 * k * alpha + 2 * n * (p - 1) / p * beta, 1e-9);
            ENSURE_CLOSE(seconds(HPML_TREE, ps[i], w, (int64_t)n), 2 * k * (alpha + n * beta), net == 1 ? 0.01 : 1);
            /* Messages that wait for one card pay one latency together; one by one they took 2 (p-1) (alpha + n beta).
               */
            ENSURE_CLOSE(seconds(HPML_CENTRAL, ps[i], w, (int64_t)n), 2 * alpha + 2 * (p - 1) * n * beta, 1e-9);
            if (net == 1)
                ENSURE_CLOSE(seconds(HPML_CENTRAL, ps[i], w, (int64_t)n), 2 * (p - 1) * (alpha + n * beta), 0.01);
        }
}

/* The simulator takes its short cut for rings only where all phases are those of a ring: reduce-scatter round a ring
   and then allgather by doubling begins as a ring does, and takes p - 1 + log2 p rounds instead of 2 (p - 1). */
TEST(phases_that_begin_as_a_ring_are_not_timed_as_a_ring)
{
    const int64_t n = 1000;
    for (int p = 4; p <= 32; p *= 2) {
        double end[2];
        for (int plain = 0; plain < 2; plain++) {
            hpml_network w = flat(1e-5, 1e9);
            hpmlc_phases all;
            hpmlc_sim    s;
            ENSURE(hpmlc_sim_open(&s, p, &w, 1, 0));
            s.plain = plain == 1;
            s.kind  = HPMLC_SIM_ALLREDUCE;
            s.n     = n;
            s.size  = 4;
            for (int r = 0; r < p; r++) {
                hpmlc_phases_single(&all, &hpmlc_ring_scatter, p, r, 0, n);
                hpmlc_phases_add(&all, &hpmlc_double, hpmlc_everyone(p, r, 0), 0, n);
                hpmlc_sim_set_phases(&s, r, &all);
            }
            ENSURE(hpmlc_sim_run(&s));
            end[plain] = hpmlc_sim_latest(&s);
            for (int r = 0; r < p; r++) ENSURE(s.messages[r] == p - 1 + hpmlc_log2(p));
            hpmlc_sim_close(&s);
        }
        ENSURE_CLOSE(end[0], end[1], 1e-12);
    }
}

/* m ranks a node: a ring inside the node, halving of each block between nodes, m blocks through one card. */
TEST(hierarchical_formula)
{
    hpml_network w = nodes(8, false);
    double       n = 1 << 24, m = 8, k = 16, a = w.inside.latency, b = 1 / w.inside.bandwidth;
    double       inside = 2 * (m - 1) * (a + n / m * b),
                 between = 2 * log2(k) * w.between.latency + 2 * n * (k - 1) / k / w.between.bandwidth;
    ENSURE_CLOSE(seconds(HPML_HIERARCHICAL, 128, w, 1 << 24), inside + between, 0.01);
    ENSURE(seconds(HPML_HIERARCHICAL, 128, w, 1 << 24) < seconds(HPML_RING, 128, w, 1 << 24));
}

typedef struct clock_run {
    hpml_allreduce_desc d;
    int64_t             n;
    double              end;
    int64_t             bytes, messages, between;
} clock_run;

static hpml_status clock_rank(hpml_comm *c, void *user) /* one thread at a time: no races */
{
    clock_run    *run = (clock_run *)user;
    hpml_counters count;
    float        *x = (float *)calloc((size_t)run->n + 1, sizeof *x);
    hpml_allreduce(c, x, run->n, &run->d);
    free(x);
    hpml_comm_counters(c, &count);
    if (hpml_comm_now(c) > run->end) run->end = hpml_comm_now(c);
    if (count.bytes > run->bytes) run->bytes = count.bytes;
    if (count.messages > run->messages) run->messages = count.messages;
    run->between += count.between_bytes;
    return hpml_ctx_status(hpml_comm_ctx(c));
}

static hpml_simulation one_layer(hpml_algorithm a, int p, hpml_network w, int64_t n, bool stripes)
{
    double             none = 0;
    int64_t            bytes = 4 * n;
    hpml_simulate_desc d     = { 0 };
    hpml_simulation    s;
    d.ranks = p, d.network = w, d.layers = 1, d.backward_s = &none, d.elements = &n, d.algorithm = a;
    if (stripes) d.packed = &bytes;
    hpml_simulate(&d, &s, NULL, 0);
    return s;
}

/* Time, bytes and messages of every algorithm equal those of HPML_TRANSPORT_CLOCK, whose threads pass the messages. */
TEST(equals_the_clock_transport)
{
    static const int     ps[] = { 2, 3, 4, 5, 6, 8, 16 };
    static const int64_t ns[] = { 1, 1003, 60000 };
    static const int32_t given[16] = { 0, 1, 1, 0, 2, 2, 2, 0, 3, 1, 1, 2, 4, 4, 0, 3 };
    for (int net = 0; net < 7; net++)
        for (int i = 0; i < 7 * 3 * HPML_ALGORITHM_COUNT; i++) {
            if (i / 21 == HPML_NATIVE) continue;
            hpml_launch_desc l   = { 0 };
            clock_run        run;
            char             error[256];
            memset(&run, 0, sizeof run);
            l.transport = HPML_TRANSPORT_CLOCK, l.ranks = ps[i % 7];
            l.network = net == 0 ? flat(2e-5, 1e9) : nodes(net == 5 ? 3 : 1 << (net % 3), net > 2);
            if (net == 6) l.network.node = given;
            run.n = ns[i / 7 % 3], run.d.algorithm = (hpml_algorithm)(i / 21);
            hpml_status status = hpml_launch(&l, clock_rank, &run, error, sizeof error);
            if (status != HPML_OK) puts(error);
            ENSURE(status == HPML_OK);
            hpml_simulation s = one_layer(run.d.algorithm, l.ranks, l.network, run.n, false);
            ENSURE_CLOSE(seconds(run.d.algorithm, l.ranks, l.network, 4 * run.n), run.end, 1e-9);
            ENSURE_CLOSE(s.comm_s, run.end, 1e-9);
            ENSURE(s.bytes_per_rank == run.bytes && s.messages == run.messages && s.between_bytes == run.between);
        }
}

typedef struct overlap_run {
    double         end, backward[4];
    int64_t        n[4];
    hpml_algorithm a;
    const double  *slow;
} overlap_run;

static hpml_status overlap_rank(hpml_comm *c, void *user)
{
    overlap_run        *run = (overlap_run *)user;
    hpml_job           *job[4];
    float              *x[4];
    hpml_allreduce_desc d = { 0 };
    d.algorithm = run->a;
    /* the first job creates the twin, which takes messages; all ranks begin at 10 s */
    hpml_job_wait(hpml_iallreduce(c, run->n, 0, NULL));
    hpml_comm_compute(c, (10 - hpml_comm_now(c)) / (run->slow ? run->slow[hpml_comm_rank(c)] : 1));
    for (int i = 3; i >= 0; i--) {
        x[i] = (float *)calloc((size_t)run->n[i], sizeof(float));
        hpml_comm_compute(c, run->backward[i]);
        job[i] = hpml_iallreduce(c, x[i], run->n[i], &d);
    }
    for (int i = 3; i >= 0; i--) hpml_job_wait(job[i]), free(x[i]);
    if (hpml_comm_now(c) > run->end) run->end = hpml_comm_now(c);
    return hpml_ctx_status(hpml_comm_ctx(c));
}

/* A backward pass with allreduces in the background, and a straggler: run by threads in virtual time, and simulated. */
TEST(overlapped_step_equals_the_clock_transport)
{
    static const double slow[6] = { 1, 1, 1.5, 1, 1, 1.2 };
    EACH_ALGORITHM(a, HPML_CENTRAL)
        for (int stragglers = 0; stragglers < 2; stragglers++) {
            hpml_launch_desc   l   = { 0 };
            overlap_run        run = { 0, { 1e-3, 2e-3, 1e-3, 4e-3 }, { 60000, 30000, 120000, 1000 }, HPML_AUTO, NULL };
            hpml_simulate_desc d   = { 0 };
            hpml_simulation    s;
            char               error[256];
            run.a = (hpml_algorithm)a, run.slow = stragglers ? slow : NULL;
            l.transport = HPML_TRANSPORT_CLOCK, l.ranks = 6;
            l.network = nodes(3, false), l.network.slow = stragglers ? slow : NULL;
            ENSURE(hpml_launch(&l, overlap_rank, &run, error, sizeof error) == HPML_OK);
            d.ranks = 6, d.network = l.network, d.layers = 4, d.backward_s = run.backward, d.elements = run.n;
            d.bucket_bytes = 1, d.algorithm = run.a;
            ENSURE(hpml_simulate(&d, &s, error, sizeof error) == HPML_OK);
            ENSURE_CLOSE(s.step_s, run.end - 10, 0.03); /* rounding may decide who is first at a card */
            ENSURE(s.buckets == 4);
        }
}

/* Rings and all to alls played by symmetry, against the queue. */
TEST(short_cuts_equal_the_queue)
{
    static const int ps[] = { 4, 8, 24, 64, 264, 512 };
    for (int i = 0; i < 6 * 3 * 5 * 2; i++) {
        hpmlc_sim    s, q;
        int          p = ps[i % 6], net = i / 18 % 5;
        hpml_network w = net == 0 ? flat(5e-5, 1e9) : nodes(net == 1 ? 4 : net == 2 ? 8 : net == 3 ? 3 : 512, false);
        int64_t      n = i / 90 ? 200 * p : 100003;
        ENSURE(hpmlc_sim_open(&s, p, &w, 1, 0) && hpmlc_sim_open(&q, p, &w, 1, 0));
        q.plain = true;
        for (int twice = 0; twice < 2; twice++) {
            ENSURE(hpmlc_sim_play(&s, (hpmlc_sim_kind)(i / 6 % 3), HPML_RING, n, 4));
            ENSURE(hpmlc_sim_play(&q, (hpmlc_sim_kind)(i / 6 % 3), HPML_RING, n, 4));
        }
        bool ring = i / 6 % 3 != HPMLC_SIM_ALL_TO_ALL; /* blocks of unequal sizes get out of step in an all to all */
        ENSURE_CLOSE(hpmlc_sim_latest(&s), hpmlc_sim_latest(&q),
                     n % p == 0 ? (ring ? 1e-9 : 0.02) : ring ? 0.001 : 0.1);
        ENSURE(memcmp(s.bytes, q.bytes, sizeof(int64_t) * (size_t)p) == 0 && s.between == q.between);
        ENSURE(memcmp(s.messages, q.messages, sizeof(int64_t) * (size_t)p) == 0);
        hpmlc_sim_close(&s);
        hpmlc_sim_close(&q);
    }
}

TEST(stripes)
{
    for (int p = 2; p <= 256; p *= 2) { /* 2 (p-1) messages of n/p, whatever the algorithm */
        hpml_simulation s = one_layer(HPML_CENTRAL, p, flat(1e-4, 1e8), 65536, true);
        ENSURE_CLOSE(s.comm_s, 2 * (p - 1) * (1e-4 + 262144. / p * 1e-8), 1e-9);
        ENSURE(s.messages == 2 * (p - 1) && s.bytes_per_rank == 2 * (262144 - 262144 / p));
    }
    double  none = 0;
    int64_t n = 4000000, packed = n / 8 + 4000;
    hpml_simulate_desc d = { 0 };
    hpml_simulation    s;
    d.ranks = 16, d.network = flat(0, 12.5e6), d.layers = 1, d.backward_s = &none, d.elements = &n, d.packed = &packed;
    ENSURE(hpml_simulate(&d, &s, NULL, 0) == HPML_OK);
    ENSURE((double)one_layer(HPML_RING, 16, flat(0, 12.5e6), n, false).bytes_per_rank / (double)s.bytes_per_rank > 27);
    double without = s.comm_s;
    d.codec_s_per_byte = 1e-9;
    hpml_simulate(&d, &s, NULL, 0);
    ENSURE_NEAR(s.comm_s - without, 16e6 * 1e-9, 1e-9);
}

/* A ring of 8 on 2 nodes of 4: neighbours share a node (pack), or never do (spread). */
TEST(spread_and_pack)
{
    hpml_simulation pack = one_layer(HPML_RING, 8, nodes(4, false), 80000, false),
                    spread = one_layer(HPML_RING, 8, nodes(4, true), 80000, false);
    ENSURE(spread.between_bytes == 4 * pack.between_bytes);
    ENSURE(pack.between_bytes == 2 * 14 * 10000 * 4);
    ENSURE(spread.comm_s > 3 * pack.comm_s);
}

/* network.node with the placement of pack or spread gives their times; a mixture of both gives a time between. */
TEST(a_given_placement)
{
    static const int32_t pack[8] = { 0, 0, 0, 0, 1, 1, 1, 1 }, spread[8] = { 0, 1, 0, 1, 0, 1, 0, 1 };
    static const int32_t mixed[8] = { 0, 0, 0, 1, 1, 0, 1, 1 };
    EACH_ALGORITHM(a, HPML_AUTO)
        for (int kind = 0; kind < 2; kind++) {
            hpml_network n = nodes(3, kind == 0); /* ranks_per_node and spread do not count beside .node */
            n.node = kind == 0 ? pack : spread;
            hpml_simulation s = one_layer((hpml_algorithm)a, 8, n, 80000, a == 0);
            hpml_simulation same = one_layer((hpml_algorithm)a, 8, nodes(4, kind == 1), 80000, a == 0);
            ENSURE(s.comm_s > 0 && memcmp(&s, &same, sizeof s) == 0);
        }
    hpml_network n = nodes(0, false);
    n.node = mixed;
    hpml_simulation s = one_layer(HPML_RING, 8, n, 80000, false);
    ENSURE(s.between_bytes == 4 * 14 * 10000 * 4); /* four of the ring's eight steps leave a node */
    ENSURE(s.comm_s > one_layer(HPML_RING, 8, nodes(4, false), 80000, false).comm_s);
}

typedef struct ring_run {
    int64_t n;
    double  lead;   /* seconds until the common start, when all ranks have received the time of it */
    double  end[8]; /* of each rank, from that start on */
} ring_run;

static hpml_status ring_rank(hpml_comm *c, void *user)
{
    static float        x[8][100000];
    ring_run           *run  = (ring_run *)user;
    int                 rank = hpml_comm_rank(c);
    hpml_allreduce_desc d = { 0 };
    d.algorithm = HPML_RING;
    double start = hpml_comm_now(c) + run->lead; /* rank 0's clock decides, because ranks leave a barrier one after
    another */
    hpml_broadcast(c, &start, sizeof start, 0);
    hpml_comm_compute(c, start - hpml_comm_now(c));
    hpml_allreduce(c, x[rank], run->n, &d);
    run->end[rank] = hpml_comm_now(c) - start;
    return hpml_ctx_status(hpml_comm_ctx(c));
}

/* Returns the time that threads take for a ring over injected links, divided by the forecast: the smallest of several
   runs, because a busy machine delays some of them; on a busier machine the links are slower. 0: an error. */
static double ring_on_threads(int ranks, hpml_network net, int64_t bytes)
{
    double           ratio = 1e9;
    ring_run         run;
    hpml_launch_desc l = { 0 };
    l.ranks = ranks, l.ctx.threads = 1, run.n = bytes / 4;
    for (int tries = 0; tries < 10 && ratio > 1.05; tries++) {
        double last = 0;
        if (tries > 0 && tries % 2 == 0) net.between.latency *= 2, net.between.bandwidth /= 2;
        l.network = net, run.lead = 0.02 + 4 * net.between.latency;
        if (hpml_launch(&l, ring_rank, &run, NULL, 0) != HPML_OK) return 0;
        for (int r = 0; r < ranks; r++) last = fmax(last, run.end[r]);
        ratio = fmin(ratio, last / seconds(HPML_RING, ranks, net, bytes));
    }
    return ratio;
}

/* Rings in which some messages cross nodes and others do not. A send returns at once; if it waited for the receiver,
   the latencies of all nodes would add up. */
TEST(threads_behind_links_take_the_time_forecast)
{
    hpml_network late = flat(20e-3, 0);
    for (int per_node = 2; per_node <= 4; per_node++) {
        late.ranks_per_node = per_node;
        ENSURE_NEAR(ring_on_threads(2 * per_node, late, 400), 1, 0.1);
    }
}

/* The ratio of a ring's time on spread and on packed ranks is the one that is forecast. */
TEST(placement_on_links_takes_the_time_forecast)
{
    static const int32_t mixed[8] = { 0, 0, 0, 1, 1, 0, 1, 1 };
    for (int k = 0; k < 3; k++) {
        hpml_network net = nodes(4, k == 1);
        net.between.latency = 1e-3, net.between.bandwidth = 20e6;
        if (k == 2) net.node = mixed;
        ENSURE_NEAR(ring_on_threads(8, net, 400000), 1, 0.05); /* then the ratios agree to 10 % */
    }
}

/* ---- waits on a core that other programs need ---- */

typedef struct watch { /* of rank 0's wait */
    hpml_transport transport; /* of THREADS, with a test function that counts */
    bool           sent, slept;
    int            tests; /* calls of the transport's test before rank 0 sleeps */
} watch;
static watch watched;

static void watched_test(hpml_comm *c, hpml_message *m)
{
    watched.tests += !watched.slept;
    hpmlc_threads_test(c, m);
}

static void watched_block(hpml_comm *c, hpml_message *const *m, int count, double until)
{
    __atomic_store_n(&watched.slept, true, __ATOMIC_RELEASE);
    hpmlc_threads_block(c, m, count, until);
}

/* Rank 1 sends before rank 0 waits, or when rank 0 sleeps. */
static hpml_status watched_wait(hpml_comm *c, void *user)
{
    const bool before = *(bool *)user;
    char       byte   = 0;
    if (c->rank == 1) {
        while (!before && !__atomic_load_n(&watched.slept, __ATOMIC_ACQUIRE)) hpmlc_nap(1e-4);
        hpml_status status = hpml_send(c, 0, 1, &byte, 1);
        __atomic_store_n(&watched.sent, true, __ATOMIC_RELEASE);
        return status;
    }
    while (before && !__atomic_load_n(&watched.sent, __ATOMIC_ACQUIRE)) hpmlc_nap(1e-4);
    c->t = &watched.transport, c->spin_limit = HPMLC_SPIN_OWN_CORE; /* as where every rank has a core */
    __atomic_store_n(&yields_counted, true, __ATOMIC_RELAXED);
    hpml_status status = hpml_recv(c, 1, 1, &byte, 1);
    __atomic_store_n(&yields_counted, false, __ATOMIC_RELAXED);
    c->t = &hpmlc_threads;
    return status;
}

static bool watch_wait(bool before)
{
    hpml_launch_desc l = { 0 };
    l.ranks = 2, l.network = flat(before ? 0.05 : 0, 0), l.ctx.threads = 1;
    memset(&watched, 0, sizeof watched);
    watched.transport = hpmlc_threads, watched.transport.test = watched_test, watched.transport.block = watched_block;
    yields = 0;
    return hpml_launch(&l, watched_wait, &before, NULL, 0) == HPML_OK;
}

/* While a message is known to be in flight, a rank does not keep the core; it yields once where a yield takes a time
   slice of another program, because the scheduler delays a rank that has spun when its message arrives. */
TEST(a_wait_leaves_the_core_to_other_programs)
{
    ENSURE(watch_wait(true));
    ENSURE(watched.slept && watched.tests <= 2 && yields == 0);
    bool once = false; /* on a busy machine a yield takes a time slice often: up to 20 tries */
    for (int i = 0; i < 20 && !once; i++) {
        ENSURE(watch_wait(false));
        once = watched.slept && watched.tests <= HPMLC_SPIN_OWN_CORE + 3 && yields == 1;
    }
    ENSURE(once);
}

/* AUTO chooses an algorithm within 10 % of the best one that it considers, at any size and placement of ranks. Sizes
   are no powers of two, because AUTO has simulated those. */
TEST(auto_is_nearly_the_best)
{
    /* of 24 ranks and more, most are on node 0 */
    static const int32_t mixed[64] = { 0, 1, 1, 2, 0, 2, 2, 1, 0, 0, 1, 2, 2, 2, 0, 1, 2, 1 };
    static const int     ps[] = { 2, 4, 8, 16, 64, 256, 3, 5, 6, 7, 12, 13, 24, 48 };
    for (int i = 0; i < 14 * 7; i++)
        for (int64_t bytes = 1024; bytes <= 16 << 20; bytes = bytes * 17 / 40 * 4) {
            int          p = ps[i % 14], net = i / 14;
            hpml_network w = net == 0 ? flat(2e-5, 1.25e9)
                           : net == 1 ? flat(5e-5, 1.25e8) : nodes(net % 2 ? 2 : 4, net > 3);
            if (net == 3) w.between.bandwidth = 1.25e9;
            if (net == 6 && p > 3 && p <= 64) w.node = mixed;
            double best = 1e300, taken = seconds(HPML_AUTO, p, w, bytes);
            EACH_ALGORITHM(a, HPML_CENTRAL) /* that AUTO considers */
                if (hpmlc_algorithm_row((hpml_algorithm)a)->auto_ranks > 0)
                    best = fmin(best, seconds((hpml_algorithm)a, p, w, bytes));
            bool fine = taken <= 1.1 * best;
            if (!fine)
                printf("    network %d, %d ranks, %d bytes: %.2f times the best\n", net, p, (int)bytes, taken / best);
            ENSURE(fine);
        }
}

static hpml_status model(hpml_simulate_desc *d, int layers, double backward_s, int64_t elements, hpml_simulation *s)
{
    double  time[256];
    int64_t n[256];
    for (int i = 0; i < layers; i++) time[i] = backward_s / layers, n[i] = elements / layers;
    d->layers = layers, d->backward_s = time, d->elements = n;
    hpml_status status = hpml_simulate(d, s, NULL, 0);
    d->backward_s = NULL, d->elements = NULL;
    return status;
}

TEST(overlap)
{
    hpml_simulate_desc d = { 0 };
    hpml_simulation    with, without, half;
    d.ranks = 8, d.network = flat(0, 1e9), d.algorithm = HPML_RING, d.bucket_bytes = 1;
    double t = 2 * 7 / 8. * 4e6 * 20 / 1e9; /* 20 layers of 1e6 elements: backward takes as long as the exchange */
    ENSURE(model(&d, 20, t, 20000000, &with) == HPML_OK);
    d.no_overlap = true;
    ENSURE(model(&d, 20, t, 20000000, &without) == HPML_OK);
    d.no_overlap = false;
    ENSURE(model(&d, 20, 2 * t, 20000000, &half) == HPML_OK);
    ENSURE_CLOSE(without.step_s, 2 * t, 1e-9);
    ENSURE_CLOSE(with.step_s, t * 21 / 20, 1e-9); /* the last layer's exchange sticks out */
    ENSURE(with.step_s <= 0.65 * without.step_s);
    ENSURE(1 - half.exposed_s / half.comm_s >= 0.8);
    d.delayed = true;
    ENSURE(model(&d, 20, t, 20000000, &with) == HPML_OK);
    ENSURE_CLOSE(with.step_s, t, 1e-9);
}

TEST(fusion)
{
    hpml_simulate_desc d = { 0 };
    hpml_simulation    one, fused;
    d.ranks = 8, d.network = flat(50e-6, 1.25e9), d.algorithm = HPML_RING, d.bucket_bytes = 1;
    ENSURE(model(&d, 200, 5e-3, 200 * 500, &one) == HPML_OK);
    d.bucket_bytes = 0;
    ENSURE(model(&d, 200, 5e-3, 200 * 500, &fused) == HPML_OK);
    ENSURE(one.buckets == 200 && fused.buckets == 1);
    ENSURE(one.step_s >= 3 * fused.step_s);
    d.bucket_bytes = 50 * 500 * 4;
    ENSURE(model(&d, 200, 5e-3, 200 * 500, &fused) == HPML_OK && fused.buckets == 4);
}

TEST(more_bandwidth_is_never_slower)
{
    EACH_ALGORITHM(a, HPML_AUTO)
        for (int p = 2; p <= 128; p = p * 2 + (p == 8)) {
            double before = 1e300;
            for (double bandwidth = 1e6; bandwidth < 1e12; bandwidth *= 3) {
                hpml_network w = nodes(4, false);
                w.between.bandwidth = bandwidth, w.inside.bandwidth = 8 * bandwidth;
                double now = seconds(a == HPML_AUTO ? HPML_RING : (hpml_algorithm)a, p, w, 4000000);
                ENSURE(now <= before * (1 + 1e-12));
                before = now;
            }
        }
}

TEST(thousands_of_ranks)
{
    double start = hpml_now();
    EACH_ALGORITHM(a, HPML_CENTRAL) { /* PAIRWISE has p^2 messages in the queue */
        int p = a == HPML_PAIRWISE ? 512 : 4096;
        ENSURE(seconds((hpml_algorithm)a, p, nodes(8, false), 100 << 20) > 0);
    }
    ENSURE(seconds(HPML_RING, 4096, nodes(7, false), 1 << 20) > 0); /* the last node is not full: no symmetry */
    ENSURE(hpml_now() - start < 20); /* 0.2 s, but for sanitizers and busy machines */
    ENSURE(seconds(HPML_HALVING, 65536, flat(1e-5, 1e9), 1 << 20) > 0);
}

/* AUTO's forecasts for 32,768 ranks and four exchanges: no part takes time in the square of the ranks. Measured in
   seconds of CPU time: about 0.8, which a busy machine may double. */
TEST_LONG(a_model_on_tens_of_thousands_of_ranks)
{
    hpml_simulate_desc d = { 0 };
    hpml_simulation    s;
    double             start = (double)clock() / CLOCKS_PER_SEC;
    d.ranks = 32768, d.network = nodes(8, false);
    ENSURE(model(&d, 60, 0.1, 25000000, &s) == HPML_OK && s.buckets == 4 && s.efficiency > 0);
    ENSURE((double)clock() / CLOCKS_PER_SEC - start < 6);
}

TEST(stragglers)
{
    double             slow[64];
    hpml_simulate_desc d = { 0 };
    hpml_simulation    s;
    for (int i = 0; i < 64; i++) slow[i] = i == 17 ? 2 : 1;
    d.ranks = 64, d.network = flat(1e-6, 1e12), d.network.slow = slow, d.update_s = 0.1;
    ENSURE(model(&d, 10, 1, 100, &s) == HPML_OK);
    ENSURE_NEAR(s.step_s, 2.2, 1e-3);
    ENSURE_NEAR(s.straggle_s, 1.1, 1e-9);
    ENSURE_NEAR(s.efficiency, 0.5, 1e-3);
    ENSURE_NEAR(s.step_s, s.compute_s + s.straggle_s + s.exposed_s, 1e-12);
}

TEST(rules_of_thumb)
{
    ENSURE_NEAR(hpml_amdahl(0.1, 1e9), 10, 1e-6);
    ENSURE_NEAR(hpml_amdahl(0, 64), 64, 1e-9);
    ENSURE_NEAR(hpml_optimal_ranks(0.5, 0.01, 0.06), 10, 1e-9);
    ENSURE(hpml_optimal_ranks(1, 0.1, 0.1) > 1e300);
    /* At the optimum computing takes as long as communicating. */
    double k = hpml_optimal_ranks(2, 0.05, 0.3);
    ENSURE_NEAR(2 / k + 0.05, 0.3, 1e-12);
}

TEST(a_forecast_below_a_half_warns)
{
    char               text[512];
    double             exchange = 2 * 7 * (1e-3 + 4e6 / 8 / 1e8); /* a ring of 8, nothing hidden: 84 ms */
    hpml_simulate_desc d = { 0 };
    hpml_simulation    s;
    d.ranks = 8, d.network = flat(1e-3, 1e8), d.algorithm = HPML_RING, d.no_overlap = true;
    for (double compute = 0.01; compute < 1; compute *= 1.7) {
        ENSURE(model(&d, 10, compute, 1000000, &s) == HPML_OK);
        ENSURE_CLOSE(s.efficiency, compute / (compute + exchange), 1e-6);
        ENSURE(hpml_simulate_text(&s, text, sizeof text) == (int)strlen(text));
        ENSURE((strstr(text, ", below 50 %: ranks wait") != NULL) == (compute < exchange));
        double more = strstr(text, "batches ") ? atof(strstr(text, "batches ") + 8) : 1;
        ENSURE(model(&d, 10, compute * more, 1000000, &s) == HPML_OK);
        ENSURE(more <= 1 || fabs(s.efficiency - 0.5) < 0.01); /* with batches as much larger as the text says,
        efficiency is 50 % */
    }
    ENSURE(hpml_simulate_text(NULL, text, sizeof text) == 0 &&
           hpml_simulate_text(&s, text, 9) > 9 && strlen(text) == 8);
}

TEST(errors)
{
    double             t = 1, bad = -1;
    int64_t            n = 10;
    hpml_simulate_desc d = { 0 };
    hpml_simulation    s;
    char               error[300];
    ENSURE(hpml_simulate(NULL, &s, error, sizeof error) == HPML_ERR_ARGUMENT && strstr(error, "no desc"));
#define REFUSED(change, undo, words)                                                \
    change;                                                                         \
    ENSURE(hpml_simulate(&d, &s, error, sizeof error) < 0 && strstr(error, words)); \
    undo
    REFUSED(, , "0 ranks");
    REFUSED(d.ranks = 70000, d.ranks = 4, "70000");
    REFUSED(, , "at least one layer");
    d.layers = 1, d.backward_s = &t, d.elements = &n;
    ENSURE(hpml_simulate(&d, &s, error, sizeof error) == HPML_OK && error[0] == 0);
    REFUSED(d.backward_s = &bad, d.backward_s = &t, "layer 0");
    REFUSED(n = -1, n = 10, "layer 0");
    REFUSED(n = INT64_MAX, n = 10, "2^50");
    REFUSED(d.algorithm = HPML_NATIVE, d.algorithm = HPML_AUTO, "choose another");
    REFUSED(d.algorithm = (hpml_algorithm)99, d.algorithm = HPML_AUTO, "algorithm 99");
    REFUSED(d.network.between.bandwidth = 1e9, d.network.between.bandwidth = 0, "ranks_per_node");
    REFUSED(d.network.inside.latency = NAN, d.network.inside.latency = 0, "NaN");
    REFUSED(d._end = 1, d._end = 0, "canary");
    const int32_t outside[4] = { 0, 4, 1, 0 }, below[4] = { 0, 0, -1, 0 };
    REFUSED(d.network.node = outside, d.network.node = NULL, "from 0 to 3");
    REFUSED(d.network.node = below, d.network.node = NULL, "from 0 to 3");
    hpml_launch_desc l = { 0 };
    l.ranks = 4, l.network.node = outside;
    ENSURE(hpml_launch(&l, ring_rank, NULL, error, sizeof error) == HPML_ERR_ARGUMENT && strstr(error, "from 0 to 3"));
    ENSURE(!hpml_world_create(HPML_TRANSPORT_CLOCK, 4, &l.network));
    REFUSED(d.network.slow = &bad, d.network.slow = NULL, "slow[0]");
    REFUSED(d.update_s = INFINITY, d.update_s = 0, "update_s");
    ENSURE(hpml_simulate(&d, NULL, error, sizeof error) == HPML_ERR_ARGUMENT);
    ENSURE(hpml_simulate_allreduce(HPML_RING, 0, &d.network, 4) < 0 &&
           hpml_simulate_allreduce(HPML_RING, 4, NULL, 4) < 0);
    d.ranks = 1;
    ENSURE(hpml_simulate(&d, &s, NULL, 0) == HPML_OK);
    ENSURE_NEAR(s.efficiency, 1, 0);
}

static hpml_status at_once(hpml_comm *c, void *user)
{
    float x = 1;
    hpml_barrier(c);
    if (hpml_comm_rank(c) == 0) no_more = true;
    hpml_barrier(c);
    for (int i = 0; i < 3; i++) hpml_job_wait(hpml_iallreduce(c, &x, 1, NULL));
    if (x != 8) *(bool *)user = false;
    return hpml_ctx_status(hpml_comm_ctx(c));
}

TEST(background_jobs_run_when_started_where_no_thread_can_be_created)
{
    for (int clock = 0; clock < 2; clock++) {
        hpml_launch_desc l = { .transport = clock ? HPML_TRANSPORT_CLOCK : HPML_TRANSPORT_THREADS,
                               .ranks = 2, .timeout = 20 };
        bool             good = true;
        ENSURE(hpml_launch(&l, at_once, &good, NULL, 0) == HPML_OK && good);
        no_more = false;
    }
}
