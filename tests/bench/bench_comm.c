/* Allreduce of f32, seconds by size: bench_comm threads | fork | mpi | ring [BYTES]. Prints "case bytes seconds" for
   each measurement, and for messages: half of the time to and fro. bench_comm.sh repeats, takes the best of each and
   writes the rows.
   Training: bench_comm scale MODEL BATCH (or mpiexec -n 2 bench_comm_mpi scale ...) sets 2 workers that share a batch
   against 1 worker, and against 2 that only wait for each other: what the machine allows.
   bench_comm workers MODEL BATCH sets 16 workers with such a batch each against 1 worker on one thread.
   bench_comm hidden MODEL BATCH injects a link of 1 Gbit/s and exchanges during, then after, the backward pass.
   Prints one line of numbers. */
#define HPML_IMPLEMENTATION
#include "../../hpml_comm.h"

enum { OURS, NATIVE, COPY, RING, MESSAGE };
#define LARGEST ((int64_t)64 << 20)

static void once(hpml_comm *c, int what, float *x, int64_t bytes)
{
    static const hpml_allreduce_desc ring = { 0, HPML_RING, HPML_SUM, HPML_ELEMENT_F32, 0 };
    if (what == OURS) hpml_allreduce(c, x, bytes / 4, NULL);
    if (what == RING) hpml_allreduce(c, x, bytes / 4, &ring);
    if (what == MESSAGE && hpml_comm_rank(c) == 0) hpml_send(c, 1, 0, x, (size_t)bytes);
    if (what == MESSAGE && hpml_comm_rank(c) < 2) hpml_recv(c, 1 - hpml_comm_rank(c), 0, x, (size_t)bytes);
    if (what == MESSAGE && hpml_comm_rank(c) == 1) hpml_send(c, 0, 0, x, (size_t)bytes);
    if (what == COPY) memcpy(x + LARGEST / 4, x, (size_t)bytes);
#ifdef HPML_USE_MPI
    if (what == NATIVE) MPI_Allreduce(MPI_IN_PLACE, x, (int)(bytes / 4), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
#endif
}

/* Best of `runs` stretches of about 5 ms; the slowest rank's time counts. */
static double seconds(hpml_comm *c, int what, float *x, int64_t bytes, int runs)
{
    hpml_allreduce_desc max;
    double              best = 1e30, t;
    int                 times = 1;
    memset(&max, 0, sizeof max);
    max.reduce = HPML_MAX, max.element = HPML_ELEMENT_F64;
    for (int run = -2; run < runs; run++) {
        hpml_barrier(c);
        double start = hpml_now();
        for (int i = 0; i < times; i++) once(c, what, x, bytes);
        t = (hpml_now() - start) / times;
        hpml_allreduce(c, &t, 1, &max);
        if (run >= 0 && t < best) best = t;
        times = t > 0.005 ? 1 : t > 5e-6 ? (int)(0.005 / t) : 1000;
    }
    return best;
}

static hpml_status measure(hpml_comm *c, void *user)
{
    float *x    = (float *)hpml_ctx_alloc(hpml_comm_ctx(c), (size_t)LARGEST * 2, NULL);
    bool   mpi  = strcmp(hpml_comm_transport(c), "mpi") == 0;
    double t[4] = { 0 };
    const char *name = hpml_comm_transport(c);
    (void)user;
    if (!x) return hpml_ctx_status(hpml_comm_ctx(c));
    hpml_comm_tune(c);
    for (int64_t bytes = 1024; bytes <= LARGEST; bytes *= 4) {
        t[0] = seconds(c, OURS, x, bytes, 6);
        t[1] = seconds(c, COPY, x, bytes, 6);
        t[3] = seconds(c, MESSAGE, x, bytes, 6) / 2;
        if (mpi) t[2] = seconds(c, NATIVE, x, bytes, 6);
        if (hpml_comm_rank(c) > 0) continue;
        printf("ours_%s %lld %.9g\n", name, (long long)bytes, t[0]);
        printf("copy_%s %lld %.9g\n", name, (long long)bytes, t[1]);
        printf("message_%s %lld %.9g\n", name, (long long)bytes, t[3]);
        if (mpi) printf("mpich %lld %.9g\n", (long long)bytes, t[2]);
    }
    return hpml_ctx_status(hpml_comm_ctx(c));
}

#ifdef HPML_USE_MPI
/* The ring as most programs write it: MPI_Sendrecv, and MPI waits as it does. */
static void plain_ring(float *x, float *buffer, int64_t n, int p, int rank)
{
    int next = (rank + 1) % p, before = (rank + p - 1) % p;
    for (int k = 0; k < 2 * (p - 1); k++) {
        int     out = ((rank - (k < p - 1 ? 1 : 0) - k % (p - 1)) % p + p) % p, in = (out + p - 1) % p;
        int64_t from = hpml_block(n, p, out), to = hpml_block(n, p, in), size = hpml_block(n, p, in + 1) - to;
        MPI_Sendrecv(x + from, (int)(hpml_block(n, p, out + 1) - from), MPI_FLOAT, next, 0, k < p - 1 ? buffer : x + to,
                     (int)size, MPI_FLOAT, before, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        for (int64_t i = 0; i < size && k < p - 1; i++) x[to + i] += buffer[i];
    }
}

static hpml_status crowd(hpml_comm *c, void *user) /* more ranks than cores */
{
    int64_t bytes = *(int64_t *)user, n = bytes / 4;
    int     p = hpml_comm_size(c), rank = hpml_comm_rank(c);
    float  *x = (float *)hpml_ctx_alloc(hpml_comm_ctx(c), (size_t)LARGEST, NULL), *buffer = x + n;
    double  ours, theirs = 1e30;
    if (!x) return hpml_ctx_status(hpml_comm_ctx(c));
    for (int64_t i = 0; i < n; i++) x[i] = (float)rank;
    plain_ring(x, buffer, n, p, rank);
    for (int64_t i = 0; i < n; i++)
        if (x[i] != (float)(p * (p - 1) / 2))
            return hpml_ctx_fail(hpml_comm_ctx(c), HPML_ERR_STATE, "plain ring is wrong");
    ours = seconds(c, RING, x, bytes, 10);
    for (int run = 0; run < 5; run++) {
        MPI_Barrier(MPI_COMM_WORLD);
        double start = hpml_now(), t;
        for (int i = 0; i < 4; i++) plain_ring(x, buffer, n, p, rank);
        t      = (hpml_now() - start) / 4;
        theirs = t < theirs ? t : theirs;
    }
    if (rank == 0) printf("ours_ring %lld %.9g\n", (long long)bytes, ours);
    if (rank == 0) printf("plain_ring %lld %.9g\n", (long long)bytes, theirs);
    return hpml_ctx_status(hpml_comm_ctx(c));
}
#endif

/* ---- training */

typedef struct training {
    const char *model;
    int64_t     batch; /* of all workers together */
    bool        no_overlap;
    int         steps; /* of which `staged` takes the mean; 0: the median of 30 */
    double      result[6];
} training;

static hpml_tensor *record(const char *model, hpml_tensor *x)
{
    hpml_linear_desc relu = { .activation = HPML_ACT_RELU };
    hpml_conv2d_desc conv = { .kernel_h = 5, .padding_h = 2, .activation = HPML_ACT_RELU };
    if (strcmp(model, "mlp") == 0) return hpml_linear(hpml_linear(hpml_flatten(x), 128, &relu), 10, NULL);
    if (strcmp(model, "wide") == 0) { /* four equal layers, two for each stage of a pipeline */
        x = hpml_flatten(x);
        for (int i = 0; i < 4; i++) x = hpml_linear(x, 784, &relu);
        return hpml_linear(x, 10, NULL);
    }
    if (strcmp(model, "pairs") == 0) { /* two pairs of layers that the ranks of an axis divide, with one sum each way */
        hpml_linear_desc out = { .split = HPML_SPLIT_OUT, .activation = HPML_ACT_RELU };
        hpml_linear_desc in  = { .split = HPML_SPLIT_IN };
        x = hpml_flatten(x);
        for (int i = 0; i < 2; i++) x = hpml_linear(hpml_linear(x, 784, &out), 784, &in);
        return hpml_linear(x, 10, NULL);
    }
    if (strcmp(model, "deep") == 0) { /* equal layers, so that what is sent can hide behind the layers before it */
        x = hpml_flatten(x);
        for (int i = 0; i < 6; i++) x = hpml_linear(x, 256, &relu);
        return hpml_linear(x, 10, NULL);
    }
    x = hpml_max_pool2d(hpml_conv2d(x, 16, &conv), 2, 0, 0);
    x = hpml_max_pool2d(hpml_conv2d(x, 32, &conv), 2, 0, 0);
    return hpml_linear(hpml_linear(hpml_flatten(x), 128, &relu), 10, NULL);
}

static hpml_trainer *trainer(hpml_ctx *ctx, const char *model, int64_t batch)
{
    hpml_tensor *x = hpml_input_4d(ctx, batch, 1, 28, 28);
    return hpml_trainer_create(ctx, &(hpml_trainer_desc){ .input = x, .output = record(model, x),
                                                          .lr = 1e-4f, .momentum = 0.9f });
}

static int by_size(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *x, int n)
{
    qsort(x, (size_t)n, sizeof *x, by_size);
    return x[n / 2];
}

/* Samples a second of this worker: the median of some steps, since other programs take a core at times. With `meet`,
   the worker waits there for the others after each step. */
static double rate(hpml_trainer *t, const float *x, const int32_t *y, int64_t batch, int steps, hpml_comm *meet)
{
    double took[400];
    if (steps > 400) steps = 400;
    for (int i = 0; i < steps; i++) {
        took[i] = hpml_now();
        hpml_trainer_step(t, x, y, batch, NULL);
        if (meet) hpml_barrier(meet);
        took[i] = hpml_now() - took[i];
    }
    return (double)batch / median(took, steps);
}

/* In turns: one worker with the whole batch, two strangers with half of it each who only wait for each other after each
   step, two workers that share it. */
static hpml_status scale(hpml_comm *c, void *user)
{
    enum { ROUNDS = 25 };
    training     *j = (training *)user;
    hpml_ctx     *ctx = hpml_comm_ctx(c);
    hpml_ctx     *own[2] = { hpml_ctx_create(&(hpml_ctx_desc){ .threads = 1 }),
                             hpml_ctx_create(&(hpml_ctx_desc){ .threads = 1 }) };
    int           rank = hpml_comm_rank(c);
    int64_t       half = j->batch / 2;
    hpml_trainer *alone = trainer(own[0], j->model, j->batch), *stranger = trainer(own[1], j->model, half);
    hpml_trainer *t = trainer(ctx, j->model, half);
    float        *x = (float *)hpml_ctx_alloc(ctx, sizeof(float) * (size_t)j->batch * 784, NULL);
    int32_t      *y = (int32_t *)hpml_ctx_alloc(ctx, sizeof(int32_t) * (size_t)j->batch, NULL);
    double        one[ROUNDS], efficiency[ROUNDS], ceiling[ROUNDS];
    int32_t       steps = 0;
    if (hpml_comm_size(c) != 2 || !x || !y || !hpml_distribute(t, c, NULL))
        return hpml_ctx_fail(ctx, HPML_ERR_STATE, "2 ranks, and memory");
    for (int64_t i = 0; i < j->batch * 784; i++) x[i] = (float)(i * 37 % 11) / 11;
    rate(alone, x, y, j->batch, 3, NULL), rate(stranger, x, y, half, 3, NULL), rate(t, x, y, half, 20, NULL);
    steps = (int32_t)(0.03 * rate(alone, x, y, j->batch, 3, NULL) / (double)j->batch) + 2; /* about 30 ms */
    hpml_broadcast(c, &steps, sizeof steps, 0);
    for (int r = 0; r < ROUNDS; r++) {
        hpml_barrier(c);
        if (rank == 0) one[r] = rate(alone, x, y, j->batch, steps, NULL);
        hpml_barrier(c);
        ceiling[r] = rate(stranger, x, y, half, steps, c) / (rank == 0 ? one[r] : 1);
        hpml_barrier(c);
        efficiency[r] = rate(t, x, y, half, steps, NULL) / (rank == 0 ? one[r] : 1);
    }
    hpml_ctx_free(own[0]), hpml_ctx_free(own[1]);
    if (rank > 0 || hpml_ctx_status(ctx) != HPML_OK) return hpml_ctx_status(ctx);
    printf("%.0f %.3f %.3f\n", median(one, ROUNDS), median(efficiency, ROUNDS), median(ceiling, ROUNDS));
    return HPML_OK;
}

/* Milliseconds a step: computing, exchanging, waiting for the exchange. */
static hpml_status hidden(hpml_comm *c, void *user)
{
    training     *j = (training *)user;
    hpml_ctx     *ctx = hpml_comm_ctx(c);
    int64_t       half = j->batch / 2;
    hpml_trainer *t = trainer(ctx, j->model, half);
    float        *x = (float *)hpml_ctx_alloc(ctx, sizeof(float) * (size_t)half * 784, NULL);
    int32_t      *y = (int32_t *)hpml_ctx_alloc(ctx, sizeof(int32_t) * (size_t)half, NULL);
    hpml_distributed      *d = hpml_distribute(t, c, &(hpml_plan){ .no_overlap = j->no_overlap });
    hpml_distribute_report r = { 0 };
    if (!x || !y || !d) return hpml_ctx_status(ctx);
    rate(t, x, y, half, 10, NULL);
    hpml_distribute_get(d, NULL, true);
    rate(t, x, y, half, 60, NULL);
    hpml_distribute_get(d, &r, false);
    if (hpml_comm_rank(c) == 0)
        j->result[0] = r.step_s, j->result[1] = r.compute_s, j->result[2] = r.comm_s, j->result[3] = r.exposed_s,
        j->result[4] = r.bytes, j->result[5] = r.buckets;
    return hpml_ctx_status(ctx);
}

/* Samples a second of whole batches, which all ranks get. */
static hpml_status staged(hpml_comm *c, void *user)
{
    training     *j = (training *)user;
    hpml_ctx     *ctx = hpml_comm_ctx(c);
    hpml_trainer *t = trainer(ctx, j->model, j->batch);
    float        *x = (float *)hpml_ctx_alloc(ctx, sizeof(float) * (size_t)j->batch * 784, NULL);
    int32_t      *y = (int32_t *)hpml_ctx_alloc(ctx, sizeof(int32_t) * (size_t)j->batch, NULL);
    if (!x || !y || !hpml_distribute(t, c, NULL)) return hpml_ctx_status(ctx);
    rate(t, x, y, j->batch, 5, NULL);
    double start = hpml_now(), samples = rate(t, x, y, j->batch, j->steps ? j->steps : 30, NULL);
    if (j->steps) samples = (double)(j->batch * j->steps) / (hpml_now() - start);
    if (hpml_comm_rank(c) == 0) j->result[0] = samples;
    return hpml_ctx_status(ctx);
}

/* Milliseconds of processor time of this thread, in which a rank of one thread computes. */
static double processor_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return 1e3 * (double)t.tv_sec + 1e-6 * (double)t.tv_nsec;
}

/* In turns: one rank with the whole model, and two ranks that divide its layers, as the launch's plan says.
   Milliseconds of a step of one, and of two; of these, while rank 0 computes, and while it communicates in sight; of
   processor time of one, and of both together. */
static hpml_status split(hpml_comm *c, void *user)
{
    enum { ROUNDS = 15, STEPS = 5 };
    training     *j = (training *)user;
    hpml_ctx     *ctx = hpml_comm_ctx(c), *own = hpml_ctx_create(&(hpml_ctx_desc){ .threads = 1 });
    hpml_trainer *alone = trainer(own, j->model, j->batch), *t = trainer(ctx, j->model, j->batch);
    float        *x = (float *)hpml_ctx_alloc(ctx, sizeof(float) * (size_t)j->batch * 784, NULL);
    int32_t      *y = (int32_t *)hpml_ctx_alloc(ctx, sizeof(int32_t) * (size_t)j->batch, NULL);
    double        ms[6][ROUNDS], per_batch = 1e3 * (double)j->batch;
    hpml_distributed *d = hpml_distribute(t, c, NULL);
    if (hpml_comm_size(c) != 2 || !x || !y || !d) return hpml_ctx_fail(ctx, HPML_ERR_STATE, "2 ranks, and memory");
    for (int64_t i = 0; i < j->batch * 784; i++) x[i] = (float)(i * 37 % 11) / 11;
    rate(alone, x, y, j->batch, 3, NULL), rate(t, x, y, j->batch, 5, NULL);
    for (int r = 0; r < ROUNDS; r++) {
        hpml_distribute_report report = { 0 };
        hpml_barrier(c);
        ms[4][r] = processor_ms();
        if (hpml_comm_rank(c) == 0) ms[0][r] = per_batch / rate(alone, x, y, j->batch, STEPS, NULL);
        ms[4][r] = (processor_ms() - ms[4][r]) / STEPS;
        hpml_barrier(c);
        hpml_distribute_get(d, NULL, true);
        ms[5][r] = processor_ms();
        ms[1][r] = per_batch / rate(t, x, y, j->batch, STEPS, NULL);
        ms[5][r] = (processor_ms() - ms[5][r]) / STEPS;
        hpml_distribute_get(d, &report, false);
        ms[2][r] = 1e3 * report.compute_s;
        ms[3][r] = 1e3 * report.exposed_s;
        hpml_allreduce(c, &ms[5][r], 1, &(hpml_allreduce_desc){ .element = HPML_ELEMENT_F64 });
    }
    hpml_ctx_free(own);
    for (int i = 0; i < 6 && hpml_comm_rank(c) == 0; i++) j->result[i] = median(ms[i], ROUNDS);
    return hpml_ctx_status(ctx);
}

/* Prints what `split` measures for two stages with 8 micro-batches ("pipe") or for two halves of layers ("tensor"), and
   the share of the time in which two stages compute by the bubble's formula; last the processor time in relation. */
static int axes(const char *axis, training *j)
{
    char             error[768];
    const bool       pipe = strcmp(axis, "pipe") == 0;
    hpml_plan        plan = { .pipe = 2, .schedule = HPML_PIPE_1F1B, .micro = 8 }, halves = { .tensor = 2 };
    hpml_pipe_desc   ideal = { .kind = HPML_PIPE_1F1B, .stages = 2, .micro = 8 };
    hpml_launch_desc d = { .ranks = 2, .ctx.threads = 1, .plan = pipe ? &plan : &halves };
#ifdef HPML_USE_MPI
    d.transport = HPML_TRANSPORT_MPI;
#endif
    if (hpml_launch(&d, split, j, error, sizeof error) != HPML_OK) return fprintf(stderr, "%s\n", error), 1;
    if (j->result[0] > 0) /* rank 0 */
        printf("%.3f %.3f %.3f %.3f %.3f %.3f %.3f\n", j->result[0], j->result[1], j->result[2], j->result[3],
               j->result[0] / j->result[1] / 2, pipe ? 1 - hpml_pipe_bubble(&ideal) : 1, j->result[5] / j->result[4]);
    return 0;
}

/* Prints the samples a second of all workers together. */
static int workers(training *j)
{
    char error[768];
    j->steps = 200;
    for (int ranks = 1; ranks <= 16; ranks += 15) {
        hpml_launch_desc d = { .ranks = ranks, .ctx.threads = 1 };
        if (hpml_launch(&d, staged, j, error, sizeof error) != HPML_OK) return fprintf(stderr, "%s\n", error), 1;
        printf("%s %.0f%s", ranks == 1 ? "one" : "sixteen", ranks * j->result[0], ranks == 1 ? " " : "\n");
    }
    return 0;
}

int main(int argc, char **argv)
{
    char             error[768];
    hpml_launch_desc d;
    int64_t          bytes = argc > 2 ? atoll(argv[2]) : 410000;
    training         j = { argc > 3 ? argv[2] : "mlp", argc > 3 ? atoll(argv[3]) : 256, false, 0, { 0 } };
    memset(&d, 0, sizeof d);
    hpml_rank_fn *fn = measure;
    if (argc > 4 && strcmp(argv[1], "split") == 0) {
        training own = { argv[3], atoll(argv[4]), false, 0, { 0 } };
        return axes(argv[2], &own);
    }
    if (argc > 1 && strcmp(argv[1], "workers") == 0) return workers(&j);
    if (argc > 1 && strcmp(argv[1], "hidden") == 0) {
        d.ranks = 2, d.ctx.threads = 1, d.network.ranks_per_node = 1;
        d.network.between.latency = 50e-6, d.network.between.bandwidth = 125e6;
        for (int after = 0; after < 2; after++) {
            j.no_overlap = after;
            if (hpml_launch(&d, hidden, &j, error, sizeof error) != HPML_OK) return fprintf(stderr, "%s\n", error), 1;
            printf("%.3f %.3f %.3f %.3f %.0f %.0f%s", 1e3 * j.result[0], 1e3 * j.result[1], 1e3 * j.result[2],
                   1e3 * j.result[3], j.result[4], j.result[5], after ? "\n" : "  ");
        }
        return 0;
    }
    if (argc > 1 && (strcmp(argv[1], "threads") == 0 || strcmp(argv[1], "scale") == 0)) d.ranks = 2;
    else if (argc > 1 && strcmp(argv[1], "fork") == 0) d.ranks = 2, d.transport = HPML_TRANSPORT_FORK;
    else d.transport = HPML_TRANSPORT_MPI;
    if (argc > 1 && strcmp(argv[1], "scale") == 0) {
#ifdef HPML_USE_MPI
        d.transport = HPML_TRANSPORT_MPI;
#endif
        d.ctx.threads = 1;
        if (hpml_launch(&d, scale, &j, error, sizeof error) == HPML_OK) return 0;
        return fprintf(stderr, "%s\n", error), 1;
    }
#ifdef HPML_USE_MPI
    if (argc > 1 && strcmp(argv[1], "ring") == 0) fn = crowd;
#endif
    if (hpml_launch(&d, fn, &bytes, error, sizeof error) == HPML_OK) return 0;
    fprintf(stderr, "%s\n", error);
    return 1;
}
