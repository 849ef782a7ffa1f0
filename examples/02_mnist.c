/* What you learn: a whole training, on one worker or many: data, model, trainer, progress, evaluation, checkpoint,
   timeline. Difficulty 2 of 4.
   cc -O2 examples/02_mnist.c -o mnist -lm -lpthread && HPML_RUN=fork:4 ./mnist    (or --workers 4: threads)
   mpicc -O2 -DHPML_USE_MPI examples/02_mnist.c -o mnist -lm -lpthread && mpiexec -n 2 ./mnist --transport mpi
   prints a progress line, a confusion matrix, some misread digits and the accuracy on digits it has not seen.
   The digits are drawn by digits.h; --data DIR takes MNIST's IDX files (only the t10k pair: its last 2,000 test). */
#define HPML_IMPLEMENTATION
#include "../hpml_comm.h"
#include "mnist_options.h"
#include "report.h"

typedef struct job {
    const options *o;
    report         r;     /* rank 0's */
    int64_t        limit; /* steps; 0: all epochs */
    bool           quiet;
    /* what comes out, on rank 0: */
    double                 accuracy, loss, seconds, step_s, bytes; /* of all, of all; of a step, of a step and worker */
    int64_t                steps, sent, parameters, workers;
    uint64_t               hash;
    hpml_distribute_report account;
} job;

static hpml_tensor *record_model(const options *o, hpml_tensor *x)
{
    hpml_linear_desc relu = { .activation = HPML_ACT_RELU };
    hpml_conv2d_desc conv = { .kernel_h = 5, .padding_h = 2, .activation = HPML_ACT_RELU };
    conv.workspace = (size_t)o->workspace * 1024;
    if (strcmp(o->model, "linear") == 0) return hpml_linear(hpml_flatten(x), 10, NULL);
    if (strcmp(o->model, "mlp") == 0) return hpml_linear(hpml_linear(hpml_flatten(x), 128, &relu), 10, NULL);
    if (strcmp(o->layout, "nhwc") == 0) x = hpml_to_layout(x, HPML_NHWC); /* later layers keep this layout */
    x = hpml_max_pool2d(hpml_conv2d(x, 16, &conv), 2, 0, 0); /* (B, 16, 14, 14) */
    x = hpml_max_pool2d(hpml_conv2d(x, 32, &conv), 2, 0, 0); /* (B, 32, 7, 7) */
    return hpml_linear(hpml_linear(hpml_flatten(x), 128, &relu), 10, NULL);
}

/* The serial program: a model for at most `share` digits at once, and what trains it. */
static hpml_trainer *make_trainer(hpml_ctx *ctx, const options *o, int64_t share, int64_t digits)
{
    hpml_tensor      *x = hpml_input_4d(ctx, share, 1, 28, 28);
    hpml_trainer_desc d = { .input = x, .output = record_model(o, x), .lr = (float)o->lr, .momentum = 0.9f };
    d.schedule.kind        = HPML_SCHEDULE_COSINE;
    d.schedule.total_steps = o->epochs * ((digits + o->batch - 1) / o->batch);
    return hpml_trainer_create(ctx, &d);
}

/* The one call that joins it to the other workers; NULL where there is nothing to join. */
static hpml_distributed *join(hpml_comm *comm, hpml_trainer *t, const options *o, int64_t leaf)
{
    hpml_plan d = { .global_batch = o->batch, .exact = o->exact, .leaf = leaf };
    if (hpml_comm_size(comm) == 1 && !o->exact && o->table == 0 && strcmp(o->codec, "none") == 0) return NULL;
    d.codec.kind         = hpml_codec_find(o->codec); /* the command line refuses unknown names */
    d.codec.min_elements = 1024; /* not the first filters: 25 numbers each */
    d.algorithm          = hpml_algorithm_find(o->allreduce);
    d.history            = (int32_t)o->table;
    return hpml_distribute(t, comm, &d);
}

