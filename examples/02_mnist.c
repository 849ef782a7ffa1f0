/* What you learn: a whole training, on one worker or many: data, model, trainer, progress, evaluation, checkpoint, timeline.
   Difficulty 2 of 4.
   cc -O2 examples/02_mnist.c -o mnist -lm -lpthread && ./mnist --workers 4          (with -DHPML_USE_ZLIB -lz: reads .gz)
   mpicc -O2 -DHPML_USE_MPI examples/02_mnist.c -o mnist -lm -lpthread && mpiexec -n 2 ./mnist --transport mpi
   prints a progress line, a confusion matrix, some misread digits and the accuracy on digits it has not seen.
   The digits are drawn by digits.h; --data DIR takes MNIST's IDX files instead (only the t10k pair: its last 2,000 test). */
#define HPML_IMPLEMENTATION
#include "../hpml_comm.h"
#include "mnist.h"
#include "report.h"

typedef struct job {
    const options *o;
    report         r;      /* rank 0's */
    int64_t        limit;  /* steps; 0: all epochs */
    bool           quiet;
    double         accuracy, loss, seconds; /* results, of rank 0 */
    double         bytes, step_s, compute_s, exposed_s, hidden; /* of a step */
    int64_t        steps, sent, parameters, workers;
    uint64_t       hash;
} job;

static hpml_tensor *record_model(const char *model, hpml_tensor *x)
{
    hpml_linear_desc relu = { .activation = HPML_ACT_RELU };
    hpml_conv2d_desc conv = { .kernel_h = 5, .padding_h = 2, .activation = HPML_ACT_RELU };
    if (strcmp(model, "linear") == 0) return hpml_linear(hpml_flatten(x), 10, NULL);
    if (strcmp(model, "mlp") == 0) return hpml_linear(hpml_linear(hpml_flatten(x), 128, &relu), 10, NULL);
    x = hpml_max_pool2d(hpml_conv2d(x, 16, &conv), 2, 0, 0); /* (B, 16, 14, 14) */
    x = hpml_max_pool2d(hpml_conv2d(x, 32, &conv), 2, 0, 0); /* (B, 32, 7, 7) */
    return hpml_linear(hpml_linear(hpml_flatten(x), 128, &relu), 10, NULL);
}

static hpml_codec_kind codec_kind(const char *name)
{
    int k = HPML_CODEC_TWOBIT;
    while (k > 0 && strcmp(hpml_codec_get((hpml_codec_kind)k)->name, name) != 0) k--;
    return (hpml_codec_kind)k;
}

/* Rank 0 tells what it has learned. */
static void summarize(hpml_ctx *ctx, hpml_trainer *t, hpml_dataset *test, job *j)
{
    int64_t      confusion[100] = { 0 };
    hpml_metrics m      = { .confusion = confusion };
    float       *scores = (float *)malloc(sizeof(float) * (size_t)test->count * 10), *x = (float *)malloc(sizeof(float) * (size_t)test->count * 784);
    hpml_trainer_evaluate(t, test, &m);
    for (int64_t i = 0; x && i < test->count * 784; i++) x[i] = (float)((const unsigned char *)test->x)[i] / 255.0f;
    if (x && scores && !j->o->json && !j->o->compare && hpml_trainer_predict(t, x, test->count, scores) == HPML_OK) {
        report_confusion(confusion, 10);
        report_mistakes(test, scores);
    }
    free(scores);
    free(x);
    j->accuracy = m.accuracy, j->loss = m.loss, j->hash = hpml_param_hash(ctx);
    printf("test accuracy %.2f %% on %lld digits; %.2f s of training; %.0f bytes a step and worker, %.1f MB in all\n", 100 * m.accuracy,
           (long long)m.samples, j->seconds, j->bytes, 1e-6 * (double)j->sent);
    if (!j->o->compare && report_files(&j->r) == 0)
        printf("wrote build/loss.csv, build/loss.svg (open in a browser), build/trace.json (open in Perfetto)\n");
}

/* Where the time of the last steps went, on each worker. Collective. */
static void steps_table(hpml_comm *comm, hpml_distributed *d, int64_t steps)
{
    int            room = (int)steps * hpml_comm_size(comm), n;
    hpml_step_row *rows = (hpml_step_row *)calloc((size_t)room, sizeof *rows);
    n = hpml_distribute_steps(d, rows, room);
    size_t size = n > 0 ? (size_t)hpml_steps_text(rows, n, NULL, 0) + 1 : 0;
    char  *text = (char *)malloc(size + 1);
    if (n > 0 && text && hpml_comm_rank(comm) == 0 && hpml_steps_text(rows, n, text, size) > 0) printf("%s", text);
    free(text);
    free(rows);
}

