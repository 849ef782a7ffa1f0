// hpml_comm.h - v0.1.0 - many workers in step: transports, collectives, 1-bit exchange - MIT licence (see hpml.h)
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
//     - hang: every wait has a deadline and ends in an error that names rank, peer, operation and step (but MPI_Init
//       and MPI_Finalize, which hpml_launch calls)
//     - choose between sum and mean, or change a learning rate, without being told
//
// OPTIONS, defined before the include that has HPML_IMPLEMENTATION
//     HPML_USE_MPI                 the MPI transport (compile with mpicc)
//     HPML_COMM_IMPLEMENTATION     only this header's body: split builds, where another file has hpml.h's
//
// THREADS: a communicator belongs to its rank's thread, as the context it hangs on. With collectives in the background
// (>>api-collectives) a thread of the communicator's own works on a twin of it.
// SAME BITS: results do not depend on timing; every rank gets the same bits. The order of additions, and so the last
// bit, depends on algorithm and number of ranks, unless you ask for exact sums (>>api-distribute).
//
// INDEX (grep '^// >>' hpml_comm.h)
//     api-comm   ranks, communicators, messages between two
//     api-collectives   all ranks together, at once or in the background
//     api-exchange   gradients added up in fewer bytes
//     api-distribute   synchronous data parallelism
//     api-simulate   step time on machines you do not have
//     api-mix   averaging with neighbours; one timeline for all ranks
//     base   system headers, what communicators are made of
//     messages   sending, receiving, waiting
//     world   ranks as threads: inboxes, links, deadlock
//     threads-transport   messages between threads
//     mpi   messages between processes, by MPI
//     mpi-words   words between ranks: who has failed, left, waits or works; waits of all ranks
//     mpi-create   creating, splitting, closing over MPI; exit
//     clock   messages in virtual time
//     create   creating, splitting, freeing communicators; running a function on every rank
//     moves   the algorithms, as moves; adding up elements
//     collectives   the moves, executed
//     async   work in the background
//     exchange   1-bit exchange: stripes, owners, two residuals
//     stripes   the five steps of an exchange, on the host or on a device
//     methods   top-k and low rank
//     distribute   synchronous data parallelism: buckets, overlap
//     distribute-step   buffers, weights, double buffering
//     exact   the same bits for every number of ranks
//     attach   attaching to a trainer, reports
//     carried   checkpoints of the whole job; the largest batch that does not hurt
//     mix   averaging with neighbours
//     timeline   one timeline for all ranks
//     simulate   moves in virtual time, by a queue of ranks
//     simulate-fast   rings and all to all in virtual time without a queue
//     simulate-step   a step of training in virtual time
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
// >>api-comm   ranks, communicators, messages between two
// ---------------------------------------------------------------------------------------------------------------------

/* A rank is one worker: a thread of this process, a process under mpiexec, or a thread in virtual time. All run the
   same program; a communicator is how they meet. */
typedef struct hpml_comm  hpml_comm;  /* opaque; hangs on a context */
typedef struct hpml_world hpml_world; /* ranks that are threads of one process; opaque */

typedef enum hpml_transport_kind {
    HPML_TRANSPORT_THREADS = 0, /* ranks are threads of this process; messages are copied once, from array to array */
    HPML_TRANSPORT_MPI     = 1, /* ranks are mpiexec's processes; needs HPML_USE_MPI and mpicc */
    HPML_TRANSPORT_CLOCK   = 2  /* threads in virtual time: one runs at a time, in the order of its clock; replayable */
} hpml_transport_kind;

/* A link: bytes arrive after latency + bytes / bandwidth, one message after another. Zero: nothing is added. */
typedef struct hpml_link {
    double latency;   /* seconds */
    double bandwidth; /* bytes per second */
} hpml_link;

/* Where ranks live and what lies between them. With THREADS the links are injected: a laptop shows a slow network. Each
   node has one network card: what leaves it, and what comes in, waits in line. Where a link takes time, and with CLOCK,
   every send is copied and done at once, as if cards had buffers without end. */
typedef struct hpml_network {
    int32_t       ranks_per_node; /* 0: all on one node (MPI: asks MPI) */
    bool          spread;         /* rank r is on node r % nodes, not r / ranks_per_node */
    hpml_link     inside, between; /* links within and between nodes */
    const double *slow;           /* (ranks) CLOCK: rank r computes slow[r] times as long; NULL: 1. Not copied */
    double        jitter;         /* CLOCK: each computation takes up to 1 + jitter times as long, by chance, ... */
    uint64_t      seed;           /* ... which repeats with the seed */
    const int32_t *node;          /* (ranks) the node of each, from 0 on, none left out, whatever the first two fields
                                     say: a scheduler's placement. NULL: as they say. Not copied; not for MPI */
} hpml_network;

typedef struct hpml_comm_desc {
    uint32_t            _begin;
    hpml_transport_kind transport;
    hpml_world         *world;    /* THREADS, CLOCK: required, the same for all ranks */
    int32_t             rank;     /* THREADS, CLOCK: this one's number; MPI: found out */
    void               *mpi_comm; /* MPI: points to an MPI_Comm, which is duplicated; NULL: MPI_COMM_WORLD */
    int32_t             ranks_per_node; /* MPI: 0: asks MPI which ranks share memory */
    double              timeout;  /* seconds that a wait may last; 0: 60, negative: for ever. CLOCK has no deadlines */
    bool                check;    /* for debugging: compare collectives on all ranks first (kind, count, type, order) */
    uint32_t            _end;
} hpml_comm_desc;

/* Collective. NULL on failure, the error on the context: MPI not initialized, a launcher of another MPI, a rank that
   has not called this function within the deadline, ... The communicator is freed with its context. An error on one
   rank's context fails all ranks; clearing that error does not revive the communicator. With MPI no receive with
   MPI_ANY_SOURCE and MPI_ANY_TAG may be pending on .mpi_comm during this call, because the ranks exchange messages
   there with its highest tag. */
HPML_API hpml_comm *hpml_comm_create(hpml_ctx *ctx, const hpml_comm_desc *desc);
/* Optional, collective: with MPI waits, within the deadline, until all ranks have called this function or freed their
   contexts. Free a communicator after its parts, because with MPI they cannot send without it. Free communicators, or
   their contexts, before MPI_Finalize: freeing later is safe, but then the other ranks are not notified. A process that
   calls exit before it has freed its communicator notifies the other ranks first. */
HPML_API void       hpml_comm_free(hpml_comm *c);

/* Ranks as threads that you start yourself; hpml_launch does it for you. Free it when all their contexts are gone.
   NULL: neither THREADS nor CLOCK, not 1 to 65536 ranks, a node that there is not, or no memory. */
HPML_API hpml_world *hpml_world_create(hpml_transport_kind transport, int32_t ranks, const hpml_network *network);
HPML_API void        hpml_world_free(hpml_world *w);

/* Runs `fn` on every rank and returns when all have: the one line that differs between one core, threads, virtual time
   and mpiexec (where it runs `fn` on this process's rank, and starts and ends MPI unless you have: once, then). Every
   rank gets a context and a communicator. The result is the first rank's error, its text in `error` (may be NULL); each
   rank's errors, and what is wrong with the desc, go to .ctx.log as well. */
typedef struct hpml_launch_desc {
    uint32_t            _begin;
    const char         *run;       /* transport and ranks in words: "serial", "threads:4", "clock:4", "mpi", "mpi:4";
                                      "auto": mpi if mpiexec or srun has started several processes, else threads;
                                      no number: SLURM_NTASKS, or the cores. The environment's HPML_RUN goes before it,
                                      and counts where run, transport and ranks are 0, too */
    hpml_transport_kind transport;
    int32_t             ranks;     /* THREADS, CLOCK: 0: 1. MPI: 0, or the number that must have been started */
    hpml_network        network;   /* MPI: only ranks_per_node counts */
    double              timeout;   /* as in hpml_comm_desc */
    bool                check;
    hpml_ctx_desc       ctx;       /* of every rank; threads 0: this machine's cores shared out among the ranks */
    void              (*place)(hpml_ctx_desc *ctx, int rank, void *user); /* changes it for a rank: a GPU of its own */
    bool                alone;     /* allows THREADS and CLOCK in each of several processes of mpiexec or srun; else
                                      an error, because each process would train alone. HPML_RUN allows it as well */
    uint32_t            _end;
} hpml_launch_desc;
typedef hpml_status hpml_rank_fn(hpml_comm *comm, void *user);
HPML_API hpml_status hpml_launch(const hpml_launch_desc *desc, hpml_rank_fn *fn, void *user, char *error, size_t size);
/* How many processes mpiexec or srun has started, and the number of this one, known before MPI starts; 0: neither has
   started this process. The first of these pairs that is in the environment counts: PMI_SIZE and PMI_RANK (MPICH, Intel
   MPI), PMIX_SIZE and PMIX_RANK, OMPI_COMM_WORLD_SIZE and OMPI_COMM_WORLD_RANK (Open MPI), MPI_LOCALNRANKS and
   MPI_LOCALRANKID (Hydra), SLURM_STEP_NUM_TASKS and SLURM_PROCID (srun). SLURM_NTASKS alone, with or without
   SLURM_PROCID, is a batch script, which is one process. */
HPML_API int         hpml_launched(int *rank);

HPML_API int       hpml_comm_rank(const hpml_comm *c); /* 0 to size - 1 */
HPML_API int       hpml_comm_size(const hpml_comm *c);
HPML_API int       hpml_comm_node(const hpml_comm *c, int rank); /* number of the node that `rank` is on */
HPML_API hpml_ctx *hpml_comm_ctx(const hpml_comm *c);
HPML_API const char *hpml_comm_transport(const hpml_comm *c); /* "threads", "mpi", "clock" */
HPML_API double    hpml_comm_now(const hpml_comm *c);  /* seconds: hpml_now, or this rank's virtual clock */
/* CLOCK: time passes, as for nothing else that is computed; else sleeps as long. On the timeline: "compute". */
HPML_API void      hpml_comm_compute(hpml_comm *c, double seconds);

/* Ranks of the same color form a new communicator, a part, ordered by key, then rank. Negative color: this rank joins
   no part and gets NULL. With MPI a part sends over the MPI communicator of hpml_comm_create, with tags of its own,
   because MPI creates a communicator of some ranks only by a call without a deadline. So a part has no HPML_NATIVE,
   unless it has all ranks in their old order, and at most 127 parts (15 where MPI has no tag above 32,767) exist at the
   same time. */
HPML_API hpml_comm *hpml_comm_split(hpml_comm *c, int color, int key);
HPML_API hpml_comm *hpml_comm_split_node(hpml_comm *c); /* by node */

/* Extends the deadlines of the ranks that wait for this rank, directly or through other ranks, while this rank works
   alone: they wait at least until `seconds` seconds from now. Call the function again as the work advances (most calls
   cost nothing), and with 0 when the work ends: an ordinary deadline starts then. hpml_distribute_save extends the
   deadlines by a minute each time that bytes of the checkpoint have reached the disk. */
HPML_API void hpml_comm_busy(hpml_comm *c, double seconds);

/* What this rank has sent since the last reset. Background work is included: reading waits until it is done. */
typedef struct hpml_counters {
    int64_t messages, bytes;
    int64_t between_bytes; /* of them to other nodes */
    int64_t rounds;        /* rounds of collectives in which this rank sent or received */
    double  seconds;       /* spent in collectives, waiting included */
} hpml_counters;
HPML_API void    hpml_comm_counters(const hpml_comm *c, hpml_counters *out);
HPML_API int64_t hpml_comm_messages_to(const hpml_comm *c, int peer); /* of them to `peer`; 0: no such rank */
HPML_API int64_t hpml_comm_bytes_to(const hpml_comm *c, int peer);
HPML_API void    hpml_comm_counters_reset(hpml_comm *c);

/* Messages between two ranks with the same tag arrive in the order sent. Lengths must agree. A send may wait until it
   is received. tag: 0 to HPML_TAG_MAX. */
#define HPML_TAG_MAX 1023
HPML_API hpml_status hpml_send(hpml_comm *c, int to, int tag, const void *data, size_t bytes);
HPML_API hpml_status hpml_recv(hpml_comm *c, int from, int tag, void *data, size_t bytes);
HPML_API hpml_status hpml_sendrecv(hpml_comm *c, int to, const void *out, size_t out_bytes, int from, void *in,
                                   size_t in_bytes, int tag);

/* Begun now, done when hpml_wait says so; the array must stay untouched until then (MPI: after an error, one that was
   being sent must stay until the process ends). The struct is yours. */
typedef struct hpml_message {
    int                  peer, tag;
    bool                 receiving, done;
    hpml_status          status;
    char                *data;
    size_t               bytes, moved;
    size_t               posted;       /* MPI: pieces given to MPI; else the sender's rank */
    void               (*reduce)(void *into, const void *from, size_t bytes); /* receiving: NULL: copy */
    double               arrival;      /* seconds: THREADS, CLOCK: earliest arrival; MPI: last notice of this wait */
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
    void (*test)(hpml_comm *c, hpml_message *m);  /* sets m->done and m->status when m is complete */
    void (*block)(hpml_comm *c, hpml_message *m, double until); /* sleeps until something may have changed */
    void (*abandon)(hpml_comm *c, hpml_message *m); /* after an error: stops m, whose buffer is then unused */
    void (*tell)(hpml_comm *c, const char *text); /* this rank has failed: ends the other ranks' waits */
    /* Collective; part NULL: this rank joins no part (MPI). */
    hpml_status (*split)(hpml_comm *c, hpml_comm *part, const int32_t *ranks, int count, int color);
    void (*close)(hpml_comm *c);
    hpml_status (*allreduce)(hpml_comm *c, void *data, int64_t n, int dtype, int op); /* optional: native */
    size_t piece; /* AUTO sums large arrays in pieces of as many bytes, which stay in the caches; 0: whole */
    double alpha, beta; /* typical seconds a message, seconds a byte: what AUTO starts from */
    /* optional, when the deadline of m has passed: the last rank of the chain of waits that begins with m's peer, and
       until when that rank is busy; -1: a rank has failed, as the next test of m reports. NULL: m's peer */
    int  (*lost)(hpml_comm *c, const hpml_message *m, double *busy);
    void (*busy)(hpml_comm *c, double seconds); /* optional: see hpml_comm_busy */
} hpml_transport;

// ---------------------------------------------------------------------------------------------------------------------
// >>api-collectives   all ranks together, at once or in the background
// ---------------------------------------------------------------------------------------------------------------------

/* The ways to add up (n elements, p ranks; a message costs alpha + beta bytes):
     CENTRAL    rank 0 receives all, adds in rank order, sends back       2 alpha + 2 (p-1) n beta, at rank 0's card
     TREE       binomial tree to rank 0 and back                          2 ceil(log2 p) (alpha + n beta)
     RING       2 (p-1) steps of n/p, Patarasuk & Yuan 2009               2 (p-1) alpha + 2 n (p-1)/p beta, optimal
     BUTTERFLY  recursive doubling                                        ceil(log2 p) (alpha + n beta)
     HALVING    recursive halving and doubling, Rabenseifner 2004         2 log2 p alpha + 2 n (p-1)/p beta
     HIERARCHICAL  reduce-scatter inside each node, allreduce between nodes of each share, allgather inside: only
                1/ranks_per_node of the bytes leave a node
     NATIVE     the transport's own (MPI_Iallreduce; what it does about other counts on another rank is up to the MPI);
                not on parts of a communicator, see hpml_comm_split
   BUTTERFLY and HALVING fold the ranks beyond a power of two into partners first. Every algorithm gives all ranks the
   same bits: an element is added up along one fixed tree. CENTRAL: ((x0 + x1) + x2) ...; RING: block b starts behind
   rank b and goes round; the others pair ranks as their name says. */
typedef enum hpml_algorithm {
    HPML_ALGORITHM_NONE = -1, /* there is no such one */
    HPML_AUTO = 0, HPML_CENTRAL, HPML_TREE, HPML_RING, HPML_BUTTERFLY, HPML_HALVING, HPML_HIERARCHICAL, HPML_NATIVE
} hpml_algorithm;
#define HPML_ALGORITHM_COUNT 8
HPML_API const char    *hpml_algorithm_name(hpml_algorithm a);
HPML_API hpml_algorithm hpml_algorithm_find(const char *name); /* "ring", ...; else HPML_ALGORITHM_NONE */

typedef enum hpml_reduce { HPML_SUM = 0, HPML_MEAN, HPML_MAX } hpml_reduce;

typedef enum hpml_element { /* what is added up */
    HPML_ELEMENT_F32 = 0, HPML_ELEMENT_BF16, /* added in f32, rounded each time */
    HPML_ELEMENT_I32, HPML_ELEMENT_I64, HPML_ELEMENT_F64, HPML_ELEMENT_BYTE /* BYTE: only moved */
} hpml_element;
HPML_API size_t hpml_element_size(hpml_element e);

typedef struct hpml_allreduce_desc {
    uint32_t       _begin;
    hpml_algorithm algorithm; /* AUTO: the fastest in a simulation of these links and nodes, see hpml_comm_tune */
    hpml_reduce    reduce;
    hpml_element   element;
    uint32_t       _end;
} hpml_allreduce_desc;

/* In place, any n >= 0, any number of ranks. desc NULL: the sum of f32. Every rank must pass the same n and desc. */
HPML_API hpml_status hpml_allreduce(hpml_comm *c, void *data, int64_t n, const hpml_allreduce_desc *desc);
/* Measures alpha and beta of this communicator once (some milliseconds), for AUTO. Collective. */
HPML_API hpml_status hpml_comm_tune(hpml_comm *c);
HPML_API hpml_algorithm hpml_comm_choose(const hpml_comm *c, int64_t bytes); /* what AUTO chooses; NONE: out of memory,
                                                                                  or c is NULL */

/* Block r of an array of n elements is [n r / p, n (r+1) / p). */
HPML_API int64_t     hpml_block(int64_t n, int parts, int index); /* n index / parts: offset of block `index`;
                                                                       0 where there are no parts */

/* In place. reduce_scatter: then my block holds the result, the rest is scratch. allgather: at first my block is mine,
   then all are there. reduce_to: the result is at the root; elsewhere data is scratch. */
HPML_API hpml_status hpml_reduce_scatter(hpml_comm *c, void *data, int64_t n, hpml_element e, hpml_reduce op);
HPML_API hpml_status hpml_allgather(hpml_comm *c, void *data, int64_t n, hpml_element e);
HPML_API hpml_status hpml_reduce_to(hpml_comm *c, void *data, int64_t n, hpml_element e, hpml_reduce op, int root);
HPML_API hpml_status hpml_broadcast(hpml_comm *c, void *data, size_t bytes, int root);

/* Blocks of `bytes`. all: (p, bytes), at the root only; out, in: (p, bytes), block r to and from rank r, two arrays. */
HPML_API hpml_status hpml_gather(hpml_comm *c, const void *mine, size_t bytes, void *all, int root);
HPML_API hpml_status hpml_scatter(hpml_comm *c, const void *all, size_t bytes, void *mine, int root);
HPML_API hpml_status hpml_all_to_all(hpml_comm *c, const void *out, void *in, size_t bytes);
HPML_API hpml_status hpml_barrier(hpml_comm *c);

/* The moves of a collective, one by one: for those who want to draw, count or simulate them. Round `round` of an
   allreduce of n elements as rank `rank` of p sees it. False when the algorithm has no such round. */
typedef struct hpml_move {
    int     to, from;           /* -1: none */
    int64_t out_at, out_count;  /* elements sent */
    int64_t in_at, in_count;    /* elements received, ... */
    bool    add;                /* ... and added; else they replace */
} hpml_move;
HPML_API bool hpml_allreduce_move(hpml_algorithm a, int p, int ranks_per_node, int rank, int64_t n, int round,
                                  hpml_move *out);

/* Started now, done by a thread of the communicator's own on a twin of it, in the order of starting, which must be the
   same on all ranks (where it is not: hpml_exchange_ready). The array must stay untouched until hpml_job_wait has
   returned. Jobs are reused: wait for each exactly once. Where there is no thread to be had (HPML_NO_THREADS,
   MPI_THREAD_SINGLE) the work is done at once instead. That thread takes memory from the context's allocator, too, so
   yours must then serve two threads. */
typedef struct hpml_job hpml_job;
HPML_API hpml_job   *hpml_iallreduce(hpml_comm *c, void *data, int64_t n, const hpml_allreduce_desc *desc);
HPML_API hpml_job   *hpml_background(hpml_comm *c, hpml_rank_fn *work, void *user); /* anything else, on the twin */
HPML_API bool        hpml_job_done(const hpml_job *j);
HPML_API hpml_status hpml_job_wait(hpml_job *j);

// ---------------------------------------------------------------------------------------------------------------------
// >>api-exchange   gradients added up in fewer bytes
// ---------------------------------------------------------------------------------------------------------------------

/* One array of a model, yours: (rows, cols) row-major; a vector has 1 row. Codecs work along rows (>>api-codec). */
typedef struct hpml_gradient {
    const char *name; /* for errors, saved residuals and the timeline, as long as that lives; NULL: its number */
    float      *data; /* (rows, cols) */
    int64_t     rows, cols;
} hpml_gradient;

typedef enum hpml_method {
    HPML_METHOD_CODEC = 0, /* every row on its own, by hpml_codec: NONE, BF16, ONEBIT, TWOBIT or your own */
    HPML_METHOD_TOPK,      /* the largest numbers; the rest waits (Lin et al. 2018, Deep Gradient Compression) */
    HPML_METHOD_LOWRANK    /* P Q^T of a given rank (Vogels et al. 2019, PowerSGD) */
} hpml_method;

/* How gradients are added up on all ranks. What is not compressed (codec NONE, vectors, small tensors) goes through one
   plain allreduce. Codecs that cannot be added in packed form travel as 1-bit SGD does it (Seide et al. 2014):
     1. every rank packs its whole gradient, with its residual;
     2. stripe j of the rows goes to rank j;
     3. rank j unpacks and adds the p contributions, in the order of the ranks;
     4. it packs the sum with a second residual, kept for its stripe alone;
     5. everybody gets, and unpacks, the same bits.
   2 (p-1)/p of the packed size leaves each rank, whatever p is. TOPK gathers all ranks' pairs; LOWRANK adds up P, Q. */
typedef struct hpml_exchange_desc {
    uint32_t             _begin;
    int32_t              count;     /* tensors: required */
    const hpml_gradient *tensors;   /* (count), same order and shapes on all ranks; copied, but for their names */
    hpml_codec_desc      codec;     /* METHOD_CODEC */
    hpml_method          method;
    float                ratio;     /* TOPK: share of the numbers that is sent; 0: 0.01 */
    float                momentum;  /* TOPK: momentum correction; the optimizer then has none itself */
    int32_t              lowrank;   /* LOWRANK: rank; 0: 2 */
    hpml_reduce          reduce;    /* SUM or MEAN over ranks */
    hpml_algorithm       algorithm; /* of the plain allreduce */
    int32_t              leaves;    /* contributions of this rank; 0: 1. See `exact` of hpml_distribute */
    int64_t              leaf_step; /* contribution l of a tensor is at data + l * leaf_step; the result: at l = 0 */
    int64_t              fuse_bytes; /* plain tensors, end to end, are cut into sums of so many bytes; 0: one sum */
    /* Optional, called between 3 and 4: Adagrad on the sum, as the paper does. */
    void (*in_stripe)(void *user, int tensor, int64_t row, int64_t rows, float *sum);
    void                *user;
    bool                 padded, linked, share; /* private. linked: tensors are on the device, and move by the link;
                                                   share: they are a rank's part of what its node has */
    uint32_t             _end;
} hpml_exchange_desc;

/* Residuals live with the exchange, zero at first. Collective; NULL on failure, the error on the context. */
typedef struct hpml_exchange hpml_exchange;
HPML_API hpml_exchange *hpml_exchange_create(hpml_comm *c, const hpml_exchange_desc *desc);
HPML_API void           hpml_exchange_free(hpml_exchange *x); /* optional */
/* Every tensor becomes the sum, or mean, over all ranks: the same bits everywhere. A NaN or infinity on any rank, in a
   tensor that is compressed, gives HPML_ERR_NONFINITE on every rank; residuals of the bad rows are zero, the context
   stays usable: skip this step. Tensors that travel as they are are added without a look: the update has one. */
HPML_API hpml_status hpml_exchange_run(hpml_exchange *x);
HPML_API hpml_job   *hpml_exchange_start(hpml_exchange *x); /* in the background; hpml_job_wait */
/* The same where ranks finish tensors in different orders, as in Horovod: say of each, once a run, that it is ready. In
   the background the ranks agree on what is ready on all; a fused sum goes when all of its tensors are, so the bits do
   not depend on the order; packed tensors go last. Gives the job with the last tensor, NULL before, or on an error. The
   deadline names a tensor that makes all wait, and its rank. */
HPML_API hpml_job   *hpml_exchange_ready(hpml_exchange *x, int tensor);
/* Bytes that this rank sends in one run: by messages exactly (AUTO: as hpml_comm_choose chooses now), by NATIVE or a
   link as a ring would. The messages of hpml_exchange_ready are not counted. */
HPML_API int64_t     hpml_exchange_bytes(const hpml_exchange *x);
/* Residuals: tensor by tensor, (leaves, rows, cols) of this rank, and its stripe. NULL when the codec keeps none. */
HPML_API float *hpml_exchange_residual(hpml_exchange *x, int tensor, int64_t *count);
HPML_API float *hpml_exchange_stripe(hpml_exchange *x, int tensor, int64_t *row, int64_t *rows);

/* How arrays that live on a device move between ranks without passing through the host: NCCL (hpml_nccl_attach in
   hpml_cuda.cuh), or your own. What stands between begin and end runs on a stream of the link's own; no function but
   `check` waits on the host. All ranks call the same. Errors stand on the context. */
typedef struct hpml_device_link {
    void *user; /* what all functions get */
    hpml_status (*begin)(void *user); /* what follows comes behind the device's work so far */
    hpml_status (*allreduce)(void *user, float *x, int64_t n, bool mean); /* sum or mean, in place */
    /* Bytes [out_at[r], out_at[r + 1]) of `out`, or with `same` mine of them, go to each other rank r; what comes from
       rank r lands in `in` from in_at[r] to in_at[r + 1]. */
    hpml_status (*swap)(void *user, const void *out, const size_t *out_at, bool same, void *in, const size_t *in_at);
    hpml_status (*end)(void *user);
    hpml_status (*wait)(void *user);  /* the device's further work comes behind all that has ended */
    hpml_status (*check)(void *user); /* the host waits until it is done, or an error, or a deadline has passed */
    hpml_status (*scale)(void *user, float *x, int64_t n, float times, float by); /* x times / by; the device's work */
    void (*free)(void *user);         /* optional: called when the communicator goes or gets another link */
    /* Not NULL: the link reaches the ranks of a node only, as many on each; `across` has those with my place on every
       node. Then each rank adds up a share of its node's gradients, which meet the other nodes' by messages. */
    hpml_comm *across;
    float *(*stage)(void *user, int64_t n); /* memory on the host; goes with the link */
    /* Place r of the node gets the sum of x[at[r]] to x[at[r + 1]], mine goes to `stage`; `back`: what stands there
       becomes mine, and all get it. In itself a begin and an end. */
    hpml_status (*share)(void *user, float *x, const int64_t *at, float *stage, bool back);
    hpml_status (*landed)(void *user, float *stage); /* any thread waits for it; no error on the context */
} hpml_device_link;
HPML_API hpml_status hpml_comm_set_link(hpml_comm *c, const hpml_device_link *link); /* copied; NULL: none */

// ---------------------------------------------------------------------------------------------------------------------
// >>api-distribute   synchronous data parallelism
// ---------------------------------------------------------------------------------------------------------------------

/* Attached to a trainer, it makes p ranks with a share of each global batch equal one rank with all of it: parameters
   start as rank 0's, gradients are added up while the backward pass still runs, every rank makes the same step. Serial
   code does not change: hpml_trainer_fit gets the whole data set on all ranks, and each takes its share of every batch
   (disjoint, complete, shuffled with one seed); hpml_trainer_step gets this rank's samples; hpml_trainer_evaluate goes
   through all of its data on each rank that calls it. The short last batch is weighted right, and a rank without
   samples takes part. Batchnorm sees a rank's share alone unless sync_batchnorm is set. A trainer on a device is
   served, too: by the communicator's link, where it has one (codecs and plain sums, neither exact nor delayed), else
   what is exchanged goes through the host. A link that ends at the node adds up plain floats inside; the codec packs
   what goes from node to node. */
typedef struct hpml_distribute_desc {
    uint32_t        _begin;
    hpml_codec_desc codec;        /* how gradients travel, as in hpml_exchange_desc, ... */
    hpml_method     method;
    float           ratio, momentum;
    int32_t         lowrank;
    hpml_algorithm  algorithm;
    bool            sum;          /* the sum of the ranks' mean gradients; else the mean over the global batch */
    int64_t         global_batch; /* samples a step, all ranks; 0: ranks * model batch. Shares differ by 1 at most */
    int64_t         bucket_bytes; /* travel together; 0: 256 KiB, by a link 8 MiB; 1: every tensor alone */
    bool            no_overlap;   /* exchange after the backward pass, not during it. So it is, at once and in one
                                     bucket, where ranks of one machine keep all its cores busy and no link is slow;
                                     two such add up in the optimizer's pass, and keep their own gradients */
    bool            delayed;      /* double buffering: a step applies the gradients (and moves of batchnorm's running
                                     statistics) of the one before, the first none */
    int64_t         warm_steps;   /* the first steps travel uncompressed */
    bool            sync_batchnorm; /* batchnorm on the statistics of the global batch, as one rank would have them: a
                                     small sum over the ranks for each such layer, forward and backward */
    bool            exact;        /* same bits for every number of ranks, algorithm, bucket and transport, see below */
    int64_t         leaf;         /* exact: samples of a leaf, at most the model's batch; 0: 8 */
    int32_t         history;      /* steps that hpml_distribute_steps can tell of; 0: 64 */
    uint32_t        _end;
} hpml_distribute_desc;

/* Exact sums. Floats do not add up to the same bits in every order; integers do. The global batch is cut into leaves of
   a fixed size, each computed on its own by one rank. All ranks agree on the largest gradient, scale by a power of two
   so that the sum of all leaves fits 62 bits, round each leaf to 64-bit integers, add those, and convert back once. So
   1, 2, 3, ... ranks give the same bits (same build, same kind of CPU), at 2 times the bytes of f32 and the memory of
   one gradient for each leaf of a rank. With a codec, residuals belong to leaves, which are added up in order. */

/* Collective; NULL on failure, the error on the context. */
typedef struct hpml_distributed hpml_distributed;
HPML_API hpml_distributed *hpml_distribute(hpml_trainer *t, hpml_comm *c, const hpml_distribute_desc *desc);

/* Since the start or the last call with reset; seconds are hpml_comm_now's. */
typedef struct hpml_distribute_report {
    int64_t steps;
    double  step_s, compute_s; /* mean of a step; forward and backward */
    double  comm_s, exposed_s; /* exchanging; and waiting for it with nothing left to compute */
    double  hidden;            /* 1 - exposed_s / comm_s */
    double  efficiency;        /* 1 - exposed_s / step_s: at 1, p ranks do p batches in the time of one */
    double  bytes;             /* sent by this rank in a step */
    double  plain_bytes;       /* what a ring allreduce of f32 would have sent */
    double  loss;              /* mean over all ranks' samples of the last step; with `delayed` of the step before,
                                  because the loss is sent with the gradients. NaN: before the first step */
    int64_t samples;           /* of the same step, on all ranks */
    int32_t buckets;
} hpml_distribute_report;
HPML_API void hpml_distribute_get(hpml_distributed *d, hpml_distribute_report *out, bool reset);
HPML_API int  hpml_distribute_text(hpml_distributed *d, char *buffer, size_t size); /* one line; warns below 50 % */

/* One step of one rank: where its time went, from the end of the wait of the step before to the end of its own. What is
   not in compute, exposed and bubble is data and update. With `delayed` the exchange is that of the step before. */
typedef struct hpml_step_row {
    int64_t step;      /* updates done, this one included */
    int32_t rank;
    double  step_s, compute_s; /* in all; forward and backward */
    double  overlap_s; /* exchanging behind computation */
    double  exposed_s; /* waiting for the exchange with nothing left to compute, ... */
    double  bubble_s;  /* ... but as long as the slowest rank still computed, it waited for that one */
    double  bytes;     /* sent */
} hpml_step_row;
/* The last steps of all ranks, by step, then rank; only whole steps, so many as `capacity` rows hold. Collective, with
   the same capacity. Returns the number of rows, the same rows on all ranks; -1: an error, on the context. */
HPML_API int hpml_distribute_steps(hpml_distributed *d, hpml_step_row *rows, int capacity);
HPML_API int hpml_steps_text(const hpml_step_row *rows, int count, char *buffer, size_t size); /* as snprintf */

/* A checkpoint of the whole job, residuals of all ranks and, with `delayed`, the gradients not yet applied included;
   collective. It loads on any number of ranks: what residuals owe to the gradients to come is carried over, so nothing
   that was computed is lost. On as many ranks as before, or with `exact`, the job continues bit for bit. What a codec
   owes between nodes (a link that ends at the node) loads on the same ranks of the same nodes only. */
HPML_API hpml_status hpml_distribute_save(hpml_distributed *d, const char *path);
HPML_API hpml_status hpml_distribute_load(hpml_distributed *d, const char *path);

/* Samples a step, from the next pass of fit on: at most what the models' batches hold together. Not with `exact`. The
   learning rate follows by the trainer's lr_rule. Same call on all ranks; a checkpoint does not hold it. */
HPML_API hpml_status hpml_distribute_batch(hpml_distributed *d, int64_t global_batch);

/* How large may a step be before training suffers? As in Seide et al. 2014, sizes are tried on a part of the data, from
   `min` up, each from the same checkpoint and on the same samples (without double buffering, which would favour small
   ones). The first whose mean loss exceeds the first one's by more than `slack` ends the search; the one before it is
   taken. Repeat it now and then, from half to twice the size: later in training larger steps do. Their learning rates
   were per sample: lr_rule LINEAR. */
typedef struct hpml_batch_search_desc {
    uint32_t    _begin;
    const char *path;     /* of the checkpoint that trials start from, written here and read by all ranks; required */
    int64_t     min, max; /* samples a step; 0: as now; as many as the models' batches hold */
    double      factor;   /* from one size to the next; 0: the square root of 2 */
    int64_t     multiple; /* sizes are multiples of this; 0: 1 */
    int64_t     samples;  /* that each size trains on; 0: a tenth of the data */
    double      slack;    /* share of the loss; 0: 0.01 */
    uint32_t    _end;
} hpml_batch_search_desc;
typedef struct hpml_batch_trial {
    int64_t batch; /* 0: no more were tried */
    double  loss;  /* mean over the samples; infinite: it diverged */
} hpml_batch_trial;
/* Collective, between two passes. Returns the size taken, which is then set; everything else is as before, but for the
   report, which starts anew. -1: an error, on the context. trials: (capacity) what was tried; may be NULL. */
HPML_API int64_t hpml_distribute_search(hpml_distributed *d, hpml_dataset *data, const hpml_batch_search_desc *desc,
                                        hpml_batch_trial *trials, int capacity);

// ---------------------------------------------------------------------------------------------------------------------
// >>api-simulate   step time on machines you do not have
// ---------------------------------------------------------------------------------------------------------------------

/* How long would a step of synchronous training take on 512 ranks behind 10 Gbit/s? The moves of all ranks are played
   in virtual time, without threads and payloads: the moves, links and cards of HPML_TRANSPORT_CLOCK and the same times,
   but thousands of ranks take milliseconds to seconds. What is modelled:
     - a message takes latency + bytes / bandwidth. A node's card for traffic with other nodes (out and in at once)
       serves one message after another; latency does not occupy it: k in line take latency + k bytes / bandwidth
     - a backward pass from the last layer to the first; a bucket is exchanged once its first layer is done and the
       bucket before it is through: one stream of communication a rank, beside the computation, not slowed down by it
     - stragglers: network.slow multiplies a rank's computation
   What is not: jitter, lost packets, a switch with too little bandwidth, bandwidth shared with the computation. */
typedef struct hpml_simulate_desc {
    uint32_t       _begin;
    int32_t        ranks;            /* 1 to 65536 */
    hpml_network   network;
    int32_t        layers;
    const double  *forward_s;        /* (layers) seconds on one rank for its part of the batch; NULL: 0 */
    const double  *backward_s;       /* (layers) */
    double         update_s;         /* of all weights, once all gradients are there */
    const int64_t *elements;         /* (layers) of the gradient; 0: this layer has no parameters */
    hpml_algorithm algorithm;        /* AUTO: what hpml_allreduce would take. NATIVE: nobody knows */
    hpml_element   element;          /* as which gradients travel: F32, BF16, ... */
    const int64_t *packed;           /* (layers) bytes of each gradient as a codec packs it. They cannot be added on the
                                        way: each rank sends every owner its stripe (all to all); the owner adds, packs,
                                        and sends the sum round (allgather), whatever the algorithm. NULL: no codec */
    double         codec_s_per_byte; /* to pack and unpack a byte of f32 gradient, there and back; part of the stream */
    size_t         bucket_bytes;     /* of f32 gradient: so much is exchanged together; 0: 25 MiB, 1: one by one */
    bool           no_overlap;       /* begin when the whole backward pass is done */
    bool           delayed;          /* exchange the gradients of the step before, beside this one (double buffering) */
    uint32_t       _end;
} hpml_simulate_desc;

typedef struct hpml_simulation {
    double  step_s;         /* of the slowest rank: compute_s + straggle_s + exposed_s */
    double  compute_s;      /* forward, backward and update of a rank that is not slow */
    double  straggle_s;     /* what the slowest rank computes longer */
    double  exposed_s;      /* communication that no computation hides */
    double  comm_s;         /* communication in all, packing included; hidden is comm_s - exposed_s */
    double  efficiency;     /* compute_s / step_s: at 1, p ranks do p batches in the time of one */
    int64_t bytes_per_rank; /* sent by the rank that sends most */
    int64_t messages;       /* of the rank that sends most */
    int64_t between_bytes;  /* that leave a node, all ranks together */
    int32_t buckets;
} hpml_simulation;

/* HPML_ERR_ARGUMENT, HPML_ERR_UNSUPPORTED or HPML_ERR_MEMORY, with the reason in `error` (may be NULL). */
HPML_API hpml_status hpml_simulate(const hpml_simulate_desc *desc, hpml_simulation *out, char *error, size_t size);
HPML_API int hpml_simulate_text(const hpml_simulation *s, char *buffer, size_t size); /* as hpml_distribute_text */
/* Seconds from the start of an allreduce until the last rank has the sum; -1: something is out of range. */
HPML_API double hpml_simulate_allreduce(hpml_algorithm a, int32_t ranks, const hpml_network *network, int64_t bytes);

/* Rules of thumb. Amdahl: the speedup of p ranks when the share `serial` of the work cannot be divided. Optimal ranks,
   from "1-Bit Stochastic Gradient Descent" (Seide et al. 2014): with more, ranks wait for the network. divisible_s: the
   work of a step that ranks share (half a minibatch when double buffering, and what is done to each stripe); comm_s:
   the exchange (T_comm / Z when packed Z times smaller); fixed_s: what each rank does anyway (the update). Infinite if
   comm_s <= fixed_s: then the update is the limit, and the network is never saturated. */
HPML_API double hpml_amdahl(double serial, double ranks); /* 1 / (serial + (1 - serial) / ranks) */
HPML_API double hpml_optimal_ranks(double divisible_s, double fixed_s, double comm_s); /* divisible / (comm - fixed) */

// ---------------------------------------------------------------------------------------------------------------------
// >>api-mix   averaging with neighbours; one timeline for all ranks
// ---------------------------------------------------------------------------------------------------------------------

/* Decentralized averaging (Lian et al. 2017): x_i <- sum over j of W_ij x_j, where W_ij is not 0 only for neighbours.
   With Metropolis weights W_ij = 1 / (1 + max(degree i, degree j)) the matrix is symmetric and doubly stochastic: the
   mean over ranks stays, differences shrink by the second largest |eigenvalue| in each step. */
typedef enum hpml_topology {
    HPML_TOPOLOGY_RING = 0, /* rank i with i - 1 and i + 1 */
    HPML_TOPOLOGY_WHEEL,    /* the ring of ranks 1 to p - 1, and rank 0 with all of them */
    HPML_TOPOLOGY_PAIRS,    /* each step other random pairs: 1/2 and 1/2 */
    HPML_TOPOLOGY_ALL       /* everybody with everybody: one step is the mean */
} hpml_topology;
/* W, (p, p) row-major, of step `step`. seed and step matter for PAIRS. */
HPML_API void        hpml_mixing_matrix(hpml_topology topology, int p, uint64_t seed, int64_t step, double *w);
/* One mixing step on n floats in place; the same seed and step on all ranks. */
HPML_API hpml_status hpml_mix(hpml_comm *c, float *x, int64_t n, hpml_topology topology, uint64_t seed, int64_t step);

/* hpml_trace_start on every rank, with the ranks' clocks aligned (by the quickest of some messages to and from rank 0),
   and one file with all of them: a process for each rank, its lanes below, time 0 at the first event of any rank. The
   spans of an exchange name tensors, bucket and bytes. Both collective. */
HPML_API hpml_status hpml_comm_trace_start(hpml_comm *c, const hpml_trace_desc *desc);
HPML_API hpml_status hpml_comm_trace_save(hpml_comm *c, const char *path);

#ifdef __cplusplus
} /* extern "C" */

/* In C++ a desc may be passed as an object: hpml_allreduce(comm, x, n, desc). */
#define HPMLC_REF(name, params, args) \
    static inline auto name params -> decltype(name args) { return name args; }
HPMLC_REF(hpml_comm_create, (hpml_ctx *c, const hpml_comm_desc &d), (c, &d))
HPMLC_REF(hpml_launch, (const hpml_launch_desc &d, hpml_rank_fn *fn, void *user, char *error, size_t size),
          (&d, fn, user, error, size))
HPMLC_REF(hpml_allreduce, (hpml_comm *c, void *data, int64_t n, const hpml_allreduce_desc &d), (c, data, n, &d))
HPMLC_REF(hpml_iallreduce, (hpml_comm *c, void *data, int64_t n, const hpml_allreduce_desc &d), (c, data, n, &d))
HPMLC_REF(hpml_exchange_create, (hpml_comm *c, const hpml_exchange_desc &d), (c, &d))
HPMLC_REF(hpml_distribute, (hpml_trainer *t, hpml_comm *c, const hpml_distribute_desc &d), (t, c, &d))
HPMLC_REF(hpml_distribute_search, (hpml_distributed *x, hpml_dataset *data, const hpml_batch_search_desc &d,
          hpml_batch_trial *trials, int capacity), (x, data, &d, trials, capacity))
HPMLC_REF(hpml_simulate, (const hpml_simulate_desc &d, hpml_simulation *out, char *error, size_t size),
          (&d, out, error, size))
#undef HPMLC_REF
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
#include <time.h>
#if defined(__unix__) || defined(__APPLE__)
#include <sys/select.h>
#include <sys/time.h>
#include <unistd.h>
#endif
#ifndef HPML_NO_THREADS
#include <pthread.h>
#include <sched.h>
#endif
#ifdef __linux__
#include <sys/prctl.h>
#include <sys/syscall.h>
#endif
#ifdef HPML_USE_MPI
#include <mpi.h>
#endif

/* For compilers that know GNU C, as the atomics below do. */
#define HPMLC_FN       static __attribute__((unused))
#define HPMLC_UNUSED   __attribute__((unused))
#define HPMLC_RESTRICT __restrict__
#define HPMLC_PRINTF(text, args) __attribute__((format(printf, text, args)))
HPMLI_COMPILE_FAST_BEGIN
#ifdef __cplusplus
extern "C" {
#endif

typedef struct hpmlc_room       hpmlc_room;       /* what the ranks of one communicator share: see >>world */
typedef struct hpmlc_mpi        hpmlc_mpi;        /* see >>mpi */
typedef struct hpmlc_background hpmlc_background; /* see >>async */
typedef struct hpmlc_agent      hpmlc_agent;      /* a thread in virtual time: see >>clock */

typedef void hpmlc_reduce_fn(void *into, const void *from, size_t bytes); /* adds, or keeps the larger: see >>moves */

typedef struct hpmlc_text { /* buffer for the text of an error that no context keeps; may be NULL */
    char  *text;
    size_t size;
} hpmlc_text;

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
    int                   spin;     /* tests before a wait yields the core, and as many before it sleeps */
    double                crowded;  /* hpml_now() before which waits do not yield, because yielding was slow */
    uint32_t              sequence; /* collectives so far: each has tags of its own */
    int64_t               step;     /* of the trainer, for messages; 0: of none */
    const char           *doing;
    int                   round;
    double                since;    /* when the collective began */
    int64_t               bytes;    /* of the collective's array */
    bool                  within;   /* inside a collective, whose messages are arrows on the timeline */
    hpml_trace_event      about;    /* tensors and bucket that collectives belong to, for the timeline */
    uint64_t              key;      /* of this communicator, the same on all its ranks */
    uint32_t            (*arrows)[2]; /* (size) number of collectives' messages sent to, received from each rank */
    hpml_link             inside, between; /* for AUTO; between: of nodes, or of ranks where there is but one node */
    double                forecast[31][HPML_NATIVE]; /* seconds for 2^k bytes by each algorithm; 0: not known yet */
    hpml_counters         counters;
    int64_t             (*to)[2];   /* (size) messages and bytes sent to each */
    hpml_message         *pending;  /* receives that are under way */
    hpmlc_room           *room;     /* THREADS, CLOCK */
    hpmlc_mpi            *mpi;
    unsigned              seen;     /* changes of the inbox that have been looked at; MPI: turns of waiting */
    double                busy;     /* hpml_now() until which this rank has announced that it is busy */
    hpmlc_text            farewell; /* MPI: buffer for an error of closing, because the context ends with it */
    hpmlc_agent          *agent;    /* CLOCK */
    bool                  is_part;  /* made from another communicator by hpml_comm_split, or a twin */
    hpmlc_background     *background;
    char                 *staging;  /* MPI: two pieces */
    hpml_device_link      link;     /* begin NULL: none */
    char                 *scratch;  /* copies of what is sent while it is added to */
    size_t                scratch_size;
};

/* A variable, cleared; and one that is a copy of what the caller has given, cleared where that is NULL. */
#define HPMLC_ZERO(type, name)        type name; memset(&name, 0, sizeof name)
#define HPMLC_DESC(type, name, given) HPMLC_ZERO(type, name); if (given) name = *(given)

HPMLC_FN int64_t hpmlc_min(int64_t a, int64_t b) { return a < b ? a : b; }
HPMLC_FN int64_t hpmlc_max(int64_t a, int64_t b) { return a > b ? a : b; }

HPMLC_PRINTF(3, 4)
HPMLC_FN hpml_status hpmlc_say_no(const hpmlc_text *to, hpml_status status, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    if (to && to->text && to->size > 0) vsnprintf(to->text, to->size, format, args);
    va_end(args);
    return status;
}

HPMLC_FN void hpmlc_tell(hpml_comm *c, const char *text)
{
    if (c->t && c->t->tell) c->t->tell(c, text);
}

/* Keeps the first error of the context and tells the other ranks. */
HPMLC_PRINTF(3, 4)
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
HPML_API hpml_ctx   *hpml_comm_ctx(const hpml_comm *c) { return c ? c->ctx : NULL; }
HPML_API const char *hpml_comm_transport(const hpml_comm *c) { return c ? c->t->name : "none"; }
HPML_API int hpml_comm_node(const hpml_comm *c, int r) { return c && r >= 0 && r < c->size ? c->node[r] : -1; }

/* By select, which is there under -std=c99, too. */
HPMLC_FN void hpmlc_nap(double seconds)
{
#if defined(__unix__) || defined(__APPLE__)
    struct timeval t;
    t.tv_sec  = (time_t)seconds;
    t.tv_usec = (suseconds_t)((seconds - floor(seconds)) * 1e6);
    select(0, NULL, NULL, NULL, &t);
#else
    for (double end = hpml_now() + seconds; hpml_now() < end;) {}
#endif
}

/* The part of a communicator that all transports share. */
HPMLC_FN void       hpmlc_comm_drop(void *object);
HPMLC_FN hpml_comm *hpmlc_comm_new(hpml_ctx *ctx, const hpml_transport *t, int rank, int size)
{
    hpml_comm *c = (hpml_comm *)hpml_ctx_alloc(ctx, sizeof *c, hpmlc_comm_drop);
    if (!c) return NULL;
    c->ctx = c->trace = ctx, c->rank = rank, c->size = size;
    c->origin = (int32_t *)hpml_ctx_alloc(ctx, sizeof *c->origin * (size_t)size, NULL);
    c->node   = (int32_t *)hpml_ctx_alloc(ctx, sizeof *c->node * (size_t)size, NULL);
    c->to     = (int64_t(*)[2])hpml_ctx_alloc(ctx, sizeof *c->to * (size_t)size, NULL);
    c->arrows = (uint32_t(*)[2])hpml_ctx_alloc(ctx, sizeof *c->arrows * (size_t)size, NULL);
    if (!c->arrows) return NULL;
    for (int i = 0; i < size; i++) c->origin[i] = i;
    c->t = t; /* last: without it there is nothing to close */
    c->timeout = 60, c->doing = "start";
    c->between.latency = t->alpha, c->between.bandwidth = 1 / t->beta, c->inside = c->between;
    return c;
}

/* The number of nodes; 0: a rank's is out of range. */
HPMLC_FN int hpmlc_network_nodes(const hpml_network *n, int p)
{
    int m = n->ranks_per_node > 0 && n->ranks_per_node < p ? n->ranks_per_node : p;
    int nodes = n->node ? 0 : (p + m - 1) / m;
    for (int r = 0; n->node && r < p; r++) {
        if (n->node[r] < 0 || n->node[r] >= p) return 0;
        if (n->node[r] >= nodes) nodes = n->node[r] + 1;
    }
    return nodes;
}

#define HPMLC_GOOD(x) ((x) >= 0 && (x) <= 1e12) /* false for NaN */

HPMLC_FN hpml_status hpmlc_network_check(const char *who, const hpml_network *net, int p, bool clock,
                                         const hpmlc_text *to)
{
    const hpml_link *in = &net->inside, *far = &net->between;
    if (net->ranks_per_node < 0 || !HPMLC_GOOD(in->latency) || !HPMLC_GOOD(far->latency) || !(in->bandwidth >= 0) ||
        !(far->bandwidth >= 0) || (clock && !HPMLC_GOOD(net->jitter)))
        return hpmlc_say_no(to, HPML_ERR_ARGUMENT, "%s: network of %d ranks a node, inside %g s and %g bytes/s, "
                            "between %g s and %g bytes/s, jitter %g: a negative one or NaN", who, net->ranks_per_node,
                            in->latency, in->bandwidth, far->latency, far->bandwidth, net->jitter);
    if (hpmlc_network_nodes(net, p) == 0)
        return hpmlc_say_no(to, HPML_ERR_ARGUMENT, "%s: network.node of a rank is not from 0 to %d", who, p - 1);
    for (int r = 0; clock && net->slow && r < p; r++)
        if (!(net->slow[r] > 0) || !HPMLC_GOOD(net->slow[r]))
            return hpmlc_say_no(to, HPML_ERR_ARGUMENT, "%s: network.slow[%d] is %g, not above 0", who, r, net->slow[r]);
    return HPML_OK;
}

HPMLC_FN int hpmlc_network_node(const hpml_network *n, int nodes, int r)
{
    return n->node ? n->node[r] : n->spread ? r % nodes : n->ranks_per_node > 0 ? r / n->ranks_per_node : 0;
}

/* In virtual time AUTO knows the links; one between nodes that costs nothing is a message's usual time. */
HPMLC_FN void hpmlc_comm_links(hpml_comm *c, const hpml_network *n, int nodes)
{
    const hpml_link *between = nodes > 1 ? &n->between : &n->inside;
    c->inside = n->inside, c->between.latency = 2e-6, c->between.bandwidth = 4e9;
    if (between->latency > 0) c->between.latency = between->latency;
    if (between->bandwidth > 0) c->between.bandwidth = between->bandwidth;
}

/* Ranks per node, and whether nodes hold neighbours (the last may have fewer) or every k-th rank; mixed: 0. */
HPMLC_FN void hpmlc_comm_layout(hpml_comm *c)
{
    int p = c->size, k = 1, nodes = 0;
    c->per_node = 0, c->spread = false;
    while (k < p && c->node[k] == c->node[0]) k++;
    for (int i = 0; i < p; i++)
        if (c->node[i] >= nodes) nodes = c->node[i] + 1;
    for (int spread = 0; spread < 2 && c->per_node == 0; spread++) {
        bool fits = nodes > 0 && (!spread || p % nodes == 0);
        for (int i = 0; i < p && fits; i++) fits = c->node[i] == (spread ? i % nodes : c->node[0] + i / k);
        if (fits) c->per_node = spread ? p / nodes : k, c->spread = spread == 1 && nodes > 1 && nodes < p;
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// >>messages   sending, receiving, waiting
// ---------------------------------------------------------------------------------------------------------------------

/* A message is begun by the transport and tested until it is done. Waiting spins for some microseconds, then yields,
   then sleeps, at once if it is the peer that needs this core: on a busy machine whoever has work gets it. (MPICH spins
   for ever: with more ranks than cores its own waiting was measured 40 times slower than this.) */

#define HPMLC_TAG_COLLECTIVE (HPML_TAG_MAX + 1)
#define HPMLC_TAGS           1023 /* of collectives, which take them in turn: messages of one tag stay in order */
#define HPMLC_TAG_EXTRA      (HPMLC_TAG_COLLECTIVE + HPMLC_TAGS) /* MPI: of control messages; THREADS: of splits */
#define HPMLC_TAG_SPAN       (HPMLC_TAG_EXTRA + 1)

HPMLC_FN hpml_status hpmlc_begin(hpml_comm *c, bool receiving, int peer, int tag, char *data, size_t bytes,
                                 hpmlc_reduce_fn *reduce, hpml_message *m)
{
    memset(m, 0, sizeof *m);
    m->done = true;
    if (hpmlc_failed(c)) return m->status = c ? hpml_ctx_status(c->ctx) : HPML_ERR_ARGUMENT;
    if (peer < 0 || peer >= c->size || tag < 0 || (bytes > 0 && !data))
        return m->status = hpmlc_fail(c, HPML_ERR_ARGUMENT, "%s %d: a rank from 0 to %d, a tag from 0 to %d and data "
                                      "were expected", receiving ? "receive from" : "send to", peer, c->size - 1,
                                      HPML_TAG_MAX);
    m->receiving = receiving, m->peer = peer, m->tag = tag, m->data = data, m->bytes = bytes, m->reduce = reduce;
    m->owner = c, m->done = false;
    if (receiving) m->next = c->pending, c->pending = m;
    else {
        c->counters.messages++;
        c->counters.bytes += (int64_t)bytes;
        c->to[peer][0]++, c->to[peer][1] += (int64_t)bytes;
        if (c->node[peer] != c->node[c->rank]) c->counters.between_bytes += (int64_t)bytes;
    }
    c->t->start(c, m);
    return HPML_OK;
}

/* Takes a message out of a list, if it is there. */
HPMLC_FN void hpmlc_unlist(hpml_message **at, const hpml_message *m)
{
    while (*at && *at != m) at = &(*at)->next;
    if (*at) *at = m->next;
}

#define HPMLC_ROOMY 2000 /* c->spin of ranks that have a core each */

/* How often to look before the core is given away; a twin's owner changes it while the twin waits. */
HPMLC_FN int hpmlc_spin(const hpml_comm *c) { return __atomic_load_n(&c->spin, __ATOMIC_RELAXED); }

HPMLC_FN void hpmlc_pause(bool yield)
{
#ifndef HPML_NO_THREADS
    if (yield) sched_yield();
#endif
#if defined(__x86_64__) || defined(__i386__)
    __asm__ __volatile__("pause");
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
    (void)yield;
}

#define HPMLC_COSTLY 100e-6 /* seconds: a yield that takes longer has given the core to another program */
#define HPMLC_EARLY  60e-6  /* seconds before a message arrives at which a sleep ends, because the system wakes late */

/* One turn of a wait for m without sleeping: spins in early turns, yields the core in later ones. False: the caller
   sleeps instead, because the turns are used up, or the message is in flight and known to take longer, or a yield has
   cost another program's time slice; after such a yield none is tried for 100 times as long as the yield took. */
HPMLC_FN bool hpmlc_linger(hpml_comm *c, const hpml_message *m, int turn)
{
    const int spin = hpmlc_spin(c);
    if (c->room && m->arrival > 0) {
        if (spin < HPMLC_ROOMY || m->arrival > hpml_now() + HPMLC_EARLY) return false;
        hpmlc_pause(false);
        return true;
    }
    if (turn >= 2 * spin) return false;
    if (turn <= spin) {
        hpmlc_pause(false);
        return true;
    }
    double since = hpml_now();
    if (since < c->crowded) return false;
    hpmlc_pause(true);
    double took = hpml_now() - since;
    if (took > HPMLC_COSTLY) c->crowded = since + 100 * took;
    return true;
}

HPMLC_FN bool hpmlc_beside(hpml_comm *c, int peer);
HPMLC_FN int  hpmlc_cores(int ranks);

/* A sender learns from the receiver's thread that its message is done. */
HPMLC_FN bool hpmlc_done(const hpml_message *m) { return __atomic_load_n(&m->done, __ATOMIC_ACQUIRE); }

/* The receive that gets the next message from m's peer with m's tag: the oldest one pending, the last in the list. */
HPMLC_FN const hpml_message *hpmlc_next(const hpml_message *m)
{
    const hpml_message *next = m;
    for (const hpml_message *older = m->receiving ? m->next : NULL; older; older = older->next)
        if (!older->done && older->peer == m->peer && older->tag == m->tag) next = older;
    return next;
}

HPMLC_FN void hpmlc_test(hpml_comm *c, hpml_message *m)
{
    if (hpmlc_next(m) == m) c->t->test(c, m);
}

/* A receive has met a message of another length. */
HPMLC_FN void hpmlc_mismatch(hpml_comm *c, hpml_message *m, size_t sent)
{
    m->done   = true;
    m->status = hpmlc_fail(c, HPML_ERR_COMM, "%s: rank %d sent %zu bytes, rank %d expected %zu; all ranks must pass "
                           "the same counts", c->doing, c->origin[m->peer], sent, c->origin[c->rank], m->bytes);
}

HPMLC_FN void hpmlc_waits(hpml_comm *c, int peer); /* THREADS: notes whom this rank waits for; -1: no rank */
HPMLC_FN void hpmlc_calm(hpml_comm *c, const hpml_message *m); /* MPI: announces that the wait for m is over */

/* Handles the deadline of m: extends the deadline where the rank at the end of the chain of waits is busy, else ends
   the wait with an error that names that rank. Returns the hpml_now() until which to wait. */
HPMLC_FN double hpmlc_overdue(hpml_comm *c, hpml_message *m)
{
    const int peer = c->origin[m->peer];
    double    busy = 0;
    char      chain[48] = "";
    int       lost = c->t->lost ? c->t->lost(c, m, &busy) : peer;
    if (lost < 0) return hpml_now();
    if (hpml_now() < busy) return fmin(busy, hpml_now() + c->timeout); /* the rank may finish earlier */
    if (lost != peer) snprintf(chain, sizeof chain, ", which waits for rank %d,", lost);
    hpmlc_fail(c, HPML_ERR_TIMEOUT, "waited %g s for rank %d%s in %s, round %d, step %lld; is that rank alive and in "
               "the same operation? (.timeout sets the limit)", c->timeout, peer, chain, c->doing, c->round,
               (long long)c->step);
    c->t->abandon(c, m);
    m->status = hpml_ctx_status(c->ctx);
    return hpml_now();
}

HPML_API void hpml_comm_busy(hpml_comm *c, double seconds)
{
    const double now = hpml_now(), lasts = 1.125 * seconds; /* an eighth more, so that calls in between say nothing */
    if (!c || !c->t->busy || c->timeout < 0 || (seconds > 0 && now + seconds <= c->busy)) return;
    c->busy = seconds > 0 ? now + lasts : 0;
    c->t->busy(c, seconds > 0 ? lasts : c->timeout);
}

HPML_API hpml_status hpml_wait(hpml_comm *c, hpml_message *m)
{
    double limit = 0;
    bool   beside = false;
    if (!c || !m) return HPML_ERR_ARGUMENT;
    for (int turn = 0; !hpmlc_done(m); turn++) {
        bool moved = false;
        hpmlc_test(c, m);
        for (hpml_message *other = c->pending; other && !hpmlc_done(m); other = other->next)
            if (other != m && !other->done) hpmlc_test(c, other), moved = moved || other->done;
        if (hpmlc_done(m)) break;
        if (turn == 0) beside = hpmlc_beside(c, m->peer);
        if (moved || (!beside && hpmlc_linger(c, m, turn))) continue;
        if (limit == 0 && hpmlc_failed(c)) { /* begun before this rank failed: one deadline is enough */
            c->t->abandon(c, m);
            m->status = hpml_ctx_status(c->ctx);
            break;
        }
        if (limit == 0) limit = c->timeout < 0 || c->agent ? 1e300 : hpml_now() + c->timeout;
        if (hpml_now() < limit) c->t->block(c, m, limit);
        else limit = hpmlc_overdue(c, m);
    }
    if (limit != 0) hpmlc_waits(c, -1);
    if (limit != 0 && m->status == HPML_OK) hpmlc_calm(c, m);
    if (m->receiving) hpmlc_unlist(&c->pending, m);
    return m->status;
}

/* Adds a span to the timeline, about the tensors in c->about. */
HPMLC_FN void hpmlc_span(const hpml_comm *c, const char *name, double start, double end, int64_t bytes)
{
    if (!hpml_trace_on(c->trace)) return;
    hpml_trace_event e = c->about;
    e.lane = HPML_LANE_COMM, e.name = name, e.start = start, e.end = end, e.number = bytes;
    hpml_trace_add(c->trace, &e);
}

/* One end of an arrow on the timeline. Both ranks count the messages between them, so both know a message's number. */
HPMLC_FN void hpmlc_arrow(hpml_comm *c, bool receives, int peer)
{
    uint32_t count = c->arrows[peer][receives]++;
    if (!c->within || !hpml_trace_on(c->trace)) return;
    HPMLC_ZERO(hpml_trace_event, e);
    int      me = c->origin[c->rank], other = c->origin[peer];
    uint64_t ends = (uint64_t)(receives ? other : me) << 32 | (uint64_t)(receives ? me : other);
    uint64_t id   = ((c->key * 0x9e3779b97f4a7c15u + ends) * 0x9e3779b97f4a7c15u + count) * 0x9e3779b97f4a7c15u;
    e.kind = receives ? HPML_TRACE_RECEIVE : HPML_TRACE_SEND, e.lane = HPML_LANE_COMM, e.name = "message";
    e.start = hpml_comm_now(c), e.number = (int64_t)(id >> 12); /* 52 bits, because a double holds these exactly */
    hpml_trace_add(c->trace, &e);
}

/* One round of a collective: sends to one rank and receives from one at the same time; -1: none. */
HPMLC_FN hpml_status hpmlc_round(hpml_comm *c, int tag, int to, const char *out, size_t out_bytes, int from, char *in,
                                 size_t in_bytes, hpmlc_reduce_fn *reduce)
{
    hpml_message o, i;
    hpml_status  got = HPML_OK, sent = HPML_OK;
    if (to < 0 && from < 0) return HPML_OK;
    c->counters.rounds++;
    if (to >= 0) hpmlc_arrow(c, false, to);
    if (from >= 0) hpmlc_begin(c, true, from, tag, in, in_bytes, reduce, &i);
    if (to >= 0) hpmlc_begin(c, false, to, tag, (char *)(uintptr_t)out, out_bytes, NULL, &o);
    if (from >= 0) got = hpml_wait(c, &i);
    if (from >= 0) hpmlc_arrow(c, true, from);
    if (to >= 0) sent = hpml_wait(c, &o); /* both, or one would outlive its place on the stack */
    return got != HPML_OK ? got : sent;
}

HPML_API hpml_status hpml_isend(hpml_comm *c, int to, int tag, const void *data, size_t bytes, hpml_message *m)
{
    if (c) c->doing = "send";
    if (tag > HPML_TAG_MAX) tag = -1; /* beyond are the collectives' */
    return hpmlc_begin(c, false, to, tag, (char *)(uintptr_t)data, bytes, NULL, m);
}

HPML_API hpml_status hpml_irecv(hpml_comm *c, int from, int tag, void *data, size_t bytes, hpml_message *m)
{
    if (c) c->doing = "receive";
    if (tag > HPML_TAG_MAX) tag = -1;
    return hpmlc_begin(c, true, from, tag, (char *)data, bytes, NULL, m);
}

HPML_API hpml_status hpml_send(hpml_comm *c, int to, int tag, const void *data, size_t bytes)
{
    hpml_message m;
    hpml_isend(c, to, tag, data, bytes, &m);
    return hpml_wait(c, &m);
}

HPML_API hpml_status hpml_recv(hpml_comm *c, int from, int tag, void *data, size_t bytes)
{
    hpml_message m;
    hpml_irecv(c, from, tag, data, bytes, &m);
    return hpml_wait(c, &m);
}

HPML_API hpml_status hpml_sendrecv(hpml_comm *c, int to, const void *out, size_t out_bytes, int from, void *in,
                                   size_t in_bytes, int tag)
{
    hpml_message send, receive;
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

   The world counts its running threads. One that goes to sleep leaves the count, whoever wakes it puts it back before
   it goes on itself; so when the count is zero nobody will ever wake anybody: a deadlock, known at once and exactly. */

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
    int           peer;           /* world rank that the owner waits for, -1: none */
    const char   *doing;
    int           core;           /* 1 + that of its owner's last wait */
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
    bool                buffered; /* sends are copied, and done at once: CLOCK, or some link takes time */
    hpmlc_agent        *agents, *turn; /* CLOCK: all threads, and the one that runs */
    int                 agent_count;
    double             *card;     /* (2 (ranks + nodes)) when each sender's and receiver's card is free again */
    double             *busy;     /* (ranks) hpml_now() until which each rank is busy */
};

/* Deadlines count by a clock that nobody sets, where condition variables can have one (not under -std=c99). */
#if defined(CLOCK_MONOTONIC) && !defined(__APPLE__)
#define HPMLC_MONOTONIC
#endif

HPMLC_FN void hpmlc_gate_init(hpmlc_gate *g)
{
    pthread_condattr_t clock;
    pthread_condattr_init(&clock);
#ifdef HPMLC_MONOTONIC
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
#endif
    pthread_mutex_init(&g->mutex, NULL);
    pthread_cond_init(&g->changed, &clock);
    pthread_condattr_destroy(&clock);
}

HPMLC_FN void hpmlc_gate_close(hpmlc_gate *g)
{
    pthread_mutex_destroy(&g->mutex);
    pthread_cond_destroy(&g->changed);
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
    bool any = false;
    if (__atomic_load_n(&w->running, __ATOMIC_ACQUIRE) > 0 || w->failed) return;
    size_t at = (size_t)snprintf(w->text, sizeof w->text, "deadlock:");
    for (hpmlc_room *r = w->rooms; r; r = r->next)
        for (int i = 0; i < r->size && at < sizeof w->text; i++) {
            const hpmlc_inbox *in = &r->inbox[i];
            if (!in->gate.sleeping || !in->owner || in->peer < 0) continue;
            at += (size_t)snprintf(w->text + at, sizeof w->text - at, "%s rank %d waits for rank %d%s in %s",
                                   any ? ";" : "", in->owner->origin[i], in->peer,
                                   w->left[in->peer] ? ", which has left," : "", in->doing);
            any = true;
        }
    if (!any) return;
    __atomic_store_n(&w->failed, w->ranks + 1, __ATOMIC_RELEASE); /* everybody and nobody */
    hpmlc_world_wake(w);
}

HPMLC_FN void hpmlc_world_deadlock(hpml_world *w)
{
    pthread_mutex_lock(&w->mutex);
    hpmlc_world_stuck(w);
    pthread_mutex_unlock(&w->mutex);
}

/* `until`, a time of hpml_now, by the gates' clock. Far away is some days: then the sleeper looks again. */
HPMLC_FN void hpmlc_gate_limit(double until, struct timespec *limit)
{
    double left = fmin(fmax(until - hpml_now(), 0), 1e6);
#ifdef HPMLC_MONOTONIC
    clock_gettime(CLOCK_MONOTONIC, limit);
    left += 1e-9 * (double)limit->tv_nsec;
#else
    struct timeval now;
    gettimeofday(&now, NULL);
    limit->tv_sec = now.tv_sec;
    left += 1e-6 * (double)now.tv_usec;
#endif
    limit->tv_sec += (time_t)left;
    limit->tv_nsec = (long)((left - floor(left)) * 1e9);
}

/* Sleeps until the gate changes from what was `seen`, or until the time. counted: out of the count of the running. */
HPMLC_FN void hpmlc_gate_sleep(hpml_world *w, hpmlc_gate *g, unsigned *seen, double until, bool counted)
{
    struct timespec limit;
    pthread_mutex_lock(&g->mutex);
    if (g->changes == *seen) {
        hpmlc_gate_limit(until, &limit);
        g->sleeping = counted;
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
        for (hpml_message *m = r->world->buffered ? r->inbox[i].posted : NULL, *next; m; m = next) {
            next = m->next;
            free(m); /* a copy that was never received */
        }
        hpmlc_gate_close(&r->inbox[i].gate);
    }
    free(r->inbox);
    free(r);
}

HPMLC_FN bool hpmlc_link_takes_time(const hpml_link *link) { return link->latency > 0 || link->bandwidth > 0; }

HPML_API hpml_world *hpml_world_create(hpml_transport_kind transport, int32_t ranks, const hpml_network *network)
{
    bool        clock = transport == HPML_TRANSPORT_CLOCK, known = clock || transport == HPML_TRANSPORT_THREADS;
    hpml_world *w = !known || ranks < 1 || ranks > 65536 ? NULL : (hpml_world *)calloc(1, sizeof *w);
    if (!w) return NULL;
    w->kind = transport, w->ranks = w->running = ranks;
    if (network) w->network = *network;
    w->buffered = clock || hpmlc_link_takes_time(&w->network.inside) || hpmlc_link_takes_time(&w->network.between);
    w->nodes = hpmlc_network_nodes(&w->network, ranks);
    w->left  = (bool *)calloc((size_t)ranks, sizeof *w->left);
    w->card  = (double *)calloc((size_t)(2 * (ranks + w->nodes)), sizeof *w->card);
    w->busy  = (double *)calloc((size_t)ranks, sizeof *w->busy);
    pthread_mutex_init(&w->mutex, NULL);
    bool good = hpmlc_network_check("", &w->network, ranks, clock, NULL) == HPML_OK;
    if (good && w->left && w->card && w->busy && hpmlc_room_new(w, ranks)) return w;
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
    free(w->busy);
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

/* The rank that world rank `at` waits for; -1: none, because rank `at` computes or hangs. The thread of rank `at` that
   serves `room` is checked before its other threads, because a thread may wait for its own background thread. The
   caller holds w->mutex. */
HPMLC_FN int hpmlc_world_waits(hpml_world *w, hpmlc_room **room, int at)
{
    hpmlc_room *first = *room;
    for (hpmlc_room *r = first, *next = w->rooms; r; r = next, next = next ? next->next : NULL)
        for (int i = 0; i < r->size; i++) {
            int peer = __atomic_load_n(&r->inbox[i].peer, __ATOMIC_ACQUIRE);
            if (peer < 0 || !r->inbox[i].owner || r->inbox[i].owner->origin[i] != at) continue;
            *room = r;
            return peer;
        }
    return -1;
}

/* The chain ends at a rank at work, even if its thread in the background waits, and even if the chain began there. */
HPMLC_FN int hpmlc_threads_lost(hpml_comm *c, const hpml_message *m, double *busy)
{
    hpml_world *w    = c->room->world;
    hpmlc_room *room = c->room;
    int         peer = c->origin[m->peer], at = peer;
    pthread_mutex_lock(&w->mutex);
    for (int hops = 0, next; hops < w->ranks; hops++, at = next)
        if (hpml_now() < w->busy[at] || (next = hpmlc_world_waits(w, &room, at)) < 0) break;
    *busy = w->busy[at];
    if (w->failed) at = -1; /* a rank that reports an error stops waiting, so the chain may be broken */
    pthread_mutex_unlock(&w->mutex);
    return at == c->origin[c->rank] ? peer : at; /* a cycle of waits has no last rank */
}

HPMLC_FN void hpmlc_threads_busy(hpml_comm *c, double seconds)
{
    hpml_world *w = c->room->world;
    pthread_mutex_lock(&w->mutex);
    w->busy[c->origin[c->rank]] = hpml_now() + seconds;
    pthread_mutex_unlock(&w->mutex);
}

HPMLC_FN void hpmlc_waits(hpml_comm *c, int peer)
{
    if (c->room) __atomic_store_n(&c->room->inbox[c->rank].peer, peer, __ATOMIC_RELEASE);
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
    *out = start + busy;
    if (*in > start) start = *in; /* it waits on its way, not in the sender's card */
    *in = start + busy;
    pthread_mutex_unlock(&w->mutex);
    return start + busy + link->latency;
}

HPMLC_FN void hpmlc_inbox_post(hpml_comm *c, hpmlc_inbox *in, hpml_message *m)
{
    m->posted = (size_t)c->rank, m->next = NULL;
    pthread_mutex_lock(&in->gate.mutex);
    *in->last = m;
    in->last  = &m->next;
    if (!c->agent) hpmlc_gate_wake_held(c->room->world, &in->gate);
    pthread_mutex_unlock(&in->gate.mutex);
}

/* Posts a copy of the send m and completes m at once, as a network card with a buffer does: no wait for the sender. */
HPMLC_FN void hpmlc_inbox_post_copy(hpml_comm *c, hpml_message *m)
{
    hpml_message *copy = (hpml_message *)malloc(sizeof *copy + m->bytes);
    m->done = true;
    if (!copy) {
        m->status = hpmlc_fail(c, HPML_ERR_MEMORY, "no memory for a message of %zu bytes", m->bytes);
        return;
    }
    *copy      = *m;
    copy->data = (char *)(copy + 1);
    if (m->bytes > 0) memcpy(copy->data, m->data, m->bytes);
    hpmlc_inbox_post(c, &c->room->inbox[m->peer], copy);
}

/* Takes what the receive m waits for out of the inbox, or the send m itself; NULL when it is not there. What is on its
   way is not there, either: then m->arrival says until when. */
HPMLC_FN hpml_message *hpmlc_inbox_take(hpmlc_inbox *in, hpml_message *m)
{
    hpml_message **at, *sent;
    if (m->receiving) m->arrival = 0;
    pthread_mutex_lock(&in->gate.mutex);
    for (at = &in->posted; (sent = *at) != NULL; at = &sent->next)
        if (m->receiving ? sent->tag == m->tag && (int)sent->posted == m->peer : sent == m) break;
    if (sent && m->receiving && sent->arrival > 0 && sent->arrival > hpml_comm_now(m->owner)) {
        m->arrival = sent->arrival;
        sent       = NULL;
    }
    if (sent) {
        *at = sent->next;
        if (in->last == &sent->next) in->last = at;
    }
    pthread_mutex_unlock(&in->gate.mutex);
    return sent;
}

HPMLC_FN void hpmlc_threads_start(hpml_comm *c, hpml_message *m)
{
    if (m->receiving) return;
    m->arrival = hpmlc_arrival(c, m->peer, m->bytes, hpml_now());
    if (c->room->world->buffered) hpmlc_inbox_post_copy(c, m);
    else hpmlc_inbox_post(c, &c->room->inbox[m->peer], m);
}

#ifdef __linux__
#ifndef __USE_GNU
int sched_getcpu(void);
#endif
#ifndef __USE_MISC /* -std=c99 */
long syscall(long number, ...);
#endif

/* This thread goes to another core. */
HPMLC_FN void hpmlc_part_ways(int core)
{
    enum { BITS = 8 * (int)sizeof(long) };
    unsigned long all[128 / sizeof(long)] = { 0 }, others[sizeof all / sizeof(long)];
    if (core < 0 || core / BITS >= (int)(sizeof all / sizeof *all)) return;
    if (syscall(SYS_sched_getaffinity, 0L, sizeof all, all) < 0) return;
    memcpy(others, all, sizeof all);
    others[core / BITS] &= ~(1ul << core % BITS);
    if (syscall(SYS_sched_setaffinity, 0L, sizeof others, others) == 0)
        (void)syscall(SYS_sched_setaffinity, 0L, sizeof all, all); /* it stays there, but may go anywhere again */
}

/* Did the peer last wait on this core? Then, as long as this thread looks, it has none: the kernel is slow to part two
   threads that never run at the same time, and wakes one beside the other. Where there is a core for each, this one
   goes to another; were it to sleep here, both would stay together. */
HPMLC_FN bool hpmlc_beside(hpml_comm *c, int peer)
{
    hpmlc_inbox *in = c->room && !c->agent && peer != c->rank ? c->room->inbox : NULL;
    for (int turn = 0; in; turn++) {
        int core = sched_getcpu() + 1;
        __atomic_store_n(&in[c->rank].core, core, __ATOMIC_RELAXED);
        if (__atomic_load_n(&in[peer].core, __ATOMIC_RELAXED) != core) break;
        if (turn == 1 || hpmlc_spin(c) < HPMLC_ROOMY) return true;
        hpmlc_part_ways(core - 1);
    }
    return false;
}
#endif

/* A receive meets its send: one pass over the data. The sender may go on, if it has not yet. */
HPMLC_FN void hpmlc_meet(hpml_comm *c, hpml_message *m, hpml_message *sent)
{
    hpmlc_gate *gate = &c->room->inbox[sent->posted].gate;
    if (sent->bytes != m->bytes) hpmlc_mismatch(c, m, sent->bytes);
    else if (m->reduce) m->reduce(m->data, sent->data, m->bytes);
    else if (m->bytes > 0) memcpy(m->data, sent->data, m->bytes);
    m->done = true;
    if (c->room->world->buffered) {
        free(sent);
        return;
    }
    pthread_mutex_lock(&gate->mutex);
    __atomic_store_n(&sent->done, true, __ATOMIC_RELEASE); /* from now on the sender's struct may be gone */
    hpmlc_gate_wake_held(c->room->world, gate);
    pthread_mutex_unlock(&gate->mutex);
}

/* A message that will not be, after the world has failed. */
HPMLC_FN void hpmlc_threads_give_up(hpml_comm *c, hpml_message *m)
{
    hpml_world *w = c->room->world;
    m->done   = true;
    m->status = w->failed > w->ranks ? hpmlc_fail(c, HPML_ERR_COMM, "%s", w->text)
                                     : hpmlc_fail(c, HPML_ERR_PEER, "rank %d failed: %s", w->failed - 1, w->text);
}

HPMLC_FN void hpmlc_threads_test(hpml_comm *c, hpml_message *m)
{
    hpmlc_inbox  *in   = &c->room->inbox[m->receiving ? c->rank : m->peer];
    hpml_message *sent = NULL;
    if (m->receiving) {
        size_t look = (size_t)__atomic_load_n(&in->gate.changes, __ATOMIC_ACQUIRE) + 1;
        if (m->moved != look || m->arrival > 0) sent = hpmlc_inbox_take(in, m); /* something new since the last look */
        m->moved = look;
    }
    if (sent) hpmlc_meet(c, m, sent);
    if (hpmlc_done(m) || !__atomic_load_n(&c->room->world->failed, __ATOMIC_ACQUIRE)) return;
    if (m->receiving || hpmlc_inbox_take(in, m)) hpmlc_threads_give_up(c, m); /* a send may be in somebody's hands */
}

HPMLC_FN void hpmlc_threads_block(hpml_comm *c, hpml_message *m, double until)
{
    hpmlc_inbox *in      = &c->room->inbox[c->rank];
    bool         counted = true;
    double       early   = hpmlc_spin(c) < HPMLC_ROOMY ? 0 : HPMLC_EARLY;
    for (const hpml_message *p = c->pending; p; p = p->next) /* something is on its way: not a deadlock */
        if (p->arrival > 0) {
            counted = false;
            if (p->arrival - early < until) until = p->arrival - early;
        }
    hpmlc_waits(c, c->origin[m->peer]);
    in->doing = c->doing;
    hpmlc_gate_sleep(c->room->world, &in->gate, &c->seen, until, counted);
}

/* Under the mutex, because others go through the rooms to find who waits for whom. */
HPMLC_FN void hpmlc_room_enter(hpmlc_room *room, int rank, hpml_comm *owner)
{
    pthread_mutex_lock(&room->world->mutex);
    room->inbox[rank].owner = owner;
    pthread_mutex_unlock(&room->world->mutex);
}

HPMLC_FN void hpmlc_threads_close(hpml_comm *c)
{
    hpml_world  *w = c->room->world;
    hpmlc_room **at, *gone = NULL;
    bool         first = !c->is_part;
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
    if (first && !c->agent && __atomic_sub_fetch(&w->running, 1, __ATOMIC_ACQ_REL) == 0) hpmlc_world_deadlock(w);
}

/* The lowest rank makes the room and tells the others where it is. */
HPMLC_FN hpml_status hpmlc_threads_split(hpml_comm *c, hpml_comm *part, const int32_t *ranks, int count,
                                         int color HPMLC_UNUSED)
{
    const int   tag    = HPMLC_TAG_EXTRA;
    hpml_status status = HPML_OK;
    hpmlc_room *room   = NULL;
    if (part->rank == 0) {
        room = hpmlc_room_new(c->room->world, count);
        for (int i = 1; i < count && status == HPML_OK; i++)
            status = hpmlc_round(c, tag, ranks[i], (const char *)&room, sizeof room, -1, NULL, 0, NULL);
    } else status = hpmlc_round(c, tag, -1, NULL, 0, ranks[0], (char *)&room, sizeof room, NULL);
    if (status != HPML_OK) return status;
    if (!room) return hpmlc_fail(c, HPML_ERR_MEMORY, "no memory for a communicator of %d ranks", count);
    part->room = room;
    hpmlc_room_enter(room, part->rank, part);
    return HPML_OK;
}

HPMLC_FN void hpmlc_threads_tell(hpml_comm *c, const char *text)
{
    hpmlc_world_fail(c->room->world, c->origin[c->rank], text);
}

/* The world has failed, so a test ends it; unless a receiver has it in hands, which is a matter of moments. */
HPMLC_FN void hpmlc_threads_abandon(hpml_comm *c, hpml_message *m)
{
    while (!hpmlc_done(m)) {
        hpmlc_threads_test(c, m);
        if (!hpmlc_done(m)) sched_yield();
    }
}

static const hpml_transport hpmlc_threads = {
    "threads", hpmlc_threads_start, hpmlc_threads_test, hpmlc_threads_block, hpmlc_threads_abandon,
    hpmlc_threads_tell, hpmlc_threads_split, hpmlc_threads_close, NULL, (size_t)512 << 10, 2e-6, 0.25e-9,
    hpmlc_threads_lost, hpmlc_threads_busy
};

HPMLC_FN hpml_comm *hpmlc_threads_create(hpml_ctx *ctx, const hpml_comm_desc *d)
{
    hpml_world *w = d->world;
    hpml_comm  *c = NULL;
    if (!w || d->rank < 0 || d->rank >= w->ranks || d->transport != w->kind)
        hpml_ctx_fail(ctx, HPML_ERR_ARGUMENT, "comm: rank %d of a world of %d%s; give .world (hpml_world_create) and "
                      ".rank, or use hpml_launch", d->rank, w ? w->ranks : 0,
                      w && d->transport != w->kind ? " of another transport" : "");
    else c = hpmlc_comm_new(ctx, &hpmlc_threads, d->rank, w->ranks);
    if (!c) return NULL;
    pthread_mutex_lock(&w->mutex);
    for (c->room = w->rooms; c->room->next;) c->room = c->room->next; /* the first one made */
    pthread_mutex_unlock(&w->mutex);
    for (int i = 0; i < c->size; i++) c->node[i] = hpmlc_network_node(&w->network, w->nodes, i);
    c->spin = w->ranks <= hpmlc_cores(1) ? HPMLC_ROOMY : 20;
    hpmlc_room_enter(c->room, c->rank, c);
    return c;
}

#else
HPML_API hpml_world *hpml_world_create(hpml_transport_kind transport HPMLC_UNUSED, int32_t ranks HPMLC_UNUSED,
                                       const hpml_network *network HPMLC_UNUSED)
{
    return NULL;
}

HPML_API void hpml_world_free(hpml_world *w HPMLC_UNUSED) {}
typedef struct hpmlc_gate { unsigned changes; } hpmlc_gate; /* jobs are done at once: nobody sleeps */
#endif /* HPML_NO_THREADS */

#ifdef HPML_NO_THREADS
HPMLC_FN void hpmlc_waits(hpml_comm *c HPMLC_UNUSED, int peer HPMLC_UNUSED) {}
#endif
#if defined(HPML_NO_THREADS) || !defined(__linux__)
HPMLC_FN bool hpmlc_beside(hpml_comm *c HPMLC_UNUSED, int peer HPMLC_UNUSED) { return false; }
#endif

// ---------------------------------------------------------------------------------------------------------------------
// >>mpi   messages between processes, by MPI
// ---------------------------------------------------------------------------------------------------------------------

/* Only MPI_Init and MPI_Finalize block: sends, receives, MPI_Iallreduce and MPI_Comm_idup are started, then polled with
   MPI_Test, because a blocking call of MPI has no deadline. (Probes, queries, setters and frees are local calls;
   MPI_Comm_free sends nothing in MPICH and Open MPI either.) Messages are sent in pieces of HPMLC_PIECE bytes, two in
   flight at a time, so that counts may exceed 2^31 and one piece is reduced while the next arrives. One lock serves all
   communicators of a process, which lets a background thread run under MPI_THREAD_SERIALIZED.

   Words are control messages from each rank to every other: "I have failed, because ...", "I have left", "I wait for
   rank 3, and have done so for half the deadline", "I am busy". A waiting rank polls for words, so a wait for a rank
   that has failed or left ends at once. A rank that was killed sends no word: the deadline ends the waits for that
   rank, and the chain of waits names it. */

#ifdef HPML_USE_MPI

#define HPMLC_PIECE ((size_t)4 << 20)
#define HPMLC_WORD  256  /* bytes of the word 'L' (left) or 'F' (failed) with a text; other words are shorter */
#define HPMLC_BUSY  40   /* words "I am busy", one for each of the durations 2^k / 256 s, up to 68 years */
#define HPMLC_PARTS 128  /* communicators at most that share an MPI communicator, the first one included */

typedef struct hpmlc_shared hpmlc_shared;
struct hpmlc_mpi {
    hpmlc_shared *shared;
    MPI_Comm      comm;    /* the first communicator's, on which all its parts send, too */
    MPI_Comm      native;  /* for MPI_Iallreduce; MPI_COMM_NULL: none */
    int           part;    /* its number; its tags are HPMLC_TAG_SPAN of their own */
    hpml_message *sending; /* sends of many pieces, and those behind them; oldest first */
};

struct hpmlc_shared { /* by the communicator of hpml_comm_create and all parts of it */
    int            rank, size;
    double         timeout;
    hpml_comm     *owner;   /* the first communicator */
    hpmlc_shared  *next;    /* see hpmlc_mpi_living */
    MPI_Errhandler before;  /* the world's, given back in the end */
    MPI_Comm       comm;    /* on which words are sent, ... */
    int            tag;     /* ... with this tag */
    int            from;    /* rank whose word is being received, -1: none */
    MPI_Request    hearing; /* the receive of that word */
    char           word[HPMLC_WORD];
    char          *heard;   /* (size) first letter of each rank's last word with a letter; 0: none */
    int32_t       *number;  /* (size + 1 + HPMLC_BUSY) 0, 1, 2 ..., send buffers of words: r "I wait for rank r", size
                               "I wait for all", size + 1 + k "I am busy, for up to 2^k / 256 s"; this rank's own
                               number: "I wait no more" */
    double        *awaits;  /* (size, 2) the last number from each rank, and hpml_now() until which it is valid */
    double         busy;    /* hpml_now() until which this rank has announced that it is busy; 0: it is not */
    int            failed;  /* 1 + the first rank that said it has failed */
    char           text[HPMLC_WORD];
    char           mine[HPMLC_WORD]; /* this rank's final word, 'L' or 'F' */
    MPI_Request   *saying;           /* (size) sends of the final word that are in flight */
    bool           told;
    bool           roomy;   /* a core for each rank of this node */
    int            level;   /* of thread support */
    int            parts;   /* number of communicators that MPI's tags suffice for */
    int64_t        newest;  /* number of the newest part, before the modulo by `parts` */
    bool           taken[HPMLC_PARTS]; /* numbers in use by parts of this rank */
    int            users;   /* parts, and the first communicator until it is closed; 0: this struct is freed */
    bool           closed;  /* the first communicator has been freed: parts cannot send any more */
    bool           kept;    /* not freed before the process ends, because MPI may still send from it */
#ifndef HPML_NO_THREADS
    pthread_mutex_t lock;
#endif
};

#ifndef HPML_NO_THREADS
HPMLC_FN void hpmlc_mpi_lock(hpmlc_shared *x) { pthread_mutex_lock(&x->lock); }
HPMLC_FN void hpmlc_mpi_unlock(hpmlc_shared *x) { pthread_mutex_unlock(&x->lock); }
#else
HPMLC_FN void hpmlc_mpi_lock(hpmlc_shared *x HPMLC_UNUSED) {}
HPMLC_FN void hpmlc_mpi_unlock(hpmlc_shared *x HPMLC_UNUSED) {}
#endif

/* Reports an error of MPI; m NULL: of a collective call. */
HPMLC_FN hpml_status hpmlc_mpi_error(hpml_comm *c, hpml_message *m, int code)
{
    char text[MPI_MAX_ERROR_STRING];
    int  length = 0, kind = 0;
    MPI_Error_string(code, text, &length);
    MPI_Error_class(code, &kind);
    if (!m)
        return hpmlc_fail(c, HPML_ERR_COMM, "%s: MPI says: %.*s; all ranks must pass the same counts", c->doing, length,
                          text);
    m->done = true;
    if (kind != MPI_ERR_TRUNCATE)
        return m->status = hpmlc_fail(c, HPML_ERR_COMM, "%s with rank %d: MPI says: %.*s", c->doing,
                                      c->origin[m->peer], length, text);
    return m->status = hpmlc_fail(c, HPML_ERR_COMM, "%s: rank %d sent more than the %zu bytes that rank %d expected; "
                                  "all ranks must pass the same counts", c->doing, c->origin[m->peer], m->bytes,
                                  c->origin[c->rank]);
}

/* A message's requests lie in native[], which have room for one handle each, whatever MPI it is. */
typedef char hpmlc_request_fits[sizeof(MPI_Request) <= sizeof(void *) ? 1 : -1];

HPMLC_FN char *hpmlc_mpi_place(hpml_message *m, size_t at)
{
    return m->staging ? (char *)m->staging + at / HPMLC_PIECE % 2 * HPMLC_PIECE : m->data + at;
}

HPMLC_FN size_t hpmlc_mpi_pieces(const hpml_message *m)
{
    return m->bytes > HPMLC_PIECE ? (m->bytes + HPMLC_PIECE - 1) / HPMLC_PIECE : 1;
}

/* Posts what may be posted: two pieces ahead, and none before all pieces of older messages of the same tag and rank. */
HPMLC_FN void hpmlc_mpi_feed(hpml_comm *c, hpml_message *m)
{
    size_t end = m->moved / HPMLC_PIECE + 2, all = hpmlc_mpi_pieces(m);
    int    code = MPI_SUCCESS;
    if (end > all) end = all;
    if (m->posted >= end) return;
    for (hpml_message *older = m->receiving ? m->next : c->mpi->sending; older && older != m; older = older->next) {
        if (older->done || older->peer != m->peer || older->tag != m->tag) continue;
        if (older->posted < hpmlc_mpi_pieces(older)) return;
    }
    const int peer = c->origin[m->peer], tag = c->mpi->part * HPMLC_TAG_SPAN + m->tag;
    hpmlc_mpi_lock(c->mpi->shared);
    for (; m->posted < end && code == MPI_SUCCESS; m->posted++) {
        size_t      at = m->posted * HPMLC_PIECE;
        int         n = (int)(m->bytes - at < HPMLC_PIECE ? m->bytes - at : HPMLC_PIECE);
        char       *data = hpmlc_mpi_place(m, at);
        MPI_Request request;
        code = m->receiving ? MPI_Irecv(data, n, MPI_BYTE, peer, tag, c->mpi->comm, &request)
                            : MPI_Isend(data, n, MPI_BYTE, peer, tag, c->mpi->comm, &request);
        memcpy(&m->native[m->posted % 2], &request, sizeof request);
    }
    hpmlc_mpi_unlock(c->mpi->shared);
    if (code != MPI_SUCCESS) hpmlc_mpi_error(c, m, code);
}

HPMLC_FN void hpmlc_mpi_start(hpml_comm *c, hpml_message *m)
{
    hpml_message **last = &c->mpi->sending;
    c->seen = 0;
    if (c->mpi->shared->closed) {
        m->done   = true;
        m->status = hpmlc_fail(c, HPML_ERR_STATE, "the communicator that this part was split from has been freed; free "
                               "it after its parts");
        return;
    }
    if (m->receiving && m->reduce) {
        if (!c->staging) c->staging = (char *)hpml_ctx_alloc(c->ctx, 2 * HPMLC_PIECE, NULL);
        m->staging = c->staging;
        if (!m->staging) { m->done = true, m->status = hpml_ctx_status(c->ctx); return; }
    }
    if (!m->receiving && (*last || hpmlc_mpi_pieces(m) > 2)) { /* sends that must be looked after, oldest first */
        while (*last) last = &(*last)->next;
        *last = m;
    }
    hpmlc_mpi_feed(c, m);
}

HPMLC_FN void hpmlc_mpi_step(hpml_comm *c, hpml_message *m)
{
    size_t      n = m->bytes - m->moved < HPMLC_PIECE ? m->bytes - m->moved : HPMLC_PIECE;
    void      **slot = &m->native[m->moved / HPMLC_PIECE % 2];
    int         there = 0, count = (int)n, code;
    MPI_Request request;
    MPI_Status  status;
    hpmlc_mpi_feed(c, m);
    if (m->done || m->posted <= m->moved / HPMLC_PIECE) return; /* nothing under way */
    memcpy(&request, slot, sizeof request);
    hpmlc_mpi_lock(c->mpi->shared);
    code = MPI_Test(&request, &there, &status);
    if (code == MPI_SUCCESS && there && m->receiving) MPI_Get_count(&status, MPI_BYTE, &count);
    hpmlc_mpi_unlock(c->mpi->shared);
    memcpy(slot, &request, sizeof request);
    if (code != MPI_SUCCESS) { hpmlc_mpi_error(c, m, code); return; }
    if (!there) return;
    if (count != (int)n) { hpmlc_mismatch(c, m, m->moved + (size_t)count); return; }
    if (m->staging) m->reduce(m->data + m->moved, hpmlc_mpi_place(m, m->moved), n);
    m->moved += n;
    if (m->moved == m->bytes) m->done = true;
    else hpmlc_mpi_feed(c, m);
}

/* Long sends go on, too, or two ranks that send to each other would both wait for the other's next piece. */
HPMLC_FN void hpmlc_mpi_test(hpml_comm *c, hpml_message *m)
{
    bool listed = false;
    for (hpml_message **at = &c->mpi->sending; *at;) {
        hpml_message *s = *at;
        listed = listed || s == m;
        if (!s->done) hpmlc_mpi_step(c, s);
        if (s->done) *at = s->next;
        else at = &s->next;
    }
    if (!listed) hpmlc_mpi_step(c, m);
}

// ---------------------------------------------------------------------------------------------------------------------
// >>mpi-words   words between ranks: who has failed, left, waits or works; waits of all ranks
// ---------------------------------------------------------------------------------------------------------------------

HPMLC_FN bool hpmlc_mpi_over(void)
{
    int over = 0;
    MPI_Finalized(&over);
    return over;
}

/* Sends `word` to all other ranks; its buffer must stay unchanged until the sends are complete. requests NULL: the
   sends are never tested, because the buffer lives at least as long as they do. The caller holds the lock of x. */
HPMLC_FN void hpmlc_mpi_send(hpmlc_shared *x, const void *word, int bytes, MPI_Request *requests)
{
    for (int i = 0; i < x->size && !hpmlc_mpi_over(); i++) {
        MPI_Request request;
        if (i == x->rank || MPI_Isend(word, bytes, MPI_BYTE, i, x->tag, x->comm, &request) != MPI_SUCCESS) continue;
        if (requests) requests[i] = request;
        else MPI_Request_free(&request);
    }
}

HPMLC_FN void hpmlc_mpi_send_number(hpmlc_shared *x, int number)
{
    hpmlc_mpi_lock(x);
    hpmlc_mpi_send(x, &x->number[number], (int)sizeof *x->number, NULL);
    hpmlc_mpi_unlock(x);
}

/* Sends the final word of this rank, once: 'L' (left) or 'F' (failed) and a text. */
HPMLC_FN void hpmlc_mpi_say(hpmlc_shared *x, char kind, const char *text)
{
    hpmlc_mpi_lock(x);
    if (!x->told) {
        x->told = true;
        snprintf(x->mine, HPMLC_WORD, "%c%s", kind, text);
        hpmlc_mpi_send(x, x->mine, HPMLC_WORD, x->saying);
    }
    hpmlc_mpi_unlock(x);
}

HPMLC_FN void hpmlc_mpi_tell(hpml_comm *c, const char *text) { hpmlc_mpi_say(c->mpi->shared, 'F', text); }

/* Receives the next word that has arrived into x->word. Returns its sender, or -1 where none has arrived. */
HPMLC_FN int hpmlc_mpi_hear(hpmlc_shared *x, int *bytes)
{
    MPI_Status status;
    int        there = 0, from = x->from;
    if (from < 0) {
        if (MPI_Iprobe(MPI_ANY_SOURCE, x->tag, x->comm, &there, &status) != MPI_SUCCESS || !there) return -1;
        from = status.MPI_SOURCE;
        if (MPI_Irecv(x->word, HPMLC_WORD, MPI_BYTE, from, x->tag, x->comm, &x->hearing) != MPI_SUCCESS) return -1;
        x->from = from;
    }
    int code = MPI_Test(&x->hearing, &there, &status);
    if (code == MPI_SUCCESS && !there) return -1;
    x->from = -1;
    if (code != MPI_SUCCESS) return -1;
    MPI_Get_count(&status, MPI_BYTE, bytes);
    return from;
}

/* Receives all words that have arrived and records them in x. */
HPMLC_FN void hpmlc_mpi_listen(hpmlc_shared *x)
{
    int bytes = 0;
    hpmlc_mpi_lock(x);
    for (int from; (from = hpmlc_mpi_hear(x, &bytes)) >= 0;) {
        int32_t number;
        memcpy(&number, x->word, sizeof number);
        if (bytes == (int)sizeof number) {
            double lasts = number > x->size ? ldexp(1, number - x->size - 9) : x->timeout;
            x->awaits[2 * from] = number, x->awaits[2 * from + 1] = hpml_now() + lasts;
            continue;
        }
        x->heard[from] = x->word[0];
        if (x->word[0] != 'F' || x->failed) continue;
        x->word[HPMLC_WORD - 1] = 0;
        memcpy(x->text, x->word + 1, HPMLC_WORD - 1);
        x->failed = from + 1;
    }
    hpmlc_mpi_unlock(x);
}

/* The last number that a rank has sent, while it is valid (one deadline, or as long as the rank is busy); -1: none. */
HPMLC_FN int hpmlc_mpi_said(const hpmlc_shared *x, int rank)
{
    const int number = (int)x->awaits[2 * rank];
    return number != rank && hpml_now() < x->awaits[2 * rank + 1] ? number : -1;
}

/* Time until which this rank has announced that it is busy; its background thread reads it, too. */
HPMLC_FN double hpmlc_mpi_works(hpmlc_shared *x)
{
    hpmlc_mpi_lock(x);
    double busy = x->busy;
    hpmlc_mpi_unlock(x);
    return busy;
}

/* Announces that this rank waits for rank `number` (size: for all ranks): first when half the deadline has passed, then
   every half deadline. *said: the time of the last announcement. A busy rank announces nothing, because the others must
   know that it is busy and not for whom its background thread waits. */
HPMLC_FN void hpmlc_mpi_worry(hpmlc_shared *x, int number, double until, double *said)
{
    double now = hpml_now();
    if ((*said <= 0 && now < until - 0.5 * x->timeout) || now < *said + 0.5 * x->timeout) return;
    if (now < hpmlc_mpi_works(x)) return;
    *said = now;
    hpmlc_mpi_send_number(x, number);
}

/* Announces that an announced wait is over, because the other ranks would go on to blame the rank that was awaited. */
HPMLC_FN void hpmlc_mpi_calm(hpmlc_shared *x, double said)
{
    if (said > 0 && hpml_now() >= hpmlc_mpi_works(x)) hpmlc_mpi_send_number(x, x->rank);
}

HPMLC_FN void hpmlc_calm(hpml_comm *c, const hpml_message *m)
{
    if (c->mpi) hpmlc_mpi_calm(c->mpi->shared, m->arrival);
}

/* The rank that delays a wait for all ranks: the first that has sent no number, else the first busy one; -1: none. */
HPMLC_FN int hpmlc_mpi_absent(const hpmlc_shared *x)
{
    int absent = -1;
    for (int i = x->size - 1; i >= 0; i--)
        if (i != x->rank && hpmlc_mpi_said(x, i) > x->size) absent = i;
    for (int i = x->size - 1; i >= 0; i--)
        if (i != x->rank && hpmlc_mpi_said(x, i) < 0) absent = i;
    return absent;
}

/* The last rank of the chain of waits that begins at rank `at`, or, where `at` is -1, at a wait for all ranks; -1:
   every rank waits for all. *busy: hpml_now() until which that last rank is busy, 0: it is not. */
HPMLC_FN int hpmlc_mpi_end(const hpmlc_shared *x, int at, double *busy)
{
    if (at < 0) at = hpmlc_mpi_absent(x);
    for (int hops = 0; at >= 0 && hops < x->size; hops++) {
        int next = hpmlc_mpi_said(x, at);
        if (next == x->size) next = hpmlc_mpi_absent(x);
        if (next < 0 || next > x->size) break;
        at = next;
    }
    *busy = at >= 0 && hpmlc_mpi_said(x, at) > x->size ? x->awaits[2 * at + 1] : 0;
    return at;
}

HPMLC_FN int hpmlc_mpi_lost(hpml_comm *c, const hpml_message *m, double *busy)
{
    hpmlc_shared *x  = c->mpi->shared;
    int           at = hpmlc_mpi_end(x, c->origin[m->peer], busy);
    if (at != x->rank) return at;
    *busy = hpmlc_mpi_works(x); /* a thread in the background waits for those that wait for this rank */
    return c->origin[m->peer];
}

HPMLC_FN void hpmlc_mpi_busy(hpml_comm *c, double seconds)
{
    hpmlc_shared *x = c->mpi->shared;
    int           k = 0;
    while (k < HPMLC_BUSY - 1 && ldexp(1, k - 8) < seconds) k++;
    hpmlc_mpi_lock(x);
    x->busy = c->busy;
    hpmlc_mpi_unlock(x);
    hpmlc_mpi_send_number(x, x->size + 1 + k);
}

/* Cancels a receive. A receive that is partly complete, and a send, cannot be cancelled: their buffers must live as
   long as the process, which ends soon. */
HPMLC_FN void hpmlc_mpi_abandon(hpml_comm *c, hpml_message *m)
{
    hpmlc_mpi_lock(c->mpi->shared);
    for (size_t k = m->moved / HPMLC_PIECE; m->receiving && k < m->posted; k++) {
        MPI_Request request;
        int         over = 0;
        memcpy(&request, &m->native[k % 2], sizeof request);
        if (MPI_Cancel(&request) != MPI_SUCCESS) continue;
        for (int turn = 0; turn < 100 && !over; turn++) /* MPI_Wait would wait for a half that may never come */
            if (MPI_Test(&request, &over, MPI_STATUS_IGNORE) != MPI_SUCCESS) break;
    }
    hpmlc_mpi_unlock(c->mpi->shared);
    hpmlc_unlist(&c->mpi->sending, m);
    m->done = true;
}

HPMLC_FN hpml_status hpmlc_mpi_peer_failed(hpml_comm *c)
{
    const hpmlc_shared *x = c->mpi->shared;
    return hpmlc_fail(c, HPML_ERR_PEER, "rank %d failed: %s", x->failed - 1, x->text);
}

/* Gives the core away for a moment, now by yielding, now by a nap, which costs a large message more than it frees: with
   a core for each rank not in the first milliseconds. A lost peer ends the wait. */
HPMLC_FN void hpmlc_mpi_block(hpml_comm *c, hpml_message *m, double until)
{
    hpmlc_shared *x    = c->mpi->shared;
    int           peer = c->origin[m->peer];
    hpmlc_mpi_listen(x);
    if (x->failed || x->heard[peer] == 'L') {
        if (!x->failed) hpmlc_mpi_test(c, m); /* it may have sent this before it left */
        if (m->done) return;
        hpmlc_mpi_abandon(c, m);
        if (x->failed) m->status = hpmlc_mpi_peer_failed(c);
        else m->status = hpmlc_fail(c, HPML_ERR_PEER, "rank %d has left while this rank waits for it in %s", peer,
                                    c->doing);
        return;
    }
    hpmlc_mpi_worry(x, peer, until, &m->arrival);
    if (c->seen++ % 64 < 16 || (x->roomy && hpmlc_spin(c) > 0 && c->seen < 5000)) hpmlc_pause(true);
    else hpmlc_nap(30e-6);
}

/* Handles the deadline of hpmlc_mpi_all. Returns a later deadline where the rank that delays the others is busy. */
HPMLC_FN double hpmlc_mpi_all_late(hpml_comm *c, int code)
{
    hpmlc_shared *x = c->mpi->shared;
    char                who[48] = "all ranks";
    double              busy;
    int                 at = hpmlc_mpi_end(x, -1, &busy);
    if (at < 0) busy = hpmlc_mpi_works(x);
    if (hpml_now() < busy) return fmin(busy, hpml_now() + c->timeout);
    if (at >= 0) snprintf(who, sizeof who, "rank %d%s", at, x->heard[at] == 'L' ? ", which has left," : "");
    if (at < 0 && code != MPI_SUCCESS) hpmlc_mpi_error(c, NULL, code);
    else hpmlc_fail(c, HPML_ERR_TIMEOUT, "waited %g s for %s in %s, step %lld; are all ranks alive and in the same "
                    "operation? (.timeout sets the limit)", c->timeout, who, c->doing, (long long)c->step);
    return hpml_now();
}

/* Waits for the request of a collective MPI call: as fast as the blocking call, but with a deadline, and a failed rank
   ends the wait. After an error of MPI the wait lasts until the deadline, which shows the rank that is silent. */
HPMLC_FN hpml_status hpmlc_mpi_all(hpml_comm *c, int code, MPI_Request *request)
{
    hpmlc_shared *x     = c->mpi->shared;
    double        limit = c->timeout < 0 ? 1e300 : hpml_now() + c->timeout, said = 0;
    int           there = 0, kind = MPI_SUCCESS;
    while (hpml_ctx_status(c->ctx) == HPML_OK) {
        hpmlc_mpi_lock(x);
        for (int turn = 0; turn < 64 && code == MPI_SUCCESS && !there; turn++)
            code = MPI_Test(request, &there, MPI_STATUS_IGNORE);
        if (code != MPI_SUCCESS) MPI_Error_class(code, &kind);
        hpmlc_mpi_unlock(x);
        hpmlc_mpi_listen(x);
        if (code == MPI_SUCCESS && there) {
            hpmlc_mpi_calm(x, said);
            return HPML_OK;
        }
        if (kind == MPI_ERR_TRUNCATE) return hpmlc_mpi_error(c, NULL, code);
        if (x->failed) return hpmlc_mpi_peer_failed(c);
        hpmlc_mpi_worry(x, x->size, limit, &said);
        hpmlc_pause(true);
        if (hpml_now() > limit) limit = hpmlc_mpi_all_late(c, code);
    }
    return hpml_ctx_status(c->ctx);
}

HPMLC_FN hpml_status hpmlc_mpi_allreduce(hpml_comm *c, void *data, int64_t n, int element, int op)
{
    const MPI_Datatype none    = MPI_DATATYPE_NULL;
    const MPI_Datatype types[] = { MPI_FLOAT, none, MPI_INT32_T, MPI_INT64_T, MPI_DOUBLE, none };
    const MPI_Op       how     = op == HPML_MAX ? MPI_MAX : MPI_SUM;
    const size_t       size    = hpml_element_size((hpml_element)element);
    hpml_status        status  = HPML_OK;
    if (types[element] == none)
        return hpmlc_fail(c, HPML_ERR_UNSUPPORTED, "allreduce (native): MPI has no bf16; choose another algorithm");
    if (c->mpi->native == MPI_COMM_NULL)
        return hpmlc_fail(c, HPML_ERR_UNSUPPORTED, "allreduce (native): a part of a communicator has no MPI "
                          "communicator, because MPI makes one only by a call without a deadline; choose another "
                          "algorithm, or split with MPI and give hpml_comm_create the part as .mpi_comm");
    c->doing = "allreduce (native)";
    for (int64_t at = 0, part; at < n && status == HPML_OK; at += part) {
        MPI_Request request;
        part = hpmlc_min(n - at, (int64_t)1 << 30);
        hpmlc_mpi_lock(c->mpi->shared);
        int code = MPI_Iallreduce(MPI_IN_PLACE, (char *)data + (size_t)at * size, (int)part, types[element], how,
                                  c->mpi->native, &request);
        hpmlc_mpi_unlock(c->mpi->shared);
        status = hpmlc_mpi_all(c, code, &request);
    }
    if (status == HPML_OK) c->doing = "allreduce";
    return status;
}

// ---------------------------------------------------------------------------------------------------------------------
// >>mpi-create   creating, splitting, closing over MPI; exit
// ---------------------------------------------------------------------------------------------------------------------

/* Duplicates `from`, collectively. After an error the memory of the new handle leaks, because MPI may still write to
   it. */
HPMLC_FN hpml_status hpmlc_mpi_duplicate(hpml_comm *c, MPI_Comm from, MPI_Comm *out)
{
    hpmlc_shared *x     = c->mpi->shared;
    MPI_Comm     *place = (MPI_Comm *)malloc(sizeof *place);
    MPI_Request   request;
    if (!place) return hpmlc_fail(c, HPML_ERR_MEMORY, "no memory for an MPI communicator");
    hpmlc_mpi_lock(x);
    int code = MPI_Comm_idup(from, place, &request);
    hpmlc_mpi_unlock(x);
    hpml_status status = hpmlc_mpi_all(c, code, &request);
    if (status != HPML_OK) return status;
    *out = *place;
    free(place);
    MPI_Comm_set_errhandler(*out, MPI_ERRORS_RETURN);
    return HPML_OK;
}

HPMLC_FN void hpmlc_mpi_release(hpmlc_shared *x, int64_t number)
{
    hpmlc_mpi_lock(x);
    x->taken[number] = false;
    hpmlc_mpi_unlock(x);
}

/* Chooses the number of a new part, which selects its tags: above all numbers that its ranks have used, until MPI's
   tags run out; then the next number that is free on every rank. All ranks of c agree. 0: no number is free, or an
   error. */
HPMLC_FN hpml_status hpmlc_agree(hpml_comm *c, const char *name, int64_t *most, int64_t n);
HPMLC_FN int         hpmlc_mpi_number(hpml_comm *c)
{
    hpmlc_shared *x      = c->mpi->shared;
    int64_t       ask[2] = { 0, 0 }; /* a candidate number; parts that exist on this rank */
    hpmlc_mpi_lock(x);
    ask[0] = x->newest + 1;
    for (int i = 0; i < x->parts; i++) ask[1] += x->taken[i];
    hpmlc_mpi_unlock(x);
    for (int turn = 0; turn < x->parts; turn++, ask[0]++) {
        if (hpmlc_agree(c, "split", ask, 2) != HPML_OK) return 0;
        if (ask[1] == x->parts) break;
        int64_t number = ask[0], at = number % x->parts, taken;
        hpmlc_mpi_lock(x);
        taken = x->taken[at];
        x->taken[at] = true, x->newest = hpmlc_max(x->newest, number);
        hpmlc_mpi_unlock(x);
        const bool mine = !taken;
        if (hpmlc_agree(c, "split", &taken, 1) != HPML_OK) return 0;
        if (!taken) return (int)at;
        if (mine) hpmlc_mpi_release(x, at);
    }
    hpmlc_fail(c, HPML_ERR_STATE, "split: %d communicators live on a rank; free those that are not needed", x->parts);
    return 0;
}

HPMLC_FN hpml_status hpmlc_mpi_split(hpml_comm *c, hpml_comm *part, const int32_t *ranks, int count,
                                     int color HPMLC_UNUSED)
{
    int  number = hpmlc_mpi_number(c);
    bool all    = count == c->size && c->mpi->native != MPI_COMM_NULL;
    if (number == 0) return hpml_ctx_status(c->ctx);
    if (!part) {
        hpmlc_mpi_release(c->mpi->shared, number);
        return HPML_OK;
    }
    part->mpi = (hpmlc_mpi *)hpml_ctx_alloc(c->ctx, sizeof *part->mpi, NULL);
    if (!part->mpi) {
        hpmlc_failed(c);
        return hpml_ctx_status(c->ctx);
    }
    part->mpi->shared = c->mpi->shared, part->mpi->comm = c->mpi->comm, part->mpi->part = number;
    part->mpi->native = MPI_COMM_NULL;
    for (int i = 0; i < count; i++) all = all && ranks[i] == i;
    if (all && hpmlc_mpi_duplicate(c, c->mpi->native, &part->mpi->native) != HPML_OK) return hpml_ctx_status(c->ctx);
    hpmlc_mpi_lock(c->mpi->shared);
    c->mpi->shared->users++;
    hpmlc_mpi_unlock(c->mpi->shared);
    return HPML_OK;
}

/* The one mutable static of this header, because exit passes no argument to its handlers: the list of the shared
   structs of all communicators in this process. The lock is held only to change the list. */
static struct { bool locked, handled; long process; hpmlc_shared *first; } hpmlc_mpi_living;

/* Waits until all ranks have sent a final word and have received this rank's, so that no rank calls MPI_Finalize while
   a word is in flight. Returns -1, or, when `patience` seconds have passed, the rank that delays the others. */
HPMLC_FN int hpmlc_mpi_goodbye(hpmlc_shared *x, double patience)
{
    double limit = hpml_now() + patience, busy = 0;
    for (;; hpmlc_nap(100e-6)) {
        int absent = -1;
        hpmlc_mpi_listen(x);
        hpmlc_mpi_lock(x);
        for (int i = x->size - 1; i >= 0; i--) {
            int gone = 0, code = MPI_Test(&x->saying[i], &gone, MPI_STATUS_IGNORE);
            bool left = i == x->rank || x->heard[i] == 'L' || x->heard[i] == 'F';
            if (!left || (code == MPI_SUCCESS && !gone)) absent = i;
        }
        hpmlc_mpi_unlock(x);
        if (absent < 0) return -1;
        if (hpml_now() < limit) continue;
        int at = hpmlc_mpi_end(x, absent, &busy);
        if (hpml_now() > busy) return at < 0 || at == x->rank ? absent : at;
    }
}

/* Handler of exit: notifies the other ranks, then waits up to 5 s for their final words and 0.3 s more, because a
   launcher may kill the other ranks when this process ends. */
HPMLC_FN void hpmlc_mpi_exit(void)
{
    bool said = false;
    if (hpmlc_mpi_over() || hpmlc_mpi_living.process != (long)getpid()) return;
    for (hpmlc_shared *x = hpmlc_mpi_living.first; x; x = x->next) {
        char text[64];
        if (x->told) continue;
        snprintf(text, sizeof text, "called exit in step %lld", (long long)x->owner->step);
        hpmlc_mpi_say(x, 'F', text);
        hpmlc_mpi_goodbye(x, 5);
        said = true;
    }
    if (said) hpmlc_nap(0.3);
}

HPMLC_FN void hpmlc_mpi_list(hpmlc_shared *x, bool living)
{
    hpmlc_shared **at = &hpmlc_mpi_living.first;
    while (__atomic_test_and_set(&hpmlc_mpi_living.locked, __ATOMIC_ACQUIRE)) hpmlc_pause(true);
    while (*at && *at != x) at = &(*at)->next;
    if (living) *at = x;
    else if (*at) *at = x->next;
    hpmlc_mpi_living.process = (long)getpid(); /* a child of fork has no other ranks */
    if (!hpmlc_mpi_living.handled) hpmlc_mpi_living.handled = atexit(hpmlc_mpi_exit) == 0;
    __atomic_clear(&hpmlc_mpi_living.locked, __ATOMIC_RELEASE);
}

HPMLC_FN void hpmlc_shared_free(hpmlc_shared *x)
{
#ifndef HPML_NO_THREADS
    pthread_mutex_destroy(&x->lock);
#endif
    free(x);
}

HPMLC_FN void hpmlc_shared_leave(hpmlc_shared *x)
{
    hpmlc_mpi_lock(x);
    bool last = --x->users == 0 && !x->kept;
    hpmlc_mpi_unlock(x);
    if (last) hpmlc_shared_free(x);
}

HPMLC_FN void hpmlc_mpi_close_part(hpml_comm *c)
{
    hpmlc_shared *x = c->mpi->shared;
    if (hpml_ctx_status(c->ctx) == HPML_OK) { /* else it keeps its tags, because messages with them may be in flight */
        hpmlc_mpi_lock(x);
        if (c->mpi->native != MPI_COMM_NULL && !hpmlc_mpi_over()) MPI_Comm_free(&c->mpi->native);
        hpmlc_mpi_unlock(x);
        hpmlc_mpi_release(x, c->mpi->part);
    }
    hpmlc_shared_leave(x);
}

HPMLC_FN void hpmlc_mpi_close(hpml_comm *c)
{
    hpmlc_shared *x      = c->mpi->shared;
    bool          failed = hpml_ctx_status(c->ctx) != HPML_OK;
    if (c->is_part) {
        hpmlc_mpi_close_part(c);
        return;
    }
    hpmlc_mpi_list(x, false);
    x->closed = true;
    x->kept   = hpmlc_mpi_over();
    if (x->kept) { /* because sends of MPI may read x */
        hpmlc_shared_leave(x);
        return;
    }
    hpmlc_mpi_say(x, failed ? 'F' : 'L', failed ? hpml_ctx_error(c->ctx) : "");
    double limit = c->timeout < 0 ? 60 : c->timeout;
    int    absent = hpmlc_mpi_goodbye(x, failed ? 5 : limit);
    if (absent >= 0 && !failed)
        hpmlc_fail(c, HPML_ERR_TIMEOUT, "waited %g s for rank %d to free its communicator, step %lld; is that rank "
                   "alive? (hpml_comm_busy says that it is at work)", c->timeout, absent, (long long)c->step);
    if (absent >= 0 && !failed) hpmlc_say_no(&c->farewell, HPML_ERR_TIMEOUT, "%s", hpml_ctx_error(c->ctx));
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, x->before);
    MPI_Errhandler_free(&x->before);
    if (absent < 0 && !failed) MPI_Comm_free(&c->mpi->comm);
    x->kept = absent >= 0; /* because sends in flight read x */
    hpmlc_shared_leave(x);
}

static const hpml_transport hpmlc_mpi_transport = {
    "mpi", hpmlc_mpi_start, hpmlc_mpi_test, hpmlc_mpi_block, hpmlc_mpi_abandon,
    hpmlc_mpi_tell, hpmlc_mpi_split, hpmlc_mpi_close, hpmlc_mpi_allreduce, 0, 5e-6, 0.3e-9,
    hpmlc_mpi_lost, hpmlc_mpi_busy
};

/* Numbers the nodes by first appearance: ranks whose hosts have the same name share a node. */
HPMLC_FN void hpmlc_mpi_nodes(hpml_comm *c, int ranks_per_node)
{
    char     name[MPI_MAX_PROCESSOR_NAME + 1] = { 0 };
    int      length = 0, count = 0;
    uint64_t hash   = 1469598103934665603u;
    for (int i = 0; i < c->size && ranks_per_node > 0; i++) c->node[i] = i / ranks_per_node;
    if (ranks_per_node > 0) return;
    int64_t *host = (int64_t *)hpml_ctx_alloc(c->ctx, sizeof *host * (size_t)c->size, NULL);
    if (!host) { hpmlc_failed(c); return; }
    MPI_Get_processor_name(name, &length);
    for (int i = 0; i < length; i++) hash = (hash ^ (unsigned char)name[i]) * 1099511628211u;
    host[c->rank] = (int64_t)(hash >> 1);
    if (hpmlc_agree(c, "hpml_comm_create", host, c->size) == HPML_OK)
        for (int i = 0; i < c->size; i++) {
            int same = i - 1; /* mostly on the same host as the rank before */
            while (same >= 0 && host[same] != host[i]) same--;
            c->node[i] = same >= 0 ? c->node[same] : count++;
        }
    hpml_ctx_release(c->ctx, host);
    hpml_comm_counters_reset(c);
}

/* Allocates all arrays in one block, so that the buffers of sends that are never tested live as long as the struct. */
HPMLC_FN hpmlc_shared *hpmlc_shared_new(MPI_Comm given, double timeout)
{
    int rank, size, found = 0, *most = NULL;
    MPI_Comm_rank(given, &rank);
    MPI_Comm_size(given, &size);
    MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, &most, &found);
    const size_t  n    = (size_t)size + 1 + HPMLC_BUSY;
    const size_t  each = 2 * sizeof(double) + sizeof(MPI_Request) + sizeof(int32_t) + 1;
    hpmlc_shared *x = (hpmlc_shared *)calloc(1, sizeof *x + each * n);
    if (!x) return NULL;
    x->awaits = (double *)(void *)(x + 1);
    x->saying = (MPI_Request *)(void *)(x->awaits + 2 * n);
    x->number = (int32_t *)(void *)(x->saying + n);
    x->heard  = (char *)(x->number + n);
    for (int i = 0; i < (int)n; i++) x->number[i] = i, x->saying[i] = MPI_REQUEST_NULL;
    x->rank = rank, x->size = size, x->comm = given, x->tag = found ? *most : 32767, x->from = -1;
    x->parts = (int)hpmlc_min(((int64_t)x->tag + 1) / HPMLC_TAG_SPAN, HPMLC_PARTS), x->taken[0] = true;
    x->users = 1;
    x->timeout = timeout;
    MPI_Query_thread(&x->level);
#ifndef HPML_NO_THREADS
    pthread_mutex_init(&x->lock, NULL);
#endif
    return x;
}

/* Handles the deadline of hpmlc_mpi_meet: the error names the ranks that have not even announced that they wait. */
HPMLC_FN bool hpmlc_mpi_late(hpml_ctx *ctx, hpmlc_shared *x, char word)
{
    char text[160], names[64] = "";
    int  used = 0;
    for (int i = 0; i < x->size && used < 48; i++)
        if (i != x->rank && x->heard[i] != word && hpmlc_mpi_said(x, i) < 0)
            used += snprintf(names + used, sizeof names - (size_t)used, "%s rank %d", used ? "," : "", i);
    snprintf(text, sizeof text, "waited %g s for%s %s hpml_comm_create", x->timeout, used ? names : " all ranks",
             word == 'Y' ? "to call" : "in");
    hpmlc_mpi_say(x, 'F', text);
    hpml_ctx_fail(ctx, HPML_ERR_TIMEOUT, "rank %d: %s; is that rank alive? (.timeout sets the limit)", x->rank, text);
    return false;
}

/* Sends `word` to all ranks and waits until each has sent the same word, or 'N', could not start, which fails all
   ranks. */
HPMLC_FN bool hpmlc_mpi_meet(hpml_ctx *ctx, hpmlc_shared *x, const char *word)
{
    char   theirs = *word == 'N' ? 'Y' : *word;
    double limit = x->timeout < 0 ? 1e300 : hpml_now() + x->timeout, said = 0;
    hpmlc_mpi_lock(x);
    hpmlc_mpi_send(x, word, 1, NULL);
    hpmlc_mpi_unlock(x);
    for (int turn = 0;; turn++) {
        int absent = 0, unready = -1;
        hpmlc_mpi_listen(x);
        for (int i = 0; i < x->size; i++) {
            if (x->heard[i] == 'N') unready = i;
            else absent += i != x->rank && x->heard[i] != theirs;
        }
        if (x->failed)
            hpml_ctx_fail(ctx, HPML_ERR_PEER, "rank %d: rank %d failed: %s", x->rank, x->failed - 1, x->text);
        else if (absent == 0 && unready >= 0)
            hpml_ctx_fail(ctx, HPML_ERR_PEER, "rank %d: rank %d could not start", x->rank, unready);
        if (x->failed || absent == 0) return hpml_ctx_status(ctx) == HPML_OK;
        if (hpml_now() > limit) return hpmlc_mpi_late(ctx, x, theirs);
        hpmlc_mpi_worry(x, x->size, limit, &said);
        if (turn < 1000) hpmlc_pause(true);
        else hpmlc_nap(100e-6);
    }
}

/* All ranks meet ('Y'), duplicate the caller's communicator and meet again ('D'), because the word that is missing then
   shows which rank was lost. A rank that is out of memory meets the others, too, with 'N'. */
HPMLC_FN bool hpmlc_mpi_gather(hpml_ctx *ctx, hpml_comm *c, hpmlc_shared *x, MPI_Comm given)
{
    static const char words[] = { 'N', 'Y', 'D' };
    MPI_Errhandler    own;
    MPI_Comm_get_errhandler(given, &own);
    MPI_Comm_set_errhandler(given, MPI_ERRORS_RETURN);
    bool good = hpmlc_mpi_meet(ctx, x, &words[hpml_ctx_status(ctx) == HPML_OK]) &&
                hpmlc_mpi_duplicate(c, given, &c->mpi->comm) == HPML_OK && hpmlc_mpi_meet(ctx, x, &words[2]);
    MPI_Comm_set_errhandler(given, own);
    MPI_Errhandler_free(&own);
    return good;
}

HPMLC_FN hpml_comm *hpmlc_mpi_create(hpml_ctx *ctx, const hpml_comm_desc *d)
{
    int      on = 0, near = 0, launched = hpml_launched(NULL);
    MPI_Comm given;
    MPI_Initialized(&on);
    if (!on || hpmlc_mpi_over())
        return hpml_ctx_fail(ctx, HPML_ERR_STATE, "comm: MPI is %s; call MPI_Init before hpml_comm_create and free "
                             "the context before MPI_Finalize, or use hpml_launch once",
                             on ? "over" : "not initialized"), (hpml_comm *)NULL;
    given = d->mpi_comm ? *(MPI_Comm *)d->mpi_comm : MPI_COMM_WORLD;
    hpmlc_shared *x = hpmlc_shared_new(given, d->timeout != 0 ? d->timeout : 60);
    if (!x) return hpml_ctx_fail(ctx, HPML_ERR_MEMORY, "comm: no memory for words"), (hpml_comm *)NULL;
    if (!d->mpi_comm && x->size == 1 && launched > 1) {
        hpmlc_shared_free(x);
        return hpml_ctx_fail(ctx, HPML_ERR_COMM, "comm: the launcher started %d processes but MPI says each is alone: "
                             "mpiexec and libmpi are of different MPIs, or this is the MPICH of Ubuntu 24.04. Use the "
                             "mpiexec that belongs to your mpicc", launched), (hpml_comm *)NULL;
    }
    hpml_comm *c = hpmlc_comm_new(ctx, &hpmlc_mpi_transport, x->rank, x->size);
    hpmlc_mpi *m = c ? (hpmlc_mpi *)hpml_ctx_alloc(ctx, sizeof *m, NULL) : NULL;
    if (m) c->mpi = m, m->shared = x, c->timeout = x->timeout, c->doing = "hpml_comm_create", c->spin = 200;
    MPI_Comm_get_errhandler(MPI_COMM_WORLD, &x->before);
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN); /* where MPICH raises errors of MPI_Test */
    if (!hpmlc_mpi_gather(ctx, c, x, given)) {
        MPI_Comm_set_errhandler(MPI_COMM_WORLD, x->before);
        MPI_Errhandler_free(&x->before);
        if (!x->told) hpmlc_shared_free(x); /* else x leaks, because sends in flight read it */
        if (c) c->t = NULL;
        return NULL;
    }
    x->comm = m->native = m->comm, x->tag = HPMLC_TAG_EXTRA, x->owner = c;
    memset(x->heard, 0, (size_t)x->size);
    memset(x->awaits, 0, 2 * sizeof(double) * (size_t)x->size);
    hpmlc_mpi_list(x, true);
    hpmlc_mpi_nodes(c, d->ranks_per_node);
    for (int i = 0; i < x->size; i++) near += c->node[i] == c->node[x->rank];
    x->roomy = near <= hpmlc_cores(1);
    return c;
}

#else
HPMLC_FN void hpmlc_calm(hpml_comm *c HPMLC_UNUSED, const hpml_message *m HPMLC_UNUSED) {}
#endif /* HPML_USE_MPI */

// ---------------------------------------------------------------------------------------------------------------------
// >>clock   messages in virtual time
// ---------------------------------------------------------------------------------------------------------------------

/* Every thread has a clock of its own, moved by hpml_comm_compute and by the arrival of messages; real time does not
   count. One thread runs at a time: the one whose clock is behind all others. So messages enter the links in the order
   of their time, whatever the machine does, and a run can be repeated exactly. A send is copied and done at once. A
   receive is complete when its message has arrived: the receiving thread moves its clock to that time, and lets threads
   whose clocks are behind run before it reads the message. */

#ifndef HPML_NO_THREADS

struct hpmlc_agent {
    double         clock; /* first: the timeline's clock is an agent */
    hpmlc_agent   *under; /* the one that the timeline had before, NULL: none */
    hpml_rng       rng;  /* of its jitter */
    int            rank; /* of the world: breaks ties */
    bool           runnable;
    pthread_cond_t turn;
    hpmlc_agent   *next;
};

HPMLC_FN void hpmlc_agent_wake(hpml_world *w, hpmlc_agent *a) /* w->mutex held */
{
    if (!a->runnable) a->runnable = true, __atomic_add_fetch(&w->running, 1, __ATOMIC_ACQ_REL);
}

HPMLC_FN void hpmlc_agents_wake(hpml_world *w)
{
    for (hpmlc_agent *a = w->agents; a; a = a->next) hpmlc_agent_wake(w, a);
}

/* Gives the turn to whose time has come; w->mutex held. */
HPMLC_FN void hpmlc_agent_pass(hpml_world *w)
{
    hpmlc_agent *best = NULL;
    if (w->agent_count < w->ranks) return; /* not all are there yet */
    for (int again = 0; again < 2 && !best; again++) {
        for (hpmlc_agent *a = w->agents; a; a = a->next) {
            bool before = !best || a->clock < best->clock || (a->clock <= best->clock && a->rank < best->rank);
            if (a->runnable && before) best = a;
        }
        if (!best) hpmlc_world_stuck(w); /* wakes them all, if there is anybody */
    }
    w->turn = best;
    if (best) pthread_cond_signal(&best->turn);
}

/* Lets those run whose clocks are behind mine. rest: until somebody calls hpmlc_agent_rouse. */
HPMLC_FN void hpmlc_agent_yield(hpml_comm *c, bool rest)
{
    hpml_world *w = c->room->world;
    pthread_mutex_lock(&w->mutex);
    if (rest && (!w->failed || c->room->inbox[c->rank].peer < 0)) { /* after a failure no message is waited for */
        c->agent->runnable = false;
        c->room->inbox[c->rank].gate.sleeping = true; /* for the report of a deadlock */
        __atomic_sub_fetch(&w->running, 1, __ATOMIC_ACQ_REL);
    }
    hpmlc_agent_pass(w);
    while (w->turn != c->agent) pthread_cond_wait(&c->agent->turn, &w->mutex);
    c->room->inbox[c->rank].gate.sleeping = false;
    pthread_mutex_unlock(&w->mutex);
}

/* A new thread comes on stage: it waits for its turn. The last one of all sees to the first turn. */
HPMLC_FN void hpmlc_agent_enter(hpml_comm *c)
{
    hpml_world *w = c->room->world;
    pthread_mutex_lock(&w->mutex);
    if (!w->turn) hpmlc_agent_pass(w);
    while (w->turn != c->agent) pthread_cond_wait(&c->agent->turn, &w->mutex);
    pthread_mutex_unlock(&w->mutex);
}

HPMLC_FN void hpmlc_agent_rouse(hpml_comm *c, hpmlc_agent *a)
{
    hpml_world *w = c->room->world;
    pthread_mutex_lock(&w->mutex);
    hpmlc_agent_wake(w, a);
    pthread_mutex_unlock(&w->mutex);
}

/* Virtual time passes until `time`, if it is not there yet. The threads behind it run first: what this one does next
   must not come before what they do earlier. */
HPMLC_FN void hpmlc_agent_until(hpml_comm *c, double time)
{
    if (!c->agent || c->agent->clock >= time) return;
    c->agent->clock = time;
    hpmlc_agent_yield(c, false);
}

HPMLC_FN hpmlc_agent *hpmlc_agent_new(hpml_world *w, int rank, double clock)
{
    hpmlc_agent *a = (hpmlc_agent *)calloc(1, sizeof *a);
    if (!a) return NULL;
    pthread_cond_init(&a->turn, NULL);
    a->rank = rank, a->clock = clock, a->runnable = true, a->rng.seed = w->network.seed, a->rng.stream = (uint64_t)rank;
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
    hpmlc_inbox *in = &c->room->inbox[m->peer];
    if (m->receiving) return;
    hpmlc_agent_yield(c, false);
    m->arrival = hpmlc_arrival(c, m->peer, m->bytes, c->agent->clock);
    if (m->arrival <= 0) m->arrival = c->agent->clock;
    hpmlc_inbox_post_copy(c, m);
    if (in->owner) hpmlc_agent_rouse(c, in->owner->agent);
}

HPMLC_FN void hpmlc_clock_test(hpml_comm *c, hpml_message *m)
{
    hpml_message *sent = hpmlc_inbox_take(&c->room->inbox[c->rank], m);
    if (sent) hpmlc_meet(c, m, sent);
    else if (__atomic_load_n(&c->room->world->failed, __ATOMIC_ACQUIRE)) hpmlc_threads_give_up(c, m);
}

/* Until m's message arrives (an older receive of the same rank and tag gets the next one), or until something is sent
   to this rank; never until another receive's arrival, because m may be over before. */
HPMLC_FN void hpmlc_clock_block(hpml_comm *c, hpml_message *m, double until HPMLC_UNUSED)
{
    hpmlc_inbox *in      = &c->room->inbox[c->rank];
    double       arrival = hpmlc_next(m)->arrival;
    if (arrival > c->agent->clock) {
        hpmlc_agent_until(c, arrival);
        return;
    }
    hpmlc_waits(c, c->origin[m->peer]);
    in->doing = c->doing;
    hpmlc_agent_yield(c, true);
}

/* The timeline goes back to the clock it had before; if it has a later communicator's, that one will. */
HPMLC_FN void hpmlc_clock_close(hpml_comm *c)
{
    hpml_world   *w     = c->room->world;
    hpmlc_agent  *agent = c->agent;
    bool          mine  = !c->is_part;
    const double *top   = mine ? hpml_trace_clock(c->ctx, (const double *)agent->under) : NULL;
    if (top && top != &agent->clock) {
        hpmlc_agent *over = (hpmlc_agent *)(uintptr_t)top;
        hpml_trace_clock(c->ctx, top);
        while (over->under && over->under != agent) over = over->under;
        over->under = agent->under;
    }
    if (mine) hpmlc_agent_yield(c, false);
    hpmlc_threads_close(c);
    if (mine) hpmlc_agent_free(w, agent);
}

HPMLC_FN void hpmlc_clock_abandon(hpml_comm *c HPMLC_UNUSED, hpml_message *m) { m->done = true; } /* sends are copies */

static const hpml_transport hpmlc_clock = {
    "clock", hpmlc_clock_start, hpmlc_clock_test, hpmlc_clock_block, hpmlc_clock_abandon,
    hpmlc_threads_tell, hpmlc_threads_split, hpmlc_clock_close, NULL, 0, 2e-6, 0.25e-9, NULL, NULL
};

HPMLC_FN hpml_comm *hpmlc_clock_create(hpml_ctx *ctx, const hpml_comm_desc *d)
{
    hpml_comm *c = hpmlc_threads_create(ctx, d);
    if (!c) return NULL;
    hpml_world *w = d->world;
    c->agent      = hpmlc_agent_new(w, c->rank, 0);
    if (!c->agent) {
        hpmlc_room_enter(c->room, c->rank, NULL);
        c->t = NULL;
        return hpml_ctx_fail(ctx, HPML_ERR_MEMORY, "comm: no memory for a clock"), (hpml_comm *)NULL;
    }
    c->t    = &hpmlc_clock;
    c->spin = 0; /* one thread runs at a time: nothing arrives while this thread spins */
    /* What layers compute takes no time, but has its place in it. */
    c->agent->under = (hpmlc_agent *)(uintptr_t)hpml_trace_clock(ctx, &c->agent->clock);
    hpmlc_agent_enter(c);
    hpmlc_comm_links(c, &w->network, w->nodes);
    return c;
}

/* A rank that could not start: nobody waits for it any more. */
HPMLC_FN void hpmlc_world_absent(hpml_world *w, int rank, const char *text)
{
    if (rank < 0 || rank >= w->ranks) return;
    hpmlc_world_fail(w, rank, text);
    pthread_mutex_lock(&w->mutex);
    w->left[rank] = true;
    __atomic_sub_fetch(&w->running, 1, __ATOMIC_ACQ_REL);
    if (w->kind == HPML_TRANSPORT_CLOCK && ++w->agent_count == w->ranks) hpmlc_agent_pass(w);
    pthread_mutex_unlock(&w->mutex);
}

HPML_API double hpml_comm_now(const hpml_comm *c) { return c && c->agent ? c->agent->clock : hpml_now(); }

HPML_API void hpml_comm_compute(hpml_comm *c, double seconds)
{
    if (!c || !(seconds > 0)) return;
    double              start = hpml_comm_now(c);
    const hpml_network *net   = c->agent ? &c->room->world->network : NULL;
    if (net && net->slow) seconds *= net->slow[c->origin[c->rank]];
    if (net) c->agent->clock += seconds * (1 + net->jitter * (double)hpml_rng_uniform(&c->agent->rng));
    else hpmlc_nap(seconds);
    hpml_trace_span(c->ctx, HPML_LANE_COMPUTE, "compute", start, hpml_comm_now(c));
    if (c->agent) hpmlc_agent_yield(c, false);
}

#else
HPMLC_FN void   hpmlc_world_absent(hpml_world *w HPMLC_UNUSED, int rank HPMLC_UNUSED, const char *text HPMLC_UNUSED) {}
HPMLC_FN void   hpmlc_agent_until(hpml_comm *c HPMLC_UNUSED, double time HPMLC_UNUSED) {}
HPML_API double hpml_comm_now(const hpml_comm *c HPMLC_UNUSED) { return hpml_now(); }
HPML_API void   hpml_comm_compute(hpml_comm *c HPMLC_UNUSED, double seconds)
{
    if (seconds > 0) hpmlc_nap(seconds);
}
#endif /* HPML_NO_THREADS */

// ---------------------------------------------------------------------------------------------------------------------
// >>create   creating, splitting, freeing communicators; running a function on every rank
// ---------------------------------------------------------------------------------------------------------------------

#ifdef HPML_NO_THREADS /* one rank alone: nothing is ever sent */
static const hpml_transport hpmlc_self = { "self", NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, 0, 1e-7, 1e-10, NULL,
                                           NULL };
#endif
HPML_API hpml_comm *hpml_comm_create(hpml_ctx *ctx, const hpml_comm_desc *desc)
{
    hpml_comm *c = NULL;
    if (!ctx) return NULL;
    if (!desc || desc->_begin || desc->_end)
        return hpml_ctx_fail(ctx, HPML_ERR_ARGUMENT, "comm desc: %s", desc ? "canary is not zero; zero the struct "
                             "before you set fields" : "none given"), (hpml_comm *)NULL;
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
        hpml_ctx_fail(ctx, HPML_ERR_UNSUPPORTED, "comm: this program was built without MPI; compile it with "
                      "mpicc -DHPML_USE_MPI");
#endif
        break;
    default: hpml_ctx_fail(ctx, HPML_ERR_ARGUMENT, "comm: there is no transport %d", (int)desc->transport);
    }
    if (!c && desc->world) hpmlc_world_absent(desc->world, desc->rank, hpml_ctx_error(ctx));
    if (!c || hpml_ctx_status(ctx) != HPML_OK) return NULL;
    if (desc->timeout != 0) c->timeout = desc->timeout;
    c->check = desc->check;
    hpmlc_comm_layout(c);
    return c;
}

HPMLC_FN void hpmlc_background_stop(hpml_comm *c);
HPMLC_FN void hpmlc_background_drain(const hpml_comm *c);

HPMLC_FN void hpmlc_comm_drop(void *object)
{
    hpml_comm *c = (hpml_comm *)object;
    if (!c->t) return;
    hpml_comm_set_link(c, NULL); /* tells the others of a failure, too */
    hpmlc_background_stop(c);
    if (c->t->close) c->t->close(c);
    c->t = NULL;
}

HPML_API hpml_status hpml_comm_set_link(hpml_comm *c, const hpml_device_link *link)
{
    if (!c) return HPML_ERR_ARGUMENT;
    hpml_device_link old = c->link;
    hpmlc_failed(c); /* then others hear of it, and no job waits for them */
    if (old.across) hpmlc_background_drain(old.across);
    memset(&c->link, 0, sizeof c->link);
    if (link) c->link = *link;
    if (old.free) old.free(old.user);
    return hpml_ctx_status(c->ctx);
}

HPML_API void hpml_comm_free(hpml_comm *c) { hpml_ctx_release(hpml_comm_ctx(c), c); }

/* The communicator of `count` ranks of c, in this order. */
HPMLC_FN hpml_comm *hpmlc_part(hpml_comm *c, hpml_ctx *ctx, const int32_t *ranks, int count, int color)
{
    int me = 0;
    while (ranks[me] != c->rank) me++;
    hpml_comm *part = hpmlc_comm_new(ctx, c->t, me, count);
    if (part) part->t = NULL; /* nothing to close yet */
    else hpmlc_fail(c, HPML_ERR_MEMORY, "no memory for a communicator of %d ranks", count);
    if (hpml_barrier(c) != HPML_OK || !part) return NULL; /* all ranks have their memory, or none goes on */
    for (int i = 0; i < count; i++) part->origin[i] = c->origin[ranks[i]], part->node[i] = c->node[ranks[i]];
    part->key   = (c->key * 31 + c->sequence) * 31 + (uint64_t)color + 1;
    part->is_part = true, part->timeout = c->timeout, part->check = c->check, part->spin = c->spin;
    part->inside = c->inside, part->between = c->between, part->agent = c->agent; /* until a twin gets its own */
    hpmlc_comm_layout(part);
    if (c->t->split && c->t->split(c, part, ranks, count, color) != HPML_OK) return NULL;
    part->t = c->t;
    return part;
}

HPML_API hpml_comm *hpml_comm_split(hpml_comm *c, int color, int key)
{
    if (hpmlc_failed(c)) return NULL;
    int        p    = c->size, count = 0;
    int32_t   *all  = (int32_t *)hpml_ctx_alloc(c->ctx, sizeof(int32_t) * (size_t)(3 * p), NULL);
    hpml_comm *part = NULL;
    if (!all) return NULL;
    int32_t *ranks = all + 2 * p; /* behind color and key of each rank */
    all[2 * c->rank] = color, all[2 * c->rank + 1] = key;
    if (hpml_allgather(c, all, 2 * p, HPML_ELEMENT_I32) == HPML_OK) {
        for (int i = 0; i < p; i++) { /* by insertion: communicators are split rarely */
            int at = count;
            if (all[2 * i] != color) continue;
            for (; at > 0 && all[2 * ranks[at - 1] + 1] > all[2 * i + 1]; at--) ranks[at] = ranks[at - 1];
            ranks[at] = i;
            count++;
        }
        if (color >= 0) part = hpmlc_part(c, c->ctx, ranks, count, color);
        else if (hpml_barrier(c) == HPML_OK && c->mpi) c->t->split(c, NULL, NULL, 0, color); /* MPI wants everybody */
    }
    hpml_ctx_release(c->ctx, all);
    return part;
}

HPML_API hpml_comm *hpml_comm_split_node(hpml_comm *c)
{
    return c ? hpml_comm_split(c, c->node[c->rank], c->rank) : NULL;
}

typedef struct hpmlc_start {
    const hpml_launch_desc *d;
    hpml_comm_desc          comm;
    hpml_ctx_desc           ctx;
    hpml_rank_fn           *fn;
    void                   *user;
    hpml_status             status;
    char                    error[768];
} hpmlc_start;

/* Errors of layers and files do not know of ranks. */
HPMLC_FN void hpmlc_start_says(hpmlc_start *s, int rank, const char *text)
{
    int n = rank < 0 || strncmp(text, "rank ", 5) == 0 ? 0 : snprintf(s->error, sizeof s->error, "rank %d: ", rank);
    snprintf(s->error + n, sizeof s->error - (size_t)n, "%s", text);
}

HPMLC_FN void *hpmlc_start_main(void *arg)
{
    hpmlc_start *s    = (hpmlc_start *)arg;
    hpml_ctx    *ctx  = hpml_ctx_create(&s->ctx);
    hpml_comm   *comm = ctx ? hpml_comm_create(ctx, &s->comm) : NULL;
    if (!ctx && s->comm.world) hpmlc_world_absent(s->comm.world, s->comm.rank, "no memory for a context");
    if (comm && s->d->transport == HPML_TRANSPORT_MPI && s->d->ranks > 0 && comm->size != s->d->ranks)
        hpmlc_fail(comm, HPML_ERR_ARGUMENT, "launch: %d ranks are wanted, mpiexec started %d", s->d->ranks, comm->size);
    s->status = ctx ? hpml_ctx_status(ctx) : HPML_ERR_MEMORY;
    if (comm) comm->farewell.text = s->error, comm->farewell.size = sizeof s->error;
    if (comm && s->status == HPML_OK) s->status = s->fn(comm, s->user);
    if (s->status != HPML_OK && ctx) { /* the others must hear of it even if the context is clean */
        if (hpml_ctx_status(ctx) == HPML_OK)
            hpml_ctx_fail(ctx, s->status, "the rank's function returned %s", hpml_status_string(s->status));
        hpmlc_start_says(s, comm && comm->size > 1 ? comm->rank : -1, hpml_ctx_error(ctx));
    }
    if (!ctx) hpmlc_start_says(s, s->comm.rank, "no memory for a context");
    hpml_ctx_free(ctx);
    if (s->status == HPML_OK && s->error[0]) s->status = HPML_ERR_TIMEOUT;
    return NULL;
}

HPML_API int hpml_launched(int *rank)
{
    static const char *const names[][2] = { { "PMI_SIZE", "PMI_RANK" }, { "PMIX_SIZE", "PMIX_RANK" },
        { "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK" }, { "MPI_LOCALNRANKS", "MPI_LOCALRANKID" },
        { "SLURM_STEP_NUM_TASKS", "SLURM_PROCID" } };
    if (rank) *rank = 0;
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        const char *size = getenv(names[i][0]), *at = getenv(names[i][1]);
        if (!size || atoi(size) < 1) continue;
        if (rank && at) *rank = atoi(at);
        return atoi(size);
    }
    return 0;
}

/* A rank's part of this machine's cores. */
HPMLC_FN int hpmlc_cores(int ranks HPMLC_UNUSED)
{
#ifndef HPML_NO_THREADS
    long n = sysconf(_SC_NPROCESSORS_ONLN) / (ranks > 0 ? ranks : 1);
    return n > 0 ? (int)n : 1;
#else
    return 1;
#endif
}

/* desc.run, in words, to transport and ranks. */
HPMLC_FN bool hpmlc_run_read(hpml_launch_desc *d)
{
    static const char *const kinds[] = { "threads", "mpi", "clock", "serial", "auto" }; /* as hpml_transport_kind */
    const char *tasks = getenv("SLURM_NTASKS"), *run = getenv("HPML_RUN"); /* empty: as if it were not there */
    if (run && *run && (d->run || (!d->transport && !d->ranks))) d->run = run;
    if (!d->run) return true;
    size_t      length = strcspn(d->run, ":"), kind = 0;
    char       *end = NULL;
    long        ranks = d->run[length] ? strtol(d->run + length + 1, &end, 10) : 0;
    while (kind < 5 && (strlen(kinds[kind]) != length || memcmp(d->run, kinds[kind], length) != 0)) kind++;
    if (kind > 4 || (end && (kind == 3 || *end || ranks < 1 || ranks > 65536))) return false;
    if (kind == 4) kind = hpml_launched(NULL) > 1;
    if (ranks == 0 && kind == 3) ranks = 1;
    if (ranks == 0 && kind != 1) ranks = tasks && atoi(tasks) > 0 ? atoi(tasks) : hpmlc_cores(1);
    d->transport = kind == 3 ? HPML_TRANSPORT_THREADS : (hpml_transport_kind)kind, d->ranks = (int32_t)ranks;
    return true;
}

/* Refuses threads in each of several processes of mpiexec, unless allowed, because these are separate runs. */
HPMLC_FN hpml_status hpmlc_launch_alone(const hpml_launch_desc *d, const hpmlc_text *to)
{
    const char *run       = getenv("HPML_RUN"), *kind = d->transport == HPML_TRANSPORT_CLOCK ? "clock" : "threads";
    int         processes = hpml_launched(NULL), ranks = d->ranks > 0 ? d->ranks : 1;
    bool        meant     = run && *run && strncmp(run, "auto", 4) != 0 && strncmp(run, "mpi", 3) != 0;
    if (processes < 2 || d->alone || meant) return HPML_OK;
    return hpmlc_say_no(to, HPML_ERR_ARGUMENT, "launch: \"%s:%d\" in each of the %d processes that mpiexec or srun has "
                        "started would be %d separate runs. For one run on all of them set .run to \"auto\" or "
                        "\"mpi\"; if separate runs are meant, set .alone, or HPML_RUN=%s:%d in the environment",
                        kind, ranks, processes, processes, kind, ranks);
}

/* The first failure by cause: a rank that only heard of another's comes second. */
HPMLC_FN hpml_status hpmlc_verdict(const hpmlc_start *s, int n, const hpmlc_text *to)
{
    const hpmlc_start *worst = NULL;
    for (int i = 0; i < n; i++) {
        bool nearer = !worst || (worst->status == HPML_ERR_PEER && s[i].status != HPML_ERR_PEER);
        if (s[i].status != HPML_OK && nearer) worst = &s[i];
    }
    return hpmlc_say_no(to, worst ? worst->status : HPML_OK, "%s", worst ? worst->error : "");
}

HPMLC_FN hpml_status hpmlc_launch_mpi(hpmlc_start *s, const hpmlc_text *to)
{
#ifdef HPML_USE_MPI
    int on = 0, over = 0, level, rank = 0;
    MPI_Initialized(&on), MPI_Finalized(&over);
    if (!on) MPI_Init_thread(NULL, NULL, MPI_THREAD_SERIALIZED, &level);
    if (s->ctx.threads == 0) s->ctx.threads = hpmlc_cores(hpml_launched(NULL));
    if (!over) MPI_Comm_rank(MPI_COMM_WORLD, &rank); /* else the communicator says so */
    if (s->d->place) s->d->place(&s->ctx, rank, s->user);
    hpmlc_start_main(s);
    if (!on && s->status == HPML_OK) MPI_Finalize(); /* else others may never come: ending the process ends the job */
#else
    hpmlc_start_main(s); /* says how to build with MPI */
#endif
    return hpmlc_verdict(s, 1, to);
}

/* THREADS and CLOCK. */
HPMLC_FN hpml_status hpmlc_launch_threads(hpmlc_start *s, int ranks, const hpmlc_text *to)
{
#ifndef HPML_NO_THREADS
    hpml_world *w       = hpml_world_create(s->d->transport, ranks, &s->d->network);
    pthread_t  *threads = (pthread_t *)calloc((size_t)ranks, sizeof *threads);
    int         started = 0;
    for (int i = 0; i < ranks; i++) s[i].comm.world = w;
    for (; w && threads && started < ranks; started++)
        if (pthread_create(&threads[started], NULL, hpmlc_start_main, &s[started]) != 0) break;
    for (int i = started; w && i < ranks; i++) hpmlc_world_absent(w, i, "its thread could not be started: no memory");
    for (int i = 0; i < started; i++) pthread_join(threads[i], NULL);
    hpml_status status = w && threads ? hpmlc_verdict(s, ranks, to) : HPML_ERR_MEMORY;
    if (status == HPML_OK && w->failed) /* a job in the background that nobody has waited for */
        status = hpmlc_say_no(to, HPML_ERR_COMM, "%s", w->text);
    hpml_world_free(w);
    free(threads);
    return status;
#else
    if (ranks > 1)
        return hpmlc_say_no(to, HPML_ERR_UNSUPPORTED, "launch: %d ranks need threads (HPML_NO_THREADS is set)", ranks);
    hpmlc_start_main(s);
    return hpmlc_verdict(s, 1, to);
#endif
}

/* Parses desc.run; an error where its ranks or transport are out of range or not allowed (.alone). */
HPMLC_FN hpml_status hpmlc_launch_check(hpml_launch_desc *d, const hpmlc_text *to)
{
    if (d->_begin || d->_end || d->ranks < 0 || d->ranks > 65536 || (unsigned)d->transport > HPML_TRANSPORT_CLOCK)
        return hpmlc_say_no(to, HPML_ERR_ARGUMENT, "launch: %d ranks, transport %d: out of range, or a desc that is "
                            "not cleared", d->ranks, (int)d->transport);
    if (!hpmlc_run_read(d))
        return hpmlc_say_no(to, HPML_ERR_ARGUMENT, "launch: HPML_RUN or .run: \"%s\"; serial, threads[:N], "
                            "clock[:N], mpi[:N], auto[:N]", d->run);
    if (d->transport == HPML_TRANSPORT_MPI) return HPML_OK;
    hpml_status status = hpmlc_launch_alone(d, to);
    if (status != HPML_OK) return status;
    if (d->ranks == 0) d->ranks = 1;
    return hpmlc_network_check("launch", &d->network, d->ranks, d->transport == HPML_TRANSPORT_CLOCK, to);
}

HPML_API hpml_status hpml_launch(const hpml_launch_desc *desc, hpml_rank_fn *fn, void *user, char *error, size_t size)
{
    HPMLC_DESC(hpml_launch_desc, d, desc);
    char              text[512] = "launch: no function for the ranks";
    const hpmlc_text  to = { error, size }, reason = { text, sizeof text };
    hpml_status       refused = fn ? hpmlc_launch_check(&d, &reason) : HPML_ERR_ARGUMENT;
    hpmlc_say_no(&to, refused, "%s", refused == HPML_OK ? "" : text);
    bool cleared = !d._begin && !d._end; /* in a desc that is not cleared .log may be any address */
    if (refused != HPML_OK && cleared && d.ctx.log) d.ctx.log(refused, text, d.ctx.log_user);
    if (refused != HPML_OK) return refused;
    bool mpi   = d.transport == HPML_TRANSPORT_MPI;
    int  ranks = mpi ? 1 : d.ranks;
    hpmlc_start *s = (hpmlc_start *)calloc((size_t)ranks, sizeof *s);
    if (!s) return HPML_ERR_MEMORY;
    for (int i = 0; i < ranks; i++) {
        s[i].d = &d, s[i].fn = fn, s[i].user = user, s[i].ctx = d.ctx;
        s[i].comm.transport = d.transport, s[i].comm.rank = i, s[i].comm.timeout = d.timeout, s[i].comm.check = d.check;
        s[i].comm.ranks_per_node = d.network.ranks_per_node;
        if (mpi) continue; /* its rank is not known yet */
        if (s[i].ctx.threads == 0) s[i].ctx.threads = hpmlc_cores(ranks);
        if (d.place) d.place(&s[i].ctx, i, user);
    }
    hpml_status status = mpi ? hpmlc_launch_mpi(s, &to) : hpmlc_launch_threads(s, ranks, &to);
    free(s);
    return status;
}

// ---------------------------------------------------------------------------------------------------------------------
// >>moves   the algorithms, as moves; adding up elements
// ---------------------------------------------------------------------------------------------------------------------

/* An algorithm is a list of phases; a phase is played by a team on a range of the array. A team is every stride-th rank
   from `base`; member i has block i of the range. One function for each kind of phase says what a member does in round
   k. The same moves are executed on threads and MPI, counted by tests and timed by the simulator. */

typedef enum hpmlc_kind { /* the first six add up */
    HPMLC_RING_SCATTER,  /* after it, member i has the sum of block i */
    HPMLC_DOUBLING,      /* all have the sum; teams of 2^k */
    HPMLC_HALVE,         /* like RING_SCATTER, by halves; teams of 2^k */
    HPMLC_FOLD,          /* members beyond the power of two add to a partner */
    HPMLC_TREE_UP,       /* member 0 has the sum */
    HPMLC_STAR_UP,       /* the same, member 0 with each in turn */
    HPMLC_RING_GATHER,   /* member i had block i; now all have all */
    HPMLC_DOUBLE,        /* like RING_GATHER, by doubling; teams of 2^k */
    HPMLC_UNFOLD,        /* members beyond the power of two get the result back */
    HPMLC_TREE_DOWN, HPMLC_STAR_DOWN /* all have what member 0 had */
} hpmlc_kind;

typedef struct hpmlc_team {
    int base, stride, size, me, root; /* member i is rank base + (i + root) % size * stride */
} hpmlc_team;

typedef struct hpmlc_phase {
    hpmlc_kind kind;
    hpmlc_team team;
    int64_t    at, count; /* the range */
    int        rounds;
    const char *level;    /* of a hierarchy, in the timeline; else NULL */
} hpmlc_phase;

#define HPMLC_PHASES 8
typedef struct hpmlc_plan {
    hpmlc_phase phase[HPMLC_PHASES];
    int         count;
    const char *level; /* of the phases to come */
} hpmlc_plan;

HPML_API int64_t hpml_block(int64_t n, int parts, int index)
{
    return parts > 0 ? n / parts * index + n % parts * index / parts : 0;
}

HPMLC_FN int hpmlc_log2(int n) { return 31 - __builtin_clz((unsigned)n | 1); } /* rounded down */

HPMLC_FN bool hpmlc_adds(hpmlc_kind k) { return k <= HPMLC_STAR_UP; }

/* All p ranks as one team, the root its member 0. */
HPMLC_FN hpmlc_team hpmlc_everyone(int p, int rank, int root)
{
    const hpmlc_team all = { 0, 1, p, (rank - root + p) % p, root };
    return all;
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

/* Halving: before round k of log2 p, member i works on the p / 2^k blocks around its own, and keeps its own's half. */
HPMLC_FN void hpmlc_halve(const hpmlc_phase *f, hpml_move *m, int k, bool back)
{
    int i = f->team.me, half = f->team.size >> (k + 1), other = i ^ half; /* first blocks of the two halves: */
    int mine = i / half * half, theirs = other / half * half, out = back ? mine : theirs, in = back ? theirs : mine;
    hpmlc_give(f, m, other, out, out + half);
    hpmlc_take(f, m, other, in, in + half, !back);
}

/* The whole range: a child sends it up to its parent, where it is added, or gets it down from there. */
HPMLC_FN void hpmlc_climb(const hpmlc_phase *f, hpml_move *m, int child, int parent)
{
    int  p = f->team.size, other = f->team.me == child ? parent : child;
    bool up = hpmlc_adds(f->kind);
    if ((f->team.me == child) == up) hpmlc_give(f, m, other, 0, p);
    else hpmlc_take(f, m, other, 0, p, up);
}

HPMLC_FN void hpmlc_move_of(const hpmlc_phase *f, int k, hpml_move *m)
{
    int p = f->team.size, i = f->team.me, full = 1 << hpmlc_log2(p), step;
    memset(m, 0, sizeof *m);
    m->to = m->from = -1;
    switch (f->kind) {
    case HPMLC_RING_SCATTER: case HPMLC_RING_GATHER: {
        bool add = f->kind == HPMLC_RING_SCATTER; /* begins one block earlier, so as to end at its own */
        int  out = (i + 2 * p - add - k) % p, in = (out + p - 1) % p;
        hpmlc_give(f, m, (i + 1) % p, out, out + 1);
        hpmlc_take(f, m, (i + p - 1) % p, in, in + 1, add);
        break;
    }
    case HPMLC_DOUBLING:
        hpmlc_give(f, m, i ^ 1 << k, 0, p);
        hpmlc_take(f, m, i ^ 1 << k, 0, p, true);
        break;
    case HPMLC_HALVE: hpmlc_halve(f, m, k, false); break;
    case HPMLC_DOUBLE: hpmlc_halve(f, m, f->rounds - 1 - k, true); break;
    case HPMLC_FOLD: case HPMLC_UNFOLD:
        if (i < p - full || i >= full) hpmlc_climb(f, m, i % full + full, i % full);
        break;
    case HPMLC_TREE_UP: case HPMLC_TREE_DOWN: /* binomial: on round k's way up who has bit k as the lowest is a child */
        step = 1 << (f->kind == HPMLC_TREE_UP ? k : f->rounds - 1 - k);
        if (i % step == 0 && (i | step) < p) hpmlc_climb(f, m, i | step, i & ~step);
        break;
    case HPMLC_STAR_UP: case HPMLC_STAR_DOWN:
        if (i == 0 || i == k + 1) hpmlc_climb(f, m, k + 1, 0);
        break;
    }
}

HPMLC_FN void hpmlc_plan_add(hpmlc_plan *plan, hpmlc_kind kind, hpmlc_team team, int64_t at, int64_t count)
{
    int rounds = hpmlc_rounds(kind, team.size);
    if (rounds == 0 || team.me < 0) return;
    hpmlc_phase *f = &plan->phase[plan->count++];
    f->kind = kind, f->team = team, f->at = at, f->count = count, f->rounds = rounds, f->level = plan->level;
}

/* The phases of an allreduce of a range within one team. */
HPMLC_FN void hpmlc_plan_team(hpmlc_plan *plan, hpml_algorithm a, hpmlc_team t, int64_t at, int64_t count)
{
    hpmlc_team core = t;
    core.size = 1 << hpmlc_log2(t.size);
    if (core.me >= core.size) core.me = -1;
    if (a == HPML_BUTTERFLY || a == HPML_HALVING) {
        hpmlc_plan_add(plan, HPMLC_FOLD, t, at, count);
        hpmlc_plan_add(plan, a == HPML_HALVING ? HPMLC_HALVE : HPMLC_DOUBLING, core, at, count);
        if (a == HPML_HALVING) hpmlc_plan_add(plan, HPMLC_DOUBLE, core, at, count);
        hpmlc_plan_add(plan, HPMLC_UNFOLD, t, at, count);
        return;
    }
    bool star = a == HPML_CENTRAL, tree = a == HPML_TREE;
    hpmlc_plan_add(plan, star ? HPMLC_STAR_UP : tree ? HPMLC_TREE_UP : HPMLC_RING_SCATTER, t, at, count);
    hpmlc_plan_add(plan, star ? HPMLC_STAR_DOWN : tree ? HPMLC_TREE_DOWN : HPMLC_RING_GATHER, t, at, count);
}

/* Hierarchical: a ring inside the node leaves each member one share; the members with the same place on all nodes sum
   that share by halving, or by a ring; a ring inside the node spreads the shares. Where nodes differ in size: a tree to
   the first rank of each node, a ring among those, a tree back. */
HPMLC_FN void hpmlc_plan_nodes(hpmlc_plan *plan, int p, int per_node, bool spread, int rank, int64_t n)
{
    int nodes = (p + per_node - 1) / per_node, last = p - (nodes - 1) * per_node;
    int node = spread ? rank % nodes : rank / per_node, place = spread ? rank / nodes : rank % per_node;
    plan->level = "local reduce";
    if (p % per_node == 0) {
        const hpmlc_team in = { spread ? node : rank - place, spread ? nodes : 1, per_node, place, 0 };
        const hpmlc_team across = { rank - node * (spread ? 1 : per_node), spread ? 1 : per_node, nodes, node, 0 };
        int64_t at = hpml_block(n, per_node, place), end = hpml_block(n, per_node, place + 1);
        bool    folds = (nodes & (nodes - 1)) != 0; /* which sends everything twice more: a ring of some is cheaper */
        hpmlc_plan_add(plan, HPMLC_RING_SCATTER, in, 0, n), plan->level = "global allreduce";
        hpmlc_plan_team(plan, folds && nodes <= 32 ? HPML_RING : HPML_HALVING, across, at, end - at);
        plan->level = "local gather";
        hpmlc_plan_add(plan, HPMLC_RING_GATHER, in, 0, n);
        return;
    }
    const hpmlc_team in = { rank - place, 1, node == nodes - 1 ? last : per_node, place, 0 };
    const hpmlc_team across = { 0, per_node, nodes, node, 0 };
    hpmlc_plan_add(plan, HPMLC_TREE_UP, in, 0, n), plan->level = "global allreduce";
    if (place == 0) hpmlc_plan_team(plan, HPML_RING, across, 0, n);
    plan->level = "local gather";
    hpmlc_plan_add(plan, HPMLC_TREE_DOWN, in, 0, n);
}

HPMLC_FN void hpmlc_plan_make(hpmlc_plan *plan, hpml_algorithm a, int p, int per_node, bool spread, int rank, int64_t n)
{
    plan->count = 0, plan->level = NULL;
    if (a == HPML_HIERARCHICAL && per_node > 0 && per_node < p) hpmlc_plan_nodes(plan, p, per_node, spread, rank, n);
    else hpmlc_plan_team(plan, a, hpmlc_everyone(p, rank, 0), 0, n);
}

HPML_API bool hpml_allreduce_move(hpml_algorithm a, int p, int ranks_per_node, int rank, int64_t n, int round,
                                  hpml_move *out)
{
    hpmlc_plan plan;
    if (rank < 0 || rank >= p || round < 0) return false;
    hpmlc_plan_make(&plan, a, p, ranks_per_node, false, rank, n);
    for (int i = 0; i < plan.count; round -= plan.phase[i++].rounds) {
        if (round >= plan.phase[i].rounds) continue;
        hpmlc_move_of(&plan.phase[i], round, out);
        return true;
    }
    return false;
}

/* into[i] = into[i] + from[i], or the larger. Blocks of 16, not overlapping, let any compiler use vectors at -O2. */
#define HPMLC_REDUCE(name, type, wide, read, write, expression)                                                        \
    HPMLC_FN void hpmlc_##name(void *HPMLC_RESTRICT into, const void *HPMLC_RESTRICT from, size_t bytes)               \
    {                                                                                                                  \
        type       *x = (type *)into;                                                                                  \
        const type *y = (const type *)from;                                                                            \
        size_t      n = bytes / sizeof(type);                                                                          \
        for (; n >= 16; n -= 16, x += 16, y += 16)                                                                     \
            for (int j = 0; j < 16; j++) {                                                                             \
                wide a = read(x[j]), b = read(y[j]);                                                                   \
                x[j]   = write(expression);                                                                            \
            }                                                                                                          \
        for (size_t j = 0; j < n; j++) {                                                                               \
            wide a = read(x[j]), b = read(y[j]);                                                                       \
            x[j]   = write(expression);                                                                                \
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

static const struct { size_t size; hpmlc_reduce_fn *sum, *max; } hpmlc_types[] = { /* as hpml_element */
    { 4, hpmlc_sum_f32, hpmlc_max_f32 }, { 2, hpmlc_sum_bf16, hpmlc_max_bf16 }, { 4, hpmlc_sum_i32, hpmlc_max_i32 },
    { 8, hpmlc_sum_i64, hpmlc_max_i64 }, { 8, hpmlc_sum_f64, hpmlc_max_f64 }, { 1, NULL, NULL }
};

HPML_API size_t hpml_element_size(hpml_element e) { return (unsigned)e <= HPML_ELEMENT_BYTE ? hpmlc_types[e].size : 0; }

HPMLC_FN hpmlc_reduce_fn *hpmlc_reducer(hpml_element e, hpml_reduce op)
{
    if ((unsigned)e > HPML_ELEMENT_BYTE || (unsigned)op > HPML_MAX) return NULL;
    return op == HPML_MAX ? hpmlc_types[e].max : hpmlc_types[e].sum;
}

/* The mean of p ranks, after the sum: the same operation on the same bits on every rank. Blocks of 16 as above; times
   1 / p is the same bits as divided by p where p is a power of two. */
HPMLC_FN void hpmlc_divide_f32(float *x, int64_t n, float p)
{
    const int   rest = (int)p & ((int)p - 1);
    const float inverse = 1 / p;
    for (; n >= 16; n -= 16, x += 16) {
        if (rest == 0)
            for (int j = 0; j < 16; j++) x[j] *= inverse;
        else
            for (int j = 0; j < 16; j++) x[j] /= p;
    }
    for (int64_t j = 0; j < n; j++) x[j] /= p;
}

#define HPMLC_DIVIDE(type, wide, read, write) \
    for (type *x = (type *)data, *end = x + n; x < end; x++) *x = write(read(*x) / (wide)p)
HPMLC_FN void hpmlc_divide(void *data, int64_t n, hpml_element e, int p)
{
    switch (e) {
    case HPML_ELEMENT_F32: hpmlc_divide_f32((float *)data, n, (float)p); break;
    case HPML_ELEMENT_F64: HPMLC_DIVIDE(double, double, HPMLC_SAME, HPMLC_SAME); break;
    case HPML_ELEMENT_BF16: HPMLC_DIVIDE(uint16_t, float, hpmlc_from_bf16, hpmlc_to_bf16); break;
    case HPML_ELEMENT_I32: HPMLC_DIVIDE(int32_t, int32_t, HPMLC_SAME, HPMLC_SAME); break;
    case HPML_ELEMENT_I64: HPMLC_DIVIDE(int64_t, int64_t, HPMLC_SAME, HPMLC_SAME); break;
    case HPML_ELEMENT_BYTE: break;
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// >>collectives   the moves, executed
// ---------------------------------------------------------------------------------------------------------------------

/* A buffer of the communicator's that only grows. */
HPMLC_FN char *hpmlc_scratch(hpml_comm *c, size_t size)
{
    if (size <= c->scratch_size) return c->scratch;
    hpml_ctx_release(c->ctx, c->scratch);
    c->scratch      = (char *)hpml_ctx_alloc(c->ctx, size, NULL);
    c->scratch_size = c->scratch ? size : 0;
    return c->scratch;
}

/* The mean is taken where a sum is complete, after the last phase that adds, before it goes to the others: each element
   once, not on every rank. */
HPMLC_FN void hpmlc_run_mean(const hpml_comm *c, const hpmlc_plan *plan, int i, char *data, hpml_element e)
{
    const hpmlc_phase *f = &plan->phase[i];
    int                a = f->team.me, b = a + 1, p = f->team.size;
    for (int k = i + 1; k < plan->count; k++)
        if (hpmlc_adds(plan->phase[k].kind)) return;
    if (!hpmlc_adds(f->kind) || f->kind == HPMLC_FOLD) return;
    if (f->kind != HPMLC_RING_SCATTER && f->kind != HPMLC_HALVE) b = f->kind == HPMLC_DOUBLING || a == 0 ? p : 0, a = 0;
    int64_t at = f->at + hpml_block(f->count, p, a);
    hpmlc_divide(data + (size_t)at * hpml_element_size(e), f->at + hpml_block(f->count, p, b) - at, e, c->size);
}

HPMLC_FN hpml_status hpmlc_run(hpml_comm *c, const hpmlc_plan *plan, char *data, hpml_element e, int op, int tag)
{
    size_t           size   = hpml_element_size(e);
    hpmlc_reduce_fn *reduce = op < 0 ? NULL : hpmlc_reducer(e, (hpml_reduce)op);
    hpml_status      status = HPML_OK;
    double           since  = plan->level ? hpml_comm_now(c) : 0, end;
    c->round = 0;
    for (int i = 0; i < plan->count; i++) {
        const hpmlc_phase *f = &plan->phase[i];
        for (int k = 0; k < f->rounds && status == HPML_OK; k++, c->round++) {
            hpml_move m;
            hpmlc_move_of(f, k, &m);
            char  *out = data + (size_t)m.out_at * size, *in = data + (size_t)m.in_at * size;
            size_t out_bytes = (size_t)m.out_count * size, in_bytes = (size_t)m.in_count * size;
            if (m.to >= 0 && m.add && out == in && out_bytes > 0) { /* what is sent is added to meanwhile */
                char *copy = hpmlc_scratch(c, out_bytes);
                if (!copy) return hpml_ctx_status(c->ctx);
                out = (char *)memcpy(copy, out, out_bytes);
            }
            status = hpmlc_round(c, tag, m.to, out, out_bytes, m.from, in, in_bytes, m.add ? reduce : NULL);
        }
        if (op == HPML_MEAN && status == HPML_OK) hpmlc_run_mean(c, plan, i, data, e);
        if (!f->level || status != HPML_OK || (i + 1 < plan->count && f[1].level == f->level)) continue;
        end = hpml_comm_now(c);
        hpmlc_span(c, f->level, since, end, f->count * (int64_t)size);
        since = end;
    }
    return status;
}

/* With .check: rank 0 collects, in words, what each rank is about to do, and tells all of them what it thinks. */
HPMLC_FN hpml_status hpmlc_check(hpml_comm *c, const char mine[96], int tag)
{
    hpmlc_plan  tell;
    char        theirs[96], verdict[256] = { 0 };
    hpml_status status = HPML_OK;
    if (c->rank > 0) status = hpmlc_round(c, tag, 0, mine, sizeof theirs, -1, NULL, 0, NULL);
    for (int i = 1; c->rank == 0 && i < c->size && status == HPML_OK; i++) {
        status = hpmlc_round(c, tag, -1, NULL, 0, i, theirs, sizeof theirs, NULL);
        if (status == HPML_OK && strcmp(theirs, mine) != 0 && !verdict[0])
            snprintf(verdict, sizeof verdict, "collective %u differs: rank 0 is in %s, rank %d in %s", c->sequence,
                     mine, c->origin[i], theirs);
    }
    tell.count = 0, tell.level = NULL;
    hpmlc_plan_add(&tell, HPMLC_STAR_DOWN, hpmlc_everyone(c->size, c->rank, 0), 0, sizeof verdict);
    if (status == HPML_OK) status = hpmlc_run(c, &tell, verdict, HPML_ELEMENT_BYTE, -1, tag);
    if (status != HPML_OK) return status;
    return verdict[0] ? hpml_ctx_fail(c->ctx, HPML_ERR_COMM, "rank %d: %s", c->origin[c->rank], verdict) : HPML_OK;
}

/* Every collective begins here: a tag of its own, the name for messages, the check of what all ranks must pass, with
   `how` and `which` for what is this collective's own ("root" 3; which -1: no number). Returns the tag, or -1. */
HPMLC_FN int hpmlc_enter(hpml_comm *c, const char *name, int64_t n, hpml_element element, int op, const char *how,
                         int which)
{
    static const char *const elements[] = { "f32", "bf16", "i32", "i64", "f64", "bytes" }; /* as hpml_element */
    static const char *const ops[]      = { "", ", sum", ", mean", ", max" }; /* none, then as hpml_reduce */
    int tag;
    if (hpmlc_failed(c)) return -1;
    if (n < 0) return hpmlc_fail(c, HPML_ERR_ARGUMENT, "%s of %lld elements", name, (long long)n), -1;
    tag = HPMLC_TAG_COLLECTIVE + (int)(c->sequence++ % HPMLC_TAGS);
    c->doing = name;
    if (c->check && c->size > 1) {
        char words[96] = { 0 };
        int  used = snprintf(words, sizeof words, "%s of %lld %s%s%s%s", name, (long long)n, elements[element],
                             ops[op + 1], how ? ", " : "", how ? how : "");
        if (how && which >= 0) snprintf(words + used, sizeof words - (size_t)used, " %d", which);
        if (hpmlc_check(c, words, tag) != HPML_OK) return -1;
    }
    c->round = 0;
    c->bytes  = (int64_t)((uint64_t)n * hpml_element_size((hpml_element)element));
    c->within = true;
    c->since  = hpml_comm_now(c);
    return tag;
}

HPMLC_FN hpml_status hpmlc_leave(hpml_comm *c, hpml_status status)
{
    double end = hpml_comm_now(c);
    c->counters.seconds += end - c->since;
    c->within = false;
    hpmlc_span(c, c->doing, c->since, end, c->bytes);
    return status;
}

/* The largest of all ranks' values, on all of them. */
HPMLC_FN hpml_status hpmlc_agree(hpml_comm *c, const char *name, int64_t *most, int64_t n)
{
    hpmlc_plan plan;
    int        tag = hpmlc_enter(c, name, n, HPML_ELEMENT_I64, HPML_MAX, NULL, -1);
    if (tag < 0) return hpml_ctx_status(c->ctx);
    hpmlc_plan_make(&plan, HPML_BUTTERFLY, c->size, 0, false, c->rank, n);
    return hpmlc_leave(c, hpmlc_run(c, &plan, (char *)most, HPML_ELEMENT_I64, HPML_MAX, tag));
}

/* One phase of all ranks as one team, rooted at `root`. */
HPMLC_FN hpml_status hpmlc_phase_run(hpml_comm *c, const char *name, hpmlc_kind kind, void *data, int64_t n,
                                     hpml_element e, int op, int root)
{
    hpmlc_plan plan;
    if (c && (root < 0 || root >= c->size || hpml_element_size(e) == 0 ||
              (op >= 0 && !hpmlc_reducer(e, (hpml_reduce)op))))
        return hpmlc_fail(c, HPML_ERR_ARGUMENT, "%s: root %d of %d ranks, element %d, op %d", name, root, c->size,
                          (int)e, op);
    bool rooted = kind == HPMLC_TREE_UP || kind == HPMLC_TREE_DOWN;
    int  tag    = hpmlc_enter(c, name, n, e, op, rooted ? "root" : NULL, root);
    if (tag < 0) return c ? hpml_ctx_status(c->ctx) : HPML_ERR_ARGUMENT;
    plan.count = 0, plan.level = NULL;
    hpmlc_plan_add(&plan, kind, hpmlc_everyone(c->size, c->rank, root), 0, n);
    return hpmlc_leave(c, hpmlc_run(c, &plan, (char *)data, e, op, tag));
}

HPML_API hpml_status hpml_reduce_scatter(hpml_comm *c, void *data, int64_t n, hpml_element e, hpml_reduce op)
{
    return hpmlc_phase_run(c, "reduce_scatter", HPMLC_RING_SCATTER, data, n, e, (int)op, 0);
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
    return hpmlc_phase_run(c, "reduce", HPMLC_TREE_UP, data, n, e, (int)op, root);
}

/* Blocks of `bytes` between a root and everybody, or everybody and everybody: in round k with the rank k further on. A
   barrier doubles k instead: after k rounds everybody has heard, directly or not, of 2^k - 1 others. */
HPMLC_FN hpml_status hpmlc_blocks(hpml_comm *c, const char *name, const char *out, char *in, size_t bytes, int root)
{
    bool gather = strcmp(name, "gather") == 0, scatter = strcmp(name, "scatter") == 0, barrier = *name == 'b';
    if (c && (gather || scatter) && (root < 0 || root >= c->size))
        return hpmlc_fail(c, HPML_ERR_ARGUMENT, "%s: root %d of %d ranks", name, root, c->size);
    int tag = hpmlc_enter(c, name, (int64_t)bytes, HPML_ELEMENT_BYTE, -1, root < 0 ? NULL : "root", root);
    if (tag < 0) return c ? hpml_ctx_status(c->ctx) : HPML_ERR_ARGUMENT;
    if (in && out && bytes > 0 && (root < 0 || root == c->rank))
        memmove(in + (scatter ? 0 : (size_t)c->rank * bytes), out + (gather ? 0 : (size_t)c->rank * bytes), bytes);
    hpml_status status = HPML_OK;
    for (int k = 1; k < c->size && status == HPML_OK; k += barrier ? k : 1) {
        int         to = (c->rank + k) % c->size, from = (c->rank - k + c->size) % c->size;
        bool        sends = gather ? to == root : scatter ? c->rank == root : true;
        bool        takes = gather ? c->rank == root : scatter ? from == root : true;
        const char *mine   = out && !gather ? out + (size_t)to * bytes : out;
        char       *theirs = in && !scatter ? in + (size_t)from * bytes : in;
        c->round = k;
        status = hpmlc_round(c, tag, sends ? to : -1, mine, bytes, takes ? from : -1, theirs, bytes, NULL);
    }
    return hpmlc_leave(c, status);
}

HPML_API hpml_status hpml_barrier(hpml_comm *c) { return hpmlc_blocks(c, "barrier", NULL, NULL, 0, -1); }

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

static const char *const hpmlc_algorithms[HPML_ALGORITHM_COUNT] = { "auto", "central", "tree", "ring", "butterfly",
                                                                    "halving", "hierarchical", "native" };

HPML_API const char *hpml_algorithm_name(hpml_algorithm a)
{
    return (unsigned)a < HPML_ALGORITHM_COUNT ? hpmlc_algorithms[a] : "unknown";
}

HPML_API hpml_algorithm hpml_algorithm_find(const char *name)
{
    for (int i = 0; name && i < HPML_ALGORITHM_COUNT; i++)
        if (strcmp(name, hpmlc_algorithms[i]) == 0) return (hpml_algorithm)i;
    return HPML_ALGORITHM_NONE;
}

/* Simulated once and kept. In nodes, and where ranks are no power of two, messages overlap as no formula knows. */
HPMLC_FN double hpmlc_forecast(const hpml_comm *c, hpml_algorithm a, int k)
{
    double *kept = (double *)&c->forecast[k][a];
    if (*kept > 0) return *kept;
    HPMLC_ZERO(hpml_network, net);
    int p = c->size, known = 0, nodes = 0;
    for (int r = 0; r < p; r++) known = c->node[r] >= known ? c->node[r] + 1 : known;
    int32_t *node = (int32_t *)calloc((size_t)(p + known), sizeof *node); /* (p), then (known) 1 + the new number */
    for (int r = 0; node && r < p; r++) { /* a part's nodes are numbered anew */
        int32_t *number = &node[p + c->node[r]];
        if (*number == 0) *number = ++nodes;
        node[r] = *number - 1;
    }
    net.node = node, net.between = c->between, net.inside = nodes > 1 ? c->inside : c->between;
    *kept = node ? hpml_simulate_allreduce(a, p, &net, (int64_t)1 << k) : -1;
    free(node);
    return *kept;
}

HPML_API hpml_algorithm hpml_comm_choose(const hpml_comm *c, int64_t bytes)
{
    static const hpml_algorithm order[] = { HPML_BUTTERFLY, HPML_HALVING, HPML_RING, HPML_HIERARCHICAL, HPML_TREE,
                                            HPML_CENTRAL };
    if (!c) return HPML_ALGORITHM_NONE;
    hpml_algorithm a = HPML_RING;
    double         best = 1e300, n = (double)bytes;
    int            p = c->size, k = hpmlc_log2(bytes < 64 ? 64 : bytes >> 29 ? 1 << 29 : (int)bytes);
    for (int i = 0; i < 6 && p > 1 && p <= 65536; i++) {
        if (order[i] == HPML_HIERARCHICAL && (c->per_node <= 1 || c->per_node >= p)) continue;
        if (order[i] == HPML_RING && p > 256 && (c->spread || c->per_node == 0)) continue; /* p^2 steps to simulate */
        double low = hpmlc_forecast(c, order[i], k), high = hpmlc_forecast(c, order[i], k + 1);
        if (low < 0 || high < 0) return HPML_ALGORITHM_NONE;
        double cost = low + (high - low) * (ldexp(n, -k) - 1);
        if (order[i] == HPML_BUTTERFLY && !c->agent) cost += hpmlc_log2(p) * n * 1e-10; /* sends a copy */
        if (order[i] == HPML_CENTRAL && !c->agent) cost += 2 * (p - 1) * c->t->alpha; /* one by one */
        if (cost < best) best = cost, a = order[i];
    }
    return a;
}

/* Chooses the algorithm where it is AUTO. Returns the elements of one piece, see hpml_transport; 0: no memory. */
HPMLC_FN int64_t hpmlc_allreduce_piece(const hpml_comm *c, int64_t n, int64_t size, hpml_algorithm *a)
{
    if (*a != HPML_AUTO) return hpmlc_max(n, 1);
    *a = hpml_comm_choose(c, n * size);
    if (*a == HPML_ALGORITHM_NONE) return 0;
    return c->t->piece > 0 && n > 1 << 21 ? (int64_t)c->t->piece / size : hpmlc_max(n, 1);
}

/* Bytes that this rank sends in an allreduce of n elements. NATIVE and links do not say: as a ring. */
HPMLC_FN int64_t hpmlc_allreduce_bytes(const hpml_comm *c, int64_t n, int64_t size, hpml_algorithm a)
{
    if (a == HPML_NATIVE || c->link.begin) return 2 * size * (n - hpml_block(n, c->size, 1));
    int64_t step = hpmlc_allreduce_piece(c, n, size, &a), elements = 0;
    for (int64_t at = 0; at < n && step > 0; at += step) {
        hpmlc_plan plan;
        hpml_move  m;
        hpmlc_plan_make(&plan, a, c->size, c->per_node, c->spread, c->rank, hpmlc_min(n - at, step));
        for (const hpmlc_phase *f = plan.phase; f < plan.phase + plan.count; f++)
            for (int k = 0; k < f->rounds; k++) {
                hpmlc_move_of(f, k, &m);
                elements += m.out_count;
            }
    }
    return elements * size;
}

HPML_API hpml_status hpml_allreduce(hpml_comm *c, void *data, int64_t n, const hpml_allreduce_desc *desc)
{
    hpmlc_plan  plan;
    hpml_status status;
    HPMLC_DESC(hpml_allreduce_desc, d, desc);
    if (c && (d._begin || d._end || !hpmlc_reducer(d.element, d.reduce) ||
              (unsigned)d.algorithm >= HPML_ALGORITHM_COUNT || (n > 0 && !data)))
        return hpmlc_fail(c, HPML_ERR_ARGUMENT, "allreduce: algorithm %d, op %d, element %d, data %p: the desc is not "
                          "cleared, or out of range", (int)d.algorithm, (int)d.reduce, (int)d.element, data);
    int tag = hpmlc_enter(c, "allreduce", n, d.element, (int)d.reduce, hpml_algorithm_name(d.algorithm), -1);
    if (tag < 0) return c ? hpml_ctx_status(c->ctx) : HPML_ERR_ARGUMENT;
    int64_t size = (int64_t)hpml_element_size(d.element), step = hpmlc_allreduce_piece(c, n, size, &d.algorithm);
    if (step == 0) return hpmlc_fail(c, HPML_ERR_MEMORY, "allreduce: no memory");
    if (d.algorithm == HPML_NATIVE) {
        if (!c->t->allreduce)
            return hpmlc_fail(c, HPML_ERR_UNSUPPORTED, "allreduce: transport %s has no native one; choose another "
                              "algorithm", c->t->name);
        status = c->t->allreduce(c, data, n, (int)d.element, (int)d.reduce);
        if (status == HPML_OK && d.reduce == HPML_MEAN) hpmlc_divide(data, n, d.element, c->size);
    } else {
        int64_t at = 0;
        do { /* piece by piece, see hpml_transport; once, too, when n is 0 */
            int64_t count = hpmlc_min(n - at, step);
            hpmlc_plan_make(&plan, d.algorithm, c->size, c->per_node, c->spread, c->rank, count);
            status = hpmlc_run(c, &plan, (char *)data + at * size, d.element, (int)d.reduce, tag);
            at += count;
        } while (at < n && status == HPML_OK);
    }
    return hpmlc_leave(c, status);
}

HPMLC_FN hpml_status hpmlc_reduce_all(hpml_comm *c, void *data, int64_t n, hpml_element element, hpml_reduce reduce,
                                      hpml_algorithm algorithm)
{
    HPMLC_ZERO(hpml_allreduce_desc, d);
    d.element = element, d.reduce = reduce, d.algorithm = algorithm;
    return hpml_allreduce(c, data, n, &d);
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
    int next = (c->rank + 1) % c->size, before = (c->rank + c->size - 1) % c->size;
    for (int i = 0; i < 16; i++)
        for (int large = 0; large < 2; large++) {
            size_t bytes = large ? LARGE : 4;
            double start = hpml_comm_now(c);
            hpml_sendrecv(c, next, buffer, bytes, before, buffer + LARGE, bytes, 0);
            best[large] = fmin(best[large], hpml_comm_now(c) - start);
        }
    hpml_ctx_release(c->ctx, buffer);
    if (hpmlc_reduce_all(c, best, 2, HPML_ELEMENT_F64, HPML_MAX, HPML_BUTTERFLY) != HPML_OK)
        return hpml_ctx_status(c->ctx);
    memset(c->forecast, 0, sizeof c->forecast);
    c->between.latency = best[0];
    if (best[1] > best[0]) c->between.bandwidth = (double)LARGE / (best[1] - best[0]);
    return HPML_OK;
}

// ---------------------------------------------------------------------------------------------------------------------
// >>async   work in the background
// ---------------------------------------------------------------------------------------------------------------------

/* A thread with a twin of the communicator and a hidden context (errors are handed over when a job is waited for). Jobs
   run in the order of posting, so all ranks meet. */

struct hpml_job {
    hpml_comm          *c;
    hpml_rank_fn       *work;
    void               *user;
    void               *data; /* of an allreduce */
    int64_t             n;
    hpml_allreduce_desc desc;
    hpml_status         status;
    bool                used, done;
    int64_t             step;  /* of the trainer, when it was posted */
    double              clock; /* CLOCK: when it was posted, then when it was done */
};

HPMLC_FN hpml_status hpmlc_job_allreduce(hpml_comm *c, void *user)
{
    hpml_job *j = (hpml_job *)user;
    return hpml_allreduce(c, j->data, j->n, &j->desc);
}

#define HPMLC_JOBS 256

struct hpmlc_background {
    hpml_comm *c, *twin;
    hpml_ctx  *ctx;
    hpml_job   job[HPMLC_JOBS];
    unsigned   posted, taken;
    bool       threaded, stop, ended;
    hpmlc_gate worker, waiter;
#ifndef HPML_NO_THREADS
    pthread_t  thread;
#endif
};

/* The oldest job that waits. */
HPMLC_FN void hpmlc_job_run(hpmlc_background *b)
{
    hpml_job *j = &b->job[b->taken++ % HPMLC_JOBS];
    b->twin->step = j->step;
    hpmlc_agent_until(b->twin, j->clock);
    j->status = j->work(b->twin, j->work == hpmlc_job_allreduce ? j : j->user);
    j->clock  = hpml_comm_now(b->twin);
    __atomic_store_n(&j->done, true, __ATOMIC_RELEASE);
}

#ifndef HPML_NO_THREADS

HPMLC_FN hpml_world *hpmlc_world_of(const hpml_comm *c) { return c->room ? c->room->world : NULL; }

/* Sleeps at a gate; in virtual time the turn goes on, whatever `until`. `c` is the sleeper's communicator. */
HPMLC_FN void hpmlc_rest(hpml_comm *c, hpmlc_gate *g, unsigned *seen, double until)
{
    if (c->agent) {
        hpmlc_waits(c, -1);
        if (__atomic_load_n(&g->changes, __ATOMIC_ACQUIRE) == *seen) hpmlc_agent_yield(c, true);
        *seen = __atomic_load_n(&g->changes, __ATOMIC_ACQUIRE);
    } else hpmlc_gate_sleep(hpmlc_world_of(c), g, seen, until, true);
}

HPMLC_FN void hpmlc_rouse(hpml_comm *by, hpml_comm *who, hpmlc_gate *g)
{
    hpmlc_gate_wake(hpmlc_world_of(by), g);
    if (who->agent) hpmlc_agent_rouse(who, who->agent);
}

/* This thread mostly waits, and others wait for what it does next: it asks to be woken when the time has come, not 50
   us later, and to run for moments only, which lets it run at once although all cores compute. Refused: no matter. */
HPMLC_FN void hpmlc_background_prompt(void)
{
#if defined(__linux__) && defined(PR_SET_TIMERSLACK) && defined(SYS_sched_setattr)
    struct { uint32_t size, policy; uint64_t flags; int32_t nice; uint32_t priority; uint64_t runtime, rest[2]; } a;
    prctl(PR_SET_TIMERSLACK, 1000ul, 0ul, 0ul, 0ul); /* ns */
    if (syscall(SYS_sched_getattr, 0, &a, (unsigned)sizeof a, 0u) != 0 || a.policy != 0) return;
    a.runtime = 100000; /* ns of a slice, from Linux 6.12 on */
    syscall(SYS_sched_setattr, 0, &a, 0u);
#endif
}

HPMLC_FN void *hpmlc_background_main(void *arg)
{
    hpmlc_background *b    = (hpmlc_background *)arg;
    unsigned          seen = 0;
    hpmlc_background_prompt();
    if (b->twin->agent) hpmlc_agent_enter(b->twin);
    for (;;) {
        if (b->taken != __atomic_load_n(&b->posted, __ATOMIC_ACQUIRE)) {
            hpmlc_job_run(b);
            hpmlc_rouse(b->twin, b->c, &b->waiter);
        } else if (__atomic_load_n(&b->stop, __ATOMIC_ACQUIRE)) break;
        else hpmlc_rest(b->twin, &b->worker, &seen, 1e300);
    }
    hpml_world  *w = hpmlc_world_of(b->twin);
    hpmlc_agent *a = b->twin->agent;
    if (a) b->twin->agent = NULL;
    __atomic_store_n(&b->ended, true, __ATOMIC_RELEASE);
    hpmlc_rouse(b->twin, b->c, &b->waiter); /* the last touch of b */
    if (a) hpmlc_agent_free(w, a);
    else if (w && __atomic_sub_fetch(&w->running, 1, __ATOMIC_ACQ_REL) == 0) hpmlc_world_deadlock(w);
    return NULL;
}

HPMLC_FN void hpmlc_background_thread(hpmlc_background *b)
{
    hpml_world *w = hpmlc_world_of(b->c);
#ifdef HPML_USE_MPI
    if (b->c->mpi && b->c->mpi->shared->level < MPI_THREAD_SERIALIZED) return;
#endif
    hpmlc_agent *own = b->c->agent ? hpmlc_agent_new(w, b->c->agent->rank, b->c->agent->clock) : NULL;
    if (b->c->agent && !own) return;
    hpmlc_gate_init(&b->worker);
    hpmlc_gate_init(&b->waiter);
    if (w) __atomic_add_fetch(&w->running, 1, __ATOMIC_ACQ_REL);
    if (own) b->twin->agent = own;
    b->threaded = pthread_create(&b->thread, NULL, hpmlc_background_main, b) == 0;
    if (b->threaded) return;
    b->twin->agent = b->c->agent; /* work is done at once, in its owner's time */
    if (own) hpmlc_agent_free(w, own);
    else if (w) __atomic_sub_fetch(&w->running, 1, __ATOMIC_ACQ_REL);
}

/* Until the thread says so; meanwhile a deadlock is seen, and virtual time goes on. */
HPMLC_FN void hpmlc_background_await(hpmlc_background *b, const bool *said)
{
    unsigned seen = __atomic_load_n(&b->waiter.changes, __ATOMIC_ACQUIRE);
    while (!__atomic_load_n(said, __ATOMIC_ACQUIRE)) hpmlc_rest(b->c, &b->waiter, &seen, 1e300);
}

#else
HPMLC_FN void hpmlc_rouse(hpml_comm *by HPMLC_UNUSED, hpml_comm *who HPMLC_UNUSED, hpmlc_gate *g HPMLC_UNUSED) {}
HPMLC_FN void hpmlc_rest(hpml_comm *c HPMLC_UNUSED, hpmlc_gate *g HPMLC_UNUSED, unsigned *seen HPMLC_UNUSED,
                         double until HPMLC_UNUSED) {}
HPMLC_FN void hpmlc_background_await(hpmlc_background *b HPMLC_UNUSED, const bool *said HPMLC_UNUSED) {}
HPMLC_FN void hpmlc_background_thread(hpmlc_background *b HPMLC_UNUSED) {}

#endif

HPMLC_FN void hpmlc_background_stop(hpml_comm *c)
{
    hpmlc_background *b = c->background;
    if (!b) return;
    c->background = NULL;
#ifndef HPML_NO_THREADS
    if (b->threaded) {
        __atomic_store_n(&b->stop, true, __ATOMIC_RELEASE);
        hpmlc_rouse(b->c, b->twin, &b->worker);
        hpmlc_background_await(b, &b->ended);
        pthread_join(b->thread, NULL);
        hpmlc_gate_close(&b->worker);
        hpmlc_gate_close(&b->waiter);
    }
#endif
    hpml_ctx_free(b->ctx);
}

/* Collective, at the first job. */
HPMLC_FN hpmlc_background *hpmlc_background_of(hpml_comm *c)
{
    if (c->background) return c->background;
    hpmlc_background *b = (hpmlc_background *)hpml_ctx_alloc(c->ctx, sizeof *b, NULL);
    if (!b) return NULL;
    HPMLC_ZERO(hpml_ctx_desc, d);
    d.threads = 1, d.allocator = hpml_ctx_allocator(c->ctx);
    int32_t *all = (int32_t *)hpml_ctx_alloc(c->ctx, sizeof *all * (size_t)c->size, NULL);
    for (int i = 0; all && i < c->size; i++) all[i] = i;
    b->c    = c;
    b->ctx  = all ? hpml_ctx_create(&d) : NULL;
    b->twin = b->ctx ? hpmlc_part(c, b->ctx, all, c->size, 0) : NULL;
    hpml_ctx_release(c->ctx, all);
    if (!b->twin) {
        hpmlc_fail(c, HPML_ERR_MEMORY, "no twin for work in the background: %s",
                   b->ctx ? hpml_ctx_error(b->ctx) : "no memory");
        hpml_ctx_free(b->ctx);
        return NULL;
    }
    b->twin->spin  = 0; /* leaves the core to those who compute */
    b->twin->trace = c->ctx;
    c->background  = b;
    hpmlc_background_thread(b);
    return b;
}

/* A copy of `what`. */
HPMLC_FN hpml_job *hpmlc_job_post(hpml_comm *c, const hpml_job *what)
{
    hpmlc_background *b = hpmlc_failed(c) ? NULL : hpmlc_background_of(c);
    if (!b) return NULL;
    hpml_job *j = &b->job[b->posted % HPMLC_JOBS];
    if (j->used)
        return hpmlc_fail(c, HPML_ERR_STATE, "%d jobs in the background have not been waited for", HPMLC_JOBS),
               (hpml_job *)NULL;
    *j = *what;
    j->c = c, j->used = true, j->step = c->step, j->clock = hpml_comm_now(c);
    __atomic_add_fetch(&b->posted, 1, __ATOMIC_RELEASE);
    if (b->threaded) hpmlc_rouse(c, b->twin, &b->worker);
    else hpmlc_job_run(b);
    return j;
}

HPML_API hpml_job *hpml_background(hpml_comm *c, hpml_rank_fn *work, void *user)
{
    HPMLC_ZERO(hpml_job, j);
    j.work = work, j.user = user;
    return work ? hpmlc_job_post(c, &j) : NULL;
}

HPML_API hpml_job *hpml_iallreduce(hpml_comm *c, void *data, int64_t n, const hpml_allreduce_desc *desc)
{
    HPMLC_ZERO(hpml_job, j);
    j.work = hpmlc_job_allreduce, j.data = data, j.n = n;
    if (desc) j.desc = *desc;
    return hpmlc_job_post(c, &j);
}

HPML_API bool hpml_job_done(const hpml_job *j) { return !j || __atomic_load_n(&j->done, __ATOMIC_ACQUIRE); }

HPML_API hpml_status hpml_job_wait(hpml_job *j)
{
    if (!j) return HPML_ERR_ARGUMENT;
    hpmlc_background *b = j->c->background;
    __atomic_store_n(&b->twin->spin, j->c->spin, __ATOMIC_RELAXED); /* nobody computes here: the core is the twin's */
    hpmlc_background_await(b, &j->done);
    __atomic_store_n(&b->twin->spin, 0, __ATOMIC_RELAXED);
    hpmlc_agent_until(j->c, j->clock);
    j->used = false;
    if (j->status != HPML_OK && hpml_ctx_status(b->ctx) != HPML_OK && hpml_ctx_status(j->c->ctx) == HPML_OK)
        hpml_ctx_fail(j->c->ctx, j->status, "%s", hpml_ctx_error(b->ctx));
    return j->status;
}

/* Waits until nothing is under way: then what the twin has counted, and what jobs carry, may be looked at. */
HPMLC_FN void hpmlc_background_drain(const hpml_comm *c)
{
    hpmlc_background *b = c->background;
    if (b && b->posted > 0) hpmlc_background_await(b, &b->job[(b->posted - 1) % HPMLC_JOBS].done);
}

HPMLC_FN void hpmlc_counters_add(hpml_counters *to, const hpml_counters *more)
{
    to->messages += more->messages, to->bytes += more->bytes, to->between_bytes += more->between_bytes;
    to->rounds += more->rounds, to->seconds += more->seconds;
}

HPML_API void hpml_comm_counters(const hpml_comm *c, hpml_counters *out)
{
    memset(out, 0, sizeof *out);
    if (!c) return;
    hpmlc_background_drain(c);
    *out = c->counters;
    if (c->background) hpmlc_counters_add(out, &c->background->twin->counters);
}

HPMLC_FN int64_t hpmlc_sent_to(const hpml_comm *c, int peer, int what)
{
    if (!c || peer < 0 || peer >= c->size) return 0;
    hpmlc_background_drain(c);
    return c->to[peer][what] + (c->background ? c->background->twin->to[peer][what] : 0);
}

HPML_API int64_t hpml_comm_messages_to(const hpml_comm *c, int peer) { return hpmlc_sent_to(c, peer, 0); }
HPML_API int64_t hpml_comm_bytes_to(const hpml_comm *c, int peer) { return hpmlc_sent_to(c, peer, 1); }

HPML_API void hpml_comm_counters_reset(hpml_comm *c)
{
    if (!c) return;
    hpmlc_background_drain(c);
    for (hpml_comm *x = c; x; x = x == c && c->background ? c->background->twin : NULL) {
        memset(&x->counters, 0, sizeof x->counters);
        memset(x->to, 0, sizeof *x->to * (size_t)x->size);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// >>exchange   1-bit exchange: stripes, owners, two residuals
// ---------------------------------------------------------------------------------------------------------------------

/* Tensors are of two kinds: plain ones are added as they are, in one fused allreduce; packed ones go by stripes. A
   message to rank j holds, contribution by contribution and tensor by tensor, the packed rows of stripe j, behind a
   word that says whether all was finite. */

typedef struct hpmlc_item {
    hpml_gradient g;
    hpml_packing  packing;
    bool          plain;
    float        *residual;       /* (leaves, rows, cols) or NULL */
    float        *stripe;         /* (my_rows, cols) or NULL */
    int64_t       my_row, my_rows; /* of this rank's stripe */
    int64_t       at;             /* plain: where it begins in fused or span */
    float        *p, *q, *work;   /* behind it: LOWRANK: P (rows, r), Q (cols, r), M (rows, cols). TOPK: u (n), the
                                     pairs of all ranks (p, k, 2), magnitudes (n) */
} hpmlc_item;

/* Arrays that may live on a device. `open` gives n floats of one on the host: where they are, or a copy in the window,
   one at a time; `close` brings what was changed back. On the host there is no device, and these do nothing. */
typedef struct hpmlc_reach {
    const hpml_backend *device; /* NULL: on the host */
    void               *at;
    float              *window; /* as large as the largest array */
} hpmlc_reach;

HPMLC_FN bool hpmlc_reach_create(hpmlc_reach *r, hpml_ctx *ctx, int64_t largest)
{
    r->device = hpml_ctx_backend(ctx), r->at = hpml_ctx_device(ctx);
    r->window = (float *)hpml_ctx_alloc(ctx, (size_t)hpmlc_max(largest, 1) * sizeof(float), NULL);
    return r->window != NULL;
}

HPMLC_FN float *hpmlc_open(const hpmlc_reach *r, float *x, int64_t n)
{
    if (!r->device || n == 0) return x;
    r->device->read(r->at, r->window, x, (size_t)n * sizeof(float));
    return r->window;
}

HPMLC_FN void hpmlc_close(const hpmlc_reach *r, float *x, int64_t n)
{
    if (r->device && n > 0) r->device->write(r->at, x, r->window, (size_t)n * sizeof(float));
}

struct hpml_exchange {
    hpml_comm         *c;
    hpml_exchange_desc d;
    hpmlc_item        *item;      /* (d.count) */
    int                packed;    /* items that are not plain */
    float             *fused;     /* plain tensors side by side; NULL: they already lie so, at `span` */
    float             *span;
    int64_t            plain;     /* floats in fused or span */
    int64_t            part;      /* of them in one sum */
    int32_t           *missing;   /* (parts) tensors that are not ready everywhere */
    int32_t           *ready;     /* (d.count) atomic: 1: ready here, 2: everywhere */
    int32_t           *late;      /* (d.count) 1 + a rank where it is not */
    int                said;      /* atomic: tensors ready here */
    hpml_job          *job;       /* the one that waits for more, */
    hpmlc_background  *by;        /* and whose it is */
    int32_t           *leaves;    /* (p) contributions of each rank */
    size_t            *out_at;    /* (p + 1) where the message to each rank begins in `out` */
    size_t             in_size;   /* bytes of one contribution to my stripe, word excluded */
    size_t            *in_at;     /* (p + 1) where the message of each rank begins in `in` */
    size_t            *sum_at;    /* (p + 1) the packed sums of all stripes */
    char              *out, *in, *sums;
    int64_t            bytes;     /* sent in one run */
    hpmlc_reach        reach;     /* linked: the device, where tensors, residuals and messages are */
    int                bucket;    /* its number for the timeline, from 1; 0: none */
    int64_t            bad;       /* of the last run: 1 + a rank that had a NaN + the tensor times 2^20. 0: none */
};

/* Memory where the tensors are. */
HPMLC_FN void *hpmlc_exchange_alloc(hpml_exchange *x, size_t bytes)
{
    void *p = x->reach.device ? x->reach.device->alloc(x->reach.at, bytes) : hpml_ctx_alloc(x->c->ctx, bytes, NULL);
    if (!p && hpml_ctx_status(x->c->ctx) == HPML_OK)
        hpmlc_fail(x->c, HPML_ERR_MEMORY, "exchange: no %zu bytes on %s", bytes, x->reach.device->name);
    return p;
}

HPMLC_FN void hpmlc_exchange_release(hpml_exchange *x, void *p)
{
    if (!x->reach.device) hpml_ctx_release(x->c->ctx, p);
    else if (p) x->reach.device->free(x->reach.at, p, 0);
}

#define HPMLC_HEAD 8 /* bytes before a message: hpml_exchange.bad */

HPMLC_FN int64_t hpmlc_bad(const hpml_comm *c, int64_t tensor) { return c->origin[c->rank] + 1 + (tensor << 20); }

HPMLC_FN int64_t hpmlc_stripe(const hpmlc_item *it, int p, int rank) { return hpml_block(it->g.rows, p, rank); }

HPMLC_FN size_t hpmlc_stripe_size(const hpmlc_item *it, int p, int rank)
{
    size_t rows = (size_t)(hpmlc_stripe(it, p, rank + 1) - hpmlc_stripe(it, p, rank));
    return (rows * it->packing.row_size + 7) / 8 * 8;
}

/* Bytes of one contribution to the stripes of `rank`. */
HPMLC_FN size_t hpmlc_message_size(const hpml_exchange *x, int rank)
{
    size_t size = 0;
    for (int i = 0; i < x->d.count; i++)
        if (!x->item[i].plain) size += hpmlc_stripe_size(&x->item[i], x->c->size, rank);
    return size;
}

/* Plain tensors that fill a stretch of memory need no copy. They must follow one another as given, as they would in a
   copy, which other ranks may need; but a trainer's, which pads each to 16 floats, lie alike on all ranks. */
HPMLC_FN void hpmlc_exchange_span(hpml_exchange *x)
{
    float  *low = NULL, *high = NULL;
    int64_t all = 0;
    bool    in_order = true, alike = x->d.padded || x->d.share;
    for (const hpmlc_item *it = x->item; it < x->item + x->d.count; it++) {
        int64_t n = it->g.rows * it->g.cols, room = x->d.padded ? (n + 15) / 16 * 16 : n;
        if (!it->plain) continue;
        in_order = in_order && (!low || it->g.data == high);
        if (!low || it->g.data < low) low = it->g.data;
        if (!high || it->g.data + room > high) high = it->g.data + room;
        all += room;
    }
    if (low && high - low == all && (in_order || alike)) x->span = low, x->plain = all;
}

HPMLC_FN hpml_status hpmlc_exchange_check(hpml_comm *c, const hpml_exchange_desc *d)
{
    bool sum = d->reduce == HPML_SUM || d->reduce == HPML_MEAN, ratio = d->ratio >= 0 && d->ratio <= 1;
    if (d->_begin || d->_end || d->count < 1 || !d->tensors || d->leaves < 0 || !sum || !ratio || d->lowrank < 0 ||
        (unsigned)d->method > HPML_METHOD_LOWRANK || d->fuse_bytes < 0)
        return hpmlc_fail(c, HPML_ERR_ARGUMENT, "exchange: %d tensors, method %d, op %d, ratio %g, rank %d: no desc, "
                          "or not cleared, or out of range", d->count, (int)d->method, (int)d->reduce,
                          (double)d->ratio, d->lowrank);
    for (int i = 0; i < d->count; i++) {
        const hpml_gradient *g = &d->tensors[i];
        hpml_packing         p;
        if (!g->data || g->rows < 1 || g->cols < 1 || hpml_packing_init(&p, &d->codec, g->rows, g->cols) != HPML_OK)
            return hpmlc_fail(c, HPML_ERR_SHAPE, "exchange: tensor %d \"%s\" is %lld x %lld%s, or its codec desc is "
                              "not valid", i, g->name ? g->name : "", (long long)g->rows, (long long)g->cols,
                              g->data ? "" : " without data");
    }
    if (d->leaves > 1 && d->method != HPML_METHOD_CODEC)
        return hpmlc_fail(c, HPML_ERR_UNSUPPORTED, "exchange: top-k and low-rank take one contribution a rank; exact "
                          "sums go with codecs");
    return HPML_OK;
}

/* The maximum over all ranks, for the library's own needs: it is not on the timeline. */
HPMLC_FN hpml_status hpmlc_reduce_unseen(hpml_comm *c, void *data, int64_t n, hpml_element element)
{
    hpml_ctx *trace = c->trace;
    c->trace = NULL;
    hpml_status status = hpmlc_reduce_all(c, data, n, element, HPML_MAX, HPML_AUTO);
    c->trace = trace;
    return status;
}

/* Have all ranks the same hash? */
HPMLC_FN hpml_status hpmlc_same(hpml_comm *c, uint64_t hash, bool *same)
{
    int64_t     both[2] = { (int64_t)(hash >> 2), -(int64_t)(hash >> 2) };
    hpml_status status = hpmlc_reduce_unseen(c, both, 2, HPML_ELEMENT_I64);
    *same = both[0] == -both[1];
    return status;
}

/* All ranks must have the same tensors: counts and shapes, folded into a number that is compared. */
HPMLC_FN hpml_status hpmlc_exchange_agree(hpml_exchange *x)
{
    bool     same;
    uint64_t h = 14695981039346656037u;
    for (int i = 0; i < x->d.count; i++) {
        uint64_t parts[3] = { (uint64_t)x->item[i].g.rows, (uint64_t)x->item[i].g.cols, x->item[i].packing.row_size };
        for (int k = 0; k < 3; k++) h = (h ^ parts[k]) * 1099511628211u;
    }
    hpml_status status = hpmlc_same(x->c, h, &same);
    if (status == HPML_OK && !same)
        status = hpmlc_fail(x->c, HPML_ERR_SHAPE, "exchange: the ranks have different tensors or codecs (%d here); all "
                            "ranks must record the same model", x->d.count);
    return status;
}

HPMLC_FN bool hpmlc_methods_create(hpml_exchange *x, hpmlc_item *it);

HPMLC_FN bool hpmlc_item_create(hpml_exchange *x, hpmlc_item *it)
{
    hpml_comm *c = x->c;
    hpml_packing_init(&it->packing, &x->d.codec, it->g.rows, it->g.cols);
    if (x->d.method != HPML_METHOD_CODEC) return hpmlc_methods_create(x, it);
    it->plain = it->packing.codec->linear;
    if (it->plain) return true;
    it->my_row  = hpmlc_stripe(it, c->size, c->rank);
    it->my_rows = hpmlc_stripe(it, c->size, c->rank + 1) - it->my_row;
    if (it->packing.residual_count == 0) return true;
    size_t all = (size_t)(it->g.rows * it->g.cols * x->d.leaves), mine = (size_t)(it->my_rows * it->g.cols);
    it->residual = (float *)hpmlc_exchange_alloc(x, all * sizeof(float));
    it->stripe   = (float *)hpmlc_exchange_alloc(x, mine * sizeof(float) + 1); /* also where I have no rows */
    return it->residual && it->stripe;
}

/* Where every message begins, and memory for them. */
HPMLC_FN bool hpmlc_exchange_layout(hpml_exchange *x)
{
    hpml_comm *c = x->c;
    int        p = c->size;
    x->in_size   = hpmlc_message_size(x, c->rank);
    for (int r = 0; r < p; r++) {
        size_t size      = hpmlc_message_size(x, r);
        x->out_at[r + 1] = x->out_at[r] + HPMLC_HEAD + size * (size_t)x->d.leaves;
        x->in_at[r + 1]  = x->in_at[r] + HPMLC_HEAD + x->in_size * (size_t)x->leaves[r];
        x->sum_at[r + 1] = x->sum_at[r] + HPMLC_HEAD + size;
    }
    x->out  = (char *)hpmlc_exchange_alloc(x, x->out_at[p]);
    x->in   = (char *)hpmlc_exchange_alloc(x, x->in_at[p]);
    x->sums = (char *)hpmlc_exchange_alloc(x, x->sum_at[p]);
    x->bytes += (int64_t)(x->out_at[p] - (x->out_at[c->rank + 1] - x->out_at[c->rank]));
    x->bytes += (int64_t)(p - 1) * (int64_t)(x->sum_at[c->rank + 1] - x->sum_at[c->rank]);
    return x->sums != NULL && x->in && x->out;
}

/* Where plain tensors are among those that are added up, and what it takes to ask who is ready. */
HPMLC_FN bool hpmlc_exchange_parts(hpml_exchange *x)
{
    int64_t at = 0, n = x->d.count;
    for (hpmlc_item *it = x->item; it < x->item + n; it++)
        if (it->plain) it->at = x->span ? it->g.data - x->span : at, at += it->g.rows * it->g.cols;
    x->part  = x->d.fuse_bytes > 0 ? (x->d.fuse_bytes + 3) / 4 : x->plain + 1;
    at       = 2 * n + x->plain / x->part + 1;
    x->ready = (int32_t *)hpml_ctx_alloc(x->c->ctx, sizeof *x->ready * (size_t)at, NULL);
    x->late  = x->ready + n, x->missing = x->late + n;
    return x->ready != NULL;
}

HPML_API hpml_exchange *hpml_exchange_create(hpml_comm *c, const hpml_exchange_desc *desc)
{
    HPMLC_DESC(hpml_exchange_desc, d, desc);
    if (hpmlc_failed(c) || hpmlc_exchange_check(c, &d) != HPML_OK) return NULL;
    hpml_exchange *x = (hpml_exchange *)hpml_ctx_alloc(c->ctx, sizeof *x, NULL);
    size_t         p = (size_t)c->size;
    if (!x) return NULL;
    x->c = c, x->d = d;
    if (x->d.leaves == 0) x->d.leaves = 1;
    x->item   = (hpmlc_item *)hpml_ctx_alloc(c->ctx, sizeof *x->item * (size_t)d.count, NULL);
    x->leaves = (int32_t *)hpml_ctx_alloc(c->ctx, sizeof *x->leaves * p, NULL);
    x->out_at = (size_t *)hpml_ctx_alloc(c->ctx, sizeof *x->out_at * 3 * (p + 1), NULL);
    if (!x->item || !x->leaves || !x->out_at) return NULL;
    x->in_at = x->out_at + p + 1, x->sum_at = x->in_at + p + 1;
    int64_t most = 0;
    for (int i = 0; i < d.count; i++) most = hpmlc_max(most, d.tensors[i].rows * d.tensors[i].cols);
    if (d.linked && !hpmlc_reach_create(&x->reach, c->ctx, most)) return NULL;
    for (int i = 0; i < d.count; i++) {
        x->item[i].g = d.tensors[i];
        if (!hpmlc_item_create(x, &x->item[i])) return NULL;
        x->packed += !x->item[i].plain;
        if (x->item[i].plain) x->plain += d.tensors[i].rows * d.tensors[i].cols;
    }
    x->leaves[c->rank] = x->d.leaves;
    if (hpmlc_exchange_agree(x) != HPML_OK) return NULL;
    if (hpml_allgather(c, x->leaves, c->size, HPML_ELEMENT_I32) != HPML_OK) return NULL;
    hpmlc_exchange_span(x);
    if (x->plain > 0 && !x->span && !d.linked)
        x->fused = (float *)hpml_ctx_alloc(c->ctx, (size_t)x->plain * sizeof(float), NULL);
    if (x->d.method == HPML_METHOD_CODEC && x->packed > 0 && !hpmlc_exchange_layout(x)) return NULL;
    return hpmlc_exchange_parts(x) ? x : NULL;
}

HPML_API void hpml_exchange_free(hpml_exchange *x)
{
    if (!x) return;
    hpml_ctx *ctx = x->c->ctx;
    for (int i = 0; i < x->d.count; i++) {
        hpmlc_exchange_release(x, x->item[i].residual);
        hpmlc_exchange_release(x, x->item[i].stripe);
    }
    char *messages[] = { x->out, x->in, x->sums };
    for (size_t k = 0; k < sizeof messages / sizeof messages[0]; k++) hpmlc_exchange_release(x, messages[k]);
    void *own[] = { x->item, x->leaves, x->out_at, x->fused, x->ready, x->reach.window };
    for (size_t k = 0; k < sizeof own / sizeof own[0]; k++) hpml_ctx_release(ctx, own[k]);
    hpml_ctx_release(ctx, x);
}

// ---------------------------------------------------------------------------------------------------------------------
// >>stripes   the five steps of an exchange, on the host or on a device
// ---------------------------------------------------------------------------------------------------------------------

HPMLC_FN hpml_status hpmlc_encode(const hpml_exchange *x, const hpmlc_item *it, void *packed, float *e, const float *g,
                                  int64_t rows)
{
    const hpml_backend *b = x->reach.device;
    return b ? b->encode(x->reach.at, x->c->ctx, &it->packing, packed, e, g, rows)
             : hpml_packing_encode(&it->packing, packed, e, g, rows);
}

HPMLC_FN void hpmlc_decode(const hpml_exchange *x, const hpmlc_item *it, float *out, const void *packed, int64_t rows,
                           bool add)
{
    const hpml_backend *b = x->reach.device;
    if (b) b->decode(x->reach.at, x->c->ctx, &it->packing, out, packed, rows, add);
    else it->packing.codec->decode(&it->packing, out, packed, rows, add);
}

/* Sets the label of the next spans: the plain tensors of x in [at, end), or all others of x; x NULL: no label. */
HPMLC_FN void hpmlc_about(hpml_comm *c, const hpml_exchange *x, bool plain, int64_t at, int64_t end)
{
    memset(&c->about, 0, sizeof c->about);
    if (!x || !hpml_trace_on(c->trace)) return;
    c->about.bucket = x->bucket;
    for (const hpmlc_item *it = x->item; it < x->item + x->d.count; it++) {
        bool within = !plain || (it->at < end && it->at + it->g.rows * it->g.cols > at);
        if (it->plain != plain || !within) continue;
        if (!c->about.first) c->about.first = it->g.name;
        c->about.last = it->g.name;
    }
}

/* 1. Packs all rows, stripe by stripe, into messages; `back`: the end of 5., from sums. Returns hpml_exchange.bad. */
HPMLC_FN int64_t hpmlc_exchange_pack(hpml_comm *c, hpml_exchange *x, bool back)
{
    int     p = c->size;
    int64_t bad = 0;
    for (int r = 0; r < p; r++) {
        char *at = (back ? x->sums + x->sum_at[r] : x->out + x->out_at[r]) + HPMLC_HEAD;
        for (int l = 0; l < (back ? 1 : x->d.leaves); l++)
            for (int i = 0; i < x->d.count; i++) {
                hpmlc_item *it = &x->item[i];
                if (it->plain) continue;
                int64_t row = hpmlc_stripe(it, p, r), rows = hpmlc_stripe(it, p, r + 1) - row;
                float  *e = it->residual ? it->residual + (l * it->g.rows + row) * it->g.cols : NULL;
                float  *g = it->g.data + l * x->d.leaf_step + row * it->g.cols;
                if (back) hpmlc_decode(x, it, g, at, rows, false);
                else if (rows > 0 && hpmlc_encode(x, it, at, e, g, rows) != HPML_OK && (!bad || i < bad >> 20))
                    bad = hpmlc_bad(c, i);
                at += hpmlc_stripe_size(it, p, r);
            }
    }
    return bad;
}

/* What rank r has sent for my stripe; my own never travelled. */
HPMLC_FN const char *hpmlc_exchange_from(const hpml_exchange *x, int r, int me)
{
    return r == me ? x->out + x->out_at[r] : x->in + x->in_at[r];
}

/* The word before a message: keeps the first rank that had a NaN. */
HPMLC_FN void hpmlc_exchange_hear(int64_t *bad, const char *message)
{
    int64_t other;
    memcpy(&other, message, sizeof other);
    if (*bad == 0) *bad = other;
}

/* 3. and 4. Adds what has come for my stripe, in the order of ranks and leaves, and packs the sum. Result: as pack. */
HPMLC_FN int64_t hpmlc_exchange_add(hpml_comm *c, hpml_exchange *x)
{
    int     p = c->size, me = c->rank;
    int64_t bad = 0;
    char   *to = x->sums + x->sum_at[me] + HPMLC_HEAD;
    size_t  offset = 0;
    for (int i = 0; i < x->d.count; i++) {
        hpmlc_item *it = &x->item[i];
        if (it->plain) continue;
        float  *sum   = it->g.data + it->my_row * it->g.cols;
        int64_t n     = it->my_rows * it->g.cols;
        bool    first = true;
        for (int r = 0; r < p; r++)
            for (int l = 0; l < x->leaves[r]; l++, first = false) {
                const char *rows = hpmlc_exchange_from(x, r, me) + HPMLC_HEAD + (size_t)l * x->in_size + offset;
                hpmlc_decode(x, it, sum, rows, it->my_rows, !first);
            }
        if (x->d.reduce == HPML_MEAN && x->reach.device) c->link.scale(c->link.user, sum, n, 1, (float)p);
        else if (x->d.reduce == HPML_MEAN) hpmlc_divide(sum, n, HPML_ELEMENT_F32, p);
        if (it->my_rows > 0) {
            if (x->d.in_stripe) x->d.in_stripe(x->d.user, i, it->my_row, it->my_rows, sum);
            if (hpmlc_encode(x, it, to + offset, it->stripe, sum, it->my_rows) != HPML_OK) bad = hpmlc_bad(c, i);
        }
        offset += hpmlc_stripe_size(it, p, me);
    }
    return bad;
}

/* 2. and 5. Everybody with everybody: in round k with the rank k further on. same: all get my own part of `out`. */
HPMLC_FN hpml_status hpmlc_exchange_move(hpml_comm *c, const char *name, const char *out, const size_t *out_at,
                                         bool same, char *in, const size_t *in_at)
{
    int         tag = hpmlc_enter(c, name, (int64_t)in_at[c->size], HPML_ELEMENT_BYTE, -1, NULL, -1);
    hpml_status status = HPML_OK;
    if (tag < 0) return hpml_ctx_status(c->ctx);
    for (int k = 1; k < c->size && status == HPML_OK; k++) {
        int to = (c->rank + k) % c->size, from = (c->rank - k + c->size) % c->size, mine = same ? c->rank : to;
        c->round = k;
        status = hpmlc_round(c, tag, to, out + out_at[mine], out_at[mine + 1] - out_at[mine], from, in + in_at[from],
                             in_at[from + 1] - in_at[from], NULL);
    }
    return hpmlc_leave(c, status);
}

HPMLC_FN hpml_status hpmlc_exchange_packed(hpml_comm *c, hpml_exchange *x)
{
    int     p = c->size, me = c->rank;
    double  start = hpml_comm_now(c);
    int64_t bad = hpmlc_exchange_pack(c, x, false), sum;
    for (int r = 0; r < p; r++) memcpy(x->out + x->out_at[r], &bad, sizeof bad);
    hpmlc_span(c, "pack", start, hpml_comm_now(c), (int64_t)x->out_at[p]);
    hpml_status status = hpmlc_exchange_move(c, "stripes", x->out, x->out_at, false, x->in, x->in_at);
    if (status != HPML_OK) return status;
    bad = 0, sum = hpmlc_exchange_add(c, x);
    for (int r = 0; r < p; r++) hpmlc_exchange_hear(&bad, hpmlc_exchange_from(x, r, me));
    if (!bad) bad = sum;
    memcpy(x->sums + x->sum_at[me], &bad, sizeof bad);
    status = hpmlc_exchange_move(c, "sums", x->sums, x->sum_at, true, x->sums, x->sum_at);
    if (status != HPML_OK) return status;
    bad = 0;
    for (int r = 0; r < p; r++) hpmlc_exchange_hear(&bad, x->sums + x->sum_at[r]);
    hpmlc_exchange_pack(c, x, true);
    x->bad = bad;
    return bad ? HPML_ERR_NONFINITE : HPML_OK;
}

/* What plain tensors have of fused[at] to fused[end]: into it, or back. */
HPMLC_FN void hpmlc_exchange_fuse(hpml_comm *c, hpml_exchange *x, int64_t at, int64_t end, bool back)
{
    double start = hpml_comm_now(c);
    if (!x->fused) return;
    for (int i = 0; i < x->d.count; i++) {
        const hpmlc_item *it = &x->item[i];
        int64_t from = hpmlc_max(at, it->at), to = hpmlc_min(end, it->at + it->g.rows * it->g.cols);
        if (!it->plain || from >= to) continue;
        float *mine = it->g.data + (from - it->at), *fused = x->fused + from;
        memcpy(back ? mine : fused, back ? fused : mine, (size_t)(to - from) * sizeof(float));
    }
    hpmlc_span(c, back ? "unfuse" : "fuse", start, hpml_comm_now(c), (end - at) * (int64_t)sizeof(float));
}

HPMLC_FN hpml_status hpmlc_exchange_part(hpml_comm *c, hpml_exchange *x, int64_t part)
{
    int64_t at = part * x->part, end = hpmlc_min(at + x->part, x->plain);
    hpmlc_about(c, x, true, at, end);
    hpmlc_exchange_fuse(c, x, at, end, false);
    float *data = (x->fused ? x->fused : x->span) + at;
    hpml_status status = hpmlc_reduce_all(c, data, end - at, HPML_ELEMENT_F32, x->d.reduce, x->d.algorithm);
    if (status == HPML_OK) hpmlc_exchange_fuse(c, x, at, end, true);
    hpmlc_about(c, NULL, true, 0, 0);
    return status;
}

HPMLC_FN hpml_status hpmlc_methods_run(hpml_comm *c, hpml_exchange *x);

/* All tensors that are not plain. */
HPMLC_FN hpml_status hpmlc_exchange_others(hpml_comm *c, hpml_exchange *x)
{
    x->bad = 0;
    if (x->packed == 0) return HPML_OK;
    hpmlc_about(c, x, false, 0, 0);
    hpml_status status = x->d.method == HPML_METHOD_CODEC ? hpmlc_exchange_packed(c, x) : hpmlc_methods_run(c, x);
    hpmlc_about(c, NULL, false, 0, 0);
    return status;
}

/* One exchange, on the exchange's communicator or, in the background, on its twin. */
HPMLC_FN hpml_status hpmlc_exchange_on(hpml_comm *c, void *user)
{
    hpml_exchange *x = (hpml_exchange *)user;
    if (hpmlc_failed(c)) return hpml_ctx_status(c->ctx);
    hpml_status status = hpmlc_exchange_others(c, x), plain = HPML_OK;
    if (status != HPML_OK && status != HPML_ERR_NONFINITE) return status;
    for (int64_t k = 0; k * x->part < x->plain && plain == HPML_OK; k++) plain = hpmlc_exchange_part(c, x, k);
    return plain != HPML_OK ? plain : status;
}

/* Waits until more tensors are ready here than it was `told` of, or all, or a quarter of the deadline is over: then it
   shows up with what it has, so that the others' deadlines are for the tensor. False: its owner has left. */
HPMLC_FN bool hpmlc_exchange_news(hpml_comm *c, hpml_exchange *x, int *told)
{
    hpmlc_background *b = x->by;
    double            until = c->timeout < 0 || c->agent ? 1e300 : hpml_now() + c->timeout / 4;
    unsigned          seen  = __atomic_load_n(&b->worker.changes, __ATOMIC_ACQUIRE);
    while (__atomic_load_n(&x->said, __ATOMIC_ACQUIRE) == *told && *told < x->d.count && hpml_now() < until) {
        if (__atomic_load_n(&b->stop, __ATOMIC_ACQUIRE)) return false;
        hpmlc_rest(c, &b->worker, &seen, until);
    }
    *told = __atomic_load_n(&x->said, __ATOMIC_ACQUIRE);
    return true;
}

/* Tensor i is one less, or one more, that its parts wait for; those that wait for none go. */
HPMLC_FN hpml_status hpmlc_exchange_count(hpml_comm *c, hpml_exchange *x, int i, int by)
{
    const hpmlc_item *it = &x->item[i];
    hpml_status       status = HPML_OK;
    int64_t           last = it->plain ? (it->at + it->g.rows * it->g.cols - 1) / x->part : -1;
    for (int64_t k = it->at / x->part; k <= last && status == HPML_OK; k++)
        if ((x->missing[k] += by) == 0) status = hpmlc_exchange_part(c, x, k);
    return status;
}

/* The maximum over all ranks of `late` is 0 where a tensor is ready on all; all see the same, and do the same. */
HPMLC_FN hpml_status hpmlc_exchange_agreed(hpml_comm *c, void *user)
{
    hpml_exchange *x = (hpml_exchange *)user;
    int            n = x->d.count, told = 0, open = n, i;
    double         since = hpml_now();
    hpml_status    status = HPML_OK;
    for (i = 0; i < n; i++) hpmlc_exchange_count(c, x, i, 1);
    while (open > 0 && status == HPML_OK) {
        double start = hpml_comm_now(c);
        int    before = open, late = 0;
        if (!hpmlc_exchange_news(c, x, &told))
            return hpmlc_fail(c, HPML_ERR_STATE, "exchange: left with %d of %d tensors ready", told, n);
        for (i = 0; i < n; i++)
            x->late[i] = __atomic_load_n(&x->ready[i], __ATOMIC_ACQUIRE) ? 0 : c->origin[c->rank] + 1;
        status = hpmlc_reduce_all(c, x->late, n, HPML_ELEMENT_I32, HPML_MAX, HPML_AUTO);
        hpmlc_span(c, "negotiate", start, hpml_comm_now(c), 0);
        for (i = 0; i < n && status == HPML_OK; i++) {
            if (x->late[i]) late = i;
            if (x->late[i] || __atomic_load_n(&x->ready[i], __ATOMIC_RELAXED) == 2) continue;
            __atomic_store_n(&x->ready[i], 2, __ATOMIC_RELAXED);
            open--;
            status = hpmlc_exchange_count(c, x, i, -1);
        }
        if (open < before || c->timeout < 0 || c->agent) since = hpml_now();
        const char *name = x->item[late].g.name;
        if (status == HPML_OK && hpml_now() - since > c->timeout)
            return hpmlc_fail(c, HPML_ERR_TIMEOUT, "waited %g s for tensor %d \"%s\" to get ready on rank %d, "
                              "step %lld", c->timeout, late, name ? name : "", x->late[late] - 1, (long long)c->step);
    }
    if (status != HPML_OK) return status; /* job_wait says so: the last tensor still gives the job */
    status = hpmlc_exchange_others(c, x);
    __atomic_store_n(&x->said, 0, __ATOMIC_RELEASE);
    for (i = 0; i < n; i++) __atomic_store_n(&x->ready[i], 0, __ATOMIC_RELEASE); /* from here on the next run */
    return status;
}

HPML_API hpml_status hpml_exchange_run(hpml_exchange *x) { return x ? hpmlc_exchange_on(x->c, x) : HPML_ERR_ARGUMENT; }

HPML_API hpml_job *hpml_exchange_start(hpml_exchange *x)
{
    return x ? hpml_background(x->c, hpmlc_exchange_on, x) : NULL;
}

HPML_API hpml_job *hpml_exchange_ready(hpml_exchange *x, int tensor)
{
    if (!x || hpmlc_failed(x->c)) return NULL;
    if (!x->by) x->by = hpmlc_background_of(x->c);
    if (!x->by) return NULL;
    if (tensor < 0 || tensor >= x->d.count || __atomic_load_n(&x->ready[tensor], __ATOMIC_ACQUIRE))
        return hpmlc_fail(x->c, HPML_ERR_ARGUMENT, "exchange: tensor %d of %d: no such one, or ready already", tensor,
                          x->d.count), (hpml_job *)NULL;
    __atomic_store_n(&x->ready[tensor], 1, __ATOMIC_RELEASE);
    bool last = __atomic_add_fetch(&x->said, 1, __ATOMIC_ACQ_REL) == x->d.count;
    if (!x->job && (last || x->by->threaded)) x->job = hpml_background(x->c, hpmlc_exchange_agreed, x);
    else if (x->by->threaded) hpmlc_rouse(x->c, x->by->twin, &x->by->worker);
    hpml_job *job = last ? x->job : NULL;
    if (last) x->job = NULL;
    return job;
}

HPML_API float *hpml_exchange_residual(hpml_exchange *x, int tensor, int64_t *count)
{
    if (!x || tensor < 0 || tensor >= x->d.count) return NULL;
    if (count) *count = x->item[tensor].residual ? x->item[tensor].g.rows * x->item[tensor].g.cols * x->d.leaves : 0;
    return x->item[tensor].residual;
}

HPML_API float *hpml_exchange_stripe(hpml_exchange *x, int tensor, int64_t *row, int64_t *rows)
{
    if (!x || tensor < 0 || tensor >= x->d.count) return NULL;
    if (row) *row = x->item[tensor].my_row;
    if (rows) *rows = x->item[tensor].my_rows;
    return x->item[tensor].stripe;
}

/* On a device: the same five steps, hence the same bits, in its memory: packing and adding are its work, moving is the
   link's, beside it. Begun while the backward pass runs, finished before the update, all buckets together.
   Packing waits for one flag of the device, which tells of a NaN; no word about it travels with the messages. */

HPMLC_FN hpml_status hpmlc_linked_begin(hpml_exchange *x)
{
    hpml_comm              *c    = x->c;
    const hpml_device_link *l    = &c->link;
    bool                    mean = x->d.reduce == HPML_MEAN;
    x->bad = x->packed > 0 ? hpmlc_exchange_pack(c, x, false) : 0;
    hpml_status status = l->begin(l->user);
    if (status == HPML_OK && x->packed > 0) status = l->swap(l->user, x->out, x->out_at, false, x->in, x->in_at);
    if (status == HPML_OK && x->span) status = l->allreduce(l->user, x->span, x->plain, mean);
    for (int i = 0; i < x->d.count && !x->span && status == HPML_OK; i++) {
        const hpml_gradient *g = &x->item[i].g;
        if (x->item[i].plain) status = l->allreduce(l->user, g->data, g->rows * g->cols, mean);
    }
    c->counters.bytes += hpml_exchange_bytes(x);
    return status == HPML_OK ? l->end(l->user) : status;
}

/* `check`: the device is waited for on the host anyway, and the link has a deadline, which the device has not. */
HPMLC_FN hpml_status hpmlc_linked_wait(hpml_comm *c, bool check)
{
    hpml_status status = check ? c->link.check(c->link.user) : HPML_OK;
    return status == HPML_OK ? c->link.wait(c->link.user) : status;
}

/* Steps 3 to 5 of some exchanges; only packed ones have any. */
HPMLC_FN hpml_status hpmlc_linked_finish(hpml_comm *c, hpml_exchange **x, int count, bool check)
{
    const hpml_device_link *l = &c->link;
    bool                    packed = false;
    for (int i = 0; i < count; i++) packed = packed || x[i]->packed > 0;
    hpml_status status = hpmlc_linked_wait(c, check || packed);
    if (!packed || status != HPML_OK) return status;
    for (int i = 0; i < count; i++) {
        int64_t sum = x[i]->packed > 0 ? hpmlc_exchange_add(c, x[i]) : 0;
        if (x[i]->bad == 0) x[i]->bad = sum;
    }
    if (hpmlc_failed(c)) return hpml_ctx_status(c->ctx);
    status = l->begin(l->user);
    for (int i = 0; i < count && status == HPML_OK; i++)
        if (x[i]->packed > 0) status = l->swap(l->user, x[i]->sums, x[i]->sum_at, true, x[i]->sums, x[i]->sum_at);
    if (status == HPML_OK) status = l->end(l->user);
    if (status == HPML_OK) status = hpmlc_linked_wait(c, check);
    for (int i = 0; i < count && status == HPML_OK; i++)
        if (x[i]->packed > 0) hpmlc_exchange_pack(c, x[i], true);
    return status;
}

// ---------------------------------------------------------------------------------------------------------------------
// >>methods   top-k and low rank
// ---------------------------------------------------------------------------------------------------------------------

/* Top-k with momentum correction and factor masking: u <- m u + g, v <- v + u; the k largest |v| are sent, and there
   u = v = 0. Everybody gathers the pairs of all and adds them in the order of the ranks.

   Low rank: M = g + e (rows, cols) is sent as P Q^T with P (rows, r), Q (cols, r): from the last Q one step of power
   iteration,
       P <- mean of M Q, made orthonormal;  Q <- mean of M^T P;  result P Q^T;  e <- M - P Q^T.
   Both P and Q are added up as they are: any allreduce will do. With SUM the result is multiplied by p. */

HPMLC_FN int64_t hpmlc_topk_count(const hpml_exchange *x, const hpmlc_item *it)
{
    return hpmlc_max(1, (int64_t)((double)(it->g.rows * it->g.cols) * (double)(x->d.ratio > 0 ? x->d.ratio : 0.01f)));
}

HPMLC_FN int64_t hpmlc_lowrank_of(const hpml_exchange *x, const hpmlc_item *it)
{
    return hpmlc_min(x->d.lowrank > 0 ? x->d.lowrank : 2, hpmlc_min(it->g.rows, it->g.cols));
}

HPMLC_FN bool hpmlc_methods_create(hpml_exchange *x, hpmlc_item *it)
{
    int64_t n = it->g.rows * it->g.cols, least = x->d.codec.min_elements, k = hpmlc_topk_count(x, it);
    int64_t r = hpmlc_lowrank_of(x, it), p = x->c->size;
    bool    top = x->d.method == HPML_METHOD_TOPK;
    if (least <= 0) least = HPML_CODEC_MIN_ELEMENTS;
    it->plain = (it->g.rows == 1 || it->g.cols == 1 || n < least) && !x->d.codec.compress_all;
    if (!top && (it->g.rows + it->g.cols) * r >= n) it->plain = true; /* nothing to be saved */
    if (it->plain) return true;
    int64_t first = top ? n : it->g.rows * r, second = top ? 2 * k * p : it->g.cols * r;
    it->residual = (float *)hpmlc_exchange_alloc(x, (size_t)(2 * n + first + second) * sizeof(float));
    if (!it->residual) return false;
    it->work = it->residual + n, it->p = it->work + n, it->q = it->p + first;
    x->bytes += top ? 8 * k * (p - 1) : 0;
    hpml_rng rng;
    rng.seed = 1, rng.stream = (uint64_t)(it - x->item), rng.counter = 0; /* the same on all ranks */
    if (!top) hpml_rng_fill_normal(&rng, it->q, it->g.cols * r);
    return true;
}

/* The k-th largest of x, which is reordered (Hoare's selection). */
HPMLC_FN float hpmlc_select(float *x, int64_t n, int64_t k)
{
    int64_t low = 0, high = n - 1;
    while (low < high) {
        float   pivot = x[low + (high - low) / 2], t;
        int64_t i = low, j = high;
        while (i <= j) {
            while (x[i] > pivot) i++;
            while (x[j] < pivot) j--;
            if (i > j) break;
            t = x[i], x[i] = x[j], x[j] = t;
            i++, j--;
        }
        if (k - 1 <= j) high = j;
        else if (k - 1 >= i) low = i;
        else break;
    }
    return x[k - 1];
}

/* My k pairs (place, value), none where a number is not finite, to their place among all; these added up. */
HPMLC_FN hpml_status hpmlc_topk(hpml_comm *c, hpml_exchange *x, hpmlc_item *it, bool finite)
{
    int64_t k = hpmlc_topk_count(x, it), n = it->g.rows * it->g.cols, sent = 0;
    float  *pairs = it->q + 2 * k * c->rank, *u = it->p, *v = it->residual;
    memset(pairs, 0, (size_t)(2 * k) * sizeof *pairs);
    for (int64_t i = 0; i < n && finite; i++) {
        u[i] = x->d.momentum * u[i] + it->g.data[i];
        v[i] += u[i];
        it->work[i] = fabsf(v[i]);
    }
    const float least = finite ? hpmlc_select(it->work, n, k) : 0;
    for (int pass = 0; pass < 2; pass++) /* those above the k-th, then those equal to it, from the first on */
        for (int64_t i = 0; i < n && sent < k && finite; i++) {
            if (pass == 0 ? !(fabsf(v[i]) > least) : !(fabsf(v[i]) == least && v[i] != 0)) continue;
            uint32_t place = (uint32_t)i;
            memcpy(&pairs[2 * sent], &place, sizeof place);
            pairs[2 * sent + 1] = v[i];
            u[i] = v[i] = 0;
            sent++;
        }
    hpml_status status = hpml_allgather(c, it->q, 8 * k * c->size, HPML_ELEMENT_BYTE);
    memset(it->g.data, 0, (size_t)n * sizeof(float));
    for (int64_t i = 0; i < k * c->size; i++) {
        uint32_t place;
        memcpy(&place, &it->q[2 * i], sizeof place);
        if ((int64_t)place < n) it->g.data[place] += it->q[2 * i + 1];
    }
    if (x->d.reduce == HPML_MEAN) hpmlc_divide(it->g.data, n, HPML_ELEMENT_F32, c->size);
    return status;
}

/* Columns of (n, r) made orthonormal one after another (Gram & Schmidt, twice is enough). What is zero gets a direction
   as well: a gradient of zeros would else leave Q at zero for ever. */
HPMLC_FN void hpmlc_orthonormal(float *a, int64_t n, int r)
{
    for (int j = 0; j < r; j++)
        for (int pass = 0; pass < 2; pass++) {
            double norm = 0;
            for (int k = 0; k < j; k++) {
                double dot = 0;
                for (int64_t i = 0; i < n; i++) dot += (double)a[i * r + j] * (double)a[i * r + k];
                for (int64_t i = 0; i < n; i++) a[i * r + j] -= (float)dot * a[i * r + k];
            }
            for (int64_t i = 0; i < n; i++) norm += (double)a[i * r + j] * (double)a[i * r + j];
            bool some = norm > 1e-30;
            norm = some ? 1 / sqrt(norm) : 0;
            for (int64_t i = 0; i < n; i++) a[i * r + j] *= (float)norm;
            if (!some && pass == 0) a[j * r + j] = 1;
        }
}

HPMLC_FN hpml_status hpmlc_lowrank(hpml_comm *c, hpml_exchange *x, hpmlc_item *it, bool finite)
{
    const hpml_algorithm a = x->d.algorithm;
    int64_t              rows = it->g.rows, cols = it->g.cols, n = rows * cols, r = hpmlc_lowrank_of(x, it);
    float               *M = it->work;
    for (int64_t i = 0; i < n; i++) M[i] = (finite ? it->g.data[i] : 0) + it->residual[i];
    hpml_sgemm(c->ctx, false, false, rows, r, cols, 1, M, cols, it->q, r, 0, it->p, r);
    hpml_status status = hpmlc_reduce_all(c, it->p, rows * r, HPML_ELEMENT_F32, HPML_MEAN, a);
    if (status != HPML_OK) return status;
    hpmlc_orthonormal(it->p, rows, (int)r);
    hpml_sgemm(c->ctx, true, false, cols, r, rows, 1, M, cols, it->p, r, 0, it->q, r);
    status = hpmlc_reduce_all(c, it->q, cols * r, HPML_ELEMENT_F32, HPML_MEAN, a);
    if (status != HPML_OK) return status;
    hpml_sgemm(c->ctx, false, true, rows, cols, r, 1, it->p, r, it->q, r, 0, it->g.data, cols);
    for (int64_t i = 0; i < n; i++) it->residual[i] = M[i] - it->g.data[i];
    for (int64_t i = 0; i < n && x->d.reduce == HPML_SUM; i++) it->g.data[i] *= (float)c->size;
    return HPML_OK;
}

/* Tensor by tensor; in the end all hear of one of any rank that was not finite. */
HPMLC_FN hpml_status hpmlc_methods_run(hpml_comm *c, hpml_exchange *x)
{
    hpml_status status = HPML_OK;
    for (int t = 0; t < x->d.count && status == HPML_OK; t++) {
        hpmlc_item *it = &x->item[t];
        float       bad = 0;
        if (it->plain) continue;
        for (int64_t i = 0; i < it->g.rows * it->g.cols; i++) bad += it->g.data[i] - it->g.data[i];
        if (bad != 0) x->bad = hpmlc_bad(c, t);
        status = (x->d.method == HPML_METHOD_TOPK ? hpmlc_topk : hpmlc_lowrank)(c, x, it, bad == 0);
    }
    if (status == HPML_OK) status = hpmlc_reduce_all(c, &x->bad, 1, HPML_ELEMENT_I64, HPML_MAX, HPML_AUTO);
    return status == HPML_OK && x->bad ? HPML_ERR_NONFINITE : status;
}

HPML_API int64_t hpml_exchange_bytes(const hpml_exchange *x)
{
    if (!x || x->c->size == 1) return 0;
    const hpml_algorithm a = x->d.algorithm;
    int64_t              bytes = x->bytes;
    for (int64_t at = 0; at < x->plain; at += x->part)
        bytes += hpmlc_allreduce_bytes(x->c, hpmlc_min(x->part, x->plain - at), sizeof(float), a);
    if (x->d.method == HPML_METHOD_CODEC || x->packed == 0) return bytes;
    bytes += hpmlc_allreduce_bytes(x->c, 1, sizeof x->bad, HPML_AUTO); /* whether all was finite */
    for (const hpmlc_item *it = x->item; it < x->item + x->d.count; it++) {
        int64_t r = hpmlc_lowrank_of(x, it);
        if (it->plain || x->d.method != HPML_METHOD_LOWRANK) continue;
        bytes += hpmlc_allreduce_bytes(x->c, it->g.rows * r, sizeof(float), a);
        bytes += hpmlc_allreduce_bytes(x->c, it->g.cols * r, sizeof(float), a);
    }
    return bytes;
}

// ---------------------------------------------------------------------------------------------------------------------
// >>distribute   synchronous data parallelism: buckets, overlap
// ---------------------------------------------------------------------------------------------------------------------

/* The trainer's hooks: `run` scales this rank's gradient by its share of the global batch; `grad` counts a bucket's
   tensors and starts its exchange in the background when the last one is final, buckets in order, from the last layer
   to the first; `update` waits for what is still under way and makes the step. Samples, loss and the running statistics
   of batchnorm travel in one small sum behind the last bucket. */

typedef struct hpmlc_bucket {
    hpml_exchange *x, *warm; /* warm: uncompressed, for the first steps */
    hpml_exchange *now;      /* the one that has begun */
    hpml_job      *job;      /* NULL: done at once, with this: */
    hpml_status    status;
    int            count, ready;
    int64_t        at, floats; /* its part of the trainer's gradients, last ones first: they lie side by side */
    const hpml_device_link *link; /* that ends at the node: */
    int64_t       *cut;      /* (its ranks + 1) everybody's shares of `floats`, */
    float         *share;    /* mine on the host, */
    int64_t        share_at, share_floats;
    int            divide;   /* it by so many: the mean of the node */
} hpmlc_bucket;

enum { HPMLC_SAMPLES, HPMLC_LOSS, HPMLC_BAD, HPMLC_BAD_RANK, HPMLC_STATS }; /* then the buffers */

struct hpml_distributed {
    hpml_trainer        *t;
    hpml_comm           *c;
    hpml_ctx            *ctx;
    hpml_distribute_desc d;
    hpml_progress        progress;  /* of the caller, while a checkpoint is written */
    int                  params;
    int                 *bucket_of; /* (params) -1: not trained */
    int                 *by_name;   /* (params) their numbers in the order of their names, as checkpoints have them */
    hpmlc_bucket        *bucket;    /* (buckets) */
    int                  buckets, posted; /* posted: buckets whose exchange has begun in this step */
    int32_t              accumulate, micro;
    double              *stats;     /* (HPMLC_STATS + buffer_total), f64 sums */
    int64_t              buffer_total, grad_total, batch; /* batch: the model's */
    hpml_job            *stats_job;
    hpml_status          stats_status;
    bool                 direct;   /* no thread in the background: each exchange is over when it has begun */
    bool                 pair;     /* two ranks: the optimizer adds up as it goes, see hpmlc_dist_pair: */
    double               since;    /* when the wait for the other began, */
    float                scale;    /* what the sum is multiplied by, */
    hpml_status          stepped;  /* and what the optimizer said */
    double               samples, loss_sum; /* of this rank, this step */
    hpmlc_reach          reach;     /* where the trainer's arrays live: on the host, or on a device: */
    const hpml_device_link *link;   /* then this moves the gradients, */
    float               *mirror;    /* or, without one, that is their place on the host, laid out like them */
    hpml_exchange      **ended;     /* (buckets) link: those of this step */
    bool                 looks, clips; /* link: the trainer looks at gradients before it uses them; or clips them */
    float               *first;     /* the trainer's gradients: where the first one is, */
    int64_t              span;      /* and the floats from there to the end of the last, padded */
    float               *shadow;    /* delayed: and those under way, laid out like them */
    bool                 under_way; /* delayed: false before the first step */
    double               full;      /* delayed: samples of a whole step when they were computed */
    float               *before;    /* (buffer_total) delayed, exact: running statistics that the step began with, */
    float               *now;       /* (buffer_total) and scratch for those of now */
    float               *leaf;      /* exact: (leaves, leaf_total) */
    int64_t             *sum;       /* exact: (leaf_total) */
    float               *largest;   /* exact: (tensors) */
    int64_t              leaf_total, leaf_first, leaf_count, leaf_all; /* not exact: each rank is one leaf */
    hpml_distribute_report r;       /* sums since the reset */
    double               began;     /* the reset: its time, */
    hpml_counters        at_reset;  /* and what had been sent by then */
    hpml_step_row       *row;       /* (history) ring of the last steps */
    int64_t              rows;      /* steps noted */
    hpml_distribute_report row_r;   /* as it was when the last one was noted, */
    double               row_time;  /* and when that was, */
    hpml_counters        row_sent;  /* and what had been sent */
    bool                 trial;     /* a search: what diverges is no error, nothing is delayed */
    double               trial_loss, trial_samples;
};

HPMLC_FN hpml_tensor *hpmlc_param(const hpml_distributed *d, int i) { return hpml_param_at(d->ctx, i); }

/* Gradients from the device to their place in the mirror; hpmlc_dist_update puts them back. */
HPMLC_FN void hpmlc_fetch(hpml_distributed *d, int64_t at, int64_t n)
{
    if (!d->mirror || n == 0) return;
    d->reach.device->read(d->reach.at, d->mirror + at, d->first + at, (size_t)n * sizeof(float));
}

/* Where the host finds, and leaves, the gradients. */
HPMLC_FN float *hpmlc_grads(const hpml_distributed *d) { return d->mirror ? d->mirror : d->first; }

HPMLC_FN void hpmlc_gradient_of(hpml_tensor *p, float *data, hpml_gradient *g)
{
    g->name = p->name, g->data = data;
    g->rows = p->ndim > 1 ? p->shape[0] : 1;
    g->cols = hpml_tensor_count(p) / g->rows;
}

HPMLC_FN void hpmlc_exchange_settings(const hpml_distributed *d, bool warm, hpml_exchange_desc *e)
{
    memset(e, 0, sizeof *e);
    e->algorithm = d->d.algorithm, e->reduce = d->d.sum ? HPML_SUM : HPML_MEAN, e->padded = true;
    e->linked = d->link != NULL;
    if (warm) return;
    e->codec = d->d.codec, e->method = d->d.method;
    e->ratio = d->d.ratio, e->momentum = d->d.momentum, e->lowrank = d->d.lowrank;
}

HPMLC_FN hpml_status hpmlc_shares_meet(hpml_comm *c, void *user)
{
    hpmlc_bucket *b = (hpmlc_bucket *)user;
    hpml_status   status = b->link->landed(b->link->user, b->share);
    if (status != HPML_OK) return hpmlc_fail(c, status, "what this node's devices have added up has not come");
    hpmlc_divide_f32(b->share, b->share_floats, (float)b->divide);
    status = hpmlc_exchange_on(c, b->now);
    return status == HPML_ERR_NONFINITE ? HPML_OK : status; /* b->now->bad says it to all */
}

/* A link that ends at the node: its ranks take shares of the bucket, whole rows where a codec packs them. Devices add
   them up, a job on the host exchanges mine with those of the same place on other nodes, devices share the result. */
HPMLC_FN bool hpmlc_shares_create(hpml_distributed *d, hpmlc_bucket *b, const hpml_gradient *g)
{
    int p = d->c->size / d->link->across->size, me = 0;
    for (int r = 0; r < d->c->rank; r++) me += d->c->node[r] == d->c->node[d->c->rank];
    b->link = d->link, b->divide = d->d.sum ? 1 : p;
    b->cut  = (int64_t *)hpml_ctx_alloc(d->ctx, sizeof *b->cut * (size_t)(p + 1), NULL);
    if (!b->cut) return false;
    for (int r = 1; r <= p; r++) {
        b->cut[r] = hpml_block(b->floats, p, r);
        for (int i = 0; i < b->count && d->d.codec.kind != HPML_CODEC_NONE; i++) {
            int64_t into = b->cut[r] - (g[i].data - d->first - b->at);
            if (into > 0 && into < g[i].rows * g[i].cols) b->cut[r] -= into % g[i].cols;
        }
    }
    b->share_at = b->cut[me], b->share_floats = b->cut[me + 1] - b->share_at;
    b->share = b->link->stage(b->link->user, b->share_floats + 1); /* never none */
    return b->share != NULL;
}

/* Tensors g, or what is of them in my share. */
HPMLC_FN hpml_exchange *hpmlc_bucket_exchange(hpml_distributed *d, hpmlc_bucket *b, const hpml_gradient *g, bool warm)
{
    hpml_exchange_desc e;
    hpmlc_exchange_settings(d, warm, &e);
    e.count = b->count, e.tensors = g;
    if (!b->cut) return hpml_exchange_create(d->c, &e);
    hpml_gradient *part = (hpml_gradient *)hpml_ctx_alloc(d->ctx, sizeof *part * (size_t)(b->count + 1), NULL);
    if (!part) return NULL;
    e.padded = e.linked = false, e.share = true, e.tensors = part, e.count = 0;
    for (int i = 0; i < b->count && d->d.codec.kind != HPML_CODEC_NONE; i++) {
        int64_t first = g[i].data - d->first - b->at - b->share_at, at = hpmlc_max(first, 0);
        int64_t end = hpmlc_min(first + g[i].rows * g[i].cols, b->share_floats);
        if (at >= end) continue;
        part[e.count] = g[i], part[e.count].data = b->share + at;
        part[e.count++].rows = (end - at) / g[i].cols;
    }
    if (e.count == 0) part->data = b->share, part->rows = e.count = 1, part->cols = b->share_floats + 1;
    hpml_exchange *x = hpml_exchange_create(b->link->across, &e);
    hpml_ctx_release(d->ctx, part);
    return x;
}

HPMLC_FN hpml_status hpmlc_shares_begin(hpml_distributed *d, hpmlc_bucket *b)
{
    hpml_comm  *across = b->link->across;
    hpml_status status = b->link->share(b->link->user, d->first + b->at, b->cut, b->share, false);
    d->c->counters.bytes += 4 * (b->floats + (d->c->size / across->size - 2) * b->share_floats);
    if (status != HPML_OK || d->direct) return status;
    b->job = hpml_background(across, hpmlc_shares_meet, b);
    return hpml_ctx_status(d->ctx);
}

HPMLC_FN hpml_status hpmlc_shares_finish(hpml_distributed *d)
{
    const hpml_device_link *l = d->link;
    hpml_counters  sent;
    hpml_status    status = HPML_OK;
    for (int i = 0; i < d->buckets && status == HPML_OK; i++) {
        hpmlc_bucket *b = &d->bucket[i];
        if (d->direct) status = hpmlc_shares_meet(l->across, b);
        if (status == HPML_OK) status = l->share(l->user, d->first + b->at, b->cut, b->share, true);
    }
    hpml_comm_counters(l->across, &sent);
    hpml_comm_counters_reset(l->across);
    hpmlc_counters_add(&d->c->counters, &sent);
    return status == HPML_OK ? hpmlc_linked_wait(d->c, d->looks) : status;
}

/* A thread in the background pays where there is something to wait for, a network, or a core to spare; else it takes
   from the computation what it gains, and its waking up is added. Any rank's need decides for all. */
HPMLC_FN bool hpmlc_background_pays(hpml_comm *c)
{
    int32_t near = 0, pays = c->agent != NULL;
    for (int i = 0; i < c->size; i++) near += c->node[i] == c->node[c->rank];
    if (c->mpi) pays = near < c->size;
#ifndef HPML_NO_THREADS
    const hpml_network *w = c->room ? &c->room->world->network : NULL;
    if (w && w->inside.latency + w->inside.bandwidth + w->between.latency + w->between.bandwidth > 0) pays = 1;
    if (w) near = c->size;
#endif
    if (near * hpml_ctx_threads(c->ctx) < hpmlc_cores(1)) pays = 1;
    hpmlc_reduce_all(c, &pays, 1, HPML_ELEMENT_I32, HPML_MAX, HPML_AUTO);
    return pays != 0;
}

/* In f16 without a fixed loss scale gradients overflow now and then. */
HPMLC_FN bool hpmlc_overflows(hpml_trainer *t, hpml_ctx *ctx)
{
    const hpml_backend *b = hpml_ctx_backend(ctx);
    bool                f16 = b->activation_dtype && b->activation_dtype(hpml_ctx_device(ctx)) == HPML_DTYPE_F16;
    return f16 && hpml_trainer_settings(t)->loss_scale == 0;
}

/* Nothing is packed, nobody chose an algorithm, and no norm of the sum is wanted before the step. */
HPMLC_FN bool hpmlc_pair_fits(const hpml_distributed *d)
{
    const hpml_trainer_desc    *t = hpml_trainer_settings(d->t);
    const hpml_distribute_desc *s = &d->d;
    bool plain = s->codec.kind == HPML_CODEC_NONE && !s->codec.custom && s->method == HPML_METHOD_CODEC;
    bool norm  = t->clip_norm > 0 || t->optimizer == HPML_OPT_LARS || t->optimizer == HPML_OPT_LAMB ||
                 hpmlc_overflows(d->t, d->ctx);
    return d->direct && d->c->size == 2 && d->c->room && plain && s->algorithm == HPML_AUTO && !s->delayed && !norm &&
           hpml_ctx_backend(d->ctx) == hpml_backend_cpu();
}

/* Cuts the trained parameters, last first, into buckets of at least bucket_bytes. */
HPMLC_FN bool hpmlc_buckets_create(hpml_distributed *d)
{
    d->direct = !hpmlc_background_pays(d->c);
    d->pair   = hpmlc_pair_fits(d);
    if (!d->link) d->d.no_overlap |= d->direct; /* a link needs no thread */
    hpml_gradient *g = (hpml_gradient *)hpml_ctx_alloc(d->ctx, sizeof *g * (size_t)d->params, NULL);
    d->bucket = (hpmlc_bucket *)hpml_ctx_alloc(d->ctx, sizeof *d->bucket * (size_t)d->params, NULL);
    d->ended  = (hpml_exchange **)hpml_ctx_alloc(d->ctx, sizeof *d->ended * (size_t)d->params, NULL);
    if (!g || !d->bucket || !d->ended) return false;
    int64_t at = d->span, end = at, bytes = 0, limit = (int64_t)1 << 18;
    if (d->d.bucket_bytes > 0) limit = d->d.bucket_bytes;
    else if (d->link) limit = (int64_t)8 << 20;
    else if (d->direct) limit = INT64_MAX;
    int     count = 0;
    for (int i = d->params - 1; i >= -1; i--) {
        hpml_tensor *p = i >= 0 ? hpmlc_param(d, i) : NULL;
        if (count > 0 && (i < 0 || bytes >= limit)) {
            hpmlc_bucket *b = &d->bucket[d->buckets++];
            b->count = count, b->at = at, b->floats = end - at, end = at;
            if (d->link && d->link->across && !hpmlc_shares_create(d, b, g)) return false;
            b->x = hpmlc_bucket_exchange(d, b, g, false);
            if (b->x && d->d.warm_steps > 0) b->warm = hpmlc_bucket_exchange(d, b, g, true);
            if (!b->x || (d->d.warm_steps > 0 && !b->warm)) return false;
            b->x->bucket = d->buckets;
            if (b->warm) b->warm->bucket = d->buckets;
            count = 0, bytes = 0;
        }
        if (i < 0) break;
        d->bucket_of[i] = -1;
        if (!p->grad) continue;
        d->bucket_of[i] = d->buckets;
        at = p->grad - d->first;
        hpmlc_gradient_of(p, (d->shadow ? d->shadow : hpmlc_grads(d)) + at, &g[count]);
        bytes += 4 * hpml_tensor_count(p);
        count++;
    }
    hpml_ctx_release(d->ctx, g);
    return true;
}

/* Starts every bucket that is ready and whose turn it is. */
HPMLC_FN hpml_status hpmlc_buckets_post(hpml_distributed *d)
{
    bool warm = hpml_trainer_step_count(d->t) < d->d.warm_steps;
    while (d->posted < d->buckets && d->bucket[d->posted].ready == d->bucket[d->posted].count) {
        hpmlc_bucket  *b = &d->bucket[d->posted++];
        hpml_exchange *x = warm ? b->warm : b->x;
        if (!d->d.delayed) hpmlc_fetch(d, b->at, b->floats);
        b->now = x;
        if (b->cut) b->status = hpmlc_shares_begin(d, b);
        else if (d->link) b->status = hpmlc_linked_begin(x);
        else if (d->direct) b->status = hpml_exchange_run(x);
        else if (!(b->job = hpml_exchange_start(x))) return hpml_ctx_status(d->ctx);
    }
    return HPML_OK;
}

HPMLC_FN hpml_status hpmlc_dist_grad(void *user, hpml_trainer *t HPMLC_UNUSED, int param)
{
    hpml_distributed *d = (hpml_distributed *)user;
    if (d->bucket_of[param] < 0) return HPML_OK;
    d->bucket[d->bucket_of[param]].ready++;
    return d->d.no_overlap || d->d.delayed ? HPML_OK : hpmlc_buckets_post(d);
}

// ---------------------------------------------------------------------------------------------------------------------
// >>distribute-step   buffers, weights, double buffering
// ---------------------------------------------------------------------------------------------------------------------

/* Running statistics, side by side and by name: copied to `row`, or from there back to their places. */
HPMLC_FN void hpmlc_buffers_copy(hpml_distributed *d, float *row, bool back)
{
    for (int i = 0; i < d->params; i++) {
        hpml_tensor *p = hpmlc_param(d, d->by_name[i]);
        int64_t      n = p->param->buffer ? hpml_tensor_count(p) : 0;
        float       *x = back && d->reach.device ? d->reach.window : hpmlc_open(&d->reach, p->data, n);
        memcpy(back ? x : row, back ? row : x, (size_t)n * sizeof(float));
        if (back) hpmlc_close(&d->reach, p->data, n);
        row += n;
    }
}

/* Running statistics are again what the step began with, and `before` how far it moved them. */
HPMLC_FN void hpmlc_buffers_back(hpml_distributed *d)
{
    hpmlc_buffers_copy(d, d->now, false);
    hpmlc_buffers_copy(d, d->before, true);
    for (int64_t k = 0; k < d->buffer_total; k++) d->before[k] = d->now[k] - d->before[k];
}

/* Nothing was left to compute since `start`. */
HPMLC_FN void hpmlc_dist_waited(hpml_distributed *d, double start)
{
    double end = hpml_comm_now(d->c);
    hpml_trace_span(d->ctx, HPML_LANE_COMPUTE, "wait", start, end);
    d->r.exposed_s += end - start;
}

/* Statistics of the global batch. The others compute as long as this one does: the time is the network's. */
HPMLC_FN hpml_status hpmlc_dist_sum(void *user, hpml_trainer *t HPMLC_UNUSED, double *values, int64_t n)
{
    hpml_distributed *d     = (hpml_distributed *)user;
    double            start = hpml_comm_now(d->c);
    hpml_status status = hpmlc_reduce_all(d->c, values, n, HPML_ELEMENT_F64, HPML_SUM, HPML_AUTO);
    start = hpml_comm_now(d->c) - start;
    d->r.exposed_s += start, d->r.compute_s -= start;
    return status;
}

/* Samples, loss, buffers (delayed: their moves): into the sum of all ranks. */
HPMLC_FN void hpmlc_stats_fill(hpml_distributed *d)
{
    double      *s = d->stats;
    const float *x = d->d.delayed ? d->before : d->now;
    bool         bad = !(d->loss_sum - d->loss_sum == 0);
    s[HPMLC_SAMPLES]  = d->samples;
    s[HPMLC_LOSS]     = bad ? 0 : d->loss_sum;
    s[HPMLC_BAD]      = bad;
    s[HPMLC_BAD_RANK] = bad ? d->c->rank : 0;
    if (!d->d.delayed) hpmlc_buffers_copy(d, d->now, false);
    for (int64_t k = 0; k < d->buffer_total; k++) s[HPMLC_STATS + k] = d->samples * (double)x[k];
}

HPMLC_FN hpml_status hpmlc_stats_sum(hpml_comm *c, void *user)
{
    hpml_distributed *d = (hpml_distributed *)user;
    c->about.first = d->buffer_total > 0 ? "loss, samples, running statistics" : "loss, samples";
    hpml_status status = hpmlc_reduce_all(c, d->stats, HPMLC_STATS + d->buffer_total, HPML_ELEMENT_F64, HPML_SUM,
                                          HPML_AUTO);
    c->about.first = NULL;
    return status;
}

HPMLC_FN hpml_status hpmlc_stats_post(hpml_distributed *d)
{
    hpmlc_stats_fill(d);
    if (d->direct) return d->stats_status = hpmlc_stats_sum(d->c, d);
    d->stats_job = hpml_background(d->c, hpmlc_stats_sum, d);
    return d->stats_job ? HPML_OK : hpml_ctx_status(d->ctx);
}

/* What the others said: a NaN somewhere, the mean loss, */
HPMLC_FN hpml_status hpmlc_stats_read(hpml_distributed *d)
{
    const double *s = d->stats;
    if (s[HPMLC_BAD] > 0 && d->trial) return HPML_ERR_NONFINITE;
    if (s[HPMLC_BAD] > 0)
        return hpml_ctx_fail(d->ctx, HPML_ERR_PEER, "rank %d, step %lld: the loss is not finite on %s %.0f", d->c->rank,
                             (long long)hpml_trainer_step_count(d->t) + 1, s[HPMLC_BAD] > 1 ? "so many ranks:" : "rank",
                             s[HPMLC_BAD] > 1 ? s[HPMLC_BAD] : s[HPMLC_BAD_RANK]);
    if (s[HPMLC_SAMPLES] <= 0) return hpml_ctx_fail(d->ctx, HPML_ERR_STATE, "a step without samples on any rank");
    d->r.loss    = s[HPMLC_LOSS] / s[HPMLC_SAMPLES];
    d->r.samples = (int64_t)s[HPMLC_SAMPLES];
    return HPML_OK;
}

/* and the mean of the running statistics. */
HPMLC_FN void hpmlc_buffers_read(hpml_distributed *d)
{
    if (d->d.delayed) hpmlc_buffers_copy(d, d->now, false);
    for (int64_t k = 0; k < d->buffer_total; k++) {
        float mean = (float)(d->stats[HPMLC_STATS + k] / d->stats[HPMLC_SAMPLES]);
        d->now[k]  = d->d.delayed ? d->now[k] + mean : mean;
    }
    hpmlc_buffers_copy(d, d->now, true);
}

HPMLC_FN hpml_status hpmlc_dist_post(hpml_distributed *d)
{
    double      start  = hpml_comm_now(d->c);
    hpml_status status = d->pair ? HPML_OK : hpmlc_buckets_post(d);
    if (status == HPML_OK) status = hpmlc_stats_post(d);
    if (d->direct) hpmlc_dist_waited(d, start);
    return status;
}

HPMLC_FN hpml_status hpmlc_dist_run(void *user, hpml_trainer *t, int64_t samples, float *loss)
{
    hpml_distributed *d     = (hpml_distributed *)user;
    double            start = hpml_comm_now(d->c), share = (double)samples * d->c->size / (double)d->d.global_batch;
    float             scale = (float)((d->d.sum ? 1 : share) / d->accumulate);
    hpml_status       status = HPML_OK;
    bool              last = d->micro + 1 == d->accumulate;
    d->c->step = hpml_trainer_step_count(t) + 1;
    /* What the last step left under way: behind it stands the loss that the host will wait for without a deadline. The
       device does its update meanwhile. */
    if (d->link && d->link->check(d->link->user) != HPML_OK) return hpmlc_failed(d->c), hpml_ctx_status(d->ctx);
    if (d->micro == 0) {
        d->samples = d->loss_sum = 0, d->posted = 0;
        for (int i = 0; i < d->buckets; i++) d->bucket[i].ready = 0;
        if (d->d.delayed) hpmlc_buffers_copy(d, d->before, false);
    }
    *loss = 0;
    status = hpml_trainer_run_local(t, 0, samples, scale, d->micro > 0, loss);
    d->samples += (double)samples;
    d->loss_sum += (double)*loss * (double)samples;
    if (d->trial) *loss = 0; /* the trainer need not look for a NaN */
    d->r.compute_s += hpml_comm_now(d->c) - start;
    d->micro++;
    if (status != HPML_OK) return hpmlc_failed(d->c), status;
    return last && !d->d.delayed ? hpmlc_dist_post(d) : HPML_OK;
}

/* Waits for all buckets and the sum behind them; what has been waited for is not waited for again. */
HPMLC_FN hpml_status hpmlc_dist_jobs(hpml_distributed *d)
{
    hpml_status status = HPML_OK;
    for (int i = 0; i < d->buckets; i++) {
        hpml_status s = d->bucket[i].job ? hpml_job_wait(d->bucket[i].job) : d->bucket[i].status;
        d->bucket[i].job = NULL, d->bucket[i].status = HPML_OK;
        if (s != HPML_OK && status == HPML_OK) status = s;
    }
    hpml_status s = d->stats_job ? hpml_job_wait(d->stats_job) : d->stats_status;
    d->stats_job  = NULL, d->stats_status = HPML_OK;
    return s != HPML_OK ? s : status;
}

/* hpml_exchange.bad of the first bucket that has one, with the number of the parameter instead of the tensor's. */
HPMLC_FN int64_t hpmlc_dist_bad(const hpml_distributed *d)
{
    for (int b = 0; b < d->buckets; b++) {
        const hpml_exchange *x = d->bucket[b].now;
        for (int i = 0; x && x->bad && i < d->params; i++)
            if (hpmlc_param(d, i)->name == x->item[x->bad >> 20].g.name) return x->bad % (1 << 20) + ((int64_t)i << 20);
    }
    return 0;
}

/* bad: on all ranks the same; of a rank that is not known with 0 in the rank's place. */
HPMLC_FN hpml_status hpmlc_dist_blame(hpml_distributed *d, hpml_status status, int64_t bad)
{
    int  rank = (int)(bad % (1 << 20)) - 1;
    char whose[24] = "some rank";
    if (status != HPML_ERR_NONFINITE || d->trial) return status;
    if (rank >= 0) snprintf(whose, sizeof whose, "rank %d", rank);
    return hpml_ctx_fail(d->ctx, status, "rank %d, step %lld: the gradient of \"%s\" is NaN or infinite on %s; lower "
                         "the learning rate or set clip_norm", d->c->rank, (long long)d->c->step,
                         hpmlc_param(d, (int)(bad >> 20))->name, whose);
}

/* What is left to do when gradients move by a link. */
HPMLC_FN hpml_status hpmlc_dist_linked(hpml_distributed *d)
{
    double      start = hpml_comm_now(d->c);
    hpml_status status;
    for (int i = 0; i < d->buckets; i++) d->ended[i] = d->bucket[i].now;
    status = d->link->across ? hpmlc_shares_finish(d) : hpmlc_linked_finish(d->c, d->ended, d->buckets, d->looks);
    int64_t bad = hpmlc_dist_bad(d);
    if (status == HPML_OK && d->d.codec.kind != HPML_CODEC_NONE)
        status = hpmlc_reduce_all(d->c, &bad, 1, HPML_ELEMENT_I64, HPML_MAX, HPML_AUTO);
    hpmlc_dist_waited(d, start);
    return hpmlc_dist_blame(d, status == HPML_OK && bad ? HPML_ERR_NONFINITE : status, bad);
}

HPMLC_FN hpml_status hpmlc_dist_settle(hpml_distributed *d)
{
    double      start = hpml_comm_now(d->c);
    hpml_status status = hpmlc_dist_jobs(d), s = HPML_OK;
    hpmlc_dist_waited(d, start);
    if (hpml_ctx_status(d->ctx) == HPML_OK) s = hpmlc_stats_read(d);
    return status == HPML_OK ? s : s == HPML_OK ? hpmlc_dist_blame(d, status, hpmlc_dist_bad(d)) : status;
}

HPMLC_FN hpml_status hpmlc_dist_wait(hpml_distributed *d)
{
    const hpml_device_link *l = d->link;
    /* Who waits for a job that waits for the link has its deadline only here. */
    if (l && l->across && l->check(l->user) != HPML_OK) return hpmlc_failed(d->c), hpml_ctx_status(d->ctx);
    hpml_status status = hpmlc_dist_settle(d);
    if (status == HPML_OK) hpmlc_buffers_read(d);
    return status == HPML_OK && d->link ? hpmlc_dist_linked(d) : status;
}

/* Gradients were scaled for a full batch; a short one has fewer samples. */
HPMLC_FN void hpmlc_dist_rescale(hpml_distributed *d, double samples, double full)
{
    if (d->d.sum || samples <= 0 || samples == full) return;
    float *g = hpmlc_grads(d), scale = (float)(full / samples);
    if (d->link) d->link->scale(d->link->user, d->first, d->span, scale, 1);
    for (int64_t k = 0; !d->link && k < d->span; k++) g[k] *= scale;
}

/* The next row begins here. */
HPMLC_FN void hpmlc_steps_mark(hpml_distributed *d)
{
    d->row_r    = d->r;
    d->row_time = hpml_comm_now(d->c);
    hpml_comm_counters(d->c, &d->row_sent);
}

/* Called when nothing is under way: counters wait for what is. bubble_s comes when the rows of all ranks are there. */
HPMLC_FN void hpmlc_steps_note(hpml_distributed *d)
{
    hpml_step_row *row = &d->row[d->rows++ % d->d.history];
    hpml_counters  sent = d->row_sent;
    double         then = d->row_time;
    row->step = hpml_trainer_step_count(d->t) + 1, row->rank = d->c->rank;
    row->compute_s = d->r.compute_s - d->row_r.compute_s;
    row->exposed_s = d->r.exposed_s - d->row_r.exposed_s;
    hpmlc_steps_mark(d);
    row->step_s    = d->row_time - then;
    row->bytes     = (double)(d->row_sent.bytes - sent.bytes);
    row->overlap_s = fmax(0, d->row_sent.seconds - sent.seconds - row->exposed_s);
    HPMLC_ZERO(hpml_trace_event, e);
    e.kind = HPML_TRACE_COUNTER, e.name = "bytes sent", e.start = d->row_time, e.value = row->bytes;
    hpml_trace_add(d->ctx, &e);
}

/* Gradients under way and the trainer's change places. */
HPMLC_FN void hpmlc_shadow_swap(hpml_distributed *d)
{
    float *mine = hpmlc_grads(d), *other = d->shadow;
    for (int64_t k = 0; k < d->span; k++) {
        float g = mine[k];
        mine[k] = other[k], other[k] = g;
    }
}

/* Double buffering: the gradients of the step before, already added up, come in, this step's go out. */
HPMLC_FN hpml_status hpmlc_dist_delay(hpml_distributed *d, double *samples, double *full)
{
    hpmlc_buffers_back(d);
    hpml_status status = d->under_way ? hpmlc_dist_wait(d) : HPML_OK;
    if (status != HPML_OK) return status;
    *samples = d->under_way ? d->stats[HPMLC_SAMPLES] : 0;
    *full    = d->full;
    d->full  = (double)d->d.global_batch * d->accumulate;
    hpmlc_fetch(d, 0, d->span);
    hpmlc_shadow_swap(d);
    hpmlc_steps_note(d);
    d->under_way = !d->trial;
    d->posted    = 0;
    status = hpmlc_dist_post(d);
    if (!d->trial || status != HPML_OK) return status;
    status   = hpmlc_dist_wait(d);
    *samples = d->stats[HPMLC_SAMPLES], *full = d->full;
    hpmlc_shadow_swap(d);
    return status;
}

HPMLC_FN void hpmlc_pair_step(void *into, const void *from, size_t bytes HPMLC_UNUSED)
{
    hpml_distributed *d = (hpml_distributed *)into;
    hpmlc_dist_waited(d, d->since);
    d->stepped = hpml_trainer_update_sum(d->t, (const float *)from, d->scale);
    d->since   = hpml_comm_now(d->c);
}

/* Two ranks that see each other's memory: the receive is the step. Instead of three passes that end with the sum in
   place and a fourth that reads it, the optimizer reads both gradients, in the same order of additions as any
   algorithm between two. Then none is written before both have been read. */
HPMLC_FN hpml_status hpmlc_dist_pair(hpml_distributed *d, double scale)
{
    hpml_comm *c   = d->c;
    int        tag = hpmlc_enter(c, "gradients", d->span, HPML_ELEMENT_F32, d->d.sum ? HPML_SUM : HPML_MEAN, NULL, -1);
    size_t     bytes = (size_t)d->span * sizeof(float);
    if (tag < 0) return hpml_ctx_status(d->ctx);
    hpmlc_about(c, d->bucket[0].x, true, 0, d->span);
    d->scale = (float)scale, d->since = c->since, d->stepped = HPML_OK;
    hpml_status status = hpmlc_round(c, tag, !c->rank, (const char *)d->first, bytes, !c->rank, (char *)d, bytes,
                                     hpmlc_pair_step);
    hpmlc_dist_waited(d, d->since);
    hpmlc_leave(c, status);
    hpmlc_about(c, NULL, true, 0, 0);
    hpmlc_steps_note(d);
    d->r.steps++;
    return status == HPML_OK ? d->stepped : status;
}

HPMLC_FN hpml_status hpmlc_dist_update(void *user, hpml_trainer *t)
{
    hpml_distributed *d = (hpml_distributed *)user;
    double      samples = 0, full = (double)d->d.global_batch * d->accumulate;
    hpml_status s = d->d.exact ? HPML_OK : d->d.delayed ? hpmlc_dist_delay(d, &samples, &full) : hpmlc_dist_wait(d);
    d->micro = 0;
    if (s != HPML_OK) return s;
    if (!d->d.exact && !d->d.delayed) samples = d->stats[HPMLC_SAMPLES];
    if (d->pair) return hpmlc_dist_pair(d, d->d.sum ? 1 : 0.5 * (full / samples));
    if (!d->d.delayed) hpmlc_steps_note(d);
    d->r.steps++;
    if (d->d.delayed && samples <= 0) return HPML_OK; /* the first step has nothing to apply */
    if (!d->d.exact) hpmlc_dist_rescale(d, samples, full);
    if (d->mirror) d->reach.device->write(d->reach.at, d->first, d->mirror, (size_t)d->span * sizeof(float));
    s = hpml_trainer_update_local(t, 0, d->params); /* whose norm somebody may wait for without a deadline */
    return s == HPML_OK && d->link && d->clips ? d->link->check(d->link->user) : s;
}

// ---------------------------------------------------------------------------------------------------------------------
// >>exact   the same bits for every number of ranks
// ---------------------------------------------------------------------------------------------------------------------

/* Leaf l of the global batch is samples [l L, (l + 1) L). A rank computes its leaves one after another, each from the
   same running statistics, and keeps their gradients (of the sum over samples). Then, tensor by tensor: the largest |g|
   of all leaves and ranks is m < 2^e; with 2^k >= leaves, scale 2^(62 - e - k) keeps any sum of leaves below 2^62.
   Rounding a leaf loses less than 2^(e + k - 62), far below a float's last bit. Integers do not mind the order. */

/* Floats of a leaf that parameter i has. */
HPMLC_FN int64_t hpmlc_leaf_floats(const hpml_distributed *d, int i)
{
    const hpml_tensor *p = hpmlc_param(d, i);
    return p->grad || p->param->buffer ? hpml_tensor_count(p) : 0;
}

/* Tensors to a leaf's row of floats; notes each one's largest. Buffers: how far the leaf moved them, times samples. */
HPMLC_FN void hpmlc_leaf_store(hpml_distributed *d, float *row, double samples)
{
    const float *before = d->before;
    for (int i = 0; i < d->params; i++) {
        hpml_tensor *p = hpmlc_param(d, i);
        int64_t      n = hpmlc_leaf_floats(d, i);
        float       *x = hpmlc_open(&d->reach, p->grad ? p->grad : p->data, n);
        if (p->grad) memcpy(row, x, (size_t)n * sizeof(float));
        else {
            for (int64_t k = 0; k < n; k++) row[k] = (float)(samples * ((double)x[k] - (double)before[k]));
            memcpy(x, before, (size_t)n * sizeof(float)); /* the next leaf starts from the same */
            hpmlc_close(&d->reach, p->data, n);
            before += n;
        }
        for (const float *end = row + n; row < end; row++)
            if (fabsf(*row) > d->largest[i] || *row != *row) d->largest[i] = fabsf(*row); /* a NaN stays */
    }
}

HPMLC_FN hpml_status hpmlc_exact_leaves(hpml_distributed *d, int64_t samples, float *loss)
{
    float       part = 0;
    hpml_status status = HPML_OK;
    hpmlc_buffers_copy(d, d->before, false);
    memset(d->leaf, 0, (size_t)(d->leaf_total * d->leaf_count) * sizeof(float));
    memset(d->largest, 0, (size_t)d->params * sizeof(float));
    for (int64_t l = 0, at = 0; at < samples && status == HPML_OK; l++, at += d->d.leaf) {
        int64_t n = hpmlc_min(samples - at, d->d.leaf);
        status    = hpml_trainer_run_local(d->t, at, n, (float)n, false, &part);
        hpmlc_leaf_store(d, d->leaf + l * d->leaf_total, (double)n);
        d->loss_sum += (double)part * (double)n;
    }
    d->samples = (double)samples;
    *loss      = samples > 0 ? (float)(d->loss_sum / (double)samples) : 0;
    return status;
}

HPMLC_FN double hpmlc_exact_scale(const hpml_distributed *d, float largest)
{
    int e = 0, k = hpmlc_log2((int)d->leaf_all) + 1;
    if (!(largest > 0)) return 0;
    frexp((double)largest, &e);
    return ldexp(1, 62 - e - k);
}

/* Leaves, rounded to integers, into the sum of all ranks. */
HPMLC_FN hpml_status hpmlc_exact_sum(hpml_distributed *d)
{
    const hpml_algorithm a = d->d.algorithm;
    int64_t              at = 0, used = 0;
    memset(d->sum, 0, (size_t)d->leaf_total * sizeof *d->sum);
    hpml_status          status = hpmlc_reduce_all(d->c, d->largest, d->params, HPML_ELEMENT_F32, HPML_MAX, a);
    for (int i = 0; i < d->params && status == HPML_OK; i++) {
        int64_t n = hpmlc_leaf_floats(d, i);
        if (!(d->largest[i] - d->largest[i] == 0)) return hpmlc_dist_blame(d, HPML_ERR_NONFINITE, (int64_t)i << 20);
        const double scale = hpmlc_exact_scale(d, d->largest[i]);
        int64_t     *sum   = d->sum + used;
        for (int64_t l = 0; l < d->leaf_count && d->bucket_of[i] < 0; l++) {
            const float *row = d->leaf + l * d->leaf_total + at;
            for (int64_t k = 0; k < n; k++) sum[k] += (int64_t)rint((double)row[k] * scale);
        }
        at += n, used += d->bucket_of[i] < 0 ? n : 0;
    }
    if (status != HPML_OK) return status;
    d->c->about.first = hpmlc_param(d, 0)->name, d->c->about.last = hpmlc_param(d, d->params - 1)->name;
    status = hpmlc_reduce_all(d->c, d->sum, used, HPML_ELEMENT_I64, HPML_SUM, a);
    hpmlc_about(d->c, NULL, true, 0, 0);
    return status;
}

/* Integers back to gradients and buffers; packed tensors come from leaf 0, where the exchange has left their sum. */
HPMLC_FN void hpmlc_exact_apply(hpml_distributed *d, double samples)
{
    const int64_t *sum = d->sum;
    int64_t        at  = 0;
    for (int i = 0; i < d->params; i++) {
        hpml_tensor *p = hpmlc_param(d, i);
        int64_t      n = hpmlc_leaf_floats(d, i);
        double       scale = hpmlc_exact_scale(d, d->largest[i]), back = scale > 0 ? 1 / scale : 0;
        bool         packed = d->bucket_of[i] >= 0;
        float       *to = p->grad ? p->grad : p->data, *x = hpmlc_open(&d->reach, to, n);
        for (int64_t k = 0; k < n; k++) {
            double mean = (packed ? (double)d->leaf[at + k] : (double)*sum++ * back) / samples;
            x[k] = p->grad ? (float)mean : (float)((double)x[k] + mean);
        }
        hpmlc_close(&d->reach, to, n);
        at += n;
    }
}

HPMLC_FN hpml_status hpmlc_exact_run(void *user, hpml_trainer *t, int64_t samples, float *loss)
{
    hpml_distributed *d     = (hpml_distributed *)user;
    double            start = hpml_comm_now(d->c);
    d->c->step  = hpml_trainer_step_count(t) + 1;
    d->loss_sum = 0;
    hpml_status status = hpmlc_exact_leaves(d, samples, loss);
    d->r.compute_s += hpml_comm_now(d->c) - start;
    if (status != HPML_OK) return hpmlc_failed(d->c), status;
    start = hpml_comm_now(d->c);
    hpmlc_stats_fill(d);
    status = hpmlc_reduce_all(d->c, d->stats, HPMLC_STATS, HPML_ELEMENT_F64, HPML_SUM, HPML_AUTO);
    if (status == HPML_OK) status = hpmlc_stats_read(d);
    if (status == HPML_OK && d->buckets > 0) {
        status = hpml_exchange_run(d->bucket[0].x);
        if (status == HPML_ERR_NONFINITE) return hpmlc_dist_blame(d, status, hpmlc_dist_bad(d));
    }
    if (status == HPML_OK) status = hpmlc_exact_sum(d);
    if (status == HPML_OK) hpmlc_exact_apply(d, d->stats[HPMLC_SAMPLES]);
    hpmlc_dist_waited(d, start);
    return status;
}

/* Memory for leaves, and one exchange for the tensors that a codec packs. */
HPMLC_FN bool hpmlc_exact_create(hpml_distributed *d)
{
    hpml_exchange_desc e;
    int64_t            at = 0;
    int                p = d->c->size;
    hpml_gradient     *g = (hpml_gradient *)hpml_ctx_alloc(d->ctx, sizeof *g * (size_t)d->params, NULL);
    d->leaf_all   = (d->d.global_batch + d->d.leaf - 1) / d->d.leaf;
    d->leaf_first = hpml_block(d->leaf_all, p, d->c->rank);
    d->leaf_count = hpml_block(d->leaf_all, p, d->c->rank + 1) - d->leaf_first;
    d->leaf_total = d->grad_total + d->buffer_total;
    d->leaf    = (float *)hpml_ctx_alloc(d->ctx, (size_t)(d->leaf_total * d->leaf_count + 1) * sizeof(float), NULL);
    d->sum     = (int64_t *)hpml_ctx_alloc(d->ctx, (size_t)d->leaf_total * sizeof(int64_t), NULL);
    d->largest = (float *)hpml_ctx_alloc(d->ctx, (size_t)d->params * sizeof(float), NULL);
    d->bucket  = (hpmlc_bucket *)hpml_ctx_alloc(d->ctx, sizeof *d->bucket, NULL);
    if (hpml_ctx_status(d->ctx) != HPML_OK) return false;
    hpmlc_exchange_settings(d, false, &e);
    for (int i = 0; i < d->params; i++) {
        hpml_tensor *t = hpmlc_param(d, i);
        hpml_packing pack;
        d->bucket_of[i] = -1;
        hpmlc_gradient_of(t, d->leaf + at, &g[e.count]);
        hpml_status good = hpml_packing_init(&pack, &d->d.codec, g[e.count].rows, g[e.count].cols);
        if (t->grad && good == HPML_OK && !pack.codec->linear) d->bucket_of[i] = 0, e.count++;
        at += hpmlc_leaf_floats(d, i);
    }
    if (e.count > 0) {
        e.tensors = g, e.reduce = HPML_SUM, e.padded = false;
        e.leaves = (int32_t)d->leaf_count, e.leaf_step = d->leaf_total;
        if (d->leaf_count == 0)
            return hpmlc_fail(d->c, HPML_ERR_UNSUPPORTED, "distribute: %lld leaves for %d ranks leave this one "
                              "without; lower .leaf or the number of ranks", (long long)d->leaf_all, p), false;
        d->bucket[0].x = d->bucket[0].now = hpml_exchange_create(d->c, &e);
        d->buckets     = 1;
    }
    hpml_ctx_release(d->ctx, g);
    return hpml_ctx_status(d->ctx) == HPML_OK;
}

// ---------------------------------------------------------------------------------------------------------------------
// >>attach   attaching to a trainer, reports
// ---------------------------------------------------------------------------------------------------------------------

/* The same model on all ranks, and everybody starts from rank 0's. */
HPMLC_FN hpml_status hpmlc_dist_start(hpml_distributed *d)
{
    int64_t shape[4];
    shape[0] = hpml_param_total(d->ctx), shape[1] = -shape[0], shape[2] = d->params, shape[3] = -shape[2];
    hpml_status status = hpmlc_reduce_all(d->c, shape, 4, HPML_ELEMENT_I64, HPML_MAX, HPML_AUTO);
    if (status == HPML_OK && (shape[0] != -shape[1] || shape[2] != -shape[3]))
        return hpmlc_fail(d->c, HPML_ERR_SHAPE, "distribute: this rank's model has %lld numbers in %d parameters, "
                          "others up to %lld in %lld; record the same model on all ranks",
                          (long long)hpml_param_total(d->ctx), d->params, (long long)shape[0], (long long)shape[2]);
    for (int i = 0; i < d->params && status == HPML_OK; i++) {
        hpml_tensor *p = hpmlc_param(d, i);
        int64_t      n = hpml_tensor_count(p);
        status = hpml_broadcast(d->c, hpmlc_open(&d->reach, p->data, n), (size_t)n * sizeof(float), 0);
        if (status == HPML_OK) hpmlc_close(&d->reach, p->data, n);
    }
    return status;
}

HPMLC_FN hpml_status hpmlc_dist_check(hpml_trainer *t, hpml_comm *c, hpml_distribute_desc *d, int64_t batch)
{
    if (d->_begin || d->_end || d->global_batch < 0 || d->leaf < 0 || d->warm_steps < 0 || d->bucket_bytes < 0 ||
        d->history < 0)
        return hpmlc_fail(c, HPML_ERR_ARGUMENT, "distribute: the desc is not cleared, or a count is negative");
    if (hpml_trainer_settings(t)->input->ctx != c->ctx)
        return hpmlc_fail(c, HPML_ERR_ARGUMENT, "distribute: the trainer is of another context; record the model on "
                          "hpml_comm_ctx(comm)");
    if (d->global_batch == 0) d->global_batch = c->size * batch;
    if (d->leaf == 0) d->leaf = hpmlc_min(batch, 8);
    if (d->history == 0) d->history = 64;
    int64_t grain = d->exact ? d->leaf : 1, grains = (d->global_batch + grain - 1) / grain;
    int64_t most  = (grains + c->size - 1) / c->size * grain;
    if (most > batch || d->leaf > batch)
        return hpmlc_fail(c, HPML_ERR_ARGUMENT, "distribute: a global batch of %lld on %d ranks gives one up to %lld "
                          "samples (leaves of %lld), the model's batch is %lld", (long long)d->global_batch, c->size,
                          (long long)most, (long long)d->leaf, (long long)batch);
    bool several = hpml_trainer_settings(t)->accumulate > 1 || d->sync_batchnorm; /* leaves come one by one */
    if (d->exact && (d->sum || d->delayed || d->warm_steps || d->method != HPML_METHOD_CODEC || several))
        return hpmlc_fail(c, HPML_ERR_UNSUPPORTED, "distribute: exact sums go with the mean, codecs, and one batch a "
                          "step; not with sum, delayed, warm_steps, top-k, low rank, accumulate or sync_batchnorm");
    bool lossy = d->method != HPML_METHOD_CODEC || d->codec.kind != HPML_CODEC_NONE || d->codec.custom;
    if ((d->exact || lossy) && hpmlc_overflows(t, c->ctx))
        return hpmlc_fail(c, HPML_ERR_UNSUPPORTED, "distribute: in f16 gradients overflow now and then, and what packs "
                          "them cannot carry an infinity; take bf16, a fixed loss_scale, or codec none");
    if (d->delayed && hpmlc_overflows(t, c->ctx))
        return hpmlc_fail(c, HPML_ERR_UNSUPPORTED, "distribute: with delayed a gradient is applied in the step after "
                          "its own, in f16 under another loss scale perhaps; take bf16 or a fixed loss_scale");
    if (d->exact && !hpml_graph_batchable(hpml_trainer_graph(t)))
        return hpmlc_fail(c, HPML_ERR_UNSUPPORTED, "distribute: this model mixes the samples of a batch, so leaves "
                          "cannot be computed apart");
    return HPML_OK;
}

/* May gradients stay on the device? The other strategies look at them on the host. */
HPMLC_FN bool hpmlc_dist_linkable(hpml_distributed *d)
{
    const hpml_backend *b = hpml_ctx_backend(d->ctx);
    d->clips = hpml_trainer_settings(d->t)->clip_norm > 0;
    d->looks = (d->clips && !hpml_trainer_settings(d->t)->no_finite_check) || hpmlc_overflows(d->t, d->ctx);
    return d->c->link.begin && d->d.method == HPML_METHOD_CODEC && !d->d.codec.custom && !d->d.exact && !d->d.delayed &&
           (d->d.codec.kind == HPML_CODEC_NONE || (b->encode && b->decode));
}

/* Ranks take their shares of a batch by position, so that all must have the same data in the same order: shares made by
   hand would be divided once more. The report is of steps, and leaves this sum out. */
HPMLC_FN hpml_status hpmlc_dist_data(void *user, hpml_trainer *t HPMLC_UNUSED, uint64_t mark)
{
    hpml_distributed   *d = (hpml_distributed *)user;
    const hpml_counters before = d->c->counters;
    const double        start = hpml_comm_now(d->c);
    bool                same;
    hpml_status status = hpmlc_same(d->c, mark, &same);
    int64_t     bytes = d->c->counters.bytes - before.bytes;
    double      seconds = d->c->counters.seconds - before.seconds;
    d->at_reset.bytes += bytes, d->at_reset.seconds += seconds;
    d->row_sent.bytes += bytes, d->row_sent.seconds += seconds;
    d->began += hpml_comm_now(d->c) - start, d->row_time += hpml_comm_now(d->c) - start;
    if (status != HPML_OK || same) return status;
    return hpmlc_fail(d->c, HPML_ERR_ARGUMENT, "fit: this rank's data, seed, epochs or place in the data are not the "
                      "other ranks'. Pass the same data set and settings on all ranks, because fit takes each rank's "
                      "share itself; or, where you have divided the data, a hpml_loader_desc with .ranks = 1");
}

HPMLC_FN int hpmlc_name_order(const void *a, const void *b)
{
    return strcmp((*(hpml_tensor *const *)a)->name, (*(hpml_tensor *const *)b)->name);
}

/* Fills d->by_name. */
HPMLC_FN bool hpmlc_dist_names(hpml_distributed *d)
{
    hpml_tensor **p = (hpml_tensor **)hpml_ctx_alloc(d->ctx, sizeof *p * (size_t)(d->params + 1), NULL);
    for (int i = 0; p && i < d->params; i++) p[i] = hpmlc_param(d, i);
    if (p && d->params > 0) qsort(p, (size_t)d->params, sizeof *p, hpmlc_name_order);
    for (int i = 0; p && i < d->params; i++) d->by_name[i] = p[i]->param->index;
    hpml_ctx_release(d->ctx, p);
    return p != NULL;
}

HPMLC_FN bool hpmlc_dist_memory(hpml_distributed *d)
{
    hpml_ctx *ctx  = d->ctx;
    int64_t   most = 1;
    for (int i = 0; i < d->params; i++) {
        hpml_tensor *p = hpmlc_param(d, i);
        int64_t      n = hpml_tensor_count(p);
        most = hpmlc_max(most, n);
        if (p->grad && !d->first) d->first = p->grad;
        if (p->grad) d->span = p->grad - d->first + (n + 15) / 16 * 16, d->grad_total += n;
        else if (p->param->buffer) d->buffer_total += n;
    }
    bool   device = hpml_ctx_backend(ctx) != hpml_backend_cpu();
    size_t span = (size_t)d->span * sizeof(float);
    if (device && hpmlc_dist_linkable(d)) d->link = &d->c->link;
    d->bucket_of = (int *)hpml_ctx_alloc(ctx, sizeof(int) * (size_t)(d->params + 1), NULL);
    d->by_name   = (int *)hpml_ctx_alloc(ctx, sizeof(int) * (size_t)(d->params + 1), NULL);
    d->stats     = (double *)hpml_ctx_alloc(ctx, sizeof(double) * (size_t)(HPMLC_STATS + d->buffer_total), NULL);
    d->before    = (float *)hpml_ctx_alloc(ctx, sizeof(float) * (size_t)(2 * d->buffer_total + 1), NULL);
    d->row       = (hpml_step_row *)hpml_ctx_alloc(ctx, sizeof *d->row * (size_t)d->d.history, NULL);
    if (d->d.delayed) d->shadow = (float *)hpml_ctx_alloc(ctx, span, NULL);
    if (device && !d->link && !d->d.exact) d->mirror = (float *)hpml_ctx_alloc(ctx, span, NULL);
    if (hpml_ctx_status(ctx) != HPML_OK || !hpmlc_dist_names(d)) return false;
    d->now = d->before + d->buffer_total;
    return !device || hpmlc_reach_create(&d->reach, ctx, most);
}

HPML_API hpml_distributed *hpml_distribute(hpml_trainer *t, hpml_comm *c, const hpml_distribute_desc *desc)
{
    HPMLC_ZERO(hpml_hooks, hooks);
    HPMLC_DESC(hpml_distribute_desc, settings, desc);
    if (hpmlc_failed(c) || !t) return NULL;
    int64_t batch = hpml_trainer_settings(t)->input->shape[0];
    if (hpmlc_dist_check(t, c, &settings, batch) != HPML_OK) return NULL;
    hpml_trainer_set_hooks(t, NULL); /* gradients are this trainer's from here on */
    hpml_distributed *d = (hpml_distributed *)hpml_ctx_alloc(c->ctx, sizeof *d, NULL);
    if (!d) return NULL;
    d->t = t, d->c = c, d->ctx = c->ctx, d->d = settings, d->params = hpml_param_count(c->ctx), d->batch = batch;
    d->leaf_all = c->size, d->leaf_first = c->rank, d->leaf_count = 1;
    d->accumulate = hpml_trainer_settings(t)->accumulate;
    if (!hpmlc_dist_memory(d) || hpmlc_dist_start(d) != HPML_OK) return NULL;
    if (!(settings.exact ? hpmlc_exact_create(d) : hpmlc_buckets_create(d))) return NULL;
    hooks.user   = d;
    hooks.run    = settings.exact ? hpmlc_exact_run : hpmlc_dist_run;
    hooks.grad   = settings.exact ? NULL : hpmlc_dist_grad;
    hooks.sum    = settings.sync_batchnorm ? hpmlc_dist_sum : NULL;
    hooks.update = hpmlc_dist_update;
    hooks.data   = hpmlc_dist_data;
    hpml_trainer_set_hooks(t, &hooks);
    hpml_trainer_set_shard(t, c->rank, c->size, settings.global_batch, settings.exact ? settings.leaf : 0);
    hpml_distribute_get(d, NULL, true);
    d->r.loss = NAN; /* of no step yet */
    return hpml_ctx_status(c->ctx) == HPML_OK ? d : NULL;
}

HPML_API void hpml_distribute_get(hpml_distributed *d, hpml_distribute_report *out, bool reset)
{
    hpml_counters now;
    if (!d) return;
    hpml_comm_counters(d->c, &now);
    if (out) {
        double n = d->r.steps > 0 ? (double)d->r.steps : 1;
        *out = d->r;
        out->step_s      = (hpml_comm_now(d->c) - d->began) / n;
        out->compute_s   = d->r.compute_s / n, out->exposed_s = d->r.exposed_s / n;
        out->efficiency  = out->step_s > 0 ? 1 - out->exposed_s / out->step_s : 1;
        out->comm_s      = (now.seconds - d->at_reset.seconds) / n;
        out->hidden      = out->comm_s > 0 ? fmax(0, 1 - out->exposed_s / out->comm_s) : 0;
        out->bytes       = (double)(now.bytes - d->at_reset.bytes) / n;
        out->plain_bytes = 8.0 * (double)d->grad_total * (d->c->size - 1) / d->c->size, out->buckets = d->buckets;
    }
    if (!reset) return;
    double  loss    = d->r.loss;
    int64_t samples = d->r.samples;
    memset(&d->r, 0, sizeof d->r);
    d->r.loss = loss, d->r.samples = samples;
    hpmlc_steps_mark(d);
    d->began = d->row_time, d->at_reset = now;
}

/* Everybody's rows to everybody, rank by rank; then step by step. */
HPML_API int hpml_distribute_steps(hpml_distributed *d, hpml_step_row *rows, int capacity)
{
    if (!d || !rows || capacity < 0 || hpmlc_failed(d->c)) return -1;
    int64_t p = d->c->size, size = (int64_t)sizeof *rows;
    int64_t n = hpmlc_min(hpmlc_min(d->rows, d->d.history), capacity / p);
    hpml_step_row *all = (hpml_step_row *)hpml_ctx_alloc(d->ctx, (size_t)(n * p * size + 1), NULL);
    if (!all) return -1;
    for (int64_t i = 0; i < n; i++) all[d->c->rank * n + i] = d->row[(d->rows - n + i) % d->d.history];
    hpml_status status = hpml_allgather(d->c, all, n * p * size, HPML_ELEMENT_BYTE);
    for (int64_t i = 0; i < n; i++) {
        double slowest = 0;
        for (int64_t r = 0; r < p; r++) slowest = fmax(slowest, all[r * n + i].compute_s);
        for (int64_t r = 0; r < p; r++) {
            hpml_step_row *row = &rows[i * p + r];
            *row          = all[r * n + i];
            row->bubble_s = fmin(row->exposed_s, slowest - row->compute_s);
            row->exposed_s -= row->bubble_s;
        }
    }
    hpml_ctx_release(d->ctx, all);
    return status == HPML_OK ? (int)(n * p) : -1;
}

HPML_API int hpml_steps_text(const hpml_step_row *rows, int count, char *buffer, size_t size)
{
    size_t at = (size_t)snprintf(buffer, size, "  step rank   step ms   compute   overlap   exposed    bubble"
                                 "        bytes\n");
    HPMLC_ZERO(hpml_step_row, sum);
    for (int i = 0; i <= count; i++) {
        const hpml_step_row *r = i < count ? &rows[i] : &sum;
        double               one = 1.0 / (i == count && count > 0 ? count : 1), ms = 1e3 * one;
        char                 name[32] = "  mean     ";
        if (i < count) snprintf(name, sizeof name, "%6lld %4d", (long long)r->step, (int)r->rank);
        at += (size_t)snprintf(at < size ? buffer + at : NULL, at < size ? size - at : 0,
                               "%s %9.3f %9.3f %9.3f %9.3f %9.3f %12.0f\n", name, ms * r->step_s, ms * r->compute_s,
                               ms * r->overlap_s, ms * r->exposed_s, ms * r->bubble_s, one * r->bytes);
        if (i == count) break;
        sum.step_s += r->step_s, sum.compute_s += r->compute_s, sum.overlap_s += r->overlap_s;
        sum.exposed_s += r->exposed_s, sum.bubble_s += r->bubble_s, sum.bytes += r->bytes;
    }
    return (int)at;
}

/* Waiting stays or shrinks when there is more to compute: batches 1 / efficiency - 1 times as large make it a half. */
HPMLC_FN const char *hpmlc_low(double efficiency, char text[128])
{
    text[0] = 0;
    if (efficiency < 0.5)
        snprintf(text, 128, ", below 50 %%: ranks wait more than they compute; take fewer ranks, fewer bytes or "
                 "batches %.3g times as large", 1 / efficiency - 1);
    return text;
}

HPML_API int hpml_distribute_text(hpml_distributed *d, char *buffer, size_t size)
{
    hpml_distribute_report r;
    char                   low[128];
    if (!d) return 0;
    hpml_distribute_get(d, &r, false);
    return snprintf(buffer, size, "%d ranks (%s), %d buckets: step %.2f ms = compute %.2f + exposed %.2f; "
                    "exchange %.2f ms, %.0f %% hidden; %.0f bytes a step and rank, %.1fx less than a ring of f32; "
                    "efficiency %.0f %%%s",
                    d->c->size, d->c->t->name, r.buckets, 1e3 * r.step_s, 1e3 * r.compute_s, 1e3 * r.exposed_s,
                    1e3 * r.comm_s, 100 * r.hidden, r.bytes, r.bytes > 0 ? r.plain_bytes / r.bytes : 1,
                    100 * r.efficiency, hpmlc_low(r.efficiency, low));
}

// ---------------------------------------------------------------------------------------------------------------------
// >>carried   checkpoints of the whole job; the largest batch that does not hurt
// ---------------------------------------------------------------------------------------------------------------------

typedef enum hpmlc_how { HPMLC_COUNT, HPMLC_SAVE, HPMLC_LOAD, HPMLC_ADD, HPMLC_CLEAR } hpmlc_how;

/* n floats of an exchange's: to row[at] and on, or from there. Returns n, or 0 where there are none. */
HPMLC_FN int64_t hpmlc_carry(const hpml_exchange *x, float *mine, int64_t n, float *row, int64_t at, hpmlc_how how)
{
    if (!mine || how == HPMLC_COUNT) return mine ? n : 0;
    float *host = hpmlc_open(&x->reach, mine, n);
    for (int64_t i = 0; i < n; i++) {
        if (how == HPMLC_SAVE) row[at + i] = host[i];
        else host[i] = how == HPMLC_CLEAR ? 0 : how == HPMLC_ADD ? host[i] + row[at + i] : row[at + i];
    }
    if (how != HPMLC_SAVE) hpmlc_close(&x->reach, mine, n);
    return n;
}

/* What exchanges carry from step to step, tensors by name: a row of floats for contribution l (residuals, with TOPK the
   velocity), and one, l < 0, that all ranks share (stripes' residuals, with LOWRANK Q, the same everywhere: rank 0
   saves it). A share of a node's gradients is one rank's, stripe and all. Contributions are added when they are loaded,
   for there may have been more of them. Returns the row's floats. */
HPMLC_FN int64_t hpmlc_carried(const hpml_distributed *d, int64_t l, float *row, hpmlc_how how)
{
    int64_t at = 0;
    for (int i = 0; i < d->params; i++) {
        int b = d->bucket_of[d->by_name[i]];
        const hpml_exchange *x = b < 0 ? NULL : d->bucket[b].x;
        for (const hpmlc_item *it = x ? x->item : NULL; x && it < x->item + x->d.count; it++) {
            if (it->g.name != hpmlc_param(d, d->by_name[i])->name) continue;
            int64_t cols = it->g.cols, n = it->g.rows * cols, part = it->my_rows * cols;
            float  *q = x->d.method == HPML_METHOD_LOWRANK ? it->q : NULL;
            if (l >= 0) {
                at += hpmlc_carry(x, it->residual ? it->residual + l * n : NULL, n, row, at, how);
                at += hpmlc_carry(x, x->d.method == HPML_METHOD_TOPK ? it->p : NULL, n, row, at, how);
                at += hpmlc_carry(x, x->d.share ? it->stripe : NULL, part, row, at, how);
            } else if (q)
                at += hpmlc_carry(x, q, cols * hpmlc_lowrank_of(x, it), row, at,
                                  how == HPMLC_SAVE && x->c->rank > 0 ? HPMLC_COUNT : how);
            else if (it->stripe && !x->d.share) {
                hpmlc_carry(x, it->stripe, part, row, at + it->my_row * cols, how);
                at += n;
            }
        }
    }
    return at;
}

/* The floats of both. Shares differ from place to place of a node: the longest counts, and a number behind it that
   tells the place. Returns that number, or 0 where there are no shares with residuals. */
HPMLC_FN int hpmlc_carried_floats(hpml_distributed *d, int64_t *each, int64_t *shared)
{
    int place = 0, node = d->c->node[d->c->rank];
    *each   = hpmlc_carried(d, 0, NULL, HPMLC_COUNT);
    *shared = hpmlc_carried(d, -1, NULL, HPMLC_COUNT);
    if (!d->link || !d->link->across || d->d.codec.kind == HPML_CODEC_NONE) return 0;
    ++*each;
    hpmlc_reduce_all(d->c, each, 1, HPML_ELEMENT_I64, HPML_MAX, HPML_AUTO);
    for (int r = 0; r <= d->c->rank; r++) place += d->c->node[r] == node;
    return place + node * 256; /* as a float: up to 2^24 */
}

/* Double buffering: what has been added up and waits to be applied, as one row: samples; loss and moves of the running
   statistics, both for one sample; gradients; samples of a whole step; where there are moves, a 1: they stand by name.
   The same on all ranks. Returns its floats; row NULL: only counts. */
HPMLC_FN int64_t hpmlc_pending(hpml_distributed *d, float *row, bool load)
{
    int64_t head = HPMLC_STATS + d->buffer_total, end = head + d->grad_total, moves = d->buffer_total > 0;
    double *s    = d->stats;
    if (row && load) d->full = (double)row[end];
    else if (row) row[end + moves] = 1, row[end] = (float)d->full;
    for (int64_t k = 0; k < head && row; k++) {
        if (load) s[k] = (double)row[k] * (k > 0 ? s[0] : 1);
        else row[k] = (float)(k > 0 ? s[k] / s[0] : s[0]);
    }
    for (int i = 0; i < d->params && row; i++) {
        const hpml_tensor *p = hpmlc_param(d, d->by_name[i]);
        if (!p->grad) continue;
        float *mine = d->shadow + (p->grad - d->first);
        size_t n    = (size_t)hpml_tensor_count(p);
        memcpy(load ? mine : row + head, load ? row + head : mine, n * sizeof(float));
        head += (int64_t)n;
    }
    return end + 1 + moves;
}

HPMLC_FN hpml_status hpmlc_pending_load(hpml_distributed *d, const hpml_safetensors *f, const char *path)
{
    hpml_safetensor pending;
    size_t          bytes = (size_t)hpmlc_pending(d, NULL, true) * sizeof(float);
    d->under_way = hpml_safetensors_find(f, "state.gradients", &pending);
    if (!d->under_way) return HPML_OK;
    bool old = d->buffer_total > 0 && pending.bytes == bytes - sizeof(float); /* without the 1 */
    if (!d->d.delayed || (pending.bytes != bytes && !old))
        return hpmlc_fail(d->c, HPML_ERR_FORMAT, "%s: holds gradients that are not yet applied (state.gradients, %zu "
                          "bytes); load it with .delayed and the model it was saved with (%zu bytes)", path,
                          pending.bytes, bytes);
    /* Then moves stand by name, or as that model was recorded: parameters lie in this order in the file. */
    const char *last = NULL;
    for (int i = 0; i < d->params && old; i++) {
        const hpml_tensor *p = hpmlc_param(d, d->by_name[i]);
        hpml_safetensor    e;
        if (!p->param->buffer || !hpml_safetensors_find(f, p->name, &e)) continue;
        if (last && (const char *)e.data < last)
            return hpmlc_fail(d->c, HPML_ERR_FORMAT, "%s: state.gradients, of an older hpml, does not say in which "
                              "order it holds moves of running statistics; hpml_checkpoint_load, on every rank, takes "
                              "all but this step and residuals", path);
        last = (const char *)e.data;
    }
    float *row = (float *)hpml_ctx_alloc(d->ctx, bytes, NULL);
    if (!row) return hpml_ctx_status(d->ctx);
    memcpy(row, pending.data, pending.bytes);
    hpmlc_pending(d, row, true);
    hpml_ctx_release(d->ctx, row);
    return HPML_OK;
}

#define HPMLC_DISK 60 /* seconds within which a working disk writes more bytes of a checkpoint */

/* Progress callback of a checkpoint: announces that this rank is busy, because the other ranks wait for it. */
HPMLC_FN void hpmlc_dist_progress(void *user, uint64_t bytes)
{
    const hpml_distributed *d = (const hpml_distributed *)user;
    hpml_comm_busy(d->c, HPMLC_DISK);
    if (d->progress.fn) d->progress.fn(d->progress.user, bytes);
}

/* The checkpoint, with what is carried in it: three arrays side by side, which on a device have a copy meanwhile. */
HPMLC_FN void hpmlc_carried_write(hpml_distributed *d, const char *path, float *rows, const int64_t counts[3])
{
    const char *names[] = { d->d.exact ? "residual.leaves" : "residual.ranks", "residual.stripes", "gradients" };
    const hpmlc_reach *r     = &d->reach;
    size_t             bytes = (size_t)(counts[0] + counts[1] + counts[2]) * sizeof(float);
    float             *at = rows, *copy = NULL;
    if (r->device && bytes > 0) {
        at = copy = (float *)r->device->alloc(r->at, bytes);
        if (copy) r->device->write(r->at, copy, rows, bytes);
        else hpmlc_fail(d->c, HPML_ERR_MEMORY, "distribute save: no %zu bytes on %s", bytes, r->device->name);
    }
    for (int i = 0; i < 3 && at; at += counts[i++])
        if (counts[i] > 0) hpml_trainer_add_state(d->t, names[i], at, counts[i]);
    HPMLC_ZERO(hpml_progress, tell);
    tell.fn = hpmlc_dist_progress, tell.user = d;
    hpml_comm_busy(d->c, HPMLC_DISK);
    d->progress = hpml_ctx_progress(d->ctx, tell);
    hpml_checkpoint_save(d->t, path);
    hpml_ctx_progress(d->ctx, d->progress);
    hpml_comm_busy(d->c, 0);
    for (int i = 2; i >= 0; i--) hpml_trainer_add_state(d->t, names[i], NULL, counts[i]);
    if (copy) r->device->free(r->at, copy, bytes);
}

/* Rank 0 writes for all. */
HPML_API hpml_status hpml_distribute_save(hpml_distributed *d, const char *path)
{
    if (!d || hpmlc_failed(d->c)) return d ? hpml_ctx_status(d->ctx) : HPML_ERR_ARGUMENT;
    bool    pending = d->d.delayed && d->under_way;
    if (d->link && d->link->check(d->link->user) != HPML_OK) return hpml_ctx_status(d->ctx);
    int64_t each, shared, waits = pending ? hpmlc_pending(d, NULL, false) : 0;
    if (pending && hpmlc_dist_settle(d) != HPML_OK) return hpml_ctx_status(d->ctx);
    int           place    = hpmlc_carried_floats(d, &each, &shared);
    int64_t       sums     = each * d->leaf_all + shared;
    const int64_t counts[] = { sums - shared, shared, waits };
    float        *rows     = (float *)hpml_ctx_alloc(d->ctx, (size_t)(sums + waits + 1) * sizeof(float), NULL);
    if (!rows) return hpml_ctx_status(d->ctx);
    if (pending) hpmlc_pending(d, rows + sums, false);
    for (int64_t l = 0; l < d->leaf_count; l++) {
        float *row = rows + (d->leaf_first + l) * each;
        if (place > 0) row[each - 1] = (float)place;
        hpmlc_carried(d, l, row, HPMLC_SAVE);
    }
    hpmlc_carried(d, -1, rows + counts[0], HPMLC_SAVE);
    /* Everybody's rows are zero where others have theirs: the sum is exact. */
    if (hpml_reduce_to(d->c, rows, sums, HPML_ELEMENT_F32, HPML_SUM, 0) == HPML_OK && d->c->rank == 0)
        hpmlc_carried_write(d, path, rows, counts);
    hpml_ctx_release(d->ctx, rows);
    return hpml_barrier(d->c); /* all go on when the file is there; or hear that rank 0 has failed */
}

HPML_API hpml_status hpml_distribute_load(hpml_distributed *d, const char *path)
{
    if (!d || hpmlc_failed(d->c)) return d ? hpml_ctx_status(d->ctx) : HPML_ERR_ARGUMENT;
    hpml_safetensor   workers, shared;
    int64_t           each, all;
    int               place = hpmlc_carried_floats(d, &each, &all);
    hpmlc_dist_jobs(d); /* what is under way is forgotten */
    d->micro = 0;
    hpml_status       status = hpml_checkpoint_load(d->t, path);
    hpml_safetensors *f = status == HPML_OK ? hpml_safetensors_open(d->ctx, path) : NULL;
    if (!f) return hpmlc_failed(d->c), hpml_ctx_status(d->ctx);
    for (int64_t l = 0; l < d->leaf_count; l++) hpmlc_carried(d, l, NULL, HPMLC_CLEAR);
    const size_t bytes = (size_t)each * sizeof(float);
    const char  *own   = d->d.exact ? "state.residual.leaves" : "state.residual.ranks";
    bool         there = hpml_safetensors_find(f, own, &workers);
    int64_t      saved = there && each > 0 && workers.bytes % bytes == 0 ? (int64_t)(workers.bytes / bytes) : 0;
    if (place > 0 && saved > 0) {
        float was = 0;
        if (saved == d->c->size)
            memcpy(&was, (const char *)workers.data + bytes * (size_t)(d->c->rank + 1) - sizeof was, sizeof was);
        if ((int)was != place) saved = 0;
    }
    float *row = saved > 0 ? (float *)hpml_ctx_alloc(d->ctx, bytes, NULL) : NULL;
    for (int64_t w = 0; w < saved && row; w++) { /* contribution w belongs to w modulo as many as there are now */
        int64_t l = w % d->leaf_all - d->leaf_first;
        if (l < 0 || l >= d->leaf_count) continue;
        memcpy(row, (const char *)workers.data + (size_t)w * bytes, bytes);
        /* of a mean over ranks each residual is a share: of fewer ranks a larger one */
        float share = d->d.exact || d->d.sum ? 1 : (float)((double)d->leaf_all / (double)saved);
        for (int64_t i = 0; i < each; i++) row[i] *= share;
        hpmlc_carried(d, l, row, HPMLC_ADD);
    }
    hpml_ctx_release(d->ctx, row);
    if (saved == 0 && each > 0)
        status = hpmlc_fail(d->c, HPML_ERR_FORMAT, "%s: %s%s; save with the codec, and in nodes on the ranks, that you "
                            "load with", path, there ? "its residuals are of other tensors or places" : "it holds no ",
                            there ? "" : own);
    if (status == HPML_OK) status = hpmlc_pending_load(d, f, path);
    there = all > 0 && hpml_safetensors_find(f, "state.residual.stripes", &shared);
    if (status == HPML_OK && there && shared.bytes == (size_t)all * sizeof(float)) {
        float *copy = (float *)hpml_ctx_alloc(d->ctx, shared.bytes, NULL);
        if (copy) memcpy(copy, shared.data, shared.bytes), hpmlc_carried(d, -1, copy, HPMLC_LOAD);
        hpml_ctx_release(d->ctx, copy);
    }
    hpml_safetensors_close(f);
    return status != HPML_OK ? status : hpml_ctx_status(d->ctx);
}

HPML_API hpml_status hpml_distribute_batch(hpml_distributed *d, int64_t global_batch)
{
    if (!d || hpmlc_failed(d->c)) return d ? hpml_ctx_status(d->ctx) : HPML_ERR_ARGUMENT;
    int64_t most = d->c->size * d->batch;
    if (d->d.exact)
        return hpmlc_fail(d->c, HPML_ERR_UNSUPPORTED, "distribute: with exact sums the batch is cut into leaves once");
    if (global_batch < 1 || global_batch > most)
        return hpmlc_fail(d->c, HPML_ERR_ARGUMENT, "distribute: a global batch of %lld; the models' batches hold 1 to "
                          "%lld", (long long)global_batch, (long long)most);
    d->d.global_batch = global_batch;
    return hpml_trainer_set_shard(d->t, d->c->rank, d->c->size, global_batch, 0);
}

HPMLC_FN int hpmlc_trial_step(const hpml_step_info *info HPMLC_UNUSED, void *user)
{
    hpml_distributed *d = (hpml_distributed *)user;
    if (d->micro != 0) return 0; /* the update is still to come */
    d->trial_loss += d->r.loss * (double)d->r.samples;
    d->trial_samples += (double)d->r.samples;
    return 0;
}

/* Trains with one size; its mean loss, infinite if it diverged. */
HPMLC_FN hpml_status hpmlc_trial(hpml_distributed *d, hpml_dataset *data, int64_t batch, int64_t samples, double *loss)
{
    HPMLC_ZERO(hpml_fit_desc, fit);
    HPMLC_ZERO(hpml_loader_desc, loader);
    loader.samples_per_epoch = samples;
    fit.loader = &loader, fit.on_step = hpmlc_trial_step, fit.user = d;
    hpml_status status = hpml_distribute_batch(d, batch);
    d->trial_loss = d->trial_samples = 0, d->trial = true;
    if (status == HPML_OK) status = hpml_trainer_fit(d->t, data, &fit);
    d->trial = false;
    *loss    = status == HPML_OK && d->trial_samples > 0 ? d->trial_loss / d->trial_samples : (double)INFINITY;
    if (!(*loss - *loss == 0)) *loss = (double)INFINITY;
    if (status == HPML_ERR_NONFINITE) hpml_ctx_clear_error(d->ctx), status = HPML_OK; /* the checkpoint comes next */
    return status;
}

HPMLC_FN hpml_status hpmlc_search_check(hpml_distributed *d, const hpml_dataset *data, hpml_batch_search_desc *s)
{
    if (s->min == 0) s->min = d->d.global_batch;
    if (s->max == 0) s->max = d->c->size * d->batch;
    if (s->factor == 0) s->factor = 1.4142135623730951;
    if (s->multiple == 0) s->multiple = 1;
    if (s->samples == 0) s->samples = data ? (data->count + 9) / 10 : 0;
    if (s->slack == 0) s->slack = 0.01;
    s->min = (s->min + s->multiple - 1) / s->multiple * s->multiple;
    if (d->d.exact)
        return hpmlc_fail(d->c, HPML_ERR_UNSUPPORTED, "batch search: exact sums cut the batch into leaves once");
    if (!data || !s->path || s->_begin || s->_end || s->min < 1 || s->max < s->min || !(s->factor > 1) ||
        s->multiple < 1 || s->samples < 1 || !(s->slack > 0))
        return hpmlc_fail(d->c, HPML_ERR_ARGUMENT, "batch search: needs data, a path, sizes %lld to %lld in multiples "
                          "of %lld, a factor above 1 (%g), samples (%lld) and a slack (%g) above 0", (long long)s->min,
                          (long long)s->max, (long long)s->multiple, s->factor, (long long)s->samples, s->slack);
    return HPML_OK;
}

HPML_API int64_t hpml_distribute_search(hpml_distributed *d, hpml_dataset *data, const hpml_batch_search_desc *desc,
                                        hpml_batch_trial *trials, int capacity)
{
    double  first = 0, loss = 0;
    int64_t was, best = -1;
    HPMLC_DESC(hpml_batch_search_desc, s, desc);
    if (!d || hpmlc_failed(d->c) || hpmlc_search_check(d, data, &s) != HPML_OK) return -1;
    was = d->d.global_batch;
    hpml_status       status = hpml_distribute_save(d, s.path);
    hpml_safetensors *f      = status == HPML_OK ? hpml_safetensors_open(d->ctx, s.path) : NULL;
    const char       *place  = f ? hpml_safetensors_meta(f, "hpml.epoch_step") : NULL;
    if (place && strcmp(place, "0") != 0)
        status = hpmlc_fail(d->c, HPML_ERR_STATE, "batch search: %s batches into a pass; search between passes", place);
    hpml_safetensors_close(f);
    for (int i = 0; i < capacity && trials; i++) trials[i].batch = 0, trials[i].loss = 0;
    int64_t next = 0, n = 0;
    double  size = (double)s.min; /* before rounding, whose errors would add up */
    for (int64_t batch = s.min; batch <= s.max && status == HPML_OK; batch = next, n++) {
        status = hpmlc_trial(d, data, batch, s.samples, &loss);
        if (n == 0) first = loss;
        if (n < capacity && trials) trials[n].batch = batch, trials[n].loss = loss;
        if (status == HPML_OK) status = hpml_distribute_load(d, s.path);
        if (!(loss <= first + s.slack * fabs(first)) || !(loss - loss == 0)) break;
        best = batch;
        size = fmin(size * s.factor, 1e15);
        next = (int64_t)(size / (double)s.multiple + 0.5) * s.multiple;
        if (next <= batch) size = (double)(next = batch + s.multiple);
    }
    d->rows = 0;
    hpml_distribute_get(d, NULL, true);
    if (status == HPML_OK && best < 0)
        status = hpmlc_fail(d->c, HPML_ERR_NONFINITE, "batch search: %lld samples a step diverge already; lower the "
                            "learning rate", (long long)s.min);
    if (status == HPML_OK) status = hpml_distribute_batch(d, best);
    else d->d.global_batch = was;
    return status == HPML_OK ? best : -1;
}

// ---------------------------------------------------------------------------------------------------------------------
// >>mix   averaging with neighbours
// ---------------------------------------------------------------------------------------------------------------------

/* Random pairs: ranks in a random order, the first with the second, and so on; an odd one stays alone. */
HPMLC_FN int hpmlc_partner(int p, uint64_t seed, int64_t step, int rank)
{
    int64_t place = 0;
    while (hpml_permute_index(seed, (uint64_t)step, p, place) != rank) place++;
    int64_t other = place ^ 1;
    return other < p ? (int)hpml_permute_index(seed, (uint64_t)step, p, other) : rank;
}

HPMLC_FN bool hpmlc_neighbours(hpml_topology topology, int p, uint64_t seed, int64_t step, int i, int j)
{
    int rim = p - 1;
    if (i == j) return false;
    switch (topology) {
    case HPML_TOPOLOGY_RING: return (i + 1) % p == j || (j + 1) % p == i;
    case HPML_TOPOLOGY_WHEEL: return i == 0 || j == 0 || (rim > 1 && (i % rim == j - 1 || j % rim == i - 1));
    case HPML_TOPOLOGY_PAIRS: return hpmlc_partner(p, seed, step, i) == j;
    case HPML_TOPOLOGY_ALL: return true;
    }
    return false;
}

HPML_API void hpml_mixing_matrix(hpml_topology topology, int p, uint64_t seed, int64_t step, double *w)
{
    for (int i = 0; i < p; i++) { /* at first 1 for neighbours, and each rank's degree in the diagonal */
        double degree = 0;
        for (int j = 0; j < p; j++) degree += w[i * p + j] = hpmlc_neighbours(topology, p, seed, step, i, j);
        w[i * p + i] = degree;
    }
    for (int i = 0; i < p; i++)
        for (int j = 0; j < p; j++)
            if (i != j && w[i * p + j] > 0) w[i * p + j] = 1 / (1 + fmax(w[i * p + i], w[j * p + j]));
    for (int i = 0; i < p; i++) {
        double rest = 1;
        for (int j = 0; j < p; j++) rest -= i != j ? w[i * p + j] : 0;
        w[i * p + i] = rest;
    }
}

/* Everybody sends what it had before; neighbours are added in the order of their distance. */
HPML_API hpml_status hpml_mix(hpml_comm *c, float *data, int64_t n, hpml_topology topology, uint64_t seed, int64_t step)
{
    if (c && ((unsigned)topology > HPML_TOPOLOGY_ALL || (n > 0 && !data)))
        return hpmlc_fail(c, HPML_ERR_ARGUMENT, "mix: topology %d, data %p", (int)topology, (void *)data);
    int tag = hpmlc_enter(c, "mix", n, HPML_ELEMENT_F32, HPML_SUM, "topology", (int)topology);
    if (tag < 0) return c ? hpml_ctx_status(c->ctx) : HPML_ERR_ARGUMENT;
    int     p = c->size, me = c->rank;
    size_t  bytes = (size_t)n * sizeof(float);
    double *w = (double *)hpml_ctx_alloc(c->ctx, sizeof(double) * (size_t)p * (size_t)p, NULL);
    float  *mine = (float *)hpmlc_scratch(c, 2 * bytes + 8), *theirs = mine + n;
    if (!w || !mine) return hpml_ctx_status(c->ctx);
    hpml_mixing_matrix(topology, p, seed, step, w);
    if (n > 0) memcpy(mine, data, bytes);
    for (int64_t i = 0; i < n; i++) data[i] *= (float)w[me * p + me];
    hpml_status status = HPML_OK;
    for (int k = 1; k < p && status == HPML_OK; k++) {
        int  to = (me + k) % p, from = (me - k + p) % p;
        bool sends = w[me * p + to] > 0, takes = w[me * p + from] > 0;
        c->round = k;
        status = hpmlc_round(c, tag, sends ? to : -1, (const char *)mine, bytes, takes ? from : -1, (char *)theirs,
                             bytes, NULL);
        for (int64_t i = 0; takes && status == HPML_OK && i < n; i++) data[i] += (float)w[me * p + from] * theirs[i];
    }
    hpml_ctx_release(c->ctx, w);
    return hpmlc_leave(c, status);
}

// ---------------------------------------------------------------------------------------------------------------------
// >>timeline   one timeline for all ranks
// ---------------------------------------------------------------------------------------------------------------------

/* How far this rank's clock is ahead of rank 0's: rank 0 answers with its time; the answer of the quickest exchange was
   made in the middle of it, give or take half of what it took. */
HPMLC_FN double hpmlc_clock_ahead(hpml_comm *c)
{
    double best = 1e300, ahead = 0, theirs = 0;
    for (int r = 1; r < c->size; r++)
        for (int i = 0; i < 8 && (c->rank == 0 || c->rank == r); i++) {
            double start = hpml_comm_now(c), end;
            if (c->rank == 0) hpml_recv(c, r, 0, &theirs, sizeof theirs), theirs = hpml_comm_now(c);
            hpml_send(c, c->rank == 0 ? r : 0, 0, &theirs, sizeof theirs);
            if (c->rank > 0) hpml_recv(c, 0, 0, &theirs, sizeof theirs);
            end = hpml_comm_now(c);
            if (c->rank > 0 && end - start < best) best = end - start, ahead = 0.5 * (start + end) - theirs;
        }
    return ahead;
}

HPML_API hpml_status hpml_comm_trace_start(hpml_comm *c, const hpml_trace_desc *desc)
{
    HPMLC_DESC(hpml_trace_desc, d, desc);
    if (hpmlc_failed(c)) return c ? hpml_ctx_status(c->ctx) : HPML_ERR_ARGUMENT;
    double ahead = hpmlc_clock_ahead(c), origin = hpml_comm_now(c);
    if (hpml_broadcast(c, &origin, sizeof origin, 0) != HPML_OK) return hpml_ctx_status(c->ctx);
    d.rank = c->rank, d.origin = origin + ahead;
    if (d.origin == 0) d.origin = 1e-12; /* virtual time begins at 0, which would mean now */
    return hpml_trace_start(c->ctx, &d);
}

/* The whole of a file, with a zero behind it; NULL when it cannot be read. */
HPMLC_FN char *hpmlc_slurp(hpml_ctx *ctx, const char *path, int64_t *size)
{
    FILE *f    = fopen(path, "rb");
    char *text = NULL;
    long  end  = f && fseek(f, 0, SEEK_END) == 0 ? ftell(f) : -1;
    if (end >= 0) text = (char *)hpml_ctx_alloc(ctx, (size_t)end + 1, NULL);
    if (text && (fseek(f, 0, SEEK_SET) != 0 || fread(text, 1, (size_t)end, f) != (size_t)end)) {
        hpml_ctx_release(ctx, text);
        text = NULL;
    }
    if (f) fclose(f);
    *size = end;
    return text;
}

/* Sets time 0 of every rank's timeline to the earliest event of all ranks. */
HPMLC_FN hpml_status hpmlc_trace_begin(hpml_comm *c)
{
    double      first  = -hpml_trace_first(c->ctx);
    hpml_status status = hpmlc_reduce_unseen(c, &first, 1, HPML_ELEMENT_F64);
    if (status == HPML_OK) hpml_trace_shift(c->ctx, -first);
    return status;
}

/* Each rank writes its own file beside `path`; rank 0 strings the events together, with commas between. */
HPML_API hpml_status hpml_comm_trace_save(hpml_comm *c, const char *path)
{
    char    own[1024];
    int64_t size = 0;
    FILE   *f = NULL;
    if (hpmlc_failed(c)) return c ? hpml_ctx_status(c->ctx) : HPML_ERR_ARGUMENT;
    hpmlc_background_drain(c);
    if (hpmlc_trace_begin(c) != HPML_OK) return hpml_ctx_status(c->ctx);
    snprintf(own, sizeof own, "%s.rank%d", path, c->rank);
    if (hpml_trace_save(c->ctx, own) != HPML_OK) return hpmlc_failed(c), hpml_ctx_status(c->ctx);
    char *text = hpmlc_slurp(c->ctx, own, &size);
    remove(own);
    if (!text || size < 5) return hpmlc_fail(c, HPML_ERR_READ, "trace \"%s\": cannot be read back", own);
    if (c->rank > 0) {
        hpml_status status = hpml_send(c, 0, 1, &size, sizeof size);
        if (status == HPML_OK) status = hpml_send(c, 0, 1, text, (size_t)size);
        hpml_ctx_release(c->ctx, text);
        return status;
    }
    f = fopen(path, "wb");
    bool good = f && fwrite(text, 1, (size_t)size - 3, f) == (size_t)size - 3; /* without the last bracket */
    hpml_ctx_release(c->ctx, text);
    for (int r = 1; r < c->size; r++) {
        if (hpml_recv(c, r, 1, &size, sizeof size) != HPML_OK) break;
        text = (char *)hpml_ctx_alloc(c->ctx, (size_t)size, NULL);
        if (!text || hpml_recv(c, r, 1, text, (size_t)size) != HPML_OK) break;
        good = good && fprintf(f, ",\n") > 0 && fwrite(text + 2, 1, (size_t)size - 5, f) == (size_t)size - 5;
        hpml_ctx_release(c->ctx, text);
    }
    good = good && fprintf(f, "\n]\n") > 0;
    if (f && fclose(f) != 0) good = false;
    if (!good && hpml_ctx_status(c->ctx) == HPML_OK)
        return hpmlc_fail(c, HPML_ERR_WRITE, "trace \"%s\": cannot be written", path);
    return hpml_ctx_status(c->ctx);
}

// ---------------------------------------------------------------------------------------------------------------------
// >>simulate   moves in virtual time, by a queue of ranks
// ---------------------------------------------------------------------------------------------------------------------

/* Every rank has a clock. Ranks that want to send wait in a queue by (clock, rank), as threads do in >>clock, so
   messages enter the cards in the same order and the times are the same. That costs some 50 to 100 ns a message. Two
   shapes have p^2 messages and need less, because the order of turns does not matter in them:
     ring         each card serves one pair: round by round, without a queue (some ns a message). Where all nodes are
                  alike, what happens on one happens on all: the ranks of one node stand for all
     all to all   the ranks of one node stand for all likewise
   Tests compare both with the queue. */

typedef struct hpmlc_sim_event {
    double time;
    int    rank;
    int    run;  /* in the heap: the run whose first event this is */
} hpmlc_sim_event;

typedef struct hpmlc_sim_letter { /* has been sent to a rank that waits for something else */
    int    from, next;
    double arrival;
} hpmlc_sim_letter;

typedef struct hpmlc_sim_rank { /* what the queue keeps of a rank, side by side because turns come in any order */
    int     phase, round;
    int     to, from;    /* of its move, -1: none */
    int64_t bytes;       /* that the move sends */
    int     want;        /* the rank whose message is awaited, or -1 */
    int     first, last; /* letters, -1: none */
    int     next;        /* the next rank of its run, -1: none */
} hpmlc_sim_rank;

typedef enum hpmlc_sim_kind { HPMLC_SIM_ALLREDUCE, HPMLC_SIM_ALL_TO_ALL, HPMLC_SIM_ALLGATHER } hpmlc_sim_kind;

typedef struct hpmlc_sim {
    hpml_comm         layout;             /* what a communicator knows of them */
    int               p, nodes, per_node; /* per_node: 0 where nodes are not all alike */
    bool              mixed;              /* neighbours in a ring are on different nodes, several on each */
    bool              plain;              /* no short cuts; for tests */
    double            latency[2], rate[2]; /* inside, between: seconds, seconds a byte */
    int32_t          *node;               /* (p) */
    double           *clock;              /* (p) */
    double           *out, *in;           /* (p + nodes) when cards are free: of ranks inside their node, of nodes */
    int64_t          *bytes, *messages;   /* (p) sent */
    int64_t           between;            /* bytes between nodes */
    double           *work;               /* (4 p) scratch */
    /* of the queue */
    hpmlc_sim_kind    kind;
    int64_t           n;
    size_t            size;               /* of an element */
    hpmlc_phase      *phase;              /* (HPMLC_PHASES, p) */
    int32_t          *phases;             /* (p) how many of them a rank has; in an all to all: scratch */
    hpmlc_sim_rank   *rank;               /* (p) */
    hpmlc_sim_event  *run;                /* (p) the last event of each run, the latest first */
    hpmlc_sim_event  *heap;               /* (p) the first event of each run, the earliest at the top */
    int               runs;
    hpmlc_sim_letter *letter;
    int               letters, free_letter; /* room, first of the unused */
    bool              failed;             /* out of memory */
} hpmlc_sim;

HPMLC_FN void hpmlc_sim_close(hpmlc_sim *s)
{
    free(s->node), free(s->clock), free(s->bytes), free(s->phase), free(s->rank), free(s->run), free(s->letter);
}

HPMLC_FN bool hpmlc_sim_open(hpmlc_sim *s, int p, const hpml_network *net)
{
    hpml_comm *c = &s->layout;
    size_t     n = (size_t)p;
    memset(s, 0, sizeof *s);
    s->p           = p;
    s->nodes       = hpmlc_network_nodes(net, p);
    size_t cards   = n + (size_t)s->nodes;
    s->latency[0]  = net->inside.latency, s->latency[1] = net->between.latency;
    s->rate[0]     = net->inside.bandwidth > 0 ? 1 / net->inside.bandwidth : 0;
    s->rate[1]     = net->between.bandwidth > 0 ? 1 / net->between.bandwidth : 0;
    s->free_letter = -1;
    s->node        = (int32_t *)calloc(2 * n, sizeof(int32_t)); /* with phases */
    s->clock       = (double *)calloc(5 * n + 2 * cards, sizeof(double)); /* with out, in, work */
    s->bytes       = (int64_t *)calloc(2 * n, sizeof(int64_t));
    s->phase       = (hpmlc_phase *)calloc(HPMLC_PHASES * n, sizeof(hpmlc_phase));
    s->rank        = (hpmlc_sim_rank *)calloc(n, sizeof(hpmlc_sim_rank));
    s->run         = (hpmlc_sim_event *)calloc(2 * n, sizeof(hpmlc_sim_event)); /* with heap */
    s->failed      = !s->node || !s->clock || !s->bytes || !s->phase || !s->rank || !s->run;
    if (s->failed) return false;
    s->out   = s->clock + n, s->in = s->out + cards, s->work = s->in + cards, s->messages = s->bytes + n;
    s->phases = s->node + n, s->heap = s->run + n;
    for (int r = 0; r < p; r++) s->node[r] = hpmlc_network_node(net, s->nodes, r);
    c->size = p, c->node = s->node, c->agent = (hpmlc_agent *)(void *)s; /* only tells AUTO that time is virtual */
    hpmlc_comm_links(c, net, s->nodes);
    hpmlc_comm_layout(c);
    s->mixed    = c->spread || c->per_node == 0;
    s->per_node = c->per_node > 0 && p % c->per_node == 0 ? c->per_node : 0;
    return true;
}

/* Who stands for a rank where nodes are all alike: the one in the same place on the first node; on one node rank 0. */
HPMLC_FN int hpmlc_sim_stand(const hpmlc_sim *s, int rank)
{
    return s->nodes == 1 ? 0 : s->layout.spread ? rank - s->node[rank] : rank % s->per_node;
}

/* The cards of a message: its own ranks' inside a node, else the nodes'. */
HPMLC_FN int hpmlc_sim_card(const hpmlc_sim *s, int rank, bool far) { return far ? s->p + s->node[rank] : rank; }

/* When a message that is sent now will be there: the rule of hpmlc_arrival. But in an all to all as many bytes enter a
   node as leave it, all the time; so the card coming in is not counted. (Reserved in the order of sending, it would
   hold up the card going out, and that one the next: a traffic jam that no switch has.) */
HPMLC_FN double hpmlc_sim_send(hpmlc_sim *s, int from, int to, int64_t bytes)
{
    bool    far  = s->node[from] != s->node[to];
    double  busy = (double)bytes * s->rate[far], start = s->clock[from];
    double *out = &s->out[hpmlc_sim_card(s, from, far)], *in = &s->in[hpmlc_sim_card(s, to, far)];
    s->bytes[from] += bytes;
    s->messages[from]++;
    if (far) s->between += bytes;
    if (busy <= 0 && s->latency[far] <= 0) return start;
    if (start < *out) start = *out;
    *out = start + busy;
    if (far && s->kind == HPMLC_SIM_ALL_TO_ALL) in = out;
    else if (start < *in) start = *in;
    *in = start + busy;
    return start + busy + s->latency[far];
}

HPMLC_FN bool hpmlc_sim_before(hpmlc_sim_event a, hpmlc_sim_event b)
{
    return a.time < b.time || (a.time <= b.time && a.rank < b.rank);
}

/* The queue is made of runs: lists of ranks in the order of their turns. A rank goes behind the latest of the runs'
   ends that is before it, else it begins a run; so the ends stay sorted, and a run that gets empty is the one that
   ends earliest, the last. Ranks that do the same at the same time need few runs, whose ends stay in the cache; a heap
   of all ranks misses it at every step. */
HPMLC_FN void hpmlc_sim_push(hpmlc_sim *s, int rank)
{
    hpmlc_sim_event e;
    int             low = 0, high = s->runs;
    e.time = s->clock[rank], e.rank = rank;
    s->rank[rank].next = -1;
    while (low < high) {
        int middle = (low + high) / 2;
        if (hpmlc_sim_before(e, s->run[middle])) low = middle + 1;
        else high = middle;
    }
    e.run = low;
    if (low < s->runs) s->rank[s->run[low].rank].next = rank;
    else {
        int i = s->runs++;
        for (; i > 0 && hpmlc_sim_before(e, s->heap[(i - 1) / 2]); i = (i - 1) / 2) s->heap[i] = s->heap[(i - 1) / 2];
        s->heap[i] = e;
    }
    s->run[low] = e;
}

HPMLC_FN int hpmlc_sim_pop(hpmlc_sim *s)
{
    hpmlc_sim_event e = s->heap[0];
    int             top = e.rank, next = s->rank[top].next, i = 0, child;
    if (next < 0) e = s->heap[--s->runs];
    else e.time = s->clock[next], e.rank = next;
    while ((child = 2 * i + 1) < s->runs) {
        if (child + 1 < s->runs && hpmlc_sim_before(s->heap[child + 1], s->heap[child])) child++;
        if (!hpmlc_sim_before(s->heap[child], e)) break;
        s->heap[i] = s->heap[child];
        i          = child;
    }
    s->heap[i] = e;
    return top;
}

HPMLC_FN int64_t hpmlc_sim_block(const hpmlc_sim *s, int i)
{
    return hpml_block(s->n, s->p, i + 1) - hpml_block(s->n, s->p, i);
}

/* Finds the current move of rank r; false when rank r has none left. */
HPMLC_FN bool hpmlc_sim_move(hpmlc_sim *s, int r)
{
    hpmlc_sim_rank *q = &s->rank[r];
    if (s->kind == HPMLC_SIM_ALL_TO_ALL) { /* in round k with the rank k further on, as hpmlc_blocks */
        int k = q->round + 1;
        if (k >= s->p) return false;
        q->to = (r + k) % s->p, q->from = (r + s->p - k) % s->p;
        q->bytes = hpmlc_sim_block(s, q->to) * (int64_t)s->size;
        return true;
    }
    for (; q->phase < s->phases[r]; q->phase++, q->round = 0) {
        const hpmlc_phase *f = &s->phase[(size_t)q->phase * (size_t)s->p + (size_t)r];
        bool               star = (f->kind == HPMLC_STAR_UP || f->kind == HPMLC_STAR_DOWN) && f->team.me > 0;
        hpml_move          m;
        if (star && q->round < f->team.me - 1) q->round = f->team.me - 1; /* its only turn, of p - 1 rounds */
        if (q->round >= (star ? f->team.me : f->rounds)) continue;
        hpmlc_move_of(f, q->round, &m);
        q->to = m.to, q->from = m.from, q->bytes = m.out_count * (int64_t)s->size;
        return true;
    }
    return false;
}

/* Takes the letter from this rank out of r's box. */
HPMLC_FN bool hpmlc_sim_take(hpmlc_sim *s, int r, int from)
{
    hpmlc_sim_rank *q = &s->rank[r];
    for (int i = q->first, before = -1; i >= 0; before = i, i = s->letter[i].next) {
        hpmlc_sim_letter *l = &s->letter[i];
        if (l->from != from) continue;
        if (s->clock[r] < l->arrival) s->clock[r] = l->arrival;
        if (before < 0) q->first = l->next;
        else s->letter[before].next = l->next;
        if (q->last == i) q->last = before;
        l->next        = s->free_letter;
        s->free_letter = i;
        return true;
    }
    return false;
}

HPMLC_FN void hpmlc_sim_keep(hpmlc_sim *s, int r, int from, double arrival)
{
    if (s->free_letter < 0) {
        int               room = s->letters ? 2 * s->letters : 1024;
        hpmlc_sim_letter *more = (hpmlc_sim_letter *)realloc(s->letter, sizeof *more * (size_t)room);
        if (!more) { s->failed = true; return; }
        s->letter = more;
        for (int i = room - 1; i >= s->letters; i--) more[i].next = s->free_letter, s->free_letter = i;
        s->letters = room;
    }
    hpmlc_sim_rank *q = &s->rank[r];
    int             i = s->free_letter;
    s->free_letter = s->letter[i].next;
    s->letter[i].from = from, s->letter[i].arrival = arrival, s->letter[i].next = -1;
    if (q->first < 0) q->first = i;
    else s->letter[q->last].next = i;
    q->last = i;
}

/* Receives what is there, round by round, until rank r wants to send (then it queues), must wait, or is through. sent:
   the message of this round is on its way. */
HPMLC_FN void hpmlc_sim_go_on(hpmlc_sim *s, int r, bool sent)
{
    hpmlc_sim_rank *q = &s->rank[r];
    for (; sent || hpmlc_sim_move(s, r); q->round++, sent = false) {
        if (q->to >= 0 && !sent) {
            hpmlc_sim_push(s, r);
            return;
        }
        if (q->from >= 0 && !hpmlc_sim_take(s, r, q->from)) {
            q->want = q->from;
            return;
        }
    }
}

HPMLC_FN void hpmlc_sim_queue(hpmlc_sim *s)
{
    s->runs = 0;
    for (int r = 0; r < s->p; r++) {
        hpmlc_sim_rank *q = &s->rank[r];
        q->phase = q->round = 0;
        q->want = q->first = q->last = -1;
    }
    for (int r = 0; r < s->p; r++) hpmlc_sim_go_on(s, r, false);
    while (s->runs > 0 && !s->failed) {
        int             r = hpmlc_sim_pop(s), to = s->rank[r].to;
        double          arrival = hpmlc_sim_send(s, r, to, s->rank[r].bytes);
        hpmlc_sim_rank *q = &s->rank[to];
        if (q->want == r) { /* is waiting for just this */
            if (s->clock[to] < arrival) s->clock[to] = arrival;
            q->want = -1;
            q->round++;
            hpmlc_sim_go_on(s, to, false);
        } else hpmlc_sim_keep(s, to, r, arrival);
        hpmlc_sim_go_on(s, r, true);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// >>simulate-fast   rings and all to all in virtual time without a queue
// ---------------------------------------------------------------------------------------------------------------------

/* How many ranks stand for all of them in a ring: 1, those of a node, or p. Blocks must be equal, or so many that the
   longest may stand for all (the time is an upper bound then). free_at: (p) when the link from i to i + 1 is free. */
HPMLC_FN int hpmlc_sim_period(const hpmlc_sim *s, int64_t n, const double *free_at)
{
    int q = s->nodes == 1 || s->nodes == s->p ? 1 : s->per_node > 0 && !s->mixed ? s->per_node : s->p;
    if (n % s->p != 0 && s->p <= 256) return s->p;
    for (int i = q; i < s->p; i++)
        if (s->clock[i] != s->clock[i % q] || free_at[i] != free_at[i % q]) return s->p;
    return q;
}

/* A ring of all ranks in which no two pairs share a card. rounds: 2 (p - 1), or p - 1 for the allgather. In round k
   rank i sends block i - 1 - k; in the allgather i - k. */
HPMLC_FN void hpmlc_sim_ring(hpmlc_sim *s, int rounds)
{
    int     p = s->p, all = rounds == p - 1 ? 0 : 1;
    double *free_at = s->work, *block = free_at + p, *arrival = block + 2 * p; /* (p), (2 p) twice the same, (p) */
    for (int i = 0; i < p; i++) {
        int     next = (i + 1) % p, far = s->node[i] != s->node[next];
        double  out = s->out[hpmlc_sim_card(s, i, far)], in = s->in[hpmlc_sim_card(s, next, far)];
        int64_t mine = hpmlc_sim_block(s, i), kept = hpmlc_sim_block(s, next); /* not sent in the first, second half */
        int64_t sent = ((all ? 2 * s->n - mine : s->n) - kept) * (int64_t)s->size;
        free_at[i] = out > in ? out : in;
        block[i] = block[i + p] = (double)(mine * (int64_t)s->size);
        s->bytes[i] += sent, s->messages[i] += rounds, s->between += far ? sent : 0;
    }
    int q = hpmlc_sim_period(s, s->n, free_at);
    if (q < p)
        for (int i = 0; i < 2 * p; i++) block[i] = (double)((s->n + p - 1) / p * (int64_t)s->size);
    for (int k = 0; k < rounds; k++) {
        const double *b = block + (2 * p - k - all) % p;
        for (int i = 0; i < q; i++) {
            int    next = i + 1 == q ? 0 : i + 1, far = s->node[i] != s->node[i + 1 == p ? 0 : i + 1];
            double start = s->clock[i] > free_at[i] ? s->clock[i] : free_at[i];
            free_at[i]    = start + b[i] * s->rate[far];
            arrival[next] = free_at[i] + s->latency[far];
        }
        for (int i = 0; i < q; i++)
            if (s->clock[i] < arrival[i]) s->clock[i] = arrival[i];
    }
    for (int i = p - 1; i >= 0; i--) {
        int next = (i + 1) % p, far = s->node[i] != s->node[next];
        s->out[hpmlc_sim_card(s, i, far)] = s->in[hpmlc_sim_card(s, next, far)] = free_at[i % q];
        s->clock[i] = s->clock[i % q];
    }
}

/* True when all nodes are in the same state: what one does, all do. */
HPMLC_FN bool hpmlc_sim_alike(const hpmlc_sim *s)
{
    if (s->per_node == 0) return false;
    for (int r = 0; r < s->p; r++) {
        int i = hpmlc_sim_stand(s, r);
        if (s->clock[r] != s->clock[i] || s->out[r] != s->out[i] || s->in[r] != s->in[i]) return false;
    }
    for (int i = s->p + 1; i < s->p + s->nodes; i++)
        if (s->out[i] != s->out[s->p]) return false;
    return true;
}

/* Nodes alike. Blocks are taken to be as long as the longest. As in hpmlc_sim_send, the card coming in is not waited
   for: messages come in one by one, as they leave. */
HPMLC_FN void hpmlc_sim_all_to_all(hpmlc_sim *s)
{
    int     p = s->p, m = s->nodes == 1 ? 1 : s->per_node;
    double *arrival = s->work, busy = (double)((s->n + p - 1) / p * (int64_t)s->size); /* (p) */
    double  card = s->out[p];
    int32_t *order = s->phases; /* (m) ranks that represent all others, sorted by clock */
    for (int j = 0; j < m; j++) order[j] = s->layout.spread ? j * s->nodes : j;
    for (int k = 1; k < p; k++) {
        for (int j = 1; j < m; j++) { /* by insertion: there is little to move */
            int r = order[j], i = j;
            for (; i > 0 && s->clock[order[i - 1]] > s->clock[r]; i--) order[i] = order[i - 1];
            order[i] = r;
        }
        for (int j = 0; j < m; j++) {
            int     r = order[j], to = (r + k) % p, at = hpmlc_sim_stand(s, to);
            bool    far = s->node[r] != s->node[to];
            double *out = far ? &card : &s->out[r], *in = far ? &card : &s->in[at];
            double  start = s->clock[r];
            if (start < *out) start = *out;
            if (start < *in) start = *in;
            *out = *in = start + busy * s->rate[far];
            arrival[at] = *out + s->latency[far];
        }
        for (int j = 0; j < m; j++)
            if (s->clock[order[j]] < arrival[order[j]]) s->clock[order[j]] = arrival[order[j]];
    }
    for (int i = 0; i < s->nodes; i++) s->out[p + i] = card;
    for (int r = 0; r < p; r++) {
        int     i = hpmlc_sim_stand(s, r);
        int64_t near_part = 0;
        s->clock[r] = s->clock[i], s->out[r] = s->out[i], s->in[r] = s->in[i];
        for (int j = 0; j < s->per_node; j++) {
            int to = s->layout.spread ? s->node[r] + j * s->nodes : r - r % s->per_node + j;
            near_part += hpmlc_sim_block(s, to);
        }
        s->messages[r] += p - 1;
        s->bytes[r] += (s->n - hpmlc_sim_block(s, r)) * (int64_t)s->size;
        s->between += (s->n - near_part) * (int64_t)s->size;
    }
}

/* One collective of n elements, from the ranks' clocks on. */
HPMLC_FN bool hpmlc_sim_play(hpmlc_sim *s, hpmlc_sim_kind kind, hpml_algorithm a, int64_t n, size_t size)
{
    int p = s->p;
    if (p == 1) return true;
    s->kind = kind, s->n = n, s->size = size;
    if (a == HPML_AUTO && kind == HPMLC_SIM_ALLREDUCE) a = hpml_comm_choose(&s->layout, n * (int64_t)size);
    for (int r = 0; r < p && kind != HPMLC_SIM_ALL_TO_ALL; r++) {
        hpmlc_plan plan;
        plan.count = 0, plan.level = NULL;
        if (kind == HPMLC_SIM_ALLREDUCE) hpmlc_plan_make(&plan, a, p, s->layout.per_node, s->layout.spread, r, n);
        else hpmlc_plan_add(&plan, HPMLC_RING_GATHER, hpmlc_everyone(p, r, 0), 0, n);
        s->phases[r] = plan.count;
        for (int i = 0; i < plan.count; i++) s->phase[(size_t)i * (size_t)p + (size_t)r] = plan.phase[i];
    }
    const hpmlc_phase *f = &s->phase[0];
    bool ring = f->team.size == p && (f->kind == HPMLC_RING_SCATTER || f->kind == HPMLC_RING_GATHER);
    if (kind == HPMLC_SIM_ALL_TO_ALL && !s->plain && hpmlc_sim_alike(s)) hpmlc_sim_all_to_all(s);
    else if (kind != HPMLC_SIM_ALL_TO_ALL && !s->plain && ring && !s->mixed)
        hpmlc_sim_ring(s, kind == HPMLC_SIM_ALLREDUCE ? 2 * (p - 1) : p - 1);
    else hpmlc_sim_queue(s);
    return !s->failed;
}

HPMLC_FN double hpmlc_sim_latest(const hpmlc_sim *s)
{
    double t = s->clock[0];
    for (int r = 1; r < s->p; r++) t = fmax(t, s->clock[r]);
    return t;
}

// ---------------------------------------------------------------------------------------------------------------------
// >>simulate-step   a step of training in virtual time
// ---------------------------------------------------------------------------------------------------------------------

HPMLC_FN hpml_status hpmlc_sim_check_network(hpml_algorithm a, int p, const hpml_network *net, const hpmlc_text *to)
{
    const hpml_status wrong = HPML_ERR_ARGUMENT;
    if (p < 1 || p > 65536) return hpmlc_say_no(to, wrong, "simulate: %d ranks; from 1 to 65536 are possible", p);
    if ((unsigned)a >= HPML_ALGORITHM_COUNT)
        return hpmlc_say_no(to, wrong, "simulate: there is no algorithm %d", (int)a);
    if (a == HPML_NATIVE)
        return hpmlc_say_no(to, HPML_ERR_UNSUPPORTED, "simulate: how an MPI's own allreduce works is not known; choose "
                            "another algorithm");
    if (p > 1 && !net->node && net->ranks_per_node == 0 && (net->between.latency > 0 || net->between.bandwidth > 0))
        return hpmlc_say_no(to, wrong, "simulate: network.between is given but ranks_per_node is 0, which puts all "
                            "ranks on one node; set ranks_per_node (1: each rank a node of its own)");
    return hpmlc_network_check("simulate", net, p, true, to);
}

HPMLC_FN hpml_status hpmlc_sim_check(const hpml_simulate_desc *d, const hpmlc_text *to)
{
    const hpml_status wrong = HPML_ERR_ARGUMENT;
    int64_t           total = 0, limit = (int64_t)1 << 50;
    if (!d || d->_begin || d->_end)
        return hpmlc_say_no(to, wrong, "simulate%s", d ? " desc: canary is not zero; zero the struct before you set "
                            "fields" : ": no desc given");
    hpml_status status = hpmlc_sim_check_network(d->packed ? HPML_RING : d->algorithm, d->ranks, &d->network, to);
    if (status != HPML_OK) return status;
    if (d->layers < 1 || !d->backward_s || !d->elements)
        return hpmlc_say_no(to, wrong, "simulate: %d layers, backward_s %s, elements %s; at least one layer and both "
                            "are needed", d->layers, d->backward_s ? "given" : "NULL", d->elements ? "given" : "NULL");
    if (hpml_element_size(d->element) == 0 || !HPMLC_GOOD(d->update_s) || !HPMLC_GOOD(d->codec_s_per_byte))
        return hpmlc_say_no(to, wrong, "simulate: element %d, update_s %g, codec_s_per_byte %g: out of range",
                            (int)d->element, d->update_s, d->codec_s_per_byte);
    for (int i = 0; i < d->layers; i++) {
        double  forward = d->forward_s ? d->forward_s[i] : 0, backward = d->backward_s[i];
        int64_t packed  = d->packed ? d->packed[i] : 0, n = d->elements[i];
        if (!HPMLC_GOOD(forward) || !HPMLC_GOOD(backward) || n < 0 || packed < 0)
            return hpmlc_say_no(to, wrong, "simulate: layer %d: forward %g s, backward %g s, %lld elements, packed in "
                                "%lld bytes: a negative number or NaN", i, forward, backward, (long long)n,
                                (long long)packed);
        total = n < limit - total && packed < limit ? total + n : limit;
        if (total >= limit) return hpmlc_say_no(to, wrong, "simulate: layer %d: more than 2^50 elements in all", i);
    }
    return HPML_OK;
}

/* Exchanges one bucket, which rank r has at time ready * slow[r]. False: out of memory. */
HPMLC_FN bool hpmlc_sim_bucket(hpmlc_sim *s, const hpml_simulate_desc *d, double ready, int64_t n, int64_t packed,
                               double *comm)
{
    double codec = d->codec_s_per_byte * (double)n * 4, start = 0;
    bool   good;
    if (s->p == 1) return true;
    for (int r = 0; r < s->p; r++) {
        double slow = d->network.slow ? d->network.slow[r] : 1;
        if (s->clock[r] < ready * slow) s->clock[r] = ready * slow;
        if (start < s->clock[r]) start = s->clock[r];
        s->clock[r] += codec * slow;
    }
    if (d->packed)
        good = hpmlc_sim_play(s, HPMLC_SIM_ALL_TO_ALL, HPML_AUTO, packed, 1) &&
               hpmlc_sim_play(s, HPMLC_SIM_ALLGATHER, HPML_AUTO, packed, 1);
    else good = hpmlc_sim_play(s, HPMLC_SIM_ALLREDUCE, d->algorithm, n, hpml_element_size(d->element));
    *comm += hpmlc_sim_latest(s) - start;
    return good;
}

HPMLC_FN bool hpmlc_sim_step(hpmlc_sim *s, const hpml_simulate_desc *d, hpml_simulation *out)
{
    double   now = 0, slowest = d->network.slow ? 0 : 1, whole = 0;
    int64_t  n = 0, packed = 0;
    double   limit = d->bucket_bytes == 0 ? 25 * 1048576. : (double)d->bucket_bytes;
    for (int i = 0; i < d->layers; i++) now += d->forward_s ? d->forward_s[i] : 0, whole += d->backward_s[i];
    whole += now;
    for (int i = d->layers - 1; i >= 0; i--) {
        now += d->backward_s[i];
        n += d->elements[i], packed += d->packed ? d->packed[i] : 0;
        if (n == 0 || ((double)n * 4 < limit && i > 0)) continue;
        double ready = d->delayed ? 0 : d->no_overlap ? whole : now;
        if (!hpmlc_sim_bucket(s, d, ready, n, packed, &out->comm_s)) return false;
        out->buckets++;
        n = packed = 0;
    }
    for (int r = 0; r < s->p; r++) {
        double slow = d->network.slow ? d->network.slow[r] : 1, end = fmax(whole * slow, s->clock[r]);
        if (out->step_s < end + d->update_s * slow) out->step_s = end + d->update_s * slow;
        if (slowest < slow) slowest = slow;
        if (out->bytes_per_rank < s->bytes[r]) out->bytes_per_rank = s->bytes[r];
        if (out->messages < s->messages[r]) out->messages = s->messages[r];
    }
    out->between_bytes = s->between;
    out->compute_s     = whole + d->update_s;
    out->straggle_s    = slowest > 1 ? (slowest - 1) * out->compute_s : 0;
    out->exposed_s     = fmax(0, out->step_s - out->compute_s - out->straggle_s);
    out->efficiency = out->step_s > 0 ? out->compute_s / out->step_s : 1;
    return true;
}

HPML_API hpml_status hpml_simulate(const hpml_simulate_desc *desc, hpml_simulation *out, char *error, size_t size)
{
    hpmlc_sim        s;
    const hpmlc_text to = { error, size };
    HPMLC_ZERO(hpml_simulation, result);
    hpmlc_say_no(&to, HPML_OK, "%s", "");
    if (!out) return hpmlc_say_no(&to, HPML_ERR_ARGUMENT, "simulate: nowhere to put the result");
    *out = result;
    hpml_status status = hpmlc_sim_check(desc, &to);
    if (status != HPML_OK) return status;
    if (!hpmlc_sim_open(&s, desc->ranks, &desc->network) || !hpmlc_sim_step(&s, desc, &result))
        status = hpmlc_say_no(&to, HPML_ERR_MEMORY, "simulate: no memory for %d ranks", desc->ranks);
    else *out = result;
    hpmlc_sim_close(&s);
    return status;
}

HPML_API int hpml_simulate_text(const hpml_simulation *s, char *buffer, size_t size)
{
    char low[128];
    if (!s) return 0;
    return snprintf(buffer, size, "%d buckets: step %.4g ms = compute %.4g + stragglers %.4g + exposed %.4g; exchange "
                    "%.4g ms; efficiency %.0f %%%s", s->buckets, 1e3 * s->step_s, 1e3 * s->compute_s,
                    1e3 * s->straggle_s, 1e3 * s->exposed_s, 1e3 * s->comm_s, 100 * s->efficiency,
                    hpmlc_low(s->efficiency, low));
}

HPML_API double hpml_simulate_allreduce(hpml_algorithm a, int32_t ranks, const hpml_network *network, int64_t bytes)
{
    hpmlc_sim s;
    double    seconds = -1;
    if (!network || bytes < 0 || hpmlc_sim_check_network(a, ranks, network, NULL) != HPML_OK) return -1;
    size_t size = bytes % 4 == 0 ? 4 : 1;
    if (hpmlc_sim_open(&s, ranks, network) && hpmlc_sim_play(&s, HPMLC_SIM_ALLREDUCE, a, bytes / (int64_t)size, size))
        seconds = hpmlc_sim_latest(&s);
    hpmlc_sim_close(&s);
    return seconds;
}

HPML_API double hpml_amdahl(double serial, double ranks) { return 1 / (serial + (1 - serial) / ranks); }

HPML_API double hpml_optimal_ranks(double divisible_s, double fixed_s, double comm_s)
{
    return comm_s > fixed_s ? divisible_s / (comm_s - fixed_s) : HUGE_VAL;
}

#ifdef __cplusplus
} /* extern "C" */
#endif
HPMLI_COMPILE_FAST_END
#endif /* HPML_COMM_BODY */
