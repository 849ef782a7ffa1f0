/* Memory that is taken late, and shards: what each rank keeps of the optimizer's state, of gradients and of values, the
   bits of training, the elements moved, the bytes held, checkpoints and refusals. */
#include "../hpml_comm.h"
#include "split_model.h"
#include "test.h"
#include "toy_points.h"

enum { BATCH = 6, NARROW = 24, WIDE = 192, MOST = 4 };

/* Records an MLP with a normalization and returns its trainer. odd: the normalization is batchnorm, an op reads one
   parameter twice, and two ops read another one. */
static hpml_trainer *model_of(hpml_ctx *ctx, const hpml_trainer_desc *settings, int width, bool odd,
                              hpml_tensor **input)
{
    const hpml_linear_desc relu = { .activation = HPML_ACT_RELU };
    hpml_trainer_desc      d = *settings;
    d.input  = hpml_input_2d(ctx, BATCH, INPUTS);
    d.output = d.input;
    for (int l = 0; l < 3; l++) d.output = hpml_linear(d.output, width + l, &relu);
    if (odd) {
        hpml_tensor *w = hpml_param_create(ctx, &(hpml_param_desc){ .name = "squared", .ndim = 2,
                                                                    .shape = { width + 2, width + 2 },
                                                                    .init = HPML_INIT_NORMAL });
        d.output = hpml_linear(d.output, width + 2, &(hpml_linear_desc){ .weight = w });
        d.output = hpml_matmul(d.output, hpml_mul(w, w), false, false);
        d.output = hpml_batchnorm(d.output, NULL);
    }
    d.output = hpml_linear(odd ? d.output : hpml_layernorm(d.output, NULL), CLASSES, NULL);
    if (input) *input = d.input;
    return hpml_trainer_create(ctx, &d);
}

static hpml_trainer *model(hpml_ctx *ctx, const hpml_trainer_desc *settings, int width, hpml_tensor **input)
{
    return model_of(ctx, settings, width, false, input);
}

// ---------------------------------------------------------------------------------------------------------------------
// memory that is taken late
// ---------------------------------------------------------------------------------------------------------------------
/* Trains for two epochs, with memory taken late or not; returns the hash of the parameters, 0 after an error. */
static uint64_t train_serially(bool late, hpml_memory *planned, size_t *before, size_t *after)
{
    const hpml_trainer_desc settings = { .optimizer = HPML_OPT_ADAMW, .weight_decay = 0.01f, .clip_norm = 1 };
    hpml_ctx *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .seed = 3, .threads = 1 });
    hpml_ctx_defer(ctx, late);
    hpml_trainer *t = model(ctx, &settings, NARROW, NULL);
    *before = hpml_ctx_bytes(ctx);
    hpml_graph_memory(hpml_trainer_graph(t), planned);
    hpml_trainer_alloc(t);
    *after = hpml_ctx_bytes(ctx);
    hpml_trainer_fit(t, points(ctx, 50, 0, 0, 0), &(hpml_fit_desc){ .epochs = 2 });
    uint64_t hash = hpml_ctx_status(ctx) == HPML_OK ? hpml_param_hash(ctx) : 0;
    hpml_ctx_free(ctx);
    return hash;
}

TEST(memory_taken_late_trains_to_the_same_bits)
{
    hpml_memory planned[2];
    size_t      before[2], after[2];
    uint64_t    hash[2];
    for (int late = 0; late < 2; late++) hash[late] = train_serially(late, &planned[late], &before[late], &after[late]);
    ENSURE(hash[0] == hash[1] && hash[0] != 0);
    ENSURE(memcmp(&planned[0], &planned[1], sizeof planned[0]) == 0);
    ENSURE(before[0] == after[0] && after[0] == after[1]);
    ENSURE(after[1] - before[1] >= planned[1].total && after[1] - before[1] < planned[1].total + 8192);
}

/* Each of the calls that need memory takes the memory that hpml_trainer_create has left for later. */
TEST(each_use_of_a_trainer_takes_its_memory)
{
    for (int use = 0; use < 7; use++) {
        float     x[BATCH * INPUTS] = { 0 }, out[BATCH * CLASSES];
        int32_t   y[BATCH] = { 0 };
        hpml_ctx *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .seed = 3, .threads = 1 });
        hpml_ctx_defer(ctx, true);
        hpml_tensor  *input;
        hpml_trainer *t = model(ctx, &(hpml_trainer_desc){ 0 }, NARROW, &input);
        hpml_metrics  metrics = { 0 };
        ENSURE(t && !input->data && hpml_trainer_place(t, 0) == 0 && hpml_trainer_place(t, 1) > 0);
        switch (use) {
        case 0: hpml_trainer_step(t, x, y, BATCH, NULL); break;
        case 1: hpml_trainer_evaluate(t, points(ctx, 5, 0, 0, 0), &metrics); break;
        case 2: hpml_trainer_predict(t, x, BATCH, out); break;
        case 3: hpml_checkpoint_save(t, "build/shard_late.safetensors"); break;
        case 4: hpml_checkpoint_load(t, "build/shard_late.safetensors"); break;
        case 5: ENSURE(hpml_trainer_array(t, HPML_ARRAY_GRADIENTS, NULL) != NULL); break;
        case 6: hpml_trainer_apply_range(t, 0, 1, 1); break;
        }
        ENSURE(hpml_ctx_status(ctx) == HPML_OK && input->data != NULL);
        hpml_ctx_free(ctx);
    }
    remove("build/shard_late.safetensors");
}


