/* Many workers train as one: the same steps, the same bits where promised, nothing lost between 4 ranks and 2. */
#include "../hpml.h"

/* Each rank's communicator reads a clock of its own, as on several machines: `ahead` seconds ahead of the true one. */
static __thread double ahead;
static double own_now(void) { return hpml_now() + ahead; }
#define hpml_now own_now
#define HPML_COMM_IMPLEMENTATION /* private functions; hpml.h's body is compiled apart */
#include "../hpml_comm.h"
#undef hpml_now
#include "toy_points.h"
#include "test.h"
#include "trace.h"
#if !SLOW_BUILD
#include "mlp.h"
#endif

#include <stddef.h>

/* A training of points by one of a few models, in parts: what is trained, how, by which ranks, what goes wrong on
   purpose, and what rank 0 has in the end. */
typedef struct model_desc {
    int  hidden;  /* units; 0: 64 */
    bool norm, conv, plain; /* batchnorm; a convolution; plain: no dropout */
    bool steep;   /* gradients that overflow f16 at first */
    int  odd;     /* this rank, + 1, has one unit more */
} model_desc;

typedef struct train_desc {
    int      samples, steps, tail; /* 0: 250, 25; tail: steps after saving or loading */
    int32_t  accumulate;
    hpml_opt optimizer;
    double   lr, momentum;
} train_desc;

typedef struct run_desc {
    bool       serial;  /* without hpml_distribute */
    int32_t    threads; /* of each rank; 0: 1 */
    hpml_dtype store;   /* of results of ops */
    bool       apart;   /* ranks begin with other numbers */
    bool       watch;   /* compares the ranks' parameters after each step */
} run_desc;

typedef struct fault_desc {
    int  poison; /* this rank, + 1, has a NaN in its data */
    bool smudge; /* rank 1 has a NaN within one of its gradients */
} fault_desc;

typedef struct files { const char *save, *load; } files;

typedef struct outcome {
    bool     same;        /* parameters of all ranks in the end */
    bool     parted;      /* .watch: or not, after some step */
    int      skipped;     /* .watch: steps */
    bool     background;  /* jobs exchanged */
    uint64_t hash;
    float    w[64], var[64]; /* of the first layer; var: batchnorm's running variance */
    hpml_distribute_report report;
} outcome;

typedef struct job {
    hpml_plan            d;
    model_desc           model;
    train_desc           train;
    run_desc             run;
    fault_desc           fault;
    files                file;
    outcome              got;
    char                 text[512];
} job;

static hpml_trainer *trainer(hpml_ctx *ctx, hpml_tensor *x, hpml_tensor *y, float lr)
{
    return hpml_trainer_create(ctx, &(hpml_trainer_desc){ .input = x, .output = y, .lr = lr });
}

/* Calls `grad` for each final gradient, in place of hpmlc_dist_grad. */
static void hook(hpml_trainer *t, void *user, hpml_hook_fn *grad)
{
    hpml_hooks h = { .user = user, .run = hpmlc_dist_run, .grad = grad, .update = hpmlc_dist_update };
    hpml_trainer_detach(t, user);
    hpml_trainer_attach(t, &h);
}

static hpml_tensor *model(const model_desc *m, hpml_tensor *x, int rank)
{
    if (m->conv) { /* batchnorm over pixels, the relu inside */
        const int64_t    shape[4] = { x->shape[0], 1, 4, 5 };
        hpml_conv2d_desc conv = { .kernel_h = 3, .padding_h = 1 };
        x = hpml_conv2d(hpml_reshape(x, 4, shape), 8, &conv);
        x = hpml_batchnorm(x, &(hpml_norm_desc){ .activation = HPML_ACT_RELU });
        return hpml_linear(hpml_flatten(x), CLASSES, NULL);
    }
    hpml_linear_desc relu = { .activation = m->norm ? HPML_ACT_NONE : HPML_ACT_RELU };
    hpml_tensor     *h = hpml_linear(x, (m->hidden ? m->hidden : 64) + (m->odd == rank + 1), &relu);
    if (m->norm) h = hpml_relu(hpml_batchnorm(h, NULL));
    hpml_tensor *y = hpml_linear(m->plain ? h : hpml_dropout(h, 0.1f), CLASSES, NULL);
    return m->steep ? hpml_scale(y, 64, 0) : y;
}

typedef struct watcher { hpml_comm *c; bool parted; int skipped; } watcher;

static int each_step(const hpml_step_info *info, void *user)
{
    watcher *w = (watcher *)user;
    if (!same_params(w->c)) w->parted = true;
    w->skipped += info->skipped;
    return 0;
}

static hpml_status smudge(void *user, hpml_trainer *t, const hpml_moment *at)
{
    hpml_distributed *d = (hpml_distributed *)user;
    (void)t;
    if (d->c->rank == 1 && at->param == 0) hpml_param_at(d->ctx, 0)->grad[3] = (float)NAN;
    return HPML_OK;
}

static hpml_trainer *trainer_of(const job *j, hpml_comm *c)
{
    const train_desc *how   = &j->train;
    hpml_ctx         *ctx   = hpml_comm_ctx(c);
    int               p     = hpml_comm_size(c), rank = hpml_comm_rank(c);
    int64_t           batch = j->d.exact ? GLOBAL : (GLOBAL + p - 1) / p;
    hpml_tensor      *x     = hpml_input_2d(ctx, batch, INPUTS);
    hpml_trainer_desc d     = { .input = x, .output = model(&j->model, x, rank), .lr = how->lr ? (float)how->lr : 0.1f,
                                .momentum = (float)how->momentum, .accumulate = how->accumulate,
                                .optimizer = how->optimizer };
    hpml_trainer     *t     = hpml_trainer_create(ctx, &d);
    for (int i = 0; j->run.apart && i < hpml_param_count(ctx); i++)
        for (int64_t k = 0; k < hpml_tensor_count(hpml_param_at(ctx, i)); k++)
            hpml_param_at(ctx, i)->data[k] += (float)rank;
    return t;
}

static hpml_distributed *distribute(const job *j, hpml_trainer *t, hpml_comm *c)
{
    hpml_plan d = j->d;
    d.global_batch = GLOBAL;
    if (d.exact) d.leaf = 4;
    hpml_distributed *dist  = hpml_distribute(t, c, &d);
    hpml_hooks        hooks = { .user = dist, .run = hpmlc_dist_run, .grad = smudge, .update = hpmlc_dist_update };
    if (dist && j->fault.smudge) {
        hpml_trainer_detach(t, dist);
        hpml_trainer_attach(t, &hooks);
    }
    return dist;
}

/* What rank 0 has; collective. */
static void keep(job *j, hpml_comm *c, hpml_distributed *d, const watcher *w)
{
    hpml_ctx *ctx  = hpml_comm_ctx(c);
    bool      same = same_params(c);
    outcome  *got  = &j->got;
    if (hpml_comm_rank(c) != 0) return;
    got->same       = same;
    got->parted     = w->parted;
    got->skipped    = w->skipped;
    got->background = d && d->background;
    got->hash       = hpml_param_hash(ctx);
    memcpy(got->w, hpml_param_at(ctx, 0)->data, sizeof got->w);
    if (j->model.norm || j->model.conv) {
        hpml_tensor *var = hpml_param_at(ctx, 5);
        memcpy(got->var, var->data, (size_t)hpml_tensor_count(var) * sizeof(float));
    }
    hpml_distribute_get(d, &got->report, false);
}

static hpml_status work(hpml_comm *c, void *user)
{
    job              *j      = (job *)user;
    watcher           w      = { c, false, 0 };
    hpml_ctx         *ctx    = hpml_comm_ctx(c);
    bool              poison = j->fault.poison == hpml_comm_rank(c) + 1;
    hpml_trainer     *t      = trainer_of(j, c);
    hpml_dataset     *data   = points(ctx, j->train.samples, 0, poison ? j->train.samples : 0, (float)NAN);
    hpml_distributed *dist   = j->run.serial ? NULL : distribute(j, t, c);
    hpml_fit_desc     fit    = { .epochs = 100, .max_steps = j->train.steps, .user = &w };
    if (!j->run.serial && !dist) return hpml_ctx_status(ctx);
    if (j->run.watch) fit.on_step = each_step;
    if (j->file.load) hpml_distribute_load(dist, j->file.load);
    if (j->train.steps > 0) hpml_trainer_fit(t, data, &fit);
    if (j->file.save) hpml_distribute_save(dist, j->file.save);
    if (j->train.tail) hpml_trainer_fit(t, data, &(hpml_fit_desc){ .epochs = 100, .max_steps = j->train.tail });
    if (hpml_ctx_status(ctx) == HPML_OK) keep(j, c, dist, &w);
    return hpml_ctx_status(ctx);
}

static hpml_status go(job *j, int ranks, hpml_transport_kind transport, const hpml_network *network)
{
    hpml_launch_desc l = { .transport = transport, .ranks = ranks, .timeout = 20,
                           .ctx = { .seed = 3, .threads = j->run.threads ? j->run.threads : 1,
                                    .activation_dtype = j->run.store } };
    if (network) l.network = *network;
    if (j->train.samples == 0) j->train.samples = 250; /* the last batch of an epoch is short */
    if (j->train.steps == 0) j->train.steps = SLOW_BUILD ? 12 : 25; /* past the short batch */
    return hpml_launch(&l, work, j, j->text, sizeof j->text);
}

static bool ran(job *j, int ranks, const hpml_network *network)
{
    return go(j, ranks, HPML_TRANSPORT_THREADS, network) == HPML_OK;
}

/* A network with a latency: exchanges are done in the background. Without one they are not, if all cores compute. */
static const hpml_network linked = { .inside.latency = 1e-6 };

static double apart(const job *a, const job *b)
{
    double most = 0;
    for (int i = 0; i < 64; i++) most = fmax(most, fabs((double)a->got.w[i] - (double)b->got.w[i]));
    return most;
}

TEST(ranks_equal_one_rank)
{
    const int steps = SLOW_BUILD ? 25 : 100;
    job serial = { .run.serial = true, .train.momentum = 0.9, .train.steps = steps };
    ENSURE(ran(&serial, 1, NULL));
    for (int p = 1; p <= 8; p += ALL_CASES ? 1 : 3)
        for (int variant = 0; variant < 6; variant++) {
            job j = { .train.momentum = 0.9, .train.steps = steps, .run.apart = variant % 2, .run.watch = variant == 4,
                      .d = { .bucket_bytes = variant % 3 == 1 ? 1 : 0, .no_overlap = variant == 2,
                             .algorithm = variant == 3 ? HPML_RING : HPML_AUTO } };
            ENSURE(go(&j, p, HPML_TRANSPORT_THREADS, variant < 3 ? &linked : NULL) == HPML_OK);
            ENSURE(j.got.same && !j.got.parted);
            ENSURE_NEAR(apart(&serial, &j), 0, 1e-5);
        }
}

/* Two ranks that keep all cores busy exchange without a background thread: the same bits by all algorithms between two,
   in short batches as well. */
TEST(two_ranks_without_a_background_thread)
{
    static const hpml_opt opt[] = { HPML_OPT_SGD, HPML_OPT_ADAMW, HPML_OPT_LAMB };
    for (int variant = 0; variant < 9; variant++) {
        job j = { .train.momentum = 0.9, .run.threads = hpmlc_cores(1), .train.optimizer = opt[variant / 3],
                  .train.accumulate = variant % 3 + 1, .train.samples = variant % 2 ? 250 : 25,
                  .train.lr = opt[variant / 3] == HPML_OPT_SGD ? 0.1 : 0.003, .model.norm = variant == 2,
                  .d.sum = variant == 1 };
        job b = j;
        b.d.algorithm = HPML_BUTTERFLY;
        ENSURE(ran(&j, 2, NULL) && ran(&b, 2, NULL));
        ENSURE(!j.got.background && !b.got.background && j.got.same && j.got.hash == b.got.hash);
        double mine = j.got.report.bytes, theirs = b.got.report.bytes;
        ENSURE(mine > 0 && fabs(mine - theirs) < 0.1 * theirs);
    }
}

TEST(ranks_without_samples_take_part)
{
    /* batches of 24 and 2 */
    job j = { .train.samples = 26, .model.plain = true }, serial = j;
    serial.run.serial = true;
    ENSURE(ran(&serial, 1, NULL));
    ENSURE(ran(&j, 6, NULL));
    ENSURE(j.got.same);
    ENSURE_NEAR(apart(&serial, &j), 0, 1e-5);
}

/* Batches of 24, the last of 10 or of 2: in a batch of 2, ranks beyond the second have no samples. */
TEST(batchnorm_over_the_global_batch)
{
    for (int kind = 0; kind < 5; kind++) { /* plain, conv, accumulate, double buffering, a last batch of 2 */
        static const int samples[] = { 0, 0, 240, 0, 26 };
        job serial = { .run.serial = kind != 3,
                       .model = { .norm = kind % 3 != 1, .conv = kind % 3 == 1, .plain = true },
                       .train = { .accumulate = kind == 2 ? 2 : 0, .samples = samples[kind], .steps = 20,
                                  .momentum = 0.9 },
                       .d.delayed = kind == 3 };
        serial.d.sync_batchnorm = true;
        ENSURE(ran(&serial, 1, NULL));
        for (int p = 1; p <= 4; p++) {
            job j = serial;
            j.run.serial = false, j.d.no_overlap = p == 3;
            hpml_status status = go(&j, p, p == 4 && kind < 2 ? HPML_TRANSPORT_CLOCK : HPML_TRANSPORT_THREADS, NULL);
            if (status != HPML_OK || apart(&serial, &j) > 1e-5)
                printf("    kind %d, %d ranks: %g %s\n", kind, p, apart(&serial, &j), j.text);
            ENSURE(status == HPML_OK && j.got.same);
            ENSURE_NEAR(apart(&serial, &j), 0, 1e-5);
            for (int i = 0; i < 64; i++) {
                double want = (double)serial.got.var[i];
                ENSURE_NEAR(want, (double)j.got.var[i], 1e-5 * (1 + want));
            }
        }
        job own = serial; /* the control: each rank with its own statistics */
        own.run.serial = own.d.sync_batchnorm = false;
        ENSURE(ran(&own, 2, NULL) && apart(&serial, &own) > 1e-4);
    }
}

/* A fit ends within an update: the ranks' running statistics, which the last micro-batch has changed, become their
   means. */
