/* Forecasts against trainings in virtual time, against the simulator, and against each other; machines, the search. */
#include <pthread.h>
#define HPML_COMM_IMPLEMENTATION /* private functions; hpml.h's body is compiled apart */
#include "../hpml_comm.h"
#include "test.h"

enum { WIDTH = 8, MOST = 12, STEPS = 3 };

/* A model of layers that compute nothing and take time, with a parameter of any size each. All times and the bandwidths
   are sums of few powers of two, so that a forecast adds up the same numbers without rounding. */
typedef struct job {
    hpml_plan    plan;
    hpml_network network;
    int          ranks, layers, batch;
    int64_t      cols;        /* floats of each parameter */
    bool         sums;        /* each layer ends in a sum over axis tensor, forward and backward */
    int32_t      cut[MOST];   /* of the layers into pieces of a pipeline */
    /* results */
    double       ends[STEPS]; /* the latest clock after each step */
    int64_t      bytes;       /* sent by all ranks in the last step */
    char         error[400];
} job;

#define ORIGIN 16.0 /* clocks of all ranks at the start */
static const double unit = 1.0 / (1 << 20);

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
    const hpml_param_desc p = { .ndim = 1, .shape = { j->cols }, .init = HPML_INIT_ONES };
    hpml_tensor          *src[2] = { j->sums ? hpml_group_copy(x, HPML_AXIS_TENSOR) : x, NULL };
    src[1] = hpml_param_create(x->ctx, &p);
    hpml_tensor *y = hpml_custom_op(src, 2, &op);
    return j->sums ? hpml_group_sum(y, HPML_AXIS_TENSOR) : y;
}

static hpml_status train(hpml_comm *c, void *user)
{
    job         *j = (job *)user;
    hpml_ctx    *ctx = hpml_comm_ctx(c);
    work         works[MOST];
    float        x[64 * WIDTH] = { 0 };
    int32_t      labels[64] = { 0 };
    hpml_tensor *h = hpml_input_2d(ctx, j->batch, WIDTH), *input = h;
    for (int i = 0; i < j->layers; i++) {
        works[i] = (work){ c, i, j->plan.schedule == HPML_PIPE_ZERO_BUBBLE };
        h        = layer(&works[i], h, j);
    }
    hpml_trainer *t = hpml_trainer_create(ctx, &(hpml_trainer_desc){ .input = input, .output = h, .lr = 0.1f });
    int32_t       cut[MOST];
    hpml_plan     plan = j->plan;
    for (int q = 0; q < MOST; q++) cut[q] = j->sums ? 3 * j->cut[q] - 1 : j->cut[q]; /* ops: a copy, the layer, a sum;
                                                                                           no copy in layer 0 */
    plan.cut = plan.pipe > 1 ? cut : NULL;
    hpml_distribute(t, c, &plan);
    for (int s = -1; s < STEPS && hpml_ctx_status(ctx) == HPML_OK; s++) {
        hpml_trainer_step(t, x, labels, j->batch, NULL);
        /* the first step makes the background's communicators; then all clocks are set to the same time, exactly the
           second time, because the difference to it is then a small one */
        for (int i = 0; i < 2 && s < 0; i++) hpml_comm_compute(c, ORIGIN - hpml_comm_now(c));
        if (s >= 0 && j->ends[s] < hpml_comm_now(c)) j->ends[s] = hpml_comm_now(c);
    }
    return hpml_ctx_status(ctx);
}

static hpml_layer_facts facts_layer[MOST];

static hpml_model_facts facts_of(const job *j)
{
    hpml_model_facts f = { 0 };
    for (int i = 0; i < j->layers; i++) {
        const int64_t sum = j->sums ? WIDTH : 0;
        facts_layer[i] = (hpml_layer_facts){ .forward_s = forward_s(i), .cols = j->cols, .edge = WIDTH,
                                             .forward_sum = sum, .backward_sum = i > 0 ? sum : 0, .kept = 4 * WIDTH };
    }
    f.layers = j->layers, f.layer = facts_layer;
    f.facts.ranks = j->ranks, f.facts.batch = j->batch;
    return f;
}

static hpml_machine machine_of(const job *j)
{
    hpml_machine m = { 0 };
    m.network = j->network, m.direct = true;
    return m;
}

/* Plays STEPS steps of the job's plan; ends: (STEPS) the latest clocks. Returns how many ranks were played; 0: error. */
static int play(const job *j, bool whole, double *ends, char *error, size_t size)
{
    const hpmlc_text to = { error, size };
    hpml_model_facts f = facts_of(j);
    hpml_machine     m = machine_of(j);
    hpmlc_maker      k;
    hpmlc_play       y;
    hpml_plan        given = j->plan, plan;
    hpml_network     net;
    given.cut = j->plan.pipe > 1 ? j->cut : NULL;
    if (hpmlc_forecast_check(&given, &f, &m, &to) != HPML_OK) return 0;
    hpmlc_forecast_begin(&k, &y, &given, &f, &m, &plan, &net);
    y.origin = ORIGIN, y.steps = STEPS;
    int played = hpmlc_play_run(&y, &k, whole, &to) == HPML_OK ? y.unit : 0;
    for (int s = 0; s < STEPS && played; s++) ends[s] = y.ends[s];
    free(k.cut);
    hpmlc_play_close(&y);
    return played;
}