// ---------------------------------------------------------------------------------------------------------------------
// shards
// ---------------------------------------------------------------------------------------------------------------------
/* A training on several ranks, and what came of it. */
typedef struct job {
    const char       *plan;
    hpml_trainer_desc settings;
    int               ranks, steps;
    int               width;         /* of the layers; 0: NARROW */
    bool              slow;          /* the network is, so that exchanges run in the background */
    bool              odd;           /* the model is that of `odd` in model_of */
    bool              ragged;        /* in odd steps rank r has r samples less than others, the last rank none */
    bool              by_hand;       /* each micro-batch is added up over ranks by hooks of this test, not by a plan */
    float            *weights;       /* (weight_count) of rank 0; the caller frees them */
    int64_t           weight_count;  /* all floats of the parameters */
    int64_t           padded;        /* all floats with padding */
    double            loss;
    hpml_memory       memory[MOST];  /* planned, of each rank */
    int64_t           held[MOST];    /* bytes of the trainer's arrays, by the allocator */
    int64_t           bytes;         /* sent by all ranks in all steps */
    int64_t           small;         /* sent by all ranks for the sums of loss and samples of a step */
    char              error[700];
} job;

/* Fills in a batch of rank `rank` in step `step`. */
static void batch_of(int step, int rank, float *x, int32_t *y)
{
    hpml_rng r = { .seed = 77 + (uint64_t)(step * 64 + rank) };
    hpml_rng_fill_normal(&r, x, BATCH * INPUTS);
    for (int i = 0; i < BATCH; i++) y[i] = (int32_t)(fabsf(x[i * INPUTS]) * 3) % CLASSES;
}

/* Returns the floats of all parameters and running statistics. */
static int64_t total(hpml_ctx *ctx)
{
    int64_t floats = 0;
    for (int i = 0; i < hpml_param_count(ctx); i++) floats += hpml_tensor_count(hpml_param_at(ctx, i));
    return floats;
}

/* Returns the values of all parameters, joined of all ranks' parts; the caller frees them. */
static float *wholes(hpml_trainer *t)
{
    hpml_ctx *ctx = hpml_trainer_settings(t)->input->ctx;
    float    *all = (float *)malloc(sizeof(float) * (size_t)total(ctx));
    for (int64_t i = 0, at = 0; i < hpml_param_count(ctx); i++) {
        hpml_trainer_collect(t, (int)i, HPML_ARRAY_VALUES, all + at);
        at += hpml_tensor_count(hpml_param_at(ctx, (int)i));
    }
    return all;
}

/* The floats of the parameters, padded as the trainer's arrays are. */
static int64_t padded(hpml_ctx *ctx)
{
    int64_t floats = 0;
    for (int i = 0; i < hpml_param_count(ctx); i++)
        floats += (hpml_tensor_count(hpml_param_at(ctx, i)) + HPML_GRADIENT_ALIGN - 1) / HPML_GRADIENT_ALIGN;
    return HPML_GRADIENT_ALIGN * floats;
}

/* Steps in which the gradient of each micro-batch is added up over ranks by a ring, before it is added to the sum. */
typedef struct by_hand { hpml_comm *c; float *sum; } by_hand;

static hpml_status by_hand_run(void *user, hpml_trainer *t, const hpml_moment *at, int64_t samples, float *loss)
{
    by_hand    *own = (by_hand *)user;
    int64_t     floats;
    hpml_status status = hpml_trainer_forward_backward(t, 0, samples, 1.0f / (float)at->batches, false, loss);
    float      *g = hpml_trainer_array(t, HPML_ARRAY_GRADIENTS, &floats);
    hpml_allreduce(own->c, g, floats, &(hpml_allreduce_desc){ .algorithm = HPML_RING, .reduce = HPML_MEAN });
    if (!own->sum) own->sum = (float *)calloc((size_t)floats, sizeof(float));
    for (int64_t i = 0; i < floats; i++) own->sum[i] = at->batch == 0 ? g[i] : own->sum[i] + g[i];
    return status;
}

static hpml_status by_hand_update(void *user, hpml_trainer *t, const hpml_moment *at)
{
    int64_t floats;
    float  *g = hpml_trainer_array(t, HPML_ARRAY_GRADIENTS, &floats);
    memcpy(g, ((by_hand *)user)->sum, sizeof(float) * (size_t)floats);
    return at->batch < 0 ? HPML_ERR_STATE : hpml_trainer_update_inner(t);
}

static void by_hand_free(void *user) { free(((by_hand *)user)->sum); }

