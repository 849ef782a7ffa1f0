/* What you learn: a whole training: data, model, trainer, progress, evaluation, checkpoint, timeline. Difficulty 2 of 4.
   cc -O2 examples/02_mnist.c -o mnist -lm -lpthread && ./mnist          (with -DHPML_USE_ZLIB -lz: reads .gz)
   prints a progress line, a confusion matrix, some misread digits and the accuracy on digits it has not seen.
   The digits are drawn by digits.h; --data DIR takes MNIST's IDX files instead (only the t10k pair: its last 2,000 test). */
#define HPML_IMPLEMENTATION
#include "../hpml.h"
#include "digits.h"
#include "report.h"

typedef struct options {
    const char *data, *model, *codec, *save, *load;
    int64_t     samples, batch, epochs, workers, threads, seed;
    double      lr;
    int         json, exact;
} options;

static int usage(const char *bad)
{
    fprintf(stderr, "unknown or incomplete option %s\n--model linear|mlp|cnn --epochs N --batch N --lr X --samples N --data DIR --workers N "
            "--codec none|onebit|bf16 --exact --seed N --threads N --save FILE --load FILE --json\n", bad);
    return 2;
}

static int parse(options *o, int argc, char **argv)
{
    const struct { const char *name; const char **text; int64_t *number; } table[] = {
        { "--data", &o->data, NULL }, { "--model", &o->model, NULL }, { "--codec", &o->codec, NULL }, { "--save", &o->save, NULL },
        { "--load", &o->load, NULL }, { "--samples", NULL, &o->samples }, { "--batch", NULL, &o->batch }, { "--epochs", NULL, &o->epochs },
        { "--workers", NULL, &o->workers }, { "--threads", NULL, &o->threads }, { "--seed", NULL, &o->seed } };
    for (int i = 1; i < argc; i++) {
        size_t k = 0, n = sizeof table / sizeof table[0];
        if (strcmp(argv[i], "--json") == 0) { o->json = 1; continue; }
        if (strcmp(argv[i], "--exact") == 0) { o->exact = 1; continue; }
        if (i + 1 == argc) return usage(argv[i]);
        if (strcmp(argv[i], "--lr") == 0) { o->lr = atof(argv[++i]); continue; }
        while (k < n && strcmp(table[k].name, argv[i]) != 0) k++;
        if (k == n) return usage(argv[i]);
        i++;
        if (table[k].text) *table[k].text = argv[i];
        else *table[k].number = atoll(argv[i]);
    }
    return 0;
}

/* The IDX pair `name` of a folder, plain or gzipped; NULL when it is not there. */
static hpml_dataset *load_pair(hpml_ctx *ctx, const char *dir, const char *name)
{
    char images[1024], labels[1024];
    for (int gz = 0; gz < 2; gz++) {
        snprintf(images, sizeof images, "%s/%s-images-idx3-ubyte%s", dir, name, gz ? ".gz" : "");
        snprintf(labels, sizeof labels, "%s/%s-labels-idx1-ubyte%s", dir, name, gz ? ".gz" : "");
        if (access(images, R_OK) == 0) return hpml_dataset_load_idx(ctx, images, labels);
    }
    return NULL;
}

static hpml_dataset *draw_digits(hpml_ctx *ctx, uint64_t seed, int64_t first, int64_t count)
{
    const int64_t  shape[3] = { 1, 28, 28 };
    unsigned char *images = (unsigned char *)malloc((size_t)count * 785), *labels = images ? images + count * 784 : NULL;
    int32_t       *y      = (int32_t *)malloc((size_t)count * sizeof *y);
    hpml_dataset  *d      = NULL;
    if (images && y) {
        digits_fill(seed, first, count, images, labels);
        for (int64_t i = 0; i < count; i++) y[i] = labels[i];
        d = hpml_dataset_create(ctx, count, HPML_DTYPE_U8, 3, shape, images, HPML_DTYPE_I32, 1, y);
    }
    free(images);
    free(y);
    return d;
}

