/* One random fault, drawn from a seed: a rank stops doing its part in the middle of some work, and every other rank
   must end with an error that names it.
       storm SEED FOLDER          ranks as threads
       storm SEED FOLDER fork     ranks as forked processes
       storm_ranks SEED FOLDER    the same under mpiexec
   Each survivor prints "good rank R: ..." or "BAD rank R: ...", the first line says what the fault is. Where ranks are
   processes each writes its own into FOLDER/pid.R, and FOLDER/done.R when it has been judged. Run by storm.sh. */
#define _GNU_SOURCE /* setitimer */
#include "../hpml_comm.h"
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <unistd.h>
#ifdef HPML_USE_MPI
#include <mpi.h>
#endif

enum { DEADLINE = 3, PATIENCE = 60 }; /* seconds of a wait; of a rank that hangs, if the others never end */

/* SPLIT and FREE make parts and free them; with MPI FREE then frees the first communicator, which waits for all. CREATE
   is of MPI only. */
typedef enum work { SPLIT, SUMS, JOBS, TRAIN, ONEBIT, DELAYED, SAVE, FREE, CREATE, WORKS } work;
static const char *const works[WORKS] = { "split", "sums", "jobs", "training", "1-bit training", "delayed training",
                                          "saving", "free", "create" };

/* KILL and EXIT end a process. KILL and, of a process, HANG come at any moment, the others before an operation. */
typedef enum kind { LEAVE, FAIL, HANG, EXIT, KILL, KINDS } kind;
static const char *const kinds[KINDS] = { "leaves", "fails", "hangs", "calls exit", "is killed" };

static struct storm {
    work        work;
    kind        kind;
    int         ranks, victim, op; /* op: of the victim's fault */
    long        microseconds;      /* from the first operation on, for a fault at any moment */
    const char *folder;
    int         ended;             /* survivors, where ranks are threads */
    int         fork;              /* 1: ranks are forked processes */
} storm;

static void draw(uint64_t seed, int ranks, bool mpi)
{
    hpml_rng r = { .seed = seed };
    storm.ranks  = ranks > 0 ? ranks : 2 + (int)hpml_rng_below(&r, 7);
    storm.victim = storm.fork + (int)hpml_rng_below(&r, storm.ranks - storm.fork); /* rank 0 has the others' parent */
    storm.work   = (work)hpml_rng_below(&r, mpi ? WORKS : CREATE);
    storm.kind   = (kind)hpml_rng_below(&r, mpi || storm.fork ? KINDS : EXIT);
    storm.op     = (int)hpml_rng_below(&r, 30);
    storm.microseconds = (long)hpml_rng_below(&r, 200000) + 1;
    if (mpi && storm.work == FREE && storm.kind < HANG) storm.kind = HANG; /* a failed rank announces it first */
}

static const char *in_folder(char path[400], const char *name, int rank)
{
    snprintf(path, 400, "%s/%s.%d", storm.folder, name, rank);
    return path;
}

static void touch(const char *name, int rank, long content)
{
    char  path[400];
    FILE *f = fopen(in_folder(path, name, rank), "w");
    if (!f) return;
    fprintf(f, "%ld\n", content);
    fclose(f);
}

/* Waits until every other rank has been judged, because a message of this rank could end their waits. processes: under
   mpiexec, or forked. */
static void hang(bool processes)
{
    for (int tenths = 0; tenths < 10 * PATIENCE; tenths++) {
        char path[400];
        int  ended = __atomic_load_n(&storm.ended, __ATOMIC_ACQUIRE);
        for (int i = 0; i < storm.ranks && processes; i++)
            ended += i != storm.victim && access(in_folder(path, "done", i), F_OK) == 0;
        if (ended >= storm.ranks - 1) break;
        usleep(100000);
    }
    if (processes) _exit(1);
}

static void strike(int sig)
{
    (void)sig;
    if (storm.kind == KILL) kill(getpid(), SIGKILL);
    hang(true);
}

/* Commits the fault if this rank and operation are the victim's. True: the rank returns. */
static bool fault(hpml_comm *c, int op, bool processes)
{
    bool any_moment = storm.kind == KILL || (processes && storm.kind == HANG);
    if (hpml_comm_rank(c) != storm.victim || op != (any_moment ? 1 : storm.op)) return false;
    if (any_moment) {
        struct itimerval timer;
        memset(&timer, 0, sizeof timer);
        timer.it_value.tv_usec = storm.microseconds;
        signal(SIGALRM, strike);
        setitimer(ITIMER_REAL, &timer, NULL);
        return false;
    }
    if (storm.kind == FAIL) hpml_ctx_fail(hpml_comm_ctx(c), HPML_ERR_STATE, "a fault of the storm");
    if (storm.kind == HANG) hang(processes);
    if (storm.kind == EXIT) exit(3);
    return true;
}

