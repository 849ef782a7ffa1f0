/* What exercises are graded by: the depth of messages, received and held bytes, the counters of all ranks, the message
   log, communicators without collectives, deadlines in virtual time, the time limit of a launch. */
#include "../hpml_comm.h"
#include "test.h"
#include "check.h"

static const hpml_transport_kind transports[] = { HPML_TRANSPORT_THREADS, HPML_TRANSPORT_CLOCK };

enum { MAX_RANKS = 8 };
static char          error[768];
static hpml_counters all[MAX_RANKS];

static hpml_launch_desc desc_of(hpml_transport_kind transport, int ranks)
{
    hpml_launch_desc d;
    memset(&d, 0, sizeof d);
    d.transport = transport;
    d.ranks     = ranks;
    d.counters  = all;
    return d;
}

static hpml_status launch(const hpml_launch_desc *d, hpml_rank_fn *fn, void *user)
{
    memset(all, 0x5a, sizeof all); /* hpml_launch clears it */
    return hpml_launch(d, fn, user, error, sizeof error);
}

static int64_t depth_of(int ranks)
{
    int64_t depth = 0;
    for (int r = 0; r < ranks; r++) depth = all[r].depth > depth ? all[r].depth : depth;
    return depth;
}

/* ---- depth ---- */

typedef enum pattern { RING, STAR, STAR_BACK, TREE, ONE_AFTER_ANOTHER, PATTERNS } pattern;

static hpml_status messages(hpml_comm *c, void *user)
{
    int p = hpml_comm_size(c), me = hpml_comm_rank(c), x = 0, y = 0;
    switch (*(pattern *)user) {
    case RING:
        for (int k = 0; k < 2 * (p - 1); k++)
            CHECK(hpml_sendrecv(c, (me + 1) % p, &x, sizeof x, (me + p - 1) % p, &y, sizeof y, 0) == HPML_OK);
        break;
    case STAR:
        for (int r = 1; r < p && me == 0; r++) CHECK(hpml_send(c, r, 0, &x, sizeof x) == HPML_OK);
        if (me > 0) CHECK(hpml_recv(c, 0, 0, &x, sizeof x) == HPML_OK);
        break;
    case STAR_BACK:
        for (int r = 1; r < p && me == 0; r++) CHECK(hpml_recv(c, r, 0, &x, sizeof x) == HPML_OK);
        if (me > 0) CHECK(hpml_send(c, 0, 0, &x, sizeof x) == HPML_OK);
        break;
    case TREE:
        for (int k = 1; k < p; k *= 2) {
            if (me >= k && me < 2 * k) CHECK(hpml_recv(c, me - k, 0, &x, sizeof x) == HPML_OK);
            if (me < k && me + k < p) CHECK(hpml_send(c, me + k, 0, &x, sizeof x) == HPML_OK);
        }
        break;
    default: /* a ring in which each rank sends when it has received */
        if (me > 0) CHECK(hpml_recv(c, me - 1, 0, &x, sizeof x) == HPML_OK);
        if (me + 1 < p) CHECK(hpml_send(c, me + 1, 0, &x, sizeof x) == HPML_OK);
    }
    return HPML_OK;
}

TEST(depth_is_the_number_of_rounds)
{
    for (int t = 0; t < 2; t++)
        for (int p = 1; p <= MAX_RANKS; p++) {
            int log2 = 0;
            while (1 << log2 < p) log2++;
            const int64_t expected[PATTERNS] = { 2 * (p - 1), p - 1, p - 1, log2, p - 1 };
            for (int k = 0; k < PATTERNS; k++) {
                hpml_launch_desc d    = desc_of(transports[t], p);
                pattern          what = (pattern)k;
                ENSURE(launch(&d, messages, &what) == HPML_OK);
                if (depth_of(p) != expected[k])
                    printf("    pattern %d, %d ranks: %lld\n", k, p, (long long)depth_of(p));
                ENSURE(depth_of(p) == expected[k]);
            }
        }
}

static hpml_status one_allreduce(hpml_comm *c, void *user)
{
    hpml_allreduce_desc d;
    float               x[64] = { 0 };
    memset(&d, 0, sizeof d);
    d.algorithm = *(hpml_algorithm *)user;
    return hpml_allreduce(c, x, 64, &d);
}