static hpml_status run(hpml_comm *c, void *user)
{
    job      *j   = (job *)user;
    hpml_ctx *ctx = hpml_comm_ctx(c);
    float     x[BATCH * INPUTS];
    int32_t   y[BATCH];
    const int rank = hpml_comm_rank(c);
    hpml_step_info info = { 0 };
    hpml_counters  before, after;
    hpml_ctx_defer(ctx, true);
    hpml_trainer *t = model_of(ctx, &j->settings, j->width ? j->width : NARROW, j->odd, NULL);
    const size_t  without = hpml_ctx_bytes(ctx);
    by_hand           own = { c, NULL };
    const hpml_hooks  hooks = { .user = &own, .run = by_hand_run, .update = by_hand_update, .free = by_hand_free };
    hpml_distributed *d = j->by_hand ? NULL : hpml_distribute(t, c, NULL);
    if (j->by_hand) hpml_trainer_attach(t, &hooks);
    if (hpml_ctx_status(ctx) != HPML_OK) return hpml_ctx_status(ctx);
    hpml_graph_memory(hpml_trainer_graph(t), &j->memory[rank]);
    j->held[rank] = (int64_t)(hpml_ctx_bytes(ctx) - without);
    hpml_comm_counters(c, &before);
    for (int s = 0; s < j->steps && hpml_ctx_status(ctx) == HPML_OK; s++) {
        int samples = j->ragged && s % 2 ? BATCH - rank : BATCH;
        if (j->ragged && s % 2 && rank == j->ranks - 1) samples = 0;
        batch_of(s, rank, x, y);
        hpml_trainer_step(t, x, y, samples, &info);
    }
    hpml_comm_counters(c, &after);
    double  stats[4] = { 0 };
    int64_t sent[2] = { after.bytes - before.bytes, 0 };
    hpml_allreduce(c, stats, 4, &(hpml_allreduce_desc){ .element = HPML_ELEMENT_F64 });
    hpml_comm_counters(c, &before);
    sent[1] = before.bytes - after.bytes;
    hpml_allreduce(c, sent, 2, &(hpml_allreduce_desc){ .element = HPML_ELEMENT_I64 });
    float *weights = wholes(t);
    hpml_trainer_detach(t, &own);
    if (rank > 0) {
        free(weights);
        return hpml_ctx_status(ctx);
    }
    hpml_distribute_report report = { 0 };
    if (d) hpml_distribute_get(d, &report, false);
    j->weight_count = total(ctx);
    j->padded = padded(ctx);
    j->bytes = sent[0];
    j->small = sent[1];
    j->loss  = report.loss;
    j->weights = weights;
    return hpml_ctx_status(ctx);
}

static hpml_status launch(job *j)
{
    hpml_plan              plan = { 0 };
    const hpml_launch_desc d = { .ranks = j->ranks, .timeout = 20, .plan = &plan, .ctx.threads = 1,
                                 .network.inside.latency = j->slow ? 1e-4 : 0,
                                 .transport = j->slow ? HPML_TRANSPORT_CLOCK : HPML_TRANSPORT_THREADS };
    if (hpml_plan_parse(j->plan, &plan, j->error, sizeof j->error) != HPML_OK) return HPML_ERR_ARGUMENT;
    return hpml_launch(&d, run, j, j->error, sizeof j->error);
}

static const hpml_trainer_desc optimizers[] = {
    { .optimizer = HPML_OPT_SGD, .lr = 0.05f },
    { .optimizer = HPML_OPT_SGD, .lr = 0.05f, .momentum = 0.9f, .nesterov = true, .weight_decay = 0.01f },
    { .optimizer = HPML_OPT_ADAM, .lr = 0.01f },
    { .optimizer = HPML_OPT_ADAMW, .lr = 0.01f, .weight_decay = 0.05f },
};
enum { OPTIMIZERS = sizeof optimizers / sizeof *optimizers, SHARDS = 3 };

/* Without norms a step with shards has the bits of a step without. P floats in N ranks: gradients move P (N - 1) floats
   in all to their blocks, values as many from their blocks. */
TEST(shards_train_to_the_bits_of_whole_arrays)
{
    for (int o = 0; o < OPTIMIZERS; o++)
        for (int ranks = 1; ranks <= MOST; ranks += ranks < 2 ? 1 : 2) {
            job all = { .settings = optimizers[o], .ranks = ranks, .steps = 12,
                        .plan = "algorithm=ring,bucket_bytes=4000" };
            if (launch(&all) != HPML_OK) printf("    %s\n", all.error);
            for (int shard = 1; shard <= SHARDS; shard++) {
                char plan[80];
                job  j = all;
                snprintf(plan, sizeof plan, "%s,shard=%d", all.plan, shard);
                j.plan = plan;
                hpml_status status = launch(&j);
                if (status != HPML_OK) printf("    %s\n", j.error);
                ENSURE(status == HPML_OK && j.loss == all.loss);
                ENSURE(memcmp(j.weights, all.weights, sizeof(float) * (size_t)all.weight_count) == 0);
                if (shard < 3) ENSURE(j.bytes == j.steps * (2 * (ranks - 1) * 4 * j.padded + j.small));
                free(j.weights);
            }
            free(all.weights);
        }
}

/* In virtual time: buckets are exchanged in the background, stepped within the backward pass, the next values gathered
   while an op runs; also with unequal numbers of samples, running statistics, and parameters that are read twice. */
TEST(shards_in_the_background_train_to_the_same_bits)
{
    for (int kind = 0; kind < 4; kind++) {
        job all = { .settings = optimizers[2], .ranks = 3, .steps = 6, .ragged = kind == 1, .odd = kind > 1,
                    .plan = kind < 3 ? "algorithm=ring,bucket_bytes=2000" : "algorithm=ring,bucket_bytes=1" };
        ENSURE(launch(&all) == HPML_OK);
        for (int shard = 0; shard <= SHARDS; shard++) {
            char plan[80];
            job  j = all;
            snprintf(plan, sizeof plan, "%s,shard=%d", all.plan, shard);
            j.plan = plan;
            j.slow = true;
            if (launch(&j) != HPML_OK) printf("    %s\n", j.error);
            ENSURE(j.loss == all.loss);
            ENSURE(memcmp(j.weights, all.weights, sizeof(float) * (size_t)all.weight_count) == 0);
            free(j.weights);
        }
        free(all.weights);
    }
}

/* The largest difference of two runs' weights, relative to the largest weight. */
static double weights_differ(const job *a, const job *b)
{
    double most = 0, largest = 0;
    for (int64_t i = 0; i < a->weight_count; i++) {
        most    = fmax(most, fabs((double)a->weights[i] - (double)b->weights[i]));
        largest = fmax(largest, fabs((double)a->weights[i]));
    }
    return most / largest;
}