static hpml_status part_of_an_update(hpml_comm *c, void *user)
{
    const char  *text = (const char *)user;
    hpml_ctx    *ctx = hpml_comm_ctx(c);
    hpml_plan    plan = { 0 };
    float        x[12 * 4], y[12];
    double       ends[2], mean;
    const int64_t shape[1] = { 4 };
    for (int i = 0; i < 12 * 4; i++) x[i] = (float)(i * 37 % 11);
    for (int i = 0; i < 12; i++) y[i] = (float)i / 12;
    hpml_plan_parse(text, &plan, NULL, 0);
    hpml_tensor      *in = hpml_input_2d(ctx, 2, 4), *h = hpml_batchnorm(in, &(hpml_norm_desc){ .name = "bn" });
    hpml_trainer     *t = hpml_trainer_create(ctx, &(hpml_trainer_desc){
        .input = in, .output = hpml_linear(h, 1, NULL), .loss = HPML_LOSS_MSE, .lr = 0.01f, .accumulate = 2 });
    hpml_dataset     *data = hpml_dataset_create(ctx, 12, HPML_DTYPE_F32, 1, shape, x, HPML_DTYPE_F32, 1, y);
    hpml_distributed *d = hpml_distribute(t, c, &plan);
    hpml_trainer_fit(t, data, &(hpml_fit_desc){ .epochs = 1 });
    hpml_tensor *running = hpml_param_find(ctx, "bn.running_mean");
    mean = (double)running->data[0];
    hpml_allreduce(c, &mean, 1, &(hpml_allreduce_desc){ .element = HPML_ELEMENT_F64, .reduce = HPML_MEAN });
    hpml_distribute_finish(d);
    ends[0] = (double)running->data[0];
    ends[1] = -ends[0];
    hpml_allreduce(c, ends, 2, &(hpml_allreduce_desc){ .element = HPML_ELEMENT_F64, .reduce = HPML_MAX });
    if (ends[0] != -ends[1]) return hpml_ctx_fail(ctx, HPML_ERR_STATE, "from %g to %g", -ends[1], ends[0]);
    if (!(fabs(ends[0] - mean) < 1e-6)) return hpml_ctx_fail(ctx, HPML_ERR_STATE, "%g is not %g", ends[0], mean);
    return hpml_ctx_status(ctx);
}

TEST(running_statistics_after_part_of_an_update)
{
    static const char *const plans[] = { "", "delayed=1", "shard=1", "shard=2", "strategy=local", "strategy=block",
                                         "strategy=elastic", "strategy=gossip" };
    for (int p = 0; p < 8; p++) {
        char      text[512];
        hpml_plan plan = { 0 };
        hpml_plan_parse(plans[p], &plan, NULL, 0);
        hpml_launch_desc  l = { .ranks = 2, .timeout = 30, .plan = &plan, .ctx.threads = 1 };
        const hpml_status status = hpml_launch(&l, part_of_an_update, (void *)(uintptr_t)plans[p], text, sizeof text);
        if (status != HPML_OK) printf("    %s: %s\n", plans[p], text);
        ENSURE(status == HPML_OK);
    }
}

TEST(accumulation)
{
    job one = { .train.accumulate = 3, .train.samples = 240 }, four = { .train.accumulate = 3, .train.samples = 240 };
    ENSURE(ran(&one, 1, NULL) && ran(&four, 4, &linked));
    ENSURE_NEAR(apart(&one, &four), 0, 1e-5);
    job plain = { .train.samples = 240 }; /* three batches, one exchange */
    ENSURE(ran(&plain, 4, &linked) && plain.got.report.bytes > 0 && plain.got.report.bytes == four.got.report.bytes);
}

TEST(a_sum_is_as_many_means_as_there_are_ranks)
{
    job mean = { .train.samples = 240, .train.momentum = 0.9 },
        sum = { .train.samples = 240, .train.momentum = 0.9, .train.lr = 0.1 / 4, .d.sum = true };
    ENSURE(ran(&mean, 4, NULL) && ran(&sum, 4, NULL));
    ENSURE_NEAR(apart(&mean, &sum), 0, 1e-5);
}

TEST_PLAIN(exact_sums_have_the_same_bits)
{
    static const int ranks[] = { 1, 2, 3, 4, 6, 8 };
    uint64_t         hash[4] = { 0 };
    /* plain, batchnorm, 1 bit, conv; in buckets of all sizes, during the backward pass and after */
    for (int kind = 0; kind < 4; kind++)
        for (int r = 0; r < 6; r += ALL_CASES ? 1 : 2)
            EACH_ALGORITHM(a, HPML_AUTO) {
                static const int64_t bytes[] = { 0, 1, 3000 };
                job j = { .model.norm = kind == 1, .model.conv = kind == 3, .train.momentum = 0.9,
                          .d = { .exact = true, .algorithm = (hpml_algorithm)a, .bucket_bytes = bytes[(r + a) % 3],
                                 .no_overlap = (r + a) % 4 == 0 } };
                if (kind == 2) j.d.codec.kind = HPML_CODEC_ONEBIT;
                if (kind == 2 && ranks[r] > 6) continue; /* six leaves */
                if (a > 1 && kind > 0) continue;
                ENSURE(go(&j, ranks[r], a == HPML_RING ? HPML_TRANSPORT_CLOCK : HPML_TRANSPORT_THREADS,
                          a % 2 ? NULL : &linked) == HPML_OK);
                if (hash[kind] == 0) hash[kind] = j.got.hash;
                if (hash[kind] != j.got.hash)
                    printf("    kind %d, %d ranks, %s\n", kind, ranks[r], hpml_algorithm_name((hpml_algorithm)a));
                ENSURE(j.got.same && hash[kind] == j.got.hash);
            }
    ENSURE(hash[0] != hash[1] && hash[0] != hash[2]);
}

TEST(exact_equals_serial)
{
    job serial = { .run.serial = true, .train.momentum = 0.9 }, exact = { .train.momentum = 0.9, .d.exact = true };
    ENSURE(ran(&serial, 1, NULL) && ran(&exact, 3, NULL));
    ENSURE_NEAR(apart(&serial, &exact), 0, 1e-5);
}

/* A program whose only call about ranks is hpml_distribute, and wrong ways to pass data to it. */
typedef enum sharing { UNCHANGED, BY_HAND, BY_HAND_TWICE, OTHER_SEED, OTHER_EPOCHS, SHARINGS } sharing;
typedef struct shared {
    sharing  how;
    bool     exact;
    int      samples;
    int64_t  steps[4];
    int64_t  seen[4]; /* samples that each rank has trained on */
    uint64_t hash;
    double   loss;
    char     text[512];
} shared;

static int count_samples(const hpml_step_info *info, void *user)
{
    *(int64_t *)user += info->samples;
    return 0;
}

static hpml_status share(hpml_comm *c, void *user)
{
    shared       *s    = (shared *)user;
    hpml_ctx     *ctx  = hpml_comm_ctx(c);
    int           rank = hpml_comm_rank(c), p = hpml_comm_size(c);
    hpml_tensor  *in   = hpml_input_2d(ctx, 8, INPUTS);
    hpml_trainer *t    = trainer(ctx, in, hpml_linear(hpml_tanh(hpml_linear(in, 9, NULL)), CLASSES, NULL), 0.1f);
    hpml_dataset *data = points(ctx, s->samples, 0, 0, 0);
    hpml_metrics  m    = { 0 };
    /* as many samples a step on any number of ranks, so that the serial training is the same one */
    hpml_distribute(t, c, &(hpml_plan){ .global_batch = 8, .exact = s->exact, .leaf = s->exact ? 1 : 0 });
    hpml_loader_desc load = { .batch = 8 };
    hpml_fit_desc    fit = { .epochs = 3, .loader = &load, .on_step = count_samples, .user = &s->seen[rank] };
    if (s->how == BY_HAND || s->how == BY_HAND_TWICE)
        data = hpml_dataset_slice(data, s->samples * rank / p, s->samples / p);
    if (s->how == BY_HAND) load.ranks = 1, load.batch = 8 / p;
    if (s->how == OTHER_SEED) load.seed = (uint64_t)rank + 1;
    if (s->how == OTHER_EPOCHS) fit.epochs = 3 + rank;
    if (hpml_trainer_fit(t, data, &fit) != HPML_OK) return hpml_ctx_status(ctx);
    s->steps[rank] = hpml_trainer_step_count(t);
    hpml_trainer_evaluate(t, points(ctx, s->samples, 0, 0, 0), &m);
    if (rank == 0) s->hash = hpml_param_hash(ctx), s->loss = m.loss;
    return hpml_ctx_status(ctx);
}

TEST(fit_takes_each_ranks_share)
{
    double   loss = 0;
    uint64_t hash = 0;
    for (int exact = 0; exact < 2; exact++)
        for (int p = 1; p <= 4; p++) { /* 61 samples: the last batch has 5, of which a rank of 4 has 1 or 2 */
            shared s = { .samples = 61, .exact = exact };
            ENSURE(hpml_launch(&(hpml_launch_desc){ .ranks = p, .ctx.threads = 1 }, share, &s, s.text, sizeof s.text)
                   == HPML_OK);
            int64_t seen = 0;
            for (int r = 0; r < p; r++) seen += s.seen[r];
            ENSURE(seen == 3 * 61 && s.steps[0] == 3 * 8 && s.steps[p - 1] == 3 * 8);
            if (p == 1) loss = s.loss, hash = s.hash;
            ENSURE(exact ? s.hash == hash : fabs(s.loss - loss) < 1e-5 * loss);
        }
}

TEST(data_that_is_divided_by_hand_is_not_divided_again)
{
    for (int how = UNCHANGED; how < SHARINGS; how++) {
        shared      s = { .how = (sharing)how, .samples = 64 };
        hpml_status status = hpml_launch(&(hpml_launch_desc){ .ranks = 2, .ctx.threads = 1, .timeout = 20 }, share, &s,
                                         s.text, sizeof s.text);
        if (how == UNCHANGED || how == BY_HAND) ENSURE(status == HPML_OK && s.seen[0] == 96 && s.seen[1] == 96);
        else ENSURE(status == HPML_ERR_ARGUMENT && strstr(s.text, "same data set") && strstr(s.text, ".ranks = 1") &&
                    s.seen[0] + s.seen[1] == 0);
    }
}

/* Results of ops stored in halves: ranks train as one does, up to the rounding of gradients, which have another scale
   where a rank has fewer samples; leaf by leaf with the same bits. In f16 all ranks find the same overflows. */
TEST(ranks_with_results_in_halves_train_as_one)
{
    static const double near[] = { 0, 0.02, 0.005 };
    for (int store = HPML_DTYPE_BF16; store <= HPML_DTYPE_F16; store++)
        for (int steep = 0; steep < 2; steep++) {
            job one = { .run = { .serial = true, .store = (hpml_dtype)store }, .model.steep = steep,
                        .train.lr = steep ? 1e-4 : 0.1 };
            ENSURE(ran(&one, 1, NULL));
            for (int p = 2; p <= 4; p++) {
                job j = one;
                j.run.serial = false, j.run.watch = true, j.run.threads = p == 2 ? hpmlc_cores(1) : 1;
                ENSURE(ran(&j, p, p == 3 ? &linked : NULL) && j.got.same && !j.got.parted);
                ENSURE((j.got.skipped > 0) == (steep && store == HPML_DTYPE_F16));
                ENSURE(apart(&one, &j) > 0);
                ENSURE_NEAR(apart(&one, &j), 0, near[store]);
            }
        }
    uint64_t hash = 0;
    for (int p = 1; p <= 4; p++) {
        job exact = { .run.store = HPML_DTYPE_BF16, .d.exact = true };
        ENSURE(ran(&exact, p, NULL) && exact.got.same && (p == 1 || exact.got.hash == hash));
        hash = exact.got.hash;
    }
    job late = { .run.store = HPML_DTYPE_F16, .d.delayed = true },
        exact = { .run.store = HPML_DTYPE_F16, .d.exact = true },
        packed = { .run.store = HPML_DTYPE_F16, .d.codec.kind = HPML_CODEC_ONEBIT };
    ENSURE(go(&late, 2, HPML_TRANSPORT_THREADS, NULL) == HPML_ERR_UNSUPPORTED && strstr(late.text, "with delayed"));
    ENSURE(go(&exact, 2, HPML_TRANSPORT_THREADS, NULL) == HPML_ERR_UNSUPPORTED &&
           strstr(exact.text, "in f16 gradients overflow"));
    ENSURE(go(&packed, 2, HPML_TRANSPORT_THREADS, NULL) == HPML_ERR_UNSUPPORTED &&
           strstr(packed.text, "in f16 gradients overflow"));
    packed.run.store = HPML_DTYPE_BF16;
    ENSURE(ran(&packed, 2, NULL) && packed.got.same);
}

TEST(codecs_train)
{
    static const hpml_codec_kind kind[] = { HPML_CODEC_BF16, HPML_CODEC_ONEBIT, HPML_CODEC_TWOBIT };
    const int64_t steps = ALL_CASES ? 200 : 60;
    const double  most  = ALL_CASES ? 0.9 : 1.4;
    for (int k = 0; k < 3; k++) {
        job j = { .train.steps = steps, .d.codec = { .kind = kind[k], .threshold = 0.01f } };
        j.d.warm_steps = k == 1 ? 10 : 0;
        ENSURE(ran(&j, 4, k ? &linked : NULL));
        ENSURE(j.got.same && j.got.report.loss < most); /* ln 5 = 1.61 at the start */
    }
    for (int k = HPML_CODEC_TOPK; k <= HPML_CODEC_LOWRANK; k++) {
        job j = { .train.steps = steps, .d.codec = { .kind = (hpml_codec_kind)k, .ratio = 0.05f } };
        ENSURE(ran(&j, 4, NULL));
        ENSURE(j.got.same && j.got.report.loss < most);
    }
}

/* Step t applies the gradients of step t - 1, the first step none. */
TEST(double_buffering)
{
    job one = { .d.delayed = true, .train.samples = 240 }, four = { .d.delayed = true, .train.samples = 240 },
        first = { .d.delayed = true, .train.steps = 1 },
        start = { .run.serial = true, .train = { .steps = 1, .lr = 1e-30 } };
    ENSURE(ran(&one, 1, NULL) && ran(&four, 4, &linked));
    ENSURE_NEAR(apart(&one, &four), 0, 1e-5);
    ENSURE(ran(&first, 2, NULL) && ran(&start, 1, NULL));
    ENSURE(apart(&first, &start) == 0);
    /* the loss reported is that of the step before; of none after the first */
    job second = { .d.delayed = true, .train.steps = 2 }, plain = { .train.steps = 1 };
    ENSURE(ran(&second, 2, NULL) && ran(&plain, 2, NULL));
    ENSURE(isnan(first.got.report.loss) && plain.got.report.loss > 0);
    ENSURE(second.got.report.loss == plain.got.report.loss && second.got.report.samples == plain.got.report.samples);
}

