/* Speed and memory of many models, on made-up data, which take as long as real data.
   bench_models list      prints "MODEL OPTIMIZER BATCH train|predict" for each row
   bench_models MODEL BATCH train|predict THREADS [CPU [profile]]
       measures one row and prints pairs of a name and a number: "params 11173962 hpml 30.2 gflops 120 ...", hpml in
       samples/s, mb the peak of resident memory above that of the idle program in MB
   bench_models growth    prints "case|unit|value|value of the smallest case|smallest value / value", by depth, batch, T
   TURN in the environment: the seconds that a measurement lasts, at least; 1 if it is not set. */
#include "../../hpml.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "peak.h"

#define RELU HPML_ACT_RELU
#define NONE HPML_ACT_NONE

// ---- the models, each recorded from its input to its output

static hpml_tensor *dense(hpml_tensor *x, int64_t out, hpml_act activation)
{
    hpml_linear_desc d = { .activation = activation };
    return hpml_linear(x, out, &d);
}

static hpml_tensor *mlp(hpml_tensor *x) { return dense(dense(dense(x, 512, RELU), 256, RELU), 10, NONE); }
static hpml_tensor *tabular(hpml_tensor *x) { return dense(dense(dense(x, 256, RELU), 256, RELU), 1, NONE); }

static hpml_tensor *deep(hpml_tensor *x, int layers)
{
    for (int i = 0; i < layers; i++) x = dense(x, 64, RELU);
    return x;
}

static hpml_tensor *deep16(hpml_tensor *x) { return deep(x, 16); }
static hpml_tensor *deep100(hpml_tensor *x) { return deep(x, 100); }
static hpml_tensor *deep1000(hpml_tensor *x) { return deep(x, 1000); }

/* Convolution with bias and relu; the image keeps its size, but for the stride. */
static hpml_tensor *conv(hpml_tensor *x, int64_t out, int32_t kernel, int32_t stride, int32_t dilation)
{
    hpml_conv2d_desc d = { .kernel_h = kernel, .stride_h = stride, .padding_h = dilation * (kernel / 2),
                           .dilation_h = dilation, .activation = RELU };
    return hpml_conv2d(x, out, &d);
}

/* Convolution without bias, then batchnorm with the activation. */
static hpml_tensor *normed(hpml_tensor *x, int64_t out, int32_t kernel, int32_t stride, int32_t groups, hpml_act act)
{
    hpml_conv2d_desc d = { .kernel_h = kernel, .stride_h = stride, .padding_h = kernel / 2, .groups = groups,
                           .no_bias = true };
    hpml_norm_desc   n = { .activation = act };
    return hpml_batchnorm(hpml_conv2d(x, out, &d), &n);
}

static hpml_tensor *pooled(hpml_tensor *x) { return hpml_max_pool2d(x, 2, 0, 0); }
static hpml_tensor *classes(hpml_tensor *x) { return dense(hpml_global_avg_pool2d(x), 10, NONE); }

static hpml_tensor *lenet(hpml_tensor *x)
{
    hpml_conv2d_desc d = { .kernel_h = 5, .activation = RELU };
    x = pooled(hpml_conv2d(pooled(hpml_conv2d(x, 20, &d)), 50, &d));
    return dense(dense(hpml_flatten(x), 500, RELU), 10, NONE);
}

static hpml_tensor *cifar(hpml_tensor *x)
{
    for (int64_t out = 32; out <= 128; out *= 2) x = pooled(normed(x, out, 3, 1, 1, RELU));
    return dense(hpml_flatten(x), 10, NONE);
}

static hpml_tensor *resnet18(hpml_tensor *x)
{
    x = normed(x, 64, 3, 1, 1, RELU);
    for (int i = 0; i < 8; i++) {
        int64_t      out      = 64 << i / 2;
        int32_t      stride   = i > 0 && i % 2 == 0 ? 2 : 1;
        hpml_tensor *shortcut = stride == 2 ? normed(x, out, 1, 2, 1, NONE) : x;
        x = normed(normed(x, out, 3, stride, 1, RELU), out, 3, 1, 1, NONE);
        x = hpml_relu(hpml_add(x, shortcut));
    }
    return classes(x);
}

