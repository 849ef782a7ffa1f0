/* Strategies that exchange parameters, against the same training by trainers that know nothing of each other, whose
   parameters are joined by the formulas; accuracy on digits; checkpoints; virtual time. */
#include "../hpml_comm.h"
#include "test.h"
#include "plan_train.h"
#include "mlp.h"

enum { RANKS = 4, BATCH = 5, FLOATS = 4096 };

typedef struct task {
    hpml_plan plan;
    double    momentum;
    bool      norm;       /* batchnorm */
    int32_t   accumulate;
    hpml_opt  optimizer;
    int       steps, ranks;
    const char *save, *load;
    bool      finish;
    float     w[RANKS][FLOATS]; /* parameters, running statistics included, of each rank in the end */
    int64_t   floats, bytes;    /* bytes: that rank 0 sent in the steps and hpml_distribute_finish */
    hpml_distribute_report report;
    char      text[512];
} task;

static hpml_trainer *trainer_of(hpml_ctx *ctx, const task *j)
{
    hpml_tensor *x = hpml_input_2d(ctx, BATCH, INPUTS);
    hpml_tensor *h = hpml_linear(x, 16, NULL);
    if (j->norm) h = hpml_batchnorm(h, NULL);
    return hpml_trainer_create(ctx, &(hpml_trainer_desc){
        .input = x, .output = hpml_linear(hpml_tanh(h), CLASSES, NULL), .lr = 0.2f, .momentum = (float)j->momentum,
        .accumulate = j->accumulate, .optimizer = j->optimizer });
}

/* One step of rank r: an update of samples that only this rank has. */
static void step_of(hpml_trainer *t, const task *j, int rank, int64_t step)
{
    float    x[BATCH * INPUTS];
    int32_t  y[BATCH];
    int      micros = j->accumulate > 1 ? j->accumulate : 1;
    for (int micro = 0; micro < micros; micro++) {
        hpml_rng r = { .seed = (uint64_t)(100 * (step * micros + micro) + rank) };
        hpml_rng_fill_normal(&r, x, BATCH * INPUTS);
        for (int i = 0; i < BATCH; i++) y[i] = x[i * INPUTS] > 0 ? (x[i * INPUTS + 1] > 0) : 2;
        hpml_trainer_step(t, x, y, BATCH, NULL);
    }
}

static int64_t values_of(hpml_ctx *ctx, float *out)
{
    int64_t at = 0;
    for (int i = 0; i < hpml_param_count(ctx); i++) {
        const hpml_tensor *p = hpml_param_at(ctx, i);
        memcpy(out + at, p->data, sizeof(float) * (size_t)hpml_tensor_count(p));
        at += hpml_tensor_count(p);
    }
    return at;
}

static void values_set(hpml_ctx *ctx, const float *from)
{
    for (int i = 0; i < hpml_param_count(ctx); i++) {
        hpml_tensor *p = hpml_param_at(ctx, i);
        memcpy(p->data, from, sizeof(float) * (size_t)hpml_tensor_count(p));
        from += hpml_tensor_count(p);
    }
}

static hpml_status work(hpml_comm *c, void *user)
{
    task         *j = (task *)user;
    hpml_ctx     *ctx = hpml_comm_ctx(c);
    hpml_trainer *t = trainer_of(ctx, j);
    int           rank = hpml_comm_rank(c);
    hpml_counters sent;
    hpml_distributed *d = hpml_distribute(t, c, &j->plan);
    if (j->load) hpml_distribute_load(d, j->load);
    hpml_comm_counters_reset(c);
    int64_t begin = hpml_trainer_step_count(t);
    for (int step = 0; step < j->steps; step++) step_of(t, j, rank, begin + step);
    hpml_distribute_get(d, rank == 0 ? &j->report : NULL, false);
    if (j->finish) hpml_distribute_finish(d);
    hpml_comm_counters(c, &sent);
    if (rank == 0) j->bytes = sent.bytes;
    if (j->save) hpml_distribute_save(d, j->save);
    int64_t n = values_of(ctx, j->w[rank]);
    if (rank == 0) j->floats = n;
    return hpml_ctx_status(ctx);
}