/* One strategy after another on one trainer: each is chosen by its field, and gives its memory back. */
typedef struct turns { bool good; char text[512]; } turns;

static hpml_status in_turns(hpml_comm *c, void *user)
{
    static float         x[16 * INPUTS];
    static const int32_t y[16];
    static const char *const forms[] = { "sync", "delayed", "exact", "sync" };
    turns        *j = (turns *)user;
    hpml_ctx     *ctx = hpml_comm_ctx(c);
    hpml_tensor  *in = hpml_input_2d(ctx, 16, INPUTS);
    hpml_trainer *t = trainer(ctx, in, hpml_linear(in, CLASSES, NULL), 0.01f);
    size_t        bytes = 0;
    bool          good = true;
    for (int turn = 0; turn < 8 && hpml_ctx_status(ctx) == HPML_OK; turn++) {
        int               k = turn % 4;
        hpml_plan         plan = { .delayed = k == 1, .exact = k == 2, .codec.compress_all = true,
                                   .codec.kind = k == 3 ? HPML_CODEC_ONEBIT : HPML_CODEC_NONE };
        hpml_distributed *d = hpml_distribute(t, c, &plan);
        good = good && d && strcmp(d->strategy->name, forms[k]) == 0;
        for (int step = 0; step < 3; step++) hpml_trainer_step(t, x, y, 16, NULL);
        hpml_distribute_free(d);
        if (turn == 3) bytes = hpml_ctx_bytes(ctx); /* scratch memory and the background thread stay */
    }
    hpml_trainer_step(t, x, y, 16, NULL); /* alone */
    good = good && hpml_trainer_step_count(t) == 8 * 3 + 1 && hpml_ctx_bytes(ctx) == bytes;
    if (hpml_comm_rank(c) == 0) j->good = good;
    return hpml_ctx_status(ctx);
}

static hpml_status unknown_strategy(hpml_comm *c, void *user)
{
    hpml_plan     plan = { .strategy = (hpml_strategy_kind)99 };
    hpml_tensor  *in = hpml_input_2d(hpml_comm_ctx(c), 4, INPUTS);
    hpml_trainer *t = trainer(hpml_comm_ctx(c), in, hpml_linear(in, CLASSES, NULL), 0.01f);
    (void)user;
    return hpml_distribute(t, c, &plan) ? HPML_OK : hpml_ctx_status(hpml_comm_ctx(c));
}

/* Synchronous training has nothing to finish: the same parameters, and it may go on. */
static hpml_status finish(hpml_comm *c, void *user)
{
    hpml_ctx         *ctx = hpml_comm_ctx(c);
    job               j = { .train.samples = 100 };
    hpml_trainer     *t = trainer_of(&j, c);
    hpml_dataset     *data = points(ctx, j.train.samples, 0, 0, 0);
    hpml_distributed *d = distribute(&j, t, c);
    hpml_trainer_fit(t, data, NULL);
    uint64_t hash = hpml_param_hash(ctx);
    bool     same = hpml_distribute_finish(d) == HPML_OK && hpml_param_hash(ctx) == hash;
    hpml_trainer_fit(t, data, NULL);
    if (hpml_comm_rank(c) == 0) *(bool *)user = same && hpml_param_hash(ctx) != hash;
    return hpml_ctx_status(ctx);
}

TEST(finish_and_unknown_strategies)
{
    char text[512];
    bool good = false;
    ENSURE(hpml_launch(&(hpml_launch_desc){ .ranks = 2 }, finish, &good, NULL, 0) == HPML_OK && good);
    ENSURE(hpml_distribute_finish(NULL) == HPML_ERR_ARGUMENT);
    ENSURE(hpml_launch(&(hpml_launch_desc){ .ranks = 2 }, unknown_strategy, NULL, text, sizeof text) ==
           HPML_ERR_ARGUMENT && strstr(text, "strategy=99"));
}

typedef struct prediction { hpml_strategy_kind kind; bool good; } prediction;
/* True if g, whose input is 1 in one pixel, has the present centre of the convolution's weight w. */
static bool predicted(hpml_graph *g, const hpml_tensor *y, const hpml_tensor *w)
{
    return hpml_graph_forward(g, false, 0) == HPML_OK && y->data[0] == w->data[4];
}

/* A graph that predicts shares its convolution's weight with a trainer, whose strategy writes to it. */
static hpml_status predict(hpml_comm *c, void *user)
{
    prediction      *p    = (prediction *)user;
    hpml_ctx        *ctx  = hpml_comm_ctx(c);
    hpml_conv2d_desc conv = { .name = "conv", .kernel_h = 3, .padding_h = 1, .no_bias = true };
    hpml_tensor     *x    = hpml_input_4d(ctx, 1, 1, 1, 1), *y = hpml_conv2d(x, 1, &conv);
    hpml_graph_desc  gd   = { .outputs = &y, .output_count = 1, .predict = true };
    hpml_graph      *g    = hpml_graph_create(ctx, &gd);
    hpml_tensor     *w    = hpml_param_find(ctx, "conv.weight"), *in = hpml_input_2d(ctx, 1, 1);
    hpml_trainer    *t    = hpml_trainer_create(ctx, &(hpml_trainer_desc){ .input = in, .lr = 0.1f,
        .output = hpml_matmul(in, hpml_reshape_2d(w, 1, 9), false, false), .loss = HPML_LOSS_MSE });
    const float one = 1, goal[9] = { 0, 1, 2, 3, 4, 5, 6, 7, 8 };
    bool        good = hpml_graph_alloc(g) == HPML_OK && hpml_tensor_set(x, &one, 1) == HPML_OK;
    w->data[4] = (float)hpml_comm_rank(c); /* other numbers, which rank 0's will replace */
    good = predicted(g, y, w) && good;
    hpml_distributed *d = hpml_distribute(t, c, &(hpml_plan){ .strategy = p->kind });
    good = predicted(g, y, w) && good;
    for (int i = 0; i < 3; i++)
        good = hpml_trainer_step(t, &one, goal, 1, NULL) == HPML_OK && predicted(g, y, w) && good;
    good = hpml_distribute_finish(d) == HPML_OK && predicted(g, y, w) && good;
    if (!good) p->good = false;
    return hpml_ctx_status(ctx);
}

TEST(graphs_that_predict_notice_what_strategies_write)
{
    prediction p[] = { { HPML_STRATEGY_SYNC, true }, { HPML_STRATEGY_LOCAL, true }, { HPML_STRATEGY_GOSSIP, true } };
    for (int i = 0; i < 3; i++)
        ENSURE(hpml_launch(&(hpml_launch_desc){ .ranks = 2, .timeout = 20 }, predict, &p[i], NULL, 0) == HPML_OK &&
               p[i].good);
}

TEST(strategies_in_turns)
{
    for (int background = 0; background < 2; background++) {
        turns            j = { 0 };
        hpml_launch_desc l = { .ranks = 2, .timeout = 20, .ctx.threads = 1 };
        if (background) l.network = linked;
        ENSURE(hpml_launch(&l, in_turns, &j, j.text, sizeof j.text) == HPML_OK && j.good);
    }
}

/* Running statistics are a step late, and end near those of a training without double buffering. */
TEST(double_buffering_moves_running_statistics)
{
    job plain = { .model.norm = true, .train.lr = 1e-30, .train.samples = 240, .train.steps = 25 }, late = plain;
    late.d.delayed = true;
    ENSURE(ran(&plain, 2, NULL) && ran(&late, 2, NULL));
    ENSURE(plain.got.same && late.got.same);
    /* after 25 steps: 0.93 of the way from 1 */
    for (int i = 0; i < 64; i++) ENSURE_NEAR(plain.got.var[i], late.got.var[i], 0.2 * (double)plain.got.var[i]);
    ENSURE(fabs((double)plain.got.var[0] - 1) > 0.2);
}

/* Buckets in flight when the last gradient, that of the first parameter, is final: with overlap all other buckets, else
   none. */
static int in_flight;

static hpml_status watch(void *user, hpml_trainer *t, const hpml_moment *at)
{
    hpml_distributed *d = (hpml_distributed *)user;
    if (hpml_comm_rank(d->c) == 0 && at->param == 0) in_flight = d->buckets.posted;
    return hpmlc_dist_grad(user, t, at);
}

static hpml_status overlapped(hpml_comm *c, void *user)
{
    hpml_ctx      *ctx = hpml_comm_ctx(c);
    job            j   = { .train.samples = GLOBAL };
    hpml_tensor   *x   = hpml_input_2d(ctx, GLOBAL / 2, INPUTS);
    hpml_trainer  *t   = trainer(ctx, x, model(&j.model, x, 0), 0.1f);
    hpml_dataset  *data = points(ctx, j.train.samples, 0, 0, 0);
    hpml_plan      one = { .bucket_bytes = 1, .no_overlap = *(bool *)user };
    hpml_distributed *d = hpml_distribute(t, c, &one);
    hook(t, d, watch);
    return hpml_trainer_fit(t, data, NULL);
}

TEST(communication_overlaps_the_backward_pass)
{
    for (int off = 0; off < 2; off++) {
        bool no_overlap = off == 1;
        in_flight = -1;
        hpml_launch_desc l = { .ranks = 2, .network = linked, .ctx.threads = 1 };
        ENSURE(hpml_launch(&l, overlapped, &no_overlap, NULL, 0) == HPML_OK);
        /* of four: weight and bias of a layer in either order */
        ENSURE(off ? in_flight == 0 : in_flight >= 2 && in_flight <= 3);
    }
}

/* A rank that computes longer is the bubble of the other ranks. The mean over the rows is the report. */
typedef struct steps_job {
    hpml_plan              d;
    int                    slow, count;
    hpml_step_row          rows[64];
    hpml_distribute_report r;
    char                   text[8192];
} steps_job;

static hpml_status dawdle(void *user, hpml_trainer *t, const hpml_moment *at)
{
    hpml_distributed *d = (hpml_distributed *)user;
    hpml_comm_compute(d->c, hpml_comm_rank(d->c) == 1 ? 0.005 : 0.001);
    return hpmlc_dist_grad(user, t, at);
}

static hpml_status stepwise(hpml_comm *c, void *user)
{
    steps_job     *s = (steps_job *)user;
    hpml_ctx      *ctx = hpml_comm_ctx(c);
    job            j   = { .train.samples = 250 };
    hpml_tensor   *x   = hpml_input_2d(ctx, GLOBAL / 3, INPUTS);
    hpml_trainer  *t   = trainer(ctx, x, model(&j.model, x, 0), 0.1f);
    hpml_dataset  *data = points(ctx, j.train.samples, 0, 0, 0);
    hpml_step_row  rows[64];
    hpml_distributed *d = hpml_distribute(t, c, &s->d);
    if (!d) return hpml_ctx_status(ctx);
    if (s->slow) hook(t, d, dawdle);
    hpml_trainer_fit(t, data, &(hpml_fit_desc){ .max_steps = 8 });
    hpml_distribute_report r;
    hpml_distribute_get(d, &r, false);
    int n = hpml_distribute_steps(d, rows, 64);
    if (hpml_comm_rank(c) != 0) return n < 0 ? HPML_ERR_STATE : hpml_ctx_status(ctx);
    s->count = n;
    memcpy(s->rows, rows, sizeof rows);
    s->r = r;
    hpml_steps_text(rows, n, s->text, sizeof s->text);
    return hpml_ctx_status(ctx);
}

/* In virtual time only these take time: four tensors of 5 ms on rank 1, of 1 ms on the other ranks; messages of 5 ms.
   In real time there are bounds instead of equalities. */
TEST(a_table_of_steps)
{
    static const hpml_link slow = { 5e-3, 0 };
    /* a slow rank; a slow network: bare, exact, with double buffering; 4: 0 in real time */
    for (int kind = 0; kind < 5; kind++) {
        static steps_job s;
        bool             real = kind == 4, lame = kind % 4 == 0;
        hpml_launch_desc l = { .ranks = 3, .ctx.threads = 1, .network = { .ranks_per_node = 1 },
                               .transport = real ? HPML_TRANSPORT_THREADS : HPML_TRANSPORT_CLOCK };
        double sum[2][5] = { { 0 } }, bytes = 0; /* rank 0, rank 1 */
        memset(&s, 0, sizeof s);
        s.slow = lame, s.d.exact = kind == 2, s.d.leaf = 4, s.d.delayed = kind == 3, s.d.history = lame ? 5 : 0;
        if (!lame) l.network.between = slow;
        ENSURE(hpml_launch(&l, stepwise, &s, NULL, 0) == HPML_OK);
        ENSURE(s.count == (lame ? 15 : 24));
        for (int i = 0; i < s.count; i++) {
            const hpml_step_row *r = &s.rows[i];
            double               all = r->compute_s + r->exposed_s + r->bubble_s;
            ENSURE(r->step == i / 3 + (lame ? 4 : 1) && r->rank == i % 3);
            ENSURE(r->compute_s >= 0 && r->overlap_s >= 0 && r->exposed_s >= 0 && r->bubble_s >= 0 &&
                   (r->bytes > 0 || (kind == 3 && i < 3)));
            if (real) ENSURE(all <= r->step_s * 1.0001 && r->compute_s >= (r->rank == 1 ? 0.02 : 0.004));
            else if (r->step > 2) ENSURE_NEAR(all, r->step_s, 1e-12); /* before, the background thread is started */
            if (r->rank == 2) continue;
            sum[r->rank][0] += r->step_s / (s.count / 3);
            sum[r->rank][1] += r->compute_s / (s.count / 3), sum[r->rank][2] += r->overlap_s / (s.count / 3);
            sum[r->rank][3] += r->exposed_s / (s.count / 3), sum[r->rank][4] += r->bubble_s / (s.count / 3);
            if (r->rank == 0) bytes += r->bytes;
        }
        for (int k = 0; k < 5 && kind == 0; k++) { /* messages take no time: rank 0 waits for rank 1 alone */
            static const double want[2][5] = { { 0.02, 0.004, 0, 0, 0.016 }, { 0.02, 0.02, 0, 0, 0 } };
            for (int r = 0; r < 2; r++) ENSURE_NEAR(sum[r][k], want[r][k], 1e-12);
        }
        double times = 0; /* the step takes as long as the slowest rank computes, and the report names that rank */
        ENSURE(!lame || hpml_steps_slowest(s.rows, s.count, &times) == 1);
        ENSURE(kind > 0 || fabs(times - 5) < 1e-9);
        ENSURE(kind > 0 || strstr(s.text, "\n  slowest: rank 1, which computes 5.00 times as long as"));
        if (kind == 1 || kind == 2) ENSURE(sum[0][3] + sum[0][4] > 0.01);
        if (kind == 1 || kind == 2) ENSURE_NEAR(bytes, 8 * s.r.bytes, 0.5);
        if (!lame) ENSURE_NEAR(sum[0][3] + sum[0][4], s.r.exposed_s, 1e-6);
        ENSURE(strstr(s.text, "bubble") && strstr(s.text, "\n  mean "));
        int lines = 0;
        for (const char *at = s.text; *at; at++) lines += *at == '\n';
        ENSURE(lines == s.count + 3 && hpml_steps_text(s.rows, s.count, NULL, 0) == (int)strlen(s.text));
    }
    ENSURE(hpml_distribute_steps(NULL, NULL, 0) == -1 && hpml_steps_slowest(NULL, 0, NULL) == -1);
}

