/* Routes FACTORS and HYBRID: dense layers send inputs and derivatives in place of gradients. Equal to the allreduce;
   bytes and choice by the formulas; short batches, ranks without samples; what stays with the allreduce. */
#include "../hpml_comm.h"
#include "test.h"

enum { STEPS = 4, MOST = 4096 };

/* A training of linear layers IN - M - OUT, and what rank 0 has in the end. */
typedef struct job {
    hpml_plan plan;
    int64_t   batch, in, m, out; /* out 0: one layer, in - m */
    int32_t   threads;
    bool      odd;       /* batchnorm, a tied weight, (B, T, C) inputs; short batches and ranks without samples */
    bool      bare;      /* no bias */
    hpml_dtype store;
    bool      wild;      /* a target so large that gradients do not fit exact sums */
    uint64_t  seed;      /* of the jitter in virtual time */
    int64_t   steps;     /* 0: STEPS */
    double    bytes;     /* sent in a step */
    uint64_t  hash;
    bool      same;      /* all ranks have the same parameters */
    int       count;     /* parameters */
    hpml_route route[16];
    bool      hidden;    /* a weight by factors had no gradient in its hook: the local one was not computed */
    float     w[MOST];   /* the first parameters */
    char      text[600];
} job;

static hpml_status look(void *user, hpml_trainer *t, const hpml_moment *at)
{
    const hpml_tensor *p = at->node->src[1];
    if (at->node->op == HPML_OP_LINEAR && p->param->index == at->param && !p->grad) *(bool *)user = true;
    return (void)t, HPML_OK;
}

/* Returns true on all ranks if they have the same hash: the largest is the smallest. */
static bool same_hash(hpml_comm *c, uint64_t hash)
{
    int64_t both[2] = { (int64_t)(hash >> 2), -(int64_t)(hash >> 2) };
    hpml_allreduce(c, both, 2, &(hpml_allreduce_desc){ .reduce = HPML_MAX, .element = HPML_ELEMENT_I64 });
    return both[0] == -both[1];
}

static hpml_tensor *dense(hpml_tensor *x, int64_t out, const job *j, hpml_tensor *weight)
{
    hpml_linear_desc d = { .no_bias = j->bare, .weight = weight, .activation = HPML_ACT_TANH };
    return hpml_linear(x, out, &d);
}

static hpml_status train(hpml_comm *c, void *user)
{
    job         *j   = (job *)user, mine = *j;
    hpml_ctx    *ctx = hpml_comm_ctx(c);
    int          r   = hpml_comm_rank(c);
    int64_t      out = mine.out ? mine.out : mine.m;
    hpml_tensor *x   = hpml_input_2d(ctx, mine.batch, mine.in), *h = x;
    if (mine.odd) {
        h = hpml_linear(hpml_reshape_3d(x, -1, 2, mine.in / 2), mine.m, NULL); /* two rows for each sample */
        h = dense(hpml_reshape_2d(h, -1, 2 * mine.m), mine.m, &mine, NULL);
        h = dense(hpml_batchnorm(h, NULL), mine.m, &mine, NULL);
        h = dense(h, mine.m, &mine, hpml_param_at(ctx, hpml_param_count(ctx) - 2)); /* a weight that two layers read */
    } else h = dense(h, mine.m, &mine, NULL);
    if (mine.out) h = dense(h, out, &mine, NULL);
    hpml_trainer *t = hpml_trainer_create(ctx, &(hpml_trainer_desc){
        .input = x, .output = h, .loss = HPML_LOSS_MSE, .lr = mine.plan.servers ? 0.1f : 0.5f,
        .clip_norm = mine.plan.servers ? 0 : 1 });
    bool       hidden = false;
    hpml_hooks watch = { .user = &hidden, .grad = look };
    hpml_trainer_attach(t, &watch);
    hpml_distributed *d = hpml_distribute(t, c, &mine.plan);
    float      *in = (float *)calloc((size_t)(mine.batch * (mine.in + out)), sizeof(float));
    float      *y = in + mine.batch * mine.in;
    hpml_rng    rng = { .seed = 3, .stream = (uint64_t)r };
    for (int64_t s = 0; d && s < (mine.steps ? mine.steps : STEPS); s++) {
        int64_t samples = mine.batch;
        if (mine.odd && s == 1) samples = r;           /* rank 0 has none */
        if (mine.odd && s == 2) samples = mine.batch - r;
        hpml_rng_fill_normal(&rng, in, mine.batch * (mine.in + out));
        if (mine.wild) y[0] = 1e9f;
        if (hpml_comm_rank(c) >= hpml_comm_size(c) - mine.plan.servers) samples = 0;
        if (mine.plan.servers > 0 && strcmp(hpml_comm_transport(c), "clock") == 0) hpml_comm_compute(c, 1e-3);
        hpml_trainer_step(t, in, y, samples, NULL);
    }
    free(in);
    hpml_distribute_report report = { 0 };
    hpml_distribute_get(d, &report, false);
    hpml_distribute_finish(d);
    mine.count  = hpml_param_count(ctx);
    mine.bytes  = report.bytes;
    mine.hidden = hidden;
    mine.hash   = hpml_param_hash(ctx);
    mine.same   = same_hash(c, mine.hash);
    for (int p = 0, at = 0; p < mine.count && p < 16; p++) {
        const hpml_tensor *w = hpml_param_at(ctx, p);
        mine.route[p] = hpml_distribute_route(d, p);
        for (int64_t i = 0; i < hpml_tensor_count(w) && at < MOST; i++) mine.w[at++] = w->data[i];
    }
    hpml_distribute_free(d);
    if (r == 0) *j = mine;
    return hpml_ctx_status(ctx);
}