static int load_data(hpml_ctx *ctx, const options *o, hpml_dataset **train, hpml_dataset **test)
{
    if (!o->data) {
        *train = draw_digits(ctx, 1, 0, o->samples);
        *test  = draw_digits(ctx, 1, 1000000000, 2000);
        return *train && *test;
    }
    *train = load_pair(ctx, o->data, "train");
    *test  = load_pair(ctx, o->data, "t10k");
    if (*test && !*train && hpml_ctx_status(ctx) == HPML_OK && (*test)->count > 2000) {
        hpml_dataset *all = *test;
        *train = hpml_dataset_slice(all, 0, all->count - 2000);
        *test  = hpml_dataset_slice(all, all->count - 2000, 2000);
    }
    if (!*test && hpml_ctx_status(ctx) == HPML_OK)
        fprintf(stderr, "%s: no t10k-images-idx3-ubyte[.gz] in this folder\n", o->data);
    return *train && *test;
}

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

/* What a worker of a data-parallel job does to each gradient the moment it is final: pack it for the wire, keep what is
   lost, go on with what the others would see. With one worker nobody else adds to it. */
typedef struct wire {
    hpml_packing *packing; /* (parameters) */
    float       **residual;
    char         *packed;
    int64_t       bytes;
} wire;

static hpml_status pack_gradient(void *user, hpml_trainer *t, int param)
{
    wire        *w = (wire *)user;
    hpml_tensor *p = hpml_param_at(hpml_trainer_settings(t)->input->ctx, param);
    hpml_status  s = hpml_packing_encode(&w->packing[param], w->packed, w->residual[param], p->grad, w->packing[param].rows);
    if (s != HPML_OK) return hpml_ctx_fail(p->ctx, s, "gradient of \"%s\" is not finite; lower --lr", p->name);
    hpml_packing_decode(&w->packing[param], p->grad, w->packed, w->packing[param].rows);
    w->bytes += (int64_t)w->packing[param].size;
    return HPML_OK;
}

static void attach_codec(hpml_ctx *ctx, hpml_trainer *t, wire *w, const char *name)
{
    int             n    = hpml_param_count(ctx);
    size_t          most = 0;
    hpml_codec_desc desc = { .kind = strcmp(name, "onebit") == 0 ? HPML_CODEC_ONEBIT : strcmp(name, "bf16") == 0 ? HPML_CODEC_BF16 : HPML_CODEC_NONE };
    w->packing  = (hpml_packing *)calloc((size_t)n, sizeof *w->packing);
    w->residual = (float **)calloc((size_t)n, sizeof *w->residual);
    for (int i = 0; i < n; i++) {
        hpml_tensor *p    = hpml_param_at(ctx, i);
        int64_t      rows = p->ndim > 1 ? p->shape[0] : 1;
        hpml_packing_init(&w->packing[i], &desc, rows, hpml_tensor_count(p) / rows);
        if (w->packing[i].size > most) most = w->packing[i].size;
        if (w->packing[i].residual_count == 0) continue;
        w->residual[i] = (float *)calloc((size_t)w->packing[i].residual_count, sizeof(float));
        hpml_trainer_add_state(t, p->name, w->residual[i], w->packing[i].residual_count);
    }
    w->packed = (char *)malloc(most);
    hpml_trainer_set_hooks(t, &(hpml_hooks){ .user = w, .grad = pack_gradient });
}