/* Two ranks and a link in virtual time: the report's efficiency is the formula's. */
typedef struct shaped { double compute_s; hpml_distribute_report r; char text[512]; } shaped;

static hpml_status compute_instead(void *user, hpml_trainer *t, const hpml_moment *at)
{
    hpml_distributed *d = (hpml_distributed *)user;
    hpml_comm_compute(d->c, 0.01);
    return hpmlc_dist_grad(user, t, at);
}

static hpml_status on_a_link(hpml_comm *c, void *user)
{
    shaped        *s = (shaped *)user;
    hpml_ctx      *ctx = hpml_comm_ctx(c);
    job            j   = { .train.samples = GLOBAL };
    hpml_tensor   *x   = hpml_input_2d(ctx, GLOBAL / 2, INPUTS);
    hpml_trainer  *t   = trainer(ctx, x, model(&j.model, x, 0), 0.1f);
    hpml_dataset  *data = points(ctx, j.train.samples, 0, 0, 0);
    hpml_distributed *d = hpml_distribute(t, c, &(hpml_plan){ .algorithm = HPML_RING, .no_overlap = true });
    if (!d) return hpml_ctx_status(ctx);
    hook(t, d, compute_instead);
    for (int i = 0; i < 8; i++) hpml_trainer_fit(t, data, NULL);
    if (hpml_comm_rank(c) > 0) return hpml_ctx_status(ctx);
    s->compute_s = 0.01 * d->layout.params;
    hpml_distribute_get(d, &s->r, false);
    hpml_distribute_text(d, s->text, sizeof s->text);
    return hpml_ctx_status(ctx);
}

TEST(efficiency_on_a_link_is_the_formula)
{
    static const double rate[] = { 400e3, 80e3 }; /* bytes a second: 17 and 84 ms of exchange; 40 ms are computed */
    for (int k = 0; k < 2; k++) {
        shaped           s = { 0 };
        hpml_launch_desc l = { .transport = HPML_TRANSPORT_CLOCK, .ranks = 2, .ctx.threads = 1,
                               .network = { .ranks_per_node = 1, .between = { 0, rate[k] } } };
        ENSURE(hpml_launch(&l, on_a_link, &s, NULL, 0) == HPML_OK);
        double formula = s.compute_s / (s.compute_s + s.r.plain_bytes / rate[k]);
        if (!(fabs(s.r.efficiency / formula - 1) <= 0.02))
            printf("    %.3f, formula %.3f: %s\n", s.r.efficiency, formula, s.text);
        ENSURE_NEAR(s.r.efficiency / formula, 1, 0.02); /* samples and loss are sent, too */
        ENSURE((formula < 0.5) == (k == 1) && (strstr(s.text, ", below 50 %: ranks wait") != NULL) == (k == 1));
    }
}

/* Eight equal layers in virtual time, on four ranks: the exchange takes a share of what the backward pass takes. */
typedef struct hiding { double step_s; bool no_overlap; hpml_route route; uint64_t hash; } hiding;

static hpml_status layer_takes(void *user, hpml_trainer *t, const hpml_moment *at)
{
    hpml_distributed *d = (hpml_distributed *)user;
    if (at->param % 2 == 0) hpml_comm_compute(d->c, 1.0 / 8); /* a weight; its bias comes first */
    return hpmlc_dist_grad(user, t, at);
}

static hpml_status hide(hpml_comm *c, void *user)
{
    float          x[4 * 64];
    const int32_t  y[4] = { 0, 1, 2, 3 };
    hiding        *h = (hiding *)user;
    hpml_ctx      *ctx = hpml_comm_ctx(c);
    hpml_tensor   *in = hpml_input_2d(ctx, 4, 64), *out = in;
    for (int i = 0; i < 8; i++) out = hpml_linear(out, 64, NULL);
    hpml_trainer     *t = trainer(ctx, in, out, 0.001f);
    hpml_distributed *d = hpml_distribute(t, c, &(hpml_plan){
        .bucket_bytes = h->route ? 1 << 20 : 64 * 64 * 4, .algorithm = HPML_RING,
        .no_overlap = h->no_overlap, .route = h->route });
    hook(t, d, layer_takes);
    for (int i = 0; i < 4 * 64; i++) x[i] = (float)(i * (hpml_comm_rank(c) + 3) % 7) / 7;
    hpml_trainer_step(t, x, y, 4, NULL); /* the first step starts the background thread */
    hpml_barrier(c);
    double start = hpml_comm_now(c);
    for (int step = 0; step < 5; step++) hpml_trainer_step(t, x, y, 4, NULL);
    if (hpml_comm_rank(c) == 0) h->step_s = (hpml_comm_now(c) - start) / 5, h->hash = hpml_param_hash(ctx);
    return hpml_ctx_status(ctx);
}

TEST(overlap_hides_the_exchange)
{
    for (int kind = 0; kind < 3; kind++) { /* bare; half as long; inputs and derivatives of the layers travel */
        hiding after = { .no_overlap = true, .route = kind == 2 ? HPML_ROUTE_HYBRID : 0 }, during = after;
        double share = kind == 1 ? 0.5 : 1, bytes = 2 * 3 / 4. * 4 * 8 * (64 * 64 + 64);
        during.no_overlap = false;
        if (kind == 2) bytes = 4 * 8 * (3 * 4 * (64 + 64) + 2 * 3 / 4. * 64);
        hpml_launch_desc l = { .transport = HPML_TRANSPORT_CLOCK, .ranks = 4, .ctx.threads = 1,
                               .network.inside = { 1e-6, bytes / share } };
        ENSURE(hpml_launch(&l, hide, &after, NULL, 0) == HPML_OK && hpml_launch(&l, hide, &during, NULL, 0) == HPML_OK);
        ENSURE_NEAR(after.step_s, 1 + share, 0.01);
        ENSURE(kind == 1 || during.step_s <= 0.65 * after.step_s);
        ENSURE(1 - (during.step_s - 1) / share >= 0.8 && after.hash == during.hash);
    }
}

static const char *path(const char *name)
{
    static char text[2][128];
    static int  turn;
    turn = !turn;
    snprintf(text[turn], sizeof text[0], "build/distribute_%s.safetensors", name);
    return text[turn];
}

TEST(resume_has_the_same_bits)
{
    /* f32, 1 bit, exact, top-k; with double buffering: f32, 1 bit, batchnorm; low rank, 2 bits */
    for (int kind = 0; kind < 9; kind++) {
        hpml_plan d = { .exact = kind == 2, .delayed = kind > 3 && kind < 7,
                        .codec.momentum = kind == 3 ? 0.5f : 0 };
        static const hpml_codec_kind codec[9] = { HPML_CODEC_NONE, HPML_CODEC_ONEBIT, HPML_CODEC_ONEBIT,
            HPML_CODEC_TOPK, HPML_CODEC_NONE, HPML_CODEC_ONEBIT, HPML_CODEC_ONEBIT, HPML_CODEC_LOWRANK,
            HPML_CODEC_TWOBIT };
        d.codec.kind = codec[kind];
        if (kind == 8) d.codec.threshold = 0.01f;
        const char *file = path("resume");
        bool norm = kind == 6;
        int  ranks = kind > 3 && kind < 7 ? 2 : 4;
        job whole = { .train.steps = 5, .train.tail = 5, .train.momentum = 0.9, .model.norm = norm, .d = d },
            second = { .train.steps = 5, .file.load = file, .train.momentum = 0.9, .model.norm = norm, .d = d },
            first = { .train.steps = 5, .file.save = file, .train.momentum = 0.9, .model.norm = norm, .d = d };
        ENSURE(ran(&whole, ranks, NULL));
        ENSURE(ran(&first, ranks, NULL));
        ENSURE(ran(&second, ranks, NULL));
        ENSURE(whole.got.same && second.got.same);
        if (whole.got.hash != second.got.hash) printf("    kind %d: %s\n", kind, second.text);
        ENSURE(whole.got.hash == second.got.hash);
        if (kind == 2) { /* exact: also on another number of ranks */
            job other = { .train.steps = 5, .file.load = file, .train.momentum = 0.9, .d = d };
            ENSURE(ran(&other, 2, NULL));
            ENSURE(whole.got.hash == other.got.hash);
        }
        remove(file);
    }
}

/* The sum of all floats of an array, divided by the number of ranks that have a copy in it. */
static double mean_of_copies(const hpml_safetensor *array, int copies)
{
    double sum = 0;
    for (size_t i = 0; i < array->bytes / sizeof(float); i++) {
        float v;
        memcpy(&v, (const char *)array->data + sizeof v * i, sizeof v);
        sum += (double)v / copies;
    }
    return sum;
}

/* Saved by 4 ranks, loaded by 2: the mean of the residuals, which the mean gradient lacks, is the same. */
TEST(four_ranks_to_two)
{
    const char *file = path("four"), *again = path("two");
    hpml_plan d = { .codec.kind = HPML_CODEC_ONEBIT };
    job four = { .train.steps = 7, .file.save = file, .d = d },
        two = { .train = { .steps = 1, .lr = 1e-30 }, .file.load = file, .d = d };
    ENSURE(ran(&four, 4, NULL));
    two.train.steps = 0, two.file.save = again; /* nothing in between */
    two.train.samples = 250;
    hpml_launch_desc l = { .ranks = 2, .ctx = { .seed = 3, .threads = 1 } };
    two.train.steps = -1;
    ENSURE(hpml_launch(&l, work, &two, two.text, sizeof two.text) == HPML_OK);
    hpml_ctx *ctx = hpml_ctx_create(NULL);
    hpml_safetensors *f = hpml_safetensors_open(ctx, file), *g = hpml_safetensors_open(ctx, again);
    hpml_safetensor   a, b;
    int found = 0;
    for (int i = 0; f && g && hpml_safetensors_at(f, i, &a); i++) {
        if (strncmp(a.name, "state.residual.ranks.", 21) != 0) continue;
        ENSURE(hpml_safetensors_find(g, a.name, &b) && a.bytes == 2 * b.bytes);
        double was = mean_of_copies(&a, 4), is = mean_of_copies(&b, 2);
        ENSURE(was != 0);
        ENSURE_NEAR(is, was, 1e-5 * (1 + fabs(was)));
        found++;
    }
    ENSURE(found == 2); /* the weights */
    hpml_safetensors_close(f), hpml_safetensors_close(g);
    hpml_ctx_free(ctx);
    remove(file), remove(again);
}

/* State belongs to the tensor of that name, also when a model is recorded in another order, with other buckets. Two
   towers whose sum is the result; after five steps a checkpoint is saved, five more steps begin with it. */
typedef struct towers {
    hpml_plan            d;
    bool                 turned, norm;
    const char          *load, *save;
    float                w[2][CLASSES * INPUTS], mean[2][CLASSES];
    char                 text[512];
} towers;

static hpml_status two_towers(hpml_comm *c, void *user)
{
    static const int32_t y[16] = { 1, 2, 3, 0, 1 };
    float        x[16 * INPUTS];
    towers      *j = (towers *)user;
    hpml_ctx    *ctx = hpml_comm_ctx(c);
    hpml_tensor *in = hpml_input_2d(ctx, 16, INPUTS), *tower[2];
    for (int i = 0; i < 2; i++) {
        int              k = j->turned ? !i : i;
        hpml_linear_desc d = { .name = k ? "b" : "a" };
        tower[k] = hpml_linear(in, CLASSES, &d);
        if (j->norm) tower[k] = hpml_batchnorm(tower[k], &(hpml_norm_desc){ .name = k ? "norm b" : "norm a" });
    }
    hpml_tensor      *w[2] = { hpml_param_find(ctx, "a.weight"), hpml_param_find(ctx, "b.weight") };
    hpml_tensor      *mean[2] = { hpml_param_find(ctx, "norm a.running_mean"),
                                  hpml_param_find(ctx, "norm b.running_mean") };
    hpml_trainer     *t = trainer(ctx, in, hpml_add(tower[0], hpml_relu(tower[1])), 0.1f);
    hpml_distributed *d = hpml_distribute(t, c, &j->d);
    if (j->load) hpml_distribute_load(d, j->load);
    for (int step = 0; step < 5; step++) {
        for (int i = 0; i < 16 * INPUTS; i++) x[i] = (float)((i + step) * (7 + hpml_comm_rank(c)) % 13) / 13;
        hpml_trainer_step(t, x, y, 16, NULL);
    }
    if (j->save) hpml_distribute_save(d, j->save);
    for (int i = 0; i < 2 && w[i] && hpml_ctx_status(ctx) == HPML_OK && hpml_comm_rank(c) == 0; i++) {
        memcpy(j->w[i], w[i]->data, sizeof j->w[i]);
        if (mean[i]) memcpy(j->mean[i], mean[i]->data, sizeof j->mean[i]);
    }
    return hpml_ctx_status(ctx);
}

TEST(state_belongs_to_the_named_tensor)
{
    for (int kind = 0; kind < 5; kind++) { /* 1 bit, with double buffering, exact, low rank; running statistics */
        towers first = { .d = { .codec = { .kind = HPML_CODEC_ONEBIT, .compress_all = true }, .bucket_bytes = 1,
                                .delayed = kind == 1 || kind == 4, .exact = kind == 2 },
                         .norm = kind == 4, .save = path("towers") };
        if (kind == 3) first.d.codec.kind = HPML_CODEC_LOWRANK;
        towers second = first, turned, other; /* other: state of leaves loaded as ranks', or ranks' as leaves' */
        second.save = NULL, second.load = first.save;
        turned = other = second, turned.turned = true, turned.d.bucket_bytes = 0, other.d.exact = kind == 0;
        hpml_launch_desc l = { .ranks = 2, .ctx = { .seed = 3, .threads = 1 } };
        ENSURE(hpml_launch(&l, two_towers, &first, NULL, 0) == HPML_OK &&
               hpml_launch(&l, two_towers, &second, NULL, 0) == HPML_OK);
        ENSURE(hpml_launch(&l, two_towers, &turned, NULL, 0) == HPML_OK);
        ENSURE(second.w[0][0] != first.w[0][0] && memcmp(second.w, turned.w, sizeof turned.w) == 0);
        ENSURE((kind == 4) == (second.mean[0][0] != first.mean[0][0]));
        ENSURE(memcmp(second.mean, turned.mean, sizeof turned.mean) == 0);
        bool refused = kind == 0 || kind == 2;
        if (refused) ENSURE(hpml_launch(&l, two_towers, &other, other.text, sizeof other.text) == HPML_ERR_FORMAT);
        ENSURE(!refused || strstr(other.text, kind ? "state.residual.ranks" : "state.residual.leaves"));
        remove(first.save);
    }
}