static hpml_status go(job *j, int ranks, hpml_transport_kind transport, hpml_route route)
{
    hpml_launch_desc l = { .ranks = ranks, .transport = transport, .timeout = 20,
                           .ctx = { .seed = 3, .threads = j->threads ? j->threads : 1, .activation_dtype = j->store } };
    j->plan.route = route;
    if (transport == HPML_TRANSPORT_CLOCK) l.network.inside.latency = 1e-5, l.network.jitter = 0.5;
    l.network.seed = j->seed;
    hpml_status status = hpml_launch(&l, train, j, j->text, sizeof j->text);
    return status;
}

/* Trains by the route and by allreduce; returns the largest difference of a parameter, or -1. */
static double apart(job *j, int ranks, hpml_transport_kind transport, hpml_route route)
{
    job    sum = *j;
    double worst = 0;
    bool   good = go(j, ranks, transport, route) == HPML_OK;
    good = good && go(&sum, ranks, transport, HPML_ROUTE_ALLREDUCE) == HPML_OK;
    if (!good) printf("    %s %s\n", j->text, sum.text);
    for (int i = 0; i < MOST; i++) worst = fmax(worst, fabs((double)j->w[i] - (double)sum.w[i]));
    return good && j->same && sum.same ? worst : -1;
}

TEST(one_step_is_that_of_an_allreduce)
{
    job j = { .batch = 8, .in = 784, .m = 128, .bare = true, .steps = 1 };
    ENSURE(apart(&j, 4, HPML_TRANSPORT_THREADS, HPML_ROUTE_FACTORS) >= 0);
    ENSURE(apart(&j, 4, HPML_TRANSPORT_THREADS, HPML_ROUTE_FACTORS) <= 1e-6);
    ENSURE(j.route[0] == HPML_ROUTE_FACTORS && j.hidden);
}

/* A rank sends (p - 1) b (m + n) 4 bytes, and a sum of statistics, the same in all runs. */
TEST(bytes_are_the_formulas)
{
    job tiny = { .batch = 1, .in = 1, .m = 1, .bare = true }, small = { .batch = 8, .in = 784, .m = 128, .bare = true };
    job large = small;
    large.batch = 32;
    ENSURE(go(&tiny, 4, HPML_TRANSPORT_THREADS, HPML_ROUTE_FACTORS) == HPML_OK);
    ENSURE(go(&small, 4, HPML_TRANSPORT_THREADS, HPML_ROUTE_FACTORS) == HPML_OK);
    ENSURE(go(&large, 4, HPML_TRANSPORT_THREADS, HPML_ROUTE_FACTORS) == HPML_OK);
    double statistics = tiny.bytes - 3 * 1 * (1 + 1) * 4;
    ENSURE(statistics >= 0 && statistics < 200);
    ENSURE(small.bytes - statistics == 87552 && large.bytes - statistics == 350208);
}

