/* Ranks whose contexts are on GPUs train as one: through host memory, over any transport, and by NCCL. This file is C and
   knows no CUDA: the backend is linked in, for the emulation in cuda_on_cpu.h, and NCCL's stand-in nccl_on_cpu.cc. */
#include "../hpml_comm.h"
#include "../hpml_cuda.cuh"
#include "nccl_on_cpu.h"
#include "points.h"
#include "test.h"

#include <unistd.h>

enum { HIDDEN = 40 };

typedef struct job {
    hpml_distribute_desc d;
    hpml_cuda_desc       cuda, gpu[4];
    bool                 crowd; /* all ranks on GPU 0 */
    hpml_transport_kind  transport;
    bool                 cpu, norm, serial, same, nccl;
    hpml_nccl_desc       link;
    int                  away;  /* this rank, + 1, leaves after `steps` without a word */
    int                  steps, tail, samples;
    int32_t              accumulate;
    float                clip;
    const char          *save, *load;
    uint64_t             hash;
    float                w[INPUTS * HIDDEN], var[HIDDEN], loss;
    char                 text[768], said[4][768]; /* said: every rank's own error */
} job;

/* What rank 0 has, and whether the others have the same. */
static void keep(job *j, hpml_comm *c)
{
    hpml_ctx *ctx = hpml_comm_ctx(c);
    bool      same = same_params(c);
    if (hpml_comm_rank(c) != 0) return;
    j->same = same;
    j->hash = hpml_param_hash(ctx);
    hpml_tensor_get(hpml_param_at(ctx, 0), j->w, INPUTS * HIDDEN);
    if (j->norm) hpml_tensor_get(hpml_param_at(ctx, 5), j->var, HIDDEN);
}

static hpml_status train(hpml_comm *c, job *j)
{
    hpml_ctx    *ctx = hpml_comm_ctx(c);
    if (j->nccl && hpml_nccl_attach(c, &j->link) != HPML_OK) return hpml_ctx_status(ctx);
    int          p   = hpml_comm_size(c);
    int64_t      batch = j->d.exact ? GLOBAL : (GLOBAL + p - 1) / p;
    hpml_tensor *x = hpml_input_2d(ctx, batch, INPUTS);
    hpml_linear_desc relu = { .activation = j->norm ? HPML_ACT_NONE : HPML_ACT_RELU };
    hpml_tensor *h = hpml_linear(x, HIDDEN, &relu);
    if (j->norm) h = hpml_relu(hpml_batchnorm(h, NULL));
    hpml_trainer *t = hpml_trainer_create(ctx, &(hpml_trainer_desc){ .input = x, .output = hpml_linear(h, CLASSES, NULL),
                                          .lr = 0.1f, .momentum = 0.9f, .accumulate = j->accumulate, .clip_norm = j->clip });
    hpml_dataset *data = points(ctx, j->samples, false);
    hpml_distribute_desc d = j->d;
    d.global_batch = GLOBAL;
    if (d.exact) d.leaf = 4;
    hpml_distributed *dist = j->serial ? NULL : hpml_distribute(t, c, &d);
    if (!j->serial && !dist) return hpml_ctx_status(ctx);
    if (j->load) hpml_distribute_load(dist, j->load);
    hpml_fit_desc fit = { .epochs = 100, .max_steps = j->steps };
    if (j->steps > 0) hpml_trainer_fit(t, data, &fit);
    if (j->save) hpml_distribute_save(dist, j->save);
    if (j->away == hpml_comm_rank(c) + 1) return HPML_OK;
    fit.max_steps = j->tail;
    if (j->tail) hpml_trainer_fit(t, data, &fit);
    hpml_distribute_report r = { 0 };
    hpml_distribute_get(dist, &r, false);
    if (hpml_comm_rank(c) == 0) j->loss = (float)r.loss;
    if (hpml_ctx_status(ctx) == HPML_OK) keep(j, c);
    return hpml_ctx_status(ctx);
}

static hpml_status work(hpml_comm *c, void *user)
{
    job        *j      = (job *)user;
    hpml_status status = train(c, j);
    snprintf(j->said[hpml_comm_rank(c)], sizeof j->said[0], "%s", hpml_ctx_error(hpml_comm_ctx(c)));
    return status;
}

/* A GPU for each rank, as far as they go. */
static void place(hpml_ctx_desc *ctx, int rank, void *user)
{
    job *j = (job *)user;
    if (j->cpu) return;
    j->gpu[rank] = j->cuda;
    j->gpu[rank].workspace = 1 << 16;
    j->gpu[rank].device    = j->crowd ? 0 : rank % hpml_cuda_device_count();
    ctx->backend = hpml_backend_cuda(), ctx->backend_desc = &j->gpu[rank];
}

