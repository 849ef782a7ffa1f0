/* Forecasts against trainings in virtual time, against the simulator, and against each other; machines, the search. */
#include <pthread.h>
#define HPML_COMM_IMPLEMENTATION /* private functions; hpml.h's body is compiled apart */
#include "../hpml_comm.h"
#include "test.h"
#include <time.h>

enum { WIDTH = 8, MOST = 12, STEPS = 3, REAL_STEPS = 6, REAL_RANKS = 8, PACED_RANKS = 11, PACED_STEPS = 700 };

/* A model of layers that compute nothing and take time, with a parameter of any size each. All times and the bandwidths
   are sums of few powers of two, so that a forecast adds up the same numbers without rounding. */
typedef struct job {
    hpml_plan    plan;
    hpml_network network;
    int          ranks, layers, batch;
    int64_t      cols, more;  /* floats of the first parameter; how many more each next one has */
    int64_t      rows;        /* of each parameter, in forecasts; 0: 1 */
    double       update_s;    /* seconds to step all parameters, in forecasts */
    bool         dense;       /* each layer is followed by a hpml_linear without bias, which takes no time */
    bool         sums;        /* each layer ends in a sum over axis tensor, forward and backward */
    bool         mixed;       /* the model is mixed_model */
    int32_t      cut[MOST];   /* of the layers into pieces of a pipeline */
    /* results */
    double       ends[STEPS]; /* the latest clock after each step */
    int64_t      bytes;       /* sent by all ranks in the last step */
    char         error[400];
    char         json[3000];  /* rank 0's record of the run, with *predicted */
    const hpml_prediction *predicted;
    const hpml_machine    *machine; /* for hpml_distribute_predict on rank 0; NULL: not called */
    hpml_prediction        out;
    char                   text[1200], why[400];
    bool                   real, steady;                  /* real time, or a pipeline that is never emptied; then the
                                                             ranks' clocks after each step: */
    double                 clock[REAL_RANKS][REAL_STEPS];
    int                    length;                        /* above 0: steps (federated: rounds) of ranks with their own
                                                             pace; their clocks after each: */
    double                 end[PACED_RANKS][PACED_STEPS];
} job;

#define ORIGIN 16.0 /* clocks of all ranks at the start */
static double unit = 1.0 / (1 << 20);

static double forward_s(int layer) { return layer == 0 ? 0 : unit * (8 + 4 * (layer % 3)); } /* of a sample */

typedef struct work { hpml_comm *c; int layer; bool halves; } work;

static hpml_status work_forward(const hpml_run *run, hpml_node *n)
{
    const work *w = (const work *)n->attr.custom->user;
    (void)run;
    memcpy(n->out->data, n->src[0]->data, (size_t)hpml_tensor_count(n->out) * sizeof(float));
    hpml_comm_compute(w->c, forward_s(w->layer) * (double)n->out->shape[0]);
    return HPML_OK;
}

static hpml_status work_backward(const hpml_run *run, hpml_node *n)
{
    const work *w = (const work *)n->attr.custom->user;
    hpml_node_give(run, n, 0, n->out->grad);
    for (int i = 0; i < 2; i++)
        if (!w->halves || n->src[i]->grad) hpml_comm_compute(w->c, forward_s(w->layer) * (double)n->out->shape[0]);
    return HPML_OK;
}

static hpml_tensor *layer(work *w, hpml_tensor *x, const job *j)
{
    const hpml_custom     op = { .name = "work", .forward = work_forward, .backward = work_backward, .user = w,
                                 .flops = 1 + 1e12 * forward_s(w->layer), .halves = w->halves };
    const hpml_param_desc p = { .ndim = 1, .shape = { j->cols + w->layer * j->more }, .init = HPML_INIT_ONES };
    hpml_tensor          *src[2] = { j->sums ? hpml_group_copy(x, HPML_AXIS_TENSOR) : x, NULL };
    src[1] = hpml_param_create(x->ctx, &p);
    hpml_tensor *y = hpml_custom_op(src, 2, &op);
    if (j->dense) return hpml_linear(y, WIDTH, &(hpml_linear_desc){ .no_bias = true });
    return j->sums ? hpml_group_sum(y, HPML_AXIS_TENSOR) : y;
}

/* A model with ring attention and experts, which take no time: layer 0, attention, layer 1, experts, layer 2. */
enum { MIX_T = 8, MIX_C = 16, MIX_EXPERTS = 4, MIX_HIDDEN = 32 };
static int mix_steps(const job *j) { return MIX_T / (j->plan.sequence > 1 ? j->plan.sequence : 1); }

static hpml_tensor *mixed_model(work *w, hpml_tensor *x, const job *j)
{
    const int64_t      wide[3] = { j->batch, mix_steps(j), 3 * MIX_C }, one[3] = { j->batch, mix_steps(j), MIX_C };
    const int64_t      flat[2] = { j->batch, mix_steps(j) * MIX_C };
    hpml_experts_desc  experts = { .experts = MIX_EXPERTS, .hidden = MIX_HIDDEN, .capacity = 1 };
    hpml_tensor       *y = hpml_reshape(layer(&w[0], x, j), 3, wide);
    y = hpml_reshape(hpml_ring_attention(y, &(hpml_attention_desc){ .heads = 2 }), 2, flat);
    y = hpml_experts(hpml_reshape(layer(&w[1], y, j), 3, one), &experts, NULL);
    return layer(&w[2], hpml_reshape(y, 2, flat), j);
}

/* Sets this rank's clock to ORIGIN, trains, and notes the clock after each step (federated: round). */
static hpml_status train_at_own_pace(hpml_comm *c, job *j, hpml_trainer *t, const float *x, const int32_t *labels)
{
    const int    r = hpml_comm_rank(c), period = j->plan.period > 0 ? j->plan.period : 1;
    const double slow = j->network.slow ? j->network.slow[r] : 1;
    for (int i = 0; i < 2; i++) hpml_comm_compute(c, (ORIGIN - hpml_comm_now(c)) / slow);
    for (int s = 0; s < j->length * period && hpml_ctx_status(hpml_comm_ctx(c)) == HPML_OK; s++) {
        hpml_trainer_step(t, x, labels, j->batch, NULL);
        j->end[r][s / period] = hpml_comm_now(c);
    }
    return hpml_ctx_status(hpml_comm_ctx(c));
}

static hpml_status train(hpml_comm *c, void *user)
{
    job         *j = (job *)user;
    hpml_ctx    *ctx = hpml_comm_ctx(c);
    work         works[MOST];
    float        x[16 * MIX_T * 3 * MIX_C] = { 0 };
    int32_t      labels[64] = { 0 };
    hpml_tensor *h = hpml_input_2d(ctx, j->batch, j->mixed ? mix_steps(j) * 3 * MIX_C : WIDTH), *input = h;
    for (int i = 0; i < j->layers; i++) {
        works[i] = (work){ c, i, j->plan.schedule == HPML_PIPE_ZERO_BUBBLE };
        if (!j->mixed) h = layer(&works[i], h, j);
    }
    if (j->mixed) h = mixed_model(works, h, j);
    hpml_trainer *t = hpml_trainer_create(ctx, &(hpml_trainer_desc){ .input = input, .output = h, .lr = 0.1f });
    int32_t       cut[MOST];
    hpml_plan     plan = j->plan;
    for (int q = 0; q < MOST; q++) cut[q] = j->sums ? 3 * j->cut[q] - 1 : j->cut[q]; /* ops: a copy, the layer, a sum;
                                                                                           no copy in layer 0 */
    plan.cut = plan.pipe > 1 ? cut : NULL;
    hpml_distributed *d = hpml_distribute(t, c, &plan);
    hpml_distribute_report report;
    if (j->length > 0) return train_at_own_pace(c, j, t, x, labels);
    for (int s = -1; s < (j->real || j->steady ? REAL_STEPS : STEPS) && hpml_ctx_status(ctx) == HPML_OK; s++) {
        hpml_trainer_step(t, x, labels, j->batch, NULL);
        /* the first step makes the background's communicators; then all clocks are set to the same time, exactly the
           second time, because the difference to it is then a small one */
        if ((j->real || j->steady) && s >= 0) j->clock[hpml_comm_rank(c)][s] = hpml_comm_now(c);
        if (j->real || j->steady) continue;
        for (int i = 0; i < 2 && s < 0; i++) hpml_comm_compute(c, ORIGIN - hpml_comm_now(c));
        if (s < 0) hpml_distribute_get(d, &report, true);
        if (s >= 0 && j->ends[s] < hpml_comm_now(c)) j->ends[s] = hpml_comm_now(c);
    }
    if (hpml_comm_rank(c) > 0) return hpml_ctx_status(ctx);
    if (j->machine) hpml_distribute_predict(d, j->machine, &j->out, j->why, sizeof j->why);
    hpml_distribute_text(d, j->text, sizeof j->text);
    hpml_distribute_json(d, j->predicted, j->json, sizeof j->json);
    return hpml_ctx_status(ctx);
}

static hpml_layer_facts facts_layer[2 * MOST];

static hpml_model_facts facts_of(const job *j)
{
    hpml_model_facts f = { 0 };
    for (int i = 0; i < j->layers; i++) {
        const int64_t sum = j->sums ? WIDTH : 0;
        facts_layer[i] = (hpml_layer_facts){ .forward_s = forward_s(i), .rows = j->rows,
                                             .cols = j->cols + i * j->more, .edge = WIDTH,
                                             .forward_sum = sum, .backward_sum = i > 0 ? sum : 0, .kept = 4 * WIDTH };
    }
    f.layers = j->layers, f.layer = facts_layer;
    for (int i = j->layers - 1; i >= 0 && j->dense; i--) {
        facts_layer[2 * i]     = facts_layer[i];
        facts_layer[2 * i + 1] = (hpml_layer_facts){ .rows = WIDTH, .cols = WIDTH, .edge = WIDTH, .dense = true };
        f.layers               = 2 * j->layers;
    }
    f.facts.ranks = j->ranks, f.facts.batch = j->batch, f.update_s = j->update_s;
    return f;
}

/* The facts of mixed_model. The router and the experts are a layer each. Axis sequence divides a layer's seconds, but
   not those of the training's layers, hence the factor. */
static hpml_model_facts mixed_facts(const job *j)
{
    hpml_model_facts f = { .layers = 6, .layer = facts_layer };
    const int64_t    floats = MIX_EXPERTS * (2 * MIX_HIDDEN * MIX_C + MIX_HIDDEN + MIX_C);
    const double     parts = MIX_T / mix_steps(j);
    memset(facts_layer, 0, sizeof facts_layer);
    for (int i = 0, at = 0; i < 3; i++, at += i == 1 ? 2 : 3) {
        facts_layer[at].forward_s = parts * forward_s(i);
        facts_layer[at].cols      = j->cols + i * j->more;
    }
    facts_layer[1] = (hpml_layer_facts){ .pass = MIX_T * 2 * MIX_C };
    facts_layer[3] = (hpml_layer_facts){ .rows = MIX_EXPERTS, .cols = MIX_C };
    facts_layer[4] = (hpml_layer_facts){ .cols = floats, .swap = MIX_T * MIX_C, .experts = true };
    f.facts.ranks = j->ranks, f.facts.batch = j->batch;
    return f;
}

