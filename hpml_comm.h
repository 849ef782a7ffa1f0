// hpml_comm.h - v0.1.0 - many workers in step: transports, collectives, 1-bit exchange, overlap - MIT licence (see hpml.h)
//
// Do this in exactly one C or C++ file:
//     #define HPML_IMPLEMENTATION
//     #include "hpml_comm.h"
// It includes hpml.h. Build: cc -O2 my.c -lm -lpthread; with MPI: mpicc -O2 -DHPML_USE_MPI my.c -lm -lpthread
//
// QUICK EXAMPLE: four ranks, threads of one process, add up what each has
//
//     #define HPML_IMPLEMENTATION
//     #include "hpml_comm.h"
//     #include <stdio.h>
//
//     static hpml_status rank_main(hpml_comm *comm, void *user)
//     {
//         float x[2] = { 1, (float)hpml_comm_rank(comm) };
//         (void)user;
//         hpml_allreduce(comm, x, 2, NULL);
//         if (hpml_comm_rank(comm) == 0) printf("%g ranks, sum of their numbers %g\n", x[0], x[1]);
//         return hpml_ctx_status(hpml_comm_ctx(comm));
//     }
//
//     int main(void)
//     {
//         return hpml_launch(&(hpml_launch_desc){ .ranks = 4 }, rank_main, NULL, NULL, 0) != HPML_OK;
//     }
//
// hpml_comm.h DOES NOT
//     - need MPI: ranks are threads of one process unless you ask for mpiexec's
//     - start processes, open sockets or choose a network: that is the launcher's and MPI's
//     - hang: every wait has a deadline and ends in an error that names rank, peer, operation and step
//     - choose between sum and mean, or change a learning rate, without being told
//
// OPTIONS, defined before the include that has HPML_IMPLEMENTATION
//     HPML_USE_MPI                 the MPI transport (compile with mpicc)
//     HPML_COMM_IMPLEMENTATION     only this header's body: split builds, where another file has hpml.h's
//
// THREADS: a communicator belongs to its rank's thread, as the context it hangs on. With collectives in the background
// (>>api-async) a thread of the communicator's own works on a twin of it.
// SAME BITS: results do not depend on timing; every rank gets the same bits. The order of additions, and so the last bit,
// depends on algorithm and number of ranks, unless you ask for exact sums (>>api-distribute).
//
// INDEX (grep '^// >>' hpml_comm.h)
//     api-comm   ranks and communicators
//     api-messages   point to point
//     api-collectives   all ranks together
//     api-async   collectives in the background
//     base   system headers, what communicators are made of
//     messages   sending, receiving, waiting
//     world   ranks as threads: inboxes, links, deadlock
//     threads-transport   messages between threads
//     mpi   messages between processes, by MPI
//     clock   messages in virtual time
//     create   creating, splitting, freeing communicators
//     moves   the algorithms, as moves
//     sums   adding up elements
//     collectives   the moves, executed
//     async   work in the background
//     launch   running a function on every rank
#ifndef HPML_COMM_H_INCLUDED
#define HPML_COMM_H_INCLUDED

#include "hpml.h"

#if HPML_VERSION != 100
#error "hpml.h and hpml_comm.h are of different versions"
#endif