/* One worker: the serial program, and one call that joins it to the others. */
static hpml_status train(hpml_comm *comm, void *user)
{
    job                   *j = (job *)user;
    const options         *o = j->o;
    hpml_ctx              *ctx = hpml_comm_ctx(comm);
    int                    rank = hpml_comm_rank(comm), workers = hpml_comm_size(comm);
    int64_t                leaf = o->batch < 8 ? o->batch : 8, grain = o->exact ? leaf : 1;
    int64_t                share = ((o->batch + grain - 1) / grain + workers - 1) / workers * grain; /* the most that one worker gets */
    hpml_dataset          *data = NULL, *test = NULL;
    hpml_distributed      *d = NULL;
    hpml_distribute_report account = { 0 };
    hpml_counters          sent;
    if (!load_data(ctx, o, &data, &test)) return hpml_ctx_fail(ctx, HPML_ERR_OPEN, "no data");
    hpml_tensor  *x = hpml_input_4d(ctx, share, 1, 28, 28);
    hpml_trainer *t = hpml_trainer_create(ctx, &(hpml_trainer_desc){
        .input = x, .output = record_model(o->model, x), .lr = (float)o->lr, .momentum = 0.9f,
        .schedule = { .kind = HPML_SCHEDULE_COSINE, .total_steps = o->epochs * ((data->count + o->batch - 1) / o->batch) } });
    if (t && (workers > 1 || o->exact || o->table > 0 || strcmp(o->codec, "none") != 0)) {
        d = hpml_distribute(t, comm, &(hpml_distribute_desc){
            .global_batch = o->batch,
            .codec        = { .kind = codec_kind(o->codec), .min_elements = 1024 }, /* not the first filters: 25 numbers each */
            .algorithm = hpml_algorithm_find(o->allreduce), .exact = o->exact, .leaf = leaf, .history = (int32_t)o->table });
        if (!d) return hpml_ctx_status(ctx);
    }
    if (o->load) d ? hpml_distribute_load(d, o->load) : hpml_checkpoint_load(t, o->load);
    if (rank == 0 && !j->quiet)
        printf("%s, %lld parameters, %lld training digits, batch %lld, %s kernels, %d worker%s (%s) x %d threads, gradients as %s\n", o->model,
               (long long)hpml_param_total(ctx), (long long)data->count, (long long)o->batch, hpml_ctx_cpu(ctx), workers, workers > 1 ? "s" : "",
               hpml_comm_transport(comm), hpml_ctx_threads(ctx), o->codec);
    hpml_comm_trace_start(comm, &(hpml_trace_desc){ .first_step = 10, .last_step = 30 });
    hpml_comm_counters_reset(comm);
    hpml_distribute_get(d, NULL, true);
    double        start = hpml_now();
    int64_t       first = hpml_trainer_step_count(t);
    hpml_fit_desc fit = { .on_step = rank == 0 && !j->quiet ? report_step : NULL, .user = &j->r, .max_steps = j->limit };
    for (int64_t e = first * o->batch / data->count; e < o->stop && hpml_ctx_status(ctx) == HPML_OK; e++) {
        hpml_trainer_fit(t, data, &fit);
        if (j->limit > 0) break;
    }
    if (hpml_ctx_status(ctx) != HPML_OK) return hpml_ctx_status(ctx);
    if (o->save && (d ? hpml_distribute_save(d, o->save) : hpml_checkpoint_save(t, o->save)) != HPML_OK) return hpml_ctx_status(ctx);
    hpml_comm_counters(comm, &sent);
    hpml_distribute_get(d, &account, false);
    start = hpml_now() - start;
    if (o->table > 0 && !j->quiet) steps_table(comm, d, o->table);
    mkdir("build", 0777);
    if (hpml_comm_trace_save(comm, "build/trace.json") != HPML_OK || rank > 0) return hpml_ctx_status(ctx);
    j->seconds = start, j->steps = hpml_trainer_step_count(t) - first, j->workers = workers;
    j->sent = sent.bytes, j->bytes = j->steps > 0 ? (double)sent.bytes / (double)j->steps : 0;
    j->step_s = j->steps > 0 ? j->seconds / (double)j->steps : 0, j->compute_s = account.compute_s;
    j->exposed_s = account.exposed_s, j->hidden = account.hidden;
    j->parameters = hpml_param_total(ctx);
    if (!j->quiet) summarize(ctx, t, test, j);
    return hpml_ctx_status(ctx);
}