static bool ran(task *j)
{
    hpml_launch_desc l = { .ranks = j->ranks ? j->ranks : RANKS, .timeout = 20, .ctx = { .seed = 3, .threads = 1 } };
    hpml_status      s = hpml_launch(&l, work, j, j->text, sizeof j->text);
    if (s != HPML_OK) printf("    %s\n", j->text);
    return s == HPML_OK;
}

static double apart(const task *a, const task *b)
{
    double most = 0;
    for (int r = 0; r < (a->ranks ? a->ranks : RANKS); r++)
        for (int64_t k = 0; k < a->floats; k++) most = fmax(most, fabs((double)a->w[r][k] - (double)b->w[r][k]));
    return a->floats == b->floats ? most : HUGE_VAL;
}

/* The reference: RANKS trainers of contexts of their own. `trained`: which of the floats have a gradient. */
typedef struct crowd {
    hpml_ctx     *ctx[RANKS];
    hpml_trainer *t[RANKS];
    float         w[RANKS][FLOATS], centre[FLOATS], velocity[FLOATS];
    int64_t       floats;
    bool          trained[FLOATS];
} crowd;

static void crowd_open(crowd *all, const task *j)
{
    for (int r = 0; r < RANKS; r++) {
        all->ctx[r] = hpml_ctx_create(&(hpml_ctx_desc){ .seed = 3, .threads = 1 });
        all->t[r]   = trainer_of(all->ctx[r], j);
    }
    all->floats = values_of(all->ctx[0], all->centre);
    int64_t at = 0;
    for (int i = 0; i < hpml_param_count(all->ctx[0]); i++) {
        const hpml_tensor *p = hpml_param_at(all->ctx[0], i);
        for (int64_t k = 0; k < hpml_tensor_count(p); k++) all->trained[at++] = p->grad != NULL;
    }
}

static void momentum_clear(hpml_trainer *t)
{
    int64_t n;
    float  *state = hpml_trainer_array(t, HPML_ARRAY_STATE, &n);
    if (state) memset(state, 0, sizeof(float) * (size_t)n);
}

static double mean_of(const crowd *all, int64_t k)
{
    double sum = 0;
    for (int r = 0; r < RANKS; r++) sum += (double)all->w[r][k];
    return sum / RANKS;
}

/* A meeting of float k by the formulas. */
static void meet(crowd *all, const hpml_plan *plan, int64_t k, bool first)
{
    double b = plan->outer_momentum == 0 ? 1 - 1.0 / RANKS : (double)plan->outer_momentum;
    double a = plan->elastic == 0 ? 0.9 / RANKS : (double)plan->elastic, mean = mean_of(all, k), sum = 0;
    double lr = plan->outer_lr == 0 ? 1 : (double)plan->outer_lr;
    if (plan->strategy == HPML_STRATEGY_LOCAL || !all->trained[k]) {
        for (int r = 0; r < RANKS; r++) all->w[r][k] = (float)mean;
    } else if (plan->strategy == HPML_STRATEGY_BLOCK) {
        double start = (double)all->centre[k] - (plan->outer_nesterov && !first ? b * (double)all->velocity[k] : 0);
        all->velocity[k] = (float)(b * (double)all->velocity[k] + lr * (start - mean));
        all->centre[k] -= all->velocity[k];
        double next = (double)all->centre[k] - (plan->outer_nesterov ? b * (double)all->velocity[k] : 0);
        for (int r = 0; r < RANKS; r++) all->w[r][k] = (float)next;
    } else {
        for (int r = 0; r < RANKS; r++) {
            double d = a * ((double)all->w[r][k] - (double)all->centre[k]);
            all->w[r][k] = (float)((double)all->w[r][k] - d);
            sum += d;
        }
        all->centre[k] += (float)sum;
    }
}

/* Mixes the floats from before the step by the matrix of the step, and adds what each rank's step has changed; running
   statistics are mixed as they are after it. */