static hpml_machine machine_of(const job *j)
{
    hpml_machine m = { 0 };
    m.network = j->network, m.direct = true;
    return m;
}

/* Plays the job's plan for `steps` steps; 0: as many as hpml_forecast does. The caller closes *y. */
static bool perform(const job *j, bool whole, bool loose, int steps, hpmlc_play *y, char *error, size_t size)
{
    const hpmlc_text to = { error, size };
    hpml_model_facts f = j->mixed ? mixed_facts(j) : facts_of(j);
    hpml_machine     m = machine_of(j);
    hpmlc_maker      k;
    hpml_plan        given = j->plan, plan;
    hpml_network     net;
    memset(y, 0, sizeof *y);
    given.cut = j->plan.pipe > 1 ? j->cut : NULL;
    if (hpmlc_forecast_check(&given, &f, &m, &to) != HPML_OK) return false;
    hpml_machine_network(&m, j->ranks, &net);
    hpml_status status = hpmlc_forecast_begin(&k, y, &given, &f, &m, &plan, &net, &to);
    y->origin = ORIGIN, y->loose = loose;
    if (steps > 0) y->steps = steps;
    if (status == HPML_OK) status = hpmlc_play_run(y, &k, whole, NULL, &to);
    free(k.cut);
    return status == HPML_OK;
}

/* Plays STEPS steps of the job's plan; ends: (STEPS) the latest clocks. Returns how many ranks are played; 0: error. */
static int play(const job *j, bool whole, bool loose, double *ends, char *error, size_t size)
{
    hpmlc_play y;
    int        played = perform(j, whole, loose, STEPS, &y, error, size) ? y.unit : 0;
    for (int s = 0; s < STEPS && played; s++) ends[s] = y.ends[s];
    hpmlc_play_close(&y);
    return played;
}

static job job_of(const char *plan, int ranks, int per_node)
{
    job  j = { .ranks = ranks, .layers = 9, .batch = 16, .cols = 4096 };
    char why[400];
    if (hpml_plan_parse(plan, &j.plan, why, sizeof why) != HPML_OK) printf("    %s\n", why);
    j.sums = j.plan.tensor > 1, j.dense = j.plan.route != HPML_ROUTE_ALLREDUCE || j.plan.codec.kind != HPML_CODEC_NONE;
    const int pieces = j.plan.pipe * (j.plan.schedule == HPML_PIPE_INTERLEAVED ? 2 : 1);
    for (int q = 1; q < pieces; q++) j.cut[q - 1] = 1 + q * (j.layers - 1) / pieces;
    j.network.ranks_per_node    = per_node;
    j.network.between.latency   = 16 * unit;
    j.network.between.bandwidth = 1 << 27;
    j.network.inside.latency    = unit;
    j.network.inside.bandwidth  = 1 << 30;
    return j;
}

static double latest(const job *j, int step)
{
    double end = 0;
    for (int r = 0; r < j->ranks; r++) end = fmax(end, j->clock[r][step]);
    return end;
}

/* Trains in virtual time; false: an error, which is printed. */
static bool train_on_clock(job *j)
{
    hpml_launch_desc d = { .transport = HPML_TRANSPORT_CLOCK, .ranks = j->ranks, .network = j->network,
                           .ctx = { .seed = 1, .threads = 1 }, .plan = &j->plan };
    if (hpml_launch(&d, train, j, j->error, sizeof j->error) == HPML_OK) return true;
    printf("    %s\n", j->error);
    return false;
}

/* Trains j in virtual time and plays its plan: whether all steps end at the same times, bit for bit. */
static bool equals(job *j, const char *plan)
{
    double ends[STEPS] = { 0 };
    char   why[400] = "";
    bool   good = train_on_clock(j), equal = true;
    int    played = play(j, true, false, ends, why, sizeof why);
    if (!played) printf("    %s\n", why);
    for (int s = 0; s < STEPS && good; s++) {
        const double real = j->ends[s] - ORIGIN, forecast = ends[s] - ORIGIN;
        if (fabs(forecast - real) <= 0) continue;
        printf("    \"%s\", %d ranks, step %d: %.9g us, forecast %.9g us (%+.3g %%)\n", plan, j->ranks, s, 1e6 * real,
               1e6 * forecast, 100 * (forecast / real - 1));
        equal = false;
    }
    return good && equal && played == j->ranks;
}

TEST(forecasts_equal_trainings_in_virtual_time)
{
    static const struct { const char *plan; int ranks, per_node; } cases[] = {
        { "", 4, 1 }, { "", 8, 4 }, { "", 6, 2 }, { "algorithm=ring", 8, 2 },
        { "algorithm=tree,bucket_bytes=1", 16, 4 }, { "no_overlap=1", 8, 2 },
        { "pipe=2", 2, 1 }, { "pipe=4,schedule=1f1b,micro=8", 4, 1 }, { "pipe=4,schedule=1f1b,micro=8", 8, 4 },
        { "pipe=2,schedule=interleaved,micro=4", 4, 2 }, { "pipe=4,schedule=zero_bubble,micro=8", 8, 2 },
        { "tensor=2", 2, 2 }, { "tensor=2,bucket_bytes=1", 8, 8 }, { "tensor=4", 8, 4 },
        { "tensor=2,pipe=2,schedule=1f1b,micro=4", 8, 4 },
        { "tensor=2,pipe=2,schedule=1f1b,micro=8", 16, 4 },
        { "shard=1", 4, 2 }, { "shard=2", 8, 4 }, { "shard=3", 8, 4 }, { "shard=1,pipe=2,micro=4", 8, 2 },
        { "shard=2,bucket_bytes=1", 8, 1 }, { "shard=3,bucket_bytes=1", 4, 2 },
        { "shard=2,no_overlap=1,bucket_bytes=1", 8, 2 }, { "shard=3,no_overlap=1,bucket_bytes=1", 8, 2 },
        { "shard=2,pipe=2,schedule=1f1b,micro=8", 8, 4 }, { "shard=3,pipe=2,schedule=1f1b,micro=8", 4, 1 },
        { "shard=3,pipe=2,micro=4,bucket_bytes=1", 8, 2 }, { "shard=2,pipe=4,micro=4", 8, 4 },
        { "shard=2,pipe=2,micro=2,no_overlap=1", 4, 1 },
        { "strategy=ps,servers=1", 5, 1 }, { "strategy=ps,servers=2", 8, 1 }, { "strategy=local", 4, 1 },
        { "strategy=elastic", 8, 4 }, { "strategy=block", 6, 1 },
        { "exact=1", 4, 1 }, { "exact=1,algorithm=ring", 8, 4 }, { "strategy=gossip", 8, 2 },
        { "strategy=gossip,topology=pairs", 6, 1 }, { "strategy=gossip,topology=pairs,seed=9", 7, 2 },
        { "strategy=gossip,topology=wheel", 5, 1 }, { "strategy=gossip,topology=all", 4, 2 },
        { "route=factors", 4, 1 }, { "route=factors,no_overlap=1", 8, 4 }, { "route=hybrid", 4, 2 },
        { "delayed=1", 4, 1 }, { "delayed=1,pipe=2,micro=2", 8, 4 },
        { "delayed=1,codec=onebit,codec.min_elements=10", 6, 2 }, { "codec=onebit,codec.compress_all=1", 4, 1 },
        { "codec=twobit,codec.compress_all=1", 7, 3 }, { "codec=onebit,codec.min_elements=10,pipe=2", 10, 1 },
        { "codec=bf16,bucket_bytes=30000", 5, 1 }, { "codec=topk,codec.ratio=0.013", 4, 2 },
        { "codec=topk,codec.compress_all=1", 3, 1 }, { "codec=lowrank,codec.min_elements=10", 6, 1 },
        { "codec=lowrank,codec.lowrank=40,codec.min_elements=10", 4, 2 },
        { "tensor=2,pipe=4,schedule=1f1b,micro=8", 64, 8 }, { "", 64, 8 },
    };
    bool all = true;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        job j = job_of(cases[i].plan, cases[i].ranks, cases[i].per_node);
        all   = equals(&j, cases[i].plan) && all;
    }
    ENSURE(all);
}

TEST(forecasts_of_ring_attention_and_experts_equal_trainings_in_virtual_time)
{
    static const struct { const char *plan; int ranks, per_node; } cases[] = {
        { "sequence=2", 2, 1 }, { "sequence=2", 4, 2 }, { "sequence=4", 8, 4 },
        { "sequence=8,shard=2", 8, 1 }, { "expert=2", 2, 1 }, { "expert=2", 4, 2 },
        { "sequence=2,expert=2", 4, 2 }, { "expert=4", 8, 2 }, { "sequence=2,expert=2", 16, 4 },
        { "expert=2,no_overlap=1", 4, 1 }, { "expert=2,shard=2,no_overlap=1", 4, 1 },
        { "expert=2,shard=3,no_overlap=1", 8, 2 }, { "expert=4,shard=3", 8, 2 },
        { "expert=2,shard=1", 2, 1 }, { "expert=2,shard=1", 4, 2 }, { "sequence=2,expert=2,shard=2", 8, 1 },
        { "expert=2,shard=3", 8, 2 }, { "expert=2,shard=3,bucket_bytes=9000", 4, 1 },
        { "expert=2,shard=3,bucket_bytes=9000", 8, 2 }, { "expert=4,shard=3,bucket_bytes=5000", 8, 1 },
        { "sequence=2,expert=2,shard=3,bucket_bytes=5000", 8, 2 },
    };
    bool all = true;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        job j = job_of(cases[i].plan, cases[i].ranks, cases[i].per_node);
        j.mixed = true, j.dense = false, j.layers = 3;
        all = equals(&j, cases[i].plan) && all;
    }
    ENSURE(all);
}

/* Pipelines that are never emptied: the forecast is the mean of steps of the full pipeline; of these every second one
   takes equally long. */
TEST(steady_pipelines_equal_trainings_in_virtual_time)
{
    static const struct { const char *plan; int ranks, per_node; } cases[] = {
        { "pipe=2,schedule=stash", 2, 1 }, { "pipe=3,schedule=stash", 3, 1 }, { "pipe=3,schedule=vertical", 3, 2 },
        { "pipe=2,schedule=stash", 4, 2 }, { "pipe=2,schedule=vertical,algorithm=ring", 8, 4 },
    };
    for (int i = 0; i < 5; i++) {
        job              j = job_of(cases[i].plan, cases[i].ranks, cases[i].per_node);
        hpml_model_facts f = facts_of(&j);
        hpml_machine     m = machine_of(&j);
        hpml_plan        plan = j.plan;
        hpml_prediction  p = { 0 };
        plan.cut = j.cut;
        j.steady = true;
        ENSURE(hpml_forecast(&plan, &f, &m, &p, j.why, sizeof j.why) == HPML_OK && train_on_clock(&j));
        const double step = 0.5 * (latest(&j, REAL_STEPS - 1) - latest(&j, REAL_STEPS - 3));
        if (fabs(p.step_s / step - 1) > 1e-9)
            printf("    \"%s\", %d ranks: %.9g us, forecast %.9g us\n", cases[i].plan, j.ranks, 1e6 * step,
                   1e6 * p.step_s);
        ENSURE_NEAR(p.step_s / step, 1, 1e-9);
    }
}