TEST(hybrid_takes_what_sends_less)
{
    hpml_rng rng = { .seed = 12 };
    int      both[2] = { 0, 0 };
    for (int i = 0; i < 20; i++) {
        int ranks = 2 + (int)hpml_rng_below(&rng, 3), p = ranks;
        job j = { .batch = 1 + hpml_rng_below(&rng, 24), .in = 1 + hpml_rng_below(&rng, 60), .steps = 2,
                  .m = 1 + hpml_rng_below(&rng, 60), .out = 1 + hpml_rng_below(&rng, 60), .bare = true };
        double d = apart(&j, ranks, HPML_TRANSPORT_THREADS, HPML_ROUTE_HYBRID);
        ENSURE(d >= 0 && d < 1e-5 && j.count == 2);
        for (int k = 0; k < 2; k++) { /* with as many servers as ranks, both sides of Poseidon's formula over 2 */
            double n = (double)(k ? j.m : j.in), m = (double)(k ? j.out : j.m), b = (double)j.batch;
            bool   factors = b * (p - 1) * (m + n) <= m * n * (p + p - 2) / p;
            ENSURE(j.route[k] == (factors ? HPML_ROUTE_FACTORS : HPML_ROUTE_ALLREDUCE));
            both[factors]++;
        }
    }
    ENSURE(both[0] > 5 && both[1] > 5);
}

TEST(short_batches_idle_ranks_and_layers_that_are_not_dense)
{
    for (int k = 0; k < 4; k++) {
        job j = { .batch = 6, .in = 10, .m = 7, .out = 3, .odd = true, .threads = k == 1 ? 64 : 1 };
        j.plan.no_overlap = k == 2;
        j.plan.sum        = k == 3;
        double d = apart(&j, 3, HPML_TRANSPORT_THREADS, HPML_ROUTE_FACTORS);
        if (!(d >= 0 && d < 2e-5)) printf("    case %d: %g\n", k, d);
        ENSURE(d >= 0 && d < 2e-5);
        int factors = 0;
        for (int p = 0; p < j.count; p++) factors += j.route[p] == HPML_ROUTE_FACTORS;
        ENSURE(j.route[0] == HPML_ROUTE_FACTORS && factors == 3); /* not biases, batchnorm, and the weight read twice */
    }
}

TEST(the_same_bits_twice_in_virtual_time)
{
    job a = { .batch = 6, .in = 40, .m = 30, .out = 5 }, b = a;
    ENSURE(apart(&a, 3, HPML_TRANSPORT_CLOCK, HPML_ROUTE_FACTORS) < 1e-5);
    ENSURE(apart(&b, 3, HPML_TRANSPORT_CLOCK, HPML_ROUTE_FACTORS) >= 0 && a.hash == b.hash);
    ENSURE(go(&b, 3, HPML_TRANSPORT_THREADS, HPML_ROUTE_FACTORS) == HPML_OK && a.hash != 0);
}

/* The workers' factors go to servers, which multiply; parameters come back. A worker sends b (m + S n) floats to S
   servers, headers of 56 bytes apart. */
static double by_servers(job *j, int workers, const char *plan, hpml_transport_kind transport)
{
    job sum = *j;
    hpml_plan_parse(plan, &j->plan, NULL, 0);
    sum.plan           = j->plan;
    sum.plan.exact     = false;
    const int    ranks = workers + j->plan.servers;
    const bool   good  = go(j, ranks, transport, HPML_ROUTE_FACTORS) == HPML_OK &&
                         go(&sum, ranks, transport, HPML_ROUTE_ALLREDUCE) == HPML_OK;
    double       worst = 0;
    if (!good) printf("    %s: %s %s\n", plan, j->text, sum.text);
    for (int i = 0; i < MOST; i++) worst = fmax(worst, fabs((double)j->w[i] - (double)sum.w[i]));
    return good ? worst : -1;
}