static void mix(crowd *all, const hpml_plan *plan, int64_t step, float before[RANKS][FLOATS])
{
    double w[RANKS * RANKS], next[RANKS];
    hpml_mixing_matrix(plan->topology, RANKS, plan->seed, step, w);
    for (int64_t k = 0; k < all->floats; k++) {
        for (int r = 0; r < RANKS; r++) {
            next[r] = all->trained[k] ? (double)all->w[r][k] - (double)before[r][k] : 0;
            for (int q = 0; q < RANKS; q++)
                next[r] += w[r * RANKS + q] * (double)(all->trained[k] ? before[q][k] : all->w[q][k]);
        }
        for (int r = 0; r < RANKS; r++) all->w[r][k] = (float)next[r];
    }
}

/* The same training as `j`, into `out`. */
static void reference(const task *j, task *out)
{
    static crowd all;
    static float before[RANKS][FLOATS];
    const int    period = j->plan.period > 0 ? j->plan.period : 1;
    memset(&all, 0, sizeof all);
    crowd_open(&all, j);
    for (int step = 0; step < j->steps; step++) {
        bool gossip = j->plan.strategy == HPML_STRATEGY_GOSSIP;
        for (int r = 0; r < RANKS; r++) {
            values_of(all.ctx[r], before[r]);
            step_of(all.t[r], j, r, step);
            values_of(all.ctx[r], all.w[r]);
        }
        if (gossip) mix(&all, &j->plan, step, before);
        for (int64_t k = 0; k < all.floats && !gossip && (step + 1) % period == 0; k++)
            meet(&all, &j->plan, k, step + 1 == period);
        for (int r = 0; r < RANKS; r++) {
            values_set(all.ctx[r], all.w[r]);
            if (j->plan.strategy == HPML_STRATEGY_BLOCK && (step + 1) % period == 0) momentum_clear(all.t[r]);
        }
    }
    for (int64_t k = 0; k < all.floats && j->finish; k++) {
        bool  central = all.trained[k] && (j->plan.strategy == HPML_STRATEGY_BLOCK ||
                                           j->plan.strategy == HPML_STRATEGY_ELASTIC);
        float mean    = (float)mean_of(&all, k);
        for (int r = 0; r < RANKS; r++) all.w[r][k] = central ? all.centre[k] : mean;
    }
    memcpy(out->w, all.w, sizeof out->w);
    out->floats = all.floats;
    for (int r = 0; r < RANKS; r++) hpml_ctx_free(all.ctx[r]);
}

#define LOCAL(...)   { .strategy = HPML_STRATEGY_LOCAL, __VA_ARGS__ }
#define BLOCK(...)   { .strategy = HPML_STRATEGY_BLOCK, __VA_ARGS__ }
#define ELASTIC(...) { .strategy = HPML_STRATEGY_ELASTIC, __VA_ARGS__ }
#define GOSSIP(...)  { .strategy = HPML_STRATEGY_GOSSIP, __VA_ARGS__ }

/* By the formulas, with and without momentum, batchnorm, micro-batches; 12 steps, in the end a meeting or none. */
TEST(each_strategy_is_its_formula)
{
    static const hpml_plan plans[] = {
        LOCAL(.period = 1), LOCAL(.period = 4), BLOCK(.period = 4), BLOCK(.period = 3, .outer_nesterov = true),
        BLOCK(.period = 2, .outer_lr = 0.5f, .outer_momentum = 0.25f), ELASTIC(.period = 1),
        ELASTIC(.period = 4, .elastic = 0.1f), GOSSIP(.topology = HPML_TOPOLOGY_RING),
        GOSSIP(.topology = HPML_TOPOLOGY_WHEEL), GOSSIP(.topology = HPML_TOPOLOGY_PAIRS, .seed = 4),
        GOSSIP(.topology = HPML_TOPOLOGY_ALL),
    };
    static task j, want;
    for (size_t i = 0; i < sizeof plans / sizeof plans[0]; i++)
        for (int variant = 0; variant < 5; variant++) {
            j = (task){ .plan = plans[i], .steps = 12, .momentum = variant > 0 ? 0.9 : 0, .norm = variant == 2,
                        .accumulate = variant == 3 ? 2 : 1, .finish = variant == 4 };
            want = j;
            ENSURE(ran(&j));
            reference(&j, &want);
            double off = apart(&j, &want);
            if (off > 2e-5) printf("    %s, variant %d: %.2g\n", hpml_strategy_name(plans[i].strategy), variant, off);
            ENSURE(off <= 2e-5);
        }
}