/* ---- ranks that do not step together ---- */

static hpml_status forecast(const char *text, const hpml_model_facts *f, const hpml_machine *m, hpml_prediction *out);

/* Seconds of a step of j, a training of rounds that is over: the mean of rounds 1 to 36. */
static double mean_step(const job *j, int workers)
{
    double first = 0, last = 0;
    for (int r = 0; r < workers; r++) {
        first = fmax(first, j->end[r][0]);
        last  = fmax(last, j->end[r][36]);
    }
    return (last - first) / 36 / (j->plan.period > 0 ? j->plan.period : 1);
}

/* Compares a play with the training j, both over. *begin: the largest difference, in seconds, between the two in when a
   step ends. Returns the seconds of a step of the training, over the steps that the play counts: workers / the sum of
   their rates. A worker too slow to have a rate does not count; in backup it is no worker either. */
static double compare(const job *j, const hpmlc_play *y, double *begin)
{
    double rate = 0, rated = 0;
    *begin = 0;
    for (int s = 0; s < y->steps && s < j->length; s++) {
        double real = 0;
        for (int r = 0; r < y->workers; r++) real = fmax(real, j->end[r][s]);
        *begin = fmax(*begin, fabs(y->ends[s] - real));
    }
    if (!y->paced) return mean_step(j, y->workers);
    for (int r = 0; r < y->workers; r++) {
        const hpmlc_pace *p = &y->pace[r];
        if (p->until <= p->since) continue;
        const double since = j->end[r][p->first - 1], until = j->end[r][p->last - 1];
        *begin = fmax(*begin, fmax(fabs(since - p->since), fabs(until - p->until)));
        rate += (p->last - p->first) / (until - since);
        rated++;
    }
    return (j->plan.strategy == HPML_STRATEGY_BACKUP ? rated : y->workers) / rate;
}

/* Plays the plan, trains by it in virtual time for as many steps, and forecasts it. *begin: the largest difference
   between play and training in when a step ends; *steady: that between forecast and training in the seconds of a step,
   relative. False: an error. */
static bool differences(const char *text, int ranks, int per_node, const double *slow, double *begin, double *steady)
{
    job             j = job_of(text, ranks, per_node);
    hpmlc_play      y;
    hpml_prediction p = { 0 };
    const bool      rounds = j.plan.strategy == HPML_STRATEGY_FEDERATED;
    j.cols = 1000, j.more = 1037, j.network.slow = (double *)(uintptr_t)slow, j.length = 40;
    hpml_model_facts f = facts_of(&j);
    hpml_machine     m = machine_of(&j);
    bool good = perform(&j, true, false, rounds ? STEPS : 0, &y, j.why, sizeof j.why) && y.unit == ranks;
    for (int r = 0; r < y.workers && good && y.paced; r++)
        if (j.length < hpmlc_own_of(&y, r)->step + 1) j.length = hpmlc_own_of(&y, r)->step + 1;
    if (j.length > PACED_STEPS) snprintf(j.why, sizeof j.why, "a play of %d steps", j.length);
    good = good && j.length <= PACED_STEPS && train_on_clock(&j) &&
           hpml_forecast(&j.plan, &f, &m, &p, j.why, sizeof j.why) == HPML_OK;
    *begin = *steady = INFINITY;
    if (!good) printf("    %s: %s\n", text, j.why);
    if (good) {
        const double step = compare(&j, &y, begin);
        *steady = fabs(p.step_s / step - 1);
    }
    hpmlc_play_close(&y);
    return good;
}

/* Strategies in which the order of messages decides: all steps of the play end at the same times as in a training, bit
   for bit, and a step takes as long. 2 to 8 workers, 1 to 3 servers, 1 to 3 ranks on a node. */
TEST(steps_at_the_ranks_own_pace_equal_trainings_in_virtual_time)
{
    static const double speeds[3][PACED_RANKS] = { { 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1 },
        { 1, 1, 2, 1, 1, 1, 1, 1, 1, 1, 1 }, { 4, 1, 1.25, 1, 2, 1, 1.5, 1, 1, 1, 1 } };
    static const char *const plans[] = { "strategy=ssp", "strategy=ssp,staleness=1", "strategy=ssp,staleness=4",
        "strategy=async", "strategy=backup,backup=1", "strategy=backup,backup=2", "strategy=federated,period=2",
        "strategy=federated,period=3,share=0.5" };
    const int all = getenv("HPML_TEST_ALL") != NULL, count = (int)(sizeof plans / sizeof plans[0]);
    int       tried = 0, wrong = 0;
    double    begin, steady;
    for (int i = 0; i < 9 * 8 * count; i++) {
        const int plan = i % count, workers = 1 + i / count % 8, servers = 1 + i / count / 8 % 3;
        const int speed = i / count / 8 / 3, ranks = workers + servers, per_node = 1 + ranks % 3;
        char      text[80];
        if (workers == 1 || (plan == 5 && workers == 2)) continue;
        if (speed != (workers + plan / 3 + servers) % 3 || (!all && servers != 1 + (workers + plan) % 3)) continue;
        snprintf(text, sizeof text, "%s,servers=%d", plans[plan], servers);
        bool good = differences(text, ranks, per_node, speeds[speed], &begin, &steady);
        good = good && begin == 0 && steady <= 1e-9;
        if (!good)
            printf("    \"%s\", %d ranks, %d a node, speeds %d: ends of steps differ by %.2g s, a step by %.2g\n",
                   text, ranks, per_node, speed, begin, steady);
        tried++;
        wrong += !good;
    }
    printf("    %d trainings\n", tried);
    ENSURE(wrong == 0 && tried >= 50);
}

/* A large staleness is played as a smaller one, which is reached sooner: a step in steady state takes as long. */
TEST(a_large_staleness_has_the_steady_step_of_a_training)
{
    const double     slow[5] = { 1, 1, 2, 1, 1 };
    job              j = job_of("strategy=ssp,staleness=40,servers=1", 5, 1);
    hpml_machine     m;
    hpml_model_facts f;
    hpml_prediction  p;
    j.cols = 1000, j.more = 1037, j.network.slow = (double *)(uintptr_t)slow, j.length = 240;
    f = facts_of(&j), m = machine_of(&j);
    ENSURE(train_on_clock(&j) && hpml_forecast(&j.plan, &f, &m, &p, j.why, sizeof j.why) == HPML_OK);
    for (int r = 0; r < 4; r++) ENSURE_NEAR((j.end[r][191] - j.end[r][143]) / 48 / p.step_s, 1, 1e-9);
}

/* Staleness 0 is strategy ps; the terms of a step add up to it; in backup, and with a part of the clients, fewer
   samples count; hogwild is each rank's own time, with 28 bytes a float for the shared values. */
TEST(what_a_step_at_the_ranks_own_pace_means)
{
    static const char *const plans[] = { "strategy=ssp,servers=2", "strategy=ssp,servers=2,staleness=3",
        "strategy=async,servers=2", "strategy=backup,servers=2,backup=2", "strategy=federated,servers=2,share=0.5",
        "strategy=federated,servers=2,period=4", "strategy=hogwild", "strategy=gossip" };
    static const double samples[] = { 128, 128, 128, 96, 64, 128, 160, 160 };
    double           slow[10] = { 1, 1, 1, 1, 1, 1, 1, 1, 1, 1 };
    job              j = job_of("", 10, 0);
    hpml_model_facts f = facts_of(&j);
    hpml_machine     m = machine_of(&j);
    hpml_prediction  p, ps;
    f.facts.together = true;
    ENSURE(forecast("strategy=ps,servers=2", &f, &m, &ps) == HPML_OK);
    for (int i = 0; i < 8; i++) {
        double sum = 0;
        ENSURE(forecast(plans[i], &f, &m, &p) == HPML_OK && p.step_s > 0 && p.memory == ps.memory);
        for (int t = 0; t < HPML_TERM_COUNT; t++) sum += p.term_s[t];
        ENSURE_NEAR(sum / p.step_s, 1, 1e-9);
        ENSURE_NEAR(p.samples_s * p.step_s, samples[i], 1e-9);
        if (i == 0) ENSURE(memcmp(&p, &ps, sizeof p) == 0);
        if (i == 2) ENSURE_NEAR((double)p.rank_bytes / (double)ps.rank_bytes, 1, 0.03);
    }
    m.bandwidth = 1e9, m.network.slow = slow, slow[3] = 2;
    double own = 3. * 4 * 4096 / 1e9; /* layer 0 reads its parameters; the others have seconds */
    for (int i = 0; i < f.layers; i++) own += 3 * 16 * f.layer[i].forward_s + 4096. * (12 + 28) / 1e9;
    ENSURE(forecast("strategy=hogwild", &f, &m, &p) == HPML_OK && p.played == 10 && p.rank_bytes == 0);
    ENSURE_NEAR(p.step_s / (10 / (9.5 / own)), 1, 1e-9);
    f.facts.ranks = 2; /* one worker: as ps, with the time of the server's update */
    ENSURE(forecast("strategy=ps,servers=1", &f, &m, &ps) == HPML_OK);
    for (int i = 1; i < 3; i++) {
        const char *plan = i == 1 ? "strategy=ssp,servers=1,staleness=3" : "strategy=async,servers=1";
        ENSURE(forecast(plan, &f, &m, &p) == HPML_OK);
        ENSURE_NEAR(p.step_s / ps.step_s, 1, 1e-9);
    }
    f.facts.ranks = 4, f.update_s = 1, slow[3] = 1; /* the server steps for each gradient, and is busy */
    ENSURE(forecast("strategy=async,servers=1", &f, &m, &p) == HPML_OK);
    ENSURE_NEAR(p.step_s / 3, 1, 0.01);
    f.facts.ranks = 10, m.network.ranks_per_node = 5;
    ENSURE(hpml_forecast(&(hpml_plan){ .strategy = HPML_STRATEGY_HOGWILD }, &f, &m, &p, j.why, sizeof j.why) ==
           HPML_ERR_UNSUPPORTED);
    ENSURE(strstr(j.why, "the memory of one node, and these 10 ranks are on several"));
}

/* A search keeps the strategy of its base: it finds the codec of an asynchronous training; hogwild on several nodes is
   not possible. */