/* Floats that values_are_gathered_twice_but_for_those_at_hand does not gather again: of the last three tensors. */
static int64_t reused(void)
{
    const int64_t shift = (NARROW + 2 + 15) / 16 * 16, weight = ((NARROW + 2) * CLASSES + 15) / 16 * 16, bias = 16;
    return shift + weight + bias;
}

/* With .accumulate the gradients of each of m micro-batches are exchanged, with shard 3 values gathered, too. So the
   sum over ranks comes before that over micro-batches: the bits are those of ranks that do so with whole arrays. */
TEST(micro_batches_are_added_up_over_ranks_one_by_one)
{
    enum { MICRO = 3, UPDATES = 4 };
    for (int o = 0; o < OPTIMIZERS; o += 2)
        for (int slow = 0; slow < 2; slow++) {
            job by = { .settings = optimizers[o], .ranks = 3, .steps = MICRO * UPDATES, .by_hand = true, .plan = "" };
            by.settings.accumulate = MICRO;
            job whole = by, j = by;
            whole.by_hand = j.by_hand = false;
            whole.plan = "algorithm=ring";
            ENSURE(launch(&by) == HPML_OK && launch(&whole) == HPML_OK);
            j.slow = slow > 0;
            for (int shard = 1; shard <= SHARDS; shard++)
                for (int size = 0; size < 2; size++) {
                    char plan[80];
                    snprintf(plan, sizeof plan, "bucket_bytes=%d,shard=%d", size ? 1 : 1 << 20, shard);
                    j.plan = plan;
                    ENSURE(launch(&j) == HPML_OK);
                    const job *like = shard > 1 ? &by : &whole;
                    ENSURE(size || memcmp(j.weights, like->weights, sizeof(float) * (size_t)j.weight_count) == 0);
                    ENSURE_NEAR(weights_differ(&j, &whole), 0, o == 0 ? 1e-6 : 1e-4);
                    const int64_t moved[] = { 2 * j.padded, (MICRO + 1) * j.padded, MICRO * (3 * j.padded - reused()) };
                    if (size) ENSURE(j.bytes == UPDATES * (moved[shard - 1] * 2 * 4 + j.small));
                    free(j.weights);
                }
            free(by.weights);
            free(whole.weights);
        }
}

/* With shard 2 and 3 no_overlap makes each exchange at once: the same bits, nothing in the background. */
TEST(shards_without_overlap_train_to_the_same_bits)
{
    for (int shard = 1; shard <= SHARDS; shard++)
        for (int micro = 1; micro < 3; micro++) {
            char plan[80];
            job  during = { .settings = optimizers[3], .ranks = 3, .steps = 4, .slow = true, .plan = plan }, after;
            during.settings.accumulate = micro;
            after = during;
            snprintf(plan, sizeof plan, "bucket_bytes=2000,shard=%d", shard);
            ENSURE(launch(&during) == HPML_OK);
            snprintf(plan, sizeof plan, "bucket_bytes=2000,no_overlap=1,shard=%d", shard);
            ENSURE(launch(&after) == HPML_OK);
            ENSURE(during.bytes == after.bytes && during.loss == after.loss);
            ENSURE(memcmp(during.weights, after.weights, sizeof(float) * (size_t)after.weight_count) == 0);
            free(during.weights);
            free(after.weights);
        }
}

/* Ops that run again in the backward pass need values, but no memory for gradients. */
TEST(shards_of_recomputed_models_train_to_the_same_bits)
{
    job all = { .settings = optimizers[2], .ranks = 2, .steps = 3, .plan = "algorithm=ring,bucket_bytes=1" };
    ENSURE(launch(&all) == HPML_OK);
    for (int shard = 1; shard <= SHARDS; shard++)
        for (int slow = 0; slow < 2; slow++) {
            char plan[80];
            job  j = all;
            snprintf(plan, sizeof plan, "%s,recompute=1,shard=%d", all.plan, shard);
            j.plan = plan;
            j.slow = slow > 0;
            if (launch(&j) != HPML_OK) printf("    %s: %s\n", plan, j.error);
            ENSURE(j.weights && memcmp(j.weights, all.weights, sizeof(float) * (size_t)all.weight_count) == 0);
            free(j.weights);
        }
    free(all.weights);
}

/* With each tensor in a bucket of its own the slots of shard 3 hold three tensors, as an op reads two at most: the
   last three of the forward pass are not gathered again for the backward pass. */
TEST(values_are_gathered_twice_but_for_those_at_hand)
{
    for (int ranks = 2; ranks <= MOST; ranks++) {
        job j = { .settings = optimizers[3], .ranks = ranks, .steps = 5, .plan = "shard=3,bucket_bytes=1",
                  .slow = ranks == 3 };
        ENSURE(launch(&j) == HPML_OK);
        ENSURE(j.bytes == j.steps * ((3 * j.padded - reused()) * (ranks - 1) * 4 + j.small));
        free(j.weights);
    }
}

/* Layers in virtual time: one takes LAYER_S seconds forward, as long as the gather of its values, and twice that
   backward. */
enum { LAYERS = 8, SIDE = 64, DEEP_RANKS = 4, DEEP_STEPS = 4 };
#define LAYER_S 1.0
typedef struct deep {
    const char *plan;
    double      step_s, exposed_s;  /* of a step, by the clock and by the report */
    double      busy_s, hidden_s;   /* by the timeline: of exchanges, and of these while rank 0 computes */
    uint64_t    hash;
} deep;

static hpml_status layer_takes(void *user, hpml_trainer *t, const hpml_moment *at)
{
    const hpml_tensor *p = hpml_param_at(hpml_trainer_settings(t)->input->ctx, at->param);
    if (p->ndim == 2) hpml_comm_compute((hpml_comm *)user, at->pass == HPML_PASS_BACKWARD ? 2 * LAYER_S : LAYER_S);
    return HPML_OK;
}

