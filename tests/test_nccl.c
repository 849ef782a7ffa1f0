/* Ranks whose contexts are on GPUs train as one: through host memory, over any transport, and by NCCL. This file is C
   without CUDA: the backend is linked, compiled for the emulation in cuda_on_cpu.h, and so is the emulated NCCL,
   nccl_on_cpu.cc. */
#include "../hpml_comm.h"
#include "../hpml_cuda.cuh"
#include "emulator/nccl_on_cpu.h"
#include "toy_points.h"
#include "test.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

enum { HIDDEN = 40 };

typedef struct job {
    hpml_plan            d;
    hpml_cuda_desc       cuda, gpu[4];
    bool                 crowd; /* all ranks on GPU 0 */
    hpml_transport_kind  transport;
    bool                 cpu, norm, serial, same, nccl, unchecked, survive;
    bool                 kink; /* |x W| as a square root: for a sample of zeros the loss is 0 and the gradient of W is
                                  NaN. Sample 109 is one: the 14th of step 4, on rank 2 of 4 */
    bool                 nan; /* in sample 109, behind a relu that turns it into 0 */
    int                  per_node; /* ranks; 0: all */
    hpml_counters        sent; /* by rank 0 */
    hpml_nccl_desc       link;
    int                  away;  /* this rank + 1 ends after `steps` without an error message */
    int                  steps, tail, samples;
    int32_t              accumulate;
    float                clip;
    const char          *save, *load, *trace; /* trace: rank 0's timeline */
    uint64_t             hash;
    float                w[INPUTS * HIDDEN], var[HIDDEN], loss;
    char                 text[768], said[4][768]; /* said: the error of every rank */
    char                 counts[4][1024]; /* hpml_cuda_text of every rank */
} job;

/* The parameters of rank 0, and whether the others have the same. */
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
    int          p   = hpml_comm_size(c) - j->d.servers; /* ranks that compute */
    int64_t      batch = j->d.exact ? GLOBAL : (GLOBAL + p - 1) / p;
    hpml_tensor *x = hpml_input_2d(ctx, batch, INPUTS);
    hpml_linear_desc relu = { .activation = j->norm ? HPML_ACT_NONE : HPML_ACT_RELU };
    if (j->kink) relu.no_bias = true, relu.activation = HPML_ACT_NONE;
    hpml_tensor *h = hpml_linear(x, HIDDEN, &relu);
    if (j->kink) h = hpml_activation(hpml_activation(h, HPML_ACT_SQUARE, 0), HPML_ACT_SQRT, 0);
    if (j->norm) h = hpml_relu(hpml_batchnorm(h, NULL));
    hpml_trainer *t = hpml_trainer_create(ctx, &(hpml_trainer_desc){
        .input = x, .output = hpml_linear(h, CLASSES, NULL), .lr = 0.1f, .momentum = 0.9f,
        .accumulate = j->accumulate, .clip_norm = j->clip, .no_finite_check = j->unchecked });
    hpml_dataset *data = points(ctx, j->samples, 109, j->kink || j->nan, j->nan ? NAN : 0);
    hpml_plan d = j->d;
    d.global_batch = GLOBAL;
    if (d.exact) d.leaf = 4;
    hpml_distributed *dist = j->serial ? NULL : hpml_distribute(t, c, &d);
    if (!j->serial && !dist) return hpml_ctx_status(ctx);
    if (j->load) hpml_distribute_load(dist, j->load);
    if (j->trace && hpml_comm_rank(c) == 0) hpml_trace_start(ctx, NULL);
    hpml_loader_desc ordered = { .in_order = true };
    hpml_fit_desc    fit = { .epochs = 100, .max_steps = j->steps, .loader = j->kink || j->nan ? &ordered : NULL };
    if (j->steps > 0) hpml_trainer_fit(t, data, &fit);
    if (j->kink) { /* this step is skipped, and training continues */
        snprintf(j->said[hpml_comm_rank(c)], sizeof j->said[0], "%s", hpml_ctx_error(ctx));
        if (hpml_ctx_status(ctx) == HPML_ERR_NONFINITE) hpml_ctx_clear_error(ctx);
    }
    if (j->save) hpml_distribute_save(dist, j->save);
    if (j->trace && hpml_comm_rank(c) == 0) hpml_trace_save(ctx, j->trace);
    if (j->away == hpml_comm_rank(c) + 1) return HPML_OK;
    hpml_loader_desc own = { .ranks = 1 }; /* fit does not compare ranks, where the absence would be noticed */
    fit.max_steps = j->tail, fit.loader = j->away ? &own : NULL;
    if (j->tail) hpml_trainer_fit(t, data, &fit);
    hpml_cuda_text(ctx, j->counts[hpml_comm_rank(c)], sizeof j->counts[0]);
    hpml_distribute_report r = { 0 };
    if (!j->serial) hpml_distribute_finish(dist);
    hpml_distribute_get(dist, &r, false);
    if (hpml_comm_rank(c) == 0) j->loss = (float)r.loss, hpml_comm_counters(c, &j->sent);
    if (hpml_ctx_status(ctx) == HPML_OK) keep(j, c);
    return hpml_ctx_status(ctx);
}