TEST(a_search_with_strategies_of_their_own_pace)
{
    static const char *const bases[] = { "strategy=async,servers=1", "strategy=ssp,servers=1,staleness=2",
        "strategy=backup,servers=1,backup=1", "strategy=federated,servers=1", "strategy=hogwild" };
    job              j = job_of("", 5, 0);
    hpml_model_facts f = facts_of(&j);
    hpml_machine     m = machine_of(&j);
    f.facts.together = true;
    for (int i = 0; i < 5; i++) {
        hpml_search_desc d = { .lossy = true };
        hpml_found       found[2];
        hpml_prediction  p;
        ENSURE(hpml_plan_parse(bases[i], &d.base, j.why, sizeof j.why) == HPML_OK);
        const int count = hpml_search(&d, &f, &m, found, 2, NULL, j.why, sizeof j.why);
        if (count < 1) printf("    %s: %s\n", bases[i], j.why);
        ENSURE(count >= 1 && found[0].plan.strategy == d.base.strategy);
        ENSURE(i > 2 || found[0].plan.codec.kind == HPML_CODEC_BF16);
        ENSURE(hpml_forecast(&found[0].plan, &f, &m, &p, NULL, 0) == HPML_OK);
        ENSURE_NEAR(found[0].prediction.step_s / p.step_s, 1, 0);
        m.network.ranks_per_node = 2;
        if (i == 4) ENSURE(hpml_search(&d, &f, &m, found, 2, NULL, j.why, sizeof j.why) == -1);
        if (i == 4) ENSURE(strstr(j.why, "no plan is possible"));
        m.network.ranks_per_node = 0;
    }
}

/* A worker that is 1,000 times slower than the others does not make the play 1,000 times longer. */
TEST(one_very_slow_worker)
{
    static const char *const plans[] = { "strategy=async,servers=1", "strategy=backup,servers=1,backup=1" };
    double slow[9] = { 1, 1, 1, 1, 1, 1, 1, 1, 1 };
    for (int i = 0; i < 2; i++) {
        job              j = job_of("", 9, 0);
        hpml_model_facts f = facts_of(&j);
        hpml_machine     m = machine_of(&j);
        hpml_prediction  p, equal;
        m.network.slow = slow, slow[5] = 1;
        ENSURE(forecast(plans[i], &f, &m, &equal) == HPML_OK);
        slow[5] = 1000;
        const double start = (double)clock() / CLOCKS_PER_SEC;
        ENSURE(forecast(plans[i], &f, &m, &p) == HPML_OK && (double)clock() / CLOCKS_PER_SEC - start < 2);
        const double slower = p.step_s / equal.step_s; /* async: 7 of 8 workers, backup: nothing is lost */
        if (fabs(slower - (i ? 1 : 8. / 7)) > 0.05) printf("    %s: a step takes %g times as long\n", plans[i], slower);
        ENSURE_NEAR(slower, i ? 1 : 8. / 7, 0.05);
        double terms = 0;
        slow[5] = 20; /* its steps count: its terms, too */
        ENSURE(forecast(plans[i], &f, &m, &p) == HPML_OK);
        for (int t = 0; t < HPML_TERM_COUNT; t++) terms += p.term_s[t];
        if (fabs(terms / p.step_s - 1) > 1e-6) printf("    %s: the terms are %g steps\n", plans[i], terms / p.step_s);
        ENSURE_NEAR(terms / p.step_s, 1, 1e-6);
    }
}

/* The first update of delayed comes a step late, so that later steps take longer or shorter than the second one. */
TEST(a_delayed_step_is_one_of_a_long_training)
{
    for (int i = 0; i < 3; i++) {
        job              j = job_of(i == 2 ? "delayed=1,pipe=2,micro=2" : "delayed=1", 4, 1);
        hpmlc_play       y;
        hpml_prediction  p;
        hpml_machine     m;
        hpml_model_facts f;
        j.update_s = 0.004, j.network.between.bandwidth = i == 0 ? 84e5 : 4e7;
        f = facts_of(&j), m = machine_of(&j);
        hpml_plan plan = j.plan;
        plan.cut = j.plan.pipe > 1 ? j.cut : NULL;
        ENSURE(perform(&j, true, false, 12, &y, j.why, sizeof j.why));
        ENSURE(hpml_forecast(&plan, &f, &m, &p, j.why, sizeof j.why) == HPML_OK);
        const double later = 0.5 * (y.ends[11] - y.ends[9]);
        hpmlc_play_close(&y);
        ENSURE_NEAR(p.step_s / later, 1, 1e-6);
    }
}

/* A slow network: a search for a delayed plan finds that a codec makes it faster. */
TEST(a_search_for_a_delayed_plan_finds_a_codec)
{
    job               j = job_of("delayed=1,pipe=1,tensor=1", 16, 1);
    hpml_found        found;
    hpml_search_desc  d = { .base = j.plan, .lossy = true };
    j.cols = 1 << 20, j.network.between.bandwidth = 1e7;
    hpml_model_facts  f = facts_of(&j);
    hpml_machine      m = machine_of(&j);
    for (int i = 0; i < f.layers; i++) facts_layer[i].rows = 1024, facts_layer[i].cols /= 1024;
    ENSURE(hpml_search(&d, &f, &m, &found, 1, NULL, j.why, sizeof j.why) == 1);
    ENSURE(found.plan.codec.kind == HPML_CODEC_ONEBIT);
}

/* Fewer rows than ranks: a codec gives some ranks large blocks and others none; one rank is played for all. */
TEST(blocks_of_different_sizes_where_one_rank_is_played_for_all)
{
    static const struct { const char *plan; int64_t rows, cols; double off; } cases[] = {
        { "codec=bf16", 12, 20000, 0.1 }, { "codec=onebit", 200, 4000, 0.3 }, { "codec=bf16", 1000, 400, 0.02 },
    };
    for (int i = 0; i < 3; i++) {
        job         j = job_of(cases[i].plan, 128, 1);
        hpmlc_play  y;
        double      end[2];
        j.dense = false, j.rows = cases[i].rows, j.cols = cases[i].cols, j.more = 0, j.layers = 4;
        for (int whole = 0; whole < 2; whole++) {
            ENSURE(perform(&j, whole, true, STEPS, &y, j.why, sizeof j.why) && y.unit == (whole ? 128 : 1));
            end[whole] = y.ends[STEPS - 1] - ORIGIN;
            hpmlc_play_close(&y);
        }
        if (fabs(end[0] / end[1] - 1) > cases[i].off) printf("    %s: %g, all %g\n", cases[i].plan, end[0], end[1]);
        ENSURE_NEAR(end[0] / end[1], 1, cases[i].off);
    }
}

/* Equal ranks are played once: the same clocks as when all ranks are played, but for blocks that are not equal. What is
   assumed of the sum of losses on more than 64 ranks costs less than 1 %, of small shards and pipelines 5 %. Where axis
   tensor, a pipeline and axis data share the network cards of nodes, `ties`, messages of several collectives come to a
   card at the same time, and which is first depends on the rank; played once, the clocks are within a tenth. */
TEST(equal_ranks_are_played_once)
{
    static const struct { const char *plan; int ranks, per_node, played; double losses; bool ties; } cases[] = {
        { "", 64, 1, 1, .01, false }, { "", 64, 8, 8, .01, false }, { "algorithm=ring", 64, 4, 4, .01, false },
        { "algorithm=halving", 64, 1, 1, .01, false }, { "algorithm=pairwise", 64, 4, 4, .01, false },
        { "tensor=4,algorithm=ring", 64, 8, 8, .01, false }, { "tensor=8", 64, 8, 8, .01, false },
        { "tensor=8", 8, 8, 1, .01, false }, { "tensor=16,algorithm=ring", 64, 4, 4, .01, false },
        { "tensor=8,algorithm=halving", 64, 4, 4, .01, false }, { "shard=1", 64, 8, 8, .01, false },
        { "shard=3", 64, 1, 1, .01, false }, { "tensor=8,shard=3", 64, 4, 4, .05, false },
        { "tensor=2,pipe=4,schedule=1f1b,micro=8,algorithm=ring", 64, 8, 8, .01, false },
        { "tensor=2,pipe=4,schedule=1f1b,micro=8", 64, 4, 8, .01, false }, { "pipe=4,micro=8", 64, 1, 4, .01, false },
        { "pipe=8,micro=8", 64, 4, 8, .05, false }, { "tensor=8,pipe=2,micro=4,algorithm=ring", 16, 2, 4, .01, false },
        { "tensor=2,pipe=4,micro=8,algorithm=hierarchical", 64, 4, 8, .01, false },
        { "pipe=8,schedule=zero_bubble,micro=8,algorithm=ring", 64, 8, 8, .01, false },
        { "tensor=8,pipe=4,schedule=1f1b,micro=8,algorithm=ring", 64, 2, 8, .01, true },
        { "strategy=local", 64, 8, 8, .01, false }, { "algorithm=tree", 64, 1, 64, .01, false },
        { "strategy=ps,servers=1", 64, 1, 64, .01, false }, { "", 62, 4, 62, .01, false },
    };
    bool all = true;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        job    j = job_of(cases[i].plan, cases[i].ranks, cases[i].per_node);
        double off = j.plan.strategy == HPML_STRATEGY_LOCAL ? 1e-5 : 0; /* 64 blocks of a meeting are not equal */
        double once[STEPS] = { 0 }, loose[STEPS] = { 0 }, strict[STEPS] = { 0 };
        int    played = play(&j, false, true, once, NULL, 0);
        int    whole = play(&j, true, true, loose, NULL, 0);
        bool   fine = played == cases[i].played && whole == j.ranks && play(&j, true, false, strict, NULL, 0) == whole;
        if (cases[i].ties) off = 0.1;
        for (int s = 0; s < STEPS; s++) {
            fine = fine && fabs((once[s] - ORIGIN) / (loose[s] - ORIGIN) - 1) <= off;
            fine = fine && fabs((loose[s] - ORIGIN) / (strict[s] - ORIGIN) - 1) < cases[i].losses;
        }
        fine = fine && play(&j, false, false, once, NULL, 0) == whole && memcmp(once, strict, sizeof once) == 0;
        if (!fine)
            printf("    \"%s\", %d of %d ranks: %.9g us, all %.9g us, strict %.9g us\n", cases[i].plan, played, whole,
                   1e6 * (once[STEPS - 1] - ORIGIN), 1e6 * (loose[STEPS - 1] - ORIGIN),
                   1e6 * (strict[STEPS - 1] - ORIGIN));
        all = all && fine;
    }
    ENSURE(all);
    job     own = job_of("algorithm=ring", 32, 0); /* nodes that the caller lists: all ranks are played */
    int32_t node[32];
    double  ends[STEPS];
    for (int r = 0; r < 32; r++) node[r] = r / 8;
    own.network.node = node;
    ENSURE(play(&own, false, true, ends, NULL, 0) == 32);
}

/* The number behind a name in a JSON text, after the first `in`; NaN: there is none. */
static double number_of(const char *json, const char *in, const char *name)
{
    const char *at = strstr(json, in);
    at = at ? strstr(at, name) : NULL;
    return at ? atof(at + strlen(name) + 2) : NAN; /* behind ": */
}