/* With period 1, without momentum and with equal shares, local SGD is synchronous training. */
TEST(local_with_period_1_is_synchronous)
{
    static task local, sync;
    local = (task){ .plan = LOCAL(.period = 1), .steps = 30 };
    sync  = (task){ .steps = 30 };
    ENSURE(ran(&local) && ran(&sync));
    ENSURE(apart(&local, &sync) <= 1e-6);
}

/* A block without an outer momentum is model averaging: local SGD with the block's period. */
TEST(a_block_without_momentum_is_local)
{
    static task local, block;
    local = (task){ .plan = LOCAL(.period = 5), .steps = 30 };
    block = (task){ .plan = BLOCK(.period = 5, .outer_momentum = HPML_ZERO), .steps = 30 };
    ENSURE(ran(&local) && ran(&block));
    ENSURE(apart(&local, &block) <= 1e-5);
}

/* Squared spread of x over ranks: the sum of squared differences to the mean; adds |mean| to *mean. */
static double spread_of(hpml_comm *c, const float *x, int n, double *mean)
{
    double sums[2] = { 0, 0 };
    for (int k = 0; k < n; k++) {
        double own[2] = { (double)x[k], (double)x[k] * (double)x[k] };
        hpml_allreduce(c, own, 2, &(hpml_allreduce_desc){ .element = HPML_ELEMENT_F64 });
        sums[0] += own[1] - own[0] * own[0] / hpml_comm_size(c);
        sums[1] += own[0] / hpml_comm_size(c);
    }
    *mean = sums[1];
    return sums[0];
}

/* Random pairs: with p ranks a step shrinks the squared spread to 1/2 - 1/(2 (p - 1)) of itself on average, the second
   eigenvalue of the mean of W^T W = W. The mean stays. */
static hpml_status shrink(hpml_comm *c, void *user)
{
    enum { N = 4, STEPS = 600 };
    double  *out = (double *)user; /* mean ratio of squared spreads; how far the mean has moved */
    hpml_rng r = { .seed = 1, .stream = (uint64_t)hpml_comm_rank(c) };
    double   before[2], after[2], ratio = 0, moved = 0;
    for (int step = 0; step < STEPS; step++) {
        float x[N];
        hpml_rng_fill_normal(&r, x, N);
        before[0] = spread_of(c, x, N, &before[1]);
        hpml_mix(c, x, N, HPML_TOPOLOGY_PAIRS, 3, step);
        after[0] = spread_of(c, x, N, &after[1]);
        ratio += after[0] / before[0] / STEPS;
        moved = fmax(moved, fabs(after[1] - before[1]));
    }
    if (hpml_comm_rank(c) == 0) out[0] = ratio, out[1] = moved;
    return hpml_ctx_status(hpml_comm_ctx(c));
}

TEST(random_pairs_contract_as_their_eigenvalue)
{
    double got[2] = { 0, 0 };
    ENSURE(hpml_launch(&(hpml_launch_desc){ .ranks = 8, .ctx.threads = 1 }, shrink, got, NULL, 0) == HPML_OK);
    printf("    squared spread times %.4f a step, expected %.4f; mean moved by %.1g\n", got[0], 3.0 / 7, got[1]);
    ENSURE_NEAR(got[0], 3.0 / 7, 0.02 * 3 / 7);
    ENSURE(got[1] < 1e-6);
}

/* Averages: floor(steps / period), and one more if the training ends between two. Between meetings nothing is sent. */
TEST(meetings_are_counted)
{
    static const hpml_plan once = LOCAL(.period = 1, .algorithm = HPML_RING);
    static task            one, many;
    one = (task){ .plan = once, .steps = 1 };
    ENSURE(ran(&one) && one.bytes > 0);
    for (int steps = 1; steps <= 24; steps++)
        for (int period = 1; period <= 10; period += 3) {
            many = (task){ .plan = LOCAL(.period = period, .algorithm = HPML_RING), .steps = steps, .finish = true };
            ENSURE(ran(&many));
            ENSURE(many.bytes == one.bytes * (steps / period + (steps % period > 0)));
            if (steps < 20) steps += 3;
        }
}