/* Reads the timeline of rank 0: seconds of spans in the lane of communication, and of these within computing spans. */
static void read_timeline(const char *path, deep *j)
{
    enum { SPANS = 4096 };
    char    line[512], name[64];
    double *span = (double *)malloc(sizeof(double) * 3 * SPANS); /* (count) lane, start, seconds */
    FILE   *f = fopen(path, "r");
    int     count = 0, lane;
    while (f && count < SPANS && fgets(line, sizeof line, f)) {
        double     *s = span + 3 * count;
        const char *as = "{\"name\":\"%63[^\"]\",\"ph\":\"X\",\"pid\":0,\"tid\":%d,\"ts\":%lf,\"dur\":%lf";
        int         n = sscanf(line, as, name, &lane, s + 1, s + 2);
        s[0] = lane;
        count += n == 4 && (lane == HPML_LANE_COMM || strcmp(name, "compute") == 0);
    }
    if (f) fclose(f);
    for (double *a = span; a < span + 3 * count; a += 3) {
        if (a[0] != HPML_LANE_COMM) continue;
        j->busy_s += a[2] / 1e6;
        for (double *b = span; b < span + 3 * count; b += 3) {
            const double both = fmin(a[1] + a[2], b[1] + b[2]) - fmax(a[1], b[1]);
            if (b[0] != HPML_LANE_COMM && both > 0) j->hidden_s += both / 1e6;
        }
    }
    free(span);
    remove(path);
}

static hpml_status train_deep(hpml_comm *c, void *user)
{
    deep          *j    = (deep *)user;
    hpml_ctx      *ctx  = hpml_comm_ctx(c);
    hpml_tensor   *in   = hpml_input_2d(ctx, CLASSES, SIDE), *out = in;
    float          x[CLASSES * SIDE];
    int32_t        y[CLASSES];
    for (int i = 0; i < LAYERS; i++) out = hpml_linear(out, SIDE, NULL);
    hpml_trainer     *t = hpml_trainer_create(ctx, &(hpml_trainer_desc){ .input = in, .output = out, .lr = 0.001f });
    hpml_distributed *d = hpml_distribute(t, c, NULL);
    hpml_trainer_attach(t, &(hpml_hooks){ .user = c, .need = layer_takes });
    for (int i = 0; i < CLASSES * SIDE; i++) x[i] = (float)(i * (hpml_comm_rank(c) + 3) % 7) / 7;
    for (int i = 0; i < CLASSES; i++) y[i] = i;
    hpml_trainer_step(t, x, y, CLASSES, NULL); /* the first step starts the background thread */
    hpml_barrier(c);
    hpml_distribute_get(d, NULL, true);
    if (hpml_comm_rank(c) == 0) hpml_trace_start(ctx, NULL);
    const double start = hpml_comm_now(c);
    for (int s = 0; s < DEEP_STEPS; s++) hpml_trainer_step(t, x, y, CLASSES, NULL);
    hpml_distribute_report report = { 0 };
    const double end = hpml_comm_now(c);
    if (d) hpml_distribute_get(d, &report, false);
    if (hpml_comm_rank(c) == 0) {
        hpml_trace_save(ctx, "build/shard_timeline.json");
        read_timeline("build/shard_timeline.json", j);
    }
    float   *weights = wholes(t);
    uint64_t hash = 0;
    for (int64_t i = 0; i < total(ctx); i++) hash = hash * 31 + (uint64_t)(weights[i] * 1e8f);
    free(weights);
    if (hpml_comm_rank(c) > 0) return hpml_ctx_status(ctx);
    j->hash      = hash;
    j->step_s    = (end - start) / DEEP_STEPS;
    j->exposed_s = report.exposed_s;
    return hpml_ctx_status(ctx);
}

static bool launch_deep(deep *j)
{
    char         text[512];
    hpml_plan    plan = { 0 };
    const double floats = SIDE * SIDE + SIDE; /* of a layer, of which each rank gets those of the others */
    const hpml_launch_desc d = { .ranks = DEEP_RANKS, .plan = &plan, .ctx.threads = 1,
        .transport = HPML_TRANSPORT_CLOCK,
        .network.inside = { 1e-6, 4 * floats * (DEEP_RANKS - 1) / DEEP_RANKS / LAYER_S } };
    hpml_status status = hpml_plan_parse(j->plan, &plan, text, sizeof text);
    if (status == HPML_OK) status = hpml_launch(&d, train_deep, j, text, sizeof text);
    if (status != HPML_OK) printf("    %s: %s\n", j->plan, text);
    return status == HPML_OK;
}

/* At once: the sum of computing (24 s) and exchanges (shard 3: two layers are not gathered again). In the background:
   the time of computing, and of the exchanges before the first and behind the last layer. */