/* The record of a run has what was measured and what was predicted, which agree in virtual time. */
TEST(a_run_is_recorded_with_its_forecast)
{
    job              j = job_of("shard=1", 4, 2);
    hpml_model_facts f = facts_of(&j);
    hpml_machine     m = machine_of(&j);
    hpml_prediction  p;
    ENSURE(hpml_forecast(&j.plan, &f, &m, &p, NULL, 0) == HPML_OK);
    j.predicted = &p;
    ENSURE(train_on_clock(&j));
    ENSURE(j.json[0] == '{' && j.json[strlen(j.json) - 1] == '}' && !strchr(j.json, '\n'));
    ENSURE(strstr(j.json, "\"seed\": 1, \"ranks\": 4, \"transport\": \"clock\"") && strstr(j.json, ",shard=1,"));
    ENSURE_NEAR(number_of(j.json, "measured", "step_s") / p.step_s, 1, 0.02);
    ENSURE_NEAR(number_of(j.json, "predicted", "step_s") / p.step_s, 1, 1e-6);
    ENSURE_NEAR(number_of(j.json, "predicted", "bytes") / number_of(j.json, "measured", "bytes"), 1, 0.01);
    ENSURE_NEAR(number_of(j.json, "}", "measured_by_predicted"), 1, 0.02);
    j.predicted = NULL;
    ENSURE(train_on_clock(&j) && strstr(j.json, "measured") && !strstr(j.json, "predicted"));
    ENSURE(!strstr(j.text, "forecast"));
    /* by the trainer's own model: the layers' operations, which stand for a batch */
    m.flops   = 1e12 / j.batch;
    j.machine = &m;
    j.plan    = (hpml_plan){ 0 };
    ENSURE(train_on_clock(&j) && j.out.step_s > 0 && strstr(j.text, "; forecast: step "));
    ENSURE_NEAR(number_of(j.json, "measured", "step_s") / j.out.step_s, 1, 0.02);
    ENSURE_NEAR(number_of(j.json, "predicted", "memory"), number_of(j.json, "measured", "memory"), 0);
    ENSURE_NEAR(number_of(j.json, "predicted", "bytes") / number_of(j.json, "measured", "bytes"), 1, 0.01);
    hpml_plan_parse("pipe=2", &j.plan, NULL, 0);
    j.cut[0] = 4;
    ENSURE(train_on_clock(&j) && strstr(j.why, "a rank has a part of the model"));
    ENSURE(hpml_distribute_predict(NULL, &m, NULL, j.error, sizeof j.error) == HPML_ERR_ARGUMENT);
}

/* ---- real time ---- */

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void *sleeper(void *took) /* sleeps 40 times for 2.5 ms */
{
    const double start = hpml_now();
    for (int i = 0; i < 40; i++) hpmlc_nap(0.0025);
    *(double *)took = hpml_now() - start;
    return NULL;
}

/* Returns by what fraction the last of 8 threads that only sleep is late. */
static double lateness(void)
{
    pthread_t thread[REAL_RANKS];
    double    took[REAL_RANKS], most = 0;
    for (int i = 0; i < REAL_RANKS; i++) pthread_create(&thread[i], NULL, sleeper, &took[i]);
    for (int i = 0; i < REAL_RANKS; i++) {
        pthread_join(thread[i], NULL);
        most = fmax(most, took[i]);
    }
    return most / 0.1 - 1;
}

/* Forecasts against trainings in real time: threads on links with a latency and a bandwidth, layers that sleep. The
   median step of five is within 15 % of the forecast for 11 of 12 plans, and the order of the plans is nearly the same.
   Left out on a machine on which threads that only sleep are late, because it is busy with other work. */
TEST_LONG(forecasts_are_near_trainings_in_real_time)
{
    static const struct { const char *plan; int ranks, per_node; } cases[] = {
        { "", 4, 1 }, { "", 8, 4 }, { "no_overlap=1", 4, 2 }, { "pipe=2,schedule=1f1b,micro=4", 2, 1 },
        { "pipe=4,schedule=1f1b,micro=8", 4, 1 }, { "pipe=2,micro=4", 4, 2 }, { "tensor=2", 4, 2 },
        { "tensor=2,pipe=2,schedule=1f1b,micro=4", 8, 4 }, { "shard=1", 4, 1 }, { "strategy=ps,servers=1", 5, 1 },
        { "strategy=async,servers=1", 5, 1 }, { "strategy=hogwild", 4, 4 },
    };
    enum { CASES = sizeof cases / sizeof cases[0] };
    double       real[CASES], forecast_s[CASES], squares = 0;
    const double was = unit;
    double       late = lateness();
    int          near = 0;
    static char  why[100];
    snprintf(why, sizeof why, "8 threads that only sleep are %.0f %% late: other work runs beside", 100 * late);
    if (late > 0.1) SKIP(why);
    unit = 64 * was;
    for (int i = 0; i < CASES; i++) {
        job              j = job_of(cases[i].plan, cases[i].ranks, cases[i].per_node);
        hpml_launch_desc d = { .transport = HPML_TRANSPORT_THREADS, .ranks = j.ranks,
                               .ctx = { .seed = 1, .threads = 1 }, .plan = &j.plan };
        double           step[REAL_STEPS - 1];
        hpml_prediction  p = { 0 };
        hpml_model_facts f = facts_of(&j);
        hpml_plan        plan = j.plan;
        f.facts.together = true;
        j.network.between.bandwidth /= 64, j.network.inside.bandwidth /= 64;
        const hpml_machine m = machine_of(&j);
        d.network = j.network;
        j.real    = true;
        plan.cut  = plan.pipe > 1 ? j.cut : NULL;
        bool good = hpml_forecast(&plan, &f, &m, &p, j.why, sizeof j.why) == HPML_OK &&
                    hpml_launch(&d, train, &j, j.error, sizeof j.error) == HPML_OK;
        for (int s = 1; s < REAL_STEPS; s++) step[s - 1] = latest(&j, s) - latest(&j, s - 1);
        qsort(step, REAL_STEPS - 1, sizeof *step, by_value);
        real[i]       = step[(REAL_STEPS - 1) / 2];
        forecast_s[i] = p.step_s;
        late = fmax(late, lateness());
        near += fabs(real[i] / p.step_s - 1) <= 0.15;
        printf("    %-38s %d ranks: %6.1f ms, forecast %6.1f ms%s%s\n", cases[i].plan, j.ranks, 1e3 * real[i],
               1e3 * p.step_s, j.why, j.error);
        if (!good) unit = was;
        ENSURE(good);
    }
    unit = was;
    for (int i = 0; i < CASES; i++) {
        int off = 0; /* difference of the plan's ranks in both orders */
        for (int k = 0; k < CASES; k++) off += (real[k] < real[i]) - (forecast_s[k] < forecast_s[i]);
        squares += off * off;
    }
    const double correlation = 1 - 6 * squares / (CASES * (CASES * CASES - 1.));
    printf("    %d of %d plans within 15 %%, rank correlation %.3f; 8 threads that only sleep: up to %.1f %% late\n",
           near, CASES, correlation, 100 * late);
    snprintf(why, sizeof why, "8 threads that only sleep were up to %.0f %% late between trainings", 100 * late);
    if ((near < CASES - 1 || correlation < 0.9) && late > 0.1) SKIP(why);
    ENSURE(near >= CASES - 1 && correlation >= 0.9);
}

/* ---- models and machines ---- */

enum { BLOCKS = 48, LAYERS = 2 * BLOCKS + 2 };

/* A language model of `blocks` blocks of width C; a sample is a text of 1,024 tokens. */
static hpml_model_facts transformer(int blocks, int64_t C, hpml_layer_facts layer[LAYERS])
{
    const int64_t    T = 1024, V = 50304;
    hpml_model_facts f = { .layers = 2 * blocks + 2, .layer = layer, .states = 2 };
    layer[0] = (hpml_layer_facts){ .name = "embedding", .flops = (double)(T * C), .rows = V, .cols = C, .edge = T * C,
                                   .kept = 4 * T * C, .forward_sum = T * C, .split = true };
    for (int i = 0; i < 2 * blocks; i++) {
        const bool   mlp = i % 2;
        const double both = 4. * (double)(T * T * C);
        layer[i + 1] = (hpml_layer_facts){
            .name = mlp ? "mlp" : "attention", .rows = mlp ? 8 * C : 4 * C, .cols = C, .edge = T * C, .split = true,
            .flops = 2. * (double)(T * (mlp ? 8 : 4) * C * C) + (mlp ? 0 : both), .bytes = 40. * (double)(T * C),
            .kept = 4 * T * C * (mlp ? 10 : 6), .forward_sum = T * C, .backward_sum = T * C };
    }
    layer[2 * blocks + 1] = (hpml_layer_facts){
        .name = "head", .flops = 2. * (double)(T * V * C), .rows = V, .cols = C, .edge = T * V, .kept = 4 * T * V,
        .backward_sum = T * C, .split = true };
    f.facts.batch = 1 << 20;
    return f;
}

static hpml_status forecast(const char *text, const hpml_model_facts *f, const hpml_machine *m, hpml_prediction *out)
{
    hpml_plan p = { 0 };
    char      why[500];
    hpml_status status = hpml_plan_parse(text, &p, why, sizeof why);
    if (status == HPML_OK) status = hpml_forecast(&p, f, m, out, why, sizeof why);
    if (status != HPML_OK && status != HPML_ERR_MEMORY) printf("    %s: %s\n", text, why);
    return status;
}

/* On its cases hpml_simulate gives the same times, without the sum of the losses. */
TEST(data_parallel_steps_equal_the_simulator)
{
    static const char *const plans[] = { "bucket_bytes=1", "bucket_bytes=1,algorithm=ring", "no_overlap=1", "" };
    for (int i = 0; i < 4; i++)
        for (int ranks = 2; ranks <= 64; ranks *= 2) {
            job                j = job_of(plans[i], ranks, 4);
            hpml_model_facts   f = facts_of(&j);
            hpml_machine       m = machine_of(&j);
            hpml_prediction    p;
            hpml_simulation    s;
            double             forward[MOST], backward[MOST];
            int64_t            elements[MOST];
            hpml_simulate_desc d = { .ranks = ranks, .network = j.network, .layers = j.layers, .forward_s = forward,
                                     .backward_s = backward, .elements = elements, .algorithm = j.plan.algorithm,
                                     .bucket_bytes = j.plan.bucket_bytes ? 1 : 1 << 18,
                                     .no_overlap = j.plan.no_overlap };
            for (int k = 0; k < j.layers; k++) {
                forward[k]  = j.batch * forward_s(k);
                backward[k] = 2 * forward[k];
                elements[k] = j.cols;
            }
            ENSURE(hpml_simulate(&d, &s, NULL, 0) == HPML_OK);
            ENSURE(hpml_forecast(&j.plan, &f, &m, &p, NULL, 0) == HPML_OK);
            ENSURE(p.buckets - 1 == s.buckets);
            ENSURE_NEAR(p.step_s / s.step_s, 1, 0.02);
            ENSURE_NEAR(p.term_s[HPML_TERM_COMPUTE], s.compute_s, 1e-12);
            ENSURE(p.rank_bytes >= s.bytes_per_rank && p.rank_bytes < s.bytes_per_rank + 2048);
        }
}