TEST(collectives_have_the_depth_of_their_rounds)
{
    static const struct { hpml_algorithm a; int64_t depth; } cases[] = {
        { HPML_RING, 14 }, { HPML_BUTTERFLY, 3 }, { HPML_HALVING, 6 }, { HPML_TREE, 6 }, { HPML_CENTRAL, 14 } };
    for (int t = 0; t < 2; t++)
        for (int k = 0; k < 5; k++) {
            hpml_launch_desc d = desc_of(transports[t], 8);
            hpml_algorithm   a = cases[k].a;
            ENSURE(launch(&d, one_allreduce, &a) == HPML_OK);
            if (depth_of(8) != cases[k].depth)
                printf("    %s: %lld\n", hpml_algorithm_name(a), (long long)depth_of(8));
            ENSURE(depth_of(8) == cases[k].depth);
        }
}

/* The chain goes through a part (1 to 2, after 0 to 1) and through background work (2 to 3 and back to 2). */
static hpml_status in_background(hpml_comm *twin, void *user)
{
    char x = 0;
    int  me = hpml_comm_rank(twin);
    (void)user;
    if (me == 2) return hpml_send(twin, 3, 0, &x, 1);
    return me == 3 ? hpml_recv(twin, 2, 0, &x, 1) : HPML_OK;
}

static hpml_status through_parts(hpml_comm *c, void *user)
{
    char       x = 0;
    int        me = hpml_comm_rank(c);
    hpml_comm *part = hpml_comm_split(c, me == 1 || me == 2, 0);
    CHECK(part && hpml_job_wait(hpml_background(c, in_background, user)) == HPML_OK);
    CHECK(hpml_barrier(c) == HPML_OK); /* after which no message is on its way */
    hpml_comm_counters_reset(c);
    hpml_comm_counters_reset(part);
    if (me == 0) CHECK(hpml_send(c, 1, 0, &x, 1) == HPML_OK);
    if (me == 1) CHECK(hpml_recv(c, 0, 0, &x, 1) == HPML_OK && hpml_send(part, 1, 0, &x, 1) == HPML_OK);
    if (me == 2) CHECK(hpml_recv(part, 0, 0, &x, 1) == HPML_OK);
    CHECK(hpml_job_wait(hpml_background(c, in_background, user)) == HPML_OK);
    if (me == 3) CHECK(hpml_send(c, 2, 0, &x, 1) == HPML_OK);
    if (me == 2) CHECK(hpml_recv(c, 3, 0, &x, 1) == HPML_OK);
    hpml_comm_counters(c, &((hpml_counters *)user)[me]);
    return HPML_OK;
}

TEST(depth_goes_on_through_parts_and_background_work)
{
    hpml_counters    after[4];
    hpml_launch_desc d = desc_of(HPML_TRANSPORT_CLOCK, 4);
    ENSURE(launch(&d, through_parts, after) == HPML_OK);
    ENSURE(after[1].depth == 1 && after[3].depth == 3 && after[2].depth == 4);
}

/* ---- counters ---- */

static hpml_status uneven(hpml_comm *c, void *user)
{
    char       x[1000] = { 0 };
    int        p = hpml_comm_size(c), me = hpml_comm_rank(c);
    hpml_comm *part;
    (void)user;
    for (int r = 1; r < p && me > 0; r++) /* rank r sends r messages to rank 0 */
        if (me >= r) CHECK(hpml_send(c, 0, 1, x, 1000) == HPML_OK);
    if (me == 0) hpml_comm_compute(c, 1);
    for (int r = 1; r < p && me == 0; r++)
        for (int k = 0; k < r; k++) CHECK(hpml_recv(c, r, 1, x, 1000) == HPML_OK);
    part = hpml_comm_split(c, me == p - 1, 0);
    CHECK(part);
    if (hpml_comm_size(part) > 1 && me == 0) CHECK(hpml_send(part, 1, 2, x, 7) == HPML_OK);
    if (hpml_comm_size(part) > 1 && me == 1) CHECK(hpml_recv(part, 0, 2, x, 7) == HPML_OK);
    hpml_comm_free(part);
    return hpml_job_wait(hpml_iallreduce(c, x, 3, NULL));
}