/* A file that cannot be written: all ranks get the error, and rank 0's trainer has no names of released arrays. */
typedef struct unwritten { int ranks; bool clean; } unwritten;

static hpml_status nowhere(hpml_comm *c, void *user)
{
    unwritten            *u = (unwritten *)user;
    static const float   x[16 * INPUTS];
    static const int32_t y[16];
    hpml_ctx         *ctx = hpml_comm_ctx(c);
    hpml_tensor      *in = hpml_input_2d(ctx, 16, INPUTS);
    hpml_trainer     *t = trainer(ctx, in, hpml_linear(in, CLASSES, NULL), 0.1f);
    hpml_distributed *d = hpml_distribute(t, c, &(hpml_plan){ .codec = { .kind = HPML_CODEC_ONEBIT,
                                                                                    .compress_all = true } });
    const char       *file = "build/nowhere.safetensors";
    hpml_trainer_step(t, x, y, 16, NULL);
    hpml_status status = hpml_distribute_save(d, "build/nowhere/x.safetensors");
    if (status != HPML_OK && strstr(hpml_ctx_error(ctx), "build/nowhere/x"))
        __atomic_add_fetch(&u->ranks, 1, __ATOMIC_RELAXED);
    if (hpml_comm_rank(c) > 0) return status;
    hpml_ctx_clear_error(ctx);
    hpml_safetensor   e;
    hpml_safetensors *f = hpml_checkpoint_save(t, file) == HPML_OK ? hpml_safetensors_open(ctx, file) : NULL;
    u->clean = f != NULL;
    for (int i = 0; hpml_safetensors_at(f, i, &e); i++) u->clean = u->clean && strncmp(e.name, "state.", 6) != 0;
    hpml_safetensors_close(f);
    remove(file);
    return status;
}

/* Rank 0's disk is slow: it writes 64 MB in three times the deadline. */
typedef struct slow_disk { double deadline; uint64_t bytes; } slow_disk;

static void disk_waits(void *user, uint64_t bytes)
{
    slow_disk *s = (slow_disk *)user;
    s->bytes     = bytes;
    usleep((unsigned)(3e6 * s->deadline));
}

static hpml_status saves_slowly(hpml_comm *c, void *user)
{
    enum { MANY = (66 << 20) / 4 };
    hpml_ctx         *ctx = hpml_comm_ctx(c);
    hpml_tensor      *in = hpml_input_2d(ctx, 16, INPUTS);
    hpml_trainer     *t = trainer(ctx, in, hpml_linear(in, CLASSES, NULL), 0.1f);
    hpml_distributed *d = hpml_distribute(t, c, NULL);
    float            *more = (float *)calloc(MANY, sizeof *more);
    hpml_progress     p = { disk_waits, user };
    if (hpml_comm_rank(c) == 0) hpml_trainer_add_state(t, "more", more, MANY), hpml_ctx_progress(ctx, p);
    hpml_status status = hpml_distribute_save(d, "build/slow.safetensors");
    p = hpml_ctx_progress(ctx, p);
    if (hpml_comm_rank(c) == 0) hpml_trainer_add_state(t, "more", NULL, MANY);
    free(more);
    if (status == HPML_OK && hpml_comm_rank(c) == 0 && p.fn != disk_waits) status = HPML_ERR_STATE;
    return status;
}

TEST(a_checkpoint_slower_than_the_deadline)
{
    slow_disk   s      = { .deadline = 0.4 };
    hpml_status status = HPML_ERR_TIMEOUT;
    for (int tries = 0; tries < 3 && status != HPML_OK; tries++, s.deadline *= 2) /* on a busy machine */
        status = hpml_launch(&(hpml_launch_desc){ .ranks = 3, .timeout = s.deadline }, saves_slowly, &s, NULL, 0);
    remove("build/slow.safetensors");
    ENSURE(status == HPML_OK && s.bytes >= 64 << 20);
}

TEST(a_checkpoint_that_cannot_be_written)
{
    unwritten u = { 0 };
    ENSURE(hpml_launch(&(hpml_launch_desc){ .ranks = 3 }, nowhere, &u, NULL, 0) != HPML_OK);
    ENSURE(u.ranks == 3 && u.clean);
}

/* The checkpoint in an older format, in which all gradients that are not yet applied were one array. */
static bool in_the_older_format(const char *from, const char *to)
{
    static const char *const keys[] = { "hpml.seed", "hpml.step", "hpml.epoch", "hpml.epoch_step", "hpml.optimizer",
                                        "hpml.loss_scale", "hpml.scale_steps" };
    hpml_safetensor   t[40], e;
    hpml_meta         meta[7];
    int               n = 0;
    hpml_ctx         *ctx = hpml_ctx_create(NULL);
    hpml_safetensors *f = hpml_safetensors_open(ctx, from);
    for (int i = 0; n < 40 && hpml_safetensors_at(f, i, &e); i++) {
        if (strcmp(e.name, "state.delayed.step") == 0) e.name = "state.gradients";
        if (strncmp(e.name, "state.delayed.", 14) != 0) t[n++] = e;
    }
    for (int k = 0; k < 7; k++) meta[k].key = keys[k], meta[k].value = hpml_safetensors_meta(f, keys[k]);
    bool good = hpml_safetensors_save(ctx, to, t, n, meta, 7) == HPML_OK;
    hpml_safetensors_close(f);
    hpml_ctx_free(ctx);
    return good;
}

TEST(gradients_in_an_older_format_are_refused)
{
    hpml_launch_desc l = { .ranks = 2, .ctx = { .seed = 3, .threads = 1 } };
    for (int turned = 0; turned < 2; turned++) {
        towers first = { .d.delayed = true, .norm = true, .turned = turned, .save = path("older") };
        towers now = first, old;
        now.save = NULL, now.load = first.save;
        old = now, old.load = path("oldest");
        ENSURE(hpml_launch(&l, two_towers, &first, NULL, 0) == HPML_OK && in_the_older_format(first.save, old.load));
        ENSURE(hpml_launch(&l, two_towers, &now, NULL, 0) == HPML_OK && now.w[0][0] != first.w[0][0]);
        ENSURE(hpml_launch(&l, two_towers, &old, old.text, sizeof old.text) == HPML_ERR_FORMAT);
        ENSURE(strstr(old.text, "state.gradients") && strstr(old.text, "hpml_checkpoint_load"));
        remove(first.save), remove(old.load);
    }
}

/* Batches from 8 up, on 2 ranks whose models hold 64 each. */
typedef struct search_job {
    hpml_plan              d;
    hpml_batch_search_desc s;
    hpml_batch_trial       trials[16];
    double                 lr;
    /* spike: a NaN in gradients of larger batches; before: steps before the search */
    int                    poison, spike, skip, before;
    int64_t                taken, steps;
    uint64_t               hash[2]; /* after the search, after some more training */
    char                   text[512];
} search_job;

static int64_t spike_above;

static hpml_status spike(void *user, hpml_trainer *t, const hpml_moment *at)
{
    hpml_distributed *d = (hpml_distributed *)user;
    if (d->plan.global_batch > spike_above && at->param == 0) hpml_param_at(d->ctx, 0)->grad[3] = (float)NAN;
    return hpmlc_dist_grad(user, t, at);
}

static hpml_status search(hpml_comm *c, void *user)
{
    search_job    *s = (search_job *)user, own = *s;
    hpml_ctx      *ctx = hpml_comm_ctx(c);
    job            j   = { .train.samples = 2000, .fault.poison = s->poison };
    hpml_tensor   *x   = hpml_input_2d(ctx, s->s.multiple == 64 ? 1024 : 64, INPUTS);
    hpml_trainer  *t   = hpml_trainer_create(ctx, &(hpml_trainer_desc){
        .input = x, .output = model(&j.model, x, 0), .lr = s->lr ? (float)s->lr : 0.05f, .momentum = 0.9f });
    bool           poison = j.fault.poison == hpml_comm_rank(c) + 1;
    hpml_dataset  *data = points(ctx, j.train.samples, 0, poison ? j.train.samples : 0, (float)NAN);
    own.d.global_batch = 8;
    hpml_distributed *d = hpml_distribute(t, c, &own.d);
    if (!d) return hpml_ctx_status(ctx);
    if (s->spike) hook(t, d, spike);
    if (s->before > 0) hpml_trainer_fit(t, data, &(hpml_fit_desc){ .max_steps = s->before });
    if (!s->skip) own.taken = hpml_distribute_search(d, data, &own.s, own.trials, 16);
    if (!s->skip && own.s.max == 8) hpml_distribute_set_batch(d, 8);
    own.hash[0] = hpml_param_hash(ctx);
    if (hpml_ctx_status(ctx) == HPML_OK && !s->spike) hpml_trainer_fit(t, data, &(hpml_fit_desc){ .max_steps = 20 });
    own.hash[1] = hpml_param_hash(ctx), own.steps = hpml_trainer_step_count(t);
    if (hpml_comm_rank(c) == 0) memcpy(s, &own, offsetof(search_job, text));
    return hpml_ctx_status(ctx);
}

static hpml_status seek(search_job *s)
{
    if (!s->s.path) s->s.path = "build/distribute_search.safetensors";
    if (!s->before) s->before = 250; /* a pass */
    hpml_launch_desc l = { .ranks = 2, .timeout = 20, .ctx = { .seed = 3, .threads = 1 } };
    hpml_status      status = hpml_launch(&l, search, s, s->text, sizeof s->text);
    remove(s->s.path);
    return status;
}

TEST_PLAIN(the_largest_batch_that_does_not_hurt)
{
    for (int kind = 0; kind < 4; kind += SLOW_BUILD ? 3 : 1) { /* f32, 1 bit; with double buffering */
        search_job none = { .skip = 1, .lr = 0.003, .s.samples = 1000, .d.delayed = kind > 1 };
        none.d.codec.kind = kind % 2 ? HPML_CODEC_ONEBIT : HPML_CODEC_NONE;
        search_job same = none, some = none, any = none;
        same.skip = some.skip = any.skip = 0;
        same.s.max = 8, some.s.slack = 0.05, any.s.multiple = 8, any.s.slack = 100;
        ENSURE(seek(&none) == HPML_OK && seek(&same) == HPML_OK && seek(&some) == HPML_OK && seek(&any) == HPML_OK);
        ENSURE(same.taken == 8 && same.trials[0].batch == 8 && same.trials[1].batch == 0);
        ENSURE(same.hash[0] == none.hash[0] && same.hash[1] == none.hash[1]); /* as if there had been no search */
        ENSURE(some.hash[0] == none.hash[0] && some.hash[1] != none.hash[1] && some.steps == 270);
        int n = 0;
        while (n < 16 && some.trials[n].batch) n++;
        ENSURE(n >= 2 && some.taken == some.trials[n - 2].batch && some.taken < 128);
        for (int i = 0; i < n; i++) ENSURE((some.trials[i].loss <= 1.05 * some.trials[0].loss) == (i < n - 1));
        ENSURE(some.trials[1].batch == 11 && any.trials[1].batch == 8 + 8 &&
               any.trials[2].batch == 24 && any.taken >= 120);
    }
}

/* The first step of a trial applies its own gradients, also with double buffering: the same losses. */
TEST(a_search_does_not_delay)
{
    search_job now = { .before = -1, .s = { .samples = 64, .slack = 10 } }, late = now;
    late.d.delayed = true;
    ENSURE(seek(&now) == HPML_OK && seek(&late) == HPML_OK);
    for (int i = 0; i < 9; i++)
        ENSURE(now.trials[i].batch == late.trials[i].batch && now.trials[i].loss == late.trials[i].loss);
    ENSURE(now.trials[7].batch == 91 && now.trials[8].batch == 128 && now.taken == 128);
}

/* The sizes of the paper's program: powers of the square root of 2, to multiples of 64. */
TEST(a_search_tries_these_sizes)
{
    static const int64_t sizes[] = { 256, 384, 512, 704, 1024, 1472, 2048, 0 };
    search_job s = { .before = -1, .s = { .samples = 64, .slack = 10, .min = 256, .multiple = 64 } };
    ENSURE(seek(&s) == HPML_OK && s.taken == 2048);
    for (int i = 0; i < 8; i++) ENSURE(s.trials[i].batch == sizes[i]);
}

TEST_PLAIN(a_search_may_diverge)
{
    search_job loud = { .spike = 1, .s.slack = 10, .d.codec.kind = HPML_CODEC_ONEBIT },
               plain = { .spike = 1, .s.slack = 10 }, nan = { .poison = 2, .before = -1 };
    spike_above = 20;
    ENSURE(seek(&loud) == HPML_OK && loud.taken == 16); /* 8, 11, 16, 23 */
    ENSURE(isinf(loud.trials[3].loss) && loud.trials[3].batch == 23 && loud.trials[4].batch == 0);
    ENSURE(seek(&plain) == HPML_OK && plain.taken == 16 && isinf(plain.trials[3].loss)); /* found while stepping */
    ENSURE(seek(&nan) == HPML_ERR_NONFINITE && strstr(nan.text, "diverge already"));
    search_job bad[] = { { .s.factor = 0.5 }, { .s.min = 200 }, { .s.path = "/nonexistent/x" }, { .before = 7 },
                         { .d = { .exact = true, .leaf = 4 } } };
    static const char *const says[] = { "factor above 1", "sizes 200 to 128", "/nonexistent",
                                        "7 batches into a pass", "exact" };
    for (int i = 0; i < 5; i++) {
        ENSURE(seek(&bad[i]) != HPML_OK);
        if (!strstr(bad[i].text, says[i])) printf("    %s\n", bad[i].text);
        ENSURE(strstr(bad[i].text, says[i]));
    }
}

/* ---- timeline ---- */

static trace seen; /* by the last test that read one */

/* Every rank trains, with each gradient in a bucket of its own. */
typedef struct recording {
    hpml_network net;
    const char  *path;
    bool         apart;      /* clocks */
    double       at[8], took[8]; /* the true time of each rank's mark, and of starting its timeline */
} recording;