/* A depthwise convolution for each channel, then a product over the channels of each pixel, seven times. */
static hpml_tensor *mobilenet(hpml_tensor *x)
{
    int64_t channels = 32;
    x = normed(x, channels, 3, 1, 1, RELU);
    for (int i = 0; i < 7; i++) {
        x = normed(x, channels, 3, i % 2 == 0 ? 1 : 2, (int32_t)channels, RELU);
        channels = 64 << (i + 1) / 2;
        x = normed(x, channels, 1, 1, 1, RELU);
    }
    return classes(x);
}

static hpml_tensor *vgg(hpml_tensor *x)
{
    x = conv(conv(conv(x, 32, 5, 1, 1), 64, 3, 2, 1), 64, 5, 1, 1);
    x = conv(conv(conv(x, 128, 3, 2, 1), 128, 3, 1, 1), 256, 3, 2, 1);
    return dense(dense(hpml_flatten(x), 256, RELU), 10, NONE);
}

static hpml_tensor *dilated(hpml_tensor *x)
{
    for (int32_t dilation = 1; dilation <= 8; dilation *= 2) x = conv(x, 64, 3, 1, dilation);
    return classes(x);
}

static hpml_tensor *grouped(hpml_tensor *x)
{
    x = normed(x, 128, 3, 1, 1, RELU);
    for (int32_t groups = 4; groups <= 32; groups *= 2) x = normed(x, 128, 3, 1, groups, RELU);
    return classes(x);
}

static hpml_tensor *block(hpml_tensor *x, int32_t heads) /* of a transformer: (B, T, C) -> (B, T, C) */
{
    int64_t             width = x ? x->shape[2] : 0;
    hpml_attention_desc d     = { .heads = heads };
    hpml_tensor        *a     = hpml_attention(dense(hpml_layernorm(x, NULL), 3 * width, NONE), &d);
    x = hpml_add(x, dense(a, width, NONE));
    a = dense(hpml_layernorm(x, NULL), 4 * width, HPML_ACT_GELU);
    return hpml_add(x, dense(a, width, NONE));
}

static hpml_tensor *block256(hpml_tensor *x) { return block(x, 4); }

/* A GPT for the 65 letters in Shakespeare's plays. */
static hpml_tensor *letters(hpml_tensor *x, int64_t width, int layers, int32_t heads)
{
    x = hpml_embedding(x, 65, width, NULL);
    for (int i = 0; i < layers; i++) x = block(x, heads);
    return dense(hpml_layernorm(x, NULL), 65, NONE);
}

static hpml_tensor *gpt4(hpml_tensor *x) { return letters(x, 128, 4, 4); }
static hpml_tensor *gpt6(hpml_tensor *x) { return letters(x, 384, 6, 6); }

static hpml_tensor *gpt2(hpml_tensor *x) /* of 124 M parameters */
{
    hpml_ctx           *ctx   = x ? x->ctx : NULL;
    hpml_embedding_desc table = { .name = "wte", .init_scale = 0.02f, .init = HPML_INIT_NORMAL };
    hpml_param_desc     place = { .name = "wpe", .ndim = 2, .shape = { 1024, 768 }, .init = HPML_INIT_NORMAL,
                                  .init_scale = 0.02f };
    hpml_linear_desc    head  = { .no_bias = true };
    int64_t             time  = x ? x->shape[1] : 0;
    x = hpml_embedding(x, 50257, 768, &table);
    x = hpml_add(x, hpml_slice(hpml_param_create(ctx, &place), 0, 0, time));
    for (int i = 0; i < 12; i++) x = block(x, 12);
    head.weight = hpml_param_find(ctx, "wte.weight");
    return hpml_linear(hpml_layernorm(x, NULL), 50257, &head);
}

static hpml_tensor *lstm(hpml_tensor *x)
{
    x = hpml_embedding(x, 65, 256, NULL);
    return dense(hpml_lstm(hpml_lstm(x, 256, NULL), 256, NULL), 65, NONE);
}

/* A recommender: 8 features of 100,000 possible values each choose a row of 32 numbers. */
static hpml_tensor *recommender(hpml_tensor *x, bool sparse)
{
    hpml_embedding_desc table = { .sparse = sparse };
    x = hpml_flatten(hpml_embedding(x, 100000, 32, &table));
    return dense(dense(x, 128, RELU), 1, NONE);
}

static hpml_tensor *rec_dense(hpml_tensor *x) { return recommender(x, false); }
static hpml_tensor *rec_sparse(hpml_tensor *x) { return recommender(x, true); }

// ---- the table: one row for each model