/* The report has loss and samples of the steps up to the last meeting, on all ranks; after it, of this rank's steps. */
TEST(loss_and_samples_at_a_meeting)
{
    static task at, after;
    at    = (task){ .plan = LOCAL(.period = 3), .steps = 6 };
    after = (task){ .plan = LOCAL(.period = 3), .steps = 8 };
    ENSURE(ran(&at) && ran(&after));
    ENSURE(at.report.samples == 3 * RANKS * BATCH && after.report.samples == 2 * BATCH);
    ENSURE(at.report.steps == 6 && at.report.loss > 0.2 && at.report.loss < 2 && at.report.loss != after.report.loss);
}

/* Elastic: with a = 0 every rank trains alone, bit for bit; the sum of centre and ranks is kept. */
TEST(elastic_keeps_the_sum)
{
    static task alone, serial, joined, centre;
    alone  = (task){ .plan = ELASTIC(.period = 2, .elastic = HPML_ZERO), .steps = 8, .momentum = 0.9 };
    serial = (task){ .plan = LOCAL(.period = 100), .steps = 8, .momentum = 0.9 };
    ENSURE(ran(&alone));
    reference(&serial, &serial);
    ENSURE(apart(&alone, &serial) == 0);
    joined        = (task){ .plan = ELASTIC(.period = 8, .elastic = 0.2f), .steps = 8, .momentum = 0.9 };
    centre        = joined;
    centre.finish = true;
    ENSURE(ran(&joined) && ran(&centre));
    static task start;
    start = (task){ .plan = LOCAL(.period = 1), .steps = 0 };
    ENSURE(ran(&start));
    for (int64_t k = 0; k < joined.floats; k++) {
        double before = (double)start.w[0][k], now = (double)centre.w[0][k];
        for (int r = 0; r < RANKS; r++) {
            before += (double)serial.w[r][k];
            now += (double)joined.w[r][k];
        }
        ENSURE_NEAR(now, before, 1e-6 * (1 + fabs(before)));
    }
}

/* A checkpoint continues bit for bit, and loads on another number of ranks. */
TEST(checkpoints_continue)
{
    static const hpml_plan plans[] = {
        LOCAL(.period = 3), BLOCK(.period = 3), BLOCK(.period = 3, .outer_nesterov = true), ELASTIC(.period = 2),
        GOSSIP(.topology = HPML_TOPOLOGY_PAIRS, .seed = 9),
    };
    static const char path[] = "build/weights_test.ckpt", again[] = "build/weights_again.ckpt";
    static task first, second, whole;
    for (size_t i = 0; i < sizeof plans / sizeof plans[0]; i++)
        for (int adam = 0; adam < 2; adam++) {
            first  = (task){ .plan = plans[i], .steps = 7, .momentum = adam ? 0 : 0.9, .norm = true, .save = path,
                             .optimizer = adam ? HPML_OPT_ADAM : HPML_OPT_SGD };
            second = first, whole = first;
            second.load = path, second.save = again;
            ENSURE(ran(&first) && ran(&second));
            whole.steps = 0, whole.load = again, whole.save = NULL;
            ENSURE(ran(&whole));
            for (int r = 0; r < RANKS; r++)
                for (int64_t k = 0; k < whole.floats; k++) ENSURE(whole.w[r][k] == second.w[r][k]);
            second.ranks = 2, second.save = NULL;
            ENSURE(ran(&second));
            for (int64_t k = 0; k < second.floats; k++) ENSURE(isfinite(second.w[0][k]));
            remove(path), remove(again);
        }
}