TEST(a_launch_returns_the_counters_of_all_ranks)
{
    enum { P = 4 };
    for (int t = 0; t < 2; t++) {
        hpml_launch_desc d = desc_of(transports[t], P);
        int64_t          sent = 0, received = 0, sent_bytes = 0, received_bytes = 0;
        ENSURE(launch(&d, uneven, NULL) == HPML_OK);
        for (int r = 0; r < P; r++) {
            sent += all[r].messages;
            received += all[r].received_messages;
            sent_bytes += all[r].bytes;
            received_bytes += all[r].received_bytes;
        }
        ENSURE(sent == received && sent_bytes == received_bytes && sent_bytes > 6007);
        ENSURE(all[0].received_bytes >= 6000 && all[1].bytes >= 1000 && all[3].bytes >= 3000);
        ENSURE(all[0].bytes - all[1].bytes != 0 && all[0].seconds >= 0);
        if (transports[t] == HPML_TRANSPORT_CLOCK) /* 3 ranks begin the split, by 8 bytes, before rank 0 receives */
            ENSURE(all[0].held_bytes == 6000 + 24 && all[3].held_bytes < 100);
    }
}

static hpml_status fails(hpml_comm *c, void *user)
{
    char x = 0;
    (void)user;
    if (hpml_comm_rank(c) == 0) CHECK(hpml_send(c, 1, 0, &x, 1) == HPML_OK);
    if (hpml_comm_rank(c) == 1) CHECK(hpml_recv(c, 0, 0, &x, 1) == HPML_OK);
    return hpml_comm_rank(c) == 1 ? HPML_ERR_STATE : HPML_OK;
}

TEST(counters_come_back_from_a_launch_that_failed)
{
    hpml_launch_desc d = desc_of(HPML_TRANSPORT_CLOCK, 2);
    ENSURE(launch(&d, fails, NULL) == HPML_ERR_STATE);
    ENSURE(all[0].messages == 1 && all[1].received_bytes == 1);
}

/* ---- messages only ---- */

static hpml_status collective_number(hpml_comm *c, void *user)
{
    float x[4] = { 0 }, y[16] = { 0 };
    switch (*(int *)user) {
    case 0: return hpml_allreduce(c, x, 4, NULL);
    case 1: return hpml_broadcast(c, x, 4, 0);
    case 2: return hpml_barrier(c);
    case 3: return hpml_reduce_scatter(c, x, 4, HPML_ELEMENT_F32, HPML_SUM);
    case 4: return hpml_gather(c, x, 4, y, 0);
    case 5: hpml_job_wait(hpml_iallreduce(c, x, 4, NULL)); /* NULL where another rank has failed before */ break;
    case 6: return hpml_mix(c, x, 4, HPML_TOPOLOGY_RING, 0, 0);
    default: return hpml_comm_tune(c);
    }
    return hpml_ctx_status(hpml_comm_ctx(c));
}

static hpml_status only_sends(hpml_comm *c, void *user)
{
    hpml_comm *part = hpml_comm_split(c, hpml_comm_rank(c) % 2, 0);
    int        x = 1, y = 0;
    (void)user;
    CHECK(part);
    CHECK(hpml_sendrecv(part, 0, &x, sizeof x, 0, &y, sizeof y, 0) == HPML_OK || hpml_comm_rank(part) > 0);
    return HPML_OK;
}

static hpml_status collective_of_a_part(hpml_comm *c, void *user)
{
    (void)user;
    return hpml_barrier(hpml_comm_split(c, hpml_comm_rank(c) % 2, 0));
}

TEST(only_messages_refuses_collectives)
{
    for (int k = 0; k < 8; k++) {
        hpml_launch_desc d = desc_of(HPML_TRANSPORT_THREADS, 4);
        d.only_messages    = true;
        const hpml_status status = launch(&d, collective_number, &k);
        if (status != HPML_ERR_UNSUPPORTED) printf("    collective %d: %d, %s\n", k, (int)status, error);
        ENSURE(status == HPML_ERR_UNSUPPORTED);
        ENSURE(strstr(error, ".only_messages") && strstr(error, "hpml_sendrecv"));
        d.only_messages = false;
        ENSURE(launch(&d, collective_number, &k) == HPML_OK);
    }
    hpml_launch_desc d = desc_of(HPML_TRANSPORT_CLOCK, 2);
    d.only_messages    = true;
    ENSURE(launch(&d, only_sends, NULL) == HPML_OK);
    ENSURE(launch(&d, collective_of_a_part, NULL) == HPML_ERR_UNSUPPORTED);
}