typedef struct model {
    const char  *name;
    hpml_tensor *(*record)(hpml_tensor *in);
    int64_t      shape[3];   /* of one sample: (C, H, W), (features), (T, features); of tokens (T) */
    int64_t      vocabulary; /* the input is tokens below this number; 0: it is floats */
    const char  *optimizer;  /* "momentum" is SGD with momentum 0.9 */
    hpml_loss    loss;
    bool         predict;    /* there is a row for the prediction of one sample */
    int64_t      batch[5];   /* rows for training with these batches */
} model;

#define CE  HPML_LOSS_CROSS_ENTROPY
#define BCE HPML_LOSS_BCE
#define MSE HPML_LOSS_MSE
static const model models[] = {
    { "mlp", mlp, { 784 }, 0, "momentum", CE, true, { 1, 8, 64, 512, 4096 } },
    { "lenet", lenet, { 1, 28, 28 }, 0, "momentum", CE, true, { 64 } },
    { "cifar", cifar, { 3, 32, 32 }, 0, "momentum", CE, true, { 64 } },
    { "gpt4", gpt4, { 64 }, 65, "momentum", CE, true, { 16 } },
    { "resnet18", resnet18, { 3, 32, 32 }, 0, "momentum", CE, true, { 32 } },
    { "mobilenet", mobilenet, { 3, 32, 32 }, 0, "momentum", CE, true, { 32 } },
    { "vgg", vgg, { 3, 64, 64 }, 0, "momentum", CE, true, { 32 } },
    { "dilated", dilated, { 3, 32, 32 }, 0, "momentum", CE, true, { 32 } },
    { "grouped", grouped, { 3, 32, 32 }, 0, "momentum", CE, true, { 32 } },
    { "lstm", lstm, { 64 }, 65, "momentum", CE, true, { 32 } },
    { "gpt6", gpt6, { 256 }, 65, "momentum", CE, true, { 4 } },
    { "gpt2", gpt2, { 256 }, 50257, "adamw", CE, true, { 1 } },
    { "rec-adam", rec_dense, { 8 }, 100000, "adam", BCE, false, { 256 } },
    { "rec-sgd", rec_dense, { 8 }, 100000, "sgd", BCE, false, { 256 } },
    { "rec-sparse-adam", rec_sparse, { 8 }, 100000, "adam", BCE, false, { 256 } },
    { "rec-sparse-sgd", rec_sparse, { 8 }, 100000, "sgd", BCE, false, { 256 } },
    { "tabular", tabular, { 64 }, 0, "adam", MSE, false, { 32, 1024 } },
    /* for growth alone: no rows */
    { "deep16", deep16, { 64 }, 0, "momentum", CE, false, { 0 } },
    { "deep100", deep100, { 64 }, 0, "momentum", CE, false, { 0 } },
    { "deep1000", deep1000, { 64 }, 0, "momentum", CE, false, { 0 } },
    { "block512", block256, { 512, 256 }, 0, "momentum", MSE, false, { 0 } },
    { "block1024", block256, { 1024, 256 }, 0, "momentum", MSE, false, { 0 } },
    { "block2048", block256, { 2048, 256 }, 0, "momentum", MSE, false, { 0 } },
    { "block4096", block256, { 4096, 256 }, 0, "momentum", MSE, false, { 0 } },
};
#define MODELS ((int)(sizeof models / sizeof *models))

static void list(void)
{
    for (const model *m = models; m < models + MODELS; m++) {
        for (int i = 0; i < 5 && m->batch[i]; i++)
            printf("%s %s %d train\n", m->name, m->optimizer, (int)m->batch[i]);
        if (m->predict) printf("%s %s 1 predict\n", m->name, m->optimizer);
    }
}

// ---- one row: a model with its data, in a context of its own

typedef struct row {
    const model  *m;
    int64_t       batch;
    hpml_ctx     *ctx;
    hpml_tensor  *in, *out;
    hpml_trainer *t; /* NULL: prediction */
    hpml_graph   *g;
    void         *x, *y;
} row;

/* Fills `count` numbers of 4 bytes: tokens below `below`, or with 0 floats from 0 to 1. */
static void *numbers(int64_t count, int64_t below)
{
    int32_t *integers = (int32_t *)malloc((size_t)count * 4);
    float   *floats   = (float *)integers;
    for (int64_t i = 0; integers && i < count; i++) {
        if (below) integers[i] = (int32_t)(i * 7919 % below);
        else floats[i] = (float)(i * 37 % 11) / 11;
    }
    return integers;
}