static void parts(hpml_comm *c)
{
    float      x[100] = { 0 };
    int        me     = hpml_comm_rank(c);
    hpml_comm *halves = hpml_comm_split(c, me & 1, me), *turned = hpml_comm_split(c, me == 0 ? -1 : 0, -me);
    hpml_allreduce(halves, x, 100, NULL);
    if (turned) hpml_barrier(turned);
    hpml_comm_free(turned);
    hpml_comm_free(halves);
}

static void sums(hpml_comm *c, int op)
{
    enum { N = 20000 };
    int                 me = hpml_comm_rank(c), p = hpml_comm_size(c);
    float              *x = (float *)hpml_ctx_alloc(hpml_comm_ctx(c), 2 * N * sizeof *x, NULL);
    hpml_allreduce_desc d;
    memset(&d, 0, sizeof d);
    d.algorithm = (hpml_algorithm)(op / 8 % 6 + 1);
    switch (op % 8) {
    case 0: hpml_allreduce(c, x, N, &d); break;
    case 1: hpml_broadcast(c, x, 2 * N, op % p); break;
    case 2: hpml_reduce_scatter(c, x, N, HPML_ELEMENT_F32, HPML_SUM); break;
    case 3: hpml_allgather(c, x, N, HPML_ELEMENT_F32); break;
    case 4: hpml_barrier(c); break;
    case 5: hpml_all_to_all(c, x, x + N, (size_t)(N / p) * sizeof *x); break;
    case 6: hpml_reduce_to(c, x, N / 4, HPML_ELEMENT_F32, HPML_MAX, 0); break;
    case 7: hpml_sendrecv(c, (me + 1) % p, x, 2 * N, (me + p - 1) % p, x + N, 2 * N, 3); break;
    }
    hpml_ctx_release(hpml_comm_ctx(c), x);
}

static void jobs(hpml_comm *c)
{
    float     x[4][1000] = { { 0 } };
    hpml_job *job[4];
    for (int i = 0; i < 4; i++) job[i] = hpml_iallreduce(c, x[i], 1000, NULL);
    for (int i = 0; i < 4; i++) hpml_job_wait(job[i]);
}

typedef struct model { hpml_trainer *t; hpml_distributed *d; } model;

static model model_create(hpml_comm *c)
{
    hpml_ctx            *ctx = hpml_comm_ctx(c);
    hpml_tensor         *in = hpml_input_2d(ctx, 8, 64);
    hpml_linear_desc     relu;
    hpml_trainer_desc    d;
    hpml_plan            how;
    model                m;
    memset(&relu, 0, sizeof relu), memset(&d, 0, sizeof d), memset(&how, 0, sizeof how);
    relu.activation = HPML_ACT_RELU;
    d.input = in, d.output = hpml_linear(hpml_linear(in, 256, &relu), 10, NULL), d.lr = 1e-3f;
    how.bucket_bytes = 8192, how.delayed = storm.work == DELAYED;
    if (storm.work == ONEBIT || storm.work == SAVE) how.codec.kind = HPML_CODEC_ONEBIT;
    m.t = hpml_trainer_create(ctx, &d);
    m.d = hpml_distribute(m.t, c, &how);
    return m;
}

static void train(hpml_comm *c, const model *m, int op)
{
    float   x[8 * 64];
    int32_t y[8];
    char    path[400];
    for (int i = 0; i < 8 * 64; i++) x[i] = (float)((i * 7 + hpml_comm_rank(c) + op) % 13) / 13;
    for (int i = 0; i < 8; i++) y[i] = (i + op) % 10;
    hpml_trainer_step(m->t, x, y, 8, NULL);
    if (storm.work == SAVE) hpml_distribute_save(m->d, in_folder(path, "checkpoint", 0));
}

/* Works until a fault ends it. */
static hpml_status run(hpml_comm *c, void *user)
{
    hpml_ctx *ctx     = hpml_comm_ctx(c);
    bool      mpi     = *(const bool *)user, trains = storm.work >= TRAIN && storm.work <= SAVE;
    bool      processes = mpi || storm.fork;
    model     m       = { NULL, NULL };
    if (processes) touch("pid", hpml_comm_rank(c), (long)getpid());
    if (trains) m = model_create(c);
    for (int op = 0; hpml_ctx_status(ctx) == HPML_OK; op++) {
        if (fault(c, op, processes)) break;
        if (storm.work == SPLIT || storm.work == FREE) parts(c);
        if (storm.work == SUMS) sums(c, op);
        if (storm.work == JOBS) jobs(c);
        if (trains) train(c, &m, op);
        if (storm.work != FREE || !mpi || op <= storm.op) continue;
        if (hpml_comm_rank(c) == storm.victim) strike(0); /* where the other ranks free their communicators */
        break;
    }
    return hpml_ctx_status(ctx);
}