static hpml_status record(hpml_comm *c, void *user)
{
    recording    *r = (recording *)user;
    hpml_ctx     *ctx = hpml_comm_ctx(c);
    int           rank = hpml_comm_rank(c);
    double        start, mark;
    hpml_tensor  *in = hpml_input_2d(ctx, 16, INPUTS);
    hpml_tensor  *out = hpml_linear(hpml_relu(hpml_linear(in, 64, NULL)), CLASSES, NULL);
    hpml_trainer *t = trainer(ctx, in, out, 0.01f);
    hpml_distribute(t, c, &(hpml_plan){ .bucket_bytes = 1 });
    if (r->apart) ahead = (rank % 2 ? 1000.0 : -3.0) * rank;
    hpml_barrier(c);
    start = hpml_now();
    hpml_comm_trace_start(c, &(hpml_trace_desc){ .arrows = !r->apart });
    r->took[rank] = hpml_now() - start;
    if (!r->apart) hpml_trainer_fit(t, points(ctx, 300, 0, 0, 0), NULL);
    else for (int i = 0; i <= rank; i++) hpml_barrier(c);
    mark = own_now(), r->at[rank] = mark - ahead;
    hpml_trace_span(ctx, HPML_LANE_IO, "mark", mark, mark + 1e-3);
    for (int i = rank + 1; r->apart && i < hpml_comm_size(c); i++) hpml_barrier(c);
    hpml_comm_trace_save(c, r->path);
    ahead = 0;
    return hpml_ctx_status(ctx);
}

static int spans_of(int rank, int lane, const char *name)
{
    int n = 0;
    for (int i = 0; i < seen.spans; i++)
        n += (int)seen.span[i].number[TRACE_PID] == rank && (int)seen.span[i].number[TRACE_TID] == lane &&
             strcmp(seen.span[i].text[TRACE_NAME], name) == 0;
    return n;
}

/* Spans called "allreduce" of a rank, about these tensors of this bucket. */
static int sums_of(int rank, int bucket, const char *tensors)
{
    int n = 0;
    for (const trace_span *s = seen.span; s < seen.span + seen.spans; s++)
        n += (int)s->number[TRACE_PID] == rank && (int)s->number[TRACE_BUCKET] == bucket &&
             s->number[TRACE_BYTES] > 0 && strcmp(s->text[TRACE_NAME], "allreduce") == 0 &&
             strcmp(s->text[TRACE_TENSORS], tensors) == 0;
    return n;
}

/* Each tensor's sum in each step, the steps, their loss and bytes, both ends of each message. */
static bool all_is_named(int rank, int steps)
{
    static const char *const tensors[] = { "linear1.bias", "linear1.weight", "linear0.bias", "linear0.weight" };
    double loss = 0, bytes = 0;
    char   step[16];
    for (int i = 0; i < 4; i++)
        if (sums_of(rank, i + 1, tensors[i]) != steps) return false;
    for (int i = 0; i < steps; i++) {
        snprintf(step, sizeof step, "step %d", i);
        if (spans_of(rank, HPML_LANE_STEP, step) != 1) return false;
    }
    return sums_of(rank, 0, "loss, samples") == steps && trace_counters(&seen, rank, "loss", &loss) == steps &&
           loss > 0 && loss < 10 && trace_counters(&seen, rank, "bytes sent", &bytes) == steps && bytes > 1000;
}

/* Returns the number of ends of arrows; -1: an end without the other end. */
static int arrows_of_all(void)
{
    int n = 0;
    for (const trace_span *s = seen.span + seen.spans; s < seen.span + seen.events && n >= 0; s++)
        if (s->has >> TRACE_ID & 1) n = trace_arrow(&seen, s) ? n + 1 : -1;
    return n;
}

TEST(one_timeline_for_all_ranks)
{
    for (int slow = 0; slow < 2; slow++) {
        recording        r = { .path = "build/timeline_test.json", .net.inside.latency = slow ? 1e-4 : 0 };
        hpml_launch_desc l = { .ranks = 4, .network = r.net, .ctx.threads = 1 };
        ENSURE(hpml_launch(&l, record, &r, NULL, 0) == HPML_OK);
        const char *wrong = trace_read(r.path, 4, &seen);
        if (wrong) printf("    %s\n", wrong);
        ENSURE(!wrong && seen.first == 0 && arrows_of_all() > 4 * 5 * 5); /* ranks by steps by sums */
        remove(r.path);
        for (int i = 0; i < 4; i++) {
            ENSURE(all_is_named(i, 5));
            int steps = spans_of(i, HPML_LANE_COMPUTE, "update");
            ENSURE(steps == 5 && spans_of(i, HPML_LANE_COMPUTE, "linear0 backward") == steps &&
                   spans_of(i, HPML_LANE_IO, "batch") >= steps);
            ENSURE(spans_of(i, HPML_LANE_COMM, "allreduce") == (4 + 1) * steps &&
                   spans_of(i, HPML_LANE_IO, "mark") == 1);
        }
    }
    recording bad = { .path = "/nonexistent/x" };
    ENSURE(hpml_launch(&(hpml_launch_desc){ .ranks = 2 }, record, &bad, NULL, 0) != HPML_OK);
}

/* Tensors of one bucket are named from the first to the last, packed ones in the spans of all their messages. */
static hpml_status bucketed(hpml_comm *c, void *user)
{
    const bool   *packed = (const bool *)user;
    hpml_ctx     *ctx = hpml_comm_ctx(c);
    hpml_tensor  *in  = hpml_input_2d(ctx, 16, INPUTS);
    hpml_trainer *t   = trainer(ctx, in, hpml_linear(hpml_relu(hpml_linear(in, 64, NULL)), CLASSES, NULL), 0.01f);
    hpml_plan d = { .codec.kind = *packed ? HPML_CODEC_ONEBIT : HPML_CODEC_NONE, .codec.min_elements = 16 };
    hpml_distribute(t, c, &d);
    hpml_comm_trace_start(c, NULL);
    hpml_trainer_fit(t, points(ctx, 300, 0, 0, 0), NULL);
    return hpml_comm_trace_save(c, "build/bucketed_test.json");
}

TEST(a_timeline_names_the_tensors_of_a_bucket)
{
    for (int packed = 0; packed < 2; packed++) {
        bool pack = packed;
        ENSURE(hpml_launch(&(hpml_launch_desc){ .ranks = 3, .ctx.threads = 1 }, bucketed, &pack, NULL, 0) == HPML_OK);
        ENSURE(!trace_read("build/bucketed_test.json", 3, &seen) && arrows_of_all() == 0);
        remove("build/bucketed_test.json");
        int moves[3] = { 0 };
        for (const trace_span *s = seen.span; s < seen.span + seen.spans; s++) {
            static const char *const names[] = { "pack", "stripes", "sums" };
            bool named = strcmp(s->text[TRACE_TENSORS], "linear1.weight .. linear0.weight") == 0;
            for (int i = 0; i < 3; i++)
                moves[i] += strcmp(s->text[TRACE_NAME], names[i]) == 0 && s->number[TRACE_BUCKET] == 1 && named &&
                            s->number[TRACE_BYTES] > 0;
        }
        for (int i = 0; i < 3; i++) ENSURE(moves[i] == (packed ? 3 * 7 : 0));
        ENSURE(sums_of(0, 1, packed ? "linear1.bias .. linear0.bias" : "linear1.bias .. linear0.weight") == 7);
    }
}

/* Names of arbitrary bytes, and a loss that is NaN. */
TEST(a_timeline_is_json_for_any_bytes_in_names)
{
    static const char *const names[] = {
        "plain", "\"quoted\" \\ and\n\t\x01", "Z\xc3\xbcrich", "\xff\xfe", "cut \xe2\x82",
        "\xc0\xaf", "\xed\xa0\x80", "\xf4\x90\x80\x80", "\xf0\x9f\x98\x80 and \x80", "" };
    static const char path[] = "build/names_test.json";
    enum { NAMES = sizeof names / sizeof names[0] };
    const double values[] = { 0, -1.5, 1e-30, 3e38, (double)NAN, (double)INFINITY };
    hpml_ctx    *ctx = hpml_ctx_create(NULL);
    double       last = 0;
    ENSURE(hpml_trace_first(ctx) == 0 && !hpml_trace_on(ctx) && !hpml_trace_on(NULL) && hpml_trace_first(NULL) == 0);
    ENSURE(hpml_trace_start(ctx, NULL) == HPML_OK && hpml_trace_on(ctx));
    for (int i = 0; i < NAMES; i++) {
        hpml_trace_event e = { .name = names[i], .first = names[NAMES - 1 - i], .last = names[i], .bucket = i,
                               .start = 7 + i, .end = 8 + i };
        hpml_trace_add(ctx, &e);
    }
    for (int i = 0; i < 6; i++) {
        hpml_trace_event e = { .kind = HPML_TRACE_COUNTER, .name = "loss", .start = 7 + i, .value = values[i] };
        hpml_trace_add(ctx, &e);
    }
    hpml_trace_add(ctx, NULL), hpml_trace_add(ctx, &(hpml_trace_event){ .start = 1 }); /* without a name */
    ENSURE(hpml_trace_save(ctx, path) == HPML_OK);
    const char *wrong = trace_read(path, 1, &seen);
    if (wrong) printf("    %s\n", wrong);
    ENSURE(!wrong && seen.spans == NAMES && seen.first == 0);
    ENSURE(trace_counters(&seen, 0, "loss", &last) == 4);
    ENSURE(spans_of(0, HPML_LANE_COMPUTE, "Z\xc3\xbcrich") == 1);
    remove(path);
    hpml_ctx_free(ctx);
}

/* Clocks that differ by minutes: in the file all marks are where they were in truth, give or take half of the quickest
   of the eight exchanges in which a rank has asked for the time. */
TEST(a_timeline_aligns_the_clocks)
{
    for (int p = 2; p <= 5; p++) {
        recording r = { .path = "build/aligned_test.json", .apart = true };
        double    mark[8] = { 0 }, worst = 0;
        ENSURE(hpml_launch(&(hpml_launch_desc){ .ranks = p, .ctx.threads = 1 }, record, &r, NULL, 0) == HPML_OK);
        ENSURE(!trace_read(r.path, p, &seen));
        remove(r.path);
        for (int i = 0; i < seen.spans; i++)
            if (strcmp(seen.span[i].text[TRACE_NAME], "mark") == 0)
                mark[(int)seen.span[i].number[TRACE_PID]] = 1e-6 * seen.span[i].number[TRACE_TS];
        for (int i = 1; i < p; i++) {
            double off = fabs((mark[i] - mark[0]) - (r.at[i] - r.at[0]));
            worst = fmax(worst, off);
            ENSURE(mark[i] > 0 && off < r.took[i] / 16 + 1e-6);
        }
        printf("    %d ranks: clocks apart by up to %.0f s, in the file by %.1f us\n", p,
               1000.0 * (p / 2 * 2 - 1), 1e6 * worst);
    }
}

/* The timeline has communication at its virtual time: two rounds after the last rank has come. */
static hpml_status virtual_time(hpml_comm *c, void *user)
{
    float x[4] = { 0 };
    hpml_comm_trace_start(c, NULL);
    hpml_comm_compute(c, 0.5);
    hpml_allreduce(c, x, 4, &(hpml_allreduce_desc){ .algorithm = HPML_BUTTERFLY });
    return hpml_comm_trace_save(c, (const char *)user);
}

TEST(a_timeline_of_virtual_time)
{
    const char *path = "build/virtual_test.json";
    for (int slow = 0; slow < 2; slow++) {
        hpml_launch_desc l = { .ranks = 4, .transport = HPML_TRANSPORT_CLOCK,
                               .network.inside.latency = slow ? 0.01 : 0 };
        ENSURE(hpml_launch(&l, virtual_time, (void *)(uintptr_t)path, NULL, 0) == HPML_OK);
        ENSURE(!trace_read(path, 4, &seen) && spans_of(3, HPML_LANE_COMM, "allreduce") == 1);
        remove(path);
        double first = 1e9, last = 0, end = 0;
        for (int i = 0; i < seen.spans; i++) {
            double ts = seen.span[i].number[TRACE_TS];
            if (strcmp(seen.span[i].text[TRACE_NAME], "allreduce") != 0) continue;
            first = fmin(first, ts), last = fmax(last, ts), end = fmax(end, ts + seen.span[i].number[TRACE_DUR]);
        }
        ENSURE(first > 5e5 - 1 && first < 5.3e5);
        ENSURE_NEAR(end - last, slow ? 2e4 : 0, 1);
    }
}

/* A training's layers, exchanges and updates share that time: half a second of computing, then the step's layers, which
   take none, the exchange, and the update when it has ended. */
static hpml_status virtual_steps(hpml_comm *c, void *user)
{
    static float         x[16 * INPUTS];
    static const int32_t y[16];
    hpml_ctx     *ctx = hpml_comm_ctx(c);
    hpml_tensor  *in = hpml_input_2d(ctx, 16, INPUTS);
    hpml_tensor  *out = hpml_linear(hpml_relu(hpml_linear(in, 64, NULL)), CLASSES, NULL);
    hpml_trainer *t = trainer(ctx, in, out, 0.01f);
    hpml_distribute(t, c, &(hpml_plan){ .bucket_bytes = 1 });
    hpml_comm_trace_start(c, NULL);
    for (int i = 0; i < 3; i++) hpml_comm_compute(c, 0.5), hpml_trainer_step(t, x, y, 16, NULL);
    return hpml_comm_trace_save(c, (const char *)user);
}

TEST(a_training_in_virtual_time_has_one_clock)
{
    const char      *path = "build/virtual_steps_test.json";
    hpml_launch_desc l = { .ranks = 4, .transport = HPML_TRANSPORT_CLOCK,
                           .network.inside.latency = 0.01, .ctx.threads = 1 };
    ENSURE(hpml_launch(&l, virtual_steps, (void *)(uintptr_t)path, NULL, 0) == HPML_OK);
    ENSURE(!trace_read(path, 4, &seen));
    remove(path);
    enum { COMPUTED, BACKWARD, UPDATED, KINDS, STEPS = 3 };
    static const char *const names[KINDS] = { "compute", "linear0 backward", "update" };
    for (int rank = 0; rank < 4; rank++) {
        double at[KINDS][STEPS + 1] = { { 0 } };
        int    n[KINDS] = { 0 }, sums = 0;
        for (int i = 0; i < seen.spans; i++) {
            const trace_span *s = &seen.span[i];
            double            ts = 1e-6 * s->number[TRACE_TS], dur = 1e-6 * s->number[TRACE_DUR];
            const char       *name = s->text[TRACE_NAME];
            if ((int)s->number[TRACE_PID] != rank) continue;
            for (int k = 0; k < KINDS; k++)
                if (strcmp(name, names[k]) == 0 && n[k] < STEPS) at[k][n[k]++] = ts;
            sums += strcmp(name, "allreduce") == 0 && dur > 0.009;
            if ((int)s->number[TRACE_TID] == HPML_LANE_COMPUTE && strcmp(name, "wait") != 0)
                ENSURE_NEAR(dur, strcmp(name, "compute") == 0 ? 0.5 : 0, 1e-6);
            ENSURE(ts > -1e-6 && ts + dur < 2.5);
        }
        ENSURE(n[COMPUTED] == STEPS && n[BACKWARD] == STEPS && n[UPDATED] == STEPS && sums == STEPS * (4 + 1));
        for (int k = 0; k < STEPS; k++) { /* each of five sums is at least a message behind the one before it */
            ENSURE(at[BACKWARD][k] > at[COMPUTED][k] + 0.5 - 1e-6 && at[UPDATED][k] > at[BACKWARD][k] + 0.05 - 1e-6);
            ENSURE(k + 1 == STEPS || at[UPDATED][k] < at[COMPUTED][k + 1] + 1e-6);
        }
    }
}