/* ---- deadlines ---- */

typedef struct slow_peer {
    double computes, waited; /* seconds that rank 1 computes; virtual time at which rank 0's wait was over */
    bool   never;            /* rank 1 sends nothing */
    bool   any;              /* rank 0 waits by hpml_wait_any */
} slow_peer;

static hpml_status waits_for_slow(hpml_comm *c, void *user)
{
    slow_peer   *s = (slow_peer *)user;
    char         x = 0;
    hpml_message m, *list[1] = { &m };
    hpml_status  status;
    if (hpml_comm_rank(c) == 1) {
        for (int i = 0; i < 100; i++) hpml_comm_compute(c, s->computes / 100);
        return s->never ? HPML_OK : hpml_send(c, 0, 0, &x, 1);
    }
    hpml_irecv(c, 1, 0, &x, 1, &m);
    if (s->any) status = hpml_wait_any(c, list, 1, -1) == 0 ? HPML_OK : hpml_ctx_status(hpml_comm_ctx(c));
    else status = hpml_wait(c, &m);
    s->waited = hpml_comm_now(c);
    return status;
}

TEST(a_wait_in_virtual_time_ends_at_its_deadline)
{
    for (int any = 0; any < 2; any++) {
        slow_peer        s = { 100, 0, false, any == 1 };
        hpml_launch_desc d = desc_of(HPML_TRANSPORT_CLOCK, 2);
        ENSURE(launch(&d, waits_for_slow, &s) == HPML_OK); /* no deadline */
        ENSURE_NEAR(s.waited, 100, 1e-9);
        d.timeout = 101;
        ENSURE(launch(&d, waits_for_slow, &s) == HPML_OK);
        d.timeout = 99;
        ENSURE(launch(&d, waits_for_slow, &s) == HPML_ERR_TIMEOUT);
        ENSURE_NEAR(s.waited, 99, 1e-9);
        ENSURE(strstr(error, "waited 99 s of virtual time for rank 1"));
        s.never = true;
        ENSURE(launch(&d, waits_for_slow, &s) == HPML_ERR_TIMEOUT); /* before rank 1 leaves, which is a deadlock */
        d.timeout = 101;
        ENSURE(launch(&d, waits_for_slow, &s) == HPML_ERR_COMM);
    }
}

static hpml_status link_too_slow(hpml_comm *c, void *user)
{
    char x = 0;
    (void)user;
    return hpml_comm_rank(c) == 0 ? hpml_recv(c, 1, 0, &x, 1) : hpml_send(c, 0, 0, &x, 1);
}

static hpml_status both_receive(hpml_comm *c, void *user)
{
    char x = 0;
    (void)user;
    return hpml_recv(c, 1 - hpml_comm_rank(c), 0, &x, 1);
}

TEST(a_message_that_arrives_after_the_deadline_is_late_and_a_deadlock_remains_one)
{
    hpml_launch_desc d = desc_of(HPML_TRANSPORT_CLOCK, 2);
    d.network.inside.latency = 10;
    d.timeout                = 9;
    ENSURE(launch(&d, link_too_slow, NULL) == HPML_ERR_TIMEOUT && strstr(error, "virtual time"));
    d.timeout = 11;
    ENSURE(launch(&d, link_too_slow, NULL) == HPML_OK);
    ENSURE(launch(&d, both_receive, NULL) == HPML_ERR_COMM && strstr(error, "deadlock"));
}

static hpml_status endless(hpml_comm *c, void *user)
{
    char         x = 0;
    hpml_message m, *list[1] = { &m };
    if (hpml_comm_rank(c) == 1) return hpml_recv(c, 0, 0, &x, 1);
    hpml_irecv(c, 1, 0, &x, 1, &m);
    while (hpml_ctx_status(hpml_comm_ctx(c)) == HPML_OK)
        switch (*(int *)user) {
        case 0: hpml_wait_any(c, list, 1, 1e-3); break;
        case 1: hpml_send(c, 2, 5, &x, 1); break;
        default: hpml_comm_compute(c, 1e-3); break;
        }
    if (*(int *)user > 0) hpml_wait(c, &m);
    return HPML_OK; /* a student who ignores errors */
}