TEST(terms_add_up_and_name_what_decides)
{
    static const struct { const char *plan; int ranks; hpml_term decides; } cases[] = {
        { "", 32, HPML_TERM_DATA }, { "pipe=8,micro=2,tensor=4", 32, HPML_TERM_BUBBLE }, { "", 1, HPML_TERM_UPDATE },
        { "tensor=32", 32, HPML_TERM_TENSOR }, { "strategy=ps,servers=1", 32, HPML_TERM_SERVERS },
        { "pipe=4,schedule=zero_bubble,micro=1,delayed=1,codec=bf16", 12, HPML_TERM_DATA },
    };
    static hpml_layer_facts layer[LAYERS];
    hpml_model_facts        f = transformer(12, 768, layer);
    hpml_machine            m = *hpml_machine_find("t4");
    m.memory = 0;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        hpml_prediction p;
        char            text[500];
        double          sum = 0;
        f.facts.ranks = cases[i].ranks, f.facts.batch = 4;
        ENSURE(forecast(cases[i].plan, &f, &m, &p) == HPML_OK);
        for (int t = 0; t < HPML_TERM_COUNT; t++) sum += p.term_s[t];
        ENSURE_NEAR(sum / p.step_s, 1, 1e-9);
        if (p.decides != cases[i].decides) {
            hpml_prediction_text(&p, text, sizeof text);
            printf("    \"%s\": %s\n", cases[i].plan, text);
        }
        ENSURE(p.decides == cases[i].decides);
        ENSURE(hpml_prediction_text(&p, text, sizeof text) == (int)strlen(text));
        ENSURE(strstr(text, hpml_term_name(p.decides)) != NULL);
    }
}

/* Bytes by hand: 1,000 floats in two layers, adam. */
TEST(memory_of_a_rank)
{
    hpml_layer_facts layer[2] = { { .forward_s = 1, .rows = 16, .cols = 1600, .edge = 1, .kept = 1000 },
                                  { .forward_s = 1, .rows = 16, .cols = 1600, .kept = 3000 } };
    hpml_model_facts f = { .layers = 2, .layer = layer, .states = 2 };
    hpml_machine     m = { 0 };
    hpml_prediction  p;
    const int64_t    n = 2 * 25600, kept = 8 * 4000;
    f.facts.ranks = 8, f.facts.batch = 8;
    ENSURE(forecast("", &f, &m, &p) == HPML_OK && p.memory == 16 * n + kept);
    ENSURE(forecast("shard=1", &f, &m, &p) == HPML_OK && p.memory == 8 * n + n + kept);
    ENSURE(forecast("pipe=2,micro=4,schedule=1f1b", &f, &m, &p) == HPML_OK);
    ENSURE(p.memory == 16 * n / 2 + 2 * 3000); /* the second stage: one of 4 micro-batches in flight */
    ENSURE(forecast("codec=onebit", &f, &m, &p) == HPML_OK && p.memory == 20 * n + kept);
    hpml_memory planned = { .total = 12345 };
    f.planned = &planned;
    ENSURE(forecast("", &f, &m, &p) == HPML_OK && p.memory == 12345);
    m.memory = 12344;
    ENSURE(forecast("", &f, &m, &p) == HPML_ERR_MEMORY && p.memory == 12345 && p.step_s == 0);
}

TEST(fabrics)
{
    static const struct { hpml_fabric_kind kind; int nodes, routers, degree, diameter; double hops, share; } cases[] = {
        { HPML_FABRIC_SWITCH, 8, 1, 0, 0, 0, 1 }, { HPML_FABRIC_RING, 8, 8, 2, 4, 16. / 7, 7. / 8 },
        { HPML_FABRIC_TORUS, 16, 16, 4, 4, 32. / 15, 1 }, { HPML_FABRIC_TREE, 8, 7, 3, 4, 20. / 7, 0.5 },
        { HPML_FABRIC_FAT_TREE, 8, 7, 3, 4, 20. / 7, 1 },
        { HPML_FABRIC_SLIM_FLY, 50, 50, 7, 2, 91. / 49, 1 }, /* 7 routers at 1, 42 at 2 */
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        hpml_fabric f;
        ENSURE(hpml_fabric_measure(cases[i].kind, cases[i].nodes, &f));
        bool fine = f.routers == cases[i].routers && f.degree == cases[i].degree && f.diameter == cases[i].diameter &&
                    fabs(f.hops - cases[i].hops) < 1e-12 && fabs(f.share - cases[i].share) < 1e-12;
        if (!fine)
            printf("    %s: %d routers, degree %d, diameter %d, %g hops, share %g\n", hpml_fabric_name(cases[i].kind),
                   f.routers, f.degree, f.diameter, f.hops, f.share);
        ENSURE(fine);
    }
    hpml_fabric f;
    ENSURE(!hpml_fabric_measure(HPML_FABRIC_COUNT, 4, &f) && !hpml_fabric_measure(HPML_FABRIC_RING, 0, &f));
}

/* The layers of a trainer's graph. */
TEST(facts_of_a_trainer)
{
    hpml_ctx        *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .threads = 1 });
    hpml_tensor     *x = hpml_input_2d(ctx, 16, 10), *h = hpml_relu(hpml_linear(x, 20, NULL));
    hpml_trainer    *t = hpml_trainer_create(ctx, &(hpml_trainer_desc){ .input = x, .output = hpml_linear(h, 5, NULL),
                                                                        .optimizer = HPML_OPT_ADAM });
    hpml_world      *w = hpml_world_create(HPML_TRANSPORT_THREADS, 1, NULL);
    hpml_comm       *c = hpml_comm_create(ctx, &(hpml_comm_desc){ .world = w });
    hpml_layer_facts layer[8];
    hpml_model_facts f;
    hpml_machine     m = { .flops = 1e9 };
    hpml_prediction  p;
    int              ops = hpml_model_facts_of(t, c, layer, 8, &f);
    int64_t          params = 0;
    double           flops = 0;
    ENSURE(ops >= 3 && ops <= 8 && f.layers == ops && f.states == 2 && f.facts.batch == 16);
    for (int i = 0; i < ops; i++) {
        params += (layer[i].rows > 0 ? layer[i].rows : 1) * layer[i].cols;
        flops += 16 * layer[i].flops;
    }
    ENSURE(params >= 10 * 20 + 20 + 20 * 5 + 5 && params < 10 * 20 + 20 + 20 * 5 + 5 + 30); /* whole rows */
    ENSURE(flops >= 2. * 16 * (10 * 20 + 20 * 5));
    f.facts.ranks = 4; /* of a machine with more ranks than this one */
    ENSURE(hpml_forecast(&(hpml_plan){ 0 }, &f, &m, &p, NULL, 0) == HPML_OK);
    ENSURE_NEAR(p.term_s[HPML_TERM_COMPUTE], 3 * flops / 1e9, 1e-12);
    hpml_ctx_free(ctx);
    hpml_world_free(w);
}

TEST(machines)
{
    static hpml_layer_facts layer[LAYERS];
    hpml_model_facts        f = transformer(12, 768, layer);
    char                    text[LAYERS * 100];
    hpml_network            n;
    for (int i = 0; hpml_machine_at(i); i++) {
        const hpml_machine *m = hpml_machine_at(i);
        hpml_prediction     p;
        ENSURE(hpml_machine_find(m->name) == m);
        hpml_machine roomy = *m;
        roomy.memory  = 0;
        f.facts.ranks = 16, f.facts.batch = 1;
        ENSURE(forecast("", &f, &roomy, &p) == HPML_OK && p.step_s > 0);
    }
    ENSURE(!hpml_machine_find("abacus") && !hpml_machine_at(-1));
    hpml_machine m = *hpml_machine_find("v100-nvlink");
    ENSURE_NEAR(m.flops, 120e12, 0);
    m.fabric = HPML_FABRIC_SWITCH;
    hpml_machine_network(&m, 16, &n);
    ENSURE_NEAR(n.between.bandwidth, 4 * 12.5e9, 1);
    m.direct = false; /* two copies by the host's bus for each message */
    hpml_machine_network(&m, 16, &n);
    ENSURE_NEAR(1 / n.between.bandwidth, 1 / 50e9 + 2 / 16e9, 1e-18);
    hpml_machine_network(&m, 0, &n);
    ENSURE(n.between.bandwidth == m.network.between.bandwidth); /* a node alone: no cards, no fabric */
    /* small batches read more bytes of parameters than they make operations of; processing in memory never waits */
    f.layers = 2;
    ENSURE(hpml_roofline_text(&f, hpml_machine_find("v100-nvlink"), 1, text, sizeof text) == (int)strlen(text));
    ENSURE(strstr(text, "embedding") && strstr(text, "memory\n") && strstr(text, "work 8") && strstr(text, "depth"));
    hpml_roofline_text(&f, hpml_machine_find("pim"), 64, text, sizeof text);
    ENSURE(strstr(text, "attention") && strstr(strstr(text, "attention"), "flops\n"));
    hpml_ctx *ctx = hpml_ctx_create(NULL);
    ENSURE(hpml_machine_measure(ctx, &m) == HPML_OK && m.flops > 1e8 && m.bandwidth > 1e8);
    hpml_ctx_free(ctx);
}

/* Returns how many of the words, which end with NULL, the text has in this order. */
static int words_in(const char *text, const char *const *word)
{
    int count = 0;
    for (; word[count] && (text = strstr(text, word[count])) != NULL; count++) text += strlen(word[count]);
    return count;
}

/* What makers of machines, and lectures about them, say: operations, memory and links of an accelerator, its node, its
   cards for other nodes. A link's bandwidth is that of one direction: NVLink's 300 GB/s are 150 in each. */
TEST(presets_have_the_known_numbers)
{
    static const struct {
        const char *name;
        int         per_node;
        double      tera_flops, memory_gb_s, memory_gb, inside_gb_s, card_gbit_s;
        int         cards;
        bool        direct;
        hpml_fabric_kind fabric;
    } known[] = {
        { "v100-nvlink", 8, 120, 900, 32, 300 / 2, 100, 4, true, HPML_FABRIC_FAT_TREE },
        { "v100-pcie", 4, 112, 900, 32, 16, 100, 1, false, HPML_FABRIC_FAT_TREE },
        { "dgx-2", 16, 125, 900, 32, 300 / 2, 100, 8, true, HPML_FABRIC_FAT_TREE },
        { "t4", 4, 65, 320, 16, 16, 10, 1, false, HPML_FABRIC_SWITCH },
        { "t4-pcie4", 4, 65, 320, 16, 32, 10, 1, false, HPML_FABRIC_SWITCH },
        { "taiwania-2", 8, 125, 900, 32, 300 / 2, 100, 4, true, HPML_FABRIC_FAT_TREE },
        { "tpu-v3-pod", 1, 123, 900, 32, 82, 656, 1, true, HPML_FABRIC_TORUS },
        { "cs-1", 1, 2500, 9e6, 18, 9e6, 100, 12, true, HPML_FABRIC_SWITCH },
        { "brainwave", 1, 90, 20e3, 0.03, 5, 40, 1, true, HPML_FABRIC_SWITCH },
        { "pim", 1, 0.12, 2000, 160, 20, 10, 1, false, HPML_FABRIC_SWITCH },
        { "cpu-1gbit", 1, 1, 100, 128, 50, 1, 1, true, HPML_FABRIC_SWITCH },
        { "cpu-10gbit", 1, 1, 100, 128, 50, 10, 1, true, HPML_FABRIC_SWITCH },
        { "cpu-slim-fly", 1, 1, 100, 128, 50, 100, 1, true, HPML_FABRIC_SLIM_FLY },
    };
    const int count = sizeof known / sizeof known[0];
    for (int i = 0; i < count; i++) {
        const hpml_machine *m = hpml_machine_find(known[i].name);
        ENSURE(m && hpml_machine_at(i));
        const double given[] = { m->flops, m->bandwidth, (double)m->memory, m->network.inside.bandwidth,
                                 m->network.between.bandwidth };
        const double want[] = { 1e12 * known[i].tera_flops, 1e9 * known[i].memory_gb_s, 1e9 * known[i].memory_gb,
                                1e9 * known[i].inside_gb_s, 1e9 / 8 * known[i].card_gbit_s };
        for (int k = 0; k < 5; k++) {
            if (fabs(given[k] / want[k] - 1) > 1e-9) printf("    %s, number %d: %g\n", m->name, k, given[k]);
            ENSURE_NEAR(given[k] / want[k], 1, 1e-9);
        }
        ENSURE(m->network.ranks_per_node == known[i].per_node && m->cards == known[i].cards);
        ENSURE(m->direct == known[i].direct && m->fabric == known[i].fabric);
    }
    ENSURE(!hpml_machine_at(count));
}

