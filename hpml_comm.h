// hpml_comm.h - v0.1.0 - many workers: transports, collectives, 1-bit exchange, strategies - MIT licence (see hpml.h)
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
//     - start processes, open sockets or choose a network: the launcher and MPI do that, or a transport of yours
//     - hang: every wait has a deadline and ends in an error that names rank, peer, operation and step (except MPI_Init
//       and MPI_Finalize, which hpml_launch calls)
//     - choose between sum and mean, or change a learning rate, unless you set it
//
// OPTIONS, defined before the include that has HPML_IMPLEMENTATION
//     HPML_USE_MPI                 the MPI transport (compile with mpicc)
//     HPML_COMM_IMPLEMENTATION     only this header's body: split builds, where another file has hpml.h's
//
// THREADS: a communicator is used by one thread, as its context is. Work that hpml_background starts runs in a second
// thread, on a twin of the communicator (>>api-collectives).
// SAME BITS: results do not depend on timing; every rank gets the same bits. The order of additions, and so the last
// bit, depends on algorithm and number of ranks, unless you ask for exact sums (>>api-distribute).
//
// GLOSSARY
//     rank            one of those that train together: a thread of this process, a process under mpiexec, a thread in
//                     virtual time. worker: a rank that computes gradients; server: one that keeps parameters
//     world           the ranks that are threads of one process
//     node            a machine, or a set of ranks that is treated as one, with one network card
//     communicator    a set of ranks that exchange messages, as one of them sees it; hangs on that rank's context
//     part            a communicator made of some ranks of another one (sub-communicator); of a parameter or another
//                     tensor: the block of it that one rank has
//     twin            a part with all ranks, which a background thread uses
//     transport       the functions that move messages: THREADS, MPI, CLOCK or your own
//     message         a send or a receive between two ranks, from its start until it is done
//     inbox           THREADS and CLOCK: where the sends to a rank are kept until the rank receives them
//     tag             number that a send and its receive have in common; other tags do not match
//     peer            the other rank of a message
//     lost            of a rank, with .survive: has failed, left, or sent nothing until a deadline (hpml_comm_lost)
//     link            latency and bandwidth between two ranks; device link: functions that move arrays between devices
//     collective      an operation that all ranks of a communicator call, in the same order: allreduce, broadcast, ...
//     course          the rounds of a collective, as one rank executes them
//     round           one step of a collective: at most one send and one receive on each rank. Of servers: a step that
//                     all workers, or the drawn clients, make together
//     deadline        hpml_now() at which a wait gives up with an error; a busy rank extends those of its peers
//     hand over       THREADS: of a send and its receive, the rank that comes second copies the array and ends both
//     control message MPI: a short message by which a rank announces that it failed, left, waits or is busy
//     header          first 8 bytes of a packed message: a tensor and a rank with a NaN or infinity; 0: none. With
//                     servers: the message with which a request or an answer begins
//     virtual time    seconds on the clocks of CLOCK and of the simulator: computing and links advance them
//     job             work in the background, waited for once
//     bucket          gradients that are exchanged together while the backward pass still runs
//     hook            a callback of the trainer: around a step, before an op, when a gradient is final (hpml_hooks)
//     span            an interval with a name on the timeline; lane: a row of spans on the timeline
//     factors         x and dz of a dense layer; the gradient of its weight is their product dz^T x
//     row             the elements along a tensor's last dimension; of a report: one step of one rank (hpml_step_row)
//     sparse table    the weight of an embedding with .sparse, whose gradient is a few of its rows
//     strategy        what ranks exchange, when, and what the optimizer gets (>>strategies)
//     form            one of several ways to run a strategy, as .exact and .delayed of sync
//     shard           the part of a bucket that one rank of a node adds up
//     stripe, owner   a part of a tensor's rows; the rank that adds up this part
//     residual        the quantization error that a codec adds to the next gradient (error feedback)
//     leaf            samples whose gradient is computed and rounded by itself, for exact sums
//     plain, packed   tensors that are summed as f32; tensors that a codec packs
//     contribution    a gradient that is packed by itself: each rank has one, with exact sums one for each leaf
//     exposed         of communication: the seconds that no computation hides
//     move            what one rank sends, receives and adds in one round of an allreduce
//     phase, team     part of an algorithm: rounds of one kind; the ranks that take part in it
//     plan            how a training is spread over ranks: hpml_plan, one struct
//     mesh, axis      the ranks of a plan as a block; its dimensions data, pipe, tensor, sequence, expert (>>api-mesh)
//     group           the ranks along one axis, and the functions by which they communicate (hpml_group); THREADS: the
//                     inboxes of all ranks of a communicator
//     replicas        ranks that have the same whole parameters and average their gradients
//     halo            pixels of the neighbouring ranks' blocks around a rank's block of an image
//     expert          one of several dense networks of which each token uses one or two; token: a row of features
//     place           of a rank: its number, from 0, on its node or along an axis; of experts: a row of an expert's
//                     batch, which one token may take
//     rule            of layout: the axis that splits a named dimension
//     pipeline        ranks that have consecutive stages of one model
//     stage, piece    the part of a model that one rank of a pipeline has; consecutive layers that run together: one
//                     piece is a stage, or several, chunks of the model that do not follow each other, are one.
//                     piece, elsewhere: the bytes of a message, or of an array, that are sent or added at one time;
//                     of servers: rows of a parameter that are packed together
//     edge            of a pipeline: a tensor that one piece of the model computes and another one reads
//     slot            of a pipeline: memory for the activations of one micro-batch; shard 2, 3: memory for one bucket
//     range           of a phase: the elements of the array that it sends or adds; of a server: the trained floats that
//                     this server keeps
//     push, pull      requests of a worker to a server: take this gradient (or values) and answer; answer
//     meeting         strategies local, block and elastic: an exchange of parameters by all ranks, every .period steps;
//                     centre: parameters that the ranks have in common, beside their own
//     micro-batch     samples of a batch that go through a pipeline together
//     bubble          the share of time for which the ranks of a pipeline are idle
//
// INDEX (grep '^// >>' hpml_comm.h)
//     api-comm   ranks, communicators, messages between two
//     api-collectives   all ranks together, at once or in the background
//     api-exchange   gradients added up in fewer bytes
//     api-mix   averaging with neighbours, tournaments
//     api-pipe   pipelines: schedules as moves, drawn and simulated; where to cut a model
//     api-plan   how a training is spread over ranks: one struct, its text, what it may hold
//     api-mesh   axes of ranks: models larger than a worker
//     api-distribute   data parallelism
//     api-layers   layers whose ranks communicate
//     api-simulate   step time on machines you do not have
//     api-forecast   a step of any plan on a machine you do not have; the search for a plan
//     api-timeline   one timeline for all ranks
// PART I   TALK: ranks, messages, transports
//     base   system headers, the communicator, nodes and links
//     messages   beginning and testing messages; lost ranks
//     waiting   waiting for a message, or for the first of several; sending, receiving
//     world   ranks as threads: inboxes, links, deadlock
//     hand-over   inboxes of threads; the rank that comes second does the work of both
//     threads-transport   messages between threads
//     mpi   messages between processes, by MPI
//     mpi-control   control messages: which rank failed, left, waits or is busy; waits for all ranks
//     mpi-close   splitting, closing over MPI; exit
//     mpi-create   connecting the ranks over MPI
//     clock   messages in virtual time
//     create   creating, splitting, freeing communicators
//     launch   running a function on every rank
//     timeline   one timeline for all ranks
// PART II   ADD UP: collectives, codecs on the wire
//     moves   the allreduce algorithms: phases, one table of algorithms, the phases of a rank
//     reduce   adding up elements; the mean
//     course   the moves, executed round by round
//     collectives   all ranks together: reductions, broadcasts, blocks; the choice of an algorithm
//     async   work in the background
//     exchange   1-bit exchange: stripes, owners, two residuals
//     stripes   the five steps of an exchange, on the host or on a device
//     whole-codecs   top-k and low rank: codecs of whole tensors
// PART III   STEP TOGETHER: data parallelism, mixing
//     plan   the fields of a plan in one list, the rules of a plan
//     plan-text   plans as text; defaults, the check, the next plan
//     distribute   data parallelism: layout of the parameters, buckets of gradients
//     distribute-step   data parallelism: a step, its statistics, the trainer's hooks
//     state   one list of what a training carries from step to step
//     distribute-rows   gradients of sparse tables: rows, gathered from all ranks
//     strategy-sync   synchronous steps, gradients exchanged on the host
//     strategy-shard   synchronous steps, each rank steps a part of the parameters
//     shard-slots   whole values and gradients of a few buckets at a time
//     shard-step   steps of buckets of which each rank has a part, within the backward pass or after it
//     strategy-factors   synchronous steps, dense layers by the factors of their gradients
//     strategy-delayed   double buffering: steps apply the gradients of the step before
//     strategy-exact   the same bits for every number of ranks
//     strategy-link   synchronous steps, gradients exchanged on devices
//     strategy-nodes   synchronous steps, a device link inside nodes, messages between them
//     weights   what the strategies that exchange parameters have in common
//     strategy-local   local SGD: the mean of the parameters
//     strategy-block   an outer optimizer with momentum for the mean change in a block
//     strategy-elastic   parameters and a common centre attract each other
//     strategy-gossip   averaging with neighbours in each step
//     servers   parameter servers: ranges of parameters, requests of workers
//     servers-rows   parameter servers: rows of sparse tables
//     servers-step   parameter servers: a worker asks, a server answers
//     servers-finish   parameter servers: the end of a training, checkpoints
//     strategy-ps   synchronous rounds on servers: gradients, without those of backup workers, or averaged parameters
//     strategy-async   asynchronous steps on servers, with bounded or any staleness
//     strategy-hogwild   threads that update shared values without locks
//     strategies   the table of strategies; attaching one to a trainer
//     cluster   roles by name, tensors dealt to servers, shared parameters
//     report   where the time of steps went
//     resume   checkpoints of the whole job
//     batch-search   the largest batch that does not hurt
//     mix   averaging with neighbours, tournaments
// PART IV   SPLIT THE MODEL: tensor, sequence, expert, pipeline, shards
//     mesh   axes of ranks: their communicators, the groups of a context
//     pipe-moves   pipelines: the order in which a stage does its tasks
//     pipe-cut   where to cut a chain of layers into stages
//     pipe-run   pipelines: pieces of a trainer's graph, and the tensors that cross between them
//     pipe-tasks   pipelines: the tasks of a stage, executed
//     pipe-flow   pipelines without a flush: versions of the weights; the hooks of a pipeline
//     layers   what layers that communicate have in common
//     layer-ring   ring attention
//     layer-halo   blocks of images with their neighbours' pixels: convolution, locally connected layers
//     layer-experts   mixture of experts by all-to-all
//     layer-members   collectives as layers; dense layers whose ranks have samples of their own
//     named   named dimensions: rules of layout, sums over products
// PART V   FORESEE: steps in virtual time
//     simulate   moves in virtual time, by a queue of ranks
//     simulate-fast   rings and all to all in virtual time without a queue
//     simulate-step   a step of training in virtual time
//     pipe-simulate   pipelines in virtual time; drawing them
//     play   programs of all ranks in virtual time
//     program   the programs of a plan's ranks
//     machines   machines by name, fabrics of nodes, what binds a layer
//     forecast   a step of a plan on a machine: check, play, memory, text
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
/* A rank is one worker: a thread of this process, a process under mpiexec, or a thread in virtual time. All ranks run
   the same program and exchange messages through a communicator. */
typedef struct hpml_comm  hpml_comm;  /* opaque; hangs on a context */
typedef struct hpml_world hpml_world; /* ranks that are threads of one process; opaque */

typedef enum hpml_transport_kind {
    HPML_TRANSPORT_THREADS = 0, /* ranks are threads of this process; messages are copied once, from array to array; a
                                   send of up to 256 bytes is copied and done at once */
    HPML_TRANSPORT_MPI     = 1, /* ranks are processes that mpiexec started; needs HPML_USE_MPI and mpicc */
    HPML_TRANSPORT_CLOCK   = 2  /* threads in virtual time: the one whose clock is behind runs; repeatable */
} hpml_transport_kind;

/* A link: bytes arrive after latency + bytes / bandwidth, one message after another. Zero: the link takes no time. */
typedef struct hpml_link {
    double latency;   /* seconds */
    double bandwidth; /* bytes per second */
} hpml_link;

/* The nodes on which ranks live and the links between ranks. With THREADS the links are emulated, so that a laptop
   shows how a slow network behaves. Each node has one network card, which sends one message after another, and receives
   one after another. Where a link takes time, and with CLOCK, every send is copied and done at once, as if cards had
   buffers without end. */
typedef struct hpml_network {
    int32_t       ranks_per_node; /* 0: all on one node (MPI: asks MPI) */
    bool          spread;         /* rank r is on node r % nodes, not r / ranks_per_node */
    hpml_link     inside, between; /* links within and between nodes */
    const double *slow;           /* (ranks) CLOCK: rank r computes slow[r] times as long; NULL: 1. Not copied */
    double        jitter;         /* CLOCK: each computation takes up to 1 + jitter times as long, at random */
    uint64_t      seed;           /* seed of the random numbers for .jitter, which repeat with the seed */
    const int32_t *node;          /* (ranks) the node of each rank, numbered from 0 without gaps, for example as a
                                     scheduler placed them; replaces ranks_per_node and spread. NULL: these two decide.
                                     Not copied; not for MPI */
} hpml_network;

typedef struct hpml_comm_desc {
    uint32_t            _begin;
    hpml_transport_kind transport;
    const struct hpml_transport *custom; /* your own transport, used instead of .transport; NULL: none. Not copied */
    void               *custom_user;  /* given to the transport .custom: see hpml_comm_state */
    hpml_world         *world;    /* THREADS, CLOCK: required, the same for all ranks */
    int32_t             rank;     /* THREADS, CLOCK, custom: number of this rank; MPI: MPI's own */
    int32_t             ranks;    /* custom: number of ranks, at least 1; THREADS, CLOCK, MPI: known to the transport */
    void               *mpi_comm; /* MPI: points to an MPI_Comm, which is duplicated; NULL: MPI_COMM_WORLD */
    int32_t             ranks_per_node; /* MPI: 0: asks MPI which ranks share memory. custom: 0: all on one node */
    double              timeout;  /* seconds that a wait may last; 0: 60, negative: for ever. CLOCK has no deadlines */
    bool                check;    /* for debugging: ranks compare each collective first (kind, count, type, order) */
    bool                survive;  /* same on all ranks: a lost rank ends only its own messages: see hpml_comm_lost */
    uint32_t            _end;
} hpml_comm_desc;

/* Creates a communicator. Collective. NULL on failure, with the error on the context: MPI not initialized, a launcher
   of another MPI, a rank that has not called this function within the deadline, ... The communicator is freed with its
   context. An error on one rank's context fails all ranks; clearing that error does not revive the communicator. With
   MPI no receive with MPI_ANY_SOURCE and MPI_ANY_TAG may be pending on .mpi_comm during this call, because the ranks
   exchange messages there with its highest tag. */
HPML_API hpml_comm *hpml_comm_create(hpml_ctx *ctx, const hpml_comm_desc *desc);
/* Frees a communicator early. Collective: with MPI the call waits, within the deadline, until all ranks have called it
   or freed their contexts. Free a communicator after its parts, because with MPI they cannot send without it. Free
   communicators, or their contexts, before MPI_Finalize: freeing later is safe, but then the other ranks are not
   notified. A process that calls exit before it has freed its communicator notifies the other ranks first. */
HPML_API void       hpml_comm_free(hpml_comm *c);

/* Creates the world of ranks that are threads which you start yourself (hpml_launch does both). Free the world after
   all contexts of its ranks. NULL: neither THREADS nor CLOCK, not 1 to 65536 ranks, a node out of range, or no
   memory. */
HPML_API hpml_world *hpml_world_create(hpml_transport_kind transport, int32_t ranks, const hpml_network *network);
HPML_API void        hpml_world_free(hpml_world *w);

/* Runs `fn` on every rank and returns when all have: the one line that differs between one core, threads, virtual time
   and mpiexec. Under mpiexec it runs `fn` on this process's rank, and starts and ends MPI unless the program has
   started MPI; MPI can be started only once. Every rank gets a context and a communicator. Returns the error of the
   lowest rank that failed (HPML_ERR_PEER only if no rank has another error), with its text in `error` (may be NULL);
   the errors of all ranks, and of the desc, go to .ctx.log as well. With .survive returns HPML_OK, and in `error` the
   number of lost ranks and the lowest one's error, where the function of some rank returned HPML_OK and no rank failed
   by HPML_ERR_PEER, which would mean that it could not go on without a lost rank. Under mpiexec a process returns the
   error of its own rank; a process that fails waits for the others in MPI_Finalize, because most launchers end all
   processes when one ends before that. */
typedef struct hpml_launch_desc {
    uint32_t            _begin;
    const char         *run;       /* transport and ranks in words: "serial", "threads:4", "clock:4", "mpi", "mpi:4";
                                      "auto": mpi if mpiexec or srun has started several processes, else threads;
                                      without a number: SLURM_NTASKS, or the cores. The environment variable HPML_RUN
                                      replaces .run, and is also used where .run, .transport and .ranks are 0 */
    hpml_transport_kind transport;
    int32_t             ranks;     /* THREADS, CLOCK: 0: 1. MPI: 0, or the number that must have been started */
    hpml_network        network;   /* MPI: only ranks_per_node is used */
    double              timeout;   /* this field and the next two: as in hpml_comm_desc */
    bool                check;
    bool                survive;
    hpml_ctx_desc       ctx;       /* desc of every rank's context; threads 0: the process's cores / ranks */
    void              (*place)(hpml_ctx_desc *ctx, int rank, void *user); /* changes ctx for a rank, to give it a GPU */
    const struct hpml_plan *plan;  /* given to hpml_comm_set_plan on every rank before `fn` is called; NULL: HPML_PLAN
                                      in the environment is, if it splits the model */
    bool                alone;     /* allows THREADS and CLOCK in each of several processes of mpiexec or srun; else
                                      an error, because each process would train alone. HPML_RUN allows it as well */
    uint32_t            _end;
} hpml_launch_desc;
typedef hpml_status hpml_rank_fn(hpml_comm *comm, void *user);
HPML_API hpml_status hpml_launch(const hpml_launch_desc *desc, hpml_rank_fn *fn, void *user, char *error, size_t size);
/* Returns how many processes mpiexec or srun has started, and the number of this one, before MPI starts; 0: neither has
   started this process. The first of these pairs that is in the environment is used: PMI_SIZE and PMI_RANK (MPICH,
   Intel MPI), PMIX_SIZE and PMIX_RANK, OMPI_COMM_WORLD_SIZE and OMPI_COMM_WORLD_RANK (Open MPI), MPI_LOCALNRANKS and
   MPI_LOCALRANKID (Hydra), SLURM_STEP_NUM_TASKS and SLURM_PROCID (srun). SLURM_NTASKS alone, with or without
   SLURM_PROCID, means a batch script, which is one process. */
HPML_API int         hpml_launched(int *rank);

HPML_API int       hpml_comm_rank(const hpml_comm *c); /* 0 to size - 1 */
HPML_API int       hpml_comm_size(const hpml_comm *c);
HPML_API int       hpml_comm_node(const hpml_comm *c, int rank); /* number of the node that `rank` is on */
HPML_API hpml_ctx *hpml_comm_ctx(const hpml_comm *c);
HPML_API const char *hpml_comm_transport(const hpml_comm *c); /* "threads", "mpi", "clock", your transport's name */
HPML_API double    hpml_comm_now(const hpml_comm *c);  /* seconds: hpml_now, or this rank's virtual clock */
/* CLOCK: advances this rank's clock by `seconds` (no other computation takes virtual time); other transports: sleeps.
   The timeline shows a span "compute". */
HPML_API void      hpml_comm_compute(hpml_comm *c, double seconds);

/* Splits c, collectively. Ranks of the same color form a new communicator, a part, ordered by key, then rank. Negative
   color: this rank joins no part and gets NULL. With MPI a part sends over the MPI communicator of hpml_comm_create,
   with tags of its own, because MPI creates a communicator of some ranks only by a call without a deadline. So a part
   has no HPML_NATIVE, unless it has all ranks in their old order, and at most 127 parts (15 where MPI has no tag above
   32,767) exist at the same time. */
HPML_API hpml_comm *hpml_comm_split(hpml_comm *c, int color, int key);
HPML_API hpml_comm *hpml_comm_split_node(hpml_comm *c); /* by node */

/* Returns whether `rank` is lost; false without hpml_comm_desc.survive. With .survive a rank is lost when it has
   failed, when it has freed its communicator (has left), or, on this rank alone, when a wait for its message has lasted
   until the deadline. From then on sends to it end with HPML_ERR_PEER in m->status, as do receives once its earlier
   messages have arrived; hpml_wait_any returns a message that ended so like one that has come. This rank's context and
   its messages with other ranks are not affected. But a collective that needs a lost rank fails on this rank's context,
   with an error that names the lost rank; so this rank has failed, and others lose it, too. In virtual time a rank is
   lost from the time at which it failed or left. Parts and background communicators inherit .survive. MPI: a process
   that is killed is lost at the deadline, if the launcher leaves the others alive (mpiexec -disable-auto-cleanup). */
HPML_API bool hpml_comm_lost(const hpml_comm *c, int rank);

/* Extends the deadlines of the ranks that wait for this rank, directly or through other ranks, while this rank works
   alone: they wait at least until `seconds` seconds from now. Call the function again as the work advances (most calls
   cost nothing), and with 0 when the work ends: an ordinary deadline starts then. hpml_distribute_save extends the
   deadlines by a minute each time that bytes of the checkpoint have reached the disk. */
HPML_API void hpml_comm_busy(hpml_comm *c, double seconds);

/* What this rank has sent since the last reset. Reading the counters waits until background work, which they include,
   is done; the messages that made the background's communicator are not counted. */
typedef struct hpml_counters {
    int64_t messages, bytes;
    int64_t between_bytes; /* bytes sent to other nodes; included in `bytes` */
    int64_t rounds;        /* rounds of collectives in which this rank sent or received */
    double  seconds;       /* spent in collectives, waiting included */
} hpml_counters;
HPML_API void    hpml_comm_counters(const hpml_comm *c, hpml_counters *out);
HPML_API int64_t hpml_comm_messages_to(const hpml_comm *c, int peer); /* messages sent to `peer`; 0: no such rank */
HPML_API int64_t hpml_comm_bytes_to(const hpml_comm *c, int peer);
HPML_API void    hpml_comm_counters_reset(hpml_comm *c);

/* Send and receive, each waiting until its array may be used again. Messages between two ranks with the same tag arrive
   in the order sent; the lengths of a send and its receive must be equal. A send may wait for its receive. tag: 0 to
   HPML_TAG_MAX. */
#define HPML_TAG_MAX 1023
HPML_API hpml_status hpml_send(hpml_comm *c, int to, int tag, const void *data, size_t bytes);
HPML_API hpml_status hpml_recv(hpml_comm *c, int from, int tag, void *data, size_t bytes);
HPML_API hpml_status hpml_sendrecv(hpml_comm *c, int to, const void *sent, size_t sent_bytes, int from, void *received,
                                   size_t received_bytes, int tag);

/* Memory in a message for its transport, all zero when the transport's `start` is called: one value, or bytes for a
   struct of the transport's. */
typedef union hpml_message_state {
    void   *pointer;
    int64_t number;
    double  seconds;
    char    bytes[64];
} hpml_message_state;

/* A send or a receive in flight. The struct is the caller's: it and the array stay untouched until hpml_wait returns.
   (MPI: after an error, an array that was being sent must stay until the process ends.) */
typedef struct hpml_message {
    int                  peer, tag;    /* peer's rank in the communicator; tag: above HPML_TAG_MAX a collective's */
    bool                 receiving;
    bool                 done;         /* another thread that sets it does so with release order, then leaves m alone */
    hpml_status          status;       /* valid when done */
    char                *data;
    size_t               bytes;
    void               (*reduce)(void *into, const void *from, size_t bytes); /* receiving: adds; NULL: copies */
    double               arrival;      /* seconds of hpml_comm_now at which a message arrives or did; 0: not known */
    hpml_message_state   state;        /* the transport's */
    struct hpml_comm    *owner;        /* communicator on which the message was begun */
    struct hpml_message *next;         /* private: the next pending receive in a list, begun before this one */
} hpml_message;
HPML_API hpml_status hpml_isend(hpml_comm *c, int to, int tag, const void *data, size_t bytes, hpml_message *m);
HPML_API hpml_status hpml_irecv(hpml_comm *c, int from, int tag, void *data, size_t bytes, hpml_message *m);
HPML_API hpml_status hpml_wait(hpml_comm *c, hpml_message *m);
/* Returns whether m is over, without waiting; then m->status is valid and the struct may be reused, as after hpml_wait.
   Else m stays in flight. In virtual time m is over when this rank's clock has come to the message's arrival; testing
   takes no time, so a loop that tests must call hpml_comm_compute, or it never ends. */
HPML_API bool        hpml_test(hpml_comm *c, hpml_message *m);
/* Waits until one of m[0] to m[count - 1] is done and returns its index. If several are done, takes the one that
   arrived first, and of equal ones the first in the list (with THREADS without links, and with MPI, arrivals are not
   known, so the list decides). NULL entries are skipped; before the next call replace the entry that is done, which
   would be found again, by NULL or begin its message again. Returns -1 when `seconds` of hpml_comm_now have passed; 0:
   does not wait; negative: waits for the deadline of the communicator, which is an error. Also returns -1 after an
   error, which is on the context: then all messages of the list are given up, as by hpml_wait, and their structs and
   arrays may be reused. A server with one thread posts one small receive for each peer, waits for any of these
   receives, answers, and posts that receive again. */
HPML_API int         hpml_wait_any(hpml_comm *c, hpml_message *const *m, int count, double seconds);

/* A transport moves messages between ranks; collectives and all that stands on them are written once over this table.
   THREADS, MPI and CLOCK are such tables. For one of your own, fill in a table and give it to hpml_comm_create as
   .custom; tests/outside/own_transport.c is an example. Leave optional functions and properties at zero.
     - Threads: each function is called by the thread that works with the communicator c: the rank's thread or, for a
       part that hpml_background made, a background thread. So two communicators of one rank may be in use at the same
       time, unless is_concurrent returns false.
     - Errors: report an error with hpml_ctx_fail on hpml_comm_ctx(c). A function that is given a message m then sets
       m->status and m->done; the other functions return the status.
     - A transport must not call functions of hpml_comm.h that send or wait (only split may), and must not use m, which
       belongs to the caller, after m is done. */
typedef struct hpml_transport {
    const char *name; /* required; lives as long as the communicators, as this table does */

    /* Optional, first function called: sets desc->rank and desc->ranks where the caller does not know them. */
    hpml_status (*locate)(hpml_ctx *ctx, hpml_comm_desc *desc);
    /* Optional: connects this rank. c has its rank and size; hpml_comm_state(c) is desc->custom_user and may be
       replaced. After an error, of which open has notified the other ranks, close is not called. */
    hpml_status (*open)(hpml_comm *c, const hpml_comm_desc *desc);
    /* Optional, called instead of open where there is no memory for the communicator: notifies the other ranks. */
    void (*absent)(hpml_ctx *ctx, const hpml_comm_desc *desc);
    /* Required, collective over c: makes `part`, ranks[0] to ranks[count - 1] of c, a communicator whose messages never
       match those of c or of another part; sets its state. part NULL: this rank joins no part. `color` differs between
       the parts that are made at the same time. Also called for the communicator of a background thread. */
    hpml_status (*split)(hpml_comm *c, hpml_comm *part, const int32_t *ranks, int count, int color);
    /* Optional: called when communicator c, or a part, is being freed, also after an error; frees the transport's state
       of c. May wait for the other ranks. */
    void (*close)(hpml_comm *c);

    /* Required: begins m without waiting. A send matches a receive of the same communicator, tag and pair of ranks; the
       first send matches the first receive. A send may be done at once, if the transport has copied its array. */
    void (*start)(hpml_comm *c, hpml_message *m);
    /* Required: advances m without waiting. Sets m->done when m is complete; a receive is completed by
       hpml_message_deliver. For a receive it may set m->arrival, the time at which the message arrives; hpml_wait then
       sleeps until that time. Of several receives with equal peer and tag only the oldest is tested. */
    void (*test)(hpml_comm *c, hpml_message *m);
    /* Optional: sleeps until one of m[0] to m[count - 1] may have advanced, at most until hpml_now() is `until` (0:
       does not sleep). Entries of m that are NULL or done are skipped; hpml_wait calls block with one message. Where
       `block` is NULL, waits sleep for 30 us instead. */
    void (*block)(hpml_comm *c, hpml_message *const *m, int count, double until);
    void (*unblock)(hpml_comm *c, hpml_message *m); /* optional: a wait for m that called block is over */
    /* Required, after an error: gives m up, so that neither m nor its array is used afterwards. Sets m->done. */
    void (*abandon)(hpml_comm *c, hpml_message *m);

    void (*announce_failure)(hpml_comm *c, const char *text); /* optional: ends waits for this rank, which failed */
    void (*announce_busy)(hpml_comm *c, double seconds); /* optional: extends others' deadlines, see hpml_comm_busy */
    /* Optional, called after the deadline of m: returns the rank at the end of the chain of waits that begins with m's
       peer, and sets *busy to the hpml_now() until which that rank is busy; -1: a rank has failed, as the next test of
       m reports. Where this function is NULL, m's peer is taken for that rank. */
    int  (*stuck_at)(hpml_comm *c, const hpml_message *m, double *busy);

    /* Optional, for .survive: returns why `peer` is lost, "has left", "failed: " and a text, or a sentence that begins
       with "rank "; NULL: it is not lost. The text lives as long as c. */
    const char *(*why_lost)(const hpml_comm *c, int peer);

    /* Optional: runs algorithm HPML_NATIVE. element is an hpml_element, reduce an hpml_reduce; for HPML_MEAN computes
       the sum, which the caller divides. */
    hpml_status (*allreduce)(hpml_comm *c, void *data, int64_t n, int element, int reduce);
    bool (*shares_core)(hpml_comm *c, int peer);   /* optional: the peer runs on this core: hpml_wait must not spin */
    bool (*has_delay)(const hpml_comm *c);   /* optional: messages take time that a computation can hide; NULL:
                                                messages between nodes do */
    bool (*is_concurrent)(const hpml_comm *c); /* optional: a part of c may be used by another thread at the same time;
                                                  false: background work is done at once. NULL: true */
    bool   one_process; /* all ranks share this machine's cores, whatever their nodes */
    size_t piece;       /* bytes: AUTO sums larger arrays in pieces of this size, which stay in the caches; 0: whole */
    double alpha, beta; /* AUTO's first guess: seconds for a message, for a byte; 0: 2e-6, 0.25e-9 */
    const struct hpmlc_schedule *schedule; /* private to THREADS and CLOCK: how a process's threads take turns */
} hpml_transport;

/* For transports: a communicator's state is one pointer, which its transport may set and use freely. A part, being a
   communicator of its own, also has a state of its own on each of its ranks. */
HPML_API void *hpml_comm_state(const hpml_comm *c);
HPML_API void  hpml_comm_set_state(hpml_comm *c, void *state);
/* Completes the receive m with a message of `bytes` at `from`: copies or reduces it into m's array and sets m->done; an
   error where the lengths differ. */
HPML_API void  hpml_message_deliver(hpml_comm *c, hpml_message *m, const void *from, size_t bytes);

// ---------------------------------------------------------------------------------------------------------------------
// >>api-collectives   all ranks together, at once or in the background
// ---------------------------------------------------------------------------------------------------------------------
/* The ways to add up (n elements, p ranks; a message costs alpha + beta bytes):
     CENTRAL    rank 0 receives all, adds in rank order, sends back       2 alpha + 2 (p-1) n beta, at rank 0's card
     TREE       binomial tree to rank 0 and back                          2 ceil(log2 p) (alpha + n beta)
     RING       2 (p-1) steps of n/p, Patarasuk & Yuan 2009               2 (p-1) alpha + 2 n (p-1)/p beta, optimal
     BUTTERFLY  recursive doubling                                        ceil(log2 p) (alpha + n beta)
     HALVING    recursive halving and doubling, Rabenseifner 2004         2 log2 p alpha + 2 n (p-1)/p beta
     HIERARCHICAL  reduce-scatter inside each node, allreduce of each rank's share over the nodes, allgather inside
                each node: only 1/ranks_per_node of the bytes leave a node
     PAIRWISE   2 (p-1) steps of n/p, each with another rank              as RING; AUTO never takes it
     NATIVE     the transport's own (MPI_Iallreduce; where ranks pass different counts, the MPI decides what happens);
                not on parts of a communicator, see hpml_comm_split
   BUTTERFLY and HALVING first add the arrays of ranks beyond a power of two to partners. Every algorithm gives all
   ranks the same bits, because the sum of an element is formed along one fixed tree. CENTRAL: ((x0 + x1) + x2) ...;
   RING adds block b in the order of ranks b + 1, b + 2, ... b, PAIRWISE in the order b, b - 1, ... b + 1; the others
   pair ranks as their name says. */
typedef enum hpml_algorithm {
    HPML_ALGORITHM_NONE = -1, /* hpml_algorithm_find: no algorithm has this name */
    HPML_AUTO = 0, HPML_CENTRAL, HPML_TREE, HPML_RING, HPML_BUTTERFLY, HPML_HALVING, HPML_HIERARCHICAL, HPML_NATIVE,
    HPML_PAIRWISE,
    HPML_ALGORITHM_COUNT /* not an algorithm: the number of algorithms, AUTO included */
} hpml_algorithm;
HPML_API const char    *hpml_algorithm_name(hpml_algorithm a);
HPML_API hpml_algorithm hpml_algorithm_find(const char *name); /* "ring", ...; else HPML_ALGORITHM_NONE */

typedef enum hpml_reduce { HPML_SUM = 0, HPML_MEAN, HPML_MAX } hpml_reduce;

typedef enum hpml_element { /* type of the elements that are added up */
    HPML_ELEMENT_F32 = 0, HPML_ELEMENT_BF16, /* added in f32, each sum rounded to bf16 */
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
/* Measures alpha and beta (seconds for a message and for a byte) of this communicator once, for the choice of AUTO; it
   takes some milliseconds. Collective. */
HPML_API hpml_status hpml_comm_tune(hpml_comm *c);
HPML_API hpml_algorithm hpml_comm_choose(hpml_comm *c, int64_t bytes); /* what AUTO chooses; NONE: out of memory, or c
                                                                            is NULL. Keeps what it has simulated */

/* Of an array of n elements that is cut into p = `parts` blocks, block r is elements [n r / p, n (r+1) / p). */
HPML_API int64_t     hpml_block(int64_t n, int parts, int index); /* n * index / parts: offset of block
                                                                       `index`; 0 where parts is 0 */

/* In place. reduce_scatter: block r of rank r becomes the result, the other blocks are overwritten. allgather: block r
   of rank r is sent to all ranks. reduce_to: the root's data becomes the result, other ranks' data is overwritten. */
HPML_API hpml_status hpml_reduce_scatter(hpml_comm *c, void *data, int64_t n, hpml_element e, hpml_reduce op);
HPML_API hpml_status hpml_allgather(hpml_comm *c, void *data, int64_t n, hpml_element e);
HPML_API hpml_status hpml_reduce_to(hpml_comm *c, void *data, int64_t n, hpml_element e, hpml_reduce op, int root);
HPML_API hpml_status hpml_broadcast(hpml_comm *c, void *data, size_t bytes, int root);

/* Exchange blocks of `bytes` bytes between p ranks. mine: this rank's block; all: (p, bytes), the blocks of all ranks,
   used by the root only; sent, received: two arrays (p, bytes): block r of `sent` goes to rank r, block r of `received`
   comes from rank r. */
HPML_API hpml_status hpml_gather(hpml_comm *c, const void *mine, size_t bytes, void *all, int root);
HPML_API hpml_status hpml_scatter(hpml_comm *c, const void *all, size_t bytes, void *mine, int root);
HPML_API hpml_status hpml_all_to_all(hpml_comm *c, const void *sent, void *received, size_t bytes);
HPML_API hpml_status hpml_barrier(hpml_comm *c);

typedef struct hpml_move { /* what one rank does in one round */
    int     to, from;                  /* ranks; -1: none */
    int64_t send_at, send_count;       /* elements sent: the first one and how many */
    int64_t receive_at, receive_count; /* elements received: the first one and how many */
    bool    add;                       /* received elements are added to the array's; else they replace these */
} hpml_move;
/* Computes one move of an allreduce, for programs that draw, count or simulate them: what rank `rank` of p does in
   round `round`, with n elements in all. False when the algorithm has no such round. */
HPML_API bool hpml_allreduce_move(hpml_algorithm a, int p, int ranks_per_node, int rank, int64_t n, int round,
                                  hpml_move *out);

/* Work in the background: a thread of the communicator runs the jobs on a twin of the communicator, in the order in
   which they were started, which must be the same on all ranks (hpml_exchange_ready allows others). The array must
   stay untouched until hpml_job_wait has returned. Wait for each job exactly once, because jobs are reused. Without
   threads (HPML_NO_THREADS, MPI_THREAD_SINGLE) a job runs when it is started. The thread allocates with the context's
   allocator, which must therefore be thread-safe. */
typedef struct hpml_job hpml_job;
HPML_API hpml_job   *hpml_iallreduce(hpml_comm *c, void *data, int64_t n, const hpml_allreduce_desc *desc);
HPML_API hpml_job   *hpml_background(hpml_comm *c, hpml_rank_fn *work, void *user); /* calls work(twin, user) */
HPML_API bool        hpml_job_done(const hpml_job *j);
HPML_API hpml_status hpml_job_wait(hpml_job *j);

// ---------------------------------------------------------------------------------------------------------------------
// >>api-exchange   gradients added up in fewer bytes
// ---------------------------------------------------------------------------------------------------------------------
/* One array of a model: (rows, cols) row-major; a vector has 1 row. Codecs work along rows (>>api-codec). */
typedef struct hpml_gradient {
    const char *name; /* in errors, saved residuals and the timeline; must live on; NULL: the array's number */
    float      *data; /* (rows, cols) */
    int64_t     rows, cols;
} hpml_gradient;

/* How gradients are added up on all ranks. Tensors that are not compressed (codec NONE, vectors, small tensors) go
   through one plain allreduce. Gradients whose packed form cannot be added travel as in 1-bit SGD (Seide et al. 2014):
     1. every rank packs its whole gradient, with its residual;
     2. stripe j of the rows goes to rank j;
     3. rank j unpacks and adds the contributions of all p ranks, in the order of the ranks;
     4. rank j packs the sum with a second residual, which it keeps only for its own stripe;
     5. all ranks receive and unpack the same bits.
   Each rank sends 2 (p-1)/p of the packed size, for any p. TOPK gathers the (index, value) pairs of all ranks; LOWRANK
   adds up the factors P and Q. A codec of your own (codec.custom) packs on the host. */
typedef struct hpml_exchange_desc {
    uint32_t             _begin;
    int32_t              count;      /* number of tensors: required */
    const hpml_gradient *tensors;    /* (count), same order and shapes on all ranks; copied, but for their names */
    hpml_codec_desc      codec;      /* the codec that packs gradients */
    hpml_reduce          reduce;     /* SUM or MEAN over ranks */
    hpml_algorithm       algorithm;  /* for the allreduce of plain tensors */
    int32_t              leaves;     /* contributions of this rank; 0: 1. More with exact sums: hpml_plan.exact */
    int64_t              leaf_step;  /* contribution l of a tensor is at data + l * leaf_step; the result: at l = 0 */
    int64_t              fuse_bytes; /* plain tensors, end to end, are cut into sums of this many bytes; 0: one sum */
    /* Optional, called on the sum of all ranks' contributions to rows of a stripe, before the sum is packed (between
       steps 3 and 4 of the list above this struct); for example Adagrad (Seide et al. 2014). */
    void (*in_stripe)(void *user, int tensor, int64_t row, int64_t rows, float *sum);
    void                *user;
    uint32_t             _end;
} hpml_exchange_desc;

/* The exchange keeps its residuals, which begin as zeros. hpml_exchange_create is collective and returns NULL on
   failure, with the error on the context. */
typedef struct hpml_exchange hpml_exchange;
HPML_API hpml_exchange *hpml_exchange_create(hpml_comm *c, const hpml_exchange_desc *desc);
HPML_API void           hpml_exchange_free(hpml_exchange *x); /* optional */
/* Every tensor becomes the sum, or mean, over all ranks: the same bits on all of them. A NaN or infinity on any rank,
   in a tensor that a codec packs, gives HPML_ERR_NONFINITE on every rank; the residuals of the rows with a NaN or an
   infinity become zero, and the context stays usable: the caller skips this step. Plain tensors are added without a
   check: the optimizer's update checks them. */
HPML_API hpml_status hpml_exchange_run(hpml_exchange *x);
HPML_API hpml_job   *hpml_exchange_start(hpml_exchange *x); /* runs x in the background until hpml_job_wait */
/* An exchange where ranks finish tensors in different orders, as in Horovod: call it once a run for each tensor, when
   that tensor is ready. In the background ranks agree on which tensors are ready on all ranks; a fused sum begins when
   all of its tensors are, so bits do not depend on the order; tensors that a codec packs travel last. Returns the job
   with the last tensor; NULL before it, or on an error. When the deadline passes, the error names a tensor for which
   ranks wait, and the rank where it is not ready. */
HPML_API hpml_job   *hpml_exchange_ready(hpml_exchange *x, int tensor);
/* Bytes that this rank sends in one run: exact for messages (AUTO: as hpml_comm_choose chooses now); for NATIVE and
   device links the bytes of a ring allreduce. The messages by which ranks learn in hpml_exchange_ready which tensors
   are ready on all of them are not counted. */
HPML_API int64_t     hpml_exchange_bytes(const hpml_exchange *x);
/* Return the residuals of a tensor: hpml_exchange_residual those of this rank's gradients, (leaves, rows, cols), *count
   floats; hpml_exchange_stripe that of the sum over the stripe that this rank owns, *rows rows from row *row on. NULL
   when the codec has no residuals. count, row, rows may be NULL. */
HPML_API float *hpml_exchange_residual(hpml_exchange *x, int tensor, int64_t *count);
HPML_API float *hpml_exchange_stripe(hpml_exchange *x, int tensor, int64_t *row, int64_t *rows);

/* How arrays that live on a device move between ranks without passing through the host: NCCL (hpml_nccl_attach in
   hpml_cuda.cuh), or your own. Calls between begin and end are queued on a stream of the link's own; no function but
   `check` waits on the host. All ranks make the same calls. Errors stand on the context. */
typedef struct hpml_device_link {
    void *user; /* first argument of all functions */
    hpml_status (*begin)(void *user); /* the calls that follow run after all work that the device has now */
    hpml_status (*allreduce)(void *user, float *x, int64_t n, bool mean); /* sum or mean, in place */
    /* Sends bytes [sent_at[r], sent_at[r + 1]) of `sent` to each other rank r or, with `same`, to all other ranks the
       bytes that this range has for r = this rank's own number; receives from each other rank r into bytes
       [received_at[r], received_at[r + 1]) of `received`. */
    hpml_status (*swap)(void *user, const void *sent, const size_t *sent_at, bool same, void *received,
                        const size_t *received_at);
    hpml_status (*end)(void *user);
    hpml_status (*wait)(void *user);  /* work that the device gets from now on runs after the calls up to `end` */
    hpml_status (*check)(void *user); /* waits on the host until the calls are done; a deadline is an error */
    hpml_status (*scale)(void *user, float *x, int64_t n, float times, float by); /* x * times / by, in place, as work
                                                                                     of the device, not of the link */
    void (*free)(void *user);         /* optional: called when the communicator is freed or gets another link */
    /* Not NULL: the link connects the ranks of a node only, equally many on each node; `across` has the ranks with this
       rank's place on every node. Each rank adds up a share of its node's gradients; messages over `across` then add up
       the same share of all nodes. */
    hpml_comm *across;
    float *(*stage)(void *user, int64_t n); /* returns n floats of host memory, freed with the link */
    /* Block r of x is elements at[r] to at[r + 1] - 1. reduce_scatter: the rank at place r of the node gets block r of
       the node's sum, and copies it to `stage`. allgather: copies `stage` to this rank's block of x, and all ranks of
       the node get all blocks. Each of the two functions does the work of `begin` and `end` itself. */
    hpml_status (*reduce_scatter)(void *user, float *x, const int64_t *at, float *stage);
    hpml_status (*allgather)(void *user, float *x, const int64_t *at, const float *stage);
    hpml_status (*landed)(void *user, float *stage); /* waits for the copy; for any thread: sets no context's error */
} hpml_device_link;
HPML_API hpml_status hpml_comm_set_link(hpml_comm *c, const hpml_device_link *link); /* copied; NULL: none */

// ---------------------------------------------------------------------------------------------------------------------
// >>api-mix   averaging with neighbours, tournaments
// ---------------------------------------------------------------------------------------------------------------------
/* Decentralized averaging (Lian et al. 2017): x_i <- sum over j of W_ij x_j, where W_ij is not 0 only for neighbours.
   With Metropolis weights W_ij = 1 / (1 + max(degree i, degree j)) the matrix is symmetric and doubly stochastic: the
   mean over ranks stays the same, and differences shrink by the second largest |eigenvalue| in each step. */
typedef enum hpml_topology {
    HPML_TOPOLOGY_RING = 0, /* rank i with i - 1 and i + 1 */
    HPML_TOPOLOGY_WHEEL,    /* the ring of ranks 1 to p - 1, and rank 0 with all of them */
    HPML_TOPOLOGY_PAIRS,    /* random pairs, new ones in each step, with weights 1/2 and 1/2 */
    HPML_TOPOLOGY_ALL       /* all ranks are neighbours: one step gives the mean */
} hpml_topology;
/* Fills in W, (p, p) row-major, of step `step`. seed and step matter for PAIRS. */
HPML_API void        hpml_mixing_matrix(hpml_topology topology, int p, uint64_t seed, int64_t step, double *w);
/* Runs one mixing step on n floats in place; the same seed and step on all ranks. Collective. With .survive of the
   communicator, ranks go on without one that is lost: each adds the lost rank's weight to its own, which keeps the mean
   over the ranks that are there. Messages then have the tag HPML_TAG_MAX - 2. */
HPML_API hpml_status hpml_mix(hpml_comm *c, float *x, int64_t n, hpml_topology topology, uint64_t seed, int64_t step);

/* Tournament (Jacobs et al. 2017, LBANN's LTFB): every rank trains a model of its own on data of its own. In a
   tournament ranks meet in random pairs, others in each round; the two exchange models, with the states of their
   optimizers, both evaluate both models on their own `set`, and each keeps the model with the smaller loss, its own if
   they are equal. A model with a NaN loses. Collective, with the same seed and round on all ranks; with an odd number
   of ranks one of them sits out. The same model and optimizer on all ranks; data parallelism of the trainer must not
   include ranks of c. */
typedef struct hpml_tournament_result {
    int32_t partner;       /* rank of the partner; this rank itself: it sat out, without a partner */
    double  mine, theirs;  /* losses on `set`; infinite: the loss was not finite */
    bool    changed;       /* true: this rank has taken over the partner's model */
} hpml_tournament_result;
HPML_API hpml_status hpml_tournament(hpml_trainer *t, hpml_comm *c, hpml_dataset *set, uint64_t seed, int64_t round,
                                     hpml_tournament_result *out); /* out may be NULL */

// ---------------------------------------------------------------------------------------------------------------------
// >>api-pipe   pipelines: schedules as moves, drawn and simulated; where to cut a model
// ---------------------------------------------------------------------------------------------------------------------
/* A model that is cut into stages, one on each rank of a pipeline, processes the batch as micro-batches: while stage 1
   works on micro-batch 0, stage 0 works on micro-batch 1. A schedule says in which order a stage does the forward and
   backward passes of its micro-batches. With p stages, m micro-batches, equal stages and links that take no time:

     schedule      idle share of the time (bubble)   micro-batches in flight on stage r (from 0)
     GPIPE         (p-1) / (m + p-1)                 m                Huang et al. 2019
     1F1B          (p-1) / (m + p-1)                 min(p - r, m)    Narayanan et al. 2019, "PipeDream"
     INTERLEAVED   (p-1) / (v m + p-1)               more; v chunks of the model on each stage: chunk c of stage r is
                                                     piece c p + r of the model's p v pieces (Narayanan et al. 2021)
     ZERO_BUBBLE   (p-1) / (3 m + p-1)               min(p, m)        Qi et al. 2023, "ZB-H1": the gradients of weights
                                                     of products are computed later, while the stage would wait (see
                                                     hpml_graph_halves). The formula is for equal times of forward
                                                     pass, gradients of inputs, of weights. Until then a micro-batch
                                                     keeps the inputs of its products and the gradients of the results
     STASH         0, but for the first and last     min(p - r, m)    PipeDream: every micro-batch is a step of its own,
                   p - 1 steps                       and the pipeline never empties. A micro-batch has the same version
                                                     of a stage's weights in both passes, so a stage keeps p - r of them
     VERTICAL      as STASH                          min(p - r, m)    STASH with vertical sync: a micro-batch has the
                                                     same version on all stages, so each stage keeps p of them

   hpml_distribute with hpml_plan.pipe > 1 cuts the ops of a recorded model into stages; the program stays the same. All
   stages get the whole batch (x, y) and call the trainer's functions alike, also evaluate and predict, whose outputs
   all stages get. A tensor that a later stage reads goes there directly. A parameter is on the stages that read it
   (`data` is NULL elsewhere); the gradient of one that several stages read is added up. With schedules that empty the
   pipeline in each step, all but STASH and VERTICAL, the gradient has the bits of one rank that accumulates as many
   micro-batches (batchnorm apart, whose running statistics are those of all micro-batches together: Kim et al. 2020),
   and the loss of a step is known on all stages, hpml_step_info.accuracy on the last one. With STASH and VERTICAL a
   step is the forward pass of its batch and, on stage r, the backward pass and update of the batch p - 1 - r steps
   before, whose loss is the step's (0: there is none yet); hpml_distribute_finish empties the pipeline, and
   hpml_distribute_get counts no steps. With data > 1 an update takes the mean gradient of the replicas of the stage. */
typedef enum hpml_pipe_kind {
    HPML_PIPE_GPIPE = 0, HPML_PIPE_1F1B, HPML_PIPE_INTERLEAVED, HPML_PIPE_STASH, HPML_PIPE_ZERO_BUBBLE,
    HPML_PIPE_VERTICAL,
    HPML_PIPE_COUNT /* the number of schedules */
} hpml_pipe_kind;
HPML_API const char *hpml_pipe_name(hpml_pipe_kind kind); /* "gpipe", "1f1b", ...; NULL: there is none */

typedef enum hpml_pipe_work {
    HPML_PIPE_FORWARD = 0,
    HPML_PIPE_BACKWARD,         /* gradients of inputs and weights */
    HPML_PIPE_BACKWARD_INPUTS,  /* ZERO_BUBBLE: gradients of inputs alone, for which the stage before waits */
    HPML_PIPE_BACKWARD_WEIGHTS, /* ZERO_BUBBLE: gradients of weights alone, later */
    HPML_PIPE_UPDATE            /* the optimizer's step */
} hpml_pipe_work;

/* A pipeline: a schedule and, for simulations, times. stages, micro: required. */
typedef struct hpml_pipe_desc {
    uint32_t       _begin;
    hpml_pipe_kind kind;
    int32_t        stages;      /* p: ranks of the pipeline, 1 to 1024 */
    int32_t        micro;       /* m: micro-batches of a step, STASH and VERTICAL: steps; 1 to 65536 */
    int32_t        chunks;      /* v: INTERLEAVED: chunks of the model on each stage, 1 to 64; 0: 2. Others: 0 or 1 */
    /* For simulations. (pieces): an array of p v numbers (p stages, v chunks each), one for each piece of the model, in
       the model's order. NULL: the default that is named with each array */
    const double  *forward_s;   /* (pieces) seconds of a micro-batch's forward pass; NULL: 1 / v each */
    const double  *backward_s;  /* (pieces) seconds of a micro-batch's whole backward pass; NULL: twice forward_s */
    const double  *weights_s;   /* (pieces) share of backward_s for gradients of weights, ZERO_BUBBLE; NULL: half */
    const int64_t *bytes;       /* (pieces) bytes of a micro-batch that go from this piece to the next one, and as many
                                   of gradients back; NULL: 0 */
    double         update_s;    /* seconds of an update */
    hpml_network   network;     /* links between the stages, and how slow ranks are; .jitter is ignored */
    uint32_t       _end;
} hpml_pipe_desc;

typedef struct hpml_pipe_task { /* what a stage does next */
    hpml_pipe_work work;
    int32_t        micro;   /* number of the micro-batch; of an UPDATE: the last one whose gradient it applies */
    int32_t        chunk;   /* number of the chunk, 0 to v - 1, of the v chunks on this stage */
    int32_t        piece;   /* number of the model's piece: chunk * stages + stage */
    int32_t        slot;    /* the set of activations of this stage that the micro-batch occupies, from its forward pass
                               to the end of its backward pass; chunk c has slots of its own, after those of c - 1 */
    int32_t        version; /* updates that the weights of the pass have had; of an UPDATE: this one included */
} hpml_pipe_task;

/* Computes task k of a stage, k = 0, 1, ...: the only implementation of the schedules, because hpml_distribute executes
   these tasks and the functions below count, time and draw them. False: the stage has no further task, or the desc is
   not valid. Takes time in proportion to the tasks of the stage. */
HPML_API bool hpml_pipe_move(const hpml_pipe_desc *pipe, int stage, int k, hpml_pipe_task *out);
/* Returns how many sets of activations chunk `chunk` of a stage needs: the most micro-batches that it has in flight. */
HPML_API int  hpml_pipe_slots(const hpml_pipe_desc *pipe, int stage, int chunk);
/* Returns how many versions of its weights a stage keeps, the newest included: 1, unless STASH or VERTICAL. */
HPML_API int  hpml_pipe_versions(const hpml_pipe_desc *pipe, int stage);
/* Returns the bubble, the idle share of a step, by the formula of the table above; 0 for STASH and VERTICAL.
   INTERLEAVED: the formula holds if m, the number of micro-batches, is a multiple of p, the number of stages, and else
   gives less than the true value. */
HPML_API double hpml_pipe_bubble(const hpml_pipe_desc *pipe);

typedef struct hpml_pipe_span { /* a task, and when it runs */
    int32_t        stage;
    hpml_pipe_task task;
    double         begin_s, end_s;
} hpml_pipe_span;
typedef struct hpml_pipe_simulation {
    double  step_s;    /* seconds until the last stage has finished its last task */
    double  compute_s; /* seconds of tasks on the rank that computes most */
    double  bubble;    /* idle share of all ranks' time: 1 - (sum of all tasks' seconds) / (stages * step_s) */
    int64_t bytes;     /* sent by all ranks together */
    int32_t tasks;     /* of all stages */
    int32_t slots;     /* sets of activations on the stage that needs most */
} hpml_pipe_simulation;
/* Simulates the tasks of all stages in virtual time. A task starts when its stage is free and its input has arrived;
   links and network cards are those of hpml_simulate. spans: NULL, or gets the first `capacity` tasks in the order in
   which they end. HPML_ERR_ARGUMENT or HPML_ERR_MEMORY, with the reason in `error` (may be NULL). */
HPML_API hpml_status hpml_pipe_simulate(const hpml_pipe_desc *pipe, hpml_pipe_simulation *out, hpml_pipe_span *spans,
                                        int capacity, char *error, size_t size);
/* Draw spans, a row for each stage, as a text (forward passes are digits, backward passes small letters, gradients of
   weights capital letters, updates |, idle time . ; `columns` characters wide) and as an SVG file that browsers open.
   Return the length, as snprintf. */
HPML_API int hpml_pipe_text(const hpml_pipe_span *spans, int count, int columns, char *buffer, size_t size);
HPML_API int hpml_pipe_svg(const hpml_pipe_span *spans, int count, const char *title, char *buffer, size_t size);

/* Where to cut a chain of layers into stages, by dynamic programming: the slowest stage sets the pace, so its seconds
   get as small as possible. With A(j, m) the pace of the first j layers on m ranks,

     A(j, m) = min over i < j and r < m of max(A(i, m - r), 2 a / b, T(i, j, r))

   where a is the bytes that layer i - 1 sends to layer i, b the bandwidth of the links in bytes a second, and T(i, j,
   r) the seconds of a stage of layers i to j - 1 with r replicas, which share the micro-batches: max(sum of the layers'
   seconds, 4 (r - 1) / r w / b) / r, where w is the bytes of the stage's parameters (Narayanan et al. 2019). Without
   .replicate r is 1; if also the links take no time, the result is the block partition by which TorchGPipe (Kim et al.
   2020) balances stages. */
typedef struct hpml_pipe_cut_desc {
    uint32_t       _begin;
    int32_t        layers;      /* 1 to 65536 */
    int32_t        ranks;       /* number of ranks: without .replicate also that of stages, at most .layers */
    const double  *seconds;     /* (layers) of a micro-batch in each layer, forward and backward; or any other cost */
    const int64_t *bytes;       /* (layers) bytes that go from each layer to the next one; NULL: 0 */
    const int64_t *param_bytes; /* (layers) bytes of each layer's parameters, for .replicate; NULL: 0 */
    double         bandwidth;   /* b, in bytes a second; 0: links take no time */
    bool           replicate;   /* a stage may have several ranks; else each has one */
    uint32_t       _end;
} hpml_pipe_cut_desc;
typedef struct hpml_pipe_stage {
    int32_t first, end; /* layers first to end - 1 */
    int32_t replicas;   /* ranks that share the stage's micro-batches */
} hpml_pipe_stage;
/* Writes the stages of the best cut to `stages`, an array of desc->ranks, and returns their number. *pace: seconds of
   the slowest stage or link, may be NULL. -1: an error, with the reason in `error` (may be NULL). */
HPML_API int hpml_pipe_cut(const hpml_pipe_cut_desc *desc, hpml_pipe_stage *stages, double *pace, char *error,
                           size_t size);

// ---------------------------------------------------------------------------------------------------------------------
// >>api-plan   how a training is spread over ranks: one struct, its text, what it may hold
// ---------------------------------------------------------------------------------------------------------------------
/* What ranks exchange, and when. */
typedef enum hpml_strategy_kind {
    HPML_STRATEGY_SYNC = 0, /* each step applies the mean, or sum, of all ranks' gradients (Das et al. 2016) */
    HPML_STRATEGY_PS,       /* as SYNC, but servers have the parameters and run the optimizer (Li et al. 2014) */
    HPML_STRATEGY_BACKUP,   /* as PS, but a step does not wait for the slowest workers (Chen et al. 2016) */
    HPML_STRATEGY_SSP,      /* servers step with each gradient by itself; the fastest worker waits for the slowest one
                               where it is too far ahead: stale synchronous (Ho et al. 2013) */
    HPML_STRATEGY_ASYNC,    /* servers step with each gradient by itself, at once (Dean et al. 2012) */
    HPML_STRATEGY_LOCAL,    /* each rank trains alone; parameters become their mean in every .period-th step (local SGD:
                               Moritz et al. 2015, SparkNet; Stich 2019) */
    HPML_STRATEGY_BLOCK,    /* as local, but the mean change of the parameters in a block of .period steps is the
                               gradient of an outer optimizer with momentum (Chen and Huo 2016, BMUF; Douillard et al.
                               2023, DiLoCo) */
    HPML_STRATEGY_ELASTIC,  /* every .period steps, parameters and a common centre move towards each other (Zhang et al.
                               2015, EASGD); the centre is the result */
    HPML_STRATEGY_GOSSIP,   /* in each step parameters become a weighted mean with those of neighbours, by hpml_mix,
                               then each rank applies its own gradient (Lian et al. 2017, D-PSGD) */
    HPML_STRATEGY_FEDERATED, /* each worker trains on data of its own; now and then servers average the parameters of
                               some workers (McMahan et al. 2017) */
    HPML_STRATEGY_HOGWILD,  /* ranks step values that they share as threads, without locks (Niu et al. 2011) */
    HPML_STRATEGY_COUNT     /* the number of strategies */
} hpml_strategy_kind;
HPML_API const char *hpml_strategy_name(hpml_strategy_kind strategy); /* "sync", ...; NULL: there is none */

/* How the gradient of a dense layer travels. The gradient of a weight w (m, n) is dz^T x, a sum of outer products of
   the layer's inputs x (b, n) and the derivatives dz (b, m), for the b rows of a rank's batch. Ranks may exchange x and
   dz in place of the gradient, and each computes the sum over all ranks' rows itself: sufficient factors (Xie et al.
   2016). Of p ranks each sends (p - 1) b (m + n) floats; for a gradient that a ring adds up, 2 m n (p - 1) / p. To S
   servers a worker sends b (m + S n) floats in place of m n, and the servers multiply (Chilimbi et al. 2014, "Project
   Adam"); the servers send parameters back as they do without factors. */
typedef enum hpml_route {
    HPML_ROUTE_ALLREDUCE = 0, /* gradients are added up */
    HPML_ROUTE_FACTORS,       /* the factors of all dense layers travel; other gradients are added up. A dense layer is
                                 a hpml_linear with inputs of the batch, whose weight no other op reads */
    HPML_ROUTE_HYBRID,        /* for each dense layer what sends less (Zhang et al. 2017, "Poseidon"): factors where
                                 b (m + n) p <= 2 m n, to servers b (m + S n) <= m n, for the b rows of a full
                                 batch */
    HPML_ROUTE_COUNT          /* the number of routes */
} hpml_route;
HPML_API const char *hpml_route_name(hpml_route route); /* "allreduce", ...; NULL: there is none */

/* The plan: how a training is spread over ranks (hpml_distribute). All zero: synchronous steps with the mean of all
   ranks' gradients. A field at zero has its default. A field that the plan's strategy does not use must be zero. */
typedef struct hpml_plan {
    uint32_t        _begin;
    int32_t         data;         /* axes, see >>api-mesh: data * pipe * tensor * sequence * expert + servers is the
                                     number of ranks. 0: 1, and of data what is left */
    int32_t         pipe;         /* each rank has some of the layers, see >>api-pipe */
    int32_t         tensor;       /* each rank has a part of every layer with a .split */
    int32_t         sequence;     /* each rank has some time steps of each sequence */
    int32_t         expert;       /* each rank has some of the experts, and its own share of the batch */
    hpml_pipe_kind  schedule;     /* pipe: in which order a stage works on its micro-batches */
    int32_t         micro;        /* pipe: micro-batches of a batch; 0: 4 for each stage, but at most the batch's
                                     samples. STASH, VERTICAL: 0, because a batch is one */
    int32_t         chunks;       /* pipe, INTERLEAVED: pieces of the model on each stage; 0: 2 */
    const int32_t  *cut;          /* pipe: (pipe * chunks - 1) the ops, in running order, at which the pieces after the
                                     first one begin; read by hpml_distribute. Texts do not hold it. NULL: pieces have
                                     almost equal numbers of operations */
    hpml_strategy_kind strategy;
    int32_t         servers;      /* ps, backup, ssp, async, federated, required: so many of the last ranks are servers,
                                     the others workers */
    int32_t         backup;       /* backup, required: a step does not wait for so many workers, the slowest */
    int32_t         staleness;    /* ssp: steps that a worker may be ahead of the slowest one; 0: as ps */
    float           share;        /* federated: fraction of the workers that are drawn for a round; 0: all */
    hpml_codec_desc codec;        /* packs gradients, as in hpml_exchange_desc */
    hpml_algorithm  algorithm;    /* allreduce algorithm of plain sums, of gradients or parameters */
    bool            sum;          /* sync, ps, backup: apply the sum of the ranks' mean gradients; else the mean over
                                     the batch */
    int64_t         global_batch; /* samples of a step; 0: shares * model batch. There are data * expert shares, which
                                     differ by at most 1 sample */
    int64_t         bucket_bytes; /* tensors are exchanged together up to this size; 0: 256 KiB, by a link 8 MiB;
                                     1: each tensor alone */
    bool            no_overlap;   /* exchange after the backward pass, not during it (shard 2, 3: at once, while the
                                     pass waits). This is also done, in one bucket, where the ranks of one machine keep
                                     all its cores busy and no network is slow, because a background thread would take
                                     time from the computation */
    bool            delayed;      /* sync, double buffering: a step applies the gradients (and changes of batchnorm's
                                     running statistics) of the step before; the first step applies none */
    int64_t         warm_steps;   /* so many steps at the beginning exchange gradients uncompressed */
    bool            sync_batchnorm; /* batchnorm with the statistics of the global batch, as one rank would have: a
                                     small sum over ranks for each such layer, forward and backward */
    hpml_route      route;        /* sync, ps, backup, ssp, async: how gradients of dense layers travel; the sum of
                                     factors has other last bits than an allreduce, the same on all ranks */
    bool            exact;        /* sync: same bits for every number of ranks, algorithm, bucket and transport, see
                                     >>api-distribute. ps: servers add each push when it comes, as 64-bit integers, so
                                     that any order of arrival gives the same bits; without it they add in the order of
                                     the ranks, when all have come */
    int64_t         leaf;         /* exact: samples of a leaf, at most the model's batch; 0: 8 */
    int32_t         shard;        /* sync: for 1 / ranks of the parameters alone each rank keeps, 1: the optimizer's
                                     states, 2: gradients, too, 3: values, too; see >>strategy-shard. With 3 evaluation
                                     and prediction are collective. The same bits as 0 with algorithm ring and the same
                                     bucket_bytes, except 2 and 3 with the trainer's accumulate, whose micro-batches are
                                     added up over ranks one by one. 1 and 2 step parameters within the backward pass,
                                     unless no_overlap is set, and then refuse other hooks `update`. Needs
                                     hpml_comm_set_plan, or hpml_launch with a plan */
    bool            recompute;    /* results are computed again for the backward pass, in segments: those recorded by
                                     hpml_recompute, or about sqrt(ops) ones; the same bits, see hpml_graph_budget */
    int64_t         memory;       /* bytes of activations and scratch of a rank, at most: chooses what is kept, computed
                                     again or swapped to host memory; 0: no limit. Both need hpml_ctx_defer before the
                                     trainer is created, which a plan given to hpml_launch calls */
    int32_t         period;       /* local, block, elastic: steps from one meeting of all ranks to the next; federated:
                                     steps of a round; 0: 1 */
    float           elastic;      /* elastic: how far a meeting moves a rank's parameters towards the centre, as a
                                     fraction of the difference, and the centre towards them; 0: 0.9 / ranks;
                                     HPML_ZERO: each rank trains alone */
    float           outer_lr;     /* block: learning rate of the outer optimizer; 0: 1 */
    float           outer_momentum; /* block: momentum of the outer optimizer; 0: 1 - 1 / ranks; HPML_ZERO: none */
    bool            outer_nesterov; /* block: a block begins ahead of the centre, by momentum * its last change */
    hpml_topology   topology;     /* gossip: which ranks are neighbours */
    uint64_t        seed;         /* gossip: seed of the random pairs; federated: of the draw of workers */
    int32_t         history;      /* number of the last steps whose times are kept for hpml_distribute_steps; 0: 64 */
    uint32_t        _end;
} hpml_plan;

/* A plan as text, for logs, command lines and the environment: "exact=1,codec=onebit,codec.min_elements=64". The names
   are the struct's, but `codec` is codec.kind; flags are 0 or 1, enums their words in small letters. The text does not
   hold codec.custom and codec.user. */
/* Writes the plan's fields that are not zero (`all`: all fields) as text to `buffer`, cut to `size` bytes. Returns the
   length that the whole text has, as snprintf does. */
HPML_API int         hpml_plan_text(const hpml_plan *plan, bool all, char *buffer, size_t size);
/* Sets the fields of *plan that the text names and leaves the others alone. After HPML_ERR_ARGUMENT *plan is as before,
   and `error` (`size` bytes; may be NULL) names the word that is wrong and what is possible in its place. */
HPML_API hpml_status hpml_plan_parse(const char *text, hpml_plan *plan, char *error, size_t size);
/* Writes which fields differ: "exact 0 to 1, codec none to onebit". Returns how many do. */
HPML_API int         hpml_plan_differs(const hpml_plan *from, const hpml_plan *to, char *buffer, size_t size);

/* Facts that decide whether a plan is possible: hpml_plan_facts_of reads them from a trainer, or you fill them in. */
typedef struct hpml_plan_facts {
    int32_t ranks;
    int64_t batch;         /* samples that the model's input holds on each rank */
    int32_t accumulate;    /* micro-batches of an update; 0: 1 */
    bool    overflows;     /* gradients overflow now and then: f16 with a dynamic loss scale */
    bool    mixes_samples; /* an op mixes the samples of a batch: hpml_graph_batchable is false */
    bool    clips;         /* the trainer has a clip_norm */
    bool    steps_tensors; /* a step of the optimizer depends on whole tensors: hpml_trainer_apply_range refuses it */
    bool    native;        /* the transport, or a device link, has an allreduce of its own */
    bool    no_factors;    /* results of layers are on a device, or stored as halves */
    bool    sparse;        /* an embedding of the model has .sparse set */
    bool    together;      /* ranks are threads of one process, on the host, and time is not virtual */
    bool    device;        /* the trainer's arrays are in the memory of a device, not of the host */
    bool    steps_whole;   /* a step of the optimizer takes a whole tensor at once (hpml_optimizer.whole) */
    bool    host_states;   /* the optimizer's states are in host memory, and values on a device (.host_optimizer) */
} hpml_plan_facts;
HPML_API void        hpml_plan_facts_of(hpml_trainer *t, const hpml_comm *c, hpml_plan_facts *out);
/* Whether the plan is possible. A pure function, which takes about a microsecond. HPML_ERR_ARGUMENT: a field is out of
   range; HPML_ERR_UNSUPPORTED: fields exclude each other, or `facts` exclude them. `why` (may be NULL) then gets a
   sentence that names the fields and a way out. */
HPML_API hpml_status hpml_plan_check(const hpml_plan *plan, const hpml_plan_facts *facts, char *why, size_t size);
/* Copies the plan to *out with zeros replaced by the defaults that they mean. */
HPML_API void        hpml_plan_resolve(const hpml_plan *plan, const hpml_plan_facts *facts, hpml_plan *out);
/* Steps through the plans that hpml_plan_check accepts: each field that matters has zero and a few typical values.
   Begins with a plan of zeros; sets *plan to the next one; false: there is no further one, and *plan is zero again. */
HPML_API bool        hpml_plan_next(hpml_plan *plan, const hpml_plan_facts *facts);

/* Roles by name, as in TensorFlow's ClusterSpec: the text "worker=a:2222,b:2222,c:2222 ps=d:2222,e:2222" lists the
   tasks of each role, as addresses or other names. Ranks are the workers in their order, then the servers. */
typedef struct hpml_cluster {
    int32_t     workers, servers; /* numbers of tasks with the roles "worker" (at least 1) and "ps" */
    const char *tasks[2];         /* where the roles' lists of tasks begin in the text, which must be kept */
} hpml_cluster;
/* On HPML_ERR_ARGUMENT *out is zero, and `error` (may be NULL) gets a text that names the wrong word and shows what may
   be written. */
HPML_API hpml_status hpml_cluster_parse(const char *text, hpml_cluster *out, char *error, size_t size);
HPML_API int         hpml_cluster_rank(const hpml_cluster *c, const char *role, int task); /* -1: no such task */
HPML_API const char *hpml_cluster_role(const hpml_cluster *c, int rank, int *task);        /* NULL: no such rank */
/* Writes the address of the task that is rank `rank`, "" if no task is. Returns the length of the text, as snprintf. */
HPML_API int         hpml_cluster_address(const hpml_cluster *c, int rank, char *buffer, size_t size);
/* Deals whole tensors to `servers` servers in turn, as TensorFlow's replica_device_setter does. server: (count) gets
   the server of each tensor; floats: (servers) gets the floats on each server, or NULL. Strategies with servers give
   each server an equal range of all floats instead, because one large tensor would make its server the slowest. */
HPML_API void hpml_place_round_robin(const hpml_gradient *tensors, int count, int servers, int32_t *server,
                                     int64_t *floats);

// ---------------------------------------------------------------------------------------------------------------------
// >>api-mesh   axes of ranks: models larger than a worker
// ---------------------------------------------------------------------------------------------------------------------
/* The ranks of a plan are a block with five axes. Ranks that differ in their place on one axis alone form a group:
     tensor     has one copy of the model: each rank a part of every layer with a .split (Shoeybi et al. 2019)
     sequence   has one copy of the samples: each rank some of their time steps
     expert     has one copy of the experts; each rank has samples of its own
     pipe       has one copy of the model: each rank some consecutive layers
     data       copies of the ranks of the other four axes, each with samples of its own
   Numbers of ranks grow fastest along tensor, whose ranks talk most and so belong on one node:
     rank = (((data_at * pipe + pipe_at) * expert + expert_at) * sequence + sequence_at) * tensor + tensor_at */
typedef struct hpml_mesh {
    hpml_comm *all;                /* the communicator that is cut into axes */
    hpml_comm *axis[HPML_AXES];    /* by hpml_axis: this rank's group; NULL: one rank, or with servers, which are on no
                                      axis. Ops use these communicators; a program may, too, in the same order on all
                                      ranks */
    hpml_comm *replicas;           /* data x sequence x expert, at this rank's places on pipe and tensor: all have the
                                      same whole parameters, whose gradients they average; never NULL */
    int32_t    size[HPML_AXES], at[HPML_AXES]; /* ranks of each axis, at least 1; this rank's place on it */
} hpml_mesh;

/* Cuts the communicator into the axes of the plan, and gives their groups to its context (hpml_ctx_set_group).
   Collective, with the same plan on all ranks, once, before the model is recorded. HPML_PLAN in the environment
   replaces the fields that it names; plan NULL: only these fields are set. hpml_launch does all this for
   hpml_launch_desc.plan and HPML_PLAN. A later hpml_distribute without a plan takes this plan; one with a plan in which
   axes are 0 takes these axes from the mesh. With a plan in which all axes but data are 1, axes send nothing, and the
   bits are the same as without a plan.
   HPML_ERR_ARGUMENT: the product of the axes and servers is not the number of ranks; HPML_ERR_STATE: there is a mesh
   already, or a model. If one rank has an error, all have one. */
HPML_API hpml_status      hpml_comm_set_plan(hpml_comm *c, const hpml_plan *plan);
HPML_API const hpml_mesh *hpml_comm_mesh(const hpml_comm *c); /* NULL: no plan has been set */

// ---------------------------------------------------------------------------------------------------------------------
// >>api-distribute   data parallelism
// ---------------------------------------------------------------------------------------------------------------------
/* Data parallelism: p ranks, each with a share of every global batch, train as one rank with all of it. Parameters
   start as those of rank 0, gradients are added up over ranks while the backward pass still runs, all ranks make the
   same optimizer step. Serial code does not change: hpml_trainer_fit gets the whole data set on all ranks, and each
   rank takes its share of every batch (disjoint, complete, shuffled with one seed); hpml_trainer_step gets this rank's
   samples; hpml_trainer_evaluate evaluates all of its data on each rank that calls it. A short last batch is weighted
   by its samples, and a rank without samples takes part. Batchnorm normalizes a rank's share alone unless
   sync_batchnorm is set.

   Gradients of a trainer on a device are exchanged by the communicator's link, if there is one (codecs and plain sums,
   neither exact nor delayed); else a copy of them is exchanged on the host. Where the link ends at the node, it adds up
   floats inside the node, and the codec packs what is sent between nodes.

   With servers (hpml_plan.servers) a call of hpml_trainer_step on a server serves the workers until each has done as
   many steps as the server; step count and schedule of async and ssp count the servers' steps, one for each gradient.
   Messages have the tags HPML_TAG_MAX and HPML_TAG_MAX - 1. Each worker has running statistics of its own.

   The trainer's gradients are one array, each padded to HPML_GRADIENT_ALIGN floats: see hpml_trainer_array. */

/* Exact sums. Floats do not add up to the same bits in every order; integers do. The global batch is cut into leaves of
   a fixed size, each computed on its own by one rank. All ranks agree on the largest gradient, scale by a power of two
   so that the sum of all leaves fits 62 bits, round each leaf to 64-bit integers, add those, and convert back once. So
   1, 2, 3, ... ranks give the same bits (same build, same kind of CPU), at 2 times the bytes of f32 and the memory of
   one gradient for each leaf of a rank. With a codec each leaf has residuals, and leaves are added up in order. */

/* hpml_distribute creates a distribution, a set of hooks of the trainer, which replaces an earlier distribution of that
   trainer. Collective, with the same plan on all ranks; returns NULL on failure, with the error on the context. plan
   NULL: all fields zero. The environment variable HPML_PLAN, a text for hpml_plan_parse, replaces the fields of the
   plan that it names: HPML_PLAN="codec=onebit,delayed=1". Other hooks that change gradients are attached before the
   distribution (hpml_trainer_attach), hooks with a `run` or `update` after it. */
typedef struct hpml_distributed hpml_distributed;
HPML_API hpml_distributed *hpml_distribute(hpml_trainer *t, hpml_comm *c, const hpml_plan *plan);
/* Central storage, as TensorFlow's CentralStorageStrategy: ranks that are threads of one process share one copy of the
   parameters. Each rank places its parameters in the same memory (hpml_params_place; rank 0 first, the others with
   `keep`) before it creates its trainer, and calls this function after hpml_distribute: all ranks compute gradients,
   rank 0 steps the parameters for all. Collective; an error where a rank's parameters are not in the memory of rank 0's
   parameters, with other strategies than sync, on devices, with batchnorm or a dynamic loss scale. */
HPML_API hpml_status hpml_distribute_share(hpml_distributed *d);
/* The end of training, collective: completes exchanges in flight and sets the parameters of every rank to the result of
   the training. Sync: nothing to do, because all ranks have the same parameters after each step; gradients in flight
   (`delayed`) are not applied. Local, block: the ranks exchange their parameters once more, unless they did in the
   last step; block: the parameters become the centre. Elastic: the centre. Gossip: the mean over the ranks. With
   servers: their parameters, as soon as all workers that are not lost have called this function, and the mean of the
   workers' running statistics. Pipelines with schedule stash or vertical: the backward passes and updates of the
   micro-batches in flight are run. Training may go on afterwards. A training may end without this call: a server then
   serves while its distribution or context is being freed, until all workers' distributions or contexts are freed. */
HPML_API hpml_status hpml_distribute_finish(hpml_distributed *d);
/* Optional: makes the trainer serial again and releases the memory; else both happen when the context is freed. Must be
   called on all ranks, between two steps, because it waits for exchanges in flight; with `delayed` the gradients of the
   last step, which the next step would apply, are dropped. */
HPML_API void hpml_distribute_free(hpml_distributed *d);

/* Means over the steps since the start, or since the last call with reset; seconds are those of hpml_comm_now. */
typedef struct hpml_distribute_report {
    int64_t steps;
    double  step_s, compute_s; /* seconds of a whole step; of its forward and backward pass */
    double  comm_s, exposed_s; /* seconds of exchanging; of waiting for the exchange with nothing left to compute */
    double  hidden;            /* share of comm_s that computation hides: 1 - exposed_s / comm_s */
    double  efficiency;        /* 1 - exposed_s / step_s: at 1, p ranks do p batches in the time of one */
    double  bytes;             /* bytes that this rank sends in a step */
    double  split_bytes;       /* of .bytes, those sent by layers along axes tensor, sequence, expert and pipe */
    double  plain_bytes;       /* bytes that a ring allreduce of this rank's gradients as f32 would send */
    double  loss;              /* mean over all ranks' samples of the last step; with `delayed` of the step before,
                                  because the loss is sent with the gradients. Local, block, elastic: of the steps up
                                  to the last meeting; after it, and with gossip, of this rank alone. NaN: before the
                                  first step */
    int64_t samples;           /* number of samples over which .loss is the mean */
    int32_t buckets;
} hpml_distribute_report;
HPML_API void hpml_distribute_get(hpml_distributed *d, hpml_distribute_report *out, bool reset);
/* Returns how the gradient of parameter number `param` travels: ALLREDUCE or FACTORS. */
HPML_API hpml_route hpml_distribute_route(const hpml_distributed *d, int param);
HPML_API int  hpml_distribute_text(hpml_distributed *d, char *buffer, size_t size); /* writes the report as a line */

/* Where the time of one step of one rank went. The step lasts from the end of the rank's wait in the step before to the
   end of its wait in this step. What remains of step_s after compute_s, exposed_s and bubble_s is the time for loading
   data and for the update. With `delayed` the exchange that is waited for is the one of the step before. */
typedef struct hpml_step_row {
    int64_t step;      /* updates done, this one included */
    int32_t rank;
    double  step_s, compute_s; /* seconds of the whole step; of its forward and backward pass */
    double  overlap_s; /* seconds of exchanging while computing */
    double  exposed_s; /* seconds of waiting for the exchange with nothing left to compute, without bubble_s */
    double  bubble_s;  /* seconds of waiting for the slowest rank while that rank still computed */
    double  bytes;     /* sent */
} hpml_step_row;
/* The rows of the last steps of all ranks, by step, then rank; whole steps only, as many as `capacity` rows hold.
   Collective, with the same capacity. Returns the number of rows, the same rows on all ranks; -1: an error, on the
   context. */
HPML_API int hpml_distribute_steps(hpml_distributed *d, hpml_step_row *rows, int capacity);
/* Writes the rows and their mean as a table, and a line that names the slowest rank. Returns as snprintf does. */
HPML_API int hpml_steps_text(const hpml_step_row *rows, int count, char *buffer, size_t size);
/* Returns the rank that computed longest in these rows, for which the others waited if steps are synchronous; -1: no
   rows. *times (may be NULL): its computing time divided by the mean of the other ranks; 0: no other rank computed. */
HPML_API int hpml_steps_slowest(const hpml_step_row *rows, int count, double *times);

/* A checkpoint of the whole job, the residuals of all ranks and, with `delayed`, the gradients not yet applied
   included; collective. It has whole tensors, and loads on any number of ranks and any axes: the residuals of all ranks
   are shared out among the ranks that load them, so that no part of a gradient is lost. On as many ranks as before, or
   with `exact`, the job continues bit for bit. Where ranks exchange parameters, or with schedules stash and vertical,
   saving is also a hpml_distribute_finish, and the states of the ranks' optimizers become their means, so that any
   number of ranks can continue. Residuals of exchanges between nodes (where a device link connects only the ranks of a
   node) load only on as many nodes with as many ranks each. */
HPML_API hpml_status hpml_distribute_save(hpml_distributed *d, const char *path);
HPML_API hpml_status hpml_distribute_load(hpml_distributed *d, const char *path);

/* Sets the samples of a step, from the next call of hpml_trainer_fit on: at most the sum of the batches for which the
   ranks' models are recorded. Not with `exact`. The learning rate follows by the trainer's lr_rule. All ranks make the
   same call; checkpoints do not hold this number. */
HPML_API hpml_status hpml_distribute_set_batch(hpml_distributed *d, int64_t global_batch);

/* How large may a step be before training suffers? As in Seide et al. 2014, batch sizes are tried on a part of the
   data, from `min` up to `max`, each from the same checkpoint and on the same samples (without double buffering, which
   would favour small batches). The first size whose mean loss exceeds that of `min` by more than `slack` ends the
   search; the size before it is taken. Repeat the search now and then, from half to twice the size chosen, because
   larger steps do no harm later in training. Seide et al. gave learning rates per sample: lr_rule LINEAR. */
typedef struct hpml_batch_search_desc {
    uint32_t    _begin;
    const char *path;     /* required: of the checkpoint that trials start from, written here and read by all ranks */
    int64_t     min, max; /* smallest, largest samples a step; 0: min as now, max all ranks' batches together */
    double      factor;   /* each size divided by the size before; 0: the square root of 2 */
    int64_t     multiple; /* sizes are multiples of this number; 0: 1 */
    int64_t     samples;  /* number of samples that each size trains on; 0: a tenth of the data */
    double      slack;    /* most by which a size's loss may exceed that of .min, as a fraction of it; 0: 0.01 */
    uint32_t    _end;
} hpml_batch_search_desc;
typedef struct hpml_batch_trial {
    int64_t batch; /* samples a step; 0: the list ends here */
    double  loss;  /* mean over the samples; infinite: training diverged */
} hpml_batch_trial;
/* Collective, between two passes over the data. Returns the batch size that was chosen and set, in samples a step; all
   else is as before the call, except the report, which starts anew. -1: an error, on the context. trials: (capacity)
   gets the sizes that were tried; may be NULL. */
HPML_API int64_t hpml_distribute_search(hpml_distributed *d, hpml_dataset *data, const hpml_batch_search_desc *desc,
                                        hpml_batch_trial *trials, int capacity);

// ---------------------------------------------------------------------------------------------------------------------
// >>api-layers   layers whose ranks communicate
// ---------------------------------------------------------------------------------------------------------------------
/* Layers for the groups of a context (hpml_ctx_set_group). All ranks of a group record the same layers in the same
   order; a layer's messages are part of its forward and backward pass. A tensor that is split is on each rank this
   rank's block of it, rank r having block r. Every rank has a loss of its own, and gradients are those of the sum of
   the ranks' losses, which data parallelism divides by the number of ranks. For a group of one rank a layer computes
   the same without messages, with parameters of the same names. Arrays are f32 in host memory while they travel; a
   layer with a NULL source returns NULL. A rank whose step has failed gives its peers an error that names the rank. */

/* Ring attention (Liu et al. 2023): hpml_attention on a sequence that the SEQUENCE axis splits. qkv (B, T / p, 3C):
   this rank's time steps; y (B, T / p, C). Queries stay, keys and values pass from rank to rank around a ring of p
   ranks, and softmax is computed block by block, so that no rank has more than 1 / p of the sequence and none of the
   matrix (T, T). A rank sends (p - 1) B (T / p) 2C floats in the forward and (2p - 1) B (T / p) 2C in the backward
   pass. With a causal mask rank r computes r + 1 of the p blocks, so that the last rank sets the time. */
HPML_API hpml_tensor *hpml_ring_attention(hpml_tensor *qkv, const hpml_attention_desc *desc);

/* Mixture of experts: layers of which each token uses one or two. x (.., D) has n tokens, y (.., D):
       p = softmax(x gate^T),   y = sum of g_e (relu(x w1_e^T + b1_e) w2_e^T + b2_e) over the best 1 or 2 experts e,
   with g_e = p_e for one (Fedus et al. 2021, Switch) and g_e = p_e / (sum of both p) for two (Lepikhin et al. 2020,
   GShard). The EXPERT axis splits the experts: each of its p ranks has experts / p of them, and tokens of its own,
   which travel to their experts and back by all-to-all. The n tokens of a rank's full batch are a group with places of
   its own in every expert: cap = ceil(capacity top n / experts); first choices take places first, then second ones, in
   the order of tokens, and a token without a place gets 0 from that expert, so add y to x. A rank sends 2 (p - 1) / p
   experts cap D floats in the forward and as many in the backward pass, also a rank without samples. Parameters:
   gate.weight (experts, D), w1 (experts, hidden, D), b1 (experts, hidden), w2 (experts, D, hidden), b2 (experts, D),
   split along dimension 0. */
typedef struct hpml_experts_desc {
    uint32_t    _begin;
    int32_t     experts;  /* required, 2 or more, a multiple of the ranks of the EXPERT axis */
    int32_t     top;      /* experts of a token: 1 or 2; 0: 1 */
    int64_t     hidden;   /* 0: 4 D */
    float       capacity; /* places, as a multiple of those that an even spread of tokens needs; 0: 1.25 */
    const char *name;     /* NULL: "experts" and a number */
    uint32_t    _end;
} hpml_experts_desc;
/* *balance, if not NULL, becomes a loss, a scalar that is 1 where tokens are spread evenly over the experts: the number
   of experts x sum over experts e of f_e P_e, with f_e: the share of the tokens whose first choice is e, and P_e: the
   mean over the tokens of the gate's probability p_e. Add about 0.01 times this loss to the loss of the model. */
HPML_API hpml_tensor *hpml_experts(hpml_tensor *x, const hpml_experts_desc *desc, hpml_tensor **balance);

/* Blocks of an image of (rows H) x (cols W) pixels in a grid of rows x cols blocks, one for each rank of the SEQUENCE
   axis (row after row), which has rows x cols ranks. x (B, C, H, W) is this rank's block; y (B, C, H + 2 halo_h, W + 2
   halo_w) has the adjacent pixels of the neighbouring blocks around x, and zeros outside the image. Backward sends the
   gradients of these pixels back to the ranks of the neighbouring blocks, which add them to their dx. A rank sends 2 B
   C W halo_h floats if rows > 1 and 2 B C (H + 2 halo_h) halo_w if cols > 1, in each pass (the first and the last block
   of the grid are neighbours for this count). With one rank all pixels around x are zeros. */
HPML_API hpml_tensor *hpml_halo(hpml_tensor *x, int32_t rows, int32_t cols, int32_t halo_h, int32_t halo_w);

/* hpml_conv2d whose images are split into bands of rows by the SEQUENCE axis (Dryden et al. 2019): x (B, C, H / p, W)
   and y (B, out, H / p, W). Needs an odd kernel_h, padding_h = kernel_h / 2 and stride and dilation 1. Every rank has
   the whole weights. A rank sends 2 (kernel_h / 2) B C W floats in each pass. */
HPML_API hpml_tensor *hpml_conv2d_rows(hpml_tensor *x, int64_t out, const hpml_conv2d_desc *desc);

/* Locally connected layer (Le et al. 2012; Coates et al. 2013): as a convolution with stride 1 that keeps the size of
   the image, but with weights of its own at each pixel. The image is cut into a grid of rows x cols blocks, each with H
   x W pixels, and each of rows x cols ranks of the SEQUENCE axis has one of them, and its weights; neighbours exchange
   a halo of kernel / 2 pixels. One rank alone has the whole image, (rows H) x (cols W). x (B, C, H, W), y (B, out, H,
   W). Parameters: weight (rows x cols, H W, out, C kernel^2), bias (rows x cols, H W, out), split along dimension 0. */
typedef struct hpml_local2d_desc {
    uint32_t    _begin;
    int32_t     kernel;     /* required, odd */
    int32_t     rows, cols; /* of the grid; 0: 1 */
    hpml_act    activation; /* 0: none */
    const char *name;       /* NULL: "local2d" and a number */
    uint32_t    _end;
} hpml_local2d_desc;
HPML_API hpml_tensor *hpml_local2d(hpml_tensor *x, int64_t out, const hpml_local2d_desc *desc);

/* Collectives as layers (Lee et al. 2015, MPI-Caffe), for ranks that record different models, such as one trunk and
   many heads. x has the same shape on all ranks. root: a rank of the group; reduce and gather: -1 means all ranks. Not
   over TENSOR. The x of ranks that are no root of bcast must be finite, an input for example, but is not used.
     bcast   y = x of rank `root`. Backward: rank `root` gets the sum of the gradients
     reduce  y = sum of the ranks' x at the root, else zeros. Backward: all get the root's gradient
     gather  (B, C, ..) to (B, p C, ..): the ranks' x joined along dimension 1 at the root, else zeros. Backward: each
             rank gets its block of the root's gradient
   Both passes run on every rank that has recorded the layer, if its loss depends on y. */
HPML_API hpml_tensor *hpml_layer_bcast(hpml_tensor *x, hpml_axis axis, int root);
HPML_API hpml_tensor *hpml_layer_reduce(hpml_tensor *x, hpml_axis axis, int root);
HPML_API hpml_tensor *hpml_layer_gather(hpml_tensor *x, hpml_axis axis, int root);

/* Dense layer for "one weird trick" (Krizhevsky 2014): the convolutions before it are data parallel, so each rank of
   the EXPERT axis has its own samples, but only `out` / p rows of the weight of this layer. Features of all
   ranks' samples go to all ranks, and results go back by all-to-all: (p - 1) B (in + out / p) floats from each rank in
   each pass, instead of a gradient of in x out numbers. x (B, in), y (B, out), as hpml_linear with desc (.weight and
   .split must be 0). */
HPML_API hpml_tensor *hpml_linear_rows(hpml_tensor *x, int64_t out, const hpml_linear_desc *desc);

/* Named dimensions (Shazeer et al. 2018, Mesh-TensorFlow). `rules`, such as "batch:data,hidden:tensor", say which axis
   splits a dimension; a dimension without a rule is whole on every rank. `dims` names the dimensions of a tensor, in
   words separated by spaces. With other rules the same program runs with another layout. Errors: two dimensions of a
   tensor on one axis; a size that the number of ranks does not divide; a rule that contradicts what an axis means: DATA
   and EXPERT divide samples (dimension 0 of an input, of which each rank already has only its own samples), TENSOR and
   SEQUENCE divide the other dimensions; a parameter split along two dimensions.
     named_param  creates a parameter, of which this rank has its part; desc->shape is that of the whole
     named_part   x is whole; the result is this rank's part of x (hpml_group_split)
     einsum       y = sum over all dimensions that `text` has in a and b but not in y of a b: "batch in, hidden in ->
                  batch hidden". y is split as a and b are. Where a dimension that is summed is split, the ranks' sums
                  are added up (hpml_group_sum), which in each such pass sends the bytes of a sum of y over its axis */
HPML_API hpml_tensor *hpml_named_param(hpml_ctx *ctx, const char *rules, const char *dims, const hpml_param_desc *desc);
HPML_API hpml_tensor *hpml_named_part(hpml_tensor *x, const char *rules, const char *dims);
HPML_API hpml_tensor *hpml_einsum(const char *text, hpml_tensor *a, hpml_tensor *b);

// ---------------------------------------------------------------------------------------------------------------------
// >>api-simulate   step time on machines you do not have
// ---------------------------------------------------------------------------------------------------------------------
/* How long would a step of synchronous training take on 512 ranks behind 10 Gbit/s? The simulator plays the moves of
   all ranks in virtual time, without threads and payloads: the same moves, links and cards as HPML_TRANSPORT_CLOCK give
   the same times, but thousands of ranks take milliseconds to seconds. It models:
     - a message takes latency + bytes / bandwidth. A node's card for traffic with other nodes (out and in at once)
       serves one message after another; latency does not occupy it: k in line take latency + k bytes / bandwidth
     - a backward pass from the last layer to the first; a bucket is exchanged when the backward pass of its first layer
       and the exchange of the bucket before it have ended: one stream of communication a rank, which overlaps the
       computation and is not slowed down by it
     - stragglers: network.slow multiplies a rank's computation
   With servers the step is that of a long training: while a server answers one worker after another, the first workers
   push again, because cards send and receive at once. So with K workers, M bytes of gradients and one server, whose
   card limits the speed, a step takes (K + 1) M / bandwidth, K (K + 1) / (2 (K - 1)) times as long as a ring of K ranks
   (K = 8: 5.1), and not 2 K M / bandwidth (9.1 times), the time in which the server's card would pass all its bytes one
   after another. Of p ranks, the best number of servers has the largest (p - servers) / step_s. With servers the
   simulation is exact where each rank has a node of its own.
   It does not model jitter, lost packets, a switch with too little bandwidth, bandwidth shared with the computation. */
typedef struct hpml_simulate_desc {
    uint32_t       _begin;
    int32_t        ranks;            /* 1 to 65536 */
    hpml_network   network;
    int32_t        layers;
    const double  *forward_s;        /* (layers) seconds on one rank for its part of the batch; NULL: 0 */
    const double  *backward_s;       /* (layers) */
    double         update_s;         /* seconds to update all weights, after the last exchange */
    const int64_t *elements;         /* (layers) elements of the gradient; 0: this layer has no parameters */
    hpml_algorithm algorithm;        /* AUTO: as hpml_allreduce would choose. NATIVE is refused: unknown moves */
    hpml_element   element;          /* type in which gradients travel: F32, BF16, ... */
    const int64_t *packed;           /* (layers) bytes of each gradient as a codec packs it. Packed gradients cannot be
                                        added on the way: each rank sends every owner its stripe (all to all); the owner
                                        adds, packs, and sends the sum to all ranks (allgather); `algorithm` does not
                                        count. NULL: no codec */
    double         codec_s_per_byte; /* seconds to pack and unpack a byte of f32 gradient, and then of the sum */
    size_t         bucket_bytes;     /* bytes of f32 gradient in a bucket; 0: 25 MiB, 1: each layer alone */
    bool           no_overlap;       /* exchange after the backward pass, not during it */
    bool           delayed;          /* exchange the gradients of the step before during this one (double buffering) */
    int32_t        servers;          /* strategy ps: so many of the last ranks are servers, which share the update; the
                                        others push gradients (as packed) behind the backward pass and get f32 values.
                                        algorithm, element, codec_s_per_byte, bucket_bytes, no_overlap and delayed do
                                        not count. 0: an allreduce */
    uint32_t       _end;
} hpml_simulate_desc;

typedef struct hpml_simulation {
    double  step_s;         /* seconds of a step on the slowest rank: compute_s + straggle_s + exposed_s */
    double  compute_s;      /* seconds of forward, backward and update on a rank that is not slow */
    double  straggle_s;     /* seconds that the slowest rank computes longer than compute_s */
    double  exposed_s;      /* seconds of communication that overlap no computation */
    double  comm_s;         /* seconds of communication, packing included; all but exposed_s overlap computation */
    double  efficiency;     /* compute_s / step_s: at 1, p ranks do p batches in the time of one */
    int64_t bytes_per_rank; /* sent by the rank that sends most */
    int64_t messages;       /* number of messages of the rank that sends most */
    int64_t between_bytes;  /* sent from node to node, by all ranks together */
    int32_t buckets;
} hpml_simulation;

/* Simulates the training that desc describes, and writes times and counts of a step to *out. Returns HPML_OK; or
   HPML_ERR_ARGUMENT, HPML_ERR_UNSUPPORTED or HPML_ERR_MEMORY, with the reason in `error` (may be NULL). */
HPML_API hpml_status hpml_simulate(const hpml_simulate_desc *desc, hpml_simulation *out, char *error, size_t size);
HPML_API int hpml_simulate_text(const hpml_simulation *s, char *buffer, size_t size); /* writes a line of text */
/* Returns the seconds from the start of an allreduce until the last rank has the sum; -1: an argument is out of range
   (hpml_simulate says which), or no memory. */
HPML_API double hpml_simulate_allreduce(hpml_algorithm a, int32_t ranks, const hpml_network *network, int64_t bytes);

/* Rules of thumb. Amdahl: the speedup of p ranks when the share `serial` of the work cannot be divided. Optimal ranks,
   from "1-Bit Stochastic Gradient Descent" (Seide et al. 2014): more ranks would wait for the network. divisible_s:
   seconds of work in a step that ranks share (half a minibatch with double buffering, and the work on each stripe);
   comm_s: seconds of the exchange (T_comm / Z when packed Z times smaller); fixed_s: seconds of work that every rank
   does (the update). Infinite if comm_s <= fixed_s: then the update is the limit, and the network is never
   saturated. */
HPML_API double hpml_amdahl(double serial, double ranks); /* 1 / (serial + (1 - serial) / ranks) */
HPML_API double hpml_optimal_ranks(double divisible_s, double fixed_s, double comm_s); /* divisible / (comm - fixed) */

// ---------------------------------------------------------------------------------------------------------------------
// >>api-forecast   a step of any plan on a machine you do not have; the search for a plan
// ---------------------------------------------------------------------------------------------------------------------
/* How long would a step of this plan take on that machine? A plan is told as programs, one for each pipeline stage and
   server: compute, send, receive, take part in a collective of an axis, start or await a job of the background. These
   are the steps that hpml_distribute makes, so HPML_TRANSPORT_CLOCK takes the same time to the last bit if a layer is
   hpml_comm_compute and has one parameter. All ranks play their programs in virtual time by the queue, links and
   network cards of hpml_simulate. Where ranks are equal, one unit of them (whole replicas on whole nodes) is played for
   all, so thousands of ranks take milliseconds.

   Exact: strategy sync without codec and delayed, any data x pipe x tensor, all schedules that empty the pipeline, shard
   0 to 3, strategies local, block and elastic; ps with one server. Nearly: codecs (equal stripes, no time to pack), axes
   sequence and expert, delayed, several servers; a layer with several parameters, because a bucket may end between
   them; fewer ranks played than there are, where blocks are not equal. Refused with HPML_ERR_UNSUPPORTED: strategies
   whose messages depend on who is first (backup, ssp, async, federated, hogwild), gossip, exact, routes factors and
   hybrid, schedules stash and vertical. */

/* How nodes are joined. Messages cross `hops` links on average; each router that is passed adds its time to the
   latency, and links that many messages share lower the bandwidth of each node. */
typedef enum hpml_fabric_kind {
    HPML_FABRIC_SWITCH = 0, /* one switch for all nodes, at full speed */
    HPML_FABRIC_RING,       /* each node is a router with two neighbours */
    HPML_FABRIC_TREE,       /* binary tree of routers, with the nodes as leaves: all links equally fast */
    HPML_FABRIC_FAT_TREE,   /* the same, each level with as much bandwidth as all nodes below it */
    HPML_FABRIC_TORUS,      /* nodes in a rectangle, as square as possible, with wrap-around */
    HPML_FABRIC_SLIM_FLY,   /* q = 5: 50 routers of 7 neighbours, any two at most 2 apart (Besta and Hoefler 2014);
                               nodes are dealt to the routers */
    HPML_FABRIC_COUNT       /* the number of kinds */
} hpml_fabric_kind;
HPML_API const char *hpml_fabric_name(hpml_fabric_kind kind); /* "switch", ...; NULL: there is none */
typedef struct hpml_fabric {
    int32_t routers, degree; /* number of routers; most links between routers that one of them has */
    int32_t diameter;        /* most links between two routers */
    double  hops;            /* links between two nodes, mean over all pairs, those to the routers not counted */
    double  share;           /* of its bandwidth that each node has when all send to all; at most 1 */
} hpml_fabric;
/* Counts the links of a fabric for 1 to 4,096 nodes; more count as 4,096. Takes time in proportion to nodes^2. False:
   there is no such fabric, or no memory. */
HPML_API bool hpml_fabric_measure(hpml_fabric_kind kind, int32_t nodes, hpml_fabric *out);

/* A machine. A rank is one accelerator, or one processor where there are none. */
typedef struct hpml_machine {
    uint32_t         _begin;
    const char      *name;
    hpml_network     network;      /* ranks of a node; links within and between nodes */
    double           flops;        /* operations a second of a rank, at most; required unless layers have seconds */
    double           bandwidth;    /* bytes a second of a rank's memory, at most; 0: without limit */
    int64_t          memory;       /* bytes of a rank; 0: without limit */
    int32_t          cards;        /* network cards of a node, which share its traffic; 0: 1 */
    double           host;         /* bytes a second between a rank's memory and the host's, for messages between nodes;
                                      0: without limit */
    bool             direct;       /* network cards read and write the ranks' memory (GPUDirect): a message is not
                                      copied to the host before it is sent, nor from the host after it has come */
    hpml_fabric_kind fabric;       /* how nodes are joined */
    double           router;       /* seconds that each router on the way adds to the latency */
    uint32_t         _end;
} hpml_machine;
/* Machines by name, with their makers' numbers for one accelerator; hpml_machine_at(0), (1), ... list them, NULL ends
   the list. find: NULL: there is none. */
HPML_API const hpml_machine *hpml_machine_at(int i);
HPML_API const hpml_machine *hpml_machine_find(const char *name);
/* Measures this processor on one thread, in about 0.2 s: operations a second of hpml_sgemm, bandwidth of a long copy.
   All else is 0. HPML_ERR_MEMORY, on the context too. */
HPML_API hpml_status hpml_machine_measure(hpml_ctx *ctx, hpml_machine *out);
/* Sets *out to the network that messages of `ranks` ranks meet: the machine's network with cards, copies through the
   host, and fabric in the latency and bandwidth between nodes. */
HPML_API void hpml_machine_network(const hpml_machine *m, int32_t ranks, hpml_network *out);

/* A layer, as a forecast sees one. Numbers are those of one whole layer, for one sample. */
typedef struct hpml_layer_facts {
    const char *name;
    double  forward_s, backward_s; /* measured seconds; 0: by flops and bytes on the machine; backward_s 0: twice */
    double  flops;                 /* operations of the forward pass; the backward pass has twice as many */
    double  bytes;                 /* bytes that the forward pass moves to and from memory, apart from parameters */
    int64_t rows, cols;            /* shape of the parameters; rows 0: 1, cols 0: the layer has none */
    int64_t edge;                  /* floats that the next layer gets */
    int64_t kept;                  /* bytes that the backward pass needs */
    int64_t forward_sum;           /* floats that the ranks of axis tensor add up after the forward pass */
    int64_t backward_sum;          /* floats that they add up after the backward pass */
    int64_t pass;                  /* floats that each rank of axis sequence passes on to each other one, forward, and
                                      twice backward (ring attention) */
    int64_t swap;                  /* floats that ranks of axis expert exchange before and after the experts, in each
                                      pass */
    bool    split;                 /* over axis tensor: computing, parameters and kept bytes */
    bool    experts;               /* parameters are split over axis expert */
} hpml_layer_facts;

typedef struct hpml_model_facts {
    uint32_t                _begin;
    int32_t                 layers;   /* a chain, 1 to 65536 */
    const hpml_layer_facts *layer;    /* (layers) */
    int32_t                 states;   /* floats of optimizer state for a parameter: sgd 0, momentum 1, adam 2 */
    double                  update_s; /* seconds to step all parameters on one rank; 0: by the machine's bandwidth */
    const hpml_memory      *planned;  /* from hpml_trainer_memory of the whole model with facts.batch samples: exact
                                         bytes where the plan splits nothing; NULL: by the layers */
    hpml_plan_facts         facts;    /* ranks; .batch: samples that a rank's model holds; the rest for the check */
    uint32_t                _end;
} hpml_model_facts;
/* Reads the ops of a trainer's graph as layers: flops, parameters, results; at most `capacity` of them. Returns how many
   ops there are. facts_of fills in .layers and .layer itself and leaves .planned NULL. */
HPML_API int hpml_model_facts_of(hpml_trainer *t, const hpml_comm *c, hpml_layer_facts *layer, int capacity,
                                 hpml_model_facts *out);

typedef enum hpml_term { /* of the time of a step */
    HPML_TERM_COMPUTE = 0, HPML_TERM_UPDATE, HPML_TERM_BUBBLE, HPML_TERM_DATA, HPML_TERM_TENSOR, HPML_TERM_SEQUENCE,
    HPML_TERM_EXPERT, HPML_TERM_SERVERS,
    HPML_TERM_COUNT /* the number of terms */
} hpml_term;
HPML_API const char *hpml_term_name(hpml_term term); /* "compute", "update", ...; NULL: there is none */

/* Mean numbers of a step, over ranks that compute and steps after the first; seconds and bytes. */
typedef struct hpml_prediction {
    double    step_s;       /* seconds of a step: the sum of all terms */
    double    term_s[HPML_TERM_COUNT]; /* compute; update; idle time of a pipeline; communication that no
                               computation hides, waiting for slower ranks included, by axis or with servers */
    hpml_term decides;      /* the largest term after compute; COMPUTE: no other is a tenth of compute */
    double    exposed_s;    /* the terms of communication together */
    double    exposed_link_s[2]; /* of them, within nodes and between nodes */
    double    bubble;       /* idle share of a pipeline: HPML_TERM_BUBBLE / step_s */
    double    samples_s;    /* samples a second, of all ranks */
    int64_t   rank_bytes;   /* sent in a step by the rank that sends most */
    int64_t   between_bytes; /* sent in a step from node to node, by all ranks */
    int64_t   memory;       /* bytes of the rank that needs most: parameters, gradients, states, activations */
    int32_t   buckets;      /* of gradients, on the first stage */
    int32_t   played;       /* number of ranks whose programs were played; the others are equal to these */
} hpml_prediction;
/* Forecasts a step of the plan. facts: the model, and how many ranks there are. machine: required. HPML_ERR_ARGUMENT,
   HPML_ERR_UNSUPPORTED, HPML_ERR_MEMORY (also: the plan needs more memory than a rank of the machine has), with the
   reason in `error` (may be NULL); after the latter, and only then, out->memory is set. */
HPML_API hpml_status hpml_forecast(const hpml_plan *plan, const hpml_model_facts *facts, const hpml_machine *machine,
                                   hpml_prediction *out, char *error, size_t size);
/* Writes a prediction as a line of text; as snprintf. */
HPML_API int hpml_prediction_text(const hpml_prediction *p, char *buffer, size_t size);

/* Writes a table of the layers for `samples` samples on one rank: operations, bytes, operations a byte, seconds, and the
   resource that binds: flops or memory (Williams et al. 2009, "Roofline"); then the work of a forward pass (operations),
   its depth (operations one after another, if sums are made as trees) and work / depth, the most processors that can be
   kept busy. As snprintf. */
HPML_API int hpml_roofline_text(const hpml_model_facts *facts, const hpml_machine *machine, int64_t samples,
                                char *buffer, size_t size);

/* Searches the plans that differ from .base in the fields data, pipe, tensor, micro, schedule, shard, codec and
   algorithm, as far as they are 0 there, for the one with the most samples a second. While at most .exhaustive plans are
   possible all are forecast, else a Metropolis walk takes the next legal value of one field at a time and begins again
   at the best plan when it finds no better one. */
typedef struct hpml_search_desc {
    uint32_t  _begin;
    hpml_plan base;       /* set fields stay */
    int32_t   exhaustive; /* 0: 64 plans, -1: never */
    int32_t   forecasts;  /* of the walk, at most; 0: 400 */
    uint64_t  seed;       /* of the walk */
    uint32_t  _end;
} hpml_search_desc;
typedef struct hpml_found {
    hpml_plan       plan;
    hpml_prediction prediction;
} hpml_found;
/* Writes the best plans that were forecast, the best first, to `found`; returns how many: at most `capacity`. -1: an
   error, with the reason in `error`: no plan is possible, or fits the memory. *forecasts (may be NULL): how many plans
   were forecast. */
HPML_API int hpml_search(const hpml_search_desc *desc, const hpml_model_facts *facts, const hpml_machine *machine,
                         hpml_found *found, int capacity, int *forecasts, char *error, size_t size);
/* Writes the best plan and the second one, and the term that decides between them. As snprintf. */
HPML_API int hpml_search_text(const hpml_found *found, int count, char *buffer, size_t size);

// ---------------------------------------------------------------------------------------------------------------------
// >>api-timeline   one timeline for all ranks
// ---------------------------------------------------------------------------------------------------------------------
/* hpml_comm_trace_start calls hpml_trace_start on every rank, with the ranks' clocks aligned by the quickest of some
   messages to and from rank 0; hpml_comm_trace_save writes one file with the events of all ranks: a process for each
   rank, its lanes below, time 0 at the first event of any rank. The spans of an exchange name tensors, bucket and
   bytes. Both functions are collective. */
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
HPMLC_REF(hpml_comm_set_plan, (hpml_comm *c, const hpml_plan &plan), (c, &plan))
HPMLC_REF(hpml_distribute, (hpml_trainer *t, hpml_comm *c, const hpml_plan &plan), (t, c, &plan))
HPMLC_REF(hpml_distribute_search, (hpml_distributed *x, hpml_dataset *data, const hpml_batch_search_desc &d,
          hpml_batch_trial *trials, int capacity), (x, data, &d, trials, capacity))
HPMLC_REF(hpml_ring_attention, (hpml_tensor *qkv, const hpml_attention_desc &d), (qkv, &d))
HPMLC_REF(hpml_experts, (hpml_tensor *x, const hpml_experts_desc &d, hpml_tensor **balance), (x, &d, balance))
HPMLC_REF(hpml_conv2d_rows, (hpml_tensor *x, int64_t out, const hpml_conv2d_desc &d), (x, out, &d))
HPMLC_REF(hpml_local2d, (hpml_tensor *x, int64_t out, const hpml_local2d_desc &d), (x, out, &d))
HPMLC_REF(hpml_linear_rows, (hpml_tensor *x, int64_t out, const hpml_linear_desc &d), (x, out, &d))
HPMLC_REF(hpml_named_param, (hpml_ctx *c, const char *rules, const char *dims, const hpml_param_desc &d),
          (c, rules, dims, &d))
HPMLC_REF(hpml_simulate, (const hpml_simulate_desc &d, hpml_simulation *out, char *error, size_t size),
          (&d, out, error, size))
HPMLC_REF(hpml_pipe_simulate, (const hpml_pipe_desc &d, hpml_pipe_simulation *out, hpml_pipe_span *spans, int capacity,
          char *error, size_t size), (&d, out, spans, capacity, error, size))
HPMLC_REF(hpml_pipe_cut, (const hpml_pipe_cut_desc &d, hpml_pipe_stage *stages, double *pace, char *error, size_t size),
          (&d, stages, pace, error, size))
#undef HPMLC_REF
#endif

#endif /* HPML_COMM_H_INCLUDED: stop here if you only want the API */

#if (defined(HPML_IMPLEMENTATION) || defined(HPML_COMM_IMPLEMENTATION)) && !defined(HPML_COMM_BODY)
#define HPML_COMM_BODY

// =====================================================================================================================
// PART I   TALK: ranks, messages, transports
// =====================================================================================================================

// ---------------------------------------------------------------------------------------------------------------------
// >>base   system headers, the communicator, nodes and links
// ---------------------------------------------------------------------------------------------------------------------
#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stddef.h>
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

/* HPMLC_FN begins private functions, named hpmlc_..., which may be unused. These macros and __atomic are GNU C. */
#define HPMLC_FN       static __attribute__((unused))
#define HPMLC_UNUSED   __attribute__((unused))
#define HPMLC_RESTRICT __restrict__
#define HPMLC_PRINTF(text, args) __attribute__((format(printf, text, args)))
HPMLI_COMPILE_FAST_BEGIN
#ifdef __cplusplus
extern "C" {
#endif

typedef struct hpmlc_background hpmlc_background; /* the background thread of a communicator: see >>async */
typedef struct hpmlc_pipeline   hpmlc_pipeline;   /* this rank's stage of a model: see >>pipe-run */
typedef struct hpmlc_mesh       hpmlc_mesh;       /* the axes of a communicator: see >>mesh */
typedef struct hpmlc_course     hpmlc_course;     /* where this rank is in a collective: see >>course */
typedef struct hpmlc_waitpoint  hpmlc_waitpoint;  /* where one thread sleeps until another wakes it: >>world */

typedef void hpmlc_reduce_fn(void *into, const void *from, size_t bytes); /* into += from, or into = max(into, from) */

typedef struct hpmlc_text { /* where to write the text of an error that no context keeps; .text may be NULL */
    char  *text;
    size_t size;
} hpmlc_text;

struct hpml_comm {
    hpml_ctx             *ctx;
    hpml_ctx             *trace;    /* context that records spans; of a twin its parent's context */
    const hpml_transport *t;        /* the transport's functions; NULL: not connected, so nothing has to be closed */
    void                 *state;    /* private to the transport's functions */
    int                   rank, size;
    int32_t              *origin;   /* (size) each rank's number in hpml_comm_create's communicator, for error texts */
    int32_t              *node;     /* (size) number of each rank's node */
    int                   per_node; /* ranks of each node, 0: nodes differ; see hpmlc_comm_layout */
    bool                  spread;   /* true: rank r is on node r % (number of nodes) */
    bool                  is_part;  /* made from another communicator by hpml_comm_split, or a twin */
    bool                  is_virtual; /* true with CLOCK: time is virtual, and waits have no deadline */
    bool                  check;
    bool                  survive;  /* a lost rank ends only messages to or from it: see hpml_comm_lost */
    bool                 *silent;   /* (size) true: a wait for that rank has lasted until the deadline, with .survive */
    double                timeout;  /* seconds that a wait may last; negative: for ever */
    int                   spin_limit; /* a wait tests a message so often, then yields the core as often, then sleeps */
    double                gives_up; /* hpml_comm_now() at which hpml_wait_any returns without an error; 1e300: never */
    double                no_yield; /* hpml_now() before which waits do not yield the core, because a yield was slow */
    double                busy;     /* hpml_now() until which this rank has announced that it is busy; 0: not busy */
    uint32_t              sequence; /* number of collectives begun, which selects the tag of the next one */
    int64_t               step;     /* the trainer's current step, for error texts; 0: no trainer */
    const char           *operation; /* name of the operation in progress, for error texts: "allreduce", ... */
    int                   round;    /* number of the operation's current round, for error texts */
    double                since;    /* hpml_comm_now() when the current collective began */
    int64_t               bytes;    /* size of the collective's array */
    bool                  in_collective; /* true: messages are drawn as arrows on the timeline */
    hpml_trace_event      about;    /* event that names the tensors and the bucket in exchange, for the timeline */
    uint64_t              key;      /* number by which all ranks know this communicator, for the timeline */
    uint32_t            (*arrows)[2]; /* (size) number of collectives' messages sent to, received from each rank */
    hpml_link             inside, between; /* links by which AUTO compares algorithms, see hpmlc_comm_links */
    double                forecast[31][HPML_ALGORITHM_COUNT]; /* AUTO: simulated seconds for 2^k bytes; 0: none yet */
    hpml_counters         counters;
    bool                  is_uncounted; /* true: messages make a twin, and are left out of the counters */
    int64_t             (*sent_to)[2]; /* (size) messages and bytes sent to each rank */
    hpml_message         *pending;  /* list of the receives that are not done, newest first */
    hpmlc_text            close_error; /* for an error while closing, when the context is being freed */
    hpmlc_background     *background;
    hpml_device_link      link;     /* moves arrays between devices; .begin NULL: there is none */
    hpmlc_mesh           *mesh;     /* axes into which the ranks are cut; NULL: no plan has been set */
    char                 *scratch;  /* buffer for copies of arrays that are sent while they are added to */
    bool                  returns;  /* true: received sums are written to the sender's array, too: see hpmlc_returns */
    hpml_element          returned; /* element type of the sums that .returns writes */
    int                   divisor;  /* the sums that .returns writes are divided by this number; 0: not */
    hpmlc_course         *course;   /* the collective that this rank executes; NULL: none, or one without phases */
    hpml_comm            *stopped;  /* THREADS: list of sleeping ranks whose course this thread must continue */
    hpml_comm            *next_stopped;
    size_t                scratch_size; /* bytes */
};

/* How the threads of one process take turns. THREADS, the transport whose ranks are threads, counts the threads that
   are awake, which reveals a deadlock; CLOCK, the transport in virtual time, lets one thread run at a time. Other
   transports have no such struct: the operating system decides. */
typedef struct hpmlc_schedule {
    /* Functions of virtual time, NULL where time is real. now: returns the clock of c's thread, in seconds; compute:
       advances that clock by `seconds`; advance: advances that clock to `time`, unless it is past `time`; settle: waits
       until no other thread can send a message that arrives up to `time`, and then does the same as `advance`; returns
       false if a message was sent meanwhile. */
    double (*now)(const hpml_comm *c);
    void   (*compute)(hpml_comm *c, double seconds);
    void   (*advance)(hpml_comm *c, double time);
    bool   (*settle)(hpml_comm *c, double time);
    /* For c's background thread, which uses the communicator `twin`: thread_open is called before it starts (false:
       must not start), thread_enter at its start, thread_close at its end, or by c's thread if it could not start. */
    bool   (*thread_open)(hpml_comm *c, hpml_comm *twin);
    void   (*thread_enter)(hpml_comm *twin);
    void   (*thread_close)(hpml_comm *c, hpml_comm *twin);
    /* sleep: the thread of c sleeps at waitpoint g (a mutex, a condition variable and a count of changes) until
       g->changes differs from *seen or hpml_now() is `until`. wake: wakes the thread that works with `sleeper` and
       sleeps at g. */
    void   (*sleep)(hpml_comm *c, hpmlc_waitpoint *g, unsigned *seen, double until);
    void   (*wake)(hpml_comm *sleeper, hpmlc_waitpoint *g);
} hpmlc_schedule;

typedef struct hpmlc_axis { /* hpml_group.user */
    hpml_comm     *c;
    hpml_algorithm algorithm; /* allreduce algorithm of .sum */
    float         *scratch;   /* (floats) copy of an array that a collective would overwrite */
    int64_t        floats;
} hpmlc_axis;

struct hpmlc_mesh { /* see >>mesh */
    hpml_mesh  m;
    hpml_plan  plan;
    hpmlc_axis axis[HPML_AXES];
    hpml_comm *rest[HPML_AXES]; /* ranks with the same part of a parameter that is split over this axis, over which its
                                   gradient is added up: the replicas, without that axis */
    double     waited;          /* seconds that this rank has waited for messages between two ranks of an axis */
};

/* HPMLC_ZERO defines a variable `name`, all zero; HPMLC_DESC a copy of the struct *given, all zero if given is NULL. */
#define HPMLC_ZERO(type, name)        type name; memset(&name, 0, sizeof name)
#define HPMLC_DESC(type, name, given) HPMLC_ZERO(type, name); if (given) name = *(given)

/* Functions of section >>course, by which a thread continues the collective of a rank that sleeps. */
HPMLC_FN bool hpmlc_course_over(const hpml_comm *c);
HPMLC_FN bool hpmlc_course_next(hpml_comm *c);
HPMLC_FN hpml_message *const *hpmlc_course_missing(const hpml_comm *c);

/* Functions of section >>pipe-run. hpmlc_pipeline_open is called before the trainer takes its memory;
   hpmlc_pipeline_join adds up the gradients of parameters that several stages have. */
HPMLC_FN bool        hpmlc_pipeline_open(hpml_distributed *d);
HPMLC_FN bool        hpmlc_pipeline_attach(hpmlc_pipeline *pl);
HPMLC_FN hpml_status hpmlc_pipeline_join(hpmlc_pipeline *pl);
HPMLC_FN hpml_status hpmlc_pipeline_drain(hpmlc_pipeline *pl);
HPMLC_FN void        hpmlc_pipeline_close(hpml_distributed *d);
HPMLC_FN void        hpmlc_pipeline_text(const hpmlc_pipeline *pl, const hpmlc_text *to, size_t *length);

HPMLC_FN int64_t hpmlc_min(int64_t a, int64_t b) { return a < b ? a : b; }
HPMLC_FN int64_t hpmlc_max(int64_t a, int64_t b) { return a > b ? a : b; }

/* Writes an error's text, formatted as by printf, to the buffer `to` (may be NULL), and returns `status`. */
HPMLC_PRINTF(3, 4)
HPMLC_FN hpml_status hpmlc_refuse(const hpmlc_text *to, hpml_status status, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    if (to && to->text && to->size > 0) vsnprintf(to->text, to->size, format, args);
    va_end(args);
    return status;
}

HPMLC_FN void hpmlc_announce_failure(hpml_comm *c, const char *text)
{
    if (c->t && c->t->announce_failure) c->t->announce_failure(c, text);
}

/* Puts an error, its text formatted as by printf, on the context of c, which keeps its first error, and announces it to
   the other ranks, unless `status` is HPML_ERR_PEER, another rank's failure. Returns `status`. */
HPMLC_PRINTF(3, 4)
HPMLC_FN hpml_status hpmlc_fail(hpml_comm *c, hpml_status status, const char *format, ...)
{
    char    text[512];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (status != HPML_ERR_PEER) hpmlc_announce_failure(c, text);
    return hpml_ctx_fail(c->ctx, status, "rank %d: %s", c->origin[c->rank], text);
}

/* Returns true if c is NULL or its context has an error, and announces that error to ranks that wait for this one. */
HPMLC_FN bool hpmlc_failed(hpml_comm *c)
{
    if (!c) return true;
    if (hpml_ctx_status(c->ctx) == HPML_OK) return false;
    hpmlc_announce_failure(c, hpml_ctx_error(c->ctx));
    return true;
}

/* Announces the error on c's context to the other ranks and returns its status. */
HPMLC_FN hpml_status hpmlc_failure(hpml_comm *c)
{
    hpmlc_failed(c);
    return hpml_ctx_status(c->ctx);
}

HPML_API int         hpml_comm_rank(const hpml_comm *c) { return c ? c->rank : 0; }
HPML_API int         hpml_comm_size(const hpml_comm *c) { return c ? c->size : 0; }
HPML_API hpml_ctx   *hpml_comm_ctx(const hpml_comm *c) { return c ? c->ctx : NULL; }
HPML_API const char *hpml_comm_transport(const hpml_comm *c) { return c ? c->t->name : "none"; }
HPML_API int hpml_comm_node(const hpml_comm *c, int r) { return c && r >= 0 && r < c->size ? c->node[r] : -1; }

/* Sleeps for `seconds`, by select, because -std=c99 declares select but not nanosleep; without select spins. */
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

HPMLC_FN void       hpmlc_comm_destroy(void *object);
/* Allocates on ctx a communicator for transport t, seen by rank `rank` of `size` ranks. Leaves hpml_comm.t NULL until
   the caller has connected the transport, so that nothing is closed if connecting fails. */
HPMLC_FN hpml_comm *hpmlc_comm_new(hpml_ctx *ctx, const hpml_transport *t, int rank, int size)
{
    hpml_comm *c = (hpml_comm *)hpml_ctx_alloc(ctx, sizeof *c, hpmlc_comm_destroy);
    if (!c) return NULL;
    c->ctx     = c->trace = ctx;
    c->rank    = rank;
    c->size    = size;
    c->origin  = (int32_t *)hpml_ctx_alloc(ctx, sizeof *c->origin * (size_t)size, NULL);
    c->node    = (int32_t *)hpml_ctx_alloc(ctx, sizeof *c->node * (size_t)size, NULL);
    c->sent_to = (int64_t(*)[2])hpml_ctx_alloc(ctx, sizeof *c->sent_to * (size_t)size, NULL);
    c->arrows  = (uint32_t(*)[2])hpml_ctx_alloc(ctx, sizeof *c->arrows * (size_t)size, NULL);
    c->silent  = (bool *)hpml_ctx_alloc(ctx, sizeof *c->silent * (size_t)size, NULL);
    if (!c->silent) return NULL;
    for (int i = 0; i < size; i++) c->origin[i] = i;
    c->timeout           = 60;
    c->gives_up          = 1e300;
    c->spin_limit        = 200;
    c->operation         = "hpml_comm_create";
    c->is_virtual        = t->schedule && t->schedule->now;
    c->between.latency   = t->alpha > 0 ? t->alpha : 2e-6;
    c->between.bandwidth = 1 / (t->beta > 0 ? t->beta : 0.25e-9);
    c->inside            = c->between;
    return c;
}

HPML_API void *hpml_comm_state(const hpml_comm *c) { return c ? c->state : NULL; }

HPML_API void hpml_comm_set_state(hpml_comm *c, void *state)
{
    if (c) c->state = state;
}

HPML_API double hpml_comm_now(const hpml_comm *c) { return c && c->is_virtual ? c->t->schedule->now(c) : hpml_now(); }

HPML_API void hpml_comm_compute(hpml_comm *c, double seconds)
{
    if (!c || !(seconds > 0)) return;
    if (c->is_virtual) {
        c->t->schedule->compute(c, seconds);
        return;
    }
    double start = hpml_now();
    hpmlc_nap(seconds);
    hpml_trace_span(c->ctx, HPML_LANE_COMPUTE, "compute", start, hpml_now());
}

/* In virtual time: sets this thread's clock to `time`, after all threads whose clocks are behind `time` have run. In
   real time: does nothing. */
HPMLC_FN void hpmlc_advance(hpml_comm *c, double time)
{
    if (c->is_virtual) c->t->schedule->advance(c, time);
}

/* Returns true if messages take time that computing can hide: between nodes, on slow links, or in virtual time. */
HPMLC_FN bool hpmlc_has_delay(const hpml_comm *c)
{
    if (c->is_virtual) return true;
    if (c->t->has_delay) return c->t->has_delay(c);
    for (int i = 0; i < c->size; i++)
        if (c->node[i] != c->node[c->rank]) return true;
    return false;
}

/* Returns how many nodes network n has for p ranks; 0: a number in n->node, each rank's node, is out of range. */
HPMLC_FN int hpmlc_network_nodes(const hpml_network *n, int p)
{
    int per_node = n->ranks_per_node > 0 && n->ranks_per_node < p ? n->ranks_per_node : p;
    int nodes    = n->node ? 0 : (p + per_node - 1) / per_node;
    for (int r = 0; n->node && r < p; r++) {
        if (n->node[r] < 0 || n->node[r] >= p) return 0;
        if (n->node[r] >= nodes) nodes = n->node[r] + 1;
    }
    return nodes;
}

#define HPMLC_GOOD(x) ((x) >= 0 && (x) <= 1e12) /* true for 0 to 1e12, false for NaN */

/* Checks network `net` of p ranks; if `clock`, also its fields `jitter` and `slow`, which only virtual time uses. The
   text of an error, written to `to`, begins with `who`. */
HPMLC_FN hpml_status hpmlc_network_check(const char *who, const hpml_network *net, int p, bool clock,
                                         const hpmlc_text *to)
{
    const hpml_link *in = &net->inside, *far = &net->between;
    if (net->ranks_per_node < 0 || !HPMLC_GOOD(in->latency) || !HPMLC_GOOD(far->latency) || !(in->bandwidth >= 0) ||
        !(far->bandwidth >= 0) || (clock && !HPMLC_GOOD(net->jitter)))
        return hpmlc_refuse(to, HPML_ERR_ARGUMENT, "%s: network of %d ranks a node, inside %g s and %g bytes/s, "
                            "between %g s and %g bytes/s, jitter %g: a negative one or NaN", who, net->ranks_per_node,
                            in->latency, in->bandwidth, far->latency, far->bandwidth, net->jitter);
    if (hpmlc_network_nodes(net, p) == 0)
        return hpmlc_refuse(to, HPML_ERR_ARGUMENT, "%s: network.node of a rank is not from 0 to %d", who, p - 1);
    for (int r = 0; clock && net->slow && r < p; r++)
        if (!(net->slow[r] > 0) || !HPMLC_GOOD(net->slow[r]))
            return hpmlc_refuse(to, HPML_ERR_ARGUMENT, "%s: network.slow[%d] is %g, not above 0", who, r, net->slow[r]);
    return HPML_OK;
}

/* Returns the number of the node of rank r in network n, which has `nodes` nodes. */
HPMLC_FN int hpmlc_network_node(const hpml_network *n, int nodes, int r)
{
    if (n->node) return n->node[r];
    if (n->spread) return r % nodes;
    return n->ranks_per_node > 0 ? r / n->ranks_per_node : 0;
}

/* Sets c->inside and c->between, the links (latency and bandwidth) by which HPML_AUTO finds the fastest allreduce
   algorithm, to those of network n. With one node, `between` becomes the link inside the node. If the latency or
   bandwidth of `between` is 0 in n, 2 us or 4 GB/s is set instead. */
HPMLC_FN void hpmlc_comm_links(hpml_comm *c, const hpml_network *n, int nodes)
{
    const hpml_link *between = nodes > 1 ? &n->between : &n->inside;
    c->inside            = n->inside;
    c->between.latency   = 2e-6;
    c->between.bandwidth = 4e9;
    if (between->latency > 0) c->between.latency = between->latency;
    if (between->bandwidth > 0) c->between.bandwidth = between->bandwidth;
}

/* Sets per_node and spread of c from c->node: each node has per_node consecutive ranks (the last node may have fewer),
   or rank r is on node r % nodes (spread). per_node 0: neither is the case. */
HPMLC_FN void hpmlc_comm_layout(hpml_comm *c)
{
    int p = c->size, k = 1, nodes = 0;
    c->per_node = 0;
    c->spread   = false;
    while (k < p && c->node[k] == c->node[0]) k++;
    for (int i = 0; i < p; i++)
        if (c->node[i] >= nodes) nodes = c->node[i] + 1;
    for (int spread = 0; spread < 2 && c->per_node == 0; spread++) {
        bool fits = nodes > 0 && (!spread || p % nodes == 0);
        for (int i = 0; i < p && fits; i++) fits = c->node[i] == (spread ? i % nodes : c->node[0] + i / k);
        if (!fits) continue;
        c->per_node = spread ? p / nodes : k;
        c->spread   = spread == 1 && nodes > 1 && nodes < p;
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// >>messages   beginning and testing messages; lost ranks
// ---------------------------------------------------------------------------------------------------------------------
/* The transport begins a message; hpml_wait tests the message until it is done. Receives in flight are in a list. With
   .survive the messages of a lost rank end here. Tags above HPML_TAG_MAX are for collectives. */

#define HPMLC_TAG_COLLECTIVE (HPML_TAG_MAX + 1)
#define HPMLC_TAGS           1023 /* tags that collectives use in rotation; messages of one tag stay in order */
#define HPMLC_TAG_EXTRA      (HPMLC_TAG_COLLECTIVE + HPMLC_TAGS) /* tag of MPI's control messages; THREADS: of splits */
#define HPMLC_TAG_SPAN       (HPMLC_TAG_EXTRA + 1)

HPMLC_FN void hpmlc_count_send(hpml_comm *c, int peer, size_t bytes)
{
    if (c->is_uncounted) return;
    c->counters.messages++;
    c->counters.bytes += (int64_t)bytes;
    c->sent_to[peer][0]++;
    c->sent_to[peer][1] += (int64_t)bytes;
    if (c->node[peer] != c->node[c->rank]) c->counters.between_bytes += (int64_t)bytes;
}

/* Returns why rank `peer` of c is lost, as hpml_transport.why_lost does; NULL: it is not, or c has no .survive. */
HPMLC_FN const char *hpmlc_why_lost(const hpml_comm *c, int peer)
{
    if (!c->survive) return NULL;
    if (c->silent[peer]) return "has sent nothing until the deadline";
    return c->t->why_lost ? c->t->why_lost(c, peer) : NULL;
}

HPML_API bool hpml_comm_lost(const hpml_comm *c, int rank)
{
    return c && rank >= 0 && rank < c->size && hpmlc_why_lost(c, rank) != NULL;
}

/* Writes to `to` (256 bytes) the reason that hpml_transport.why_lost returns for a lost rank, whose error is `text`;
   NULL: the rank has left without an error. */
HPMLC_FN void hpmlc_loss_text(char *to, const char *text)
{
    const bool names = text && strncmp(text, "rank ", 5) == 0; /* the rank failed because it had lost another one */
    if (!text) text = "has left";
    else if (!names) snprintf(to, 256, "failed: %s", text);
    if (names || strcmp(text, "has left") == 0) snprintf(to, 256, "%s", text);
}

/* Ends the message m with HPML_ERR_PEER, because its peer is lost; why: the reason. If m belongs to a collective, this
   rank fails, too, and names to the others the rank that was lost first. */
HPMLC_FN hpml_status hpmlc_lose(hpml_comm *c, hpml_message *m, const char *why)
{
    char text[300] = "";
    m->done    = true;
    m->arrival = hpml_comm_now(c);
    m->status  = HPML_ERR_PEER;
    if (m->tag <= HPML_TAG_MAX) return m->status;
    if (strncmp(why, "rank ", 5) != 0) snprintf(text, sizeof text, "rank %d ", c->origin[m->peer]);
    snprintf(text + strlen(text), sizeof text - strlen(text), "%s", why);
    hpmlc_announce_failure(c, text);
    return hpmlc_fail(c, HPML_ERR_PEER, "%s: %s", c->operation, text);
}

/* Begins a receive from rank `peer`, or (not `receiving`) a send to it, and fills in m. data: array of `bytes` bytes;
   reduce: adds what arrives to the array, NULL: copies. After an error m->done is true, m->status the error. */
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
    m->done      = false;
    m->owner     = c;
    m->receiving = receiving;
    m->peer      = peer;
    m->tag       = tag;
    m->data      = data;
    m->bytes     = bytes;
    m->reduce    = reduce;
    const char *lost = receiving ? NULL : hpmlc_why_lost(c, peer); /* a receive may get one sent before the loss */
    if (lost) return hpmlc_lose(c, m, lost);
    if (receiving) {
        m->next    = c->pending;
        c->pending = m;
    } else hpmlc_count_send(c, peer, bytes);
    c->t->start(c, m);
    return HPML_OK;
}

/* Removes m from c->pending, the list of receives that are not done. */
HPMLC_FN void hpmlc_unlist(hpml_comm *c, const hpml_message *m)
{
    hpml_message **at = &c->pending;
    while (*at && *at != m) at = &(*at)->next;
    if (*at) *at = m->next;
}

/* Returns whether m is done, read atomically, because with THREADS the receiver's thread completes a send. */
HPMLC_FN bool hpmlc_done(const hpml_message *m) { return __atomic_load_n(&m->done, __ATOMIC_ACQUIRE); }

/* Returns the receive that gets the next message from m's peer with m's tag: the oldest of all pending receives with
   this peer and tag, which comes last in the list c->pending. Where m is a send, returns m. */
HPMLC_FN const hpml_message *hpmlc_oldest(const hpml_message *m)
{
    const hpml_message *oldest = m;
    for (const hpml_message *older = m->receiving ? m->next : NULL; older; older = older->next)
        if (!older->done && older->peer == m->peer && older->tag == m->tag) oldest = older;
    return oldest;
}

/* Returns the index, at least `at`, of the first message of the list m that is in flight; count: there is none. */
HPMLC_FN int hpmlc_in_flight(hpml_message *const *m, int count, int at)
{
    while (at < count && (!m[at] || hpmlc_done(m[at]))) at++;
    return at;
}

/* Returns the earliest known arrival of a message of the list m; 1e300: none is known. Of receives with equal peer and
   tag the arrival of the oldest counts, because that one gets the next message. */
HPMLC_FN double hpmlc_next_arrival(hpml_message *const *m, int count)
{
    double first = 1e300;
    for (int i = hpmlc_in_flight(m, count, 0); i < count; i = hpmlc_in_flight(m, count, i + 1)) {
        const double arrival = hpmlc_oldest(m[i])->arrival;
        if (arrival > 0 && arrival < first) first = arrival;
    }
    return first;
}

HPMLC_FN void hpmlc_test(hpml_comm *c, hpml_message *m)
{
    if (hpmlc_oldest(m) != m) return;
    const char *lost = hpmlc_why_lost(c, m->peer); /* read first, so that the test finds all that the peer sent */
    c->t->test(c, m);
    if (!lost || hpmlc_done(m) || (m->receiving && m->arrival > 0)) return;
    c->t->abandon(c, m);
    hpmlc_lose(c, m, lost);
}

/* Completes the receive m with an error, because the message that has come has `sent` bytes, not m->bytes. */
HPMLC_FN void hpmlc_mismatch(hpml_comm *c, hpml_message *m, size_t sent)
{
    m->status = hpmlc_fail(c, HPML_ERR_COMM, "%s: rank %d sent %zu bytes, rank %d expected %zu; all ranks must pass "
                           "the same counts", c->operation, c->origin[m->peer], sent, c->origin[c->rank], m->bytes);
    m->done   = true;
}

HPML_API void hpml_message_deliver(hpml_comm *c, hpml_message *m, const void *from, size_t bytes)
{
    if (!c || !m) return;
    if (bytes != m->bytes) hpmlc_mismatch(c, m, bytes);
    else if (m->reduce) m->reduce(m->data, from, bytes);
    else if (bytes > 0 && m->data != from) memcpy(m->data, from, bytes); /* equal: both ranks use one array */
    m->done = true;
}

/* Returns the index of the message of the list m that was over first: by arrival, where that is known, then by place in
   the list; -1: none is over. */
HPMLC_FN int hpmlc_first_over(hpml_message *const *m, int count)
{
    int    first = -1;
    double earliest = 0;
    for (int i = 0; i < count; i++) {
        if (!m[i] || !hpmlc_done(m[i])) continue;
        double time = m[i]->receiving ? m[i]->arrival : 0;
        if (first >= 0 && time >= earliest) continue;
        first    = i;
        earliest = time;
    }
    return first;
}

/* Tests the sends of the list m, and a receive if it is the list's only message; then all other receives of c that are
   in flight, because a peer may wait for one of those. True: one of these other receives is done. */
HPMLC_FN bool hpmlc_test_list(hpml_comm *c, hpml_message *const *m, int count)
{
    bool moved = false;
    for (int i = hpmlc_in_flight(m, count, 0); i < count; i = hpmlc_in_flight(m, count, i + 1))
        if (count == 1 || !m[i]->receiving) hpmlc_test(c, m[i]);
    for (hpml_message *other = c->pending; other && (count > 1 || !hpmlc_done(*m)); other = other->next) {
        if (other->done || (count == 1 && other == *m)) continue;
        hpmlc_test(c, other);
        moved = moved || other->done;
    }
    return moved;
}

// ---------------------------------------------------------------------------------------------------------------------
// >>waiting   waiting for a message, or for the first of several; sending, receiving
// ---------------------------------------------------------------------------------------------------------------------
/* Between tests of its messages a wait spins for some microseconds, then yields the core, then sleeps; it sleeps at
   once if the peer's thread needs this core, because on a busy machine the rank that has work must get the core. (MPICH
   spins for ever: with more ranks than cores a wait of MPICH was measured 40 times slower than this.) */

#define HPMLC_SPIN_OWN_CORE 2000 /* value of c->spin_limit where each rank has a core of its own */

/* Returns how many tests a wait on c makes before it yields; atomic, because another thread may change that number. */
HPMLC_FN int hpmlc_spin_limit(const hpml_comm *c) { return __atomic_load_n(&c->spin_limit, __ATOMIC_RELAXED); }

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

#define HPMLC_SLOW_YIELD 100e-6 /* seconds: a yield that takes longer has given the core to another program */
#define HPMLC_EARLY      60e-6  /* seconds before a message arrives at which a sleep ends, because Linux wakes late */

/* Spends turn number `turn` of a wait for the list m without sleeping: spins in early turns, yields the core in later
   ones. False: the caller must sleep: the turns are used up, or a message is known to arrive later, or a yield has cost
   another program's time slice; after such a yield none is tried for 100 times as long as that yield took. */
HPMLC_FN bool hpmlc_wait_awake(hpml_comm *c, hpml_message *const *m, int count, int turn)
{
    const int    spin    = hpmlc_spin_limit(c);
    const double arrival = hpmlc_next_arrival(m, count);
    if (arrival < 1e300) {
        if (spin < HPMLC_SPIN_OWN_CORE || arrival > hpml_now() + HPMLC_EARLY) return false;
        hpmlc_pause(false);
        return true;
    }
    if (turn >= 2 * spin) return false;
    if (turn <= spin) {
        hpmlc_pause(false);
        return true;
    }
    double since = hpml_now();
    if (since < c->no_yield) return false;
    hpmlc_pause(true);
    double took = hpml_now() - since;
    if (took > HPMLC_SLOW_YIELD) c->no_yield = since + 100 * took;
    return true;
}

HPMLC_FN int hpmlc_cores_online(void);
HPMLC_FN int hpmlc_cores(int ranks);

/* Writes " or N others" to `text` and returns it, where N is `others`: the messages in flight that a wait for several
   messages has besides the one that the error text names; "" if N is 0 or less. */
HPMLC_FN const char *hpmlc_others(char text[32], int others)
{
    text[0] = 0;
    if (others > 0) snprintf(text, 32, " or %d other%s", others, others > 1 ? "s" : "");
    return text;
}

/* After an error of this rank gives up the messages of the list m that are in flight: their arrays are used no more.
   Their status becomes the error. */
HPMLC_FN void hpmlc_give_up(hpml_comm *c, hpml_message *const *m, int count)
{
    for (int i = hpmlc_in_flight(m, count, 0); i < count; i = hpmlc_in_flight(m, count, i + 1)) {
        c->t->abandon(c, m[i]);
        m[i]->status = hpml_ctx_status(c->ctx);
    }
}

/* Handles the deadline of a wait for the list m. The peer of a message may wait for another rank, and so on: where the
   last rank of such a chain is busy (hpml_comm_busy), extends the deadline, else ends the wait with an error that names
   the last rank of the first message's chain; with .survive the peers are lost instead. Returns the new deadline. */
HPMLC_FN double hpmlc_deadline_passed(hpml_comm *c, hpml_message *const *m, int count)
{
    const int first = hpmlc_in_flight(m, count, 0), peer = c->origin[m[first]->peer];
    int       last = peer, others = -1;
    char      chain[48] = "", more[32];
    for (int i = first; i < count; i = hpmlc_in_flight(m, count, i + 1)) {
        double busy  = 0;
        int    stuck = c->t->stuck_at ? c->t->stuck_at(c, m[i], &busy) : peer;
        if (stuck < 0) return hpml_now();
        if (hpml_now() < busy) return fmin(busy, hpml_now() + c->timeout); /* then asks again */
        if (i == first) last = stuck;
        others++;
    }
    if (c->survive && m[first]->tag <= HPML_TAG_MAX) { /* marks the peers, whose messages the next tests end */
        for (int i = first; i < count; i = hpmlc_in_flight(m, count, i + 1)) c->silent[m[i]->peer] = true;
        return hpml_now() + c->timeout;
    }
    if (last != peer) snprintf(chain, sizeof chain, ", which waits for rank %d,", last);
    hpmlc_fail(c, HPML_ERR_TIMEOUT, "waited %g s for rank %d%s%s in %s, round %d, step %lld; is that rank alive and in "
               "the same operation? (.timeout sets the limit)", c->timeout, peer, chain, hpmlc_others(more, others),
               c->operation, c->round, (long long)c->step);
    hpmlc_give_up(c, m, count);
    return hpml_now();
}

HPML_API void hpml_comm_busy(hpml_comm *c, double seconds)
{
    const double now = hpml_now(), lasts = 1.125 * seconds; /* announces more, so that most calls announce nothing */
    if (!c || !c->t->announce_busy || c->timeout < 0 || (seconds > 0 && now + seconds <= c->busy)) return;
    c->busy = seconds > 0 ? now + lasts : 0;
    c->t->announce_busy(c, seconds > 0 ? lasts : c->timeout);
}

HPMLC_FN void hpmlc_block(hpml_comm *c, hpml_message *const *m, int count, double until)
{
    if (c->t->block) c->t->block(c, m, count, until);
    else hpmlc_nap(30e-6);
}

/* Returns whether the thread of a peer of one of the `count` messages m that are in flight needs this core, so that a
   wait for m must sleep at once. */
HPMLC_FN bool hpmlc_shares_core(hpml_comm *c, hpml_message *const *m, int count)
{
    bool shares = false;
    for (int i = hpmlc_in_flight(m, count, 0); i < count && c->t->shares_core; i = hpmlc_in_flight(m, count, i + 1))
        shares = c->t->shares_core(c, m[i]->peer) || shares;
    return shares;
}

/* Returns whether m, a message that is done, was certainly the first of a list of `count` to be done. In virtual time
   other threads may have to run before this is certain, because one of them may send a message that arrives as early as
   m and stands before m in the list. */
HPMLC_FN bool hpmlc_is_first(hpml_comm *c, const hpml_message *m, int count)
{
    return count == 1 || !c->is_virtual || !m->receiving || c->t->schedule->settle(c, m->arrival);
}

/* Waits until a message of the list m is over and returns its index; -1: the time c->gives_up has come. After an error
   all messages of the list are over. */
HPMLC_FN int hpmlc_wait_list(hpml_comm *c, hpml_message *const *m, int count)
{
    double limit = 0; /* the deadline, a time of hpml_now; 0: none yet, set before the first sleep */
    int64_t rounds = c->counters.rounds;
    bool   shares_core = false;
    int    over;
    for (int turn = 0; (over = hpmlc_first_over(m, count)) < 0 || !hpmlc_is_first(c, m[over], count); turn++) {
        bool moved = hpmlc_test_list(c, m, count);
        if (hpmlc_first_over(m, count) >= 0) continue;
        if (c->gives_up < 1e300 && hpml_comm_now(c) >= c->gives_up) break;
        if (turn == 0) shares_core = hpmlc_shares_core(c, m, count);
        if (moved || (!shares_core && hpmlc_wait_awake(c, m, count, turn))) continue;
        if (limit == 0 && hpmlc_failed(c)) { /* this rank failed after it had begun the messages */
            hpmlc_give_up(c, m, count);
            continue;
        }
        if (limit == 0 || c->counters.rounds > rounds) /* another thread may have gone on to later rounds meanwhile */
            limit = c->timeout < 0 || c->is_virtual ? 1e300 : hpml_now() + c->timeout;
        rounds = c->counters.rounds;
        if (c->gives_up < 1e300 && !c->is_virtual) limit = c->gives_up;
        if (hpml_now() < limit) hpmlc_block(c, m, count, limit);
        else if (c->gives_up >= 1e300) limit = hpmlc_deadline_passed(c, m, count);
    }
    for (int i = 0; i < count && limit != 0 && c->t->unblock; i++)
        if (m[i]) c->t->unblock(c, m[i]);
    return over;
}

HPML_API hpml_status hpml_wait(hpml_comm *c, hpml_message *m)
{
    if (!c || !m) return HPML_ERR_ARGUMENT;
    hpmlc_wait_list(c, &m, 1);
    if (m->receiving) hpmlc_unlist(c, m);
    return m->status;
}

HPML_API bool hpml_test(hpml_comm *c, hpml_message *m)
{
    if (!c || !m) return true;
    if (!hpmlc_done(m)) hpmlc_test_list(c, &m, 1);
    if (!hpmlc_done(m) && !c->t->schedule && c->t->block) c->t->block(c, &m, 1, 0); /* receives control messages */
    if (!hpmlc_done(m) && hpmlc_failed(c)) hpmlc_give_up(c, &m, 1);
    if (!hpmlc_done(m)) return false;
    if (m->receiving) hpmlc_unlist(c, m);
    return true;
}

HPML_API int hpml_wait_any(hpml_comm *c, hpml_message *const *m, int count, double seconds)
{
    int over = -1;
    if (!c || (count > 0 && !m)) return -1;
    c->operation = "hpml_wait_any";
    if (hpmlc_first_over(m, count) < 0 && hpmlc_in_flight(m, count, 0) >= count)
        hpmlc_fail(c, HPML_ERR_ARGUMENT, "hpml_wait_any: a list of %d without a message", count);
    if (seconds >= 0) c->gives_up = hpml_comm_now(c) + seconds;
    if (hpml_ctx_status(c->ctx) == HPML_OK) over = hpmlc_wait_list(c, m, count);
    c->gives_up = 1e300;
    if (hpmlc_failed(c)) {
        hpmlc_give_up(c, m, count);
        over = -1;
    }
    for (int i = 0; i < count; i++)
        if (m[i] && m[i]->receiving && m[i]->done) hpmlc_unlist(c, m[i]);
    return over;
}

/* Adds a span `name` of `bytes` bytes to the timeline, from `start` to `end` (seconds), labelled with the bucket and
   the names of tensors in c->about. */
HPMLC_FN void hpmlc_span(const hpml_comm *c, const char *name, double start, double end, int64_t bytes)
{
    if (!hpml_trace_on(c->trace)) return;
    hpml_trace_event e = c->about;
    e.lane   = HPML_LANE_COMM;
    e.name   = name;
    e.start  = start;
    e.end    = end;
    e.number = bytes;
    hpml_trace_add(c->trace, &e);
}

/* Adds to the timeline one end of the arrow of a message between this rank and `peer`: the receiver's (receives) or the
   sender's. Both ranks compute the same number for the arrow, because both count their messages. */
HPMLC_FN void hpmlc_arrow(hpml_comm *c, bool receives, int peer)
{
    uint32_t count = c->arrows[peer][receives]++;
    if (!c->in_collective || !hpml_trace_on(c->trace)) return;
    HPMLC_ZERO(hpml_trace_event, e);
    const int from = c->origin[receives ? peer : c->rank];
    const int to = c->origin[receives ? c->rank : peer];
    uint64_t  ends = (uint64_t)from << 32 | (uint64_t)to;
    uint64_t  id   = ((c->key * 0x9e3779b97f4a7c15u + ends) * 0x9e3779b97f4a7c15u + count) * 0x9e3779b97f4a7c15u;
    e.kind   = receives ? HPML_TRACE_RECEIVE : HPML_TRACE_SEND;
    e.lane   = HPML_LANE_COMM;
    e.name   = "message";
    e.start  = hpml_comm_now(c);
    e.number = (int64_t)(id >> 12); /* 52 bits, which a double of the timeline's file holds exactly */
    hpml_trace_add(c->trace, &e);
}

/* Runs one round of a collective: sends out_bytes bytes at `out` to rank `to` and at the same time receives in_bytes
   from rank `from` into `in`, where reduce adds them up (NULL: copies). A rank of -1: sends or receives nothing.
   Returns the error of the receive, else that of the send. */
HPMLC_FN hpml_status hpmlc_round(hpml_comm *c, int tag, int to, const char *out, size_t out_bytes, int from, char *in,
                                 size_t in_bytes, hpmlc_reduce_fn *reduce)
{
    hpml_message send, receive;
    hpml_status  received = HPML_OK, sent = HPML_OK;
    if (to < 0 && from < 0) return HPML_OK;
    c->counters.rounds++;
    if (to >= 0) hpmlc_arrow(c, false, to);
    if (from >= 0) hpmlc_begin(c, true, from, tag, in, in_bytes, reduce, &receive);
    if (to >= 0) hpmlc_begin(c, false, to, tag, (char *)(uintptr_t)out, out_bytes, NULL, &send);
    if (from >= 0) received = hpml_wait(c, &receive);
    if (from >= 0) hpmlc_arrow(c, true, from);
    if (to >= 0) sent = hpml_wait(c, &send); /* even after an error, because `send` is on the stack */
    return received != HPML_OK ? received : sent;
}

HPML_API hpml_status hpml_isend(hpml_comm *c, int to, int tag, const void *data, size_t bytes, hpml_message *m)
{
    if (c) c->operation = "send";
    if (tag > HPML_TAG_MAX) tag = -1; /* refused as out of range, because higher tags belong to collectives */
    return hpmlc_begin(c, false, to, tag, (char *)(uintptr_t)data, bytes, NULL, m);
}

HPML_API hpml_status hpml_irecv(hpml_comm *c, int from, int tag, void *data, size_t bytes, hpml_message *m)
{
    if (c) c->operation = "receive";
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

HPML_API hpml_status hpml_sendrecv(hpml_comm *c, int to, const void *sent, size_t sent_bytes, int from, void *received,
                                   size_t received_bytes, int tag)
{
    hpml_message send, receive;
    hpml_irecv(c, from, tag, received, received_bytes, &receive);
    hpml_isend(c, to, tag, sent, sent_bytes, &send);
    hpml_status in_status = hpml_wait(c, &receive), out_status = hpml_wait(c, &send);
    return in_status != HPML_OK ? in_status : out_status;
}

// ---------------------------------------------------------------------------------------------------------------------
// >>world   ranks as threads: inboxes, links, deadlock
// ---------------------------------------------------------------------------------------------------------------------
/* A group is what the ranks of one communicator share: one inbox for each rank. A send is posted in the receiver's
   inbox as a pointer; the receiver copies, or adds up, straight from the sender's array and marks the send done: one
   pass over the data and no buffer in between. Small messages are copied, because to sleep and wake takes longer.

   The world, this process's ranks, counts its awake threads. A thread that falls asleep subtracts 1; the thread that
   wakes it first adds 1. So a count of zero means that no thread can ever wake another: a deadlock. */
#ifndef HPML_NO_THREADS

struct hpmlc_waitpoint { /* where one thread sleeps until `changes` grows */
    pthread_mutex_t mutex;
    pthread_cond_t  changed;
    unsigned        changes;
    bool            sleeping;
    bool            stopped; /* sleeps while another thread runs its course: see hpmlc_threads_help */
    bool            counted; /* true: the sleeping thread is subtracted from the world's awake threads */
};

typedef struct hpmlc_inbox {
    hpmlc_waitpoint wait;
    hpml_message   *posted, **last; /* list of sends to the owner, in the order posted; the end of that list */
    hpml_message   *copies;         /* list of the posted sends that are copies, made by the inbox */
    hpml_comm      *owner;          /* communicator whose rank receives here; NULL: closed */
    int             peer;           /* world rank that the owner waits for, -1: none */
    int             others;         /* number of other messages that end the wait as well: hpml_wait_any */
    hpml_message *const *awaited;   /* list of the messages, one of which ends the wait; valid while the owner sleeps */
    int             awaited_count;
    const char     *operation;      /* name of the operation in which the owner waits */
    int             core;           /* 1 + the core on which the owner's thread last waited; 0: none */
    char            pad[64];
} hpmlc_inbox;

typedef struct hpmlc_group hpmlc_group;
struct hpmlc_group {
    hpml_world  *world;
    hpmlc_group *next;
    int          size, open; /* ranks; ranks that have not closed their communicator */
    hpmlc_inbox *inbox;      /* (size) of each rank */
};

typedef struct hpmlc_vthread hpmlc_vthread; /* a thread in virtual time: see >>clock */

typedef struct hpmlc_loss { /* a rank that has failed or left, with .survive */
    double at; /* CLOCK: virtual time at which the rank failed or left; else 0 */
    char   text[256]; /* why the rank is lost, written by hpmlc_loss_text */
} hpmlc_loss;

struct hpml_world {
    hpml_transport_kind kind;
    int                 ranks, nodes;
    hpml_network        network;
    pthread_mutex_t     mutex;
    int                 running;  /* number of threads that are awake */
    hpmlc_group        *groups;
    bool               *left;     /* (ranks) true: has closed the communicator of hpml_comm_create */
    hpmlc_loss        **lost;     /* (ranks) with .survive: ranks that have failed or left; NULL: neither. Atomic */
    int                 failed;   /* 1 + the rank that failed first; ranks + 1: deadlock; 0: none. Set once */
    char                text[512];
    bool                buffered; /* true: sends are copied, and done at once: CLOCK, or some link takes time */
    hpmlc_vthread      *vthreads, *turn; /* CLOCK: all threads, and the one that runs */
    int                 vthread_count;
    double             *card;     /* (2 (ranks + nodes)) when each rank's, node's card is free to send, to receive */
    double             *busy;     /* (ranks) hpml_now() until which each rank is busy */
};

/* What hpml_comm.state, the pointer for the transport's own data, points to with the transports THREADS and CLOCK. */
typedef struct hpmlc_thread_state {
    hpmlc_group   *group;
    hpmlc_vthread *vthread;    /* CLOCK: the thread that uses the communicator, with its clock */
    unsigned       seen;       /* value of the inbox's `changes` at the end of the last sleep */
} hpmlc_thread_state;

/* The content of hpml_message.state, memory for the transport's data of a message, with THREADS and CLOCK. */
typedef struct __attribute__((may_alias)) hpmlc_post {
    hpml_message *next;   /* of a send: the next send in the receiver's inbox */
    hpml_message *after, **before; /* of a copied send: next copy in the inbox; pointer to this copy */
    int           from;   /* of a send: the sender's rank */
    bool          copied; /* of a send: true: a copy of the send, which the receiver frees */
    size_t        tested; /* of a receive: 1 + the inbox's `changes` at the last test; 0: not tested yet */
} hpmlc_post;
typedef char hpmlc_post_fits[sizeof(hpmlc_post) <= sizeof(hpml_message_state) ? 1 : -1];

HPMLC_FN hpmlc_thread_state *hpmlc_thread(const hpml_comm *c) { return (hpmlc_thread_state *)c->state; }
HPMLC_FN hpmlc_group *hpmlc_group_of(const hpml_comm *c) { return hpmlc_thread(c)->group; }
HPMLC_FN hpml_world  *hpmlc_world_of(const hpml_comm *c) { return hpmlc_thread(c)->group->world; }
HPMLC_FN hpmlc_inbox *hpmlc_inbox_of(const hpml_comm *c) { return &hpmlc_thread(c)->group->inbox[c->rank]; }
HPMLC_FN hpmlc_post  *hpmlc_post_of(hpml_message *m) { return (hpmlc_post *)(void *)&m->state; }

/* Makes deadlines use CLOCK_MONOTONIC, a clock that is never set, where possible: not under -std=c99, nor on macOS. */
#if defined(CLOCK_MONOTONIC) && !defined(__APPLE__)
#define HPMLC_MONOTONIC
#endif

HPMLC_FN void hpmlc_waitpoint_init(hpmlc_waitpoint *g)
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

HPMLC_FN void hpmlc_waitpoint_close(hpmlc_waitpoint *g)
{
    pthread_mutex_destroy(&g->mutex);
    pthread_cond_destroy(&g->changed);
}

/* Unlocks g->mutex, which the caller holds, after a change at waitpoint g. wake: also wakes the thread that sleeps at
   g, if any, and counts this thread as running in world w; w NULL: does not count. Wakes it after unlocking, because
   the woken thread needs the mutex first. */
HPMLC_FN void hpmlc_waitpoint_unlock(hpml_world *w, hpmlc_waitpoint *g, bool wake)
{
    wake = wake && g->sleeping;
    __atomic_add_fetch(&g->changes, 1, __ATOMIC_RELEASE);
    if (wake) g->sleeping = false;
    if (wake && w && g->counted) __atomic_add_fetch(&w->running, 1, __ATOMIC_ACQ_REL);
    pthread_mutex_unlock(&g->mutex);
    if (wake) pthread_cond_signal(&g->changed);
}

HPMLC_FN void hpmlc_waitpoint_wake(hpml_world *w, hpmlc_waitpoint *g)
{
    pthread_mutex_lock(&g->mutex);
    hpmlc_waitpoint_unlock(w, g, true);
}

HPMLC_FN void hpmlc_vthreads_wake(hpml_world *w);
/* Wakes all threads that sleep in world w, the ranks of this process. The caller holds w->mutex. */
HPMLC_FN void hpmlc_world_wake(hpml_world *w)
{
    hpmlc_vthreads_wake(w);
    if (w->kind == HPML_TRANSPORT_CLOCK) return; /* in virtual time no thread sleeps at an inbox */
    for (hpmlc_group *r = w->groups; r; r = r->next)
        for (int i = 0; i < r->size; i++) hpmlc_waitpoint_wake(w, &r->inbox[i].wait);
}

/* If no thread of world w (the ranks of this process) is awake, a deadlock: fails the world with a text that names each
   wait, and wakes all threads, so that they report the deadlock. The caller holds w->mutex. */
HPMLC_FN void hpmlc_world_stuck(hpml_world *w)
{
    bool any = false;
    char more[32];
    if (__atomic_load_n(&w->running, __ATOMIC_ACQUIRE) > 0 || w->failed) return;
    size_t used = (size_t)snprintf(w->text, sizeof w->text, "deadlock:");
    for (hpmlc_group *r = w->groups; r; r = r->next)
        for (int i = 0; i < r->size && used < sizeof w->text; i++) {
            const hpmlc_inbox *in = &r->inbox[i];
            if (!in->wait.sleeping || !in->owner || in->peer < 0) continue;
            used += (size_t)snprintf(w->text + used, sizeof w->text - used, "%s rank %d waits for rank %d%s%s in %s",
                                     any ? ";" : "", in->owner->origin[i], in->peer,
                                     w->left[in->peer] ? ", which has left," : "", hpmlc_others(more, in->others),
                                     in->operation);
            any = true;
        }
    if (!any) return;
    __atomic_store_n(&w->failed, w->ranks + 1, __ATOMIC_RELEASE); /* ranks + 1: all ranks, not a single one */
    hpmlc_world_wake(w);
}

HPMLC_FN void hpmlc_world_deadlock(hpml_world *w)
{
    pthread_mutex_lock(&w->mutex);
    hpmlc_world_stuck(w);
    pthread_mutex_unlock(&w->mutex);
}

/* Converts `until`, in seconds of hpml_now, to *limit, the same time on the clock of pthread_cond_timedwait, but at
   most 1e6 s from now: a sleeper with a later deadline wakes then, checks the time and sleeps again. */
HPMLC_FN void hpmlc_waitpoint_limit(double until, struct timespec *limit)
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

/* Sleeps until another thread has changed the counter g->changes of waitpoint g from *seen, at most until hpml_now() is
   `until`; *seen becomes g->changes. counted: true: while the thread sleeps, world w does not count it as awake. */
HPMLC_FN void hpmlc_waitpoint_sleep(hpml_world *w, hpmlc_waitpoint *g, unsigned *seen, double until, bool counted)
{
    struct timespec limit;
    pthread_mutex_lock(&g->mutex);
    if (g->changes == *seen) {
        hpmlc_waitpoint_limit(until, &limit);
        g->sleeping = true;
        g->counted  = counted;
        if (counted && w && __atomic_sub_fetch(&w->running, 1, __ATOMIC_ACQ_REL) == 0) {
            pthread_mutex_unlock(&g->mutex);
            hpmlc_world_deadlock(w);
            pthread_mutex_lock(&g->mutex);
        }
        while (g->sleeping || g->stopped)
            if (pthread_cond_timedwait(&g->changed, &g->mutex, &limit) != 0 && !g->stopped) break;
        if (g->sleeping && w && counted) __atomic_add_fetch(&w->running, 1, __ATOMIC_ACQ_REL);
        g->sleeping = false;
    }
    *seen = g->changes;
    pthread_mutex_unlock(&g->mutex);
}

/* Lets the thread of c sleep at waitpoint g for something other than a message, such as the end of background work,
   until g->changes differs from *seen, which then becomes g->changes, at most until hpml_now() is `until`. A transport
   may sleep in a way of its own (c->t->schedule); that of CLOCK ignores `until`. */
HPMLC_FN void hpmlc_sleep_at(hpml_comm *c, hpmlc_waitpoint *g, unsigned *seen, double until)
{
    if (c->t->schedule) c->t->schedule->sleep(c, g, seen, until);
    else hpmlc_waitpoint_sleep(NULL, g, seen, until, true);
}

/* Wakes the thread that sleeps at waitpoint g and works with the communicator `sleeper`. */
HPMLC_FN void hpmlc_wake_at(hpml_comm *sleeper, hpmlc_waitpoint *g)
{
    if (sleeper->t->schedule) sleeper->t->schedule->wake(sleeper, g);
    else hpmlc_waitpoint_wake(NULL, g);
}

HPMLC_FN hpmlc_group *hpmlc_group_new(hpml_world *w, int size)
{
    hpmlc_group *r = (hpmlc_group *)calloc(1, sizeof *r);
    if (r) r->inbox = (hpmlc_inbox *)calloc((size_t)size, sizeof *r->inbox);
    if (!r || !r->inbox) {
        free(r);
        return NULL;
    }
    r->world = w;
    r->size  = r->open = size;
    for (int i = 0; i < size; i++) {
        hpmlc_waitpoint_init(&r->inbox[i].wait);
        r->inbox[i].last = &r->inbox[i].posted;
        r->inbox[i].peer = -1;
    }
    pthread_mutex_lock(&w->mutex);
    r->next   = w->groups;
    w->groups = r;
    pthread_mutex_unlock(&w->mutex);
    return r;
}

HPMLC_FN void hpmlc_group_free(hpmlc_group *r)
{
    for (int i = 0; i < r->size; i++) {
        for (hpml_message *m = r->inbox[i].copies, *next; m; m = next) {
            next = hpmlc_post_of(m)->after;
            free(m); /* was never received */
        }
        hpmlc_waitpoint_close(&r->inbox[i].wait);
    }
    free(r->inbox);
    free(r);
}

HPMLC_FN bool hpmlc_link_takes_time(const hpml_link *link) { return link->latency > 0 || link->bandwidth > 0; }

HPML_API hpml_world *hpml_world_create(hpml_transport_kind transport, int32_t ranks, const hpml_network *network)
{
    bool clock = transport == HPML_TRANSPORT_CLOCK;
    if ((!clock && transport != HPML_TRANSPORT_THREADS) || ranks < 1 || ranks > 65536) return NULL;
    hpml_world *w = (hpml_world *)calloc(1, sizeof *w);
    if (!w) return NULL;
    w->kind  = transport;
    w->ranks = w->running = ranks;
    if (network) w->network = *network;
    w->buffered = clock || hpmlc_link_takes_time(&w->network.inside) || hpmlc_link_takes_time(&w->network.between);
    w->nodes = hpmlc_network_nodes(&w->network, ranks);
    w->left  = (bool *)calloc((size_t)ranks, sizeof *w->left);
    w->lost  = (hpmlc_loss **)calloc((size_t)ranks, sizeof *w->lost);
    w->card  = (double *)calloc((size_t)(2 * (ranks + w->nodes)), sizeof *w->card);
    w->busy  = (double *)calloc((size_t)ranks, sizeof *w->busy);
    pthread_mutex_init(&w->mutex, NULL);
    bool good = hpmlc_network_check("", &w->network, ranks, clock, NULL) == HPML_OK;
    if (good && w->left && w->lost && w->card && w->busy && hpmlc_group_new(w, ranks)) return w;
    hpml_world_free(w);
    return NULL;
}

HPML_API void hpml_world_free(hpml_world *w)
{
    if (!w) return;
    for (hpmlc_group *r = w->groups, *next; r; r = next) {
        next = r->next;
        hpmlc_group_free(r);
    }
    pthread_mutex_destroy(&w->mutex);
    for (int i = 0; i < w->ranks && w->lost; i++) free(w->lost[i]);
    free(w->lost);
    free(w->left);
    free(w->card);
    free(w->busy);
    free(w);
}

/* Fails world w, unless it has failed before: all waits of its ranks end with `text`, the error of rank `rank`. */
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

HPMLC_FN const hpmlc_loss *hpmlc_loss_of(const hpml_comm *c, int peer)
{
    return __atomic_load_n(&hpmlc_world_of(c)->lost[c->origin[peer]], __ATOMIC_ACQUIRE);
}

/* With .survive: records that c's rank is lost, by its error `text`; text NULL: because the rank leaves. Wakes all
   threads of this process, because those that wait for this rank must give up. */
HPMLC_FN void hpmlc_world_lose(hpml_comm *c, const char *text)
{
    hpml_world *w    = hpmlc_world_of(c);
    const int   rank = c->origin[c->rank];
    if (hpmlc_loss_of(c, c->rank)) return;
    hpmlc_loss *loss = (hpmlc_loss *)calloc(1, sizeof *loss);
    if (!loss) {
        hpmlc_world_fail(w, rank, "no memory to record that this rank is lost");
        return;
    }
    if (c->is_virtual) loss->at = hpml_comm_now(c);
    hpmlc_loss_text(loss->text, text);
    pthread_mutex_lock(&w->mutex);
    if (!w->lost[rank]) {
        __atomic_store_n(&w->lost[rank], loss, __ATOMIC_RELEASE);
        loss = NULL;
        hpmlc_world_wake(w);
    }
    pthread_mutex_unlock(&w->mutex);
    free(loss); /* another thread of this rank has recorded the loss */
}

HPMLC_FN const char *hpmlc_threads_why_lost(const hpml_comm *c, int peer)
{
    const hpmlc_loss *loss = hpmlc_loss_of(c, peer);
    return loss && loss->at <= hpml_comm_now(c) ? loss->text : NULL;
}

/* Returns the rank that rank `rank` of world w waits for; -1: none, because `rank` computes or hangs. A group has the
   inboxes of one communicator. The inbox of `rank` in *group is checked before those in other groups, because a thread
   may wait for its own background thread. *group: gets the group of that inbox. The caller holds w->mutex. */
HPMLC_FN int hpmlc_world_awaited(hpml_world *w, hpmlc_group **group, int rank)
{
    hpmlc_group *first = *group;
    for (hpmlc_group *r = first, *next = w->groups; r; r = next, next = next ? next->next : NULL)
        for (int i = 0; i < r->size; i++) {
            int peer = __atomic_load_n(&r->inbox[i].peer, __ATOMIC_ACQUIRE);
            if (peer < 0 || !r->inbox[i].owner || r->inbox[i].owner->origin[i] != rank) continue;
            if (__atomic_load_n(&r->inbox[i].others, __ATOMIC_RELAXED) > 0) continue; /* several peers */
            *group = r;
            return peer;
        }
    return -1;
}

/* Returns the rank at the end of the chain of waits that begins with m's peer (m's peer, if the chain ends at this
   rank); -1: a rank has failed. A busy rank (hpml_comm_busy) ends the chain, even if its background thread waits, or if
   it is this rank. *busy: hpml_now() until which the rank at the end is, or was, busy. */
HPMLC_FN int hpmlc_threads_stuck_at(hpml_comm *c, const hpml_message *m, double *busy)
{
    hpml_world  *w     = hpmlc_world_of(c);
    hpmlc_group *group = hpmlc_group_of(c);
    int          peer = c->origin[m->peer], rank = peer;
    pthread_mutex_lock(&w->mutex);
    for (int hops = 0, next; hops < w->ranks; hops++, rank = next)
        if (hpml_now() < w->busy[rank] || (next = hpmlc_world_awaited(w, &group, rank)) < 0) break;
    *busy = w->busy[rank];
    if (w->failed) rank = -1; /* a rank that reports the error stops waiting, so the chain may be broken */
    pthread_mutex_unlock(&w->mutex);
    return rank == c->origin[c->rank] ? peer : rank; /* back at this rank: a cycle has no last rank */
}

HPMLC_FN void hpmlc_threads_announce_busy(hpml_comm *c, double seconds)
{
    hpml_world *w = hpmlc_world_of(c);
    pthread_mutex_lock(&w->mutex);
    w->busy[c->origin[c->rank]] = hpml_now() + seconds;
    pthread_mutex_unlock(&w->mutex);
}

// ---------------------------------------------------------------------------------------------------------------------
// >>hand-over   inboxes of threads; the rank that comes second does the work of both
// ---------------------------------------------------------------------------------------------------------------------
/* Records in the inbox of this rank of c that it waits for the list m; count 0: for nothing. */
HPMLC_FN void hpmlc_set_awaited(hpml_comm *c, hpml_message *const *m, int count)
{
    hpmlc_inbox *in    = hpmlc_inbox_of(c);
    const int    first = hpmlc_in_flight(m, count, 0);
    int          others = -1;
    for (int i = first; i < count; i = hpmlc_in_flight(m, count, i + 1)) others++;
    if (count > 0) in->operation = c->operation;
    in->awaited       = m;
    in->awaited_count = count;
    __atomic_store_n(&in->others, others, __ATOMIC_RELAXED);
    __atomic_store_n(&in->peer, first < count ? c->origin[m[first]->peer] : -1, __ATOMIC_RELEASE);
}

/* Returns when, in seconds, a message of `bytes` arrives that is sent to rank `to` at time `now`; 0: its link takes no
   time. Occupies the network cards of sender and receiver, because a card serves one message after another. */
HPMLC_FN double hpmlc_arrival(hpml_comm *c, int to, size_t bytes, double now)
{
    hpml_world      *w    = hpmlc_world_of(c);
    bool             far  = c->node[to] != c->node[c->rank];
    const hpml_link *link = far ? &w->network.between : &w->network.inside;
    double           busy = link->bandwidth > 0 ? (double)bytes / link->bandwidth : 0;
    if (link->latency <= 0 && busy <= 0) return 0;
    double *out = &w->card[far ? w->ranks + c->node[c->rank] : c->origin[c->rank]];
    double *in  = &w->card[w->ranks + w->nodes + (far ? w->ranks + c->node[to] : c->origin[to])];
    pthread_mutex_lock(&w->mutex);
    double start = now > *out ? now : *out;
    *out = start + busy;
    if (*in > start) start = *in; /* the message waits in the network, not in the sender's card */
    *in = start + busy;
    pthread_mutex_unlock(&w->mutex);
    return start + busy + link->latency;
}

#define HPMLC_HANDED 16384 /* bytes: larger messages are not handed over, where each rank has a core: see below */

/* Returns the receive that the sleeping owner of the inbox `in` has begun for the message m of rank `from`; NULL: none.
   The caller holds the mutex of the inbox. */
HPMLC_FN hpml_message *hpmlc_inbox_expects(const hpmlc_inbox *in, const hpml_message *m, int from)
{
    hpml_message *found = NULL; /* the oldest matching receive, the last in the list */
    for (hpml_message *r = in->owner->pending; r; r = r->next)
        if (!r->done && r->peer == from && r->tag == m->tag) found = r;
    return found;
}

/* Returns whether c's thread continues the course (the collective) of `sleeper`, whose message m is done, instead of
   waking it for the next round, because threads wait for a core and the messages are short. */
HPMLC_FN bool hpmlc_threads_continues(const hpml_comm *c, const hpml_comm *sleeper, const hpml_message *m)
{
    if (!sleeper->course || sleeper->survive || hpml_trace_on(sleeper->trace)) return false;
    return m->bytes <= HPMLC_HANDED && hpmlc_spin_limit(c) < HPMLC_SPIN_OWN_CORE;
}

/* Returns whether the message m ends the wait in which the owner of the inbox `in` sleeps; the caller holds the
   mutex. */
HPMLC_FN bool hpmlc_inbox_awaits(const hpmlc_inbox *in, const hpml_message *m)
{
    if (in->owner->course) return hpmlc_course_over(in->owner);
    for (int i = 0; i < in->awaited_count; i++)
        if (in->awaited[i] == m) return true;
    return false;
}

/* If the owner of the inbox `in` sleeps and waits for the message m alone, which is done: wakes the owner or, if this
   thread shall continue the owner's course (the rounds of a collective), puts the owner, still asleep, on the list
   c->stopped. Unlocks the mutex of the inbox. */
HPMLC_FN void hpmlc_inbox_done(hpml_comm *c, hpmlc_inbox *in, const hpml_message *m)
{
    bool wakes = in->wait.sleeping && hpmlc_inbox_awaits(in, m);
    if (wakes && hpmlc_threads_continues(c, in->owner, m)) {
        wakes = in->wait.sleeping = false;
        in->wait.stopped        = true;
        in->owner->next_stopped = c->stopped;
        c->stopped              = in->owner;
    }
    hpmlc_waitpoint_unlock(hpmlc_world_of(c), &in->wait, wakes);
}

/* Appends the send m to the inbox of rank m->peer. wake: wakes that rank if it sleeps and has begun to receive m; false
   in virtual time. */
HPMLC_FN void hpmlc_inbox_post(hpml_comm *c, hpml_message *m, bool wake)
{
    hpmlc_inbox *in   = &hpmlc_group_of(c)->inbox[m->peer];
    hpmlc_post  *post = hpmlc_post_of(m);
    post->from = c->rank;
    post->next = NULL;
    pthread_mutex_lock(&in->wait.mutex);
    if (post->copied) {
        post->after  = in->copies;
        post->before = &in->copies;
        in->copies   = m;
        if (post->after) hpmlc_post_of(post->after)->before = &post->after;
    }
    *in->last = m;
    in->last  = &post->next;
    if (!wake) pthread_mutex_unlock(&in->wait.mutex);
    else hpmlc_waitpoint_unlock(hpmlc_world_of(c), &in->wait, in->wait.sleeping && hpmlc_inbox_expects(in, m, c->rank));
}

/* Returns whether a message of `bytes` bytes is handed over by the second of its two ranks to arrive, which then does
   the work of both: a message of up to HPMLC_HANDED bytes, because to wake the other rank's thread takes longer; or of
   up to 16 times as many, where not every rank has a core of its own, because other ranks wait for a core. */
HPMLC_FN bool hpmlc_threads_hands_over(const hpml_comm *c, size_t bytes)
{
    return bytes <= HPMLC_HANDED || (hpmlc_spin_limit(c) < HPMLC_SPIN_OWN_CORE && bytes <= 16 * HPMLC_HANDED);
}

HPMLC_FN void hpmlc_divide(void *data, int64_t n, hpml_element e, int p);
/* Delivers the send `sent` to the receive m of c. With c->returns each sum is also written to the sender's array, in
   pieces that the first level of cache holds, divided by c->divisor. */
HPMLC_FN void hpmlc_threads_copy(hpml_comm *c, hpml_message *m, const hpml_message *sent)
{
    const size_t piece = 8192;
    if (!m->reduce || !c->returns || sent->bytes != m->bytes) {
        hpml_message_deliver(c, m, sent->data, sent->bytes);
        return;
    }
    for (size_t at = 0, bytes; at < m->bytes; at += bytes) {
        char *sum = m->data + at;
        bytes = m->bytes - at < piece ? m->bytes - at : piece;
        m->reduce(sum, sent->data + at, bytes);
        if (c->divisor) hpmlc_divide(sum, (int64_t)(bytes / hpml_element_size(c->returned)), c->returned, c->divisor);
        memcpy(sent->data + at, sum, bytes);
    }
    m->done = true;
}

/* Completes the send m and its receive, if the receiver sleeps and has begun this receive, and wakes the receiver if it
   waits for this receive alone. Returns false if the receiver does not sleep, has not begun the receive, or expects
   another number of bytes, which is an error. */
HPMLC_FN bool hpmlc_threads_hand_over(hpml_comm *c, hpml_message *m)
{
    hpmlc_inbox  *in      = &hpmlc_group_of(c)->inbox[m->peer];
    hpml_message *receive = NULL;
    pthread_mutex_lock(&in->wait.mutex);
    if (in->wait.sleeping) receive = hpmlc_inbox_expects(in, m, c->rank);
    if (receive && receive->bytes == m->bytes) {
        hpmlc_threads_copy(in->owner, receive, m);
        m->done = true;
        hpmlc_inbox_done(c, in, receive);
    } else pthread_mutex_unlock(&in->wait.mutex);
    return m->done;
}

/* Appends a copy of the send m and of its array to the receiver's inbox and completes m at once, so that the sender
   does not wait, as a network card with a buffer does. wake: wakes the receiver, if it sleeps. */
HPMLC_FN void hpmlc_inbox_post_copy(hpml_comm *c, hpml_message *m, bool wake)
{
    hpml_message *copy = (hpml_message *)malloc(sizeof *copy + m->bytes);
    m->done = true;
    if (!copy) {
        m->status = hpmlc_fail(c, HPML_ERR_MEMORY, "no memory for a message of %zu bytes", m->bytes);
        return;
    }
    *copy      = *m;
    copy->data = (char *)(copy + 1);
    hpmlc_post_of(copy)->copied = true;
    if (m->bytes > 0) memcpy(copy->data, m->data, m->bytes);
    hpmlc_inbox_post(c, copy, wake);
}

/* Takes a send out of the inbox `in` and returns it: if m is a receive, the send that matches m, else m itself. NULL:
   this send is not in the inbox, or is still in flight and arrives at the time m->arrival. */
HPMLC_FN hpml_message *hpmlc_inbox_take(hpmlc_inbox *in, hpml_message *m)
{
    hpml_message **link, *sent;
    if (m->receiving) m->arrival = 0;
    pthread_mutex_lock(&in->wait.mutex);
    for (link = &in->posted; (sent = *link) != NULL; link = &hpmlc_post_of(sent)->next)
        if (m->receiving ? sent->tag == m->tag && hpmlc_post_of(sent)->from == m->peer : sent == m) break;
    if (sent && m->receiving) m->arrival = sent->arrival;
    if (sent && m->receiving && sent->arrival > 0 && sent->arrival > hpml_comm_now(m->owner)) sent = NULL;
    if (sent) {
        hpmlc_post *post = hpmlc_post_of(sent);
        *link = post->next;
        if (in->last == &post->next) in->last = link;
        if (post->copied) *post->before = post->after;
        if (post->copied && post->after) hpmlc_post_of(post->after)->before = post->before;
    }
    pthread_mutex_unlock(&in->wait.mutex);
    return sent;
}

// ---------------------------------------------------------------------------------------------------------------------
// >>threads-transport   messages between threads
// ---------------------------------------------------------------------------------------------------------------------
HPMLC_FN void hpmlc_threads_test(hpml_comm *c, hpml_message *m);
HPMLC_FN void hpmlc_threads_start(hpml_comm *c, hpml_message *m)
{
    const bool small = m->bytes <= 256 && m->tag <= HPML_TAG_MAX; /* a collective's receives come soon: no copy */
    const bool hands = hpmlc_threads_hands_over(c, m->bytes) && !hpmlc_world_of(c)->buffered;
    if (m->receiving && hands && hpmlc_oldest(m) == m) hpmlc_threads_test(c, m);
    if (m->receiving || (hands && hpmlc_threads_hand_over(c, m))) return;
    m->arrival = hpmlc_arrival(c, m->peer, m->bytes, hpml_now());
    if (small || hpmlc_world_of(c)->buffered) hpmlc_inbox_post_copy(c, m, true);
    else hpmlc_inbox_post(c, m, true);
}

#ifdef __linux__
#ifndef __USE_GNU
int sched_getcpu(void);
#endif
#ifndef __USE_MISC /* -std=c99 hides syscall */
long syscall(long number, ...);
#endif

/* Moves this thread off the core `core`: excludes that core from the cores that the thread may use, then allows all of
   them again: the thread stays on its new core. */
HPMLC_FN void hpmlc_move_off_core(int core)
{
    enum { BITS = 8 * (int)sizeof(long) };
    unsigned long all[128 / sizeof(long)] = { 0 }, others[sizeof all / sizeof(long)];
    if (core < 0 || core / BITS >= (int)(sizeof all / sizeof *all)) return;
    if (syscall(SYS_sched_getaffinity, 0L, sizeof all, all) < 0) return;
    memcpy(others, all, sizeof all);
    others[core / BITS] &= ~(1ul << core % BITS);
    if (syscall(SYS_sched_setaffinity, 0L, sizeof others, others) == 0)
        (void)syscall(SYS_sched_setaffinity, 0L, sizeof all, all);
}

/* Returns true if this thread must sleep instead of spin, because `peer` last waited on the same core. Two threads that
   spin on one core starve each other, because Linux is slow to separate two threads that never run at the same time.
   With a core for each rank this thread first tries another core; if it slept here, both would stay together. */
HPMLC_FN bool hpmlc_threads_shares_core(hpml_comm *c, int peer)
{
    hpmlc_inbox *in = hpmlc_group_of(c)->inbox;
    if (peer == c->rank) return false;
    for (int turn = 0;; turn++) {
        int core = sched_getcpu() + 1;
        __atomic_store_n(&in[c->rank].core, core, __ATOMIC_RELAXED);
        if (__atomic_load_n(&in[peer].core, __ATOMIC_RELAXED) != core) return false;
        if (turn == 1 || hpmlc_spin_limit(c) < HPMLC_SPIN_OWN_CORE) return true;
        hpmlc_move_off_core(core - 1);
    }
}
#else
HPMLC_FN bool hpmlc_threads_shares_core(hpml_comm *c HPMLC_UNUSED, int peer HPMLC_UNUSED) { return false; }
#endif

/* Completes the receive m from the send `sent`, then marks that send done and wakes its sender, or frees `sent` where
   it is a copy. */
HPMLC_FN void hpmlc_threads_deliver(hpml_comm *c, hpml_message *m, hpml_message *sent)
{
    hpmlc_inbox *sender = &hpmlc_group_of(c)->inbox[hpmlc_post_of(sent)->from];
    hpmlc_threads_copy(c, m, sent);
    if (hpmlc_post_of(sent)->copied) {
        free(sent);
        return;
    }
    pthread_mutex_lock(&sender->wait.mutex);
    __atomic_store_n(&sent->done, true, __ATOMIC_RELEASE); /* a sender that is awake may now reuse `sent` */
    hpmlc_inbox_done(c, sender, sent);
}

/* Completes m with the error recorded for all ranks of this process: a deadlock, or another rank's failure. */
HPMLC_FN void hpmlc_threads_fail(hpml_comm *c, hpml_message *m)
{
    hpml_world *w = hpmlc_world_of(c);
    m->done   = true;
    m->status = w->failed > w->ranks ? hpmlc_fail(c, HPML_ERR_COMM, "%s", w->text)
                                     : hpmlc_fail(c, HPML_ERR_PEER, "rank %d failed: %s", w->failed - 1, w->text);
}

HPMLC_FN void hpmlc_threads_test(hpml_comm *c, hpml_message *m)
{
    hpmlc_inbox  *in   = &hpmlc_group_of(c)->inbox[m->receiving ? c->rank : m->peer];
    hpml_message *sent = NULL;
    if (m->receiving) {
        size_t changes = (size_t)__atomic_load_n(&in->wait.changes, __ATOMIC_ACQUIRE) + 1;
        if (hpmlc_post_of(m)->tested != changes || m->arrival > 0) sent = hpmlc_inbox_take(in, m);
        hpmlc_post_of(m)->tested = changes;
    }
    if (sent) hpmlc_threads_deliver(c, m, sent);
    if (hpmlc_done(m) || !__atomic_load_n(&hpmlc_world_of(c)->failed, __ATOMIC_ACQUIRE)) return;
    if (m->receiving || hpmlc_inbox_take(in, m)) hpmlc_threads_fail(c, m); /* else the receiver is reading m's array */
}

HPMLC_FN void hpmlc_help_others(hpml_comm *c);
HPMLC_FN void hpmlc_threads_block(hpml_comm *c, hpml_message *const *m, int count, double until)
{
    hpmlc_help_others(c);
    hpmlc_inbox *in      = hpmlc_inbox_of(c);
    bool         counted = c->gives_up >= 1e300; /* else the time limit wakes this thread */
    double       early   = hpmlc_spin_limit(c) < HPMLC_SPIN_OWN_CORE ? 0 : HPMLC_EARLY;
    for (const hpml_message *p = c->pending; p; p = p->next) /* a message that is to arrive ends the sleep */
        if (p->arrival > 0 && !p->done) {
            counted = false;
            if (p->arrival - early < until) until = p->arrival - early;
        }
    hpmlc_set_awaited(c, m, count);
    hpmlc_waitpoint_sleep(hpmlc_world_of(c), &in->wait, &hpmlc_thread(c)->seen, until, counted);
}

/* For each rank of the list c->stopped, all of which sleep: continues the rank's course (the rounds of a collective)
   until a message is missing, for which the rank sleeps on, or until the course is over; then wakes the rank. In this
   way a rank sleeps only once in a collective. */
HPMLC_FN void hpmlc_threads_help(hpml_comm *c)
{
    hpml_world *w = hpmlc_world_of(c);
    for (hpml_comm *r; (r = c->stopped) != NULL;) {
        hpmlc_inbox *in = hpmlc_inbox_of(r);
        unsigned     changes;
        bool         waits;
        c->stopped = r->next_stopped;
        do {
            changes = __atomic_load_n(&in->wait.changes, __ATOMIC_ACQUIRE);
            waits   = hpmlc_course_next(r);
            if (waits) hpmlc_test_list(r, hpmlc_course_missing(r), 1); /* tests all receives of r that are in flight */
            while (r->stopped) { /* r's sends may have ended rounds of sleeping ranks */
                hpml_comm *other = r->stopped;
                r->stopped          = other->next_stopped;
                other->next_stopped = c->stopped;
                c->stopped          = other;
            }
            if (waits) hpmlc_set_awaited(r, hpmlc_course_missing(r), 1);
            pthread_mutex_lock(&in->wait.mutex);
            waits = waits && !__atomic_load_n(&w->failed, __ATOMIC_ACQUIRE); /* failed: the rank reports that */
            if (waits && (changes != in->wait.changes || hpmlc_course_over(r))) pthread_mutex_unlock(&in->wait.mutex);
            else in->wait.stopped = false;
        } while (in->wait.stopped);
        in->wait.sleeping = true;
        hpmlc_waitpoint_unlock(w, &in->wait, !waits);
    }
}

HPMLC_FN void hpmlc_threads_unblock(hpml_comm *c, hpml_message *m HPMLC_UNUSED) { hpmlc_set_awaited(c, NULL, 0); }

/* Opens the inbox of rank `rank` in `group`, the inboxes of all ranks of one communicator, for `owner`, the
   communicator as this rank sees it; NULL closes the inbox. Locks the world's mutex, because other threads read the
   owners of inboxes to find out who waits for whom, for example when they report a deadlock. */
HPMLC_FN void hpmlc_group_enter(hpmlc_group *group, int rank, hpml_comm *owner)
{
    pthread_mutex_lock(&group->world->mutex);
    group->inbox[rank].owner = owner;
    pthread_mutex_unlock(&group->world->mutex);
}

/* Closes the inbox of c's rank; the last rank that does so frees the group of c, the inboxes of all its ranks. */
HPMLC_FN void hpmlc_group_leave(hpml_comm *c)
{
    hpmlc_group *group = hpmlc_group_of(c), **link;
    hpml_world  *w     = group->world;
    if (c->survive && !c->is_part) hpmlc_world_lose(c, NULL);
    pthread_mutex_lock(&w->mutex);
    group->inbox[c->rank].owner = NULL;
    if (!c->is_part) w->left[c->rank] = true;
    bool last = --group->open == 0;
    if (last) {
        for (link = &w->groups; *link != group; link = &(*link)->next) {}
        *link = group->next;
    }
    pthread_mutex_unlock(&w->mutex);
    if (last) hpmlc_group_free(group);
}

/* Subtracts a thread that ends from the number of awake threads of world w. If no other thread is awake, the waits of
   the others are a deadlock. */
HPMLC_FN void hpmlc_world_thread_ends(hpml_world *w)
{
    if (__atomic_sub_fetch(&w->running, 1, __ATOMIC_ACQ_REL) == 0) hpmlc_world_deadlock(w);
}

HPMLC_FN void hpmlc_threads_close(hpml_comm *c)
{
    hpml_world *w = hpmlc_world_of(c);
    hpmlc_group_leave(c);
    if (!c->is_part) hpmlc_world_thread_ends(w);
}

HPMLC_FN hpmlc_thread_state *hpmlc_thread_state_new(hpml_comm *c)
{
    c->state = hpml_ctx_alloc(c->ctx, sizeof(hpmlc_thread_state), NULL);
    return hpmlc_thread(c);
}

/* Makes `part` a communicator of ranks[0] to ranks[count - 1] of c: the first of these allocates the inboxes of all and
   sends their address to the other ones. */
HPMLC_FN hpml_status hpmlc_threads_split(hpml_comm *c, hpml_comm *part, const int32_t *ranks, int count,
                                         int color HPMLC_UNUSED)
{
    const int    tag    = HPMLC_TAG_EXTRA;
    hpml_status  status = HPML_OK;
    hpmlc_group *group  = NULL;
    if (!part) return HPML_OK;
    if (part->rank == 0) {
        group = hpmlc_group_new(hpmlc_world_of(c), count);
        for (int i = 1; i < count && status == HPML_OK; i++)
            status = hpmlc_round(c, tag, ranks[i], (const char *)&group, sizeof group, -1, NULL, 0, NULL);
    } else status = hpmlc_round(c, tag, -1, NULL, 0, ranks[0], (char *)&group, sizeof group, NULL);
    if (status != HPML_OK) return status;
    if (!group || !hpmlc_thread_state_new(part))
        return hpmlc_fail(c, HPML_ERR_MEMORY, "no memory for a communicator of %d ranks", count);
    hpmlc_thread(part)->group   = group;
    hpmlc_thread(part)->vthread = hpmlc_thread(c)->vthread; /* CLOCK: the thread of a twin replaces it */
    hpmlc_group_enter(group, part->rank, part);
    return HPML_OK;
}

HPMLC_FN void hpmlc_threads_announce_failure(hpml_comm *c, const char *text)
{
    if (c->survive) hpmlc_world_lose(c, text);
    else hpmlc_world_fail(hpmlc_world_of(c), c->origin[c->rank], text);
}

/* Gives up the message m and sets m->done: a receive at once; a send by taking it out of the receiver's inbox or, if
   the receiver reads m's array already, by waiting until the receiver is done. */
HPMLC_FN void hpmlc_threads_abandon(hpml_comm *c, hpml_message *m)
{
    hpmlc_inbox *in = &hpmlc_group_of(c)->inbox[m->peer];
    while (!hpmlc_done(m)) {
        if (m->receiving || hpmlc_inbox_take(in, m)) m->done = true;
        else sched_yield();
    }
}

HPMLC_FN bool hpmlc_threads_has_delay(const hpml_comm *c)
{
    const hpml_network *n = &hpmlc_world_of(c)->network;
    return hpmlc_link_takes_time(&n->inside) || hpmlc_link_takes_time(&n->between);
}

HPMLC_FN bool hpmlc_threads_thread_open(hpml_comm *c, hpml_comm *twin HPMLC_UNUSED)
{
    __atomic_add_fetch(&hpmlc_world_of(c)->running, 1, __ATOMIC_ACQ_REL);
    return true;
}

HPMLC_FN void hpmlc_threads_thread_enter(hpml_comm *twin HPMLC_UNUSED) {}

HPMLC_FN void hpmlc_threads_thread_close(hpml_comm *c, hpml_comm *twin HPMLC_UNUSED)
{
    hpmlc_world_thread_ends(hpmlc_world_of(c));
}

HPMLC_FN void hpmlc_threads_sleep(hpml_comm *c, hpmlc_waitpoint *g, unsigned *seen, double until)
{
    hpmlc_waitpoint_sleep(hpmlc_world_of(c), g, seen, until, true);
}

HPMLC_FN void hpmlc_threads_wake(hpml_comm *sleeper, hpmlc_waitpoint *g)
{
    hpmlc_waitpoint_wake(hpmlc_world_of(sleeper), g);
}

static const hpmlc_schedule hpmlc_threads_schedule = {
    NULL, NULL, NULL, NULL, hpmlc_threads_thread_open, hpmlc_threads_thread_enter, hpmlc_threads_thread_close,
    hpmlc_threads_sleep, hpmlc_threads_wake
};

HPMLC_FN void hpmlc_world_absent(hpml_world *w, int rank, const char *text);
HPMLC_FN void hpmlc_threads_absent(hpml_ctx *ctx, const hpml_comm_desc *d)
{
    if (d->world) hpmlc_world_absent(d->world, d->rank, hpml_ctx_error(ctx));
}

HPMLC_FN hpml_status hpmlc_threads_locate(hpml_ctx *ctx, hpml_comm_desc *d)
{
    const hpml_world *w = d->world;
    if (!w || d->rank < 0 || d->rank >= w->ranks || d->transport != w->kind) {
        hpml_ctx_fail(ctx, HPML_ERR_ARGUMENT, "comm: rank %d of a world of %d%s; give .world (hpml_world_create) and "
                      ".rank, or use hpml_launch", d->rank, w ? w->ranks : 0,
                      w && d->transport != w->kind ? " of another transport" : "");
        hpmlc_threads_absent(ctx, d);
        return HPML_ERR_ARGUMENT;
    }
    d->ranks = w->ranks;
    return HPML_OK;
}

HPMLC_FN hpml_status hpmlc_threads_open(hpml_comm *c, const hpml_comm_desc *d)
{
    hpml_world         *w = d->world;
    hpmlc_thread_state *s = hpmlc_thread_state_new(c);
    if (!s) {
        hpmlc_threads_absent(c->ctx, d);
        return HPML_ERR_MEMORY;
    }
    pthread_mutex_lock(&w->mutex);
    for (s->group = w->groups; s->group->next;) s->group = s->group->next; /* the last group has all ranks */
    pthread_mutex_unlock(&w->mutex);
    for (int i = 0; i < c->size; i++) c->node[i] = hpmlc_network_node(&w->network, w->nodes, i);
    c->spin_limit = w->ranks <= hpmlc_cores(1) ? HPMLC_SPIN_OWN_CORE : 0;
    hpmlc_group_enter(s->group, c->rank, c);
    return HPML_OK;
}

static const hpml_transport hpmlc_threads = {
    "threads", hpmlc_threads_locate, hpmlc_threads_open, hpmlc_threads_absent, hpmlc_threads_split, hpmlc_threads_close,
    hpmlc_threads_start, hpmlc_threads_test, hpmlc_threads_block, hpmlc_threads_unblock, hpmlc_threads_abandon,
    hpmlc_threads_announce_failure, hpmlc_threads_announce_busy, hpmlc_threads_stuck_at, hpmlc_threads_why_lost,
    NULL, hpmlc_threads_shares_core, hpmlc_threads_has_delay, NULL, /* no .allreduce; is always concurrent */
    true, (size_t)512 << 10, 2e-6, 0.25e-9, &hpmlc_threads_schedule
};

HPMLC_FN void hpmlc_help_others(hpml_comm *c)
{
    if (c->stopped) hpmlc_threads_help(c);
}

/* Returns whether c's messages are the sender's array itself and no copy, so that a receiver may write to it. */
HPMLC_FN bool hpmlc_shares_arrays(const hpml_comm *c) { return c->t == &hpmlc_threads && !hpmlc_world_of(c)->buffered; }

#else
HPMLC_FN void hpmlc_help_others(hpml_comm *c HPMLC_UNUSED) {}
HPMLC_FN bool hpmlc_shares_arrays(const hpml_comm *c HPMLC_UNUSED) { return false; }
HPML_API hpml_world *hpml_world_create(hpml_transport_kind transport HPMLC_UNUSED, int32_t ranks HPMLC_UNUSED,
                                       const hpml_network *network HPMLC_UNUSED)
{
    return NULL;
}

HPML_API void hpml_world_free(hpml_world *w HPMLC_UNUSED) {}
struct hpmlc_waitpoint { unsigned changes; }; /* one thread, which never sleeps */
HPMLC_FN void hpmlc_sleep_at(hpml_comm *c HPMLC_UNUSED, hpmlc_waitpoint *g HPMLC_UNUSED, unsigned *seen HPMLC_UNUSED,
                             double until HPMLC_UNUSED) {}
HPMLC_FN void hpmlc_wake_at(hpml_comm *sleeper HPMLC_UNUSED, hpmlc_waitpoint *g HPMLC_UNUSED) {}
#endif /* HPML_NO_THREADS */

// ---------------------------------------------------------------------------------------------------------------------
// >>mpi   messages between processes, by MPI
// ---------------------------------------------------------------------------------------------------------------------
/* Only MPI_Init and MPI_Finalize block: sends, receives, MPI_Iallreduce and MPI_Comm_idup are started, then polled with
   MPI_Test, because a blocking call of MPI has no deadline. (Probes, queries, setters and frees are local calls;
   MPI_Comm_free sends nothing in MPICH and Open MPI either.) Messages are sent in pieces of HPMLC_PIECE bytes, two in
   flight at a time, so that counts may exceed 2^31 and one piece is reduced while the next arrives. One lock serves all
   communicators of a process, which lets a background thread run under MPI_THREAD_SERIALIZED.

   Control messages go from each rank to every other: "I have failed, because ...", "I have left", "I wait for rank 3,
   and have done so for half the deadline", "I am busy". A waiting rank polls for control messages, so a wait for a rank
   that has failed or left ends at once. A rank that was killed sends none: a wait for that rank ends at its deadline,
   with an error that follows the chain of waits and names that rank. */

#ifdef HPML_USE_MPI

#define HPMLC_PIECE ((size_t)4 << 20)
#define HPMLC_CONTROL 256 /* bytes of a rank's final control message: 'L' (left) or 'F' (failed) and a text */
#define HPMLC_BUSY  40   /* messages "I am busy", one for each duration of 2^k / 256 s, up to 68 years */
#define HPMLC_PARTS 128  /* at most so many communicators, one and its parts, share an MPI communicator */

typedef struct hpmlc_shared hpmlc_shared;

/* What hpml_comm.state, the pointer for the transport's own data, points to with MPI. */
typedef struct hpmlc_mpi {
    hpmlc_shared *shared;
    MPI_Comm      comm;    /* used by the communicator of hpml_comm_create and by its parts */
    MPI_Comm      native;  /* for MPI_Iallreduce alone; MPI_COMM_NULL: none */
    int           part;    /* number of this part (0: no part), whose tags begin at part * HPMLC_TAG_SPAN */
    hpml_message *sending; /* list of unfinished sends of over two pieces, and of later sends; oldest first */
    unsigned      turns;   /* calls of hpmlc_mpi_block since the last message was begun */
    char         *staging; /* buffer of two pieces, in which receives that reduce arrive; NULL: not needed yet */
} hpmlc_mpi;

/* What hpml_message.state, the bytes of a message for the transport's own data, contains with MPI. */
typedef struct __attribute__((may_alias)) hpmlc_transfer {
    hpml_message *next;       /* next message in hpmlc_mpi.sending */
    size_t        posted;     /* number of pieces given to MPI */
    size_t        moved;      /* bytes of the message that are sent, or received and reduced */
    MPI_Request   request[2]; /* MPI's requests of the pieces with an even, an odd number */
    char         *staging;    /* buffer in which pieces arrive; NULL: in the message's array */
    double        announced;  /* hpml_now() when the wait for this message was last announced; 0: never */
} hpmlc_transfer;
typedef char hpmlc_transfer_fits[sizeof(hpmlc_transfer) <= sizeof(hpml_message_state) ? 1 : -1];

HPMLC_FN hpmlc_mpi      *hpmlc_mpi_of(const hpml_comm *c) { return (hpmlc_mpi *)c->state; }
HPMLC_FN hpmlc_transfer *hpmlc_transfer_of(const hpml_message *m)
{
    return (hpmlc_transfer *)(uintptr_t)(const void *)&m->state;
}

/* What a communicator of hpml_comm_create over MPI shares with its parts, the communicators that are split from it. */
struct hpmlc_shared {
    int            rank, size;
    double         timeout; /* seconds that a wait may last; negative: for ever */
    hpml_comm     *owner;   /* the communicator that hpml_comm_create made */
    hpmlc_shared  *next;    /* next in the list hpmlc_mpi_living */
    MPI_Errhandler before;  /* error handler that MPI_COMM_WORLD had, restored in the end */
    /* Control messages, by which a rank announces that it failed, left, waits or is busy: */
    MPI_Comm       comm;    /* communicator for control messages */
    int            tag;     /* tag of control messages */
    int            from;    /* rank whose control message is being received, -1: none */
    MPI_Request    receive; /* MPI's request for receiving a control message */
    char           control[HPMLC_CONTROL]; /* buffer into which a control message is received */
    char          *letter;  /* (size) letter of each rank's last control message that has a letter; 0: none; 'K': killed
                               or hung, as with .survive a deadline has shown */
    char         **why;     /* (size) of a rank that has failed or left: why, see hpmlc_loss_text; NULL: not */
    int32_t       *number;  /* (size + 1 + HPMLC_BUSY) 0, 1, 2 ..., buffers of sends. Number r means "I wait for rank
                               r", `size` "I wait for all", size + 1 + k "I am busy, for up to 2^k / 256 s", the
                               sender's own number "I do not wait any more" */
    double        *awaits;  /* (size, 2) the .number that each rank announced last; hpml_now() at which that expires */
    double         busy;    /* hpml_now() until which this rank has announced that it is busy; 0: it is not */
    int            failed;  /* 1 + the first rank that announced a failure; 0: none */
    char           text[HPMLC_CONTROL]; /* text of the failure that rank failed - 1 announced */
    char           final[HPMLC_CONTROL]; /* buffer of this rank's final control message, 'L' or 'F' */
    MPI_Request   *sends;   /* (size) MPI's requests of the sends of `final` */
    bool           said_final;
    bool           own_core; /* true: this machine has a core for each rank of this node */
    int            level;   /* MPI's level of thread support, such as MPI_THREAD_SERIALIZED */
    int            parts;   /* number of communicators for which MPI's tags suffice */
    int64_t        newest;  /* largest number given to a part, before the modulo by `parts` */
    bool           taken[HPMLC_PARTS]; /* true: number used by a part on this rank */
    int            users;   /* atomic: number of parts, plus 1 until `owner` is closed; 0: this struct is freed */
    bool           closed;  /* true: `owner` has been freed, so that parts cannot send any more */
    bool           kept;    /* true: this struct is never freed, because MPI may still send from it */
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

/* Fails c, and completes m, with MPI's text of error `code`; returns the status. m NULL: a collective call failed. */
HPMLC_FN hpml_status hpmlc_mpi_error(hpml_comm *c, hpml_message *m, int code)
{
    char text[MPI_MAX_ERROR_STRING];
    int  length = 0, kind = 0;
    MPI_Error_string(code, text, &length);
    MPI_Error_class(code, &kind);
    if (!m)
        return hpmlc_fail(c, HPML_ERR_COMM, "%s: MPI says: %.*s; all ranks must pass the same counts", c->operation,
                          length, text);
    m->done = true;
    if (kind != MPI_ERR_TRUNCATE && c->survive && m->tag <= HPML_TAG_MAX) { /* the peer's process has ended */
        c->silent[m->peer] = true;
        return hpmlc_lose(c, m, hpmlc_why_lost(c, m->peer));
    }
    if (kind != MPI_ERR_TRUNCATE)
        return m->status = hpmlc_fail(c, HPML_ERR_COMM, "%s with rank %d: MPI says: %.*s", c->operation,
                                      c->origin[m->peer], length, text);
    return m->status = hpmlc_fail(c, HPML_ERR_COMM, "%s: rank %d sent more than the %zu bytes that rank %d expected; "
                                  "all ranks must pass the same counts", c->operation, c->origin[m->peer], m->bytes,
                                  c->origin[c->rank]);
}

/* Returns the buffer for sending or receiving the piece of m (up to 4 MiB) that begins at byte `at`. */
HPMLC_FN char *hpmlc_mpi_buffer(hpml_message *m, size_t at)
{
    char *staging = hpmlc_transfer_of(m)->staging;
    return staging ? staging + at / HPMLC_PIECE % 2 * HPMLC_PIECE : m->data + at;
}

HPMLC_FN size_t hpmlc_mpi_pieces(const hpml_message *m)
{
    return m->bytes > HPMLC_PIECE ? (m->bytes + HPMLC_PIECE - 1) / HPMLC_PIECE : 1;
}

/* Returns true if an older message with m's tag and peer has pieces of 4 MiB that MPI has not been given yet. */
HPMLC_FN bool hpmlc_mpi_behind(hpml_comm *c, const hpml_message *m)
{
    hpml_message *older = m->receiving ? m->next : hpmlc_mpi_of(c)->sending;
    while (older && older != m) {
        bool same = !older->done && older->peer == m->peer && older->tag == m->tag;
        if (same && hpmlc_transfer_of(older)->posted < hpmlc_mpi_pieces(older)) return true;
        older = m->receiving ? older->next : hpmlc_transfer_of(older)->next;
    }
    return false;
}

/* Gives MPI the pieces of m, of up to HPMLC_PIECE bytes, that may be in flight: two at a time, and none before all
   pieces of older messages with m's peer and tag. */
HPMLC_FN void hpmlc_mpi_feed(hpml_comm *c, hpml_message *m)
{
    hpmlc_mpi      *x   = hpmlc_mpi_of(c);
    hpmlc_transfer *t   = hpmlc_transfer_of(m);
    size_t          end = t->moved / HPMLC_PIECE + 2, all = hpmlc_mpi_pieces(m);
    int             code = MPI_SUCCESS;
    if (end > all) end = all;
    if (t->posted >= end || hpmlc_mpi_behind(c, m)) return;
    const int peer = c->origin[m->peer], tag = x->part * HPMLC_TAG_SPAN + m->tag;
    hpmlc_mpi_lock(x->shared);
    for (; t->posted < end && code == MPI_SUCCESS; t->posted++) {
        size_t       at = t->posted * HPMLC_PIECE;
        int          n = (int)(m->bytes - at < HPMLC_PIECE ? m->bytes - at : HPMLC_PIECE);
        char        *data = hpmlc_mpi_buffer(m, at);
        MPI_Request *request = &t->request[t->posted % 2];
        code = m->receiving ? MPI_Irecv(data, n, MPI_BYTE, peer, tag, x->comm, request)
                            : MPI_Isend(data, n, MPI_BYTE, peer, tag, x->comm, request);
    }
    hpmlc_mpi_unlock(x->shared);
    if (code != MPI_SUCCESS) hpmlc_mpi_error(c, m, code);
}

HPMLC_FN void hpmlc_mpi_start(hpml_comm *c, hpml_message *m)
{
    hpmlc_mpi     *x = hpmlc_mpi_of(c);
    hpml_message **last = &x->sending;
    x->turns = 0;
    if (x->shared->closed) {
        m->done   = true;
        m->status = hpmlc_fail(c, HPML_ERR_STATE, "the communicator that this part was split from has been freed; free "
                               "it after its parts");
        return;
    }
    if (m->receiving && m->reduce) {
        if (!x->staging) x->staging = (char *)hpml_ctx_alloc(c->ctx, 2 * HPMLC_PIECE, NULL);
        hpmlc_transfer_of(m)->staging = x->staging;
        if (!x->staging) {
            m->done   = true;
            m->status = hpml_ctx_status(c->ctx);
            return;
        }
    }
    if (!m->receiving && (*last || hpmlc_mpi_pieces(m) > 2)) { /* appends m to the sends to test */
        while (*last) last = &hpmlc_transfer_of(*last)->next;
        *last = m;
    }
    hpmlc_mpi_feed(c, m);
}

HPMLC_FN void hpmlc_mpi_step(hpml_comm *c, hpml_message *m)
{
    hpmlc_shared   *x = hpmlc_mpi_of(c)->shared;
    hpmlc_transfer *t = hpmlc_transfer_of(m);
    size_t          n = m->bytes - t->moved < HPMLC_PIECE ? m->bytes - t->moved : HPMLC_PIECE;
    int             complete = 0, count = (int)n, code;
    MPI_Status      status;
    hpmlc_mpi_feed(c, m);
    if (m->done || t->posted <= t->moved / HPMLC_PIECE) return; /* no piece in flight */
    hpmlc_mpi_lock(x);
    code = MPI_Test(&t->request[t->moved / HPMLC_PIECE % 2], &complete, &status);
    if (code == MPI_SUCCESS && complete && m->receiving) MPI_Get_count(&status, MPI_BYTE, &count);
    hpmlc_mpi_unlock(x);
    if (code != MPI_SUCCESS) hpmlc_mpi_error(c, m, code);
    else if (complete && count != (int)n) hpmlc_mismatch(c, m, t->moved + (size_t)count);
    if (m->done || !complete) return;
    if (t->staging) m->reduce(m->data + t->moved, hpmlc_mpi_buffer(m, t->moved), n);
    t->moved += n;
    if (t->moved == m->bytes) m->done = true;
    else hpmlc_mpi_feed(c, m);
}

/* Advances message m and all listed sends: large messages are sent in pieces, and two ranks that send to each other
   would both wait for the other's next piece if a rank that waits did not go on sending. */
HPMLC_FN void hpmlc_mpi_test(hpml_comm *c, hpml_message *m)
{
    bool listed = false;
    for (hpml_message **at = &hpmlc_mpi_of(c)->sending; *at;) {
        hpml_message *s = *at;
        listed = listed || s == m;
        if (!s->done) hpmlc_mpi_step(c, s);
        if (s->done) *at = hpmlc_transfer_of(s)->next;
        else at = &hpmlc_transfer_of(s)->next;
    }
    if (!listed) hpmlc_mpi_step(c, m);
}

// ---------------------------------------------------------------------------------------------------------------------
// >>mpi-control   control messages: which rank failed, left, waits or is busy; waits for all ranks
// ---------------------------------------------------------------------------------------------------------------------
HPMLC_FN bool hpmlc_mpi_finalized(void)
{
    int over = 0;
    MPI_Finalized(&over);
    return over;
}

/* Sends the control message at `data` to all other ranks; `data` must stay unchanged until the sends are complete.
   requests: (x->size) gets MPI's requests; NULL: frees the requests at once, because `data` exists longer than the
   sends need it. The caller has locked x. */
HPMLC_FN void hpmlc_mpi_send_control(hpmlc_shared *x, const void *data, int bytes, MPI_Request *requests)
{
    for (int i = 0; i < x->size && !hpmlc_mpi_finalized(); i++) {
        MPI_Request request;
        if (i == x->rank || MPI_Isend(data, bytes, MPI_BYTE, i, x->tag, x->comm, &request) != MPI_SUCCESS) continue;
        if (requests) requests[i] = request;
        else MPI_Request_free(&request);
    }
}

HPMLC_FN void hpmlc_mpi_send_number(hpmlc_shared *x, int number)
{
    hpmlc_mpi_lock(x);
    hpmlc_mpi_send_control(x, &x->number[number], (int)sizeof *x->number, NULL);
    hpmlc_mpi_unlock(x);
}

/* Sends this rank's final control message, unless it has been sent: `kind`, 'L' (left) or 'F' (failed), and a text. */
HPMLC_FN void hpmlc_mpi_send_final(hpmlc_shared *x, char kind, const char *text)
{
    hpmlc_mpi_lock(x);
    if (!x->said_final) {
        x->said_final = true;
        snprintf(x->final, HPMLC_CONTROL, "%c%s", kind, text);
        hpmlc_mpi_send_control(x, x->final, HPMLC_CONTROL, x->sends);
    }
    hpmlc_mpi_unlock(x);
}

HPMLC_FN void hpmlc_mpi_announce_failure(hpml_comm *c, const char *text)
{
    hpmlc_mpi_send_final(hpmlc_mpi_of(c)->shared, 'F', text);
}

/* Receives a control message into x->control, its length into *bytes. Returns its sender; -1: none has arrived. */
HPMLC_FN int hpmlc_mpi_receive_control(hpmlc_shared *x, int *bytes)
{
    MPI_Status status;
    int        there = 0, from = x->from;
    if (from < 0) {
        if (MPI_Iprobe(MPI_ANY_SOURCE, x->tag, x->comm, &there, &status) != MPI_SUCCESS || !there) return -1;
        from = status.MPI_SOURCE;
        int code = MPI_Irecv(x->control, HPMLC_CONTROL, MPI_BYTE, from, x->tag, x->comm, &x->receive);
        if (code != MPI_SUCCESS) return -1;
        x->from = from;
    }
    int code = MPI_Test(&x->receive, &there, &status);
    if (code == MPI_SUCCESS && !there) return -1;
    x->from = -1;
    if (code != MPI_SUCCESS) return -1;
    MPI_Get_count(&status, MPI_BYTE, bytes);
    return from;
}

/* Receives all control messages that have arrived and notes in x what they announce: waits, work, failure, leaving. */
HPMLC_FN void hpmlc_mpi_poll_control(hpmlc_shared *x)
{
    int bytes = 0;
    hpmlc_mpi_lock(x);
    for (int from; (from = hpmlc_mpi_receive_control(x, &bytes)) >= 0;) {
        int32_t number;
        memcpy(&number, x->control, sizeof number);
        if (bytes == (int)sizeof number) {
            double lasts = number > x->size ? ldexp(1, number - x->size - 9) : x->timeout;
            x->awaits[2 * from]     = number;
            x->awaits[2 * from + 1] = hpml_now() + lasts;
            continue;
        }
        x->letter[from] = x->control[0];
        x->control[HPMLC_CONTROL - 1] = 0;
        const bool leaves = x->control[0] == 'L', fails = x->control[0] == 'F';
        if ((leaves || fails) && !x->why[from]) x->why[from] = (char *)malloc(256);
        if ((leaves || fails) && x->why[from]) hpmlc_loss_text(x->why[from], fails ? x->control + 1 : NULL);
        if (!fails || x->failed) continue;
        memcpy(x->text, x->control + 1, HPMLC_CONTROL - 1);
        x->failed = from + 1;
    }
    hpmlc_mpi_unlock(x);
}

/* Returns the number that `rank` announced last: the rank for which it waits; x->size if it waits for all ranks; a
   larger number if it is busy for an announced time. -1: it does not wait, or its announcement is no longer valid,
   because one deadline or, if busy, the announced time has passed since. */
HPMLC_FN int hpmlc_mpi_valid_number(const hpmlc_shared *x, int rank)
{
    const int number = (int)x->awaits[2 * rank];
    return number != rank && hpml_now() < x->awaits[2 * rank + 1] ? number : -1;
}

/* Returns the hpml_now() until which this rank is busy (hpml_comm_busy); locks x, because two threads use x->busy. */
HPMLC_FN double hpmlc_mpi_busy_until(hpmlc_shared *x)
{
    hpmlc_mpi_lock(x);
    double busy = x->busy;
    hpmlc_mpi_unlock(x);
    return busy;
}

/* Announces that this rank waits, until the deadline `until`, for rank `number` (x->size: for all ranks): first when
   half the timeout has passed, then every half timeout. *announced: hpml_now() of the last announcement, 0: none. A
   busy rank announces nothing: the others must know that it is busy, not for which rank its background thread waits. */
HPMLC_FN void hpmlc_mpi_announce_wait(hpmlc_shared *x, int number, double until, double *announced)
{
    double now = hpml_now();
    if ((*announced <= 0 && now < until - 0.5 * x->timeout) || now < *announced + 0.5 * x->timeout) return;
    if (now < hpmlc_mpi_busy_until(x)) return;
    *announced = now;
    hpmlc_mpi_send_number(x, number);
}

/* Announces to the other ranks the end of a wait that was announced at hpml_now() `announced` (0: it was not),
   because they would otherwise take the rank for which this one waited for the one that delays them. */
HPMLC_FN void hpmlc_mpi_announce_no_wait(hpmlc_shared *x, double announced)
{
    if (announced > 0 && hpml_now() >= hpmlc_mpi_busy_until(x)) hpmlc_mpi_send_number(x, x->rank);
}

HPMLC_FN void hpmlc_mpi_unblock(hpml_comm *c, hpml_message *m)
{
    if (m->status == HPML_OK) hpmlc_mpi_announce_no_wait(hpmlc_mpi_of(c)->shared, hpmlc_transfer_of(m)->announced);
}

/* Returns the rank that delays a wait for all ranks: the lowest other rank that has announced no wait, else the lowest
   one that has announced that it works alone (busy); -1: none, because all wait. */
HPMLC_FN int hpmlc_mpi_delaying_rank(const hpmlc_shared *x)
{
    int absent = -1;
    for (int i = x->size - 1; i >= 0; i--)
        if (i != x->rank && hpmlc_mpi_valid_number(x, i) > x->size) absent = i;
    for (int i = x->size - 1; i >= 0; i--)
        if (i != x->rank && hpmlc_mpi_valid_number(x, i) < 0) absent = i;
    return absent;
}

/* Finds the rank that holds up a wait. Ranks announce whom they wait for: goes from rank `at` to the rank that it waits
   for (if it waits for all: to hpmlc_mpi_delaying_rank), from there to the next, and returns the last rank reached. at
   -1: this rank waits for all, so begins at hpmlc_mpi_delaying_rank; returns -1 if that is -1: all other ranks wait.
   *busy: the hpml_now() until which the returned rank has announced to be busy; 0: it has not, or -1 is returned. */
HPMLC_FN int hpmlc_mpi_chain_end(const hpmlc_shared *x, int at, double *busy)
{
    if (at < 0) at = hpmlc_mpi_delaying_rank(x);
    for (int hops = 0; at >= 0 && hops < x->size; hops++) {
        int next = hpmlc_mpi_valid_number(x, at);
        if (next == x->size) next = hpmlc_mpi_delaying_rank(x);
        if (next < 0 || next > x->size) break;
        at = next;
    }
    *busy = at >= 0 && hpmlc_mpi_valid_number(x, at) > x->size ? x->awaits[2 * at + 1] : 0;
    return at;
}

HPMLC_FN int hpmlc_mpi_stuck_at(hpml_comm *c, const hpml_message *m, double *busy)
{
    hpmlc_shared *x  = hpmlc_mpi_of(c)->shared;
    int           at = hpmlc_mpi_chain_end(x, c->origin[m->peer], busy);
    if (at != x->rank) return at;
    *busy = hpmlc_mpi_busy_until(x); /* a cycle of waits: a background thread waits for ranks that wait for this rank */
    return c->origin[m->peer];
}

HPMLC_FN void hpmlc_mpi_announce_busy(hpml_comm *c, double seconds)
{
    hpmlc_shared *x = hpmlc_mpi_of(c)->shared;
    int           k = 0;
    while (k < HPMLC_BUSY - 1 && ldexp(1, k - 8) < seconds) k++;
    hpmlc_mpi_lock(x);
    x->busy = c->busy;
    hpmlc_mpi_unlock(x);
    hpmlc_mpi_send_number(x, x->size + 1 + k);
}

/* Removes the send m from x->sending, the list of sends that must be tested. */
HPMLC_FN void hpmlc_mpi_unlist(hpmlc_mpi *x, const hpml_message *m)
{
    hpml_message **at = &x->sending;
    while (*at && *at != m) at = &hpmlc_transfer_of(*at)->next;
    if (*at) *at = hpmlc_transfer_of(m)->next;
}

/* Gives up the message m after an error: cancels a receive. A receive that is partly complete, and a send, cannot be
   cancelled: their arrays must live as long as the process, which ends soon. */
HPMLC_FN void hpmlc_mpi_abandon(hpml_comm *c, hpml_message *m)
{
    hpmlc_mpi      *x = hpmlc_mpi_of(c);
    hpmlc_transfer *t = hpmlc_transfer_of(m);
    hpmlc_mpi_lock(x->shared);
    for (size_t k = t->moved / HPMLC_PIECE; m->receiving && k < t->posted; k++) {
        int over = 0;
        if (MPI_Cancel(&t->request[k % 2]) != MPI_SUCCESS) continue;
        for (int turn = 0; turn < 100 && !over; turn++) /* MPI_Wait could wait for ever for the rest of m */
            if (MPI_Test(&t->request[k % 2], &over, MPI_STATUS_IGNORE) != MPI_SUCCESS) break;
    }
    hpmlc_mpi_unlock(x->shared);
    hpmlc_mpi_unlist(x, m);
    m->done = true;
}

HPMLC_FN const char *hpmlc_mpi_why_lost(const hpml_comm *c, int peer)
{
    const hpmlc_shared *x = hpmlc_mpi_of(c)->shared;
    const char          letter = x->letter[c->origin[peer]];
    if (letter != 'L' && letter != 'F') return NULL;
    return x->why[c->origin[peer]] ? x->why[c->origin[peer]] : "failed or has left";
}

HPMLC_FN hpml_status hpmlc_mpi_peer_failed(hpml_comm *c)
{
    const hpmlc_shared *x = hpmlc_mpi_of(c)->shared;
    return hpmlc_fail(c, HPML_ERR_PEER, "rank %d failed: %s", x->failed - 1, x->text);
}

/* Ends the messages of the list m whose peer has left, or all messages of m if a rank has failed, with an error for
   each that has not arrived; returns whether there was a message to end. */
HPMLC_FN bool hpmlc_mpi_end(hpml_comm *c, hpml_message *const *m, int count)
{
    hpmlc_shared *x    = hpmlc_mpi_of(c)->shared;
    bool          ends = false;
    for (int i = hpmlc_in_flight(m, count, 0); i < count; i = hpmlc_in_flight(m, count, i + 1)) {
        const int peer = c->origin[m[i]->peer];
        if (!x->failed && x->letter[peer] != 'L') continue;
        ends = true;
        if (!x->failed) hpmlc_test(c, m[i]); /* the peer may have sent m before it left */
        if (m[i]->done) continue;
        hpmlc_mpi_abandon(c, m[i]);
        if (x->failed) m[i]->status = hpmlc_mpi_peer_failed(c);
        else m[i]->status = hpmlc_fail(c, HPML_ERR_PEER, "rank %d has left while this rank waits for it in %s", peer,
                                       c->operation);
    }
    return ends;
}

/* Lets other threads use the core for a moment, in a wait for the list m: yields the core in 16 of 64 calls, sleeps 30
   us in the others. With a core for each rank the first 5000 calls only yield, because a sleep delays a large message
   more than it helps other threads. Without .survive, ends messages whose peer has left, or all if a rank has failed.
   until: the deadline; 0: returns at once. Announces the wait to the other ranks, a wait for several peers as one for
   all ranks, but not a wait that gives up without an error. */
HPMLC_FN void hpmlc_mpi_block(hpml_comm *c, hpml_message *const *m, int count, double until)
{
    hpmlc_shared *x     = hpmlc_mpi_of(c)->shared;
    const int     first = hpmlc_in_flight(m, count, 0);
    hpmlc_mpi_poll_control(x);
    if ((!c->survive && hpmlc_mpi_end(c, m, count)) || until <= 0) return;
    if (c->gives_up >= 1e300)
        hpmlc_mpi_announce_wait(x, count > 1 ? x->size : c->origin[m[first]->peer], until,
                                &hpmlc_transfer_of(m[first])->announced);
    unsigned turn = hpmlc_mpi_of(c)->turns++;
    if (turn % 64 < 16 || (x->own_core && hpmlc_spin_limit(c) > 0 && turn + 1 < 5000)) hpmlc_pause(true);
    else hpmlc_nap(30e-6);
}

/* Is called at the deadline of hpmlc_mpi_wait_all, a wait for a collective MPI call: returns a later one where the rank
   that delays the others is busy, else fails c with an error that names that rank. code: what MPI returned. */
HPMLC_FN double hpmlc_mpi_wait_all_late(hpml_comm *c, int code)
{
    hpmlc_shared *x       = hpmlc_mpi_of(c)->shared;
    char          who[48] = "all ranks";
    double        busy;
    int           at = hpmlc_mpi_chain_end(x, -1, &busy);
    if (at < 0) busy = hpmlc_mpi_busy_until(x);
    if (hpml_now() < busy) return fmin(busy, hpml_now() + c->timeout);
    if (at >= 0) snprintf(who, sizeof who, "rank %d%s", at, x->letter[at] == 'L' ? ", which has left," : "");
    if (at < 0 && code != MPI_SUCCESS) hpmlc_mpi_error(c, NULL, code);
    else hpmlc_fail(c, HPML_ERR_TIMEOUT, "waited %g s for %s in %s, step %lld; are all ranks alive and in the same "
                    "operation? (.timeout sets the limit)", c->timeout, who, c->operation, (long long)c->step);
    return hpml_now();
}

/* Waits until the request of a collective MPI call, which returned `code`, is complete: as fast as the blocking call,
   but with a deadline, and a failed rank ends the wait. After an error of MPI waits until the deadline, because only
   then the error's text can name a rank that failed without announcing its failure. */
HPMLC_FN hpml_status hpmlc_mpi_wait_all(hpml_comm *c, int code, MPI_Request *request)
{
    hpmlc_shared *x     = hpmlc_mpi_of(c)->shared;
    double        limit = c->timeout < 0 ? 1e300 : hpml_now() + c->timeout, announced = 0;
    int           complete = 0, kind = MPI_SUCCESS;
    while (hpml_ctx_status(c->ctx) == HPML_OK) {
        hpmlc_mpi_lock(x);
        for (int turn = 0; turn < 64 && code == MPI_SUCCESS && !complete; turn++)
            code = MPI_Test(request, &complete, MPI_STATUS_IGNORE);
        if (code != MPI_SUCCESS) MPI_Error_class(code, &kind);
        hpmlc_mpi_unlock(x);
        hpmlc_mpi_poll_control(x);
        if (code == MPI_SUCCESS && complete) {
            hpmlc_mpi_announce_no_wait(x, announced);
            return HPML_OK;
        }
        if (kind == MPI_ERR_TRUNCATE) return hpmlc_mpi_error(c, NULL, code);
        if (x->failed) return hpmlc_mpi_peer_failed(c);
        hpmlc_mpi_announce_wait(x, x->size, limit, &announced);
        hpmlc_pause(true);
        if (hpml_now() > limit) limit = hpmlc_mpi_wait_all_late(c, code);
    }
    return hpml_ctx_status(c->ctx);
}

/* Sums n elements at `data` over all ranks of c, or takes the maximum, by MPI_Iallreduce: 2^30 elements at a time,
   because MPI counts with int. element: an hpml_element; op: an hpml_reduce. */
HPMLC_FN hpml_status hpmlc_mpi_allreduce(hpml_comm *c, void *data, int64_t n, int element, int op)
{
    const MPI_Datatype none    = MPI_DATATYPE_NULL;
    const MPI_Datatype types[] = { MPI_FLOAT, none, MPI_INT32_T, MPI_INT64_T, MPI_DOUBLE, none };
    const MPI_Op       how     = op == HPML_MAX ? MPI_MAX : MPI_SUM;
    const size_t       size    = hpml_element_size((hpml_element)element);
    hpml_status        status  = HPML_OK;
    if (types[element] == none)
        return hpmlc_fail(c, HPML_ERR_UNSUPPORTED, "allreduce (native): MPI has no bf16; choose another algorithm");
    if (hpmlc_mpi_of(c)->native == MPI_COMM_NULL)
        return hpmlc_fail(c, HPML_ERR_UNSUPPORTED, "allreduce (native): a part of a communicator has no MPI "
                          "communicator, because MPI makes one only by a call without a deadline; choose another "
                          "algorithm, or split with MPI and give hpml_comm_create the part as .mpi_comm");
    c->operation = "allreduce (native)";
    for (int64_t at = 0, part; at < n && status == HPML_OK; at += part) {
        MPI_Request request;
        part = hpmlc_min(n - at, (int64_t)1 << 30);
        hpmlc_mpi_lock(hpmlc_mpi_of(c)->shared);
        int code = MPI_Iallreduce(MPI_IN_PLACE, (char *)data + (size_t)at * size, (int)part, types[element], how,
                                  hpmlc_mpi_of(c)->native, &request);
        hpmlc_mpi_unlock(hpmlc_mpi_of(c)->shared);
        status = hpmlc_mpi_wait_all(c, code, &request);
    }
    if (status == HPML_OK) c->operation = "allreduce";
    return status;
}

// ---------------------------------------------------------------------------------------------------------------------
// >>mpi-close   splitting, closing over MPI; exit
// ---------------------------------------------------------------------------------------------------------------------
/* Duplicates `from` to *out, collectively. After an error the new handle leaks, because MPI may still write to it. */
HPMLC_FN hpml_status hpmlc_mpi_duplicate(hpml_comm *c, MPI_Comm from, MPI_Comm *out)
{
    hpmlc_shared *x     = hpmlc_mpi_of(c)->shared;
    MPI_Comm     *place = (MPI_Comm *)malloc(sizeof *place);
    MPI_Request   request;
    if (!place) return hpmlc_fail(c, HPML_ERR_MEMORY, "no memory for an MPI communicator");
    hpmlc_mpi_lock(x);
    int code = MPI_Comm_idup(from, place, &request);
    hpmlc_mpi_unlock(x);
    hpml_status status = hpmlc_mpi_wait_all(c, code, &request);
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

HPMLC_FN hpml_status hpmlc_agree(hpml_comm *c, const char *name, int64_t *most, int64_t n);
/* Chooses the number of a new part of c (a communicator of some of its ranks), which selects the part's tags: above all
   numbers that the ranks of c have used, until MPI's tags run out; then the next one that is free on every rank. All
   ranks of c get the same number; 0: none is free, or an error. */
HPMLC_FN int         hpmlc_mpi_new_part(hpml_comm *c)
{
    hpmlc_shared *x      = hpmlc_mpi_of(c)->shared;
    int64_t       ask[2] = { 0, 0 }; /* a candidate number; how many parts exist on this rank */
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
        x->taken[at] = true;
        x->newest    = hpmlc_max(x->newest, number);
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
    int  number = hpmlc_mpi_new_part(c);
    bool all    = count == c->size && hpmlc_mpi_of(c)->native != MPI_COMM_NULL;
    if (number == 0) return hpml_ctx_status(c->ctx);
    if (!part) {
        hpmlc_mpi_release(hpmlc_mpi_of(c)->shared, number);
        return HPML_OK;
    }
    hpmlc_mpi *x = (hpmlc_mpi *)hpml_ctx_alloc(c->ctx, sizeof *x, NULL);
    if (!x) return hpmlc_failure(c);
    part->state = x;
    x->shared = hpmlc_mpi_of(c)->shared;
    x->comm   = hpmlc_mpi_of(c)->comm;
    x->part   = number;
    x->native = MPI_COMM_NULL;
    for (int i = 0; i < count; i++) all = all && ranks[i] == i;
    if (all && hpmlc_mpi_duplicate(c, hpmlc_mpi_of(c)->native, &x->native) != HPML_OK) return hpml_ctx_status(c->ctx);
    __atomic_add_fetch(&x->shared->users, 1, __ATOMIC_RELAXED);
    return HPML_OK;
}

/* The list of the structs hpmlc_shared of all MPI communicators in this process, for hpmlc_mpi_exit, which exit calls.
   The one mutable static of this header, because exit passes no argument. locked: the list is being changed; handled:
   hpmlc_mpi_exit is registered by atexit; process: the process that changed the list last. */
static struct { bool locked, handled; long process; hpmlc_shared *first; } hpmlc_mpi_living;

/* Waits until all other ranks have sent a final control message ("left" or "failed") and received this rank's, so that
   no rank calls MPI_Finalize while such a message is in flight. Returns -1; or, when `patience` seconds have passed,
   the rank that delays the others, unless that rank has announced to be busy: then waits on. */
HPMLC_FN int hpmlc_mpi_await_final(hpmlc_shared *x, double patience)
{
    double limit = hpml_now() + patience, busy = 0;
    for (;; hpmlc_nap(100e-6)) {
        int absent = -1;
        hpmlc_mpi_poll_control(x);
        hpmlc_mpi_lock(x);
        for (int i = x->size - 1; i >= 0; i--) {
            if (x->letter[i] == 'K') continue;
            int gone = 0, code = MPI_Test(&x->sends[i], &gone, MPI_STATUS_IGNORE);
            bool left = i == x->rank || x->letter[i] == 'L' || x->letter[i] == 'F';
            if (!left || (code == MPI_SUCCESS && !gone)) absent = i;
        }
        hpmlc_mpi_unlock(x);
        if (absent < 0) return -1;
        if (hpml_now() < limit) continue;
        int at = hpmlc_mpi_chain_end(x, absent, &busy);
        if (hpml_now() > busy) return at < 0 || at == x->rank ? absent : at;
    }
}

/* Is called by exit: sends the other ranks the final control message "called exit", then waits up to 5 s for theirs and
   0.3 s more, because a launcher may kill the other ranks when this process ends. */
HPMLC_FN void hpmlc_mpi_exit(void)
{
    bool said = false;
    if (hpmlc_mpi_finalized() || hpmlc_mpi_living.process != (long)getpid()) return;
    for (hpmlc_shared *x = hpmlc_mpi_living.first; x; x = x->next) {
        char text[64];
        if (x->said_final) continue;
        snprintf(text, sizeof text, "called exit in step %lld", (long long)x->owner->step);
        hpmlc_mpi_send_final(x, 'F', text);
        hpmlc_mpi_await_final(x, 5);
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
    hpmlc_mpi_living.process = (long)getpid(); /* so that a child of fork does not notify ranks */
    if (!hpmlc_mpi_living.handled) hpmlc_mpi_living.handled = atexit(hpmlc_mpi_exit) == 0;
    __atomic_clear(&hpmlc_mpi_living.locked, __ATOMIC_RELEASE);
}

HPMLC_FN void hpmlc_shared_release(hpmlc_shared *x)
{
    if (__atomic_sub_fetch(&x->users, 1, __ATOMIC_ACQ_REL) > 0 || x->kept) return;
#ifndef HPML_NO_THREADS
    pthread_mutex_destroy(&x->lock);
#endif
    free(x);
}

HPMLC_FN void hpmlc_mpi_close_part(hpml_comm *c)
{
    hpmlc_shared *x = hpmlc_mpi_of(c)->shared;
    if (hpml_ctx_status(c->ctx) == HPML_OK) { /* else the part's tags may be in use by messages in flight */
        hpmlc_mpi_lock(x);
        if (hpmlc_mpi_of(c)->native != MPI_COMM_NULL && !hpmlc_mpi_finalized()) MPI_Comm_free(&hpmlc_mpi_of(c)->native);
        hpmlc_mpi_unlock(x);
        hpmlc_mpi_release(x, hpmlc_mpi_of(c)->part);
    }
    hpmlc_shared_release(x);
}

HPMLC_FN void hpmlc_mpi_close(hpml_comm *c)
{
    hpmlc_shared *x      = hpmlc_mpi_of(c)->shared;
    bool          failed = hpml_ctx_status(c->ctx) != HPML_OK;
    if (c->is_part) {
        hpmlc_mpi_close_part(c);
        return;
    }
    hpmlc_mpi_list(x, false);
    x->closed = true;
    x->kept   = hpmlc_mpi_finalized();
    if (x->kept) { /* x is not freed, because MPI may still send from x */
        hpmlc_shared_release(x);
        return;
    }
    hpmlc_mpi_send_final(x, failed ? 'F' : 'L', failed ? hpml_ctx_error(c->ctx) : "");
    double limit = c->timeout < 0 ? 60 : c->timeout;
    bool   killed = false;
    for (int i = 0; i < c->size; i++)
        if (c->silent[i] && !x->letter[i]) {
            x->letter[i] = 'K';
            killed       = true;
        }
    int    absent = hpmlc_mpi_await_final(x, failed && !c->survive ? 5 : limit);
    if (absent >= 0 && !failed && !c->survive)
        hpmlc_fail(c, HPML_ERR_TIMEOUT, "waited %g s for rank %d to free its communicator, step %lld; is that rank "
                   "alive? (hpml_comm_busy extends the deadline of a rank that works)", c->timeout, absent,
                   (long long)c->step);
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, x->before);
    MPI_Errhandler_free(&x->before);
    if (absent < 0 && !failed && !killed) MPI_Comm_free(&hpmlc_mpi_of(c)->comm);
    x->kept = absent >= 0 || killed; /* true: MPI may still send from x */
    hpmlc_shared_release(x);
}

// ---------------------------------------------------------------------------------------------------------------------
// >>mpi-create   connecting the ranks over MPI
// ---------------------------------------------------------------------------------------------------------------------
/* Sets c->node: rank i is on node i / ranks_per_node; where that is 0, ranks whose hosts have the same name share a
   node, and nodes are numbered by first appearance. */
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
            int same = i - 1; /* an earlier rank on this host, mostly the one just before */
            while (same >= 0 && host[same] != host[i]) same--;
            c->node[i] = same >= 0 ? c->node[same] : count++;
        }
    hpml_ctx_release(c->ctx, host);
    hpml_comm_counters_reset(c);
}

HPMLC_FN MPI_Comm hpmlc_mpi_given(const hpml_comm_desc *d)
{
    return d->mpi_comm ? *(MPI_Comm *)d->mpi_comm : MPI_COMM_WORLD;
}

/* Allocates the struct that a communicator over `given` and its parts share; NULL: no memory. The struct's arrays
   follow it in the same allocation, because MPI sends that are never tested read these arrays as long as the struct
   lives. timeout: seconds that a wait may last. */
HPMLC_FN hpmlc_shared *hpmlc_shared_new(MPI_Comm given, double timeout)
{
    int rank, size, found = 0, *most = NULL;
    MPI_Comm_rank(given, &rank);
    MPI_Comm_size(given, &size);
    MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, &most, &found);
    const size_t  n    = (size_t)size + 1 + HPMLC_BUSY;
    const size_t  each = 2 * sizeof(double) + sizeof(char *) + sizeof(MPI_Request) + sizeof(int32_t) + 1;
    hpmlc_shared *x = (hpmlc_shared *)calloc(1, sizeof *x + each * n);
    if (!x) return NULL;
    x->awaits = (double *)(void *)(x + 1);
    x->why   = (char **)(void *)(x->awaits + 2 * n);
    x->sends = (MPI_Request *)(void *)(x->why + n);
    x->number = (int32_t *)(void *)(x->sends + n);
    x->letter  = (char *)(x->number + n);
    for (int i = 0; i < (int)n; i++) {
        x->number[i] = i;
        x->sends[i]  = MPI_REQUEST_NULL;
    }
    x->rank     = rank;
    x->size     = size;
    x->comm     = given;
    x->tag      = found ? *most : 32767;
    x->from     = -1;
    x->parts    = (int)hpmlc_min(((int64_t)x->tag + 1) / HPMLC_TAG_SPAN, HPMLC_PARTS);
    x->taken[0] = true;
    x->users    = 1;
    x->timeout  = timeout;
    MPI_Query_thread(&x->level);
#ifndef HPML_NO_THREADS
    pthread_mutex_init(&x->lock, NULL);
#endif
    return x;
}

/* Is called at the deadline of hpmlc_mpi_meet, in which all ranks send each other a letter; returns false. The error,
   put on ctx and sent to all ranks, names the ranks that have neither sent `letter` nor announced that they wait. */
HPMLC_FN bool hpmlc_mpi_meet_late(hpml_ctx *ctx, hpmlc_shared *x, char letter)
{
    char text[160], names[64] = "";
    int  used = 0;
    for (int i = 0; i < x->size && used < 48; i++)
        if (i != x->rank && x->letter[i] != letter && hpmlc_mpi_valid_number(x, i) < 0)
            used += snprintf(names + used, sizeof names - (size_t)used, "%s rank %d", used ? "," : "", i);
    snprintf(text, sizeof text, "waited %g s for%s %s hpml_comm_create", x->timeout, used ? names : " all ranks",
             letter == 'Y' ? "to call" : "in");
    hpmlc_mpi_send_final(x, 'F', text);
    hpml_ctx_fail(ctx, HPML_ERR_TIMEOUT, "rank %d: %s; is that rank alive? (.timeout sets the limit)", x->rank, text);
    return false;
}

/* Sends *letter ('Y': this rank starts, 'D': communicator duplicated) to all ranks and waits until each has sent the
   same letter, or 'N': it could not start, which fails all ranks. Returns false after an error, which is on ctx. */
HPMLC_FN bool hpmlc_mpi_meet(hpml_ctx *ctx, hpmlc_shared *x, const char *letter)
{
    char   expected = *letter == 'N' ? 'Y' : *letter;
    double limit = x->timeout < 0 ? 1e300 : hpml_now() + x->timeout, announced = 0;
    hpmlc_mpi_lock(x);
    hpmlc_mpi_send_control(x, letter, 1, NULL);
    hpmlc_mpi_unlock(x);
    for (int turn = 0;; turn++) {
        int absent = 0, unready = -1;
        hpmlc_mpi_poll_control(x);
        for (int i = 0; i < x->size; i++) {
            if (x->letter[i] == 'N') unready = i;
            else absent += i != x->rank && x->letter[i] != expected;
        }
        if (x->failed)
            hpml_ctx_fail(ctx, HPML_ERR_PEER, "rank %d: rank %d failed: %s", x->rank, x->failed - 1, x->text);
        else if (absent == 0 && unready >= 0)
            hpml_ctx_fail(ctx, HPML_ERR_PEER, "rank %d: rank %d could not start", x->rank, unready);
        if (x->failed || absent == 0) return hpml_ctx_status(ctx) == HPML_OK;
        if (hpml_now() > limit) return hpmlc_mpi_meet_late(ctx, x, expected);
        hpmlc_mpi_announce_wait(x, x->size, limit, &announced);
        if (turn < 1000) hpmlc_pause(true);
        else hpmlc_nap(100e-6);
    }
}

/* Sets d->rank and d->ranks; an error where MPI is not running, or launcher and libmpi do not belong together. */
HPMLC_FN hpml_status hpmlc_mpi_locate(hpml_ctx *ctx, hpml_comm_desc *d)
{
    int on = 0, launched = hpml_launched(NULL), rank, size;
    MPI_Initialized(&on);
    if (!on || hpmlc_mpi_finalized())
        return hpml_ctx_fail(ctx, HPML_ERR_STATE, "comm: MPI is %s; call MPI_Init before hpml_comm_create and free "
                             "the context before MPI_Finalize, or use hpml_launch once",
                             on ? "over" : "not initialized");
    MPI_Comm given = hpmlc_mpi_given(d);
    MPI_Comm_rank(given, &rank);
    MPI_Comm_size(given, &size);
    if (!d->mpi_comm && size == 1 && launched > 1)
        return hpml_ctx_fail(ctx, HPML_ERR_COMM, "comm: the launcher started %d processes but MPI says each is alone: "
                             "mpiexec and libmpi are of different MPIs, or this is the MPICH of Ubuntu 24.04. Use the "
                             "mpiexec that belongs to your mpicc", launched);
    d->rank  = rank;
    d->ranks = size;
    return HPML_OK;
}

/* Connects this rank with all ranks of the desc: all send each other 'Y' (hpmlc_mpi_meet), duplicate the communicator
   for c and send each other 'D', because the letter that is missing then shows which rank was lost. c NULL: sends 'N',
   because this rank is out of memory. Returns the struct that c and its parts share; NULL: an error, on ctx. */
HPMLC_FN hpmlc_shared *hpmlc_mpi_join(hpml_ctx *ctx, hpml_comm *c, const hpml_comm_desc *d)
{
    static const char letters[] = { 'N', 'Y', 'D' };
    const MPI_Comm    given = hpmlc_mpi_given(d);
    hpmlc_shared     *x = hpmlc_shared_new(given, d->timeout != 0 ? d->timeout : 60);
    MPI_Errhandler    own;
    if (!x) {
        hpml_ctx_fail(ctx, HPML_ERR_MEMORY, "comm: no memory for control messages");
        return NULL;
    }
    hpmlc_mpi *m = c ? (hpmlc_mpi *)hpml_ctx_alloc(ctx, sizeof *m, NULL) : NULL;
    if (m) {
        m->shared = x;
        c->state  = m;
    }
    MPI_Comm_get_errhandler(MPI_COMM_WORLD, &x->before);
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN); /* because MPICH raises errors of MPI_Test there */
    MPI_Comm_get_errhandler(given, &own);
    MPI_Comm_set_errhandler(given, MPI_ERRORS_RETURN);
    bool good = hpmlc_mpi_meet(ctx, x, &letters[hpml_ctx_status(ctx) == HPML_OK]) &&
                hpmlc_mpi_duplicate(c, given, &m->comm) == HPML_OK && hpmlc_mpi_meet(ctx, x, &letters[2]);
    MPI_Comm_set_errhandler(given, own);
    MPI_Errhandler_free(&own);
    if (good) return x;
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, x->before);
    MPI_Errhandler_free(&x->before);
    x->kept = x->said_final; /* true: x is not freed, because MPI may still send from x */
    hpmlc_shared_release(x);
    return NULL;
}

HPMLC_FN void hpmlc_mpi_no_memory(hpml_ctx *ctx, const hpml_comm_desc *d) { hpmlc_mpi_join(ctx, NULL, d); }

HPMLC_FN hpml_status hpmlc_mpi_open(hpml_comm *c, const hpml_comm_desc *d)
{
    int           near = 0;
    hpmlc_shared *x    = hpmlc_mpi_join(c->ctx, c, d);
    if (!x) return hpml_ctx_status(c->ctx);
    hpmlc_mpi_of(c)->native = hpmlc_mpi_of(c)->comm;
    x->comm  = hpmlc_mpi_of(c)->comm;
    x->tag   = HPMLC_TAG_EXTRA;
    x->owner = c;
    memset(x->letter, 0, (size_t)x->size);
    memset(x->awaits, 0, 2 * sizeof(double) * (size_t)x->size);
    hpmlc_mpi_list(x, true);
    hpmlc_mpi_nodes(c, d->ranks_per_node); /* after an error c is open, and is closed later */
    for (int i = 0; i < x->size; i++) near += c->node[i] == c->node[x->rank];
    x->own_core = near <= hpmlc_cores_online(); /* all cores, because each process may be bound to others */
    return HPML_OK;
}

/* Returns whether threads may use c and its parts at once: MPI_THREAD_SERIALIZED will do, because calls are locked. */
HPMLC_FN bool hpmlc_mpi_is_concurrent(const hpml_comm *c)
{
    return hpmlc_mpi_of(c)->shared->level >= MPI_THREAD_SERIALIZED;
}

static const hpml_transport hpmlc_mpi_transport = {
    "mpi", hpmlc_mpi_locate, hpmlc_mpi_open, hpmlc_mpi_no_memory, hpmlc_mpi_split, hpmlc_mpi_close,
    hpmlc_mpi_start, hpmlc_mpi_test, hpmlc_mpi_block, hpmlc_mpi_unblock, hpmlc_mpi_abandon,
    hpmlc_mpi_announce_failure, hpmlc_mpi_announce_busy, hpmlc_mpi_stuck_at, hpmlc_mpi_why_lost,
    hpmlc_mpi_allreduce, NULL, NULL, hpmlc_mpi_is_concurrent, /* .has_delay NULL: messages between nodes take time */
    false, 0, 5e-6, 0.3e-9, NULL
};

/* Starts MPI for hpml_launch and returns true; false: the program has started it. *rank: this process's number. */
HPMLC_FN bool hpmlc_mpi_init(int *rank)
{
    int on = 0, level;
    MPI_Initialized(&on);
    if (!on) MPI_Init_thread(NULL, NULL, MPI_THREAD_SERIALIZED, &level);
    if (!hpmlc_mpi_finalized()) MPI_Comm_rank(MPI_COMM_WORLD, rank); /* after MPI_Finalize, hpml_comm_create fails */
    return !on;
}

#endif /* HPML_USE_MPI */

// ---------------------------------------------------------------------------------------------------------------------
// >>clock   messages in virtual time
// ---------------------------------------------------------------------------------------------------------------------
/* Every thread has a clock of its own, which hpml_comm_compute and the arrival of messages advance; real time does not
   count. One thread runs at a time: the one whose clock is behind all others. So messages enter the links in the order
   of their virtual time, whatever the machine does, and a run can be repeated exactly. A send is copied and done at
   once. A receive is done when its message has arrived: the receiving thread advances its clock to that time, and lets
   threads whose clocks are behind run before it reads the message. */

#ifndef HPML_NO_THREADS

struct hpmlc_vthread {
    double         clock;    /* seconds of virtual time; the timeline of the rank's context reads this member */
    const double  *replaced; /* the clock that the timeline read before this one; NULL: real time */
    hpml_rng       rng;      /* random numbers of the thread's jitter */
    int            rank;     /* rank in the world; where clocks are equal the thread with the lower rank runs first */
    bool           runnable;
    double         due;      /* virtual time of the thread's next turn: its clock, or the time for which it waits */
    bool           waits;    /* true: runs after the other threads that run at the time `due` */
    pthread_cond_t turn;
    hpmlc_vthread *next;
};

HPMLC_FN hpmlc_vthread *hpmlc_vthread_of(const hpml_comm *c) { return hpmlc_thread(c)->vthread; }

/* Makes thread a of world w runnable at the time of its clock, and counts it as awake. The caller holds w->mutex. */
HPMLC_FN void hpmlc_vthread_wake_held(hpml_world *w, hpmlc_vthread *a)
{
    a->due   = a->clock;
    a->waits = false;
    if (a->runnable) return;
    a->runnable = true;
    __atomic_add_fetch(&w->running, 1, __ATOMIC_ACQ_REL);
}

HPMLC_FN void hpmlc_vthreads_wake(hpml_world *w)
{
    for (hpmlc_vthread *a = w->vthreads; a; a = a->next) hpmlc_vthread_wake_held(w, a);
}

/* Returns whether thread a runs before thread b: at an earlier time, or at the same time, where b waits or has a higher
   rank. */
HPMLC_FN bool hpmlc_vthread_before(const hpmlc_vthread *a, const hpmlc_vthread *b)
{
    if (a->due < b->due || a->due > b->due) return a->due < b->due;
    return a->waits != b->waits ? b->waits : a->rank < b->rank;
}

/* Lets one thread of world w run: the runnable one whose clock is behind all others. The caller holds w->mutex. */
HPMLC_FN void hpmlc_vthread_next_turn(hpml_world *w)
{
    hpmlc_vthread *best = NULL;
    if (w->vthread_count < w->ranks) return; /* not all ranks have entered yet */
    for (int attempt = 0; attempt < 2 && !best; attempt++) {
        for (hpmlc_vthread *a = w->vthreads; a; a = a->next)
            if (a->runnable && (!best || hpmlc_vthread_before(a, best))) best = a;
        if (!best) hpmlc_world_stuck(w); /* a deadlock: this call makes all threads runnable */
    }
    w->turn = best;
    if (best) pthread_cond_signal(&best->turn);
}

/* Lets other threads run until it is the turn of `self`, the caller. The caller holds w->mutex. */
HPMLC_FN void hpmlc_vthread_take_turn(hpml_world *w, hpmlc_vthread *self)
{
    hpmlc_vthread_next_turn(w);
    while (w->turn != self) pthread_cond_wait(&self->turn, &w->mutex);
}

/* Lets the threads run whose clocks are behind that of c's thread, and returns when c's thread is the one to run. */
HPMLC_FN void hpmlc_vthread_yield(hpml_comm *c)
{
    hpml_world    *w    = hpmlc_world_of(c);
    hpmlc_vthread *self = hpmlc_vthread_of(c);
    pthread_mutex_lock(&w->mutex);
    self->due = self->clock;
    hpmlc_vthread_take_turn(w, self);
    pthread_mutex_unlock(&w->mutex);
}

/* Lets threads with clocks up to `time` run, then sets the clock of c's thread to `time`, but never back; 1e300: sleeps
   until woken. Returns false, with the clock unchanged, if another thread woke this one first. */
HPMLC_FN bool hpmlc_vthread_await(hpml_comm *c, double time)
{
    hpml_world    *w    = hpmlc_world_of(c);
    hpmlc_vthread *self = hpmlc_vthread_of(c);
    hpmlc_inbox   *in   = hpmlc_inbox_of(c);
    const bool     sleeps = time >= 1e300;
    pthread_mutex_lock(&w->mutex);
    self->due   = sleeps ? self->clock : fmax(time, self->clock);
    self->waits = !sleeps;
    if (sleeps && (!w->failed || in->peer < 0)) { /* a failed world ends waits for messages */
        self->runnable    = false;
        in->wait.sleeping = true; /* hpmlc_world_stuck reports this wait */
        __atomic_sub_fetch(&w->running, 1, __ATOMIC_ACQ_REL);
    }
    hpmlc_vthread_take_turn(w, self);
    const bool undisturbed = self->waits;
    if (undisturbed) self->clock = self->due;
    self->waits       = false;
    in->wait.sleeping = false;
    pthread_mutex_unlock(&w->mutex);
    return undisturbed;
}

/* Waits until c's thread, a new one in a world where one thread runs at a time, gets its turn. The first turn starts
   when the thread of the last rank has entered. */
HPMLC_FN void hpmlc_vthread_enter(hpml_comm *c)
{
    hpml_world    *w    = hpmlc_world_of(c);
    hpmlc_vthread *self = hpmlc_vthread_of(c);
    pthread_mutex_lock(&w->mutex);
    if (!w->turn) hpmlc_vthread_next_turn(w);
    while (w->turn != self) pthread_cond_wait(&self->turn, &w->mutex);
    pthread_mutex_unlock(&w->mutex);
}

HPMLC_FN void hpmlc_vthread_wake(hpml_world *w, hpmlc_vthread *a)
{
    pthread_mutex_lock(&w->mutex);
    hpmlc_vthread_wake_held(w, a);
    pthread_mutex_unlock(&w->mutex);
}

/* Sets the clock of c's thread to `time`, in seconds, unless the clock is past `time`. Then lets the threads run whose
   clocks are behind, because what they send comes before anything that this thread does next. */
HPMLC_FN void hpmlc_clock_advance(hpml_comm *c, double time)
{
    hpmlc_vthread *self = hpmlc_vthread_of(c);
    if (self->clock >= time) return;
    self->clock = time;
    hpmlc_vthread_yield(c);
}

HPMLC_FN bool hpmlc_clock_settle(hpml_comm *c, double time)
{
    return time < hpmlc_vthread_of(c)->clock || hpmlc_vthread_await(c, time);
}

HPMLC_FN hpmlc_vthread *hpmlc_vthread_new(hpml_world *w, int rank, double clock)
{
    hpmlc_vthread *a = (hpmlc_vthread *)calloc(1, sizeof *a);
    if (!a) return NULL;
    pthread_cond_init(&a->turn, NULL);
    a->rank       = rank;
    a->clock      = clock;
    a->due        = clock;
    a->runnable   = true;
    a->rng.seed   = w->network.seed;
    a->rng.stream = (uint64_t)rank;
    pthread_mutex_lock(&w->mutex);
    a->next     = w->vthreads;
    w->vthreads = a;
    w->vthread_count++;
    pthread_mutex_unlock(&w->mutex);
    return a;
}

/* Removes this thread, `self`, from world w for good, frees it and lets another thread run. */
HPMLC_FN void hpmlc_vthread_free(hpml_world *w, hpmlc_vthread *self)
{
    hpmlc_vthread **link;
    pthread_mutex_lock(&w->mutex);
    for (link = &w->vthreads; *link != self; link = &(*link)->next) {}
    *link = self->next;
    __atomic_sub_fetch(&w->running, 1, __ATOMIC_ACQ_REL);
    hpmlc_vthread_next_turn(w);
    pthread_mutex_unlock(&w->mutex);
    pthread_cond_destroy(&self->turn);
    free(self);
}

HPMLC_FN void hpmlc_clock_start(hpml_comm *c, hpml_message *m)
{
    hpmlc_inbox *in = &hpmlc_group_of(c)->inbox[m->peer];
    if (m->receiving) return;
    hpmlc_vthread_yield(c);
    double now = hpmlc_vthread_of(c)->clock;
    m->arrival = hpmlc_arrival(c, m->peer, m->bytes, now);
    if (m->arrival <= 0) m->arrival = now;
    hpmlc_inbox_post_copy(c, m, false);
    if (in->owner) hpmlc_vthread_wake(hpmlc_world_of(c), hpmlc_vthread_of(in->owner));
}

HPMLC_FN void hpmlc_clock_test(hpml_comm *c, hpml_message *m)
{
    hpml_message *sent = hpmlc_inbox_take(hpmlc_inbox_of(c), m);
    if (sent) hpmlc_threads_deliver(c, m, sent);
    else if (__atomic_load_n(&hpmlc_world_of(c)->failed, __ATOMIC_ACQUIRE)) hpmlc_threads_fail(c, m);
}

/* Returns the earliest time, after c's present clock, at which the loss of a peer of the list m becomes known;
   1e300: there is none. */
HPMLC_FN double hpmlc_clock_next_loss(const hpml_comm *c, hpml_message *const *m, int count)
{
    double first = 1e300;
    for (int i = hpmlc_in_flight(m, count, 0); i < count && c->survive; i = hpmlc_in_flight(m, count, i + 1)) {
        const hpmlc_loss *loss = hpmlc_loss_of(c, m[i]->peer);
        if (loss && loss->at > hpml_comm_now(c) && loss->at < first) first = loss->at;
    }
    return first;
}

/* Sleeps in virtual time until the first message of the list m arrives or a peer of the list is known to be lost, at
   most until c->gives_up, or until a message is sent to this rank. If an older receive with the same peer and tag as
   one of the list gets the next message, the arrival of that message ends the sleep. Never sleeps until any other
   message outside the list arrives, because a receive of the list may be done before. There are no deadlines. */
HPMLC_FN void hpmlc_clock_block(hpml_comm *c, hpml_message *const *m, int count, double until HPMLC_UNUSED)
{
    const double arrival = fmin(hpmlc_next_arrival(m, count), hpmlc_clock_next_loss(c, m, count));
    if (count == 1 && arrival < c->gives_up) {
        hpmlc_clock_advance(c, arrival); /* no other message can end this wait before */
        return;
    }
    hpmlc_set_awaited(c, m, count);
    hpmlc_vthread_await(c, fmin(arrival, c->gives_up));
}

/* Returns the thread whose member .clock is at `clock`. The timeline stores only the address of the clock that it
   reads, and that is always such a member, because only hpmlc_clock_open gives the timeline a new clock. */
HPMLC_FN hpmlc_vthread *hpmlc_vthread_of_clock(const double *clock)
{
    return (hpmlc_vthread *)((uintptr_t)clock - offsetof(hpmlc_vthread, clock));
}

/* Called before `self` is freed. If the timeline of ctx reads the clock of `self`, makes it read the clock that it read
   before that one (self->replaced). If the timeline reads the clock of a communicator that was created later on ctx,
   leaves this clock, and replaces the clock of `self` by self->replaced in the thread that would return to it (the
   thread of the communicator created next after that of `self`). */
HPMLC_FN void hpmlc_clock_restore(hpml_ctx *ctx, hpmlc_vthread *self)
{
    const double *top = hpml_trace_clock(ctx, self->replaced);
    if (!top || top == &self->clock) return;
    hpml_trace_clock(ctx, top);
    hpmlc_vthread *later = hpmlc_vthread_of_clock(top);
    while (later->replaced && later->replaced != &self->clock) later = hpmlc_vthread_of_clock(later->replaced);
    later->replaced = self->replaced;
}

HPMLC_FN void hpmlc_clock_close(hpml_comm *c)
{
    hpml_world    *w    = hpmlc_world_of(c);
    hpmlc_vthread *self = hpmlc_vthread_of(c);
    if (!c->is_part) {
        hpmlc_clock_restore(c->ctx, self);
        hpmlc_vthread_yield(c);
    }
    hpmlc_group_leave(c);
    if (!c->is_part) hpmlc_vthread_free(w, self);
}

/* Gives up the message m after an error. Nothing else refers to m, because sends are copies. */
HPMLC_FN void hpmlc_clock_abandon(hpml_comm *c HPMLC_UNUSED, hpml_message *m) { m->done = true; }

HPMLC_FN double hpmlc_clock_now(const hpml_comm *c) { return hpmlc_vthread_of(c)->clock; }

HPMLC_FN void hpmlc_clock_compute(hpml_comm *c, double seconds)
{
    hpmlc_vthread      *self  = hpmlc_vthread_of(c);
    const hpml_network *net   = &hpmlc_world_of(c)->network;
    double              start = self->clock;
    if (net->slow) seconds *= net->slow[c->origin[c->rank]];
    self->clock += seconds * (1 + net->jitter * (double)hpml_rng_uniform(&self->rng));
    hpml_trace_span(c->ctx, HPML_LANE_COMPUTE, "compute", start, self->clock);
    hpmlc_vthread_yield(c);
}

HPMLC_FN bool hpmlc_clock_thread_open(hpml_comm *c, hpml_comm *twin)
{
    const hpmlc_vthread *self = hpmlc_vthread_of(c);
    hpmlc_vthread       *own  = hpmlc_vthread_new(hpmlc_world_of(c), self->rank, self->clock);
    if (!own) return false;
    __atomic_add_fetch(&hpmlc_world_of(c)->running, 1, __ATOMIC_ACQ_REL);
    hpmlc_thread(twin)->vthread = own;
    return true;
}

/* Ends the virtual thread of `twin`, the communicator of c's background thread, which uses c's clock from now on. */
HPMLC_FN void hpmlc_clock_thread_close(hpml_comm *c, hpml_comm *twin)
{
    hpmlc_vthread *own = hpmlc_vthread_of(twin);
    hpmlc_thread(twin)->vthread = hpmlc_vthread_of(c);
    hpmlc_vthread_free(hpmlc_world_of(c), own);
}

/* Sleeps at waitpoint g until hpmlc_clock_wake, unless g->changes differs from *seen already; then sets *seen to
   g->changes. Virtual time passes for the other threads; `until`, a real time, is ignored. */
HPMLC_FN void hpmlc_clock_sleep(hpml_comm *c, hpmlc_waitpoint *g, unsigned *seen, double until HPMLC_UNUSED)
{
    hpmlc_set_awaited(c, NULL, 0);
    if (__atomic_load_n(&g->changes, __ATOMIC_ACQUIRE) == *seen) hpmlc_vthread_await(c, 1e300);
    *seen = __atomic_load_n(&g->changes, __ATOMIC_ACQUIRE);
}

HPMLC_FN void hpmlc_clock_wake(hpml_comm *sleeper, hpmlc_waitpoint *g)
{
    hpml_world *w = hpmlc_world_of(sleeper);
    hpmlc_waitpoint_wake(w, g);
    hpmlc_vthread_wake(w, hpmlc_vthread_of(sleeper));
}

static const hpmlc_schedule hpmlc_clock_schedule = {
    hpmlc_clock_now, hpmlc_clock_compute, hpmlc_clock_advance, hpmlc_clock_settle, hpmlc_clock_thread_open,
    hpmlc_vthread_enter, hpmlc_clock_thread_close, hpmlc_clock_sleep, hpmlc_clock_wake
};

HPMLC_FN hpml_status hpmlc_clock_open(hpml_comm *c, const hpml_comm_desc *d)
{
    hpml_world *w = d->world;
    if (hpmlc_threads_open(c, d) != HPML_OK) return hpml_ctx_status(c->ctx);
    hpmlc_vthread *self = hpmlc_vthread_new(w, c->rank, 0);
    if (!self) {
        hpmlc_group_enter(hpmlc_group_of(c), c->rank, NULL);
        hpml_ctx_fail(c->ctx, HPML_ERR_MEMORY, "comm: no memory for a clock");
        hpmlc_threads_absent(c->ctx, d);
        return HPML_ERR_MEMORY;
    }
    hpmlc_thread(c)->vthread = self;
    c->spin_limit = 0; /* one thread runs at a time: nothing arrives while this one spins */
    self->replaced = hpml_trace_clock(c->ctx, &self->clock); /* spans show virtual time */
    hpmlc_vthread_enter(c);
    hpmlc_comm_links(c, &w->network, w->nodes);
    return HPML_OK;
}

static const hpml_transport hpmlc_clock = {
    "clock", hpmlc_threads_locate, hpmlc_clock_open, hpmlc_threads_absent, hpmlc_threads_split, hpmlc_clock_close,
    hpmlc_clock_start, hpmlc_clock_test, hpmlc_clock_block, hpmlc_threads_unblock, hpmlc_clock_abandon,
    hpmlc_threads_announce_failure, NULL, NULL, /* no .announce_busy and .stuck_at: there are no deadlines */
    hpmlc_threads_why_lost,
    NULL, NULL, NULL, NULL,
    true, 0, 2e-6, 0.25e-9, &hpmlc_clock_schedule
};

/* Records that rank `rank` could not start and fails world w with `text`, so that no other rank waits for that rank. */
HPMLC_FN void hpmlc_world_absent(hpml_world *w, int rank, const char *text)
{
    if (rank < 0 || rank >= w->ranks) return;
    hpmlc_world_fail(w, rank, text);
    pthread_mutex_lock(&w->mutex);
    w->left[rank] = true;
    __atomic_sub_fetch(&w->running, 1, __ATOMIC_ACQ_REL);
    if (w->kind == HPML_TRANSPORT_CLOCK && ++w->vthread_count == w->ranks) hpmlc_vthread_next_turn(w);
    pthread_mutex_unlock(&w->mutex);
}

#else
HPMLC_FN void hpmlc_world_absent(hpml_world *w HPMLC_UNUSED, int rank HPMLC_UNUSED, const char *text HPMLC_UNUSED) {}
#endif /* HPML_NO_THREADS */

// ---------------------------------------------------------------------------------------------------------------------
// >>create   creating, splitting, freeing communicators
// ---------------------------------------------------------------------------------------------------------------------
#ifdef HPML_NO_THREADS
/* Sets rank 0 of 1 in d: without threads the transports THREADS and CLOCK have one rank, which sends nothing. */
HPMLC_FN hpml_status hpmlc_self_locate(hpml_ctx *ctx HPMLC_UNUSED, hpml_comm_desc *d)
{
    d->rank  = 0;
    d->ranks = 1;
    return HPML_OK;
}

static const hpml_transport hpmlc_self = {
    "self", hpmlc_self_locate, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
    NULL, NULL, true, 0, 1e-7, 1e-10, NULL
};
#endif

/* Returns the built-in transport that d->transport names; NULL after an error, which is on ctx. */
HPMLC_FN const hpml_transport *hpmlc_transport_find(hpml_ctx *ctx, const hpml_comm_desc *d)
{
    switch (d->transport) {
#ifndef HPML_NO_THREADS
    case HPML_TRANSPORT_THREADS: return &hpmlc_threads;
    case HPML_TRANSPORT_CLOCK: return &hpmlc_clock;
#else
    case HPML_TRANSPORT_THREADS: case HPML_TRANSPORT_CLOCK: return &hpmlc_self;
#endif
    case HPML_TRANSPORT_MPI:
#ifdef HPML_USE_MPI
        return &hpmlc_mpi_transport;
#else
        hpml_ctx_fail(ctx, HPML_ERR_UNSUPPORTED, "comm: this program was built without MPI; compile it with "
                      "mpicc -DHPML_USE_MPI");
        return NULL;
#endif
    }
    hpml_ctx_fail(ctx, HPML_ERR_ARGUMENT, "comm: there is no transport %d", (int)d->transport);
    return NULL;
}

/* Returns whether t, a transport of the caller's own, has all required functions; if not, the error is on ctx. */
HPMLC_FN bool hpmlc_custom_good(hpml_ctx *ctx, const hpml_transport *t)
{
    const char *missing = NULL;
    if (!t->abandon) missing = "abandon";
    if (!t->test) missing = "test";
    if (!t->start) missing = "start";
    if (!t->split) missing = "split";
    if (!t->name) missing = "name";
    if (missing)
        hpml_ctx_fail(ctx, HPML_ERR_ARGUMENT, "comm: transport \"%s\" has no .%s; .name, .split, .start, .test and "
                      ".abandon are required", t->name ? t->name : "", missing);
    else if (t->schedule)
        hpml_ctx_fail(ctx, HPML_ERR_ARGUMENT, "comm: transport \"%s\" has a .schedule, which is private; leave it NULL",
                      t->name);
    return !missing && !t->schedule;
}

/* Allocates a communicator on ctx and connects it by transport t, which may set rank and ranks of d; NULL: an error. */
HPMLC_FN hpml_comm *hpmlc_comm_open(hpml_ctx *ctx, const hpml_transport *t, hpml_comm_desc *d)
{
    if (t->locate && t->locate(ctx, d) != HPML_OK) return NULL;
    if (d->custom && (d->rank < 0 || d->rank >= d->ranks || d->ranks_per_node < 0)) {
        hpml_ctx_fail(ctx, HPML_ERR_ARGUMENT, "comm: transport \"%s\": rank %d of %d, %d ranks per node; .ranks above "
                      "0 and .rank from 0 to .ranks - 1 were expected", t->name, d->rank, d->ranks, d->ranks_per_node);
        return NULL;
    }
    hpml_comm *c = hpmlc_comm_new(ctx, t, d->rank, d->ranks);
    if (!c) {
        if (t->absent) t->absent(ctx, d);
        return NULL;
    }
    c->t       = t;
    c->state   = d->custom_user;
    c->survive = d->survive;
    if (d->timeout != 0) c->timeout = d->timeout;
    for (int i = 0; i < c->size && d->custom && d->ranks_per_node > 0; i++) c->node[i] = i / d->ranks_per_node;
    if (!t->open || t->open(c, d) == HPML_OK) return c;
    c->t = NULL;
    return NULL;
}

HPML_API hpml_comm *hpml_comm_create(hpml_ctx *ctx, const hpml_comm_desc *desc)
{
    if (!ctx) return NULL;
    if (!desc || desc->_begin || desc->_end) {
        hpml_ctx_fail(ctx, HPML_ERR_ARGUMENT, "comm desc: %s", desc ? "canary is not zero; zero the struct before you "
                      "set fields" : "none given");
        return NULL;
    }
    hpml_comm_desc        d = *desc;
    const hpml_transport *t = d.custom;
    if (!t) t = hpmlc_transport_find(ctx, &d);
    else if (!hpmlc_custom_good(ctx, t)) return NULL;
    if (!t && d.world) hpmlc_world_absent(d.world, d.rank, hpml_ctx_error(ctx));
    hpml_comm *c = t ? hpmlc_comm_open(ctx, t, &d) : NULL;
    if (!c || hpml_ctx_status(ctx) != HPML_OK) return NULL;
    c->check = d.check;
    hpmlc_comm_layout(c);
    return c;
}

HPMLC_FN void hpmlc_background_stop(hpml_comm *c);
HPMLC_FN void hpmlc_background_drain(const hpml_comm *c);

HPMLC_FN void hpmlc_comm_destroy(void *object)
{
    hpml_comm *c = (hpml_comm *)object;
    if (!c->t) return;
    hpml_comm_set_link(c, NULL); /* frees the link; announces this rank's failure, if any */
    hpmlc_background_stop(c);
    bool good = hpml_ctx_status(c->ctx) == HPML_OK;
    if (c->t->close) c->t->close(c);
    if (good && hpml_ctx_status(c->ctx) != HPML_OK)
        hpmlc_refuse(&c->close_error, HPML_ERR_COMM, "%s", hpml_ctx_error(c->ctx));
    c->t = NULL;
}

HPML_API hpml_status hpml_comm_set_link(hpml_comm *c, const hpml_device_link *link)
{
    if (!c) return HPML_ERR_ARGUMENT;
    hpml_device_link old = c->link;
    hpmlc_failed(c); /* announces this rank's failure, if any, so that no rank or job waits for this one */
    if (old.across) hpmlc_background_drain(old.across);
    memset(&c->link, 0, sizeof c->link);
    if (link) c->link = *link;
    if (old.free) old.free(old.user);
    return hpml_ctx_status(c->ctx);
}

HPML_API void hpml_comm_free(hpml_comm *c) { hpml_ctx_release(hpml_comm_ctx(c), c); }

/* Creates on ctx the communicator of `count` ranks of c, in the order of `ranks`; this rank is one of them. color: a
   number that differs between the communicators that are made at the same time. NULL: an error. */
HPMLC_FN hpml_comm *hpmlc_part(hpml_comm *c, hpml_ctx *ctx, const int32_t *ranks, int count, int color)
{
    int me = 0;
    while (ranks[me] != c->rank) me++;
    hpml_comm *part = hpmlc_comm_new(ctx, c->t, me, count);
    if (!part) hpmlc_fail(c, HPML_ERR_MEMORY, "no memory for a communicator of %d ranks", count);
    if (hpml_barrier(c) != HPML_OK || !part) return NULL; /* all ranks fail if one lacks memory */
    for (int i = 0; i < count; i++) {
        part->origin[i] = c->origin[ranks[i]];
        part->node[i]   = c->node[ranks[i]];
        part->silent[i] = c->silent[ranks[i]];
    }
    part->key        = (c->key * 31 + c->sequence) * 31 + (uint64_t)color + 1;
    part->is_part    = true;
    part->timeout    = c->timeout;
    part->check      = c->check;
    part->survive    = c->survive;
    part->spin_limit = c->spin_limit;
    part->inside     = c->inside;
    part->between    = c->between;
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
    int32_t *ranks = all + 2 * p; /* `all` begins with color and key of each rank */
    all[2 * c->rank]     = color;
    all[2 * c->rank + 1] = key;
    if (hpml_allgather(c, all, 2 * p, HPML_ELEMENT_I32) == HPML_OK) {
        for (int i = 0; i < p; i++) { /* insertion sort by key: splits are rare */
            int at = count;
            if (all[2 * i] != color) continue;
            for (; at > 0 && all[2 * ranks[at - 1] + 1] > all[2 * i + 1]; at--) ranks[at] = ranks[at - 1];
            ranks[at] = i;
            count++;
        }
        if (color >= 0) part = hpmlc_part(c, c->ctx, ranks, count, color);
        else if (hpml_barrier(c) == HPML_OK && c->t->split) c->t->split(c, NULL, NULL, 0, color);
    }
    hpml_ctx_release(c->ctx, all);
    return part;
}

HPML_API hpml_comm *hpml_comm_split_node(hpml_comm *c)
{
    return c ? hpml_comm_split(c, c->node[c->rank], c->rank) : NULL;
}

// ---------------------------------------------------------------------------------------------------------------------
// >>launch   running a function on every rank
// ---------------------------------------------------------------------------------------------------------------------
HPMLC_FN bool hpmlc_plan_splits(const hpml_plan *p);
HPMLC_FN bool hpmlc_plan_defers(const hpml_plan *p);

typedef struct hpmlc_start { /* what hpml_launch gives to one rank, and what comes back */
    const hpml_launch_desc *d;
    hpml_comm_desc          comm;
    hpml_ctx_desc           ctx;
    hpml_rank_fn           *fn;
    void                   *user;
    hpml_status             status;
    bool                    hung; /* another rank has not answered until the deadline: MPI_Finalize would wait for it */
    char                    error[768];
} hpmlc_start;

/* Stores `text`, the error of rank `rank`, in s->error, after "rank N: " unless it begins so, because errors of layers
   and files do not name their rank. rank -1: the only rank, which needs no name. */
HPMLC_FN void hpmlc_start_error(hpmlc_start *s, int rank, const char *text)
{
    int n = rank < 0 || strncmp(text, "rank ", 5) == 0 ? 0 : snprintf(s->error, sizeof s->error, "rank %d: ", rank);
    snprintf(s->error + n, sizeof s->error - (size_t)n, "%s", text);
}

/* Returns whether hpml_comm_set_plan must be called: if desc d has a plan, or if the plan in the environment variable
   HPML_PLAN splits the model, or changes when trainers take their memory, or is wrong; hpml_comm_set_plan reports the
   error then. */
HPMLC_FN bool hpmlc_launch_plans(const hpml_launch_desc *d)
{
    const char *text = getenv("HPML_PLAN");
    HPMLC_ZERO(hpml_plan, plan);
    if (d->plan) return true;
    return text && (hpml_plan_parse(text, &plan, NULL, 0) != HPML_OK || hpmlc_plan_splits(&plan) ||
                    hpmlc_plan_defers(&plan));
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
    if (comm) {
        comm->close_error.text = s->error;
        comm->close_error.size = sizeof s->error;
    }
    if (comm && s->status == HPML_OK && hpmlc_launch_plans(s->d)) s->status = hpml_comm_set_plan(comm, s->d->plan);
    if (comm && s->status == HPML_OK) s->status = s->fn(comm, s->user);
    if (s->status != HPML_OK && ctx) { /* puts the error on the context, so that other ranks get it */
        if (hpml_ctx_status(ctx) == HPML_OK)
            hpml_ctx_fail(ctx, s->status, "the rank's function returned %s", hpml_status_string(s->status));
        hpmlc_start_error(s, comm && comm->size > 1 ? comm->rank : -1, hpml_ctx_error(ctx));
    }
    if (!ctx) hpmlc_start_error(s, s->comm.rank, "no memory for a context");
    for (int i = 0; comm && i < comm->size; i++) s->hung = s->hung || comm->silent[i];
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

/* Returns how many cores this machine has, at least 1. */
HPMLC_FN int hpmlc_cores_online(void)
{
#ifndef HPML_NO_THREADS
    return (int)hpmlc_max(sysconf(_SC_NPROCESSORS_ONLN), 1);
#else
    return 1;
#endif
}

/* Returns how many of the cores that this thread may use each of `ranks` ranks of this process has, at least 1. */
HPMLC_FN int hpmlc_cores(int ranks)
{
    int cores = hpmlc_cores_online();
#if defined(__linux__) && !defined(HPML_NO_THREADS)
    unsigned long bits[128 / sizeof(long)] = { 0 };
    int           count = 0;
    if (syscall(SYS_sched_getaffinity, 0L, sizeof bits, bits) > 0)
        for (size_t i = 0; i < sizeof bits / sizeof *bits; i++) count += __builtin_popcountl(bits[i]);
    if (count > 0) cores = count;
#endif
    return (int)hpmlc_max(cores / hpmlc_max(ranks, 1), 1);
}

/* Sets transport and ranks of d from a text such as "threads:4": the environment variable HPML_RUN or d->run, see
   hpml_launch_desc. Returns false if that text cannot be read. */
HPMLC_FN bool hpmlc_run_read(hpml_launch_desc *d)
{
    static const char *const kinds[] = { "threads", "mpi", "clock", "serial", "auto" }; /* 0 to 2: transports */
    const char *tasks = getenv("SLURM_NTASKS"), *run = getenv("HPML_RUN"); /* empty: as not set */
    if (run && *run && (d->run || (!d->transport && !d->ranks))) d->run = run;
    if (!d->run) return true;
    enum { MPI = 1, SERIAL = 3, AUTO = 4, KINDS = 5 };
    size_t length = strcspn(d->run, ":"), kind = 0;
    char  *end    = NULL;
    long   ranks  = d->run[length] ? strtol(d->run + length + 1, &end, 10) : 0;
    while (kind < KINDS && (strlen(kinds[kind]) != length || memcmp(d->run, kinds[kind], length) != 0)) kind++;
    if (kind == KINDS || (end && (kind == SERIAL || *end || ranks < 1 || ranks > 65536))) return false;
    if (kind == AUTO) kind = hpml_launched(NULL) > 1;
    if (ranks == 0 && kind == SERIAL) ranks = 1;
    if (ranks == 0 && kind != MPI) ranks = tasks && atoi(tasks) > 0 ? atoi(tasks) : hpmlc_cores(1);
    d->transport = kind == SERIAL ? HPML_TRANSPORT_THREADS : (hpml_transport_kind)kind;
    d->ranks     = (int32_t)ranks;
    return true;
}

/* Returns an error, its text in `to`, where d asks for threads in each of several processes of mpiexec, because these
   would be separate runs, unless d->alone or the environment variable HPML_RUN allows that. */
HPMLC_FN hpml_status hpmlc_launch_alone(const hpml_launch_desc *d, const hpmlc_text *to)
{
    const char *run       = getenv("HPML_RUN"), *kind = d->transport == HPML_TRANSPORT_CLOCK ? "clock" : "threads";
    int         processes = hpml_launched(NULL), ranks = d->ranks > 0 ? d->ranks : 1;
    bool        meant     = run && *run && strncmp(run, "auto", 4) != 0 && strncmp(run, "mpi", 3) != 0;
    if (processes < 2 || d->alone || meant) return HPML_OK;
    return hpmlc_refuse(to, HPML_ERR_ARGUMENT, "launch: \"%s:%d\" in each of the %d processes that mpiexec or srun has "
                        "started would be %d separate runs. For one run on all of them set .run to \"auto\" or "
                        "\"mpi\"; if separate runs are meant, set .alone, or HPML_RUN=%s:%d in the environment",
                        kind, ranks, processes, processes, kind, ranks);
}

/* Returns the status of the lowest rank that failed, of the n ranks whose results are in s, and writes its error text
   to `to`; HPML_OK if none failed. Passes over HPML_ERR_PEER, which only reports that another rank failed, where there
   is another error. */
HPMLC_FN hpml_status hpmlc_first_cause(const hpmlc_start *s, int n, const hpmlc_text *to)
{
    const hpmlc_start *worst = NULL;
    for (int i = 0; i < n; i++) {
        bool nearer = !worst || (worst->status == HPML_ERR_PEER && s[i].status != HPML_ERR_PEER);
        if (s[i].status != HPML_OK && nearer) worst = &s[i];
    }
    return hpmlc_refuse(to, worst ? worst->status : HPML_OK, "%s", worst ? worst->error : "");
}

/* With .survive: where some of the n ranks whose results are in s were successful, others failed, and none failed
   because another rank was lost, returns HPML_OK and writes to `to` how many ranks failed and the lowest failed
   rank's error. Else returns the status, and writes the error, that hpmlc_first_cause chooses. */
HPMLC_FN hpml_status hpmlc_survivors(const hpmlc_start *s, int n, const hpmlc_text *to)
{
    int  failed = 0;
    bool stopped = false;
    for (int i = 0; i < n; i++) {
        failed += s[i].status != HPML_OK;
        stopped = stopped || s[i].status == HPML_ERR_PEER;
    }
    hpml_status status = hpmlc_first_cause(s, n, to);
    if (failed == 0 || failed == n || stopped) return status;
    for (int i = n - 1; i >= 0; i--)
        if (s[i].status != HPML_OK) hpmlc_refuse(to, HPML_OK, "%d of %d ranks lost: %s", failed, n, s[i].error);
    return HPML_OK;
}

HPMLC_FN hpml_status hpmlc_launch_mpi(hpmlc_start *s, const hpmlc_text *to)
{
#ifdef HPML_USE_MPI
    int  rank    = 0;
    bool started = hpmlc_mpi_init(&rank);
    if (s->ctx.threads == 0) { /* mpiexec may have bound this process to cores of its own, or to none */
        int64_t share = hpmlc_cores_online() / hpmlc_max(hpml_launched(NULL), 1);
        s->ctx.threads = (int32_t)hpmlc_max(hpmlc_min(share, hpmlc_cores(1)), 1);
    }
    if (s->d->place) s->d->place(&s->ctx, rank, s->user);
    hpmlc_start_main(s);
    const bool finalizes = s->d->survive ? !s->hung : s->status == HPML_OK; /* else others may not call MPI_Finalize */
    if (started && finalizes) MPI_Finalize(); /* else exit ends the job */
#else
    hpmlc_start_main(s); /* fails: the error's text shows how to build with MPI */
#endif
    return hpmlc_first_cause(s, 1, to);
}

/* Runs `ranks` ranks of the transports THREADS or CLOCK, each in a thread of its own with one element of s, and waits
   for all. Returns the status of the rank that failed first, and writes its error text to `to`. */
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
    hpml_status status = HPML_ERR_MEMORY;
    if (w && threads) status = s->d->survive ? hpmlc_survivors(s, ranks, to) : hpmlc_first_cause(s, ranks, to);
    if (status == HPML_OK && w->failed) /* background work failed whose job was not waited for */
        status = hpmlc_refuse(to, HPML_ERR_COMM, "%s", w->text);
    hpml_world_free(w);
    free(threads);
    return status;
#else
    if (ranks > 1)
        return hpmlc_refuse(to, HPML_ERR_UNSUPPORTED, "launch: %d ranks need threads (HPML_NO_THREADS is set)", ranks);
    hpmlc_start_main(s);
    return hpmlc_first_cause(s, 1, to);
#endif
}

/* Sets transport and ranks of d from d->run, such as "threads:4". Returns an error, its text in `to`, where these or
   the network are out of range, or where each of several processes of mpiexec or srun would run threads of its own and
   neither d->alone nor HPML_RUN allows that. */
HPMLC_FN hpml_status hpmlc_launch_check(hpml_launch_desc *d, const hpmlc_text *to)
{
    if (d->_begin || d->_end || d->ranks < 0 || d->ranks > 65536 || (unsigned)d->transport > HPML_TRANSPORT_CLOCK)
        return hpmlc_refuse(to, HPML_ERR_ARGUMENT, "launch: %d ranks, transport %d: out of range, or a desc that is "
                            "not cleared", d->ranks, (int)d->transport);
    if (!hpmlc_run_read(d))
        return hpmlc_refuse(to, HPML_ERR_ARGUMENT, "launch: HPML_RUN or .run: \"%s\"; serial, threads[:N], "
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
    hpmlc_refuse(&to, refused, "%s", refused == HPML_OK ? "" : text);
    bool cleared = !d._begin && !d._end; /* else the desc was not zeroed: .log may be any address */
    if (refused != HPML_OK && cleared && d.ctx.log) d.ctx.log(refused, text, d.ctx.log_user);
    if (refused != HPML_OK) return refused;
    bool mpi   = d.transport == HPML_TRANSPORT_MPI;
    int  ranks = mpi ? 1 : d.ranks;
    hpmlc_start *s = (hpmlc_start *)calloc((size_t)ranks, sizeof *s);
    if (!s) return HPML_ERR_MEMORY;
    for (int i = 0; i < ranks; i++) {
        hpml_comm_desc *c = &s[i].comm;
        s[i].d            = &d;
        s[i].fn           = fn;
        s[i].user         = user;
        s[i].ctx          = d.ctx;
        c->transport      = d.transport;
        c->rank           = i;
        c->timeout        = d.timeout;
        c->check          = d.check;
        c->survive        = d.survive;
        c->ranks_per_node = d.network.ranks_per_node;
        if (mpi) continue; /* this process's rank is not known yet */
        if (s[i].ctx.threads == 0) s[i].ctx.threads = hpmlc_cores(ranks);
        if (d.place) d.place(&s[i].ctx, i, user);
    }
    hpml_status status = mpi ? hpmlc_launch_mpi(s, &to) : hpmlc_launch_threads(s, ranks, &to);
    free(s);
    return status;
}

// ---------------------------------------------------------------------------------------------------------------------
// >>timeline   one timeline for all ranks
// ---------------------------------------------------------------------------------------------------------------------
/* Returns the seconds by which this rank's clock is ahead of rank 0's. The rank asks rank 0 eight times for its time
   and takes the answer of the quickest exchange as given in the middle of that exchange, so the error is at most half
   of its duration. Rank 0 answers all ranks and returns 0. */
HPMLC_FN double hpmlc_clock_offset(hpml_comm *c)
{
    double best = 1e300, ahead = 0, theirs = 0;
    for (int r = 1; r < c->size; r++)
        for (int i = 0; i < 8 && (c->rank == 0 || c->rank == r); i++) {
            double start = hpml_comm_now(c), end;
            if (c->rank == 0) {
                hpml_recv(c, r, 0, &theirs, sizeof theirs);
                theirs = hpml_comm_now(c);
            }
            hpml_send(c, c->rank == 0 ? r : 0, 0, &theirs, sizeof theirs);
            if (c->rank > 0) hpml_recv(c, 0, 0, &theirs, sizeof theirs);
            end = hpml_comm_now(c);
            if (c->rank == 0 || end - start >= best) continue;
            best  = end - start;
            ahead = 0.5 * (start + end) - theirs;
        }
    return ahead;
}

HPML_API hpml_status hpml_comm_trace_start(hpml_comm *c, const hpml_trace_desc *desc)
{
    HPMLC_DESC(hpml_trace_desc, d, desc);
    if (hpmlc_failed(c)) return c ? hpml_ctx_status(c->ctx) : HPML_ERR_ARGUMENT;
    double ahead = hpmlc_clock_offset(c), origin = hpml_comm_now(c);
    if (hpml_broadcast(c, &origin, sizeof origin, 0) != HPML_OK) return hpml_ctx_status(c->ctx);
    d.rank   = c->rank;
    d.origin = origin + ahead;
    if (d.origin == 0) d.origin = 1e-12; /* a desc's origin of 0 means "now", but virtual time begins at 0 */
    return hpml_trace_start(c->ctx, &d);
}

/* Returns the content of file `path`, in memory of ctx, with a zero byte after it; *size: the bytes of the file. NULL:
   the file cannot be read. */
HPMLC_FN char *hpmlc_read_file(hpml_ctx *ctx, const char *path, int64_t *size)
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

HPMLC_FN hpml_status hpmlc_reduce_untraced(hpml_comm *c, void *data, int64_t n, hpml_element element);
/* Sets time 0 to the earliest event of all ranks, writes this rank's events to the file PATH.rankN and sends that to
   rank 0, which joins all ranks' lists in `path`. */
HPML_API hpml_status hpml_comm_trace_save(hpml_comm *c, const char *path)
{
    char    own[1024];
    int64_t size = 0;
    FILE   *f = NULL;
    if (hpmlc_failed(c)) return c ? hpml_ctx_status(c->ctx) : HPML_ERR_ARGUMENT;
    hpmlc_background_drain(c);
    double first = -hpml_trace_first(c->ctx);
    if (hpmlc_reduce_untraced(c, &first, 1, HPML_ELEMENT_F64) != HPML_OK) return hpml_ctx_status(c->ctx);
    hpml_trace_shift(c->ctx, -first);
    snprintf(own, sizeof own, "%s.rank%d", path, c->rank);
    if (hpml_trace_save(c->ctx, own) != HPML_OK) return hpmlc_failure(c);
    char *text = hpmlc_read_file(c->ctx, own, &size);
    remove(own);
    if (!text || size < 5) return hpmlc_fail(c, HPML_ERR_READ, "trace \"%s\": cannot be read back", own);
    if (c->rank > 0) {
        hpml_status status = hpml_send(c, 0, 1, &size, sizeof size);
        if (status == HPML_OK) status = hpml_send(c, 0, 1, text, (size_t)size);
        hpml_ctx_release(c->ctx, text);
        return status;
    }
    f = fopen(path, "wb");
    bool good = f && fwrite(text, 1, (size_t)size - 3, f) == (size_t)size - 3; /* without "\n]\n" */
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

// =====================================================================================================================
// PART II   ADD UP: collectives, codecs on the wire
// =====================================================================================================================

// ---------------------------------------------------------------------------------------------------------------------
// >>moves   the allreduce algorithms: phases, one table of algorithms, the phases of a rank
// ---------------------------------------------------------------------------------------------------------------------
/* An allreduce algorithm is a list of phases. A team of ranks runs a phase on a range of the array: a team is every
   stride-th rank from `base`, and member i owns block i of the range, one of equal blocks for all members. The move
   function of a phase kind sets what one member sends and receives in round k. Collectives execute these moves, tests
   count them, users draw them with hpml_allreduce_move and the simulator times them. To add an algorithm, add a name to
   the enum hpml_algorithm, a row to hpmlc_algorithms and, if it has new phase kinds, their move function. */

typedef struct hpmlc_phase hpmlc_phase;

typedef enum hpmlc_sums {
    HPMLC_SUMS_NONE,    /* the phase copies elements and adds none */
    HPMLC_SUMS_PARTIAL, /* the phase adds, and afterwards no element's sum over the team is complete */
    HPMLC_SUMS_BLOCK,   /* afterwards member i of the team has the sum of block i of the range */
    HPMLC_SUMS_ALL,     /* afterwards every member of the team has the sum of the whole range */
    HPMLC_SUMS_ROOT     /* afterwards member 0 of the team has the sum of the whole range */
} hpmlc_sums;

typedef struct hpmlc_kind {
    int (*rounds)(int size); /* returns the number of rounds in a team of `size` members */
    void (*move)(const hpmlc_phase *f, int k, hpml_move *m); /* sets the move of member f->team.me in round k */
    hpmlc_sums sums;
    bool       core;      /* needs a team of 2^k members: of a larger team the first 2^k members run the phase */
    bool       one_round; /* member i > 0 takes part in round i - 1 only: the simulator skips its other rounds */
} hpmlc_kind;

typedef struct hpmlc_team {
    int base, stride, size, me, root; /* member i is rank base + (i + root) % size * stride; this rank is member `me` */
} hpmlc_team;

struct hpmlc_phase {
    const hpmlc_kind *kind;
    hpmlc_team        team;
    int64_t           at, count; /* range of the phase: elements [at, at + count) of the array */
    int               rounds;
    const char       *level;     /* span on the timeline, such as "local reduce"; NULL: none */
};

#define HPMLC_PHASES 8
typedef struct hpmlc_phases {
    hpmlc_phase phase[HPMLC_PHASES];
    int         count;
    const char *level; /* hpmlc_phase.level of the phases that are appended next */
} hpmlc_phases;

HPML_API int64_t hpml_block(int64_t n, int parts, int index)
{
    return parts > 0 ? n / parts * index + n % parts * index / parts : 0;
}

HPMLC_FN int hpmlc_log2(int n) { return 31 - __builtin_clz((unsigned)n | 1); } /* log2 of n, rounded down */

HPMLC_FN bool hpmlc_adds(const hpmlc_kind *kind) { return kind->sums != HPMLC_SUMS_NONE; }

/* Returns the team of all p ranks, whose member 0 is rank `root`, as rank `rank` has it. */
HPMLC_FN hpmlc_team hpmlc_everyone(int p, int rank, int root)
{
    const hpmlc_team all = { 0, 1, p, (rank - root + p) % p, root };
    return all;
}

HPMLC_FN int hpmlc_member(const hpmlc_team *t, int i) { return t->base + (i + t->root) % t->size * t->stride; }

/* Return the number of rounds of a phase in a team of `size` ranks: hpmlc_rounds_others: one for each other rank;
   _down, _up: log2 of `size`, rounded down, up; _fold: up minus down, which is 1 unless `size` is a power of two. */
HPMLC_FN int hpmlc_rounds_others(int size) { return size - 1; }
HPMLC_FN int hpmlc_rounds_down(int size) { return hpmlc_log2(size); }
HPMLC_FN int hpmlc_rounds_up(int size) { return hpmlc_log2(size) + (size > 1 << hpmlc_log2(size)); }
HPMLC_FN int hpmlc_rounds_fold(int size) { return hpmlc_rounds_up(size) - hpmlc_rounds_down(size); }

/* Sets what move m sends to member `to`: blocks `first` to `end` - 1 of the range of phase f, which is cut into one
   block for each member of the team. */
HPMLC_FN void hpmlc_set_send(const hpmlc_phase *f, hpml_move *m, int to, int first, int end)
{
    m->to         = hpmlc_member(&f->team, to);
    m->send_at    = f->at + hpml_block(f->count, f->team.size, first);
    m->send_count = f->at + hpml_block(f->count, f->team.size, end) - m->send_at;
}

/* Sets what move m receives from member `from`: blocks as in hpmlc_set_send, which are added where phase f adds. */
HPMLC_FN void hpmlc_set_receive(const hpmlc_phase *f, hpml_move *m, int from, int first, int end)
{
    m->from          = hpmlc_member(&f->team, from);
    m->receive_at    = f->at + hpml_block(f->count, f->team.size, first);
    m->receive_count = f->at + hpml_block(f->count, f->team.size, end) - m->receive_at;
    m->add           = hpmlc_adds(f->kind);
}

/* Sets move m of this rank, which must be member `child` or member `parent` of the team of phase f: where the phase
   adds, the child sends the whole range and the parent adds it; else the parent sends the range to the child. */
HPMLC_FN void hpmlc_set_parent_child(const hpmlc_phase *f, hpml_move *m, int child, int parent)
{
    int p = f->team.size, other = f->team.me == child ? parent : child;
    if ((f->team.me == child) == hpmlc_adds(f->kind)) hpmlc_set_send(f, m, other, 0, p);
    else hpmlc_set_receive(f, m, other, 0, p);
}

/* Sets the move of round k in a ring: each member sends to the next one and receives from the one before. First
   reduce-scatter: every block goes round once and collects the members' contributions; then allgather: every sum goes
   round once. With 4 ranks and blocks a, b, c, d, where c30 is the sum of block c of ranks 3 and 0, are sent:

                     0 to 1   1 to 2   2 to 3   3 to 0
     reduce-scatter    d0       a1       b2       c3
                       c30      d01      a12      b23
                       b230     c301     d012     a123     then rank 0 adds a0 and has the sum a, rank 1 has b ...
     allgather         a        b        c        d
                       d        a        b        c
                       c        d        a        b

   The moves are those of this loop: block i of x begins at at[i] and has n[i] floats; y has memory for one block:

     int next = (rank + 1) % p, before = (rank + p - 1) % p;
     for (int k = 0; k < p - 1; k++) {
         int sent = (rank + 2 * p - 1 - k) % p, got = (sent + p - 1) % p;
         hpml_sendrecv(c, next, x + at[sent], n[sent] * sizeof *x, before, y, n[got] * sizeof *x, 0);
         for (size_t i = 0; i < n[got]; i++) x[at[got] + i] += y[i];
     }
     for (int k = 0; k < p - 1; k++) {
         int sent = (rank + p - k) % p, got = (sent + p - 1) % p;
         hpml_sendrecv(c, next, x + at[sent], n[sent] * sizeof *x, before, x + at[got], n[got] * sizeof *x, 0);
     }

   Reduce-scatter begins one block earlier than allgather, so that each rank ends with the sum of its own block. */
HPMLC_FN void hpmlc_ring_move(const hpmlc_phase *f, int k, hpml_move *m)
{
    int p = f->team.size, i = f->team.me, first = hpmlc_adds(f->kind) ? i + 2 * p - 1 : i + 2 * p;
    int sent = (first - k) % p, got = (sent + p - 1) % p;
    hpmlc_set_send(f, m, (i + 1) % p, sent, sent + 1);
    hpmlc_set_receive(f, m, (i + p - 1) % p, got, got + 1);
}
static const hpmlc_kind hpmlc_ring_scatter = { hpmlc_rounds_others, hpmlc_ring_move, HPMLC_SUMS_BLOCK, false, false };
static const hpmlc_kind hpmlc_ring_gather  = { hpmlc_rounds_others, hpmlc_ring_move, HPMLC_SUMS_NONE, false, false };

/* Sets the move of round k in recursive doubling, a phase that adds: two members of the team whose numbers differ in
   bit k alone send each other the whole range, and each adds what it receives. */
HPMLC_FN void hpmlc_doubling_move(const hpmlc_phase *f, int k, hpml_move *m)
{
    hpmlc_set_send(f, m, f->team.me ^ 1 << k, 0, f->team.size);
    hpmlc_set_receive(f, m, f->team.me ^ 1 << k, 0, f->team.size);
}
static const hpmlc_kind hpmlc_doubling = { hpmlc_rounds_down, hpmlc_doubling_move, HPMLC_SUMS_ALL, true, false };

/* Sets the move of round k in recursive halving by p members: where phase f adds, member i works on p / 2^k blocks with
   block i among them, sends one half of these to the member p / 2^(k + 1) away and keeps the half with block i. In a
   phase that copies, the same blocks are sent back in the opposite order of rounds. */
HPMLC_FN void hpmlc_halving_move(const hpmlc_phase *f, int k, hpml_move *m)
{
    bool adds = hpmlc_adds(f->kind);
    int  half = f->team.size >> (adds ? k + 1 : f->rounds - k), other = f->team.me ^ half;
    int  my_half = f->team.me / half * half, other_half = other / half * half; /* the first block of each half */
    int  sent = adds ? other_half : my_half;
    int  got = adds ? my_half : other_half;
    hpmlc_set_send(f, m, other, sent, sent + half);
    hpmlc_set_receive(f, m, other, got, got + half);
}
static const hpmlc_kind hpmlc_halve  = { hpmlc_rounds_down, hpmlc_halving_move, HPMLC_SUMS_BLOCK, true, false };
static const hpmlc_kind hpmlc_double = { hpmlc_rounds_down, hpmlc_halving_move, HPMLC_SUMS_NONE, true, false };

/* Sets the move of the one round that folds a team to its first q members, q the largest power of two that is at most
   the team's size: where phase f adds, each member i >= q sends the phase's range of elements to member i - q, which
   adds the range to its own; where f copies (unfolding), member i - q sends the range back to member i. */
HPMLC_FN void hpmlc_fold_move(const hpmlc_phase *f, int k HPMLC_UNUSED, hpml_move *m)
{
    int p = f->team.size, i = f->team.me, full = 1 << hpmlc_log2(p);
    if (i < p - full || i >= full) hpmlc_set_parent_child(f, m, i % full + full, i % full);
}
static const hpmlc_kind hpmlc_fold   = { hpmlc_rounds_fold, hpmlc_fold_move, HPMLC_SUMS_PARTIAL, false, false };
static const hpmlc_kind hpmlc_unfold = { hpmlc_rounds_fold, hpmlc_fold_move, HPMLC_SUMS_NONE, false, false };

/* Sets the move of round k in a binomial tree: where the phase adds (the way up), a member whose lowest set bit is bit
   k sends its range to the member without that bit. On the way down directions and order of rounds are the opposite. */
HPMLC_FN void hpmlc_tree_move(const hpmlc_phase *f, int k, hpml_move *m)
{
    int i = f->team.me, step = 1 << (hpmlc_adds(f->kind) ? k : f->rounds - 1 - k);
    if (i % step == 0 && (i | step) < f->team.size) hpmlc_set_parent_child(f, m, i | step, i & ~step);
}
static const hpmlc_kind hpmlc_tree_up   = { hpmlc_rounds_up, hpmlc_tree_move, HPMLC_SUMS_ROOT, false, false };
static const hpmlc_kind hpmlc_tree_down = { hpmlc_rounds_up, hpmlc_tree_move, HPMLC_SUMS_NONE, false, false };

/* Sets the move of round k in a star: where the phase adds, member k + 1 sends to member 0, else 0 to k + 1. */
HPMLC_FN void hpmlc_star_move(const hpmlc_phase *f, int k, hpml_move *m)
{
    if (f->team.me == 0 || f->team.me == k + 1) hpmlc_set_parent_child(f, m, k + 1, 0);
}
static const hpmlc_kind hpmlc_star_up   = { hpmlc_rounds_others, hpmlc_star_move, HPMLC_SUMS_ROOT, false, true };
static const hpmlc_kind hpmlc_star_down = { hpmlc_rounds_others, hpmlc_star_move, HPMLC_SUMS_NONE, false, true };

/* Sets the move of round k in a pairwise exchange: each member sends a block to the member k + 1 places after it and
   receives a block from the member k + 1 places before it. Where the phase adds, a message holds the block that its
   receiver sums up, else the block that its sender has. */
HPMLC_FN void hpmlc_pairs_move(const hpmlc_phase *f, int k, hpml_move *m)
{
    bool adds = hpmlc_adds(f->kind);
    int  p = f->team.size, i = f->team.me, to = (i + k + 1) % p, from = (i + p - k - 1) % p;
    int  sent = adds ? to : i;
    int  got = adds ? i : from;
    hpmlc_set_send(f, m, to, sent, sent + 1);
    hpmlc_set_receive(f, m, from, got, got + 1);
}
static const hpmlc_kind hpmlc_pairs_add  = { hpmlc_rounds_others, hpmlc_pairs_move, HPMLC_SUMS_BLOCK, false, false };
static const hpmlc_kind hpmlc_pairs_copy = { hpmlc_rounds_others, hpmlc_pairs_move, HPMLC_SUMS_NONE, false, false };

HPMLC_FN void hpmlc_move_of(const hpmlc_phase *f, int k, hpml_move *m)
{
    memset(m, 0, sizeof *m);
    m->to = m->from = -1;
    f->kind->move(f, k, m);
}

/* Appends a phase on elements [at, at + count), unless it has no rounds or this rank, `team.me`, is not in the team. */
HPMLC_FN void hpmlc_phases_add(hpmlc_phases *all, const hpmlc_kind *kind, hpmlc_team team, int64_t at, int64_t count)
{
    if (kind->core) team.size = 1 << hpmlc_log2(team.size);
    int rounds = kind->rounds(team.size);
    if (rounds == 0 || team.me < 0 || team.me >= team.size) return;
    hpmlc_phase *f = &all->phase[all->count++];
    f->kind   = kind;
    f->team   = team;
    f->at     = at;
    f->count  = count;
    f->rounds = rounds;
    f->level  = all->level;
}

#define HPMLC_ROW_PHASES 5
typedef struct hpmlc_algorithm {
    hpml_algorithm    algorithm;
    const char       *name;
    const hpmlc_kind *phase[HPMLC_ROW_PHASES]; /* run in this order by all ranks as one team; the last is NULL */
    /* Optional: appends the phases for several nodes with several ranks each; else all ranks run `phase`. */
    void (*by_nodes)(hpmlc_phases *all, int p, int per_node, bool spread, int rank, int64_t n);
    bool              native;     /* the transport executes the algorithm; `phase` then only estimates its bytes */
    int32_t           auto_ranks; /* AUTO simulates the algorithm for at most so many ranks; 0: never */
    int32_t           auto_mixed; /* as auto_ranks, where ranks r and r + 1 are on different nodes */
    /* Optional: seconds that an allreduce of `bytes` takes on a real transport beyond its simulated time. HPML_AUTO,
       the automatic choice of an algorithm, adds them to the algorithm's forecast. */
    double (*extra_s)(const hpml_comm *c, double bytes);
} hpmlc_algorithm;

HPMLC_FN const hpmlc_algorithm *hpmlc_algorithm_row(hpml_algorithm a);

/* Appends the phases of algorithm `row` to `all`: an allreduce of elements [at, at + count) within one team. */
HPMLC_FN void hpmlc_phases_team(hpmlc_phases *all, const hpmlc_algorithm *row, hpmlc_team team, int64_t at,
                                int64_t count)
{
    for (const hpmlc_kind *const *kind = row->phase; *kind; kind++) hpmlc_phases_add(all, *kind, team, at, count);
}

/* Plans HPML_HIERARCHICAL for rank `rank` of p, per_node ranks on each node (spread: rank r is on node r % nodes): a
   ring inside the node leaves each member the sum of one block of the n elements; members with the same place on all
   nodes add up that block by halving, or by a ring; a ring inside the node spreads the blocks. Where nodes differ in
   size: a tree to the first rank of each node, a ring among those ranks, a tree back. */
HPMLC_FN void hpmlc_phases_hierarchy(hpmlc_phases *all, int p, int per_node, bool spread, int rank, int64_t n)
{
    int nodes = (p + per_node - 1) / per_node, last = p - (nodes - 1) * per_node;
    int node = spread ? rank % nodes : rank / per_node, place = spread ? rank / nodes : rank % per_node;
    all->level = "local reduce";
    if (p % per_node == 0) {
        const hpmlc_team in = { spread ? node : rank - place, spread ? nodes : 1, per_node, place, 0 };
        const hpmlc_team across = { rank - node * (spread ? 1 : per_node), spread ? 1 : per_node, nodes, node, 0 };
        int64_t at = hpml_block(n, per_node, place), end = hpml_block(n, per_node, place + 1);
        bool    folds = (nodes & (nodes - 1)) != 0; /* no power of two: two more messages send the range */
        hpmlc_phases_add(all, &hpmlc_ring_scatter, in, 0, n);
        all->level = "global allreduce";
        hpml_algorithm between = folds && nodes <= 32 ? HPML_RING : HPML_HALVING;
        hpmlc_phases_team(all, hpmlc_algorithm_row(between), across, at, end - at);
        all->level = "local gather";
        hpmlc_phases_add(all, &hpmlc_ring_gather, in, 0, n);
        return;
    }
    const hpmlc_team in = { rank - place, 1, node == nodes - 1 ? last : per_node, place, 0 };
    const hpmlc_team across = { 0, per_node, nodes, node, 0 };
    hpmlc_phases_add(all, &hpmlc_tree_up, in, 0, n);
    all->level = "global allreduce";
    if (place == 0) hpmlc_phases_team(all, hpmlc_algorithm_row(HPML_RING), across, 0, n);
    all->level = "local gather";
    hpmlc_phases_add(all, &hpmlc_tree_down, in, 0, n);
}

/* These functions return the seconds that AUTO adds to the simulated time of an algorithm: BUTTERFLY copies the array
   in each round, at 1e-10 s a byte, because a rank adds to the array while it sends the array; HALVING between two
   threads saves the latency of a round, because the receiver writes sums to the sender's array, too (hpmlc_returns);
   CENTRAL's rank 0 starts 2 (p - 1) messages in turn. */
HPMLC_FN double hpmlc_butterfly_extra(const hpml_comm *c, double bytes) { return hpmlc_log2(c->size) * bytes * 1e-10; }
HPMLC_FN double hpmlc_halving_extra(const hpml_comm *c, double bytes HPMLC_UNUSED)
{
    return c->size == 2 && hpmlc_shares_arrays(c) ? -c->between.latency : 0;
}
HPMLC_FN double hpmlc_central_extra(const hpml_comm *c, double bytes HPMLC_UNUSED)
{
    return 2 * (c->size - 1) * c->t->alpha;
}

#define HPMLC_MAX_RANKS 65536 /* the largest number of ranks that the simulator accepts */
/* The allreduce algorithms, in the order in which AUTO tries them: of equally fast ones AUTO takes the first. The rows
   of AUTO and NATIVE have the phases of a ring, because their bytes are estimated as a ring's. */
static const hpmlc_algorithm hpmlc_algorithms[] = {
    { HPML_BUTTERFLY, "butterfly", { &hpmlc_fold, &hpmlc_doubling, &hpmlc_unfold, NULL }, NULL, false,
      HPMLC_MAX_RANKS, HPMLC_MAX_RANKS, hpmlc_butterfly_extra },
    { HPML_HALVING, "halving", { &hpmlc_fold, &hpmlc_halve, &hpmlc_double, &hpmlc_unfold, NULL }, NULL, false,
      HPMLC_MAX_RANKS, HPMLC_MAX_RANKS, hpmlc_halving_extra },
    { HPML_RING, "ring", { &hpmlc_ring_scatter, &hpmlc_ring_gather, NULL }, NULL, false,
      HPMLC_MAX_RANKS, 256, NULL }, /* auto_mixed 256: a simulation then plays p^2 messages */
    { HPML_HIERARCHICAL, "hierarchical", { &hpmlc_ring_scatter, &hpmlc_ring_gather, NULL }, hpmlc_phases_hierarchy,
      false, HPMLC_MAX_RANKS, HPMLC_MAX_RANKS, NULL },
    { HPML_TREE, "tree", { &hpmlc_tree_up, &hpmlc_tree_down, NULL }, NULL, false,
      HPMLC_MAX_RANKS, HPMLC_MAX_RANKS, NULL },
    { HPML_CENTRAL, "central", { &hpmlc_star_up, &hpmlc_star_down, NULL }, NULL, false,
      HPMLC_MAX_RANKS, HPMLC_MAX_RANKS, hpmlc_central_extra },
    { HPML_PAIRWISE, "pairwise", { &hpmlc_pairs_add, &hpmlc_pairs_copy, NULL }, NULL, false, 0, 0, NULL },
    { HPML_NATIVE, "native", { &hpmlc_ring_scatter, &hpmlc_ring_gather, NULL }, NULL, true, 0, 0, NULL },
    { HPML_AUTO, "auto", { &hpmlc_ring_scatter, &hpmlc_ring_gather, NULL }, NULL, false, 0, 0, NULL },
};
#define HPMLC_ALGORITHM_ROWS ((int)(sizeof hpmlc_algorithms / sizeof hpmlc_algorithms[0]))
typedef char hpmlc_every_algorithm_has_a_row[HPMLC_ALGORITHM_ROWS == HPML_ALGORITHM_COUNT ? 1 : -1];

/* Returns the row of algorithm a in hpmlc_algorithms, the table of the algorithms and their phases; NULL: none. */
HPMLC_FN const hpmlc_algorithm *hpmlc_algorithm_row(hpml_algorithm a)
{
    for (int i = 0; i < HPMLC_ALGORITHM_ROWS; i++)
        if (hpmlc_algorithms[i].algorithm == a) return &hpmlc_algorithms[i];
    return NULL;
}

HPML_API const char *hpml_algorithm_name(hpml_algorithm a)
{
    const hpmlc_algorithm *row = hpmlc_algorithm_row(a);
    return row ? row->name : "unknown";
}

HPML_API hpml_algorithm hpml_algorithm_find(const char *name)
{
    for (int i = 0; name && i < HPMLC_ALGORITHM_ROWS; i++)
        if (strcmp(name, hpmlc_algorithms[i].name) == 0) return hpmlc_algorithms[i].algorithm;
    return HPML_ALGORITHM_NONE;
}

/* Plans an allreduce of n elements by algorithm `a`: sets *all to the phases that rank `rank` of p ranks executes, with
   per_node ranks on each node (spread: rank r is on node r % nodes). For an unknown algorithm there are no phases. */
HPMLC_FN void hpmlc_phases_make(hpmlc_phases *all, hpml_algorithm a, int p, int per_node, bool spread, int rank,
                                int64_t n)
{
    const hpmlc_algorithm *row = hpmlc_algorithm_row(a);
    all->count = 0;
    all->level = NULL;
    if (row && row->by_nodes && per_node > 0 && per_node < p) row->by_nodes(all, p, per_node, spread, rank, n);
    else if (row) hpmlc_phases_team(all, row, hpmlc_everyone(p, rank, 0), 0, n);
}

/* Plans one phase of `kind`, which all p ranks run as one team, with rank `root` as member 0, on elements [0, n). */
HPMLC_FN void hpmlc_phases_single(hpmlc_phases *all, const hpmlc_kind *kind, int p, int rank, int root, int64_t n)
{
    all->count = 0;
    all->level = NULL;
    hpmlc_phases_add(all, kind, hpmlc_everyone(p, rank, root), 0, n);
}

HPML_API bool hpml_allreduce_move(hpml_algorithm a, int p, int ranks_per_node, int rank, int64_t n, int round,
                                  hpml_move *out)
{
    hpmlc_phases all;
    if (rank < 0 || rank >= p || round < 0) return false;
    hpmlc_phases_make(&all, a, p, ranks_per_node, false, rank, n);
    for (int i = 0; i < all.count; round -= all.phase[i++].rounds) {
        if (round >= all.phase[i].rounds) continue;
        hpmlc_move_of(&all.phase[i], round, out);
        return true;
    }
    return false;
}

// ---------------------------------------------------------------------------------------------------------------------
// >>reduce   adding up elements; the mean
// ---------------------------------------------------------------------------------------------------------------------
/* Defines hpmlc_NAME(into, from, bytes), which sets each element of `into` to `expression`, for example the sum, of a
   from `into` and b from `from`. type: of elements; read, write: convert an element to and from `wide`, the type of a
   and b. Loops of 16 elements of arrays that do not overlap let any compiler use vectors at -O2. */
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

HPMLC_FN uint16_t hpmlc_to_bf16(float x) /* rounds x to the nearest bf16, ties to even */
{
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return (uint16_t)(x != x ? u >> 16 | 64 : (u + 0x7fff + (u >> 16 & 1)) >> 16);
}

#define HPMLC_SAME(x) (x)
HPMLC_REDUCE(sum_f32, float, float, HPMLC_SAME, HPMLC_SAME, a + b)
HPMLC_REDUCE(sum_f64, double, double, HPMLC_SAME, HPMLC_SAME, a + b)
HPMLC_REDUCE(sum_bf16, uint16_t, float, hpmlc_from_bf16, hpmlc_to_bf16, a + b)
HPMLC_REDUCE(sum_i32, uint32_t, uint32_t, HPMLC_SAME, HPMLC_SAME, a + b) /* unsigned, because overflow then wraps */
HPMLC_REDUCE(sum_i64, uint64_t, uint64_t, HPMLC_SAME, HPMLC_SAME, a + b)
HPMLC_REDUCE(max_f32, float, float, HPMLC_SAME, HPMLC_SAME, a > b || a != a ? a : b)
HPMLC_REDUCE(max_f64, double, double, HPMLC_SAME, HPMLC_SAME, a > b || a != a ? a : b)
HPMLC_REDUCE(max_bf16, uint16_t, float, hpmlc_from_bf16, hpmlc_to_bf16, a > b || a != a ? a : b)
HPMLC_REDUCE(max_i32, int32_t, int32_t, HPMLC_SAME, HPMLC_SAME, a > b ? a : b)
HPMLC_REDUCE(max_i64, int64_t, int64_t, HPMLC_SAME, HPMLC_SAME, a > b ? a : b)

static const struct { size_t size; hpmlc_reduce_fn *sum, *max; } hpmlc_types[] = { /* indexed by hpml_element */
    { 4, hpmlc_sum_f32, hpmlc_max_f32 }, { 2, hpmlc_sum_bf16, hpmlc_max_bf16 }, { 4, hpmlc_sum_i32, hpmlc_max_i32 },
    { 8, hpmlc_sum_i64, hpmlc_max_i64 }, { 8, hpmlc_sum_f64, hpmlc_max_f64 }, { 1, NULL, NULL }
};

HPML_API size_t hpml_element_size(hpml_element e) { return (unsigned)e <= HPML_ELEMENT_BYTE ? hpmlc_types[e].size : 0; }

/* Returns the function that adds elements of type e or, for HPML_MAX, keeps the larger ones; NULL: there is none. */
HPMLC_FN hpmlc_reduce_fn *hpmlc_reducer(hpml_element e, hpml_reduce op)
{
    if ((unsigned)e > HPML_ELEMENT_BYTE || (unsigned)op > HPML_MAX) return NULL;
    return op == HPML_MAX ? hpmlc_types[e].max : hpmlc_types[e].sum;
}

/* Divides n floats x, sums over p ranks, by p: the same operation on the same bits on every rank. Where p is a power of
   two, x * (1 / p) has the same bits as x / p and is faster. Loops of 16 elements let compilers use vectors. */
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
// >>course   the moves, executed round by round
// ---------------------------------------------------------------------------------------------------------------------
/* Returns the scratch buffer of c, enlarged to at least `size` bytes (its contents are then lost). NULL: no memory. */
HPMLC_FN char *hpmlc_scratch(hpml_comm *c, size_t size)
{
    if (size <= c->scratch_size) return c->scratch;
    hpml_ctx_release(c->ctx, c->scratch);
    c->scratch      = (char *)hpml_ctx_alloc(c->ctx, size, NULL);
    c->scratch_size = c->scratch ? size : 0;
    return c->scratch;
}

/* For HPML_MEAN: divides the sums that phase i has completed on this rank, unless a later phase adds as well. */
HPMLC_FN void hpmlc_run_mean(const hpml_comm *c, const hpmlc_phases *all, int i, char *data, hpml_element e)
{
    const hpmlc_phase *f = &all->phase[i];
    const hpmlc_sums   sums  = f->kind->sums;
    const bool         block = sums == HPMLC_SUMS_BLOCK;
    const int          p = f->team.size, me = f->team.me;
    for (int k = i + 1; k < all->count; k++)
        if (hpmlc_adds(all->phase[k].kind)) return;
    if (!block && sums != HPMLC_SUMS_ALL && (sums != HPMLC_SUMS_ROOT || me > 0)) return;
    int first = block ? me : 0; /* blocks [first, end) are divided */
    int end   = block ? me + 1 : p;
    int64_t at = f->at + hpml_block(f->count, p, first), n = f->at + hpml_block(f->count, p, end) - at;
    hpmlc_divide(data + (size_t)at * hpml_element_size(e), n, e, c->size);
}

/* Returns whether in round k of phase i the receiver of numbers can return their sums to the sender at once: the
   transport gives the receiver the sender's own array, and this round, the last of halving, and the next, the first of
   doubling, are between the same two ranks. Then one message does the work of two. */
HPMLC_FN bool hpmlc_returns(const hpml_comm *c, const hpmlc_phases *all, int i, int k)
{
    const hpmlc_phase *f = &all->phase[i];
    return f->kind == &hpmlc_halve && k + 1 == f->rounds && i + 1 < all->count && f[1].kind == &hpmlc_double &&
           hpmlc_shares_arrays(c);
}

/* The phases that a rank executes, and the round that the rank has reached. The messages of this round are here and not
   in the function that waits for them, because another rank's thread that completes both messages while the rank sleeps
   begins the next round in the rank's place. */
struct hpmlc_course {
    const hpmlc_phases *all;
    char               *data;
    hpml_element        e;
    int                 op, tag;
    hpmlc_reduce_fn    *reduce;
    int                 phase, at;       /* the round: number `at` of all->phase[phase] */
    bool                sends, receives; /* the round has a message to, from another rank */
    bool                skips;           /* this round's sums came back with the round before */
    bool                is_begun;
    double              since;           /* hpml_comm_now() when the phases of the current level began */
    hpml_status         status;
    hpml_message        send, receive, *missing;
};

/* Begins the messages of the current round of c->course. */
HPMLC_FN void hpmlc_course_begin(hpml_comm *c)
{
    hpmlc_course *x    = c->course;
    const size_t  size = hpml_element_size(x->e);
    hpml_move     m;
    hpmlc_move_of(&x->all->phase[x->phase], x->at, &m);
    char  *sent = x->data + (size_t)m.send_at * size, *received = x->data + (size_t)m.receive_at * size;
    size_t sent_bytes = (size_t)m.send_count * size, received_bytes = (size_t)m.receive_count * size;
    x->is_begun = true;
    x->sends    = m.to >= 0 && !x->skips;
    x->receives = m.from >= 0 && !x->skips;
    if (m.to >= 0 || m.from >= 0) c->counters.rounds++;
    if (x->skips) hpmlc_count_send(c, m.to, sent_bytes); /* a skipped round is counted as sent, too */
    c->returns  = !x->skips && hpmlc_returns(c, x->all, x->phase, x->at);
    c->returned = x->e;
    c->divisor  = x->op == HPML_MEAN ? c->size : 0;
    if (x->sends && m.add && sent == received && sent_bytes > 0 && received_bytes > 0) {
        char *copy = hpmlc_scratch(c, sent_bytes); /* because the receive changes `sent` */
        if (copy) sent = (char *)memcpy(copy, sent, sent_bytes);
    }
    if (x->sends) hpmlc_arrow(c, false, m.to);
    if (x->receives)
        hpmlc_begin(c, true, m.from, x->tag, received, received_bytes, m.add ? x->reduce : NULL, &x->receive);
    if (x->sends) hpmlc_begin(c, false, m.to, x->tag, sent, sent_bytes, NULL, &x->send);
}

/* Ends the current round of c->course, whose messages are over; at the end of a phase divides sums for HPML_MEAN. */
HPMLC_FN void hpmlc_course_end(hpml_comm *c)
{
    hpmlc_course       *x = c->course;
    const hpmlc_phases *all = x->all;
    const hpmlc_phase  *f = &all->phase[x->phase];
    if (x->receives) hpmlc_arrow(c, true, x->receive.peer);
    if (x->sends) x->status = x->send.status;
    if (x->receives && x->receive.status != HPML_OK) x->status = x->receive.status;
    x->is_begun = false;
    x->skips    = c->returns;
    c->returns  = false;
    c->round++;
    if (x->status != HPML_OK || ++x->at < f->rounds) return;
    if (x->op == HPML_MEAN && !x->skips) hpmlc_run_mean(c, all, x->phase, x->data, x->e);
    x->at = 0;
    x->phase++;
    if (!f->level || (x->phase < all->count && f[1].level == f->level)) return;
    double end = hpml_comm_now(c);
    hpmlc_span(c, f->level, x->since, end, f->count * (int64_t)hpml_element_size(x->e));
    x->since = end;
}

/* Returns whether the send and the receive of the current round of c->course, if it has them, are done. */
HPMLC_FN bool hpmlc_course_over(const hpml_comm *c)
{
    const hpmlc_course *x = c->course;
    return (!x->receives || hpmlc_done(&x->receive)) && (!x->sends || hpmlc_done(&x->send));
}

/* Ends the current round of c->course, if one is begun, and begins the next one that has messages in flight. Returns
   false if there is none: the course is over, or has failed. */
HPMLC_FN bool hpmlc_course_next(hpml_comm *c)
{
    hpmlc_course *x = c->course;
    while (x->status == HPML_OK && (x->is_begun || x->phase < x->all->count)) {
        if (!x->is_begun) hpmlc_course_begin(c);
        if (!hpmlc_course_over(c)) return true;
        if (x->receives) hpmlc_unlist(c, &x->receive);
        hpmlc_course_end(c);
    }
    return false;
}

/* Returns a list of one message, for which c->course, the collective that c executes, waits: the receive of its round
   if that is not done, else the send. */
HPMLC_FN hpml_message *const *hpmlc_course_missing(const hpml_comm *c)
{
    hpmlc_course *x = c->course;
    x->missing = &x->send;
    if (x->receives && !hpmlc_done(&x->receive)) x->missing = &x->receive;
    return &x->missing;
}

/* Executes phases on `data`, elements of type e, with messages of this tag. op: an hpml_reduce; -1: adds nothing. */
HPMLC_FN hpml_status hpmlc_run(hpml_comm *c, const hpmlc_phases *all, char *data, hpml_element e, int op, int tag)
{
    HPMLC_ZERO(hpmlc_course, x);
    x.all    = all;
    x.data   = data;
    x.e      = e;
    x.op     = op;
    x.tag    = tag;
    x.reduce = op < 0 ? NULL : hpmlc_reducer(e, (hpml_reduce)op);
    x.since  = all->level ? hpml_comm_now(c) : 0;
    c->round  = 0;
    c->course = &x;
    while (hpmlc_course_next(c)) {
        hpmlc_help_others(c);
        if (x.receives) hpml_wait(c, &x.receive);
        if (x.sends) hpml_wait(c, &x.send); /* even after an error, because `send` is on the stack */
    }
    c->course  = NULL;
    c->returns = false;
    hpmlc_help_others(c);
    return x.status;
}

// ---------------------------------------------------------------------------------------------------------------------
// >>collectives   all ranks together: reductions, broadcasts, blocks; the choice of an algorithm
// ---------------------------------------------------------------------------------------------------------------------
/* Compares `mine`, in which each rank describes the collective that it has entered (for .check of hpml_comm_desc): rank
   0 receives the texts of all ranks, compares them and sends the verdict to all, which fail if two texts differ. */
HPMLC_FN hpml_status hpmlc_check(hpml_comm *c, const char mine[96], int tag)
{
    hpmlc_phases reply;
    char           theirs[96], verdict[256] = { 0 };
    hpml_status    status = HPML_OK;
    if (c->rank > 0) status = hpmlc_round(c, tag, 0, mine, sizeof theirs, -1, NULL, 0, NULL);
    for (int i = 1; c->rank == 0 && i < c->size && status == HPML_OK; i++) {
        status = hpmlc_round(c, tag, -1, NULL, 0, i, theirs, sizeof theirs, NULL);
        if (status == HPML_OK && strcmp(theirs, mine) != 0 && !verdict[0])
            snprintf(verdict, sizeof verdict, "collective %u differs: rank 0 is in %s, rank %d in %s", c->sequence,
                     mine, c->origin[i], theirs);
    }
    hpmlc_phases_single(&reply, &hpmlc_star_down, c->size, c->rank, 0, sizeof verdict);
    if (status == HPML_OK) status = hpmlc_run(c, &reply, verdict, HPML_ELEMENT_BYTE, -1, tag);
    if (status != HPML_OK) return status;
    return verdict[0] ? hpml_ctx_fail(c->ctx, HPML_ERR_COMM, "rank %d: %s", c->origin[c->rank], verdict) : HPML_OK;
}

/* Begins every collective: takes a new tag, keeps `name` for errors, and with .check fails unless all ranks pass the
   same name, n, element, op (-1: none), `detail` and `number` ("root", 3; NULL, -1: none). Returns the tag or -1. */
HPMLC_FN int hpmlc_enter(hpml_comm *c, const char *name, int64_t n, hpml_element element, int op, const char *detail,
                         int number)
{
    static const char *const elements[] = { "f32", "bf16", "i32", "i64", "f64", "bytes" }; /* indexed by hpml_element */
    static const char *const ops[]      = { "", ", sum", ", mean", ", max" }; /* indexed by op + 1; op -1: none */
    int tag;
    if (hpmlc_failed(c)) return -1;
    if (n < 0) return hpmlc_fail(c, HPML_ERR_ARGUMENT, "%s of %lld elements", name, (long long)n), -1;
    tag = HPMLC_TAG_COLLECTIVE + (int)(c->sequence++ % HPMLC_TAGS);
    c->operation = name;
    if (c->check && c->size > 1) {
        char words[96] = { 0 };
        int  used = snprintf(words, sizeof words, "%s of %lld %s%s%s%s", name, (long long)n, elements[element],
                             ops[op + 1], detail ? ", " : "", detail ? detail : "");
        if (detail && number >= 0) snprintf(words + used, sizeof words - (size_t)used, " %d", number);
        if (hpmlc_check(c, words, tag) != HPML_OK) return -1;
    }
    c->round = 0;
    c->bytes  = (int64_t)((uint64_t)n * hpml_element_size((hpml_element)element));
    c->in_collective = true;
    c->since  = hpml_comm_now(c);
    return tag;
}

/* Ends every collective: adds its seconds to the counters of c and its span to the timeline. Returns `status`. */
HPMLC_FN hpml_status hpmlc_leave(hpml_comm *c, hpml_status status)
{
    double end = hpml_comm_now(c);
    c->counters.seconds += end - c->since;
    c->in_collective = false;
    hpmlc_span(c, c->operation, c->since, end, c->bytes);
    return status;
}

/* Replaces most[i], for each i < n, by the largest most[i] of all ranks. name: the operation's name, for errors. */
HPMLC_FN hpml_status hpmlc_agree(hpml_comm *c, const char *name, int64_t *most, int64_t n)
{
    hpmlc_phases all;
    int            tag = hpmlc_enter(c, name, n, HPML_ELEMENT_I64, HPML_MAX, NULL, -1);
    if (tag < 0) return hpml_ctx_status(c->ctx);
    hpmlc_phases_make(&all, HPML_BUTTERFLY, c->size, 0, false, c->rank, n);
    return hpmlc_leave(c, hpmlc_run(c, &all, (char *)most, HPML_ELEMENT_I64, HPML_MAX, tag));
}

/* Runs a collective of one phase of `kind`, such as a tree or a ring, on n elements of type e in `data`, with all ranks
   as one team whose member 0 is rank `root`. op: an hpml_reduce; -1: the phase adds nothing. */
HPMLC_FN hpml_status hpmlc_phase_run(hpml_comm *c, const char *name, const hpmlc_kind *kind, void *data, int64_t n,
                                     hpml_element e, int op, int root)
{
    hpmlc_phases all;
    if (c && (root < 0 || root >= c->size || hpml_element_size(e) == 0 ||
              (op >= 0 && !hpmlc_reducer(e, (hpml_reduce)op))))
        return hpmlc_fail(c, HPML_ERR_ARGUMENT, "%s: root %d of %d ranks, element %d, op %d", name, root, c->size,
                          (int)e, op);
    bool rooted = kind == &hpmlc_tree_up || kind == &hpmlc_tree_down;
    int  tag    = hpmlc_enter(c, name, n, e, op, rooted ? "root" : NULL, root);
    if (tag < 0) return c ? hpml_ctx_status(c->ctx) : HPML_ERR_ARGUMENT;
    hpmlc_phases_single(&all, kind, c->size, c->rank, root, n);
    return hpmlc_leave(c, hpmlc_run(c, &all, (char *)data, e, op, tag));
}

HPML_API hpml_status hpml_reduce_scatter(hpml_comm *c, void *data, int64_t n, hpml_element e, hpml_reduce op)
{
    return hpmlc_phase_run(c, "reduce_scatter", &hpmlc_ring_scatter, data, n, e, (int)op, 0);
}

HPML_API hpml_status hpml_allgather(hpml_comm *c, void *data, int64_t n, hpml_element e)
{
    return hpmlc_phase_run(c, "allgather", &hpmlc_ring_gather, data, n, e, -1, 0);
}

HPML_API hpml_status hpml_broadcast(hpml_comm *c, void *data, size_t bytes, int root)
{
    return hpmlc_phase_run(c, "broadcast", &hpmlc_tree_down, data, (int64_t)bytes, HPML_ELEMENT_BYTE, -1, root);
}

HPML_API hpml_status hpml_reduce_to(hpml_comm *c, void *data, int64_t n, hpml_element e, hpml_reduce op, int root)
{
    return hpmlc_phase_run(c, "reduce", &hpmlc_tree_up, data, n, e, (int)op, root);
}

/* Rule of a collective that moves blocks of bytes: in round k = 1, 2, ... each rank sends a block to the rank k after
   it and receives a block from the rank k before it, unless a root alone sends or receives. In a barrier, whose blocks
   are empty, k doubles instead: after round k each rank has heard, directly or not, of the 2 k - 1 ranks before it. */
typedef struct hpmlc_block_rule {
    const char *name;
    bool        root_sends;    /* only the root sends: it has a block for each rank, other ranks have none to send */
    bool        root_receives; /* only the root receives: a block from each rank */
    bool        doubles;       /* the distance k doubles from round to round; else k grows by 1 */
} hpmlc_block_rule;

static const hpmlc_block_rule hpmlc_gather_rule     = { "gather", false, true, false };
static const hpmlc_block_rule hpmlc_scatter_rule    = { "scatter", true, false, false };
static const hpmlc_block_rule hpmlc_all_to_all_rule = { "all_to_all", false, false, false };
static const hpmlc_block_rule hpmlc_barrier_rule    = { "barrier", false, false, true };

/* Runs a collective by `rule` (gather, scatter, all to all, barrier), in which ranks send each other blocks of `bytes`
   each. sent: a block for each rank, one block where only the root receives; received: a block from each rank, one
   block where only the root sends; NULL: none. root: the only sender or receiver; -1: none. */
HPMLC_FN hpml_status hpmlc_blocks(hpml_comm *c, const hpmlc_block_rule *rule, const char *sent, char *received,
                                  size_t bytes, int root)
{
    bool rooted = rule->root_sends || rule->root_receives;
    if (c && rooted && (root < 0 || root >= c->size))
        return hpmlc_fail(c, HPML_ERR_ARGUMENT, "%s: root %d of %d ranks", rule->name, root, c->size);
    int tag = hpmlc_enter(c, rule->name, (int64_t)bytes, HPML_ELEMENT_BYTE, -1, rooted ? "root" : NULL, root);
    if (tag < 0) return c ? hpml_ctx_status(c->ctx) : HPML_ERR_ARGUMENT;
    size_t me = (size_t)c->rank;
    size_t sent_step = rule->root_receives ? 0 : bytes;
    size_t received_step = rule->root_sends ? 0 : bytes;
    if (received && sent && bytes > 0 && (!rooted || root == c->rank)) /* copies this rank's block for itself */
        memmove(received + me * received_step, sent + me * sent_step, bytes);
    hpml_status status = HPML_OK;
    for (int k = 1; k < c->size && status == HPML_OK; k += rule->doubles ? k : 1) {
        int         to = (c->rank + k) % c->size, from = (c->rank - k + c->size) % c->size;
        bool        sends    = (!rule->root_sends || c->rank == root) && (!rule->root_receives || to == root);
        bool        receives = (!rule->root_receives || c->rank == root) && (!rule->root_sends || from == root);
        const char *out = sent ? sent + (size_t)to * sent_step : NULL;
        char       *in  = received ? received + (size_t)from * received_step : NULL;
        c->round = k;
        status = hpmlc_round(c, tag, sends ? to : -1, out, bytes, receives ? from : -1, in, bytes, NULL);
    }
    return hpmlc_leave(c, status);
}

HPML_API hpml_status hpml_barrier(hpml_comm *c) { return hpmlc_blocks(c, &hpmlc_barrier_rule, NULL, NULL, 0, -1); }

HPML_API hpml_status hpml_gather(hpml_comm *c, const void *mine, size_t bytes, void *all, int root)
{
    return hpmlc_blocks(c, &hpmlc_gather_rule, (const char *)mine, (char *)all, bytes, root);
}

HPML_API hpml_status hpml_scatter(hpml_comm *c, const void *all, size_t bytes, void *mine, int root)
{
    return hpmlc_blocks(c, &hpmlc_scatter_rule, (const char *)all, (char *)mine, bytes, root);
}

HPML_API hpml_status hpml_all_to_all(hpml_comm *c, const void *sent, void *received, size_t bytes)
{
    return hpmlc_blocks(c, &hpmlc_all_to_all_rule, (const char *)sent, (char *)received, bytes, -1);
}

/* Returns the seconds of an allreduce of 2^k bytes by algorithm a; -1: no memory. The first call simulates it, because
   no formula covers messages that overlap between nodes, or numbers of ranks that are no power of two, and keeps the
   result in c->forecast. */
HPMLC_FN double hpmlc_forecast(hpml_comm *c, hpml_algorithm a, int k)
{
    double *kept = &c->forecast[k][a];
    if (*kept > 0) return *kept;
    HPMLC_ZERO(hpml_network, net);
    int p = c->size, known = 0, nodes = 0;
    for (int r = 0; r < p; r++) known = c->node[r] >= known ? c->node[r] + 1 : known;
    int32_t *node = (int32_t *)calloc((size_t)(p + known), sizeof *node); /* (p) new numbers; (known) new + 1, by old */
    for (int r = 0; node && r < p; r++) { /* numbers the nodes anew, because a part may lack some */
        int32_t *number = &node[p + c->node[r]];
        if (*number == 0) *number = ++nodes;
        node[r] = *number - 1;
    }
    net.node    = node;
    net.between = c->between;
    net.inside  = nodes > 1 ? c->inside : c->between;
    *kept       = node ? hpml_simulate_allreduce(a, p, &net, (int64_t)1 << k) : -1;
    free(node);
    return *kept;
}

/* Returns whether AUTO may choose the algorithm of `row` on c, by c's nodes, its number of ranks and row's limits. */
HPMLC_FN bool hpmlc_auto_considers(const hpml_comm *c, const hpmlc_algorithm *row)
{
    bool mixed = c->spread || c->per_node == 0; /* ranks r and r + 1 may be on different nodes */
    if (row->by_nodes && (c->per_node <= 1 || c->per_node >= c->size)) return false;
    return c->size <= (mixed ? row->auto_mixed : row->auto_ranks);
}

HPML_API hpml_algorithm hpml_comm_choose(hpml_comm *c, int64_t bytes)
{
    if (!c) return HPML_ALGORITHM_NONE;
    hpml_algorithm best = HPML_RING;
    double         least = 1e300, n = (double)bytes;
    int64_t        modelled = bytes < 64 ? 64 : bytes;
    int            k = hpmlc_log2(modelled >> 29 ? 1 << 29 : (int)modelled);
    for (int i = 0; i < HPMLC_ALGORITHM_ROWS && c->size > 1; i++) {
        const hpmlc_algorithm *row = &hpmlc_algorithms[i];
        if (!hpmlc_auto_considers(c, row)) continue;
        double low = hpmlc_forecast(c, row->algorithm, k), high = hpmlc_forecast(c, row->algorithm, k + 1);
        if (low < 0 || high < 0) return HPML_ALGORITHM_NONE;
        double seconds = low + (high - low) * (ldexp(n, -k) - 1);
        if (row->extra_s && !c->is_virtual) seconds += row->extra_s(c, n);
        if (seconds >= least) continue;
        least = seconds;
        best  = row->algorithm;
    }
    return best;
}

/* Replaces *a, where it is AUTO, by the algorithm that AUTO chooses for n elements of `size` bytes. Returns how many
   elements to add up at a time: n, or for AUTO in a large array hpml_transport.piece bytes of them; 0: no memory. */
HPMLC_FN int64_t hpmlc_allreduce_piece(hpml_comm *c, int64_t n, int64_t size, hpml_algorithm *a)
{
    if (*a != HPML_AUTO) return hpmlc_max(n, 1);
    *a = hpml_comm_choose(c, n * size);
    if (*a == HPML_ALGORITHM_NONE) return 0;
    return c->t->piece > 0 && n > 1 << 21 ? (int64_t)c->t->piece / size : hpmlc_max(n, 1);
}

/* Returns the bytes that this rank sends in an allreduce of n elements of `size` bytes by algorithm a. For MPI's own
   allreduce and device links, which do not report what they send: the bytes of a ring. */
HPMLC_FN int64_t hpmlc_allreduce_bytes(hpml_comm *c, int64_t n, int64_t size, hpml_algorithm a)
{
    const hpmlc_algorithm *row = hpmlc_algorithm_row(a);
    if (!row || row->native || c->link.begin) return 2 * size * (n - hpml_block(n, c->size, 1));
    int64_t step = hpmlc_allreduce_piece(c, n, size, &a), elements = 0;
    for (int64_t at = 0; at < n && step > 0; at += step) {
        hpmlc_phases all;
        hpml_move      m;
        hpmlc_phases_make(&all, a, c->size, c->per_node, c->spread, c->rank, hpmlc_min(n - at, step));
        for (const hpmlc_phase *f = all.phase; f < all.phase + all.count; f++)
            for (int k = 0; k < f->rounds; k++) {
                hpmlc_move_of(f, k, &m);
                elements += m.send_count;
            }
    }
    return elements * size;
}

HPML_API hpml_status hpml_allreduce(hpml_comm *c, void *data, int64_t n, const hpml_allreduce_desc *desc)
{
    hpmlc_phases all;
    hpml_status    status;
    HPMLC_DESC(hpml_allreduce_desc, d, desc);
    if (c && (d._begin || d._end || !hpmlc_reducer(d.element, d.reduce) ||
              (unsigned)d.algorithm >= HPML_ALGORITHM_COUNT || (n > 0 && !data)))
        return hpmlc_fail(c, HPML_ERR_ARGUMENT, "allreduce: algorithm %d, reduce %d, element %d, data %p: out of "
                          "range, or the desc was not zeroed", (int)d.algorithm, (int)d.reduce, (int)d.element, data);
    int tag = hpmlc_enter(c, "allreduce", n, d.element, (int)d.reduce, hpml_algorithm_name(d.algorithm), -1);
    if (tag < 0) return c ? hpml_ctx_status(c->ctx) : HPML_ERR_ARGUMENT;
    int64_t size = (int64_t)hpml_element_size(d.element), step = hpmlc_allreduce_piece(c, n, size, &d.algorithm);
    if (step == 0)
        return hpmlc_fail(c, HPML_ERR_MEMORY, "allreduce: no memory for the simulation with which AUTO chooses");
    if (hpmlc_algorithm_row(d.algorithm)->native) {
        if (!c->t->allreduce)
            return hpmlc_fail(c, HPML_ERR_UNSUPPORTED, "allreduce: transport %s has no native algorithm; choose "
                              "another one", c->t->name);
        status = c->t->allreduce(c, data, n, (int)d.element, (int)d.reduce);
        if (status == HPML_OK && d.reduce == HPML_MEAN) hpmlc_divide(data, n, d.element, c->size);
    } else {
        int64_t at = 0;
        do { /* `step` elements at a time, see hpml_transport.piece; n 0: one empty piece */
            int64_t count = hpmlc_min(n - at, step);
            hpmlc_phases_make(&all, d.algorithm, c->size, c->per_node, c->spread, c->rank, count);
            status = hpmlc_run(c, &all, (char *)data + at * size, d.element, (int)d.reduce, tag);
            at += count;
        } while (at < n && status == HPML_OK);
    }
    return hpmlc_leave(c, status);
}

/* Calls hpml_allreduce with a desc (struct of options) that has the given element type, reduction and algorithm. */
HPMLC_FN hpml_status hpmlc_reduce_all(hpml_comm *c, void *data, int64_t n, hpml_element element, hpml_reduce reduce,
                                      hpml_algorithm algorithm)
{
    HPMLC_ZERO(hpml_allreduce_desc, d);
    d.element   = element;
    d.reduce    = reduce;
    d.algorithm = algorithm;
    return hpml_allreduce(c, data, n, &d);
}

/* Measures the latency by messages of 4 bytes to the next rank and the bandwidth by messages of 1 MiB, the best of 16;
   all ranks take the latency and the bandwidth of the slowest rank. */
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
/* A job is work for the background of a communicator: a thread with a context of its own and a twin, a communicator of
   the same ranks for the thread's messages. hpml_job_wait copies an error of that context to the communicator's. Jobs
   run in the order in which they are posted, the same on all ranks, so that their collectives match. */

struct hpml_job {
    hpml_comm          *c;
    hpml_rank_fn       *work;
    void               *user;
    void               *data; /* the array of hpml_iallreduce */
    int64_t             n;
    hpml_allreduce_desc desc;
    hpml_status         status;
    bool                used;  /* posted, and hpml_job_wait has not yet returned its status */
    bool                done;
    int64_t             step;  /* the communicator's step when the job was posted */
    double              clock; /* CLOCK: virtual seconds when the job was posted, then when it was done */
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
    hpmlc_waitpoint worker, waiter;
#ifndef HPML_NO_THREADS
    pthread_t  thread;
#endif
};

/* Runs the oldest posted job not yet run, on the background's communicator; sets its status, end time and `done`. */
HPMLC_FN void hpmlc_job_run(hpmlc_background *b)
{
    hpml_job *j = &b->job[b->taken++ % HPMLC_JOBS];
    b->twin->step = j->step;
    hpmlc_advance(b->twin, j->clock);
    j->status = j->work(b->twin, j->work == hpmlc_job_allreduce ? j : j->user);
    j->clock  = hpml_comm_now(b->twin);
    __atomic_store_n(&j->done, true, __ATOMIC_RELEASE);
}

#ifndef HPML_NO_THREADS

/* Lowers the latency of the calling thread, which mostly waits and for which other ranks wait, if the system lets it: a
   timer slack of 1 us instead of 50, and a short time slice (Linux 6.12), so that it preempts computing threads. */
HPMLC_FN void hpmlc_background_low_latency(void)
{
#if defined(__linux__) && defined(PR_SET_TIMERSLACK) && defined(SYS_sched_setattr)
    struct { uint32_t size, policy; uint64_t flags; int32_t nice; uint32_t priority; uint64_t runtime, rest[2]; } a;
    prctl(PR_SET_TIMERSLACK, 1000ul, 0ul, 0ul, 0ul); /* in ns */
    if (syscall(SYS_sched_getattr, 0, &a, (unsigned)sizeof a, 0u) != 0 || a.policy != 0) return;
    a.runtime = 100000; /* ns of a time slice, used by Linux 6.12 and later */
    syscall(SYS_sched_setattr, 0, &a, 0u);
#endif
}

/* Main function of the background thread: runs jobs until hpmlc_background_stop is called and no job is left. */
HPMLC_FN void *hpmlc_background_main(void *arg)
{
    hpmlc_background *b    = (hpmlc_background *)arg;
    unsigned          seen = 0;
    hpmlc_background_low_latency();
    const hpmlc_schedule *schedule = b->c->t->schedule;
    if (schedule) schedule->thread_enter(b->twin);
    for (;;) {
        if (b->taken != __atomic_load_n(&b->posted, __ATOMIC_ACQUIRE)) {
            hpmlc_job_run(b);
            hpmlc_wake_at(b->c, &b->waiter);
        } else if (__atomic_load_n(&b->stop, __ATOMIC_ACQUIRE)) break;
        else hpmlc_sleep_at(b->twin, &b->worker, &seen, 1e300);
    }
    __atomic_store_n(&b->ended, true, __ATOMIC_RELEASE);
    hpmlc_wake_at(b->c, &b->waiter);
    if (schedule) schedule->thread_close(b->c, b->twin);
    return NULL;
}

/* Starts the background thread; where transport or system allow none, jobs run in the thread that posts them. */
HPMLC_FN void hpmlc_background_thread(hpmlc_background *b)
{
    const hpml_transport *t = b->c->t;
    if (t->is_concurrent && !t->is_concurrent(b->c)) return;
    if (t->schedule && !t->schedule->thread_open(b->c, b->twin)) return;
    hpmlc_waitpoint_init(&b->worker);
    hpmlc_waitpoint_init(&b->waiter);
    b->threaded = pthread_create(&b->thread, NULL, hpmlc_background_main, b) == 0;
    if (!b->threaded && t->schedule) t->schedule->thread_close(b->c, b->twin);
}

/* Waits until the background thread sets *flag, while deadlocks are detected and virtual (simulated) time goes on. */
HPMLC_FN void hpmlc_background_await(hpmlc_background *b, const bool *flag)
{
    unsigned seen = __atomic_load_n(&b->waiter.changes, __ATOMIC_ACQUIRE);
    while (!__atomic_load_n(flag, __ATOMIC_ACQUIRE)) hpmlc_sleep_at(b->c, &b->waiter, &seen, 1e300);
}

#else
HPMLC_FN void hpmlc_background_await(hpmlc_background *b HPMLC_UNUSED, const bool *flag HPMLC_UNUSED) {}
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
        hpmlc_wake_at(b->twin, &b->worker);
        hpmlc_background_await(b, &b->ended);
        pthread_join(b->thread, NULL);
        hpmlc_waitpoint_close(&b->worker);
        hpmlc_waitpoint_close(&b->waiter);
    }
#endif
    hpml_ctx_free(b->ctx);
}

/* Returns the background of c: a thread, and the twin of c which that thread uses. The first call creates both, so that
   all ranks must make the first call together (it is a collective). NULL: an error. */
HPMLC_FN hpmlc_background *hpmlc_background_of(hpml_comm *c)
{
    if (c->background) return c->background;
    hpmlc_background *b = (hpmlc_background *)hpml_ctx_alloc(c->ctx, sizeof *b, NULL);
    if (!b) return NULL;
    HPMLC_ZERO(hpml_ctx_desc, d);
    d.threads   = 1;
    d.allocator = hpml_ctx_allocator(c->ctx);
    int32_t *all = (int32_t *)hpml_ctx_alloc(c->ctx, sizeof *all * (size_t)c->size, NULL);
    for (int i = 0; all && i < c->size; i++) all[i] = i;
    b->c    = c;
    b->ctx  = all ? hpml_ctx_create(&d) : NULL;
    const hpml_counters before = c->counters;
    c->is_uncounted = true;
    b->twin = b->ctx ? hpmlc_part(c, b->ctx, all, c->size, 0) : NULL;
    c->is_uncounted = false;
    c->counters     = before;
    hpml_ctx_release(c->ctx, all);
    if (!b->twin) {
        hpmlc_fail(c, HPML_ERR_MEMORY, "background: the twin of the communicator cannot be created: %s",
                   b->ctx ? hpml_ctx_error(b->ctx) : "no memory");
        hpml_ctx_free(b->ctx);
        return NULL;
    }
    b->twin->spin_limit = 0; /* a wait sleeps at once, because computing threads need the core */
    b->twin->trace = c->ctx;
    c->background  = b;
    hpmlc_background_thread(b);
    return b;
}

/* Hands a copy of `job` to the background thread or, without one, runs it. Returns the copy; NULL: an error on c. */
HPMLC_FN hpml_job *hpmlc_job_post(hpml_comm *c, const hpml_job *job)
{
    hpmlc_background *b = hpmlc_failed(c) ? NULL : hpmlc_background_of(c);
    if (!b) return NULL;
    hpml_job *j = &b->job[b->posted % HPMLC_JOBS];
    if (j->used) {
        hpmlc_fail(c, HPML_ERR_STATE, "background: %d jobs have been started without a wait; call hpml_job_wait once "
                   "for each", HPMLC_JOBS);
        return NULL;
    }
    *j = *job;
    j->c     = c;
    j->used  = true;
    j->step  = c->step;
    j->clock = hpml_comm_now(c);
    __atomic_add_fetch(&b->posted, 1, __ATOMIC_RELEASE);
    if (b->threaded) hpmlc_wake_at(b->twin, &b->worker);
    else hpmlc_job_run(b);
    return j;
}

HPML_API hpml_job *hpml_background(hpml_comm *c, hpml_rank_fn *work, void *user)
{
    HPMLC_ZERO(hpml_job, j);
    j.work = work;
    j.user = user;
    return work ? hpmlc_job_post(c, &j) : NULL;
}

HPML_API hpml_job *hpml_iallreduce(hpml_comm *c, void *data, int64_t n, const hpml_allreduce_desc *desc)
{
    HPMLC_ZERO(hpml_job, j);
    j.work = hpmlc_job_allreduce;
    j.data = data;
    j.n    = n;
    if (desc) j.desc = *desc;
    return hpmlc_job_post(c, &j);
}

HPML_API bool hpml_job_done(const hpml_job *j) { return !j || __atomic_load_n(&j->done, __ATOMIC_ACQUIRE); }

HPML_API hpml_status hpml_job_wait(hpml_job *j)
{
    if (!j) return HPML_ERR_ARGUMENT;
    hpmlc_background *b = j->c->background;
    /* Lets the background thread poll before it sleeps, because this thread, which only waits, leaves it a core. */
    __atomic_store_n(&b->twin->spin_limit, j->c->spin_limit, __ATOMIC_RELAXED);
    hpmlc_background_await(b, &j->done);
    __atomic_store_n(&b->twin->spin_limit, 0, __ATOMIC_RELAXED);
    hpmlc_advance(j->c, j->clock);
    j->used = false;
    if (j->status != HPML_OK && hpml_ctx_status(b->ctx) != HPML_OK && hpml_ctx_status(j->c->ctx) == HPML_OK)
        hpml_ctx_fail(j->c->ctx, j->status, "%s", hpml_ctx_error(b->ctx));
    return j->status;
}

/* Waits until all posted jobs are done: then the background's counters, and residuals of packing, may be read. */
HPMLC_FN void hpmlc_background_drain(const hpml_comm *c)
{
    hpmlc_background *b = c->background;
    if (b && b->posted > 0) hpmlc_background_await(b, &b->job[(b->posted - 1) % HPMLC_JOBS].done);
}

HPMLC_FN void hpmlc_counters_add(hpml_counters *to, const hpml_counters *more)
{
    to->messages += more->messages;
    to->bytes += more->bytes;
    to->between_bytes += more->between_bytes;
    to->rounds += more->rounds;
    to->seconds += more->seconds;
}

HPML_API void hpml_comm_counters(const hpml_comm *c, hpml_counters *out)
{
    memset(out, 0, sizeof *out);
    if (!c) return;
    hpmlc_background_drain(c);
    *out = c->counters;
    if (c->background) hpmlc_counters_add(out, &c->background->twin->counters);
}

/* Waits for all jobs of c's background thread, and returns how many messages (which 0) or bytes (which 1) c and the
   twin that this thread uses have sent to rank `peer`. */
HPMLC_FN int64_t hpmlc_sent_to(const hpml_comm *c, int peer, int which)
{
    if (!c || peer < 0 || peer >= c->size) return 0;
    hpmlc_background_drain(c);
    return c->sent_to[peer][which] + (c->background ? c->background->twin->sent_to[peer][which] : 0);
}

HPML_API int64_t hpml_comm_messages_to(const hpml_comm *c, int peer) { return hpmlc_sent_to(c, peer, 0); }
HPML_API int64_t hpml_comm_bytes_to(const hpml_comm *c, int peer) { return hpmlc_sent_to(c, peer, 1); }

HPML_API void hpml_comm_counters_reset(hpml_comm *c)
{
    if (!c) return;
    hpmlc_background_drain(c);
    for (hpml_comm *x = c; x; x = x == c && c->background ? c->background->twin : NULL) {
        memset(&x->counters, 0, sizeof x->counters);
        memset(x->sent_to, 0, sizeof *x->sent_to * (size_t)x->size);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// >>exchange   1-bit exchange: stripes, owners, two residuals
// ---------------------------------------------------------------------------------------------------------------------
/* A tensor of an exchange. Plain: an allreduce over all plain tensors adds it up. Packed: a codec packs its rows, and
   rank j adds up stripe j, the j-th of p almost equal ranges of rows. A message to rank j has a header of 8 bytes (a
   tensor and a rank with a NaN; 0: none), and then, by contribution and tensor, the packed rows of stripe j. */

typedef struct hpmlc_item {
    hpml_gradient g;
    hpml_packing  packing;
    bool          plain;
    float        *residual;        /* (leaves, rows, cols) errors of packing this rank's gradients; NULL: none */
    float        *stripe;          /* (my_rows, cols) errors of packing the sum; NULL: none */
    int64_t       my_row, my_rows; /* first row of this rank's stripe; number of rows of the stripe */
    int64_t       at;              /* plain: offset of the tensor in hpml_exchange.fused or .span, in floats */
    /* Arrays that one codec alone uses, allocated together with the residual; NULL with other codecs: */
    float        *magnitude, *velocity, *pairs; /* TOPK: (rows * cols) each; pairs (p, k, 2): k pairs of each rank */
    float        *m, *p, *q;       /* LOWRANK: matrices M (rows, cols), P (rows, r), Q (cols, r) */
} hpmlc_item;

/* Lets the host read and write arrays that may live on a device. hpmlc_host_view_begin returns n floats of an array:
   the array itself if it is on the host, else a copy in `window`, which holds one array at a time;
   hpmlc_host_view_end writes this copy back to the device. */
typedef struct hpmlc_host_view {
    const hpml_backend *device; /* NULL: arrays are on the host */
    void               *device_user; /* first argument of the device's functions */
    float              *window; /* host memory for a copy of the largest array */
} hpmlc_host_view;

HPMLC_FN bool hpmlc_host_view_create(hpmlc_host_view *view, hpml_ctx *ctx, int64_t largest)
{
    view->device      = hpml_ctx_backend(ctx);
    view->device_user = hpml_ctx_device(ctx);
    view->window      = (float *)hpml_ctx_alloc(ctx, (size_t)hpmlc_max(largest, 1) * sizeof(float), NULL);
    return view->window != NULL;
}

HPMLC_FN float *hpmlc_host_view_begin(const hpmlc_host_view *view, float *x, int64_t n)
{
    if (!view->device || n == 0) return x;
    view->device->read(view->device_user, view->window, x, (size_t)n * sizeof(float));
    return view->window;
}

HPMLC_FN void hpmlc_host_view_end(const hpmlc_host_view *view, float *x, int64_t n)
{
    if (view->device && n > 0) view->device->write(view->device_user, x, view->window, (size_t)n * sizeof(float));
}

/* Copies n floats from x, which is on the device view->device (NULL: on the host), to `host`; set: from `host` to x. */
HPMLC_FN void hpmlc_host_view_copy(const hpmlc_host_view *view, float *host, float *x, int64_t n, bool set)
{
    const size_t bytes = (size_t)n * sizeof(float);
    if (n == 0) return;
    if (view->device && set) view->device->write(view->device_user, x, host, bytes);
    else if (view->device) view->device->read(view->device_user, host, x, bytes);
    else if (set) memcpy(x, host, bytes);
    else memcpy(host, x, bytes);
}

/* Where the tensors of an exchange are, and how they follow one another in memory. */
typedef enum hpmlc_exchange_mode {
    HPMLC_ANYWHERE,      /* on the host, each tensor where the caller has its array */
    HPMLC_PADDED,        /* on the host, in the trainer's array, each padded to HPML_GRADIENT_ALIGN floats */
    HPMLC_PADDED_LINKED, /* in the trainer's array on a device, and moved by the communicator's device link */
    HPMLC_NODE_SHARE     /* on the host: this rank's share of the sums of its node's gradients */
} hpmlc_exchange_mode;

typedef struct hpmlc_whole hpmlc_whole;

struct hpml_exchange {
    hpml_comm          *c;
    hpml_exchange_desc  d;
    hpmlc_exchange_mode mode;
    const hpmlc_whole  *whole;     /* the codec, if it packs whole tensors; NULL: it packs row by row */
    hpmlc_item         *item;      /* (d.count) */
    int                 packed;    /* number of packed tensors */
    float              *fused;     /* (plain) copies of the plain tensors, end to end; NULL: not needed */
    float              *span;
    int64_t             plain;     /* floats of all plain tensors together */
    int64_t             part;      /* floats of plain tensors in one allreduce */
    int32_t            *missing;   /* for each allreduce of plain tensors: how many are not ready on all ranks */
    int32_t            *ready;     /* (d.count) atomic: 0: not ready, 1: ready on this rank, 2: ready on all ranks */
    int32_t            *late;      /* (d.count) 1 + a rank where the tensor is not ready; 0: ready everywhere */
    int                 announced; /* atomic: number of tensors that are ready on this rank */
    hpml_job           *job;       /* job of hpml_exchange_ready, which waits for tensors to get ready */
    hpmlc_background   *by;        /* background thread that runs `job` */
    int32_t            *leaves;    /* (p) number of contributions of each rank */
    int32_t             first_leaf; /* number of contributions of all ranks before this one */
    int64_t             runs;      /* how often the exchange has run */
    uint64_t            seed;      /* seed of codecs that round at random */
    size_t             *sent_at;   /* (p + 1) where the message to each rank begins in `sent` */
    size_t              part_size; /* bytes of one contribution to this rank's stripe, header excluded */
    size_t             *received_at; /* (p + 1) where the message from each rank begins in `received` */
    size_t             *sum_at;    /* (p + 1) where the packed sum of each rank's stripe begins in `sums` */
    char               *sent, *received, *sums;
    int64_t             bytes;     /* bytes that this rank sends in one run of the exchange, without plain tensors */
    hpmlc_host_view     view;      /* HPMLC_PADDED_LINKED: device where tensors, residuals and messages are */
    int                 bucket;    /* number of the bucket on the timeline, from 1; 0: none */
    int64_t             bad;       /* of the last run: 2^20 * tensor + 1 + rank, for a tensor with a NaN; 0: none */
};

/* Allocates `bytes` where the exchange's tensors are, on a device or the host. NULL: an error on the context. */
HPMLC_FN void *hpmlc_exchange_alloc(hpml_exchange *x, size_t bytes)
{
    const hpml_backend *device = x->view.device;
    void *p = device ? device->alloc(x->view.device_user, bytes) : hpml_ctx_alloc(x->c->ctx, bytes, NULL);
    if (!p && hpml_ctx_status(x->c->ctx) == HPML_OK)
        hpmlc_fail(x->c, HPML_ERR_MEMORY, "exchange: no %zu bytes on %s", bytes, device->name);
    return p;
}

HPMLC_FN void hpmlc_exchange_release(hpml_exchange *x, void *p)
{
    if (!x->view.device) hpml_ctx_release(x->c->ctx, p);
    else if (p) x->view.device->free(x->view.device_user, p, 0);
}

#define HPMLC_HEADER 8 /* bytes of a message before its rows: the sender's hpml_exchange.bad */

/* Returns 2^20 * tensor + 1 + this rank: hpml_exchange.bad where the tensor has a NaN or infinity on this rank. */
HPMLC_FN int64_t hpmlc_bad(const hpml_comm *c, int64_t tensor) { return c->origin[c->rank] + 1 + (tensor << 20); }

HPMLC_FN int64_t hpmlc_stripe(const hpmlc_item *it, int p, int rank) { return hpml_block(it->g.rows, p, rank); }

HPMLC_FN size_t hpmlc_stripe_size(const hpmlc_item *it, int p, int rank)
{
    size_t rows = (size_t)(hpmlc_stripe(it, p, rank + 1) - hpmlc_stripe(it, p, rank));
    return (rows * it->packing.row_size + 7) / 8 * 8;
}

/* Returns the bytes of one contribution (packed gradient) to the rows that `rank` adds up, over all tensors. */
HPMLC_FN size_t hpmlc_message_size(const hpml_exchange *x, int rank)
{
    size_t size = 0;
    for (int i = 0; i < x->d.count; i++)
        if (!x->item[i].plain) size += hpmlc_stripe_size(&x->item[i], x->c->size, rank);
    return size;
}

/* Sets x->span, the first float of the plain tensors, if these fill a range of memory: an allreduce then adds them up
   without copying them side by side. Tensors of a caller (ANYWHERE) must then be in memory in the order of the list,
   because ranks that do copy theirs copy them in that order; the gradients of a trainer, and a node's shares, may be in
   any order, because all ranks have the same order. */
HPMLC_FN void hpmlc_exchange_span(hpml_exchange *x)
{
    float  *low = NULL, *high = NULL;
    int64_t all = 0;
    bool    padded = x->mode == HPMLC_PADDED || x->mode == HPMLC_PADDED_LINKED, in_order = true;
    for (const hpmlc_item *it = x->item; it < x->item + x->d.count; it++) {
        int64_t n = it->g.rows * it->g.cols, align = padded ? HPML_GRADIENT_ALIGN : 1;
        int64_t taken = (n + align - 1) / align * align;
        if (!it->plain) continue;
        in_order = in_order && (!low || it->g.data == high);
        if (!low || it->g.data < low) low = it->g.data;
        if (!high || it->g.data + taken > high) high = it->g.data + taken;
        all += taken;
    }
    if (!low || high - low != all || (!in_order && x->mode == HPMLC_ANYWHERE)) return;
    x->span  = low;
    x->plain = all;
}

HPMLC_FN const hpmlc_whole *hpmlc_whole_codec(const hpml_codec_desc *codec);

HPMLC_FN hpml_status hpmlc_exchange_check(hpml_comm *c, const hpml_exchange_desc *d)
{
    const hpml_codec_desc *k = &d->codec;
    if (d->_begin || d->_end || k->_begin || k->_end || d->count < 1 || !d->tensors)
        return hpmlc_fail(c, HPML_ERR_ARGUMENT, "exchange: %d tensors at %p: there is no desc, or it was not "
                          "cleared; zero it, then set count and tensors", d->count, (const void *)d->tensors);
    bool adds = d->reduce == HPML_SUM || d->reduce == HPML_MEAN;
    if (!adds || d->leaves < 0 || d->fuse_bytes < 0 || (unsigned)d->algorithm >= HPML_ALGORITHM_COUNT)
        return hpmlc_fail(c, HPML_ERR_ARGUMENT, "exchange: reduce %d, %d leaves, fuse_bytes %lld, algorithm %d: "
                          "expected SUM or MEAN, no negative number, and a word of hpml_algorithm", (int)d->reduce,
                          d->leaves, (long long)d->fuse_bytes, (int)d->algorithm);
    if (!k->custom && !hpml_codec_get(k->kind))
        return hpmlc_fail(c, HPML_ERR_ARGUMENT, "exchange: there is no codec %d; take a word of hpml_codec_kind",
                          (int)k->kind);
    if (!(k->ratio >= 0 && k->ratio <= 1) || k->lowrank < 0)
        return hpmlc_fail(c, HPML_ERR_ARGUMENT, "exchange: codec.ratio %g, codec.lowrank %d: expected 0 to 1, and a "
                          "rank that is not negative", (double)k->ratio, k->lowrank);
    const hpmlc_whole *whole = hpmlc_whole_codec(k);
    for (int i = 0; i < d->count; i++) {
        const hpml_gradient *g = &d->tensors[i];
        hpml_packing         p;
        bool shaped = g->data && g->rows >= 1 && g->cols >= 1;
        if (!shaped || hpml_packing_init(&p, whole ? NULL : k, g->rows, g->cols) != HPML_OK)
            return hpmlc_fail(c, HPML_ERR_SHAPE, "exchange: tensor %d \"%s\" is %lld x %lld%s, or its codec desc is "
                              "not valid", i, g->name ? g->name : "", (long long)g->rows, (long long)g->cols,
                              g->data ? "" : " without data");
    }
    if (d->leaves > 1 && whole)
        return hpmlc_fail(c, HPML_ERR_UNSUPPORTED, "exchange: codecs topk and lowrank take one contribution a rank; "
                          "exact sums go with the other codecs");
    return HPML_OK;
}

/* Replaces n elements of `data` by their maxima over all ranks, by an allreduce that the timeline does not show. */
HPMLC_FN hpml_status hpmlc_reduce_untraced(hpml_comm *c, void *data, int64_t n, hpml_element element)
{
    hpml_ctx *trace = c->trace;
    c->trace = NULL;
    hpml_status status = hpmlc_reduce_all(c, data, n, element, HPML_MAX, HPML_AUTO);
    c->trace = trace;
    return status;
}

/* Sets *same to whether all ranks pass the same `hash`. Collective. */
HPMLC_FN hpml_status hpmlc_same(hpml_comm *c, uint64_t hash, bool *same)
{
    int64_t     both[2] = { (int64_t)(hash >> 2), -(int64_t)(hash >> 2) };
    hpml_status status = hpmlc_reduce_untraced(c, both, 2, HPML_ELEMENT_I64);
    *same = both[0] == -both[1];
    return status;
}

/* Fails on all ranks unless all of them have equal tensors: shapes and row sizes are hashed and compared. */
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

HPMLC_FN bool hpmlc_whole_create(hpml_exchange *x, hpmlc_item *it);

HPMLC_FN bool hpmlc_item_create(hpml_exchange *x, hpmlc_item *it)
{
    hpml_comm *c = x->c;
    hpml_packing_init(&it->packing, x->whole ? NULL : &x->d.codec, it->g.rows, it->g.cols);
    if (x->whole) return hpmlc_whole_create(x, it);
    it->plain = it->packing.codec->linear;
    if (it->plain) return true;
    it->my_row  = hpmlc_stripe(it, c->size, c->rank);
    it->my_rows = hpmlc_stripe(it, c->size, c->rank + 1) - it->my_row;
    if (it->packing.residual_count == 0) return true;
    size_t all = (size_t)(it->g.rows * it->g.cols * x->d.leaves), mine = (size_t)(it->my_rows * it->g.cols);
    it->residual = (float *)hpmlc_exchange_alloc(x, all * sizeof(float));
    it->stripe   = (float *)hpmlc_exchange_alloc(x, mine * sizeof(float) + 1); /* + 1: not NULL if there are no rows */
    return it->residual && it->stripe;
}

/* Sets where each rank's message or packed sum begins in x->sent, x->received and x->sums, allocates these arrays, and
   adds the bytes that this rank sends to x->bytes. False: no memory. */
HPMLC_FN bool hpmlc_exchange_layout(hpml_exchange *x)
{
    hpml_comm *c = x->c;
    int        p = c->size;
    x->part_size = hpmlc_message_size(x, c->rank);
    for (int r = 0; r < p; r++) {
        size_t size = hpmlc_message_size(x, r);
        x->sent_at[r + 1]     = x->sent_at[r] + HPMLC_HEADER + size * (size_t)x->d.leaves;
        x->received_at[r + 1] = x->received_at[r] + HPMLC_HEADER + x->part_size * (size_t)x->leaves[r];
        x->sum_at[r + 1]      = x->sum_at[r] + HPMLC_HEADER + size;
    }
    x->sent     = (char *)hpmlc_exchange_alloc(x, x->sent_at[p]);
    x->received = (char *)hpmlc_exchange_alloc(x, x->received_at[p]);
    x->sums     = (char *)hpmlc_exchange_alloc(x, x->sum_at[p]);
    x->bytes += (int64_t)(x->sent_at[p] - (x->sent_at[c->rank + 1] - x->sent_at[c->rank]));
    x->bytes += (int64_t)(p - 1) * (int64_t)(x->sum_at[c->rank + 1] - x->sum_at[c->rank]);
    return x->sums && x->received && x->sent;
}

/* Sets where each plain tensor begins among the floats that are added up; allocates hpml_exchange_ready's arrays. */
HPMLC_FN bool hpmlc_exchange_parts(hpml_exchange *x)
{
    int64_t at = 0, n = x->d.count;
    for (hpmlc_item *it = x->item; it < x->item + n; it++) {
        if (!it->plain) continue;
        it->at = x->span ? it->g.data - x->span : at;
        at += it->g.rows * it->g.cols;
    }
    x->part = x->d.fuse_bytes > 0 ? (x->d.fuse_bytes + 3) / 4 : x->plain + 1;
    int64_t words = 2 * n + x->plain / x->part + 1;
    x->ready   = (int32_t *)hpml_ctx_alloc(x->c->ctx, sizeof *x->ready * (size_t)words, NULL);
    x->late    = x->ready + n;
    x->missing = x->late + n;
    return x->ready != NULL;
}

/* Allocates an exchange for the checked desc d, and its arrays with one entry per tensor or rank. NULL: no memory. */
HPMLC_FN hpml_exchange *hpmlc_exchange_new(hpml_comm *c, const hpml_exchange_desc *d, hpmlc_exchange_mode mode)
{
    hpml_exchange *x = (hpml_exchange *)hpml_ctx_alloc(c->ctx, sizeof *x, NULL);
    size_t         p = (size_t)c->size;
    if (!x) return NULL;
    x->c     = c;
    x->d     = *d;
    x->mode  = mode;
    x->whole = hpmlc_whole_codec(&d->codec);
    x->seed  = d->codec.seed ? d->codec.seed : hpml_ctx_seed(c->ctx);
    if (x->d.leaves == 0) x->d.leaves = 1;
    x->item    = (hpmlc_item *)hpml_ctx_alloc(c->ctx, sizeof *x->item * (size_t)d->count, NULL);
    x->leaves  = (int32_t *)hpml_ctx_alloc(c->ctx, sizeof *x->leaves * p, NULL);
    x->sent_at = (size_t *)hpml_ctx_alloc(c->ctx, sizeof *x->sent_at * 3 * (p + 1), NULL);
    if (!x->item || !x->leaves || !x->sent_at) return NULL;
    x->received_at = x->sent_at + p + 1;
    x->sum_at      = x->received_at + p + 1;
    return x;
}

/* Creates an exchange as hpml_exchange_create does; mode: where the tensors are. NULL: an error on the context. */
HPMLC_FN hpml_exchange *hpmlc_exchange_make(hpml_comm *c, const hpml_exchange_desc *desc, hpmlc_exchange_mode mode)
{
    HPMLC_DESC(hpml_exchange_desc, d, desc);
    if (hpmlc_failed(c) || hpmlc_exchange_check(c, &d) != HPML_OK) return NULL;
    hpml_exchange *x = hpmlc_exchange_new(c, &d, mode);
    bool           linked = mode == HPMLC_PADDED_LINKED;
    int64_t        most = 0;
    if (!x) return NULL;
    for (int i = 0; i < d.count; i++) most = hpmlc_max(most, d.tensors[i].rows * d.tensors[i].cols);
    if (linked && !hpmlc_host_view_create(&x->view, c->ctx, most)) return NULL;
    for (int i = 0; i < d.count; i++) {
        x->item[i].g = d.tensors[i];
        if (!hpmlc_item_create(x, &x->item[i])) return NULL;
        x->packed += !x->item[i].plain;
        if (x->item[i].plain) x->plain += d.tensors[i].rows * d.tensors[i].cols;
    }
    x->leaves[c->rank] = x->d.leaves;
    if (hpmlc_exchange_agree(x) != HPML_OK) return NULL;
    if (hpml_allgather(c, x->leaves, c->size, HPML_ELEMENT_I32) != HPML_OK) return NULL;
    for (int r = 0; r < c->rank; r++) x->first_leaf += x->leaves[r];
    hpmlc_exchange_span(x);
    if (x->plain > 0 && !x->span && !linked)
        x->fused = (float *)hpml_ctx_alloc(c->ctx, (size_t)x->plain * sizeof(float), NULL);
    if (!x->whole && x->packed > 0 && !hpmlc_exchange_layout(x)) return NULL;
    return hpmlc_exchange_parts(x) ? x : NULL;
}

HPML_API hpml_exchange *hpml_exchange_create(hpml_comm *c, const hpml_exchange_desc *desc)
{
    return hpmlc_exchange_make(c, desc, HPMLC_ANYWHERE);
}

HPML_API void hpml_exchange_free(hpml_exchange *x)
{
    if (!x) return;
    hpml_ctx *ctx = x->c->ctx;
    for (int i = 0; i < x->d.count; i++) {
        hpmlc_exchange_release(x, x->item[i].residual);
        hpmlc_exchange_release(x, x->item[i].stripe);
    }
    char *messages[] = { x->sent, x->received, x->sums };
    for (size_t k = 0; k < sizeof messages / sizeof messages[0]; k++) hpmlc_exchange_release(x, messages[k]);
    void *own[] = { x->item, x->leaves, x->sent_at, x->fused, x->ready, x->view.window };
    for (size_t k = 0; k < sizeof own / sizeof own[0]; k++) hpml_ctx_release(ctx, own[k]);
    hpml_ctx_release(ctx, x);
}

// ---------------------------------------------------------------------------------------------------------------------
// >>stripes   the five steps of an exchange, on the host or on a device
// ---------------------------------------------------------------------------------------------------------------------
/* Returns the exchange's seed mixed, by the steps of splitmix64, with the tensor's number and with the contribution's
   number, counted over all ranks (-1: the sum), so that each pair of tensor and contribution draws random numbers of
   its own, which do not depend on the rank that has the contribution. */
HPMLC_FN uint64_t hpmlc_encode_seed(const hpml_exchange *x, const hpmlc_item *it, int64_t contribution)
{
    uint64_t h = x->seed;
    for (int k = 0; k < 2; k++) {
        h += 0x9e3779b97f4a7c15u * (uint64_t)(k ? contribution + 2 : it - x->item + 1);
        h = (h ^ h >> 30) * 0xbf58476d1ce4e5b9u;
        h = (h ^ h >> 27) * 0x94d049bb133111ebu;
        h ^= h >> 31;
    }
    return h;
}

/* Packs rows [row, row + rows) of tensor `it`, which begin at g, into `packed` and updates e, their packing errors.
   contribution: number of the gradient over all ranks; -1: a sum. HPML_ERR_NONFINITE: g has a NaN or infinity. */
HPMLC_FN hpml_status hpmlc_encode(const hpml_comm *c, const hpml_exchange *x, const hpmlc_item *it,
                                  int64_t contribution, void *packed, float *e, const float *g, int64_t row,
                                  int64_t rows)
{
    const hpml_backend *b = x->view.device;
    hpml_encode_info    info;
    if (b) return b->encode(x->view.device_user, x->c->ctx, &it->packing, packed, e, g, rows);
    info.row  = row;
    info.step = c->step > 0 ? c->step : x->runs;
    info.seed = hpmlc_encode_seed(x, it, contribution);
    return hpml_packing_encode(&it->packing, packed, e, g, rows, &info);
}

HPMLC_FN void hpmlc_decode(const hpml_exchange *x, const hpmlc_item *it, float *out, const void *packed, int64_t rows,
                           bool add)
{
    const hpml_backend *b = x->view.device;
    if (b) b->decode(x->view.device_user, x->c->ctx, &it->packing, out, packed, rows, add);
    else it->packing.codec->decode(&it->packing, out, packed, rows, add);
}

/* Labels the next spans (intervals) of c on the timeline with the first and last name among the packed tensors of x;
   plain: among its plain tensors that overlap floats [at, end) of all plain floats. */
HPMLC_FN void hpmlc_set_label(hpml_comm *c, const hpml_exchange *x, bool plain, int64_t at, int64_t end)
{
    memset(&c->about, 0, sizeof c->about);
    if (!hpml_trace_on(c->trace)) return;
    c->about.bucket = x->bucket;
    for (const hpmlc_item *it = x->item; it < x->item + x->d.count; it++) {
        bool within = !plain || (it->at < end && it->at + it->g.rows * it->g.cols > at);
        if (it->plain != plain || !within) continue;
        if (!c->about.first) c->about.first = it->g.name;
        c->about.last = it->g.name;
    }
}

HPMLC_FN void hpmlc_clear_label(hpml_comm *c) { memset(&c->about, 0, sizeof c->about); }

/* Packs all rows of this rank's gradients into the messages to the ranks that add up these rows, the first step of an
   exchange (see hpml_exchange_desc). Returns 0 or, if a tensor has a NaN or infinity, the value of hpmlc_bad for it. */
HPMLC_FN int64_t hpmlc_exchange_pack(hpml_comm *c, hpml_exchange *x)
{
    int     p = c->size;
    int64_t bad = 0;
    for (int r = 0; r < p; r++) {
        char *at = x->sent + x->sent_at[r] + HPMLC_HEADER;
        for (int l = 0; l < x->d.leaves; l++)
            for (int i = 0; i < x->d.count; i++) {
                hpmlc_item *it = &x->item[i];
                if (it->plain) continue;
                int64_t row = hpmlc_stripe(it, p, r), rows = hpmlc_stripe(it, p, r + 1) - row;
                float  *e = it->residual ? it->residual + (l * it->g.rows + row) * it->g.cols : NULL;
                float  *g = it->g.data + l * x->d.leaf_step + row * it->g.cols;
                bool    good = rows == 0 || hpmlc_encode(c, x, it, x->first_leaf + l, at, e, g, row, rows) == HPML_OK;
                if (!good && (!bad || i < bad >> 20)) bad = hpmlc_bad(c, i);
                at += hpmlc_stripe_size(it, p, r);
            }
    }
    return bad;
}

/* Unpacks the sums of all stripes (ranges of rows, each added up by one rank) into the tensors of the exchange. */
HPMLC_FN void hpmlc_exchange_unpack(const hpml_comm *c, hpml_exchange *x)
{
    int p = c->size;
    for (int r = 0; r < p; r++) {
        const char *at = x->sums + x->sum_at[r] + HPMLC_HEADER;
        for (hpmlc_item *it = x->item; it < x->item + x->d.count; it++) {
            if (it->plain) continue;
            int64_t row = hpmlc_stripe(it, p, r), rows = hpmlc_stripe(it, p, r + 1) - row;
            hpmlc_decode(x, it, it->g.data + row * it->g.cols, at, rows, false);
            at += hpmlc_stripe_size(it, p, r);
        }
    }
}

/* Returns the message from rank r with the packed rows of this rank's stripe; the one from this rank, `me`, to itself
   is in x->sent, the others are in x->received. */
HPMLC_FN const char *hpmlc_message_from(const hpml_exchange *x, int r, int me)
{
    return r == me ? x->sent + x->sent_at[r] : x->received + x->received_at[r];
}

/* Sets *bad, if it is 0, to the header of a message: which tensor on which rank has a NaN or infinity, 0 for none. A
   header of packed rows is about its sender's gradients, a header of sums about those of all ranks and the sums. */
HPMLC_FN void hpmlc_merge_bad(int64_t *bad, const char *message)
{
    int64_t other;
    memcpy(&other, message, sizeof other);
    if (*bad == 0) *bad = other;
}

/* Adds up the contributions of all ranks to this rank's stripe, the range of rows that this rank adds up, in the order
   of the ranks, and packs the sum. Returns 0 or, if a tensor's sum has a NaN or infinity, the value of hpmlc_bad for
   this tensor. */
HPMLC_FN int64_t hpmlc_exchange_add(hpml_comm *c, hpml_exchange *x)
{
    int     p = c->size, me = c->rank;
    int64_t bad = 0;
    char   *to = x->sums + x->sum_at[me] + HPMLC_HEADER;
    size_t  offset = 0;
    for (int i = 0; i < x->d.count; i++) {
        hpmlc_item *it = &x->item[i];
        if (it->plain) continue;
        float  *sum   = it->g.data + it->my_row * it->g.cols;
        int64_t n     = it->my_rows * it->g.cols;
        bool    first = true;
        for (int r = 0; r < p; r++)
            for (int l = 0; l < x->leaves[r]; l++, first = false) {
                const char *rows = hpmlc_message_from(x, r, me) + HPMLC_HEADER + (size_t)l * x->part_size + offset;
                hpmlc_decode(x, it, sum, rows, it->my_rows, !first);
            }
        if (x->d.reduce == HPML_MEAN && x->view.device) c->link.scale(c->link.user, sum, n, 1, (float)p);
        else if (x->d.reduce == HPML_MEAN) hpmlc_divide(sum, n, HPML_ELEMENT_F32, p);
        if (it->my_rows > 0) {
            if (x->d.in_stripe) x->d.in_stripe(x->d.user, i, it->my_row, it->my_rows, sum);
            hpml_status status = hpmlc_encode(c, x, it, -1, to + offset, it->stripe, sum, it->my_row, it->my_rows);
            if (status != HPML_OK) bad = hpmlc_bad(c, i);
        }
        offset += hpmlc_stripe_size(it, p, me);
    }
    return bad;
}

/* Sends bytes [sent_at[r], sent_at[r + 1]) of `sent` to each rank r or, with `same`, this rank's own such range to all
   ranks; receives from rank r at received + received_at[r]. In round k this rank sends to the k-th rank after it and
   receives from the k-th before it. name: of the operation, for errors and the timeline. */
HPMLC_FN hpml_status hpmlc_exchange_move(hpml_comm *c, const char *name, const char *sent, const size_t *sent_at,
                                         bool same, char *received, const size_t *received_at)
{
    int         tag = hpmlc_enter(c, name, (int64_t)received_at[c->size], HPML_ELEMENT_BYTE, -1, NULL, -1);
    hpml_status status = HPML_OK;
    if (tag < 0) return hpml_ctx_status(c->ctx);
    for (int k = 1; k < c->size && status == HPML_OK; k++) {
        int to = (c->rank + k) % c->size, from = (c->rank - k + c->size) % c->size, part = same ? c->rank : to;
        c->round = k;
        status = hpmlc_round(c, tag, to, sent + sent_at[part], sent_at[part + 1] - sent_at[part], from,
                             received + received_at[from], received_at[from + 1] - received_at[from], NULL);
    }
    return hpmlc_leave(c, status);
}

/* Exchanges packed tensors: packs, sends, adds up, sends the sums, unpacks. HPML_ERR_NONFINITE: a rank had a NaN. */
HPMLC_FN hpml_status hpmlc_exchange_packed(hpml_comm *c, hpml_exchange *x)
{
    int     p = c->size, me = c->rank;
    double  start = hpml_comm_now(c);
    int64_t bad = hpmlc_exchange_pack(c, x);
    for (int r = 0; r < p; r++) memcpy(x->sent + x->sent_at[r], &bad, sizeof bad);
    hpmlc_span(c, "pack", start, hpml_comm_now(c), (int64_t)x->sent_at[p]);
    hpml_status status = hpmlc_exchange_move(c, "stripes", x->sent, x->sent_at, false, x->received, x->received_at);
    if (status != HPML_OK) return status;
    int64_t bad_sum = hpmlc_exchange_add(c, x);
    bad = 0;
    for (int r = 0; r < p; r++) hpmlc_merge_bad(&bad, hpmlc_message_from(x, r, me));
    if (!bad) bad = bad_sum;
    memcpy(x->sums + x->sum_at[me], &bad, sizeof bad);
    status = hpmlc_exchange_move(c, "sums", x->sums, x->sum_at, true, x->sums, x->sum_at);
    if (status != HPML_OK) return status;
    bad = 0;
    for (int r = 0; r < p; r++) hpmlc_merge_bad(&bad, x->sums + x->sum_at[r]);
    hpmlc_exchange_unpack(c, x);
    x->bad = bad;
    return bad ? HPML_ERR_NONFINITE : HPML_OK;
}

/* Copies elements [at, end) of the plain tensors, counted end to end, to x->fused, if an allreduce needs that copy;
   back: from x->fused to the tensors. name: of the span on the timeline. */
HPMLC_FN void hpmlc_exchange_fuse(hpml_comm *c, hpml_exchange *x, int64_t at, int64_t end, bool back, const char *name)
{
    double start = hpml_comm_now(c);
    if (!x->fused) return;
    for (const hpmlc_item *it = x->item; it < x->item + x->d.count; it++) {
        int64_t first = hpmlc_max(at, it->at), last = hpmlc_min(end, it->at + it->g.rows * it->g.cols);
        if (!it->plain || first >= last) continue;
        float *tensor = it->g.data + (first - it->at), *fused = x->fused + first;
        float *to   = back ? tensor : fused;
        memcpy(to, back ? fused : tensor, (size_t)(last - first) * sizeof(float));
    }
    hpmlc_span(c, name, start, hpml_comm_now(c), (end - at) * (int64_t)sizeof(float));
}

/* Adds up, over all ranks and by one allreduce, range number `part` of the plain tensors: their floats are counted from
   the first tensor to the last and cut into ranges of x->part floats. */
HPMLC_FN hpml_status hpmlc_exchange_part(hpml_comm *c, hpml_exchange *x, int64_t part)
{
    int64_t at = part * x->part, end = hpmlc_min(at + x->part, x->plain);
    hpmlc_set_label(c, x, true, at, end);
    hpmlc_exchange_fuse(c, x, at, end, false, "fuse");
    float *data = (x->fused ? x->fused : x->span) + at;
    hpml_status status = hpmlc_reduce_all(c, data, end - at, HPML_ELEMENT_F32, x->d.reduce, x->d.algorithm);
    if (status == HPML_OK) hpmlc_exchange_fuse(c, x, at, end, true, "unfuse");
    hpmlc_clear_label(c);
    return status;
}

HPMLC_FN hpml_status hpmlc_whole_run(hpml_comm *c, hpml_exchange *x);

/* Exchanges all packed tensors, by ranges of rows or as a whole. Sets x->bad: a tensor and rank with a NaN; 0: none. */
HPMLC_FN hpml_status hpmlc_exchange_others(hpml_comm *c, hpml_exchange *x)
{
    x->bad = 0;
    if (x->packed == 0) return HPML_OK;
    hpmlc_set_label(c, x, false, 0, 0);
    hpml_status status = x->whole ? hpmlc_whole_run(c, x) : hpmlc_exchange_packed(c, x);
    hpmlc_clear_label(c);
    return status;
}

/* Runs the hpml_exchange `user`. c: the exchange's communicator or, in the background thread, its twin. */
HPMLC_FN hpml_status hpmlc_exchange_on(hpml_comm *c, void *user)
{
    hpml_exchange *x = (hpml_exchange *)user;
    if (hpmlc_failed(c)) return hpml_ctx_status(c->ctx);
    x->runs++;
    hpml_status status = hpmlc_exchange_others(c, x), plain = HPML_OK;
    if (status != HPML_OK && status != HPML_ERR_NONFINITE) return status;
    for (int64_t k = 0; k * x->part < x->plain && plain == HPML_OK; k++) plain = hpmlc_exchange_part(c, x, k);
    return plain != HPML_OK ? plain : status;
}

/* Waits until more than *ready tensors are ready (final) on this rank, or all are, or a quarter of the deadline has
   passed. This quarter is the limit because the other ranks wait until this rank, too, reports which tensors are ready,
   and because an error is to name the tensor that is late, not this rank. Sets *ready to the number of tensors that are
   ready on this rank. False: the thread is being stopped. */
HPMLC_FN bool hpmlc_exchange_await(hpml_comm *c, hpml_exchange *x, int *ready)
{
    hpmlc_background *b = x->by;
    double            until = c->timeout < 0 || c->is_virtual ? 1e300 : hpml_now() + c->timeout / 4;
    unsigned          seen  = __atomic_load_n(&b->worker.changes, __ATOMIC_ACQUIRE);
    while (__atomic_load_n(&x->announced, __ATOMIC_ACQUIRE) == *ready && *ready < x->d.count && hpml_now() < until) {
        if (__atomic_load_n(&b->stop, __ATOMIC_ACQUIRE)) return false;
        hpmlc_sleep_at(c, &b->worker, &seen, until);
    }
    *ready = __atomic_load_n(&x->announced, __ATOMIC_ACQUIRE);
    return true;
}

/* The plain tensors are summed in ranges of x->part floats, one allreduce each; x->missing[k] is the number of tensors
   of range k that are not yet final on all ranks. Adds `by` (1 or -1) to this number for each range that contains
   elements of tensor i, and runs the allreduce of each such range for which the number is 0 now. */
HPMLC_FN hpml_status hpmlc_exchange_count(hpml_comm *c, hpml_exchange *x, int i, int by)
{
    const hpmlc_item *it = &x->item[i];
    hpml_status       status = HPML_OK;
    int64_t           last = it->plain ? (it->at + it->g.rows * it->g.cols - 1) / x->part : -1;
    for (int64_t k = it->at / x->part; k <= last && status == HPML_OK; k++) {
        x->missing[k] += by;
        if (x->missing[k] == 0) status = hpmlc_exchange_part(c, x, k);
    }
    return status;
}

/* Finds out which tensors are ready (final) on all ranks, and adds up the plain ones: after the maximum over all ranks,
   x->late[i] is 0 for such a tensor, else 1 + a rank where tensor i is not ready, the same on all ranks. Lowers *open,
   the number of tensors that are not ready everywhere, and sets *late to the number of one of these tensors. */
HPMLC_FN hpml_status hpmlc_exchange_negotiate(hpml_comm *c, hpml_exchange *x, int *open, int *late)
{
    double start = hpml_comm_now(c);
    int    n = x->d.count;
    for (int i = 0; i < n; i++)
        x->late[i] = __atomic_load_n(&x->ready[i], __ATOMIC_ACQUIRE) ? 0 : c->origin[c->rank] + 1;
    hpml_status status = hpmlc_reduce_all(c, x->late, n, HPML_ELEMENT_I32, HPML_MAX, HPML_AUTO);
    hpmlc_span(c, "negotiate", start, hpml_comm_now(c), 0);
    for (int i = 0; i < n && status == HPML_OK; i++) {
        if (x->late[i]) *late = i;
        if (x->late[i] || __atomic_load_n(&x->ready[i], __ATOMIC_RELAXED) == 2) continue;
        __atomic_store_n(&x->ready[i], 2, __ATOMIC_RELAXED);
        --*open;
        status = hpmlc_exchange_count(c, x, i, -1);
    }
    return status;
}

/* Runs exchange `user` as the background job of hpml_exchange_ready: agrees with other ranks on which tensors are final
   on all ranks, and adds up the plain ones of these; when all are final, exchanges the packed tensors. */
HPMLC_FN hpml_status hpmlc_exchange_agreed(hpml_comm *c, void *user)
{
    hpml_exchange *x = (hpml_exchange *)user;
    int            n = x->d.count, ready = 0, open = n, i;
    double         since = hpml_now();
    hpml_status    status = HPML_OK;
    x->runs++;
    for (i = 0; i < n; i++) hpmlc_exchange_count(c, x, i, 1);
    while (open > 0 && status == HPML_OK) {
        int before = open, late = 0;
        if (!hpmlc_exchange_await(c, x, &ready))
            return hpmlc_fail(c, HPML_ERR_STATE, "exchange: stopped with %d of %d tensors ready; call hpml_job_wait "
                              "before the communicator is freed", ready, n);
        status = hpmlc_exchange_negotiate(c, x, &open, &late);
        if (open < before || c->timeout < 0 || c->is_virtual) since = hpml_now();
        const char *name = x->item[late].g.name;
        if (status == HPML_OK && hpml_now() - since > c->timeout)
            return hpmlc_fail(c, HPML_ERR_TIMEOUT, "waited %g s for tensor %d \"%s\" to get ready on rank %d, "
                              "step %lld", c->timeout, late, name ? name : "", x->late[late] - 1, (long long)c->step);
    }
    if (status != HPML_OK) return status; /* hpml_job_wait of this job returns the error */
    status = hpmlc_exchange_others(c, x);
    __atomic_store_n(&x->announced, 0, __ATOMIC_RELEASE);
    for (i = 0; i < n; i++) __atomic_store_n(&x->ready[i], 0, __ATOMIC_RELEASE); /* for the next run */
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
    if (tensor < 0 || tensor >= x->d.count || __atomic_load_n(&x->ready[tensor], __ATOMIC_ACQUIRE)) {
        hpmlc_fail(x->c, HPML_ERR_ARGUMENT, "exchange: tensor %d of %d: no such one, or ready already", tensor,
                   x->d.count);
        return NULL;
    }
    __atomic_store_n(&x->ready[tensor], 1, __ATOMIC_RELEASE);
    bool last = __atomic_add_fetch(&x->announced, 1, __ATOMIC_ACQ_REL) == x->d.count;
    if (!x->job && (last || x->by->threaded)) x->job = hpml_background(x->c, hpmlc_exchange_agreed, x);
    else if (x->by->threaded) hpmlc_wake_at(x->by->twin, &x->by->worker);
    hpml_job *job = last ? x->job : NULL;
    if (last) x->job = NULL;
    return job;
}

HPML_API float *hpml_exchange_residual(hpml_exchange *x, int tensor, int64_t *count)
{
    if (!x || tensor < 0 || tensor >= x->d.count) return NULL;
    const hpmlc_item *it = &x->item[tensor];
    if (count) *count = it->residual ? it->g.rows * it->g.cols * x->d.leaves : 0;
    return it->residual;
}

HPML_API float *hpml_exchange_stripe(hpml_exchange *x, int tensor, int64_t *row, int64_t *rows)
{
    if (!x || tensor < 0 || tensor >= x->d.count) return NULL;
    if (row) *row = x->item[tensor].my_row;
    if (rows) *rows = x->item[tensor].my_rows;
    return x->item[tensor].stripe;
}

// ---------------------------------------------------------------------------------------------------------------------
// >>whole-codecs   top-k and low rank: codecs of whole tensors
// ---------------------------------------------------------------------------------------------------------------------
/* Codec top-k of gradient g with momentum m, its correction and factor masking: velocity u <- m u + g, residual
   v <- v + u; the k largest |v| are sent as pairs (index, value), and there u = v = 0. Every rank gathers the pairs of
   all ranks and adds them in the order of the ranks.
   Codec low rank: gradient and residual M = g + e (rows, cols) are sent as P Q^T with P (rows, r), Q (cols, r): from
   the Q of the step before one step of power iteration,
       P <- mean of M Q, made orthonormal;  Q <- mean of M^T P;  result P Q^T;  e <- M - P Q^T.
   P and Q are added up as f32, by any allreduce. With HPML_SUM the result is multiplied by the p ranks. */

struct hpmlc_whole { /* the functions of a codec that packs whole tensors */
    hpml_codec_kind kind;
    /* Returns how many floats the codec's arrays for a tensor take; at: memory that they get; NULL: only counts. */
    int64_t (*arrays)(const hpml_exchange *x, hpmlc_item *it, float *at);
    bool (*saves)(const hpml_exchange *x, const hpmlc_item *it); /* optional; false: sends the tensor plain */
    hpml_status (*run)(hpml_comm *c, hpml_exchange *x, hpmlc_item *it, bool finite); /* finite false: sends zeros */
    int64_t (*bytes)(const hpml_exchange *x, const hpmlc_item *it); /* returns bytes that this rank sends in one run */
};

HPMLC_FN int64_t hpmlc_topk_count(const hpml_exchange *x, const hpmlc_item *it)
{
    float ratio = x->d.codec.ratio > 0 ? x->d.codec.ratio : 0.01f;
    return hpmlc_max(1, (int64_t)((double)(it->g.rows * it->g.cols) * (double)ratio));
}

HPMLC_FN int64_t hpmlc_topk_arrays(const hpml_exchange *x, hpmlc_item *it, float *at)
{
    int64_t n = it->g.rows * it->g.cols;
    it->magnitude = at;
    it->velocity  = at ? at + n : NULL;
    it->pairs     = at ? at + 2 * n : NULL;
    return 2 * n + 2 * hpmlc_topk_count(x, it) * x->c->size;
}

/* Returns the k-th largest (k from 1) of n floats x, which are reordered (Hoare's selection). */
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
            t    = x[i];
            x[i] = x[j];
            x[j] = t;
            i++;
            j--;
        }
        if (k - 1 <= j) high = j;
        else if (k - 1 >= i) low = i;
        else break;
    }
    return x[k - 1];
}

/* Adds the gradient to velocity and residual, and writes this rank's k pairs (index in the tensor, value) behind the
   pairs of the ranks with lower numbers: first the values whose magnitude is above the k-th largest magnitude, then
   values whose magnitude equals it. */
HPMLC_FN void hpmlc_topk_pack(const hpml_comm *c, const hpml_exchange *x, hpmlc_item *it)
{
    int64_t k = hpmlc_topk_count(x, it), n = it->g.rows * it->g.cols, packed = 0;
    float  *pairs = it->pairs + 2 * k * c->rank, *u = it->velocity, *v = it->residual;
    for (int64_t i = 0; i < n; i++) {
        u[i] = x->d.codec.momentum * u[i] + it->g.data[i];
        v[i] += u[i];
        it->magnitude[i] = fabsf(v[i]);
    }
    const float least = hpmlc_select(it->magnitude, n, k);
    for (int pass = 0; pass < 2; pass++)
        for (int64_t i = 0; i < n && packed < k; i++) {
            bool above = fabsf(v[i]) > least, equal = fabsf(v[i]) == least && v[i] != 0;
            if (pass == 0 ? !above : !equal) continue;
            uint32_t place = (uint32_t)i;
            memcpy(&pairs[2 * packed], &place, sizeof place);
            pairs[2 * packed + 1] = v[i];
            u[i] = v[i] = 0;
            packed++;
        }
}

HPMLC_FN hpml_status hpmlc_topk_run(hpml_comm *c, hpml_exchange *x, hpmlc_item *it, bool finite)
{
    int64_t k = hpmlc_topk_count(x, it), n = it->g.rows * it->g.cols;
    float  *pairs = it->pairs;
    memset(pairs + 2 * k * c->rank, 0, (size_t)(2 * k) * sizeof *pairs);
    if (finite) hpmlc_topk_pack(c, x, it);
    hpml_status status = hpml_allgather(c, pairs, 8 * k * c->size, HPML_ELEMENT_BYTE);
    memset(it->g.data, 0, (size_t)n * sizeof(float));
    for (int64_t i = 0; i < k * c->size; i++) {
        uint32_t place;
        memcpy(&place, &pairs[2 * i], sizeof place);
        if ((int64_t)place < n) it->g.data[place] += pairs[2 * i + 1];
    }
    if (x->d.reduce == HPML_MEAN) hpmlc_divide(it->g.data, n, HPML_ELEMENT_F32, c->size);
    return status;
}

HPMLC_FN int64_t hpmlc_topk_bytes(const hpml_exchange *x, const hpmlc_item *it)
{
    return 8 * hpmlc_topk_count(x, it) * (x->c->size - 1);
}

/* Returns r, the number of columns of the factors P and Q that stand for a tensor (see >>whole-codecs). */
HPMLC_FN int64_t hpmlc_lowrank_of(const hpml_exchange *x, const hpmlc_item *it)
{
    return hpmlc_min(x->d.codec.lowrank > 0 ? x->d.codec.lowrank : 2, hpmlc_min(it->g.rows, it->g.cols));
}

HPMLC_FN bool hpmlc_lowrank_saves(const hpml_exchange *x, const hpmlc_item *it)
{
    return (it->g.rows + it->g.cols) * hpmlc_lowrank_of(x, it) < it->g.rows * it->g.cols;
}

HPMLC_FN int64_t hpmlc_lowrank_arrays(const hpml_exchange *x, hpmlc_item *it, float *at)
{
    int64_t rows = it->g.rows, cols = it->g.cols, r = hpmlc_lowrank_of(x, it);
    if (at) {
        hpml_rng rng; /* a fixed seed, because Q must begin the same on all ranks */
        it->m = at;
        it->p = at + rows * cols;
        it->q = it->p + rows * r;
        rng.seed    = 1;
        rng.stream  = (uint64_t)(it - x->item);
        rng.counter = 0;
        hpml_rng_fill_normal(&rng, it->q, cols * r);
    }
    return rows * cols + (rows + cols) * r;
}

/* Makes the r columns of matrix a, (n, r), orthonormal one after another (Gram & Schmidt, twice is enough). A column of
   zeros gets a direction as well, because a gradient of zeros would else leave the factors at zero for ever. */
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

HPMLC_FN hpml_status hpmlc_lowrank_run(hpml_comm *c, hpml_exchange *x, hpmlc_item *it, bool finite)
{
    const hpml_algorithm a = x->d.algorithm;
    int64_t              rows = it->g.rows, cols = it->g.cols, n = rows * cols, r = hpmlc_lowrank_of(x, it);
    float               *m = it->m, *p = it->p, *q = it->q;
    for (int64_t i = 0; i < n; i++) m[i] = (finite ? it->g.data[i] : 0) + it->residual[i];
    hpml_sgemm(c->ctx, false, false, rows, r, cols, 1, m, cols, q, r, 0, p, r);
    hpml_status status = hpmlc_reduce_all(c, p, rows * r, HPML_ELEMENT_F32, HPML_MEAN, a);
    if (status != HPML_OK) return status;
    hpmlc_orthonormal(p, rows, (int)r);
    hpml_sgemm(c->ctx, true, false, cols, r, rows, 1, m, cols, p, r, 0, q, r);
    status = hpmlc_reduce_all(c, q, cols * r, HPML_ELEMENT_F32, HPML_MEAN, a);
    if (status != HPML_OK) return status;
    hpml_sgemm(c->ctx, false, true, rows, cols, r, 1, p, r, q, r, 0, it->g.data, cols);
    for (int64_t i = 0; i < n; i++) it->residual[i] = m[i] - it->g.data[i];
    for (int64_t i = 0; i < n && x->d.reduce == HPML_SUM; i++) it->g.data[i] *= (float)c->size;
    return HPML_OK;
}

HPMLC_FN int64_t hpmlc_lowrank_bytes(const hpml_exchange *x, const hpmlc_item *it)
{
    int64_t r = hpmlc_lowrank_of(x, it);
    return hpmlc_allreduce_bytes(x->c, it->g.rows * r, sizeof(float), x->d.algorithm) +
           hpmlc_allreduce_bytes(x->c, it->g.cols * r, sizeof(float), x->d.algorithm);
}

static const hpmlc_whole hpmlc_whole_codecs[] = {
    { HPML_CODEC_TOPK, hpmlc_topk_arrays, NULL, hpmlc_topk_run, hpmlc_topk_bytes },
    { HPML_CODEC_LOWRANK, hpmlc_lowrank_arrays, hpmlc_lowrank_saves, hpmlc_lowrank_run, hpmlc_lowrank_bytes }
};

/* Returns the functions of a codec that packs whole tensors; NULL: the codec packs row by row. */
HPMLC_FN const hpmlc_whole *hpmlc_whole_codec(const hpml_codec_desc *codec)
{
    for (size_t i = 0; i < sizeof hpmlc_whole_codecs / sizeof hpmlc_whole_codecs[0]; i++)
        if (!codec->custom && hpmlc_whole_codecs[i].kind == codec->kind) return &hpmlc_whole_codecs[i];
    return NULL;
}

/* Sets it->plain to whether the codec, top-k or low rank, leaves the tensor unpacked; allocates the arrays of a tensor
   that is packed. False: no memory. */
HPMLC_FN bool hpmlc_whole_create(hpml_exchange *x, hpmlc_item *it)
{
    int64_t n = it->g.rows * it->g.cols, least = x->d.codec.min_elements;
    if (least <= 0) least = HPML_CODEC_MIN_ELEMENTS;
    bool small = it->g.rows == 1 || it->g.cols == 1 || n < least;
    it->plain = (small && !x->d.codec.compress_all) || (x->whole->saves && !x->whole->saves(x, it));
    if (it->plain) return true;
    it->residual = (float *)hpmlc_exchange_alloc(x, (size_t)(n + x->whole->arrays(x, it, NULL)) * sizeof(float));
    if (it->residual) x->whole->arrays(x, it, it->residual + n);
    return it->residual != NULL;
}

/* Exchanges the packed tensors one by one by top-k or low rank. HPML_ERR_NONFINITE, on all ranks: a rank had a NaN. */
HPMLC_FN hpml_status hpmlc_whole_run(hpml_comm *c, hpml_exchange *x)
{
    hpml_status status = HPML_OK;
    for (int t = 0; t < x->d.count && status == HPML_OK; t++) {
        hpmlc_item *it = &x->item[t];
        float       bad = 0;
        if (it->plain) continue;
        for (int64_t i = 0; i < it->g.rows * it->g.cols; i++) bad += it->g.data[i] - it->g.data[i]; /* adds 0 or NaN */
        if (bad != 0) x->bad = hpmlc_bad(c, t);
        status = x->whole->run(c, x, it, bad == 0);
    }
    if (status == HPML_OK) status = hpmlc_reduce_all(c, &x->bad, 1, HPML_ELEMENT_I64, HPML_MAX, HPML_AUTO);
    return status == HPML_OK && x->bad ? HPML_ERR_NONFINITE : status;
}

HPML_API int64_t hpml_exchange_bytes(const hpml_exchange *x)
{
    if (!x || x->c->size == 1) return 0;
    int64_t bytes = x->bytes;
    for (int64_t at = 0; at < x->plain; at += x->part)
        bytes += hpmlc_allreduce_bytes(x->c, hpmlc_min(x->part, x->plain - at), sizeof(float), x->d.algorithm);
    if (!x->whole || x->packed == 0) return bytes;
    bytes += hpmlc_allreduce_bytes(x->c, 1, sizeof x->bad, HPML_AUTO); /* of hpmlc_whole_run */
    for (const hpmlc_item *it = x->item; it < x->item + x->d.count; it++)
        if (!it->plain) bytes += x->whole->bytes(x, it);
    return bytes;
}

// =====================================================================================================================
// PART III   STEP TOGETHER: data parallelism, mixing
// =====================================================================================================================

// ---------------------------------------------------------------------------------------------------------------------
// >>plan   the fields of a plan in one list, the rules of a plan
// ---------------------------------------------------------------------------------------------------------------------
/* All that is done with the fields of a plan one by one - text, parsing, ranges, differences, stepping through plans -
   is done from one list; what fields exclude each other is a list of rules. Both are pure. In the conditions of both
   lists, p is the plan and f the facts. */

/* X(name in texts, member, kind, largest value, condition: whether the field matters, text: where the field may be set,
   values other than zero that hpml_plan_next steps through). The smallest value is 0. If the text is NULL, the field
   may be set in every plan, else only where it matters, which the text describes. For flags (BOOL) and words (enums)
   hpml_plan_next steps through all values. A condition depends only on fields further up in the list. */
#define HPMLC_PLAN_FIELDS(X) \
    X("data", data, I32, 65536, true, NULL, 0) \
    X("pipe", pipe, I32, 65536, true, NULL, 0) \
    X("tensor", tensor, I32, 65536, true, NULL, 0) \
    X("sequence", sequence, I32, 65536, true, NULL, 0) \
    X("expert", expert, I32, 65536, true, NULL, 0) \
    X("schedule", schedule, SCHEDULE, HPML_PIPE_COUNT - 1, p->pipe > 1, "plans with pipe above 1", 0) \
    X("micro", micro, I32, 65536, p->pipe > 1 && !hpmlc_pipe_stashes(p->schedule), \
      "pipe above 1 without schedules stash and vertical", 8) \
    X("chunks", chunks, I32, 64, p->pipe > 1 && p->schedule == HPML_PIPE_INTERLEAVED, "schedule interleaved", 3) \
    X("strategy", strategy, STRATEGY, HPML_STRATEGY_COUNT - 1, true, NULL, 0) \
    X("servers", servers, I32, 65535, hpmlc_plan_serves(p), "strategies ps, backup, ssp, async, federated", 1, 2) \
    X("backup", backup, I32, 65535, p->strategy == HPML_STRATEGY_BACKUP, "strategy backup", 1) \
    X("staleness", staleness, I32, INT32_MAX, p->strategy == HPML_STRATEGY_SSP, "strategy ssp", 3) \
    X("share", share, F32, 1, p->strategy == HPML_STRATEGY_FEDERATED, "strategy federated", 0.5) \
    X("sum", sum, BOOL, 1, p->strategy <= HPML_STRATEGY_BACKUP, "strategies sync, ps and backup", 0) \
    X("exact", exact, BOOL, 1, p->strategy <= HPML_STRATEGY_PS, "strategies sync and ps", 0) \
    X("leaf", leaf, I64, 9e18, p->exact && p->strategy == HPML_STRATEGY_SYNC, NULL, 2) \
    X("recompute", recompute, BOOL, 1, true, NULL, 0) \
    X("memory", memory, I64, 9e18, true, NULL, 1 << 30) \
    X("delayed", delayed, BOOL, 1, p->strategy == HPML_STRATEGY_SYNC, "strategy sync", 0) \
    X("route", route, ROUTE, HPML_ROUTE_COUNT - 1, p->strategy <= HPML_STRATEGY_ASYNC, \
      "strategies that send gradients", 0) \
    X("codec", codec.kind, CODEC, HPML_CODEC_COUNT - 1, p->strategy <= HPML_STRATEGY_ASYNC, \
      "strategies that send gradients", 0) \
    X("codec.threshold", codec.threshold, F32, 1e30, p->codec.kind == HPML_CODEC_TWOBIT, NULL, 0.01) \
    X("codec.ratio", codec.ratio, F32, 1, p->codec.kind == HPML_CODEC_TOPK, NULL, 0.1) \
    X("codec.momentum", codec.momentum, F32, 1, p->codec.kind == HPML_CODEC_TOPK, NULL, 0.9) \
    X("codec.lowrank", codec.lowrank, I32, INT32_MAX, p->codec.kind == HPML_CODEC_LOWRANK, NULL, 4) \
    X("codec.min_elements", codec.min_elements, I64, 9e18, p->codec.kind > HPML_CODEC_BF16, NULL, 16) \
    X("codec.compress_all", codec.compress_all, BOOL, 1, p->codec.kind > HPML_CODEC_BF16, NULL, 0) \
    X("codec.no_feedback", codec.no_feedback, BOOL, 1, p->codec.kind != HPML_CODEC_NONE, NULL, 0) \
    X("shard", shard, I32, 3, hpmlc_plan_may_shard(p), NULL, 1, 2, 3) \
    X("codec.seed", codec.seed, U64, 1.8446744073709552e19, p->codec.custom != NULL, NULL, 1) \
    X("warm_steps", warm_steps, I64, 9e18, p->codec.kind != HPML_CODEC_NONE, NULL, 2) \
    X("algorithm", algorithm, ALGORITHM, HPML_ALGORITHM_COUNT - 1, !hpmlc_plan_serves(p), NULL, 0) \
    X("global_batch", global_batch, I64, 9e18, true, NULL, 7) \
    X("bucket_bytes", bucket_bytes, I64, 9e18, hpmlc_plan_sends_gradients(p), "strategy sync", 1) \
    X("no_overlap", no_overlap, BOOL, 1, hpmlc_plan_sends_gradients(p), "strategy sync", 0) \
    X("sync_batchnorm", sync_batchnorm, BOOL, 1, p->strategy == HPML_STRATEGY_SYNC, "strategy sync", 0) \
    X("period", period, I32, INT32_MAX, hpmlc_plan_meets(p), "strategies local, block, elastic, federated", 2, 10) \
    X("elastic", elastic, F32, 1, p->strategy == HPML_STRATEGY_ELASTIC, "strategy elastic", 0.1) \
    X("outer_lr", outer_lr, F32, 1e30, p->strategy == HPML_STRATEGY_BLOCK, "strategy block", 0.7) \
    X("outer_momentum", outer_momentum, F32, 1, p->strategy == HPML_STRATEGY_BLOCK, "strategy block", 0.9) \
    X("outer_nesterov", outer_nesterov, BOOL, 1, p->strategy == HPML_STRATEGY_BLOCK, "strategy block", 0) \
    X("topology", topology, TOPOLOGY, HPML_TOPOLOGY_ALL, p->strategy == HPML_STRATEGY_GOSSIP, "strategy gossip", 0) \
    X("seed", seed, U64, 1.8446744073709552e19, p->strategy >= HPML_STRATEGY_GOSSIP, \
      "strategies gossip and federated", 1) \
    X("history", history, I32, INT32_MAX, true, NULL, 1)

/* The rules for plans: RULE(condition that refuses a plan, message: fields, reason, way out). Where a rule of NEEDS
   refuses a plan, other values of fields that come later in hpml_plan_next's order may make the plan valid; where
   another rule refuses it, no such values do, so hpml_plan_next skips them. */
#define HPMLC_PLAN_NEEDS(RULE) \
    RULE(hpmlc_plan_serves(p) && p->servers == 0, "the strategy has no servers; set servers to 1 or more, or take " \
         "strategy sync") \
    RULE(p->strategy == HPML_STRATEGY_BACKUP && (p->backup == 0 || p->backup >= f->ranks - p->servers), \
         "backup is the number of workers without whose gradients a step goes on; set 1 or more, but fewer than " \
         "there are workers (ranks - servers), or take strategy ps") \
    RULE(hpmlc_plan_most(p, f) > f->batch, \
         "a rank's share of global_batch is more samples than the model's batch; take a smaller global_batch, more " \
         "ranks, or a larger batch")
#define HPMLC_PLAN_RULES(RULE) \
    RULE(p->_begin || p->_end || p->codec._begin || p->codec._end, \
         "the plan or its codec was not cleared; set all of it to zero first") \
    RULE(p->servers >= f->ranks, "all ranks are servers, and none computes gradients; take fewer servers or more " \
         "ranks") \
    RULE(hpmlc_plan_serves(p) && p->warm_steps > 0, "ranks count their steps by themselves with servers, so " \
         "warm_steps would end at different times; leave it out, or take strategy sync") \
    RULE(hpmlc_plan_serves(p) && hpmlc_whole_codec(&p->codec), "servers have ranges of the floats, and codec topk " \
         "and lowrank pack whole tensors; take codec onebit, twobit, bf16 or none") \
    RULE(hpmlc_plan_steps_ranges(p) && f->steps_tensors, "servers step ranges of the floats, and this optimizer " \
         "needs whole tensors; take sgd, adam or another that steps each number by itself") \
    RULE(hpmlc_plan_steps_ranges(p) && p->servers > 1 && f->clips, "the trainer's clip_norm needs the norm of the " \
         "whole gradient, and each of the servers has a range; take servers=1 or clip_norm 0") \
    RULE(p->algorithm == HPML_NATIVE && !f->native, "algorithm native is the transport's own allreduce, and this " \
         "transport has none; take algorithm auto or ring") \
    RULE(p->leaf > f->batch, "leaf is more samples than the model's batch; take a smaller leaf or a larger batch") \
    RULE(hpmlc_factors_is_chosen(NULL, p) && (hpmlc_exact_is_chosen(NULL, p) || p->delayed), "exact and delayed " \
         "work on the gradients that ranks exchange, and routes factors and hybrid exchange none; take route " \
         "allreduce, or leave both out") \
    RULE(hpmlc_factors_is_chosen(NULL, p) && hpmlc_plan_packs(p), "a codec packs gradients, and routes factors and " \
         "hybrid exchange none; take route allreduce or codec none") \
    RULE(hpmlc_factors_is_chosen(NULL, p) && f->accumulate > 1, "routes factors and hybrid send the factors of one " \
         "batch, and the trainer's accumulate adds up several; take route allreduce or set accumulate to 1") \
    RULE(hpmlc_factors_is_chosen(NULL, p) && f->no_factors, "routes factors and hybrid read the inputs of layers as " \
         "f32 in host memory, and here they are halves or on a device; take route allreduce") \
    RULE(p->shard > 0 && p->strategy != HPML_STRATEGY_SYNC, "shard cuts the sums that strategy sync makes in each " \
         "step; take strategy sync or shard 0") \
    RULE(p->shard > 0 && (p->exact || p->delayed || p->route != HPML_ROUTE_ALLREDUCE), "with shard each rank gets " \
         "the sum of its own part of the gradients, and exact, delayed and other routes give all ranks all of it; " \
         "leave them out, or shard 0") \
    RULE(p->shard > 0 && hpmlc_plan_packs(p), "shard adds up gradients as they are, and a codec packs them for an " \
         "exchange that gives all ranks all of the sum; take codec none or shard 0") \
    RULE(p->shard > 0 && p->algorithm != HPML_AUTO && p->algorithm != HPML_RING, "shard adds up and gathers by the " \
         "two halves of a ring; take algorithm auto or ring, or shard 0") \
    RULE(p->shard > 0 && f->steps_whole, "this optimizer steps whole tensors, and with shard each rank has a part of " \
         "them; take another optimizer or shard 0") \
    RULE(p->shard > 0 && f->device, "shard cuts arrays in host memory, and this trainer's are on a device; take " \
         "shard 0, or the CPU backend") \
    RULE(f->host_states && p->strategy != HPML_STRATEGY_SYNC, "this strategy shares or averages states of the " \
         "optimizer in the memory of a device, and with the trainer's host_optimizer they are in host memory; take " \
         "strategy sync, or leave host_optimizer out") \
    RULE(p->shard > 1 && p->pipe > 1, "shard 2 and 3 exchange gradients in each micro-batch, and of pipe's " \
         "micro-batches ranks may have different numbers; take shard=1, or tensor in place of pipe") \
    RULE(p->recompute && p->memory > 0, "memory chooses what is computed again, and recompute computes all of it " \
         "again; leave one of them out") \
    RULE(p->exact && p->delayed, "exact and delayed exclude each other; set one of them") \
    RULE(hpmlc_exact_is_chosen(NULL, p) && p->sum, "exact sums are divided by the samples, so exact excludes " \
         "sum; set one of them") \
    RULE(p->exact && p->warm_steps > 0, "exact sums keep a residual for each leaf from the first step on, so exact " \
         "excludes warm_steps; set one of them") \
    RULE(p->exact && hpmlc_whole_codec(&p->codec), "exact sums go with codecs that pack rows, and codec topk and " \
         "lowrank pack whole tensors; take codec onebit, twobit, bf16 or none") \
    RULE(p->exact && p->sync_batchnorm, "exact sums compute leaves one by one, and sync_batchnorm normalizes a whole " \
         "batch; set one of them") \
    RULE(hpmlc_exact_is_chosen(NULL, p) && f->accumulate > 1, "exact sums go with one batch a step, not with " \
         "the trainer's accumulate; set accumulate to 1") \
    RULE(hpmlc_exact_is_chosen(NULL, p) && f->mixes_samples, "exact sums compute leaves one by one, and this " \
         "model mixes the samples of a batch; leave exact out") \
    RULE(p->exact && f->overflows, "in f16 gradients overflow now and then, and the integers of exact sums cannot " \
         "carry an infinity; take bf16, a fixed loss_scale, or leave exact out") \
    RULE(hpmlc_plan_packs(p) && f->overflows, "in f16 gradients overflow now and then, and a codec cannot carry an " \
         "infinity; take bf16, a fixed loss_scale, or codec none") \
    RULE(p->delayed && f->overflows, "with delayed a gradient is applied in the step after its own, in f16 under " \
         "another loss scale perhaps; take bf16 or a fixed loss_scale, or leave delayed out") \
    RULE(!hpmlc_plan_sends_gradients(p) && f->overflows, "in f16 a gradient that overflows skips a step, with this " \
         "strategy of its own rank alone, whose steps are then not those of the others; take bf16, a fixed " \
         "loss_scale, or strategy sync") \
    RULE(f->sparse && (p->strategy == HPML_STRATEGY_FEDERATED || p->exact || p->delayed || p->shard > 0 || \
                       p->route != HPML_ROUTE_ALLREDUCE || hpmlc_plan_packs(p)), \
         "a sparse embedding has rows as its gradient, which travel without exact, delayed, codec, shard and other " \
         "routes, and not with federated, whose clients send parameters; take the plain sync, ps, async or hogwild, " \
         "or leave .sparse of the embedding false") \
    RULE(hpmlc_plan_splits(p) && (p->servers > 0 || p->strategy == HPML_STRATEGY_HOGWILD), "servers and hogwild take " \
         "the gradient of one rank at a time, and with pipe, tensor, sequence or expert a rank has a part of it; " \
         "take strategy sync, or leave these axes out") \
    RULE(hpmlc_plan_shares_loss(p) && p->strategy != HPML_STRATEGY_SYNC, "ranks of sequence and expert add up " \
         "gradients in each step, and this strategy adds up none; take strategy sync, or tensor in place of these " \
         "axes") \
    RULE(hpmlc_plan_shares_loss(p) && (p->exact || p->delayed || p->sum), "with sequence and expert some gradients " \
         "are added up over data alone, which exact, delayed and sum do not do; leave these out, or take tensor in " \
         "place of sequence and expert") \
    RULE(p->pipe > 1 && p->micro > f->batch, "a micro-batch has one sample or more; take a smaller micro or a larger " \
         "batch") \
    RULE(p->pipe > 1 && f->device, "a pipeline sends arrays in host memory from stage to stage, and here they are on " \
         "a device; take pipe=1") \
    RULE(p->pipe > 1 && p->sync_batchnorm, "sync_batchnorm adds up numbers of all ranks for each micro-batch, and " \
         "ranks may have different numbers of micro-batches; leave it out: with pipe, running statistics are those " \
         "of all micro-batches of a rank") \
    RULE(p->pipe > 1 && f->mixes_samples && p->micro != 1 && !hpmlc_pipe_stashes(p->schedule), "micro-batches are " \
         "parts of a batch, and an op of this model mixes its samples; take micro=1") \
    RULE(hpmlc_plan_flows(p) && (hpmlc_plan_packs(p) || p->delayed || p->strategy != HPML_STRATEGY_SYNC || \
                                 hpmlc_plan_shares_loss(p) || (p->shard && hpmlc_plan_workers(p, f->ranks) > 1)), \
         "schedules stash and vertical have several versions of the weights, which each stage steps by itself, so " \
         "they go without sequence, expert, shard, codec, delayed and other strategies than sync; leave these out, " \
         "or take schedule 1f1b") \
    RULE(hpmlc_plan_flows(p) && f->accumulate > 1, "with schedules stash and vertical every batch is a step, and the " \
         "trainer's accumulate adds up several; set accumulate to 1, or take schedule 1f1b") \
    RULE(p->pipe > 1 && p->exact, "exact computes leaf after leaf, and with pipe several micro-batches are in " \
         "flight; leave exact out, or take tensor in place of pipe") \
    RULE(hpmlc_plan_splits(p) && hpmlc_whole_codec(&p->codec), "codec topk and lowrank pack whole tensors, and with " \
         "pipe, tensor, sequence or expert a rank has a part of them; take codec onebit, twobit, bf16 or none") \
    RULE(hpmlc_plan_splits(p) && p->route != HPML_ROUTE_ALLREDUCE, "routes factors and hybrid send the inputs of " \
         "whole layers, and with pipe, tensor, sequence or expert a rank has a part of them; take route allreduce") \
    RULE(hpmlc_plan_splits(p) && f->sparse, "a sparse embedding has rows of the whole table as its gradient, and " \
         "with pipe, tensor, sequence or expert a rank may have a part of it; leave .sparse of the embedding false") \
    RULE(hpmlc_plan_splits(p) && f->steps_whole, "this optimizer steps whole tensors, and with pipe, tensor, " \
         "sequence or expert a rank has a part of them; take another optimizer, or leave these axes out") \
    RULE(hpmlc_plan_splits(p) && f->device && f->steps_tensors, "this optimizer needs norms of whole tensors, " \
         "which on a device are not added up over ranks; take sgd or adam, or leave pipe, tensor, sequence and " \
         "expert out") \
    RULE(hpmlc_plan_splits(p) && f->overflows, "in f16 a gradient that overflows skips a step, and with pipe, " \
         "tensor, sequence or expert on one rank alone; take bf16 or a fixed loss_scale") \
    RULE(p->strategy == HPML_STRATEGY_HOGWILD && !f->together, "strategy hogwild shares values in the memory of one " \
         "process, not in virtual time, with MPI or on a device; take transport threads on the host, or sync")

HPMLC_FN bool hpmlc_plan_serves(const hpml_plan *p)
{
    return (p->strategy >= HPML_STRATEGY_PS && p->strategy <= HPML_STRATEGY_ASYNC) ||
           p->strategy == HPML_STRATEGY_FEDERATED;
}

/* Returns whether servers run the optimizer, each on a range of the floats. */
HPMLC_FN bool hpmlc_plan_steps_ranges(const hpml_plan *p)
{
    return hpmlc_plan_serves(p) && p->strategy != HPML_STRATEGY_FEDERATED;
}

/* Returns how many ranks share one copy of the model and its samples: pipe * tensor * sequence, at most 1e15. */
HPMLC_FN int64_t hpmlc_plan_replica(const hpml_plan *p)
{
    const int32_t axes[] = { p->pipe, p->tensor, p->sequence };
    int64_t       ranks  = 1;
    for (int i = 0; i < 3; i++) ranks *= hpmlc_max(axes[i], 1);
    return ranks;
}

/* Returns whether the plan splits the model: it has several ranks on an axis other than data. */
HPMLC_FN bool hpmlc_plan_splits(const hpml_plan *p) { return hpmlc_plan_replica(p) > 1 || p->expert > 1; }

/* Returns whether the plan changes how much memory a trainer needs, so that memory is taken late (hpml_ctx_defer). */
HPMLC_FN bool hpmlc_plan_defers(const hpml_plan *p)
{
    return p->shard > 0 || p->pipe > 1 || p->recompute || p->memory > 0;
}

/* Returns whether the schedule is one in which every micro-batch is a step of its own: STASH or VERTICAL. */
HPMLC_FN bool hpmlc_pipe_stashes(hpml_pipe_kind kind)
{
    return kind == HPML_PIPE_STASH || kind == HPML_PIPE_VERTICAL;
}

/* Returns whether the micro-batches of several steps are in flight at the same time. */
HPMLC_FN bool hpmlc_plan_flows(const hpml_plan *p) { return p->pipe > 1 && hpmlc_pipe_stashes(p->schedule); }

/* Returns whether a rank keeps only parts of the parameters, or of their gradients or optimizer state. */
HPMLC_FN bool hpmlc_plan_cuts(const hpml_plan *p) { return hpmlc_plan_splits(p) || p->shard > 0; }

/* Returns whether gradients of split parameters are added up over fewer ranks than gradients of whole parameters. */
HPMLC_FN bool hpmlc_plan_shares_loss(const hpml_plan *p) { return p->sequence > 1 || p->expert > 1; }

/* Returns into how many shares the ranks divide a batch. Ranks that compute the same share hold parts of one model;
   servers, which are the last ranks, compute no share. */
HPMLC_FN int hpmlc_plan_workers(const hpml_plan *p, int ranks)
{
    int64_t workers = p->servers > 0 && p->servers < ranks ? ranks - p->servers : ranks;
    return (int)hpmlc_max(workers / hpmlc_plan_replica(p), 1);
}

typedef enum hpmlc_field_kind {
    HPMLC_FIELD_BOOL, HPMLC_FIELD_I32, HPMLC_FIELD_I64, HPMLC_FIELD_U64, HPMLC_FIELD_F32,
    HPMLC_FIELD_STRATEGY, HPMLC_FIELD_CODEC, HPMLC_FIELD_ALGORITHM, HPMLC_FIELD_TOPOLOGY,
    HPMLC_FIELD_ROUTE, HPMLC_FIELD_SCHEDULE /* HPMLC_FIELD_STRATEGY and later: values are words */
} hpmlc_field_kind;

typedef struct hpmlc_field {
    const char      *name, *where; /* where: plans in which the field may be set; NULL: all */
    hpmlc_field_kind kind;
    size_t           at;           /* offset in hpml_plan */
    double           most;         /* largest value */
    double           tries[4];     /* values, except 0, that hpml_plan_next tries; 0 ends the list */
} hpmlc_field;

#define HPMLC_FIELD(name, member, kind, most, matters, where, ...) \
    { name, where, HPMLC_FIELD_##kind, offsetof(hpml_plan, member), (double)(most), { __VA_ARGS__ } },
static const hpmlc_field hpmlc_fields[] = { HPMLC_PLAN_FIELDS(HPMLC_FIELD) };
#undef HPMLC_FIELD
enum { HPMLC_FIELDS = sizeof hpmlc_fields / sizeof hpmlc_fields[0] };

HPML_API const char *hpml_strategy_name(hpml_strategy_kind strategy)
{
    static const char *const names[HPML_STRATEGY_COUNT] = { "sync", "ps", "backup", "ssp", "async", "local", "block",
                                                            "elastic", "gossip", "federated", "hogwild" };
    return (unsigned)strategy < HPML_STRATEGY_COUNT ? names[strategy] : NULL;
}

HPML_API const char *hpml_route_name(hpml_route route)
{
    static const char *const names[HPML_ROUTE_COUNT] = { "allreduce", "factors", "hybrid" };
    return (unsigned)route < HPML_ROUTE_COUNT ? names[route] : NULL;
}

/* Returns whether a search may try shard > 0 with the values of the plan's other fields. */
HPMLC_FN bool hpmlc_plan_may_shard(const hpml_plan *p)
{
    return p->strategy == HPML_STRATEGY_SYNC && !p->exact && !p->delayed && p->route == HPML_ROUTE_ALLREDUCE &&
           p->codec.kind == HPML_CODEC_NONE && !p->codec.custom;
}

/* Returns whether ranks exchange gradients; else they exchange parameters. */
HPMLC_FN bool hpmlc_plan_sends_gradients(const hpml_plan *p) { return p->strategy == HPML_STRATEGY_SYNC; }

/* Returns whether all ranks exchange parameters together at meetings, which are .period steps apart. */
HPMLC_FN bool hpmlc_plan_meets(const hpml_plan *p)
{
    return (p->strategy >= HPML_STRATEGY_LOCAL && p->strategy <= HPML_STRATEGY_ELASTIC) ||
           p->strategy == HPML_STRATEGY_FEDERATED;
}

/* Sets matters[i] to whether field i of the list HPMLC_PLAN_FIELDS changes the training that plan p describes. */
HPMLC_FN void hpmlc_fields_matter(const hpml_plan *p, bool matters[HPMLC_FIELDS])
{
    int i = 0;
#define HPMLC_FIELD(name, member, kind, most, condition, where, ...) matters[i++] = (condition);
    HPMLC_PLAN_FIELDS(HPMLC_FIELD)
#undef HPMLC_FIELD
}

HPMLC_FN size_t hpmlc_field_size(const hpmlc_field *field)
{
    if (field->kind == HPMLC_FIELD_BOOL) return sizeof(bool);
    return field->kind == HPMLC_FIELD_I64 || field->kind == HPMLC_FIELD_U64 ? sizeof(int64_t) : sizeof(int32_t);
}

/* Returns the value of a field of the plan as a whole number; for a field of type F32 sets *real and returns 0. */
HPMLC_FN int64_t hpmlc_field_get(const hpmlc_field *field, const hpml_plan *plan, float *real)
{
    const char *at = (const char *)plan + field->at;
    int32_t     narrow = 0;
    int64_t     wide   = 0;
    bool        flag   = false;
    *real = 0;
    switch (field->kind) {
    case HPMLC_FIELD_BOOL: memcpy(&flag, at, sizeof flag); return flag;
    case HPMLC_FIELD_F32: memcpy(real, at, sizeof *real); return 0;
    case HPMLC_FIELD_I64:
    case HPMLC_FIELD_U64: memcpy(&wide, at, sizeof wide); return wide;
    default: memcpy(&narrow, at, sizeof narrow); return narrow;
    }
}

HPMLC_FN void hpmlc_field_set(const hpmlc_field *field, hpml_plan *plan, int64_t whole, float real)
{
    char   *at = (char *)plan + field->at;
    int32_t narrow = (int32_t)whole;
    bool    flag   = whole != 0;
    switch (field->kind) {
    case HPMLC_FIELD_BOOL: memcpy(at, &flag, sizeof flag); return;
    case HPMLC_FIELD_F32: memcpy(at, &real, sizeof real); return;
    case HPMLC_FIELD_I64:
    case HPMLC_FIELD_U64: memcpy(at, &whole, sizeof whole); return;
    default: memcpy(at, &narrow, sizeof narrow); return;
    }
}

/* Returns the name of a value of an enum field of the plan, such as "ring" for a topology; NULL: the field's values are
   plain numbers, or the value is out of range. */
HPMLC_FN const char *hpmlc_field_word(const hpmlc_field *field, int64_t value)
{
    static const char *const topologies[] = { "ring", "wheel", "pairs", "all" };
    if (value < 0 || (double)value > field->most) return NULL;
    if (field->kind == HPMLC_FIELD_STRATEGY) return hpml_strategy_name((hpml_strategy_kind)value);
    if (field->kind == HPMLC_FIELD_CODEC) return hpml_codec_get((hpml_codec_kind)value)->name;
    if (field->kind == HPMLC_FIELD_ROUTE) return hpml_route_name((hpml_route)value);
    if (field->kind == HPMLC_FIELD_SCHEDULE) return hpml_pipe_name((hpml_pipe_kind)value);
    if (field->kind == HPMLC_FIELD_TOPOLOGY) return topologies[value];
    return field->kind == HPMLC_FIELD_ALGORITHM ? hpml_algorithm_name((hpml_algorithm)value) : NULL;
}

// ---------------------------------------------------------------------------------------------------------------------
// >>plan-text   plans as text; defaults, the check, the next plan
// ---------------------------------------------------------------------------------------------------------------------
/* Appends to the text `to`, which has *length characters, with a format as printf's; adds to *length the number of
   characters that a large enough buffer would get. */
HPMLC_PRINTF(3, 4)
HPMLC_FN void hpmlc_append(const hpmlc_text *to, size_t *length, const char *format, ...)
{
    va_list args;
    bool    fits = to->text && *length < to->size;
    size_t  left = fits ? to->size - *length : 0;
    va_start(args, format);
    int n = vsnprintf(fits ? to->text + *length : NULL, left, format, args);
    va_end(args);
    if (n > 0) *length += (size_t)n;
}

HPMLC_FN void hpmlc_field_text(const hpmlc_field *field, const hpml_plan *plan, const hpmlc_text *to, size_t *length)
{
    float       real;
    char        number[32];
    int64_t     whole = hpmlc_field_get(field, plan, &real);
    const char *word  = hpmlc_field_word(field, whole);
    snprintf(number, sizeof number, "%.9g", (double)real);
    for (char *at = number; *at; at++)
        if (*at == ',') *at = '.'; /* some locales have a decimal comma */
    if (word) hpmlc_append(to, length, "%s", word);
    else if (field->kind == HPMLC_FIELD_F32) hpmlc_append(to, length, "%s", number);
    else if (field->kind == HPMLC_FIELD_U64) hpmlc_append(to, length, "%llu", (unsigned long long)whole);
    else hpmlc_append(to, length, "%lld", (long long)whole);
}

/* Writes to `to` the error that `field` of a plan cannot have `value`, a text of n characters, and which values it can
   have; returns HPML_ERR_ARGUMENT. */
HPMLC_FN hpml_status hpmlc_field_refuse(const hpmlc_field *field, const char *value, int n, const hpmlc_text *to)
{
    size_t length = 0;
    hpmlc_append(to, &length, "plan: %s=%.*s is not possible; take ", field->name, n, value);
    if (field->kind == HPMLC_FIELD_F32) hpmlc_append(to, &length, "a number from 0 to %g", field->most);
    else if (field->kind < HPMLC_FIELD_F32) hpmlc_append(to, &length, "a whole number from 0 to %.10g", field->most);
    for (int64_t i = 0; hpmlc_field_word(field, i); i++)
        hpmlc_append(to, &length, "%s%s", i > 0 ? ", " : "", hpmlc_field_word(field, i));
    return HPML_ERR_ARGUMENT;
}

/* Returns whether the field has the same value in two plans. */
HPMLC_FN bool hpmlc_field_same(const hpmlc_field *field, const hpml_plan *a, const hpml_plan *b)
{
    return memcmp((const char *)a + field->at, (const char *)b + field->at, hpmlc_field_size(field)) == 0;
}

/* Returns whether the plan's value of `field` is from 0 to field->most (and a number, not a NaN). */
HPMLC_FN bool hpmlc_field_in_range(const hpmlc_field *field, const hpml_plan *plan)
{
    float   real;
    int64_t whole = hpmlc_field_get(field, plan, &real);
    if (field->kind == HPMLC_FIELD_U64) return true;
    return whole >= 0 && (double)whole <= field->most && real >= 0 && (double)real <= field->most;
}

HPML_API int hpml_plan_text(const hpml_plan *plan, bool all, char *buffer, size_t size)
{
    const hpmlc_text to = { buffer, size };
    HPMLC_ZERO(hpml_plan, zero);
    size_t length = 0;
    if (size > 0) buffer[0] = 0;
    for (const hpmlc_field *field = hpmlc_fields; plan && field < hpmlc_fields + HPMLC_FIELDS; field++) {
        if (!all && hpmlc_field_same(field, plan, &zero)) continue;
        hpmlc_append(&to, &length, "%s%s=", length > 0 ? "," : "", field->name);
        hpmlc_field_text(field, plan, &to, &length);
    }
    return (int)length;
}

/* Parses a decimal number such as 2.5e-3, with a point in all locales, unlike strtod. *end: where the number ends. */
HPMLC_FN double hpmlc_decimal(char *text, char **end)
{
    double value = 0;
    long   shift = 0;
    bool   point = false;
    for (; (*text >= '0' && *text <= '9') || (*text == '.' && !point); text++) {
        if (*text == '.') {
            point = true;
            continue;
        }
        value = 10 * value + (*text - '0');
        shift -= point;
    }
    if (*text == 'e') shift += strtol(text + 1, &text, 10);
    *end = text;
    return shift < 0 ? value / pow(10, (double)-shift) : value * pow(10, (double)shift);
}

/* Sets a field of the plan to the value that n characters of `text` spell; false: they spell no valid value. */
HPMLC_FN bool hpmlc_field_parse(const hpmlc_field *field, const char *text, size_t n, hpml_plan *plan)
{
    char  value[40], *end = value;
    float real = 0;
    int64_t whole = 0;
    if (n == 0 || n >= sizeof value) return false;
    memcpy(value, text, n);
    value[n] = 0;
    if (field->kind >= HPMLC_FIELD_STRATEGY) {
        while (hpmlc_field_word(field, whole) && strcmp(hpmlc_field_word(field, whole), value) != 0) whole++;
        end = value + n;
    } else if (!(value[0] >= '0' && value[0] <= '9') && value[0] != '.') {
        return false;
    } else if (field->kind == HPMLC_FIELD_F32) {
        real = (float)hpmlc_decimal(value, &end);
    } else {
        errno = 0;
        if (field->kind == HPMLC_FIELD_U64) whole = (int64_t)strtoull(value, &end, 10);
        else whole = strtoll(value, &end, 10);
        if (errno != 0) return false;
    }
    if (*end || (field->kind != HPMLC_FIELD_U64 && (double)whole > field->most)) return false;
    hpmlc_field_set(field, plan, whole, real);
    return hpmlc_field_in_range(field, plan);
}

/* Writes an error: the plan has no field `name` (n characters); and lists the fields that the plan has. */
HPMLC_FN hpml_status hpmlc_field_unknown(const char *name, int n, const hpmlc_text *to)
{
    size_t length = 0;
    hpmlc_append(to, &length, "plan: there is no field \"%.*s\"; fields are", n, name);
    for (int i = 0; i < HPMLC_FIELDS; i++) hpmlc_append(to, &length, "%s %s", i > 0 ? "," : "", hpmlc_fields[i].name);
    return HPML_ERR_ARGUMENT;
}

HPML_API hpml_status hpml_plan_parse(const char *text, hpml_plan *plan, char *error, size_t size)
{
    const hpmlc_text         to  = { error, size };
    const hpmlc_field *const end = hpmlc_fields + HPMLC_FIELDS;
    if (!text || !plan) return hpmlc_refuse(&to, HPML_ERR_ARGUMENT, "plan: no text or no plan");
    hpml_plan result = *plan;
    while (*text) {
        size_t             n = strcspn(text, ","), name = strcspn(text, "=,");
        const hpmlc_field *field = hpmlc_fields;
        while (field < end && (strlen(field->name) != name || memcmp(field->name, text, name) != 0)) field++;
        if (field == end) return hpmlc_field_unknown(text, (int)name, &to);
        size_t begin = name < n ? name + 1 : n;
        if (!hpmlc_field_parse(field, text + begin, n - begin, &result))
            return hpmlc_field_refuse(field, text + begin, (int)(n - begin), &to);
        text += text[n] ? n + 1 : n;
    }
    *plan = result;
    return HPML_OK;
}

HPML_API int hpml_plan_differs(const hpml_plan *from, const hpml_plan *to, char *buffer, size_t size)
{
    const hpmlc_text out = { buffer, size };
    size_t           length = 0;
    int              count = 0;
    if (size > 0) buffer[0] = 0;
    for (const hpmlc_field *field = hpmlc_fields; from && to && field < hpmlc_fields + HPMLC_FIELDS; field++) {
        if (hpmlc_field_same(field, from, to)) continue;
        hpmlc_append(&out, &length, "%s%s ", count++ > 0 ? ", " : "", field->name);
        hpmlc_field_text(field, from, &out, &length);
        hpmlc_append(&out, &length, " to ");
        hpmlc_field_text(field, to, &out, &length);
    }
    return count;
}

/* Returns whether strategy sync adds up gradients exactly, in leaves (fixed-size parts) of the batch: form "exact". */
HPMLC_FN bool hpmlc_exact_is_chosen(hpml_comm *c HPMLC_UNUSED, const hpml_plan *p)
{
    return p->exact && p->strategy == HPML_STRATEGY_SYNC;
}

/* Returns whether dense layers may send the factors of their gradients instead of the gradients, as plan.route says. It
   is the function is_chosen of form "factors" of strategy sync. */
HPMLC_FN bool hpmlc_factors_is_chosen(hpml_comm *c HPMLC_UNUSED, const hpml_plan *p)
{
    return p->route != HPML_ROUTE_ALLREDUCE;
}

/* Returns whether plan p has a codec, which packs gradients; a packed gradient can hold no infinity. */
HPMLC_FN bool hpmlc_plan_packs(const hpml_plan *p) { return p->codec.kind != HPML_CODEC_NONE || p->codec.custom; }

/* Returns how many samples of the global batch the rank with the most gets. */
HPMLC_FN int64_t hpmlc_plan_most(const hpml_plan *plan, const hpml_plan_facts *facts)
{
    hpml_plan whole;
    hpml_plan_resolve(plan, facts, &whole);
    int64_t grain  = hpmlc_exact_is_chosen(NULL, &whole) ? whole.leaf : 1; /* samples that stay on one rank */
    int64_t grains = (whole.global_batch - 1) / grain + 1;
    return ((grains - 1) / hpmlc_plan_workers(plan, facts->ranks) + 1) * grain;
}

/* Returns `otherwise` for 0, 0 for HPML_ZERO, which stands for a true zero, and other values as they are. */
HPMLC_FN float hpmlc_default(float value, float otherwise)
{
    if (value == 0) return otherwise;
    return value == HPML_ZERO ? 0 : value;
}

HPML_API void hpml_plan_resolve(const hpml_plan *plan, const hpml_plan_facts *facts, hpml_plan *out)
{
    *out = *plan;
    if (out->global_batch == 0) out->global_batch = hpmlc_plan_workers(plan, facts->ranks) * facts->batch;
    if (hpmlc_exact_is_chosen(NULL, out) && out->leaf == 0) out->leaf = hpmlc_min(facts->batch, 8);
    if (out->history == 0) out->history = 64;
    if (out->pipe > 1 && out->micro == 0 && !hpmlc_pipe_stashes(out->schedule))
        out->micro = (int32_t)hpmlc_min(4 * (int64_t)out->pipe, facts->batch);
    if (hpmlc_plan_meets(out) && out->period == 0) out->period = 1;
    const float workers = (float)hpmlc_plan_workers(plan, facts->ranks);
    if (out->strategy == HPML_STRATEGY_ELASTIC) out->elastic = hpmlc_default(out->elastic, 0.9f / workers);
    if (out->strategy != HPML_STRATEGY_BLOCK) return;
    out->outer_lr       = hpmlc_default(out->outer_lr, 1);
    out->outer_momentum = hpmlc_default(out->outer_momentum, 1 - 1 / workers);
}

/* Returns the sentence of the first rule that refuses plan p for the facts f; NULL: no rule does. Fields are chosen in
   the order of the list of fields: *is_final becomes true if p stays refused whatever values the later fields get,
   those that are not chosen yet; else false. */
HPMLC_FN const char *hpmlc_plan_refused(const hpml_plan *p, const hpml_plan_facts *f, bool *is_final)
{
#define HPMLC_RULE(is_refused, sentence) if (is_refused) return sentence;
    *is_final = true;
    HPMLC_PLAN_RULES(HPMLC_RULE)
    *is_final = false;
    HPMLC_PLAN_NEEDS(HPMLC_RULE)
#undef HPMLC_RULE
    return NULL;
}

/* Checks one field of the plan: its value's range, and that it is 0 unless it matters for this plan (`matters`). The
   text of an error goes to `to`. */
HPMLC_FN hpml_status hpmlc_field_check(const hpml_plan *plan, const hpmlc_field *field, bool matters,
                                       const hpmlc_text *to)
{
    char             text[40];
    const hpmlc_text value = { text, sizeof text };
    size_t           length = 0;
    HPMLC_ZERO(hpml_plan, zero);
    if (!hpmlc_field_in_range(field, plan)) {
        hpmlc_field_text(field, plan, &value, &length);
        return hpmlc_field_refuse(field, text, (int)length, to);
    }
    if (matters || !field->where || hpmlc_field_same(field, plan, &zero)) return HPML_OK;
    return hpmlc_refuse(to, HPML_ERR_UNSUPPORTED, "plan: %s is for %s, and this plan has strategy=%s; set %s to 0 or "
                        "change the strategy", field->name, field->where, hpml_strategy_name(plan->strategy),
                        field->name);
}

/* Checks that the plan's axes, multiplied, and its servers fit `ranks` ranks. The text of an error goes to `to`. */
HPMLC_FN hpml_status hpmlc_axes_check(const hpml_plan *p, int ranks, const hpmlc_text *to)
{
    const int32_t    size[HPML_AXES] = { p->data, p->pipe, p->tensor, p->sequence, p->expert };
    char             text[160];
    const hpmlc_text axes = { text, sizeof text };
    size_t           length = 0;
    double           product = 1; /* a double, because the product may be too large for an integer */
    for (int i = 0; i < HPML_AXES; i++) {
        if (size[i] == 0 || (size[i] == 1 && i > 0)) continue;
        hpmlc_append(&axes, &length, "%s%s %d", length > 0 ? " x " : "", hpml_axis_name((hpml_axis)i), size[i]);
        product *= size[i];
    }
    const double left = ranks - p->servers;
    if (left < 1 || product == left || (p->data == 0 && fmod(left, product) == 0)) return HPML_OK;
    if (p->data == 0)
        return hpmlc_refuse(to, HPML_ERR_ARGUMENT, "plan: %.0f ranks are no multiple of %s = %.0f ranks; make the "
                            "product a divisor of %.0f, or start another number of ranks", left, text, product, left);
    return hpmlc_refuse(to, HPML_ERR_ARGUMENT, "plan: %s + servers %d = %.0f ranks, and %d were started; make the "
                        "product %.0f, leave out data, which is then what is left, or start %.0f ranks", text,
                        p->servers, product + p->servers, ranks, left, product + p->servers);
}

/* Replaces the fields of the plan that HPML_PLAN in the environment names. */
HPMLC_FN hpml_status hpmlc_plan_environment(hpml_comm *c, hpml_plan *plan)
{
    const char *text = getenv("HPML_PLAN");
    char        why[480];
    hpml_status status = text ? hpml_plan_parse(text, plan, why, sizeof why) : HPML_OK;
    return status == HPML_OK ? status : hpmlc_fail(c, status, "HPML_PLAN in the environment: %s", why);
}

HPML_API hpml_status hpml_plan_check(const hpml_plan *plan, const hpml_plan_facts *facts, char *why, size_t size)
{
    const hpmlc_text to = { why, size };
    bool             matters[HPMLC_FIELDS], is_final;
    char             text[300];
    hpml_status      status = HPML_OK;
    if (!plan || !facts || facts->ranks < 1 || facts->batch < 1)
        return hpmlc_refuse(&to, HPML_ERR_ARGUMENT, "plan: no plan, or facts without ranks or batch");
    hpmlc_fields_matter(plan, matters);
    for (int i = 0; i < HPMLC_FIELDS && status == HPML_OK; i++)
        status = hpmlc_field_check(plan, &hpmlc_fields[i], matters[i], &to);
    if (status == HPML_OK) status = hpmlc_axes_check(plan, facts->ranks, &to);
    const char *sentence = status == HPML_OK ? hpmlc_plan_refused(plan, facts, &is_final) : NULL;
    if (!sentence) return status;
    hpml_plan_text(plan, false, text, sizeof text);
    return hpmlc_refuse(&to, HPML_ERR_UNSUPPORTED, "plan: %s (plan \"%s\", %d ranks, batch %lld)", sentence, text,
                        (int)facts->ranks, (long long)facts->batch);
}

/* Sets a field of the plan to the next value of the list that begins with zero and goes on with the field's typical
   values (all values of a flag or a word). After the last value sets it to zero and returns false. */
HPMLC_FN bool hpmlc_field_next(const hpmlc_field *field, hpml_plan *plan)
{
    const int tries = (int)(sizeof field->tries / sizeof field->tries[0]);
    float     real;
    int64_t   whole = hpmlc_field_get(field, plan, &real);
    double    now   = field->kind == HPMLC_FIELD_F32 ? (double)real : (double)whole, next = 0;
    if (field->kind >= HPMLC_FIELD_STRATEGY || field->kind == HPMLC_FIELD_BOOL) {
        if (now < field->most) next = now + 1;
    } else {
        int i = 0;
        while (now != 0 && i < tries && field->tries[i] != 0 && (double)(float)field->tries[i] != now) i++;
        i += now != 0;
        if (i < tries) next = field->tries[i];
    }
    hpmlc_field_set(field, plan, (int64_t)next, (float)next);
    return next != 0;
}

HPML_API bool hpml_plan_next(hpml_plan *plan, const hpml_plan_facts *facts)
{
    bool matters[HPMLC_FIELDS], is_final = false;
    int  i = 0;
    do {
        if (!is_final) i = HPMLC_FIELDS - 1; /* else later fields, which are 0, cannot make the plan valid */
        hpmlc_fields_matter(plan, matters);
        while (i >= 0 && !(matters[i] && hpmlc_field_next(&hpmlc_fields[i], plan))) i--;
        if (i < 0) return false;
    } while (hpmlc_plan_refused(plan, facts, &is_final) || hpml_plan_check(plan, facts, NULL, 0) != HPML_OK);
    return true;
}

// ---------------------------------------------------------------------------------------------------------------------
// >>distribute   data parallelism: layout of the parameters, buckets of gradients
// ---------------------------------------------------------------------------------------------------------------------
/* Data parallelism: p ranks have a copy of one model each. Rank r computes the gradient g_r of the mean loss over its
   n_r samples of the global batch; all ranks then make the optimizer step with the same sum

       g = sum of n_r g_r / sum of n_r        (.sum: g = sum of g_r)

   >>distribute and >>distribute-step know where parameters and gradients lie, cut the gradients into buckets that are
   exchanged as one, add up loss, samples and running statistics, and keep the report. What is exchanged, when,
   and what the optimizer gets is a strategy: a row of hpmlc_strategies (>>strategies), with a section and a struct of
   its own and the functions of hpmlc_strategy, which the trainer's hooks call. Adding a strategy is a section, a row
   and a word of hpml_strategy_kind. Strategy sync has several rows, its forms: exact, delayed, by links.

   Buckets hold gradients from the last layer to the first, because the backward pass makes them final in this order:
   the exchange of one bucket overlaps with the computation of the next (Li et al. 2020, "PyTorch Distributed"). */

/* Work on a communicator, for which a step waits: a background job or, without a thread, done when it was started. */
typedef struct hpmlc_task {
    hpml_job   *job;    /* NULL: the work is done, and `status` is its result */
    hpml_status status;
} hpmlc_task;

typedef struct hpmlc_bucket {
    hpml_exchange *x, *warm;     /* warm: for the first .warm_steps steps, uncompressed; NULL: none */
    hpml_exchange *now;          /* the one of x and warm that this step uses; NULL: before the first step */
    hpmlc_task     task;         /* the bucket's exchange in this step */
    hpml_comm     *c;            /* ranks over which these gradients are added up, see hpmlc_ranks_of */
    int            count, ready; /* number of tensors; how many gradients are final in this step */
    bool           adds;         /* shard 2, 3: add to this rank's block, which has the sum of earlier micro-batches */
    int64_t        at, floats;   /* the bucket's range of the trainer's array of gradients */
} hpmlc_bucket;

typedef struct hpmlc_buckets {
    hpmlc_bucket *item;          /* (count) the buckets */
    int           count, posted; /* posted: buckets whose exchange has been started in this step */
} hpmlc_buckets;

/* Where parameters and gradients lie. The trainer has all gradients in one array, in the order of the parameters, each
   padded to HPML_GRADIENT_ALIGN floats: see hpml_trainer_array. */
typedef struct hpmlc_layout {
    int         params;          /* parameters of the context, running statistics ("buffers") included */
    int        *bucket_of;       /* (params) number of each parameter's bucket; -1: it is in none */
    int        *by_name;         /* (params) indices of the parameters in the order of their names */
    float      *first;           /* the trainer's array of gradients, in the memory of the backend */
    int64_t     span;            /* floats of the trainer's array of gradients, padding included */
    float      *host;            /* (span) gradients on the host: `first`, or a copy of a device's array; NULL: the
                                    strategy exchanges them on the device */
    int64_t     grad_total;      /* floats of all gradients; next: of all running statistics; without padding */
    int64_t     buffer_total;
    int64_t     batch;           /* samples that the model's input holds */
    int64_t     grain;           /* so many consecutive samples of the global batch stay on one rank; 0: 1 */
    hpmlc_host_view view;           /* host access to arrays of the trainer */
} hpmlc_layout;

/* How many gradients a rank adds to the sum over ranks: one or, with some strategies, one for each leaf of samples. */
typedef struct hpmlc_copies {
    int64_t first, count, all;   /* this rank's contributions are [first, first + count) of all */
} hpmlc_copies;

enum { HPMLC_SAMPLES, HPMLC_LOSS, HPMLC_BAD, HPMLC_BAD_RANK, HPMLC_STATS };

/* Numbers that are added up over all ranks in each step, in addition to gradients. */
typedef struct hpmlc_stats {
    double    *sum;              /* (HPMLC_STATS + buffer_total) samples, loss times samples, number of ranks with a
                                    loss that is NaN or infinite, such a rank; running statistics times samples */
    hpmlc_task task;             /* the allreduce of `sum` in this step */
    float     *buffers;          /* (buffer_total) scratch: running statistics side by side, in the order of by_name */
    double     samples, loss;    /* this rank's samples in this step; loss times samples */
} hpmlc_stats;

typedef struct hpmlc_reporting {
    hpml_distribute_report r;    /* sums over the steps since the last reset */
    double                 began;    /* hpml_comm_now() at the last reset */
    hpml_counters          at_reset; /* what this rank had sent at the last reset, see hpmlc_sent */
    hpml_counters          split_at_reset; /* of .at_reset, what was sent along axes other than data */
    hpml_step_row         *row;      /* (history) ring of the rows of the last steps */
    int64_t                rows;     /* number of rows that have been written to the ring .row */
    hpml_distribute_report at_row;   /* value of .r when the last row of a step was written */
    double                 row_time; /* hpml_comm_now() when the last row of a step was written */
    hpml_counters          row_sent; /* what this rank had sent when the last row of a step was written */
} hpmlc_reporting;

/* A trial of the batch search (>>batch-search), a short training: divergence is no error, no step is delayed. */
typedef struct hpmlc_trial {
    bool   on;
    double loss, samples;        /* sums over the steps: loss times samples; samples */
} hpmlc_trial;

/* Memory for gathering, from all ranks, the rows of a sparse table's gradient, see >>distribute-rows. */
typedef struct hpmlc_gathered {
    float  *memory;              /* (floats) */
    int64_t floats;
} hpmlc_gathered;

typedef struct hpmlc_states   hpmlc_states; /* list of what checkpoints hold, see >>state */
typedef struct hpmlc_factors  hpmlc_factors;
typedef struct hpmlc_strategy hpmlc_strategy;

/* Starts the exchange of one bucket and returns the status of the start only. An error of the exchange itself, if it is
   done at once, is kept in the bucket's task, because all ranks must go on with the next bucket. */
typedef hpml_status hpmlc_start_fn(hpml_distributed *d, hpmlc_bucket *b);

struct hpml_distributed {
    hpml_trainer         *t;
    hpml_comm            *all;        /* all ranks */
    hpml_comm            *c;          /* ranks that average gradients: all, or of a mesh the replicas */
    hpml_ctx             *ctx;
    hpml_plan             plan;
    const hpmlc_strategy *strategy;
    void                 *own;        /* struct of the strategy, for example hpmlc_delayed */
    bool                  data_known; /* true: the ranks have checked that all have the same data */
    bool                  background; /* tasks are jobs of the communicator's background thread */
    bool                  shared;     /* ranks share one copy of the parameters, which rank 0 steps */
    hpmlc_start_fn       *start;
    int64_t             (*next)(void *d, hpml_trainer *t, int64_t epoch, int64_t batches, bool is_last); /* the hook */
    hpml_status         (*need)(void *d, hpml_trainer *t, const hpml_moment *at); /* the hook */
    hpmlc_layout          layout;
    hpmlc_buckets         buckets;
    hpmlc_copies          copies;
    hpmlc_stats           stats;
    hpmlc_reporting       report;
    hpmlc_trial           trial;
    hpmlc_gathered        rows;
    hpmlc_pipeline       *pipeline;   /* this rank has a stage of the model; NULL: it has the whole model */
    hpmlc_factors        *factors;    /* layers that send factors, see >>strategy-factors; NULL: the route has none */
    int32_t               accumulate, micro; /* micro-batches in an update; those done in this update */
    void                 *memory;     /* the newest block of hpmlc_dist_alloc; NULL: none */
};

struct hpmlc_strategy {
    hpml_strategy_kind kind;  /* of the plan; a strategy with several forms has a row for each */
    const char *name;         /* of the form in the plan; begins its arrays' names in checkpoints; NULL: one form */
    const char *fixed_batch;  /* why the global batch cannot be changed; NULL: it can */
    const char *pending;      /* array of a checkpoint with gradients that only this form applies; NULL: none */
    bool (*is_chosen)(hpml_comm *c, const hpml_plan *plan); /* optional: whether the form fits; NULL: always */
    bool (*open)(hpml_distributed *d);   /* takes memory, makes exchanges; collective; false: an error on the context */
    /* Computes the gradient of `samples` samples of this rank, and their mean *loss, by hpmlc_dist_pass or another way.
       After the last micro-batch of an update it may start the exchange for which `update` waits. */
    hpml_status (*begin)(hpml_distributed *d, int64_t samples, float *loss);
    hpml_status (*gradient)(hpml_distributed *d, int param); /* optional: `param`'s gradient is final */
    hpml_status (*update)(hpml_distributed *d); /* completes the exchange, makes the optimizer step */
    hpml_status (*finish)(hpml_distributed *d); /* optional: sets all ranks' parameters to the training's result */
    bool (*state)(hpml_distributed *d, hpmlc_states *list); /* lists what checkpoints hold; false: an error */
    void (*close)(hpml_distributed *d); /* optional: releases what `open` took without hpmlc_dist_alloc */
};

#define HPMLC_BLOCK 64 /* bytes before memory of hpmlc_dist_alloc, with the address of the next older block */

/* Returns `bytes` of memory, zeroed, which hpmlc_dist_close releases. NULL: an error on the context. */
HPMLC_FN void *hpmlc_dist_alloc(hpml_distributed *d, size_t bytes)
{
    char *block = (char *)hpml_ctx_alloc(d->ctx, HPMLC_BLOCK + bytes, NULL);
    if (!block) return NULL;
    memcpy(block, &d->memory, sizeof d->memory);
    d->memory = block;
    return block + HPMLC_BLOCK;
}

/* Returns the number by which error texts name this rank: its number in hpml_comm_create's communicator. */
HPMLC_FN int hpmlc_rank(const hpml_distributed *d) { return d->c->origin[d->c->rank]; }

HPMLC_FN hpml_tensor *hpmlc_param(const hpml_distributed *d, int i) { return hpml_param_at(d->ctx, i); }

/* Returns the floats of p on this rank if p is a running statistic of batchnorm of this rank's stage, else 0. */
HPMLC_FN int64_t hpmlc_buffer_floats(const hpml_distributed *d, const hpml_tensor *p)
{
    const hpml_mesh *m    = hpml_comm_mesh(d->all);
    const bool       away = d->pipeline && p->param->stage != m->at[HPML_AXIS_PIPE];
    return p->param->buffer && !away ? hpml_tensor_count(p) : 0;
}

/* Returns the ranks that have the same part as this rank of parameters split over `axis` (DATA: the same whole). */
HPMLC_FN hpml_comm *hpmlc_ranks_of_axis(const hpml_distributed *d, hpml_axis axis)
{
    return d->all->mesh ? d->all->mesh->rest[axis] : d->c;
}

/* Returns the ranks over which the gradient of parameter p is added up: those that have the same part of p. */
HPMLC_FN hpml_comm *hpmlc_ranks_of(const hpml_distributed *d, const hpml_tensor *p)
{
    return hpmlc_ranks_of_axis(d, p->param->axis);
}

/* Returns where the gradient of parameter p begins in the trainer's array of gradients, in floats. */
HPMLC_FN int64_t hpmlc_gradient_at(const hpml_distributed *d, const hpml_tensor *p)
{
    return hpml_trainer_place(d->t, p->param->index);
}

HPMLC_FN void hpmlc_gradient_of(hpml_tensor *p, float *data, hpml_gradient *g)
{
    g->name = p->name;
    g->data = data;
    g->rows = p->ndim > 1 ? p->shape[0] : 1;
    g->cols = hpml_tensor_count(p) / g->rows;
}

/* Copies floats [at, at + n) of gradients on a device to layout.host; hpmlc_host_apply copies all of them back. */
HPMLC_FN void hpmlc_host_fetch(hpml_distributed *d, int64_t at, int64_t n)
{
    const hpmlc_layout *l = &d->layout;
    if (l->host != l->first) hpmlc_host_view_copy(&l->view, l->host + at, l->first + at, n, false);
}

/* Returns the factor that makes gradients, divided by `full` samples, means over `samples`; 1 if the plan sets .sum. */
HPMLC_FN float hpmlc_rescale(const hpml_distributed *d, double samples, double full)
{
    return d->plan.sum || samples <= 0 || samples == full ? 1 : (float)(full / samples);
}

/* Scales the gradients in layout.host of parameters that are split over SEQUENCE or EXPERT. Such a gradient is a mean
   over the ranks with the same part of the parameter, which are fewer than those of d->c, so it is multiplied by their
   share of d->c, because each rank's loss counts 1 / d->c->size in the trained loss. Sums (plan.sum) are not scaled. */
HPMLC_FN void hpmlc_parts_scale(const hpml_distributed *d)
{
    for (int i = 0; i < d->buckets.count; i++) {
        const hpmlc_bucket *b = &d->buckets.item[i];
        if (b->c->size == d->c->size) continue;
        const float factor = (float)b->c->size / (float)d->c->size;
        for (int64_t k = b->at; k < b->at + b->floats && !d->plan.sum; k++) d->layout.host[k] *= factor;
    }
}

/* Makes the optimizer step with the gradients in layout.host, which are sums over `samples` samples divided by `full`,
   and which are scaled here to means over `samples`. */
HPMLC_FN hpml_status hpmlc_host_apply(hpml_distributed *d, double samples, double full)
{
    const hpmlc_layout *l = &d->layout;
    const float         scale = hpmlc_rescale(d, samples, full);
    hpmlc_parts_scale(d);
    if (scale != 1)
        for (int64_t k = 0; k < l->span; k++) l->host[k] *= scale;
    if (l->host != l->first) hpmlc_host_view_copy(&l->view, l->host, l->first, l->span, true);
    hpml_status status = d->pipeline ? hpmlc_pipeline_join(d->pipeline) : HPML_OK;
    if (status == HPML_OK && !(d->shared && d->c->rank > 0)) status = hpml_trainer_apply(d->t, 0, l->params);
    hpml_status others = d->shared ? hpml_barrier(d->c) : HPML_OK; /* no rank goes on before rank 0 has stepped */
    return status != HPML_OK ? status : others;
}

/* Starts fn(c, user) as a task: in the background or, without a thread, at once. Returns the status of the start. */
HPMLC_FN hpml_status hpmlc_task_start(const hpml_distributed *d, hpmlc_task *task, hpml_comm *c, hpml_rank_fn *fn,
                                      void *user)
{
    if (d->background) task->job = hpml_background(c, fn, user);
    else task->status = fn(c, user);
    return d->background && !task->job ? hpml_ctx_status(d->ctx) : HPML_OK;
}

/* Waits for a task and returns the status of its work, once: a second call returns HPML_OK. */
HPMLC_FN hpml_status hpmlc_task_wait(hpmlc_task *task)
{
    hpml_status status = task->job ? hpml_job_wait(task->job) : task->status;
    task->job    = NULL;
    task->status = HPML_OK;
    return status;
}

/* Sets d->background: whether exchanges run in a background thread. Such a thread pays off where there is a network to
   wait for or a core to spare; else it takes from the computation what it gains, and waking it costs time. All ranks
   decide alike: if the thread pays off on one rank, all ranks have one. */
HPMLC_FN void hpmlc_background_choose(hpml_distributed *d)
{
    hpml_comm *c = d->all;
    int32_t    near = 0, pays = hpmlc_has_delay(c);
    for (int i = 0; i < c->size; i++) near += c->t->one_process || c->node[i] == c->node[c->rank];
    if (c->size > 1 && near * hpml_ctx_threads(c->ctx) < hpmlc_cores(1)) pays = 1;
    hpmlc_reduce_all(c, &pays, 1, HPML_ELEMENT_I32, HPML_MAX, HPML_AUTO);
    d->background = pays != 0;
}

/* Fills in e, an exchange's desc: algorithm, sum or mean, and codec of the plan; `count` tensors g. */
HPMLC_FN void hpmlc_exchange_settings(const hpml_distributed *d, hpml_exchange_desc *e, const hpml_gradient *g,
                                      int count)
{
    memset(e, 0, sizeof *e);
    e->tensors   = g;
    e->count     = count;
    e->algorithm = d->plan.algorithm;
    e->reduce    = d->plan.sum ? HPML_SUM : HPML_MEAN;
    e->codec     = d->plan.codec;
}

/* Creates the exchange objects of bucket b on c: one that compresses as e says and, for the first warm_steps training
   steps, one that does not compress. mode: where the tensors are in memory. False: an error on the context. */
HPMLC_FN bool hpmlc_bucket_exchanges(const hpml_distributed *d, hpmlc_bucket *b, hpml_comm *c, hpml_exchange_desc *e,
                                     hpmlc_exchange_mode mode)
{
    b->x = hpmlc_exchange_make(c, e, mode);
    if (!b->x) return false;
    b->x->bucket = (int)(b - d->buckets.item) + 1;
    if (d->plan.warm_steps == 0) return true;
    memset(&e->codec, 0, sizeof e->codec);
    b->warm = hpmlc_exchange_make(c, e, mode);
    if (b->warm) b->warm->bucket = b->x->bucket;
    return b->warm != NULL;
}

/* Creates the exchange objects of bucket b, whose gradients are g: for exchanges in host memory or, where
   d->layout.host (the gradients in host memory) is NULL, in device memory by the communicator's device link. False: an
   error. */
HPMLC_FN bool hpmlc_bucket_open(hpml_distributed *d, hpmlc_bucket *b, const hpml_gradient *g)
{
    hpml_exchange_desc e;
    hpmlc_exchange_settings(d, &e, g, b->count);
    return hpmlc_bucket_exchanges(d, b, b->c, &e, d->layout.host ? HPMLC_PADDED : HPMLC_PADDED_LINKED);
}

HPMLC_FN hpml_status hpmlc_host_start(hpml_distributed *d, hpmlc_bucket *b)
{
    return hpmlc_task_start(d, &b->task, b->now->c, hpmlc_exchange_on, b->now);
}

/* Cuts the trained parameters, last first, into buckets of at least `bytes` (or .bucket_bytes of the plan, if set),
   such that the same set of ranks exchanges all gradients of a bucket, and calls `open` for each bucket, with its
   gradients g; open NULL: only cuts, because the trainer has no memory yet. gradients: the array of layout.span floats
   that has the gradients to exchange. False: an error. */
HPMLC_FN bool hpmlc_buckets_create(hpml_distributed *d, float *gradients, int64_t bytes,
                                   bool (*open)(hpml_distributed *d, hpmlc_bucket *b, const hpml_gradient *g))
{
    hpmlc_layout  *l = &d->layout;
    hpml_gradient *g = (hpml_gradient *)hpml_ctx_alloc(d->ctx, sizeof *g * (size_t)l->params, NULL);
    d->buckets.item  = (hpmlc_bucket *)hpmlc_dist_alloc(d, sizeof *d->buckets.item * (size_t)(l->params + 1));
    if (!g || !d->buckets.item) return false;
    int64_t limit = d->plan.bucket_bytes > 0 ? d->plan.bucket_bytes : bytes;
    int64_t at = l->span, end = at, filled = 0;
    int     count = 0;
    for (int i = l->params - 1; i >= -1; i--) {
        hpml_tensor  *p = i >= 0 ? hpmlc_param(d, i) : NULL;
        hpml_comm    *c = p ? hpmlc_ranks_of(d, p) : NULL;
        hpmlc_bucket *b = &d->buckets.item[d->buckets.count];
        const bool    none = p && (open ? !p->grad : hpml_trainer_place(d->t, i) < 0);
        if (none || (p && hpml_param_rows(p, NULL))) continue; /* sparse: see >>distribute-rows */
        if (count > 0 && (c != b->c || filled >= limit)) {
            d->buckets.count++;
            b->count  = count;
            b->at     = at;
            b->floats = end - at;
            if (open && !open(d, b, g)) return false;
            end    = at;
            count  = 0;
            filled = 0;
        }
        if (!p) break;
        l->bucket_of[i] = d->buckets.count;
        d->buckets.item[d->buckets.count].c = c;
        at = hpmlc_gradient_at(d, p);
        if (open) hpmlc_gradient_of(p, gradients + at, &g[count]);
        count++;
        filled += (int64_t)sizeof(float) * hpml_tensor_count(p);
    }
    hpml_ctx_release(d->ctx, g);
    return true;
}

/* Opens a strategy that exchanges gradients on the host, bucket by bucket by `start`: sets layout.host to the trainer's
   array of gradients or, where that is on a device, to host memory for a copy. gradients: the array, laid out alike,
   whose gradients are exchanged; NULL: layout.host. False: an error. */
HPMLC_FN bool hpmlc_host_open(hpml_distributed *d, float *gradients, hpmlc_start_fn *start)
{
    hpmlc_layout *l = &d->layout;
    hpmlc_background_choose(d);
    d->start = start;
    l->host  = l->first;
    if (l->view.device) l->host = (float *)hpmlc_dist_alloc(d, (size_t)l->span * sizeof(float));
    if (!l->host) return false;
    int64_t bytes = d->background ? (int64_t)1 << 18 : INT64_MAX;
    return hpmlc_buckets_create(d, gradients ? gradients : l->host, bytes, hpmlc_bucket_open);
}

/* Starts the exchanges of the buckets in their order, before the first bucket with a gradient that is not yet final. */
HPMLC_FN hpml_status hpmlc_buckets_post(hpml_distributed *d)
{
    hpmlc_buckets *all    = &d->buckets;
    bool           warm   = hpml_trainer_step_count(d->t) < d->plan.warm_steps;
    hpml_status    status = HPML_OK;
    while (status == HPML_OK && all->posted < all->count) {
        hpmlc_bucket *b = &all->item[all->posted];
        if (b->ready < b->count) break;
        b->now = warm ? b->warm : b->x;
        all->posted++;
        status = d->start(d, b);
    }
    return status;
}

HPMLC_FN void hpmlc_buckets_reset(hpml_distributed *d) /* before a pass: no gradient is final */
{
    d->buckets.posted = 0;
    for (int i = 0; i < d->buckets.count; i++) d->buckets.item[i].ready = 0;
}

/* Counts in its bucket that the gradient of parameter number `param` is final; false: the parameter is in no bucket. */
HPMLC_FN bool hpmlc_buckets_count(hpml_distributed *d, int param)
{
    int number = d->layout.bucket_of[param];
    if (number >= 0) d->buckets.item[number].ready++;
    return number >= 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// >>distribute-step   data parallelism: a step, its statistics, the trainer's hooks
// ---------------------------------------------------------------------------------------------------------------------
/* One small allreduce after the last bucket of gradients adds up samples, losses and running statistics of batchnorm
   ("buffers"). Loss and buffers are means over samples: sum of n_r v_r / sum of n_r for n_r samples of rank r. */

/* Waits for all tasks of the step, even after an error, and returns one of their errors, else HPML_OK. */
HPMLC_FN hpml_status hpmlc_tasks_wait(hpml_distributed *d)
{
    hpml_status status = HPML_OK;
    for (int i = 0; i < d->buckets.count; i++) {
        hpml_status s = hpmlc_task_wait(&d->buckets.item[i].task);
        if (status == HPML_OK) status = s;
    }
    hpml_status s = hpmlc_task_wait(&d->stats.task);
    return s != HPML_OK ? s : status;
}

/* Sets *out to the sum of this rank's counters on all axes of the mesh but data. */
HPMLC_FN void hpmlc_axes_sent(const hpml_distributed *d, hpml_counters *out)
{
    memset(out, 0, sizeof *out);
    for (int k = HPML_AXIS_PIPE; d->all->mesh && k < HPML_AXES; k++) {
        hpml_counters sent;
        if (!d->all->mesh->m.axis[k]) continue;
        hpml_comm_counters(d->all->mesh->m.axis[k], &sent);
        hpmlc_counters_add(out, &sent);
    }
}

/* Sets *out to the sum of this rank's counters on all communicators of the mesh, each counted once. */
HPMLC_FN void hpmlc_sent(const hpml_distributed *d, hpml_counters *out)
{
    const hpmlc_mesh *mesh = d->all->mesh;
    hpmlc_axes_sent(d, out);
    hpml_comm *more[] = { d->all, d->c, NULL, NULL, NULL };
    if (mesh) {
        more[2] = mesh->m.axis[HPML_AXIS_DATA];
        more[3] = mesh->rest[HPML_AXIS_SEQUENCE];
        more[4] = mesh->rest[HPML_AXIS_EXPERT];
    }
    for (int i = 0; i < 5; i++) {
        hpml_counters sent;
        if (!more[i] || (i > 0 && more[i] == d->all) || (i > 1 && more[i] == d->c)) continue;
        hpml_comm_counters(more[i], &sent);
        hpmlc_counters_add(out, &sent);
    }
}

/* Returns the seconds that ops of this rank have spent in communication along all axes but data. Unlike
   hpml_comm_counters does not wait for background work, because these communicators have none. */
HPMLC_FN double hpmlc_axes_seconds(const hpml_distributed *d)
{
    const hpmlc_mesh *mesh = d->all->mesh;
    double            sum  = mesh ? mesh->waited : 0;
    for (int k = HPML_AXIS_PIPE; mesh && k < HPML_AXES; k++)
        if (mesh->m.axis[k]) sum += mesh->m.axis[k]->counters.seconds;
    return sum;
}

/* Copies the running statistics, in the order of their names, to the array `row` of layout.buffer_total floats or, if
   `set`, from this array to the running statistics. */
HPMLC_FN void hpmlc_buffers_copy(const hpml_distributed *d, float *row, bool set)
{
    const hpmlc_layout *l = &d->layout;
    for (int i = 0; i < l->params; i++) {
        hpml_tensor *p = hpmlc_param(d, l->by_name[i]);
        int64_t      n = hpmlc_buffer_floats(d, p);
        hpmlc_host_view_copy(&l->view, row, p->data, n, set);
        row += n;
    }
}

/* Adds the seconds from `start` to now to exposed_s, the time of waiting with nothing left to compute on this rank. */
HPMLC_FN void hpmlc_dist_waited(hpml_distributed *d, double start)
{
    double end = hpml_comm_now(d->c);
    hpml_trace_span(d->ctx, HPML_LANE_COMPUTE, "wait", start, end);
    d->report.r.exposed_s += end - start;
}

/* Returns how many ranks keep the same floats of parameter p as this rank; 0: another pipeline stage counts p. */
HPMLC_FN double hpmlc_keepers(const hpml_distributed *d, const hpml_tensor *p)
{
    const hpml_mesh  *m = hpml_comm_mesh(d->all);
    const hpml_param *q = p->param;
    double            ranks = d->all->size - d->plan.servers;
    if (m && q->stage >= 0 && q->stage != m->at[HPML_AXIS_PIPE]) return 0;
    if (m && q->stage >= 0) ranks /= m->size[HPML_AXIS_PIPE];
    if (q->axis != HPML_AXIS_DATA) ranks /= hpml_ctx_group(d->ctx, q->axis)->size;
    return q->shard > 0 ? ranks / hpmlc_ranks_of(d, p)->size : ranks;
}

/* The trainer's hook `norms`: adds up `sums` (params, each) over all ranks. A rank's sums of squares are of the part of
   each parameter that it keeps; a part that several ranks keep is counted once. */
HPMLC_FN hpml_status hpmlc_dist_norms(void *user, hpml_trainer *t HPMLC_UNUSED, double *sums, int64_t each)
{
    hpml_distributed *d = (hpml_distributed *)user;
    for (int i = 0; i < d->layout.params; i++) {
        const double keepers = hpmlc_keepers(d, hpmlc_param(d, i));
        for (int64_t k = each * i; k < each * (i + 1); k++) sums[k] = keepers > 0 ? sums[k] / keepers : 0;
    }
    return hpmlc_reduce_all(d->all, sums, each * d->layout.params, HPML_ELEMENT_F64, HPML_SUM, HPML_AUTO);
}

/* Adds up n statistics of batchnorm over all ranks, as the trainer's hook `sum` within a pass. The other ranks compute
   as long as this one does, hence the time of the sum counts as waiting (exposed_s), not as computing. */
HPMLC_FN hpml_status hpmlc_dist_sum(void *user, hpml_trainer *t HPMLC_UNUSED, double *values, int64_t n)
{
    hpml_distributed *d      = (hpml_distributed *)user;
    double            start  = hpml_comm_now(d->c);
    hpml_status       status = hpmlc_reduce_all(d->c, values, n, HPML_ELEMENT_F64, HPML_SUM, HPML_AUTO);
    double            spent  = hpml_comm_now(d->c) - start;
    d->report.r.exposed_s += spent;
    d->report.r.compute_s -= spent;
    return status;
}

/* Fills d->stats.sum with this rank's terms of the sums over ranks: samples, loss, whether the loss is finite, and
   `buffers` times samples. buffers: buffer_total running statistics; NULL: none. */
HPMLC_FN void hpmlc_stats_fill(hpml_distributed *d, const float *buffers)
{
    double *s      = d->stats.sum;
    bool    is_bad = !(d->stats.loss - d->stats.loss == 0); /* NaN or infinite */
    s[HPMLC_SAMPLES]  = d->stats.samples;
    s[HPMLC_LOSS]     = is_bad ? 0 : d->stats.loss;
    s[HPMLC_BAD]      = is_bad;
    s[HPMLC_BAD_RANK] = is_bad ? hpmlc_rank(d) : 0;
    for (int64_t k = 0; buffers && k < d->layout.buffer_total; k++)
        s[HPMLC_STATS + k] = d->stats.samples * (double)buffers[k];
}

HPMLC_FN hpml_status hpmlc_stats_sum(hpml_comm *c, void *user)
{
    hpml_distributed *d = (hpml_distributed *)user;
    int64_t           n = d->layout.buffer_total;
    c->about.first = n > 0 ? "loss, samples, running statistics" : "loss, samples";
    hpml_status status = hpmlc_reduce_all(c, d->stats.sum, HPMLC_STATS + n, HPML_ELEMENT_F64, HPML_SUM, HPML_AUTO);
    c->about.first = NULL;
    for (int64_t k = 0; k < HPMLC_STATS + n && d->plan.sequence > 1; k++) /* ranks of the axis count the same samples */
        if (k != HPMLC_BAD && k != HPMLC_BAD_RANK) d->stats.sum[k] /= d->plan.sequence;
    return status;
}

/* Reads samples and mean loss of the step from the sums over ranks; an error if a rank's loss is NaN or infinite. */
HPMLC_FN hpml_status hpmlc_stats_read(hpml_distributed *d)
{
    const double *s     = d->stats.sum;
    bool          many  = s[HPMLC_BAD] > 1;
    double        whose = many ? s[HPMLC_BAD] : s[HPMLC_BAD_RANK];
    if (s[HPMLC_BAD] > 0 && d->trial.on) return HPML_ERR_NONFINITE;
    if (s[HPMLC_BAD] > 0)
        return hpml_ctx_fail(d->ctx, HPML_ERR_PEER, "rank %d, step %lld: the loss is not finite on %s %.0f",
                             hpmlc_rank(d), (long long)hpml_trainer_step_count(d->t) + 1,
                             many ? "this number of ranks:" : "rank", whose);
    if (s[HPMLC_SAMPLES] <= 0) return hpml_ctx_fail(d->ctx, HPML_ERR_STATE, "a step without samples on any rank");
    d->report.r.loss    = s[HPMLC_LOSS] / s[HPMLC_SAMPLES];
    d->report.r.samples = (int64_t)s[HPMLC_SAMPLES];
    return HPML_OK;
}

/* Sets the model's running statistics to their means over all ranks, weighted by samples: d->stats.sum has the sums. */
HPMLC_FN void hpmlc_buffers_average(hpml_distributed *d)
{
    const double *s = d->stats.sum;
    for (int64_t k = 0; k < d->layout.buffer_total; k++)
        d->stats.buffers[k] = (float)(s[HPMLC_STATS + k] / s[HPMLC_SAMPLES]);
    hpmlc_buffers_copy(d, d->stats.buffers, true);
}

/* Starts what remains of a step's communication: exchanges of buckets that have not started yet, then the sum over
   ranks of samples, loss and `buffers`, the running statistics (NULL: without these). */
HPMLC_FN hpml_status hpmlc_dist_post(hpml_distributed *d, const float *buffers)
{
    double      start  = hpml_comm_now(d->c);
    hpml_status status = hpmlc_buckets_post(d);
    if (status == HPML_OK) {
        hpmlc_stats_fill(d, buffers);
        status = hpmlc_task_start(d, &d->stats.task, d->c, hpmlc_stats_sum, d);
        if (status == HPML_OK) status = d->stats.task.status; /* the status of the sum, if that is done already */
    }
    if (!d->background) hpmlc_dist_waited(d, start);
    return status;
}

/* Counts the time from `start` to now as computing, but the seconds of it in which layers have communicated as waiting,
   because no computation hides that communication. sums: the result of hpmlc_axes_seconds at `start`. */
HPMLC_FN void hpmlc_dist_computed(hpml_distributed *d, double start, double sums)
{
    const double waited = hpmlc_axes_seconds(d) - sums;
    d->report.r.exposed_s += waited;
    d->report.r.compute_s += hpml_comm_now(d->c) - start - waited;
}

/* Runs forward and backward pass of a micro-batch and sets *loss to its mean loss. Scales the gradient such that the
   mean over ranks is the mean over the global batch. Before the first micro-batch of an update it zeroes the step's
   sums of samples and loss and the buckets' counts of ready gradients. */
HPMLC_FN hpml_status hpmlc_dist_pass(hpml_distributed *d, int64_t samples, float *loss)
{
    double start = hpml_comm_now(d->c);
    double share = (double)samples * hpmlc_plan_workers(&d->plan, d->all->size) / (double)d->plan.global_batch;
    float  scale = (float)((d->plan.sum ? 1 : share) / d->accumulate);
    if (d->micro == 0) {
        d->stats.samples  = 0;
        d->stats.loss     = 0;
        hpmlc_buckets_reset(d);
    }
    *loss = 0;
    if (samples == 0 && d->plan.expert > 1)
        return hpmlc_fail(d->c, HPML_ERR_ARGUMENT, "step %lld: the batch has no samples for this rank, whose experts "
                          "serve other ranks' samples; take batches of at least %d samples, and drop the last one of "
                          "an epoch if it is smaller", (long long)d->all->step,
                          hpmlc_plan_workers(&d->plan, d->all->size));
    double      sums   = hpmlc_axes_seconds(d);
    bool        adds   = d->micro > 0 && d->plan.shard < 2;
    hpml_status status = hpml_trainer_forward_backward(d->t, 0, samples, scale, adds, loss);
    d->stats.samples += (double)samples;
    d->stats.loss += (double)*loss * (double)samples;
    if (d->trial.on) *loss = 0; /* because the trainer would stop at a NaN */
    hpmlc_dist_computed(d, start, sums);
    d->micro++;
    if (status != HPML_OK) hpmlc_failed(d->c); /* sends the error to the other ranks */
    return status;
}

/* Returns the first bucket's report of a NaN or infinity in this step: 2^20 * parameter + 1 + a rank; 0: none. */
HPMLC_FN int64_t hpmlc_dist_bad(const hpml_distributed *d)
{
    for (int b = 0; b < d->buckets.count; b++) {
        const hpml_exchange *x = d->buckets.item[b].now;
        if (!x || !x->bad) continue;
        for (int i = 0; i < d->layout.params; i++)
            if (hpmlc_param(d, i)->name == x->item[x->bad >> 20].g.name) return x->bad % (1 << 20) + ((int64_t)i << 20);
    }
    return 0;
}

/* Sets an error that names parameter and rank of a gradient with a NaN or infinity, if `status` is HPML_ERR_NONFINITE.
   bad: 2^20 * the parameter's index, + 1 + rank if the rank is known; the same on all ranks. Returns `status`. */
HPMLC_FN hpml_status hpmlc_dist_blame(hpml_distributed *d, hpml_status status, int64_t bad)
{
    int  rank = (int)(bad % (1 << 20)) - 1;
    char whose[24] = "some rank";
    if (status != HPML_ERR_NONFINITE || d->trial.on) return status;
    if (rank >= 0) snprintf(whose, sizeof whose, "rank %d", d->c->origin[rank]);
    return hpml_ctx_fail(d->ctx, status, "rank %d, step %lld: the gradient of \"%s\" is NaN or infinite on %s; lower "
                         "the learning rate or set clip_norm", hpmlc_rank(d), (long long)d->c->step,
                         hpmlc_param(d, (int)(bad >> 20))->name, whose);
}

/* Waits for the exchanges of a step and reads its loss and samples; an error names a gradient that is not finite. */
HPMLC_FN hpml_status hpmlc_dist_wait(hpml_distributed *d)
{
    double      start  = hpml_comm_now(d->c);
    hpml_status status = hpmlc_tasks_wait(d), stats = HPML_OK;
    hpmlc_dist_waited(d, start);
    if (hpml_ctx_status(d->ctx) == HPML_OK) stats = hpmlc_stats_read(d);
    if (status == HPML_OK) return stats;
    return stats == HPML_OK ? hpmlc_dist_blame(d, status, hpmlc_dist_bad(d)) : status;
}

/* Returns the samples of a whole update, of all ranks and micro-batches. */
HPMLC_FN double hpmlc_whole_samples(const hpml_distributed *d) { return (double)d->plan.global_batch * d->accumulate; }

/* Begins the next row of hpml_distribute_steps: stores the report, the time and the counters at the row's start. */
HPMLC_FN void hpmlc_steps_mark(hpml_distributed *d)
{
    hpmlc_reporting *r = &d->report;
    r->at_row   = r->r;
    r->row_time = hpml_comm_now(d->c);
    hpmlc_sent(d, &r->row_sent);
}

enum { HPMLC_TAG_SUM = HPML_TAG_MAX - 2 }; /* tag of sums over the ranks that are not lost */

/* Returns whether the training goes on when ranks are lost. */
HPMLC_FN bool hpmlc_goes_on(const hpml_distributed *d)
{
    return d->c->survive && (d->plan.strategy == HPML_STRATEGY_GOSSIP || hpmlc_plan_serves(&d->plan));
}

/* Adds up the n floats x of all ranks, in place. If the training goes on when ranks are lost, adds up over the ranks
   that are left: the first of these, *root, receives, adds up and sends the sums. *there: how many ranks took part in
   the sum. *root is 0 if no ranks may be lost. */
HPMLC_FN hpml_status hpmlc_sum_there(hpml_distributed *d, float *x, int64_t n, int *there, int *root)
{
    hpml_comm   *c      = d->c;
    const size_t bytes  = (size_t)n * sizeof(float);
    hpml_status  status = HPML_OK;
    *root  = 0;
    *there = c->size;
    if (!hpmlc_goes_on(d)) return hpmlc_reduce_all(c, x, n, HPML_ELEMENT_F32, HPML_SUM, d->plan.algorithm);
    float *theirs = (float *)hpmlc_scratch(c, bytes + 8);
    for (; *root < c->rank && theirs; ++*root) {
        status = hpml_send(c, *root, HPMLC_TAG_SUM, x, bytes);
        if (status == HPML_OK) status = hpml_recv(c, *root, HPMLC_TAG_SUM, theirs, bytes);
        if (status == HPML_OK) status = hpml_recv(c, *root, HPMLC_TAG_SUM, there, sizeof *there);
        if (status == HPML_OK) memcpy(x, theirs, bytes);
        if (status != HPML_ERR_PEER || hpml_ctx_status(d->ctx) != HPML_OK) return status;
    }
    *there = 1;
    for (int r = c->rank + 1; r < c->size && theirs; r++) {
        if (hpml_recv(c, r, HPMLC_TAG_SUM, theirs, bytes) != HPML_OK) continue; /* r is lost; or an error on c */
        for (int64_t i = 0; i < n; i++) x[i] += theirs[i];
        ++*there;
    }
    for (int r = c->rank + 1; r < c->size && theirs; r++) {
        hpml_send(c, r, HPMLC_TAG_SUM, x, bytes);
        hpml_send(c, r, HPMLC_TAG_SUM, there, sizeof *there);
    }
    return hpml_ctx_status(d->ctx);
}

/* Counts the step and fills in its row for hpml_distribute_steps. No job may be running, because hpml_comm_counters
   waits for jobs. The row's bubble_s, the time of waiting for the slowest rank, is set by hpml_distribute_steps,
   because it depends on the rows of all ranks. */
HPMLC_FN void hpmlc_steps_note(hpml_distributed *d)
{
    hpmlc_reporting *r    = &d->report;
    hpml_step_row   *row  = &r->row[r->rows++ % d->plan.history];
    hpml_counters    sent = r->row_sent;
    double           then = r->row_time;
    r->r.steps++;
    row->step      = hpml_trainer_step_count(d->t) + 1;
    row->rank      = d->all->rank;
    row->compute_s = r->r.compute_s - r->at_row.compute_s;
    row->exposed_s = r->r.exposed_s - r->at_row.exposed_s;
    hpmlc_steps_mark(d);
    row->step_s    = r->row_time - then;
    row->bytes     = (double)(r->row_sent.bytes - sent.bytes);
    row->overlap_s = fmax(0, r->row_sent.seconds - sent.seconds - row->exposed_s);
    HPMLC_ZERO(hpml_trace_event, e);
    e.kind  = HPML_TRACE_COUNTER;
    e.name  = "bytes sent";
    e.start = r->row_time;
    e.value = row->bytes;
    hpml_trace_add(d->ctx, &e);
}

/* Runs forward and backward pass of a micro-batch by the strategy: the trainer's hook `run`. */
HPMLC_FN hpml_status hpmlc_dist_run(void *user, hpml_trainer *t, const hpml_moment *at HPMLC_UNUSED,
                                    int64_t samples, float *loss)
{
    hpml_distributed *d = (hpml_distributed *)user;
    d->c->step = d->all->step = hpml_trainer_step_count(t) + 1;
    return d->strategy->begin(d, samples, loss);
}

/* The trainer's hook `grad`: the gradient of parameter at->param is final; calls the strategy's function `gradient`. */
HPMLC_FN hpml_status hpmlc_dist_grad(void *user, hpml_trainer *t HPMLC_UNUSED, const hpml_moment *at)
{
    hpml_distributed *d = (hpml_distributed *)user;
    return d->strategy->gradient(d, at->param);
}

/* Lets the strategy complete the exchange and make the optimizer step: the trainer's hook `update`. */
HPMLC_FN hpml_status hpmlc_dist_update(void *user, hpml_trainer *t HPMLC_UNUSED, const hpml_moment *at HPMLC_UNUSED)
{
    hpml_distributed *d = (hpml_distributed *)user;
    d->micro = 0;
    return d->strategy->update(d);
}

/* The trainer's hook `data`: fails unless `mark`, a hash of the data and its order, is the same on all ranks, because
   ranks take their shares of a batch by position: data that the program has divided already would be divided once more.
   The time and the bytes of this check are kept out of the report, which is about steps. With servers, and where a
   training goes on when ranks are lost, only the first fit is checked, because ranks begin later fits at different
   times, or without a rank that is lost. */
HPMLC_FN hpml_status hpmlc_dist_data(void *user, hpml_trainer *t HPMLC_UNUSED, uint64_t mark)
{
    hpml_distributed   *d = (hpml_distributed *)user;
    hpmlc_reporting    *r = &d->report;
    const hpml_counters before = d->all->counters;
    const double        start = hpml_comm_now(d->all);
    bool                is_same;
    if (d->data_known && (d->plan.servers > 0 || hpmlc_goes_on(d))) return HPML_OK;
    d->data_known = true;
    hpml_status status  = hpmlc_same(d->all, mark, &is_same);
    int64_t     bytes   = d->all->counters.bytes - before.bytes;
    double      seconds = d->all->counters.seconds - before.seconds;
    r->at_reset.bytes += bytes;
    r->row_sent.bytes += bytes;
    r->at_reset.seconds += seconds;
    r->row_sent.seconds += seconds;
    r->began += hpml_comm_now(d->all) - start;
    r->row_time += hpml_comm_now(d->all) - start;
    if (status != HPML_OK || is_same) return status;
    return hpmlc_fail(d->all, HPML_ERR_ARGUMENT, "fit: this rank's data, seed, epochs or place in the data are not the "
                      "other ranks'. Pass the same data set and settings on all ranks, because fit takes each rank's "
                      "share itself; or, where you have divided the data, a hpml_loader_desc with .ranks = 1");
}

/* Returns whether gradients may overflow now and then: in f16 without a fixed loss scale. */
HPMLC_FN bool hpmlc_overflows(hpml_trainer *t, hpml_ctx *ctx)
{
    const hpml_backend *b = hpml_ctx_backend(ctx);
    bool                f16 = b->activation_dtype && b->activation_dtype(hpml_ctx_device(ctx)) == HPML_DTYPE_F16;
    return f16 && hpml_trainer_settings(t)->loss_scale == 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// >>state   one list of what a training carries from step to step
// ---------------------------------------------------------------------------------------------------------------------
/* Besides parameters and the optimizer's state, which the trainer saves, a training carries residuals of codecs,
   velocity of codec TOPK, factor Q of LOWRANK, gradients in flight. A strategy lists these arrays in its function
   `state`; saving, loading and clearing walk the list (>>resume). In the file an array is called KIND.COPY.TENSOR, e.g.
   "residual.ranks.linear0.weight". The scope of an array says which ranks have copies of it. */

typedef enum hpmlc_scope {
    HPMLC_RANK,  /* a copy for each rank (or leaf), which are added up: any number of ranks loads them */
    HPMLC_NODE,  /* a copy for each node, of which each rank of the node has a range: loads only on as many nodes */
    HPMLC_SHARED /* one copy, of which each rank has a range, or which all ranks have whole */
} hpmlc_scope;

typedef struct hpmlc_state {
    char        *name;       /* the array's name in the file: state.KIND.COPY.TENSOR */
    hpmlc_scope  scope;
    float       *data;       /* (copies.count, floats) this rank's floats of its copies of the array; NULL: none */
    const hpmlc_host_view *view; /* host access to `data` */
    int64_t      count;      /* floats of one copy on this rank: of the part of a tensor that it has, or the whole */
    int64_t      whole;      /* floats of one copy in the file, which has whole tensors */
    const hpml_tensor *param; /* parameter whose layout in memory a copy has (this rank's part); NULL: none */
    int64_t      at, floats; /* this rank's range of one copy: [at, at + floats) */
    hpmlc_copies copies;     /* this rank's copies, and how many the file has: copies.all */
    bool         is_mean;    /* copies are shares of a mean: the fewer there are, the larger each is */
    bool         is_same;    /* every rank has the whole array: rank 0 saves it */
    bool        *present;    /* flag, shared by arrays: whether they exist now; NULL: the array always exists */
    int64_t      offset;     /* where the array begins among the floats that are saved */
} hpmlc_state;

struct hpmlc_states {
    hpml_distributed *d;
    hpmlc_state      *item;      /* (count) the arrays */
    int               count, capacity;
    bool              is_saving; /* the list is for saving; else it is for loading */
    const char       *copy;      /* word for the copies of scope RANK in names of arrays: "ranks" or "leaves" */
    bool             *present;   /* hpmlc_state.present of the arrays that are added next */
    hpmlc_host_view       host;      /* hpmlc_state.view of arrays in host memory */
};

/* Adds an array, of which each copy has `count` floats, to the list of arrays that checkpoints hold, with the name
   state.KIND.COPY.TENSOR (an argument that is NULL leaves its word out). scope: which ranks have copies.
   hpmlc_state_part sets later which floats of each copy this rank has. Returns the array's item in the list, whose
   address is valid until the next item is added; NULL: an error. */
HPMLC_FN hpmlc_state *hpmlc_state_add(hpmlc_states *list, hpmlc_scope scope, const char *kind, const char *copy,
                                      const char *tensor, int64_t count)
{
    hpml_distributed *d      = list->d;
    const char       *parts[] = { "state", kind, copy, tensor };
    size_t            length = 1;
    if (list->count == list->capacity) {
        int          capacity = list->capacity > 0 ? 2 * list->capacity : 64;
        hpmlc_state *more = (hpmlc_state *)hpml_ctx_alloc(d->ctx, sizeof *more * (size_t)capacity, NULL);
        if (!more) return NULL;
        if (list->count > 0) memcpy(more, list->item, sizeof *more * (size_t)list->count);
        hpml_ctx_release(d->ctx, list->item);
        list->item     = more;
        list->capacity = capacity;
    }
    for (int i = 0; i < 4; i++) length += parts[i] ? strlen(parts[i]) + 1 : 0;
    char *name = (char *)hpml_ctx_alloc(d->ctx, length, NULL);
    if (!name) return NULL;
    for (int i = 0; i < 4; i++) {
        size_t at = strlen(name);
        if (parts[i]) snprintf(name + at, length - at, "%s%s", at > 0 ? "." : "", parts[i]);
    }
    hpmlc_state *it = &list->item[list->count++];
    memset(it, 0, sizeof *it);
    it->name         = name;
    it->scope        = scope;
    it->count        = count;
    it->whole        = count;
    it->param        = tensor ? hpml_param_find(d->ctx, tensor) : NULL;
    if (it->param && hpml_tensor_count(it->param) != count) it->param = NULL;
    if (it->param) it->whole = hpml_param_whole(it->param, NULL);
    it->view         = &list->host;
    it->present      = list->present;
    it->copies.count = 1;
    it->copies.all   = 1;
    return it;
}

/* Sets what this rank has of each copy of an array: floats [at, at + floats), at `data` in the memory of exchange x. */
HPMLC_FN void hpmlc_state_part(hpmlc_state *it, const hpml_exchange *x, float *data, int64_t at, int64_t floats)
{
    it->view   = &x->view;
    it->data   = data;
    it->at     = at;
    it->floats = floats;
}

/* Lists for checkpoints an array of `count` floats that every rank has whole, at `data` in host memory; data NULL: this
   rank does not have it. Returns the array's entry in the list; NULL: an error. */
HPMLC_FN hpmlc_state *hpmlc_state_same(hpmlc_states *list, const char *kind, const char *tensor, float *data,
                                       int64_t count)
{
    hpmlc_state *it = hpmlc_state_add(list, HPMLC_SHARED, kind, NULL, tensor, count);
    if (!it) return NULL;
    it->is_same = true;
    it->data    = data;
    it->floats  = data ? count : 0;
    return it;
}

/* Adds to `list`, the arrays that a checkpoint holds, an array of which there is one copy of `count` floats for each
   contribution: for each rank or, with exact sums, for each leaf. kind, tensor: words of its name in the file. This
   rank's copies are at `data`, in the memory (host or device) of exchange x. */
HPMLC_FN void hpmlc_state_copies(hpmlc_states *list, const hpml_exchange *x, const char *kind, const char *tensor,
                                 float *data, int64_t count)
{
    hpmlc_state *it = hpmlc_state_add(list, HPMLC_RANK, kind, list->copy, tensor, count);
    if (!it) return;
    it->copies  = list->d->copies;
    if (x->c->size != list->d->c->size) { /* x adds up a split parameter, over fewer ranks */
        it->copies.first = x->c->rank;
        it->copies.all   = x->c->size;
    }
    it->is_mean = x->d.reduce == HPML_MEAN;
    hpmlc_state_part(it, x, data, 0, count);
}

/* Adds to `list`, for checkpoints, the arrays, such as residuals, that exchange x keeps on all ranks from step to step
   for tensor `it`. */
HPMLC_FN void hpmlc_item_state(hpmlc_states *list, const hpml_exchange *x, const hpmlc_item *it)
{
    const char *name = it->g.name;
    int64_t     cols = it->g.cols, n = it->g.rows * cols;
    if (it->residual) hpmlc_state_copies(list, x, "residual", name, it->residual, n);
    if (it->velocity) hpmlc_state_copies(list, x, "velocity", name, it->velocity, n);
    if (it->q) {
        hpmlc_state *q = hpmlc_state_same(list, "lowrank", name, it->q, cols * hpmlc_lowrank_of(x, it));
        if (q) q->view = &x->view;
    } else if (it->stripe) {
        hpmlc_state *sum = hpmlc_state_add(list, HPMLC_SHARED, "residual", "stripes", name, n);
        if (sum) hpmlc_state_part(sum, x, it->stripe, it->my_row * cols, it->my_rows * cols);
    }
}

/* Returns whether another stage of the pipeline trains parameter p. This rank's list of arrays for checkpoints has the
   arrays of such a parameter too, with no floats, because the lists of all ranks must be the same. */
HPMLC_FN bool hpmlc_is_elsewhere(const hpml_distributed *d, const hpml_tensor *p)
{
    const hpml_mesh *m = hpml_comm_mesh(d->all);
    if (!m || p->param->buffer || p->param->frozen) return false;
    return p->param->stage >= 0 && p->param->stage != m->at[HPML_AXIS_PIPE];
}

/* Returns where the floats of p begin in `array`, laid out as the trainer's gradients; NULL: another rank trains p. */
HPMLC_FN float *hpmlc_state_place(const hpml_distributed *d, float *array, const hpml_tensor *p)
{
    return p->grad ? array + hpmlc_gradient_at(d, p) : NULL;
}

/* For a rank that does not train p: adds to the checkpoint's list the arrays that hpmlc_item_state adds on ranks that
   train p, but with no floats. */
HPMLC_FN void hpmlc_elsewhere_state(hpmlc_states *list, hpml_tensor *p)
{
    const hpml_distributed *d = list->d;
    hpml_gradient           g;
    hpml_packing            packing;
    hpmlc_gradient_of(p, NULL, &g);
    hpml_packing_init(&packing, &d->plan.codec, g.rows, g.cols);
    if (packing.codec->linear || packing.residual_count == 0) return;
    hpmlc_state *it = hpmlc_state_add(list, HPMLC_RANK, "residual", list->copy, p->name, g.rows * g.cols);
    if (it) it->copies = d->copies;
    hpmlc_state_add(list, HPMLC_SHARED, "residual", "stripes", p->name, g.rows * g.cols);
}

/* Lists for checkpoints the arrays, such as residuals, that the exchanges of all buckets keep from step to step, in the
   order of the tensors' names. False: an error. */
HPMLC_FN bool hpmlc_buckets_state(hpml_distributed *d, hpmlc_states *list)
{
    for (int i = 0; i < d->layout.params; i++) {
        int                  param = d->layout.by_name[i], b = d->layout.bucket_of[param];
        const hpml_exchange *x     = b < 0 ? NULL : d->buckets.item[b].x;
        const char          *name  = hpmlc_param(d, param)->name;
        if (hpmlc_is_elsewhere(d, hpmlc_param(d, param))) hpmlc_elsewhere_state(list, hpmlc_param(d, param));
        for (int k = 0; x && k < x->d.count; k++)
            if (x->item[k].g.name == name) hpmlc_item_state(list, x, &x->item[k]);
    }
    return hpml_ctx_status(d->ctx) == HPML_OK;
}

// ---------------------------------------------------------------------------------------------------------------------
// >>distribute-rows   gradients of sparse tables: rows, gathered from all ranks
// ---------------------------------------------------------------------------------------------------------------------
/* The gradient of a sparse table (hpml_embedding_desc.sparse) is in no bucket. After the other exchanges of a step each
   rank sends its rows to all ranks, in blocks as large as the rank with the most rows needs. Every rank adds the rows
   up in the order of the ranks, so that all get the same bits. */

/* Returns memory for `floats` floats, kept between steps; if too small, allocates twice that. NULL: error. */
HPMLC_FN float *hpmlc_rows_reserve(hpml_distributed *d, int64_t floats)
{
    if (floats <= d->rows.floats) return d->rows.memory;
    hpml_ctx_release(d->ctx, d->rows.memory);
    d->rows.memory = (float *)hpml_ctx_alloc(d->ctx, (size_t)(2 * floats) * sizeof(float), NULL);
    d->rows.floats = d->rows.memory ? 2 * floats : 0;
    return d->rows.memory;
}

/* Adds up the gradient of the sparse table p over all ranks; then divides it by `divisor`. */
HPMLC_FN hpml_status hpmlc_rows_sum(hpml_distributed *d, hpml_tensor *p, float divisor)
{
    hpml_comm     *c     = d->c;
    const int64_t  width = p->shape[1];
    int64_t        count, most, own;
    const int32_t *row   = hpml_param_rows(p, &own);
    most = own;
    hpml_status status = hpmlc_reduce_all(c, &most, 1, HPML_ELEMENT_I64, HPML_MAX, HPML_AUTO);
    if (status != HPML_OK) return status;
    const int64_t each = 1 + most * (width + 1); /* a block: number of rows, their indices, their gradients */
    float *all = hpmlc_rows_reserve(d, each * c->size), *mine = all ? all + each * c->rank : NULL;
    if (!all) hpmlc_failed(c); /* sends the error to the other ranks */
    if (!all) return hpml_ctx_status(d->ctx);
    memset(mine, 0, (size_t)each * sizeof(float));
    int32_t number = (int32_t)own;
    memcpy(mine, &number, sizeof number);
    memcpy(mine + 1, row, (size_t)own * sizeof *row);
    for (int64_t i = 0; i < own; i++)
        memcpy(mine + 1 + most + i * width, p->grad + row[i] * width, (size_t)width * sizeof(float));
    status = hpml_allgather(c, all, each * c->size, HPML_ELEMENT_F32);
    for (int r = 0; r < c->size && status == HPML_OK; r++) {
        const float *block = all + each * r;
        memcpy(&number, block, sizeof number);
        status = hpml_param_add_rows(p, r == 0, (const int32_t *)(const void *)(block + 1), block + 1 + most, number);
    }
    row = hpml_param_rows(p, &count);
    for (int64_t i = 0; i < count && status == HPML_OK; i++) hpmlc_divide_f32(p->grad + row[i] * width, width, divisor);
    return status;
}

/* Adds up the gradients of all sparse tables over all ranks, as the other gradients are: mean, or sum with .sum. */
HPMLC_FN hpml_status hpmlc_rows_exchange(hpml_distributed *d)
{
    hpml_status status = HPML_OK;
    double      start  = hpml_comm_now(d->c);
    for (int i = 0; i < d->layout.params && status == HPML_OK; i++) {
        hpml_tensor *p = hpmlc_param(d, i);
        if (p->grad && hpml_param_rows(p, NULL)) status = hpmlc_rows_sum(d, p, d->plan.sum ? 1 : (float)d->c->size);
    }
    hpmlc_dist_waited(d, start);
    return status;
}

// ---------------------------------------------------------------------------------------------------------------------
// >>strategy-sync   synchronous steps, gradients exchanged on the host
// ---------------------------------------------------------------------------------------------------------------------
/* Strategy sync: in step t all ranks apply the mean of the gradients of step t: w_(t+1) = w_t - lr f(sum_r n_r g_r(w_t)
   / n), for n_r of n samples on rank r and optimizer f. The exchange of a bucket starts when its last gradient is
   final, but after the backward pass with .no_overlap or where no background thread pays off. (Synchronous SGD: Das et
   al. 2016, "Distributed Deep Learning Using Synchronous SGD"; Goyal et al. 2017 for its learning rates.) A trainer on
   a device has its gradients copied to the host and back. */

HPMLC_FN hpml_status hpmlc_sync_start(hpml_distributed *d, hpmlc_bucket *b)
{
    hpmlc_host_fetch(d, b->at, b->floats);
    return hpmlc_host_start(d, b);
}

HPMLC_FN bool hpmlc_sync_open(hpml_distributed *d)
{
    bool good = hpmlc_host_open(d, NULL, hpmlc_sync_start);
    if (!d->background) d->plan.no_overlap = true;
    return good;
}

HPMLC_FN hpml_status hpmlc_sync_begin(hpml_distributed *d, int64_t samples, float *loss)
{
    hpml_status status = hpmlc_dist_pass(d, samples, loss);
    if (status != HPML_OK || d->micro < d->accumulate) return status;
    hpmlc_buffers_copy(d, d->stats.buffers, false);
    return hpmlc_dist_post(d, d->stats.buffers);
}

HPMLC_FN hpml_status hpmlc_sync_gradient(hpml_distributed *d, int param)
{
    return hpmlc_buckets_count(d, param) && !d->plan.no_overlap ? hpmlc_buckets_post(d) : HPML_OK;
}

HPMLC_FN hpml_status hpmlc_sync_update(hpml_distributed *d)
{
    hpml_status status = hpmlc_dist_wait(d);
    if (status == HPML_OK) status = hpmlc_rows_exchange(d);
    if (status != HPML_OK) return status;
    hpmlc_buffers_average(d);
    hpmlc_steps_note(d);
    return hpmlc_host_apply(d, d->stats.sum[HPMLC_SAMPLES], hpmlc_whole_samples(d));
}

// ---------------------------------------------------------------------------------------------------------------------
// >>strategy-shard   synchronous steps, each rank steps a part of the parameters
// ---------------------------------------------------------------------------------------------------------------------
/* Strategy sync with the plan's field shard (Rajbhandari et al. 2020, "ZeRO"; Zhao et al. 2023, "PyTorch FSDP"). Each
   bucket of gradients is cut into blocks, one for each of the N ranks that add them up, and rank r keeps block r of

     shard 1   the optimizer's states: a step is the two halves of a ring allreduce with the optimizer's step between
               them: reduce-scatter of a bucket when its last gradient is final, step of block r, allgather of the
               new values. In all the ranks send 2 P (N - 1) elements, as in the allreduce, for P floats of parameters.
               In the background a bucket is stepped and gathered when the next bucket's gradients are final, within
               the backward pass, which has no more use for its values. This waits for the end of the pass if the
               optimizer needs norms (clip_norm, LARS, LAMB) or a gradient may overflow, and with pipe
     2         also the gradients: the whole gradient of a bucket is in one of a few slots from the op that writes the
               first of it until its reduce-scatter is done
     3         also the values: the whole values of a bucket are in one of a few slots around the ops that read them.
               They are gathered for the forward pass, the next bucket while the ops of one run, and again for the
               backward pass, except those that are still in their slots: 3 P (N - 1) elements less those

   Of the m micro-batches of a trainer's .accumulate each has, with shard 2 and 3, its own reduce-scatters, which add to
   the block, because no rank has memory for the sum of whole gradients; with 3 its own gathers, too. Elements sent are
   2 P (N - 1), (m + 1) P (N - 1), and m times those of one batch. Sums over ranks come before those over micro-batches,
   so the last bits are not those of shard 0 and 1. With .no_overlap shard 2 and 3 make each exchange at once, within
   the pass, which waits for it.

   A slot has the size of the largest bucket. There are as many for values as buckets that one op reads and one more,
   and for gradients as buckets that are incomplete at a time and one more, which is under way. The blocks are cut and
   the slots are counted before the trainer takes its memory. All ranks choose slots alike, as they run the same ops. */

typedef struct hpmlc_shard_job { /* reduce-scatter or allgather of a bucket */
    float      *data;   /* (floats) the bucket */
    int64_t     floats;
    hpml_reduce reduce;
} hpmlc_shard_job;

typedef struct hpmlc_slot { /* memory for a whole bucket */
    int              bucket;  /* -1: none */
    bool             posted;  /* slot of gradients: true: the bucket's reduce-scatter was started */
    int64_t          used;    /* when an op needed the bucket last, or when the reduce-scatter was started */
    hpmlc_task       task;    /* the allgather of values */
    hpmlc_shard_job  job;
} hpmlc_slot;

typedef struct hpmlc_slots {
    hpmlc_slot *item;         /* (count) */
    int         count;
    float      *memory;       /* (count, largest) */
} hpmlc_slots;

typedef struct hpmlc_sharding {
    hpmlc_slots      values, gradients;
    hpmlc_shard_job *job;     /* (buckets.count) reduce-scatters of the buckets' gradients */
    float           *all;     /* shard 1, 2: the trainer's array of values */
    int64_t          largest; /* floats of the largest bucket */
    int64_t          clock;   /* counts how often an op needed a bucket, as time for hpmlc_slot.used */
    const hpml_node *node;    /* the op that runs now, whose buckets stay in their slots; NULL: none */
    const hpml_node *first_node;  /* the first op of a forward pass that needs a bucket */
    int              first_param; /* the first parameter that this op needs */
    hpmlc_slot      *whole;   /* shard 1, 2: (buckets.count) the allgather of each bucket's new values */
    int              stepped; /* number of buckets whose parameters were stepped in this update */
    int64_t          samples; /* number of this rank's samples in the micro-batch that runs now */
    bool             early;   /* buckets are stepped and gathered within the backward pass */
    bool             posted;  /* with .early: this update's sum of samples and losses was started in the pass */
} hpmlc_sharding;

HPMLC_FN bool hpmlc_shard_is_chosen(hpml_comm *c HPMLC_UNUSED, const hpml_plan *p) { return p->shard > 0; }

HPMLC_FN hpmlc_sharding *hpmlc_sharding_of(const hpml_distributed *d) { return (hpmlc_sharding *)d->own; }

/* Sets [*first, *end) to the floats of parameter number `param` that are kept by rank number `rank` of the ranks that
   exchange the parameter's bucket. */
HPMLC_FN void hpmlc_shard_range(const hpml_distributed *d, int param, int rank, int64_t *first, int64_t *end)
{
    const hpmlc_bucket *b     = &d->buckets.item[d->layout.bucket_of[param]];
    const int64_t       place = hpml_trainer_place(d->t, param), n = hpml_tensor_count(hpmlc_param(d, param));
    const int64_t       from  = b->at + hpml_block(b->floats, b->c->size, rank) - place;
    const int64_t       to    = b->at + hpml_block(b->floats, b->c->size, rank + 1) - place;
    *first = hpmlc_min(hpmlc_max(from, 0), n);
    *end   = hpmlc_min(hpmlc_max(to, 0), n);
}

/* Returns the bucket of the parameter that op n reads as source number s; -1: this source is in no bucket. */
HPMLC_FN int hpmlc_bucket_read(const hpml_distributed *d, const hpml_node *n, int s)
{
    const hpml_tensor *p = n->src[s];
    return p && p->param && p->param->index < d->layout.params ? d->layout.bucket_of[p->param->index] : -1;
}

/* Returns the most buckets that one op reads; stores which op, for which parameter, needs a bucket first. */
HPMLC_FN int hpmlc_shard_reads(hpml_distributed *d)
{
    hpmlc_sharding   *s    = hpmlc_sharding_of(d);
    const hpml_graph *g    = hpml_trainer_graph(d->t);
    int               most = 1;
    for (int i = 0; i < hpml_graph_op_count(g); i++) {
        const hpml_node *n     = hpml_graph_op(g, i);
        int              reads = 0;
        for (int k = 0; k < n->src_count; k++) {
            const int b = hpmlc_bucket_read(d, n, k);
            bool      again = b < 0;
            for (int j = 0; j < k; j++) again = again || hpmlc_bucket_read(d, n, j) == b;
            reads += !again;
            if (b < 0 || s->first_node) continue;
            s->first_node  = n;
            s->first_param = n->src[k]->param->index;
        }
        if (reads > most) most = reads;
    }
    return most;
}

/* Returns the largest number of buckets that are incomplete at a time in the backward pass: some op has added to their
   gradients and others have not yet. Work memory, zeros on entry: open (buckets.count), whether an op has added to the
   bucket; left (params), the number of ops that have not yet added to the parameter's gradient. */
HPMLC_FN int hpmlc_shard_incomplete(hpml_distributed *d, bool *open, int *left)
{
    const hpml_graph *g = hpml_trainer_graph(d->t);
    int               now = 0, most = 0, posted = 0;
    for (int pass = 0; pass < 2; pass++)
        for (int i = hpml_graph_op_count(g) - 1; i >= 0; i--) {
            const hpml_node *n = hpml_graph_op(g, i);
            for (int k = 0; k < n->src_count && n->out->needs_grad; k++) {
                const int b = hpmlc_bucket_read(d, n, k);
                if (b < 0) continue;
                left[n->src[k]->param->index] += pass == 0 ? 1 : -1;
                now += pass == 1 && !open[b];
                open[b] = open[b] || pass == 1;
            }
            if (now > most) most = now;
            for (bool done = pass == 1; done && posted < d->buckets.count;) { /* buckets are posted in their order */
                for (int p = 0; p < d->layout.params; p++)
                    if (d->layout.bucket_of[p] == posted && left[p] > 0) done = false;
                posted += done;
                now -= done;
            }
        }
    return most;
}

/* Reserves `count` slots, each for the whole values or gradients of a bucket, before the trainer takes its memory. */
HPMLC_FN bool hpmlc_slots_reserve(hpml_distributed *d, hpmlc_slots *slots, hpml_array which, int count)
{
    const int64_t floats = count * hpmlc_sharding_of(d)->largest;
    slots->count = count;
    slots->item  = (hpmlc_slot *)hpmlc_dist_alloc(d, sizeof *slots->item * (size_t)count);
    for (int i = 0; slots->item && i < count; i++) slots->item[i].bucket = -1;
    return slots->item && hpml_trainer_reserve(d->t, which, floats, &slots->memory) == HPML_OK;
}

/* Allocates the strategy's struct and slots for buckets of gradients (shard 2, 3) and values (3). False: an error. */
HPMLC_FN bool hpmlc_shard_prepare(hpml_distributed *d)
{
    const size_t    buckets = (size_t)d->buckets.count + 1;
    hpmlc_sharding *s       = (hpmlc_sharding *)hpmlc_dist_alloc(d, sizeof *s);
    d->own = s;
    if (!s) return false;
    s->job   = (hpmlc_shard_job *)hpmlc_dist_alloc(d, sizeof *s->job * buckets);
    s->whole = (hpmlc_slot *)hpmlc_dist_alloc(d, sizeof *s->whole * buckets);
    int  *left = (int *)hpmlc_dist_alloc(d, sizeof(int) * (size_t)(d->layout.params + 1));
    bool *open = (bool *)hpmlc_dist_alloc(d, sizeof(bool) * buckets);
    if (!s->job || !s->whole || !left || !open) return false;
    for (int i = 0; i < d->buckets.count; i++) s->largest = hpmlc_max(s->largest, d->buckets.item[i].floats);
    int most  = hpmlc_shard_reads(d) + 1;
    int count = hpmlc_shard_incomplete(d, open, left) + 1;
    if (count > d->buckets.count) count = d->buckets.count;
    if (most > d->buckets.count) most = d->buckets.count;
    if (d->plan.shard > 1 && !hpmlc_slots_reserve(d, &s->gradients, HPML_ARRAY_GRADIENTS, count)) return false;
    return d->plan.shard < 3 || hpmlc_slots_reserve(d, &s->values, HPML_ARRAY_VALUES, most);
}

/* Cuts gradients into buckets; makes the trainer plan memory for this rank's block of each only. False: an error. */
HPMLC_FN bool hpmlc_shard_keep(hpml_distributed *d)
{
    int64_t first, end;
    if (!d->all->mesh)
        return hpmlc_fail(d->all, HPML_ERR_STATE, "distribute: with shard the plan must be known before the model is "
                          "recorded; give it to hpml_launch, HPML_PLAN or hpml_comm_set_plan"), false;
    hpmlc_background_choose(d);
    if (d->plan.shard > 1 && d->plan.no_overlap) d->background = false;
    int64_t bytes = d->background || d->plan.shard > 1 ? (int64_t)1 << 18 : INT64_MAX;
    if (!hpmlc_buckets_create(d, NULL, bytes, NULL) || !hpmlc_shard_prepare(d)) return false;
    for (int i = 0; i < d->layout.params; i++) {
        if (d->layout.bucket_of[i] < 0) continue;
        hpmlc_shard_range(d, i, hpmlc_ranks_of(d, hpmlc_param(d, i))->rank, &first, &end);
        if (hpml_trainer_keep(d->t, i, d->plan.shard, first, end - first) != HPML_OK) return hpmlc_failed(d->c), false;
    }
    return hpml_ctx_status(d->ctx) == HPML_OK;
}

HPMLC_FN hpml_status hpmlc_shard_scatter(hpml_comm *c, void *user)
{
    const hpmlc_shard_job *job = (const hpmlc_shard_job *)user;
    c->about.first = "gradients of a bucket, by blocks";
    hpml_status status = hpml_reduce_scatter(c, job->data, job->floats, HPML_ELEMENT_F32, job->reduce);
    c->about.first = NULL;
    return status;
}

HPMLC_FN hpml_status hpmlc_shard_gather(hpml_comm *c, void *user)
{
    const hpmlc_shard_job *job = (const hpmlc_shard_job *)user;
    c->about.first = "values of a bucket";
    hpml_status status = hpml_allgather(c, job->data, job->floats, HPML_ELEMENT_F32);
    c->about.first = NULL;
    return status;
}

/* Moves the seconds since `start`, in which a pass has waited, from the report's compute_s to exposed_s. */
HPMLC_FN void hpmlc_shard_waited(hpml_distributed *d, double start)
{
    const double seconds = hpml_comm_now(d->c) - start;
    d->report.r.exposed_s += seconds;
    d->report.r.compute_s -= seconds;
}

/* Starts the reduce-scatter of a bucket whose gradients are final. */
HPMLC_FN hpml_status hpmlc_shard_start(hpml_distributed *d, hpmlc_bucket *b)
{
    hpmlc_sharding *s      = hpmlc_sharding_of(d);
    hpmlc_slot     *slots  = s->gradients.item;
    const int       number = (int)(b - d->buckets.item);
    const double    start  = hpml_comm_now(d->c);
    hpml_status     status = hpmlc_task_start(d, &b->task, b->c, hpmlc_shard_scatter, &s->job[number]);
    const bool      within = d->plan.shard > 1 || !d->plan.no_overlap; /* the backward pass */
    if (within && !d->background) hpmlc_shard_waited(d, start);
    for (int i = 0; i < s->gradients.count; i++) {
        if (slots[i].bucket != number) continue;
        slots[i].posted = true;
        slots[i].used   = ++s->clock;
    }
    return status;
}

HPMLC_FN bool hpmlc_shard_open(hpml_distributed *d)
{
    hpmlc_sharding *s = hpmlc_sharding_of(d);
    hpml_plan_facts facts;
    hpml_plan_facts_of(d->t, d->all, &facts);
    const bool whole = facts.clips || facts.overflows || facts.steps_tensors || d->pipeline;
    d->start = hpmlc_shard_start;
    s->early = d->background && d->plan.shard < 3 && !d->plan.no_overlap && !whole;
    if (!d->background && d->plan.shard < 2) d->plan.no_overlap = true;
    for (int i = 0; i < d->buckets.count; i++) {
        const hpmlc_bucket *b = &d->buckets.item[i];
        s->job[i].data   = d->plan.shard < 2 ? d->layout.first + b->at : NULL;
        s->job[i].floats = b->floats;
        s->job[i].reduce = d->plan.sum ? HPML_SUM : HPML_MEAN;
    }
    if (d->plan.shard < 3) s->all = hpml_trainer_array(d->t, HPML_ARRAY_VALUES, NULL);
    for (int i = 0; i < d->buckets.count && s->all; i++) {
        s->whole[i].job.data   = s->all + d->buckets.item[i].at;
        s->whole[i].job.floats = d->buckets.item[i].floats;
    }
    return s->all || d->plan.shard == 3;
}

// ---------------------------------------------------------------------------------------------------------------------
// >>shard-slots   whole values and gradients of a few buckets at a time
// ---------------------------------------------------------------------------------------------------------------------
/* Sets the addresses of values, or gradients, of bucket b's parameters: into the slot at `data`, or all to NULL. */
HPMLC_FN void hpmlc_slot_point(hpml_distributed *d, int b, hpml_array which, float *data)
{
    for (int i = 0; i < d->layout.params; i++) {
        if (d->layout.bucket_of[i] != b) continue;
        hpml_tensor *p  = hpmlc_param(d, i);
        float       *at = data ? data + hpml_trainer_place(d->t, i) - d->buckets.item[b].at : NULL;
        if (which == HPML_ARRAY_VALUES) p->data = at;
        else p->grad = at;
        p->raw      = p->data;
        p->raw_grad = p->grad;
    }
}

/* Copies this rank's part of the values of bucket b to `data`, a slot; or copies its part of the gradients from there,
   and adds it to that of earlier micro-batches. */
HPMLC_FN void hpmlc_slot_copy(hpml_distributed *d, int b, hpml_array which, float *data)
{
    for (int i = 0; i < d->layout.params; i++) {
        const hpml_param *q = hpmlc_param(d, i)->param;
        if (d->layout.bucket_of[i] != b || q->keep_count == 0) continue;
        float *part = hpml_trainer_part(d->t, i, which);
        if (!part) return; /* the context has an error */
        float *slot = data + hpml_trainer_place(d->t, i) - d->buckets.item[b].at + q->keep_first;
        const size_t bytes = sizeof(float) * (size_t)q->keep_count;
        if (which == HPML_ARRAY_VALUES) memcpy(slot, part, bytes);
        else if (!d->buckets.item[b].adds) memcpy(part, slot, bytes);
        else for (int64_t k = 0; k < q->keep_count; k++) part[k] += slot[k];
    }
}

/* Returns whether op n (NULL: none) reads bucket b. */
HPMLC_FN bool hpmlc_reads_bucket(const hpml_distributed *d, const hpml_node *n, int b)
{
    for (int k = 0; n && b >= 0 && k < n->src_count; k++)
        if (hpmlc_bucket_read(d, n, k) == b) return true;
    return false;
}

/* Returns the slot, memory for the whole values of a bucket, that has those of bucket b, which op n reads. If there is
   none, starts gathering the values of b in the slot used longest ago, except slots that n or the running op reads;
   NULL: these two ops read all slots. *status: set if gathering starts. */
HPMLC_FN hpmlc_slot *hpmlc_shard_fetch(hpml_distributed *d, int b, const hpml_node *n, hpml_status *status)
{
    hpmlc_sharding *s    = hpmlc_sharding_of(d);
    hpmlc_slot     *slot = NULL;
    for (hpmlc_slot *at = s->values.item; at < s->values.item + s->values.count; at++) {
        if (at->bucket == b) return at;
        if (hpmlc_reads_bucket(d, s->node, at->bucket) || hpmlc_reads_bucket(d, n, at->bucket)) continue;
        if (!slot || at->used < slot->used) slot = at;
    }
    if (!slot) return NULL;
    *status = hpmlc_task_wait(&slot->task);
    if (slot->bucket >= 0) hpmlc_slot_point(d, slot->bucket, HPML_ARRAY_VALUES, NULL);
    slot->bucket     = b;
    slot->used       = s->clock;
    slot->job.data   = s->values.memory + (slot - s->values.item) * s->largest;
    slot->job.floats = d->buckets.item[b].floats;
    hpmlc_slot_copy(d, b, HPML_ARRAY_VALUES, slot->job.data);
    if (*status == HPML_OK)
        *status = hpmlc_task_start(d, &slot->task, d->buckets.item[b].c, hpmlc_shard_gather, &slot->job);
    return slot;
}

/* Frees all slots of values, after waiting for the allgathers that fill them. */
HPMLC_FN hpml_status hpmlc_shard_forget(hpml_distributed *d)
{
    hpmlc_sharding *s      = hpmlc_sharding_of(d);
    hpml_status     status = HPML_OK;
    for (hpmlc_slot *at = s->values.item; at < s->values.item + s->values.count; at++) {
        hpml_status done = hpmlc_task_wait(&at->task);
        if (status == HPML_OK) status = done;
        if (at->bucket >= 0) hpmlc_slot_point(d, at->bucket, HPML_ARRAY_VALUES, NULL);
        at->bucket = -1;
        at->used   = 0;
    }
    s->node = NULL;
    return status;
}

/* Begins to gather, in the background, the values that the pass needs next: the other buckets of the op at->node, then
   those of the next op that reads others, as far as there are slots. */
HPMLC_FN hpml_status hpmlc_shard_prefetch(hpml_distributed *d, const hpml_moment *at)
{
    const hpml_graph *g      = hpml_trainer_graph(d->t);
    hpml_status       status = HPML_OK;
    int               place  = 0;
    bool              more   = d->background;
    for (const hpml_node *n = at->node; n && more && status == HPML_OK; n = hpml_graph_ahead(g, &place))
        for (int k = 0; k < n->src_count && status == HPML_OK; k++) {
            const int b = hpmlc_bucket_read(d, n, k);
            if (b < 0) continue;
            if (!hpmlc_reads_bucket(d, at->node, b)) more = false;
            hpmlc_shard_fetch(d, b, n, &status);
        }
    return status;
}

/* Gathers the parameter values of bucket b for the op at->node, and begins to gather the values of the buckets that the
   pass needs next. */
HPMLC_FN hpml_status hpmlc_shard_values(hpml_distributed *d, int b, const hpml_moment *at)
{
    hpmlc_sharding *s      = hpmlc_sharding_of(d);
    const bool      first  = at->node == s->first_node && at->param == s->first_param;
    const bool      begins = first && (at->pass == HPML_PASS_FORWARD || at->pass == HPML_PASS_EVALUATE);
    hpml_status     status = begins ? hpmlc_shard_forget(d) : HPML_OK; /* the program may have loaded new values */
    s->node = at->node;
    s->clock++;
    hpmlc_slot *slot = hpmlc_shard_fetch(d, b, at->node, &status);
    if (!slot) return hpmlc_fail(d->c, HPML_ERR_STATE, "shard: no slot for the values that \"%s\" reads",
                                 at->node->out->name);
    slot->used = s->clock;
    if (status == HPML_OK) status = hpmlc_shard_prefetch(d, at);
    if (status == HPML_OK) status = hpmlc_task_wait(&slot->task);
    if (status == HPML_OK) hpmlc_slot_point(d, b, HPML_ARRAY_VALUES, slot->job.data);
    return status;
}

/* Waits for the reduce-scatter of the gradients of the bucket in `slot`, keeps this rank's block of the sums, and frees
   the slot. */
HPMLC_FN hpml_status hpmlc_shard_collect(hpml_distributed *d, hpmlc_slot *slot)
{
    hpmlc_sharding *s      = hpmlc_sharding_of(d);
    const int       b      = slot->bucket;
    hpml_status     status = hpmlc_task_wait(&d->buckets.item[b].task);
    if (status == HPML_OK) hpmlc_slot_copy(d, b, HPML_ARRAY_GRADIENTS, s->job[b].data);
    hpmlc_slot_point(d, b, HPML_ARRAY_GRADIENTS, NULL);
    d->buckets.item[b].adds = true;
    slot->bucket = -1;
    slot->posted = false;
    slot->used   = 0;
    return status;
}

/* Gives the gradients of bucket b a slot, memory for a whole bucket, before the first op adds to them. */
HPMLC_FN hpml_status hpmlc_shard_gradients(hpml_distributed *d, int b, const hpml_node *node)
{
    hpmlc_sharding *s      = hpmlc_sharding_of(d);
    hpmlc_slot     *slot   = NULL, *end = s->gradients.item + s->gradients.count;
    hpml_status     status = HPML_OK;
    for (hpmlc_slot *at = s->gradients.item; at < end; at++) {
        if (at->bucket == b && !at->posted) return HPML_OK;
        if (at->bucket >= 0 && !at->posted) continue; /* incomplete */
        if (!slot || at->used < slot->used) slot = at; /* a free slot, or the one started longest ago */
        if (at->bucket != b) continue;
        slot = at; /* the slot that b had in the micro-batch before */
        break;
    }
    if (!slot) return hpmlc_fail(d->c, HPML_ERR_STATE, "shard: no slot for the gradients of \"%s\"", node->out->name);
    if (slot->bucket >= 0) status = hpmlc_shard_collect(d, slot);
    slot->bucket   = b;
    s->job[b].data = s->gradients.memory + (slot - s->gradients.item) * s->largest;
    hpmlc_slot_point(d, b, HPML_ARRAY_GRADIENTS, s->job[b].data);
    return status;
}

/* The trainer's hook `need`, before an op reads a parameter: with shard 3 gathers the whole values, and in the backward
   pass provides memory for the whole gradient. */
HPMLC_FN hpml_status hpmlc_shard_need(void *user, hpml_trainer *t HPMLC_UNUSED, const hpml_moment *at)
{
    hpml_distributed *d      = (hpml_distributed *)user;
    const int         b      = at->param < d->layout.params ? d->layout.bucket_of[at->param] : -1;
    const double      start  = hpml_comm_now(d->c);
    hpml_status       status = HPML_OK;
    if (b < 0) return HPML_OK;
    if (d->plan.shard > 2) status = hpmlc_shard_values(d, b, at);
    if (status == HPML_OK && at->pass == HPML_PASS_BACKWARD) status = hpmlc_shard_gradients(d, b, at->node);
    if (at->pass != HPML_PASS_EVALUATE) hpmlc_shard_waited(d, start);
    return status;
}

/* Waits for the transfers of all slots and frees the slots, because the step makes gathered values out of date. */
HPMLC_FN hpml_status hpmlc_shard_empty(hpml_distributed *d)
{
    hpmlc_sharding *s      = hpmlc_sharding_of(d);
    hpml_status     status = hpmlc_shard_forget(d);
    for (hpmlc_slot *at = s->gradients.item; at < s->gradients.item + s->gradients.count; at++) {
        hpml_status done = at->bucket >= 0 ? hpmlc_shard_collect(d, at) : HPML_OK;
        if (status == HPML_OK) status = done;
    }
    return status;
}

// ---------------------------------------------------------------------------------------------------------------------
// >>shard-step   steps of buckets of which each rank has a part, within the backward pass or after it
// ---------------------------------------------------------------------------------------------------------------------
/* Multiplies the parts that this rank keeps of the gradients of parameters first .. end - 1 by `scale`. Without .sum, a
   gradient that is a mean over only those ranks which have the same part of a parameter is also multiplied by their
   number divided by that of all ranks, because the trained loss is a mean over all ranks. */
HPMLC_FN void hpmlc_shard_scale(hpml_distributed *d, int first, int end, float scale)
{
    for (int i = first; i < end; i++) {
        const hpml_tensor *p = hpmlc_param(d, i);
        if (d->layout.bucket_of[i] < 0) continue;
        const float ranks = d->plan.sum ? 1 : (float)hpmlc_ranks_of(d, p)->size / (float)d->c->size;
        float      *part  = hpml_trainer_part(d->t, i, HPML_ARRAY_GRADIENTS);
        for (int64_t k = 0; k < p->param->keep_count && scale * ranks != 1; k++) part[k] *= scale * ranks;
    }
}

/* Steps this rank's block of each bucket from s->stepped to `to` - 1, whose gradients are added up; then, with shard 1
   and 2, starts to gather the new values of all ranks' blocks. */
HPMLC_FN hpml_status hpmlc_shard_step(hpml_distributed *d, int to)
{
    hpmlc_sharding *s     = hpmlc_sharding_of(d);
    int             first = d->layout.params, end = 0;
    for (int i = 0; i < d->layout.params; i++) {
        const int b = d->layout.bucket_of[i];
        if (b < s->stepped || b >= to) continue;
        first = (int)hpmlc_min(first, i);
        end   = i + 1;
    }
    hpmlc_shard_scale(d, first, end, hpmlc_rescale(d, d->stats.sum[HPMLC_SAMPLES], hpmlc_whole_samples(d)));
    hpml_status status = first < end ? hpml_trainer_apply(d->t, first, end - first) : HPML_OK;
    if (status != HPML_OK) hpmlc_failed(d->c); /* sends the error to the other ranks */
    for (; s->stepped < to && status == HPML_OK; s->stepped++) {
        hpmlc_slot  *whole = &s->whole[s->stepped];
        hpml_comm   *c     = d->buckets.item[s->stepped].c;
        const double start = hpml_comm_now(d->c);
        if (s->all) status = hpmlc_task_start(d, &whole->task, c, hpmlc_shard_gather, &whole->job);
        if (!d->background) hpmlc_dist_waited(d, start);
    }
    return status;
}

/* Within the last micro-batch's backward pass: starts the sum of samples and losses over ranks, which steps need. */
HPMLC_FN hpml_status hpmlc_shard_stats(hpml_distributed *d)
{
    hpmlc_sharding    *s     = hpmlc_sharding_of(d);
    const hpml_graph  *g     = hpml_trainer_graph(d->t);
    const hpml_tensor *value = hpml_trainer_settings(d->t)->loss_tensor;
    const double       samples = d->stats.samples, loss = d->stats.loss;
    if (!value) value = hpml_graph_op(g, hpml_graph_op_count(g) - 1)->out; /* the loss that the trainer has recorded */
    d->stats.samples += (double)s->samples;
    if (s->samples > 0) d->stats.loss += (double)value->data[0] * (double)s->samples;
    hpmlc_buffers_copy(d, d->stats.buffers, false);
    hpmlc_stats_fill(d, d->stats.buffers);
    d->stats.samples = samples; /* hpmlc_dist_pass adds this micro-batch after the pass */
    d->stats.loss    = loss;
    s->posted        = true;
    return hpmlc_task_start(d, &d->stats.task, d->c, hpmlc_stats_sum, d);
}

/* Within the backward pass: steps the buckets whose reduce-scatters were started before the last one. If a rank's loss
   is NaN or infinite, leaves the steps to hpmlc_shard_update, which fails on all ranks. */
HPMLC_FN hpml_status hpmlc_shard_early(hpml_distributed *d)
{
    hpmlc_sharding *s      = hpmlc_sharding_of(d);
    hpml_status     status = HPML_OK;
    while (s->stepped + 1 < d->buckets.posted && status == HPML_OK) {
        const int    b     = s->stepped;
        const double start = hpml_comm_now(d->c);
        hpmlc_slot  *slots = s->gradients.item;
        status = hpmlc_task_wait(&d->stats.task);
        if (d->stats.sum[HPMLC_BAD] > 0 || d->stats.sum[HPMLC_SAMPLES] <= 0 || status != HPML_OK) return status;
        status = hpmlc_task_wait(&d->buckets.item[b].task);
        for (int i = 0; i < s->gradients.count && status == HPML_OK; i++)
            if (slots[i].bucket == b) status = hpmlc_shard_collect(d, &slots[i]);
        hpmlc_shard_waited(d, start);
        if (status == HPML_OK) status = hpmlc_shard_step(d, b + 1);
    }
    return status;
}

/* Counts that the gradient of parameter `param` is final in this micro-batch; then starts what this makes possible. */
HPMLC_FN hpml_status hpmlc_shard_gradient(hpml_distributed *d, int param)
{
    hpmlc_sharding *s      = hpmlc_sharding_of(d);
    const bool      early  = s->early && d->micro + 1 == d->accumulate;
    hpml_status     status = HPML_OK;
    if (d->buckets.posted == d->buckets.count) hpmlc_buckets_reset(d); /* the counts are of the micro-batch before */
    if (!hpmlc_buckets_count(d, param) || (d->plan.no_overlap && d->plan.shard < 2)) return HPML_OK;
    if (early && !s->posted) status = hpmlc_shard_stats(d);
    if (status == HPML_OK) status = hpmlc_buckets_post(d);
    return early && status == HPML_OK ? hpmlc_shard_early(d) : status;
}

/* The trainer's hook `release` with shard 2 and 3: in all micro-batches but the last one, in which the hook `grad` is
   called, the last op of a backward pass that reads a parameter makes its gradient final. */
HPMLC_FN hpml_status hpmlc_shard_release(void *user, hpml_trainer *t HPMLC_UNUSED, const hpml_moment *at)
{
    hpml_distributed *d    = (hpml_distributed *)user;
    const bool        last = at->batch + 1 == at->batches;
    if (last || at->pass != HPML_PASS_BACKWARD || at->param >= d->layout.params) return HPML_OK;
    return hpmlc_shard_gradient(d, at->param);
}

HPMLC_FN hpml_status hpmlc_shard_begin(hpml_distributed *d, int64_t samples, float *loss)
{
    hpmlc_sharding   *s = hpmlc_sharding_of(d);
    int               count;
    const hpml_hooks *h = hpml_trainer_hooks(d->t, &count);
    for (int k = 0; k < count && s->early; k++)
        if (h[k].update && h[k].user != d)
            return hpmlc_fail(d->c, HPML_ERR_UNSUPPORTED, "shard: parameters are stepped within the backward pass, "
                              "before the hook `update` of other hooks; detach these, or set no_overlap");
    for (int i = 0; i < d->buckets.count && d->micro == 0; i++) d->buckets.item[i].adds = false;
    s->samples = samples;
    s->posted  = false;
    s->stepped = 0;
    hpml_status status = hpmlc_dist_pass(d, samples, loss);
    if (status != HPML_OK || d->micro < d->accumulate || s->posted) return status;
    hpmlc_buffers_copy(d, d->stats.buffers, false);
    return hpmlc_dist_post(d, d->stats.buffers);
}

/* Steps this rank's block of each bucket of parameters that was not stepped within the backward pass; waits until, with
   shard 1 and 2, the new values of all ranks' blocks are gathered. */
HPMLC_FN hpml_status hpmlc_shard_update(hpml_distributed *d)
{
    hpmlc_sharding *s      = hpmlc_sharding_of(d);
    hpml_status     status = hpmlc_dist_wait(d), slots = hpmlc_shard_empty(d);
    if (status == HPML_OK) status = slots;
    if (status == HPML_OK) {
        hpmlc_buffers_average(d);
        status = hpmlc_shard_step(d, d->buckets.count);
    }
    double start = hpml_comm_now(d->c);
    for (int i = 0; i < d->buckets.count; i++) {
        hpml_status gathered = hpmlc_task_wait(&s->whole[i].task);
        if (status == HPML_OK) status = gathered;
    }
    hpmlc_dist_waited(d, start);
    if (status == HPML_OK) hpmlc_steps_note(d);
    return status;
}

/* Waits for collectives in flight and frees the slots: parameters no longer point to whole values. */
HPMLC_FN void hpmlc_shard_close(hpml_distributed *d)
{
    if (!d->own) return;
    hpmlc_shard_empty(d);
    for (int i = 0; i < d->buckets.count; i++) hpmlc_task_wait(&hpmlc_sharding_of(d)->whole[i].task);
}

/* The trainer's hook `join`: on entry `whole`, an array of parameter `param` (its values, gradients or a state of the
   optimizer), has only the floats that this rank keeps; each rank broadcasts its own, so that all have them all. */
HPMLC_FN hpml_status hpmlc_shard_join(void *user, hpml_trainer *t HPMLC_UNUSED, int param, int which HPMLC_UNUSED,
                                      float *whole)
{
    hpml_distributed *d      = (hpml_distributed *)user;
    hpml_comm        *c      = hpmlc_ranks_of(d, hpmlc_param(d, param));
    hpml_status       status = HPML_OK;
    int64_t           first, end;
    for (int r = 0; r < c->size && d->layout.bucket_of[param] >= 0 && status == HPML_OK; r++) {
        hpmlc_shard_range(d, param, r, &first, &end);
        if (first < end) status = hpml_broadcast(c, whole + first, sizeof(float) * (size_t)(end - first), r);
    }
    return status;
}

// ---------------------------------------------------------------------------------------------------------------------
// >>strategy-factors   synchronous steps, dense layers by the factors of their gradients
// ---------------------------------------------------------------------------------------------------------------------
/* Routes FACTORS and HYBRID (hpml_route). When the backward pass has computed dz of a dense layer, x and dz of this
   rank are copied to its blocks of two arrays, and an allgather of each starts. hpmlc_factors_update then computes, on
   every rank, dw = 1/p sum over ranks r of dz_r^T x_r, as one product. Short batches are filled up with rows of zeros.
   The local dw is not computed, because the weight has no `grad` during the pass. Other gradients are exchanged as by
   strategy-sync. With servers there is one block, which hpmlc_factor_pack sends (>>servers-step). */

typedef struct hpmlc_factor { /* a dense layer, z = x w^T */
    hpml_distributed *d;
    const hpml_node  *node;
    hpml_tensor      *w;
    float            *grad;   /* the gradient of w, kept while w->grad is NULL */
    int64_t           rows, m, n; /* rows of a sample; columns of dz; of x */
    float            *x, *dz; /* (blocks * batch * rows, n) and (.., m): a block for each rank; with servers, one */
    bool              has_begun; /* the allgathers of this step have started */
    hpmlc_task        task;
} hpmlc_factor;

struct hpmlc_factors {
    hpmlc_factor  *layer;      /* (count) in the order of the backward pass */
    int            count;
    hpmlc_factor **of;         /* (params) the layer with this weight; NULL: none */
    int64_t        samples;    /* number of this rank's samples in this step */
};

/* Returns whether the backend of ctx computes the results of layers as f32 in host memory. */
HPMLC_FN bool hpmlc_has_factors(const hpml_ctx *ctx)
{
    const hpml_backend *b = hpml_ctx_backend(ctx);
    hpml_dtype dtype = b->activation_dtype ? b->activation_dtype(hpml_ctx_device(ctx)) : HPML_DTYPE_F32;
    return b->host && dtype == HPML_DTYPE_F32;
}

/* Sets the gradient addresses (grad, raw_grad) of layers that send factors to NULL, so that the trainer and the buckets
   skip these gradients; show: sets the addresses back. */
HPMLC_FN void hpmlc_factors_show(const hpmlc_factors *f, bool show)
{
    for (const hpmlc_factor *it = f->layer; it < f->layer + f->count; it++) {
        it->w->grad     = show ? it->grad : NULL;
        it->w->raw_grad = it->w->grad;
    }
}

/* Adds node n to d->factors->layer, the list of layers for which ranks exchange the factors x and dz of the weight's
   gradient, not the gradient, if n is a dense layer whose weight no other op reads; with HPML_ROUTE_HYBRID only if the
   factors are fewer bytes. readers: (params) number of ops that read each parameter. False: no memory. */
HPMLC_FN bool hpmlc_factors_add(hpml_distributed *d, const hpml_node *n, const int *readers)
{
    hpmlc_factors *f = d->factors;
    hpml_tensor   *w = n->op == HPML_OP_LINEAR ? n->src[1] : NULL;
    const bool     serves = hpmlc_plan_serves(&d->plan);
    if (!w || !w->param || !w->grad || readers[w->param->index] != 1) return true;
    if (n->src[0]->batch_rows == 0 || n->src[0]->dtype != HPML_DTYPE_F32) return true;
    hpmlc_factor *it = &f->layer[f->count];
    it->d    = d;
    it->node = n;
    it->w    = w;
    it->grad = w->grad;
    it->m    = w->shape[0];
    it->n    = w->shape[1];
    it->rows = hpml_tensor_count(n->out) / n->out->shape[0] * n->out->batch_rows / it->m;
    int64_t all   = (serves ? 1 : d->c->size) * d->layout.batch * it->rows; /* rows of all blocks */
    double  share = serves ? (double)(it->m + d->plan.servers * it->n) : 0.5 * (double)(it->m + it->n);
    bool    pays  = (double)all * share <= (double)it->m * (double)it->n;
    if (d->plan.route == HPML_ROUTE_HYBRID && !pays) return true;
    it->x  = (float *)hpmlc_dist_alloc(d, sizeof(float) * (size_t)all * (size_t)it->n);
    it->dz = (float *)hpmlc_dist_alloc(d, sizeof(float) * (size_t)all * (size_t)it->m);
    f->of[w->param->index] = it;
    f->count++;
    return it->x && it->dz;
}

/* Lists the dense layers that send the factors of their gradients (the layers' inputs x and output gradients dz)
   instead of the gradients: walks from the results of the trainer's model to its inputs. False: no memory. */
HPMLC_FN bool hpmlc_factors_find(hpml_distributed *d)
{
    const hpml_trainer_desc *t = hpml_trainer_settings(d->t);
    const hpml_node *ends[] = { t->output->node, t->loss_tensor ? t->loss_tensor->node : NULL };
    int  count = 0;
    bool good  = true;
    for (int e = 0; e < 2; e++) count = ends[e] && ends[e]->index >= count ? ends[e]->index + 1 : count;
    const hpml_node **found = (const hpml_node **)hpmlc_dist_alloc(d, sizeof *found * (size_t)(count + 1));
    int *readers = (int *)hpmlc_dist_alloc(d, sizeof *readers * (size_t)(d->layout.params + 1));
    if (!found || !readers) return false;
    for (int e = 0; e < 2; e++) found[ends[e] ? ends[e]->index : count] = ends[e];
    for (int i = count - 1; i >= 0; i--)
        for (int s = 0; found[i] && s < found[i]->src_count; s++) {
            const hpml_tensor *x = found[i]->src[s];
            if (x && x->node) found[x->node->index] = x->node;
            if (x && x->param) readers[x->param->index]++;
        }
    for (int i = count - 1; i >= 0 && good; i--) good = !found[i] || hpmlc_factors_add(d, found[i], readers);
    return good;
}

/* If d->plan.route asks for it, lists in d->factors the layers for which ranks exchange the factors x and dz of the
   weight's gradient instead of this gradient. False: no memory. */
HPMLC_FN bool hpmlc_factors_create(hpml_distributed *d)
{
    const size_t params = (size_t)d->layout.params;
    if (!hpmlc_factors_is_chosen(d->c, &d->plan)) return true;
    hpmlc_factors *f = (hpmlc_factors *)hpmlc_dist_alloc(d, sizeof *f);
    d->factors = f;
    if (!f) return false;
    f->layer = (hpmlc_factor *)hpmlc_dist_alloc(d, sizeof *f->layer * (params + 1));
    f->of    = (hpmlc_factor **)hpmlc_dist_alloc(d, sizeof *f->of * (params + 1));
    return f->layer && f->of && hpmlc_factors_find(d);
}

HPMLC_FN bool hpmlc_factors_open(hpml_distributed *d)
{
    if (!hpmlc_factors_create(d)) return false;
    hpmlc_factors_show(d->factors, false);
    bool good = hpmlc_sync_open(d);
    hpmlc_factors_show(d->factors, true);
    return good;
}

/* Gathers the factors of one layer's gradient (the layer's inputs x and output gradients dz) from all ranks. It is the
   function that a background task runs; user: the layer's hpmlc_factor. */
HPMLC_FN hpml_status hpmlc_factor_gather(hpml_comm *c, void *user)
{
    const hpmlc_factor *it   = (const hpmlc_factor *)user;
    const int64_t       rows = c->size * it->d->layout.batch * it->rows;
    c->about.first = it->w->name;
    hpml_status status = hpml_allgather(c, it->x, rows * it->n, HPML_ELEMENT_F32);
    if (status == HPML_OK) status = hpml_allgather(c, it->dz, rows * it->m, HPML_ELEMENT_F32);
    c->about.first = NULL;
    return status;
}

HPMLC_FN hpml_status hpmlc_factor_start(hpmlc_factor *it)
{
    it->has_begun = true;
    return hpmlc_task_start(it->d, &it->task, it->d->c, hpmlc_factor_gather, it);
}

/* Copies `rows` rows of `cols` floats from `from` to block number `rank` of `all`, whose blocks have `most` rows each,
   and fills the rest of this block with zeros. */
HPMLC_FN void hpmlc_factor_copy(float *all, int rank, const float *from, int64_t rows, int64_t most, int64_t cols)
{
    float *block = all + rank * most * cols;
    memcpy(block, from, sizeof(float) * (size_t)(rows * cols));
    memset(block + rows * cols, 0, sizeof(float) * (size_t)((most - rows) * cols));
}

/* Copies x and dz (a layer's input and output gradient), the factors of the gradient of parameter `param`, to block
   `block` of the arrays that gather all ranks' factors. Returns the struct that has these arrays, or NULL if the layer
   of this parameter sends no factors. */
HPMLC_FN hpmlc_factor *hpmlc_factor_keep(hpml_distributed *d, int param, int block)
{
    const hpmlc_factors *f  = d->factors;
    hpmlc_factor        *it = f ? f->of[param] : NULL;
    if (!it) return NULL;
    int64_t rows = f->samples * it->rows, most = d->layout.batch * it->rows;
    hpmlc_factor_copy(it->x, block, it->node->src[0]->data, rows, most, it->n);
    hpmlc_factor_copy(it->dz, block, it->node->out->grad, rows, most, it->m);
    return it;
}

HPMLC_FN hpml_status hpmlc_factors_gradient(hpml_distributed *d, int param)
{
    hpmlc_factor *it = hpmlc_factor_keep(d, param, d->c->rank);
    if (!it) return hpmlc_sync_gradient(d, param);
    return d->plan.no_overlap ? HPML_OK : hpmlc_factor_start(it);
}

/* Runs hpmlc_dist_pass without the weight gradients of layers that send factors (input, output gradient) instead. */
HPMLC_FN hpml_status hpmlc_factors_pass(hpml_distributed *d, int64_t samples, float *loss)
{
    hpmlc_factors *f = d->factors;
    if (!f) return hpmlc_dist_pass(d, samples, loss);
    f->samples = samples;
    hpmlc_factors_show(f, false);
    hpml_status status = hpmlc_dist_pass(d, samples, loss);
    hpmlc_factors_show(f, true);
    return status;
}

HPMLC_FN hpml_status hpmlc_factors_begin(hpml_distributed *d, int64_t samples, float *loss)
{
    hpmlc_factors *f      = d->factors;
    hpml_status    status = hpmlc_factors_pass(d, samples, loss);
    double start = hpml_comm_now(d->c);
    for (int i = 0; i < f->count && status == HPML_OK; i++)
        if (!f->layer[i].has_begun) status = hpmlc_factor_start(&f->layer[i]);
    if (!d->background) hpmlc_dist_waited(d, start);
    if (status != HPML_OK) return status;
    hpmlc_buffers_copy(d, d->stats.buffers, false);
    return hpmlc_dist_post(d, d->stats.buffers);
}

HPMLC_FN hpml_status hpmlc_factors_update(hpml_distributed *d)
{
    const hpmlc_factors *f     = d->factors;
    const float          share = d->plan.sum ? 1 : 1 / (float)d->c->size;
    hpml_status          status = HPML_OK;
    for (hpmlc_factor *it = f->layer; it < f->layer + f->count; it++) {
        double      start = hpml_comm_now(d->c);
        hpml_status s     = hpmlc_task_wait(&it->task);
        hpmlc_dist_waited(d, start);
        it->has_begun = false;
        if (status == HPML_OK) status = s;
        if (status != HPML_OK) continue;
        status = hpml_sgemm(d->ctx, true, false, it->m, it->n, d->c->size * d->layout.batch * it->rows, share, it->dz,
                            it->m, it->x, it->n, 0, it->grad, it->n);
    }
    if (status == HPML_OK) return hpmlc_sync_update(d);
    hpmlc_tasks_wait(d);
    return status;
}

HPMLC_FN void hpmlc_factors_close(hpml_distributed *d)
{
    hpmlc_factors *f = d->factors;
    for (int i = 0; f && i < f->count; i++) hpmlc_task_wait(&f->layer[i].task);
}

HPML_API hpml_route hpml_distribute_route(const hpml_distributed *d, int param)
{
    if (!d || param < 0 || param >= d->layout.params || !d->factors) return HPML_ROUTE_ALLREDUCE;
    return d->factors->of[param] ? HPML_ROUTE_FACTORS : HPML_ROUTE_ALLREDUCE;
}

// ---------------------------------------------------------------------------------------------------------------------
// >>strategy-delayed   double buffering: steps apply the gradients of the step before
// ---------------------------------------------------------------------------------------------------------------------
/* Strategy delayed: w_(t+1) = w_t - lr f(g(w_(t-1))), optimizer f: the exchange of a step's gradients g has the whole
   next step to hide behind (double buffering of Seide et al. 2014, "1-Bit Stochastic Gradient Descent"; a staleness of
   one step). Two sets of gradients: the trainer's own, which the backward pass writes, and those in flight; an update
   swaps them. Running statistics of batchnorm are treated alike: their change in the step is sent, and added one step
   late. In a trial of the batch search each step applies its own gradients: the delay would favour small batches. */

enum { HPMLC_DELAYED_SAMPLES, HPMLC_DELAYED_LOSS, HPMLC_DELAYED_WHOLE, HPMLC_DELAYED_HEAD };

typedef struct hpmlc_delayed {
    float *in_flight;    /* (span) gradients of the step before, laid out as the trainer's */
    float *before;       /* (buffer_total) running statistics when the step began; then their change in the step */
    float *change;       /* (buffer_total) mean change of the running statistics in the step before, by name */
    float  head[HPMLC_DELAYED_HEAD]; /* of the step before: samples, mean loss, samples of the whole step */
    double whole;        /* samples of a whole step, when the gradients in flight were computed */
    bool   is_in_flight; /* gradients are in flight; false before the first step */
    bool   is_complete;  /* the exchange of in_flight is over: in_flight, change and head are set */
    bool   is_loaded;    /* in_flight, change and head come from a checkpoint */
} hpmlc_delayed;

HPMLC_FN bool hpmlc_delayed_is_chosen(hpml_comm *c HPMLC_UNUSED, const hpml_plan *plan) { return plan->delayed; }

HPMLC_FN bool hpmlc_delayed_open(hpml_distributed *d)
{
    hpmlc_delayed *own = (hpmlc_delayed *)hpmlc_dist_alloc(d, sizeof *own);
    const size_t   row = sizeof(float) * (size_t)(d->layout.buffer_total + 1);
    d->own = own;
    if (!own) return false;
    own->in_flight = (float *)hpmlc_dist_alloc(d, (size_t)d->layout.span * sizeof(float));
    own->before    = (float *)hpmlc_dist_alloc(d, row);
    own->change    = (float *)hpmlc_dist_alloc(d, row);
    return own->change && hpmlc_host_open(d, own->in_flight, hpmlc_host_start);
}

HPMLC_FN hpml_status hpmlc_delayed_begin(hpml_distributed *d, int64_t samples, float *loss)
{
    hpmlc_delayed *own = (hpmlc_delayed *)d->own;
    if (d->micro == 0) hpmlc_buffers_copy(d, own->before, false);
    return hpmlc_dist_pass(d, samples, loss);
}

HPMLC_FN hpml_status hpmlc_delayed_gradient(hpml_distributed *d, int param)
{
    hpmlc_buckets_count(d, param);
    return HPML_OK; /* the exchange starts after the update has swapped the gradients */
}

/* Completes the exchange of the gradients of the step before: waits for it and keeps that step's mean loss and mean
   change of the running statistics, or takes these from a checkpoint that was loaded. */
HPMLC_FN hpml_status hpmlc_delayed_complete(hpml_distributed *d)
{
    hpmlc_delayed *own = (hpmlc_delayed *)d->own;
    const double  *s   = d->stats.sum;
    if (own->is_loaded) {
        d->report.r.loss    = (double)own->head[HPMLC_DELAYED_LOSS];
        d->report.r.samples = (int64_t)own->head[HPMLC_DELAYED_SAMPLES];
        own->whole          = (double)own->head[HPMLC_DELAYED_WHOLE];
        own->is_loaded      = false;
        own->is_complete    = true;
    }
    if (own->is_complete) return HPML_OK;
    hpml_status status = hpmlc_dist_wait(d);
    if (status != HPML_OK) return status;
    for (int64_t k = 0; k < d->layout.buffer_total; k++)
        own->change[k] = (float)(s[HPMLC_STATS + k] / s[HPMLC_SAMPLES]);
    own->head[HPMLC_DELAYED_SAMPLES] = (float)s[HPMLC_SAMPLES];
    own->head[HPMLC_DELAYED_LOSS]    = (float)(s[HPMLC_LOSS] / s[HPMLC_SAMPLES]);
    own->head[HPMLC_DELAYED_WHOLE]   = (float)own->whole;
    own->is_complete = true;
    return HPML_OK;
}

/* Sets the running statistics back to those before the step, and keeps their change in the step in own->before. */
HPMLC_FN void hpmlc_delayed_undo(hpml_distributed *d)
{
    hpmlc_delayed *own = (hpmlc_delayed *)d->own;
    float         *now = d->stats.buffers;
    hpmlc_buffers_copy(d, now, false);
    hpmlc_buffers_copy(d, own->before, true);
    for (int64_t k = 0; k < d->layout.buffer_total; k++) own->before[k] = now[k] - own->before[k];
}

/* Adds own->change, the change of the running statistics in the step before, averaged over the samples of all ranks, to
   the running statistics of the model. */
HPMLC_FN void hpmlc_delayed_redo(hpml_distributed *d)
{
    const hpmlc_delayed *own = (const hpmlc_delayed *)d->own;
    float               *now = d->stats.buffers;
    hpmlc_buffers_copy(d, now, false);
    for (int64_t k = 0; k < d->layout.buffer_total; k++) now[k] += own->change[k];
    hpmlc_buffers_copy(d, now, true);
}

/* Swaps the trainer's gradients with those in flight, which are of the step before; both arrays are on the host. */
HPMLC_FN void hpmlc_delayed_swap(hpml_distributed *d)
{
    hpmlc_delayed *own  = (hpmlc_delayed *)d->own;
    float         *mine = d->layout.host, *other = own->in_flight;
    for (int64_t k = 0; k < d->layout.span; k++) {
        float g  = mine[k];
        mine[k]  = other[k];
        other[k] = g;
    }
}

HPMLC_FN hpml_status hpmlc_delayed_update(hpml_distributed *d)
{
    hpmlc_delayed *own     = (hpmlc_delayed *)d->own;
    hpml_status    status  = HPML_OK;
    double         samples = 0, whole;
    hpmlc_delayed_undo(d);
    if (own->is_in_flight) {
        status = hpmlc_delayed_complete(d);
        if (status != HPML_OK) return status;
        hpmlc_delayed_redo(d);
        samples = (double)own->head[HPMLC_DELAYED_SAMPLES];
    }
    whole      = own->whole;
    own->whole = hpmlc_whole_samples(d);
    hpmlc_host_fetch(d, 0, d->layout.span);
    hpmlc_delayed_swap(d);
    hpmlc_steps_note(d);
    own->is_in_flight = !d->trial.on;
    own->is_complete  = false;
    own->is_loaded    = false;
    d->buckets.posted = 0;
    status = hpmlc_dist_post(d, own->before);
    if (d->trial.on && status == HPML_OK) {
        status = hpmlc_delayed_complete(d);
        if (status == HPML_OK) hpmlc_delayed_redo(d);
        samples = d->stats.sum[HPMLC_SAMPLES];
        whole   = own->whole;
        hpmlc_delayed_swap(d);
    }
    if (status != HPML_OK) return status;
    return samples > 0 ? hpmlc_host_apply(d, samples, whole) : HPML_OK; /* the first step has nothing to apply */
}

/* Lists the arrays of this strategy that checkpoints hold: the residuals of exchanges, and the gradients and changes of
   running statistics that the next step applies, which are the same on all ranks. Before saving, completes the exchange
   in flight. False: an error on the context. */
HPMLC_FN bool hpmlc_delayed_state(hpml_distributed *d, hpmlc_states *list)
{
    hpmlc_delayed *own   = (hpmlc_delayed *)d->own;
    int64_t        moved = 0;
    if (list->is_saving && own->is_in_flight && hpmlc_delayed_complete(d) != HPML_OK) return false;
    if (!list->is_saving) {
        own->is_in_flight = false;
        own->is_loaded    = true;
    }
    if (!hpmlc_buckets_state(d, list)) return false;
    list->present = &own->is_in_flight;
    hpmlc_state_same(list, "delayed", "step", own->head, HPMLC_DELAYED_HEAD);
    for (int i = 0; i < d->layout.params; i++) {
        const hpml_tensor *p = hpmlc_param(d, d->layout.by_name[i]);
        int64_t            n = hpml_tensor_count(p);
        if (p->grad || hpmlc_is_elsewhere(d, p))
            hpmlc_state_same(list, "delayed.gradient", p->name, hpmlc_state_place(d, own->in_flight, p), n);
        if (hpmlc_buffer_floats(d, p) == 0) continue;
        hpmlc_state_same(list, "delayed.change", p->name, own->change + moved, n);
        moved += n;
    }
    list->present = NULL;
    return hpml_ctx_status(d->ctx) == HPML_OK;
}

// ---------------------------------------------------------------------------------------------------------------------
// >>strategy-exact   the same bits for every number of ranks
// ---------------------------------------------------------------------------------------------------------------------
/* Strategy exact: floats do not add up to the same bits in every order, integers do. Leaf l, of L samples, is
   samples [l L, (l + 1) L). A rank computes its leaves one after another, each from the same running statistics, and
   keeps their gradients (of the sum over samples). Then, tensor by tensor: the largest |g| of all leaves and ranks is m
   < 2^e; with 2^k >= leaves, scale 2^(62 - e - k) keeps any sum of leaves below 2^62. Rounding a leaf to a 64-bit
   integer loses less than 2^(e + k - 62), far below a float's last bit, and integers are added in any order (as in
   Demmel and Nguyen 2013, "Fast Reproducible Floating-Point Summation"). Tensors that a codec packs go through an
   exchange with one residual a leaf, whose sums are made in the order of the leaves. */

typedef struct hpmlc_exact {
    float   *leaf;    /* (copies.count, total) gradients, and changes of running statistics, of this rank's leaves */
    int64_t *sum;     /* (total) sum of this rank's rounded leaves, then of all ranks' */
    float   *largest; /* (params) largest |g| of each tensor in all leaves */
    float   *before;  /* (buffer_total) running statistics that the step began with */
    int64_t  total;   /* floats of one leaf: gradients, running statistics */
} hpmlc_exact;

/* Returns how many floats parameter i has in a leaf's array: gradient, or change of running statistics; 0: none. */
HPMLC_FN int64_t hpmlc_leaf_floats(const hpml_distributed *d, int i)
{
    const hpml_tensor *p = hpmlc_param(d, i);
    return p->grad || p->param->buffer ? hpml_tensor_count(p) : 0;
}

/* Creates an exchange for the tensors that the codec packs, with one gradient for each leaf. False: an error. */
HPMLC_FN bool hpmlc_exact_exchange(hpml_distributed *d)
{
    const hpmlc_exact *own = (const hpmlc_exact *)d->own;
    hpml_exchange_desc e;
    int64_t            at = 0;
    int                params = d->layout.params;
    hpml_gradient     *g = (hpml_gradient *)hpml_ctx_alloc(d->ctx, sizeof *g * (size_t)params, NULL);
    if (!g) return false;
    hpmlc_exchange_settings(d, &e, g, 0);
    for (int i = 0; i < params; i++) {
        hpml_tensor *t = hpmlc_param(d, i);
        hpml_packing pack;
        hpmlc_gradient_of(t, own->leaf + at, &g[e.count]);
        hpml_status status = hpml_packing_init(&pack, &d->plan.codec, g[e.count].rows, g[e.count].cols);
        at += hpmlc_leaf_floats(d, i);
        if (!t->grad || status != HPML_OK || pack.codec->linear) continue;
        d->layout.bucket_of[i] = 0;
        e.count++;
    }
    if (e.count > 0 && d->copies.count == 0)
        return hpmlc_fail(d->c, HPML_ERR_UNSUPPORTED, "distribute: %lld leaves for %d ranks leave this one without; "
                          "lower .leaf or the number of ranks", (long long)d->copies.all, d->c->size), false;
    if (e.count > 0) {
        hpmlc_bucket *b = &d->buckets.item[d->buckets.count++];
        e.reduce    = HPML_SUM;
        e.leaves    = (int32_t)d->copies.count;
        e.leaf_step = own->total;
        b->x        = hpmlc_exchange_make(d->c, &e, HPMLC_ANYWHERE);
        b->now      = b->x;
    }
    hpml_ctx_release(d->ctx, g);
    return hpml_ctx_status(d->ctx) == HPML_OK;
}

HPMLC_FN bool hpmlc_exact_open(hpml_distributed *d)
{
    hpmlc_exact        *own    = (hpmlc_exact *)hpmlc_dist_alloc(d, sizeof *own);
    hpmlc_layout       *l      = &d->layout;
    hpmlc_copies       *leaves = &d->copies;
    const int           p      = d->c->size;
    d->own = own;
    if (!own) return false;
    leaves->all   = (d->plan.global_batch + d->plan.leaf - 1) / d->plan.leaf;
    leaves->first = hpml_block(leaves->all, p, d->c->rank);
    leaves->count = hpml_block(leaves->all, p, d->c->rank + 1) - leaves->first;
    own->total    = l->grad_total + l->buffer_total;
    l->grain      = d->plan.leaf;
    own->leaf     = (float *)hpmlc_dist_alloc(d, (size_t)(own->total * leaves->count + 1) * sizeof(float));
    own->sum      = (int64_t *)hpmlc_dist_alloc(d, (size_t)own->total * sizeof(int64_t));
    own->largest  = (float *)hpmlc_dist_alloc(d, (size_t)l->params * sizeof(float));
    own->before   = (float *)hpmlc_dist_alloc(d, (size_t)(l->buffer_total + 1) * sizeof(float));
    d->buckets.item = (hpmlc_bucket *)hpmlc_dist_alloc(d, sizeof *d->buckets.item);
    return hpml_ctx_status(d->ctx) == HPML_OK && hpmlc_exact_exchange(d);
}

/* Copies the gradients of a leaf of `samples` samples, and its change of the running statistics times `samples`, to
   `row`, the leaf's floats; raises own->largest, the largest |value| of each tensor over the leaves; then sets the
   running statistics back to own->before, from which every leaf of the step starts. */
HPMLC_FN void hpmlc_leaf_store(hpml_distributed *d, float *row, double samples)
{
    const hpmlc_exact *own    = (const hpmlc_exact *)d->own;
    const hpmlc_host_view *view  = &d->layout.view;
    const float       *before = own->before;
    for (int i = 0; i < d->layout.params; i++) {
        hpml_tensor *p = hpmlc_param(d, i);
        int64_t      n = hpmlc_leaf_floats(d, i);
        float       *x = hpmlc_host_view_begin(view, p->grad ? p->grad : p->data, n);
        if (p->grad) memcpy(row, x, (size_t)n * sizeof(float));
        else {
            for (int64_t k = 0; k < n; k++) row[k] = (float)(samples * ((double)x[k] - (double)before[k]));
            memcpy(x, before, (size_t)n * sizeof(float)); /* the next leaf starts from the same statistics */
            hpmlc_host_view_end(view, p->data, n);
            before += n;
        }
        for (const float *end = row + n; row < end; row++) {
            bool is_nan = *row != *row; /* a NaN, which no later value of `largest` replaces */
            if (fabsf(*row) > own->largest[i] || is_nan) own->largest[i] = fabsf(*row);
        }
    }
}

HPMLC_FN hpml_status hpmlc_exact_leaves(hpml_distributed *d, int64_t samples, float *loss)
{
    hpmlc_exact *own = (hpmlc_exact *)d->own;
    float        part = 0;
    hpml_status  status = HPML_OK;
    hpmlc_buffers_copy(d, own->before, false);
    memset(own->leaf, 0, (size_t)(own->total * d->copies.count) * sizeof(float));
    memset(own->largest, 0, (size_t)d->layout.params * sizeof(float));
    d->stats.loss = 0;
    for (int64_t l = 0, at = 0; at < samples && status == HPML_OK; l++, at += d->plan.leaf) {
        int64_t n = hpmlc_min(samples - at, d->plan.leaf);
        status    = hpml_trainer_forward_backward(d->t, at, n, (float)n, false, &part);
        hpmlc_leaf_store(d, own->leaf + l * own->total, (double)n);
        d->stats.loss += (double)part * (double)n;
    }
    d->stats.samples = (double)samples;
    *loss            = samples > 0 ? (float)(d->stats.loss / (double)samples) : 0;
    return status;
}

HPMLC_FN double hpmlc_exact_scale(const hpml_distributed *d, float largest)
{
    int e = 0, k = hpmlc_log2((int)d->copies.all) + 1;
    if (!(largest > 0)) return 0;
    frexp((double)largest, &e);
    return ldexp(1, 62 - e - k);
}

/* Rounds the gradients and statistics of this rank's leaves to integers, but for tensors that a codec packs, and adds
   up those of all leaves and ranks. An error names a tensor with a NaN or infinity. */
HPMLC_FN hpml_status hpmlc_exact_sum(hpml_distributed *d)
{
    const hpmlc_exact   *own = (const hpmlc_exact *)d->own;
    const hpml_algorithm a = d->plan.algorithm;
    const int            params = d->layout.params;
    int64_t              at = 0, used = 0;
    memset(own->sum, 0, (size_t)own->total * sizeof *own->sum);
    hpml_status status = hpmlc_reduce_all(d->c, own->largest, params, HPML_ELEMENT_F32, HPML_MAX, a);
    for (int i = 0; i < params && status == HPML_OK; i++) {
        int64_t n = hpmlc_leaf_floats(d, i);
        bool    is_packed = d->layout.bucket_of[i] >= 0;
        if (!(own->largest[i] - own->largest[i] == 0)) return hpmlc_dist_blame(d, HPML_ERR_NONFINITE, (int64_t)i << 20);
        const double scale = hpmlc_exact_scale(d, own->largest[i]);
        int64_t     *sum   = own->sum + used;
        for (int64_t l = 0; l < d->copies.count && !is_packed; l++) {
            const float *row = own->leaf + l * own->total + at;
            for (int64_t k = 0; k < n; k++) sum[k] += (int64_t)rint((double)row[k] * scale);
        }
        at += n;
        if (!is_packed) used += n;
    }
    if (status != HPML_OK) return status;
    d->c->about.first = hpmlc_param(d, 0)->name;
    d->c->about.last  = hpmlc_param(d, params - 1)->name;
    status = hpmlc_reduce_all(d->c, own->sum, used, HPML_ELEMENT_I64, HPML_SUM, a);
    hpmlc_clear_label(d->c);
    return status;
}

/* Converts the integer sums over all leaves to mean gradients over `samples`, and adds the mean changes to the running
   statistics. The sums of tensors that a codec packs are in the floats of leaf 0, where the exchange has left them. */
HPMLC_FN void hpmlc_exact_apply(hpml_distributed *d, double samples)
{
    const hpmlc_exact *own = (const hpmlc_exact *)d->own;
    const hpmlc_host_view *view = &d->layout.view;
    const int64_t     *sum = own->sum;
    int64_t            at  = 0;
    for (int i = 0; i < d->layout.params; i++) {
        hpml_tensor *p = hpmlc_param(d, i);
        int64_t      n = hpmlc_leaf_floats(d, i);
        double       scale = hpmlc_exact_scale(d, own->largest[i]), inverse = scale > 0 ? 1 / scale : 0;
        bool         is_packed = d->layout.bucket_of[i] >= 0;
        float       *to = p->grad ? p->grad : p->data, *x = hpmlc_host_view_begin(view, to, n);
        for (int64_t k = 0; k < n; k++) {
            double total = is_packed ? (double)own->leaf[at + k] : (double)*sum++ * inverse;
            double mean  = total / samples;
            x[k] = p->grad ? (float)mean : (float)((double)x[k] + mean);
        }
        hpmlc_host_view_end(view, to, n);
        at += n;
    }
}

HPMLC_FN hpml_status hpmlc_exact_begin(hpml_distributed *d, int64_t samples, float *loss)
{
    double      start  = hpml_comm_now(d->c), sums = hpmlc_axes_seconds(d);
    hpml_status status = hpmlc_exact_leaves(d, samples, loss);
    hpmlc_dist_computed(d, start, sums);
    if (status != HPML_OK) return hpmlc_failure(d->c);
    start = hpml_comm_now(d->c);
    hpmlc_stats_fill(d, NULL);
    status = hpmlc_reduce_all(d->c, d->stats.sum, HPMLC_STATS, HPML_ELEMENT_F64, HPML_SUM, HPML_AUTO);
    if (status == HPML_OK) status = hpmlc_stats_read(d);
    if (status == HPML_OK && d->buckets.count > 0) {
        status = hpml_exchange_run(d->buckets.item[0].x);
        if (status == HPML_ERR_NONFINITE) return hpmlc_dist_blame(d, status, hpmlc_dist_bad(d));
    }
    if (status == HPML_OK) status = hpmlc_exact_sum(d);
    if (status == HPML_OK) hpmlc_exact_apply(d, d->stats.sum[HPMLC_SAMPLES]);
    hpmlc_dist_waited(d, start);
    return status;
}

HPMLC_FN hpml_status hpmlc_exact_update(hpml_distributed *d)
{
    hpmlc_steps_note(d);
    return hpml_trainer_apply(d->t, 0, d->layout.params);
}

/* Lists the arrays of this strategy that checkpoints hold: residuals, which belong to leaves of the batch, not to
   ranks. */
HPMLC_FN bool hpmlc_exact_state(hpml_distributed *d, hpmlc_states *list)
{
    list->copy = "leaves";
    return hpmlc_buckets_state(d, list);
}

// ---------------------------------------------------------------------------------------------------------------------
// >>strategy-link   synchronous steps, gradients exchanged on devices
// ---------------------------------------------------------------------------------------------------------------------
/* Strategy link: as >>strategy-sync, but the gradients stay on the device: the communicator's link (hpml_device_link:
   NCCL) adds them up on a stream of its own. What a codec packs goes through the steps of >>stripes, with the same
   bits: the device packs and adds, its link moves; hpmlc_link_start packs and sends during the backward pass, _finish
   adds and unpacks before the update, for all buckets together. Messages have no header that reports a NaN, because
   packing waits for a flag of the device that does. The host starts collectives and does not wait for them, but for
   those of a step at the start of the next one, because the link's wait has a deadline and the host's wait for the loss
   has none. */

typedef struct hpmlc_link {
    const hpml_device_link *l;
    bool                    is_checked; /* the trainer checks the gradients' norm before it uses them */
    bool                    is_clipped; /* the trainer clips the gradients' norm */
} hpmlc_link;

HPMLC_FN bool hpmlc_link_is_chosen(hpml_comm *c, const hpml_plan *plan)
{
    const hpml_backend *b = hpml_ctx_backend(c->ctx);
    bool packs = plan->codec.kind == HPML_CODEC_NONE || (b->encode && b->decode);
    bool by_rows = !plan->codec.custom && !hpmlc_whole_codec(&plan->codec);
    return !b->host && c->link.begin && by_rows && packs;
}

HPMLC_FN hpml_status hpmlc_link_start(hpml_distributed *d, hpmlc_bucket *b)
{
    hpml_comm              *c    = d->c;
    hpml_exchange          *x    = b->now;
    const hpml_device_link *l    = &c->link;
    bool                    mean = x->d.reduce == HPML_MEAN;
    x->runs++;
    x->bad = x->packed > 0 ? hpmlc_exchange_pack(c, x) : 0;
    hpml_status status = l->begin(l->user);
    if (status == HPML_OK && x->packed > 0)
        status = l->swap(l->user, x->sent, x->sent_at, false, x->received, x->received_at);
    if (status == HPML_OK && x->span) status = l->allreduce(l->user, x->span, x->plain, mean);
    for (int i = 0; i < x->d.count && !x->span && status == HPML_OK; i++) {
        const hpml_gradient *g = &x->item[i].g;
        if (x->item[i].plain) status = l->allreduce(l->user, g->data, g->rows * g->cols, mean);
    }
    c->counters.bytes += hpml_exchange_bytes(x);
    b->task.status = status == HPML_OK ? l->end(l->user) : status;
    return HPML_OK;
}

/* Allocates and sets up the state of a strategy that uses a device link. start: begins the exchange of a bucket.
   Returns the state, d->own: `size` bytes, which begin with the hpmlc_link that all such strategies have; NULL: no
   memory. */
HPMLC_FN void *hpmlc_link_attach(hpml_distributed *d, size_t size, hpmlc_start_fn *start)
{
    const hpml_trainer_desc *t   = hpml_trainer_settings(d->t);
    hpmlc_link              *own = (hpmlc_link *)hpmlc_dist_alloc(d, size);
    d->own   = own;
    d->start = start;
    if (!own) return NULL;
    own->l          = &d->c->link;
    own->is_clipped = t->clip_norm > 0;
    own->is_checked = (own->is_clipped && !t->no_finite_check) || hpmlc_overflows(d->t, d->ctx);
    hpmlc_background_choose(d); /* background thread for the sum of loss and running statistics */
    return own;
}

#define HPMLC_LINK_BUCKET ((int64_t)8 << 20) /* bytes of a bucket; smaller collectives do not reach a link's rate */

HPMLC_FN bool hpmlc_link_open(hpml_distributed *d)
{
    return hpmlc_link_attach(d, sizeof(hpmlc_link), hpmlc_link_start) &&
           hpmlc_buckets_create(d, d->layout.first, HPMLC_LINK_BUCKET, hpmlc_bucket_open);
}

/* Lets the host wait until the device link's collectives are done. If a deadline passes before that, returns an error,
   which is also sent to the other ranks. */
HPMLC_FN hpml_status hpmlc_link_check(hpml_distributed *d)
{
    const hpml_device_link *l = ((const hpmlc_link *)d->own)->l;
    return l->check(l->user) == HPML_OK ? HPML_OK : hpmlc_failure(d->c);
}

HPMLC_FN hpml_status hpmlc_link_begin(hpml_distributed *d, int64_t samples, float *loss)
{
    hpml_status status = hpmlc_link_check(d); /* waits for the previous step, whose update the device makes now */
    return status == HPML_OK ? hpmlc_sync_begin(d, samples, loss) : status;
}

/* Makes later work of the device wait for the collectives of the link l. check: the host waits for them first, because
   this wait has a deadline, while the host's later wait for the device, needed in any case, has none. */
HPMLC_FN hpml_status hpmlc_link_wait(const hpml_device_link *l, bool check)
{
    hpml_status status = check ? l->check(l->user) : HPML_OK;
    return status == HPML_OK ? l->wait(l->user) : status;
}

/* Completes the exchanges of compressed gradients, all buckets at once: adds up and packs this rank's stripes, sends
   the sums to all ranks, unpacks. Skips buckets without packed tensors. */
HPMLC_FN hpml_status hpmlc_link_finish(hpml_distributed *d)
{
    const bool              check = ((const hpmlc_link *)d->own)->is_checked;
    const hpml_device_link *l = &d->c->link;
    const hpmlc_bucket     *b, *end = d->buckets.item + d->buckets.count;
    bool                    packed = false;
    for (b = d->buckets.item; b < end; b++) packed = packed || b->now->packed > 0;
    hpml_status status = hpmlc_link_wait(l, check || packed);
    if (!packed || status != HPML_OK) return status;
    for (b = d->buckets.item; b < end; b++) {
        int64_t bad_sum = b->now->packed > 0 ? hpmlc_exchange_add(d->c, b->now) : 0;
        if (b->now->bad == 0) b->now->bad = bad_sum;
    }
    if (hpmlc_failed(d->c)) return hpml_ctx_status(d->ctx);
    status = l->begin(l->user);
    for (b = d->buckets.item; b < end && status == HPML_OK; b++) {
        const hpml_exchange *x = b->now;
        if (x->packed > 0) status = l->swap(l->user, x->sums, x->sum_at, true, x->sums, x->sum_at);
    }
    if (status == HPML_OK) status = l->end(l->user);
    if (status == HPML_OK) status = hpmlc_link_wait(l, check);
    for (b = d->buckets.item; b < end && status == HPML_OK; b++)
        if (b->now->packed > 0) hpmlc_exchange_unpack(d->c, b->now);
    return status;
}

/* Makes the update of a step whose gradients a device link exchanges. finish: completes the exchange on the devices. */
HPMLC_FN hpml_status hpmlc_link_step(hpml_distributed *d, hpml_status (*finish)(hpml_distributed *d))
{
    const hpmlc_link *own    = (const hpmlc_link *)d->own;
    hpml_status       status = hpmlc_dist_wait(d);
    if (status != HPML_OK) return status;
    hpmlc_buffers_average(d);
    double start = hpml_comm_now(d->c);
    status = finish(d);
    int64_t bad = hpmlc_dist_bad(d);
    if (status == HPML_OK && d->plan.codec.kind != HPML_CODEC_NONE)
        status = hpmlc_reduce_all(d->c, &bad, 1, HPML_ELEMENT_I64, HPML_MAX, HPML_AUTO);
    hpmlc_dist_waited(d, start);
    if (status == HPML_OK && bad) status = HPML_ERR_NONFINITE;
    if (status != HPML_OK) return hpmlc_dist_blame(d, status, bad);
    hpmlc_steps_note(d);
    float scale = hpmlc_rescale(d, d->stats.sum[HPMLC_SAMPLES], hpmlc_whole_samples(d));
    if (scale != 1) own->l->scale(own->l->user, d->layout.first, d->layout.span, scale, 1);
    status = hpml_trainer_apply(d->t, 0, d->layout.params);
    /* with clipping, waits for the link's collectives at most until a deadline, because the host's wait for the
       update on the device has no deadline */
    return status == HPML_OK && own->is_clipped ? own->l->check(own->l->user) : status;
}

HPMLC_FN hpml_status hpmlc_link_update(hpml_distributed *d) { return hpmlc_link_step(d, hpmlc_link_finish); }

HPMLC_FN bool hpmlc_link_state(hpml_distributed *d, hpmlc_states *list)
{
    return (!list->is_saving || hpmlc_link_check(d) == HPML_OK) && hpmlc_buckets_state(d, list);
}

// ---------------------------------------------------------------------------------------------------------------------
// >>strategy-nodes   synchronous steps, a device link inside nodes, messages between them
// ---------------------------------------------------------------------------------------------------------------------
/* Strategy nodes: as >>strategy-link, where the link ends at the node. Each bucket is cut into a shard for each of the
   p ranks of a node: devices add up the node's gradients such that rank i has the sum of shard i (reduce-scatter), the
   host exchanges it with the ranks that have shard i on the other nodes, and the devices share the result (all-gather).
   Only 1 / p of the gradients leaves the node by each rank, and only these are packed by a codec (two-level all-reduce:
   Mikami et al. 2018, "Massively Distributed SGD"). Where a codec packs, shards end at ends of rows. */

typedef struct hpmlc_shard {
    hpmlc_bucket           *bucket;
    const hpml_device_link *l;
    int64_t                *cut;    /* (ranks of the node + 1) where the ranks' shards begin in the bucket, in floats */
    float                  *data;   /* (floats) this rank's shard on the host */
    int64_t                 at, floats; /* the shard's range of the bucket, in floats */
    int                     divide; /* divisor of the node's sum: ranks of the node for a mean, else 1 */
} hpmlc_shard;

typedef struct hpmlc_nodes {
    hpmlc_link   link;
    hpmlc_shard *shard;     /* (buckets) this rank's shard of each bucket */
    int          ranks;     /* number of ranks on this node */
    int          place;     /* number of this rank on its node, from 0 */
    char         copy[32];  /* word for nodes in the names of residuals in checkpoints */
} hpmlc_nodes;

HPMLC_FN bool hpmlc_nodes_is_chosen(hpml_comm *c, const hpml_plan *plan)
{
    return c->link.across && hpmlc_link_is_chosen(c, plan);
}

/* Waits until the sum of this node's ranks over shard `user`, a hpmlc_shard, is on the host, divides it by s->divide,
   and exchanges the shard over c, which has a rank of each node. */
HPMLC_FN hpml_status hpmlc_shard_exchange(hpml_comm *c, void *user)
{
    hpmlc_shard *s      = (hpmlc_shard *)user;
    hpml_status  status = s->l->landed(s->l->user, s->data);
    if (status != HPML_OK) return hpmlc_fail(c, status, "the sum of this node's devices has not come to the host");
    hpmlc_divide_f32(s->data, s->floats, (float)s->divide);
    status = hpmlc_exchange_on(c, s->bucket->now);
    return status == HPML_ERR_NONFINITE ? HPML_OK : status; /* hpmlc_link_step sends hpml_exchange.bad to all ranks */
}

/* Starts adding up bucket b inside the node and, in the background, the exchange of this rank's shard of b with other
   nodes. Without a background thread hpmlc_nodes_finish makes this exchange later, because here the exchange would make
   the calling thread wait for the device. */
HPMLC_FN hpml_status hpmlc_nodes_start(hpml_distributed *d, hpmlc_bucket *b)
{
    const hpmlc_nodes *own = (const hpmlc_nodes *)d->own;
    hpmlc_shard       *s   = &own->shard[b - d->buckets.item];
    b->task.status = s->l->reduce_scatter(s->l->user, d->layout.first + b->at, s->cut, s->data);
    d->c->counters.bytes += (int64_t)sizeof(float) * (b->floats + (own->ranks - 2) * s->floats);
    if (b->task.status != HPML_OK || !d->background) return HPML_OK;
    b->task.status = hpmlc_task_start(d, &b->task, s->l->across, hpmlc_shard_exchange, s);
    return HPML_OK;
}

/* Cuts bucket b into a shard for each rank of the node, with a codec between rows of the bucket's tensors, whose
   gradients are g; fills in *s for this rank's shard. False: no memory. */
HPMLC_FN bool hpmlc_shard_cut(hpml_distributed *d, hpmlc_bucket *b, const hpml_gradient *g, hpmlc_shard *s)
{
    const hpmlc_nodes *own = (const hpmlc_nodes *)d->own;
    const int          p   = own->ranks;
    s->bucket = b;
    s->l      = own->link.l;
    s->divide = d->plan.sum ? 1 : p;
    s->cut    = (int64_t *)hpmlc_dist_alloc(d, sizeof *s->cut * (size_t)(p + 1));
    if (!s->cut) return false;
    for (int r = 1; r <= p; r++) {
        s->cut[r] = hpml_block(b->floats, p, r);
        for (int i = 0; i < b->count && d->plan.codec.kind != HPML_CODEC_NONE; i++) {
            int64_t into = s->cut[r] - (g[i].data - d->layout.first - b->at); /* floats of the tensor before the cut */
            if (into > 0 && into < g[i].rows * g[i].cols) s->cut[r] -= into % g[i].cols;
        }
    }
    s->at     = s->cut[own->place];
    s->floats = s->cut[own->place + 1] - s->at;
    s->data   = s->l->stage(s->l->user, s->floats + 1); /* + 1, because a shard may be empty */
    return s->data != NULL;
}

/* Makes the exchange of this rank's shard of bucket b; g: the gradients of the bucket's tensors. With a codec, the
   exchange is of those rows of the tensors that are in the shard; else of the whole shard as one tensor. False: an
   error on the context. */
HPMLC_FN bool hpmlc_nodes_bucket(hpml_distributed *d, hpmlc_bucket *b, const hpml_gradient *g)
{
    const hpmlc_nodes *own = (const hpmlc_nodes *)d->own;
    hpmlc_shard       *s   = &own->shard[b - d->buckets.item];
    hpml_exchange_desc e;
    if (!hpmlc_shard_cut(d, b, g, s)) return false;
    hpml_gradient *part = (hpml_gradient *)hpml_ctx_alloc(d->ctx, sizeof *part * (size_t)(b->count + 1), NULL);
    if (!part) return false;
    hpmlc_exchange_settings(d, &e, part, 0);
    for (int i = 0; i < b->count && d->plan.codec.kind != HPML_CODEC_NONE; i++) {
        int64_t first = g[i].data - d->layout.first - b->at - s->at; /* where tensor i begins in the shard */
        int64_t at = hpmlc_max(first, 0), end = hpmlc_min(first + g[i].rows * g[i].cols, s->floats);
        if (at >= end) continue;
        part[e.count]      = g[i];
        part[e.count].data = s->data + at;
        part[e.count].rows = (end - at) / g[i].cols;
        e.count++;
    }
    if (e.count == 0) {
        part->data = s->data;
        part->rows = 1;
        part->cols = s->floats + 1;
        e.count    = 1;
    }
    bool good = hpmlc_bucket_exchanges(d, b, s->l->across, &e, HPMLC_NODE_SHARE);
    hpml_ctx_release(d->ctx, part);
    return good;
}

HPMLC_FN bool hpmlc_nodes_open(hpml_distributed *d)
{
    const hpml_comm *c   = d->c;
    hpmlc_nodes     *own = (hpmlc_nodes *)hpmlc_link_attach(d, sizeof *own, hpmlc_nodes_start);
    if (!own) return false;
    own->ranks = c->size / own->link.l->across->size;
    for (int r = 0; r < c->rank; r++) own->place += c->node[r] == c->node[c->rank];
    snprintf(own->copy, sizeof own->copy, "nodes_of_%d", own->ranks);
    own->shard = (hpmlc_shard *)hpmlc_dist_alloc(d, sizeof *own->shard * (size_t)d->layout.params);
    return own->shard && hpmlc_buckets_create(d, d->layout.first, HPMLC_LINK_BUCKET, hpmlc_nodes_bucket);
}

/* Completes the exchange of all buckets' shards between nodes; each rank's sum goes to all ranks of the node. */
HPMLC_FN hpml_status hpmlc_nodes_finish(hpml_distributed *d)
{
    const hpmlc_nodes      *own = (const hpmlc_nodes *)d->own;
    const hpml_device_link *l = own->link.l;
    hpml_counters           sent;
    hpml_status             status = HPML_OK;
    for (int i = 0; i < d->buckets.count && status == HPML_OK; i++) {
        hpmlc_shard *s = &own->shard[i];
        if (!d->background) status = hpmlc_shard_exchange(l->across, s);
        if (status == HPML_OK) status = l->allgather(l->user, d->layout.first + s->bucket->at, s->cut, s->data);
    }
    hpml_comm_counters(l->across, &sent);
    hpml_comm_counters_reset(l->across);
    hpmlc_counters_add(&d->c->counters, &sent);
    return status == HPML_OK ? hpmlc_link_wait(l, own->link.is_checked) : status;
}

HPMLC_FN hpml_status hpmlc_nodes_update(hpml_distributed *d)
{
    hpml_status status = hpmlc_link_check(d); /* here, because a job that waits for the link has no deadline */
    return status == HPML_OK ? hpmlc_link_step(d, hpmlc_nodes_finish) : status;
}

/* Lists the residuals of parameter p, of which this rank has the rows of its shard: a copy for each node (errors of
   packing gradients) and one for all ranks (errors of packing sums). */
HPMLC_FN void hpmlc_nodes_param_state(hpml_distributed *d, hpmlc_states *list, const hpml_tensor *p)
{
    const hpmlc_nodes  *own = (const hpmlc_nodes *)d->own;
    const hpml_comm    *across = own->link.l->across;
    const hpmlc_shard  *s = &own->shard[d->layout.bucket_of[p->param->index]];
    const hpml_exchange *x = s->bucket->x;
    const hpmlc_item   *it = NULL;
    hpml_gradient       whole;
    hpml_packing        pack;
    int64_t             at = 0, n = hpml_tensor_count(p);
    hpmlc_gradient_of(hpml_param_at(d->ctx, p->param->index), NULL, &whole);
    if (hpml_packing_init(&pack, &d->plan.codec, whole.rows, whole.cols) != HPML_OK) return;
    if (pack.codec->linear || pack.residual_count == 0) return;
    for (int i = 0; i < x->d.count && !it; i++)
        if (x->item[i].g.name == p->name && x->item[i].residual) it = &x->item[i];
    if (it) at = s->bucket->at + s->at + (it->g.data - s->data) - hpmlc_gradient_at(d, p);
    hpmlc_state *node = hpmlc_state_add(list, HPMLC_NODE, "residual", own->copy, p->name, n);
    if (!node) return;
    node->copies.first = across->rank;
    node->copies.count = 1;
    node->copies.all   = across->size;
    if (it) hpmlc_state_part(node, x, it->residual, at, it->g.rows * it->g.cols);
    hpmlc_state *sum = hpmlc_state_add(list, HPMLC_SHARED, "residual", "stripes", p->name, n);
    if (sum && it) hpmlc_state_part(sum, x, it->stripe, at + it->my_row * it->g.cols, it->my_rows * it->g.cols);
}

HPMLC_FN bool hpmlc_nodes_state(hpml_distributed *d, hpmlc_states *list)
{
    if (list->is_saving && hpmlc_link_check(d) != HPML_OK) return false;
    for (int i = 0; i < d->layout.params; i++) {
        const hpml_tensor *p = hpmlc_param(d, d->layout.by_name[i]);
        if (p->grad) hpmlc_nodes_param_state(d, list, p);
    }
    return hpml_ctx_status(d->ctx) == HPML_OK;
}

// ---------------------------------------------------------------------------------------------------------------------
// >>weights   what the strategies that exchange parameters have in common
// ---------------------------------------------------------------------------------------------------------------------
/* Each rank trains alone with its share of the global batch, and ranks meet: every .period steps all of them (local,
   block, elastic), or in each step neighbours (gossip). A meeting is one sum over ranks of an array with the parameters
   (or with their differences to a centre), the running statistics, samples and loss: between meetings nothing is sent.
   The state of the optimizer stays on its rank. */

enum { HPMLC_MEET_SAMPLES, HPMLC_MEET_LOSS, HPMLC_MEET_STATS };

typedef struct hpmlc_weights {
    float  *meet;      /* (floats) summed at a meeting: values, running statistics, samples, loss times samples */
    float  *centre;    /* (span) block: parameters after the last meeting; elastic: the centre; else NULL */
    float  *momentum;  /* (span) block: velocity of the outer optimizer; else NULL */
    int64_t floats;
    int     there;     /* number of ranks at the last meeting */
    int64_t since;     /* steps since the last meeting */
    double  samples, loss; /* sums on this rank since the last meeting: samples; loss times samples */
    bool    is_set;    /* centre and momentum are set; false before the first step */
    bool    is_ahead;  /* block: parameters began this block ahead of the centre */
} hpmlc_weights;

/* Copies the trainer's array `which` (an hpml_array: parameters, optimizer state ...) to `host`, in host memory; set:
   copies `host` to the array instead. Each has d->layout.span floats, the padding between tensors included. False: the
   trainer has no such array. */
HPMLC_FN bool hpmlc_array_copy(const hpml_distributed *d, int which, float *host, bool set)
{
    int64_t n;
    float  *array = hpml_trainer_array(d->t, (hpml_array)which, &n);
    if (array) hpmlc_host_view_copy(&d->layout.view, host, array, d->layout.span, set);
    return array != NULL;
}

HPMLC_FN bool hpmlc_weights_open(hpml_distributed *d)
{
    hpmlc_weights *own = (hpmlc_weights *)hpmlc_dist_alloc(d, sizeof *own);
    d->own = own;
    if (!own) return false;
    own->floats = d->layout.span + d->layout.buffer_total + HPMLC_MEET_STATS;
    own->meet   = (float *)hpmlc_dist_alloc(d, (size_t)own->floats * sizeof(float));
    return own->meet && hpmlc_array_copy(d, HPML_ARRAY_VALUES, own->meet, false);
}

/* Does what hpmlc_weights_open does, and allocates two arrays for strategies block and elastic: own->centre, parameters
   that the ranks have in common, and own->momentum, the velocity of the outer optimizer, which only block uses. */
HPMLC_FN bool hpmlc_weights_open_centre(hpml_distributed *d)
{
    const size_t bytes = (size_t)d->layout.span * sizeof(float);
    if (!hpmlc_weights_open(d)) return false;
    hpmlc_weights *own = (hpmlc_weights *)d->own;
    own->centre   = (float *)hpmlc_dist_alloc(d, bytes);
    own->momentum = (float *)hpmlc_dist_alloc(d, bytes);
    return own->momentum != NULL;
}

/* Computes the gradient of a micro-batch of this rank, as a trainer without other ranks does. */
HPMLC_FN hpml_status hpmlc_weights_begin(hpml_distributed *d, int64_t samples, float *loss)
{
    hpmlc_weights *own   = (hpmlc_weights *)d->own;
    double         start = hpml_comm_now(d->c), sums = hpmlc_axes_seconds(d);
    if (own->centre && !own->is_set) own->is_set = hpmlc_array_copy(d, HPML_ARRAY_VALUES, own->centre, false);
    if (d->micro == 0) d->stats.samples = 0;
    hpml_status status = hpml_trainer_run_inner(d->t, samples, loss);
    d->stats.samples += (double)samples;
    own->samples += (double)samples;
    own->loss += (double)*loss * (double)samples;
    hpmlc_dist_computed(d, start, sums);
    d->micro++;
    if (status != HPML_OK) hpmlc_failed(d->c); /* sends the error to the other ranks */
    return status;
}

/* Steps this rank's parameters by its gradient, if this rank had samples; adds the step to the report
   (hpml_distribute_get). */
HPMLC_FN hpml_status hpmlc_weights_step(hpml_distributed *d)
{
    hpmlc_weights *own    = (hpmlc_weights *)d->own;
    hpml_status    status = d->stats.samples > 0 ? hpml_trainer_update_inner(d->t) : HPML_OK;
    if (own->samples > 0) d->report.r.loss = own->loss / own->samples;
    d->report.r.samples = (int64_t)own->samples;
    own->since++;
    return status;
}

/* Sets the sums of samples and loss since the last meeting to 0. */
HPMLC_FN void hpmlc_weights_restart(hpmlc_weights *own)
{
    own->since   = 0;
    own->samples = 0;
    own->loss    = 0;
}

/* Makes the sum of a meeting: adds up own->meet over all ranks; the caller has set the first layout.span floats of
   own->meet. Sets the running statistics to their means over ranks, and the loss and samples of the report
   (hpml_distribute_get) to those of all ranks since the last meeting. */
HPMLC_FN hpml_status hpmlc_weights_sum(hpml_distributed *d)
{
    hpmlc_weights *own     = (hpmlc_weights *)d->own;
    float         *buffers = own->meet + d->layout.span, *stats = buffers + d->layout.buffer_total;
    double         start   = hpml_comm_now(d->c);
    int            root;
    hpmlc_buffers_copy(d, buffers, false);
    stats[HPMLC_MEET_SAMPLES] = (float)own->samples;
    stats[HPMLC_MEET_LOSS]    = (float)own->loss;
    d->c->about.first = "parameters";
    hpml_status status = hpmlc_sum_there(d, own->meet, own->floats, &own->there, &root);
    d->c->about.first = NULL;
    hpmlc_dist_waited(d, start);
    if (status != HPML_OK) return status;
    hpmlc_divide_f32(buffers, d->layout.buffer_total, (float)own->there);
    hpmlc_buffers_copy(d, buffers, true);
    d->report.r.samples = (int64_t)stats[HPMLC_MEET_SAMPLES];
    if (d->report.r.samples > 0) d->report.r.loss = (double)(stats[HPMLC_MEET_LOSS] / stats[HPMLC_MEET_SAMPLES]);
    hpmlc_weights_restart(own);
    return HPML_OK;
}

/* Sets own->meet to the mean of the parameters of all ranks (if ranks are lost: of the others), and the running
   statistics to their means. */
HPMLC_FN hpml_status hpmlc_weights_mean(hpml_distributed *d)
{
    hpmlc_weights *own = (hpmlc_weights *)d->own;
    hpmlc_array_copy(d, HPML_ARRAY_VALUES, own->meet, false);
    hpml_status status = hpmlc_weights_sum(d);
    hpmlc_divide_f32(own->meet, d->layout.span, (float)own->there);
    return status;
}

/* Makes a step of this rank alone and, after every d->plan.period steps, a meeting: calls `meet`, which exchanges
   parameters with all ranks. */
HPMLC_FN hpml_status hpmlc_weights_update(hpml_distributed *d, hpml_status (*meet)(hpml_distributed *d))
{
    const hpmlc_weights *own    = (const hpmlc_weights *)d->own;
    hpml_status          status = hpmlc_weights_step(d);
    if (status == HPML_OK && own->since >= d->plan.period) status = meet(d);
    hpmlc_steps_note(d);
    return status;
}

/* Lists for checkpoints the centre and its momentum, if the strategy has a centre. Before saving, calls the strategy's
   `finish` and sets the states of the optimizers to their means over the ranks, because a checkpoint has one array of
   each state for all ranks. */
HPMLC_FN bool hpmlc_weights_state(hpml_distributed *d, hpmlc_states *list)
{
    hpmlc_weights *own    = (hpmlc_weights *)d->own;
    hpml_status    status = list->is_saving ? d->strategy->finish(d) : HPML_OK;
    int            root;
    for (int i = HPML_ARRAY_STATE; i < HPML_ARRAY_END && list->is_saving && status == HPML_OK; i++) {
        if (!hpmlc_array_copy(d, i, own->meet, false)) continue;
        status = hpmlc_sum_there(d, own->meet, d->layout.span, &own->there, &root);
        hpmlc_divide_f32(own->meet, d->layout.span, (float)own->there);
        hpmlc_array_copy(d, i, own->meet, true);
    }
    hpmlc_weights_restart(own);
    own->is_ahead = false;
    if (!list->is_saving) own->is_set = false;
    list->present = &own->is_set;
    for (int i = 0; i < d->layout.params && own->centre && status == HPML_OK; i++) {
        const hpml_tensor *p = hpmlc_param(d, d->layout.by_name[i]);
        if (!p->grad && !hpmlc_is_elsewhere(d, p)) continue;
        hpmlc_state_same(list, "centre", p->name, hpmlc_state_place(d, own->centre, p), hpml_tensor_count(p));
        hpmlc_state_same(list, "centre.momentum", p->name, hpmlc_state_place(d, own->momentum, p),
                         hpml_tensor_count(p));
    }
    list->present = NULL;
    return hpml_ctx_status(d->ctx) == HPML_OK;
}

// ---------------------------------------------------------------------------------------------------------------------
// >>strategy-local   local SGD: the mean of the parameters
// ---------------------------------------------------------------------------------------------------------------------
/* Strategy local: every `period` steps w <- mean over ranks of w_r. With period 1, without momentum and with equal
   shares of the batch this is the step of strategy sync. */

HPMLC_FN hpml_status hpmlc_local_meet(hpml_distributed *d)
{
    const hpmlc_weights *own    = (const hpmlc_weights *)d->own;
    hpml_status          status = hpmlc_weights_mean(d);
    if (status == HPML_OK) hpmlc_array_copy(d, HPML_ARRAY_VALUES, own->meet, true);
    return status;
}

HPMLC_FN hpml_status hpmlc_local_update(hpml_distributed *d) { return hpmlc_weights_update(d, hpmlc_local_meet); }

HPMLC_FN hpml_status hpmlc_local_finish(hpml_distributed *d)
{
    return ((const hpmlc_weights *)d->own)->since > 0 ? hpmlc_local_meet(d) : HPML_OK;
}

// ---------------------------------------------------------------------------------------------------------------------
// >>strategy-block   an outer optimizer with momentum for the mean change in a block
// ---------------------------------------------------------------------------------------------------------------------
/* Strategy block: a block begins with parameters s on all ranks and ends after `period` steps with w_r on rank r. The
   mean change g = s - mean of w_r is the gradient of an outer step on the centre c, with velocity v:
       v <- momentum v + lr g,   c <- c - v,   s = c (nesterov: s = c - momentum v)
   Momentum 1 - 1 / ranks and lr 1 are those of blockwise model-update filtering (Chen and Huo 2016). An optimizer SGD
   begins each block with its own momentum at zero; other optimizers keep their state. */

/* Sets `start` to the parameters with which a block (`period` training steps) begins: the centre c or, if `ahead`
   (Nesterov momentum), c - momentum v. */
HPMLC_FN void hpmlc_block_start(const hpml_distributed *d, bool ahead, float *start)
{
    const hpmlc_weights *own  = (const hpmlc_weights *)d->own;
    const float          look = ahead ? d->plan.outer_momentum : 0;
    for (int64_t k = 0; k < d->layout.span; k++) start[k] = own->centre[k] - look * own->momentum[k];
}

HPMLC_FN hpml_status hpmlc_block_meet(hpml_distributed *d)
{
    hpmlc_weights *own  = (hpmlc_weights *)d->own;
    const float    look = own->is_ahead ? d->plan.outer_momentum : 0;
    hpml_status    status = hpmlc_weights_mean(d);
    if (status != HPML_OK) return status;
    for (int64_t k = 0; k < d->layout.span; k++) {
        float change = own->centre[k] - look * own->momentum[k] - own->meet[k];
        own->momentum[k] = d->plan.outer_momentum * own->momentum[k] + d->plan.outer_lr * change;
        own->centre[k] -= own->momentum[k];
    }
    own->is_ahead = d->plan.outer_nesterov;
    hpmlc_block_start(d, own->is_ahead, own->meet);
    hpmlc_array_copy(d, HPML_ARRAY_VALUES, own->meet, true);
    if (hpml_trainer_settings(d->t)->optimizer != HPML_OPT_SGD) return HPML_OK;
    memset(own->meet, 0, (size_t)d->layout.span * sizeof(float));
    hpmlc_array_copy(d, HPML_ARRAY_STATE, own->meet, true);
    return HPML_OK;
}

HPMLC_FN hpml_status hpmlc_block_update(hpml_distributed *d) { return hpmlc_weights_update(d, hpmlc_block_meet); }

/* Ends the current block, if it has had steps, by an outer step, and sets the parameters to the centre c (with nesterov
   a block begins with c - momentum v instead). */
HPMLC_FN hpml_status hpmlc_block_finish(hpml_distributed *d)
{
    hpmlc_weights *own    = (hpmlc_weights *)d->own;
    hpml_status    status = own->since > 0 ? hpmlc_block_meet(d) : HPML_OK;
    if (status == HPML_OK && own->is_ahead) hpmlc_array_copy(d, HPML_ARRAY_VALUES, own->centre, true);
    own->is_ahead = false;
    return status;
}

// ---------------------------------------------------------------------------------------------------------------------
// >>strategy-elastic   parameters and a common centre attract each other
// ---------------------------------------------------------------------------------------------------------------------
/* Strategy elastic: every `period` steps, for parameters w_r of rank r, centre c and d_r = (w_r - c) * plan.elastic,
       w_r <- w_r - d_r,   c <- c + sum over ranks of d_r
   so that the sum of c and all w_r stays the same. All ranks have the same c, the result of the training. */

HPMLC_FN hpml_status hpmlc_elastic_meet(hpml_distributed *d)
{
    hpmlc_weights *own  = (hpmlc_weights *)d->own;
    const int64_t  span = d->layout.span;
    float         *moved = (float *)hpmlc_scratch(d->c, (size_t)span * sizeof(float));
    if (!moved) return hpml_ctx_status(d->ctx);
    hpmlc_array_copy(d, HPML_ARRAY_VALUES, own->meet, false);
    for (int64_t k = 0; k < span; k++) {
        float difference = d->plan.elastic * (own->meet[k] - own->centre[k]);
        moved[k]     = own->meet[k] - difference;
        own->meet[k] = difference;
    }
    hpmlc_array_copy(d, HPML_ARRAY_VALUES, moved, true);
    hpml_status status = hpmlc_weights_sum(d);
    for (int64_t k = 0; k < span && status == HPML_OK; k++) own->centre[k] += own->meet[k];
    return status;
}

HPMLC_FN hpml_status hpmlc_elastic_update(hpml_distributed *d) { return hpmlc_weights_update(d, hpmlc_elastic_meet); }

/* Sets the parameters to the centre of elastic averaging and, unless the last step ended with a meeting of the ranks,
   batchnorm's running statistics to their means over the ranks. */
HPMLC_FN hpml_status hpmlc_elastic_finish(hpml_distributed *d)
{
    const hpmlc_weights *own    = (const hpmlc_weights *)d->own;
    hpml_status          status = own->since > 0 ? hpmlc_weights_mean(d) : HPML_OK;
    if (status == HPML_OK && own->is_set) hpmlc_array_copy(d, HPML_ARRAY_VALUES, own->centre, true);
    return status;
}

// ---------------------------------------------------------------------------------------------------------------------
// >>strategy-gossip   averaging with neighbours in each step
// ---------------------------------------------------------------------------------------------------------------------
/* Strategy gossip: in step t, with the mixing matrix W of the topology (>>mix),
       w_r <- sum over neighbours j, and r itself, of W_rj w_j - lr f(g_r(w_r))
   where f is the optimizer and g_r the gradient of rank r's samples, at the w_r that rank r had before the mixing. */

HPMLC_FN hpml_status hpmlc_gossip_update(hpml_distributed *d)
{
    hpmlc_weights *own     = (hpmlc_weights *)d->own;
    float         *buffers = own->meet + d->layout.span;
    double         start   = hpml_comm_now(d->c);
    hpmlc_array_copy(d, HPML_ARRAY_VALUES, own->meet, false);
    hpmlc_buffers_copy(d, buffers, false);
    hpml_status status = hpml_mix(d->c, own->meet, d->layout.span + d->layout.buffer_total, d->plan.topology,
                                  d->plan.seed, hpml_trainer_step_count(d->t));
    hpmlc_dist_waited(d, start);
    if (status != HPML_OK) return status;
    hpmlc_array_copy(d, HPML_ARRAY_VALUES, own->meet, true);
    hpmlc_buffers_copy(d, buffers, true);
    status = hpmlc_weights_step(d);
    hpmlc_weights_restart(own);
    hpmlc_steps_note(d);
    return status;
}

// ---------------------------------------------------------------------------------------------------------------------
// >>servers   parameter servers: ranges of parameters, requests of workers
// ---------------------------------------------------------------------------------------------------------------------
/* The last S ranks are servers and keep the n floats that are trained: server s updates [s n / S, (s + 1) n / S). The
   other ranks, K workers, compute gradients: in a step each pushes to every server that server's range of the gradient
   and gets the range's new values, so a server gets 4 K n / S bytes and sends as many, plus headers (Li et al. 2014,
   "Scaling Distributed Machine Learning with the Parameter Server").

   All ranks run the same program. On a server a step of the trainer answers requests until each worker has done as many
   steps as the server. A server is one thread, with a receive in flight for the next request of each worker; it takes
   the request that arrives first, and keeps open one that it may not answer yet. A worker has at most one request open
   at each server. The strategy's `enter`, called after each request, decides which gradients to add and whom to answer.

   With .survive of the communicator a worker that fails or leaves is lost, and the others go on; a lost server is an
   error of all workers. Headers have the communicator's tag HPML_TAG_MAX, floats have tag HPML_TAG_MAX - 1. */

enum { HPMLC_TAG_REQUEST = HPML_TAG_MAX, HPMLC_TAG_FLOATS = HPML_TAG_MAX - 1 };

typedef enum hpmlc_request_kind {
    HPMLC_PUSH,  /* floats follow, a gradient or values; is answered */
    HPMLC_PULL,  /* nothing follows; is answered. A PUSH becomes a PULL when its floats are taken */
    HPMLC_DEAL,  /* asks for the number of a batch */
    HPMLC_NOTE,  /* reports .epoch, is not answered */
    HPMLC_LEAVE, /* the worker ends its training without HPMLC_FINISH; is not answered */
    HPMLC_ROWS,  /* indices of rows of a sparse table follow; is answered by the rows alone, at once */
    HPMLC_FINISH /* the training ends on this worker; open until it ends on all */
} hpmlc_request_kind;

typedef struct hpmlc_request { /* header from a worker to a server */
    int64_t kind;
    int64_t step;    /* PUSH, PULL: number of the step or round; ROWS: number of the parameter */
    int64_t samples; /* PUSH: samples of the gradient or round; ROWS: number of rows */
    int64_t batch;   /* PUSH: number of the batch that was dealt, -1: none was; DEAL: number of batches in an epoch */
    int64_t epoch;   /* DEAL: the worker's epoch; NOTE: number of epochs that it has ended */
    int64_t wants;   /* PUSH, PULL: 1: values follow the answer; DEAL: 1: the last epoch of a fit */
    double  loss;    /* mean over the samples */
} hpmlc_request;

typedef struct hpmlc_answer { /* header from a server to a worker */
    int64_t step;  /* number of the worker's first step that is not over yet */
    int64_t batch; /* number of the batch dealt to the worker, over all epochs; -1: the epoch ends */
} hpmlc_answer;

typedef struct hpmlc_client { /* a worker, as a server knows it */
    hpml_message  message;    /* receive of the worker's next request, in flight if is_posted */
    hpmlc_request request;    /* its last request */
    bool          is_posted, is_open, is_lost; /* is_open: the request is not answered yet */
    int64_t       clock;      /* number of steps or rounds that the worker has done */
    int64_t       epochs;     /* number of epochs that it has ended, where servers deal out batches */
    int64_t       batch;      /* the batch dealt to it whose gradient is not pushed yet; -1: none */
} hpmlc_client;

typedef struct hpmlc_piece {  /* rows, or a part of a row, of a tensor, which are packed as one */
    hpml_packing packing;
    const hpmlc_factor *layer;   /* the layer that sends factors in place of the rows; NULL: the codec packs the rows */
    int          param;
    int64_t      from, at;    /* number of the piece's first float: in the parameter; among all trained floats */
    size_t       offset;      /* where the piece's packed bytes begin among those of all pieces */
} hpmlc_piece;

typedef struct hpmlc_servers {
    hpml_distributed *d;
    bool           is_finished;      /* no request has come since hpml_distribute_finish or the beginning */
    int            workers, count;   /* K, S */
    int            first, end;       /* memory here: the ranges of servers [first, end). Server: its own; worker: all */
    int64_t        total, floats;    /* trained floats; those in the ranges of servers [first, end) */
    hpmlc_piece   *piece;            /* (pieces + 1) of all ranges, server by server; the last one is empty */
    int            pieces, *begin;   /* (S + 1) number of each server's first piece */
    char          *packed;           /* (packed bytes) the gradient that a worker pushes */
    float         *gradient;         /* (floats) worker: its gradient; server: sum of gradients, 0 between steps */
    float         *values;           /* (floats) */
    float         *residual;         /* (floats) of a worker with a lossy codec; else NULL */
    int64_t       *exact;            /* (floats) server: sum of the round's gradients; NULL: the plan is not exact */
    int           *table, tables;    /* (tables) numbers of the parameters that are sparse tables: see >>servers-rows */
    int64_t       *rows;             /* (S, tables) rows of each table for each server; server: (tables) of a push */
    float        **packed_rows;      /* (S + 1) worker: where the packed rows for each server begin */
    int32_t       *wanted;           /* (most rows of a table) worker: indices of the rows that a batch needs */
    bool          *is_wanted;        /* (most rows of a table) worker: the row is in .wanted; false between batches */
    bool           has_stepped_rows; /* server: the rows of the tables' gradients have been applied */
    hpml_message  *message;          /* worker: (6 S) messages of a request */
    hpmlc_answer  *answer;           /* worker: (S) */
    hpmlc_client  *client;           /* server: (K) */
    hpml_message **awaited;          /* server: (K) receives of the workers' requests, for which it waits */
    hpml_status  (*enter)(hpml_distributed *d); /* server: the strategy's function that answers requests */
    bool           averages;         /* federated: workers run the optimizer, servers average values */
    bool           has_lost;         /* server: a worker was lost during the current call of `enter` */
    bool           is_served;        /* server: the hook `next` has served this step */
    bool           is_skipped;       /* worker: does not compute in this step */
    int64_t        period, steps;    /* steps of a round; steps of this rank, but for those on batches dealt to it */
    int64_t        round, updates;   /* rounds that are complete; server: its steps of the optimizer */
    int64_t        taken, dealt;     /* server: gradients taken in this step; batches dealt, over all epochs */
    int64_t        epoch, batch;     /* server: its epoch; worker: number of the batch dealt to it, -1: none was */
    double         samples, loss;    /* sums over the gradients of this step or round: samples; loss times samples */
} hpmlc_servers;

HPMLC_FN hpmlc_servers *hpmlc_servers_of(const hpml_distributed *d) { return (hpmlc_servers *)d->own; }
HPMLC_FN bool hpmlc_is_server(const hpml_distributed *d) { return d->c->rank >= hpmlc_servers_of(d)->workers; }

/* Returns the index, among all trained floats, of the first float that server s keeps. */
HPMLC_FN int64_t hpmlc_server_at(const hpmlc_servers *own, int s)
{
    return own->total / own->count * s + own->total % own->count * s / own->count;
}

/* Copies, of the trainer's array `which`, the ranges of floats that servers `first` to `end` - 1 keep, to `flat` or, if
   `writes`, back from `flat` to the array. */
HPMLC_FN void hpmlc_ranges_copy(const hpml_distributed *d, hpml_array which, bool writes, int first, int end,
                                float *flat)
{
    const hpmlc_servers *own   = hpmlc_servers_of(d);
    float               *array = which == HPML_ARRAY_VALUES ? NULL : hpml_trainer_array(d->t, which, NULL);
    for (int i = own->begin[first]; i < own->begin[end]; i++) {
        const hpmlc_piece *p = &own->piece[i];
        float *x = (array ? array + hpml_trainer_place(d->t, p->param) : hpmlc_param(d, p->param)->data) + p->from;
        hpmlc_host_view_copy(&d->layout.view, flat + p->at - hpmlc_server_at(own, first), x,
                             p->packing.rows * p->packing.cols, writes);
    }
}

/* Returns how many rows each factor of a layer's weight gradient (dz^T x) has for a full batch of one rank. */
HPMLC_FN int64_t hpmlc_factor_rows(const hpml_distributed *d, const hpmlc_piece *p)
{
    return d->layout.batch * p->layer->rows;
}

HPMLC_FN size_t hpmlc_piece_size(const hpml_distributed *d, const hpmlc_piece *p)
{
    if (!p->layer) return p->packing.size;
    return sizeof(float) * (size_t)(hpmlc_factor_rows(d, p) * (p->packing.rows + p->packing.cols));
}

/* Cuts the range of server s into pieces: whole rows, and parts of rows at its ends. False: the plan's codec cannot
   pack a piece. */
HPMLC_FN bool hpmlc_range_cut(hpml_distributed *d, int s)
{
    hpmlc_servers *own   = hpmlc_servers_of(d);
    const int64_t  at    = hpmlc_server_at(own, s), end = hpmlc_server_at(own, s + 1);
    int64_t        first = 0; /* number of p's first float among all trained floats */
    for (int i = 0; i < d->layout.params; i++) {
        const hpml_tensor *p     = hpmlc_param(d, i);
        const bool         dense = hpml_trainer_place(d->t, i) >= 0 && !hpml_param_rows(p, NULL);
        const int64_t      count = dense ? hpml_tensor_count(p) : 0;
        const int64_t      cols  = p->ndim > 1 ? count / p->shape[0] : count;
        int64_t            from = hpmlc_max(at - first, 0), left = hpmlc_min(end - first, count) - from;
        while (left > 0) {
            const bool    whole = from % cols == 0 && left >= cols;
            const int64_t rows  = whole ? left / cols : 1;
            const int64_t width = whole ? cols : hpmlc_min(left, cols - from % cols);
            hpmlc_piece  *piece = &own->piece[own->pieces++];
            if (hpml_packing_init(&piece->packing, &d->plan.codec, rows, width) != HPML_OK) return false;
            piece->layer     = d->factors ? d->factors->of[i] : NULL;
            piece->param     = i;
            piece->from      = from;
            piece->at        = first + from;
            piece[1].offset  = piece->offset + hpmlc_piece_size(d, piece);
            from += rows * width;
            left -= rows * width;
        }
        first += count;
    }
    own->begin[s + 1] = own->pieces;
    return true;
}

/* Returns the packed bytes of the ranges of servers [first, end). */
HPMLC_FN size_t hpmlc_packed_size(const hpmlc_servers *own, int first, int end)
{
    return own->piece[own->begin[end]].offset - own->piece[own->begin[first]].offset;
}

HPMLC_FN void hpmlc_servers_leave(hpml_distributed *d);

/* Ends a training that was not finished: workers notify the servers that they leave, and servers answer requests until
   all workers have left, because a server may have ended its own steps before them. Then cancels a server's receives in
   flight, because they point into memory that is freed next. */
HPMLC_FN void hpmlc_servers_destroy(void *object)
{
    hpmlc_servers *own = (hpmlc_servers *)object;
    if (own->d && !own->is_finished && hpml_ctx_status(own->d->ctx) == HPML_OK) hpmlc_servers_leave(own->d);
    for (int k = 0; k < own->workers && own->client; k++) {
        hpml_message *m = &own->client[k].message;
        if (!own->client[k].is_posted) continue;
        if (!m->done && !m->owner->t->schedule) m->owner->t->abandon(m->owner, m);
        hpmlc_unlist(m->owner, m); /* with THREADS nothing else points to a receive */
    }
}

/* Returns whether workers keep a residual: what the codec did not send. */
HPMLC_FN bool hpmlc_has_feedback(const hpml_distributed *d)
{
    const hpml_codec *codec = d->plan.codec.custom ? d->plan.codec.custom : hpml_codec_get(d->plan.codec.kind);
    return codec->has_residual && !d->plan.codec.no_feedback;
}

/* Returns whether this client is drawn for a round. */
HPMLC_FN bool hpmlc_is_drawn(const hpml_distributed *d, int64_t round)
{
    const int     workers = hpmlc_servers_of(d)->workers;
    const int64_t drawn   = d->plan.share > 0 ? (int64_t)ceil((double)d->plan.share * workers - 1e-6) : workers;
    return hpml_permute_index(d->plan.seed, (uint64_t)round, workers, d->c->rank % workers) < drawn;
}

/* Begins to count steps, rounds and dealt batches (the batches that a server gives to workers) anew, after a checkpoint
   was loaded: takes the number of updates, and the values, from the trainer. */
HPMLC_FN void hpmlc_servers_restart(hpml_distributed *d)
{
    hpmlc_servers *own = hpmlc_servers_of(d);
    own->updates = hpml_trainer_step_count(d->t);
    own->steps   = 0;
    own->round   = 0;
    own->dealt   = 0;
    for (int k = 0; k < own->workers; k++) {
        own->client[k].clock  = 0;
        own->client[k].epochs = 0;
        own->client[k].batch  = -1;
    }
    own->is_skipped = own->averages && !hpmlc_is_drawn(d, own->updates / own->period);
    hpmlc_ranges_copy(d, HPML_ARRAY_VALUES, false, own->first, own->end, own->values);
}

HPMLC_FN hpml_status hpmlc_rows_need(void *user, hpml_trainer *t, const hpml_moment *at);

/* Lists the sparse tables in own->table, allocates the memory for exchanging their rows, and subtracts their floats
   from own->total, the number of floats that are divided into the servers' ranges. False: an error. */
HPMLC_FN bool hpmlc_tables_open(hpml_distributed *d)
{
    hpmlc_servers *own  = hpmlc_servers_of(d);
    const size_t   s    = (size_t)own->count;
    int64_t        most = 0;
    own->table = (int *)hpmlc_dist_alloc(d, sizeof *own->table * (size_t)(d->layout.params + 1));
    for (int i = 0; i < d->layout.params && own->table; i++) {
        const hpml_tensor *p = hpmlc_param(d, i);
        if (hpml_trainer_place(d->t, i) < 0 || !hpml_param_rows(p, NULL)) continue;
        own->table[own->tables++] = i;
        own->total -= hpml_tensor_count(p);
        most = hpmlc_max(most, p->shape[0]);
    }
    if (own->tables == 0) return own->table != NULL;
    own->rows        = (int64_t *)hpmlc_dist_alloc(d, sizeof *own->rows * s * (size_t)own->tables);
    own->packed_rows = (float **)hpmlc_dist_alloc(d, sizeof *own->packed_rows * (s + 1));
    own->wanted      = (int32_t *)hpmlc_dist_alloc(d, sizeof *own->wanted * (size_t)most);
    own->is_wanted   = (bool *)hpmlc_dist_alloc(d, sizeof *own->is_wanted * (size_t)most);
    d->need          = hpmlc_is_server(d) ? NULL : hpmlc_rows_need;
    return own->rows && own->packed_rows && own->wanted && own->is_wanted;
}

/* Divides the parameters among the servers and allocates this rank's memory. enter: the function of the strategy by
   which a server answers requests (own->enter). False: an error. */
HPMLC_FN bool hpmlc_servers_open(hpml_distributed *d, hpml_status (*enter)(hpml_distributed *d))
{
    hpmlc_servers *own = (hpmlc_servers *)hpml_ctx_alloc(d->ctx, sizeof *own, hpmlc_servers_destroy);
    d->own = own;
    if (!own) return false;
    own->workers = hpmlc_plan_workers(&d->plan, d->c->size);
    own->count   = d->plan.servers;
    own->total   = d->layout.grad_total;
    own->enter   = enter;
    own->period  = 1;
    own->batch   = -1;
    const bool   serves = hpmlc_is_server(d);
    const size_t k = (size_t)own->workers, s = (size_t)own->count, pieces = 3 * ((size_t)d->layout.params + s) + 1;
    if (!hpmlc_tables_open(d)) return false;
    own->first   = serves ? d->c->rank - own->workers : 0;
    own->end     = serves ? own->first + 1 : own->count;
    own->floats  = hpmlc_server_at(own, own->end) - hpmlc_server_at(own, own->first);
    own->piece   = (hpmlc_piece *)hpmlc_dist_alloc(d, sizeof *own->piece * pieces);
    own->begin   = (int *)hpmlc_dist_alloc(d, sizeof *own->begin * (s + 1));
    own->message = (hpml_message *)hpmlc_dist_alloc(d, sizeof *own->message * 6 * s);
    own->answer  = (hpmlc_answer *)hpmlc_dist_alloc(d, sizeof *own->answer * s);
    own->awaited = (hpml_message **)hpmlc_dist_alloc(d, sizeof *own->awaited * k);
    own->client  = (hpmlc_client *)hpmlc_dist_alloc(d, sizeof *own->client * k);
    if (hpml_ctx_status(d->ctx) != HPML_OK || !hpmlc_factors_create(d)) return false;
    for (int i = 0; i < own->count; i++)
        if (!hpmlc_range_cut(d, i))
            return hpmlc_fail(d->c, HPML_ERR_ARGUMENT, "distribute: the codec cannot pack rows of the gradient"), false;
    const size_t bytes = sizeof(float) * (size_t)(own->floats + 1); /* another server's range may have a float more */
    own->gradient = (float *)hpmlc_dist_alloc(d, bytes);
    own->values   = (float *)hpmlc_dist_alloc(d, bytes);
    own->packed   = (char *)hpmlc_dist_alloc(d, hpmlc_packed_size(own, own->first, own->end) + 1);
    if (!serves && hpmlc_has_feedback(d)) own->residual = (float *)hpmlc_dist_alloc(d, bytes);
    if (serves && d->plan.exact) own->exact = (int64_t *)hpmlc_dist_alloc(d, 2 * bytes);
    if (hpml_ctx_status(d->ctx) != HPML_OK) return false;
    d->copies.all   = own->workers;
    d->copies.count = serves ? 0 : 1;
    hpmlc_servers_restart(d);
    own->is_finished = serves;
    own->d           = d;
    return true;
}

HPMLC_FN void hpmlc_servers_close(hpml_distributed *d) { hpml_ctx_release(d->ctx, d->own); }

// ---------------------------------------------------------------------------------------------------------------------
// >>servers-rows   parameter servers: rows of sparse tables
// ---------------------------------------------------------------------------------------------------------------------
/* Of S servers, server r mod S has row r of a sparse table (hpml_embedding_desc.sparse). Before a worker computes with
   a batch, it pulls the rows of the batch's tokens; with its gradient it pushes the rows that the gradient has. So the
   bytes sent depend on the rows that a batch uses, not on the length of the table (Li et al. 2014; the third engine of
   Zou et al. 2014, "Mariana"). Other rows of a worker's table are out of date until hpml_distribute_finish. */

/* Returns `status`, that of a message to or from `server`; if this server is lost, also sets an error that names it. */
HPMLC_FN hpml_status hpmlc_server_lost(hpml_distributed *d, int server, hpml_status status)
{
    if (status != HPML_ERR_PEER || hpml_ctx_status(d->ctx) != HPML_OK) return status;
    return hpmlc_fail(d->c, status, "step %lld: server %d of %d (rank %d) has failed or left, and its range of the "
                      "parameters with it; start again from the last checkpoint", (long long)d->c->step,
                      server - hpmlc_servers_of(d)->workers, hpmlc_servers_of(d)->count, d->c->origin[server]);
}

/* Waits for this worker's messages own->message[0] up to, but without, *end; an error names a server that is lost. */
HPMLC_FN hpml_status hpmlc_messages_wait(hpml_distributed *d, const hpml_message *end)
{
    hpml_status status = HPML_OK;
    int         lost   = 0;
    for (hpml_message *each = hpmlc_servers_of(d)->message; each < end; each++) {
        hpml_status s = hpml_wait(d->c, each);
        if (status != HPML_OK || s == HPML_OK) continue;
        status = s;
        lost   = each->peer;
    }
    return status == HPML_OK ? HPML_OK : hpmlc_server_lost(d, lost, status);
}

/* Packs for each server s, from own->packed_rows[s] on, the rows of the sparse tables' gradients that s holds: for each
   table the numbers of the rows, whose count goes to own->rows, then the rows' floats. Returns 0, or NaN if a float is
   not finite or there is no memory. */
HPMLC_FN float hpmlc_rows_pack(hpml_distributed *d)
{
    hpmlc_servers *own    = hpmlc_servers_of(d);
    int64_t        floats = 1, count;
    float          bad    = 0;
    for (int t = 0; t < own->tables; t++) {
        const hpml_tensor *p = hpmlc_param(d, own->table[t]);
        hpml_param_rows(p, &count);
        floats += count * (1 + p->shape[1]);
    }
    float *to = hpmlc_rows_reserve(d, floats);
    if (!to) return NAN;
    for (int k = 0; k < own->count * own->tables; k++) { /* server by server, table by table */
        const int          s     = k / own->tables, t = k % own->tables;
        const hpml_tensor *p     = hpmlc_param(d, own->table[t]);
        const int32_t     *row   = hpml_param_rows(p, &count);
        const int64_t      width = p->shape[1];
        float             *begin = to;
        if (t == 0) own->packed_rows[s] = to;
        for (int64_t i = 0; i < count; i++)
            if (row[i] % own->count == s) memcpy(to++, &row[i], sizeof *row);
        own->rows[k] = to - begin;
        for (int64_t i = 0; i < count; i++) {
            const float *g = p->grad + row[i] * width;
            if (row[i] % own->count != s) continue;
            for (int64_t j = 0; j < width; j++) bad += g[j] - g[j];
            memcpy(to, g, (size_t)width * sizeof(float));
            to += width;
        }
    }
    own->packed_rows[own->count] = to;
    return bad;
}

/* Begins to send the packed rows of the sparse tables' gradients to server s, as the messages m[0], the number of rows
   of each table, and m[1], the rows; returns m + 2. */
HPMLC_FN hpml_message *hpmlc_rows_push(hpml_distributed *d, int s, hpml_message *m)
{
    const hpmlc_servers *own   = hpmlc_servers_of(d);
    const size_t         bytes = (size_t)(own->packed_rows[s + 1] - own->packed_rows[s]) * sizeof(float);
    const int64_t       *count = own->rows + s * own->tables;
    hpml_isend(d->c, own->workers + s, HPMLC_TAG_FLOATS, count, sizeof *count * (size_t)own->tables, m);
    hpml_isend(d->c, own->workers + s, HPMLC_TAG_FLOATS, own->packed_rows[s], bytes, m + 1);
    return m + 2;
}

/* Server: receives a push's numbers of rows, one for each sparse table, to own->rows, then these rows, with their
   indices, to d->rows.memory. */
HPMLC_FN hpml_status hpmlc_rows_receive(hpml_distributed *d, int worker)
{
    hpmlc_servers *own    = hpmlc_servers_of(d);
    int64_t        floats = 0;
    if (own->tables == 0) return HPML_OK;
    hpml_status status = hpml_recv(d->c, worker, HPMLC_TAG_FLOATS, own->rows, sizeof *own->rows * (size_t)own->tables);
    if (status != HPML_OK) return status;
    for (int t = 0; t < own->tables; t++) floats += own->rows[t] * (1 + hpmlc_param(d, own->table[t])->shape[1]);
    float *to = hpmlc_rows_reserve(d, floats + 1);
    if (!to) return hpml_ctx_status(d->ctx);
    return hpml_recv(d->c, worker, HPMLC_TAG_FLOATS, to, (size_t)floats * sizeof(float));
}

/* Server: adds the rows of gradients that a worker has sent (in d->rows.memory) to the gradients of the sparse tables;
   the first time after a step, clears these gradients before. */
HPMLC_FN hpml_status hpmlc_rows_add(hpml_distributed *d)
{
    hpmlc_servers *own    = hpmlc_servers_of(d);
    const float   *from   = d->rows.memory;
    hpml_status    status = HPML_OK;
    for (int t = 0; t < own->tables && status == HPML_OK; t++) {
        hpml_tensor  *p = hpmlc_param(d, own->table[t]);
        const int64_t n = own->rows[t];
        status = hpml_param_add_rows(p, own->has_stepped_rows, (const int32_t *)(const void *)from, from + n, n);
        from += n * (1 + p->shape[1]);
    }
    own->has_stepped_rows = false;
    return status;
}

/* Server: divides the rows of all tables' gradients by `divisor`, then multiplies them by `scale`. */
HPMLC_FN void hpmlc_rows_scale(hpml_distributed *d, float divisor, float scale)
{
    const hpmlc_servers *own = hpmlc_servers_of(d);
    for (int t = 0; t < own->tables; t++) {
        hpml_tensor   *p     = hpmlc_param(d, own->table[t]);
        const int64_t  width = p->shape[1];
        int64_t        count;
        const int32_t *row = hpml_param_rows(p, &count);
        for (int64_t i = 0; i < count; i++) {
            float *g = p->grad + row[i] * width;
            hpmlc_divide_f32(g, width, divisor);
            for (int64_t k = 0; k < width && scale != 1; k++) g[k] *= scale;
        }
    }
}

/* Server: steps the sparse tables, except those in floats [first, end), because that range has stepped already. */
HPMLC_FN hpml_status hpmlc_rows_step(hpml_distributed *d, int64_t first, int64_t end)
{
    hpmlc_servers *own    = hpmlc_servers_of(d);
    hpml_status    status = HPML_OK;
    for (int t = 0; t < own->tables && status == HPML_OK; t++) {
        const int64_t at = hpml_trainer_place(d->t, own->table[t]);
        if (at >= first && at < end) continue;
        status = hpml_trainer_apply_range(d->t, at, hpml_tensor_count(hpmlc_param(d, own->table[t])), 1);
    }
    own->has_stepped_rows = true;
    return status;
}

/* Server: answers a worker's request for rows of a sparse table. */
HPMLC_FN hpml_status hpmlc_rows_answer(hpml_distributed *d, int worker)
{
    const hpmlc_request *r     = &hpmlc_servers_of(d)->client[worker].request;
    const hpml_tensor   *p     = hpmlc_param(d, (int)r->step);
    const int64_t        n     = r->samples, width = p->shape[1];
    float               *rows  = hpmlc_rows_reserve(d, n * (1 + width));
    if (!rows) return hpml_ctx_status(d->ctx);
    hpml_status status = hpml_recv(d->c, worker, HPMLC_TAG_FLOATS, rows, (size_t)n * sizeof(int32_t));
    for (int64_t i = 0; i < n && status == HPML_OK; i++) {
        int32_t row;
        memcpy(&row, &rows[i], sizeof row);
        memcpy(rows + n + i * width, p->data + row * width, (size_t)width * sizeof(float));
    }
    if (status != HPML_OK) return status;
    return hpml_send(d->c, worker, HPMLC_TAG_FLOATS, rows + n, (size_t)(n * width) * sizeof(float));
}

/* Lists in `wanted` the rows of table p that server s keeps and whose numbers occur in `tokens`, each row once; returns
   how many. */
HPMLC_FN int64_t hpmlc_rows_list(hpmlc_servers *own, const hpml_tensor *p, const hpml_tensor *tokens, int s,
                                 int32_t *wanted)
{
    int64_t n = 0;
    for (int64_t i = 0; i < hpml_tensor_count(tokens); i++) {
        const int32_t row = ((const int32_t *)tokens->raw)[i];
        if (row < 0 || row >= p->shape[0] || row % own->count != s || own->is_wanted[row]) continue;
        own->is_wanted[row] = true;
        wanted[n++]         = row;
    }
    return n;
}

/* Worker: pulls the rows of a sparse table that the batch's tokens name, before the forward pass of a training step, as
   the trainer's hook `need`. */
HPMLC_FN hpml_status hpmlc_rows_need(void *user, hpml_trainer *t HPMLC_UNUSED, const hpml_moment *at)
{
    hpml_distributed  *d      = (hpml_distributed *)user;
    hpmlc_servers     *own    = hpmlc_servers_of(d);
    hpml_tensor       *p      = hpmlc_param(d, at->param);
    hpml_message      *m      = own->message;
    const hpml_tensor *tokens = at->node->src[0];
    int64_t            all    = 0;
    HPMLC_ZERO(hpmlc_request, r);
    if (at->pass != HPML_PASS_FORWARD || hpml_trainer_place(d->t, at->param) < 0 || !hpml_param_rows(p, NULL))
        return HPML_OK;
    const int64_t width  = p->shape[1];
    float        *values = hpmlc_rows_reserve(d, hpmlc_min(p->shape[0], hpml_tensor_count(tokens)) * width + 1);
    if (!values) return hpml_ctx_status(d->ctx);
    r.kind = HPMLC_ROWS;
    r.step = at->param;
    for (int s = 0; s < own->count; s++) {
        const int    to    = own->workers + s;
        int32_t     *row   = own->wanted + all;
        const size_t n     = (size_t)hpmlc_rows_list(own, p, tokens, s, row);
        r.samples = (int64_t)n;
        if (n == 0) continue;
        hpml_status sent = hpml_send(d->c, to, HPMLC_TAG_REQUEST, &r, sizeof r);
        if (sent != HPML_OK) return hpmlc_server_lost(d, to, sent);
        hpml_isend(d->c, to, HPMLC_TAG_FLOATS, row, n * sizeof *row, m++);
        hpml_irecv(d->c, to, HPMLC_TAG_FLOATS, values + all * width, n * (size_t)width * sizeof(float), m++);
        all += (int64_t)n;
    }
    hpml_status status = hpmlc_messages_wait(d, m);
    for (int64_t i = 0; i < all; i++) {
        own->is_wanted[own->wanted[i]] = false;
        memcpy(p->data + own->wanted[i] * width, values + i * width, (size_t)width * sizeof(float));
    }
    return status;
}

// ---------------------------------------------------------------------------------------------------------------------
// >>servers-step   parameter servers: a worker asks, a server answers
// ---------------------------------------------------------------------------------------------------------------------
/* Packs to `to` the factors of the gradient dz^T x of a server's piece of a weight: the columns of dz for the piece's
   rows, then the columns of x for its columns. Returns 0, or NaN if a number is not finite. */
HPMLC_FN float hpmlc_factor_pack(const hpml_distributed *d, const hpmlc_piece *p, float *to)
{
    const int64_t k = hpmlc_factor_rows(d, p), m = p->layer->m, n = p->layer->n;
    const int64_t rows = p->packing.rows, cols = p->packing.cols;
    const float  *dz = p->layer->dz + p->from / n; /* (k, m), from the piece's first row on */
    const float  *x  = p->layer->x + p->from % n;  /* (k, n) */
    float         bad = 0;
    for (int64_t r = 0; r < k; r++) memcpy(to + r * rows, dz + r * m, sizeof(float) * (size_t)rows);
    for (int64_t r = 0; r < k; r++) memcpy(to + k * rows + r * cols, x + r * n, sizeof(float) * (size_t)cols);
    for (int64_t i = 0; i < k * (rows + cols); i++) bad += to[i] - to[i];
    return bad;
}

/* Adds a worker's gradient of p, rows of a tensor that are packed together, to `gradient`, the floats of these rows.
   packed: the gradient in packed form, or, if p->layer, the factors whose product is the gradient. */
HPMLC_FN void hpmlc_piece_add(hpml_distributed *d, const hpmlc_piece *p, float *gradient, const char *packed)
{
    const int64_t rows = p->packing.rows, cols = p->packing.cols;
    if (!p->layer) {
        hpml_packing_decode_add(&p->packing, gradient, packed, rows);
        return;
    }
    const int64_t k  = hpmlc_factor_rows(d, p);
    const float  *dz = (const float *)(const void *)packed; /* (k, rows) */
    hpml_sgemm(d->ctx, true, false, rows, cols, k, 1, dz, rows, dz + k * rows, cols, 1, gradient, cols);
}

#define HPMLC_EXACT_ONE 1099511627776.0 /* exact sums on servers count in units of 2^-40 */

/* Adds own->gradient, of worker `worker`, to the round's exact sum own->exact, and zeroes own->gradient. The sum is in
   integer multiples of 2^-40, because integers add up to the same sum in any order. */
HPMLC_FN hpml_status hpmlc_exact_move(hpml_distributed *d, int worker)
{
    hpmlc_servers *own  = hpmlc_servers_of(d);
    const double   most = 4194304.0 / own->workers; /* limit of a gradient: the sum stays below 2^62 units */
    for (int64_t i = 0; i < own->floats; i++) {
        const double g = own->gradient[i];
        if (!(fabs(g) < most))
            return hpmlc_fail(d->c, HPML_ERR_NONFINITE, "step %lld: worker %d has a gradient of %g, and exact sums "
                              "hold less than %g; lower the learning rate, set clip_norm or leave exact out",
                              (long long)d->c->step, worker, g, most);
        own->exact[i] += (int64_t)llrint(HPMLC_EXACT_ONE * g);
        own->gradient[i] = 0;
    }
    return HPML_OK;
}

/* Worker: packs own->gradient to own->packed. A NaN or infinity is an error, unless the trainer has no_finite_check
   and no codec packs the gradient, because a codec reports such numbers itself. */
HPMLC_FN hpml_status hpmlc_worker_pack(hpml_distributed *d)
{
    hpmlc_servers *own    = hpmlc_servers_of(d);
    hpml_status    status = HPML_OK;
    float          bad    = 0; /* stays 0 unless a number is not finite */
    HPMLC_ZERO(hpml_encode_info, info);
    info.step = own->steps;
    info.seed = d->plan.codec.seed + (uint64_t)d->c->rank;
    for (int64_t k = 0; k < own->total; k++) bad += own->gradient[k] - own->gradient[k];
    for (int i = 0; i < own->pieces && status == HPML_OK; i++) {
        const hpmlc_piece *p  = &own->piece[i];
        float             *e  = own->residual ? own->residual + p->at : NULL;
        char              *to = own->packed + p->offset;
        if (p->layer) bad += hpmlc_factor_pack(d, p, (float *)(void *)to);
        else status = hpml_packing_encode(&p->packing, to, e, own->gradient + p->at, p->packing.rows, &info);
    }
    if (own->tables > 0) bad += hpmlc_rows_pack(d);
    if (status == HPML_OK && bad != 0 && !hpml_trainer_settings(d->t)->no_finite_check) status = HPML_ERR_NONFINITE;
    if (status == HPML_OK) return HPML_OK;
    return hpmlc_fail(d->c, status, "step %lld: the gradient is NaN or infinite on this rank; lower the learning rate "
                      "or set clip_norm", (long long)d->c->step);
}

/* Sends request r to the servers from number `first` on, with a push also each server's range of own->packed; waits for
   the answers. Sends in the servers' order, because server 0 deals out batches: if this worker is lost meanwhile,
   server 0 has then got at least as many of its requests as the other servers. */
HPMLC_FN hpml_status hpmlc_ask(hpml_distributed *d, const hpmlc_request *r, int first)
{
    hpmlc_servers *own = hpmlc_servers_of(d);
    hpml_message  *m   = own->message;
    own->is_finished = false;
    for (int s = first; s < own->count; s++) {
        const int     to    = own->workers + s;
        const int64_t at    = hpmlc_server_at(own, s);
        const size_t  bytes = (size_t)(hpmlc_server_at(own, s + 1) - at) * sizeof(float);
        const char   *from  = own->packed + own->piece[own->begin[s]].offset;
        hpml_isend(d->c, to, HPMLC_TAG_REQUEST, r, sizeof *r, m++);
        if (r->kind == HPMLC_PUSH)
            hpml_isend(d->c, to, HPMLC_TAG_FLOATS, from, hpmlc_packed_size(own, s, s + 1), m++);
        if (r->kind == HPMLC_PUSH && own->tables > 0) m = hpmlc_rows_push(d, s, m);
        if (r->kind > HPMLC_PULL) continue;
        hpml_irecv(d->c, to, HPMLC_TAG_REQUEST, &own->answer[s], sizeof own->answer[s], m++);
        if (r->wants) hpml_irecv(d->c, to, HPMLC_TAG_FLOATS, own->values + at, bytes, m++);
    }
    hpml_status status = hpmlc_messages_wait(d, m);
    if (status != HPML_OK) return status;
    if (r->wants) hpmlc_ranges_copy(d, HPML_ARRAY_VALUES, true, 0, own->count, own->values);
    return HPML_OK;
}

/* Worker: pushes its array `which` (gradients or values) to the servers or, if `skips`, asks them without pushing;
   gets their answers, with the servers' values if `wants`. loss: sum over this worker's `samples` samples. */
HPMLC_FN hpml_status hpmlc_exchange_with(hpml_distributed *d, hpml_array which, bool skips, bool wants, double samples,
                                         double loss)
{
    hpmlc_servers *own   = hpmlc_servers_of(d);
    const double   start = hpml_comm_now(d->c);
    hpml_status    status = HPML_OK;
    HPMLC_ZERO(hpmlc_request, r);
    r.kind    = skips ? HPMLC_PULL : HPMLC_PUSH;
    r.step    = own->steps / own->period;
    r.samples = (int64_t)samples;
    r.batch   = own->batch;
    r.wants   = wants;
    r.loss    = samples > 0 ? loss / samples : 0;
    if (!skips) hpmlc_ranges_copy(d, which, false, 0, own->count, own->gradient);
    if (!skips) status = hpmlc_worker_pack(d);
    if (status == HPML_OK) status = hpmlc_ask(d, &r, 0);
    own->round = own->answer[0].step;
    for (int s = 1; s < own->count; s++) own->round = hpmlc_min(own->round, own->answer[s].step);
    hpmlc_dist_waited(d, start);
    return status;
}

/* Returns `status`, the result of a server's message to or from a worker. If the worker is lost, notes this and returns
   HPML_OK, because the training goes on with the other workers. */
HPMLC_FN hpml_status hpmlc_survive(hpml_distributed *d, int worker, hpml_status status)
{
    hpmlc_servers *own = hpmlc_servers_of(d);
    if (status != HPML_ERR_PEER || hpml_ctx_status(d->ctx) != HPML_OK) return status;
    own->client[worker].is_lost = true;
    own->client[worker].is_open = false;
    own->has_lost               = true;
    return HPML_OK;
}

HPMLC_FN bool hpmlc_is_open(const hpmlc_client *w, hpmlc_request_kind kind)
{
    return w->is_open && w->request.kind == (int64_t)kind;
}

/* Returns whether worker w is neither lost nor finished. */
HPMLC_FN bool hpmlc_is_active(const hpmlc_client *w) { return !w->is_lost && !hpmlc_is_open(w, HPMLC_FINISH); }

/* Answers a worker's request, with this server's parameters if the request wants them. */
HPMLC_FN hpml_status hpmlc_answer_to(hpml_distributed *d, int worker, int64_t step, int64_t batch)
{
    hpmlc_servers *own = hpmlc_servers_of(d);
    hpmlc_client  *w   = &own->client[worker];
    hpmlc_answer   answer;
    answer.step  = step;
    answer.batch = batch;
    w->is_open   = false;
    hpml_status status = hpml_send(d->c, worker, HPMLC_TAG_REQUEST, &answer, sizeof answer);
    if (status == HPML_OK && w->request.kind == HPMLC_PULL && w->request.wants)
        status = hpml_send(d->c, worker, HPMLC_TAG_FLOATS, own->values, (size_t)own->floats * sizeof(float));
    return hpmlc_survive(d, worker, status);
}

/* Receives the floats of a worker's push and adds `factor` times them to own->gradient; 0: leaves them out. *came:
   whether they have come; false: the worker is lost. */
HPMLC_FN hpml_status hpmlc_take(hpml_distributed *d, int worker, float factor, bool *came)
{
    hpmlc_servers *own  = hpmlc_servers_of(d);
    hpmlc_client  *w    = &own->client[worker];
    hpml_status status  = hpml_recv(d->c, worker, HPMLC_TAG_FLOATS, own->packed,
                                    hpmlc_packed_size(own, own->first, own->end));
    const float *values = (const float *)(const void *)own->packed;
    if (status == HPML_OK) status = hpmlc_rows_receive(d, worker);
    *came  = status == HPML_OK;
    status = hpmlc_survive(d, worker, status);
    if (!*came) return status;
    w->batch        = -1;
    w->request.kind = HPMLC_PULL;
    for (int i = own->begin[own->first]; i < own->begin[own->end] && factor == 1; i++) {
        const hpmlc_piece *p = &own->piece[i], *zero = &own->piece[own->begin[own->first]];
        hpmlc_piece_add(d, p, own->gradient + p->at - zero->at, own->packed + p->offset - zero->offset);
    }
    for (int64_t i = 0; i < own->floats && factor != 0 && factor != 1; i++) own->gradient[i] += factor * values[i];
    if (factor == 0) return HPML_OK;
    if (own->exact) status = hpmlc_exact_move(d, worker);
    if (status == HPML_OK) status = hpmlc_rows_add(d);
    if (status != HPML_OK) return status;
    own->taken++;
    own->samples += (double)w->request.samples;
    own->loss += w->request.loss * (double)w->request.samples;
    return HPML_OK;
}

/* Makes an optimizer step of this server's range with own->gradient; federated: own->gradient has the new values, which
   replace those of the range. */
HPMLC_FN hpml_status hpmlc_server_apply(hpml_distributed *d)
{
    hpmlc_servers     *own    = hpmlc_servers_of(d);
    const int          me     = own->first;
    const hpmlc_piece *from   = &own->piece[own->begin[me]], *last = &own->piece[own->begin[me + 1] - 1];
    const hpml_array   to     = own->averages ? HPML_ARRAY_VALUES : HPML_ARRAY_GRADIENTS;
    hpml_status        status = HPML_OK;
    hpmlc_ranges_copy(d, to, true, me, me + 1, own->gradient);
    memset(own->gradient, 0, (size_t)own->floats * sizeof(float));
    if (!own->averages) {
        const int64_t at  = own->floats > 0 ? hpml_trainer_place(d->t, from->param) + from->from : 0;
        int64_t       end = at;
        if (own->floats > 0) end = hpml_trainer_place(d->t, last->param) + last->from;
        if (own->floats > 0) end += last->packing.rows * last->packing.cols;
        hpml_trainer_set_step(d->t, own->updates++);
        if (own->floats > 0) status = hpml_trainer_apply_range(d->t, at, end - at, 1);
        if (status == HPML_OK) status = hpmlc_rows_step(d, at, end);
    }
    hpmlc_ranges_copy(d, HPML_ARRAY_VALUES, false, me, me + 1, own->values);
    return status;
}

/* Server: receives the next request of any worker, or records that a worker is lost. Rows of sparse tables are sent at
   once; the strategy's function own->enter answers the other requests. */
HPMLC_FN hpml_status hpmlc_serve_one(hpml_distributed *d)
{
    hpmlc_servers *own = hpmlc_servers_of(d);
    for (int i = 0; i < own->workers; i++) {
        hpmlc_client *w = &own->client[i];
        own->awaited[i] = NULL;
        if (w->is_lost || w->is_open) continue;
        if (!w->is_posted) hpml_irecv(d->c, i, HPMLC_TAG_REQUEST, &w->request, sizeof w->request, &w->message);
        w->is_posted    = true;
        own->awaited[i] = &w->message;
    }
    if (d->c->survive) hpml_comm_busy(d->c, 2 * d->c->timeout); /* else workers could lose this server */
    const int k = hpml_wait_any(d->c, own->awaited, own->workers, -1);
    if (k < 0) return hpml_ctx_status(d->ctx);
    hpmlc_client *w = &own->client[k];
    w->is_posted = false;
    own->is_finished = false;
    if (w->message.status == HPML_OK && w->request.kind == HPMLC_LEAVE)
        return hpmlc_survive(d, k, HPML_ERR_PEER);
    if (w->message.status == HPML_OK && w->request.kind == HPMLC_ROWS)
        return hpmlc_survive(d, k, hpmlc_rows_answer(d, k));
    w->is_open   = w->message.status == HPML_OK && w->request.kind != HPMLC_NOTE;
    if (w->message.status == HPML_OK && w->request.kind == HPMLC_NOTE) w->epochs = w->request.epoch;
    return hpmlc_survive(d, k, w->message.status);
}

/* Returns whether worker w has done the steps (federated: rounds) that this server has done. */
HPMLC_FN bool hpmlc_has_stepped(const hpmlc_servers *own, const hpmlc_client *w)
{
    return w->clock >= own->steps / own->period;
}

/* Serves until is_over(w) for all workers w that are active; NULL: until none is. */
HPMLC_FN hpml_status hpmlc_serve(hpml_distributed *d, bool (*is_over)(const hpmlc_servers *own, const hpmlc_client *w))
{
    hpmlc_servers *own    = hpmlc_servers_of(d);
    hpml_status    status = HPML_OK;
    own->taken   = 0;
    own->samples = 0;
    own->loss    = 0;
    for (;;) {
        do { /* again where a worker was lost meanwhile, because no one waits for that worker any more */
            own->has_lost = false;
            status        = own->enter(d);
        } while (status == HPML_OK && own->has_lost);
        int active = 0; /* number of workers that the server must still serve */
        for (int k = 0; k < own->workers; k++)
            active += hpmlc_is_active(&own->client[k]) && !(is_over && is_over(own, &own->client[k]));
        if (status != HPML_OK || active == 0) return status;
        status = hpmlc_serve_one(d);
        if (status != HPML_OK) return status;
    }
}


/* Worker: announces to the servers that its training has ended, except with .survive, where servers notice the end by
   themselves. Server: answers requests until all workers have ended. */
HPMLC_FN void hpmlc_servers_leave(hpml_distributed *d)
{
    const hpmlc_servers *own = hpmlc_servers_of(d);
    HPMLC_ZERO(hpmlc_request, r);
    r.kind = HPMLC_LEAVE;
    if (hpmlc_is_server(d)) hpmlc_serve(d, NULL);
    for (int s = own->workers; s < d->c->size && !hpmlc_is_server(d) && !d->c->survive; s++) /* else they notice */
        hpml_send(d->c, s, HPMLC_TAG_REQUEST, &r, sizeof r);
}

/* Worker: computes a gradient, unless this step's round is complete without it or, federated, the worker was not drawn.
   Server: answers the workers' requests until the step is complete; *loss is the mean loss of the workers. */
HPMLC_FN hpml_status hpmlc_servers_begin(hpml_distributed *d, int64_t samples, float *loss)
{
    hpmlc_servers *own    = hpmlc_servers_of(d);
    const bool     serves = hpmlc_is_server(d);
    hpml_status    status = HPML_OK;
    if (!own->averages) own->is_skipped = own->batch < 0 && own->steps < own->round;
    if (!serves && !own->is_skipped) return hpmlc_factors_pass(d, samples, loss);
    *loss = isnan(d->report.r.loss) ? 0 : (float)d->report.r.loss;
    if (++d->micro < d->accumulate || !serves) return HPML_OK;
    own->steps += !own->is_served;
    if (!own->is_served) status = hpmlc_serve(d, hpmlc_has_stepped);
    own->is_served = false;
    if (own->samples > 0) *loss = (float)(own->loss / own->samples);
    return status;
}

HPMLC_FN hpml_status hpmlc_servers_gradient(hpml_distributed *d, int param)
{
    hpmlc_factor_keep(d, param, 0);
    return HPML_OK;
}

/* Counts a step in the report, unless `status` is an error; returns `status`. loss: sum over the samples. */
HPMLC_FN hpml_status hpmlc_servers_note(hpml_distributed *d, hpml_status status, double samples, double loss)
{
    if (status != HPML_OK) return status;
    if (samples > 0) d->report.r.loss = loss / samples;
    d->report.r.samples = (int64_t)samples;
    hpmlc_steps_note(d);
    return HPML_OK;
}

HPMLC_FN hpml_status hpmlc_servers_update(hpml_distributed *d)
{
    hpmlc_servers *own    = hpmlc_servers_of(d);
    hpml_status    status = HPML_OK;
    if (hpmlc_is_server(d)) {
        if (!own->averages) hpml_trainer_set_step(d->t, hpmlc_max(own->updates, 1) - 1); /* the trainer adds 1 */
        return hpmlc_servers_note(d, HPML_OK, own->samples, own->loss);
    }
    if (!own->is_skipped)
        status = hpmlc_exchange_with(d, HPML_ARRAY_GRADIENTS, false, true, d->stats.samples, d->stats.loss);
    own->steps += own->batch < 0;
    own->batch = -1;
    return hpmlc_servers_note(d, status, d->stats.samples, d->stats.loss);
}

// ---------------------------------------------------------------------------------------------------------------------
// >>servers-finish   parameter servers: the end of a training, checkpoints
// ---------------------------------------------------------------------------------------------------------------------
/* Sends n floats at `data` of rank `root`, a server, to all other ranks that are not lost, which receive them in their
   `data`. */
HPMLC_FN hpml_status hpmlc_servers_send(hpml_distributed *d, int root, float *data, int64_t n)
{
    hpmlc_servers *own    = hpmlc_servers_of(d);
    hpml_status    status = HPML_OK;
    const size_t   bytes  = (size_t)n * sizeof(float);
    if (d->c->rank != root) return hpmlc_server_lost(d, root, hpml_recv(d->c, root, HPMLC_TAG_FLOATS, data, bytes));
    for (int r = 0; r < d->c->size && status == HPML_OK; r++) {
        if (r == root || (r < own->workers && own->client[r].is_lost)) continue;
        status = hpml_send(d->c, r, HPMLC_TAG_FLOATS, data, bytes);
        status = r < own->workers ? hpmlc_survive(d, r, status) : hpmlc_server_lost(d, r, status);
    }
    return status;
}

/* Copies the rows of a sparse table that server s owns, in array `which`, from s to all ranks that are not lost. */
HPMLC_FN hpml_status hpmlc_rows_share(hpml_distributed *d, hpml_array which, int param, int s)
{
    const hpml_tensor *p     = hpmlc_param(d, param);
    const int64_t      step  = hpmlc_servers_of(d)->count, width = p->shape[1];
    const int64_t      n     = (p->shape[0] - s + step - 1) / step;
    const size_t       bytes = (size_t)width * sizeof(float);
    float             *array = p->data;
    float             *rows  = hpmlc_rows_reserve(d, n * width + 1);
    if (!rows) return hpml_ctx_status(d->ctx);
    if (which != HPML_ARRAY_VALUES) array = hpml_trainer_array(d->t, which, NULL) + hpml_trainer_place(d->t, param);
    for (int64_t i = 0; i < n; i++) memcpy(rows + i * width, array + (s + i * step) * width, bytes);
    hpml_status status = hpmlc_servers_send(d, hpmlc_servers_of(d)->workers + s, rows, n * width);
    for (int64_t i = 0; i < n && status == HPML_OK; i++)
        memcpy(array + (s + i * step) * width, rows + i * width, bytes);
    return status;
}

/* Copies an array of the trainer to all ranks that are not lost; each range of the array comes from its server. */
HPMLC_FN hpml_status hpmlc_servers_share(hpml_distributed *d, hpml_array which)
{
    hpmlc_servers *own    = hpmlc_servers_of(d);
    hpml_status    status = HPML_OK;
    for (int s = 0; s < own->count && status == HPML_OK; s++) { /* all ranks in the same order, so that none waits */
        const int64_t floats = hpmlc_server_at(own, s + 1) - hpmlc_server_at(own, s);
        hpmlc_ranges_copy(d, which, false, s, s + 1, own->gradient);
        status = hpmlc_servers_send(d, own->workers + s, own->gradient, floats);
        if (status == HPML_OK) hpmlc_ranges_copy(d, which, true, s, s + 1, own->gradient);
    }
    memset(own->gradient, 0, (size_t)own->floats * sizeof(float));
    for (int k = 0; k < own->tables * own->count && status == HPML_OK; k++)
        status = hpmlc_rows_share(d, which, own->table[k / own->count], k % own->count);
    return status;
}

/* Gives all ranks the mean of the workers' running statistics (batchnorm), by way of the first server. */
HPMLC_FN hpml_status hpmlc_servers_buffers(hpml_distributed *d)
{
    hpmlc_servers *own    = hpmlc_servers_of(d);
    const int64_t  n      = d->layout.buffer_total;
    const int      root   = own->workers;
    hpml_status    status = HPML_OK;
    double        *sum    = d->stats.sum;
    float         *row    = d->stats.buffers;
    if (n == 0) return HPML_OK;
    if (d->c->rank < root) {
        hpmlc_buffers_copy(d, row, false);
        status = hpml_send(d->c, root, HPMLC_TAG_FLOATS, row, (size_t)n * sizeof(float));
        status = hpmlc_server_lost(d, root, status);
    }
    memset(sum, 0, (size_t)n * sizeof *sum);
    for (int k = 0, there = 0; k < own->workers && d->c->rank == root && status == HPML_OK; k++) {
        if (own->client[k].is_lost) continue;
        status = hpmlc_survive(d, k, hpml_recv(d->c, k, HPMLC_TAG_FLOATS, row, (size_t)n * sizeof(float)));
        there += !own->client[k].is_lost;
        for (int64_t i = 0; i < n && !own->client[k].is_lost; i++) sum[i] += ((double)row[i] - sum[i]) / there;
    }
    for (int64_t i = 0; i < n && d->c->rank == root; i++) row[i] = (float)sum[i];
    if (status == HPML_OK) status = hpmlc_servers_send(d, root, row, n);
    if (status == HPML_OK) hpmlc_buffers_copy(d, row, true);
    return status;
}

/* Waits until all workers that are not lost have called this function, and gives all ranks the servers' values. */
HPMLC_FN hpml_status hpmlc_servers_finish(hpml_distributed *d)
{
    hpmlc_servers *own = hpmlc_servers_of(d);
    hpml_status    status;
    HPMLC_ZERO(hpmlc_request, r);
    r.kind = HPMLC_FINISH;
    status = hpmlc_is_server(d) ? hpmlc_serve(d, NULL) : hpmlc_ask(d, &r, 0);
    for (int k = 0; k < own->workers; k++) own->client[k].is_open = false;
    own->is_finished = true;
    if (status == HPML_OK) status = hpmlc_servers_share(d, HPML_ARRAY_VALUES);
    return status == HPML_OK ? hpmlc_servers_buffers(d) : status;
}

/* Adds the workers' residuals to the list of arrays for checkpoints; false: an error. Before saving, all ranks get what
   the servers have: values, states of the optimizer and number of updates, because rank 0 writes the file. */
HPMLC_FN bool hpmlc_servers_state(hpml_distributed *d, hpmlc_states *list)
{
    hpmlc_servers *own    = hpmlc_servers_of(d);
    hpml_status    status = list->is_saving ? hpmlc_servers_finish(d) : HPML_OK;
    if (!list->is_saving) hpmlc_servers_restart(d);
    for (int i = HPML_ARRAY_STATE; list->is_saving && !own->averages && i < HPML_ARRAY_END && status == HPML_OK; i++)
        if (hpml_trainer_array(d->t, (hpml_array)i, NULL)) status = hpmlc_servers_share(d, (hpml_array)i);
    if (list->is_saving && !own->averages && status == HPML_OK) {
        float updates[2]; /* 64 bits of own->updates */
        memcpy(updates, &own->updates, sizeof updates);
        status = hpmlc_servers_send(d, own->workers, updates, 2);
        memcpy(&own->updates, updates, sizeof updates);
        hpml_trainer_set_step(d->t, own->updates);
    }
    if (status != HPML_OK || !hpmlc_has_feedback(d)) return status == HPML_OK;
    hpmlc_state *it = hpmlc_state_add(list, HPMLC_RANK, "residual", list->copy, "servers", own->total);
    if (!it) return false;
    it->copies  = d->copies;
    it->is_mean = !d->plan.sum;
    it->data    = own->residual;
    it->floats  = own->residual ? own->total : 0;
    return true;
}

// ---------------------------------------------------------------------------------------------------------------------
// >>strategy-ps   synchronous rounds on servers: gradients, without those of backup workers, or averaged parameters
// ---------------------------------------------------------------------------------------------------------------------
/* A round is complete when all workers, or enough of them, have pushed. The servers take what was pushed in the order
   of the ranks, and answer all.
   Strategy ps: the mean of the gradients makes a step, with the bits of sync by HPML_CENTRAL.
   Strategy backup: of K = N + b workers, b = .backup, the first N make the step. A gradient that comes later is left
   out, and its worker goes on with the step that the servers have come to (Chen et al. 2016, "Revisiting Distributed
   Synchronous SGD"); its shares of the steps between are not trained on.
   Strategy federated: workers are clients, each with data that do not leave it (a hpml_loader_desc with .ranks = 1). A
   round is .period steps, in which the clients that are drawn for it, a .share of all, train on their own with the
   trainer's optimizer; then they push their parameters w_k, and the servers take sum n_k w_k / sum n_k for n_k samples
   (McMahan et al. 2017, "Communication-Efficient Learning of Deep Networks from Decentralized Data"). The others sit
   the round out. Steps after the last whole round have no effect. */

/* Server: adds up the gradients (federated: values) that workers have pushed in round own->round, in the order of
   ranks, makes the round's step, and answers the workers that wait for the new values. */
HPMLC_FN hpml_status hpmlc_ps_step(hpml_distributed *d)
{
    hpmlc_servers *own    = hpmlc_servers_of(d);
    hpml_status    status = HPML_OK;
    double         samples = 0, all = 0;
    for (int k = 0; k < own->workers; k++)
        if (hpmlc_is_open(&own->client[k], HPMLC_PUSH)) all += (double)own->client[k].request.samples;
    for (int k = 0; k < own->workers && status == HPML_OK; k++) {
        const double n = (double)own->client[k].request.samples;
        bool         came;
        if (!hpmlc_is_open(&own->client[k], HPMLC_PUSH)) continue;
        status = hpmlc_take(d, k, own->averages && all > 0 ? (float)(n / all) : 1, &came);
    }
    for (int k = 0; k < own->workers; k++)
        if (hpmlc_is_open(&own->client[k], HPMLC_PULL)) samples += (double)own->client[k].request.samples;
    for (int64_t i = 0; own->exact && i < own->floats; i++) {
        own->gradient[i] = (float)((double)own->exact[i] / HPMLC_EXACT_ONE);
        own->exact[i]    = 0;
    }
    if (!d->plan.sum) hpmlc_divide_f32(own->gradient, own->floats, (float)own->workers);
    float scale = hpmlc_rescale(d, samples, hpmlc_whole_samples(d));
    hpmlc_rows_scale(d, d->plan.sum ? 1 : (float)own->workers, scale);
    if (own->averages && samples > 0) scale = (float)(all / samples); /* not 1 if a worker was lost meanwhile */
    for (int64_t i = 0; i < own->floats && scale != 1; i++) own->gradient[i] *= scale;
    if (status == HPML_OK && samples > 0) status = hpmlc_server_apply(d);
    own->round++;
    for (int k = 0; k < own->workers && status == HPML_OK; k++) {
        if (!hpmlc_is_open(&own->client[k], HPMLC_PULL)) continue;
        own->client[k].clock = own->round;
        status = hpmlc_answer_to(d, k, own->round, -1);
    }
    return status;
}

/* Server: answers pushes for earlier rounds, without adding their gradients; with exact sums adds the pushes of
   this round that have come; makes this round's step if enough workers wait for it. */
HPMLC_FN hpml_status hpmlc_ps_enter(hpml_distributed *d)
{
    hpmlc_servers *own    = hpmlc_servers_of(d);
    hpml_status    status = HPML_OK;
    int            there = 0, ready = 0;
    for (int k = 0; k < own->workers && status == HPML_OK; k++) {
        hpmlc_client *w    = &own->client[k];
        const bool    asks = w->is_open && w->request.kind <= HPMLC_PULL;
        bool          came = false;
        const bool    late = asks && w->request.step < own->round;
        if (late) status = hpmlc_take(d, k, 0, &came);
        if (own->exact && !late && hpmlc_is_open(w, HPMLC_PUSH)) status = hpmlc_take(d, k, 1, &came);
        ready += asks && !late && w->is_open;
        there += hpmlc_is_active(w);
        if (!late || !came || status != HPML_OK) continue;
        w->clock = own->round;
        status   = hpmlc_answer_to(d, k, own->round, -1);
    }
    const int wanted = (int)hpmlc_min(there, own->workers - d->plan.backup);
    return status != HPML_OK || ready == 0 || ready < wanted ? status : hpmlc_ps_step(d);
}

HPMLC_FN bool hpmlc_ps_open(hpml_distributed *d)
{
    if (hpmlc_plan_workers(&d->plan, d->c->size) == 1) d->plan.sum = true; /* one gradient: a mean would round */
    return hpmlc_servers_open(d, hpmlc_ps_enter);
}

HPMLC_FN bool hpmlc_federated_open(hpml_distributed *d)
{
    d->plan.sum = true; /* a client steps by its own gradient: no mean */
    if (!hpmlc_servers_open(d, hpmlc_ps_enter)) return false;
    hpmlc_servers_of(d)->averages = true;
    hpmlc_servers_of(d)->period   = d->plan.period;
    hpmlc_servers_restart(d);
    return true;
}

/* Ends a step. A client that is drawn for the round runs the optimizer; at the round's last step it pushes its
   parameters. A client that is drawn for the next round then gets the servers' values. A server notes the step. */
HPMLC_FN hpml_status hpmlc_federated_update(hpml_distributed *d)
{
    hpmlc_servers *own    = hpmlc_servers_of(d);
    const int64_t  next   = (hpml_trainer_step_count(d->t) + 1) / d->plan.period; /* number of the next step's round */
    hpml_status    status = HPML_OK;
    if (hpmlc_is_server(d)) return hpmlc_servers_update(d);
    if (!own->is_skipped) {
        own->samples += d->stats.samples;
        own->loss += d->stats.loss;
        status = hpml_trainer_apply(d->t, 0, d->layout.params);
    }
    if ((own->steps + 1) % own->period == 0 && status == HPML_OK) {
        const bool skips = own->is_skipped;
        own->is_skipped = !hpmlc_is_drawn(d, next);
        status = hpmlc_exchange_with(d, HPML_ARRAY_VALUES, skips, !own->is_skipped, own->samples, own->loss);
        own->samples = 0;
        own->loss    = 0;
    }
    own->steps++;
    return hpmlc_servers_note(d, status, d->stats.samples, d->stats.loss);
}

// ---------------------------------------------------------------------------------------------------------------------
// >>strategy-async   asynchronous steps on servers, with bounded or any staleness
// ---------------------------------------------------------------------------------------------------------------------
/* Each gradient makes a step by itself when it comes. Strategy async (Dean et al. 2012, "Large Scale Distributed Deep
   Networks": Downpour SGD): the answer goes back at once, and fit deals batches on demand, so that a slow worker
   computes fewer of them. Strategy ssp (Ho et al. 2013, "More Effective Distributed ML via a Stale Synchronous Parallel
   Parameter Server"): a worker that has done c steps gets its answer when the slowest one has done c - s, s =
   .staleness; with s = 0 gradients of a step take effect together, as in >>strategy-ps. */

/* Returns the batch that a worker computes next: one that a lost worker had, else the next of the epoch; -1: the epoch
   ends; -2: not known yet, because in the last epoch another worker may be lost with its batch. */
HPMLC_FN int64_t hpmlc_async_deal(hpmlc_servers *own, const hpmlc_request *r)
{
    const int64_t begin = r->epoch * r->batch, end = begin + r->batch;
    int64_t       left  = -1;
    for (int k = 0; k < own->workers; k++) {
        hpmlc_client *w     = &own->client[k];
        const int64_t batch = w->batch;
        if (batch < 0 || batch >= end) continue;
        left = -2;
        if (!w->is_lost) continue;
        w->batch = -1;
        return batch;
    }
    own->dealt = hpmlc_max(own->dealt, begin);
    if (own->dealt < end) return own->dealt++;
    return r->wants ? left : -1;
}

/* Answers the open request of worker k if it may be answered: a PULL unless the worker is more than .staleness steps
   ahead of `slowest`, the steps of the slowest worker; a DEAL once it is known which batch the worker gets. */
HPMLC_FN hpml_status hpmlc_async_answer(hpml_distributed *d, int k, int64_t slowest)
{
    hpmlc_servers *own = hpmlc_servers_of(d);
    hpmlc_client  *w   = &own->client[k];
    if (hpmlc_is_open(w, HPMLC_PULL) && w->clock - slowest <= d->plan.staleness)
        return hpmlc_answer_to(d, k, w->clock, -1);
    if (!hpmlc_is_open(w, HPMLC_DEAL)) return HPML_OK;
    const int64_t batch = hpmlc_async_deal(own, &w->request);
    if (batch == -2) return HPML_OK;
    if (batch == -1) w->epochs = w->request.epoch + 1;
    w->batch = batch;
    return hpmlc_answer_to(d, k, w->clock, batch);
}

HPMLC_FN hpml_status hpmlc_async_enter(hpml_distributed *d)
{
    hpmlc_servers *own     = hpmlc_servers_of(d);
    hpml_status    status  = HPML_OK;
    int64_t        slowest = INT64_MAX;
    for (int k = 0; k < own->workers && status == HPML_OK; k++) {
        hpmlc_client *w = &own->client[k];
        bool          came = false;
        if (hpmlc_is_open(w, HPMLC_PUSH)) status = hpmlc_take(d, k, 1, &came);
        if (came && w->request.samples > 0 && status == HPML_OK) status = hpmlc_server_apply(d);
        w->clock += came && w->request.batch < 0;
        if (hpmlc_is_active(w)) slowest = hpmlc_min(slowest, w->clock);
    }
    for (int k = 0; k < own->workers && status == HPML_OK; k++) status = hpmlc_async_answer(d, k, slowest);
    return status;
}

/* For hpmlc_serve: returns whether this step need not wait for worker w, because the server `own` took a gradient in
   this step, or w has ended the epoch number own->epoch. */
HPMLC_FN bool hpmlc_has_ended(const hpmlc_servers *own, const hpmlc_client *w)
{
    return own->taken > 0 || w->epochs > own->epoch;
}

/* The trainer's hook `next`. On a worker: returns the batch that fit computes next on this rank; below 0: the
   epoch ends, or an error. On a server: answers requests until one step is made or a worker has ended the epoch. */
HPMLC_FN int64_t hpmlc_async_next(void *user, hpml_trainer *t HPMLC_UNUSED, int64_t epoch, int64_t batches,
                                  bool is_last)
{
    hpml_distributed *d   = (hpml_distributed *)user;
    hpmlc_servers    *own = hpmlc_servers_of(d);
    HPMLC_ZERO(hpmlc_request, r);
    if (hpmlc_is_server(d)) {
        own->epoch     = epoch;
        own->is_served = hpmlc_serve(d, hpmlc_has_ended) == HPML_OK && own->taken > 0;
        return own->is_served ? epoch * batches : -1;
    }
    r.kind  = HPMLC_DEAL;
    r.batch = batches;
    r.epoch = epoch;
    r.wants = is_last;
    hpml_status status = hpml_send(d->c, own->workers, HPMLC_TAG_REQUEST, &r, sizeof r);
    if (status == HPML_OK)
        status = hpml_recv(d->c, own->workers, HPMLC_TAG_REQUEST, own->answer, sizeof *own->answer);
    if (hpmlc_server_lost(d, own->workers, status) != HPML_OK) return -1;
    own->batch = own->answer->batch;
    r.kind     = HPMLC_NOTE;
    r.wants    = 0;
    r.epoch++;
    if (own->batch < 0) hpmlc_ask(d, &r, 1);
    return own->batch;
}

HPMLC_FN bool hpmlc_async_open(hpml_distributed *d)
{
    if (d->plan.strategy == HPML_STRATEGY_ASYNC) {
        d->plan.staleness = INT32_MAX;
        d->next           = hpmlc_async_next;
    }
    if (d->plan.staleness == 0) return hpmlc_ps_open(d);
    d->plan.sum = true; /* a gradient is the mean over its samples, whatever their number */
    return hpmlc_servers_open(d, hpmlc_async_enter);
}

// ---------------------------------------------------------------------------------------------------------------------
// >>strategy-hogwild   threads that update shared values without locks
// ---------------------------------------------------------------------------------------------------------------------
/* Strategy hogwild: each rank, a thread, steps at once by its own gradient on parameter values that all ranks share; no
   rank waits for another (Niu et al. 2011, "HOGWILD!"). A rank reads the values that a batch needs (of a sparse table
   the rows of the batch's tokens) by relaxed atomic loads into its own parameters, computes and steps there, and adds
   the change to the shared values by a relaxed load and a relaxed store. Of two changes of one number at the same time
   one may be lost, which sparse models bear because batches have few rows in common; dense layers are read and written
   whole. Each rank has its own optimizer states. A run with one rank gives the same bits as serial training. */

typedef struct hpmlc_hogwild_values { /* values of all ranks; the rank that releases them last frees them */
    hpml_allocator allocator;
    size_t         bytes;
    int32_t        holders;   /* ranks that have not released them */
    uint32_t      *bits;      /* (layout.span) bits of the floats, laid out as in the trainer's arrays */
} hpmlc_hogwild_values;

typedef struct hpmlc_hogwild {
    hpmlc_hogwild_values *shared;
    float        *seen;       /* (layout.span) the shared values as this rank read them last */
} hpmlc_hogwild;

/* Copies n of the values that all ranks share, from number `first` of parameter p on, to p->data and to own->seen. */
HPMLC_FN void hpmlc_hogwild_pull(const hpml_distributed *d, hpml_tensor *p, int64_t first, int64_t n)
{
    const hpmlc_hogwild *own = (const hpmlc_hogwild *)d->own;
    const int64_t        at  = hpmlc_gradient_at(d, p) + first;
    for (int64_t i = at; i < at + n; i++) {
        uint32_t bits = __atomic_load_n(&own->shared->bits[i], __ATOMIC_RELAXED);
        memcpy(&own->seen[i], &bits, sizeof bits);
    }
    memcpy(p->data + first, own->seen + at, (size_t)n * sizeof(float));
}

/* Adds what a step has changed in n numbers of p, from number `first` on, to the shared values. */
HPMLC_FN void hpmlc_hogwild_push(const hpml_distributed *d, hpml_tensor *p, int64_t first, int64_t n)
{
    const hpmlc_hogwild *own = (const hpmlc_hogwild *)d->own;
    const int64_t        at  = hpmlc_gradient_at(d, p) + first;
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits = __atomic_load_n(&own->shared->bits[at + i], __ATOMIC_RELAXED);
        float    was  = own->seen[at + i], value = p->data[first + i], now;
        memcpy(&now, &bits, sizeof now);
        if (now != was) value = now + (value - was); /* else the step's value is kept, unrounded */
        memcpy(&bits, &value, sizeof bits);
        __atomic_store_n(&own->shared->bits[at + i], bits, __ATOMIC_RELAXED);
    }
}

/* Calls `move`, which reads or changes the values that ranks share, for all parameters; only_rows: of sparse tables
   only for the rows that have a gradient. */
HPMLC_FN void hpmlc_hogwild_all(const hpml_distributed *d, bool only_rows,
                                void (*move)(const hpml_distributed *d, hpml_tensor *p, int64_t first, int64_t n))
{
    for (int k = 0; k < d->layout.params; k++) {
        hpml_tensor   *p = hpmlc_param(d, k);
        int64_t        count;
        const int32_t *row = hpml_param_rows(p, &count);
        if (hpmlc_gradient_at(d, p) < 0) continue;
        if (!row || !only_rows) move(d, p, 0, hpml_tensor_count(p));
        for (int64_t i = 0; row && only_rows && i < count; i++) move(d, p, row[i] * p->shape[1], p->shape[1]);
    }
}

/* The trainer's hook `need`: in forward passes, reads the shared values that an op needs, before the op runs. */
HPMLC_FN hpml_status hpmlc_hogwild_need(void *user, hpml_trainer *t HPMLC_UNUSED, const hpml_moment *at)
{
    const hpml_distributed *d      = (const hpml_distributed *)user;
    hpml_tensor            *p      = hpmlc_param(d, at->param);
    const hpml_tensor      *tokens = at->node->src[0];
    const bool              reads  = at->pass == HPML_PASS_FORWARD || at->pass == HPML_PASS_EVALUATE;
    if (!reads || hpmlc_gradient_at(d, p) < 0) return HPML_OK;
    if (!hpml_param_rows(p, NULL)) {
        hpmlc_hogwild_pull(d, p, 0, hpml_tensor_count(p));
        return HPML_OK;
    }
    for (int64_t i = 0; i < hpml_tensor_count(tokens); i++) {
        int32_t row = ((const int32_t *)tokens->raw)[i];
        if (row >= 0 && row < p->shape[0]) hpmlc_hogwild_pull(d, p, row * p->shape[1], p->shape[1]);
    }
    return HPML_OK; /* tokens that are no row's index: the op itself fails */
}

HPMLC_FN hpmlc_hogwild_values *hpmlc_shared_create(hpml_distributed *d)
{
    hpml_allocator a     = hpml_ctx_allocator(d->ctx);
    size_t         bytes = sizeof(hpmlc_hogwild_values) + (size_t)d->layout.span * sizeof(uint32_t);
    hpmlc_hogwild_values *s = (hpmlc_hogwild_values *)a.alloc(bytes, 64, a.user);
    if (!s) return NULL;
    s->allocator = a;
    s->bytes     = bytes;
    s->holders   = d->c->size;
    s->bits      = (uint32_t *)(void *)(s + 1);
    return s;
}

/* Destructor of a hpmlc_hogwild: the last rank that calls it frees the values. */
HPMLC_FN void hpmlc_hogwild_destroy(void *object)
{
    hpmlc_hogwild_values *s = ((hpmlc_hogwild *)object)->shared;
    if (!s || __atomic_sub_fetch(&s->holders, 1, __ATOMIC_ACQ_REL) > 0) return;
    hpml_allocator a = s->allocator;
    a.free(s, s->bytes, a.user);
}

HPMLC_FN void hpmlc_hogwild_share(const hpml_distributed *d, hpml_tensor *p, int64_t first, int64_t n)
{
    hpmlc_hogwild *own = (hpmlc_hogwild *)d->own;
    const int64_t  at  = hpmlc_gradient_at(d, p) + first;
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, &p->data[first + i], sizeof bits);
        __atomic_store_n(&own->shared->bits[at + i], bits, __ATOMIC_RELAXED);
    }
}

HPMLC_FN bool hpmlc_hogwild_open(hpml_distributed *d)
{
    hpmlc_hogwild *own = (hpmlc_hogwild *)hpml_ctx_alloc(d->ctx, sizeof *own, hpmlc_hogwild_destroy);
    d->own = own;
    if (!own) return false;
    own->seen = (float *)hpmlc_dist_alloc(d, (size_t)d->layout.span * sizeof(float));
    if (own->seen && d->c->rank == 0) own->shared = hpmlc_shared_create(d);
    if (own->shared) hpmlc_hogwild_all(d, false, hpmlc_hogwild_share);
    if (d->c->rank == 0 && !own->shared) hpmlc_fail(d->c, HPML_ERR_MEMORY, "distribute: no memory for shared values");
    d->need = hpmlc_hogwild_need;
    return hpml_broadcast(d->c, &own->shared, sizeof own->shared, 0) == HPML_OK && own->seen;
}

HPMLC_FN hpml_status hpmlc_hogwild_update(hpml_distributed *d)
{
    if (d->stats.samples == 0) return HPML_OK;
    hpmlc_stats_fill(d, NULL);
    hpml_status status = hpmlc_stats_read(d); /* of this rank alone */
    if (status != HPML_OK) return status;
    hpmlc_steps_note(d);
    status = hpml_trainer_apply(d->t, 0, d->layout.params);
    if (status == HPML_OK) hpmlc_hogwild_all(d, true, hpmlc_hogwild_push);
    return status;
}

/* Sets the parameters of every rank to the values that all ranks share, and batchnorm's running statistics to their
   means over the ranks. Collective. */
HPMLC_FN hpml_status hpmlc_hogwild_finish(hpml_distributed *d)
{
    hpml_status status = hpml_barrier(d->c);
    HPMLC_ZERO(hpml_allreduce_desc, mean);
    mean.reduce = HPML_MEAN;
    if (status != HPML_OK) return status;
    hpmlc_hogwild_all(d, false, hpmlc_hogwild_pull);
    hpmlc_buffers_copy(d, d->stats.buffers, false);
    if (d->layout.buffer_total > 0) status = hpml_allreduce(d->c, d->stats.buffers, d->layout.buffer_total, &mean);
    if (status == HPML_OK) hpmlc_buffers_copy(d, d->stats.buffers, true);
    return status == HPML_OK ? hpml_barrier(d->c) : status;
}

/* Before saving, copies the shared values to this rank's parameters. After loading, rank 0 makes the loaded values the
   shared ones, and a barrier keeps all ranks from stepping before. */
HPMLC_FN bool hpmlc_hogwild_state(hpml_distributed *d, hpmlc_states *list)
{
    if (list->is_saving) hpmlc_hogwild_all(d, false, hpmlc_hogwild_pull);
    else if (d->c->rank == 0) hpmlc_hogwild_all(d, false, hpmlc_hogwild_share);
    return list->is_saving || hpml_barrier(d->c) == HPML_OK;
}

HPMLC_FN void hpmlc_hogwild_close(hpml_distributed *d)
{
    hpml_ctx_release(d->ctx, d->own); /* the destructor releases the shared values */
}

// ---------------------------------------------------------------------------------------------------------------------
// >>strategies   the table of strategies; attaching one to a trainer
// ---------------------------------------------------------------------------------------------------------------------
#define HPMLC_OWN_LOSS "between meetings no rank has the loss of all ranks, which a search compares"

/* The table of strategies. Of the rows of the plan's strategy, one for each form, the first whose is_chosen returns
   true is used; the last row has no is_chosen and always fits. */
#define HPMLC_OWN_STEPS "with servers ranks do not step together"
static const hpmlc_strategy hpmlc_strategies[] = {
    { HPML_STRATEGY_SYNC, "exact", "exact sums cut the batch into leaves once", NULL, hpmlc_exact_is_chosen,
      hpmlc_exact_open, hpmlc_exact_begin, NULL, hpmlc_exact_update, NULL, hpmlc_exact_state, NULL },
    { HPML_STRATEGY_SYNC, "delayed", NULL, "delayed.step", hpmlc_delayed_is_chosen, hpmlc_delayed_open,
      hpmlc_delayed_begin, hpmlc_delayed_gradient, hpmlc_delayed_update, NULL, hpmlc_delayed_state, NULL },
    { HPML_STRATEGY_SYNC, "shard", NULL, NULL, hpmlc_shard_is_chosen, hpmlc_shard_open, hpmlc_shard_begin,
      hpmlc_shard_gradient, hpmlc_shard_update, NULL, hpmlc_buckets_state, hpmlc_shard_close },
    { HPML_STRATEGY_SYNC, "factors", NULL, NULL, hpmlc_factors_is_chosen, hpmlc_factors_open, hpmlc_factors_begin,
      hpmlc_factors_gradient, hpmlc_factors_update, NULL, hpmlc_buckets_state, hpmlc_factors_close },
    { HPML_STRATEGY_SYNC, "nodes", NULL, NULL, hpmlc_nodes_is_chosen, hpmlc_nodes_open, hpmlc_link_begin,
      hpmlc_sync_gradient, hpmlc_nodes_update, NULL, hpmlc_nodes_state, NULL },
    { HPML_STRATEGY_SYNC, "link", NULL, NULL, hpmlc_link_is_chosen, hpmlc_link_open, hpmlc_link_begin,
      hpmlc_sync_gradient, hpmlc_link_update, NULL, hpmlc_link_state, NULL },
    { HPML_STRATEGY_SYNC, "sync", NULL, NULL, NULL, hpmlc_sync_open, hpmlc_sync_begin, hpmlc_sync_gradient,
      hpmlc_sync_update, NULL, hpmlc_buckets_state, NULL },
    { HPML_STRATEGY_LOCAL, "local", HPMLC_OWN_LOSS, NULL, NULL, hpmlc_weights_open, hpmlc_weights_begin, NULL,
      hpmlc_local_update, hpmlc_local_finish, hpmlc_weights_state, NULL },
    { HPML_STRATEGY_BLOCK, "block", HPMLC_OWN_LOSS, NULL, NULL, hpmlc_weights_open_centre, hpmlc_weights_begin, NULL,
      hpmlc_block_update, hpmlc_block_finish, hpmlc_weights_state, NULL },
    { HPML_STRATEGY_ELASTIC, "elastic", HPMLC_OWN_LOSS, NULL, NULL, hpmlc_weights_open_centre, hpmlc_weights_begin,
      NULL, hpmlc_elastic_update, hpmlc_elastic_finish, hpmlc_weights_state, NULL },
    { HPML_STRATEGY_GOSSIP, "gossip", HPMLC_OWN_LOSS, NULL, NULL, hpmlc_weights_open, hpmlc_weights_begin, NULL,
      hpmlc_gossip_update, hpmlc_local_meet, hpmlc_weights_state, NULL },
    { HPML_STRATEGY_PS, "ps", HPMLC_OWN_STEPS, NULL, NULL, hpmlc_ps_open, hpmlc_servers_begin,
      hpmlc_servers_gradient, hpmlc_servers_update, hpmlc_servers_finish, hpmlc_servers_state, hpmlc_servers_close },
    { HPML_STRATEGY_BACKUP, "backup", HPMLC_OWN_STEPS, NULL, NULL, hpmlc_ps_open, hpmlc_servers_begin,
      hpmlc_servers_gradient, hpmlc_servers_update, hpmlc_servers_finish, hpmlc_servers_state, hpmlc_servers_close },
    { HPML_STRATEGY_SSP, "ssp", HPMLC_OWN_STEPS, NULL, NULL, hpmlc_async_open, hpmlc_servers_begin,
      hpmlc_servers_gradient, hpmlc_servers_update, hpmlc_servers_finish, hpmlc_servers_state, hpmlc_servers_close },
    { HPML_STRATEGY_ASYNC, "async", HPMLC_OWN_STEPS, NULL, NULL, hpmlc_async_open, hpmlc_servers_begin,
      hpmlc_servers_gradient, hpmlc_servers_update, hpmlc_servers_finish, hpmlc_servers_state, hpmlc_servers_close },
    { HPML_STRATEGY_FEDERATED, "federated", HPMLC_OWN_STEPS, NULL, NULL, hpmlc_federated_open, hpmlc_servers_begin,
      NULL, hpmlc_federated_update, hpmlc_servers_finish, hpmlc_servers_state, hpmlc_servers_close },
    { HPML_STRATEGY_HOGWILD, "hogwild", HPMLC_OWN_LOSS, NULL, NULL, hpmlc_hogwild_open, hpmlc_dist_pass, NULL,
      hpmlc_hogwild_update, hpmlc_hogwild_finish, hpmlc_hogwild_state, hpmlc_hogwild_close },
};

enum { HPMLC_STRATEGIES = sizeof hpmlc_strategies / sizeof hpmlc_strategies[0] };

/* Returns the first form of the plan's strategy that fits c and plan. */
HPMLC_FN const hpmlc_strategy *hpmlc_strategy_choose(hpml_comm *c, const hpml_plan *plan)
{
    const hpmlc_strategy *s = hpmlc_strategies;
    while (s->kind != plan->strategy || (s->is_chosen && !s->is_chosen(c, plan))) s++;
    return s;
}

HPMLC_FN const hpml_optimizer *hpmlc_optimizer_of(const hpml_trainer_desc *d)
{
    const hpml_optimizer *row = d->custom_optimizer;
    for (int i = 0; !row && hpml_optimizer_at(i); i++)
        if (hpml_optimizer_at(i)->opt == d->optimizer) row = hpml_optimizer_at(i);
    return row;
}

HPML_API void hpml_plan_facts_of(hpml_trainer *t, const hpml_comm *c, hpml_plan_facts *out)
{
    memset(out, 0, sizeof *out);
    if (!t || !c) return;
    const hpml_optimizer *row = hpmlc_optimizer_of(hpml_trainer_settings(t));
    out->ranks         = c->size;
    out->batch         = hpml_trainer_settings(t)->input->shape[0];
    out->accumulate    = hpml_trainer_settings(t)->accumulate;
    out->overflows     = hpmlc_overflows(t, c->ctx);
    out->mixes_samples = !hpml_graph_batchable(hpml_trainer_graph(t));
    out->clips         = hpml_trainer_settings(t)->clip_norm > 0;
    out->steps_tensors = row && (row->prepare || row->layer_ratio || row->whole); /* see hpml_trainer_apply_range */
    out->steps_whole   = row && row->whole;
    out->native        = (c->t->allreduce || c->link.begin) && !(c->mesh && hpmlc_plan_splits(&c->mesh->plan));
    out->no_factors    = !hpmlc_has_factors(c->ctx);
    out->device        = !hpml_ctx_backend(c->ctx)->host;
    out->host_states   = out->device && hpml_trainer_settings(t)->host_optimizer;
    out->together      = hpml_ctx_backend(c->ctx)->host && (c->size == 1 || strcmp(c->t->name, "threads") == 0);
    for (int i = 0; i < hpml_param_count(c->ctx); i++)
        if (hpml_trainer_place(t, i) >= 0 && hpml_param_rows(hpml_param_at(c->ctx, i), NULL)) out->sparse = true;
}

/* Sets the axes (pipe, tensor, sequence, expert) that are 0 in the plan to the sizes for which the model was recorded.
   False: an error on the context, because the plan has another size for an axis. */
HPMLC_FN bool hpmlc_dist_axes(hpml_comm *c, hpml_plan *plan)
{
    int32_t *const axis[HPML_AXES] = { NULL, &plan->pipe, &plan->tensor, &plan->sequence, &plan->expert };
    for (int k = HPML_AXIS_PIPE; k < HPML_AXES; k++) {
        const int32_t size = c->mesh ? c->mesh->m.size[k] : 1;
        if (*axis[k] == 0 && size > 1) *axis[k] = size;
        if (hpmlc_max(*axis[k], 1) == size) continue;
        return hpmlc_fail(c, HPML_ERR_ARGUMENT, "distribute: the plan has %s=%d, and the model was recorded for %d; "
                          "set pipe, tensor, sequence and expert before the model is recorded, in "
                          "hpml_launch_desc.plan, in HPML_PLAN, or by hpml_comm_set_plan",
                          hpml_axis_name((hpml_axis)k), *axis[k], size), false;
    }
    return true;
}

/* Replaces the fields of the plan that HPML_PLAN in the environment names, checks the plan, and fills in its defaults.
   False: an error on the context. */
HPMLC_FN bool hpmlc_dist_plan(hpml_trainer *t, hpml_comm *c, hpml_plan *plan)
{
    char            why[480];
    hpml_plan_facts facts;
    if (hpml_trainer_settings(t)->input->ctx != c->ctx)
        return hpmlc_fail(c, HPML_ERR_ARGUMENT, "distribute: the trainer is of another context; record the model on "
                          "hpml_comm_ctx(comm)"), false;
    hpml_plan_facts_of(t, c, &facts);
    if (hpmlc_plan_environment(c, plan) != HPML_OK || !hpmlc_dist_axes(c, plan)) return false;
    hpml_status status = hpml_plan_check(plan, &facts, why, sizeof why);
    if (status != HPML_OK) return hpmlc_fail(c, status, "distribute: %s", why), false;
    hpml_plan_resolve(plan, &facts, plan);
    return true;
}

/* Returns a number of 31 bits that two plans hardly ever have in common (FNV-1a of their texts). */
HPMLC_FN int64_t hpmlc_plan_hash(const hpml_plan *plan)
{
    char     text[1024];
    uint32_t hash = 2166136261u;
    hpml_plan_text(plan, false, text, sizeof text);
    for (const char *at = text; *at; at++) hash = (hash ^ (uint8_t)*at) * 16777619u;
    return hash >> 1;
}

/* Checks that all ranks have the same model and plan. Then broadcasts each parameter, or part of a split one, among the
   ranks that have the same part, from the first of these ranks. */
HPMLC_FN hpml_status hpmlc_dist_start(hpml_distributed *d)
{
    const hpmlc_layout *l = &d->layout;
    int64_t             shape[4], total = hpml_param_total(d->ctx);
    bool                is_same = true;
    shape[0] = total;
    shape[1] = -total;
    shape[2] = (hpmlc_plan_hash(&d->plan) << 32) + l->params;
    if (d->plan.shard > 2) shape[2] ^= (int64_t)(hpml_ctx_seed(d->ctx) % 999983) << 32;
    shape[3] = -shape[2];
    hpml_status status = hpmlc_reduce_all(d->c, shape, 4, HPML_ELEMENT_I64, HPML_MAX, HPML_AUTO);
    if (status == HPML_OK && shape[0] != -shape[1])
        return hpmlc_fail(d->c, HPML_ERR_SHAPE, "distribute: this rank's model has %lld numbers in %d parameters, "
                          "others up to %lld; record the same model on all ranks", (long long)total, l->params,
                          (long long)shape[0]);
    if (status == HPML_OK && shape[2] != -shape[3])
        return hpmlc_fail(d->c, HPML_ERR_ARGUMENT, "distribute: ranks have different plans, or numbers of parameters "
                          "(%d here), or with shard=3 seeds; give the same plan, HPML_PLAN in the environment and "
                          "seed on all ranks", l->params);
    if (status == HPML_OK && d->c != d->all) status = hpmlc_same(d->all, (uint64_t)shape[2], &is_same);
    if (!is_same)
        return hpmlc_fail(d->c, HPML_ERR_ARGUMENT, "distribute: ranks have different plans, or numbers of parameters "
                          "(%d here); give the same plan on all ranks", l->params);
    for (int i = 0; i < l->params && status == HPML_OK; i++) {
        hpml_tensor *p = hpmlc_param(d, i);
        int64_t      n = hpml_tensor_count(p);
        if (!p->data) continue; /* p is on another stage, or of shard 3, made by one seed */
        float       *from = hpmlc_host_view_begin(&l->view, p->data, n);
        status = hpml_broadcast(hpmlc_ranks_of(d, p), from, (size_t)n * sizeof(float), 0);
        if (status == HPML_OK) hpmlc_host_view_end(&l->view, p->data, n);
        hpml_tensor_changed(p);
    }
    return status;
}

/* Fills layout.by_name with the indices of the parameters, sorted by name: an insertion sort, because most names are in
   order already. */
HPMLC_FN void hpmlc_layout_names(hpml_distributed *d)
{
    int *sorted = d->layout.by_name, k;
    for (int i = 0; i < d->layout.params; i++) {
        const char *name = hpmlc_param(d, i)->name;
        for (k = i; k > 0 && strcmp(hpmlc_param(d, sorted[k - 1])->name, name) > 0; k--) sorted[k] = sorted[k - 1];
        sorted[k] = i;
    }
}

HPMLC_FN bool hpmlc_layout_open(hpml_distributed *d)
{
    hpml_ctx     *ctx  = d->ctx;
    hpmlc_layout *l    = &d->layout;
    int64_t       most = 1;
    l->params    = hpml_param_count(ctx);
    l->batch     = hpml_trainer_settings(d->t)->input->shape[0];
    l->bucket_of = (int *)hpmlc_dist_alloc(d, sizeof(int) * (size_t)(l->params + 1));
    l->by_name   = (int *)hpmlc_dist_alloc(d, sizeof(int) * (size_t)(l->params + 1));
    if (!l->bucket_of || !l->by_name) return false;
    hpmlc_layout_names(d);
    for (int i = 0; i < l->params; i++) {
        hpml_tensor  *p     = hpmlc_param(d, i);
        const int64_t n     = hpml_tensor_count(p), align = HPML_GRADIENT_ALIGN;
        const int64_t place = hpml_trainer_place(d->t, i);
        most = hpmlc_max(most, n);
        l->bucket_of[i] = -1;
        if (place >= 0) l->span = place + (n + align - 1) / align * align;
        if (place >= 0) l->grad_total += n;
        else l->buffer_total += hpmlc_buffer_floats(d, p);
    }
    if (d->plan.shard > 0 && !hpmlc_shard_keep(d)) return false;
    if (hpml_trainer_alloc(d->t) != HPML_OK) return hpmlc_failed(d->c), false;
    l->first = hpml_trainer_array(d->t, HPML_ARRAY_GRADIENTS, NULL);
    if (!l->first) return false;
    return hpml_ctx_backend(ctx)->host || hpmlc_host_view_create(&l->view, ctx, most);
}

/* Makes the trainer recompute or swap activations as d->plan.recompute and .memory ask. False: an error. */
HPMLC_FN bool hpmlc_plan_fits(hpml_distributed *d)
{
    if (!d->plan.recompute && d->plan.memory == 0) return true;
    return hpml_graph_budget(hpml_trainer_graph(d->t), (size_t)d->plan.memory, 0) == HPML_OK;
}

HPMLC_FN bool hpmlc_dist_open(hpml_distributed *d)
{
    if (d->plan.pipe > 1 && !hpmlc_pipeline_open(d)) return false;
    if (!hpmlc_plan_fits(d)) return false;
    if (!hpmlc_layout_open(d)) return false;
    const size_t buffers = (size_t)d->layout.buffer_total;
    d->stats.sum     = (double *)hpmlc_dist_alloc(d, sizeof(double) * (HPMLC_STATS + buffers));
    d->stats.buffers = (float *)hpmlc_dist_alloc(d, sizeof(float) * (buffers + 1));
    d->report.row    = (hpml_step_row *)hpmlc_dist_alloc(d, sizeof *d->report.row * (size_t)d->plan.history);
    return d->report.row && hpmlc_dist_start(d) == HPML_OK && d->strategy->open(d);
}

HPMLC_FN void hpmlc_dist_close(hpml_distributed *d)
{
    void *older;
    if (d->strategy->close) d->strategy->close(d);
    if (d->pipeline) hpmlc_pipeline_close(d);
    for (int i = 0; i < d->buckets.count; i++) {
        hpml_exchange_free(d->buckets.item[i].x);
        hpml_exchange_free(d->buckets.item[i].warm);
    }
    for (void *block = d->memory; block; block = older) {
        memcpy(&older, block, sizeof older);
        hpml_ctx_release(d->ctx, block);
    }
    hpml_ctx_release(d->ctx, d->layout.view.window);
    hpml_ctx_release(d->ctx, d->rows.memory);
    hpml_ctx_release(d->ctx, d);
}

/* Detaches an earlier distribution from trainer t; an error if other hooks have a `run` or `update`, because a
   distribution does not call these. */
HPMLC_FN bool hpmlc_dist_attaches(hpml_trainer *t, hpml_comm *c)
{
    int               count;
    const hpml_hooks *h = hpml_trainer_hooks(t, &count);
    for (int k = count - 1; k >= 0; k--) {
        if (k < count && h[k].run == hpmlc_dist_run) hpml_trainer_detach(t, h[k].user);
        h = hpml_trainer_hooks(t, &count);
    }
    for (int k = 0; k < count; k++)
        if (h[k].run || h[k].update)
            return hpmlc_fail(c, HPML_ERR_STATE, "distribute: hooks with a `run` or an `update` are attached to the "
                              "trainer, which a distribution would not call; attach them after hpml_distribute, then "
                              "they are called before it"), false;
    return true;
}

/* Sets the trainer's share of each global batch; a server has none. Where servers deal whole batches to the workers, a
   batch of the trainer is 1 / workers of the global batch, and one worker computes all of it. */
HPMLC_FN hpml_status hpmlc_shard_set(const hpml_distributed *d)
{
    const int        workers = hpmlc_plan_workers(&d->plan, d->all->size);
    const int64_t    batch   = d->plan.global_batch;
    const hpml_mesh *m       = hpml_comm_mesh(d->all);
    int              rank    = (int)hpmlc_min(d->all->rank, workers);
    if (m && hpmlc_plan_splits(&d->plan))
        rank = m->at[HPML_AXIS_DATA] * m->size[HPML_AXIS_EXPERT] + m->at[HPML_AXIS_EXPERT];
    if (d->next) return hpml_trainer_set_shard(d->t, rank == workers, 1, (batch - 1) / workers + 1, 0);
    return hpml_trainer_set_shard(d->t, rank, workers, batch, d->layout.grain);
}

HPML_API hpml_distributed *hpml_distribute(hpml_trainer *t, hpml_comm *c, const hpml_plan *plan)
{
    HPMLC_ZERO(hpml_hooks, hooks);
    HPMLC_DESC(hpml_plan, settings, plan);
    if (hpmlc_failed(c) || !t) return NULL;
    if (!plan && c->mesh) settings = c->mesh->plan;
    if (!hpmlc_dist_plan(t, c, &settings)) return NULL;
    if (!hpmlc_dist_attaches(t, c)) return NULL;
    hpml_distributed *d = (hpml_distributed *)hpml_ctx_alloc(c->ctx, sizeof *d, NULL);
    if (!d) return NULL;
    d->t            = t;
    d->all          = c;
    d->c            = c->mesh ? c->mesh->m.replicas : c;
    d->ctx          = c->ctx;
    d->plan         = settings;
    d->strategy     = hpmlc_strategy_choose(d->c, &settings);
    d->accumulate   = hpml_trainer_settings(t)->accumulate;
    d->copies.first = d->c->rank;
    d->copies.count = 1;
    d->copies.all   = d->c->size;
    if (!hpmlc_dist_open(d)) {
        hpmlc_dist_close(d);
        return NULL;
    }
    hooks.user   = d;
    hooks.run    = hpmlc_dist_run;
    hooks.grad   = d->strategy->gradient ? hpmlc_dist_grad : NULL;
    hooks.sum    = settings.sync_batchnorm ? hpmlc_dist_sum : NULL;
    hooks.update = hpmlc_dist_update;
    hooks.data   = hpmlc_dist_data;
    hooks.next   = d->next;
    hooks.need   = d->need;
    hooks.norms  = hpmlc_plan_cuts(&settings) ? hpmlc_dist_norms : NULL;
    hooks.join   = settings.shard > 0 ? hpmlc_shard_join : NULL;
    if (settings.shard > 1) {
        hooks.need    = hpmlc_shard_need;
        hooks.release = hpmlc_shard_release;
    }
    hpml_trainer_attach(t, &hooks);
    if (d->pipeline && !hpmlc_pipeline_attach(d->pipeline)) return NULL;
    hpmlc_shard_set(d);
    hpml_distribute_get(d, NULL, true);
    d->report.r.loss = NAN; /* no step yet */
    return hpml_ctx_status(c->ctx) == HPML_OK ? d : NULL;
}

HPML_API hpml_status hpml_distribute_finish(hpml_distributed *d)
{
    if (!d) return HPML_ERR_ARGUMENT;
    if (d->pipeline && !hpmlc_failed(d->c)) hpmlc_pipeline_drain(d->pipeline);
    if (hpmlc_failed(d->c) || !d->strategy->finish) return hpml_ctx_status(d->ctx);
    for (int i = 0; i < d->layout.params; i++) hpml_tensor_changed(hpmlc_param(d, i));
    return d->strategy->finish(d);
}

HPML_API void hpml_distribute_free(hpml_distributed *d)
{
    if (!d) return;
    hpmlc_tasks_wait(d);
    hpml_trainer_detach(d->t, d);
    hpml_trainer_set_shard(d->t, 0, 1, 0, 0);
    hpmlc_dist_close(d);
}

HPML_API hpml_status hpml_distribute_set_batch(hpml_distributed *d, int64_t global_batch)
{
    if (!d || hpmlc_failed(d->c)) return d ? hpml_ctx_status(d->ctx) : HPML_ERR_ARGUMENT;
    int64_t most = hpmlc_plan_workers(&d->plan, d->all->size) * d->layout.batch;
    if (d->strategy->fixed_batch)
        return hpmlc_fail(d->c, HPML_ERR_UNSUPPORTED, "distribute: the global batch stays %lld, because %s",
                          (long long)d->plan.global_batch, d->strategy->fixed_batch);
    if (global_batch < 1 || global_batch > most)
        return hpmlc_fail(d->c, HPML_ERR_ARGUMENT, "distribute: a global batch of %lld; the models' batches hold 1 to "
                          "%lld", (long long)global_batch, (long long)most);
    d->plan.global_batch = global_batch;
    return hpmlc_shard_set(d);
}

// ---------------------------------------------------------------------------------------------------------------------
// >>cluster   roles by name, tensors dealt to servers, shared parameters
// ---------------------------------------------------------------------------------------------------------------------
static const char *const hpmlc_roles[] = { "worker", "ps" };

/* Counts the tasks of a list of `length` characters, separated by commas; 0: one of them has no name. */
HPMLC_FN int32_t hpmlc_tasks_count(const char *list, size_t length)
{
    int32_t count = 0;
    for (size_t n; length > 0; count++) {
        n = strcspn(list, ",; ");
        if (n == 0 || n + 1 == length) return 0;
        list += n < length ? n + 1 : n;
        length -= n < length ? n + 1 : n;
    }
    return count;
}

HPML_API hpml_status hpml_cluster_parse(const char *text, hpml_cluster *out, char *error, size_t size)
{
    const hpmlc_text to = { error, size };
    HPMLC_ZERO(hpml_cluster, c);
    if (!text || !out) return hpmlc_refuse(&to, HPML_ERR_ARGUMENT, "cluster: no text, or nowhere to put it");
    memset(out, 0, sizeof *out);
    while (*(text += strspn(text, "; ")) != 0) {
        int    all = (int)strcspn(text, "; "), name = (int)strcspn(text, "=; "), role = 0;
        size_t length = name < all ? (size_t)(all - name - 1) : 0;
        while (role < 2 && (strlen(hpmlc_roles[role]) != (size_t)name || memcmp(text, hpmlc_roles[role], (size_t)name)))
            role++;
        if (role == 2 || c.tasks[role])
            return hpmlc_refuse(&to, HPML_ERR_ARGUMENT, "cluster: \"%.*s\" is %s; write worker=a,b,c ps=d,e", name,
                                text, role == 2 ? "no role" : "there twice");
        c.tasks[role] = text + name + 1;
        int32_t *count = role == 0 ? &c.workers : &c.servers;
        *count = hpmlc_tasks_count(c.tasks[role], length);
        if (*count == 0)
            return hpmlc_refuse(&to, HPML_ERR_ARGUMENT, "cluster: \"%.*s\" has a task without a name; write the names "
                                "with commas between them", all, text);
        text += all;
    }
    if (c.workers == 0)
        return hpmlc_refuse(&to, HPML_ERR_ARGUMENT, "cluster: there is no worker; write worker=a,b,c ps=d,e");
    *out = c;
    return HPML_OK;
}

HPML_API int hpml_cluster_rank(const hpml_cluster *c, const char *role, int task)
{
    if (!c || !role || task < 0) return -1;
    if (strcmp(role, hpmlc_roles[0]) == 0) return task < c->workers ? task : -1;
    return strcmp(role, hpmlc_roles[1]) == 0 && task < c->servers ? c->workers + task : -1;
}

HPML_API const char *hpml_cluster_role(const hpml_cluster *c, int rank, int *task)
{
    if (!c || rank < 0 || rank >= c->workers + c->servers) return NULL;
    bool server = rank >= c->workers;
    if (task) *task = server ? rank - c->workers : rank;
    return hpmlc_roles[server];
}

HPML_API int hpml_cluster_address(const hpml_cluster *c, int rank, char *buffer, size_t size)
{
    int         task = 0;
    const char *role = hpml_cluster_role(c, rank, &task), *at = role ? c->tasks[role == hpmlc_roles[1]] : "";
    while (task-- > 0) at += strcspn(at, ",") + 1;
    return snprintf(buffer, size, "%.*s", (int)strcspn(at, ",; "), at);
}

HPML_API void hpml_place_round_robin(const hpml_gradient *tensors, int count, int servers, int32_t *server,
                                     int64_t *floats)
{
    if (floats && servers > 0) memset(floats, 0, sizeof *floats * (size_t)servers);
    for (int i = 0; i < count && servers > 0; i++) {
        server[i] = i % servers;
        if (floats) floats[server[i]] += tensors[i].rows * tensors[i].cols;
    }
}

HPML_API hpml_status hpml_distribute_share(hpml_distributed *d)
{
    HPMLC_ZERO(hpml_plan_facts, facts);
    if (!d) return HPML_ERR_ARGUMENT;
    const char *wrong = d->strategy->update != hpmlc_sync_update ? "only strategy sync on the host lets it" : NULL;
    hpml_plan_facts_of(d->t, d->c, &facts);
    if (facts.overflows) wrong = "the loss scale is dynamic";
    if (hpmlc_plan_cuts(&d->plan)) wrong = "ranks have parts of the model";
    for (int i = 0; i < d->layout.params; i++) {
        const hpml_tensor *p    = hpmlc_param(d, i);
        uint64_t           mine = (uint64_t)(uintptr_t)p->data, address = mine;
        if (hpml_broadcast(d->c, &address, sizeof address, 0) != HPML_OK) return hpml_ctx_status(d->ctx);
        if (address != mine) wrong = "parameters are not in the memory of rank 0's";
        if (p->param->buffer) wrong = "batchnorm has statistics, which all ranks would write";
    }
    d->shared = !wrong;
    if (!wrong) return HPML_OK;
    return hpmlc_fail(d->c, HPML_ERR_UNSUPPORTED, "distribute: ranks cannot share parameters: %s; place those of all "
                      "ranks in one array (hpml_params_place), or let each rank have a copy", wrong);
}

// ---------------------------------------------------------------------------------------------------------------------
// >>report   where the time of steps went
// ---------------------------------------------------------------------------------------------------------------------
/* Stores in *out the means per step since the last reset: step_s is the sum of compute_s, exposed_s and the rest of the
   step's time (reading data, updating parameters). */
HPML_API void hpml_distribute_get(hpml_distributed *d, hpml_distribute_report *out, bool reset)
{
    hpml_counters now, split;
    if (!d) return;
    hpmlc_reporting *r = &d->report;
    hpmlc_sent(d, &now);
    hpmlc_axes_sent(d, &split);
    if (out) {
        double n = r->r.steps > 0 ? (double)r->r.steps : 1;
        *out = r->r;
        out->step_s      = (hpml_comm_now(d->c) - r->began) / n;
        out->compute_s   = r->r.compute_s / n;
        out->exposed_s   = r->r.exposed_s / n;
        out->efficiency  = out->step_s > 0 ? 1 - out->exposed_s / out->step_s : 1;
        out->comm_s      = (now.seconds - r->at_reset.seconds) / n;
        out->hidden      = out->comm_s > 0 ? fmax(0, 1 - out->exposed_s / out->comm_s) : 0;
        out->bytes       = (double)(now.bytes - r->at_reset.bytes) / n;
        out->split_bytes = (double)(split.bytes - r->split_at_reset.bytes) / n;
        out->plain_bytes = 8.0 * (double)d->layout.grad_total * (d->c->size - 1) / d->c->size;
        out->buckets     = d->buckets.count;
    }
    if (!reset) return;
    double  loss    = r->r.loss;
    int64_t samples = r->r.samples;
    memset(&r->r, 0, sizeof r->r);
    r->r.loss    = loss;
    r->r.samples = samples;
    hpmlc_steps_mark(d);
    r->began    = r->row_time;
    r->at_reset = now;
    r->split_at_reset = split;
}

HPML_API int hpml_distribute_steps(hpml_distributed *d, hpml_step_row *rows, int capacity)
{
    if (!d || !rows || capacity < 0 || hpmlc_failed(d->c)) return -1;
    int64_t p = d->c->size, size = (int64_t)sizeof *rows;
    int64_t n = hpmlc_min(hpmlc_min(d->report.rows, d->plan.history), capacity / p);
    hpml_step_row *all = (hpml_step_row *)hpml_ctx_alloc(d->ctx, (size_t)(n * p * size + 1), NULL);
    if (!all) return -1;
    for (int64_t i = 0; i < n; i++) all[d->c->rank * n + i] = d->report.row[(d->report.rows - n + i) % d->plan.history];
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

HPML_API int hpml_steps_slowest(const hpml_step_row *rows, int count, double *times)
{
    int    ranks = 0, slowest = -1;
    double most = 0, all = 0;
    while (ranks < count && rows[ranks].step == rows[0].step) ranks++;
    for (int r = 0; r < ranks; r++) {
        double took = 0;
        for (int i = r; i < count; i += ranks) took += rows[i].compute_s;
        all += took;
        if (slowest >= 0 && took <= most) continue;
        slowest = r;
        most    = took;
    }
    if (times) *times = all > most ? most * (ranks - 1) / (all - most) : 0;
    return slowest < 0 ? -1 : rows[slowest].rank;
}

HPML_API int hpml_steps_text(const hpml_step_row *rows, int count, char *buffer, size_t size)
{
    double       times;
    const int    slowest = hpml_steps_slowest(rows, count, &times);
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
        sum.step_s += r->step_s;
        sum.compute_s += r->compute_s;
        sum.overlap_s += r->overlap_s;
        sum.exposed_s += r->exposed_s;
        sum.bubble_s += r->bubble_s;
        sum.bytes += r->bytes;
    }
    if (slowest >= 0)
        at += (size_t)snprintf(at < size ? buffer + at : NULL, at < size ? size - at : 0, "  slowest: rank %d, which "
                               "computes %.2f times as long as the others on average\n", slowest, times);
    return (int)at;
}

/* Writes to `text` a warning of an efficiency (fraction of a step without waiting) below one half, else ""; returns it.
   Waiting does not grow with the batch, hence batches 1 / efficiency - 1 times as large bring it to one half. */
HPMLC_FN const char *hpmlc_efficiency_warning(double efficiency, char text[128])
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
    char                   low[128], axes[160];
    if (!d) return 0;
    hpml_distribute_get(d, &r, false);
    double             sums = r.bytes - r.split_bytes; /* bytes of gradients */
    const hpml_mesh   *m = hpml_comm_mesh(d->all);
    const hpmlc_text   to = { axes, sizeof axes };
    size_t             length = 0;
    axes[0] = 0;
    for (int k = 0; m && k < HPML_AXES && hpmlc_plan_splits(&d->plan); k++)
        if (m->size[k] > 1) hpmlc_append(&to, &length, ", %s %d", hpml_axis_name((hpml_axis)k), m->size[k]);
    if (d->pipeline) hpmlc_pipeline_text(d->pipeline, &to, &length);
    return snprintf(buffer, size, "%d ranks (%s%s), %d buckets: step %.2f ms = compute %.2f + exposed %.2f; "
                    "exchange %.2f ms, %.0f %% hidden; %.0f bytes a step and rank, %.1fx less than a ring of f32; "
                    "efficiency %.0f %%%s",
                    d->all->size, d->all->t->name, axes, r.buckets, 1e3 * r.step_s, 1e3 * r.compute_s,
                    1e3 * r.exposed_s, 1e3 * r.comm_s, 100 * r.hidden, r.bytes, sums > 0 ? r.plain_bytes / sums : 1,
                    100 * r.efficiency, hpmlc_efficiency_warning(r.efficiency, low));
}

// ---------------------------------------------------------------------------------------------------------------------
// >>resume   checkpoints of the whole job
// ---------------------------------------------------------------------------------------------------------------------
/* Rank 0 writes the checkpoint. Before, each rank copies what it has of the arrays of >>state to memory for all of
   them, with zeros where other ranks have theirs, so that the sum over ranks is exact. */

/* Makes the list of the arrays that the strategy keeps from step to step, such as residuals, to save or to load them in
   a checkpoint. False: an error on the context. */
HPMLC_FN bool hpmlc_states_open(hpml_distributed *d, hpmlc_states *list, bool is_saving)
{
    memset(list, 0, sizeof *list);
    list->d         = d;
    list->is_saving = is_saving;
    list->copy      = "ranks";
    return d->strategy->state(d, list);
}

HPMLC_FN void hpmlc_states_close(hpmlc_states *list)
{
    for (int i = 0; i < list->count; i++) hpml_ctx_release(list->d->ctx, list->item[i].name);
    hpml_ctx_release(list->d->ctx, list->item);
}

HPMLC_FN bool hpmlc_state_is_absent(const hpmlc_state *it) { return it->present && !*it->present; }

/* Returns the name of array `it` without its prefix "state.", because hpml_checkpoint_save adds this prefix. */
HPMLC_FN const char *hpmlc_state_name(const hpmlc_state *it) { return it->name + sizeof "state"; }

/* Returns whether this rank has only a part of each copy of array `it`, which the file has whole. */
HPMLC_FN bool hpmlc_state_is_part(const hpmlc_state *it) { return it->whole != it->count; }

/* Returns whether every rank has array `it` whole, so that the file has it from rank 0. */
HPMLC_FN bool hpmlc_state_is_same(const hpmlc_state *it)
{
    return it->is_same && !hpmlc_state_is_part(it) && !(it->param && it->param->param->stage >= 0);
}

/* Returns whether this rank's floats of array `it` go into the checkpoint file. If not, the rank has none, or another
   rank saves the same floats: ranks of axis tensor share arrays that are not split, ranks of axis pipe share arrays
   that all stages have. */
HPMLC_FN bool hpmlc_state_counts(const hpml_distributed *d, const hpmlc_state *it)
{
    const hpml_mesh *m    = hpml_comm_mesh(d->all);
    const hpml_axis  axis = it->param ? it->param->param->axis : HPML_AXIS_DATA;
    if (it->floats == 0) return false;
    if (m && axis != HPML_AXIS_TENSOR && m->at[HPML_AXIS_TENSOR] > 0) return false;
    if (m && (!it->param || it->param->param->stage < 0) && m->at[HPML_AXIS_PIPE] > 0) return false;
    return !it->is_same || hpmlc_ranks_of_axis(d, axis)->rank == 0;
}

/* Copies this rank's floats of array `it` to `rows`, an array (it->copies.all, it->whole) that has one row for each
   copy of `it` in the file. */
HPMLC_FN void hpmlc_state_save(const hpmlc_state *it, float *rows)
{
    for (int64_t l = 0; l < it->copies.count; l++) {
        float *row = rows + (it->copies.first + l) * it->whole, *data = it->data + l * it->floats;
        if (!hpmlc_state_is_part(it)) {
            hpmlc_host_view_copy(it->view, row + it->at, data, it->floats, false);
            continue;
        }
        float *host = hpmlc_host_view_begin(it->view, data, it->floats);
        hpml_param_copy(it->param, host, it->at, it->floats, row, true);
        hpmlc_host_view_end(it->view, data, it->floats);
    }
}

/* Adds `factor` times the floats of `row` that this rank keeps (it->floats of them) to number l of this rank's copies
   of array `it`; set: overwrites that copy instead. row: one copy of the whole array, from the file; NULL: zeros. part:
   scratch memory for it->floats floats. */
HPMLC_FN void hpmlc_state_put(const hpmlc_state *it, int64_t l, float *row, float factor, bool set, float *part)
{
    if (it->floats == 0) return;
    float *data = it->data + l * it->floats;
    float *host = hpmlc_host_view_begin(it->view, data, it->floats);
    const float *from = part;
    if (!row) memset(part, 0, (size_t)it->floats * sizeof *part);
    else if (hpmlc_state_is_part(it)) hpml_param_copy(it->param, part, it->at, it->floats, row, false);
    else from = row + it->at;
    for (int64_t i = 0; i < it->floats; i++) {
        const float x = from[i] * factor;
        host[i] = set ? x : host[i] + x;
    }
    hpmlc_host_view_end(it->view, data, it->floats);
}

/* Sets `offset` of each array of the list, where the array begins among the floats that are saved: first the arrays
   that are added up over ranks, then those that every rank has whole. Returns the number of all these floats, and sets
   *summed to the number of floats of the arrays that are added up. */
HPMLC_FN int64_t hpmlc_states_place(hpmlc_states *list, int64_t *summed)
{
    int64_t at = 0;
    for (int is_same = 0; is_same < 2; is_same++) {
        for (int i = 0; i < list->count; i++) {
            hpmlc_state *it = &list->item[i];
            if (hpmlc_state_is_same(it) != (is_same == 1) || hpmlc_state_is_absent(it)) continue;
            it->offset = at;
            at += it->copies.all * it->whole;
        }
        if (is_same == 0) *summed = at;
    }
    return at;
}

#define HPMLC_DISK 60 /* seconds within which a working disk writes more bytes of a checkpoint */

typedef struct hpmlc_writing {
    hpml_comm    *c;
    hpml_progress progress; /* the program's own callback */
} hpmlc_writing;

/* Called when bytes of a checkpoint have been written: extends the deadlines of ranks that wait for this rank, and
   calls the program's own progress callback. */
HPMLC_FN void hpmlc_dist_progress(void *user, uint64_t bytes)
{
    const hpmlc_writing *w = (const hpmlc_writing *)user;
    hpml_comm_busy(w->c, HPMLC_DISK);
    if (w->progress.fn) w->progress.fn(w->progress.user, bytes);
}

/* Writes the checkpoint, with the arrays of the list, which are in `rows`, `floats` floats in host memory. For a
   trainer on a device, copies them to the device first and writes that copy, because hpml_checkpoint_save reads arrays
   of state from the backend's memory. */
HPMLC_FN void hpmlc_states_write(hpmlc_states *list, const char *path, float *rows, int64_t floats)
{
    hpml_distributed  *d     = list->d;
    const hpmlc_host_view *r     = &d->layout.view;
    size_t             bytes = (size_t)floats * sizeof(float);
    float             *from = rows, *copy = NULL;
    hpmlc_writing      writing;
    hpml_progress      progress;
    if (r->device && bytes > 0) {
        copy = (float *)r->device->alloc(r->device_user, bytes);
        from = copy;
        if (copy) r->device->write(r->device_user, copy, rows, bytes);
        else hpmlc_fail(d->c, HPML_ERR_MEMORY, "distribute save: no %zu bytes on %s", bytes, r->device->name);
    }
    for (int i = 0; i < list->count && from; i++) {
        const hpmlc_state *it = &list->item[i];
        if (hpmlc_state_is_absent(it)) continue;
        hpml_trainer_add_state(d->t, hpmlc_state_name(it), from + it->offset, it->copies.all * it->whole);
    }
    hpml_comm_busy(d->all, HPMLC_DISK);
    writing.c        = d->all;
    progress.fn      = hpmlc_dist_progress;
    progress.user    = &writing;
    writing.progress = hpml_ctx_progress(d->ctx, progress);
    hpml_checkpoint_save(d->t, path);
    hpml_ctx_progress(d->ctx, writing.progress);
    hpml_comm_busy(d->all, 0);
    for (int i = list->count; i-- > 0;) hpml_trainer_add_state(d->t, hpmlc_state_name(&list->item[i]), NULL, 0);
    if (copy) r->device->free(r->device_user, copy, bytes);
}

HPML_API hpml_status hpml_distribute_save(hpml_distributed *d, const char *path)
{
    hpmlc_states list;
    int64_t      summed, floats;
    float        done = 1;
    int          there, root = 0, now;
    if (!d || hpmlc_failed(d->c)) return d ? hpml_ctx_status(d->ctx) : HPML_ERR_ARGUMENT;
    if (d->pipeline && hpmlc_pipeline_drain(d->pipeline) != HPML_OK) return hpml_ctx_status(d->ctx);
    bool is_listed = hpmlc_states_open(d, &list, true);
    floats = hpmlc_states_place(&list, &summed);
    float *rows = is_listed ? (float *)hpml_ctx_alloc(d->ctx, (size_t)(floats + 1) * sizeof(float), NULL) : NULL;
    if (rows) {
        for (int i = 0; i < list.count; i++) {
            const hpmlc_state *it = &list.item[i];
            if (!hpmlc_state_is_absent(it) && hpmlc_state_counts(d, it)) hpmlc_state_save(it, rows + it->offset);
        }
        hpml_status status = HPML_OK;
        if (hpmlc_goes_on(d)) status = hpmlc_sum_there(d, rows, summed, &there, &root);
        else status = hpml_reduce_to(d->all, rows, summed, HPML_ELEMENT_F32, HPML_SUM, 0);
        const bool writes = d->all->rank == root || hpmlc_plan_cuts(&d->plan); /* all ranks: parts are joined */
        if (status == HPML_OK && writes) hpmlc_states_write(&list, path, rows, floats);
        hpml_ctx_release(d->ctx, rows);
    }
    hpmlc_states_close(&list);
    if (!rows) return hpml_ctx_status(d->ctx);
    if (!hpmlc_goes_on(d)) return hpml_barrier(d->all); /* waits until rank 0 has written the file or failed */
    hpml_status status = hpmlc_sum_there(d, &done, 1, &there, &now);
    if (status != HPML_OK || now == root) return status;
    return hpmlc_fail(d->c, HPML_ERR_PEER, "distribute save: rank %d was lost, which wrote %s; save again", root, path);
}

/* Fails if file f has gradients that are not yet applied, and that only another strategy can load or that are in the
   format of an older hpml. */
HPMLC_FN hpml_status hpmlc_states_refuse(hpml_distributed *d, const hpml_safetensors *f, const char *path)
{
    hpml_safetensor e;
    char            name[64];
    if (hpml_safetensors_find(f, "state.gradients", &e))
        return hpmlc_fail(d->c, HPML_ERR_FORMAT, "%s: holds gradients that are not yet applied (state.gradients) in "
                          "the format of an older hpml; hpml_checkpoint_load, on every rank, loads all but these and "
                          "residuals", path);
    for (const hpmlc_strategy *s = hpmlc_strategies; s < hpmlc_strategies + HPMLC_STRATEGIES; s++) {
        snprintf(name, sizeof name, "state.%s", s->pending ? s->pending : "");
        if (s == d->strategy || !s->pending || !hpml_safetensors_find(f, name, &e)) continue;
        return hpmlc_fail(d->c, HPML_ERR_FORMAT, "%s: holds gradients that are not yet applied (%s); load it with .%s",
                          path, name, s->name);
    }
    return HPML_OK;
}

/* Loads `it`, an array of the list. saved: the array in the file; NULL: the file lacks the array. Where ranks have
   copies of their own, copy w in the file is added to copy w modulo the number of copies in this training. row: scratch
   memory of it->whole + it->count floats. */
HPMLC_FN hpml_status hpmlc_state_load(hpml_distributed *d, const hpmlc_state *it, const hpml_safetensor *saved,
                                      const char *path, float *row)
{
    const size_t bytes  = (size_t)it->whole * sizeof(float);
    int64_t      copies = saved && saved->bytes % bytes == 0 ? (int64_t)(saved->bytes / bytes) : 0;
    const char  *from   = saved ? (const char *)saved->data : NULL;
    float       *part   = row + it->whole;
    if (it->scope == HPMLC_SHARED) {
        if (copies == 1) hpmlc_state_put(it, 0, (float *)memcpy(row, from, bytes), 1, true, part);
        if (copies == 1 || !it->present) return HPML_OK;
        return hpmlc_fail(d->c, HPML_ERR_FORMAT, "%s: %s is missing or not of %zu bytes; load it with the model it was "
                          "saved with", path, it->name, bytes);
    }
    if (copies == 0 || (it->scope == HPMLC_NODE && copies != it->copies.all))
        return hpmlc_fail(d->c, HPML_ERR_FORMAT, "%s: residuals (%s) are missing, or are of other tensors or places; "
                          "save with the codec, and in nodes on the ranks, that you load with", path, it->name);
    float factor = it->is_mean ? (float)((double)it->copies.all / (double)copies) : 1;
    for (int64_t l = 0; l < it->copies.count; l++) hpmlc_state_put(it, l, NULL, 1, true, part);
    for (int64_t w = 0; w < copies; w++) {
        int64_t l = w % it->copies.all - it->copies.first;
        if (l < 0 || l >= it->copies.count) continue;
        memcpy(row, from + (size_t)w * bytes, bytes); /* because the file's array may not be aligned */
        hpmlc_state_put(it, l, row, factor, false, part);
    }
    return HPML_OK;
}

HPMLC_FN hpml_status hpmlc_states_load(hpmlc_states *list, const hpml_safetensors *f, const char *path)
{
    hpml_status status = hpmlc_states_refuse(list->d, f, path);
    for (int i = 0; i < list->count && status == HPML_OK; i++) {
        const hpmlc_state *it = &list->item[i];
        hpml_safetensor    saved;
        bool               is_found = hpml_safetensors_find(f, it->name, &saved);
        if (it->present && is_found) *it->present = true;
        if (hpmlc_state_is_absent(it)) continue;
        float *row = (float *)hpml_ctx_alloc(list->d->ctx, (size_t)(it->whole + it->count) * sizeof *row, NULL);
        if (!row) return hpmlc_failure(list->d->c);
        status = hpmlc_state_load(list->d, it, is_found ? &saved : NULL, path, row);
        hpml_ctx_release(list->d->ctx, row);
    }
    return status;
}

HPML_API hpml_status hpml_distribute_load(hpml_distributed *d, const char *path)
{
    hpmlc_states list;
    if (!d || hpmlc_failed(d->c)) return d ? hpml_ctx_status(d->ctx) : HPML_ERR_ARGUMENT;
    hpmlc_tasks_wait(d); /* gradients in flight are not applied */
    d->micro = 0;
    if (d->plan.shard > 1) hpmlc_shard_empty(d);
    hpml_status       status = hpml_checkpoint_load(d->t, path);
    hpml_safetensors *f = status == HPML_OK ? hpml_safetensors_open(d->ctx, path) : NULL;
    if (!f) return hpmlc_failure(d->c);
    status = hpmlc_states_open(d, &list, false) ? hpmlc_states_load(&list, f, path) : hpml_ctx_status(d->ctx);
    hpmlc_states_close(&list);
    hpml_safetensors_close(f);
    return status != HPML_OK ? status : hpml_ctx_status(d->ctx);
}

// ---------------------------------------------------------------------------------------------------------------------
// >>batch-search   the largest batch that does not hurt
// ---------------------------------------------------------------------------------------------------------------------
/* Batch search of Seide et al. 2014: from time to time the batch size is chosen anew, because larger steps do no harm
   later in training. Sizes are tried one after another, each from the same checkpoint on the same samples. */

HPMLC_FN int hpmlc_trial_step(const hpml_step_info *info HPMLC_UNUSED, void *user)
{
    hpml_distributed *d = (hpml_distributed *)user;
    if (d->micro != 0) return 0; /* a micro-batch without an update */
    d->trial.loss += d->report.r.loss * (double)d->report.r.samples;
    d->trial.samples += (double)d->report.r.samples;
    return 0;
}

/* Trains on `samples` samples with `batch` a step, and sets *loss to the mean loss, infinite if training diverged. */
HPMLC_FN hpml_status hpmlc_trial_fit(hpml_distributed *d, hpml_dataset *data, int64_t batch, int64_t samples,
                                     double *loss)
{
    HPMLC_ZERO(hpml_fit_desc, fit);
    HPMLC_ZERO(hpml_loader_desc, loader);
    loader.samples_per_epoch = samples;
    fit.loader  = &loader;
    fit.on_step = hpmlc_trial_step;
    fit.user    = d;
    hpml_status status = hpml_distribute_set_batch(d, batch);
    memset(&d->trial, 0, sizeof d->trial);
    d->trial.on = true;
    if (status == HPML_OK) status = hpml_trainer_fit(d->t, data, &fit);
    d->trial.on = false;
    *loss       = (double)INFINITY;
    if (status == HPML_OK && d->trial.samples > 0) *loss = d->trial.loss / d->trial.samples;
    if (!(*loss - *loss == 0)) *loss = (double)INFINITY;
    if (status != HPML_ERR_NONFINITE) return status;
    hpml_ctx_clear_error(d->ctx); /* no error: divergence ends the trial, and a checkpoint is loaded next */
    return HPML_OK;
}

HPMLC_FN hpml_status hpmlc_search_check(hpml_distributed *d, const hpml_dataset *data, hpml_batch_search_desc *s)
{
    if (s->min == 0) s->min = d->plan.global_batch;
    if (s->max == 0) s->max = hpmlc_plan_workers(&d->plan, d->all->size) * d->layout.batch;
    if (s->factor == 0) s->factor = 1.4142135623730951;
    if (s->multiple == 0) s->multiple = 1;
    if (s->samples == 0) s->samples = data ? (data->count + 9) / 10 : 0;
    if (s->slack == 0) s->slack = 0.01;
    s->min = (s->min + s->multiple - 1) / s->multiple * s->multiple;
    if (d->strategy->fixed_batch)
        return hpmlc_fail(d->c, HPML_ERR_UNSUPPORTED, "batch search: the global batch stays %lld, because %s",
                          (long long)d->plan.global_batch, d->strategy->fixed_batch);
    if (!data || !s->path || s->_begin || s->_end || s->min < 1 || s->max < s->min || !(s->factor > 1) ||
        s->multiple < 1 || s->samples < 1 || !(s->slack > 0))
        return hpmlc_fail(d->c, HPML_ERR_ARGUMENT, "batch search: needs data, a path, sizes %lld to %lld in multiples "
                          "of %lld, a factor above 1 (%g), samples (%lld) and a slack (%g) above 0", (long long)s->min,
                          (long long)s->max, (long long)s->multiple, s->factor, (long long)s->samples, s->slack);
    return HPML_OK;
}

/* Fails if the checkpoint was made within an epoch, because each trial of the search for a batch size begins from this
   checkpoint and would go on in that epoch. */
HPMLC_FN hpml_status hpmlc_search_place(hpml_distributed *d, const char *path)
{
    hpml_safetensors *f      = hpml_safetensors_open(d->ctx, path);
    const char       *place  = f ? hpml_safetensors_meta(f, "hpml.epoch_step") : NULL;
    hpml_status       status = f ? HPML_OK : hpml_ctx_status(d->ctx);
    if (place && strcmp(place, "0") != 0)
        status = hpmlc_fail(d->c, HPML_ERR_STATE, "batch search: %s batches into a pass; search between passes", place);
    hpml_safetensors_close(f);
    return status;
}

/* Tries ever larger batches from s->min up. Returns the last one before the loss exceeds that of the first by more than
   the fraction s->slack; -1: none. trials: receives `capacity` sizes and losses at most; NULL: not wanted. */
HPMLC_FN int64_t hpmlc_search_sizes(hpml_distributed *d, hpml_dataset *data, const hpml_batch_search_desc *s,
                                    hpml_batch_trial *trials, int capacity, hpml_status *status)
{
    double  first = 0, loss = 0;
    double  size = (double)s->min; /* the size before rounding, whose errors would add up */
    int64_t next = 0, best = -1;
    int     n = 0;
    for (int64_t batch = s->min; batch <= s->max && *status == HPML_OK; batch = next, n++) {
        *status = hpmlc_trial_fit(d, data, batch, s->samples, &loss);
        if (n == 0) first = loss;
        if (n < capacity && trials) {
            trials[n].batch = batch;
            trials[n].loss  = loss;
        }
        if (*status == HPML_OK) *status = hpml_distribute_load(d, s->path);
        if (!(loss <= first + s->slack * fabs(first)) || !(loss - loss == 0)) break;
        best = batch;
        size = fmin(size * s->factor, 1e15);
        next = (int64_t)(size / (double)s->multiple + 0.5) * s->multiple;
        if (next > batch) continue;
        next = batch + s->multiple;
        size = (double)next;
    }
    return best;
}

HPML_API int64_t hpml_distribute_search(hpml_distributed *d, hpml_dataset *data, const hpml_batch_search_desc *desc,
                                        hpml_batch_trial *trials, int capacity)
{
    HPMLC_DESC(hpml_batch_search_desc, s, desc);
    if (!d || hpmlc_failed(d->c) || hpmlc_search_check(d, data, &s) != HPML_OK) return -1;
    const int64_t before = d->plan.global_batch;
    hpml_status   status = hpml_distribute_save(d, s.path);
    if (status == HPML_OK) status = hpmlc_search_place(d, s.path);
    if (trials && capacity > 0) memset(trials, 0, sizeof *trials * (size_t)capacity);
    int64_t best = hpmlc_search_sizes(d, data, &s, trials, capacity, &status);
    d->report.rows = 0;
    hpml_distribute_get(d, NULL, true);
    if (status == HPML_OK && best < 0)
        status = hpmlc_fail(d->c, HPML_ERR_NONFINITE, "batch search: %lld samples a step diverge already; lower the "
                            "learning rate", (long long)s.min);
    if (status == HPML_OK) status = hpml_distribute_set_batch(d, best);
    else d->plan.global_batch = before;
    return status == HPML_OK ? best : -1;
}

// ---------------------------------------------------------------------------------------------------------------------
// >>mix   averaging with neighbours, tournaments
// ---------------------------------------------------------------------------------------------------------------------
/* Mixing: rank i replaces its array by x_i <- sum over neighbours j, and i itself, of W_ij x_j. The weights are those
   of Metropolis, W_ij = 1 / (1 + max(degree i, degree j)), W_ii = 1 - sum of W_ij: symmetric, rows add up to 1, hence
   mixing again and again brings all ranks to the mean of all (Xiao and Boyd 2004, "Fast Linear Iterations for
   Distributed Averaging"). */

/* Returns the partner of `rank` in a random pairing, another in each step: ranks in a random order, the first with the
   second, and so on; with an odd number of ranks the last is its own partner. */
HPMLC_FN int hpmlc_partner(int p, uint64_t seed, int64_t step, int rank)
{
    int64_t place = 0;
    while (hpml_permute_index(seed, (uint64_t)step, p, place) != rank) place++;
    int64_t other = place ^ 1;
    return other < p ? (int)hpml_permute_index(seed, (uint64_t)step, p, other) : rank;
}

/* Returns whether ranks i and j of p are neighbours. partner: i's partner in the random pairing of topology PAIRS;
   other topologies do not use it. */
HPMLC_FN bool hpmlc_neighbours(hpml_topology topology, int p, int partner, int i, int j)
{
    int rim = p - 1;
    if (i == j) return false;
    switch (topology) {
    case HPML_TOPOLOGY_RING: return (i + 1) % p == j || (j + 1) % p == i;
    case HPML_TOPOLOGY_WHEEL: return i == 0 || j == 0 || (rim > 1 && (i % rim == j - 1 || j % rim == i - 1));
    case HPML_TOPOLOGY_PAIRS: return partner == j;
    case HPML_TOPOLOGY_ALL: return true;
    }
    return false;
}

/* Returns the number of neighbours of `rank` among p ranks; PAIRS: 1, also for the rank that has no partner. */
HPMLC_FN int hpmlc_degree(hpml_topology topology, int p, int rank)
{
    int rim = p - 1;
    if (topology == HPML_TOPOLOGY_PAIRS) return 1;
    if (topology == HPML_TOPOLOGY_RING) return rim < 2 ? rim : 2;
    if (topology == HPML_TOPOLOGY_ALL || rank == 0) return rim;
    return rim < 3 ? rim : 3;
}

/* Sets w to row `rank` of the mixing matrix of hpml_mixing_matrix: p weights, w[j] for rank j's array in the sum that
   replaces the array of rank `rank`. */
HPMLC_FN void hpmlc_mixing_row(hpml_topology topology, int p, uint64_t seed, int64_t step, int rank, double *w)
{
    const int partner = topology == HPML_TOPOLOGY_PAIRS ? hpmlc_partner(p, seed, step, rank) : -1;
    const int mine    = hpmlc_degree(topology, p, rank);
    double    rest    = 1;
    for (int j = 0; j < p; j++) {
        w[j] = 0;
        if (!hpmlc_neighbours(topology, p, partner, rank, j)) continue;
        w[j] = 1 / (1 + fmax(mine, hpmlc_degree(topology, p, j)));
        rest -= w[j];
    }
    w[rank] = rest;
}

HPML_API void hpml_mixing_matrix(hpml_topology topology, int p, uint64_t seed, int64_t step, double *w)
{
    for (int i = 0; i < p; i++) hpmlc_mixing_row(topology, p, seed, step, i, w + (size_t)i * (size_t)p);
}

/* Replaces this rank's array by the weighted sum of its and its neighbours' old arrays, which are added from the rank
   before this one downward, modulo the number of ranks. */
HPML_API hpml_status hpml_mix(hpml_comm *c, float *data, int64_t n, hpml_topology topology, uint64_t seed, int64_t step)
{
    if (c && ((unsigned)topology > HPML_TOPOLOGY_ALL || (n > 0 && !data)))
        return hpmlc_fail(c, HPML_ERR_ARGUMENT, "mix: topology %d, data %p", (int)topology, (void *)data);
    int tag = hpmlc_enter(c, "mix", n, HPML_ELEMENT_F32, HPML_SUM, "topology", (int)topology);
    if (tag < 0) return c ? hpml_ctx_status(c->ctx) : HPML_ERR_ARGUMENT;
    if (c->survive) tag = HPMLC_TAG_SUM; /* not a collective's tag: a lost rank would fail those */
    const int    p = c->size, me = c->rank;
    const size_t bytes = (size_t)n * sizeof(float);
    hpml_status  status = HPML_OK;
    double      *w = (double *)hpml_ctx_alloc(c->ctx, sizeof(double) * (size_t)p, NULL);
    float       *mine = (float *)hpmlc_scratch(c, 2 * bytes + 8), *theirs = mine + n;
    if (!w || !mine) return hpml_ctx_status(c->ctx);
    hpmlc_mixing_row(topology, p, seed, step, me, w);
    if (n > 0) memcpy(mine, data, bytes);
    for (int64_t i = 0; i < n; i++) data[i] *= (float)w[me];
    for (int k = 1; k < p && status == HPML_OK; k++) {
        int to = (me + k) % p, from = (me - k + p) % p;
        int dest = w[to] > 0 ? to : -1; /* W is symmetric: rank `to` expects this */
        int source = w[from] > 0 ? from : -1;
        c->round = k;
        status = hpmlc_round(c, tag, dest, (const char *)mine, bytes, source, (char *)theirs, bytes, NULL);
        const bool   is_lost = status == HPML_ERR_PEER && hpml_ctx_status(c->ctx) == HPML_OK; /* `to` or `from` */
        const float *x       = is_lost && hpml_comm_lost(c, from) ? mine : theirs;
        if (is_lost) status = HPML_OK;
        for (int64_t i = 0; source >= 0 && status == HPML_OK && i < n; i++) data[i] += (float)w[from] * x[i];
    }
    hpml_ctx_release(c->ctx, w);
    return hpmlc_leave(c, status);
}

/* Copies n floats between `host` and the backend's memory at x; save: to `host`. */
HPMLC_FN void hpmlc_model_copy(hpml_ctx *ctx, float *host, float *x, int64_t n, bool save)
{
    const hpml_backend *b = hpml_ctx_backend(ctx);
    if (save) b->read(hpml_ctx_device(ctx), host, x, (size_t)n * sizeof(float));
    else b->write(hpml_ctx_device(ctx), x, host, (size_t)n * sizeof(float));
}

/* Copies parameters, running statistics and states of the optimizer to the array `model` (save) or from it; copies
   nothing if `model` is NULL. Returns the number of these floats. */
HPMLC_FN int64_t hpmlc_model(hpml_trainer *t, hpml_ctx *ctx, float *model, bool save)
{
    const bool host = hpml_trainer_settings(t)->host_optimizer; /* true: the optimizer's states are in host memory */
    int64_t    n = 0, floats = 0;
    for (int i = 0; i < hpml_param_count(ctx); i++) {
        hpml_tensor *p = hpml_param_at(ctx, i);
        if (model && p->data) hpmlc_model_copy(ctx, model + n, p->data, hpml_tensor_count(p), save);
        if (model && !save) hpml_tensor_changed(p);
        n += hpml_tensor_count(p);
    }
    for (int a = HPML_ARRAY_STATE; a < HPML_ARRAY_END; a++) {
        float *state = hpml_trainer_array(t, (hpml_array)a, &floats);
        if (!state) break;
        if (model && !host) hpmlc_model_copy(ctx, model + n, state, floats, save);
        else if (model && save) memcpy(model + n, state, sizeof(float) * (size_t)floats);
        else if (model) memcpy(state, model + n, sizeof(float) * (size_t)floats);
        n += floats;
    }
    return n;
}

/* Sets *loss to the trainer's loss on `set`; a NaN or infinity is no error but an infinite loss. */
HPMLC_FN hpml_status hpmlc_tournament_loss(hpml_trainer *t, hpml_ctx *ctx, hpml_dataset *set, double *loss)
{
    HPMLC_ZERO(hpml_metrics, m);
    hpml_status status = hpml_trainer_evaluate(t, set, &m);
    *loss = m.loss - m.loss == 0 ? m.loss : (double)INFINITY;
    if (status != HPML_ERR_NONFINITE) return status;
    *loss = (double)INFINITY;
    hpml_ctx_clear_error(ctx);
    return HPML_OK;
}

HPML_API hpml_status hpml_tournament(hpml_trainer *t, hpml_comm *c, hpml_dataset *set, uint64_t seed, int64_t round,
                                     hpml_tournament_result *out)
{
    HPMLC_ZERO(hpml_tournament_result, r);
    if (out) *out = r;
    if (c && !hpmlc_failed(c) && (!t || !set))
        return hpmlc_fail(c, HPML_ERR_ARGUMENT, "tournament: no trainer or no data set; pass those of this rank");
    if (c && !hpmlc_failed(c)) hpml_trainer_alloc(t);
    const int64_t n   = t && c && !hpmlc_failed(c) ? hpmlc_model(t, c->ctx, NULL, true) : 0;
    int           tag = hpmlc_enter(c, "tournament", n, HPML_ELEMENT_F32, HPML_SUM, "round", (int)round);
    if (tag < 0) return c ? hpml_ctx_status(c->ctx) : HPML_ERR_ARGUMENT;
    const size_t bytes = (size_t)n * sizeof(float);
    float       *mine = (float *)hpml_ctx_alloc(c->ctx, 2 * bytes + 8, NULL), *theirs = mine + n;
    if (!mine) return hpmlc_leave(c, hpmlc_failure(c));
    r.partner = hpmlc_partner(c->size, seed, round, c->rank);
    const int peer = r.partner == c->rank ? -1 : r.partner;
    hpmlc_model(t, c->ctx, mine, true);
    hpml_status status = hpmlc_round(c, tag, peer, (const char *)mine, bytes, peer, (char *)theirs, bytes, NULL);
    status = hpmlc_leave(c, status);
    if (status == HPML_OK) status = hpmlc_tournament_loss(t, c->ctx, set, &r.mine);
    r.theirs = r.mine;
    if (status == HPML_OK && peer >= 0) {
        hpmlc_model(t, c->ctx, theirs, false);
        status    = hpmlc_tournament_loss(t, c->ctx, set, &r.theirs);
        r.changed = status == HPML_OK && r.theirs < r.mine;
        if (!r.changed) hpmlc_model(t, c->ctx, mine, false);
    }
    hpml_ctx_release(c->ctx, mine);
    if (out) *out = r;
    return status;
}

// =====================================================================================================================
// PART IV   SPLIT THE MODEL: tensor, sequence, expert, pipeline, shards
// =====================================================================================================================

// ---------------------------------------------------------------------------------------------------------------------
// >>mesh   axes of ranks: their communicators, the groups of a context
// ---------------------------------------------------------------------------------------------------------------------
/* hpml.h knows each axis as a group, a table of functions (hpml_group). Here an axis with several ranks gets a
   communicator, and its group's functions are collectives on it, called by the rank's thread while layers compute. The
   communicators are separate, because each counts the ops of its axis; only data may share that of the replicas. */

HPMLC_FN hpml_status hpmlc_axis_sum(void *user, float *x, int64_t n)
{
    const hpmlc_axis *a = (const hpmlc_axis *)user;
    return hpmlc_reduce_all(a->c, x, n, HPML_ELEMENT_F32, HPML_SUM, a->algorithm);
}

HPMLC_FN hpml_status hpmlc_axis_max(void *user, float *x, int64_t n)
{
    const hpmlc_axis *a = (const hpmlc_axis *)user;
    return hpmlc_reduce_all(a->c, x, n, HPML_ELEMENT_F32, HPML_MAX, a->algorithm);
}

HPMLC_FN hpml_status hpmlc_axis_gather(void *user, const float *part, float *all, int64_t n)
{
    const hpmlc_axis *a = (const hpmlc_axis *)user;
    memmove(all + a->c->rank * n, part, (size_t)n * sizeof *all);
    return hpml_allgather(a->c, all, n * a->c->size, HPML_ELEMENT_F32);
}

HPMLC_FN hpml_status hpmlc_axis_scatter(void *user, const float *all, float *part, int64_t n)
{
    hpmlc_axis   *a     = (hpmlc_axis *)user;
    const int64_t total = n * a->c->size;
    if (total > a->floats) {
        hpml_ctx_release(a->c->ctx, a->scratch);
        a->scratch = (float *)hpml_ctx_alloc(a->c->ctx, (size_t)total * sizeof *all, NULL);
        a->floats  = a->scratch ? total : 0;
        if (!a->scratch) return hpmlc_failure(a->c);
    }
    memcpy(a->scratch, all, (size_t)total * sizeof *all);
    hpml_status status = hpml_reduce_scatter(a->c, a->scratch, total, HPML_ELEMENT_F32, HPML_SUM);
    memcpy(part, a->scratch + a->c->rank * n, (size_t)n * sizeof *part);
    return status;
}

HPMLC_FN hpml_status hpmlc_axis_swap(void *user, const float *out, float *in, int64_t n)
{
    return hpml_all_to_all(((const hpmlc_axis *)user)->c, out, in, (size_t)n * sizeof *in);
}

HPMLC_FN hpml_status hpmlc_axis_pass(void *user, const float *out, float *in, int64_t n, int shift)
{
    hpml_comm   *c     = ((const hpmlc_axis *)user)->c;
    const int    by    = (shift % c->size + c->size) % c->size;
    const int    to    = (c->rank + by) % c->size, from = (c->rank - by + c->size) % c->size;
    const size_t bytes = (size_t)n * sizeof *in;
    int          tag   = hpmlc_enter(c, "pass", n, HPML_ELEMENT_F32, -1, "shift", by);
    if (tag < 0) return hpml_ctx_status(c->ctx);
    if (by == 0) memmove(in, out, bytes);
    hpml_status status = HPML_OK;
    if (by > 0) status = hpmlc_round(c, tag, to, (const char *)out, bytes, from, (char *)in, bytes, NULL);
    return hpmlc_leave(c, status);
}

HPMLC_FN hpml_status hpmlc_axis_bcast(void *user, float *x, int64_t n, int root)
{
    return hpml_broadcast(((const hpmlc_axis *)user)->c, x, (size_t)n * sizeof *x, root);
}

/* Gives the context the group of this rank along axis k, which uses the existing communicator mesh->m.axis[k]. */
HPMLC_FN hpml_status hpmlc_axis_open(hpmlc_mesh *mesh, int k)
{
    hpmlc_axis *a = &mesh->axis[k];
    a->c         = mesh->m.axis[k];
    a->algorithm = mesh->plan.algorithm;
    if (a->algorithm == HPML_NATIVE) a->algorithm = HPML_AUTO; /* parts have no native allreduce */
    HPMLC_ZERO(hpml_group, group);
    group.rank    = a->c->rank;
    group.size    = a->c->size;
    group.user    = a;
    group.sum     = hpmlc_axis_sum;
    group.max     = hpmlc_axis_max;
    group.gather  = hpmlc_axis_gather;
    group.scatter = hpmlc_axis_scatter;
    group.swap    = hpmlc_axis_swap;
    group.pass    = hpmlc_axis_pass;
    group.bcast   = hpmlc_axis_bcast;
    return hpml_ctx_set_group(a->c->ctx, (hpml_axis)k, &group);
}

/* The axes in the order in which they number the ranks: from one rank to the next, the position on the first axis of
   this list changes fastest. */
static const hpml_axis hpmlc_axis_order[HPML_AXES] = { HPML_AXIS_TENSOR, HPML_AXIS_SEQUENCE, HPML_AXIS_EXPERT,
                                                       HPML_AXIS_PIPE, HPML_AXIS_DATA };

/* Sets, from the mesh's plan, the size of each axis and the position of this rank on it. */
HPMLC_FN void hpmlc_mesh_places(hpmlc_mesh *mesh)
{
    hpml_mesh       *m = &mesh->m;
    const hpml_plan *p = &mesh->plan;
    const int32_t    size[HPML_AXES] = { p->data, p->pipe, p->tensor, p->sequence, p->expert };
    int              rank = m->all->rank;
    for (int i = 0; i < HPML_AXES; i++) {
        const hpml_axis k = hpmlc_axis_order[i];
        m->size[k] = (int32_t)hpmlc_max(size[k], 1);
        if (k == HPML_AXIS_DATA) m->size[k] = hpmlc_plan_workers(p, m->all->size) / m->size[HPML_AXIS_EXPERT];
        m->at[k] = rank % m->size[k]; /* servers are on no axis and get any number */
        rank /= m->size[k];
    }
}

/* Returns the communicator of the ranks that differ from this one on the axes of `mask` alone, bit k for axis k. NULL:
   an error. */
HPMLC_FN hpml_comm *hpmlc_mesh_split(const hpml_mesh *m, unsigned mask)
{
    int color = 0, step = 1; /* color: number of the first rank of the communicator */
    for (int i = 0; i < HPML_AXES; i++) {
        const hpml_axis k = hpmlc_axis_order[i];
        if (!(mask >> k & 1)) color += m->at[k] * step;
        step *= m->size[k];
    }
    return hpml_comm_split(m->all, color, m->all->rank);
}

/* Makes the communicators and groups of a mesh whose ranks have parts of the model. */
HPMLC_FN hpml_status hpmlc_mesh_open(hpmlc_mesh *mesh)
{
    hpml_mesh     *m    = &mesh->m;
    hpml_ctx      *ctx  = m->all->ctx;
    const unsigned data = 1u << HPML_AXIS_DATA, sequence = 1u << HPML_AXIS_SEQUENCE, expert = 1u << HPML_AXIS_EXPERT;
    const bool     is_shared = m->size[HPML_AXIS_SEQUENCE] * m->size[HPML_AXIS_EXPERT] == 1;
    m->replicas = hpmlc_mesh_split(m, data | sequence | expert);
    for (int k = 0; k < HPML_AXES && hpml_ctx_status(ctx) == HPML_OK; k++) {
        mesh->rest[k] = m->replicas;
        if (m->size[k] == 1) continue;
        m->axis[k] = k == HPML_AXIS_DATA && is_shared ? m->replicas : hpmlc_mesh_split(m, 1u << k);
        if (m->axis[k]) hpmlc_axis_open(mesh, k);
    }
    if (m->size[HPML_AXIS_SEQUENCE] > 1) mesh->rest[HPML_AXIS_SEQUENCE] = hpmlc_mesh_split(m, data | expert);
    if (m->size[HPML_AXIS_EXPERT] > 1) mesh->rest[HPML_AXIS_EXPERT] = hpmlc_mesh_split(m, data | sequence);
    return hpmlc_failure(m->all);
}

/* Checks the axes of a plan, and that all ranks have the same ones. */
HPMLC_FN hpml_status hpmlc_mesh_check(hpml_comm *c, const hpml_plan *plan)
{
    char             why[480];
    const hpmlc_text to = { why, sizeof why };
    hpml_status      status = HPML_OK;
    bool             is_same = true;
    if (c->mesh)
        return hpmlc_fail(c, HPML_ERR_STATE, "set_plan: the communicator has a plan, by which models may have been "
                          "recorded; create another one for another plan");
    for (int i = 0; i < HPMLC_FIELDS && status == HPML_OK; i++)
        status = hpmlc_field_check(plan, &hpmlc_fields[i], true, &to);
    if (status == HPML_OK) status = hpmlc_axes_check(plan, c->size, &to);
    if (status != HPML_OK) return hpmlc_fail(c, status, "set_plan: %s", why);
    if (!hpmlc_plan_splits(plan)) return HPML_OK;
    status = hpmlc_same(c, (uint64_t)hpmlc_plan_hash(plan) << 2, &is_same);
    if (status != HPML_OK || is_same) return status;
    return hpmlc_fail(c, HPML_ERR_ARGUMENT, "set_plan: ranks have different plans; give the same plan, and the same "
                      "HPML_PLAN in the environment, on all ranks");
}

HPML_API hpml_status hpml_comm_set_plan(hpml_comm *c, const hpml_plan *plan)
{
    HPMLC_DESC(hpml_plan, settings, plan);
    if (!c || hpmlc_failed(c)) return c ? hpml_ctx_status(c->ctx) : HPML_ERR_ARGUMENT;
    hpml_status status = hpmlc_plan_environment(c, &settings);
    if (status == HPML_OK) status = hpmlc_mesh_check(c, &settings);
    if (status != HPML_OK) return status;
    hpmlc_mesh *mesh = (hpmlc_mesh *)hpml_ctx_alloc(c->ctx, sizeof *mesh, NULL);
    if (!mesh) return hpmlc_failure(c);
    mesh->plan  = settings;
    mesh->m.all = c;
    c->mesh     = mesh;
    hpmlc_mesh_places(mesh);
    if (hpmlc_plan_defers(&settings)) hpml_ctx_defer(c->ctx, true);
    if (hpmlc_plan_splits(&settings)) return hpmlc_mesh_open(mesh);
    mesh->m.replicas = c;
    for (int k = 0; k < HPML_AXES; k++) mesh->rest[k] = c;
    if (c->size == 1 || settings.servers > 0) return HPML_OK;
    mesh->m.axis[HPML_AXIS_DATA] = c;
    return hpmlc_axis_open(mesh, HPML_AXIS_DATA);
}

HPML_API const hpml_mesh *hpml_comm_mesh(const hpml_comm *c) { return c && c->mesh ? &c->mesh->m : NULL; }

// ---------------------------------------------------------------------------------------------------------------------
// >>pipe-moves   pipelines: the order in which a stage does its tasks
// ---------------------------------------------------------------------------------------------------------------------
/* One rule makes all schedules of p stages and m micro-batches. A stage counts the forward passes that it has begun and
   the backward passes that it has ended, and does the next forward pass as long as fewer than `limit` micro-batches are
   in flight, else the next backward pass. GPIPE's limit is m; with 1F1B's limit, p - r on stage r, the first backward
   pass is due when the gradient of micro-batch 0 arrives, which has passed through p - 1 - r later stages. ZERO_BUBBLE
   computes the gradients of weights r micro-batches after those of the inputs, so that every stage has p micro-batches
   in flight. STASH and VERTICAL update the weights after each backward pass, the others after the last one.

   With chunks, stages take micro-batches in groups of p: chunk 0 of the group, chunk 1 of the group, ..., and backward
   passes from the last chunk to the first. Where p does not divide m, the last group is filled up with micro-batches
   that do not exist, whose tasks are left out: leaving tasks out cannot cause a deadlock between stages. */
#define HPMLC_PIPE_CHUNKS 64

typedef struct hpmlc_pipe_walk { /* a stage on its way through its tasks */
    hpml_pipe_kind kind;
    int            stages, stage, chunks, micro; /* micro: number of micro-batches */
    int            total; /* forward passes, those of micro-batches that do not exist included */
    int            limit; /* most forward passes that may wait for their backward pass */
    int            lag;   /* most backward passes whose gradients of weights may be computed later */
    int            forwards, backwards, weights, updates; /* done */
    int            slots[HPMLC_PIPE_CHUNKS]; /* sets of activations of each chunk */
} hpmlc_pipe_walk;

HPML_API const char *hpml_pipe_name(hpml_pipe_kind kind)
{
    static const char *const names[HPML_PIPE_COUNT] = { "gpipe", "1f1b", "interleaved", "stash", "zero_bubble",
                                                        "vertical" };
    return (unsigned)kind < HPML_PIPE_COUNT ? names[kind] : NULL;
}

HPMLC_FN int hpmlc_pipe_chunks(const hpml_pipe_desc *d)
{
    if (d->kind != HPML_PIPE_INTERLEAVED) return 1;
    return d->chunks > 0 ? d->chunks : 2;
}

/* Chooses the kind *work of the stage's next task, and its number *n among those of its kind; false: none is left. */
HPMLC_FN bool hpmlc_pipe_rule(hpmlc_pipe_walk *w, hpml_pipe_work *work, int *n)
{
    const bool splits = w->kind == HPML_PIPE_ZERO_BUBBLE;
    const int  late   = w->backwards - w->weights;
    if (hpmlc_pipe_stashes(w->kind) && w->updates < w->backwards) {
        *work = HPML_PIPE_UPDATE;
        *n    = w->updates++;
    } else if (splits && late > 0 && (late > w->lag || w->backwards == w->total)) {
        *work = HPML_PIPE_BACKWARD_WEIGHTS;
        *n    = w->weights++;
    } else if (w->forwards < w->total && w->forwards - w->backwards < w->limit) {
        *work = HPML_PIPE_FORWARD;
        *n    = w->forwards++;
    } else if (w->backwards < w->total) {
        *work = splits ? HPML_PIPE_BACKWARD_INPUTS : HPML_PIPE_BACKWARD;
        *n    = w->backwards++;
    } else if (w->updates == 0) {
        *work = HPML_PIPE_UPDATE;
        *n    = w->updates++;
    } else {
        return false;
    }
    return true;
}

/* Sets t->chunk and t->micro (the micro-batch) of the stage's pass number n in the direction of t->work, forward or
   backward. */
HPMLC_FN void hpmlc_pipe_place(const hpmlc_pipe_walk *w, int n, hpml_pipe_task *t)
{
    int group = n / (w->stages * w->chunks), at = n % (w->stages * w->chunks);
    t->micro = group * w->stages + at % w->stages;
    t->chunk = at / w->stages;
    if (t->work != HPML_PIPE_FORWARD) t->chunk = w->chunks - 1 - t->chunk;
}

/* Sets *t, except t->slot, to the next task of the stage; false: no task is left. */
HPMLC_FN bool hpmlc_pipe_go(hpmlc_pipe_walk *w, hpml_pipe_task *t)
{
    int n = 0, delay = w->stages - 1;
    memset(t, 0, sizeof *t);
    if (w->kind != HPML_PIPE_VERTICAL) delay -= w->stage;
    do {
        if (!hpmlc_pipe_rule(w, &t->work, &n)) return false;
        if (t->work == HPML_PIPE_UPDATE) break;
        hpmlc_pipe_place(w, n, t);
    } while (t->micro >= w->micro);
    t->piece = t->chunk * w->stages + w->stage;
    if (t->work == HPML_PIPE_UPDATE) {
        t->version = n + 1;
        t->micro   = hpmlc_pipe_stashes(w->kind) ? n : w->micro - 1;
    } else if (hpmlc_pipe_stashes(w->kind) && t->micro > delay) {
        t->version = t->micro - delay;
    }
    return true;
}

/* Sets *t to the stage's next task and its slot, the number of a set of activations; false: no task is left. The slots
   of chunk c of the model follow those of chunk c - 1. The micro-batches of a chunk take its slots in turn, because
   they enter and leave the chunk in order. */
HPMLC_FN bool hpmlc_pipe_next(hpmlc_pipe_walk *w, hpml_pipe_task *t)
{
    if (!hpmlc_pipe_go(w, t)) return false;
    for (int c = 0; c < t->chunk; c++) t->slot += w->slots[c];
    t->slot += t->micro % w->slots[t->chunk];
    return true;
}

/* Sets w->slots[c], the number of slots (sets of activations) of chunk c, to the largest number of micro-batches that
   are between their forward and their backward pass through the chunk at one time. */
HPMLC_FN void hpmlc_pipe_count(hpmlc_pipe_walk *w)
{
    hpmlc_pipe_walk walk = *w;
    hpml_pipe_task  t;
    int             live[HPMLC_PIPE_CHUNKS] = { 0 };
    while (hpmlc_pipe_go(&walk, &t)) {
        if (t.work == HPML_PIPE_FORWARD) live[t.chunk]++;
        if (t.work == HPML_PIPE_BACKWARD) live[t.chunk]--;
        if (live[t.chunk] > w->slots[t.chunk]) w->slots[t.chunk] = live[t.chunk];
    }
}

/* Begins a walk through the tasks of a stage, of a desc that is valid. */
HPMLC_FN void hpmlc_pipe_begin(hpmlc_pipe_walk *w, const hpml_pipe_desc *d, int stage)
{
    memset(w, 0, sizeof *w);
    w->kind   = d->kind;
    w->stages = d->stages;
    w->stage  = stage;
    w->chunks = hpmlc_pipe_chunks(d);
    w->micro  = d->micro;
    w->total  = d->micro;
    w->limit  = d->stages - stage;
    if (d->kind == HPML_PIPE_GPIPE) w->limit = d->micro;
    if (d->kind == HPML_PIPE_ZERO_BUBBLE) w->lag = stage;
    w->slots[0] = (int)hpmlc_min(w->limit + w->lag, d->micro);
    if (w->chunks == 1) return;
    w->slots[0] = 0;
    w->total = (d->micro + d->stages - 1) / d->stages * d->stages * w->chunks;
    w->limit = 2 * (d->stages - 1 - stage) + (w->chunks - 1) * d->stages + 1;
    hpmlc_pipe_count(w);
}

/* Checks the description of a pipeline; writes the reason of a refusal to `to`. */
HPMLC_FN hpml_status hpmlc_pipe_check(const hpml_pipe_desc *d, const hpmlc_text *to)
{
    const hpml_status wrong = HPML_ERR_ARGUMENT;
    if (!d || d->_begin || d->_end)
        return hpmlc_refuse(to, wrong, "pipe%s", d ? " desc: canary is not zero; zero the struct before you set fields"
                            : ": no desc given");
    if ((unsigned)d->kind >= HPML_PIPE_COUNT)
        return hpmlc_refuse(to, wrong, "pipe: there is no schedule %d; take a word of hpml_pipe_kind", (int)d->kind);
    if (d->stages < 1 || d->stages > 1024 || d->micro < 1 || d->micro > 65536)
        return hpmlc_refuse(to, wrong, "pipe: %d stages and %d micro-batches: expected 1 to 1024 and 1 to 65536",
                            d->stages, d->micro);
    if (d->chunks < 0 || d->chunks > HPMLC_PIPE_CHUNKS || (d->kind != HPML_PIPE_INTERLEAVED && d->chunks > 1))
        return hpmlc_refuse(to, wrong, "pipe: %d chunks with schedule %s: expected 1 to %d with interleaved, else 1",
                            d->chunks, hpml_pipe_name(d->kind), HPMLC_PIPE_CHUNKS);
    return HPML_OK;
}

HPML_API bool hpml_pipe_move(const hpml_pipe_desc *pipe, int stage, int k, hpml_pipe_task *out)
{
    hpmlc_pipe_walk w;
    if (hpmlc_pipe_check(pipe, NULL) != HPML_OK || !out || stage < 0 || stage >= pipe->stages || k < 0) return false;
    hpmlc_pipe_begin(&w, pipe, stage);
    while (hpmlc_pipe_next(&w, out))
        if (k-- == 0) return true;
    return false;
}

HPML_API int hpml_pipe_slots(const hpml_pipe_desc *pipe, int stage, int chunk)
{
    hpmlc_pipe_walk w;
    if (hpmlc_pipe_check(pipe, NULL) != HPML_OK || stage < 0 || stage >= pipe->stages || chunk < 0) return 0;
    hpmlc_pipe_begin(&w, pipe, stage);
    return chunk < w.chunks ? w.slots[chunk] : 0;
}

/* Returns how many versions of its weights a stage keeps, as hpml_pipe_versions, but for any number of micro-batches,
   because it does not check the desc. */
HPMLC_FN int hpmlc_pipe_versions(const hpml_pipe_desc *d, int stage)
{
    if (!hpmlc_pipe_stashes(d->kind)) return 1;
    int behind = d->kind == HPML_PIPE_VERTICAL ? 0 : stage;
    return (int)hpmlc_min(d->stages - behind, d->micro);
}

HPML_API int hpml_pipe_versions(const hpml_pipe_desc *pipe, int stage)
{
    if (hpmlc_pipe_check(pipe, NULL) != HPML_OK || stage < 0 || stage >= pipe->stages) return 0;
    return hpmlc_pipe_versions(pipe, stage);
}

HPML_API double hpml_pipe_bubble(const hpml_pipe_desc *pipe)
{
    if (hpmlc_pipe_check(pipe, NULL) != HPML_OK || hpmlc_pipe_stashes(pipe->kind)) return 0;
    double idle = pipe->stages - 1, busy = (double)pipe->micro * hpmlc_pipe_chunks(pipe);
    if (pipe->kind == HPML_PIPE_ZERO_BUBBLE) busy *= 3;
    return idle / (busy + idle);
}

// ---------------------------------------------------------------------------------------------------------------------
// >>pipe-cut   where to cut a chain of layers into stages
// ---------------------------------------------------------------------------------------------------------------------
typedef struct hpmlc_cut { /* A(j, m): how the first j layers are best cut for m ranks */
    double  pace;
    int32_t first, replicas; /* of the last stage */
} hpmlc_cut;

/* Returns T(first, end, replicas) of hpml_pipe_cut: the seconds of a stage of layers first to end - 1 with `replicas`
   replicas. seconds[i], bytes[i]: sums over layers before layer i. */
HPMLC_FN double hpmlc_cut_stage(const hpml_pipe_cut_desc *d, const double *seconds, const double *bytes, int first,
                                int end, int replicas)
{
    double compute = seconds[end] - seconds[first], r = replicas;
    double sync = d->bandwidth > 0 ? 4 * (r - 1) / r * (bytes[end] - bytes[first]) / d->bandwidth : 0;
    return fmax(compute, sync) / r;
}

/* Sets element j of row m of the table `row`, A(j, m) of hpml_pipe_cut_desc: the best cut of the first j layers for m
   ranks. Reads the rows for fewer ranks. */
HPMLC_FN void hpmlc_cut_best(const hpml_pipe_cut_desc *d, const double *seconds, const double *bytes, hpmlc_cut *row,
                             int m, int j)
{
    const size_t width = (size_t)d->layers + 1;
    hpmlc_cut   *best = &row[(size_t)m * width + (size_t)j];
    best->pace = HUGE_VAL;
    if (m == 1 || d->replicate) {
        best->pace     = hpmlc_cut_stage(d, seconds, bytes, 0, j, m);
        best->replicas = m;
    }
    for (int r = 1; r < m && (r == 1 || d->replicate); r++)
        for (int i = 1; i < j; i++) {
            double link = d->bytes && d->bandwidth > 0 ? 2 * (double)d->bytes[i - 1] / d->bandwidth : 0;
            double pace = fmax(row[(size_t)(m - r) * width + (size_t)i].pace,
                               fmax(link, hpmlc_cut_stage(d, seconds, bytes, i, j, r)));
            if (pace >= best->pace) continue;
            best->pace     = pace;
            best->first    = i;
            best->replicas = r;
        }
}

HPMLC_FN hpml_status hpmlc_cut_check(const hpml_pipe_cut_desc *d, const void *stages, const hpmlc_text *to)
{
    const hpml_status wrong = HPML_ERR_ARGUMENT;
    if (!d || d->_begin || d->_end)
        return hpmlc_refuse(to, wrong, "cut%s", d ? " desc: canary is not zero; zero the struct before you set fields"
                            : ": no desc given");
    if (d->layers < 1 || d->layers > 65536 || d->ranks < 1 || d->ranks > 65536 || !d->seconds || !stages)
        return hpmlc_refuse(to, wrong, "cut: %d layers, %d ranks, seconds %s, stages %s: all of them are needed",
                            d->layers, d->ranks, d->seconds ? "given" : "NULL", stages ? "given" : "NULL");
    if (d->ranks > d->layers && !d->replicate)
        return hpmlc_refuse(to, wrong, "cut: %d layers cannot be cut into %d stages; take fewer stages, or replicate",
                            d->layers, d->ranks);
    if (!HPMLC_GOOD(d->bandwidth)) return hpmlc_refuse(to, wrong, "cut: bandwidth is %g bytes/s", d->bandwidth);
    for (int i = 0; i < d->layers; i++)
        if (!(d->seconds[i] >= 0 && d->seconds[i] < 1e200) || (d->bytes && d->bytes[i] < 0) ||
            (d->param_bytes && d->param_bytes[i] < 0))
            return hpmlc_refuse(to, wrong, "cut: layer %d: %g s, or its bytes: a negative number or NaN", i,
                                d->seconds[i]);
    return HPML_OK;
}

HPML_API int hpml_pipe_cut(const hpml_pipe_cut_desc *desc, hpml_pipe_stage *stages, double *pace, char *error,
                           size_t size)
{
    const hpmlc_text to = { error, size };
    if (hpmlc_cut_check(desc, stages, &to) != HPML_OK) return -1;
    const size_t width = (size_t)desc->layers + 1;
    hpmlc_cut   *row = (hpmlc_cut *)calloc(((size_t)desc->ranks + 1) * width, sizeof *row);
    double      *seconds = (double *)calloc(2 * width, sizeof *seconds), *bytes = seconds + width;
    int          count = 0, j = desc->layers;
    if (row && seconds) {
        for (int i = 0; i < desc->layers; i++) {
            seconds[i + 1] = seconds[i] + desc->seconds[i];
            bytes[i + 1]   = bytes[i] + (desc->param_bytes ? (double)desc->param_bytes[i] : 0);
        }
        for (int m = 1; m <= desc->ranks; m++)
            for (int i = 1; i <= desc->layers; i++) hpmlc_cut_best(desc, seconds, bytes, row, m, i);
        if (pace) *pace = row[(size_t)desc->ranks * width + (size_t)j].pace;
        for (int m = desc->ranks; m > 0; count++) { /* from the last stage to the first */
            const hpmlc_cut *best = &row[(size_t)m * width + (size_t)j];
            const hpml_pipe_stage stage = { best->first, j, best->replicas };
            memmove(stages + 1, stages, (size_t)count * sizeof *stages);
            stages[0] = stage;
            j = best->first;
            m -= best->replicas;
        }
    } else hpmlc_refuse(&to, HPML_ERR_MEMORY, "cut: no memory for %d layers and %d ranks", desc->layers, desc->ranks);
    free(row);
    free(seconds);
    return count > 0 ? count : -1;
}

// ---------------------------------------------------------------------------------------------------------------------
// >>pipe-run   pipelines: pieces of a trainer's graph, and the tensors that cross between them
// ---------------------------------------------------------------------------------------------------------------------
/* The user records the whole model. hpmlc_pipeline_open cuts the list of its ops into pieces, of which this rank runs
   one, or with chunks several (hpml_graph_part). A tensor that one piece computes and another one reads is an edge: its
   values are sent to each piece that reads them, past the stages between, its gradients back. The trainer's hook `pass`
   then executes the tasks of this stage. Sends are in flight while the stage computes: the values and gradients of an
   edge stay where they are, in the slot of the micro-batch, until the slot is used again. */

typedef struct hpmlc_edge { /* a tensor that piece `from` computes and piece `to` reads */
    hpml_tensor *tensor;
    int32_t      from, to;
    bool         has_grad; /* piece `to` computes a gradient of the tensor */
    bool         first;    /* the tensor's first edge with gradients, to which those of its other edges are added */
} hpmlc_edge;

typedef struct hpmlc_tied { int32_t param, stage; } hpmlc_tied; /* a parameter of several stages, and one of these */

typedef struct hpmlc_deferred { /* statistics of a batchnorm over all micro-batches of a step */
    hpml_node *node;
    int32_t    piece;
    float     *before; /* (2, C channels) running mean and variance before the step */
    double    *sum;    /* (2, C) sums of the inputs x and of x^2 */
    double     count;  /* how many x each of the sums adds up */
} hpmlc_deferred;

struct hpmlc_pipeline {
    hpml_distributed *d;
    hpml_trainer     *t;
    hpml_graph       *g;
    hpml_ctx         *ctx;
    hpml_comm        *c;       /* the stages */
    hpml_pipe_desc    desc;
    hpmlc_pipe_walk   walk;    /* the tasks of a full step; STASH and VERTICAL: at the task that this stage does next */
    int32_t           pieces;
    int32_t          *cut;     /* (pieces + 1) the op at which each piece begins */
    int64_t           rows;    /* samples of a micro-batch, but for the last one */
    int32_t           slots;   /* of this rank */
    hpmlc_edge       *edge;
    int32_t           edges;
    float            *scratch; /* memory for a received gradient, which is added to another one */
    hpml_message     *sent;    /* (slots, edges, 2) sends of values and gradients that may be in flight */
    bool             *flying;  /* (slots, edges, 2) whether the send in .sent is in flight */
    int64_t          *samples; /* (slots) */
    hpmlc_tied       *tied;    /* parameters that several stages read, sorted by number, then stage */
    int32_t           ties;
    hpmlc_deferred   *norm;    /* batchnorms of this rank */
    int32_t           norms;
    /* Only for pipelines of kind HPML_PIPE_STASH or HPML_PIPE_VERTICAL: */
    float            *stash;   /* (versions - 1, values) weights of older versions */
    float           **own;     /* (params) where the trainer has the values of each parameter */
    int64_t           values;  /* floats of this stage's trained parameters */
    int32_t           versions;
    int32_t           version; /* updates since the pipeline was empty */
    int64_t           base;    /* the trainer's step when the pipeline was empty last */
    bool              stepped; /* true: this step has computed a gradient */
    float             loss;    /* mean loss of the micro-batch of this stage's last backward pass */
    double            share;   /* fraction of the samples of .loss that this replica has */
};

typedef struct hpmlc_pass { /* a call of the hook `pass` */
    int64_t  first, samples;
    float    grad_scale;
    bool     accumulate, train;
    bool     last;    /* the trainer's last micro-batch of an update */
    int32_t  micro;   /* number of the pipeline's micro-batches that .samples fill */
    double   loss;    /* mean loss of the samples, on the stage that computes the loss */
} hpmlc_pass;

/* Returns the piece that op `node` belongs to; -1: none, because the trainer does not run the op. */
HPMLC_FN int hpmlc_piece_of(const hpmlc_pipeline *pl, const hpml_node *node)
{
    for (int q = 0; q < pl->pieces; q++)
        for (int i = pl->cut[q]; i < pl->cut[q + 1]; i++)
            if (hpml_graph_op(pl->g, i) == node) return q;
    return -1;
}

/* Returns the bytes, for `samples` samples, of the tensor of edge e, which one piece of the model sends to another. */
HPMLC_FN size_t hpmlc_edge_bytes(const hpmlc_edge *e, int64_t samples)
{
    const hpml_tensor *t     = e->tensor;
    int64_t            count = hpml_tensor_count(t);
    if (t->batch_rows > 0) count = count / t->shape[0] * t->batch_rows * samples;
    return (size_t)count * hpml_dtype_size(t->dtype);
}

/* Adds an edge for the tensor s, which op `reader` of piece `to` reads, if another piece computes s, unless the list of
   edges (tensors that cross between pieces) has this edge already. */
HPMLC_FN void hpmlc_edge_add(hpmlc_pipeline *pl, const hpml_node *reader, hpml_tensor *s, int to)
{
    int from = s->node ? hpmlc_piece_of(pl, s->node) : to, i = 0;
    if (from < 0 || from == to) return;
    while (i < pl->edges && !(pl->edge[i].tensor == s && pl->edge[i].to == to)) i++;
    hpmlc_edge *e = &pl->edge[i];
    e->tensor   = s;
    e->from     = from;
    e->to       = to;
    e->has_grad = e->has_grad || (s->needs_grad && reader->out->needs_grad);
    if (i == pl->edges) pl->edges++;
}

/* Lists all edges (tensors that cross between pieces); edges to the last piece come first. False: an error. */
HPMLC_FN bool hpmlc_edges_find(hpmlc_pipeline *pl)
{
    size_t sources = 0;
    for (int i = 0; i < hpml_graph_op_count(pl->g); i++) sources += (size_t)hpml_graph_op(pl->g, i)->src_count;
    pl->edge = (hpmlc_edge *)hpmlc_dist_alloc(pl->d, sizeof *pl->edge * (sources + 1));
    if (!pl->edge) return false;
    for (int q = pl->pieces - 1; q >= 0; q--)
        for (int i = pl->cut[q]; i < pl->cut[q + 1]; i++) {
            const hpml_node *n = hpml_graph_op(pl->g, i);
            for (int s = 0; s < n->src_count; s++)
                if (n->src[s]) hpmlc_edge_add(pl, n, n->src[s], q);
        }
    for (int i = 0; i < pl->edges; i++) {
        hpmlc_edge *e = &pl->edge[i];
        e->first = e->has_grad;
        for (int k = 0; k < i; k++)
            if (pl->edge[k].tensor == e->tensor && pl->edge[k].has_grad) e->first = false;
        if (e->has_grad && !e->first && e->tensor->dtype != HPML_DTYPE_F32)
            return hpmlc_fail(pl->c, HPML_ERR_UNSUPPORTED, "pipeline: results of \"%s\" are halves and read by several "
                              "stages; store them as f32, or cut elsewhere", e->tensor->name), false;
    }
    if (2 * pl->edges < HPML_TAG_MAX - 2) return true;
    return hpmlc_fail(pl->c, HPML_ERR_UNSUPPORTED, "pipeline: %d tensors cross between stages, and there are tags for "
                      "%d; cut elsewhere", pl->edges, HPML_TAG_MAX / 2 - 1), false;
}

HPMLC_FN bool hpmlc_piece_reads(const hpmlc_pipeline *pl, int q, const hpml_tensor *p)
{
    for (int i = pl->cut[q]; i < pl->cut[q + 1]; i++) {
        const hpml_node *n = hpml_graph_op(pl->g, i);
        for (int s = 0; s < n->src_count; s++)
            if (n->src[s] == p) return true;
    }
    return false;
}

/* Sets hpml_param.stage of each parameter to the stage of the first piece that reads it, and lists in pl->tied the
   trained parameters that several pieces read, with the stages of these pieces. False: no memory. */
HPMLC_FN bool hpmlc_stages_set(hpmlc_pipeline *pl)
{
    const int32_t params = hpml_param_count(pl->ctx);
    pl->tied = (hpmlc_tied *)hpmlc_dist_alloc(pl->d, sizeof *pl->tied * (size_t)(params * pl->pieces + 1));
    for (int32_t k = 0; k < params && pl->tied; k++) {
        hpml_tensor *p     = hpml_param_at(pl->ctx, k);
        int32_t      begin = pl->ties;
        for (int q = 0; q < pl->pieces; q++) {
            if (!hpmlc_piece_reads(pl, q, p)) continue;
            pl->tied[pl->ties].param = k;
            pl->tied[pl->ties++].stage = q % pl->desc.stages;
        }
        if (pl->ties > begin) p->param->stage = pl->tied[begin].stage;
        if (pl->ties == begin + 1 || p->param->frozen || p->param->buffer) pl->ties = begin;
    }
    return pl->tied != NULL;
}

/* Cuts the ops into pieces, as the plan says, or so that the piece with most operations has as few as possible. */
HPMLC_FN bool hpmlc_pipeline_cut(hpmlc_pipeline *pl, const hpml_plan *plan)
{
    HPMLC_ZERO(hpml_pipe_cut_desc, desc);
    char     why[200];
    int      ops = hpml_graph_op_count(pl->g), count = pl->pieces;
    double  *flops = (double *)hpml_ctx_alloc(pl->ctx, sizeof *flops * (size_t)(ops + 1), NULL);
    hpml_pipe_stage *stages = (hpml_pipe_stage *)hpml_ctx_alloc(pl->ctx, sizeof *stages * (size_t)count, NULL);
    for (int i = 0; flops && i < ops; i++) {
        const hpml_node *n = hpml_graph_op(pl->g, i);
        flops[i] = hpml_node_flops(n, false) + hpml_node_flops(n, true);
    }
    desc.layers  = ops;
    desc.ranks   = count;
    desc.seconds = flops;
    pl->cut[count] = ops;
    if (!plan->cut && flops && stages && hpml_pipe_cut(&desc, stages, NULL, why, sizeof why) < 0)
        hpmlc_fail(pl->c, HPML_ERR_ARGUMENT, "pipeline: the model's %d ops cannot be cut into %d pieces; take a "
                   "smaller pipe or chunks (%s)", ops, count, why);
    for (int q = 1; q < count && stages && !hpmlc_failed(pl->c); q++) {
        pl->cut[q] = plan->cut ? plan->cut[q - 1] : stages[q].first;
        if (pl->cut[q] <= pl->cut[q - 1] || pl->cut[q] >= ops)
            hpmlc_fail(pl->c, HPML_ERR_ARGUMENT, "pipeline: piece %d begins at op %d, expected an op after %d and "
                       "before %d; correct plan.cut", q, pl->cut[q], pl->cut[q - 1], ops);
    }
    hpml_ctx_release(pl->ctx, flops);
    hpml_ctx_release(pl->ctx, stages);
    return !hpmlc_failed(pl->c);
}

/* Makes each piece that this rank runs a part of the graph, with a slot (set of activations) for each micro-batch in
   flight. With STASH and VERTICAL a part has one slot more, for evaluations, because micro-batches of training steps
   always occupy the other ones. False: an error on the context. */
HPMLC_FN bool hpmlc_pipeline_parts(hpmlc_pipeline *pl)
{
    hpml_status status = HPML_OK;
    hpmlc_pipe_begin(&pl->walk, &pl->desc, pl->c->rank);
    if (pl->desc.kind == HPML_PIPE_ZERO_BUBBLE) status = hpml_graph_halves(pl->g);
    for (int c = 0; c < pl->walk.chunks && status == HPML_OK; c++) {
        int q = c * pl->desc.stages + pl->c->rank, slots = pl->walk.slots[c] + hpmlc_pipe_stashes(pl->desc.kind);
        pl->slots += slots;
        status = hpml_graph_part(pl->g, pl->cut[q], pl->cut[q + 1], pl->rows, slots);
    }
    return status == HPML_OK;
}

// ---------------------------------------------------------------------------------------------------------------------
// >>pipe-tasks   pipelines: the tasks of a stage, executed
// ---------------------------------------------------------------------------------------------------------------------
HPMLC_FN int hpmlc_piece_rank(const hpmlc_pipeline *pl, int piece) { return piece % pl->desc.stages; }

/* Returns whether the pass is a step of STASH or VERTICAL, which leaves other micro-batches in flight. */
HPMLC_FN bool hpmlc_pass_flows(const hpmlc_pipeline *pl, const hpmlc_pass *pass)
{
    return pass->train && hpmlc_pipe_stashes(pl->desc.kind);
}

/* Sends the tensor of edge i (a tensor that one piece computes and another one reads), from the memory of a slot: its
   values or, if `back`, its gradient. Returns while the message is in flight. */
HPMLC_FN hpml_status hpmlc_edge_send(hpmlc_pipeline *pl, int slot, int i, bool back)
{
    const hpmlc_edge *e  = &pl->edge[i];
    size_t            at = ((size_t)slot * (size_t)pl->edges + (size_t)i) * 2 + back, bytes;
    const void       *data = back ? e->tensor->raw_grad : e->tensor->raw;
    bytes = hpmlc_edge_bytes(e, pl->samples[slot]);
    if (bytes == 0) return HPML_OK;
    pl->flying[at] = true;
    return hpml_isend(pl->c, hpmlc_piece_rank(pl, back ? e->from : e->to), 2 * i + back, data, bytes, &pl->sent[at]);
}

/* Waits until the sends of values and gradients from slot `slot`, one of the stage's sets of activations, are done. */
HPMLC_FN hpml_status hpmlc_slot_wait(hpmlc_pipeline *pl, int slot)
{
    size_t      at = (size_t)slot * (size_t)pl->edges * 2, end = at + (size_t)pl->edges * 2;
    hpml_status status = HPML_OK;
    for (; at < end; at++) {
        if (!pl->flying[at]) continue;
        hpml_status own = hpml_wait(pl->c, &pl->sent[at]);
        pl->flying[at]  = false;
        if (status == HPML_OK) status = own;
    }
    return status;
}

/* Receives the values of edge i's tensor or, if `back`, their gradient from the piece that reads this edge, and adds it
   to the gradients that other pieces have sent for the same tensor, unless the edge is the tensor's first. */
HPMLC_FN hpml_status hpmlc_edge_receive(hpmlc_pipeline *pl, int slot, int i, bool back)
{
    const hpmlc_edge *e = &pl->edge[i];
    size_t            bytes = hpmlc_edge_bytes(e, pl->samples[slot]);
    int               from = hpmlc_piece_rank(pl, back ? e->to : e->from);
    bool              adds = back && !e->first;
    void             *into = back ? e->tensor->raw_grad : e->tensor->raw;
    if (bytes == 0) return HPML_OK;
    hpml_status status = hpml_recv(pl->c, from, 2 * i + back, adds ? pl->scratch : into, bytes);
    for (size_t k = 0; adds && status == HPML_OK && k < bytes / sizeof(float); k++)
        e->tensor->grad[k] += pl->scratch[k];
    return status;
}

/* Sets the gradient of the tensor of edge i (a tensor that one piece computes and another one reads) to zeros if no
   later piece sends a gradient of this tensor back. */
HPMLC_FN void hpmlc_edge_clear(hpmlc_pipeline *pl, int slot, int i)
{
    const hpmlc_edge *e = &pl->edge[i];
    for (int k = 0; k < pl->edges; k++)
        if (pl->edge[k].tensor == e->tensor && pl->edge[k].has_grad) return;
    if (e->tensor->raw_grad) memset(e->tensor->raw_grad, 0, hpmlc_edge_bytes(e, pl->samples[slot]));
}

/* Sets the running statistics of all batchnorms to zero before a micro-batch's forward pass, which then adds those of
   the micro-batch, times momentum, to them. */
HPMLC_FN void hpmlc_norms_clear(hpmlc_pipeline *pl)
{
    for (int i = 0; i < pl->norms; i++)
        for (int k = 3; k < 5; k++) {
            hpml_tensor *r = pl->norm[i].node->src[k];
            memset(r->data, 0, (size_t)hpml_tensor_count(r) * sizeof(float));
        }
}

/* Adds the statistics of a micro-batch of `samples` samples to the sums of the batchnorms of piece q. */
HPMLC_FN void hpmlc_norms_add(hpmlc_pipeline *pl, int q, int64_t samples)
{
    for (int i = 0; i < pl->norms; i++) {
        hpmlc_deferred    *b = &pl->norm[i];
        const hpml_tensor *x = b->node->src[0], *mean = b->node->src[3], *var = b->node->src[4];
        int64_t            C = hpml_tensor_count(mean);
        double             n = (double)(hpml_tensor_count(x) / x->shape[0] * x->batch_rows * samples / C);
        double             momentum = (double)b->node->attr.norm.momentum;
        if (b->piece != q || n <= 0) continue;
        b->count += n;
        for (int64_t c = 0; c < C; c++) {
            double average = (double)mean->data[c] / momentum, square = (double)var->data[c] / momentum;
            b->sum[c] += n * average;
            b->sum[C + c] += square * (n > 1 ? n - 1 : 1) + n * average * average;
        }
    }
}

/* begin: saves the running statistics of the batchnorms. Else restores and updates them once, as if the samples of all
   micro-batches were one batch. */
HPMLC_FN void hpmlc_norms_step(hpmlc_pipeline *pl, bool begin)
{
    for (int i = 0; i < pl->norms; i++) {
        hpmlc_deferred    *b = &pl->norm[i];
        const hpml_tensor *mean = b->node->src[3], *var = b->node->src[4];
        int64_t            C = hpml_tensor_count(mean);
        size_t             bytes = (size_t)C * sizeof(float);
        double             n = b->count, m = (double)b->node->attr.norm.momentum;
        if (begin) {
            memcpy(b->before, mean->data, bytes);
            memcpy(b->before + C, var->data, bytes);
            memset(b->sum, 0, 2 * (size_t)C * sizeof *b->sum);
            b->count = 0;
            continue;
        }
        memcpy(mean->data, b->before, bytes);
        memcpy(var->data, b->before + C, bytes);
        for (int64_t c = 0; c < C && n > 0; c++) {
            double average = b->sum[c] / n, square = fmax(0, b->sum[C + c] - n * average * average);
            mean->data[c] = (float)((1 - m) * (double)b->before[c] + m * average);
            var->data[c]  = (float)((1 - m) * (double)b->before[C + c] + m * square / (n > 1 ? n - 1 : 1));
        }
    }
}

HPMLC_FN hpml_status hpmlc_task_forward(hpmlc_pipeline *pl, hpmlc_pass *pass, const hpml_pipe_task *task)
{
    int64_t     at = hpmlc_pass_flows(pl, pass) ? 0 : task->micro * pl->rows;
    int64_t     samples = hpmlc_min(pl->rows, pass->samples - at);
    bool        defers  = pass->train && pass->micro > 1;
    float       loss    = 0;
    hpml_status status  = hpmlc_slot_wait(pl, task->slot);
    if (status == HPML_OK) status = hpml_graph_slot(pl->g, task->slot);
    pl->samples[task->slot] = samples;
    for (int i = 0; i < pl->edges && status == HPML_OK; i++)
        if (pl->edge[i].to == task->piece) status = hpmlc_edge_receive(pl, task->slot, i, false);
    if (defers) hpmlc_norms_clear(pl);
    if (status == HPML_OK) status = hpml_trainer_forward(pl->t, task->slot, pass->first + at, samples, &loss);
    if (status != HPML_OK) return status;
    if (defers) hpmlc_norms_add(pl, task->piece, samples);
    for (int i = 0; i < pl->edges && status == HPML_OK; i++)
        if (pl->edge[i].from == task->piece) status = hpmlc_edge_send(pl, task->slot, i, false);
    if (task->piece == pl->pieces - 1 && pass->samples > 0)
        pass->loss += (double)loss * (double)samples / (double)pass->samples;
    return status;
}

/* Executes a backward pass of this stage, or the half of it that computes the gradients of inputs or of weights. Only
   gradients of inputs are received and sent; while they are in flight, the half that computes the gradients of weights
   may run, because it does not write to them. */
HPMLC_FN hpml_status hpmlc_task_backward(hpmlc_pipeline *pl, const hpmlc_pass *pass, const hpml_pipe_task *task)
{
    const bool  flows = hpmlc_pass_flows(pl, pass), weights = task->work == HPML_PIPE_BACKWARD_WEIGHTS;
    hpml_half   half  = weights ? HPML_HALF_WEIGHTS : HPML_HALF_BOTH;
    int64_t     samples = pl->samples[task->slot];
    bool        adds = pass->accumulate || (!flows && task->micro > 0);
    bool        last = pass->last && !flows && task->micro + 1 == pass->micro;
    float       scale  = flows || pass->samples == 0 ? 1 : (float)((double)samples / (double)pass->samples);
    hpml_status status = weights ? HPML_OK : hpmlc_slot_wait(pl, task->slot);
    if (task->work == HPML_PIPE_BACKWARD_INPUTS) half = HPML_HALF_INPUTS;
    if (status == HPML_OK) status = hpml_graph_slot(pl->g, task->slot);
    for (int i = 0; i < pl->edges && status == HPML_OK && !weights; i++) {
        if (pl->edge[i].from != task->piece) continue;
        if (pl->edge[i].has_grad) status = hpmlc_edge_receive(pl, task->slot, i, true);
        else hpmlc_edge_clear(pl, task->slot, i);
    }
    if (status == HPML_OK)
        status = hpml_trainer_backward_half(pl->t, task->slot, half, pass->grad_scale * scale, adds, last);
    for (int i = 0; i < pl->edges && status == HPML_OK && !weights; i++)
        if (pl->edge[i].to == task->piece && pl->edge[i].has_grad)
            status = hpmlc_edge_send(pl, task->slot, i, true);
    return status;
}

/* Executes a forward or backward pass of this stage, in an evaluation forward alone; an update does nothing here. */
HPMLC_FN hpml_status hpmlc_task_run(hpmlc_pipeline *pl, hpmlc_pass *pass, const hpml_pipe_task *task)
{
    const bool  forward = task->work == HPML_PIPE_FORWARD;
    double      start   = hpml_comm_now(pl->c);
    hpml_status status  = HPML_OK;
    const char *name    = forward ? "stage forward" : "stage backward";
    if (task->work == HPML_PIPE_UPDATE || !(forward || pass->train)) return HPML_OK;
    if (forward) status = hpmlc_task_forward(pl, pass, task);
    else status = hpmlc_task_backward(pl, pass, task);
    if (task->work == HPML_PIPE_BACKWARD_WEIGHTS) name = "stage weights";
    hpmlc_span(pl->c, name, start, hpml_comm_now(pl->c), task->micro);
    return status;
}

/* Runs all tasks of a pass whose micro-batches enter an empty pipeline and leave it empty. */
HPMLC_FN hpml_status hpmlc_pass_tasks(hpmlc_pipeline *pl, hpmlc_pass *pass)
{
    hpml_pipe_desc  desc = pl->desc;
    hpmlc_pipe_walk walk;
    hpml_pipe_task  task;
    hpml_status     status = HPML_OK;
    const bool      apart = hpmlc_pipe_stashes(desc.kind); /* true: micro-batches of steps are in flight */
    desc.micro = pass->micro;
    if (apart) desc.kind = HPML_PIPE_GPIPE;
    hpmlc_pipe_begin(&walk, &desc, pl->c->rank);
    memcpy(walk.slots, pl->walk.slots, sizeof walk.slots);
    while (status == HPML_OK && hpmlc_pipe_next(&walk, &task)) {
        if (apart) task.slot = pl->slots - 1;
        status = hpmlc_task_run(pl, pass, &task);
    }
    return status;
}

// ---------------------------------------------------------------------------------------------------------------------
// >>pipe-flow   pipelines without a flush: versions of the weights; the hooks of a pipeline
// ---------------------------------------------------------------------------------------------------------------------
/* With STASH and VERTICAL a call of hpml_trainer_step runs on stage r the forward pass of one micro-batch, which is the
   whole batch of the step, and then the backward pass and update of the micro-batch p - 1 - r steps before. Each task
   needs a certain version of the weights: the newest is in the trainer's arrays, older ones are copies, to which `data`
   of the parameters points while a task uses them. */

/* Points `data` of this stage's parameters to a version of the weights: a copy in the stash or, for the newest version,
   the trainer's own arrays. The optimizer steps the trainer's own arrays in any case. */
HPMLC_FN void hpmlc_stash_use(hpmlc_pipeline *pl, int version)
{
    float *copy = pl->stash;
    if (version < pl->version && pl->versions > 1) copy += version % (pl->versions - 1) * pl->values;
    for (int k = 0; k < hpml_param_count(pl->ctx); k++) {
        hpml_tensor *p = hpml_param_at(pl->ctx, k);
        if (!pl->own[k]) continue;
        p->data = version < pl->version ? copy : pl->own[k];
        p->raw  = p->data;
        copy += hpml_tensor_count(p);
    }
}

/* Replaces the gradients of this rank, one of the replicas of a stage, by their mean over all replicas (.sum: by their
   sum), and batchnorm's running statistics by their mean. The means are weighted by the replicas' samples of the last
   micro-batch that has passed the stage backward. */
HPMLC_FN hpml_status hpmlc_stash_mean(hpmlc_pipeline *pl)
{
    hpml_distributed   *d = pl->d;
    const hpmlc_layout *l = &d->layout;
    const int64_t       n = l->buffer_total;
    hpml_status         status;
    if (d->c->size == 1) return HPML_OK;
    for (int64_t k = 0; k < l->span && !d->plan.sum; k++) l->first[k] *= (float)pl->share;
    status = hpmlc_reduce_all(d->c, l->first, l->span, HPML_ELEMENT_F32, HPML_SUM, d->plan.algorithm);
    if (n == 0 || status != HPML_OK) return status;
    hpmlc_buffers_copy(d, d->stats.buffers, false);
    for (int64_t k = 0; k < n; k++) d->stats.buffers[k] *= (float)pl->share;
    status = hpmlc_reduce_all(d->c, d->stats.buffers, n, HPML_ELEMENT_F32, HPML_SUM, HPML_AUTO);
    hpmlc_buffers_copy(d, d->stats.buffers, true);
    return status;
}

/* Copies the newest weights to the stash, then updates the newest weights with the gradient of micro-batch `micro`. The
   update uses the step number pl->base + micro, that of this micro-batch. */
HPMLC_FN hpml_status hpmlc_stash_update(hpmlc_pipeline *pl, int micro)
{
    int64_t step = hpml_trainer_step_count(pl->t);
    float  *copy = pl->stash;
    if (pl->versions > 1) copy += pl->version % (pl->versions - 1) * pl->values;
    for (int k = 0; k < hpml_param_count(pl->ctx) && pl->versions > 1; k++) {
        int64_t n = hpml_tensor_count(hpml_param_at(pl->ctx, k));
        if (!pl->own[k]) continue;
        memcpy(copy, pl->own[k], (size_t)n * sizeof *copy);
        copy += n;
    }
    hpml_trainer_set_step(pl->t, pl->base + micro);
    hpml_status status = hpmlc_stash_mean(pl);
    if (status == HPML_OK) status = hpml_trainer_apply(pl->t, 0, hpml_param_count(pl->ctx));
    hpml_trainer_set_step(pl->t, step);
    pl->version++;
    return status;
}

/* Sets pl->loss to the loss of the micro-batch, of `samples` samples, whose backward pass this stage has just run: on
   the last stage from `pass`, as the mean over its replicas, else received from the next stage. Then sends this loss to
   the previous stage. */
HPMLC_FN hpml_status hpmlc_stash_loss(hpmlc_pipeline *pl, const hpmlc_pass *pass, int64_t samples)
{
    const int   rank = pl->c->rank, tag = 2 * pl->edges;
    double      sums[2] = { (double)samples, (double)samples * pass->loss }, loss = pass->loss;
    hpml_comm  *replicas = pl->d->c;
    hpml_status status = HPML_OK;
    pl->share = 1;
    if (replicas->size > 1) {
        status    = hpmlc_reduce_all(replicas, sums, 2, HPML_ELEMENT_F64, HPML_SUM, HPML_AUTO);
        pl->share = (double)samples / sums[0];
        loss      = sums[1] / sums[0];
    }
    if (status != HPML_OK) return status;
    if (rank + 1 == pl->desc.stages) pl->loss = (float)loss;
    else status = hpml_recv(pl->c, rank + 1, tag, &pl->loss, sizeof pl->loss);
    if (rank > 0 && status == HPML_OK) status = hpml_send(pl->c, rank - 1, tag, &pl->loss, sizeof pl->loss);
    return status;
}

/* Runs a stage's tasks with schedules STASH and VERTICAL: the next forward pass and all tasks up to the forward pass
   after it. drains: also runs the updates of weights among these tasks; otherwise a hook of the trainer runs them. */
HPMLC_FN hpml_status hpmlc_stash_tasks(hpmlc_pipeline *pl, hpmlc_pass *pass, bool drains)
{
    const int       now = pl->walk.forwards;
    hpmlc_pipe_walk next = pl->walk;
    hpml_pipe_task  task;
    hpml_status     status = HPML_OK;
    pl->stepped = false;
    while (status == HPML_OK && hpmlc_pipe_next(&next, &task)) {
        if (task.work == HPML_PIPE_FORWARD && task.micro > now) break;
        pl->walk = next;
        if (task.work == HPML_PIPE_UPDATE) {
            pl->stepped = true;
            if (drains) status = hpmlc_stash_update(pl, task.micro);
            continue;
        }
        hpmlc_stash_use(pl, task.version);
        status = hpmlc_task_run(pl, pass, &task);
        hpmlc_stash_use(pl, pl->version);
        if (task.work == HPML_PIPE_BACKWARD && status == HPML_OK)
            status = hpmlc_stash_loss(pl, pass, pl->samples[task.slot]);
    }
    return status;
}

HPMLC_FN void hpmlc_stash_begin(hpmlc_pipeline *pl)
{
    hpmlc_pipe_begin(&pl->walk, &pl->desc, pl->c->rank);
    pl->version = 0;
    pl->base    = hpml_trainer_step_count(pl->t);
}

/* Sends the model's output for the samples of an evaluation pass from the stage that has computed it to all stages. */
HPMLC_FN hpml_status hpmlc_pass_output(hpmlc_pipeline *pl, const hpmlc_pass *pass)
{
    int64_t          floats = 0;
    float           *out  = hpml_trainer_output(pl->t, &floats);
    const hpml_node *node = hpml_trainer_settings(pl->t)->output->node;
    const int        root = hpmlc_piece_rank(pl, hpmlc_piece_of(pl, node));
    if (!out) return HPML_OK;
    return hpml_broadcast(pl->c, out + pass->first * floats, (size_t)(pass->samples * floats) * sizeof *out, root);
}

/* The trainer's hook `pass`: runs this stage's tasks. All stages get the loss and, of an evaluation, the output. */
HPMLC_FN hpml_status hpmlc_pipeline_pass(void *user, hpml_trainer *t HPMLC_UNUSED, const hpml_moment *at, int64_t first,
                                         int64_t samples, float grad_scale, bool accumulate, float *loss)
{
    hpmlc_pipeline *pl = (hpmlc_pipeline *)user;
    const int64_t   micro = hpmlc_max(1, (samples + pl->rows - 1) / pl->rows);
    hpmlc_pass      pass = { first, samples, grad_scale, accumulate, at->pass != HPML_PASS_EVALUATE,
                             at->batch + 1 >= at->batches, (int32_t)micro, 0 };
    hpml_status     status;
    float           mean;
    if (pass.train && hpmlc_pipe_stashes(pl->desc.kind)) {
        if (pl->walk.forwards == 0) hpmlc_stash_begin(pl);
        status = hpmlc_stash_tasks(pl, &pass, false);
        mean   = pl->loss;
    } else {
        bool defers = pass.train && pass.micro > 1;
        if (defers) hpmlc_norms_step(pl, true);
        status = hpmlc_pass_tasks(pl, &pass);
        if (defers) hpmlc_norms_step(pl, false);
        for (int s = 0; s < pl->slots && status == HPML_OK; s++) status = hpmlc_slot_wait(pl, s);
        mean = (float)pass.loss;
        if (status == HPML_OK) status = hpml_broadcast(pl->c, &mean, sizeof mean, pl->desc.stages - 1);
        if (status == HPML_OK && !pass.train) status = hpmlc_pass_output(pl, &pass);
    }
    if (loss) *loss = mean;
    return status == HPML_OK ? HPML_OK : hpmlc_failure(pl->c);
}

/* The hooks `run` and `update` of pipelines with the schedule STASH or VERTICAL: they replace the strategy's hooks. */
HPMLC_FN hpml_status hpmlc_stash_run(void *user HPMLC_UNUSED, hpml_trainer *t, const hpml_moment *at HPMLC_UNUSED,
                                     int64_t samples, float *loss)
{
    return hpml_trainer_forward_backward(t, 0, samples, 1, false, loss);
}
HPMLC_FN hpml_status hpmlc_stash_step(void *user, hpml_trainer *t HPMLC_UNUSED, const hpml_moment *at HPMLC_UNUSED)
{
    hpmlc_pipeline *pl = (hpmlc_pipeline *)user;
    return pl->stepped ? hpmlc_stash_update(pl, pl->version) : hpml_ctx_status(pl->ctx);
}

/* For schedules STASH and VERTICAL: runs the backward passes and updates of the micro-batches that are in flight.
   Collective over the stages. */
HPMLC_FN hpml_status hpmlc_pipeline_drain(hpmlc_pipeline *pl)
{
    hpmlc_pass  pass   = { 0, 0, 1, false, true, false, 1, 0 };
    hpml_status status = HPML_OK;
    if (!hpmlc_pipe_stashes(pl->desc.kind) || pl->walk.forwards == 0) return HPML_OK;
    pl->walk.total = pl->walk.micro = pl->walk.forwards;
    status = hpmlc_stash_tasks(pl, &pass, true);
    for (int s = 0; s < pl->slots && status == HPML_OK; s++) status = hpmlc_slot_wait(pl, s);
    hpmlc_stash_begin(pl);
    return status == HPML_OK ? HPML_OK : hpmlc_failure(pl->c);
}

/* Adds up the gradients of each parameter that several stages read: the first of these stages adds the gradients of the
   others to its own, the last stage's first, and sends the sum to the others; so all of them step by the same bits. */
HPMLC_FN hpml_status hpmlc_pipeline_join(hpmlc_pipeline *pl)
{
    hpml_status status = HPML_OK;
    const int   tag = 2 * pl->edges + 1;
    for (int i = 0, end = 0; i < pl->ties && status == HPML_OK; i = end) {
        hpml_tensor *p    = hpml_param_at(pl->ctx, pl->tied[i].param);
        size_t       size = (size_t)hpml_tensor_count(p) * sizeof(float);
        bool         mine = false;
        for (; end < pl->ties && pl->tied[end].param == pl->tied[i].param; end++)
            if (pl->tied[end].stage == pl->c->rank) mine = true;
        if (mine && pl->tied[i].stage != pl->c->rank) {
            status = hpml_send(pl->c, pl->tied[i].stage, tag, p->grad, size);
            if (status == HPML_OK) status = hpml_recv(pl->c, pl->tied[i].stage, tag, p->grad, size);
            continue;
        }
        for (int k = end - 1; k > i && mine && status == HPML_OK; k--) {
            status = hpml_recv(pl->c, pl->tied[k].stage, tag, pl->scratch, size);
            for (int64_t n = 0; n < hpml_tensor_count(p); n++) p->grad[n] += pl->scratch[n];
        }
        for (int k = i + 1; k < end && mine && status == HPML_OK; k++)
            status = hpml_send(pl->c, pl->tied[k].stage, tag, p->grad, size);
    }
    return status;
}

/* Allocates the arrays of a pipeline whose pieces and edges (tensors that one piece computes and another one reads) are
   known. False: out of memory. */
HPMLC_FN bool hpmlc_pipeline_arrays(hpmlc_pipeline *pl)
{
    hpml_distributed *d     = pl->d;
    const size_t      sends = (size_t)pl->slots * (size_t)pl->edges * 2;
    size_t            most  = sizeof(float);
    for (int i = 0; i < pl->edges; i++) {
        size_t bytes = hpmlc_edge_bytes(&pl->edge[i], pl->rows);
        if (bytes > most) most = bytes;
    }
    for (int i = 0; i < pl->ties; i++) {
        size_t bytes = (size_t)hpml_tensor_count(hpml_param_at(pl->ctx, pl->tied[i].param)) * sizeof(float);
        if (bytes > most) most = bytes;
    }
    pl->scratch = (float *)hpmlc_dist_alloc(d, most);
    pl->sent    = (hpml_message *)hpmlc_dist_alloc(d, sizeof *pl->sent * (sends + 1));
    pl->flying  = (bool *)hpmlc_dist_alloc(d, sizeof *pl->flying * (sends + 1));
    pl->samples = (int64_t *)hpmlc_dist_alloc(d, sizeof *pl->samples * (size_t)pl->slots);
    return pl->scratch && pl->sent && pl->flying && pl->samples;
}

/* Lists in pl->norm the batchnorms of this rank's pieces that update running statistics. False: out of memory. */
HPMLC_FN bool hpmlc_norms_open(hpmlc_pipeline *pl)
{
    pl->norm = (hpmlc_deferred *)hpmlc_dist_alloc(pl->d, sizeof *pl->norm * (size_t)(hpml_graph_op_count(pl->g) + 1));
    for (int q = pl->c->rank; q < pl->pieces && pl->norm; q += pl->desc.stages)
        for (int i = pl->cut[q]; i < pl->cut[q + 1]; i++) {
            hpml_node *n = (hpml_node *)hpml_graph_op(pl->g, i);
            if (n->op != HPML_OP_BATCHNORM || !(n->attr.norm.momentum > 0)) continue;
            hpmlc_deferred *b = &pl->norm[pl->norms];
            const size_t    C = (size_t)hpml_tensor_count(n->src[3]);
            b->node   = n;
            b->piece  = q;
            b->before = (float *)hpmlc_dist_alloc(pl->d, 2 * C * sizeof *b->before);
            b->sum    = (double *)hpmlc_dist_alloc(pl->d, 2 * C * sizeof *b->sum);
            if (!b->before || !b->sum) return false;
            pl->norms++;
        }
    return pl->norm != NULL;
}

/* Cuts the trainer's graph into the stages of a pipeline, before the memory of the graph is allocated. False: an error
   on the context. */
HPMLC_FN bool hpmlc_pipeline_open(hpml_distributed *d)
{
    hpmlc_pipeline *pl = (hpmlc_pipeline *)hpmlc_dist_alloc(d, sizeof *pl);
    if (!pl) return false;
    const int64_t batch = hpml_trainer_settings(d->t)->input->shape[0];
    d->pipeline     = pl;
    pl->d           = d;
    pl->t           = d->t;
    pl->ctx         = d->ctx;
    pl->g           = hpml_trainer_graph(d->t);
    pl->c           = hpml_comm_mesh(d->all)->axis[HPML_AXIS_PIPE];
    pl->desc.kind   = d->plan.schedule;
    pl->desc.stages = pl->c->size;
    pl->desc.chunks = d->plan.chunks;
    pl->desc.micro  = hpmlc_pipe_stashes(d->plan.schedule) ? INT32_MAX / 2 : d->plan.micro;
    pl->pieces      = pl->desc.stages * hpmlc_pipe_chunks(&pl->desc);
    pl->rows        = hpmlc_pipe_stashes(d->plan.schedule) ? batch : (batch - 1) / d->plan.micro + 1;
    pl->cut         = (int32_t *)hpmlc_dist_alloc(d, sizeof *pl->cut * ((size_t)pl->pieces + 1));
    if (!pl->cut || !hpmlc_pipeline_cut(pl, &d->plan) || !hpmlc_edges_find(pl) || !hpmlc_stages_set(pl)) return false;
    if (!hpmlc_pipeline_parts(pl) || !hpmlc_norms_open(pl) || !hpmlc_pipeline_arrays(pl)) return false;
    bool joins = d->plan.strategy == HPML_STRATEGY_SYNC && d->plan.shard == 0; /* sync calls hpmlc_pipeline_join */
    if (pl->ties == 0 || (joins && !hpmlc_pipe_stashes(d->plan.schedule))) return true;
    return hpmlc_fail(d->c, HPML_ERR_UNSUPPORTED, "pipeline: parameter \"%s\" is read by several stages, which have to "
                      "step it with one gradient; take strategy sync without shard and schedule gpipe or 1f1b",
                      hpml_param_at(d->ctx, pl->tied[0].param)->name), false;
}

/* Appends to a report the schedule's name and its bubble, the idle share of the time by hpml_pipe_bubble. */
HPMLC_FN void hpmlc_pipeline_text(const hpmlc_pipeline *pl, const hpmlc_text *to, size_t *length)
{
    hpmlc_append(to, length, ", %s", hpml_pipe_name(pl->desc.kind));
    if (!hpmlc_pipe_stashes(pl->desc.kind))
        hpmlc_append(to, length, " of %d micro-batches with a bubble of %.0f %%", pl->desc.micro,
                     100 * hpml_pipe_bubble(&pl->desc));
}

/* Attaches the hooks of a pipeline, when the trainer has its memory. False: out of memory. */
HPMLC_FN bool hpmlc_pipeline_attach(hpmlc_pipeline *pl)
{
    HPMLC_ZERO(hpml_hooks, hooks);
    const int params = hpml_param_count(pl->ctx);
    hooks.user = pl;
    hooks.pass = hpmlc_pipeline_pass;
    if (hpmlc_pipe_stashes(pl->desc.kind)) {
        hooks.run    = hpmlc_stash_run;
        hooks.update = hpmlc_stash_step;
        pl->own      = (float **)hpmlc_dist_alloc(pl->d, sizeof *pl->own * ((size_t)params + 1));
        for (int k = 0; k < params && pl->own; k++) {
            hpml_tensor *p = hpml_param_at(pl->ctx, k);
            if (!p->grad || p->param->frozen) continue;
            pl->own[k] = p->data;
            pl->values += hpml_tensor_count(p);
        }
        pl->versions = hpmlc_pipe_versions(&pl->desc, pl->c->rank);
        pl->stash = (float *)hpmlc_dist_alloc(pl->d, sizeof(float) * (size_t)(pl->values * (pl->versions - 1) + 1));
        if (!pl->own || !pl->stash) return false;
    }
    return hpml_trainer_attach(pl->t, &hooks) == HPML_OK;
}

/* Waits for the sends that are in flight, and detaches the pipeline's hooks from the trainer. */
HPMLC_FN void hpmlc_pipeline_close(hpml_distributed *d)
{
    hpmlc_pipeline *pl = d->pipeline;
    for (int s = 0; pl->flying && s < pl->slots; s++) hpmlc_slot_wait(pl, s);
    hpml_trainer_detach(pl->t, pl);
}

// ---------------------------------------------------------------------------------------------------------------------
// >>layers   what layers that communicate have in common
// ---------------------------------------------------------------------------------------------------------------------
/* Each layer is an op of hpml_custom_op with .collective, written with the functions of hpml.h that a program may call,
   and with those of hpml_group. Ranks of the SEQUENCE axis have the same samples. On other axes messages have the
   length of a full batch on every rank, because ranks may have batches of different lengths, or none. */

/* Sets an error on ctx, its text formatted as by printf, and returns NULL. */
HPMLC_PRINTF(2, 3)
HPMLC_FN hpml_tensor *hpmlc_no_layer(hpml_ctx *ctx, const char *format, ...)
{
    char    text[512];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    hpml_ctx_fail(ctx, HPML_ERR_SHAPE, "%s", text);
    return NULL;
}

/* Returns whether a layer that reads x may be recorded; false: x is NULL or its context has an error. */
HPMLC_FN bool hpmlc_recordable(const hpml_tensor *x) { return x && hpml_ctx_status(x->ctx) == HPML_OK; }

/* Records the op d, of `count` sources, that reads a copy of the `bytes` bytes at `user`. The copy lives as long as the
   context. */
HPMLC_FN hpml_tensor *hpmlc_record(hpml_tensor *const *src, int count, hpml_custom *d, const void *user, size_t bytes)
{
    if (!hpmlc_recordable(src[0])) return NULL;
    d->user = hpml_ctx_alloc(src[0]->ctx, bytes, NULL);
    if (!d->user) return NULL;
    memcpy(d->user, user, bytes);
    return hpml_custom_op(src, count, d);
}

/* Creates the parameter "<layer>.<suffix>", split along dimension 0 over `axis` (DATA: whole); scale 0: zeros, else
   uniform in -scale to scale. */
HPMLC_FN hpml_tensor *hpmlc_layer_param(hpml_ctx *ctx, const char *layer, const char *suffix, hpml_axis axis,
                                        double scale, int ndim, const int64_t *shape)
{
    char text[256];
    snprintf(text, sizeof text, "%s.%s", layer, suffix);
    HPMLC_ZERO(hpml_param_desc, d);
    d.ndim       = ndim;
    d.name       = text;
    d.init       = scale > 0 ? HPML_INIT_UNIFORM : HPML_INIT_ZEROS;
    d.init_scale = (float)scale;
    d.no_decay   = !(scale > 0);
    d.axis       = axis;
    memcpy(d.shape, shape, sizeof *shape * (size_t)ndim);
    return hpml_param_create(ctx, &d);
}

/* Returns the name of a layer: `given` or, if NULL, `kind` and the number of earlier parameters, built in `text`. */
HPMLC_FN const char *hpmlc_layer_name(hpml_ctx *ctx, const char *given, const char *kind, char text[32])
{
    snprintf(text, 32, "%s%d", kind, hpml_param_count(ctx));
    return given ? given : text;
}

/* Adds `count` floats to the gradient of source `i`, from its float `first` on, if the source needs a gradient. */
HPMLC_FN void hpmlc_give(const hpml_node *n, int i, int64_t first, const float *from, int64_t count)
{
    float *to = n->src[i]->grad ? n->src[i]->grad + first : NULL;
    for (int64_t k = 0; to && k < count; k++) to[k] += from[k];
}

// ---------------------------------------------------------------------------------------------------------------------
// >>layer-ring   ring attention
// ---------------------------------------------------------------------------------------------------------------------
/* As hpml_attention (>>sequence of hpml.h has the formulas), but rank r has only block r of L = T / p time steps. In
   round k it has the keys and values of block r - k, which come from rank r - 1. Softmax over blocks (Milakov and
   Gimelshein 2018): for each query the largest score m until now, l = sum of exp(s - m), and o = sum of exp(s - m) v; a
   block with a larger score m' multiplies l and o by exp(m - m'). Saved for backward: log sum exp = m + log l. The
   backward pass sends the gradients of keys and values around with the keys and values: after p rounds the gradients of
   each block are back on the block's rank. Work is cut into blocks of HPMLC_QUERIES queries, so that scratch memory has
   (64, L) scores and not (L, L). */
#define HPMLC_QUERIES 64
typedef struct hpmlc_ring {
    const hpml_group *group;
    int64_t           heads, L;    /* heads of this rank; its time steps */
    size_t            block_bytes; /* bytes of keys and values of a full batch, (B, L, 2C) */
    float             scale;
    bool              causal;
} hpmlc_ring;

typedef struct hpmlc_ring_pass { /* one pass on one rank */
    const hpml_run   *run;
    hpml_node        *n;
    const hpmlc_ring *r;
    int64_t           B, L, C, D, heads;
    float            *kv, *dkv, *next; /* (B, L, 2C) keys and values, their gradients; what arrives */
    float            *s, *ds;          /* (QUERIES, L) scores and their gradients */
    int64_t           from;            /* number of the block of the sequence that is in kv */
} hpmlc_ring_pass;

HPMLC_FN hpmlc_ring_pass hpmlc_ring_begin(const hpml_run *run, hpml_node *n)
{
    const hpmlc_ring *r = (const hpmlc_ring *)n->attr.custom->user;
    HPMLC_ZERO(hpmlc_ring_pass, w);
    w.run   = run;
    w.n     = n;
    w.r     = r;
    w.B     = n->out->shape[0];
    w.L     = r->L;
    w.C     = n->out->shape[2];
    w.heads = r->heads;
    w.D     = w.C / r->heads;
    w.kv    = (float *)n->scratch;
    w.next  = w.kv + r->block_bytes / sizeof(float);
    w.dkv   = w.next + r->block_bytes / sizeof(float);
    w.s     = w.dkv + r->block_bytes / sizeof(float);
    w.ds    = w.s + HPMLC_QUERIES * w.L;
    w.from  = r->group->rank;
    for (int64_t t = 0; t < w.B * w.L; t++)
        memcpy(w.kv + t * 2 * w.C, n->src[0]->data + t * 3 * w.C + w.C, (size_t)(2 * w.C) * sizeof(float));
    return w;
}

/* Sends *block to the next rank and sets *block to the one received from the rank before, which has the same size. */
HPMLC_FN hpml_status hpmlc_ring_send(hpmlc_ring_pass *w, float **block)
{
    const hpml_group *g      = w->r->group;
    float            *in     = w->next;
    hpml_status       status = g->pass(g->user, *block, in, w->B * w->L * 2 * w->C, 1);
    w->next = *block;
    *block  = in;
    return status;
}

/* A block of queries q0 .. q0 + rows - 1 of sample b and head h, and the keys that the last of them may attend to. */
typedef struct hpmlc_ring_part {
    int64_t first, rows, keys;      /* first: the first query's row among all (B L) rows */
    const float *q, *k, *v, *o, *d_o;
    float   *out, *dq, *dk, *dv, *ml; /* ml (rows, heads, 2) */
} hpmlc_ring_part;

HPMLC_FN hpmlc_ring_part hpmlc_ring_part_of(const hpmlc_ring_pass *w, int64_t b, int64_t h, int64_t q0)
{
    const hpml_tensor *qkv = w->n->src[0], *out = w->n->out;
    bool               own = w->r->causal && w->from == w->r->group->rank;
    int64_t            at  = b * w->L * 2 * w->C + h * w->D; /* where head h's keys of sample b begin in kv */
    HPMLC_ZERO(hpmlc_ring_part, p);
    p.first = b * w->L + q0;
    p.rows  = w->L - q0 < HPMLC_QUERIES ? w->L - q0 : HPMLC_QUERIES;
    p.keys  = own ? q0 + p.rows : w->L;
    p.q     = qkv->data + p.first * 3 * w->C + h * w->D;
    p.k     = w->kv + at;
    p.v     = p.k + w->C;
    p.out   = out->data + p.first * w->C + h * w->D;
    p.o     = p.out;
    p.d_o   = out->grad ? out->grad + p.first * w->C + h * w->D : NULL;
    p.dq    = qkv->grad ? qkv->grad + p.first * 3 * w->C + h * w->D : NULL;
    p.dk    = w->dkv + at;
    p.dv    = p.dk + w->C;
    p.ml    = (float *)w->n->saved + (p.first * w->heads + h) * 2;
    return p;
}

/* Returns how many of the keys of part p the query in row `row` of p may attend to: all, or fewer because of the causal
   mask. */
HPMLC_FN int64_t hpmlc_ring_visible(const hpmlc_ring_pass *w, const hpmlc_ring_part *p, int64_t row)
{
    bool own = w->r->causal && w->from == w->r->group->rank;
    return own ? p->keys - p->rows + row + 1 : p->keys;
}

HPMLC_FN hpml_status hpmlc_ring_scores(const hpmlc_ring_pass *w, const hpmlc_ring_part *p)
{
    return hpml_sgemm(w->run->ctx, false, true, p->rows, p->keys, w->D, w->r->scale, p->q, 3 * w->C, p->k, 2 * w->C, 0,
                      w->s, p->keys);
}

HPMLC_FN hpml_status hpmlc_ring_forward_part(const hpmlc_ring_pass *w, const hpmlc_ring_part *p)
{
    hpml_status status = hpmlc_ring_scores(w, p);
    if (status != HPML_OK) return status;
    for (int64_t i = 0; i < p->rows; i++) {
        float  *s = w->s + i * p->keys, *ml = p->ml + i * w->heads * 2, *o = p->out + i * w->C, top = ml[0], sum = 0;
        int64_t visible = hpmlc_ring_visible(w, p, i);
        for (int64_t j = 0; j < visible; j++) top = s[j] > top ? s[j] : top;
        for (int64_t j = 0; j < p->keys; j++) {
            s[j] = j < visible ? expf(s[j] - top) : 0;
            sum += s[j];
        }
        float old = expf(ml[0] - top);
        for (int64_t d = 0; d < w->D; d++) o[d] *= old;
        ml[0] = top;
        ml[1] = ml[1] * old + sum;
    }
    return hpml_sgemm(w->run->ctx, false, false, p->rows, w->D, p->keys, 1, w->s, p->keys, p->v, 2 * w->C, 1, p->out,
                      w->C);
}

HPMLC_FN hpml_status hpmlc_ring_backward_part(const hpmlc_ring_pass *w, const hpmlc_ring_part *p)
{
    hpml_ctx   *ctx = w->run->ctx;
    int64_t     C = w->C, D = w->D, keys = p->keys, rows = p->rows;
    hpml_status status = hpmlc_ring_scores(w, p);
    if (status != HPML_OK) return status;
    hpml_sgemm(ctx, false, true, rows, keys, D, 1, p->d_o, C, p->v, 2 * C, 0, w->ds, keys);
    for (int64_t i = 0; i < rows; i++) {
        const float *o = p->o + i * C, *d_o = p->d_o + i * C;
        float       *s = w->s + i * keys, *ds = w->ds + i * keys, lse = p->ml[i * w->heads * 2], delta = 0;
        int64_t      visible = hpmlc_ring_visible(w, p, i);
        for (int64_t d = 0; d < D; d++) delta += o[d] * d_o[d];
        for (int64_t j = 0; j < keys; j++) {
            s[j]  = j < visible ? expf(s[j] - lse) : 0;
            ds[j] = s[j] * (ds[j] - delta) * w->r->scale;
        }
    }
    hpml_sgemm(ctx, false, false, rows, D, keys, 1, w->ds, keys, p->k, 2 * C, 1, p->dq, 3 * C);
    hpml_sgemm(ctx, true, false, keys, D, rows, 1, w->ds, keys, p->q, 3 * C, 1, p->dk, 2 * C);
    return hpml_sgemm(ctx, true, false, keys, D, rows, 1, w->s, keys, p->d_o, C, 1, p->dv, 2 * C);
}

/* Computes attention of this rank's queries, forward or backward, with w->kv, the block of keys and values of rank
   w->from, unless a causal mask hides all of that block. */
HPMLC_FN hpml_status hpmlc_ring_block(const hpmlc_ring_pass *w, bool backward)
{
    hpml_status status = HPML_OK;
    if (w->r->causal && w->from > w->r->group->rank) return HPML_OK;
    for (int64_t i = 0; i < w->B * w->heads && status == HPML_OK; i++)
        for (int64_t q0 = 0; q0 < w->L && status == HPML_OK; q0 += HPMLC_QUERIES) {
            hpmlc_ring_part p = hpmlc_ring_part_of(w, i / w->heads, i % w->heads, q0);
            status = backward ? hpmlc_ring_backward_part(w, &p) : hpmlc_ring_forward_part(w, &p);
        }
    return status;
}

HPMLC_FN hpml_status hpmlc_ring_forward(const hpml_run *run, hpml_node *n)
{
    hpmlc_ring_pass w  = hpmlc_ring_begin(run, n);
    float          *ml = (float *)n->saved; /* (B, L, heads, 2) */
    const int64_t   p = w.r->group->size, count = w.B * w.L * w.heads;
    hpml_status     status = HPML_OK;
    memset(n->out->data, 0, (size_t)(w.B * w.L * w.C) * sizeof(float));
    for (int64_t i = 0; i < count; i++) {
        ml[2 * i]     = -INFINITY;
        ml[2 * i + 1] = 0;
    }
    for (int64_t k = 0; k < p && status == HPML_OK; k++) {
        status = hpmlc_ring_block(&w, false);
        if (status == HPML_OK && k + 1 < p) status = hpmlc_ring_send(&w, &w.kv);
        w.from = (w.from + p - 1) % p;
    }
    for (int64_t i = 0; i < count * w.D; i++) n->out->data[i] /= ml[i / w.D * 2 + 1];
    for (int64_t i = 0; i < count; i++) ml[2 * i] += logf(ml[2 * i + 1]);
    return status;
}

HPMLC_FN hpml_status hpmlc_ring_backward(const hpml_run *run, hpml_node *n)
{
    hpmlc_ring_pass w = hpmlc_ring_begin(run, n);
    const int64_t   p = w.r->group->size;
    hpml_status     status = HPML_OK;
    memset(w.dkv, 0, w.r->block_bytes);
    for (int64_t k = 0; k < p && status == HPML_OK; k++) {
        status = hpmlc_ring_block(&w, true);
        if (status == HPML_OK && k + 1 < p) status = hpmlc_ring_send(&w, &w.kv);
        if (status == HPML_OK) status = hpmlc_ring_send(&w, &w.dkv);
        w.from = (w.from + p - 1) % p;
    }
    for (int64_t t = 0; t < w.B * w.L; t++)
        hpmlc_give(n, 0, t * 3 * w.C + w.C, w.dkv + t * 2 * w.C, 2 * w.C);
    return status;
}

HPML_API hpml_tensor *hpml_ring_attention(hpml_tensor *qkv, const hpml_attention_desc *desc)
{
    if (!hpmlc_recordable(qkv)) return NULL;
    HPMLC_DESC(hpml_attention_desc, d, desc);
    HPMLC_ZERO(hpmlc_ring, r);
    HPMLC_ZERO(hpml_custom, op);
    char text[96];
    r.group = hpml_ctx_group(qkv->ctx, HPML_AXIS_SEQUENCE);
    if (r.group->size == 1) return hpml_attention(qkv, desc);
    const int64_t C = qkv->shape[2] / 3;
    const int32_t parts = qkv->split[2] == HPML_AXIS_TENSOR ? hpml_ctx_group(qkv->ctx, HPML_AXIS_TENSOR)->size : 1;
    if (d._begin || d._end || qkv->ndim != 3 || qkv->shape[2] % 3 != 0 || d.heads < 1 || d.heads % parts != 0 ||
        parts * C % d.heads != 0)
        return hpmlc_no_layer(qkv->ctx, "ring_attention: input is %s with %d heads on %d ranks of the tensor axis; "
                              "expected (B, T / %d, 3C) with C a multiple of the heads, and these of the ranks",
                              hpml_tensor_text(qkv, text, sizeof text), d.heads, parts, r.group->size);
    r.heads       = d.heads / parts;
    r.L           = qkv->shape[1];
    r.causal      = !d.not_causal;
    r.scale       = d.scale != 0 ? d.scale : (float)(1 / sqrt((double)(C / r.heads)));
    r.block_bytes = (size_t)(qkv->shape[0] * r.L * 2 * C) * sizeof(float);
    op.name       = "ring_attention";
    op.forward    = hpmlc_ring_forward;
    op.backward   = hpmlc_ring_backward;
    op.collective = true;
    op.ndim       = 3;
    op.shape[0]   = qkv->shape[0];
    op.shape[1]   = r.L;
    op.shape[2]   = C;
    op.saved_bytes   = (size_t)(qkv->shape[0] * r.L * r.heads * 2) * sizeof(float);
    op.scratch_bytes = 3 * r.block_bytes + (size_t)(2 * HPMLC_QUERIES * r.L) * sizeof(float);
    op.flops         = 4.0 * (double)(qkv->shape[0] * r.L * C) * (double)(r.L * r.group->size) / (r.causal ? 2 : 1);
    hpml_tensor *y = hpmlc_record(&qkv, 1, &op, &r, sizeof r);
    if (!y) return NULL;
    memcpy(y->split, qkv->split, sizeof y->split);
    return y;
}

// ---------------------------------------------------------------------------------------------------------------------
// >>layer-halo   blocks of images with their neighbours' pixels: convolution, locally connected layers
// ---------------------------------------------------------------------------------------------------------------------
/* A halo is filled by up to four shifts of the whole grid: rows down and up, then columns right and left. Columns have
   the height of the block with its halo, so that the corners arrive with them. Each shift copies a strip at the inner
   edge of the block to a buffer, passes the buffer on, and copies what arrives to the halo on the other side. Backward
   runs the shifts in reverse order and direction, from halo to edge, and adds. The ranks at opposite ends of the grid
   are neighbours for hpml_group.pass; what they get from each other is ignored. */
typedef struct hpmlc_halo {
    const hpml_group *group;
    int64_t           rows, cols, h, w; /* rows and columns of the grid of blocks; pixels of the halo at each side */
    int64_t           images;           /* planes (images x channels) of a full batch */
} hpmlc_halo;

typedef struct hpmlc_strip { int64_t y, x, rows, cols; } hpmlc_strip; /* pixels of a block with its halo */
typedef struct hpmlc_shift {
    int         by;             /* passed to rank + by */
    bool        sends, receives; /* inside the image: there is a block to which, from which this rank's strip goes */
    hpmlc_strip edge, halo;
} hpmlc_shift;

/* Sets *s to halo shift i (0 down, 1 up, 2 right, 3 left) of blocks of H x W pixels, which passes pixels at an edge to
   the neighbouring rank. False: the shift is not needed, because there is one block in this direction, or no halo. */
HPMLC_FN bool hpmlc_halo_shift(const hpmlc_halo *k, int i, int64_t H, int64_t W, hpmlc_shift *s)
{
    const bool        vertical = i < 2, forward = i % 2 == 0;
    const int64_t     sizes[2] = { H, W }, halos[2] = { k->h, k->w }, counts[2] = { k->rows, k->cols };
    const int64_t     size = sizes[!vertical], halo = halos[!vertical], blocks = counts[!vertical];
    const int64_t     at = vertical ? k->group->rank / k->cols : k->group->rank % k->cols;
    const int         step = vertical ? (int)k->cols : 1;
    const hpmlc_strip rows = { 0, k->w, halo, W }, cols = { 0, 0, H + 2 * k->h, halo };
    s->by       = forward ? step : -step;
    s->sends    = forward ? at + 1 < blocks : at > 0;
    s->receives = forward ? at > 0 : at + 1 < blocks;
    s->edge     = vertical ? rows : cols;
    s->halo     = s->edge;
    int64_t *edge = vertical ? &s->edge.y : &s->edge.x;
    int64_t *beyond = vertical ? &s->halo.y : &s->halo.x;
    *edge   = forward ? size : halo;
    *beyond = forward ? 0 : size + halo;
    return blocks > 1 && halo > 0;
}

/* hpmlc_strip_copy copies a strip (a rectangle at an edge of an image) to the buffer (TAKE), copies the buffer to the
   strip (PUT), or adds the buffer to the strip (ADD). */
typedef enum hpmlc_copy { HPMLC_TAKE, HPMLC_PUT, HPMLC_ADD } hpmlc_copy;
/* Copies or adds, as `what` says, between `buffer` and the strip s of every plane of `image`, (planes, H, W). */
HPMLC_FN void hpmlc_strip_copy(hpmlc_copy what, float *image, int64_t planes, int64_t H, int64_t W, hpmlc_strip s,
                               float *buffer)
{
    const size_t bytes = (size_t)s.cols * sizeof(float);
    for (int64_t row = 0; row < planes * s.rows; row++) {
        float *p = image + (row / s.rows * H + s.y + row % s.rows) * W + s.x, *b = buffer + row * s.cols;
        if (what == HPMLC_TAKE) memcpy(b, p, bytes);
        if (what == HPMLC_PUT) memcpy(p, b, bytes);
        for (int64_t i = 0; what == HPMLC_ADD && i < s.cols; i++) p[i] += b[i];
    }
}

HPMLC_FN hpml_status hpmlc_halo_exchange(hpml_node *n, float *image, bool backward)
{
    const hpmlc_halo *k = (const hpmlc_halo *)n->attr.custom->user;
    const int64_t     H = n->out->shape[2], W = n->out->shape[3], planes = n->out->shape[0] * n->out->shape[1];
    hpml_status       status = HPML_OK;
    for (int j = 0; j < 4 && status == HPML_OK; j++) {
        hpmlc_shift s;
        if (!hpmlc_halo_shift(k, backward ? 3 - j : j, H - 2 * k->h, W - 2 * k->w, &s)) continue;
        int64_t count = planes * s.edge.rows * s.edge.cols; /* all ranks have the same samples */
        float  *out = (float *)n->scratch, *in = out + count;
        hpmlc_strip_copy(HPMLC_TAKE, image, planes, H, W, backward ? s.halo : s.edge, out);
        status = k->group->pass(k->group->user, out, in, count, backward ? -s.by : s.by);
        if (status != HPML_OK) return status;
        if (backward && s.sends) hpmlc_strip_copy(HPMLC_ADD, image, planes, H, W, s.edge, in);
        if (!backward && s.receives) hpmlc_strip_copy(HPMLC_PUT, image, planes, H, W, s.halo, in);
    }
    return status;
}

/* Returns the region of y that is this rank's own block of the image, without the halo around it. */
HPMLC_FN hpmlc_strip hpmlc_halo_inside(const hpmlc_halo *k, const hpml_tensor *y)
{
    hpmlc_strip s = { k->h, k->w, y->shape[2] - 2 * k->h, y->shape[3] - 2 * k->w };
    return s;
}

HPMLC_FN hpml_status hpmlc_halo_forward(const hpml_run *run HPMLC_UNUSED, hpml_node *n)
{
    const hpmlc_halo  *k = (const hpmlc_halo *)n->attr.custom->user;
    const hpml_tensor *y = n->out;
    memset(y->data, 0, (size_t)hpml_tensor_count(y) * sizeof(float));
    hpmlc_strip_copy(HPMLC_PUT, y->data, y->shape[0] * y->shape[1], y->shape[2], y->shape[3], hpmlc_halo_inside(k, y),
                     n->src[0]->data);
    return hpmlc_halo_exchange(n, y->data, false);
}

HPMLC_FN hpml_status hpmlc_halo_backward(const hpml_run *run, hpml_node *n)
{
    const hpmlc_halo  *k = (const hpmlc_halo *)n->attr.custom->user;
    const hpml_tensor *y = n->out;
    float             *inside = (float *)n->scratch; /* scratch array of the shape of x, unused after the exchange */
    hpml_status        status = hpmlc_halo_exchange(n, y->grad, true);
    if (status != HPML_OK) return status;
    hpmlc_strip_copy(HPMLC_TAKE, y->grad, y->shape[0] * y->shape[1], y->shape[2], y->shape[3], hpmlc_halo_inside(k, y),
                     inside);
    hpml_node_give(run, n, 0, inside);
    return HPML_OK;
}

HPML_API hpml_tensor *hpml_halo(hpml_tensor *x, int32_t rows, int32_t cols, int32_t halo_h, int32_t halo_w)
{
    char text[96];
    if (!hpmlc_recordable(x)) return NULL;
    const hpml_group *g = hpml_ctx_group(x->ctx, HPML_AXIS_SEQUENCE);
    hpmlc_halo        k = { g, rows, cols, halo_h, halo_w, x->shape[0] * x->shape[1] };
    if (g->size == 1) k.rows = k.cols = 1;
    if (x->ndim != 4 || x->layout != HPML_NCHW || halo_h < 0 || halo_w < 0 || rows < 1 || cols < 1)
        return hpmlc_no_layer(x->ctx, "halo: input is %s with a halo of %d x %d pixels, grid %d x %d; expected images "
                              "(B, C, H, W), NCHW, halos of 0 or more and a grid of 1 or more",
                              hpml_tensor_text(x, text, sizeof text), halo_h, halo_w, rows, cols);
    if (k.rows * k.cols != g->size)
        return hpmlc_no_layer(x->ctx, "halo: a grid of %d x %d blocks on %d ranks of the sequence axis; expected one "
                              "block for each rank, or one rank", rows, cols, g->size);
    if ((k.rows > 1 && x->shape[2] < halo_h) || (k.cols > 1 && x->shape[3] < halo_w))
        return hpmlc_no_layer(x->ctx, "halo: blocks of %s have fewer pixels than a halo of %d x %d; take fewer ranks "
                              "or a smaller kernel", hpml_tensor_text(x, text, sizeof text), halo_h, halo_w);
    HPMLC_ZERO(hpml_custom, op);
    op.name       = "halo";
    op.forward    = hpmlc_halo_forward;
    op.backward   = hpmlc_halo_backward;
    op.keeps      = HPML_KEEP_NONE;
    op.collective = g->size > 1;
    op.ndim       = 4;
    memcpy(op.shape, x->shape, sizeof op.shape);
    op.shape[2] += 2 * halo_h;
    op.shape[3] += 2 * halo_w;
    int64_t largest = 2 * (op.shape[2] * halo_w + x->shape[3] * halo_h) + x->shape[2] * x->shape[3];
    op.scratch_bytes = (size_t)(k.images * largest) * sizeof(float);
    return hpmlc_record(&x, 1, &op, &k, sizeof k);
}

HPML_API hpml_tensor *hpml_conv2d_rows(hpml_tensor *x, int64_t out, const hpml_conv2d_desc *desc)
{
    if (!hpmlc_recordable(x)) return NULL;
    HPMLC_DESC(hpml_conv2d_desc, d, desc);
    const hpml_group *g = hpml_ctx_group(x->ctx, HPML_AXIS_SEQUENCE);
    const int32_t     pad_w = d.padding_w == 0 ? d.padding_h : d.padding_w;
    if (d.kernel_h < 1 || d.kernel_h % 2 == 0 || d.padding_h != d.kernel_h / 2 || d.stride_h > 1 || d.dilation_h > 1)
        return hpmlc_no_layer(x->ctx, "conv2d_rows \"%s\": kernel_h %d, padding_h %d, stride_h %d, dilation_h %d; "
                              "expected an odd kernel_h, padding_h = kernel_h / 2, stride and dilation 1, so that each "
                              "rank computes as many rows as it has", d.name ? d.name : "", d.kernel_h, d.padding_h,
                              d.stride_h, d.dilation_h);
    hpml_tensor *tall = hpml_halo(x, g->size, 1, d.padding_h, 0);
    d.stride_w   = d.stride_w ? d.stride_w : 1;
    d.dilation_w = d.dilation_w ? d.dilation_w : 1;
    d.kernel_w   = d.kernel_w ? d.kernel_w : d.kernel_h;
    d.padding_w  = pad_w;
    d.padding_h  = 0;
    hpml_tensor *y = hpml_conv2d(tall, out, &d);
    if (y) y->split[2] = x->split[2];
    return y;
}

/* Locally connected layer, a convolution with weights of its own for each pixel p: y[p] = W_p patch_p + bias_p, with
   patches of C kernel^2 numbers. Sources: x with its halo, weight, bias. Each pixel is one matrix product, whose rows
   are the samples of the batch. */
typedef struct hpmlc_local { int64_t kernel, rows, cols; } hpmlc_local; /* rows, cols: blocks in this rank's image */
typedef struct hpmlc_pixel { /* one pixel's arrays */
    int64_t B, K, out, y, x;
    float  *patch, *result; /* (B, K), (B, out) */
    int64_t weight, bias;   /* index of the pixel's first weight; of its first bias */
} hpmlc_pixel;

HPMLC_FN hpmlc_pixel hpmlc_pixel_of(hpml_node *n, int64_t p)
{
    const hpmlc_local *k = (const hpmlc_local *)n->attr.custom->user;
    const int64_t      H = n->out->shape[2], W = n->out->shape[3], h = H / k->rows, w = W / k->cols;
    HPMLC_ZERO(hpmlc_pixel, c);
    c.B      = n->out->shape[0];
    c.out    = n->out->shape[1];
    c.K      = n->src[0]->shape[1] * k->kernel * k->kernel;
    c.y      = p / W;
    c.x      = p % W;
    c.patch  = (float *)n->scratch;
    c.result = c.patch + c.B * c.K;
    const int64_t place = (c.y / h * k->cols + c.x / w) * h * w + c.y % h * w + c.x % w; /* in weight: block by block */
    c.weight = place * c.out * c.K;
    c.bias   = place * c.out;
    return c;
}

/* For output pixel c copies the windows that its kernel covers from the images x (B, C, H, W) to c->patch; add: adds
   c->patch to these windows of x, which is then the gradient of the images. */
HPMLC_FN void hpmlc_pixel_patch(const hpml_node *n, const hpmlc_pixel *c, float *x, bool add)
{
    const hpml_tensor *t = n->src[0];
    const int64_t      kernel = ((const hpmlc_local *)n->attr.custom->user)->kernel;
    const hpmlc_strip  s = { c->y, c->x, kernel, kernel };
    hpmlc_strip_copy(add ? HPMLC_ADD : HPMLC_TAKE, x, c->B * t->shape[1], t->shape[2], t->shape[3], s, c->patch);
}

HPMLC_FN hpml_status hpmlc_local_forward(const hpml_run *run, hpml_node *n)
{
    const int64_t pixels = n->out->shape[2] * n->out->shape[3];
    hpml_status   status = HPML_OK;
    for (int64_t p = 0; p < pixels && status == HPML_OK; p++) {
        hpmlc_pixel  c = hpmlc_pixel_of(n, p);
        const float *w = n->src[1]->data + c.weight, *bias = n->src[2]->data + c.bias; /* (out, K), (out) */
        hpmlc_pixel_patch(n, &c, n->src[0]->data, false);
        status = hpml_sgemm(run->ctx, false, true, c.B, c.out, c.K, 1, c.patch, c.K, w, c.K, 0, c.result, c.out);
        for (int64_t i = 0; i < c.B * c.out; i++) n->out->data[i * pixels + p] = c.result[i] + bias[i % c.out];
    }
    return status;
}

HPMLC_FN hpml_status hpmlc_local_backward(const hpml_run *run, hpml_node *n)
{
    const int64_t pixels = n->out->shape[2] * n->out->shape[3];
    hpml_status   status = HPML_OK;
    for (int64_t p = 0; p < pixels && status == HPML_OK; p++) {
        hpmlc_pixel  c = hpmlc_pixel_of(n, p);
        const float *w = n->src[1]->data + c.weight;
        for (int64_t i = 0; i < c.B * c.out; i++) c.result[i] = n->out->grad[i * pixels + p];
        for (int64_t b = 0; b < c.B; b++) hpmlc_give(n, 2, c.bias, c.result + b * c.out, c.out);
        hpmlc_pixel_patch(n, &c, n->src[0]->data, false);
        if (n->src[1]->grad)
            status = hpml_sgemm(run->ctx, true, false, c.out, c.K, c.B, 1, c.result, c.out, c.patch, c.K, 1,
                                n->src[1]->grad + c.weight, c.K);
        if (!n->src[0]->grad || status != HPML_OK) continue;
        status = hpml_sgemm(run->ctx, false, false, c.B, c.K, c.out, 1, c.result, c.out, w, c.K, 0, c.patch, c.K);
        hpmlc_pixel_patch(n, &c, n->src[0]->grad, true);
    }
    return status;
}

HPML_API hpml_tensor *hpml_local2d(hpml_tensor *x, int64_t out, const hpml_local2d_desc *desc)
{
    char text[96], own_name[32];
    if (!hpmlc_recordable(x)) return NULL;
    HPMLC_DESC(hpml_local2d_desc, d, desc);
    const int32_t rows = d.rows ? d.rows : 1;
    const int32_t cols = d.cols ? d.cols : 1, half = d.kernel / 2;
    const bool    alone = hpml_ctx_group(x->ctx, HPML_AXIS_SEQUENCE)->size == 1; /* this rank has all blocks */
    hpmlc_local   k = { d.kernel, 1, 1 };
    const char   *name = hpmlc_layer_name(x->ctx, d.name, "local2d", own_name);
    if (alone) {
        k.rows = rows;
        k.cols = cols;
    }
    if (d._begin || d._end || x->ndim != 4 || out < 1 || d.kernel < 1 || d.kernel % 2 == 0 || rows < 1 || cols < 1 ||
        x->shape[2] % k.rows != 0 || x->shape[3] % k.cols != 0)
        return hpmlc_no_layer(x->ctx, "local2d \"%s\": input is %s, out %lld, kernel %d, grid %d x %d; expected images "
                              "(B, C, H, W) that the grid divides, and an odd kernel", name,
                              hpml_tensor_text(x, text, sizeof text), (long long)out, d.kernel, rows, cols);
    hpml_tensor  *src[3] = { hpml_halo(x, rows, cols, half, half), NULL, NULL };
    const int64_t fan = x->shape[1] * d.kernel * d.kernel, pixels = x->shape[2] / k.rows * (x->shape[3] / k.cols);
    const int64_t shape[4] = { (int64_t)rows * cols, pixels, out, fan };
    src[1] = hpmlc_layer_param(x->ctx, name, "weight", HPML_AXIS_SEQUENCE, sqrt(6 / (double)fan), 4, shape);
    src[2] = hpmlc_layer_param(x->ctx, name, "bias", HPML_AXIS_SEQUENCE, 0, 3, shape);
    HPMLC_ZERO(hpml_custom, op);
    op.name     = "local2d";
    op.forward  = hpmlc_local_forward;
    op.backward = hpmlc_local_backward;
    op.keeps    = HPML_KEEP_SRC(0);
    op.ndim     = 4;
    memcpy(op.shape, x->shape, sizeof op.shape);
    op.shape[1]      = out;
    op.scratch_bytes = (size_t)(x->shape[0] * (fan + out)) * sizeof(float);
    op.flops         = 2.0 * (double)(x->shape[0] * x->shape[2] * x->shape[3]) * (double)(fan * out);
    hpml_tensor *y = hpmlc_record(src, 3, &op, &k, sizeof k);
    if (y) memcpy(y->split, x->split, sizeof y->split);
    return y && d.activation != HPML_ACT_NONE ? hpml_activation(y, d.activation, 0) : y;
}

// ---------------------------------------------------------------------------------------------------------------------
// >>layer-experts   mixture of experts by all-to-all
// ---------------------------------------------------------------------------------------------------------------------
/* One op from tokens x and probabilities p to y, because a rank without samples must still compute for other ranks'
   tokens. Buffers of R = experts * cap rows (places; cap: tokens of a rank that an expert takes at most) in two orders:
     at home       row e cap + s: place s of expert e, for this rank's tokens
     at experts    row (r local + i) cap + s: place s that rank r fills of local expert i; `local` experts per rank
   hpml_group.swap of cap local rows for each rank leads from one order to the other, in both directions. Forward: rows
   of x go to their places at home, by swap to `in`, at experts; hid = relu(in w1^T + b1); hid w2^T + b2 goes by swap to
   `back`, at home; y = sum of gate times back over the experts chosen for a token. Gradients go the same ways backward.
   Saved: in (R, D), hid (R, hidden), back (R, D), and for each token and choice the place (-1: none left) and the gate.
   Sources: x, p, w1, b1, w2, b2. */
typedef struct hpmlc_experts {
    const hpml_group *group;
    int64_t           experts, local, cap, D, hidden, tokens; /* local: of this rank; tokens: of a full batch */
    int32_t           top;
} hpmlc_experts;

typedef struct hpmlc_experts_arrays {
    float   *in, *hid, *back, *gate; /* saved: (R, D), (R, hidden), (R, D), (tokens, top) for R = experts * cap rows */
    int32_t *place, *choice;         /* saved: (tokens, top) of each choice of a token: its row at home; its expert */
    float   *a, *b, *d_hid;          /* scratch: (R, D), (R, D), (cap, hidden) for R = experts * cap rows */
    int64_t  rows, tokens;           /* rows: experts * cap; tokens of this batch */
} hpmlc_experts_arrays;

HPMLC_FN hpmlc_experts_arrays hpmlc_experts_of(hpml_node *n)
{
    const hpmlc_experts *k = (const hpmlc_experts *)n->attr.custom->user;
    HPMLC_ZERO(hpmlc_experts_arrays, w);
    w.rows   = k->experts * k->cap;
    w.tokens = hpml_tensor_count(n->out) / k->D;
    w.in     = (float *)n->saved;
    w.hid    = w.in + w.rows * k->D;
    w.back   = w.hid + w.rows * k->hidden;
    w.gate   = w.back + w.rows * k->D;
    w.place  = (int32_t *)(w.gate + k->tokens * k->top);
    w.choice = w.place + k->tokens * k->top;
    w.a      = (float *)n->scratch;
    w.b      = w.a + w.rows * k->D;
    w.d_hid  = w.b + w.rows * k->D;
    return w;
}

/* Returns the index of the largest of n numbers x, the first of equal ones, ignoring x[but] (-1: none is ignored). */
HPMLC_FN int32_t hpmlc_largest(const float *x, int64_t n, int32_t but)
{
    int32_t best = but == 0 ? 1 : 0;
    for (int32_t i = best + 1; i < n; i++)
        if (i != but && x[i] > x[best]) best = i;
    return best;
}

/* Chooses experts and places for all tokens from p, (tokens, experts) probabilities: sets w->choice, w->gate and
   w->place (-1: the expert is full). used: (experts) gets the number of places that are taken at each expert. */
HPMLC_FN void hpmlc_experts_route(const hpmlc_experts *k, const hpmlc_experts_arrays *w, const float *p, float *used)
{
    for (int64_t e = 0; e < k->experts; e++) used[e] = 0;
    for (int64_t j = 0; j < k->top * w->tokens; j++) { /* first choices of all tokens, then second ones */
        int64_t      t = j % w->tokens, i = t * k->top + j / w->tokens;
        const float *of = p + t * k->experts;
        int32_t      e = hpmlc_largest(of, k->experts, i % k->top ? w->choice[i - 1] : -1);
        w->choice[i] = e;
        w->gate[i]   = of[e];
        w->place[i]  = -1;
        if (used[e] < (float)k->cap) w->place[i] = (int32_t)(e * k->cap + (int64_t)used[e]++);
    }
    for (int64_t t = 0; t < w->tokens && k->top == 2; t++) {
        float sum = w->gate[2 * t] + w->gate[2 * t + 1];
        w->gate[2 * t] = sum > 0 ? w->gate[2 * t] / sum : 0.5f;
        w->gate[2 * t + 1] = 1 - w->gate[2 * t];
    }
}

HPMLC_FN hpml_status hpmlc_experts_swap(const hpmlc_experts *k, const float *from, float *to)
{
    return k->group->swap(k->group->user, from, to, k->local * k->cap * k->D);
}

/* to[i] = b[i % width], for n numbers: a bias, to which a matrix product is added. */
HPMLC_FN void hpmlc_spread_bias(float *to, const float *b, int64_t n, int64_t width)
{
    for (int64_t i = 0; i < n; i++) to[i] = b[i % width];
}

/* Runs the rows of block `block`, those of one rank for one local expert, through the expert; results go to w->a. */
HPMLC_FN hpml_status hpmlc_expert_forward(hpml_ctx *ctx, const hpml_node *n, const hpmlc_experts_arrays *w,
                                          int64_t block)
{
    const hpmlc_experts *k = (const hpmlc_experts *)n->attr.custom->user;
    const int64_t e = block % k->local, D = k->D, H = k->hidden, cap = k->cap;
    const float  *w1 = n->src[2]->data + e * H * D, *w2 = n->src[4]->data + e * D * H; /* (H, D), (D, H) */
    float        *in = w->in + block * cap * D, *hid = w->hid + block * cap * H, *out = w->a + block * cap * D;
    hpmlc_spread_bias(hid, n->src[3]->data + e * H, cap * H, H);
    hpmlc_spread_bias(out, n->src[5]->data + e * D, cap * D, D);
    hpml_status status = hpml_sgemm(ctx, false, true, cap, H, D, 1, in, D, w1, D, 1, hid, H);
    for (int64_t i = 0; i < cap * H; i++) hid[i] = hid[i] > 0 ? hid[i] : 0;
    return status == HPML_OK ? hpml_sgemm(ctx, false, true, cap, D, H, 1, hid, H, w2, H, 1, out, D) : status;
}

HPMLC_FN hpml_status hpmlc_experts_forward(const hpml_run *run, hpml_node *n)
{
    const hpmlc_experts *k = (const hpmlc_experts *)n->attr.custom->user;
    hpmlc_experts_arrays w = hpmlc_experts_of(n);
    const size_t         row = (size_t)k->D * sizeof(float);
    hpmlc_experts_route(k, &w, n->src[1]->data, w.b);
    memset(w.a, 0, (size_t)w.rows * row);
    for (int64_t i = 0; i < w.tokens * k->top; i++)
        if (w.place[i] >= 0) memcpy(w.a + w.place[i] * k->D, n->src[0]->data + i / k->top * k->D, row);
    hpml_status status = hpmlc_experts_swap(k, w.a, w.in);
    for (int64_t b = 0; b < k->experts && status == HPML_OK; b++)
        status = hpmlc_expert_forward(run->ctx, n, &w, b);
    if (status == HPML_OK) status = hpmlc_experts_swap(k, w.a, w.back);
    memset(n->out->data, 0, (size_t)w.tokens * row);
    for (int64_t i = 0; i < w.tokens * k->top; i++) {
        float       *y = n->out->data + i / k->top * k->D;
        const float *z = w.back + w.place[i] * k->D;
        for (int64_t d = 0; w.place[i] >= 0 && d < k->D; d++) y[d] += w.gate[i] * z[d];
    }
    return status;
}

/* Computes, from the gradients of an expert's results in w->b, those of its parameters and, in w->a, of its input. */
HPMLC_FN hpml_status hpmlc_expert_backward(hpml_ctx *ctx, const hpml_node *n, const hpmlc_experts_arrays *w,
                                           int64_t block)
{
    const hpmlc_experts *k = (const hpmlc_experts *)n->attr.custom->user;
    const int64_t e = block % k->local, D = k->D, H = k->hidden, cap = k->cap;
    const float  *w1 = n->src[2]->data + e * H * D, *w2 = n->src[4]->data + e * D * H;
    const float  *in = w->in + block * cap * D, *hid = w->hid + block * cap * H, *dy = w->b + block * cap * D;
    float        *dw1 = n->src[2]->grad, *dw2 = n->src[4]->grad;
    for (int64_t s = 0; s < cap; s++) hpmlc_give(n, 5, e * D, dy + s * D, D);
    if (dw2) hpml_sgemm(ctx, true, false, D, H, cap, 1, dy, D, hid, H, 1, dw2 + e * D * H, H);
    hpml_status status = hpml_sgemm(ctx, false, false, cap, H, D, 1, dy, D, w2, H, 0, w->d_hid, H);
    for (int64_t i = 0; i < cap * H; i++)
        if (!(hid[i] > 0)) w->d_hid[i] = 0;
    for (int64_t s = 0; s < cap; s++) hpmlc_give(n, 3, e * H, w->d_hid + s * H, H);
    if (dw1) hpml_sgemm(ctx, true, false, H, D, cap, 1, w->d_hid, H, in, D, 1, dw1 + e * H * D, D);
    if (status != HPML_OK) return status;
    return hpml_sgemm(ctx, false, false, cap, D, H, 1, w->d_hid, H, w1, D, 0, w->a + block * cap * D, D);
}

/* Adds the terms of token t to the gradients of the router's probabilities, source 1 of n. d_gate (top): the gradients
   of the weights by which the results of the token's 1 or 2 experts (`top` of them) are multiplied. */
HPMLC_FN void hpmlc_experts_give_gate(const hpml_node *n, const hpmlc_experts_arrays *w, int64_t t, const float *d_gate)
{
    const hpmlc_experts *k = (const hpmlc_experts *)n->attr.custom->user;
    const int32_t       *choice = w->choice + t * k->top;
    const float         *g = w->gate + t * k->top, *p = n->src[1]->data + t * k->experts;
    float                mean = k->top == 2 ? d_gate[0] * g[0] + d_gate[1] * g[1] : 0;
    float                sum = k->top == 2 ? p[choice[0]] + p[choice[1]] : 1;
    for (int32_t i = 0; i < k->top && sum > 0; i++) {
        float d = (d_gate[i] - mean) / sum;
        hpmlc_give(n, 1, t * k->experts + choice[i], &d, 1);
    }
}

HPMLC_FN hpml_status hpmlc_experts_backward(const hpml_run *run, hpml_node *n)
{
    const hpmlc_experts *k = (const hpmlc_experts *)n->attr.custom->user;
    hpmlc_experts_arrays w = hpmlc_experts_of(n);
    memset(w.a, 0, (size_t)(w.rows * k->D) * sizeof(float));
    for (int64_t t = 0; t < w.tokens; t++) {
        const float *dy = n->out->grad + t * k->D;
        float        d_gate[2] = { 0, 0 };
        for (int64_t i = t * k->top; i < (t + 1) * k->top; i++) {
            if (w.place[i] < 0) continue;
            float       *to = w.a + w.place[i] * k->D;
            const float *z = w.back + w.place[i] * k->D;
            for (int64_t d = 0; d < k->D; d++) {
                to[d] = w.gate[i] * dy[d];
                d_gate[i % k->top] += dy[d] * z[d];
            }
        }
        hpmlc_experts_give_gate(n, &w, t, d_gate);
    }
    hpml_status status = hpmlc_experts_swap(k, w.a, w.b);
    for (int64_t b = 0; b < k->experts && status == HPML_OK; b++)
        status = hpmlc_expert_backward(run->ctx, n, &w, b);
    if (status == HPML_OK) status = hpmlc_experts_swap(k, w.a, w.b);
    for (int64_t i = 0; i < w.tokens * k->top; i++)
        if (w.place[i] >= 0) hpmlc_give(n, 0, i / k->top * k->D, w.b + w.place[i] * k->D, k->D);
    return status;
}

/* Computes the loss for balance (see hpml_experts): experts x sum over e of f_e P_e, f_e the share of the tokens whose
   first choice is expert e, P_e the mean over the tokens of the router's probability for expert e; f counts as
   constant. Saved for backward: experts x f_e / tokens for each e. */
HPMLC_FN hpml_status hpmlc_balance_forward(const hpml_run *run HPMLC_UNUSED, hpml_node *n)
{
    const float  *p = n->src[0]->data;
    const int64_t E = n->src[0]->shape[n->src[0]->ndim - 1], tokens = hpml_tensor_count(n->src[0]) / E;
    float        *f = (float *)n->saved;
    double        sum = 0;
    memset(f, 0, (size_t)E * sizeof(float));
    for (int64_t t = 0; t < tokens; t++)
        f[hpmlc_largest(p + t * E, E, -1)] += (float)E / ((float)tokens * (float)tokens);
    for (int64_t i = 0; i < tokens * E; i++) sum += (double)(f[i % E] * p[i]);
    n->out->data[0] = (float)sum;
    return HPML_OK;
}
HPMLC_FN hpml_status hpmlc_balance_backward(const hpml_run *run HPMLC_UNUSED, hpml_node *n)
{
    const float  *f = (const float *)n->saved;
    const int64_t E = n->src[0]->shape[n->src[0]->ndim - 1];
    for (int64_t i = 0; i < hpml_tensor_count(n->src[0]); i++) {
        float d = n->out->grad[0] * f[i % E];
        hpmlc_give(n, 0, i, &d, 1);
    }
    return HPML_OK;
}
HPMLC_FN hpml_tensor *hpmlc_balance(hpml_tensor *p)
{
    HPMLC_ZERO(hpml_custom, op);
    if (!p) return NULL;
    op.name        = "balance";
    op.forward     = hpmlc_balance_forward;
    op.backward    = hpmlc_balance_backward;
    op.keeps       = HPML_KEEP_NONE;
    op.one_number  = true;
    op.saved_bytes = (size_t)p->shape[p->ndim - 1] * sizeof(float);
    return hpml_custom_op(&p, 1, &op);
}

/* Records the op that applies the experts to x, weighted by the probabilities `p`; creates the experts' parameters. */
HPMLC_FN hpml_tensor *hpmlc_experts_op(hpml_tensor *x, hpml_tensor *p, const hpmlc_experts *k, const char *name)
{
    const int64_t w1[3] = { k->experts, k->hidden, k->D }, w2[3] = { k->experts, k->D, k->hidden };
    const double  scale1 = sqrt(6 / (double)k->D), scale2 = sqrt(6 / (double)k->hidden);
    hpml_tensor  *src[6] = { x, p, NULL, NULL, NULL, NULL };
    src[2] = hpmlc_layer_param(x->ctx, name, "w1", HPML_AXIS_EXPERT, scale1, 3, w1);
    src[3] = hpmlc_layer_param(x->ctx, name, "b1", HPML_AXIS_EXPERT, 0, 2, w1);
    src[4] = hpmlc_layer_param(x->ctx, name, "w2", HPML_AXIS_EXPERT, scale2, 3, w2);
    src[5] = hpmlc_layer_param(x->ctx, name, "b2", HPML_AXIS_EXPERT, 0, 2, w2);
    const int64_t rows = k->experts * k->cap, choices = k->tokens * k->top;
    HPMLC_ZERO(hpml_custom, op);
    op.name          = "experts";
    op.forward       = hpmlc_experts_forward;
    op.backward      = hpmlc_experts_backward;
    op.collective    = k->group->size > 1;
    op.keeps         = HPML_KEEP_SRC(1);
    op.saved_bytes   = (size_t)(rows * (2 * k->D + k->hidden) + 3 * choices) * sizeof(float);
    op.scratch_bytes = (size_t)(rows * 2 * k->D + k->cap * k->hidden) * sizeof(float);
    op.flops         = 4.0 * (double)(rows * k->D) * (double)k->hidden;
    hpml_tensor *y = hpmlc_record(src, 6, &op, k, sizeof *k);
    if (y) memcpy(y->split, x->split, sizeof y->split);
    return y;
}

HPML_API hpml_tensor *hpml_experts(hpml_tensor *x, const hpml_experts_desc *desc, hpml_tensor **balance)
{
    char text[96], own_name[32], gate[256];
    if (balance) *balance = NULL;
    if (!hpmlc_recordable(x)) return NULL;
    HPMLC_DESC(hpml_experts_desc, d, desc);
    HPMLC_ZERO(hpmlc_experts, k);
    const char *name = hpmlc_layer_name(x->ctx, d.name, "experts", own_name);
    k.group   = hpml_ctx_group(x->ctx, HPML_AXIS_EXPERT);
    k.experts = d.experts;
    k.local   = d.experts / k.group->size;
    k.top     = d.top ? d.top : 1;
    k.D       = x->ndim > 0 ? x->shape[x->ndim - 1] : 1;
    k.hidden  = d.hidden ? d.hidden : 4 * k.D;
    k.tokens  = hpml_tensor_count(x) / k.D;
    if (d.capacity == 0) d.capacity = 1.25f;
    if (d._begin || d._end || x->ndim < 2 || d.experts < 2 || k.top < 1 || k.top > 2 || k.hidden < 1 ||
        !(d.capacity > 0))
        return hpmlc_no_layer(x->ctx, "experts \"%s\": input is %s, %d experts, top %d, hidden %lld, capacity %g; "
                              "expected (.., D), 2 or more experts, top 1 or 2, the others above 0", name,
                              hpml_tensor_text(x, text, sizeof text), d.experts, d.top, (long long)d.hidden,
                              (double)d.capacity);
    if (k.local * k.group->size != k.experts)
        return hpmlc_no_layer(x->ctx, "experts \"%s\": %d experts on %d ranks of the expert axis; expected a multiple "
                              "of the ranks", name, d.experts, k.group->size);
    double cap = ceil((double)d.capacity * k.top * (double)k.tokens / (double)k.experts);
    k.cap = cap < (double)k.tokens ? (int64_t)cap : k.tokens; /* a token is at most once in an expert */
    if (k.cap < 1) k.cap = 1;
    snprintf(gate, sizeof gate, "%s.gate", name);
    HPMLC_ZERO(hpml_linear_desc, linear);
    linear.name    = gate;
    linear.no_bias = true;
    hpml_tensor *p = hpml_softmax(hpml_linear(x, k.experts, &linear));
    if (balance) *balance = hpmlc_balance(p);
    return hpmlc_experts_op(x, p, &k, name);
}

// ---------------------------------------------------------------------------------------------------------------------
// >>layer-members   collectives as layers; dense layers whose ranks have samples of their own
// ---------------------------------------------------------------------------------------------------------------------
/* Collectives as layers, made of hpml_group_sum and hpml_group_gather, whose gradients are, on every axis but TENSOR,
   those of the sum of all ranks' losses. A factor of 1 on the root and 0 on the other ranks makes a rank the root: a
   BCAST multiplies its source by this factor, a REDUCE or GATHER its result. */
typedef enum hpmlc_relay_kind { HPMLC_BCAST, HPMLC_REDUCE, HPMLC_GATHER } hpmlc_relay_kind;
HPMLC_FN hpml_tensor *hpmlc_relay(hpml_tensor *x, hpml_axis axis, hpmlc_relay_kind kind, int root)
{
    static const char *const names[] = { "layer_bcast", "layer_reduce", "layer_gather" };
    if (!hpmlc_recordable(x)) return NULL;
    const hpml_group *g = hpml_ctx_group(x->ctx, axis);
    if (root >= g->size || root < (kind == HPMLC_BCAST ? 0 : -1) || axis == HPML_AXIS_TENSOR)
        return hpmlc_no_layer(x->ctx, "%s: root %d of %d ranks of the %s axis; expected a rank%s of another axis than "
                              "tensor, whose ranks have one loss", names[kind], root, g->size, hpml_axis_name(axis),
                              kind == HPMLC_BCAST ? "" : ", or -1 for all,");
    const float mine = root < 0 || root == g->rank ? 1.0f : 0.0f;
    if (kind == HPMLC_BCAST) x = hpml_scale(x, mine, 0);
    x = kind == HPMLC_GATHER ? hpml_group_gather(x, axis, 1) : hpml_group_sum(x, axis);
    if (x && g->size > 1) x->needs_grad = true; /* backward runs on all ranks, also where x is an input */
    return x && kind != HPMLC_BCAST && root >= 0 ? hpml_scale(x, mine, 0) : x;
}
HPML_API hpml_tensor *hpml_layer_bcast(hpml_tensor *x, hpml_axis axis, int root)
{
    return hpmlc_relay(x, axis, HPMLC_BCAST, root);
}
HPML_API hpml_tensor *hpml_layer_reduce(hpml_tensor *x, hpml_axis axis, int root)
{
    return hpmlc_relay(x, axis, HPMLC_REDUCE, root);
}
HPML_API hpml_tensor *hpml_layer_gather(hpml_tensor *x, hpml_axis axis, int root)
{
    return hpmlc_relay(x, axis, HPMLC_GATHER, root);
}

HPMLC_FN void hpmlc_zero(float *x, int64_t n) { memset(x, 0, (size_t)n * sizeof *x); }

/* hpml_linear_rows: with B samples of each of p ranks and `cut` = out / p rows of the weight on each, all = x of all
   ranks (p B, in), saved; part = all w^T + bias (p B, cut), of which block r belongs to rank r's samples. swap
   exchanges these blocks: rank s then has block s of all ranks, (p, B, cut), and y (B, p cut). Sources: x, weight,
   bias. */
typedef struct hpmlc_rows { const hpml_group *group; int64_t B, in, cut; } hpmlc_rows;

/* Copies y (samples, p * cut) to blocks (p, B, cut), where B is the samples of a full batch; to_y: the other way. */
HPMLC_FN void hpmlc_rows_copy(const hpmlc_rows *k, float *y, int64_t samples, float *blocks, bool to_y)
{
    const int64_t p = k->group->size, cut = k->cut;
    for (int64_t i = 0; i < samples * p; i++) {
        float *row = y + i * cut, *block = blocks + (i % p * k->B + i / p) * cut;
        if (to_y) memcpy(row, block, (size_t)cut * sizeof(float));
        else memcpy(block, row, (size_t)cut * sizeof(float));
    }
}

HPMLC_FN hpml_status hpmlc_rows_forward(const hpml_run *run, hpml_node *n)
{
    const hpmlc_rows *k = (const hpmlc_rows *)n->attr.custom->user;
    const hpml_group *g = k->group;
    const int64_t     samples = n->out->shape[0], rows = k->B * g->size;
    float            *all = (float *)n->saved, *part = (float *)n->scratch, *blocks = part + rows * k->cut;
    float            *mine = blocks; /* x, filled up to a full batch; read before blocks are written */
    hpmlc_zero(mine, k->B * k->in);
    memcpy(mine, n->src[0]->data, (size_t)(samples * k->in) * sizeof(float));
    hpml_status status = g->gather(g->user, mine, all, k->B * k->in);
    for (int64_t i = 0; i < rows * k->cut; i++) part[i] = n->src_count > 2 ? n->src[2]->data[i % k->cut] : 0;
    if (status == HPML_OK)
        status = hpml_sgemm(run->ctx, false, true, rows, k->cut, k->in, 1, all, k->in, n->src[1]->data, k->in, 1, part,
                            k->cut);
    if (status == HPML_OK) status = g->swap(g->user, part, blocks, k->B * k->cut);
    hpmlc_rows_copy(k, n->out->data, samples, blocks, true);
    return status;
}

HPMLC_FN hpml_status hpmlc_rows_backward(const hpml_run *run, hpml_node *n)
{
    const hpmlc_rows *k = (const hpmlc_rows *)n->attr.custom->user;
    const hpml_group *g = k->group;
    const int64_t     samples = n->out->shape[0], rows = k->B * g->size, in = k->in, cut = k->cut;
    float            *all = (float *)n->saved, *part = (float *)n->scratch, *blocks = part + rows * cut;
    hpmlc_zero(blocks, rows * cut);
    hpmlc_rows_copy(k, n->out->grad, samples, blocks, false);
    hpml_status status = g->swap(g->user, blocks, part, k->B * cut);
    for (int64_t i = 0; i < rows && n->src_count > 2; i++) hpmlc_give(n, 2, 0, part + i * cut, cut);
    if (n->src[1]->grad && status == HPML_OK)
        status = hpml_sgemm(run->ctx, true, false, cut, in, rows, 1, part, cut, all, in, 1, n->src[1]->grad, in);
    if (status == HPML_OK) /* writes the gradient of `all` over `all`, used no more */
        status = hpml_sgemm(run->ctx, false, false, rows, in, cut, 1, part, cut, n->src[1]->data, in, 0, all, in);
    if (status == HPML_OK) status = g->scatter(g->user, all, blocks, k->B * in);
    hpmlc_give(n, 0, 0, blocks, samples * in);
    return status;
}

HPML_API hpml_tensor *hpml_linear_rows(hpml_tensor *x, int64_t out, const hpml_linear_desc *desc)
{
    char text[96], own_name[32];
    if (!hpmlc_recordable(x)) return NULL;
    HPMLC_DESC(hpml_linear_desc, d, desc);
    const hpml_group *g = hpml_ctx_group(x->ctx, HPML_AXIS_EXPERT);
    hpmlc_rows        k = { g, x->shape[0], x->shape[1], out / g->size };
    const char       *name = hpmlc_layer_name(x->ctx, d.name, "linear_rows", own_name);
    if (d._begin || d._end || d.weight || d.split != HPML_SPLIT_NONE || x->ndim != 2 || out < 1)
        return hpmlc_no_layer(x->ctx, "linear_rows \"%s\": input is %s, out %lld; expected (B, in), out above 0, and a "
                              "desc without .weight and .split", name, hpml_tensor_text(x, text, sizeof text),
                              (long long)out);
    if (out % g->size != 0)
        return hpmlc_no_layer(x->ctx, "linear_rows \"%s\": out %lld on %d ranks of the expert axis; expected a "
                              "multiple of the ranks", name, (long long)out, g->size);
    const int64_t shape[2] = { out, k.in }, most = k.in > out ? k.in : out;
    hpml_tensor  *src[3] = { x, NULL, NULL };
    src[1] = hpmlc_layer_param(x->ctx, name, "weight", HPML_AXIS_EXPERT, sqrt(6 / (double)k.in), 2, shape);
    if (!d.no_bias) src[2] = hpmlc_layer_param(x->ctx, name, "bias", HPML_AXIS_EXPERT, 0, 1, shape);
    HPMLC_ZERO(hpml_custom, op);
    op.name          = "linear_rows";
    op.forward       = hpmlc_rows_forward;
    op.backward      = hpmlc_rows_backward;
    op.collective    = g->size > 1;
    op.keeps         = HPML_KEEP_NONE;
    op.ndim          = 2;
    op.shape[0]      = k.B;
    op.shape[1]      = out;
    op.saved_bytes   = (size_t)(k.B * g->size * k.in) * sizeof(float);
    op.scratch_bytes = (size_t)(k.B * (out + most)) * sizeof(float);
    op.flops         = 2.0 * (double)(k.B * k.in) * (double)out;
    hpml_tensor *y = hpmlc_record(src, d.no_bias ? 2 : 3, &op, &k, sizeof k);
    return y && d.activation != HPML_ACT_NONE ? hpml_activation(y, d.activation, 0) : y;
}

// ---------------------------------------------------------------------------------------------------------------------
// >>named   named dimensions: rules of layout, sums over products
// ---------------------------------------------------------------------------------------------------------------------
#define HPMLC_NAME 24
typedef struct hpmlc_names { /* the names of a tensor's dimensions */
    int  count;
    char name[HPML_MAX_DIMS][HPMLC_NAME];
} hpmlc_names;

/* Reads the names in `text` up to `end`, separated by blanks, commas, colons or arrows (->), into *n; false: too many
   names, one that is too long, or one of them twice. */
HPMLC_FN bool hpmlc_names_read(const char *text, const char *end, hpmlc_names *n)
{
    memset(n, 0, sizeof *n);
    while (text < end) {
        size_t length = strcspn(text, " ,->:");
        if (length > (size_t)(end - text)) length = (size_t)(end - text);
        if (length >= HPMLC_NAME || (length > 0 && n->count == HPML_MAX_DIMS)) return false;
        memcpy(n->name[n->count], text, length);
        for (int i = 0; length > 0 && i < n->count; i++)
            if (strcmp(n->name[i], n->name[n->count]) == 0) return false;
        n->count += length > 0;
        text += length > 0 ? length : 1;
    }
    return true;
}

HPMLC_FN int hpmlc_names_find(const hpmlc_names *n, const char *name)
{
    for (int i = 0; i < n->count; i++)
        if (strcmp(n->name[i], name) == 0) return i;
    return -1;
}

/* Sets axis[i] to the axis over which `rules` split dimension i, DATA if dimension i is whole or is that of the
   samples. samples: dimension 0 is that of the samples. False: refused, with an error about the tensor named `what`. */
HPMLC_FN bool hpmlc_rules_read(hpml_ctx *ctx, const char *what, const char *rules, const hpmlc_names *n, bool samples,
                               hpml_axis *axis)
{
    int of[HPML_AXES]; /* for each axis the dimension that it splits, or -1 */
    for (int i = 0; i < HPML_AXES; i++) of[i] = -1;
    for (int i = 0; i < HPML_MAX_DIMS; i++) axis[i] = HPML_AXIS_DATA;
    for (const char *at = rules ? rules : ""; *at; at += *at == ',') {
        const char *colon = at + strcspn(at, ":,"), *end = at + strcspn(at, ",");
        hpmlc_names dim, word;
        int         a = 0, d = -1;
        if (!hpmlc_names_read(at, colon, &dim) || !hpmlc_names_read(colon, end, &word) || dim.count * word.count != 1)
            return hpmlc_no_layer(ctx, "%s: rule \"%.*s\"; expected a dimension and an axis, such as \"hidden:tensor\"",
                                  what, (int)(end - at), at) != NULL;
        while (a < HPML_AXES && strcmp(word.name[0], hpml_axis_name((hpml_axis)a)) != 0) a++;
        if (a == HPML_AXES || a == HPML_AXIS_PIPE)
            return hpmlc_no_layer(ctx, "%s: rule \"%.*s\": no axis \"%s\"; expected data, tensor, sequence or expert",
                                  what, (int)(end - at), at, word.name[0]) != NULL;
        at = end;
        d = hpmlc_names_find(n, dim.name[0]);
        if (d < 0) continue;
        if (of[a] >= 0)
            return hpmlc_no_layer(ctx, "%s: \"%s\" and \"%s\" are both split over the %s axis; give one of them "
                                  "another axis", what, n->name[of[a]], n->name[d], word.name[0]) != NULL;
        of[a] = d;
        bool divides_samples = a == HPML_AXIS_DATA || a == HPML_AXIS_EXPERT;
        if (divides_samples != (samples && d == 0))
            return hpmlc_no_layer(ctx, "%s: \"%s\" over the %s axis; samples are divided by the data and expert axes, "
                                  "all other dimensions by tensor and sequence", what, n->name[d],
                                  word.name[0]) != NULL;
        if (!divides_samples) axis[d] = (hpml_axis)a;
    }
    return true;
}

HPML_API hpml_tensor *hpml_named_param(hpml_ctx *ctx, const char *rules, const char *dims, const hpml_param_desc *desc)
{
    hpmlc_names n;
    hpml_axis   axis[HPML_MAX_DIMS];
    if (!ctx || hpml_ctx_status(ctx) != HPML_OK) return NULL;
    HPMLC_DESC(hpml_param_desc, d, desc);
    const char *what = d.name ? d.name : "named_param";
    if (!dims || !hpmlc_names_read(dims, dims + strlen(dims), &n) || n.count != d.ndim)
        return hpmlc_no_layer(ctx, "%s: dimensions \"%s\" of a parameter with %d; expected as many names", what,
                              dims ? dims : "", d.ndim);
    if (!hpmlc_rules_read(ctx, what, rules, &n, false, axis)) return NULL;
    for (int i = 0; i < n.count; i++) {
        const int64_t size = hpml_ctx_group(ctx, axis[i])->size;
        if (axis[i] == HPML_AXIS_DATA || size == 1) continue;
        if (d.axis != HPML_AXIS_DATA)
            return hpmlc_no_layer(ctx, "%s: \"%s\" and \"%s\" are both split; a parameter is split along one dimension",
                                  what, n.name[d.split_dim], n.name[i]);
        if (d.shape[i] % size != 0)
            return hpmlc_no_layer(ctx, "%s: \"%s\" of size %lld over %lld ranks of the %s axis; expected a multiple",
                                  what, n.name[i], (long long)d.shape[i], (long long)size, hpml_axis_name(axis[i]));
        d.axis      = axis[i];
        d.split_dim = i;
    }
    return hpml_param_create(ctx, &d);
}

HPML_API hpml_tensor *hpml_named_part(hpml_tensor *x, const char *rules, const char *dims)
{
    hpmlc_names n;
    hpml_axis   axis[HPML_MAX_DIMS];
    char        text[96];
    if (!hpmlc_recordable(x)) return NULL;
    if (!dims || !hpmlc_names_read(dims, dims + strlen(dims), &n) || n.count != x->ndim)
        return hpmlc_no_layer(x->ctx, "named_part: dimensions \"%s\" of %s; expected as many names", dims ? dims : "",
                              hpml_tensor_text(x, text, sizeof text));
    if (!hpmlc_rules_read(x->ctx, "named_part", rules, &n, x->batch_rows > 0, axis)) return NULL;
    for (int i = 0; i < n.count && x; i++)
        if (axis[i] != HPML_AXIS_DATA) x = hpml_group_split(x, axis[i], i);
    return x;
}

/* einsum: dimensions are of four kinds: in a, b and y; in a and y; in b and y; in a and b. g, m, n and k are the number
   of dimensions of each kind, in this order. With a as (g, m, k), b as (g, n, k) and y as (g, m, n) the work is one
   matrix product for each index of g. order[t]: the dimensions of tensor t (0: a, 1: b, 2: y) in this order. */
typedef struct hpmlc_einsum { int g, m, n, k, order[3][HPML_MAX_DIMS]; } hpmlc_einsum;
typedef struct hpmlc_einsum_arrays {
    int64_t g, m, n, k;
    float  *a, *b, *y; /* scratch copies with dimensions in hpmlc_einsum.order; y: result or its gradient */
} hpmlc_einsum_arrays;

/* Copies `from`, an array of the shape of t, to `to`, with its dimensions permuted by `order`: dimension i of `to` is
   dimension order[i] of t. If `give`, adds the numbers of `to`, permuted back, to those of `from` instead. */
HPMLC_FN void hpmlc_reorder(const hpml_tensor *t, const int *order, float *from, float *to, bool give)
{
    int64_t stride[HPML_MAX_DIMS + 1], count = hpml_tensor_count(t);
    int     last = t->ndim; /* `order` leaves dimensions from `last` on in place */
    stride[t->ndim] = 1;
    for (int d = t->ndim - 1; d >= 0; d--) stride[d] = stride[d + 1] * t->shape[d];
    while (last > 0 && order[last - 1] == last - 1) last--;
    for (int64_t i = 0; i < count; i++) {
        int64_t at = i % stride[last], rest = i / stride[last];
        for (int d = last - 1; d >= 0; d--) {
            at += rest % t->shape[order[d]] * stride[order[d] + 1];
            rest /= t->shape[order[d]];
        }
        if (give) from[at] += to[i];
        else to[i] = from[at];
    }
}

/* Computes the sizes g, m, n and k of an einsum, and copies its sources a and b to scratch memory in the orders
   (g, m, k) and (g, n, k). */
HPMLC_FN hpmlc_einsum_arrays hpmlc_einsum_of(const hpml_node *n)
{
    const hpmlc_einsum *e = (const hpmlc_einsum *)n->attr.custom->user;
    const hpml_tensor  *a = n->src[0], *b = n->src[1];
    hpmlc_einsum_arrays w = { 1, 1, 1, 1, NULL, NULL, NULL };
    for (int i = 0; i < a->ndim; i++) {
        int64_t *size = i < e->g ? &w.g : &w.m;
        if (i >= e->g + e->m) size = &w.k;
        *size *= a->shape[e->order[0][i]];
    }
    for (int i = e->g; i < e->g + e->n; i++) w.n *= b->shape[e->order[1][i]];
    w.a = (float *)n->scratch;
    w.b = w.a + hpml_tensor_count(a);
    w.y = w.b + hpml_tensor_count(b);
    hpmlc_reorder(a, e->order[0], a->data, w.a, false);
    hpmlc_reorder(b, e->order[1], b->data, w.b, false);
    return w;
}

HPMLC_FN hpml_status hpmlc_einsum_forward(const hpml_run *run, hpml_node *n)
{
    const hpmlc_einsum *e = (const hpmlc_einsum *)n->attr.custom->user;
    hpmlc_einsum_arrays w = hpmlc_einsum_of(n);
    hpml_status         status = HPML_OK;
    for (int64_t g = 0; g < w.g && status == HPML_OK; g++)
        status = hpml_sgemm(run->ctx, false, true, w.m, w.n, w.k, 1, w.a + g * w.m * w.k, w.k, w.b + g * w.n * w.k, w.k,
                            0, w.y + g * w.m * w.n, w.n);
    memset(n->out->data, 0, (size_t)hpml_tensor_count(n->out) * sizeof(float));
    hpmlc_reorder(n->out, e->order[2], n->out->data, w.y, true);
    return status;
}

/* The backward pass of an einsum y = a b^T: for each g, the index over the dimensions that a, b and y share, da = dy b,
   then db = dy^T a. db is written over block g of the copy of b, because no later product reads this block. */
HPMLC_FN hpml_status hpmlc_einsum_backward(const hpml_run *run, hpml_node *n)
{
    const hpmlc_einsum *e = (const hpmlc_einsum *)n->attr.custom->user;
    hpmlc_einsum_arrays w = hpmlc_einsum_of(n);
    float              *da = w.y + hpml_tensor_count(n->out), *db = w.b;
    hpml_status         status = HPML_OK;
    hpmlc_reorder(n->out, e->order[2], n->out->grad, w.y, false);
    for (int64_t g = 0; g < w.g && status == HPML_OK; g++) {
        float *dy = w.y + g * w.m * w.n;
        status = hpml_sgemm(run->ctx, false, false, w.m, w.k, w.n, 1, dy, w.n, w.b + g * w.n * w.k, w.k, 0,
                            da + g * w.m * w.k, w.k);
        if (status == HPML_OK)
            status = hpml_sgemm(run->ctx, true, false, w.n, w.k, w.m, 1, dy, w.n, w.a + g * w.m * w.k, w.k, 0,
                                db + g * w.n * w.k, w.k);
    }
    if (n->src[0]->grad) hpmlc_reorder(n->src[0], e->order[0], n->src[0]->grad, da, true);
    if (n->src[1]->grad) hpmlc_reorder(n->src[1], e->order[1], n->src[1]->grad, db, true);
    return status;
}

/* Sorts the dimensions of an einsum into its kinds g, m, n and k; false: a name is in one of the tensors only. */
HPMLC_FN bool hpmlc_einsum_sort(const hpmlc_names n[3], hpmlc_einsum *e)
{
    static const int missing[4] = { 3, 1, 0, 2 }; /* tensor without dimensions of kind g, m, n, k; 3: none */
    int             *counts[4] = { &e->g, &e->m, &e->n, &e->k }, length[3] = { 0, 0, 0 };
    memset(e, 0, sizeof *e);
    for (int kind = 0; kind < 4; kind++) {
        const hpmlc_names *by = &n[missing[kind] == 0 ? 1 : 0]; /* a or b: the names of a source with this kind */
        for (int i = 0; i < by->count; i++) {
            bool fits = true;
            int  at[3];
            for (int t = 0; t < 3; t++) {
                at[t] = hpmlc_names_find(&n[t], by->name[i]);
                fits  = fits && (at[t] < 0) == (missing[kind] == t);
            }
            for (int t = 0; fits && t < 3; t++)
                if (at[t] >= 0) e->order[t][length[t]++] = at[t];
            *counts[kind] += fits;
        }
    }
    return length[0] == n[0].count && length[1] == n[1].count && length[2] == n[2].count;
}

/* Sets, for the result y of an einsum: its shape (op->shape, op->batch_rows), its split (an axis for each dimension),
   and sums[a] to true for each axis a over which the ranks' results are added up. False: an error. */
HPMLC_FN bool hpmlc_einsum_shape(const char *text, const hpmlc_names n[3], hpml_tensor *const src[2], hpml_custom *op,
                                 int8_t *split, bool *sums)
{
    bool used[HPML_AXES] = { false, false, false, false, false };
    op->batch_rows = -1;
    for (int t = 0; t < 2; t++) {
        for (int i = 0; i < n[t].count; i++) {
            const char *name = n[t].name[i];
            const int   y = hpmlc_names_find(&n[2], name), other = hpmlc_names_find(&n[1 - t], name);
            if (other >= 0 && (src[t]->shape[i] != src[1 - t]->shape[other] ||
                               src[t]->split[i] != src[1 - t]->split[other]))
                return hpmlc_no_layer(src[0]->ctx, "einsum \"%s\": \"%s\" has %lld indices in a, %lld in b, or is "
                                      "split in one of them alone", text, name, (long long)src[t]->shape[i],
                                      (long long)src[1 - t]->shape[other]) != NULL;
            sums[src[t]->split[i]] |= y < 0 && src[t]->split[i] != 0;
            if (y < 0 || (t == 1 && other >= 0)) continue;
            op->shape[y] = src[t]->shape[i];
            split[y]     = src[t]->split[i];
            if (i == 0 && y == 0 && src[t]->batch_rows) op->batch_rows = src[t]->batch_rows;
            if (split[y] && used[split[y]])
                return hpmlc_no_layer(src[0]->ctx, "einsum \"%s\": two dimensions of the result are split over the %s "
                                      "axis", text, hpml_axis_name((hpml_axis)split[y])) != NULL;
            used[split[y]] = true;
        }
    }
    return true;
}

/* Returns whether the other operand is split over the TENSOR axis along a dimension that operand t does not have: the
   gradient of t then is a sum over the ranks (hpml_group_copy). */
HPMLC_FN bool hpmlc_einsum_copies(const hpmlc_names n[3], hpml_tensor *const src[2], int t)
{
    for (int i = 0; i < n[1 - t].count; i++)
        if (src[1 - t]->split[i] == HPML_AXIS_TENSOR && hpmlc_names_find(&n[t], n[1 - t].name[i]) < 0) return true;
    return false;
}

HPML_API hpml_tensor *hpml_einsum(const char *text, hpml_tensor *a, hpml_tensor *b)
{
    hpmlc_names  n[3];
    hpmlc_einsum e;
    hpml_tensor *src[2] = { a, b };
    int8_t       split[HPML_MAX_DIMS] = { 0, 0, 0, 0, 0 };
    bool         sums[HPML_AXES] = { false, false, false, false, false };
    if (!hpmlc_recordable(a) || !b) return NULL;
    const char *comma = text ? strchr(text, ',') : NULL;
    const char *arrow = comma ? strstr(comma, "->") : NULL;
    if (!arrow || !hpmlc_names_read(text, comma, &n[0]) || !hpmlc_names_read(comma, arrow, &n[1]) ||
        !hpmlc_names_read(arrow, arrow + strlen(arrow), &n[2]) || n[0].count != a->ndim || n[1].count != b->ndim ||
        n[2].count < 1 || !hpmlc_einsum_sort(n, &e))
        return hpmlc_no_layer(a->ctx, "einsum \"%s\" of %d and %d dimensions; expected such as \"batch in, hidden in "
                              "-> batch hidden\", every name in two tensors or all three", text ? text : "", a->ndim,
                              b->ndim);
    HPMLC_ZERO(hpml_custom, op);
    if (!hpmlc_einsum_shape(text, n, src, &op, split, sums)) return NULL;
    for (int t = 0; t < 2; t++)
        if (hpmlc_einsum_copies(n, src, t)) src[t] = hpml_group_copy(src[t], HPML_AXIS_TENSOR);
    if (!src[0] || !src[1]) return NULL;
    op.name     = "einsum";
    op.forward  = hpmlc_einsum_forward;
    op.backward = hpmlc_einsum_backward;
    op.keeps    = HPML_KEEP_SRC(0) | HPML_KEEP_SRC(1);
    op.ndim     = n[2].count;
    int64_t count = 1;
    for (int i = 0; i < op.ndim; i++) count *= op.shape[i];
    op.scratch_bytes = (size_t)(2 * hpml_tensor_count(a) + hpml_tensor_count(b) + count) * sizeof(float);
    hpml_tensor *y = hpmlc_record(src, 2, &op, &e, sizeof e);
    for (int axis = 1; axis < HPML_AXES && y; axis++) {
        if (sums[axis]) y = hpml_group_sum(y, (hpml_axis)axis);
        if (y) memcpy(y->split, split, sizeof y->split);
    }
    return y;
}

// =====================================================================================================================
// PART V   FORESEE: steps in virtual time
// =====================================================================================================================

// ---------------------------------------------------------------------------------------------------------------------
// >>simulate   moves in virtual time, by a queue of ranks
// ---------------------------------------------------------------------------------------------------------------------
/* Every simulated rank has a clock. Ranks that are about to send wait in a queue by (clock, rank), as threads do in
   >>clock, so that messages enter the cards in the same order as there and arrive at the same times. A message costs
   some 50 to 100 ns of computation. Two shapes of collectives have p^2 messages and need less, because the order of
   turns does not matter in them:
     ring         each card serves one pair of ranks: played round by round, without a queue (some ns a message). Where
                  all nodes are in the same state, the ranks of one node represent those of all nodes
     all to all   the ranks of one node represent those of all nodes likewise
   Tests compare both shapes with the queue. */

typedef struct hpmlc_sim_event {
    double time;
    int    rank;
    int    run;  /* in hpmlc_sim.heap: index of the run (hpmlc_sim_push) that begins with this event */
} hpmlc_sim_event;

typedef struct hpmlc_sim_letter { /* a message that has been sent to a rank which does not wait for it yet */
    int    from, next; /* the sender's rank; index of the receiver's next letter, -1: none */
    int    tag;
    double arrival;
} hpmlc_sim_letter;

typedef struct hpmlc_sim_rank { /* a simulated rank. One struct, because its members are used together */
    int     phase, round;
    int     to, from;    /* ranks of the current move, -1: none */
    int64_t bytes;       /* bytes sent by the current move */
    int     tag;         /* of the current move; its messages match messages with the same tag */
    bool    far, far_from; /* programs (>>play): `to`, `from` is on another node */
    int     want;        /* the rank whose message is awaited; -1: none */
    int     first, last; /* indices of the letters to this rank, -1: none */
    int     next;        /* the rank after this one in the same run (hpmlc_sim_push), -1: none */
} hpmlc_sim_rank;

typedef enum hpmlc_sim_kind { HPMLC_SIM_ALLREDUCE, HPMLC_SIM_ALL_TO_ALL, HPMLC_SIM_ALLGATHER } hpmlc_sim_kind;

typedef struct hpmlc_sim hpmlc_sim;
struct hpmlc_sim {
    hpml_comm         layout;             /* a communicator without a transport: nodes and links of the ranks */
    int               p, nodes, per_node; /* ranks, nodes, ranks of each node; per_node 0: the nodes differ */
    bool              mixed;              /* ring neighbours may be on different nodes that have several ranks each */
    bool              plain;              /* for tests: plays every collective by the queue */
    double            latency[2], rate[2]; /* [0] inside a node, [1] between nodes: seconds, seconds a byte */
    int32_t          *node;               /* (p) number of each rank's node */
    double           *clock;              /* (p) virtual time of each rank, seconds */
    double           *out, *in;           /* (p + nodes) time when each rank's, each node's network card is free */
    int64_t          *bytes, *messages;   /* (p) bytes and messages that each rank has sent */
    int64_t           between;            /* bytes sent from node to node */
    double           *work;               /* (4 p) scratch array of hpmlc_sim_ring and hpmlc_sim_all_to_all */
    /* The collective that is simulated, and the queue of ranks by which it is simulated: */
    hpmlc_sim_kind    kind;
    int64_t           n;
    size_t            size;               /* bytes of an element */
    hpmlc_phase      *phase;              /* (HPMLC_PHASES, p) the phases of each rank */
    int32_t          *phases;             /* (p) number of phases of each rank; in an all to all: scratch */
    hpmlc_sim_rank   *rank;               /* (p) state of each rank in the collective */
    hpmlc_sim_event  *run;                /* (p) the last event of each run (hpmlc_sim_push), the latest first */
    hpmlc_sim_event  *heap;               /* (p) the first event of each run, the earliest at the top */
    int               runs;
    hpmlc_sim_letter *letter;
    int               letters, free_letter; /* number of letters allocated; index of the first unused one, -1: none */
    bool              failed;             /* true: out of memory */
    /* Programs (>>play): each rank has `streams` actors, which the above calls ranks and which share its card: */
    int               streams;            /* 1: ranks have no programs */
    double           *waited;             /* (p) seconds for which each actor has waited in its current act; else NULL */
    bool            (*program)(hpmlc_sim *s, int r); /* sets the current move of actor r; false: none. NULL: no programs */
};

HPMLC_FN void hpmlc_sim_close(hpmlc_sim *s)
{
    free(s->node);
    free(s->clock);
    free(s->bytes);
    free(s->phase);
    free(s->rank);
    free(s->run);
    free(s->letter);
    free(s->waited);
}

/* p: number of ranks, times `streams`. False: out of memory. */
HPMLC_FN bool hpmlc_sim_open(hpmlc_sim *s, int p, const hpml_network *net, int streams)
{
    hpml_comm *c = &s->layout;
    size_t     n = (size_t)p;
    memset(s, 0, sizeof *s);
    s->p           = p;
    s->streams     = streams;
    s->nodes       = hpmlc_network_nodes(net, p / streams);
    size_t cards   = n + (size_t)s->nodes;
    s->latency[0]  = net->inside.latency;
    s->latency[1]  = net->between.latency;
    s->rate[0]     = net->inside.bandwidth > 0 ? 1 / net->inside.bandwidth : 0;
    s->rate[1]     = net->between.bandwidth > 0 ? 1 / net->between.bandwidth : 0;
    s->free_letter = -1;
    s->node        = (int32_t *)calloc(2 * n, sizeof(int32_t)); /* array `node`, then `phases` */
    s->clock       = (double *)calloc(5 * n + 2 * cards, sizeof(double)); /* `clock`, `out`, `in`, `work` */
    s->bytes       = (int64_t *)calloc(2 * n, sizeof(int64_t));
    s->phase       = (hpmlc_phase *)calloc(HPMLC_PHASES * n, sizeof(hpmlc_phase));
    s->rank        = (hpmlc_sim_rank *)calloc(n, sizeof(hpmlc_sim_rank));
    s->run         = (hpmlc_sim_event *)calloc(2 * n, sizeof(hpmlc_sim_event)); /* `run`, then `heap` */
    s->failed      = !s->node || !s->clock || !s->bytes || !s->phase || !s->rank || !s->run;
    if (s->failed) return false;
    s->out      = s->clock + n;
    s->in       = s->out + cards;
    s->work     = s->in + cards;
    s->messages = s->bytes + n;
    s->phases   = s->node + n;
    s->heap     = s->run + n;
    for (int r = 0; r < p; r++) s->node[r] = hpmlc_network_node(net, s->nodes, r / streams);
    c->size = p;
    c->node = s->node;
    c->is_virtual = true;
    hpmlc_comm_links(c, net, s->nodes);
    hpmlc_comm_layout(c);
    s->mixed    = c->spread || c->per_node == 0;
    s->per_node = c->per_node > 0 && p % c->per_node == 0 ? c->per_node : 0;
    return true;
}

/* Returns the rank that is simulated in place of rank `rank` where hpmlc_sim_alike allows it: on several nodes with the
   same state, the rank at the same position in the first node; on a single node, where all ranks have the same state,
   rank 0. */
HPMLC_FN int hpmlc_sim_representative(const hpmlc_sim *s, int rank)
{
    if (s->nodes == 1) return 0;
    return s->layout.spread ? rank - s->node[rank] : rank % s->per_node;
}

/* Returns the index in s->out and s->in of a rank's network card: if `far` (another node) its node's, else its own. */
HPMLC_FN int hpmlc_sim_card(const hpmlc_sim *s, int rank, bool far)
{
    return far ? s->p + s->node[rank] : rank - rank % s->streams;
}

/* Simulates a message that rank `from` sends at its clock; returns when it arrives, in seconds, by the rules of
   hpmlc_arrival except in an all to all: there the receiving node's card is not occupied, because at any time as many
   bytes enter a node as leave it. If cards were reserved in the order of sending, a busy receiving card would delay the
   sending card, and this card the next message, which does not happen in a real switch. */
HPMLC_FN double hpmlc_sim_send(hpmlc_sim *s, int from, int to, int64_t bytes)
{
    bool    far  = s->program ? s->rank[from].far : s->node[from] != s->node[to];
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

/* Puts a rank into the queue. The queue is a set of runs: lists of ranks in the order of their turns, by (clock, rank).
   A rank is appended to the run with the latest end that is before the rank's turn; where there is none, it begins a
   run. So runs stay sorted by their ends, and a run that gets empty is the last, with the earliest end. Ranks that do
   the same at the same time need few runs, whose ends stay in the cache; a heap of all ranks would miss the cache. */
HPMLC_FN void hpmlc_sim_push(hpmlc_sim *s, int rank)
{
    hpmlc_sim_event e;
    int             low = 0, high = s->runs;
    e.time = s->clock[rank];
    e.rank = rank;
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

/* Takes the rank whose turn is next, by (clock, rank), out of the queue and returns it. */
HPMLC_FN int hpmlc_sim_pop(hpmlc_sim *s)
{
    hpmlc_sim_event e = s->heap[0];
    int             top = e.rank, next = s->rank[top].next, i = 0, child;
    if (next < 0) e = s->heap[--s->runs];
    else {
        e.time = s->clock[next];
        e.rank = next;
    }
    while ((child = 2 * i + 1) < s->runs) {
        if (child + 1 < s->runs && hpmlc_sim_before(s->heap[child + 1], s->heap[child])) child++;
        if (!hpmlc_sim_before(s->heap[child], e)) break;
        s->heap[i] = s->heap[child];
        i          = child;
    }
    s->heap[i] = e;
    return top;
}

/* Returns how many elements block i has, the i-th of p almost equal parts of the array of s->n elements. */
HPMLC_FN int64_t hpmlc_sim_block(const hpmlc_sim *s, int i)
{
    return hpml_block(s->n, s->p, i + 1) - hpml_block(s->n, s->p, i);
}

/* Stores what rank r sends and receives in the current round of its phases in s->rank[r]; false: no round is left. */
HPMLC_FN bool hpmlc_sim_phase_move(hpmlc_sim *s, int r)
{
    hpmlc_sim_rank *q = &s->rank[r];
    for (; q->phase < s->phases[r]; q->phase++, q->round = 0) {
        const hpmlc_phase *f = &s->phase[(size_t)q->phase * (size_t)s->p + (size_t)r];
        bool               once = f->kind->one_round && f->team.me > 0;
        hpml_move          m;
        if (once && q->round < f->team.me - 1) q->round = f->team.me - 1;
        if (q->round >= (once ? f->team.me : f->rounds)) continue;
        hpmlc_move_of(f, q->round, &m);
        q->to    = m.to;
        q->from  = m.from;
        q->bytes = m.send_count * (int64_t)s->size;
        return true;
    }
    return false;
}

/* Stores what rank r sends and receives in its current round in s->rank[r]; false: it has no round left, or its program
   cannot go on. */
HPMLC_FN bool hpmlc_sim_move(hpmlc_sim *s, int r)
{
    hpmlc_sim_rank *q = &s->rank[r];
    const int       k = q->round + 1;
    if (s->program) return s->program(s, r);
    if (s->kind != HPMLC_SIM_ALL_TO_ALL) return hpmlc_sim_phase_move(s, r);
    if (k >= s->p) return false;
    q->to    = (r + k) % s->p; /* round k: to rank r + k, from rank r - k, modulo p */
    q->from  = (r + s->p - k) % s->p;
    q->bytes = hpmlc_sim_block(s, q->to) * (int64_t)s->size;
    return true;
}

/* Sets the clock of rank r, which waits for a message, to the message's arrival, if that is later. */
HPMLC_FN void hpmlc_sim_arrive(hpmlc_sim *s, int r, double arrival)
{
    if (s->clock[r] >= arrival) return;
    if (s->waited) s->waited[r] += arrival - s->clock[r];
    s->clock[r] = arrival;
}

/* Receives the first message sent by `from` to rank r, and sets r's clock to its arrival, if later. False: none yet. */
HPMLC_FN bool hpmlc_sim_take(hpmlc_sim *s, int r, int from)
{
    hpmlc_sim_rank *q = &s->rank[r];
    for (int i = q->first, before = -1; i >= 0; before = i, i = s->letter[i].next) {
        hpmlc_sim_letter *l = &s->letter[i];
        if (l->from != from || l->tag != q->tag) continue;
        hpmlc_sim_arrive(s, r, l->arrival);
        if (before < 0) q->first = l->next;
        else s->letter[before].next = l->next;
        if (q->last == i) q->last = before;
        l->next        = s->free_letter;
        s->free_letter = i;
        return true;
    }
    return false;
}

/* Appends a message from rank `from` to the list of messages to rank r for which r does not wait yet. arrival: the
   virtual time, in seconds, at which the message arrives. */
HPMLC_FN void hpmlc_sim_keep(hpmlc_sim *s, int r, int from, double arrival)
{
    if (s->free_letter < 0) {
        int               count = s->letters ? 2 * s->letters : 1024;
        hpmlc_sim_letter *more = (hpmlc_sim_letter *)realloc(s->letter, sizeof *more * (size_t)count);
        if (!more) {
            s->failed = true;
            return;
        }
        s->letter = more;
        for (int i = count - 1; i >= s->letters; i--) {
            more[i].next   = s->free_letter;
            s->free_letter = i;
        }
        s->letters = count;
    }
    hpmlc_sim_rank *q = &s->rank[r];
    int             i = s->free_letter;
    s->free_letter = s->letter[i].next;
    s->letter[i].from    = from;
    s->letter[i].tag     = s->rank[from].tag;
    s->letter[i].arrival = arrival;
    s->letter[i].next    = -1;
    if (q->first < 0) q->first = i;
    else s->letter[q->last].next = i;
    q->last = i;
}

/* Simulates the rounds of rank r until r is about to send (then r is put into the queue), must wait for a message, or
   has no round left. sent: true if the message of r's current round has been sent. */
HPMLC_FN void hpmlc_sim_advance(hpmlc_sim *s, int r, bool sent)
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

/* Simulates the collective of s message by message: repeatedly takes, from a queue of the ranks that can send, the rank
   with the earliest clock, and sends its next message. */
HPMLC_FN void hpmlc_sim_queue(hpmlc_sim *s)
{
    s->runs = 0;
    for (int r = 0; r < s->p; r++) {
        hpmlc_sim_rank *q = &s->rank[r];
        q->phase = q->round = 0;
        q->want = q->first = q->last = -1;
    }
    for (int r = 0; r < s->p; r++) hpmlc_sim_advance(s, r, false);
    while (s->runs > 0 && !s->failed) {
        int             r = hpmlc_sim_pop(s), to = s->rank[r].to;
        double          arrival = hpmlc_sim_send(s, r, to, s->rank[r].bytes);
        hpmlc_sim_rank *q = &s->rank[to];
        if (q->want == r && q->tag == s->rank[r].tag) { /* rank `to` waits for this message */
            hpmlc_sim_arrive(s, to, arrival);
            q->want = -1;
            q->round++;
            hpmlc_sim_advance(s, to, false);
        } else hpmlc_sim_keep(s, to, r, arrival);
        hpmlc_sim_advance(s, r, true);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// >>simulate-fast   rings and all to all in virtual time without a queue
// ---------------------------------------------------------------------------------------------------------------------
/* Returns q, the number of ranks of a ring over n elements that are simulated for all p, because rank i does the same
   at the same time as rank i % q: 1, the ranks of a node, or p. Fewer than p only where the p blocks of the array are
   equal, or so many that each may count as the longest (then the time is an upper bound). free_at: (p) the time in
   seconds at which the link from rank i to rank i + 1 gets free. */
HPMLC_FN int hpmlc_sim_period(const hpmlc_sim *s, int64_t n, const double *free_at)
{
    int q = s->per_node > 0 && !s->mixed ? s->per_node : s->p;
    if (s->nodes == 1 || s->nodes == s->p) q = 1;
    if (n % s->p != 0 && s->p <= 256) return s->p;
    for (int i = q; i < s->p; i++)
        if (s->clock[i] != s->clock[i % q] || free_at[i] != free_at[i % q]) return s->p;
    return q;
}

/* Simulates a ring of all ranks in which no two pairs of neighbours share a network card. rounds: 2 (p - 1), or p - 1
   for an allgather alone. In round k rank i sends block i - 1 - k, in an allgather alone block i - k, of the p blocks
   of the array. */
HPMLC_FN void hpmlc_sim_ring(hpmlc_sim *s, int rounds)
{
    int     p = s->p, all = rounds == p - 1 ? 0 : 1;
    double *free_at = s->work, *block = free_at + p, *arrival = block + 2 * p; /* times (p), bytes (2 p), times (p) */
    for (int i = 0; i < p; i++) {
        int     next = (i + 1) % p, far = s->node[i] != s->node[next];
        double  out = s->out[hpmlc_sim_card(s, i, far)], in = s->in[hpmlc_sim_card(s, next, far)];
        int64_t mine = hpmlc_sim_block(s, i), kept = hpmlc_sim_block(s, next); /* blocks not sent in 1st, 2nd half */
        int64_t sent = ((all ? 2 * s->n - mine : s->n) - kept) * (int64_t)s->size;
        free_at[i] = out > in ? out : in;
        block[i] = block[i + p] = (double)(mine * (int64_t)s->size);
        s->bytes[i] += sent;
        s->messages[i] += rounds;
        s->between += far ? sent : 0;
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

/* Returns whether clocks and network cards of all nodes are in the same state, so that one node represents all. */
HPMLC_FN bool hpmlc_sim_alike(const hpmlc_sim *s)
{
    if (s->per_node == 0) return false;
    for (int r = 0; r < s->p; r++) {
        int i = hpmlc_sim_representative(s, r);
        if (s->clock[r] != s->clock[i] || s->out[r] != s->out[i] || s->in[r] != s->in[i]) return false;
    }
    for (int i = s->p + 1; i < s->p + s->nodes; i++)
        if (s->out[i] != s->out[s->p]) return false;
    return true;
}

/* Simulates an all to all where all nodes are in the same state, so that a few ranks are simulated for all. Each block
   that one rank sends to another counts as the longest one. A message does not occupy the receiving node's network
   card, because at any time as many bytes enter a node as leave it. */
HPMLC_FN void hpmlc_sim_all_to_all(hpmlc_sim *s)
{
    int     p = s->p, m = s->nodes == 1 ? 1 : s->per_node;
    double *arrival = s->work, busy = (double)((s->n + p - 1) / p * (int64_t)s->size); /* (p) */
    double  card = s->out[p];
    int32_t *order = s->phases; /* (m) the ranks that represent all ranks, sorted by clock */
    for (int j = 0; j < m; j++) order[j] = s->layout.spread ? j * s->nodes : j;
    for (int k = 1; k < p; k++) {
        for (int j = 1; j < m; j++) { /* insertion sort: the ranks are nearly sorted */
            int r = order[j], i = j;
            for (; i > 0 && s->clock[order[i - 1]] > s->clock[r]; i--) order[i] = order[i - 1];
            order[i] = r;
        }
        for (int j = 0; j < m; j++) {
            int     r = order[j], to = (r + k) % p, at = hpmlc_sim_representative(s, to);
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
        int     i = hpmlc_sim_representative(s, r);
        int64_t near_part = 0;
        s->clock[r] = s->clock[i];
        s->out[r]   = s->out[i];
        s->in[r]    = s->in[i];
        for (int j = 0; j < s->per_node; j++) {
            int to = s->layout.spread ? s->node[r] + j * s->nodes : r - r % s->per_node + j;
            near_part += hpmlc_sim_block(s, to);
        }
        s->messages[r] += p - 1;
        s->bytes[r] += (s->n - hpmlc_sim_block(s, r)) * (int64_t)s->size;
        s->between += (s->n - near_part) * (int64_t)s->size;
    }
}

/* Returns true when the collective is nothing but the ring that hpmlc_sim_ring simulates: all ranks, the whole array,
   reduce-scatter and allgather, or allgather alone. Checks rank 0's phases, because the other ranks have the same. */
HPMLC_FN bool hpmlc_sim_is_ring(const hpmlc_sim *s)
{
    const hpmlc_kind *const ring[] = { &hpmlc_ring_scatter, &hpmlc_ring_gather };
    int                     count = s->phases[0];
    if (count != 1 && count != 2) return false;
    for (int i = 0; i < count; i++) {
        const hpmlc_phase *f = &s->phase[(size_t)i * (size_t)s->p];
        bool               whole = f->team.size == s->p && f->team.stride == 1 && f->at == 0 && f->count == s->n;
        if (!whole || f->kind != ring[i + 2 - count]) return false;
    }
    return true;
}

/* Copies the phases that rank `rank` executes in the collective to s->phase. */
HPMLC_FN void hpmlc_sim_set_phases(hpmlc_sim *s, int rank, const hpmlc_phases *all)
{
    s->phases[rank] = all->count;
    for (int i = 0; i < all->count; i++) s->phase[(size_t)i * (size_t)s->p + (size_t)rank] = all->phase[i];
}

/* Simulates the collective whose kind, elements and plans are set in s, from the ranks' clocks on: a ring or an all to
   all round by round where possible, else with a queue of the ranks ordered by clock, which is slower. False: out of
   memory. */
HPMLC_FN bool hpmlc_sim_run(hpmlc_sim *s)
{
    bool to_all = s->kind == HPMLC_SIM_ALL_TO_ALL;
    if (to_all && !s->plain && hpmlc_sim_alike(s)) hpmlc_sim_all_to_all(s);
    else if (!to_all && !s->plain && !s->mixed && hpmlc_sim_is_ring(s))
        hpmlc_sim_ring(s, s->phases[0] == 2 ? 2 * (s->p - 1) : s->p - 1);
    else hpmlc_sim_queue(s);
    return !s->failed;
}

/* Simulates a collective of n elements of `size` bytes: advances s->clock of each rank to the time when the rank is
   done. a: algorithm of an allreduce. False: out of memory. */
HPMLC_FN bool hpmlc_sim_play(hpmlc_sim *s, hpmlc_sim_kind kind, hpml_algorithm a, int64_t n, size_t size)
{
    int p = s->p;
    if (p == 1) return true;
    s->kind = kind;
    s->n    = n;
    s->size = size;
    if (a == HPML_AUTO && kind == HPMLC_SIM_ALLREDUCE) a = hpml_comm_choose(&s->layout, n * (int64_t)size);
    for (int r = 0; r < p && kind != HPMLC_SIM_ALL_TO_ALL; r++) {
        hpmlc_phases all;
        if (kind == HPMLC_SIM_ALLGATHER) hpmlc_phases_single(&all, &hpmlc_ring_gather, p, r, 0, n);
        else hpmlc_phases_make(&all, a, p, s->layout.per_node, s->layout.spread, r, n);
        hpmlc_sim_set_phases(s, r, &all);
    }
    return hpmlc_sim_run(s);
}

/* Returns the latest clock of all ranks, in seconds. */
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
    if (p < 1 || p > 65536) return hpmlc_refuse(to, wrong, "simulate: %d ranks: expected 1 to 65536", p);
    if ((unsigned)a >= HPML_ALGORITHM_COUNT)
        return hpmlc_refuse(to, wrong, "simulate: there is no algorithm %d; take a word of hpml_algorithm", (int)a);
    if (hpmlc_algorithm_row(a)->native)
        return hpmlc_refuse(to, HPML_ERR_UNSUPPORTED, "simulate: the moves of an MPI's own allreduce are not known; "
                            "choose another algorithm");
    if (p > 1 && !net->node && net->ranks_per_node == 0 && (net->between.latency > 0 || net->between.bandwidth > 0))
        return hpmlc_refuse(to, wrong, "simulate: network.between is given but ranks_per_node is 0, which puts all "
                            "ranks on one node; set ranks_per_node (1: each rank a node of its own)");
    return hpmlc_network_check("simulate", net, p, true, to);
}

HPMLC_FN hpml_status hpmlc_sim_check(const hpml_simulate_desc *d, const hpmlc_text *to)
{
    const hpml_status wrong = HPML_ERR_ARGUMENT;
    int64_t           total = 0, limit = (int64_t)1 << 50;
    if (!d || d->_begin || d->_end)
        return hpmlc_refuse(to, wrong, "simulate%s", d ? " desc: canary is not zero; zero the struct before you set "
                            "fields" : ": no desc given");
    hpml_status status = hpmlc_sim_check_network(d->packed ? HPML_RING : d->algorithm, d->ranks, &d->network, to);
    if (status != HPML_OK) return status;
    if (d->layers < 1 || !d->backward_s || !d->elements)
        return hpmlc_refuse(to, wrong, "simulate: %d layers, backward_s %s, elements %s; at least one layer and both "
                            "are needed", d->layers, d->backward_s ? "given" : "NULL", d->elements ? "given" : "NULL");
    if (hpml_element_size(d->element) == 0 || !HPMLC_GOOD(d->update_s) || !HPMLC_GOOD(d->codec_s_per_byte))
        return hpmlc_refuse(to, wrong, "simulate: element %d, update_s %g, codec_s_per_byte %g: out of range",
                            (int)d->element, d->update_s, d->codec_s_per_byte);
    if (d->servers < 0 || d->servers >= d->ranks)
        return hpmlc_refuse(to, wrong, "simulate: %d servers of %d ranks; at least one rank must be a worker",
                            d->servers, d->ranks);
    for (int i = 0; i < d->layers; i++) {
        double  forward = d->forward_s ? d->forward_s[i] : 0, backward = d->backward_s[i];
        int64_t packed  = d->packed ? d->packed[i] : 0, n = d->elements[i];
        if (!HPMLC_GOOD(forward) || !HPMLC_GOOD(backward) || n < 0 || packed < 0)
            return hpmlc_refuse(to, wrong, "simulate: layer %d: forward %g s, backward %g s, %lld elements, packed in "
                                "%lld bytes: a negative number or NaN", i, forward, backward, (long long)n,
                                (long long)packed);
        total = n < limit - total && packed < limit ? total + n : limit;
        if (total >= limit) return hpmlc_refuse(to, wrong, "simulate: layer %d: more than 2^50 elements in all", i);
    }
    return HPML_OK;
}

/* Simulates the exchange of a bucket of n floats, ready on rank r at ready * slow[r] seconds. packed: its compressed
   bytes, used where d->packed is given. Adds the seconds of the exchange to *comm. False: out of memory. */
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

/* Simulates that ranks [first, end), in the order of their clocks, send a header and `bytes` to each of ranks
   [to, to_end), which wait for all of these messages. */
HPMLC_FN void hpmlc_sim_deal(hpmlc_sim *s, int first, int end, int to, int to_end, size_t header, int64_t bytes)
{
    s->runs = 0;
    for (int r = first; r < end; r++) hpmlc_sim_push(s, r);
    for (int i = to; i < to_end; i++) s->work[i] = s->clock[i];
    while (s->runs > 0) {
        const int r = hpmlc_sim_pop(s);
        for (int i = to; i < to_end; i++) {
            hpmlc_sim_send(s, r, i, (int64_t)header);
            s->work[i] = fmax(s->work[i], hpmlc_sim_send(s, r, i, bytes));
        }
    }
    for (int i = to; i < to_end; i++) s->clock[i] = s->work[i];
}

/* Simulates steps with parameter servers; stores mean times and counts of the steps after warm-up in *out. */
HPMLC_FN void hpmlc_sim_servers(hpmlc_sim *s, const hpml_simulate_desc *d, hpml_simulation *out)
{
    enum { STEPS = 8 }; /* steps that are measured, after as many to warm up */
    const int workers = s->p - d->servers;
    double    compute = 0, slowest = 1, begin = 0, end = 0;
    int64_t   up = 0, down = 0;
    for (int i = 0; i < d->layers; i++) {
        compute += d->backward_s[i] + (d->forward_s ? d->forward_s[i] : 0);
        up += d->packed ? d->packed[i] : 4 * d->elements[i];
        down += 4 * d->elements[i];
    }
    for (int step = 0; step < 2 * STEPS; step++) {
        if (step == STEPS) {
            begin = end;
            memset(s->bytes, 0, sizeof *s->bytes * 2 * (size_t)s->p); /* and s->messages */
            s->between = 0;
        }
        for (int r = 0; r < workers; r++) s->clock[r] += compute * (d->network.slow ? d->network.slow[r] : 1);
        hpmlc_sim_deal(s, 0, workers, workers, s->p, sizeof(hpmlc_request), up / d->servers);
        for (int r = workers; r < s->p; r++) s->clock[r] += d->update_s / d->servers;
        hpmlc_sim_deal(s, workers, s->p, 0, workers, sizeof(hpmlc_answer), down / d->servers);
        end = hpmlc_sim_latest(s);
    }
    for (int r = 0; r < s->p; r++) {
        if (d->network.slow && r < workers) slowest = fmax(slowest, d->network.slow[r]);
        out->bytes_per_rank = hpmlc_max(out->bytes_per_rank, s->bytes[r] / STEPS);
        out->messages       = hpmlc_max(out->messages, s->messages[r] / STEPS);
    }
    out->step_s        = (end - begin) / (double)STEPS;
    out->between_bytes = s->between / STEPS;
    out->compute_s     = compute + d->update_s / d->servers;
    out->straggle_s    = (slowest - 1) * compute;
}

/* Simulates one step of training, bucket by bucket, and stores its times and counts in *out. False: out of memory. */
HPMLC_FN bool hpmlc_sim_step(hpmlc_sim *s, const hpml_simulate_desc *d, hpml_simulation *out)
{
    double   now = 0, slowest = d->network.slow ? 0 : 1, whole = 0;
    int64_t  n = 0, packed = 0;
    double   limit = d->bucket_bytes == 0 ? 25 * 1048576. : (double)d->bucket_bytes;
    for (int i = 0; i < d->layers; i++) {
        now += d->forward_s ? d->forward_s[i] : 0;
        whole += d->backward_s[i];
    }
    whole += now;
    for (int i = d->layers - 1; i >= 0; i--) {
        now += d->backward_s[i];
        n += d->elements[i];
        packed += d->packed ? d->packed[i] : 0;
        if (n == 0 || ((double)n * 4 < limit && i > 0)) continue;
        double ready = d->no_overlap ? whole : now;
        if (d->delayed) ready = 0;
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
    return true;
}

HPML_API hpml_status hpml_simulate(const hpml_simulate_desc *desc, hpml_simulation *out, char *error, size_t size)
{
    hpmlc_sim        s;
    const hpmlc_text to = { error, size };
    HPMLC_ZERO(hpml_simulation, result);
    hpmlc_refuse(&to, HPML_OK, "%s", "");
    if (!out) return hpmlc_refuse(&to, HPML_ERR_ARGUMENT, "simulate: out is NULL; pass a struct for the result");
    *out = result;
    hpml_status status = hpmlc_sim_check(desc, &to);
    if (status != HPML_OK) return status;
    bool good = hpmlc_sim_open(&s, desc->ranks, &desc->network, 1);
    if (good && desc->servers > 0) hpmlc_sim_servers(&s, desc, &result);
    else good = good && hpmlc_sim_step(&s, desc, &result);
    if (!good) status = hpmlc_refuse(&to, HPML_ERR_MEMORY, "simulate: no memory for %d ranks", desc->ranks);
    hpmlc_sim_close(&s);
    if (!good) return status;
    result.exposed_s = fmax(0, result.step_s - result.compute_s - result.straggle_s);
    if (desc->servers > 0) result.comm_s = result.exposed_s;
    result.efficiency = result.step_s > 0 ? result.compute_s / result.step_s : 1;
    *out = result;
    return status;
}

HPML_API int hpml_simulate_text(const hpml_simulation *s, char *buffer, size_t size)
{
    char low[128];
    if (!s) return 0;
    return snprintf(buffer, size, "%d buckets: step %.4g ms = compute %.4g + stragglers %.4g + exposed %.4g; exchange "
                    "%.4g ms; efficiency %.0f %%%s", s->buckets, 1e3 * s->step_s, 1e3 * s->compute_s,
                    1e3 * s->straggle_s, 1e3 * s->exposed_s, 1e3 * s->comm_s, 100 * s->efficiency,
                    hpmlc_efficiency_warning(s->efficiency, low));
}

HPML_API double hpml_simulate_allreduce(hpml_algorithm a, int32_t ranks, const hpml_network *network, int64_t bytes)
{
    hpmlc_sim s;
    double    seconds = -1;
    if (!network || bytes < 0 || hpmlc_sim_check_network(a, ranks, network, NULL) != HPML_OK) return -1;
    size_t size = bytes % 4 == 0 ? 4 : 1;
    if (hpmlc_sim_open(&s, ranks, network, 1) && hpmlc_sim_play(&s, HPMLC_SIM_ALLREDUCE, a, bytes / (int64_t)size, size))
        seconds = hpmlc_sim_latest(&s);
    hpmlc_sim_close(&s);
    return seconds;
}

HPML_API double hpml_amdahl(double serial, double ranks) { return 1 / (serial + (1 - serial) / ranks); }

HPML_API double hpml_optimal_ranks(double divisible_s, double fixed_s, double comm_s)
{
    return comm_s > fixed_s ? divisible_s / (comm_s - fixed_s) : HUGE_VAL;
}

// ---------------------------------------------------------------------------------------------------------------------
// >>pipe-simulate   pipelines in virtual time; drawing them
// ---------------------------------------------------------------------------------------------------------------------
typedef struct hpmlc_pipe_sim {
    const hpml_pipe_desc *desc;
    int                   p, m, chunks;
    hpmlc_sim             net;        /* clocks of the stages, cards, links */
    hpmlc_pipe_walk      *walk;       /* (p) */
    hpml_pipe_task       *next;       /* (p) the task that each stage does next */
    bool                 *ended;      /* (p) the stage has no task left */
    double               *arrival[2]; /* (pieces, m) when the input of a forward, backward pass arrives; -1: unknown */
} hpmlc_pipe_sim;

HPMLC_FN bool hpmlc_pipe_sim_open(hpmlc_pipe_sim *s, const hpml_pipe_desc *d)
{
    memset(s, 0, sizeof *s);
    s->desc   = d;
    s->p      = d->stages;
    s->m      = d->micro;
    s->chunks = hpmlc_pipe_chunks(d);
    size_t p = (size_t)s->p, inputs = p * (size_t)s->chunks * (size_t)s->m;
    s->walk  = (hpmlc_pipe_walk *)calloc(p, sizeof *s->walk);
    s->next  = (hpml_pipe_task *)calloc(p, sizeof *s->next);
    s->ended = (bool *)calloc(p, sizeof *s->ended);
    s->arrival[0] = (double *)malloc(2 * inputs * sizeof(double));
    if (!hpmlc_sim_open(&s->net, s->p, &d->network, 1) || !s->walk || !s->next || !s->ended || !s->arrival[0])
        return false;
    s->arrival[1] = s->arrival[0] + inputs;
    for (size_t i = 0; i < 2 * inputs; i++) s->arrival[0][i] = -1;
    for (int i = 0; i < s->m; i++) { /* known from the start: the first piece's inputs, the last one's gradient */
        s->arrival[0][i] = 0;
        s->arrival[1][inputs - 1 - (size_t)i] = 0;
    }
    for (int r = 0; r < s->p; r++) {
        hpmlc_pipe_begin(&s->walk[r], d, r);
        s->ended[r] = !hpmlc_pipe_next(&s->walk[r], &s->next[r]);
    }
    return true;
}

HPMLC_FN void hpmlc_pipe_sim_close(hpmlc_pipe_sim *s)
{
    hpmlc_sim_close(&s->net);
    free(s->walk);
    free(s->next);
    free(s->ended);
    free(s->arrival[0]);
}

/* Returns the seconds of stage r's next task. */
HPMLC_FN double hpmlc_pipe_seconds(const hpmlc_pipe_sim *s, int r)
{
    const hpml_pipe_desc *d = s->desc;
    const hpml_pipe_task *t = &s->next[r];
    double slow     = d->network.slow ? d->network.slow[r] : 1;
    double forward  = d->forward_s ? d->forward_s[t->piece] : 1.0 / s->chunks;
    double backward = d->backward_s ? d->backward_s[t->piece] : 2 * forward;
    double weights  = d->weights_s ? d->weights_s[t->piece] : backward / 2;
    switch (t->work) {
    case HPML_PIPE_FORWARD: return slow * forward;
    case HPML_PIPE_BACKWARD: return slow * backward;
    case HPML_PIPE_BACKWARD_INPUTS: return slow * (backward - weights);
    case HPML_PIPE_BACKWARD_WEIGHTS: return slow * weights;
    default: return slow * d->update_s;
    }
}

/* Returns when stage r can begin its next task; -1: the task's input has not been sent yet, or there is no task. */
HPMLC_FN double hpmlc_pipe_ready(const hpmlc_pipe_sim *s, int r)
{
    const hpml_pipe_task *t = &s->next[r];
    bool                  forward = t->work == HPML_PIPE_FORWARD;
    if (s->ended[r]) return -1;
    if (t->work == HPML_PIPE_UPDATE || t->work == HPML_PIPE_BACKWARD_WEIGHTS) return s->net.clock[r];
    double arrival = s->arrival[!forward][(size_t)t->piece * (size_t)s->m + (size_t)t->micro];
    return arrival < 0 ? -1 : fmax(arrival, s->net.clock[r]);
}

/* Simulates that stage r sends the result of its task t to the stage of the next piece (backward: the one before). */
HPMLC_FN void hpmlc_pipe_send(hpmlc_pipe_sim *s, int r, const hpml_pipe_task *t)
{
    bool forward = t->work == HPML_PIPE_FORWARD;
    int  piece = forward ? t->piece + 1 : t->piece - 1; /* number of the piece that reads the result */
    int  cut   = forward ? t->piece : piece;
    if (t->work == HPML_PIPE_UPDATE || t->work == HPML_PIPE_BACKWARD_WEIGHTS) return;
    if (piece < 0 || piece >= s->p * s->chunks) return;
    double *arrival = &s->arrival[!forward][(size_t)piece * (size_t)s->m + (size_t)t->micro];
    *arrival = s->net.clock[r];
    if (piece % s->p != r)
        *arrival = hpmlc_sim_send(&s->net, r, piece % s->p, s->desc->bytes ? s->desc->bytes[cut] : 0);
}

/* Simulates, of the next tasks of all stages, the one that ends first (if equal, that of the lowest stage), so that
   messages leave in the order of time. Stores the task in *span. False: no stage can go on. */
HPMLC_FN bool hpmlc_pipe_step(hpmlc_pipe_sim *s, hpml_pipe_span *span)
{
    int first = -1;
    for (int r = 0; r < s->p; r++) {
        double begin = hpmlc_pipe_ready(s, r), end = begin + hpmlc_pipe_seconds(s, r);
        if (begin < 0 || (first >= 0 && end >= span->end_s)) continue;
        first         = r;
        span->begin_s = begin;
        span->end_s   = end;
    }
    if (first < 0) return false;
    span->stage = first;
    span->task  = s->next[first];
    s->net.clock[first] = span->end_s;
    hpmlc_pipe_send(s, first, &span->task);
    s->ended[first] = !hpmlc_pipe_next(&s->walk[first], &s->next[first]);
    return true;
}

/* Checks the seconds, bytes and network in the description of a pipeline whose other fields are valid. */
HPMLC_FN hpml_status hpmlc_pipe_check_times(const hpml_pipe_desc *d, const hpmlc_text *to)
{
    for (int i = 0; i < d->stages * hpmlc_pipe_chunks(d); i++) {
        double  forward = d->forward_s ? d->forward_s[i] : 0;
        double  backward = d->backward_s ? d->backward_s[i] : 2 * forward;
        double  weights = d->weights_s ? d->weights_s[i] : 0;
        int64_t bytes   = d->bytes ? d->bytes[i] : 0;
        if (!HPMLC_GOOD(forward) || !HPMLC_GOOD(backward) || !(weights >= 0) || bytes < 0 ||
            (d->backward_s && weights > backward))
            return hpmlc_refuse(to, HPML_ERR_ARGUMENT, "pipe: piece %d: forward %g s, backward %g s, of which weights "
                                "%g s, %lld bytes: a negative number, NaN, or a share larger than the whole", i,
                                forward, backward, weights, (long long)bytes);
    }
    if (!HPMLC_GOOD(d->update_s)) return hpmlc_refuse(to, HPML_ERR_ARGUMENT, "pipe: update_s is %g", d->update_s);
    return hpmlc_network_check("pipe", &d->network, d->stages, true, to);
}

HPMLC_FN void hpmlc_pipe_run(hpmlc_pipe_sim *s, hpml_pipe_simulation *out, hpml_pipe_span *spans, int capacity)
{
    hpml_pipe_span span = { 0, { HPML_PIPE_FORWARD, 0, 0, 0, 0, 0 }, 0, 0 };
    double        *busy = s->net.work, all = 0; /* busy: (p) seconds, in a scratch array of the simulator */
    for (int r = 0; r < s->p; r++) busy[r] = 0;
    while (hpmlc_pipe_step(s, &span)) {
        if (out->tasks < capacity && spans) spans[out->tasks] = span;
        out->tasks++;
        busy[span.stage] += span.end_s - span.begin_s;
        if (out->step_s < span.end_s) out->step_s = span.end_s;
    }
    for (int r = 0; r < s->p; r++) {
        int slots = 0;
        for (int c = 0; c < s->chunks; c++) slots += s->walk[r].slots[c];
        out->slots = (int32_t)hpmlc_max(out->slots, slots);
        out->bytes += s->net.bytes[r];
        out->compute_s = fmax(out->compute_s, busy[r]);
        all += busy[r];
    }
    if (out->step_s > 0) out->bubble = 1 - all / (s->p * out->step_s);
}

HPML_API hpml_status hpml_pipe_simulate(const hpml_pipe_desc *pipe, hpml_pipe_simulation *out, hpml_pipe_span *spans,
                                        int capacity, char *error, size_t size)
{
    hpmlc_pipe_sim   s;
    const hpmlc_text to = { error, size };
    HPMLC_ZERO(hpml_pipe_simulation, result);
    hpmlc_refuse(&to, HPML_OK, "%s", "");
    if (!out) return hpmlc_refuse(&to, HPML_ERR_ARGUMENT, "pipe: out is NULL; pass a struct for the result");
    *out = result;
    hpml_status status = hpmlc_pipe_check(pipe, &to);
    if (status == HPML_OK) status = hpmlc_pipe_check_times(pipe, &to);
    if (status != HPML_OK) return status;
    if (!hpmlc_pipe_sim_open(&s, pipe))
        status = hpmlc_refuse(&to, HPML_ERR_MEMORY, "pipe: no memory to simulate %d stages with %d micro-batches",
                              pipe->stages, pipe->micro);
    else hpmlc_pipe_run(&s, out, spans, capacity);
    hpmlc_pipe_sim_close(&s);
    return status;
}

/* Returns the largest stage number and sets *end to the time at which the last span ends. */
HPMLC_FN int hpmlc_pipe_extent(const hpml_pipe_span *spans, int count, double *end)
{
    int last = -1;
    *end = 0;
    for (int i = 0; i < count; i++) {
        if (last < spans[i].stage) last = spans[i].stage;
        if (*end < spans[i].end_s) *end = spans[i].end_s;
    }
    return last;
}

/* Returns a character for a task, which encodes its micro-batch: '0'.. for a forward pass, 'a'.. for a backward pass or
   its input gradients, 'A'.. for weight gradients alone; '|' for an update. */
HPMLC_FN char hpmlc_pipe_letter(const hpml_pipe_task *t)
{
    switch (t->work) {
    case HPML_PIPE_FORWARD: return (char)('0' + t->micro % 10);
    case HPML_PIPE_BACKWARD:
    case HPML_PIPE_BACKWARD_INPUTS: return (char)('a' + t->micro % 26);
    case HPML_PIPE_BACKWARD_WEIGHTS: return (char)('A' + t->micro % 26);
    default: return '|';
    }
}

HPML_API int hpml_pipe_text(const hpml_pipe_span *spans, int count, int columns, char *buffer, size_t size)
{
    const hpmlc_text to = { buffer, size };
    double           end;
    size_t           length = 0;
    int              last = hpmlc_pipe_extent(spans, count, &end);
    if (size > 0) buffer[0] = 0;
    for (int r = 0; r <= last && columns > 0; r++) {
        hpmlc_append(&to, &length, "%3d ", r);
        for (int column = 0; column < columns; column++) {
            double at = (column + 0.5) * end / columns;
            char   letter = '.';
            for (int i = 0; i < count; i++) {
                bool here = spans[i].stage == r && spans[i].begin_s <= at && at < spans[i].end_s;
                if (here) letter = hpmlc_pipe_letter(&spans[i].task);
            }
            hpmlc_append(&to, &length, "%c", letter);
        }
        hpmlc_append(&to, &length, "\n");
    }
    return (int)length;
}

/* Draws a rectangle for each task: each stage is a row of 30 pixels, and the whole time is 900 pixels wide. */
HPML_API int hpml_pipe_svg(const hpml_pipe_span *spans, int count, const char *title, char *buffer, size_t size)
{
    static const char *const colour[] = { "#77aadd", "#99ddaa", "#99ddaa", "#eedd88", "#ee8866" };
    const hpmlc_text to = { buffer, size };
    double           end;
    size_t           length = 0;
    int              last = hpmlc_pipe_extent(spans, count, &end);
    double           scale = end > 0 ? 900 / end : 0;
    if (size > 0) buffer[0] = 0;
    hpmlc_append(&to, &length, "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"1000\" height=\"%d\" "
                 "font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"1000\" height=\"%d\" fill=\"white\"/>\n"
                 "<text x=\"70\" y=\"20\">", 30 * last + 70, 30 * last + 70);
    for (const char *c = title; c && *c; c++) hpmlc_append(&to, &length, "%c", strchr("<>&", *c) ? ' ' : *c);
    hpmlc_append(&to, &length, "</text>\n");
    for (int r = 0; r <= last; r++)
        hpmlc_append(&to, &length, "<text x=\"10\" y=\"%d\">stage %d</text>\n", 30 * r + 50, r);
    for (int i = 0; i < count; i++) {
        const hpml_pipe_span *s = &spans[i];
        double                x = 70 + scale * s->begin_s, width = scale * (s->end_s - s->begin_s);
        hpmlc_append(&to, &length, "<rect x=\"%.2f\" y=\"%d\" width=\"%.2f\" height=\"24\" fill=\"%s\" stroke=\"#555\" "
                     "stroke-width=\"0.5\"/>\n", x, 30 * s->stage + 34, width, colour[s->task.work]);
        if (width < 12 || s->task.work == HPML_PIPE_UPDATE) continue;
        hpmlc_append(&to, &length, "<text x=\"%.2f\" y=\"%d\" text-anchor=\"middle\">%d</text>\n", x + width / 2,
                     30 * s->stage + 50, s->task.micro);
    }
    hpmlc_append(&to, &length, "</svg>\n");
    return (int)length;
}

// ---------------------------------------------------------------------------------------------------------------------
// >>play   programs of all ranks in virtual time
// ---------------------------------------------------------------------------------------------------------------------
/* A program is a list of acts that a rank repeats in each step. Each rank has two actors, its own thread and its
   background thread, with a clock each; the list of the background's acts is cut into jobs, which begin when the rank's
   own thread has posted them. The queue of >>simulate plays the messages of all actors. Of two actors with equal clocks
   the background comes first, as in >>clock. */

typedef enum hpmlc_act_kind {
    HPMLC_ACT_COMPUTE, /* takes .seconds */
    HPMLC_ACT_SEND, HPMLC_ACT_RECEIVE, /* .n bytes to or from .peer of the group */
    HPMLC_ACT_COLLECT, /* takes part in a collective of the group */
    HPMLC_ACT_POST,    /* lets the background begin its next job */
    HPMLC_ACT_WAIT,    /* waits for the background's job number .peer of this step */
    HPMLC_ACT_END      /* of the step; in the background's list: of the job */
} hpmlc_act_kind;

typedef enum hpmlc_collective {
    HPMLC_ALLREDUCE, HPMLC_REDUCE_SCATTER, HPMLC_ALLGATHER, HPMLC_BROADCAST, /* .n elements of .size bytes */
    HPMLC_STRIPES,     /* all to all: a block of .n bytes and a header to each rank */
    HPMLC_SUMS,        /* a block of .n bytes and a header of each rank to all */
    HPMLC_PASSES       /* size - 1 times .n bytes to the next rank */
} hpmlc_collective;

/* Sets of ranks that exchange messages: one axis, or a group of these words. */
enum { HPMLC_GROUP_REPLICAS = HPML_AXES, HPMLC_GROUP_ALL, HPMLC_GROUPS };

typedef struct hpmlc_act {
    hpmlc_act_kind   kind;
    int32_t          group;   /* an hpml_axis or HPMLC_GROUP_; .peer is a position in it */
    int32_t          peer;    /* SEND, RECEIVE: the other rank; BROADCAST: the root; WAIT: number of the job */
    int32_t          tag;
    hpmlc_collective collective;
    hpml_algorithm   algorithm;
    size_t           size;
    int64_t          n;
    double           seconds;
    hpml_term        term;    /* of the step's time, to which computing and waiting in this act are added */
} hpmlc_act;

typedef struct hpmlc_acts {
    hpmlc_act *item;
    int        count, capacity, jobs; /* jobs: number of acts END */
    bool       failed;                /* out of memory */
} hpmlc_acts;

typedef struct hpmlc_role { hpmlc_acts own, background; } hpmlc_role;

typedef struct hpmlc_layouts hpmlc_layouts; /* nodes of the ranks of a group, by which AUTO chooses algorithms */
struct hpmlc_layouts {
    hpmlc_layouts *next;
    int            group;
    hpml_comm      c;
};

typedef struct hpmlc_actor {
    const hpmlc_acts *acts;
    int               at, step;     /* number of the act, of the step or, in the background, of the job */
    bool              begun;        /* the act, or in the background the job, has begun */
    bool              idle;         /* waits for a job to be posted, or to end */
    int64_t           jobs;         /* posted by the own thread; ended by the background */
    hpmlc_layouts    *layout[HPMLC_GROUPS];
    double            term[HPML_TERM_COUNT], link[2]; /* seconds after the first step; waits by link */
} hpmlc_actor;

typedef struct hpmlc_play {
    hpmlc_sim      net;             /* of actors: 2 r is the background, 2 r + 1 the own thread of rank r */
    int            ranks, workers;  /* servers are the last ranks */
    int            unit;            /* ranks [0, unit) are played for all others, which are equal */
    int            size[HPML_AXES], stride[HPML_AXES]; /* of the axes */
    unsigned       mask[HPMLC_GROUPS]; /* bit k: the ranks of the group differ on axis k */
    const hpml_network *network;
    int            nodes;
    int            steps;
    double         origin;          /* clocks at the start */
    double        *ends;            /* (steps) latest clock at the end of each step */
    hpmlc_role    *role;            /* (roles) one for each stage of the pipeline, then one for each server */
    int            roles;
    hpmlc_actor   *actor;           /* (2 unit) */
    double        *posted, *ended;  /* (unit, jobs) clocks when the last jobs were posted, ended */
    int            jobs;            /* most jobs of a role */
    hpmlc_layouts *layouts;
} hpmlc_play;

HPMLC_FN hpmlc_play *hpmlc_play_of(hpmlc_sim *s) { return (hpmlc_play *)(void *)s; } /* net is the first member */

/* Appends an act of a kind, zero otherwise, and returns it; NULL: out of memory. */
HPMLC_FN hpmlc_act *hpmlc_act_add(hpmlc_acts *acts, hpmlc_act_kind kind, int group, hpml_term term)
{
    if (acts->count == acts->capacity) {
        const int  capacity = acts->capacity ? 2 * acts->capacity : 64;
        hpmlc_act *more = (hpmlc_act *)realloc(acts->item, sizeof *more * (size_t)capacity);
        if (!more) acts->failed = true;
        if (!more) return NULL;
        acts->item     = more;
        acts->capacity = capacity;
    }
    hpmlc_act *act = &acts->item[acts->count++];
    memset(act, 0, sizeof *act);
    act->kind  = kind;
    act->group = group;
    act->term  = term;
    acts->jobs += kind == HPMLC_ACT_END;
    return act;
}

HPMLC_FN int hpmlc_play_at(const hpmlc_play *y, int rank, int axis) { return rank / y->stride[axis] % y->size[axis]; }

HPMLC_FN int hpmlc_group_size(const hpmlc_play *y, int group)
{
    int size = 1;
    if (group == HPMLC_GROUP_ALL) return y->ranks;
    for (int k = 0; k < HPML_AXES; k++)
        if (y->mask[group] >> k & 1) size *= y->size[k];
    return size;
}

/* Returns the position of a rank in its group. */
HPMLC_FN int hpmlc_group_place(const hpmlc_play *y, int group, int rank)
{
    int place = 0, step = 1;
    if (group == HPMLC_GROUP_ALL) return rank;
    for (int i = 0; i < HPML_AXES; i++) {
        const int k = (int)hpmlc_axis_order[i];
        if (!(y->mask[group] >> k & 1)) continue;
        place += hpmlc_play_at(y, rank, k) * step;
        step *= y->size[k];
    }
    return place;
}

/* Returns the rank at position `place` of the group of rank `rank`. */
HPMLC_FN int hpmlc_group_rank(const hpmlc_play *y, int group, int rank, int place)
{
    if (group == HPMLC_GROUP_ALL) return place;
    for (int i = 0; i < HPML_AXES; i++) {
        const int k = (int)hpmlc_axis_order[i];
        if (!(y->mask[group] >> k & 1)) continue;
        rank += (place % y->size[k] - hpmlc_play_at(y, rank, k)) * y->stride[k];
        place /= y->size[k];
    }
    return rank;
}

HPMLC_FN int hpmlc_play_node(const hpmlc_play *y, int rank) { return hpmlc_network_node(y->network, y->nodes, rank); }

/* Returns the layout of the group of a rank: one that another group with the same pattern of nodes has made, or a new
   one. NULL: out of memory. */
HPMLC_FN hpmlc_layouts *hpmlc_group_layout(hpmlc_play *y, int group, int rank)
{
    const int p = hpmlc_group_size(y, group), first = hpmlc_play_node(y, hpmlc_group_rank(y, group, rank, 0));
    for (hpmlc_layouts *l = y->layouts; l; l = l->next) {
        int i = 0;
        if (l->group != group || (l->c.node[0] == 0) != (first == 0)) continue;
        while (i < p && hpmlc_play_node(y, hpmlc_group_rank(y, group, rank, i)) - first == l->c.node[i] - l->c.node[0])
            i++;
        if (i == p) return l;
    }
    hpmlc_layouts *l = (hpmlc_layouts *)calloc(1, sizeof *l + sizeof(int32_t) * (size_t)p);
    if (!l) return NULL;
    l->next  = y->layouts;
    l->group = group;
    l->c.size = p;
    l->c.node = (int32_t *)(void *)(l + 1);
    l->c.is_virtual = true;
    for (int i = 0; i < p; i++) l->c.node[i] = hpmlc_play_node(y, hpmlc_group_rank(y, group, rank, i));
    hpmlc_comm_links(&l->c, y->network, y->nodes);
    hpmlc_comm_layout(&l->c);
    y->layouts = l;
    return l;
}

/* Sets the actor's current move: rank `to`, at another position of the group than this one, gets `bytes`; -1: none. */
HPMLC_FN void hpmlc_play_set(hpmlc_play *y, int a, int group, int to, int from, int64_t bytes, int tag)
{
    hpmlc_sim_rank *q = &y->net.rank[a];
    const int       rank = a / 2, mine = hpmlc_play_node(y, rank);
    q->to    = -1;
    q->from  = -1;
    q->bytes = bytes;
    q->tag   = tag;
    if (to >= 0) {
        to     = hpmlc_group_rank(y, group, rank, to);
        q->far = hpmlc_play_node(y, to) != mine;
        q->to  = to % y->unit * 2 + a % 2;
    }
    if (from < 0) return;
    from        = hpmlc_group_rank(y, group, rank, from);
    q->far_from = hpmlc_play_node(y, from) != mine;
    q->from     = from % y->unit * 2 + a % 2;
}

/* Sets the phases of a collective that an actor begins. */
HPMLC_FN void hpmlc_collect_begin(hpmlc_play *y, int a, const hpmlc_act *act)
{
    hpml_comm      *c  = &y->actor[a].layout[act->group]->c;
    const int       me = hpmlc_group_place(y, act->group, a / 2);
    hpml_algorithm  algorithm = act->algorithm;
    hpmlc_phases    all;
    all.count = 0;
    if (act->collective == HPMLC_ALLREDUCE) {
        if (algorithm == HPML_AUTO) algorithm = hpml_comm_choose(c, act->n * (int64_t)act->size);
        if (algorithm == HPML_ALGORITHM_NONE) y->net.failed = true;
        hpmlc_phases_make(&all, algorithm, c->size, c->per_node, c->spread, me, act->n);
    }
    if (act->collective == HPMLC_REDUCE_SCATTER)
        hpmlc_phases_single(&all, &hpmlc_ring_scatter, c->size, me, 0, act->n);
    if (act->collective == HPMLC_ALLGATHER)
        hpmlc_phases_single(&all, &hpmlc_ring_gather, c->size, me, 0, act->n);
    if (act->collective == HPMLC_BROADCAST)
        hpmlc_phases_single(&all, &hpmlc_tree_down, c->size, me, act->peer, act->n);
    hpmlc_sim_set_phases(&y->net, a, &all);
}

/* Sets the move of the current round of a collective; false: the actor has no round left. */
HPMLC_FN bool hpmlc_collect_move(hpmlc_play *y, int a, const hpmlc_act *act)
{
    hpmlc_sim_rank *q = &y->net.rank[a];
    const int       p = hpmlc_group_size(y, act->group), me = hpmlc_group_place(y, act->group, a / 2);
    if (act->collective < HPMLC_STRIPES) {
        y->net.size = act->size;
        if (!hpmlc_sim_phase_move(&y->net, a)) return false;
        hpmlc_play_set(y, a, act->group, q->to, q->from, q->bytes, 0);
        return true;
    }
    const int k = q->round + 1, shift = act->collective == HPMLC_PASSES ? 1 : k;
    if (k >= p) return false;
    hpmlc_play_set(y, a, act->group, (me + shift) % p, (me + p - shift) % p, act->n, 0);
    return true;
}

/* Adds the seconds for which an own thread has waited in an act. */
HPMLC_FN void hpmlc_actor_waited(hpmlc_play *y, int a, const hpmlc_act *act, double seconds, bool far)
{
    hpmlc_actor *actor = &y->actor[a];
    if (actor->step == 0 || seconds <= 0) return;
    actor->term[act->term] += seconds;
    actor->link[far] += act->term == HPML_TERM_BUBBLE ? 0 : seconds;
}

/* Waits, for an own thread, until job number `job` of all steps has ended; false: it has not. */
HPMLC_FN bool hpmlc_job_over(hpmlc_play *y, int a, const hpmlc_act *act)
{
    hpmlc_actor      *actor = &y->actor[a], *other = &y->actor[a - 1];
    const int64_t     job = (int64_t)actor->step * other->acts->jobs + act->peer;
    const hpml_comm  *c = actor->layout[act->group] ? &actor->layout[act->group]->c : NULL;
    actor->idle = other->jobs <= job;
    if (actor->idle) return false;
    const double end = y->ended[(int64_t)(a / 2) * y->jobs + act->peer];
    hpmlc_actor_waited(y, a, act, end - y->net.clock[a], c && c->per_node != c->size);
    if (y->net.clock[a] < end) y->net.clock[a] = end;
    return true;
}

HPMLC_FN void hpmlc_actor_next(hpmlc_play *y, int a)
{
    hpmlc_actor *actor = &y->actor[a];
    actor->at++;
    actor->begun = false;
    y->net.rank[a].phase = y->net.rank[a].round = 0;
    if (actor->at < actor->acts->count) return;
    actor->at = 0;
    if (a % 2 == 1) actor->step++;
}

/* Ends a step of an own thread, or a job of a background, for which the own thread may wait. */
HPMLC_FN void hpmlc_act_end(hpmlc_play *y, int a)
{
    hpmlc_actor *actor = &y->actor[a];
    const double now = y->net.clock[a];
    if (a % 2 == 1) {
        if (y->ends[actor->step] < now) y->ends[actor->step] = now;
        hpmlc_actor_next(y, a);
        return;
    }
    y->ended[(int64_t)(a / 2) * y->jobs + actor->jobs % actor->acts->jobs] = now;
    actor->jobs++;
    hpmlc_actor_next(y, a);
    if (y->actor[a + 1].idle) hpmlc_sim_advance(&y->net, a + 1, false);
}

/* Lets the background of an own thread begin its next job. */
HPMLC_FN void hpmlc_act_post(hpmlc_play *y, int a)
{
    hpmlc_actor *actor = &y->actor[a], *other = &y->actor[a - 1];
    y->posted[(int64_t)(a / 2) * y->jobs + actor->jobs % other->acts->jobs] = y->net.clock[a];
    actor->jobs++;
    hpmlc_actor_next(y, a);
    if (other->idle) hpmlc_sim_advance(&y->net, a - 1, false);
}

/* Returns the actor's next act; NULL: none before another actor has come further. */
HPMLC_FN const hpmlc_act *hpmlc_actor_act(hpmlc_play *y, int a)
{
    hpmlc_actor *actor = &y->actor[a];
    if (a % 2 == 1) return actor->step < y->steps ? &actor->acts->item[actor->at] : NULL;
    actor->idle = actor->jobs >= y->actor[a + 1].jobs;
    if (actor->idle || actor->acts->count == 0) return NULL;
    const double posted = y->posted[(int64_t)(a / 2) * y->jobs + actor->jobs % actor->acts->jobs];
    if (y->net.clock[a] < posted) y->net.clock[a] = posted;
    return &actor->acts->item[actor->at];
}

/* Performs the acts of actor a until one has a message to send or to receive, which becomes the actor's current move;
   false: none can go on. */
HPMLC_FN bool hpmlc_play_move(hpmlc_sim *s, int a)
{
    hpmlc_play      *y = hpmlc_play_of(s);
    hpmlc_sim_rank  *q = &s->rank[a];
    const hpmlc_act *act;
    while ((act = hpmlc_actor_act(y, a)) != NULL) {
        hpmlc_actor *actor = &y->actor[a];
        const double slow = y->network->slow ? y->network->slow[a / 2] : 1;
        if (a % 2 == 1) hpmlc_actor_waited(y, a, act, s->waited[a], q->far_from);
        s->waited[a] = 0;
        switch (act->kind) {
        case HPMLC_ACT_COMPUTE:
            s->clock[a] += act->seconds * slow;
            if (actor->step > 0) actor->term[act->term] += act->seconds * slow;
            hpmlc_actor_next(y, a);
            break;
        case HPMLC_ACT_SEND:
        case HPMLC_ACT_RECEIVE:
            hpmlc_play_set(y, a, act->group, act->kind == HPMLC_ACT_SEND ? act->peer : -1,
                           act->kind == HPMLC_ACT_SEND ? -1 : act->peer, act->n, act->tag);
            if (q->round == 0) return true;
            hpmlc_actor_next(y, a);
            break;
        case HPMLC_ACT_COLLECT:
            if (!actor->begun) hpmlc_collect_begin(y, a, act);
            actor->begun = true;
            if (hpmlc_collect_move(y, a, act)) return true;
            hpmlc_actor_next(y, a);
            break;
        case HPMLC_ACT_POST: hpmlc_act_post(y, a); break;
        case HPMLC_ACT_WAIT:
            if (!hpmlc_job_over(y, a, act)) return false;
            hpmlc_actor_next(y, a);
            break;
        case HPMLC_ACT_END: hpmlc_act_end(y, a); break;
        }
    }
    return false;
}

// ---------------------------------------------------------------------------------------------------------------------
// >>program   the programs of a plan's ranks
// ---------------------------------------------------------------------------------------------------------------------
/* What hpml_distribute does in a step, as acts: one program for each stage of the pipeline and for each server. */

typedef struct hpmlc_maker {
    const hpml_plan        *p;        /* with defaults in */
    const hpml_model_facts *f;
    const hpml_machine     *m;
    hpmlc_play             *y;
    hpmlc_role             *role;     /* the program that is made */
    int                     stage, pieces;
    int32_t                *cut;      /* (pieces + 1) first layer of each piece */
    int64_t                 samples, rows; /* of a rank's batch; of a micro-batch */
    int32_t                *bucket;   /* (layers) number of the bucket with the layer's gradient; -1: none */
    int32_t                *left;     /* (layers) for each bucket: how many of its gradients are not yet final */
    int32_t                *job;      /* (layers) for each bucket: the job that exchanges it */
    int64_t                *floats;   /* (layers) of each bucket */
    int                     buckets, posted, stepped; /* of this step: exchanges posted, buckets stepped early */
    int                     stats;    /* the job that adds up losses; -1: not posted */
    int                     slot[2], slot_job[2], used[2], clock; /* shard 3: buckets whose values are gathered */
} hpmlc_maker;

HPMLC_FN int64_t hpmlc_layer_floats(const hpmlc_maker *k, int i) /* parameters of layer i on a rank, padded */
{
    const hpml_layer_facts *l = &k->f->layer[i];
    int64_t                 n = hpmlc_max(l->rows, 1) * l->cols;
    if (l->split) n /= k->y->size[HPML_AXIS_TENSOR];
    if (l->experts) n /= k->y->size[HPML_AXIS_EXPERT];
    return (n + HPML_GRADIENT_ALIGN - 1) / HPML_GRADIENT_ALIGN * HPML_GRADIENT_ALIGN;
}

/* Returns into how many parts the ranks of a replica cut the computation of a layer. */
HPMLC_FN double hpmlc_layer_parts(const hpmlc_maker *k, const hpml_layer_facts *l)
{
    return (l->split ? k->y->size[HPML_AXIS_TENSOR] : 1) * (double)k->y->size[HPML_AXIS_SEQUENCE];
}

/* Returns the seconds of a layer's forward or backward pass for so many samples, on one rank that has all of it, by the
   machine's operations and bytes a second: the slower of both counts. */
HPMLC_FN double hpmlc_layer_whole(const hpml_layer_facts *l, const hpml_machine *m, double samples, bool back)
{
    const double params = 4.0 * (double)(hpmlc_max(l->rows, 1) * l->cols), bytes = l->bytes * samples + params;
    const double flops  = m->flops > 0 ? l->flops * samples / m->flops : 0;
    const double memory = m->bandwidth > 0 ? bytes / m->bandwidth : 0;
    if (l->forward_s > 0 && !back) return l->forward_s * samples;
    if (l->forward_s > 0) return (l->backward_s > 0 ? l->backward_s : 2 * l->forward_s) * samples;
    return (back ? 2 : 1) * fmax(flops, memory);
}

HPMLC_FN hpmlc_act *hpmlc_collect_add(hpmlc_acts *acts, int group, hpmlc_collective collective, int64_t n, size_t size,
                                      hpml_term term)
{
    hpmlc_act *act = hpmlc_act_add(acts, HPMLC_ACT_COLLECT, group, term);
    if (!act) return NULL;
    act->collective = collective;
    act->n          = n;
    act->size       = size;
    return act;
}

HPMLC_FN void hpmlc_allreduce_add(const hpmlc_maker *k, hpmlc_acts *acts, int group, int64_t n, size_t size,
                                  hpml_term term)
{
    hpmlc_act *act = NULL;
    if (hpmlc_group_size(k->y, group) > 1) act = hpmlc_collect_add(acts, group, HPMLC_ALLREDUCE, n, size, term);
    if (act && size == sizeof(float)) act->algorithm = k->p->algorithm; /* sums of losses are by AUTO */
}

HPMLC_FN void hpmlc_compute_add(const hpmlc_maker *k, double seconds, hpml_term term)
{
    hpmlc_act *act = hpmlc_act_add(&k->role->own, HPMLC_ACT_COMPUTE, 0, term);
    if (act) act->seconds = seconds;
}

HPMLC_FN void hpmlc_message_add(const hpmlc_maker *k, hpmlc_act_kind kind, int group, int peer, int tag, int64_t bytes)
{
    hpmlc_act *act = NULL;
    if (bytes > 0)
        act = hpmlc_act_add(&k->role->own, kind, group,
                            group == HPML_AXIS_PIPE ? HPML_TERM_BUBBLE : HPML_TERM_SERVERS);
    if (!act) return;
    act->peer = peer;
    act->tag  = tag;
    act->n    = bytes;
}

/* Ends a job, whose acts were added to the background's, and lets the own thread post it. Returns its number. */
HPMLC_FN int hpmlc_job_add(const hpmlc_maker *k)
{
    hpmlc_act_add(&k->role->background, HPMLC_ACT_END, 0, HPML_TERM_DATA);
    hpmlc_act_add(&k->role->own, HPMLC_ACT_POST, 0, HPML_TERM_DATA);
    return k->role->background.jobs - 1;
}

HPMLC_FN void hpmlc_await_add(const hpmlc_maker *k, int job)
{
    hpmlc_act *act = job < 0 ? NULL : hpmlc_act_add(&k->role->own, HPMLC_ACT_WAIT, HPMLC_GROUP_REPLICAS, HPML_TERM_DATA);
    if (act) act->peer = job;
}

HPMLC_FN bool hpmlc_exchanges(const hpmlc_maker *k) /* whether there are several ranks that average gradients */
{
    return k->p->strategy == HPML_STRATEGY_SYNC && hpmlc_group_size(k->y, HPMLC_GROUP_REPLICAS) > 1;
}

/* Adds to the background the exchange of one layer's gradient as the codec packs it; returns the floats that are not
   packed, or 0. *packed: adds the bytes of rows that are packed. */
HPMLC_FN int64_t hpmlc_packed_add(const hpmlc_maker *k, int i, int64_t *packed)
{
    const hpml_layer_facts *l = &k->f->layer[i];
    const hpml_codec_desc  *c = &k->p->codec;
    hpmlc_acts             *acts = &k->role->background;
    const int64_t           n = hpmlc_layer_floats(k, i), rows = hpmlc_max(l->rows, 1);
    const int64_t           p = hpmlc_group_size(k->y, HPMLC_GROUP_REPLICAS);
    const int               group = HPMLC_GROUP_REPLICAS;
    const bool              small = rows < 2 || n < (c->min_elements > 0 ? c->min_elements : 256);
    hpml_packing            pack;
    if (!hpmlc_plan_packs(k->p) || (hpmlc_whole_codec(c) && small && !c->compress_all)) return n;
    if (c->kind == HPML_CODEC_TOPK && !c->custom) {
        const int64_t kept = (int64_t)ceil((double)n * (c->ratio > 0 ? (double)c->ratio : 0.01));
        hpmlc_collect_add(acts, group, HPMLC_ALLGATHER, 2 * p * kept, sizeof(float), HPML_TERM_DATA);
        return 0;
    }
    if (hpmlc_whole_codec(c)) {
        const int64_t r = c->lowrank > 0 ? c->lowrank : 2;
        hpmlc_allreduce_add(k, acts, group, r * rows, sizeof(float), HPML_TERM_DATA);
        hpmlc_allreduce_add(k, acts, group, r * (n / rows), sizeof(float), HPML_TERM_DATA);
        return 0;
    }
    if (hpml_packing_init(&pack, c, rows, hpmlc_max(n / rows, 1)) != HPML_OK) return n;
    if (pack.codec == hpml_codec_get(HPML_CODEC_NONE)) return n;
    *packed += (int64_t)pack.size;
    return 0;
}

/* Posts the exchange of bucket b: its reduce-scatter with shard, else the allreduce or what the codec makes of it. */
HPMLC_FN void hpmlc_bucket_add(hpmlc_maker *k, int b)
{
    const int64_t p = hpmlc_group_size(k->y, HPMLC_GROUP_REPLICAS);
    hpmlc_acts   *acts = &k->role->background;
    int64_t       plain = 0, packed = 0;
    if (k->p->shard > 0)
        hpmlc_collect_add(acts, HPMLC_GROUP_REPLICAS, HPMLC_REDUCE_SCATTER, k->floats[b], sizeof(float), HPML_TERM_DATA);
    for (int i = k->f->layers - 1; i >= 0 && k->p->shard == 0; i--)
        if (k->bucket[i] == b) plain += hpmlc_packed_add(k, i, &packed);
    if (packed > 0) {
        const int64_t block = (packed + p - 1) / p + (int64_t)sizeof(int64_t);
        hpmlc_collect_add(acts, HPMLC_GROUP_REPLICAS, HPMLC_STRIPES, block, 1, HPML_TERM_DATA);
        hpmlc_collect_add(acts, HPMLC_GROUP_REPLICAS, HPMLC_SUMS, block, 1, HPML_TERM_DATA);
    }
    if (plain > 0) hpmlc_allreduce_add(k, acts, HPMLC_GROUP_REPLICAS, plain, sizeof(float), HPML_TERM_DATA);
    k->job[b] = hpmlc_job_add(k);
}

HPMLC_FN void hpmlc_stats_add(hpmlc_maker *k)
{
    hpmlc_allreduce_add(k, &k->role->background, HPMLC_GROUP_REPLICAS, HPMLC_STATS, sizeof(double), HPML_TERM_DATA);
    k->stats = hpmlc_job_add(k);
}

HPMLC_FN void hpmlc_posts_add(hpmlc_maker *k) /* the exchanges of the buckets that are complete, in their order */
{
    while (k->posted < k->buckets && k->left[k->posted] == 0) hpmlc_bucket_add(k, k->posted++);
}

/* Returns the seconds of the optimizer's step on a rank for so many floats of the `all` that the rank's stage has. */
HPMLC_FN double hpmlc_update_seconds(const hpmlc_maker *k, double floats)
{
    double total = 0;
    if (k->f->update_s <= 0)
        return k->m->bandwidth > 0 ? floats * 4 * (3 + 2 * k->f->states) / k->m->bandwidth : 0;
    for (int i = 0; i < k->f->layers; i++) total += (double)(hpmlc_max(k->f->layer[i].rows, 1) * k->f->layer[i].cols);
    return total > 0 ? k->f->update_s * floats / total : 0;
}

/* Steps the rank's blocks of buckets from k->stepped to `to` - 1, and gathers their new values unless ranks keep only
   their parts (shard 3). Returns the last job. */
HPMLC_FN int hpmlc_shard_steps_add(hpmlc_maker *k, int to)
{
    const double p = hpmlc_group_size(k->y, HPMLC_GROUP_REPLICAS);
    int          job = -1;
    for (; k->stepped < to; k->stepped++) {
        const int64_t n = k->floats[k->stepped];
        hpmlc_compute_add(k, hpmlc_update_seconds(k, (double)n / p), HPML_TERM_UPDATE);
        if (k->p->shard == 3) continue;
        hpmlc_collect_add(&k->role->background, HPMLC_GROUP_REPLICAS, HPMLC_ALLGATHER, n, sizeof(float),
                          HPML_TERM_DATA);
        job = hpmlc_job_add(k);
    }
    return job;
}

/* Whether, with shard 1 and 2, buckets are stepped within the backward pass. */
HPMLC_FN bool hpmlc_steps_early(const hpmlc_maker *k)
{
    const hpml_plan_facts *f = &k->f->facts;
    return k->p->shard > 0 && k->p->shard < 3 && !k->p->no_overlap && k->p->pipe <= 1 && !f->clips && !f->overflows &&
           !f->steps_tensors;
}

/* The gradient of layer i is final. */
HPMLC_FN void hpmlc_gradient_add(hpmlc_maker *k, int i)
{
    if (!hpmlc_exchanges(k) || k->bucket[i] < 0) return;
    k->left[k->bucket[i]]--;
    if (k->p->no_overlap && k->p->shard < 2) return;
    if (hpmlc_steps_early(k) && k->stats < 0) hpmlc_stats_add(k);
    hpmlc_posts_add(k);
    while (hpmlc_steps_early(k) && k->stepped + 1 < k->posted) {
        hpmlc_await_add(k, k->stats);
        hpmlc_await_add(k, k->job[k->stepped]);
        hpmlc_shard_steps_add(k, k->stepped + 1);
    }
}

/* Makes, with shard 3, one of two slots hold the values of bucket b, except that of bucket `keep`; returns the slot. */
HPMLC_FN int hpmlc_fetch_add(hpmlc_maker *k, int b, int keep)
{
    int slot = k->used[1] < k->used[0];
    for (int s = 0; s < 2; s++)
        if (k->slot[s] == b) return s;
    if (k->buckets == 1) slot = 0;
    if (keep >= 0 && k->slot[slot] == keep) slot = !slot;
    k->slot[slot] = b;
    k->used[slot] = k->clock;
    hpmlc_collect_add(&k->role->background, HPMLC_GROUP_REPLICAS, HPMLC_ALLGATHER, k->floats[b], sizeof(float),
                      HPML_TERM_DATA);
    k->slot_job[slot] = hpmlc_job_add(k);
    return slot;
}

/* Layer i needs its values whole (shard 3): awaits them, while the next bucket's are gathered, `step` layers on. In the
   backward pass a bucket's gradients need the memory of those two buckets before, whose exchange is then awaited. */
HPMLC_FN void hpmlc_need_add(hpmlc_maker *k, int i, int step)
{
    const int b = k->bucket[i];
    if (k->p->shard < 3 || !hpmlc_exchanges(k) || b < 0) return;
    k->clock++;
    const int slot = hpmlc_fetch_add(k, b, -1);
    k->used[slot] = k->clock;
    for (int j = i + step; j >= 0 && j < k->f->layers && !k->p->no_overlap; j += step) {
        if (k->bucket[j] < 0 || k->bucket[j] == b) continue;
        hpmlc_fetch_add(k, k->bucket[j], b);
        break;
    }
    hpmlc_await_add(k, k->slot_job[slot]);
    if (step < 0 && b > 1) hpmlc_await_add(k, k->job[b - 2]);
}

/* The communication of a layer within its replica along the axes sequence and expert. */
HPMLC_FN void hpmlc_layer_exchange_add(const hpmlc_maker *k, const hpml_layer_facts *l, int64_t samples, bool back)
{
    const int     s = k->y->size[HPML_AXIS_SEQUENCE], e = k->y->size[HPML_AXIS_EXPERT];
    const int64_t bytes = (int64_t)sizeof(float) * samples;
    if (l->pass > 0 && s > 1)
        hpmlc_collect_add(&k->role->own, HPML_AXIS_SEQUENCE, HPMLC_PASSES, (back ? 2 : 1) * l->pass * bytes / s, 1,
                          HPML_TERM_SEQUENCE);
    for (int i = 0; i < 2 && l->swap > 0 && e > 1; i++)
        hpmlc_collect_add(&k->role->own, HPML_AXIS_EXPERT, HPMLC_STRIPES, l->swap * bytes / s / e, 1, HPML_TERM_EXPERT);
}

HPMLC_FN void hpmlc_layer_add(hpmlc_maker *k, int i, int64_t samples, bool back, double share, bool final)
{
    const hpml_layer_facts *l = &k->f->layer[i];
    const int64_t sum = (back ? l->backward_sum : l->forward_sum) * samples / k->y->size[HPML_AXIS_SEQUENCE];
    hpmlc_need_add(k, i, back ? -1 : 1);
    hpmlc_layer_exchange_add(k, l, samples, back);
    const double whole = hpmlc_layer_whole(l, k->m, (double)samples, back);
    hpmlc_compute_add(k, share * whole / hpmlc_layer_parts(k, l), HPML_TERM_COMPUTE);
    if (final) hpmlc_gradient_add(k, i);
    if (sum > 0) hpmlc_allreduce_add(k, &k->role->own, HPML_AXIS_TENSOR, sum, sizeof(float), HPML_TERM_TENSOR);
}

/* A task of a pipeline stage: receives its input, computes, sends its result. final: gradients are final after it. */
HPMLC_FN void hpmlc_task_add(hpmlc_maker *k, const hpml_pipe_task *t, int64_t samples, bool final)
{
    const int     p = k->p->pipe, first = k->cut[t->piece], end = k->cut[t->piece + 1];
    const int64_t bytes = (int64_t)sizeof(float) * samples / k->y->size[HPML_AXIS_SEQUENCE];
    const int64_t in = t->piece > 0 ? bytes * k->f->layer[first - 1].edge : 0;
    const int64_t out = t->piece + 1 < k->pieces ? bytes * k->f->layer[end - 1].edge : 0;
    if (t->work == HPML_PIPE_FORWARD) {
        hpmlc_message_add(k, HPMLC_ACT_RECEIVE, HPML_AXIS_PIPE, (t->piece + p - 1) % p, 2 * t->piece - 2, in);
        for (int i = first; i < end; i++) hpmlc_layer_add(k, i, samples, false, 1, false);
        hpmlc_message_add(k, HPMLC_ACT_SEND, HPML_AXIS_PIPE, (t->piece + 1) % p, 2 * t->piece, out);
    } else if (t->work == HPML_PIPE_BACKWARD_WEIGHTS) {
        for (int i = end - 1; i >= first; i--) {
            const double whole = hpmlc_layer_whole(&k->f->layer[i], k->m, (double)samples, true);
            hpmlc_compute_add(k, 0.5 * whole / hpmlc_layer_parts(k, &k->f->layer[i]), HPML_TERM_COMPUTE);
            if (final) hpmlc_gradient_add(k, i);
        }
    } else if (t->work != HPML_PIPE_UPDATE) {
        const bool half = t->work == HPML_PIPE_BACKWARD_INPUTS;
        hpmlc_message_add(k, HPMLC_ACT_RECEIVE, HPML_AXIS_PIPE, (t->piece + 1) % p, 2 * t->piece + 1, out);
        for (int i = end - 1; i >= first; i--) hpmlc_layer_add(k, i, samples, true, half ? 0.5 : 1, final && !half);
        hpmlc_message_add(k, HPMLC_ACT_SEND, HPML_AXIS_PIPE, (t->piece + p - 1) % p, 2 * t->piece - 1, in);
    }
}

HPMLC_FN void hpmlc_pass_add(hpmlc_maker *k) /* forward and backward pass of a batch */
{
    const hpml_plan *p = k->p;
    HPMLC_ZERO(hpml_pipe_desc, d);
    hpmlc_pipe_walk walk;
    hpml_pipe_task  task;
    for (int i = 0; i < k->f->layers && p->pipe <= 1; i++) hpmlc_layer_add(k, i, k->samples, false, 1, false);
    for (int i = k->f->layers - 1; i >= 0 && p->pipe <= 1; i--) hpmlc_layer_add(k, i, k->samples, true, 1, true);
    if (p->pipe <= 1) return;
    d.kind   = p->schedule;
    d.stages = p->pipe;
    d.chunks = p->chunks;
    d.micro  = (int32_t)((k->samples + k->rows - 1) / k->rows);
    hpmlc_pipe_begin(&walk, &d, k->stage);
    while (hpmlc_pipe_next(&walk, &task)) {
        const int64_t at = task.micro * k->rows;
        hpmlc_task_add(k, &task, hpmlc_min(k->rows, k->samples - at), task.micro + 1 == d.micro);
    }
    hpmlc_act *loss = hpmlc_collect_add(&k->role->own, HPML_AXIS_PIPE, HPMLC_BROADCAST, sizeof(float), 1,
                                        HPML_TERM_BUBBLE);
    if (loss) loss->peer = p->pipe - 1;
}

HPMLC_FN double hpmlc_stage_floats(const hpmlc_maker *k) /* parameters that this stage has */
{
    double floats = 0;
    for (int q = k->stage; q < k->pieces; q += k->y->size[HPML_AXIS_PIPE])
        for (int i = k->cut[q]; i < k->cut[q + 1]; i++) floats += (double)hpmlc_layer_floats(k, i);
    return floats;
}

/* Cuts the gradients of a stage, last first, into buckets, and clears what the maker notes in a step. */
HPMLC_FN void hpmlc_buckets_cut(hpmlc_maker *k)
{
    const int64_t limit = k->p->bucket_bytes > 0 ? k->p->bucket_bytes : (int64_t)1 << 18;
    int64_t       filled = 0;
    k->buckets = 0;
    k->posted  = 0;
    k->stepped = 0;
    k->stats   = -1;
    k->slot[0] = k->slot[1] = -1;
    k->used[0] = k->used[1] = 0;
    for (int i = k->f->layers - 1; i >= 0; i--) {
        const hpml_layer_facts *l = &k->f->layer[i];
        const int64_t           n = hpmlc_layer_floats(k, i);
        int                     piece = 0;
        while (k->cut[piece + 1] <= i) piece++;
        k->bucket[i] = -1;
        if (piece % hpmlc_max(k->p->pipe, 1) != k->stage || l->cols == 0) continue;
        if (k->buckets == 0 || filled >= limit) {
            k->left[k->buckets]   = 0;
            k->floats[k->buckets] = 0;
            k->buckets++;
            filled = 0;
        }
        k->bucket[i] = k->buckets - 1;
        k->left[k->buckets - 1]++;
        k->floats[k->buckets - 1] += n;
        filled += (int64_t)sizeof(float) * (hpmlc_max(l->rows, 1) * l->cols / (l->split ? k->p->tensor : 1));
    }
}

/* A step of strategy sync. */
HPMLC_FN void hpmlc_sync_add(hpmlc_maker *k)
{
    const bool exchanges = hpmlc_exchanges(k);
    int        last = -1;
    hpmlc_buckets_cut(k);
    for (int b = 0; b < k->buckets && k->p->delayed && exchanges; b++) hpmlc_bucket_add(k, k->posted++);
    hpmlc_pass_add(k);
    if (exchanges) hpmlc_posts_add(k);
    if (exchanges && k->stats < 0) hpmlc_stats_add(k);
    if (exchanges) hpmlc_await_add(k, k->role->background.jobs - 1);
    if (k->p->shard > 0 && exchanges) last = hpmlc_shard_steps_add(k, k->buckets);
    else hpmlc_compute_add(k, hpmlc_update_seconds(k, hpmlc_stage_floats(k)), HPML_TERM_UPDATE);
    hpmlc_await_add(k, last);
    hpmlc_act_add(&k->role->own, HPMLC_ACT_END, 0, HPML_TERM_COMPUTE);
}

/* plan.period steps of strategies local, block and elastic, and the meeting after them. */
HPMLC_FN void hpmlc_meeting_add(hpmlc_maker *k)
{
    const int64_t floats = (int64_t)hpmlc_stage_floats(k);
    hpmlc_buckets_cut(k);
    for (int i = 0; i < k->p->period; i++) {
        hpmlc_pass_add(k);
        hpmlc_compute_add(k, hpmlc_update_seconds(k, (double)floats), HPML_TERM_UPDATE);
    }
    hpmlc_allreduce_add(k, &k->role->own, HPMLC_GROUP_REPLICAS, floats + HPMLC_MEET_STATS, sizeof(float),
                        HPML_TERM_DATA);
    hpmlc_act_add(&k->role->own, HPMLC_ACT_END, 0, HPML_TERM_COMPUTE);
}

HPMLC_FN int64_t hpmlc_server_floats(const hpmlc_maker *k, int s) /* the range of server s */
{
    int64_t n = 0;
    for (int i = 0; i < k->f->layers; i++) n += hpmlc_max(k->f->layer[i].rows, 1) * k->f->layer[i].cols;
    return hpml_block(n, k->p->servers, s + 1) - hpml_block(n, k->p->servers, s);
}

/* Bytes of the gradient of server s's range, as workers push it. */
HPMLC_FN int64_t hpmlc_push_bytes(const hpmlc_maker *k, int s)
{
    int64_t packed = 0, all = 0;
    for (int i = 0; i < k->f->layers; i++) {
        const hpml_layer_facts *l = &k->f->layer[i];
        const int64_t           n = hpmlc_max(l->rows, 1) * l->cols;
        hpml_packing            pack;
        all += n;
        if (hpml_packing_init(&pack, &k->p->codec, hpmlc_max(l->rows, 1), hpmlc_max(l->cols, 1)) == HPML_OK)
            packed += l->cols > 0 ? (int64_t)pack.size : 0;
    }
    const int64_t floats = hpmlc_server_floats(k, s);
    if (!hpmlc_plan_packs(k->p) || all == 0) return floats * (int64_t)sizeof(float);
    return (int64_t)((double)packed * ((double)floats / (double)all));
}

/* A step of strategy ps: workers push gradients and get values from all servers. */
HPMLC_FN void hpmlc_worker_add(hpmlc_maker *k)
{
    const int all = HPMLC_GROUP_ALL, w = k->y->workers;
    hpmlc_buckets_cut(k);
    hpmlc_pass_add(k);
    for (int s = 0; s < k->p->servers; s++) {
        hpmlc_message_add(k, HPMLC_ACT_SEND, all, w + s, 0, sizeof(hpmlc_request));
        hpmlc_message_add(k, HPMLC_ACT_SEND, all, w + s, 0, hpmlc_push_bytes(k, s));
    }
    for (int s = 0; s < k->p->servers; s++) {
        hpmlc_message_add(k, HPMLC_ACT_RECEIVE, all, w + s, 0, sizeof(hpmlc_answer));
        hpmlc_message_add(k, HPMLC_ACT_RECEIVE, all, w + s, 0, hpmlc_server_floats(k, s) * (int64_t)sizeof(float));
    }
    hpmlc_act_add(&k->role->own, HPMLC_ACT_END, 0, HPML_TERM_COMPUTE);
}

HPMLC_FN void hpmlc_server_add(hpmlc_maker *k, int s)
{
    const int     all = HPMLC_GROUP_ALL;
    const int64_t floats = hpmlc_server_floats(k, s);
    for (int pass = 0; pass < 2; pass++) /* all requests, then their gradients */
        for (int w = 0; w < k->y->workers; w++)
            hpmlc_message_add(k, HPMLC_ACT_RECEIVE, all, w, 0,
                              pass == 0 ? (int64_t)sizeof(hpmlc_request) : hpmlc_push_bytes(k, s));
    hpmlc_compute_add(k, hpmlc_update_seconds(k, (double)floats), HPML_TERM_UPDATE);
    for (int w = 0; w < k->y->workers; w++) {
        hpmlc_message_add(k, HPMLC_ACT_SEND, all, w, 0, sizeof(hpmlc_answer));
        hpmlc_message_add(k, HPMLC_ACT_SEND, all, w, 0, floats * (int64_t)sizeof(float));
    }
    hpmlc_act_add(&k->role->own, HPMLC_ACT_END, 0, HPML_TERM_COMPUTE);
}

/* Cuts the layers into the pieces of a pipeline: plan.cut, here layers, or almost equal seconds. False: too few layers,
   or no memory; the reason is written to `to`. */
HPMLC_FN hpml_status hpmlc_pieces_cut(hpmlc_maker *k, const hpmlc_text *to)
{
    char             why[200] = "no memory";
    const int        layers = k->f->layers;
    double          *seconds = (double *)calloc((size_t)layers, sizeof *seconds);
    hpml_pipe_stage *stage = (hpml_pipe_stage *)calloc((size_t)k->pieces, sizeof *stage);
    HPMLC_ZERO(hpml_pipe_cut_desc, d);
    d.layers  = layers;
    d.ranks   = k->pieces;
    d.seconds = seconds;
    for (int i = 0; i < layers && seconds; i++)
        seconds[i] = hpmlc_layer_whole(&k->f->layer[i], k->m, 1, false) +
                     hpmlc_layer_whole(&k->f->layer[i], k->m, 1, true);
    bool good = seconds && stage && (k->p->cut || hpml_pipe_cut(&d, stage, NULL, why, sizeof why) == k->pieces);
    k->cut[k->pieces] = layers;
    for (int q = 1; q < k->pieces && good; q++) {
        k->cut[q] = k->p->cut ? k->p->cut[q - 1] : stage[q].first;
        good      = k->cut[q] > k->cut[q - 1] && k->cut[q] < layers;
    }
    free(seconds);
    free(stage);
    if (good) return HPML_OK;
    return hpmlc_refuse(to, HPML_ERR_ARGUMENT, "forecast: %d layers cannot be cut into the %d pieces of this pipeline; "
                        "take a smaller pipe or chunks, or cuts in rising order (%s)", layers, k->pieces, why);
}

/* Makes the programs of all roles. False: out of memory. */
HPMLC_FN bool hpmlc_programs_make(hpmlc_maker *k)
{
    hpmlc_play *y = k->y;
    bool        good = true;
    for (int r = 0; r < y->roles; r++) {
        k->role  = &y->role[r];
        k->stage = r;
        if (r >= y->size[HPML_AXIS_PIPE]) hpmlc_server_add(k, r - y->size[HPML_AXIS_PIPE]);
        else if (k->p->strategy == HPML_STRATEGY_PS) hpmlc_worker_add(k);
        else if (hpmlc_plan_meets(k->p)) hpmlc_meeting_add(k);
        else hpmlc_sync_add(k);
        good     = good && !k->role->own.failed && !k->role->background.failed;
        y->jobs  = (int)hpmlc_max(y->jobs, k->role->background.jobs);
    }
    return good;
}

// ---------------------------------------------------------------------------------------------------------------------
// >>machines   machines by name, fabrics of nodes, what binds a layer
// ---------------------------------------------------------------------------------------------------------------------
#define HPMLC_MACHINE(name, ranks, inside_s, inside, between_s, between, flops, bandwidth, memory, cards, host, direct, \
                      fabric)                                                                                          \
    { 0, name, { ranks, false, { inside_s, inside }, { between_s, between }, NULL, 0, 0, NULL }, flops, bandwidth,     \
      (int64_t)(memory), cards, host, direct, fabric, 1e-7, 0 },
/* Numbers of the makers: for one accelerator operations a second of the fastest floating-point units, bytes a second and
   bytes of memory; of links the bandwidth in one direction. Latencies are typical ones. */
static const hpml_machine hpmlc_machines[] = {
    /* V100: 120 TFLOP/s by tensor cores, 900 GB/s; NVLink 300 GB/s in both directions; InfiniBand EDR, 100 Gbit/s */
    HPMLC_MACHINE("v100-nvlink", 8, 2e-6, 150e9, 2e-6, 12.5e9, 120e12, 900e9, 32e9, 4, 16e9, true, HPML_FABRIC_FAT_TREE)
    HPMLC_MACHINE("v100-pcie", 4, 5e-6, 16e9, 2e-6, 12.5e9, 112e12, 900e9, 32e9, 1, 16e9, false, HPML_FABRIC_FAT_TREE)
    /* DGX-2: 16 V100 behind NVSwitch, 8 cards InfiniBand EDR */
    HPMLC_MACHINE("dgx-2", 16, 2e-6, 150e9, 2e-6, 12.5e9, 125e12, 900e9, 32e9, 8, 16e9, true, HPML_FABRIC_FAT_TREE)
    /* T4: 65 TFLOP/s, 320 GB/s, 16 GB; nodes of 4 by PCIe 3 (16 GB/s) or PCIe 4 (32 GB/s), Ethernet of 10 Gbit/s */
    HPMLC_MACHINE("t4", 4, 5e-6, 16e9, 20e-6, 1.25e9, 65e12, 320e9, 16e9, 1, 16e9, false, HPML_FABRIC_SWITCH)
    HPMLC_MACHINE("t4-pcie4", 4, 5e-6, 32e9, 20e-6, 1.25e9, 65e12, 320e9, 16e9, 1, 32e9, false, HPML_FABRIC_SWITCH)
    /* Taiwania 2: nodes of 8 V100 with NVLink, InfiniBand EDR */
    HPMLC_MACHINE("taiwania-2", 8, 2e-6, 150e9, 2e-6, 12.5e9, 125e12, 900e9, 32e9, 4, 16e9, true, HPML_FABRIC_FAT_TREE)
    /* TPU v3 pod: chips of 123 TFLOP/s and 900 GB/s, four links of 656 Gbit/s each in a torus */
    HPMLC_MACHINE("tpu-v3-pod", 1, 1e-6, 82e9, 1e-6, 82e9, 123e12, 900e9, 32e9, 1, 0, true, HPML_FABRIC_TORUS)
    /* CS-1: a wafer of 400,000 cores with 18 GB of memory at 9 PB/s; 12 ports of 100 Gbit/s */
    HPMLC_MACHINE("cs-1", 1, 1e-6, 9e15, 2e-6, 12.5e9, 2.5e15, 9e15, 18e9, 12, 0, true, HPML_FABRIC_SWITCH)
    /* BrainWave: an FPGA with 90 TFLOP/s of 8-bit floats, parameters in its own memory, Ethernet of 40 Gbit/s */
    HPMLC_MACHINE("brainwave", 1, 1e-6, 5e9, 2e-6, 5e9, 90e12, 20e12, 30e6, 1, 0, true, HPML_FABRIC_SWITCH)
    /* Processing in memory: a small processor beside each bank, so there is a byte for each operation and more */
    HPMLC_MACHINE("pim", 1, 1e-6, 20e9, 20e-6, 1.25e9, 0.12e12, 2e12, 160e9, 1, 20e9, false, HPML_FABRIC_SWITCH)
    /* Processors of 16 cores, with Ethernet, and with InfiniBand whose routers form a Slim Fly */
    HPMLC_MACHINE("cpu-1gbit", 1, 1e-6, 50e9, 50e-6, 125e6, 1e12, 100e9, 128e9, 1, 0, true, HPML_FABRIC_SWITCH)
    HPMLC_MACHINE("cpu-10gbit", 1, 1e-6, 50e9, 20e-6, 1.25e9, 1e12, 100e9, 128e9, 1, 0, true, HPML_FABRIC_SWITCH)
    HPMLC_MACHINE("cpu-slim-fly", 1, 1e-6, 50e9, 1e-6, 12.5e9, 1e12, 100e9, 128e9, 1, 0, true, HPML_FABRIC_SLIM_FLY)
};
#undef HPMLC_MACHINE

HPML_API const hpml_machine *hpml_machine_at(int i)
{
    const int count = (int)(sizeof hpmlc_machines / sizeof hpmlc_machines[0]);
    return i >= 0 && i < count ? &hpmlc_machines[i] : NULL;
}

HPML_API const hpml_machine *hpml_machine_find(const char *name)
{
    const hpml_machine *m = NULL;
    for (int i = 0; name && (m = hpml_machine_at(i)) != NULL && strcmp(m->name, name) != 0; i++) {}
    return m;
}

HPML_API hpml_status hpml_machine_measure(hpml_ctx *ctx, hpml_machine *out)
{
    enum { N = 256, FLOATS = 1 << 22 };
    memset(out, 0, sizeof *out);
    out->name = "this processor";
    float *a = (float *)hpml_ctx_alloc(ctx, 2 * (size_t)FLOATS * sizeof(float), NULL), *b = a + FLOATS;
    if (!a) return HPML_ERR_MEMORY;
    for (int turn = 0; turn < 8; turn++) { /* the first turn brings memory and code into place; the best one counts */
        double start = hpml_now();
        memcpy(turn % 2 ? a : b, turn % 2 ? b : a, FLOATS * sizeof(float));
        const double copied = 2.0 * FLOATS * sizeof(float) / (hpml_now() - start + 1e-9);
        start = hpml_now();
        hpml_sgemm(ctx, false, false, N, N, N, 1, a, N, a + N * N, N, 0, b, N);
        const double made = 2.0 * N * N * N / (hpml_now() - start + 1e-9);
        if (turn > 0) out->bandwidth = fmax(out->bandwidth, copied);
        if (turn > 0) out->flops = fmax(out->flops, made);
    }
    hpml_ctx_release(ctx, a);
    return hpml_ctx_status(ctx);
}

HPML_API const char *hpml_fabric_name(hpml_fabric_kind kind)
{
    static const char *const names[HPML_FABRIC_COUNT] = { "switch", "ring", "tree", "fat tree", "torus", "slim fly" };
    return (unsigned)kind < HPML_FABRIC_COUNT ? names[kind] : NULL;
}

/* Returns how many routers a fabric of so many nodes has; *width: of a torus. */
HPMLC_FN int hpmlc_fabric_routers(hpml_fabric_kind kind, int nodes, int *width)
{
    *width = 1;
    for (int w = 1; w * w <= nodes; w++)
        if (nodes % w == 0) *width = w;
    if (kind == HPML_FABRIC_SLIM_FLY) return 50;
    if (kind == HPML_FABRIC_SWITCH) return 1;
    if (kind == HPML_FABRIC_RING || kind == HPML_FABRIC_TORUS) return nodes;
    int leaves = 1;
    while (2 * leaves < nodes) leaves *= 2; /* two nodes at each leaf */
    return 2 * leaves - 1;
}

/* Stores the neighbours of router r, which may repeat, and returns how many there are: at most 7. */
HPMLC_FN int hpmlc_fabric_links(hpml_fabric_kind kind, int routers, int width, int r, int *to)
{
    int count = 0, height = routers / width;
    if (kind == HPML_FABRIC_RING || kind == HPML_FABRIC_TORUS) {
        const int w = kind == HPML_FABRIC_RING ? routers : width, h = kind == HPML_FABRIC_RING ? 1 : height;
        const int x = r % w, y = r / w;
        to[count++] = (x + 1) % w + w * y;
        to[count++] = (x + w - 1) % w + w * y;
        to[count++] = x + w * ((y + 1) % h);
        to[count++] = x + w * ((y + h - 1) % h);
    } else if (kind == HPML_FABRIC_TREE || kind == HPML_FABRIC_FAT_TREE) { /* a heap: children of i are 2 i + 1, 2 i + 2 */
        if (r > 0) to[count++] = (r - 1) / 2;
        if (2 * r + 2 < routers) to[count++] = 2 * r + 1;
        if (2 * r + 2 < routers) to[count++] = 2 * r + 2;
    } else if (kind == HPML_FABRIC_SLIM_FLY) {
        /* Routers (s, x, y), s 0 or 1, x and y modulo 5. Within a column (s, x) the differences of y that are joined are
           the squares 1 and 4 for s = 0, and 2 and 3 for s = 1; (0, x, y) and (1, m, c) are joined where y = m x + c. */
        const int s = r / 25, x = r / 5 % 5, y = r % 5;
        to[count++] = r - y + (y + 1 + s) % 5;
        to[count++] = r - y + (y + 4 - s) % 5;
        for (int k = 0; k < 5; k++) {
            const int other = s == 0 ? (y + 25 - k * x) % 5 : (k * x + y) % 5;
            to[count++] = (s == 0 ? 25 : 0) + 5 * k + other;
        }
    }
    return count;
}

/* Sets far[r] to the number of links between the routers `from` and r. queue: (routers) scratch. */
HPMLC_FN void hpmlc_fabric_walk(hpml_fabric_kind kind, int routers, int width, int from, int *far, int *queue)
{
    int to[8], end = 1;
    for (int r = 0; r < routers; r++) far[r] = -1;
    far[from] = 0;
    queue[0]  = from;
    for (int at = 0; at < end; at++) {
        const int count = hpmlc_fabric_links(kind, routers, width, queue[at], to);
        for (int k = 0; k < count; k++) {
            if (far[to[k]] >= 0) continue;
            far[to[k]]   = far[queue[at]] + 1;
            queue[end++] = to[k];
        }
    }
}

/* Returns the number of the router to which a node is attached: trees have nodes at their leaves only. */
HPMLC_FN int hpmlc_fabric_router(hpml_fabric_kind kind, int routers, int node)
{
    if (kind == HPML_FABRIC_TREE || kind == HPML_FABRIC_FAT_TREE) return routers / 2 + node / 2;
    return node % routers;
}

/* Counts how many different neighbours a router has besides itself. */
HPMLC_FN int hpmlc_fabric_degree(hpml_fabric_kind kind, int routers, int width, int r)
{
    int       to[8], degree = 0;
    const int count = hpmlc_fabric_links(kind, routers, width, r, to);
    for (int k = 0; k < count; k++) {
        bool again = to[k] == r;
        for (int j = 0; j < k; j++) again = again || to[j] == to[k];
        degree += !again;
    }
    return degree;
}

/* Where all nodes send to all others, each of its bandwidth b, links carry nodes * hops * b. With the same load on all
   links, which have b each in both directions, a node has the share links / (nodes * hops). In a tree the root's two
   links carry half of all traffic. */
HPML_API bool hpml_fabric_measure(hpml_fabric_kind kind, int32_t nodes, hpml_fabric *out)
{
    int       width;
    const int n = (int)hpmlc_min(nodes, 4096);
    HPMLC_ZERO(hpml_fabric, f);
    *out = f;
    if (!hpml_fabric_name(kind) || nodes < 1) return false;
    const int routers = hpmlc_fabric_routers(kind, n, &width);
    int      *far = (int *)malloc(2 * sizeof(int) * (size_t)routers);
    double    links = 0, sum = 0;
    if (!far) return false;
    f.routers = routers;
    for (int r = 0; r < routers; r++) {
        const int degree = hpmlc_fabric_degree(kind, routers, width, r);
        links += degree;
        f.degree = (int32_t)hpmlc_max(f.degree, degree);
    }
    for (int i = 0; i < n; i++) {
        hpmlc_fabric_walk(kind, routers, width, hpmlc_fabric_router(kind, routers, i), far, far + routers);
        for (int j = 0; j < n; j++) sum += far[hpmlc_fabric_router(kind, routers, j)];
        for (int r = 0; r < routers; r++) f.diameter = (int32_t)hpmlc_max(f.diameter, far[r]);
    }
    free(far);
    f.hops  = n > 1 ? sum / ((double)n * (n - 1)) : 0;
    f.share = f.hops > 0 ? fmin(1, links / (n * f.hops)) : 1;
    if (kind == HPML_FABRIC_FAT_TREE) f.share = 1;
    if (kind == HPML_FABRIC_TREE && n > 2) f.share = fmin(1, 4.0 / n);
    *out = f;
    return true;
}

HPML_API void hpml_machine_network(const hpml_machine *m, int32_t ranks, hpml_network *out)
{
    hpml_fabric  f;
    hpml_link   *far = &out->between;
    *out = m->network;
    const int nodes = hpmlc_network_nodes(&m->network, ranks);
    if (nodes <= 1 || !hpml_fabric_measure(m->fabric, nodes, &f)) return;
    far->latency += (f.hops + 1) * m->router; /* the routers on the way: one more than the links between them */
    far->bandwidth *= (m->cards > 0 ? m->cards : 1) * f.share;
    if (m->direct || m->host <= 0 || far->bandwidth <= 0) return;
    far->bandwidth = 1 / (1 / far->bandwidth + 2 / m->host); /* copied to the host, sent, copied from the host */
}

HPML_API int hpml_model_facts_of(hpml_trainer *t, const hpml_comm *c, hpml_layer_facts *layer, int capacity,
                                 hpml_model_facts *out)
{
    const hpml_graph *g = hpml_trainer_graph(t);
    const int         ops = hpml_graph_op_count(g);
    memset(out, 0, sizeof *out);
    hpml_plan_facts_of(t, c, &out->facts);
    const double batch = (double)hpmlc_max(out->facts.batch, 1);
    for (int i = 0; i < ops && i < capacity; i++) {
        const hpml_node  *n = hpml_graph_op(g, i);
        hpml_layer_facts *l = &layer[i];
        memset(l, 0, sizeof *l);
        l->name  = n->out->name;
        l->flops = hpml_node_flops(n, false) / batch;
        l->edge  = (int64_t)((double)hpml_tensor_count(n->out) / batch);
        l->kept  = (int64_t)sizeof(float) * l->edge;
        l->bytes = 2.0 * (double)l->kept;
        for (int k = 0; k < n->src_count; k++) {
            const hpml_tensor *p = n->src[k];
            if (!p || !p->param || !p->grad) continue;
            const int64_t rows = p->ndim > 1 ? p->shape[0] : 1, cols = hpml_tensor_count(p) / rows;
            if (l->cols == 0) l->rows = rows;
            l->cols += l->rows == rows ? cols : (rows * cols + l->rows - 1) / l->rows;
        }
    }
    out->layer  = layer;
    out->layers = (int32_t)hpmlc_min(ops, capacity);
    for (int i = HPML_ARRAY_STATE; i < HPML_ARRAY_END; i++) out->states += hpml_trainer_array(t, (hpml_array)i, NULL) != NULL;
    return ops;
}

HPML_API int hpml_roofline_text(const hpml_model_facts *facts, const hpml_machine *machine, int64_t samples,
                                char *buffer, size_t size)
{
    const hpmlc_text to = { buffer, size };
    size_t           length = 0;
    double           work = 0, depth = 0, seconds[2] = { 0, 0 };
    if (size > 0) buffer[0] = 0;
    if (!facts || !machine || samples < 1) return 0;
    hpmlc_append(&to, &length, "%-24s %10s %10s %9s %10s  binds\n", "layer", "MFLOP", "MB", "FLOP/B", "us");
    for (int i = 0; i < facts->layers; i++) {
        const hpml_layer_facts *l = &facts->layer[i];
        const double n = (double)samples, flops = l->flops * n;
        const double bytes = l->bytes * n + 4.0 * (double)(hpmlc_max(l->rows, 1) * l->cols);
        const double by[2] = { machine->flops > 0 ? flops / machine->flops : 0,
                               machine->bandwidth > 0 ? bytes / machine->bandwidth : 0 };
        const bool   memory = by[1] > by[0];
        const double sum = l->edge > 0 ? l->flops / 2 / (double)l->edge : 1; /* terms of the sum behind each result */
        hpmlc_append(&to, &length, "%-24.24s %10.4g %10.4g %9.3g %10.4g  %s\n", l->name ? l->name : "", 1e-6 * flops,
                     1e-6 * bytes, bytes > 0 ? flops / bytes : 0, 1e6 * fmax(by[0], by[1]), memory ? "memory" : "flops");
        work += flops;
        depth += 1 + (sum > 1 ? ceil(log2(sum)) : 0);
        seconds[memory] += by[memory];
    }
    const double whole = seconds[0] + seconds[1];
    hpmlc_append(&to, &length, "memory binds for %.0f %% of the time of %.4g us on %s; work %.4g, depth %.4g, work / "
                 "depth %.4g\n", whole > 0 ? 100 * seconds[1] / whole : 0, 1e6 * whole,
                 machine->name ? machine->name : "this machine", work, depth, depth > 0 ? work / depth : 0);
    return (int)length;
}

// ---------------------------------------------------------------------------------------------------------------------
// >>forecast   a step of a plan on a machine: check, play, memory, text
// ---------------------------------------------------------------------------------------------------------------------
HPML_API const char *hpml_term_name(hpml_term term)
{
    static const char *const names[HPML_TERM_COUNT] = { "compute", "update", "bubble", "data", "tensor", "sequence",
                                                        "expert", "servers" };
    return (unsigned)term < HPML_TERM_COUNT ? names[term] : NULL;
}

/* Returns why the steps of a plan that hpml_plan_check accepts cannot be forecast; NULL: they can. */
HPMLC_FN const char *hpmlc_forecast_refused(const hpml_plan *p)
{
    const hpml_strategy_kind s = p->strategy;
    if (s == HPML_STRATEGY_BACKUP || s == HPML_STRATEGY_SSP || s == HPML_STRATEGY_ASYNC ||
        s == HPML_STRATEGY_FEDERATED || s == HPML_STRATEGY_HOGWILD)
        return "the messages of this strategy depend on which rank is first; take sync, ps, local, block or elastic, or "
               "train in virtual time (HPML_TRANSPORT_CLOCK)";
    if (s == HPML_STRATEGY_GOSSIP)
        return "a step of gossip has no end that all ranks share; take local, or train in virtual time";
    if (hpmlc_plan_flows(p)) return "a step with schedules stash and vertical has no end; see hpml_pipe_simulate";
    if (p->exact || p->route != HPML_ROUTE_ALLREDUCE)
        return "the bytes of exact sums, and of routes factors and hybrid, depend on the data and on each layer's batch; "
               "take exact=0 and route allreduce, or train in virtual time";
    return NULL;
}

/* Checks the arguments of a forecast. */
HPMLC_FN hpml_status hpmlc_forecast_check(const hpml_plan *plan, const hpml_model_facts *f, const hpml_machine *m,
                                          const hpmlc_text *to)
{
    const hpml_status wrong = HPML_ERR_ARGUMENT;
    if (!plan || !f || !m) return hpmlc_refuse(to, wrong, "forecast: no plan, no model or no machine");
    if (f->_begin || f->_end || m->_begin || m->_end)
        return hpmlc_refuse(to, wrong, "forecast: a canary is not zero; zero facts and machine before you set fields");
    if (f->layers < 1 || f->layers > 65536 || !f->layer || f->facts.ranks > HPMLC_MAX_RANKS)
        return hpmlc_refuse(to, wrong, "forecast: %d layers (%s) on %d ranks: expected 1 to 65536 of both", f->layers,
                            f->layer ? "given" : "NULL", f->facts.ranks);
    if (!HPMLC_GOOD(f->update_s) || f->states < 0 || !(m->flops >= 0) || !(m->bandwidth >= 0) || !(m->host >= 0) ||
        m->cards < 0 || !HPMLC_GOOD(m->router) || !hpml_fabric_name(m->fabric))
        return hpmlc_refuse(to, wrong, "forecast: machine \"%s\" or the facts have a negative number, a NaN or no fabric",
                            m->name ? m->name : "");
    for (int i = 0; i < f->layers; i++) {
        const hpml_layer_facts *l = &f->layer[i];
        const double all[] = { l->forward_s, l->backward_s, l->flops / 1e12, l->bytes / 1e12, (double)l->rows / 1e6,
                               (double)l->cols / 1e6, (double)l->edge / 1e6, (double)l->kept / 1e6,
                               (double)l->forward_sum / 1e6, (double)l->backward_sum / 1e6, (double)l->pass / 1e6,
                               (double)l->swap / 1e6 };
        for (size_t k = 0; k < sizeof all / sizeof all[0]; k++)
            if (!HPMLC_GOOD(all[k]))
                return hpmlc_refuse(to, wrong, "forecast: layer %d \"%s\" has a negative number, a NaN or one too large",
                                    i, l->name ? l->name : "");
        if (l->flops > 0 && l->forward_s <= 0 && m->flops <= 0)
            return hpmlc_refuse(to, wrong, "forecast: layer %d \"%s\" has operations and no seconds, and the machine "
                                "no .flops; give one of them", i, l->name ? l->name : "");
    }
    hpml_status status = hpml_plan_check(plan, &f->facts, to->text, to->size);
    const char *why = status == HPML_OK ? hpmlc_forecast_refused(plan) : NULL;
    if (why) return hpmlc_refuse(to, HPML_ERR_UNSUPPORTED, "forecast: %s", why);
    if (plan->algorithm == HPML_NATIVE && status == HPML_OK)
        return hpmlc_refuse(to, HPML_ERR_UNSUPPORTED, "forecast: the moves of a native allreduce are not known; choose "
                            "another algorithm");
    return status != HPML_OK ? status : hpmlc_network_check("forecast", &m->network, f->facts.ranks, true, to);
}

/* Sets sizes and strides of the axes, and the groups. */
HPMLC_FN void hpmlc_play_axes(hpmlc_play *y, const hpml_plan *p)
{
    const int32_t size[HPML_AXES] = { p->data, p->pipe, p->tensor, p->sequence, p->expert };
    int           stride = 1;
    y->workers = y->ranks - p->servers;
    for (int i = 0; i < HPML_AXES; i++) {
        const int k = (int)hpmlc_axis_order[i];
        y->size[k]  = (int)hpmlc_max(size[k], 1);
        if (k == HPML_AXIS_DATA) y->size[k] = y->workers / stride;
        y->stride[k] = stride;
        y->mask[k]   = 1u << k;
        stride *= y->size[k];
    }
    y->mask[HPMLC_GROUP_REPLICAS] = 1u << HPML_AXIS_DATA | 1u << HPML_AXIS_SEQUENCE | 1u << HPML_AXIS_EXPERT;
    y->roles = y->size[HPML_AXIS_PIPE] + p->servers;
}

HPMLC_FN bool hpmlc_is_power(int n) { return (n & (n - 1)) == 0; }

/* Returns whether in this act all ranks of the group do the same, each with other ranks: shifted by some places, or with
   bits of its place changed. */
HPMLC_FN bool hpmlc_act_is_alike(hpmlc_play *y, const hpmlc_act *act)
{
    const bool over = act->group < HPMLC_GROUP_ALL && (y->mask[act->group] >> HPML_AXIS_DATA & 1);
    if (act->kind != HPMLC_ACT_COLLECT || !over || act->collective != HPMLC_ALLREDUCE) return true;
    hpmlc_layouts *l = hpmlc_group_layout(y, act->group, 0);
    hpml_algorithm a = act->algorithm;
    if (!l) return false;
    if (a == HPML_AUTO) a = hpml_comm_choose(&l->c, act->n * (int64_t)act->size);
    const int nodes = l->c.per_node > 0 ? l->c.size / l->c.per_node : 0;
    if (a == HPML_HIERARCHICAL)
        return nodes > 0 && l->c.size % l->c.per_node == 0 && (hpmlc_is_power(nodes) || nodes <= 32);
    return a == HPML_RING || ((a == HPML_BUTTERFLY || a == HPML_HALVING) && hpmlc_is_power(l->c.size));
}

/* Sets y->unit: whole replicas on whole nodes, if all such units are equal, else all ranks. */
HPMLC_FN void hpmlc_play_fold(hpmlc_play *y)
{
    const hpml_network *n = y->network;
    const int           replica = y->stride[HPML_AXIS_DATA];
    int                 unit = replica;
    bool                alike = y->workers == y->ranks && !n->slow && !n->node && !n->spread;
    y->unit = y->ranks;
    if (y->nodes > 1) {
        while (unit % n->ranks_per_node != 0) unit += replica;
        alike = alike && y->ranks % n->ranks_per_node == 0;
    }
    if (!alike || y->ranks % unit != 0) return;
    for (int r = 0; r < y->roles; r++)
        for (int k = 0; k < 2; k++) {
            const hpmlc_acts *acts = k ? &y->role[r].background : &y->role[r].own;
            for (int i = 0; i < acts->count && alike; i++) alike = hpmlc_act_is_alike(y, &acts->item[i]);
        }
    if (alike) y->unit = unit;
}

/* Takes memory for the actors and gives them their programs and layouts. False: out of memory. */
HPMLC_FN bool hpmlc_play_actors(hpmlc_play *y)
{
    const size_t n = (size_t)y->unit;
    y->actor  = (hpmlc_actor *)calloc(2 * n, sizeof *y->actor);
    y->posted = (double *)calloc(2 * n * (size_t)(y->jobs + 1), sizeof(double));
    y->ends   = (double *)calloc((size_t)y->steps, sizeof(double));
    if (!hpmlc_sim_open(&y->net, 2 * y->unit, y->network, 2)) return false;
    y->net.waited  = (double *)calloc(2 * n, sizeof(double));
    y->net.program = hpmlc_play_move;
    if (!y->actor || !y->posted || !y->ends || !y->net.waited) return false;
    y->ended = y->posted + n * (size_t)y->jobs;
    for (int r = 0; r < y->unit; r++) {
        const int   pipe = y->size[HPML_AXIS_PIPE];
        hpmlc_role *role = &y->role[r < y->workers ? hpmlc_play_at(y, r, HPML_AXIS_PIPE) : pipe + r - y->workers];
        y->actor[2 * r].idle     = true;
        y->actor[2 * r].acts     = &role->background;
        y->actor[2 * r + 1].acts = &role->own;
        for (int g = 0; g < HPMLC_GROUP_ALL; g++) {
            if (r >= y->workers || hpmlc_group_size(y, g) == 1) continue;
            hpmlc_layouts *l = hpmlc_group_layout(y, g, r);
            if (!l) return false;
            y->actor[2 * r].layout[g]     = l;
            y->actor[2 * r + 1].layout[g] = l;
        }
    }
    for (int a = 0; a < 2 * y->unit; a++) y->net.clock[a] = y->origin;
    return true;
}

HPMLC_FN void hpmlc_play_close(hpmlc_play *y)
{
    hpmlc_sim_close(&y->net);
    for (int r = 0; y->role && r < y->roles; r++) {
        free(y->role[r].own.item);
        free(y->role[r].background.item);
    }
    while (y->layouts) {
        hpmlc_layouts *l = y->layouts;
        y->layouts = l->next;
        free(l);
    }
    free(y->role);
    free(y->actor);
    free(y->posted);
    free(y->ends);
}

/* Makes the programs of a checked plan and plays `steps` steps from the clock `origin` on; whole: plays all ranks, even
   if they are equal. The caller calls hpmlc_play_close. */
HPMLC_FN hpml_status hpmlc_play_run(hpmlc_play *y, hpmlc_maker *k, bool whole, const hpmlc_text *to)
{
    const size_t layers = (size_t)k->f->layers, pieces = (size_t)k->pieces + 1;
    const hpml_status memory = HPML_ERR_MEMORY;
    hpmlc_play_axes(y, k->p);
    y->role      = (hpmlc_role *)calloc((size_t)y->roles, sizeof *y->role);
    int64_t *all = (int64_t *)calloc(layers, 4 * sizeof(int64_t)); /* floats, then bucket, left, job */
    k->cut       = (int32_t *)calloc(pieces, sizeof *k->cut);
    hpml_status status = y->role && all && k->cut ? HPML_OK : hpmlc_refuse(to, memory, "forecast: no memory");
    if (status == HPML_OK) status = hpmlc_pieces_cut(k, to);
    if (status == HPML_OK) {
        k->floats = all;
        k->bucket = (int32_t *)(void *)(all + layers);
        k->left   = k->bucket + layers;
        k->job    = k->left + layers;
        if (!hpmlc_programs_make(k)) status = hpmlc_refuse(to, memory, "forecast: no memory for the programs");
    }
    k->floats = NULL;
    free(all);
    if (status != HPML_OK) return status;
    y->unit = y->ranks;
    if (!whole) hpmlc_play_fold(y);
    bool good = hpmlc_play_actors(y);
    if (good) hpmlc_sim_queue(&y->net);
    for (int r = 0; r < y->unit && good; r++) good = !y->net.failed && y->actor[2 * r + 1].step == y->steps;
    return good ? HPML_OK : hpmlc_refuse(to, memory, "forecast: no memory for %d ranks", y->unit);
}

/* Returns the bytes of activations that a rank of stage `stage` keeps. */
HPMLC_FN double hpmlc_stage_kept(const hpmlc_maker *k, int stage)
{
    HPMLC_ZERO(hpml_pipe_desc, d);
    double kept = 0;
    d.kind   = k->p->schedule;
    d.stages = (int32_t)hpmlc_max(k->p->pipe, 1);
    d.micro  = k->p->pipe > 1 ? k->p->micro : 1;
    d.chunks = k->p->chunks;
    for (int q = stage, chunk = 0; q < k->pieces; q += d.stages, chunk++) {
        double bytes = 0, most = 0;
        for (int i = k->cut[q]; i < k->cut[q + 1]; i++) {
            const hpml_layer_facts *l = &k->f->layer[i];
            const double own = (double)l->kept / hpmlc_layer_parts(k, l);
            bytes += k->p->recompute ? 4.0 * (double)l->edge / k->y->size[HPML_AXIS_SEQUENCE] : own;
            most = fmax(most, own);
        }
        if (k->p->recompute) bytes = fmin(bytes, 2 * sqrt((double)(k->cut[q + 1] - k->cut[q])) * most);
        kept += bytes * (double)k->rows * (k->p->pipe > 1 ? hpml_pipe_slots(&d, stage, chunk) : 1);
    }
    return k->p->memory > 0 ? fmin(kept, (double)k->p->memory) : kept;
}

/* Returns the bytes of the rank that needs most memory. */
HPMLC_FN int64_t hpmlc_forecast_memory(hpmlc_maker *k)
{
    const double n = k->p->shard > 0 ? hpmlc_group_size(k->y, HPMLC_GROUP_REPLICAS) : 1;
    const bool   whole = !hpmlc_plan_cuts(k->p) && !k->p->recompute && k->p->memory == 0;
    double       most = 0;
    for (k->stage = 0; k->stage < k->y->size[HPML_AXIS_PIPE]; k->stage++) {
        const double floats = hpmlc_stage_floats(k), slots = fmin(floats, 2 * 65536); /* two buckets of 256 KiB */
        double       bytes = k->p->shard > 2 ? floats / n + slots : floats;
        bytes += k->p->shard > 1 ? floats / n + slots : floats;
        bytes += k->f->states * floats / n;
        if (k->p->delayed) bytes += floats;
        if (hpmlc_plan_packs(k->p) && !k->p->codec.no_feedback) bytes += floats;
        most = fmax(most, 4 * bytes + hpmlc_stage_kept(k, k->stage));
    }
    return k->f->planned && whole ? (int64_t)k->f->planned->total : (int64_t)most;
}

/* Reads times and counts of the steps that were played. */
HPMLC_FN void hpmlc_forecast_read(const hpmlc_maker *k, hpml_prediction *out)
{
    const hpmlc_play *y = k->y;
    const int64_t     period = k->p->strategy == HPML_STRATEGY_SYNC || k->p->servers > 0 ? 1 : k->p->period;
    const double      steps = (double)((y->steps - 1) * period);
    int               readers = 0;
    for (int r = 0; r < y->unit && r < y->workers; r++, readers++) {
        const hpmlc_actor *a = &y->actor[2 * r + 1];
        for (int t = 0; t < HPML_TERM_COUNT; t++) out->term_s[t] += a->term[t];
        for (int t = 0; t < 2; t++) out->exposed_link_s[t] += a->link[t];
    }
    for (int t = 0; t < HPML_TERM_COUNT; t++) out->term_s[t] /= readers * steps;
    for (int t = 0; t < 2; t++) out->exposed_link_s[t] /= readers * steps;
    for (int t = HPML_TERM_DATA; t < HPML_TERM_COUNT; t++) out->exposed_s += out->term_s[t];
    for (int t = HPML_TERM_UPDATE; t < HPML_TERM_COUNT; t++)
        if (out->term_s[t] > out->term_s[out->decides] || t == HPML_TERM_UPDATE) out->decides = (hpml_term)t;
    if (out->term_s[out->decides] < 0.1 * out->term_s[HPML_TERM_COMPUTE]) out->decides = HPML_TERM_COMPUTE;
    for (int r = 0; r < y->unit; r++)
        out->rank_bytes = hpmlc_max(out->rank_bytes, y->net.bytes[2 * r] + y->net.bytes[2 * r + 1]);
    out->rank_bytes /= y->steps * period;
    out->between_bytes = y->net.between / (y->steps * period) * (y->ranks / y->unit);
    out->step_s  = (y->ends[y->steps - 1] - y->ends[0]) / steps;
    out->bubble  = out->step_s > 0 ? out->term_s[HPML_TERM_BUBBLE] / out->step_s : 0;
    const double shares = hpmlc_plan_workers(k->p, y->ranks);
    out->samples_s = out->step_s > 0 ? (double)k->samples * shares / out->step_s : 0;
    if (k->p->global_batch > 0 && out->step_s > 0) out->samples_s = (double)k->p->global_batch / out->step_s;
    out->played = y->unit;
}

/* Sets up maker and play for a checked plan. resolved: gets the plan with defaults in; net: the machine's network. */
HPMLC_FN void hpmlc_forecast_begin(hpmlc_maker *k, hpmlc_play *y, const hpml_plan *plan, const hpml_model_facts *f,
                                   const hpml_machine *m, hpml_plan *resolved, hpml_network *net)
{
    memset(k, 0, sizeof *k);
    memset(y, 0, sizeof *y);
    hpml_plan_resolve(plan, &f->facts, resolved);
    hpml_machine_network(m, f->facts.ranks, net);
    y->network = net;
    y->ranks   = f->facts.ranks;
    y->nodes   = hpmlc_network_nodes(net, y->ranks);
    y->steps   = plan->servers > 0 ? 8 : 3;
    k->p       = resolved;
    k->f       = f;
    k->m       = m;
    k->y       = y;
    k->samples = hpmlc_plan_most(plan, &f->facts);
    k->rows    = resolved->pipe > 1 ? (k->samples - 1) / resolved->micro + 1 : k->samples;
    k->pieces  = (int)hpmlc_max(resolved->pipe, 1);
    if (resolved->pipe > 1 && resolved->schedule == HPML_PIPE_INTERLEAVED)
        k->pieces *= resolved->chunks > 0 ? resolved->chunks : 2;
}

HPML_API hpml_status hpml_forecast(const hpml_plan *plan, const hpml_model_facts *facts, const hpml_machine *machine,
                                   hpml_prediction *out, char *error, size_t size)
{
    const hpmlc_text to = { error, size };
    hpmlc_maker      k;
    hpmlc_play       y;
    hpml_plan        resolved;
    hpml_network     net;
    HPMLC_ZERO(hpml_prediction, result);
    hpmlc_refuse(&to, HPML_OK, "%s", "");
    if (!out) return hpmlc_refuse(&to, HPML_ERR_ARGUMENT, "forecast: out is NULL; pass a struct for the result");
    *out = result;
    hpml_status status = hpmlc_forecast_check(plan, facts, machine, &to);
    if (status != HPML_OK) return status;
    hpmlc_forecast_begin(&k, &y, plan, facts, machine, &resolved, &net);
    status = hpmlc_play_run(&y, &k, false, &to);
    if (status == HPML_OK) {
        result.memory = hpmlc_forecast_memory(&k);
        hpmlc_forecast_read(&k, &result);
        result.buckets = y.role[0].background.jobs;
        out->memory = result.memory;
    }
    free(k.cut);
    hpmlc_play_close(&y);
    if (status == HPML_OK && machine->memory > 0 && result.memory > machine->memory)
        return hpmlc_refuse(&to, HPML_ERR_MEMORY, "forecast: a rank needs %.2f GB and has %.2f GB on \"%s\"; take shard, "
                            "recompute, pipe or tensor, or a smaller batch", 1e-9 * (double)result.memory,
                            1e-9 * (double)machine->memory, machine->name ? machine->name : "");
    if (status == HPML_OK) *out = result;
    return status;
}

HPML_API int hpml_prediction_text(const hpml_prediction *p, char *buffer, size_t size)
{
    const hpmlc_text to = { buffer, size };
    size_t           length = 0;
    if (size > 0) buffer[0] = 0;
    if (!p) return 0;
    hpmlc_append(&to, &length, "step %.4g ms =", 1e3 * p->step_s);
    for (int t = 0; t < HPML_TERM_COUNT; t++)
        if (t == HPML_TERM_COMPUTE || p->term_s[t] > 0)
            hpmlc_append(&to, &length, "%s %s %.4g", t > 0 ? " +" : "", hpml_term_name((hpml_term)t), 1e3 * p->term_s[t]);
    hpmlc_append(&to, &length, "; exposed %.4g within nodes, %.4g between; bubble %.0f %%; %.4g MB a rank, %.4g MB "
                 "between nodes; %.3g GB of memory; decided by %s", 1e3 * p->exposed_link_s[0],
                 1e3 * p->exposed_link_s[1], 100 * p->bubble, 1e-6 * (double)p->rank_bytes,
                 1e-6 * (double)p->between_bytes, 1e-9 * (double)p->memory, hpml_term_name(p->decides));
    return (int)length;
}

#ifdef __cplusplus
} /* extern "C" */
#endif
HPMLI_COMPILE_FAST_END
#endif /* HPML_COMM_BODY */