/* What looking costs: a step writes so many spans, each with two looks at a clock. That it is off costs less than a
   100th of the step; that it is on is said. Counters are always on: some additions a message. */
static double seconds_of_spans(hpml_ctx *ctx, int n)
{
    double best = 1e9;
    for (int run = 0; run < 20; run++) {
        double start = hpml_now(), end = start;
        for (int i = 0; i < n; i++) end = hpml_now(), hpml_trace_span(ctx, HPML_LANE_COMM, "nothing", end, hpml_now());
        best = fmin(best, (end - start) / n);
    }
    return best;
}

static hpml_status cost(hpml_comm *c, void *user)
{
    static float         x[32 * 784];
    static const int32_t y[32];
    double       *found = (double *)user; /* spans a step; seconds of a step, of a span that is off, that is on */
    hpml_ctx     *ctx = hpml_comm_ctx(c);
    hpml_tensor  *in = hpml_input_2d(ctx, 32, 784), *out = hpml_linear(hpml_relu(hpml_linear(in, 128, NULL)), 10, NULL);
    hpml_trainer *t = trainer(ctx, in, out, 0.01f);
    const char   *path = "build/cost_test.json";
    hpml_distribute(t, c, NULL);
    for (int run = 0; run < 5; run++) {
        double start = hpml_now();
        for (int i = 0; i < 50; i++) hpml_trainer_step(t, x, y, 32, NULL);
        found[1] = fmin(found[1], (hpml_now() - start) / 50);
    }
    found[2] = seconds_of_spans(ctx, 2000);
    hpml_comm_trace_start(c, NULL);
    for (int i = 0; i < 50; i++) hpml_trainer_step(t, x, y, 32, NULL);
    if (hpml_comm_rank(c) == 0 && hpml_trace_save(ctx, path) == HPML_OK && !trace_read(path, 1, &seen))
        found[0] = seen.spans / 50.0;
    remove(path);
    found[3] = seconds_of_spans(ctx, 2000);
    return hpml_ctx_status(ctx);
}

TEST_PLAIN(what_a_timeline_costs)
{
    double cost_of[4] = { 0, 1e9, 0, 0 };
    ENSURE(hpml_launch(&(hpml_launch_desc){ .ranks = 1, .ctx.threads = 1 }, cost, cost_of, NULL, 0) == HPML_OK);
    double off = cost_of[0] * cost_of[2] / cost_of[1], on = cost_of[0] * cost_of[3] / cost_of[1];
    printf("    a step: %.0f us, %.0f spans of %.0f ns when off, %.0f ns when on: at most %.2f %% and %.2f %%\n",
           1e6 * cost_of[1], cost_of[0], 1e9 * cost_of[2], 1e9 * cost_of[3], 100 * off, 100 * on);
    ENSURE(cost_of[0] > 5 && off < 0.01 && on < 0.02);
}

/* What rank 0's timeline says of a slow network: seconds of each phase, and exchanges. */
typedef struct phases {
    double      wall, layers, update, wait, step;
    int         exchanges, steps;
    const char *wrong;
} phases;

static void phases_read(phases *of, const char *path)
{
    of->wrong = trace_read(path, 1, &seen);
    for (int i = 0; i < seen.spans; i++) {
        const trace_span *x = &seen.span[i];
        const char       *name = x->text[TRACE_NAME];
        double           *sum  = strcmp(name, "update") == 0 ? &of->update : strcmp(name, "wait") == 0 ? &of->wait
                               : &of->layers;
        if ((int)x->number[TRACE_TID] == HPML_LANE_STEP) of->step += 1e-6 * x->number[TRACE_DUR];
        else if ((int)x->number[TRACE_TID] == HPML_LANE_COMPUTE) *sum += 1e-6 * x->number[TRACE_DUR];
        else if (strcmp(name, "allreduce") == 0) of->exchanges++;
    }
}

static hpml_status phases_of(hpml_comm *c, void *user)
{
    static const char    path[] = "build/phases.trace";
    static float         x[64 * INPUTS];
    static const int32_t y[64];
    phases       *of  = (phases *)user;
    hpml_ctx     *ctx = hpml_comm_ctx(c);
    hpml_tensor  *in = hpml_input_2d(ctx, 64, INPUTS);
    hpml_tensor  *out = hpml_linear(hpml_relu(hpml_linear(in, 2048, NULL)), CLASSES, NULL);
    hpml_trainer *t =
        hpml_trainer_create(ctx, &(hpml_trainer_desc){ .input = in, .output = out, .lr = 0.01f, .momentum = 0.9f });
    double        start = 0;
    hpml_distribute(t, c, &(hpml_plan){ .bucket_bytes = 1 }); /* every tensor in a bucket of its own */
    for (int step = -2; step < of->steps; step++) {
        if (step == 0 && hpml_comm_rank(c) == 0) hpml_trace_start(ctx, NULL), start = hpml_now();
        if (hpml_trainer_step(t, x, y, 64, NULL) != HPML_OK) return hpml_ctx_status(ctx);
    }
    if (hpml_comm_rank(c) != 0) return HPML_OK;
    of->wall = hpml_now() - start;
    if (hpml_trace_save(ctx, path) == HPML_OK) phases_read(of, path);
    remove(path);
    return hpml_ctx_status(ctx);
}

TEST(phases_add_up_to_the_step)
{
    hpml_launch_desc l = { .ranks = 2, .timeout = 20, .ctx = { .threads = 1 }, .network.inside.bandwidth = 25e6 };
    double           share = 0;
    /* the time of a rank that has no core between two spans is in none of them */
    for (int tries = 0; tries < 20 && share < 0.95; tries++) {
        phases of = { .steps = 20 };
        ENSURE(hpml_launch(&l, phases_of, &of, NULL, 0) == HPML_OK);
        share = (of.layers + of.wait + of.update) / of.wall;
        ENSURE(of.step <= of.wall * 1.001 && of.layers + of.wait + of.update <= of.step * 1.001);
        printf("    %.1f ms: layers %.1f, wait %.1f, update %.1f; %d exchanges\n", 1e3 * of.wall, 1e3 * of.layers,
               1e3 * of.wait, 1e3 * of.update, of.exchanges);
        if (of.wrong) printf("    %s\n", of.wrong);
        /* four tensors and the loss */
        ENSURE(!of.wrong && share < 1.001 && of.wait > 0 && of.update > 0 && of.exchanges == (4 + 1) * of.steps);
    }
    ENSURE(share >= 0.95);
}

#if !SLOW_BUILD /* this is learning, not memory or races */
/* Without momentum, by `rule` from a batch of 32 at 0.05, over five epochs; a batch of more than 32 is that of four
   ranks. loss: of the last epoch, as training meets it: neither the last step nor a short batch at a high rate
   decides. */
typedef struct lesson { hpml_lr_rule rule; int64_t batch; int32_t warm; double loss, samples; } lesson;
typedef struct lesson_watch { lesson *l; hpml_distributed *d; } lesson_watch;

static int last_epoch(const hpml_step_info *info, void *user)
{
    lesson_watch          *w = (lesson_watch *)user;
    hpml_distribute_report r;
    hpml_distribute_get(w->d, &r, false);
    if (info->epoch < 4 || hpml_comm_rank(w->d->c) > 0) return 0;
    w->l->loss += r.loss * (double)r.samples, w->l->samples += (double)r.samples;
    return 0;
}

static hpml_status learn(hpml_comm *c, void *user)
{
    lesson_watch  w = { (lesson *)user, NULL };
    hpml_ctx     *ctx = hpml_comm_ctx(c);
    hpml_tensor  *x = hpml_input_2d(ctx, w.l->batch / hpml_comm_size(c), 784);
    hpml_trainer *t = hpml_trainer_create(ctx, &(hpml_trainer_desc){
        .input = x, .output = mlp(x), .lr = 0.05f, .lr_rule = w.l->rule, .lr_base_batch = 32,
        .schedule.warmup_steps = w.l->warm });
    w.d = hpml_distribute(t, c, NULL);
    return hpml_trainer_fit(t, digits(ctx, 0, to_learn),
                            &(hpml_fit_desc){ .epochs = 5, .on_step = last_epoch, .user = &w });
}

/* The mean over seeds; a rate that is too high may end in a loss that is not finite. */
static double learned(hpml_lr_rule rule, int64_t batch, int32_t warm)
{
    double sum = 0;
    for (int seed = 0; seed < 3; seed++) {
        lesson           l = { .rule = rule, .batch = batch, .warm = warm };
        hpml_launch_desc d = { .ranks = batch > 32 ? 4 : 1, .ctx = { .seed = (uint64_t)(10 + seed), .threads = 1 } };
        sum += hpml_launch(&d, learn, &l, NULL, 0) == HPML_OK ? l.loss / l.samples / 3 : 1e9;
    }
    return sum;
}

TEST_ACCURACY(larger_batches_want_a_larger_rate)
{
    get_digits(8000);
    double small  = learned(HPML_LR_LINEAR, 32, 0);
    double middle = learned(HPML_LR_LINEAR, 128, 0), large = learned(HPML_LR_LINEAR, 256, 0);
    double given  = learned(HPML_LR_AS_GIVEN, 128, 0), far = learned(HPML_LR_LINEAR, 1024, 0);
    double root   = learned(HPML_LR_SQRT, 1024, 0), warm = learned(HPML_LR_LINEAR, 512, 20); /* a rate of 0.8 */
    printf("    batch 32: %.3f; linear: 128 %.3f, 256 %.3f, 512 warmed up %.3f, 1024 %.3f; as given: 128 %.3f; "
           "root: 1024 %.3f\n", small, middle, large, warm, far, given, root);
    ENSURE(fabs(middle / small - 1) < 0.05 && fabs(large / small - 1) < 0.05);
    ENSURE(given > 1.4 * small && warm < given && far > 4 * small && far > 2 * root); /* the linear rule has an end */
}

/* The loss after five epochs of 8192 points in batches of 512. */
static double warmed(float lr, int steps)
{
    hpml_ctx        *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .seed = 3, .threads = 1 });
    hpml_linear_desc relu = { .activation = HPML_ACT_RELU };
    hpml_tensor     *x = hpml_input_2d(ctx, 512, INPUTS), *h = hpml_linear(hpml_linear(x, 64, &relu), 32, &relu);
    hpml_trainer    *t = hpml_trainer_create(ctx, &(hpml_trainer_desc){
        .input = x, .output = hpml_linear(h, CLASSES, NULL), .lr = lr, .schedule.warmup_steps = steps });
    hpml_dataset    *data = points(ctx, 8192, 0, 0, 0);
    hpml_metrics     m = { 0 };
    hpml_trainer_fit(t, data, &(hpml_fit_desc){ .epochs = 5 });
    double loss = hpml_trainer_evaluate(t, data, &m) == HPML_OK ? (double)m.loss : 1e9;
    hpml_ctx_free(ctx);
    return loss;
}

TEST(high_rates_want_a_warm_up)
{
    double cold = 0, warm = 0;
    for (float lr = 2.8f; lr < 3.7f; lr += 0.2f) /* one by one they are chaotic: the first steps throw many off */
        cold += warmed(lr, 0) / 5, warm += warmed(lr, 60) / 5;
    printf("    batch 512 at rates about 3.2: cold %.3f, warm %.3f\n", cold, warm);
    ENSURE(cold > 1.5 * warm);
}
#endif

static const hpml_trainer_desc scheduled = {
    .lr = 0.1f, .lr_rule = HPML_LR_LINEAR, .lr_base_batch = 6,
    .schedule = { .kind = HPML_SCHEDULE_COSINE, .warmup_steps = 5, .total_steps = 20 } };

static hpml_status rates(hpml_comm *c, void *user)
{
    static float         x[GLOBAL * INPUTS];
    static const int32_t y[GLOBAL];
    float            *rate = (float *)user;
    hpml_trainer_desc d = scheduled;
    int64_t           batch = GLOBAL / hpml_comm_size(c);
    d.input  = hpml_input_2d(hpml_comm_ctx(c), batch, INPUTS);
    d.output = hpml_linear(d.input, CLASSES, NULL);
    hpml_trainer *t = hpml_trainer_create(hpml_comm_ctx(c), &d);
    if (!hpml_distribute(t, c, NULL)) return hpml_ctx_status(hpml_comm_ctx(c));
    for (int step = 0; step < 20; step++) {
        if (hpml_comm_rank(c) == 0) rate[step] = hpml_trainer_lr(t);
        if (hpml_trainer_step(t, x, y, batch, NULL) != HPML_OK) break;
    }
    return hpml_ctx_status(hpml_comm_ctx(c));
}

TEST(ranks_have_the_schedule_of_one)
{
    float alone[20], four[20];
    ENSURE(hpml_launch(&(hpml_launch_desc){ .ranks = 1 }, rates, alone, NULL, 0) == HPML_OK);
    ENSURE(hpml_launch(&(hpml_launch_desc){ .ranks = 4 }, rates, four, NULL, 0) == HPML_OK);
    for (int i = 0; i < 20; i++) ENSURE(alone[i] == four[i]);
    ENSURE_NEAR((double)alone[0], 0.1 * GLOBAL / 6 / 5, 1e-6);
    ENSURE_NEAR((double)alone[4], 0.1 * GLOBAL / 6, 1e-6);
}

