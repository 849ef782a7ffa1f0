/* Ranks whose contexts are on GPUs train as one: through host memory, over any transport. This file is C and knows no CUDA:
   the backend is linked in, here for the emulation in cuda_on_cpu.h. */
#include "../hpml_comm.h"
#include "../hpml_cuda.cuh"
#include "test.h"

enum { GLOBAL = 24, INPUTS = 20, CLASSES = 5, HIDDEN = 40 };

typedef struct job {
    hpml_distribute_desc d;
    hpml_cuda_desc       cuda;
    hpml_transport_kind  transport;
    bool                 cpu, norm, serial, same;
    int                  steps, tail, samples;
    int32_t              accumulate;
    float                clip;
    const char          *save, *load;
    uint64_t             hash;
    float                w[INPUTS * HIDDEN], var[HIDDEN], loss;
    char                 text[768];
} job;

static hpml_dataset *points(const job *j, hpml_ctx *ctx)
{
    const int64_t shape[1] = { INPUTS };
    int64_t       n = j->samples;
    float        *x = (float *)malloc(sizeof(float) * (size_t)n * INPUTS);
    int32_t      *y = (int32_t *)calloc((size_t)n, sizeof *y);
    hpml_rng      r = { .seed = 5 };
    hpml_rng_fill_normal(&r, x, n * INPUTS);
    for (int64_t i = 0; i < n; i++)
        for (int k = 1; k < CLASSES; k++)
            if (x[i * INPUTS + k] > x[i * INPUTS + y[i]]) y[i] = k;
    hpml_dataset *d = hpml_dataset_create(ctx, n, HPML_DTYPE_F32, 1, shape, x, HPML_DTYPE_I32, 1, y);
    free(x);
    free(y);
    return d;
}

/* What rank 0 has, and whether the others have the same. */
static void keep(job *j, hpml_comm *c)
{
    hpml_ctx *ctx = hpml_comm_ctx(c);
    int64_t   hash[2] = { (int64_t)(hpml_param_hash(ctx) >> 2), 0 };
    hash[1] = -hash[0];
    hpml_allreduce(c, hash, 2, &(hpml_allreduce_desc){ .reduce = HPML_MAX, .element = HPML_ELEMENT_I64 });
    if (hpml_comm_rank(c) != 0) return;
    j->same = hash[0] == -hash[1];
    j->hash = hpml_param_hash(ctx);
    hpml_tensor_get(hpml_param_at(ctx, 0), j->w, INPUTS * HIDDEN);
    if (j->norm) hpml_tensor_get(hpml_param_at(ctx, 5), j->var, HIDDEN);
}

static hpml_status work(hpml_comm *c, void *user)
{
    job         *j   = (job *)user;
    hpml_ctx    *ctx = hpml_comm_ctx(c);
    int          p   = hpml_comm_size(c);
    int64_t      batch = j->d.exact ? GLOBAL : (GLOBAL + p - 1) / p;
    hpml_tensor *x = hpml_input_2d(ctx, batch, INPUTS);
    hpml_linear_desc relu = { .activation = j->norm ? HPML_ACT_NONE : HPML_ACT_RELU };
    hpml_tensor *h = hpml_linear(x, HIDDEN, &relu);
    if (j->norm) h = hpml_relu(hpml_batchnorm(h, NULL));
    hpml_trainer *t = hpml_trainer_create(ctx, &(hpml_trainer_desc){ .input = x, .output = hpml_linear(h, CLASSES, NULL),
                                          .lr = 0.1f, .momentum = 0.9f, .accumulate = j->accumulate, .clip_norm = j->clip });
    hpml_dataset *data = points(j, ctx);
    hpml_distribute_desc d = j->d;
    d.global_batch = GLOBAL;
    if (d.exact) d.leaf = 4;
    hpml_distributed *dist = j->serial ? NULL : hpml_distribute(t, c, &d);
    if (!j->serial && !dist) return hpml_ctx_status(ctx);
    if (j->load) hpml_distribute_load(dist, j->load);
    hpml_fit_desc fit = { .epochs = 100, .max_steps = j->steps };
    if (j->steps > 0) hpml_trainer_fit(t, data, &fit);
    if (j->save) hpml_distribute_save(dist, j->save);
    fit.max_steps = j->tail;
    if (j->tail) hpml_trainer_fit(t, data, &fit);
    hpml_distribute_report r = { 0 };
    hpml_distribute_get(dist, &r, false);
    if (hpml_comm_rank(c) == 0) j->loss = (float)r.loss;
    if (hpml_ctx_status(ctx) == HPML_OK) keep(j, c);
    return hpml_ctx_status(ctx);
}

static hpml_status go(job *j, int ranks)
{
    hpml_launch_desc l = { .transport = j->transport, .ranks = ranks, .timeout = 20, .ctx = { .seed = 3, .threads = 1 } };
    if (!j->cpu) l.ctx.backend = hpml_backend_cuda(), l.ctx.backend_desc = &j->cuda;
    j->cuda.workspace = 1 << 16;
    l.network.inside.latency = j->d.no_overlap ? 0 : 1e-6; /* a link that takes time: exchanges go to the background */
    if (j->samples == 0) j->samples = 250; /* the last batch of an epoch is short, and some ranks have none of it */
    return hpml_launch(&l, work, j, j->text, sizeof j->text);
}