static void summarize(hpml_ctx *ctx, hpml_trainer *t, hpml_dataset *test, const options *o, const report *r, const wire *w, double seconds)
{
    int64_t      confusion[100] = { 0 };
    hpml_metrics m      = { .confusion = confusion };
    float       *scores = (float *)malloc(sizeof(float) * (size_t)test->count * 10), *x = (float *)malloc(sizeof(float) * (size_t)test->count * 784);
    int64_t      done   = hpml_trainer_step_count(t) * o->batch;
    hpml_trainer_evaluate(t, test, &m);
    for (int64_t i = 0; x && i < test->count * 784; i++) x[i] = (float)((const unsigned char *)test->x)[i] / 255.0f;
    if (x && scores && hpml_trainer_predict(t, x, test->count, scores) == HPML_OK && !o->json) {
        report_confusion(confusion, 10);
        report_mistakes(test, scores);
    }
    free(scores);
    free(x);
    printf("\ntest accuracy %.2f %% on %lld digits; %.2f s of training; gradients packed as %s: %.1f MB instead of %.1f\n", 100 * m.accuracy,
           (long long)m.samples, seconds, o->codec, 1e-6 * (double)w->bytes, 4e-6 * (double)(hpml_trainer_step_count(t) * hpml_param_total(ctx)));
    if (report_files(r) == 0 && hpml_trace_save(ctx, "build/trace.json") == HPML_OK)
        printf("wrote build/loss.csv, build/loss.svg (open in a browser), build/trace.json (open in Perfetto)\n");
    if (o->json)
        printf("{\"test_accuracy\": %.6f, \"test_loss\": %.6f, \"train_seconds\": %.3f, \"samples_per_second\": %.1f, \"bytes_sent\": %lld, "
               "\"parameters\": %lld, \"steps\": %lld, \"weights_hash\": \"%016llx\"}\n", m.accuracy, m.loss, seconds,
               seconds > 0 ? (double)done / seconds : 0, (long long)w->bytes, (long long)hpml_param_total(ctx),
               (long long)hpml_trainer_step_count(t), (unsigned long long)hpml_param_hash(ctx));
}

static int train(hpml_ctx *ctx, const options *o)
{
    hpml_dataset *data = NULL, *test = NULL;
    hpml_tensor  *x    = hpml_input_4d(ctx, o->batch, 1, 28, 28);
    hpml_trainer *t;
    report        r = { .epochs = (int)o->epochs, .live = isatty(1) };
    wire          w = { 0 };
    double        start;
    hpml_fit_desc fit = { .epochs = 1, .on_step = report_step, .user = &r };
    if (!load_data(ctx, o, &data, &test)) return 1;
    t = hpml_trainer_create(ctx, &(hpml_trainer_desc){ .input = x, .output = record_model(o->model, x), .lr = (float)o->lr, .momentum = 0.9f });
    if (!t) return 1;
    attach_codec(ctx, t, &w, o->codec);
    if (o->load && hpml_checkpoint_load(t, o->load) != HPML_OK) return 1;
    printf("%s, %lld parameters, %lld training digits, batch %lld, %s kernels, %d threads\n", o->model, (long long)hpml_param_total(ctx),
           (long long)data->count, (long long)o->batch, hpml_ctx_cpu(ctx), hpml_ctx_threads(ctx));
    hpml_trace_start(ctx, &(hpml_trace_desc){ .first_step = 10, .last_step = 30 });
    start = hpml_now();
    for (int64_t e = hpml_trainer_step_count(t) * o->batch / data->count; e < o->epochs; e++)
        if (hpml_trainer_fit(t, data, &fit) != HPML_OK) return 1;
    start = hpml_now() - start;
    if (o->save && hpml_checkpoint_save(t, o->save) != HPML_OK) return 1;
    summarize(ctx, t, test, o, &r, &w, start);
    for (int i = 0; i < hpml_param_count(ctx); i++) free(w.residual[i]);
    free(w.residual), free(w.packing), free(w.packed), free(r.step), free(r.loss), free(r.accuracy);
    return hpml_ctx_status(ctx) != HPML_OK;
}

int main(int argc, char **argv)
{
    options   o = { .model = "cnn", .codec = "onebit", .samples = 12000, .batch = 64, .epochs = 3, .workers = 1, .seed = 1, .lr = 0.05 };
    int       failed = parse(&o, argc, argv);
    hpml_ctx *ctx;
    if (failed) return failed;
    if (o.workers != 1) {
        fprintf(stderr, "--workers %lld: hpml.h trains with one worker; several come with hpml_comm.h\n", (long long)o.workers);
        return 2;
    }
    if (o.exact) printf("--exact: with one worker every run has the same bits already\n");
    ctx = hpml_ctx_create(&(hpml_ctx_desc){ .seed = (uint64_t)o.seed, .threads = (int32_t)o.threads });
    failed = train(ctx, &o);
    if (hpml_ctx_status(ctx) != HPML_OK) fprintf(stderr, "error: %s\n", hpml_ctx_error(ctx));
    hpml_ctx_free(ctx);
    return failed;
}