/* Rank 1 does not make its fourth step before the other rank has failed with a timeout. */
static hpml_status stay_away(hpml_comm *c, void *user)
{
    static float         x[16 * INPUTS];
    static const int32_t y[16];
    int          *given_up = (int *)user;
    hpml_ctx     *ctx = hpml_comm_ctx(c);
    hpml_tensor  *in = hpml_input_2d(ctx, 16, INPUTS);
    hpml_trainer *t = trainer(ctx, in, hpml_linear(in, CLASSES, NULL), 0.01f);
    hpml_distribute(t, c, NULL);
    for (int step = 0; step < 6 && hpml_ctx_status(ctx) == HPML_OK; step++) {
        bool away = step == 3 && hpml_comm_rank(c) == 1;
        for (int i = 0; away && i < 20000 && !__atomic_load_n(given_up, __ATOMIC_ACQUIRE); i++) hpmlc_nap(1e-3);
        if (hpml_trainer_step(t, x, y, 16, NULL) != HPML_OK) __atomic_store_n(given_up, 1, __ATOMIC_RELEASE);
    }
    return hpml_ctx_status(ctx);
}

TEST(a_deadline_names_rank_operation_and_step)
{
    for (int background = 0; background < 2; background++) {
        char text[512] = "";
        bool good = false;
        for (int tries = 0; tries < 3 && !good; tries++) { /* a busy machine may keep another rank away as long */
            hpml_launch_desc l = { .ranks = 2, .timeout = 0.3, .ctx.threads = 1 };
            int              given_up = 0;
            if (background) l.network = linked;
            good = hpml_launch(&l, stay_away, &given_up, text, sizeof text) == HPML_ERR_TIMEOUT &&
                   strstr(text, "waited 0.3 s for rank 1 in allreduce") && strstr(text, "step 4;");
        }
        if (!good) printf("    %s\n", text);
        ENSURE(good);
    }
}

/* Hooks of the user's around a distribution, which must not notice them. */
static hpml_status around_run(void *user, hpml_trainer *t, const hpml_moment *at, int64_t samples, float *loss)
{
    (void)user, (void)at;
    return hpml_trainer_run_inner(t, samples, loss);
}
static hpml_status around_grad(void *user, hpml_trainer *t, const hpml_moment *at)
{
    (void)t, (void)at;
    ++*(int *)user;
    return HPML_OK;
}
static hpml_status around_update(void *user, hpml_trainer *t, const hpml_moment *at)
{
    (void)user, (void)at;
    return hpml_trainer_update_inner(t);
}

typedef struct stacking { bool early, around, twice; uint64_t hash; int grads; } stacking;
static hpml_status stacked(hpml_comm *c, void *user)
{
    float                x[16 * INPUTS];
    static const int32_t y[16] = { 0, 1, 2, 1 };
    stacking     *s   = (stacking *)user;
    hpml_ctx     *ctx = hpml_comm_ctx(c);
    hpml_tensor  *in  = hpml_input_2d(ctx, 16, INPUTS);
    hpml_trainer *t   = trainer(ctx, in, hpml_linear(in, CLASSES, NULL), 0.1f);
    int           grads = 0;
    hpml_hooks    h   = { .user = &grads, .grad = around_grad };
    for (int i = 0; i < 16 * INPUTS; i++) x[i] = (float)(i % 7) / 7;
    if (s->early) h.run = around_run;
    if (s->early || s->around) hpml_trainer_attach(t, &h);
    if (s->twice) hpml_distribute(t, c, NULL);
    if (!hpml_distribute(t, c, NULL)) return hpml_ctx_status(ctx);
    h.run    = around_run;
    h.update = around_update;
    if (s->around) hpml_trainer_attach(t, &h);
    for (int step = 0; step < 3; step++) hpml_trainer_step(t, x, y, 16, NULL);
    if (hpml_comm_rank(c) == 0) s->hash = hpml_param_hash(ctx), s->grads = grads;
    return hpml_ctx_status(ctx);
}

TEST(hooks_around_a_distribution)
{
    stacking s[4] = { { false, false, false, 0, 0 }, { false, true, false, 0, 0 }, { false, true, true, 0, 0 },
                      { true, false, false, 0, 0 } };
    char     text[512] = "";
    for (int k = 0; k < 3; k++)
        ENSURE(hpml_launch(&(hpml_launch_desc){ .ranks = 2 }, stacked, &s[k], NULL, 0) == HPML_OK);
    ENSURE(s[0].hash == s[1].hash && s[0].hash == s[2].hash);
    ENSURE(s[0].grads == 0 && s[1].grads == 2 * 2 * 3 && s[2].grads == 2 * 2 * 3); /* 2 sets, 2 parameters, 3 steps */
    ENSURE(hpml_launch(&(hpml_launch_desc){ .ranks = 2 }, stacked, &s[3], text, sizeof text) == HPML_ERR_STATE);
    ENSURE(strstr(text, "attach them after hpml_distribute"));
}

/* A sparse table on several ranks: rank 1 has no samples in the last step. */
typedef struct bag {
    bool        sparse;
    int         rows, from, steps; /* from: number of the first step */
    hpml_opt    opt;
    const char *save, *load;
    hpml_plan   plan;
    uint64_t    hash;
    float       w[60 * 4];
    int64_t     bytes;
} bag;
static hpml_status bag_of_words(hpml_comm *c, void *user)
{
    enum { WORDS = 3, ROWS = 60, WIDTH = 4, B = 6 };
    bag          *s   = (bag *)user;
    hpml_ctx     *ctx = hpml_comm_ctx(c);
    hpml_tensor  *in  = hpml_input_tokens(ctx, B, WORDS);
    hpml_embedding_desc e = { .name = "e", .sparse = s->sparse };
    hpml_tensor  *h   = hpml_embedding(in, s->rows ? s->rows : ROWS, WIDTH, &e);
    const int     workers = hpml_comm_size(c) - s->plan.servers, rank = hpml_comm_rank(c);
    hpml_trainer *t   = hpml_trainer_create(ctx, &(hpml_trainer_desc){
        .input = in, .output = hpml_linear(hpml_sum(h, 1), CLASSES, NULL), .lr = 0.2f, .optimizer = s->opt });
    int32_t       x[B * WORDS], y[B];
    hpml_counters sent;
    hpml_distributed *d = hpml_distribute(t, c, &s->plan);
    if (!d) return hpml_ctx_status(ctx);
    if (s->load) hpml_distribute_load(d, s->load);
    hpml_comm_counters_reset(c);
    for (int step = s->from; step < s->from + (s->steps ? s->steps : 8); step++) {
        int from = 100 * step + 17 * rank;
        for (int i = 0; i < B * WORDS; i++) x[i] = (from + 5 * i) % 11 * (rank + 3) % ROWS;
        for (int i = 0; i < B; i++) y[i] = x[i * WORDS] % CLASSES;
        hpml_trainer_step(t, x, y, rank >= workers || (step == 7 && rank == 1) ? 0 : B, NULL);
    }
    hpml_comm_counters(c, &sent);
    if (s->save) hpml_distribute_save(d, s->save);
    if (s->plan.servers > 0) hpml_distribute_finish(d);
    if (s->plan.servers > 0 && !same_params(c)) return hpml_ctx_fail(ctx, HPML_ERR_STATE, "other parameters");
    if (rank != 0) return hpml_ctx_status(ctx);
    s->hash  = hpml_param_hash(ctx);
    s->bytes = sent.bytes;
    return s->rows ? hpml_ctx_status(ctx) : hpml_tensor_get(hpml_param_find(ctx, "e.weight"), s->w, ROWS * WIDTH);
}

TEST(ranks_gather_the_rows_of_sparse_tables)
{
    char text[512] = "";
    for (int p = 1; p <= 4; p++)
        for (int sum = 0; sum < 2; sum++) {
            bag dense = { .plan = { .sum = sum } }, sparse = { .sparse = true, .plan = { .sum = sum } };
            ENSURE(hpml_launch(&(hpml_launch_desc){ .ranks = p }, bag_of_words, &dense, NULL, 0) == HPML_OK);
            ENSURE(hpml_launch(&(hpml_launch_desc){ .ranks = p }, bag_of_words, &sparse, NULL, 0) == HPML_OK);
            for (int i = 0; i < 240; i++) ENSURE_NEAR(dense.w[i], sparse.w[i], 1e-6);
            ENSURE(p > 2 || dense.hash == sparse.hash); /* a sum of two has one order */
            ENSURE(p == 1 || sparse.bytes < dense.bytes);
        }
    bag wrong = { .sparse = true, .plan = { .delayed = true } };
    ENSURE(hpml_launch(&(hpml_launch_desc){ .ranks = 2 }, bag_of_words, &wrong, text, sizeof text) ==
           HPML_ERR_UNSUPPORTED && strstr(text, "a sparse embedding has rows as its gradient"));
}

/* Servers have rows of the table, workers pull and push those of their tokens: the bits of sync by CENTRAL, and as many
   bytes for a table that is a hundred times as long. */
TEST_PLAIN(rows_of_sparse_tables_go_to_servers)
{
    for (int k = 1; k <= 4; k++)
        for (int kind = 0; kind < 4; kind++) { /* sum; the number of servers; virtual time */
            hpml_launch_desc l = { .ranks = k, .timeout = 20 };
            char             text[300] = "";
            bag sync = { .sparse = true, .plan = { .sum = kind == 2, .algorithm = HPML_CENTRAL } }, ps = sync, longer;
            ENSURE(hpml_launch(&l, bag_of_words, &sync, NULL, 0) == HPML_OK);
            ps.plan = (hpml_plan){ .strategy = HPML_STRATEGY_PS, .servers = kind == 0 ? 1 : kind + 1 };
            ps.plan.sum = kind == 2;
            l.ranks = k + ps.plan.servers;
            l.transport = kind == 3 ? HPML_TRANSPORT_CLOCK : HPML_TRANSPORT_THREADS;
            hpml_status status = hpml_launch(&l, bag_of_words, &ps, text, sizeof text);
            if (status != HPML_OK) printf("    %s\n", text);
            ENSURE(status == HPML_OK && ps.hash == sync.hash);
            longer = ps;
            longer.rows = 6000;
            ENSURE(hpml_launch(&l, bag_of_words, &longer, NULL, 0) == HPML_OK && longer.bytes == ps.bytes);
            bag async = ps; /* and each gradient a step by itself */
            async.plan.strategy = HPML_STRATEGY_ASYNC;
            async.plan.sum      = false;
            ENSURE(hpml_launch(&l, bag_of_words, &async, NULL, 0) == HPML_OK && async.bytes == ps.bytes);
        }
}

/* A checkpoint has rows and states of all servers: another number of servers goes on with the same bits. */
TEST(rows_on_servers_are_in_checkpoints)
{
    const char      *file  = "build/sparse_servers.safetensors";
    bag              whole = { .sparse = true, .opt = HPML_OPT_ADAGRAD, .steps = 6 }, first = whole, second = whole;
    hpml_launch_desc l     = { .ranks = 4, .timeout = 20 };
    whole.plan = (hpml_plan){ .strategy = HPML_STRATEGY_PS, .servers = 2 };
    first.plan = second.plan = whole.plan;
    first.steps = 2, first.save = file;
    second.from = 2, second.steps = 4, second.load = file;
    ENSURE(hpml_launch(&l, bag_of_words, &whole, NULL, 0) == HPML_OK);
    ENSURE(hpml_launch(&l, bag_of_words, &first, NULL, 0) == HPML_OK && first.hash != whole.hash);
    for (int servers = 1; servers < 4; servers++) {
        second.plan.servers = servers;
        l.ranks             = 2 + servers;
        ENSURE(hpml_launch(&l, bag_of_words, &second, NULL, 0) == HPML_OK && second.hash == whole.hash);
    }
    remove(file);
}

static hpml_status foreign(hpml_comm *c, void *user)
{
    hpml_ctx     *own = hpml_ctx_create(NULL);
    hpml_tensor  *x = hpml_input_2d(own, 4, INPUTS);
    hpml_trainer *t = trainer(own, x, hpml_linear(x, CLASSES, NULL), 0);
    *(bool *)user = t && hpml_distribute(t, c, NULL) == NULL;
    hpml_ctx_free(own);
    return hpml_ctx_status(hpml_comm_ctx(c));
}

TEST(errors_name_the_rank)
{
    job odd = { .model.odd = 3 }, mixed = { .d = { .exact = true, .delayed = true } },
        both = { .model.norm = true, .d = { .exact = true, .sync_batchnorm = true } };
    for (int background = 0; background < 2; background++) {
        job         nan   = { .fault.poison = 2 };
        hpml_status heard = go(&nan, 3, HPML_TRANSPORT_THREADS, background ? &linked : NULL);
        ENSURE(heard == HPML_ERR_NONFINITE || heard == HPML_ERR_PEER);
        ENSURE(strstr(nan.text, "NaN") || strstr(nan.text, "finite"));
    }
    job inner = { .fault.smudge = true, .d.exact = true };
    ENSURE(go(&inner, 2, HPML_TRANSPORT_THREADS, NULL) == HPML_ERR_NONFINITE &&
           strstr(inner.text, "is NaN or infinite"));
    ENSURE(go(&odd, 3, HPML_TRANSPORT_THREADS, NULL) == HPML_ERR_SHAPE);
    ENSURE(strstr(odd.text, "the same model on all ranks"));
    char text[512];
    bool refused = false;
    ENSURE(hpml_launch(&(hpml_launch_desc){ .ranks = 1 }, foreign, &refused, text, sizeof text) == HPML_ERR_ARGUMENT);
    ENSURE(refused && strstr(text, "of another context"));
    ENSURE(go(&mixed, 2, HPML_TRANSPORT_THREADS, NULL) == HPML_ERR_UNSUPPORTED);
    ENSURE(go(&both, 2, HPML_TRANSPORT_THREADS, NULL) == HPML_ERR_UNSUPPORTED && strstr(both.text, "sync_batchnorm"));
    for (int exact = 0; exact < 2; exact++) { /* an unknown codec is refused, not taken for NONE */
        job unknown = { .d = { .exact = exact, .codec.kind = hpml_codec_find("threebit") } };
        ENSURE(go(&unknown, 2, HPML_TRANSPORT_THREADS, NULL) == HPML_ERR_ARGUMENT);
        ENSURE(strstr(unknown.text, "codec=-1"));
    }
    job late = { .train.steps = 3, .file.save = path("late"), .d.delayed = true },
        now = { .file.load = late.file.save },
        other = { .file.load = late.file.save, .model.hidden = 32, .d.delayed = true };
    ENSURE(ran(&late, 2, NULL));
    ENSURE(go(&now, 2, HPML_TRANSPORT_THREADS, NULL) == HPML_ERR_FORMAT);
    ENSURE(strstr(now.text, "not yet applied") && strstr(now.text, ".delayed"));
    ENSURE(go(&other, 2, HPML_TRANSPORT_THREADS, NULL) == HPML_ERR_SHAPE);
    remove(late.file.save);
}