static void record(row *r, const char *name, int64_t batch, int threads, const char *cpu)
{
    int64_t       shape[4] = { batch, 0, 0, 0 };
    int           ndim = 1;
    hpml_ctx_desc d = { .threads = threads, .cpu = cpu };
    memset(r, 0, sizeof *r);
    r->ctx   = hpml_ctx_create(&d);
    r->batch = batch;
    for (const model *m = models; m < models + MODELS; m++)
        if (strcmp(m->name, name) == 0) r->m = m;
    if (!r->m) {
        hpml_ctx_fail(r->ctx, HPML_ERR_ARGUMENT, "no model \"%s\"", name);
        return;
    }
    for (; ndim <= 3 && r->m->shape[ndim - 1]; ndim++) shape[ndim] = r->m->shape[ndim - 1];
    r->in  = hpml_input(r->ctx, r->m->vocabulary ? HPML_DTYPE_I32 : HPML_DTYPE_F32, ndim, shape);
    r->out = r->in ? r->m->record(r->in) : NULL;
    if (!r->out) return;
    r->x = numbers(hpml_tensor_count(r->in), r->m->vocabulary);
    if (r->m->loss == CE) {
        int64_t count = r->out->shape[r->out->ndim - 1];
        r->y = numbers(hpml_tensor_count(r->out) / count, count);
    } else
        r->y = numbers(hpml_tensor_count(r->out), 0);
}

static hpml_trainer_desc settings(const row *r)
{
    bool              momentum = strcmp(r->m->optimizer, "momentum") == 0;
    hpml_trainer_desc d        = { .input = r->in, .output = r->out, .loss = r->m->loss, .lr = 1e-4f };
    d.optimizer = momentum ? HPML_OPT_SGD : hpml_optimizer_find(r->m->optimizer)->opt;
    if (momentum) d.momentum = 0.9f;
    return d;
}

static void plan(row *r, bool predict)
{
    hpml_trainer_desc d;
    hpml_graph_desc   g = { .output_count = 1, .outputs = &r->out, .predict = predict };
    if (!r->out) return;
    d    = settings(r);
    r->t = predict ? NULL : hpml_trainer_create(r->ctx, &d);
    r->g = predict ? hpml_graph_create(r->ctx, &g) : hpml_trainer_graph(r->t);
    if (predict) hpml_graph_alloc(r->g);
}

static void step(row *r)
{
    if (r->t) {
        hpml_trainer_step(r->t, r->x, r->y, r->batch, NULL);
        return;
    }
    hpml_tensor_set_raw(r->in, r->x, (size_t)hpml_tensor_count(r->in) * 4);
    hpml_graph_forward(r->g, false, 0);
}

/* Steps a second, for at least this long. */
static double rate(row *r, double seconds)
{
    double start = hpml_now(), now = start;
    int    steps = 0;
    for (; (steps == 0 || now - start < seconds) && hpml_ctx_status(r->ctx) == HPML_OK; steps++) {
        step(r);
        now = hpml_now();
    }
    return steps / (now - start);
}

static int finish(row *r)
{
    bool failed = hpml_ctx_status(r->ctx) != HPML_OK;
    if (failed) fprintf(stderr, "%s\n", hpml_ctx_error(r->ctx));
    hpml_ctx_free(r->ctx);
    free(r->x);
    free(r->y);
    return failed;
}

/* A line of /proc/self/status in MB: VmRSS is the resident memory, VmHWM its peak. 0 where there is no such file. */
static double resident(const char *line)
{
    char   text[256];
    double kb   = 0;
    FILE  *file = fopen("/proc/self/status", "r");
    while (file && fgets(text, sizeof text, file))
        if (strncmp(text, line, strlen(line)) == 0) kb = atof(text + strlen(line) + 1);
    if (file) fclose(file);
    return kb / 1024;
}