/* Workers, transport, network from the options; 0 or the exit status. */
static int launch(job *j)
{
    static const hpml_link gigabit = { 50e-6, 125e6 }, fast = { 100e-6, 12.5e6 };
    const options   *o = j->o;
    char             error[768];
    hpml_launch_desc l = { .transport = strcmp(o->transport, "mpi") == 0 ? HPML_TRANSPORT_MPI : HPML_TRANSPORT_THREADS, .ranks = (int32_t)o->workers,
                           .ctx = { .seed = (uint64_t)o->seed, .threads = (int32_t)o->threads } };
    if (l.transport == HPML_TRANSPORT_MPI) l.ranks = 0;
    if (o->network) l.network.ranks_per_node = 1, l.network.between = strcmp(o->network, "1gbit") == 0 ? gigabit : fast;
    j->r = (report){ .epochs = (int)o->epochs, .live = isatty(1), .workers = (int)o->workers };
    hpml_status status = hpml_launch(&l, train, j, error, sizeof error);
    free(j->r.step), free(j->r.loss), free(j->r.accuracy);
    if (status != HPML_OK) fprintf(stderr, "error: %s\n", error);
    return status != HPML_OK;
}

/* The same training three ways, then some steps of each on slow networks. */
static int compare(const options *base)
{
    static const struct { int workers; const char *codec; } row[] = { { 1, "none" }, { 4, "none" }, { 4, "onebit" } };
    static const char *const network[] = { "1gbit", "100mbit" };
    static const double      rate[] = { 125e6, 12.5e6 };
    char table[2048] = "";
    for (size_t i = 0; i < sizeof row / sizeof row[0]; i++) {
        options o = *base;
        job     j = { .o = &o };
        size_t  at = strlen(table);
        o.workers = row[i].workers, o.codec = row[i].codec;
        if (launch(&j)) return 1;
        at += (size_t)snprintf(table + at, sizeof table - at, "%4d  %-7s %8.2f %% %12.0f %9.2f s", row[i].workers, row[i].codec, 100 * j.accuracy,
                               j.bytes, j.seconds);
        for (int n = 0; n < 2; n++) {
            job slow = { .o = &o, .quiet = true, .limit = 12 };
            o.network = network[n];
            if (row[i].workers > 1 && launch(&slow)) return 1;
            if (row[i].workers == 1) at += (size_t)snprintf(table + at, sizeof table - at, "%22s", "-");
            else at += (size_t)snprintf(table + at, sizeof table - at, "%10.1f %8.1f ms", 1e3 * (j.step_s + j.bytes / rate[n]), 1e3 * slow.step_s);
        }
        snprintf(table + at, sizeof table - at, "\n");
    }
    printf("\n%s\n%s\n%s", "                                                          a step on 1 Gbit/s      a step on 100 Mbit/s",
           "workers codec   accuracy   bytes a step  training   predicted  measured     predicted  measured", table);
    return 0;
}

int main(int argc, char **argv)
{
    options o = { .model = "cnn", .codec = "onebit", .allreduce = "auto", .transport = "threads", .samples = 12000, .batch = 64, .workers = 1,
                  .seed = 1 };
    job     j = { .o = &o };
    int     failed = parse(&o, argc, argv);
    if (failed) return failed == 1 ? 0 : failed;
    if (o.compare) return compare(&o);
    failed = launch(&j);
    if (o.json && !failed && j.workers > 0)
        printf("{\"test_accuracy\": %.6f, \"test_loss\": %.6f, \"train_seconds\": %.3f, \"samples_per_second\": %.1f, \"bytes_sent\": %lld, "
               "\"bytes_per_step\": %.1f, \"compute_ms\": %.3f, \"exposed_ms\": %.3f, \"hidden\": %.3f, \"parameters\": %lld, \"steps\": %lld, \"workers\": %lld, \"weights_hash\": \"%016llx\"}\n", j.accuracy, j.loss,
               j.seconds, j.seconds > 0 ? (double)(j.steps * o.batch) / j.seconds : 0, (long long)j.sent, j.bytes, 1e3 * j.compute_s,
               1e3 * j.exposed_s, j.hidden, (long long)j.parameters,
               (long long)j.steps, (long long)j.workers, (unsigned long long)j.hash);
    return failed;
}