TEST(the_next_values_are_gathered_while_a_layer_computes)
{
    const double computing = 3 * LAYERS * LAYER_S;
    for (int shard = 1; shard <= SHARDS; shard++) {
        char         plan[2][80];
        deep         at_once = { .plan = plan[0] }, ahead = { .plan = plan[1] };
        const double exchanges = (shard < 3 ? 2 * LAYERS : 3 * LAYERS - 2) * LAYER_S, alone = shard < 3 ? 3 : 2;
        snprintf(plan[0], sizeof plan[0], "shard=%d,bucket_bytes=16384,no_overlap=1", shard);
        snprintf(plan[1], sizeof plan[1], "shard=%d,bucket_bytes=16384", shard);
        ENSURE(launch_deep(&at_once) && launch_deep(&ahead));
        printf("    shard %d: %.2f s, ahead %.2f s; exposed %.2f s, ahead %.2f s\n", shard, at_once.step_s,
               ahead.step_s, at_once.exposed_s, ahead.exposed_s);
        ENSURE_NEAR(at_once.step_s, computing + exchanges, 0.1);
        ENSURE_NEAR(ahead.step_s, computing + alone * LAYER_S, 0.1);
        ENSURE_NEAR(at_once.exposed_s, exchanges, 0.1);
        ENSURE_NEAR(ahead.exposed_s, alone * LAYER_S, 0.1);
        ENSURE_NEAR(ahead.busy_s, DEEP_STEPS * exchanges, 0.4);
        ENSURE_NEAR(at_once.hidden_s, 0, 0.01);
        ENSURE_NEAR(ahead.hidden_s, DEEP_STEPS * (exchanges - alone * LAYER_S), 0.4);
        ENSURE(at_once.hash == ahead.hash);
    }
}

/* Bytes of values, gradients and two states, P floats, of N ranks, by shard: 16 P, 8 P + 8 P / N, 4 P + 12 P / N and
   16 P / N, with 2 and 3 also slots of the largest tensor: 3 for gradients, with 3 as many for values. */
TEST(a_rank_holds_its_share)
{
    for (int ranks = 2; ranks <= MOST; ranks += 2) {
        job all = { .settings = optimizers[3], .ranks = ranks, .width = WIDE, .plan = "" };
        ENSURE(launch(&all) == HPML_OK);
        for (int shard = 1; shard <= SHARDS; shard++) {
            char plan[40];
            job  j = all;
            snprintf(plan, sizeof plan, "bucket_bytes=1,shard=%d", shard);
            j.plan = plan;
            ENSURE(launch(&j) == HPML_OK);
            const double slot = 4.0 * (WIDE + 1) * (WIDE + 2), P = 4 * (double)j.weight_count;
            const double values = shard > 2 ? P / ranks + 3 * slot : P, states = 2 * P / ranks;
            const double gradients = shard > 1 ? P / ranks + 3 * slot : P;
            for (int r = 0; r < ranks; r++) {
                const double saved = (double)all.memory[r].total - (double)j.memory[r].total;
                ENSURE_NEAR((double)j.memory[r].optimizer / states, 1, 0.01);
                ENSURE_NEAR((double)j.memory[r].gradients / gradients, 1, 0.01);
                ENSURE_NEAR((double)j.memory[r].parameters / values, 1, 0.01);
                ENSURE_NEAR((double)j.held[r], (double)all.held[r] - saved, 0.01 * (values + gradients + states));
            }
            free(j.weights);
        }
        free(all.weights);
    }
}

static hpml_status measure(hpml_comm *c, void *user)
{
    job          *j   = (job *)user;
    hpml_ctx     *ctx = hpml_comm_ctx(c);
    hpml_ctx_defer(ctx, true);
    hpml_trainer *t      = model_of(ctx, &j->settings, j->width, false, NULL);
    const size_t  before = hpml_ctx_bytes(ctx);
    hpml_status   status = hpml_distribute_memory(t, c, NULL, &j->memory[hpml_comm_rank(c)]);
    j->held[hpml_comm_rank(c)] = (int64_t)(hpml_ctx_bytes(ctx) - before);
    return status;
}

/* What a rank will take is known before it is taken. */
TEST(memory_of_a_plan_is_known_before)
{
    static const char *const plans[] = { "shard=1", "shard=3", "pipe=2", "pipe=2,shard=3,schedule=1f1b", "recompute=1",
                                         "pipe=4,schedule=zero_bubble", "memory=40000", "" };
    for (size_t i = 0; i < sizeof plans / sizeof *plans; i++) {
        job       j    = { .settings = optimizers[3], .ranks = 4, .width = WIDE, .plan = plans[i] }, before = j;
        hpml_plan plan = { 0 };
        ENSURE(hpml_plan_parse(plans[i], &plan, j.error, sizeof j.error) == HPML_OK);
        const hpml_launch_desc d = { .ranks = 4, .timeout = 20, .plan = &plan, .ctx.threads = 1 };
        hpml_status status = hpml_launch(&d, measure, &before, before.error, sizeof before.error);
        if (status != HPML_OK) printf("    %s: %s\n", plans[i], before.error);
        ENSURE(status == HPML_OK && launch(&j) == HPML_OK);
        for (int r = 0; r < 4; r++) {
            ENSURE(memcmp(&before.memory[r], &j.memory[r], sizeof j.memory[r]) == 0 && j.memory[r].total > 0);
            ENSURE(before.held[r] < 20000 && j.held[r] > before.held[r] + (int64_t)j.memory[r].total / 2);
        }
        free(j.weights);
    }
}

TEST(norms_of_whole_tensors_are_summed_over_shards)
{
    const hpml_trainer_desc of_norms[] = {
        { .optimizer = HPML_OPT_SGD, .lr = 0.05f, .clip_norm = 0.2f },
        { .optimizer = HPML_OPT_ADAM, .lr = 0.01f, .clip_norm = 0.1f },
        { .optimizer = HPML_OPT_LARS, .lr = 0.5f, .weight_decay = 0.01f, .clip_norm = 0.2f },
        { .optimizer = HPML_OPT_LAMB, .lr = 0.01f, .weight_decay = 0.01f },
        { .optimizer = HPML_OPT_LAMB, .lr = 0.01f, .weight_decay = 0.01f, .clip_norm = 0.1f } };
    for (int o = 0; o < 5; o++)
        for (int shard = 1; shard <= SHARDS; shard++) {
            char plan[80];
            job  all = { .settings = of_norms[o], .ranks = 4, .steps = 8, .plan = "algorithm=ring" }, j = all;
            snprintf(plan, sizeof plan, "algorithm=ring,shard=%d", shard);
            j.plan = plan;
            hpml_status status = launch(&all) == HPML_OK ? launch(&j) : HPML_ERR_STATE;
            if (status != HPML_OK) printf("    %s\n", j.error);
            ENSURE(status == HPML_OK);
            ENSURE_NEAR(weights_differ(&all, &j), 0, 1e-6);
            free(all.weights);
            free(j.weights);
        }
}