/* With GPUDirect a message between nodes is not copied to the host and from the host: two times bytes / host less. Hops
   between routers add to the latency. */
TEST(copies_and_hops_enter_the_forecast)
{
    hpml_layer_facts layer[1] = { { .forward_s = 1e-3, .cols = 1 << 20, .edge = 1 } };
    hpml_model_facts f = { .layers = 1, .layer = layer };
    hpml_machine     m = { .cards = 1, .host = 16e9 };
    hpml_prediction  copied, direct, far;
    m.network.ranks_per_node = 1, m.network.between.bandwidth = 12.5e9, m.network.inside.bandwidth = 150e9;
    f.facts.ranks = 2, f.facts.batch = 1;
    ENSURE(forecast("algorithm=ring", &f, &m, &copied) == HPML_OK);
    m.direct = true;
    ENSURE(forecast("algorithm=ring", &f, &m, &direct) == HPML_OK);
    const double bytes = 4. * (1 << 20); /* each of two ranks sends two halves of the gradient, one after the other */
    ENSURE_NEAR((copied.exposed_s - direct.exposed_s) / (2 * bytes / 16e9), 1, 0.01);
    m.fabric = HPML_FABRIC_SLIM_FLY, m.router = 1e-4, f.facts.ranks = 50; /* 91 / 49 links, one router more */
    ENSURE(forecast("algorithm=ring,strategy=local", &f, &m, &far) == HPML_OK);
    m.router = 0;
    ENSURE(forecast("algorithm=ring,strategy=local", &f, &m, &direct) == HPML_OK);
    ENSURE_NEAR((far.exposed_s - direct.exposed_s) / (2 * 49 * (91. / 49 + 1) * 1e-4), 1, 0.01);
}

/* Which resource binds a dense layer 2048 x 2048 of an MLP, and the layers of a model with 160 M parameters, on each
   machine: the one for which operations / flops, or bytes / bandwidth, is longer, counted by hand. */
TEST(rooflines_name_what_binds)
{
    static const struct { const char *machine; int samples; const char *mlp, *attention; } cases[] = {
        { "v100-nvlink", 1, "memory", "flops" }, { "v100-nvlink", 1024, "flops", "flops" },
        { "dgx-2", 128, "memory", "flops" }, { "t4", 256, "memory", "flops" }, { "t4", 1024, "flops", "flops" },
        { "tpu-v3-pod", 256, "memory", "flops" }, { "cs-1", 1, "flops", "flops" },
        { "brainwave", 1, "memory", "flops" }, { "brainwave", 64, "flops", "flops" }, { "pim", 1, "flops", "flops" },
        { "cpu-10gbit", 1, "memory", "flops" }, { "cpu-10gbit", 64, "flops", "flops" },
    };
    static hpml_layer_facts layer[LAYERS];
    char                    text[4000];
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const hpml_machine *m = hpml_machine_find(cases[i].machine);
        const double        width = 2048, n = cases[i].samples;
        hpml_layer_facts    dense = { .name = "dense", .flops = 2 * width * width, .bytes = 8 * width, .rows = 2048,
                                      .cols = 2048, .edge = 2048 };
        hpml_model_facts    mlp = { .layers = 1, .layer = &dense }, f = transformer(12, 768, layer);
        const bool memory = (4 * width * width + n * 8 * width) / m->bandwidth > n * 2 * width * width / m->flops;
        int64_t    params = 0;
        for (int k = 0; k < f.layers; k++) params += layer[k].rows * layer[k].cols;
        ENSURE(params > 155000000 && params < 165000000);
        hpml_roofline_text(&mlp, m, cases[i].samples, text, sizeof text);
        if (!strstr(strstr(text, "dense"), cases[i].mlp)) printf("    %s: %s", m->name, text);
        ENSURE(strstr(strstr(text, "dense"), cases[i].mlp) && memory == (cases[i].mlp[0] == 'm'));
        hpml_roofline_text(&f, m, cases[i].samples, text, sizeof text);
        const char *const words[] = { "attention", cases[i].attention, "\nmemory binds for ", " of the time", NULL };
        if (words_in(text, words) < 4) printf("    %s", text);
        ENSURE(words_in(text, words) == 4);
    }
}

/* By hand: dense layers 8 x 4 and 4 x 2 for 3 samples make 2 * 3 * (32 + 8) operations. A product of sums over 8 (4)
   numbers waits for one product and 3 (2) additions, if these are made as a tree. */
TEST(work_and_depth_of_a_small_mlp)
{
    hpml_layer_facts layer[2] = { { .name = "a", .flops = 2 * 8 * 4, .rows = 8, .cols = 4, .edge = 4 },
                                  { .name = "b", .flops = 2 * 4 * 2, .rows = 4, .cols = 2, .edge = 2 } };
    hpml_model_facts f = { .layers = 2, .layer = layer };
    char             text[600];
    hpml_roofline_text(&f, hpml_machine_find("t4"), 3, text, sizeof text);
    if (!strstr(text, "; work 240, depth 7, work / depth 34.29\n")) printf("    %s", text);
    ENSURE(strstr(text, "; work 240, depth 7, work / depth 34.29\n"));
}

/* Data across nodes, the model inside. Where a model must be split, the fastest plan splits it within nodes, so that
   only gradients leave a node; `whole`: all of a replica is within a node; on slow networks a pipeline may cross nodes,
   because it sends less than anything else. Axis tensor across nodes takes longer, because its sums leave the node. The
   text of the best and second plan names seconds, links, bubble, bytes and the term that decides. */
TEST(data_across_nodes_model_inside)
{
    static const struct { const char *machine; int64_t C; int batch; bool whole; } cases[] = {
        { "v100-nvlink", 4096, 256, true }, { "dgx-2", 4096, 256, true }, { "taiwania-2", 4096, 256, true },
        { "v100-pcie", 3072, 64, false }, { "t4", 2048, 64, false } };
    static const char *const words[] = {
        "best: ", "step ", " ms = compute ", " + update ", "exposed ", " within nodes, ", " between; bubble ",
        " MB a rank, ", " MB between nodes; ", "decided by ", "second: ", "step ", " ms = compute ", "exposed ",
        " within nodes, ", " between; bubble ", "decided by ", "the best is ", "of the terms, ", " differs most: ",
        NULL };
    static hpml_layer_facts layer[LAYERS];
    for (int i = 0; i < 5; i++) {
        const hpml_machine *m = hpml_machine_find(cases[i].machine);
        hpml_model_facts    f = transformer(8, cases[i].C, layer);
        hpml_search_desc    d = { .base = { .global_batch = cases[i].batch, .algorithm = HPML_RING }, .forecasts = 60 };
        hpml_prediction     inside, across;
        hpml_found          found[3];
        char                why[500], text[2000];
        const int           per_node = m->network.ranks_per_node;
        f.facts.ranks = 32;
        int count = hpml_search(&d, &f, m, found, 3, NULL, why, sizeof why);
        if (count < 1) printf("    %s\n", why);
        ENSURE(count == 3);
        const hpml_plan *p = &found[0].plan;
        ENSURE(hpml_search_text(found, count, text, sizeof text) == (int)strlen(text));
        const bool fine = words_in(text, words) == 20 && (p->tensor <= 1 || per_node % p->tensor == 0) &&
                          (!cases[i].whole || per_node % hpmlc_plan_replica(p) == 0);
        if (!fine) printf("    %s: %s", m->name, text);
        ENSURE(fine);
        hpml_machine roomy = *m;
        roomy.memory = 0;
        snprintf(why, sizeof why, "tensor=%d,global_batch=64", per_node);
        ENSURE(forecast(why, &f, &roomy, &inside) == HPML_OK);
        ENSURE(forecast("tensor=32,global_batch=64", &f, &roomy, &across) == HPML_OK);
        ENSURE(across.step_s > 1.5 * inside.step_s && across.decides == HPML_TERM_TENSOR);
        ENSURE(across.exposed_link_s[1] > inside.exposed_link_s[1]);
    }
}

/* The walk comes within 2 % of the best of all plans with a fifth of the forecasts, whatever the seed. */
TEST(the_walk_finds_nearly_the_best_plan)
{
    static const struct { const char *machine; int ranks, blocks; int64_t C; } cases[] = {
        { "t4", 8, 3, 2048 }, { "cpu-10gbit", 8, 3, 1024 }, { "v100-nvlink", 16, 7, 4096 },
    };
    static hpml_layer_facts layer[LAYERS];
    for (int i = 0; i < (getenv("HPML_TEST_ALL") ? 3 : 2); i++) {
        hpml_model_facts f = transformer(cases[i].blocks, cases[i].C, layer);
        hpml_search_desc d = { .base = { .global_batch = 64, .algorithm = HPML_RING }, .exhaustive = 4096,
                               .lossy = true };
        hpml_found       all[1], walk[1];
        hpml_search_counts counts;
        char             why[500];
        f.facts.ranks = cases[i].ranks;
        int found = hpml_search(&d, &f, hpml_machine_find(cases[i].machine), all, 1, &counts, why, sizeof why);
        const int plans = counts.forecasts;
        if (found < 1) printf("    %s\n", why);
        ENSURE(found == 1 && plans > 200 && plans <= 4096);
        d.exhaustive = -1;
        d.forecasts  = plans / 5;
        for (d.seed = 1; d.seed <= 3; d.seed++) {
            ENSURE(hpml_search(&d, &f, hpml_machine_find(cases[i].machine), walk, 1, &counts, NULL, 0) == 1);
            const int tried = counts.forecasts;
            const double ratio = all->prediction.samples_s / walk->prediction.samples_s;
            if (ratio > 1.02)
                printf("    %s: %g times the best, %d of %d plans\n", cases[i].machine, ratio, tried, plans);
            ENSURE(ratio <= 1.02 && tried <= plans / 5);
        }
    }
}

/* A walk over random plans: each forecast that begins with a state of an earlier play equals, bit for bit, the one that
   begins at the beginning. */