/* The same bits twice in virtual time with jitter and a slow rank, and the bits of threads. */
TEST(virtual_time_repeats)
{
    static const double slow[RANKS] = { 1, 1, 10, 1 };
    static const hpml_plan plans[] = {
        LOCAL(.period = 3, .algorithm = HPML_RING), BLOCK(.period = 2, .algorithm = HPML_TREE),
        ELASTIC(.period = 2, .algorithm = HPML_RING), GOSSIP(.topology = HPML_TOPOLOGY_WHEEL, .algorithm = HPML_RING),
    };
    for (size_t i = 0; i < sizeof plans / sizeof plans[0]; i++) {
        plan_trial j[3] = { { .plan = plans[i], .steps = 10 }, { .plan = plans[i], .steps = 10 },
                            { .plan = plans[i], .steps = 10 } };
        for (int run = 0; run < 3; run++) {
            hpml_launch_desc l = { .transport = run < 2 ? HPML_TRANSPORT_CLOCK : HPML_TRANSPORT_THREADS, .ranks = RANKS,
                                   .timeout = 20, .ctx = { .seed = 3, .threads = 1 },
                                   .network = { .inside = { 1e-4, 1e6 } } };
            if (run < 2) l.network.slow = slow, l.network.jitter = 0.5, l.network.seed = 8;
            ENSURE(hpml_launch(&l, plan_train, &j[run], j[run].text, sizeof j[run].text) == HPML_OK);
            ENSURE(j[run].same && j[run].made == 10 && j[run].hash == j[0].hash);
        }
        ENSURE(j[0].seconds == j[1].seconds && j[0].seconds > 0.1);
    }
}

static hpml_status refused(hpml_comm *c, void *user)
{
    task             *j = (task *)user;
    hpml_trainer     *t = trainer_of(hpml_comm_ctx(c), j);
    hpml_distributed *d = hpml_distribute(t, c, &j->plan);
    return hpml_distribute_set_batch(d, 4);
}

TEST(what_is_refused)
{
    static task j = { .plan = LOCAL(.period = 2) };
    char        text[512];
    ENSURE(hpml_launch(&(hpml_launch_desc){ .ranks = 2 }, refused, &j, text, sizeof text) == HPML_ERR_UNSUPPORTED &&
           strstr(text, "the global batch stays") && strstr(text, "between meetings"));
}

/* Digits, an MLP of 784-128-10, and batches of 32 samples on each of `ranks` ranks. */
typedef struct lesson {
    hpml_plan plan;
    int       ranks, batch, epochs;
    double    lr, momentum;
    uint64_t  seed;
    double    accuracy, spread; /* spread: of the ranks' parameters before the end, relative to their mean */
} lesson;

static hpml_status learn(hpml_comm *c, void *user)
{
    lesson           *j = (lesson *)user;
    hpml_ctx         *ctx = hpml_comm_ctx(c);
    hpml_tensor      *x = hpml_input_2d(ctx, j->batch, 784);
    hpml_trainer     *t = hpml_trainer_create(ctx, &(hpml_trainer_desc){
        .input = x, .output = mlp(x), .lr = (float)j->lr, .momentum = (float)j->momentum });
    hpml_distributed *d = hpml_distribute(t, c, &j->plan);
    hpml_metrics      m = { 0 };
    int64_t           n;
    double            sums[2] = { 0, 0 };
    hpml_trainer_fit(t, digits(ctx, 0, to_learn), &(hpml_fit_desc){ .epochs = j->epochs });
    float *w = hpml_trainer_array(t, HPML_ARRAY_VALUES, &n), *own = (float *)malloc(sizeof(float) * (size_t)n);
    if (!w || !own) return HPML_ERR_MEMORY;
    memcpy(own, w, sizeof(float) * (size_t)n);
    hpml_distribute_finish(d);
    for (int64_t k = 0; k < n; k++) {
        double off = (double)own[k] - (double)w[k];
        sums[0] += off * off;
        sums[1] += (double)w[k] * (double)w[k];
    }
    free(own);
    hpml_allreduce(c, sums, 2, &(hpml_allreduce_desc){ .element = HPML_ELEMENT_F64 });
    if (hpml_comm_rank(c) == 0 && hpml_trainer_evaluate(t, digits(ctx, to_learn, TESTED), &m) == HPML_OK) {
        j->accuracy = m.accuracy;
        j->spread   = sqrt(sums[0] / sums[1]);
    }
    return hpml_ctx_status(ctx);
}

