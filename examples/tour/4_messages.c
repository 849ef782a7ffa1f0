/* A tour of ranks: messages, collectives, work in the background, exchanges in fewer bytes. Difficulty 2 of 4.
   cc -O2 examples/tour/4_messages.c -o messages -lm -lpthread && ./messages
   Four ranks in virtual time, on two nodes; rank 0 prints the conditions that hold, and WRONG before one that does not;
   exits with 1 then. */
#define HPML_IMPLEMENTATION
#include "../../hpml_comm.h"
#include "tour.h"
#include <stdlib.h>
#include <string.h>

/* SHOW on rank 0 alone. */
#define SHOW_AT(c, condition) do { if (hpml_comm_rank(c) == 0) SHOW(condition); } while (0)

static void two_ranks(hpml_comm *c)
{
    const int    r = hpml_comm_rank(c), p = hpml_comm_size(c), right = (r + 1) % p, left = (r + p - 1) % p;
    float        mine = (float)r, other = -1, root = 7;
    hpml_message out, in;
    SHOW_AT(c, hpml_comm_node(c, 1) == 0 && hpml_comm_node(c, 2) == 1);
    hpml_irecv(c, left, 0, &other, sizeof other, &in);
    hpml_isend(c, right, 0, &mine, sizeof mine, &out);
    SHOW_AT(c, hpml_test(c, &in) == in.done); /* looks, but does not wait */
    hpml_wait(c, &in);
    hpml_wait(c, &out);
    SHOW_AT(c, other == 3);
    SHOW_AT(c, hpml_comm_messages_to(c, 1) == 1 && hpml_comm_bytes_to(c, 1) == 4);
    hpml_broadcast(c, &root, sizeof root, 3);
    SHOW_AT(c, root == 7);
}

static hpml_status sum_of_ranks(hpml_comm *twin, void *user)
{
    return hpml_allreduce(twin, user, 1, NULL);
}

static void together(hpml_comm *c)
{
    hpml_move m;
    float     sum = (float)hpml_comm_rank(c);
    hpml_job *job = hpml_background(c, sum_of_ranks, &sum); /* every rank starts the same work */
    (void)hpml_job_done(job);                               /* looks, but does not wait */
    hpml_job_wait(job);
    SHOW_AT(c, sum == 0 + 1 + 2 + 3);
    SHOW_AT(c, hpml_element_size(HPML_ELEMENT_BF16) == 2);
    SHOW_AT(c, hpml_comm_choose(c, 1 << 20) != HPML_AUTO); /* the fastest for 1 MB on these links */
    SHOW_AT(c, hpml_allreduce_move(HPML_RING, 4, 4, 0, 8, 0, &m) && m.to == 1 && m.from == 3 && m.send_count == 2);
    SHOW_AT(c, !hpml_allreduce_move(HPML_RING, 4, 4, 0, 8, 6, &m)); /* a ring of 4 has 6 rounds */
    hpml_comm *node = hpml_comm_split_node(c);
    SHOW_AT(c, hpml_comm_size(node) == 2);
    hpml_comm_free(node);
}

/* 1 bit for each number: the residual is what has not been sent yet. */
static void fewer_bytes(hpml_comm *c)
{
    float             *grad = (float *)hpml_ctx_alloc(hpml_comm_ctx(c), 4096 * sizeof(float), NULL);
    float              before = 0;
    hpml_gradient      g = { "w", grad, 64, 64 };
    hpml_exchange_desc d = { .count = 1, .tensors = &g, .codec.kind = HPML_CODEC_ONEBIT, .reduce = HPML_MEAN };
    hpml_exchange     *x = hpml_exchange_create(c, &d);
    int64_t            count = 0, row = 0, rows = 0;
    for (int i = 0; i < 4096; i++) grad[i] = (float)(i % 5) - 2 + (float)hpml_comm_rank(c);
    before = grad[0];
    SHOW_AT(c, hpml_exchange_bytes(x) < 4 * 4096 / 8);
    hpml_job_wait(hpml_exchange_start(x)); /* in the background; hpml_exchange_run waits */
    float *left_over = hpml_exchange_residual(x, 0, &count);
    SHOW_AT(c, count == 4096 && left_over[0] != 0 && left_over[0] != before);
    hpml_exchange_stripe(x, 0, &row, &rows); /* the rows that this rank adds up */
    SHOW_AT(c, row == 0 && rows == 16);
    hpml_exchange_free(x);
    SHOW_AT(c, hpml_comm_set_link(c, NULL) == HPML_OK); /* no device link: arrays are in host memory */
}

static hpml_status ranks(hpml_comm *c, void *user)
{
    (void)user;
    two_ranks(c);
    together(c);
    fewer_bytes(c);
    return hpml_ctx_status(hpml_comm_ctx(c));
}

/* Without hpml_launch: a world of ranks, each with a context of its own; here of one rank. */
static void own_threads(void)
{
    hpml_ctx   *ctx   = hpml_ctx_create(NULL);
    hpml_world *world = hpml_world_create(HPML_TRANSPORT_THREADS, 1, NULL);
    hpml_comm  *c     = hpml_comm_create(ctx, &(hpml_comm_desc){ .world = world });
    SHOW(hpml_comm_size(c) == 1 && strcmp(hpml_comm_transport(c), "threads") == 0);
    tour_wrong |= tour_end(ctx); /* frees the communicator, too */
    hpml_world_free(world);
}

int main(void)
{
    char             error[512];
    hpml_launch_desc d = { .run = "clock:4", .network = { .ranks_per_node = 2, .inside = { 1e-6, 10e9 },
                                                           .between = { 20e-6, 125e6 } } };
    if (hpml_launch(&d, ranks, NULL, error, sizeof error) != HPML_OK) return printf("%s\n", error), 1;
    own_threads();
    return tour_wrong;
}