TEST(plans_with_shards_that_cannot_be_are_refused)
{
    const struct { const char *plan, *says; } refused[] = {
        { "shard=1,exact=1", "with shard each rank gets" },
        { "shard=1,delayed=1", "with shard each rank gets" },
        { "shard=1,route=factors", "with shard each rank gets" },
        { "shard=1,codec=onebit", "a codec packs them" },
        { "shard=1,algorithm=tree", "two halves of a ring" },
        { "shard=1,strategy=local", "take strategy sync" },
    };
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        job j = { .settings = optimizers[0], .ranks = 2, .steps = 1, .plan = refused[i].plan };
        ENSURE(launch(&j) == HPML_ERR_UNSUPPORTED && strstr(j.error, refused[i].says));
    }
}

/* Trains a split model by the plan on 8 ranks; compares losses and values with those of one rank. */
static bool trains_as_one(const char *words, split_run *serial)
{
    char      text[512];
    hpml_plan plan = { 0 };
    split_run split = *serial;
    hpml_launch_desc d = { .ranks = 1, .timeout = 20, .ctx.threads = 1 };
    split.gradients = split.values = NULL;
    if (!serial->values && hpml_launch(&d, split_train, serial, text, sizeof text) != HPML_OK) return false;
    d.ranks = 8;
    d.plan  = &plan;
    hpml_status status = hpml_plan_parse(words, &plan, text, sizeof text);
    if (status == HPML_OK) status = hpml_launch(&d, split_train, &split, text, sizeof text);
    double loss = 0, value = 1;
    for (int i = 0; i < serial->steps; i++) loss = fmax(loss, fabs(split.loss[i] - serial->loss[i]) / serial->loss[0]);
    if (status == HPML_OK) value = split_differ(split.values, serial->values, serial->floats);
    if (status != HPML_OK) printf("    %s: %s\n", words, text);
    else printf("    %s: loss %.1e, values %.1e\n", words, loss, value);
    split_free(&split);
    return status == HPML_OK && loss <= 1e-6 && value <= 1e-4;
}