#ifdef __cplusplus
extern "C" {
#endif

// ---------------------------------------------------------------------------------------------------------------------
// >>api-comm   ranks and communicators
// ---------------------------------------------------------------------------------------------------------------------

/* A rank is one worker: a thread of this process, a process under mpiexec, or a thread in virtual time. All run the same
   program; a communicator is how they meet. */
typedef struct hpml_comm  hpml_comm;  /* opaque; hangs on a context */
typedef struct hpml_world hpml_world; /* ranks that are threads of one process; opaque */

typedef enum hpml_transport_kind {
    HPML_TRANSPORT_THREADS = 0, /* ranks are threads of this process; messages are copied once, from array to array */
    HPML_TRANSPORT_MPI     = 1, /* ranks are mpiexec's processes; needs HPML_USE_MPI and mpicc */
    HPML_TRANSPORT_CLOCK   = 2  /* threads in virtual time: one runs at a time, in the order of its clock; replayable */
} hpml_transport_kind;

/* A link: bytes arrive after latency + bytes / bandwidth, one message after another. Zero: as fast as it is (CLOCK: at
   once). */
typedef struct hpml_link {
    double latency;   /* seconds */
    double bandwidth; /* bytes per second */
} hpml_link;

/* Where ranks live and what lies between them. With THREADS the links are injected: a laptop shows a slow network. Each
   node has one network card: what leaves it, and what comes in, waits in line. */
typedef struct hpml_network {
    int32_t       ranks_per_node; /* 0: all on one node (MPI: asks MPI) */
    bool          spread;         /* rank r is on node r % nodes, not r / ranks_per_node */
    hpml_link     inside, between; /* links within and between nodes */
    const double *slow;           /* (ranks) CLOCK: rank r computes slow[r] times as long; NULL: 1 */
} hpml_network;

typedef struct hpml_comm_desc {
    uint32_t            _begin;
    hpml_transport_kind transport;
    hpml_world         *world;    /* THREADS, CLOCK: required, the same for all ranks */
    int32_t             rank;     /* THREADS, CLOCK: this one's number; MPI: found out */
    void               *mpi_comm; /* MPI: points to an MPI_Comm, which is duplicated; NULL: MPI_COMM_WORLD */
    int32_t             ranks_per_node; /* MPI: 0: asks MPI which ranks share memory */
    double              timeout;  /* seconds that a wait may last; 0: 60, negative: for ever */
    bool                check;    /* compare every collective on all ranks first: kind, count, type, order. For debugging */
    uint32_t            _end;
} hpml_comm_desc;

/* Collective. NULL on failure, the error on the context: MPI not initialized, a launcher that started several programs of
   one rank each, ... The communicator goes with its context; a rank whose context holds an error tells the others. */
HPML_API hpml_comm *hpml_comm_create(hpml_ctx *ctx, const hpml_comm_desc *desc);
HPML_API void       hpml_comm_free(hpml_comm *c); /* optional, collective */

/* Ranks as threads that you start yourself; hpml_launch does it for you. Free it when all their contexts are gone. */
HPML_API hpml_world *hpml_world_create(hpml_transport_kind transport, int32_t ranks, const hpml_network *network);
HPML_API void        hpml_world_free(hpml_world *w);

/* Runs `fn` on every rank and returns when all have: the one line that differs between one core, threads, virtual time and
   mpiexec (where it runs `fn` once, on this process's rank, and starts and ends MPI unless you have). Every rank gets a
   context and a communicator. The result is the first rank's error, its text in `error` (may be NULL). */
typedef struct hpml_launch_desc {
    uint32_t            _begin;
    hpml_transport_kind transport;
    int32_t             ranks;     /* THREADS, CLOCK: 0: 1. MPI: 0, or the number that must have been started */
    hpml_network        network;
    double              timeout;   /* as in hpml_comm_desc */
    bool                check;
    hpml_ctx_desc       ctx;       /* of every rank; threads 0: this machine's cores shared out among the ranks */
    uint32_t            _end;
} hpml_launch_desc;
typedef hpml_status hpml_rank_fn(hpml_comm *comm, void *user);
HPML_API hpml_status hpml_launch(const hpml_launch_desc *desc, hpml_rank_fn *fn, void *user, char *error, size_t size);

HPML_API int       hpml_comm_rank(const hpml_comm *c); /* 0 to size - 1 */
HPML_API int       hpml_comm_size(const hpml_comm *c);
HPML_API int       hpml_comm_node(const hpml_comm *c, int rank); /* number of the node that `rank` is on */
HPML_API hpml_ctx *hpml_comm_ctx(const hpml_comm *c);
HPML_API const char *hpml_comm_transport(const hpml_comm *c); /* "threads", "mpi", "clock" */
HPML_API double    hpml_comm_now(const hpml_comm *c);  /* seconds: hpml_now, or this rank's virtual clock */
HPML_API void      hpml_comm_compute(hpml_comm *c, double seconds); /* CLOCK: time passes; else sleeps as long */

/* Ranks with the same colour form a new communicator, ordered by key, then rank. Colour negative: none for me (NULL). */
HPML_API hpml_comm *hpml_comm_split(hpml_comm *c, int color, int key);
HPML_API hpml_comm *hpml_comm_split_node(hpml_comm *c); /* by node */

/* What this rank has sent since the last reset, background work included. */
typedef struct hpml_counters {
    int64_t messages, bytes;
    int64_t between_bytes; /* of them to other nodes */
    int64_t rounds;        /* rounds of collectives in which this rank sent or received */
    double  seconds;       /* spent in collectives, waiting included */
} hpml_counters;
HPML_API void    hpml_comm_counters(const hpml_comm *c, hpml_counters *out);
HPML_API int64_t hpml_comm_bytes_to(const hpml_comm *c, int peer);
HPML_API void    hpml_comm_counters_reset(hpml_comm *c);

// ---------------------------------------------------------------------------------------------------------------------
// >>api-messages   point to point
// ---------------------------------------------------------------------------------------------------------------------

/* Messages between two ranks with the same tag arrive in the order sent. Lengths must agree. A send may wait until it is
   received. tag: 0 to HPML_TAG_MAX. */
#define HPML_TAG_MAX 1023
HPML_API hpml_status hpml_send(hpml_comm *c, int to, int tag, const void *data, size_t bytes);
HPML_API hpml_status hpml_recv(hpml_comm *c, int from, int tag, void *data, size_t bytes);
HPML_API hpml_status hpml_sendrecv(hpml_comm *c, int to, const void *out, size_t out_bytes, int from, void *in,
                                   size_t in_bytes, int tag);

/* Begun now, done when hpml_wait says so; the array must stay untouched until then. The struct is yours. */
typedef struct hpml_message {
    int                  peer, tag;
    bool                 receiving, done;
    hpml_status          status;
    char                *data;
    size_t               bytes, moved;
    void               (*reduce)(void *into, const void *from, size_t bytes); /* receiving: NULL: copy */
    double               arrival;      /* THREADS, CLOCK: not before */
    struct hpml_message *next;         /* private, as all below */
    struct hpml_comm    *owner;
    void                *native[2];
    void                *staging;
} hpml_message;
HPML_API hpml_status hpml_isend(hpml_comm *c, int to, int tag, const void *data, size_t bytes, hpml_message *m);
HPML_API hpml_status hpml_irecv(hpml_comm *c, int from, int tag, void *data, size_t bytes, hpml_message *m);
HPML_API hpml_status hpml_wait(hpml_comm *c, hpml_message *m);

/* What a transport does: everything above messages is written once over these functions. */
typedef struct hpml_transport {
    const char *name;
    void (*start)(hpml_comm *c, hpml_message *m); /* begins a send or a receive */
    void (*test)(hpml_comm *c, hpml_message *m);  /* sets m->done, and m->status, when it is over */
    void (*block)(hpml_comm *c, hpml_message *m, double until); /* sleeps until something may have changed */
    void (*tell)(hpml_comm *c, const char *text); /* this rank has failed: the others' waits end */
    hpml_status (*split)(hpml_comm *c, hpml_comm *part, const int32_t *ranks, int count, int color); /* collective */
    void (*close)(hpml_comm *c);
    hpml_status (*allreduce)(hpml_comm *c, void *data, int64_t n, int dtype, int op); /* optional: native */
    double alpha, beta; /* typical seconds a message, seconds a byte: what `auto` starts from */
} hpml_transport;

// ---------------------------------------------------------------------------------------------------------------------
// >>api-collectives   all ranks together
// ---------------------------------------------------------------------------------------------------------------------

/* The ways to add up (n elements, p ranks; a message costs alpha + beta bytes):
     CENTRAL    rank 0 receives all, adds in rank order, sends back       2 (p-1) (alpha + n beta) at rank 0
     TREE       binomial tree to rank 0 and back                          2 ceil(log2 p) (alpha + n beta)
     RING       2 (p-1) steps of n/p, Patarasuk & Yuan 2009               2 (p-1) alpha + 2 n (p-1)/p beta, optimal
     BUTTERFLY  recursive doubling                                        ceil(log2 p) (alpha + n beta)
     HALVING    recursive halving and doubling, Rabenseifner 2004         2 log2 p alpha + 2 n (p-1)/p beta
     HIERARCHICAL  reduce-scatter inside each node, allreduce between nodes of each share, allgather inside: only
                1/ranks_per_node of the bytes leave a node
     NATIVE     the transport's own (MPI_Allreduce)
   BUTTERFLY and HALVING fold the ranks beyond a power of two into partners first. Every algorithm gives all ranks the same
   bits: an element is added up along one fixed tree. CENTRAL: ((x0 + x1) + x2) ...; RING: block b starts at rank b + 1 and
   goes round; the others pair ranks as their name says. */
typedef enum hpml_algorithm {
    HPML_AUTO = 0, HPML_CENTRAL, HPML_TREE, HPML_RING, HPML_BUTTERFLY, HPML_HALVING, HPML_HIERARCHICAL, HPML_NATIVE
} hpml_algorithm;
#define HPML_ALGORITHM_COUNT 8
HPML_API const char    *hpml_algorithm_name(hpml_algorithm a);
HPML_API hpml_algorithm hpml_algorithm_find(const char *name); /* "ring", ...; -1 when there is none */

typedef enum hpml_reduce { HPML_SUM = 0, HPML_MEAN, HPML_MAX } hpml_reduce;

typedef enum hpml_element { /* what is added up */
    HPML_ELEMENT_F32 = 0, HPML_ELEMENT_BF16, /* added in f32, rounded each time */
    HPML_ELEMENT_I32, HPML_ELEMENT_I64, HPML_ELEMENT_F64, HPML_ELEMENT_BYTE /* BYTE: only moved */
} hpml_element;
HPML_API size_t hpml_element_size(hpml_element e);

typedef struct hpml_allreduce_desc {
    uint32_t       _begin;
    hpml_algorithm algorithm; /* AUTO: the cheapest by the formulas above, see hpml_comm_tune */
    hpml_reduce    reduce;
    hpml_element   element;
    uint32_t       _end;
} hpml_allreduce_desc;

/* In place, any n >= 0, any number of ranks. desc NULL: the sum of f32. Every rank must pass the same n and desc. */
HPML_API hpml_status hpml_allreduce(hpml_comm *c, void *data, int64_t n, const hpml_allreduce_desc *desc);
/* Measures alpha and beta of this communicator once (some milliseconds), for AUTO. Collective. */
HPML_API hpml_status hpml_comm_tune(hpml_comm *c);
HPML_API hpml_algorithm hpml_comm_choose(const hpml_comm *c, int64_t bytes); /* what AUTO takes */

/* Block r of an array of n elements is [n r / p, n (r+1) / p). */
HPML_API int64_t     hpml_block(int64_t n, int parts, int index); /* n index / parts: where block `index` begins */
HPML_API hpml_status hpml_reduce_scatter(hpml_comm *c, void *data, int64_t n, hpml_element e, hpml_reduce op); /* in place: my block holds the result, the rest is scratch */
HPML_API hpml_status hpml_allgather(hpml_comm *c, void *data, int64_t n, hpml_element e); /* in place: my block is mine, then all are there */
HPML_API hpml_status hpml_broadcast(hpml_comm *c, void *data, size_t bytes, int root);
HPML_API hpml_status hpml_reduce_to(hpml_comm *c, void *data, int64_t n, hpml_element e, hpml_reduce op, int root); /* elsewhere data is scratch */
HPML_API hpml_status hpml_gather(hpml_comm *c, const void *mine, size_t bytes, void *all, int root);  /* all: (p, bytes) at root */
HPML_API hpml_status hpml_scatter(hpml_comm *c, const void *all, size_t bytes, void *mine, int root);
HPML_API hpml_status hpml_all_to_all(hpml_comm *c, const void *out, void *in, size_t bytes);          /* (p, bytes) each */
HPML_API hpml_status hpml_barrier(hpml_comm *c);

/* The moves of a collective, one by one: for those who want to draw, count or simulate them. Round `round` of an allreduce
   of n elements as rank `rank` of p sees it. False when the algorithm has no such round. */
typedef struct hpml_move {
    int     to, from;           /* -1: none */
    int64_t out_at, out_count;  /* elements sent */
    int64_t in_at, in_count;    /* elements received, ... */
    bool    add;                /* ... and added; else they replace */
} hpml_move;
HPML_API bool hpml_allreduce_move(hpml_algorithm a, int p, int ranks_per_node, int rank, int64_t n, int round, hpml_move *out);

// ---------------------------------------------------------------------------------------------------------------------
// >>api-async   collectives in the background
// ---------------------------------------------------------------------------------------------------------------------

/* Started now, done by a thread of the communicator's own on a twin of it, in the order of starting, which must be the same
   on all ranks. The array must stay untouched until hpml_job_wait has returned. Jobs are reused: wait for each exactly once.
   Where there is no thread to be had (HPML_NO_THREADS, MPI_THREAD_SINGLE) the work is done at once instead. */
typedef struct hpml_job hpml_job;
HPML_API hpml_job   *hpml_iallreduce(hpml_comm *c, void *data, int64_t n, const hpml_allreduce_desc *desc);
HPML_API hpml_job   *hpml_background(hpml_comm *c, hpml_rank_fn *work, void *user); /* anything else, on the twin */
HPML_API bool        hpml_job_done(const hpml_job *j);
HPML_API hpml_status hpml_job_wait(hpml_job *j);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* HPML_COMM_H_INCLUDED: stop here if you only want the API */

#if (defined(HPML_IMPLEMENTATION) || defined(HPML_COMM_IMPLEMENTATION)) && !defined(HPML_COMM_BODY)
#define HPML_COMM_BODY

// ---------------------------------------------------------------------------------------------------------------------
// >>base   system headers, what communicators are made of
// ---------------------------------------------------------------------------------------------------------------------

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#ifndef HPML_NO_THREADS
#include <pthread.h>
#include <sched.h>
#include <time.h>
#include <unistd.h>
#endif
#ifdef HPML_USE_MPI
#include <mpi.h>
#endif

#if defined(__GNUC__)
#define HPMLC_FN static __attribute__((unused))
#define HPMLC_UNUSED __attribute__((unused))
#else
#define HPMLC_FN static
#define HPMLC_UNUSED
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef struct hpmlc_room       hpmlc_room;       /* what the ranks of one communicator share: see >>world */
typedef struct hpmlc_mpi        hpmlc_mpi;        /* see >>mpi */
typedef struct hpmlc_background hpmlc_background; /* see >>async */
typedef struct hpmlc_agent      hpmlc_agent;      /* a thread in virtual time: see >>clock */

struct hpml_comm {
    hpml_ctx             *ctx;
    hpml_ctx             *trace;    /* where spans go: for a twin, its parent's context */
    const hpml_transport *t;
    int                   rank, size;
    int32_t              *origin;   /* (size) the ranks' numbers in the first communicator: what messages call them */
    int32_t              *node;     /* (size) */
    int                   per_node; /* ranks of each node when all nodes are alike, else 0 */
    bool                  spread;
    double                timeout;
    bool                  check;
    int                   spin;     /* tests before a wait gives the core away */
    uint32_t              sequence; /* collectives so far: each has tags of its own */
    int64_t               step;     /* of the trainer, for messages */
    const char           *doing;
    int                   round;
    double                alpha, beta; /* for AUTO */
    hpml_counters         counters;
    int64_t              *bytes_to; /* (size) */
    hpml_message         *pending;  /* receives that are under way */
    hpmlc_room           *room;     /* THREADS, CLOCK */
    hpmlc_mpi            *mpi;
    unsigned              seen;     /* changes of the inbox that have been looked at */
    hpmlc_agent          *agent;    /* CLOCK */
    hpmlc_background     *background;
    hpml_comm            *first;    /* the communicator this one was split from, or itself */
    char                 *staging;  /* MPI: two pieces */
    char                 *scratch;  /* BF16 and checks */
    size_t                scratch_size;
};

/* Keeps the first error of the context and tells the other ranks. */
HPMLC_FN void        hpmlc_tell(hpml_comm *c, const char *text);
HPMLC_FN hpml_status hpmlc_fail(hpml_comm *c, hpml_status status, const char *format, ...)
{
    char    text[512];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (status != HPML_ERR_PEER) hpmlc_tell(c, text);
    return hpml_ctx_fail(c->ctx, status, "rank %d: %s", c->origin[c->rank], text);
}

/* True when there is nothing to be done; a failed rank says so to those who will wait for it. */
HPMLC_FN bool hpmlc_failed(hpml_comm *c)
{
    if (!c) return true;
    if (hpml_ctx_status(c->ctx) == HPML_OK) return false;
    hpmlc_tell(c, hpml_ctx_error(c->ctx));
    return true;
}

HPML_API int         hpml_comm_rank(const hpml_comm *c) { return c ? c->rank : 0; }
HPML_API int         hpml_comm_size(const hpml_comm *c) { return c ? c->size : 0; }
HPML_API int         hpml_comm_node(const hpml_comm *c, int rank) { return c && rank >= 0 && rank < c->size ? c->node[rank] : -1; }
HPML_API hpml_ctx   *hpml_comm_ctx(const hpml_comm *c) { return c ? c->ctx : NULL; }
HPML_API const char *hpml_comm_transport(const hpml_comm *c) { return c ? c->t->name : "none"; }

/* The part of a communicator that all transports share. */
HPMLC_FN void       hpmlc_comm_drop(void *object);
HPMLC_FN hpml_comm *hpmlc_comm_new(hpml_ctx *ctx, const hpml_transport *t, int rank, int size)
{
    hpml_comm *c = (hpml_comm *)hpml_ctx_alloc(ctx, sizeof *c, hpmlc_comm_drop);
    if (!c) return NULL;
    c->ctx = c->trace = ctx, c->rank = rank, c->size = size, c->first = c;
    c->origin   = (int32_t *)hpml_ctx_alloc(ctx, sizeof *c->origin * (size_t)size, NULL);
    c->node     = (int32_t *)hpml_ctx_alloc(ctx, sizeof *c->node * (size_t)size, NULL);
    c->bytes_to = (int64_t *)hpml_ctx_alloc(ctx, sizeof *c->bytes_to * (size_t)size, NULL);
    if (!c->bytes_to) return NULL;
    for (int i = 0; i < size; i++) c->origin[i] = i;
    c->t = t; /* last: without it there is nothing to close */
    c->timeout = 60, c->doing = "start", c->alpha = t->alpha, c->beta = t->beta;
    return c;
}

/* Ranks per node, and whether nodes hold neighbours or every k-th rank; 0 where nodes differ or are mixed. */
HPMLC_FN void hpmlc_comm_layout(hpml_comm *c)
{
    int p = c->size, nodes = 0;
    c->per_node = 0, c->spread = false;
    for (int i = 0; i < p; i++)
        if (c->node[i] >= nodes) nodes = c->node[i] + 1;
    if (nodes < 1 || p % nodes) return;
    for (int spread = 0; spread < 2 && c->per_node == 0; spread++) {
        bool fits = true;
        for (int i = 0; i < p; i++) fits = fits && c->node[i] == (spread ? i % nodes : i / (p / nodes));
        if (fits) c->per_node = p / nodes, c->spread = spread == 1 && nodes > 1 && nodes < p;
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// >>messages   sending, receiving, waiting
// ---------------------------------------------------------------------------------------------------------------------

/* A message is begun by the transport and tested until it is done. Waiting spins for some microseconds, then yields, then
   sleeps: on a busy machine whoever has work gets the core at once. (MPICH spins for ever: with more ranks than cores its
   own waiting was measured 40 times slower than this.) */

#define HPMLC_TAG_COLLECTIVE (HPML_TAG_MAX + 1)
#define HPMLC_TAGS           30000 /* an MPI may stop at 32,767 */

HPMLC_FN hpml_status hpmlc_begin(hpml_comm *c, bool receiving, int peer, int tag, char *data, size_t bytes,
                                 void (*reduce)(void *, const void *, size_t), hpml_message *m)
{
    memset(m, 0, sizeof *m);
    m->done = true;
    if (hpmlc_failed(c)) return m->status = c ? hpml_ctx_status(c->ctx) : HPML_ERR_ARGUMENT;
    if (peer < 0 || peer >= c->size || (bytes > 0 && !data))
        return m->status = hpmlc_fail(c, HPML_ERR_ARGUMENT, "%s %d: a rank from 0 to %d and data were expected",
                                      receiving ? "receive from" : "send to", peer, c->size - 1);
    m->receiving = receiving, m->peer = peer, m->tag = tag, m->data = data, m->bytes = bytes, m->reduce = reduce, m->owner = c;
    m->done = false;
    if (receiving) m->next = c->pending, c->pending = m;
    else {
        c->counters.messages++;
        c->counters.bytes += (int64_t)bytes;
        c->bytes_to[peer] += (int64_t)bytes;
        if (c->node[peer] != c->node[c->rank]) c->counters.between_bytes += (int64_t)bytes;
    }
    c->t->start(c, m);
    return HPML_OK;
}

HPMLC_FN void hpmlc_end(hpml_comm *c, hpml_message *m)
{
    hpml_message **at = &c->pending;
    while (*at && *at != m) at = &(*at)->next;
    if (*at) *at = m->next;
}

HPMLC_FN void hpmlc_pause(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __asm__ __volatile__("pause");
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

/* A sender learns from the receiver's thread that its message is done. */
HPMLC_FN bool hpmlc_done(const hpml_message *m)
{
#if defined(__GNUC__)
    return __atomic_load_n(&m->done, __ATOMIC_ACQUIRE);
#else
    return *(const volatile bool *)&m->done;
#endif
}

HPML_API hpml_status hpml_wait(hpml_comm *c, hpml_message *m)
{
    double limit = 0;
    if (!c || !m) return HPML_ERR_ARGUMENT;
    for (int turn = 0; !hpmlc_done(m); turn++) {
        c->t->test(c, m);
        for (hpml_message *other = c->pending, *next; other && !hpmlc_done(m); other = next) {
            next = other->next;
            if (other != m && !other->done) c->t->test(c, other);
        }
        if (hpmlc_done(m)) break;
        if (turn < c->spin) { hpmlc_pause(); continue; }
        if (limit == 0) limit = c->timeout < 0 ? 1e300 : hpml_now() + c->timeout;
        if (hpml_now() < limit) { c->t->block(c, m, limit); continue; }
        m->done   = true;
        m->status = hpmlc_fail(c, HPML_ERR_TIMEOUT, "waited %g s for rank %d in %s, round %d, step %lld; is that rank alive and "
                               "in the same operation? (.timeout sets the limit)", c->timeout, c->origin[m->peer], c->doing,
                               c->round, (long long)c->step);
    }
    if (m->receiving) hpmlc_end(c, m);
    return m->status;
}

HPML_API hpml_status hpml_isend(hpml_comm *c, int to, int tag, const void *data, size_t bytes, hpml_message *m)
{
    return hpmlc_begin(c, false, to, tag, (char *)(uintptr_t)data, bytes, NULL, m);
}

HPML_API hpml_status hpml_irecv(hpml_comm *c, int from, int tag, void *data, size_t bytes, hpml_message *m)
{
    return hpmlc_begin(c, true, from, tag, (char *)data, bytes, NULL, m);
}

HPML_API hpml_status hpml_send(hpml_comm *c, int to, int tag, const void *data, size_t bytes)
{
    hpml_message m;
    if (c) c->doing = "send";
    hpml_isend(c, to, tag, data, bytes, &m);
    return hpml_wait(c, &m);
}

HPML_API hpml_status hpml_recv(hpml_comm *c, int from, int tag, void *data, size_t bytes)
{
    hpml_message m;
    if (c) c->doing = "receive";
    hpml_irecv(c, from, tag, data, bytes, &m);
    return hpml_wait(c, &m);
}

HPML_API hpml_status hpml_sendrecv(hpml_comm *c, int to, const void *out, size_t out_bytes, int from, void *in,
                                   size_t in_bytes, int tag)
{
    hpml_message send, receive;
    if (c) c->doing = "sendrecv";
    hpml_irecv(c, from, tag, in, in_bytes, &receive);
    hpml_isend(c, to, tag, out, out_bytes, &send);
    hpml_status got = hpml_wait(c, &receive), sent = hpml_wait(c, &send);
    return got != HPML_OK ? got : sent;
}

// ---------------------------------------------------------------------------------------------------------------------
// >>world   ranks as threads: inboxes, links, deadlock
// ---------------------------------------------------------------------------------------------------------------------

/* A room is what the ranks of one communicator share: an inbox for each. A send is posted in the receiver's inbox as a
   pointer; the receiver copies, or adds, straight from the sender's array and marks the message done: one pass over the
   data, nothing in between.

   The world counts its running threads. One that goes to sleep leaves the count, whoever wakes it puts it back before it
   goes on itself; so when the count is zero nobody will ever wake anybody: a deadlock, known at once and exactly. */

#ifndef HPML_NO_THREADS

typedef struct hpmlc_gate { /* where one thread sleeps */
    pthread_mutex_t mutex;
    pthread_cond_t  changed;
    unsigned        changes;
    bool            sleeping;
} hpmlc_gate;

typedef struct hpmlc_inbox {
    hpmlc_gate    gate;
    hpml_message *posted, **last; /* sends, in order of arrival */
    hpml_comm    *owner;          /* while it is open */
    int           peer;           /* what the sleeper waits for: rank of the world, -1: nothing */
    const char   *doing;
    char          pad[64];
} hpmlc_inbox;

struct hpmlc_room {
    hpml_world  *world;
    hpmlc_room  *next;
    int          size, open; /* ranks that have not closed it */
    hpmlc_inbox *inbox;      /* (size) */
};

struct hpml_world {
    hpml_transport_kind kind;
    int                 ranks, nodes;
    hpml_network        network;
    pthread_mutex_t     mutex;
    int                 running;  /* threads that are awake */
    hpmlc_room         *rooms;
    bool               *left;     /* (ranks) have closed their first communicator */
    int                 failed;   /* 1 + the rank that failed first; 0: none. Written once, under the mutex */
    char                text[512];
    hpmlc_agent        *agents, *turn; /* CLOCK: all threads, and the one that runs */
    int                 agent_count;
    double             *card;     /* (2 (ranks + nodes)) when each sender's and receiver's card is free again */
};

HPMLC_FN void hpmlc_gate_init(hpmlc_gate *g)
{
    pthread_condattr_t clock;
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC); /* the clock of hpml_now */
    pthread_mutex_init(&g->mutex, NULL);
    pthread_cond_init(&g->changed, &clock);
    pthread_condattr_destroy(&clock);
}

/* Call with g->mutex held. */
HPMLC_FN void hpmlc_gate_wake_held(hpml_world *w, hpmlc_gate *g)
{
    __atomic_add_fetch(&g->changes, 1, __ATOMIC_RELEASE);
    if (!g->sleeping) return;
    g->sleeping = false;
    if (w) __atomic_add_fetch(&w->running, 1, __ATOMIC_ACQ_REL);
    pthread_cond_signal(&g->changed);
}

HPMLC_FN void hpmlc_gate_wake(hpml_world *w, hpmlc_gate *g)
{
    pthread_mutex_lock(&g->mutex);
    hpmlc_gate_wake_held(w, g);
    pthread_mutex_unlock(&g->mutex);
}

HPMLC_FN void hpmlc_agents_wake(hpml_world *w);
HPMLC_FN void hpmlc_world_wake(hpml_world *w) /* w->mutex held */
{
    hpmlc_agents_wake(w);
    for (hpmlc_room *r = w->rooms; r; r = r->next)
        for (int i = 0; i < r->size; i++) hpmlc_gate_wake(w, &r->inbox[i].gate);
}

/* Nobody runs: says who waits for whom, and wakes them all to hear it. w->mutex held. */
HPMLC_FN void hpmlc_world_stuck(hpml_world *w)
{
    if (__atomic_load_n(&w->running, __ATOMIC_ACQUIRE) == 0 && !w->failed) {
        size_t at = (size_t)snprintf(w->text, sizeof w->text, "deadlock:");
        bool   any = false;
        for (hpmlc_room *r = w->rooms; r; r = r->next)
            for (int i = 0; i < r->size && at < sizeof w->text; i++) {
                const hpmlc_inbox *in = &r->inbox[i];
                if (!in->gate.sleeping || !in->owner || in->peer < 0) continue;
                at += (size_t)snprintf(w->text + at, sizeof w->text - at, "%s rank %d waits for rank %d%s in %s", any ? ";" : "",
                                       in->owner->origin[i], in->peer, w->left[in->peer] ? ", which has left," : "", in->doing);
                any = true;
            }
        if (any) {
            __atomic_store_n(&w->failed, w->ranks + 1, __ATOMIC_RELEASE); /* everybody and nobody */
            hpmlc_world_wake(w);
        }
    }
}

HPMLC_FN void hpmlc_world_deadlock(hpml_world *w)
{
    pthread_mutex_lock(&w->mutex);
    hpmlc_world_stuck(w);
    pthread_mutex_unlock(&w->mutex);
}

/* Sleeps until the gate changes from what was `seen`, or until the time. counted: out of the count of the running. */
HPMLC_FN void hpmlc_gate_sleep(hpml_world *w, hpmlc_gate *g, unsigned *seen, double until, bool counted)
{
    struct timespec limit;
    pthread_mutex_lock(&g->mutex);
    if (g->changes == *seen) {
        limit.tv_sec  = until > 1e15 ? (time_t)1000000000 : (time_t)until;
        limit.tv_nsec = until > 1e15 ? 0 : (long)((until - floor(until)) * 1e9);
        g->sleeping   = counted;
        if (counted && w && __atomic_sub_fetch(&w->running, 1, __ATOMIC_ACQ_REL) == 0) {
            pthread_mutex_unlock(&g->mutex);
            hpmlc_world_deadlock(w);
            pthread_mutex_lock(&g->mutex);
        }
        while (g->changes == *seen)
            if (pthread_cond_timedwait(&g->changed, &g->mutex, &limit) != 0) break;
        if (g->sleeping && w) __atomic_add_fetch(&w->running, 1, __ATOMIC_ACQ_REL);
        g->sleeping = false;
    }
    *seen = g->changes;
    pthread_mutex_unlock(&g->mutex);
}

HPMLC_FN hpmlc_room *hpmlc_room_new(hpml_world *w, int size)
{
    hpmlc_room *r = (hpmlc_room *)calloc(1, sizeof *r);
    if (r) r->inbox = (hpmlc_inbox *)calloc((size_t)size, sizeof *r->inbox);
    if (!r || !r->inbox) return free(r), (hpmlc_room *)NULL;
    r->world = w, r->size = r->open = size;
    for (int i = 0; i < size; i++) {
        hpmlc_gate_init(&r->inbox[i].gate);
        r->inbox[i].last = &r->inbox[i].posted;
        r->inbox[i].peer = -1;
    }
    pthread_mutex_lock(&w->mutex);
    r->next  = w->rooms;
    w->rooms = r;
    pthread_mutex_unlock(&w->mutex);
    return r;
}

HPMLC_FN void hpmlc_room_free(hpmlc_room *r)
{
    for (int i = 0; i < r->size; i++) {
        for (hpml_message *m = r->world->kind == HPML_TRANSPORT_CLOCK ? r->inbox[i].posted : NULL, *next; m; m = next) {
            next = m->next;
            free(m); /* sent in virtual time, never received */
        }
        pthread_mutex_destroy(&r->inbox[i].gate.mutex);
        pthread_cond_destroy(&r->inbox[i].gate.changed);
    }
    free(r->inbox);
    free(r);
}

HPML_API hpml_world *hpml_world_create(hpml_transport_kind transport, int32_t ranks, const hpml_network *network)
{
    hpml_world *w = ranks < 1 || ranks > 65536 ? NULL : (hpml_world *)calloc(1, sizeof *w);
    if (!w) return NULL;
    w->kind = transport, w->ranks = w->running = ranks;
    if (network) w->network = *network;
    if (w->network.ranks_per_node < 1) w->network.ranks_per_node = ranks;
    w->nodes = (ranks + w->network.ranks_per_node - 1) / w->network.ranks_per_node;
    w->left  = (bool *)calloc((size_t)ranks, sizeof *w->left);
    w->card  = (double *)calloc((size_t)(2 * (ranks + w->nodes)), sizeof *w->card);
    pthread_mutex_init(&w->mutex, NULL);
    if (w->left && w->card && hpmlc_room_new(w, ranks)) return w;
    hpml_world_free(w);
    return NULL;
}

HPML_API void hpml_world_free(hpml_world *w)
{
    if (!w) return;
    for (hpmlc_room *r = w->rooms, *next; r; r = next) {
        next = r->next;
        hpmlc_room_free(r);
    }
    pthread_mutex_destroy(&w->mutex);
    free(w->left);
    free(w->card);
    free(w);
}

HPMLC_FN void hpmlc_world_fail(hpml_world *w, int rank, const char *text)
{
    pthread_mutex_lock(&w->mutex);
    if (!w->failed) {
        snprintf(w->text, sizeof w->text, "%s", text);
        __atomic_store_n(&w->failed, rank + 1, __ATOMIC_RELEASE);
        hpmlc_world_wake(w);
    }
    pthread_mutex_unlock(&w->mutex);
}

// ---------------------------------------------------------------------------------------------------------------------
// >>threads-transport   messages between threads
// ---------------------------------------------------------------------------------------------------------------------

/* When a message of this size that is sent at time `now` will be there. Cards serve one message after another. */
HPMLC_FN double hpmlc_arrival(hpml_comm *c, int to, size_t bytes, double now)
{
    hpml_world      *w    = c->room->world;
    bool             far  = c->node[to] != c->node[c->rank];
    const hpml_link *link = far ? &w->network.between : &w->network.inside;
    double           busy = link->bandwidth > 0 ? (double)bytes / link->bandwidth : 0;
    if (link->latency <= 0 && busy <= 0) return 0;
    double *out = &w->card[far ? w->ranks + c->node[c->rank] : c->origin[c->rank]];
    double *in  = &w->card[w->ranks + w->nodes + (far ? w->ranks + c->node[to] : c->origin[to])];
    pthread_mutex_lock(&w->mutex);
    double start = now > *out ? now : *out;
    if (*in > start) start = *in;
    *out = *in = start + busy;
    pthread_mutex_unlock(&w->mutex);
    return start + busy + link->latency;
}

HPMLC_FN void hpmlc_threads_start(hpml_comm *c, hpml_message *m)
{
    hpmlc_inbox *in = &c->room->inbox[m->peer];
    if (m->receiving) return;
    m->arrival = hpmlc_arrival(c, m->peer, m->bytes, hpml_now());
    m->next    = NULL;
    pthread_mutex_lock(&in->gate.mutex);
    *in->last = m;
    in->last  = &m->next;
    hpmlc_gate_wake_held(c->room->world, &in->gate);
    pthread_mutex_unlock(&in->gate.mutex);
}

/* The first message from `from` with this tag, or NULL. Taken out of the inbox when `take` and it has arrived. */
HPMLC_FN hpml_message *hpmlc_inbox_find(hpmlc_inbox *in, int from, int tag, double *arrival)
{
    hpml_message **at, *m;
    pthread_mutex_lock(&in->gate.mutex);
    for (at = &in->posted; (m = *at) != NULL; at = &m->next)
        if (m->tag == tag && m->owner->rank == from) break;
    if (m && m->arrival > 0 && m->arrival > hpml_now()) {
        *arrival = m->arrival;
        m        = NULL;
    }
    if (m) {
        *at = m->next;
        if (in->last == &m->next) in->last = at;
    }
    pthread_mutex_unlock(&in->gate.mutex);
    return m;
}

/* A receive meets its send: one pass over the data, then the sender may go on. */
HPMLC_FN void hpmlc_meet(hpml_comm *c, hpml_message *m, hpml_message *sent)
{
    hpml_comm *from = sent->owner;
    if (sent->bytes != m->bytes)
        m->status = hpmlc_fail(c, HPML_ERR_COMM, "%s: rank %d sent %zu bytes, rank %d expected %zu; all ranks must pass the same "
                               "counts", c->doing, c->origin[m->peer], sent->bytes, c->origin[c->rank], m->bytes);
    else if (m->reduce) m->reduce(m->data, sent->data, m->bytes);
    else if (m->bytes > 0) memcpy(m->data, sent->data, m->bytes);
    m->done = true;
    hpmlc_gate *gate = &c->room->inbox[from->rank].gate;
    pthread_mutex_lock(&gate->mutex); /* the sender's message is gone the moment it is done */
    __atomic_store_n(&sent->done, true, __ATOMIC_RELEASE);
    hpmlc_gate_wake_held(c->room->world, gate);
    pthread_mutex_unlock(&gate->mutex);
}

HPMLC_FN void hpmlc_threads_test(hpml_comm *c, hpml_message *m)
{
    hpml_world *w = c->room->world;
    if (m->receiving) {
        hpmlc_inbox  *in   = &c->room->inbox[c->rank];
        hpml_message *sent = NULL;
        unsigned      now  = __atomic_load_n(&in->gate.changes, __ATOMIC_ACQUIRE);
        if (m->moved == 0 || m->moved != (size_t)now + 1 || m->arrival > 0) { /* something new since the last look */
            m->arrival = 0;
            sent       = hpmlc_inbox_find(in, m->peer, m->tag, &m->arrival);
            m->moved   = (size_t)now + 1;
        }
        if (sent) hpmlc_meet(c, m, sent);
    } else if (hpmlc_done(m)) return;
    if ((m->receiving && m->done) || !__atomic_load_n(&w->failed, __ATOMIC_ACQUIRE)) return;
    if (!m->receiving) { /* take it back, unless somebody has it in hands */
        hpmlc_inbox   *in = &c->room->inbox[m->peer];
        hpml_message **at;
        pthread_mutex_lock(&in->gate.mutex);
        for (at = &in->posted; *at && *at != m; at = &(*at)->next) {}
        if (*at) {
            *at = m->next;
            if (in->last == &m->next) in->last = at;
            m->moved = 1;
        }
        pthread_mutex_unlock(&in->gate.mutex);
        if (m->moved == 0) return;
    }
    m->done   = true;
    m->status = w->failed > w->ranks ? hpmlc_fail(c, HPML_ERR_COMM, "%s", w->text)
                                     : hpmlc_fail(c, HPML_ERR_PEER, "rank %d failed: %s", w->failed - 1, w->text);
}

HPMLC_FN void hpmlc_threads_block(hpml_comm *c, hpml_message *m, double until)
{
    hpmlc_inbox *in      = &c->room->inbox[c->rank];
    bool         counted = true;
    for (const hpml_message *p = c->pending; p; p = p->next) /* something is on its way: not a deadlock */
        if (p->arrival > 0) {
            counted = false;
            if (p->arrival < until) until = p->arrival;
        }
    in->peer  = c->origin[m->peer];
    in->doing = c->doing;
    hpmlc_gate_sleep(c->room->world, &in->gate, &c->seen, until, counted);
}

HPMLC_FN void hpmlc_threads_close(hpml_comm *c)
{
    hpml_world  *w = c->room->world;
    hpmlc_room **at, *gone = NULL;
    bool         first = c->first == c;
    pthread_mutex_lock(&w->mutex);
    c->room->inbox[c->rank].owner = NULL;
    if (first) w->left[c->rank] = true;
    if (--c->room->open == 0) {
        for (at = &w->rooms; *at != c->room; at = &(*at)->next) {}
        *at  = c->room->next;
        gone = c->room;
    }
    pthread_mutex_unlock(&w->mutex);
    if (gone) hpmlc_room_free(gone);
    if (first && __atomic_sub_fetch(&w->running, 1, __ATOMIC_ACQ_REL) == 0) hpmlc_world_deadlock(w);
}

/* The lowest rank makes the room and tells the others where it is. */
HPMLC_FN hpml_status hpmlc_threads_split(hpml_comm *c, hpml_comm *part, const int32_t *ranks, int count, int color HPMLC_UNUSED)
{
    hpml_status status = HPML_OK;
    hpmlc_room *room   = NULL;
    if (part->rank == 0) {
        room = hpmlc_room_new(c->room->world, count);
        for (int i = 1; i < count && status == HPML_OK; i++)
            status = hpml_send(c, ranks[i], HPMLC_TAG_COLLECTIVE + HPMLC_TAGS, &room, sizeof room);
    } else status = hpml_recv(c, ranks[0], HPMLC_TAG_COLLECTIVE + HPMLC_TAGS, &room, sizeof room);
    if (status == HPML_OK && !room) return hpmlc_fail(c, HPML_ERR_MEMORY, "no memory for a communicator of %d ranks", count);
    if (status != HPML_OK) return status;
    room->inbox[part->rank].owner = part;
    part->room = room;
    return HPML_OK;
}

HPMLC_FN void hpmlc_threads_tell(hpml_comm *c, const char *text)
{
    hpmlc_world_fail(c->room->world, c->origin[c->rank], text);
}

static const hpml_transport hpmlc_threads = { "threads", hpmlc_threads_start, hpmlc_threads_test, hpmlc_threads_block,
                                              hpmlc_threads_tell, hpmlc_threads_split, hpmlc_threads_close, NULL, 2e-6, 0.25e-9 };

HPMLC_FN hpml_comm *hpmlc_threads_create(hpml_ctx *ctx, const hpml_comm_desc *d)
{
    hpml_world *w = d->world;
    if (!w || d->rank < 0 || d->rank >= w->ranks) {
        hpml_ctx_fail(ctx, HPML_ERR_ARGUMENT, "comm: rank %d of a world of %d; give .world (hpml_world_create) and .rank, or use "
                      "hpml_launch", d->rank, w ? w->ranks : 0);
        return NULL;
    }
    hpml_comm *c = hpmlc_comm_new(ctx, &hpmlc_threads, d->rank, w->ranks);
    if (!c) return NULL;
    for (c->room = w->rooms; c->room->next;) c->room = c->room->next; /* the first one made */
    for (int i = 0; i < c->size; i++)
        c->node[i] = w->network.spread ? i % w->nodes : i / w->network.ranks_per_node;
    c->spin = w->ranks <= (int)sysconf(_SC_NPROCESSORS_ONLN) ? 2000 : 20;
    c->room->inbox[c->rank].owner = c;
    return c;
}

#endif /* HPML_NO_THREADS */

// ---------------------------------------------------------------------------------------------------------------------
// >>mpi   messages between processes, by MPI
// ---------------------------------------------------------------------------------------------------------------------

/* Only MPI_Isend, MPI_Irecv and MPI_Test are used, so waiting is ours. Messages travel in pieces of HPMLC_PIECE bytes, two
   under way at a time: counts beyond 2^31 are no matter, and one piece is added while the next arrives. One lock serves all
   communicators of a process, which lets a background thread work under MPI_THREAD_SERIALIZED.

   A second communicator carries words: "I have failed, because ...", "I have left". They are looked for while a rank
   sleeps, so a wait for a lost rank ends at once; the deadline ends those for a rank that was killed without a word. */

#ifdef HPML_USE_MPI

#define HPMLC_PIECE ((size_t)4 << 20)
#define HPMLC_WORD  256 /* bytes of a word: 'L' or 'F', then text */

struct hpmlc_mpi {
    MPI_Comm  comm;
    int       level;  /* of thread support */
    MPI_Comm  words;  /* of the first communicator */
    char     *heard;  /* (world size) 0, 'L' left, 'F' failed */
    int       failed; /* 1 + the first rank that said it has failed */
    char      text[HPMLC_WORD];
    char      mine[HPMLC_WORD]; /* my word, while it is being sent */
    bool      told, shared;     /* shared: words and lock belong to the first communicator */
#ifndef HPML_NO_THREADS
    pthread_mutex_t lock;
#endif
};

HPMLC_FN void hpmlc_mpi_lock(hpml_comm *c)
{
#ifndef HPML_NO_THREADS
    pthread_mutex_lock(&c->first->mpi->lock);
#else
    (void)c;
#endif
}

HPMLC_FN void hpmlc_mpi_unlock(hpml_comm *c)
{
#ifndef HPML_NO_THREADS
    pthread_mutex_unlock(&c->first->mpi->lock);
#else
    (void)c;
#endif
}

HPMLC_FN void hpmlc_mpi_error(hpml_comm *c, hpml_message *m, int code)
{
    char text[MPI_MAX_ERROR_STRING];
    int  length = 0;
    MPI_Error_string(code, text, &length);
    m->done   = true;
    m->status = hpmlc_fail(c, HPML_ERR_COMM, "%s with rank %d: MPI says: %.*s", c->doing, c->origin[m->peer], length, text);
}

/* A message's requests lie in native[], which have room for one handle each, whatever MPI it is. */
typedef char hpmlc_request_fits[sizeof(MPI_Request) <= sizeof(void *) ? 1 : -1];

HPMLC_FN char *hpmlc_mpi_place(hpml_message *m, size_t at)
{
    return m->staging ? (char *)m->staging + at / HPMLC_PIECE % 2 * HPMLC_PIECE : m->data + at;
}

/* Posts the piece that begins at byte `at`. */
HPMLC_FN int hpmlc_mpi_post(hpml_comm *c, hpml_message *m, size_t at)
{
    size_t      n = m->bytes - at < HPMLC_PIECE ? m->bytes - at : HPMLC_PIECE;
    MPI_Request request;
    int         code = m->receiving ? MPI_Irecv(hpmlc_mpi_place(m, at), (int)n, MPI_BYTE, m->peer, m->tag, c->mpi->comm, &request)
                                    : MPI_Isend(m->data + at, (int)n, MPI_BYTE, m->peer, m->tag, c->mpi->comm, &request);
    memcpy(&m->native[at / HPMLC_PIECE % 2], &request, sizeof request);
    return code;
}

HPMLC_FN void hpmlc_mpi_start(hpml_comm *c, hpml_message *m)
{
    int code;
    if (m->receiving && m->reduce) {
        if (!c->staging) c->staging = (char *)hpml_ctx_alloc(c->ctx, 2 * HPMLC_PIECE, NULL);
        m->staging = c->staging;
        if (!m->staging) { m->done = true, m->status = hpml_ctx_status(c->ctx); return; }
    }
    hpmlc_mpi_lock(c);
    code = hpmlc_mpi_post(c, m, 0);
    if (code == MPI_SUCCESS && m->bytes > HPMLC_PIECE) code = hpmlc_mpi_post(c, m, HPMLC_PIECE);
    hpmlc_mpi_unlock(c);
    if (code != MPI_SUCCESS) hpmlc_mpi_error(c, m, code);
}

HPMLC_FN void hpmlc_mpi_test(hpml_comm *c, hpml_message *m)
{
    size_t      n = m->bytes - m->moved < HPMLC_PIECE ? m->bytes - m->moved : HPMLC_PIECE;
    void      **slot = &m->native[m->moved / HPMLC_PIECE % 2];
    int         there = 0, count = (int)n, code;
    MPI_Request request;
    MPI_Status  status;
    memcpy(&request, slot, sizeof request);
    hpmlc_mpi_lock(c);
    code = MPI_Test(&request, &there, &status);
    if (code == MPI_SUCCESS && there && m->receiving) MPI_Get_count(&status, MPI_BYTE, &count);
    hpmlc_mpi_unlock(c);
    memcpy(slot, &request, sizeof request);
    if (code != MPI_SUCCESS) { hpmlc_mpi_error(c, m, code); return; }
    if (!there) return;
    if (count != (int)n) {
        m->done   = true;
        m->status = hpmlc_fail(c, HPML_ERR_COMM, "%s: rank %d sent %d bytes, rank %d expected %d; all ranks must pass the same "
                               "counts", c->doing, c->origin[m->peer], count, c->origin[c->rank], (int)n);
        return;
    }
    if (m->staging) m->reduce(m->data + m->moved, hpmlc_mpi_place(m, m->moved), n);
    size_t next = m->moved + 2 * HPMLC_PIECE;
    m->moved += n;
    if (next < m->bytes) {
        hpmlc_mpi_lock(c);
        code = hpmlc_mpi_post(c, m, next);
        hpmlc_mpi_unlock(c);
        if (code != MPI_SUCCESS) hpmlc_mpi_error(c, m, code);
    }
    if (m->moved == m->bytes) m->done = true;
}

/* Listens for words; lock held. */
HPMLC_FN void hpmlc_mpi_listen(hpml_comm *first)
{
    hpmlc_mpi *x = first->mpi;
    for (int there = 1; there;) {
        char       word[HPMLC_WORD];
        MPI_Status status;
        if (MPI_Iprobe(MPI_ANY_SOURCE, 0, x->words, &there, &status) != MPI_SUCCESS || !there) return;
        MPI_Recv(word, HPMLC_WORD, MPI_BYTE, status.MPI_SOURCE, 0, x->words, MPI_STATUS_IGNORE);
        word[HPMLC_WORD - 1]      = 0;
        x->heard[status.MPI_SOURCE] = word[0];
        if (word[0] == 'F' && !x->failed) {
            memcpy(x->text, word + 1, HPMLC_WORD - 1);
            x->failed = status.MPI_SOURCE + 1;
        }
    }
}

HPMLC_FN void hpmlc_mpi_say(hpml_comm *c, char kind, const char *text)
{
    hpml_comm *first = c->first;
    hpmlc_mpi *x     = first->mpi;
    hpmlc_mpi_lock(c);
    if (!x->told) {
        x->told = true;
        snprintf(x->mine, sizeof x->mine, "%c%s", kind, text);
        for (int i = 0; i < first->size; i++) {
            MPI_Request request;
            if (i == first->rank || MPI_Isend(x->mine, HPMLC_WORD, MPI_BYTE, i, 0, x->words, &request) != MPI_SUCCESS) continue;
            MPI_Request_free(&request);
        }
    }
    hpmlc_mpi_unlock(c);
}

HPMLC_FN void hpmlc_mpi_tell(hpml_comm *c, const char *text) { hpmlc_mpi_say(c, 'F', text); }

/* Gives the core away for a moment: longer the longer nothing comes. A lost peer ends the wait. */
HPMLC_FN void hpmlc_mpi_block(hpml_comm *c, hpml_message *m, double until HPMLC_UNUSED)
{
    hpmlc_mpi *x    = c->first->mpi;
    int        peer = c->origin[m->peer];
    hpmlc_mpi_lock(c);
    hpmlc_mpi_listen(c->first);
    hpmlc_mpi_unlock(c);
    if (x->failed || x->heard[peer] == 'L') {
        if (!x->failed) hpmlc_mpi_test(c, m); /* it may have sent this before it left */
        if (m->done) return;
        m->done   = true;
        m->status = x->failed ? hpmlc_fail(c, HPML_ERR_PEER, "rank %d failed: %s", x->failed - 1, x->text)
                              : hpmlc_fail(c, HPML_ERR_PEER, "rank %d has left while this rank waits for it in %s", peer, c->doing);
        return;
    }
#ifndef HPML_NO_THREADS
    if (c->seen++ % 64 < 16) { sched_yield(); return; }
    struct timespec nap = { 0, 30000 };
    nanosleep(&nap, NULL);
#endif
}

/* Says goodbye and waits to hear it from the others, so that nobody ends MPI under a message. */
HPMLC_FN void hpmlc_mpi_close(hpml_comm *c)
{
    hpmlc_mpi *x = c->mpi;
    if (!x->shared) {
        bool   failed = hpml_ctx_status(c->ctx) != HPML_OK, all = false;
        double limit  = hpml_now() + (failed ? 5 : c->timeout < 0 ? 60 : c->timeout);
        hpmlc_mpi_say(c, failed ? 'F' : 'L', failed ? hpml_ctx_error(c->ctx) : "");
        while (!all && hpml_now() < limit) {
            all = true;
            hpmlc_mpi_lock(c);
            hpmlc_mpi_listen(c);
            hpmlc_mpi_unlock(c);
            for (int i = 0; i < c->size; i++) all = all && (i == c->rank || x->heard[i]);
#ifndef HPML_NO_THREADS
            struct timespec nap = { 0, 100000 };
            if (!all) nanosleep(&nap, NULL);
#endif
        }
        if (all) MPI_Comm_free(&x->words);
    }
    hpmlc_mpi_lock(c);
    if (hpml_ctx_status(c->ctx) == HPML_OK) MPI_Comm_free(&x->comm);
    hpmlc_mpi_unlock(c);
#ifndef HPML_NO_THREADS
    if (!x->shared) pthread_mutex_destroy(&x->lock);
#endif
}

HPMLC_FN hpml_status hpmlc_mpi_split(hpml_comm *c, hpml_comm *part, const int32_t *ranks HPMLC_UNUSED, int count HPMLC_UNUSED, int color)
{
    part->mpi = (hpmlc_mpi *)hpml_ctx_alloc(c->ctx, sizeof *part->mpi, NULL);
    if (!part->mpi) return hpml_ctx_status(c->ctx);
    part->mpi->shared = true, part->mpi->level = c->mpi->level;
    hpmlc_mpi_lock(c);
    int code = MPI_Comm_split(c->mpi->comm, color, part->rank, &part->mpi->comm);
    if (code == MPI_SUCCESS) MPI_Comm_set_errhandler(part->mpi->comm, MPI_ERRORS_RETURN);
    hpmlc_mpi_unlock(c);
    return code == MPI_SUCCESS ? HPML_OK : hpmlc_fail(c, HPML_ERR_COMM, "MPI_Comm_split gave error %d", code);
}

HPMLC_FN hpml_status hpmlc_mpi_allreduce(hpml_comm *c, void *data, int64_t n, int element, int op)
{
    const MPI_Datatype types[] = { MPI_FLOAT, MPI_DATATYPE_NULL, MPI_INT32_T, MPI_INT64_T, MPI_DOUBLE, MPI_DATATYPE_NULL };
    for (int64_t at = 0, part; at < n; at += part) {
        part = n - at < ((int64_t)1 << 30) ? n - at : (int64_t)1 << 30;
        hpmlc_mpi_lock(c);
        int code = types[element] == MPI_DATATYPE_NULL ? MPI_ERR_TYPE
                   : MPI_Allreduce(MPI_IN_PLACE, (char *)data + (size_t)at * hpml_element_size((hpml_element)element), (int)part,
                                   types[element], op == HPML_MAX ? MPI_MAX : MPI_SUM, c->mpi->comm);
        hpmlc_mpi_unlock(c);
        if (code != MPI_SUCCESS)
            return hpmlc_fail(c, HPML_ERR_UNSUPPORTED, "native allreduce: MPI gave error %d for this type; choose another algorithm", code);
    }
    return HPML_OK;
}

static const hpml_transport hpmlc_mpi_transport = { "mpi", hpmlc_mpi_start, hpmlc_mpi_test, hpmlc_mpi_block, hpmlc_mpi_tell,
                                                    hpmlc_mpi_split, hpmlc_mpi_close, hpmlc_mpi_allreduce, 5e-6, 0.3e-9 };

/* The number of ranks that the launcher says it has started; 0: it does not say. */
HPMLC_FN int hpmlc_launched(void)
{
    static const char *const names[] = { "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MPI_LOCALNRANKS", "PMIX_SIZE", "SLURM_NTASKS" };
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        const char *text = getenv(names[i]);
        if (text && atoi(text) > 0) return atoi(text);
    }
    return 0;
}

/* Which ranks share memory, as node numbers by first appearance. */
HPMLC_FN void hpmlc_mpi_nodes(hpml_comm *c, int ranks_per_node)
{
    MPI_Comm node;
    int      lowest = c->rank, count = 0;
    if (ranks_per_node > 0) {
        for (int i = 0; i < c->size; i++) c->node[i] = i / ranks_per_node;
        return;
    }
    MPI_Comm_split_type(c->mpi->comm, MPI_COMM_TYPE_SHARED, c->rank, MPI_INFO_NULL, &node);
    MPI_Bcast(&lowest, 1, MPI_INT, 0, node);
    MPI_Comm_free(&node);
    MPI_Allgather(&lowest, 1, MPI_INT, c->node, 1, MPI_INT32_T, c->mpi->comm);
    for (int i = 0; i < c->size; i++) { /* the lowest rank of a node stands before the others */
        if (c->node[i] == i) c->node[i] = count++;
        else c->node[i] = c->node[c->node[i]];
    }
}

HPMLC_FN hpml_comm *hpmlc_mpi_create(hpml_ctx *ctx, const hpml_comm_desc *d)
{
    int      on = 0, over = 0, rank, size, level = 0, launched = hpmlc_launched();
    MPI_Comm given;
    MPI_Initialized(&on);
    MPI_Finalized(&over);
    if (!on || over) {
        hpml_ctx_fail(ctx, HPML_ERR_STATE, "comm: MPI is %s; call MPI_Init before hpml_comm_create and free the context before "
                      "MPI_Finalize, or use hpml_launch", over ? "over already" : "not initialized");
        return NULL;
    }
    given = d->mpi_comm ? *(MPI_Comm *)d->mpi_comm : MPI_COMM_WORLD;
    MPI_Comm_rank(given, &rank);
    MPI_Comm_size(given, &size);
    MPI_Query_thread(&level);
    if (!d->mpi_comm && size == 1 && launched > 1) {
        hpml_ctx_fail(ctx, HPML_ERR_COMM, "comm: the launcher started %d processes but MPI says each is alone: mpiexec and libmpi are of "
                      "different MPIs, or this is the MPICH of Ubuntu 24.04. Use the mpiexec that belongs to your mpicc", launched);
        return NULL;
    }
    hpml_comm *c = hpmlc_comm_new(ctx, &hpmlc_mpi_transport, rank, size);
    hpmlc_mpi *x = c ? (hpmlc_mpi *)hpml_ctx_alloc(ctx, sizeof *x, NULL) : NULL;
    if (x) x->heard = (char *)hpml_ctx_alloc(ctx, (size_t)size, NULL);
    if (!x || !x->heard) return NULL;
#ifndef HPML_NO_THREADS
    pthread_mutex_init(&x->lock, NULL);
#endif
    x->level = level;
    MPI_Comm_dup(given, &x->comm);
    MPI_Comm_dup(given, &x->words);
    MPI_Comm_set_errhandler(x->comm, MPI_ERRORS_RETURN);
    MPI_Comm_set_errhandler(x->words, MPI_ERRORS_RETURN);
    c->mpi  = x;
    c->spin = 200;
    hpmlc_mpi_nodes(c, d->ranks_per_node);
    return c;
}

#endif /* HPML_USE_MPI */

// ---------------------------------------------------------------------------------------------------------------------
// >>clock   messages in virtual time
// ---------------------------------------------------------------------------------------------------------------------

/* Every thread has a clock of its own, moved by hpml_comm_compute and by the arrival of messages; real time does not count.
   One thread runs at a time: the one whose clock is behind all others. So messages enter the links in the order of their
   time, whatever the machine does, and a run can be repeated exactly. A send is copied and done at once. */

#ifndef HPML_NO_THREADS

struct hpmlc_agent {
    double         clock;
    int            rank; /* of the world: breaks ties */
    bool           runnable;
    pthread_cond_t turn;
    hpmlc_agent   *next;
};

HPMLC_FN void hpmlc_agents_wake(hpml_world *w)
{
    for (hpmlc_agent *a = w->agents; a; a = a->next)
        if (!a->runnable) a->runnable = true, __atomic_add_fetch(&w->running, 1, __ATOMIC_ACQ_REL);
}

/* Gives the turn to whose time has come; w->mutex held. */
HPMLC_FN void hpmlc_agent_pass(hpml_world *w)
{
    hpmlc_agent *best = NULL;
    if (w->agent_count < w->ranks) return; /* not all are there yet */
    for (int again = 0; again < 2 && !best; again++) {
        for (hpmlc_agent *a = w->agents; a; a = a->next)
            if (a->runnable && (!best || a->clock < best->clock || (a->clock <= best->clock && a->rank < best->rank))) best = a;
        if (!best) hpmlc_world_stuck(w); /* wakes them all, if there is anybody */
    }
    w->turn = best;
    if (best) pthread_cond_signal(&best->turn);
}

HPMLC_FN void hpmlc_agent_wait(hpml_world *w, hpmlc_agent *me)
{
    hpmlc_agent_pass(w);
    while (w->turn != me) pthread_cond_wait(&me->turn, &w->mutex);
}

/* Lets those run whose clocks are behind mine. rest: until somebody calls hpmlc_agent_rouse. */
HPMLC_FN void hpmlc_agent_yield(hpml_comm *c, bool rest)
{
    hpml_world *w = c->room->world;
    pthread_mutex_lock(&w->mutex);
    if (rest && !w->failed) {
        c->agent->runnable = false;
        c->room->inbox[c->rank].gate.sleeping = true; /* for the report of a deadlock */
        __atomic_sub_fetch(&w->running, 1, __ATOMIC_ACQ_REL);
    }
    hpmlc_agent_wait(w, c->agent);
    c->room->inbox[c->rank].gate.sleeping = false;
    pthread_mutex_unlock(&w->mutex);
}

HPMLC_FN void hpmlc_agent_rouse(hpml_comm *c, hpmlc_agent *a, double clock)
{
    hpml_world *w = c->room->world;
    pthread_mutex_lock(&w->mutex);
    if (!a->runnable) {
        a->runnable = true;
        __atomic_add_fetch(&w->running, 1, __ATOMIC_ACQ_REL);
    }
    if (a->clock < clock) a->clock = clock;
    pthread_mutex_unlock(&w->mutex);
}

HPMLC_FN hpmlc_agent *hpmlc_agent_new(hpml_world *w, int rank, double clock)
{
    hpmlc_agent *a = (hpmlc_agent *)calloc(1, sizeof *a);
    if (!a) return NULL;
    pthread_cond_init(&a->turn, NULL);
    a->rank = rank, a->clock = clock, a->runnable = true;
    pthread_mutex_lock(&w->mutex);
    a->next   = w->agents;
    w->agents = a;
    w->agent_count++;
    pthread_mutex_unlock(&w->mutex);
    return a;
}

/* Leaves the stage for good; others go on. */
HPMLC_FN void hpmlc_agent_free(hpml_world *w, hpmlc_agent *me)
{
    hpmlc_agent **at;
    pthread_mutex_lock(&w->mutex);
    for (at = &w->agents; *at != me; at = &(*at)->next) {}
    *at = me->next;
    __atomic_sub_fetch(&w->running, 1, __ATOMIC_ACQ_REL);
    hpmlc_agent_pass(w);
    pthread_mutex_unlock(&w->mutex);
    pthread_cond_destroy(&me->turn);
    free(me);
}

HPMLC_FN void hpmlc_clock_start(hpml_comm *c, hpml_message *m)
{
    hpmlc_inbox  *in = &c->room->inbox[m->peer];
    hpml_message *copy;
    if (m->receiving) return;
    hpmlc_agent_yield(c, false);
    m->done = true;
    copy    = (hpml_message *)malloc(sizeof *copy + m->bytes);
    if (!copy) {
        m->status = hpmlc_fail(c, HPML_ERR_MEMORY, "no memory for a message of %zu bytes", m->bytes);
        return;
    }
    *copy         = *m;
    copy->data    = (char *)(copy + 1);
    copy->arrival = hpmlc_arrival(c, m->peer, m->bytes, c->agent->clock);
    copy->next    = NULL;
    if (copy->arrival <= 0) copy->arrival = c->agent->clock;
    if (m->bytes > 0) memcpy(copy->data, m->data, m->bytes);
    copy->moved = (size_t)c->rank; /* the owner may be gone when it is read */
    pthread_mutex_lock(&in->gate.mutex);
    *in->last = copy;
    in->last  = &copy->next;
    hpml_comm *owner = in->owner;
    pthread_mutex_unlock(&in->gate.mutex);
    if (owner) hpmlc_agent_rouse(c, owner->agent, 0);
}

HPMLC_FN void hpmlc_clock_test(hpml_comm *c, hpml_message *m)
{
    hpmlc_inbox  *in = &c->room->inbox[c->rank];
    hpml_world   *w  = c->room->world;
    hpml_message **at, *sent;
    pthread_mutex_lock(&in->gate.mutex);
    for (at = &in->posted; (sent = *at) != NULL; at = &sent->next)
        if (sent->tag == m->tag && (int)sent->moved == m->peer) break;
    if (sent) {
        *at = sent->next;
        if (in->last == &sent->next) in->last = at;
    }
    pthread_mutex_unlock(&in->gate.mutex);
    if (sent) {
        if (c->agent->clock < sent->arrival) c->agent->clock = sent->arrival;
        if (sent->bytes != m->bytes)
            m->status = hpmlc_fail(c, HPML_ERR_COMM, "%s: rank %d sent %zu bytes, rank %d expected %zu; all ranks must pass the same "
                                   "counts", c->doing, c->origin[m->peer], sent->bytes, c->origin[c->rank], m->bytes);
        else if (m->reduce) m->reduce(m->data, sent->data, m->bytes);
        else if (m->bytes > 0) memcpy(m->data, sent->data, m->bytes);
        free(sent);
        m->done = true;
    } else if (w->failed) {
        m->done   = true;
        m->status = w->failed > w->ranks ? hpmlc_fail(c, HPML_ERR_COMM, "%s", w->text)
                                         : hpmlc_fail(c, HPML_ERR_PEER, "rank %d failed: %s", w->failed - 1, w->text);
    }
}

HPMLC_FN void hpmlc_clock_block(hpml_comm *c, hpml_message *m, double until HPMLC_UNUSED)
{
    hpmlc_inbox *in = &c->room->inbox[c->rank];
    in->peer  = c->origin[m->peer];
    in->doing = c->doing;
    hpmlc_agent_yield(c, true);
}

HPMLC_FN void hpmlc_clock_close(hpml_comm *c)
{
    hpml_world *w     = c->room->world;
    bool        mine  = c->first == c;
    hpmlc_agent *agent = c->agent;
    if (mine) hpmlc_agent_yield(c, false);
    if (mine) __atomic_add_fetch(&w->running, 1, __ATOMIC_ACQ_REL); /* threads_close takes one off, agent_free another */
    hpmlc_threads_close(c);
    if (mine) hpmlc_agent_free(w, agent);
}

HPMLC_FN hpml_status hpmlc_clock_split(hpml_comm *c, hpml_comm *part, const int32_t *ranks, int count, int color)
{
    part->agent = c->agent;
    return hpmlc_threads_split(c, part, ranks, count, color);
}

static const hpml_transport hpmlc_clock = { "clock", hpmlc_clock_start, hpmlc_clock_test, hpmlc_clock_block, hpmlc_threads_tell,
                                            hpmlc_clock_split, hpmlc_clock_close, NULL, 2e-6, 0.25e-9 };

HPMLC_FN hpml_comm *hpmlc_clock_create(hpml_ctx *ctx, const hpml_comm_desc *d)
{
    hpml_comm *c = hpmlc_threads_create(ctx, d);
    if (!c) return NULL;
    hpml_world *w = d->world;
    c->agent      = hpmlc_agent_new(w, c->rank, 0);
    if (!c->agent) {
        hpml_ctx_fail(ctx, HPML_ERR_MEMORY, "comm: no memory for a clock");
        return NULL;
    }
    c->t = &hpmlc_clock;
    pthread_mutex_lock(&w->mutex);
    if (w->agent_count == w->ranks) hpmlc_agent_pass(w);
    while (w->turn != c->agent) pthread_cond_wait(&c->agent->turn, &w->mutex);
    pthread_mutex_unlock(&w->mutex);
    const hpml_link *between = w->nodes > 1 ? &w->network.between : &w->network.inside;
    if (between->latency > 0) c->alpha = between->latency;
    if (between->bandwidth > 0) c->beta = 1 / between->bandwidth;
    return c;
}

HPML_API double hpml_comm_now(const hpml_comm *c) { return c && c->agent ? c->agent->clock : hpml_now(); }

HPML_API void hpml_comm_compute(hpml_comm *c, double seconds)
{
    if (!c || !(seconds > 0)) return;
    if (c->agent) {
        const double *slow = c->room->world->network.slow;
        c->agent->clock += seconds * (slow ? slow[c->origin[c->rank]] : 1);
        hpmlc_agent_yield(c, false);
        return;
    }
    struct timespec t;
    t.tv_sec  = (time_t)seconds;
    t.tv_nsec = (long)((seconds - floor(seconds)) * 1e9);
    nanosleep(&t, NULL);
}

#else
HPML_API double hpml_comm_now(const hpml_comm *c HPMLC_UNUSED) { return hpml_now(); }
HPML_API void   hpml_comm_compute(hpml_comm *c HPMLC_UNUSED, double seconds)
{
    for (double end = hpml_now() + seconds; hpml_now() < end;) {}
}
#endif /* HPML_NO_THREADS */

// ---------------------------------------------------------------------------------------------------------------------
// >>create   creating, splitting, freeing communicators
// ---------------------------------------------------------------------------------------------------------------------

HPMLC_FN void hpmlc_tell(hpml_comm *c, const char *text)
{
    if (c && c->t && c->t->tell) c->t->tell(c, text);
}

#ifndef HPML_NO_THREADS
HPMLC_FN hpml_comm *hpmlc_clock_create(hpml_ctx *ctx, const hpml_comm_desc *d);
#endif

/* One rank alone: nothing is ever sent. */
static const hpml_transport hpmlc_self = { "self", NULL, NULL, NULL, NULL, NULL, NULL, NULL, 1e-7, 1e-10 };

HPML_API hpml_comm *hpml_comm_create(hpml_ctx *ctx, const hpml_comm_desc *desc)
{
    hpml_comm *c = NULL;
    if (hpml_ctx_status(ctx) != HPML_OK) return NULL;
    if (!desc || desc->_begin || desc->_end) {
        hpml_ctx_fail(ctx, HPML_ERR_ARGUMENT, "comm desc: %s", desc ? "canary is not zero; zero the struct before you set fields" : "none given");
        return NULL;
    }
    switch (desc->transport) {
#ifndef HPML_NO_THREADS
    case HPML_TRANSPORT_THREADS: c = hpmlc_threads_create(ctx, desc); break;
    case HPML_TRANSPORT_CLOCK: c = hpmlc_clock_create(ctx, desc); break;
#else
    case HPML_TRANSPORT_THREADS: case HPML_TRANSPORT_CLOCK: c = hpmlc_comm_new(ctx, &hpmlc_self, 0, 1); break;
#endif
    case HPML_TRANSPORT_MPI:
#ifdef HPML_USE_MPI
        c = hpmlc_mpi_create(ctx, desc);
#else
        hpml_ctx_fail(ctx, HPML_ERR_UNSUPPORTED, "comm: this program was built without MPI; compile it with mpicc -DHPML_USE_MPI");
#endif
        break;
    }
    if (!c || hpml_ctx_status(ctx) != HPML_OK) return NULL;
    if (desc->timeout != 0) c->timeout = desc->timeout;
    c->check = desc->check;
    hpmlc_comm_layout(c);
    return c;
}

HPMLC_FN void hpmlc_background_stop(hpml_comm *c);

HPMLC_FN void hpmlc_comm_drop(void *object)
{
    hpml_comm *c = (hpml_comm *)object;
    if (!c->t) return;
    hpmlc_background_stop(c);
    if (hpml_ctx_status(c->ctx) != HPML_OK) hpmlc_tell(c, hpml_ctx_error(c->ctx));
    if (c->t->close) c->t->close(c);
    c->t = NULL;
}

HPML_API void hpml_comm_free(hpml_comm *c)
{
    if (c) hpml_ctx_release(c->ctx, c);
}

/* The communicator of `count` ranks of c, in this order; `me` is my place among them. */
HPMLC_FN hpml_comm *hpmlc_part(hpml_comm *c, hpml_ctx *ctx, const int32_t *ranks, int count, int me, int color)
{
    if (count == 1 && c->size == 1) me = 0;
    hpml_comm *part = hpmlc_comm_new(ctx, c->t, me, count);
    if (!part) return NULL;
    part->t = NULL; /* nothing to close yet */
    for (int i = 0; i < count; i++) part->origin[i] = c->origin[ranks[i]], part->node[i] = c->node[ranks[i]];
    part->first = c->first, part->timeout = c->timeout, part->check = c->check, part->spin = c->spin;
    part->alpha = c->alpha, part->beta = c->beta;
    hpmlc_comm_layout(part);
    if (c->t->split && c->t->split(c, part, ranks, count, color) != HPML_OK) return NULL;
    part->t = c->t;
    return part;
}

HPML_API hpml_comm *hpml_comm_split(hpml_comm *c, int color, int key)
{
    if (hpmlc_failed(c)) return NULL;
    int        p     = c->size, count = 0, me = 0;
    int32_t   *all   = (int32_t *)hpml_ctx_alloc(c->ctx, sizeof(int32_t) * (size_t)(3 * p), NULL), *ranks = all + 2 * p;
    hpml_comm *part  = NULL;
    if (!all) return NULL;
    all[2 * c->rank] = color, all[2 * c->rank + 1] = key;
    if (hpml_allgather(c, all, 2 * p, HPML_ELEMENT_I32) == HPML_OK) {
        for (int i = 0; i < p; i++) { /* by insertion: communicators are split rarely */
            int at = count;
            if (all[2 * i] != color) continue;
            for (; at > 0 && all[2 * ranks[at - 1] + 1] > all[2 * i + 1]; at--) ranks[at] = ranks[at - 1];
            ranks[at] = i;
            count++;
        }
        while (me < count && ranks[me] != c->rank) me++;
#ifdef HPML_USE_MPI
        if (color < 0 && c->mpi) { /* MPI wants everybody */
            MPI_Comm none;
            hpmlc_mpi_lock(c);
            MPI_Comm_split(c->mpi->comm, MPI_UNDEFINED, 0, &none);
            hpmlc_mpi_unlock(c);
        }
#endif
        if (color >= 0) part = hpmlc_part(c, c->ctx, ranks, count, me, color);
    }
    hpml_ctx_release(c->ctx, all);
    return part;
}

HPML_API hpml_comm *hpml_comm_split_node(hpml_comm *c) { return c ? hpml_comm_split(c, c->node[c->rank], c->rank) : NULL; }

// ---------------------------------------------------------------------------------------------------------------------
// >>moves   the algorithms, as moves
// ---------------------------------------------------------------------------------------------------------------------

/* An algorithm is a list of phases; a phase is played by a team on a range of the array. A team is every stride-th rank from
   `base`; member i has block i of the range. One function for each kind of phase says what a member does in round k. The
   same moves are executed on threads and MPI, counted by tests and timed by the simulator. */

typedef enum hpmlc_kind {
    HPMLC_RING_SCATTER,  /* after it, member i has the sum of block i */
    HPMLC_RING_GATHER,   /* member i had block i; now all have all */
    HPMLC_DOUBLING,      /* all have the sum; teams of 2^k */
    HPMLC_HALVE,         /* like RING_SCATTER, by halves; teams of 2^k */
    HPMLC_DOUBLE,        /* like RING_GATHER, by doubling; teams of 2^k */
    HPMLC_FOLD,          /* members beyond the power of two add to a partner */
    HPMLC_UNFOLD,        /* and get the result back */
    HPMLC_TREE_UP,       /* member 0 has the sum */
    HPMLC_TREE_DOWN,     /* all have what member 0 had */
    HPMLC_STAR_UP, HPMLC_STAR_DOWN /* the same, member 0 with each in turn */
} hpmlc_kind;

typedef struct hpmlc_team {
    int base, stride, size, me, root; /* member i is rank base + (i + root) % size * stride */
} hpmlc_team;

typedef struct hpmlc_phase {
    hpmlc_kind kind;
    hpmlc_team team;
    int64_t    at, count; /* the range */
    int        rounds;
} hpmlc_phase;

#define HPMLC_PHASES 8
typedef struct hpmlc_plan {
    hpmlc_phase phase[HPMLC_PHASES];
    int         count;
} hpmlc_plan;

HPML_API int64_t hpml_block(int64_t n, int parts, int index)
{
    return n / parts * index + n % parts * index / parts;
}

HPMLC_FN int hpmlc_log2(int n) /* rounded down */
{
    int k = 0;
    while (n >> (k + 1)) k++;
    return k;
}

HPMLC_FN int hpmlc_member(const hpmlc_team *t, int i) { return t->base + (i + t->root) % t->size * t->stride; }

HPMLC_FN int hpmlc_rounds(hpmlc_kind kind, int size)
{
    int down = hpmlc_log2(size), up = down + (size > 1 << down);
    switch (kind) {
    case HPMLC_RING_SCATTER: case HPMLC_RING_GATHER: case HPMLC_STAR_UP: case HPMLC_STAR_DOWN: return size - 1;
    case HPMLC_DOUBLING: case HPMLC_HALVE: case HPMLC_DOUBLE: return down;
    case HPMLC_TREE_UP: case HPMLC_TREE_DOWN: return up;
    case HPMLC_FOLD: case HPMLC_UNFOLD: return up > down;
    }
    return 0;
}

/* Sends blocks [a, b) of the range to member `to`. */
HPMLC_FN void hpmlc_give(const hpmlc_phase *f, hpml_move *m, int to, int a, int b)
{
    m->to        = hpmlc_member(&f->team, to);
    m->out_at    = f->at + hpml_block(f->count, f->team.size, a);
    m->out_count = f->at + hpml_block(f->count, f->team.size, b) - m->out_at;
}

HPMLC_FN void hpmlc_take(const hpmlc_phase *f, hpml_move *m, int from, int a, int b, bool add)
{
    m->from     = hpmlc_member(&f->team, from);
    m->in_at    = f->at + hpml_block(f->count, f->team.size, a);
    m->in_count = f->at + hpml_block(f->count, f->team.size, b) - m->in_at;
    m->add      = add;
}

/* Halving: before round k of log2 p, member i works on the p / 2^k blocks around its own, and keeps the half with its own. */
HPMLC_FN void hpmlc_halve(const hpmlc_phase *f, hpml_move *m, int k, bool back)
{
    int i = f->team.me, half = f->team.size >> (k + 1), other = i ^ half, mine = i / half * half, theirs = other / half * half;
    hpmlc_give(f, m, other, back ? mine : theirs, (back ? mine : theirs) + half);
    hpmlc_take(f, m, other, back ? theirs : mine, (back ? theirs : mine) + half, !back);
}

/* A binomial tree: in round k of the way up, members with bit k as their lowest send to the one without it. */
HPMLC_FN void hpmlc_tree(const hpmlc_phase *f, hpml_move *m, int bit, bool up)
{
    int i = f->team.me, p = f->team.size, step = 1 << bit;
    if (i % step) return;
    bool child = i & step;
    if (!child && i + step >= p) return;
    if (child == up) hpmlc_give(f, m, child ? i - step : i + step, 0, p);
    else hpmlc_take(f, m, child ? i - step : i + step, 0, p, up);
}

HPMLC_FN void hpmlc_move_of(const hpmlc_phase *f, int k, hpml_move *m)
{
    int p = f->team.size, i = f->team.me, full = 1 << hpmlc_log2(p);
    memset(m, 0, sizeof *m);
    m->to = m->from = -1;
    switch (f->kind) {
    case HPMLC_RING_SCATTER: {
        int out = (i + 2 * p - 1 - k) % p, in = (i + 2 * p - 2 - k) % p;
        hpmlc_give(f, m, (i + 1) % p, out, out + 1);
        hpmlc_take(f, m, (i + p - 1) % p, in, in + 1, true);
        break;
    }
    case HPMLC_RING_GATHER: {
        int out = (i + p - k) % p, in = (i + 2 * p - 1 - k) % p;
        hpmlc_give(f, m, (i + 1) % p, out, out + 1);
        hpmlc_take(f, m, (i + p - 1) % p, in, in + 1, false);
        break;
    }
    case HPMLC_DOUBLING:
        hpmlc_give(f, m, i ^ 1 << k, 0, p);
        hpmlc_take(f, m, i ^ 1 << k, 0, p, true);
        break;
    case HPMLC_HALVE: hpmlc_halve(f, m, k, false); break;
    case HPMLC_DOUBLE: hpmlc_halve(f, m, f->rounds - 1 - k, true); break;
    case HPMLC_FOLD: case HPMLC_UNFOLD:
        if (i >= p - full && i < full) break;
        if ((i >= full) == (f->kind == HPMLC_FOLD)) hpmlc_give(f, m, i >= full ? i - full : i + full, 0, p);
        else hpmlc_take(f, m, i >= full ? i - full : i + full, 0, p, f->kind == HPMLC_FOLD);
        break;
    case HPMLC_TREE_UP: hpmlc_tree(f, m, k, true); break;
    case HPMLC_TREE_DOWN: hpmlc_tree(f, m, f->rounds - 1 - k, false); break;
    case HPMLC_STAR_UP:
        if (i == 0) hpmlc_take(f, m, k + 1, 0, p, true);
        else if (i == k + 1) hpmlc_give(f, m, 0, 0, p);
        break;
    case HPMLC_STAR_DOWN:
        if (i == 0) hpmlc_give(f, m, k + 1, 0, p);
        else if (i == k + 1) hpmlc_take(f, m, 0, 0, p, false);
        break;
    }
}

HPMLC_FN void hpmlc_plan_add(hpmlc_plan *plan, hpmlc_kind kind, hpmlc_team team, int64_t at, int64_t count)
{
    int rounds = hpmlc_rounds(kind, team.size);
    if (rounds == 0 || team.me < 0) return;
    hpmlc_phase *f = &plan->phase[plan->count++];
    f->kind = kind, f->team = team, f->at = at, f->count = count, f->rounds = rounds;
}

/* The phases of an allreduce of a range within one team. */
HPMLC_FN void hpmlc_plan_team(hpmlc_plan *plan, hpml_algorithm a, hpmlc_team t, int64_t at, int64_t count)
{
    hpmlc_team core = t;
    core.size = 1 << hpmlc_log2(t.size);
    if (core.me >= core.size) core.me = -1;
    switch (a) {
    case HPML_CENTRAL:
        hpmlc_plan_add(plan, HPMLC_STAR_UP, t, at, count);
        hpmlc_plan_add(plan, HPMLC_STAR_DOWN, t, at, count);
        break;
    case HPML_TREE:
        hpmlc_plan_add(plan, HPMLC_TREE_UP, t, at, count);
        hpmlc_plan_add(plan, HPMLC_TREE_DOWN, t, at, count);
        break;
    case HPML_BUTTERFLY: case HPML_HALVING:
        hpmlc_plan_add(plan, HPMLC_FOLD, t, at, count);
        hpmlc_plan_add(plan, a == HPML_HALVING ? HPMLC_HALVE : HPMLC_DOUBLING, core, at, count);
        if (a == HPML_HALVING) hpmlc_plan_add(plan, HPMLC_DOUBLE, core, at, count);
        hpmlc_plan_add(plan, HPMLC_UNFOLD, t, at, count);
        break;
    default:
        hpmlc_plan_add(plan, HPMLC_RING_SCATTER, t, at, count);
        hpmlc_plan_add(plan, HPMLC_RING_GATHER, t, at, count);
        break;
    }
}

/* Hierarchical: a ring inside the node leaves each member one share; the members with the same place on all nodes sum that
   share by halving; a ring inside the node spreads the shares. Where nodes differ in size: a tree to the first rank of each
   node, a ring among those, a tree back. */
HPMLC_FN void hpmlc_plan_nodes(hpmlc_plan *plan, int p, int per_node, bool spread, int rank, int64_t n)
{
    int        nodes = (p + per_node - 1) / per_node, last = p - (nodes - 1) * per_node;
    hpmlc_team in, across;
    in.root = across.root = 0;
    if (p % per_node == 0) {
        in.base = spread ? rank % nodes : rank / per_node * per_node, in.stride = spread ? nodes : 1, in.size = per_node;
        in.me       = spread ? rank / nodes : rank % per_node;
        across.base = spread ? in.me * nodes : in.me, across.stride = spread ? 1 : per_node, across.size = nodes;
        across.me   = spread ? rank % nodes : rank / per_node;
        int64_t at = hpml_block(n, per_node, in.me), end = hpml_block(n, per_node, in.me + 1);
        hpmlc_plan_add(plan, HPMLC_RING_SCATTER, in, 0, n);
        hpmlc_plan_team(plan, HPML_HALVING, across, at, end - at);
        hpmlc_plan_add(plan, HPMLC_RING_GATHER, in, 0, n);
        return;
    }
    in.base = rank / per_node * per_node, in.stride = 1, in.size = rank / per_node == nodes - 1 ? last : per_node, in.me = rank - in.base;
    across.base = 0, across.stride = per_node, across.size = nodes, across.me = in.me == 0 ? rank / per_node : -1;
    hpmlc_plan_add(plan, HPMLC_TREE_UP, in, 0, n);
    if (across.me >= 0) hpmlc_plan_team(plan, HPML_RING, across, 0, n);
    hpmlc_plan_add(plan, HPMLC_TREE_DOWN, in, 0, n);
}

HPMLC_FN void hpmlc_plan_make(hpmlc_plan *plan, hpml_algorithm a, int p, int per_node, bool spread, int rank, int64_t n)
{
    hpmlc_team all;
    all.base = 0, all.stride = 1, all.size = p, all.me = rank, all.root = 0;
    plan->count = 0;
    if (a == HPML_HIERARCHICAL && per_node > 0 && per_node < p) hpmlc_plan_nodes(plan, p, per_node, spread, rank, n);
    else hpmlc_plan_team(plan, a, all, 0, n);
}

HPML_API bool hpml_allreduce_move(hpml_algorithm a, int p, int ranks_per_node, int rank, int64_t n, int round, hpml_move *out)
{
    hpmlc_plan plan;
    hpmlc_plan_make(&plan, a, p, ranks_per_node, false, rank, n);
    for (int i = 0; i < plan.count; i++) {
        if (round < plan.phase[i].rounds) {
            hpmlc_move_of(&plan.phase[i], round, out);
            return true;
        }
        round -= plan.phase[i].rounds;
    }
    return false;
}

// ---------------------------------------------------------------------------------------------------------------------
// >>sums   adding up elements
// ---------------------------------------------------------------------------------------------------------------------

/* into[i] = into[i] + from[i], or the larger. Blocks of 16 with a fixed count let any compiler use vectors at -O2. */
#define HPMLC_REDUCE(name, type, wide, read, write, expression)                                                        \
    HPMLC_FN void hpmlc_##name(void *into, const void *from, size_t bytes)                                             \
    {                                                                                                                  \
        type       *x = (type *)into;                                                                                  \
        const type *y = (const type *)from;                                                                            \
        size_t      n = bytes / sizeof(type), i = 0;                                                                   \
        for (; i + 16 <= n; i += 16)                                                                                   \
            for (size_t j = i; j < i + 16; j++) {                                                                      \
                wide a = read(x[j]), b = read(y[j]);                                                                   \
                x[j]   = write(expression);                                                                            \
            }                                                                                                          \
        for (; i < n; i++) {                                                                                           \
            wide a = read(x[i]), b = read(y[i]);                                                                       \
            x[i]   = write(expression);                                                                                \
        }                                                                                                              \
    }

HPMLC_FN float hpmlc_from_bf16(uint16_t h)
{
    uint32_t u = (uint32_t)h << 16;
    float    x;
    memcpy(&x, &u, sizeof x);
    return x;
}

HPMLC_FN uint16_t hpmlc_to_bf16(float x) /* to nearest even */
{
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return (uint16_t)(x != x ? u >> 16 | 64 : (u + 0x7fff + (u >> 16 & 1)) >> 16);
}

#define HPMLC_SAME(x) (x)
HPMLC_REDUCE(sum_f32, float, float, HPMLC_SAME, HPMLC_SAME, a + b)
HPMLC_REDUCE(sum_f64, double, double, HPMLC_SAME, HPMLC_SAME, a + b)
HPMLC_REDUCE(sum_bf16, uint16_t, float, hpmlc_from_bf16, hpmlc_to_bf16, a + b)
HPMLC_REDUCE(sum_i32, uint32_t, uint32_t, HPMLC_SAME, HPMLC_SAME, a + b) /* unsigned: wraps as two's complement does */
HPMLC_REDUCE(sum_i64, uint64_t, uint64_t, HPMLC_SAME, HPMLC_SAME, a + b)
HPMLC_REDUCE(max_f32, float, float, HPMLC_SAME, HPMLC_SAME, a > b || a != a ? a : b)
HPMLC_REDUCE(max_f64, double, double, HPMLC_SAME, HPMLC_SAME, a > b || a != a ? a : b)
HPMLC_REDUCE(max_bf16, uint16_t, float, hpmlc_from_bf16, hpmlc_to_bf16, a > b || a != a ? a : b)
HPMLC_REDUCE(max_i32, int32_t, int32_t, HPMLC_SAME, HPMLC_SAME, a > b ? a : b)
HPMLC_REDUCE(max_i64, int64_t, int64_t, HPMLC_SAME, HPMLC_SAME, a > b ? a : b)

typedef void hpmlc_reduce_fn(void *into, const void *from, size_t bytes);
HPMLC_FN hpmlc_reduce_fn *hpmlc_reducer(hpml_element e, hpml_reduce op)
{
    static hpmlc_reduce_fn *const sums[] = { hpmlc_sum_f32, hpmlc_sum_bf16, hpmlc_sum_i32, hpmlc_sum_i64, hpmlc_sum_f64, NULL };
    static hpmlc_reduce_fn *const maxima[] = { hpmlc_max_f32, hpmlc_max_bf16, hpmlc_max_i32, hpmlc_max_i64, hpmlc_max_f64, NULL };
    if ((unsigned)e > HPML_ELEMENT_BYTE || (unsigned)op > HPML_MAX) return NULL;
    return op == HPML_MAX ? maxima[e] : sums[e];
}

HPML_API size_t hpml_element_size(hpml_element e)
{
    static const size_t size[] = { 4, 2, 4, 8, 8, 1 };
    return (unsigned)e <= HPML_ELEMENT_BYTE ? size[e] : 0;
}

/* The mean of p ranks, after the sum: the same operation on the same bits on every rank. */
HPMLC_FN void hpmlc_divide(void *data, int64_t n, hpml_element e, int p)
{
    for (int64_t i = 0; i < n; i++) switch (e) {
        case HPML_ELEMENT_F32: ((float *)data)[i] /= (float)p; break;
        case HPML_ELEMENT_F64: ((double *)data)[i] /= p; break;
        case HPML_ELEMENT_BF16: ((uint16_t *)data)[i] = hpmlc_to_bf16(hpmlc_from_bf16(((uint16_t *)data)[i]) / (float)p); break;
        case HPML_ELEMENT_I32: ((int32_t *)data)[i] /= p; break;
        case HPML_ELEMENT_I64: ((int64_t *)data)[i] /= p; break;
        case HPML_ELEMENT_BYTE: break;
        }
}

// ---------------------------------------------------------------------------------------------------------------------
// >>collectives   the moves, executed
// ---------------------------------------------------------------------------------------------------------------------

/* Which collective the ranks are in, compared on all of them when .check is set. */
typedef struct hpmlc_signature {
    char    name[24];
    int64_t count;
    int32_t element, op, algorithm, sequence;
} hpmlc_signature;

/* A buffer of the communicator's that only grows. */
HPMLC_FN char *hpmlc_scratch(hpml_comm *c, size_t size)
{
    if (size <= c->scratch_size) return c->scratch;
    hpml_ctx_release(c->ctx, c->scratch);
    c->scratch      = (char *)hpml_ctx_alloc(c->ctx, size, NULL);
    c->scratch_size = c->scratch ? size : 0;
    return c->scratch;
}

HPMLC_FN hpml_status hpmlc_run(hpml_comm *c, const hpmlc_plan *plan, char *data, hpml_element e, hpmlc_reduce_fn *reduce, int tag)
{
    size_t size  = hpml_element_size(e);
    int    round = 0;
    for (int i = 0; i < plan->count; i++)
        for (int k = 0; k < plan->phase[i].rounds; k++, round++) {
            hpml_move    m;
            hpml_message out, in;
            hpmlc_move_of(&plan->phase[i], k, &m);
            c->round = round;
            if (m.to < 0 && m.from < 0) continue;
            c->counters.rounds++;
            char *from = data + (size_t)m.out_at * size;
            if (m.to >= 0 && m.from >= 0 && m.add && m.out_at == m.in_at && m.out_count > 0) { /* what is sent is added to meanwhile */
                char *copy = hpmlc_scratch(c, (size_t)m.out_count * size);
                if (!copy) return hpml_ctx_status(c->ctx);
                from = (char *)memcpy(copy, from, (size_t)m.out_count * size);
            }
            if (m.from >= 0)
                hpmlc_begin(c, true, m.from, tag, data + (size_t)m.in_at * size, (size_t)m.in_count * size, m.add ? reduce : NULL, &in);
            if (m.to >= 0) hpmlc_begin(c, false, m.to, tag, from, (size_t)m.out_count * size, NULL, &out);
            hpml_status got = m.from >= 0 ? hpml_wait(c, &in) : HPML_OK, sent = m.to >= 0 ? hpml_wait(c, &out) : HPML_OK;
            if (got != HPML_OK || sent != HPML_OK) return got != HPML_OK ? got : sent;
        }
    return HPML_OK;
}

/* Rank 0 collects what each rank is about to do and tells all of them what it thinks. */
HPMLC_FN hpml_status hpmlc_check(hpml_comm *c, const hpmlc_signature *mine, int tag)
{
    hpmlc_signature theirs;
    char            verdict[192] = { 0 };
    hpml_message    m;
    if (c->rank > 0) {
        hpmlc_begin(c, false, 0, tag, (char *)(uintptr_t)mine, sizeof *mine, NULL, &m), hpml_wait(c, &m);
        hpmlc_begin(c, true, 0, tag, verdict, sizeof verdict, NULL, &m);
        if (hpml_wait(c, &m) != HPML_OK) return m.status;
    } else {
        for (int i = 1; i < c->size; i++) {
            hpmlc_begin(c, true, i, tag, (char *)&theirs, sizeof theirs, NULL, &m);
            if (hpml_wait(c, &m) != HPML_OK) return m.status;
            if (memcmp(&theirs, mine, sizeof theirs) != 0 && !verdict[0])
                snprintf(verdict, sizeof verdict, "collective %d differs: rank 0 is in %s of %lld (element %d, op %d, algorithm %d), rank "
                         "%d in %s of %lld (%d, %d, %d)", mine->sequence, mine->name, (long long)mine->count, mine->element,
                         mine->op, mine->algorithm, c->origin[i], theirs.name, (long long)theirs.count, theirs.element,
                         theirs.op, theirs.algorithm);
        }
        for (int i = 1; i < c->size; i++) {
            hpmlc_begin(c, false, i, tag, verdict, sizeof verdict, NULL, &m);
            if (hpml_wait(c, &m) != HPML_OK) return m.status;
        }
    }
    return verdict[0] ? hpml_ctx_fail(c->ctx, HPML_ERR_COMM, "rank %d: %s", c->origin[c->rank], verdict) : HPML_OK;
}

/* Every collective begins here: a tag of its own, the name for messages, the check. Returns the tag, or -1. */
HPMLC_FN int hpmlc_enter(hpml_comm *c, const char *name, int64_t n, int element, int op, int algorithm)
{
    int tag;
    if (hpmlc_failed(c)) return -1;
    if (n < 0) return hpmlc_fail(c, HPML_ERR_ARGUMENT, "%s of %lld elements", name, (long long)n), -1;
    tag = HPMLC_TAG_COLLECTIVE + (int)(c->sequence++ % HPMLC_TAGS);
    c->doing = name;
    c->round = 0;
    if (c->check && c->size > 1) {
        hpmlc_signature s;
        memset(&s, 0, sizeof s);
        snprintf(s.name, sizeof s.name, "%s", name);
        s.count = n, s.element = element, s.op = op, s.algorithm = algorithm, s.sequence = (int32_t)c->sequence;
        if (hpmlc_check(c, &s, tag) != HPML_OK) return -1;
    }
    return tag;
}

HPMLC_FN hpml_status hpmlc_leave(hpml_comm *c, double start, hpml_status status)
{
    double end = hpml_comm_now(c);
    c->counters.seconds += end - start;
    hpml_trace_span(c->trace, HPML_LANE_COMM, c->doing, start, end);
    return status;
}

/* One phase of all ranks as one team, rooted at `root`. */
HPMLC_FN hpml_status hpmlc_phase_run(hpml_comm *c, const char *name, hpmlc_kind kind, void *data, int64_t n, hpml_element e, int op, int root)
{
    hpmlc_plan       plan;
    hpmlc_team       all;
    hpmlc_reduce_fn *reduce = op < 0 ? NULL : hpmlc_reducer(e, (hpml_reduce)op);
    double           start;
    if (c && (root < 0 || root >= c->size || (op >= 0 && !reduce)))
        return hpmlc_fail(c, HPML_ERR_ARGUMENT, "%s: root %d of %d ranks, element %d, op %d", name, root, c->size, (int)e, op);
    int tag = hpmlc_enter(c, name, n, e, op, root);
    if (tag < 0) return c ? hpml_ctx_status(c->ctx) : HPML_ERR_ARGUMENT;
    start = hpml_comm_now(c);
    all.base = 0, all.stride = 1, all.size = c->size, all.root = root, all.me = (c->rank - root + c->size) % c->size;
    plan.count = 0;
    hpmlc_plan_add(&plan, kind, all, 0, n);
    hpml_status status = hpmlc_run(c, &plan, (char *)data, e, reduce, tag);
    if (status == HPML_OK && op == HPML_MEAN) {
        int64_t at = kind == HPMLC_RING_SCATTER ? hpml_block(n, c->size, c->rank) : 0;
        int64_t end = kind == HPMLC_RING_SCATTER ? hpml_block(n, c->size, c->rank + 1) : c->rank == root ? n : 0;
        hpmlc_divide((char *)data + (size_t)at * hpml_element_size(e), end - at, e, c->size);
    }
    return hpmlc_leave(c, start, status);
}

HPML_API hpml_status hpml_reduce_scatter(hpml_comm *c, void *data, int64_t n, hpml_element e, hpml_reduce op)
{
    return hpmlc_phase_run(c, "reduce_scatter", HPMLC_RING_SCATTER, data, n, e, op, 0);
}

HPML_API hpml_status hpml_allgather(hpml_comm *c, void *data, int64_t n, hpml_element e)
{
    return hpmlc_phase_run(c, "allgather", HPMLC_RING_GATHER, data, n, e, -1, 0);
}

HPML_API hpml_status hpml_broadcast(hpml_comm *c, void *data, size_t bytes, int root)
{
    return hpmlc_phase_run(c, "broadcast", HPMLC_TREE_DOWN, data, (int64_t)bytes, HPML_ELEMENT_BYTE, -1, root);
}

HPML_API hpml_status hpml_reduce_to(hpml_comm *c, void *data, int64_t n, hpml_element e, hpml_reduce op, int root)
{
    return hpmlc_phase_run(c, "reduce", HPMLC_TREE_UP, data, n, e, op, root);
}

HPML_API hpml_status hpml_barrier(hpml_comm *c)
{
    char nothing = 0;
    int  tag     = hpmlc_enter(c, "barrier", 0, 0, 0, 0);
    if (tag < 0) return c ? hpml_ctx_status(c->ctx) : HPML_ERR_ARGUMENT;
    for (int step = 1; step < c->size; step *= 2) { /* dissemination: after round k everybody knows of 2^k others */
        hpml_message out, in;
        c->round++;
        c->counters.rounds++;
        hpmlc_begin(c, true, (c->rank - step % c->size + c->size) % c->size, tag, &nothing, 0, NULL, &in);
        hpmlc_begin(c, false, (c->rank + step) % c->size, tag, &nothing, 0, NULL, &out);
        if (hpml_wait(c, &in) != HPML_OK || hpml_wait(c, &out) != HPML_OK) return hpml_ctx_status(c->ctx);
    }
    return HPML_OK;
}

/* Blocks of `bytes` between a root and everybody, or everybody and everybody: in round k with the rank k further on. */
HPMLC_FN hpml_status hpmlc_blocks(hpml_comm *c, const char *name, const char *out, char *in, size_t bytes, int root)
{
    int tag = hpmlc_enter(c, name, (int64_t)bytes, HPML_ELEMENT_BYTE, -1, root);
    if (tag < 0) return c ? hpml_ctx_status(c->ctx) : HPML_ERR_ARGUMENT;
    bool gather = strcmp(name, "gather") == 0, scatter = strcmp(name, "scatter") == 0;
    if (in && out && bytes > 0 && (root < 0 || root == c->rank))
        memmove(in + (scatter ? 0 : (size_t)c->rank * bytes), out + (gather ? 0 : (size_t)c->rank * bytes), bytes);
    for (int k = 1; k < c->size; k++) {
        int          to = (c->rank + k) % c->size, from = (c->rank - k + c->size) % c->size;
        bool         sends = gather ? to == root : scatter ? c->rank == root : true;
        bool         takes = gather ? c->rank == root : scatter ? from == root : true;
        hpml_message o, i;
        c->round = k;
        if (takes) hpmlc_begin(c, true, from, tag, in + (scatter ? 0 : (size_t)from * bytes), bytes, NULL, &i);
        if (sends) hpmlc_begin(c, false, to, tag, (char *)(uintptr_t)out + (gather ? 0 : (size_t)to * bytes), bytes, NULL, &o);
        c->counters.rounds += takes || sends;
        if ((takes && hpml_wait(c, &i) != HPML_OK) || (sends && hpml_wait(c, &o) != HPML_OK)) return hpml_ctx_status(c->ctx);
    }
    return HPML_OK;
}

HPML_API hpml_status hpml_gather(hpml_comm *c, const void *mine, size_t bytes, void *all, int root)
{
    return hpmlc_blocks(c, "gather", (const char *)mine, (char *)all, bytes, root);
}

HPML_API hpml_status hpml_scatter(hpml_comm *c, const void *all, size_t bytes, void *mine, int root)
{
    return hpmlc_blocks(c, "scatter", (const char *)all, (char *)mine, bytes, root);
}

HPML_API hpml_status hpml_all_to_all(hpml_comm *c, const void *out, void *in, size_t bytes)
{
    return hpmlc_blocks(c, "all_to_all", (const char *)out, (char *)in, bytes, -1);
}

static const char *const hpmlc_algorithms[HPML_ALGORITHM_COUNT] = { "auto", "central", "tree", "ring", "butterfly", "halving",
                                                                    "hierarchical", "native" };

HPML_API const char *hpml_algorithm_name(hpml_algorithm a)
{
    return (unsigned)a < HPML_ALGORITHM_COUNT ? hpmlc_algorithms[a] : "unknown";
}

HPML_API hpml_algorithm hpml_algorithm_find(const char *name)
{
    for (int i = 0; name && i < HPML_ALGORITHM_COUNT; i++)
        if (strcmp(name, hpmlc_algorithms[i]) == 0) return (hpml_algorithm)i;
    return (hpml_algorithm)-1;
}

/* The formulas of the declaration. */
HPML_API hpml_algorithm hpml_comm_choose(const hpml_comm *c, int64_t bytes)
{
    static const hpml_algorithm order[] = { HPML_BUTTERFLY, HPML_HALVING, HPML_RING };
    double         p = c->size, up = ceil(log2(p)), down = floor(log2(p)), fold = up > down ? 2 : 0, best = 1e300, share = 2 * (p - 1) / p;
    double         cost[3], n = (double)bytes * c->beta;
    hpml_algorithm a = HPML_RING;
    if (c->per_node > 1 && c->per_node < c->size) return bytes > 65536 ? HPML_HIERARCHICAL : HPML_BUTTERFLY;
    cost[0] = (down + fold) * (c->alpha + n);
    cost[1] = (2 * down + fold) * c->alpha + (share + fold) * n;
    cost[2] = 2 * (p - 1) * c->alpha + share * n;
    for (int i = 0; i < 3; i++)
        if (cost[i] < best) best = cost[i], a = order[i];
    return a;
}

HPML_API hpml_status hpml_allreduce(hpml_comm *c, void *data, int64_t n, const hpml_allreduce_desc *desc)
{
    hpml_allreduce_desc d;
    hpmlc_plan          plan;
    hpml_status         status;
    memset(&d, 0, sizeof d);
    if (desc) d = *desc;
    hpmlc_reduce_fn *reduce = hpmlc_reducer(d.element, d.reduce);
    if (c && (d._begin || d._end || !reduce || (unsigned)d.algorithm >= HPML_ALGORITHM_COUNT || (n > 0 && !data)))
        return hpmlc_fail(c, HPML_ERR_ARGUMENT, "allreduce: algorithm %d, op %d, element %d, data %p: the desc is not cleared, or out of "
                          "range", (int)d.algorithm, (int)d.reduce, (int)d.element, data);
    int tag = hpmlc_enter(c, "allreduce", n, d.element, d.reduce, d.algorithm);
    if (tag < 0) return c ? hpml_ctx_status(c->ctx) : HPML_ERR_ARGUMENT;
    double start = hpml_comm_now(c);
    if (d.algorithm == HPML_AUTO) d.algorithm = hpml_comm_choose(c, n * (int64_t)hpml_element_size(d.element));
    if (d.algorithm == HPML_NATIVE) {
        if (!c->t->allreduce)
            return hpmlc_fail(c, HPML_ERR_UNSUPPORTED, "allreduce: transport %s has no native one; choose another algorithm", c->t->name);
        status = c->t->allreduce(c, data, n, d.element, d.reduce);
    } else {
        hpmlc_plan_make(&plan, d.algorithm, c->size, c->per_node, c->spread, c->rank, n);
        status = hpmlc_run(c, &plan, (char *)data, d.element, reduce, tag);
    }
    if (status == HPML_OK && d.reduce == HPML_MEAN) hpmlc_divide(data, n, d.element, c->size);
    return hpmlc_leave(c, start, status);
}

/* alpha from small messages, beta from large ones; the slowest rank's figures count for all. */
HPML_API hpml_status hpml_comm_tune(hpml_comm *c)
{
    enum { LARGE = 1 << 20 };
    double best[2] = { 1e300, 1e300 };
    if (hpmlc_failed(c)) return c ? hpml_ctx_status(c->ctx) : HPML_ERR_ARGUMENT;
    if (c->size == 1) return HPML_OK;
    char *buffer = (char *)hpml_ctx_alloc(c->ctx, 2 * LARGE, NULL);
    if (!buffer) return hpml_ctx_status(c->ctx);
    for (int i = 0; i < 16; i++)
        for (int large = 0; large < 2; large++) {
            double start = hpml_comm_now(c);
            hpml_sendrecv(c, (c->rank + 1) % c->size, buffer, large ? LARGE : 4, (c->rank + c->size - 1) % c->size, buffer + LARGE,
                          large ? LARGE : 4, 0);
            start = hpml_comm_now(c) - start;
            if (start < best[large]) best[large] = start;
        }
    hpml_ctx_release(c->ctx, buffer);
    hpml_allreduce_desc d;
    memset(&d, 0, sizeof d);
    d.reduce = HPML_MAX, d.element = HPML_ELEMENT_F64, d.algorithm = HPML_BUTTERFLY;
    if (hpml_allreduce(c, best, 2, &d) != HPML_OK) return hpml_ctx_status(c->ctx);
    c->alpha = best[0];
    c->beta  = best[1] > best[0] ? (best[1] - best[0]) / LARGE : c->beta;
    return HPML_OK;
}

// ---------------------------------------------------------------------------------------------------------------------
// >>async   work in the background
// ---------------------------------------------------------------------------------------------------------------------

/* A thread with a twin of the communicator and a hidden context (errors are handed over when a job is waited for). Jobs run
   in the order of posting, so all ranks meet. */

struct hpml_job {
    hpml_comm          *c;
    hpml_rank_fn       *work;
    void               *user;
    void               *data; /* of an allreduce */
    int64_t             n;
    hpml_allreduce_desc desc;
    hpml_status         status;
    bool                used, done;
    double              clock; /* CLOCK: when it was posted, then when it was done */
};

#define HPMLC_JOBS 256

struct hpmlc_background {
    hpml_comm *c, *twin;
    hpml_ctx  *ctx;
    hpml_job   job[HPMLC_JOBS];
    unsigned   posted, taken;
    bool       threaded, stop;
#ifndef HPML_NO_THREADS
    pthread_t  thread;
    hpmlc_gate worker, waiter;
#endif
};

HPMLC_FN hpml_status hpmlc_job_allreduce(hpml_comm *c, void *user)
{
    hpml_job *j = (hpml_job *)user;
    return hpml_allreduce(c, j->data, j->n, &j->desc);
}

#ifndef HPML_NO_THREADS

HPMLC_FN hpml_world *hpmlc_world_of(const hpml_comm *c) { return c->room ? c->room->world : NULL; }

/* Sleeps at a gate; in virtual time the turn goes on. `c` is the sleeper's communicator. */
HPMLC_FN void hpmlc_rest(hpml_comm *c, hpmlc_gate *g, unsigned *seen)
{
    if (!c->agent) {
        hpmlc_gate_sleep(hpmlc_world_of(c), g, seen, 1e300, true);
        return;
    }
    c->room->inbox[c->rank].peer = -1;
    unsigned now = __atomic_load_n(&g->changes, __ATOMIC_ACQUIRE);
    if (now == *seen) hpmlc_agent_yield(c, true);
    *seen = __atomic_load_n(&g->changes, __ATOMIC_ACQUIRE);
}

HPMLC_FN void hpmlc_rouse(hpml_comm *by, hpml_comm *who, hpmlc_gate *g)
{
    hpmlc_gate_wake(hpmlc_world_of(by), g);
    if (who->agent) hpmlc_agent_rouse(who, who->agent, 0);
}

HPMLC_FN void *hpmlc_background_main(void *arg)
{
    hpmlc_background *b    = (hpmlc_background *)arg;
    unsigned          seen = 0;
    if (b->twin->agent) hpmlc_agent_yield(b->twin, false);
    for (;;) {
        unsigned posted = __atomic_load_n(&b->posted, __ATOMIC_ACQUIRE);
        if (b->taken == posted) {
            if (__atomic_load_n(&b->stop, __ATOMIC_ACQUIRE)) break;
            hpmlc_rest(b->twin, &b->worker, &seen);
            continue;
        }
        hpml_job *j = &b->job[b->taken++ % HPMLC_JOBS];
        b->twin->step = b->c->step;
        if (b->twin->agent && b->twin->agent->clock < j->clock) b->twin->agent->clock = j->clock;
        j->status = j->work(b->twin, j->user);
        j->clock  = hpml_comm_now(b->twin);
        __atomic_store_n(&j->done, true, __ATOMIC_RELEASE);
        hpmlc_rouse(b->twin, b->c, &b->waiter);
    }
    hpml_world *w = hpmlc_world_of(b->twin);
    if (b->twin->agent) {
        hpmlc_agent *a = b->twin->agent;
        b->twin->agent = NULL;
        hpmlc_agent_free(w, a);
    } else if (w && __atomic_sub_fetch(&w->running, 1, __ATOMIC_ACQ_REL) == 0) hpmlc_world_deadlock(w);
    return NULL;
}

HPMLC_FN bool hpmlc_background_thread(hpmlc_background *b)
{
    hpml_world *w = hpmlc_world_of(b->c);
#ifdef HPML_USE_MPI
    if (b->c->mpi && b->c->mpi->level < MPI_THREAD_SERIALIZED) return false;
#endif
    hpmlc_gate_init(&b->worker);
    hpmlc_gate_init(&b->waiter);
    if (w) __atomic_add_fetch(&w->running, 1, __ATOMIC_ACQ_REL);
    if (b->c->agent) b->twin->agent = hpmlc_agent_new(w, b->c->agent->rank, b->c->agent->clock);
    b->threaded = pthread_create(&b->thread, NULL, hpmlc_background_main, b) == 0;
    if (!b->threaded && w) __atomic_sub_fetch(&w->running, 1, __ATOMIC_ACQ_REL);
    return b->threaded;
}

HPMLC_FN void hpmlc_background_stop(hpml_comm *c)
{
    hpmlc_background *b = c->background;
    if (!b) return;
    c->background = NULL;
    if (b->threaded) {
        __atomic_store_n(&b->stop, true, __ATOMIC_RELEASE);
        hpmlc_rouse(c, b->twin, &b->worker);
        if (c->agent) hpmlc_agent_yield(c, false); /* lets it end in virtual time */
        pthread_join(b->thread, NULL);
        pthread_mutex_destroy(&b->worker.mutex), pthread_cond_destroy(&b->worker.changed);
        pthread_mutex_destroy(&b->waiter.mutex), pthread_cond_destroy(&b->waiter.changed);
    }
    hpml_ctx_free(b->ctx);
}

#else
HPMLC_FN bool hpmlc_background_thread(hpmlc_background *b HPMLC_UNUSED) { return false; }
HPMLC_FN void hpmlc_background_stop(hpml_comm *c)
{
    if (c->background) hpml_ctx_free(c->background->ctx);
    c->background = NULL;
}
#endif

/* Collective, at the first job. */
HPMLC_FN hpmlc_background *hpmlc_background_start(hpml_comm *c)
{
    hpml_ctx_desc     d;
    hpmlc_background *b = (hpmlc_background *)hpml_ctx_alloc(c->ctx, sizeof *b, NULL);
    int32_t          *all = b ? (int32_t *)hpml_ctx_alloc(c->ctx, sizeof(int32_t) * (size_t)c->size, NULL) : NULL;
    if (!all) return NULL;
    memset(&d, 0, sizeof d);
    d.threads = 1;
    b->c   = c;
    b->ctx = hpml_ctx_create(&d);
    for (int i = 0; i < c->size; i++) all[i] = i;
    b->twin = b->ctx ? hpmlc_part(c, b->ctx, all, c->size, c->rank, 0) : NULL;
    hpml_ctx_release(c->ctx, all);
    if (!b->twin) return NULL;
    b->twin->spin  = 0; /* leaves the core to those who compute */
    b->twin->trace = c->ctx;
    c->background  = b;
    hpmlc_background_thread(b);
    return b;
}

HPMLC_FN hpml_job *hpmlc_job_new(hpml_comm *c, hpml_rank_fn *work, void *user)
{
    if (hpmlc_failed(c)) return NULL;
    hpmlc_background *b = c->background ? c->background : hpmlc_background_start(c);
    if (!b) return NULL;
    hpml_job *j = &b->job[b->posted % HPMLC_JOBS];
    if (j->used) {
        hpmlc_fail(c, HPML_ERR_STATE, "%d jobs in the background have not been waited for", HPMLC_JOBS);
        return NULL;
    }
    memset(j, 0, sizeof *j);
    j->c = c, j->work = work, j->user = user, j->used = true;
    return j;
}

HPMLC_FN hpml_job *hpmlc_job_post(hpml_job *j)
{
    hpmlc_background *b = j->c->background;
    if (!b->threaded) {
        b->posted++, b->taken++;
        j->status = j->work(b->twin, j->user);
        j->done   = true;
        return j;
    }
#ifndef HPML_NO_THREADS
    j->clock = hpml_comm_now(j->c);
    __atomic_add_fetch(&b->posted, 1, __ATOMIC_RELEASE);
    hpmlc_rouse(j->c, b->twin, &b->worker);
#endif
    return j;
}

HPML_API hpml_job *hpml_background(hpml_comm *c, hpml_rank_fn *work, void *user)
{
    hpml_job *j = work ? hpmlc_job_new(c, work, user) : NULL;
    return j ? hpmlc_job_post(j) : NULL;
}

HPML_API hpml_job *hpml_iallreduce(hpml_comm *c, void *data, int64_t n, const hpml_allreduce_desc *desc)
{
    hpml_job *j = hpmlc_job_new(c, hpmlc_job_allreduce, NULL);
    if (!j) return NULL;
    j->user = j, j->data = data, j->n = n;
    if (desc) j->desc = *desc;
    return hpmlc_job_post(j);
}

HPML_API bool hpml_job_done(const hpml_job *j) { return !j || __atomic_load_n(&j->done, __ATOMIC_ACQUIRE); }

HPML_API hpml_status hpml_job_wait(hpml_job *j)
{
    if (!j) return HPML_ERR_ARGUMENT;
    hpmlc_background *b = j->c->background;
#ifndef HPML_NO_THREADS
    unsigned seen = __atomic_load_n(&b->waiter.changes, __ATOMIC_ACQUIRE);
    while (!hpml_job_done(j)) hpmlc_rest(j->c, &b->waiter, &seen);
    if (j->c->agent && j->c->agent->clock < j->clock) j->c->agent->clock = j->clock;
#endif
    j->used = false;
    if (j->status != HPML_OK && hpml_ctx_status(j->c->ctx) == HPML_OK)
        hpml_ctx_fail(j->c->ctx, j->status, "%s", hpml_ctx_error(b->ctx));
    return j->status;
}

HPML_API void hpml_comm_counters(const hpml_comm *c, hpml_counters *out)
{
    memset(out, 0, sizeof *out);
    if (!c) return;
    *out = c->counters;
    if (!c->background) return;
    const hpml_counters *more = &c->background->twin->counters;
    out->messages += more->messages, out->bytes += more->bytes, out->between_bytes += more->between_bytes;
    out->rounds += more->rounds, out->seconds += more->seconds;
}

HPML_API int64_t hpml_comm_bytes_to(const hpml_comm *c, int peer)
{
    if (!c || peer < 0 || peer >= c->size) return 0;
    return c->bytes_to[peer] + (c->background ? c->background->twin->bytes_to[peer] : 0);
}

HPML_API void hpml_comm_counters_reset(hpml_comm *c)
{
    for (int twin = 0; c && twin < 2; twin++) {
        hpml_comm *x = twin ? (c->background ? c->background->twin : NULL) : c;
        if (!x) return;
        memset(&x->counters, 0, sizeof x->counters);
        memset(x->bytes_to, 0, sizeof *x->bytes_to * (size_t)x->size);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// >>launch   running a function on every rank
// ---------------------------------------------------------------------------------------------------------------------

typedef struct hpmlc_start {
    const hpml_launch_desc *d;
    hpml_comm_desc          comm;
    hpml_ctx_desc           ctx;
    hpml_rank_fn           *fn;
    void                   *user;
    hpml_status             status;
    char                    error[768];
} hpmlc_start;

HPMLC_FN void *hpmlc_start_main(void *arg)
{
    hpmlc_start *s    = (hpmlc_start *)arg;
    hpml_ctx    *ctx  = hpml_ctx_create(&s->ctx);
    hpml_comm   *comm = ctx ? hpml_comm_create(ctx, &s->comm) : NULL;
    if (comm && s->d->transport == HPML_TRANSPORT_MPI && s->d->ranks > 0 && comm->size != s->d->ranks)
        hpmlc_fail(comm, HPML_ERR_ARGUMENT, "launch: %d ranks are wanted, mpiexec started %d", s->d->ranks, comm->size);
    s->status = comm && hpml_ctx_status(ctx) == HPML_OK ? s->fn(comm, s->user) : ctx ? hpml_ctx_status(ctx) : HPML_ERR_MEMORY;
    if (s->status != HPML_OK && ctx) { /* the others must hear of it even if the context is clean */
        hpml_ctx_fail(ctx, s->status, "the rank's function returned %s", hpml_status_string(s->status));
        snprintf(s->error, sizeof s->error, "%s", hpml_ctx_error(ctx));
    }
    hpml_ctx_free(ctx);
    return NULL;
}

HPMLC_FN int hpmlc_cores(void)
{
#ifndef HPML_NO_THREADS
    long n = sysconf(_SC_NPROCESSORS_ONLN);
    return n > 0 ? (int)n : 1;
#else
    return 1;
#endif
}

/* The first failure by cause: a rank that only heard of another's comes second. */
HPMLC_FN hpml_status hpmlc_verdict(const hpmlc_start *s, int n, char *error, size_t size)
{
    const hpmlc_start *worst = NULL;
    for (int i = 0; i < n; i++)
        if (s[i].status != HPML_OK && (!worst || (worst->status == HPML_ERR_PEER && s[i].status != HPML_ERR_PEER))) worst = &s[i];
    if (error && size > 0) snprintf(error, size, "%s", worst ? worst->error : "");
    return worst ? worst->status : HPML_OK;
}

HPMLC_FN hpml_status hpmlc_launch_mpi(hpmlc_start *s, char *error, size_t size)
{
#ifdef HPML_USE_MPI
    int on = 0, level, local = hpmlc_launched();
    MPI_Initialized(&on);
    if (!on) MPI_Init_thread(NULL, NULL, MPI_THREAD_SERIALIZED, &level);
    if (s->ctx.threads == 0) s->ctx.threads = hpmlc_cores() / (local > 0 ? local : 1) > 0 ? hpmlc_cores() / (local > 0 ? local : 1) : 1;
    hpmlc_start_main(s);
    if (!on && s->status == HPML_OK) MPI_Finalize(); /* after a failure others may never come: ending the process ends the job */
    return hpmlc_verdict(s, 1, error, size);
#else
    hpmlc_start_main(s); /* says how to build with MPI */
    return hpmlc_verdict(s, 1, error, size);
#endif
}

HPML_API hpml_status hpml_launch(const hpml_launch_desc *desc, hpml_rank_fn *fn, void *user, char *error, size_t size)
{
    hpml_launch_desc d;
    memset(&d, 0, sizeof d);
    if (desc) d = *desc;
    if (error && size > 0) error[0] = 0;
    if (d._begin || d._end || !fn || d.ranks < 0) {
        if (error && size > 0) snprintf(error, size, "launch: %d ranks, or no function, or a desc that is not cleared", d.ranks);
        return HPML_ERR_ARGUMENT;
    }
    int          ranks = d.ranks > 0 && d.transport != HPML_TRANSPORT_MPI ? d.ranks : 1;
    hpmlc_start *s     = (hpmlc_start *)calloc((size_t)ranks, sizeof *s);
    hpml_status  status = HPML_ERR_MEMORY;
    if (!s) return status;
    for (int i = 0; i < ranks; i++) {
        s[i].d = &d, s[i].fn = fn, s[i].user = user, s[i].ctx = d.ctx;
        s[i].comm.transport = d.transport, s[i].comm.rank = i, s[i].comm.timeout = d.timeout, s[i].comm.check = d.check;
        s[i].comm.ranks_per_node = d.network.ranks_per_node;
        if (s[i].ctx.threads == 0 && d.transport != HPML_TRANSPORT_MPI) s[i].ctx.threads = hpmlc_cores() / ranks > 0 ? hpmlc_cores() / ranks : 1;
    }
    if (d.transport == HPML_TRANSPORT_MPI) {
        status = hpmlc_launch_mpi(s, error, size);
        free(s);
        return status;
    }
#ifndef HPML_NO_THREADS
    hpml_world *w       = hpml_world_create(d.transport, ranks, &d.network);
    pthread_t  *threads = (pthread_t *)calloc((size_t)ranks, sizeof *threads);
    int         started = 0;
    for (int i = 0; i < ranks; i++) s[i].comm.world = w;
    while (w && threads && started < ranks && pthread_create(&threads[started], NULL, hpmlc_start_main, &s[started]) == 0) started++;
    for (int i = started; w && i < ranks; i++) hpmlc_world_fail(w, i, "its thread could not be started: no memory");
    for (int i = 0; i < started; i++) pthread_join(threads[i], NULL);
    status = w && threads ? hpmlc_verdict(s, ranks, error, size) : HPML_ERR_MEMORY;
    if (status == HPML_OK && started < ranks) status = HPML_ERR_MEMORY;
    hpml_world_free(w);
    free(threads);
#else
    if (ranks == 1) hpmlc_start_main(&s[0]);
    else s[0].status = HPML_ERR_UNSUPPORTED, snprintf(s[0].error, sizeof s[0].error, "launch: %d ranks need threads (HPML_NO_THREADS is set)", ranks);
    status = hpmlc_verdict(s, ranks, error, size);
#endif
    free(s);
    return status;
}

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* HPML_COMM_BODY */