static job job_of(const char *plan, int ranks, int per_node)
{
    job  j = { .ranks = ranks, .layers = 9, .batch = 16, .cols = 4096 };
    char why[400];
    ENSURE(hpml_plan_parse(plan, &j.plan, why, sizeof why) == HPML_OK);
    j.sums = j.plan.tensor > 1;
    const int pieces = j.plan.pipe * (j.plan.schedule == HPML_PIPE_INTERLEAVED ? 2 : 1);
    for (int q = 1; q < pieces; q++) j.cut[q - 1] = 1 + q * (j.layers - 1) / pieces;
    j.network.ranks_per_node    = per_node;
    j.network.between.latency   = 16 * unit;
    j.network.between.bandwidth = 1 << 27;
    j.network.inside.latency    = unit;
    j.network.inside.bandwidth  = 1 << 30;
    return j;
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

TEST(forecasts_equal_trainings_in_virtual_time)
{
    static const struct { const char *plan; int ranks, per_node; double off; } cases[] = {
        { "", 4, 1, 0 }, { "", 8, 4, 0 }, { "", 6, 2, 0 }, { "algorithm=ring", 8, 2, 0 },
        { "algorithm=tree,bucket_bytes=1", 16, 4, 0 }, { "no_overlap=1", 8, 2, 0 },
        { "pipe=2", 2, 1, 0 }, { "pipe=4,schedule=1f1b,micro=8", 4, 1, 0 }, { "pipe=4,schedule=1f1b,micro=8", 8, 4, 0 },
        { "pipe=2,schedule=interleaved,micro=4", 4, 2, 0 }, { "pipe=4,schedule=zero_bubble,micro=8", 8, 2, 0 },
        { "tensor=2", 2, 2, 0 }, { "tensor=4", 8, 4, 0 }, { "tensor=2,pipe=2,schedule=1f1b,micro=4", 8, 4, 0 },
        { "tensor=2,pipe=2,schedule=1f1b,micro=8", 16, 4, 0 },
        { "shard=1", 4, 2, 0 }, { "shard=2", 8, 4, 0 }, { "shard=3", 8, 4, 0 }, { "shard=1,pipe=2,micro=4", 8, 2, 0 },
        { "strategy=ps,servers=1", 5, 1, 0 }, { "strategy=ps,servers=2", 8, 1, 0 }, { "strategy=local", 4, 1, 0 },
        { "strategy=elastic", 8, 4, 0 }, { "strategy=block", 6, 1, 0 },
        { "delayed=1", 4, 1, 0.5 }, { "codec=onebit,codec.compress_all=1", 4, 1, 0.5 },
        { "tensor=2,pipe=4,schedule=1f1b,micro=8", 64, 8, 0 }, { "", 64, 8, 0 },
    };
    bool all = true;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        job    j = job_of(cases[i].plan, cases[i].ranks, cases[i].per_node);
        double ends[STEPS] = { 0 };
        char   why[400] = "";
        bool   good = train_on_clock(&j);
        int played = play(&j, true, ends, why, sizeof why);
        if (!played) printf("    %s\n", why);
        all = all && good && played == j.ranks;
        for (int s = 0; s < STEPS && good; s++) {
            const double real = j.ends[s] - ORIGIN, forecast = ends[s] - ORIGIN;
            const bool   fine = fabs(forecast - real) <= cases[i].off * real;
            if (!fine) printf("    \"%s\", %d ranks, step %d: %.9g us, forecast %.9g us (%+.3g %%)\n", cases[i].plan, j.ranks,
                              s, 1e6 * real, 1e6 * forecast, 100 * (forecast / real - 1));
            all = all && fine;
        }
    }
    ENSURE(all);
}

/* Equal replicas are played once: the same clocks as when all ranks are played. */
TEST(equal_replicas_are_played_once)
{
    static const struct { const char *plan; int ranks, per_node, played; } cases[] = {
        { "", 64, 1, 1 }, { "", 64, 8, 8 }, { "algorithm=ring", 64, 4, 4 }, { "algorithm=halving", 64, 1, 1 },
        { "tensor=4,algorithm=ring", 64, 8, 8 }, { "tensor=8", 64, 8, 8 }, { "shard=1", 64, 8, 8 }, { "shard=3", 64, 1, 1 },
        { "tensor=2,pipe=4,schedule=1f1b,micro=8,algorithm=ring", 64, 8, 8 },
        { "tensor=2,pipe=4,schedule=1f1b,micro=8", 64, 4, 8 }, { "pipe=4,micro=8", 64, 1, 4 },
        { "pipe=8,schedule=zero_bubble,micro=8,algorithm=ring", 64, 8, 8 },
        { "algorithm=tree", 64, 1, 64 }, { "strategy=ps,servers=1", 64, 1, 64 }, { "", 62, 4, 62 }, { "strategy=local", 64, 8, 8 },
    };
    bool all = true;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        job    j = job_of(cases[i].plan, cases[i].ranks, cases[i].per_node);
        double ends[2][STEPS] = { { 0 } };
        int    played = play(&j, false, ends[0], NULL, 0), whole = play(&j, true, ends[1], NULL, 0);
        bool   fine = played == cases[i].played && whole == j.ranks;
        for (int s = 0; s < STEPS; s++) fine = fine && fabs(ends[0][s] - ends[1][s]) < 1e-15;
        if (!fine)
            printf("    \"%s\", %d of %d ranks: %.9g us, all %.9g us\n", cases[i].plan, played, whole,
                   1e6 * (ends[0][STEPS - 1] - ORIGIN), 1e6 * (ends[1][STEPS - 1] - ORIGIN));
        all = all && fine;
    }
    ENSURE(all);
}