static bool learned(lesson *j)
{
    char             text[512];
    hpml_launch_desc l = { .ranks = j->ranks, .timeout = 60, .ctx = { .seed = j->seed, .threads = 1 } };
    if (hpml_launch(&l, learn, j, text, sizeof text) == HPML_OK) return true;
    printf("    %s\n", text);
    return false;
}

/* What each strategy must reach, and what it is compared with. */
typedef struct goal { lesson lesson; double accuracy, spread; const char *name; } goal;

static const goal goals[] = {
    { { LOCAL(.period = 10), 4, 32, 15, 0.05, 0.9, 1, 0, 0 }, 0.955, 1, "local, period 10" },
    { { LOCAL(.period = 50), 4, 32, 15, 0.05, 0.9, 1, 0, 0 }, 0.955, 1, "local, period 50" },
    { { BLOCK(.period = 10), 4, 32, 15, 0.05, 0.9, 1, 0, 0 }, 0.950, 1, "block, period 10" },
    { { BLOCK(.period = 10, .outer_nesterov = true), 4, 32, 15, 0.05, 0.9, 1, 0, 0 }, 0.950, 1, "block, nesterov" },
    { { ELASTIC(.period = 10, .elastic = 0.2f), 4, 32, 15, 0.05, 0.9, 1, 0, 0 }, 0.955, 1, "elastic, period 10, 0.2" },
    { { GOSSIP(.topology = HPML_TOPOLOGY_RING), 8, 16, 15, 0.5, 0, 1, 0, 0 }, 0.958, 0.05, "gossip, ring of 8" },
    { { GOSSIP(.topology = HPML_TOPOLOGY_WHEEL), 8, 16, 15, 0.5, 0, 1, 0, 0 }, 0.955, 0.05, "gossip, wheel of 8" },
    { { GOSSIP(.topology = HPML_TOPOLOGY_PAIRS), 8, 16, 15, 0.5, 0, 1, 0, 0 }, 0.955, 0.05, "gossip, pairs of 8" },
};

/* Inserts x into a list of n numbers that are in order. */
static void insert(double *list, int n, double x)
{
    for (; n > 0 && list[n - 1] > x; n--) list[n] = list[n - 1];
    list[n] = x;
}

/* Five seeds each: the median reaches the goal. */
TEST_ACCURACY(accuracy_of_each_strategy)
{
    get_digits(8000);
    for (size_t i = 0; i < sizeof goals / sizeof goals[0]; i++) {
        double accuracy[5], spread[5];
        for (int seed = 0; seed < 5; seed++) {
            lesson j = goals[i].lesson;
            j.seed = (uint64_t)seed + 1;
            ENSURE(learned(&j));
            insert(accuracy, seed, j.accuracy);
            insert(spread, seed, j.spread);
        }
        printf("    %s: %.2f to %.2f %%, median %.2f %%; spread %.2f to %.2f %%, median %.2f %%\n", goals[i].name,
               100 * accuracy[0], 100 * accuracy[4], 100 * accuracy[2], 100 * spread[0], 100 * spread[4],
               100 * spread[2]);
        ENSURE(accuracy[2] >= goals[i].accuracy && spread[2] <= goals[i].spread);
    }
}

/* A short lesson of each strategy, by one field of the plan. */
TEST_PLAIN(each_strategy_learns)
{
    get_digits(8000);
    for (int strategy = 0; strategy <= HPML_STRATEGY_GOSSIP; strategy++) { /* those with servers: test_servers.c */
        if (strategy > HPML_STRATEGY_SYNC && strategy < HPML_STRATEGY_LOCAL) continue;
        lesson j = { .plan.strategy = (hpml_strategy_kind)strategy, .ranks = 4, .batch = 32, .epochs = 2, .lr = 0.1,
                     .momentum = 0.5, .seed = 1 };
        ENSURE(learned(&j));
        printf("    %s: %.2f %%\n", hpml_strategy_name((hpml_strategy_kind)strategy), 100 * j.accuracy);
        ENSURE(j.accuracy > 0.8);
    }
}