static hpml_status go(job *j, int ranks)
{
    hpml_launch_desc l = { .transport = j->transport, .ranks = ranks, .timeout = 20, .place = place,
                           .ctx = { .seed = 3, .threads = 1 } };
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
    for (int variant = 0; variant < 7; variant++) {
        job gpu = { .steps = 12, .norm = variant != 1, .accumulate = variant == 2 ? 2 : 1, .clip = variant == 1 ? 0.5f : 0 };
        gpu.d.delayed = variant == 3 || variant == 4, gpu.d.sum = variant == 4, gpu.d.exact = variant == 5;
        gpu.d.sync_batchnorm = variant == 6; /* the last, short batch leaves ranks without samples */
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
    job half = { .steps = 2, .cuda = { .precision = HPML_CUDA_F16 } };
    half.d.codec.kind = HPML_CODEC_ONEBIT;
    ENSURE(go(&half, 2) == HPML_ERR_UNSUPPORTED && strstr(half.text, "in f16 gradients overflow"));
}

/* ---- by NCCL ------------------------------------------------------------------------------------------------------ */

/* All the contexts are gone: so is what they had. */
#define ENSURE_TIDY(aborts)                                                                                                  \
    do {                                                                                                                     \
        nccl_on_cpu_counts n = nccl_on_cpu_count();                                                                          \
        if (n.live || n.misused || n.aborted != (aborts))                                                                    \
            printf("    %d live, %d misused, %d aborted\n", n.live, n.misused, n.aborted);                                   \
        ENSURE(n.live == 0 && n.misused == 0 && n.aborted == (aborts));                                                      \
    } while (0)

/* Plain sums, and what a codec packs, come out with the bits of the exchange on the host, late work or not. */
TEST(nccl_gives_the_bits_of_the_host)
{
    for (int variant = 0; variant < 8; variant++) {
        job host = { .steps = 12, .norm = variant == 1, .accumulate = 1 + (variant == 1), .d.algorithm = HPML_CENTRAL };
        if (variant == 2) host.d.bucket_bytes = 1, host.clip = 0.5f;
        if (variant == 3) host.d.no_overlap = host.d.sum = true;
        if (variant >= 4) host.d.codec.kind = variant == 6 ? HPML_CODEC_BF16 : HPML_CODEC_ONEBIT;
        if (variant == 5) host.d.bucket_bytes = 1, host.d.warm_steps = 3;
        if (variant == 7) host.d.codec = (hpml_codec_desc){ .kind = HPML_CODEC_TWOBIT, .threshold = 0.01f };
        bool all = variant == 0 || variant == 4;
        for (int p = all ? 2 : 3; p <= (all ? 4 : 3); p++) {
            job linked = host;
            linked.nccl = true;
            nccl_on_cpu_reset(4, (unsigned)variant % 3);
            ENSURE_GO(host, p);
            ENSURE_GO(linked, p);
            nccl_on_cpu_counts n = nccl_on_cpu_count();
            ENSURE(n.made == p && n.groups >= p * linked.steps); /* it was NCCL indeed */
            ENSURE(linked.hash == host.hash);
            ENSURE_TIDY(0);
        }
    }
    nccl_on_cpu_reset(1, 0);
}

TEST(nccl_leaves_other_strategies_to_the_host)
{
    for (int variant = 0; variant < 3; variant++) {
        job j = { .steps = 4, .nccl = true };
        j.d.exact = variant == 0, j.d.delayed = variant == 1;
        if (variant == 2) j.d.method = HPML_METHOD_TOPK;
        nccl_on_cpu_reset(2, 0);
        ENSURE_GO(j, 2);
        ENSURE(nccl_on_cpu_count().groups == 0);
        ENSURE_TIDY(0);
    }
    nccl_on_cpu_reset(1, 0);
}

TEST(nccl_checkpoints)
{
    job whole = { .steps = 4, .tail = 4, .nccl = true, .save = "build/nccl.safetensors", .d.codec.kind = HPML_CODEC_ONEBIT };
    job rest  = whole;
    rest.steps = 0, rest.save = NULL, rest.load = whole.save;
    nccl_on_cpu_reset(2, 1);
    ENSURE_GO(whole, 2);
    ENSURE_GO(rest, 2);
    ENSURE(whole.hash == rest.hash);
    ENSURE_TIDY(0);
    nccl_on_cpu_reset(1, 0);
    remove("build/nccl.safetensors");
}

typedef struct meeting {
    job  j; /* first: place looks at it */
    char file[64], text[768];
} meeting;

/* Contexts that know of no communicator: their ids go by files. */
static hpml_status by_file(hpml_comm *c, void *user)
{
    meeting       *m   = (meeting *)user;
    hpml_ctx      *ctx = hpml_comm_ctx(c);
    int            rank = hpml_comm_rank(c), p = hpml_comm_size(c);
    float          x[1000];
    hpml_nccl     *n = hpml_nccl_create(ctx, &(hpml_nccl_desc){ .rank = rank, .ranks = p, .file = m->file, .timeout = 2 });
    float         *device = (float *)hpml_ctx_backend(ctx)->alloc(hpml_ctx_device(ctx), sizeof x);
    for (int i = 0; i < 1000; i++) x[i] = (float)(i + rank);
    for (int turn = 0; turn < 3 && n; turn++) {
        hpml_ctx_backend(ctx)->write(hpml_ctx_device(ctx), device, x, sizeof x);
        if (hpml_nccl_allreduce(n, device, 1000, turn == 1) != HPML_OK) break;
        hpml_ctx_backend(ctx)->read(hpml_ctx_device(ctx), x, device, sizeof x);
    }
    /* ranks 0 .. p - 1: the sum, the mean of equal numbers, p times that */
    for (int i = 0; i < 1000 && n && hpml_ctx_status(ctx) == HPML_OK; i++)
        if (x[i] != (float)(p * (p * i + p * (p - 1) / 2))) return HPML_ERR_STATE;
    hpml_nccl_free(n);
    return hpml_ctx_status(ctx);
}

TEST(nccl_ranks_meet_by_file)
{
    meeting          m = { .file = "build/nccl_id" };
    hpml_launch_desc l = { .ranks = 4, .timeout = 20, .place = place, .ctx.threads = 1 };
    nccl_on_cpu_reset(4, 1);
    ENSURE(hpml_launch(&l, by_file, &m, m.text, sizeof m.text) == HPML_OK);
    ENSURE_TIDY(0);
    ENSURE(access("build/nccl_id.0", F_OK) != 0 && access("build/nccl_id.3", F_OK) != 0); /* nothing stays */
    snprintf(m.file, sizeof m.file, "/nonexistent/nccl_id");
    ENSURE(hpml_launch(&l, by_file, &m, m.text, sizeof m.text) == HPML_ERR_WRITE);
    ENSURE(strstr(m.text, "cannot write /nonexistent/nccl_id"));
    nccl_on_cpu_reset(1, 0);
}

/* Runs ranks that must fail; returns how long that takes. */
static double failing(job *j, int ranks, hpml_status *status)
{
    double start = hpml_now();
    j->nccl = true, j->link.timeout = 1;
    *status = go(j, ranks);
    return hpml_now() - start;
}

TEST(nccl_errors)
{
    hpml_status s;
    job missing = { .steps = 2, .link.library = "/nonexistent/libnccl.so.2" };
    nccl_on_cpu_reset(2, 0);
    ENSURE(failing(&missing, 2, &s) < 10 && s == HPML_ERR_UNSUPPORTED);
    ENSURE(strstr(missing.text, "NCCL cannot be loaded") && strstr(missing.text, "install libnccl2 or set"));
    job crowd = { .steps = 2, .crowd = true };
    ENSURE(failing(&crowd, 2, &s) < 10 && s == HPML_ERR_ARGUMENT);
    ENSURE(strstr(crowd.text, "ranks 0 and 1 are both on GPU 0 of host "));
    ENSURE(strstr(crowd.text, "hpml_cuda_desc.device = rank % hpml_cuda_device_count()"));
    ENSURE(nccl_on_cpu_count().made == 0); /* found before NCCL is asked */
    job cpu = { .steps = 2, .cpu = true };
    ENSURE(failing(&cpu, 2, &s) < 10 && s == HPML_ERR_UNSUPPORTED && strstr(cpu.text, "its context needs hpml_backend_cuda()"));
    nccl_on_cpu_never_ready();
    job late = { .steps = 2 };
    ENSURE(failing(&late, 2, &s) < 10 && s == HPML_ERR_TIMEOUT);
    ENSURE(strstr(late.text, "NCCL communicator of 2 ranks: not done after 1 seconds"));
    ENSURE_TIDY(2);
    nccl_on_cpu_reset(2, 0);
    nccl_on_cpu_error_after(7);
    job broken = { .steps = 20 };
    ENSURE(failing(&broken, 2, &s) < 10 && s == HPML_ERR_PEER);
    ENSURE(strstr(broken.text, "NCCL ") && strstr(broken.text, "remote process exited or there was a network error: socket"));
    ENSURE_TIDY(2);
    nccl_on_cpu_reset(4, 0);
    for (int onebit = 0; onebit < 2; onebit++) {
        job lost = { .steps = 3, .tail = 5, .away = 2 };
        if (onebit) lost.d.codec.kind = HPML_CODEC_ONEBIT;
        ENSURE(failing(&lost, 4, &s) < 10 && s == HPML_ERR_TIMEOUT);
        for (int r = 0; r < 4; r++) /* who is told by another's error names that rank */
            ENSURE(r == 1 ? !lost.said[r][0] : strstr(lost.said[r], "not done after 1 seconds: has a rank died") != NULL);
        ENSURE_TIDY(3 * (onebit + 1));
    }
    nccl_on_cpu_reset(1, 0);
}