/* Rank 0 tests the model and prints the results. */
static void summarize(hpml_ctx *ctx, hpml_trainer *t, hpml_dataset *test, job *j)
{
    int64_t      confusion[100] = { 0 }, n = test->count;
    hpml_metrics m      = { .confusion = confusion };
    float       *scores = (float *)malloc(sizeof(float) * (size_t)n * 10);
    float       *x      = (float *)malloc(sizeof(float) * (size_t)n * 784);
    bool         show   = x && scores && !j->o->json && !j->o->compare;
    hpml_trainer_evaluate(t, test, &m);
    for (int64_t i = 0; show && i < n * 784; i++) x[i] = (float)((const unsigned char *)test->x)[i] / 255.0f;
    if (show && hpml_trainer_predict(t, x, n, scores) == HPML_OK) {
        report_confusion(confusion, 10);
        report_mistakes(test, scores);
    }
    free(scores);
    free(x);
    j->accuracy = m.accuracy, j->loss = m.loss, j->hash = hpml_param_hash(ctx);
    printf("test accuracy %.2f %% on %lld digits after %.2f s of training\n", 100 * m.accuracy, (long long)m.samples,
           j->seconds);
    if (j->workers > 1)
        printf("each worker sent %.0f bytes a step, %.1f MB in all\n", j->bytes, 1e-6 * (double)j->sent);
    if (!j->o->compare && report_csv(&j->r, j->o->out) == 0 && report_plot(&j->r, NULL, 1, j->o->out) == 0)
        report_drawn(j->o->out, "loss.csv, loss.svg (loss and accuracy)");
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

/* What every worker runs. */
static hpml_status train(hpml_comm *comm, void *user)
{
    job           *j    = (job *)user;
    const options *o    = j->o;
    hpml_ctx      *ctx  = hpml_comm_ctx(comm);
    hpml_dataset  *data = NULL, *test = NULL;
    hpml_counters  sent;
    int            workers = hpml_comm_size(comm);
    bool           tells   = hpml_comm_rank(comm) == 0 && !j->quiet;
    int64_t        leaf    = o->batch < 8 ? o->batch : 8, grain = o->exact ? leaf : 1; /* digits that stay together */
    int64_t        share   = ((o->batch + grain - 1) / grain + workers - 1) / workers * grain; /* most of one worker */
    if (!load_data(ctx, o, &data, &test)) return hpml_ctx_fail(ctx, HPML_ERR_OPEN, "no data");
    hpml_trainer     *t = make_trainer(ctx, o, share, data->count);
    hpml_distributed *d = join(comm, t, o, leaf);
    if (hpml_ctx_status(ctx) != HPML_OK) return hpml_ctx_status(ctx);
    if (o->load) d ? hpml_distribute_load(d, o->load) : hpml_checkpoint_load(t, o->load);
    if (tells)
        printf("%s, %lld parameters, %lld training digits, batch %lld, %s kernels\n%d worker%s (%s), "
               "each of %d thread%s, results as %s, gradients as %s\n", o->model, (long long)hpml_param_total(ctx),
               (long long)data->count, (long long)o->batch, hpml_ctx_cpu(ctx), workers, workers > 1 ? "s" : "",
               hpml_comm_transport(comm), hpml_ctx_threads(ctx), hpml_ctx_threads(ctx) > 1 ? "s" : "",
               o->precision, strcmp(o->codec, "none") == 0 ? "f32" : o->codec);
    hpml_comm_trace_start(comm, &(hpml_trace_desc){ .first_step = 10, .last_step = 30, .arrows = true });
    hpml_comm_counters_reset(comm);
    hpml_distribute_get(d, NULL, true);
    hpml_distribute_report account = { 0 };
    double        start = hpml_now();
    int64_t       first = hpml_trainer_step_count(t);
    hpml_fit_desc fit   = { .on_step = tells ? report_step : NULL, .user = &j->r, .max_steps = j->limit,
                          .checkpoint = o->checkpoint, .stop = o->checkpoint ? &interrupted : NULL };
    int64_t done = first * o->batch / data->count; /* passes before this run */
    fit.epochs   = (int32_t)(o->checkpoint ? o->stop : o->stop - done);
    fit.resume   = o->checkpoint != NULL;
    if (fit.epochs > 0 && hpml_trainer_fit(t, data, &fit) == HPML_ERR_STOPPED && tells)
        printf("\ninterrupted; the same command goes on from %s\n", o->checkpoint);
    if (o->save) d ? hpml_distribute_save(d, o->save) : hpml_checkpoint_save(t, o->save);
    if (hpml_ctx_status(ctx) != HPML_OK) return hpml_ctx_status(ctx);
    hpml_comm_counters(comm, &sent);
    hpml_distribute_get(d, &account, false);
    double seconds = hpml_now() - start;
    if (o->table > 0 && !j->quiet) steps_table(comm, d, o->table);
    char path[1024];
    snprintf(path, sizeof path, "%s/trace.json", o->out);
    screen_folder(o->out);
    hpml_status status = hpml_comm_trace_save(comm, path);
    if (status != HPML_OK || hpml_comm_rank(comm) > 0) return status;
    j->steps  = hpml_trainer_step_count(t) - first, j->seconds = seconds;
    j->sent   = sent.bytes, j->parameters = hpml_param_total(ctx), j->workers = workers;
    j->bytes  = j->steps > 0 ? (double)sent.bytes / (double)j->steps : 0;
    j->step_s = j->steps > 0 ? seconds / (double)j->steps : 0, j->account = account;
    if (tells) summarize(ctx, t, test, j);
    return hpml_ctx_status(ctx);
}

static const struct { const char *name; hpml_link link; } networks[] = { /* seconds, bytes a second */
    { "1gbit", { 50e-6, 125e6 } }, { "100mbit", { 100e-6, 12.5e6 } } };

/* Workers, transport, network from the options; 0 or the exit status. */
static int launch(job *j)
{
    const options   *o = j->o;
    char             error[768];
    hpml_launch_desc l = { .ranks = o->workers > 1 ? (int32_t)o->workers : 0, .ctx = { .seed = (uint64_t)o->seed } };
    l.ctx.threads = (int32_t)o->threads;
    hpml_dtype *dtype = &l.ctx.activation_dtype;
    while (strcmp(hpml_dtype_name(*dtype), o->precision) != 0) *dtype = (hpml_dtype)(*dtype + 1);
    if (strcmp(o->transport, "mpi") == 0) l.transport = HPML_TRANSPORT_MPI, l.ranks = 0;
    for (int n = 0; n < 2 && o->network; n++)
        if (strcmp(o->network, networks[n].name) == 0)
            l.network.ranks_per_node = 1, l.network.between = networks[n].link;
    if (o->checkpoint) signal(SIGINT, interrupt);
    j->r = (report){ .epochs = (int)o->epochs, .live = isatty(1), .workers = (int)o->workers };
    hpml_status status = hpml_launch(&l, train, j, error, sizeof error);
    if (status != HPML_OK) fprintf(stderr, "error: %s\n", error);
    return status != HPML_OK;
}

/* Seconds of a step of this training on a slow network, from 12 steps of it; below 0: it failed. */
static double slow_step(const options *o, int network)
{
    options slow = *o;
    job     j    = { .o = &slow, .quiet = true, .limit = 12 };
    slow.network = networks[network].name;
    int failed = launch(&j);
    report_free(&j.r);
    return failed ? -1 : j.step_s;
}

/* The same training three ways, then some steps of each on slow networks. */
static int compare(const options *base)
{
    static const struct { int workers; const char *codec, *name; } row[3] = {
        { 1, "none", "1 worker" }, { 4, "none", "4 workers" }, { 4, "onebit", "4 workers, 1-bit gradients" } };
    const char *names[3] = { row[0].name, row[1].name, row[2].name };
    double      measured[3][2] = { { 0 } };
    options     o[3] = { *base, *base, *base };
    job         jobs[3] = { { .o = &o[0] }, { .o = &o[1] }, { .o = &o[2] } };
    report      reports[3];
    char        text[512];
    for (int i = 0; i < 3; i++) {
        o[i].workers = row[i].workers;
        o[i].codec   = row[i].codec;
        if (launch(&jobs[i])) return 1;
        reports[i] = jobs[i].r;
        for (int n = 0; n < 2 && row[i].workers > 1; n++)
            if ((measured[i][n] = slow_step(&o[i], n)) < 0) return 1;
    }
    printf("\n%44s%-18s%s\n", "", "ms on 1 Gbit/s", "ms on 100 Mbit/s");
    printf("workers codec  accuracy bytes/step training forecast measured forecast measured\n");
    for (int i = 0; i < 3; i++) {
        const job *j = &jobs[i];
        printf("%4d    %-6s %6.2f %% %10.0f %6.2f s", row[i].workers, row[i].codec, 100 * j->accuracy, j->bytes,
               j->seconds);
        for (int n = 0; n < 2 && row[i].workers > 1; n++)
            printf(" %8.1f %8.1f", 1e3 * (j->step_s + j->bytes / networks[n].link.bandwidth), 1e3 * measured[i][n]);
        printf("\n");
    }
    snprintf(text, sizeof text, "\nThe 4 workers share the cores of this machine: %.2f s of training, %.2f s with 1 "
             "worker. Between machines 1-bit gradients make a step %.1f times as fast on 1 Gbit/s, %.1f times on "
             "100 Mbit/s.", jobs[1].seconds, jobs[0].seconds, measured[1][0] / measured[2][0],
             measured[1][1] / measured[2][1]);
    screen_paragraph(text);
    if (report_plot(reports, names, 3, base->out) == 0) report_drawn(base->out, "loss.svg (the three losses)");
    for (int i = 0; i < 3; i++) report_free(&reports[i]);
    return 0;
}

static void print_json(const job *j)
{
    double rate = j->seconds > 0 ? (double)(j->steps * j->o->batch) / j->seconds : 0;
    printf("{\"test_accuracy\": %.6f, \"test_loss\": %.6f, \"train_seconds\": %.3f, \"samples_per_second\": %.1f, "
           "\"bytes_sent\": %lld, \"bytes_per_step\": %.1f, \"compute_ms\": %.3f, \"exposed_ms\": %.3f, "
           "\"hidden\": %.3f, \"parameters\": %lld, \"steps\": %lld, \"workers\": %lld, "
           "\"weights_hash\": \"%016llx\"}\n", j->accuracy, j->loss, j->seconds, rate, (long long)j->sent, j->bytes,
           1e3 * j->account.compute_s, 1e3 * j->account.exposed_s, j->account.hidden, (long long)j->parameters,
           (long long)j->steps, (long long)j->workers, (unsigned long long)j->hash);
}

int main(int argc, char **argv)
{
    options o = { .model = "cnn", .layout = "nchw", .precision = "f32", .allreduce = "auto", .transport = "threads",
                  .out = "build", .samples = 12000, .batch = 64, .workers = 1, .seed = 1 };
    job     j = { .o = &o };
    option  precision = { "--precision", OPTION_CHOICE, &o.precision, "f32|bf16|f16", "how results are stored (f32)" };
    int     failed = parse(&o, &precision, 1, argc, argv);
    if (failed) return failed == 1 ? 0 : failed;
    if (o.compare) return compare(&o);
    failed = launch(&j);
    if (o.json && !failed && j.workers > 0) print_json(&j);
    report_free(&j.r);
    return failed;
}