static int measure(int argc, char **argv, double seconds)
{
    double      born = hpml_now(), idle = resident("VmRSS"), peak = 0, first, speed, gflops;
    bool        predict = strcmp(argv[3], "predict") == 0;
    const char *cpu = argc > 5 && argv[5][0] ? argv[5] : NULL;
    char        text[8192];
    row         r;
    record(&r, argv[1], atoll(argv[2]), atoi(argv[4]), cpu);
    plan(&r, predict);
    step(&r);
    first = hpml_now() - born;
    rate(&r, seconds / 2);
    speed  = rate(&r, seconds);
    gflops = 1e-9 * speed * (hpml_graph_flops(r.g, false) + (predict ? 0 : hpml_graph_flops(r.g, true)));
    for (int i = 0; i < 20; i++) peak = fmax(peak, peak_gflops(hpml_ctx_cpu(r.ctx)) * hpml_ctx_threads(r.ctx));
    if (hpml_ctx_status(r.ctx) == HPML_OK)
        printf("params %lld hpml %.6g gflops %.4g of_peak %.3f first_step_ms %.1f mb %.1f\n",
               (long long)hpml_param_total(r.ctx), speed * (double)r.batch, gflops, peak > 0 ? gflops / peak : 0,
               1e3 * first, resident("VmHWM") - idle);
    if (argc > 6) {
        hpml_profile_enable(r.g, true);
        for (int i = 0; i < 30; i++) step(&r);
        hpml_profile_text(r.g, text, sizeof text);
        fputs(text, stderr);
    }
    return finish(&r);
}

// ---- growth: what a unit of work costs as the model, the batch or the sequence grows

typedef struct growing {
    const char *what, *of; /* what is counted, and of what: "16 layers" */
    struct { const char *model; int64_t batch, size; double units; } cases[4]; /* size: as printed; units: in a step */
} growing;

static const growing speeds[] = {
    { "a sample and layer", "layers of 64",
      { { "deep16", 32, 16, 32 * 16 }, { "deep100", 32, 100, 32 * 100 }, { "deep1000", 32, 1000, 32 * 1000 } } },
    { "a sample", "samples a batch, MLP",
      { { "mlp", 64, 64, 64 }, { "mlp", 256, 256, 256 }, { "mlp", 1024, 1024, 1024 }, { "mlp", 4096, 4096, 4096 } } },
};
static const growing attention = { "a token", "tokens, block of 256",
    { { "block512", 1, 512, 512 }, { "block1024", 1, 1024, 1024 }, { "block2048", 1, 2048, 2048 },
      { "block4096", 1, 4096, 4096 } } };

static void put(const growing *w, const char *unit, const double *cost)
{
    for (int i = 1; i < 4 && w->cases[i].model; i++)
        printf("%s: %d %s|%s|%.5g|%.5g|%.3f\n", w->what, (int)w->cases[i].size, w->of, unit, cost[i], cost[0],
               cost[0] / cost[i]);
}

static int by_size(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Microseconds of a unit of work on one thread: the cases take turns, the median of their rounds counts. */
static int grow_in_time(const growing *w, double seconds)
{
    enum { ROUNDS = 7 };
    row    r[4];
    double took[4][ROUNDS], cost[4] = { 0 };
    int    n = 0, failed = 0;
    for (; n < 4 && w->cases[n].model; n++) {
        record(&r[n], w->cases[n].model, w->cases[n].batch, 1, NULL);
        plan(&r[n], false);
        rate(&r[n], seconds / 4);
    }
    for (int round = 0; round < ROUNDS; round++)
        for (int i = 0; i < n; i++) took[i][round] = 1e6 / rate(&r[i], seconds / 4) / w->cases[i].units;
    for (int i = 0; i < n; i++) {
        qsort(took[i], ROUNDS, sizeof(double), by_size);
        cost[i] = took[i][ROUNDS / 2];
        failed |= finish(&r[i]);
    }
    if (!failed) put(w, "us", cost);
    return failed;
}

/* Bytes of a unit of work, by the plan: what is kept from forward to backward, and scratch. */
static int grow_in_memory(const growing *w)
{
    double cost[4] = { 0 };
    int    failed  = 0;
    for (int i = 0; i < 4 && w->cases[i].model; i++) {
        hpml_trainer_desc d;
        hpml_memory       need = { 0 };
        row               r;
        record(&r, w->cases[i].model, w->cases[i].batch, 1, NULL);
        d = settings(&r);
        hpml_trainer_memory(r.ctx, &d, &need);
        cost[i] = (double)(need.activations + need.scratch) / w->cases[i].units;
        failed |= finish(&r);
    }
    if (!failed) put(w, "bytes", cost);
    return failed;
}

int main(int argc, char **argv)
{
    double seconds = getenv("TURN") ? atof(getenv("TURN")) : 1;
    if (argc == 2 && strcmp(argv[1], "growth") == 0)
        return grow_in_time(&speeds[0], seconds) | grow_in_time(&speeds[1], seconds) | grow_in_memory(&attention);
    if (argc >= 5) return measure(argc, argv, seconds);
    list();
    return 0;
}