static hpml_status receives_for_ever(hpml_comm *c, void *user)
{
    char x = 0;
    if (hpml_comm_rank(c) < 2) return endless(c, user);
    while (*(int *)user == 1 && hpml_recv(c, 0, 5, &x, 1) == HPML_OK) {}
    return HPML_OK;
}

TEST(a_time_limit_ends_a_launch)
{
    for (int t = 0; t < 2; t++)
        for (int k = 0; k < 2 + t; k++) { /* only in virtual time a computation asks whether the limit is over */
            hpml_launch_desc d = desc_of(transports[t], 3);
            d.time_limit       = 0.2;
            ENSURE(launch(&d, receives_for_ever, &k) == HPML_ERR_TIMEOUT);
            ENSURE(strstr(error, "not over after 0.2 s (.time_limit)"));
            const bool asleep = t == 0 || k != 1; /* in virtual time sends take no time: no other rank gets a turn */
            ENSURE(!asleep || strstr(error, "rank 1 waits for rank 0 in receive"));
        }
    hpml_launch_desc d = desc_of(HPML_TRANSPORT_THREADS, 4);
    pattern          ring = RING;
    d.time_limit = 60; /* returns at once */
    double start = hpml_now();
    ENSURE(launch(&d, messages, &ring) == HPML_OK && hpml_now() - start < 30);
}

/* ---- the log ---- */

static hpml_status logged(hpml_comm *c, void *user)
{
    char x[100] = { 0 };
    (void)user;
    if (hpml_comm_rank(c) == 0) {
        hpml_comm_compute(c, 2);
        CHECK(hpml_send(c, 1, 3, x, 100) == HPML_OK);
        CHECK(hpml_send(c, 1, 4, x, 50) == HPML_OK);
    } else {
        CHECK(hpml_recv(c, 0, 3, x, 100) == HPML_OK);
        hpml_comm_compute(c, 20);
        CHECK(hpml_recv(c, 0, 4, x, 50) == HPML_OK);
    }
    return HPML_OK;
}

static bool is_record(const hpml_message_record *r, int from, int to, int tag, int64_t bytes, double start, double end)
{
    return r->from == from && r->to == to && r->tag == tag && r->bytes == bytes && fabs(r->start - start) < 1e-9 &&
           fabs(r->end - end) < 1e-9;
}

TEST(the_log_has_each_message_and_computation)
{
    hpml_message_record record[4];
    hpml_message_log    log;
    hpml_launch_desc    d = desc_of(HPML_TRANSPORT_CLOCK, 2);
    memset(&log, 0, sizeof log);
    log.record   = record;
    log.capacity = 4;
    d.log        = &log;
    d.network.inside.latency = 1, d.network.inside.bandwidth = 100;
    for (int run = 0; run < 2; run++) {
        ENSURE(launch(&d, logged, NULL) == HPML_OK);
        ENSURE(log.count == 4 && is_record(&record[0], 0, 0, -1, 0, 0, 2));
        ENSURE(is_record(&record[1], 0, 1, 3, 100, 2, 4) && record[1].depth == 1);
        ENSURE(is_record(&record[2], 1, 1, -1, 0, 4, 24));
        ENSURE(is_record(&record[3], 0, 1, 4, 50, 2, 4.5) && record[3].depth == 2);
    }
    memset(record, 0, sizeof record);
    log.capacity = 3; /* the others are only counted */
    ENSURE(launch(&d, logged, NULL) == HPML_OK);
    ENSURE(log.count == 4 && record[2].to == 1 && record[3].to == 0);
    d.transport = HPML_TRANSPORT_THREADS;
    memset(&d.network, 0, sizeof d.network);
    log.capacity = 4;
    pattern ring = RING;
    ENSURE(launch(&d, messages, &ring) == HPML_OK && log.count == 4);
    for (int i = 0; i < 4; i++) ENSURE(record[i].bytes == 4 && record[i].start > 0 && record[i].end >= record[i].start);
    log.record = NULL;
    ENSURE(launch(&d, messages, &ring) == HPML_ERR_ARGUMENT && strstr(error, ".log"));
}