TEST(norms_and_shards_of_split_models)
{
    static const hpml_opt optimizer[] = { HPML_OPT_SGD, HPML_OPT_LARS, HPML_OPT_LAMB };
    for (int o = 0; o < 3; o++) {
        split_run serial = { .model = split_small, .optimizer = optimizer[o], .steps = 4, .clip_norm = 0.3f };
        ENSURE(trains_as_one("tensor=4", &serial));
        for (int shard = 1; shard <= SHARDS; shard++) {
            char words[40];
            snprintf(words, sizeof words, "tensor=2,shard=%d", shard);
            ENSURE(trains_as_one(words, &serial));
        }
        split_free(&serial);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// evaluation, errors
// ---------------------------------------------------------------------------------------------------------------------
enum { EVALUATE = 1, FAIL, SAVE, SERIAL, LATE, KEEP, INFINITE, HOOK };
typedef struct use { int what, shard; bool slow; double loss; float first[CLASSES]; char errors[MOST][256]; } use;

static hpml_status no_update(void *user, hpml_trainer *t, const hpml_moment *at)
{
    (void)user, (void)at;
    return hpml_trainer_update_inner(t);
}

/* Trains two steps and evaluates, or does something that is refused. */
static hpml_status use_shards(hpml_comm *c, void *user)
{
    use          *u    = (use *)user;
    hpml_ctx     *ctx  = hpml_comm_ctx(c);
    const int     rank = hpml_comm_rank(c);
    hpml_metrics  m    = { 0 };
    float         x[BATCH * INPUTS], out[BATCH * CLASSES];
    int32_t       y[BATCH];
    if (u->what == LATE) hpml_ctx_defer(ctx, false);
    hpml_trainer     *t = model(ctx, &optimizers[3], NARROW, NULL);
    hpml_distributed *d = hpml_distribute(t, c, NULL);
    if (u->what == HOOK) hpml_trainer_attach(t, &(hpml_hooks){ .user = u, .update = no_update });
    for (int s = 0; s < 2 && d; s++) {
        batch_of(s, rank, x, y);
        if (u->what == INFINITE && rank == 1 && s == 1) x[3] = INFINITY;
        if (u->what == FAIL && rank == 1 && s == 1) hpml_ctx_fail(ctx, HPML_ERR_WRITE, "a disk is full");
        hpml_trainer_step(t, x, y, BATCH, NULL);
    }
    hpml_dataset *data = points(ctx, 20, 0, 0, 0);
    batch_of(9, 0, x, y);
    if (u->what == EVALUATE) hpml_trainer_evaluate(t, data, &m);
    if (u->what == EVALUATE) hpml_trainer_predict(t, x, BATCH, out);
    if (u->what == SAVE) hpml_params_save(ctx, "build/shard_part.safetensors", HPML_DTYPE_F32);
    if (u->what == KEEP) hpml_trainer_keep(t, 0, 1, 0, 1);
    if (u->what == SERIAL) {
        hpml_distribute_free(d);
        hpml_trainer_step(t, x, y, BATCH, NULL);
    }
    if (rank == 0 && u->what == EVALUATE) {
        u->loss = m.loss;
        memcpy(u->first, out, sizeof u->first);
    }
    snprintf(u->errors[rank], sizeof u->errors[rank], "%s", hpml_ctx_error(ctx));
    return hpml_ctx_status(ctx);
}

static hpml_status use_on(use *u, int ranks, bool planned)
{
    char                   text[512];
    hpml_plan              plan = { .shard = u->shard, .algorithm = HPML_RING, .bucket_bytes = 4000 };
    const hpml_launch_desc d = { .ranks = ranks, .timeout = 20, .plan = planned ? &plan : NULL, .ctx.threads = 1,
                                 .network.inside.latency = u->slow ? 1e-4 : 0,
                                 .transport = u->slow ? HPML_TRANSPORT_CLOCK : HPML_TRANSPORT_THREADS };
    return hpml_launch(&d, use_shards, u, text, sizeof text);
}

TEST(evaluation_with_shards)
{
    use all = { .what = EVALUATE };
    ENSURE(use_on(&all, 3, true) == HPML_OK);
    for (int shard = 1; shard <= SHARDS; shard++) {
        use u = { .what = EVALUATE, .shard = shard };
        ENSURE(use_on(&u, 3, true) == HPML_OK);
        ENSURE(u.loss == all.loss && memcmp(u.first, all.first, sizeof u.first) == 0);
    }
}

/* An allocator that fails at one call. */
typedef struct scarce { int left; } scarce; /* calls until that one; 0: none fails */

static void *scarce_alloc(size_t bytes, size_t align, void *user)
{
    scarce *s = (scarce *)user;
    void   *p = NULL;
    if (s->left > 0 && --s->left == 0) return NULL;
    return posix_memalign(&p, align, bytes) == 0 ? p : NULL;
}
static void scarce_free(void *p, size_t bytes, void *user)
{
    (void)bytes;
    (void)user;
    free(p);
}

typedef struct shortage { scarce memory; int call; bool over; } shortage; /* over: that call came after the step */

static void place_shortage(hpml_ctx_desc *ctx, int rank, void *user)
{
    if (rank == 0) ctx->allocator = (hpml_allocator){ scarce_alloc, scarce_free, &((shortage *)user)->memory };
}

static hpml_status lacks_memory(hpml_comm *c, void *user)
{
    shortage     *s = (shortage *)user;
    float         x[BATCH * INPUTS] = { 0 };
    int32_t       y[BATCH] = { 0 };
    const bool    mine = hpml_comm_rank(c) == 0;
    hpml_trainer *t = model(hpml_comm_ctx(c), &(hpml_trainer_desc){ 0 }, NARROW, NULL);
    if (mine) s->memory.left = s->call;
    hpml_distribute(t, c, NULL);
    hpml_trainer_step(t, x, y, BATCH, NULL);
    if (mine) s->over = s->memory.left > 0;
    if (mine) s->memory.left = 0;
    return hpml_ctx_status(hpml_comm_ctx(c));
}

/* Whichever allocation of a rank fails, from hpml_distribute to the first step, the launch ends with an error. */
TEST(a_rank_without_memory_is_an_error)
{
    for (int shard = 1; shard <= SHARDS; shard++) {
        char                   text[512];
        hpml_plan              plan = { .shard = shard };
        shortage               s = { .call = 0 };
        const hpml_launch_desc d = { .ranks = 2, .timeout = 20, .plan = &plan, .ctx.threads = 1,
                                     .place = place_shortage };
        while (!s.over) {
            s.call++;
            const hpml_status status = hpml_launch(&d, lacks_memory, &s, text, sizeof text);
            if (s.over != (status == HPML_OK)) printf("    shard %d, call %d: %s\n", shard, s.call, text);
            ENSURE(s.over == (status == HPML_OK));
        }
        ENSURE(s.call > 10);
    }
}

TEST(a_rank_that_fails_is_named)
{
    for (int shard = 1; shard <= SHARDS; shard++) {
        use u = { .what = FAIL, .shard = shard };
        ENSURE(use_on(&u, 3, true) != HPML_OK);
        for (int r = 0; r < 3; r++) ENSURE(strstr(u.errors[r], r == 1 ? "a disk is full" : "rank 1"));
    }
}

TEST(a_rank_with_an_infinite_loss_is_named)
{
    for (int shard = 1; shard <= SHARDS; shard++)
        for (int slow = 0; slow < 2; slow++) {
            use u = { .what = INFINITE, .shard = shard, .slow = slow > 0 };
            ENSURE(use_on(&u, 3, true) != HPML_OK);
            for (int r = 0; r < 3; r++)
                ENSURE(strstr(u.errors[r], "rank 1") || (r == 1 && strstr(u.errors[r], "the loss is nan")));
        }
}

TEST(wrong_uses_of_shards_are_named)
{
    const struct { int what, shard; const char *says; } wrong[] = {
        { SAVE, 3, "call hpml_checkpoint_save" },
        { SERIAL, 1, "call hpml_distribute again" },
        { SERIAL, 3, "call hpml_distribute again" },
        { LATE, 1, "call hpml_ctx_defer" },
        { KEEP, 2, "has memory already" },
        { HOOK, 1, "before the hook `update`" },
    };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        use u = { .what = wrong[i].what, .shard = wrong[i].shard, .slow = wrong[i].what == HOOK };
        ENSURE(use_on(&u, 2, true) != HPML_OK);
        ENSURE(strstr(u.errors[0], wrong[i].says));
    }
}