TEST(delta_equals_full)
{
    static const struct { const char *machine; int ranks, batch; const char *base; } cases[] = {
        { "t4", 8, 64, "" }, { "v100-nvlink", 64, 128, "" }, { "cpu-10gbit", 12, 48, "algorithm=tree" },
        { "dgx-2", 32, 64, "no_overlap=1" }, { "cpu-slim-fly", 16, 64, "delayed=1" },
        { "cpu-1gbit", 9, 64, "strategy=ps,servers=1" }, { "t4", 16, 64, "schedule=stash,pipe=4" },
        { "cpu-10gbit", 8, 64, "exact=1" }, { "cpu-1gbit", 9, 64, "strategy=ssp,servers=2,staleness=1" },
        { "cpu-1gbit", 9, 64, "strategy=async,servers=1" }, { "t4", 9, 64, "strategy=backup,servers=2,backup=2" },
        { "cpu-10gbit", 7, 64, "strategy=federated,servers=1,share=0.5,period=2" },
    };
    static hpml_layer_facts layer[LAYERS];
    hpml_model_facts        f = transformer(3, 1024, layer);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        hpml_search_desc d = { .lossy = true };
        hpmlc_search     s = { .d = &d, .f = &f };
        hpml_machine     m = *hpml_machine_find(cases[i].machine);
        hpmlc_memo       full = { .off = true };
        hpml_rng         rng = { .seed = 7 };
        uint64_t         key = 0;
        int              plans = 0;
        char             why[400];
        const hpmlc_text to = { why, sizeof why };
        ENSURE(hpml_plan_parse(cases[i].base, &d.base, why, sizeof why) == HPML_OK);
        d.base.global_batch = cases[i].batch;
        m.memory = 0, f.facts.ranks = cases[i].ranks;
        s.m = &m;
        hpml_machine_network(&m, f.facts.ranks, &full.network);
        s.memo.network = full.network;
        for (int step = 0; step < 1000 && plans < 60; step++) {
            const uint64_t  next = hpmlc_point_move(&rng, key);
            hpml_plan       p;
            hpml_prediction fast, slow;
            if (!hpmlc_point_plan(&s, next, &p)) continue;
            const hpml_status one = hpmlc_forecast_plan(&p, &f, &m, true, &s.memo, &fast, &to);
            const hpml_status two = hpmlc_forecast_plan(&p, &f, &m, true, &full, &slow, &to);
            ENSURE(one == two && memcmp(&fast, &slow, sizeof fast) == 0);
            if (hpml_rng_below(&rng, 2)) key = next;
            plans += one == HPML_OK;
        }
        ENSURE(plans > 20 && s.memo.sent == full.sent && s.memo.reused > 0 && full.reused == 0);
        printf("    %-12s %2d ranks %-48s %2d plans: of %8lld messages %2.0f %% were not simulated again\n",
               cases[i].machine, cases[i].ranks, cases[i].base, plans, (long long)full.sent,
               100. * (double)s.memo.reused / (double)full.sent);
        hpmlc_memo_free(&s.memo);
        hpmlc_memo_free(&full);
    }
}

/* A search finds the same plans with and without delta simulation; prints how much faster. */
TEST(a_search_is_faster_by_delta)
{
    static hpml_layer_facts layer[LAYERS];
    hpml_model_facts        f = transformer(4, 768, layer);
    f.facts.ranks = 16;
    for (int all = 0; all < 2; all++) {
        hpml_search_counts counts[2];
        hpml_found         found[2][3];
        double             seconds[2];
        for (int full = 0; full < 2; full++) {
            hpml_search_desc d = { .base = { .global_batch = 64, .pipe = 4 * all }, .forecasts = 100, .seed = 3,
                                   .full = full, .exhaustive = all ? 4096 : -1 };
            const double     start = (double)clock() / CLOCKS_PER_SEC;
            ENSURE(hpml_search(&d, &f, hpml_machine_find("v100-nvlink"), found[full], 3, &counts[full], NULL, 0) == 3);
            seconds[full] = (double)clock() / CLOCKS_PER_SEC - start;
        }
        ENSURE(memcmp(found[0], found[1], sizeof found[0]) == 0 && counts[1].reused == 0);
        ENSURE(counts[0].messages == counts[1].messages && counts[0].forecasts == counts[1].forecasts);
        ENSURE(counts[0].reused > 0);
        printf("    %s of %d plans: %.2f s, without delta %.2f s; %.0f %% of the messages were known\n",
               all ? "all" : "a walk", counts[0].forecasts, seconds[0], seconds[1],
               100. * (double)counts[0].reused / (double)counts[0].messages);
    }
}

TEST(thousands_of_ranks)
{
    static hpml_layer_facts layer[LAYERS];
    hpml_model_facts        f = transformer(48, 1600, layer);
    hpml_prediction         p;
    const double            start = (double)clock() / CLOCKS_PER_SEC;
    f.facts.ranks = 4096;
    ENSURE(forecast("tensor=8,global_batch=8192", &f, hpml_machine_find("v100-nvlink"), &p) == HPML_OK);
    ENSURE(p.played == 8 && p.step_s > 0);
    ENSURE(forecast("tensor=8,pipe=4,micro=16,schedule=1f1b,global_batch=8192", &f, hpml_machine_find("v100-nvlink"),
                    &p) == HPML_OK);
    ENSURE(p.played == 32);
    ENSURE(forecast("tensor=32,pipe=32,micro=8,schedule=zero_bubble,algorithm=hierarchical,global_batch=8192", &f,
                    hpml_machine_find("v100-nvlink"), &p) == HPML_OK);
    ENSURE(p.played == 256);
    f = transformer(12, 768, layer);
    f.facts.ranks = 4096, f.facts.batch = 1 << 20;
    ENSURE(forecast("global_batch=8192", &f, hpml_machine_find("taiwania-2"), &p) == HPML_OK && p.played == 8);
    const double seconds = (double)clock() / CLOCKS_PER_SEC - start;
    if (seconds > 5) printf("    %g s of processor time\n", seconds);
    ENSURE(seconds < 10);
}

/* A count of bytes stays at the largest integer, about 9e18: that of the memory, of all played steps, of a step. */
TEST(bytes_do_not_overflow)
{
    enum { LAYERS = 65536 };
    hpml_layer_facts *layer = (hpml_layer_facts *)calloc(LAYERS, sizeof *layer);
    hpml_model_facts  f = { .layers = 1, .layer = layer };
    hpml_machine      m = { .flops = 1e9, .network = { .ranks_per_node = 1, .between = { 1e-6, 1e9 } } };
    hpml_plan         async = { .strategy = HPML_STRATEGY_ASYNC, .servers = 1 };
    hpml_plan         ring = { .algorithm = HPML_RING, .bucket_bytes = INT64_MAX / 2 };
    hpml_prediction   out;
    layer[0].forward_s = 1, layer[0].cols = 4, layer[0].kept = 1000000000;
    f.facts.ranks = 4, f.facts.batch = 30000000000;
    ENSURE(hpml_forecast(&async, &f, &m, &out, NULL, 0) == HPML_OK && out.memory > INT64_MAX / 2);
    for (int i = 0; i < LAYERS; i++) layer[i] = (hpml_layer_facts){ .forward_s = 1, .cols = 1000000000000 };
    f.layers = LAYERS, f.facts.batch = 1;
    f.facts.ranks = 64; /* all are played, for 3 steps */
    ENSURE(hpml_forecast(&ring, &f, &m, &out, NULL, 0) == HPML_OK && out.between_bytes == INT64_MAX / 3);
    f.facts.ranks = 128; /* one is played */
    ENSURE(hpml_forecast(&ring, &f, &m, &out, NULL, 0) == HPML_OK && out.between_bytes == INT64_MAX);
    ENSURE(out.rank_bytes > INT64_MAX / 32 && out.memory > INT64_MAX / 32);
    free(layer);
}

TEST(errors)
{
    hpml_layer_facts layer[2] = { { .name = "a", .flops = 1, .cols = 4 }, { .name = "b", .flops = 1, .cols = 4 } };
    hpml_model_facts f = { .layers = 2, .layer = layer };
    hpml_machine     m = { .name = "toy", .flops = 1e9 };
    hpml_plan        p = { 0 };
    hpml_prediction  out;
    char             why[500];
    f.facts.ranks = 4, f.facts.batch = 8;
    ENSURE(hpml_forecast(&p, &f, &m, &out, why, sizeof why) == HPML_OK && why[0] == 0);
    ENSURE(hpml_forecast(&p, &f, &m, NULL, why, sizeof why) == HPML_ERR_ARGUMENT && strstr(why, "out is NULL"));
    ENSURE(hpml_forecast(NULL, &f, &m, &out, why, sizeof why) == HPML_ERR_ARGUMENT && strstr(why, "no plan"));
#define REFUSED(change, undo, words)                                                  \
    change;                                                                           \
    ENSURE(hpml_forecast(&p, &f, &m, &out, why, sizeof why) < 0 && strstr(why, words)); \
    undo
    REFUSED(m._end = 1, m._end = 0, "canary");
    REFUSED(f.layers = 0, f.layers = 2, "0 layers");
    REFUSED(m.flops = 0, m.flops = 1e9, "layer 0 \"a\" has operations");
    REFUSED(layer[1].cols = -1, layer[1].cols = 4, "layer 1 \"b\" has a negative number");
    REFUSED(layer[1].cols = INT64_MAX / 16, layer[1].cols = 4, "layer 1 \"b\" has a negative number");
    REFUSED(f.states = INT32_MAX, f.states = 0, "one too large");
    REFUSED(f.facts.batch = INT64_MAX / 2, f.facts.batch = 8, "one too large");
    REFUSED(m.flops = -1, m.flops = 1e9, "\"toy\"");
    REFUSED(p.tensor = 3, p.tensor = 0, "tensor 3");
    REFUSED((p.exact = true, p.codec.kind = HPML_CODEC_ONEBIT), (p.exact = false, p.codec.kind = HPML_CODEC_NONE),
            "exact=0");
    REFUSED(p.strategy = HPML_STRATEGY_HOGWILD, p.strategy = HPML_STRATEGY_SYNC, "take transport threads on the host");
    REFUSED(p.pipe = 4, p.pipe = 0, "2 layers cannot be cut into the 4 pieces");
    REFUSED(m.memory = 10, m.memory = 0, "a rank needs");
    REFUSED(m.network.inside.latency = NAN, m.network.inside.latency = 0, "NaN");
    REFUSED(m.network.between.bandwidth = 1e-300, m.network.between.bandwidth = 0, "near 0");
    layer[1].forward_sum = 1000000000;
    REFUSED((p.tensor = 2, f.facts.batch = 30000000000), (p.tensor = 0, f.facts.batch = 8),
            "layer 1 \"b\" has a negative number, a NaN or one too large with 30000000000 samples");
    layer[1].forward_sum = 0;
    hpml_found found[1];
    m.memory = 10;
    ENSURE(hpml_search(NULL, &f, &m, found, 1, NULL, why, sizeof why) == -1 && strstr(why, "no plan is possible"));
    ENSURE(hpml_search(NULL, &f, NULL, found, 1, NULL, why, sizeof why) == -1 && strstr(why, "no machine"));
    ENSURE(hpml_search(NULL, &f, &m, found, 0, NULL, why, sizeof why) == -1);
}