static double apart(const job *a, const job *b)
{
    double most = 0;
    for (int i = 0; i < INPUTS * HIDDEN; i++) most = fmax(most, fabs((double)a->w[i] - (double)b->w[i]));
    for (int i = 0; i < HIDDEN; i++) most = fmax(most, fabs((double)a->var[i] - (double)b->var[i]));
    return most;
}

#define ENSURE_GO(j, ranks)                                                                                                  \
    do {                                                                                                                     \
        if (go(&(j), ranks) != HPML_OK) printf("    %s\n", (j).text);                                                        \
        ENSURE((j).text[0] == 0 && (j).same);                                                                                \
    } while (0)

TEST(staged_ranks_equal_one_rank)
{
    job serial = { .serial = true, .steps = 12 };
    ENSURE_GO(serial, 1);
    for (int p = 1; p <= 4; p *= 2)
        for (int variant = 0; variant < 3; variant++) {
            job j = { .steps = 12, .d = { .bucket_bytes = variant == 1, .no_overlap = variant == 2 } };
            ENSURE_GO(j, p);
            ENSURE_NEAR(apart(&serial, &j), 0, 1e-5);
        }
}

/* Every way of exchanging that adds plain floats comes out as on CPUs. */
TEST(staged_equals_cpu)
{
    for (int variant = 0; variant < 6; variant++) {
        job gpu = { .steps = 12, .norm = variant != 1, .accumulate = variant == 2 ? 2 : 1, .clip = variant == 1 ? 0.5f : 0 };
        gpu.d.delayed = variant == 3 || variant == 4, gpu.d.sum = variant == 4, gpu.d.exact = variant == 5;
        if (variant == 0) gpu.samples = 240; /* batchnorm over 2 samples is a sign: it makes any difference large */
        if (variant == 2) gpu.transport = HPML_TRANSPORT_CLOCK;
        job cpu = gpu;
        cpu.cpu = true;
        ENSURE_GO(gpu, 4);
        ENSURE_GO(cpu, 4);
        ENSURE_NEAR(apart(&cpu, &gpu), 0, 1e-5);
    }
}

TEST(staged_methods_keep_ranks_equal)
{
    const hpml_codec_kind kinds[] = { HPML_CODEC_ONEBIT, HPML_CODEC_TWOBIT, HPML_CODEC_BF16 };
    for (int variant = 0; variant < 6; variant++) {
        job j = { .steps = 12 };
        if (variant < 3) j.d.codec.kind = kinds[variant];
        if (variant == 1) j.d.codec.threshold = 0.01f;
        if (variant == 3) j.d.method = HPML_METHOD_TOPK, j.d.ratio = 0.1f;
        if (variant == 4) j.d.method = HPML_METHOD_LOWRANK;
        if (variant == 5) j.d.codec.kind = HPML_CODEC_ONEBIT, j.d.warm_steps = 3, j.d.delayed = true;
        job cpu = j;
        cpu.cpu = true;
        ENSURE_GO(j, 4);
        ENSURE_GO(cpu, 4);
        ENSURE_NEAR(j.loss, cpu.loss, 1e-3);
    }
}

TEST(staged_exact_is_the_same_for_all_ranks)
{
    for (int onebit = 0; onebit < 2; onebit++) {
        job one = { .steps = 6, .norm = true, .d = { .exact = true } };
        if (onebit) one.d.codec.kind = HPML_CODEC_ONEBIT;
        job two = one, four = one;
        ENSURE_GO(one, 1);
        ENSURE_GO(two, 2);
        ENSURE_GO(four, 4);
        ENSURE(one.hash == two.hash && one.hash == four.hash);
    }
}

TEST(staged_checkpoints_go_on_with_the_same_bits)
{
    for (int variant = 0; variant < 3; variant++) {
        job whole = { .steps = 4, .tail = 6, .save = "build/nccl.safetensors" };
        whole.d.codec.kind = variant ? HPML_CODEC_ONEBIT : HPML_CODEC_NONE;
        whole.d.delayed    = variant == 2;
        job rest = whole;
        rest.steps = 0, rest.save = NULL, rest.load = whole.save;
        ENSURE_GO(whole, 2);
        ENSURE_GO(rest, 2);
        ENSURE(whole.hash == rest.hash);
    }
    remove("build/nccl.safetensors");
}

TEST(what_a_device_cannot_do)
{
    job sync = { .steps = 2, .d = { .sync_batchnorm = true } };
    ENSURE(go(&sync, 2) == HPML_ERR_UNSUPPORTED && strstr(sync.text, "sync_batchnorm needs the CPU"));
    job half = { .steps = 2, .cuda = { .precision = HPML_CUDA_F16 } };
    half.d.codec.kind = HPML_CODEC_ONEBIT;
    ENSURE(go(&half, 2) == HPML_ERR_UNSUPPORTED && strstr(half.text, "in f16 gradients overflow"));
}