TEST(servers_multiply_what_workers_send)
{
    static const char *const plans[] = { "strategy=ps,servers=1", "strategy=ps,servers=3",
                                         "strategy=ps,servers=2,exact=1", "strategy=ssp,servers=2",
                                         "strategy=ps,servers=2,sum=1" };
    for (int p = 0; p < 5; p++)
        for (int odd = 0; odd < 2; odd++) {
            job    j = { .batch = 6, .in = 10, .m = 7, .out = 3, .odd = odd && p != 3 };
            double d = by_servers(&j, 3, plans[p], p % 2 ? HPML_TRANSPORT_CLOCK : HPML_TRANSPORT_THREADS);
            if (!(d >= 0 && d < 2e-5)) printf("    %s, %d: %g\n", plans[p], odd, d);
            ENSURE(d >= 0 && d < 2e-5 && j.hidden && j.route[0] == HPML_ROUTE_FACTORS);
        }
    job one = { .batch = 8, .in = 784, .m = 128, .bare = true, .steps = 1 };
    ENSURE(by_servers(&one, 3, "strategy=ps,servers=1", HPML_TRANSPORT_THREADS) <= 1e-6);
    ENSURE(one.bytes == 8 * (784 + 128) * 4 + 56); /* 29,184, in place of 401,408 */
    ENSURE(by_servers(&one, 3, "strategy=ps,servers=2", HPML_TRANSPORT_THREADS) <= 1e-6);
    ENSURE(one.bytes == 8 * (2 * 784 + 128) * 4 + 2 * 56);
}

/* Exact sums of a round have the same bits in any order of arrival; one by one, in the order of arrival, not. */
TEST(pushes_in_any_order_give_the_same_bits)
{
    static const char *const plans[] = { "strategy=ps,servers=2,exact=1", "strategy=ssp,staleness=1,servers=2" };
    for (int p = 0; p < 2; p++) {
        uint64_t hash[5] = { 0 };
        for (int i = 0; i < 5; i++) {
            job j = { .batch = 6, .in = 40, .m = 30, .out = 5, .seed = (uint64_t)i };
            hpml_plan_parse(plans[p], &j.plan, NULL, 0);
            ENSURE(go(&j, 7, i < 4 ? HPML_TRANSPORT_CLOCK : HPML_TRANSPORT_THREADS, HPML_ROUTE_FACTORS) == HPML_OK);
            hash[i] = j.hash;
        }
        ENSURE(hash[0] != 0 && (p == 1 || (hash[1] == hash[0] && hash[2] == hash[0] && hash[4] == hash[0])));
        ENSURE(p == 0 || hash[1] != hash[0] || hash[2] != hash[0]);
    }
    job wild = { .batch = 2, .in = 4, .m = 3, .wild = true };
    hpml_plan_parse("strategy=ps,servers=1,exact=1", &wild.plan, NULL, 0);
    ENSURE(go(&wild, 3, HPML_TRANSPORT_THREADS, HPML_ROUTE_FACTORS) != HPML_OK);
    if (!strstr(wild.text, "exact sums hold less than")) printf("    %s\n", wild.text);
    ENSURE(strstr(wild.text, "exact sums hold less than"));
}

/* To S servers factors are b (m + S n) floats, the gradient m n. */
TEST(hybrid_takes_what_is_less_to_servers)
{
    hpml_rng rng = { .seed = 12 };
    int      both[2] = { 0, 0 };
    for (int i = 0; i < 10; i++) {
        job  j = { .batch = 1 + hpml_rng_below(&rng, 12), .in = 1 + hpml_rng_below(&rng, 60), .steps = 2,
                   .m = 1 + hpml_rng_below(&rng, 60), .bare = true, .plan.strategy = HPML_STRATEGY_PS };
        j.plan.servers = 1 + (int32_t)hpml_rng_below(&rng, 3);
        ENSURE(go(&j, 2 + j.plan.servers, HPML_TRANSPORT_THREADS, HPML_ROUTE_HYBRID) == HPML_OK);
        bool factors = j.batch * (j.m + j.plan.servers * j.in) <= j.m * j.in;
        ENSURE(j.route[0] == (factors ? HPML_ROUTE_FACTORS : HPML_ROUTE_ALLREDUCE));
        both[factors]++;
    }
    ENSURE(both[0] > 2 && both[1] > 2);
}

TEST(halves_are_refused)
{
    job j = { .batch = 6, .in = 4, .m = 3, .store = HPML_DTYPE_BF16 };
    ENSURE(go(&j, 2, HPML_TRANSPORT_THREADS, HPML_ROUTE_FACTORS) == HPML_ERR_UNSUPPORTED && strstr(j.text, "halves"));
    ENSURE(hpml_distribute_route(NULL, 0) == HPML_ROUTE_ALLREDUCE && !hpml_route_name(HPML_ROUTE_COUNT));
}
