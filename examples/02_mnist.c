/* What you learn: a whole training: data, model, trainer, progress, evaluation, checkpoint, timeline. Difficulty 2 of 4.
   cc -O2 examples/02_mnist.c -o mnist -lm -lpthread && ./mnist          (with -DHPML_USE_ZLIB -lz: reads .gz)
   prints a progress line, a confusion matrix, some misread digits and the accuracy on digits it has not seen.
   The digits are drawn by digits.h; --data DIR takes MNIST's IDX files instead (only the t10k pair: its last 2,000 test). */
#define HPML_IMPLEMENTATION
#include "../hpml.h"
#include "mnist.h"
#include "report.h"

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
    t = hpml_trainer_create(ctx, &(hpml_trainer_desc){
        .input = x, .output = record_model(o->model, x), .lr = (float)o->lr, .momentum = 0.9f,
        .schedule = { .kind = HPML_SCHEDULE_COSINE, .total_steps = o->epochs * ((data->count + o->batch - 1) / o->batch) } });
    if (!t) return 1;
    attach_codec(ctx, t, &w, o->codec);
    if (o->load && hpml_checkpoint_load(t, o->load) != HPML_OK) return 1;
    printf("%s, %lld parameters, %lld training digits, batch %lld, %s kernels, %d threads\n", o->model, (long long)hpml_param_total(ctx),
           (long long)data->count, (long long)o->batch, hpml_ctx_cpu(ctx), hpml_ctx_threads(ctx));
    hpml_trace_start(ctx, &(hpml_trace_desc){ .first_step = 10, .last_step = 30 });
    start = hpml_now();
    for (int64_t e = hpml_trainer_step_count(t) * o->batch / data->count; e < o->stop; e++)
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
    options   o = { .model = "cnn", .codec = "onebit", .samples = 12000, .batch = 64, .workers = 1, .seed = 1, .lr = 0.05 };
    int       failed = parse(&o, argc, argv);
    hpml_ctx *ctx;
    if (failed) return failed == 1 ? 0 : failed;
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