static hpml_status work(hpml_comm *c, void *user)
{
    job        *j      = (job *)user;
    hpml_status status = train(c, j);
    if (!j->kink) snprintf(j->said[hpml_comm_rank(c)], sizeof j->said[0], "%s", hpml_ctx_error(hpml_comm_ctx(c)));
    return status;
}

/* A GPU for each rank, while there are enough. */
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
    l.survive = j->survive;
    l.network.ranks_per_node = j->per_node;
    l.network.inside.latency = j->d.no_overlap ? 0 : 1e-6; /* a slow link, so that exchanges run in the background */
    /* the fourth and last batch of an epoch is short, and some ranks have no samples of it */
    if (j->samples == 0) j->samples = j->kink || j->nan ? 250 : 82;
    return hpml_launch(&l, work, j, j->text, sizeof j->text);
}

static double apart(const job *a, const job *b)
{
    double most = 0;
    for (int i = 0; i < INPUTS * HIDDEN; i++) most = fmax(most, fabs((double)a->w[i] - (double)b->w[i]));
    for (int i = 0; i < HIDDEN; i++) most = fmax(most, fabs((double)a->var[i] - (double)b->var[i]));
    return most;
}

void cuda_on_cpu_fault(const char *what, long k);
#define ENSURE_GO(j, ranks)                                           \
    do {                                                              \
        if (go(&(j), ranks) != HPML_OK) printf("    %s\n", (j).text); \
        ENSURE((j).text[0] == 0 && (j).same);                         \
    } while (0)

TEST(staged_ranks_equal_one_rank)
{
    job serial = { .serial = true, .steps = 5 };
    ENSURE_GO(serial, 1);
    for (int p = 1; p <= 4; p *= 2)
        for (int variant = 0; variant < 3; variant++) {
            job j = { .steps = 5, .d = { .bucket_bytes = variant == 1, .no_overlap = variant == 2 } };
            ENSURE_GO(j, p);
            ENSURE_NEAR(apart(&serial, &j), 0, 1e-5);
        }
}

/* Every exchange that adds plain floats gives the same bits as on CPUs. */
TEST(staged_equals_cpu)
{
    for (int variant = 0; variant < 7; variant++) {
        job gpu = { .steps = 12, .samples = 250, .norm = variant != 1, .accumulate = variant == 2 ? 2 : 1,
                    .clip = variant == 1 ? 0.5f : 0 };
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
        job j = { .steps = 5 };
        if (variant < 3) j.d.codec.kind = kinds[variant];
        if (variant == 1) j.d.codec.threshold = 0.01f;
        if (variant == 3) j.d.codec.kind = HPML_CODEC_TOPK, j.d.codec.ratio = 0.1f;
        if (variant == 4) j.d.codec.kind = HPML_CODEC_LOWRANK;
        if (variant == 5) j.d.codec.kind = HPML_CODEC_ONEBIT, j.d.warm_steps = 3, j.d.delayed = true;
        job cpu = j;
        cpu.cpu = true;
        ENSURE_GO(j, 4);
        ENSURE_GO(cpu, 4);
        ENSURE_NEAR(j.loss, cpu.loss, 1e-3);
    }
}

/* Parameters that are exchanged: copied to the host and back at each meeting. */
TEST(strategies_on_parameters_train_as_on_the_host)
{
    for (int kind = HPML_STRATEGY_LOCAL; kind <= HPML_STRATEGY_GOSSIP; kind++) {
        job gpu = { .steps = 8, .norm = true, .samples = 240, .d.strategy = (hpml_strategy_kind)kind };
        if (kind != HPML_STRATEGY_GOSSIP) gpu.d.period = 2;
        job cpu = gpu;
        cpu.cpu = true;
        ENSURE_GO(gpu, 4);
        ENSURE_GO(cpu, 4);
        ENSURE_NEAR(apart(&cpu, &gpu), 0, 1e-4);
    }
}