/* Whether the error `text` contains "rank N" for the victim N. */
static bool names(const char *text, int rank)
{
    char   name[24];
    size_t n = (size_t)snprintf(name, sizeof name, "rank %d", rank);
    for (const char *at = strstr(text, name); at; at = strstr(at + 1, name))
        if (at[n] < '0' || at[n] > '9') return true;
    return false;
}

static bool judge(int rank, hpml_status status, const char *text)
{
    bool good = status != HPML_OK && names(text, storm.victim);
    if (rank == storm.victim) return true;
    printf("%s rank %d: %s\n", good ? "good" : "BAD", rank, text);
    fflush(stdout);
    return good;
}

#ifdef HPML_USE_MPI
/* Creates and frees communicators, one after another. */
static hpml_status create(char *error, size_t size)
{
    hpml_status status = HPML_OK;
    for (int op = 0; status == HPML_OK; op++) {
        hpml_comm_desc d;
        bool           over = false;
        memset(&d, 0, sizeof d);
        d.transport = HPML_TRANSPORT_MPI, d.timeout = DEADLINE;
        hpml_ctx  *ctx = hpml_ctx_create(NULL);
        hpml_comm *c   = hpml_comm_create(ctx, &d);
        if (c && op == 0) touch("pid", hpml_comm_rank(c), (long)getpid());
        if (c) hpml_barrier(c);
        if (c) over = fault(c, op, true);
        status = hpml_ctx_status(ctx);
        if (status == HPML_OK && !over) hpml_comm_free(c);
        status = hpml_ctx_status(ctx);
        snprintf(error, size, "%s", hpml_ctx_error(ctx));
        hpml_ctx_free(ctx);
        if (over) break;
    }
    return status;
}

int main(int argc, char **argv)
{
    static const bool mpi = true;
    char              error[768] = "";
    hpml_launch_desc  d;
    hpml_status       status;
    int               rank, ranks;
    if (argc < 3) return 2;
    MPI_Init_thread(NULL, NULL, MPI_THREAD_SERIALIZED, &ranks);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    storm.folder = argv[2];
    draw(strtoull(argv[1], NULL, 10), ranks, true);
    if (rank == 0) printf("rank %d of %d %s in %s\n", storm.victim, ranks, kinds[storm.kind], works[storm.work]);
    fflush(stdout);
    memset(&d, 0, sizeof d);
    d.transport = HPML_TRANSPORT_MPI, d.timeout = DEADLINE, d.ctx.threads = 1;
    if (storm.work == CREATE) status = create(error, sizeof error);
    else status = hpml_launch(&d, run, (void *)(uintptr_t)&mpi, error, sizeof error);
    bool good = judge(rank, status, error);
    touch("done", rank, 0);
    fflush(stdout);
    _exit(!good); /* MPI_Finalize would wait for the rank at fault */
}
#else
static hpml_status survive(hpml_comm *c, void *user)
{
    hpml_status status = run(c, user);
    int         rank   = hpml_comm_rank(c);
    if (rank == storm.victim) return HPML_OK;
    judge(rank, status, hpml_ctx_error(hpml_comm_ctx(c)));
    if (storm.fork) touch("done", rank, 0);
    __atomic_add_fetch(&storm.ended, 1, __ATOMIC_RELEASE);
    return status;
}

int main(int argc, char **argv)
{
    static const bool mpi = false;
    hpml_launch_desc  d;
    if (argc < 3) return 2;
    storm.folder = argv[2];
    storm.fork   = argc > 3;
    draw(strtoull(argv[1], NULL, 10), 0, false);
    printf("rank %d of %d %s in %s\n", storm.victim, storm.ranks, kinds[storm.kind], works[storm.work]);
    memset(&d, 0, sizeof d);
    d.ranks = storm.ranks, d.timeout = DEADLINE, d.ctx.threads = 1;
    if (storm.fork) d.transport = HPML_TRANSPORT_FORK;
    hpml_launch(&d, survive, (void *)(uintptr_t)&mpi, NULL, 0);
    return 0;
}
#endif