TEST(staged_exact_is_the_same_for_all_ranks)
{
    for (int onebit = 0; onebit < 2; onebit++) {
        job one = { .steps = 4, .norm = true, .d = { .exact = true } };
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

/* On each rank's GPU another algorithm is the fastest. After the first update all ranks take the choices of rank 0, by
   NCCL or not, and time nothing more: products that come later, in the short batch of step 4, run by the first
   algorithm. Ranks at their own pace or that may be lost, and trainings of their own, keep their choices. */
TEST(ranks_take_the_choices_of_rank_0)
{
    static const char *const fastest[] = { "; algorithms 24;", "; algorithms 23;", "; algorithms 22;",
                                           "; algorithms 21;" };
    for (int variant = 0; variant < 7; variant++) {
        const bool shared = variant < 4;
        job        j = { .steps = 3, .cuda = { .precision = HPML_CUDA_BF16, .tune = true }, .nccl = variant == 1 };
        if (variant == 2) j.d.strategy = HPML_STRATEGY_LOCAL, j.d.period = 2;
        if (variant == 3) j.steps = 4;
        if (variant == 4) j.d.strategy = HPML_STRATEGY_SSP, j.d.servers = 1;
        if (variant == 5) j.serial = true;
        if (variant == 6) j.d.strategy = HPML_STRATEGY_GOSSIP, j.survive = true; /* ranks may be lost */
        nccl_on_cpu_reset(4, 0);
        cuda_on_cpu_fault("proposals", 4);
        cuda_on_cpu_fault("clock", 1000);
        for (int i = 0; i < 8; i++) cuda_on_cpu_fault((char[]){ 'u', 's', ' ', (char)('0' + i), 0 }, i < 4 ? 4 - i : 9);
        go(&j, 4);
        cuda_on_cpu_fault("none", 0);
        ENSURE(j.text[0] == 0 && (!shared || j.same));
        for (int rank = 0; rank < (variant == 4 ? 3 : 4); rank++) { /* 4: rank 3 is the server */
            const char *text = j.counts[rank];
            bool        taken = strstr(text, "; tuned ") && !strstr(text, " 0 taken over, ");
            ENSURE(taken == (shared && rank > 0));
            if (variant != 3) ENSURE(strstr(text, fastest[shared ? 0 : rank]));
            else ENSURE(!strstr(text, " 23") && !strstr(text, " 22"));
        }
    }
    nccl_on_cpu_reset(1, 0);
}

/* ---- by NCCL ---------------------------------------------------------------------------------------------------- */

/* All contexts are freed, and so is everything that they owned. */
#define ENSURE_TIDY(aborts)                                                                \
    do {                                                                                   \
        nccl_on_cpu_counts n = nccl_on_cpu_count();                                        \
        if (n.live || n.misused || n.aborted != (aborts))                                  \
            printf("    %d live, %d misused, %d aborted\n", n.live, n.misused, n.aborted); \
        ENSURE(n.live == 0 && n.misused == 0 && n.aborted == (aborts));                    \
    } while (0)

/* Plain sums and packed gradients have the bits of the exchange on the host, whether the emulation delays work or not.
   */
TEST(nccl_gives_the_bits_of_the_host)
{
    for (int variant = 0; variant < 11; variant++) {
        job host = { .steps = 5, .norm = variant == 1, .accumulate = 1 + (variant == 1), .d.algorithm = HPML_CENTRAL };
        if (variant >= 8) host.cuda.precision = variant == 8 ? HPML_CUDA_F16 : HPML_CUDA_BF16; /* gradients are f32 */
        if (variant == 10) host.d.codec.kind = HPML_CODEC_BF16;
        if (variant == 2) host.d.bucket_bytes = 1, host.clip = 0.5f;
        if (variant == 3) host.d.no_overlap = host.d.sum = true;
        if (variant >= 4 && variant < 8) host.d.codec.kind = variant == 6 ? HPML_CODEC_BF16 : HPML_CODEC_ONEBIT;
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
            ENSURE(n.made == p && n.groups >= p * linked.steps); /* NCCL was used */
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
        if (variant == 2) j.d.codec.kind = HPML_CODEC_TOPK;
        nccl_on_cpu_reset(2, 0);
        ENSURE_GO(j, 2);
        ENSURE(nccl_on_cpu_count().groups == 0);
        ENSURE_TIDY(0);
    }
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

/* The update and the kernels for its clipping norm are launched after an exchange that never ends, because the host
   does not wait before them; where the norm is checked on the host, it waits. The third exchange stalls. */
long cuda_on_cpu_count(const char *what);
TEST(nccl_clips_on_the_device)
{
    enum { STEPS = 3, NORM = 2, UPDATE = 1 }; /* kernels */
    long        launches[3];
    hpml_status s;
    for (int variant = 0; variant < 3; variant++) {
        job j = { .steps = 5, .unchecked = variant < 2, .clip = variant ? 0.5f : 0 };
        nccl_on_cpu_reset(2, 1);
        nccl_on_cpu_stall_after(STEPS - 1);
        ENSURE(failing(&j, 2, &s) < 10 && s == HPML_ERR_TIMEOUT && strstr(j.text, "not done after 1 seconds"));
        launches[variant] = cuda_on_cpu_count("launches");
    }
    ENSURE(launches[1] - launches[0] == 2 * STEPS * NORM);
    ENSURE(launches[1] - launches[2] == 2 * (NORM + UPDATE));
    for (int unchecked = 0; unchecked < 2; unchecked++) {
        job host = { .steps = 5, .clip = 0.5f, .unchecked = unchecked, .d.algorithm = HPML_CENTRAL }, linked = host;
        linked.nccl = true;
        nccl_on_cpu_reset(2, 1);
        ENSURE_GO(host, 2);
        ENSURE_GO(linked, 2);
        ENSURE(linked.hash == host.hash);
        ENSURE_TIDY(0);
    }
    nccl_on_cpu_reset(1, 0);
}

/* Two nodes of two ranks: NCCL inside, messages between. Each rank sends its share, half of the gradients, to the other
   node. */
TEST(nccl_in_nodes)
{
    enum { FLOATS = INPUTS * HIDDEN + 48 + 208 + 16 }; /* as the trainer lays gradients out, padded to 16 */
    for (int variant = 0; variant < 8; variant++) {
        job host = { .steps = variant < 4 ? 5 : 12, .per_node = 2, .d.algorithm = HPML_HIERARCHICAL };
        host.d.bucket_bytes = variant == 1, host.clip = variant == 1 ? 0.5f : 0;
        host.d.no_overlap   = variant == 2;
        host.d.sum          = variant == 3;
        if (variant >= 4) host.d.codec.kind = variant == 6 ? HPML_CODEC_BF16 : HPML_CODEC_ONEBIT;
        if (variant == 5) host.d.bucket_bytes = 1, host.d.warm_steps = 3, host.samples = 240;
        if (variant == 7) host.d.codec = (hpml_codec_desc){ .kind = HPML_CODEC_TWOBIT, .threshold = 0.01f };
        host.d.codec.min_elements = 16;
        job linked = host;
        linked.nccl = linked.link.in_nodes = true;
        nccl_on_cpu_reset(4, (unsigned)variant % 3);
        ENSURE_GO(host, 4);
        ENSURE_GO(linked, 4);
        ENSURE(nccl_on_cpu_count().made == 4 && nccl_on_cpu_count().groups >= 2 * 4 * linked.steps);
        if (variant < 4) ENSURE(linked.hash == host.hash);
        else ENSURE(linked.loss < host.loss + 2e-2f); /* sums of nodes are packed, not every rank's */
        int64_t gradients = (int64_t)sizeof(float) * FLOATS / 2 * linked.steps, between = linked.sent.between_bytes;
        if (variant < 4) ENSURE(between > gradients && between < host.sent.between_bytes + 300);
        else
            ENSURE(between < gradients * (variant == 5 || variant == 6 ? 3 : 2) / 4 &&
                   between < host.sent.between_bytes);
        ENSURE_TIDY(0);
    }
    nccl_on_cpu_reset(1, 0);
}

TEST(nccl_in_nodes_has_limits)
{
    hpml_status s;
    job uneven = { .steps = 2, .per_node = 2, .link.in_nodes = true };
    nccl_on_cpu_reset(4, 0);
    ENSURE(failing(&uneven, 3, &s) < 10 && s == HPML_ERR_UNSUPPORTED);
    ENSURE(strstr(uneven.text, "nccl in_nodes: this node has ") &&
           strstr(uneven.text, " of 3 ranks, others more or fewer"));
    job saved = { .steps = 2, .per_node = 2, .nccl = true, .link.in_nodes = true, .save = "build/nccl.safetensors" };
    saved.d.codec.kind = HPML_CODEC_ONEBIT, saved.d.codec.min_elements = 16;
    job moved = saved, other = saved; /* residuals belong to positions */
    moved.load = other.load = saved.save, moved.save = other.save = NULL;
    moved.per_node = 1, other.link.in_nodes = false;
    ENSURE_GO(saved, 4);
    ENSURE(failing(&moved, 4, &s) < 10 && s == HPML_ERR_FORMAT &&
           strstr(moved.text, "other tensors or places; save with"));
    ENSURE(failing(&other, 4, &s) < 10 && s == HPML_ERR_FORMAT &&
           strstr(other.text, "other tensors or places; save with"));
    remove(saved.save);
    /* one node: the same as without */
    job one = { .steps = 4, .link.in_nodes = true, .d.codec.kind = HPML_CODEC_ONEBIT }, all = one;
    one.nccl = all.nccl = true, all.link.in_nodes = false;
    ENSURE_GO(one, 3);
    ENSURE_GO(all, 3);
    ENSURE(one.hash == all.hash);
    ENSURE_TIDY(8);
    nccl_on_cpu_reset(1, 0);
}

/* The trace has buckets in lane 1 and ops in lane 3; the bits are the same. */
TEST(nccl_on_the_timeline)
{
    job plain = { .steps = 4, .nccl = true, .d.bucket_bytes = 1 }, traced = plain;
    char line[512];
    int  lane, nccl = 0, ops = 0;
    traced.trace = "build/nccl.trace";
    nccl_on_cpu_reset(2, 1);
    ENSURE_GO(plain, 2);
    ENSURE_GO(traced, 2);
    ENSURE(plain.hash == traced.hash);
    ENSURE_TIDY(0);
    nccl_on_cpu_reset(1, 0);
    FILE *f = fopen(traced.trace, "r");
    ENSURE(f);
    while (fgets(line, sizeof line, f)) {
        const char *at = strstr(line, "\"tid\":");
        if (!at || !strstr(line, "\"X\"") || sscanf(at, "\"tid\":%d", &lane) != 1) continue;
        nccl += lane == HPML_LANE_COMM && strstr(line, "\"nccl\""), ops += lane == HPML_LANE_GPU;
    }
    fclose(f);
    remove(traced.trace);
    ENSURE(nccl == 4 * 4 && ops >= 4 * 6); /* steps by buckets, by ops */
}

TEST(nccl_checkpoints)
{
    for (int nodes = 0; nodes < 2; nodes++) {
        job whole = { .steps = 4, .tail = 4, .nccl = true, .save = "build/nccl.safetensors",
                      .d.codec = { .kind = HPML_CODEC_ONEBIT, .min_elements = 16 } };
        if (nodes) whole.per_node = 2, whole.link.in_nodes = true;
        job rest = whole;
        rest.steps = 0, rest.save = NULL, rest.load = whole.save;
        nccl_on_cpu_reset(nodes ? 4 : 2, 1);
        ENSURE_GO(whole, nodes ? 4 : 2);
        ENSURE_GO(rest, nodes ? 4 : 2);
        ENSURE(whole.hash == rest.hash);
        ENSURE_TIDY(0);
    }
    nccl_on_cpu_reset(1, 0);
    remove("build/nccl.safetensors");
}

typedef struct meeting {
    job  j; /* first, because `place` reads it */
    char file[64], text[768];
    int  absent; /* ranks that are missing */
    bool late;   /* rank 0 is */
} meeting;

/* Contexts without a communicator exchange identities by files. */
static hpml_status by_file(hpml_comm *c, void *user)
{
    meeting       *m   = (meeting *)user;
    hpml_ctx      *ctx = hpml_comm_ctx(c);
    int            rank = hpml_comm_rank(c), p = hpml_comm_size(c);
    float          x[1000];
    if (m->late && rank == 0) usleep(200000);
    hpml_nccl     *n = hpml_nccl_create(ctx, &(hpml_nccl_desc){ .rank = rank, .ranks = p + m->absent, .file = m->file,
                                                                .timeout = m->absent ? 0.3 : 2 });
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
    /* After weights are reduced, products use the new values, in halves too. */
    hpml_tensor *in = hpml_input_2d(ctx, 1, 8), *y = hpml_linear(in, 4, &(hpml_linear_desc){ .no_bias = true });
    hpml_graph  *g = hpml_graph_create(ctx, &(hpml_graph_desc){ .outputs = &y, .output_count = 1 });
    float        before[4] = { 0 }, after[4] = { 0 };
    if (n && hpml_graph_alloc(g) == HPML_OK && hpml_tensor_set(in, x, 8) == HPML_OK) {
        if (hpml_graph_forward(g, false, 0) == HPML_OK) hpml_tensor_get(y, before, 4);
        hpml_nccl_allreduce(n, hpml_param_at(ctx, 0)->data, 32, false);
        if (hpml_graph_forward(g, false, 0) == HPML_OK) hpml_tensor_get(y, after, 4);
        for (int i = 0; i < 4 && hpml_ctx_status(ctx) == HPML_OK; i++)
            if (before[i] == 0 || fabsf(after[i] / before[i] - (float)p) > 0.1f) return HPML_ERR_STATE;
    }
    hpml_nccl_free(n);
    return hpml_ctx_status(ctx);
}

TEST(nccl_ranks_meet_by_file)
{
    meeting          m = { .j.cuda.precision = HPML_CUDA_BF16, .file = "build/nccl_id" };
    hpml_launch_desc l = { .ranks = 4, .timeout = 20, .place = place, .ctx.threads = 1 };
    nccl_on_cpu_reset(4, 1);
    ENSURE(hpml_launch(&l, by_file, &m, m.text, sizeof m.text) == HPML_OK);
    ENSURE_TIDY(0);
    ENSURE(access("build/nccl_id.0", F_OK) != 0 && access("build/nccl_id.3", F_OK) != 0); /* no file is left */
    snprintf(m.file, sizeof m.file, "/nonexistent/nccl_id");
    ENSURE(hpml_launch(&l, by_file, &m, m.text, sizeof m.text) == HPML_ERR_WRITE);
    ENSURE(strstr(m.text, "cannot write /nonexistent/nccl_id"));
    nccl_on_cpu_reset(1, 0);
    snprintf(m.file, sizeof m.file, "build/nccl_id");
    l.ranks = m.absent = 1;
    ENSURE(hpml_launch(&l, by_file, &m, m.text, sizeof m.text) == HPML_ERR_TIMEOUT);
    ENSURE(strstr(m.text, "no build/nccl_id.1 of this run after 0.3 seconds: rank 1 has not come"));
    FILE *other = fopen("build/nccl_id.1", "w");
    ENSURE(other && fputs("not a card", other) >= 0 && fclose(other) == 0);
    ENSURE(hpml_launch(&l, by_file, &m, m.text, sizeof m.text) == HPML_ERR_TIMEOUT);
    ENSURE(strstr(m.text, "no build/nccl_id.1 of this run") && remove("build/nccl_id.1") == 0);
    ENSURE(access("build/nccl_id.0", F_OK) != 0);
}

/* A run that is killed while its ranks meet, one of two or both, leaves files; the next run uses the same name, and any
   rank may be first: rank 1 finds an identity of rank 0 whose NCCL id is no longer valid. */
TEST(files_of_a_killed_run_do_not_matter)
{
    for (int come = 1; come <= 2; come++) {
        pid_t pid[2];
        char  name[32];
        nccl_on_cpu_reset(2, 1);
        for (int rank = 0; rank < come; rank++) {
            pid[rank] = fork();
            if (pid[rank] == 0) {
                hpml_cuda_desc cuda = { .workspace = 1 << 16, .device = rank };
                hpml_ctx_desc  d = { .threads = 1, .backend = hpml_backend_cuda(), .backend_desc = &cuda };
                hpml_nccl_desc card = { .rank = rank, .ranks = 2, .file = "build/nccl_id", .timeout = 30 };
                hpml_nccl_create(hpml_ctx_create(&d), &card);
                _exit(0);
            }
        }
        for (int rank = 0; rank < come; rank++) {
            snprintf(name, sizeof name, "build/nccl_id.%d", rank);
            for (int i = 0; i < 2000 && access(name, F_OK) != 0; i++) usleep(5000);
        }
        usleep(200000);
        for (int rank = 0; rank < come; rank++) kill(pid[rank], SIGKILL), waitpid(pid[rank], NULL, 0);
        ENSURE(access("build/nccl_id.0", F_OK) == 0 && (come == 1 || access("build/nccl_id.1", F_OK) == 0));
        meeting          m = { .j.cuda.precision = HPML_CUDA_BF16, .file = "build/nccl_id", .late = true };
        hpml_launch_desc l = { .ranks = 2, .timeout = 20, .place = place, .ctx.threads = 1 };
        nccl_on_cpu_reset(2, 1);
        ENSURE(hpml_launch(&l, by_file, &m, m.text, sizeof m.text) == HPML_OK);
        ENSURE_TIDY(0);
        ENSURE(access("build/nccl_id.0", F_OK) != 0 && access("build/nccl_id.1", F_OK) != 0);
    }
}

/* An exchange of arrays that the library has not allocated: a packed one and a vector, which is plain. */
typedef struct own_arrays {
    job   j; /* first, because `place` reads it */
    int   codec, nan_at; /* nan_at: run in which rank 1 has a NaN; 0: none */
    bool  host, unlinked, background;
    float result[4][6 * 50 + 7];
    int   status[4][4];
    char  text[768];
} own_arrays;

static hpml_status exchange_own(hpml_comm *c, void *user)
{
    own_arrays         *o = (own_arrays *)user;
    hpml_ctx           *ctx = hpml_comm_ctx(c);
    const hpml_backend *b = hpml_ctx_backend(ctx);
    int                 rank = hpml_comm_rank(c);
    float               host[6 * 50 + 7], *x = host;
    if (!o->host && !o->unlinked && hpml_nccl_attach(c, NULL) != HPML_OK) return hpml_ctx_status(ctx);
    if (!o->host) x = (float *)b->alloc(hpml_ctx_device(ctx), sizeof host);
    hpml_gradient      g[2] = { { "own", x, 6, 50 }, { "vector", x + 6 * 50, 1, 7 } };
    hpml_exchange_desc d = { .count = 2, .tensors = g, .codec.kind = (hpml_codec_kind)o->codec, .reduce = HPML_MEAN,
                             .on_device = !o->host };
    hpml_exchange     *e = hpml_exchange_create(c, &d);
    for (int run = 1; run <= 3 && e; run++) {
        for (int i = 0; i < 6 * 50 + 7; i++) host[i] = (float)((i * 37 + run * 11 + rank * 5) % 101 - 50);
        if (run == o->nan_at && rank == 1) host[70] = NAN;
        if (!o->host) b->write(hpml_ctx_device(ctx), x, host, sizeof host);
        o->status[rank][run] = hpml_exchange_run(e);
        if (o->status[rank][run] != HPML_OK && o->status[rank][run] != HPML_ERR_NONFINITE) break;
        if (!o->host) b->read(hpml_ctx_device(ctx), host, x, sizeof host);
    }
    memcpy(o->result[rank], host, sizeof host);
    if (o->background) hpml_job_wait(hpml_exchange_start(e));
    hpml_status status = hpml_ctx_status(ctx);
    hpml_exchange_free(e);
    if (!o->host) b->free(hpml_ctx_device(ctx), x, 0);
    return status;
}

TEST(arrays_of_a_caller_on_devices_are_exchanged_as_on_the_host)
{
    static own_arrays o[2];
    for (int codec = 0; codec <= HPML_CODEC_TWOBIT; codec++)
        for (int nan_at = 0; nan_at <= 2; nan_at += 2) {
            for (int host = 0; host < 2; host++) {
                memset(&o[host], 0, sizeof o[host]);
                o[host].codec = codec, o[host].nan_at = nan_at, o[host].host = o[host].j.cpu = host;
                hpml_launch_desc l = { .ranks = 3, .timeout = 20, .place = place, .ctx.threads = 1 };
                nccl_on_cpu_reset(3, 1);
                if (hpml_launch(&l, exchange_own, &o[host], o[host].text, sizeof o[host].text) != HPML_OK)
                    printf("    %s\n", o[host].text);
                ENSURE(o[host].text[0] == 0);
            }
            for (int r = 0; r < 3; r++) {
                ENSURE(memcmp(o[0].status[r], o[1].status[r], sizeof o[0].status[r]) == 0);
                for (int i = 0; i < 6 * 50 + 7; i++) ENSURE(o[0].result[r][i] == o[1].result[r][i]);
            }
        }
    hpml_launch_desc l = { .ranks = 3, .timeout = 20, .place = place, .ctx.threads = 1 };
    o[0].background = true;
    nccl_on_cpu_reset(3, 1);
    ENSURE(hpml_launch(&l, exchange_own, &o[0], o[0].text, sizeof o[0].text) == HPML_ERR_UNSUPPORTED);
    ENSURE(strstr(o[0].text, "with .on_device only hpml_exchange_run"));
    o[0].unlinked = true;
    ENSURE(hpml_launch(&l, exchange_own, &o[0], o[0].text, sizeof o[0].text) == HPML_ERR_UNSUPPORTED);
    ENSURE(strstr(o[0].text, "a device link between all ranks (none: call hpml_nccl_attach"));
}

TEST(nccl_errors)
{
    hpml_status s;
    job missing = { .steps = 2, .link.library = "/nonexistent/libnccl.so.2" };
    nccl_on_cpu_reset(2, 0);
    ENSURE(failing(&missing, 2, &s) < 10 && s == HPML_ERR_UNSUPPORTED);
    ENSURE(strstr(missing.text, "NCCL cannot be loaded") && strstr(missing.text, "install libnccl2 or set"));
    job old = { .steps = 2, .link.library = "build/old_nccl.so" }, none = { .steps = 2, .link.library = "libm.so.6" };
    ENSURE(failing(&old, 2, &s) < 10 && s == HPML_ERR_UNSUPPORTED);
    ENSURE(strstr(old.text, "build/old_nccl.so is NCCL 2.8.4; hpml needs 2.14 or later"));
    ENSURE(failing(&none, 2, &s) < 10 && s == HPML_ERR_UNSUPPORTED && strstr(none.text, "libm.so.6 is not NCCL"));
    job crowd = { .steps = 2, .crowd = true };
    ENSURE(failing(&crowd, 2, &s) < 10 && s == HPML_ERR_ARGUMENT);
    ENSURE(strstr(crowd.text, "ranks 0 and 1 are both on GPU 0 of host "));
    ENSURE(strstr(crowd.text, "hpml_cuda_desc.device = rank % hpml_cuda_device_count()"));
    ENSURE(nccl_on_cpu_count().made == 0); /* found before NCCL is asked */
    job cpu = { .steps = 2, .cpu = true };
    ENSURE(failing(&cpu, 2, &s) < 10 && s == HPML_ERR_UNSUPPORTED &&
           strstr(cpu.text, "its context needs hpml_backend_cuda()"));
    nccl_on_cpu_never_ready();
    job late = { .steps = 2 };
    ENSURE(failing(&late, 2, &s) < 10 && s == HPML_ERR_TIMEOUT);
    ENSURE(strstr(late.text, "NCCL communicator of 2 ranks: not done after 1 seconds"));
    ENSURE_TIDY(2);
    nccl_on_cpu_reset(2, 0);
    nccl_on_cpu_error_after(7);
    job broken = { .steps = 20 };
    ENSURE(failing(&broken, 2, &s) < 10 && s == HPML_ERR_PEER);
    ENSURE(strstr(broken.text, "NCCL ") &&
           strstr(broken.text, "remote process exited or there was a network error: socket"));
    ENSURE_TIDY(2);
    nccl_on_cpu_reset(1, 0);
}

/* After an error between the beginning and the end of a group, no group is open for the next context of this thread. */
TEST(nccl_groups_end_with_their_context)
{
    float one = 1;
    nccl_on_cpu_reset(1, 0);
    for (int turn = 0; turn < 2; turn++) {
        hpml_cuda_desc cuda = { .workspace = 1 << 16 };
        hpml_ctx_desc  d   = { .threads = 1, .backend = hpml_backend_cuda(), .backend_desc = &cuda };
        hpml_nccl_desc id  = { .ranks = 1, .file = "build/nccl_id", .timeout = 2 };
        hpml_ctx      *ctx = hpml_ctx_create(&d);
        hpml_nccl     *n   = hpml_nccl_create(ctx, &id);
        hpml_tensor   *x   = hpml_tensor_create_1d(ctx, 1);
        ENSURE(hpml_tensor_set(x, &one, 1) == HPML_OK && hpml_nccl_link_begin(n) == HPML_OK);
        ENSURE(hpml_nccl_link_allreduce(n, x->data, 1, false) == HPML_OK);
        if (turn == 0) hpml_ctx_fail(ctx, HPML_ERR_STATE, "something else");
        ENSURE(hpml_nccl_link_end(n) == (turn == 0 ? HPML_ERR_STATE : HPML_OK));
        for (int again = 0; turn == 0 && again < 2; again++) { /* half of a group was not sent: the communicator cannot
                                                                  be used any more */
            hpml_ctx_clear_error(ctx);
            ENSURE(hpml_nccl_link_begin(n) == HPML_ERR_COMM);
            ENSURE(strstr(hpml_ctx_error(ctx), again ? "NCCL was given up"
                                                     : "an earlier group of calls was not ended"));
        }
        hpml_ctx_free(ctx);
        ENSURE(nccl_on_cpu_count().groups == turn + 1 && nccl_on_cpu_count().live == 0);
    }
    nccl_on_cpu_reset(1, 0);
}

/* Every remaining rank gets an error, before the deadline, when a rank ends without a message or a kernel does not end.
   */
TEST(nccl_waits_end)
{
    hpml_status s;
    int         aborted = 0;
    for (int variant = 0; variant < 8; variant++) {
        job lost = { .steps = 3, .tail = 5, .away = variant & 1 ? 0 : 2, .per_node = variant & 2 ? 2 : 0 };
        lost.link.in_nodes = variant & 2;
        if (variant & 4) lost.d.codec.kind = HPML_CODEC_ONEBIT;
        nccl_on_cpu_reset(4, 1);
        if (variant & 1) nccl_on_cpu_stall_after(variant & 4 ? 7 : 3);
        double took = failing(&lost, 4, &s);
        ENSURE(took < 10 && (s == HPML_ERR_TIMEOUT || s == HPML_ERR_PEER));
        ENSURE(strstr(lost.text, "not done after 1 seconds: has a rank died"));
        for (int r = 0; r < 4; r++) ENSURE(r == 1 && lost.away ? !lost.said[r][0] : lost.said[r][0]);
        for (int r = 0; r < 4 && !lost.link.in_nodes; r++) /* a rank that gets the error of another rank names it */
            ENSURE((r == 1 && lost.away) || strstr(lost.said[r], "not done after 1 seconds: has a rank died"));
        aborted = nccl_on_cpu_count().aborted;
        ENSURE(aborted >= (lost.away ? 3 : 4) && nccl_on_cpu_count().live == 0 && nccl_on_cpu_count().misused == 0);
    }
    nccl_on_cpu_reset(1, 0);
}

/* A NaN in a gradient, with a finite loss: every rank names layer, step and rank, and residuals are finite again. */
TEST(a_nan_over_the_link_is_named)
{
    for (int variant = 0; variant < 4; variant++) { /* the host's exchange; NCCL; NCCL in nodes; on CPUs */
        job j = { .steps = 10, .tail = 5, .kink = true, .nccl = variant == 1 || variant == 2, .cpu = variant == 3 };
        j.per_node = variant == 2 ? 2 : 0, j.link.in_nodes = variant == 2;
        j.d.codec.kind = HPML_CODEC_ONEBIT, j.d.bucket_bytes = variant == 1, j.d.codec.min_elements = 16;
        nccl_on_cpu_reset(4, (unsigned)variant);
        ENSURE_GO(j, 4);
        for (int r = 0; r < 4; r++)
            ENSURE(strstr(j.said[r],
                          variant == 2 ? ", step 5: the gradient of \"linear0.weight\" is NaN or infinite on rank"
                                       : ", step 5: the gradient of \"linear0.weight\" is NaN or infinite on rank 2"));
        if (j.nccl) ENSURE_TIDY(0);
    }
    nccl_on_cpu_reset(1, 0);
}

/* A NaN in one rank's batch that the relu of cuBLASLt turns into 0: the sum of the gradients is NaN, every rank's
   update keeps it out of the parameters, and every rank names parameter and step, in the next step or when fit returns.
   */
TEST(a_nan_that_relu_hides_is_named_on_every_rank)
{
    for (int variant = 0; variant < 6; variant++) { /* the host's exchange, NCCL, in nodes; in the last step */
        job j = { .steps = variant < 3 ? 5 : 10, .nan = true, .nccl = variant % 3 > 0 };
        j.per_node = variant % 3 == 2 ? 2 : 0, j.link.in_nodes = variant % 3 == 2;
        nccl_on_cpu_reset(4, (unsigned)variant);
        hpml_status status = go(&j, 4);
        ENSURE(status == HPML_ERR_NONFINITE || status == HPML_ERR_PEER);
        for (int r = 0, named = 0; r < 4; r++) {
            bool mine = strstr(j.said[r], "step 5: the first NaN or infinity is in the gradient of \"linear0.");
            named += mine;
            if (!mine) printf("    variant %d, rank %d: %s\n", variant, r, j.said[r]);
            ENSURE(mine || (named > 0 && variant >= 3));
        }
        ENSURE(nccl_on_cpu_count().live == 0 && nccl_on_cpu_count().misused == 0); /* a failed rank aborts its own */
    }
    nccl_on_cpu_reset(1, 0);
}
